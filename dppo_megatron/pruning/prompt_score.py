"""What a prompt's next group is expected to be worth: a regression on all that is known before it is rolled out.

The posterior of a pass rate alone, which was the score before, is not calibrated while the policy learns (0.88
expected, 0.46 seen) and made skipping noisier than a smaller batch (docs/pruning.md). Whatever is known is a column
here instead, and the run's own past says what it is worth: what the last two visits came to, how long ago the last one
was, how much gradient such visits had, how long the answers are, and what the row itself says (level, source, length of
the prompt). Unvisited prompts are predicted from the row and from how little is known about such rows.

A second regression, of the outcome on what the first had predicted, holds the first one's optimism down: features
that fit the past by chance are worth less on the next step, and a slope below 1 says by how much. It also knows the
expected cost: probabilities divide by that, so an error that goes with it would not average out.

The cost, tokens of a group, has a separate regression on the same columns. It is what a fixed average of the last
visits is not: right for prompts never seen, and quick where answers grow or shrink all at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from dppo_megatron.pruning.history import PromptHistory
from dppo_megatron.pruning.interface import Stateful
from dppo_megatron.pruning.scores import spread
from dppo_megatron.types import FloatArray, IntArray, PromptFeatures

KIND, KIND_BEFORE = "kind", "kind_before"
"""Columns of the history, int8: what the last visit and the one before it came to."""
_UNSEEN, _FLAT_LOW, _FLAT_HIGH, _MIXED = range(4)
_BEFORE = 0.5
"""The columns of the visit before the last are halved, so that ridge holds them back four times as much."""
_MOMENT = 0.2
"""So much of the logarithm of the last moments is a column: ridge holds it back 25 times as much."""
_FADE = 0.95
"""A horizon of 20 steps: a policy that learns makes older outcomes misleading. 0.88 to 0.97 differ by 1 %."""
_SLOPE_FADE, _SLOPE_RIDGE = 0.9, np.array([0.01, 100.0, 20.0])
"""Of the constant, of the slope on the prediction, and of that on the logarithm of the cost."""
_TOKENS_COLUMN = 8
"""Of the answers' length at earlier visits: the first guess of the next one's."""
_ERROR_FADE, _LARGEST_OPTIMISM = 0.97, 0.2
_WIDEST = 6.0
"""Predicted moments of one batch are within exp(-6) and exp(6) of their geometric mean."""
_MOST_CLASSES = 16
"""Rarer classes of a column share the all-zero code: each would have too few rows to be estimated."""


class FittedScore(Stateful):
    """The expected second moment of a prompt's next group, relative to the batch's.

    Args:
        history: of the policy; gets the columns `kind` and `kind_before`.
        features: what the rows say; None: nothing.
    """

    _state_names = ("_moment", "_slope", "_tokens", "_mean_reward", "_error")

    def __init__(self, history: PromptHistory, features: PromptFeatures | None) -> None:
        self._history = history
        for name in (KIND, KIND_BEFORE):
            history.arrays[name] = np.zeros(len(history), dtype=np.int8)
        self._rows = RowColumns(features) if features is not None else None
        columns = self._columns(np.zeros(1, dtype=np.int64), 0).shape[1]
        self._moment = FadingRegression(np.zeros(columns), np.ones(columns), _FADE)
        self._slope = FadingRegression(np.array([0.0, 1.0, 0.0]), _SLOPE_RIDGE, _SLOPE_FADE)
        columns += self._rows.count if self._rows else 0
        as_before = np.where(np.arange(columns) == _TOKENS_COLUMN, 1.0, 0.0)
        self._tokens = FadingRegression(as_before, np.ones(columns), _FADE)
        self._mean_reward = np.nan
        self._error = np.zeros(2)
        """Faded sums over the slope's rows: squares of what it missed by, and what they would be of Poisson counts."""

    @property
    def is_ready(self) -> bool:
        """Whether it has learned from any step."""
        return self._moment.rows > 0

    @property
    def tells_unseen_apart(self) -> bool:
        """Whether rows have any column by which prompts that were never visited differ."""
        return self._rows is not None and self._rows.count > 0

    def expected(self, ids: IntArray, step: int) -> FloatArray:
        """E[second moment], up to a common factor, of prompts [n] at a step (from 0); positive."""
        x = self._columns(ids, step)
        # the mean of an exponential grows with the uncertainty of the exponent
        exponent = self._slope.exponent(self._predicted(x)) + 0.5 * self._moment.variance(x)
        return np.asarray(np.exp(np.clip(exponent - exponent.mean(), -_WIDEST, _WIDEST)))

    def optimism(self, ids: IntArray, step: int) -> FloatArray:
        """[n] share by which a prompt's part of the design effect is predicted too low, where pi follows the score.

        An error e of the predicted logarithm, of variance v, raises log pi by e / 2. The prediction sees its own error
        in both and becomes E exp(e / 2) / E exp(e), what comes is E exp(-e / 2): exp(-v / 2) of it is predicted.
        """
        x = self._predicted(self._columns(ids, step))
        dispersion = self._error[0] / self._error[1] if self._error[1] > 0 else 1.0
        return np.minimum(0.5 * dispersion * self._slope.scatter(x - x.mean(axis=0)), _LARGEST_OPTIMISM)

    def expected_cost(self, ids: IntArray, step: int) -> FloatArray:
        """E[tokens of a completion] of prompts [n], relative to the batch's mean; 1 before it has learned."""
        exponent = self._tokens.exponent(self._with_unseen(self._columns(ids, step)))
        cost = np.exp(np.clip(exponent - exponent.mean(), -_WIDEST, _WIDEST))
        return np.asarray(cost / cost.mean())

    def learn(
        self,
        ids: IntArray,
        rewards: FloatArray,
        lengths: IntArray,
        moment: FloatArray,
        weight: FloatArray,
        step: int,
    ) -> None:
        """Visited prompts [K] with rewards and lengths [K, G], second moments [K] and the weights [K] of their draw.

        To be called before the history learns of the visit.
        """
        graded = ~np.isnan(rewards)
        visited = graded.any(axis=1)
        ids, rewards, graded = ids[visited], rewards[visited], graded[visited]
        moment, weight, tokens = moment[visited], weight[visited], lengths[visited].mean(axis=1, dtype=np.float64)
        if not len(ids):
            return
        x = self._columns(ids, step)
        usual = self._usual_moment(x, moment, weight)
        # a batch without any gradient has no information on which prompts have more of it
        if usual > np.finfo(np.float64).tiny:
            if self.is_ready:
                # 1 / pi^2 as in the design effect that it has to get right: once for the draw, once for the effect
                known, twice = self._predicted(x), np.square(weight)
                mean = np.exp(np.minimum(self._slope.exponent(known), _HIGHEST))
                missed = float(np.sum(np.square(twice * (moment / usual - mean)))), float(np.sum(twice * mean))
                self._error = _ERROR_FADE * self._error + missed
                self._slope.update(known, moment / usual, twice)
            self._moment.update(x, moment / usual)
        if tokens.any():
            self._tokens.update(self._with_unseen(x), tokens / tokens.mean())
        self._remember(ids, np.where(graded, rewards, 0.0).sum(axis=1) / graded.sum(axis=1), spread(rewards) == 0)

    def _usual_moment(self, x: FloatArray, moment: FloatArray, weight: FloatArray) -> float:
        """Mean moment of the batch that the visited prompts, columns x [K, p], were drawn from.

        Not their weighted mean: that grows with each one's own outcome, and most where the weight is large. Over it,
        outcomes of prompts that are rarely drawn look smaller than they are, and what skipping costs was predicted 1 to
        5 % too low at a rate of 0.5. Their plain mean treats all alike; what is expected of them all, weighted over
        plain, makes it the batch's.
        """
        exponent = self._slope.exponent(self._predicted(x)) if self.is_ready else np.zeros(len(x))
        expected = np.exp(np.minimum(exponent, _HIGHEST))
        return float(moment.mean() / expected.mean() * np.sum(weight * expected) / np.sum(weight))

    def _remember(self, ids: IntArray, mean: FloatArray, flat: npt.NDArray[np.bool_]) -> None:
        """Which of the three kinds each visit was: all answers alike and poor, alike and good, or different."""
        arrays, now = self._history.arrays, float(mean.mean())
        self._mean_reward = now if np.isnan(self._mean_reward) else 0.9 * self._mean_reward + 0.1 * now
        arrays[KIND_BEFORE][ids] = arrays[KIND][ids]
        arrays[KIND][ids] = np.where(flat, np.where(mean > self._mean_reward, _FLAT_HIGH, _FLAT_LOW), _MIXED)

    def _predicted(self, x: FloatArray) -> FloatArray:
        """[n, 3] of columns [n, p]: a constant, the predicted exponents of the moment and of the cost."""
        cost = self._tokens.exponent(self._with_unseen(x))
        return np.stack([np.ones(len(x)), self._moment.exponent(x), cost], axis=1)

    def _with_unseen(self, x: FloatArray) -> FloatArray:
        """The columns [n, p], and what rows say once more where a prompt was never seen: the lengths of the others'
        answers are known, and say already what their rows would."""
        if self._rows is None:
            return x
        unseen = np.all(x[:, 1:4] == 0, axis=1, keepdims=True)
        return np.concatenate([x, np.where(unseen, x[:, x.shape[1] - self._rows.count :], 0.0)], axis=1)

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
            # the only distinction where every group has gradient: graded rewards, large groups
            np.where(kind == _MIXED, _MOMENT * _logs_over_usual(arrays["moment"][ids]), 0.0),
        ]
        known = np.stack(columns, axis=1)
        return known if self._rows is None else np.concatenate([known, self._rows.of(ids)], axis=1)


