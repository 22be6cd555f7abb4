"""The built-in graders by their names; loads a user's, calls it, and checks what it returns.

Runs in the grader processes, which must start fast: the standard library only, no numpy and no torch unless the grader
imports them.

How a grader is called. It is handed the row if it has a third positional parameter without a default, or a parameter
named `row`. A third parameter with a default and another name (`strict=False`), `*args` and `**kwargs` do not ask for
it: a two-argument function that was given an option, or wrapped in a decorator, goes on working.

What may come back. A finite number of any kind: bool, int, float, Decimal, Fraction, a numpy scalar, a tensor without
dimensions (whatever has `.item()` and no dimensions). Or a `Grade`. All else is a failure that says what it was.
"""

from __future__ import annotations

import functools
import importlib
import math
import numbers
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

BUILT_IN = {
    "math": "dppo_megatron.rewards.math.grader:grade_math",
    "math_boxed": "dppo_megatron.rewards.math.grader:grade_math_boxed",
    "final_answer": "dppo_megatron.rewards.functions:final_answer",
}
"""Names that the config may have instead of `module:function`."""

_BOX = re.compile(r"\\boxed\s*\{")
_MARKED = re.compile(r"####?\s*([^\n]*)")
_LONGEST_TEXT = 10_000
"""Characters of `extracted` and `why` that are kept: a grader may copy a megabyte of braces into them."""
_LONGEST_REASON = 300


@dataclass(frozen=True)
class NamedFunction:
    """One reward of the config."""

    name: str
    """Its name in `reward.functions`; empty for the only one."""
    path: str
    """`module:function`."""
    weight: float = 1.0
    key: str = "the grader"
    """What it is called in messages: `reward.function = 'math'`."""


class GradingFailed(Exception):
    """A grading failed; the text says how."""


class Rewards:
    """The grader, or the weighted sum of several.

    Raises:
        ValueError: one of them cannot be imported or cannot be called as a grader; the text is for the user.
    """

    def __init__(self, functions: Sequence[NamedFunction]) -> None:
        self._functions = [(item, *_load(item)) for item in functions]
        self.wants_row = any(calling != "two" for _, _, calling in self._functions)

    def grade(self, completion: str, answer: str, row: Any) -> Any:
        """A plain float where there is no more to say, else a dict of a Grade's fields; a failure is one as well."""
        if len(self._functions) == 1 and not self._functions[0][0].name:
            _, function, calling = self._functions[0]
            return _graded(function, calling, completion, answer, row)
        total = 0.0
        first: dict[str, Any] = {}
        facts: dict[str, float] = {}
        parts: dict[str, float] = {}
        for item, function, calling in self._functions:
            said = _graded(function, calling, completion, answer, row)
            fields = said if isinstance(said, dict) else {"reward": said}
            if "failure" in fields:
                return fields | {"failure": f"{fields['failure']}, in its part '{item.name}'"}
            first = first or fields
            facts = fields.get("facts", {}) | facts  # the first one's are kept
            parts[item.name] = fields["reward"]
            total += item.weight * fields["reward"]
        if not math.isfinite(total):
            return {"failure": f"returned parts whose weighted sum is {total}"}
        return first | {"reward": total, "parts": parts, "facts": facts}


def _load(item: NamedFunction) -> tuple[Callable[..., Any], str]:
    """The function, and how it is called: `two`, `three` or `named`."""
    module_name, _, name = item.path.partition(":")
    try:
        function: Any = functools.reduce(getattr, name.split("."), importlib.import_module(module_name))
    except BaseException as error:  # a module that calls sys.exit() or fails in any other way
        raise ValueError(f"{item.key} cannot be imported: {_described(error)}") from None
    if not callable(function):
        raise ValueError(f"{item.key} is not callable, it is {_shown(function)}")
    try:
        return function, _calling(function)
    except TypeError as error:
        raise ValueError(f"{item.key} {error}") from None


def _calling(function: Callable[..., Any]) -> str:
    """Raises TypeError if it cannot be called as a grader."""
    import inspect

    if inspect.iscoroutinefunction(function):
        raise TypeError("is a coroutine function: a grader is called and must return its grade at once")
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):
        return "two"  # some functions written in C do not say
    parameters = signature.parameters
    row = parameters.get("row")
    named = row is not None and row.kind in (row.KEYWORD_ONLY, row.POSITIONAL_OR_KEYWORD)
    ways: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
        *([("named", ("", ""), {"row": {}})] if named else []),
        ("two", ("", ""), {}),
        ("three", ("", "", {}), {}),
    ]
    for way, positional, keywords in ways:
        try:
            signature.bind(*positional, **keywords)
        except TypeError:
            continue
        return way
    raise TypeError(
        f"takes {signature}: a grader is called as function(completion, answer) or function(completion, answer, row)"
    )


