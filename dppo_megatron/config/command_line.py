"""`key=value` settings of the command line: dotted keys, values by the type that the key has.

A text setting takes everything after the `=` literally, so that nothing in a path is read as YAML; quotes around it are
removed. Other settings are read as YAML: `steps=20`, `rollout.servers.gpus='["0,1", "2,3"]'`. A name with a dot or an
equals sign is quoted: `data.eval_paths."math/500.v2"=rows.jsonl`. `key={}` and `key={a: b}` replace a whole
mapping; `key.name=...` adds one entry.
"""

from __future__ import annotations

import os
import re
from dataclasses import is_dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from dppo_megatron.config.hints import unknown_key
from dppo_megatron.config.reading import Entries, Reader, Values, parse, text_node
from dppo_megatron.types import UserError

_PART = re.compile(r'"([^"]*)"|\'([^\']*)\'|([^."\'=]+)')


def check_comes_first(path: str) -> None:
    """Raise UserError if a setting stands where a command expects its config file."""
    if "=" in path and not os.path.exists(path):
        raise UserError(f"'{path}' stands where CONFIG should: the file comes first, settings (key=value) after it")


def read_setting(item: str, root: type) -> Values:
    """The values that one `key=value` gives, nested as the schema is. Raises UserError."""
    parts, text = _split(item)
    source = f"override '{item if len(item) <= 200 else item[:200] + '...'}'"
    hint, reached = _hint(parts, root, source)
    reader = Reader(root, source, has_lines=False)
    key = ".".join(reached)
    value = _value(reader, hint, text, key, source)
    if isinstance(value, Entries):
        value.replaces = True
    for number in range(len(parts) - 1, -1, -1):
        value = _nested(root, parts[:number], parts[number], value)
    assert isinstance(value, dict)
    return value


def split_key(text: str) -> list[str] | None:
    """The names in a dotted key, without quotes; None if it is not a dotted key."""
    parts, position = [], 0
    while match := _PART.match(text, position):
        parts.append(next(group for group in match.groups() if group is not None))
        position = match.end()
        if position == len(text):
            return parts
        if text[position] != ".":
            return None
        position += 1
    return None


def _split(item: str) -> tuple[list[str], str]:
    position = 0
    while match := _PART.match(item, position):
        position = match.end()
        if item[position : position + 1] == "=":
            parts = split_key(item[:position])
            if parts is None:
                break
            return parts, item[position + 1 :]
        if item[position : position + 1] != ".":
            break
        position += 1
    raise UserError(f"override '{item[:200]}': expected key=value, for example steps=100")


def _hint(parts: list[str], root: type, source: str) -> tuple[Any, list[str]]:
    """The type of the setting that `parts` name, and the parts as messages show them."""
    hint: Any = root
    reached: list[str] = []
    for number, part in enumerate(parts):
        if is_dataclass(hint):
            hints = get_type_hints(hint)
            if part not in hints:
                rest = "".join(f".{name}" for name in parts[number + 1 :])
                key = ".".join([*reached, part])
                raise unknown_key(source, key, [rest], hint, root)  # type: ignore[arg-type]
            hint = hints[part]
        elif (inside := _mapping(hint)) is not None:
            hint = inside
        else:
            quoted = f'{reached[0]}.{reached[1]}."{".".join([*reached[2:], *parts[number:]])}"' if number > 2 else ""
            meant = f"; a name with a dot is quoted: {quoted}=..." if quoted else ""
            raise UserError(f"{source}: '{'.'.join(reached)}' is a value, it has no '{part}'{meant}")
        reached.append(part)
    return hint, reached


def _mapping(hint: Any) -> Any:
    """What the values of a mapping's type are; None if it is no mapping."""
    for arm in (hint, *get_args(hint)):
        if get_origin(arm) is dict:
            return get_args(arm)[1]
    return None


def _value(reader: Reader, hint: Any, text: str, key: str, source: str) -> Any:
    arms = [arm for arm in get_args(hint) if arm is not type(None)] if type(None) in get_args(hint) else [hint]
    is_text = arms[0] is str or get_origin(arms[0]) is Literal
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "\"'"
    if is_text and not quoted and text not in ("null", "~"):
        return reader.value(hint, text_node(text), key)
    node = parse(text, source)
    if node is None:
        if not is_text:
            raise UserError(f"{source}: {key} is given no value")
        node = text_node("")
    return reader.value(hint, node, key)


def _nested(root: type, above: list[str], name: str, value: Any) -> Values:
    """`value` under `name`, as an entry if it is one of a mapping's."""
    hint: Any = root
    for part in above:
        hint = get_type_hints(hint)[part] if is_dataclass(hint) else _mapping(hint)
    return {name: value} if is_dataclass(hint) else Entries({name: value})
