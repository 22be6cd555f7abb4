"""Sends each kept completion to the ranks that train on it, as flat buffers.

The rank that holds a completion (it generated it, or took it from its node's rollout client) sends it to the ranks of
the data-parallel replica that trains on it according to rank 0's plan:

    holder h    tokens, log-probs of its groups  --one copy--> in each node, the gateway for h (`Replicas.gateways`)
                                                 --inside the node--> the ranks of the replica that train on it

Through gateways a rank connects only to one rank of each other node and to the ranks of its own: 134 connections at
1,024 ranks, eight per node, instead of 1,023. Data that a node needs twice crosses the network once; in
return a rank forwards up to as much as it keeps. With one node, or one rank per node, every rank sends to every rank.

Sender and receiver compute the sizes from the plan, so only the data is sent (docs/data_plane.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from dppo_megatron.algorithms.token_values import Column, OwnTokens
from dppo_megatron.distributed import gather_all, on_every_rank, rank
from dppo_megatron.launcher_env import launched_node
from dppo_megatron.steps.step import Update, UpdatePlan, sample_of
from dppo_megatron.types import (
    Completion,
    ExpertArray,
    ExpertChoices,
    Group,
    IntArray,
    RolloutPrompt,
    RunAborted,
    TrainSample,
    UserError,
)


@dataclass(frozen=True, slots=True)
class Replicas:
    """The data-parallel replica and the node of each rank of the job."""

    of_rank: IntArray
    """[world size] the rank's replica."""
    node: IntArray
    """[world size] the rank's node, as the lowest rank on it; nodes may differ in size."""
    rank: int

    @staticmethod
    def agree(data_parallel_rank: int) -> Replicas:
        """Gather them from all ranks. Collective."""
        me = rank()
        of_rank, node = np.array(gather_all([(data_parallel_rank, launched_node(me))])).T
        return Replicas(of_rank, node, me)

    def gateways(self, node: int) -> IntArray:
        """[world size] the rank of `node` that receives what each rank sends to that node; a rank of `node` itself is
        its own gateway. Other ranks are assigned by their position on their node."""
        members = np.flatnonzero(self.node == node)
        gateway: IntArray = members[(np.arange(len(self.node)) - self.node) % len(members)]
        gateway[members] = members
        return gateway

    def among(self, replica: IntArray, node: int) -> npt.NDArray[np.bool_]:
        """Whether a rank of `node` belongs to each of these replicas."""
        return np.isin(replica, self.of_rank[self.node == node])


