"""User-defined policies: `pruning.prompt.method=my_module:MyPolicy`, and the same for completions.

A policy has to define one method, `choose`. It returns probabilities (floats [n]), a `Draw`, or a pick (booleans [n]);
the type decides weights and label (docs/pruning.md).

Example: prompts whose last group had variance are always kept, the others with probability 1/3.

    class Curious(CustomPromptPolicy):
        reads = ("discount",)  # a setting of the history

        def choose(self, prompt_index, *, step, minibatch):
            return np.where(self.history.arrays["variance"][prompt_index] > 0, 1.0, 1 / 3)

The trainer's policies (`Plugged...`) hold such an object and call it; they draw, weigh, label and save by themselves. A
user's subclass of them could override any step between its answer and the label. The price: a plugged policy cannot
supply its own weights or replace a part of a built-in method.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, ClassVar, cast

import numpy as np

from dppo_megatron.config.pruning import CompletionPruningConfig, PromptPruningConfig
from dppo_megatron.pruning.completion_base import CompletionPolicy, Counters
from dppo_megatron.pruning.designs import Draw
from dppo_megatron.pruning.history import PromptHistory
from dppo_megatron.pruning.interface import CompletionBatch, Policy, Selection, StepCapacity, StepCost
from dppo_megatron.pruning.prompt_base import PromptPolicy, Visits
from dppo_megatron.pruning.weights import label_of_settings, weigh_biased, weigh_by
from dppo_megatron.randomness import generator
from dppo_megatron.types import BoolArray, FloatArray, IntArray, Label, PromptFeatures, UserError

Choice = FloatArray | BoolArray | Draw
"""Probabilities [n], a pick [n], or a design of n rows."""
_LEAST_KEPT = 1e-9
"""Smallest probability of a kept row, even one without gradient: a weight above 1e38 is infinite in float32 losses, and
0 times infinity is NaN."""
_ROUNDING = 1e-6
"""Allowed rounding error of probabilities, which may have been float32 or summed."""
_PICKED = "a pick by {}: no probabilities are known, so no weight can stand in for what it leaves out"
_STORED = "?bhilqBHILQefd"
"""Type characters of the numpy number types that a checkpoint keeps."""
_READ_HERE = ("min_inclusion_prob", "design", "estimator", "max_weight", "anneal_fraction")
"""Settings that `Plugged...` policies read themselves."""


class CustomPolicy:
    """Base of user policies of both levels. The trainer uses only its public names.

    At the start of a run, every rank tries a separate object of the class with made-up rewards. Keep what is learned in
    `self`, which is discarded with that object; a class attribute or a file would carry it into the run.
    """

    reads: ClassVar[tuple[str, ...]]
    """Settings of `pruning.<level>` that it reads, beside those for the floor, the draw, the weights and the warm-up,
    which the trainer applies. The start of a run reports settings that were changed but are not read."""
    config: Any
    """A copy of the config section."""
    seed: int
    """Seed for random numbers of its own. Not the run's seed, which could give the same numbers as the draw itself."""

    def __init__(self, **given: Any) -> None:
        vars(self).update(given)

    def feedback(self, cost: StepCost) -> list[str]:
        """Learn what a finished step cost; returns log lines if something changed because of it."""
        return []

    def own_state(self) -> dict[str, Any]:
        """Its state: numbers, strings, numpy arrays of numbers, lists, tuples, dicts. The trainer takes a copy made of
        these types alone: a `defaultdict` is restored as a dict, a numpy scalar as a Python number."""
        return {}

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Restore a saved `own_state`. A policy defines both or neither."""


class CustomPromptPolicy(CustomPolicy):
    """Base of a user's prompt policy."""

    reads: ClassVar[tuple[str, ...]] = ("discount", "prior")
    history: PromptHistory
    """Read-only: `arrays` by prompt index (variance, mean_abs, tokens, visits, last_step), `posterior`, `seen`,
    `age_epochs`."""
    features: PromptFeatures | None
    """What is known of each prompt before its first visit; None: nothing."""
    completions_per_prompt: int
    prompts_per_step: int

    def choose(self, prompt_index: IntArray, *, step: int, minibatch: int) -> Choice:
        """Which of the nominal prompts [n], sorted by index, are worth a rollout. Steps count from 0."""
        raise NotImplementedError

    def learn(self, prompt_index: IntArray, rewards: FloatArray, lengths: IntArray, *, step: int) -> None:
        """Learn from visited prompts [K] with rewards (NaN: not graded) and lengths [K, G]. `self.history` is already
        updated. The trial at the start of a run calls this with made-up rewards, on an object of its own."""


