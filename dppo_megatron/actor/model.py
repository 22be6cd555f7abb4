"""Builds a megatron-core GPTModel with the shape of a Hugging Face checkpoint.

There are two layer specs: Transformer Engine's where it is installed on CUDA, else Megatron's local one with this
project's packed attention and norm. Both have the same sharded keys, so checkpoints and the weight table fit both.
The attention applies the position embedding (`rotary.py`). The model returns hidden states; `logprobs.py` applies the
output layer in chunks.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from dppo_megatron.actor.attention import NormedResidual, PackedAttention, RMSNorm
from dppo_megatron.actor.latent import LatentAttention
from dppo_megatron.actor.overrides import Overrides
from dppo_megatron.actor.rotary import Rotating
from dppo_megatron.config.schema import ActorConfig
from dppo_megatron.platform.capabilities import LayerSpec, this_machine
from dppo_megatron.types import UserError
from dppo_megatron.weights.architecture import Architecture
from dppo_megatron.weights.layer_parts import Experts, Gemma, Latent, Rope
from dppo_megatron.weights.mapping import POST_ATTENTION, POST_MLP

_RECIPES: dict[str, dict[str, Any]] = {
    "off": {},
    "tensorwise": {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
    "delayed": {
        "fp8": "hybrid",
        "fp8_recipe": "delayed",
        "fp8_amax_history_len": 1024,
        "fp8_amax_compute_algo": "max",
    },
    "blockwise": {"fp8": "e4m3", "fp8_recipe": "blockwise"},
    "mxfp8": {"fp8": "e4m3", "fp8_recipe": "mxfp8"},
}
"""`actor.fp8` -> Megatron's settings; packing/alignment.py has the multiple of tokens that each recipe needs."""


def overrides(
    architecture: Architecture, dtype: torch.dtype, config: ActorConfig, spec: LayerSpec
) -> tuple[Overrides, Overrides]:
    """What Megatron's configurations of the model and of its data parallelism are built from."""
    if config.lora.experts and config.megatron.get("moe_grouped_gemm"):
        raise UserError("actor.megatron.moe_grouped_gemm: adapters on experts need a linear layer each; leave it out")
    ours, ours_for_ddp = _settings(architecture, dtype, config, spec), _ddp_settings(config, dtype)
    cls = TransformerConfig if architecture.latent is None else MLATransformerConfig
    return (
        Overrides("actor.megatron", cls, ours, config.megatron, config.fp8),
        Overrides("actor.ddp", DistributedDataParallelConfig, ours_for_ddp, config.ddp, config.fp8),
    )


def check_settings(
    config: ActorConfig, architecture: Architecture, dtype: torch.dtype, spec: LayerSpec, *, runs_here: bool
) -> list[str]:
    """Check `actor.megatron` and `actor.ddp`; returns the warning of `not_tried`. Needs no process group.

    Args:
        runs_here: the job will run on this machine. If not, only our own tables are checked, because Megatron's checks
            depend on the installed packages.

    Raises:
        UserError: a field that cannot have its value.
    """
    both = overrides(architecture, dtype, config, spec)
    for one in both if runs_here else ():
        one.build()
    flex = architecture.experts and config.megatron.get("moe_token_dispatcher_type") == "flex"
    if runs_here and flex and importlib.util.find_spec("deep_ep") is None:  # Megatron checks when it builds a layer
        raise UserError(
            "actor.megatron.moe_token_dispatcher_type = flex: DeepEP is not installed (the package deep_ep); use"
            " alltoall"
        )
    return not_tried(both)


def not_tried(both: Sequence[Overrides]) -> list[str]:
    """One warning that names the fields in use which no test here trains with; empty if there are none."""
    names = sorted(name for one in both for name in one.untested())
    return [f"not tried here, watch loss and mismatch: {', '.join(names)}"] if names else []


def _ddp_settings(config: ActorConfig, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "use_distributed_optimizer": config.optimizer.distributed and dtype != torch.float64,
        "grad_reduce_in_fp32": dtype == torch.bfloat16,
        "overlap_grad_reduce": config.overlap_grad_reduce,
        "overlap_param_gather": config.overlap_param_gather,
    }


