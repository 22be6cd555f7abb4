"""Builds, from the objective's settings, the one function that the loss hook calls on every micro-batch:

    policy loss x rollout correction + kl.coef x KL - entropy_coef x entropy

The hook multiplies the whole loss by the sample's weight and divides it by the frozen denominator.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from dppo_megatron.algorithms.correction import importance_factor
from dppo_megatron.algorithms.policy_losses import POLICY_LOSSES
from dppo_megatron.algorithms.tokens import MAX_LOG_RATIO, Objective, PolicyLoss, TokenBatch, TokenLoss, bounded_ratio
from dppo_megatron.config.objective import KLConfig, ObjectiveConfig, old_is_current
from dppo_megatron.types import UserError

_TOLERANCE = 1e-4
"""Relative to the pack's largest value: float32 sums in another order differ by 1e-6, one sequence of 50 adds 1e-2."""
_TRIAL_PACKS: tuple[tuple[tuple[int, ...], float, float, int], ...] = (
    # tokens of each sequence; scale of advantages and of log-ratios; padding after each sequence, and at the end
    ((4, 4), 1.0, 0.1, 0),
    ((7, 3, 5), 1.0, 0.1, 2),
    ((3, 5, 7, 4), 8.0, 2.0, 0),
    ((6, 3, 9, 4, 5), 1.0, 0.5, 1),
    ((5,), 1.0, 0.1, 3),
    ((4, 6, 3), 0.0, 0.1, 0),
    (tuple(3 + place * 7 % 31 for place in range(50)), 1.0, 0.5, 1),
    ((1500, 20, 500), 0.3, 0.1, 0),
    ((), 1.0, 0.1, 4),  # the micro-batch of a rank without samples
)
_WEIGHTS = (1024.0, 2.0**-20, -1.0)
"""Powers of two scale float32 without rounding; real weights / divisors are between these, or below 0 by choice."""
_ADDED = ("kl", "correction", "correction_bounded")  # by `make_objective`, if the settings ask for them
_RESERVED = frozenset(("loss", "tokens", "entropy", "grad_norm", "learning_rate", "skipped_updates", *_ADDED))
"""Names that a loss's diagnostics may not have."""

__all__ = ["Objective", "PolicyLoss", "TokenBatch", "TokenLoss", "clipped_surrogate", "make_objective", "supervised"]


def make_objective(config: ObjectiveConfig, function: PolicyLoss | None = None) -> Objective:
    """The configured objective. `config` is already checked.

    function: the user's policy loss, already loaded; None: the built-in `config.loss`.
    """
    policy_loss, on_policy = function or POLICY_LOSSES[config.loss], old_is_current(config)

    def objective(batch: TokenBatch) -> TokenLoss:
        if on_policy:
            batch = replace(batch, old_logprobs=batch.logprobs.detach())
        result = policy_loss(batch, config)
        if function is not None:
            check_result(result, batch, config.function)
        loss, diagnostics = result.loss, dict(result.diagnostics)
        if config.correction.level != "none":
            factor, bounded = importance_factor(batch, config.correction)
            loss = factor * loss
            diagnostics |= {"correction": factor, "correction_bounded": bounded}
        if config.kl.coef:
            kl = kl_estimate(batch, config.kl)
            loss = loss + config.kl.coef * kl
            diagnostics["kl"] = kl.detach()
        if config.entropy_coef:
            loss = loss - config.entropy_coef * batch.entropy
        return TokenLoss(loss, diagnostics)

    return objective


def kl_estimate(batch: TokenBatch, config: KLConfig) -> Tensor:
    """[T] estimate of KL(policy || reference) at each token; differentiable in the policy.

    An unbiased value does not imply an unbiased gradient, because the tokens were drawn from the policy that is
    differentiated. The statements on gradients below are about their expectation over on-policy tokens.

    With d = log reference - log policy, clamped to +-20 (Schulman, "Approximating KL divergence", 2020):

    - k1 = -d. Its gradient is 0 in expectation: as a loss it is only noise; as part of the reward it would be right.
    - k2 = d^2 / 2. Biased as a value; its gradient is that of KL(policy || reference), on-policy.
    - k3 = exp(d) - d - 1. The value is unbiased and never negative; its gradient is that of KL(reference || policy).
    - k3_unbiased = k3 policy / behaviour. The ratio carries the derivative of the sampling distribution, so the value
      and the gradient are right for each token, off-policy too (arXiv 2506.09477; DeepSeek-V3.2, 2512.02556, 3.1).

    The last statement holds for each token alone: like every estimate that is summed over tokens, it ignores that an
    update also changes which prefixes are reached.
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


def clipped_surrogate(clip_low: float, clip_high: float, dual_clip: float) -> Objective:
    return make_objective(ObjectiveConfig(clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip))


def supervised() -> Objective:
    """Negative log-likelihood of the completion: the loss of SFT, for the same loss hook."""

    def objective(batch: TokenBatch) -> TokenLoss:
        return TokenLoss(-batch.logprobs)

    return objective


def check_result(result: object, batch: TokenBatch, function: str) -> None:
    """Raise UserError unless a user's loss returned a TokenLoss of vectors [T]."""
    if not isinstance(result, TokenLoss):
        raise UserError(f"objective.function = '{function}': returned {type(result).__name__}, expected TokenLoss")
    if taken := sorted(_RESERVED & result.diagnostics.keys()):
        raise UserError(f"objective.function = '{function}': train/{taken[0]} is the trainer's; rename the diagnostic")
    for name, values in {"loss": result.loss, **result.diagnostics}.items():
        if not isinstance(values, Tensor) or values.shape != batch.logprobs.shape:
            got = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise UserError(
                f"objective.function = '{function}': {name} is {got}, expected one value a token,"
                f" {list(batch.logprobs.shape)}; the loss hook sums and normalizes"
            )
    if result.loss.dtype != batch.logprobs.dtype:
        raise UserError(
            f"objective.function = '{function}': loss is of {result.loss.dtype}, expected batch.logprobs' own"
            f" {batch.logprobs.dtype}"
        )


