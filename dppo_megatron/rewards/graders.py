"""Built-in graders: completion text and reference answer to a reward."""

from __future__ import annotations

import re

BUILT_IN = {
    "math": "dppo_megatron.rewards.graders:final_answer",
    "final_answer": "dppo_megatron.rewards.graders:final_answer",
}
"""Names that may stand in the config instead of `module:function`."""

_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
_MARKED = re.compile(r"####?\s*([^\n]*)")


def final_answer(completion: str, answer: str) -> float:
    """1.0 if the completion's last marked final answer equals the reference, else 0.0.

    A final answer is marked by `\\boxed{...}` or, as in GSM8K, stands behind `####`. Spaces, a closing period and
    thousands separators are ignored. A completion without a mark scores 0.
    """
    marked = _BOXED.findall(completion) or _MARKED.findall(completion)
    return float(bool(marked) and _normalize(marked[-1]) == _normalize(answer))


def _normalize(text: str) -> str:
    return re.sub(r"(?<=\d),(?=\d{3})", "", text.strip().rstrip(".")).replace(" ", "")