class RowColumns:
    """Columns of what prompts' rows say, made when they are asked for: 6 bytes a prompt instead of 4 for each column.

    A level or source of few values is a column for each value; a level of many, and the length of the prompt, is a
    number and its square, standardised. What is the same in all rows gives no column.

    Example: levels 1, 1, 2 and NaN of one source, prompts of one length: columns (1, 1, 0, 0) and (0, 0, 1, 0).
    """

    def __init__(self, features: PromptFeatures) -> None:
        self._numbers = _standardised(np.log(np.maximum(features.prompt_tokens, 1).astype(np.float64)))
        self._classes = _coded(features.source.astype(np.float64))
        known = features.level[~np.isnan(features.level)]
        if len(np.unique(known)) <= _MOST_CLASSES:
            self._classes += _coded(features.level)
        else:
            self._numbers += _standardised(features.level)

    @property
    def count(self) -> int:
        """Columns that `of` returns: two for each number, one for each value of a class."""
        return 2 * len(self._numbers) + sum(count for _, count in self._classes)

    def of(self, ids: IntArray) -> FloatArray:
        """[n, count] of prompts [n]."""
        columns: list[FloatArray] = []
        for number in self._numbers:
            score = number[ids].astype(np.float64)
            known = ~np.isnan(score)
            columns += [np.where(known, score, 0.0), np.where(known, np.square(score) - 1.0, 0.0)]
        for codes, count in self._classes:
            columns += [(codes[ids] == code).astype(np.float64) for code in range(count)]
        return np.stack(columns, axis=1) if columns else np.zeros((len(ids), 0))


