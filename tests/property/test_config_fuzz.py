"""Whatever a file holds, reading it gives a Deployment or a ConfigError with a readable line per fault."""

from __future__ import annotations

import copy
import json
import tempfile
from pathlib import Path
from typing import Any

import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stagelaunch.config_file import load_deployment
from stagelaunch.core.config import Deployment, Stage, Timeouts, key_names, to_raw
from stagelaunch.core.config_rules import all_conflicts
from stagelaunch.core.errors import ConfigError

TINY = Path(__file__).parents[2] / "configs" / "qwen3-omni-tiny.yaml"
RAW: dict[str, Any] = to_raw(load_deployment(TINY).deployment)
KEYS = sorted({*key_names(Deployment), *key_names(Stage), *key_names(Timeouts), "<<", "devices"})

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-2, 70)
    | st.floats()
    | st.text(max_size=12)
    | st.sampled_from(
        ["off", "yes", "1GiB", "-1GiB", "15s", "1e400s", "9" * 400 + "GiB", "010", "1:30", "auto", "cuda"]
    )
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=6) | st.integers(0, 3), inner, max_size=4)
    ),
    max_leaves=12,
)
fragments = st.sampled_from(
    [
        "a: 1\n",
        "- ",
        "&x ",
        "*x",
        "<<: ",
        "? ",
        ": ",
        "[",
        "]",
        "{",
        "}",
        ",",
        "'",
        '"',
        "\\u",
        "\\UFFFFFFFF",
        "|\n",
        ">\n",
        "!!int ",
        "!!set ",
        "!!binary ",
        "!!float ",
        "!!python/name:os.system ",
        "---\n",
        "...\n",
        "%YAML 9.9\n",
        "#",
        "\t",
        "\n",
        "0x_",
        "0b_",
        "0_",
        "-",
        ".inf",
        "2024-13-45",
        "1:2:3",
        "~",
        "name",
        "stages:\n",
        "\x00",
        "\ufeff",
        "\u2028",
        "é",
    ]
)


def read(body: bytes) -> Deployment | None:
    """The deployment, or None for a ConfigError that is fit to be shown."""
    with tempfile.NamedTemporaryFile(suffix=".yaml") as file:
        file.write(body)
        file.flush()
        try:
            return load_deployment(file.name).deployment
        except ConfigError as caught:
            error = caught
    assert error.faults
    assert len(str(error).splitlines()) == len(error.faults)
    for fault in error.faults:
        assert fault.text
        assert len(str(fault)) < 1000
        assert fault.line is None or 1 <= fault.line <= len(body) + 1
        str(fault).encode()
    return None


@settings(max_examples=60)
@given(st.binary(max_size=200))
def test_any_bytes(body: bytes) -> None:
    assert read(body) is None


@given(st.lists(fragments, max_size=25))
@example(["a: 0x" + "f" * 5000])
@example(["? ", "? ", "? "])
@example(["&x ", "[", "*x", "]"])
@example(["!!int ", '"', '"'])
def test_any_yaml_like_text(parts: list[str]) -> None:
    assert read("".join(parts).encode()) is None


@given(values)
def test_any_yaml_value(value: Any) -> None:
    all_conflicts(value)
    read(yaml.safe_dump(value, allow_unicode=True).encode("utf-8", "surrogatepass"))


def _places(value: Any, loc: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [loc] if loc else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return found + [place for key, inner in items for place in _places(inner, (*loc, key))]


@settings(max_examples=100)
@given(st.lists(st.tuples(st.sampled_from(_places(RAW)), values), min_size=1, max_size=3), st.booleans())
def test_a_good_file_with_any_values_in_some_places(changes: list[tuple[tuple[Any, ...], Any]], as_json: bool) -> None:
    """Also: what is accepted survives being written and read again."""
    body = copy.deepcopy(RAW)
    for loc, value in changes:
        target: Any = body
        try:
            for part in loc[:-1]:
                target = target[part]
            target[loc[-1]] = value
        except (KeyError, IndexError, TypeError, AttributeError):
            continue  # an earlier change took that place away
    text = json.dumps(body) if as_json else yaml.safe_dump(body, allow_unicode=True)
    deployment = read(text.encode("utf-8", "surrogatepass"))
    if deployment is not None:
        assert read(json.dumps(to_raw(deployment)).encode()) == deployment
