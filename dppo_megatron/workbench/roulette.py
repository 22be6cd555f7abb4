"""Predicts from a recorded run what it would gain to stop completions early at random, and weight those that go on.

At a checkpoint, t tokens into a completion, its outcome y is guessed as u, from t and what is known of its prompt, and
the completion goes on with probability c. The estimate of y is u if it stops, and u + (y - u) / c if it goes on. Its
mean over the coin is y, whatever u and c are, so the expected gradient is the full one:

    tokens up to t       advantage u, or u + (y - u) / c
    tokens after t       advantage (y - u) / c

Several checkpoints follow by recursion. Without any stop (c = 1) the guesses are a baseline for each token. The guess
is a logistic regression on the prompt's posterior and t over its remembered length, fitted to earlier steps only. A
probe on the model's states would see more: one of a given quality is simulated as the outcome plus noise.

The two settings of the trainer's own `pruning.early_stop` (docs/pruning.md) are chosen in the same way.

The gradients of a completion's tokens are taken as orthogonal and of equal length, together its `logit_grad_norm`, so
the variance is a sum over tokens of squared advantages. Completions are pruned under every estimator. Seconds are the
trace's own, with generation proportional to its tokens, or by a roofline in which an iteration of n sequences takes
1 + n / knee. How often to stop is chosen on the first half of the steps and judged on the second.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import NamedTuple

import numpy as np

from dppo_megatron.algorithms.advantages import early_stop_advantages
from dppo_megatron.config.pruning import EarlyStopConfig
from dppo_megatron.progress import progress
from dppo_megatron.pruning.designs import WaterFiller
from dppo_megatron.pruning.early_stop import end_probability, limits_of
from dppo_megatron.pruning.history import PromptHistory
from dppo_megatron.pruning.scores import budgeted_probabilities
from dppo_megatron.randomness import generator
from dppo_megatron.texts import aligned
from dppo_megatron.types import BoolArray, FloatArray, UserError
from dppo_megatron.workbench.runs.trace import Trace
from dppo_megatron.workbench.simulate import StepTimeModel

KNEE = 48.0
"""Sequences with which an iteration takes twice as long as with none; for an 8B model on an H100, by the roofline of
`plan`, 80 with contexts of 2k tokens and 22 with 8k."""
_PER_ENGINE = 256
_MARKS = np.array([1, 2, 4, 8, 12, 16, 20, 24, 28]) / 32
"""Checkpoints, as shares of the longest completion."""
_PROBE_FULL = 0.25
"""Share of the longest completion from which on a probe has its full quality."""
_PRICES, _FLOORS = (0.02, 0.06, 0.2, 0.6, 2.0), (0.1, 0.3)
_AFTER, _LEAST_ENDS = (0.5, 0.75, 1.0, 1.5, 2.0), (0.05, 0.1, 0.2, 0.4)
"""Values tried for `pruning.early_stop`: after_tokens over the mean length, and min_inclusion_prob."""
_GROWTH = 1.1
"""How much pruning completions may enlarge the variance."""
_LEAST_PROB = 0.05
_WINDOW = 16
"""How many earlier steps the guesses are fitted to."""
_LEAST_FIT = 50
_DRAWS = 4


@dataclass(frozen=True, slots=True)
class Gain:
    """One estimator, on the second half of the steps."""

    name: str
    variance: float
    """Relative to RLOO with pruned completions, as tokens and seconds are."""
    tokens_generated: float
    tokens_trained: float
    stopped_share: float
    """Share of its completions."""
    by_tokens: float
    """Variance x seconds of RLOO over the estimator's own."""
    by_tokens_error: float
    """Standard error, over steps."""
    by_roofline: float
    by_roofline_error: float
    settings: tuple[str, ...] = field(default=(), kw_only=True)
    """Settings with which the trainer does it; empty: it cannot."""


@dataclass(frozen=True, slots=True)
class _Estimator:
    name: str
    posterior: bool = False
    """Use the group baseline of `posterior_loo`."""
    guesses: bool = False
    probe: float = 0.0
    """d' of the probe; 0: none."""
    price: float = 0.0
    """Price of a token to come, in units of the variance that it removes; 0: nothing stops."""
    early: EarlyStopConfig | None = None
    """Limits drawn beforehand."""
    floor: float = 1.0
    """Least probability of going on to the end: without it a completion that has passed nine coins weighs up to 1,000
    times as much, and a made-up run of short answers had 6 times the variance."""


