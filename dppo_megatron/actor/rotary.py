"""Rotary position embedding: cosines and sines once a pack, applied inside the core attention.

Megatron's own goes over a pack's sequences in every layer, for queries and keys apart, and asks the device for their
lengths each time: two host waits a call, 144 in a forward pass of a 36-layer model, and from 0.19 on a Python loop over
sequences as well. Here the model is built without position embeddings, the pack carries the position of each of its
tokens, and the attention rotates (after the query and key norms, where Megatron does it too). The arithmetic is
Megatron's, operation for operation, so that not one bit differs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from megatron.core.models.common.embeddings import RotaryEmbedding
from torch import Tensor


class Rotation(NamedTuple):
    """Angles of a pack's tokens, [T / CP, 1, D / 2] each, in the type of the activations."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, slots=True)
class Rotary:
    """How a model turns positions into angles. Frozen, so that it can be the key of a pack's cache."""

    head_dim: int
    theta: float
    llama3_factor: float = 0.0
    """Rope scaling `llama3` with Megatron's constants; 0: none."""

    def at(self, position_ids: Tensor, dtype: torch.dtype) -> Rotation:
        """Angles at `position_ids` [T], computed in float32 as everywhere else and then rounded."""
        embedding = RotaryEmbedding(
            self.head_dim,
            rotary_percent=1.0,
            rotary_base=self.theta,
            rope_scaling=self.llama3_factor > 0,
            rope_scaling_factor=self.llama3_factor,
            use_cpu_initialization=True,
        )
        angles = torch.outer(position_ids.float(), embedding.inv_freq.to(position_ids.device))[:, None]
        return Rotation(angles.cos().to(dtype), angles.sin().to(dtype))


def rotate(states: Tensor, rotation: Rotation) -> Tensor:
    """Queries or keys [T / CP, heads, D], each head's halves turned by the angle of its token's position.

    Example: at angle a, the pair (x[i], x[i + D / 2]) becomes (x cos a - y sin a, y cos a + x sin a).
    """
    turned: Tensor = _Rotate.apply(states, *rotation)  # type: ignore[no-untyped-call]
    return turned


class _Rotate(torch.autograd.Function):
    """The gradient of a rotation is the rotation back: autograd would keep four products of the size of `states`."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(states, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        return _turn(grad, cos, -sin), None, None


def _turn(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = states.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Rotating:
    """Mixed into a core attention: queries and keys are rotated by the pack's positions before it attends.

        class TransformerEngineAttention(Rotating, TEDotProductAttention): ...

    The pack is Megatron's `packed_seq_params` and has `rotation(rotary, dtype)`, made once for all layers.
    """

    def __init__(self, *args: Any, rotary: Rotary, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._rotary = rotary

    def forward(self, query: Tensor, key: Tensor, *args: Any, packed_seq_params: Any = None, **kwargs: Any) -> Tensor:
        """query [T, H, D] and key [T, K, D] of this rank's tokens; the rest is the attention's own business."""
        assert packed_seq_params is not None, "the actor always packs"
        rotation = packed_seq_params.rotation(self._rotary, query.dtype)
        query, key = rotate(query, rotation), rotate(key, rotation)
        out: Tensor = super().forward(query, key, *args, packed_seq_params=packed_seq_params, **kwargs)  # type: ignore[misc]
        return out
