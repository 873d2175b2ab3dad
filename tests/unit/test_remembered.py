"""What a boot teaches the next one of the same plan: the rules, the file, and the grounds it rests on."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from stagelaunch.core import messages as m
from stagelaunch.core.board import spawned
from stagelaunch.core.engine_spec import EngineSpec
from stagelaunch.core.inventory import DeviceInfo
from stagelaunch.core.ledger import KVLayout, Ledger, Source, Term, fill_ledger
from stagelaunch.core.phases import Phase
from stagelaunch.core.remembered import (
    TOLERANCE_BYTES,
    Readings,
    Remembered,
    broken,
    changed,
    flaw,
    outgrown,
    sized_by,
    unusable,
)
from stagelaunch.core.run_spec import StageRun, run_from_json, runs_to_json
from stagelaunch.core.units import GIB, MIB
from stagelaunch.supervisor import grounds, remembered
from stagelaunch.supervisor.lessons import Lessons
from stagelaunch.supervisor.remembered import recall, remember
from stagelaunch.supervisor.runtime import Runtime
from stagelaunch.supervisor.stage import Stages

RUN = StageRun(
    "d", 3, "talker", "simulated", 1, "SIM-1", None, Path("/l"), 2.5, "e",
    EngineSpec("talker", Path("/c"), "auto", 1, 2, 3, 4, (8, 4), {"a": "b"}), 0.5, None, {"X": "1"},
    Path("/log"), "claim", grounds={"torch": "2", "driver": "5"},
)  # fmt: skip
LAYOUT = KVLayout(2, 2, 64, 4, 16)
NOW = Term(700 * MIB, Source.ALLOCATOR)


def measured() -> Ledger:
    """A boot that has ended: graphs were expected to take 100 MiB and took 90."""
    sized = fill_ledger(
        budget=Term(2 * GIB, Source.CONFIG_BUDGET),
        context=Term(64 * MIB, Source.OWN_PID),
        weights=NOW,
        activations=Term(300 * MIB, Source.PROFILE),
        non_torch=Term(10 * MIB, Source.OWN_PID),
        graphs=Term(100 * MIB, Source.ESTIMATE),
        layout=LAYOUT,
    )
    held = (64 + 700 + 10 + 90) * MIB + sized.kv.size_bytes
    return replace(sized, graphs=Term(90 * MIB, Source.MEASURED), held_bytes=held)


PLAN = measured()
READ = Readings(NOW, PLAN.activations, PLAN.non_torch)
KNOWN = replace(RUN, graphs_correction_bytes=7, remembered=PLAN)


def off(term: Term, by_bytes: int) -> Term:
    return replace(term, size_bytes=term.size_bytes + by_bytes)


# The rules.


def test_a_plan_gives_the_same_blocks_and_says_that_it_is_one() -> None:
    ledger = sized_by(PLAN, PLAN.budget, off(PLAN.context, 5), READ)
    assert (ledger.num_blocks, ledger.graphs_estimate_bytes) == (PLAN.num_blocks, 100 * MIB)
    assert (ledger.context.size_bytes, ledger.context.other_bytes) == (64 * MIB, 64 * MIB + 5)
    assert {ledger.weights.source, ledger.activations.source, ledger.graphs.source} == {Source.REMEMBERED}
    assert (ledger.budget, ledger.kv.source, ledger.held_bytes) == (PLAN.budget, Source.RULE, None)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"budget_bytes": GIB}, "the budget is 1.00 GiB, and was 2.00 GiB"),
        ({"layout": None}, "a KV block takes 0 bytes"),
        ({"context_bytes": 64 * MIB + TOLERANCE_BYTES + 1}, "the context takes"),
        ({"free_bytes": GIB}, "1.00 GiB is free now"),
    ],
)
def test_a_plan_is_used_only_where_everything_is_as_it_was_and_memory_allows(change, why) -> None:
    now = {"budget_bytes": 2 * GIB, "layout": LAYOUT, "context_bytes": 64 * MIB + TOLERANCE_BYTES}
    now |= {"free_bytes": 3 * GIB, "reserved_bytes": 700 * MIB}
    assert unusable(PLAN, **now) is None
    assert why in (unusable(PLAN, **now | change) or "")


@pytest.mark.parametrize("term", ["weights", "activations", "non_torch"])
def test_a_stage_that_has_grown_is_found_before_its_kv_cache(term) -> None:
    def grown(by_bytes: int) -> Readings:
        return replace(READ, **{term: off(getattr(READ, term), by_bytes)})

    assert outgrown(PLAN, grown(TOLERANCE_BYTES)) is None
    assert "and it was" in (outgrown(PLAN, grown(TOLERANCE_BYTES + 1)) or "")


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("what", ["weights", "non_torch", "graphs", "held"])
def test_what_differs_with_everything_in_place_is_found_either_way(what, sign) -> None:
    def ended(by_bytes: int) -> Ledger:
        more = {name: off(getattr(READ, name), by_bytes) for name in (what,) if name in ("weights", "non_torch")}
        sized = sized_by(PLAN, PLAN.budget, PLAN.context, replace(READ, **more))
        held, graphs = PLAN.held_bytes, PLAN.graphs
        if what == "held":
            held += 2 * by_bytes
        return replace(sized, graphs=off(graphs, by_bytes if what == "graphs" else 0), held_bytes=held)

    assert broken(PLAN, ended(sign * TOLERANCE_BYTES)) is None
    assert broken(PLAN, ended(sign * (TOLERANCE_BYTES + 1))) is not None


def test_what_the_first_capture_leaves_for_good_may_count_for_the_weights_or_for_the_graphs() -> None:
    less = replace(READ, weights=off(NOW, -300 * MIB))
    ended = replace(sized_by(PLAN, PLAN.budget, PLAN.context, less), graphs=off(PLAN.graphs, 300 * MIB))
    assert (outgrown(PLAN, less), broken(PLAN, ended)) == (None, None)


def test_a_driver_that_tells_nothing_leaves_the_terms() -> None:
    untold = replace(sized_by(PLAN, PLAN.budget, PLAN.context, READ), graphs=PLAN.graphs)
    assert broken(PLAN, untold) is None


@pytest.mark.parametrize(
    "change",
    [
        {"num_blocks": PLAN.num_blocks + 1},
        {"graphs_estimate_bytes": 0},
        {"weights": Term(-1, Source.ALLOCATOR)},
        {"weights": Term(NOW.size_bytes, Source.ALLOCATOR, -1)},
        {"margin": Term(0, Source.RULE)},
        {"kv": Term(PLAN.kv.size_bytes - 1, Source.RULE)},
        {"held_bytes": 3 * GIB},
        {"held_bytes": 2**60},
        {"activations": Term(2 * GIB, Source.PROFILE)},
    ],
)
def test_what_no_boot_can_have_left_is_found(change) -> None:
    assert flaw(Remembered({}, 7, PLAN)) is None
    assert flaw(Remembered({}, 7, replace(PLAN, **change))) is not None


def test_a_correction_below_nothing_is_none() -> None:
    assert flaw(Remembered({}, -1)) is not None
    assert changed({"a": "1", "b": "2"}, {"b": "3", "c": "4"}) == ("a", "b", "c")


# The file.


def test_the_same_plan_gets_it_back_for_its_worker_as_well(tmp_path) -> None:
    remember(tmp_path / "r", (KNOWN, replace(RUN, stage_id=4, name="thinker")))
    elsewhere = replace(RUN, log_path=Path("/other"), lock_timeout_s=9.0, stage_id=9)
    recalled = recall(tmp_path / "r", (elsewhere,), reuse=True)
    expected = replace(elsewhere, graphs_correction_bytes=7, remembered=PLAN, reuse_plan=True)
    assert (recalled.runs, expected.plan) == ((expected,), PLAN)
    assert recalled.remarks == ("boots by what an earlier boot has measured: talker",)
    assert run_from_json(runs_to_json(recalled.runs), 9) == expected
    status = (tmp_path / "r").stat()
    assert (status.st_mode & 0o777, os.listdir(tmp_path)) == (0o600, ["r"])


def test_without_being_asked_for_a_plan_is_only_kept(tmp_path) -> None:
    remember(tmp_path / "r", (KNOWN,))
    recalled = recall(tmp_path / "r", (RUN,), reuse=False)
    assert (recalled.runs, recalled.remarks, recalled.runs[0].plan) == ((KNOWN,), (), None)


def test_other_grounds_and_why_are_named_once_for_all_stages(tmp_path) -> None:
    remember(tmp_path / "r", (KNOWN, replace(KNOWN, name="b"), replace(KNOWN, name="flawed", remembered=off_plan())))
    runs = [replace(RUN, name=name, grounds={"torch": "3"}) for name in ("talker", "b")]
    runs += [replace(RUN, name="new"), replace(RUN, name="flawed")]
    recalled = recall(tmp_path / "r", tuple(runs), reuse=True)
    assert recalled.runs == tuple(runs)
    assert recalled.remarks[0] == "measures talker, b: changed since: driver, torch"
    assert recalled.remarks[1] == "measures new: no earlier boot is remembered"
    assert "measures flawed: what is remembered cannot be: it has" in recalled.remarks[2]
    assert recall(tmp_path / "r", tuple(runs), reuse=False).remarks == ()


def off_plan() -> Ledger:
    return replace(PLAN, num_blocks=PLAN.num_blocks - 1)


def forged(path: Path, change) -> None:
    """What a boot leaves, changed, under a checksum that is right."""
    remember(path, (KNOWN,))
    body = json.loads(path.read_text())
    change(body)
    path.write_text(json.dumps(body | {"checksum": remembered._checksum(body["stages"])}))


@pytest.mark.parametrize(
    "text",
    ["", "[]", "7", "{}", '{"version": 1}', '{"version": 1, "checksum": 3, "stages": []}', "\udcff", "[" * 100_000],
)
def test_a_file_that_says_something_else_is_ignored_with_a_line(tmp_path, text) -> None:
    path = tmp_path / "r"
    path.write_text(text, errors="surrogateescape")
    path.chmod(0o600)
    assert_ignored(path, "")


def assert_ignored(path: Path, why: str) -> None:
    recalled = recall(path, (RUN,), reuse=True)
    (remark,) = recalled.remarks
    assert recalled.runs == (RUN,)
    assert f"what earlier boots have measured is ignored: {path}: " in remark
    assert why in remark


def test_a_file_of_another_version_is_ignored(tmp_path) -> None:
    forged(tmp_path / "r", lambda body: body.update(version=2))
    assert_ignored(tmp_path / "r", "it is of version 2")


@pytest.mark.parametrize(
    "change",
    [
        lambda entry: entry.pop("grounds"),
        lambda entry: entry.update(grounds={"torch": 2}),
        lambda entry: entry.update(grounds=[]),
        lambda entry: entry.update(correction_bytes="x"),
        lambda entry: entry["ledger"].pop("weights"),
        lambda entry: entry["ledger"].update(num_blocks=float("inf")),
        lambda entry: entry["ledger"]["weights"].update(source="nowhere"),
        lambda entry: entry["ledger"].update(surprise={"size_bytes": 1, "source": "rule", "other_bytes": None}),
    ],
)
def test_an_entry_of_another_shape_spoils_the_file(tmp_path, change) -> None:
    forged(tmp_path / "r", lambda body: change(body["stages"]["talker"]))
    assert_ignored(tmp_path / "r", "")


@pytest.mark.parametrize("text", ["\x1b[31m", "\ud800", "a\nb", "long " * 1000])
def test_no_word_of_the_file_reaches_a_terminal_as_it_is(tmp_path, text) -> None:
    for change in (
        lambda body: body["stages"]["talker"]["grounds"].update({text: "x"}),
        lambda body: body.update(version=text),
        lambda body: body["stages"]["talker"]["ledger"].update({text: body["stages"]["talker"]["ledger"]["kv"]}),
    ):
        forged(tmp_path / "r", change)
        (remark,) = recall(tmp_path / "r", (RUN,), reuse=True).remarks
        assert remark.isprintable()
        assert len(remark) < 300 + len(str(tmp_path))


def test_a_byte_that_flipped_and_a_file_cut_short_are_seen(tmp_path) -> None:
    path = tmp_path / "r"
    remember(path, (KNOWN,))
    whole = path.read_text()
    path.write_text(whole.replace(str(PLAN.num_blocks), str(PLAN.num_blocks + 1)))
    assert_ignored(path, "its checksum is wrong")
    path.write_text(whole[:-9])
    assert_ignored(path, "")


def make_link(path: Path) -> None:
    remember(path.with_name("real"), (KNOWN,))
    path.symlink_to("real")


def make_open(path: Path) -> None:
    remember(path, (KNOWN,))
    path.chmod(0o620)


def make_huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(remembered.MAX_BYTES + 1)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (os.mkfifo, "it is not a file"),
        (os.mkdir, "it is not a file"),
        (make_link, "it is a link"),
        (make_open, "others may write to it"),
        (make_huge, "bytes"),
    ],
)
def test_what_is_not_a_file_that_only_we_can_have_written_is_ignored(tmp_path, make, why) -> None:
    make(tmp_path / "r")
    assert_ignored(tmp_path / "r", why)


def test_a_file_of_another_user_is_ignored(tmp_path, monkeypatch) -> None:
    remember(tmp_path / "r", (KNOWN,))
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    assert_ignored(tmp_path / "r", f"it is of another user (uid {os.getuid()})")


def test_what_is_planted_is_replaced_and_not_followed(tmp_path) -> None:
    victim, path = tmp_path / "victim", tmp_path / "r"
    victim.write_text("mine")
    path.symlink_to(victim)
    path.with_name(f".r.{os.getpid()}").symlink_to(victim)
    remember(path, (KNOWN,))
    assert (victim.read_text(), path.is_symlink()) == ("mine", False)
    assert recall(path, (RUN,), reuse=False).runs == (KNOWN,)


def test_no_file_is_nothing_to_say_until_it_is_asked_for(tmp_path) -> None:
    assert recall(tmp_path / "r", (RUN,), reuse=False).remarks == ()
    assert recall(tmp_path / "r", (RUN,), reuse=True).remarks == ("measures talker: no earlier boot is remembered",)


# The grounds.

DEVICES = {1: DeviceInfo(1, "SIM-1", "card", 80 * GIB, GIB), 2: DeviceInfo(2, "SIM-2", "card", 80 * GIB, 0)}
NEIGHBOUR = replace(RUN, stage_id=4, name="code2wav", utilization=0.1)


def grounds_of(run: StageRun, *others: StageRun, devices=DEVICES, environment=None) -> dict[str, str]:
    return dict(grounds.with_grounds((run, *others), devices, environment or {})[0].grounds)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"utilization": 0.6}, {"budget"}),
        ({"utilization": None, "budget_bytes": GIB}, {"budget"}),
        ({"spec": replace(RUN.spec, capture_sizes=(8,))}, {"capture sizes"}),
        ({"spec": replace(RUN.spec, max_num_seqs=2)}, {"config"}),
        ({"spec": replace(RUN.spec, options={})}, {"config"}),
        ({"engine": "f"}, {"config"}),
        ({"backend": "cuda"}, {"device", "driver"}),
        ({"env": {}}, {"environment"}),
        # The same card in another slot, another log, another run: the same figures.
        ({"device_index": 2, "device_uuid": "SIM-2", "stage_id": 9}, set()),
        ({"env": {"X": "1", "CUDA_VISIBLE_DEVICES": "GPU-7"}, "claim_id": "other", "log_path": Path("/o")}, set()),
    ],
)
def test_what_changes_a_stage_changes_its_grounds_and_nothing_else_does(change, names) -> None:
    assert set(changed(grounds_of(RUN), grounds_of(replace(RUN, **change)))) == names


def test_neighbours_and_what_they_may_hold_are_grounds_their_order_is_none() -> None:
    far = replace(NEIGHBOUR, name="far", device_index=2)
    beside = grounds_of(RUN, NEIGHBOUR)
    assert changed(grounds_of(RUN), beside) == ("neighbours",)
    assert changed(beside, grounds_of(RUN, replace(NEIGHBOUR, utilization=0.2))) == ("neighbours",)
    assert changed(beside, grounds_of(RUN, far, replace(NEIGHBOUR, stage_id=1))) == ()
    assert dict(grounds.with_grounds((NEIGHBOUR, RUN), DEVICES, {})[1].grounds) == beside


def test_the_card_the_driver_libraries_and_inherited_variables_are_grounds(monkeypatch, tmp_path) -> None:
    before = grounds_of(RUN, environment={"HOME": "/a"})
    other_card = {1: replace(DEVICES[1], total_bytes=79 * GIB)}
    assert changed(before, grounds_of(RUN, devices=other_card)) == ("device",)
    assert changed(before, grounds_of(RUN, environment={"HOME": "/b"})) == ()
    assert changed(before, grounds_of(RUN, environment={"PYTORCH_CUDA_ALLOC_CONF": "x"})) == ("environment",)
    monkeypatch.setattr(grounds, "version", lambda name: "0")
    assert set(changed(before, grounds_of(RUN))) == {"torch", "transformers", "stagelaunch"}
    cuda = replace(RUN, backend="cuda")
    told = tmp_path / "version"
    monkeypatch.setattr(grounds, "_DRIVER_FILES", (told,))
    assert grounds_of(cuda)["driver"].startswith("of boot ")
    told.write_text("580.1\n")
    assert grounds_of(cuda)["driver"] == "580.1"


def test_a_checkpoint_is_known_by_config_index_and_the_size_and_time_of_its_shards(tmp_path) -> None:
    seen = [grounds.checkpoint_mark(tmp_path / "nowhere"), grounds.checkpoint_mark(tmp_path)]
    shard = tmp_path / "model-1.safetensors"
    for name, text in (
        ("config.json", "{}"),
        ("config.json", "[]"),
        ("model.safetensors.index.json", "{}"),
        (shard.name, "a"),
        (shard.name, "ab"),
    ):
        (tmp_path / name).write_text(text)
        seen.append(grounds.checkpoint_mark(tmp_path))
    os.utime(shard, ns=(1, 1))
    seen.append(grounds.checkpoint_mark(tmp_path))
    assert len(set(seen)) == len(seen)
    # An index may put them into directories, and call them anything.
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "parts/1", "b": "\\u0000", "c": 1}}')
    seen.append(grounds.checkpoint_mark(tmp_path))
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "1").write_text("a")
    seen.append(grounds.checkpoint_mark(tmp_path))
    assert len(set(seen)) == len(seen)
    (tmp_path / "README.md").write_text("nothing that is loaded")
    os.utime(tmp_path / "config.json", ns=(1, 1))
    assert grounds.checkpoint_mark(tmp_path) == seen[-1]
    (tmp_path / "config.json").unlink()
    os.mkfifo(tmp_path / "config.json")
    assert grounds.checkpoint_mark(tmp_path) != seen[-1]


def test_an_engine_of_ones_own_is_known_by_its_file(tmp_path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    package = tmp_path / "some_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "engine.py").write_text("")
    run = replace(RUN, engine="some_package.engine:Engine")
    before = grounds_of(run)
    assert before["engine code"] != "none"
    (package / "engine.py").write_text("x = 1")
    assert changed(before, grounds_of(run)) == ("engine code",)
    assert grounds_of(replace(RUN, engine="no.such:Engine"))["engine code"] == "none"


# What is learnt while stages boot.


@pytest.fixture
def lessons(tmp_path):
    said: list[str] = []
    runs = (replace(KNOWN, reuse_plan=True), replace(RUN, name="b", stage_id=4))
    stages = Stages(runs)
    for stage in stages:
        stage.view = spawned(stage.run.stage_id, stage.run.name, 0.0)
    made = Lessons(Runtime(tmp_path), stages, lambda stage, text: said.append(text))
    return made, stages, tmp_path, said


def failed(phase: Phase, *, retry: bool = False, over: int = 0) -> m.Failed:
    return m.Failed(phase, "E", "text", "", 1, 0.0, retry, over)


@pytest.mark.parametrize(
    "message", [failed(Phase.PROFILE, retry=True), failed(Phase.CAPTURE, over=5), failed(Phase.ALLOCATE)]
)
def test_a_stage_that_fails_by_its_plan_is_started_without_and_it_is_forgotten(lessons, message) -> None:
    made, stages, path, _ = lessons
    assert made.learn(stages[3], message) == ", and measures"
    assert stages[3].run == replace(KNOWN, reuse_plan=True, remembered=None)
    assert run_from_json((path / "run.json").read_text(), 3).plan is None
    assert recall(path / "remembered.json", (RUN,), reuse=False).runs == (replace(RUN, graphs_correction_bytes=7),)


def test_a_failure_that_no_plan_can_cause_forgets_none(lessons) -> None:
    made, stages, path, _ = lessons
    assert made.learn(stages[3], failed(Phase.LOAD)) is None
    assert (stages[3].run.remembered, list(path.iterdir())) == (PLAN, [])


def test_a_stage_that_has_measured_learns_by_how_much_it_was_over(lessons) -> None:
    made, stages, path, said = lessons
    assert made.learn(stages[4], failed(Phase.CAPTURE, retry=True, over=100)) == ", with less KV cache"
    assert run_from_json((path / "run.json").read_text(), 4).graphs_correction_bytes == 105
    assert said == ["gets 105 B less KV cache than estimated from now on"]
    # The other's plan is kept beside it.
    assert recall(path / "remembered.json", (RUN,), reuse=False).runs == (KNOWN,)


def test_a_correction_that_leaves_no_kv_cache_is_forgotten(lessons) -> None:
    made, stages, path, _ = lessons
    made.learn(stages[4], failed(Phase.CAPTURE, retry=True, over=100))
    assert made.learn(stages[4], failed(Phase.SIZE)) == ", with its graphs as estimated"
    assert run_from_json((path / "run.json").read_text(), 4).graphs_correction_bytes == 0
    b = replace(RUN, name="b", stage_id=4)
    assert recall(path / "remembered.json", (b,), reuse=False).runs == (b,)
    assert made.learn(stages[4], failed(Phase.SIZE)) is None


def test_every_measured_ledger_is_kept_and_one_by_a_plan_is_not(lessons) -> None:
    made, stages, path, _ = lessons
    by_plan = sized_by(PLAN, PLAN.budget, PLAN.context, READ)
    for stage_id, ledger in ((3, by_plan), (4, PLAN)):
        stages[stage_id].view = replace(stages[stage_id].view, ledger=ledger, ledger_is_final=True)
    made.keep()
    kept = recall(path / "remembered.json", (RUN, replace(RUN, name="b", stage_id=4)), reuse=False).runs
    assert [run.remembered for run in kept] == [PLAN, PLAN]


def test_what_cannot_be_kept_costs_a_line(lessons) -> None:
    made, stages, path, said = lessons
    (path / "remembered.json").mkdir()
    stages[4].view = replace(stages[4].view, ledger=PLAN, ledger_is_final=True)
    made.keep()
    assert said == ["what was measured cannot be kept for the next boot: Is a directory"]
    assert os.listdir(path) == ["remembered.json"]
