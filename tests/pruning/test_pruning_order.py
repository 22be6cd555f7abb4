"""Sorted orders: what their ledger row says is so, and pruning, which draws from what comes, stays unbiased."""

from __future__ import annotations

import numpy as np
import pytest

from dppo_megatron.config.data import DataConfig
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


def _rate(index: np.ndarray) -> np.ndarray:
    """Of the made-up model: what it gets right of G."""
    return index % (G + 1)


def _step(selector: Selector, number: int) -> np.ndarray:
    chosen = selector.begin(number).prompt_index
    rewards = (np.arange(G) < _rate(chosen)[:, None]).astype(np.float64)
    selector.finish(Rollouts(rewards, np.full(rewards.shape, 5), np.ones(rewards.shape)), number)
    selector.feedback(StepCost(number, 1.0, 1.0, 0.1))
    return chosen
