"""A softmax policy small enough to enumerate every outcome of pruning, with analytic gradients in float64.

Eight completions in two groups of four, up to six tokens of a five-word vocabulary, seven parameters. Written for the
tests on its own: it shares nothing with the code it checks.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

NUM_COMPLETIONS, GROUP_SIZE, MAX_TOKENS, VOCABULARY, NUM_PARAMETERS = 8, 4, 6, 5, 7
CLIP_LOW, CLIP_HIGH, DUAL_CLIP = 0.2, 0.28, 1.6
OBJECTIVES = ("clip", "dual_clip_kl", "gspo", "cispo")
NORMALISATIONS = ("sequence_mean", "constant", "token_mean", "sequence_sum")


@dataclass(frozen=True)
class Problem:
    """Rollouts of a past policy, to be trained on at `theta`."""

    theta: np.ndarray
    features: np.ndarray
    tokens: np.ndarray
    mask: np.ndarray
    old: np.ndarray
    reference: np.ndarray
    rewards: np.ndarray
    group: np.ndarray
    lengths: np.ndarray
    kl_coef: float = 0.04
    extra: dict = field(default_factory=dict)

    @property
    def advantages(self) -> np.ndarray:
        """Std-normalised within the group."""
        result = np.zeros(len(self.rewards))
        for g in np.unique(self.group):
            rewards = self.rewards[self.group == g]
            result[self.group == g] = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        return result

    def at(self, theta: np.ndarray) -> Problem:
        """The same rollouts at other parameters."""
        return replace(self, theta=theta)


def make_problem(seed: int = 0, *, drift: float = 0.5, degenerate_group: bool = False) -> Problem:
    """Random rollouts; `drift` sets how far theta has moved from the policy that made them."""
    rng = np.random.default_rng(seed)
    shape = (NUM_COMPLETIONS, MAX_TOKENS)
    features = rng.normal(size=(*shape, VOCABULARY, NUM_PARAMETERS)) * 0.8
    lengths = rng.integers(2, MAX_TOKENS + 1, NUM_COMPLETIONS)
    tokens = rng.integers(0, VOCABULARY, shape)
    behind = rng.normal(size=NUM_PARAMETERS) * 0.5
    rewards = np.array([1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.25])
    if degenerate_group:
        rewards[:4] = 1.0
    problem = Problem(
        theta=behind,
        features=features,
        tokens=tokens,
        mask=np.arange(MAX_TOKENS)[None] < lengths[:, None],
        old=np.zeros(shape),
        reference=np.zeros(shape),
        rewards=rewards,
        group=np.repeat([0, 1], GROUP_SIZE),
        lengths=lengths,
    )
    old, _ = logprobs(problem)
    reference, _ = logprobs(problem.at(behind + 0.3 * rng.normal(size=NUM_PARAMETERS)))
    ahead = behind + drift * rng.normal(size=NUM_PARAMETERS)
    return replace(problem, theta=ahead, old=old, reference=reference)


def logprobs(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities [n, T] of the tokens and their gradients [n, T, P]."""
    logits = problem.features @ problem.theta
    logits = logits - logits.max(-1, keepdims=True)
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    index = problem.tokens[..., None]
    chosen = np.take_along_axis(logp, index, -1)[..., 0]
    mean_feature = np.einsum("ntv,ntvp->ntp", np.exp(logp), problem.features)
    chosen_feature = np.take_along_axis(problem.features, index[..., None], 2)[:, :, 0]
    return chosen, chosen_feature - mean_feature


def sequence_gradients(
    problem: Problem, objective: str, *, advantages: np.ndarray | None = None, kl_only: bool = False
) -> np.ndarray:
    """Gradient of each completion's token-summed loss, [n, P], analytic."""
    a = (problem.advantages if advantages is None else advantages)[:, None]
    logp, slopes = logprobs(problem)
    log_ratio = (logp - problem.old) * problem.mask
    ratio = np.exp(log_ratio)
    if objective in ("clip", "dual_clip_kl"):
        clipped = ((a > 0) & (ratio > 1 + CLIP_HIGH)) | ((a < 0) & (ratio < 1 - CLIP_LOW))
        if objective == "dual_clip_kl":
            clipped |= (a < 0) & (ratio > DUAL_CLIP)
        coefficient = np.where(clipped, 0.0, -a * ratio)
        if objective == "dual_clip_kl":
            kl = problem.kl_coef * (1.0 - np.exp(problem.reference - logp))
            coefficient = kl if kl_only else coefficient + kl
    elif objective == "gspo":
        # Token-summed form of a per-sequence loss: the mean log-ratio's gradient spread over the tokens.
        sequence = np.exp(log_ratio.sum(1) / problem.lengths)[:, None]
        clipped = ((a > 0) & (sequence > 1 + 0.05)) | ((a < 0) & (sequence < 1 - 0.05))
        coefficient = np.broadcast_to(np.where(clipped, 0.0, -a * sequence), ratio.shape)
    else:
        coefficient = -np.minimum(ratio, 1 + CLIP_HIGH) * a
    return np.einsum("nt,ntp->np", coefficient * problem.mask, slopes)


def sequence_losses(problem: Problem, objective: str) -> np.ndarray:
    """Each completion's token-summed loss [n], for a finite-difference check of the gradients (not for cispo)."""
    a = problem.advantages[:, None]
    logp, _ = logprobs(problem)
    log_ratio = (logp - problem.old) * problem.mask
    ratio = np.exp(log_ratio)
    if objective == "gspo":
        sequence = np.exp(log_ratio.sum(1) / problem.lengths)[:, None]
        worst = np.maximum(-a * sequence, -a * np.clip(sequence, 1 - 0.05, 1 + 0.05))
        return (worst[:, 0]) * problem.lengths
    loss = np.maximum(-a * ratio, -a * np.clip(ratio, 1 - CLIP_LOW, 1 + CLIP_HIGH))
    if objective == "dual_clip_kl":
        loss = np.where(a < 0, np.minimum(-DUAL_CLIP * a, loss), loss)
        d = problem.reference - logp
        loss = loss + problem.kl_coef * (np.exp(d) - d - 1)
    return (loss * problem.mask).sum(1)


def denominators(problem: Problem, normalisation: str) -> np.ndarray:
    """Frozen divisors [n] of the planned full batch."""
    n = len(problem.rewards)
    return {
        "sequence_mean": n * problem.lengths.astype(np.float64),
        "constant": np.full(n, float(n * MAX_TOKENS)),
        "token_mean": np.full(n, float(problem.lengths.sum())),
        "sequence_sum": np.full(n, float(n)),
    }[normalisation]


def logit_grad_norms(problem: Problem) -> np.ndarray:
    """sqrt(sum (1 - p)^2) under the old policy, [n]."""
    return np.sqrt((np.square(1 - np.exp(problem.old)) * problem.mask).sum(1))


def all_subsets(n: int) -> np.ndarray:
    """Every keep pattern, [2^n, n] bool."""
    return (np.arange(2**n)[:, None] >> np.arange(n)) % 2 == 1


def poisson_probability(patterns: np.ndarray, pi: np.ndarray) -> np.ndarray:
    """Probability of each pattern [S, n] under independent coins, [S]."""
    return np.prod(np.where(patterns, pi, 1 - pi), axis=1)
