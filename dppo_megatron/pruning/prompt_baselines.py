"""Prompt methods of other papers, for comparison under the same loop: DAPO's dynamic sampling, GRESO and InfoBatch.

The first two roll out more prompts until enough groups have reward variance. Their target is the mean gradient over
groups with variance, and the number of prompts sampled depends on the rewards, so no weight makes them unbiased.

InfoBatch (arXiv 2303.04947) is transferred from supervised samples to prompts. Its two-class rule is a random design
with known probabilities, so 1/pi on nominal denominators is exactly unbiased, where the authors' mean over the kept is
off by a factor. Two defects of their code are also fixed: here annealing ends the pruning whatever the number of
epochs, and the weight uses the probability that the draw used.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from dppo_megatron.config.pruning import PromptPruningConfig
from dppo_megatron.pruning.designs import Draw
from dppo_megatron.pruning.interface import Selection, figures
from dppo_megatron.pruning.prompt_base import PromptPolicy, Visits
from dppo_megatron.pruning.scores import spread
from dppo_megatron.pruning.weights import weigh_biased, weigh_by
from dppo_megatron.randomness import uniforms
from dppo_megatron.types import BoolArray, FloatArray, IntArray, UserError

_SURPLUS = 1.25
"""GRESO asks for a quarter more prompts than its estimate."""
_START, _STEP, _LEAST, _MOST = 0.5, 0.01, 0.05, 0.95
"""GRESO's exploration probability, the chance to roll out a prompt after one visit without variance: start value, step
size and bounds. These and the constants below are the authors' values."""
_FLOOR = 0.01
"""Smallest inclusion probability of `greso`. `greso_ht` has a higher one: a weight of 1 / 0.01 is too large."""
_FLAT = 0.25
"""Target share of groups without variance: a third of it easy, two thirds hard."""
_EASY, _HARD = 0.98, 0.11
"""Smallest mean reward of an easy group and largest of a hard one; 0.1 is the authors' format reward."""
_NOTHING_COUNTED = {"step": -1, "easy": 0, "hard": 0, "total": 0}
_SMALLEST_KEEP = 0.1
"""InfoBatch's floor: keep ratio = min(1, max(0.1, 1 - r))."""


class DynamicSamplingPolicy(PromptPolicy):
    """Method `dynamic_sampling`: DAPO (arXiv 2503.14476, section 3.2), bounded.

    Offers whole rounds of prompts until the step's nominal number of groups has reward variance, then trains on the
    first of those. If `max_rounds` are not enough, verl raises an error; here the step trains on what was found.
    """

    reads = ("refill",)
    resamples = True

    def missing_prompts(self, rewards: FloatArray, *, step: int, rounds: int) -> int:
        """A whole round, until as many groups as a step has prompts show variance or the rounds are used up."""
        refill = self.config.refill
        if not refill.enabled or rounds >= refill.max_rounds:
            return 0
        if int(has_variance(rewards).sum()) >= self.prompts_per_step:
            return 0
        return refill.prompts_per_round or self.prompts_per_step

    def keep_groups(self, rewards: FloatArray, *, step: int) -> Selection:
        return keep_informative(has_variance(rewards), self.prompts_per_step, f"{self.name}/groups")


