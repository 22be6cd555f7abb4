"""The one table of names and shapes: a Megatron parameter's global key and the Hugging Face tensors it is made of.

Keys are those of Megatron's sharded state dict: global, the same for every tensor / pipeline split and for the
local and the Transformer Engine layer specs. So one row serves loading, saving and the weight sync in every layout;
Megatron itself knows the offset of a shard in the full tensor (`sharded.py`).

Shapes are written once, for Megatron's full (unsharded) tensors. Those of the Hugging Face tensors are derived by
splitting an empty tensor, so the two sides cannot disagree.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from dppo_megatron.weights.architecture import Architecture

Shape: TypeAlias = tuple[int, ...]
Place: TypeAlias = tuple[int, ...]
"""Which copy of a key: () outside the layers, (layer,), or (layer, expert)."""

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
_LAYERS = "decoder.layers."
_QKV = _LAYERS + "self_attention.linear_qkv."
_EXPERT = _LAYERS + "mlp.experts.experts."
_HF = "model.layers.{layer}."

_EVERY = {
    EMBEDDING: ("model.embed_tokens.weight",),
    OUTPUT: ("lm_head.weight",),
    "decoder.final_layernorm.weight": ("model.norm.weight",),
    _QKV + "layer_norm_weight": (_HF + "input_layernorm.weight",),
    _QKV + "weight": tuple(_HF + f"self_attn.{part}_proj.weight" for part in "qkv"),
    _LAYERS + "self_attention.linear_proj.weight": (_HF + "self_attn.o_proj.weight",),
}
_QKV_BIAS = {_QKV + "bias": tuple(_HF + f"self_attn.{part}_proj.bias" for part in "qkv")}
_QK_NORM = {
    _LAYERS + f"self_attention.{part}_layernorm.weight": (_HF + f"self_attn.{part}_norm.weight",) for part in "qk"
}
_DENSE = {
    _LAYERS + "mlp.linear_fc1.layer_norm_weight": (_HF + "post_attention_layernorm.weight",),
    _LAYERS + "mlp.linear_fc1.weight": (_HF + "mlp.gate_proj.weight", _HF + "mlp.up_proj.weight"),
    _LAYERS + "mlp.linear_fc2.weight": (_HF + "mlp.down_proj.weight",),
}
_MOE = {
    _LAYERS + "pre_mlp_layernorm.weight": (_HF + "post_attention_layernorm.weight",),
    _LAYERS + "mlp.router.weight": (_HF + "mlp.gate.weight",),
    _EXPERT + "linear_fc1.weight": tuple(_HF + f"mlp.experts.{{expert}}.{part}_proj.weight" for part in ("gate", "up")),
    _EXPERT + "linear_fc2.weight": (_HF + "mlp.experts.{expert}.down_proj.weight",),
}

PADDED_TO_VOCAB = (EMBEDDING, OUTPUT)
"""Keys whose dimension 0 is the vocabulary, padded to a multiple of the tensor-parallel size."""


def table(architecture: Architecture) -> dict[str, tuple[str, ...]]:
    """Global Megatron key to Hugging Face name patterns; more than one are joined along dimension 0.

    Queries, keys and values are interleaved by key-value head. A tied output layer has no row.
    """
    rows = dict(_EVERY)
    if architecture.tied_embeddings:
        del rows[OUTPUT]
    if architecture.qkv_bias:
        rows |= _QKV_BIAS
    if architecture.qk_norm:
        rows |= _QK_NORM
    return rows | (_MOE if architecture.experts else _DENSE)


def hf_names(key: str, place: Place, architecture: Architecture) -> list[str]:
    """Hugging Face names of the tensors behind Megatron's global `key` at `place`."""
    layer, expert = (*place, 0, 0)[:2]
    return [name.format(layer=layer, expert=expert) for name in table(architecture)[key]]


def join(key: str, parts: Sequence[Tensor], architecture: Architecture) -> Tensor:
    """Hugging Face tensors of one key -> Megatron's full (unsharded) tensor."""
    if len(parts) == 3:
        groups = architecture.num_kv_heads
        return torch.cat([part.reshape(groups, -1, *part.shape[1:]) for part in parts], dim=1).flatten(0, 1)
    return torch.cat(list(parts)) if len(parts) > 1 else parts[0]


