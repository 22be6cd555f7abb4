"""All the choosing of a step, in one place: order, prompt policy, advantages, completion policy, weights, ledger.

No model, no process group and no text, only arrays: the training loop runs it on rank 0 with what the engine made,
and `dppo-megatron simulate` runs the same code on a recorded trace.

With several optimizer updates a step, nominal prompts are assigned to mini-batches by their position before anything is
selected. Each mini-batch has its own draws, made independently, and its own denominators: a later update then moves a
policy that knows nothing of the draws that it is about to use, which is what keeps it unbiased (docs/objectives.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dppo_megatron.algorithms.advantages import make_advantages, overlong_penalty
from dppo_megatron.algorithms.denominators import denominators, token_sums
from dppo_megatron.config.data import train_set_weights
from dppo_megatron.config.objective import zero_advantage_slope
from dppo_megatron.config.schema import Config
from dppo_megatron.config.selection import check_selection, planned_prompts, too_few_prompts
from dppo_megatron.data.order import Order, make_order
from dppo_megatron.pruning import (
    CompletionBatch,
    LedgerRow,
    Selection,
    group_second_moment,
    make_completion_policy,
    make_prompt_policy,
)
from dppo_megatron.pruning.budget import NoiseReference, reference_steps
from dppo_megatron.pruning.interface import PromptFeatures, StepCapacity
from dppo_megatron.pruning.merging import is_reweighted, merge, with_refills
from dppo_megatron.pruning.monitors import step_metrics
from dppo_megatron.pruning.outcomes import check_outcomes
from dppo_megatron.types import BoolArray, FloatArray, IntArray, UserError

_LENGTH_DECAY = 0.9


@dataclass(frozen=True, slots=True)
class Chosen:
    """Prompts to roll out."""

    prompt_index: IntArray
    """[K]."""
    inclusion_prob: FloatArray
    """[K]."""
    weight: FloatArray
    """[K]."""
    minibatch: IntArray
    """[K] optimizer mini-batch that each was assigned to; 0 in a refill round, whose groups are assigned at the end."""


@dataclass(frozen=True, slots=True)
class Rollouts:
    """What came back, as arrays; groups in the order in which their prompts were chosen."""

    rewards: FloatArray
    """[K, G], NaN where the grader failed."""
    lengths: IntArray
    """[K, G] completion tokens."""
    surprisal: FloatArray
    """[K, G] root of the sum of squared (1 - p) of the sampled tokens."""
    prompt_tokens: IntArray | None = None
    """[K] tokens of each prompt; None where it was not recorded: completions then count alone in a micro-batch."""
    truncated: BoolArray | None = None
    """[K, G] generation ran into max_completion_tokens. None where it was not recorded: completions of that length."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What to train on: flat arrays [K * G]."""

    kept: BoolArray
    weight: FloatArray
    """Product of the weights of every selection a completion survived; 0 where not kept."""
    advantages: FloatArray
    denominator: FloatArray
    minibatch: IntArray
    """Optimizer mini-batch, 0 to updates_per_step - 1; groups are whole."""
    ledger: tuple[LedgerRow, ...]
    metrics: dict[str, float]
    offered: IntArray
    """Nominal prompts of the step, refills included; those not rolled out too."""
    prompts: Chosen
    """Those that were rolled out."""


@dataclass
class _Step:
    """What `finish` must still know of the step's beginning."""

    rounds: int = 0
    offered: list[IntArray] = field(default_factory=list)
    selections: list[Selection] = field(default_factory=list)
    """Those of the first round's mini-batches, then one for each refill."""
    chosen: list[Chosen] = field(default_factory=list)


