"""Reads trace.jsonl. A figure computed from a garbled outcome looks like any other, so every line must have the types,
shapes and ranges that the trainer writes (`steps/trace.py`)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec
import numpy as np

from dppo_megatron.config.load import config_from_values
from dppo_megatron.config.paths import check_file, json_reason
from dppo_megatron.config.ranges import check_ranges
from dppo_megatron.config.schema import Config
from dppo_megatron.config.selection import selection_settings
from dppo_megatron.observe.run_directory import FEATURES
from dppo_megatron.progress import counted, progress
from dppo_megatron.selection import Rollouts
from dppo_megatron.steps.trace import FORMAT
from dppo_megatron.types import BoolArray, FloatArray, IntArray, PromptFeatures, UserError

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class TracedStep:
    step: int
    prompt_index: IntArray
    """[K] prompts that were rolled out."""
    rollouts: Rollouts
    """Their outcomes, [K, G]."""
    kept: BoolArray
    """[K * G] which completions were trained on."""
    seconds: dict[str, float]
    """`rollout` (with grading), `update` and `other`."""


@dataclass(frozen=True, slots=True)
class Trace:
    config: Config
    num_prompts: int
    set_sizes: dict[str, int] | None
    """Problems of each training set; None: they are one set."""
    features: PromptFeatures | None
    """From the prompts' rows; None: there are none."""
    steps: list[TracedStep]
    ranks: int = 1


def decoded(line: bytes, kind: type[_T], where: str) -> _T:
    """A line as msgspec reads it, which accepts neither NaN nor a number in quotes. Raises UserError if it is not as
    `kind` says; the message begins with `where`, such as `path:line`."""
    try:
        return msgspec.json.decode(line, type=kind)
    except msgspec.ValidationError as error:
        raise UserError(f"{where}: not as a run writes it: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{where}: not valid JSON: {json_reason(error)}") from None


def read_trace(path: str) -> Trace:
    """Read a whole trace. Raises UserError: no such file, not a trace, a broken line (named), or no steps."""
    if os.path.isfile(os.path.join(path, "trace.jsonl")):  # not Path's, which raises for a name that is too long
        raise UserError(f"trace = '{path}': is a run; give its file, {path}/trace.jsonl")
    check_file("trace", path)
    with open(path, "rb") as file, progress(f"reading {path}", 0, "lines") as advance:
        lines = counted(file, advance)
        first = next(iter(lines), b"")
        raw = decoded(first or b"{}", object, f"{path}:1")
        if not isinstance(raw, dict) or raw.get("format") != FORMAT:
            raise UserError(
                f"trace '{path}': does not begin with a line of format '{FORMAT}'; name a run's trace.jsonl"
            )
        head = decoded(first, _HeaderLine, f"{path}:1")
        config = _read_config(head, path)
        group_size, steps = config.rollout.completions_per_prompt, list[TracedStep]()
        for number, line in enumerate(lines, start=2):
            row = decoded(line, _TraceLine, f"{path}:{number}")
            if row.changed:
                now = ", ".join(f"{name} = {value}" for name, value in row.changed.items())
                left = "but a copy that ends before this line can" if steps else "and no earlier step is left"
                raise UserError(
                    f"{path}:{number}: step {row.step} was made after a resume with other settings than the first line"
                    f" has: {now}; they cannot be replayed together, {left}"
                )
            try:
                steps.append(_step(row, head.num_prompts, group_size, steps[-1].step if steps else 0))
            except ValueError as error:
                raise UserError(f"{path}:{number}: {error}") from None
    if not any(step.rollouts.lengths.any() for step in steps):
        raise UserError(f"trace '{path}': holds no {'outcomes' if steps else 'steps'}")
    config.steps = max(config.steps, steps[-1].step)  # a resume may extend the run, but does not change the first line
    return Trace(config, head.num_prompts, head.set_sizes, _features(head, path), steps, head.ranks)


_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
_Some: TypeAlias = Annotated[int, msgspec.Meta(ge=1, lt=2**40)]
_Tokens: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=2**40)]
_Amount: TypeAlias = Annotated[float, msgspec.Meta(ge=0.0, le=1e12)]


class _Features(msgspec.Struct):
    prompt_tokens: list[_Count]
    level: list[float | None]
    source: list[_Count]
    sources: list[str]


class _HeaderLine(msgspec.Struct):
    num_prompts: _Some
    config: dict[str, Any]
    set_sizes: dict[str, _Some]
    features: _Features | str
    """A text if they are in the file beside the trace."""
    ranks: _Some


