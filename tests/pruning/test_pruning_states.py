"""A saved state is a copy: steps that come after it do not move it, whatever the method."""

from __future__ import annotations

from copy import deepcopy

import numpy as np
import pytest

from dppo_megatron.config.pruning import COMPLETION_METHODS, PROMPT_METHODS
from dppo_megatron.config.schema import Config
from dppo_megatron.selection import Rollouts, Selector

NUM_PROMPTS, G = 64, 4


def make(prompt="none", completion="none"):
    config = Config(steps=12)
    config.rollout.prompts_per_step, config.rollout.completions_per_prompt = 8, G
    config.pruning.prompt.method, config.pruning.completion.method = prompt, completion
    config.pruning.prompt.warmup_epochs = 0.0
    return Selector(config, NUM_PROMPTS)


def step(selector, number):
    """One step with random outcomes, most groups of which are easy or hard."""
    rng = np.random.default_rng(number)

    def outcomes(count):
        return ((rng.random((count, G)) < 0.3) & (rng.random((count, 1)) < 0.7)).astype(np.float64)

    rewards = outcomes(len(selector.begin(number).prompt_index))
    while (more := selector.refill(rewards, number)) is not None:
        rewards = np.concatenate([rewards, outcomes(len(more.prompt_index))])
    rollouts = Rollouts(rewards, rng.integers(1, 20, rewards.shape), rng.random(rewards.shape))
    selector.finish(rollouts, number)
    selector.feedback(number, rollout_s=1.0, update_s=1.0, other_s=0.1, grad_norm=float(9 * rng.random()))


@pytest.mark.parametrize(
    "methods", [*({"prompt": m} for m in PROMPT_METHODS), *({"completion": m} for m in COMPLETION_METHODS)], ids=str
)
def test_a_state_stays_as_it_was_taken(methods):
    """The loop keeps the state of before a step while the step runs, for a checkpoint that may be wanted then."""
    selector = make(**methods)
    taken = []
    for number in range(1, 9):
        state = selector.state_dict()
        taken.append((state, deepcopy(state)))
        step(selector, number)
    for state, as_it_was in taken:
        np.testing.assert_equal(state, as_it_was)
