"""What prompt policies share: warm-up and annealing, history, state. Batches are sorted by prompt first, so that even
the rounding of a sum does not depend on the order in which prompts arrive."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np

from dppo_megatron.config.pruning import PromptPruningConfig, exact_rate
from dppo_megatron.pruning.history import PromptHistory, check_ids, check_visits
from dppo_megatron.pruning.interface import Policy, Selection, keep_all, scatter
from dppo_megatron.pruning.weights import weigh_by
from dppo_megatron.types import FloatArray, IntArray, PromptFeatures


@dataclass(frozen=True, slots=True)
class Visits:
    """The outcomes of a step's visits to prompts, sorted by prompt: [K] or [K, G]."""

    ids: IntArray
    rewards: FloatArray
    lengths: IntArray
    second_moment: FloatArray | None
    inclusion: FloatArray
    """Probability with which each prompt was drawn."""
    planned: FloatArray
    """Probability with which it would have been drawn if the method had skipped."""
    stands_for: FloatArray | None
    """Weight of each completion that makes up for those stopped early; None: none could be stopped."""


class PromptPolicy(Policy):
    """Decides before rollout which prompts are generated. Depends on history only, never on this step's rollouts.

    This class is method `none`, which keeps everything. Subclasses override `_select_sorted` and `_learn`.

    Args:
        num_prompts: rows of the prompt set.
        prompts_per_step: nominal prompts of a step, N.
        total_steps: length of the whole run, for annealing; a step beyond it skips nothing.
        features: what is known of each prompt before its first visit; None: nothing.
    """

    _level = "prompt"
    resamples: ClassVar[bool] = False
    """Whether the rewards decide how many prompts are rolled out, and which groups `keep_groups` keeps."""

    def __init__(
        self,
        config: PromptPruningConfig,
        *,
        num_prompts: int,
        completions_per_prompt: int,
        prompts_per_step: int,
        total_steps: int,
        seed: int,
        features: PromptFeatures | None = None,
    ) -> None:
        self.config: PromptPruningConfig = config
        self.features = features
        self.completions_per_prompt = completions_per_prompt
        self.prompts_per_step = prompts_per_step
        self.seed = seed
        steps_per_epoch = Fraction(num_prompts, prompts_per_step)
        self.warmup_steps = math.ceil(exact_rate(config.warmup_epochs) * steps_per_epoch)
        self.last_active_step = math.ceil(exact_rate(config.anneal_fraction) * total_steps) - 1
        self.history = PromptHistory(
            num_prompts, prior=config.prior, discount=config.discount, steps_per_epoch=float(steps_per_epoch)
        )

    @classmethod
    def check(cls, config: PromptPruningConfig, key: str) -> None:
        """Raise `UserError` for settings that are each in range but contradict each other under this method."""

    @property
    def has_support(self) -> bool:
        """Whether every prompt can be kept, with exactly the reported probability: a function of the settings."""
        return not self.resamples

    @classmethod
    def in_unit(cls, config: PromptPruningConfig) -> str:
        """Why rewards must be in [0, 1]; empty: they need not be."""
        return ""

    def select(self, prompt_index: IntArray, *, step: int, minibatch: int = 0) -> Selection:
        """Select from the nominal prompts [n] of one optimizer mini-batch: a function of the arguments and the history.

        Steps count from 0. Changes no state, so a step abandoned after this call leaves nothing behind.
        """
        ids = check_ids(prompt_index, len(self.history))
        inactive = self._inactive_reason(step)
        order = np.argsort(ids, kind="stable")
        if len(ids) == 0:
            return keep_all(0, self.name, inactive)
        if inactive:
            return scatter(self._select_inactive(ids[order], step, inactive), order)
        return scatter(self._select_sorted(ids[order], step, minibatch), order)

    def expected(self, ids: IntArray, step: int) -> tuple[FloatArray, FloatArray] | None:
        """Expected second moment [n] of each group's gradient and its cost [n], both up to a factor, from which group
        sizes are derived; None: nothing reliable is known yet."""
        return None

    def observe(
        self,
        prompt_index: IntArray,
        rewards: FloatArray,
        lengths: IntArray,
        *,
        step: int,
        second_moment: FloatArray | None = None,
        inclusion_prob: FloatArray | None = None,
        planned_prob: FloatArray | None = None,
        stands_for: FloatArray | None = None,
    ) -> None:
        """Learn from visited prompts: prompt_index [K], rewards and lengths [K, G]; NaN rewards are ignored.

        second_moment [K]: sum of squared completion scores of each group, without its prompt's weight; None: 1 if its
        rewards differ, else 0. inclusion_prob and planned_prob [K]: from the selection that drew them; None: 1.
        stands_for [K, G]: weight of each completion that makes up for those stopped early; None: 1.
        """
        ids = check_ids(prompt_index, len(self.history))
        rewards = check_visits(ids, rewards, lengths, self.in_unit(self.config))
        order = np.argsort(ids, kind="stable")
        moment = None if second_moment is None else np.asarray(second_moment, dtype=np.float64)[order]
        inclusion, planned = (
            np.ones(len(ids)) if given is None else np.asarray(given, dtype=np.float64)[order]
            for given in (inclusion_prob, planned_prob)
        )
        stands_for = None if stands_for is None else np.asarray(stands_for)[order]
        rows = ids[order], rewards[order], np.asarray(lengths)[order]
        self._learn(Visits(*rows, moment, inclusion, planned, stands_for), step)

    def missing_prompts(self, rewards: FloatArray, *, step: int, rounds: int) -> int:
        """How many more nominal prompts the loop should offer to `select` and roll out in this step; 0 when done.

        rewards [groups, G]: all groups of the step so far, after `rounds` >= 1 rounds of rollout. Bounded by
        `pruning.prompt.refill.max_rounds`.
        """
        return 0

    def keep_groups(self, rewards: FloatArray, *, step: int) -> Selection:
        """Which of the step's groups [groups, G] are trained on; called after the last round of rollout."""
        return keep_all(len(rewards), f"{self.name}/groups")

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "history": self.history.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.history.load_state_dict(state["history"])

    def _select_sorted(self, ids: IntArray, step: int, minibatch: int) -> Selection:
        return keep_all(len(ids), self.name)

    def _select_inactive(self, ids: IntArray, step: int, reason: str) -> Selection:
        return keep_all(len(ids), self.name, reason)

    def _learn(self, visits: Visits, step: int) -> None:
        outcome = visits.ids, visits.rewards, visits.lengths
        self.history.update(*outcome, step=step, second_moment=visits.second_moment, stands_for=visits.stands_for)

    def _inactive_reason(self, step: int) -> str:
        """Why nothing is skipped in this step, for the ledger; empty if the method is active."""
        if "warmup_epochs" not in self.reads:  # GRESO skips only prompts whose last visit was easy or hard anyway
            return ""
        if step < self.warmup_steps:
            return f"warm-up until step {self.warmup_steps}"
        return f"annealed after step {self.last_active_step}" if step > self.last_active_step else ""

    def _draw_and_weigh(
        self, ids: IntArray, pi: FloatArray, score: FloatArray, step: int, minibatch: int, *, note: str = ""
    ) -> Selection:
        """Draw and weigh with the configured design, estimator and cap. A systematic draw in order of score stratifies
        by score; equal scores are in random order."""
        order = np.lexsort((self._ties(ids, step, minibatch), score))
        return weigh_by(self, self._draw_along(ids, pi, order, step, minibatch), note=note)
