"""What completion policies share: a checked batch in canonical order, warm-up and annealing, the state.

Everything is computed on rows sorted by (prompt, group, completion), so that neither the order in which rollouts arrive
nor the number of ranks that generate them can change a decision.
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
"""(step counted from 0, mini-batch): together with prompt and completion, the key of a draw's random numbers."""


class CompletionPolicy(Policy):
    """Decides, once rewards are known, which completions are trained on.

    This class is method `none`, which keeps everything. Subclasses override `_prune_sorted`.

    Args:
        total_steps: length of the whole run, for annealing; a step beyond it drops nothing.
        zero_advantage_slope: coefficient of the loss's KL (or entropy) term; above 0, completions with advantage 0
            still carry gradient and keep a positive probability.
        group_size: completions of a whole group, G; 0: unknown, so `cppo` checks its rate only when it prunes a batch.
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
        return cls.usual_rate if config.rate is None else config.rate

    @classmethod
    def check(cls, config: CompletionPruningConfig, key: str, *, group_size: int, minibatch_size: int) -> None:
        """Raise `UserError` for settings that are each in range but contradict each other under this method. The sizes,
        of a prompt's group and of a nominal mini-batch, count completions; 0: unknown."""

    @property
    def label(self) -> Label:
        """What its active steps do to the expected gradient: a function of the settings, not of the batch."""
        return "exact"

    @property
    def has_support(self) -> bool:
        """Whether every completion with gradient can be kept, with exactly the reported probability."""
        return True

    def prune(
        self,
        batch: CompletionBatch,
        *,
        step: int,
        minibatch: int = 0,
        capacity: StepCapacity | None = None,
    ) -> Selection:
        """Select from one mini-batch. Changes no state. Use each draw once: reused after an update it is biased.

        Steps count from 0. With a capacity, methods that read `fill_slack` keep more where micro-batches have room.

        Raises:
            ValueError: arrays of different lengths, NaN advantages, denominators that are not positive.
        """
        check_batch(batch)
        if not self.warmup_steps <= step <= self.last_active_step:
            return keep_all(len(batch), self.name, "annealed" if step > self.last_active_step else "warm-up")
        if len(batch) == 0:  # an outcome of the prompt draw, so the label must be the same as for any other batch
            return keep_all(0, self.name, "empty batch", self._label_of_nothing(batch, (step, minibatch)))
        order = np.lexsort((batch.completion_index, batch.group, batch.prompt_index))
        return scatter(self._prune_sorted(batch.take(order), (step, minibatch), capacity), order)

    def _prune_sorted(self, batch: CompletionBatch, counters: Counters, capacity: StepCapacity | None) -> Selection:
        return keep_all(len(batch), self.name)

    def _label_of_nothing(self, batch: CompletionBatch, counters: Counters) -> Label:
        return self.label

    def _draw(self, batch: CompletionBatch, pi: FloatArray, counters: Counters) -> Draw:
        """Draw in the order (prompt, sign of A, random), so that a group's kept completions balance right and wrong."""
        ties = self._ties(batch.ids, *counters)
        order = np.lexsort((ties, np.sign(batch.advantages), batch.group, batch.prompt_index))
        return self._draw_along(batch.ids, pi, order, *counters)


def check_batch(batch: CompletionBatch) -> None:
    """Raise ValueError, with the array and the row, for a wrong shape or value. A NaN reward is allowed."""
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
