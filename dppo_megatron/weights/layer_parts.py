"""The optional parts of an `Architecture`: experts, rotary embedding, latent attention, Gemma's settings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dppo_megatron.types import UserError
from dppo_megatron.weights.config_keys import FULL, MIXTRAL, QWEN2_MOE, SIGMOID, SLIDING
from dppo_megatron.weights.json_files import shown

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Projections that can have an adapter, except in latent attention; in a mixture the last three are the experts'."""


@dataclass(frozen=True, slots=True)
class Experts:
    """The feed-forward part of the layers of a mixture-of-experts model."""

    count: int
    per_token: int
    ffn_size: int
    """Feed-forward size of one expert."""
    normalize_weights: bool
    """Normalize the router weights of the chosen experts to sum 1."""
    is_sigmoid: bool = False
    """Routers score by sigmoid, and an untrained correction bias is added to the scores only for choosing experts. If
    False they score by softmax."""
    scale: float = 1.0
    """Factor of the router weights after normalization."""
    groups: int = 1
    """Experts are chosen from the best `groups_per_token` of this many groups, rated by their two best scores."""
    groups_per_token: int = 1
    shared_ffn_size: int = 0
    """Sum of the feed-forward sizes of the experts that every token visits."""
    shared_module: str = "shared_experts"
    shared_gate: bool = False
    """Multiply the output of the shared experts by the sigmoid of one number per token (Qwen2-MoE)."""
    dense_layers: int = 0
    """Number of layers before the first one with experts."""
    module: str = "mlp"
    """The name of the mixture in a layer of the checkpoint; below, those of an expert's gate, up, down projections."""
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Rope:
    """A rotary position embedding."""

    frequencies: tuple[float, ...]
    """[at most D / 2] float32, the angle between consecutive positions for each pair of dimensions. A head's other
    dimensions are not rotated."""
    scale: float = 1.0
    """Factor of cosines and sines: YaRN's attention factor."""

    def __str__(self) -> str:
        return f"{self.frequencies[0]:.3g} to {self.frequencies[-1]:.3g} a position, times {self.scale:g}"


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention: queries, keys and values from low-rank projections (DeepSeek)."""

    query_rank: int
    """Rank of queries; 0: they are projected directly from the hidden state."""
    rank: int
    """Rank of keys and values."""
    nope_dim: int
    """Dimensions of a head's query and key without position embedding."""
    rope_dim: int
    """Dimensions that rotary embedding rotates; all heads share those of the keys. The checkpoint interleaves pairs."""
    value_dim: int
    scale: float
    """Multiplies the softmax's scale: the square of YaRN's mscale."""

    @property
    def projections(self) -> tuple[str, ...]:
        """Projections that can have an adapter, as in `PROJECTIONS`."""
        queries = ("q_a_proj", "q_b_proj") if self.query_rank else ("q_proj",)
        return (*queries, "kv_a_proj_with_mqa", "kv_b_proj", *PROJECTIONS[3:])


@dataclass(frozen=True, slots=True)
class Gemma:
    """What Gemma 3 does differently: norms multiply by 1 + weight, in float32, and also follow attention and
    feed-forward; GELU by tanh; embeddings times the root of the hidden size; sliding windows in some layers."""

    window: int
    """The number of tokens that a token sees in a windowed layer, itself included."""
    windowed: tuple[bool, ...]
    """For each layer, whether it has the window."""
    local_rope: Rope
    """The position embedding of windowed layers."""
    softmax_scale: float


def deinterleave(pairs: Tensor) -> Tensor:
    """[..., D]: reorder dimensions so that pairs (2 i, 2 i + 1) become pairs (i, i + D / 2).

    Example: [a0, b0, a1, b1] -> [a0, a1, b0, b1].
    """
    return pairs.reshape(*pairs.shape[:-1], -1, 2).transpose(-1, -2).flatten(-2)


_MOST_EXPERTS = 2**17
"""Over all layers. A larger number is taken for a damaged size, which would take minutes of listing names; the largest
open models have 23,000."""


def read_experts(values: Mapping[str, Any], family: str, path: Path) -> Experts:
    """From the values of `config_keys.READ`. Raises `UserError` for what Megatron-core's router does not support."""
    name = "n_routed_experts" if family in SIGMOID else "num_experts"
    count, per_token = values[name], values["num_experts_per_tok"]
    normalized = values.get("norm_topk_prob", True)
    total = values["num_hidden_layers"] * count
    if total > _MOST_EXPERTS:
        raise UserError(f"{path}: num_hidden_layers x {name} = {total}: at most {_MOST_EXPERTS} are supported")
    if per_token > count:
        raise UserError(f"{path}: num_experts_per_tok = {per_token} is more than {name} = {count}")
    if per_token == 1 and normalized:  # every weight would be 1, and the router would not learn
        setting = f"num_experts_per_tok = 1 with {'norm_topk_prob = true' if 'norm_topk_prob' in values else family}"
        raise UserError(f"{path}: {setting} is not supported: Megatron-core's router has no such mode")
    experts = Experts(count, per_token, values.get("moe_intermediate_size", values["intermediate_size"]), normalized)
    if family == MIXTRAL:
        return replace(experts, module="block_sparse_moe", projections=("w1", "w3", "w2"))
    if family == QWEN2_MOE:
        size = values["shared_expert_intermediate_size"]
        return replace(experts, shared_ffn_size=size, shared_module="shared_expert", shared_gate=True)
    return _like_deepseek(experts, values, path) if family in SIGMOID else experts


