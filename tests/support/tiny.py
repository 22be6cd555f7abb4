"""Tiny models, samples and actors that the tests share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Dots1Config,
    Dots1ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Glm4Config,
    Glm4ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SeedOssConfig,
    SeedOssForCausalLM,
)

from dppo_megatron.actor.actor import Actor
from dppo_megatron.actor.layout import build_layout, connect_groups
from dppo_megatron.config.schema import ActorConfig, LayoutConfig, ModelConfig, OptimizerConfig
from dppo_megatron.packing.alignment import packing_layout
from dppo_megatron.packing.planner import plan_microbatches
from dppo_megatron.types import PackPlan, TrainSample
from dppo_megatron.weights.hf_files import CheckpointReader
from dppo_megatron.weights.provider import model_architecture

FAMILIES: dict[str, tuple[type, type, dict[str, Any]]] = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {}),
    "qwen3_moe": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
    ),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen2_moe": (
        Qwen2MoeConfig,
        Qwen2MoeForCausalLM,
        {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "norm_topk_prob": False}
        | {"shared_expert_intermediate_size": 28},
    ),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None}),
    "mixtral": (MixtralConfig, MixtralForCausalLM, {"num_local_experts": 6, "num_experts_per_tok": 3}),
    "glm4": (Glm4Config, Glm4ForCausalLM, {"pad_token_id": None, "eos_token_id": 1}),
    "glm4_moe": (
        Glm4MoeConfig,
        Glm4MoeForCausalLM,
        {"n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "n_shared_experts": 2}
        | {"routed_scaling_factor": 1.3, "use_qk_norm": True, "attention_bias": True, "num_nextn_predict_layers": 0},
    ),
    "deepseek_v3": (
        DeepseekV3Config,
        DeepseekV3ForCausalLM,
        {"n_routed_experts": 8, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "moe_intermediate_size": 20}
        | {"n_shared_experts": 1, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0, "head_dim": None}
        | {"q_lora_rank": 22, "kv_lora_rank": 26, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 14}
        | {"num_key_value_heads": 4},
    ),
    # sequences of the tests are longer than the window, and more layers than a period of the pattern; local layers turn
    # by other angles than global ones
    "gemma3": (
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        {"sliding_window": 7, "sliding_window_pattern": 3, "query_pre_attn_scalar": 24}
        | {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            }
        },
    ),
    "llama3": (
        LlamaConfig,
        LlamaForCausalLM,
        {
            "max_position_embeddings": 16384,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
    ),
}
PROVIDED: dict[str, tuple[type, type, dict[str, Any]]] = {
    "seed_oss": (SeedOssConfig, SeedOssForCausalLM, {"attention_dropout": 0.0}),
    "dots1": (
        Dots1Config,
        Dots1ForCausalLM,
        {"n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "n_shared_experts": 2}
        | {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True}
        | {"routed_scaling_factor": 1.3},
    ),
}
"""Families without rows of their own, and who describes them."""
PROVIDERS = {"seed_oss": "examples.mbridge_family:SeedOssBridge", "dots1": "support.bridges:DotsBridge"}


def model_config(directory: Path) -> ModelConfig:
    """The settings for a checkpoint of `write_model`."""
    model_type = json.loads((directory / "config.json").read_text())["model_type"]
    return ModelConfig(str(directory), PROVIDERS.get(model_type, ""))


def write_model(directory: Path, seed: int = 0, family: str = "qwen3", **overrides: Any) -> Path:
    """A random checkpoint whose norm weights are not all 1, nor its biases 0, nor its logits all alike."""
    config_class, model_class, special = (FAMILIES | PROVIDED)[family]
    sizes = {
        "vocab_size": 37,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12 if family == "qwen2" else 16,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(seed)
    wanted = sizes | special | overrides
    if special.get("head_dim", 0) is None:  # the family derives it
        del wanted["head_dim"]
    model = model_class(config_class(**wanted))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.mul_(3)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn_like(buffer) * 0.1)
    model.save_pretrained(directory)
    return directory


def random_samples(count: int, vocab_size: int, seed: int = 0, *, longest: int = 40) -> list[TrainSample]:
    """Samples of varied length with random tokens, advantages, weights and behaviour log-probabilities."""
    rng = np.random.default_rng(seed)
    samples = []
    for i in range(count):
        prompt, completion = int(rng.integers(2, 9)), int(rng.integers(1, longest - 9))
        samples.append(
            TrainSample(
                id=f"{i}:0",
                token_ids=rng.integers(0, vocab_size, prompt + completion),
                num_prompt_tokens=prompt,
                behaviour_logprobs=(-np.log(vocab_size) + 0.5 * rng.normal(size=completion)).astype(np.float32),
                advantage=float(rng.normal()),
                weight=float(rng.uniform(1, 4)),
                denominator=float(count * completion),
                figure_weight=float(1 + i % 3),
            )
        )
    return samples


@dataclass(frozen=True)
class Parallel:
    """A layout under test."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 0
    sequence_parallel: bool = True
    distributed_optimizer: bool = False
    recompute: bool = False
    uneven: tuple[tuple[str, Any], ...] = ()
    """Items of actor.megatron that divide the layers."""
    dtype: torch.dtype = field(default=torch.float32)

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    @property
    def layout(self) -> LayoutConfig:
        return LayoutConfig(
            tensor_parallel=self.tp,
            pipeline_parallel=self.pp,
            virtual_pipeline=self.vpp,
            context_parallel=self.cp,
            expert_parallel=self.ep,
            expert_tensor_parallel=self.etp,
            sequence_parallel=self.sequence_parallel,
        )

    def __str__(self) -> str:
        sp = "" if self.tp == 1 or self.sequence_parallel else "-nosp"
        more = "".join(
            f"{name}{size}" for name in ("vpp", "cp", "ep", "etp") if (size := getattr(self, name)) not in (0, 1)
        )
        more += "".join(f"+{value}" for _, value in self.uneven)
        extra = "+distopt" * self.distributed_optimizer + "+recompute" * self.recompute
        return f"tp{self.tp}{sp}pp{self.pp}dp{self.dp}{more}{extra}"


