"""The selections that the package does not have, each as its source defines it.

Functions of arrays: rewards, lengths, what earlier visits left. Where a source leaves something open, its docstring
says what is chosen here. The package's own are `dppo`, `dppo_paper`, `cppo`, `cppo_verl`, `greso`, `greso_ht`,
`infobatch`, `dynamic_sampling` and `max_variance` (docs/pruning.md).
"""

from __future__ import annotations

import numpy as np

from dppo_megatron.algorithms.advantages import group_advantages
from dppo_megatron.types import BoolArray, FloatArray, IntArray


def advantages_of(rewards: FloatArray) -> FloatArray:
    """GRPO's advantages, [groups, n]."""
    return group_advantages(rewards, divide_by_std=True, eps=1e-6)


# ------------------------------------------------------------------------------------------------- completions


def divide_by_survivors(rewards: FloatArray) -> FloatArray:
    """Weights [groups, G] of a mean over the groups with reward variance (TRL issue 6367, pull requests 6365, 6368).

    Theirs leaves the tokens of the other groups out of a token mean's divisor; this is the same for a mean over
    sequences: groups / groups with variance for every completion.
    """
    alive = rewards.max(1) > rewards.min(1)
    return np.full(rewards.shape, len(rewards) / max(int(alive.sum()), 1))


def cost_aware(advantages: FloatArray, lengths: IntArray, draws: int, rng: np.random.Generator) -> FloatArray:
    """Weights [n] of Cost-Aware GRPO (arXiv 2604.28020): draws with p proportional to |A| / sqrt(length).

    Its Cost-Aware SGD samples components with p proportional to (norm of the gradient) / sqrt(cost) and weight
    1 / (n p); |A| stands for the norm and the length for the cost. Of `draws` draws with replacement, a completion
    drawn k times has weight k / (draws p). The paper leaves open how many draws make a step.
    """
    size = np.abs(advantages) / np.sqrt(lengths)
    if not size.any():
        return np.zeros(len(size))
    prob = size / size.sum()
    counts = rng.multinomial(draws, prob)
    weight: FloatArray = counts / (draws * np.where(prob > 0, prob, 1.0))
    return weight


def pods(rewards: FloatArray, keep: int, rng: np.random.Generator) -> tuple[BoolArray, FloatArray]:
    """PODS (arXiv 2504.13818): the `keep` of G completions with the largest reward variance, and their advantages.

    The subset of the largest variance is the k lowest and the keep - k highest rewards for some k. The advantages are
    those of the subset as a group of its own, and the loss is the mean over it; the package's `max_variance` keeps the
    full group's advantages. Ties are broken at random.

    Args:
        rewards: [G].
    """
    order = np.lexsort((rng.random(len(rewards)), rewards))
    subsets = [np.concatenate([order[:k], order[len(order) - (keep - k) :]]) for k in range(keep + 1)]
    best = max(subsets, key=lambda rows: rewards[rows].var())
    kept = np.zeros(len(rewards), dtype=np.bool_)
    kept[best] = True
    advantages = np.zeros(len(rewards))
    advantages[best] = advantages_of(rewards[best][None])[0]
    return kept, advantages


# ------------------------------------------------------------------------------------------------- prompts


def vip_allocation(pass_rate: FloatArray, budget: int, low: int, high: int) -> IntArray:
    """Rollouts n_q of each prompt by VIP (arXiv 2602.01601): the least sum of v_q / n_q.

    Over n_q in [low, high] that add up to `budget`; v = p (1 - p) is its variance of one rollout's projected gradient.
    The relaxation has n_q = clip(level sqrt(v_q), low, high); it is rounded down, and the rest goes to where
    v / (n (n + 1)) is largest. The paper predicts p by a Gaussian process over embeddings; here the caller gives it.
    """
    size = np.sqrt(np.clip(pass_rate * (1 - pass_rate), 1e-12, None))
    below, above = 0.0, high / size.min()
    for _ in range(200):
        level = (below + above) / 2
        below, above = (level, above) if np.clip(level * size, low, high).sum() < budget else (below, level)
    count: IntArray = np.floor(np.clip(above * size, low, high) + 1e-9).astype(np.int64)
    while count.sum() < budget and (count < high).any():
        count[np.argmax(np.where(count < high, size**2 / (count * (count + 1)), -1.0))] += 1
    return count


def duet_allocation(spread: FloatArray, length: FloatArray, tokens: float, most: int) -> tuple[IntArray, FloatArray]:
    """Rollouts n_q and weights of DUET (arXiv 2605.08441, Haoyu-Hu/DUET): n_q = spread / sqrt(level length).

    Rounded, in [1, most], the level such that sum n_q length is `tokens`. `spread` is the standard deviation of
    A log pi(o) over a prompt's earlier rollouts. The code then multiplies advantages by 1 / p with
    p = clip(n_q / mean n, 0.05, 1), as if a prompt were rolled out with probability p; it is rolled out n_q times, with
    certainty.
    """
    low, high = -60.0, 60.0
    for _ in range(100):
        level = (low + high) / 2
        count = _duet_count(spread, length, level, most)
        low, high = (level, high) if float(count @ length) > tokens else (low, level)
    count = _duet_count(spread, length, high, most)
    return count, 1.0 / np.clip(count / max(count.mean(), 1.0), 0.05, 1.0)


def _duet_count(spread: FloatArray, length: FloatArray, log_level: float, most: int) -> IntArray:
    real = spread / np.sqrt(np.exp(log_level) * np.maximum(length, 1.0))
    count: IntArray = np.clip(np.rint(real), 1, most).astype(np.int64)
    return count


def duet_abort(
    marker: IntArray, lengths: IntArray, latest: float, keep: float, rng: np.random.Generator
) -> tuple[BoolArray, FloatArray]:
    """Aborted rollouts, and the weights of the others: DUET's rule.

    A rollout that has not written its answer's mark after `latest` tokens is stopped with probability 1 - keep, counts
    as wrong, and has no gradient; one that goes on has weight 1 / keep. `latest` is the 0.8 quantile of earlier lengths
    plus a grace of 150 of 1,024 tokens.

    Args:
        marker: token of the mark, -1 where there is none.
    """
    late = (lengths > latest) & ((marker < 0) | (marker > latest))
    spared = rng.random(late.shape) < keep
    return late & ~spared, np.where(late & spared, 1.0 / keep, 1.0)


def speed_screen(rewards: FloatArray, screening: int) -> BoolArray:
    """[prompts]: SPEED-RL (arXiv 2506.09016) goes on with a prompt if its first `screening` rollouts differ in reward.

    The others are not continued. A step is filled with prompts that pass, and trained on all of their rollouts, those
    of the screening too.
    """
    first = rewards[:, :screening]
    passes: BoolArray = first.max(1) > first.min(1)
    return passes


# ------------------------------------------------------------------------------------------------- tokens


def nat_prefix(length: int, shortest: int) -> tuple[FloatArray, FloatArray]:
    """P(cut after token t) and P(token t is kept), both [length]: NAT's random prefix (arXiv 2603.06619).

    The cut is uniform on shortest .. length; a kept token has weight 1 / P(kept), and the divisor stays the full
    length. The paper leaves the shortest prefix open: callers take a quarter, which keeps 62 % of the tokens.
    """
    cut = np.where(np.arange(1, length + 1) >= shortest, 1.0 / (length - shortest + 1), 0.0)
    return cut, np.cumsum(cut[::-1])[::-1].copy()
