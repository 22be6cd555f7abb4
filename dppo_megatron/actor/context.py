"""Which tokens of a pack a context-parallel rank holds, and how the ranks' shares become one pack again.

Each sequence is split into 2 CP chunks and rank r takes chunks r and 2 CP - 1 - r, the order that Megatron's rotary
embedding and Transformer Engine use: causal attention then costs every rank the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ContextShare:
    """One rank of a context-parallel group."""

    rank: int = 0
    size: int = 1

    def position(self, local: Tensor, length: Tensor) -> Tensor:
        """Position in its sequence of this rank's `local`-th token; `length` of the slot, a multiple of 2 CP."""
        chunk = length // (2 * self.size)
        first = local < chunk
        return torch.where(first, self.rank * chunk + local, (2 * self.size - 2 - self.rank) * chunk + local)

    def indices(self, slots: Sequence[int]) -> Tensor:
        """[T / CP] int64: positions in the pack of this rank's tokens, in the order in which it holds them."""
        if self.size == 1:
            return torch.arange(slots[-1])
        shares = []
        for start, end in pairwise(slots):
            length = torch.tensor(end - start)
            shares.append(start + self.position(torch.arange((end - start) // self.size), length))
        return torch.cat(shares)


def gather_pack(local: Tensor, index: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's [T / CP, ...] values -> the pack's [T, ...], differentiable.

    Every rank then computes the same loss from it, so the backward pass takes this rank's rows and sums nothing.

    Args:
        index: [T] position of each token of the pack among the ranks' shares, concatenated.
    """
    if group.size() == 1:
        return local
    gathered: Tensor = _GatherPack.apply(local, index, group)  # type: ignore[no-untyped-call]
    return gathered


class _GatherPack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, index: Tensor, group: dist.ProcessGroup) -> Tensor:
        shares = [torch.empty_like(local) for _ in range(group.size())]
        dist.all_gather(shares, local.contiguous(), group=group)
        ctx.save_for_backward(index)
        ctx.mine = slice(group.rank() * local.size(0), (group.rank() + 1) * local.size(0))
        return torch.cat(shares).index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (index,) = ctx.saved_tensors
        shares = torch.empty_like(grad)
        shares[index] = grad
        return shares[ctx.mine], None, None
