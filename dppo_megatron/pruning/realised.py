"""What skipping did to the variance, measured: a score says what it expects, and this says what it got.

A prompt of second moment m that is drawn with probability pi adds m / pi to the variance where the full batch has m.
Only kept prompts show their m, each with the weight 1 / pi, so over the kept

    effect = sum(m / pi / planned) / sum(m / pi)

where `planned` is the probability that the score asks for. It is pi itself, except where nothing is skipped (warm-up,
or after the score was found wanting): what skipping would do is then measured all the same, and pruning can begin, or
begin again, on evidence. Beside it stands what skipping at random would do at the same cost, the inverse of the share
of tokens that is planned to be kept. A score that does worse than that is worse than none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from dppo_megatron.pruning.interface import Effect, check_state
from dppo_megatron.types import FloatArray

_FADE = 0.95
"""A horizon of 20 steps."""
_SUMS = ("effect", "moment", "predicted", "score", "kept", "tokens", "effect2", "cross", "moment2", "groups")


class EffectMonitor:
    """Fading sums over steps, and whether the score is believed."""

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
            fade = _FADE**2 if name in ("effect2", "cross", "moment2") else _FADE
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
