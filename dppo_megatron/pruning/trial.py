"""Tries a user's own policies at the start of a run, which would reach them late: after the warm-up, often an epoch."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import numpy as np

from dppo_megatron.config.plugins import is_plugin
from dppo_megatron.config.pruning import PromptPruningConfig, PruningConfig
from dppo_megatron.pruning.custom import Choice, CustomPolicy, Plugged
from dppo_megatron.pruning.designs import Draw
from dppo_megatron.pruning.interface import CompletionBatch, StepCost
from dppo_megatron.pruning.policies import make_completion_policy, make_prompt_policy
from dppo_megatron.randomness import generator
from dppo_megatron.types import FloatArray, IntArray, PromptFeatures, UserError

_STEPS = 10**9
"""Total steps of a trial run: so many that the first step after the warm-up is before annealing and prunes."""
_DRAWS = 200
"""Most draws that are compared: at a probability of 0.93, 191 equal ones have a chance of 1e-6."""
_LEAST_CHANCE = 1e-6
_INSTEAD = "draw from np.random.default_rng([self.seed, step, minibatch])"

Question = tuple[Any, int, int]
"""Arguments of `choose`: candidates, step, mini-batch."""
Offer = Callable[[int], tuple[Any, Any, int]]
"""Draw number -> candidates, as many others, and the step, from 0, in which a run would offer both."""


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
def try_policies(
    config: PruningConfig, groups: int, size: int, longest: int, slope: float, updates: int, steps: int
) -> None:
    """Make the user's own policies before anything is loaded, and let the completion policy choose from a made-up batch
    (`groups` of `size` completions of at most `longest` tokens) and from an empty one. Raises UserError."""
    if is_plugin(config.completion.method):
        policy = make_completion_policy(
            config.completion, seed=0, total_steps=_STEPS, zero_advantage_slope=slope, group_size=size
        )
        batch = _made_up_batch(groups, size, longest)
        for rows in (np.arange(len(batch)), np.arange(0)):
            policy.prune(batch.take(rows), step=policy.warmup_steps)
        first = batch.take(np.arange(max(groups // 2, 1) * size))
        others = replace(first, prompt_index=first.prompt_index + len(first) // size)
        _try_draws(cast(Plugged, policy), lambda draw: (first, others, policy.warmup_steps + draw), updates, 1, steps)
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
    config: PromptPruningConfig, features: PromptFeatures, offered: int, size: int, limit: int, updates: int, steps: int
) -> None:
    """Let the user's own policy choose from `offered` prompts, each visited once. Raises UserError."""
    if not is_plugin(config.method):
        return
    run = {"completions_per_prompt": size, "prompts_per_step": offered, "total_steps": _STEPS, "seed": 0}
    policy = make_prompt_policy(config, num_prompts=len(features.level), features=features, **run)
    count = len(features.level)
    num = min(offered, count)
    half, steps_of_epoch = max(num // 2, 1), count // num
    epoch = -(-count // offered)
    order = generator(0, "prompts of a trial").permutation(count)  # a run's prompts have no pattern either

    def offer(draw: int) -> tuple[IntArray, IntArray, int]:
        """Each step of an epoch has other prompts, all of them visited before."""
        epochs, place = divmod(draw, steps_of_epoch)
        step = policy.warmup_steps + epochs * epoch + place
        ids = np.unique(order[(place * num + np.arange(max(num, 2 * half))) % count])
        policy.observe(ids, *_made_up_outcomes(len(ids), size, limit), step=max(min(step, steps) - 1, 0))
        return ids[:half], ids[half : 2 * half], step

    offer(0)
    policy.select(order[:num], step=policy.warmup_steps)
    _try_draws(cast(Plugged, policy), offer, min(updates, count), epoch, steps)  # a single prompt has no others


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


def _try_draws(policy: Plugged, offer: Offer, updates: int, epoch: int, steps: int) -> None:
    """Compare what the policy draws where draws have to be equal, and where they have to be independent.

    Args:
        updates: in a step.
        epoch: steps after which the same candidates come again, and may be drawn anew.
        steps: of the run; nothing is asked of later ones.

    Raises:
        UserError: equal arguments get different answers and no state is saved; or a `Draw` repeats.
    """
    same, _, start = offer(0)
    independent = ["update"] if updates > 1 else []
    if policy.own_class.own_state is CustomPolicy.own_state:  # else it may draw from what it learns in a step
        _check_equal(policy, (same, start, 0))
        independent += ["step", "epoch"] if epoch > 1 else ["epoch"]
    chances = dict.fromkeys(independent, 1.0)  # that independent draws are equal as often as these were
    for draw in range(_DRAWS):
        rows, others, now = offer(draw)
        before = start + draw * epoch
        pairs = {
            "update": ((rows, now, 0), (others, now, 1)),
            "step": ((rows, now, 0), (others, now + 1, 0)),
            "epoch": ((same, before, 0), (same, before + epoch, 0)),  # all rows of an epoch may share a draw
        }
        for what in list(chances):
            first, second = pairs[what]
            equal = _chance_of_equal(policy, first, second) if second[1] < steps else None
            if equal is None:
                del chances[what]
                continue
            chances[what] *= equal
            if chances[what] < _LEAST_CHANCE:
                where = "step" if epoch == 1 and what == "epoch" else what
                raise UserError(
                    f"{policy.setting}: choose: {draw + 1} draws in a row keep the same rows as in the next {where}:"
                    f" {_INSTEAD}"
                )
        policy.feedback(StepCost(draw + 1, 1.0, 1.0, 1.0))
        if not chances:
            break


def _check_equal(policy: Plugged, question: Question) -> None:
    """Raise UserError unless equal arguments get equal answers."""
    first = _kept(_answer(policy, question))
    for _ in range(10):
        if not np.array_equal(first, _kept(_answer(policy, question))):
            raise UserError(
                f"{policy.setting}: choose answers equal arguments differently and has no own_state to resume from:"
                f" {_INSTEAD}"
            )


def _chance_of_equal(policy: Plugged, first: Question, second: Question) -> float | None:
    """The most that it can be for independent draws; None: the answers differ or are no draws, or the chance is so high
    that no number of equal draws could decide."""
    before, after = _answer(policy, first), _answer(policy, second)
    if not isinstance(after, Draw) or (_kept(before) != after.kept).any():
        return None
    pi = after.inclusion_prob
    # all rows may be kept together or left out together, so only the least certain one counts
    equal = float(np.maximum(pi, 1 - pi).min(initial=1.0))
    return None if equal**_DRAWS > _LEAST_CHANCE else equal


def _answer(policy: Plugged, question: Question) -> Choice:
    candidates, step, minibatch = question
    return policy.call_choose(copy.deepcopy(candidates), len(candidates), step, minibatch)


def _kept(choice: Choice) -> Any:
    return choice.kept if isinstance(choice, Draw) else choice
