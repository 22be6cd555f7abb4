"""From planned samples to the tensors of one packed micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dppo_megatron.actor.attention import PackedSequences
from dppo_megatron.types import TrainSample


@dataclass(frozen=True, slots=True)
class Microbatch:
    """One pack of T tokens. Position t holds an input token, and everything about the token it predicts."""

    samples: tuple[int, ...]
    """Positions of the packed samples in the step's list of samples."""
    tokens: Tensor
    """[1, T] int64."""
    position_ids: Tensor
    """[1, T] int64, restarting at 0 in each sequence."""
    packed: PackedSequences
    targets: Tensor
    """[T] int64, the next token; 0 on padding."""
    mask: Tensor
    """[T] 1.0 where the target is a completion token."""
    coefficient: Tensor
    """[T] float64, weight / denominator of the token's sample where `mask` is 1, else 0."""
    behaviour_logprobs: Tensor
    """[T] float64, 0 where `mask` is 0."""
    advantages: Tensor
    """[T] float64."""
    sequence: Tensor
    """[T] int64, position of the token's sequence in this pack; padding is a sequence of its own."""


def build_microbatch(
    samples: Sequence[TrainSample], members: Sequence[int], *, alignment: int, device: torch.device
) -> Microbatch:
    """Pack `samples[i] for i in members`, closing with a dummy sequence up to a multiple of `alignment` tokens.

    An empty pack becomes one dummy sequence: the schedule is collective, so every rank must run it. Padding is a
    sequence of its own and never the tail of a real one, so that no real token attends to it.
    """
    chosen = [samples[i] for i in members]
    lengths = [sample.num_tokens for sample in chosen]
    total = sum(lengths)
    padding = -total % alignment if total else alignment
    if padding:
        lengths.append(padding)
    num_tokens = total + padding
    tokens, targets = np.zeros(num_tokens, np.int64), np.zeros(num_tokens, np.int64)
    mask, coefficient, behaviour, advantages = (np.zeros(num_tokens) for _ in range(4))
    start = 0
    for sample in chosen:
        end = start + sample.num_tokens
        tokens[start:end], targets[start:end] = sample.token_ids[:-1], sample.token_ids[1:]
        trained = slice(start + sample.num_prompt_tokens - 1, end)
        mask[trained] = 1.0
        coefficient[trained] = sample.weight / sample.denominator
        behaviour[trained] = sample.behaviour_logprobs
        advantages[trained] = sample.advantage
        start = end

    def send(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device)

    return Microbatch(
        samples=tuple(members),
        tokens=send(tokens)[None],
        position_ids=send(np.concatenate([np.arange(n) for n in lengths]))[None],
        packed=PackedSequences.from_lengths(lengths, device),
        targets=send(targets),
        mask=send(mask),
        coefficient=send(coefficient),
        behaviour_logprobs=send(behaviour),
        advantages=send(advantages),
        sequence=send(np.repeat(np.arange(len(lengths)), lengths)),
    )
