"""Whether an `Architecture` is what transformers would build: compared with its modules, where all defaults end."""

from __future__ import annotations

from dataclasses import astuple
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from dppo_megatron.weights.architecture import Architecture
from dppo_megatron.weights.config_keys import MODEL_TYPES


def same_as_transformers(architecture: Architecture, directory: Path) -> None:
    """Assert that every size, norm, bias, router option and frequency is the one of transformers' model."""
    config = CONFIG_MAPPING[MODEL_TYPES[architecture.name]].from_pretrained(directory)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    layer = model.model.layers[-1]
    attention = layer.self_attn
    assert len(model.model.layers) == architecture.num_layers
    if architecture.latent is None:
        assert attention.head_dim == architecture.head_dim
        assert attention.q_proj.weight.shape == (
            architecture.num_heads * architecture.head_dim,
            architecture.hidden_size,
        )
        assert attention.k_proj.weight.shape == (
            architecture.num_kv_heads * architecture.head_dim,
            architecture.hidden_size,
        )
        assert (attention.q_proj.bias is not None) == architecture.qkv_bias and attention.o_proj.bias is None
        assert hasattr(attention, "q_norm") == architecture.qk_norm
    else:
        sizes = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        assert [getattr(attention, name) or 0 for name in sizes] == list(astuple(architecture.latent)[:5])
        assert attention.scaling == pytest.approx(architecture.head_dim**-0.5 * architecture.latent.scale, rel=1e-12)
    norm, gemma = layer.input_layernorm, architecture.gemma
    assert (norm.variance_epsilon if gemma is None else norm.eps) == architecture.norm_eps
    assert model.model.embed_tokens.weight.shape == (architecture.vocab_size, architecture.hidden_size)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == architecture.tied_embeddings
    windows = [getattr(one.self_attn, "sliding_window", None) for one in model.model.layers]
    assert windows == [architecture.window_of(index) for index in range(architecture.num_layers)]
    assert attention.attention_dropout == 0
    assert gemma is None or gemma.softmax_scale == attention.scaling
    if architecture.experts:
        gate, experts = layer.mlp.gate, architecture.experts
        normalizes = getattr(gate, "norm_topk_prob", True)  # Mixtral's always does
        dense = [index for index, one in enumerate(model.model.layers) if hasattr(one.mlp, "gate_proj")]
        assert dense == list(range(experts.dense_layers))
        assert hasattr(gate, "e_score_correction_bias") == experts.is_sigmoid
        if experts.is_sigmoid:
            assert gate.routed_scaling_factor == experts.scale
            groups = gate.num_group if gate.topk_group < gate.num_group else 1
            assert (groups, gate.topk_group if groups > 1 else 1) == (experts.groups, experts.groups_per_token)
        assert hasattr(layer.mlp, "shared_expert_gate") == experts.shared_gate
        shared = getattr(layer.mlp, experts.shared_module, None)
        assert (shared is not None) == (experts.shared_ffn_size > 0)
        if shared is not None:
            assert shared.gate_proj.weight.shape == (experts.shared_ffn_size, architecture.hidden_size)
        assert (gate.num_experts, gate.top_k, normalizes) == (
            experts.count,
            experts.per_token,
            experts.normalize_weights,
        )
        assert layer.mlp.experts.down_proj.shape[-2:] == (architecture.hidden_size, experts.ffn_size)
    if not architecture.has_experts(0):
        first = model.model.layers[0].mlp
        gate, ffn = (first.gate_up_proj, 2) if architecture.is_glm4 else (first.gate_proj, 1)
        assert gate.weight.shape == (ffn * architecture.ffn_size, architecture.hidden_size)
    rotary = type(model.model.rotary_emb)(config=config)  # not on the meta device
    for index, kind in enumerate(config.layer_types if gemma else [""]):
        rope, prefix = architecture.rope_of(index), kind and f"{kind}_"
        assert getattr(rotary, f"{prefix}attention_scaling") == rope.scale
        assert torch.equal(getattr(rotary, f"{prefix}inv_freq"), torch.tensor(rope.frequencies))
