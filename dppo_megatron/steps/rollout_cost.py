"""What a sequence costs to train on under a model's architecture, and what a round of generation costs by its tokens.

Apart from `packing/cost.py`, which knows numbers and no models, so that packing imports no model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dppo_megatron.packing.cost import CostModel

if TYPE_CHECKING:  # it imports transformers' classes
    from dppo_megatron.weights.architecture import Architecture


def cost_model(architecture: Architecture) -> CostModel:
    """Training cost of a sequence by its length, which the planner balances."""
    experts = architecture.experts
    return CostModel.of_transformer(
        num_layers=architecture.num_layers,
        hidden_size=architecture.hidden_size,
        ffn_size=experts.ffn_size if experts else architecture.ffn_size,
        num_heads=architecture.num_heads,
        num_kv_heads=architecture.num_kv_heads,
        head_dim=architecture.head_dim,
        vocab_size=architecture.vocab_size,
        active_experts=experts.per_token if experts else 1,
        num_experts=experts.count if experts else 0,
    )


@dataclass(frozen=True, slots=True)
class RolloutCost:
    """Seconds of one round of generation by its tokens: straight lines between points, the last one continued.

    Proportional to tokens with two points. A latency floor makes the first line steep and the others flat.
    """

    tokens: tuple[float, ...]
    """Rising, from 0."""
    seconds: tuple[float, ...]

    @property
    def average(self) -> float:
        """Seconds a token at the last point."""
        return self.seconds[-1] / self.tokens[-1]

    def of(self, tokens: float) -> float:
        """Seconds of a round that generates so many."""
        if tokens <= self.tokens[-1]:
            return float(np.interp(tokens, self.tokens, self.seconds))
        slope = (self.seconds[-1] - self.seconds[-2]) / (self.tokens[-1] - self.tokens[-2])
        return self.seconds[-1] + (tokens - self.tokens[-1]) * slope

    def saved(self, tokens: float, skipped: float) -> float:
        """Share of the seconds of a round of so many tokens that is saved if a share `skipped` of them is not made."""
        whole = self.of(tokens)
        return 1.0 - self.of(tokens * (1.0 - skipped)) / whole if whole else 0.0

    def scaled(self, tokens: float, seconds: float = 1.0) -> RolloutCost:
        """The same with all tokens and all seconds times a factor."""
        return RolloutCost(tuple(t * tokens for t in self.tokens), tuple(s * seconds for s in self.seconds))

    @staticmethod
    def proportional(seconds_per_1k: float) -> RolloutCost:
        """Every token costs the same."""
        return RolloutCost((0.0, 1000.0), (0.0, seconds_per_1k))
