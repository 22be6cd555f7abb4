"""Reads a problem from a row: which fields are read, which values they may have, and which part is the answer.

A value that is not text is never converted by `str()`: a list of chat messages turned into "[{'role': ..." would be a
problem that no model can solve, or an answer that no completion can match, without any warning.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from typing import Any, TypeAlias

from dppo_megatron.config.resolved_sets import ResolvedSet
from dppo_megatron.data.rows import JsonFloat, Row, listed
from dppo_megatron.types import UserError

Messages: TypeAlias = list[dict[str, str]]
"""Chat turns, each with `role` and `content`."""

LAST_TURN = "the last message"
_ABSENT = object()
_ROLES = ("system", "developer", "user", "assistant", "tool")
_LEVEL = re.compile(r"(?:level|lvl|difficulty)?[\s:_-]*(\d+(?:\.\d+)?)(?:/([1-9]\d*))?", re.IGNORECASE)

_LAYOUTS = (
    ({"prompt", "reward_model"}, "verl", ("prompt", "reward_model.ground_truth", "data_source")),
    ({"prompt", "label"}, "slime", ("prompt", "label", "")),
    ({"question", "answer"}, "GSM8K", ("question", "answer", "")),
    ({"question", "final_answer"}, "OlympiadBench", ("question", "final_answer", "")),
    ({"problem", "solution"}, "MATH", ("problem", "solution", "")),
)
"""For each known layout: fields that identify it, its name, and its problem, answer and source fields."""


def get_field(values: Mapping[str, Any], name: str) -> Any:
    """The value of the field `name`, whose dots reach into nested rows and numbers into lists; None if it is absent.

    A key that itself contains the dots takes precedence over the nested one.

    Example:
        get_field({"a": {"b": 1}}, "a.b")            # 1
        get_field({"a": {"b": 1}, "a.b": 2}, "a.b")  # 2
        get_field({"a": [{"b": 1}]}, "a.0.b")        # 1
    """
    found = _find(values, name)
    return None if found is _ABSENT else found


def problem_of(row: Row, settings: ResolvedSet) -> str | Messages:
    """The problem: text, or chat messages. Raises UserError if it is neither, is empty, or cannot be encoded."""
    value = _required(row, settings.problem_field, settings)
    if isinstance(value, str):
        return check_text(value, row.origin, settings.problem_field)
    if isinstance(value, (list, tuple)) and value:
        return [_message(turn, row.origin, f"{settings.problem_field}[{i}]") for i, turn in enumerate(value)]
    raise UserError(
        f"{row.origin}: '{settings.problem_field}' is {kind(value)}; a problem is text or a list of messages"
        ' [{"role": "user", "content": "..."}]'
    )


def answer_of(row: Row, settings: ResolvedSet) -> str:
    """The reference answer as text; a number in the spelling of the file. Empty if `answer_from` finds none. Raises
    UserError if it is neither text nor a finite number, or is empty."""
    name = settings.answer_field
    if settings.answer_from and _find(row.values, name) is None:  # null; an absent field is an error
        return ""
    value = _required(row, name, settings)
    if settings.answer_from:
        answer = ANSWER_RULES[settings.answer_from](value)
        return answer and check_text(answer, row.origin, name)
    if isinstance(value, str):
        return check_text(value, row.origin, name)
    if isinstance(value, bool) or not isinstance(value, (int, float, Decimal)):
        hint = _answer_hint(value, name)
        raise UserError(f"{row.origin}: '{name}' is {kind(value)}; an answer is text or a number{hint}")
    if not isinstance(value, int) and not math.isfinite(value):
        raise UserError(f"{row.origin}: '{name}' is {value}; an answer is text or a finite number")
    return value.text if isinstance(value, JsonFloat) else str(value)


def completion_of(row: Row, name: str, settings: ResolvedSet) -> str:
    """A worked solution. Raises UserError if it is not text, is empty, or cannot be encoded."""
    value = _required(row, name, settings)
    if not isinstance(value, str):
        raise UserError(f"{row.origin}: '{name}' is {kind(value)}; a completion is text")
    return check_text(value, row.origin, name)


def solution_apart(row: Row, settings: ResolvedSet) -> Row:
    """Split a row with problem and worked solution in one list of messages: the last message, the solution, becomes the
    field `LAST_TURN`. Raises UserError for any other row."""
    turns = problem_of(row, settings)
    if len(turns) < 2 or isinstance(turns, str) or turns[-1]["role"] != "assistant":
        raise UserError(
            f"{row.origin}: '{settings.problem_field}' is data.problem_field and sft.completion_field: it must be a"
            " list of messages that ends with the assistant's, the worked solution"
        )
    return Row(row.origin, {**row.values, settings.problem_field: turns[:-1], LAST_TURN: turns[-1]["content"]})


def source_of(row: Row, settings: ResolvedSet) -> str:
    """The subset that the row names; empty if it names none. Raises UserError for a value that cannot be a name."""
    value = get_field(row.values, settings.source_field) if settings.source_field else None
    if value is None or (isinstance(value, (float, Decimal)) and math.isnan(value)):
        return ""  # NaN is pandas' missing value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise UserError(f"{row.origin}: '{settings.source_field}' is {kind(value)}; the name of a subset is text")
    return check_text(value, row.origin, settings.source_field) if value.strip() else ""


def row_for_graders(row: Row, problem: str, source: str) -> Mapping[str, Any]:
    """The row as read, with what the built-in graders read from it under the names that they know, where it has no such
    field: `problem`, `source`, and the `tolerance` that OlympiadBench's own files call `error`."""
    tolerance = row.values.get("error") if "final_answer" in row.values else None
    known = {"problem": problem, "source": source, "tolerance": tolerance}
    missing = {name: value for name, value in known.items() if value and name not in row.values}
    return {**row.values, **missing} if missing else row.values


