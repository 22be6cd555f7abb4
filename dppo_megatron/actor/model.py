"""Builds a megatron-core GPTModel with the shape of a Hugging Face checkpoint.

There are two layer specs, Transformer Engine's and Megatron's local one with this project's packed attention and norm.
Both have the same sharded keys. The attention applies the position embedding (`attention.py`). The model returns hidden
states; `logprobs.py` applies the output layer in chunks.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Sequence
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
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from dppo_megatron.actor.attention import NormedResidual, PackedAttention, RMSNorm, Rotating
from dppo_megatron.actor.overrides import Overrides
from dppo_megatron.config.schema import ActorConfig
from dppo_megatron.platform.capabilities import LayerSpec, this_machine
from dppo_megatron.types import UserError
from dppo_megatron.weights.architecture import Architecture
from dppo_megatron.weights.layer_parts import Gemma, Latent, Rope, deinterleave
from dppo_megatron.weights.mapping import POST_ATTENTION, POST_MLP


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
    """Check `actor.megatron` and `actor.ddp`; returns the warning of `not_tried`. Needs no process group. Raises
    UserError for a field that cannot have its value. `runs_here`: the job will run on this machine; if not, only our
    own tables are checked, because Megatron's checks depend on the installed packages."""
    both = overrides(architecture, dtype, config, spec)
    for one in both if runs_here else ():
        one.build()
    flex = architecture.experts and config.megatron.get("moe_token_dispatcher_type") == "flex"
    if runs_here and flex and importlib.util.find_spec("deep_ep") is None:  # Megatron checks when it builds a layer
        missing = "DeepEP is not installed (the package deep_ep)"
        raise UserError(f"actor.megatron.moe_token_dispatcher_type = flex: {missing}; use alltoall")
    if spec == "te" and config.layout.context_parallel > 1:
        _check_exchange(config, architecture)
    return not_tried(both)


