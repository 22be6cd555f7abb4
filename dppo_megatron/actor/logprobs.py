"""Token log-probabilities and entropy from hidden states without materializing the logits of a whole pack.

A pack of 16k tokens at a vocabulary of 150k has 10 GB of float32 logits, and their gradient as much again. So the
output projection, the softmax and their backward pass run over chunks of tokens: the forward pass keeps two numbers a
token, the backward pass multiplies again. Only positions that predict a completion token are computed, which makes up
for part of the second multiplication. Peak memory beside the model: some four float32 tensors of [chunk, V / tp]. The
weight's gradient goes straight into Megatron's float32 buffer for it; without one, into a float32 tensor of its shape.
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
    """Log-probabilities of completion tokens by sample, from a pass over packed micro-batches.

    They stay on the ranks that computed them, a replica's last pipeline stage: those whose loss reads them.
    """

    routes: Recorded | None = None
    """The experts that the pass went through, if it recorded them."""
    _arrays: dict[int, FloatArray] = field(default_factory=dict)
    _on_device: list[tuple[Sequence[int], Sequence[int], Tensor]] = field(default_factory=list)
    """Samples, their lengths and values of packs not yet fetched: to fetch each at once would have the host wait for
    the device in every micro-batch."""

    def add(self, microbatch: Microbatch, logprobs: Tensor) -> None:
        """Add those of one pack [T]."""
        trained = logprobs.detach()[microbatch.trained]
        self._on_device.append((microbatch.samples, microbatch.trained_lengths, trained))

    @property
    def values(self) -> dict[int, FloatArray]:
        """Place of the sample in the plan -> [completion tokens], float64; empty on other stages."""
        if self._on_device:
            samples, lengths, parts = zip(*self._on_device, strict=True)
            flat = torch.cat(parts).double().cpu().numpy()
            edges = [0, *accumulate(chain(*lengths))]
            for sample, (start, end) in zip(chain(*samples), pairwise(edges), strict=True):
                self._arrays[sample] = flat[start:end]
            self._on_device.clear()
        return self._arrays

    def as_old(self, samples: Mapping[int, TrainSample]) -> dict[int, TrainSample]:
        """The samples with these as `old_logprobs`; unchanged where this rank has none."""
        return {i: replace(s, old_logprobs=self.values[i]) if i in self.values else s for i, s in samples.items()}

    def as_reference(self, samples: Mapping[int, TrainSample]) -> dict[int, TrainSample]:
        """The samples with these as `reference_logprobs`; likewise."""
        return {i: replace(s, reference_logprobs=self.values[i]) if i in self.values else s for i, s in samples.items()}


@contextmanager
def without_backward() -> Iterator[None]:
    """`torch.no_grad()` for passes that no backward pass follows, none being under way.

    In these too Megatron announces parts of layers that `actor.recompute_modules` names, and Transformer Engine notes
    each in a list from whose front backward passes take: left alone, it grows with every step, and a backward pass is
    given the notes of an earlier pass.
    """
    with torch.no_grad():
        yield
    module = sys.modules.get("transformer_engine.pytorch.distributed")
    if module is not None:
        module.activation_recompute_forward._is_first_fp8_module.clear()


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
        statistics = hidden.new_empty(4, len(hidden), dtype=dtype)
        for rows in _chunks(len(hidden), projection.chunk_tokens):
            # multiplied in the model's type, as rollout engines do
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
        # accumulates over chunks and micro-batches: in bfloat16 small contributions would be lost
        grad_weight: Tensor | None = getattr(weight, "main_grad", None)
        in_place = grad_weight is not None and grad_weight.dtype == log_normalizer.dtype
        trained = ctx.needs_input_grad[1]  # not with adapters
        if trained and (grad_weight is None or not in_place):
            grad_weight = torch.zeros_like(weight, dtype=log_normalizer.dtype)
        for rows in _chunks(len(hidden), projection.chunk_tokens):
            own = (None if grad is None else grad[rows] for grad in grads)
            chunk = BackwardChunk(targets[rows], log_normalizer[rows], entropy[rows], *own)
            grad_logits = projection.softmax.gradient(hidden[rows] @ weight.t(), chunk, projection)
            grad_hidden[rows] = grad_logits @ weight
            if trained:
                grad_weight += grad_logits.t() @ hidden[rows]
        if grad_weight is None:
            return grad_hidden, None, None, None
        return grad_hidden, _as_added(weight) if in_place else grad_weight.to(weight.dtype), None, None


def _as_added(weight: Tensor) -> Tensor:
    """What Megatron's hook is given of a gradient that is in `main_grad` already, by its own convention: it demands a
    tensor, and adds it only to a tied embedding's, where autograd has added the lookup's gradient to this one."""
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return torch.zeros_like(weight) if getattr(weight, "zero_out_wgrad", False) else torch.empty_like(weight)


def _over_ranks(statistics: Tensor, group: dist.ProcessGroup) -> Tensor:
    """A `Softmax`'s statistics of all ranks' columns together: two exchanges a pack, none on one rank."""
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
    """What `actor.logprob_kernel` asks for, and one word for the log, with the reason where `auto` could not fuse.

    Raises:
        UserError: `triton` cannot run here.
    """
    lacks = ""
    if device.type != "cuda":
        lacks = "there is no CUDA device"
    elif dtype == torch.float64:
        lacks = "float64 is torch's"
    elif importlib.util.find_spec("triton") is None:
        lacks = "Triton is not installed"
    if wanted == "triton" and lacks:
        raise UserError(f"actor.logprob_kernel = triton: {lacks}; use auto or torch")
    if wanted == "torch" or lacks:
        return TorchSoftmax(), f"torch ({lacks or 'as configured'})"
    from dppo_megatron.actor.fused_softmax import TritonSoftmax

    return TritonSoftmax(), "triton"


def _chunks(count: int, size: int) -> Iterator[slice]:
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))
