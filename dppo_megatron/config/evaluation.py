"""Settings of evaluation: when, and how the sets are sampled unless a set says otherwise."""

from __future__ import annotations

from dataclasses import dataclass

from dppo_megatron.config.ranges import COUNT, ranged


@dataclass
class EvalConfig:
    page = "evaluation.md"
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
