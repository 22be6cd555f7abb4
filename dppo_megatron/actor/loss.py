"""The loss hook: multiplies per-token losses by the samples' weights and cancels Megatron's own scaling.

The hook returns sum_t coefficient_t * loss_t, where coefficient = weight / frozen denominator of the sample, times what
Megatron divides by: the number of micro-batches and of data-parallel ranks. (Under context parallelism every rank of
the group computes the same loss and differentiates its own tokens; the schedule's factor cp undoes the average.)
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from torch import Tensor

from dppo_megatron.actor.batch import Microbatch
from dppo_megatron.actor.layout import Layout
from dppo_megatron.actor.logprobs import LogprobStore, chunked_logprobs
from dppo_megatron.actor.model import output_weight
from dppo_megatron.actor.softmax import Projection
from dppo_megatron.algorithms.objectives import Objective, TokenBatch
from dppo_megatron.distributed import gather_all


@dataclass(frozen=True, slots=True)
class Scorer:
    """Computes log-probabilities and entropies of a whole pack from the hidden states of one micro-batch."""

    model: GPTModel
    """The model chunk with the output layer."""
    layout: Layout
    projection: Projection

    def __call__(self, microbatch: Microbatch, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """[1, T / cp (/ tp with sequence parallelism), H] -> ([T], [T]), 0 where the mask is 0; equal on all ranks."""
        if self.layout.sequence_parallel:
            rows = gather_from_sequence_parallel_region(hidden[0])
        else:
            rows = copy_to_tensor_model_parallel_region(hidden[0])
        trained = microbatch.local_trained
        targets = microbatch.targets[microbatch.local[trained]]
        both = chunked_logprobs(rows.index_select(0, trained), output_weight(self.model), targets, self.projection)
        whole = [values.new_zeros(len(rows)).index_copy(0, trained, values) for values in both]
        group = parallel_state.get_context_parallel_group()
        if group.size() > 1:
            # every rank then computes the same loss, so the backward pass takes this rank's rows without summing
            shares = (
                gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False, group=group)
                for values in whole
            )
            whole = [values.index_select(0, microbatch.packed.whole_pack_index) for values in shares]
        logprobs, entropy = whole
        return logprobs, entropy


@dataclass
class LossHook:
    """Called by Megatron's schedule with the hidden states of one micro-batch, on the last pipeline stage."""

    objective: Objective
    score: Scorer
    layout: Layout
    num_microbatches: int
    logprobs_out: LogprobStore | None = None
    """Receives the log-probabilities of every pack."""
    sums: dict[str, Tensor] = field(default_factory=dict)
    """Float64 sums over this rank's completion tokens so far. `loss` is weighted with the coefficients; `tokens` and
    the diagnostics with `figure_weight`: Horvitz-Thompson estimates of the sums over all rolled-out tokens."""

    def __call__(self, microbatch: Microbatch, hidden: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Hidden states (shape: see `Scorer`) -> (scalar loss, an empty dict: the schedule has nothing to collect)."""
        logprobs, entropy = self.score(microbatch, hidden)
        dtype = logprobs.dtype
        result = self.objective(
            TokenBatch(
                logprobs=logprobs,
                entropy=entropy,
                behaviour_logprobs=microbatch.behaviour_logprobs.to(dtype),
                old_logprobs=microbatch.old_logprobs.to(dtype),
                reference_logprobs=microbatch.reference_logprobs.to(dtype),
                advantages=microbatch.advantages.to(dtype),
                mask=microbatch.mask.to(dtype),
                sequence=microbatch.sequence,
            )
        )
        # torch.where, because a user's loss may be infinite at a prompt position, and infinity times a mask of 0 is NaN
        loss = torch.where(microbatch.mask > 0, result.loss, 0.0) @ microbatch.coefficient.to(dtype)
        if self.logprobs_out is not None:
            self.logprobs_out.add(microbatch, logprobs)
        self._add("loss", loss.detach())
        weight = microbatch.figure_weight
        self._add("tokens", (weight > 0).double() @ weight)  # summed as below, so that a mean of ones is exactly 1
        for name, values in result.diagnostics.items():
            self._add(name, torch.where(weight > 0, values.double(), 0.0) @ weight)
        return loss * (self.num_microbatches * self.layout.data_parallel), {}

    def _add(self, name: str, value: Tensor) -> None:
        self.sums[name] = self.sums[name] + value.double() if name in self.sums else value.double()


def reduce_sums(sums: dict[str, Tensor], layout: Layout) -> dict[str, float]:
    """Add up the hooks' sums over all ranks; every rank gets the result. Collective."""
    mine = {name: float(value) for name, value in sums.items()} if layout.reports else {}
    totals: dict[str, float] = {}
    for part in gather_all([mine]):
        for name, value in part.items():
            totals[name] = totals.get(name, 0.0) + value
    return totals
