"""`actor.megatron` and `actor.ddp`: fields of Megatron's own dataclasses, checked before a model is built.

Megatron has some 250 of them and every release adds more, so they are not copied into the schema. `megatron_fields.py`
lists what each known one does here: one that another setting decides, or that would have no effect or a wrong one, is
refused with the reason. Any other is accepted, and the log names it as not tried unless a test trains with it.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
from collections.abc import Mapping
from typing import Any

from dppo_megatron.actor.megatron_fields import DECIDED, ELSEWHERE, HARMLESS, RECIPES, REFUSED, TESTED
from dppo_megatron.types import UserError


def overridden(name: str, cls: type, ours: Mapping[str, Any], given: Mapping[str, Any], fp8: str) -> dict[str, Any]:
    """`ours` with the fields of `given`, which is the setting `name` and meant for the dataclass `cls`.

    A refused field may have the value that it has anyway (ours, or where we set none Megatron's default), or one that
    switches it off.

    Args:
        fp8: actor.fp8.

    Raises:
        UserError: a field that `cls` does not have, that something else decides, or that would be wrong here.
    """
    known = {field.name: field for field in dataclasses.fields(cls) if field.init}
    found = dict(ours)
    for key, value in given.items():
        if key not in known:
            close = difflib.get_close_matches(key, known, 1)
            hint = f"; {ELSEWHERE[key]}" if key in ELSEWHERE else f"; did you mean {close[0]}?" if close else ""
            raise UserError(f"{name}.{key}: the installed megatron-core's {cls.__name__} has no such field{hint}")
        default = known[key].default
        if isinstance(default, enum.Enum) and isinstance(value, str):
            if value not in type(default).__members__:
                raise UserError(f"{name}.{key} = {value}: must be one of {', '.join(type(default).__members__)}")
            value = type(default)[value]
        off = key in HARMLESS and value == HARMLESS[key]
        if value != ours.get(key, default) and not off:
            if reason := _refusal(key, fp8):
                raise UserError(f"{name}.{key}: {reason}")
            found[key] = value
    return found


def _refusal(key: str, fp8: str) -> str:
    if key in REFUSED:
        return f"cannot be set: {REFUSED[key]}"
    if key in DECIDED:
        return f"is decided by {DECIDED[key]}"
    if (recipes := RECIPES.get(key)) and fp8 not in recipes:
        return f"has no effect with actor.fp8 = {fp8}, only with {recipes}"
    return ""


def untested(name: str, cls: type, ours: Mapping[str, Any], given: Mapping[str, Any], fp8: str) -> list[str]:
    """The fields of `given` that are accepted and change something, but which no test here trains with."""
    found = overridden(name, cls, ours, given, fp8)
    return [f"{name}.{key}" for key in found if key not in TESTED and (key not in ours or found[key] != ours[key])]


def build(name: str, cls: type, ours: Mapping[str, Any], given: Mapping[str, Any], fp8: str) -> Any:
    """`cls` from `ours` and `given`; what Megatron refuses of it becomes a `UserError`, if anything was given."""
    settings = overridden(name, cls, ours, given, fp8)
    try:
        return cls(**settings)
    except (ValueError, TypeError, AssertionError, ImportError, NotImplementedError) as error:
        if not given:
            raise
        raise UserError(f"{name} = {dict(given)}: megatron-core refuses it: {error}") from None
