"""A regression that is fitted while the run goes on: one pass, the past fades, the state is two small arrays.

The target is a group's second moment, which is 0 for most groups and now and then 30 times the mean. A Poisson
likelihood with a log link is the plain choice for that: its estimate is right on average in every class that has a
column, whatever the true distribution (quasi-likelihood), and it is never negative. A window of past groups would need
another megabyte and a fit from scratch each step; instead the past is kept as the quadratic that it was at the last
estimate.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from dppo_megatron.pruning.interface import check_state
from dppo_megatron.types import FloatArray

_ITERATIONS, _ENOUGH = 12, 1e-6
_HIGHEST = 50.0
"""Of an exponent: far beyond what data say, and no overflow."""


class FadingRegression:
    """E[y | x] = exp(x w), w by penalised quasi-likelihood over rows that fade by `fade` with every update.

    Args:
        start: [p] what ridge pulls towards.
        ridge: [p] how many rows' worth each column is held back by.
        fade: what an update leaves of the weight of earlier rows, in (0, 1].

    Example: one constant column, fade 0.5. Rows of y = (1, 3) give exp(w) of about 2, less what the ridge holds back;
    then rows of y = (8, 8) weigh 2 against the past's 1: about (8 + 8 + 0.5 x 4) / (2 + 0.5 x 2) = 6.
    """

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

    def state_dict(self) -> dict[str, Any]:
        """Copies of the arrays."""
        return {"weights": self.weights.copy(), "information": self.information.copy()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore; raises ValueError on other keys or another number of columns."""
        check_state(dict(state), {"weights", "information"}, "the fitted score")
        weights, information = (np.array(state[key], dtype=np.float64) for key in ("weights", "information"))
        if weights.shape != self.weights.shape or information.shape != self.information.shape:
            raise ValueError(f"its prompt score has {len(weights)} columns, and this version's {len(self.weights)}")
        self.weights, self.information = weights, information


def _outer(x: FloatArray, weight: FloatArray) -> FloatArray:
    """sum_n weight_n x_n x_n', [p, p]. By einsum: BLAS would round differently with another number of threads."""
    return np.asarray(np.einsum("np,nq->pq", x * weight[:, None], x))
