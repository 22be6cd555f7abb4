"""Other trainers' names for settings and values, from the tables of docs/migrating.md and docs/other_names.txt.

The row of a name may be a pattern; that of a value is `setting=value`. A wrong hint is worse than none: most methods
have names of four letters, and those of GRPO, GSPO and DAPO differ in one or two.
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
    """Advice for each name of another trainer: this project's setting and a note, or why there is none.

    Names are keys of verl and NeMo-RL (dotted), TRL, slime and OpenRLHF, patterns of such keys with `*`, and
    `setting=value`; in the order of the files. `name=false` is for a switch whose false needs a setting here too.
    """
    files = [shipped("docs", name) for name in ("migrating.md", "other_names.txt")]
    names: dict[str, str] = {}
    for theirs, ours, none, note in _ROW.findall("".join(one.read_text("utf-8") for one in files if one.is_file())):
        if ours:
            advice = f"here it is {ours} ({note})" if note else f"here it is {ours}"
        else:
            advice = f"no setting here: {note}" if none else f"not supported: {note} (docs/scope.md)"
        names |= dict.fromkeys(re.findall(r"`([^`]+)`", theirs), advice)
    return names


def other_name(key: str, value: str = "") -> str:
    """The advice of `other_names` for another trainer's key, as the user wrote it; empty: none.

    An exact name goes before a pattern, an earlier pattern before a later one. The last part alone (clip_ratio_high) is
    enough if it has one meaning. For a switch that `value` turns off, the advice is not how to turn it on.
    """
    names, plain = other_names(), key.lstrip("+~-").replace("-", "_").lower()
    if value.lower() in _OFF and (advice := names.get(f"{plain}=false") or _off(other_name(key))):
        return advice
    advice = names.get(plain) or next((names[name] for name in names if "*" in name and fnmatch(plain, name)), "")
    if advice or "_" not in plain or "." in plain:
        return advice
    by_last_part = {advice for name, advice in names.items() if name.endswith(f".{plain}") and "*" not in name}
    return by_last_part.pop() if len(by_last_part) == 1 else ""


def _off(on: str) -> str:
    """The advice for a switch that is off; `on` is that for its name. Empty: `on` covers false too."""
    ours = on.removeprefix("here it is ")
    if ours != on and "=" in ours.partition(" ")[0]:
        return f"off there: leave it out (on, it is {ours})"
    return f"off there: leave it out (on, it is {on})" if on.startswith("not supported") else ""


def meant(key: str, value: str, known: Iterable[str]) -> str:
    """A hint at what `value`, which is not a choice of `key`, was meant to be: the advice for another trainer's word,
    else the very similar one of `known`; empty: neither."""
    general = re.sub(r"^data\.(?:train|eval)_sets\.[^.]+\.", "data.", key)  # the tables have the settings of `data`
    word = "module:function" if ":" in value else value.replace("-", "_").lower()
    if advice := other_names().get(f"{general}={word}"):
        return advice
    close = closest(value, list(known), 0.8)  # at difflib's default of 0.6 'grpo' would become 'gspo', another loss
    return f"did you mean '{close}'?" if close else ""


def closest(word: str, known: list[str], cutoff: float) -> str:
    """The one of `known` most similar to `word`; else one with the same letters, as two swapped ones leave a similarity
    of only 0.75 ('gpso' to 'gspo', the same as 'grpo' has). Empty: none."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=cutoff)
    return next(iter([*close, *(one for one in known if sorted(one) == sorted(word))]), "")
