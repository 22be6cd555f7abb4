"""Rotary position embedding: cosines and sines computed once per pack, applied inside the core attention.

Megatron's implementation iterates over the pack's sequences in every layer, separately for queries and keys, and reads
their lengths from the device each time. That is two host synchronizations per call, 144 per forward pass of a 36-layer
model, and since 0.19 a Python loop over the sequences as well. Here the model is built without position embeddings, the
pack carries each token's position, and the attention applies the rotation, after the query and key norms as Megatron
does. The arithmetic is Megatron's, operation for operation, so without scaling results are bit-identical.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dppo_megatron.actor.layout import to_device
from dppo_megatron.weights.layer_parts import Rope, halves


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
    """Rotate queries or keys [T / CP, heads, D] by the angles of their tokens' positions, in pairs of the two halves of
    the first 2 x pairs dimensions; the others stay.

    Example: at angle a, the pair (x[i], x[i + D / 2]) becomes (x cos a - y sin a, y cos a + x sin a).
    """
    turned: Tensor = _Rotate.apply(states, *rotation)  # type: ignore[no-untyped-call]
    return turned


class _Rotate(torch.autograd.Function):
    """Its gradient is the inverse rotation, scaled alike. Autograd would keep four tensors as large as `states`."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(states, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        return _turn(grad, cos, -sin), None, None


def _turn(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    pairs = cos.size(-1)
    first, second, rest = states.tensor_split((pairs, 2 * pairs), dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


class Rotating:
    """Mixin for a core attention: rotates queries and keys by the pack's positions before attention is computed.

        class TransformerEngineAttention(Rotating, TEDotProductAttention): ...

    The pack is Megatron's `packed_seq_params`; its `rotation(rope, dtype)` is computed once for all layers.
    """

    def __init__(self, *args: Any, rope: Rope, side_by_side: bool = False, **kwargs: Any) -> None:
        """`side_by_side`: so lie the pairs that turn; else in two halves."""
        super().__init__(*args, **kwargs)
        self._rope, self._side_by_side = rope, side_by_side

    def forward(self, query: Tensor, key: Tensor, *args: Any, packed_seq_params: Any = None, **kwargs: Any) -> Tensor:
        """Rotate query [T, H, D] and key [T, K, D] of this rank's tokens; pass everything else on to the attention."""
        assert packed_seq_params is not None, "the actor always packs"
        rotation = packed_seq_params.rotation(self._rope, query.dtype)
        if self._side_by_side:  # in any order of the dimensions, queries and keys have one product
            size = 2 * len(self._rope.frequencies)
            query, key = (torch.cat([halves(one[..., :size]), one[..., size:]], -1) for one in (query, key))
        query, key = rotate(query, rotation), rotate(key, rotation)
        out: Tensor = super().forward(query, key, *args, packed_seq_params=packed_seq_params, **kwargs)  # type: ignore[misc]
        return out
