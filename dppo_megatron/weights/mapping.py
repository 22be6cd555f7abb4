"""The one table of names and shapes: a Megatron parameter's global key and the Hugging Face tensors it is made of.

Keys are those of Megatron's sharded state dict: global, the same for every tensor / pipeline split and for both layer
specs. So one row serves loading, saving and the weight sync in every layout. It has only the shape of Megatron's full
(unsharded) tensor. Those of the Hugging Face tensors are derived by splitting an empty tensor.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from dppo_megatron.weights.architecture import Architecture, Lora
from dppo_megatron.weights.layer_parts import PROJECTIONS, Experts, Latent

Shape: TypeAlias = tuple[int, ...]
Rows: TypeAlias = dict[str, tuple[Shape, tuple[str, ...]]]
Place: TypeAlias = tuple[int, ...]
"""Which tensor of a key: () outside the layers, (layer,) in the layers of a dense model, () or (expert,) in a mixture,
whose keys have the number of their layer."""

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
_LAYERS = "decoder.layers."
_QKV = _LAYERS + "self_attention.linear_qkv."
_HF = "model.layers.{layer}."

EXPERT_BIAS, CORRECTION_BIAS = "mlp.router.expert_bias", "gate.e_score_correction_bias"
"""Ends of key and name of a router's correction bias, which is float32 in any model dtype, and not trained."""
POST_ATTENTION, POST_MLP = "post_self_attn_layernorm.", "post_mlp_layernorm."
"""Norms after attention and feed-forward, by the names that later versions of Megatron have for them."""
PADDED_TO_VOCAB = (EMBEDDING, OUTPUT)
"""Keys whose dimension 0 is the vocabulary, padded to a multiple of the tensor-parallel size."""


@functools.cache
def _rows(architecture: Architecture) -> Rows:
    """Global Megatron key -> its shape in one layer (and expert), and the Hugging Face name patterns. Each layer of a
    mixture has its own keys, which contain its number, as in Megatron's sharded state dict."""
    if not architecture.has_layer_keys:
        return kinds(architecture)
    rows = _outside(architecture)
    for layer in range(architecture.num_layers):
        for key, (shape, names) in _layer(architecture, architecture.has_experts(layer)).items():
            numbered = tuple(name.replace("{layer}", str(layer)) for name in names)
            rows[of_layer(key, (layer,), architecture)[0]] = shape, numbered
    return rows


def kinds(architecture: Architecture) -> Rows:
    """The table without the layer numbers in a mixture's keys, which are the keys that a provider names."""
    rows = _outside(architecture)
    for has_experts in {architecture.has_experts(layer) for layer in range(architecture.num_layers)}:
        rows |= _layer(architecture, has_experts)
    return rows


def _outside(a: Architecture) -> Rows:
    rows: Rows = {
        EMBEDDING: ((a.vocab_size, a.hidden_size), ("model.embed_tokens.weight",)),
        OUTPUT: ((a.vocab_size, a.hidden_size), ("lm_head.weight",)),
        "decoder.final_layernorm.weight": ((a.hidden_size,), ("model.norm.weight",)),
    }
    if a.tied_embeddings:
        del rows[OUTPUT]
    return _provided(a, rows)


def _layer(a: Architecture, has_experts: bool) -> Rows:
    rows = _attention(a) if a.latent is None else _latent_attention(a, a.latent)
    return _provided(a, rows | (_mixture(a, a.experts) if a.experts and has_experts else _dense(a)))


def _provided(a: Architecture, rows: Rows) -> Rows:
    names = dict(a.provided_names)
    return {key: (shape, names.get(key, own)) for key, (shape, own) in rows.items()}


def _attention(a: Architecture) -> Rows:
    hidden, queries = a.hidden_size, a.num_heads * a.head_dim
    heads = (a.num_heads + 2 * a.num_kv_heads) * a.head_dim
    rows: Rows = {
        _QKV + "layer_norm_weight": ((hidden,), (_HF + "input_layernorm.weight",)),
        _QKV + "weight": ((heads, hidden), tuple(_HF + f"self_attn.{part}_proj.weight" for part in "qkv")),
        _LAYERS + "self_attention.linear_proj.weight": ((hidden, queries), (_HF + "self_attn.o_proj.weight",)),
    }
    if a.qkv_bias:
        rows[_QKV + "bias"] = (heads,), tuple(_HF + f"self_attn.{part}_proj.bias" for part in "qkv")
    for part in "qk" if a.qk_norm else "":
        key = _LAYERS + f"self_attention.{part}_layernorm.weight"
        rows[key] = (a.head_dim,), (_HF + f"self_attn.{part}_norm.weight",)
    return rows


