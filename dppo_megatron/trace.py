"""trace.jsonl: the outcome of every rollout of a run, small enough to keep and enough to replay a selection on.

The first line describes the run; each later line is a step. `dppo-megatron simulate` reads it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from dppo_megatron.config.load import config_from_values, config_values
from dppo_megatron.config.paths import check_file, json_reason
from dppo_megatron.config.schema import Config
from dppo_megatron.pruning.interface import PromptFeatures
from dppo_megatron.selection import Decision, Rollouts
from dppo_megatron.types import BoolArray, FloatArray, IntArray, UserError, Watch, counted, unwatched

_FORMAT = "dppo_megatron trace 1"


@dataclass(frozen=True, slots=True)
class TracedStep:
    """One step of a trace."""

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
    """A whole trace."""

    config: Config
    num_prompts: int
    set_sizes: dict[str, int] | None
    """Problems of each training set; None in older traces, of one set."""
    features: PromptFeatures | None
    """What the prompts' rows say; None in older traces."""
    steps: list[TracedStep]


def trace_header(config: Config, set_sizes: dict[str, int], features: PromptFeatures) -> dict[str, Any]:
    """The first line; `set_sizes` are the problems of each training set, `features` what their rows say."""
    return {
        "format": _FORMAT,
        "num_prompts": sum(set_sizes.values()),
        "set_sizes": set_sizes,
        "config": config_values(config),
        "features": {
            "prompt_tokens": features.prompt_tokens.tolist(),
            "level": [None if np.isnan(level) else level for level in features.level.tolist()],
            "source": features.source.tolist(),
            "sources": list(features.sources),
        },
    }


def trace_row(step: int, decision: Decision, rollouts: Rollouts) -> dict[str, Any]:
    """A step's line, without its seconds. Failed gradings are null; surprisal has four significant digits."""
    rewards = [[None if np.isnan(r) else float(f"{r:.6g}") for r in group] for group in rollouts.rewards]
    return {
        "step": step,
        "offered": decision.offered.tolist(),
        "prompts": decision.prompts.prompt_index.tolist(),
        "inclusion_prob": [float(f"{p:.6g}") for p in decision.prompts.inclusion_prob],
        "rewards": rewards,
        "lengths": rollouts.lengths.tolist(),
        "surprisal": [[float(f"{s:.4g}") for s in group] for group in rollouts.surprisal],
        "kept": np.flatnonzero(decision.kept).tolist(),
    }


def trace_seconds(metrics: dict[str, Any]) -> dict[str, float]:
    """A step's seconds, grouped by what they scale with."""
    rollout = metrics["time/rollout_s"] + metrics["time/reward_s"]
    update = metrics["time/update_s"]
    return {"rollout": rollout, "update": update, "other": max(0.0, metrics["time/step_s"] - rollout - update)}


def read_trace(path: str, watch: Watch = unwatched) -> Trace:
    """Read a trace file.

    Args:
        watch: shows how many steps have been read.

    Raises:
        UserError: no such file, not a trace, a broken line (named), or no steps.
    """
    check_file("trace", path)
    rows = []
    with open(path, "rb") as file, watch(f"reading {path}", 0, "lines") as advance:
        for number, line in enumerate(counted(file, advance), start=1):
            try:
                rows.append(json.loads(line))
            except (ValueError, RecursionError) as error:  # UnicodeDecodeError included
                raise UserError(f"{path}:{number}: not valid JSON: {json_reason(error)}") from None
            if not isinstance(rows[-1], dict):
                raise UserError(f"{path}:{number}: not a JSON object")
    if not rows or rows[0].get("format") != _FORMAT:
        raise UserError(
            f"trace '{path}': does not begin with a line of format '{_FORMAT}'; name the trace.jsonl of a run"
        )
    if len(rows) == 1:
        raise UserError(f"trace '{path}': holds no steps")
    try:
        config = config_from_values(rows[0]["config"], where=path)
        head, steps = rows[0], [_read_step(row) for row in rows[1:]]
        return Trace(config, head["num_prompts"], head.get("set_sizes"), _read_features(head), steps)
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise UserError(f"trace '{path}': a step lacks or garbles a field: {error}") from None


def _read_features(head: dict[str, Any]) -> PromptFeatures | None:
    values = head.get("features")
    if values is None:
        return None
    features = PromptFeatures(
        prompt_tokens=np.array(values["prompt_tokens"], dtype=np.int64),
        level=np.array(values["level"], dtype=np.float64),  # null becomes NaN
        source=np.array(values["source"], dtype=np.int64),
        sources=tuple(values["sources"]),
    )
    if not len(features.prompt_tokens) == len(features.level) == len(features.source) == head["num_prompts"]:
        raise ValueError("the features are not of as many prompts as there are")
    return features


def _read_step(row: dict[str, Any]) -> TracedStep:
    rewards: FloatArray = np.array(row["rewards"], dtype=np.float64)  # null becomes NaN
    lengths = np.array(row["lengths"], dtype=np.int64)
    kept = np.zeros(rewards.size, dtype=np.bool_)
    kept[row["kept"]] = True
    return TracedStep(
        step=row["step"],
        prompt_index=np.array(row["prompts"], dtype=np.int64),
        rollouts=Rollouts(rewards, lengths, np.array(row["surprisal"], dtype=np.float64)),
        kept=kept,
        seconds=row["seconds"],
    )
