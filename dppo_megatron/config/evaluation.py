"""Settings of evaluation: when, and how the sets are sampled unless a set says otherwise."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class EvalConfig:
    every_steps: int = 0
    """Evaluate every so many steps, beside the one before and the one after training; 0: only those two."""
    samples: int = 1
    """Completions of every problem."""
    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    """Smallest set of tokens with this probability."""
    top_k: int = 0
    """The k most likely tokens; 0: all."""
    max_completion_tokens: int = 0
    """Longest answer; 0: as rollout.max_completion_tokens."""
