"""What rank 0 decides in a step, from choosing prompts to the plan of the micro-batches.

16,384 completions, 67 million tokens, a million prompts.
"""

from __future__ import annotations

import pickle
import time

import numpy as np

from dppo_megatron.config.schema import Config
from dppo_megatron.config.selection import selection_settings
from dppo_megatron.packing.alignment import PackingLayout
from dppo_megatron.packing.planner import SampleSize, plan_microbatches
from dppo_megatron.pruning.interface import StepCost
from dppo_megatron.rewards.measures import GradeTable
from dppo_megatron.selection import Rollouts, Selector
from dppo_megatron.steps.step import RolloutTable, UpdatePlan
from dppo_megatron.types import Prompt, RolloutPrompt
from plane.common import Bar
from plane.plan import CAP, COST, lengths_of

RANKS, SIZE = 64, 16


def _outcomes(groups: int, seed: int) -> list[RolloutTable]:
    """What 64 ranks report to rank 0."""
    rng = np.random.default_rng(seed)
    parts = []
    for rank in range(RANKS):
        mine = np.arange(rank, groups, RANKS)
        shape = (len(mine), SIZE)
        rewards = (rng.random(shape) < rng.random((len(mine), 1))).astype(np.float64)
        lengths = lengths_of(rewards.size, 8192, seed + rank).reshape(shape)
        facts = {"parsed_share": np.ones(rewards.size), "boxed_share": np.ones(rewards.size)}
        table = GradeTable(np.repeat(mine, SIZE), np.ones(rewards.size), rewards.ravel(), facts, {}, {})
        holder = np.full(len(mine), rank)
        norms, there = np.sqrt(lengths) * rng.uniform(0.1, 0.4, shape), np.zeros(shape, np.bool_)
        outcomes = Rollouts(rewards, lengths, norms, None, lengths >= 8192, there, there, np.ones(shape))
        parts.append(RolloutTable(mine, holder, outcomes, 0.3 * lengths, {"reward": table}))
    return parts


def run(smoke: bool) -> list[Bar]:
    """The second step of a run, so that history is read; the warm-up is over."""
    prompts_per_step, num_prompts = (64, 10_000) if smoke else (1024, 1_000_000)
    config = Config()
    config.rollout.prompts_per_step, config.rollout.completions_per_prompt = prompts_per_step, SIZE
    config.steps, config.pruning.prompt.warmup_epochs = 100, 0
    selector = Selector(selection_settings(config), num_prompts)
    seconds = 0.0
    for step in (1, 2):
        started = time.process_time()
        chosen = selector.begin(step)
        begun = time.process_time() - started
        prompts = [
            RolloutPrompt(Prompt(int(i), "", tuple(range(200)), "", ""), float(p), float(w))
            for i, p, w in zip(chosen.prompt_index, chosen.inclusion_prob, chosen.weight, strict=True)
        ]
        arriving = [pickle.dumps(part) for part in _outcomes(len(prompts), step)]
        started = time.process_time()
        outcomes = RolloutTable.join([pickle.loads(part) for part in arriving])
        decision = selector.finish(outcomes.rollouts(prompts), step)
        rows = np.flatnonzero(decision.kept)
        lengths = outcomes.outcomes.lengths.ravel()[rows]
        sizes = [SampleSize(f"{r // SIZE}:{r % SIZE}", 199 + int(n)) for r, n in zip(rows, lengths, strict=True)]
        layout = PackingLayout(data_parallel=RANKS)
        pack = plan_microbatches(sizes, layout=layout, max_tokens_per_microbatch=CAP, cost=COST)
        sent = len(pickle.dumps(UpdatePlan.of(decision, rows, lengths, pack)))
        seconds = begun + time.process_time() - started
        selector.feedback(StepCost(step, 60.0, 50.0, 5.0, 1.0))
    completions = outcomes.outcomes.rewards.size
    return [
        Bar(
            "rank0",
            f"begin to plan, {completions} completions, {num_prompts} prompts",
            seconds,
            2.0,
            "CPU s",
            is_time=True,
        ),
        Bar("rank0", "largest object sent to rank 0", max(map(len, arriving)) / 2**20, 1.0, "MiB"),
        Bar("rank0", "plan that rank 0 sends", sent / 2**20, 1.0, "MiB"),
    ]