class WeightedGresoPolicy(PromptPolicy):
    """Method `greso_ht`: GRESO's probabilities raised to `min_inclusion_prob`, weighted by 1/pi, without refills.

    A prompt whose last z visits were all easy (or all hard) is skipped with probability 1 - max(p^z, floor), with one
    self-adjusting p for easy and one for hard prompts.
    """

    reads: ClassVar[tuple[str, ...]] = ("min_inclusion_prob", "estimator", "max_weight")
    _state_names = ("p_easy", "p_hard", "_counted")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.p_easy, self.p_hard = _START, _START
        for kind in ("easy_run", "hard_run"):  # visits in a row that were all right, or all wrong
            self.history.arrays[kind] = np.zeros(len(self.history), dtype=np.int32)
        self._counted = dict(_NOTHING_COUNTED)

    def _floor(self) -> float:
        return self.config.min_inclusion_prob

    def _weighed(self, drawn: Draw) -> Selection:
        return weigh_by(self, drawn)

    def _select_sorted(self, ids: IntArray, step: int, minibatch: int) -> Selection:
        p_easy, p_hard = self._adapted(step)
        arrays, floor = self.history.arrays, self._floor()
        pi = keep_probability(arrays["easy_run"][ids], arrays["hard_run"][ids], p_easy, p_hard, floor)
        uniform = uniforms(self.seed, "prompt coin", ids, step, minibatch)
        # The authors' comparison instead of `uniform < pi`: equal random numbers then give equal decisions.
        drawn = Draw(~(uniform < 1.0 - pi), pi, fixed_size=bool(np.all(pi == 1.0)))
        selection, at_floor = self._weighed(drawn), float(np.mean(pi <= floor))
        return replace(
            selection, metrics=selection.metrics | {"share_at_floor": at_floor, "p_easy": p_easy, "p_hard": p_hard}
        )

    def _learn(self, visits: Visits, step: int) -> None:
        super()._learn(visits, step)
        if self._is_over(step):
            self.p_easy, self.p_hard = self._adapted(step)
            self._counted = dict(_NOTHING_COUNTED)
        arrays = self.history.arrays
        graded = ~np.isnan(visits.rewards)
        visited = graded.any(axis=1)
        ids, rewards, graded = visits.ids[visited], visits.rewards[visited], graded[visited]
        mean = np.where(graded, rewards, 0.0).sum(axis=1) / graded.sum(axis=1)
        easy, hard = mean >= _EASY, mean <= _HARD
        for row, prompt in enumerate(ids):
            arrays["easy_run"][prompt] = arrays["easy_run"][prompt] + 1 if easy[row] else 0
            arrays["hard_run"][prompt] = arrays["hard_run"][prompt] + 1 if hard[row] else 0
        flat = ~has_variance(rewards)
        counted = self._counted
        counted["step"] = step
        counted["easy"] += int((flat & easy).sum())
        counted["hard"] += int((flat & hard).sum())
        counted["total"] += len(ids)

    def _is_over(self, step: int) -> bool:
        """Whether the last counted step is over, so that its counts are complete."""
        return self._counted["total"] > 0 and self._counted["step"] < step

    def _adapted(self, step: int) -> tuple[float, float]:
        """p_easy and p_hard for `step`: after the first epoch, lowered if their kind was too frequent, else raised."""
        counted = self._counted
        if not self._is_over(step) or counted["step"] < self.history.steps_per_epoch:
            return self.p_easy, self.p_hard
        too_easy = counted["easy"] / counted["total"] >= _FLAT / 3
        too_hard = counted["hard"] / counted["total"] >= _FLAT * 2 / 3
        return self._moved(self.p_easy, too_easy), self._moved(self.p_hard, too_hard)

    def _moved(self, probability: float, too_many: bool) -> float:
        return max(probability - _STEP, _LEAST) if too_many else min(probability + _STEP, _MOST)


class GresoPolicy(WeightedGresoPolicy):
    """Method `greso` (arXiv 2506.02177): without weights, and with refills until enough groups have variance.

    Given the same uniform numbers, it decides as the authors' code (Infini-AI-Lab/GRESO, b277843), with these
    exceptions: hard groups are all groups with equal rewards at or below `_HARD`, theirs only those with exactly 0.1;
    the group size is free, theirs is 8; after a round without any variance it asks for the largest refill, where theirs
    divides by zero; draws are counter-based.
    """

    reads = ("greso", "refill")
    resamples = True

    @classmethod
    def check(cls, config: PromptPruningConfig, key: str) -> None:
        least, most = config.greso.smallest_refill_prompts, config.greso.largest_refill_prompts
        if most < least:
            key = f"{key}.greso"
            raise UserError(
                f"{key}.largest_refill_prompts = {most}: must be at least smallest_refill_prompts = {least}"
            )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._round = {"step": -1, "groups": 0, "last": 0}

    def missing_prompts(self, rewards: FloatArray, *, step: int, rounds: int) -> int:
        """GRESO's refill sizes: a round whose estimate did not exceed the largest refill is the last."""
        refill, greso = self.config.refill, self.config.greso
        if not refill.enabled or rounds >= refill.max_rounds:
            return 0
        before = self._round if self._round["step"] == step and rounds > 1 else {"groups": 0, "last": 0}
        missing = self.prompts_per_step - int(has_variance(rewards).sum())
        if missing <= 0 or before["last"]:
            return 0
        latest = rewards[before["groups"] :]
        flat = 1.0 - float(has_variance(latest).mean()) if len(latest) else 1.0
        prompts, last = next_round(
            missing, flat, smallest=greso.smallest_refill_prompts, largest=greso.largest_refill_prompts
        )
        self._round = {"step": step, "groups": len(rewards), "last": int(last)}
        return prompts

    def keep_groups(self, rewards: FloatArray, *, step: int) -> Selection:
        return keep_informative(has_variance(rewards), self.prompts_per_step, f"{self.name}/groups")

    def _floor(self) -> float:
        return _FLOOR

    def _weighed(self, drawn: Draw) -> Selection:
        pi = drawn.inclusion_prob
        note = f"skips without weights; the expected share of prompts is {float(pi.mean()):.2f}"
        selection = weigh_biased(drawn, name=self.name, scale=1.0, note=note, score=np.zeros(len(pi)))
        # `keep_groups` takes a mean over the groups it keeps, so only differences between the pi remain as bias
        return replace(selection, mean_weight=pi / (pi.mean() or 1.0))