def check_policy_loss(function: PolicyLoss, config: ObjectiveConfig, key: str = "objective.function") -> None:
    """Try a user's loss on made-up packs, before anything expensive.

    A sequence's weight undoes pruning only if its loss depends on that sequence alone, not on which others were kept or
    how they were packed. So each is tried alone and with others: values and gradient must be the same, with no
    gradient on the others. A hook or backward pass that clips or normalizes gradients would see the weight in them and
    undo it, so the gradient must be linear in the weights. What these packs do not trigger is not found, such as a loss
    that changes at 3,000 tokens or after 2,000 calls.

    Raises:
        UserError: it raises, has a wrong shape or type, has no gradient, is not finite, changes its arguments, its
            result or its diagnostics' names, looks at other sequences, padding or a missing reference, or has a
            gradient that is not proportional to weights or, against the settings, not 0 at advantage 0.
    """
    trial = _Trial(function, config, f"{key} = '{config.function}'")
    packs = [_made_up(number) for number in range(len(_TRIAL_PACKS))]
    if config.kl.coef == 0:  # as in a run with that: which diagnostics there are may depend on it
        packs = [[one.index_fill(0, torch.tensor(4), 0.0) for one in pack] for pack in packs]
    first = trial.answer(packs[0])
    if not any(bool((trial.answer(pack)[1:] != 0).any()) for pack in packs):
        trial.refuse("its loss does not depend on batch.logprobs, so nothing would be learned; do not detach it")
    for number, (*_, padding) in enumerate(_TRIAL_PACKS):
        trial.check_local(packs[number], padding)
        trial.check_linear(packs[number], padding)
        zero = trial.answer([one.index_fill(0, torch.tensor(5), 0.0) for one in packs[number]], padding)
        if config.zero_advantage_slope == 0 and bool((zero[1:] != 0).any()):
            trial.refuse(
                "has a gradient where the advantage is 0, and completion pruning drops such completions as if they had"
                " none; set objective.zero_advantage_slope to about the size of that gradient in the log-probability (a"
                " KL term c * kl has about c)"
            )
        with_reference = replace(trial, diagnostics=set()).answer(_made_up(number), padding)
        if config.kl.coef == 0 and not torch.equal(with_reference, trial.answer(packs[number], padding)):
            trial.refuse(
                "reads batch.reference_logprobs, which are 0 while objective.kl.coef = 0; use objective.kl instead, or"
                " set kl.coef to 1e-9 beside it to have a reference"
            )
    trial.check_same(first, packs[0], 0)


