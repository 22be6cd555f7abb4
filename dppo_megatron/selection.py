"""All the choosing of a step, in one place: order, prompt policy, advantages, completion policy, weights, ledger.

No model, no process group and no text, only arrays: the training loop runs it on rank 0 with what the engine made,
and `dppo-megatron simulate` runs the same code on a recorded trace.

With several optimizer updates a step, nominal prompts are assigned to mini-batches by their position before anything is
selected. Each mini-batch has its own draws, made independently, and its own denominators: a later update then moves a
policy that knows nothing of the draws that it is about to use, which is what keeps it unbiased (docs/objectives.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from dppo_megatron.algorithms.advantages import make_advantages, overlong_penalty
from dppo_megatron.config.objective import zero_advantage_slope
from dppo_megatron.config.schema import Config
from dppo_megatron.data.order import PromptOrder
from dppo_megatron.pruning import (
    CompletionBatch,
    LedgerRow,
    Selection,
    group_second_moment,
    make_completion_policy,
    make_prompt_policy,
)
from dppo_megatron.pruning.interface import StepCapacity
from dppo_megatron.pruning.monitors import step_metrics
from dppo_megatron.types import BoolArray, FloatArray, IntArray, Label, UserError

_NOISE_DECAY = 0.9
_LENGTH_DECAY = 0.9
_LABELS: tuple[Label, ...] = ("exact", "unbiased", "ratio", "biased")


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
        capacity: what a step's micro-batches hold, for the completion policies that fill them; None: not known.

    Raises:
        UserError: the step's nominal prompts do not divide into its mini-batches.
    """

    def __init__(
        self,
        config: Config,
        num_prompts: int,
        order: PromptOrder | None = None,
        capacity: StepCapacity | None = None,
    ) -> None:
        self._config = config
        self._capacity = capacity
        group = config.rollout.completions_per_prompt
        self._completion_policy = make_completion_policy(
            config.pruning.completion,
            seed=config.seed,
            total_steps=config.steps,
            kl_coef=zero_advantage_slope(config.objective),
        )
        multiplier = self._completion_policy.prompts_multiplier
        self.prompts_per_step = int(config.rollout.prompts_per_step * multiplier)
        """Nominal prompts of a step; above the config's number only with CPPO's allocation."""
        self._updates = config.objective.updates_per_step
        if self.prompts_per_step % self._updates:
            raise UserError(
                f"objective.updates_per_step = {self._updates}: the {self.prompts_per_step} nominal prompts of a step"
                f" (rollout.prompts_per_step x {multiplier:g} by pruning.completion.allocation) do not divide by it"
            )
        self._prompt_policy = make_prompt_policy(
            config.pruning.prompt,
            num_prompts=num_prompts,
            completions_per_prompt=group,
            prompts_per_step=self.prompts_per_step,
            total_steps=config.steps,
            seed=config.seed,
        )
        self._order = order or PromptOrder(num_prompts, config.seed)
        self._position = 0
        self._unpruned_noise = 0.0
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
        """Advantages on full groups, then the completions worth training on."""
        zero_based, size = step - 1, rollouts.rewards.shape[1]
        prompts = _join(self._step.chosen)
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
        offered = self._offered()
        whole_groups = () if groups.kept.all() else groups.ledger
        whitening = self._whitening_row(prompts)
        ledger = offered.ledger + whole_groups + whitening + denominator_row + filter_row + completions.ledger
        self._pruned = any(row.label != "exact" for row in ledger)
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
        squared, mean = grad_norm**2, self._unpruned_noise
        ratio = squared / mean if self._pruned and mean else None
        if not self._pruned:
            self._unpruned_noise = _NOISE_DECAY * mean + (1 - _NOISE_DECAY) * squared if mean else squared
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
            "unpruned_noise": self._unpruned_noise,
            "mean_length": self._mean_length,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved `state_dict`."""
        self._prompt_policy.load_state_dict(state["prompt"])
        self._completion_policy.load_state_dict(state["completion"])
        self._position = state["position"]
        self._unpruned_noise = state["unpruned_noise"]
        self._mean_length = state["mean_length"]

    def full_scores(self, everything: Rollouts) -> FloatArray:
        """[N, G] gradient-norm proxy |A| surprisal / denominator of all nominal prompts of a step, none skipped."""
        count = len(everything.rewards)
        minibatch = np.arange(count) * self._updates // max(count, 1)
        advantages = self._advantages(everything, np.ones(count))
        divisor = self._divisor(
            everything.lengths, minibatch, _token_sums(everything.lengths, minibatch, self._updates)
        )
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

        Where the rewards decided which groups go on (dynamic sampling, GRESO), the nominal positions mean nothing any
        more: those that go on are shared out evenly, in their order.
        """
        if self._step.rounds == 1 and groups.kept.all():
            return prompts.minibatch
        position = np.maximum(np.cumsum(groups.kept) - 1, 0)
        shared: IntArray = position * self._updates // max(int(groups.kept.sum()), 1)
        return shared

    def _advantages(self, rollouts: Rollouts, group_weight: FloatArray) -> FloatArray:
        objective, limit = self._config.objective, self._config.rollout.max_completion_tokens
        shaped = rollouts.rewards + overlong_penalty(rollouts.lengths, objective.overlong, limit)
        return make_advantages(shaped, objective, group_weight)

    def _denominator(
        self, lengths: IntArray, minibatch: IntArray, groups: Selection
    ) -> tuple[FloatArray, tuple[LedgerRow, ...]]:
        """[K, G] frozen divisor of each completion's token sum, and the ledger row of a predicted token count."""
        if self._config.objective.normalization != "token_mean":
            return self._divisor(lengths, minibatch, np.empty(0)), ()
        tokens = _token_sums(lengths * groups.weight[:, None], minibatch, self._updates)
        if self._step.rounds > 1 or not groups.kept.all():
            return self._divisor(lengths, minibatch, tokens), ()  # the mean over the groups that go on
        # by the probabilities and not by the draw: a divisor that depends on who was drawn would bias the estimate
        skips = np.array([bool((selection.inclusion_prob < 1).any()) for selection in self._step.selections])
        if not skips.any():
            return self._divisor(lengths, minibatch, tokens), ()
        nominal = self.prompts_per_step // self._updates * lengths.shape[1]
        expected = nominal * (self._mean_length or float(self._config.rollout.max_completion_tokens))
        note = (
            "skipped prompts have no token count: N G mean length of earlier steps stands for it, which changes the"
            " length of the expected gradient and not its direction"
        )
        row = LedgerRow("denominator/token_mean", 1.0, "ratio", note)
        return self._divisor(lengths, minibatch, np.where(skips, expected, tokens)), (row,)

    def _divisor(self, lengths: IntArray, minibatch: IntArray, tokens: FloatArray) -> FloatArray:
        """[K, G], given the token count of each mini-batch [updates] (read by token_mean only)."""
        nominal = self.prompts_per_step // self._updates * lengths.shape[1]
        normalization = self._config.objective.normalization
        if normalization == "constant":
            return np.full(lengths.shape, float(nominal * self._config.rollout.max_completion_tokens))
        if normalization == "token_mean":
            counts: FloatArray = np.maximum(tokens, 1.0)[minibatch][:, None] * np.ones(lengths.shape)
            return counts
        by_length: FloatArray = nominal * lengths.astype(np.float64)
        return by_length

    def _trainable(self, rollouts: Rollouts, groups: Selection) -> tuple[BoolArray, tuple[LedgerRow, ...]]:
        """[K * G] completions of the groups that go on, less the truncated ones with `overlong.filter`."""
        trainable = np.repeat(groups.kept, rollouts.rewards.shape[1])
        if not self._config.objective.overlong.filter:
            return trainable, ()
        truncated = rollouts.truncated
        if truncated is None:
            truncated = rollouts.lengths >= self._config.rollout.max_completion_tokens
        dropped = trainable & truncated.ravel()
        share = 1.0 - float(dropped.sum()) / max(int(trainable.sum()), 1)
        note = "truncated completions are never trained on" if dropped.any() else ""
        row = LedgerRow("completion/overlong_filter", share, "biased" if dropped.any() else "exact", note)
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
        return _merge(parts, np.argsort(np.concatenate(rows), kind="stable"))

    def _offered(self) -> Selection:
        """One selection over all prompts of the step; ledger and figures are the first round's, the planned one."""
        first, later = self._step.selections[: self._updates], self._step.selections[self._updates :]
        merged = _merge(first, np.arange(sum(len(selection.kept) for selection in first)))
        if not later:
            return merged
        return replace(
            merged,
            kept=np.concatenate([merged.kept, *(s.kept for s in later)]),
            inclusion_prob=np.concatenate([merged.inclusion_prob, *(s.inclusion_prob for s in later)]),
            weight=np.concatenate([merged.weight, *(s.weight for s in later)]),
        )

    def _whitening_row(self, prompts: Chosen) -> tuple[LedgerRow, ...]:
        if self._config.objective.advantage != "reinforce_baseline" or bool(np.all(prompts.weight == 1.0)):
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


