"""Conditions on the fields of a row, as settings state them: `question_type != proof`, `solve_rate >= 0.1`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from operator import ge, gt, le, lt
from typing import Any

from dppo_megatron.types import UserError

_FORM = re.compile(r"\s*(\S.*?)\s+(not in|in|==|=|!=|>=|<=|>|<)\s+(.*\S)\s*")
_PART = re.compile(r"""\s*("[^"]*"|'[^']*'|[^,]*?)\s*(?:,|$)""")
_QUOTED = re.compile(r"""^(['"])(.*)\1$""")
_ORDER: dict[str, Callable[[Fraction, Fraction], bool]] = {">=": ge, "<=": le, ">": gt, "<": lt}
_NUMBER = re.compile(r"[+-]?(\d{1,30}/0*[1-9]\d{0,30}|(\d{1,30}(\.\d{0,30})?|\.\d{1,30})(e[+-]?\d{1,3})?)", re.I)


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition on one field.

    Example:
        Condition.parse("solve_rate >= 1/8").holds("0.2")   # True: numbers, also in text, and fractions
        Condition.parse("type in [proof, mcq]").holds(None) # False: a row without the field
        Condition.parse("type != proof").holds(None)        # True
    """

    field: str
    """Dots reach into nested rows."""
    operator: str
    values: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Raises UserError if `text` is not a condition."""
        match = _FORM.fullmatch(text)
        operator, value = (match[2], match[3]) if match else ("", "")
        listed = value.startswith("[") and value.endswith("]")
        parts = _PART.findall(value[1:-1])[:-1] if listed else [value]  # the last match is empty, at the end
        if match is None or listed != operator.endswith("in") or not parts or not all(parts):
            raise UserError(
                f"'{text}' is not a condition on a field; expected FIELD OPERATOR VALUE with spaces between them, such"
                " as 'type != proof', 'solve_rate >= 0.1' or 'type in [number, expression]'"
            )
        if operator in _ORDER and _number(value) is None:
            raise UserError(f"'{text}': {operator} compares numbers, and '{value}' is not one")
        return cls(match[1], {"=": "=="}.get(operator, operator), tuple(_QUOTED.sub(r"\2", part) for part in parts))

    def holds(self, value: Any) -> bool:
        """Whether a field with this value meets the condition; None or NaN: the row does not have the field."""
        value = None if isinstance(value, (float, Decimal)) and math.isnan(value) else value  # pandas' missing value
        if self.operator in _ORDER:
            number, bound = _number(value), _number(self.values[0])
            return number is not None and bound is not None and _ORDER[self.operator](number, bound)
        is_listed = any(_is(value, wanted) for wanted in self.values)
        return is_listed != (self.operator in ("!=", "not in"))


def _is(value: Any, wanted: str) -> bool:
    if value is None or isinstance(value, bool):
        return wanted.lower() in (("null", "none") if value is None else (str(value).lower(),))
    number = _number(value)
    return number == _number(wanted) if number is not None else isinstance(value, str) and value.strip() == wanted


def _number(value: Any) -> Fraction | None:
    """A number, or text that is one: 0.5, "0.5", "3/8"."""
    if isinstance(value, int):
        return None if isinstance(value, bool) else Fraction(value)
    if isinstance(value, (float, Decimal)):
        return Fraction(str(value)) if math.isfinite(value) else None  # as it is written: 0.1 is 1/10
    text = value.strip() if isinstance(value, str) else ""
    return Fraction(text) if _NUMBER.fullmatch(text) else None
