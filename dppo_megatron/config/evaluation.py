"""Settings of evaluation: when, and how the sets are sampled unless a set says otherwise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dppo_megatron.config.data import eval_set_configs, longest_prompt_tokens

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


def longest_sequence(config: Config) -> tuple[int, str]:
    """Longest prompt plus completion, in tokens, over training and all evaluation sets, and the set it belongs to."""
    found: list[tuple[int, str]] = []
    for name, settings in eval_set_configs(config).items():
        tokens = settings.max_prompt_tokens + settings.max_completion_tokens
        found.append((tokens, f"max_prompt_tokens + max_completion_tokens of evaluation set '{name}'"))
    if not found or config.data.train_path or config.data.train_sets:  # not in a standalone evaluation
        own = longest_prompt_tokens(config, training=True) + config.rollout.sampling.max_completion_tokens
        found.insert(0, (own, "data.max_prompt_tokens + rollout.sampling.max_completion_tokens"))
    return max(found, key=lambda item: item[0])
