"""Group-relative advantages, the reward shaping before them, and the frozen divisors of token sums.

Computed from the full group before anything is pruned: on the survivors the estimator would be nonlinear in the
selection. Rewards and advantages are [groups, G] float64; a reward is NaN if the grader failed.
"""

from __future__ import annotations

import numpy as np

from dppo_megatron.config.objective import ObjectiveConfig, OverlongConfig
from dppo_megatron.types import FloatArray, IntArray


def overlong_penalty(lengths: IntArray, config: OverlongConfig, max_completion_tokens: int) -> FloatArray:
    """The amount added to the reward for length: DAPO's soft overlong punishment (arXiv 2503.14476 eq. 13), any shape.

    0 up to max_completion_tokens - buffer_tokens, then linear down to -penalty at max_completion_tokens.
    """
    if config.buffer_tokens == 0:
        return np.zeros(lengths.shape)
    exceeding = lengths - (max_completion_tokens - config.buffer_tokens)
    return np.asarray(-config.penalty * np.clip(exceeding / config.buffer_tokens, 0.0, 1.0))


def make_advantages(
    rewards: FloatArray,
    config: ObjectiveConfig,
    group_weights: FloatArray | None = None,
    *,
    lengths: IntArray | None = None,
    prior: FloatArray | None = None,
    stands_for: FloatArray | None = None,
    penalty: FloatArray | None = None,
) -> FloatArray:
    """The advantages of `config.advantage`.

    Args:
        rewards: as graded, without `penalty`: the prior describes graded rewards.
        group_weights: [groups] weight that undoes the selection of each group's prompt, for statistics over the step;
            None: nothing was skipped.
        lengths, prior: as for `posterior_advantages` and `early_stop_advantages`; without a prior its mean is 1/2.
        stands_for: as for `early_stop_advantages`, which is used if this is not None.
        penalty: [groups, G] of each completion's length, added to its reward.
    """
    if stands_for is not None or config.advantage == "posterior_loo":
        known = np.full((len(rewards), 2), 0.5) if prior is None else prior
        counts = np.ones(rewards.shape) if stands_for is None else stands_for
        by_length = lengths if config.normalization == "sequence_mean" else None
        to_posterior = config.advantage == "posterior_loo"
        advantages = early_stop_advantages(rewards, counts, known, by_length, to_posterior=to_posterior)
        if penalty is None:
            return advantages
        # The prior does not cover penalties: they get the others' mean alone as baseline, with u = 0 for stopped ones.
        penalties = np.where(np.isnan(rewards), np.nan, penalty)
        return np.asarray(advantages + early_stop_advantages(penalties, counts, np.tile([0.0, 1.0], (len(rewards), 1))))
    rewards = rewards if penalty is None else rewards + penalty
    if config.advantage == "rloo":
        return rloo_advantages(rewards)
    if config.advantage == "reinforce_baseline":
        weights = np.ones(len(rewards)) if group_weights is None else group_weights
        return whitened_advantages(rewards, weights, eps=config.advantage_eps)
    return group_advantages(rewards, divide_by_std=config.advantage == "group_std", eps=config.advantage_eps)


def group_advantages(rewards: FloatArray, *, divide_by_std: bool, eps: float) -> FloatArray:
    """Rewards minus their group's mean; with `divide_by_std` divided by (their standard deviation + eps).

    `divide_by_std=True` is GRPO (arXiv 2402.03300, eq. 3 with the population standard deviation); False is
    Dr.GRPO (arXiv 2503.20783). A completion whose grader failed (NaN) is excluded from the statistics and gets
    advantage 0. A group of one, or with equal rewards, has advantage exactly 0.
    """
    graded = ~np.isnan(rewards)
    count = np.maximum(graded.sum(axis=1, keepdims=True), 1)
    values = np.where(graded, rewards, 0.0)
    centred = np.where(graded, values - values.sum(axis=1, keepdims=True) / count, 0.0)
    low = np.where(graded, rewards, np.inf).min(axis=1, keepdims=True)
    high = np.where(graded, rewards, -np.inf).max(axis=1, keepdims=True)
    centred = np.where(high > low, centred, 0.0)  # or equal rewards would give a rounding error divided by eps
    if not divide_by_std:
        return centred
    # in units of the largest deviation, so that squares neither overflow nor underflow
    largest = np.abs(centred).max(axis=1, keepdims=True, initial=0.0)
    unit = np.where(largest > 0, largest, 1.0)
    std = unit * np.sqrt(np.square(centred / unit).sum(axis=1, keepdims=True) / count)
    return np.asarray(centred / np.where(largest > 0, std + eps, 1.0))