def _token_sums(lengths: IntArray | FloatArray, minibatch: IntArray, updates: int) -> FloatArray:
    """[updates] tokens of each mini-batch, from [K, G]."""
    sums: FloatArray = np.bincount(minibatch, weights=lengths.sum(axis=1), minlength=updates).astype(np.float64)
    return sums


def _merge(parts: list[Selection], order: IntArray) -> Selection:
    """One selection from those of a step's mini-batches; `order` puts their concatenated rows into place.

    Figures are means over the mini-batches. Ledger rows of one name become one, with the worst label.
    """
    if len(parts) == 1:
        return parts[0]
    return Selection(
        kept=np.concatenate([part.kept for part in parts])[order],
        inclusion_prob=np.concatenate([part.inclusion_prob for part in parts])[order],
        weight=np.concatenate([part.weight for part in parts])[order],
        ledger=_merge_rows([(row, len(part.kept)) for part in parts for row in part.ledger]),
        metrics={
            name: float(np.mean([part.metrics[name] for part in parts if name in part.metrics]))
            for name in dict.fromkeys(name for part in parts for name in part.metrics)
        },
    )


def _merge_rows(rows: list[tuple[LedgerRow, int]]) -> tuple[LedgerRow, ...]:
    """One row a name, from rows and how many elements each was about."""
    merged = []
    for name in dict.fromkeys(row.name for row, _ in rows):
        mine = [(row, count) for row, count in rows if row.name == name]
        offered = sum(count for _, count in mine)
        kept = sum(row.kept_fraction * count for row, count in mine) / offered if offered else 1.0
        label = max((row.label for row, _ in mine), key=_LABELS.index)
        notes = "; ".join(dict.fromkeys(row.note for row, _ in mine if row.note))
        merged.append(LedgerRow(name, kept, label, notes))
    return tuple(merged)
