"""What is recorded of a step's rollouts: a line of trace.jsonl, and for samples/ the groups and decisions about them.

trace.jsonl has the outcome of every rollout of a run, enough to replay a selection. The first line describes the run;
each later line is a step. The features of large sets are in a file of arrays beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from dppo_megatron.config.changes import flat
from dppo_megatron.config.load import config_from_values, config_values
from dppo_megatron.config.objective import is_linear_in_advantage, is_linear_off_policy, zero_advantage_slope
from dppo_megatron.config.schema import Config
from dppo_megatron.config.selection import selection_settings
from dppo_megatron.files import open_to_read, replacing
from dppo_megatron.observe.run_directory import FEATURES
from dppo_megatron.randomness import uniforms
from dppo_megatron.selection import Rollouts, TrainSelection
from dppo_megatron.selection.arrays import was_requested
from dppo_megatron.types import BoolArray, IntArray, PromptFeatures, UserError

FORMAT = "dppo_megatron trace 1"
MOST_IN_HEADER = 10_000
"""Prompts: 130 kB. A million would make a first line of 13 MB, parsed and rewritten whenever the trace is full."""
_OF_OBJECTIVE = ("advantage", "advantage_eps", "normalization", "overlong", "updates_per_step")
"""Settings of the objective that the selection reads, beside what `_read_by_selection` derives from the loss."""
_GONE = object()  # the value of a setting that only the other line has
_BYTES_A_TOKEN = 16
"""Token id and two log-probabilities (engine, actor) at 4 bytes each, and about 4 characters of text."""


def trace_header(config: Config, set_sizes: dict[str, int], features: PromptFeatures, ranks: int = 1) -> dict[str, Any]:
    """The first line. `set_sizes`: problems per training set. `features`: from the sets' rows. `ranks`: how many the
    run begins with; with the layout that determines how many tokens the micro-batches of a step hold."""
    return {
        "format": FORMAT,
        "num_prompts": sum(set_sizes.values()),
        "set_sizes": set_sizes,
        "ranks": ranks,
        "config": config_values(config),
        "features": FEATURES if len(features.level) > MOST_IN_HEADER else _columns(features, np.ndarray.tolist),
    }


def changed_since(trace: Path, header: dict[str, Any]) -> dict[str, Any]:
    """{"changed": {name: value}} for the next lines of `trace` if what the selection depends on is no longer as its
    first line has it, since a resume may permit that; else {}. Steps under several settings are not replayed together.
    """
    with open_to_read(trace) as file:
        first = file.readline()
    try:
        before, now = (_read_by_selection(one, str(trace)) for one in (msgspec.json.decode(first), header))
    except (UserError, msgspec.DecodeError, LookupError, TypeError):
        return {}  # of another version, or damaged: `read_trace` refuses it
    now["total_steps"] = before["total_steps"]  # a reader takes it from the last line
    changed = {name: now.get(name) for name in before | now if before.get(name, _GONE) != now.get(name, _GONE)}
    return {"changed": changed} if changed else {}


def _read_by_selection(header: dict[str, Any], where: str) -> dict[str, Any]:
    """What the selection of a run with this first line depends on, by dotted name."""
    settings = selection_settings(config_from_values(header["config"], where))
    values = asdict(settings) | {"sets": header["set_sizes"]}
    values["objective"] = {name: values["objective"][name] for name in _OF_OBJECTIVE}
    del values["quantized"], values["truncated"]  # these decide labels of what no replay has
    of_loss = {  # which decide the ledger's labels
        "slope at advantage 0": zero_advantage_slope(settings.objective),
        "linear in the advantage": is_linear_in_advantage(settings.objective),
        "linear off policy": is_linear_off_policy(settings.objective),
        "own code": settings.objective.has_own_code,
    }
    return flat(values) | of_loss


def write_features(directory: Path, features: PromptFeatures) -> None:
    """Write the features' file, if the header only names it. Raises OSError."""
    if len(features.level) > MOST_IN_HEADER:
        with replacing(directory / FEATURES) as file:
            np.savez(file, **_columns(features))


def _columns(features: PromptFeatures, form: Callable[[np.ndarray[Any, Any]], Any] = np.asarray) -> dict[str, Any]:
    return {one.name: form(np.asarray(getattr(features, one.name))) for one in fields(features)}


