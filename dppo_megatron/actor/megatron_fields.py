"""Which fields of Megatron's dataclasses do what here: decided, refused, tested.

A field in none of them is accepted, and the log names it as not tried. Read in the sources of megatron-core 0.16.1 and
0.19.2; tests/test_actor_settings.py goes through all fields of the installed version. Most that are refused would be
accepted by Megatron and then do nothing, because its training program, its loss or its attention is not what runs here,
or train another model than the one that servers get.
"""

from __future__ import annotations

from collections.abc import Mapping


def _by_name(names: Mapping[str, str]) -> dict[str, str]:
    """{reason: "a b"} -> {"a": reason, "b": reason}."""
    return {name: reason for reason, several in names.items() for name in several.split()}


DECIDED = _by_name(
    {
        "the model's config.json": "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups"
        " kv_channels normalization layernorm_epsilon qk_layernorm gated_linear_unit activation_func"
        " add_bias_linear add_qkv_bias num_moe_experts moe_router_topk moe_ffn_hidden_size"
        " moe_router_pre_softmax moe_router_score_function moe_layer_freq hidden_dropout attention_dropout"
        " softmax_scale",
        "model.dtype": "params_dtype bf16 fp16 pipeline_dtype",
        "actor.layout": "tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size"
        " context_parallel_size sequence_parallel expert_model_parallel_size expert_tensor_parallel_size"
        " variable_seq_lengths",
        "actor.recompute and recompute_modules": "recompute_granularity recompute_method recompute_num_layers"
        " recompute_modules moe_layer_recompute",
        "actor.fp8, fp8_bf16_layers and fp8_param": "fp8 fp8_recipe fp8_param first_last_layers_bf16"
        " num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 fp8_amax_history_len fp8_amax_compute_algo"
        " fp8_param_gather",
        "actor.layer_spec": "transformer_impl",
        "actor.optimizer.distributed": "use_distributed_optimizer",
        "the device that the job runs on": "use_cpu_initialization",
    }
)
"""What decides a field's value. Giving the same value again is no error."""

_OWN_HEAD = "log-probabilities and their output layer are this program's own (actor.logprob_kernel)"
_OWN_ATTENTION = "no family here has it, and attention on CPUs and without Transformer Engine is this program's own"
_OTHER_MODEL = "it would train another model than the checkpoint's, which servers would not run"
_NO_LAYERS = "no model family here has such layers"
_LOADED = "weights are loaded from the checkpoint, so how they are first drawn has no effect"
_GRAPH = "packs have a new shape every time, and a graph is of one shape"
_FSDP = "checkpoints and the weight stream know the distributed optimizer only, not FSDP"
_INFERENCE = "it is for Megatron's own inference; rollouts come from rollout.engine"
_GROUPS = "its process groups are made where all others are (actor.layout), and not for this"
_IGNORED = "Megatron-core ignores it"
_NOT_IN_SPEC = "it is an argument of the layer spec, and not among those that are passed here"
_FUNCTION = "it is a function or an object, which a file of settings cannot hold, or Megatron's own to set"
_AUX = "losses of the router are off: they would balance kept completions only, and depend on how samples are packed"
_DROPS = "tokens beyond the capacity would be dropped, so log-probabilities would not be the policy's"
_ROUTING = (
    "it changes which experts a token visits, or their weights, so log-probabilities would not be those of servers"
)
_FP8 = "Transformer Engine has no FP8 attention over packs (thd)"
_FP4 = "NVFP4 has no check of the chip, no token multiple of packs and no gate here; actor.fp8 has"
_BY_LAYERS = "Megatron schedules it by layers, which needs its own forward step"
_TP_OVERLAP = (
    "Transformer Engine's buffers for tp_comm_overlap are made by Megatron's training program, not by its core"
)
_STEP = "the forward step here has no third argument, which Megatron would pass"
_SHARED = "no model family here has shared experts"
_DISTRIBUTES_CP = "sequences are distributed over context-parallel ranks by this program's packing"
_OFFLOADS = "it fixes number and order of micro-batches in its first pass, and here they differ from step to step"

