"""How many parameters one rank holds: the sizes that every estimate begins with.

Counted from the table of weights that the trainer loads by (`weights/mapping.py`), so a new model family is planned as
soon as it can be trained.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from dppo_megatron.config.schema import LayoutConfig
from dppo_megatron.weights.architecture import Architecture
from dppo_megatron.weights.mapping import EMBEDDING, OUTPUT, full_shape, stacked_axes, table

_ON_EVERY_RANK = ("layer_norm_weight", "layernorm.weight", "router.weight")
"""Endings of the keys that tensor parallelism does not split."""


@dataclass(frozen=True, slots=True)
class Degrees:
    """How many GPUs share what."""

    gpus: int
    tensor: int
    pipeline: int
    virtual: int
    context: int
    expert: int
    expert_tensor: int
    sequence_parallel: bool

    @staticmethod
    def of(layout: LayoutConfig, gpus: int) -> Degrees:
        """A checked layout on `gpus` GPUs."""
        return Degrees(
            gpus=gpus,
            tensor=layout.tensor_parallel,
            pipeline=layout.pipeline_parallel,
            virtual=layout.virtual_pipeline,
            context=layout.context_parallel,
            expert=layout.expert_parallel,
            expert_tensor=layout.expert_tensor_parallel or layout.tensor_parallel,
            sequence_parallel=layout.sequence_parallel and layout.tensor_parallel > 1,
        )

    @property
    def data(self) -> int:
        """Replicas of the model."""
        return self.gpus // (self.tensor * self.pipeline * self.context)

    @property
    def sharing_state(self) -> int:
        """Ranks over which the distributed optimizer shares the state of what is no expert."""
        return self.data * self.context

    @property
    def sharing_expert_state(self) -> int:
        """The same for experts."""
        return self.gpus // (self.expert * self.expert_tensor * self.pipeline)


@dataclass(frozen=True, slots=True)
class Tensors:
    """Equal parameters of one rank."""

    numel: int
    """Elements of each."""
    count: int
    is_expert: bool
    is_linear: bool = False
    """The weight of a product in a layer, which FP8 runs in 8 bits."""


@dataclass(frozen=True, slots=True)
class Share:
    """The parameters of one rank."""

    tensors: tuple[Tensors, ...]

    def count(self, *, experts: bool | None = None, padded_to: int = 1) -> int:
        """Parameters: all, or only (no) experts, each tensor rounded up to `padded_to` elements.

        Example: tensors of 48 and 100 elements, padded to 64: 64 + 128 = 192.
        """
        chosen = (one for one in self.tensors if experts is None or one.is_expert == experts)
        return sum(-(-one.numel // padded_to) * padded_to * one.count for one in chosen)


def share_of(architecture: Architecture, degrees: Degrees, stage: int, layers: int | None = None) -> Share:
    """What a rank of pipeline stage `stage` holds; `layers`: those of the stage, None: an even share."""
    if layers is None:
        layers = architecture.num_layers // degrees.pipeline
    return Share(tuple(_tensors(architecture, degrees, stage, layers)))


def whole_model(architecture: Architecture, *, experts: bool | None = None) -> int:
    """All parameters, or only (no) experts, a tied output layer counted once."""
    return share_of(architecture, Degrees(1, 1, 1, 1, 1, 1, 1, False), 0).count(experts=experts)


def active_parameters(architecture: Architecture) -> int:
    """Parameters that one token is multiplied by: no embedding, and of the experts those that it visits."""
    experts, total = architecture.experts, 0
    for key in table(architecture):
        if key == EMBEDDING and not architecture.tied_embeddings:
            continue
        axes = stacked_axes(key, architecture)
        size = math.prod(full_shape(key, architecture)) * (architecture.num_layers if axes else 1)
        total += size * (experts.per_token if experts and axes == 2 else 1)
    return total


def _tensors(architecture: Architecture, degrees: Degrees, stage: int, layers: int) -> Iterator[Tensors]:
    last = stage == degrees.pipeline - 1
    experts = architecture.experts.count // degrees.expert if architecture.experts else 0
    for key in table(architecture):
        numel = math.prod(full_shape(key, architecture))
        split = 1 if key.endswith(_ON_EVERY_RANK) else degrees.tensor
        axes = stacked_axes(key, architecture)
        if key in (EMBEDDING, OUTPUT):
            rows = architecture.padded_vocab_size(degrees.tensor)
            numel = rows * architecture.hidden_size
            # a tied output layer is a second copy where the last stage is not the first
            here = stage == 0 or (last and architecture.tied_embeddings) if key == EMBEDDING else last
            if here:
                yield Tensors(numel // split, 1, False)
        elif axes == 0:
            if last:  # the final norm
                yield Tensors(numel, 1, False)
        elif axes == 1:
            is_linear = len(full_shape(key, architecture)) > 1 and not key.endswith(_ON_EVERY_RANK)
            yield Tensors(-(-numel // split), layers, False, is_linear)
        else:
            yield Tensors(numel // degrees.expert_tensor, layers * experts, True, True)
