"""Predicts the gradient of a prompt's next group by a regression on everything known before its rollout.

The posterior of the pass rate alone is not calibrated while the policy learns (0.88 expected, 0.46 observed) and made
skipping noisier than a smaller batch. Here everything known is a column of a regression fitted to the run's own past.
Unvisited prompts are predicted from their rows in the data set, and from the uncertainty about such rows.

A second regression, of the outcome on the first one's prediction, corrects that prediction's optimism: features that
fit the past by chance predict the next step less well, and a slope below 1 measures by how much. The expected cost is
one of its columns too: probabilities are divided by the cost, so an error correlated with it would not average out.

The cost, tokens of a group, has a regression of its own, which adapts when all answers grow or shrink together.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dppo_megatron.pruning.history import PromptHistory
from dppo_megatron.pruning.interface import Stateful
from dppo_megatron.pruning.scores import spread
from dppo_megatron.types import FloatArray, IntArray, PromptFeatures

KIND, KIND_BEFORE = "kind", "kind_before"
"""Columns of the history, int8: the kind of outcome of the last visit and of the visit before it."""
_UNSEEN, _FLAT_LOW, _FLAT_HIGH, _MIXED = range(4)
_BEFORE = 0.5
"""Factor on the columns of the visit before the last: ridge then penalises them four times as much."""
_MOMENT = 0.2
"""Factor on the column of the moments' logarithms: ridge then penalises it 25 times as much."""
_FADE = 0.95
"""A horizon of 20 steps: the policy learns, so older outcomes mislead. 0.88 to 0.97 differ by 1 %."""
_SLOPE_FADE, _SLOPE_RIDGE = 0.9, np.array([0.01, 100.0, 20.0])
"""Ridge of the constant, of the slope on the prediction, and of the slope on the logarithm of the cost."""
_TOKENS_COLUMN = 8
"""The column of answer lengths at earlier visits. Its weight starts at 1: by default lengths stay as they were."""
_WIDEST = 6.0
"""Predicted moments of one batch are between exp(-6) and exp(6) times their geometric mean."""
_MOST_CLASSES = 16
"""Rarer classes of a column share the all-zero code, as each has too few rows to be estimated."""


