"""What is remembered about every prompt: an array per quantity, indexed by the prompt's row; 40 bytes per prompt."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dppo_megatron.pruning.interface import check_rewards, restored
from dppo_megatron.types import FloatArray, IntArray

_NEVER = -1


class PromptHistory:
    """Beta evidence, moments and visits per prompt.

    Args:
        num_prompts: rows of the prompt set.
        prior: both parameters of the Beta prior.
        discount: factor on older evidence at a visit, and on the evidence's distance to the prior for each epoch
            without a visit after the first.
        steps_per_epoch: converts steps into epochs for the discount by age.
    """

    def __init__(self, num_prompts: int, *, prior: float, discount: float, steps_per_epoch: float) -> None:
        self.prior, self.discount, self.steps_per_epoch = prior, discount, steps_per_epoch
        self.arrays: dict[str, npt.NDArray[Any]] = {
            "successes": np.full(num_prompts, prior, dtype=np.float64),
            "failures": np.full(num_prompts, prior, dtype=np.float64),
            "moment": np.full(num_prompts, np.nan, dtype=np.float32),
            "variance": np.zeros(num_prompts, dtype=np.float32),
            "tokens": np.zeros(num_prompts, dtype=np.float32),
            "mean_abs": np.zeros(num_prompts, dtype=np.float32),
            "last_step": np.full(num_prompts, _NEVER, dtype=np.int32),
            "visits": np.zeros(num_prompts, dtype=np.int32),
        }

    def __len__(self) -> int:
        return len(self.arrays["visits"])

    def seen(self, ids: IntArray) -> npt.NDArray[np.bool_]:
        """[n], whether visited at least once."""
        return np.asarray(self.arrays["visits"][ids] > 0)

    def age_epochs(self, ids: IntArray, step: int) -> FloatArray:
        """[n], epochs since the last visit; 0 for prompts never visited."""
        last = self.arrays["last_step"][ids].astype(np.float64)
        return np.where(last == _NEVER, 0.0, np.maximum(step - last, 0.0) / self.steps_per_epoch)

    def posterior(self, ids: IntArray, step: int) -> tuple[FloatArray, FloatArray]:
        """Beta parameters [n], [n]. Evidence older than an epoch fades back towards the prior."""
        keep = self.discount ** np.maximum(self.age_epochs(ids, step) - 1.0, 0.0)
        successes = self.prior + keep * (self.arrays["successes"][ids] - self.prior)
        failures = self.prior + keep * (self.arrays["failures"][ids] - self.prior)
        return successes, failures

    def pass_rate(self) -> FloatArray:
        """[prompts] posterior mean of rewards clipped to [0, 1], without fading by age; 1/2 without evidence."""
        successes, failures = self.arrays["successes"], self.arrays["failures"]
        return np.asarray(successes / (successes + failures))

    def update(
        self,
        ids: IntArray,
        rewards: FloatArray,
        lengths: IntArray,
        *,
        step: int,
        second_moment: FloatArray | None,
        stands_for: FloatArray | None = None,
    ) -> None:
        """Record visits of prompts ids [K] with rewards and lengths [K, G]; NaN is no evidence, a row of NaN no visit.

        `stands_for` [K, G] weights evidence and lengths: without it they would describe mostly short completions, which
        are stopped early less often. A prompt is visited at most once a step; if another trainer's sampler repeats one,
        its last row counts.
        """
        graded = ~np.isnan(rewards)
        counts = graded.sum(axis=1)
        visited = counts > 0
        ids, graded, counts = ids[visited], graded[visited], counts[visited]
        filled = np.where(graded, rewards[visited], 0.0)
        a, first = self.arrays, self.arrays["visits"][ids] == 0

        successes, failures = self.posterior(ids, step)
        weight = graded.astype(np.float64) if stands_for is None else graded * stands_for[visited]
        right = (np.clip(filled, 0.0, 1.0) * weight).sum(axis=1)
        a["successes"][ids] = self.discount * successes + right
        a["failures"][ids] = self.discount * failures + (weight.sum(axis=1) - right)

        deviation = np.where(graded, filled - (filled.sum(axis=1) / counts)[:, None], 0.0)
        variance = np.square(deviation).sum(axis=1) / counts
        std = np.sqrt(variance)
        a["mean_abs"][ids] = np.abs(deviation).sum(axis=1) / counts / np.where(std > 1e-12, std, 1.0)
        a["variance"][ids] = self._average(a["variance"][ids], variance, first)
        if second_moment is not None:
            # The posterior already accounts for visits without variance; their zeros here would count them twice.
            informative = std > 1e-12 if stands_for is None else second_moment[visited] > 0
            rows, moment = ids[informative], second_moment[visited][informative]
            a["moment"][rows] = self._average(a["moment"][rows], moment, np.isnan(a["moment"][rows]))
        tokens = lengths[visited].mean(axis=1)
        if stands_for is not None:
            graded_or_stopped = graded | (stands_for[visited] == 0)
            tokens = (lengths[visited] * weight).sum(axis=1) / graded_or_stopped.sum(axis=1)
        a["tokens"][ids] = self._average(a["tokens"][ids], tokens, first)
        a["last_step"][ids] = step
        a["visits"][ids] += 1

    def _average(self, old: npt.NDArray[np.float32], new: FloatArray, first: npt.NDArray[np.bool_]) -> FloatArray:
        return np.where(first, new, self.discount * old + (1.0 - self.discount) * new)

    def metrics(self, step: int) -> dict[str, float]:
        last = self.arrays["last_step"]
        seen = last[last != _NEVER]
        mean, oldest = (float(seen.mean()), int(seen.min())) if len(seen) else (step, step)
        return {
            "prune/history_coverage": len(seen) / max(len(self), 1),
            "prune/history_staleness_mean_epochs": (step - mean) / self.steps_per_epoch,
            "prune/history_staleness_max_epochs": (step - oldest) / self.steps_per_epoch,
        }

    def state_dict(self) -> dict[str, Any]:
        return {name: array.copy() for name, array in self.arrays.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore; raises ValueError on different keys, types or numbers of prompts."""
        for name, array in restored(self.arrays, state, "the pruning history").items():
            self.arrays[name][:] = array  # in place: a user's policy may hold references to these arrays


def check_ids(ids: IntArray, num_prompts: int) -> IntArray:
    """The argument as int64 [n].

    Raises:
        ValueError: not one-dimensional, not integers, or outside the prompt set.
    """
    ids = np.asarray(ids)
    if ids.ndim != 1 or not (np.issubdtype(ids.dtype, np.integer) or ids.size == 0):
        raise ValueError(f"prompt_index must be integers [n], got {ids.dtype}{ids.shape}")
    if ids.size and (ids.min() < 0 or ids.max() >= num_prompts):
        raise ValueError(f"prompt_index spans {ids.min()}..{ids.max()}; the prompt set has rows 0..{num_prompts - 1}")
    return ids.astype(np.int64, copy=False)


def check_visits(ids: IntArray, rewards: FloatArray, lengths: IntArray, in_unit: str) -> FloatArray:
    """Rewards as float64 [K, G].

    Raises:
        ValueError: shapes disagree.
        UserError: as for `check_outcomes`.
    """
    rewards, lengths = np.asarray(rewards, dtype=np.float64), np.asarray(lengths)
    if rewards.ndim != 2 or rewards.shape[0] != len(ids) or lengths.shape != rewards.shape:
        raise ValueError(f"rewards {rewards.shape} and lengths {lengths.shape} must both be [{len(ids)}, G]")
    check_rewards(ids, rewards, in_unit)
    return rewards