REFUSED = _by_name(
    {
        "rotary embedding is this program's own (docs/actor.md)": "apply_rope_fusion fused_single_qkv_rope"
        " rotary_interleaved no_rope_freq mrope_section",
        _OWN_HEAD: "cross_entropy_loss_fusion cross_entropy_fusion_impl defer_embedding_wgrad_compute"
        " wgrad_deferral_limit fp8_output_proj",
        _OWN_ATTENTION: "softmax_type window_size window_attn_skip_freq qk_l2_norm qk_clip qk_clip_alpha"
        " qk_clip_threshold log_max_attention_logit attention_output_gate multi_latent_attention"
        " apply_query_key_layer_scaling",
        "it belongs to Megatron's unfused attention, which does not run here": "masked_softmax_fusion"
        " attention_softmax_in_fp32",
        "it is for Megatron's own tests": "test_mode",
        _OTHER_MODEL: "apply_residual_connection_post_layernorm layernorm_zero_centered_gamma glu_linear_offset"
        " activation_func_clamp_value moe_apply_probs_on_input moe_latent_size moe_mlp_glu_interleave_size"
        " moe_shared_expert_glu_interleave_size use_mup mup_width_mult mup_base_hidden_size mup_embedding_mult"
        " mup_output_mult mup_base_head_dim mup_attn_scale_power",
        _NO_LAYERS: "mtp_num_layers mtp_loss_scaling_factor mtp_standalone mtp_use_repeated_layer mtp_detach_heads"
        " mtp_hybrid_override_pattern experimental_attention_variant dsa_indexer_n_heads dsa_indexer_head_dim"
        " dsa_indexer_topk dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss dsa_indexer_topk_freq"
        " dsa_indexer_skip_topk_offset dsa_kernel_backend dsa_indexer_rope_interleaved dsa_indexer_rotate_activation"
        " dsa_indexer_scoring_relu dsa_indexer_k_norm_epsilon dsa_indexer_k_norm_fp32 linear_attention_freq"
        " linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads linear_num_value_heads"
        " is_hybrid_model mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads use_mamba_mem_eff_path"
        " mamba_training_ssm_states_dtype heterogeneous_block_specs hetereogenous_dist_checkpoint"
        " use_fused_weighted_squared_relu",
        _SHARED: "moe_shared_expert_intermediate_size moe_shared_expert_gate moe_shared_expert_overlap"
        " use_grouped_gemm_for_shared_expert",
        _LOADED: "init_method_std embedding_init_method_std",
        _FUNCTION: "init_method output_layer_init_method embedding_init_method timers finalize_model_grads_func"
        " grad_scale_func no_sync_func grad_sync_func param_sync_func _cpu_offloading_context quant_recipe"
        " moe_grad_scale_func mtp_grad_scale_func experimental_attention_variant_loss_scale_func",
        _GRAPH: "cuda_graph_impl enable_cuda_graph external_cuda_graph cuda_graph_use_single_mempool"
        " cuda_graph_retain_backward_graph cuda_graph_warmup_steps cuda_graph_scope cuda_graph_modules"
        " inference_cuda_graph_scope moe_pad_experts_for_cuda_graph_inference delay_offload_until_cuda_graph",
        _INFERENCE: "flash_decode inference_rng_tracker inference_sampling_seed use_inference_optimized_layers"
        " inference_fuse_tp_communication mlp_chunks_for_prefill nccl_all_reduce_for_prefill"
        " inference_disable_triton_nvls_kernels inference_grouped_gemm_backend"
        " inference_moe_disable_fused_quant_kernels inference_moe_token_dispatcher_type",
        _TP_OVERLAP: "tp_comm_overlap tp_comm_bulk_wgrad tp_comm_bulk_dgrad tp_comm_overlap_ag tp_comm_overlap_rs"
        " tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_atomic_ag tp_comm_split_rs tp_comm_atomic_rs"
        " tp_comm_overlap_disable_qkv tp_comm_overlap_disable_fc1 tp_comm_bootstrap_backend",
        _BY_LAYERS: "overlap_moe_expert_parallel_comm delay_wgrad_compute ep_overlap_early_attn_memory_release"
        " high_priority_a2a_comm_stream overlap_dispatch_backward_with_experts_wgrad",
        _GROUPS: "pipeline_model_parallel_comm_backend hierarchical_context_parallel_sizes"
        " num_distributed_optimizer_instances tensor_parallel_num_weight_shards gtp_weight_remat_size"
        " expert_tensor_parallel_num_weight_shards expert_gtp_weight_remat_size",
        "random generators are seeded where groups are made (actor.layout), and not by this": "use_te_rng_tracker",
        _DISTRIBUTES_CP: "hybrid_context_parallel max_seqlen_per_dp_cp_rank",
        "the weight table names a tensor of each expert": "moe_single_grouped_weight moe_single_grouped_bias",
        "this torch has no ring_exchange, which NVIDIA's own build adds": "use_ring_exchange_p2p",
        _STEP: "num_microbatches_with_partial_activation_checkpoints",
        "the loss is already divided by what was planned (docs/architecture.md)": "calculate_per_token_loss",
        "residuals are of model.dtype, as in servers and between pipeline stages": "fp32_residual_connection",
        "there is no dropout, so there is nothing to fuse": "bias_dropout_fusion",
        "norms are Transformer Engine's or this program's own, which do not read it": "persist_layer_norm"
        " memory_efficient_layer_norm",
        "this program's timers never wait for other ranks": "barrier_with_L1_time",
        "Megatron asserts that Transformer Engine is there and pipeline stages and recomputation are not;"
        " actor.recompute saves the same memory": "cpu_offloading cpu_offloading_num_layers cpu_offloading_activations"
        " cpu_offloading_weights cpu_offloading_double_buffering cpu_offloading_retain_pinned_cpu_buffers",
        _OFFLOADS: "fine_grained_activation_offloading offload_modules min_offloaded_tensor_size"
        " fine_grained_offloading_max_inflight_offloads delta_offload_bytes_across_pp_ranks"
        " activation_offload_fraction",
        _IGNORED: "moe_extended_tp async_tensor_model_parallel_allreduce fp8_interval moe_token_dropping"
        " moe_per_layer_logging",
        _NOT_IN_SPEC: "use_kitchen use_kitchen_attention kitchen_attention_backend use_te_activation_func"
        " moe_use_legacy_grouped_gemm use_grouped_gemm_for_dense_mlp",
        _FP8: "fp8_dot_product_attention fp8_multi_head_attention",
        "actor.fp8 has no custom recipe": "fp8_quantizer_factory",
        _FP4: "fp4 fp4_recipe fp4_param fp4_quantizer_factory fp4_param_gather",
        _AUX: "moe_router_load_balancing_type moe_aux_loss_coeff moe_z_loss_coeff",
        _DROPS: "moe_expert_capacity_factor moe_pad_expert_input_to_capacity moe_token_drop_policy"
        " moe_expert_rank_capacity_factor",
        "the bias is neither loaded nor streamed to servers": "moe_router_enable_expert_bias"
        " moe_router_bias_update_rate moe_router_quantile_balancing_ema",
        _ROUTING: "moe_router_topk_limited_devices moe_router_num_groups moe_router_group_topk"
        " moe_router_topk_scaling_factor moe_router_force_load_balancing moe_router_force_biased moe_input_jitter_eps",
        "nobody records routes while generating, so there is nothing to replay": "moe_enable_routing_replay",
        "it is another name of moe_router_padding_for_quantization": "moe_router_padding_for_fp8",
        _FSDP: "use_megatron_fsdp use_custom_fsdp data_parallel_sharding_strategy gradient_reduce_div_fusion"
        " suggested_communication_unit_size preserve_fp32_weights keep_fp8_transpose_cache fsdp_double_buffer"
        " outer_dp_sharding_strategy fsdp_manual_registration fsdp_db_use_persist_buf_on_alloc_fail"
        " fsdp_all_gather_in_start_param_sync megatron_fsdp_main_params_dtype megatron_fsdp_main_grads_dtype"
        " megatron_fsdp_grad_comm_dtype megatron_fsdp_use_decoupled_grad megatron_fsdp_cuda_graph_mode"
        " megatron_fsdp_enable_fine_grained_param_gather megatron_fsdp_max_pool_double_buffer"
        " init_model_with_meta_device",
        "a function that Megatron's training program passes would have to start gathers": "align_param_gather",
        "actor.fp8_param is not offered": "reuse_grad_buf_for_mxfp8_param_ag",
    }
)
"""Why any other than the default value would be without effect, or wrong."""

