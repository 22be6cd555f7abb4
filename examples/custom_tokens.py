"""Custom advantages for each token: repetitions within a completion earn less; or a baseline for each token.

    dppo-megatron train configs/quickstart.yaml objective.token_values=examples.custom_tokens:repeats
    dppo-megatron train configs/quickstart.yaml objective.token_values=examples.custom_tokens:survivors \
        objective.advantage=rloo objective.normalization=constant objective.zero_advantage_slope=0.1

The function is called by the rank that sampled a completion, once pruning has kept it.
"""

import numpy as np

from dppo_megatron.algorithms.token_values import TokenValues
from dppo_megatron.types import Group


def repeats(group: Group, place: int, advantage: float) -> TokenValues:
    """Half of the advantage where the last four tokens have occurred before; 1.5 times a negative advantage there.

    Where the advantage is 0, so is the result: pruning assumes that such completions have no gradient.
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
    """The reward minus the mean reward of the mates that were at least as long at that token: if long answers are
    mostly wrong, a wrong long one is no surprise.

    The baseline knows only that the completion reached the token, so the expected gradient is that of `rloo`; not if
    the token sum is divided by the completion's length, nor with `objective.overlong.buffer_tokens`, whose penalty is
    not in the group's rewards, nor with early stops, as only short ones end by themselves. It is not 0 where a
    reward equals its mates' mean, so `zero_advantage_slope` is needed. `simulate --roulette` predicts the gain of such
    a baseline: on recorded runs nothing (docs/choosing.md).
    """
    lengths = np.array([len(one.token_ids) for one in group.completions])
    mates = ~np.isnan(group.rewards) & (np.arange(len(lengths)) != place)
    left = mates & (lengths > np.arange(lengths[place])[:, None])  # [tokens, completions]
    left[~left.any(axis=1)] = mates
    means = (left * np.where(mates, group.rewards, 0.0)).sum(axis=1) / left.sum(axis=1)
    return TokenValues(advantages=group.rewards[place] - means)
