"""How much noisier pruning makes a gradient: the one account of it, predicted before a draw and realised after it.

A completion of score s (`completion_score`, a proxy of its gradient's norm) adds s^2 to the full batch's variance, and
W^2 s^2 to that of a step which trains on it with weight W. Only what was rolled out is known, each with
its prompt's weight w, so a step's growths are those of its own full batch, estimated from it:

    by skipping prompts        sum w^2 s^2 / sum w s^2
    by dropping completions    sum W^2 s^2 / sum w^2 s^2
    by both                    sum W^2 s^2 / sum w s^2, the product

Where completions may be stopped early, those that came to their end count e for them: the sums above have e s^2 in
place of s^2, and between both stands sum w^2 e^2 s^2 / sum w^2 e s^2. Their baselines, means of the mates that came to
an end, are noisier than the full batch's, of which e s^2 holds too much: that growth is by stopping as well.

In groups of several sizes a group of n counts as one of G: G / n times each completion, of which the full batch would
have had G, with (1 - 1/n) / (1 - 1/G) of the moment, since the mean of more others is less noisy. That is a growth
before the others: below 1, or above it with fewer tokens, since sizes go by cost too.

A growth of 1.2 is a batch 1.2 times smaller. What it leaves out: that completions' gradients may be correlated, and
that a systematic draw is quieter than the independent one of these sums.
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
"""Share of a step's moment that is left, at least, without its baselines' noise, whose estimate may be more than all:
this acts in 0 to 3 % of made-up steps of 64 prompts whose lengths have a Pareto tail."""
_SUMS = ("effect", "moment", "predicted", "score", "kept", "tokens", "effect2", "cross", "moment2", "groups")


@dataclass(frozen=True, slots=True)
class Growth:
    """Of the variance by a selection, as a factor."""

    predicted: float
    """From scores and probabilities, before the draw."""
    realised: float
    """By the outcomes of the same step."""


NONE = Growth(1.0, 1.0)


@dataclass(frozen=True, slots=True)
class GroupSizes:
    """Of the completions [n] of a step whose groups have several sizes."""

    share: FloatArray
    """G over the size of its group."""
    usual: FloatArray
    """Its second moment in a group of G over that in its own."""
    predicted: float
    """Growth of the variance by them, as the scores predict it."""


@dataclass(frozen=True, slots=True)
class EarlyStops:
    """Of the completions [n] of a step in which some may be stopped early."""

    counts: FloatArray
    """Part of the prompts' weight that is there for completions that were stopped."""
    noise: FloatArray
    """Estimated variance that their mates' stops put into the advantage."""


