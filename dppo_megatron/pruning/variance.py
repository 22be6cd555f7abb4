"""How much noisier pruning makes a gradient, predicted before a draw and measured after it.

A completion of score s (`completion_score`, a proxy of its gradient's norm) adds s^2 to the full batch's variance, and
W^2 s^2 to the variance of a step that trains on it with weight W. Only completions that were rolled out are known, each
with its prompt's weight w, so a step's full batch is estimated from them. The factors by which the variance grows are

    by skipping prompts        sum w^2 s^2 / sum w s^2
    by dropping completions    sum W^2 s^2 / sum w^2 s^2
    by both                    sum W^2 s^2 / sum w s^2, the product

If completions may be stopped early, those that finish have a weight e that makes up for the others. By prompts, the
sums then have e s^2 in place of s^2; by completions, w e in place of w; and stopping has grown the variance in between
by sum w^2 e^2 s^2 / sum w^2 e s^2. Baselines then use only the group mates that finished, which makes them noisier than
the full batch's. e s^2 contains that noise, so it is subtracted from the full batch's sum: it is growth by stopping.

If groups have several sizes, a group of n counts as one of G: each completion G / n times. The full batch would have
had G of them, each with (1 - 1/n) / (1 - 1/G) of the moment, since the mean of more others is less noisy. This factor
precedes the others. It is below 1, or above 1 but with fewer tokens, since sizes depend on cost too.

A growth of 1.2 means as much noise as a batch 1.2 times smaller. It ignores that completions' gradients may be
correlated, and that a systematic draw is usually less noisy than the independent draw of these sums.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dppo_megatron.pruning.interface import CompletionBatch, Effect, Selection, Stateful
from dppo_megatron.pruning.scores import completion_score
from dppo_megatron.types import FloatArray

_EFFECT_FADE = 0.95
"""A horizon of 20 steps."""
_LEAST_LEFT = 0.1
"""Smallest share of a step's moment that remains after subtracting the baselines' noise, whose estimate may exceed the
moment. It acted in 0 to 3 % of simulated steps of 64 prompts whose lengths have a Pareto tail."""
_SUMS = ("effect", "moment", "predicted", "score", "kept", "tokens", "effect2", "cross", "moment2", "groups")


@dataclass(frozen=True, slots=True)
class Growth:
    """Factor by which a selection increases the gradient's variance."""

    predicted: float
    """From scores and probabilities, before the draw."""
    realised: float
    """From the outcomes of the same step."""


UNCHANGED = Growth(1.0, 1.0)


@dataclass(frozen=True, slots=True)
class GroupSizes:
    """Needed for a step whose groups have several sizes; arrays [n] are of its completions."""

    share: FloatArray
    """G over the size of the completion's group."""
    usual: FloatArray
    """The completion's second moment in a group of G over that in its own group."""
    predicted: float
    """Growth of the variance by the sizes, as the scores predict it."""


@dataclass(frozen=True, slots=True)
class EarlyStops:
    """Needed for a step in which completions may be stopped early; arrays [n] are of its completions."""

    counts: FloatArray
    """Factor in `prompt_weight` that makes up for completions that were stopped."""
    noise: FloatArray
    """Estimated variance of the advantage that is due to stops of group mates."""


@dataclass(frozen=True, slots=True)
class StepVariance:
    """How one step's selections change the variance of its gradient."""

    prompts: Growth
    completions: Growth
    sizes: Growth
    """By groups of several sizes."""
    early: Growth
    """By stopping completions early. Its probabilities depend on settings alone, so predicted is set to realised."""
    kept: float
    """sum W^2 s^2."""
    expected: float
    """sum W s^2: if unbiased, an estimate of the full batch's sum s^2 plus the baselines' noise from early stops."""

    @property
    def growth(self) -> Growth:
        each = self.prompts, self.completions, self.sizes, self.early
        return Growth(math.prod(one.predicted for one in each), math.prod(one.realised for one in each))

    def metrics(self) -> dict[str, float]:
        stages = {"prompt_": self.prompts, "completion_": self.completions, "": self.growth}
        stages |= {"size_": self.sizes} if self.sizes != UNCHANGED else {}
        stages |= {"early_stop_": self.early} if self.early != UNCHANGED else {}
        predicted = {f"prune/{stage}design_effect": growth.predicted for stage, growth in stages.items()}
        return predicted | {f"prune/{stage}realised_design_effect": each.realised for stage, each in stages.items()}


