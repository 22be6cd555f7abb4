"""Builds Megatron's optimizer and learning-rate schedule. Its checkpoints work with torch's AdamW and are saved without
gathering the whole model on every rank."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from dppo_megatron.config.schema import OptimizerConfig
from dppo_megatron.platform.capabilities import this_machine


def build_optimizer(
    config: OptimizerConfig, model: list[DistributedDataParallel], dtype: torch.dtype
) -> MegatronOptimizer:
    """Adam with decoupled weight decay and global gradient-norm clipping. Raises UserError if moments or main
    parameters in fewer bits need a package that is not installed."""
    optimizer: MegatronOptimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=config.learning_rate,
            min_lr=config.min_learning_rate,
            weight_decay=config.weight_decay,
            adam_beta1=config.adam_beta1,
            adam_beta2=config.adam_beta2,
            adam_eps=config.adam_eps,
            clip_grad=config.max_grad_norm or math.inf,  # with Megatron's 0 the norm is not computed, and we report it
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=config.distributed,
            **_memory_savings(config),
        ),
        model,
        use_gloo_process_groups=False,
    )
    repair(optimizer)
    return optimizer


def _memory_savings(config: OptimizerConfig) -> dict[str, Any]:
    """Megatron's settings for an optimizer that uses less device memory."""
    settings: dict[str, Any] = {}
    if (config.moments_dtype, config.main_params_dtype) != ("float32", "float32"):
        moments = getattr(torch, config.moments_dtype)
        settings |= {"exp_avg_dtype": moments, "exp_avg_sq_dtype": moments}
        settings["main_params_dtype"] = getattr(torch, config.main_params_dtype)
    if config.cpu_offload:
        settings |= {"optimizer_cpu_offload": True, "optimizer_offload_fraction": config.cpu_offload}
        settings["overlap_cpu_optimizer_d2h_h2d"] = True
    if not settings:
        return settings
    this_machine().check_optimizer(config)
    # Megatron's command line demands this optimizer for offloading too. store_param_remainders, Megatron's default,
    # would keep only the lower halves of the main parameters; it saves them to a checkpoint and then refuses to load it
    return settings | {"use_precision_aware_optimizer": True, "store_param_remainders": False}


def build_schedule(config: OptimizerConfig, optimizer: MegatronOptimizer, total_steps: int) -> Any:
    """Linear warm-up, then the configured decay to the minimum, which is reached at `total_steps`."""
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.learning_rate,
        min_lr=config.min_learning_rate,
        lr_warmup_steps=config.lr_warmup_steps,
        lr_decay_steps=max(total_steps, config.lr_warmup_steps + 1),
        lr_decay_style=config.lr_schedule,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=1,
        wd_incr_style="constant",
    )


def _fuse(adam: torch.optim.Optimizer) -> None:
    for group in adam.param_groups:
        group["fused"], group["foreach"] = True, False
    for param, state in adam.state.items():
        if isinstance(state.get("step"), torch.Tensor):
            # the fused kernel needs it on the parameter's device; and Megatron's load gives all parameters the same
            # tensor, which each one's update would increment: wrong from the second on, without an error
            state["step"] = state["step"].to(param.device, torch.float32, copy=True)


def repair(optimizer: MegatronOptimizer) -> None:
    """Make every distributed optimizer in `optimizer` save and load as the class below does, every torch Adam use its
    fused kernel, and all that can be saved before the first step have moments; in place.

    Megatron builds Adam without the kernel: on CUDA, `foreach` then needs temporaries of several times the parameters'
    size. Fused steps differ only by rounding. Megatron's load asks a checkpoint for moments, and for one step count.
    """
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner: Any = getattr(part, "optimizer", None)
        is_torchs = isinstance(inner, (torch.optim.Adam, torch.optim.AdamW))
        if type(part) is DistributedOptimizer:
            part.__class__ = LeanDistributedOptimizer
        if inner is not None and (is_torchs or not isinstance(part, DistributedOptimizer)):  # else see `_whole`
            part.init_state_fn(inner, part.config)
        for state in inner.state.values() if is_torchs else ():
            state["step"] = torch.tensor(0.0)
        for adam in getattr(inner, "sub_optimizers", [inner]):  # several if the optimizer is offloaded to the host
            if isinstance(adam, (torch.optim.Adam, torch.optim.AdamW)):
                _fuse(adam)
                adam.register_load_state_dict_post_hook(_fuse)  # loading replaces the groups, and `fused` with them


