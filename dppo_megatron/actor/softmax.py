"""Softmax statistics and gradients of a chunk of tokens in torch operations; `fused_softmax` has Triton kernels."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Softmax(Protocol):
    """Forward and backward computations on the logits of a chunk of n tokens, over one rank's V / tp columns."""

    def statistics(self, logits: Tensor, targets: Tensor, projection: Projection, out: Tensor) -> None:
        """Per token, into `out` [4, n]: the largest scaled logit m; sum exp(x - m); sum (x - m) exp(x - m); and the
        target's scaled logit, 0 if another rank has it. `logits` [n, V / tp] may be overwritten."""

    def gradient(self, logits: Tensor, chunk: BackwardChunk, projection: Projection) -> Tensor:
        """The gradient of the logits, in their dtype; it may overwrite them."""


class BackwardChunk(NamedTuple):
    """The backward pass's inputs for a chunk of n tokens: [n] each."""

    targets: Tensor
    log_normalizer: Tensor
    entropy: Tensor
    grad_logprobs: Tensor | None
    grad_entropy: Tensor | None


class Projection(NamedTuple):
    """The output layer, its vocabulary split over the tensor-parallel ranks."""

    vocab_size: int
    """Columns from this index on are padding and have probability 0."""
    temperature: float
    chunk_tokens: int
    """Number of tokens whose logits are in memory at a time."""
    group: dist.ProcessGroup
    """The tensor-parallel group."""
    softmax: Softmax

    def num_real(self, columns: int) -> int:
        """How many of this rank's columns are not padding."""
        return max(0, min(columns, self.vocab_size - self.first_column(columns)))

    def first_column(self, columns: int) -> int:
        """The token id of this rank's first column."""
        return self.group.rank() * columns


class TorchSoftmax:
    """A `Softmax` in torch operations, computed in float32 (float64 for float64 logits)."""

    def statistics(self, logits: Tensor, targets: Tensor, projection: Projection, out: Tensor) -> None:
        scaled = _scaled(logits, projection, out.dtype)
        del logits
        column, inside = _column(targets, scaled.size(-1), projection)
        # a rank with only padding has the maximum -inf, and -inf - (-inf) is NaN: a finite maximum keeps its sums at 0
        peak = torch.clamp(scaled.amax(-1), min=torch.finfo(scaled.dtype).min)
        out[3] = torch.where(inside, scaled.gather(1, column)[:, 0], 0.0)
        shifted = scaled.sub_(peak[:, None])
        exp = shifted.exp()
        shifted[:, projection.num_real(scaled.size(-1)) :] = 0.0  # 0 * -inf would be NaN
        out[0], out[1] = peak, exp.sum(-1)
        out[2] = shifted.mul_(exp).sum(-1)

    def gradient(self, logits: Tensor, chunk: BackwardChunk, projection: Projection) -> Tensor:
        dtype = logits.dtype
        log_probs = _scaled(logits, projection, chunk.log_normalizer.dtype)
        del logits
        log_probs -= chunk.log_normalizer[:, None]
        if chunk.grad_entropy is None:
            grad = log_probs.exp_()
            grad *= -_as_column(chunk.grad_logprobs)
        else:
            probs = log_probs.exp()
            log_probs[:, projection.num_real(probs.size(-1)) :] = 0.0
            grad = log_probs.add_(chunk.entropy[:, None]).mul_(chunk.grad_entropy[:, None])
            grad += _as_column(chunk.grad_logprobs)
            grad *= probs.neg_()
        if chunk.grad_logprobs is not None:
            column, inside = _column(chunk.targets, grad.size(-1), projection)
            grad.scatter_add_(1, column, torch.where(inside, chunk.grad_logprobs, 0.0)[:, None])
        if projection.temperature != 1:
            grad /= projection.temperature
        return grad.to(dtype)


def _as_column(grad: Tensor | None) -> Tensor | float:
    return 0.0 if grad is None else grad[:, None]


def _scaled(logits: Tensor, projection: Projection, dtype: torch.dtype) -> Tensor:
    """[n, V / tp] in `dtype`, divided by the temperature, with -inf on the padding columns; overwrites `logits` if they
    have that dtype."""
    scaled = logits.to(dtype)
    if projection.temperature != 1:
        scaled /= projection.temperature
    scaled[:, projection.num_real(scaled.size(-1)) :] = -torch.inf
    return scaled


def _column(targets: Tensor, columns: int, projection: Projection) -> tuple[Tensor, Tensor]:
    """[n, 1] the targets' local columns, and [n] whether this rank holds them."""
    local = targets - projection.first_column(columns)
    inside = (local >= 0) & (local < projection.num_real(columns))
    return local.clamp(0, columns - 1)[:, None], inside
