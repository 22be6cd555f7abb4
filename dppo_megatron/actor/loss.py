"""The loss hook: where per-token losses meet the weights, and why nothing downstream can rescale them.

The hook returns sum_t coefficient_t * loss_t, with coefficient = weight / frozen denominator carried by the sample.
Megatron's schedule then divides by the number of micro-batches and its data-parallel wrapper averages over ranks,
so the hook multiplies by both: the gradient is exactly that of the weighted full-batch objective, however the
samples were packed, split over ranks or cut into pipeline micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from dppo_megatron.actor.batch import Microbatch
from dppo_megatron.actor.layout import Layout
from dppo_megatron.actor.logprobs import vocab_parallel_logprobs
from dppo_megatron.algorithms.objectives import Objective, TokenBatch


@dataclass
class LossHook:
    """Called by Megatron's schedule with the logits of one micro-batch, on the last pipeline stage."""

    objective: Objective
    layout: Layout
    vocab_size: int
    temperature: float
    num_microbatches: int
    sums: dict[str, Tensor] = field(default_factory=dict)
    """Sums over this rank's completion tokens so far, float64: `loss` (weighted), `tokens`, and each diagnostic."""

    def __call__(self, microbatch: Microbatch, logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """logits [1, T, V / tp] -> (scalar loss, nothing for the schedule to collect)."""
        logprobs, entropy = vocab_parallel_logprobs(
            logits[0],
            microbatch.targets,
            vocab_size=self.vocab_size,
            temperature=self.temperature,
            group=parallel_state.get_tensor_model_parallel_group(),
        )
        dtype = logprobs.dtype
        behaviour = microbatch.behaviour_logprobs.to(dtype)
        result = self.objective(
            TokenBatch(
                logprobs=logprobs,
                entropy=entropy,
                behaviour_logprobs=behaviour,
                old_logprobs=microbatch.old_logprobs.to(dtype),
                reference_logprobs=microbatch.reference_logprobs.to(dtype),
                advantages=microbatch.advantages.to(dtype),
                mask=microbatch.mask.to(dtype),
                sequence=microbatch.sequence,
            )
        )
        trained = microbatch.mask > 0
        # where, not a product: a prompt position may be infinite, and infinity times 0 is NaN
        loss = torch.where(trained, result.loss, 0.0) @ microbatch.coefficient.to(dtype)
        self._add("loss", loss.detach())
        self._add("tokens", trained.sum())
        self._add("entropy", entropy.detach()[trained].sum())
        self._add("logprob_abs_diff", (logprobs.detach() - behaviour)[trained].abs().sum())
        for name, values in result.diagnostics.items():
            self._add(name, values[trained].sum())
        return loss * (self.num_microbatches * self.layout.data_parallel), {}

    def _add(self, name: str, value: Tensor) -> None:
        self.sums[name] = self.sums[name] + value.double() if name in self.sums else value.double()


def reduce_sums(sums: dict[str, Tensor], layout: Layout) -> dict[str, float]:
    """Add the hooks' sums over the job; every rank gets the result. Collective."""
    gathered: list[dict[str, float]] = [{} for _ in range(layout.world_size)]
    mine = {name: float(value) for name, value in sums.items()} if layout.reports else {}
    dist.all_gather_object(gathered, mine)
    totals: dict[str, float] = {}
    for part in gathered:
        for name, value in part.items():
            totals[name] = totals.get(name, 0.0) + value
    return totals