def _latent_attention(a: Architecture, latent: Latent) -> Rows:
    hidden, query = a.hidden_size, a.num_heads * a.head_dim
    expanded = a.num_heads * (latent.nope_dim + latent.value_dim)
    inside: dict[str, tuple[Shape, str]] = {
        "linear_proj.weight": ((hidden, a.num_heads * latent.value_dim), "o_proj"),
        "linear_kv_down_proj.weight": ((latent.rank + latent.rope_dim, hidden), "kv_a_proj_with_mqa"),
        # directly after the former: SGLang joins the two within one call (`rollout/sync/channels.py`)
        **({"linear_q_down_proj.weight": ((latent.query_rank, hidden), "q_a_proj")} if latent.query_rank else {}),
        "linear_kv_up_proj.layer_norm_weight": ((latent.rank,), "kv_a_layernorm"),
        "linear_kv_up_proj.weight": ((expanded, latent.rank), "kv_b_proj"),
    }
    if latent.query_rank:
        inside |= {
            "linear_q_up_proj.layer_norm_weight": ((latent.query_rank,), "q_a_layernorm"),
            "linear_q_up_proj.weight": ((query, latent.query_rank), "q_b_proj"),
        }
    else:
        inside["linear_q_proj.weight"] = (query, hidden), "q_proj"
    rows: Rows = {_LAYERS + "input_layernorm.weight": ((hidden,), (_HF + "input_layernorm.weight",))}
    for key, (shape, name) in inside.items():
        rows[f"{_LAYERS}self_attention.{key}"] = shape, (f"{_HF}self_attn.{name}.weight",)
    return rows


def _dense(a: Architecture) -> Rows:
    norms = {"mlp.linear_fc1.layer_norm_weight": "pre_feedforward" if a.gemma else "post_attention"}
    norms |= zip((POST_ATTENTION + "weight", POST_MLP + "weight"), a.post_norms, strict=False)
    rows: Rows = {_LAYERS + key: ((a.hidden_size,), (f"{_HF}{name}_layernorm.weight",)) for key, name in norms.items()}
    names = ("gate_up_proj", "down_proj") if a.is_glm4 else PROJECTIONS[4:]
    return rows | _feed_forward(a, "mlp.", _HF + "mlp.", a.ffn_size, names)


def _mixture(a: Architecture, experts: Experts) -> Rows:
    hidden, theirs = a.hidden_size, f"{_HF}{experts.module}."
    rows: Rows = {
        _LAYERS + "pre_mlp_layernorm.weight": ((hidden,), (_HF + "post_attention_layernorm.weight",)),
        _LAYERS + "mlp.router.weight": ((experts.count, hidden), (theirs + "gate.weight",)),
    }
    if experts.is_sigmoid:
        rows[_LAYERS + EXPERT_BIAS] = (experts.count,), (theirs + CORRECTION_BIAS,)
    if experts.shared_ffn_size:
        shared = theirs + experts.shared_module
        rows |= _feed_forward(a, "mlp.shared_experts.", shared + ".", experts.shared_ffn_size, PROJECTIONS[4:])
        if experts.shared_gate:
            rows[_LAYERS + "mlp.shared_experts.gate_weight"] = (1, hidden), (shared + "_gate.weight",)
    each = theirs + "experts.{expert}."
    return rows | _feed_forward(a, "mlp.experts.experts.", each, experts.ffn_size, experts.projections)


def _feed_forward(a: Architecture, ours: str, theirs: str, ffn: int, names: Sequence[str]) -> Rows:
    *gate_up, down = (f"{theirs}{name}.weight" for name in names)
    return {
        f"{_LAYERS}{ours}linear_fc1.weight": ((2 * ffn, a.hidden_size), tuple(gate_up)),
        f"{_LAYERS}{ours}linear_fc2.weight": ((a.hidden_size, ffn), (down,)),
    }