def _like_deepseek(experts: Experts, values: Mapping[str, Any], path: Path) -> Experts:
    """`experts` with sigmoid routers, shared experts and dense first layers."""
    groups, chosen, dense = values["n_group"], values["topk_group"], values["first_k_dense_replace"]
    count, per_token, settings = experts.count, experts.per_token, f"{path}: n_group = {groups}, topk_group = {chosen}"
    if count % groups or chosen > groups or count // groups * chosen < per_token:
        raise UserError(f"{settings}: {per_token} of {count} experts cannot be chosen from such groups")
    if chosen == groups:
        groups = chosen = 1  # every group is chosen, which is the same as a single group
    elif per_token // chosen != 2 or count == groups:
        # Megatron-core rates a group by its best num_experts_per_tok // topk_group experts, DeepSeek by its best two
        raise UserError(f"{settings}: only with num_experts_per_tok = {2 * chosen} and groups of two experts or more")
    if dense >= values["num_hidden_layers"]:
        raise UserError(f"{path}: first_k_dense_replace = {dense}: leaves no layer with experts")
    return replace(
        experts,
        is_sigmoid=True,
        scale=float(values["routed_scaling_factor"]),
        groups=groups,
        groups_per_token=chosen,
        shared_ffn_size=values["n_shared_experts"] * experts.ffn_size,
        dense_layers=dense,
    )


def read_latent(values: Mapping[str, Any], config: Any, path: Path) -> Latent:
    """From the values of `config_keys.READ` and transformers' config. Raises `UserError` for sizes that disagree."""
    rope_dim = values["qk_rope_head_dim"]
    if config.head_dim != rope_dim:  # transformers rotates head_dim dimensions
        raise UserError(f"{path}: head_dim = {shown(config.head_dim)}: must be qk_rope_head_dim = {rope_dim}")
    if values["num_key_value_heads"] != values["num_attention_heads"]:
        raise UserError(f"{path}: num_key_value_heads: must be num_attention_heads: keys are expanded for each head")
    return Latent(
        query_rank=values["q_lora_rank"] or 0,
        rank=values["kv_lora_rank"],
        nope_dim=values["qk_nope_head_dim"],
        rope_dim=rope_dim,
        value_dim=values["v_head_dim"],
        scale=_yarn_scale(config.rope_parameters),
    )


def read_gemma(values: Mapping[str, Any], config: Any, ropes: Mapping[str, Mapping[str, Any]], path: Path) -> Gemma:
    """From the values of `config_keys.READ`, transformers' config and the parameters of `read_ropes`."""
    return Gemma(
        window=values["sliding_window"],
        windowed=tuple(kind == SLIDING for kind in config.layer_types),
        local_rope=make_rope(config, values["head_dim"], ropes, path, SLIDING),
        softmax_scale=float(values["query_pre_attn_scalar"] ** -0.5),
    )


def _yarn_scale(rope: Mapping[str, Any]) -> float:
    """YaRN's factor of latent attention's logits; 1 without `mscale_all_dim`. Copied from transformers' DeepSeek-V3,
    because importing that file takes every rank half a second."""
    factor, strength = rope.get("factor") or 1.0, rope.get("mscale_all_dim") or 0.0
    return (0.1 * strength * math.log(factor) + 1.0) ** 2 if factor > 1 else 1.0


def make_rope(config: Any, head_dim: int, ropes: Mapping[str, Mapping[str, Any]], path: Path, kind: str = FULL) -> Rope:
    """The embedding of this `kind` of layer, with transformers' frequencies. Raises `UserError` if there are none."""
    rope, by_type = ropes[kind], {"layer_type": kind} if len(ropes) > 1 else {}
    part = (config.rope_parameters or {}).get("partial_rotary_factor", 1)
    size = int(head_dim * part)
    if size < 2 or size % 2:
        raise UserError(f"{path}: partial_rotary_factor = {part}: {size} of {head_dim} dimensions do not form pairs")
    if rope["rope_type"] == "default":
        exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
        return Rope(tuple((1.0 / (rope["rope_theta"] ** exponents)).tolist()))
    try:
        frequencies, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, **by_type)
    except ArithmeticError as error:  # YaRN divides by the logarithm of a base of 1
        raise UserError(f"{path}: {shown(rope)} gives no frequencies: {error}") from None
    return Rope(tuple(frequencies.tolist()), float(scale))
