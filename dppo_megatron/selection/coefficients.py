"""Advantages and frozen divisors of a step's completions before any is dropped, and the ledger rows they cause."""

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
from dppo_megatron.selection.arrays import PromptDraw, Rollouts, was_requested
from dppo_megatron.selection.bias import BiasSource, whitening_factor
from dppo_megatron.types import BoolArray, FloatArray, IntArray

_LENGTH_DECAY = 0.9
_FILTER, _POSTERIOR, _SIZES = "completion/overlong_filter", "advantage/posterior_loo", "rollout/group_sizes"
TOKENS = "completion/token_values"
_OWN_LOSS = (
    "code of your own need not be linear in the advantage, and then its gradient changes with a baseline's noise"
)


def is_of_method(row: str) -> bool:
    """Whether the ledger row is about the method; rows about data, engine or objective appear without pruning too."""
    if row.startswith(("data/", "rollout/")):
        return row in (_SIZES, EARLY_STOP)
    return row not in (_FILTER, _POSTERIOR, TOKENS)


def _mean_lengths(rollouts: Rollouts, prompts: PromptDraw) -> FloatArray:
    """[K] mean tokens of the completions that were requested. The columns of others hold a mean of the mates that
    finished, which is too short if completions are stopped early."""
    lengths = rollouts.counted(rollouts.lengths.astype(np.float64))
    return np.asarray(np.where(was_requested(rollouts, prompts.size), lengths, 0.0).sum(axis=1) / prompts.size)


