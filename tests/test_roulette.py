"""`simulate --roulette`: its estimates by their definition, and its verdict in worlds where the truth is known."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from dppo_megatron.config.pruning import EarlyStopConfig
from dppo_megatron.config.schema import Config
from dppo_megatron.selection import Rollouts
from dppo_megatron.steps.rollout_cost import RolloutCost
from dppo_megatron.types import UserError
from dppo_megatron.workbench import roulette
from dppo_megatron.workbench.roulette import judge_roulette, roulette_json, roulette_table
from dppo_megatron.workbench.runs.trace import Trace, TracedStep
from dppo_megatron.workbench.simulate import StepTimeModel

COSTS = StepTimeModel(RolloutCost.proportional(1.0), update_s_per_1k_tokens=0.4, fixed_s=0.0)
World = Callable[[np.random.Generator, np.ndarray], tuple[np.ndarray, np.ndarray]]


def trace_of(world: World, *, normalization: str = "constant", steps: int = 24, prompts: int = 16) -> Trace:
    """A run over twice as many prompts as a step has; `world` says lengths and rewards of groups of 8 by prompt."""
    config, rng = Config(steps=steps), np.random.default_rng(1)
    config.rollout.prompts_per_step, config.rollout.completions_per_prompt = prompts, 8
    config.rollout.sampling.max_completion_tokens = 1000
    config.objective.normalization = normalization  # type: ignore[assignment]
    recorded = []
    for step in range(1, steps + 1):
        ids = np.arange(prompts) + step % 2 * prompts
        lengths, rewards = world(rng, ids)
        rollouts = Rollouts(rewards, lengths, np.sqrt(lengths))
        recorded.append(TracedStep(step, ids, rollouts, np.ones(rewards.size, np.bool_), {}))
    return Trace(config, 2 * prompts, None, None, recorded)


def decided_by_length(rng: np.random.Generator, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Half of the answers are short; of them half are right, of the long ones none: what still runs is wrong."""
    short = rng.random((len(ids), 8)) < 0.5
    lengths = np.where(short, rng.integers(20, 100, short.shape), rng.integers(600, 1000, short.shape))
    return lengths, (short & (rng.random(short.shape) < 0.5)).astype(float)


