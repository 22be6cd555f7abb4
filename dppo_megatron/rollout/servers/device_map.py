"""Which rank of the actor shares a device with which worker of a server: such a pair passes weights in device memory.

GPUs are known by UUID, because engine and trainer may number them differently; where an engine does not report its
workers' UUIDs (SGLang), by the entry of CUDA_VISIBLE_DEVICES with which the trainer has started it. On CPUs all ranks
of a machine share its memory with all servers there, and take turns.
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
"""For each server by address, the rank that hands weights to each of its workers."""


@dataclass(frozen=True, slots=True)
class RankDevice:
    node: int
    """The job's machine, counted as for `job_nodes.py`: servers that were launched there are its neighbours."""
    names: frozenset[str]
    """What its device is called: its UUID as torch and as CUDA write it, an entry of CUDA_VISIBLE_DEVICES; or `cpu`."""


def this_device(node: int, *, on_gpu: bool) -> RankDevice:
    """Where this rank, on machine `node` of the job, has its weights."""
    if not on_gpu:
        return RankDevice(node, frozenset((CPU,)))
    index = torch.cuda.current_device()
    uuid = str(torch.cuda.get_device_properties(index).uuid)
    return RankDevice(node, frozenset((uuid, f"GPU-{uuid}", visible_devices(os.environ.get(_VISIBLE))[index])))


def visible_devices(setting: str | None) -> list[str]:
    """The entries of a CUDA_VISIBLE_DEVICES; all devices by number if it is not set.

    Example:
        visible_devices("2, 3") == ["2", "3"]
    """
    if setting:
        return [entry.strip() for entry in setting.split(",")]
    return [str(index) for index in range(max(1, torch.cuda.device_count()))]


def servers_devices(gpus: Sequence[str], inherited: str, ranks: int) -> list[str]:
    """The CUDA_VISIBLE_DEVICES of each server, of `rollout.servers.gpus`: its numbers are places in the `inherited`
    one, as a rank's is, where that has all of them and they are not among the first `ranks`, which train; else CUDA's.

    Raises:
        UserError: some are among those and some are not, so that it is not clear which GPUs are meant.

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
    # as places these would be GPUs of ranks; all of them so are more likely to be CUDA's own numbers
    if 0 < len(taken) < len(numbers) and any(visible[int(one)] != one for one in numbers):
        raise UserError(
            f"rollout.servers.gpus: place {taken[0]} in CUDA_VISIBLE_DEVICES = {inherited} is a rank's ({ranks} train"
            f" on this machine) and {max(numbers, key=int)} is none's: name places from {ranks} on"
        )
    return list(gpus) if taken else [",".join(visible[int(one)] for one in entry) for entry in named]


def ranks_of_workers(
    ranks: Sequence[RankDevice], workers: Sequence[str], turn: int, node: int = 0
) -> tuple[int, ...] | None:
    """For each worker of a server on machine `node`, the rank that hands it weights; None if one has no rank.

    Args:
        workers: the name of each one's device.
        turn: of several ranks on a device, server `turn` is served by the `turn`-th, and so on around.

    Example:
        GPUs a, b; ranks 0 and 1 on them; a server with workers on b, a  ->  (1, 0)
        both ranks on `cpu`; server 3 with one worker  ->  (1,)
    """
    found = []
    for worker in workers:
        near = [rank for rank, own in enumerate(ranks) if own.node == node and worker in own.names]
        if not near:
            return None
        found.append(near[turn % len(near)])
    return tuple(found) or None