def split(key: str, full: Tensor, architecture: Architecture) -> list[Tensor]:
    """Megatron's full tensor -> the Hugging Face tensors of its key; the inverse of `join`."""
    count = len(table(architecture)[key])
    if count == 3:
        groups, head = architecture.num_kv_heads, architecture.head_dim
        rows = [architecture.num_heads // groups * head, head, head]
        parts = full.reshape(groups, sum(rows), *full.shape[1:]).split(rows, dim=1)  # type: ignore[no-untyped-call]
        return [part.reshape(-1, *full.shape[1:]) for part in parts]
    return list(full.chunk(count))


def full_shape(key: str, architecture: Architecture) -> Shape:
    """Shape of Megatron's tensor `key` of one layer (and expert), with the vocabulary not padded.

    Raises KeyError for a key that is not in `mapping.table`.
    """
    a = architecture
    queries, keys_values = a.num_heads * a.head_dim, 2 * a.num_kv_heads * a.head_dim
    by_suffix: dict[str, Shape] = {
        EMBEDDING: (a.vocab_size, a.hidden_size),
        OUTPUT: (a.vocab_size, a.hidden_size),
        "final_layernorm.weight": (a.hidden_size,),
        "linear_qkv.layer_norm_weight": (a.hidden_size,),
        "linear_qkv.weight": (queries + keys_values, a.hidden_size),
        "linear_qkv.bias": (queries + keys_values,),
        "linear_proj.weight": (a.hidden_size, queries),
        "q_layernorm.weight": (a.head_dim,),
        "k_layernorm.weight": (a.head_dim,),
        "mlp.linear_fc1.layer_norm_weight": (a.hidden_size,),
        "mlp.linear_fc1.weight": (2 * a.ffn_size, a.hidden_size),
        "mlp.linear_fc2.weight": (a.hidden_size, a.ffn_size),
        "pre_mlp_layernorm.weight": (a.hidden_size,),
    }
    if a.experts:
        by_suffix |= {
            "router.weight": (a.experts.count, a.hidden_size),
            "experts.linear_fc1.weight": (2 * a.experts.ffn_size, a.hidden_size),
            "experts.linear_fc2.weight": (a.hidden_size, a.experts.ffn_size),
        }
    return next(shape for suffix, shape in by_suffix.items() if key.endswith(suffix))


def places(key: str, architecture: Architecture) -> list[Place]:
    """Every copy of `key`: one, one for each layer, or one for each layer and expert."""
    return list(itertools.product(*(range(size) for size in _stacked(key, architecture))))


def stacked_shape(key: str, architecture: Architecture) -> Shape:
    """Shape of `key` in a distributed checkpoint, where all layers (and experts) are stacked along leading axes."""
    return _stacked(key, architecture) + full_shape(key, architecture)


def stacked_axes(key: str, architecture: Architecture) -> int:
    """How many leading axes of `stacked_shape` are layers and experts: 0, 1 or 2."""
    return len(_stacked(key, architecture))


def hf_shapes(architecture: Architecture) -> dict[str, Shape]:
    """Name to shape of every tensor that a Hugging Face checkpoint of this architecture holds, layer after layer."""
    shapes: dict[str, Shape] = {}
    parts = {
        key: split(key, torch.empty(full_shape(key, architecture), device="meta"), architecture)
        for key in table(architecture)
    }
    for key, place in in_layer_order(architecture):
        for name, part in zip(hf_names(key, place, architecture), parts[key], strict=True):
            shapes[name] = tuple(part.shape)
    return shapes


def in_layer_order(architecture: Architecture) -> list[tuple[str, Place]]:
    """Every (key, place), those outside the layers first, then layer by layer."""
    every = [(key, place) for key in table(architecture) for place in places(key, architecture)]
    return sorted(every, key=lambda item: item[1][:1])


def _stacked(key: str, architecture: Architecture) -> Shape:
    name = table(architecture)[key][0]
    sizes = []
    if "{layer}" in name:
        sizes.append(architecture.num_layers)
    if "{expert}" in name and architecture.experts:
        sizes.append(architecture.experts.count)
    return tuple(sizes)
