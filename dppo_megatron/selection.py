"""All the choosing of a step, in one place: order, prompt policy, advantages, completion policy, weights, ledger.

No model, no process group and no text, only arrays: the training loop runs it on rank 0 with what the engine made,
and `dppo-megatron simulate` runs the same code on a recorded trace.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dppo_megatron.algorithms.advantages import group_advantages
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
from dppo_megatron.pruning.monitors import step_metrics
from dppo_megatron.types import BoolArray, FloatArray, IntArray

_NOISE_DECAY = 0.9


@dataclass(frozen=True, slots=True)
class Chosen:
    """Prompts to roll out."""

    prompt_index: IntArray
    """[K]."""
    inclusion_prob: FloatArray
    """[K]."""
    weight: FloatArray
    """[K]."""


@dataclass(frozen=True, slots=True)
class Rollouts:
    """What came back, as arrays; groups in the order in which their prompts were chosen."""

    rewards: FloatArray
    """[K, G], NaN where the grader failed."""
    lengths: IntArray
    """[K, G] completion tokens."""
    surprisal: FloatArray
    """[K, G] root of the sum of squared (1 - p) of the sampled tokens."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What to train on: flat arrays [K * G]."""

    kept: BoolArray
    weight: FloatArray
    """Product of the weights of every selection a completion survived; 0 where not kept."""
    advantages: FloatArray
    denominator: FloatArray
    ledger: tuple[LedgerRow, ...]
    metrics: dict[str, float]
    offered: IntArray
    """Nominal prompts of the step, refills included; those not rolled out too."""
    prompts: Chosen
    """Those that were rolled out."""


@dataclass
class _Step:
    """What `finish` must still know of the step's beginning."""

    offered: list[IntArray] = field(default_factory=list)
    selections: list[Selection] = field(default_factory=list)
    chosen: list[Chosen] = field(default_factory=list)


