"""A policy of your own: `pruning.prompt.method=my_module:MyPolicy`, and the same for completions.

It has one method, `choose`, and the type of what it returns says how much is known about the choice:

    probabilities   float array [n]: raised to `min_inclusion_prob`, drawn by, weighted with 1/pi: unbiased
    a design        `Draw`: drawn by the policy itself; unbiased, until what it keeps refutes its probabilities
                    (`monitors.py`), from then on biased
    a pick          boolean array [n]: how else it could have come out is not known: biased, with weights of 1

Example: prompts whose last group had variance are always kept, the others in a third of the cases.

    class Curious(CustomPromptPolicy):
        reads = ("min_inclusion_prob",)

        def choose(self, prompt_index, *, step, minibatch):
            return np.where(self.history.arrays["variance"][prompt_index] > 0, 1.0, 1 / 3)

`choose` must not change the policy's state: a step may be chosen and then given up. It learns in `learn` (prompts)
and `feedback`; what it keeps goes through `own_state` and `load_own_state`.

The trainer's own policies (`plugged.py`) hold such an object and ask it; they draw, weigh and label. The price: weights
other than the estimators' cannot be plugged in, nor parts of a built-in method be replaced.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from dppo_megatron.pruning.designs import Draw
from dppo_megatron.pruning.history import PromptHistory
from dppo_megatron.pruning.interface import CompletionBatch, PromptFeatures, StepCost
from dppo_megatron.types import BoolArray, FloatArray, IntArray

Choice = FloatArray | BoolArray | Draw
"""Probabilities [n], a pick [n], or a design of n rows."""
_READS = ("min_inclusion_prob", "design", "estimator", "max_weight", "anneal_fraction")


class CustomPolicy:
    """What a user's policies of both levels have. The public names of a base are all that the trainer uses."""

    reads: ClassVar[tuple[str, ...]]
    """Settings of `pruning.<level>` that mean something to it."""
    config: Any
    """A copy of the section."""
    seed: int
    """For random numbers of its own; not the run's, or its coins could be those that it is drawn by."""

    def __init__(self, **given: Any) -> None:
        vars(self).update(given)

    def feedback(self, cost: StepCost) -> list[str]:
        """What a finished step cost; returns lines for the log where something changed because of it."""
        return []

    def own_state(self) -> dict[str, Any]:
        """What it keeps, copied: numbers, texts, numpy arrays, lists, dicts."""
        return {}

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Take over a saved `own_state`."""


class CustomPromptPolicy(CustomPolicy):
    """Base of a user's prompt policy."""

    reads: ClassVar[tuple[str, ...]] = (*_READS, "warmup_epochs", "discount", "prior")
    history: PromptHistory
    """To be read: `arrays` by prompt index (variance, mean_abs, tokens, visits, last_step), `posterior`, `seen`,
    `age_epochs`."""
    features: PromptFeatures | None
    """What is known of each prompt before a visit; None: nothing."""
    completions_per_prompt: int
    prompts_per_step: int

    def choose(self, prompt_index: IntArray, *, step: int, minibatch: int) -> Choice:
        """Which of the nominal prompts [n], sorted by index, are worth a rollout. Steps count from 0."""
        raise NotImplementedError

    def learn(self, prompt_index: IntArray, rewards: FloatArray, lengths: IntArray, *, step: int) -> None:
        """Visited prompts [K] with rewards (NaN: not graded) and lengths [K, G]; `self.history` has learned already."""


class CustomCompletionPolicy(CustomPolicy):
    """Base of a user's completion policy."""

    reads: ClassVar[tuple[str, ...]] = (*_READS, "warmup_steps")
    zero_advantage_slope: float
    """Above 0 completions without advantage carry gradient too."""
    group_size: int
    """Completions of a whole group; 0: not known."""

    def choose(self, batch: CompletionBatch, *, step: int, minibatch: int) -> Choice:
        """Which completions [n] to train on, sorted by prompt and completion. Steps count from 0.

        Those without gradient need no probability. There may be none at all: what is asked then is the kind of answer.
        """
        raise NotImplementedError