def rloo_advantages(rewards: FloatArray) -> FloatArray:
    """Each reward minus the mean of the group's other rewards: leave-one-out (RLOO, arXiv 2402.14740 eq. 8).

    It equals the group-centred reward times n / (n - 1), n the graded completions of the group. NaN and groups with
    equal rewards as in `group_advantages`.
    """
    graded = (~np.isnan(rewards)).sum(axis=1, keepdims=True)
    return np.asarray(group_advantages(rewards, divide_by_std=False, eps=0.0) * graded / np.maximum(graded - 1, 1))


def posterior_advantages(rewards: FloatArray, prior: FloatArray, lengths: IntArray | None = None) -> FloatArray:
    """Each reward minus the baseline b = (alpha + sum of the group's others) / (alpha + beta + their number).

    b does not depend on the completion itself, so the expected gradient is that of `rloo`, usually with less noise
    than from a mean over few others. Groups with equal rewards can have advantages other than 0 here. NaN as in
    `group_advantages`; groups with fewer than two rewards get advantage 0.

    If the loss divides by the completion's own length (`sequence_mean`), the product with b would depend on the
    completion, and push the policy towards long or short ones in proportion to the error of b. So only m, the others'
    mean, is divided by it, as in `rloo`; b - m is divided by the others' lengths.

    Args:
        prior: [groups, 2] alpha and beta of each prompt, from before the step.
        lengths: [groups, G] completion tokens, if each completion's token sum will be divided by its own length; None:
            the divisor does not depend on it.

    Example: rewards 1, 0, 0 and prior (3, 1): b = 3/6, 4/6, 4/6, where the others' means are 0, 1/2, 1/2. Advantages
    1/2, -2/3, -2/3.
    """
    graded = ~np.isnan(rewards)
    values, others = np.where(graded, rewards, 0.0), graded.sum(axis=1, keepdims=True) - 1
    alpha, beta = prior[:, :1], prior[:, 1:]
    of_others = values.sum(axis=1, keepdims=True) - values
    mean = of_others / np.maximum(others, 1)
    shift = mean - (alpha + of_others) / (alpha + beta + np.maximum(others, 1))
    if lengths is not None:
        inverse = np.where(graded, 1.0 / np.maximum(lengths, 1), 0.0)
        shift = shift * lengths * (inverse.sum(axis=1, keepdims=True) - inverse) / np.maximum(others, 1)
    return np.where(graded & (others > 0), values - mean + shift, 0.0)


def early_stop_advantages(
    rewards: FloatArray,
    stands_for: FloatArray,
    prior: FloatArray,
    lengths: IntArray | None = None,
    *,
    to_posterior: bool = False,
) -> FloatArray:
    """Each reward minus m, a mean over the group's others of which some were stopped early. With `to_posterior`, m is
    shrunk towards the prior as in `posterior_advantages`.

    m = u + sum(w (r - u)) / n over the n others, with w their weights and u the prior's mean. Its expectation is the
    mean of their rewards, whatever u is, and it is independent of whether the completion itself finishes. A plain mean
    over those that finished would describe short completions.

    Args:
        stands_for: [groups, G] w: 0 for completions that were stopped early, whose reward is NaN.
        prior, lengths: as for `posterior_advantages`.

    Example: rewards 1, 0, NaN, the first with weight 2, the last stopped; prior (1, 1). m of the second is
    1/2 + (2 x 1/2 + 0) / 2 = 1, and its advantage -1.
    """
    graded = ~np.isnan(rewards)
    known = graded | (stands_for == 0)  # all except failed gradings
    others = np.maximum(known.sum(axis=1, keepdims=True) - 1, 1)
    usual = prior[:, :1] / prior.sum(axis=1, keepdims=True)
    counts = np.where(graded, stands_for, 0.0)
    above = counts * np.where(graded, rewards - usual, 0.0)
    mean = usual + (above.sum(axis=1, keepdims=True) - above) / others
    shift = np.zeros(rewards.shape)
    if to_posterior:
        shift = mean - (prior[:, :1] + others * mean) / (prior.sum(axis=1, keepdims=True) + others)
        if lengths is not None:
            inverse = counts / np.maximum(lengths, 1)
            shift = shift * lengths * (inverse.sum(axis=1, keepdims=True) - inverse) / others
    whole = (stands_for == 1).all(axis=1, keepdims=True)  # the plain formula is exactly 0 for equal rewards
    plain = posterior_advantages(rewards, prior, lengths) if to_posterior else rloo_advantages(rewards)
    return np.where(whole, plain, np.where(graded, rewards - mean + shift, 0.0))


