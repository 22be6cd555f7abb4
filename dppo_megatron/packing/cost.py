"""The training cost of a sequence, derived from the model's shape; the planner balances it.

Tokens alone mislead: attention grows with the square of the length, so a micro-batch of one long sequence runs longer
than one of many short ones. The ratio of the two terms depends on the model, and a constant taken from one model is
wrong for the next; for Qwen3-4B the terms are equal at 27,000 tokens, for Qwen3-32B at 61,000.
"""

from __future__ import annotations

from dataclasses import dataclass

from dppo_megatron.types import FloatArray


@dataclass(frozen=True, slots=True)
class CostModel:
    """Cost of a sequence of L tokens: linear L + quadratic L^2. Only the ratio of the two matters to a plan."""

    linear: float
    """For each token: every matrix multiplication with parameters."""
    quadratic: float
    """For each pair of tokens: attention."""

    def of(self, lengths: FloatArray) -> FloatArray:
        """Cost of each sequence, [n] for lengths [n] in tokens."""
        return lengths * (self.linear + self.quadratic * lengths)


TOKENS = CostModel(linear=1.0, quadratic=0.0)
"""Every token costs the same: the default of the planner where no model is known."""
