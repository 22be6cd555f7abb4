"""The selection in a step of another trainer, on arrays; the same for all adapters."""

from __future__ import annotations

import math
import os
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dppo_megatron.config.pruning import PruningConfig
from dppo_megatron.pruning import CompletionBatch, LedgerRow, Selection, StepCost, biased_rows, step_metrics
from dppo_megatron.pruning.interface import Stateful, check_outcomes
from dppo_megatron.pruning.policies import check_methods, make_completion_policy, make_prompt_policy
from dppo_megatron.pruning.scores import completion_score
from dppo_megatron.texts import log
from dppo_megatron.types import FloatArray, IntArray, UserError

INDEX = "dppo_index"
"""Column of the training set with the number of each row; reward functions do not see it."""
STATE = "dppo_selection.pt"
"""File with the selection's state, in a checkpoint's folder."""
_LOGGED = set[str]()
"""What this process logs only once. Not kept in `StepPruner`, since in slime each step has one of its own."""
_PREDICTED_TOKENS = LedgerRow("denominator/tokens", 1.0, "ratio", "skipped prompts count as the mean of earlier steps")


@dataclass(frozen=True, slots=True)
class Kept:
    rows: IntArray
    """[n] rows to train on, of the K * G that were rolled out: the kept ones, ascending, then some of them once more
    with weight 0 until n is a multiple of `row_multiple`. n is at least `row_multiple`, also if nothing is kept."""
    weight: FloatArray
    """[n] product of both selections' weights: multiplies the whole loss of a completion."""
    tokens: float
    """What a loss per token divides by: the full batch's, predicted from earlier steps if prompts may be skipped."""
    ledger: tuple[LedgerRow, ...]
    metrics: dict[str, float]
    """`prune/*`, and the share that each selection kept, as `ledger/<selection>/<label>`."""


