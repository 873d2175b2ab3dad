#!/usr/bin/env python3
"""Write a small Qwen3-Omni-shaped checkpoint with random weights, in the real format."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from stagelaunch.core.errors import ExitCode, UsageError
from stagelaunch.core.units import format_size
from stagelaunch.weights.synthetic import TINY_CONFIG, write_checkpoint

SIZES = {"tiny": TINY_CONFIG}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(ExitCode.USAGE, f"make_checkpoint: {message}\n")


def main() -> int:
    parser = _Parser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="directory to create")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same bytes (default 0)")
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--force", action="store_true", help="replace a checkpoint that is there")
    args = parser.parse_args()
    if args.seed < 0:
        parser.error("--seed must not be negative")
    try:
        total_bytes = write_checkpoint(args.out, seed=args.seed, config=SIZES[args.size], force=args.force)
    except UsageError as error:
        parser.error(str(error))
    print(f"wrote {args.out}: {format_size(total_bytes)} of weights", file=sys.stderr)
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main())
