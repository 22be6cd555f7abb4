"""Published config.json files of the supported families are accepted, and read as transformers reads them."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.transformers_reading import same_as_transformers

from dppo_megatron.weights.architecture import read_architecture

HUB = {
    "Qwen3-8B": """
        {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": false, "attention_dropout":
        0.0, "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
        "initializer_range": 0.02, "intermediate_size": 12288, "max_position_embeddings": 40960, "max_window_layers":
        36, "num_attention_heads": 32, "num_hidden_layers": 4, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
        "rope_scaling": null, "rope_theta": 1000000, "sliding_window": null, "tie_word_embeddings": false,
        "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": true, "use_sliding_window": false,
        "vocab_size": 151936}
    """,
    "Qwen2.5-Math-7B": """
        {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "attention_dropout": 0.0, "bos_token_id": 151643,
        "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 3584, "initializer_range": 0.02,
        "intermediate_size": 18944, "max_position_embeddings": 4096, "max_window_layers": 28, "num_attention_heads": 28,
        "num_hidden_layers": 4, "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 10000, "sliding_window":
        4096, "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.40.1", "use_cache":
        true, "use_mrope": false, "use_sliding_window": false, "vocab_size": 152064}
    """,
    "Llama-3.1-8B-Instruct": """
        {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": false, "attention_dropout":
        0.0, "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu", "hidden_size":
        4096, "initializer_range": 0.02, "intermediate_size": 14336, "mlp_bias": false, "max_position_embeddings":
        131072, "num_attention_heads": 32, "num_hidden_layers": 4, "num_key_value_heads": 8, "pretraining_tp": 1,
        "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "rope_type": "llama3", "original_max_position_embeddings": 8192},
        "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.42.3", "use_cache": true,
        "vocab_size": 128256}
    """,
    "Mistral-7B-Instruct-v0.3": """
        {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "attention_dropout": 0.0, "bos_token_id": 1,
        "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size":
        14336, "max_position_embeddings": 32768, "num_attention_heads": 32, "num_hidden_layers": 4,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "sliding_window": null,
        "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.42.0.dev0", "use_cache":
        true, "vocab_size": 32768}
    """,
    "Mixtral-8x7B-Instruct-v0.1": """
        {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "attention_dropout": 0.0, "bos_token_id": 1,
        "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size":
        14336, "max_position_embeddings": 32768, "num_attention_heads": 32, "num_experts_per_tok": 2,
        "num_hidden_layers": 4, "num_key_value_heads": 8, "num_local_experts": 8, "output_router_logits": false,
        "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02, "sliding_window": null,
        "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.36.0.dev0", "use_cache":
        true, "vocab_size": 32000}
    """,
    "Qwen3-30B-A3B": """
        {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "attention_bias": false,
        "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645, "decoder_sparse_step": 1, "head_dim":
        128, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 6144,
        "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [], "norm_topk_prob": true,
        "moe_intermediate_size": 768, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
        "num_hidden_layers": 4, "num_key_value_heads": 4, "output_router_logits": false, "rms_norm_eps": 1e-06,
        "rope_scaling": null, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": null,
        "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": true,
        "use_sliding_window": false, "vocab_size": 151936}
    """,
    "Qwen1.5-MoE-A2.7B": """
        {"architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "attention_dropout": 0.0, "bos_token_id":
        151643, "decoder_sparse_step": 1, "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 2048,
        "initializer_range": 0.02, "intermediate_size": 5632, "max_position_embeddings": 8192, "max_window_layers": 21,
        "moe_intermediate_size": 1408, "norm_topk_prob": false, "num_attention_heads": 16, "num_experts": 60,
        "num_experts_per_tok": 4, "num_hidden_layers": 4, "num_key_value_heads": 16, "output_router_logits": false,
        "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 5632, "sliding_window": 32768, "tie_word_embeddings": false, "torch_dtype":
        "bfloat16", "transformers_version": "4.39.0.dev0", "use_cache": true, "use_sliding_window": false, "vocab_size":
        151936}
    """,
    "GLM-Z1-9B-0414": """
        {"architectures": ["Glm4ForCausalLM"], "model_type": "glm4", "attention_bias": true, "attention_dropout": 0.0,
        "eos_token_id": [151329, 151336, 151338], "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
        "initializer_range": 0.02, "intermediate_size": 13696, "max_position_embeddings": 32768, "num_attention_heads":
        32, "num_hidden_layers": 4, "num_key_value_heads": 2, "pad_token_id": 151329, "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
        "transformers_version": "4.52.0.dev0", "use_cache": true, "vocab_size": 151552}
    """,
    "Qwen2-57B-A14B-Instruct": """
        {"architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "attention_dropout": 0.0, "bos_token_id":
        151643, "decoder_sparse_step": 1, "eos_token_id": 151645, "hidden_act": "silu", "hidden_size": 3584,
        "initializer_range": 0.02, "intermediate_size": 18944, "max_position_embeddings": 32768, "max_window_layers":
        28, "mlp_only_layers": [], "moe_intermediate_size": 2560, "norm_topk_prob": false, "num_attention_heads": 28,
        "num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 4, "num_key_value_heads": 4,
        "output_router_logits": false, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 20480, "sliding_window": 65536, "tie_word_embeddings": false, "torch_dtype":
        "bfloat16", "transformers_version": "4.40.1", "use_cache": true, "use_sliding_window": false, "vocab_size":
        151936}
    """,
    "Qwen3-8B, saved by transformers 5": """
        {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": false, "attention_dropout":
        0.0, "bos_token_id": 151643, "dtype": "bfloat16", "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 12288, "layer_types": ["full_attention",
        "full_attention"], "max_position_embeddings": 40960, "max_window_layers": 36, "num_attention_heads": 32,
        "num_hidden_layers": 2, "num_key_value_heads": 8, "pad_token_id": null, "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}, "sliding_window": null,
        "tie_word_embeddings": false, "transformers_version": "5.0.0", "use_cache": true, "use_sliding_window": false,
        "vocab_size": 151936}
    """,
    "Qwen3-Coder-30B-A3B-Instruct": """
        {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "attention_bias": false,
        "attention_dropout": 0.0, "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128, "hidden_act":
        "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 5472, "max_position_embeddings":
        262144, "max_window_layers": 28, "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": true,
        "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 2,
        "num_key_value_heads": 4, "output_router_logits": false, "qkv_bias": false, "rms_norm_eps": 1e-06,
        "rope_scaling": null, "rope_theta": 10000000, "router_aux_loss_coef": 0.0, "shared_expert_intermediate_size": 0,
        "sliding_window": null, "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version":
        "4.51.0", "use_cache": true, "use_qk_norm": true, "use_sliding_window": false, "vocab_size": 151936}
    """,
    "DeepSeek-R1-Distill-Qwen-1.5B": """
        {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "attention_dropout": 0.0, "bos_token_id": 151643,
        "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 1536, "initializer_range": 0.02,
        "intermediate_size": 8960, "max_position_embeddings": 131072, "max_window_layers": 21, "num_attention_heads":
        12, "num_hidden_layers": 2, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 10000,
        "sliding_window": 4096, "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version":
        "4.44.0", "use_cache": true, "use_mrope": false, "use_sliding_window": false, "vocab_size": 151936}
    """,
    "Llama-3.2-1B": """
        {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": false, "attention_dropout":
        0.0, "bos_token_id": 128000, "eos_token_id": 128001, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048,
        "initializer_range": 0.02, "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": false,
        "num_attention_heads": 32, "num_hidden_layers": 2, "num_key_value_heads": 8, "pretraining_tp": 1,
        "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3"}, "rope_theta": 500000.0, "tie_word_embeddings":
        true, "torch_dtype": "bfloat16", "transformers_version": "4.45.0.dev0", "use_cache": true, "vocab_size": 128256}
    """,
    "SmolLM2-1.7B-Instruct": """
        {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": false, "attention_dropout":
        0.0, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
        "intermediate_size": 8192, "is_llama_config": true, "max_position_embeddings": 8192, "mlp_bias": false,
        "num_attention_heads": 32, "num_hidden_layers": 2, "num_key_value_heads": 32, "pad_token_id": 2,
        "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": false, "rope_scaling": null, "rope_theta":
        130000, "tie_word_embeddings": true, "torch_dtype": "bfloat16", "transformers.js_config": {"kv_cache_dtype":
        {"q4f16": "float16", "fp16": "float16"}}, "transformers_version": "4.42.3", "use_cache": true, "vocab_size":
        49152}
    """,
    "gemma-3-1b-it": """
        {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "attention_bias": false,
        "attention_dropout": 0.0, "attn_logit_softcapping": null, "bos_token_id": 2, "cache_implementation": "hybrid",
        "eos_token_id": [1, 106], "final_logit_softcapping": null, "head_dim": 256, "hidden_activation":
        "gelu_pytorch_tanh", "hidden_size": 1152, "initializer_range": 0.02, "intermediate_size": 6912,
        "max_position_embeddings": 32768, "num_attention_heads": 4, "num_hidden_layers": 7, "num_key_value_heads": 1,
        "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000,
        "rope_scaling": null, "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6, "torch_dtype":
        "bfloat16", "transformers_version": "4.50.0.dev0", "use_cache": true, "vocab_size": 262144}
    """,
    "Llama-2-7b": """
        {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "_name_or_path": "meta-llama/Llama-2-7b-hf",
        "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
        "intermediate_size": 11008, "max_position_embeddings": 4096, "num_attention_heads": 32, "num_hidden_layers": 2,
        "num_key_value_heads": 32, "pad_token_id": 0, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": null,
        "tie_word_embeddings": false, "torch_dtype": "float16", "transformers_version": "4.31.0.dev0", "use_cache":
        true, "vocab_size": 32000}
    """,
}
"""As they stand on the Hub, with fewer layers."""


@pytest.mark.parametrize("name", HUB)
def test_models_of_the_hub_are_accepted(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(HUB[name])
    same_as_transformers(read_architecture(tmp_path), tmp_path)
