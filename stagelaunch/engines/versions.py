"""The library versions the built-in engine is written for. Needs none of them."""

from __future__ import annotations

TRANSFORMERS_MINOR = "5.24"
"""Its Qwen3-Omni module tree differs between minors: one is accepted, the same as in pyproject.toml."""
