"""What layers have beside plain sizes: experts, positions, latent attention, what is Gemma's; how it is read.

Values are those of transformers' config class, as in `architecture.py`, which puts them together.
"""

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
"""What an adapter can be on, but for latent attention; the last three are also the experts' in a mixture."""


@dataclass(frozen=True, slots=True)
class Experts:
    """The feed-forward part of the layers of a mixture-of-experts model."""

    count: int
    per_token: int
    ffn_size: int
    """Of one expert."""
    normalize_weights: bool
    """Normalize the router weights of the chosen experts to sum 1."""
    is_sigmoid: bool = False
    """Routers score by sigmoid, and a correction bias, which is not trained, is added for the choice alone; else by
    softmax."""
    scale: float = 1.0
    """Of the router weights, once normalized."""
    groups: int = 1
    """Experts are chosen from the best `groups_per_token` of so many groups, by the two best scores of each."""
    groups_per_token: int = 1
    shared_ffn_size: int = 0
    """Of the experts that every token visits, as one."""
    shared_module: str = "shared_experts"
    shared_gate: bool = False
    """What they put out is multiplied by a sigmoid of one number a token (Qwen2-MoE)."""
    dense_layers: int = 0
    """Layers before the first that has experts."""
    module: str = "mlp"
    """The checkpoint's name of it in a layer; those of an expert's gate, up and down projections follow."""
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Rope:
    """A rotary position embedding."""

    frequencies: tuple[float, ...]
    """[at most D / 2] angle that each pair of dimensions turns by from one position to the next, float32. What they do
    not cover of a head does not turn."""
    scale: float = 1.0
    """Of the cosines and sines: YaRN's attention factor."""

    def __str__(self) -> str:
        return f"{self.frequencies[0]:.3g} to {self.frequencies[-1]:.3g} a position, times {self.scale:g}"


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention: queries, keys and values from low-rank projections (DeepSeek)."""

    query_rank: int
    """0: queries come from the hidden state directly."""
    rank: int
    """Of keys and values."""
    nope_dim: int
    """Dimensions of a head's query and key that do not turn with the position."""
    rope_dim: int
    """Those that do; of the keys they are one for all heads. In the checkpoint, pairs lie side by side."""
    value_dim: int
    scale: float
    """Multiplies the softmax's scale: the square of YaRN's mscale."""

    @property
    def projections(self) -> tuple[str, ...]:
        """As `PROJECTIONS`."""
        queries = ("q_a_proj", "q_b_proj") if self.query_rank else ("q_proj",)
        return (*queries, "kv_a_proj_with_mqa", "kv_b_proj", *PROJECTIONS[3:])


@dataclass(frozen=True, slots=True)
class Gemma:
    """What sets Gemma 3 apart: norms that multiply by 1 + weight, in float32, and stand behind attention and
    feed-forward too; tanh's GELU; embeddings times the root of the hidden size; windows in some layers' attention."""

    window: int
    """A token of such a layer sees so many, itself included."""
    windowed: tuple[bool, ...]
    """Whether a layer has the window."""
    local_rope: Rope
    """Of the layers that do."""
    softmax_scale: float


def deinterleave(pairs: Tensor) -> Tensor:
    """[..., D]: pairs side by side to pairs of the two halves.

    Example: [a0, b0, a1, b1] -> [a0, a1, b0, b1].
    """
    return pairs.reshape(*pairs.shape[:-1], -1, 2).transpose(-1, -2).flatten(-2)


_MOST_EXPERTS = 2**17
"""Over all layers, so that a damaged size is an error and not minutes of listing names; the largest open models have
23,000."""


