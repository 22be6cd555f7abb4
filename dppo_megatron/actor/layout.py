"""The process group, the model-parallel groups, and this rank's place in them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch import Tensor

from dppo_megatron.config.schema import ActorConfig, LayoutConfig
from dppo_megatron.distributed import (
    check_interfaces,
    connect,
    meeting_advice,
    on_loopback_if_one_machine,
    reported_by_each_rank,
)
from dppo_megatron.launcher_env import launched_local_rank, raise_file_limit, set_cuda_variables
from dppo_megatron.types import RunAborted, UserError
from dppo_megatron.weights.architecture import Architecture


@dataclass(frozen=True, slots=True)
class ContextShare:
    """Which tokens of a pack one rank of a context-parallel group holds.

    Each sequence is split into 2 CP chunks and rank r takes chunks r and 2 CP - 1 - r, as in Megatron's rotary
    embedding and Transformer Engine: causal attention then costs every rank the same.
    """

    rank: int = 0
    size: int = 1

    def position(self, local: Tensor, length: Tensor) -> Tensor:
        """The position in its sequence of this rank's `local`-th token; `length` is the slot's, a multiple of 2 CP."""
        chunk = length // (2 * self.size)
        first = local < chunk
        return torch.where(first, self.rank * chunk + local, (2 * self.size - 2 - self.rank) * chunk + local)

    def indices(self, slots: Sequence[int]) -> Tensor:
        """[T / CP] int64: positions in the pack of this rank's tokens, in the order in which it holds them."""
        if self.size == 1:
            return torch.arange(slots[-1])
        shares = []
        for start, end in pairwise(slots):
            length = torch.tensor(end - start)
            shares.append(start + self.position(torch.arange((end - start) // self.size), length))
        return torch.cat(shares)


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes and coordinates of this rank."""

    rank: int
    world_size: int
    tensor_parallel: int
    pipeline_parallel: int
    data_parallel: int
    data_parallel_rank: int
    context: ContextShare
    sequence_parallel: bool
    reports: bool
    """True on one rank of each data-parallel replica's last pipeline stage: only its loss sums are counted."""
    device: torch.device


_GROUP_TIMEOUT = timedelta(days=7)
"""Timeout of the job's group after the rendezvous. Ranks wait in this group while rank 0 waits for servers, which may
take hours; torch's default is 10 minutes. `observe/watchdog.py` detects dead ranks, and Megatron's groups keep their
own timeouts."""


@reported_by_each_rank()
def start_process_group(rendezvous_timeout_s: float = 600.0) -> None:
    """Join the job's process group: NCCL with CUDA, gloo without. Needs no launcher for a single process.

    Raises:
        RunAborted: not all ranks joined in that time, or they could not be connected.
        UserError: this rank has no GPU of its own, or gloo or NCCL has no network interface.
    """
    if dist.is_initialized():
        return
    raise_file_limit()  # a rank needs a socket for each rank that it talks to; the usual limit is 1,024
    # gloo beside NCCL: plans, scalars and tokens stay in host memory, and no rank waits in a kernel (distributed.py)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if torch.cuda.is_available():
        set_cuda_variables()
        local_rank, count = launched_local_rank(), torch.cuda.device_count()
        if local_rank >= count:
            raise UserError(
                f"LOCAL_RANK={local_rank}, but this process sees {count} CUDA device{'s' * (count != 1)}: start as many"
                " processes on a machine as it has GPUs, and let each see all of them (CUDA_VISIBLE_DEVICES)"
            )
        torch.cuda.set_device(local_rank)
    if "RANK" not in os.environ:
        with on_loopback_if_one_machine():
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        return
    check_interfaces(uses_nccl=torch.cuda.is_available())
    timeout = min(timedelta(seconds=rendezvous_timeout_s), _GROUP_TIMEOUT)
    try:
        with on_loopback_if_one_machine():
            dist.init_process_group(backend, timeout=timeout)
        dist.barrier()  # over gloo: returns when all ranks have joined
    except (RuntimeError, ValueError) as error:  # which of the two depends on what torch waited for
        reason = str(error).splitlines()[0]
        raise RunAborted(
            f"could not meet the other ranks of {os.environ.get('WORLD_SIZE', '?')} within guard.rendezvous_timeout_s ="
            f" {rendezvous_timeout_s:g} s ({reason}). {meeting_advice(reason)}"
        ) from None
    assert dist.group.WORLD is not None
    dist.distributed_c10d._set_pg_timeout(_GROUP_TIMEOUT, dist.group.WORLD)  # gloo and NCCL, for all later operations
    dist.distributed_c10d._get_default_store().set_timeout(_GROUP_TIMEOUT)
    connect([dist.group.WORLD], _this_device(), rendezvous_timeout_s)


def build_layout(config: LayoutConfig, seed: int) -> Layout:
    """Create Megatron's process groups inside the job's group and seed Megatron's random number generators."""
    with on_loopback_if_one_machine():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=config.tensor_parallel,
            pipeline_model_parallel_size=config.pipeline_parallel,
            virtual_pipeline_model_parallel_size=config.virtual_pipeline if config.virtual_pipeline > 1 else None,
            context_parallel_size=config.context_parallel,
            expert_model_parallel_size=config.expert_parallel,
            expert_tensor_parallel_size=config.expert_tensor_parallel or None,
            create_gloo_process_groups=False,
        )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    context = ContextShare(parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size())
    return Layout(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        tensor_parallel=config.tensor_parallel,
        pipeline_parallel=config.pipeline_parallel,
        data_parallel=parallel_state.get_data_parallel_world_size(),
        data_parallel_rank=parallel_state.get_data_parallel_rank(),
        context=context,
        sequence_parallel=config.sequence_parallel and config.tensor_parallel > 1,
        reports=last and parallel_state.get_tensor_model_parallel_rank() == 0 and context.rank == 0,
        device=_this_device(),
    )


@reported_by_each_rank()
def connect_groups(actor: ActorConfig, architecture: Architecture, timeout_s: float = 600.0) -> None:
    """Create the communicators of the Megatron groups that training this model uses; see `connect`. The other groups
    get none: each communicator takes device memory for good (0.5 to 0.7 GB on four A100s, NVIDIA/nccl issue 964)."""
    sharded = actor.optimizer.distributed
    groups = [
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_context_parallel_group(),
        parallel_state.get_pipeline_model_parallel_group(),
        parallel_state.get_data_parallel_group(with_context_parallel=True),
        # the group that sums the gradient norm
        parallel_state.get_intra_distributed_optimizer_instance_group()
        if sharded
        else parallel_state.get_model_parallel_group(),
    ]
    if architecture.tied_embeddings:  # the group is None on middle stages
        groups += [parallel_state.get_embedding_group(check_initialized=False)]
    if architecture.experts is not None:
        groups += [
            parallel_state.get_expert_tensor_parallel_group(),
            parallel_state.get_expert_model_parallel_group(),
            parallel_state.get_expert_tensor_and_model_parallel_group(),
        ]
        if architecture.experts.is_sigmoid:  # Megatron sums each expert's tokens, though no bias changes here
            groups += [parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)]
    if actor.fp8 == "delayed":  # all-reduces the largest values of tensors
        groups += [parallel_state.get_amax_reduction_group(True, bool(actor.megatron.get("tp_only_amax_red")))]
    if actor.layout.expert_parallel > 1:  # otherwise experts are replicated over the same ranks as all parameters
        groups += [parallel_state.get_expert_data_parallel_group()]
        groups += [] if sharded else [parallel_state.get_expert_tensor_model_pipeline_parallel_group()]
    connect([group for group in groups if group is not None], _this_device(), timeout_s)


def _this_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a small host tensor to the device without waiting for the device: with a copy from pageable memory the host
    waits until the device has finished all earlier work, with pinned memory it continues at once."""
    source = tensor.pin_memory() if device.type == "cuda" else tensor  # torch keeps it until the copy is done
    return source.to(device, non_blocking=True)


def stop_process_group() -> None:
    """Destroy the process groups of Megatron and torch. No collective works afterwards."""
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
