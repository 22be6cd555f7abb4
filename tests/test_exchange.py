"""Every rank gets exactly the completions that it trains on, whoever holds them; and the states of a step."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from support.launch import run_ranks

from dppo_megatron.exchange import Replicas, TokenValues, exchange
from dppo_megatron.packing.alignment import PackingLayout
from dppo_megatron.packing.planner import plan_microbatches
from dppo_megatron.step import BACK, ORDER, Reached, Step, UpdatePlan, sizes_of
from dppo_megatron.types import Completion, Group, Prompt, SelectedPrompt

CAP = 64


def _step(rng: np.random.Generator, size: int) -> tuple[list[SelectedPrompt], list[Group]]:
    """A step's groups, some of them with completions of no token."""
    selected, groups = [], []
    for k in range(int(rng.integers(0, 9))):
        prompt = Prompt(int(rng.integers(1000)), "", tuple(rng.integers(3, 99, rng.integers(1, 5)).tolist()), "", "")
        selected.append(SelectedPrompt(prompt, 1.0, 1.0))
        completions = []
        for n in rng.integers(0, 12, size).tolist():
            ids, logprobs = rng.integers(0, 2**17, n), -rng.exponential(1.0, n).astype(np.float32)
            completions.append(Completion(ids, logprobs, "stop", f"{k}"))
        groups.append(Group(selected[-1], tuple(completions), np.zeros(size)))
    return selected, groups


def _plans(
    rng: np.random.Generator, selected: list[SelectedPrompt], groups: list[Group], size: int, replicas: int
) -> list[UpdatePlan]:
    """Updates that keep some of the completions, perhaps none."""
    update_of = rng.integers(-1, 2, len(groups) * size)
    plans = []
    for update in range(2):
        rows = np.flatnonzero(update_of == update)
        lengths = np.array([len(groups[r // size].completions[r % size].token_ids) for r in rows], dtype=np.int64)
        layout = PackingLayout(data_parallel=replicas)
        pack = plan_microbatches(sizes_of(rows, lengths, selected, size), layout=layout, max_tokens_per_microbatch=CAP)
        plans.append(UpdatePlan(rows, lengths, *rng.standard_normal((3, len(rows))), pack))
    return plans


def _values(k: int, j: int, group: Group) -> TokenValues:
    """Advantages and weights of the tokens of completion j of group k, the same on every rank."""
    draw = np.random.default_rng((k, j)).standard_normal((2, len(group.completions[j].token_ids))).astype(np.float32)
    return TokenValues(*draw)


def _exchange(tensor_parallel: int, cases: int) -> list[tuple[int, int]]:
    """On ranks: the samples of every case, every other one with values for each token, checked against the step that
    all ranks can make. Returns what each rank got."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = rank // tensor_parallel
    replicas = Replicas.agree(mine)
    got = []
    for case in range(cases):
        rng = np.random.default_rng(case)
        size = int(rng.integers(2, 5))
        selected, groups = _step(rng, size)
        plans = _plans(rng, selected, groups, size, world // tensor_parallel)
        # one holder for all in every third case, as where one node has the servers; else anybody
        holders = rng.integers(0, world, len(groups)) if case % 3 else np.full(len(groups), case % world)
        held = {k: group for k, group in enumerate(groups) if holders[k] == rank}
        per_token = bool(case % 2)
        values = {k: [_values(k, j, group) for j in range(size)] for k, group in held.items()} if per_token else None
        updates = exchange(plans, held, holders, selected, size, replicas, values)
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
                assert sample.denominator == plan.denominators[place]
                if per_token:
                    theirs = _values(row // size, row % size, group)
                    assert np.array_equal(sample.advantage, theirs.advantages)
                    assert np.array_equal(sample.weight, theirs.weights)
                else:
                    assert (sample.advantage, sample.weight) == (plan.advantages[place], plan.weights[place])
            got.append((mine, len(members)))
    return got


@pytest.mark.parametrize(("world", "tensor_parallel"), [(1, 1), (2, 1), (4, 2)])
def test_each_rank_gets_its_own_and_nothing_else(world: int, tensor_parallel: int) -> None:
    """Bit for bit, over random steps, holders and plans: nothing kept, no group, completions of no token among them."""
    results = run_ranks(_exchange, world, tensor_parallel, 30)
    everything: Any = sum((np.array(rank)[:, 1].sum() for rank in results[::tensor_parallel]), 0)
    assert everything > 100, "hardly anything was exchanged"


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
