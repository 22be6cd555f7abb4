"""Advantages of one's own for each token: what a completion says again earns less.

    dppo-megatron train configs/quickstart.yaml objective.token_values=examples.custom_tokens:repeats

The rank that has sampled a completion asks, once pruning has kept it.
"""

import numpy as np

from dppo_megatron.algorithms.token_values import TokenValues
from dppo_megatron.types import Group


def repeats(group: Group, place: int, advantage: float) -> TokenValues:
    """Half of the advantage where four tokens in a row have come before; of a wrong completion, half as much again.

    Where the advantage is 0 so is what it returns, as pruning has it that such completions have no gradient.
    """
    ids = group.completions[place].token_ids.tolist()
    seen: set[tuple[int, ...]] = set()
    factors = np.ones(len(ids))
    for end in range(4, len(ids) + 1):
        four = tuple(ids[end - 4 : end])
        if four in seen:
            factors[end - 1] = 0.5 if advantage > 0 else 1.5
        seen.add(four)
    return TokenValues(advantages=advantage * factors)
