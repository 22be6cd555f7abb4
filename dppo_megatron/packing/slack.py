"""Tells pruning how many tokens a step can train on without another round of micro-batches.

The number of micro-batches is a multiple of the data-parallel size times the interleaved schedule's group, so that
after pruning a plan often has spare room, and the completion policy can raise its probabilities to use it. To stay
unbiased, that decision must not depend on the draw, so the room is computed from all candidates and their
probabilities and not from a plan of what was drawn. The drawn token total scatters about its expectation; a margin of
standard deviations makes a draw that needs one more round rare.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dppo_megatron.packing.alignment import PackingLayout
from dppo_megatron.packing.planner import quantised, usable_capacity
from dppo_megatron.types import FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class TokenCapacity:
    """Implements `dppo_megatron.pruning.interface.StepCapacity` for a layout and a cap."""

    layout: PackingLayout
    max_tokens_per_microbatch: int
    achievable_fill: float = 0.98
    """Share of the cap that the planner can be relied on to fill; measured in docs/packing.md."""
    margin_sd: float = 2.0
    """Standard deviations of the drawn token total that stay free."""

    def microbatches(self, tokens: IntArray, inclusion_prob: FloatArray) -> int:
        """Micro-batches that the expected tokens need, over all ranks."""
        expected = float(np.sum(self.layout.slots(tokens) * inclusion_prob))
        quantum = self.layout.data_parallel * self.layout.microbatch_group
        return quantised(math.ceil(expected / self._usable - 1e-9), quantum)

    def holds(self, microbatches: int, tokens: IntArray, inclusion_prob: FloatArray, *, fixed_size: bool) -> bool:
        """Whether a draw will fit into `microbatches`, its scatter included.

        The variance of a total under a design of fixed size is taken as sum(pi (1 - pi) (l - l0)^2), with l0 the mean
        weighted by pi (1 - pi) (Hajek 1964); l0 = 0 for independent draws. Samples of more than half a micro-batch are
        counted too, since no two of them share one.

        Args:
            tokens: [n] of every candidate.
            inclusion_prob: [n].
            fixed_size: the design draws a fixed number.
        """
        slots = self.layout.slots(tokens).astype(np.float64)
        large = (2 * slots > usable_capacity(self.layout, self.max_tokens_per_microbatch)).astype(np.float64)
        return bool(
            self._bound(slots, inclusion_prob, fixed_size) <= microbatches * self._usable
            and self._bound(large, inclusion_prob, fixed_size) <= microbatches
        )

    @property
    def _usable(self) -> float:
        return self.achievable_fill * usable_capacity(self.layout, self.max_tokens_per_microbatch)

    def _bound(self, amount: FloatArray, pi: FloatArray, fixed_size: bool) -> float:
        scatter = pi * (1.0 - pi)
        total = float(scatter.sum())
        centre = float(np.sum(scatter * amount)) / total if fixed_size and total > 0 else 0.0
        variance = float(np.sum(scatter * np.square(amount - centre)))
        return float(np.sum(pi * amount)) + self.margin_sd * math.sqrt(variance)