HARMLESS = {"moe_z_loss_coeff": 0, "moe_router_bias_update_rate": 0}
"""Values of refused fields, beside the default, that switch off what is refused; recipes of others spell them out."""

ELSEWHERE = {
    "accumulate_allreduce_grads_in_fp32": "it is actor.ddp.grad_reduce_in_fp32, which is on with bfloat16",
    "freeze_moe_router": "it is NeMo RL's own; routers are trained here",
    "rotary_base": "it is rope_theta of the model's config.json",
    "use_flash_attn": "attention_backend: flash is what it became",
}
"""What other programs' recipes call by these names, which none of Megatron's dataclasses has."""

RECIPES = {
    "fp8_margin": "delayed",
    "fp8_wgrad": "delayed",
    "tp_only_amax_red": "tensorwise, delayed, blockwise or mxfp8",
}
"""Without effect under any other `actor.fp8`."""

_TESTED = (
    "num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage account_for_embedding_in_pipeline_split"
    " account_for_loss_in_pipeline_split pipeline_model_parallel_layout bias_activation_fusion batch_p2p_comm"
    " deallocate_pipeline_outputs overlap_p2p_comm overlap_p2p_comm_warmup_flush microbatch_group_size_per_vp_stage"
    " clone_scatter_output_in_embedding perform_initialization moe_router_dtype bucket_size average_in_collective"
    " overlap_grad_reduce overlap_param_gather pad_buckets_for_high_nccl_busbw check_for_nan_in_grad"
    " check_for_large_grads reduce_scatter_with_fp32_accumulation"
)
TESTED = frozenset(_TESTED.split())
"""A test here trains with each of them; all the others that are accepted are not tried."""
