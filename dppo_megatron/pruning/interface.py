"""What the training loop and a pruning policy say to each other.

Flat arrays rather than objects per prompt: a step's selection over a thousand prompts is a handful of numpy calls.
A policy never sees the model or the loss. It returns weights as data, and the loss multiplies; which policy made them
is known to the ledger only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from dppo_megatron.types import BoolArray, FloatArray, IntArray, Label


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """One row of a step's bias ledger: what one selection did to the expected gradient."""

    name: str
    """`prompt/<method>` or `completion/<method>`."""
    kept_fraction: float
    """Kept over offered, in [0, 1]; 1 if nothing was offered."""
    label: Label
    note: str
    """Why the label, and about how much; empty if there is nothing to say."""


@dataclass(frozen=True, slots=True)
class Selection:
    """What a policy decided about n prompts or completions."""

    kept: BoolArray
    """[n]."""
    inclusion_prob: FloatArray
    """[n] float64, P(kept | what was known before the draw), in [0, 1]."""
    weight: FloatArray
    """[n] float64, the factor that undoes this selection alone, 0 where not kept. The loss uses the product of the
    prompt's and the completion's weight."""
    ledger: tuple[LedgerRow, ...]
    metrics: dict[str, float]
    """Figures of this decision: `rate_effective`, `design_effect`, `share_at_floor`, `share_at_one`, and others."""


@dataclass(frozen=True, slots=True)
class CompletionBatch:
    """The completions one optimizer mini-batch could train on: flat arrays [n], n = kept prompts x completions each."""

    prompt_index: IntArray
    """Row of the prompt in its set; with `completion_index` the key of every draw."""
    completion_index: IntArray
    """0..G-1 within the prompt."""
    group: IntArray
    """0..groups-1; rows of one group share a prompt and a baseline."""
    rewards: FloatArray
    """NaN where the grader failed."""
    advantages: FloatArray
    """From the full group, before any pruning; 0 where the grader failed."""
    lengths: IntArray
    """Completion tokens."""
    surprisal: FloatArray
    """sqrt(sum_t (1 - p_t)^2) over the completion's tokens, from rollout log-probabilities; see `scores.surprisal`."""
    denominator: FloatArray
    """Frozen divisor of the token sum, 1 / omega."""
    prompt_weight: FloatArray
    """Weight of the prompt-level selection, >= 0."""
    num_nominal: int
    """N x G of the planned full mini-batch, pruned prompts included."""
    tokens: IntArray | None = None
    """Tokens that the model reads to train on each completion, prompt included; None: `lengths`. Read only to fill
    micro-batches."""

    def __len__(self) -> int:
        return len(self.prompt_index)


@dataclass(frozen=True, slots=True)
class PromptFeatures:
    """What is known of every prompt of the training sets before it is tried: arrays [num_prompts] by prompt index."""

    prompt_tokens: IntArray
    level: FloatArray
    """How hard the prompt's row says it is, on the row's own scale; NaN where it does not say."""
    source: IntArray
    """Place of the prompt's source in `sources`."""
    sources: tuple[str, ...]
    """`Prompt.source` of all prompts, each once; empty text for those that name none."""


class StepCapacity(Protocol):
    """What packing tells pruning: how much fits into a step's micro-batches. Depends on no draw."""

    def microbatches(self, tokens: IntArray, inclusion_prob: FloatArray) -> int:
        """Micro-batches that candidates of `tokens` [n] need when each is drawn with its probability [n]."""
        ...

    def holds(self, microbatches: int, tokens: IntArray, inclusion_prob: FloatArray, *, fixed_size: bool) -> bool:
        """Whether such a draw will fit into `microbatches`; fixed_size: the design draws a fixed number."""
        ...


