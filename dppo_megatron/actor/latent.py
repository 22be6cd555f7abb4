"""Multi-head latent attention (DeepSeek-V3) over packs: Megatron's module with this project's rotary embedding.

    hidden --linear_q_down--> [q rank] --norm, linear_q_up--> queries: a part without positions, a rotary part
      '----linear_kv_down--> [kv rank] --norm, linear_kv_up--> keys without positions, values
                         '-> the rotary part of the keys, shared by all heads

Megatron's own method applies rotary embedding with the tables and sequence lengths that `rotary.py` avoids. Here the
rotary part comes first in queries and keys, so that the core attention can rotate it as a partial rotary embedding; the
order of dimensions does not change a product of queries and keys. Megatron's method also loses gradient in local
layers, where linear_kv_down is split over ranks: a rank's gradient of the shared rotary part covers only its own heads,
and Megatron does not sum it over ranks (`_of_all_heads` does).
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

from dppo_megatron.weights.layer_parts import deinterleave


class LatentAttention(MLASelfAttention):  # type: ignore[misc]
    """Computes queries, keys and values of a pack; the core attention rotates them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        c = self.config
        rows = {"linear_q_down_proj": c.q_lora_rank, "linear_kv_down_proj": c.kv_lora_rank + c.qk_pos_emb_head_dim}
        for name, all_rows in rows.items():
            weight = getattr(getattr(self, name, None), "weight", None)
            if weight is not None and len(weight) == all_rows:
                # Transformer Engine marks even an unsplit weight as a shard: the gradient norm would count it once
                # for each rank
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
            compressed = self.q_layernorm(self._as_input_tokens(compressed, hidden_states))
            queries, _ = self.linear_q_up_proj(compressed)
        sizes = [c.kv_lora_rank, c.qk_pos_emb_head_dim]
        latent, rotary = self._compressed(self.linear_kv_down_proj, hidden_states, sizes)
        latent = self.kv_layernorm(self._as_input_tokens(latent, hidden_states))
        keys_values, _ = self.linear_kv_up_proj(latent)
        queries = queries.view(-1, heads, c.qk_head_dim + c.qk_pos_emb_head_dim)
        plain_q, rotary_q = queries.split([c.qk_head_dim, c.qk_pos_emb_head_dim], -1)
        plain_k, values = keys_values.view(-1, heads, c.qk_head_dim + c.v_head_dim).split(
            [c.qk_head_dim, c.v_head_dim], -1
        )
        rotary_k = self._of_all_heads(rotary, len(values)).view(-1, 1, c.qk_pos_emb_head_dim)
        query = torch.cat([deinterleave(rotary_q), plain_q], -1)
        key = torch.cat([deinterleave(rotary_k).expand(-1, heads, -1), plain_k], -1)
        return query, key, values, compressed, latent

    def _compressed(self, linear: Any, hidden_states: Tensor, sizes: list[int]) -> list[Tensor]:
        """The full output of `linear`, split into these sizes along the last dimension: of all tokens if Megatron
        splits the layer's rows over ranks, of this rank's if every rank has all rows (Transformer Engine)."""
        out, _ = linear(hidden_states)
        if out.size(-1) != sum(sizes):
            out = gather_from_tensor_model_parallel_region(out)
        return list(out.split(sizes, -1))

    def _as_input_tokens(self, compressed: Tensor, hidden_states: Tensor) -> Tensor:
        """`compressed` for the tokens of `hidden_states` only: this rank's, under sequence parallelism."""
        has_all = len(compressed) != len(hidden_states)
        return scatter_to_sequence_parallel_region(compressed) if has_all else compressed

    def _of_all_heads(self, rotary: Tensor, tokens: int) -> Tensor:
        """[T, 1, rotary dim] of all tokens; its gradient is summed over the heads of all ranks."""
        is_share = len(rotary) != tokens
        spread = gather_from_sequence_parallel_region if is_share else copy_to_tensor_model_parallel_region
        all_tokens: Tensor = spread(rotary)
        return all_tokens
