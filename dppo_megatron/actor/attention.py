"""Core attention over packed sequences for Megatron's local layer spec, and the norm that goes with it.

Without Transformer Engine, Megatron's own DotProductAttention refuses packed sequences. On CUDA in half precision the
attention here calls a variable-length flash kernel (`find_kernel`). Elsewhere it gathers sequences of similar length
into right-padded batches and calls SDPA once per batch, as causal masking makes right padding harmless.

Megatron's rotary embedding reads the lengths of the pack's sequences from the device in every layer, separately for
queries and keys: 144 host synchronizations per forward pass of a 36-layer model. Here the model is built without
position embeddings, the pack carries each token's position, and the attention applies the rotation. The operations are
Megatron's, one for one, so without scaling the results are bit-identical.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from dppo_megatron.actor.layout import ContextShare, to_device
from dppo_megatron.types import PackedMicrobatch
from dppo_megatron.weights.layer_parts import Rope, deinterleave


class Rotation(NamedTuple):
    """Scaled cosines and sines of the angles of a pack's tokens: [T / CP, 1, pairs] each, in the activations' dtype."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, slots=True)
class LengthBucket:
    """Sequences of one pack that share an attention call: of similar lengths, so there is little padding."""

    query_index: Tensor
    """[B * Q] position of each query among this rank's tokens; padding repeats a row's last token."""
    key_index: Tensor
    """[B * L] position of each key in the whole pack, padded in the same way."""
    batch: int
    mask: Tensor | None
    """[B, 1, Q, L] True where a query sees a key; None: plain causal (neither context parallelism nor a window)."""


class BucketedPack(NamedTuple):
    """One rank's part of a pack, divided into length buckets."""

    buckets: tuple[LengthBucket, ...]
    row_of_token: Tensor
    """[T / CP] position of each of this rank's tokens among the query rows of all buckets."""


