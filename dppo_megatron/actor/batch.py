"""Turns planned samples into the tensors of one packed micro-batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from dppo_megatron.actor.attention import PackedSequences
from dppo_megatron.actor.layout import ContextShare, to_device
from dppo_megatron.types import PackedMicrobatch, TrainSample


@dataclass(frozen=True, slots=True)
class Microbatch:
    """One pack of T tokens. Position t holds an input token and everything about the token that it predicts."""

    samples: tuple[int, ...]
    """Positions of the packed samples in the step's list of samples."""
    tokens: Tensor
    """[1, T] int64."""
    packed: PackedSequences
    targets: Tensor
    """[T] int64, the next token; 0 on padding."""
    mask: Tensor
    """[T] float64, 1 where the target is a completion token, else 0."""
    coefficient: Tensor
    """[T] float64, weight / denominator of the token's sample where `mask` is 1, else 0."""
    figure_weight: Tensor
    """[T] float64, the token's weight in metrics of the policy; 0 where `mask` is 0."""
    behaviour_logprobs: Tensor
    """[T] float64, 0 where `mask` is 0."""
    old_logprobs: Tensor
    """[T] float64; `behaviour_logprobs` if the samples carry none."""
    reference_logprobs: Tensor
    """[T] float64; 0 if the samples carry none."""
    advantages: Tensor
    """[T] float64."""
    sequence: Tensor
    """[T] int64, index of the token's sequence in this pack; a final dummy segment counts as a sequence."""
    local: Tensor
    """[T / CP] int64, positions in the pack of the tokens that this context-parallel rank holds."""
    trained: Tensor
    """int64, positions in the pack where `mask` is 1, from the host: a boolean index would wait for the device."""
    local_trained: Tensor
    """int64, the indices into `local` where `mask` is 1."""
    trained_lengths: tuple[int, ...]
    """How many of `trained` belong to each sample, in the order of `samples`, which is also that of the pack."""


Samples: TypeAlias = Sequence[TrainSample] | Mapping[int, TrainSample]
"""Index in the plan -> sample; a mapping may hold only those of this rank's data-parallel replica."""


def build_microbatch(
    samples: Samples,
    packed: PackedMicrobatch,
    *,
    device: torch.device,
    context: ContextShare | None = None,
    vocab_size: int = 1,
) -> Microbatch:
    """Write `samples[i] for i in packed.members` into their slots; the rest of each slot is padding without loss. A
    pack without members is one dummy sequence: the schedule is collective, so every rank must run it. Padding counts
    through `vocab_size` tokens: equal ones have equal hidden states, and would all visit the same few experts."""
    context = context or ContextShare()
    num_tokens, slots = packed.num_tokens, packed.cu_seqlens_padded
    # two tensors, so that a whole pack moves to the device in two copies
    integers = torch.zeros(3, num_tokens, dtype=torch.int64)
    floats = torch.zeros(7, num_tokens, dtype=torch.float64)
    tokens, targets, sequence = integers.numpy()
    tokens[:] = np.arange(num_tokens) % vocab_size
    mask, coefficient, counted, behaviour, old, reference, advantages = floats.numpy()
    lengths = []
    for start, member in zip(slots, packed.members, strict=False):
        sample = samples[member]
        end = start + sample.num_tokens
        tokens[start:end], targets[start:end] = sample.token_ids[:-1], sample.token_ids[1:]
        scored = slice(start + sample.num_prompt_tokens - 1, end)
        lengths.append(scored.stop - scored.start)
        mask[scored] = 1.0
        coefficient[scored] = sample.weight / sample.denominator
        counted[scored] = sample.figure_weight
        behaviour[scored] = sample.behaviour_logprobs
        old[scored] = sample.behaviour_logprobs if sample.old_logprobs is None else sample.old_logprobs
        if sample.reference_logprobs is not None:
            reference[scored] = sample.reference_logprobs
        advantages[scored] = sample.advantage

    slot_lengths = np.diff(slots)
    sequence[:] = np.repeat(np.arange(len(slot_lengths)), slot_lengths)
    own = context.indices(slots)
    trained = torch.from_numpy(np.flatnonzero(mask))
    integers, floats = to_device(integers, device), to_device(floats, device)
    return Microbatch(
        samples=packed.members,
        tokens=integers[0][None],
        packed=PackedSequences.of(packed, context, device),
        targets=integers[1],
        mask=floats[0],
        coefficient=floats[1],
        figure_weight=floats[2],
        behaviour_logprobs=floats[3],
        old_logprobs=floats[4],
        reference_logprobs=floats[5],
        advantages=floats[6],
        sequence=integers[2],
        local=to_device(own, device),
        trained=to_device(trained, device),
        local_trained=to_device(torch.from_numpy(np.flatnonzero(mask[own.numpy()])), device),
        trained_lengths=tuple(lengths),
    )
