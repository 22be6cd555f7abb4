"""What there is to say about each setting: its type, default, range, meaning, page, and the file that defines it.

All of it is taken from the schema itself: defaults and ranges from the fields, meanings from the text under
each field, which Python does not keep and which is therefore read from the source. `dppo-megatron config`, the shell
completion and the reference of the documentation site are made from this list, so none of them can go out of date.

And what an unknown key was meant to be: most are typing mistakes or another trainer's names. For the first a close name
is suggested; for the second the tables of `other_names` have the equivalent, or that there is none and why. A wrong
hint is worse than none, so where neither is clear the message only lists the known keys.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from itertools import pairwise
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

import yaml

from dppo_megatron.config.data import DataConfig, SetConfig
from dppo_megatron.config.other_names import closest, other_name, other_names
from dppo_megatron.config.reward import RewardConfig, SetRewardConfig
from dppo_megatron.config.schema import Config, EvalConfig
from dppo_megatron.types import UserError

_FILES = {"csv", "html", "json", "jsonl", "log", "parquet", "pt", "py", "safetensors", "txt", "yaml", "yml"}
"""Ends of file names: `eval.json` is no setting of `eval`."""
_FOREIGN = ("actor_rollout_ref", "algorithm", "trainer", "critic", "reward_model", "custom_reward_function", "ray_init")
"""Sections of verl: a name of ours that looks alike means something else."""
_REPEATING = ("data.eval_sets.", "eval.", "sft.")
"""Where settings stand that RL has too: the tables have RL's."""
_ANYTHINGS = ("steps", "dir", "name", "enabled")
"""Last words of ours that in another section may be anything's."""


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
    """The setting `key` or all of the section `key`; else every setting that has `key` somewhere in its name, unless it
    is the whole name of another trainer's (`lr`), which `unknown_key` answers.

    Example: `temperature` -> rollout.sampling.temperature, eval.temperature, data.eval_sets.<name>.temperature.
    """
    asked = _with_placeholders(key.strip("."))
    below = [one for one in all_settings() if one.key == asked or one.key.startswith(f"{asked}.")]
    is_last = any(one.key.endswith(f".{asked}") for one in all_settings())
    if not below and not is_last and asked in other_names():
        return []
    return below or [one for one in all_settings() if asked and asked in one.key]


def _with_placeholders(key: str) -> str:
    """`data.train_sets.mine.path` -> `data.train_sets.<name>.path`."""
    return re.sub(r"(^data\.(?:train|eval)_sets|(?:^|\.)reward\.functions)\.[^.]+", r"\1.<name>", key)


def page_for(message: str) -> str:
    """The page in docs/ about the first setting that `message` names with its section; empty if it names none.

    Example: `data.eval_paths.math` and the misspelt `data.limt` are about data; `model.safetensors` is a file.
    """
    by_key = {one.key: one for one in all_settings()}
    for word in re.findall(r"(?<![\w/.-])[a-z_]+(?:\.[a-z_0-9]+)+", message):  # a key is not part of a path
        is_file, word = word.rpartition(".")[2] in _FILES, _with_placeholders(word)
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
            kind=_kind(hint),
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
    """The text under each field of a dataclass, its bases' included, in one line each. A set's settings that have none
    have that of the setting which they inherit."""
    found: dict[str, str] = {}
    general = {SetConfig: (DataConfig, EvalConfig), SetRewardConfig: (RewardConfig,)}
    inherited = [of for kind, sections in general.items() if issubclass(schema, kind) for of in sections]
    for owner in (*inherited, *reversed(schema.__mro__)):
        if not is_dataclass(owner):
            continue
        body = _classes(owner.__module__)[cast(type, owner).__name__].body
        for field, text in pairwise(body):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(said))):
                    found[name] = " ".join(said.split())
    return found


@cache
def _classes(module: str) -> dict[str, ast.ClassDef]:
    """The classes in the source of a module, read once: inspect.getsource would parse it for each of them."""
    source = inspect.getsource(sys.modules[module])
    return {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}


def _section(hint: Any) -> type | None:
    """The class of the settings inside: of a section, or of each entry of a mapping."""
    if is_dataclass(hint):
        return cast(type, hint)
    inside = get_args(hint)[1] if get_origin(hint) is dict else None
    return cast(type, inside) if is_dataclass(inside) else None


_TYPES = {bool: "true or false", int: "whole number", float: "number", str: "text", Any: "value"}


def _kind(hint: Any) -> str:
    inside = [arm for arm in get_args(hint) if arm is not NoneType]
    match get_origin(hint):
        case None:
            return _TYPES.get(hint, "section")
        case form if form in (Union, UnionType):
            return f"{_kind(inside[0])} or null"
        case form if form is Literal:
            return "choice"
        case form:
            return f"{'list of' if form is list else 'mapping of names to'} {_kind(inside[-1])}s"


