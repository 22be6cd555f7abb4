"""trace.jsonl: the outcome of every rollout of a run, small enough to keep and enough to replay a selection on.

The first line describes the run; each later line is a step. `dppo-megatron simulate` reads it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dppo_megatron.config.load import config_values
from dppo_megatron.config.schema import Config
from dppo_megatron.observe.metrics import StepTiming
from dppo_megatron.pruning.interface import PromptFeatures
from dppo_megatron.selection import Rollouts, TrainSelection

FORMAT = "dppo_megatron trace 1"


def trace_header(config: Config, set_sizes: dict[str, int], features: PromptFeatures, ranks: int = 1) -> dict[str, Any]:
    """The first line; `set_sizes` are the problems of each training set, `features` what their rows say. `ranks` the
    run begins on: with the layout they give what a step's micro-batches hold."""
    return {
        "format": FORMAT,
        "num_prompts": sum(set_sizes.values()),
        "set_sizes": set_sizes,
        "ranks": ranks,
        "config": config_values(config),
        "features": {
            "prompt_tokens": features.prompt_tokens.tolist(),
            "level": [None if np.isnan(level) else level for level in features.level.tolist()],
            "source": features.source.tolist(),
            "sources": list(features.sources),
        },
    }


def trace_row(step: int, decision: TrainSelection, rollouts: Rollouts) -> dict[str, Any]:
    """A step's line, without its seconds. Failed gradings are null; logit_grad_norm has four significant digits."""
    rewards = [[None if np.isnan(r) else float(f"{r:.6g}") for r in group] for group in rollouts.rewards]
    return {
        "step": step,
        "offered": decision.offered.tolist(),
        "prompts": decision.prompts.prompt_index.tolist(),
        "inclusion_prob": [float(f"{p:.6g}") for p in decision.prompts.inclusion_prob],
        "rewards": rewards,
        "lengths": rollouts.lengths.tolist(),
        "logit_grad_norm": [[float(f"{s:.4g}") for s in group] for group in rollouts.logit_grad_norm],
        "kept": np.flatnonzero(decision.kept).tolist(),
    }


def trace_seconds(timing: StepTiming) -> dict[str, float]:
    """A step's seconds, as its line has them."""
    return {"rollout": timing.rollout_s, "update": timing.update_s, "other": timing.other_s}
