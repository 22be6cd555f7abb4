"""A step of another trainer on arrays: which prompts, which completions, with what weight, and what may be said of it.

The adapters differ in where their trainer keeps rewards, rows and divisors; choosing is the same for all of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dppo_megatron.config.pruning import PruningConfig
from dppo_megatron.pruning import CompletionBatch, LedgerRow, Selection
from dppo_megatron.pruning.interface import Stateful, check_outcomes
from dppo_megatron.pruning.monitors import step_metrics
from dppo_megatron.pruning.policies import check_methods, make_completion_policy, make_prompt_policy
from dppo_megatron.pruning.scores import completion_score
from dppo_megatron.types import FloatArray, IntArray, UserError

INDEX = "dppo_index"
"""Column of the training set that says which row a prompt is; reward functions do not see it."""
STATE = "dppo_selection.pt"
"""The selection's state, in a checkpoint's folder."""
_LENGTH_DECAY = 0.9
_PREDICTED_TOKENS = LedgerRow(
    "denominator/tokens", 1.0, "ratio", "skipped prompts have no tokens: the mean of earlier steps stands for theirs"
)


@dataclass(frozen=True, slots=True)
class Chosen:
    nominal: IntArray
    """[N] rows of the training set that the trainer offered."""
    selection: Selection

    @property
    def index(self) -> IntArray:
        """[K] rows of the training set to roll out, in the order offered."""
        return self.nominal[self.selection.kept]

    @property
    def may_skip(self) -> bool:
        """Some prompt could have been skipped, whether or not one was."""
        return bool((self.selection.inclusion_prob < 1).any())

    def even_shares(self, size: int, ranks: int) -> IntArray:
        """Places of the groups of `size` to roll out: the chosen, and behind them as many of the others as give all
        ranks equally many completions; never none."""
        kept, unit = self.selection.kept, ranks // math.gcd(ranks, size)
        wanted = max(1, math.ceil(kept.sum() / unit)) * unit
        return np.concatenate([np.flatnonzero(kept), np.flatnonzero(~kept)[: wanted - int(kept.sum())]])


@dataclass(frozen=True, slots=True)
class Kept:
    rows: IntArray
    """[n] of the K * G that were rolled out, ascending."""
    weight: FloatArray
    """[n] product of both selections' weights: multiplies the whole loss of a completion."""
    ledger: tuple[LedgerRow, ...]
    metrics: dict[str, float]
    """`prune/*`, and `ledger/<selection>/<label>`: the share that each selection kept."""


@dataclass(frozen=True, slots=True)
class RowCapacity:
    """`pruning.interface.StepCapacity` of a trainer whose micro-batches hold equal numbers of rows."""

    multiple: int

    def microbatches(self, tokens: IntArray, inclusion_prob: FloatArray) -> int:
        """Rows of each micro-batch."""
        return max(1, math.ceil(float(inclusion_prob.sum()) / self.multiple - 1e-9))

    def holds(self, microbatches: int, tokens: IntArray, inclusion_prob: FloatArray, *, fixed_size: bool) -> bool:
        """Whether the expected number fits; a draw of random size may still take one row more of each."""
        return float(inclusion_prob.sum()) <= microbatches * self.multiple + 1e-9