@dataclass(frozen=True, slots=True)
class _Trial:
    function: PolicyLoss
    config: ObjectiveConfig
    setting: str
    diagnostics: set[str] = field(default_factory=set)

    def refuse(self, why: str) -> None:
        raise UserError(f"{self.setting}: {why}")

    def check_same(self, before: Tensor, sequences: list[Tensor], padding: int) -> None:
        if not torch.equal(before, self.answer(sequences, padding)):
            self.refuse("gives different results when called again; a loss must be a function of its arguments")

    def check_local(self, sequences: list[Tensor], padding: int) -> None:
        """Each sequence must have the same loss and gradient alone and among the others."""
        whole = self.answer(sequences, padding)
        self.check_same(whole, sequences, padding)
        start, most = 0, _TOLERANCE * whole.abs().amax(dim=1, keepdim=True)
        for place, sequence in enumerate(sequences):
            packed = whole[:, start : start + sequence.shape[1]]
            start += sequence.shape[1] + padding
            if not bool(((packed - self.answer([sequence])).abs() <= most).all()):
                self.refuse(
                    "its loss of a sequence, or the gradient, changes with what else is in the micro-batch (sequence"
                    f" {place} of {len(sequences)}, padding {padding}), which pruning and packing decide: no weight"
                    " could keep the update unbiased. Use a token's own values, or sums over its sequence's completion"
                    " tokens (sequence_sums); advantages are scaled by objective.advantage, means over the batch are"
                    " objective.normalization"
                )

    def check_linear(self, sequences: list[Tensor], padding: int) -> None:
        """The gradient must be proportional to the weights, and the sum of the gradients of even and of odd tokens."""

        def gradient(factor: float, part: slice = slice(None)) -> Tensor:
            weighted = [one.clone() for one in sequences]
            for one, before in zip(weighted, sequences, strict=True):
                one[7] = 0.0
                one[7, part] = factor * before[7, part]
            return self.answer(weighted, padding)[1:] / factor

        whole, halves = gradient(1.0), gradient(1.0, slice(0, None, 2)) + gradient(1.0, slice(1, None, 2))
        most = _TOLERANCE * whole.abs().amax(dim=1, keepdim=True)
        if not all(bool(((one - whole).abs() <= most).all()) for one in (halves, *map(gradient, _WEIGHTS))):
            self.refuse(
                "its gradient is not in proportion to the weights, which multiply the loss (a hook or a backward pass"
                " that clips or normalizes gradients?): no weight could keep the update unbiased, and the number of"
                " micro-batches would change it. Bound the ratio or the loss instead; whole updates are clipped by"
                " actor.optimizer.max_grad_norm"
            )

    def answer(self, sequences: list[Tensor], padding: int = 0) -> Tensor:
        """[3, T] loss, and the gradient of its weighted sum in log-probability and entropy; 0 where the mask is 0."""
        parts = [*(pad(one, (0, padding)) for one in sequences), torch.zeros(8, padding)]
        rows = torch.cat(parts, dim=1)
        sequence = torch.arange(len(parts)).repeat_interleave(torch.tensor([part.shape[1] for part in parts]))
        inputs = [rows[row].clone().requires_grad_() for row in (0, 1)]
        fixed = rows[2:7].clone()
        batch = TokenBatch(inputs[0], inputs[1], fixed[0], fixed[1], fixed[2], fixed[3], fixed[4], sequence.clone())
        try:
            result = self.function(batch, self.config)
        except Exception as error:
            message = f"{self.setting}: raised {type(error).__name__} on a small made-up batch: {error}"
            raise UserError(message) from error
        check_result(result, batch, self.config.function)
        lacks = self.diagnostics ^ result.diagnostics.keys() if self.diagnostics else set[str]()
        self.diagnostics.update(result.diagnostics)
        if lacks and bool((rows[6] > 0).any()):  # where nothing is trained, a sum without it is 0 too
            self.refuse(
                f"returns the diagnostic '{min(lacks)}' with some batches only, so its mean over all tokens would be"
                " wrong; return it always, with 0 where it does not apply"
            )
        if not (torch.equal(torch.stack([*inputs, *fixed]), rows[:7]) and torch.equal(batch.sequence, sequence)):
            self.refuse("changes its batch in place; work on a copy")
        loss = torch.where(rows[6] > 0, result.loss, 0.0)
        gradients: tuple[Tensor | None, ...] = (None, None)
        if loss.requires_grad:
            gradients = torch.autograd.grad(loss @ rows[7], inputs, allow_unused=True)
        both = [torch.zeros_like(loss) if one is None else torch.where(rows[6] > 0, one, 0.0) for one in gradients]
        answer = torch.stack([loss.detach(), *both])
        if not bool(torch.isfinite(answer).all()):
            self.refuse("its loss or its gradient is not finite on a small made-up batch")
        return answer


def _made_up(number: int) -> list[Tensor]:
    """For each sequence of a pack [8, length], 0 where nothing is predicted: the first seven fields of a `TokenBatch`,
    and a weight of each token's loss, so that one backward pass shows which token each gradient comes from."""
    generator = torch.Generator().manual_seed(number)
    lengths, scale, spread, _ = _TRIAL_PACKS[number]
    made = []
    for place, length in enumerate(lengths):
        mask = (torch.arange(length) >= place % 3).float()  # a prompt of one token has no position of its own
        uniform, noise = torch.rand(3, length, generator=generator), torch.randn(3, length, generator=generator)
        rare = (torch.arange(length) == length - 1).float()  # covers losses that act only on rare or uncertain tokens
        logprobs, entropy = -0.05 - 2.0 * uniform[0] - 6.0 * rare, 0.1 + uniform[1] + 3.0 * rare
        advantages = torch.full((length,), (1 - place % 2 * 2) * scale * (0.5 + place % 5 / 4))
        others = logprobs - spread * noise
        columns = [logprobs, entropy, *others, advantages, torch.ones(length), 0.5 + uniform[2]]
        made.append(torch.stack(columns) * mask)
    return made
