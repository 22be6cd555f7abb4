"""What goes into a pruning policy and comes out of it.

A policy never sees the model or the loss. It returns weights as data, by which the loss is multiplied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Protocol

import numpy as np

from dppo_megatron.config.pruning import CompletionPruningConfig, PromptPruningConfig
from dppo_megatron.pruning.designs import Draw, draw
from dppo_megatron.randomness import generator, uniforms
from dppo_megatron.types import REWARD_ROUNDING, BoolArray, FloatArray, IntArray, Label, RunAborted, UserError

_LEAST_GROUPS = 48.0
"""Groups with gradient, after fading, that a verdict needs: with fewer, the standard error itself is unreliable."""
_ERRORS = 2.0
"""Skipping counts as worse than uniform skipping when it is more than this many standard errors above it."""

LARGEST_REWARD = 1e15
"""Sums of squared rewards times lengths are kept as float32, which ends at 3e38."""


def percent(share: float) -> str:
    """Two significant digits, never in exponent notation: 0.0123 -> `1.2 %`, 3.8 -> `380 %`."""
    return f"{float(f'{100 * share:.2g}'):.15g} %"


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """One row of a step's bias ledger: what one selection did to the expected gradient."""

    name: str
    """`prompt/<method>` or `completion/<method>`."""
    kept_fraction: float
    """Kept over offered, in [0, 1]; 1 if nothing was offered."""
    label: Label
    note: str
    """Reason for the label, and roughly how large the effect is; may be empty."""
    bias_estimate: float | None = None
    """Estimate of |E[g'] - g| / |g| by this selection alone, with g the full batch's gradient and g' the estimate,
    taking gradients of different completions as orthogonal. None: no bias, or the note says why it is unknown."""

    def with_bias(self, bias: float | None, unknown: str = "") -> LedgerRow:
        """The row with an estimate, or with why it is `unknown`; rows labelled exact or unbiased stay as they are."""
        if self.label in ("exact", "unbiased"):
            return self
        size = f"bias about {percent(bias)}" if bias is not None else unknown and f"bias of unknown size: {unknown}"
        return replace(self, note="; ".join(filter(None, (self.note, size))), bias_estimate=bias)


@dataclass(frozen=True, slots=True)
class Effect:
    """Growth of the gradient's variance over the last steps, as factors relative to no skipping."""

    predicted: float
    realised: float
    error: float
    """Standard error of `realised`."""
    uniform: float
    """Growth by skipping uniformly at random at the same cost."""
    groups: float
    """Faded number of groups with gradient that this was measured on."""

    @property
    def is_worse(self) -> bool:
        return self.groups >= _LEAST_GROUPS and self.realised - self.uniform > _ERRORS * self.error

    @property
    def inflation(self) -> float:
        """Realised over predicted growth, shrunk towards 1 by how much of it may be chance; in [0.5, 100].

        Example: predicted 1.2, realised 1.4 with an error of 0.1: the growth is 0.4 instead of 0.2, twice as much. The
        difference is 2 errors, so 1 - 1 / 2^2 = 0.75 of it is trusted: 1.75.
        """
        expected, difference = self.predicted - 1.0, self.realised - self.predicted
        if self.groups < _LEAST_GROUPS or not expected > 1e-6 or abs(difference) <= self.error:
            return 1.0
        trust = 1.0 - (self.error / difference) ** 2
        return float(np.clip(1.0 + trust * difference / expected, 0.5, 100.0))


@dataclass(frozen=True, slots=True)
class Selection:
    """What a policy decided about n prompts or completions."""

    kept: BoolArray
    """[n]. May be all False: a Poisson draw can keep nothing, and maybe no completion has an advantage. The optimizer
    then steps with a gradient of 0 (momentum, decay, schedule); drawing until something is kept would be biased."""
    inclusion_prob: FloatArray
    """[n] float64, P(kept | what was known before the draw), in [0, 1]."""
    weight: FloatArray
    """[n] float64, the factor that undoes this selection alone, 0 where not kept. The product of the prompt's and the
    completion's weight multiplies a completion's whole loss, KL and entropy terms included."""
    ledger: tuple[LedgerRow, ...]
    metrics: dict[str, float]
    """Metrics of this decision: `rate_effective`, `share_at_floor`, `share_at_one`, and others."""
    growth: float = 1.0
    """Factor by which this selection increases the gradient's variance, as the scores predict it before the draw."""
    planned_prob: FloatArray | None = None
    """[n] what the probabilities would be if the method skipped; None: `inclusion_prob`."""
    kept_cost: float | None = None
    """Expected kept share of the cost of everything offered, in (0, 1]; None: the method knows no cost."""
    effect: Effect | None = None
    """What skipping has done to the gradient's variance so far; None: not measured."""
    mean_weight: FloatArray | None = None
    """[n] E[weight] over draws; None: 1 wherever there is a gradient. NaN: unknown."""
    redraw: Callable[[np.random.Generator, int], FloatArray] | None = None
    """Weights [count, n] of `count` further draws; None: not drawn with known probabilities."""

    @property
    def expected_weight(self) -> FloatArray:
        """[n] `mean_weight`, or 1."""
        return np.ones(len(self.kept)) if self.mean_weight is None else self.mean_weight

    @property
    def planned(self) -> FloatArray:
        """[n] `planned_prob`, or `inclusion_prob` where it does not differ."""
        return self.inclusion_prob if self.planned_prob is None else self.planned_prob

    def columns(self) -> dict[str, Any]:
        plain = {name: getattr(self, name) for name in ("kept", "inclusion_prob", "weight")}
        return plain | {"planned_prob": self.planned, "mean_weight": self.expected_weight}