class CustomCompletionPolicy(CustomPolicy):
    """Base of a user's completion policy."""

    reads: ClassVar[tuple[str, ...]] = ()
    zero_advantage_slope: float
    """Above 0, completions with advantage 0 carry gradient too."""
    group_size: int
    """Completions of a whole group; 0: unknown."""

    def choose(self, batch: CompletionBatch, *, step: int, minibatch: int) -> Choice:
        """Which completions [n] to train on, sorted by prompt and completion. Steps count from 0.

        Completions without gradient need no probability. The batch may be empty; then only the kind of answer counts.
        """
        raise NotImplementedError


class Plugged(Policy):
    """What both levels do with a user's object `own`."""

    own_class: ClassVar[type[CustomPolicy]]
    own: Any
    kind: str = ""
    """`a Draw`, `a pick` or `probabilities`: the kind of the answers so far. Prompt policies only record a pick."""
    _has_failed = False
    _last_state: dict[str, Any]
    """`own_state` after the latest feedback: what a checkpoint gets once the user's code has raised (`_has_failed`)."""

    @property
    def has_support(self) -> bool:
        return self.kind != "a pick"

    @property
    def setting(self) -> str:
        return f"pruning.{self._level}.method = '{self.config.method}'"

    def _make_own(self, seed: int, **attributes: Any) -> None:
        setting, seed = self.setting, int(generator(seed, f"{self.name} of a user").integers(2**62))
        try:
            self.own = self.own_class(config=copy.deepcopy(self.config), seed=seed, **attributes)
        except Exception as error:
            message = f"{setting}: cannot be made: {type(error).__name__}: {error}"
            if isinstance(error, TypeError) and "__init__()" in str(error):
                raise UserError(f"{message}; an __init__ takes (*args, **kwargs) and hands them to super()") from None
            raise UserError(message) from error
        if not isinstance(self.own, self.own_class):
            raise UserError(f"{setting}: cannot be made: its __new__ returns a {type(self.own).__name__}")
        _refuse_taken(vars(self.own), self.own_class, f"{setting}: its objects have")
        self._last_state = self.own_state()  # raises now if the state cannot be saved

    @contextmanager
    def _calling(self, call: str, *, changes_state: bool = True) -> Iterator[None]:
        """Turn an exception of the user's code into a `UserError`, which in a step ends the run with a checkpoint."""
        try:
            yield
        except Exception as error:
            self._has_failed |= changes_state
            if isinstance(error, UserError):
                raise
            raise UserError(f"{self.setting}: {call}: {type(error).__name__}: {error}") from error

    def call_choose(self, candidates: Any, count: int, step: int, minibatch: int) -> Choice:
        with self._calling(f"choose, given {count} rows in step {step}"):
            return _checked(self.own.choose(candidates, step=step, minibatch=minibatch), count, self.config.method)

    def _check_support(self, draw: Draw, live: BoolArray) -> None:
        """Raise `UserError` for a design that contradicts itself, or that gives a row with gradient a probability below
        the floor: no run could show whether a row that is kept so rarely ever is."""
        pi, least = draw.inclusion_prob, self.config.min_inclusion_prob
        floor = f"pruning.{self._level}.min_inclusion_prob = {least:g}: raise the one or lower the other"
        problems = {
            "kept a row of probability {:g}": draw.kept & (pi < _LEAST_KEPT),
            "left out a row of probability {:g}": ~draw.kept & (pi == 1),
            f"gives probability {{:g}} to a row that can carry gradient, and {floor}": live
            & (pi < least * (1.0 - _ROUNDING)),
        }
        for problem, wrong in problems.items():
            if wrong.any():
                row = int(np.flatnonzero(wrong)[0])
                why = f"{problem.format(pi[row])} (row {row}); return booleans for a pick labelled biased"
                raise UserError(f"{self.config.method}.choose: its Draw {why}")

    def feedback(self, cost: StepCost) -> list[str]:
        with self._calling(f"feedback of step {cost.step}"):
            lines: list[str] = self.own.feedback(cost)
            if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
                raise UserError(f"{self.config.method}.feedback returned {lines!r:.60}; expected a list of log lines")
            self._last_state = self.own_state()  # a state that cannot be saved fails here, and not at a save
        return lines

    def own_state(self) -> dict[str, Any]:
        if self._has_failed:
            return copy.deepcopy(self._last_state)
        where = f"{self.setting}: own_state()"
        with self._calling("own_state()", changes_state=False):  # at a save that fails, the next one may not
            if not isinstance(state := self.own.own_state(), dict):
                raise UserError(f"{where} is a {type(state).__name__}, expected a dict")
            return {"kind": self.kind, "own": _plain(state, where)}

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        self.kind, self._last_state = str(state["kind"]), dict(copy.deepcopy(state))
        try:
            self.own.load_own_state(copy.deepcopy(state["own"]))
        except Exception as error:
            detail = f"{type(error).__name__}: {error}"
            raise ValueError(f"{self.config.method}.load_own_state, given what own_state kept: {detail}") from error


