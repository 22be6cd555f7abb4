"""Reads the architecture of a Hugging Face checkpoint from its config.json.

The values are those of transformers' config class, as for the embedded engine and later loads of the checkpoint. Before
that every key is checked, so that one which this code does not implement is refused by name (`config_keys.py`).
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dppo_megatron.config.schema import ActorConfig, LayoutConfig
from dppo_megatron.texts import one_line
from dppo_megatron.types import UserError
from dppo_megatron.weights.config_keys import (
    MODEL_TYPES,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    SUPPORTED,
    check_keys,
    read_rope,
    read_values,
)
from dppo_megatron.weights.json_files import plain, read_object, shown
from dppo_megatron.weights.pipeline import split_layers


@dataclass(frozen=True, slots=True)
class Experts:
    """The feed-forward part of every layer of a mixture-of-experts model."""

    count: int
    per_token: int
    """Experts that each token visits."""
    ffn_size: int
    """Of one expert."""
    normalize_weights: bool
    """Normalize the router weights of the chosen experts to sum 1."""


@dataclass(frozen=True, slots=True)
class Rope:
    """A rotary position embedding."""

    frequencies: tuple[float, ...]
    """[D / 2] angle that each pair of dimensions turns by from one position to the next, float32."""
    scale: float = 1.0
    """Of the cosines and sines: YaRN's attention factor."""

    def __str__(self) -> str:
        return f"{self.frequencies[0]:.3g} to {self.frequencies[-1]:.3g} a position, times {self.scale:g}"


