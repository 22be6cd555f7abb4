"""Estimates what each pruning method would cost, from a recorded run and without a GPU.

The trainer's own `Selector` runs over the trace: the same policies, draws and weights, with recorded outcomes in place
of an engine. An outcome that the recorded run did not produce (a prompt it skipped, or that another method reaches
earlier) is taken from the nearest recorded visit of that prompt, and the share of such outcomes is reported. A replay
cannot know how another method would have changed the model: figures are for the model of the recorded run.
"""

from __future__ import annotations

import copy
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from operator import itemgetter

import numpy as np

from dppo_megatron.config.selection import selection_settings
from dppo_megatron.data.order import Order
from dppo_megatron.packing.alignment import packing_layout
from dppo_megatron.packing.planner import TokenCapacity
from dppo_megatron.progress import counted, progress
from dppo_megatron.pruning.interface import StepCapacity, StepCost
from dppo_megatron.pruning.policies import levels, with_method
from dppo_megatron.pruning.scores import floor_share
from dppo_megatron.pruning.variance import StepVariance
from dppo_megatron.randomness import generator
from dppo_megatron.selection import Rollouts, Selector, TrainSelection
from dppo_megatron.selection.coefficients import is_of_method
from dppo_megatron.steps.rollout_cost import RolloutCost
from dppo_megatron.texts import aligned
from dppo_megatron.types import REWARD_ROUNDING, FloatArray, IntArray, UserError
from dppo_megatron.workbench.runs.trace import Trace, TracedStep

_MOSTLY_ROLLOUT = 0.9
"""Share of rollout in a step above which completion pruning is reported as no help: it gains less than a ninth."""
_COLUMNS = ("rewards", "lengths", "logit_grad_norm")
_HEAD = ["method", "label", "prompts", "generated", "trained", "gen. tok", "train. tok", "s/step", "speed-up"]
_HEAD += ["like for like", "its mean", "scale", "variance", "skipping", "imputed"]


@dataclass(frozen=True, slots=True)
class StepTimeModel:
    """Seconds of a step by its tokens."""

    rollout: RolloutCost
    """Seconds of one round of generation."""
    update_s_per_1k_tokens: float
    fixed_s: float
    """Per step, whatever is pruned: syncing, selecting, packing."""
    overlaps: bool = False
    """Generation runs beside the rest (`RolloutConfig.overlaps_update`)."""

    def update_s(self, tokens: float) -> float:
        return self.update_s_per_1k_tokens * tokens / 1000

    def step_s(self, rollout_s: float, update_s: float) -> float:
        rest = update_s + self.fixed_s
        return max(rollout_s, rest) if self.overlaps else rollout_s + rest


@dataclass(frozen=True, slots=True)
class Prediction:
    """One method on one trace; counts and seconds are means over the steps."""

    method: str
    label: str
    """The worst label of what it prunes: exact, unbiased, ratio or biased."""
    prompts_generated: float
    completions_generated: float
    completions_trained: float
    tokens_generated: float
    tokens_trained: float
    step_s: float
    scale: float
    """sum W (T / T0) s^2 / sum s^2, s the gradient-norm proxy of docs/pruning.md, T the full batch's divisors and T0
    those of the step: about how long the expected gradient is, relative to the full batch's. 1 for an unbiased method,
    up to the noise of the draws."""
    variance_ratio: float
    """Growth of the gradient's variance at equal length, the mean over the steps. A ratio of sums over steps would be
    that of the first few, whose gradients are largest and which skip nothing. By skipping prompts it is the draw's own,
    sum(s^2 / pi) / sum s^2 over all nominal prompts: a step's account has a ratio over the few that were kept, 1 to 2 %
    too low in the mean. For a biased method it is sum W^2 s^2 over the full batch's sum s^2, over scale^2."""
    variance_skipping: float
    """The same over the steps that could skip prompts, without warm-up and annealing; over all if none could."""
    predicted_variance: float
    """Mean over the steps of the growth that was predicted before each draw."""
    imputed_share: float
    """Groups whose outcome was not recorded at that step and came from another visit."""
    without_gradient: float
    """Share of all nominal tokens in completions without an advantage: what can be dropped exactly."""
    prompt_effect: tuple[float, float, float] | None
    """Growth of the variance by skipping prompts as the method measured it last, its standard error, and the growth by
    random skipping at the same cost; None if the method measures none."""