def level_of(row: Row, settings: ResolvedSet) -> tuple[float | None, bool]:
    """The row's difficulty, and whether it has one in a form that cannot be read (`easy`, a list)."""
    if settings.level_field:
        value = get_field(row.values, settings.level_field)
    else:
        value = row.values.get("level", row.values.get("difficulty"))
    if value is None or value == "" or (isinstance(value, (float, Decimal)) and math.isnan(value)):
        return None, False
    level = parse_level(value)
    if level is not None and settings.level_is == "solve_rate":
        return (1 - level, False) if 0 <= level <= 1 else (None, True)
    return level, level is None


def parse_level(value: Any) -> float | None:
    """A level as a number; None if it is not one.

    Example:
        parse_level(3), parse_level("Level 3"), parse_level("3/8"), parse_level("easy")  # 3.0, 3.0, 0.375, None
    """
    value = float(value) if isinstance(value, Decimal) else value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value) if abs(value) < 1e300 else None  # excludes NaN and integers too large for a float
    match = _LEVEL.fullmatch(value.strip()) if isinstance(value, str) and len(value) < 100 else None
    return float(match[1]) / float(match[2] or 1) if match else None


def check_text(text: str, origin: str, name: str) -> str:
    """Returns `text`. Raises UserError if it is blank, or has a NUL or half of a surrogate pair."""
    if not text.strip():
        raise UserError(f"{origin}: '{name}' is {'blank' if text else 'empty'}")
    if "\0" in text:
        raise UserError(f"{origin}: '{name}' holds a NUL character")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(
            f"{origin}: '{name}' holds a lone surrogate (\\u{ord(text[error.start]):04x}), which is not a character"
        ) from None
    return text


def kind(value: Any) -> str:
    """The type of a value in JSON's terms, for messages."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float, Decimal)):
        return "a number"
    names: dict[type, str] = {str: "text", list: "a list", tuple: "a list", dict: "an object"}
    return names.get(type(value), f"of type {type(value).__name__}")


def _required(row: Row, name: str, settings: ResolvedSet) -> Any:
    value = _find(row.values, name)
    if value is None:
        raise UserError(f"{row.origin}: '{name}' is null")
    if value is _ABSENT:
        names = listed(row.values) or "nothing"
        raise UserError(f"{row.origin}: the row lacks the field '{name}'; it has: {names}{_layout_hint(row, settings)}")
    return value


def _find(values: Any, name: str) -> Any:
    if isinstance(values, (list, tuple)):
        values = {str(index): item for index, item in enumerate(values)}
    if not isinstance(values, Mapping):
        return _ABSENT
    if name in values:
        return values[name]
    parts = name.split(".")
    inside = (_find(values.get(".".join(parts[:at])), ".".join(parts[at:])) for at in range(1, len(parts)))
    return next((value for value in inside if value is not _ABSENT), _ABSENT)


def section_of(settings: ResolvedSet) -> str:
    """The section in which to change this set's settings: its own entry if it has one, else `data`."""
    return settings.key if "_sets." in settings.key else "data"