def _settings(architecture: Architecture, dtype: torch.dtype, config: ActorConfig, spec: LayerSpec) -> dict[str, Any]:
    """Our values for the fields of Megatron's TransformerConfig.

    The fusions that are off need CUDA extensions of Apex or Transformer Engine. They stay off with Transformer Engine
    too: fused rotary and activation kernels differ enough from the rollout engine's to cause spikes in the ratio.
    """
    layout, chunks = config.layout, config.layout.virtual_pipeline
    settings: dict[str, Any] = dict(
        num_layers=architecture.num_layers,
        hidden_size=architecture.hidden_size,
        ffn_hidden_size=architecture.ffn_size,
        num_attention_heads=architecture.num_heads,
        num_query_groups=architecture.num_kv_heads,
        kv_channels=architecture.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=architecture.norm_eps,
        qk_layernorm=architecture.qk_norm or architecture.latent is not None,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=architecture.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=layout.tensor_parallel,
        pipeline_model_parallel_size=layout.pipeline_parallel,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        context_parallel_size=layout.context_parallel,
        pipeline_dtype=dtype,
        sequence_parallel=layout.sequence_parallel and layout.tensor_parallel > 1,
        variable_seq_lengths=chunks == 1,  # the interleaved schedule supports only one shape
        batch_p2p_comm=False,
        use_cpu_initialization=not torch.cuda.is_available(),
        attention_softmax_in_fp32=True,
        gradient_accumulation_fusion=this_machine().fuses_weight_gradients,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        **_recomputation(config),
        **_experts(architecture, config, spec),
        **({} if architecture.latent is None else _latent(architecture.latent)),
        **_fp8_settings(config),
    )
    return settings if architecture.gemma is None else settings | _gemma(architecture.gemma)


def _fp8_settings(config: ActorConfig) -> dict[str, Any]:
    """Fields of Megatron's TransformerConfig for `actor.fp8`; nothing when it is off."""
    settings = dict(_RECIPES[config.fp8])
    if settings and config.fp8_bf16_layers:
        settings |= {
            "first_last_layers_bf16": True,
            "num_layers_at_start_in_bf16": config.fp8_bf16_layers,
            "num_layers_at_end_in_bf16": config.fp8_bf16_layers,
        }
    return settings


def _recomputation(config: ActorConfig) -> dict[str, Any]:
    if config.recompute == "none":
        return {}
    if config.recompute == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": list(config.recompute_modules)}
    return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def _experts(architecture: Architecture, config: ActorConfig, spec: LayerSpec) -> dict[str, Any]:
    # Megatron requires this dispatcher with variable lengths, even for dense models
    settings: dict[str, Any] = {"moe_token_dispatcher_type": "alltoall"}
    experts = architecture.experts
    if experts is None:
        return settings
    if experts.is_sigmoid:
        settings |= _like_deepseek(experts)
    return settings | {
        # a list gives each layer its own keys in the sharded state dict (`Architecture.has_layer_keys`)
        "moe_layer_freq": [int(architecture.has_experts(layer)) for layer in range(architecture.num_layers)],
        "num_moe_experts": experts.count,
        "moe_router_topk": experts.per_token,
        "moe_ffn_hidden_size": experts.ffn_size,
        "moe_shared_expert_intermediate_size": experts.shared_ffn_size or None,
        "moe_shared_expert_gate": experts.shared_gate,
        "moe_router_topk_scaling_factor": None if experts.scale == 1.0 else experts.scale,
        "moe_router_pre_softmax": not experts.normalize_weights,
        "moe_router_score_function": "sigmoid" if experts.is_sigmoid else "softmax",
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",  # its statistics would cover the kept completions only
        "moe_grouped_gemm": spec == "te" and not config.lora.experts,  # adapters need a linear layer per expert
        "moe_router_padding_for_quantization": config.fp8 != "off",
        "expert_model_parallel_size": config.layout.expert_parallel,
        "expert_tensor_parallel_size": config.layout.expert_tensor_parallel or config.layout.tensor_parallel,
    }


def _latent(latent: Latent) -> dict[str, Any]:
    return {
        "q_lora_rank": latent.query_rank or None,
        "kv_lora_rank": latent.rank,
        "qk_head_dim": latent.nope_dim,
        "qk_pos_emb_head_dim": latent.rope_dim,
        "v_head_dim": latent.value_dim,
        "rope_type": "rope",
        # Megatron multiplies the softmax scale by (1 + mscale_all_dim log(rotary_scaling_factor) / 10)^2: latent.scale
        "rotary_scaling_factor": math.e,
        "mscale_all_dim": 10.0 * (math.sqrt(latent.scale) - 1.0),
    }


