"""The shape of every tensor named in `mapping.py`.

Shapes are written once, for Megatron's full (unsharded) tensors. Those of the Hugging Face tensors are derived by
splitting an empty tensor with `mapping.split`, so the two sides cannot disagree.
"""

from __future__ import annotations

import itertools

import torch

from dppo_megatron.weights.architecture import Architecture
from dppo_megatron.weights.mapping import EMBEDDING, OUTPUT, Place, hf_names, split, table

Shape = tuple[int, ...]


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
    """Shape of `key` in a distributed checkpoint, where all layers (and experts) lie behind leading axes."""
    return _stacked(key, architecture) + full_shape(key, architecture)


def stacked_axes(key: str, architecture: Architecture) -> int:
    """How many leading axes of `stacked_shape` stand for layers and experts: 0, 1 or 2."""
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