def _layout_hint(row: Row, settings: ResolvedSet) -> str:
    if settings.key == "sft.examples_path":  # no layout: its settings would also change how training sets are read
        return ". Worked solutions are read by data.problem_field and sft.completion_field"
    section = section_of(settings)
    for fields, name, (problem, answer, source) in _LAYOUTS:
        if fields <= row.values.keys() and get_field(row.values, problem) is not None:
            wanted = {"problem_field": problem, "answer_field": answer, "source_field": source}
            if isinstance(get_field(row.values, problem), (list, tuple)) and not settings.template.apply_chat_template:
                wanted["apply_chat_template"] = "true"  # which messages need
            if isinstance(get_field(row.values, answer), (list, tuple)):
                wanted["answer_from"] = "all"
            given = " ".join(f"{section}.{key}={value}" for key, value in wanted.items() if value)
            return f". This looks like {name}'s layout: {given}"
    return ""


def _answer_hint(value: Any, name: str) -> str:
    if isinstance(value, Mapping) and value:
        return "; dots reach into objects: " + ", ".join(f"{name}.{key}" for key in list(value)[:5])
    if isinstance(value, (list, tuple)):
        return "; a list of answers must be one text (answer_from=all joins its items, last reads the last)"
    return ""


def _message(turn: Any, origin: str, name: str) -> dict[str, str]:
    """One chat turn with its content as text."""
    if not isinstance(turn, Mapping) or "role" not in turn or "content" not in turn:
        raise UserError(f"{origin}: '{name}' must be a message with role and content, got {kind(turn)}")
    for key, value in turn.items():
        if key not in ("role", "content") and value not in (None, "", [], {}):
            raise UserError(
                f"{origin}: '{name}.{key}' is not read, and a chat template may render it: a message here has role and"
                " content; remove the key, or put its text into the content"[:500]
            )
    role, content = turn["role"], turn["content"]
    if role not in _ROLES:
        raise UserError(f"{origin}: '{name}.role' is {role!r}; known roles: {', '.join(_ROLES)}"[:500])
    if isinstance(content, (list, tuple)) and content:
        # joined as vLLM's chat endpoint does
        content = "\n".join(_part(part, origin, f"{name}.content[{i}]") for i, part in enumerate(content))
    if not isinstance(content, str):
        raise UserError(f"{origin}: '{name}.content' is {kind(content)}; it must be text")
    return {"role": str(role), "content": check_text(content, origin, f"{name}.content")}


def _part(part: Any, origin: str, name: str) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise UserError(f'{origin}: \'{name}\' must be {{"type": "text", "text": "..."}}: prompts are text only')


def as_is(value: Any) -> str:
    """The whole value as the answer: text, a number, or a list of these, which is joined into one text.

    Example:
        as_is("5"), as_is(5), as_is(["$2$", "$3$"])  # "5", "5", "$2$, $3$"
    """
    if isinstance(value, (list, tuple)):
        return ", ".join(as_is(item) for item in value)
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return "" if value is None or isinstance(value, (dict, bool)) else str(value).strip()


def after_hashes(value: Any) -> str:
    """The text after the last `####` of a GSM8K solution, without thousands separators."""
    _, mark, answer = str(value).rpartition("####")
    return answer.strip().replace(",", "") if mark else ""


def last_boxed(value: Any) -> str:
    r"""Content of the last `\boxed{...}` of a MATH solution, braces matched; `\boxed 5` and `\fbox{}` too.

    Example:
        last_boxed(r"so $x = \boxed{\frac{1}{2}}$.")  # \frac{1}{2}
    """
    text = str(value)
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if start < 0:
        return ""
    rest = text[start:].removeprefix("\\boxed").removeprefix("\\fbox")
    if not rest.startswith("{"):
        return rest.split("$")[0].strip()
    depth = 0
    for brace in re.finditer(r"(?<!\\)[{}]", rest):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return rest[1 : brace.start()].strip()
    return ""


def items_of(value: Any) -> Sequence[Any]:
    """The items of a list, or of a list in JSON text, as in Skywork's rows; else the value itself, alone."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        with suppress(ValueError, RecursionError):  # an interval, [1, 2)
            value = json.loads(value)
    return value if isinstance(value, (list, tuple)) and value else [value]


def last_item(value: Any) -> str:
    """The last of `items_of`: "3" of '["2", "3"]', and "2" of [2] and "2"."""
    return as_is(items_of(value)[-1])


def every_item(value: Any) -> str:
    """All of `items_of` but nulls: "2, 3" of '["2", "3"]'. The text [1, 2] may be an interval, and stays."""
    items = [item for item in items_of(value) if item is not None]
    return as_is(items if not isinstance(value, str) or all(isinstance(item, str) for item in items) else value)


ANSWER_RULES: Mapping[str, Callable[[Any], str]] = {
    "boxed": last_boxed,
    "last": last_item,
    "all": every_item,
    "hashes": after_hashes,
}
"""By `answer_from`; each returns "" for a value without such an answer."""