def fit_costs(trace: Trace, rollout_cost: float | None, update_cost: float | None) -> StepTimeModel:
    """A cost model from the trace's own seconds; a given cost (seconds for 1,000 tokens) replaces the measured one.

    The update is taken as proportional to its tokens, and so is generation, but for the floor that the steps show
    (`pruning/scores.py`). An intercept that is not tested against its error was worse: steps of an unpruned trace have
    nearly equal token counts, so noise flattens the slope and the intercept absorbs the rest.

    The trace of a run that generated ahead has only the seconds spent waiting for a rollout. The rollout ran beside the
    rest of the step, whose seconds are added: exact where there was a wait, otherwise an upper bound.

    Raises:
        UserError: a cost is not given, and the trace has no tokens to measure it by.
    """
    generated = np.array([step.rollouts.lengths.sum() for step in trace.steps]) / 1000
    trained = np.array([step.rollouts.lengths.ravel()[step.kept].sum() for step in trace.steps]) / 1000
    took = {name: np.array([step.seconds[name] for step in trace.steps]) for name in ("rollout", "update", "other")}
    if overlaps := trace.config.rollout.overlaps_update:
        took["rollout"] += took["update"] + took["other"]
    costs = []
    for given, tokens, name in ((rollout_cost, generated, "rollout"), (update_cost, trained, "update")):
        if given is not None:
            costs.append(given)
            continue
        if not tokens.any():
            what = {"rollout": "generated", "update": "trained"}[name]
            raise UserError(
                f"nothing was {what} in this trace, so it does not say what a token costs; give --{name}-cost, seconds"
                " for 1,000 tokens on your machine"
            )
        costs.append(float(took[name].sum() / tokens.sum()))
    rollout = RolloutCost.proportional(costs[0])
    if rollout_cost is None:
        kept, seconds = generated / generated.mean(), took["rollout"]
        products = (np.ones_like(kept), kept, seconds, kept**2, kept * seconds, seconds**2)
        floor, mean_s = floor_share([float(np.sum(each)) for each in products]), float(seconds.mean())
        rollout = RolloutCost((0.0, 1000 * float(generated.mean())), (floor * mean_s, mean_s))
    return StepTimeModel(rollout, costs[1], float(took["other"].mean()), overlaps)


def simulate(
    trace: Trace, method: str, costs: StepTimeModel, capacity: StepCapacity | None = None, order: Order | None = None
) -> Prediction:
    """Replay `method` over the trace.

    Args:
        capacity: what a step's micro-batches hold, for `fill_slack`; None: nothing is filled.
        order: of the prompts; None: the recorded run's.
    """
    selector = _selector(trace, method, capacity, order)
    outcomes, labels, rows = _NearestRollouts(trace), {"exact"}, []
    accounts, lengths = list[tuple[StepVariance, float, bool]](), list[float]()
    # of each step with a gradient: its account, the full batch's sum s^2, and whether prompts could be skipped; how
    # long its expected gradient is, relative to the full batch's
    for traced in _shown(trace, method, selector):
        step = traced.step
        rollouts, rollout_s = _rolled_out(selector, outcomes, costs, step)
        decision = selector.finish(rollouts, step)
        labels.update(row.label for row in decision.ledger if is_of_method(row.name))
        generated, trained = float(rollouts.lengths.sum()), float(rollouts.lengths.ravel()[decision.kept].sum())
        update_s = costs.update_s(trained)
        everything = outcomes.of(decision.offered[: selector.prompts_per_step], step)
        prior = None if decision.prior is None else decision.prior[: selector.prompts_per_step]
        scores, divisor = selector.full_scores(everything, prior)
        if full := float(np.sum(np.square(scores))):
            account = decision.variance
            if decision.has_support:
                by_prompts = float(np.sum(np.square(scores).sum(axis=1) / decision.offered_prob[: len(scores)])) / full
                account = replace(account, prompts=replace(account.prompts, realised=by_prompts))
            accounts.append((account, full, bool((decision.prompts.inclusion_prob < 1).any())))
            lengths.append(decision.variance.expected / full * _predicted_over_true(trace, decision, divisor))
        counts = len(rollouts.rewards), rollouts.rewards.size, decision.kept.sum(), generated, trained
        idle = everything.lengths[scores == 0].sum(), everything.lengths.sum()
        rows.append((*counts, costs.step_s(rollout_s, update_s), *idle))
        selector.feedback(StepCost(step, rollout_s, update_s, costs.fixed_s))

    def mean(of: Callable[[StepVariance, float], float], *, skipping: bool = False) -> float:
        values = [of(account, full) for account, full, skips in accounts if skips or not skipping]
        return float(np.mean(values)) if values else 1.0

    def growth(account: StepVariance, full: float) -> float:
        return account.growth.realised if label != "biased" else account.kept / full / scale**2

    label, effect = max(labels, key=("exact", "unbiased", "ratio", "biased").index), decision.effect
    scale = float(np.mean(lengths)) if lengths else 1.0
    means = np.array(rows, dtype=np.float64).mean(axis=0).tolist()
    prompts, completions, trained_on, tokens, tokens_trained, step_s, idle_tokens, nominal_tokens = means
    return Prediction(
        method=method,
        label=label,
        prompts_generated=prompts,
        completions_generated=completions,
        completions_trained=trained_on,
        tokens_generated=tokens,
        tokens_trained=tokens_trained,
        step_s=step_s,
        scale=scale,
        variance_ratio=mean(growth) if scale else 1.0,
        variance_skipping=mean(growth, skipping=any(skips for *_, skips in accounts)) if scale else 1.0,
        predicted_variance=mean(lambda account, _: account.growth.predicted),
        imputed_share=outcomes.imputed / max(outcomes.requested, 1),
        without_gradient=idle_tokens / max(nominal_tokens, 1.0),
        prompt_effect=(effect.realised, effect.error, effect.uniform) if effect else None,
    )


