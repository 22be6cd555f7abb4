"""advantage=posterior_loo has the expected gradient of rloo, with less noise; where it has not, a label says so.

Every group of three answers of a tiny autoregressive policy, each as likely as it is: no sampling error, only rounding.
Answers are one to three tokens long, and what they earn depends on their length.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from dppo_megatron.algorithms.advantages import (
    denominators,
    early_stop_advantages,
    make_advantages,
    posterior_advantages,
)
from dppo_megatron.algorithms.objectives import make_objective
from dppo_megatron.algorithms.tokens import TokenBatch
from dppo_megatron.config.objective import CorrectionConfig, ObjectiveConfig, OverlongConfig
from dppo_megatron.config.pruning import EarlyStopConfig
from dppo_megatron.config.schema import Config
from dppo_megatron.config.selection import selection_settings
from dppo_megatron.pruning import StepCost
from dppo_megatron.pruning.early_stop import end_probability
from dppo_megatron.selection import Rollouts, Selector

VOCABULARY, LONGEST, END, GROUP = 3, 3, 0, 3
PRIOR = (4.0, 1.0)
"""Far from the true mean of 0.4 or so."""


def _answers(prefix: tuple[int, ...] = ()) -> list[tuple[int, ...]]:
    if len(prefix) == LONGEST or prefix[-1:] == (END,):
        return [prefix]
    return [answer for token in range(VOCABULARY) for answer in _answers((*prefix, token))]


ANSWERS = _answers()
PREFIXES = sorted({answer[:at] for answer in ANSWERS for at in range(len(answer))})
LENGTHS = np.array([len(answer) for answer in ANSWERS])
REWARDS = np.where(np.random.default_rng(3).random(len(ANSWERS)) < 0.15 * LENGTHS, 1.0, 0.0)
PENALTY = -0.5 * (LENGTHS == LONGEST)
"""What a completion that fills the limit loses, of which `PRIOR` knows nothing."""
GROUPS = np.array(list(itertools.product(range(len(ANSWERS)), repeat=GROUP)))
BEHAVIOUR = torch.from_numpy(np.random.default_rng(1).normal(size=(len(PREFIXES), VOCABULARY)))
LATER = BEHAVIOUR + 0.4 * torch.from_numpy(np.random.default_rng(2).normal(size=BEHAVIOUR.shape))


def _logprobs(policy: torch.Tensor, answer: tuple[int, ...]) -> torch.Tensor:
    rows = [PREFIXES.index(answer[:at]) for at in range(len(answer))]
    return torch.log_softmax(policy, -1)[rows, list(answer)]


CHANCES = np.exp([float(_logprobs(BEHAVIOUR, answer).sum()) for answer in ANSWERS])


def _terms(
    config: ObjectiveConfig, policy: torch.Tensor, advantages: np.ndarray, weight: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Mean over all groups of the gradient of one group's loss, and of its square; advantages and what each completion
    counts [groups, GROUP]."""
    objective, known = make_objective(config), dict[tuple[int, float], np.ndarray]()
    divisor = denominators(
        config.normalization, LENGTHS[GROUPS], np.zeros(len(GROUPS)), nominal=GROUP, max_completion_tokens=LONGEST
    )

    def gradient(which: int, advantage: float) -> np.ndarray:
        if (which, advantage) not in known:
            answer, free = ANSWERS[which], policy.clone().requires_grad_()
            now, theirs = _logprobs(free, answer), _logprobs(BEHAVIOUR, answer)
            old = theirs if config.correction.level == "none" else now.detach()
            every, same = torch.ones(len(answer), dtype=torch.float64), torch.zeros(len(answer), dtype=torch.int64)
            batch = TokenBatch(now, 0 * every, theirs, old, 0 * every, advantage * every, every, same)
            [found] = torch.autograd.grad(objective(batch).loss.sum(), free)
            known[which, advantage] = found.numpy().ravel()
        return known[which, advantage]

    mean, square = np.zeros(policy.numel()), np.zeros(policy.numel())
    counts = np.ones(advantages.shape) if weight is None else weight
    for group, row, by in zip(GROUPS.tolist(), advantages.tolist(), divisor / np.maximum(counts, 1e-300), strict=True):
        chance = float(np.prod(CHANCES[group]))
        one = sum(gradient(i, round(a, 12)) / d for i, a, d in zip(group, row, by, strict=True))
        mean, square = mean + chance * one, square + chance * one**2
    return mean, square


