"""YAML 1.2 on PyYAML, whose own rules are those of YAML 1.1.

YAML 1.1 reads `no` as false, `010` as 8, `1:30` as 90 and 2026-11-22 as a date, and uses the last of two equal keys.
Here a plain word is true, false, null or a number only in YAML 1.2's spelling, in decimal. What only YAML 1.1 converts
is text with the tag DOUBTFUL, so that a setting of any type can refuse it. Tags are refused; keys must be text and
occur once.
"""

from __future__ import annotations

import re
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from dppo_megatron.types import UserError

MAX_CHARACTERS = 1_000_000
"""Most characters of a configuration file."""
_MAX_NODES = 100_000
_MAX_DEPTH = 20
DOUBTFUL = "doubtful"
"""Tag of a plain word that YAML 1.2 reads as text and YAML 1.1 as something else."""
TEXT = "tag:yaml.org,2002:str"
_WHOLE = r"(?:0|[1-9][0-9]*)"
_PLAIN = {
    "bool": r"[Tt]rue|TRUE|[Ff]alse|FALSE",
    "null": r"[Nn]ull|NULL|~|",
    "int": r"[-+]?(?:0|[1-9][0-9]{0,39})",
    "float": rf"[-+]?(?:(?:{_WHOLE}\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|{_WHOLE}[eE][-+]?[0-9]+)"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
    "merge": "<<",
}
_RULES = [(tag, re.compile(rf"(?:{pattern})\Z")) for tag, pattern in _PLAIN.items()]


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {
        first: [*_RULES, *((DOUBTFUL, pattern) for _, pattern in rules)]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_node(self, parent: Node | None, index: Any) -> Node | None:
        """The next node; raises MarkedYAMLError if it has a tag."""
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if getattr(event, "tag", None):
            raise yaml.MarkedYAMLError(problem=f"the tag {event.tag} is not read", problem_mark=event.start_mark)
        node: Node | None = super().compose_node(parent, index)
        return node


class Dumper(yaml.SafeDumper):
    """Quotes text wherever YAML 1.1 or 1.2 would read it as something else."""

    yaml_implicit_resolvers = {
        first: [*rules, *_RULES] for first, rules in yaml.SafeDumper.yaml_implicit_resolvers.items()
    }


class Source:
    """Where settings come from: a file, whose messages have line numbers, or one setting of the command line.

    `base` is the directory that relative paths in it start from (empty: the working directory).
    """

    def __init__(self, name: str, *, has_lines: bool, base: str = "") -> None:
        self.name, self.has_lines, self.base = name, has_lines, base

    def where(self, node: Node) -> str:
        """The source, and the line in a file."""
        return f"{self.name}:{node.start_mark.line + 1}" if self.has_lines and node.start_mark else self.name


def parse(text: str, source: Source, called: str = "") -> Node | None:
    """The YAML document in `text`; None if it is empty. `called`: the source's name in messages. Raises UserError if it
    is not YAML, is too large, or has a tag or text that cannot be written to a file."""
    called = called or source.name
    if len(text) > MAX_CHARACTERS:
        raise UserError(f"{called}: {len(text)} characters; a configuration has at most {MAX_CHARACTERS}")
    try:
        node: Node | None = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark and "\n" in text else ""
        raise UserError(f"{called}: not valid YAML: {line}{error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError) as error:
        reason = getattr(error, "reason", None) or str(error).splitlines()[0]
        raise UserError(f"{called}: not valid YAML: {reason}") from None
    except RecursionError:
        raise UserError(f"{called}: nested too deeply") from None
    if node is not None:
        _check_size(node, source)
    return node


def text_node(text: str, source: Source) -> ScalarNode:
    """A node for `text`, as if it were quoted."""
    node = ScalarNode(TEXT, text, style='"')
    _check_size(node, source)
    return node


def _check_size(document: Node, source: Source) -> None:
    """Refuse documents that aliases expand to an enormous or endless size, and text that no file can hold."""
    seen, open_nodes = 0, [(document, 0)]
    while open_nodes:
        node, depth = open_nodes.pop()
        seen += 1
        if seen > _MAX_NODES or depth > _MAX_DEPTH:
            raise UserError(f"{source.where(node)}: nested too deeply, or too large once its aliases are followed")
        if isinstance(node, MappingNode):
            open_nodes += [(inside, depth + 1) for pair in node.value for inside in pair]
        elif isinstance(node, SequenceNode):
            open_nodes += [(inside, depth + 1) for inside in node.value]
        elif "\0" in node.value or any("\ud800" <= character <= "\udfff" for character in node.value):
            raise UserError(
                f"{source.where(node)}: {node.value[:80]!r} is not text: it holds a NUL or half of a surrogate pair"
            )


def entries(node: MappingNode, source: Source) -> dict[str, tuple[Node, Node]]:
    """Name -> key and value, with those merged in by `<<`. Raises UserError for a key that is repeated or not text."""
    own: dict[str, tuple[Node, Node]] = {}
    merged: dict[str, tuple[Node, Node]] = {}
    for key, value in node.value:
        if key.tag == "merge":
            for other in value.value if isinstance(value, SequenceNode) else [value]:
                if not isinstance(other, MappingNode):
                    raise UserError(f"{source.where(key)}: '<<' takes a mapping")
                merged = entries(other, source) | merged
        elif not isinstance(key, ScalarNode) or key.tag not in (TEXT, DOUBTFUL) or not key.value:
            raise UserError(
                f"{source.where(key)}: the key {shown(key)} is not text to YAML; write it in quotes: '{shown(key)}'"
            )
        elif key.value in own:
            first = f", first in line {own[key.value][0].start_mark.line + 1}" if source.has_lines else ""
            raise UserError(f"{source.where(key)}: the key '{key.value}' appears twice{first}")
        else:
            own[key.value] = (key, value)
    return merged | own


def scalar(node: ScalarNode) -> Any:
    """The value of a single word or text."""
    if node.tag == "bool":
        return node.value.lower() == "true"
    if node.tag == "int":
        return int(node.value)
    if node.tag == "float":
        return float(re.sub(r"\.(?=[a-zA-Z])", "", node.value))  # Python spells .inf and .nan without the dot
    return None if node.tag == "null" else str(node.value)


def plain(node: Node | None, source: Source) -> Any:
    """The value of a document that is read without a schema. Raises UserError for a doubtful word."""
    if isinstance(node, MappingNode):
        return {name: plain(value, source) for name, (_, value) in entries(node, source).items()}
    if isinstance(node, SequenceNode):
        return [plain(one, source) for one in node.value]
    if isinstance(node, ScalarNode) and node.tag == DOUBTFUL:
        raise UserError(f"{source.where(node)}: {shown(node)} is text in YAML 1.2; write it in quotes, or in decimal")
    return scalar(node) if isinstance(node, ScalarNode) else None


def shown(node: Node) -> str:
    """A node as messages show it, shortened: quoted text as Python writes it, a plain word as in the file."""
    if not isinstance(node, ScalarNode):
        return "{...}" if isinstance(node, MappingNode) else "[...]"
    text = node.value if len(node.value) <= 80 else f"{node.value[:80]}..."
    return repr(text) if node.style or not text or not text.isprintable() else text
