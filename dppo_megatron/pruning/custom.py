"""A policy of your own: `pruning.prompt.method=my_module:MyPolicy`, and the same for completions.

It has one method, `choose`, and the type of what it returns says how much is known about the choice:

    probabilities   float array [n]: raised to `min_inclusion_prob`, drawn by, weighted with 1/pi: unbiased
    a design        `Draw`: drawn by the policy itself; its probabilities are tested against what it keeps as the run
                    goes on (`declared.py`): unbiased until they are refuted, from then on biased
    a pick          boolean array [n]: how else it could have come out is not known: biased, with weights of 1

Example: prompts whose last group had variance are always kept, the others in a third of the cases.

    class Curious(CustomPromptPolicy):
        reads = ("min_inclusion_prob",)

        def choose(self, prompt_index, *, step, minibatch):
            return np.where(self.history.arrays["variance"][prompt_index] > 0, 1.0, 1 / 3)

The classes here are no policies: the trainer's own policy holds such an object and asks it (`plugged.py`), so nothing
that it defines besides can touch draws, weights or labels. The price of this narrow interface: weights other than the
estimators' cannot be plugged in, and no part of a built-in method can be replaced.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from dppo_megatron.config.pruning import CompletionPruningConfig, PromptPruningConfig
from dppo_megatron.pruning.designs import Draw
from dppo_megatron.pruning.history import PromptHistory
from dppo_megatron.pruning.interface import CompletionBatch, PromptFeatures, StepCost
from dppo_megatron.types import BoolArray, FloatArray, IntArray

Choice = FloatArray | BoolArray | Draw
"""Probabilities [n], a pick [n], or a design of n rows."""
_READS = ("min_inclusion_prob", "design", "estimator", "max_weight", "anneal_fraction")


class CustomPolicy:
    """What policies of a user's own have in common at both levels. The public names of a base are all that is used."""

    reads: ClassVar[tuple[str, ...]]
    """Settings of `pruning.<level>` that mean something to it; others that are changed are logged."""

    def feedback(self, cost: StepCost) -> list[str]:
        """What a finished step cost; returns lines for the log where something changed because of it."""
        return []

    def own_state(self) -> dict[str, Any]:
        """What it keeps, copied: numbers, texts, numpy arrays, lists, dicts."""
        return {}

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Take over a saved `own_state`."""


class CustomPromptPolicy(CustomPolicy):
    """Base of a user's prompt policy.

    Args:
        config: a copy of the prompt section.
        history: to be read: `arrays` by prompt index (variance, mean_abs, tokens, visits, last_step), `posterior`,
            `seen`, `age_epochs`.
        features: what is known of each prompt before it is tried; None: nothing.
        seed: for random numbers of its own, other than those that the trainer draws with.
        completions_per_prompt: G.
        prompts_per_step: nominal prompts of a step, N.
    """

    reads: ClassVar[tuple[str, ...]] = (*_READS, "warmup_epochs", "discount", "prior")

    def __init__(
        self,
        config: PromptPruningConfig,
        *,
        history: PromptHistory,
        features: PromptFeatures | None,
        seed: int,
        completions_per_prompt: int,
        prompts_per_step: int,
    ) -> None:
        self.config, self.history, self.features, self.seed = config, history, features, seed
        self.completions_per_prompt, self.prompts_per_step = completions_per_prompt, prompts_per_step

    def choose(self, prompt_index: IntArray, *, step: int, minibatch: int) -> Choice:
        """Which of the nominal prompts [n], sorted by index, are worth a rollout. Steps count from 0.

        Must not change what `own_state` saves: a step may be chosen and then given up.
        """
        raise NotImplementedError

    def learn(self, prompt_index: IntArray, rewards: FloatArray, lengths: IntArray, *, step: int) -> None:
        """Visited prompts [K] with rewards (NaN: not graded) and lengths [K, G]; `self.history` has learned already."""


class CustomCompletionPolicy(CustomPolicy):
    """Base of a user's completion policy.

    Args:
        config: a copy of the completion section.
        seed: as for `CustomPromptPolicy`.
        zero_advantage_slope: above 0, completions without advantage carry gradient too.
        group_size: completions of a whole group, G; 0: not known.
    """

    reads: ClassVar[tuple[str, ...]] = (*_READS, "warmup_steps")

    def __init__(
        self, config: CompletionPruningConfig, *, seed: int, zero_advantage_slope: float, group_size: int
    ) -> None:
        self.config, self.seed = config, seed
        self.zero_advantage_slope, self.group_size = zero_advantage_slope, group_size

    def choose(self, batch: CompletionBatch, *, step: int, minibatch: int) -> Choice:
        """Which completions [n] to train on, sorted by prompt and completion. Steps count from 0.

        Those without gradient need no probability. There may be none at all: what is asked then is the kind of answer,
        which is the same in the whole run. Must not change what `own_state` saves.
        """
        raise NotImplementedError
