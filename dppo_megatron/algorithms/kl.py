"""Per-token estimates of the KL from the policy to the reference, for use as a term of the loss.

That a value is an unbiased estimate of the KL says nothing about its gradient, because the tokens were drawn from the
policy that is differentiated. The docstrings say what each one's gradient is in expectation over on-policy tokens.
"""

from __future__ import annotations

from torch import Tensor

from dppo_megatron.algorithms.tokens import MAX_LOG_RATIO, TokenBatch, bounded_ratio
from dppo_megatron.config.objective import KLConfig


def kl_estimate(batch: TokenBatch, config: KLConfig) -> Tensor:
    """[T] estimate of KL(policy || reference) at each token; differentiable in the policy.

    With d = log reference - log policy, clamped to +-20 (Schulman, "Approximating KL divergence", 2020):

    - k1 = -d. Its gradient is 0 in expectation: as a loss it is noise, in the reward it would be right.
    - k2 = d^2 / 2. Biased as a value; its gradient is that of KL(policy || reference), on-policy.
    - k3 = exp(d) - d - 1. The value is unbiased and never negative; its gradient is that of KL(reference || policy).
    - k3_unbiased = k3 policy / behaviour. The ratio carries the derivative of the sampling distribution, so the value
      and the gradient are right for each token, off-policy too (arXiv 2506.09477; DeepSeek-V3.2, 2512.02556, 3.1).

    The last holds token by token: how an update changes which prefixes are reached is left out, as in every estimate
    that is summed over tokens.
    """
    difference = (batch.reference_logprobs - batch.logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if config.estimator == "k1":
        return -difference
    if config.estimator == "k2":
        return 0.5 * difference.square()
    k3: Tensor = difference.exp() - difference - 1.0
    if config.estimator == "k3":
        return k3
    return bounded_ratio(batch.logprobs - batch.behaviour_logprobs) * k3
