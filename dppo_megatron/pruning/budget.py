"""How far a pruning rate may go: the back-off on gradient noise, the cost ratio of the self-tuned rule, and whether
the measured effect of skipping bears the score out.

The bound on the design effect needs no state, as it is known before a draw. The gradient noise is known only after the
step, so that loop is closed through a scale on the rate: quick to fall, slow to rise, like congestion control.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from dppo_megatron.pruning.interface import Effect, StepCost, check_state
from dppo_megatron.types import FloatArray

NOISE_REFERENCE_STEPS = 4
"""So many unpruned steps with a gradient must a `max_noise_ratio` have to compare with before anything is pruned."""
_FALL, _RISE, _SMALLEST = 0.7, 0.02, 0.01
_COST_DECAY = _NOISE_DECAY = 0.9
_FLOOR_FADE, _FLOOR_STEPS, _FLOOR_ERRORS, _LARGEST_FLOOR = 0.98, 8.0, 2.0, 0.75
_EFFECT_FADE = 0.95
"""A horizon of 20 steps."""
_SUMS = ("effect", "moment", "predicted", "score", "kept", "tokens", "effect2", "cross", "moment2", "groups")


@dataclass(slots=True)
class NoiseReference:
    """What the squared gradient norm is without pruning."""

    mean: float = 0.0
    """Running mean over unpruned steps; 0 before the first."""
    steps: list[int] = field(default_factory=list)
    """The first `NOISE_REFERENCE_STEPS` of those steps, as they count from 1."""

    def ratio(self, squared_norm: float, step: int, *, pruned: bool) -> float | None:
        """Of a finished step to an unpruned one; None before there was one. An unpruned step has 1 by definition.

        That 1 is what lets a rate return that had fallen to nothing: every step is then unpruned, and a ratio that is
        never reported could never rise above it. A step without any gradient (all answers wrong) has no information:
        nothing in it was left to chance, and a mean that counted it would attribute the others' gradient to pruning.

        Example: unpruned steps of 1.0 and 2.0 make a mean of 1.1; a pruned step of 3.3 then has a ratio of 3.
        """
        if math.isnan(squared_norm) or squared_norm == 0:
            return None
        if not math.isfinite(squared_norm):
            return math.inf if pruned and self.mean else None
        if pruned:
            return squared_norm / self.mean if self.mean else None
        self.mean = _NOISE_DECAY * self.mean + (1 - _NOISE_DECAY) * squared_norm if self.mean else squared_norm
        if len(self.steps) < NOISE_REFERENCE_STEPS:
            self.steps.append(step)
        return 1.0

    def is_wanting(self, before: int) -> bool:
        """Whether the steps before `before` (from 1) were too few to compare with."""
        return sum(step < before for step in self.steps) < NOISE_REFERENCE_STEPS

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean, "steps": list(self.steps)}

    def load_state_dict(self, state: Mapping[str, Any] | float) -> None:
        """Restore; of a checkpoint from before steps were counted, the mean alone."""
        if isinstance(state, Mapping):
            self.mean, self.steps = float(state["mean"]), [int(step) for step in state["steps"]]
        else:
            self.mean, self.steps = float(state), [0] * NOISE_REFERENCE_STEPS if state else []


def floor_share(sums: Sequence[float]) -> float:
    """Share of full seconds that remains however little is kept, from sums of 1, x, y, x^2, xy and y^2 over steps: y
    seconds, x the kept share. In [0, 0.75], and 0 unless steps differ enough to tell.

    A rollout waits for its longest completions, so seconds do not fall to nothing with their tokens. The intercept of a
    straight line, drawn to 0 by as much as it may be chance: steps of equal size say nothing about it.

    Example: steps that kept all took 10 s and those that kept half 8: the line's intercept is 6 s, the share 0.6.
    """
    count, x, y, xx, xy, yy = sums
    if count < _FLOOR_STEPS:
        return 0.0
    spread, along = xx - x * x / count, xy - x * y / count
    if spread <= 1e-9 * xx:
        return 0.0
    slope = along / spread
    intercept = (y - slope * x) / count
    left = max(yy - y * y / count - slope * along, 0.0) / (count - 2)
    error = _FLOOR_ERRORS * math.sqrt(left * xx / (count * spread))
    if intercept <= error or slope <= 0:  # seconds that fall with what is kept are not this line's
        return 0.0
    trust = 1.0 - (error / intercept) ** 2
    return min(trust * intercept / (intercept + slope), _LARGEST_FLOOR)


@dataclass(slots=True)
class RateControl:
    rate_scale: float = 1.0
    """Factor on the configured rate, in [0, 1]."""
    cost_ratio: float = 0.0
    """Running mean of fixed over variable seconds at full batch; 0 before the first measurement."""
    seconds: list[float] = field(default_factory=lambda: [0.0] * 6)
    """Fading sums for `floor_share`."""

    @property
    def note(self) -> str:
        """For the ledger, where the rate was backed off."""
        return f"rate scaled by {self.rate_scale:.2f}: gradient noise" if self.rate_scale < 1 else ""

    def observe_noise(self, cost: StepCost, max_noise_ratio: float, key: str) -> str | None:
        """Lower the scale above the bound, raise it slowly within; a line for the log when it is lowered."""
        noise_ratio = cost.noise_ratio
        if max_noise_ratio == 0 or noise_ratio is None or not noise_ratio > 0:
            return None
        before = self.rate_scale
        if noise_ratio <= max_noise_ratio:
            self.rate_scale = min(1.0, before + _RISE)
            return None
        # Below the smallest scale pruning is over, and a later rise starts from nothing.
        self.rate_scale = before * _FALL if before * _FALL >= _SMALLEST else 0.0
        if before == 0:  # the noise is the other level's by now
            return None
        return (
            f"{key}: gradient noise is {noise_ratio:.2f} times that of an unpruned step, above"
            f" max_noise_ratio = {max_noise_ratio:g}; rate scaled by {self.rate_scale:.2f} (was {before:.2f})"
        )

    def observe_cost(self, fixed_s: float, variable_s: float, kept_cost: float, *, has_floor: bool = False) -> None:
        """Seconds of a step that pruning saves nothing of, and those of the rest, of which it had kept `kept_cost`.

        has_floor: the rest is not proportional to what is kept; the part that is not, as measured, counts as fixed.
        """
        if variable_s <= 0 or fixed_s < 0 or kept_cost <= 0:
            return
        floor = 0.0
        if has_floor:
            seen = (1.0, kept_cost, variable_s, kept_cost**2, kept_cost * variable_s, variable_s**2)
            self.seconds = [_FLOOR_FADE * old + new for old, new in zip(self.seconds, seen, strict=True)]
            floor = floor_share(self.seconds)
        full = variable_s / (floor + (1.0 - floor) * kept_cost)
        ratio = (fixed_s + floor * full) / ((1.0 - floor) * full)
        self.cost_ratio = ratio if self.cost_ratio == 0 else _COST_DECAY * self.cost_ratio + (1 - _COST_DECAY) * ratio

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore, also of a checkpoint from before there was a floor; raises ValueError on other keys."""
        state = {"seconds": [0.0] * 6} | dict(state)
        check_state(state, set(asdict(self)), "the rate control")
        self.rate_scale = float(state["rate_scale"])
        self.cost_ratio = float(state["cost_ratio"])
        self.seconds = [float(each) for each in state["seconds"]]