class PluggedPromptPolicy(Plugged, PromptPolicy):
    def __init__(self, config: PromptPruningConfig, *, seed: int, **settings: Any) -> None:
        super().__init__(config, seed=seed, **settings)
        sizes = {name: settings[name] for name in ("completions_per_prompt", "prompts_per_step")}
        self._make_own(seed, history=self.history, features=self.features, **sizes)

    def _select_sorted(self, ids: IntArray, step: int, minibatch: int) -> Selection:
        choice = self.call_choose(ids.copy(), len(ids), step, minibatch)
        if isinstance(choice, Draw):
            self._check_support(choice, np.ones(len(ids), dtype=np.bool_))
            return weigh_by(self, choice, pairs_known=False)
        if choice.dtype == np.bool_:
            self.kind = "a pick"
            return _picked(choice.astype(np.bool_), self.name)
        pi = np.maximum(choice, self.config.min_inclusion_prob)
        return self._draw_and_weigh(ids, pi, pi, step, minibatch)

    def _learn(self, visits: Visits, step: int) -> None:
        super()._learn(visits, step)
        with self._calling(f"learn, given {len(visits.ids)} rows in step {step}"):
            self.own.learn(visits.ids, visits.rewards, visits.lengths, step=step)


class PluggedCompletionPolicy(Plugged, CompletionPolicy):
    def __init__(self, config: CompletionPruningConfig, *, seed: int, **settings: Any) -> None:
        super().__init__(config, seed=seed, **settings)
        self._make_own(seed, zero_advantage_slope=self.zero_advantage_slope, group_size=self.group_size)

    @classmethod
    def check(cls, config: CompletionPruningConfig, key: str, *, group_size: int, minibatch_size: int) -> None:
        if config.min_inclusion_prob == 0:
            raise UserError(
                f"{key}.min_inclusion_prob = 0: must be in (0, 1]; it is the floor of {config.method}'s probabilities"
            )

    def _prune_sorted(self, batch: CompletionBatch, counters: Counters, capacity: StepCapacity | None) -> Selection:
        live = batch.prompt_weight > 0
        if self.zero_advantage_slope == 0:
            live = live & (batch.advantages != 0)
        choice = self._chosen(batch, *counters)
        score = np.abs(batch.advantages)
        if isinstance(choice, Draw):
            self._check_support(choice, live)
            return weigh_by(self, choice, label=self.label, score=score, pairs_known=False)
        if choice.dtype == np.bool_:
            return _picked(choice.astype(np.bool_), self.name, score)
        pi = np.where(live, np.maximum(choice, self.config.min_inclusion_prob), 0.0)
        return weigh_by(self, self._draw(batch, pi, counters), label=self.label, score=score)

    def _label_of_nothing(self, batch: CompletionBatch, counters: Counters) -> Label:
        self._chosen(batch, *counters)
        return self.label

    def _chosen(self, batch: CompletionBatch, step: int, minibatch: int) -> Choice:
        """The answer of `choose`, always of one kind: which prompts were drawn must not decide the label."""
        choice = self.call_choose(batch.take(np.arange(len(batch))), len(batch), step, minibatch)
        if not len(batch) and not isinstance(choice, Draw) and self.kind == "a pick":
            choice = choice.astype(np.bool_)  # np.array([]) is of floats, whatever was meant
        kind = "a Draw" if isinstance(choice, Draw) else "a pick" if choice.dtype == np.bool_ else "probabilities"
        if self.kind and kind != self.kind:
            raise UserError(
                f"{self.config.method}.choose returned {kind} and, earlier in this run, {self.kind}: the label would"
                " depend on what was drawn; return the same kind always, for an empty batch too"
            )
        self.kind = kind
        return choice

    @property
    def label(self) -> Label:
        """By the kind of the answer and the settings, not by the probabilities: those depend on the prompt draw."""
        if self.kind == "a pick":
            return "biased"
        least, cap = self.config.min_inclusion_prob, self.config.max_weight
        return label_of_settings(self.config.estimator, fixed_size=False, least_prob=least, max_weight=cap)


