"""What prompt policies share: warm-up and annealing, a canonical order, the history, the rate's back-off, the state.

Batches are sorted by prompt before anything is computed, so that even the rounding of a sum does not depend on the
order in which prompts arrive.
"""

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
    """What a step's visits of prompts came to, sorted by prompt: [K] or [K, G]."""

    ids: IntArray
    rewards: FloatArray
    lengths: IntArray
    second_moment: FloatArray | None
    inclusion: FloatArray
    """With which probability each was drawn."""
    planned: FloatArray
    """With which it would have been, had nothing kept the method from skipping."""
    stands_for: FloatArray | None
    """What each completion counts for those that were stopped early; None: none could be."""


class PromptPolicy(Policy):
    """Decides before rollout which prompts are generated. Depends on history only, never on this step's rollouts.

    This class is method `none`, which keeps everything. Subclasses override `_select_sorted` and what they learn.

    Args:
        num_prompts: rows of the prompt set.
        prompts_per_step: nominal prompts of a step, N.
        total_steps: length of the whole run, for annealing; a step beyond it skips nothing.
        features: what is known of each prompt before it is tried; None: nothing.
    """

    _level = "prompt"
    resamples: ClassVar[bool] = False
    """The rewards decide how many prompts are rolled out and which groups go on: `keep_groups` is a selection."""

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
        """Raise `UserError` for settings, each in its range, that contradict each other under this method."""

    @property
    def has_support(self) -> bool:
        """Every prompt may be kept, with the probability that is reported: a function of the settings."""
        return not self.resamples

    @classmethod
    def needs_unit_rewards(cls, config: PromptPruningConfig) -> bool:
        """Whether rewards must be in [0, 1]."""
        return False

    def select(self, prompt_index: IntArray, *, step: int, minibatch: int = 0) -> Selection:
        """Decide about the nominal prompts [n] of one optimizer mini-batch. Same arguments and history, same answer.

        Steps count from 0. Changes no state: a step that is given up after it leaves nothing behind.
        """
        ids = check_ids(prompt_index, len(self.history))
        resting = self._resting(step)
        order = np.argsort(ids, kind="stable")
        if len(ids) == 0:
            return keep_all(0, self.name, resting)
        chosen = self._rest(ids[order], step, resting) if resting else self._select_sorted(ids[order], step, minibatch)
        return scatter(chosen, order)

    def expected(self, ids: IntArray, step: int) -> tuple[FloatArray, FloatArray] | None:
        """[n] second moment of the gradient of each prompt's group, [n] its cost, both up to a factor, for the sizes of
        groups; None: nothing is known yet that could be believed."""
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
        """Learn from visited prompts: prompt_index [K], rewards and lengths [K, G]; NaN rewards are left out.

        second_moment [K]: sum of squared completion scores of each group, without its prompt's weight; None: whether
        its rewards differ. inclusion_prob and planned_prob [K]: of the selection that drew them; None: 1.
        stands_for [K, G]: what each completion counts for those that were stopped early; None: 1.
        """
        ids = check_ids(prompt_index, len(self.history))
        rewards = check_visits(ids, rewards, lengths, binary_score=self.needs_unit_rewards(self.config))
        order = np.argsort(ids, kind="stable")
        moment = None if second_moment is None else np.asarray(second_moment, dtype=np.float64)[order]
        inclusion, planned = (
            np.ones(len(ids)) if given is None else np.asarray(given, dtype=np.float64)[order]
            for given in (inclusion_prob, planned_prob)
        )
        counts = None if stands_for is None else np.asarray(stands_for)[order]
        rows = ids[order], rewards[order], np.asarray(lengths)[order]
        self._learn(Visits(*rows, moment, inclusion, planned, counts), step)

    def missing_prompts(self, rewards: FloatArray, *, step: int, rounds: int) -> int:
        """How many more nominal prompts the loop should offer to `select` and roll out in this step; 0 when done.

        rewards [groups, G]: all groups of the step so far, after `rounds` >= 1 rounds of rollout. Bounded by
        `pruning.prompt.refill.max_rounds`.
        """
        return 0

    def keep_groups(self, rewards: FloatArray, *, step: int) -> Selection:
        """Which of the step's groups [groups, G] go on, after the last round."""
        return keep_all(len(rewards), f"{self.name}/groups")

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "history": self.history.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.history.load_state_dict(state["history"])

    def _select_sorted(self, ids: IntArray, step: int, minibatch: int) -> Selection:
        return keep_all(len(ids), self.name)

    def _rest(self, ids: IntArray, step: int, why: str) -> Selection:
        return keep_all(len(ids), self.name, why)

    def _learn(self, visits: Visits, step: int) -> None:
        outcome = visits.ids, visits.rewards, visits.lengths
        self.history.update(*outcome, step=step, second_moment=visits.second_moment, stands_for=visits.stands_for)

    def _resting(self, step: int) -> str:
        if self.config.method == "none":
            return ""
        if step < self.warmup_steps:
            return f"warm-up until step {self.warmup_steps}"
        return f"annealed after step {self.last_active_step}" if step > self.last_active_step else ""

    def _draw_and_weigh(
        self, ids: IntArray, pi: FloatArray, score: FloatArray, step: int, minibatch: int, *, note: str = ""
    ) -> Selection:
        """With the configured design, estimator and cap. Neighbours in score replace each other in a systematic draw;
        the tie-break keeps equals in random order."""
        order = np.lexsort((self._ties(ids, step, minibatch), score))
        return weigh_by(self, self._draw_along(ids, pi, order, step, minibatch), note=note)