@dataclass(frozen=True, slots=True)
class _Parcels:
    """All kept completions of a step, as columns [n] in the order of the buffers. The same on every rank."""

    update: IntArray
    place: IntArray
    """Index in the update's `rows`."""
    row: IntArray
    holder: IntArray
    """The rank that has its tokens."""
    replica: IntArray
    """The data-parallel replica that trains on it."""
    length: IntArray
    """Completion tokens."""
    words: IntArray
    """Size in units of 4 bytes: `columns` per token, and the experts of prompt and completion if they are replayed."""
    columns: int = field(default=2, kw_only=True)
    """Values per completion token: id, log-probability, and those from `objective.token_values`."""

    @staticmethod
    def of(
        plans: Sequence[UpdatePlan],
        holders: IntArray,
        group_size: int,
        prompt_tokens: IntArray,
        choices: ExpertChoices | None,
        width: int = 2,
    ) -> _Parcels:
        columns = []
        for index, plan in enumerate(plans):
            replica = np.zeros(len(plan.rows), np.int64)
            for number, packs in enumerate(plan.pack.microbatches):
                replica[[member for pack in packs for member in pack.members]] = number
            places = np.arange(len(plan.rows))
            update = np.full(len(places), index)
            group, words = plan.rows // group_size, width * plan.lengths
            if choices is not None:
                routed = prompt_tokens[group] + plan.lengths - 1  # the last token is not an input of the model
                words += -(-routed * choices.bytes_per_token // 4)
            columns.append((update, places, plan.rows, holders[group], replica, plan.lengths, words))
        empty = (np.empty(0, np.int64),) * 7
        update, place, row, holder, *rest = (np.concatenate(column) for column in zip(empty, *columns, strict=True))
        order = np.lexsort((place, update, holder))
        return _Parcels(*(column[order] for column in (update, place, row, holder, *rest)), columns=width)


def exchange(
    plans: Sequence[UpdatePlan],
    groups: Mapping[int, Group],
    holders: IntArray,
    selected: Sequence[RolloutPrompt],
    group_size: int,
    replicas: Replicas,
    choices: ExpertChoices | None = None,
    tokens: OwnTokens | None = None,
) -> list[Update]:
    """The updates of a step with the samples of this rank's replica. Collective.

    Args:
        groups: index in the step -> group, for the groups that this rank holds.
        holders: [K] the rank that holds each group.
        choices: form of the completions' replayed experts; None: they have none.
        tokens: computes values per token, on the completion's holder; None: every token has the completion's values.

    Raises:
        RunAborted: `tokens` returned invalid values on some rank.
    """
    prompt_tokens = np.array([len(item.prompt.token_ids) for item in selected], np.int64)
    width = 2 + (len(tokens.given) if tokens is not None else 0)
    parcels = _Parcels.of(plans, holders, group_size, prompt_tokens, choices, width)
    mine = np.flatnonzero(parcels.replica == replicas.of_rank[replicas.rank])

    def columns_of(index: int) -> list[Column]:
        """The columns of a parcel that this rank holds."""
        group, completion_index = divmod(int(parcels.row[index]), group_size)
        completion = groups[group].completions[completion_index]
        columns: list[Column] = [completion.token_ids.astype(np.int32).view(np.float32), completion.logprobs]
        if tokens is not None:
            plan = plans[int(parcels.update[index])]
            advantage = float(plan.advantages[parcels.place[index]])
            columns += tokens.columns(groups[group], completion_index, advantage).values()
        return columns if choices is None else [*columns, _experts_as_words(completion, choices)]

    here, errors = dict[int, list[Column]](), list[str]()
    try:
        here |= {index: columns_of(index) for index in np.flatnonzero(parcels.holder == replicas.rank).tolist()}
    except UserError as error:
        errors.append(str(error))
    if tokens is not None and (all_errors := gather_all(errors)):  # all ranks raise, so that they can save together
        raise on_every_rank(RunAborted(f"step {tokens.step}: {all_errors[0]}"))
    _deliver(parcels, here, replicas)
    samples: list[dict[int, TrainSample]] = [{} for _ in plans]
    for index in mine.tolist():
        ids, logprobs, *more = here[index]
        update, place = int(parcels.update[index]), int(parcels.place[index])
        token_ids = ids.view(np.int32).astype(np.int64)
        sample = sample_of(plans[update], place, selected, group_size, token_ids, logprobs)
        if tokens is not None:
            sample = tokens.applied(sample, more[: width - 2])
        if choices is not None:
            sample = replace(sample, experts=_experts_of_words(more[-1], sample.num_tokens, choices))
        samples[update][place] = sample
    return [Update(plan, own) for plan, own in zip(plans, samples, strict=True)]


def _experts_as_words(completion: Completion, choices: ExpertChoices) -> Column:
    assert completion.experts is not None, "the engine returns them with every training completion"
    flat = np.ascontiguousarray(completion.experts, choices.dtype).view(np.uint8).reshape(-1)
    return np.pad(flat, (0, -len(flat) % 4)).view(np.float32)


def _experts_of_words(words: Column, tokens: int, choices: ExpertChoices) -> ExpertArray:
    own = np.ascontiguousarray(words).view(np.uint8)[: tokens * choices.bytes_per_token].view(choices.dtype)
    return own.reshape(tokens, choices.layers, choices.per_token)


def _deliver(parcels: _Parcels, here: dict[int, list[Column]], replicas: Replicas) -> None:
    """Add to `here`, the columns of the parcels that a rank holds, those of the parcels that it trains on. Both ends
    compute from the plan who sends what; messages between two ranks arrive in order."""
    me, node = replicas.rank, int(replicas.node[replicas.rank])
    held, gateway = np.flatnonzero(parcels.holder == me), replicas.gateways(node)
    to_gateways = {
        int(replicas.gateways(other)[me]): held[replicas.among(parcels.replica[held], other)]
        for other in np.unique(replicas.node).tolist()
        if other != node
    }
    through_me = np.flatnonzero(replicas.among(parcels.replica, node) & (gateway[parcels.holder] == me))
    fetched = through_me[parcels.holder[through_me] != me]
    from_holders = {
        rank: fetched[parcels.holder[fetched] == rank] for rank in np.unique(parcels.holder[fetched]).tolist()
    }
    _send(parcels, to_gateways, from_holders, here)
    mine = np.flatnonzero(parcels.replica == replicas.of_rank[me])
    neighbours = [rank for rank in np.flatnonzero(replicas.node == node).tolist() if rank != me]
    to_neighbours = {rank: through_me[parcels.replica[through_me] == replicas.of_rank[rank]] for rank in neighbours}
    from_neighbours = {rank: mine[gateway[parcels.holder[mine]] == rank] for rank in neighbours}
    _send(parcels, to_neighbours, from_neighbours, here)


def _send(
    parcels: _Parcels,
    to: Mapping[int, IntArray],
    source: Mapping[int, IntArray],
    here: dict[int, list[Column]],
) -> None:
    """Send parcels from `here` and receive others into it: one message per pair of ranks, none without tokens."""
    works: list[dist.Work | None] = []
    arriving: list[tuple[IntArray, torch.Tensor]] = []
    buffers: dict[bytes, torch.Tensor] = {}  # one per set of parcels: all ranks of a replica receive the same
    for peer in sorted({*to, *source}):
        indices = to.get(peer, np.empty(0, np.int64))
        if parcels.words[indices].any():
            key = indices.tobytes()
            if key not in buffers:
                parts = [np.ascontiguousarray(part, np.float32) for i in indices.tolist() for part in here[i]]
                # as integers: a transport may canonicalise the NaN payloads of floats
                buffers[key] = torch.from_numpy(np.concatenate(parts).view(np.int32))
            works.append(dist.isend(buffers[key], peer))
        indices = source.get(peer, np.empty(0, np.int64))
        arriving.append((indices, torch.empty(int(parcels.words[indices].sum()), dtype=torch.int32)))
        if len(arriving[-1][1]):
            works.append(dist.irecv(arriving[-1][1], peer))
    for work in works:
        assert work is not None
        work.wait()
    for indices, buffer in arriving:
        pieces = np.split(buffer.numpy().view(np.float32), np.cumsum(parcels.words[indices]))
        for index, piece in zip(indices.tolist(), pieces, strict=False):
            here[index] = np.split(piece, int(parcels.length[index]) * np.arange(1, parcels.columns + 1))