@functools.cache
def adapter_rows(architecture: Architecture) -> Rows:
    """The rows of the adapters, like `_rows`: `lora_a` and `lora_b` for each weight with targets, under PEFT's names.

    Where a weight fuses projections, `lora_a` stacks the A of its targets, and `lora_b` has a row for each row of the
    weight, with the r numbers of its projection's B. So B is split over ranks as the weight is; rows of projections
    without an adapter stay 0.

    Example: q_proj and v_proj of (queries, keys, values) = (64, 32, 32) rows of 48, rank 8: A (16, 48), B (128, 8).
    """
    rows: Rows = {}
    if architecture.lora is None:
        return rows
    rank = architecture.lora.rank
    for key, (shape, names) in _rows(architecture).items():
        chosen = ["base_model.model." + names[part] for part in _targets(key, architecture)]
        for half, size in (("a", (len(chosen) * rank, shape[1])), ("b", (shape[0], rank))) if chosen else ():
            theirs = tuple(f"{adapter_key(name, half.upper())}.weight" for name in chosen)
            rows[adapter_key(key, half)] = size, theirs
    return rows


def adapter_key(key: str, half: str) -> str:
    """The key of A or B (`half`: a, b) of a weight's adapter.

    Example: ("...linear_qkv.weight", "b") -> "...linear_qkv.lora_b"
    """
    return f"{key.removesuffix('weight')}lora_{half}"


@functools.cache
def adapter_parts(key: str, architecture: Architecture) -> Tensor:
    """[rows of the weight `key`] int64: the block of `lora_a` that the row's B multiplies; -1 without an adapter."""
    targets = _targets(key, architecture)
    parts = split(key, torch.empty(full_shape(key, architecture)[0], dtype=torch.int64), architecture)
    for number, part in enumerate(parts):
        part.fill_(targets.index(number) if number in targets else -1)
    return join(key, parts, architecture)


def by_block(b: Tensor, parts: Tensor, blocks: int) -> Tensor:
    """B with a column block for each projection: [n, r] and [n] `parts` (see `adapter_parts`) -> [n, blocks x r].

    Example: rows [1, 2] of block 0 and [3, 4] of block 1 -> [1, 2, 0, 0] and [0, 0, 3, 4].
    """
    is_block = parts[:, None] == torch.arange(blocks, device=b.device)
    return (is_block[:, :, None] * b[:, None, :]).flatten(1)


