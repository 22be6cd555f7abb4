"""The built-in graders by their names; loads a user's grader, calls it, and checks what it returns.

Runs in the grader processes, which must start fast: the standard library only, no numpy and no torch unless the grader
imports them. How a grader is called: `calling.py`. A function that takes lists returns a list of results, in which None
means that it does not judge that completion.
"""

from __future__ import annotations

import functools
import importlib
import math
import numbers
import re
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal

from dppo_megatron.rewards.calling import Calling, GradingFailed, Sample, calling_of

BUILT_IN = {
    "math": "dppo_megatron.rewards.math.grader:grade_math",
    "math_boxed": "dppo_megatron.rewards.math.grader:grade_math_boxed",
    "final_answer": "dppo_megatron.rewards.functions:final_answer",
}
"""Names that the config accepts besides `module:function`."""

_BOX = re.compile(r"\\boxed\s*\{")
_MARKED = re.compile(r"####?\s*([^\n]*)")
_LONGEST_TEXT = 10_000  # characters kept of `extracted` and `why`: a grader may copy a megabyte of braces into them
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


Mode = Literal["each", "batch", "async"]
"""How a process grades its samples: one after another, many in one call, or many at a time in an event loop."""


class Rewards:
    """The grader, or the weighted sum of several.

    Raises:
        ValueError: one of them cannot be imported or cannot be called as a grader; the text is for the user.
    """

    def __init__(self, functions: Sequence[NamedFunction]) -> None:
        self._functions = [(item, _load(item)) for item in functions]
        self._is_one = len(functions) == 1 and not functions[0].name
        callings = [calling for _, calling in self._functions]
        self.wants_context = any(calling.wants_context for calling in callings)
        is_batch = any(calling.takes_lists for calling in callings)
        self.mode: Mode = "async" if any(calling.is_async for calling in callings) else "batch" if is_batch else "each"

    def grade(self, sample: Sample) -> Any:
        """A float if there is nothing but a reward, else a dict with fields of `Grade`, also for a failure."""
        if self._is_one:
            return _graded(self._functions[0][1], sample)
        return self._combined(_graded(calling, sample) for _, calling in self._functions)

    def grade_together(self, samples: Sequence[Sample]) -> list[Any]:
        """As `grade`, for each sample."""
        by_function = [_graded_together(calling, samples) for _, calling in self._functions]
        return [self._combined(results) for results in zip(*by_function, strict=True)]

    async def grade_async(self, sample: Sample) -> Any:
        """As `grade`. Several functions run one after another, within a single time limit."""
        results: list[Any] = []
        for _, calling in self._functions:
            results.append(await _graded_async(calling, sample))
            if _has_failed(results[-1]):
                break
        return self._combined(results)

    def _combined(self, results: Iterable[Any]) -> Any:
        if self._is_one:
            return next(iter(results))
        total = 0.0
        first: dict[str, Any] = {}
        facts: dict[str, float] = {}
        parts: dict[str, float] = {}
        for (item, _), result in zip(self._functions, results, strict=False):  # a failure ends `results` early
            fields = result if isinstance(result, dict) else {"reward": result}
            if _has_failed(fields):
                return fields | {"failure": f"{fields['failure']}, in its part '{item.name}'"}
            if "failure" in fields:  # it does not judge this completion
                continue
            first = first or fields
            facts = fields.get("facts", {}) | facts  # of two with one name the first is kept
            parts[item.name] = fields["reward"]
            total += item.weight * fields["reward"]
        if not parts:
            return dict(_NOT_JUDGED)
        if not math.isfinite(total):
            return {"failure": f"returned parts whose weighted sum is {total}"}
        undecided = self._functions[0][0].name not in parts
        return first | {"reward": total, "parts": parts, "facts": facts, "undecided": undecided}


_NOT_JUDGED = {"failure": "returned None for this completion"}
"""For a None in the list that a function returns. If there are other functions, the reward is theirs."""


def _has_failed(result: Any) -> bool:
    return isinstance(result, dict) and "failure" in result and result != _NOT_JUDGED


def _load(item: NamedFunction) -> Calling:
    module_name, _, name = item.path.partition(":")
    try:
        function: Any = functools.reduce(getattr, name.split("."), importlib.import_module(module_name))
    except BaseException as error:  # also SystemExit, of a module that calls sys.exit()
        is_shipped = isinstance(error, ModuleNotFoundError) and str(error.name).split(".")[0] == "examples"
        hint = "; `dppo-megatron init DIR` copies the shipped examples to DIR" if is_shipped else ""
        raise ValueError(f"{item.key} cannot be imported: {_described(error)}{hint}") from None
    if not callable(function):
        raise ValueError(f"{item.key} is not callable, it is {_shown(function)}")
    try:
        return calling_of(function)
    except TypeError as error:
        raise ValueError(f"{item.key} {error}") from None


def _graded(calling: Calling, sample: Sample) -> Any:
    try:
        return _fields(calling.call(sample))
    except BaseException as error:
        return _failure(error)


def _graded_together(calling: Calling, samples: Sequence[Sample]) -> list[Any]:
    """If a call with several samples fails, each is tried alone, so that a failure costs one sample."""
    if not calling.takes_lists:
        return [_graded(calling, sample) for sample in samples]
    try:
        return _listed(calling.call(samples), len(samples))
    except _WrongCountError as error:  # not tried alone: one result for one sample would be accepted
        return [_failure(error) for _ in samples]
    except BaseException as error:
        if len(samples) == 1:
            return [_failure(error)]
    return [graded for sample in samples for graded in _graded_together(calling, [sample])]


