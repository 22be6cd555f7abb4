"""Every number of the schema has a range; every end of it acts; what is absurd is a sentence and not a hang."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_origin, get_type_hints

import pytest

from dppo_megatron.config.ranges import Range, check_ranges, numbers
from dppo_megatron.config.schema import Config
from dppo_megatron.types import UserError


def _number_fields(schema: type, prefix: str = "") -> Iterator[tuple[type, str, str, bool, Range | None]]:
    """Section, field, dotted key, whether it is whole, and range of every number, also inside mappings of sections."""
    hints = get_type_hints(schema)
    for item in fields(schema):
        key, hint = f"{prefix}{item.name}", hints[item.name]
        inner = [hint, *get_args(hint)]
        for arm in inner:
            if isinstance(arm, type) and is_dataclass(arm):
                name = ".NAME." if get_origin(hint) is dict else "."
                yield from _number_fields(arm, f"{key}{name}")
        if {int, float} & set(inner):
            yield schema, item.name, key, float not in inner, item.metadata.get("range")


NUMBERS = list(_number_fields(Config))


def test_every_number_has_a_range() -> None:
    """A new setting says what is absurd for it: `ranged(default, "[1, 1000]")` in its section's class."""
    missing = sorted({key for _, _, key, _, allowed in NUMBERS if allowed is None})
    assert not missing, f"give these a range with config.ranges.ranged(default, interval): {', '.join(missing)}"
    assert len(NUMBERS) > 90


def test_defaults_are_in_range() -> None:
    """And all are seen by the walker that checks them."""
    check_ranges(Config())
    assert {key for key, _, _ in numbers(Config())} >= {
        key
        for section, name, key, _, _ in NUMBERS
        if ".NAME." not in key and not isinstance(_default(section, name), list | None)
    }


def _default(section: type, name: str) -> Any:
    return getattr(section(), name)


@pytest.mark.parametrize(
    ("section", "name", "whole", "allowed"),
    [pytest.param(s, n, w, a, id=key) for s, n, key, w, a in NUMBERS if a is not None],
)
def test_the_ends_act(section: type, name: str, whole: bool, allowed: Range) -> None:
    """The end belongs to the range or not, as it says; beyond it, NaN, infinity and 2**70 are refused by key."""
    step = 1 if whole else max(1e-9, 1e-9 * abs(allowed.low))
    outside: list[float] = [allowed.low - step, math.nextafter(allowed.high, math.inf), 2**70, -(2**70)]
    inside = [allowed.low + step if not allowed.holds_low else allowed.low]
    if whole:
        outside[1] = int(allowed.high) + 1
        inside = [int(value) for value in inside]
        outside = [int(value) for value in outside]
    else:
        outside += [math.nan, math.inf, -math.inf]
    outside += [] if allowed.holds_low else [allowed.low]
    outside += [] if allowed.holds_high else [allowed.high]
    inside += [allowed.high] if allowed.holds_high else []
    listed = isinstance(_default(section, name), list)
    for value in [v for v in outside if not (allowed.or_zero and v == 0)]:
        with pytest.raises(UserError, match=rf"^here\.{name}.* = .*must"):
            check_ranges(section(**{name: [value] if listed else value}), "here.")
    for value in inside:
        check_ranges(section(**{name: [value] if listed else value}), "here.")


@pytest.mark.parametrize(
    ("interval", "value", "said"),
    [
        ("[1, 10]", 0, "must be at least 1"),
        ("[1, 10]", 11, "must be at most 10"),
        ("(0, 10]", 0.0, "must be greater than 0"),
        ("[0, 10]", -1, "must not be negative"),
        ("[0, 1)", 1.0, "must be in [0, 1)"),
        ("[0, 1]", 2, "must be 0 or 1"),
        ("0 or [1, 9]", 0.5, "must be at least 1, or 0"),
        ("[1, 10]", math.inf, "must be finite, in [1, 10]"),
    ],
)
def test_the_message_says_which_end(interval: str, value: float, said: str) -> None:
    """Not only that it is wrong."""
    assert Range.parse(interval).wanted(value) == said
    assert Range.parse(interval, "so it is").wanted(value) == f"{said}; so it is"


def test_the_largest_seed() -> None:
    """Is allowed, though no float can hold it; generators take 64 bits, some of them with a sign."""
    check_ranges(Config(seed=2**63 - 1))
    with pytest.raises(UserError, match=r"^seed = 9223372036854775808: must be at most 9223372036854775807"):
        check_ranges(Config(seed=2**63))
