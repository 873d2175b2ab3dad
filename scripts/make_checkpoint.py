#!/usr/bin/env python3
"""Write a Qwen3-Omni-shaped checkpoint in the real format: small with random weights, or real-size, headers only."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from stagelaunch.core.errors import ExitCode, UsageError
from stagelaunch.core.units import format_size
from stagelaunch.weights.synthetic import NUM_SHARDS, PUBLISHED_SHARDS, TINY_CONFIG, published_config, write_checkpoint

SIZES = {"tiny": (TINY_CONFIG, NUM_SHARDS), "30b": (published_config(), PUBLISHED_SHARDS)}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(ExitCode.USAGE, f"make_checkpoint: {message}\n")


def main() -> int:
    parser = _Parser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="directory to create")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same bytes (default 0)")
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: tiny float32, 30b bfloat16")
    parser.add_argument(
        "--headers-only",
        action="store_true",
        help="true shapes and file sizes, no data, no disk space: to plan with",
    )
    parser.add_argument("--force", action="store_true", help="replace a checkpoint that is there")
    args = parser.parse_args()
    if args.seed < 0:
        parser.error("--seed must not be negative")
    if args.size == "30b" and not args.headers_only:
        parser.error("--size 30b would write over 60 GB of random numbers; add --headers-only, which is enough to plan")
    config, num_shards = SIZES[args.size]
    if args.dtype is not None:
        config = {**config, "dtype": args.dtype}
    try:
        total_bytes = write_checkpoint(
            args.out,
            seed=args.seed,
            config=config,
            force=args.force,
            headers_only=args.headers_only,
            num_shards=num_shards,
        )
    except UsageError as error:
        parser.error(str(error))
    what = "headers only, no data, of " if args.headers_only else ""
    print(f"wrote {args.out}: {what}{format_size(total_bytes)} of weights", file=sys.stderr)
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main())