class FittedScore(Stateful):
    """The expected second moment of a prompt's next group, relative to the batch's.

    Args:
        history: the policy's; the columns `kind` and `kind_before` are added to it.
        features: what the data set says about each prompt; None: nothing.
    """

    _state_names = ("_moment", "_slope", "_tokens", "_mean_reward", "_scatter")

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
        self._scatter = np.zeros((3, 3))
        """Variance of what the slope's rows pull by: x x' times their squared errors, summed over rows that fade."""

    @property
    def is_ready(self) -> bool:
        """Whether it has learned from any step."""
        return self._moment.rows > 0

    @property
    def distinguishes_unseen(self) -> bool:
        """Whether any column of the rows differs between prompts that were never visited."""
        return self._rows is not None and self._rows.count > 0

    def expected(self, ids: IntArray, step: int, *, cautious: bool = False) -> FloatArray:
        """E[second moment], up to a common factor, of prompts [n] at a step (from 0); positive.

        cautious: larger for prompts of which little is known, which are then skipped less. In sums it would be too
        much, as a Poisson fit's mean is right: the growth of the variance was predicted 0.4 to 0.9 % too high.
        """
        x = self._columns(ids, step)
        # for a normal x E[exp(x)] = exp(E[x] + var / 2)
        exponent = self._slope.exponent(self._predicted(x)) + (0.5 * self._moment.variance(x) if cautious else 0.0)
        return np.asarray(np.exp(np.clip(exponent - exponent.mean(), -_WIDEST, _WIDEST)))

    def errors(self, ids: IntArray, step: int) -> FloatArray:
        """[n, 3] errors of the logarithm of `expected`, up to a common term: times three standard normal numbers they
        scatter as the slope's weights would over other data."""
        values, axes = np.linalg.eigh(self._slope.covariance(self._scatter))
        axes = axes * np.sqrt(np.maximum(values, 0.0))
        return np.asarray(np.einsum("np,pk->nk", self._predicted(self._columns(ids, step)), axes))

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
        """Learn from visited prompts [K]: rewards and lengths [K, G], second moments [K], weights [K] of their draw.

        Call it before the history is updated with these visits.
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
                # Rows weigh 1 / pi^2: one factor for the draw, one as in the design effect that this has to predict.
                predicted, squared_weight = self._predicted(x), np.square(weight)
                error = moment / usual - np.exp(np.minimum(self._slope.exponent(predicted), _HIGHEST))
                new = _outer(predicted, np.square(squared_weight * error))
                self._scatter = _SLOPE_FADE**2 * self._scatter + new  # squared, as the fading weights are
                self._slope.update(predicted, moment / usual, squared_weight)
            self._moment.update(x, moment / usual)
        if tokens.any():
            self._tokens.update(self._with_unseen(x), tokens / tokens.mean())
        self._remember(ids, np.where(graded, rewards, 0.0).sum(axis=1) / graded.sum(axis=1), spread(rewards) == 0)

    def _usual_moment(self, x: FloatArray, moment: FloatArray, weight: FloatArray) -> float:
        """Mean moment of the batch from which the visited prompts, columns x [K, p], were drawn.

        Not their weighted mean, which grows with each prompt's own outcome, most of all where its weight is large:
        divided by that mean, outcomes of rarely drawn prompts look too small, and the cost of skipping was predicted 1
        to 5 % too low at a rate of 0.5. Instead the plain mean of the outcomes is multiplied by the ratio of the
        weighted to the plain mean of their expected values, which makes it the batch's.
        """
        exponent = self._slope.exponent(self._predicted(x)) if self.is_ready else np.zeros(len(x))
        expected = np.exp(np.minimum(exponent, _HIGHEST))
        return float(moment.mean() / expected.mean() * np.sum(weight * expected) / np.sum(weight))

    def _remember(self, ids: IntArray, mean: FloatArray, flat: npt.NDArray[np.bool_]) -> None:
        """Record the kind of each visit: rewards equal and low, equal and high, or different."""
        arrays, now = self._history.arrays, float(mean.mean())
        self._mean_reward = now if np.isnan(self._mean_reward) else 0.9 * self._mean_reward + 0.1 * now
        arrays[KIND_BEFORE][ids] = arrays[KIND][ids]
        arrays[KIND][ids] = np.where(flat, np.where(mean > self._mean_reward, _FLAT_HIGH, _FLAT_LOW), _MIXED)

    def _predicted(self, x: FloatArray) -> FloatArray:
        """[n, 3] from columns [n, p]: a constant, and the predicted exponents of the moment and of the cost."""
        cost = self._tokens.exponent(self._with_unseen(x))
        return np.stack([np.ones(len(x)), self._moment.exponent(x), cost], axis=1)

    def _with_unseen(self, x: FloatArray) -> FloatArray:
        """The columns [n, p] followed by the row columns again, which are 0 for seen prompts: their known answer
        lengths already reflect what the row would predict."""
        if self._rows is None:
            return x
        unseen = np.all(x[:, 1:4] == 0, axis=1, keepdims=True)
        return np.concatenate([x, np.where(unseen, x[:, x.shape[1] - self._rows.count :], 0.0)], axis=1)

    def _columns(self, ids: IntArray, step: int) -> FloatArray:
        """[n, p] what is known about the prompts before this visit."""
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
            # the longer ago a visit was, the less its outcome predicts
            np.where(seen & (kind != _MIXED), np.log(epochs), 0.0),
            np.where(tokens > 0, np.log(np.maximum(tokens, 1e-9) / usual), 0.0),
            # the only distinction between outcomes if every group has gradient (graded rewards, large groups)
            np.where(kind == _MIXED, _MOMENT * _logs_over_usual(arrays["moment"][ids]), 0.0),
        ]
        known = np.stack(columns, axis=1)
        return known if self._rows is None else np.concatenate([known, self._rows.of(ids)], axis=1)


class RowColumns:
    """Regression columns from prompts' rows, computed on demand: 6 bytes a prompt instead of 4 for each column.

    A source, or a level with few values, has a column for each value; a level with many values and the prompt length
    have two, the standardised number and its square. A feature that is the same in all rows has none.

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
        """[n, count] columns of prompts [n]."""
        columns: list[FloatArray] = []
        for number in self._numbers:
            score = number[ids].astype(np.float64)
            known = ~np.isnan(score)
            columns += [np.where(known, score, 0.0), np.where(known, np.square(score) - 1.0, 0.0)]
        for codes, count in self._classes:
            columns += [(codes[ids] == code).astype(np.float64) for code in range(count)]
        return np.stack(columns, axis=1) if columns else np.zeros((len(ids), 0))


def _logs_over_usual(moment: npt.NDArray[np.float32]) -> FloatArray:
    """[n] logarithm of moments [n] over their geometric mean, clipped to +-3; 0 for a moment of NaN or 0.

    Example: moments 1, 4, NaN: -log 2, log 2, 0.
    """
    known = moment > 0
    logs = np.log(np.where(known, moment, 1.0), dtype=np.float64)
    usual = float(logs[known].mean()) if known.any() else 0.0
    return np.where(known, np.clip(logs - usual, -3.0, 3.0), 0.0)


def _standardised(values: FloatArray) -> list[npt.NDArray[np.float32]]:
    """[the values with mean 0 and deviation 1, clipped to 3 deviations]; [] if they are all the same."""
    known = values[~np.isnan(values)]
    deviation = float(known.std()) if len(known) else 0.0
    if not deviation > 1e-9:
        return []
    return [np.clip((values - known.mean()) / deviation, -3.0, 3.0).astype(np.float32)]


