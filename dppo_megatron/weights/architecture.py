"""What the shape of a Hugging Face checkpoint is, read from its config.json alone.

Read as JSON and not through transformers' config classes: their attribute names move between versions (rope_theta
became rope_parameters in version 5), and the layout checks need nothing else.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dppo_megatron.types import UserError

SUPPORTED = ("Qwen3ForCausalLM",)
"""Architectures with a weight table in `mapping.py`."""


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
    rope_theta: float
    norm_eps: float
    tied_embeddings: bool

    def check_layout(self, tensor_parallel: int, pipeline_parallel: int) -> None:
        """Raise `UserError` unless every rank gets whole heads and whole layers."""
        where = "actor.layout.tensor_parallel"
        if self.num_heads % tensor_parallel:
            raise UserError(
                f"{where} = {tensor_parallel}: the model's {self.num_heads} attention heads do not divide by it"
            )
        if self.num_kv_heads % tensor_parallel and tensor_parallel % self.num_kv_heads:
            raise UserError(
                f"{where} = {tensor_parallel}: must divide the model's {self.num_kv_heads} key-value heads or be a"
                " multiple of them"
            )
        if self.ffn_size % tensor_parallel:
            raise UserError(
                f"{where} = {tensor_parallel}: the model's feed-forward size {self.ffn_size} does not divide by it"
            )
        if self.num_layers % pipeline_parallel:
            raise UserError(
                f"actor.layout.pipeline_parallel = {pipeline_parallel}: the model's {self.num_layers} layers do not"
                " divide by it"
            )

    def padded_vocab_size(self, tensor_parallel: int) -> int:
        """Vocabulary rounded up so that every tensor-parallel rank holds the same number of rows."""
        return -(-self.vocab_size // tensor_parallel) * tensor_parallel


def read_architecture(hf_path: str | Path) -> Architecture:
    """Read config.json of a Hugging Face checkpoint directory.

    Raises:
        UserError: no config.json, not JSON, an unsupported architecture, or a feature the actor does not have.
    """
    path = Path(hf_path) / "config.json"
    try:
        raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"model.hf_path = '{hf_path}': holds no config.json, so it is no Hugging Face checkpoint"
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid JSON: {error}") from None
    names = raw.get("architectures") or ["<none>"]
    if names[0] not in SUPPORTED:
        raise UserError(f"{path}: architecture {names[0]} is not supported; supported: {', '.join(SUPPORTED)}")
    rope = raw.get("rope_parameters") or {
        "rope_theta": raw.get("rope_theta", 10000.0),
        **(raw.get("rope_scaling") or {}),
    }
    unsupported = {
        "rope scaling": rope.get("rope_type", "default") != "default",
        "attention_bias": raw.get("attention_bias", False),
        "sliding window attention": raw.get("use_sliding_window", False),
        f"activation {raw.get('hidden_act')}": raw.get("hidden_act", "silu") != "silu",
    }
    for feature, present in unsupported.items():
        if present:
            raise UserError(f"{path}: {feature} is not supported")
    try:
        return Architecture(
            name=names[0],
            num_layers=raw["num_hidden_layers"],
            hidden_size=raw["hidden_size"],
            ffn_size=raw["intermediate_size"],
            num_heads=raw["num_attention_heads"],
            num_kv_heads=raw.get("num_key_value_heads", raw["num_attention_heads"]),
            head_dim=raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"],
            vocab_size=raw["vocab_size"],
            max_positions=raw["max_position_embeddings"],
            rope_theta=float(rope["rope_theta"]),
            norm_eps=raw["rms_norm_eps"],
            tied_embeddings=raw.get("tie_word_embeddings", False),
        )
    except KeyError as error:
        raise UserError(f"{path}: key {error} is missing") from None