def step_variance(
    prompts: Selection,
    batch: CompletionBatch,
    completions: Selection,
    slope: float = 0.0,
    stands_for: FloatArray | float = 1.0,
    sizes: GroupSizes | None = None,
    ended: EarlyStops | None = None,
) -> StepVariance:
    """For a step whose `batch` was offered to the completion policy; all factors are 1 if there is no gradient.

    Args:
        slope: of the loss terms that give a completion with advantage 0 a gradient (KL, entropy).
        stands_for: [n] factor in `batch.prompt_weight` that makes up for missing completions and groups. No selection
            left these out, so it counts in no growth by a selection.
        sizes: None: all groups have the usual size.
        ended: None: no completion could be stopped early.

    Example: two prompts of one completion each, drawn with probabilities 1/2 and 1; s^2 = 1 and 4. Both were kept, with
    their completions: the full batch's sum is estimated as 2 x 1 + 4 = 6, and the draw's is 4 x 1 + 4 = 8.
    """
    norms = (batch.advantages, batch.logit_grad_norm, batch.denominator)
    squared = stands_for * np.square(completion_score(*norms, np.ones(1), zero_advantage_slope=slope))
    ones = np.ones(len(squared))
    sizes = sizes or GroupSizes(ones, ones, 1.0)
    ended = ended or EarlyStops(ones, np.zeros(len(squared)))
    full_batch, moment = squared * sizes.usual, squared * sizes.share
    drawn_weight = batch.prompt_weight / stands_for  # still contains `ended.counts`: w e of the module docstring
    weight = drawn_weight * completions.weight
    factors = drawn_weight, np.square(drawn_weight) / ended.counts, np.square(drawn_weight), np.square(weight)
    full, by_prompts, drawn, kept = (float(np.sum(factor * moment)) for factor in factors)
    noise = stands_for * sizes.share * np.square(completion_score(np.sqrt(ended.noise), *norms[1:], np.ones(1)))
    without_noise = full - float(np.sum(drawn_weight * noise))
    by_stops = drawn / by_prompts * full / max(without_noise, _LEAST_LEFT * full) if by_prompts else 1.0
    usual_sizes = float(np.sum(drawn_weight * full_batch))
    return StepVariance(
        Growth(prompts.growth, by_prompts / full if full else 1.0),
        Growth(completions.growth, kept / drawn if drawn else 1.0),
        Growth(sizes.predicted, full / usual_sizes if usual_sizes else 1.0),
        Growth(by_stops, by_stops),
        float(np.sum(stands_for * np.square(weight) * squared)),
        float(np.sum(weight * full_batch)),
    )


class EffectMonitor(Stateful):
    """Measures what skipping did to the variance, in faded sums over steps, and decides whether to believe the score.

    A prompt of second moment m, drawn with probability pi, adds m / pi to the variance instead of m in the full batch.
    Only kept prompts reveal their m, each with weight 1 / pi, so over the kept

        effect = sum(m / pi / planned) / sum(m / pi)

    where `planned` is the probability derived from the score. It equals pi except while nothing is skipped (warm-up, or
    after the score was rejected). The effect that skipping would have is measured then too. It is compared with
    skipping at random at the same cost, whose effect is the inverse of the share of tokens planned to be kept.

    At rate 0 no plan skips, so the score is never judged, and neither are group sizes derived from it; their effect is
    measured by `StepVariance.sizes`.
    """

    _state_names = ("_sums", "believed")

    def __init__(self) -> None:
        self._sums = dict.fromkeys(_SUMS, 0.0)
        self.believed = True
        """False once the effect is worse than random skipping by more than its error, until it is better than that."""

    def effect(self) -> Effect | None:
        """None before the first step in which skipping was planned and something had gradient."""
        s = self._sums
        if not (s["moment"] > 0 and s["score"] > 0 and s["kept"] > 0):
            return None
        realised = s["effect"] / s["moment"]
        squares = s["effect2"] - 2.0 * realised * s["cross"] + realised**2 * s["moment2"]
        return Effect(
            predicted=s["predicted"] / s["score"],
            realised=realised,
            error=float(np.sqrt(max(squares, 0.0))) / s["moment"],
            uniform=s["tokens"] / s["kept"],
            groups=s["groups"],
        )

    def observe(
        self,
        moment: FloatArray,
        score: FloatArray,
        tokens: FloatArray,
        inclusion: FloatArray,
        planned: FloatArray,
        optimism: float = 0.0,
    ) -> None:
        """Add visited prompts [K]: second moments and their predictions, tokens, the probabilities of the draw and of
        the plan, and the share by which the effect is predicted too low."""
        total = float(moment.sum())
        tiny = np.finfo(np.float64).tiny
        if not (len(moment) and float(planned.min()) < 1.0 and total > tiny and float(score.sum()) > tiny):
            return
        # normalised, so that every step counts the same whatever the size of its gradients
        m, s, w = moment / (total / len(moment)), score / score.mean(), 1.0 / inclusion
        seen = {
            "effect": m * w / planned,
            "moment": m * w,
            "predicted": s * (1.0 + optimism) * w / planned,
            "score": s * w,
            "kept": tokens * w * planned,
            "tokens": tokens * w,
            "effect2": np.square(m * w / planned),
            "cross": np.square(m * w) / planned,
            "moment2": np.square(m * w),
            "groups": m > 0,
        }
        for name, values in seen.items():
            fade = _EFFECT_FADE**2 if name in ("effect2", "cross", "moment2") else _EFFECT_FADE
            self._sums[name] = fade * self._sums[name] + float(np.sum(values))

    def judge(self) -> str:
        """Update `believed`; returns a log line if it changed, else an empty string."""
        effect = self.effect()
        if effect is None:
            return ""
        has = f"{effect.realised:.2f} +- {effect.error:.2f} times the variance, random skipping {effect.uniform:.2f}"
        if self.believed and effect.is_worse:
            self.believed = False
            return (
                f"pruning.prompt: skipping has {has} at the same cost: no prompt is skipped until the score is better"
            )
        if not self.believed and effect.realised < effect.uniform:
            self.believed = True
            return f"pruning.prompt: skipping by score would now have {has} at the same cost: prompts are skipped again"
        return ""
