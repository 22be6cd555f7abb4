"""A user's policy loss is tried on made-up packs before anything expensive.

What a sequence adds to the gradient is weighted outside of the loss. That undoes pruning only if a loss is local: what
it says of a sequence must be a function of that sequence. One that looks across the pack (advantages centred by its
mean, a divisor from its length) depends on which others were kept and on how they were packed, and no weight corrects
that. So every sequence is tried alone and in packs with others: the same values, the same gradient, none to others.
Within a sequence tokens may be mixed, as GSPO does. A trial finds what its packs show: not a loss that becomes another
one beyond two thousand tokens or fifty sequences, or after some thousand calls.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn.functional import pad

from dppo_megatron.algorithms.objectives import PolicyLoss, TokenBatch, check_result
from dppo_megatron.config.objective import ObjectiveConfig
from dppo_megatron.types import UserError

_TOLERANCE = 1e-4
"""Of the largest value in the pack: sums in another order differ by 1e-6 in float32, the effect of one sequence on
another in a pack of fifty is 1e-2."""
_ROWS = 8
"""logprobs, entropy, behaviour_logprobs, old_logprobs, reference_logprobs, advantages, mask, and a factor for each
token's loss, so that one backward pass tells whose gradient goes where."""


@dataclass(frozen=True, slots=True)
class _Pack:
    """Sequences of a made-up micro-batch; none: the dummy that a rank without samples runs."""

    lengths: tuple[int, ...]
    """Tokens, one or two of them of the prompt."""
    advantage: float = 1.0
    """Their scale."""
    same_sign: bool = False
    spread: float = 0.1
    """How far the policy has moved: standard deviation of the log-ratios."""
    padding: int = 0
    """After each sequence; twice as much at the end, as a sequence of its own."""


_PACKS = (
    _Pack((4, 4)),
    _Pack((7, 3, 5), padding=2),
    _Pack((3, 5, 7, 4), advantage=8.0, spread=2.0),
    _Pack((6, 3, 9, 4, 5), same_sign=True, padding=1),
    _Pack((5,), padding=3),
    _Pack((4, 6, 3), advantage=0.0),
    _Pack(tuple(3 + place * 7 % 31 for place in range(50)), spread=0.5, padding=1),
    _Pack((1500, 20, 500), advantage=0.3),
)


def check_policy_loss(function: PolicyLoss, config: ObjectiveConfig, key: str = "objective.function") -> None:
    """Try a user's loss.

    Raises:
        UserError: it raises, returns something else than a TokenLoss of the batch's shape, has no gradient, is not
            finite, changes its arguments, answers differently when asked again, looks at other sequences or at padding,
            or moves completions with advantage 0 while the settings say that it does not.
    """
    what = f"{key} = '{config.function}'"
    trial = _Trial(function, config, what)
    first = trial.answer(_sequences(0, _PACKS[0]))
    if not bool((first[1:] != 0).any()):
        raise UserError(
            f"{what}: its loss does not depend on batch.logprobs, so nothing would be learned; do not detach it"
        )
    for seed, pack in enumerate(_PACKS):
        trial.check_pack(_sequences(seed, pack), pack)
        zero = trial.answer([_without_advantage(one) for one in _sequences(seed, pack)])
        if config.zero_advantage_slope == 0 and bool((zero[1:] != 0).any()):
            raise UserError(
                f"{what}: has a gradient where the advantage is 0, and completion pruning drops such completions as if"
                " they had none; set objective.zero_advantage_slope to about the size of that gradient in the"
                " log-probability (a KL term c * kl has about c)"
            )
    trial.answer([], padding=4)
    trial.check_same(first, _sequences(0, _PACKS[0]))


