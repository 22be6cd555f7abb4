"""Advantages, frozen divisors and the rows that they put into the ledger: what a step's completions count before any of
them is dropped.

Apart from the selector because it holds nothing of the policies: the same numbers for every method, and the full
batch's for `simulate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dppo_megatron.algorithms.advantages import (
    denominators,
    early_stop_noise,
    group_advantages,
    make_advantages,
    overlong_penalty,
    token_sums,
)
from dppo_megatron.config.objective import is_linear_in_advantage, is_linear_off_policy, zero_advantage_slope
from dppo_megatron.config.selection import SelectionSettings
from dppo_megatron.pruning import LedgerRow, Selection
from dppo_megatron.pruning.early_stop import NAME as EARLY_STOP
from dppo_megatron.pruning.scores import completion_score
from dppo_megatron.selection.arrays import PromptDraw, Rollouts, was_asked
from dppo_megatron.selection.bias import BiasSource, whitening_factor
from dppo_megatron.types import BoolArray, FloatArray, IntArray

_LENGTH_DECAY = 0.9
_FILTER, _POSTERIOR, _SIZES = "completion/overlong_filter", "advantage/posterior_loo", "rollout/group_sizes"
TOKENS = "completion/token_values"
_OWN_LOSS = (
    "code of your own need not be linear in the advantage, and then its gradient changes with a baseline's noise"
)


def is_of_method(row: str) -> bool:
    """Whether the row of this name says what a method does, and not the data, the engine or the objective, which do it
    alike where nothing is pruned."""
    if row.startswith(("data/", "rollout/")):
        return row in (_SIZES, EARLY_STOP)
    return row not in (_FILTER, _POSTERIOR, TOKENS)


def _mean_lengths(rollouts: Rollouts, prompts: PromptDraw) -> FloatArray:
    """[K] tokens of the completions that were asked for. The others' lengths are those of their mates that came to
    their end, which are the short ones where completions are stopped early."""
    lengths = rollouts.counted(rollouts.lengths.astype(np.float64))
    found: FloatArray = np.where(was_asked(rollouts, prompts.size), lengths, 0.0).sum(axis=1) / prompts.size
    return found


class Coefficients:
    """A and D of a step's completions."""

    def __init__(self, settings: SelectionSettings) -> None:
        self._settings, self._prompts_per_step = settings, settings.planned_prompts
        self._updates = settings.objective.updates_per_step
        self._size, self._limit = settings.completions_per_prompt, settings.max_completion_tokens
        self.mean_length = 0.0
        """Running mean of completion tokens, which stands for those of skipped prompts; 0 before the first step."""

    def advantages(self, rollouts: Rollouts, group_weight: FloatArray, prior: FloatArray | None) -> FloatArray:
        """[K, G], from the full groups' rewards less the penalty of overlong ones; weights [K] of the groups, and what
        was known of each before the step [K, 2].

        A mean that holds the completion itself takes 1 / m of its advantage, more in a group with some missing: undone.
        """
        advantages = make_advantages(
            rollouts.rewards,
            self._settings.objective,
            group_weight,
            lengths=rollouts.lengths,
            prior=prior,
            stands_for=rollouts.stands_for,
            penalty=self._penalty(rollouts) if self._settings.objective.overlong.buffer_tokens else None,
        )
        if rollouts.stands_for is not None:  # the others' mean: a mean with itself in it has 1 / G less of each
            return advantages * (1.0 - 1.0 / self._size if self._settings.objective.advantage == "group_mean" else 1.0)
        if self._settings.objective.advantage not in ("group_mean", "reinforce_baseline"):
            return advantages  # a mean of the others has none of it; of group_std's no factor makes up for fewer
        own = 1.0 / np.maximum((~np.isnan(rollouts.rewards)).sum(axis=1, keepdims=True), 2)
        scaled: FloatArray = advantages * ((1.0 - 1.0 / self._size) / (1.0 - own))
        return scaled

    def baseline_noise(self, rollouts: Rollouts, prior: FloatArray | None) -> FloatArray:
        """[K, G] variance of the advantages by what stopping completions early does to their mates' mean."""
        assert rollouts.stands_for is not None and prior is not None
        advantage, penalty = self._settings.objective.advantage, self._penalty(rollouts)
        to_posterior = advantage == "posterior_loo"
        noise = early_stop_noise(rollouts.rewards, rollouts.stands_for, prior, penalty, to_posterior=to_posterior)
        own: FloatArray = noise * ((1.0 - 1.0 / self._size) ** 2 if advantage == "group_mean" else 1.0)
        return own

    def _penalty(self, rollouts: Rollouts) -> FloatArray:
        return overlong_penalty(rollouts.lengths, self._settings.objective.overlong, self._limit)

    def denominator(
        self, rollouts: Rollouts, minibatch: IntArray, groups: Selection, skips: BoolArray, prompts: PromptDraw
    ) -> tuple[FloatArray, BiasSource]:
        """[K, G] frozen divisor of each completion's token sum, and the ledger row of a predicted token count.

        Args:
            minibatch: [K], of each group.
            groups: which groups go on, and their weights.
            skips: [mini-batches]: some of its prompts could have been skipped, or have groups of another size. By the
                probabilities and not by the draw: a divisor that depends on who was drawn would bias the estimate.
        """
        lengths = rollouts.lengths
        if self._settings.objective.normalization != "token_mean":
            return self._divisor(lengths, np.zeros(len(lengths))), BiasSource(())
        # read only where all groups have the usual size: the columns behind it were never asked for
        tokens = token_sums(lengths[:, : self._size] * groups.weight[:, None], minibatch, self._updates)
        if not skips.any():
            return self._divisor(lengths, tokens[minibatch]), BiasSource(())
        expected = self._nominal * (self.mean_length or float(self._limit))
        note = (
            "the full batch has no token count: N G mean length of earlier steps stands for it, which changes the"
            " length of the expected gradient and not its direction"
        )
        row = LedgerRow("denominator/token_mean", 1.0, "ratio", note)
        true = self._true_over(expected, _mean_lengths(rollouts, prompts), minibatch, prompts.inclusion_prob)
        factor = np.where(skips, true, 1.0)[minibatch][:, None]
        return self._divisor(lengths, np.where(skips, expected, tokens)[minibatch]), BiasSource((row,), factor)

    def _true_over(
        self, expected: float, lengths: FloatArray, minibatch: IntArray, prompt_prob: FloatArray
    ) -> FloatArray:
        """[mini-batches] tokens of all prompts over `expected`, from mean lengths [K] of those that were rolled out."""
        counts = np.stack([np.ones(len(lengths)), 1.0 / prompt_prob, lengths / prompt_prob])
        drawn, total, tokens = (np.bincount(minibatch, weights=each, minlength=self._updates) for each in counts)
        mean = tokens / np.maximum(total, 1.0) * self._nominal / expected
        # the mean of a share of the prompts is off by 1 / sqrt(share) of what that of all is
        share = drawn * self._size / self._nominal
        factor: FloatArray = 1.0 + (mean - 1.0) * np.sqrt(share)
        return factor

    def _divisor(self, lengths: IntArray, tokens: FloatArray) -> FloatArray:
        """[K, G], given the token count [K] of each group's mini-batch (read by token_mean only)."""
        normalization, nominal = self._settings.objective.normalization, self._nominal
        return denominators(normalization, lengths, tokens, nominal=nominal, max_completion_tokens=self._limit)

    @property
    def _nominal(self) -> int:
        """Completions of one planned mini-batch."""
        return self._prompts_per_step // self._updates * self._size

    def trainable(self, rollouts: Rollouts, there: BoolArray) -> tuple[BoolArray, BiasSource]:
        """[K * G] completions that are `there` [K, G], less the truncated ones with `overlong.filter`."""
        trainable = there.ravel()
        if not self._settings.objective.overlong.filter:
            return trainable, BiasSource(())
        truncated = rollouts.lengths >= self._limit if rollouts.truncated is None else rollouts.truncated
        dropped = trainable & truncated.ravel()
        share = 1.0 - float(dropped.sum()) / max(int(trainable.sum()), 1)
        # biased also in a step without any: whether one was truncated is an outcome
        row = LedgerRow(_FILTER, share, "biased", "truncated completions are never trained on")
        return trainable & ~dropped, BiasSource((row,), np.where(truncated, 0.0, 1.0))

    def whitening(self, planned: Selection, selections: Sequence[Selection], rollouts: Rollouts) -> BiasSource:
        """By the probabilities: a draw that skipped nothing had the full batch's deviation by chance."""
        objective = self._settings.objective
        if objective.advantage != "reinforce_baseline" or bool(np.all(planned.inclusion_prob == 1.0)):
            return BiasSource(())
        note = "the step's standard deviation is estimated from the prompts that were rolled out"
        row = LedgerRow("advantage/reinforce_baseline", 1.0, "ratio", note)
        shaped = rollouts.rewards + self._penalty(rollouts)
        moment = np.square(group_advantages(shaped, divide_by_std=False, eps=0.0)).sum(axis=1)
        graded = (~np.isnan(rollouts.rewards)).sum(axis=1)
        factor = whitening_factor(selections, moment, graded, eps=objective.advantage_eps)
        return BiasSource((row,), None if factor is None else factor[:, None])

    def baseline(self) -> BiasSource:
        """What a baseline of earlier steps does to the gradient that `rloo` would have in expectation."""
        objective = self._settings.objective
        if objective.advantage != "posterior_loo":
            return BiasSource(())
        note = "a completion's baseline is its prompt's history and the others' rewards, which it has no part in"
        source = self._of_another_baseline(LedgerRow(_POSTERIOR, 1.0, "unbiased", note))
        [row] = source.rows
        if row.label == "biased" or objective.normalization != "token_mean":
            return source
        row = replace(row, label="ratio", note=f"{note}; the divisor holds its own length")
        return BiasSource((row,), None, unknown="the gradient of lengths is not known")

    def sizes(self) -> BiasSource:
        """What groups of several sizes do to the expected gradient: nothing, where no baseline counts."""
        if self._settings.group_size_factor == 1:
            return BiasSource(())
        note = "sizes of groups are fixed before anything is sampled; every group counts as one of the usual size"
        return self._of_another_baseline(LedgerRow(_SIZES, 1.0, "unbiased", note))

    def early_stop(self, rollouts: Rollouts, asked: BoolArray) -> BiasSource:
        """What stopping completions early does to the expected gradient: likewise. `asked` [K, G]."""
        early = self._settings.pruning.early_stop
        if not early.after_tokens:
            return BiasSource(())
        note = (
            f"of n tokens a completion came to its end with probability {early.after_tokens} / n,"
            f" {early.min_inclusion_prob:g} at least, by a limit drawn before it was sampled, and weighs the inverse"
        )
        share = 1.0 - float(rollouts.stopped.sum()) / max(int(asked.sum()), 1)
        keeps_mean = self._settings.objective.normalization == "constant"
        return self._of_another_baseline(LedgerRow(EARLY_STOP, share, "unbiased", note), keeps_mean=keeps_mean)

    def _of_another_baseline(self, row: LedgerRow, *, keeps_mean: bool = False) -> BiasSource:
        """`row` of what has noisier baselines, or less noisy ones: no matter, unless the loss is not linear in the
        advantage. `keeps_mean`: a posterior's mean stays as it was too."""
        if self._settings.objective.has_own_code:
            row = replace(row, label="biased", note=_OWN_LOSS)
            return BiasSource((row,), None, unknown="nothing is known of that loss")
        if self._baseline_counts and not (keeps_mean and is_linear_in_advantage(self._settings.objective)):
            note = (
                "after a first update, or off policy where ratios are bounded or tokens cut, the expected gradient"
                " changes with a baseline"
            )
            row = replace(row, label="biased", note=note)
            return BiasSource((row,), None, unknown="which ratios will be bounded is not known")
        return BiasSource((row,), np.ones((1, 1)))

    @property
    def same_at_any_size(self) -> bool:
        """A group of any size has the same expected gradient, whatever its prompt's rewards are."""
        objective, early = self._settings.objective, self._settings.pruning.early_stop.after_tokens
        # which of those that were stopped early would have no reward is not known
        return objective.advantage != "group_std" and not (objective.has_own_code or self._baseline_counts or early)

    @property
    def _baseline_counts(self) -> bool:
        """The expected gradient may change with a baseline. Where a ratio may be bounded: in the updates after a step's
        first, or where it is of completions of older or rounded weights that the first does not count in full. One to a
        distribution without some tokens says nothing of those.

        Where the loss is linear in the advantage, only a baseline's mean can matter, and all have that of the rewards
        but `posterior_loo`'s, which goes by the size of a group and, with stops, by mates' lengths if they divide."""
        settings, objective = self._settings, self._settings.objective
        if is_linear_in_advantage(objective) and objective.advantage != "posterior_loo":
            return False
        off_policy = (settings.async_steps > 0 or settings.quantized) and not is_linear_off_policy(objective)
        return objective.updates_per_step > 1 or off_policy or settings.truncated

    def squared_norms(self, rollouts: Rollouts, advantages: FloatArray, denominator: FloatArray) -> FloatArray:
        """[K, G] squared gradient norms of the completions, up to a common factor, without weights."""
        norms, slope = rollouts.logit_grad_norm, self.slope
        return np.square(completion_score(advantages, norms, denominator, np.ones(1), zero_advantage_slope=slope))

    @property
    def slope(self) -> float:
        """Typical slope of the terms of the loss that do not depend on the advantage."""
        return zero_advantage_slope(self._settings.objective)

    def learn_length(self, rollouts: Rollouts, prompts: PromptDraw) -> None:
        """From a step that is done."""
        total = float(prompts.weight.sum())
        if total > 0:
            mean, old = float(prompts.weight @ _mean_lengths(rollouts, prompts)) / total, self.mean_length
            self.mean_length = _LENGTH_DECAY * old + (1 - _LENGTH_DECAY) * mean if old else mean

    def full_scores(self, everything: Rollouts, prior: FloatArray | None) -> tuple[FloatArray, FloatArray]:
        """[N, G] gradient-norm proxy of the completions of all nominal prompts of a step, none skipped; 0 of those that
        are never trained on. [N, G] their divisors."""
        count = len(everything.rewards)
        minibatch = np.arange(count) * self._updates // max(count, 1)
        advantages = self.advantages(everything, np.ones(count), prior)
        tokens = token_sums(everything.lengths, minibatch, self._updates)
        divisor = self._divisor(everything.lengths, tokens[minibatch])
        trainable, _ = self.trainable(everything, np.ones(everything.rewards.shape, dtype=np.bool_))
        scores = np.sqrt(self.squared_norms(everything, advantages, divisor))
        return np.where(trainable.reshape(scores.shape), scores, 0.0), divisor
