"""A step of another trainer on arrays: which prompts, which completions, with what weight, and what may be said of it.

The adapters differ in where their trainer keeps rewards, rows and divisors; choosing is the same for all of them.
"""

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
"""Column of the training set that says which row a prompt is; reward functions do not see it."""
STATE = "dppo_selection.pt"
"""The selection's state, in a checkpoint's folder."""
_SAID = set[str]()
"""What this process has said once: in slime each step has a pruner of its own."""
_PREDICTED_TOKENS = LedgerRow("denominator/tokens", 1.0, "ratio", "skipped prompts count as the mean of earlier steps")


@dataclass(frozen=True, slots=True)
class Kept:
    rows: IntArray
    """[n] to train on, of the K * G that were rolled out: those kept, ascending, and some once more with weight 0 until
    n is a multiple of `row_multiple`; never none."""
    weight: FloatArray
    """[n] product of both selections' weights: multiplies the whole loss of a completion."""
    tokens: float
    """What a loss per token divides by: the full batch's, predicted from earlier steps where prompts may be skipped."""
    ledger: tuple[LedgerRow, ...]
    metrics: dict[str, float]
    """`prune/*`, and `ledger/<selection>/<label>`: the share that each selection kept."""


@dataclass
class StepPruner(Stateful):
    """Both policies around the steps of a trainer that keeps its own order of prompts and its own advantages.

        chosen = pruner.choose(nominal, step)                      # before rollout
        kept = pruner.finish(nominal, chosen, rewards, ..., step)  # after the trainer's advantages

    Steps count from 0. Everything is a function of seed, step, rows and history: processes that see the same arrays
    choose the same without talking.

    Raises:
        UserError: a method that needs what other trainers do not give: refills, measured costs, more prompts.
    """

    pruning: PruningConfig
    _: KW_ONLY
    num_prompts: int
    """Rows of the training set."""
    prompts_per_step: int
    """N, prompts that the trainer offers each step."""
    group_size: int
    """G, completions of each."""
    total_steps: int
    seed: int
    divides_by_length: bool
    """The loss of a completion is the mean over its tokens, not their sum."""
    max_tokens: int | None = None
    """Of a completion, if the trainer divides by `Kept.tokens`; stands for the mean before the first step."""
    row_multiple: int = 1
    """The trainer trains on a multiple of so many rows; room that is there anyway is filled."""
    mean_length: float = field(default=0.0, init=False)
    """Running mean of trained tokens of a completion; 0 before the first step."""
    _state_names = ("_prompts", "_completions", "mean_length")

    def __post_init__(self) -> None:
        self.num_nominal = self.prompts_per_step * self.group_size
        for line in check_methods(self.pruning, group_size=self.group_size, minibatch_size=self.num_nominal):
            _say(line, once=line)
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
            raise UserError("pruning: more prompts, groups of several sizes and early stops are not to be had here")

    def microbatches(self, tokens: IntArray, inclusion_prob: FloatArray) -> int:
        """Rows of each micro-batch, all of which hold as many; with `holds` what `fill_slack` asks a `StepCapacity`."""
        return max(1, math.ceil(float(inclusion_prob.sum()) / self.row_multiple - 1e-9))

    def holds(self, microbatches: int, tokens: IntArray, inclusion_prob: FloatArray, *, fixed_size: bool) -> bool:
        """Whether the expected number fits; a draw of random size may still take one row more of each."""
        return self.microbatches(tokens, inclusion_prob) <= microbatches

    def choose(self, nominal: IntArray, step: int) -> Selection:
        """Which of the offered prompts, rows [N] of the training set, to roll out."""
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
        """Which completions [K, G] of the chosen prompts to train on; `chosen` must be of this step. Learns from them.

        Args:
            rewards: NaN where the grader failed.
            lengths: tokens that are trained on; 0 where the trainer masks the whole completion.
            logit_grad_norm: `pruning.logit_grad_norm` of each; only steers the variance.
            advantages: the trainer's own. A completion with 0 is never kept.

        Example: 2 prompts of 4, one without reward variance: of the other's 4 completions a rate of 0.5 keeps 2 or
        more, whose weights have mean 1 over the draws; the first prompt's carry no gradient and go for free.
        """
        lengths = lengths.astype(np.int64)  # trainers have them among floats
        index, may_skip = nominal[chosen.kept], bool((chosen.inclusion_prob < 1).any())
        check_outcomes(index, rewards, np.maximum(lengths, 1), logit_grad_norm)
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
        # by earlier steps alone: a divisor that knows who was drawn would bias the estimate
        predicted = self.num_nominal * (self.mean_length or self.max_tokens or 1)
        tokens = predicted if may_skip else max(int(lengths.sum()), 1)
        self._learn(index, chosen, batch, step)
        ledger = chosen.ledger + of_rows.ledger + (_PREDICTED_TOKENS,) * (may_skip and self.max_tokens is not None)
        for row in ledger:
            for line in biased_rows((row,)):
                _say(f"warning: {line}", once=row.name)
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
        cost = StepCost(step + 1, 0.0, 0.0, 0.0)  # no seconds: not measured
        for line in (*self._prompts.feedback(cost), *self._completions.feedback(cost)):
            _say(line)
        if (total := float(batch.prompt_weight.sum())) > 0:
            mean, old = float(batch.prompt_weight @ batch.lengths) / total, self.mean_length
            self.mean_length = 0.9 * old + 0.1 * mean if old else mean


def _say(line: str, once: str | None = None) -> None:
    """On the first process, since all say the same; what has a name for `once`, the first time."""
    if once in _SAID or os.environ.get("RANK", "0") != "0":
        return
    if once is not None:
        _SAID.add(once)
    log(line)


def save_state(pruner: StepPruner, folder: Path) -> None:
    """Into a checkpoint's folder, so that reading it runs no code: tensors, numbers and text."""
    import torch
    from accelerate.utils import recursively_apply

    folder.mkdir(parents=True, exist_ok=True)
    held = recursively_apply(torch.from_numpy, pruner.state_dict(), test_type=lambda one: isinstance(one, np.ndarray))
    torch.save(held, folder / STATE)
    load_state(folder)  # what cannot be read is an error now, and not at the resume


def load_state(folder: Path) -> dict[str, Any]:
    """What `save_state` wrote. UserError: the checkpoint has none."""
    import torch
    from accelerate.utils import recursively_apply

    if not (folder / STATE).exists():
        raise UserError(f"{folder / STATE}: not there; the checkpoint is of a run without this pruning")
    return dict(recursively_apply(torch.Tensor.numpy, torch.load(folder / STATE, weights_only=True)))