def by_nothing(rng: np.random.Generator, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Right half of the time, whatever the length, the prompt or the state."""
    return rng.integers(20, 1000, (len(ids), 8)), (rng.random((len(ids), 8)) < 0.5).astype(float)


# ------------------------------------------------------------------------------------------------ by definition


def test_an_estimate_has_the_outcome_as_its_mean() -> None:
    """Over every pattern of coins of three checkpoints, for completions that end before, between and after them: also
    as seen from behind each checkpoint, whatever the guesses and probabilities are."""
    rng, lengths = np.random.default_rng(0), np.array([3.0, 12.0, 25.0, 99.0])
    outcome, marks = rng.normal(size=4), (10.0, 20.0, 40.0)
    guesses, going = rng.normal(size=(3, 4)), rng.uniform(0.2, 0.9, (3, 4))
    mean, total = np.zeros(4), 0.0
    for coins in itertools.product((False, True), repeat=3):
        alive, stages = np.ones(4, np.bool_), []
        chance = np.ones(4)
        for at, mark in enumerate(marks):
            reached = alive & (lengths > mark)
            chance *= np.where(lengths > mark, np.where(coins[at], going[at], 1 - going[at]), 0.5)
            on = reached & coins[at]
            stages.append(roulette._StopPoint(mark, guesses[at], np.ones(4), going[at], reached, on))
            alive = alive & (on | ~reached)
        found = roulette._estimates(np.where(alive, outcome, 0.0), list(guesses), stages)
        assert len(found) == 4
        mean, total = mean + chance * found[-1], total + chance
    np.testing.assert_allclose(total, 1.0)
    np.testing.assert_allclose(mean, outcome, atol=1e-12)


def _token_by_token(step: roulette._Step, alive: np.ndarray, generated: np.ndarray, stages: list) -> np.ndarray:
    """Squared gradients of completions from the head of the module, one completion and one token at a time."""
    size, found = step.size, np.zeros(len(generated))

    def seen(i: int, at: int, end: float, guess: Callable[[int], float]) -> float:
        """The estimate of the outcome `end` as seen from before checkpoint `at`."""
        if at == len(stages) or not stages[at].reached[i]:
            return end
        if not stages[at].on[i]:
            return guess(at)
        return guess(at) + (seen(i, at + 1, end, guess) - guess(at)) / stages[at].going[i]

    def reward(i: int) -> float:
        return seen(i, 0, float(step.rewards[i]) if alive[i] else 0.0, lambda at: float(stages[at].value[i]))

    for i in range(len(generated)):
        mates = [j for j in range(i // size * size, i // size * size + size) if j != i]
        total = sum(reward(j) for j in mates)
        b = (step.alpha[i] + total) / (step.alpha[i] + step.beta[i] + len(mates))
        for token in range(1, int(generated[i]) + 1):
            passed = [at for at, stage in enumerate(stages) if stage.on[i] and token > stage.mark]
            weight = np.prod([1 / stages[at].going[i] for at in passed])
            ahead = seen(i, len(passed), step.rewards[i] - b, lambda at, i=i, b=b: float(stages[at].value[i]) - b)
            base = float(stages[passed[-1]].value[i]) - b if passed else 0.0
            found[i] += (weight * (ahead - base)) ** 2 * step.energy[i]
    return found


def test_moments_are_those_of_each_token() -> None:
    trace = trace_of(decided_by_length, steps=6, prompts=3)
    steps = roulette._steps(trace)
    guesses = roulette._learned(steps[:4], 1000.0)
    one = roulette._Estimator("", posterior=True, guesses=True, probe=1.0, price=1.0, floor=0.3)
    generated, moment, total = roulette._moments(one, steps[5], guesses, np.random.default_rng(7))
    again, alive, stages = roulette._coins(one, steps[5], guesses, np.random.default_rng(7))
    assert (generated == again).all() and 0 < alive.sum() < len(alive) and total == moment.sum()
    np.testing.assert_allclose(moment, _token_by_token(steps[5], alive, generated, stages), rtol=1e-9)


def test_a_span_is_the_sum_of_its_iterations() -> None:
    """Lengths 3, 1 and 1: one iteration of three sequences and two of one; of two engines the longer counts."""
    assert roulette._span(np.array([3.0, 1.0, 1.0]), 10.0) == pytest.approx(1.3 + 2 * 1.1)
    two = np.concatenate([np.ones(256), np.full(4, 50.0)])
    assert roulette._span(two, 10.0) == pytest.approx(max(1 + 25.6, 50 * 1.4))


def test_seconds_that_run_side_by_side_are_not_added() -> None:
    """Half the tokens at the same variance: twice as good where generation is all there is, one after the other or not;
    nothing where the rest is longer and hides it, and as much as that leaves where it is between."""
    base = np.tile(np.array(roulette._Totals(2.0, 8000.0, 8000.0, 0.0, 100.0)), (2, 3, 1))
    ours = base * np.array(roulette._Totals(1.0, 0.5, 1.0, 1.0, 0.5))

    def gains(update: float, fixed_s: float, *, overlaps: bool) -> tuple[float, float]:
        costs = StepTimeModel(RolloutCost.proportional(1.0), update, fixed_s, overlaps)  # 8 s to roll out
        return roulette._gains(base, ours, costs)

    assert gains(0.0, 0.0, overlaps=True) == gains(0.0, 0.0, overlaps=False) == pytest.approx((2.0, 2.0))
    assert gains(1.0, 1.0, overlaps=True) == pytest.approx((1.0, 1.0))  # 9 s beside 8 s
    assert gains(1.0, 1.0, overlaps=False) == pytest.approx((17 / 13, 17 / 13))
    assert gains(0.5, 1.0, overlaps=True) == pytest.approx((8 / 5, 8 / 5))


def test_the_posterior_row_is_the_objective_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its advantages are `posterior_advantages`, under both divisors."""
    from dppo_megatron.algorithms.advantages import posterior_advantages

    for normalization in ("constant", "sequence_mean"):
        step = roulette._steps(trace_of(decided_by_length, normalization=normalization, steps=5))[4]
        by_length, shape = normalization == "sequence_mean", (-1, 8)
        row = roulette._Estimator("", posterior=True)
        found = roulette._moments(row, step, [], np.random.default_rng(0))[1]
        prior = np.stack([step.alpha, step.beta], axis=1)[::8]
        lengths = step.lengths.reshape(shape)
        advantages = posterior_advantages(step.rewards.reshape(shape), prior, lengths if by_length else None)
        scaled = advantages * (lengths.mean() / lengths if by_length else 1.0)
        np.testing.assert_allclose(found, (np.square(scaled) * lengths).ravel() * step.energy, rtol=1e-12)


@pytest.mark.parametrize("normalization", ["constant", "sequence_mean"])
def test_limits_are_those_of_the_trainer(normalization: str) -> None:
    """What comes to its end counts the inverse of the chance, against the mean of mates that have ended and of what was
    known of the others, drawn towards that; one completion at a time."""
    step = roulette._steps(trace_of(decided_by_length, normalization=normalization, steps=5))[4]
    early = EarlyStopConfig(after_tokens=50, min_inclusion_prob=0.2)
    row = roulette._Estimator("", posterior=True, early=early)
    generated, moment, _ = roulette._moments(row, step, [], np.random.default_rng(3))
    ended = generated == step.lengths
    assert 0 < ended.sum() < len(ended) and (moment[~ended] == 0).all()
    chance = np.maximum(np.minimum(50 / step.lengths, 1.0), 0.2)
    own = step.typical / step.lengths if step.typical else np.ones(len(ended))
    for i in np.flatnonzero(ended).tolist():
        mates = [j for j in range(i // 8 * 8, i // 8 * 8 + 8) if j != i]
        usual = step.alpha[i] / (step.alpha[i] + step.beta[i])
        mean = usual + sum((step.rewards[j] - usual) / chance[j] for j in mates if ended[j]) / 7
        shift = mean - (step.alpha[i] + 7 * mean) / (step.alpha[i] + step.beta[i] + 7)
        if step.typical:
            shift *= step.lengths[i] * sum(1 / chance[j] / step.lengths[j] for j in mates if ended[j]) / 7
        wanted = ((step.rewards[i] - mean + shift) * own[i] / chance[i]) ** 2 * step.energy[i] * step.lengths[i]
        assert moment[i] == pytest.approx(wanted, rel=1e-9)
    draws = [roulette._moments(row, step, [], np.random.default_rng(draw)) for draw in range(2000)]
    sampled, expected = np.array([(moment.sum(), total) for _, moment, total in draws]).T
    assert sampled.mean() == pytest.approx(expected.mean(), abs=4 * float((sampled - expected).std()) / 2000**0.5)
    assert expected.std() < 0.5 * sampled.std(), "seen from before a completion's own coin it scatters less"


# -------------------------------------------------------------------------------------------------- its verdict


@pytest.mark.parametrize("normalization", ["constant", "sequence_mean"])
def test_it_pays_where_the_outcome_is_known_before_the_end(normalization: str) -> None:
    """What runs after 100 tokens is wrong for sure: stopping most of it saves most tokens, for hardly any noise."""
    gains = judge_roulette(trace_of(decided_by_length, normalization=normalization), COSTS, probes=(2.0,))
    rloo, _, tokens, stopping, *_ = gains
    assert rloo.by_tokens == rloo.by_roofline == pytest.approx(1.0) and rloo.stopped_share == tokens.stopped_share == 0
    assert stopping.by_tokens > 1.5 > 1.1 > tokens.tokens_generated > 2 * stopping.tokens_generated
    assert 0.3 < stopping.stopped_share < 0.7


def test_limits_pay_where_few_answers_are_most_of_the_tokens() -> None:
    """One prompt in sixteen has answers of twenty times the length, which is half of all tokens, and divided by their
    length hardly any of the gradient."""

    def tail(rng: np.random.Generator, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        lengths = np.where(ids % 16 == 0, 800, 40)[:, None] + rng.integers(0, 20, (len(ids), 8))
        return lengths, (rng.random(lengths.shape) < 0.5).astype(float)

    gains = judge_roulette(trace_of(tail, steps=40, normalization="sequence_mean"), COSTS)
    posterior, built = gains[1], gains[-1]
    assert built.tokens_generated < 0.7 * posterior.tokens_generated and 0.01 < built.stopped_share < 0.5
    assert built.by_tokens > 1.1 * posterior.by_tokens and built.by_roofline > 1.2 * posterior.by_roofline
    [after, least] = [float(one.partition("=")[2]) for one in built.settings]
    assert 30 < after < 200 and 0 < least < 1 and "pruning.early_stop.after_tokens=" in built.settings[0]
    assert f"{' '.join(built.settings)}: " in roulette_table(gains, COSTS, 48.0)


def test_it_does_not_pay_where_nothing_is_known() -> None:
    """By free guesses; a good probe sees more, and its row says so."""
    gains = judge_roulette(trace_of(by_nothing, steps=40), COSTS, probes=(3.0,))
    _, posterior, tokens, stopping, _, with_probe, built = gains
    assert stopping.by_tokens / tokens.by_tokens < 1.05 < 1.3 < with_probe.by_tokens
    said = roulette_json(gains, COSTS, 48.0)["verdicts"]
    assert isinstance(said, list) and said[0].startswith("pruning.early_stop.") and len(said) == 3
    assert built.by_tokens / posterior.by_tokens < 1.1  # as long and as often right as any: nothing to be had


def test_what_it_cannot_judge_it_says() -> None:
    with pytest.raises(UserError, match=r"--roulette: 3 steps with whole groups are too few"):
        judge_roulette(trace_of(by_nothing, steps=3), COSTS)
    with pytest.raises(UserError, match=r"--roulette: step 1 has rewards outside \[0, 1\]"):
        judge_roulette(trace_of(lambda rng, ids: (by_nothing(rng, ids)[0], np.full((len(ids), 8), 2.0))), COSTS)
    with pytest.raises(UserError, match="--roulette: too few steps have a gradient"):
        judge_roulette(trace_of(lambda rng, ids: (by_nothing(rng, ids)[0], np.ones((len(ids), 8)))), COSTS)