def _gemma(gemma: Gemma) -> dict[str, Any]:
    return {
        "layernorm_zero_centered_gamma": True,
        "activation_func": gelu,
        "softmax_scale": gemma.softmax_scale,
        "window_size": (gemma.window - 1, 0),  # tokens before and after the token itself
        "window_attn_skip_freq": [int(has_window) for has_window in gemma.windowed],
    }


def gelu(x: Tensor) -> Tensor:
    """Gemma's GELU, with the tanh approximation."""
    return F.gelu(x, approximate="tanh")


def _like_deepseek(experts: Experts) -> dict[str, Any]:
    """Fields for sigmoid routers."""
    is_limited = experts.groups > 1
    return {
        # not updated in RL: it balances the load over pre-training's data, and engines cannot be told to change it
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_num_groups": experts.groups if is_limited else None,
        "moe_router_group_topk": experts.groups_per_token if is_limited else None,
    }


def build_model(architecture: Architecture, config: TransformerConfig, spec: LayerSpec) -> list[GPTModel]:
    """This rank's model chunks with random weights: one for each virtual pipeline stage, or a single one."""
    count, chunks = config.virtual_pipeline_model_parallel_size, []
    for stage in range(count) if count else [None]:
        at: dict[str, Any] = {"ignore_virtual": stage is None, "vp_stage": stage}
        model = GPTModel(
            config=config,
            transformer_layer_spec=_LAYER_SPECS[spec](architecture, config, stage),
            vocab_size=architecture.padded_vocab_size(config.tensor_model_parallel_size),
            max_sequence_length=architecture.max_positions,
            pre_process=parallel_state.is_pipeline_first_stage(**at),
            post_process=parallel_state.is_pipeline_last_stage(**at),
            parallel_output=True,
            share_embeddings_and_output_weights=architecture.tied_embeddings,
            position_embedding_type="none",  # the attention applies it (rotary.py)
            vp_stage=stage,
        )
        if model.pre_process and architecture.gemma is not None:
            model.embedding.__class__ = ScaledEmbedding
        if model.post_process:
            model.output_layer.__class__ = DeferredOutputLayer
        chunks.append(model)
    return chunks


class ScaledEmbedding(LanguageModelEmbedding):  # type: ignore[misc]
    """Gemma's: multiplied by the square root of the hidden size, which is rounded to the weights' dtype as in HF."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """[1, T] token ids -> [T (/ tp), 1, H], with Megatron's arguments."""
        embedded: Tensor = super().forward(*args, **kwargs)
        return embedded * torch.tensor(self.config.hidden_size**0.5).to(embedded.dtype)


class DeferredOutputLayer(ColumnParallelLinear):  # type: ignore[misc]
    """Returns hidden states unchanged: the float32 logits of a whole long pack would be the largest tensor of a step.
    The weight stays in Megatron's module, which handles its sharding and tying."""

    def forward(self, input_: Tensor, weight: Tensor | None = None, **_: Any) -> tuple[Tensor, None]:
        """[T / tp, 1, H] (with sequence parallelism) -> the same."""
        return input_, None


def output_weight(model: GPTModel) -> Tensor:
    """[V / tp, H] this rank's rows of the output projection, on the last pipeline stage."""
    weight: Tensor = (
        model.shared_embedding_or_output_weight()
        if model.share_embeddings_and_output_weights
        else model.output_layer.weight
    )
    return weight


def _layers(
    architecture: Architecture,
    config: TransformerConfig,
    virtual_stage: int | None,
    kinds: Callable[[bool, Rope], ModuleSpec],
) -> list[ModuleSpec]:
    """The spec of each layer of this stage, from `kinds(has_experts, position embedding)`."""
    first = get_transformer_layer_offset(config, vp_stage=virtual_stage)
    count = get_num_layers_to_build(config, vp_stage=virtual_stage)
    stage = range(first, first + count)
    return [kinds(architecture.has_experts(layer), architecture.rope_of(layer)) for layer in stage]