class _Seconds(msgspec.Struct):
    rollout: _Amount
    update: _Amount
    other: _Amount


class _TraceLine(msgspec.Struct):
    """The fields of a step's line that are read."""

    step: _Some
    prompts: list[_Count]
    rewards: list[list[Annotated[float, msgspec.Meta(ge=-1e12, le=1e12)] | None]]  # squares have to fit a float32
    lengths: list[list[_Tokens]]
    logit_grad_norm: list[list[_Amount]]
    kept: list[_Count]
    seconds: _Seconds
    changed: dict[str, Any] = {}
    """Settings of the selection that are no longer as in the first line."""


def _read_config(head: _HeaderLine, path: str) -> Config:
    config = config_from_values(head.config, where=path)
    try:
        check_ranges(config)
    except UserError as error:
        raise UserError(f"trace '{path}': {error}") from None
    if (factor := selection_settings(config).group_size_factor) > 1:
        raise UserError(
            f"trace '{path}': its run had pruning.prompt.group_size_factor = {factor:g}, and groups of several sizes"
            " are not replayed; record one with 1"
        )
    if after := config.pruning.early_stop.after_tokens:
        raise UserError(
            f"trace '{path}': its run had pruning.early_stop.after_tokens = {after}, and the outcomes of the"
            " completions that it stopped are unknown; record one with 0"
        )
    config.pruning.prompt.group_size_factor = 1.0  # the run's method ignored it, but another method would use it
    if too_few := selection_settings(config).too_few_prompts(head.num_prompts, f"trace '{path}'"):
        raise UserError(f"rollout.{too_few}")
    if sum(head.set_sizes.values()) != head.num_prompts:
        raise UserError(f"{path}:1: set_sizes do not add up to num_prompts = {head.num_prompts}")
    return config


def _features(head: _HeaderLine, path: str) -> PromptFeatures:
    where, features = f"{path}:1: features", head.features
    try:
        if isinstance(features, str):
            where = str(Path(path).with_name(FEATURES))
            with np.load(where, allow_pickle=False) as file:
                features = msgspec.convert({name: array.tolist() for name, array in file.items()}, _Features)
    except Exception as error:  # numpy raises many types for damaged files
        reason = getattr(error, "strerror", "") or "it is damaged"
        raise UserError(f"trace '{path}': {where}, which belongs to it, cannot be read: {reason}") from None
    if {len(features.prompt_tokens), len(features.level), len(features.source)} != {head.num_prompts}:
        raise UserError(f"{where}: must be of {head.num_prompts} prompts")
    if max(features.source) >= len(features.sources):
        raise UserError(f"{where}: there are only {len(features.sources)} sources")
    level = np.array(features.level, dtype=np.float64)  # None becomes NaN
    return PromptFeatures(np.array(features.prompt_tokens), level, np.array(features.source), tuple(features.sources))


def _step(row: _TraceLine, num_prompts: int, group_size: int, step_before: int) -> TracedStep:
    """A step from its line. Raises ValueError for mistakes that the types of the fields do not exclude."""
    if row.step <= step_before:
        raise ValueError(f"step {row.step} follows step {step_before}")
    if any(prompt >= num_prompts for prompt in row.prompts):
        raise ValueError(f"prompts: there are only {num_prompts}")
    shape = len(row.prompts), group_size

    def of_groups(name: str) -> FloatArray:
        groups = getattr(row, name)
        if len(groups) != shape[0] or any(len(group) != group_size for group in groups):
            raise ValueError(
                f"{name}: must be {shape[0]} groups of {group_size}, as the trace began with; steps after a change of"
                " rollout.completions_per_prompt cannot be replayed together with those before it"
            )
        return np.array(groups, dtype=np.float64).reshape(shape)  # null becomes NaN

    rollouts = Rollouts(of_groups("rewards"), of_groups("lengths").astype(np.int64), of_groups("logit_grad_norm"))
    if (~np.isnan(rollouts.rewards) & (rollouts.lengths == 0)).any():
        raise ValueError("lengths: a completion that has a reward has its stop token at least")
    if len(set(row.kept)) < len(row.kept) or any(one >= rollouts.rewards.size for one in row.kept):
        raise ValueError(f"kept: must be different places among {rollouts.rewards.size} completions")
    kept = np.isin(np.arange(rollouts.rewards.size), row.kept)
    seconds = msgspec.structs.asdict(row.seconds)
    return TracedStep(row.step, np.array(row.prompts, dtype=np.int64), rollouts, kept, seconds)
