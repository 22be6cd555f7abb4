"""`key=value` settings of the command line: dotted keys, values by the type that the key has.

A text setting takes everything after the `=` literally, so that nothing in a path is read as YAML (OmegaConf's dotlists
would read all of it); quotes around it are removed. Other settings are read as YAML: `steps=20`,
`rollout.servers.gpus='["0,1", "2,3"]'`. A name with a dot or an equals sign is quoted:
`data.eval_paths."math/500.v2"=rows.jsonl`. `key={}` and `key={a: b}` replace a whole mapping; `key.name=...` adds one
entry.
"""

from __future__ import annotations

import re
from dataclasses import is_dataclass
from typing import Any, Literal, get_args, get_origin

from dppo_megatron.config.layers import Layer, inside
from dppo_megatron.config.schema import Config
from dppo_megatron.config.yaml12 import Source, parse, text_node
from dppo_megatron.types import UserError

_PART = re.compile(r'"([^"]+)"|\'([^\']+)\'|([^."\'=]+)')


def read_setting(item: str) -> Layer:
    """What one `key=value` gives. Raises UserError."""
    source = Source(f"override '{item if len(item) <= 200 else item[:200] + '...'}'", has_lines=False)
    names, text = _split(item)
    text_node(item, source)
    is_text = _is_text(_hint(names, source))
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "\"'"
    literal = is_text and not quoted and text not in ("null", "~")
    node = text_node(text, source) if literal else parse(text, source)
    if node is None:
        raise UserError(f"{source.name}: {'.'.join(names)} is given no value")
    return Layer(source, node, names, replaces=True)


def _split(item: str) -> tuple[list[str], str]:
    """The names in the dotted key, without quotes, and what stands after the equals sign."""
    names, position = [], 0
    while match := _PART.match(item, position):
        names.append(match[match.lastindex or 0])
        position = match.end() + 1
        if item[match.end() : position] == "=":
            return names, item[position:]
        if item[match.end() : position] != ".":
            break
    raise UserError(f"override '{item[:200]}': expected key=value, for example steps=100")


def _hint(names: list[str], source: Source) -> Any:
    """The type of the setting that `names` name; None if there is none."""
    hint: Any = Config
    for number, name in enumerate(names):
        within = inside(hint, name)
        if within is None and not is_dataclass(hint):
            quoted = f'{names[0]}.{names[1]}."{".".join(names[2:])}"' if number > 2 else ""
            meant = f"; a name with a dot is quoted: {quoted}=..." if quoted else ""
            raise UserError(f"{source.name}: '{'.'.join(names[:number])}' is a value, it has no '{name}'{meant}")
        if within is None:
            return None
        hint = within
    return hint


def _is_text(hint: Any) -> bool:
    arms = (hint, *get_args(hint)) if type(None) in get_args(hint) else (hint,)
    return any(arm is str or get_origin(arm) is Literal for arm in arms)