@dataclass
class PackedSequences(PackedSeqParams):  # type: ignore[misc]
    """Megatron's description of a pack, plus what this attention computes from it once for all layers."""

    slots: tuple[int, ...] = (0,)
    context: ContextShare = field(default_factory=ContextShare)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    _rotations: dict[tuple[Rope, torch.dtype], Rotation] = field(default_factory=dict)
    _bucketed: dict[int | None, BucketedPack] = field(default_factory=dict)

    @classmethod
    def of(cls, plan: PackedMicrobatch, context: ContextShare, device: torch.device) -> PackedSequences:
        """Describe a planned micro-batch. Attention runs over whole slots: causal masking hides a slot's padding tail
        from its sequence, and kernels need one set of offsets instead of two."""
        slots = plan.cu_seqlens_padded
        offsets = to_device(torch.tensor(slots, dtype=torch.int32), device)
        longest = max(end - start for start, end in pairwise(slots))
        return cls(
            qkv_format="thd",
            cu_seqlens_q=offsets,
            cu_seqlens_kv=offsets,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            slots=slots,
            context=context,
            device=device,
        )

    @cached_property
    def position_ids(self) -> Tensor:
        """[T / CP] int64: position in its sequence of each token that this rank holds."""
        whole = torch.cat([torch.arange(end - start) for start, end in pairwise(self.slots)])
        return to_device(whole[self.context.indices(self.slots)], self.device)

    def rotation(self, rope: Rope, dtype: torch.dtype) -> Rotation:
        """The rotary angles of this rank's tokens, computed in the first layer and kept for the others."""
        if (rope, dtype) not in self._rotations:
            self._rotations[rope, dtype] = rotation_at(rope, self.position_ids, dtype)
        return self._rotations[rope, dtype]

    @cached_property
    def whole_pack_index(self) -> Tensor:
        """[T] where each token of the pack is in the concatenation of all ranks' shares."""
        shares = [replace(self.context, rank=rank).indices(self.slots) for rank in range(self.context.size)]
        return to_device(torch.argsort(torch.cat(shares)), self.device)

    def bucketed(self, window: int | None = None) -> BucketedPack:
        """The length buckets for layers with this window, computed in the first of them. Kernels that take offsets do
        not need them."""
        if window not in self._bucketed:
            self._bucketed[window] = self._make_buckets(window)
        return self._bucketed[window]

    def _make_buckets(self, window: int | None) -> BucketedPack:
        by_size: dict[int, list[tuple[int, int]]] = {}
        for start, end in pairwise(self.slots):
            by_size.setdefault((end - start).bit_length(), []).append((start, end - start))
        buckets: list[LengthBucket] = []
        row_of_token = torch.empty(self.slots[-1] // self.context.size, dtype=torch.int64)
        rows = 0
        for members in by_size.values():
            query, key, mask, real = _bucket(members, self.context, window)
            row_of_token[query[real]] = rows + torch.nonzero(real)[:, 0]
            rows += len(real)
            query, key = to_device(query, self.device), to_device(key, self.device)
            on_device = None if mask is None else to_device(mask, self.device)
            buckets.append(LengthBucket(query, key, len(members), on_device))
        return BucketedPack(tuple(buckets), to_device(row_of_token, self.device))


def _bucket(
    members: Sequence[tuple[int, int]], context: ContextShare, window: int | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """The bucket of the slots (start, length): query_index, key_index and mask (see `LengthBucket`), and [B * Q] True
    for query rows that are not padding."""
    start = torch.tensor([start for start, _ in members])[:, None]
    length = torch.tensor([length for _, length in members])[:, None]
    key = torch.arange(int(length.max()))[None]
    key_index = start + torch.minimum(key, length - 1)
    local_length = length // context.size
    row = torch.arange(int(local_length.max()))[None]
    query = torch.minimum(row, local_length - 1)
    query_index = (start // context.size + query).flatten()
    mask = None
    if context.size > 1 or (window is not None and window < key.size(1)):
        position = context.position(query, length)[:, :, None]
        mask = key[:, None] <= position
        if window is not None:
            mask &= key[:, None] > position - window
        mask = mask[:, None]
    return query_index, key_index.flatten(), mask, (row < local_length).flatten()


def rotation_at(rope: Rope, position_ids: Tensor, dtype: torch.dtype) -> Rotation:
    """The rotation at `position_ids` [T], computed in float32 and then rounded to `dtype`."""
    frequencies = to_device(torch.tensor(rope.frequencies), position_ids.device)
    angles = torch.outer(position_ids.float(), frequencies)[:, None]
    return Rotation((angles.cos() * rope.scale).to(dtype), (angles.sin() * rope.scale).to(dtype))


def rotate(states: Tensor, rotation: Rotation) -> Tensor:
    """Rotate queries or keys [T / CP, heads, D] by the angles of their tokens' positions.

    Dimension i is paired with i + pairs, for i below the number of pairs. Dimensions from 2 x pairs on are not rotated.
    Example: at angle a, the pair (x, y) becomes (x cos a - y sin a, y cos a + x sin a).
    """
    rotated: Tensor = _Rotate.apply(states, *rotation)  # type: ignore[no-untyped-call]
    return rotated


class _Rotate(torch.autograd.Function):
    """The gradient is the inverse rotation, with the same scale. Autograd would keep four tensors of `states`' size."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(states, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        return _rotated(grad, cos, -sin), None, None


def _rotated(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    pairs = cos.size(-1)
    first, second, rest = states.tensor_split((pairs, 2 * pairs), dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


class Rotating:
    """Mixin for a core attention: rotates queries and keys by the positions of the pack, Megatron's
    `packed_seq_params`, before attention is computed."""

    def __init__(self, *args: Any, rope: Rope, interleaved: bool = False, **kwargs: Any) -> None:
        """`interleaved`: dimensions 2 i and 2 i + 1 are a pair; otherwise the pairs are in two halves."""
        super().__init__(*args, **kwargs)
        self._rope, self._interleaved = rope, interleaved

    def forward(self, query: Tensor, key: Tensor, *args: Any, packed_seq_params: Any = None, **kwargs: Any) -> Tensor:
        """Rotate query [T, H, D] and key [T, K, D] of this rank's tokens; pass everything else on to the attention."""
        assert packed_seq_params is not None, "the actor always packs"
        rotation = packed_seq_params.rotation(self._rope, query.dtype)
        if self._interleaved:  # reordering dimensions alike in queries and keys does not change their product
            size = 2 * len(self._rope.frequencies)
            query, key = (torch.cat([deinterleave(one[..., :size]), one[..., size:]], -1) for one in (query, key))
        query, key = rotate(query, rotation), rotate(key, rotation)
        out: Tensor = super().forward(query, key, *args, packed_seq_params=packed_seq_params, **kwargs)  # type: ignore[misc]
        return out


class UnrotatedAttention(MegatronModule):  # type: ignore[misc]
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
        k_channels: int | None = None,
        v_channels: int | None = None,
    ) -> None:
        super().__init__(config=config)
        head_dim = k_channels or config.kv_channels
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["cp"])
        self._context_group = groups.cp
        self._scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(head_dim)
        sees_all = not is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self._window = None if sees_all else config.window_size[0] + 1
        self._kernel, _ = find_kernel(head_dim)

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
        """query [T, H, D], key [T, K, D], value [T, K, V] -> [T, H * V]; K divides H, T counts this rank's tokens."""
        assert packed_seq_params is not None, "the actor always packs"
        packed = packed_seq_params
        half = query.dtype in (torch.float16, torch.bfloat16)
        if self._kernel is not None and half and packed.context.size == 1:
            size = value.size(-1)
            value = F.pad(value, (0, query.size(-1) - size))  # kernels need query, key and value heads of one size
            offsets, longest = packed.cu_seqlens_q, packed.max_seqlen_q
            out = self._kernel(query, key, value, offsets, longest, self._scale, self._window)[..., :size]
        else:
            out = self._bucketed(query, key, value, packed)
        return out.reshape(query.size(0), -1)

    def _bucketed(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences) -> Tensor:
        if packed.context.size > 1:
            key, value = (self._whole_pack(tensor, packed) for tensor in (key, value))
        rows, bucketed = [], packed.bucketed(self._window)
        for bucket in bucketed.buckets:
            pairs = ((query, bucket.query_index), (key, bucket.key_index), (value, bucket.key_index))
            q, k, v = (
                tensor.index_select(0, index).view(bucket.batch, -1, *tensor.shape[1:]).transpose(1, 2)
                for tensor, index in pairs
            )
            repeats = 1 if bucket.mask is None else q.size(1) // k.size(1)
            if repeats > 1:  # torch's kernel for masks has no grouped queries: all scores would be stored
                k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
            attended = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=bucket.mask,
                is_causal=bucket.mask is None,
                scale=self._scale,
                enable_gqa=q.size(1) != k.size(1),
            )
            rows.append(attended.transpose(1, 2).reshape(-1, query.size(1), value.size(2)))
        return torch.cat(rows).index_select(0, bucketed.row_of_token)

    def _whole_pack(self, tensor: Tensor, packed: PackedSequences) -> Tensor:
        """Keys or values of all ranks, in the pack's order; the backward pass sums their gradients over ranks."""
        shares = gather_from_sequence_parallel_region(tensor.contiguous(), group=self._context_group)
        whole: Tensor = shares.index_select(0, packed.whole_pack_index)
        return whole