class EffectMonitor:
    """What skipping did to the variance, measured: fading sums over steps, and whether the score is believed.

    A prompt of second moment m, drawn with probability pi, adds m / pi to the variance where the full batch has m.
    Only kept prompts show their m, each with the weight 1 / pi, so over the kept

        effect = sum(m / pi / planned) / sum(m / pi)

    where `planned` is the probability that the score asks for. It is pi itself, except where nothing is skipped
    (warm-up, or after the score was found wanting): what skipping would do is then measured all the same, and pruning
    can begin, or begin again, on evidence. Beside it stands what skipping at random would do at the same cost, the
    inverse of the share of tokens that is planned to be kept. A score that does worse than that is worse than none.
    """

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
        self, moment: FloatArray, score: FloatArray, tokens: FloatArray, inclusion: FloatArray, planned: FloatArray
    ) -> None:
        """Visited prompts [K]: outcomes, squared scores, tokens, and the probabilities of the draw and of the plan."""
        share = float(moment.sum())
        tiny = np.finfo(np.float64).tiny
        if not (len(moment) and float(planned.min()) < 1.0 and share > tiny and float(score.sum()) > tiny):
            return
        # each step counts alike, whatever the size of its gradients
        m, s, w = moment / (share / len(moment)), score / score.mean(), 1.0 / inclusion
        seen = {
            "effect": m * w / planned,
            "moment": m * w,
            "predicted": s * w / planned,
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

    def state_dict(self) -> dict[str, Any]:
        return {"sums": dict(self._sums), "believed": self.believed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore; raises ValueError on other keys."""
        check_state(dict(state), {"sums", "believed"}, "the measured effect")
        check_state(dict(state["sums"]), set(_SUMS), "the measured effect's sums")
        self._sums = {name: float(state["sums"][name]) for name in _SUMS}
        self.believed = bool(state["believed"])
