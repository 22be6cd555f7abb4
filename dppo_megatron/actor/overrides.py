"""`actor.megatron` and `actor.ddp`: fields of Megatron's own dataclasses, checked before a model is built.

Megatron has some 250 fields and every release adds more, so they are not copied into the schema. The tables below list
the fields that are refused, with the reason. Megatron would accept most of them and ignore them, because its training
program, loss or attention does not run here. Any other field is accepted, and the log lists it as not tried unless a
test trains with it. The tables follow the sources of megatron-core 0.16.1 and 0.19.2.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from dppo_megatron.types import UserError


def _by_name(names_by_reason: Mapping[str, str]) -> dict[str, str]:
    """{reason: "a b"} -> {"a": reason, "b": reason}."""
    return {name: reason for reason, names in names_by_reason.items() for name in names.split()}


DECIDED = _by_name(
    {
        "the model's config.json": "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups"
        " kv_channels normalization layernorm_epsilon qk_layernorm gated_linear_unit activation_func"
        " add_bias_linear add_qkv_bias num_moe_experts moe_router_topk moe_ffn_hidden_size"
        " moe_router_pre_softmax moe_router_score_function moe_layer_freq hidden_dropout attention_dropout"
        " softmax_scale window_size window_attn_skip_freq layernorm_zero_centered_gamma q_lora_rank kv_lora_rank"
        " qk_head_dim qk_pos_emb_head_dim v_head_dim rope_type rotary_base"
        " rotary_percent rotary_scaling_factor original_max_position_embeddings beta_fast beta_slow mscale"
        " mscale_all_dim moe_shared_expert_intermediate_size moe_router_topk_scaling_factor moe_router_num_groups"
        " moe_router_group_topk moe_router_enable_expert_bias moe_shared_expert_gate",
        "model.dtype": "params_dtype bf16 fp16 pipeline_dtype",
        "actor.layout": "tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size"
        " context_parallel_size sequence_parallel expert_model_parallel_size expert_tensor_parallel_size"
        " variable_seq_lengths",
        "actor.recompute and recompute_modules": "recompute_granularity recompute_method recompute_num_layers"
        " recompute_modules moe_layer_recompute",
        "actor.fp8 and fp8_bf16_layers": "fp8 fp8_recipe first_last_layers_bf16"
        " num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 fp8_amax_history_len fp8_amax_compute_algo",
        "actor.layer_spec": "transformer_impl",
        "actor.optimizer.distributed": "use_distributed_optimizer",
        "the device that the job runs on": "use_cpu_initialization",
    }
)
"""Field -> what decides its value. Setting that same value is no error."""

_NO_EFFECT = "it would have no effect: Megatron-core ignores it, or reads it in a part of it that does not run here"
_FUNCTION = "it is a function or an object, which a config file cannot hold, or Megatron sets it itself"
_TP_OVERLAP = "the buffers for tp_comm_overlap are made by Megatron's training program, not by its core"
_OFFLOADS = "it fixes the number and order of micro-batches in its first pass, and here they differ from step to step"
_FP8_PARAMETERS = "Megatron would build its float32 parameters from the random initialisation, not from the checkpoint"
_AUX = "router losses are off: they would balance the kept completions only, and depend on how samples are packed"
_ROUTING = "it changes which experts a token visits, or their weights, so log-probabilities would differ from servers'"

REFUSED = _by_name(
    {
        "rotary embedding is this program's own (docs/actor.md)": "apply_rope_fusion fused_single_qkv_rope"
        " rotary_interleaved no_rope_freq mrope_section",
        "log-probabilities and their output layer are this program's own (actor.logprob_kernel)": "cross_entropy_*"
        " defer_embedding_wgrad_compute wgrad_deferral_limit fp8_output_proj",
        "no family here has it, and attention on CPUs and without Transformer Engine is this program's own": "qk_clip*"
        " softmax_type qk_l2_norm log_max_attention_logit attention_output_gate multi_latent_attention"
        " apply_query_key_layer_scaling",
        "it would train another model than the checkpoint's, which servers would not run": "use_mup mup_*"
        " apply_residual_connection_post_layernorm glu_linear_offset"
        " activation_func_clamp_value moe_apply_probs_on_input moe_latent_size moe_mlp_glu_interleave_size",
        "no model family here has such layers": "mtp_* dsa_* linear_* mamba_* use_mamba_mem_eff_path is_hybrid_model"
        " heterogeneous_block_specs hetereogenous_dist_checkpoint experimental_attention_variant*"
        " use_fused_weighted_squared_relu",
        "it runs them on a separate CUDA stream, which no test here can": "moe_shared_expert_overlap"
        " use_grouped_gemm_for_shared_expert",
        _FUNCTION: "init_method output_layer_init_method embedding_init_method timers finalize_model_grads_func"
        " *_scale_func *_sync_func _cpu_offloading_context quant_recipe fp8_quantizer_factory",
        "packs have a new shape every time, and a CUDA graph has one fixed shape": "*cuda_graph*",
        "it is for Megatron's own inference and tests; rollouts come from rollout.engine": "inference_* flash_decode"
        " cache_mla_latents use_inference_optimized_layers mlp_chunks_for_prefill nccl_all_reduce_for_prefill"
        " test_mode",
        _TP_OVERLAP: "tp_comm_*",
        "Megatron schedules it by layers, which needs its own forward step": "overlap_moe_expert_parallel_comm"
        " delay_wgrad_compute ep_overlap_early_attn_memory_release high_priority_a2a_comm_stream"
        " overlap_dispatch_backward_with_experts_wgrad",
        "the forward step here lacks the third argument that Megatron would pass": "num_microbatches_with_partial_*",
        "it needs process groups that are not created here (actor.layout decides which are)": "*num_weight_shards"
        " num_distributed_optimizer_instances pipeline_model_parallel_comm_backend *gtp_weight_remat_size"
        " hierarchical_context_parallel_sizes",
        "sequences are distributed over context-parallel ranks by this program's packing": "hybrid_context_parallel"
        " max_seqlen_per_dp_cp_rank",
        "the weight table has a tensor for each expert": "moe_single_grouped_*",
        "this torch has no ring_exchange; only NVIDIA's own build does": "use_ring_exchange_p2p",
        "the loss is already divided by the planned denominator (docs/architecture.md)": "calculate_per_token_loss",
        "residuals have model.dtype, as in servers and between pipeline stages": "fp32_residual_connection",
        "this program's timers never wait for other ranks": "barrier_with_L1_time",
        "actor.recompute saves the same memory, also with pipeline stages": "cpu_offloading*",
        _OFFLOADS: "fine_grained_* offload_modules min_offloaded_tensor_size delta_offload_bytes_across_pp_ranks"
        " activation_offload_fraction",
        _NO_EFFECT: "masked_softmax_fusion attention_softmax_in_fp32 init_method_std embedding_init_method_std"
        " use_te_rng_tracker bias_dropout_fusion persist_layer_norm memory_efficient_layer_norm moe_extended_tp"
        " async_tensor_model_parallel_allreduce fp8_interval moe_token_dropping moe_per_layer_logging *kitchen*"
        " use_te_activation_func moe_use_legacy_grouped_gemm use_grouped_gemm_for_dense_mlp",
        "Transformer Engine has no FP8 attention over packs (thd)": "fp8_dot_product_attention"
        " fp8_multi_head_attention",
        "NVFP4 is not supported: unlike FP8 (actor.fp8), it has no hardware check, padding or gate here": "fp4*",
        _AUX: "moe_router_load_balancing_type moe_aux_loss_coeff moe_z_loss_coeff",
        "tokens beyond the capacity would be dropped, which no server does": "moe_expert_capacity_factor"
        " moe_pad_expert_input_to_capacity moe_token_drop_policy moe_expert_rank_capacity_factor",
        "the correction bias keeps the checkpoint's value (docs/actor.md)": "moe_router_bias_update_rate"
        " moe_router_quantile_balancing_ema",
        _ROUTING: "moe_router_topk_limited_devices moe_router_force_* moe_input_jitter_eps",
        "it is actor.routing_replay": "moe_enable_routing_replay",
        "it is another name of moe_router_padding_for_quantization": "moe_router_padding_for_fp8",
        "checkpoints and the weight stream support the distributed optimizer only, not FSDP": "*fsdp*"
        " data_parallel_sharding_strategy gradient_reduce_div_fusion suggested_communication_unit_size"
        " preserve_fp32_weights keep_fp8_transpose_cache outer_dp_sharding_strategy init_model_with_meta_device",
        "it needs a function that Megatron's training program passes to start the gathers": "align_param_gather",
        _FP8_PARAMETERS: "fp8_param fp8_param_gather reuse_grad_buf_for_mxfp8_param_ag",
    }
)
"""Field, or a pattern that also covers fields of later versions -> why any value but the default is refused."""

HARMLESS = {"moe_z_loss_coeff": 0, "moe_router_bias_update_rate": 0}
"""Values of refused fields, beside the default, that switch the feature off; other programs' recipes set them."""

