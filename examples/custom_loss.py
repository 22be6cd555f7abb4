"""A custom policy loss: SAPO's soft gate (arXiv 2511.20347) in place of the clip.

    dppo-megatron train configs/quickstart.yaml objective.function=examples.custom_loss:soft_gate

`module:function` is imported from the working directory or from what is installed. The function is tried on a small
made-up batch before the job starts, so a wrong shape or a detached loss costs seconds.
"""

import torch

from dppo_megatron.algorithms.tokens import TokenBatch, TokenLoss
from dppo_megatron.config.objective import ObjectiveConfig

TEMPERATURE_POSITIVE, TEMPERATURE_NEGATIVE = 1.0, 1.05


def soft_gate(batch: TokenBatch, config: ObjectiveConfig) -> TokenLoss:
    """loss_t = -(4 / tau) sigmoid(tau (rho_t - 1)) A: the gradient fades as the ratio leaves 1, and is never clipped.

    Return one loss a token. Weights, denominators, the KL and entropy terms and the rollout correction are added
    outside; read settings such as `clip_low` from `config`.
    """
    ratio = (batch.logprobs - batch.old_logprobs).clamp(-20, 20).exp()
    temperature = torch.where(batch.advantages > 0, TEMPERATURE_POSITIVE, TEMPERATURE_NEGATIVE)
    gate = torch.sigmoid(temperature * (ratio - 1.0))
    loss = -4.0 / temperature * gate * batch.advantages
    return TokenLoss(loss, {"ratio": ratio.detach(), "gate": (4 * gate * (1 - gate)).detach()})