def _coded(values: FloatArray) -> list[tuple[npt.NDArray[np.uint8], int]]:
    """[(code of each value among the commonest, 255 for others and NaN; number of codes)]; [] if all are the same."""
    missing = np.isnan(values)
    distinct, counts = np.unique(values[~missing], return_counts=True)
    if len(distinct) + bool(missing.any()) < 2:
        return []
    commonest = np.sort(distinct[np.argsort(-counts, kind="stable")[:_MOST_CLASSES]])
    if not len(commonest):
        return []
    place = np.minimum(np.searchsorted(commonest, values), len(commonest) - 1)
    codes = np.where(commonest[place] == values, place, 255).astype(np.uint8)
    return [(codes, len(commonest))]


_ITERATIONS, _ENOUGH = 12, 1e-6
_HIGHEST = 50.0
"""Largest exponent: far beyond any data, and exp does not overflow."""


class FadingRegression(Stateful):
    """E[y | x] = exp(x w), w by penalised quasi-likelihood over rows that fade by `fade` with every update.

    The target is a group's second moment, which is 0 for most groups and occasionally 30 times the mean. A Poisson
    likelihood with a log link is right on average in every class that has a column, whatever the true distribution, and
    its predictions are never negative. A window of past groups would need another megabyte and a fit from scratch each
    step; instead the past is summarised by its quadratic approximation at the last estimate.

    Args:
        start: [p] weights that ridge pulls towards.
        ridge: [p] strength of that pull for each column, as a number of rows.
        fade: factor of an update on the weight of earlier rows, in (0, 1].

    Example: one constant column, fade 0.5. Rows of y = (1, 3) give exp(w) of about 2, apart from the ridge; then rows
    of y = (8, 8) weigh 2 against the past's 1: about (8 + 8 + 0.5 x 4) / (2 + 0.5 x 2) = 6.
    """

    _state_names = ("weights", "information")

    def __init__(self, start: FloatArray, ridge: FloatArray, fade: float) -> None:
        self._start = np.array(start, dtype=np.float64)
        self.weights = self._start
        self.information = np.zeros((len(start), len(start)))
        """[p, p] sum of mu x x' over faded rows, mu their predicted means: the Fisher information of the data."""
        self._ridge, self._fade = np.diag(np.asarray(ridge, dtype=np.float64)), fade

    @property
    def rows(self) -> float:
        """About the faded number of rows, as a sum of predicted means (column 0 is constant); 0 before any update."""
        return float(self.information[0, 0])

    def exponent(self, x: FloatArray) -> FloatArray:
        """x w, [n]."""
        return np.asarray(np.einsum("np,p->n", x, self.weights))

    def variance(self, x: FloatArray) -> FloatArray:
        """Posterior variance [n] of the exponent, given the data and the ridge."""
        return np.asarray(np.einsum("np,pq,nq->n", x, np.linalg.inv(self.information + self._ridge), x, optimize=True))

    def covariance(self, scatter: FloatArray) -> FloatArray:
        """[p, p] sampling covariance of the weights, which ridge reduces, if rows pull with variance `scatter`."""
        inverse = np.linalg.inv(self.information + self._ridge)
        return np.asarray(np.einsum("pq,qr,rs->ps", inverse, scatter, inverse))

    def update(self, x: FloatArray, y: FloatArray, weight: FloatArray | None = None) -> None:
        """Add rows x [n, p] with targets y [n], finite and >= 0; a row of weight 2 counts as two rows."""
        times = np.ones(len(y)) if weight is None else weight
        before, past = self.weights, self._fade * self.information + self._ridge
        # At `before` the gradients of past and ridge cancelled. The past fades, the ridge does not; pull is the rest.
        pull = (1.0 - self._fade) * np.diag(self._ridge) * (before - self._start)

        def loss(w: FloatArray) -> float:
            exponent, moved = np.minimum(np.einsum("np,p->n", x, w), _HIGHEST), w - before
            return float(np.sum(times * (np.exp(exponent) - y * exponent)) + 0.5 * moved @ past @ moved + pull @ w)

        w, now = before, loss(before)
        for _ in range(_ITERATIONS):
            mean = np.exp(np.minimum(np.einsum("np,p->n", x, w), _HIGHEST))
            gradient = np.einsum("np,n->p", x, times * (y - mean)) - past @ (w - before) - pull
            step = np.linalg.solve(past + _outer(x, times * mean), gradient)
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
        mean = np.exp(np.minimum(np.einsum("np,p->n", x, w), _HIGHEST))
        self.information = self._fade * self.information + _outer(x, times * mean)


def _outer(x: FloatArray, weight: FloatArray) -> FloatArray:
    """sum_n weight_n x_n x_n', [p, p]. By einsum: BLAS would round differently with another number of threads."""
    return np.asarray(np.einsum("np,nq->pq", x * weight[:, None], x))