class StepPruner(Stateful):
    """Both policies around the steps of a trainer that keeps its own order of prompts and its own advantages.

        chosen = pruner.choose(nominal, step)           # before rollout
        kept = pruner.finish(chosen, rewards, ..., step)  # after the trainer's advantages

    Steps count from 0. Everything is a function of seed, step, rows and history: processes that see the same arrays
    choose the same without talking.

    Args:
        num_prompts: rows of the training set.
        prompts_per_step: N, prompts that the trainer offers each step.
        group_size: G, completions of each.
        total_steps: of the run, for annealing.
        divides_by_length: the loss of a completion is the mean over its tokens, not their sum.
        row_multiple: the trainer trains on a multiple of so many rows; room that is there anyway is filled.

    Raises:
        UserError: a method that needs what other trainers do not give: refills, measured costs, more prompts.
    """

    _state_names = ("_prompts", "_completions", "mean_length")

    def __init__(
        self,
        pruning: PruningConfig,
        *,
        num_prompts: int,
        prompts_per_step: int,
        group_size: int,
        total_steps: int,
        seed: int,
        divides_by_length: bool,
        row_multiple: int = 1,
    ) -> None:
        check_methods(pruning, group_size=group_size, minibatch_size=prompts_per_step * group_size)
        self._prompts = make_prompt_policy(
            pruning.prompt,
            num_prompts=num_prompts,
            completions_per_prompt=group_size,
            prompts_per_step=prompts_per_step,
            total_steps=total_steps,
            seed=seed,
        )
        self._completions = make_completion_policy(
            pruning.completion, seed=seed, total_steps=total_steps, group_size=group_size
        )
        for level, ratio in (("prompt", "fixed_cost_ratio"), ("completion", "rollout_cost_ratio")):
            settings = getattr(pruning, level)
            if settings.method == "dppo_auto" and settings.auto_rule == "cost" and not getattr(settings, ratio):
                raise UserError(f"pruning.{level}.{ratio} = 0: costs are not measured in this trainer; give the ratio")
        if self._prompts.resamples or pruning.completion.allocation or pruning.prompt.group_size_factor > 1:
            raise UserError("pruning: more prompts in a step and groups of several sizes are not to be had here")
        self.num_nominal = prompts_per_step * group_size
        self._divides_by_length, self._capacity = divides_by_length, RowCapacity(row_multiple)
        self.mean_length = 0.0
        """Running mean of trained tokens of a completion; 0 before the first step."""

    def expected_tokens(self, longest: int) -> float:
        """Of the full batch, by earlier steps: what a loss per token divides by where prompts may be skipped. Ask it
        before `finish`: a divisor that knows who was drawn would bias the estimate."""
        return self.num_nominal * (self.mean_length or float(longest))

    def choose(self, nominal: IntArray, step: int) -> Chosen:
        """Which of the offered prompts [N] to roll out."""
        return Chosen(nominal, self._prompts.select(nominal, step=step))

    def finish(
        self,
        chosen: Chosen,
        rewards: FloatArray,
        lengths: IntArray,
        logit_grad_norm: FloatArray,
        advantages: FloatArray,
        step: int,
        predicts_tokens: bool = False,
    ) -> Kept:
        """Which completions [K, G] to train on; `chosen` must be of this step. Learns from them.

        Args:
            rewards: NaN where the grader failed.
            lengths: tokens that are trained on; 0 where the trainer masks the whole completion.
            logit_grad_norm: `pruning.logit_grad_norm` of each; only steers the variance.
            advantages: the trainer's own. A completion with 0 is never kept.
            predicts_tokens: the trainer will divide by `expected_tokens` if prompts may be skipped.

        Example: 2 prompts of 4, one without reward variance: of the other's 4 completions a rate of 0.5 keeps 2 or
        more, whose weights have mean 1 over the draws; the first prompt's carry no gradient and go for free.
        """
        index, weight = chosen.index, chosen.selection.weight[chosen.selection.kept]
        check_outcomes(index, rewards, np.maximum(lengths, 1), logit_grad_norm)
        by_length = np.maximum(lengths, 1.0) if self._divides_by_length else np.ones(lengths.shape)
        batch = CompletionBatch.of_groups(
            index,
            rewards=rewards,
            advantages=advantages,
            lengths=lengths,
            logit_grad_norm=logit_grad_norm,
            denominator=self.num_nominal * by_length,
            prompt_weight=weight,
            num_nominal=self.num_nominal,
        )
        chosen_rows = self._completions.prune(batch, step=step, capacity=self._capacity)
        self._learn(chosen, batch, step)
        rows = np.flatnonzero(chosen_rows.kept)
        ledger = chosen.selection.ledger + chosen_rows.ledger
        ledger += (_PREDICTED_TOKENS,) * (predicts_tokens and chosen.may_skip)
        metrics = step_metrics(chosen.selection, batch, chosen_rows)
        metrics |= {f"ledger/{row.name}/{row.label}": row.kept_fraction for row in ledger}
        return Kept(rows, (batch.prompt_weight * chosen_rows.weight)[rows], ledger, metrics)

    def _learn(self, chosen: Chosen, batch: CompletionBatch, step: int) -> None:
        kept, shape = chosen.selection.kept, (len(chosen.index), -1)
        score = completion_score(batch.advantages, batch.logit_grad_norm, batch.denominator, np.ones(1))
        lengths = batch.lengths.reshape(shape)
        self._prompts.observe(
            chosen.index,
            batch.rewards.reshape(shape),
            np.maximum(lengths, 1),
            step=step,
            second_moment=np.square(score).reshape(shape).sum(axis=1),
            inclusion_prob=chosen.selection.inclusion_prob[kept],
            planned_prob=chosen.selection.planned[kept],
        )
        if (total := float(batch.prompt_weight.sum())) > 0:
            mean, old = float(batch.prompt_weight @ batch.lengths) / total, self.mean_length
            self.mean_length = _LENGTH_DECAY * old + (1 - _LENGTH_DECAY) * mean if old else mean


def save_state(pruner: StepPruner, folder: Path) -> None:
    """Into a checkpoint's folder, so that reading it runs no code: tensors, numbers and text."""
    import torch
    from accelerate.utils import recursively_apply

    held = recursively_apply(torch.from_numpy, pruner.state_dict(), test_type=lambda one: isinstance(one, np.ndarray))
    torch.save(held, folder / STATE)


def load_state(folder: Path) -> dict[str, Any]:
    """What `save_state` wrote. UserError: the checkpoint has none."""
    import torch
    from accelerate.utils import recursively_apply

    if not (folder / STATE).exists():
        raise UserError(f"{folder / STATE}: not there; the checkpoint is of a run without this pruning")
    return dict(recursively_apply(torch.Tensor.numpy, torch.load(folder / STATE, weights_only=True)))