@dataclass(frozen=True, slots=True)
class _Step:
    """Completions [n] of a step, its groups one after another, and what was known of their prompts before it."""

    size: int
    rewards: FloatArray
    lengths: FloatArray
    energy: FloatArray
    """Squared gradient norm of each token of the completion."""
    alpha: FloatArray
    beta: FloatArray
    usual: FloatArray
    """Remembered length."""
    typical: float
    """Length at which a token has weight 1, where it is divided by its completion's length; 0: all have weight 1."""

    @property
    def own(self) -> FloatArray:
        """[n] weight of each token of the completion."""
        return self.typical / self.lengths if self.typical else np.ones(len(self.rewards))

    def others(self, outcome: FloatArray) -> FloatArray:
        """[n] mean outcome of the group's other completions."""
        groups = outcome.reshape(-1, self.size)
        mean: FloatArray = (groups.sum(axis=1, keepdims=True) - groups).ravel() / (self.size - 1)
        return mean

    def posterior(self, rewards: FloatArray) -> FloatArray:
        """[n] the prompt's posterior mean, given the group's other completions."""
        count = self.size - 1
        mean: FloatArray = (self.alpha + count * self.others(rewards)) / (self.alpha + self.beta + count)
        return mean


@dataclass(frozen=True, slots=True)
class _Guess:
    """Regressions for the completions that still run at one checkpoint."""

    mark: float
    """Tokens up to the checkpoint."""
    clear: float
    """Share of its full quality that a probe has there."""
    value: FloatArray
    """Weights for the log-odds of a reward."""
    rest: FloatArray
    """Weights for the logarithm of the tokens to come."""
    scale: float
    """Corrects the exponential of that logarithm to the right mean."""

    def of(self, step: _Step) -> tuple[FloatArray, FloatArray]:
        """[n] log-odds of a reward, [n] tokens to come."""
        seen = _features(step, self.mark)
        return seen @ self.value, np.maximum(self.scale * np.exp(np.clip(seen @ self.rest, -20, 20)), 1.0)


class _Totals(NamedTuple):
    """Totals of one step, or of several, under one estimator."""

    variance: float
    generated: float
    trained: float
    stopped: float
    """Share of the completions that are stopped."""
    span: float
    """Length of the roofline's rollout, in iterations of one sequence."""


_STOPPED = _Totals._fields.index("stopped")


