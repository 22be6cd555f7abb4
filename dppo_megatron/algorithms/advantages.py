"""Group-relative advantages, the reward shaping before them, and the frozen divisors of token sums.

Computed in float64 from the full group before anything is pruned: recomputing them on the survivors makes the
estimator nonlinear in the selection and breaks the unbiasedness that the weights buy. Rewards and advantages are
[groups, G] float64; a reward is NaN where the grader failed.
"""

from __future__ import annotations

import numpy as np

from dppo_megatron.config.objective import ObjectiveConfig, OverlongConfig
from dppo_megatron.types import FloatArray, IntArray


def overlong_penalty(lengths: IntArray, config: OverlongConfig, max_completion_tokens: int) -> FloatArray:
    """What is added to the reward for length: DAPO's soft overlong punishment (arXiv 2503.14476 eq. 13), any shape.

    0 up to max_completion_tokens - buffer_tokens, then linear down to -penalty at max_completion_tokens.
    """
    if config.buffer_tokens == 0:
        return np.zeros(lengths.shape)
    exceeding = lengths - (max_completion_tokens - config.buffer_tokens)
    penalty: FloatArray = -config.penalty * np.clip(exceeding / config.buffer_tokens, 0.0, 1.0)
    return penalty


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
        rewards: as graded, which is what a prior is of.
        group_weights: [groups] what undoes the selection of each group's prompt, for statistics over the step; None:
            nothing was skipped.
        lengths, prior: as of `posterior_advantages`, the only ones to read them; without a prior the mean is 1/2.
        stands_for: as of `early_stop_advantages`, which then are taken, for a group that may be without some rewards.
        penalty: [groups, G] of each completion's length, added to its reward; of it no prior knows.
    """
    if stands_for is not None or config.advantage == "posterior_loo":
        known = np.full((len(rewards), 2), 0.5) if prior is None else prior
        found = _by_prior(rewards, config, lengths, known, stands_for)
        if penalty is None:
            return found
        # against the others' mean alone, drawn towards 0 by none but those that were stopped
        apart = np.where(np.isnan(rewards), np.nan, penalty)
        counts = np.ones(rewards.shape) if stands_for is None else stands_for
        both: FloatArray = found + early_stop_advantages(apart, counts, np.tile([0.0, 1.0], (len(rewards), 1)))
        return both
    rewards = rewards if penalty is None else rewards + penalty
    if config.advantage == "rloo":
        return rloo_advantages(rewards)
    if config.advantage == "reinforce_baseline":
        weights = np.ones(len(rewards)) if group_weights is None else group_weights
        return whitened_advantages(rewards, weights, eps=config.advantage_eps)
    return group_advantages(rewards, divide_by_std=config.advantage == "group_std", eps=config.advantage_eps)


def _by_prior(
    rewards: FloatArray, config: ObjectiveConfig, lengths: IntArray | None, prior: FloatArray, counts: FloatArray | None
) -> FloatArray:
    by_length = lengths if config.normalization == "sequence_mean" else None
    if counts is None:
        return posterior_advantages(rewards, prior, by_length)
    to_posterior = config.advantage == "posterior_loo"
    return early_stop_advantages(rewards, counts, prior, by_length, to_posterior=to_posterior)


def group_advantages(rewards: FloatArray, *, divide_by_std: bool, eps: float) -> FloatArray:
    """Rewards less their group's mean; with `divide_by_std` over (their standard deviation + eps).

    `divide_by_std=True` is GRPO (arXiv 2402.03300, eq. 3 with the population standard deviation); False is
    Dr.GRPO (arXiv 2503.20783). A completion whose grader failed (NaN) is left out of the statistics and gets
    advantage 0. A group of one, or with equal rewards, has advantage exactly 0.
    """
    graded = ~np.isnan(rewards)
    count = np.maximum(graded.sum(axis=1, keepdims=True), 1)
    values = np.where(graded, rewards, 0.0)
    centred = np.where(graded, values - values.sum(axis=1, keepdims=True) / count, 0.0)
    low = np.where(graded, rewards, np.inf).min(axis=1, keepdims=True)
    high = np.where(graded, rewards, -np.inf).max(axis=1, keepdims=True)
    centred = np.where(high > low, centred, 0.0)  # not a rounding error over eps where all rewards are equal
    if not divide_by_std:
        return centred
    # in units of the largest deviation, whose square can neither overflow nor vanish
    largest = np.abs(centred).max(axis=1, keepdims=True, initial=0.0)
    unit = np.where(largest > 0, largest, 1.0)
    std = unit * np.sqrt(np.square(centred / unit).sum(axis=1, keepdims=True) / count)
    scaled: FloatArray = centred / np.where(largest > 0, std + eps, 1.0)
    return scaled


def rloo_advantages(rewards: FloatArray) -> FloatArray:
    """Each reward less the mean of the group's other rewards: leave-one-out (RLOO, arXiv 2402.14740 eq. 8).

    It is the group-centred reward times n / (n - 1), n the graded completions of the group. NaN and groups without
    information as in `group_advantages`.
    """
    graded = (~np.isnan(rewards)).sum(axis=1, keepdims=True)
    scaled: FloatArray = group_advantages(rewards, divide_by_std=False, eps=0.0) * graded / np.maximum(graded - 1, 1)
    return scaled


def posterior_advantages(rewards: FloatArray, prior: FloatArray, lengths: IntArray | None = None) -> FloatArray:
    """Each reward less b = (alpha + sum of the group's others) / (alpha + beta + their number).

    b knows nothing of its own completion, so it takes nothing from the expected gradient, which is `rloo`'s; the noise
    of a mean over few others is less. Groups with equal rewards have an advantage here. NaN as in `group_advantages`;
    so are groups with fewer than two rewards, which have none.

    Divided by its own length (`sequence_mean`), b would depend on its completion, and draw the policy towards long or
    short ones by how far it is from the true mean. So only m, the others' mean, is divided so, as `rloo` does; b - m is
    divided by the others' lengths.

    Args:
        prior: [groups, 2] alpha and beta of each prompt, from before the step.
        lengths: [groups, G] completion tokens, if the token sum of each completion will be divided by its own; None:
            by a number that is none of its own.

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
    advantages: FloatArray = np.where(graded & (others > 0), values - mean + shift, 0.0)
    return advantages


def early_stop_advantages(
    rewards: FloatArray,
    stands_for: FloatArray,
    prior: FloatArray,
    lengths: IntArray | None = None,
    *,
    to_posterior: bool = False,
) -> FloatArray:
    """Each reward less m, the mean of the group's others, of which some were stopped early; or with `to_posterior` less
    that mean drawn towards the prior, as in `posterior_advantages`.

    m = u + sum(w (r - u)) / n over the n others, w what one counts and u the prior's mean: in expectation the mean of
    their rewards, whatever u is, and independent of the completion's own end. The mean of those that came to their end
    would be that of short ones.

    Args:
        stands_for: [groups, G] w: 0 of those that were stopped early, whose reward is NaN.
        prior, lengths: as of `posterior_advantages`.

    Example: rewards 1, 0, NaN, the first with weight 2, the last stopped; prior (1, 1). m of the second is
    1/2 + (2 x 1/2 + 0) / 2 = 1, and its advantage -1.
    """
    there = ~np.isnan(rewards)
    known = there | (stands_for == 0)  # without gradings that failed
    others = np.maximum(known.sum(axis=1, keepdims=True) - 1, 1)
    usual = prior[:, :1] / prior.sum(axis=1, keepdims=True)
    counts = np.where(there, stands_for, 0.0)
    above = counts * np.where(there, rewards - usual, 0.0)
    mean = usual + (above.sum(axis=1, keepdims=True) - above) / others
    shift = np.zeros(rewards.shape)
    if to_posterior:
        shift = mean - (prior[:, :1] + others * mean) / (prior.sum(axis=1, keepdims=True) + others)
        if lengths is not None:
            inverse = counts / np.maximum(lengths, 1)
            shift = shift * lengths * (inverse.sum(axis=1, keepdims=True) - inverse) / others
    whole = (stands_for == 1).all(axis=1, keepdims=True)  # exactly 0 where all rewards are equal
    plain = posterior_advantages(rewards, prior, lengths) if to_posterior else rloo_advantages(rewards)
    advantages: FloatArray = np.where(whole, plain, np.where(there, rewards - mean + shift, 0.0))
    return advantages


def early_stop_noise(
    rewards: FloatArray, stands_for: FloatArray, prior: FloatArray, penalty: FloatArray, *, to_posterior: bool = False
) -> FloatArray:
    """[groups, G] what the stops of mates add to the square of each of `early_stop_advantages`: the variance of m.

    Given what all would have come to, sum of w (w - 1) (r - u)^2 / n^2 over the n others is an unbiased estimate of it,
    as the mean of w (w - 1) is the variance of w. A posterior's is shrunk as its m is, as if lengths were equal; not so
    what the penalty adds to r.
    """
    there = ~np.isnan(rewards)
    others = np.maximum((there | (stands_for == 0)).sum(axis=1, keepdims=True) - 1, 1)
    total = prior.sum(axis=1, keepdims=True)
    share = others / (total + others) if to_posterior else 1.0
    above = np.where(there, share * (rewards - prior[:, :1] / total) + penalty, 0.0)
    each = np.where(there, stands_for * (stands_for - 1.0), 0.0) * np.square(above / others)
    noise: FloatArray = np.where(there, each.sum(axis=1, keepdims=True) - each, 0.0)
    return noise


def whitened_advantages(rewards: FloatArray, group_weights: FloatArray, *, eps: float) -> FloatArray:
    """Group-centred rewards over their standard deviation in the whole step: REINFORCE++-baseline (arXiv 2501.03262).

    The step's mean of group-centred rewards is 0 by construction, so whitening only divides. With some prompts
    skipped, the second moment is the weighted mean over the rolled-out groups, sum(w S) / sum(w n): a ratio estimate
    of the full batch's, with a bias of order 1 / groups. NaN, eps and groups without information as in
    `group_advantages`; weights [groups].
    """
    centred = group_advantages(rewards, divide_by_std=False, eps=0.0)
    count = float(group_weights @ (~np.isnan(rewards)).sum(axis=1))
    moment = float(group_weights @ np.square(centred).sum(axis=1)) / count if count > 0 else 0.0
    scaled: FloatArray = centred / (np.sqrt(moment) + eps) if moment > 0 else centred
    return scaled


def denominators(
    normalization: str, lengths: IntArray, tokens: FloatArray, *, nominal: int, max_completion_tokens: int
) -> FloatArray:
    """What each completion's token sum is divided by, [K, G] float64: counts of the planned full mini-batch.

    A divisor that counted what survived a selection would depend on the draw, and the estimate would no longer be
    linear in the weights.

    Args:
        lengths: [K, G] completion tokens.
        tokens: [K] completion tokens of the mini-batch that each group belongs to; read by token_mean only.
        nominal: completions of one planned mini-batch, skipped prompts included.
        max_completion_tokens: read by constant only.

    Example: 2 prompts of 2 completions with lengths 3, 5 and 4, 8 in one mini-batch. sequence_mean: 4 x length = 12,
    20, 16, 32. token_mean: 20 for each. constant with a limit of 10: 40 for each.
    """
    if normalization == "constant":
        return np.full(lengths.shape, float(nominal * max_completion_tokens))
    if normalization == "token_mean":
        counts: FloatArray = np.maximum(tokens, 1.0)[:, None] * np.ones(lengths.shape)
        return counts
    by_length: FloatArray = nominal * lengths.astype(np.float64)
    return by_length


def token_sums(lengths: IntArray | FloatArray, minibatch: IntArray, count: int) -> FloatArray:
    """[count] tokens of each mini-batch, from lengths [K, G] and the mini-batch [K] of each group."""
    sums: FloatArray = np.bincount(minibatch, weights=lengths.sum(axis=1), minlength=count).astype(np.float64)
    return sums