_NORMS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
_LATENT = {
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
"""Key prefix of a local layer's norm -> that of Transformer Engine's spec, which fuses norm and linear layer."""


def _local_spec(
    architecture: Architecture, config: TransformerConfig, virtual_stage: int | None
) -> TransformerBlockSubmodules:
    @functools.cache
    def layer(has_experts: bool, rope: Rope) -> ModuleSpec:
        layer = get_gpt_layer_local_spec(
            num_experts=config.num_moe_experts if has_experts else None,
            qk_layernorm=config.qk_layernorm,
            multi_latent_attention=architecture.latent is not None,
            normalization="RMSNorm",
        )
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
        keys = layer.submodules.sharded_state_dict_keys_map = dict(_NORMS if architecture.latent is None else _LATENT)
        if has_experts:  # Transformer Engine's spec does not fuse this norm with the experts, so it keeps its own key
            del keys["pre_mlp_layernorm."]
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = ModuleSpec(
            module=PackedAttention, params={"rope": rope, "interleaved": architecture.is_glm4}
        )
        if architecture.latent is not None:
            layer.submodules.self_attention.module = LatentAttention
            attention.q_layernorm = attention.kv_layernorm = RMSNorm
        elif architecture.qk_norm:
            attention.q_layernorm = attention.k_layernorm = RMSNorm
        if architecture.post_norms:
            _norm_residuals(layer.submodules, RMSNorm, config)
        return layer

    layers = _layers(architecture, config, virtual_stage, layer)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)


def _te_spec(
    architecture: Architecture, config: TransformerConfig, virtual_stage: int | None
) -> TransformerBlockSubmodules:
    from megatron.core.extensions.transformer_engine import TEDotProductAttention, TENorm

    class TransformerEngineAttention(Rotating, TEDotProductAttention):  # type: ignore[misc]
        """Transformer Engine's own fused rotary kernel for packs is slow with many sequences (TransformerEngine#2866)
        and rounds differently from the rollout engines'."""

    @functools.cache
    def layer(has_experts: bool, rope: Rope) -> ModuleSpec:
        layer = get_gpt_layer_with_transformer_engine_spec(
            num_experts=config.num_moe_experts if has_experts else None,
            moe_grouped_gemm=config.moe_grouped_gemm,
            qk_layernorm=config.qk_layernorm,
            multi_latent_attention=architecture.latent is not None,
        )
        if architecture.latent is not None:
            layer.submodules.self_attention.module = LatentAttention
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = ModuleSpec(
            module=TransformerEngineAttention, params={"rope": rope, "interleaved": architecture.is_glm4}
        )
        if architecture.lora is not None:
            _separate_norms(layer.submodules, has_experts)
        if architecture.post_norms:
            _norm_residuals(layer.submodules, TENorm, config)
        return layer

    layers = _layers(architecture, config, virtual_stage, layer)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=TENorm)


def _separate_norms(layer: Any, has_experts: bool) -> None:
    """Separate the norms from the linear layers after them, under the same keys: adapters need the normed inputs."""
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm

    attention, keys = layer.self_attention.submodules, layer.sharded_state_dict_keys_map
    if hasattr(attention, "linear_qkv"):
        layer.input_layernorm, attention.linear_qkv = TENorm, TEColumnParallelLinear
        keys |= {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
    else:
        attention.q_layernorm = attention.kv_layernorm = TENorm
        attention.linear_q_up_proj = attention.linear_kv_up_proj = TEColumnParallelLinear
        keys |= {ours: key for ours, key in _LATENT.items() if "self_attention" in ours}
    if not has_experts:
        layer.pre_mlp_layernorm, layer.mlp.submodules.linear_fc1 = TENorm, TEColumnParallelLinear
        keys |= {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}


def _norm_residuals(layer: Any, norm: Any, config: TransformerConfig) -> None:
    layer.self_attn_bda = layer.mlp_bda = ModuleSpec(module=NormedResidual, params={"norm": norm, "config": config})
    layer.sharded_state_dict_keys_map |= {"self_attn_bda.norm.": POST_ATTENTION, "mlp_bda.norm.": POST_MLP}


_LAYER_SPECS: dict[LayerSpec, Callable[[Architecture, TransformerConfig, int | None], TransformerBlockSubmodules]] = {
    "local": _local_spec,
    "te": _te_spec,
}
