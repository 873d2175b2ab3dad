"""What a deployment file may say: the models, their rules, and the JSON Schema. Reads no file.

Attributes carry their unit (``reserve_bytes``); the file uses the plain name (``reserve``). Rules between fields live
in ``core.config_rules``, which also runs over a file whose fields are partly wrong, so that all faults come in one
go. ``config_file`` adds line numbers.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictBool, model_validator
from pydantic_core import PydanticCustomError

from stagelaunch.core.config_fields import (
    AT_LEAST_ONE,
    Attempts,
    Budget,
    Count,
    Duration,
    Engine,
    EnvName,
    EnvValue,
    Graphs,
    Index,
    KVWeight,
    MachineDevices,
    Rate,
    Size,
    SizeAboveZero,
    Slug,
    StageDevices,
    Text,
    Threads,
    Utilization,
    not_empty,
)
from stagelaunch.core.config_rules import (
    ENGINE_QWEN3_OMNI,
    Conflict,
    between_restarts,
    between_timeouts,
    in_stage,
    in_whole,
)
from stagelaunch.core.identity import DeviceRef
from stagelaunch.core.units import GIB, MIB

# Built on first use: the whole holds its parts, and most of these are never checked by themselves.
_MODEL = ConfigDict(frozen=True, extra="forbid", defer_build=True)


def _refuse(conflicts: tuple[Conflict, ...]) -> None:
    if conflicts:
        text = "; ".join(str(conflict) for conflict in conflicts)
        raise PydanticCustomError("conflict", "{text}", {"text": text})


class Timeouts(BaseModel):
    """How long things may take. Each bound lies inside the next, so that the narrowest one speaks first."""

    model_config = _MODEL

    phase_s: Duration = Field(default=300.0, alias="phase")
    """Longest time a stage may work in one phase; waiting for its device lock does not count."""
    stage_s: Duration = Field(default=600.0, alias="stage")
    """Longest time from spawn to ready of one stage."""
    boot_s: Duration = Field(default=900.0, alias="boot")
    """Longest time until every stage is ready."""
    lock_s: Duration = Field(default=300.0, alias="lock")
    """Longest wait for one device lock."""
    heartbeat_s: Duration = Field(default=30.0, alias="heartbeat")
    """Longest silence of a stage, booting or ready, before it counts as failed; it is asked three times as often. Once
    all are ready the devices are asked for as often; one that is lost twice in a row fails its stages."""
    stop_s: Duration = Field(default=15.0, alias="stop")
    """Grace period of a ready stage: between asking it to stop and killing it."""
    stop_booting_s: Duration = Field(default=3.0, alias="stop_booting")
    """Grace period of a stage that is still booting: between SIGTERM and SIGKILL; never longer than ``stop``."""
    memory_s: Duration = Field(default=15.0, alias="memory")
    """Longest wait, once all stages are gone, for their device memory to be back."""
    driver_s: Duration = Field(default=30.0, alias="driver")
    """Longest wait for what the driver says about the devices; it can hang."""

    @model_validator(mode="after")
    def _bounds_nest(self) -> Timeouts:
        _refuse(between_timeouts(to_raw(self)))
        return self


class Restarts(BaseModel):
    """How often a deployment that was ready may be put right by starting again; used unless on_failure is stop-all."""

    model_config = _MODEL

    max_restarts: Attempts = Field(default=3, alias="max")
    """Restarts allowed within ``within``: of each stage (restart-stage), or of the whole (restart-all). The failure
    after the last one stops all."""
    within_s: Duration = Field(default=600.0, alias="within")
    """A restart longer ago than this no longer counts."""
    backoff_s: Duration = Field(default=1.0, alias="backoff")
    """Pause before the first restart; each further one that counts doubles it."""
    backoff_max_s: Duration = Field(default=60.0, alias="backoff_max")
    """Longest pause before a restart; at least ``backoff``."""

    @model_validator(mode="after")
    def _pauses_ascend(self) -> Restarts:
        _refuse(between_restarts(to_raw(self)))
        return self


class Logs(BaseModel):
    """The log files of the stages."""

    model_config = _MODEL

    max_size_bytes: SizeAboveZero = Field(default=64 * MIB, alias="max_size")
    """A stage's log that has grown beyond this is put aside as STAGE.log.1, and a new one begun."""
    keep: Attempts = 3
    """How many logs that were put aside are kept for each stage."""


