"""A policy of your own: `pruning.prompt.method=my_module:MyPolicy`, and the same for completions.

It has one method, `choose`, and the type of what it returns says how much is known about the choice. The trainer draws,
weighs and labels, so the ledger stays true whatever a policy does:

    probabilities   float array [n]: raised to `min_inclusion_prob`, drawn by, weighted with 1/pi: unbiased
    a design        `Draw`: drawn by the policy itself; its probabilities are taken at their word, and checked for what
                    cannot be (a row kept at probability 0): unbiased
    a pick          boolean array [n]: how else it could have come out is not known: biased, with weights of 1

Example: prompts whose last group had variance are always kept, the others in a third of the cases.

    class Curious(CustomPromptPolicy):
        reads = ("min_inclusion_prob",)

        def choose(self, prompt_index, *, step, minibatch):
            return np.where(self.history.arrays["variance"][prompt_index] > 0, 1.0, 1 / 3)

`choose` must not change the policy's state: a step may be chosen and then given up. It learns in `learn` (prompts)
and `feedback`; what it keeps goes through `own_state` and `load_own_state`. The price of this narrow interface:
weights other than the estimators' cannot be plugged in.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from dppo_megatron.config.pruning import CompletionPruningConfig
from dppo_megatron.pruning.completion_base import CompletionPolicy
from dppo_megatron.pruning.designs import Draw
from dppo_megatron.pruning.interface import CompletionBatch, Selection, StepCapacity
from dppo_megatron.pruning.prompt_base import PromptPolicy, Visits
from dppo_megatron.pruning.weights import label_of_settings, weigh_biased, weigh_by
from dppo_megatron.types import BoolArray, FloatArray, IntArray, Label, UserError

Choice = FloatArray | BoolArray | Draw
"""Probabilities [n], a pick [n], or a design of n rows."""
_READS = ("min_inclusion_prob", "design", "estimator", "max_weight", "anneal_fraction")
_SMALLEST = float(np.finfo(np.float64).tiny)
_PICKED = "a pick by {}: no probabilities are known, so no weight can stand in for what it leaves out"


class CustomPromptPolicy(PromptPolicy):
    """Base of a user's prompt policy; beside `choose`, `learn` and `own_state` may be given.

    `self.history` is there to be read: `arrays` by prompt index (variance, mean_abs, tokens, visits, last_step),
    `posterior`, `seen`, `age_epochs`; `self.features` is what is known before a visit; `self.config` the section.
    """

    methods: ClassVar[tuple[str, ...]] = ()
    reads: ClassVar[tuple[str, ...]] = (*_READS, "warmup_epochs", "discount", "prior")

    def choose(self, prompt_index: IntArray, *, step: int, minibatch: int) -> Choice:
        """Which of the nominal prompts [n], sorted by index, are worth a rollout. Steps count from 0."""
        raise NotImplementedError

    def learn(self, prompt_index: IntArray, rewards: FloatArray, lengths: IntArray, *, step: int) -> None:
        """Visited prompts [K] with rewards (NaN: not graded) and lengths [K, G]; `self.history` has learned already."""

    def _select_sorted(self, ids: IntArray, step: int, minibatch: int) -> Selection:
        choice = _checked(self.choose(ids, step=step, minibatch=minibatch), len(ids), self.config.method)
        if isinstance(choice, Draw):
            _check_support(choice, np.ones(len(ids), dtype=np.bool_), self.config.method)
            return weigh_by(self, choice)
        if choice.dtype == np.bool_:
            return _picked(choice.astype(np.bool_), self.name)
        pi = np.maximum(choice, self.config.min_inclusion_prob)
        order = np.lexsort((self._ties(ids, step, minibatch), pi))
        return self._draw_and_weigh(ids, pi, order, step, minibatch)

    def _learn(self, visits: Visits, step: int) -> None:
        super()._learn(visits, step)
        self.learn(visits.ids, visits.rewards, visits.lengths, step=step)


class CustomCompletionPolicy(CompletionPolicy):
    """Base of a user's completion policy; beside `choose`, `own_state` may be given."""

    methods: ClassVar[tuple[str, ...]] = ()
    reads: ClassVar[tuple[str, ...]] = (*_READS, "warmup_steps")
    _kind: str = ""
    """Of the answers so far; no part of the state, since it decides nothing."""

    def choose(self, batch: CompletionBatch, *, step: int, minibatch: int) -> Choice:
        """Which completions [n] to train on, sorted by prompt and completion. Steps count from 0.

        Those without gradient need no probability. There may be none at all: what is asked then is the kind of answer.
        """
        raise NotImplementedError

    @classmethod
    def check(cls, config: CompletionPruningConfig, key: str, *, group_size: int, minibatch_size: int) -> None:
        if config.min_inclusion_prob == 0:
            raise UserError(
                f"{key}.min_inclusion_prob = 0: must be in (0, 1]; it is the floor of {config.method}'s probabilities"
            )

    def _prune_sorted(
        self, batch: CompletionBatch, counters: tuple[int, int], capacity: StepCapacity | None
    ) -> Selection:
        config, (step, minibatch) = self.config, counters
        live = batch.prompt_weight > 0
        if self.zero_advantage_slope == 0:
            live = live & (batch.advantages != 0)
        choice = self._chosen(batch, step, minibatch)
        score = np.abs(batch.advantages)
        if isinstance(choice, Draw):
            _check_support(choice, live, config.method)
            drawn = choice
        elif choice.dtype == np.bool_:
            return _picked(choice.astype(np.bool_), self.name, score)
        else:
            drawn = self._draw(batch, np.where(live, np.maximum(choice, config.min_inclusion_prob), 0.0), counters)
        return weigh_by(self, drawn, label=self._label_of(choice), score=score)

    @property
    def has_support(self) -> bool:
        return self._kind != "a pick"

    def _label_of_nothing(self, batch: CompletionBatch, counters: tuple[int, int]) -> Label:
        return self._label_of(self._chosen(batch, *counters))

    def _chosen(self, batch: CompletionBatch, step: int, minibatch: int) -> Choice:
        """The answer of `choose`, always of one kind: which prompts were drawn must not decide the label."""
        choice = _checked(self.choose(batch, step=step, minibatch=minibatch), len(batch), self.config.method)
        if not len(batch) and not isinstance(choice, Draw) and self._kind == "a pick":
            choice = choice.astype(np.bool_)  # numpy's array of nothing is of floats
        kind = "a Draw" if isinstance(choice, Draw) else "a pick" if choice.dtype == np.bool_ else "probabilities"
        if self._kind and kind != self._kind:
            raise UserError(
                f"{self.config.method}.choose returned {kind} and, earlier in this run, {self._kind}: the label would"
                " depend on what was drawn; return the same kind always, for an empty batch too"
            )
        self._kind = kind
        return choice

    def _label_of(self, choice: Choice) -> Label:
        """By the kind of the answer and the settings: the probabilities depend on which prompts were drawn."""
        if not isinstance(choice, Draw) and choice.dtype == np.bool_:
            return "biased"
        config = self.config
        least = _SMALLEST if isinstance(choice, Draw) else config.min_inclusion_prob  # a design's own may be any
        return label_of_settings(config.estimator, fixed_size=False, least_prob=least, max_weight=config.max_weight)