def _checked(choice: Any, count: int, method: str) -> Choice:
    """A checked copy of what `choose` returned, so that the user's code cannot change it afterwards."""
    what = f"{method}.choose returned"
    kept = None
    if isinstance(choice, Draw):
        kept, choice, fixed_size = choice.kept, choice.inclusion_prob, bool(choice.fixed_size)
        _check_array(kept, count, f"{what} a Draw whose kept", kinds="b")
        _check_array(choice, count, f"{what} a Draw whose inclusion_prob", kinds="f")
    _check_array(choice, count, what, kinds="bf")
    if choice.dtype == np.bool_:
        return np.array(choice, dtype=np.bool_)
    pi = np.array(choice, dtype=np.float64)
    near = np.clip(pi, 0.0, 1.0)
    pi = np.where(np.abs(pi - near) <= _ROUNDING, near, pi)
    if not bool(np.all((pi >= 0) & (pi <= 1))):  # NaN is neither
        row = int(np.flatnonzero(~((pi >= 0) & (pi <= 1)))[0])
        raise UserError(f"{what} {pi[row]} in row {row}: probabilities are in [0, 1]")
    # without `least_kept`: whether a cap can bind must not depend on the user's claim
    return pi if kept is None else Draw(np.array(kept), pi, fixed_size)


def _check_array(array: Any, count: int, what: str, *, kinds: str) -> None:
    if not isinstance(array, np.ndarray) or array.dtype.kind not in kinds or array.shape != (count,):
        got = f"{array.dtype}{list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
        wanted = {"b": "booleans", "f": "floats", "bf": "floats (probabilities), booleans (a pick) or a Draw"}[kinds]
        raise UserError(f"{what} {got}; expected a numpy array [{count}] of {wanted}")


def _picked(kept: BoolArray, name: str, score: FloatArray | None = None) -> Selection:
    drawn = Draw(kept, kept.astype(np.float64), fixed_size=True)
    note = _PICKED.format(name.partition("/")[2])
    return weigh_biased(drawn, name=name, scale=1.0, note=note, label="biased", score=score)