def _compared(
    known: tuple[float, float] = PRIOR, penalty: np.ndarray = 0 * PENALTY, **changes: Any
) -> tuple[float, float]:
    """Relative difference of posterior_loo's expected gradient from rloo's; its noise over the other's."""
    policy = LATER if changes.pop("later", False) else BEHAVIOUR
    both = []
    for advantage in ("posterior_loo", "rloo"):
        config = ObjectiveConfig(advantage=advantage, **changes)  # type: ignore[arg-type]
        prior = np.tile(known, (len(GROUPS), 1))
        given: dict[str, Any] = {"lengths": LENGTHS[GROUPS], "prior": prior, "penalty": penalty[GROUPS]}
        advantages = make_advantages(REWARDS[GROUPS], config, **given)
        mean, square = _terms(config, policy, advantages)
        both.append((mean, float((square - mean**2).sum())))
    (mine, noise), (wanted, other) = both
    return float(np.linalg.norm(mine - wanted) / np.linalg.norm(wanted)), noise / other


@pytest.mark.parametrize("normalization", ["constant", "sequence_mean"])
@pytest.mark.parametrize("loss", ["clip", "gspo", "cispo"])
def test_expected_gradient_is_that_of_rloo(normalization: str, loss: str) -> None:
    assert _compared(normalization=normalization, loss=loss)[0] < 1e-12
    assert _compared(penalty=PENALTY, normalization=normalization, loss=loss)[0] < 1e-12


@pytest.mark.parametrize(("loss", "most"), [("clip", 0.2), ("cispo", 0.2), ("cispo", 1e8)])
def test_off_policy_a_bound_makes_a_baseline_count(loss: str, most: float) -> None:
    """Which is why the ledger calls it biased there: with a bounded ratio a score has no longer mean 0, and a clip goes
    by the sign of the advantage. Without a bound it would be rloo's gradient."""
    off, _ = _compared(normalization="constant", loss=loss, later=True, clip_low=min(most, 1.0), clip_high=most)
    assert off < 1e-12 if most > 1 else off > 0.005


@pytest.mark.parametrize("normalization", ["constant", "sequence_mean"])
@pytest.mark.parametrize(("mode", "bounds"), [("truncate", (1e9, 0.8)), ("truncate", (1.1, 0.0)), ("mask", (1e9, 0.8))])
def test_a_whole_ratio_keeps_it_off_policy(normalization: str, mode: str, bounds: tuple[float, float]) -> None:
    """Of older weights, with the completion's ratio: rloo's gradient where nothing bounds it, and the label says so."""
    correction = CorrectionConfig("sequence", mode, *bounds)  # type: ignore[arg-type]
    off, _ = _compared(normalization=normalization, later=True, correction=correction)
    label = _label(age=1, normalization=normalization, correction=correction)
    assert label == ("unbiased" if off < 1e-12 else "biased") and not 1e-12 < off < 0.005


def test_the_plain_baseline_would_favour_a_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """r - b over its own length, the same enumeration: off by more than a hundredth where b is far from the mean."""
    monkeypatch.setattr(
        "dppo_megatron.algorithms.advantages.posterior_advantages",
        lambda rewards, prior, lengths: posterior_advantages(rewards, prior),
    )
    assert _compared(normalization="sequence_mean", loss="clip")[0] > 0.01


CUT, MASK = CorrectionConfig("token", max_ratio=1.1), CorrectionConfig("token", "mask", 2.0, 0.8)