async def _graded_async(calling: Calling, sample: Sample) -> Any:
    try:
        result = calling.call([sample] if calling.takes_lists else sample)
        if calling.is_async:
            result = await result
        return _listed(result, 1)[0] if calling.takes_lists else _fields(result)
    except BaseException as error:
        return _failure(error)


class _WrongCountError(GradingFailed):
    pass


def _listed(results: Any, count: int) -> list[Any]:
    """Raises GradingFailed if these are not `count` results, or one of them is not a valid result."""
    rows = results.tolist() if callable(getattr(results, "tolist", None)) else results
    if not isinstance(rows, (list, tuple)):
        raise GradingFailed(f"returned {_shown(results)}, not a list of {count}")
    if len(rows) != count:
        raise _WrongCountError(f"returned a list of {len(rows)} for {count} completions")
    return [dict(_NOT_JUDGED) if one is None else _fields(one) for one in rows]


def _failure(error: BaseException) -> dict[str, Any]:
    """`error` as a failure; SystemExit too, which must not end the process."""
    if isinstance(error, GradingFailed):
        return {"failure": str(error)}
    if isinstance(error, MemoryError):
        return {"failure": f"raised {_described(error)}", "memory": True}
    trace = _truncated("".join(traceback.format_exception(error, limit=-4))[-4000:], _LONGEST_TEXT)
    return {"failure": f"raised {_described(error)}", "why": trace, "by_chance": _was_never_sent(error)}


def _was_never_sent(error: BaseException | None) -> bool:
    """Whether a judge refused the connection, so that the completion cannot be the cause. It can cause what fails after
    a connection (a reset, a status, a timeout), since it may be long or break the judge, and what fails while a refusal
    is handled: a fallback without the judge that cannot read this completion, a second call that takes too long."""
    for _ in range(16):  # the chain of causes may be circular
        if isinstance(error, ConnectionRefusedError) or type(error).__name__ == "gaierror":  # without importing socket
            return True
        wraps = type(error).__name__ in ("ConnectionError", "URLError")  # requests and urllib raise them without `from`
        error = error and (error.__cause__ or (error.__context__ if wraps else None))
    return False


def _fields(result: Any) -> Any:
    """A number as a float; a Grade or a mapping with a score as a dict of its fields.

    Raises:
        GradingFailed: it is none of them, or one of its values has a wrong type.
    """
    if _is_float(result):
        return result
    if isinstance(result, Mapping) and "score" in result:
        return _scored(result)
    types = sys.modules.get("dppo_megatron.types")  # if the grader has not imported it, it returns no Grade
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
    facts: dict[str, float] = {}
    # a grader's own parts are facts: in `parts`, which holds the config's functions, the first decides what is correct
    for name, values in (("parts", result.parts), ("facts", result.facts)):
        if type(values) is not dict and not isinstance(values, Mapping):
            raise GradingFailed(f"returned a Grade whose {name} are {_shown(values)}, not a mapping")
        for key, value in values.items():
            is_float = _is_float(value)  # as most values are: the message is not formatted for them
            number = value if is_float else _number(value, f"a Grade whose {name}[{str(key)!r}] is ")
            facts[_truncated(str(key), _LONGEST_TEXT)] = number
    return fields | {"facts": facts} if facts else fields


def _scored(result: Mapping[Any, Any]) -> dict[str, Any]:
    """verl's dictionary: other numbers are facts, `pred` is the extracted answer, and the rest is ignored."""
    fields: dict[str, Any] = {"reward": _number(result["score"], "a score that is ")}
    facts: dict[str, float] = {}
    for name, value in result.items():
        with suppress(GradingFailed):
            if name != "score":
                facts[_truncated(str(name), _LONGEST_TEXT)] = _number(value, "")
    if facts:
        fields["facts"] = facts
    if isinstance(extracted := result.get("pred"), str):
        fields["extracted"] = _truncated(extracted, _LONGEST_TEXT)
    return fields


def _is_float(value: Any) -> bool:
    return type(value) is float and math.isfinite(value)


def _number(value: Any, where: str) -> float:
    failure = f"returned {where}{_shown(value)}"
    if callable(getattr(value, "item", None)) and getattr(value, "ndim", 0) == 0:
        value = value.item()
    if not isinstance(value, (bool, numbers.Real, Decimal)):
        raise GradingFailed(failure)
    try:
        as_float = float(value)
    except (OverflowError, ValueError):
        raise GradingFailed(f"{failure}, which is too large") from None
    if not math.isfinite(as_float):
        raise GradingFailed(failure)
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
    """At most `length` characters; a lone surrogate, which no message can carry, is escaped, as in `\\ud800`."""
    text = text if len(text) <= length else text[: length - 3] + "..."
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


def final_answer(completion: str, answer: str) -> float:
    """1.0 if the completion's last marked final answer equals the reference, else 0.0.

    A final answer is marked by `\\boxed{...}` or, as in GSM8K, follows `####`. Only spaces, a final period and
    thousands separators are ignored; `math` is the grader for answers in other notations. A completion without a mark
    scores 0, and so does one whose last box is not closed, even if an earlier one is right.
    """
    from dppo_megatron.rewards.math.clean import closing  # here, since other graders' processes do not need its tables

    if boxes := list(_BOX.finditer(completion)):
        start = boxes[-1].end()
        end = closing(completion, start - 1)
        return float(end >= 0 and _normalize(completion[start:end]) == _normalize(answer))
    marks = _MARKED.findall(completion)
    return float(bool(marks) and _normalize(marks[-1]) == _normalize(answer))


def _normalize(text: str) -> str:
    return re.sub(r"(?<=\d),(?=\d{3})", "", text.strip().rstrip(".")).replace(" ", "")
