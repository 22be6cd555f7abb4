"""Settings of evaluation: when, and how the sets are sampled unless a set says otherwise."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dppo_megatron.config.data import eval_set_configs, longest_prompt_tokens
from dppo_megatron.types import UserError

if TYPE_CHECKING:  # the schema imports this module
    from dppo_megatron.config.schema import Config

from dppo_megatron.config.ranges import COUNT, ranged


@dataclass
class EvalConfig:
    every_steps: int = ranged(0, COUNT)
    """Evaluate every so many steps, beside the one before and the one after training; 0: only those two."""
    samples: int = ranged(1, "[1, 65536]")
    """Completions of every problem."""
    temperature: float = ranged(0.0, "[0, 100]")
    """0 is greedy."""
    top_p: float = ranged(1.0, "(0, 1]")
    """Smallest set of tokens with this probability."""
    top_k: int = ranged(0, "[0, 10000000]")
    """The k most likely tokens; 0: all."""
    max_completion_tokens: int = ranged(0, "[0, 100000000]")
    """Longest answer; 0: as rollout.sampling.max_completion_tokens."""


def check_evaluation(config: Config) -> None:
    """Raise `UserError` for the first setting of `eval`, or of a set in `data.eval_sets`, that is out of range."""
    _check_sampling("eval", config.eval)
    if not math.isfinite(config.reward.correct_from):
        raise UserError(f"reward.correct_from = {config.reward.correct_from}: must be a finite reward")
    for settings in eval_set_configs(config).values():
        _check_sampling(settings.key, settings)


def _check_sampling(where: str, settings: object) -> None:
    """`settings` has EvalConfig's names, none of them null."""
    ranges = {
        "samples": (1, math.inf, "must be at least 1"),
        "temperature": (0.0, 100.0, "must be 0 (greedy) or above, and at most 100"),
        "top_p": (1e-9, 1.0, "must be above 0 and at most 1"),
        "top_k": (0, math.inf, "must not be negative"),
        "max_completion_tokens": (0, math.inf, "must not be negative"),
    }
    for name, (least, most, text) in ranges.items():
        value = getattr(settings, name)
        if not least <= value <= most:
            raise UserError(f"{where}.{name} = {value}: {text}")


def longest_sequence(config: Config) -> tuple[int, str]:
    """Tokens of the longest prompt with the longest completion, of training and every evaluation set; and whose."""
    found: list[tuple[int, str]] = []
    for name, settings in eval_set_configs(config).items():
        tokens = settings.max_prompt_tokens + settings.max_completion_tokens
        found.append((tokens, f"max_prompt_tokens + max_completion_tokens of evaluation set '{name}'"))
    if not found or config.data.train_path or config.data.train_sets:  # else an evaluation alone
        own = longest_prompt_tokens(config, training=True) + config.rollout.sampling.max_completion_tokens
        found.insert(0, (own, "data.max_prompt_tokens + rollout.sampling.max_completion_tokens"))
    return max(found, key=lambda item: item[0])
