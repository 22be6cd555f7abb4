"""Estimates what each pruning method would cost, from a recorded run and without a GPU.

The trainer's own `Selector` runs over the trace: the same policies, draws and weights, with recorded outcomes in place
of an engine. An outcome that the recorded run did not produce (a prompt it skipped, or that another method reaches
earlier) is taken from the nearest recorded visit of that prompt, and the share of such outcomes is reported. A replay
cannot know how another method would have changed the model: figures are for the model of the recorded run.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from dppo_megatron.pruning.interface import StepCost
from dppo_megatron.pruning.methods import with_method
from dppo_megatron.randomness import generator
from dppo_megatron.selection import Decision, Rollouts, Selector
from dppo_megatron.trace import Trace
from dppo_megatron.types import FloatArray, IntArray, UserError


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of a step: fixed + rollout x generated tokens + update x trained tokens."""

    rollout_s_per_1k_tokens: float
    update_s_per_1k_tokens: float
    fixed_s: float
    """Per step, whatever is pruned: syncing, selecting, packing."""

    def seconds(self, tokens_generated: float, tokens_trained: float) -> tuple[float, float]:
        """(generation, update) seconds without the fixed part."""
        return (
            self.rollout_s_per_1k_tokens * tokens_generated / 1000,
            self.update_s_per_1k_tokens * tokens_trained / 1000,
        )


@dataclass(frozen=True, slots=True)
class Prediction:
    """One method on one trace; counts and seconds are means over the steps."""

    method: str
    label: str
    """The worst label of its ledger: exact, unbiased, ratio or biased."""
    prompts_generated: float
    completions_generated: float
    completions_trained: float
    tokens_generated: float
    tokens_trained: float
    step_s: float
    scale: float
    """sum W s^2 / sum s^2, s the gradient-norm proxy of docs/pruning.md: about how long the expected gradient is,
    relative to the full batch's. 1 for an unbiased method, up to the noise of the draws."""
    variance_ratio: float
    """sum W^2 s^2 over the trained completions / sum s^2 over all nominal ones / scale^2: the growth of the
    gradient's variance at equal length, if completions' gradients are uncorrelated."""
    imputed_share: float
    """Groups whose outcome was not recorded at that step and came from another visit."""


def fit_costs(trace: Trace, rollout_cost: float | None, update_cost: float | None) -> CostModel:
    """A cost model from the trace's own seconds; a given cost (seconds for 1,000 tokens) replaces the measured one.

    Generation and update are taken as proportional to their tokens. A fit with an intercept was worse: steps of an
    unpruned trace have nearly equal token counts, so noise flattens the slope and the intercept absorbs the rest.

    Raises:
        UserError: a cost is not given, and the trace has no tokens to measure it by.
    """
    generated = np.array([step.rollouts.lengths.sum() for step in trace.steps]) / 1000
    trained = np.array([step.rollouts.lengths.ravel()[step.kept].sum() for step in trace.steps]) / 1000
    fixed = float(np.mean([step.seconds["other"] for step in trace.steps]))
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
        seconds = sum(step.seconds[name] for step in trace.steps)
        costs.append(seconds / float(tokens.sum()))
    return CostModel(costs[0], costs[1], fixed)


def simulate(trace: Trace, method: str, costs: CostModel) -> Prediction:
    """Replay `method` over the trace."""
    config = with_method(trace.config, method)
    selector = Selector(config, trace.num_prompts, set_sizes=trace.set_sizes)
    outcomes = _Outcomes(trace)
    totals: dict[str, float] = dict.fromkeys(("prompts", "completions", "trained", "generated_t", "trained_t"), 0.0)
    labels, kept_variance, kept_scale, full_variance, seconds = {"exact"}, 0.0, 0.0, 0.0, 0.0
    for traced in trace.steps:
        step = traced.step
        rollouts = outcomes.of(selector.begin(step).prompt_index, step)
        while (more := selector.refill(rollouts.rewards, step)) is not None:
            rollouts = _append(rollouts, outcomes.of(more.prompt_index, step))
        decision = selector.finish(rollouts, step)
        labels.update(row.label for row in decision.ledger)
        generated, trained = float(rollouts.lengths.sum()), float(rollouts.lengths.ravel()[decision.kept].sum())
        rollout_s, update_s = costs.seconds(generated, trained)
        seconds += costs.fixed_s + rollout_s + update_s
        for name, amount in (
            ("prompts", len(rollouts.rewards)),
            ("completions", rollouts.rewards.size),
            ("trained", decision.kept.sum()),
            ("generated_t", generated),
            ("trained_t", trained),
        ):
            totals[name] += float(amount)
        scores = _scores(decision, rollouts)
        step_variance = float(np.sum(np.square(decision.weight * scores)))
        kept_variance += step_variance
        kept_scale += float(np.sum(decision.weight * np.square(scores)))
        everything = outcomes.of(decision.offered[: selector.prompts_per_step], step)
        full_variance += float(np.sum(np.square(selector.full_scores(everything))))
        selector.feedback(StepCost(step, rollout_s, update_s, costs.fixed_s, step_variance**0.5))
    count = len(trace.steps)
    scale = kept_scale / full_variance if full_variance else 1.0
    worst = max(labels, key=("exact", "unbiased", "ratio", "biased").index)
    return Prediction(
        method=method,
        label=worst,
        prompts_generated=totals["prompts"] / count,
        completions_generated=totals["completions"] / count,
        completions_trained=totals["trained"] / count,
        tokens_generated=totals["generated_t"] / count,
        tokens_trained=totals["trained_t"] / count,
        step_s=seconds / count,
        scale=scale,
        variance_ratio=kept_variance / full_variance / scale**2 if full_variance and scale else 1.0,
        imputed_share=outcomes.imputed / max(outcomes.asked, 1),
    )


