"""Reads a deployment file: YAML (or JSON) to a ``Deployment``, every fault with its file, line and key in one go.

Nothing else is read: not the checkpoint, not a device. ``yaml_tree`` turns text into data and lines.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from stagelaunch.core.config import SECTIONS, Deployment, Stage, key_names
from stagelaunch.core.config_rules import Loc, all_conflicts, path_text
from stagelaunch.core.errors import ConfigError, Fault
from stagelaunch.core.identity import Resolution, cuda_view, resolve, view
from stagelaunch.core.inventory import Inventory, SimulatedMachine
from stagelaunch.yaml_tree import AGAIN, Tree, TreeError, parse_tree

MAX_FILE_BYTES = 1024 * 1024


@dataclass(frozen=True)
class LoadedDeployment:
    """A deployment and where it was read from; paths of the file resolved against its directory."""

    deployment: Deployment
    path: Path
    """The config file, absolute."""

    @property
    def model_dir(self) -> Path:
        """Directory of the checkpoint."""
        return self._resolve(self.deployment.model)

    def with_model_as_it_is(self) -> LoadedDeployment:
        """The same, with the directory that the checkpoint's path leads to now: a link that is turned to another
        version while stages boot must not give stages of both."""
        model = os.path.realpath(self.model_dir)
        return replace(self, deployment=self.deployment.model_copy(update={"model": model}))

    @property
    def lock_dir(self) -> Path:
        """Directory of the device locks."""
        return self._resolve(self.deployment.lock_dir)

    @property
    def runtime_dir(self) -> Path | None:
        """Directory of sockets, logs and reports; None: the default."""
        given = self.deployment.runtime_dir
        return None if given is None else self._resolve(given)

    @property
    def simulated_file(self) -> Path | None:
        """File of the simulated devices; None: the default, or no simulated machine."""
        machine = self.deployment.simulated
        return None if machine is None or machine.file is None else self._resolve(machine.file)

    def machine(self, default_file: Path) -> SimulatedMachine | None:
        """The simulated machine, kept in ``default_file`` where the config names none; None for backend cuda."""
        simulated = self.deployment.simulated
        if simulated is None:
            return None
        return SimulatedMachine(
            path=self.simulated_file or default_file,
            total_bytes=dict(simulated.devices),
            context_bytes=simulated.context_bytes,
            transfer_bytes_per_s=simulated.transfer_bytes_per_s,
        )

    def resolve(self, inventory: Inventory, environment: Mapping[str, str]) -> Resolution:
        """The devices the stages mean on this machine, for a CUDA program in ``environment``.

        ConfigError for a stage that names one device twice, NoDeviceError for a CUDA_VISIBLE_DEVICES that is no list.
        """
        seen = cuda_view(inventory, environment) if self.deployment.backend == "cuda" else view(inventory)
        resolution = resolve(self.deployment.stage_refs, seen)
        if resolution.twice:
            shown = str(self.path)
            raise ConfigError(tuple(Fault(shown, None, path_text(c.loc), c.text) for c in resolution.twice))
        return resolution

    def _resolve(self, written: str) -> Path:
        # normpath, not resolve(): a link to a checkpoint should show up in messages as the user wrote it.
        return Path(os.path.normpath(self.path.parent / Path(written).expanduser()))


def load_deployment(path: str | Path) -> LoadedDeployment:
    """The deployment of a file. ConfigError with every fault of the file."""
    shown = str(path)
    text = _read(Path(path), shown)
    try:
        tree = parse_tree(text)
    except TreeError as error:
        raise ConfigError((Fault(shown, error.line, None, error.text),)) from None
    deployment = _validate(tree, shown)
    return LoadedDeployment(deployment, Path(os.path.abspath(path)))


def _read(path: Path, shown: str) -> str:
    def fault(text: str, line: int | None = None) -> ConfigError:
        return ConfigError((Fault(shown, line, None, text),))

    try:
        if path.is_dir():
            raise fault("is a directory; name the config file in it")
        with path.open("rb") as file:
            body = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise fault("no such file; check the path") from None
    except (OSError, ValueError) as error:
        raise fault(f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(body) > MAX_FILE_BYTES:
        raise fault("is larger than 1 MiB; this is not a deployment file")
    try:
        return body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = body.count(b"\n", 0, error.start) + 1
        raise fault(f"byte {body[error.start]:#04x} is not UTF-8; save the file as UTF-8", line) from None


def _validate(tree: Tree, shown: str) -> Deployment:
    found: dict[Loc, str] = dict(tree.faults)
    # A value that holds something unreadable is wrong in ways that follow from it. Not so for a key given twice.
    spoilt = {loc[:n] for loc in tree.faults if loc[-1:] != (AGAIN,) for n in range(1, len(loc))}
    deployment: Deployment | None = None
    if () not in found:
        try:
            deployment = Deployment.model_validate(tree.value)
        except ValidationError as error:
            for detail in error.errors(include_url=False):
                loc, text = _field_fault(detail, tree)
                if loc not in spoilt or detail["type"] not in _FOLLOWS:
                    _record(found, loc, text)
        for conflict in all_conflicts(tree.value):
            _record(found, conflict.loc, conflict.text)
        for loc, text in tree.oddities.items():
            _record(found, loc, text)
    if found or deployment is None:
        raise ConfigError(tuple(_in_order(found, tree, shown)))
    return deployment


def _record(found: dict[Loc, str], loc: Loc, text: str) -> None:
    """The first fault of a place stands; what follows from it, at the place or below, is not repeated."""
    if text and not any(loc[:length] in found for length in range(len(loc) + 1)):
        found[loc] = text


def _in_order(found: dict[Loc, str], tree: Tree, shown: str) -> Iterator[Fault]:
    for loc, text in sorted(found.items(), key=lambda item: tree.line(item[0])):
        key = path_text(loc[:-1] if loc[-1:] == (AGAIN,) else loc)
        yield Fault(shown, tree.line(loc), key or None, text)


def _field_fault(detail: ErrorDetails, tree: Tree) -> tuple[Loc, str]:
    """Place and text of one pydantic error; an empty text for conflicts, which are found on the raw data."""
    loc, value, kind = detail["loc"], detail["input"], detail["type"]
    ctx: dict[str, Any] = detail.get("ctx", {})
    if loc and loc[-1] == "[key]":
        loc = loc[:-1]
    match kind:
        case "conflict":
            return loc, ""
        case "missing":
            return loc, "is missing; add it"
        case "extra_forbidden" | "invalid_key":
            return loc, _unknown_key(loc)
        case "value_error":
            return loc, str(ctx["error"])
        case "literal_error":
            return (
                loc,
                f"{tree.shown(loc, value)} is not one of {ctx['expected']}{_did_you_mean(value, ctx['expected'])}",
            )
        case "greater_than_equal" | "greater_than" | "less_than_equal":
            return loc, f"{tree.shown(loc, value)} is out of range: must be {_RANGES[kind]} {next(iter(ctx.values()))}"
        case _:
            return loc, _wrong_type(kind, value, tree.shown(loc, value), loc in tree.plain)


_FOLLOWS = ("string_type", "value_error", "literal_error")
"""Errors about a value as a whole, which say nothing new where a part of it could not be read."""
_RANGES = {"greater_than_equal": "at least", "greater_than": "above", "less_than_equal": "at most"}
_WANTED = {
    "string": "a text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "finite": "a finite number",
    "device": "a device number or a UUID like GPU-8932f937",
    "model": "a section of 'key: value' lines",
    "dict": "a section of 'key: value' lines",
    "tuple": "a list like [0, 1]",
}


def _wrong_type(kind: str, value: object, shown: str, is_plain: bool) -> str:
    wanted = _WANTED.get(kind.split("_")[0], "another kind of value")
    if value is None:
        return f"is empty; give {wanted} or leave the key out"
    if wanted == "a text" and is_plain:
        read_as = _READ_AS.get(type(value), "a date")
        return f'{shown} is read by YAML as {read_as}, not as a text; quote it: "{shown}"'
    if wanted in ("a whole number", "a number") and isinstance(value, str):
        return f"{shown} is a text; give {wanted} without quotes"
    return f"{shown} is not {wanted}"


_READ_AS: dict[type, str] = {bool: "true/false", int: "a number", float: "a number"}


def _section(loc: Loc) -> type[BaseModel] | None:
    match loc:
        case (_,):
            return Deployment
        case ("timeouts" | "simulated" as name, _):
            return SECTIONS[str(name)]
        case ("stages", int(), _):
            return Stage
        case ("stages", int(), "weights", _):
            return SECTIONS["weights"]
    return None


def _unknown_key(loc: Loc) -> str:
    section, key = _section(loc), loc[-1]
    if section is None or not isinstance(key, str):
        return "unknown key; take it out"
    if section is Deployment and key in key_names(Stage):
        return "unknown key here; it belongs to each stage"
    hint = _closest(key, key_names(section))
    return f"unknown key; did you mean {hint!r}?" if hint else f"unknown key; known are {', '.join(key_names(section))}"


def _did_you_mean(value: object, expected: str) -> str:
    hint = (
        _closest(value, expected.replace(" or ", ", ").replace("'", "").split(", ")) if isinstance(value, str) else None
    )
    return f"; did you mean {hint!r}?" if hint else ""


def _closest(word: object, known: Iterable[str]) -> str | None:
    """The known word most like this one, whatever its case; None if none is near."""
    lowered = {name.lower(): name for name in known}
    near = difflib.get_close_matches(str(word)[:80].lower().replace("-", "_"), lowered, n=1, cutoff=0.6)
    return lowered[near[0]] if near else None
