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

    @staticmethod
    def of_transformer(
        *,
        num_layers: int,
        hidden_size: int,
        ffn_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        vocab_size: int,
        active_experts: int = 1,
        num_experts: int = 0,
    ) -> CostModel:
        """FLOPs of forward and backward of a decoder with grouped-query attention and gated feed-forward layers.

        A multiply-add counts 2; the backward pass costs twice the forward. Causal attention counts half of the L x L
        scores, as a kernel that skips the masked blocks does. Recomputation multiplies everything alike and is left
        out, as are norms, activations and softmax, which are bound by memory.

        Args:
            ffn_size: inner size of the feed-forward layer, or of one expert.
            active_experts: experts that each token visits, shared ones included; 1 for a dense model.
            num_experts: rows of the router, 0 for a dense model.
        """
        heads = num_heads * head_dim
        projections = hidden_size * (2 * heads + 2 * num_kv_heads * head_dim)
        feed_forward = 3 * hidden_size * ffn_size * active_experts + hidden_size * num_experts
        multiply_adds = num_layers * (projections + feed_forward) + hidden_size * vocab_size
        # Scores and their product with the values: two multiply-adds for each pair, head and dimension, half of them
        # masked.
        return CostModel(linear=6.0 * multiply_adds, quadratic=6.0 * num_layers * heads)


TOKENS = CostModel(linear=1.0, quadratic=0.0)
"""Every token costs the same: the default of the planner where no model is known."""
