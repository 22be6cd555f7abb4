"""Sends each kept completion to the ranks that train on it, as flat buffers.

Rank 0 decides on scalars and broadcasts the plan; other ranks' tokens never pass through it. The rank that holds a
completion (it generated it, or took it from its node's rollout client) sends it to the ranks of the data-parallel
replica that the plan gave it to:

    rank 0      scalars [K, G] of all --select, plan--> rows, weights, micro-batches --broadcast--> everybody
    holder h    tokens, log-probs of its groups        --one all-to-all of bytes--> the ranks of each replica

Sender and receiver compute the sizes from the plan, so only the data is sent: 8 bytes a token, and nothing for what
was pruned. Of a step of 67 million tokens on 64 GPUs, 95 % pruned, each rank of a replica of 8 receives 3.4 MB;
every group to every rank was 5.7 GB a rank. Per-token advantages or weights would be further columns of the buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from dppo_megatron.step import Update, UpdatePlan, sample_of
from dppo_megatron.types import Group, IntArray, SelectedPrompt, TrainSample

_WORDS = 2
"""4-byte words per token: its id (int32) and its behaviour log-probability (float32)."""


@dataclass(frozen=True, slots=True)
class Replicas:
    """Which data-parallel replica each rank of the job belongs to."""

    of_rank: IntArray
    """[world size]."""
    rank: int

    @staticmethod
    def agree(data_parallel_rank: int) -> Replicas:
        """Gather it from all ranks. Collective."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return Replicas(np.array([data_parallel_rank]), 0)
        everywhere: list[int] = [0] * dist.get_world_size()
        dist.all_gather_object(everywhere, data_parallel_rank)
        return Replicas(np.array(everywhere), dist.get_rank())


@dataclass(frozen=True, slots=True)
class _Parcels:
    """All kept completions of a step, over all its updates, as columns [n]. The same on every rank."""

    update: IntArray
    place: IntArray
    """Position in the update's `rows`."""
    row: IntArray
    holder: IntArray
    """The rank that has it."""
    replica: IntArray
    """The data-parallel replica that trains on it."""
    length: IntArray
    """Completion tokens."""

    @staticmethod
    def of(plans: Sequence[UpdatePlan], holders: IntArray, group_size: int) -> _Parcels:
        """Computed from the plans."""
        columns = []
        for index, plan in enumerate(plans):
            replica = np.zeros(len(plan.rows), np.int64)
            for number, packs in enumerate(plan.pack.microbatches):
                replica[[member for pack in packs for member in pack.members]] = number
            places = np.arange(len(plan.rows))
            update = np.full(len(places), index)
            columns.append((update, places, plan.rows, holders[plan.rows // group_size], replica, plan.lengths))
        empty = (np.empty(0, np.int64),) * 6
        return _Parcels(*(np.concatenate(column) for column in zip(empty, *columns, strict=True)))

    def between(self, holder: int | None, replica: int) -> IntArray:
        """Rows that `holder` (None: any rank) sends to each rank of `replica`, in buffer order."""
        mask = self.replica == replica if holder is None else (self.replica == replica) & (self.holder == holder)
        index = np.flatnonzero(mask)
        ordered: IntArray = index[np.lexsort((self.place[index], self.update[index], self.holder[index]))]
        return ordered


def exchange(
    plans: Sequence[UpdatePlan],
    groups: Mapping[int, Group],
    holders: IntArray,
    selected: Sequence[SelectedPrompt],
    group_size: int,
    replicas: Replicas,
) -> list[Update]:
    """The updates of a step with the samples of this rank's replica. Collective.

    Args:
        groups: position in the step -> group, those that this rank holds.
        holders: [K] the rank that holds each group.
    """
    parcels = _Parcels.of(plans, holders, group_size)
    mine = parcels.between(None, int(replicas.of_rank[replicas.rank]))

    def own(index: int) -> tuple[IntArray, npt.NDArray[np.float32]]:
        row = int(parcels.row[index])
        completion = groups[row // group_size].completions[row % group_size]
        return completion.token_ids, completion.logprobs

    if len(replicas.of_rank) == 1:
        arrived = [own(index) for index in mine.tolist()]
    else:
        arrived = _all_to_all(parcels, mine, own, replicas)
    samples: list[dict[int, TrainSample]] = [{} for _ in plans]
    for index, (tokens, logprobs) in zip(mine.tolist(), arrived, strict=True):
        update, place = int(parcels.update[index]), int(parcels.place[index])
        samples[update][place] = sample_of(plans[update], place, selected, group_size, tokens, logprobs)
    return [Update(plan, held) for plan, held in zip(plans, samples, strict=True)]


def _all_to_all(
    parcels: _Parcels,
    mine: IntArray,
    own: Callable[[int], tuple[IntArray, npt.NDArray[np.float32]]],
    replicas: Replicas,
) -> list[tuple[IntArray, npt.NDArray[np.float32]]]:
    """(tokens, log-probabilities) of the parcels `mine`, received from their holders."""
    world = len(replicas.of_rank)
    by_replica = {}
    for replica in np.unique(replicas.of_rank).tolist():
        parts = [_words(*own(index)) for index in parcels.between(replicas.rank, replica).tolist()]
        by_replica[replica] = np.concatenate([np.empty(0, np.int32), *parts])
    to_send = [torch.from_numpy(by_replica[replica]) for replica in replicas.of_rank.tolist()]
    sizes = _WORDS * np.bincount(parcels.holder[mine], weights=parcels.length[mine], minlength=world).astype(np.int64)
    arriving = torch.empty(int(sizes.sum()), dtype=torch.int32)
    dist.all_to_all_single(arriving, torch.cat(to_send), sizes.tolist(), [len(part) for part in to_send])
    words, ends = arriving.numpy(), np.cumsum(_WORDS * parcels.length[mine])
    return [
        (piece[: len(piece) // 2].astype(np.int64), piece[len(piece) // 2 :].view(np.float32))
        for piece in np.split(words, ends[:-1])[: len(mine)]
    ]


def _words(tokens: IntArray, logprobs: npt.NDArray[np.float32]) -> npt.NDArray[np.int32]:
    """One completion as 4-byte words: its ids, then the bits of its log-probabilities."""
    bits = np.ascontiguousarray(logprobs, dtype=np.float32).view(np.int32)
    return np.concatenate([tokens.astype(np.int32), bits])
