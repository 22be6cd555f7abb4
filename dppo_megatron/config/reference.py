"""What there is to say about each setting: its type, default, range, meaning, page, and the file that defines it.

All of it is taken from the schema itself: defaults and ranges from the fields, meanings from the text under
each field, which Python does not keep and which is therefore read from the source. `dppo-megatron config`, the shell
completion and the reference of the documentation site are made from this list, so none of them can go out of date.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

import yaml

from dppo_megatron.config.schema import Config

_FILES = {"csv", "html", "json", "jsonl", "log", "parquet", "pt", "py", "safetensors", "txt", "yaml", "yml"}
"""Ends of file names: `eval.json` is no setting of `eval`."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting, or a section of them."""

    key: str
    """Dotted; a name that the user chooses is `<name>`: data.eval_sets.<name>.path."""
    kind: str
    """Its type, as a user would say it; a section's is `section`."""
    default: str
    """As YAML; empty for a section."""
    allowed: str
    """The range or the choices; empty: anything of its type."""
    why: str
    """Why the range ends where it does; mostly empty."""
    meaning: str
    """The text under the field."""
    owner: type
    """The class that has it."""
    page: str
    """The page in docs/ that explains it."""

    @property
    def name(self) -> str:
        """The last part of the key."""
        return self.key.rpartition(".")[2]

    @property
    def file(self) -> str:
        """The file that defines it, from the root of the repository."""
        return f"{self.owner.__module__.replace('.', '/')}.py"

    @property
    def is_section(self) -> bool:
        return self.kind == "section"


@cache
def all_settings() -> tuple[Setting, ...]:
    """Every setting and section, in the order of the schema."""
    return tuple(_walk(Config, "", Config.page))


def all_keys() -> list[str]:
    """Every key that is not under a name of the user's own."""
    return [one.key for one in all_settings() if "<name>" not in one.key]


def find(key: str) -> list[Setting]:
    """The setting `key` or all of the section `key`; else every setting that has `key` somewhere in its name.

    Example: `temperature` -> rollout.sampling.temperature, eval.temperature, data.eval_sets.<name>.temperature.
    """
    asked = re.sub(r"^(data\.(?:train|eval)_sets|reward\.functions)\.[^.]+", r"\1.<name>", key.strip("."))
    below = [one for one in all_settings() if one.key == asked or one.key.startswith(f"{asked}.")]
    return below or [one for one in all_settings() if asked and asked in one.key]


def page_for(message: str) -> str:
    """The page in docs/ about the first setting that `message` names with its section; empty if it names none.

    Example: `data.eval_paths.math` and the misspelt `data.limt` are about data; `model.safetensors` is a file.
    """
    by_key = {one.key: one for one in all_settings()}
    for word in re.findall(r"(?<![\w/.-])[a-z_]+(?:\.[a-z_0-9]+)+", message):  # a key is not part of a path
        is_file = word.rpartition(".")[2] in _FILES
        while word not in by_key and "." in word:  # data.eval_paths.math: the name is the user's
            word = word.rpartition(".")[0]
        if word in by_key and not (is_file and by_key[word].is_section and "." not in word):
            return by_key[word].page
    return ""


def _walk(schema: type, prefix: str, page: str) -> Iterator[Setting]:
    hints, texts = get_type_hints(schema), meanings(schema)
    for item in fields(schema):
        hint, key = hints[item.name], f"{prefix}{item.name}"
        inside = _section(hint)
        explained = getattr(inside, "page", item.metadata.get("page", page))
        yield Setting(
            key=key,
            kind="section" if is_dataclass(hint) else _kind(hint),
            default="" if is_dataclass(hint) else _default(item),
            allowed=_allowed(item, hint),
            why=getattr(item.metadata.get("range"), "why", ""),
            meaning=texts.get(item.name, ""),
            owner=schema,
            page=explained,
        )
        if inside is not None:
            yield from _walk(inside, f"{key}." if is_dataclass(hint) else f"{key}.<name>.", explained)


@cache
def meanings(schema: type) -> dict[str, str]:
    """The text under each field of a dataclass, its bases' included, in one line each."""
    found: dict[str, str] = {}
    for owner in reversed(schema.__mro__):
        if not is_dataclass(owner):
            continue
        [node] = ast.parse(textwrap.dedent(inspect.getsource(cast(type, owner)))).body
        assert isinstance(node, ast.ClassDef)
        for field, text in zip(node.body, node.body[1:], strict=False):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(said))):
                    found[name] = " ".join(said.split())
    return found


def _section(hint: Any) -> type | None:
    """The class of the settings inside: of a section, or of each entry of a mapping."""
    if is_dataclass(hint):
        return cast(type, hint)
    inside = get_args(hint)[1] if get_origin(hint) is dict else None
    return cast(type, inside) if is_dataclass(inside) else None


def _kind(hint: Any) -> str:
    if get_origin(hint) in (Union, UnionType):
        [inner] = [arm for arm in get_args(hint) if arm is not NoneType]
        return f"{_kind(inner)} or null"
    if get_origin(hint) is list:
        return f"list of {_plural(get_args(hint)[0])}"
    if get_origin(hint) is dict:
        return f"mapping of names to {_plural(get_args(hint)[1])}"
    if get_origin(hint) is Literal:
        return "choice"
    return {bool: "true or false", int: "whole number", float: "number", str: "text"}[hint]


def _plural(hint: Any) -> str:
    return {int: "whole numbers", float: "numbers", str: "texts", Any: "values"}.get(hint, "sections")


def _default(item: Field[Any]) -> str:
    value = item.default if item.default is not MISSING else cast(Any, item.default_factory)()
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).partition("\n")[0]


def _allowed(item: Field[Any], hint: Any) -> str:
    if (interval := item.metadata.get("range")) is not None:
        return f"in {'0 or ' if interval.or_zero else ''}{interval}"
    choices = [arm for arm in (hint, *get_args(hint)) if get_origin(arm) is Literal]
    return f"one of {', '.join(map(str, get_args(choices[0])))}" if choices else ""