def judge_roulette(
    trace: Trace, costs: StepTimeModel, probes: Sequence[float] = (1.0, 2.0), knee: float = KNEE
) -> list[Gain]:
    """RLOO, the posterior's baseline, then a token baseline and stopping with free guesses and with each probe.

    Raises:
        UserError: rewards outside [0, 1], or too few steps to learn guesses and to judge them.
    """
    steps = _steps(trace)
    first = len(steps) // 4  # guesses for earlier steps would be fitted to next to nothing
    if sum(len(step.rewards) for step in steps[:first]) < _LEAST_FIT:
        raise UserError(f"--roulette: {len(steps)} steps with whole groups are too few to learn guesses and judge them")
    longest = max(float(step.lengths.max()) for step in steps)
    known = [_learned(steps[max(at - _WINDOW, 0) : at], longest) for at in range(first, len(steps))]
    pairs = list(zip(steps[first:], known, strict=True))
    halves = pairs[: len(pairs) // 2], pairs[len(pairs) // 2 :]

    def played(one: _Estimator, half: int, draws: int) -> FloatArray:
        """[draws, steps, totals]"""
        seed, pairs = trace.config.seed, halves[half]
        totals = [
            _play(one, step, guesses, knee, generator(seed, "roulette", half, draw, at))
            for draw in range(draws)
            for at, (step, guesses) in enumerate(pairs)
        ]
        return np.array(totals).reshape(draws, len(pairs), -1)

    plain = _Estimator("rloo")
    estimators = [plain, replace(plain, name="posterior_loo", posterior=True)]
    base = played(plain, 0, 1)
    with progress("choosing when to stop", 2 + len(probes), "guesses") as advance:
        for probe in (0.0, *probes):
            source = f"a probe of d' {probe:g}" if probe else "free guesses"
            tokens = _Estimator(f"token baseline, {source}", posterior=True, guesses=True, probe=probe)
            tried = [replace(tokens, price=price, floor=floor) for price in _PRICES for floor in _FLOORS]
            best = max(tried, key=lambda one: np.prod(_gains(base, played(one, 0, 2), costs)))
            estimators += [tokens, replace(best, name=f"stopping, {source}")]
            advance(1)
        mean = float(np.mean(np.concatenate([step.lengths for step, _ in halves[0]])))
        configs = [EarlyStopConfig(max(1, round(share * mean)), floor) for share in _AFTER for floor in _LEAST_ENDS]
        tried = [_Estimator("early_stop", posterior=True, early=early) for early in configs]
        estimators.append(max(tried, key=lambda one: np.prod(_gains(base, played(one, 0, 2), costs))))
        advance(1)
    base = played(plain, 1, 1)
    return [_judged(one, base, played(one, 1, _DRAWS), costs) for one in estimators]


def _steps(trace: Trace) -> list[_Step]:
    """The trace's steps, with whole groups only."""
    pruning, rollout = trace.config.pruning.prompt, trace.config.rollout
    epoch = trace.num_prompts / rollout.prompts_per_step
    history = PromptHistory(trace.num_prompts, prior=pruning.prior, discount=pruning.discount, steps_per_epoch=epoch)
    by_length = trace.config.objective.normalization == "sequence_mean"
    mean, steps = rollout.sampling.max_completion_tokens / 2, list[_Step]()
    for traced in trace.steps:
        rewards, lengths = traced.rollouts.rewards, traced.rollouts.lengths
        whole = ~np.isnan(rewards).any(axis=1)
        ids, size = traced.prompt_index[whole], rewards.shape[1]
        if ((rewards < 0) | (rewards > 1)).any():
            raise UserError(
                f"--roulette: step {traced.step} has rewards outside [0, 1], whose chance cannot be guessed"
            )
        if whole.any():
            remembered = np.where(history.seen(ids), history.arrays["tokens"][ids], mean)
            columns = *history.posterior(ids, traced.step - 1), np.maximum(remembered, 1.0)
            energy = np.square(traced.rollouts.logit_grad_norm[whole]) / lengths[whole]
            flat, typical = lengths[whole].ravel().astype(np.float64), float(lengths[whole].mean())
            alpha, beta, usual = (np.repeat(column, size) for column in columns)
            outcome = size, rewards[whole].ravel(), flat, energy.ravel()
            steps.append(_Step(*outcome, alpha, beta, usual, typical if by_length else 0.0))
            mean = 0.9 * mean + 0.1 * typical if len(steps) > 1 else typical
        history.update(traced.prompt_index, rewards, lengths, step=traced.step - 1, second_moment=None)
    return steps


def _features(step: _Step, mark: float) -> FloatArray:
    odds, late = np.log(step.alpha / step.beta), np.log(mark / step.usual)
    return np.stack([np.ones_like(odds), odds, late, late * late, odds * late], axis=1)


def _learned(past: Sequence[_Step], longest: float) -> list[_Guess]:
    """A guess for each checkpoint, fitted to the completions of earlier steps that reached it; where few did, the guess
    of the checkpoint before. Before the first checkpoint that has one, it is the prompt's own odds."""
    last = _Guess(0.0, 0.0, np.array([0.0, 1.0, 0.0, 0.0, 0.0]), np.zeros(5), 1.0)
    guesses = []
    for mark in np.unique(np.ceil(_MARKS * longest)).tolist():
        reached = [step.lengths > mark for step in past]
        if sum(int(one.sum()) for one in reached) >= _LEAST_FIT:
            seen = np.concatenate([_features(step, mark)[one] for step, one in zip(past, reached, strict=True)])
            rewards = np.concatenate([step.rewards[one] for step, one in zip(past, reached, strict=True)])
            rest = np.concatenate([step.lengths[one] - mark for step, one in zip(past, reached, strict=True)])
            weights = np.linalg.lstsq(seen, np.log(rest), rcond=None)[0]
            scale = float(rest.mean() / np.exp(np.clip(seen @ weights, -20, 20)).mean())
            last = replace(last, value=_logistic(seen, rewards), rest=weights, scale=scale)
        guesses.append(replace(last, mark=mark, clear=min(1.0, mark / longest / _PROBE_FULL)))
    return guesses


def _logistic(seen: FloatArray, rewards: FloatArray) -> FloatArray:
    """Weights [features] of a logistic regression with a ridge of 1, by Newton's method."""
    weights, ridge = np.zeros(seen.shape[1]), np.eye(seen.shape[1])
    for _ in range(12):
        chance = _chance(seen @ weights)
        slope = (seen * (chance * (1 - chance))[:, None]).T @ seen + ridge
        weights = weights - np.linalg.solve(slope, seen.T @ (chance - rewards) + weights)
    return weights


def _chance(odds: FloatArray) -> FloatArray:
    return np.asarray(1.0 / (1.0 + np.exp(-np.clip(odds, -12, 12))))


def _play(one: _Estimator, step: _Step, guesses: Sequence[_Guess], knee: float, random: np.random.Generator) -> _Totals:
    """One step under one estimator, in one draw of its coins."""
    generated, moment, total = _moments(one, step, guesses, random)
    trained, growth = _pruned(moment, generated)
    stopped, span = float((generated < step.lengths).mean()), _span(random.permutation(generated), knee)
    return _Totals(total * growth, float(generated.sum()), trained, stopped, span)


def _moments(
    one: _Estimator, step: _Step, guesses: Sequence[_Guess], random: np.random.Generator
) -> tuple[FloatArray, FloatArray, float]:
    """[n] tokens that are generated, [n] squared gradient of what is trained on, and the sum of those."""
    if one.early is not None:
        return _limited(one.early, step, random)
    own = step.own
    generated, alive, stages = _coins(one, step, guesses, random)
    rewards = _estimates(np.where(alive, step.rewards, 0.0), [stage.value for stage in stages], stages)[-1]
    lengths = _estimates(np.where(alive, own, 0.0), [stage.scale for stage in stages], stages)[-1]
    # as in `posterior_advantages`: the shift of the others' mean is not divided by a completion's own length
    mean = step.others(rewards)
    shift = (mean - step.posterior(rewards)) * step.others(lengths) if one.posterior else np.zeros(len(mean))
    guessed = [(stage.value - mean) * stage.scale + shift for stage in stages]
    seen = _estimates(np.where(alive, (step.rewards - mean) * own + shift, 0.0), guessed, stages)[::-1]
    ends = [*(stage.mark for stage in stages), np.inf]
    moment, weight = np.square(seen[0]) * np.minimum(generated, ends[0]), np.ones(len(mean))
    for stage, end, guess, behind in zip(stages, ends[1:], guessed, seen[1:], strict=True):
        weight = np.where(stage.on, weight / stage.going, weight)
        tokens = np.where(stage.on, np.minimum(generated, end) - stage.mark, 0.0)
        moment += np.square(weight * (behind - guess)) * tokens
    moment *= step.energy
    return generated, moment, float(moment.sum())


def _limited(early: EarlyStopConfig, step: _Step, random: np.random.Generator) -> tuple[FloatArray, FloatArray, float]:
    """As `_moments`, for the trainer's `early_stop` with `posterior_loo`.

    The sum is its mean over each completion's own coin, not one draw. When draws were judged, a least probability of
    0.05 was chosen on one of ten recorded runs, and in one draw a completion that weighed 20 took its gain from 1.2 to
    0.3.
    """
    limits = limits_of(early, random.random(len(step.rewards)), int(step.lengths.max()))
    chance = end_probability(early, step.lengths.astype(np.int64))
    ended = step.lengths <= limits
    counts = ended / chance
    shape = -1, step.size
    prior = np.stack([step.alpha, step.beta], axis=1)[:: step.size]
    by = step.lengths.astype(np.int64).reshape(shape) if step.typical else None
    # stopped completions keep their rewards here: each has the advantage as if it alone had come to its end
    advantages = early_stop_advantages(step.rewards.reshape(shape), counts.reshape(shape), prior, by, to_posterior=True)
    each = np.square(advantages.ravel() * step.own) * step.lengths * step.energy
    return np.minimum(step.lengths, limits), each * np.square(counts), float((each / chance).sum())


@dataclass(frozen=True, slots=True)
class _StopPoint:
    """One checkpoint of a step's completions [n]."""

    mark: float
    value: FloatArray
    """Guess of the reward."""
    scale: FloatArray
    """Guess of a token's weight, 1 unless it is divided by the completion's length."""
    going: FloatArray
    """Probability of going on."""
    reached: BoolArray
    on: BoolArray
    """It has reached the checkpoint and goes on."""


def _coins(
    one: _Estimator, step: _Step, guesses: Sequence[_Guess], random: np.random.Generator
) -> tuple[FloatArray, BoolArray, list[_StopPoint]]:
    """[n] tokens that are generated, [n] whether the completion reaches its end, and each checkpoint."""
    n, stages = len(step.rewards), []
    generated, alive = step.lengths.copy(), np.ones(len(step.rewards), dtype=np.bool_)
    left = np.ones(n)
    signal = random.normal(size=n) + one.probe * (step.rewards - 0.5)
    for guess in guesses if one.guesses else ():
        mark, clear, (odds, rest) = guess.mark, guess.clear, guess.of(step)
        sees = clear * signal + np.sqrt(1 - clear**2) * random.normal(size=n)
        value = _chance(odds + clear * one.probe * sees)
        scale = step.typical / (mark + rest) if step.typical else np.ones(n)
        reached, going = alive & (step.lengths > mark), np.ones(n)
        if one.price:
            worth = value * (1 - value) * scale**2 * (mark + rest) / (one.price * rest)
            going = np.where(reached, np.clip(np.sqrt(worth), np.minimum(one.floor / left, 1.0), 1.0), 1.0)
        on = reached & (random.random(n) < going)
        left = np.where(on, left * going, left)
        generated = np.where(reached & ~on, mark, generated)
        alive = alive & (on | ~reached)
        stages.append(_StopPoint(mark, value, scale, going, reached, on))
    return generated, alive, stages


def _estimates(outcome: FloatArray, guesses: Sequence[FloatArray], stages: Sequence[_StopPoint]) -> list[FloatArray]:
    """Estimates of an outcome [n] that is known only of completions that reach their end: the outcome itself, then the
    estimate before each checkpoint, the last first. All have the same mean over the coins."""
    estimates = [outcome]
    for stage, guess in zip(reversed(stages), reversed(guesses), strict=True):
        corrected = guess + np.where(stage.on, (estimates[-1] - guess) / stage.going, 0.0)
        estimates.append(np.where(stage.reached, corrected, estimates[-1]))
    return estimates


def _pruned(moment: FloatArray, tokens: FloatArray) -> tuple[float, float]:
    """Tokens that are trained on, and growth of the variance, if completions are kept as `dppo` keeps them at a growth
    of `_GROWTH`: with probability in proportion to the root of their moment over their tokens."""
    live = moment > 0
    if not live.any():
        return 0.0, 1.0
    moment, tokens = moment[live], tokens[live]

    def growth(pi: FloatArray) -> float:
        return float((moment / pi).sum() / moment.sum())

    filler, least = WaterFiller(np.sqrt(moment / tokens), _LEAST_PROB, tokens), _LEAST_PROB * float(tokens.sum())
    pi = budgeted_probabilities(filler, least, growth, max_design_effect=_GROWTH, whole=False)
    return float((pi * tokens).sum()), growth(pi)


def _span(lengths: FloatArray, knee: float) -> float:
    """Iterations of the engine that ends last, where each has `_PER_ENGINE` of the lengths [n]."""
    spans = []
    for at in range(0, len(lengths), _PER_ENGINE):
        falling = np.sort(lengths[at : at + _PER_ENGINE])[::-1]
        spans.append(float((falling - np.append(falling[1:], 0.0)) @ (1.0 + np.arange(1, len(falling) + 1) / knee)))
    return max(spans)


def _gains(base: FloatArray, ours: FloatArray, costs: StepTimeModel) -> tuple[float, float]:
    """By tokens and by the roofline: variance x seconds of `base` over that of `ours`, both [draws, steps, totals]."""
    plain, mine = (_Totals(*played.mean(axis=0).sum(axis=0).tolist()) for played in (base, ours))
    if not min(plain.variance, mine.variance):
        raise UserError("--roulette: too few steps have a gradient; record a longer trace")
    count = base.shape[1]
    generate_s = costs.rollout.average * plain.generated / count

    def spent(totals: _Totals, share: float) -> float:
        """Variance x seconds of a mean step whose rollout takes this share of the seconds of `base`."""
        return totals.variance * costs.step_s(generate_s * share, costs.update_s(totals.trained / count))

    def gain(share: float) -> float:
        return float(spent(plain, 1.0) / spent(mine, share))

    return gain(mine.generated / plain.generated), gain(mine.span / plain.span)


def _judged(one: _Estimator, base: FloatArray, ours: FloatArray, costs: StepTimeModel) -> Gain:
    """The gain of an estimator, with errors by a jackknife over steps."""
    count = base.shape[1]
    each = np.array([_gains(np.delete(base, at, axis=1), np.delete(ours, at, axis=1), costs) for at in range(count)])
    errors = np.sqrt((count - 1) / count * np.square(each - each.mean(axis=0)).sum(axis=0))
    shares = (ours.mean(axis=(0, 1)) / base.mean(axis=(0, 1)).clip(1e-12))[:_STOPPED].tolist()
    both = np.stack([_gains(base, ours, costs), errors], axis=1).ravel().tolist()
    figures: list[float] = [*shares, float(ours[..., _STOPPED].mean()), *both]
    early = {} if one.early is None else asdict(one.early)
    settings = tuple(f"pruning.early_stop.{name}={value:g}" for name, value in early.items())
    return Gain(one.name, *figures, settings=settings)


def roulette_table(gains: Sequence[Gain], costs: StepTimeModel, knee: float) -> str:
    """The table to print, with the verdicts below it."""
    update = costs.update_s_per_1k_tokens / 1000 / costs.rollout.average if costs.rollout.average else 0.0
    rows = [["estimator", "variance", "generated", "trained", "stopped", "by tokens", "by roofline"]]
    for one in gains:
        shares = [f"{share:.2f}" for share in (one.variance, one.tokens_generated, one.tokens_trained)]
        both = (one.by_tokens, one.by_tokens_error), (one.by_roofline, one.by_roofline_error)
        shown = [f"{gain:.2f}x +- {error:.2f}" for gain, error in both]
        rows.append([one.name, *shares, f"{one.stopped_share:.0%}", *shown])
    head = (
        f"over rloo with pruned completions, on the second half of the steps; a trained token costs {update:.2f} of a"
        f" generated one, a roofline's iteration of n sequences 1 + n / {knee:g}"
    )
    return "\n".join([head, *aligned(rows), *_verdicts(gains)])


def _verdicts(gains: Sequence[Gain]) -> list[str]:
    """The gain of the trainer's own `early_stop`; then of each estimator that stops by guesses, over the one before it,
    which has the same guesses and no stop."""
    posterior, built = gains[1], gains[-1]
    own = built.by_tokens / posterior.by_tokens, built.by_roofline / posterior.by_roofline
    both = f"{own[0]:.2f}x by tokens and {own[1]:.2f}x by the roofline"
    lines = [f"{' '.join(built.settings)}: {both} over posterior_loo without it"]
    for tokens, stopping in itertools.pairwise(gains):
        if stopping.name.startswith("stopping"):
            own = stopping.by_tokens / tokens.by_tokens, stopping.by_roofline / tokens.by_roofline
            lines.append(
                f"{stopping.name}: {own[0]:.2f}x by tokens and {own[1]:.2f}x by the roofline over the same guesses"
                " without a stop; not built: the engine would have to ask for a guess while it samples"
            )
    return lines


def roulette_json(gains: Sequence[Gain], costs: StepTimeModel, knee: float) -> dict[str, object]:
    """The same figures for other programs."""
    estimators = [asdict(one) for one in gains]
    return {"costs": asdict(costs), "knee": knee, "estimators": estimators, "verdicts": _verdicts(gains)}