class PackedAttention(Rotating, UnrotatedAttention):
    """The local spec's core attention: rotary embedding, then attention inside each sequence."""


class RMSNorm(torch.nn.RMSNorm):
    """Root-mean-square norm for the local layer spec. Megatron's WrappedTorchNorm refuses sequence parallelism, which
    only needs a mark on the weight. Gemma multiplies by 1 + weight, in float32: bfloat16 would round it."""

    returns_residual = False  # read by megatron-core from 0.19 on

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self._is_zero_centered = config.layernorm_zero_centered_gamma

    def forward(self, x: Tensor) -> Tensor:
        """Over the last dimension of x."""
        if not self._is_zero_centered:
            return super().forward(x)
        exact = torch.promote_types(x.dtype, torch.float32)
        normed = F.rms_norm(x.to(exact), self.normalized_shape, 1 + self.weight.to(exact), self.eps)
        return normed.to(x.dtype)


class NormedResidual(torch.nn.Module):
    """Norms the output of attention or feed-forward and adds it to the residual stream, as Gemma and GLM-4 do. Replaces
    Megatron's bias-dropout-add, the only module of a layer that runs after both. `norm`: Transformer Engine's class or
    `RMSNorm`."""

    def __init__(self, norm: Any, config: TransformerConfig) -> None:
        super().__init__()
        self.norm = norm(config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> Callable[..., Tensor]:
        """The function that Megatron calls with ((output, None), residual, 0.0); tensors are [T (/ tp), 1, hidden]."""
        return self._add

    def _add(self, output_with_bias: tuple[Tensor, None], residual: Tensor, dropout: float) -> Tensor:
        output, _ = output_with_bias
        # Megatron enables gradients here even in passes without them, and would then keep every layer's input
        with torch.set_grad_enabled(output.requires_grad):
            added: Tensor = residual + self.norm(output)
        return added


_LEAST_CAPABILITY = (8, 0)
"""Ampere: the oldest chip that flash attention runs on."""
_LARGEST_HEAD = 256


VarlenKernel: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, int, float, int | None], Tensor]
"""Causal attention inside each sequence of a pack: query [T, H, D], key and value [T, K, D] where K divides H, offsets
[sequences + 1] int32, longest length, scale, window -> [T, H, D]. A token sees `window` tokens, itself included."""