def _graded(function: Callable[..., Any], calling: str, completion: str, answer: str, row: Any) -> Any:
    try:
        if calling == "two":
            result = function(completion, answer)
        elif calling == "three":
            result = function(completion, answer, row)
        else:
            result = function(completion, answer, row=row)
        return result if _is_float(result) else _fields(result)
    except GradingFailed as failure:
        return {"failure": str(failure)}
    except MemoryError as error:
        return {"failure": f"raised {_described(error)}", "memory": True}
    except BaseException as error:  # SystemExit too: it is the sample that ends, not the process
        trace = "".join(traceback.format_exception(error, limit=-4))
        return {"failure": f"raised {_described(error)}", "trace": _truncated(trace[-4000:], _LONGEST_TEXT)}


def _fields(result: Any) -> Any:
    """A number as a float, a Grade as a dict of what it holds.

    Raises:
        Failed: it is neither, or holds something that is not what it should be.
    """
    types = sys.modules.get("dppo_megatron.types")  # where it is not imported there is no Grade
    if types is None or not isinstance(result, types.Grade):
        return _number(result, "")
    if result.failure:
        raise GradingFailed(_truncated(str(result.failure), _LONGEST_REASON))
    reward, extracted, why = result.reward, result.extracted, result.why
    fields: dict[str, Any] = {"reward": reward if _is_float(reward) else _number(reward, "a Grade with the reward ")}
    if extracted is not None:
        fields["extracted"] = _truncated(str(extracted), _LONGEST_TEXT)
    if why:
        fields["why"] = _truncated(str(why), _LONGEST_TEXT)
    for name, held in (("facts", result.facts), ("parts", result.parts)):
        if not held and type(held) is dict:
            continue
        if type(held) is not dict and not isinstance(held, Mapping):
            raise GradingFailed(f"returned a Grade whose {name} are {_shown(held)}, not a mapping")
        if held:
            fields[name] = {
                # the sentence for a value that is wrong is made only for one that may be
                _truncated(str(key), _LONGEST_TEXT): value
                if _is_float(value)
                else _number(value, f"a Grade whose {name}[{str(key)!r}] is ")
                for key, value in held.items()
            }
    return fields


def _is_float(value: Any) -> bool:
    return type(value) is float and math.isfinite(value)


def _number(value: Any, where: str) -> float:
    if _is_float(value):
        return float(value)
    found = f"returned {where}{_shown(value)}"
    if isinstance(value, (bool, numbers.Real, Decimal)):
        number = value
    elif callable(getattr(value, "item", None)) and getattr(value, "ndim", 0) == 0:
        number = value.item()
        if not isinstance(number, (bool, int, float)):
            raise GradingFailed(found)
    else:
        raise GradingFailed(found)
    try:
        as_float = float(number)
    except (OverflowError, ValueError):
        raise GradingFailed(f"{found}, which is too large") from None
    if not math.isfinite(as_float):
        raise GradingFailed(found)
    return as_float


def _described(error: BaseException) -> str:
    """`ZeroDivisionError: division by zero (grader.py:12)`."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith("<frozen") and frame.filename != __file__]
    place = _truncated(f" ({own[-1].filename}:{own[-1].lineno})", _LONGEST_REASON) if own else ""
    try:
        text = str(error).strip().partition("\n")[0]
    except Exception:
        text = "(its text cannot be shown)"
    return _truncated(type(error).__name__ + (f": {text}" if text else ""), _LONGEST_REASON) + place


def _shown(value: Any) -> str:
    """`None`, `nan`, `str 'no number'`."""
    try:
        text = repr(value)
    except Exception:
        text = ""
    if value is None or type(value) in (bool, int, float):
        return _truncated(text, 80)
    return f"{type(value).__name__} {_truncated(text, 80)}".strip()


def _truncated(text: str, length: int) -> str:
    """A lone surrogate, which no message can carry, becomes a text like `\\ud800`."""
    text = text if len(text) <= length else text[: length - 3] + "..."
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


def final_answer(completion: str, answer: str) -> float:
    """1.0 if the completion's last marked final answer equals the reference, else 0.0.

    A final answer is marked by `\\boxed{...}` or, as in GSM8K, follows `####`. Spaces, a closing period and
    thousands separators are ignored; nothing else is: `math` is the grader for what people write. A completion without
    a mark scores 0, and so does one whose last box is not closed, whatever an earlier one holds.
    """
    from dppo_megatron.rewards.math.clean import closing  # its tables are not for every grader's process

    if boxes := list(_BOX.finditer(completion)):
        start = boxes[-1].end()
        end = closing(completion, start - 1)
        return float(end >= 0 and _normalize(completion[start:end]) == _normalize(answer))
    marks = _MARKED.findall(completion)
    return float(bool(marks) and _normalize(marks[-1]) == _normalize(answer))


def _normalize(text: str) -> str:
    return re.sub(r"(?<=\d),(?=\d{3})", "", text.strip().rstrip(".")).replace(" ", "")