def plug(cls: object, base: type, key: str, path: str) -> type[PromptPolicy] | type[CompletionPolicy]:
    """A policy class, derived from `base` (`PromptPolicy` or `CompletionPolicy`), that calls objects of a user's class.

    Raises:
        UserError: `cls` is not derived from the custom base of its level, or defines what only the trainer decides.
    """
    at_prompts = base is PromptPolicy
    level, other_level = ("prompt", "completions") if at_prompts else ("completion", "prompts")
    own, other = (CustomPromptPolicy, CustomCompletionPolicy)[:: 1 if at_prompts else -1]
    if not isinstance(cls, type) or not issubclass(cls, own) or issubclass(cls, (Policy, other)):
        hint = ""
        if isinstance(cls, type) and issubclass(cls, (Policy, other)):
            built_in = "no part of a built-in method can be replaced: give its probabilities from choose"
            hint = f"; {built_in if issubclass(cls, Policy) else f'it is one of {other_level}'}"
        raise UserError(
            f"{key} = '{path}' is no {level} policy: expected a class derived from"
            f" dppo_megatron.pruning.{own.__name__}{hint}"
        )
    for ancestor in cls.__mro__[: cls.__mro__.index(own)]:
        _refuse_taken(vars(ancestor), own, f"{key} = '{path}': replaces")
    for name in _used(own):
        if not callable(getattr(cls, name)) or cls.choose is own.choose:  # type: ignore[attr-defined]
            raise UserError(f"{key} = '{path}': has no method {name}")
    lacks = [name for name in ("own_state", "load_own_state") if getattr(cls, name) is getattr(own, name)]
    if len(lacks) == 1:
        raise UserError(f"{key} = '{path}': has no {lacks[0]}, and so would lose what it keeps at every resume")
    known = [item.name for item in fields(PromptPruningConfig if at_prompts else CompletionPruningConfig)]
    if not isinstance(cls.reads, tuple) or any(name not in known for name in cls.reads):
        raise UserError(f"{key} = '{path}': reads = {cls.reads!r}: expected a tuple of settings of pruning.{level}")
    plugged = PluggedPromptPolicy if at_prompts else PluggedCompletionPolicy
    reads = (*_READ_HERE, "warmup_epochs" if at_prompts else "warmup_steps", *cls.reads)
    made = type(cls.__name__, (plugged,), {"own_class": cls, "reads": reads})
    return cast("type[PromptPolicy] | type[CompletionPolicy]", made)


def _refuse_taken(names: Mapping[str, Any], own: type, where: str) -> None:
    """Raise `UserError` for a name that the trainer's policies use themselves and do not call on the user's object."""
    policies = (PromptPolicy, CompletionPolicy, CustomPromptPolicy, CustomCompletionPolicy)
    taken = {name for cls in policies for name in dir(cls) if not name.startswith("__")} - {*_used(own), "reads"}
    if clashes := sorted(taken & set(names)):
        raise UserError(
            f"{where} {clashes[0]}, which is the trainer's own, because draws, weights and labels are made there; only"
            f" {', '.join(_used(own))} are called. Give probabilities, a Draw or a pick from choose; rename a helper of"
            " that name"
        )


def _used(own: type) -> list[str]:
    return [name for name in dir(own) if not name.startswith("_") and name != "reads"]


def _plain(state: Any, where: str) -> Any:
    """A copy made of types that a checkpoint can restore without running code; `UserError` for any other type."""
    if isinstance(state, dict):
        return {_plain(name, f"{where}: a key"): _plain(value, f"{where}[{name!r}]") for name, value in state.items()}
    if isinstance(state, list | tuple):
        items = [_plain(value, f"{where}[{place}]") for place, value in enumerate(state)]
        return tuple(items) if isinstance(state, tuple) else items
    if isinstance(state, np.generic) and state.dtype.char in _STORED + "U":
        return state.item()
    if type(state) is np.ndarray and state.dtype.char in _STORED:
        return state.copy()
    if state is None or type(state) in (bool, int, float, str):
        return state
    raise UserError(
        f"{where} holds a {type(state).__name__}: a checkpoint keeps numbers, texts, numpy arrays of numbers, and"
        " lists and dicts of these"
    )
