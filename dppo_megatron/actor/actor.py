"""The policy in training: a Megatron model, its optimizer, and the three operations that the loop needs: `update`,
`logprobs` and `weights`. All three are collective: every rank calls them, with the same plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import extract_matching_values, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from torch import Tensor

from dppo_megatron.actor.batch import Microbatch, Samples, build_microbatch
from dppo_megatron.actor.layout import Layout
from dppo_megatron.actor.logprobs import LogprobStore, choose_softmax, without_backward
from dppo_megatron.actor.lora import add_adapters
from dppo_megatron.actor.loss import LossHook, Scorer, reduce_sums
from dppo_megatron.actor.model import build_model, not_tried, overrides
from dppo_megatron.actor.offload import Offload, pageable
from dppo_megatron.actor.optimizer import build_optimizer, build_schedule, fitted
from dppo_megatron.actor.replay import Recorded, Routers
from dppo_megatron.actor.schedule import run_schedule
from dppo_megatron.actor.softmax import Projection
from dppo_megatron.algorithms.objectives import Objective
from dppo_megatron.config.schema import ActorConfig, LayoutConfig, OptimizerConfig
from dppo_megatron.distributed import to_rank_zero
from dppo_megatron.platform.capabilities import this_machine
from dppo_megatron.texts import log
from dppo_megatron.types import PackPlan, TrainSample, UpdateResult
from dppo_megatron.weights.architecture import Architecture
from dppo_megatron.weights.mapping import CORRECTION_BIAS, EXPERT_BIAS
from dppo_megatron.weights.sharded import DEFAULT_BUCKET_BYTES, WeightStream, load_hf_weights


class Actor:
    """This rank's part of the policy.

    Args:
        get_weight: returns a full Hugging Face tensor by name; read shard by shard.
        dtype: parameters and activations; torch.float64 computes gradients but has no optimizer.
        seed: for the adapters' initial weights.
    """

    def __init__(
        self,
        config: ActorConfig,
        layout: Layout,
        architecture: Architecture,
        get_weight: Callable[[str], Tensor],
        *,
        dtype: torch.dtype,
        seed: int = 0,
    ) -> None:
        self.layout = layout
        self._config = config
        self._architecture = architecture
        self._dtype = dtype
        has_experts = architecture.experts is not None
        spec, reason = this_machine().choose_layer_spec(
            config.layer_spec, config.fp8, has_experts=has_experts, heads=architecture.heads
        )
        settings = overrides(architecture, dtype, config, spec)
        self._softmax, kernel = choose_softmax(config.logprob_kernel, layout.device, dtype)
        adapters = [f"adapters: {architecture.lora}"] if architecture.lora else []
        split = f"actor: {_describe(config.layout, layout.data_parallel)}; layers: {spec} ({reason}); fp8: {config.fp8}"
        self.description = "; ".join([split, f"log-probabilities: {kernel}", *adapters, *not_tried(settings)])
        """One line for the log: how the model is split, which layers were chosen and why."""
        megatron_config, ddp_config = (one.build() for one in settings)
        megatron_config.finalize_model_grads_func = finalize_model_grads
        self._chunks = [chunk.to(layout.device) for chunk in build_model(architecture, megatron_config, spec)]
        load_hf_weights(self._chunks, architecture, get_weight)
        if architecture.lora is not None:
            add_adapters(self._chunks, architecture, seed)
        self._model = [  # buckets as in Megatron's own training loop
            DistributedDataParallel(megatron_config, ddp_config, chunk, disable_bucketing=index > 0)
            for index, chunk in enumerate(self._chunks)
        ]
        if ddp_config.overlap_grad_reduce:  # reduce gradients in the last micro-batch's backward pass only
            syncs = [model.no_sync for model in self._model]
            megatron_config.no_sync_func = syncs if len(syncs) > 1 else syncs[0]
        self._routers = Routers(self._chunks, architecture, layout, replays=config.routing_replay != "off")
        self._gathers_late = ddp_config.use_distributed_optimizer and ddp_config.overlap_param_gather
        self._is_stale = False
        """True after an update whose weights have not been gathered: overlap_param_gather leaves that to the next
        forward pass."""
        self._stream = WeightStream(self._chunks, architecture)
        self._optimizer: Any = None
        self._schedule: Any = None
        self._reference: list[Tensor] | None = None
        self._saves_reference = False
        self._memory = Offload(self._model, layout.device)

    def start_phase(self, optimizer: OptimizerConfig, total_steps: int) -> None:
        """Begin a training phase with a fresh optimizer and schedule; the weights stay."""
        self._gather_weights()
        self._memory.onload(self._optimizer)
        self._memory.forget_optimizer()
        self._optimizer = self._schedule = None  # frees the moments before new ones are made
        self._optimizer = build_optimizer(optimizer, self._model, self._dtype)
        self._schedule = build_schedule(optimizer, self._optimizer, total_steps)

    def offload(self, *, weights: bool = False) -> None:
        """Free the device for servers that share it: gradients are freed and the optimizer's state moves to the host,
        with `weights` the weights too (sync them first). Later calls bring back what they need: `update` everything,
        `own_logprobs` and `weights` the weights. A checkpoint is written from the host copy."""
        self._gather_weights()
        self._memory.offload(self._optimizer, weights=weights)

    def update(
        self,
        samples: Samples,
        plan: PackPlan,
        objective: Objective,
        *,
        temperature: float = 1.0,
        logprobs_out: LogprobStore | None = None,
        routes: Recorded | None = None,
    ) -> UpdateResult:
        """One optimizer step on the weighted objective of `samples`.

        Args:
            samples: at least those of this rank's data-parallel replica.
            logprobs_out: receives the log-probabilities before the step, on the last pipeline stage.
            routes: experts to replay, which `own_logprobs` recorded over the same plan; None: those in the samples.
        """
        sums = self.accumulate(
            samples, plan, objective, temperature=temperature, logprobs_out=logprobs_out, routes=routes
        )
        tokens, loss = sums.pop("tokens", 0.0), sums.pop("loss", 0.0)
        # we check before the step, because Megatron checks for infinities only when it scales an fp16 loss
        self._optimizer.prepare_grads()
        grad_norm = float(self._optimizer.get_grad_norm())
        is_finite = torch.tensor([int(math.isfinite(loss) and math.isfinite(grad_norm))], device=self.layout.device)
        dist.all_reduce(is_finite, op=dist.ReduceOp.MIN)
        applied = bool(is_finite.item())
        if applied:
            self._schedule.step(1)
            self._apply(grad_norm)
        return UpdateResult(
            loss=loss,
            grad_norm=grad_norm,
            learning_rate=self._learning_rate(),
            is_skipped=not applied,
            tokens=tokens,
            sums=sums,
        )

    def accumulate(
        self,
        samples: Samples,
        plan: PackPlan,
        objective: Objective,
        *,
        temperature: float = 1.0,
        logprobs_out: LogprobStore | None = None,
        routes: Recorded | None = None,
    ) -> dict[str, float]:
        """Forward and backward over the whole plan; the reduced gradients stay in the buffers. No optimizer step.
        Returns the loss hook's sums over the job."""
        self._memory.onload(self._optimizer)
        for model in self._model:
            model.zero_grad_buffer()
            model.train()
        if self._optimizer is not None:
            self._optimizer.zero_grad()
        hook = LossHook(objective, self._scorer(temperature), self.layout, plan.num_microbatches, logprobs_out)
        self._run_schedule(samples, plan, hook, forward_only=False, routes=routes)
        return reduce_sums(hook.sums, self.layout)

    def grad_norm(self, samples: Samples, plan: PackPlan, objective: Objective, *, temperature: float = 1.0) -> float:
        """The gradient norm that `update` would report for `samples`, the same on every rank; no optimizer step."""
        self.accumulate(samples, plan, objective, temperature=temperature)
        self._optimizer.prepare_grads()
        return float(self._optimizer.get_grad_norm())

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """The full gradients that `accumulate` left, under Hugging Face names (adapters under PEFT's). Collective.

        Data-parallel ranks all have them only without the distributed optimizer, which leaves each rank a shard.
        """
        parameters = self._parameters()
        saved = [p.data for p in parameters]
        try:
            for parameter in parameters:
                parameter.data = parameter.main_grad.to(parameter.dtype).view_as(parameter)  # type: ignore[attr-defined]
            stream = self._trained_stream().tensors()
            yield from ((name, tensor) for name, tensor in stream if not name.endswith(CORRECTION_BIAS))
        finally:
            for parameter, data in zip(parameters, saved, strict=True):
                parameter.data = data

    def own_logprobs(
        self, samples: Samples, plan: PackPlan, *, temperature: float = 1.0, records: bool = False
    ) -> LogprobStore:
        """Log-probability of every completion token of this replica under the current weights; see `LogprobStore`.
        `records`: keep the experts that this pass chooses as the store's `routes`, on every rank."""
        store, score = LogprobStore(), self._scorer(temperature)

        def collect(microbatch: Microbatch, hidden: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            """Megatron's loss hook for a forward-only pass: stores the values and returns a constant loss."""
            store.add(microbatch, score(microbatch, hidden)[0])
            return torch.zeros((), device=hidden.device), {}

        self._prepare_weights()
        for model in self._model:
            model.eval()
        recorded: dict[int, list[Tensor]] | None = {} if records else None
        with without_backward():
            self._run_schedule(samples, plan, collect, forward_only=True, recorded=recorded)
        if recorded is not None:
            store.routes = {chunk: [part.cpu() for part in parts] for chunk, parts in recorded.items()}
        return store

    def logprobs(
        self, samples: Sequence[TrainSample], plan: PackPlan, *, temperature: float = 1.0
    ) -> list[npt.NDArray[np.float64]] | None:
        """Log-probability of every completion token under the current weights: on rank 0 one array
        [num_completion_tokens] per sample, in the order of `samples`; None elsewhere."""
        collected = self.own_logprobs(samples, plan, temperature=temperature).values
        gathered = to_rank_zero(collected if self.layout.reports else {})
        merged = {sample: values for part in gathered for sample, values in part.items()}
        return [merged[i] for i in range(len(samples))] if self.layout.rank == 0 else None

    def freeze_reference(self, get_weight: Callable[[str], Tensor] | None = None) -> None:
        """Keep a reference policy for a KL term, on the host: the current weights, or those that `get_weight` reads (as
        in the constructor). `sharded_state` leaves out the latter, so a resumed run must pass `get_weight` again."""
        self._prepare_weights()
        self._reference = [tensor.detach().to("cpu", copy=True) for tensor in self._parameters() + self._biases()]
        self._saves_reference = get_weight is None
        if get_weight is not None:
            with self.reference_weights():
                load_hf_weights(self._chunks, self._architecture, get_weight)

    @contextmanager
    def reference_weights(self) -> Iterator[None]:
        """Use the reference policy's weights inside the block. Call `freeze_reference` first."""
        assert self._reference is not None, "freeze_reference has not been called"
        self._prepare_weights()
        self._swap_with_reference()
        try:
            yield
        finally:
            self._swap_with_reference()

    def weights(
        self, to: Collection[int] | None = None, bucket_bytes: int = DEFAULT_BUCKET_BYTES
    ) -> Iterator[tuple[str, Tensor]]:
        """All parameters as full tensors under their Hugging Face names, with adapters merged in, on the ranks in `to`
        (None: all). Collective: the other ranks iterate too and get no tensors. See `WeightStream.tensors`."""
        self._prepare_weights()
        return self._stream.tensors(to, bucket_bytes)

    def adapters(self, to: Collection[int] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Only the adapters, under PEFT's names; no tensors without `actor.lora`. Collective like `weights`."""
        self._prepare_weights()
        return self._trained_stream().tensors(to) if self._architecture.lora else iter(())

    def sharded_state(self, *, loading: bool = False) -> dict[str, Any]:
        """Megatron's sharded state dict of model, optimizer and schedule, for saving or as a template to load into."""
        self._gather_weights()
        if loading:
            self._memory.onload(self._optimizer)
        metadata = {
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
            "distrib_optim_sharding_type": "fully_reshardable",
            "singleton_local_shards": False,
            "chained_optim_avoid_prefix": True,
        }
        chunks = [chunk.sharded_state_dict(metadata=metadata) for chunk in self._chunks]
        model = dict(zip(self._chunk_names(), chunks, strict=True))
        whole = model if len(chunks) > 1 else chunks[0]
        with _printed_by_key():
            optimizer = self._optimizer.sharded_state_dict(whole, is_loading=loading, metadata=metadata)
        # without FP8 the extra state of layers is empty, and specific to a layer spec: not written
        if self._config.fp8 == "off":
            model = {name: _only(chunk, _is_tensor) for name, chunk in model.items()}
        state = {**model, "optimizer": optimizer, "schedule": self._schedule.state_dict()}
        if self._saves_reference:
            state |= {"reference": self._sharded_reference(metadata)}
        return state if loading else self._from_host(state)

    def _from_host(self, state: dict[str, Any]) -> dict[str, Any]:
        """The same state, with offloaded weights read from the host copy and no tensor in pinned memory."""
        weights = {id(p) for chunk in self._chunks for p in chunk.parameters()}  # frozen ones are offloaded too
        offloaded = weights if "weights" in self._memory.offloaded else set()
        for value in nested_values(state):
            if isinstance(value, (ShardedTensor, ShardedTensorFactory)) and isinstance(value.data, Tensor):
                if id(value.data) in offloaded:
                    value.data = self._memory.host_view(value.data)
                value.data = pageable(value.data)
        return state

    def load_sharded_state(self, state: dict[str, Any]) -> None:
        """Restore a state that was loaded into the template of `sharded_state(loading=True)`."""
        self._memory.forget_optimizer()  # loading replaces its tensors
        for name, chunk in zip(self._chunk_names(), self._chunks, strict=True):
            missing, unexpected = chunk.load_state_dict(state[name], strict=False)
            lost = [name for name in missing if not name.endswith("_extra_state")]
            if lost or unexpected:
                raise ValueError(f"the checkpoint lacks {lost} and has unknown {unexpected}")
        self._optimizer.load_state_dict(fitted(state["optimizer"], self._optimizer))
        before = self._learning_rate()
        # Restore only the schedule's position: its shape follows the config, where a resumed run may have more steps.
        self._schedule.load_state_dict(self._schedule.state_dict() | {"num_steps": state["schedule"]["num_steps"]})
        if not math.isclose(before, now := self._learning_rate()):
            log(f"warning: the learning rate goes from {before:.3g} at the last update to {now:.3g}")
        if self._reference is not None and self._saves_reference:
            loaded_reference = [
                state["reference"][str(index)][name]
                for index, chunk in enumerate(self._chunks)
                for name, parameter in chunk.named_parameters()
                if parameter.requires_grad
            ]
            for kept, loaded in zip(self._reference, loaded_reference, strict=False):
                kept.copy_(loaded)

    def _learning_rate(self) -> float:
        return float(max(group["lr"] for group in self._optimizer.param_groups))

    def _chunk_names(self) -> list[str]:
        """The names of the model chunks in a checkpoint."""
        return ["model"] if len(self._chunks) == 1 else [f"model{index}" for index in range(len(self._chunks))]

    def _sharded_reference(self, metadata: dict[str, Any]) -> dict[str, Any]:
        """The reference policy as the parameters' sharded tensors, with its data and the key prefix `reference.`."""
        assert self._reference is not None
        # without the correction biases: a saved reference is the run's starting policy, and training leaves them alone
        kept = {id(p): tensor for p, tensor in zip(self._parameters(), self._reference, strict=False)}
        sharded = {str(index): chunk.sharded_state_dict(metadata=metadata) for index, chunk in enumerate(self._chunks)}
        sharded = _only(sharded, lambda value: _is_tensor(value) and id(value.data) in kept)  # no frozen weights
        for value in nested_values(sharded):
            value.key, value.data = f"reference.{value.key}", kept[id(value.data)]
        return sharded

    def _apply(self, grad_norm: float) -> None:
        """The part of Megatron's `step` after the norm: a whole `step` would prepare and reduce the gradients again."""
        parameters = [p for part in self._optimizer.chained_optimizers for p in part.get_parameters()]
        if parameters:
            config = self._optimizer.config
            decoupled = config.use_precision_aware_optimizer_no_fp8_or_ds_fp8  # then gradients are not in `.grad`
            clip_grad_by_total_norm_fp32(parameters, config.clip_grad, grad_norm, use_decoupled_grad=decoupled)
        self._optimizer.step_with_ready_grads()
        self._is_stale = self._gathers_late

    def _prepare_weights(self) -> None:
        """Make sure that the weights of the last update are complete and on the device. Collective."""
        self._gather_weights()
        self._memory.onload(self._optimizer, weights_only=True)

    def _gather_weights(self) -> None:
        if self._is_stale:
            for model in self._model:
                model.start_param_sync(force_sync=True)
            self._is_stale = False

    def _run_schedule(
        self,
        samples: Samples,
        plan: PackPlan,
        hook: Callable[[Microbatch, Tensor], tuple[Tensor, dict[str, Tensor]]],
        *,
        forward_only: bool,
        routes: Recorded | None = None,
        recorded: dict[int, list[Tensor]] | None = None,
    ) -> None:
        """Forward and backward passes over this replica's packs; see `Routers.replaying` for `routes`, `recorded`."""
        packs = (
            build_microbatch(
                samples,
                packed,
                device=self.layout.device,
                context=self.layout.context,
                vocab_size=self._architecture.vocab_size,
            )
            for packed in plan.microbatches[self.layout.data_parallel_rank]
        )

        def forward(iterator: Iterator[Microbatch], model: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
            pack = next(iterator)
            tokens, positions = pack.tokens[:, pack.local], pack.packed.position_ids[None]
            with forward_pass(pack, self._model.index(model)):
                output = model(tokens, positions, None, packed_seq_params=pack.packed)
            return output, partial(hook, pack)

        with self._routers.replaying(samples, routes, recorded) as forward_pass:
            run_schedule(forward, packs, self._model, plan, self.layout, forward_only=forward_only)

    def _scorer(self, temperature: float) -> Scorer:
        projection = Projection(
            self._architecture.vocab_size,
            temperature,
            self._config.logprob_chunk_tokens,
            parallel_state.get_tensor_model_parallel_group(),
            self._softmax,
        )
        return Scorer(self._chunks[-1], self.layout, projection)

    def _trained_stream(self) -> WeightStream:
        """A stream of what is trained: all parameters, or only the adapters."""
        return WeightStream(self._chunks, self._architecture, adapters=self._architecture.lora is not None)

    def _parameters(self) -> list[Tensor]:
        return [p for chunk in self._chunks for p in chunk.parameters() if p.requires_grad]

    def _biases(self) -> list[Tensor]:
        """The routers' correction biases, which no optimizer changes."""
        return [b for chunk in self._chunks for name, b in chunk.named_buffers() if name.endswith(EXPERT_BIAS)]

    def _swap_with_reference(self) -> None:
        assert self._reference is not None
        for tensor, kept in zip(self._parameters() + self._biases(), self._reference, strict=True):
            current = tensor.detach().to("cpu", copy=True)
            tensor.data.copy_(kept)
            kept.copy_(current)


def _describe(config: LayoutConfig, data_parallel: int) -> str:
    sizes = {"tp": config.tensor_parallel, "pp": config.pipeline_parallel, "vpp": config.virtual_pipeline}
    sizes |= {"cp": config.context_parallel, "ep": config.expert_parallel, "dp": data_parallel}
    return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one process"


def _is_tensor(value: Any) -> bool:
    return not isinstance(value, ShardedObject)


def _only(sharded: dict[str, Any], wanted: Callable[[Any], bool]) -> dict[str, Any]:
    kept: dict[str, Any]
    kept, _ = extract_matching_values(sharded, wanted)
    return kept


@contextmanager
def _printed_by_key() -> Iterator[None]:
    """Inside the block a sharded tensor prints as its key. Megatron formats each one that an optimizer does not track,
    with all values, for a log line below the log level; an offloaded tensor cannot be printed."""
    ShardedTensor.__str__ = ShardedTensorFactory.__str__ = lambda tensor: tensor.key
    try:
        yield
    finally:
        del ShardedTensor.__str__, ShardedTensorFactory.__str__


def sft_optimizer(optimizer: OptimizerConfig, learning_rate: float, lr_warmup_steps: int) -> OptimizerConfig:
    """The RL optimizer's settings with SFT's own learning rate, constant after its warm-up."""
    return replace(
        optimizer,
        learning_rate=learning_rate,
        min_learning_rate=0.0,
        lr_schedule="constant",
        lr_warmup_steps=lr_warmup_steps,
    )
