"""Multi-head latent attention (DeepSeek-V3) over packs: Megatron's module with this project's positions.

    hidden --linear_q_down--> [q rank] --norm, linear_q_up--> queries: a part without positions, a part that turns
      '----linear_kv_down--> [kv rank] --norm, linear_kv_up--> keys without positions, values
                         '-> the part of the keys that turns, one for all heads

Megatron turns its parts here, by the tables and sequence lengths that `rotary.py` avoids. Here queries and keys begin
with the part that turns, so that the core attention rotates it as a partial rotary embedding; a product of queries and
keys is the same in any order of their dimensions. Where Megatron splits linear_kv_down over ranks (its local layers),
it loses a part of the gradient too: each rank has that of its own heads alone, and their sum is wanted.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor

from dppo_megatron.weights.layer_parts import halves


class LatentAttention(MLASelfAttention):  # type: ignore[misc]
    """Queries, keys and values of a pack, to be rotated by the core attention."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        c = self.config
        rows = {"linear_q_down_proj": c.q_lora_rank, "linear_kv_down_proj": c.kv_lora_rank + c.qk_pos_emb_head_dim}
        for name, whole in rows.items():
            weight = getattr(getattr(self, name, None), "weight", None)
            if weight is not None and len(weight) == whole:
                # Transformer Engine marks any weight as a shard, and the gradient's norm would count this once a rank
                weight.tensor_model_parallel = False

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """hidden_states [T (/ tp), 1, hidden] -> queries and keys [T, H / tp, D], values [T, H / tp, value dim], and
        the compressed inputs of queries and of keys."""
        c, heads = self.config, self.num_attention_heads_per_partition
        if c.q_lora_rank is None:
            compressed = hidden_states
            queries, _ = self.linear_q_proj(hidden_states)
        else:
            (compressed,) = self._compressed(self.linear_q_down_proj, hidden_states, [c.q_lora_rank])
            compressed = self.q_layernorm(self._shared_out(compressed, hidden_states))
            queries, _ = self.linear_q_up_proj(compressed)
        sizes = [c.kv_lora_rank, c.qk_pos_emb_head_dim]
        latent, turning = self._compressed(self.linear_kv_down_proj, hidden_states, sizes)
        latent = self.kv_layernorm(self._shared_out(latent, hidden_states))
        keys_values, _ = self.linear_kv_up_proj(latent)
        queries = queries.view(-1, heads, c.qk_head_dim + c.qk_pos_emb_head_dim)
        still_q, turning_q = queries.split([c.qk_head_dim, c.qk_pos_emb_head_dim], -1)
        still_k, values = keys_values.view(-1, heads, c.qk_head_dim + c.v_head_dim).split(
            [c.qk_head_dim, c.v_head_dim], -1
        )
        turning_k = self._of_all_heads(turning, len(values)).view(-1, 1, c.qk_pos_emb_head_dim)
        query = torch.cat([halves(turning_q), still_q], -1)
        key = torch.cat([halves(turning_k).expand(-1, heads, -1), still_k], -1)
        return query, key, values, compressed, latent

    def _compressed(self, linear: Any, hidden_states: Tensor, sizes: list[int]) -> list[Tensor]:
        """What `linear` puts out, whole in the last dimension, in parts of these sizes. Of all tokens where Megatron
        splits the layer's rows, of this rank's where each rank has them (Transformer Engine)."""
        out, _ = linear(hidden_states)
        if out.size(-1) != sum(sizes):
            out = gather_from_tensor_model_parallel_region(out)
        return list(out.split(sizes, -1))

    def _shared_out(self, compressed: Tensor, hidden_states: Tensor) -> Tensor:
        """As many tokens as this rank holds between layers."""
        whole = len(compressed) != len(hidden_states)
        return scatter_to_sequence_parallel_region(compressed) if whole else compressed

    def _of_all_heads(self, turning: Tensor, tokens: int) -> Tensor:
        """[T, 1, turning dim], whose gradient is the sum over the heads of all ranks."""
        is_share = len(turning) != tokens
        spread = gather_from_sequence_parallel_region if is_share else copy_to_tensor_model_parallel_region
        whole: Tensor = spread(turning)
        return whole
