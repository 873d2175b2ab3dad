"""Which device a config means: numbers, UUIDs and abbreviations become one DeviceInfo each, once.

Not an inventory and not the environment: the devices and the values of CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER
are data the caller read. Called by ``config_file`` for ``up``, ``plan`` and ``doctor``, and by ``config_fields`` for
the forms a reference may have.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from stagelaunch.core.config_rules import Conflict
from stagelaunch.core.errors import NoDeviceError
from stagelaunch.core.inventory import DeviceInfo, Inventory, UnusableDevice

DeviceRef = int | str
"""How a config names a device: a number, or a (part of a) UUID in the writing of ``read_ref``."""
UUID_REF_PATTERN = r"((GPU|MIG|SIM)-[0-9A-Fa-f-]{1,36}|MIG-GPU-[0-9A-Fa-f-]{36}/[0-9]+/[0-9]+)"
"""Every text that is a reference, and some that are none (dashes in odd places)."""

_LEGACY_MIG = re.compile(r"MIG-GPU-(?P<uuid>[0-9A-Fa-f-]{36})/[0-9]{1,3}/[0-9]{1,3}")
_UUID = re.compile(r"(?P<kind>GPU|MIG|SIM)-(?P<uuid>[0-9A-Fa-f-]{1,36})")
_DASHES_AT = (8, 13, 18, 23)
_NOTHING_MORE = re.compile(r"-[0-9]+|NoDevFiles|")
_SHOWN = 3

Known = DeviceInfo | UnusableDevice


def read_ref(text: str) -> str:
    """A UUID of a device or the beginning of one, in the driver's writing. ValueError for any other form.

    ``GPU-8932f937``, ``MIG-...``, ``SIM-...``, and in full only the older ``MIG-GPU-<uuid>/<gi>/<ci>``.
    """
    found = _LEGACY_MIG.fullmatch(text) or _UUID.fullmatch(text)
    if found is None or not _begins_a_uuid(found["uuid"]):
        raise ValueError(f"{text[:60]!r} is not a device: give a number, or a UUID like GPU-8932f937 or MIG-...")
    return text.replace(found["uuid"], found["uuid"].lower())


def _begins_a_uuid(text: str) -> bool:
    return all((char == "-") == (place in _DASHES_AT) for place, char in enumerate(text))


@dataclass(frozen=True)
class View:
    """The devices as a CUDA program sees them."""

    devices: tuple[DeviceInfo, ...]
    """Those that can be used, by number: the driver's, or the position in CUDA_VISIBLE_DEVICES where that is set."""
    known: tuple[Known, ...]
    """Every device of the machine, by the driver's number."""
    places: tuple[Known, ...] | None = None
    """What stands at each position of CUDA_VISIBLE_DEVICES; None where it is not set."""
    setting: str = ""
    """``CUDA_VISIBLE_DEVICES=1,0``, with what was wrong with an entry that ended it."""


def view(inventory: Inventory, visible: str | None = None, order: str | None = None) -> View:
    """What the values of CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER (None: not set) leave of an inventory.

    As in CUDA, the first entry that is not there hides itself and all after it. NoDeviceError for a list that
    cannot be read with certainty: an unknown or ambiguous entry, a device twice, numbers whose order is not known.
    """
    known = _sorted_known(inventory)
    if visible is None:
        return View(inventory.devices, known)
    setting = f"CUDA_VISIBLE_DEVICES={visible}"
    places, ended = _places(setting, visible, order, known)
    seen = [replace(place, index=at) for at, place in enumerate(places) if isinstance(place, DeviceInfo)]
    return View(tuple(seen), known, tuple(places), setting + ended)


def cuda_view(inventory: Inventory, environment: Mapping[str, str]) -> View:
    """What a CUDA program in this environment sees. NoDeviceError as for ``view``."""
    return view(inventory, environment.get("CUDA_VISIBLE_DEVICES"), environment.get("CUDA_DEVICE_ORDER"))


@dataclass(frozen=True)
class Resolution:
    """Every reference of a deployment as one device."""

    numbers: Mapping[DeviceRef, int]
    """By reference, the ``index`` of its device; one that no device has for a reference without a usable device."""
    devices: tuple[DeviceInfo, ...]
    """All usable devices, used or not."""
    absent: Mapping[int, str]
    """One finding for each number without a usable device."""
    written: Mapping[int, str]
    """How the config names each device that is not usable, by number."""
    twice: tuple[Conflict, ...]
    """Stages that name one device in two forms."""


