"""What the shape of a Hugging Face checkpoint is, read from its config.json alone.

Read as JSON and not through transformers' config classes: their attribute names move between versions (rope_theta
became rope_parameters in version 5), and the layout checks need nothing else.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dppo_megatron.config.schema import ActorConfig, LayoutConfig
from dppo_megatron.types import UserError

SUPPORTED = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM")
"""Architectures with rows in the weight table of `mapping.py`: Qwen3 dense and MoE, Qwen2.5, the Llama-3 family."""


@dataclass(frozen=True, slots=True)
class Experts:
    """The feed-forward part of every layer of a mixture-of-experts model."""

    count: int
    per_token: int
    """Experts that each token visits."""
    ffn_size: int
    """Of one expert."""
    normalize_weights: bool
    """The chosen experts' router weights are made to sum to 1."""


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
    qk_norm: bool
    """RMS norm on each head's queries and keys (Qwen3)."""
    qkv_bias: bool
    """Bias on the query, key and value projections (Qwen2.5)."""
    rope_factor: float = 0.0
    """Llama 3.1's frequency scaling; 0: none."""
    experts: Experts | None = None

    def check_layout(self, layout: LayoutConfig) -> None:
        """Raise `UserError` unless every rank gets whole heads, layers and experts."""
        tp = layout.tensor_parallel
        stages = layout.pipeline_parallel * layout.virtual_pipeline
        where = f"actor.layout.tensor_parallel = {tp}"
        if self.num_heads % tp:
            raise UserError(f"{where}: the model's {self.num_heads} attention heads do not divide by it")
        if self.num_kv_heads % tp and tp % self.num_kv_heads:
            raise UserError(
                f"{where}: must divide the model's {self.num_kv_heads} key-value heads or be a multiple of them"
            )
        if self.experts is None and self.ffn_size % tp:
            raise UserError(f"{where}: the model's feed-forward size {self.ffn_size} does not divide by it")
        if self.num_layers % stages:
            raise UserError(
                f"actor.layout: pipeline_parallel x virtual_pipeline = {stages}: the model's {self.num_layers} layers"
                " do not divide by it"
            )
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
        "attention_bias": names[0] != "Qwen2ForCausalLM" and raw.get("attention_bias", False),
        "mlp_bias": raw.get("mlp_bias", False),
        "sliding window attention": raw.get("use_sliding_window", False),
        f"activation {raw.get('hidden_act')}": raw.get("hidden_act", "silu") != "silu",
        "a mix of dense and expert layers": raw.get("mlp_only_layers") or raw.get("decoder_sparse_step", 1) != 1,
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
            qk_norm=names[0].startswith("Qwen3"),
            qkv_bias=names[0] == "Qwen2ForCausalLM",
            rope_factor=_rope_factor(rope, path),
            experts=_experts(raw) if names[0] == "Qwen3MoeForCausalLM" else None,
        )
    except KeyError as error:
        raise UserError(f"{path}: key {error} is missing") from None


_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The constants that Megatron-core's Llama-3 frequency scaling has built in."""


def _rope_factor(rope: dict[str, Any], path: Path) -> float:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return 0.0
    wrong = {key: rope.get(key) for key, value in _LLAMA3_ROPE.items() if rope.get(key) != value}
    if kind != "llama3" or wrong:
        raise UserError(f"{path}: rope scaling {kind} {wrong or ''} is not supported; supported: llama3 {_LLAMA3_ROPE}")
    return float(rope["factor"])


def _experts(raw: dict[str, Any]) -> Experts:
    return Experts(
        count=raw["num_experts"] if "num_experts" in raw else raw["num_local_experts"],
        per_token=raw["num_experts_per_tok"],
        ffn_size=raw["moe_intermediate_size"],
        normalize_weights=raw.get("norm_topk_prob", False),
    )