def fitted(loaded: dict[Any, Any], optimizer: MegatronOptimizer) -> dict[Any, Any]:
    """The optimizer's part of a checkpoint as `optimizer` reads it: the checkpoint's tensors, step count and learning
    rate under the settings of `optimizer`, which are the config's.

    The checkpoint may be of another Adam: Megatron uses FusedAdam where Transformer Engine or Apex is installed, which
    takes the step from each group, as an int. torch's takes it from each parameter; Megatron saves that as
    `common_step`, or with the distributed optimizer in each group. Or of another number of optimizers: where experts
    are split over ranks (expert_parallel above 1) Megatron gives them one of their own: two numbered parts instead of
    one without a number. Megatron loads tensors by the parameters' names, so they are in the parts of today's
    optimizers; step and rate are in the parts of the run that saved them.
    """
    owners = getattr(optimizer, "chained_optimizers", [optimizer])
    numbered = [loaded[number] for number in sorted(key for key in loaded if isinstance(key, int))]
    saved = [part.get("optimizer", part) for part in (loaded, *numbered)]
    groups = [group for inner in saved for group in inner.get("param_groups", ())]
    steps = [group.get("step") for group in groups]
    steps += [inner.get("state", {}).pop("common_step", None) for inner in saved]
    step = max(int(step or 0) for step in steps)
    rate = max(group["lr"] for group in groups if "lr" in group)
    parts = [loaded] if len(owners) == 1 else numbered
    for owner, part in zip(owners, parts, strict=True):
        own = owner.state_dict()
        settings = [group | {"lr": rate} for group in own.get("optimizer", own)["param_groups"]]
        is_torchs = isinstance(owner.optimizer, (torch.optim.Adam, torch.optim.AdamW))
        if is_torchs and not isinstance(owner, DistributedOptimizer):
            part.get("optimizer", part)["state"]["common_step"] = torch.tensor(float(step))
        else:
            settings = [group | {"step": step} for group in settings]
        if isinstance(owner, DistributedOptimizer):
            part |= {"optimizer": {"param_groups": settings}, "param_state_sharding_type": "fully_reshardable"}
        else:
            part.get("optimizer", part)["param_groups"] = settings
    return loaded if len(owners) == 1 else dict(enumerate(parts))


