"""What a prompt's next group is expected to be worth: a regression on all that is known before it is rolled out.

The posterior of a pass rate alone, which was the score before, is not calibrated while the policy learns (0.88
expected, 0.46 seen) and made skipping noisier than a smaller batch (docs/pruning.md). Whatever is known is a column
here instead, and the run's own past says what it is worth: what the last two visits came to, how long ago the last one
was, how long the answers are, and what the row itself says (level, source, length of the prompt). Unvisited prompts are
predicted from the row and from how little is known about such rows.

A second regression, of the outcome on what the first had predicted, holds the first one's optimism down: features
that fit the past by chance are worth less on the next step, and a slope below 1 says by how much.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from dppo_megatron.pruning.history import PromptHistory
from dppo_megatron.pruning.interface import PromptFeatures, check_state
from dppo_megatron.pruning.regression import FadingRegression
from dppo_megatron.pruning.scores import spread
from dppo_megatron.types import FloatArray, IntArray

KIND, KIND_BEFORE = "kind", "kind_before"
"""Columns of the history, int8: what the last visit and the one before it came to."""
_UNSEEN, _FLAT_LOW, _FLAT_HIGH, _MIXED = range(4)
_BEFORE = 0.5
"""The columns of the visit before the last are halved, so that ridge holds them back four times as much."""
_FADE = 0.92
"""A horizon of 12 steps: a policy that learns makes older outcomes misleading. 0.88 to 0.97 differ by 1 %."""
_SLOPE_FADE, _SLOPE_RIDGE = 0.95, 200.0
_WIDEST = 6.0
"""Predicted moments of one batch are within exp(-6) and exp(6) of their geometric mean."""
_MOST_CLASSES = 16
"""Classes of a column beyond the commonest 16 are told apart by nothing."""


class FittedScore:
    """The expected second moment of a prompt's next group, relative to the batch's.

    Args:
        history: of the policy; gets the columns `kind` and `kind_before`.
        features: what the rows say; None: nothing.
    """

    def __init__(self, history: PromptHistory, features: PromptFeatures | None) -> None:
        self._history = history
        for name in (KIND, KIND_BEFORE):
            history.arrays[name] = np.zeros(len(history), dtype=np.int8)
        self._static = static_columns(features) if features is not None else np.zeros((len(history), 0), np.float32)
        columns = self._columns(np.zeros(1, dtype=np.int64), 0).shape[1]
        self._moment = FadingRegression(np.zeros(columns), np.ones(columns), _FADE)
        self._slope = FadingRegression(np.array([0.0, 1.0]), np.array([0.01, _SLOPE_RIDGE]), _SLOPE_FADE)
        self._mean_reward = np.nan

    @property
    def is_ready(self) -> bool:
        """Whether it has learned from any step."""
        return self._moment.rows > 0

    @property
    def tells_unseen_apart(self) -> bool:
        """Whether rows say anything about prompts that were never visited."""
        return bool(self._static.shape[1])

    def expected(self, ids: IntArray, step: int) -> FloatArray:
        """E[second moment], up to a common factor, of prompts [n] at a step (from 0); positive."""
        x = self._columns(ids, step)
        # the mean of an exponential grows with the uncertainty of the exponent
        exponent = self._slope.weights[1] * self._moment.exponent(x) + 0.5 * self._moment.variance(x)
        return np.asarray(np.exp(np.clip(exponent - exponent.mean(), -_WIDEST, _WIDEST)))

    def learn(self, ids: IntArray, rewards: FloatArray, moment: FloatArray, weight: FloatArray, step: int) -> None:
        """Visited prompts [K] with rewards [K, G], second moments [K] and the weights [K] of their draw.

        To be called before the history learns of the visit.
        """
        graded = ~np.isnan(rewards)
        visited = graded.any(axis=1)
        ids, rewards, graded = ids[visited], rewards[visited], graded[visited]
        moment, weight = moment[visited], weight[visited]
        if not len(ids):
            return
        mean = float(np.sum(weight * moment) / np.sum(weight))
        # a batch without any gradient says nothing about which prompts have more of it
        if mean > np.finfo(np.float64).tiny:
            x, y = self._columns(ids, step), moment / mean
            if self.is_ready:
                predicted = self._moment.exponent(x)
                self._slope.update(np.stack([np.ones(len(ids)), predicted], axis=1), y)
            self._moment.update(x, y)
        self._remember(ids, np.where(graded, rewards, 0.0).sum(axis=1) / graded.sum(axis=1), spread(rewards) == 0)

    def state_dict(self) -> dict[str, Any]:
        """Copies."""
        return {
            "moment": self._moment.state_dict(),
            "slope": self._slope.state_dict(),
            "mean_reward": float(self._mean_reward),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore; raises ValueError on other keys or columns."""
        check_state(dict(state), {"moment", "slope", "mean_reward"}, "the prompt score")
        self._moment.load_state_dict(state["moment"])
        self._slope.load_state_dict(state["slope"])
        self._mean_reward = float(state["mean_reward"])

    def _remember(self, ids: IntArray, mean: FloatArray, flat: npt.NDArray[np.bool_]) -> None:
        """Which of the three kinds each visit was: all answers alike and poor, alike and good, or different."""
        arrays, now = self._history.arrays, float(mean.mean())
        self._mean_reward = now if np.isnan(self._mean_reward) else 0.9 * self._mean_reward + 0.1 * now
        arrays[KIND_BEFORE][ids] = arrays[KIND][ids]
        arrays[KIND][ids] = np.where(flat, np.where(mean > self._mean_reward, _FLAT_HIGH, _FLAT_LOW), _MIXED)

    def _columns(self, ids: IntArray, step: int) -> FloatArray:
        """[n, p] what is known of the prompts before this visit."""
        arrays = self._history.arrays
        kind, before = arrays[KIND][ids], arrays[KIND_BEFORE][ids]
        seen = kind != _UNSEEN
        epochs = np.maximum(self._history.age_epochs(ids, step), 1.0)
        tokens = arrays["tokens"][ids].astype(np.float64)
        usual = float(tokens[tokens > 0].mean()) if (tokens > 0).any() else 1.0
        columns = [
            np.ones(len(ids)),
            *(kind == code for code in (_FLAT_LOW, _FLAT_HIGH, _MIXED)),
            *(_BEFORE * (before == code) for code in (_FLAT_LOW, _FLAT_HIGH, _MIXED)),
            # of a prompt that was left alone for long, it matters less what it came to then
            np.where(seen & (kind != _MIXED), np.log(epochs), 0.0),
            np.where(tokens > 0, np.log(np.maximum(tokens, 1e-9) / usual), 0.0),
        ]
        return np.concatenate([np.stack(columns, axis=1), self._static[ids]], axis=1)