def merged(weight: Tensor, a: Tensor, b: Tensor, parts: Tensor, lora: Lora) -> Tensor:
    """A weight with its adapter merged in, weight + alpha / r B A, computed in at least float32 and rounded once.

    Args:
        weight: [n, m], the tensor or any shard; a: [blocks x r, m]; b: [n, r]; parts: [n], see `adapter_parts`.
    """
    exact = torch.promote_types(weight.dtype, torch.float32)
    product = by_block(b.to(exact), parts, len(a) // lora.rank) @ a.to(exact)
    return torch.add(weight.to(exact), product, alpha=lora.alpha / lora.rank).to(weight.dtype)


def _targets(key: str, architecture: Architecture) -> list[int]:
    """Indices of those Hugging Face tensors of `key` that have an adapter."""
    lora, names = architecture.lora, _rows(architecture)[key][1]
    if lora is None or not key.endswith(".weight"):
        return []
    if architecture.experts and ".mlp." in key and not is_expert(key):
        return []  # PEFT finds only the experts by these names, not the dense layers and shared experts that share them
    return [part for part, name in enumerate(names) if name.split(".")[-2] in lora.targets]


def _row(key: str, architecture: Architecture) -> tuple[Shape, tuple[str, ...]]:
    return _rows(architecture).get(key) or adapter_rows(architecture)[key]


def table(architecture: Architecture) -> dict[str, tuple[str, ...]]:
    """Global Megatron key -> Hugging Face name patterns (see `join`). A tied output layer has no row."""
    return {key: names for key, (_, names) in _rows(architecture).items()}


def hf_names(key: str, place: Place, architecture: Architecture) -> list[str]:
    """Hugging Face names of the tensors that make up Megatron's global `key` at `place`."""
    numbers = dict(zip(_stacked(key, architecture), place, strict=True))
    return [name.format(**numbers) for name in _row(key, architecture)[1]]


def join(key: str, parts: Sequence[Tensor], architecture: Architecture) -> Tensor:
    """Hugging Face tensors of one key -> Megatron's full (unsharded) tensor."""
    if len(parts) == 3:  # queries, keys and values, interleaved by key-value head
        groups = architecture.num_kv_heads
        return torch.cat([part.reshape(groups, -1, *part.shape[1:]) for part in parts], dim=1).flatten(0, 1)
    return torch.cat(list(parts)) if len(parts) > 1 else parts[0]


def split(key: str, full: Tensor, architecture: Architecture) -> list[Tensor]:
    """Megatron's full tensor -> the Hugging Face tensors of its key; for weights the inverse of `join`."""
    module, is_adapter, half = key.rpartition("lora_")
    if is_adapter and half == "b":
        weight = module + "weight"
        parts = split(weight, full, architecture)
        return [parts[part] for part in _targets(weight, architecture)]
    count = len(_row(key, architecture)[1])
    if count == 3 and not is_adapter:
        groups, head = architecture.num_kv_heads, architecture.head_dim
        rows = [architecture.num_heads // groups * head, head, head]
        parts = full.reshape(groups, sum(rows), *full.shape[1:]).split(rows, dim=1)  # type: ignore[no-untyped-call]
        return [part.reshape(-1, *full.shape[1:]) for part in parts]
    return list(full.chunk(count))


def full_shape(key: str, architecture: Architecture) -> Shape:
    """Shape of Megatron's tensor `key` of one layer (and expert), with an unpadded vocabulary."""
    return _row(key, architecture)[0]


def places(key: str, architecture: Architecture) -> list[Place]:
    """The places of `key`: one, one for each layer, or one for each expert."""
    return list(itertools.product(*(range(size) for size in _stacked(key, architecture).values())))


def stacked_shape(key: str, architecture: Architecture) -> Shape:
    """Shape of `key` in a distributed checkpoint, where all layers, or experts, are stacked along a leading axis."""
    return (*_stacked(key, architecture).values(), *full_shape(key, architecture))


def stacked_axes(key: str, architecture: Architecture) -> int:
    """How many leading axes of `stacked_shape` are layers or experts: 0 or 1."""
    return len(_stacked(key, architecture))


def hf_shapes(architecture: Architecture, keys: Collection[str] = ()) -> dict[str, Shape]:
    """Name -> shape of the tensors in a Hugging Face checkpoint, in the order of layers; with `keys`, only of these."""
    shapes: dict[str, Shape] = {}
    parts = {
        key: split(key, torch.empty(full_shape(key, architecture), device="meta"), architecture)
        for key in keys or table(architecture)
    }
    for key, place in in_layer_order(architecture, keys):
        for name, part in zip(hf_names(key, place, architecture), parts[key], strict=True):
            shapes[name] = tuple(part.shape)
    return shapes


def in_layer_order(architecture: Architecture, keys: Collection[str] = ()) -> list[tuple[str, Place]]:
    """Every (key, place), or those of `keys`: first those outside the layers, then layer by layer."""
    every = [(key, place) for key in keys or table(architecture) for place in places(key, architecture)]
    return sorted(every, key=lambda item: layer_of(*item))


def layer_of(key: str, place: Place) -> Place:
    """(layer,), or () outside the layers.

    Example: ("decoder.layers.3.mlp.router.weight", ()) -> (3,)
    """
    return by_kind(key, place)[1][:1]


def by_kind(key: str, place: Place) -> tuple[str, Place]:
    """The key and place with the number of the layer in the place, so that layers of one kind share the key.

    Example: ("decoder.layers.3.mlp.experts.experts.linear_fc1.weight", (7,))
    -> ("decoder.layers.mlp.experts.experts.linear_fc1.weight", (3, 7))
    """
    number, _, inside = key.removeprefix(_LAYERS).partition(".")
    return (_LAYERS + inside, (int(number), *place)) if number.isdigit() else (key, place)


def of_layer(kind: str, place: Place, architecture: Architecture) -> tuple[str, Place]:
    """The inverse of `by_kind`."""
    if not (architecture.has_layer_keys and kind.startswith(_LAYERS)):
        return kind, place
    return f"{_LAYERS}{place[0]}.{kind.removeprefix(_LAYERS)}", place[1:]


def is_expert(key: str) -> bool:
    """Whether `key` belongs to the routed experts, not the shared ones."""
    return ".mlp.experts." in key


def _stacked(key: str, architecture: Architecture) -> dict[str, int]:
    """Name -> size of the leading axes of `key`: "layer", "expert" or none."""
    experts, name = architecture.experts, _row(key, architecture)[1][0]
    sizes = {"layer": architecture.num_layers, "expert": experts.count if experts else 0}
    return {axis: size for axis, size in sizes.items() if f"{{{axis}}}" in name}