@pytest.mark.parametrize(
    ("advantage", "normalization", "changes"),
    [
        ("rloo", "constant", {}),
        ("rloo", "sequence_mean", {}),
        ("posterior_loo", "constant", {}),
        ("posterior_loo", "sequence_mean", {}),
        ("rloo", "sequence_mean", {"correction": CUT}),
        ("rloo", "constant", {"correction": CUT, "clip_low": 0.0, "clip_high": 0.0}),
        ("rloo", "constant", {"correction": MASK, "loss": "gspo"}),
        ("rloo", "constant", {"correction": replace(CUT, level="sequence"), "dual_clip": 3.0}),
        ("rloo", "sequence_mean", {"correction": replace(CUT, level="cumulative")}),
        ("rloo", "sequence_mean", {"loss": "cispo"}),
        ("group_mean", "sequence_mean", {"correction": CUT}),
        ("posterior_loo", "sequence_mean", {"correction": CUT}),
        ("posterior_loo", "constant", {"correction": CUT}),
        ("posterior_loo", "constant", {"loss": "cispo"}),
        ("posterior_loo", "constant", {"clip_low": 0.0, "clip_high": 0.0}),
        ("rloo", "constant", {"clip_low": 0.0, "clip_high": 0.0}),
    ],
)
def test_stopping_early_keeps_the_expected_gradient(
    advantage: str, normalization: str, changes: dict[str, Any]
) -> None:
    """Over all groups, and all ways in which their completions of two and three tokens are stopped early or not; and
    mates that came to their end, which are short ones, are no fair mean. Of older weights too, whatever a correction or
    CISPO cuts; not where a clip goes by the sign, or the mates' lengths, which divide, shift the baseline's mean."""
    config = ObjectiveConfig(advantage=advantage, normalization=normalization, **changes)  # type: ignore[arg-type]
    policy = LATER if changes else BEHAVIOUR
    rewards, lengths = REWARDS[GROUPS], LENGTHS[GROUPS]
    known = np.broadcast_to(PRIOR, (len(GROUPS), 2))
    given: dict[str, Any] = {"lengths": lengths, "prior": known, "penalty": PENALTY[GROUPS]}
    whole = make_advantages(rewards, config if changes else ObjectiveConfig(advantage="rloo"), **given)
    full, _ = _terms(config, policy, whole)
    share = 1 - 1 / GROUP if advantage == "group_mean" else 1.0  # as the selector counts it
    early = EarlyStopConfig(after_tokens=1, min_inclusion_prob=0.4)
    ends = end_probability(early, LENGTHS)
    assert set(ends.tolist()) == {1.0, 0.5, 0.4}
    found, naive = np.zeros(full.shape), np.zeros(full.shape)
    for pattern in itertools.product((False, True), repeat=GROUP):
        gone = np.array(pattern)
        chance = np.where(gone, 1 - ends[GROUPS], ends[GROUPS]).prod(axis=1)
        counts = np.where(gone, 0.0, 1 / ends[GROUPS])
        there = np.where(gone, np.nan, rewards)
        own = make_advantages(there, config, stands_for=counts, **given)
        found += _terms(config, policy, share * own, counts * chance[:, None])[0]
        plain = make_advantages(there, config, **given)
        naive += _terms(config, policy, plain, counts * chance[:, None])[0]
    scale = np.linalg.norm(full)
    off, names = float(np.linalg.norm(found - full) / scale), {"early_stop": 1, "age": int(bool(changes))}
    label = _label(**names, row="rollout/early_stop", advantage=advantage, normalization=normalization, **changes)
    assert label == ("unbiased" if off < 1e-9 else "biased") and not 1e-9 < off < 1e-4, off
    assert np.linalg.norm(naive - full) > 0.03 * scale


@pytest.mark.parametrize("normalization", ["constant", "sequence_mean"])
def test_a_good_prior_has_less_noise(normalization: str) -> None:
    """Of eight visits at the true rate."""
    rate = float(CHANCES @ REWARDS)
    off, noise = _compared((8 * rate, 8 * (1 - rate)), normalization=normalization)
    assert off < 1e-12 and noise < 0.95


@pytest.mark.parametrize("visits", [1, 4, 40])
def test_a_penalty_of_length_adds_no_noise(visits: int) -> None:
    """Of groups of eight, one completion in 20 right and four in five cut off, which lose 1: by all ways in which a
    group falls out, E[A^2] is below rloo's. A prior of rewards without the penalty, held against rewards with it, makes
    it 1.6 to 2.7 times as much."""
    size, chances = 8, np.array([0.05, 0.15, 0.8])  # right, wrong, cut off
    counts = np.array([found for found in np.ndindex(size + 1, size + 1, size + 1) if sum(found) == size])
    ways = np.array([math.factorial(size) / math.prod(map(math.factorial, found)) for found in counts.tolist()])
    chance = ways * np.prod(chances**counts, axis=1)
    kinds = np.stack([np.repeat(np.arange(3), found) for found in counts])
    prior = np.tile([0.5 + visits * size * 0.05, 0.5 + visits * size * 0.95], (len(kinds), 1))
    right, lost = np.where(kinds == 0, 1.0, 0.0), np.where(kinds == 2, -1.0, 0.0)

    def noise(rewards: np.ndarray, config: ObjectiveConfig, penalty: np.ndarray | None) -> float:
        advantages = make_advantages(rewards, config, prior=prior, penalty=penalty)
        return float(chance @ np.square(advantages).mean(axis=1))

    posterior, other = ObjectiveConfig(advantage="posterior_loo"), ObjectiveConfig(advantage="rloo")
    assert chance.sum() == pytest.approx(1.0)
    assert noise(right, posterior, lost) < noise(right, other, lost) < noise(right + lost, posterior, None) / 1.5


