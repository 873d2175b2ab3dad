"""Reads values out of config.json one by one and collects what is wrong, instead of stopping at the first fault."""

from __future__ import annotations

from typing import Any

from stagelaunch.core.errors import CheckpointError, Fault

MAX_DIM = 2**31
MAX_LAYERS = 512
MAX_EXPERTS = 1024
"""Bounds on what multiplies the number of tensors: a typo in a config must not fill the memory with names."""


class Section:
    """One object of config.json, read key by key; what is wrong is collected in ``faults`` and read as 1."""

    def __init__(self, values: object, path: str, faults: list[Fault]) -> None:
        self.path = path
        self.faults = faults
        self.values: dict[str, Any] = values if isinstance(values, dict) else {}
        if values is not None and not isinstance(values, dict):
            self.fault(None, "is not an object; correct it")

    def fault(self, key: str | None, text: str) -> None:
        """Note that ``key`` of this section, or the section itself, is wrong."""
        path = ".".join(part for part in (self.path, key) if part)
        self.faults.append(Fault("config.json", None, path, text))

    def section(self, key: str) -> Section:
        """The object at ``key``; an empty one if it is not there, so that every default applies."""
        return Section(self.values.get(key), f"{self.path}.{key}" if self.path else key, self.faults)

    def number(
        self, key: str, default: int | None, *, alias: str | None = None, at_least: int = 1, at_most: int = MAX_DIM
    ) -> int:
        """A whole number in range. Without a default the key is required: transformers has none either."""
        key = alias if alias is not None and alias in self.values else key
        value = self.values.get(key, default)
        if type(value) is int and at_least <= value <= at_most:
            return value
        if value is None and key not in self.values:
            self.fault(key, "is missing, and has no default; take config.json from the model's hub page")
        else:
            self.fault(key, f"is {value!r:.80}, not a whole number from {at_least} to {at_most}; correct it")
        return 1

    def numbers(self, key: str, default: tuple[int, ...], *, at_least: int = 1) -> tuple[int, ...]:
        """A list of whole numbers, at most as many as layers may be; null counts as ``default``."""
        value = self.values.get(key)
        value = default if value is None else value
        is_list = isinstance(value, (list, tuple)) and len(value) <= MAX_LAYERS
        if is_list and all(type(item) is int and at_least <= item <= MAX_DIM for item in value):
            return tuple(value)
        self.fault(key, f"is {value!r:.80}, not a list of whole numbers; correct it")
        return default

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.values.get(key, default)
        if isinstance(value, bool):
            return value
        self.fault(key, f"is {value!r:.80}, not true or false; correct it")
        return default

    def refuse_tied(self) -> None:
        """Tied embeddings would leave one of the two keys out of the checkpoint; no published Omni model has them."""
        if self.flag("tie_word_embeddings", False):
            self.fault(
                "tie_word_embeddings", "is true, which is not supported; use a checkpoint with untied embeddings"
            )

    def raise_faults(self) -> None:
        """CheckpointError with everything collected, here and in every other section of the file."""
        if self.faults:
            raise CheckpointError(tuple(self.faults))
