"""Low-rank adapters on Megatron's linear layers: B A x alpha / r is added to a layer's output.

Each projection has its own A and B, as in PEFT, also where Megatron fuses several (`weights/mapping.py:adapter_rows`).
How tensor-parallel ranks split A and B, and what they exchange, r numbers a token:

    column-parallel   A on every rank, B by rows as the weight      A x is gathered over the sequence, or copied
    row-parallel      A by columns as the weight, B on every rank   A x is summed over the ranks
    experts           the same                                      only gradients of the replicated parts
    replicated        both on every rank, as the weight             nothing (Transformer Engine's latent attention)

Replicated parts get the same gradient on every rank: with sequence parallelism Megatron sums it after the last
micro-batch (`sequence_parallel`); for experts with tensor parallelism it is summed in the backward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from dppo_megatron.randomness import generator
from dppo_megatron.weights.architecture import Architecture
from dppo_megatron.weights.layer_parts import PROJECTIONS
from dppo_megatron.weights.mapping import (
    Place,
    adapter_key,
    adapter_parts,
    adapter_rows,
    by_block,
    full_shape,
    hf_names,
    is_expert,
    layer_of,
)
from dppo_megatron.weights.sharded import local_shards, place_of

_ROW_PARALLEL = ("linear_proj", "linear_fc2")
_EXCHANGE = {
    (False, False): copy_to_tensor_model_parallel_region,
    (False, True): gather_from_sequence_parallel_region,
    (True, False): reduce_from_tensor_model_parallel_region,
    (True, True): reduce_scatter_to_sequence_parallel_region,
}
"""(row-parallel, sequence-parallel) -> how ranks exchange A x."""


def add_adapters(chunks: Sequence[GPTModel], architecture: Architecture, seed: int) -> None:
    """Freeze all parameters and add adapters to the targets of `architecture.lora`, in place. B starts at 0. A is drawn
    as in PEFT, from U(-1 / sqrt(in), 1 / sqrt(in)), and the same in every layout."""
    for chunk in chunks:
        chunk.requires_grad_(False)
        shards = {shard.data.data_ptr(): shard for shard in local_shards([chunk]) if shard.data is not None}
        for module in list(chunk.modules()):
            weight = getattr(module, "weight", None)
            shard = shards.get(weight.data_ptr()) if isinstance(weight, Tensor) else None
            if shard is not None and adapter_key(shard.key, "a") in adapter_rows(architecture):
                kind: Any = type(module)
                module.__class__ = _adapted(kind)  # still Megatron's own layer, with the same state-dict keys
                module.adapt(shard.key, place_of(shard), architecture, seed)
        if chunk.pre_process:  # recomputation gives a layer's parameters no gradient if its input requires none
            chunk.embedding.register_forward_hook(lambda _module, _inputs, output: output.requires_grad_())


@functools.cache
def _adapted(linear: Any) -> type:
    return type(f"Adapted{linear.__name__}", (_Adapter, linear), {})


class _Adapter(torch.nn.Module):
    """Mixin that adds an adapter to a parallel linear layer of Megatron or Transformer Engine (see `_adapted`)."""

    lora_a: Tensor
    lora_b: Tensor
    weight: Tensor
    config: TransformerConfig

    def adapt(self, key: str, place: Place, architecture: Architecture, seed: int) -> None:
        """Create this rank's A and B for the weight `key`."""
        assert architecture.lora is not None
        self._is_expert, self._is_row_parallel = is_expert(key), key.split(".")[-2] in _ROW_PARALLEL
        self._is_gated, self._scale = "linear_fc1" in key, architecture.lora.alpha / architecture.lora.rank
        expert_group = parallel_state.get_expert_tensor_parallel_group
        group = expert_group() if self._is_expert else parallel_state.get_tensor_model_parallel_group()
        self._group, rank, size = group, group.rank(), group.size()
        has_all_rows = len(self.weight) == full_shape(key, architecture)[0]
        self._is_replicated = not self._is_row_parallel and size > 1 and has_all_rows
        if self._is_replicated:
            rank, size = 0, 1
        a = _initial_a(adapter_key(key, "a"), place, architecture, seed)
        parts = adapter_parts(key, architecture)
        if self._is_row_parallel:
            a = a.chunk(size, dim=1)[rank]
        else:  # gate and up are split over the ranks separately
            parts = torch.cat([half.chunk(size)[rank] for half in parts.chunk(2 if self._is_gated else 1)])
        has_one_block = len(a) == architecture.lora.rank and not parts.any()
        self._parts = None if has_one_block else parts.to(self.weight.device)
        b = a.new_zeros(len(parts), architecture.lora.rank)
        for name, half, is_split in (("lora_a", a, self._is_row_parallel), ("lora_b", b, not self._is_row_parallel)):
            split = is_split and not self._is_replicated
            parameter: Any = torch.nn.Parameter(half.to(self.weight.device, self.weight.dtype, copy=True).contiguous())
            # the gradient norm must count replicated parts once; for experts the group's first rank counts them
            is_counted = split or (self._is_expert and rank == 0)
            set_tensor_model_parallel_attributes(parameter, is_counted, 1 if self._is_row_parallel else 0, 1)
            parameter.allreduce = not (self._is_expert and parallel_state.get_expert_model_parallel_world_size() > 1)
            parameter.sequence_parallel = self._sequence_parallel and not split
            self.register_parameter(name, parameter)

    @property
    def _sequence_parallel(self) -> bool:
        return bool(self.config.sequence_parallel) and not self._is_expert and self._group.size() > 1

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """The layer's own output plus the adapter's: [T, 1, in] -> [T, 1, out]."""
        output, bias = super().forward(input_, *args, **kwargs)
        return output + self._product(input_), bias

    def _product(self, input_: Tensor) -> Tensor:
        a, b, group = self.lora_a, self.lora_b, self._group
        if self._is_expert:  # the dispatcher gathers the tokens before the expert and sums the ranks' outputs after it
            if self._is_row_parallel:
                b = copy_to_tensor_model_parallel_region(b, group=group)
            else:
                a = copy_to_tensor_model_parallel_region(a, group=group)
        inner = F.linear(input_, a) * self._scale
        if not self._is_expert and not self._is_replicated:
            inner = _EXCHANGE[self._is_row_parallel, self._sequence_parallel](inner, group=group)
        return F.linear(inner, b if self._parts is None else by_block(b, self._parts, len(a) // b.size(1)))

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """The layer's own, with `lora_a` and `lora_b`; one of them is split as the weight is."""
        layer: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)  # type: ignore[misc]
        adapter: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            {"lora_a": self.lora_a, "lora_b": self.lora_b},
            prefix,
            {} if self._is_replicated else {"lora_a": 1} if self._is_row_parallel else {"lora_b": 0},
            sharded_offsets,
            tp_group=self._group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        if self._is_gated:
            name = f"{prefix}lora_b"
            adapter[name] = apply_swiglu_sharded_factory(adapter[name], sharded_offsets)
        return layer | adapter


def _initial_a(key: str, place: Place, architecture: Architecture, seed: int) -> Tensor:
    """[targets x r, in] float32: the initial A of the weight `key`."""
    names, (rows, width) = hf_names(key, place, architecture), full_shape(key, architecture)
    known = list(dict.fromkeys([*PROJECTIONS, *(architecture.latent.projections if architecture.latent else ())]))
    projections = [known.index(name.split(".")[-3]) for name in names]
    where = (*layer_of(key, place), *(place[-1:] if is_expert(key) else ()))
    size = rows // len(projections), width
    drawn = [generator(seed, "lora", index, *where).random(size, dtype="float32") for index in projections]
    return torch.from_numpy((2.0 * np.concatenate(drawn) - 1.0) * width**-0.5)
