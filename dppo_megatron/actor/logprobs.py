"""Token log-probabilities and entropy from logits whose vocabulary is split over the tensor-parallel ranks.

Megatron's vocab-parallel cross entropy overwrites its input and gives no entropy. One autograd function gives both
with two all-reduces. It keeps one probability tensor of the size of the local logits for the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def vocab_parallel_logprobs(
    logits: Tensor, targets: Tensor, *, vocab_size: int, temperature: float, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of each distribution, both differentiable.

    Args:
        logits: [T, V / tp] this rank's columns; computed in float32 (float64 stays float64), never modified.
        targets: [T] int64 global token ids.
        vocab_size: columns from here on are padding and have probability 0.
        temperature: the logits are divided by it first.
        group: the tensor-parallel group.

    Returns:
        ([T], [T]), the same on every rank of the group.
    """
    logprobs, entropy = _VocabParallelLogprobs.apply(  # type: ignore[no-untyped-call]
        logits, targets, vocab_size, temperature, group
    )
    return logprobs, entropy


class _VocabParallelLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, vocab_size: int, temperature: float, group: dist.ProcessGroup
    ) -> tuple[Tensor, Tensor]:
        scaled = (logits if logits.dtype == torch.float64 else logits.float()) / temperature
        first = group.rank() * scaled.size(-1)
        num_real = max(0, min(scaled.size(-1), vocab_size - first))
        scaled[:, num_real:] = -torch.inf
        peak = scaled.amax(-1)
        dist.all_reduce(peak, dist.ReduceOp.MAX, group)
        shifted = scaled.sub_(peak[:, None])
        local = targets - first
        inside = (local >= 0) & (local < num_real)
        column = local.clamp(0, scaled.size(-1) - 1)[:, None]
        picked = torch.where(inside, shifted.gather(1, column)[:, 0], 0.0)
        exp = shifted.exp()
        # 0 * -inf on the padding columns would be NaN
        exp_shifted = (exp * shifted.masked_fill(exp == 0, 0.0)).sum(-1)
        sums = torch.stack([exp.sum(-1), exp_shifted, picked])
        dist.all_reduce(sums, group=group)
        normalizer, weighted, target_logit = sums
        log_normalizer = normalizer.log()
        entropy = log_normalizer - weighted / normalizer
        ctx.save_for_backward(exp.div_(normalizer[:, None]), entropy, column, inside)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        ctx.set_materialize_grads(False)
        return target_logit - log_normalizer, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None, None, None, None]:
        grad_logprobs, grad_entropy = grads
        probs, entropy, column, inside = ctx.saved_tensors
        if grad_logprobs is None:
            grad = torch.zeros_like(probs)
        else:
            grad = -probs * grad_logprobs[:, None]
            grad.scatter_add_(1, column, torch.where(inside, grad_logprobs, 0.0)[:, None])
        if grad_entropy is not None:
            log_probs = probs.clamp_min(torch.finfo(probs.dtype).tiny).log()
            grad -= probs * (log_probs + entropy[:, None]) * grad_entropy[:, None]
        return (grad / ctx.temperature).to(ctx.dtype), None, None, None, None