ELSEWHERE = {
    "accumulate_allreduce_grads_in_fp32": "it is actor.ddp.grad_reduce_in_fp32, which is on with bfloat16",
    "freeze_moe_router": "it is a setting of NeMo RL; routers are trained here",
    "rotary_base": "it is rope_theta of the model's config.json",
    "use_flash_attn": "it is now attention_backend: flash",
}
"""Names in other programs' recipes that no dataclass of Megatron has -> what to use instead."""

RECIPES = dict.fromkeys(("fp8_margin", "fp8_wgrad", "tp_only_amax_red"), "delayed")
"""Field -> the only `actor.fp8` under which it has an effect."""

_TESTED = (
    "num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage account_for_embedding_in_pipeline_split"
    " account_for_loss_in_pipeline_split pipeline_model_parallel_layout bias_activation_fusion batch_p2p_comm"
    " deallocate_pipeline_outputs overlap_p2p_comm overlap_p2p_comm_warmup_flush microbatch_group_size_per_vp_stage"
    " clone_scatter_output_in_embedding perform_initialization moe_router_dtype bucket_size average_in_collective"
    " overlap_grad_reduce overlap_param_gather pad_buckets_for_high_nccl_busbw check_for_nan_in_grad"
    " check_for_large_grads reduce_scatter_with_fp32_accumulation"
)
TESTED = frozenset(_TESTED.split())
"""A test here trains with each of them; all other accepted fields count as not tried."""