def resolve(stage_refs: Mapping[int, Sequence[DeviceRef]], seen: View) -> Resolution:
    """The devices that stages (by id) mean. What is not there has its finding, what is there is one device."""
    found = {ref: _find(ref, seen) for ref in _all_refs(stage_refs)}
    usable = {ref: info for ref, info in found.items() if isinstance(info, DeviceInfo)}
    numbers = _numbers(found, {info.index for info in seen.devices})
    causes = {ref: cause for ref, cause in found.items() if isinstance(cause, str)}
    return Resolution(
        numbers=numbers,
        devices=seen.devices,
        absent={numbers[ref]: _absent_text(ref, cause, stage_refs) for ref, cause in causes.items()},
        written={numbers[ref]: str(ref) for ref in causes},
        twice=tuple(_twice(stage_refs, usable)),
    )


def number_refs(refs: Iterable[DeviceRef]) -> dict[DeviceRef, int]:
    """A number for each reference without looking at a machine: numbers stay, each text is a device of its own."""
    return _numbers(dict.fromkeys(refs, ""), ())


def same_devices(before: Mapping[int, DeviceInfo], listed: Collection[DeviceInfo]) -> dict[int, DeviceInfo]:
    """The devices of ``before`` as a later list has them, by their numbers of then; one that is gone is left out.

    By UUID: the driver's numbers shift when a card falls off the bus.
    """
    now = {info.uuid: info for info in listed}
    return {index: replace(now[old.uuid], index=index) for index, old in before.items() if old.uuid in now}


def is_mig(uuid: str) -> bool:
    """Whether a UUID is one of a MIG device."""
    return uuid.startswith("MIG-")


# One reference against the devices: a DeviceInfo, or why there is none.


def _find(ref: DeviceRef, seen: View) -> DeviceInfo | str:
    found = _by_uuid(ref, seen.known) if isinstance(ref, str) else _by_number(ref, seen)
    if isinstance(found, UnusableDevice):
        return found.reason
    if isinstance(found, str):
        return found
    for info in seen.devices:
        if info.uuid == found.uuid:
            return info
    return f"it is not among those of {seen.setting}; add it there, or name one that is ({_numbered(seen.devices)})"


def _by_number(number: int, seen: View) -> Known | str:
    if seen.places is None:
        for device in seen.known:
            if device.index == number:
                uuid = device.uuid or ""
                return (
                    f"numbers are for whole GPUs; name the MIG device by its UUID, {uuid}" if is_mig(uuid) else device
                )
        return f"there is no such device; name one that is there ({_numbered(seen.devices)})"
    if number < len(seen.places):
        return seen.places[number]
    return (
        f"there is no such position in {seen.setting}; name one of its devices by position "
        f"({_numbered(seen.devices)}) or by UUID"
    )


def _by_uuid(ref: str, known: Sequence[Known]) -> Known | str:
    matches = [device for device in known if device.uuid is not None and _is_begun_by(device.uuid, ref)]
    exact = [device for device in matches if len(ref) == len(device.uuid or "")]
    match exact or matches:
        case [device]:
            return device
        case []:
            return f"there is no such device{_unasked(known)}; name one that is there ({_uuids(known) or 'none'})"
        case _:
            return f"it may be {_uuids(matches)}; write more of it"


def _is_begun_by(uuid: str, ref: str) -> bool:
    # The older form of a MIG UUID is a name in itself: MIG-GPU-... begins nothing else.
    return uuid.lower() == ref.lower() if "/" in uuid else uuid.lower().startswith(ref.lower())


def _unasked(known: Sequence[Known]) -> str:
    """The devices that might be the one asked for, had they said who they are."""
    silent = [device for device in known if isinstance(device, UnusableDevice) and device.uuid is None]
    return "".join(f" (of device {device.index} nobody knows: {device.reason})" for device in silent)


def _uuids(known: Iterable[Known]) -> str:
    uuids = [device.uuid for device in known if device.uuid is not None]
    return ", ".join(uuids[:_SHOWN]) + (", ..." if len(uuids) > _SHOWN else "")


