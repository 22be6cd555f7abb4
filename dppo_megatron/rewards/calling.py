"""How a grader is called: in our form, verl's or TRL's, decided once by the names of its parameters.

A function that was written for another trainer would accept our arguments too, in the wrong places and without an
error: the first of `compute_score(data_source, solution_str, ground_truth)` would be the completion. So the names
decide, and a function that fits none of the forms is refused when it is loaded.

Standard library only: grader processes import this file.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

_CONTEXT = ("row", "prompt", "completion_tokens", "finish_reason")  # passed to parameters of these names
_NEVER_FIRST = (  # a first parameter of such a name is not the completion
    *("answer", "answers", "args", "data_source", "ground_truth", "label", "labels", "problem", "prompt", "prompts"),
    *("queries", "query", "question", "reference", "references", "row", "solution"),
)
_REFERENCES = ("answer", "answers", "solution", "ground_truth")  # TRL's columns of the reference, if the rows lack them
_TAKES = (
    "a grader is called as function(completion, answer) or function(completion, answer, row), with prompt,"
    " completion_tokens and finish_reason for parameters of these names; a batched one as function(completions,"
    " answers); verl's as compute_score(data_source, solution_str, ground_truth, extra_info); TRL's as"
    " function(prompts, completions, **columns)"
)


class Sample(NamedTuple):
    """One completion, and all that a grader may use."""

    completion: str
    answer: str
    row: Mapping[str, Any]
    prompt: str = ""
    """As the model got it."""
    completion_tokens: int = 0
    finish_reason: str = "stop"


class GradingFailed(Exception):
    """A grading failed; the text is the failure's."""


@dataclass(frozen=True)
class Calling:
    """A grader, ready to be called."""

    call: Callable[[Any], Any]
    """Takes a `Sample`, or a list of them."""
    takes_lists: bool
    """It grades several samples at a time and returns a list."""
    is_async: bool
    wants_context: bool
    """It needs the row or the prompt."""


def calling_of(function: Callable[..., Any]) -> Calling:
    """Raises TypeError if it cannot be called as a grader; the error's text continues a sentence about the grader."""
    import inspect

    own_call = getattr(function, "__call__", None)  # noqa: B004 - an object's method may be a coroutine function
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(own_call)
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):  # some functions written in C have no signature
        return Calling(lambda one: function(one.completion, one.answer), False, is_async, False)
    parameters = signature.parameters.values()
    named = {one.name: one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}
    needed = {name for name, one in named.items() if one.default is one.empty}
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters)

    def chosen(values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in values.items() if takes_any or name in named}

    if "completions" in named or "completion_ids" in needed:
        wants_chat = _annotated(named["completions"]) if "completions" in named else None
        if wants_chat is None and "answers" in named and not takes_any:  # our form: TRL's functions take all columns
            wants_chat = False
        call = functools.partial(_call_with_columns, function, needed, chosen, wants_chat)
        return Calling(call, True, is_async, True)
    if "solution_strs" in named or "solution_str" in named:
        takes_lists = "solution_strs" in named
        values: Callable[[Any], dict[str, Any]] = _verl_lists if takes_lists else _verl
        blank = Sample("", "", {})
        if unknown := needed - values([blank] if takes_lists else blank).keys():
            raise TypeError(f"takes {signature}, of which '{min(unknown)}' is not available here: {_TAKES}")
        return Calling(lambda samples: function(**chosen(values(samples))), takes_lists, is_async, True)
    return _native(function, signature, [name for name in _CONTEXT if name in named], is_async)