class Simulated(BaseModel):
    """The simulated machine: its devices and what they cost."""

    model_config = _MODEL

    file: Text | None = None
    """File that holds the devices, relative to the config file; left out: the machine's one file."""
    devices: MachineDevices
    """Capacity by device number, like ``{0: 1GiB, 1: 1GiB}``."""
    context_bytes: Size = Field(default=64 * MIB, alias="context")
    """What every process pays for its device context."""
    transfer_bytes_per_s: Rate = Field(default=None, alias="transfer_rate")
    """Rate of host-to-device copies like ``2GiB/s``; left out: as fast as memory."""


class Weights(BaseModel):
    """How a stage reads its weights."""

    model_config = _MODEL

    backend: Literal["auto", "buffered", "direct", "safetensors", "instanttensor"] = "auto"
    """``buffered``: through the page cache; ``direct``: around it; ``auto``: buffered, but direct when the files are
    cold and memory is short; ``safetensors``, ``instanttensor``: by that package, which must be installed."""
    threads: Threads | None = None
    """Threads that read; left out: one for each CPU, at most 8."""


class Stage(BaseModel):
    """One stage of the model: where it runs, what it may take, how much it serves at once."""

    model_config = _MODEL

    id: Index
    """Number of the stage, unique; in serial order stages boot by it."""
    name: Slug
    """Name of the stage, unique; used in every report."""
    devices: StageDevices
    """Devices by number or by UUID, as a whole or its beginning: ``[0]``, ``[GPU-8932f937]``, ``[MIG-...]``.

    A number is the driver's, or the position in CUDA_VISIBLE_DEVICES where that is set.
    """
    component: Text
    """Part of the model the stage runs: thinker, talker or code2wav for engine qwen3-omni; else the engine's word."""
    engine: Engine = ENGINE_QWEN3_OMNI
    """What runs the component: ``qwen3-omni``, or a class of yours as ``package.module:ClassName``."""
    options: dict[Text, EnvValue] = Field(default_factory=dict)
    """Settings the engine alone understands, texts by name."""
    utilization: Utilization | None = None
    """Budget as a fraction of the device's total memory, all-inclusive. Exactly one of utilization and budget."""
    budget: Budget | None = None
    """Budget as a size like ``20GiB`` on each of its devices, all-inclusive; or ``auto``: what the stage needs by
    forecast and, for one with KV cache, its share of what is left. Exactly one of utilization and budget."""
    kv_weight: KVWeight | None = None
    """With ``budget: auto``: its share of what is left of the device, relative to other auto stages; left out: 1."""
    max_num_seqs: Count
    """Largest number of requests in one step."""
    max_num_batched_tokens: Count
    """Largest number of tokens in one step; profiled at boot. At least max_num_seqs."""
    max_model_len: Count
    """Longest request in tokens; the KV cache must hold one."""
    block_size: Count = 16
    """Tokens of one KV-cache block."""
    graphs: Graphs = None
    """Batch sizes to capture as graphs, or ``off``; left out: 1, 2, 4, ... and max_num_seqs."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number format of weights and KV cache; auto: what the checkpoint says."""
    weights: Weights = Field(default_factory=Weights)
    """How the weights are read."""
    env: dict[EnvName, EnvValue] = Field(default_factory=dict)
    """Environment variables of the stage's process, on top of ours."""

    @model_validator(mode="after")
    def _fields_agree(self) -> Stage:
        _refuse(in_stage(to_raw(self)))
        return self

    @property
    def device_indices(self) -> tuple[int, ...]:
        """The numbers of its devices. ValueError while one is still a UUID (``Deployment.on_devices``)."""
        unresolved = [ref for ref in self.devices if not isinstance(ref, int)]
        if unresolved:
            raise ValueError(f"cannot number the devices of stage {self.name}: {unresolved[0]} is not resolved yet")
        return tuple(ref for ref in self.devices if isinstance(ref, int))

    @property
    def demand(self) -> float | int | None:
        """The budget as written: a fraction of the total (float) or bytes (int); None where it is to be worked out."""
        if self.budget is not None:
            return self.budget if isinstance(self.budget, int) else None
        assert self.utilization is not None  # _fields_agree: exactly one of the two
        return float(self.utilization)

    @property
    def capture_sizes(self) -> tuple[int, ...]:
        """Batch sizes to capture, largest first; empty when graphs are off."""
        if self.graphs == "off":
            return ()
        if self.graphs is not None:
            return tuple(sorted(self.graphs, reverse=True))
        powers = {1 << exponent for exponent in range(self.max_num_seqs.bit_length())}
        return tuple(sorted(powers | {self.max_num_seqs}, reverse=True))