@dataclass(frozen=True, slots=True)
class CompletionBatch:
    """The completions one optimizer mini-batch could train on: flat arrays [n], n = kept prompts x completions each."""

    prompt_index: IntArray
    """Row of the prompt in its set; together with `completion_index` the key of every draw."""
    completion_index: IntArray
    """0..G-1 within the prompt."""
    group: IntArray
    """0..groups-1; the rows of a group share a prompt and a baseline."""
    rewards: FloatArray
    """NaN where the grader failed."""
    advantages: FloatArray
    """From the full group, before any pruning; 0 where the grader failed."""
    lengths: IntArray
    """Completion tokens."""
    logit_grad_norm: FloatArray
    """sqrt(sum_t (1 - p_t)^2) over the completion's tokens: `scores.logit_grad_norm` of its log-probabilities."""
    denominator: FloatArray
    """Frozen divisor of the token sum, 1 / omega: what the trainer would divide by if nothing was dropped."""
    prompt_weight: FloatArray
    """Weight of the prompt-level selection, >= 0."""
    num_nominal: int
    """N x G of the planned full mini-batch, pruned prompts included."""
    tokens: IntArray | None = None
    """Tokens that the model reads to train on each completion, prompt included; None: `lengths`. Only used to fill
    micro-batches."""

    @classmethod
    def of_groups(
        cls,
        prompt_index: IntArray,
        *,
        rewards: FloatArray,
        advantages: FloatArray,
        lengths: IntArray,
        logit_grad_norm: FloatArray,
        denominator: FloatArray | float,
        prompt_weight: FloatArray,
        num_nominal: int,
        prompt_tokens: IntArray | None = None,
    ) -> CompletionBatch:
        """From whole groups as a rollout returns them: [K] for prompts, [K, G] for completions.

        Flattens the arrays and adds what each row needs of its group and prompt. Row k * G + g of the batch is
        completion g of group k.

        Args:
            denominator: [K, G], or one number for all.
            prompt_weight: [K] weights of the prompts that were kept.
            prompt_tokens: [K] tokens of each prompt; None: unknown, so only completions count in a micro-batch.

        Example: groups 7 and 3 of two completions are prompt_index [7, 7, 3, 3], completion_index [0, 1, 0, 1] and
        group [0, 0, 1, 1]; weights [1.0, 2.5] become prompt_weight [1.0, 1.0, 2.5, 2.5].

        Raises:
            ValueError: an array has the wrong shape.
        """
        count, size = rewards.shape
        of_prompts = {"prompt_index": prompt_index, "prompt_weight": prompt_weight}
        if prompt_tokens is not None:
            of_prompts["prompt_tokens"] = prompt_tokens
        divisor = np.asarray(denominator, dtype=np.float64)
        rows: dict[str, Any] = {
            "rewards": rewards,
            "advantages": advantages,
            "lengths": lengths,
            "logit_grad_norm": logit_grad_norm,
            "denominator": divisor if divisor.ndim else np.broadcast_to(divisor, (count, size)),
        }
        for name, array in (of_prompts | rows).items():
            expected = (count,) if name in of_prompts else (count, size)
            if np.shape(array) != expected:
                raise ValueError(f"{name} has shape {np.shape(array)}, expected {expected} for rewards [K, G]")
        return cls(
            prompt_index=np.repeat(prompt_index, size),
            completion_index=np.tile(np.arange(size), count),
            group=np.repeat(np.arange(count), size),
            prompt_weight=np.repeat(prompt_weight, size),
            num_nominal=num_nominal,
            tokens=None if prompt_tokens is None else (lengths + prompt_tokens[:, None] - 1).ravel(),
            **{name: np.ravel(array) for name, array in rows.items()},
        )

    def __len__(self) -> int:
        return len(self.prompt_index)

    @property
    def ids(self) -> IntArray:
        """[n, 2] prompt and completion index, the key of each row's random numbers."""
        return np.stack([self.prompt_index, self.completion_index], axis=1)

    def arrays(self) -> dict[str, Any]:
        """All columns that are not None, by name."""
        named = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "num_nominal"}
        return {name: array for name, array in named.items() if array is not None}

    def facts(self) -> dict[str, Any]:
        """What a policy may have chosen completions by, each [n]."""
        names = ("prompt_index", "completion_index", "advantages", "lengths", "logit_grad_norm")
        named = {name: getattr(self, name) for name in names}
        return named | {"size of advantage": np.abs(self.advantages), "rewards": np.nan_to_num(self.rewards)}

    def take(self, rows: IntArray) -> CompletionBatch:
        return replace(self, **{name: array[rows] for name, array in self.arrays().items()})