def early_stop_noise(
    rewards: FloatArray, stands_for: FloatArray, prior: FloatArray, penalty: FloatArray, *, to_posterior: bool = False
) -> FloatArray:
    """[groups, G] the variance of m, which early stops of group mates add to the square of `early_stop_advantages`.

    Given all full completions, sum(w (w - 1) (r - u)^2) / n^2 over the n others is an unbiased estimate of it, since
    E[w (w - 1)] is the variance of w. With `to_posterior` the part from rewards is shrunk as m is (taking lengths as
    equal), the part from the penalty is not.
    """
    graded = ~np.isnan(rewards)
    others = np.maximum((graded | (stands_for == 0)).sum(axis=1, keepdims=True) - 1, 1)
    total = prior.sum(axis=1, keepdims=True)
    share = others / (total + others) if to_posterior else 1.0
    above = np.where(graded, share * (rewards - prior[:, :1] / total) + penalty, 0.0)
    each = np.where(graded, stands_for * (stands_for - 1.0), 0.0) * np.square(above / others)
    return np.where(graded, each.sum(axis=1, keepdims=True) - each, 0.0)


def whitened_advantages(rewards: FloatArray, group_weights: FloatArray, *, eps: float) -> FloatArray:
    """Group-centred rewards over their standard deviation in the whole step: REINFORCE++-baseline (arXiv 2501.03262).

    The step's mean of group-centred rewards is 0 by construction, so whitening only divides. With some prompts
    skipped, the second moment is the weighted mean over the rolled-out groups, sum(w S) / sum(w n): a ratio estimate
    of the full batch's, with a bias of order 1 / groups. NaN, eps and groups with equal rewards as in
    `group_advantages`; group_weights [groups].
    """
    centred = group_advantages(rewards, divide_by_std=False, eps=0.0)
    count = float(group_weights @ (~np.isnan(rewards)).sum(axis=1))
    moment = float(group_weights @ np.square(centred).sum(axis=1)) / count if count > 0 else 0.0
    return np.asarray(centred / (np.sqrt(moment) + eps) if moment > 0 else centred)


def denominators(
    normalization: str, lengths: IntArray, tokens: FloatArray, *, nominal: int, max_completion_tokens: int
) -> FloatArray:
    """The divisor of each completion's token sum, [K, G] float64, from the planned full mini-batch.

    Args:
        lengths: [K, G] completion tokens.
        tokens: [K] completion tokens of the mini-batch that each group belongs to; only token_mean reads it.
        nominal: completions of one planned mini-batch, skipped prompts included.
        max_completion_tokens: only constant reads it.

    Example: 2 prompts of 2 completions with lengths 3, 5 and 4, 8 in one mini-batch. sequence_mean: 4 x length = 12,
    20, 16, 32. token_mean: 20 for each. constant with a limit of 10: 40 for each.
    """
    if normalization == "constant":
        return np.full(lengths.shape, float(nominal * max_completion_tokens))
    if normalization == "token_mean":
        return np.asarray(np.maximum(tokens, 1.0)[:, None] * np.ones(lengths.shape))
    return np.asarray(nominal * lengths.astype(np.float64))


def token_sums(lengths: IntArray | FloatArray, minibatch: IntArray, count: int) -> FloatArray:
    """[count] tokens of each mini-batch, from lengths [K, G] and the mini-batch [K] of each group."""
    return np.asarray(np.bincount(minibatch, weights=lengths.sum(axis=1), minlength=count).astype(np.float64))