def static_columns(features: PromptFeatures) -> npt.NDArray[np.float32]:
    """[num_prompts, s] columns of what rows say; none for what is the same in all rows.

    A level or source of few values is a column for each value; a level of many is itself and its square, standardised.

    Example: levels 1, 1, 2 and NaN of one source, prompts of one length: columns (1, 1, 0, 0) and (0, 0, 1, 0).
    """
    columns: list[FloatArray] = []
    length = np.log(np.maximum(features.prompt_tokens, 1).astype(np.float64))
    columns += _standardised(length)
    columns += _classes(features.source.astype(np.float64))
    known = ~np.isnan(features.level)
    if len(np.unique(features.level[known])) <= _MOST_CLASSES:
        columns += _classes(features.level)
    else:
        columns += [np.where(known, column, 0.0) for column in _standardised(features.level)]
    empty = np.zeros((len(length), 0), dtype=np.float32)
    return np.stack(columns, axis=1).astype(np.float32) if columns else empty


def _standardised(values: FloatArray) -> list[FloatArray]:
    """Values with mean 0 and deviation 1, within 3 deviations, and their square; nothing if they are all the same."""
    deviation = float(np.nanstd(values)) if len(values) else 0.0
    if not deviation > 1e-9:
        return []
    score = np.clip((values - np.nanmean(values)) / deviation, -3.0, 3.0)
    return [score, np.square(score) - 1.0]


def _classes(values: FloatArray) -> list[FloatArray]:
    """A column for each of the commonest values; nothing if there is only one. NaN is none of them."""
    names, counts = np.unique(values[~np.isnan(values)], return_counts=True)
    if len(names) + bool(np.isnan(values).any()) < 2:
        return []
    commonest = names[np.argsort(-counts, kind="stable")[:_MOST_CLASSES]]
    return [(values == name).astype(np.float64) for name in commonest]