def plan_for(
    samples: Sequence[TrainSample], parallel: Parallel | None = None, *, cap: int = 128, mode: str = "balanced"
) -> PackPlan:
    """The planner's micro-batches for a layout under test."""
    parallel = parallel or Parallel()
    layout = packing_layout(ActorConfig(layout=parallel.layout), parallel.world_size)
    return plan_microbatches(samples, layout=layout, max_tokens_per_microbatch=cap, mode=mode)


def build_actor(model_path: Path, parallel: Parallel, *, max_grad_norm: float = 1.0, **settings: Any) -> Actor:
    """In a rank of `run_ranks`: an actor with the weights of `model_path`, and `settings` of its section.

    The rank may build several, one by one.
    """
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    config = ActorConfig(
        layout=parallel.layout,
        optimizer=OptimizerConfig(
            learning_rate=1e-2,
            weight_decay=0.01,
            lr_warmup_steps=2,
            lr_schedule="linear",
            max_grad_norm=max_grad_norm,
            distributed=parallel.distributed_optimizer,
        ),
        **{"recompute": "full" if parallel.recompute else "none", "megatron": dict(parallel.uneven)} | settings,
    )
    architecture = model_architecture(model_config(model_path)).with_adapters(config.lora)
    reader = CheckpointReader(model_path, architecture)
    layout = build_layout(config.layout, seed=0)
    connect_groups(config, architecture)
    actor = Actor(config, layout, architecture, reader.get, dtype=parallel.dtype)
    if parallel.dtype != torch.float64:
        actor.start_phase(config.optimizer, total_steps=10)
    return actor


def hf_logprobs(model: torch.nn.Module, samples: Sequence[TrainSample], temperature: float = 1.0) -> list[np.ndarray]:
    """The independent source: transformers, one sequence at a time, no packing."""
    out = []
    with torch.no_grad():
        for sample in samples:
            ids = torch.from_numpy(sample.token_ids)
            logits = model(ids[None]).logits[0, sample.num_prompt_tokens - 1 : -1].double() / temperature
            picked = logits.log_softmax(-1).gather(1, ids[sample.num_prompt_tokens :, None])
            out.append(picked[:, 0].numpy())
    return out
