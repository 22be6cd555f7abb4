"""What completion policies share: a checked batch in canonical order, warm-up and annealing, the state.

Everything is computed on rows sorted by (prompt, group, completion), so that the order in which rollouts came back, or
the number of ranks that made them, cannot change a decision.
"""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np

from dppo_megatron.config.pruning import CompletionPruningConfig, exact_rate
from dppo_megatron.pruning.designs import Draw
from dppo_megatron.pruning.interface import CompletionBatch, Policy, Selection, StepCapacity, keep_all, scatter
from dppo_megatron.types import FloatArray, Label

Counters = tuple[int, int]
"""Step, from 0, and mini-batch: what a draw is keyed by beside the completions."""


class CompletionPolicy(Policy):
    """Decides after the rewards which completions are trained on.

    This class is method `none`, which keeps everything. Subclasses override `_prune_sorted`.

    Args:
        total_steps: length of the whole run, for annealing; a step beyond it drops nothing.
        zero_advantage_slope: coefficient of a KL (or entropy) term in the loss, the loss's own; above 0, completions
            without advantage still carry gradient and keep a positive probability.
        group_size: completions of a whole group, G; 0: not known, and a rate that keeps none of one is found out late.
    """

    _level = "completion"
    usual_rate: ClassVar[float] = 0.5
    """What `rate=null` stands for."""

    def __init__(
        self,
        config: CompletionPruningConfig,
        *,
        seed: int,
        total_steps: int,
        zero_advantage_slope: float = 0.0,
        group_size: int = 0,
    ) -> None:
        self.config: CompletionPruningConfig = config
        self.rate = self.rate_of(config)
        self.seed = seed
        self.zero_advantage_slope = zero_advantage_slope
        self.group_size = group_size
        self.warmup_steps = config.warmup_steps
        self.last_active_step = math.ceil(exact_rate(config.anneal_fraction) * total_steps) - 1

    @classmethod
    def rate_of(cls, config: CompletionPruningConfig) -> float:
        """The rate that the settings mean to it."""
        return cls.usual_rate if config.rate is None else config.rate

    @classmethod
    def check(cls, config: CompletionPruningConfig, key: str, *, group_size: int, minibatch_size: int) -> None:
        """Raise `UserError` for settings, each in its range, that contradict each other under this method. Sizes in
        completions, of a prompt and of a nominal mini-batch; 0: not known."""

    @property
    def label(self) -> Label:
        """What its active steps do to the expected gradient, whatever they are offered: a function of the settings."""
        return "exact"

    @property
    def has_support(self) -> bool:
        """Every completion with gradient may be kept, with the probability that is reported."""
        return True

    def prune(
        self,
        batch: CompletionBatch,
        *,
        step: int,
        minibatch: int = 0,
        capacity: StepCapacity | None = None,
    ) -> Selection:
        """Decide about one mini-batch, once: a draw reused after an update is biased. Changes no state.

        Steps count from 0. With a capacity, the methods that read `fill_slack` keep more where micro-batches have room.

        Raises:
            ValueError: arrays of different lengths, NaN advantages, denominators that are not positive.
        """
        check_batch(batch)
        if not self.warmup_steps <= step <= self.last_active_step:
            return keep_all(len(batch), self.name, "annealed" if step > self.last_active_step else "warm-up")
        if len(batch) == 0:  # which prompts were drawn decides that, so the label must be that of any other batch
            return keep_all(0, self.name, "empty batch", self._label_of_nothing(batch, (step, minibatch)))
        order = np.lexsort((batch.completion_index, batch.group, batch.prompt_index))
        return scatter(self._prune_sorted(batch.take(order), (step, minibatch), capacity), order)

    def _prune_sorted(self, batch: CompletionBatch, counters: Counters, capacity: StepCapacity | None) -> Selection:
        return keep_all(len(batch), self.name)

    def _label_of_nothing(self, batch: CompletionBatch, counters: Counters) -> Label:
        return self.label

    def _draw(self, batch: CompletionBatch, pi: FloatArray, counters: Counters) -> Draw:
        """Draw along (prompt, sign of A, random): a group's kept completions then balance right and wrong answers."""
        ties = self._ties(batch.ids, *counters)
        order = np.lexsort((ties, np.sign(batch.advantages), batch.group, batch.prompt_index))
        return self._draw_along(batch.ids, pi, order, *counters)


def check_batch(batch: CompletionBatch) -> None:
    """Check shapes and values; a NaN reward is a failed grading and allowed, a NaN advantage is not.

    Raises:
        ValueError: names the array, the prompt and the completion.
    """
    n = len(batch)
    for name, array in batch.arrays().items():
        if np.shape(array) != (n,):
            raise ValueError(f"CompletionBatch.{name} has shape {np.shape(array)}, expected ({n},)")
    if n and (batch.group.min() < 0 or batch.group.max() >= n):
        raise ValueError("CompletionBatch.group must hold labels 0..groups-1")
    wrong = {
        "advantages": ~np.isfinite(batch.advantages),
        "rewards": np.isinf(batch.rewards),
        "lengths": batch.lengths < 0,
        "logit_grad_norm": ~(np.isfinite(batch.logit_grad_norm) & (batch.logit_grad_norm >= 0)),
        "denominator": ~(np.isfinite(batch.denominator) & (batch.denominator > 0)),
        "prompt_weight": ~(np.isfinite(batch.prompt_weight) & (batch.prompt_weight >= 0)),
    }
    for name, rows in wrong.items():
        if rows.any():
            row = int(np.flatnonzero(rows)[0])
            raise ValueError(
                f"{name} of prompt {batch.prompt_index[row]}, completion {batch.completion_index[row]}"
                f" is {getattr(batch, name)[row]}"
            )
