"""The policy that is trained: a Megatron model, its optimizer, and the three things the loop asks of it.

`update` takes an optimizer step on a packed plan, `logprobs` recomputes log-probabilities, `weights` streams the
parameters under their Hugging Face names. All three are collective: every rank calls them with the same plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from dppo_megatron.actor.batch import Microbatch, build_microbatch
from dppo_megatron.actor.layout import Layout
from dppo_megatron.actor.logprobs import vocab_parallel_logprobs
from dppo_megatron.actor.loss import LossHook, reduce_sums
from dppo_megatron.actor.model import build_model, transformer_config
from dppo_megatron.actor.optimizer import build_optimizer, build_schedule
from dppo_megatron.algorithms.objectives import Objective
from dppo_megatron.config.schema import ActorConfig, OptimizerConfig
from dppo_megatron.types import PackPlan, TrainSample
from dppo_megatron.weights.architecture import Architecture
from dppo_megatron.weights.sharded import WeightStream, load_hf_weights


class Actor:
    """This rank's part of the policy.

    Args:
        get_weight: returns a full Hugging Face tensor by name; read shard by shard.
        dtype: parameters and activations; torch.float64 computes gradients but has no optimizer.
    """

    def __init__(
        self,
        config: ActorConfig,
        layout: Layout,
        architecture: Architecture,
        get_weight: Callable[[str], Tensor],
        *,
        dtype: torch.dtype,
    ) -> None:
        self.layout = layout
        self._config = config
        self._architecture = architecture
        self._dtype = dtype
        megatron_config = transformer_config(architecture, layout, dtype, recompute=config.recompute == "full")
        megatron_config.finalize_model_grads_func = finalize_model_grads
        model = build_model(architecture, megatron_config).to(layout.device)
        load_hf_weights([model], architecture, get_weight)
        self._model = DistributedDataParallel(
            megatron_config,
            DistributedDataParallelConfig(
                use_distributed_optimizer=config.optimizer.distributed and dtype != torch.float64,
                grad_reduce_in_fp32=dtype == torch.bfloat16,
            ),
            model,
        )
        self._stream = WeightStream([model], architecture)
        self._optimizer: Any = None
        self._schedule: Any = None

    def start_phase(self, optimizer: OptimizerConfig, total_steps: int) -> None:
        """Begin a training phase with a fresh optimizer and schedule; the weights stay."""
        self._optimizer = build_optimizer(optimizer, [self._model], self._dtype)
        self._schedule = build_schedule(optimizer, self._optimizer, total_steps)

    def update(
        self, samples: Sequence[TrainSample], plan: PackPlan, objective: Objective, *, temperature: float = 1.0
    ) -> dict[str, float]:
        """One optimizer step on the weighted objective of `samples`.

        Returns:
            `loss`, `grad_norm` (before clipping), `learning_rate`, and means over completion tokens of `entropy`,
            `logprob_abs_diff` (against the behaviour log-probabilities, before the step) and the objective's own
            diagnostics. The same on every rank.
        """
        sums = self.accumulate(samples, plan, objective, temperature=temperature)
        self._schedule.step(1)
        _, grad_norm, _ = self._optimizer.step()
        tokens = max(sums.pop("tokens", 0.0), 1.0)
        metrics = {"loss": sums.pop("loss", 0.0)} | {name: value / tokens for name, value in sums.items()}
        learning_rate = max(group["lr"] for group in self._optimizer.param_groups)
        return metrics | {"grad_norm": float(grad_norm), "learning_rate": float(learning_rate)}

    def accumulate(
        self, samples: Sequence[TrainSample], plan: PackPlan, objective: Objective, *, temperature: float = 1.0
    ) -> dict[str, float]:
        """Forward and backward over the whole plan, gradients reduced and left in the buffers; no optimizer step.

        Returns:
            The loss hook's sums over the job.
        """
        self._model.zero_grad_buffer()
        if self._optimizer is not None:
            self._optimizer.zero_grad()
        self._model.train()
        hook = LossHook(objective, self.layout, self._architecture.vocab_size, temperature, plan.num_microbatches)
        self._run_schedule(samples, plan, hook, forward_only=False)
        return reduce_sums(hook.sums, self.layout)

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Full gradients under their Hugging Face names, as `accumulate` left them. Collective; for proofs and probes.

        Replicated over data-parallel ranks only without the distributed optimizer (which leaves each rank a shard).
        """
        parameters = [p for p in self._model.module.parameters() if p.requires_grad]
        saved = [p.data for p in parameters]
        try:
            for parameter in parameters:
                parameter.data = parameter.main_grad.to(parameter.dtype).view_as(parameter)
            yield from WeightStream([self._model.module], self._architecture)
        finally:
            for parameter, data in zip(parameters, saved, strict=True):
                parameter.data = data

    def logprobs(
        self, samples: Sequence[TrainSample], plan: PackPlan, *, temperature: float = 1.0
    ) -> list[npt.NDArray[np.float64]] | None:
        """Log-probability of every completion token under the current weights.

        Returns:
            On rank 0 one array [num_completion_tokens] a sample, in the order of `samples`; None elsewhere.
        """
        collected: dict[int, npt.NDArray[np.float64]] = {}

        def collect(microbatch: Microbatch, logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            values, _ = vocab_parallel_logprobs(
                logits[0],
                microbatch.targets,
                vocab_size=self._architecture.vocab_size,
                temperature=temperature,
                group=parallel_state.get_tensor_model_parallel_group(),
            )
            for position, sample in enumerate(microbatch.samples):
                mine = (microbatch.sequence == position) & (microbatch.mask > 0)
                collected[sample] = values[mine].double().cpu().numpy()
            return torch.zeros((), device=logits.device), {}

        self._model.eval()
        with torch.no_grad():
            self._run_schedule(samples, plan, collect, forward_only=True)
        gathered: list[Any] | None = [None] * self.layout.world_size if self.layout.rank == 0 else None
        dist.gather_object(collected if self.layout.reports else {}, gathered)
        if gathered is None:
            return None
        merged = {sample: values for part in gathered for sample, values in part.items()}
        return [merged[i] for i in range(len(samples))]

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """All parameters under their Hugging Face names, one full tensor at a time, on every rank. Collective."""
        return iter(self._stream)

    def sharded_state(self, *, loading: bool = False) -> dict[str, Any]:
        """Megatron's sharded state dict of model, optimizer and schedule, for saving or as a template to load into."""
        metadata = {
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
            "distrib_optim_sharding_type": "fully_reshardable",
            "singleton_local_shards": False,
            "chained_optim_avoid_prefix": True,
        }
        model = self._model.module.sharded_state_dict(metadata=metadata)
        optimizer = self._optimizer.sharded_state_dict(model, is_loading=loading, metadata=metadata)
        return {"model": model, "optimizer": optimizer, "schedule": self._schedule.state_dict()}

    def load_sharded_state(self, state: dict[str, Any]) -> None:
        """Take over a state that was loaded into the template of `sharded_state(loading=True)`."""
        self._model.module.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._schedule.load_state_dict(state["schedule"])

    def _run_schedule(
        self,
        samples: Sequence[TrainSample],
        plan: PackPlan,
        hook: Callable[[Microbatch, Tensor], tuple[Tensor, dict[str, Tensor]]],
        *,
        forward_only: bool,
    ) -> None:
        packs = (
            build_microbatch(samples, packed, device=self.layout.device)
            for packed in plan.microbatches[self.layout.data_parallel_rank]
        )

        def forward(iterator: Iterator[Microbatch], model: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
            pack = next(iterator)
            logits = model(pack.tokens, pack.position_ids, None, packed_seq_params=pack.packed)
            return logits, partial(hook, pack)

        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=packs,
            model=self._model,
            num_microbatches=plan.num_microbatches,
            seq_length=plan.max_tokens_per_microbatch,  # unused with variable lengths, but asked for
            micro_batch_size=1,
            forward_only=forward_only,
        )


def warm_start_optimizer(optimizer: OptimizerConfig, learning_rate: float, lr_warmup_steps: int) -> OptimizerConfig:
    """The RL optimizer's settings with the warm start's own learning rate, constant after its warm-up."""
    return replace(
        optimizer,
        learning_rate=learning_rate,
        min_learning_rate=0.0,
        lr_schedule="constant",
        lr_warmup_steps=lr_warmup_steps,
    )