def _numbered(devices: Iterable[DeviceInfo]) -> str:
    return ", ".join(str(info.index) for info in devices if not is_mig(info.uuid)) or "none"


# All references of a deployment.


def _all_refs(stage_refs: Mapping[int, Sequence[DeviceRef]]) -> list[DeviceRef]:
    return list(dict.fromkeys(ref for refs in stage_refs.values() for ref in refs))


def _numbers(found: Mapping[DeviceRef, DeviceInfo | str], taken: Collection[int]) -> dict[DeviceRef, int]:
    numbers = {ref: info.index for ref, info in found.items() if isinstance(info, DeviceInfo)}
    for ref in found:
        if isinstance(ref, int) and ref not in numbers and ref not in taken:
            numbers[ref] = ref
    free = max([-1, *taken, *numbers.values()]) + 1
    rest = [ref for ref in found if ref not in numbers]
    return {**numbers, **{ref: free + place for place, ref in enumerate(rest)}}


def _absent_text(ref: DeviceRef, cause: str, stage_refs: Mapping[int, Sequence[DeviceRef]]) -> str:
    who = ", ".join(f"stage {stage}" for stage, refs in sorted(stage_refs.items()) if ref in refs)
    return f"device {ref}: asked for by {who}, but {cause}"


def _twice(stage_refs: Mapping[int, Sequence[DeviceRef]], usable: Mapping[DeviceRef, DeviceInfo]) -> Iterable[Conflict]:
    for position, refs in enumerate(stage_refs.values()):
        first: dict[str, DeviceRef] = {}
        for place, ref in enumerate(refs):
            info = usable.get(ref)
            other = ref if info is None else first.setdefault(info.uuid, ref)
            if info is not None and other != ref:
                text = f"{ref} and {other} are the same device, {info.uuid}; name it once"
                yield Conflict(("stages", position, "devices", place), text)


# CUDA_VISIBLE_DEVICES.


def _sorted_known(inventory: Inventory) -> tuple[Known, ...]:
    return tuple(sorted((*inventory.devices, *inventory.unusable), key=lambda device: device.index))


def _places(setting: str, visible: str, order: str | None, known: Sequence[Known]) -> tuple[list[Known], str]:
    """What stands at each position, and what ended the list early, if anything did."""
    places: list[Known] = []
    for entry in map(str.strip, visible.split(",")):
        if _NOTHING_MORE.fullmatch(entry):
            return places, ""
        device = _entry(setting, entry, order, known)
        if device is None:
            return places, f" (which ends at {entry}: there is no such device{_unasked(known)})"
        if device in places:
            raise _unreadable(setting, f"{entry} is a device that it names before; name each device once")
        places.append(device)
    return places, ""


def _entry(setting: str, entry: str, order: str | None, known: Sequence[Known]) -> Known | None:
    if re.fullmatch(r"[0-9]{1,9}", entry):
        _check_order(setting, order, known)
        gpus = (device for device in known if not is_mig(device.uuid or ""))
        return next((device for device in gpus if device.index == int(entry)), None)
    try:
        ref = read_ref(entry)
    except ValueError as error:
        raise _unreadable(setting, str(error)) from None
    matches = [device for device in known if device.uuid is not None and _is_begun_by(device.uuid, ref)]
    if len(matches) > 1:
        raise _unreadable(setting, f"{entry} may be {_uuids(matches)}; write more of it")
    return matches[0] if matches else None


def _check_order(setting: str, order: str | None, known: Sequence[Known]) -> None:
    """Numbers are the driver's only by PCI bus, or where all GPUs are alike: else CUDA counts the fastest first."""
    gpus = [device for device in known if not is_mig(device.uuid or "")]
    names = {device.name for device in gpus}
    if order == "PCI_BUS_ID" or len(gpus) < 2 or (len(names) == 1 and None not in names):
        return
    shown = ", ".join(sorted(name or "one that does not say its name" for name in names))
    raise _unreadable(
        setting,
        f"it has numbers, which CUDA gives by speed where GPUs differ ({shown}); set CUDA_DEVICE_ORDER=PCI_BUS_ID, or"
        " name the devices by UUID",
    )


def _unreadable(setting: str, cause: str) -> NoDeviceError:
    return NoDeviceError((f"cannot tell which devices {setting} means: {cause}",))
