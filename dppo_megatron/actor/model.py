"""A megatron-core GPTModel with the shape of a Hugging Face checkpoint."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from dppo_megatron.actor.attention import PackedAttention, RMSNorm
from dppo_megatron.actor.layout import Layout
from dppo_megatron.weights.architecture import Architecture


def transformer_config(
    architecture: Architecture, layout: Layout, dtype: torch.dtype, *, recompute: bool
) -> TransformerConfig:
    """Megatron's configuration for this architecture and layout.

    The fusions that are off need CUDA extensions of Apex or Transformer Engine; the local layer spec has none.
    """
    recomputation: dict[str, Any] = {}
    if recompute:
        recomputation = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(
        num_layers=architecture.num_layers,
        hidden_size=architecture.hidden_size,
        ffn_hidden_size=architecture.ffn_size,
        num_attention_heads=architecture.num_heads,
        num_query_groups=architecture.num_kv_heads,
        kv_channels=architecture.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=architecture.norm_eps,
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=layout.tensor_parallel,
        pipeline_model_parallel_size=layout.pipeline_parallel,
        pipeline_dtype=dtype,
        sequence_parallel=layout.sequence_parallel,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # Megatron asks for it with variable lengths, for dense models too
        batch_p2p_comm=False,
        use_cpu_initialization=layout.device.type == "cpu",
        attention_softmax_in_fp32=True,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        **recomputation,
    )


def build_model(architecture: Architecture, config: TransformerConfig) -> GPTModel:
    """This rank's part of the model, with random weights."""
    layer = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention, attention.q_layernorm, attention.k_layernorm = PackedAttention, RMSNorm, RMSNorm
    block = TransformerBlockSubmodules(layer_specs=[layer] * get_num_layers_to_build(config), layer_norm=RMSNorm)
    return GPTModel(
        config=config,
        transformer_layer_spec=block,
        vocab_size=architecture.padded_vocab_size(config.tensor_model_parallel_size),
        max_sequence_length=architecture.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=True),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=True),
        parallel_output=True,
        share_embeddings_and_output_weights=architecture.tied_embeddings,
        position_embedding_type="rope",
        rotary_base=architecture.rope_theta,
    )
