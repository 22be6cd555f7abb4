"""Token log-probabilities and entropy from hidden states without materializing the logits of a whole pack.

A pack of 16k tokens at a vocabulary of 150k has 10 GB of float32 logits, and their gradient as much again. So the
output projection, the softmax and their backward pass run over chunks of tokens: the forward pass keeps two numbers a
token, the backward pass multiplies again. Only positions that predict a completion token are computed, which makes up
for part of the second multiplication. Peak memory beside the model: some four float32 tensors of
[chunk, V / tp], plus one float32 tensor of the weight's shape for its gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dppo_megatron.actor.batch import Microbatch
from dppo_megatron.types import FloatArray, TrainSample


@dataclass
class LogprobStore:
    """Log-probabilities of completion tokens by sample, from a pass over packed micro-batches.

    They stay on the ranks that computed them, a replica's last pipeline stage: those whose loss reads them.
    """

    values: dict[int, FloatArray] = field(default_factory=dict)
    """Place of the sample in the plan -> [completion tokens], float64; empty on other stages."""

    def add(self, microbatch: Microbatch, logprobs: Tensor) -> None:
        """Add those of one pack [T]."""
        trained = microbatch.mask > 0
        counts = torch.bincount(microbatch.sequence[trained], minlength=len(microbatch.samples))
        flat = logprobs.detach()[trained].double().cpu()
        # a closing dummy segment has no trained tokens, so the members' counts are all of them
        edges = [0, *counts.cumsum(0)[: len(microbatch.samples)].tolist()]
        for sample, (start, end) in zip(microbatch.samples, pairwise(edges), strict=True):
            self.values[sample] = flat[start:end].numpy()

    def as_old(self, samples: Mapping[int, TrainSample]) -> dict[int, TrainSample]:
        """The samples with these as `old_logprobs`; unchanged where this rank has none."""
        return {i: replace(s, old_logprobs=self.values[i]) if i in self.values else s for i, s in samples.items()}

    def as_reference(self, samples: Mapping[int, TrainSample]) -> dict[int, TrainSample]:
        """The samples with these as `reference_logprobs`; likewise."""
        return {i: replace(s, reference_logprobs=self.values[i]) if i in self.values else s for i, s in samples.items()}


class Projection(NamedTuple):
    """The output layer, its vocabulary split over the tensor-parallel ranks."""

    vocab_size: int
    """Columns from here on are padding and have probability 0."""
    temperature: float
    """The logits are divided by it."""
    chunk_tokens: int
    """Tokens whose logits exist at a time."""
    group: dist.ProcessGroup
    """The tensor-parallel group."""


def chunked_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor, projection: Projection) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of each distribution, both differentiable.

    Args:
        hidden: [T, H], the same on every rank of the group; its gradient is this rank's vocabulary's part only.
        weight: [V / tp, H] this rank's rows of the output projection.
        targets: [T] int64 global token ids.

    Returns:
        ([T], [T]) in float32 (float64 stays float64), the same on every rank of the group.
    """
    logprobs, entropy = _ChunkedLogprobs.apply(hidden, weight, targets, projection)  # type: ignore[no-untyped-call]
    return logprobs, entropy


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, projection: Projection
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logprobs, entropy, log_normalizer = hidden.new_empty(3, len(hidden), dtype=dtype)
        for rows in _chunks(len(hidden), projection.chunk_tokens):
            scaled = _scaled_logits(hidden[rows], weight, projection, dtype)
            column, inside = _column(targets[rows], scaled.size(-1), projection)
            peak = scaled.amax(-1)
            dist.all_reduce(peak, dist.ReduceOp.MAX, projection.group)
            shifted = scaled.sub_(peak[:, None])
            picked = torch.where(inside, shifted.gather(1, column)[:, 0], 0.0)
            exp = shifted.exp()
            shifted[:, _num_real(scaled.size(-1), projection) :] = 0.0  # 0 * -inf would be NaN
            exp_shifted = shifted.mul_(exp).sum(-1)
            sums = torch.stack([exp.sum(-1), exp_shifted, picked])
            dist.all_reduce(sums, group=projection.group)
            normalizer, weighted, target_logit = sums
            logprobs[rows] = target_logit - normalizer.log()
            entropy[rows] = normalizer.log() - weighted / normalizer
            log_normalizer[rows] = normalizer.log() + peak
        ctx.save_for_backward(hidden, weight, targets, entropy, log_normalizer)
        ctx.projection = projection
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, Tensor, None, None]:
        grad_logprobs, grad_entropy = grads
        hidden, weight, targets, entropy, log_normalizer = ctx.saved_tensors
        projection: Projection = ctx.projection
        grad_hidden = torch.zeros_like(hidden)
        # accumulates over chunks: in bfloat16 small contributions would be lost
        grad_weight = torch.zeros_like(weight, dtype=log_normalizer.dtype)
        for rows in _chunks(len(hidden), projection.chunk_tokens):
            log_probs = _scaled_logits(hidden[rows], weight, projection, log_normalizer.dtype)
            log_probs -= log_normalizer[rows, None]
            if grad_entropy is None:
                grad = log_probs.exp_()
                grad *= -_rows_of(grad_logprobs, rows)
            else:
                probs = log_probs.exp()
                log_probs[:, _num_real(probs.size(-1), projection) :] = 0.0
                grad = log_probs.add_(entropy[rows, None]).mul_(grad_entropy[rows, None])
                grad += _rows_of(grad_logprobs, rows)
                grad *= probs.neg_()
            if grad_logprobs is not None:
                column, inside = _column(targets[rows], grad.size(-1), projection)
                grad.scatter_add_(1, column, torch.where(inside, grad_logprobs[rows], 0.0)[:, None])
            if projection.temperature != 1:
                grad /= projection.temperature
            grad_logits = grad.to(hidden.dtype)
            grad_hidden[rows] = grad_logits @ weight
            grad_weight += grad_logits.t() @ hidden[rows]
        return grad_hidden, grad_weight.to(weight.dtype), None, None


def _rows_of(grad: Tensor | None, rows: slice) -> Tensor | float:
    return 0.0 if grad is None else grad[rows, None]


def _chunks(count: int, size: int) -> Iterator[slice]:
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


def _scaled_logits(hidden: Tensor, weight: Tensor, projection: Projection, dtype: torch.dtype) -> Tensor:
    """[chunk, V / tp] with -inf on the padding columns. Multiplied in the model's type, as rollout engines do."""
    scaled = (hidden @ weight.t()).to(dtype)
    if projection.temperature != 1:
        scaled /= projection.temperature
    scaled[:, _num_real(scaled.size(-1), projection) :] = -torch.inf
    return scaled


def _num_real(columns: int, projection: Projection) -> int:
    return max(0, min(columns, projection.vocab_size - projection.group.rank() * columns))


def _column(targets: Tensor, columns: int, projection: Projection) -> tuple[Tensor, Tensor]:
    """[chunk, 1] the targets' local columns, and [chunk] whether this rank holds them."""
    local = targets - projection.group.rank() * columns
    inside = (local >= 0) & (local < _num_real(columns, projection))
    return local.clamp(0, columns - 1)[:, None], inside
