"""The process group, the model-parallel groups, and this rank's place in them.

The only place that calls Megatron's `parallel_state` to build groups. Everything else receives the frozen
`Layout`, so a test can read what a function depends on.
"""

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
from dppo_megatron.distributed import check_interfaces, connect, on_loopback_if_one_machine, reported_by_each_rank
from dppo_megatron.launcher_env import launched_local_rank, raise_file_limit, set_cuda_variables
from dppo_megatron.types import RunAborted, UserError
from dppo_megatron.weights.architecture import Architecture


@dataclass(frozen=True, slots=True)
class ContextShare:
    """Which tokens of a pack one rank of a context-parallel group holds.

    Each sequence is split into 2 CP chunks and rank r takes chunks r and 2 CP - 1 - r, the order that Megatron's rotary
    embedding and Transformer Engine use: causal attention then costs every rank the same.
    """

    rank: int = 0
    size: int = 1

    def position(self, local: Tensor, length: Tensor) -> Tensor:
        """Position in its sequence of this rank's `local`-th token; `length` of the slot, a multiple of 2 CP."""
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
    """One rank of each data-parallel replica's last stage, which computes the loss: its sums count once."""
    device: torch.device


_PATIENCE = timedelta(days=7)
"""Timeout of the job's group after the rendezvous. Ranks wait in it while rank 0 waits for servers, which may take
hours; torch's default is 10 minutes. `observe/watchdog.py` detects dead ranks, and Megatron's groups keep their own
timeouts."""


@reported_by_each_rank()
def start_process_group(rendezvous_timeout_s: float = 600.0) -> None:
    """Join the job's process group: NCCL with CUDA, gloo without. Needs no launcher for a single process.

    Args:
        rendezvous_timeout_s: how long the ranks wait for each other to come.

    Raises:
        RunAborted: not all of them came in that time, or they could not be connected.
        UserError: this rank has no GPU of its own, or gloo or NCCL no network interface.
    """
    if dist.is_initialized():
        return
    raise_file_limit()  # a socket for each rank that this one talks to, and 1,024 are usual
    # gloo beside NCCL: plans, scalars and tokens travel on the host, and no wait is inside a kernel (distributed.py)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if torch.cuda.is_available():
        set_cuda_variables()
        torch.cuda.set_device(_own_device(launched_local_rank(), torch.cuda.device_count()))
    if "RANK" not in os.environ:
        with on_loopback_if_one_machine():
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        return
    check_interfaces(uses_nccl=torch.cuda.is_available())
    timeout = min(timedelta(seconds=rendezvous_timeout_s), _PATIENCE)
    try:
        with on_loopback_if_one_machine():
            dist.init_process_group(backend, timeout=timeout)
        dist.barrier()  # over gloo: all have come
    except (RuntimeError, ValueError) as error:  # torch raises one or the other, depending on what it waited for
        raise RunAborted(
            f"could not meet the other ranks of {os.environ.get('WORLD_SIZE', '?')} within guard.rendezvous_timeout_s ="
            f" {rendezvous_timeout_s:g} s ({str(error).splitlines()[0]}). Has every rank been started, with the same"
            " MASTER_ADDR and MASTER_PORT?"
        ) from None
    assert dist.group.WORLD is not None
    dist.distributed_c10d._set_pg_timeout(_PATIENCE, dist.group.WORLD)  # of its NCCL too, for operations from here on
    dist.distributed_c10d._get_default_store().set_timeout(_PATIENCE)
    connect([dist.group.WORLD], _this_device(), rendezvous_timeout_s)


def _own_device(local_rank: int, count: int) -> int:
    if local_rank >= count:
        raise UserError(
            f"LOCAL_RANK={local_rank}, but this process sees {count} CUDA device{'s' * (count != 1)}: start as many"
            " processes on a machine as it has GPUs, and let each see all of them (CUDA_VISIBLE_DEVICES)"
        )
    return local_rank


def build_layout(config: LayoutConfig, seed: int) -> Layout:
    """Create Megatron's process groups on top of the job's and seed its random number generators."""
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
    """Have the communicators made of those of Megatron's groups through which this model trains; see `connect`.

    Not of all: there are up to 15 of more than one rank, and each takes device memory for good (0.5 to 0.7 GB on four
    A100s, NVIDIA/nccl issue 964). A group that another feature uses (FP8 with delayed scaling) is connected when all
    its members first call it.
    """
    sharded = actor.optimizer.distributed
    groups = [
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_context_parallel_group(),
        parallel_state.get_pipeline_model_parallel_group(),
        parallel_state.get_data_parallel_group(with_context_parallel=True),
        # the norm of the gradient
        parallel_state.get_intra_distributed_optimizer_instance_group()
        if sharded
        else parallel_state.get_model_parallel_group(),
    ]
    if architecture.tied_embeddings:  # none on a stage in the middle
        groups += [parallel_state.get_embedding_group(check_initialized=False)]
    if architecture.experts is not None:
        groups += [
            parallel_state.get_expert_tensor_parallel_group(),
            parallel_state.get_expert_model_parallel_group(),
            parallel_state.get_expert_tensor_and_model_parallel_group(),
        ]
    if actor.layout.expert_parallel > 1:  # else experts are replicated as all else is
        groups += [parallel_state.get_expert_data_parallel_group()]
        groups += [] if sharded else [parallel_state.get_expert_tensor_model_pipeline_parallel_group()]
    connect([group for group in groups if group is not None], _this_device(), timeout_s)


def _this_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A small tensor of the host on the device, without waiting for what that still does.

    A plain `.to(device)` reads pageable memory, so the host waits until the device has done all that it was given
    before. From pinned memory it runs ahead.
    """
    held = tensor.pin_memory() if device.type == "cuda" else tensor  # torch keeps it until the copy is done
    return held.to(device, non_blocking=True)


def stop_process_group() -> None:
    """Leave the groups of Megatron and torch. No collective works after it."""
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