def _native(function: Callable[..., Any], signature: Any, context: Sequence[str], is_async: bool) -> Calling:
    wrong = TypeError(f"takes {signature}: {_TAKES}")
    first = next(iter(signature.parameters.values()), None)
    if first is not None and first.kind is not first.VAR_POSITIONAL and first.name in _NEVER_FIRST:
        raise wrong
    row = signature.parameters.get("row")
    is_third = [*signature.parameters][2:3] == ["row"] and row.kind is row.POSITIONAL_OR_KEYWORD
    names = [name for name in context if not (is_third and name == "row")]
    for count in (3,) if is_third else (2, 3):  # how many of a `Sample`'s first fields are positional arguments
        try:
            signature.bind(*[""] * count, **dict.fromkeys(names))
        except TypeError:
            continue

        def call(one: Sample, count: int = count) -> Any:
            if not names:  # saves a microsecond of the seven that a cheap grading takes
                return function(*one[:count])
            return function(*one[:count], **{name: getattr(one, name) for name in names})

        return Calling(call, False, is_async, count == 3 or "row" in names or "prompt" in names)
    raise wrong


# ------------------------------------------------------------------------------------------------- verl


def _verl(sample: Sample) -> dict[str, Any]:
    """verl's arguments of a `compute_score`. `ground_truth` is the row's own, which need not be text."""
    model = sample.row.get("reward_model")
    truth = model.get("ground_truth", sample.answer) if isinstance(model, Mapping) else sample.answer
    return {
        "data_source": sample.row.get("data_source", ""),
        "solution_str": sample.completion,
        "ground_truth": truth,
        "extra_info": sample.row.get("extra_info") or {},
    }


def _verl_lists(samples: Sequence[Sample]) -> dict[str, list[Any]]:
    each = [_verl(sample) for sample in samples]
    return {f"{name}s": [one[name] for one in each] for name in each[0]}


# -------------------------------------------------------------------------------------------------- TRL


class _TokenCount(Sequence[int]):
    """Stands for a completion's token ids, of which graders get only the number: most length rewards need no more."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, place: Any) -> Any:
        raise GradingFailed("asks for token ids; a grader gets only their number, which is len(completion_ids[i])")


def _call_with_columns(
    function: Callable[..., Any],
    needed: set[str],
    chosen: Callable[[Mapping[str, Any]], dict[str, Any]],
    wants_chat: bool | None,
    samples: Sequence[Sample],
) -> Any:
    values = chosen(_columns(samples, wants_chat))
    if missing := needed - values.keys():
        have = ", ".join(sorted({name for one in samples for name in one.row})) or "none"
        raise GradingFailed(f"asks for the column '{min(missing)}', and the rows have: {have}")
    return function(**values)


def _columns(samples: Sequence[Sample], wants_chat: bool | None) -> dict[str, list[Any]]:
    """Keyword arguments as TRL's trainers pass them: a list for each column of the rows, and TRL's own three lists."""
    names = {name: None for one in samples for name in one.row if name not in ("prompt", "completion")}
    values: dict[str, list[Any]] = {name: [one.answer for one in samples] for name in _REFERENCES}
    values |= {name: [getattr(one, name) for one in samples] for name in ("completion_tokens", "finish_reason")}
    values |= {name: [one.row.get(name) for one in samples] for name in names}
    prompts: list[Any] = []
    completions: list[Any] = []
    for one in samples:
        column = one.row.get("prompt")
        is_chat = isinstance(column, (list, tuple)) if wants_chat is None else wants_chat
        if is_chat:
            prompts.append(column if isinstance(column, (list, tuple)) else [{"role": "user", "content": one.prompt}])
            completions.append([{"role": "assistant", "content": one.completion}])
        else:
            prompts.append(column if isinstance(column, str) else one.prompt)
            completions.append(one.completion)
    ids = [_TokenCount(one.completion_tokens) for one in samples]
    return values | {"prompts": prompts, "completions": completions, "completion_ids": ids}


def _annotated(parameter: Any) -> bool | None:
    """Whether `completions` is annotated as chats (True) or as texts (False); None: neither."""
    text = str(getattr(parameter, "annotation", "")).lower()
    return True if "list[list" in text or "list[typing.list" in text else False if "list[str" in text else None