class Deployment(BaseModel):
    """All stages of one model on one machine: they boot together or not at all."""

    model_config = _MODEL

    name: Slug
    """Name of the deployment; one of a name runs at a time per machine and user."""
    model: Text
    """Directory of the checkpoint, relative to the config file."""
    backend: Literal["cuda", "simulated"]
    """``cuda``: real GPUs; ``simulated``: devices kept in a file, for machines without one."""
    order: Literal["overlap", "serial"] = "overlap"
    """``overlap``: all stages boot together; ``serial``: stages that share a device boot one after another by id."""
    preload: bool = True
    """Libraries are imported once, in a process that the stages are forked from; ``false``: by each stage itself."""
    reserve_bytes: Size = Field(default=2 * GIB, alias="reserve")
    """Kept free for each stage on each of its devices, on top of its budget."""
    on_failure: Literal["stop-all", "restart-stage", "restart-all"] = "stop-all"
    """When a stage fails after the boot: stop all, start that stage again, or stop all and boot again. A failed boot
    always stops all."""
    restarts: Restarts = Field(default_factory=Restarts)
    """How many restarts on_failure may make, and how soon after each other."""
    memory_tolerance_bytes: Size = Field(default=64 * MIB, alias="memory_tolerance")
    """How much less than before the boot may be free on a device after a stop before it is called missing."""
    prefetch: StrictBool = True
    """Whether the weights are read into the page cache from the start of a boot on, as far as memory allows."""
    logs: Logs = Field(default_factory=Logs)
    """Size and number of the log files."""
    timeouts: Timeouts = Field(default_factory=Timeouts)
    """Deadlines; phase < stage < boot and lock < stage."""
    lock_dir: Text = "/run/lock/stagelaunch"
    """Directory of the device locks; every deployment on the machine must name the same."""
    runtime_dir: Text | None = None
    """Directory of control sockets, logs and reports; left out: one per user."""
    simulated: Simulated | None = None
    """The simulated machine; required with backend simulated, refused with cuda."""
    stages: Annotated[tuple[Stage, ...], AfterValidator(not_empty), AT_LEAST_ONE]
    """The stages, at least one."""

    @model_validator(mode="after")
    def _parts_agree(self) -> Deployment:
        _refuse(in_whole(to_raw(self)))
        return self

    @property
    def stage_refs(self) -> dict[int, tuple[DeviceRef, ...]]:
        """Devices by stage id, as written."""
        return {stage.id: stage.devices for stage in self.stages}

    def on_devices(self, numbers: Mapping[DeviceRef, int]) -> Deployment:
        """The same with every device by its number. KeyError for one that has none."""
        stages = tuple(
            stage.model_copy(update={"devices": tuple(numbers[ref] for ref in stage.devices)}) for stage in self.stages
        )
        return self.model_copy(update={"stages": stages})

    @property
    def stage_devices(self) -> dict[int, tuple[int, ...]]:
        """Device numbers by stage id: what ``init_groups`` takes."""
        return {stage.id: stage.device_indices for stage in self.stages}

    @property
    def device_indices(self) -> tuple[int, ...]:
        """Every device any stage uses, ascending."""
        return tuple(sorted({index for stage in self.stages for index in stage.device_indices}))

    def stage(self, stage_id: int) -> Stage:
        """The stage of an id. KeyError for one that does not exist."""
        for stage in self.stages:
            if stage.id == stage_id:
                return stage
        raise KeyError(stage_id)


SECTIONS: dict[str, type[BaseModel]] = {
    "timeouts": Timeouts,
    "restarts": Restarts,
    "logs": Logs,
    "simulated": Simulated,
    "stages": Stage,
    "weights": Weights,
}


def key_names(model: type[BaseModel]) -> tuple[str, ...]:
    """The keys a section may have, as users write them."""
    return tuple(field.alias or name for name, field in model.model_fields.items())


def to_raw(model: BaseModel) -> dict[str, Any]:
    """What a file would say to give this model: the inverse of ``model_validate``."""
    return model.model_dump(mode="json", by_alias=True, exclude_none=True)


def json_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a deployment file. Rules between fields are not in it."""
    body = Deployment.model_json_schema(by_alias=True)
    _describe(body, Deployment)
    for model in SECTIONS.values():
        _describe(body["$defs"][model.__name__], model)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **body, "title": "stagelaunch deployment"}


def _describe(schema: dict[str, Any], model: type[BaseModel]) -> None:
    """Give each key of the schema the docstring of its field.

    Read from the source, and only here: pydantic's own way does so whenever the models are imported, which would take
    a third of the start of every command.
    """
    (definition,) = ast.parse(inspect.getsource(model)).body
    assert isinstance(definition, ast.ClassDef)
    for line, after in pairwise(definition.body):
        match line, after:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                key = model.model_fields[name].alias or name
                schema["properties"][key]["description"] = inspect.cleandoc(text)
