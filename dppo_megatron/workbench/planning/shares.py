"""How many parameters one rank holds: the sizes that every estimate begins with.

Counted from the table of weights that the trainer loads with (`weights/mapping.py`), so a new model family can be
planned as soon as it can be trained.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from dppo_megatron.config.schema import LayoutConfig
from dppo_megatron.weights import mapping
from dppo_megatron.weights.architecture import Architecture

_ON_EVERY_RANK = (
    *("layer_norm_weight", "layernorm.weight", "router.weight", "expert_bias", "gate_weight"),
    *("linear_q_down_proj.weight", "linear_kv_down_proj.weight"),
)
"""Endings of the keys that tensor parallelism does not split."""


@dataclass(frozen=True, slots=True)
class Degrees:
    """The sizes of each kind of parallelism."""

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


ONE_GPU = Degrees(1, 1, 1, 1, 1, 1, 1, False)


@dataclass(frozen=True, slots=True)
class Tensors:
    """`count` tensors of `numel` elements on one rank."""

    key: str
    """In the table of weights."""
    numel: int
    count: int
    is_expert: bool
    is_linear: bool
    """The weight of a product in a layer, which FP8 runs in 8 bits."""
    is_trained: bool
    """Has a gradient and optimizer state; where there are adapters, only they have."""


@dataclass(frozen=True, slots=True)
class Share:
    """The parameters of one rank."""

    tensors: tuple[Tensors, ...]

    @property
    def trained(self) -> Share:
        return Share(tuple(one for one in self.tensors if one.is_trained))

    def count(self, *, experts: bool | None = None, padded_to: int = 1) -> int:
        """Parameters: all, or only (no) experts, each tensor rounded up to `padded_to` elements.

        Example: tensors of 48 and 100 elements, padded to 64: 64 + 128 = 192.
        """
        chosen = (one for one in self.tensors if experts is None or one.is_expert == experts)
        return sum(-(-one.numel // padded_to) * padded_to * one.count for one in chosen)


def share_of(architecture: Architecture, degrees: Degrees, stage: int, layers: int | None = None) -> Share:
    """What a rank of pipeline stage `stage` holds; `layers`: how many the stage has, None: an even share."""
    layers = architecture.num_layers // degrees.pipeline if layers is None else layers
    return Share(tuple(_tensors(architecture, degrees, stage, layers)))


def whole_model(architecture: Architecture, *, experts: bool | None = None) -> int:
    """All parameters, or only (no) experts; a tied output layer counts once, adapters do not count."""
    return share_of(replace(architecture, lora=None), ONE_GPU, 0).count(experts=experts)


def trained_parameters(architecture: Architecture) -> int:
    """Parameters of the adapters if there are any, else all."""
    return share_of(architecture, ONE_GPU, 0).trained.count()


def active_parameters(architecture: Architecture) -> int:
    """Parameters that one token is multiplied by: no embedding, and of the experts those that it visits."""
    experts, total = architecture.experts, 0
    for one in share_of(replace(architecture, lora=None), ONE_GPU, 0).tensors:
        if one.key != mapping.EMBEDDING or architecture.tied_embeddings:
            size = one.numel * one.count
            total += size * experts.per_token // experts.count if experts and one.is_expert else size
    return total


def _keys(architecture: Architecture, stage: int, layers: int, keys: Iterable[str]) -> Iterator[tuple[str, int | None]]:
    """Each of `keys` with the number of the stage's layers that have it, None outside of layers. Where keys differ by
    layer, those of the first stand for a mixture's dense layers and those of the last for its others."""
    dense = min(architecture.experts.dense_layers, layers) if architecture.experts and stage == 0 else 0
    last = architecture.num_layers - 1
    for key in keys:
        if not architecture.has_layer_keys or not mapping.layer_of(key, ()):
            yield key, layers if mapping.stacked_axes(key, architecture) else None
        elif mapping.layer_of(key, ()) in ((0,), (last,)):
            yield key, layers - dense if mapping.layer_of(key, ()) == (last,) else dense


def _tensors(architecture: Architecture, degrees: Degrees, stage: int, layers: int) -> Iterator[Tensors]:
    last, adapters = stage == degrees.pipeline - 1, mapping.adapter_rows(architecture)
    experts = architecture.experts.count // degrees.expert if architecture.experts else 0
    for key, in_layers in _keys(architecture, stage, layers, (*mapping.table(architecture), *adapters)):
        shape, of_expert = mapping.full_shape(key, architecture), mapping.is_expert(key)
        numel, is_linear = math.prod(shape), False
        split = degrees.expert_tensor if of_expert else degrees.tensor
        if key in adapters:  # one half is split as its weight is, the other is on every rank (`actor/lora.py`)
            by_rows = ".linear_proj." in key or ".linear_fc2." in key
            split = split if key.endswith("_a") == by_rows else 1
        elif key.endswith(_ON_EVERY_RANK) or in_layers is None:
            split = degrees.tensor if key in (mapping.EMBEDDING, mapping.OUTPUT) else 1
        else:
            is_linear = len(shape) > 1
        count = int(last) if in_layers is None else in_layers * (experts if of_expert else 1)
        if key in (mapping.EMBEDDING, mapping.OUTPUT):
            numel = architecture.padded_vocab_size(degrees.tensor) * architecture.hidden_size
        if key == mapping.EMBEDDING:  # a tied output layer is a second copy where the last stage is not the first
            count = int(stage == 0 or (last and architecture.tied_embeddings))
        if count:
            is_trained = architecture.lora is None or key in adapters
            yield Tensors(key, -(-numel // split), count, of_expert, is_linear, is_trained)
