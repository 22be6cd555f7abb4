"""The policy losses, each a pure function of one micro-batch's tokens and the objective's settings.

A user's own loss has the same signature. Ratios are relative to `old_logprobs`; Divergence PPO's is to the behaviour.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from dppo_megatron.algorithms.tokens import PolicyLoss, TokenBatch, TokenLoss, bounded_ratio, sequence_sums
from dppo_megatron.config.objective import ObjectiveConfig


def clip(batch: TokenBatch, config: ObjectiveConfig) -> TokenLoss:
    """PPO's clipped surrogate with asymmetric bounds: `loss=clip`.

    loss_t = -min(rho_t A, clip(rho_t, 1 - clip_low, 1 + clip_high) A), rho_t = exp(log pi - log old):
    arXiv 1707.06347 eq. 7, with DAPO's clip-higher (arXiv 2503.14476 eq. 10). With dual_clip = c > 0 the loss of a
    negative advantage is at most -c A (arXiv 1912.09729 eq. 5).
    """
    ratio = bounded_ratio(batch.logprobs - batch.old_logprobs)
    unclipped = -ratio * batch.advantages
    clipped = -ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * batch.advantages
    loss = torch.maximum(unclipped, clipped)
    fraction = (clipped > unclipped).detach().to(loss.dtype)
    diagnostics = {"ratio": ratio.detach(), "clip_fraction": fraction}
    if config.dual_clip:
        bounded = torch.minimum(loss, -config.dual_clip * batch.advantages)
        loss = torch.where(batch.advantages < 0, bounded, loss)
        diagnostics["dual_clip_fraction"] = ((batch.advantages < 0) & (ratio > config.dual_clip)).to(loss.dtype)
    return TokenLoss(loss, diagnostics)


def gspo(batch: TokenBatch, config: ObjectiveConfig) -> TokenLoss:
    """GSPO (arXiv 2507.18071 eq. 5, 7 and 14): the clipped surrogate with one ratio s for a whole sequence.

    s = exp(mean_t(log pi - log old)); loss_t = -min(s_t A, clip(s_t) A), s_t = sg[s] pi / sg[pi]. Over a sequence the
    gradients sum to that of eq. 5, and a token's own advantage or correction stays with it. Sequences count alike
    with normalization=sequence_mean; with the others in proportion to their length, unlike in the paper.
    """
    lengths = sequence_sums(torch.ones_like(batch.mask), batch).clamp_min(1)
    mean = sequence_sums(batch.logprobs - batch.old_logprobs, batch) / lengths
    ratio = bounded_ratio(mean.detach() + (batch.logprobs - batch.logprobs.detach()))
    unclipped = -ratio * batch.advantages
    clipped = -ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * batch.advantages
    loss = torch.maximum(unclipped, clipped)
    fraction = (clipped > unclipped).detach().to(loss.dtype)
    return TokenLoss(loss, {"ratio": ratio.detach(), "clip_fraction": fraction})


def cispo(batch: TokenBatch, config: ObjectiveConfig) -> TokenLoss:
    """CISPO (arXiv 2506.13585 eq. 4 and 5): the clipped ratio as a constant weight of the log-probability's gradient.

    loss_t = -sg[clip(rho_t, 1 - clip_low, 1 + clip_high)] A log pi. Unlike with the clipped surrogate, a clipped token
    keeps its gradient. The cap is 1 + clip_high as in verl and slime, not clip_high itself as in TRL.
    """
    ratio = bounded_ratio(batch.logprobs - batch.old_logprobs).detach()
    limited = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    loss = -limited * batch.advantages * batch.logprobs
    return TokenLoss(loss, {"ratio": ratio, "clip_fraction": (limited != ratio).to(loss.dtype)})


def divergence_tv(batch: TokenBatch, config: ObjectiveConfig) -> TokenLoss:
    """Divergence PPO's token mask with binary total variation (arXiv 2602.04879 eq. 11 to 13): the *other* DPPO.

    loss_t = -M_t sg[min(rho_t, max_ratio)] A log pi with rho_t = pi / mu, mu the behaviour. M_t = 0 where A > 0 and
    pi - mu > max_shift, or A < 0 and mu - pi > max_shift: the token has left the trust region and would move further
    away. For rare tokens the shift of the probability measures that better than a ratio.
    """
    ratio = bounded_ratio(batch.logprobs - batch.behaviour_logprobs).detach()
    shift = batch.logprobs.detach().exp() - batch.behaviour_logprobs.exp()
    outside = shift * batch.advantages.sign() > config.divergence.max_shift
    limited = torch.where(outside, 0.0, ratio.clamp_max(config.divergence.max_ratio))
    loss = -limited * batch.advantages * batch.logprobs
    return TokenLoss(loss, {"ratio": ratio, "clip_fraction": outside.to(loss.dtype)})


POLICY_LOSSES: Mapping[str, PolicyLoss] = MappingProxyType(
    {"clip": clip, "gspo": gspo, "cispo": cispo, "divergence_tv": divergence_tv}
)
