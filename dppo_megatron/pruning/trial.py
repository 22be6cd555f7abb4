"""Tries a user's own policies at the start of a run, which would reach them late: after the warm-up, often an epoch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from dppo_megatron.config.plugins import is_plugin
from dppo_megatron.config.pruning import PromptPruningConfig, PruningConfig
from dppo_megatron.pruning.interface import CompletionBatch, StepCost
from dppo_megatron.pruning.policies import make_completion_policy, make_prompt_policy
from dppo_megatron.randomness import generator
from dppo_megatron.types import FloatArray, IntArray, PromptFeatures, UserError

_STEPS = 10**9
"""Total steps of a trial run: so many that the first step after the warm-up is before annealing and prunes."""
_COST = StepCost(1, 1.0, 1.0, 1.0)


@contextmanager
def _random_state_restored() -> Iterator[None]:
    """Restores numpy's and Python's global generators, since a trial runs in the training process."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


@_random_state_restored()
def try_policies(config: PruningConfig, groups: int, size: int, longest: int, slope: float) -> None:
    """Make the user's own policies before anything is loaded, and let the completion policy choose from a made-up batch
    (`groups` of `size` completions of at most `longest` tokens) and from an empty one. Raises UserError."""
    if is_plugin(config.completion.method):
        policy = make_completion_policy(
            config.completion, seed=0, total_steps=_STEPS, zero_advantage_slope=slope, group_size=size
        )
        batch = _made_up_batch(groups, size, longest)
        for rows in (np.arange(len(batch)), np.arange(0)):
            policy.prune(batch.take(rows), step=policy.warmup_steps)
        policy.feedback(_COST)
    if is_plugin(config.prompt.method):
        try:
            make_prompt_policy(
                config.prompt, num_prompts=1, completions_per_prompt=size, prompts_per_step=1, total_steps=1, seed=0
            )
        except UserError as error:
            if error.__cause__ is None:  # the class itself is wrong, whatever its arguments
                raise
            trial = "tried with one prompt and no features before the data are read: look at them in choose"
            raise UserError(f"{error} ({trial})") from error


@_random_state_restored()
def try_prompt_policy(
    config: PromptPruningConfig, features: PromptFeatures, offered: int, size: int, longest: int
) -> None:
    """Let the user's own policy choose from `offered` prompts, each visited once. Raises UserError."""
    if not is_plugin(config.method):
        return
    count = len(features.level)
    run = {"completions_per_prompt": size, "prompts_per_step": offered, "total_steps": _STEPS, "seed": 0}
    policy = make_prompt_policy(config, num_prompts=count, features=features, **run)
    ids = generator(0, "prompts of a trial").permutation(count)[:offered]  # a run's prompts have no pattern either
    policy.observe(ids, *_made_up_outcomes(len(ids), size, longest), step=max(policy.warmup_steps - 1, 0))
    policy.select(ids, step=policy.warmup_steps)
    policy.feedback(_COST)


def _made_up_outcomes(groups: int, size: int, longest: int) -> tuple[FloatArray, IntArray]:
    """Rewards and lengths [groups, size]: each group has right and wrong completions, no length exceeds `longest`."""
    row, column = np.indices((groups, size))
    lengths = 1 + (100 + 37 * row % 300 + 10 * column) % longest
    return (column <= row % (size - 1)).astype(np.float64), lengths.astype(np.int64)


def _made_up_batch(groups: int, size: int, longest: int) -> CompletionBatch:
    rewards, lengths = _made_up_outcomes(groups, size, longest)
    return CompletionBatch.of_groups(
        np.arange(groups),
        rewards=rewards,
        advantages=rewards - rewards.mean(axis=1, keepdims=True),
        lengths=lengths,
        logit_grad_norm=0.3 * np.sqrt(lengths),
        denominator=groups * size * lengths.astype(np.float64),
        prompt_weight=np.ones(groups),
        num_nominal=groups * size,
        prompt_tokens=np.full(groups, 50),
    )
