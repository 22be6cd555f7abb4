"""The reference of all settings: type, default, range, meaning, page, and the file that defines each.

All of it is taken from the schema: defaults and ranges from the fields, meanings from the docstring under each field,
which Python does not keep, so it is read from the source. `dppo-megatron config`, the shell completion and the
documentation site's reference are made from this list, so none of them can go out of date.

Also: what an unknown key was meant to be. Most are typing mistakes, for which a similar key is suggested, or another
trainer's names, for which the tables of `other_names` have the equivalent, or why there is none. A wrong hint is worse
than none, so if neither is clear, the message only lists the known keys.
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
from types import MappingProxyType
from typing import Any, Literal, cast, get_args, get_origin

import yaml

from dppo_megatron.config.data import DataConfig, SetConfig
from dppo_megatron.config.other_names import closest, other_name, other_names
from dppo_megatron.config.ranges import types_of, without_none
from dppo_megatron.config.reward import RewardConfig, SetRewardConfig
from dppo_megatron.config.schema import Config, EvalConfig
from dppo_megatron.types import UserError

_FILES = {"csv", "html", "json", "jsonl", "log", "parquet", "pt", "py", "safetensors", "txt", "yaml", "yml"}
"""File name suffixes: in a message, `eval.json` is a file and not a setting of `eval`."""
_FOREIGN = ("actor_rollout_ref", "algorithm", "trainer", "critic", "reward_model", "custom_reward_function", "ray_init")
"""Sections of verl. A key of ours that looks similar to one in them means something else."""
_REPEATING = ("data.eval_sets.", "eval.", "sft.")
"""Sections with settings that RL has too. The tables of `other_names` are about those of RL."""
_AMBIGUOUS = ("steps", "dir", "name", "enabled")
"""Last parts of keys that could mean anything in another section."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting, or a section of them."""

    key: str
    """Dotted; a name that the user chooses is `<name>`: data.eval_sets.<name>.path."""
    kind: str
    """Its type in a user's words (whole number, list of texts); `section` for a section."""
    default: str
    """In YAML; empty for a section."""
    allowed: str
    """The range or the choices; empty: anything of its type."""
    why: str
    """Reason for the range, if it is not obvious; mostly empty."""
    meaning: str
    """The docstring under the field."""
    owner: type
    """The class that has the field."""
    page: str
    """The page in docs/ that explains it."""

    @property
    def name(self) -> str:
        """The last part of the key."""
        return self.key.rpartition(".")[2]

    @property
    def file(self) -> str:
        """The file that defines it, relative to the root of the repository."""
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
    return [setting.key for setting in all_settings() if "<name>" not in setting.key]


def find(key: str) -> list[Setting]:
    """The setting `key`, or all of the section `key`; else every setting whose key contains `key`. Empty for the exact
    name of another trainer's setting (`lr`), which `unknown_key` has advice for.

    Example: `temperature` -> rollout.sampling.temperature, eval.temperature, data.eval_sets.<name>.temperature.
    """
    key = _with_placeholders(key.strip("."))
    exact = [setting for setting in all_settings() if setting.key == key or setting.key.startswith(f"{key}.")]
    is_last_part = any(setting.key.endswith(f".{key}") for setting in all_settings())
    if not exact and not is_last_part and key in other_names():
        return []
    return exact or [setting for setting in all_settings() if key and key in setting.key]


def _with_placeholders(key: str) -> str:
    """`data.train_sets.mine.path` -> `data.train_sets.<name>.path`."""
    return re.sub(r"(^data\.(?:train|eval)_sets|(?:^|\.)reward\.functions)\.[^.]+", r"\1.<name>", key)


def page_for(message: str) -> str:
    """The page in docs/ about the first dotted key in `message`; empty if it has none.

    Example: `data.eval_paths.math` and the misspelt `data.limt` belong to data; `model.safetensors` is a file.
    """
    by_key = {setting.key: setting for setting in all_settings()}
    for word in re.findall(r"(?<![\w/.-])[a-z_]+(?:\.[a-z_0-9]+)+", message):  # the lookbehind skips parts of paths
        is_file, word = word.rpartition(".")[2] in _FILES, _with_placeholders(word)
        while word not in by_key and "." in word:  # data.eval_paths.math: `math` is the user's own name
            word = word.rpartition(".")[0]
        if word in by_key and not (is_file and by_key[word].is_section and "." not in word):
            return by_key[word].page
    return ""


def _walk(schema: type, prefix: str, page: str) -> Iterator[Setting]:
    hints, texts = types_of(schema), meanings(schema)
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
    """The docstring under each field of a dataclass and its bases, on one line. A set's setting without a docstring has
    that of the setting whose value it inherits."""
    texts: dict[str, str] = {}
    general = {SetConfig: (DataConfig, EvalConfig), SetRewardConfig: (RewardConfig,)}
    inherited = [section for kind, sections in general.items() if issubclass(schema, kind) for section in sections]
    for owner in (*inherited, *reversed(schema.__mro__)):
        if not is_dataclass(owner):
            continue
        body = _classes(owner.__module__)[cast(type, owner).__name__].body
        for field, below in pairwise(body):
            match field, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    texts[name] = " ".join(text.split())
    return texts