def _logs_over_usual(moment: npt.NDArray[np.float32]) -> FloatArray:
    """[n] logarithm of moments [n] over their geometric mean, within 3; 0 where there is none (NaN or 0).

    Example: moments 1, 4, NaN: -log 2, log 2, 0.
    """
    known = moment > 0
    logs = np.log(np.where(known, moment, 1.0), dtype=np.float64)
    usual = float(logs[known].mean()) if known.any() else 0.0
    return np.where(known, np.clip(logs - usual, -3.0, 3.0), 0.0)


def _standardised(values: FloatArray) -> list[npt.NDArray[np.float32]]:
    """Values with mean 0 and deviation 1, within 3 deviations; nothing if they are all the same."""
    known = values[~np.isnan(values)]
    deviation = float(known.std()) if len(known) else 0.0
    if not deviation > 1e-9:
        return []
    return [np.clip((values - known.mean()) / deviation, -3.0, 3.0).astype(np.float32)]


def _coded(values: FloatArray) -> list[tuple[npt.NDArray[np.uint8], int]]:
    """The place of each value among the commonest, 255 for others and NaN, and how many there are; nothing if all
    values are the same."""
    missing = np.isnan(values)
    names, counts = np.unique(values[~missing], return_counts=True)
    if len(names) + bool(missing.any()) < 2:
        return []
    commonest = np.sort(names[np.argsort(-counts, kind="stable")[:_MOST_CLASSES]])
    if not len(commonest):
        return []
    place = np.minimum(np.searchsorted(commonest, values), len(commonest) - 1)
    codes = np.where(commonest[place] == values, place, 255).astype(np.uint8)
    return [(codes, len(commonest))]


_ITERATIONS, _ENOUGH = 12, 1e-6
_HIGHEST = 50.0
"""Of an exponent: far beyond what data say, and no overflow."""