class InfoBatchPolicy(PromptPolicy):
    """Method `infobatch`: prompts scoring below the mean of all visited ones are skipped with probability `rate`.

    The score is the mean |advantage| of the last visit, instead of the authors' last loss.
    """

    reads = ("rate", "design", "estimator", "max_weight", "warmup_epochs", "anneal_fraction")

    def _select_sorted(self, ids: IntArray, step: int, minibatch: int) -> Selection:
        arrays = self.history.arrays
        # Unvisited rows hold 0 and add nothing to the sum.
        num_seen = int(np.count_nonzero(arrays["visits"]))
        mean = float(arrays["mean_abs"].sum(dtype=np.float64)) / max(num_seen, 1)
        score = arrays["mean_abs"][ids].astype(np.float64)
        low = self.history.seen(ids) & (score < mean)
        pi = two_class(low, self.config.rate)
        # Growth is predicted for equal moments: the score is 0 for nearly all that may be skipped and would predict 1.
        return replace(self._draw_and_weigh(ids, pi, score, step, minibatch), metrics=figures(pi, low))


def keep_probability(
    easy_run: npt.NDArray[np.integer], hard_run: npt.NDArray[np.integer], p_easy: float, p_hard: float, floor: float
) -> FloatArray:
    """[n] max(p^z, floor) for a run of z easy or z hard visits, of which at most one is not 0; 1 without a run."""
    easy = np.maximum(p_easy ** np.asarray(easy_run, dtype=np.float64), floor)
    hard = np.maximum(p_hard ** np.asarray(hard_run, dtype=np.float64), floor)
    return easy * hard


def next_round(missing_groups: int, flat_share: float, *, smallest: int, largest: int) -> tuple[int, bool]:
    """GRESO's adaptive batch size: prompts of the next round, and whether it is the last one.

    Args:
        missing_groups: groups with variance that are still missing.
        flat_share: share of the latest round's groups without variance, in [0, 1].
        smallest, largest: bounds of the result.
    """
    if flat_share >= 1.0:
        return largest, False
    estimate = int(missing_groups / (1.0 - flat_share) * _SURPLUS)
    return max(min(estimate, largest), smallest), estimate <= largest


def has_variance(rewards: FloatArray) -> BoolArray:
    """[groups, G] -> [groups]: whether rewards differ within the group."""
    return spread(rewards) > 0


def keep_informative(informative: BoolArray, wanted: int, name: str) -> Selection:
    """The first `wanted` informative groups [groups], as a mean over them on the step's nominal denominators."""
    kept = informative & (np.cumsum(informative) <= wanted)
    count = int(kept.sum())
    drawn = Draw(kept, kept.astype(np.float64), fixed_size=True)
    note = "target is the mean over groups with reward variance"
    if count < wanted:
        note += f"; only {count} of {wanted} such groups were found"
    # labelled biased even if every group of this step has variance, because that is an outcome
    selection = weigh_biased(drawn, name=name, scale=wanted / count if count else 0.0, note=note, label="biased")
    # relative to the mean over all groups of the step: each group with variance is equally likely to be among the first
    return replace(selection, mean_weight=np.where(informative, len(informative) / max(int(informative.sum()), 1), 0.0))


def two_class(low: BoolArray, rate: float) -> FloatArray:
    """Keep probability [n]: 1, or `keep_share` where `low`."""
    return np.where(low, keep_share(rate), 1.0)


def keep_share(rate: float) -> float:
    """max(0.1, 1 - rate): the keep probability of the lower class."""
    return max(_SMALLEST_KEEP, 1.0 - rate)
