"""Transformer Engine's attention with this project's rotary embedding; imported where that spec is chosen.

Its own fused rotary kernel for packs is slow with many sequences (TransformerEngine#2866) and rounds differently from
the rollout engines'.
"""

from __future__ import annotations

from megatron.core.extensions.transformer_engine import TEDotProductAttention

from dppo_megatron.actor.rotary import Rotating


class TransformerEngineAttention(Rotating, TEDotProductAttention):  # type: ignore[misc]
    """`TEDotProductAttention` that rotates queries and keys first."""