def trace_row(step: int, decision: TrainSelection, rollouts: Rollouts) -> dict[str, Any]:
    """A step's line, without its seconds. Failed gradings are null; logit_grad_norm has four significant digits."""
    sizes = decision.prompts.size.tolist()
    rewards = [[None if np.isnan(r) else float(f"{r:.6g}") for r in row] for row in _requested(rollouts.rewards, sizes)]
    return {
        "step": step,
        "offered": decision.offered.tolist(),
        "prompts": decision.prompts.prompt_index.tolist(),
        "inclusion_prob": [float(f"{p:.6g}") for p in decision.prompts.inclusion_prob],
        "rewards": rewards,
        "lengths": [row.tolist() for row in _requested(rollouts.lengths, sizes)],
        "logit_grad_norm": [[float(f"{s:.4g}") for s in row] for row in _requested(rollouts.logit_grad_norm, sizes)],
        "kept": np.flatnonzero(decision.kept[was_requested(rollouts, decision.prompts.size).ravel()]).tolist(),
    }


def _requested(table: np.ndarray[Any, Any], sizes: Sequence[int]) -> list[np.ndarray[Any, Any]]:
    """The rows of [K, G], each shortened to its group's requested completions."""
    return [row[:size] for row, size in zip(table, sizes, strict=True)]


def decided(config: Config, step: int, decision: TrainSelection, rollouts: Rollouts) -> dict[int, tuple[Any, ...]]:
    """Index in the step of each recorded group -> the decisions about its completions: the fields of `RecordedGroup`
    after `group`. Sent to all ranks, since the texts are on the ranks that hold the groups."""
    flat = (decision.advantages, decision.completion_prob, decision.weight, decision.kept)
    columns = [part.reshape(rollouts.rewards.shape) for part in flat]
    why = reasons_of(config, decision, rollouts).reshape(rollouts.rewards.shape)
    groups = recorded_groups(config, step, decision.prompts.prompt_index, rollouts).tolist()
    ends = decision.prompts.size
    return {
        one: (*(column[one, : ends[one]] for column in columns), tuple(why[one, : ends[one]].tolist()))
        for one in groups
    }


def recorded_groups(config: Config, step: int, prompt_index: IntArray, rollouts: Rollouts) -> IntArray:
    """[R] sorted indices of the recorded groups, in the order of their draws, until the step's size limit is reached.

    Args:
        prompt_index: [K].

    Example: share 0.5, prompts [7, 9, 4], their draws [0.8, 0.1, 0.3] -> groups [1, 2]; with room for one -> [1].
    """
    settings = config.observe.samples
    drawn = uniforms(config.seed, "samples", prompt_index, step)
    order = np.argsort(drawn)
    order = order[drawn[order] < settings.share]
    sizes = _BYTES_A_TOKEN * rollouts.lengths.sum(axis=1)
    if rollouts.prompt_tokens is not None:
        sizes = sizes + _BYTES_A_TOKEN * rollouts.prompt_tokens
    fits = np.cumsum(sizes[order]) <= settings.max_mb_per_step * 1e6
    return np.asarray(np.sort(order[fits]))


def reasons_of(
    config: Config, decision: TrainSelection, rollouts: Rollouts
) -> np.ndarray[tuple[int], np.dtype[np.str_]]:
    """[K * G] one word for why each completion was kept or not (docs/run_directory.md lists them).

    A policy reports the probability with which it keeps a completion, not the reason. A probability between the floor
    and 1 is attributed to the score, and one of 0 to the rank: then a fixed rule dropped the completion.
    """
    truncated: BoolArray = np.zeros(decision.kept.shape, dtype=np.bool_)
    if config.objective.overlong.filter:
        limit = config.rollout.sampling.max_completion_tokens
        truncated = (rollouts.lengths >= limit if rollouts.truncated is None else rollouts.truncated).ravel()
    prob = decision.completion_prob * rollouts.counted(np.ones(rollouts.rewards.shape)).ravel()  # given that it ended
    not_drawn = np.isnan(prob)
    failed = np.isnan(rollouts.rewards.ravel()) & ~decision.kept
    unfinished = failed & (False if rollouts.unfinished is None else rollouts.unfinished.ravel())
    floor = config.pruning.completion.min_inclusion_prob
    # with a KL or entropy term, completions of advantage 0 have a gradient too, so a draw may have kept them
    without_gradient = (decision.advantages == 0) & (zero_advantage_slope(config.objective) == 0)
    conditions = [
        (rollouts.stopped.ravel(), "stopped early"),
        (unfinished, "missing"),
        (failed, "failed"),
        (not_drawn & truncated, "overlong"),
        (not_drawn, "group"),
        (~decision.kept & without_gradient, "zero advantage"),
        (prob >= 1, "certain"),
        (prob <= 0, "rank"),
        (prob <= floor * (1 + 1e-9), "floor"),
    ]
    return np.select([mask for mask, _ in conditions], [word for _, word in conditions], "score")
