"""Which prompts come next: a fresh shuffle every epoch, computed from a position alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from dppo_megatron.randomness import generator
from dppo_megatron.types import IntArray


@dataclass(frozen=True, slots=True)
class PromptOrder:
    """An endless stream of shuffled epochs over `num_prompts`, addressed by position."""

    num_prompts: int
    seed: int

    def take(self, position: int, count: int) -> tuple[IntArray, int]:
        """The next `count` <= num_prompts indices [count] int64, and the position behind them.

        Always from one epoch, so that no prompt comes twice: what is too little at the end of an epoch waits for
        the next shuffle.
        """
        epoch, offset = divmod(position, self.num_prompts)
        if offset + count > self.num_prompts:
            epoch, offset = epoch + 1, 0
        taken = _shuffle(self.num_prompts, self.seed, epoch)[offset : offset + count]
        return taken, epoch * self.num_prompts + offset + count


@lru_cache(maxsize=2)
def _shuffle(num_prompts: int, seed: int, epoch: int) -> IntArray:
    permutation: IntArray = generator(seed, "order", epoch).permutation(num_prompts).astype(np.int64)
    return permutation