@dataclasses.dataclass(frozen=True, slots=True)
class Overrides:
    """One of Megatron's dataclasses, with our values for its fields and the user's."""

    name: str
    cls: type
    ours: Mapping[str, Any]
    given: Mapping[str, Any]
    fp8: str

    def merged(self) -> dict[str, Any]:
        """Our values, overridden by the user's. A refused field may still be set to the value that it has anyway or to
        one that switches the feature off. Raises UserError for other values, and for fields the class does not have."""
        known = {field.name: field for field in dataclasses.fields(self.cls) if field.init}
        settings = dict(self.ours)
        for key, value in self.given.items():
            if key not in known:
                close = difflib.get_close_matches(key, known, 1)
                hint = f"; {ELSEWHERE[key]}" if key in ELSEWHERE else f"; did you mean {close[0]}?" if close else ""
                what = f"the installed megatron-core's {self.cls.__name__}"
                raise UserError(f"{self.name}.{key}: {what} has no such field{hint}")
            default = known[key].default
            if isinstance(default, enum.Enum) and isinstance(value, str):
                if value not in type(default).__members__:
                    members = ", ".join(type(default).__members__)
                    raise UserError(f"{self.name}.{key} = {value}: must be one of {members}")
                value = type(default)[value]
            is_harmless = key in HARMLESS and value == HARMLESS[key]
            if value != self.ours.get(key, default) and not is_harmless:
                if reason := refusal(key, self.fp8):
                    raise UserError(f"{self.name}.{key}: {reason}")
                settings[key] = value
        return settings

    def untested(self) -> list[str]:
        """The user's fields that change a value and that no test here trains with."""
        changed = [key for key, value in self.merged().items() if key not in self.ours or value != self.ours[key]]
        return [f"{self.name}.{key}" for key in changed if key not in TESTED]

    def build(self) -> Any:
        """Build the dataclass. Raises UserError for values that Megatron refuses."""
        settings = self.merged()
        try:
            return self.cls(**settings)
        except (ValueError, TypeError, AssertionError, ImportError, NotImplementedError) as error:
            what = f"{self.name} = {dict(self.given)}" if self.given else "the settings of actor"
            raise UserError(f"{what}: megatron-core refuses it: {error}") from None


def refusal(key: str, fp8: str) -> str:
    """Why a field may not get another value with this `actor.fp8`; empty if it may."""
    if pattern := next((pattern for pattern in REFUSED if fnmatchcase(key, pattern)), ""):
        return f"cannot be set: {REFUSED[pattern]}"
    if key in DECIDED:
        return f"is decided by {DECIDED[key]}"
    if (recipes := RECIPES.get(key)) and fp8 not in recipes:
        return f"has no effect with actor.fp8 = {fp8}, only with {recipes}"
    return ""
