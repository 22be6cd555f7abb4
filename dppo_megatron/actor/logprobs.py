"""Token log-probabilities and entropy from hidden states without materializing the logits of a whole pack.

The output projection, the softmax and their backward pass run over chunks of the tokens that predict a completion
token: the forward pass keeps two numbers per token, the backward pass computes the logits again (docs/actor.md).
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dppo_megatron.actor.batch import Microbatch
from dppo_megatron.actor.replay import Recorded
from dppo_megatron.actor.softmax import BackwardChunk, Projection, Softmax, TorchSoftmax
from dppo_megatron.types import FloatArray, TrainSample, UserError


@dataclass
class LogprobStore:
    """Log-probabilities of completion tokens by sample, from a pass over packed micro-batches. They stay on the ranks
    that computed them, a replica's last pipeline stage, because the loss there reads them."""

    routes: Recorded | None = None
    """The experts that the pass chose, if it recorded them."""
    _arrays: dict[int, FloatArray] = field(default_factory=dict)
    _on_device: list[tuple[Sequence[int], Sequence[int], Tensor]] = field(default_factory=list)
    """Samples, their lengths and the values of packs that are still on the device: fetching each pack at once would
    make the host wait for the device in every micro-batch."""

    def add(self, microbatch: Microbatch, logprobs: Tensor) -> None:
        """Add the log-probabilities [T] of one pack."""
        trained = logprobs.detach()[microbatch.trained]
        self._on_device.append((microbatch.samples, microbatch.trained_lengths, trained))

    @property
    def values(self) -> dict[int, FloatArray]:
        """Index of the sample in the plan -> [completion tokens], float64; empty on other pipeline stages."""
        if self._on_device:
            samples, lengths, parts = zip(*self._on_device, strict=True)
            flat = torch.cat(parts).double().cpu().numpy()
            edges = [0, *accumulate(chain(*lengths))]
            for sample, (start, end) in zip(chain(*samples), pairwise(edges), strict=True):
                self._arrays[sample] = flat[start:end]
            self._on_device.clear()
        return self._arrays

    def as_old(self, samples: Mapping[int, TrainSample]) -> dict[int, TrainSample]:
        """The samples with these values as `old_logprobs`; samples without values here are unchanged."""
        return {i: replace(s, old_logprobs=self.values[i]) if i in self.values else s for i, s in samples.items()}

    def as_reference(self, samples: Mapping[int, TrainSample]) -> dict[int, TrainSample]:
        """The samples with these values as `reference_logprobs`; samples without values here are unchanged."""
        return {i: replace(s, reference_logprobs=self.values[i]) if i in self.values else s for i, s in samples.items()}


@contextmanager
def without_backward() -> Iterator[None]:
    """`torch.no_grad()` for forward passes without a backward pass. No backward pass may be under way.

    Even here Megatron registers the modules in `actor.recompute_modules` with Transformer Engine, which queues an entry
    for each, to be taken by a backward pass. Without the clearing below the queue grows with every step, and the next
    backward pass takes the entries of this forward pass.
    """
    with torch.no_grad():
        yield
    module = sys.modules.get("transformer_engine.pytorch.distributed")
    if module is not None:
        module.activation_recompute_forward._is_first_fp8_module.clear()


def chunked_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor, projection: Projection) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of each distribution, both differentiable.

    Args:
        hidden: [T, H], the same on every rank of the group; its gradient covers only this rank's vocabulary.
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
        statistics = hidden.new_empty(4, len(hidden), dtype=dtype)
        for rows in _chunks(len(hidden), projection.chunk_tokens):
            # the product is in the model's dtype, as in rollout engines
            projection.softmax.statistics(hidden[rows] @ weight.t(), targets[rows], projection, out=statistics[:, rows])
        peak, normalizer, weighted, target_logit = _over_ranks(statistics, projection.group)
        log_normalizer = normalizer.log()
        logprobs = (target_logit - peak) - log_normalizer
        entropy = log_normalizer - weighted / normalizer
        ctx.save_for_backward(hidden, weight, targets, entropy, log_normalizer + peak)
        ctx.projection = projection
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, Tensor | None, None, None]:
        hidden, weight, targets, entropy, log_normalizer = ctx.saved_tensors
        projection: Projection = ctx.projection
        grad_hidden = torch.zeros_like(hidden)
        # a float32 accumulator over chunks and micro-batches: bfloat16 would lose small contributions
        grad_weight: Tensor | None = getattr(weight, "main_grad", None)
        in_place = grad_weight is not None and grad_weight.dtype == log_normalizer.dtype
        trained = ctx.needs_input_grad[1]  # False with adapters
        if trained and (grad_weight is None or not in_place):
            grad_weight = torch.zeros_like(weight, dtype=log_normalizer.dtype)
        for rows in _chunks(len(hidden), projection.chunk_tokens):
            chunk_grads = (None if grad is None else grad[rows] for grad in grads)
            chunk = BackwardChunk(targets[rows], log_normalizer[rows], entropy[rows], *chunk_grads)
            grad_logits = projection.softmax.gradient(hidden[rows] @ weight.t(), chunk, projection)
            grad_hidden[rows] = grad_logits @ weight
            if trained:
                grad_weight += grad_logits.t() @ hidden[rows]
        if grad_weight is None:
            return grad_hidden, None, None, None
        return grad_hidden, _placeholder_grad(weight) if in_place else grad_weight.to(weight.dtype), None, None


def _placeholder_grad(weight: Tensor) -> Tensor:
    """What Megatron's hook expects for a gradient that is already in `main_grad`: a tensor that it does not add. The
    exception is a tied embedding, where autograd adds the lookup's gradient to this tensor, so it must be zero."""
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return torch.zeros_like(weight) if getattr(weight, "zero_out_wgrad", False) else torch.empty_like(weight)


def _over_ranks(statistics: Tensor, group: dist.ProcessGroup) -> Tensor:
    """A `Softmax`'s statistics combined over all ranks' columns: two all-reduces per pack, none on a single rank."""
    if group.size() == 1:
        return statistics
    peak, exp, weighted, picked = statistics
    highest = peak.clone()
    dist.all_reduce(highest, dist.ReduceOp.MAX, group)
    down = peak - highest
    sums = torch.stack([exp * down.exp(), (weighted + exp * down) * down.exp(), picked])
    dist.all_reduce(sums, group=group)
    return torch.cat([highest[None], sums])


def choose_softmax(wanted: str, device: torch.device, dtype: torch.dtype) -> tuple[Softmax, str]:
    """The softmax for this `actor.logprob_kernel`, and its name for the log, with the reason if it is torch's. Raises
    UserError if `triton` cannot run here."""
    problem = ""
    if device.type != "cuda":
        problem = "there is no CUDA device"
    elif dtype == torch.float64:
        problem = "only torch computes in float64"
    elif importlib.util.find_spec("triton") is None:
        problem = "Triton is not installed"
    if wanted == "triton" and problem:
        raise UserError(f"actor.logprob_kernel = triton: {problem}; use auto or torch")
    if wanted == "torch" or problem:
        return TorchSoftmax(), f"torch ({problem or 'as configured'})"
    from dppo_megatron.actor.fused_softmax import TritonSoftmax

    return TritonSoftmax(), "triton"


def _chunks(count: int, size: int) -> Iterator[slice]:
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))