def read_experts(values: Mapping[str, Any], family: str, path: Path) -> Experts:
    """From the values of `config_keys.READ`. Raises `UserError` for a mixture that Megatron-core's router cannot be."""
    name = "n_routed_experts" if family in SIGMOID else "num_experts"
    count, per_token = values[name], values["num_experts_per_tok"]
    normalized = values.get("norm_topk_prob", True)
    matrices = values["num_hidden_layers"] * count
    if matrices > _MOST_EXPERTS:
        raise UserError(f"{path}: num_hidden_layers x {name} = {matrices}: at most {_MOST_EXPERTS} are supported")
    if per_token > count:
        raise UserError(f"{path}: num_experts_per_tok = {per_token} is more than {name} = {count}")
    if per_token == 1 and normalized:
        said = "norm_topk_prob = true" if "norm_topk_prob" in values else family
        raise UserError(
            f"{path}: num_experts_per_tok = 1 with {said} is not supported: Megatron-core's router has no such mode"
            " (every weight would be 1, and the router would not learn)"
        )
    if family == MIXTRAL:
        one = Experts(count, per_token, values["intermediate_size"], normalized)
        return replace(one, module="block_sparse_moe", projections=("w1", "w3", "w2"))
    one = Experts(count, per_token, values["moe_intermediate_size"], normalized)
    if family == QWEN2_MOE:
        size = values["shared_expert_intermediate_size"]
        return replace(one, shared_ffn_size=size, shared_module="shared_expert", shared_gate=True)
    return _like_deepseek(one, values, path) if family in SIGMOID else one


def _like_deepseek(one: Experts, values: Mapping[str, Any], path: Path) -> Experts:
    """With sigmoid routers, shared experts and dense layers."""
    groups, chosen, dense = values["n_group"], values["topk_group"], values["first_k_dense_replace"]
    given = f"{path}: n_group = {groups}, topk_group = {chosen}"
    if one.count % groups or chosen > groups or one.count // groups * chosen < one.per_token:
        raise UserError(f"{given}: {one.per_token} of {one.count} experts cannot be chosen from such groups")
    if chosen == groups:
        groups = chosen = 1  # all of them: no group is left out
    elif one.per_token // chosen != 2 or one.count == groups:
        # Megatron-core rates a group by its best num_experts_per_tok // topk_group experts
        raise UserError(f"{given}: only with num_experts_per_tok = {2 * chosen} and groups of two experts or more")
    if dense >= values["num_hidden_layers"]:
        raise UserError(f"{path}: first_k_dense_replace = {dense}: leaves no layer with experts")
    return replace(
        one,
        is_sigmoid=True,
        scale=float(values["routed_scaling_factor"]),
        groups=groups,
        groups_per_token=chosen,
        shared_ffn_size=values["n_shared_experts"] * one.ffn_size,
        dense_layers=dense,
    )


def read_latent(values: Mapping[str, Any], config: Any, path: Path) -> Latent:
    """From the values of `config_keys.READ` and transformers' config. Raises `UserError` for sizes that disagree."""
    turning = values["qk_rope_head_dim"]
    if config.head_dim != turning:  # transformers turns by head_dim
        raise UserError(f"{path}: head_dim = {shown(config.head_dim)}: must be qk_rope_head_dim = {turning}")
    if values["num_key_value_heads"] != values["num_attention_heads"]:
        raise UserError(f"{path}: num_key_value_heads: must be num_attention_heads: keys are expanded for each head")
    return Latent(
        query_rank=values["q_lora_rank"] or 0,
        rank=values["kv_lora_rank"],
        nope_dim=values["qk_nope_head_dim"],
        rope_dim=turning,
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
    """What YaRN multiplies the logits of latent attention with: 1 without `mscale_all_dim`. As transformers has it in
    its DeepSeek-V3, whose file takes every rank half a second to import."""
    factor, strength = rope.get("factor") or 1.0, rope.get("mscale_all_dim") or 0.0
    return (0.1 * strength * math.log(factor) + 1.0) ** 2 if factor > 1 else 1.0


def make_rope(config: Any, head_dim: int, ropes: Mapping[str, Mapping[str, Any]], path: Path, kind: str = FULL) -> Rope:
    """For a layer of this type, with transformers' frequencies. Raises `UserError` if there are none."""
    rope, by_type = ropes[kind], {"layer_type": kind} if len(ropes) > 1 else {}
    part = (config.rope_parameters or {}).get("partial_rotary_factor", 1)
    size = int(head_dim * part)
    if size < 2 or size % 2:
        raise UserError(f"{path}: partial_rotary_factor = {part}: {size} of {head_dim} dimensions are no pairs")
    if rope["rope_type"] == "default":
        exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
        return Rope(tuple((1.0 / (rope["rope_theta"] ** exponents)).tolist()))
    try:
        frequencies, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, **by_type)
    except ArithmeticError as error:  # YaRN divides by the logarithm of a base of 1
        raise UserError(f"{path}: {shown(rope)} gives no frequencies: {error}") from None
    return Rope(tuple(frequencies.tolist()), float(scale))