def _default(item: Field[Any]) -> str:
    value = item.default if item.default is not MISSING else cast(Any, item.default_factory)()
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).partition("\n")[0]


def _allowed(item: Field[Any], hint: Any) -> str:
    if (interval := item.metadata.get("range")) is not None:
        return f"in {'0 or ' if interval.or_zero else ''}{interval}"
    choices = [arm for arm in (hint, *get_args(hint)) if get_origin(arm) is Literal]
    return f"one of {', '.join(map(str, get_args(choices[0])))}" if choices else ""


def unknown_key(
    where: str, key: str, under: list[str], section: type, values: Mapping[str, str] = MappingProxyType({})
) -> UserError:
    """The error for `key`, which is no setting.

    Args:
        under: what was given under it, each with its leading dot, or an empty text for the key itself.
        section: the class of the section that should have had it.
        values: the texts of what was given, by whole name.
    """
    key, under = key[:200], [more[:200] for more in under]  # a name in damaged text may have any length
    asked = [f"{key}{more}" for more in under] or [key]
    parent, _, last = key.rpartition(".")
    names, known, last = [item.name for item in fields(section)], all_keys(), last.replace("-", "_").lower()
    is_top = section is Config
    if last in names and not (is_top and parent):
        return _did_you_mean(where, key, [f"{parent}.{last}".lstrip(".")])
    for name in asked:
        if said := other_name(name, values.get(name, "")):
            return UserError(f"{where}: unknown key '{name}'; {said}")
    own = [] if is_top else _own(parent, last, names, known)
    if own:
        return _did_you_mean(where, key, own)
    same = [name for name in known if name.endswith(f".{last}")]
    said = "" if is_top or key.startswith(_REPEATING) or asked != [key] else other_name(last, values.get(key, ""))
    if said and all(name in said for name in same):  # `normalization` is a layer's to others, an objective's here
        return UserError(f"{where}: unknown key '{key}'; {said}")
    close = "" if is_top else closest(last, names, 0.75)
    if close and ("_" not in last or not same):
        return _did_you_mean(where, key, [f"{parent}.{close}"])
    near = [] if key.split(".")[0] in _FOREIGN else _nearest(asked[0].replace("-", "_").lower(), known)
    is_beside = any(name.split(".")[0] == key.split(".")[0] for name in near)
    if close and (is_beside or f"_{close}_" in f"_{last}_"):  # completions' warmup_steps, or the prompts' warmup_epochs
        near = list(dict.fromkeys([f"{parent}.{close}", *near]))
    if near:
        return _did_you_mean(where, asked[0], near)
    inside = "here" if is_top else f"in {parent}"
    return UserError(f"{where}: unknown key '{asked[0]}'; known {inside}: {', '.join(sorted(names))}")


def _did_you_mean(where: str, key: str, names: list[str]) -> UserError:
    return UserError(f"{where}: unknown key '{key}'; did you mean '" + "' or '".join(names) + "'?")


def _own(parent: str, last: str, names: list[str], known: list[str]) -> list[str]:
    """What `last` is the name or half the name of in the section `parent`: `rate` in the sections below it, `tensor` or
    `warmup_steps` in its own names. Of more than four the list of all says as much."""
    below = [name for name in known if name.startswith(f"{parent}.") and name.endswith(f".{last}")]
    found = below + [f"{parent}.{name}" for name in names if f"_{last}_" in f"_{name}_"]
    return found if len(found) <= 4 else []


def _nearest(key: str, known: list[str]) -> list[str]:
    """Known keys that `key` most likely means, at most two. In a section of ours they are its own, by their last words:
    whole keys are alike by the section's name alone. A last word that stands elsewhere is a hint unless it is one of
    `_ANYTHINGS`: updates_per_step and engine are one thing."""
    section, _, rest = key.partition(".")
    last, own = rest.rpartition(".")[2], [name for name in known if name.startswith(f"{section}.")]
    near = [name for name in known if name.endswith(f".{key}")]
    if not near and rest:
        same = [name for name in known if name.endswith(f".{last}") or (name == last and "_" in last)]
        near = [name for name in same if name in own] or (same if last not in _ANYTHINGS else [])
        if len(near) > 2:
            near = difflib.get_close_matches(key, near, n=1, cutoff=0.8)
    if not near and rest and own:
        close = closest(last, sorted({name.rpartition(".")[2] for name in own}), 0.8)
        near = [name for name in own if close and name.endswith(f".{close}")]
    elif not near:
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.8)
    return near if len(near) <= 2 else []