@dataclass(frozen=True, slots=True)
class StepVariance:
    """The account of one step."""

    prompts: Growth
    completions: Growth
    sizes: Growth
    """By groups of several sizes."""
    early: Growth
    """By stopping completions early. Its probabilities look at nothing, so what was realised is what was foreseen."""
    kept: float
    """sum W^2 s^2."""
    expected: float
    """sum W s^2, for an unbiased method an estimate of the full batch's sum s^2, with the noise of stops' baselines."""

    @property
    def growth(self) -> Growth:
        """By all of it."""
        each = self.prompts, self.completions, self.sizes, self.early
        return Growth(math.prod(one.predicted for one in each), math.prod(one.realised for one in each))

    def metrics(self) -> dict[str, float]:
        """As `prune/*` figures."""
        stages = {"prompt_": self.prompts, "completion_": self.completions, "": self.growth}
        stages |= {"size_": self.sizes} if self.sizes != NONE else {}
        stages |= {"early_stop_": self.early} if self.early != NONE else {}
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
    """Of a step whose `batch` was offered to the completion policy; without any gradient nothing grows.

    Args:
        slope: of the loss's terms that give a completion without advantage a gradient (KL, entropy).
        stands_for: [n] part of `batch.prompt_weight` that is there for missing completions, which no selection has
            left out, and for others of a full group: it is in no growth by a selection.
        sizes: None: all groups have the usual one.
        ended: None: no completion could be stopped early.

    Example: two prompts of one completion each, drawn with probabilities 1/2 and 1; s^2 = 1 and 4. Both were kept, and
    all their completions: the full batch's sum is put at 2 x 1 + 4 = 6, and that of the draw is 4 x 1 + 4 = 8.
    """
    norms = (batch.advantages, batch.logit_grad_norm, batch.denominator)
    own = stands_for * np.square(completion_score(*norms, np.ones(1), zero_advantage_slope=slope))
    full_batch, moment = (own, own) if sizes is None else (own * sizes.usual, own * sizes.share)
    counts = np.ones(len(own)) if ended is None else ended.counts
    first = batch.prompt_weight / stands_for  # with `counts`
    weight = first * completions.weight
    factors = first, np.square(first) / counts, np.square(first), np.square(weight)
    full, by_prompts, drawn, kept = (float(np.sum(factor * moment)) for factor in factors)
    by_sizes, by_stops = NONE, NONE
    if ended is not None and by_prompts:
        share = stands_for if sizes is None else stands_for * sizes.share
        noise = share * np.square(completion_score(np.sqrt(ended.noise), *norms[1:], np.ones(1)))
        growth = drawn / by_prompts * full / max(full - float(np.sum(first * noise)), _LEAST_LEFT * full)
        by_stops = Growth(growth, growth)
    if sizes is not None:
        plain = float(np.sum(first * full_batch))
        by_sizes = Growth(sizes.predicted, full / plain if plain else 1.0)
    return StepVariance(
        Growth(prompts.growth, by_prompts / full if full else 1.0),
        Growth(completions.growth, kept / drawn if drawn else 1.0),
        by_sizes,
        by_stops,
        float(np.sum(stands_for * np.square(weight) * own)),
        float(np.sum(weight * full_batch)),
    )


class EffectMonitor(Stateful):
    """What skipping did to the variance, measured: fading sums over steps, and whether the score is believed.

    A prompt of second moment m, drawn with probability pi, adds m / pi to the variance where the full batch has m.
    Only kept prompts show their m, each with the weight 1 / pi, so over the kept

        effect = sum(m / pi / planned) / sum(m / pi)

    where `planned` is the probability that the score asks for. It is pi itself, except where nothing is skipped
    (warm-up, or after the score was found wanting): what skipping would do is then measured all the same, and pruning
    can begin, or begin again, on evidence. Beside it stands what skipping at random would do at the same cost, the
    inverse of the share of tokens that is planned to be kept. A score that does worse than that is worse than none.

    At rate 0 no plan skips, so the score is never judged, nor are sizes of groups that go by it: of those
    `StepVariance.sizes` tells what they do.
    """

    _state_names = ("_sums", "believed")

    def __init__(self) -> None:
        self._sums = dict.fromkeys(_SUMS, 0.0)
        self.believed = True
        """False from the step whose measured effect was worse than skipping at random, until it no longer is."""

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
        optimism: FloatArray | float = 0.0,
    ) -> None:
        """Visited prompts [K]: outcomes, squared scores, tokens, the probabilities of the draw and of the plan, and by
        which share the scores predict too little."""
        share = float(moment.sum())
        tiny = np.finfo(np.float64).tiny
        if not (len(moment) and float(planned.min()) < 1.0 and share > tiny and float(score.sum()) > tiny):
            return
        # each step counts alike, whatever the size of its gradients
        m, s, w = moment / (share / len(moment)), score / score.mean(), 1.0 / inclusion
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
        """Believe the score, or stop believing it; a line for the log where that changes, else empty."""
        effect = self.effect()
        if effect is None:
            return ""
        said = f"{effect.realised:.2f} +- {effect.error:.2f} times the variance, random skipping {effect.uniform:.2f}"
        if self.believed and effect.is_worse:
            self.believed = False
            return (
                f"pruning.prompt: skipping has {said} at the same cost: no prompt is skipped until the score is better"
            )
        if not self.believed and effect.realised < effect.uniform:
            self.believed = True
            return (
                f"pruning.prompt: skipping by score would now have {said} at the same cost: prompts are skipped again"
            )
        return ""
