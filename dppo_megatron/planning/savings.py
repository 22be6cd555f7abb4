"""What each pruning method would save: `simulate`'s replay, of a recorded run or of assumed outcomes.

Without a trace nothing is known of the prompts. The replay then runs over made-up ones: pass rates from Beta(1/2, 1/2),
which leaves 39 % of groups of eight without variance (real sets: a third to four fifths), and log-normal lengths. So
the table says what the methods do to such a population, and a trace says what they do to yours.
"""

from __future__ import annotations

import copy

import numpy as np

from dppo_megatron.config.schema import Config
from dppo_megatron.config.selection import planned_prompts
from dppo_megatron.planning.lengths import SPREAD, Lengths, capped
from dppo_megatron.planning.timing import Timing
from dppo_megatron.randomness import generator
from dppo_megatron.selection import Rollouts
from dppo_megatron.simulate import CostModel, Prediction, simulate
from dppo_megatron.trace import Trace, TracedStep
from dppo_megatron.types import Watch, unwatched

_STEPS = 32
_PROMPTS = 64
"""Of a replayed step: enough for the averages, and a large batch would only take longer."""


def predict(
    config: Config,
    timing: Timing,
    lengths: Lengths,
    methods: list[str],
    trace: Trace | None,
    watch: Watch = unwatched,
) -> list[Prediction]:
    """Each method's prediction, seconds on the machines of the plan."""
    if trace is None:
        trace = made_up_trace(config, lengths)
    tokens = float(np.mean([step.rollouts.lengths.sum() for step in trace.steps]))
    seconds, scale = timing.seconds, tokens / timing.tokens_generated
    # a replayed step has fewer tokens than a real one: each stands for 1 / `scale` of them
    update_s = seconds["log-probs"] + seconds["update"]
    fixed_s = seconds["sync"] + seconds["checkpoint"] + seconds["other"]
    update_s_per_1k = update_s / scale / timing.tokens_trained * 1000
    costs = CostModel(timing.rollout.scaled(scale), update_s_per_1k, fixed_s, timing.overlaps)
    return [simulate(trace, method, costs, watch) for method in methods]


def made_up_trace(config: Config, lengths: Lengths) -> Trace:
    """Rollouts of prompts whose pass rate never changes, in a run where nothing is pruned."""
    small = copy.deepcopy(config)
    updates = small.objective.updates_per_step
    small.rollout.prompts_per_step = min(small.rollout.prompts_per_step, -(-_PROMPTS // updates) * updates)
    small.steps = _STEPS
    planned, size = planned_prompts(small), small.rollout.completions_per_prompt
    num_prompts = 4 * planned
    random = generator(0, "plan")
    solved = random.beta(0.5, 0.5, num_prompts)
    usual = random.lognormal(0.0, SPREAD, num_prompts)
    limit = small.rollout.sampling.max_completion_tokens
    steps = []
    for step in range(_STEPS):
        prompts = random.permutation(num_prompts)[:planned]
        rewards = (random.random((planned, size)) < solved[prompts, None]).astype(np.float64)
        drawn = usual[prompts, None] * random.lognormal(0.0, SPREAD, (planned, size))
        tokens = capped(drawn, lengths.completion, limit)
        rollouts = Rollouts(rewards, tokens, np.sqrt(tokens.astype(np.float64)))
        kept = np.ones(planned * size, dtype=np.bool_)
        steps.append(TracedStep(step, prompts, rollouts, kept, {"rollout": 1.0, "update": 1.0, "other": 0.0}))
    return Trace(small, num_prompts, None, None, steps)
