"""A step without feedback leaves nothing behind, whatever the method, and a state is a copy."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import pytest

from dppo_megatron.config.schema import Config
from dppo_megatron.config.selection import selection_settings
from dppo_megatron.pruning import StepCost
from dppo_megatron.pruning.policies import COMPLETION_POLICIES, PROMPT_POLICIES
from dppo_megatron.pruning.scores import MeasuredCost, floor_share
from dppo_megatron.selection import PromptDraw, Rollouts, Selector, TrainSelection

NUM_PROMPTS, G, STEPS = 64, 4, 9


def make(
    prompt: str = "none", completion: str = "none", *, ahead: int = 0, by_pass_rate: bool = False, planned: int = 8
) -> Selector:
    """By pass rate: of so few prompts that epochs begin inside steps."""
    config = Config(steps=12)
    if by_pass_rate:
        config.data.order, config.data.order_by = "hard_first", "pass_rate"
    config.rollout.prompts_per_step, config.rollout.completions_per_prompt = planned, G
    config.rollout.async_steps = ahead
    config.objective.normalization = "token_mean"
    config.pruning.prompt.method, config.pruning.completion.method = prompt, completion
    config.pruning.prompt.warmup_epochs = 0.0
    return Selector(selection_settings(config), 20 if by_pass_rate else NUM_PROMPTS)


def finish(selector: Selector, chosen: PromptDraw, number: int) -> TrainSelection:
    """A step's end with random outcomes, most groups of which are easy or hard."""
    rng = np.random.default_rng(number)

    def outcomes(count: int) -> np.ndarray:
        return ((rng.random((count, G)) < 0.3) & (rng.random((count, 1)) < 0.7)).astype(np.float64)

    rewards = outcomes(len(chosen.prompt_index))
    while (more := selector.refill(rewards, number)) is not None:
        rewards = np.concatenate([rewards, outcomes(len(more.prompt_index))])
    return selector.finish(Rollouts(rewards, rng.integers(1, 20, rewards.shape), rng.random(rewards.shape)), number)


def cost(number: int) -> StepCost:
    return StepCost(number, rollout_s=1.0, update_s=1.0, other_s=0.1 * number)


