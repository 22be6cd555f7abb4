"""Every rank gets exactly the completions that it trains on, whoever holds them; and the states of a step."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from support.launch import run_ranks

import dppo_megatron.steps.exchange
from dppo_megatron.algorithms.token_values import OwnTokens, TokenValues
from dppo_megatron.packing.alignment import PackingLayout
from dppo_megatron.packing.planner import plan_microbatches
from dppo_megatron.steps.exchange import Replicas, exchange
from dppo_megatron.steps.step import BACK, ORDER, Reached, Step, UpdatePlan, sizes_of
from dppo_megatron.types import Completion, ExpertChoices, Group, Prompt, RolloutPrompt

CAP = 64


def _step(
    rng: np.random.Generator, size: int, choices: ExpertChoices | None = None
) -> tuple[list[RolloutPrompt], list[Group]]:
    """A step's groups, some of them with completions of no token."""
    selected, groups = [], []
    for k in range(int(rng.integers(0, 9))):
        prompt = Prompt(int(rng.integers(1000)), "", tuple(rng.integers(3, 99, rng.integers(1, 5)).tolist()), "", "")
        selected.append(RolloutPrompt(prompt, 1.0, 1.0))
        completions = []
        for n in rng.integers(0, 12, size).tolist():
            ids, logprobs = rng.integers(0, 2**17, n), -rng.exponential(1.0, n).astype(np.float32)
            completions.append(Completion(ids, logprobs, "stop", f"{k}"))
            if choices is not None:
                shape = len(prompt.token_ids) + n - 1, choices.layers, choices.per_token
                experts = rng.integers(0, choices.count, shape).astype(choices.dtype)
                completions[-1] = replace(completions[-1], experts=experts)
        groups.append(Group(selected[-1], tuple(completions), np.zeros(size)))
    return selected, groups