class Coefficients:
    """Advantages A and divisors D of a step's completions."""

    def __init__(self, settings: SelectionSettings) -> None:
        self._settings, self._prompts_per_step = settings, settings.planned_prompts
        self._updates = settings.objective.updates_per_step
        self._size, self._limit = settings.completions_per_prompt, settings.max_completion_tokens
        self.mean_length = 0.0
        """Running mean of completion tokens, used for skipped prompts; 0 before the first step."""

    def advantages(self, rollouts: Rollouts, group_weight: FloatArray, prior: FloatArray | None) -> FloatArray:
        """[K, G] from the full groups' rewards and length penalties; `group_weight` [K], `prior` [K, 2] as Beta
        parameters from before the step.

        A mean that contains the completion itself reduces its advantage by a share of 1 / m, m the group's number of
        rewards: by more if some are missing. The advantages are rescaled to the share 1 / G of a full group.
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
        if rollouts.stands_for is not None:  # relative to the others' mean; group_mean's would be 1 / G smaller
            return advantages * (1.0 - 1.0 / self._size if self._settings.objective.advantage == "group_mean" else 1.0)
        if self._settings.objective.advantage not in ("group_mean", "reinforce_baseline"):
            return advantages  # a mean of the others needs no factor, and for group_std no factor is right
        own_share = 1.0 / np.maximum((~np.isnan(rollouts.rewards)).sum(axis=1, keepdims=True), 2)
        return np.asarray(advantages * ((1.0 - 1.0 / self._size) / (1.0 - own_share)))

    def baseline_noise(self, rollouts: Rollouts, prior: FloatArray | None) -> FloatArray:
        """[K, G] variance of the advantages that is due to early stops of group mates."""
        assert rollouts.stands_for is not None and prior is not None
        advantage, penalty = self._settings.objective.advantage, self._penalty(rollouts)
        to_posterior = advantage == "posterior_loo"
        noise = early_stop_noise(rollouts.rewards, rollouts.stands_for, prior, penalty, to_posterior=to_posterior)
        return np.asarray(noise * ((1.0 - 1.0 / self._size) ** 2 if advantage == "group_mean" else 1.0))

    def _penalty(self, rollouts: Rollouts) -> FloatArray:
        return overlong_penalty(rollouts.lengths, self._settings.objective.overlong, self._limit)

    def denominator(
        self, rollouts: Rollouts, minibatch: IntArray, groups: Selection, skips: BoolArray, prompts: PromptDraw
    ) -> tuple[FloatArray, BiasSource]:
        """[K, G] frozen divisor of each completion's token sum, and the bias of a predicted token count.

        Args:
            minibatch: [K] of each group.
            groups: which groups are kept, and their weights.
            skips: [mini-batches]: whether some of its prompts could have been skipped or have another group size. From
                the probabilities and not the draw: a divisor that depends on the draw would bias the estimate.
        """
        lengths = rollouts.lengths
        if self._settings.objective.normalization != "token_mean":
            return self._divisor(lengths, np.zeros(len(lengths))), BiasSource(())
        # used only if all groups have the usual size; columns beyond it were never requested
        tokens = token_sums(lengths[:, : self._size] * groups.weight[:, None], minibatch, self._updates)
        if not skips.any():
            return self._divisor(lengths, tokens[minibatch]), BiasSource(())
        expected = self._nominal * (self.mean_length or float(self._limit))
        note = (
            "the full batch's token count is unknown: N G mean length of earlier steps replaces it, which changes the"
            " length of the expected gradient and not its direction"
        )
        row = LedgerRow("denominator/token_mean", 1.0, "ratio", note)
        ratio = self._true_over(expected, _mean_lengths(rollouts, prompts), minibatch, prompts.inclusion_prob)
        factor = np.where(skips, ratio, 1.0)[minibatch][:, None]
        return self._divisor(lengths, np.where(skips, expected, tokens)[minibatch]), BiasSource((row,), factor)

    def _true_over(
        self, expected: float, lengths: FloatArray, minibatch: IntArray, prompt_prob: FloatArray
    ) -> FloatArray:
        """[mini-batches] estimated tokens of all prompts over `expected`, from mean lengths [K] of those rolled out."""
        sums = np.stack([np.ones(len(lengths)), 1.0 / prompt_prob, lengths / prompt_prob])
        drawn, total, tokens = (np.bincount(minibatch, weights=each, minlength=self._updates) for each in sums)
        ratio = tokens / np.maximum(total, 1.0) * self._nominal / expected
        # a mean over a share of the prompts deviates 1 / sqrt(share) times as much as one over all
        share = drawn * self._size / self._nominal
        return np.asarray(1.0 + (ratio - 1.0) * np.sqrt(share))

    def _divisor(self, lengths: IntArray, tokens: FloatArray) -> FloatArray:
        """[K, G], given the token count [K] of each group's mini-batch (only token_mean reads it)."""
        normalization, nominal = self._settings.objective.normalization, self._nominal
        return denominators(normalization, lengths, tokens, nominal=nominal, max_completion_tokens=self._limit)

    @property
    def _nominal(self) -> int:
        """Completions of one planned mini-batch."""
        return self._prompts_per_step // self._updates * self._size

    def trainable(self, rollouts: Rollouts, usable: BoolArray) -> tuple[BoolArray, BiasSource]:
        """[K * G] the `usable` completions [K, G], without truncated ones if `overlong.filter` is set."""
        trainable = usable.ravel()
        if not self._settings.objective.overlong.filter:
            return trainable, BiasSource(())
        truncated = rollouts.lengths >= self._limit if rollouts.truncated is None else rollouts.truncated
        dropped = trainable & truncated.ravel()
        share = 1.0 - float(dropped.sum()) / max(int(trainable.sum()), 1)
        # labelled biased even if none was truncated in this step, because that is an outcome
        row = LedgerRow(_FILTER, share, "biased", "truncated completions are never trained on")
        return trainable & ~dropped, BiasSource((row,), np.where(truncated, 0.0, 1.0))

    def whitening(self, planned: Selection, selections: Sequence[Selection], rollouts: Rollouts) -> BiasSource:
        """What dividing by the drawn prompts' standard deviation does to the expected gradient: something unless all
        probabilities are 1, even if this draw happened to skip nothing."""
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
        """What a baseline from earlier steps changes relative to the expected gradient of `rloo`."""
        objective = self._settings.objective
        if objective.advantage != "posterior_loo":
            return BiasSource(())
        note = "a completion's baseline is its prompt's history and the others' rewards, which do not depend on it"
        source = self._of_another_baseline(LedgerRow(_POSTERIOR, 1.0, "unbiased", note))
        [row] = source.rows
        if row.label == "biased" or objective.normalization != "token_mean":
            return source
        row = replace(row, label="ratio", note=f"{note}; the divisor contains its own length")
        return BiasSource((row,), None, unknown="the gradient of lengths is not known")

    def sizes(self) -> BiasSource:
        """What groups of several sizes do to the expected gradient: nothing, unless it depends on the baseline."""
        if self._settings.group_size_factor == 1:
            return BiasSource(())
        note = "sizes of groups are fixed before anything is sampled; every group counts as one of the usual size"
        return self._of_another_baseline(LedgerRow(_SIZES, 1.0, "unbiased", note))

    def early_stop(self, rollouts: Rollouts, requested: BoolArray) -> BiasSource:
        """The same for early stops; `requested` [K, G]."""
        early = self._settings.pruning.early_stop
        if not early.after_tokens:
            return BiasSource(())
        note = (
            f"a completion of n tokens finished with probability {early.after_tokens} / n, at least"
            f" {early.min_inclusion_prob:g}, by a limit drawn before it was sampled, and is weighted by the inverse"
        )
        share = 1.0 - float(rollouts.stopped.sum()) / max(int(requested.sum()), 1)
        keeps_mean = self._settings.objective.normalization == "constant"
        return self._of_another_baseline(LedgerRow(EARLY_STOP, share, "unbiased", note), keeps_mean=keeps_mean)

    def _of_another_baseline(self, row: LedgerRow, *, keeps_mean: bool = False) -> BiasSource:
        """The source with this row, for something that changes the noise of baselines: labelled biased if the expected
        gradient depends on that. `keeps_mean`: it does not change the mean of a `posterior_loo` baseline."""
        if self._settings.objective.has_own_code:
            row = replace(row, label="biased", note=_OWN_LOSS)
            return BiasSource((row,), None, unknown="nothing is known of that loss")
        if self._baseline_counts and not (keeps_mean and is_linear_in_advantage(self._settings.objective)):
            note = (
                "after a first update, or off policy with bounded ratios or excluded tokens, the expected gradient"
                " depends on the baseline"
            )
            row = replace(row, label="biased", note=note)
            return BiasSource((row,), None, unknown="which ratios will be bounded is not known")
        return BiasSource((row,), np.ones((1, 1)))

    @property
    def same_at_any_size(self) -> bool:
        """Whether a group of any size has the same expected gradient, whatever its prompt's rewards are."""
        objective, early = self._settings.objective, self._settings.pruning.early_stop.after_tokens
        # not with early stops: it is unknown which of the stopped completions would have had no reward
        return objective.advantage != "group_std" and not (objective.has_own_code or self._baseline_counts or early)

    @property
    def _baseline_counts(self) -> bool:
        """Whether the expected gradient may depend on the baseline: if a ratio may be bounded, in the updates after a
        step's first, or in the first if completions come from older or rounded weights and the loss is not linear then;
        or if sampling excludes some tokens, about which a ratio to its distribution says nothing.

        If the loss is linear in the advantage, only the baseline's mean can matter. It is the mean of the rewards for
        all but `posterior_loo`, whose mean depends on group size and, with stops, on mates' lengths if these divide."""
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
        """Typical slope of the loss terms that do not depend on the advantage."""
        return zero_advantage_slope(self._settings.objective)

    def learn_length(self, rollouts: Rollouts, prompts: PromptDraw) -> None:
        total = float(prompts.weight.sum())
        if total > 0:
            mean, old = float(prompts.weight @ _mean_lengths(rollouts, prompts)) / total, self.mean_length
            self.mean_length = _LENGTH_DECAY * old + (1 - _LENGTH_DECAY) * mean if old else mean

    def full_scores(self, everything: Rollouts, prior: FloatArray | None) -> tuple[FloatArray, FloatArray]:
        """[N, G] gradient-norm proxy of all nominal prompts' completions, none skipped, with 0 for completions that are
        never trained on; and their divisors [N, G]."""
        count = len(everything.rewards)
        minibatch = np.arange(count) * self._updates // max(count, 1)
        advantages = self.advantages(everything, np.ones(count), prior)
        tokens = token_sums(everything.lengths, minibatch, self._updates)
        divisor = self._divisor(everything.lengths, tokens[minibatch])
        trainable, _ = self.trainable(everything, np.ones(everything.rewards.shape, dtype=np.bool_))
        scores = np.sqrt(self.squared_norms(everything, advantages, divisor))
        return np.where(trainable.reshape(scores.shape), scores, 0.0), divisor
