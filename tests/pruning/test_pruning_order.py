"""Sorted orders: what their ledger row says is so, and pruning, which draws from what comes, stays unbiased."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dppo_megatron.config.data import DataConfig, TrainSetConfig
from dppo_megatron.config.schema import Config
from dppo_megatron.config.selection import selection_settings
from dppo_megatron.data.order import make_order
from dppo_megatron.pruning import StepCost
from dppo_megatron.selection import Rollouts, Selector
from dppo_megatron.steps.coordinator import order_row
from dppo_megatron.types import PromptFeatures

N, STEP, G = 24, 8, 4
LEVEL = np.repeat(np.arange(6.0), 4)[np.random.default_rng(3).permutation(N)]
FEATURES = PromptFeatures(np.ones(N, np.int64), LEVEL, np.zeros(N, np.int64), ("",))


def _selector(order: str, by: str = "level", seed: int = 0, method: str = "dppo") -> Selector:
    config = Config(seed=seed, steps=1000)
    config.data.order, config.data.order_by = order, by  # type: ignore[assignment]
    config.rollout.prompts_per_step, config.rollout.completions_per_prompt = STEP, G
    config.pruning.prompt.method, config.pruning.prompt.warmup_epochs = method, 0.0
    config.pruning.prompt.score = "beta"
    return Selector(selection_settings(config), N, features=FEATURES)


def test_a_drawn_prompt_stands_for_those_that_came() -> None:
    """Over 500 seeds the mean weight of each of a step's prompts is 1, within five standard errors, and that of others
    is 0: which come is the order's choice alone."""
    learned = _selector("file")
    for number in (1, 2, 3):
        _step(learned, number)
    total, square = np.zeros(N), np.zeros(N)
    for seed in range(500):
        selector = _selector("file", seed=seed)
        selector.load_state_dict(learned.state_dict())
        chosen = selector.begin(4)
        np.add.at(total, chosen.prompt_index, chosen.weight)
        np.add.at(square, chosen.prompt_index, chosen.weight**2)
        np.testing.assert_allclose(chosen.weight * chosen.inclusion_prob, 1.0)
    mean = total / 500
    error = np.sqrt((square / 500 - mean**2) / 500)
    assert (mean[STEP:] == 0).all() and (error[:STEP] > 0.01).sum() >= 2, "some prompts are skipped, others always kept"
    assert (abs(mean[:STEP] - 1) <= 5 * error[:STEP] + 1e-9).all()


def test_the_row_is_true() -> None:
    """Shuffled, a step's mean is in expectation that of all problems. Sorted, it is that of the easiest ones; but over
    an epoch both hold every problem once."""
    first = [make_order({"": N}, None, seed, STEP).take(0, STEP)[0] for seed in range(400)]
    means = LEVEL[np.array(first)].mean(axis=1)
    assert abs(means.mean() - LEVEL.mean()) < 5 * means.std() / 20
    for order, expected in (("easy_first", [0.5, 2.5, 4.5]), ("hard_first", [4.5, 2.5, 0.5])):
        for seed in range(20):
            selector = _selector(order, seed=seed, method="none")
            taken = [_step(selector, number) for number in (1, 2, 3)]
            assert [LEVEL[one].mean() for one in taken] == expected and len(set(np.concatenate(taken))) == N
        [row] = order_row(DataConfig(order=order))  # type: ignore[arg-type]
        assert (row.name, row.label, row.bias_estimate) == ("data/order", "biased", None)
        assert f"data.order = {order} by level" in row.note and "bias of unknown size" in row.note
    assert order_row(DataConfig()) == () and "by" not in order_row(DataConfig(order="file"))[0].note.split(":")[0]


@pytest.mark.parametrize(("order", "sign"), [("easy_first", -1), ("hard_first", 1)])
def test_the_models_own_pass_rate(order: str, sign: int) -> None:
    """After a first epoch that is shuffled, problems come by the rewards that the model got on them."""
    selector = _selector(order, "pass_rate", method="none")
    first = np.concatenate([_step(selector, number) for number in (1, 2, 3)])
    assert sorted(first) == list(range(N)) and (np.diff(_rate(first)) != 0).any()
    assert not (np.diff(sign * _rate(first)) >= 0).all()
    later = [np.concatenate([_step(selector, number) for number in steps]) for steps in ((4, 5, 6), (7, 8, 9))]
    for epoch in later:
        assert sorted(epoch) == list(range(N))
    # where an epoch begins, those of the last 7 places of the one before wait, so that no step holds a problem twice
    rates = sign * _rate(later[0])[STEP:]
    assert (np.diff(rates) >= 0).mean() > 0.8


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("seed", [1, 2])
def test_other_weights_and_steps_at_a_resume(ahead: int, seed: int) -> None:
    """Each set goes on where it was, in steps of the new shares: no problem comes again before its set's epoch ends."""
    sizes = {"a": 40, "b": 160}

    def selector(weight_of_b: float, per_step: int) -> Selector:
        config = Config(seed=seed, steps=1000)
        config.data.mixing = "weighted"
        config.data.train_sets = {"a": TrainSetConfig(path="a"), "b": TrainSetConfig(path="b", weight=weight_of_b)}
        config.rollout.prompts_per_step, config.rollout.completions_per_prompt = per_step, G
        config.pruning.prompt.method, config.rollout.async_steps = "none", ahead
        return Selector(selection_settings(config), 200, set_sizes=sizes)

    def steps(one: Selector, numbers: range) -> np.ndarray:
        begun = {number: one.begin(number).prompt_index for number in numbers[:ahead]}
        for number in numbers:
            begun[number + ahead] = one.begin(number + ahead).prompt_index
            shape = (len(begun[number]), G)
            one.finish(Rollouts(np.ones(shape), np.full(shape, 5), np.ones(shape)), number)
            one.feedback(StepCost(number, 1.0, 1.0, 0.1))
        return np.concatenate([begun[number] for number in numbers])

    seen, number, state = list[np.ndarray](), 1, dict[str, Any]()
    for weight, per_step, count in ((1.0, 8, 5), (3.0, 8, 4), (3.0, 8, 6), (1.0, 8, 1), (1.0, 24, 3)):
        one = selector(weight, per_step)
        if state:
            one.load_state_dict(state)
        seen.append(steps(one, range(number, number + count)))
        number, state = number + count, one.state_dict()
    of_a, of_b = (np.concatenate([found[(found >= 40) == of] for found in seen]) for of in (False, True))
    assert [(found < 40).sum() for found in seen] == [20, 8, 12, 4, 36]
    assert sorted(of_a[:40]) == sorted(of_a[40:]) == list(range(40)) and len(set(of_b)) == len(of_b) == 120


def _rate(index: np.ndarray) -> np.ndarray:
    """Of the made-up model: what it gets right of G."""
    return index % (G + 1)


def _step(selector: Selector, number: int) -> np.ndarray:
    chosen = selector.begin(number).prompt_index
    rewards = (np.arange(G) < _rate(chosen)[:, None]).astype(np.float64)
    selector.finish(Rollouts(rewards, np.full(rewards.shape, 5), np.ones(rewards.shape)), number)
    selector.feedback(StepCost(number, 1.0, 1.0, 0.1))
    return chosen
