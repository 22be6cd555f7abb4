"""The one table of names: a Megatron parameter's global key and the Hugging Face tensors it is made of.

Keys are those of Megatron's sharded state dict: global, the same for every tensor / pipeline split and for the
local and the Transformer Engine layer specs. So one line here serves loading, saving and the live weight sync in
every layout; where a shard lies inside the full tensor is Megatron's own knowledge (`sharded.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dppo_megatron.weights.architecture import Architecture

_LAYER = "model.layers.{layer}."

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
_QKV = "decoder.layers.self_attention.linear_qkv.weight"

TABLE: dict[str, tuple[str, ...]] = {
    EMBEDDING: ("model.embed_tokens.weight",),
    OUTPUT: ("lm_head.weight",),
    "decoder.final_layernorm.weight": ("model.norm.weight",),
    "decoder.layers.self_attention.linear_qkv.layer_norm_weight": (_LAYER + "input_layernorm.weight",),
    _QKV: tuple(_LAYER + f"self_attn.{part}_proj.weight" for part in "qkv"),
    "decoder.layers.self_attention.q_layernorm.weight": (_LAYER + "self_attn.q_norm.weight",),
    "decoder.layers.self_attention.k_layernorm.weight": (_LAYER + "self_attn.k_norm.weight",),
    "decoder.layers.self_attention.linear_proj.weight": (_LAYER + "self_attn.o_proj.weight",),
    "decoder.layers.mlp.linear_fc1.layer_norm_weight": (_LAYER + "post_attention_layernorm.weight",),
    "decoder.layers.mlp.linear_fc1.weight": (_LAYER + "mlp.gate_proj.weight", _LAYER + "mlp.up_proj.weight"),
    "decoder.layers.mlp.linear_fc2.weight": (_LAYER + "mlp.down_proj.weight",),
}
"""Global Megatron key to Hugging Face names; more than one are joined along dimension 0 (queries, keys and values
are interleaved by key-value head)."""

PADDED_TO_VOCAB = (EMBEDDING, OUTPUT)
"""Keys whose dimension 0 is the vocabulary, padded to a multiple of the tensor-parallel size."""


def hf_names(key: str, layer: int | None) -> list[str]:
    """Hugging Face names of the tensors behind Megatron's global `key` in `layer` (None outside the layers)."""
    return [name.format(layer=layer) for name in TABLE[key]]


def all_hf_names(architecture: Architecture) -> set[str]:
    """Every tensor a checkpoint of this architecture must hold."""
    names: set[str] = set()
    for key in TABLE:
        if key == OUTPUT and architecture.tied_embeddings:
            continue
        layers = range(architecture.num_layers) if _LAYER in TABLE[key][0] else [None]
        for layer in layers:
            names.update(hf_names(key, layer))
    return names


def join(key: str, parts: Sequence[Tensor], architecture: Architecture) -> Tensor:
    """Hugging Face tensors of one key -> Megatron's full (unsharded) tensor."""
    if key == _QKV:
        groups = architecture.num_kv_heads
        return torch.cat([part.reshape(groups, -1, part.shape[-1]) for part in parts], dim=1).flatten(0, 1)
    return torch.cat(list(parts)) if len(parts) > 1 else parts[0]


def split(key: str, full: Tensor, architecture: Architecture) -> list[Tensor]:
    """Megatron's full tensor -> the Hugging Face tensors of its key; the inverse of `join`."""
    if key == _QKV:
        groups, head = architecture.num_kv_heads, architecture.head_dim
        rows = [architecture.num_heads // groups * head, head, head]
        parts = full.reshape(groups, sum(rows), full.shape[-1]).split(rows, dim=1)  # type: ignore[no-untyped-call]
        return [part.reshape(-1, full.shape[-1]) for part in parts]
    return list(full.chunk(len(TABLE[key])))