def _check_exchange(config: ActorConfig, architecture: Architecture) -> None:
    """Refuse what Transformer Engine 2.11 lacks over packs, and would assert in the first layer's forward pass."""
    exchange, context = config.megatron.get("cp_comm_type") or "p2p", config.layout.context_parallel
    heads, why, use = max(architecture.num_kv_heads // config.layout.tensor_parallel, 1), "", "p2p"
    if exchange not in ("p2p", "a2a"):
        why, use = "Transformer Engine does not have it for packs", "p2p" if architecture.latent else "p2p or a2a"
    elif exchange == "a2a" and architecture.latent:
        why = "it lacks latent attention"
    elif exchange == "a2a" and heads % context:
        why = f"a rank's {heads} key-value heads do not divide by context_parallel = {context}"
    if why:
        raise UserError(f"actor.megatron.cp_comm_type = {exchange}: {why}; use {use}")


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
    if config.fp8 == "off":
        return {}
    fp8 = "hybrid" if config.fp8 in ("tensorwise", "delayed") else "e4m3"
    settings: dict[str, Any] = {"fp8": fp8, "fp8_recipe": config.fp8}
    if config.fp8 == "delayed":
        settings |= {"fp8_amax_history_len": 1024, "fp8_amax_compute_algo": "max"}
    if config.fp8_bf16_layers:
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
    is_limited = experts.groups > 1
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
        "moe_router_enable_expert_bias": experts.is_sigmoid,
        # not updated in RL: it balances the load over pre-training's data, and engines cannot be told to change it
        "moe_router_bias_update_rate": 0.0 if experts.is_sigmoid else 1e-3,
        "moe_router_num_groups": experts.groups if is_limited else None,
        "moe_router_group_topk": experts.groups_per_token if is_limited else None,
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


def build_model(architecture: Architecture, config: TransformerConfig, spec: LayerSpec) -> list[GPTModel]:
    """This rank's model chunks with random weights: one for each virtual pipeline stage, or a single one."""
    count, chunks = config.virtual_pipeline_model_parallel_size, []
    for stage in range(count) if count else [None]:
        at: dict[str, Any] = {"ignore_virtual": stage is None, "vp_stage": stage}
        model = GPTModel(
            config=config,
            transformer_layer_spec=_block_spec(architecture, config, stage, spec),
            vocab_size=architecture.padded_vocab_size(config.tensor_model_parallel_size),
            max_sequence_length=architecture.max_positions,
            pre_process=parallel_state.is_pipeline_first_stage(**at),
            post_process=parallel_state.is_pipeline_last_stage(**at),
            parallel_output=True,
            share_embeddings_and_output_weights=architecture.tied_embeddings,
            position_embedding_type="none",  # the attention applies it (attention.py)
            vp_stage=stage,
        )
        if model.pre_process and architecture.gemma is not None:
            model.embedding.__class__ = ScaledEmbedding
        if model.post_process:
            model.output_layer.__class__ = DeferredOutputLayer
        chunks.append(model)
    return chunks


class LatentAttention(MLASelfAttention):  # type: ignore[misc]
    """Multi-head latent attention (DeepSeek-V3): Megatron's module with this project's rotary embedding.

        hidden --linear_q_down--> [q rank] --norm, linear_q_up--> queries: a part without positions, a rotary part
          '----linear_kv_down--> [kv rank] --norm, linear_kv_up--> keys without positions, values
                             '-> the rotary part of the keys, shared by all heads

    Here the rotary part comes first in queries and keys, so that the core attention can rotate it as a partial rotary
    embedding; the order of dimensions does not change a product of queries and keys. Megatron's own method also loses
    gradient in local layers, where linear_kv_down is split over ranks: a rank's gradient of the shared rotary part
    covers only its own heads, and Megatron does not sum it over ranks (`_of_all_heads` does).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        c = self.config
        rows = {"linear_q_down_proj": c.q_lora_rank, "linear_kv_down_proj": c.kv_lora_rank + c.qk_pos_emb_head_dim}
        for name, all_rows in rows.items():
            weight = getattr(getattr(self, name, None), "weight", None)
            if weight is not None and len(weight) == all_rows:
                # Transformer Engine marks even an unsplit weight as a shard: the gradient norm would count it once
                # for each rank
                weight.tensor_model_parallel = False

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """hidden_states [T (/ tp), 1, hidden] -> queries and keys [T, H / tp, D], values [T, H / tp, value dim], and
        the compressed inputs of queries and of keys."""
        c, heads = self.config, self.num_attention_heads_per_partition
        if c.q_lora_rank is None:
            compressed = hidden_states
            queries, _ = self.linear_q_proj(hidden_states)
        else:
            (compressed,) = self._compressed(self.linear_q_down_proj, hidden_states, [c.q_lora_rank])
            compressed = self.q_layernorm(self._as_input_tokens(compressed, hidden_states))
            queries, _ = self.linear_q_up_proj(compressed)
        sizes = [c.kv_lora_rank, c.qk_pos_emb_head_dim]
        latent, rotary = self._compressed(self.linear_kv_down_proj, hidden_states, sizes)
        latent = self.kv_layernorm(self._as_input_tokens(latent, hidden_states))
        keys_values, _ = self.linear_kv_up_proj(latent)
        queries = queries.view(-1, heads, c.qk_head_dim + c.qk_pos_emb_head_dim)
        plain_q, rotary_q = queries.split([c.qk_head_dim, c.qk_pos_emb_head_dim], -1)
        plain_k, values = keys_values.view(-1, heads, c.qk_head_dim + c.v_head_dim).split(
            [c.qk_head_dim, c.v_head_dim], -1
        )
        rotary_k = self._of_all_heads(rotary, len(values)).view(-1, 1, c.qk_pos_emb_head_dim)
        query = torch.cat([deinterleave(rotary_q), plain_q], -1)
        key = torch.cat([deinterleave(rotary_k).expand(-1, heads, -1), plain_k], -1)
        return query, key, values, compressed, latent

    def _compressed(self, linear: Any, hidden_states: Tensor, sizes: list[int]) -> list[Tensor]:
        """The full output of `linear`, split into these sizes along the last dimension: of all tokens if Megatron
        splits the layer's rows over ranks, of this rank's if every rank has all rows (Transformer Engine)."""
        out, _ = linear(hidden_states)
        if out.size(-1) != sum(sizes):
            out = gather_from_tensor_model_parallel_region(out)
        return list(out.split(sizes, -1))

    def _as_input_tokens(self, compressed: Tensor, hidden_states: Tensor) -> Tensor:
        """`compressed` for the tokens of `hidden_states` only: this rank's, under sequence parallelism."""
        has_all = len(compressed) != len(hidden_states)
        return scatter_to_sequence_parallel_region(compressed) if has_all else compressed

    def _of_all_heads(self, rotary: Tensor, tokens: int) -> Tensor:
        """[T, 1, rotary dim] of all tokens; its gradient is summed over the heads of all ranks."""
        is_share = len(rotary) != tokens
        spread = gather_from_sequence_parallel_region if is_share else copy_to_tensor_model_parallel_region
        all_tokens: Tensor = spread(rotary)
        return all_tokens


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


def _norm_keys(architecture: Architecture, has_experts: bool) -> dict[str, str]:
    """Key prefix of a norm that is a layer's own module -> that of Transformer Engine's spec, which fuses it with the
    linear layer after it."""
    if architecture.latent is None:
        keys = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
    else:
        ups = {"q_layernorm": "linear_q_up_proj", "kv_layernorm": "linear_kv_up_proj"}
        keys = {f"self_attention.{norm}.": f"self_attention.{up}.layer_norm_" for norm, up in ups.items()}
    # not fused with experts, so it keeps its own key
    return keys if has_experts else keys | {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}


def _block_spec(
    architecture: Architecture, config: TransformerConfig, virtual_stage: int | None, spec: LayerSpec
) -> TransformerBlockSubmodules:
    """The specs of the layers of this stage."""
    core, norm = (PackedAttention, RMSNorm) if spec == "local" else _te_modules()

    @functools.cache
    def layer(has_experts: bool, rope: Rope) -> ModuleSpec:
        layer = (_local_layer if spec == "local" else _te_layer)(architecture, config, has_experts)
        attention = layer.submodules.self_attention
        params = {"rope": rope, "interleaved": architecture.is_glm4}
        attention.submodules.core_attention = ModuleSpec(module=core, params=params)
        if architecture.latent is not None:
            attention.module = LatentAttention
        if architecture.post_norms:
            _norm_residuals(layer.submodules, norm, config)
        return layer

    first = get_transformer_layer_offset(config, vp_stage=virtual_stage)
    stage = range(first, first + get_num_layers_to_build(config, vp_stage=virtual_stage))
    layers = [layer(architecture.has_experts(number), architecture.rope_of(number)) for number in stage]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)


