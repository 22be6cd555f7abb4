"""The training cost of a sequence under a model's architecture: what the planner balances and `plan` multiplies out.

Apart from `packing/cost.py`, which knows numbers and no models, so that the pure rooms stay pure.
"""

from __future__ import annotations

from dppo_megatron.packing.cost import CostModel
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