@dataclass(frozen=True, slots=True)
class StepCost:
    """What a finished step cost, and what share its own selection had kept.

    Example: a step rolled out for 6 s and updated for 2 s; its completion policy kept a quarter of the cost. A full
    update would have taken 2 / 0.25 = 8 s, so the time that pruning completions cannot save is 6 / 8 of what it can.
    """

    step: int
    """Counts from 1."""
    rollout_s: float
    """Generating and grading. These three are 0 in other trainers, which do not measure them."""
    update_s: float
    other_s: float
    """The rest of the step: selecting, packing, syncing."""
    kept_cost: float = 1.0
    """Expected share of the variable cost that this level's selection kept in this same step, in (0, 1]."""


class Stateful:
    """Saves the attributes named in `_state_names`, under those names without a leading underscore.

    Their values are numbers, strings, arrays, dicts of these, or `Stateful`; a None is not saved.
    """

    _state_names: ClassVar[tuple[str, ...]] = ()

    def state_dict(self) -> dict[str, Any]:
        """A copy: plain scalars and numpy arrays."""
        return {
            name.lstrip("_"): value.state_dict() if isinstance(value, Stateful) else deepcopy(value)
            for name, value in self._state_items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore; raises ValueError for different keys and for arrays of a different type or shape."""
        check_state(state, {name.lstrip("_") for name, _ in self._state_items()}, type(self).__name__)
        for name, value in self._state_items():
            setattr(self, name, restored(value, state[name.lstrip("_")], f"{type(self).__name__}.{name}"))

    def _state_items(self) -> list[tuple[str, Any]]:
        return [(name, value) for name in self._state_names if (value := getattr(self, name)) is not None]


class Policy(Stateful):
    """What the policies of both levels have in common."""

    _level: ClassVar[str]
    """`prompt` or `completion`."""
    reads: ClassVar[tuple[str, ...]] = ()
    """The settings of `pruning.<level>` that this method reads."""
    config: PromptPruningConfig | CompletionPruningConfig
    seed: int

    @classmethod
    def unread(cls, config: Any) -> tuple[str, ...]:
        """Settings in `reads` that have no effect under this configuration."""
        return ()

    @property
    def name(self) -> str:
        return f"{self._level}/{self.config.method}"

    def feedback(self, cost: StepCost) -> list[str]:
        """Learn what a finished step cost; returns log lines if something changed because of it."""
        return []

    def own_state(self) -> dict[str, Any]:
        """The method's own state, without the prompt history."""
        return super().state_dict()

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)

    def state_dict(self) -> dict[str, Any]:
        return {"method": self.config.method, **self.own_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if (method := state.get("method", self.config.method)) != self.config.method:
            raise ValueError(f"the saved pruning state is of method '{method}', this run uses '{self.config.method}'")
        check_state(state, set(self.state_dict()), self.name)
        self.load_own_state({key: state[key] for key in self.own_state()})

    def _draw_along(self, ids: IntArray, pi: FloatArray, order: IntArray, step: int, minibatch: int) -> Draw:
        """Draw with the configured design in `order`; ids, [n] or [n, 2], are the key of each row's random numbers."""
        return draw(
            self.config.design,
            pi,
            order=order,
            start=float(generator(self.seed, f"{self._level} start", step, minibatch).random()),
            uniform=uniforms(self.seed, f"{self._level} coin", ids, step, minibatch),
        )

    def _ties(self, ids: IntArray, step: int, minibatch: int) -> FloatArray:
        return uniforms(self.seed, f"{self._level} tie", ids, step, minibatch)


class StepCapacity(Protocol):
    """How much fits into a step's micro-batches. Must not depend on a draw, or weights of 1/pi would be biased."""

    def microbatches(self, tokens: IntArray, inclusion_prob: FloatArray) -> int:
        """Micro-batches needed by candidates of `tokens` [n], each drawn with its probability [n]."""
        ...

    def holds(self, microbatches: int, tokens: IntArray, inclusion_prob: FloatArray, *, fixed_size: bool) -> bool:
        """Whether such a draw will fit into `microbatches`; fixed_size: the design keeps a fixed number."""
        ...


def keep_all(count: int, name: str, note: str = "", label: Label = "exact") -> Selection:
    """The selection that keeps everything: probabilities and weights are exactly 1.0."""
    ones = np.ones(count, dtype=np.float64)
    return Selection(
        kept=np.ones(count, dtype=np.bool_),
        inclusion_prob=ones,
        weight=ones.copy(),
        ledger=(LedgerRow(name, 1.0, label, note),),
        metrics=figures(ones),
    )


def figures(pi: FloatArray, at_floor: BoolArray | None = None) -> dict[str, float]:
    """`Selection.metrics` of probabilities pi [n]; at_floor None: rows with the smallest pi, if that is below 1."""
    if not len(pi):
        return {"rate_effective": 0.0, "share_at_floor": 0.0, "share_at_one": 1.0}
    if at_floor is None:
        at_floor = (pi == pi.min()) & (pi < 1)
    return {
        "rate_effective": 1.0 - float(pi.mean()),
        "share_at_floor": float(np.mean(at_floor)),
        "share_at_one": float(np.mean(pi >= 1)),
    }


def scatter(selection: Selection, order: IntArray) -> Selection:
    """A selection of sorted rows, put back into the caller's order."""
    back, redraw = np.argsort(order), selection.redraw
    return replace(
        selection,
        **{name: column[back] for name, column in selection.columns().items()},
        redraw=None if redraw is None else lambda rng, count: redraw(rng, count)[:, back],
    )


def restored(current: Any, saved: Any, where: str) -> Any:
    """The value that replaces `current`: `saved`, if it has the same form; ValueError if not."""
    if isinstance(current, Stateful):
        current.load_state_dict(saved)
        return current
    if isinstance(current, dict):
        check_state(saved, set(current), where)
        return {name: restored(value, saved[name], f"{where} '{name}'") for name, value in current.items()}
    if not isinstance(current, np.ndarray):
        return type(current)(saved)
    array = np.array(saved)
    if array.shape != current.shape or array.dtype != current.dtype:
        raise ValueError(
            f"state of {where} is {array.dtype}{array.shape}, expected {current.dtype}{current.shape}; was the prompt"
            " set changed?"
        )
    return array


def check_state(state: Mapping[str, Any], expected: set[str], owner: str) -> None:
    """Raise ValueError, with the missing and the unknown keys, unless the state has exactly the expected keys."""
    missing, unknown = sorted(expected - set(state)), sorted(set(state) - expected)
    if missing or unknown:
        raise ValueError(f"state of {owner}: missing keys {missing}, unknown keys {unknown}")


def check_outcomes(
    prompt_index: IntArray,
    rewards: FloatArray,
    lengths: IntArray,
    logit_grad_norm: FloatArray,
    *,
    in_unit: str = "",
) -> None:
    """Check groups [K, G] of the prompts [K] before anything is chosen by them; a NaN reward is a failed grading.

    One absurd number makes every probability of a step NaN, and a later message could only name an array.

    Args:
        in_unit: why rewards must be in [0, 1]; empty: they need not be.

    Raises:
        RunAborted: the engine's mistake: a completion has no tokens or invalid log-probabilities.
        UserError: the grader's: a reward is infinite, too large to be squared, or not in [0, 1].
    """
    no_norm = ~(np.isfinite(logit_grad_norm) & (logit_grad_norm >= 0))
    bad = (lengths < 1) | no_norm
    if bad.any():
        row, column = (int(i) for i in np.argwhere(bad)[0])
        why = f"has {lengths[row, column]} tokens; every completion has at least one, its stop token"
        if no_norm[row, column]:
            why = f"has invalid log-probabilities (their logit_grad_norm is {logit_grad_norm[row, column]})"
        raise RunAborted(
            f"rollout: completion {column} of prompt {prompt_index[row]} {why}. The engine's answer is bad, and nothing"
            " of this step was trained on"
        )
    check_rewards(prompt_index, rewards, in_unit)


def check_rewards(prompt_index: IntArray, rewards: FloatArray, in_unit: str) -> None:
    """The part of `check_outcomes` that is about rewards [K, G]."""
    least, most = (0.0, 1.0) if in_unit else (-LARGEST_REWARD, LARGEST_REWARD)
    outside = (rewards < least - REWARD_ROUNDING) | (rewards > most + REWARD_ROUNDING)  # both are False for a NaN
    if outside.any():
        row, column = (int(i) for i in np.argwhere(outside)[0])
        raise UserError(
            f"reward of prompt {prompt_index[row]}, completion {column} is {rewards[row, column]:g}: must be within"
            f" {least:g} and {most:g} ({in_unit or 'it is squared'}), or NaN for a failed grading; fix the grader"
            " of reward.function"
        )