def _checked(choice: Any, count: int, method: str) -> Choice:
    """The answer of `choose`, if it is one."""
    what = f"{method}.choose returned"
    if isinstance(choice, Draw):
        _check_array(choice.kept, count, f"{what} a Draw whose kept", kinds="b")
        _check_array(choice.inclusion_prob, count, f"{what} a Draw whose inclusion_prob", kinds="f")
    else:
        _check_array(choice, count, what, kinds="bf")
    pi = choice.inclusion_prob if isinstance(choice, Draw) else choice
    if pi.dtype != np.bool_ and not bool(np.all((pi >= 0) & (pi <= 1))):  # NaN is neither
        row = int(np.flatnonzero(~((pi >= 0) & (pi <= 1)))[0])
        raise UserError(f"{what} {pi[row]} in row {row}: probabilities are in [0, 1]")
    checked: Choice = choice
    return checked


def _check_array(array: Any, count: int, what: str, *, kinds: str) -> None:
    if not isinstance(array, np.ndarray) or array.dtype.kind not in kinds or array.shape != (count,):
        got = f"{array.dtype}{list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
        wanted = {"b": "booleans", "f": "floats", "bf": "floats (probabilities), booleans (a pick) or a Draw"}[kinds]
        raise UserError(f"{what} {got}; expected a numpy array [{count}] of {wanted}")


def _check_support(draw: Draw, live: BoolArray, method: str) -> None:
    """Raise `UserError` for a design that contradicts itself, or that can never keep a row with gradient."""
    pi = draw.inclusion_prob
    for wrong, why in (
        (draw.kept & (pi == 0), "kept a row of probability 0"),
        (~draw.kept & (pi == 1), "left out a row of probability 1"),
        (live & (pi == 0), "gives probability 0 to a row that can carry gradient, which no weight makes up for"),
    ):
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            raise UserError(f"{method}.choose: its Draw {why} (row {row}); return booleans for a pick labelled biased")


def _picked(kept: BoolArray, name: str, score: FloatArray | None = None) -> Selection:
    drawn = Draw(kept, kept.astype(np.float64), fixed_size=True)
    note = _PICKED.format(name.partition("/")[2])
    return weigh_biased(drawn, name=name, scale=1.0, note=note, label="biased", score=score)


def check_custom(cls: object, base: type, key: str, path: str) -> None:
    """Raise `UserError` unless `cls` is a policy whose labels this package decides.

    Args:
        base: `PromptPolicy` or `CompletionPolicy`.
    """
    level = "prompt" if base is PromptPolicy else "completion"
    own = CustomPromptPolicy if base is PromptPolicy else CustomCompletionPolicy
    if not isinstance(cls, type) or not issubclass(cls, base):
        other = CompletionPolicy if base is PromptPolicy else PromptPolicy
        of = "completions" if base is PromptPolicy else "prompts"
        hint = f"; it is one of {of}" if isinstance(cls, type) and issubclass(cls, other) else ""
        raise UserError(
            f"{key} = '{path}' is no {level} policy: expected a class derived from"
            f" dppo_megatron.pruning.{own.__name__}{hint}"
        )
    if issubclass(cls, own) and cls.choose is own.choose:
        raise UserError(f"{key} = '{path}': has no method choose")
    for name in ("select", "_select_sorted", "prune", "_prune_sorted"):
        if hasattr(cls, name) and not getattr(cls, name).__module__.startswith("dppo_megatron.pruning"):
            raise UserError(
                f"{key} = '{path}': replaces {name}, where draws are weighed and labelled; give probabilities, a Draw"
                f" or a pick from choose of dppo_megatron.pruning.{own.__name__}"
            )
