"""Reads YAML into the schema's types without guessing or converting.

YAML 1.1 reads `no` as false, `010` as 8, `1:30` as 90 and allows a duplicate key, so after a general loader a
configuration may mean something its writer did not. Here the text is parsed to nodes, which keep the spelling and line
of each value, and each node is read by the type of its setting. What YAML would read differently from how it looks is
refused, with the right spelling.

OmegaConf read configurations here first. It resolves `${oc.env:...}` before anything is written, takes the last of two
equal keys, and keeps no lines; the cost of doing without it is this file and `references.py`. The schema is still one
that OmegaConf can hold, for programs that build a `Config` with it (tests/pruning/test_pruning_config.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from dppo_megatron.config.hints import unknown_key
from dppo_megatron.config.references import FromEnvironment, Reference, has_reference, unescaped
from dppo_megatron.types import UserError

Values: TypeAlias = dict[str, Any]
"""Settings of a section that were given: values, `Reference`s, `Values` of sections in it, `Entries`."""

MAX_CHARACTERS = 1_000_000
"""Of a whole configuration file."""
_MAX_NODES = 100_000
_MAX_DEPTH = 20
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*(_[0-9]+)*)")
_DECIMAL = re.compile(r"[-+]?([0-9]+(_[0-9]+)*\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
_WANTED = {
    bool: "must be true or false",
    int: "must be a whole number",
    float: "must be a number",
    str: "must be text",
}


class Entries(dict[str, Any]):
    """The value of a setting that maps names to values or sections."""

    replaces = False
    """Replaces the whole mapping (`{}`, or `key={...}` on the command line) instead of adding to it by name."""


def parse(text: str, source: str) -> Node | None:
    """The YAML document in `text`; None if there is nothing in it. Raises UserError."""
    if len(text) > MAX_CHARACTERS:
        raise UserError(f"{source}: {len(text)} characters; a configuration has at most {MAX_CHARACTERS}")
    try:
        node: Node | None = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark and "\n" in text else ""
        raise UserError(f"{source}: not valid YAML: {line}{error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError) as error:
        reason = getattr(error, "reason", None) or str(error).splitlines()[0]
        raise UserError(f"{source}: not valid YAML: {reason}") from None
    except RecursionError:
        raise UserError(f"{source}: nested too deeply") from None
    return node


def text_node(text: str) -> ScalarNode:
    """`text` as it would stand between quotes."""
    return ScalarNode("tag:yaml.org,2002:str", text, style='"')


class Reader:
    """Reads the nodes of one source: a file, or a setting of the command line."""

    def __init__(self, root: type, source: str, *, has_lines: bool, keeps_references: bool = False) -> None:
        """Args:
        root: the class of the whole configuration.
        source: names it in messages; of a file, the line is added.
        keeps_references: leave `${...}` in texts as it stands, for settings that are only compared.
        """
        self._root, self._source, self._has_lines = root, source, has_lines
        self._keeps_references = keeps_references
        self._nodes = 0

    def where(self, node: Node) -> str:
        """Where `node` is, for messages."""
        return f"{self._source}:{node.start_mark.line + 1}" if self._has_lines else self._source

    def section(self, schema: type, node: Node, prefix: str = "") -> Values:
        """The settings that `node` gives for a section."""
        if _kind(node) != "map":
            what = f"'{prefix.rstrip('.')}' is a section of settings, not a value" if prefix else "expected settings"
            raise UserError(f"{self.where(node)}: {what} (got {self._shown(node)}); write key: value under it")
        assert isinstance(node, MappingNode)
        hints, values = get_type_hints(schema), {}
        for name, key, value in self.pairs(node):
            if name not in hints:
                raise unknown_key(self.where(key), f"{prefix}{name}", list(self._leaves(value)), schema, self._root)
            values[name] = self.value(hints[name], value, f"{prefix}{name}")
        return values

    def pairs(self, node: MappingNode, depth: int = 0) -> Iterator[tuple[str, Node, Node]]:
        """Name, key and value of each entry; raises UserError for a duplicate name or one that is not text."""
        self._count(node, depth)
        own: dict[str, tuple[Node, Node]] = {}
        merged: dict[str, tuple[Node, Node]] = {}
        for key, value in node.value:
            if _kind(key) == "merge":
                for other in value.value if isinstance(value, SequenceNode) else [value]:
                    if not isinstance(other, MappingNode) or _kind(other) != "map":
                        raise UserError(f"{self.where(key)}: '<<' takes a mapping")
                    for name, k, v in self.pairs(other, depth + 1):
                        merged.setdefault(name, (k, v))
                continue
            if not isinstance(key, ScalarNode) or _kind(key) != "str":
                shown = self._shown(key)
                raise UserError(
                    f"{self.where(key)}: the key {shown} is not text to YAML; write it in quotes: '{shown}'"
                )
            if key.value in own:
                first = f", first in line {own[key.value][0].start_mark.line + 1}" if self._has_lines else ""
                raise UserError(f"{self.where(key)}: the key '{key.value}' stands here twice{first}")
            own[key.value] = (key, value)
        for name, (key, value) in (merged | own).items():
            yield name, key, value

    def value(self, hint: Any, node: Node, key: str) -> Any:
        """`node` as the type `hint` of the setting `key`."""
        self._count(node, 0)
        hint, may_be_null = _without_none(hint)
        if _kind(node) == "null" and hint is not Any:
            if may_be_null:
                return None
            if is_dataclass(hint) and self._has_lines and isinstance(node, ScalarNode) and not node.value:
                return {}  # every line under the section's name is a comment
            raise self._refuse(node, key, f"{_wanted(hint)}; there is nothing to take null for")
        if is_dataclass(hint):
            return self.section(hint, node, f"{key}.")  # type: ignore[arg-type]
        origin = get_origin(hint)
        if origin is list:
            if not isinstance(node, SequenceNode) or _kind(node) != "seq":
                raise self._refuse(node, key, f"must be a list: [{self._shown(node)}]")
            element = get_args(hint)[0]
            return [self.value(element, item, f"{key}[{place}]") for place, item in enumerate(node.value)]
        if origin is dict:
            return self._entries(get_args(hint)[1], node, key)
        if hint is Any:
            return self._plain(node, key, 0)
        if not isinstance(node, ScalarNode):
            raise self._refuse(node, key, _wanted(hint))
        if has_reference(node.value) and not self._keeps_references:
            return Reference(node.value, hint, self.where(node))
        return self._choice(hint, node, key) if origin is Literal else self._scalar(hint, node, key)

    def _entries(self, hint: Any, node: Node, key: str) -> Entries:
        if not isinstance(node, MappingNode) or _kind(node) != "map":
            raise self._refuse(node, key, "must be a mapping of names to values, such as {name: value}")
        entries = Entries()
        for name, at, value in self.pairs(node):
            if not name or not _can_be_written(name):
                raise UserError(f"{self.where(at)}: {key}: {name!r} is no name")
            entries[name] = (
                self._plain(value, f"{key}.{name}", 0) if hint is Any else self.value(hint, value, f"{key}.{name}")
            )
        entries.replaces = not entries
        return entries

    def _choice(self, hint: Any, node: ScalarNode, key: str) -> Any:
        choices = get_args(hint)
        if node.value in choices and _kind(node):  # also one that YAML takes for a boolean, as in `fp8: off`
            return node.value
        if _kind(node) == "int" and node.value in map(str, choices):
            return int(node.value)
        raise self._refuse(node, key, f"must be one of {', '.join(map(str, choices))}")

    def _scalar(self, hint: Any, node: ScalarNode, key: str) -> Any:
        kind = _kind(node)
        plain = node.style is None
        if hint is str:
            if kind != "str":
                raise self._refuse(node, key, f"must be text; write it in quotes: '{node.value}'")
            return self._text(node, key)
        if hint is bool and kind == "bool" and node.value.lower() in _BOOLEANS:
            return _BOOLEANS[node.value.lower()]
        if hint is int and kind == "int":
            if not _INTEGER.fullmatch(node.value) or len(node.value) > 40:
                raise self._refuse(node, key, "must be a whole number in plain decimal digits")
            return int(node.value)
        if hint is float and (kind in ("int", "float") or (kind == "str" and plain)):
            if kind == "float" and node.value.lower().lstrip("+-") in (".inf", ".nan"):
                raise self._refuse(node, key, "must be a finite number")
            pattern = _INTEGER if kind == "int" else _DECIMAL
            if pattern.fullmatch(node.value):
                number = float(node.value)
                if not math.isfinite(number):
                    raise self._refuse(node, key, "must be a finite number; this one is too large for a float")
                return number
        raise self._refuse(node, key, _wanted(hint))

    def _text(self, node: ScalarNode, key: str) -> str:
        if not _can_be_written(node.value):
            raise self._refuse(node, key, "holds a NUL or half of a surrogate pair, which is no text")
        if self._keeps_references:
            return FromEnvironment(node.value, node.value) if "${" in node.value else node.value
        return unescaped(node.value)

    def _plain(self, node: Node, key: str, depth: int) -> Any:
        """A value of any type: what JSON can say. Numbers as YAML spells them in decimal."""
        self._count(node, depth)
        if isinstance(node, SequenceNode) and _kind(node) == "seq":
            return [self._plain(item, f"{key}[{place}]", depth + 1) for place, item in enumerate(node.value)]
        if isinstance(node, MappingNode) and _kind(node) == "map":
            return {name: self._plain(item, f"{key}.{name}", depth + 1) for name, _, item in self.pairs(node, depth)}
        kinds = {"bool": bool, "int": int, "float": float, "str": str, "null": NoneType}
        kind = kinds.get(_kind(node))
        if kind is None or not isinstance(node, ScalarNode):
            raise self._refuse(node, key, "is no text, number, true, false or null; write it in quotes")
        if kind is NoneType:
            return None
        if kind is str and has_reference(node.value) and not self._keeps_references:
            raise self._refuse(node, key, "takes no ${...}; write \\${ for the plain text")
        return self._scalar(kind, node, key)

    def _leaves(self, node: Node, prefix: str = "", depth: int = 0) -> Iterator[str]:
        """Dotted names of what stands under a key, for a hint."""
        if isinstance(node, MappingNode) and node.value and depth < 5:
            for key, value in node.value[:20]:
                yield from self._leaves(value, f"{prefix}.{key.value}", depth + 1)
        else:
            yield prefix

    def _count(self, node: Node, depth: int) -> None:
        """Refuse documents that aliases blow up to an enormous or endless size."""
        self._nodes += 1
        if self._nodes > _MAX_NODES or depth > _MAX_DEPTH:
            raise UserError(f"{self.where(node)}: nested too deeply, or too large once its aliases are followed")

    def _refuse(self, node: Node, key: str, wanted: str) -> UserError:
        tagged = "" if _kind(node) else f" (the tag {node.tag} is not read)"
        return UserError(f"{self.where(node)}: {key} = {self._shown(node)}{tagged}: {wanted}")

    @staticmethod
    def _shown(node: Node) -> str:
        if isinstance(node, MappingNode):
            return "{...}"
        if isinstance(node, SequenceNode):
            return "[...]"
        assert isinstance(node, ScalarNode)
        text = node.value if len(node.value) <= 80 else f"{node.value[:80]}..."
        return repr(text) if node.style or not text or not text.isprintable() else text


_BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


_KINDS = ("str", "int", "float", "bool", "null", "map", "seq", "merge", "timestamp")


def _kind(node: Node) -> str:
    """Which of YAML's types a node has; empty for custom tags, sets and Python objects."""
    space, _, name = node.tag.rpartition(":")
    return name if space == "tag:yaml.org,2002" and name in _KINDS else ""


def _without_none(hint: Any) -> tuple[Any, bool]:
    if get_origin(hint) not in (Union, UnionType):
        return hint, False
    [inner] = [arm for arm in get_args(hint) if arm is not NoneType]
    return inner, True


def _wanted(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return f"must be one of {', '.join(map(str, get_args(hint)))}"
    return _WANTED.get(hint, "must be a mapping" if get_origin(hint) is dict else "must be a list")


def _can_be_written(text: str) -> bool:
    return "\0" not in text and not any("\ud800" <= character <= "\udfff" for character in text)
