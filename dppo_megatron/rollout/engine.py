"""What the loop asks of a generation engine. Token ids in, token ids out: text is never tokenized twice."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from dppo_megatron.types import Completion, Prompt


@dataclass(frozen=True, slots=True)
class Request:
    """One completion to sample."""

    prompt: Prompt
    completion_index: int
    step: int
    """With the prompt and completion index, the key of the random numbers that this completion consumes."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample; the same meaning on every engine."""

    max_completion_tokens: int
    temperature: float
    """0 is greedy."""
    seed: int


class Engine(Protocol):
    """A generator whose weights follow the actor's."""

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Replace all weights. `tensors` yields every (Hugging Face name, full tensor) once."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """One completion for each request, in the order of `requests`."""
