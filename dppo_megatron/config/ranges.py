"""Ranges of settings, written at the field that they belong to, and the one walker that checks them.

    prompts_per_step: int = ranged(64, "[1, 65536]")
    min_inclusion_prob: float = ranged(0.2, "(0, 1]", why="0 would leave prompts that can never be drawn")

A range excludes absurd values, not unwise ones: upper ends are far above anything ever run, so that 2**40 or a value in
the wrong unit is an error at the start and not a hang later. Every number of the schema has a range
(tests/test_config.py). How settings must fit together is checked in `checks.py` and in the files of the sections.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from dppo_megatron.config.other_names import meant
from dppo_megatron.types import UserError

T = TypeVar("T")

SECONDS = "(0, 1e8]"
"""For time limits: up to three years. Longer ones overflow the timers of sockets and locks."""
COUNT = "[0, 1e9]"
"""For steps and other counts where 0 means none, all or off."""
FREE_AT_RESUME = {"free_at_resume": True}
"""Metadata of a field that may change when a run resumes, as `ranged` makes it. A section has an attribute instead."""
_FORM = re.compile(r"(?:0 or )?([\[(])(\S+), (\S+)([\])])")


@dataclass(frozen=True, slots=True)
class Range:
    """An interval of finite numbers, optionally with 0 as another allowed value."""

    low: float
    high: float
    holds_low: bool
    holds_high: bool
    or_zero: bool
    why: str

    @staticmethod
    def parse(text: str, why: str = "") -> Range:
        """Read `[1, 100]`, `(0, 1]`, `0 or [1, 1e6]` and the like."""
        match = _FORM.fullmatch(text)
        assert match is not None, text
        opening, low, high, closing = match.groups()
        return Range(_number(low), _number(high), opening == "[", closing == "]", text.startswith("0 or "), why)

    def __contains__(self, value: float) -> bool:
        if self.or_zero and value == 0:
            return True
        above = value >= self.low if self.holds_low else value > self.low
        below = value <= self.high if self.holds_high else value < self.high
        return above and below  # NaN is neither

    def wanted(self, value: float) -> str:
        """What `value`, which is out of range, must be, and why."""
        if self.high <= 1:
            text = f"must be in {self}"
        elif not math.isfinite(value):
            text = f"must be finite, in {self}"
        elif value > self.low:
            text = f"must be {'at most' if self.holds_high else 'below'} {_short(self.high)}"
        elif self.low == 0:
            text = "must not be negative" if self.holds_low else "must be greater than 0"
        else:
            text = f"must be {'at least' if self.holds_low else 'above'} {_short(self.low)}"
        return text + (", or 0" if self.or_zero else "") + (f"; {self.why}" if self.why else "")

    def __str__(self) -> str:
        ends = f"{_short(self.low)}, {_short(self.high)}"
        return f"{'[' if self.holds_low else '('}{ends}{']' if self.holds_high else ')'}"


def ranged(default: T, interval: str, *, why: str = "", free_at_resume: bool = False) -> T:
    """A field of a settings class with a default and the range that its values (or a list's elements) must be in."""
    of = {"range": Range.parse(interval, why), "free_at_resume": free_at_resume}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=of)  # type: ignore[return-value]
    return field(default=default, metadata=of)


def check_ranges(section: Any, prefix: str = "") -> None:
    """Raise `UserError` for the first number in `section` and its subsections that is out of its range, and for the
    first text that is not one of its choices."""
    for key, value, allowed in leaves(section, prefix.removesuffix(".")):
        if allowed is not None and value is not None and value not in allowed:
            raise UserError(f"{key} = {value}: {allowed.wanted(value)}")
    if is_dataclass(section):
        _check_choices(section, prefix)


def check_choice(key: str, value: str, known: Iterable[str], more: str = "") -> None:
    """Raise `UserError` unless `value` is one of `known`; `more`, at the end of the message: what else is allowed."""
    if value not in (known := list(known)):
        advice = meant(key, value, known)
        hint = f"{advice}{' ' if advice.endswith('?') else '; '}" if advice else ""
        raise UserError(f"{key} = '{value[:80]}': no such choice; {hint}known: {', '.join(known)}{more}")


def _check_choices(section: Any, key: str) -> None:
    """Check the choices of a settings class. Those of a file are checked on reading, those of a library's user here."""
    kind: Any = type(section)
    hints = types_of(kind)
    for item in fields(section):
        value, hint, name = getattr(section, item.name), without_none(hints[item.name]), f"{key}{item.name}"
        if get_origin(hint) is Literal and value is not None:
            check_choice(name, str(value), get_args(hint))
        if is_dataclass(value):
            _check_choices(value, f"{name}.")


types_of = cache(get_type_hints)


def without_none(hint: Any) -> Any:
    """`int` of `int | None`; any other type as it is."""
    arms = [arm for arm in get_args(hint) if arm is not NoneType]
    return arms[0] if get_origin(hint) in (Union, UnionType) else hint


def leaves(section: Any, key: str = "", allowed: Range | None = None) -> Iterator[tuple[str, Any, Range | None]]:
    """Dotted key, value and range of every value in `section`: a settings class, or plain mappings and lists."""
    if isinstance(section, list):
        for index, entry in enumerate(section):
            yield from leaves(entry, f"{key}[{index}]", allowed)
    elif isinstance(section, dict):
        for name, entry in section.items():
            yield from leaves(entry, f"{key}.{name}" if key else str(name), allowed)
    elif is_dataclass(section):
        for item in fields(section):
            inside = f"{key}.{item.name}" if key else item.name
            yield from leaves(getattr(section, item.name), inside, item.metadata.get("range"))
    else:
        yield key, section, allowed


def _number(text: str) -> int | float:
    return float(text) if "e" in text or "." in text else int(text)  # 2**63 - 1 is not representable as a float


def _short(number: float) -> str:
    return str(int(number)) if isinstance(number, int) or number == int(number) else f"{number:g}"