class FadingRegression(Stateful):
    """E[y | x] = exp(x w), w by penalised quasi-likelihood over rows that fade by `fade` with every update.

    The target is a group's second moment, which is 0 for most groups and now and then 30 times the mean. A Poisson
    likelihood with a log link is right on average in every class that has a column, whatever the true distribution, and
    never negative. A window of past groups would need another megabyte and a fit from scratch each step; instead the
    past is kept as the quadratic that it was at the last estimate.

    Args:
        start: [p] what ridge pulls towards.
        ridge: [p] how many rows' worth each column is held back by.
        fade: what an update leaves of the weight of earlier rows, in (0, 1].

    Example: one constant column, fade 0.5. Rows of y = (1, 3) give exp(w) of about 2, less what the ridge holds back;
    then rows of y = (8, 8) weigh 2 against the past's 1: about (8 + 8 + 0.5 x 4) / (2 + 0.5 x 2) = 6.
    """

    _state_names = ("weights", "information")

    def __init__(self, start: FloatArray, ridge: FloatArray, fade: float) -> None:
        self._start = np.array(start, dtype=np.float64)
        self.weights = self._start
        self.information = np.zeros((len(start), len(start)))
        """[p, p] sum of mu x x' over faded rows: what the data know of each direction."""
        self._ridge, self._fade = np.diag(np.asarray(ridge, dtype=np.float64)), fade

    @property
    def rows(self) -> float:
        """Faded rows seen, as the first column (a constant) counts them; 0 before the first update."""
        return float(self.information[0, 0])

    def exponent(self, x: FloatArray) -> FloatArray:
        """x w, [n]."""
        return np.asarray(np.einsum("np,p->n", x, self.weights))

    def variance(self, x: FloatArray) -> FloatArray:
        """Of the exponent, [n], from what the data and the ridge know."""
        return np.asarray(np.einsum("np,pq,nq->n", x, np.linalg.inv(self.information + self._ridge), x, optimize=True))

    def scatter(self, x: FloatArray) -> FloatArray:
        """Variance [n] by which the exponent would scatter over other data of Poisson counts; ridge holds it down."""
        held = np.linalg.inv(self.information + self._ridge)
        held = np.einsum("pq,qr,rs->ps", held, self.information, held)
        return np.asarray(np.einsum("np,pq,nq->n", x, held, x, optimize=True))

    def update(self, x: FloatArray, y: FloatArray, weight: FloatArray | None = None) -> None:
        """Take in rows x [n, p] with targets y [n] >= 0, finite; a row of weight 2 counts as two."""
        times = np.ones(len(y)) if weight is None else weight
        before, held = self.weights, self._fade * self.information + self._ridge
        # what ridge holds does not fade, so each update pulls back by what the last one's share of it has lost
        pull = (1.0 - self._fade) * np.diag(self._ridge) * (before - self._start)

        def loss(w: FloatArray) -> float:
            exponent, moved = np.minimum(np.einsum("np,p->n", x, w), _HIGHEST), w - before
            return float(np.sum(times * (np.exp(exponent) - y * exponent)) + 0.5 * moved @ held @ moved + pull @ w)

        w, now = before, loss(before)
        for _ in range(_ITERATIONS):
            mean = np.exp(np.minimum(np.einsum("np,p->n", x, w), _HIGHEST))
            gradient = np.einsum("np,n->p", x, times * (y - mean)) - held @ (w - before) - pull
            step = np.linalg.solve(held + _outer(x, times * mean), gradient)
            # a full Newton step of an exponential can overshoot by orders of magnitude
            length = 1.0
            while length > 1e-4 and not loss(w + length * step) <= now + 1e-12:
                length *= 0.5
            if length <= 1e-4:
                break
            w, last, now = w + length * step, now, loss(w + length * step)
            if last - now < _ENOUGH:
                break
        self.weights = w
        self.information = self._fade * self.information + _outer(
            x, times * np.exp(np.minimum(np.einsum("np,p->n", x, w), _HIGHEST))
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore; raises ValueError on other keys or another number of columns."""
        if (saved := len(state.get("weights", self.weights))) != len(self.weights):
            raise ValueError(f"its prompt score has {saved} columns, and this version's {len(self.weights)}")
        super().load_state_dict(state)


def _outer(x: FloatArray, weight: FloatArray) -> FloatArray:
    """sum_n weight_n x_n x_n', [p, p]. By einsum: BLAS would round differently with another number of threads."""
    return np.asarray(np.einsum("np,nq->pq", x * weight[:, None], x))
