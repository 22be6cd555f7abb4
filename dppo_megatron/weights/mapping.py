"""The one table of names and shapes: a Megatron parameter's global key and the Hugging Face tensors it is made of.

Keys are those of Megatron's sharded state dict: global, the same for every tensor / pipeline split and for the
local and the Transformer Engine layer specs. So one row serves loading, saving and the weight sync in every layout;
Megatron itself knows the offset of a shard in the full tensor (`sharded.py`).

Shapes are written once, for Megatron's full (unsharded) tensors. Those of the Hugging Face tensors are derived by
splitting an empty tensor, so the two sides cannot disagree.
"""

from __future__ import annotations

import functools
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
_HF = "model.layers.{layer}."

PADDED_TO_VOCAB = (EMBEDDING, OUTPUT)
"""Keys whose dimension 0 is the vocabulary, padded to a multiple of the tensor-parallel size."""


@functools.cache
def _rows(architecture: Architecture) -> dict[str, tuple[Shape, tuple[str, ...]]]:
    """By global Megatron key: its shape in one layer (and expert), and the Hugging Face name patterns."""
    a, hidden = architecture, architecture.hidden_size
    queries, heads = a.num_heads * a.head_dim, (a.num_heads + 2 * a.num_kv_heads) * a.head_dim
    rows: dict[str, tuple[Shape, tuple[str, ...]]] = {
        EMBEDDING: ((a.vocab_size, hidden), ("model.embed_tokens.weight",)),
        OUTPUT: ((a.vocab_size, hidden), ("lm_head.weight",)),
        "decoder.final_layernorm.weight": ((hidden,), ("model.norm.weight",)),
        _QKV + "layer_norm_weight": ((hidden,), (_HF + "input_layernorm.weight",)),
        _QKV + "weight": ((heads, hidden), tuple(_HF + f"self_attn.{part}_proj.weight" for part in "qkv")),
        _LAYERS + "self_attention.linear_proj.weight": ((hidden, queries), (_HF + "self_attn.o_proj.weight",)),
    }
    if a.tied_embeddings:
        del rows[OUTPUT]
    if a.qkv_bias:
        rows[_QKV + "bias"] = (heads,), tuple(_HF + f"self_attn.{part}_proj.bias" for part in "qkv")
    for part in "qk" if a.qk_norm else "":
        key = _LAYERS + f"self_attention.{part}_layernorm.weight"
        rows[key] = (a.head_dim,), (_HF + f"self_attn.{part}_norm.weight",)
    norm = (hidden,), (_HF + "post_attention_layernorm.weight",)
    if a.experts is None:
        mlp, expert, ffn = _LAYERS + "mlp.", _HF + "mlp.", a.ffn_size
        rows[mlp + "linear_fc1.layer_norm_weight"] = norm
    else:
        mlp, expert, ffn = _LAYERS + "mlp.experts.experts.", _HF + "mlp.experts.{expert}.", a.experts.ffn_size
        rows[_LAYERS + "pre_mlp_layernorm.weight"] = norm
        rows[_LAYERS + "mlp.router.weight"] = (a.experts.count, hidden), (_HF + "mlp.gate.weight",)
    rows[mlp + "linear_fc1.weight"] = (2 * ffn, hidden), (expert + "gate_proj.weight", expert + "up_proj.weight")
    rows[mlp + "linear_fc2.weight"] = (hidden, ffn), (expert + "down_proj.weight",)
    return rows


def table(architecture: Architecture) -> dict[str, tuple[str, ...]]:
    """Global Megatron key to Hugging Face name patterns; more than one are joined along dimension 0.

    Queries, keys and values are interleaved by key-value head. A tied output layer has no row.
    """
    return {key: names for key, (_, names) in _rows(architecture).items()}


def hf_names(key: str, place: Place, architecture: Architecture) -> list[str]:
    """Hugging Face names of the tensors behind Megatron's global `key` at `place`."""
    layer, expert = (*place, 0, 0)[:2]
    return [name.format(layer=layer, expert=expert) for name in _rows(architecture)[key][1]]


def join(key: str, parts: Sequence[Tensor], architecture: Architecture) -> Tensor:
    """Hugging Face tensors of one key -> Megatron's full (unsharded) tensor."""
    if len(parts) == 3:
        groups = architecture.num_kv_heads
        return torch.cat([part.reshape(groups, -1, *part.shape[1:]) for part in parts], dim=1).flatten(0, 1)
    return torch.cat(list(parts)) if len(parts) > 1 else parts[0]


def split(key: str, full: Tensor, architecture: Architecture) -> list[Tensor]:
    """Megatron's full tensor -> the Hugging Face tensors of its key; the inverse of `join`."""
    count = len(_rows(architecture)[key][1])
    if count == 3:
        groups, head = architecture.num_kv_heads, architecture.head_dim
        rows = [architecture.num_heads // groups * head, head, head]
        parts = full.reshape(groups, sum(rows), *full.shape[1:]).split(rows, dim=1)  # type: ignore[no-untyped-call]
        return [part.reshape(-1, *full.shape[1:]) for part in parts]
    return list(full.chunk(count))


def full_shape(key: str, architecture: Architecture) -> Shape:
    """Shape of Megatron's tensor `key` of one layer (and expert), with the vocabulary not padded.

    Raises KeyError for a key that is not in `table`.
    """
    return _rows(architecture)[key][0]


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
    name = _rows(architecture)[key][1][0]
    sizes = []
    if "{layer}" in name:
        sizes.append(architecture.num_layers)
    if "{expert}" in name and architecture.experts:
        sizes.append(architecture.experts.count)
    return tuple(sizes)