@cache
def _classes(module: str) -> dict[str, ast.ClassDef]:
    """The classes in the source of a module. inspect.getsource(class) would parse the module for each of them."""
    source = inspect.getsource(sys.modules[module])
    return {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}


def _section(hint: Any) -> type | None:
    """The settings class of a section, or of each entry of a mapping; None for other settings."""
    if is_dataclass(hint):
        return cast(type, hint)
    inside = get_args(hint)[1] if get_origin(hint) is dict else None
    return cast(type, inside) if is_dataclass(inside) else None


_TYPES = {bool: "true or false", int: "whole number", float: "number", str: "text", Any: "value"}


def _kind(hint: Any) -> str:
    form = get_origin(hint)
    if (plain := without_none(hint)) is not hint:
        return f"{_kind(plain)} or null"
    if form is None:
        return _TYPES.get(hint, "section")
    inside = get_args(hint)[-1]
    return "choice" if form is Literal else f"{'list of' if form is list else 'mapping of names to'} {_kind(inside)}s"


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
    """The error for `key`, which is not a setting.

    Args:
        under: keys that were set below `key`, relative to it and each with its leading dot; empty: only `key` itself.
        section: the class of the section in which `key` is unknown.
        values: the value of each key that was set, as text.
    """
    key, under = key[:200], [more[:200] for more in under]  # a name in damaged text may have any length
    full_keys = [f"{key}{more}" for more in under] or [key]
    parent, _, last = key.rpartition(".")
    names, known, last = [item.name for item in fields(section)], all_keys(), last.replace("-", "_").lower()
    is_top = section is Config
    if last in names and not (is_top and parent):
        return _did_you_mean(where, key, [f"{parent}.{last}".lstrip(".")])
    for name in full_keys:
        if advice := other_name(name, values.get(name, "")):
            return UserError(f"{where}: unknown key '{name}'; {advice}")
    own = [] if is_top else _own(parent, last, names, known)
    if own:
        return _did_you_mean(where, key, own)
    same = [name for name in known if name.endswith(f".{last}")]
    advice = "" if is_top or key.startswith(_REPEATING) or full_keys != [key] else other_name(last, values.get(key, ""))
    # Not if a setting here has the same last part and another meaning: others' `normalization` is one of layers.
    if advice and all(name in advice for name in same):
        return UserError(f"{where}: unknown key '{key}'; {advice}")
    close = "" if is_top else closest(last, names, 0.75)
    if close and ("_" not in last or not same):
        return _did_you_mean(where, key, [f"{parent}.{close}"])
    near = [] if key.split(".")[0] in _FOREIGN else _nearest(full_keys[0].replace("-", "_").lower(), known)
    in_section = any(name.split(".")[0] == key.split(".")[0] for name in near)
    if close and (in_section or f"_{close}_" in f"_{last}_"):  # completions' warmup_steps, or prompts' warmup_epochs
        near = list(dict.fromkeys([f"{parent}.{close}", *near]))
    if near:
        return _did_you_mean(where, full_keys[0], near)
    inside = "here" if is_top else f"in {parent}"
    return UserError(f"{where}: unknown key '{full_keys[0]}'; known {inside}: {', '.join(sorted(names))}")


def _did_you_mean(where: str, key: str, names: list[str]) -> UserError:
    return UserError(f"{where}: unknown key '{key}'; did you mean '" + "' or '".join(names) + "'?")


def _own(parent: str, last: str, names: list[str], known: list[str]) -> list[str]:
    """Keys of the section `parent` that `last` may mean: those below it with this last part (`rate`), and its own whose
    name contains it (`tensor`, `warmup_steps`). Empty if there are more than four: a list of all keys helps as much."""
    below = [name for name in known if name.startswith(f"{parent}.") and name.endswith(f".{last}")]
    matches = below + [f"{parent}.{name}" for name in names if f"_{last}_" in f"_{name}_"]
    return matches if len(matches) <= 4 else []


def _nearest(key: str, known: list[str]) -> list[str]:
    """Known keys that `key` most likely means, at most two. In a known section only last parts are compared, as whole
    keys are similar by the section's name alone. The same last part in another section (updates_per_step, engine) is a
    hint too, unless it is in `_AMBIGUOUS`."""
    section, _, rest = key.partition(".")
    last, own = rest.rpartition(".")[2], [name for name in known if name.startswith(f"{section}.")]
    near = [name for name in known if name.endswith(f".{key}")]
    if not near and rest:
        same = [name for name in known if name.endswith(f".{last}") or (name == last and "_" in last)]
        near = [name for name in same if name in own] or (same if last not in _AMBIGUOUS else [])
        if len(near) > 2:
            near = difflib.get_close_matches(key, near, n=1, cutoff=0.8)
    if not near and rest and own:
        close = closest(last, sorted({name.rpartition(".")[2] for name in own}), 0.8)
        near = [name for name in own if close and name.endswith(f".{close}")]
    elif not near:
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.8)
    return near if len(near) <= 2 else []
