"""Built-in graders: completion text and reference answer to a reward."""

from __future__ import annotations

import re

BUILT_IN = {
    "math": "dppo_megatron.rewards.math.grader:grade_math",
    "math_boxed": "dppo_megatron.rewards.math.grader:grade_math_boxed",
    "final_answer": "dppo_megatron.rewards.graders:final_answer",
}
"""Names that the config may have instead of `module:function`."""

_BOX = re.compile(r"\\boxed\s*\{")
_MARKED = re.compile(r"####?\s*([^\n]*)")


def final_answer(completion: str, answer: str) -> float:
    """1.0 if the completion's last marked final answer equals the reference, else 0.0.

    A final answer is marked by `\\boxed{...}` or, as in GSM8K, follows `####`. Spaces, a closing period and
    thousands separators are ignored; nothing else is: `math` is the grader for what people write. A completion without
    a mark scores 0, and so does one whose last box is not closed, whatever an earlier one holds.
    """
    boxes = list(_BOX.finditer(completion))
    if boxes:
        marked = _inside(completion, boxes[-1].end())
        return float(marked is not None and _normalize(marked) == _normalize(answer))
    marks = _MARKED.findall(completion)
    return float(bool(marks) and _normalize(marks[-1]) == _normalize(answer))


def _inside(text: str, start: int) -> str | None:
    """The text before the brace that closes the one before `start`; None if none does."""
    depth = 1
    for match in re.finditer(r"\\.|[{}]", text[start:]):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if depth == 0:
            return text[start : start + match.start()]
    return None


def _normalize(text: str) -> str:
    return re.sub(r"(?<=\d),(?=\d{3})", "", text.strip().rstrip(".")).replace(" ", "")
