"""Alignment of sequences in a micro-batch, as the parallel layout and the number format require (docs/packing.md)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from dppo_megatron.config.schema import INTERLEAVED_GROUP, ActorConfig
from dppo_megatron.types import IntArray, PackedMicrobatch

Recipe: TypeAlias = Literal["bf16", "tensorwise", "delayed", "blockwise", "mxfp8"]

RECIPE_MULTIPLE: dict[Recipe, int] = {"bf16": 1, "tensorwise": 16, "delayed": 16, "blockwise": 128, "mxfp8": 32}
"""A micro-batch's tokens on each rank, after the sequence- and context-parallel splits, are a multiple of this."""


@dataclass(frozen=True, slots=True)
class PackingLayout:
    """The part of the parallel layout that the planner needs."""

    data_parallel: int = 1
    context_parallel: int = 1
    tensor_parallel: int = 1
    sequence_parallel: bool = False
    pipeline_parallel: int = 1
    virtual_pipeline: int = 1
    interleaved_group: int = 0
    """Micro-batches that a stage runs through one model chunk before the next chunk; 0: the number of stages."""
    recipe: Recipe = "bf16"

    @property
    def sequence_multiple(self) -> int:
        """Each sample's slot is a multiple of this: 2 x CP zig-zag chunks, TP sequence-parallel shards."""
        chunks = 2 * self.context_parallel if self.context_parallel > 1 else 1
        return math.lcm(chunks, self.tensor_parallel if self.sequence_parallel else 1)

    @property
    def microbatch_multiple(self) -> int:
        """A micro-batch's token count is a multiple of this."""
        shards = self.context_parallel * (self.tensor_parallel if self.sequence_parallel else 1)
        return math.lcm(self.sequence_multiple, RECIPE_MULTIPLE[self.recipe] * shards)

    @property
    def microbatch_group(self) -> int:
        """Every rank's number of micro-batches is a multiple of this (the interleaved schedule runs them in groups)."""
        return (self.interleaved_group or self.pipeline_parallel) if self.virtual_pipeline > 1 else 1

    def slots(self, lengths: IntArray) -> IntArray:
        """[n] tokens that samples of `lengths` [n] tokens occupy in a micro-batch."""
        multiple = self.sequence_multiple
        return -(-lengths // multiple) * multiple

    def place(self, members: Sequence[int], lengths: Sequence[int], pad_to: int = 0) -> PackedMicrobatch:
        """Place samples one after the other, with a final dummy segment up to `pad_to` or the next multiple.

        Args:
            lengths: tokens of every sample of the step, indexed by `members`.
            pad_to: total tokens of the result, a multiple of `microbatch_multiple`; 0: the smallest possible.
        """
        multiple, whole = self.sequence_multiple, self.microbatch_multiple
        padded = [0]
        for i in members:
            padded.append(padded[-1] + -(-lengths[i] // multiple) * multiple)
        total = pad_to or max(-(-padded[-1] // whole), 1) * whole
        if total > padded[-1]:
            padded.append(total)
        return PackedMicrobatch(tuple(members), tuple(padded))


def packing_layout(actor: ActorConfig, world_size: int) -> PackingLayout:
    """The planner's view of a checked actor configuration on `world_size` ranks."""
    layout = actor.layout
    model_ranks = layout.tensor_parallel * layout.pipeline_parallel * layout.context_parallel
    return PackingLayout(
        data_parallel=world_size // model_ranks,
        context_parallel=layout.context_parallel,
        tensor_parallel=layout.tensor_parallel,
        sequence_parallel=layout.sequence_parallel and layout.tensor_parallel > 1,
        pipeline_parallel=layout.pipeline_parallel,
        virtual_pipeline=layout.virtual_pipeline,
        interleaved_group=actor.megatron.get(INTERLEAVED_GROUP) or 0,
        recipe="bf16" if actor.fp8 == "off" else actor.fp8,
    )
