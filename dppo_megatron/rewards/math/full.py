"""Math-Verify, for what the comparison by kinds does not understand.

It is imported when it is first needed (sympy takes half a second), and called without its own timeouts: they are
alarm signals, which work in a main thread only and do not reach into C code. A hang is ended by the pool, which kills
the process; it is then a failure, not a 0.
"""

from __future__ import annotations

import functools
import logging


@functools.lru_cache(maxsize=4096)  # the completions of a group often make the same mistake
def verify(gold: str, answer: str) -> bool | None:
    """Whether Math-Verify finds the answer equal to the reference; None if it cannot parse one of them.

    Args:
        gold: the reference, without a box.
        answer: the final answer, without a box.
    """
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns at each call that timeouts are off
    configs = [math_verify.LatexExtractionConfig(boxed_match_priority=0), math_verify.ExprExtractionConfig()]
    reference = math_verify.parse(f"\\boxed{{{gold}}}", configs, fallback_mode="no_fallback", parsing_timeout=None)
    target = math_verify.parse(f"\\boxed{{{answer}}}", configs, fallback_mode="no_fallback", parsing_timeout=None)
    if not reference or not target:
        return None
    return bool(math_verify.verify(reference, target, timeout_seconds=None))
