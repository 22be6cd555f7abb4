"""What others call our settings and their values, from the tables of docs/migrating.md and docs/other_names.txt.

A name has a row of its own or a pattern's; a value has one as `setting=value`. A wrong hint is worse than none: most
methods have names of four letters, of which GRPO, GSPO and DAPO differ in one or two.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase as fnmatch
from functools import cache

from dppo_megatron.config.paths import shipped

_OFF = ("false", "off", "no")
_ROW = re.compile(r"^\| (`.+?`) \| (?:`(.+?)`|(none)|\[not supported\]\(scope\.md\)) \| (.*?) ?\|$", re.MULTILINE)


@cache
def other_names() -> dict[str, str]:
    """Keys of verl's and NeMo-RL's (dotted), TRL's, slime's and OpenRLHF's, patterns of them with `*`, and values as
    `setting=value`, among these -> what to say: our setting and what else to know, or that there is none and why. In
    the order of the files. `name=false` is a switch of theirs that is not off by leaving ours out."""
    files = [shipped("docs", name) for name in ("migrating.md", "other_names.txt")]
    found: dict[str, str] = {}
    for theirs, ours, none, note in _ROW.findall("".join(one.read_text("utf-8") for one in files if one.is_file())):
        if ours:
            said = f"here it is {ours} ({note})" if note else f"here it is {ours}"
        else:
            said = f"no setting here: {note}" if none else f"not supported: {note} (docs/scope.md)"
        found |= dict.fromkeys(re.findall(r"`([^`]+)`", theirs), said)
    return found


def other_name(key: str, value: str = "") -> str:
    """What `other_names` has to say about a key as it is given there; empty: nothing. A whole name goes before a
    pattern, an earlier pattern before a later one; a last part alone (clip_ratio_high) is enough
    where it means one thing. A switch that `value` turns off is not answered with what turns it on."""
    names, plain = other_names(), key.lstrip("+~-").replace("-", "_").lower()
    if value.lower() in _OFF and (said := names.get(f"{plain}=false") or _off(other_name(key))):
        return said
    found = names.get(plain) or next((said for name, said in names.items() if "*" in name and fnmatch(plain, name)), "")
    if found or "_" not in plain or "." in plain:
        return found
    ending = {said for name, said in names.items() if name.endswith(f".{plain}") and "*" not in name}
    return ending.pop() if len(ending) == 1 else ""


def _off(on: str) -> str:
    """What to say of a switch that is off, where `on` is the answer to its name; empty: `on` is about false too."""
    ours = on.removeprefix("here it is ")
    if ours != on and "=" in ours.partition(" ")[0]:
        return f"off there: leave it out (on, it is {ours})"
    return f"off there: leave it out (on, it is {on})" if on.startswith("not supported") else ""


def meant(key: str, value: str, known: Iterable[str]) -> str:
    """What `value`, which is no choice of `key`, was meant to be: another trainer's word, else one of `known` that is
    very close; empty: neither. At difflib's own cutoff of 0.6 'grpo' would be 'gspo', which is another loss."""
    general = re.sub(r"^data\.(?:train|eval)_sets\.[^.]+\.", "data.", key)  # rows have what a set's own replaces
    if said := other_names().get(f"{general}={value.replace('-', '_').lower()}"):
        return said
    close = closest(value, list(known), 0.8)
    return f"did you mean '{close}'?" if close else ""


def closest(word: str, known: list[str], cutoff: float) -> str:
    """The one of `known` most like `word`; else one of the same letters: two that change places leave 'gpso' 0.75 like
    'gspo', as 'grpo' is. Empty: none."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=cutoff)
    return next(iter([*close, *(one for one in known if sorted(one) == sorted(word))]), "")
