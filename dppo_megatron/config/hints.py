"""Suggests what an unknown key was meant to be.

Most unknown keys are typing mistakes or another trainer's names. For the first a close name is suggested; for the
second the tables of docs/migrating.md have the equivalent. A wrong hint is worse than none, so where neither is clear
the message only lists the known keys.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import fields
from functools import cache

from dppo_megatron.config.paths import shipped
from dppo_megatron.config.reference import all_keys
from dppo_megatron.config.schema import Config
from dppo_megatron.types import UserError

_FOREIGN = ("actor_rollout_ref", "algorithm", "trainer", "critic", "reward_model", "custom_reward_function", "ray_init")
"""Sections of verl: a name of ours that looks alike means something else."""

_ROW = re.compile(r"^\| `(\S+)` \| (?:`(.+?)`|none) \| (.*?) ?\|$", re.MULTILINE)


@cache
def other_names() -> dict[str, str]:
    """A key of verl's (dotted), TRL's or slime's, or an older one of ours -> our setting and what else to know, or
    `no setting: ` and why."""
    page = shipped("docs", "migrating.md")
    rows = _ROW.findall(page.read_text(encoding="utf-8")) if page.is_file() else ()
    return {
        theirs: f"no setting: {note}" if not ours else f"{ours} ({note})" if note else ours
        for theirs, ours, note in rows
    }


def unknown_key(where: str, key: str, under: list[str], section: type) -> UserError:
    """The error for `key`, which is no setting.

    Args:
        under: what was given under it, each with its leading dot, or an empty text for the key itself.
        section: the class of the section that should have had it.
    """
    key, under = key[:200], [more[:200] for more in under]  # a name in damaged text may have any length
    asked = [f"{key}{more}" for more in under] or [key]
    for name in asked:
        plain = name.lstrip("+~").removeprefix("--").replace("-", "_")
        if (ours := other_names().get(plain)) is not None:
            return UserError(f"{where}: unknown key '{name}'; here it is {ours}")
    parent, _, last = key.rpartition(".")
    names = [item.name for item in fields(section)]
    if section is not Config and (close := difflib.get_close_matches(last, names, n=1, cutoff=0.75)):
        return UserError(f"{where}: unknown key '{key}'; did you mean '{parent}.{close[0]}'?")
    near = [] if key.split(".")[0] in _FOREIGN else _nearest(asked[0], all_keys())
    if near:
        return UserError(f"{where}: unknown key '{asked[0]}'; did you mean '" + "' or '".join(near) + "'?")
    inside = f"in {parent}" if parent else "here"
    return UserError(f"{where}: unknown key '{asked[0]}'; known {inside}: {', '.join(sorted(names))}")


def _nearest(key: str, known: list[str]) -> list[str]:
    """Known keys that `key` most likely means, at most two."""
    ending = [name for name in known if name.endswith(f".{key}")]
    if not ending and (last := key.rpartition(".")[2]) != key:
        ending = [name for name in known if name.endswith(f".{last}")]
    if ending:
        return ending if len(ending) <= 2 else []
    return difflib.get_close_matches(key, known, n=1, cutoff=0.8)