def table(predictions: list[Prediction], costs: CostModel) -> str:
    """A table to print; speed-up is in seconds a step against the first method."""
    header = (
        f"{'method':<18}{'label':<10} {'prompts':>8} {'generated':>10} {'trained':>8} {'gen. tok':>9}"
        f" {'train. tok':>10} {'s/step':>7} {'speed-up':>9} {'scale':>6} {'variance':>9} {'imputed':>8}"
    )
    lines = [
        f"cost model: {costs.rollout_s_per_1k_tokens:.3g} s for 1,000 generated tokens,"
        f" {costs.update_s_per_1k_tokens:.3g} s for 1,000 trained tokens, {costs.fixed_s:.3g} s a step",
        header,
    ]
    for p in predictions:
        lines.append(
            f"{p.method:<18}{p.label:<10} {p.prompts_generated:>8.1f} {p.completions_generated:>10.1f}"
            f" {p.completions_trained:>8.1f} {p.tokens_generated:>9.0f} {p.tokens_trained:>10.0f} {p.step_s:>7.3f}"
            f" {predictions[0].step_s / p.step_s:>8.2f}x {p.scale:>6.2f} {p.variance_ratio:>9.2f}"
            f" {p.imputed_share:>7.0%}"
        )
    return "\n".join(lines)


def as_json(predictions: list[Prediction], costs: CostModel) -> dict[str, object]:
    """As JSON, for other tools."""
    return {"costs": asdict(costs), "methods": [asdict(p) for p in predictions]}


class _Outcomes:
    """The outcome of a prompt's rollout at the nearest recorded step."""

    def __init__(self, trace: Trace) -> None:
        self._visits: dict[int, list[tuple[int, int, int]]] = {}
        self._steps = trace.steps
        for position, traced in enumerate(trace.steps):
            for row, prompt in enumerate(traced.prompt_index.tolist()):
                self._visits.setdefault(prompt, []).append((traced.step, position, row))
        self._anything = [visit for visits in self._visits.values() for visit in visits]
        self._seed = trace.config.seed
        self.asked = self.imputed = 0

    def of(self, prompts: IntArray, step: int) -> Rollouts:
        """Outcomes [K, G] of `prompts` at `step`; a prompt never recorded borrows another prompt's visit."""
        places = [self._nearest(prompt, step) for prompt in prompts.tolist()]
        self.asked += len(places)
        self.imputed += sum(at != step for at, _, _ in places)
        columns = ("rewards", "lengths", "surprisal")
        empty = self._steps[0].rollouts
        return Rollouts(
            *(
                np.stack([getattr(self._steps[position].rollouts, name)[row] for _, position, row in places])
                if places
                else getattr(empty, name)[:0]
                for name in columns
            )
        )

    def _nearest(self, prompt: int, step: int) -> tuple[int, int, int]:
        visits = self._visits.get(prompt)
        if visits is None:
            any_visit = int(generator(self._seed, "simulate", prompt).integers(len(self._anything)))
            return (-1, *self._anything[any_visit][1:])
        return min(visits, key=lambda visit: abs(visit[0] - step))


def _append(first: Rollouts, second: Rollouts) -> Rollouts:
    return Rollouts(
        np.concatenate([first.rewards, second.rewards]),
        np.concatenate([first.lengths, second.lengths]),
        np.concatenate([first.surprisal, second.surprisal]),
    )


def _scores(decision: Decision, rollouts: Rollouts) -> FloatArray:
    scores: FloatArray = np.abs(decision.advantages) * rollouts.surprisal.ravel() / decision.denominator
    return scores
