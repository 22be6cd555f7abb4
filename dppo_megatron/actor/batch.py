"""Turns planned samples into the tensors of one packed micro-batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from dppo_megatron.actor.attention import PackedSequences
from dppo_megatron.actor.context import ContextShare
from dppo_megatron.types import PackedMicrobatch, TrainSample


@dataclass(frozen=True, slots=True)
class Microbatch:
    """One pack of T tokens. Position t holds an input token, and everything about the token it predicts."""

    samples: tuple[int, ...]
    """Positions of the packed samples in the step's list of samples."""
    tokens: Tensor
    """[1, T] int64."""
    packed: PackedSequences
    targets: Tensor
    """[T] int64, the next token; 0 on padding."""
    mask: Tensor
    """[T] 1.0 where the target is a completion token."""
    coefficient: Tensor
    """[T] float64, weight / denominator of the token's sample where `mask` is 1, else 0."""
    behaviour_logprobs: Tensor
    """[T] float64, 0 where `mask` is 0."""
    old_logprobs: Tensor
    """[T] float64; the behaviour's if the samples carry none."""
    reference_logprobs: Tensor
    """[T] float64; 0 if the samples carry none."""
    advantages: Tensor
    """[T] float64."""
    sequence: Tensor
    """[T] int64, position of the token's sequence in this pack; a closing dummy segment is a sequence of its own."""
    local: Tensor
    """[T / CP] int64, positions in the pack of the tokens that this context-parallel rank holds."""

    @property
    def local_tokens(self) -> Tensor:
        """[1, T / CP] what the model of this rank reads."""
        return self.tokens[:, self.local]

    @property
    def local_position_ids(self) -> Tensor:
        """[1, T / CP] int64, restarting at 0 in each sequence."""
        return self.packed.position_ids[None]


Samples: TypeAlias = Sequence[TrainSample] | Mapping[int, TrainSample]
"""Place in the plan -> sample; a mapping holds those of this rank's data-parallel replica."""


def build_microbatch(
    samples: Samples,
    packed: PackedMicrobatch,
    *,
    device: torch.device,
    context: ContextShare | None = None,
) -> Microbatch:
    """Lay `samples[i] for i in packed.members` into their slots; the rest of the slots is padding without loss.

    A pack without members is one dummy sequence: the schedule is collective, so every rank must run it.
    """
    context = context or ContextShare()
    num_tokens, slots = packed.num_tokens, packed.cu_seqlens_padded
    tokens, targets = np.zeros(num_tokens, np.int64), np.zeros(num_tokens, np.int64)
    mask, coefficient, behaviour, advantages = (np.zeros(num_tokens) for _ in range(4))
    old, reference = np.zeros(num_tokens), np.zeros(num_tokens)
    for start, member in zip(slots, packed.members, strict=False):
        sample = samples[member]
        end = start + sample.num_tokens
        tokens[start:end], targets[start:end] = sample.token_ids[:-1], sample.token_ids[1:]
        trained = slice(start + sample.num_prompt_tokens - 1, end)
        mask[trained] = 1.0
        coefficient[trained] = sample.weight / sample.denominator
        behaviour[trained] = sample.behaviour_logprobs
        old[trained] = sample.behaviour_logprobs if sample.old_logprobs is None else sample.old_logprobs
        if sample.reference_logprobs is not None:
            reference[trained] = sample.reference_logprobs
        advantages[trained] = sample.advantage

    def send(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device)

    slot_lengths = np.diff(slots)
    return Microbatch(
        samples=packed.members,
        tokens=send(tokens)[None],
        packed=PackedSequences.of(packed, context, device),
        targets=send(targets),
        mask=send(mask),
        coefficient=send(coefficient),
        behaviour_logprobs=send(behaviour),
        old_logprobs=send(old),
        reference_logprobs=send(reference),
        advantages=send(advantages),
        sequence=send(np.repeat(np.arange(len(slot_lengths)), slot_lengths)),
        local=context.indices(slots).to(device),
    )