class Selector:
    """The pruning policies of a job and the state they need.

    `begin`, `refill` until it returns nothing, `finish`, then `feedback`: once each step, in this order.

    Args:
        order: another order of prompts than the config's seed gives; for experiments that vary the draws alone.
        set_sizes: problems of each training set by name, in the order of their indices; None: they are one set.
        features: what is known of each prompt before it is tried; handed to the prompt policy.
        capacity: what a step's micro-batches hold, for the completion policies that fill them; None: not known.

    Example: 64 prompts of 8 completions, after an epoch of warm-up, at the default rates (0.3 of the prompts, 0.5 of
    the completions). `begin` keeps 64 - floor(0.3 x 64) = 45 prompts with weights up to 1 / 0.2; the engine's answer is
    graded to rewards [45, 8]. `finish` keeps 180 of these 360 completions, or fewer if fewer have an advantage, each
    with the product of both weights and with a divisor that counts all 64 x 8.

    Raises:
        UserError: the step's nominal prompts do not divide into its mini-batches, or are more than there are.
    """

    def __init__(
        self,
        config: Config,
        num_prompts: int,
        order: Order | None = None,
        capacity: StepCapacity | None = None,
        set_sizes: Mapping[str, int] | None = None,
        features: PromptFeatures | None = None,
    ) -> None:
        check_selection(config)
        self._config = config
        self._capacity = capacity
        group = config.rollout.completions_per_prompt
        rest_steps = reference_steps(config.pruning)
        self._completion_policy = make_completion_policy(
            config.pruning.completion,
            seed=config.seed,
            total_steps=config.steps,
            kl_coef=zero_advantage_slope(config.objective),
            group_size=group,
            rest_steps=rest_steps,
        )
        self.prompts_per_step = planned_prompts(config)
        """Nominal prompts of a step; above the config's number only with CPPO's allocation."""
        if num_prompts < self.prompts_per_step:
            raise UserError(too_few_prompts(config, num_prompts))
        self._updates = config.objective.updates_per_step
        self._prompt_policy = make_prompt_policy(
            config.pruning.prompt,
            num_prompts=num_prompts,
            completions_per_prompt=group,
            prompts_per_step=self.prompts_per_step,
            total_steps=config.steps,
            seed=config.seed,
            rest_steps=rest_steps,
            features=features,
        )
        sizes = {"": num_prompts} if set_sizes is None else set_sizes
        self._order = order or make_order(sizes, train_set_weights(config), config.seed, self.prompts_per_step)
        self._position = 0
        self._noise = NoiseReference()
        self._mean_length = 0.0
        self._pruned = False
        self._step = _Step()

    def begin(self, step: int) -> Chosen:
        """The prompts of step `step` (from 1) that are worth a rollout."""
        self._step = _Step()
        return self._choose(self.prompts_per_step, step, self._updates)

    def refill(self, rewards: FloatArray, step: int) -> Chosen | None:
        """More prompts, for the methods that sample until enough groups have variance; None when it is enough.

        Args:
            rewards: [groups, G] of all groups of the step so far.
        """
        missing = self._prompt_policy.missing_prompts(rewards, step=step - 1, rounds=self._step.rounds)
        return self._choose(min(missing, self._order.num_prompts), step, 1) if missing else None

    def finish(self, rollouts: Rollouts, step: int) -> Decision:
        """Advantages on full groups, then the completions worth training on.

        Raises:
            GuardStop, UserError: an outcome that nothing can be chosen by; see `check_outcomes`.
        """
        zero_based, size = step - 1, rollouts.rewards.shape[1]
        prompts = _join(self._step.chosen)
        check_outcomes(prompts.prompt_index, rollouts.rewards, rollouts.lengths, rollouts.surprisal)
        groups = self._prompt_policy.keep_groups(rollouts.rewards, step=zero_based)
        minibatch = self._assign(prompts, groups)
        advantages = self._advantages(rollouts, prompts.weight * groups.weight)
        denominator, denominator_row = self._denominator(rollouts.lengths, minibatch, groups)
        # without the prompt's weight, or the weight would feed back into the score that makes the next weight
        moment = group_second_moment(advantages * rollouts.surprisal / denominator)
        self._prompt_policy.observe(
            prompts.prompt_index, rollouts.rewards, rollouts.lengths, step=zero_based, second_moment=moment
        )
        trainable, filter_row = self._trainable(rollouts, groups)
        batch = _batch(prompts, rollouts, advantages, denominator, groups, trainable, self.prompts_per_step * size)
        rows = np.flatnonzero(trainable)
        completions = self._prune_minibatches(batch, minibatch[rows // size], zero_based)
        kept = np.zeros(rollouts.rewards.size, dtype=np.bool_)
        weight = np.zeros(rollouts.rewards.size)
        kept[rows] = completions.kept
        weight[rows] = batch.prompt_weight * completions.weight
        first, later = self._step.selections[: self._updates], self._step.selections[self._updates :]
        planned = merge(first, np.arange(sum(len(selection.kept) for selection in first)))
        offered = with_refills(planned, later)
        ledger = (
            *planned.ledger,
            *(groups.ledger if self._prompt_policy.resamples else ()),
            *self._whitening_row(planned),
            *denominator_row,
            *filter_row,
            *completions.ledger,
        )
        self._pruned = is_reweighted(planned) or is_reweighted(completions)
        self._learn_length(rollouts.lengths, prompts.weight)
        return Decision(
            kept=kept,
            weight=weight,
            advantages=advantages.ravel(),
            denominator=denominator.ravel(),
            minibatch=np.repeat(minibatch, size),
            ledger=ledger,
            metrics=self._metrics(offered, batch, completions, rollouts, prompts, zero_based),
            offered=np.concatenate(self._step.offered),
            prompts=prompts,
        )

    def feedback(self, step: int, *, rollout_s: float, update_s: float, other_s: float, grad_norm: float) -> list[str]:
        """Tell the policies what the step cost and how noisy its gradient was; lines for the log if a rate moved.

        The noise ratio is the squared gradient norm over its running mean on steps where every weight was 1.
        """
        ratio = self._noise.ratio(grad_norm * grad_norm, pruned=self._pruned)
        said = [
            policy.feedback(step=step - 1, rollout_s=rollout_s, update_s=update_s, other_s=other_s, noise_ratio=ratio)
            for policy in (self._prompt_policy, self._completion_policy)
        ]
        return [line for line in said if line]

    def state_dict(self) -> dict[str, Any]:
        """What the next step depends on."""
        return {
            "prompt": self._prompt_policy.state_dict(),
            "completion": self._completion_policy.state_dict(),
            "position": self._position,
            "unpruned_noise": self._noise.mean,
            "mean_length": self._mean_length,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved `state_dict`."""
        self._prompt_policy.load_state_dict(state["prompt"])
        self._completion_policy.load_state_dict(state["completion"])
        self._position = state["position"]
        self._noise = NoiseReference(state["unpruned_noise"])
        self._mean_length = state["mean_length"]

    def full_scores(self, everything: Rollouts) -> FloatArray:
        """[N, G] gradient-norm proxy |A| surprisal / denominator of all nominal prompts of a step, none skipped."""
        count = len(everything.rewards)
        minibatch = np.arange(count) * self._updates // max(count, 1)
        advantages = self._advantages(everything, np.ones(count))
        tokens = token_sums(everything.lengths, minibatch, self._updates)
        divisor = self._divisor(everything.lengths, tokens[minibatch])
        scores: FloatArray = np.abs(advantages) * everything.surprisal / divisor
        return scores

    def _choose(self, count: int, step: int, parts: int) -> Chosen:
        nominal, self._position = self._order.take(self._position, count)
        seen = np.concatenate([*self._step.offered, np.empty(0, np.int64)])
        nominal = nominal[~np.isin(nominal, seen)]  # a refill may run into the next epoch, where they come again
        self._step.offered.append(nominal)
        self._step.rounds += 1
        chosen = []
        for index, mine in enumerate(np.array_split(nominal, parts)):
            selection = self._prompt_policy.select(mine, step=step - 1, minibatch=len(self._step.selections))
            kept = selection.kept
            minibatch = np.full(int(kept.sum()), index, dtype=np.int64)
            chosen.append(Chosen(mine[kept], selection.inclusion_prob[kept], selection.weight[kept], minibatch))
            self._step.selections.append(selection)
        self._step.chosen += chosen
        return _join(chosen)

    def _assign(self, prompts: Chosen, groups: Selection) -> IntArray:
        """[K] mini-batch of each group.

        Where the rewards decide which groups go on (dynamic sampling, GRESO), the nominal positions mean nothing any
        more: those that go on are shared out evenly, in their order.
        """
        if not self._prompt_policy.resamples:
            return prompts.minibatch
        position = np.maximum(np.cumsum(groups.kept) - 1, 0)
        shared: IntArray = position * self._updates // max(int(groups.kept.sum()), 1)
        return shared

    def _advantages(self, rollouts: Rollouts, group_weight: FloatArray) -> FloatArray:
        objective, limit = self._config.objective, self._config.rollout.sampling.max_completion_tokens
        shaped = rollouts.rewards + overlong_penalty(rollouts.lengths, objective.overlong, limit)
        return make_advantages(shaped, objective, group_weight)

    def _denominator(
        self, lengths: IntArray, minibatch: IntArray, groups: Selection
    ) -> tuple[FloatArray, tuple[LedgerRow, ...]]:
        """[K, G] frozen divisor of each completion's token sum, and the ledger row of a predicted token count."""
        if self._config.objective.normalization != "token_mean":
            return self._divisor(lengths, np.zeros(len(lengths))), ()
        tokens = token_sums(lengths * groups.weight[:, None], minibatch, self._updates)
        # by the probabilities and not by the draw: a divisor that depends on who was drawn would bias the estimate
        skips = np.array([bool((selection.inclusion_prob < 1).any()) for selection in self._step.selections])
        if self._prompt_policy.resamples or not skips.any():
            return self._divisor(lengths, tokens[minibatch]), ()  # resampled: the mean over the groups that go on
        expected = self._nominal(lengths) * (
            self._mean_length or float(self._config.rollout.sampling.max_completion_tokens)
        )
        note = (
            "skipped prompts have no token count: N G mean length of earlier steps stands for it, which changes the"
            " length of the expected gradient and not its direction"
        )
        row = LedgerRow("denominator/token_mean", 1.0, "ratio", note)
        return self._divisor(lengths, np.where(skips, expected, tokens)[minibatch]), (row,)

    def _divisor(self, lengths: IntArray, tokens: FloatArray) -> FloatArray:
        """[K, G], given the token count [K] of each group's mini-batch (read by token_mean only)."""
        return denominators(
            self._config.objective.normalization,
            lengths,
            tokens,
            nominal=self._nominal(lengths),
            max_completion_tokens=self._config.rollout.sampling.max_completion_tokens,
        )

    def _nominal(self, lengths: IntArray) -> int:
        """Completions of one planned mini-batch."""
        return self.prompts_per_step // self._updates * int(lengths.shape[1])

    def _trainable(self, rollouts: Rollouts, groups: Selection) -> tuple[BoolArray, tuple[LedgerRow, ...]]:
        """[K * G] completions of the groups that go on, less the truncated ones with `overlong.filter`."""
        trainable = np.repeat(groups.kept, rollouts.rewards.shape[1])
        if not self._config.objective.overlong.filter:
            return trainable, ()
        truncated = rollouts.truncated
        if truncated is None:
            truncated = rollouts.lengths >= self._config.rollout.sampling.max_completion_tokens
        dropped = trainable & truncated.ravel()
        share = 1.0 - float(dropped.sum()) / max(int(trainable.sum()), 1)
        # biased also in a step without any: whether one was truncated is an outcome
        row = LedgerRow("completion/overlong_filter", share, "biased", "truncated completions are never trained on")
        return trainable & ~dropped, (row,)

    def _prune_minibatches(self, batch: CompletionBatch, minibatch: IntArray, step: int) -> Selection:
        """The completion policy on each mini-batch [n], put together in the order of `batch`."""
        rows = [np.flatnonzero(minibatch == index) for index in range(self._updates)]
        parts = [
            self._completion_policy.prune(
                _part(batch, mine, self._updates), step=step, minibatch=index, capacity=self._capacity
            )
            for index, mine in enumerate(rows)
        ]
        return merge(parts, np.argsort(np.concatenate(rows), kind="stable"))

    def _whitening_row(self, planned: Selection) -> tuple[LedgerRow, ...]:
        """By the probabilities: a draw that skipped nothing had the full batch's deviation by chance."""
        whitens = self._config.objective.advantage == "reinforce_baseline"
        if not whitens or bool(np.all(planned.inclusion_prob == 1.0)):
            return ()
        note = "the step's standard deviation is estimated from the prompts that were rolled out"
        return (LedgerRow("advantage/reinforce_baseline", 1.0, "ratio", note),)

    def _learn_length(self, lengths: IntArray, weight: FloatArray) -> None:
        total = float(weight.sum()) * lengths.shape[1]
        if total > 0:
            mean, old = float((weight[:, None] * lengths).sum()) / total, self._mean_length
            self._mean_length = _LENGTH_DECAY * old + (1 - _LENGTH_DECAY) * mean if old else mean

    def _metrics(
        self,
        offered: Selection,
        batch: CompletionBatch,
        completions: Selection,
        rollouts: Rollouts,
        prompts: Chosen,
        step: int,
    ) -> dict[str, float]:
        graded = ~np.isnan(rollouts.rewards)
        weight = np.where(graded, prompts.weight[:, None], 0.0)
        rewards = np.where(graded, rollouts.rewards, 0.0)
        return {
            # weighted, because the generated prompts are a sample of the considered ones
            "reward/mean": float((weight * rewards).sum() / weight.sum()) if weight.sum() else math.nan,
            "reward/failed": float((~graded).sum()),
            "prune/prompts_considered": float(len(offered.kept)),
            "prune/prompts_generated": float(offered.kept.sum()),
            "prune/completions_generated": float(rollouts.rewards.size),
            "prune/completions_trained": float(completions.kept.sum()),
            "tokens/generated": float(rollouts.lengths.sum()),
            "tokens/trained": float(batch.lengths[completions.kept].sum()),
            **step_metrics(offered, batch, completions),
            **self._prompt_policy.history_metrics(step=step),
        }


def _join(chosen: list[Chosen]) -> Chosen:
    columns = [(c.prompt_index, c.inclusion_prob, c.weight, c.minibatch) for c in chosen]
    return Chosen(*(np.concatenate(column) for column in zip(*columns, strict=True)))


def _batch(
    prompts: Chosen,
    rollouts: Rollouts,
    advantages: FloatArray,
    denominator: FloatArray,
    groups: Selection,
    trainable: BoolArray,
    num_nominal: int,
) -> CompletionBatch:
    """The trainable completions [n] of the whole step."""
    count, size = rollouts.rewards.shape
    return CompletionBatch(
        prompt_index=np.repeat(prompts.prompt_index, size)[trainable],
        completion_index=np.tile(np.arange(size), count)[trainable],
        group=_labels(np.repeat(np.arange(count), size)[trainable]),
        rewards=rollouts.rewards.ravel()[trainable],
        advantages=advantages.ravel()[trainable],
        lengths=rollouts.lengths.ravel()[trainable],
        surprisal=rollouts.surprisal.ravel()[trainable],
        denominator=denominator.ravel()[trainable],
        prompt_weight=np.repeat(prompts.weight * groups.weight, size)[trainable],
        tokens=None
        if rollouts.prompt_tokens is None
        else (rollouts.lengths + rollouts.prompt_tokens[:, None] - 1).ravel()[trainable],
        num_nominal=num_nominal,
    )


def _part(batch: CompletionBatch, rows: IntArray, parts: int) -> CompletionBatch:
    """The rows of one of `parts` equal mini-batches."""
    return CompletionBatch(
        prompt_index=batch.prompt_index[rows],
        completion_index=batch.completion_index[rows],
        group=_labels(batch.group[rows]),
        rewards=batch.rewards[rows],
        advantages=batch.advantages[rows],
        lengths=batch.lengths[rows],
        surprisal=batch.surprisal[rows],
        denominator=batch.denominator[rows],
        prompt_weight=batch.prompt_weight[rows],
        tokens=None if batch.tokens is None else batch.tokens[rows],
        num_nominal=batch.num_nominal // parts,
    )


def _labels(group: IntArray) -> IntArray:
    """The same groups, numbered from 0 without gaps."""
    labels: IntArray = np.unique(group, return_inverse=True)[1].astype(np.int64)
    return labels