_STATES = ("param", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class Spread:
    """How one parameter's elements are distributed over the data-parallel ranks."""

    pieces: dict[int, slice]
    """Rank -> the slice of the flattened parameter that it holds, in order."""

    @staticmethod
    def of(start: int, end: int, shard: int) -> Spread:
        """The spread of elements [start, end) of a bucket in which every rank holds `shard` elements.

        Example: (6, 14, shard 8) -> rank 0 has the parameter's [0, 2), rank 1 has [2, 8).
        """
        ranks = range(start // shard, (end - 1) // shard + 1)
        return Spread({r: slice(max(start, r * shard) - start, min(end, (r + 1) * shard) - start) for r in ranks})

    @property
    def writer(self) -> int:
        """The rank that holds most of the parameter; the lowest rank in a tie."""
        return max(self.pieces, key=lambda rank: (self.pieces[rank].stop - self.pieces[rank].start, -rank))


class LeanDistributedOptimizer(DistributedOptimizer):  # type: ignore[misc]
    """A `DistributedOptimizer` that saves and loads whole parameters without gathering the whole model on each rank.

    Megatron's format that loads at any layout (`fully_reshardable`) stores whole parameters. To assemble them, Megatron
    gathers 12 bytes per parameter in the host memory of every data-parallel rank, when saving and when loading. But
    each rank holds one contiguous range of the flat buffer, so nearly every parameter is complete on one rank already:

    flat buffer    | embedding         | q | k | v | ... | fc1        | fc2        | norm |
        ranks          |--- 0 ---|--- 1 ---|--- 2 ---------|------ 3 ------|------ 4 ----------|
                          embedding: 0 sends its part to 1       fc1: 4 gets the rest of 3, and so on

    Here the rank that holds most of a parameter writes it, and only pieces of parameters that cross a boundary are
    sent. When loading, a rank reads the parameters that overlap its range. The files have Megatron's format.
    """

    def state_dict(self) -> Any:
        """Megatron's, without the classes of the inner optimizers, which `cpu_offload` adds to each group: a checkpoint
        that holds a class cannot be read without running code. On loading, the config decides the classes."""
        state = super().state_dict()
        groups = state["optimizer"]["param_groups"]
        kept = [{key: value for key, value in group.items() if not isinstance(value, type)} for group in groups]
        state["optimizer"]["param_groups"] = kept
        return state

    def _set_main_param_and_optimizer_states(self, model_param: torch.nn.Parameter, tensors: dict[str, Tensor]) -> None:
        # Megatron's assume FusedAdam, which keeps one `step` in the group. They copy every entry of Adam's state from
        # the checkpoint and would raise KeyError for the `step` of torch's, which is not saved as a tensor (`fitted`
        # has set it), so we give it the current value to copy.
        group_index, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group_index]["params"][order]]
        steps = {"step": state["step"]} if "step" in state else {}
        super()._set_main_param_and_optimizer_states(model_param, steps | tensors)

    def sharded_param_state_fully_reshardable(
        self, model_sharded_state_dict: Any, is_loading: bool = False, metadata: Any = None
    ) -> dict[int, dict[str, Any]]:
        """Replaces Megatron's method: index in the buffers -> the parameter's states as sharded tensors.

        Collective over the data-parallel group. A rank returns only what it writes, or what it needs to load.
        """
        model_tensors, _ = extract_sharded_tensors_and_factories(model_sharded_state_dict)
        by_param = {base.data: base for base in nested_values(model_tensors)}
        rank = self.data_parallel_group.rank()
        out: dict[int, dict[str, Any]] = {}
        for index, (param, spread) in enumerate(self._spreads()):
            if rank not in spread.pieces:
                continue
            if is_loading:
                states = {name: torch.empty(param.shape, dtype=torch.float32, device="cpu") for name in _STATES}
            else:
                states = self._whole(param, spread, rank)
            if states:
                base = by_param[param]
                assert base.flattened_range is None, base
                out[index] = {name: _stored(base, name, data, rank == spread.writer) for name, data in states.items()}
        return out

    def _spreads(self) -> Iterator[tuple[torch.nn.Parameter, Spread]]:
        """Every parameter, in buffer order, which is the same on all ranks of the data-parallel group."""
        size = self.data_parallel_group.size()
        for buffer in self.buffers:
            for param, (start, end, bucket_id) in buffer.param_index_map.items():
                bucket = buffer.buckets[bucket_id]
                shard = bucket.grad_data.numel() // size
                yield param, Spread.of(start - bucket.offset, end - bucket.offset, shard)

    def _whole(self, param: torch.nn.Parameter, spread: Spread, rank: int) -> dict[str, Tensor]:
        """The parameter's states in its shape, on the rank that writes it; others send their pieces and return {}."""
        group, order = self.model_param_group_index_map[param]
        main = self.optimizer.param_groups[group]["params"][order]
        # before its first step a fused Adam has no moments, and has not created main parameters that it keeps itself
        state = self.optimizer.state.get(main) or {}
        stored = self._get_main_param_and_optimizer_states(param) if state else {"param": main}
        mine = {name: stored.get(name, torch.zeros_like(stored["param"])).detach().float() for name in _STATES}
        if len(spread.pieces) == 1:
            # move new tensors (float32 copies of 16-bit states) to the host: an asynchronous save would keep them on
            # the device for several steps
            lasting = {tensor.data_ptr() for tensor in (main, *state.values()) if isinstance(tensor, Tensor)}
            saved = {name: one if one.data_ptr() in lasting else one.cpu() for name, one in mine.items()}
            return {name: tensor.view(param.shape) for name, tensor in saved.items()}
        whole = {}
        for name, tensor in mine.items():
            assembled = self._assemble(tensor, param.numel(), spread, rank)
            if assembled is not None:
                whole[name] = assembled.view(param.shape)
        return whole

    def _assemble(self, mine: Tensor, numel: int, spread: Spread, rank: int) -> Tensor | None:
        """The whole tensor, on the host of the rank that writes it; None on the others, which send their pieces."""
        if rank != spread.writer:
            self._exchange(dist.isend, mine.contiguous(), spread.writer)
            return None
        whole = torch.empty(numel, dtype=mine.dtype)
        for other, piece in spread.pieces.items():
            if other != rank:  # piece by piece, so that the device holds only one beside its own
                arriving = mine.new_empty(piece.stop - piece.start)
                self._exchange(dist.irecv, arriving, other)
            whole[piece] = mine if other == rank else arriving
        return whole

    def _exchange(self, operation: Any, tensor: Tensor, other: int) -> None:
        """Send to or receive from a rank of the group. In a batch: otherwise NCCL would make a communicator of the two
        ranks alone, which would keep its device memory after the run's first save."""
        message = dist.P2POp(operation, tensor, group=self.data_parallel_group, group_peer=other)
        for work in dist.batch_isend_irecv([message]):
            work.wait()


def _stored(base: Any, name: str, data: Tensor, is_writer: bool) -> Any:
    """`data` as a sharded tensor with the model parameter's offsets, under Megatron's key for this optimizer state."""
    # the last part of a replica id is the data-parallel rank; the main replica, which is written, has only zeros
    changes: dict[str, Any] = {
        "key": f"optimizer.state.{name}.{base.key}",
        "data": data,
        "replica_id": (*base.replica_id[:-1], 0 if is_writer else 1),
    }
    if not isinstance(base, ShardedTensorFactory):
        changes["dtype"] = data.dtype
    stored = replace(base, **changes)
    stored.validate_metadata_integrity()
    return stored