@dataclass(frozen=True, slots=True)
class _Trial:
    function: PolicyLoss
    config: ObjectiveConfig
    what: str

    def check_pack(self, sequences: list[Tensor], pack: _Pack) -> None:
        """Raise UserError unless each sequence has the same answer alone and among the others."""
        whole = self.answer(sequences, pack.padding)
        self.check_same(whole, sequences, pack.padding)
        scale = whole.abs().amax(dim=1, keepdim=True)
        start = 0
        for place, sequence in enumerate(sequences):
            alone = self.answer([sequence])
            packed = whole[:, start : start + sequence.shape[1]]
            start += sequence.shape[1] + pack.padding
            if not bool(((packed - alone).abs() <= _TOLERANCE * scale).all()):
                raise UserError(
                    f"{self.what}: its loss of a sequence, or the gradient, changes with what else is in the"
                    f" micro-batch (sequence {place} of {len(sequences)}, padding {pack.padding}). That is for pruning"
                    " and packing to decide, so no weight could keep the update unbiased. Use a token's own values, or"
                    " sums over its sequence's completion tokens (sequence_sums); scale advantages by"
                    " objective.advantage, and leave means over the batch to objective.normalization"
                )

    def check_same(self, before: Tensor, sequences: list[Tensor], padding: int = 0) -> None:
        """Raise UserError unless the answer is what it was."""
        if not torch.equal(before, self.answer(sequences, padding)):
            raise UserError(
                f"{self.what}: asked again for the same batch it answers differently; a loss must be a function of its"
                " arguments, or a resumed run differs and the update is not what its weights are for"
            )

    def answer(self, sequences: list[Tensor], padding: int = 0) -> Tensor:
        """[3, T] loss, and derivatives of the summed loss times each token's factor in its log-probability and its
        entropy; 0 where the mask is."""
        closing = [torch.zeros(_ROWS, padding)] if padding else []
        parts = [pad(one, (0, padding)) for one in [*sequences, *closing]]
        rows = torch.cat(parts, dim=1)
        inputs = [rows[row].clone().requires_grad_() for row in (0, 1)]
        sequence = torch.arange(len(parts)).repeat_interleave(torch.tensor([part.shape[1] for part in parts]))
        batch = TokenBatch(*inputs, *(rows[row].clone() for row in range(2, 7)), sequence)
        given = {item.name: getattr(batch, item.name).detach().clone() for item in fields(batch)}
        try:
            result = self.function(batch, self.config)
        except Exception as error:
            raise UserError(f"{self.what}: raised {type(error).__name__} on a small made-up batch: {error}") from error
        check_result(result, batch, self.config.function)
        for name, values in given.items():
            if not torch.equal(getattr(batch, name), values):
                raise UserError(f"{self.what}: changes batch.{name} in place; work on a copy")
        mask, factor = rows[6] > 0, rows[7]
        loss = torch.where(mask, result.loss, 0.0)
        gradients: tuple[Tensor | None, ...] = (None, None)
        if loss.requires_grad:
            gradients = torch.autograd.grad(loss @ factor, inputs, allow_unused=True)
        both = [torch.zeros_like(loss) if one is None else torch.where(mask, one, 0.0) for one in gradients]
        answer = torch.stack([loss.detach(), *both])
        if not bool(torch.isfinite(answer).all()):
            raise UserError(f"{self.what}: its loss or its gradient is not finite on a small made-up batch")
        return answer


def _sequences(seed: int, pack: _Pack) -> list[Tensor]:
    """[_ROWS, length] each; 0 where nothing is predicted, as in a real pack."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for place, length in enumerate(pack.lengths):
        mask = (torch.arange(length) >= 1 + place % 2).float()
        uniform, noise = torch.rand(2, length, generator=generator), torch.randn(3, length, generator=generator)
        logprobs = -0.05 - 2.0 * uniform[0]
        others = logprobs - pack.spread * noise
        sign = 1.0 if pack.same_sign or place % 2 == 0 else -1.0
        advantages = torch.full((length,), sign * pack.advantage * (0.5 + place % 5 / 4))
        factor = 0.5 + torch.rand(length, generator=generator)
        made.append(torch.stack([logprobs, 0.1 + uniform[1], *others, advantages, torch.ones(length), factor]) * mask)
    return made


def _without_advantage(sequence: Tensor) -> Tensor:
    return torch.cat([sequence[:5], torch.zeros(1, sequence.shape[1]), sequence[6:]])
