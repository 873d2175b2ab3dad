"""YAML text to plain data, with the line of every value: SafeLoader's reading, on a leash.

Beyond SafeLoader: duplicate keys are faults, numbers YAML 1.1 reads in a surprising way are noted, nesting and the
number of values (aliases expanded) are bounded, and no input raises anything but ``TreeError``.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any, TypeVar

import yaml

from stagelaunch.core.config_rules import Loc

_T = TypeVar("_T")
MAX_NODES = 20_000
MAX_DEPTH = 32
AGAIN = "(again)"
"""Last part of the place of a key given twice."""
_TAG = "tag:yaml.org,2002:"
_USUAL_INT = re.compile(r"[-+]?(0|[1-9][0-9_]*)")


class TreeError(Exception):
    """The text is not YAML, or more of it than any deployment needs."""

    def __init__(self, line: int | None, text: str) -> None:
        self.line = line
        self.text = text
        super().__init__(line, text)


@dataclass
class Tree:
    """Data of a file, and where each value stands. Places are paths from the root, like ("stages", 0, "id")."""

    value: Any = None
    lines: dict[Loc, int] = field(default_factory=dict)
    """Line of each place, that of the key for a value with a key."""
    plain: dict[Loc, str] = field(default_factory=dict)
    """Unquoted text of each scalar."""
    faults: dict[Loc, str] = field(default_factory=dict)
    """What can not be read at all; the value is None there."""
    oddities: dict[Loc, str] = field(default_factory=dict)
    """What YAML reads otherwise than people do; a fault unless the place has a better one."""

    def line(self, loc: Loc) -> int:
        """Line of a place, or of the nearest one around it."""
        return next(self.lines[loc[:n]] for n in range(len(loc), -1, -1) if loc[:n] in self.lines)

    def shown(self, loc: Loc, value: object) -> str:
        """The value as it stands in the file, short."""
        text = self.plain.get(loc) or repr(value)
        return text if len(text) <= 60 else f"{text[:57]}..."


def parse_tree(text: str) -> Tree:
    """The data of a YAML or JSON text. TreeError where it cannot be read; faults of single values are in the tree."""
    root = _compose(_spaces_for_tabs(text))
    if root is None or (root.tag == f"{_TAG}null" and isinstance(root, yaml.ScalarNode)):
        raise TreeError(None, "is empty; start from one of the files in configs/")
    builder = _Builder()
    builder.tree.lines[()] = root.start_mark.line + 1
    builder.tree.value = builder.build(root, (), frozenset())
    if not isinstance(root, yaml.MappingNode):
        raise TreeError(root.start_mark.line + 1, "is not a list of 'key: value' lines")
    return builder.tree


def _spaces_for_tabs(text: str) -> str:
    """JSON may be indented with tabs, YAML may not; a tab inside a JSON string is written \\t, so none is lost."""
    if "\t" in text and text.lstrip().startswith("{"):
        try:
            json.loads(text)
        except (ValueError, RecursionError):
            return text
        return text.replace("\t", " ")
    return text


class _Loader(yaml.SafeLoader):
    """Composes nodes only, and gives up early on what is too deep or too long."""

    depth = 0
    count = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self.count += 1
        self.depth += 1
        line: int = self.peek_event().start_mark.line + 1  # type: ignore[no-untyped-call]
        if self.count > MAX_NODES:
            raise TreeError(line, f"has more than {MAX_NODES} values; this is not a deployment file")
        if self.depth > MAX_DEPTH:
            raise TreeError(line, f"is nested deeper than {MAX_DEPTH} levels")
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def _compose(text: str) -> yaml.Node | None:
    try:
        loader = _Loader(text)
        return loader.get_single_node()
    except yaml.reader.ReaderError as error:
        # The message of a ReaderError spans lines; say the one thing.
        line = text.count("\n", 0, error.position) + 1
        raise TreeError(line, f"character {error.character!r} is not allowed; take it out") from None
    except yaml.MarkedYAMLError as error:
        raise TreeError(_line_of(error), _syntax_text(error)) from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise TreeError(None, f"is not YAML: {str(error)[:200]!r}") from None


def _line_of(error: yaml.MarkedYAMLError) -> int | None:
    mark = error.problem_mark or error.context_mark
    return None if mark is None else mark.line + 1


def _syntax_text(error: yaml.MarkedYAMLError) -> str:
    problem = " ".join((error.problem or "syntax error").split())[:200]
    if "'\\t'" in problem:
        return "a tab; YAML wants spaces here"
    if "expected a single document" in (error.context or ""):
        return "a second document begins; a file holds one deployment"
    context = " ".join((error.context or "").split())
    since = f" since line {error.context_mark.line + 1}" if error.context_mark and context else ""
    return f"is not YAML: {problem}" + (f" ({context}{since})" if context else "")


class _Builder:
    """Builds data from nodes. Aliases are expanded, so ``visited`` bounds what an alias bomb can cost."""

    def __init__(self) -> None:
        self.tree = Tree()
        self.scalars = yaml.constructor.SafeConstructor()
        self.visited = 0

    def build(self, node: yaml.Node, loc: Loc, inside: frozenset[int]) -> Any:
        self.visited += 1
        if self.visited > MAX_NODES:
            raise TreeError(node.start_mark.line + 1, f"expands to more than {MAX_NODES} values through its aliases")
        if id(node) in inside or len(inside) > MAX_DEPTH:
            return self._fault(loc, "refers to itself, or is nested too deep through its aliases")
        inside = inside | {id(node)}
        match node:
            case yaml.MappingNode() if node.tag == f"{_TAG}map":
                return self._mapping(node, loc, inside)
            case yaml.SequenceNode() if node.tag == f"{_TAG}seq":
                return self._sequence(node, loc, inside)
            case yaml.ScalarNode():
                return self._scalar(node, loc)
        return self._fault(loc, f"tag {node.tag.replace(_TAG, '!!')[:60]!r} is not supported; take it out")

    def _fault(self, loc: Loc, text: str) -> None:
        self.tree.faults.setdefault(loc, text)

    def _sequence(self, node: yaml.SequenceNode, loc: Loc, inside: frozenset[int]) -> list[Any]:
        items: list[Any] = []
        for position, child in enumerate(node.value):
            self.tree.lines[(*loc, position)] = child.start_mark.line + 1
            items.append(self.build(child, (*loc, position), inside))
        return items

    def _mapping(self, node: yaml.MappingNode, loc: Loc, inside: frozenset[int]) -> dict[Any, Any]:
        """Own keys first; merged ones (``<<``) fill in what is left, as YAML wants it."""
        items: dict[Any, Any] = {}
        for key_node, child in node.value:
            if not _is_merge(key_node):
                self._own_key(items, key_node, child, loc, inside)
        for key_node, child in node.value:
            if _is_merge(key_node):
                self._merge(items, child, loc, inside)
        return items

    def _own_key(
        self, items: dict[Any, Any], key_node: yaml.Node, child: yaml.Node, loc: Loc, inside: frozenset[int]
    ) -> None:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            self.tree.lines[(*loc, "?")] = line
            return self._fault((*loc, "?"), "a list or section cannot be a key")
        key = self._key(key_node)
        place = (*loc, key if isinstance(key, int) else str(key))
        if key in items:
            first = self.tree.lines[place]
            # A place of its own, so that the fault carries the line of the second one.
            again = (*place, AGAIN)
            self.tree.lines[again] = line
            return self._fault(again, f"given twice, first in line {first}; keep one")
        self.tree.lines[place] = line
        items[key] = self.build(child, place, inside)
        return None

    def _key(self, node: yaml.ScalarNode) -> str | int:
        """A key is text, or a device number; every other reading (``on`` as true) is undone."""
        if node.tag == f"{_TAG}int" and _USUAL_INT.fullmatch(node.value) and len(node.value) < 12:
            return int(node.value)
        return str(node.value)

    def _merge(self, items: dict[Any, Any], source: yaml.Node, loc: Loc, inside: frozenset[int]) -> None:
        sources = source.value if isinstance(source, yaml.SequenceNode) else [source]
        for part in sources:
            if not isinstance(part, yaml.MappingNode):
                self.tree.lines[(*loc, "<<")] = source.start_mark.line + 1
                return self._fault((*loc, "<<"), "only a section can be merged")
            # Built at a place of its own: its lines must not overwrite those of the keys that win.
            scratch = _Builder()
            scratch.visited = self.visited
            merged = scratch.build(part, loc, inside)
            self.visited = scratch.visited
            for key, value in (merged or {}).items():
                if key not in items:
                    items[key] = value
                    self._adopt(scratch.tree, (*loc, key))
            self._adopt_refusals(scratch.tree)
        return None

    def _adopt(self, other: Tree, place: Loc) -> None:
        self.tree.lines.update(_under(place, other.lines))
        self.tree.plain.update(_under(place, other.plain))
        self.tree.faults.update(_under(place, other.faults))
        self.tree.oddities.update(_under(place, other.oddities))

    def _adopt_refusals(self, other: Tree) -> None:
        for loc, text in other.faults.items():
            self.tree.lines.setdefault(loc, other.line(loc) if other.lines else 1)
            self._fault(loc, text)

    def _scalar(self, node: yaml.ScalarNode, loc: Loc) -> Any:
        if node.style is None:
            self.tree.plain[loc] = node.value
        kind = node.tag.removeprefix(_TAG)
        try:
            match kind:
                case "str" | "value":
                    return node.value
                case "null":
                    return None
                case "bool":
                    return self.scalars.construct_yaml_bool(node)
                case "int":
                    return self._int(node, loc)
                case "float":
                    return self._float(node, loc)
                case "timestamp":
                    # Whoever wants a date wants a text; the models ask to quote it.
                    return _Unquoted(node.value)
        except (ValueError, OverflowError, LookupError):
            return self._fault(loc, f"{node.value[:60]!r} is not a value of type {kind}")
        return self._fault(loc, f"tag {node.tag.replace(_TAG, '!!')[:60]!r} is not supported; take it out")

    def _int(self, node: yaml.ScalarNode, loc: Loc) -> int:
        value = int(self.scalars.construct_yaml_int(node))
        if not _USUAL_INT.fullmatch(node.value):
            self.tree.oddities[loc] = (
                f"{node.value[:60]} is read by YAML as {value}; write {value}, or quote it if it is text"
            )
        return value

    def _float(self, node: yaml.ScalarNode, loc: Loc) -> float:
        value = float(self.scalars.construct_yaml_float(node))
        if ":" in node.value:
            self.tree.oddities[loc] = (
                f"{node.value[:60]} is read by YAML as {value}; write {value}, or quote it if it is text"
            )
        return value


@dataclass(frozen=True)
class _Unquoted:
    """A scalar that is neither text nor number to YAML."""

    text: str


def _under(place: Loc, table: dict[Loc, _T]) -> dict[Loc, _T]:
    return {loc: value for loc, value in table.items() if loc[: len(place)] == place}


def _is_merge(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.tag == f"{_TAG}merge"