class Selector:
    """The pruning policies of a job and the state they need.

    `begin`, `refill` until it returns nothing, `finish`, then `feedback`: once each step, in this order.

    Args:
        order: another order of prompts than the config's seed gives; for experiments that vary the draws alone.
    """

    def __init__(self, config: Config, num_prompts: int, order: PromptOrder | None = None) -> None:
        self._config = config
        group = config.rollout.completions_per_prompt
        self._completion_policy = make_completion_policy(
            config.pruning.completion, seed=config.seed, total_steps=config.steps
        )
        multiplier = self._completion_policy.prompts_multiplier
        self.prompts_per_step = int(config.rollout.prompts_per_step * multiplier)
        """Nominal prompts of a step; above the config's number only with CPPO's allocation."""
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
        self._pruned = False
        self._step = _Step()

    def begin(self, step: int) -> Chosen:
        """The prompts of step `step` (from 1) that are worth a rollout."""
        self._step = _Step()
        return self._choose(self.prompts_per_step, step)

    def refill(self, rewards: FloatArray, step: int) -> Chosen | None:
        """More prompts, for the methods that sample until enough groups have variance; None when it is enough.

        Args:
            rewards: [groups, G] of all groups of the step so far.
        """
        missing = self._prompt_policy.missing_prompts(rewards, step=step - 1, rounds=len(self._step.chosen))
        return self._choose(min(missing, self._order.num_prompts), step) if missing else None

    def finish(self, rollouts: Rollouts, step: int) -> Decision:
        """Advantages on full groups, then the completions worth training on."""
        zero_based = step - 1
        prompts = Chosen(*(np.concatenate(column) for column in zip(*map(_columns, self._step.chosen), strict=True)))
        objective = self._config.objective
        advantages = group_advantages(
            rollouts.rewards, divide_by_std=objective.advantage == "group_std", eps=objective.advantage_eps
        )
        denominator = self.denominator(rollouts.lengths)
        # without the prompt's weight, or the weight would feed back into the score that makes the next weight
        moment = group_second_moment(advantages * rollouts.surprisal / denominator)
        self._prompt_policy.observe(
            prompts.prompt_index, rollouts.rewards, rollouts.lengths, step=zero_based, second_moment=moment
        )
        groups = self._prompt_policy.keep_groups(rollouts.rewards, step=zero_based)
        batch = self._batch(prompts, rollouts, advantages, denominator, groups)
        completions = self._completion_policy.prune(batch, step=zero_based)
        size = rollouts.rewards.shape[1]
        kept = np.zeros(rollouts.rewards.size, dtype=np.bool_)
        weight = np.zeros(rollouts.rewards.size)
        rows = np.flatnonzero(np.repeat(groups.kept, size))
        kept[rows] = completions.kept
        weight[rows] = batch.prompt_weight * completions.weight
        offered = _concatenate(self._step.selections)
        ledger = offered.ledger + (() if groups.kept.all() else groups.ledger) + completions.ledger
        self._pruned = any(row.label != "exact" for row in ledger)
        return Decision(
            kept=kept,
            weight=weight,
            advantages=advantages.ravel(),
            denominator=denominator.ravel(),
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
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved `state_dict`."""
        self._prompt_policy.load_state_dict(state["prompt"])
        self._completion_policy.load_state_dict(state["completion"])
        self._position = state["position"]
        self._unpruned_noise = state["unpruned_noise"]

    def _choose(self, count: int, step: int) -> Chosen:
        nominal, self._position = self._order.take(self._position, count)
        seen = np.concatenate([*self._step.offered, np.empty(0, np.int64)])
        nominal = nominal[~np.isin(nominal, seen)]  # a refill may run into the next epoch, where they come again
        selection = self._prompt_policy.select(nominal, step=step - 1, minibatch=len(self._step.offered))
        kept = selection.kept
        chosen = Chosen(nominal[kept], selection.inclusion_prob[kept], selection.weight[kept])
        self._step.offered.append(nominal)
        self._step.selections.append(selection)
        self._step.chosen.append(chosen)
        return chosen

    def denominator(self, lengths: IntArray) -> FloatArray:
        """[K, G] frozen divisor of each completion's token sum: N G len, or N G max_completion_tokens."""
        nominal = self.prompts_per_step * lengths.shape[1]
        if self._config.objective.normalization == "constant":
            return np.full(lengths.shape, float(nominal * self._config.rollout.max_completion_tokens))
        by_length: FloatArray = nominal * lengths.astype(np.float64)
        return by_length

    def _batch(
        self, prompts: Chosen, rollouts: Rollouts, advantages: FloatArray, denominator: FloatArray, groups: Selection
    ) -> CompletionBatch:
        rows = groups.kept
        count, size = int(rows.sum()), rollouts.rewards.shape[1]
        return CompletionBatch(
            prompt_index=np.repeat(prompts.prompt_index[rows], size),
            completion_index=np.tile(np.arange(size), count),
            group=np.repeat(np.arange(count), size),
            rewards=rollouts.rewards[rows].ravel(),
            advantages=advantages[rows].ravel(),
            lengths=rollouts.lengths[rows].ravel(),
            surprisal=rollouts.surprisal[rows].ravel(),
            denominator=denominator[rows].ravel(),
            prompt_weight=np.repeat((prompts.weight * groups.weight)[rows], size),
            num_nominal=self.prompts_per_step * size,
        )

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
            "reward/mean": float((weight * rewards).sum() / weight.sum()) if weight.sum() else 0.0,
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


def _columns(chosen: Chosen) -> tuple[IntArray, FloatArray, FloatArray]:
    return chosen.prompt_index, chosen.inclusion_prob, chosen.weight


def _concatenate(selections: list[Selection]) -> Selection:
    """One selection over all rounds of a step; ledger and figures are the first round's, which is the planned one."""
    first = selections[0]
    if len(selections) == 1:
        return first
    return Selection(
        kept=np.concatenate([s.kept for s in selections]),
        inclusion_prob=np.concatenate([s.inclusion_prob for s in selections]),
        weight=np.concatenate([s.weight for s in selections]),
        ledger=first.ledger,
        metrics=first.metrics,
    )
