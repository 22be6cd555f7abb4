"""Advantages of one's own for each token: what a completion says again earns less; or a baseline for each token.

    dppo-megatron train configs/quickstart.yaml objective.token_values=examples.custom_tokens:repeats
    dppo-megatron train configs/quickstart.yaml objective.token_values=examples.custom_tokens:survivors \
        objective.advantage=rloo objective.normalization=constant objective.zero_advantage_slope=0.1

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


def survivors(group: Group, place: int, advantage: float) -> TokenValues:
    """The reward less the mean of those mates that were at least as long: a long answer that is mostly wrong is no
    surprise there.

    It knows of the completion only that it got to its token, so the expected gradient is `rloo`'s; not where the token
    sum is divided by the completion's length, nor with `objective.overlong.buffer_tokens`, whose penalty is not in the
    group's rewards, nor with early stops, whose ends are the short ones. It is not 0 where a reward is its mates' mean,
    so `zero_advantage_slope` is needed. `simulate --roulette` says what such a baseline would gain: on recorded runs
    nothing (docs/choosing.md).
    """
    lengths = np.array([len(one.token_ids) for one in group.completions])
    mates = ~np.isnan(group.rewards) & (np.arange(len(lengths)) != place)
    left = mates & (lengths > np.arange(lengths[place])[:, None])  # [tokens, completions]
    left[~left.any(axis=1)] = mates
    means = (left * np.where(mates, group.rewards, 0.0)).sum(axis=1) / left.sum(axis=1)
    return TokenValues(advantages=group.rewards[place] - means)
