"""What of a field is the reference answer: known sets state it in the forms that people have."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any


def as_is(value: Any) -> str:
    """The answer itself: text, a whole number, or a list of texts, which becomes one text.

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
    _, found, answer = str(value).rpartition("####")
    return answer.strip().replace(",", "") if found else ""


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
    for place, character in enumerate(rest):
        escaped = place > 0 and rest[place - 1] == "\\"
        if character in "{}" and not escaped:
            depth += 1 if character == "{" else -1
            if depth == 0:
                return rest[1:place].strip()
    return ""


def last_item(value: Any) -> str:
    """The last item of a list, or of a list as JSON text, which is how Skywork writes it; else the answer itself.

    Example:
        last_item('["2", "3"]'), last_item([2]), last_item("2")  # "3", "2", "2"
    """
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            return last_item(json.loads(value))
        except (ValueError, RecursionError):  # an interval, [1, 2)
            return value.strip()
    return as_is(value[-1] if isinstance(value, (list, tuple)) and value else value)


ANSWER_RULES: Mapping[str, Callable[[Any], str]] = {"boxed": last_boxed, "last": last_item, "hashes": after_hashes}
"""By `answer_from`; each gives nothing for a value without such an answer."""