@dataclass
class StepPruner(Stateful):
    """Both policies around the steps of a trainer that keeps its own order of prompts and its own advantages.

        chosen = pruner.choose(nominal, step)                      # before rollout
        kept = pruner.finish(nominal, chosen, rewards, ..., step)  # after the trainer's advantages

    Steps count from 0. Processes that see the same arrays choose the same without communication.

    Raises:
        UserError: a method that needs what other trainers do not offer: refills, measured costs, more prompts.
    """

    pruning: PruningConfig
    _: KW_ONLY
    num_prompts: int
    """Rows of the training set."""
    prompts_per_step: int
    """N, the prompts that the trainer offers each step."""
    group_size: int
    """G, the completions of each."""
    total_steps: int
    seed: int
    divides_by_length: bool
    """The loss of a completion is the mean over its tokens, not their sum."""
    max_tokens: int | None = None
    """Most tokens of a completion, used as `mean_length` in the first step; None: the trainer ignores `Kept.tokens`."""
    row_multiple: int = 1
    """The trainer needs a multiple of so many rows; `fill_slack` may use rows that would otherwise be padding."""
    mean_length: float = field(default=0.0, init=False)
    """Running mean of the trained tokens of a completion; 0 before the first step."""
    _state_names = ("_prompts", "_completions", "mean_length")

    def __post_init__(self) -> None:
        self.num_nominal = self.prompts_per_step * self.group_size
        for line in check_methods(self.pruning, group_size=self.group_size, minibatch_size=self.num_nominal):
            _log(line, once=line)
        self._prompts = make_prompt_policy(
            self.pruning.prompt,
            num_prompts=self.num_prompts,
            completions_per_prompt=self.group_size,
            prompts_per_step=self.prompts_per_step,
            total_steps=self.total_steps,
            seed=self.seed,
        )
        completion, early = self.pruning.completion, self.pruning.early_stop.after_tokens
        of_run = {"seed": self.seed, "total_steps": self.total_steps, "group_size": self.group_size}
        self._completions = make_completion_policy(completion, **of_run)
        for level, ratio in (("prompt", "fixed_cost_ratio"), ("completion", "rollout_cost_ratio")):
            settings = getattr(self.pruning, level)
            if settings.method == "dppo_auto" and not getattr(settings, ratio):
                raise UserError(f"pruning.{level}.{ratio} = 0: costs are not measured in this trainer; give the ratio")
        if self._prompts.resamples or completion.allocation or early or self.pruning.prompt.group_size_factor > 1:
            raise UserError("pruning: more prompts, groups of several sizes and early stops are not supported here")

    def microbatches(self, tokens: IntArray, inclusion_prob: FloatArray) -> int:
        """Rows of each micro-batch, the same for all. This and `holds` are `fill_slack`'s `StepCapacity`."""
        return max(1, math.ceil(float(inclusion_prob.sum()) / self.row_multiple - 1e-9))

    def holds(self, microbatches: int, tokens: IntArray, inclusion_prob: FloatArray, *, fixed_size: bool) -> bool:
        """Whether the expected number of rows fits; a draw of random size may need one more row in each."""
        return self.microbatches(tokens, inclusion_prob) <= microbatches

    def choose(self, nominal: IntArray, step: int) -> Selection:
        """Which of the offered prompts to roll out; `nominal` [N] are their rows in the training set."""
        return self._prompts.select(nominal, step=step)

    def finish(
        self,
        nominal: IntArray,
        chosen: Selection,
        rewards: FloatArray,
        lengths: IntArray | FloatArray,
        logit_grad_norm: FloatArray,
        advantages: FloatArray,
        step: int,
    ) -> Kept:
        """Which completions of the K prompts `chosen` in this step to train on; the policies then learn from all.

        Args:
            rewards: [K, G], NaN where the grader failed.
            lengths: [K, G] tokens that are trained on; 0 if the trainer masks the whole completion.
            logit_grad_norm: [K, G], `pruning.logit_grad_norm` of each; it only affects the variance.
            advantages: [K, G], the trainer's own. Completions with advantage 0 have no gradient.

        Example: 2 prompts of 4, one without reward variance: of the other's 4 completions a rate of 0.5 keeps 2 or
        more, whose weights have mean 1 over the draws. The first prompt's have no gradient, so dropping them is free.
        """
        lengths = lengths.astype(np.int64)  # trainers keep them in arrays of floats
        index, may_skip = nominal[chosen.kept], bool((chosen.inclusion_prob < 1).any())
        in_unit = self._prompts.in_unit(self.pruning.prompt)
        check_outcomes(index, rewards, np.maximum(lengths, 1), logit_grad_norm, in_unit=in_unit)
        by_length = np.maximum(lengths, 1.0) if self.divides_by_length else np.ones(lengths.shape)
        batch = CompletionBatch.of_groups(
            index,
            rewards=rewards,
            advantages=advantages,
            lengths=lengths,
            logit_grad_norm=logit_grad_norm,
            denominator=self.num_nominal * by_length,
            prompt_weight=chosen.weight[chosen.kept],
            num_nominal=self.num_nominal,
        )
        of_rows = self._completions.prune(batch, step=step, capacity=self)
        # from earlier steps alone: a divisor that depends on this step's draw would bias the estimate
        predicted = self.num_nominal * (self.mean_length or self.max_tokens or 1)
        tokens = predicted if may_skip else max(int(lengths.sum()), 1)
        self._learn(index, chosen, batch, step)
        ledger = chosen.ledger + of_rows.ledger + (_PREDICTED_TOKENS,) * (may_skip and self.max_tokens is not None)
        for row in ledger:
            for line in biased_rows((row,)):
                _log(f"warning: {line}", once=row.name)
        metrics = step_metrics(chosen, batch, of_rows)
        metrics |= {f"ledger/{row.name}/{row.label}": row.kept_fraction for row in ledger}
        rows = np.flatnonzero(of_rows.kept)
        count = self.microbatches(batch.lengths[rows], np.ones(len(rows))) * self.row_multiple
        weight = np.pad((batch.prompt_weight * of_rows.weight)[rows], (0, count - len(rows)))
        return Kept(np.resize(rows if len(rows) else 0, count), weight, tokens, ledger, metrics)

    def _learn(self, index: IntArray, chosen: Selection, batch: CompletionBatch, step: int) -> None:
        kept, shape = chosen.kept, (len(index), self.group_size)
        score = completion_score(batch.advantages, batch.logit_grad_norm, batch.denominator, np.ones(1))
        self._prompts.observe(
            index,
            batch.rewards.reshape(shape),
            np.maximum(batch.lengths, 1).reshape(shape),
            step=step,
            second_moment=np.square(score).reshape(shape).sum(axis=1),
            inclusion_prob=chosen.inclusion_prob[kept],
            planned_prob=chosen.planned[kept],
        )
        cost = StepCost(step + 1, 0.0, 0.0, 0.0)  # seconds are not measured here
        for line in (*self._prompts.feedback(cost), *self._completions.feedback(cost)):
            _log(line)
        if (total := float(batch.prompt_weight.sum())) > 0:
            mean, old = float(batch.prompt_weight @ batch.lengths) / total, self.mean_length
            self.mean_length = 0.9 * old + 0.1 * mean if old else mean


def _log(line: str, once: str | None = None) -> None:
    """Log on the first process, since all have the same lines; of the lines with one name `once`, only the first."""
    if once in _LOGGED or os.environ.get("RANK", "0") != "0":
        return
    if once is not None:
        _LOGGED.add(once)
    log(line)


def save_state(pruner: StepPruner, folder: Path) -> None:
    """Write the state into a checkpoint's folder, as tensors, numbers and text, which are read without running code."""
    import torch
    from accelerate.utils import recursively_apply

    folder.mkdir(parents=True, exist_ok=True)
    state = recursively_apply(torch.from_numpy, pruner.state_dict(), test_type=lambda one: isinstance(one, np.ndarray))
    torch.save(state, folder / STATE)
    load_state(folder)  # so that a state that cannot be read is an error now, and not at the resume


def load_state(folder: Path) -> dict[str, Any]:
    """What `save_state` wrote. UserError: the checkpoint has none."""
    import torch
    from accelerate.utils import recursively_apply

    if not (folder / STATE).exists():
        raise UserError(f"{folder / STATE} does not exist: the checkpoint is of a run without this pruning")
    return dict(recursively_apply(torch.Tensor.numpy, torch.load(folder / STATE, weights_only=True)))
