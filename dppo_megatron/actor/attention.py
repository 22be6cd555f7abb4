"""Core attention over packed sequences for Megatron's local layer spec, and the norm that goes with it.

Megatron's own DotProductAttention refuses packed sequences without Transformer Engine. A layer spec is the public
place to put another one. On CUDA in half precision it calls torch's variable-length flash kernel. Elsewhere it
gathers the sequences of similar length into right-padded batches and calls SDPA once for each batch: causal
masking makes right padding harmless, and a few large calls beat one small call for each sequence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from dppo_megatron.types import PackedMicrobatch


@dataclass(frozen=True, slots=True)
class LengthBucket:
    """Sequences of one pack that attend in the same call: similar lengths, so little padding."""

    index: Tensor
    """[B * L] position in the pack of each row's tokens; a row's padding repeats its last token."""
    batch: int
    padded_length: int


@dataclass
class PackedSequences(PackedSeqParams):  # type: ignore[misc]
    """Megatron's description of a pack, with the length buckets computed once for all layers."""

    buckets: tuple[LengthBucket, ...] = ()
    row_of_token: Tensor | None = None
    """[T] where each token's output lies among the rows of all buckets."""

    @classmethod
    def of(cls, plan: PackedMicrobatch, device: torch.device) -> PackedSequences:
        """A planned micro-batch. Attention runs over whole slots: causal masking hides a slot's padding tail."""
        slots = torch.tensor(plan.cu_seqlens_padded, dtype=torch.int32)
        lengths = slots.diff().tolist()
        on_device = slots.to(device)
        buckets, row_of_token = _length_buckets(lengths, slots.tolist())
        return cls(
            qkv_format="thd",
            cu_seqlens_q=on_device,
            cu_seqlens_kv=on_device,
            max_seqlen_q=max(lengths),
            max_seqlen_kv=max(lengths),
            buckets=tuple(LengthBucket(b.index.to(device), b.batch, b.padded_length) for b in buckets),
            row_of_token=row_of_token.to(device),
        )


def _length_buckets(lengths: list[int], starts: list[int]) -> tuple[list[LengthBucket], Tensor]:
    by_size: dict[int, list[int]] = {}
    for i, length in enumerate(lengths):
        by_size.setdefault(length.bit_length(), []).append(i)
    buckets: list[LengthBucket] = []
    row_of_token = torch.empty(starts[-1], dtype=torch.int64)
    rows = 0
    for members in by_size.values():
        longest = max(lengths[i] for i in members)
        start = torch.tensor([starts[i] for i in members])[:, None]
        last = torch.tensor([lengths[i] - 1 for i in members])[:, None]
        position = torch.arange(longest)[None]
        index = (start + torch.minimum(position, last)).flatten()
        real = (position <= last).flatten()
        row_of_token[index[real]] = rows + torch.arange(len(index))[real]
        buckets.append(LengthBucket(index, len(members), longest))
        rows += len(index)
    return buckets, row_of_token


class PackedAttention(MegatronModule):  # type: ignore[misc]
    """Causal attention inside each sequence of a pack (Megatron's CoreAttention interface)."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        self._scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
    ) -> Tensor:
        """query [T, H, D], key and value [T, K, D] with K dividing H -> [T, H * D]."""
        assert packed_seq_params is not None, "the actor always packs"
        if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16):
            out = self._flash(query, key, value, packed_seq_params)
        else:
            out = self._bucketed(query, key, value, packed_seq_params)
        return out.reshape(query.size(0), -1)

    def _flash(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        out = varlen_attn(
            query,
            key,
            value,
            packed.cu_seqlens_q,
            packed.cu_seqlens_kv,
            packed.max_seqlen_q,
            packed.max_seqlen_kv,
            scale=self._scale,
            window_size=(-1, 0),
            enable_gqa=query.size(1) != key.size(1),
        )
        assert isinstance(out, Tensor)  # a tuple only where the log-sum-exp is asked for
        return out

    def _bucketed(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences) -> Tensor:
        rows = []
        for bucket in packed.buckets:
            q, k, v = (
                tensor.index_select(0, bucket.index)
                .view(bucket.batch, bucket.padded_length, tensor.size(1), tensor.size(2))
                .transpose(1, 2)
                for tensor in (query, key, value)
            )
            attended = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=self._scale, enable_gqa=query.size(1) != key.size(1)
            )
            rows.append(attended.transpose(1, 2).reshape(-1, query.size(1), query.size(2)))
        assert packed.row_of_token is not None
        return torch.cat(rows).index_select(0, packed.row_of_token)


class RMSNorm(torch.nn.RMSNorm):
    """Root-mean-square norm for the local layer spec.

    Megatron's WrappedTorchNorm refuses sequence parallelism. Tagging the weight is all that is missing: Megatron
    then sums its gradient over the tensor-parallel ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