class PromptPolicy(Protocol):
    """Decides before rollout which prompts are generated. Depends on history only, never on this step's rollouts."""

    @property
    def resamples(self) -> bool:
        """The rewards decide how many prompts are rolled out and which groups go on: `keep_groups` is a selection."""
        ...

    def select(self, prompt_index: IntArray, *, step: int, minibatch: int = 0) -> Selection:
        """Decide about the nominal prompts [n] of one optimizer mini-batch. Same arguments and history, same answer.

        Steps count from 0.
        """
        ...

    def observe(
        self,
        prompt_index: IntArray,
        rewards: FloatArray,
        lengths: IntArray,
        *,
        step: int,
        second_moment: FloatArray | None = None,
    ) -> None:
        """Learn from visited prompts: prompt_index [K], rewards and lengths [K, G]; NaN rewards are left out.

        second_moment [K]: sum of squared completion scores of each group (`scores.group_second_moment`), optional.
        """
        ...

    def missing_prompts(self, rewards: FloatArray, *, step: int, rounds: int) -> int:
        """How many more nominal prompts the loop should offer to `select` and roll out in this step; 0 when done.

        rewards [groups, G]: all groups of the step so far, after `rounds` >= 1 rounds of rollout. Methods that do not
        refill answer 0. Bounded by `pruning.prompt.refill.max_rounds`.
        """
        ...

    def keep_groups(self, rewards: FloatArray, *, step: int) -> Selection:
        """Which of the step's groups [groups, G] go on, after the last round. All, for methods that do not refill."""
        ...

    def history_metrics(self, *, step: int) -> dict[str, float]:
        """`prune/history_*`: coverage of the prompt set and staleness of what is known, in epochs."""
        ...

    def feedback(
        self,
        *,
        step: int,
        rollout_s: float,
        update_s: float,
        other_s: float = 0.0,
        noise_ratio: float | None = None,
    ) -> str | None:
        """Seconds of a finished step and, if known, its gradient noise relative to an unpruned step.

        Returns a line for the log when a rate changed.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything `select` depends on, copied: plain scalars and numpy arrays."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore; raises ValueError when keys, method or array shapes differ."""
        ...


class CompletionPolicy(Protocol):
    """Decides after the rewards which completions are trained on."""

    @property
    def prompts_multiplier(self) -> float:
        """Planned prompts per step relative to the config's number; above 1 only for CPPO's allocation."""
        ...

    @property
    def label(self) -> Label:
        """What its active steps do to the expected gradient, whatever they are offered: a function of the settings."""
        ...

    def prune(
        self,
        batch: CompletionBatch,
        *,
        step: int,
        epoch: int = 0,
        minibatch: int = 0,
        capacity: StepCapacity | None = None,
    ) -> Selection:
        """Decide about one mini-batch. Call it anew for every epoch: a draw reused after an update is biased.

        Steps count from 0. With a capacity, the methods that read `fill_slack` keep more where micro-batches have room.
        """
        ...

    def feedback(
        self,
        *,
        step: int,
        rollout_s: float,
        update_s: float,
        other_s: float = 0.0,
        noise_ratio: float | None = None,
    ) -> str | None:
        """As for prompts."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything `prune` depends on, copied."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore; raises ValueError when keys, method or array shapes differ."""
        ...


def keep_all(count: int, name: str, note: str = "", label: Label = "exact") -> Selection:
    """The selection that keeps everything: probabilities and weights are exactly 1.0."""
    ones = np.ones(count, dtype=np.float64)
    return Selection(
        kept=np.ones(count, dtype=np.bool_),
        inclusion_prob=ones,
        weight=ones.copy(),
        ledger=(LedgerRow(name, 1.0, label, note),),
        metrics={"rate_effective": 0.0, "design_effect": 1.0, "share_at_floor": 0.0, "share_at_one": 1.0},
    )


def check_state(state: dict[str, Any], expected: set[str], owner: str) -> None:
    """Exact key-set check of a saved state.

    Raises:
        ValueError: names the missing and the unknown keys.
    """
    missing, unknown = sorted(expected - set(state)), sorted(set(state) - expected)
    if missing or unknown:
        raise ValueError(f"state of {owner}: missing keys {missing}, unknown keys {unknown}")