def _local_layer(architecture: Architecture, config: TransformerConfig, has_experts: bool) -> ModuleSpec:
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts if has_experts else None,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=architecture.latent is not None,
        normalization="RMSNorm",
    )
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    layer.submodules.sharded_state_dict_keys_map = _norm_keys(architecture, has_experts)
    attention = layer.submodules.self_attention.submodules
    if architecture.latent is not None:
        attention.q_layernorm = attention.kv_layernorm = RMSNorm
    elif architecture.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return layer


def _te_modules() -> tuple[type, type]:
    from megatron.core.extensions.transformer_engine import TEDotProductAttention, TENorm

    class TransformerEngineAttention(Rotating, TEDotProductAttention):  # type: ignore[misc]
        """Transformer Engine's own fused rotary kernel for packs is slow with many sequences (TransformerEngine#2866)
        and rounds differently from the rollout engines'."""

    return TransformerEngineAttention, TENorm


def _te_layer(architecture: Architecture, config: TransformerConfig, has_experts: bool) -> ModuleSpec:
    layer = get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts if has_experts else None,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=architecture.latent is not None,
    )
    if architecture.lora is not None:
        _separate_norms(layer.submodules, architecture, has_experts)
    return layer


def _separate_norms(layer: Any, architecture: Architecture, has_experts: bool) -> None:
    """Separate the norms from the linear layers after them, under the same keys: adapters need the normed inputs."""
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm

    attention = layer.self_attention.submodules
    if architecture.latent is None:
        layer.input_layernorm, attention.linear_qkv = TENorm, TEColumnParallelLinear
    else:
        attention.q_layernorm = attention.kv_layernorm = TENorm
        attention.linear_q_up_proj = attention.linear_kv_up_proj = TEColumnParallelLinear
    if not has_experts:
        layer.pre_mlp_layernorm, layer.mlp.submodules.linear_fc1 = TENorm, TEColumnParallelLinear
    layer.sharded_state_dict_keys_map |= _norm_keys(architecture, has_experts)


def _norm_residuals(layer: Any, norm: Any, config: TransformerConfig) -> None:
    layer.self_attn_bda = layer.mlp_bda = ModuleSpec(module=NormedResidual, params={"norm": norm, "config": config})
    layer.sharded_state_dict_keys_map |= {"self_attn_bda.norm.": POST_ATTENTION, "mlp_bda.norm.": POST_MLP}
