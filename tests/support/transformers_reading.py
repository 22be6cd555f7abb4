"""Whether an `Architecture` is what transformers would build: compared with its modules, where all defaults end."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from dppo_megatron.weights.architecture import Architecture
from dppo_megatron.weights.config_keys import MODEL_TYPES


def same_as_transformers(architecture: Architecture, directory: Path) -> None:
    """Assert that every size, norm, bias, router option and frequency is the one of transformers' model."""
    config = CONFIG_MAPPING[MODEL_TYPES[architecture.name]].from_pretrained(directory)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    layer = model.model.layers[0]
    attention = layer.self_attn
    assert len(model.model.layers) == architecture.num_layers
    assert attention.head_dim == architecture.head_dim
    assert attention.q_proj.weight.shape == (architecture.num_heads * architecture.head_dim, architecture.hidden_size)
    assert attention.k_proj.weight.shape == (
        architecture.num_kv_heads * architecture.head_dim,
        architecture.hidden_size,
    )
    assert (attention.q_proj.bias is not None) == architecture.qkv_bias and attention.o_proj.bias is None
    assert hasattr(attention, "q_norm") == architecture.qk_norm
    assert layer.input_layernorm.variance_epsilon == architecture.norm_eps
    assert model.model.embed_tokens.weight.shape == (architecture.vocab_size, architecture.hidden_size)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == architecture.tied_embeddings
    assert getattr(attention, "sliding_window", None) is None and attention.attention_dropout == 0
    if architecture.experts:
        gate, experts = layer.mlp.gate, architecture.experts
        assert (gate.num_experts, gate.top_k, gate.norm_topk_prob) == (
            experts.count,
            experts.per_token,
            experts.normalize_weights,
        )
        assert layer.mlp.experts.down_proj.shape[-2:] == (architecture.hidden_size, experts.ffn_size)
    else:
        assert layer.mlp.gate_proj.weight.shape == (architecture.ffn_size, architecture.hidden_size)
    rotary = type(model.model.rotary_emb)(config=config)  # not on the meta device
    assert rotary.attention_scaling == architecture.rope.scale
    assert torch.equal(rotary.inv_freq, torch.tensor(architecture.rope.frequencies))