def test_the_worked_example_and_what_is_not_there() -> None:
    """A failed grading is nobody's other; one reward alone has no baseline; flat groups have an advantage."""
    rewards = np.array([[1.0, 0.0, 0.0], [1.0, 1.0, np.nan], [1.0, np.nan, np.nan]])
    found = posterior_advantages(rewards, np.tile([3.0, 1.0], (3, 1)))
    np.testing.assert_allclose(found, [[1 / 2, -2 / 3, -2 / 3], [1 / 5, 1 / 5, 0], [0, 0, 0]])
    same = posterior_advantages(rewards, np.tile([3.0, 1.0], (3, 1)), np.full((3, 3), 7))
    np.testing.assert_allclose(same, found, atol=1e-15)


def _label(age: int = 0, early_stop: int = 0, row: str = "advantage/posterior_loo", **objective: Any) -> str:
    config = Config(objective=ObjectiveConfig(**{"advantage": "posterior_loo"} | objective))
    config.rollout.prompts_per_step, config.rollout.completions_per_prompt = 4, 3
    config.rollout.async_steps, config.pruning.early_stop.after_tokens = age, early_stop
    selector = Selector(selection_settings(config), 4)
    selector.begin(1)
    shape = (4, 3)
    ends = np.ones(shape) if early_stop else None
    table = Rollouts(np.eye(4)[:, :3], np.full(shape, 5), np.ones(shape), stands_for=ends)
    return next(one.label for one in selector.finish(table, 1).ledger if one.name == row)


def test_without_a_penalty_nothing_is_added_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """`overlong.buffer_tokens` 0 is the default: a second pass over all groups would add zeros."""
    passes = []

    def counted(*given: Any, **options: Any) -> Any:
        passes.append(given)
        return early_stop_advantages(*given, **options)

    monkeypatch.setattr("dppo_megatron.algorithms.advantages.early_stop_advantages", counted)
    assert _label() == "unbiased" and len(passes) == 1
    _label(overlong=OverlongConfig(buffer_tokens=4))
    assert len(passes) == 3


def test_labels_say_where_it_holds() -> None:
    assert _label() == _label(normalization="constant") == "unbiased"
    assert _label(normalization="token_mean") == "ratio"
    assert _label(updates_per_step=2) == _label(loss="cispo", updates_per_step=2) == _label(age=1) == "biased"


def test_the_prior_is_what_was_known_before_the_step() -> None:
    """Of the history when the step was chosen, without the steps that were open then; alike after a resume."""
    config = Config(objective=ObjectiveConfig(advantage="posterior_loo"))
    config.rollout.prompts_per_step, config.rollout.completions_per_prompt, config.rollout.async_steps = 2, 2, 1
    config.pruning.prompt.method = config.pruning.completion.method = "none"

    def right(count: int) -> Rollouts:
        return Rollouts(np.ones((count, 2)), np.full((count, 2), 4), np.ones((count, 2)))

    selector, again = (Selector(selection_settings(config), 2) for _ in range(2))
    selector.begin(1)
    selector.begin(2)
    first = selector.finish(right(2), 1)
    selector.feedback(StepCost(1, 1.0, 1.0, 0.1))
    saved, second = selector.state_dict(), selector.finish(right(2), 2)
    selector.feedback(StepCost(2, 1.0, 1.0, 0.1))
    selector.begin(3)
    third = selector.finish(right(2), 3)
    assert first.prior is not None and second.prior is not None and third.prior is not None
    assert first.prior.tolist() == second.prior.tolist() == [[0.5, 0.5]] * 2
    right_twice = (
        0.5 + 0.7 * (0.7 * 0.5 + 2 - 0.5),
        0.5 + 0.7 * (0.7 * 0.5 - 0.5),
    )  # two epochs ago, as step 2 is not known
    np.testing.assert_allclose(third.prior, [right_twice] * 2)
    again.load_state_dict(saved)
    again.begin(2)
    assert np.array_equal(again.finish(right(2), 2).advantages, second.advantages)
