"""Rotary position embedding: cosines and sines computed once per pack, applied inside the core attention.

Megatron's implementation iterates over the pack's sequences in every layer, separately for queries and keys, and reads
their lengths from the device each time. That is two host synchronizations per call, 144 per forward pass of a 36-layer
model, and since 0.19 a Python loop over the sequences as well. Here the model is built without position embeddings, the
pack carries each token's position, and the attention applies the rotation, after the query and key norms as Megatron
does. The operations are Megatron's, one for one, so without scaling the results are bit-identical.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dppo_megatron.actor.layout import to_device
from dppo_megatron.weights.layer_parts import Rope, deinterleave


class Rotation(NamedTuple):
    """Scaled cosines and sines of the angles of a pack's tokens: [T / CP, 1, pairs] each, in the activations' dtype."""

    cos: Tensor
    sin: Tensor


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
    """Mixin for a core attention: rotates queries and keys by the pack's positions before attention is computed.

        class TransformerEngineAttention(Rotating, TEDotProductAttention): ...

    The pack is Megatron's `packed_seq_params`; its `rotation(rope, dtype)` is computed once for all layers.
    """

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