def find_kernel(head_dim: int) -> tuple[VarlenKernel | None, str]:
    """The kernel for this machine and head size, and a phrase for the log that names it or the reason for its absence.
    flash-attn is preferred if installed: every version has grouped queries, causal masking and a scale."""
    if not torch.cuda.is_available():
        return None, "padded batches (no CUDA device)"
    if torch.cuda.get_device_capability() < _LEAST_CAPABILITY:
        return None, "padded batches (flash attention needs sm_80 or newer)"
    if head_dim % 8 or head_dim > _LARGEST_HEAD:
        return None, f"padded batches (flash attention has no heads of {head_dim})"
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError:
        pass
    else:
        return from_flash_attn(flash_attn_varlen_func), "flash-attn"
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None, f"padded batches (no flash-attn, and torch {torch.__version__} has no varlen_attn)"
    if "enable_gqa" not in inspect.signature(varlen_attn).parameters:  # torch before 2.12
        return None, f"padded batches (no flash-attn; varlen_attn of torch {torch.__version__} has no grouped queries)"
    return from_torch(varlen_attn), "torch's varlen_attn"


def from_flash_attn(function: Callable[..., Tensor]) -> VarlenKernel:
    """flash-attn's `flash_attn_varlen_func` as a `VarlenKernel`."""

    def kernel(
        query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, longest: int, scale: float, window: int | None
    ) -> Tensor:
        """Queries and keys have the same offsets and longest length."""
        options: dict[str, Any] = {} if window is None else {"window_size": (window - 1, 0)}
        both = offsets, offsets, longest, longest
        return function(query, key, value, *both, softmax_scale=scale, causal=True, **options)

    return kernel


def from_torch(function: Callable[..., Any]) -> VarlenKernel:
    """torch's `varlen_attn` (2.12 or newer) as a `VarlenKernel`."""

    def kernel(
        query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, longest: int, scale: float, window: int | None
    ) -> Tensor:
        """Causal by its window of (tokens before, tokens after): -1 is all of them, and there are 0 after."""
        options = {"scale": scale, "window_size": (-1 if window is None else window - 1, 0)}
        grouped = query.size(1) != key.size(1)
        out: Tensor = function(query, key, value, offsets, offsets, longest, longest, **options, enable_gqa=grouped)
        return out

    return kernel