def decisions_equal(one: TrainSelection, other: TrainSelection) -> None:
    for name in ("kept", "weight", "advantages", "denominator", "minibatch", "offered"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    assert one.ledger == other.ledger and one.metrics == other.metrics


LEVELS: list[dict[str, Any]] = [
    *({"prompt": m} for m in PROMPT_POLICIES),
    *({"completion": m} for m in COMPLETION_POLICIES),
    {"prompt": "support.policies:Hoarder"},
    *({"prompt": m, "by_pass_rate": True} for m in ("none", "dppo", "dynamic_sampling")),
]


def play(
    selector: Selector, first: int, ahead: int, states: list[dict[str, Any]], last: int = STEPS - 1
) -> list[TrainSelection]:
    """Steps `first` to `last`, each begun while `ahead` before it are open; collects the state at every moment,
    which nothing later may change."""
    decisions, chosen, copies = [], {}, []
    for number in range(first, last + 1):
        for one in range(number, min(number + ahead, max(last, STEPS - 1)) + 1):
            if one not in chosen:
                chosen[one] = selector.begin(one)
                copies.append(selector.state_dict())
        decisions.append(finish(selector, chosen[number], number))
        copies.append(selector.state_dict())
        np.testing.assert_equal(copies[-1], copies[-2])
        selector.feedback(cost(number))
        states.append(selector.state_dict())
        copies += [deepcopy(states[-1]), states[-1]]
    np.testing.assert_equal(copies[-2], copies[-1])
    return decisions


@pytest.mark.parametrize("methods", LEVELS, ids=str)
@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_a_step_without_feedback_leaves_nothing_behind(methods: dict[str, Any], ahead: int) -> None:
    """At every moment of a step, with up to three more open, the state is the one before it; a selector that takes it
    over decides as the one that was never interrupted, with all of them open again or none."""
    states: list[dict[str, Any]] = [make(**methods, ahead=ahead).state_dict()]
    decisions = play(make(**methods, ahead=ahead), 1, ahead, states)
    as_they_were = deepcopy(states)
    for first in (1, 3, 7):
        for again in {0, ahead}:
            resumed = make(**methods, ahead=ahead)
            resumed.load_state_dict(states[first - 1])
            later: list[dict[str, Any]] = []
            found = play(resumed, first, again, later)
            for one, other in zip(found, decisions[first - 1 :], strict=True):
                if again == ahead:
                    decisions_equal(one, other)
                elif methods.get("prompt") not in ("dynamic_sampling", "greso"):
                    # figures of the history are those of the last step that has begun, and a refill moves what follows
                    np.testing.assert_array_equal(one.offered, other.offered)
                    np.testing.assert_array_equal(one.weight, other.weight)
    np.testing.assert_equal(states, as_they_were)


@pytest.mark.parametrize(("before", "now"), [(8, 16), (16, 8), (8, 4), (8, 8)])
@pytest.mark.parametrize("ahead", [0, 2])
def test_a_resume_with_other_numbers_of_prompts_goes_on_in_the_epoch(before: int, now: int, ahead: int) -> None:
    """`checkpoint.may_change` permits it: each prompt of the epoch comes once, those that had been chosen ahead too."""
    states: list[dict[str, Any]] = []
    first = make(ahead=ahead, planned=before)
    [decision] = play(first, 1, ahead, states, last=1)
    resumed = make(ahead=ahead, planned=now)
    resumed.load_state_dict(states[0])
    left = (NUM_PROMPTS - before) // now
    later = play(resumed, 2, ahead, [], last=1 + left)
    offered = np.concatenate([one.offered for one in (decision, *later)])
    assert len(np.unique(offered)) == len(offered) == before + left * now


@pytest.mark.parametrize(("before", "now"), [(3, 1), (3, 0), (2, 3), (1, 1)])
def test_a_resume_with_fewer_steps_ahead_learns_each_step_once(before: int, now: int) -> None:
    """A run that is stopped in the first step after it saves what this step was chosen with."""
    states: list[dict[str, Any]] = []
    play(make("dppo", ahead=before), 1, before, states)
    first, again = make("dppo", ahead=now), make("dppo", ahead=now)
    first.load_state_dict(states[-1])
    chosen = first.begin(STEPS)
    again.load_state_dict(first.state_dict())
    same = again.begin(STEPS)
    decisions_equal(finish(first, chosen, STEPS), finish(again, same, STEPS))
    first.feedback(cost(STEPS))
    again.feedback(cost(STEPS))
    np.testing.assert_equal(first.state_dict(), again.state_dict())


def test_the_order_of_the_calls_is_checked() -> None:
    selector = make("dppo", ahead=1)
    chosen = selector.begin(1)
    with pytest.raises(ValueError, match="feedback of step 1, which is not the oldest step that is finished"):
        selector.feedback(cost(1))
    ahead = selector.begin(2)
    with pytest.raises(ValueError, match="step 3 begins, but step 1 has had no feedback"):
        selector.begin(3)
    finish(selector, ahead, 2)
    with pytest.raises(ValueError, match="feedback of step 2, which is not the oldest"):
        selector.feedback(cost(2))
    finish(selector, chosen, 1)
    selector.feedback(cost(1))
    selector.feedback(cost(2))
    with pytest.raises(ValueError, match="step 2 has not begun, or is done"):
        selector.finish(Rollouts(np.zeros((1, G)), np.ones((1, G), int), np.ones((1, G))), 2)
    selector = make("dppo")
    finish(selector, selector.begin(1), 1)
    with pytest.raises(ValueError, match="step 2 begins, but step 1 has had no feedback"):
        selector.begin(2)


@pytest.mark.parametrize("floor", [0.0, 0.3, 0.6])
def test_floor_is_measured_and_not_imagined(floor: float) -> None:
    """Seconds with a floor, 3 % noise and kept shares that differ: the floor within 0.1, and the ratio that of
    numpy's line. Without one, or where all steps keep the same, the ratio is that of proportional seconds, exactly."""
    rng = np.random.default_rng(7)
    kept = np.concatenate([np.ones(10), rng.uniform(0.5, 0.8, 30)])
    seconds = 10 * (floor + (1 - floor) * kept) * rng.normal(1, 0.03, 40)
    control, plain, alike = MeasuredCost(), MeasuredCost(), MeasuredCost()
    for share, took in zip(kept.tolist(), seconds.tolist(), strict=True):
        control.observe_cost(1.0, took, share, has_floor=True)
        plain.observe_cost(1.0, took, share)
        alike.observe_cost(1.0, took, 0.7, has_floor=True)
    found = floor_share(control.seconds)
    assert found == pytest.approx(floor, abs=0.1)
    assert floor_share(alike.seconds) == 0
    if floor:
        slope, intercept = np.polyfit(kept, seconds, 1, w=0.98 ** (np.arange(39, -1, -1) / 2))
        assert found == pytest.approx(intercept / (intercept + slope), rel=0.15)
        assert control.cost_ratio > plain.cost_ratio
    else:
        assert found == 0 and control.cost_ratio == plain.cost_ratio
    resumed = MeasuredCost()
    resumed.load_state_dict(control.state_dict())
    assert resumed == control
