"""The training cost of a sequence for a model's architecture, and the cost of a generation round by its tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dppo_megatron.packing.planner import CostModel

if TYPE_CHECKING:  # it imports transformers' classes
    from dppo_megatron.weights.architecture import Architecture


def cost_model(architecture: Architecture) -> CostModel:
    """FLOPs of forward and backward of a sequence by its length, which the planner balances; for decoders with
    grouped-query or latent attention and gated feed-forward layers.

    A multiply-add counts as 2; the backward pass costs twice the forward. Causal attention counts half of the L x L
    scores, for a kernel that skips masked blocks. Recomputation is left out, as it multiplies everything by the same
    factor, and so are norms, activations and softmax, which are memory-bound. A layer with a window counts the whole
    window for each token, which is too much for sequences shorter than the window.
    """
    from dppo_megatron.weights import mapping  # it imports transformers' classes too

    layers, heads = architecture.num_layers, architecture.num_heads * (architecture.head_dim + architecture.value_dim)
    windows = [window for layer in range(layers) if (window := architecture.window_of(layer))]
    multiply_adds, experts = 0, architecture.experts
    for key in mapping.table(architecture):
        shape, visited = mapping.full_shape(key, architecture), len(mapping.places(key, architecture))
        if experts is not None and mapping.is_expert(key):
            visited = experts.per_token
        if len(shape) == 2 and (key != mapping.EMBEDDING or architecture.tied_embeddings):
            multiply_adds += visited * math.prod(shape)
    multiply_adds += sum(windows) * heads
    # scores and their product with the values: two multiply-adds per pair, head and dimension, half of them masked
    return CostModel(linear=6.0 * multiply_adds, quadratic=3.0 * (layers - len(windows)) * heads)


@dataclass(frozen=True, slots=True)
class RolloutCost:
    """Seconds of one generation round as a piecewise linear function of its tokens, extrapolated from the last segment.

    With two points it is proportional to the tokens. A latency floor makes the first segment steep, the others flat.
    """

    tokens: tuple[float, ...]
    """Increasing from 0."""
    seconds: tuple[float, ...]

    @property
    def average(self) -> float:
        return self.seconds[-1] / self.tokens[-1]

    def of(self, tokens: float) -> float:
        """Seconds of a round that generates `tokens`."""
        if tokens <= self.tokens[-1]:
            return float(np.interp(tokens, self.tokens, self.seconds))
        slope = (self.seconds[-1] - self.seconds[-2]) / (self.tokens[-1] - self.tokens[-2])
        return self.seconds[-1] + (tokens - self.tokens[-1]) * slope

    def saved(self, tokens: float, skipped: float) -> float:
        """Share of the seconds of a round of `tokens` that is saved if a share `skipped` of them is not generated."""
        whole = self.of(tokens)
        return 1.0 - self.of(tokens * (1.0 - skipped)) / whole if whole else 0.0

    def scaled(self, factor: float) -> RolloutCost:
        """The same seconds for `factor` times the tokens."""
        return RolloutCost(tuple(tokens * factor for tokens in self.tokens), self.seconds)

    @staticmethod
    def proportional(seconds_per_1k: float) -> RolloutCost:
        return RolloutCost((0.0, 1000.0), (0.0, seconds_per_1k))
