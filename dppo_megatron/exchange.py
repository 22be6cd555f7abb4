"""Sends each kept completion to the ranks that train on it, as flat buffers.

Rank 0 decides on scalars and broadcasts the plan; other ranks' tokens never pass through it. The rank that holds a
completion (it generated it, or took it from its node's rollout client) sends it to the ranks of the data-parallel
replica that the plan gave it to:

    rank 0      scalars [K, G] of all --select, plan--> rows, weights, micro-batches --broadcast--> everybody
    holder h    tokens, log-probs of its groups        --one all-to-all of bytes--> the ranks of each replica

Sender and receiver compute the sizes from the plan, so only the data is sent: 8 bytes a token, and nothing for what
was pruned. Of a step of 67 million tokens on 64 GPUs, 95 % pruned, each rank of a replica of 8 receives 3.4 MB;
every group to every rank was 5.7 GB a rank. Per-token advantages and weights are two more columns of the same buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from dppo_megatron.step import Update, UpdatePlan, sample_of
from dppo_megatron.types import Group, IntArray, SelectedPrompt, TrainSample

Column: TypeAlias = npt.NDArray[np.float32]
"""[completion tokens] one 4-byte value a token."""


@dataclass(frozen=True, slots=True)
class TokenValues:
    """Advantages and weights of one completion's tokens, in place of one of each for the whole completion."""

    advantages: Column
    weights: Column


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
    token_values: Mapping[int, Sequence[TokenValues]] | None = None,
) -> list[Update]:
    """The updates of a step with the samples of this rank's replica. Collective.

    Args:
        groups: position in the step -> group, those that this rank holds.
        holders: [K] the rank that holds each group.
        token_values: position in the step -> for each completion of a group that this rank holds; on all ranks or none.
            They take 8 bytes a token more.
    """
    parcels = _Parcels.of(plans, holders, group_size)
    mine = parcels.between(None, int(replicas.of_rank[replicas.rank]))

    def own(index: int) -> list[Column]:
        """The columns of a parcel that this rank holds."""
        group, place = divmod(int(parcels.row[index]), group_size)
        completion = groups[group].completions[place]
        columns = [completion.token_ids.astype(np.int32).view(np.float32), completion.logprobs]
        if token_values is not None:
            columns += [token_values[group][place].advantages, token_values[group][place].weights]
        return columns

    if len(replicas.of_rank) == 1:
        arrived = [own(index) for index in mine.tolist()]
    else:
        arrived = _all_to_all(parcels, mine, own, replicas, 2 if token_values is None else 4)
    samples: list[dict[int, TrainSample]] = [{} for _ in plans]
    for index, (ids, logprobs, *values) in zip(mine.tolist(), arrived, strict=True):
        update, place = int(parcels.update[index]), int(parcels.place[index])
        tokens = ids.view(np.int32).astype(np.int64)
        sample = sample_of(plans[update], place, selected, group_size, tokens, logprobs)
        if values:
            sample = replace(sample, advantage=values[0].astype(np.float64), weight=values[1].astype(np.float64))
        samples[update][place] = sample
    return [Update(plan, held) for plan, held in zip(plans, samples, strict=True)]


def _all_to_all(
    parcels: _Parcels,
    mine: IntArray,
    own: Callable[[int], list[Column]],
    replicas: Replicas,
    words: int,
) -> list[list[Column]]:
    """The columns of the parcels `mine`, `words` each, received from their holders."""
    world = len(replicas.of_rank)
    by_replica = {}
    for replica in np.unique(replicas.of_rank).tolist():
        parts = [column for index in parcels.between(replicas.rank, replica).tolist() for column in own(index)]
        by_replica[replica] = np.concatenate([np.empty(0, np.int32), *(_bits(column) for column in parts)])
    to_send = [torch.from_numpy(by_replica[replica]) for replica in replicas.of_rank.tolist()]
    sizes = words * np.bincount(parcels.holder[mine], weights=parcels.length[mine], minlength=world).astype(np.int64)
    arriving = torch.empty(int(sizes.sum()), dtype=torch.int32)
    dist.all_to_all_single(arriving, torch.cat(to_send), sizes.tolist(), [len(part) for part in to_send])
    ends = np.cumsum(words * parcels.length[mine])
    pieces = np.split(arriving.numpy().view(np.float32), ends[:-1])[: len(mine)]
    return [list(piece.reshape(words, -1)) for piece in pieces]


def _bits(column: Column) -> npt.NDArray[np.int32]:
    """What is sent of it. As integers: nobody on the way may take an id for a number and change it."""
    return np.ascontiguousarray(column, dtype=np.float32).view(np.int32)
