"""Which rank of the actor shares a device with which worker of a server: such pairs pass weights in device memory.

GPUs are identified by UUID, because engine and trainer may number them differently. If an engine does not report its
workers' UUIDs (SGLang), they are identified by the CUDA_VISIBLE_DEVICES entries with which the trainer started it. On
CPUs every rank of a machine shares memory with all servers there, so the servers are spread over the ranks.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from dppo_megatron.types import UserError

CPU = "cpu"
_VISIBLE = "CUDA_VISIBLE_DEVICES"
DeviceMap: TypeAlias = dict[str, tuple[int, ...]]
"""Address of each server -> the rank that gives weights to each of its workers."""


@dataclass(frozen=True, slots=True)
class RankDevice:
    node: int
    """The rank's machine in the job, as in `launched_servers.py`; servers launched there may share its device."""
    names: frozenset[str]
    """Names of its device: the UUID as torch and as CUDA write it, and its CUDA_VISIBLE_DEVICES entry; or `cpu`."""


def this_device(node: int, *, on_gpu: bool) -> RankDevice:
    """Where this rank, on machine `node` of the job, has its weights."""
    if not on_gpu:
        return RankDevice(node, frozenset((CPU,)))
    index = torch.cuda.current_device()
    uuid = str(torch.cuda.get_device_properties(index).uuid)
    return RankDevice(node, frozenset((uuid, f"GPU-{uuid}", visible_devices(os.environ.get(_VISIBLE))[index])))


def visible_devices(setting: str | None) -> list[str]:
    """The entries of a CUDA_VISIBLE_DEVICES setting; the numbers of all devices if it is not set.

    Example:
        visible_devices("2, 3") == ["2", "3"]
    """
    if setting:
        return [entry.strip() for entry in setting.split(",")]
    return [str(index) for index in range(max(1, torch.cuda.device_count()))]


def servers_devices(gpus: Sequence[str], inherited: str, ranks: int) -> list[str]:
    """The CUDA_VISIBLE_DEVICES of each server, from `rollout.servers.gpus`.

    Its numbers are taken as positions in the `inherited` CUDA_VISIBLE_DEVICES, as a rank's number is, if that has all
    of these positions and none is among the first `ranks`, which train. Otherwise they are CUDA's own numbers. Raises
    UserError if only some of the positions are among the first `ranks`.

    Example:
        servers_devices(["0", "1"], "6,7", 0) == ["6", "7"]
        servers_devices(["0", "1"], "6,7", 2) == servers_devices(["0", "1"], "", 2) == ["0", "1"]
    """
    visible = visible_devices(inherited) if inherited else []
    named = [[one.strip() for one in entry.split(",")] for entry in gpus]
    numbers = [one for entry in named for one in entry]
    if not all(one.isdecimal() and int(one) < len(visible) for one in numbers):
        return list(gpus)
    taken = [one for one in numbers if int(one) < ranks]
    # as positions, the numbers in `taken` are GPUs of ranks; if all are, they are probably CUDA's own numbers
    if 0 < len(taken) < len(numbers) and any(visible[int(one)] != one for one in numbers):
        raise UserError(
            f"rollout.servers.gpus: position {taken[0]} in CUDA_VISIBLE_DEVICES = {inherited} is a training rank's GPU"
            f" ({ranks} train on this machine), but {max(numbers, key=int)} is not: use positions from {ranks} on"
        )
    return list(gpus) if taken else [",".join(visible[int(one)] for one in entry) for entry in named]


def ranks_of_workers(
    ranks: Sequence[RankDevice], workers: Sequence[str], turn: int, node: int = 0
) -> tuple[int, ...] | None:
    """For each worker of a server on machine `node`, the rank that gives it weights; None if a worker has no rank.

    Args:
        workers: the device name of each.
        turn: the server's index. If several ranks share a device, servers are assigned to them in turn.

    Example:
        GPUs a, b; ranks 0 and 1 on them; a server with workers on b, a  ->  (1, 0)
        both ranks on `cpu`; server 3 with one worker  ->  (1,)
    """
    assigned = []
    for worker in workers:
        candidates = [rank for rank, own in enumerate(ranks) if own.node == node and worker in own.names]
        if not candidates:
            return None
        assigned.append(candidates[turn % len(candidates)])
    return tuple(assigned) or None