def _plans(
    rng: np.random.Generator, selected: list[RolloutPrompt], groups: list[Group], size: int, replicas: int
) -> list[UpdatePlan]:
    """Updates that keep some of the completions, perhaps none."""
    update_of = rng.integers(-1, 2, len(groups) * size)
    plans = []
    for update in range(2):
        rows = np.flatnonzero(update_of == update)
        lengths = np.array([len(groups[r // size].completions[r % size].token_ids) for r in rows], dtype=np.int64)
        layout = PackingLayout(data_parallel=replicas)
        pack = plan_microbatches(sizes_of(rows, lengths, selected, size), layout=layout, max_tokens_per_microbatch=CAP)
        plans.append(UpdatePlan(rows, lengths, *rng.standard_normal((4, len(rows))), pack, True))
    return plans


def _own_values(group: Group, place: int, advantage: float, *names: str) -> TokenValues:
    """Numbers that differ in every token of a step."""
    ids, index = group.completions[place].token_ids, group.selected.prompt.index
    found = {"advantages": ids * advantage, "weights": ids - index, "probabilities": 1.0 / (1 + ids % 3)}
    return TokenValues(**{name: found[name] for name in names})


OWN = [
    OwnTokens(lambda *given, names=names: _own_values(*given, *names), "own", 5, True, names, step=3)
    for names in (("advantages",), ("weights",), ("advantages", "probabilities"))
]


def _of_tokens(tokens: OwnTokens, group: Group, place: int, advantage: float) -> tuple[Any, Any]:
    """Advantages and factors on the weight of a completion, in a column's float32."""
    columns = [one.astype(np.float64) for one in tokens.columns(group, place, advantage).values()]
    if tokens.given == ("weights",):
        return advantage, columns[0]
    return columns[0], columns[1] if len(columns) == 2 else 1.0


def _nodes(rng: np.random.Generator, world: int) -> np.ndarray:
    """The first rank on each rank's node, of uneven nodes: from one to as many as ranks."""
    starts = rng.random(world) < rng.choice([0.0, 0.3, 0.6, 1.0])
    return np.maximum.accumulate(np.where(starts, np.arange(world), 0))


def _exchange(tensor_parallel: int, cases: int) -> list[tuple[int, int]]:
    """On ranks: the samples of every case, checked against the step that all ranks can make. Nodes are other ones in
    each case. Returns what each rank got."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = rank // tensor_parallel
    agreed = Replicas.agree(mine)
    assert agreed.node.tolist() == [0] * world
    got = []
    for case in range(cases):
        rng = np.random.default_rng(case)
        size = int(rng.integers(2, 5))
        choices = (None, ExpertChoices(3, 2, 128), ExpertChoices(1, 3, 300))[case // 3 % 3]
        selected, groups = _step(rng, size, choices)
        plans = _plans(rng, selected, groups, size, world // tensor_parallel)
        # one holder for all in every third case, as where one node has the servers; else anybody
        holders = rng.integers(0, world, len(groups)) if case % 3 else np.full(len(groups), case % world)
        held = {k: group for k, group in enumerate(groups) if holders[k] == rank}
        replicas = replace(agreed, node=_nodes(rng, world))
        tokens = (None, *OWN)[case % 4]
        updates = exchange(plans, held, holders, selected, size, replicas, choices, tokens)
        assert len(updates) == len(plans)
        for plan, update in zip(plans, updates, strict=True):
            members = {m for pack in plan.pack.microbatches[mine] for m in pack.members}
            assert update.samples.keys() == members
            for place, sample in update.samples.items():
                row = int(plan.rows[place])
                group = groups[row // size]
                completion, prompt = group.completions[row % size], group.selected.prompt
                assert sample.id == f"{prompt.index}:{row % size}"
                assert sample.token_ids.tolist() == [*prompt.token_ids, *completion.token_ids.tolist()]
                assert sample.behaviour_logprobs.tobytes() == completion.logprobs.tobytes()
                if choices is None:
                    assert sample.experts is None
                else:
                    assert sample.experts is not None and sample.experts.dtype == choices.dtype
                    assert np.array_equal(sample.experts, completion.experts)
                assert sample.denominator == plan.denominators[place]
                scalar = plan.advantages[place], plan.weights[place]
                if tokens is None:
                    assert (sample.advantage, sample.weight) == scalar
                    continue
                advantages, factor = _of_tokens(tokens, group, row % size, scalar[0])
                assert np.array_equal(sample.advantage, advantages) and np.array_equal(
                    sample.weight, scalar[1] * factor
                )
            got.append((mine, len(members)))
    return got


@pytest.mark.parametrize(("world", "tensor_parallel"), [(1, 1), (2, 1), (6, 2)])
def test_each_rank_gets_its_own_and_nothing_else(world: int, tensor_parallel: int) -> None:
    """Bit for bit, over random steps, holders and plans: nothing kept, no group, completions of no token among them."""
    results = run_ranks(_exchange, world, tensor_parallel, 30)
    everything: Any = sum((np.array(rank)[:, 1].sum() for rank in results[::tensor_parallel]), 0)
    assert everything > 100, "hardly anything was exchanged"


def _hops(monkeypatch: pytest.MonkeyPatch, parcels: Any, replicas: Replicas) -> list[dict[tuple[int, int], list[int]]]:
    """What a rank sends in the first hop and what it takes (pair -> parcels), then of the second; nothing is sent. What
    it sends it has by then, and in the end what it trains on."""
    hops = []

    def note(length: Any, to: Any, source: Any, here: dict[int, Any]) -> None:
        del length
        assert all(index in here for indices in to.values() for index in indices.tolist())
        here |= {index: [] for indices in source.values() for index in indices.tolist()}
        me = replicas.rank
        hops.append({(me, rank): indices.tolist() for rank, indices in to.items() if len(indices)})
        hops.append({(rank, me): indices.tolist() for rank, indices in source.items() if len(indices)})

    monkeypatch.setattr(dppo_megatron.steps.exchange, "_send", note)
    here: dict[int, Any] = {index: [] for index in np.flatnonzero(parcels.holder == replicas.rank).tolist()}
    dppo_megatron.steps.exchange._deliver(parcels, here, replicas)
    assert set(np.flatnonzero(parcels.replica == replicas.of_rank[replicas.rank]).tolist()) <= set(here)
    return hops


@pytest.mark.parametrize("seed", range(40))
def test_a_node_is_sent_a_completion_once(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """On any nodes, replicas and loads both ends say the same in the same order; a node gets over the network what one
    of its ranks trains on and none of them holds, in one copy; a rank is sent nothing twice, and is passed on by others
    of its node what it trains on, no more."""
    rng = np.random.default_rng(seed)
    world = int(rng.integers(2, 25))
    node, of_rank = _nodes(rng, world), rng.permutation(np.arange(world) % rng.integers(1, world + 1))
    size = 2
    selected, groups = _step(rng, size)
    plans = _plans(rng, selected, groups, size, int(of_rank.max()) + 1)
    width = (2, 4)[seed % 2]
    parcels = dppo_megatron.steps.exchange._Parcels.of(
        plans, rng.integers(0, world, len(groups)), size, np.full(len(groups), 4), None, width
    )
    assert parcels.words.tolist() == (width * parcels.length).tolist()  # 8 bytes a token where tokens have no values
    assert sorted(parcels.row.tolist()) == sorted(row for plan in plans for row in plan.rows.tolist())  # none pruned
    hops = [_hops(monkeypatch, parcels, Replicas(of_rank, node, rank)) for rank in range(world)]
    network: Counter[tuple[int, int]] = Counter()
    got: Counter[tuple[int, int]] = Counter()
    for hop in (0, 1):
        sent = {pair: indices for rank in hops for pair, indices in rank[2 * hop].items()}
        assert sent == {pair: indices for rank in hops for pair, indices in rank[2 * hop + 1].items()}
        for (sender, receiver), indices in sent.items():
            assert (node[sender] != node[receiver]) == (hop == 0)
            network.update((int(node[receiver]), index) for index in indices if hop == 0)
            got.update((receiver, index) for index in indices)
            assert hop == 0 or all(parcels.replica[index] == of_rank[receiver] for index in indices)
    assert set(got.values()) <= {1}
    for index, (holder, replica) in enumerate(zip(parcels.holder, parcels.replica, strict=True)):
        wanted = {int(place) for place in node[of_rank == replica]} - {int(node[holder])}
        assert {place for place, what in network if what == index} == wanted
    assert not network or set(network.values()) == {1}


@pytest.mark.parametrize("ranks_of_a_replica", [1, 8, 64])
def test_connections_of_a_rank_of_1024(monkeypatch: pytest.MonkeyPatch, ranks_of_a_replica: int) -> None:
    """32,768 completions of anybody for anybody, 128 nodes of eight: one rank of each other node, and its own node."""
    rng, count = np.random.default_rng(0), 1 << 15
    node, of_rank = np.arange(1024) // 8 * 8, np.arange(1024) // ranks_of_a_replica
    nothing, lengths = np.zeros(count, np.int64), np.ones(count, np.int64)
    holder, replica = np.sort(rng.integers(0, 1024, count)), rng.integers(0, of_rank.max() + 1, count)
    parcels = dppo_megatron.steps.exchange._Parcels(
        nothing, np.arange(count), nothing, holder, replica, lengths, 2 * lengths
    )
    for rank in (0, 517, 1023):
        hops = _hops(monkeypatch, parcels, Replicas(of_rank, node, rank))
        assert 50 < len({other for hop in hops for pair in hop for other in pair} - {rank}) <= 127 + 7


@pytest.mark.parametrize("before", ORDER)
def test_every_arrow_between_the_states_of_a_step(before: Reached) -> None:
    """Onward by one, back where a phase repeats; past generation where no prompt is worth a rollout."""
    allowed = set(pairwise(ORDER)) | set(BACK.items()) | {("selected", "rolled_out")}
    for after in ORDER:
        step = Step(1, reached=before)
        if (before, after) in allowed:
            step.reach(after)
            assert step.reached == after
        else:
            with pytest.raises(AssertionError, match=f"{before} -> {after}"):
                step.reach(after)
            assert step.reached == before