@dataclass(frozen=True, slots=True)
class Architecture:
    """Sizes of a decoder-only transformer, by their usual names."""

    name: str
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    rope: Rope
    norm_eps: float
    tied_embeddings: bool
    qk_norm: bool
    """RMS norm on each head's queries and keys (Qwen3)."""
    qkv_bias: bool
    """Bias on the query, key and value projections (Qwen2.5)."""
    experts: Experts | None = None

    def check_layout(self, actor: ActorConfig) -> None:
        """Raise `UserError` unless every rank gets whole heads, layers and experts."""
        layout = actor.layout
        tp = layout.tensor_parallel
        where = f"actor.layout.tensor_parallel = {tp}"
        if self.num_heads % tp:
            raise UserError(f"{where}: the model's {self.num_heads} attention heads do not divide by it")
        if self.num_kv_heads % tp and tp % self.num_kv_heads:
            raise UserError(
                f"{where}: must divide the model's {self.num_kv_heads} key-value heads or be a multiple of them"
            )
        columns = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        if columns % tp:  # below as many key-value heads as ranks, Megatron splits the rows of qkv regardless of heads
            raise UserError(
                f"{where}: the {columns} rows of the model's queries, keys and values ({self.num_heads} + 2 x"
                f" {self.num_kv_heads} heads of {self.head_dim}) do not divide by it"
            )
        if self.experts is None and self.ffn_size % tp:
            raise UserError(f"{where}: the model's feed-forward size {self.ffn_size} does not divide by it")
        split_layers(self.num_layers, actor)
        self._check_experts(layout)

    def check_bf16_layers(self, actor: ActorConfig) -> None:
        """Raise `UserError` if the bfloat16 layers at one end of an FP8 model do not fit a pipeline stage."""
        per_stage = self.num_layers // actor.layout.pipeline_parallel
        if actor.fp8_bf16_layers > per_stage:
            raise UserError(
                f"actor.fp8_bf16_layers = {actor.fp8_bf16_layers}: a pipeline stage has only {per_stage} layers"
            )

    def _check_experts(self, layout: LayoutConfig) -> None:
        ep, tp = layout.expert_parallel, layout.tensor_parallel
        etp = layout.expert_tensor_parallel or tp
        if self.experts is None:
            if ep > 1 or layout.expert_tensor_parallel:
                raise UserError(
                    f"actor.layout.expert_parallel = {ep}, expert_tensor_parallel = {layout.expert_tensor_parallel}:"
                    f" {self.name} has no experts; leave them at 1 and 0"
                )
            return
        if self.experts.count % ep:
            raise UserError(
                f"actor.layout.expert_parallel = {ep}: the model's {self.experts.count} experts do not divide by it"
            )
        if self.experts.ffn_size % etp:
            raise UserError(
                f"actor.layout.expert_tensor_parallel = {etp}: the experts' feed-forward size"
                f" {self.experts.ffn_size} does not divide by it"
            )
        if tp > 1 and not layout.sequence_parallel:
            raise UserError(
                "actor.layout.sequence_parallel = false: a mixture-of-experts model with tensor_parallel > 1 needs it"
            )
        if etp < tp and ep == 1:
            raise UserError(
                f"actor.layout.expert_tensor_parallel = {etp} below tensor_parallel = {tp} needs expert_parallel > 1:"
                " without it Megatron-core leaves the experts' gradients unreduced"
            )

    def padded_vocab_size(self, tensor_parallel: int) -> int:
        """Vocabulary rounded up so that every tensor-parallel rank holds the same number of rows."""
        return -(-self.vocab_size // tensor_parallel) * tensor_parallel


def read_architecture(
    hf_path: str | Path, given_as: str = "model.hf_path =", ignored: Collection[str] = ()
) -> Architecture:
    """Read config.json of a Hugging Face checkpoint directory exactly as transformers does, or refuse it.

    Args:
        given_as: the setting or option that named the directory, for messages.
        ignored: unknown keys that change nothing, `model.ignore_config_keys`.

    Raises:
        UserError: no config.json, not JSON, an unsupported architecture, or a feature the actor does not have.
    """
    path = Path(hf_path) / "config.json"
    if not os.path.exists(path):  # unlike Path.exists, no error for a name that is too long
        raise UserError(f"{given_as} '{hf_path}': holds no config.json, so it is no Hugging Face checkpoint")
    raw = read_object(path)
    family = _family(raw, path)
    model_type = MODEL_TYPES[family]
    check_keys(raw, family, path, CONFIG_MAPPING[model_type](), ignored)
    rope = read_rope(raw, path)
    config = _as_transformers_reads(raw, model_type, rope, path)
    values = read_values(config, raw, family, path)
    _check_sizes(raw, values, path)
    return Architecture(
        name=family,
        num_layers=values["num_hidden_layers"],
        hidden_size=values["hidden_size"],
        ffn_size=values["intermediate_size"],
        num_heads=values["num_attention_heads"],
        num_kv_heads=values["num_key_value_heads"],
        head_dim=values["head_dim"],
        vocab_size=values["vocab_size"],
        max_positions=_positions(values["max_position_embeddings"], rope),
        rope=_rope(config, values["head_dim"], rope, path),
        norm_eps=values["rms_norm_eps"],
        tied_embeddings=values["tie_word_embeddings"],
        qk_norm=family in (QWEN3, QWEN3_MOE),
        qkv_bias=family == QWEN2,
        experts=_experts(values, path) if family == QWEN3_MOE else None,
    )


_MOST_EXPERTS = 2**17
"""Over all layers, so that a damaged size is an error and not minutes of listing names; the largest open models have
23,000."""


def _family(raw: Mapping[str, Any], path: Path) -> str:
    names = raw.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise UserError(f"{path}: architectures = {shown(names)}: must be a list of one name of {', '.join(SUPPORTED)}")
    if names[0] not in MODEL_TYPES:
        raise UserError(f"{path}: architecture {plain(names[0])} is not supported; supported: {', '.join(SUPPORTED)}")
    model_type = MODEL_TYPES[names[0]]
    if raw.get("model_type") != model_type:
        raise UserError(
            f"{path}: model_type = {shown(raw.get('model_type'))} does not fit architectures = {names[0]}, which needs"
            f" {model_type}"
        )
    return names[0]


def _check_sizes(raw: Mapping[str, Any], values: Mapping[str, Any], path: Path) -> None:
    heads, groups = values["num_attention_heads"], values["num_key_value_heads"]
    if heads % groups:
        raise UserError(f"{path}: num_key_value_heads = {groups} does not divide num_attention_heads = {heads}")
    # transformers passes pad_token_id to the embedding, which refuses an index out of range
    pad, vocab_size = raw.get("pad_token_id"), values["vocab_size"]
    if pad is not None and not (type(pad) is int and -vocab_size <= pad < vocab_size):
        raise UserError(f"{path}: pad_token_id = {shown(pad)}: must be a row of the {vocab_size} of the vocabulary")


def _experts(values: Mapping[str, Any], path: Path) -> Experts:
    count, per_token = values["num_experts"], values["num_experts_per_tok"]
    matrices = values["num_hidden_layers"] * count
    if matrices > _MOST_EXPERTS:
        raise UserError(f"{path}: num_hidden_layers x num_experts = {matrices}: at most {_MOST_EXPERTS} are supported")
    if per_token > count:
        raise UserError(f"{path}: num_experts_per_tok = {per_token} is more than num_experts = {count}")
    if per_token == 1 and values["norm_topk_prob"]:
        raise UserError(
            f"{path}: num_experts_per_tok = 1 with norm_topk_prob = true is not supported: Megatron-core's router has"
            " no such mode (every weight would be 1, and the router would not learn)"
        )
    return Experts(
        count=count,
        per_token=per_token,
        ffn_size=values["moe_intermediate_size"],
        normalize_weights=values["norm_topk_prob"],
    )


def _as_transformers_reads(raw: Mapping[str, Any], model_type: str, rope: Mapping[str, Any], path: Path) -> Any:
    """transformers' config of `raw`. Raises `UserError` if it refuses it, or reads the position embedding otherwise."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = CONFIG_MAPPING[model_type].from_dict(copy.deepcopy(dict(raw)))
    except Exception as error:  # its validators raise their own classes, and TypeErrors from deep inside
        raise UserError(f"{path}: transformers refuses it: {one_line(str(error) or type(error).__name__)}") from None
    found = {key: value for key, value in (config.rope_parameters or {}).items() if value is not None}
    if {key: value for key, value in found.items() if key not in ("type", "partial_rotary_factor")} != rope:
        raise UserError(f"{path}: the rope parameters {shown(rope)} are read as {shown(found)} by transformers")
    return config


def _positions(stated: int, rope: Mapping[str, Any]) -> int:
    """With YaRN, published config.json files leave max_position_embeddings at what it was before."""
    original = rope["original_max_position_embeddings"] if rope["rope_type"] == "yarn" else 0
    return max(stated, int(original * rope.get("factor", 1)))


def _rope(config: Any, head_dim: int, rope: Mapping[str, Any], path: Path) -> Rope:
    if rope["rope_type"] == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        return Rope(tuple((1.0 / (rope["rope_theta"] ** exponents)).tolist()))
    try:
        frequencies, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config)
    except ArithmeticError as error:  # YaRN divides by the logarithm of a base of 1
        raise UserError(f"{path}: {shown(rope)} gives no frequencies: {error}") from None
    return Rope(tuple(frequencies.tolist()), float(scale))
