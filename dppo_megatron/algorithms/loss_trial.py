"""A user's policy loss is tried on made-up packs before anything expensive.

A sequence's weight undoes pruning only if its loss is local, a function of that sequence. One that looks across the
pack (advantages centred by its mean) depends on which others were kept and on how they were packed, and no weight
corrects that. So each sequence is tried alone and among others: same values, same gradient, none to the others. Within
a sequence tokens may be mixed, as GSPO does. What depends on more than the packs below show is not found: on two
thousand tokens, or a thousandth call.
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
"""Of the pack's largest value: float32 sums in another order differ by 1e-6, one sequence of fifty counts 1e-2."""
_ADVANTAGES, _MASK, _FACTOR = 5, 6, 7
"""Rows of a made-up sequence [8, T] after the first fields of a TokenBatch; each token's loss is multiplied by its own
factor, so that one backward pass tells whose gradient goes where."""
_PACKS: tuple[tuple[tuple[int, ...], float, float, int], ...] = (
    # tokens of each sequence; scale of advantages and of log-ratios; padding after each, and at the end by itself
    ((4, 4), 1.0, 0.1, 0),
    ((7, 3, 5), 1.0, 0.1, 2),
    ((3, 5, 7, 4), 8.0, 2.0, 0),
    ((6, 3, 9, 4, 5), 1.0, 0.5, 1),
    ((5,), 1.0, 0.1, 3),
    ((4, 6, 3), 0.0, 0.1, 0),
    (tuple(3 + place * 7 % 31 for place in range(50)), 1.0, 0.5, 1),
    ((1500, 20, 500), 0.3, 0.1, 0),
    ((), 1.0, 0.1, 4),  # what a rank without samples runs
)


def check_policy_loss(function: PolicyLoss, config: ObjectiveConfig, key: str = "objective.function") -> None:
    """Try a user's loss.

    Raises:
        UserError: it raises, returns something else than a TokenLoss of the batch's shape, has no gradient, is not
            finite, changes its arguments, answers differently when asked again, looks at other sequences or at padding,
            or moves completions with advantage 0 while the settings say that it does not.
    """
    trial = _Trial(function, config, f"{key} = '{config.function}'")
    sequences = _sequences(0)
    first = trial.answer(sequences)
    if not bool((first[1:] != 0).any()):
        trial.refuse("its loss does not depend on batch.logprobs, so nothing would be learned; do not detach it")
    for number, (*_, padding) in enumerate(_PACKS):
        trial.check_local(_sequences(number), padding)
        zero = trial.answer([one.index_fill(0, torch.tensor(_ADVANTAGES), 0.0) for one in _sequences(number)], padding)
        if config.zero_advantage_slope == 0 and bool((zero[1:] != 0).any()):
            trial.refuse(
                "has a gradient where the advantage is 0, and completion pruning drops such completions as if they had"
                " none; set objective.zero_advantage_slope to about the size of that gradient in the log-probability (a"
                " KL term c * kl has about c)"
            )
    trial.check_same(first, sequences, 0)


@dataclass(frozen=True, slots=True)
class _Trial:
    function: PolicyLoss
    config: ObjectiveConfig
    what: str

    def refuse(self, why: str) -> None:
        raise UserError(f"{self.what}: {why}")

    def check_same(self, before: Tensor, sequences: list[Tensor], padding: int) -> None:
        if not torch.equal(before, self.answer(sequences, padding)):
            self.refuse("answers differently when asked again; a loss must be a function of its arguments")

    def check_local(self, sequences: list[Tensor], padding: int) -> None:
        """Each sequence has the same answer alone and among the others."""
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

    def answer(self, sequences: list[Tensor], padding: int = 0) -> Tensor:
        """[3, T] loss, and the gradient of its sum by factors in log-probability and entropy; 0 where the mask is."""
        parts = [pad(one, (0, padding)) for one in sequences] + [torch.zeros(8, padding)]
        rows = torch.cat(parts, dim=1)
        inputs = [rows[row].clone().requires_grad_() for row in (0, 1)]
        lengths = torch.tensor([part.shape[1] for part in parts])
        rest = {item.name: rows[row].clone() for row, item in enumerate(fields(TokenBatch)[:7]) if row > 1}
        rest["sequence"] = torch.arange(len(parts)).repeat_interleave(lengths)
        batch = TokenBatch(*inputs, **rest)
        given = {item.name: getattr(batch, item.name).detach().clone() for item in fields(batch)}
        try:
            result = self.function(batch, self.config)
        except Exception as error:
            raise UserError(f"{self.what}: raised {type(error).__name__} on a small made-up batch: {error}") from error
        check_result(result, batch, self.config.function)
        if changed := [name for name, values in given.items() if not torch.equal(getattr(batch, name), values)]:
            self.refuse(f"changes batch.{changed[0]} in place; work on a copy")
        mask, loss = rows[_MASK] > 0, torch.where(rows[_MASK] > 0, result.loss, 0.0)
        found: tuple[Tensor | None, ...] = (None, None)
        if loss.requires_grad:
            found = torch.autograd.grad(loss @ rows[_FACTOR], inputs, allow_unused=True)
        both = [torch.zeros_like(loss) if one is None else torch.where(mask, one, 0.0) for one in found]
        answer = torch.stack([loss.detach(), *both])
        if not bool(torch.isfinite(answer).all()):
            self.refuse("its loss or its gradient is not finite on a small made-up batch")
        return answer


def _sequences(number: int) -> list[Tensor]:
    """[8, length] each, of the pack of this number; 0 where nothing is predicted, as in a real pack."""
    generator = torch.Generator().manual_seed(number)
    lengths, scale, spread, _ = _PACKS[number]
    made = []
    for place, length in enumerate(lengths):
        mask = (torch.arange(length) >= 1 + place % 2).float()  # one or two tokens of the prompt
        uniform, noise = torch.rand(3, length, generator=generator), torch.randn(3, length, generator=generator)
        logprobs = -0.05 - 2.0 * uniform[0]
        advantages = torch.full((length,), (1 - place % 2 * 2) * scale * (0.5 + place % 5 / 4))
        others = logprobs - spread * noise
        columns = [logprobs, 0.1 + uniform[1], *others, advantages, torch.ones(length), 0.5 + uniform[2]]
        made.append(torch.stack(columns) * mask)
    return made