def _predicted_over_true(trace: Trace, decision: TrainSelection, divisor: FloatArray) -> float:
    """By what factor the divisors of a step's decision are larger than the full batch's [N, G]: s^2 has their square, a
    gradient the first power."""
    objective = trace.config.objective
    if objective.normalization != "token_mean" or not len(decision.denominator):
        return 1.0
    first = decision.minibatch * (len(divisor) // objective.updates_per_step)  # prompt of its mini-batch
    return float(np.mean(decision.denominator / divisor[first, 0]))


def unpruned_lengths(trace: Trace) -> IntArray:
    """Tokens of completions, [steps, prompts, G], that the recorded run would have generated without pruning.

    The recorded completions are of prompts that were not skipped, and of refills: neither as many nor as long.
    """
    config = copy.deepcopy(trace.config)
    config.objective.updates_per_step = 1  # lengths do not depend on it, and it may fit CPPO's allocation only
    selector, outcomes, lengths = _selector(replace(trace, config=config), "grpo"), _NearestRollouts(trace), []
    for traced in _shown(trace, "grpo", selector):
        rollouts = outcomes.of(selector.begin(traced.step).prompt_index, traced.step)
        selector.finish(rollouts, traced.step)
        selector.feedback(StepCost(traced.step, 0.0, 0.0, 0.0))
        lengths.append(rollouts.lengths)
    return np.stack(lengths)


def refused(trace: Trace, methods: Iterable[str]) -> dict[str, str]:
    """Methods that the trace's settings or rewards do not allow, each with the reason.

    Example: with `pruning.completion.rate` = 0.95 and groups of 16, `cppo` would keep no completion; `dppo` would.
    """
    reasons, rewards = {}, np.concatenate([step.rollouts.rewards.ravel() for step in trace.steps])
    outside = rewards[(rewards < -REWARD_ROUNDING) | (rewards > 1.0 + REWARD_ROUNDING)]
    for method in methods:
        try:
            if (why := _selector(trace, method).in_unit) and len(outside):
                reasons[method] = f"the trace has a reward of {outside[0]:g}, and {why}"
        except UserError as error:
            reasons[method] = str(error)
    return reasons


def left_out(refusals: dict[str, str]) -> list[str]:
    """What `refused` gave, a line for each reason."""
    names = {why: ", ".join(one for one in refusals if refusals[one] == why) for why in refusals.values()}
    return [f"{methods}: not with these settings: {why}" for why, methods in names.items()]


def _selector(trace: Trace, method: str, capacity: StepCapacity | None = None, order: Order | None = None) -> Selector:
    """The trainer's selector, at step 1."""
    settings = selection_settings(with_method(trace.config, method))
    return Selector(settings, trace.num_prompts, order, capacity, trace.set_sizes, trace.features)


def _shown(trace: Trace, method: str, selector: Selector) -> Iterator[TracedStep]:
    """The steps of the trace, with `selector` brought to the prompts of each: one of bounded size has lost its first
    steps, a damaged one any."""
    before = 0
    with progress(f"simulating {method}", len(trace.steps), "steps") as advance:
        for traced in counted(trace.steps, advance):
            selector.skip(traced.step - before - 1)
            before = traced.step
            yield traced


def _rolled_out(
    selector: Selector, outcomes: _NearestRollouts, costs: StepTimeModel, step: int
) -> tuple[Rollouts, float]:
    """What a step generates, refills included, and the seconds of that."""
    rollouts = outcomes.of(selector.begin(step).prompt_index, step)
    rollout_s = costs.rollout.of(float(rollouts.lengths.sum()))
    while (more := selector.refill(rollouts.rewards, step)) is not None:
        added = outcomes.of(more.prompt_index, step)
        rollout_s += costs.rollout.of(float(added.lengths.sum()))
        rollouts = _append(rollouts, added)
    return rollouts, rollout_s


def capacity_of(trace: Trace) -> StepCapacity | None:
    """What the micro-batches of the recorded run hold."""
    layout = trace.config.actor.layout
    ranks = max(trace.ranks, layout.tensor_parallel * layout.pipeline_parallel * layout.context_parallel)
    return TokenCapacity.of(trace.config.packing, packing_layout(trace.config.actor, ranks))


def like_for_like(one: Prediction, base: Prediction, noise: float = 0.0) -> tuple[float, float] | None:
    """(low, high): between these is the speed-up of `one` over `base` to the same result, as 95 % of single pairs of
    runs measure it, if `noise` is half of a 95 % interval of its logarithm (`compare.verdict.pair_noise`).
    With noise 0, its mean over pairs. High is then the ratio of the seconds of a step, for a run that more noise does
    not slow down (a batch above its critical size). Low also divides by the growth of the variance, for a run that only
    noise limits: the steps that it needs are proportional to it. None if one of them is biased: its result is another.

    Example: steps of 10 s and 4 s, 1.25 times the variance: 2.0 to 2.5. With noise 0.5 one pair is within 1.2 to 4.1.
    """
    if "biased" in (one.label, base.label):
        return None
    faster, luck = base.step_s / one.step_s, math.exp(noise)
    return faster / max(one.variance_ratio / base.variance_ratio, 1.0) / luck, faster * luck


def limits(predictions: list[Prediction], costs: StepTimeModel) -> list[str]:
    """What bounds the gain on this trace, from the first method (meant to be unpruned), a line each."""
    base = predictions[0]
    # not judged by its tokens: an unpruned run too leaves out what has no reward or is too long for the objective
    is_unpruned = levels(base.method) == ("none", "none")
    rollout_s, update_s = costs.rollout.of(base.tokens_generated), costs.update_s(base.tokens_trained)
    whole_s = costs.step_s(rollout_s, update_s)
    share = costs.step_s(rollout_s, 0.0) / whole_s
    with_gradient = min(base.tokens_generated * (1.0 - base.without_gradient), base.tokens_trained)
    exact = whole_s / costs.step_s(rollout_s, costs.update_s(with_gradient))
    lines = [
        f"{share:.0%} of a step of {base.method} is rollout and what is fixed: dropping completions alone is at most"
        f" {1.0 / share:.2f}x; {base.without_gradient:.0%} of the tokens have no gradient, and dropping just those,"
        f" which is exact, is {exact:.2f}x"
        if is_unpruned
        else f"the limits are unknown: {base.method}, the first method, prunes; begin --methods with grpo"
    ]
    if is_unpruned and share > _MOSTLY_ROLLOUT:
        lines.append("pruning completions cannot help here: rollouts take nearly all of the time")
    for one in predictions:
        if one.prompt_effect and one.prompts_generated < base.prompts_generated:
            realised, error, uniform = one.prompt_effect
            verdict = "helps" if realised + error < uniform else "does not help here, a smaller batch would do as well"
            lines.append(
                f"{one.method}: skipping prompts has {realised:.2f} +- {error:.2f} times the variance, random skipping"
                f" at the same cost {uniform:.2f}: the score {verdict}"
            )
    return lines


def table(predictions: list[Prediction], costs: StepTimeModel, noise: float | None = None) -> str:
    """A table to print; speed-up is in seconds a step against the first method. Below it, what limits the gain.
    `noise`: see `like_for_like`; None: not known."""
    rows = [_HEAD]
    for p in predictions:
        alike = like_for_like(p, predictions[0])
        pair = None if noise is None else like_for_like(p, predictions[0], noise)
        shown = ["-" if each is None else f"{each[0]:.2f}-{each[1]:.2f}x" for each in (pair, alike)]
        counts = [f"{count:.1f}" for count in (p.prompts_generated, p.completions_generated, p.completions_trained)]
        tokens = [f"{count:.0f}" for count in (p.tokens_generated, p.tokens_trained)]
        times = [f"{p.step_s:.3f}", f"{predictions[0].step_s / p.step_s:.2f}x", *shown]
        noises = [f"{value:.2f}" for value in (p.scale, p.variance_ratio, p.variance_skipping)]
        rows.append([p.method, p.label, *counts, *tokens, *times, *noises, f"{p.imputed_share:.0%}"])
    model = (
        f"cost model: {1000 * costs.rollout.average:.3g} s for 1,000 generated tokens,"
        f" {costs.update_s_per_1k_tokens:.3g} s for 1,000 trained tokens, {costs.fixed_s:.3g} s a step"
    )
    return "\n".join([model, *aligned(rows, left=2), *limits(predictions, costs)])


def as_json(predictions: list[Prediction], costs: StepTimeModel, noise: float | None = None) -> dict[str, object]:
    """The predictions as plain values; `noise` as in `like_for_like`, None: that interval is null."""
    methods = []
    for p in predictions:
        pair = None if noise is None else like_for_like(p, predictions[0], noise)
        methods.append(asdict(p) | {"like_for_like": pair, "like_for_like_mean": like_for_like(p, predictions[0])})
    described = asdict(costs) | {"rollout_s_per_1k_tokens": 1000 * costs.rollout.average}
    return {"costs": described, "methods": methods, "limits": limits(predictions, costs)}


class _NearestRollouts:
    """The outcome of a prompt's rollout at the nearest recorded step."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._visits: dict[int, list[tuple[int, int, int]]] = {}
        for position, traced in enumerate(trace.steps):
            for row, prompt in enumerate(traced.prompt_index.tolist()):
                self._visits.setdefault(prompt, []).append((traced.step, position, row))
        self._anything = [visit for visits in self._visits.values() for visit in visits]
        self.requested = self.imputed = 0

    def of(self, prompts: IntArray, step: int) -> Rollouts:
        """Outcomes [K, G] of `prompts` at `step`; a prompt never recorded borrows another prompt's visit."""
        places = [self._nearest(prompt, step) for prompt in prompts.tolist()]
        self.requested += len(places)
        self.imputed += sum(at != step for at, _, _ in places)
        rows = [(self._trace.steps[position].rollouts, row) for _, position, row in places]
        empty, features = self._trace.steps[0].rollouts, self._trace.features
        columns = {
            name: np.stack([getattr(step, name)[row] for step, row in rows]) if rows else getattr(empty, name)[:0]
            for name in _COLUMNS
        }
        return Rollouts(**columns, prompt_tokens=None if features is None else features.prompt_tokens[prompts])

    def _nearest(self, prompt: int, step: int) -> tuple[int, int, int]:
        visits = self._visits.get(prompt)
        if visits is None:
            any_visit = int(generator(self._trace.config.seed, "simulate", prompt).integers(len(self._anything)))
            return (-1, *self._anything[any_visit][1:])
        after = bisect_left(visits, step, key=itemgetter(0))
        if not after:
            return visits[0]
        before = bisect_left(visits, visits[after - 1][0], key=itemgetter(0))  # the first of that step's visits
        return min([visits[before], *visits[after : after + 1]], key=lambda visit: abs(visit[0] - step))


def _append(first: Rollouts, second: Rollouts) -> Rollouts:
    tokens = [one.prompt_tokens for one in (first, second) if one.prompt_tokens is not None]
    columns = {name: np.concatenate([getattr(first, name), getattr(second, name)]) for name in _COLUMNS}
    return Rollouts(**columns, prompt_tokens=np.concatenate(tokens) if tokens else None)
