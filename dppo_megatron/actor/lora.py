"""Low-rank adapters on Megatron's linear layers: B A x alpha / r is added to what a layer puts out.

Each projection has its own A and B, as in PEFT, also where Megatron fuses several into one layer
(`weights/mapping.py:adapter_rows`). How they lie on the ranks, and what is sent, always r numbers a token:

    column-parallel   A on every rank, B by rows as the weight      A x is gathered over the sequence, or copied
    row-parallel      A by columns as the weight, B on every rank   A x is summed over the ranks
    experts           the same, without a message                   gradients of what every rank has are summed
    on every rank     both on every rank, as the weight             nothing (Transformer Engine's latent attention)

What is on every rank gets one gradient: where ranks share a sequence, Megatron sums the parts after the last
micro-batch (`sequence_parallel`); experts over tensor parallelism sum theirs in the backward pass.
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

_ROW_PARALLEL = ("linear_proj", "linear_fc2")
_LINEAR = ("linear_qkv", "linear_fc1", *_ROW_PARALLEL)
_OF_LATENT = ("linear_q_proj", *(f"linear_{of}_{way}_proj" for of in ("q", "kv") for way in ("down", "up")))
_SENT = {
    (False, False): copy_to_tensor_model_parallel_region,
    (False, True): gather_from_sequence_parallel_region,
    (True, False): reduce_from_tensor_model_parallel_region,
    (True, True): reduce_scatter_to_sequence_parallel_region,
}
"""What becomes of A x, by (row-parallel, sequence-parallel)."""


def add_adapters(chunks: Sequence[GPTModel], architecture: Architecture, seed: int) -> None:
    """Freeze every parameter and give the targets of `architecture.lora` adapters, whose product is 0; in place.

    Numbers of A are drawn as PEFT's are, from U(-1 / sqrt(in), 1 / sqrt(in)), and depend on seed, layer, expert and
    projection only: they are the same at every layout.
    """
    for chunk in chunks:
        chunk.requires_grad_(False)
        for name, module in list(chunk.named_modules()):
            if name.rpartition(".")[2] not in (*_LINEAR, *_OF_LATENT):
                continue
            key, place = _address(chunk, name, architecture)
            if adapter_key(key, "a") in adapter_rows(architecture):
                kind: Any = type(module)
                module.__class__ = _adapted(kind)  # as Megatron's own layer is, with its keys
                module.adapt(key, place, architecture, seed)
        if chunk.pre_process:  # recomputed layers pass no gradient on to their parameters if their input has none
            chunk.embedding.register_forward_hook(lambda _module, _inputs, output: output.requires_grad_())


def _address(chunk: GPTModel, name: str, architecture: Architecture) -> tuple[str, Place]:
    """Global key and place of the weight of a linear layer.

    Example: the second stage's decoder.layers.0.mlp.linear_fc1 -> decoder.layers.mlp.linear_fc1.weight, (2,)
    """
    _, _, number, *inside = name.split(".")
    layer = chunk.decoder.layers[int(number)].layer_number - 1
    layers, place = ("decoder.layers", (layer,)) if not architecture.has_layer_keys else (f"decoder.layers.{layer}", ())
    if "local_experts" not in inside:
        return ".".join([layers, *inside, "weight"]), place
    experts = chunk.decoder.layers[int(number)].mlp.experts.num_local_experts
    expert = parallel_state.get_expert_model_parallel_rank() * experts + int(inside[-2])
    return f"{layers}.mlp.experts.experts.{inside[-1]}.weight", (*place, expert)


@functools.cache
def _adapted(linear: Any) -> type:
    return type(f"Adapted{linear.__name__}", (_Adapter, linear), {})


class _Adapter(torch.nn.Module):
    """What an adapter adds to a parallel linear layer, local or Transformer Engine's: the layer becomes one of both."""

    lora_a: Tensor
    lora_b: Tensor
    weight: Tensor
    config: TransformerConfig

    def adapt(self, key: str, place: Place, architecture: Architecture, seed: int) -> None:
        """Make the parameters of the layer whose weight is `key`."""
        assert architecture.lora is not None
        self._is_expert, self._by_rows = is_expert(key), key.split(".")[-2] in _ROW_PARALLEL
        self._gated, self._scale = "linear_fc1" in key, architecture.lora.alpha / architecture.lora.rank
        of_experts = parallel_state.get_expert_tensor_parallel_group
        group = of_experts() if self._is_expert else parallel_state.get_tensor_model_parallel_group()
        self._group, rank, size = group, group.rank(), group.size()
        self._is_copy = not self._by_rows and size > 1 and len(self.weight) == full_shape(key, architecture)[0]
        if self._is_copy:
            rank, size = 0, 1
        a = _drawn(adapter_key(key, "a"), place, architecture, seed)
        parts = adapter_parts(key, architecture)
        if self._by_rows:
            a = a.chunk(size, dim=1)[rank]
        else:  # gate and up are split each by itself
            parts = torch.cat([half.chunk(size)[rank] for half in parts.chunk(2 if self._gated else 1)])
        is_whole = len(a) == architecture.lora.rank and not parts.any()
        self._parts = None if is_whole else parts.to(self.weight.device)
        b = a.new_zeros(len(parts), architecture.lora.rank)
        for name, half, is_split in (("lora_a", a, self._by_rows), ("lora_b", b, not self._by_rows)):
            split = is_split and not self._is_copy
            parameter: Any = torch.nn.Parameter(half.to(self.weight.device, self.weight.dtype, copy=True).contiguous())
            # counted once in the norm of the gradient: what experts have on every rank, by the first of these
            once = split or (self._is_expert and rank == 0)
            set_tensor_model_parallel_attributes(parameter, once, 1 if self._by_rows else 0, 1)
            parameter.allreduce = not (self._is_expert and parallel_state.get_expert_model_parallel_world_size() > 1)
            parameter.sequence_parallel = self._sequence_parallel and not split
            self.register_parameter(name, parameter)

    @property
    def _sequence_parallel(self) -> bool:
        return bool(self.config.sequence_parallel) and not self._is_expert and self._group.size() > 1

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """As the layer's own, [T, 1, in] -> [T, 1, out], with the adapter's product added."""
        output, bias = super().forward(input_, *args, **kwargs)
        return output + self._product(input_), bias

    def _product(self, input_: Tensor) -> Tensor:
        a, b, group = self.lora_a, self.lora_b, self._group
        if self._is_expert:  # the dispatcher gathers a token for all ranks before, and sums what they put out after
            if self._by_rows:
                b = copy_to_tensor_model_parallel_region(b, group=group)
            else:
                a = copy_to_tensor_model_parallel_region(a, group=group)
        inner = F.linear(input_, a) * self._scale
        if not self._is_expert and not self._is_copy:
            inner = _SENT[self._by_rows, self._sequence_parallel](inner, group=group)
        return F.linear(inner, b if self._parts is None else by_block(b, self._parts, len(a) // b.size(1)))

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """As the layer's own; `lora_a` or `lora_b` is split as the weight is."""
        found: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)  # type: ignore[misc]
        own: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            {"lora_a": self.lora_a, "lora_b": self.lora_b},
            prefix,
            {} if self._is_copy else {"lora_a": 1} if self._by_rows else {"lora_b": 0},
            sharded_offsets,
            tp_group=self._group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        if self._gated:
            name = f"{prefix}lora_b"
            own[name] = apply_swiglu_sharded_factory(own[name], sharded_offsets)
        return found | own


def _drawn(key: str, place: Place, architecture: Architecture, seed: int) -> Tensor:
    """[targets x r, in] float32: A of the weight `key`."""
    names, (rows, width) = hf_names(key, place, architecture), full_shape(key, architecture)
    every = list(dict.fromkeys([*PROJECTIONS, *(architecture.latent.projections if architecture.latent else ())]))
    of = [every.index(name.split(".")[-3]) for name in names]
    where = (*layer_of(key, place), *(place[-1:] if is_expert(key) else ()))
    size = rows // len(of), width
    drawn = [generator(seed, "lora", one, *where).random(size, dtype="float32") for one in of]
    return torch.from_numpy((2.0 * np.concatenate(drawn) - 1.0) * width**-0.5)
