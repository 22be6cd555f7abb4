"""Random samples of a training step, for measurements that need no rollout."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dppo_megatron.types import TrainSample


@dataclass(frozen=True, slots=True)
class SampleLengths:
    """A step's samples: prompts of uniform length, completions of log-normal length, clipped.

    That is what rollouts of reasoning models look like, and padding to the longest is cheap only for lengths that real
    batches do not have.
    """

    samples: int
    median_tokens: float
    sigma: float
    max_tokens: int
    prompt_tokens: tuple[int, int] = (16, 64)
    """Shortest and longest prompt."""


def random_samples(lengths: SampleLengths, vocab_size: int, seed: int = 0) -> list[TrainSample]:
    """Random tokens with GRPO's denominators (samples * completion length) and weight 1.

    Behaviour log-probabilities are spread around those of a uniform policy, which a model with random weights nearly
    is, widely enough that some tokens are clipped.
    """
    rng = np.random.default_rng(seed)
    drawn = lengths.median_tokens * np.exp(lengths.sigma * rng.normal(size=lengths.samples))
    completions = np.clip(drawn.astype(np.int64), 1, lengths.max_tokens)
    prompts = rng.integers(lengths.prompt_tokens[0], lengths.prompt_tokens[1] + 1, lengths.samples)
    return [
        TrainSample(
            id=f"{i}:0",
            token_ids=rng.integers(0, vocab_size, prompt + completion),
            num_prompt_tokens=int(prompt),
            behaviour_logprobs=(-np.log(vocab_size) + 0.3 * rng.normal(size=completion)).astype(np.float32),
            advantage=float(rng.normal()),
            weight=1.0,
            denominator=float(lengths.samples * completion),
        )
        for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True))
    ]
