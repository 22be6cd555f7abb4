"""The one table of names: a Megatron parameter's global key and the Hugging Face tensors it is made of.

Keys are those of Megatron's sharded state dict: global, the same for every tensor / pipeline split and for the
local and the Transformer Engine layer specs. So one row serves loading, saving and the weight sync in every layout;
Megatron itself knows where a shard lies in the full tensor (`sharded.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from dppo_megatron.weights.architecture import Architecture

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
