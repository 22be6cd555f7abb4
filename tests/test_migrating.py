"""What an unknown key is answered with: usual ones of other trainers, what is not here, our own mistyped."""

from __future__ import annotations

import re

import pytest
from support.job import REPOSITORY

from dppo_megatron.config.load import read_config
from dppo_megatron.config.other_names import other_name, other_names
from dppo_megatron.config.reference import all_keys
from dppo_megatron.pruning.policies import prompt_policy_class
from dppo_megatron.types import UserError
from examples.migrating import translate  # whole files: test_migrating_jobs.py

USUAL = {
    "verl": """
actor_rollout_ref.actor.ppo_mini_batch_size actor_rollout_ref.rollout.name data.train_files
data.max_response_length trainer.project_name actor_rollout_ref.model.path actor_rollout_ref.actor.optim.lr
trainer.experiment_name trainer.logger data.max_prompt_length data.train_batch_size data.val_files
algorithm.adv_estimator data.truncation actor_rollout_ref.rollout.tensor_model_parallel_size
trainer.n_gpus_per_node trainer.save_freq actor_rollout_ref.actor.use_kl_loss trainer.nnodes
actor_rollout_ref.rollout.gpu_memory_utilization trainer.test_freq trainer.total_epochs
algorithm.use_kl_in_reward data.filter_overlong_prompts trainer.critic_warmup
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu actor_rollout_ref.rollout.n
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu actor_rollout_ref.actor.kl_loss_coef
actor_rollout_ref.model.use_remove_padding actor_rollout_ref.model.enable_gradient_checkpointing
actor_rollout_ref.actor.fsdp_config.param_offload actor_rollout_ref.actor.fsdp_config.optimizer_offload
actor_rollout_ref.actor.entropy_coeff actor_rollout_ref.actor.kl_loss_type
actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu actor_rollout_ref.ref.fsdp_config.param_offload
trainer.val_before_train actor_rollout_ref.actor.use_dynamic_bsz
actor_rollout_ref.rollout.enable_chunked_prefill actor_rollout_ref.actor.ppo_max_token_len_per_gpu
actor_rollout_ref.actor.megatron.tensor_model_parallel_size
actor_rollout_ref.actor.megatron.pipeline_model_parallel_size algorithm.kl_ctrl.kl_coef critic.optim.lr
critic.model.path actor_rollout_ref.rollout.max_num_batched_tokens
actor_rollout_ref.ref.megatron.tensor_model_parallel_size
actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu
actor_rollout_ref.ref.megatron.pipeline_model_parallel_size actor_rollout_ref.rollout.log_prob_use_dynamic_bsz
data.return_raw_chat critic.ppo_micro_batch_size_per_gpu actor_rollout_ref.ref.log_prob_use_dynamic_bsz
critic.model.use_remove_padding actor_rollout_ref.ref.log_prob_max_token_len_per_gpu
actor_rollout_ref.actor.ulysses_sequence_parallel_size critic.model.enable_gradient_checkpointing
critic.model.fsdp_config.optimizer_offload critic.model.fsdp_config.param_offload
actor_rollout_ref.actor.megatron.param_offload actor_rollout_ref.actor.megatron.grad_offload
actor_rollout_ref.actor.megatron.optimizer_offload actor_rollout_ref.rollout.enforce_eager
actor_rollout_ref.ref.megatron.param_offload trainer.default_local_dir
actor_rollout_ref.actor.megatron.use_mbridge actor_rollout_ref.rollout.free_cache_engine data.shuffle
actor_rollout_ref.rollout.mode actor_rollout_ref.actor.clip_ratio_low actor_rollout_ref.actor.clip_ratio_high
actor_rollout_ref.rollout.val_kwargs.n actor_rollout_ref.rollout.val_kwargs.top_p
actor_rollout_ref.rollout.val_kwargs.temperature trainer.resume_mode
actor_rollout_ref.actor.megatron.expert_tensor_parallel_size
actor_rollout_ref.actor.megatron.expert_model_parallel_size actor_rollout_ref.rollout.top_p
actor_rollout_ref.rollout.top_k trainer.total_training_steps actor_rollout_ref.rollout.temperature
data.prompt_key actor_rollout_ref.model.use_fused_kernels actor_rollout_ref.actor.use_torch_compile
actor_rollout_ref.rollout.engine_kwargs.vllm.disable_mm_preprocessor_cache
actor_rollout_ref.rollout.val_kwargs.do_sample actor_rollout_ref.rollout.val_kwargs.top_k
reward_model.reward_manager trainer.log_val_generations
actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity
actor_rollout_ref.actor.megatron.override_transformer_config.recompute_num_layers
actor_rollout_ref.actor.megatron.override_transformer_config.recompute_method
actor_rollout_ref.actor.policy_loss.loss_mode reward_model.reward_kwargs.max_resp_len
reward_model.reward_kwargs.overlong_buffer_cfg.len reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor
reward_model.reward_kwargs.overlong_buffer_cfg.log actor_rollout_ref.actor.loss_agg_mode
reward_model.reward_kwargs.overlong_buffer_cfg.enable actor_rollout_ref.actor.optim.weight_decay
actor_rollout_ref.actor.fsdp_config.fsdp_size actor_rollout_ref.ref.megatron.expert_tensor_parallel_size
actor_rollout_ref.ref.megatron.expert_model_parallel_size
actor_rollout_ref.actor.megatron.override_transformer_config.moe_router_dtype
actor_rollout_ref.actor.megatron.override_transformer_config.gradient_accumulation_fusion
actor_rollout_ref.actor.megatron.override_transformer_config.moe_permute_fusion
actor_rollout_ref.actor.megatron.context_parallel_size data.image_key actor_rollout_ref.rollout.load_format
reward_model.use_reward_loop reward_model.enable reward_model.model.path actor_rollout_ref.rollout.max_num_seqs
""",
    "TRL": """
learning_rate model_init_kwargs trust_remote_code router_aux_loss_coef disable_dropout cast_lm_head_to_fp32
remove_unused_columns num_generations num_generations_eval max_completion_length ds3_gather_for_generation
shuffle_dataset pad_to_multiple_of generation_batch_size steps_per_generation temperature top_p top_k min_p
generation_kwargs chat_template_kwargs repetition_penalty cache_implementation use_vllm vllm_mode
vllm_model_impl vllm_enable_sleep_mode vllm_structured_outputs_regex vllm_server_base_url vllm_server_host
vllm_server_port vllm_server_timeout vllm_group_port vllm_gpu_memory_utilization vllm_max_model_length
vllm_tensor_parallel_size beta num_iterations epsilon delta epsilon_high sapo_temperature_neg
sapo_temperature_pos vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg importance_sampling_level
reward_weights multi_objective_aggregation scale_rewards loss_type mask_truncated_completions sync_ref_model
ref_model_mixup_alpha ref_model_sync_steps top_entropy_quantile entropy_coef use_adaptive_entropy
entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target max_tool_calling_iterations
vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_importance_sampling_clip_max
vllm_importance_sampling_clip_min off_policy_mask_threshold use_bias_correction_kl log_completions
log_multimodal num_completions_to_print log_unique_prompts log_completions_hub_repo
use_transformers_continuous_batching transformers_continuous_batching_config use_transformers_paged
vllm_importance_sampling_cap output_dir per_device_train_batch_size per_device_eval_batch_size
gradient_accumulation_steps num_train_epochs max_steps lr_scheduler_type lr_scheduler_kwargs warmup_steps
warmup_ratio optim weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm bf16 fp16 tf32
gradient_checkpointing gradient_checkpointing_kwargs torch_compile use_liger_kernel logging_strategy
logging_steps logging_first_step report_to run_name project eval_strategy eval_steps eval_on_start save_strategy
save_steps save_total_limit save_only_model push_to_hub hub_model_id load_best_model_at_end
metric_for_best_model resume_from_checkpoint seed data_seed dataloader_num_workers ddp_timeout fsdp deepspeed
disable_tqdm model_name_or_path dtype attn_implementation use_peft lora_r lora_alpha lora_dropout
lora_target_modules load_in_4bit load_in_8bit dataset_name dataset_config dataset_train_split dataset_test_split
reward_funcs reward_model_name_or_path
""",
    "slime": """
attention-softmax-in-fp32 pipeline-model-parallel-size input-key actor-num-gpus-per-node lr-decay-style
actor-num-nodes expert-model-parallel-size hf-checkpoint tensor-model-parallel-size expert-tensor-parallel-size
prompt-data rollout-batch-size optimizer context-parallel-size lr max-tokens-per-gpu weight-decay ref-load
attention-dropout accumulate-allreduce-grads-in-fp32 use-dynamic-batch-size adam-beta1 adam-beta2
sequence-parallel hidden-dropout rollout-shuffle attention-backend n-samples-per-prompt recompute-granularity
recompute-method rollout-num-gpus-per-engine rollout-max-response-len kl-loss-coef recompute-num-layers
advantage-estimator kl-loss-type num-rollout rollout-temperature rotary-base sglang-mem-fraction-static
entropy-coef label-key apply-chat-template save-interval save vocab-size ffn-hidden-size eps-clip
num-attention-heads normalization disable-bias-linear hidden-size global-batch-size num-layers swiglu rm-type
eps-clip-high colocate use-kl-loss balance-data norm-epsilon load group-query-attention num-query-groups
n-samples-per-eval-prompt eval-max-response-len kv-channels eval-prompt-data eval-interval
untie-embeddings-and-output-weights eval-top-p optimizer-cpu-offload qk-layernorm overlap-cpu-optimizer-d2h-h2d
use-precision-aware-optimizer moe-token-dispatcher-type position-embedding-type use-rotary-position-embeddings
moe-router-topk moe-ffn-hidden-size num-experts moe-grouped-gemm moe-permute-fusion moe-router-score-function
rotary-percent moe-router-dtype moe-aux-loss-coeff moe-layer-freq sglang-ep-size
moe-shared-expert-intermediate-size spec moe-enable-deepep sglang-cuda-graph-bs decoder-last-pipeline-num-layers
rollout-num-gpus sglang-enable-dp-attention sglang-dp-size num-steps-per-rollout moe-router-enable-expert-bias
moe-router-load-balancing-type moe-router-pre-softmax add-qkv-bias kl-coef sglang-enable-dp-lm-head
sglang-speculative-algorithm sglang-speculative-eagle-topk sglang-speculative-num-steps
sglang-speculative-num-draft-tokens dynamic-sampling-filter-path moe-router-bias-update-rate
sglang-moe-dense-tp-size use-tis over-sampling-batch-size no-rope-fusion moe-router-topk-scaling-factor
""",
    "OpenRLHF": """
ref_num_nodes ref_num_gpus_per_node reward_num_nodes reward_num_gpus_per_node colocate_actor_ref actor_num_nodes
actor_num_gpus_per_node critic_num_nodes critic_num_gpus_per_node colocate_critic_reward colocate_all_models
vllm_num_engines vllm_tensor_parallel_size vllm_sync_backend vllm_sync_with_ray enable_prefix_caching enforce_eager
vllm_enable_sleep vllm_gpu_memory_utilization enable_vllm_is_correction vllm_is_truncated_threshold async_train
async_queue_size eval_steps save_steps logging_steps ckpt_path save_hf_ckpt disable_ds_ckpt max_ckpt_num max_ckpt_mem
load_checkpoint use_ds_universal_ckpt local_rank zero_stage gradient_checkpointing deepcompile bf16 enable_ema
ema_beta zpg adam_offload actor_init_on_gpu attn_implementation use_liger_kernel grad_accum_dtype overlap_comm
gradient_checkpointing_use_reentrant disable_fast_tokenizer deepspeed_enable_sleep ds_tensor_parallel_size
packing_samples use_dynamic_batch rollout_max_tokens_per_gpu train_max_tokens_per_gpu load_in_4bit lora_rank
lora_alpha target_modules lora_dropout save_path num_episodes rollout_batch_size vllm_generate_batch_size
rollout_tasks_per_gpu micro_rollout_batch_size max_epochs prompt_max_len generate_max_len max_len max_samples max_norm
l2 ptx_coef eps_clip eps_clip_low_high dual_clip value_clip lambd gamma micro_train_batch_size train_batch_size
normalize_reward top_p temperature seed full_determinism freezing_actor_steps n_samples_per_prompt save_value_network
actor_learning_rate critic_learning_rate lr_warmup_ratio lr_scheduler kl_target kl_horizon init_kl_coef
policy_loss_type kl_estimator aux_loss_coef entropy_loss_coef adam_betas reward_clip_range advantage_estimator
use_kl_loss no_advantage_std_norm overlong_buffer_len overlong_penalty_factor ring_attn_size ring_head_stride pretrain
reward_pretrain remote_rm_url critic_pretrain value_head_prefix ref_reward_offload agent_func_path prompt_data
prompt_data_probs prompt_split eval_dataset eval_split eval_temperature eval_n_samples_per_prompt input_key label_key
input_template apply_chat_template use_wandb wandb_org wandb_group wandb_project wandb_run_name dynamic_filtering
dynamic_filtering_reward_range use_tensorboard perf use_ms
""",
}
"""Keys that ten or more of verl's run scripts, or eight of slime's, set; the fields of TRL's GRPOConfig and the usual
ones of transformers' TrainingArguments; the arguments of OpenRLHF's train_ppo_ray. 2026."""
NAMES, KEYS = other_names(), all_keys()


@pytest.mark.parametrize("trainer", USUAL)
def test_usual_keys_are_answered(trainer: str) -> None:
    """Each by a sentence of its own, which for two in three names a setting that exists or a reason."""
    keys = USUAL[trainer].split()
    unanswered = [key for key in keys if not other_name(key) and key not in KEYS]
    assert len(keys) > 70 and len(unanswered) < 0.05 * len(keys), unanswered
    assert len({other_name(key) for key in keys}) > 40


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("actor_rollout_ref.model.lora_rank", "here it is actor.lora.rank"),
        ("use_peft", "here it is actor.lora.rank"),
        ("model.lora.rank", "here it is actor.lora.rank"),
        ("lora_alpha", "here it is actor.lora.alpha"),
        ("lora_target_modules", "here it is actor.lora.targets"),
        ("lora_dropout", "not supported: adapters of other kinds"),
        ("load_in_4bit", "not supported: training of quantized"),
        ("critic.optim.lr", "not supported: a critic"),
        ("algorithm.gamma", "not supported: a critic"),
        ("reward_model.model.path", "not supported: a reward model"),
        ("reward_model_name_or_path", "not supported: a reward model"),
        ("actor_rollout_ref.rollout.multi_turn.enable", "not supported: several turns"),
        ("max_tool_calling_iterations", "not supported: several turns"),
        ("dpo.beta", "not supported: DPO"),
        ("data.image_key", "not supported: images"),
        ("multimodal_keys", "not supported: images"),
        ("repetition_penalty", "not supported: samplers"),
        ("push_to_hub", "not supported: uploading"),
        ("load_best_model_at_end", "not supported: a choice of the best"),
        ("partial_rollout", "here it is rollout.sync.in_flight=continue"),
        ("trainer.logger", "here it is observe.trackers"),
        ("report_to", "here it is observe.trackers"),
        ("--use-wandb", "here it is observe.trackers"),
        ("trainer.project_name", "here it is observe.tracking.project"),
        ("run_name", "here it is observe.tracking.name"),
        ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", "here it is packing.max_tokens_per_microbatch"),
        ("actor_rollout_ref.model.use_remove_padding", "no setting here: sequences are always packed"),
        ("actor_rollout_ref.actor.fsdp_config.param_offload", "here it is actor.offload"),
        ("deepspeed", "here it is actor.layout"),
        ("logging_steps", "no setting here: every step is logged"),
        ("val_only", "no setting here: every run is evaluated"),
        ("actor_rollout_ref.rollout.enforce_eager", "here it is rollout.servers.args"),
        ("--sglang-mem-fraction-static", "here it is rollout.servers.args"),
        ("--num-layers", "no setting here: it is read from the model's directory"),
        ("--kv-lora-rank", "no setting here: it is read from the model's directory"),
        ("--attention-output-gate", "not supported: models of this family"),
        ("--moe-token-dispatcher-type", "here it is actor.megatron"),
        (
            "+actor_rollout_ref.actor.megatron.override_transformer_config.moe_permute_fusion",
            "here it is actor.megatron",
        ),
        ("+reward_model.reward_kwargs.overlong_buffer_cfg.len", "here it is objective.overlong.buffer_tokens"),
        ("use_lora", "here it is actor.lora.rank"),
        ("lora_target_preset", "here it is actor.lora.targets"),
        ("+reward_model.overlong_buffer.enable", "here it is objective.overlong"),
        ("actor_rollout_ref.actor.megatron.vanilla_mbridge", "here it is model.provider"),
        ("--megatron-to-hf-mode", "here it is model.provider"),
        ("actor_rollout_ref.model.use_shm", "no setting here: models and data are read where they lie"),
        ("sync_ref_model", "not supported: a reference that moves"),
        ("top_entropy_quantile", "not supported: this term of the loss: objective.function"),
        ("batch_size", "here it is rollout.prompts_per_step"),
        ("warm_start.steps", "here it is sft"),
        ("rollout.limits.straggler_share", "no setting here: ending the last completions favours short ones; rollout."),
        ("data.eval_sets.aime24.grader", "here it is reward.function (in the set's own entry)"),
        ("data.shuffle", "here it is data.order"),
        ("clip_ratio_high", "here it is objective.clip_high"),
        ("actor_rollout_ref.rollout.response_length", "here it is rollout.sampling.max_completion_tokens"),
        ("steps_per_generation", "here it is objective.updates_per_step (= steps_per_generation / gradient_acc"),
        ("algorithm.kl_ctrl.kl_coef", "no setting here: there is no KL in the reward"),
        ("pruning.prompt.p_min", "here it is pruning.prompt.min_inclusion_prob"),
        ("actor_rollout_ref.rollout.over_sample_rate", "no setting here: ending the last completions favours short"),
        (
            "actor_rollout_ref.actor.optim.lr_warmup_steps",
            "here it is actor.optimizer.lr_warmup_steps (verl's counts training steps: x objective.updates_per_step)",
        ),
        ("warmup_steps", "here it is actor.optimizer.lr_warmup_steps (a count of updates"),
        ("max_steps", "here it is steps (TRL's counts updates: / objective.updates_per_step)"),
        (
            "actor_rollout_ref.actor.optim.min_lr_ratio",
            "here it is actor.optimizer.min_learning_rate (= min_lr_ratio x actor.optimizer.learning_rate)",
        ),
        (
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
            "here it is packing.max_tokens_per_microbatch (of the whole pack: x actor.layout.context_parallel)",
        ),
        (
            "--max-tokens-per-gpu",
            "here it is packing.max_tokens_per_microbatch (of the whole pack: x actor.layout.context_parallel)",
        ),
        ("--micro_train_batch_size", "here it is packing.max_tokens_per_microbatch (a cap of tokens"),
        ("--train_batch_size", "here it is rollout.prompts_per_step (verl's; OpenRLHF's is completions of an update"),
        ("--num_episodes", "here it is steps (epochs x problems"),
        ("--vllm_is_truncated_threshold", "here it is objective.correction.max_ratio (of two numbers the second"),
        ("--init_kl_coef", "here it is objective.kl.coef (where use_kl_loss is on"),
        ("checkpointing.enabled", "no setting here: checkpoint.every_steps and checkpoint.keep"),
        ("checkpointing.keep_top_k", "here it is checkpoint.keep (the newest, where NeMo-RL keeps the best)"),
        ("cluster.gpus_per_node", "no setting here: torchrun --nnodes, --nproc-per-node"),
        ("env.math.num_workers", "here it is reward.function (a function of yours"),
        ("logger.gpu_monitoring.flush_interval", "no setting here: every step is logged"),
        ("logger.wandb.project", "here it is observe.tracking.project"),
        ("loss_fn.ratio_clip_max", "here it is objective.clip_high"),
        ("policy.generation.max_new_tokens", "here it is rollout.sampling.max_completion_tokens"),
        ("policy.dtensor_cfg.cpu_offload", "no setting here: NeMo-RL's own"),
        ("data.prompt_file", "here it is data.prompt_template (the text itself"),
        ("reward.custom_reward_function.name", "here it is reward.function=module:function"),
        ("reward.reward_manager.name", "here it is reward.function (a function of yours"),
        ("reward.num_workers", "here it is reward.processes"),
        ("reward.reward_model.enable", "not supported: a reward model"),
        ("reward.reward_model.rollout.temperature", "not supported: a reward model"),
        ("actor_rollout_ref.actor.optim.exp_avg_dtype", "here it is actor.optimizer.moments_dtype (float32,"),
        ("actor_rollout_ref.actor.megatron.override_ddp_config.bucket_size", "here it is actor.ddp (by Megatron's"),
        (
            "actor_rollout_ref.actor.megatron.override_ddp_config.overlap_grad_reduce",
            "here it is actor.overlap_grad_reduce",
        ),
        (
            "policy.megatron_cfg.distributed_data_parallel_config.overlap_param_gather",
            "here it is actor.overlap_param_gather",
        ),
        (
            "actor_rollout_ref.ref.megatron.override_mcore_model_config",
            "no setting here: the reference has the actor's",
        ),
        ("actor_rollout_ref.ref.entropy_from_logits_chunk_size", "no setting here: the reference has the actor's"),
        ("actor_rollout_ref.rollout.stop_token_ids", "here it is rollout.sampling.stop_token_ids"),
        ("trainer.v1.separate_async.parameter_sync_step", "here it is rollout.async_steps (0 to 8"),
        ("actor_rollout_ref.rollout.calculate_log_probs", "no setting here: engines always send log-probabilities"),
        ("actor_rollout_ref.actor.use_rollout_log_probs", "here it is objective.old_logprobs (behaviour)"),
        ("vllm_importance_sampling_correction", "here it is objective.correction.level (TRL's default, sequence_mask,"),
        ("vllm_importance_sampling_clip_max", "here it is objective.correction.max_ratio"),
        ("actor_rollout_ref.rollout.ignore_eos", "not supported: samplers beyond temperature"),
        ("actor_rollout_ref.rollout.router_config_path", "here it is rollout.servers.args"),
        ("--update-weight-buffer-size", "here it is rollout.sync.bucket_mb (in MiB"),
        ("--optimizer-cpu-offload", "here it is actor.optimizer.cpu_offload (1 or 0"),
    ],
)
def test_what_others_have_has_an_answer(key: str, said: str) -> None:
    with pytest.raises(UserError) as error:
        read_config("", [f"{key}=1"])
    message = str(error.value)
    assert f"; {said}" in message and ("(docs/scope.md)" in message) == said.startswith("not supported")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("objective.loss=grpo", "; here it is objective.loss=clip"),
        ("objective.loss=vanilla", "; here it is objective.loss=clip"),
        ("objective.loss=mine:my_loss", "; here it is objective.function"),
        ("objective.advantage=mine:f", "; here it is objective.token_values (a number for each token)"),
        ("objective.loss=dppo_tv", "; here it is objective.loss=divergence_tv"),
        ("objective.loss=sapo", "; here it is objective.function (soft_gate of examples/custom_loss.py)"),
        ("objective.loss=gpg", "; not supported: this loss: objective.function takes one of your own (docs/scope.md)"),
        (
            "objective.normalization=bnpo",
            "; not supported: this loss: objective.function takes one of your own (docs/scope.md)",
        ),
        (
            "objective.kl.estimator=k3+",
            "; here it is objective.kl.estimator=k2 (verl's + keeps the value and takes k2's gradient; off-policy"
            " k3_unbiased)",
        ),
        ("objective.normalization=seq-mean-token-mean", "; here it is objective.normalization=sequence_mean"),
        ("objective.normalization=token-mean", "; did you mean 'token_mean'?"),
        ("objective.normalization=seq-mean-token-sum-norm", "; here it is objective.normalization=constant"),
        ("objective.advantage=gspo", "; here it is objective.advantage=group_std (with objective.loss=gspo)"),
        ("objective.advantage=group_norm", "; here it is objective.advantage=group_std"),
        (
            "objective.advantage=gae",
            "; not supported: a critic or value network: an advantage compares a prompt's completions (docs/scope.md)",
        ),
        (
            "objective.correction.level=sequence_mask",
            "; here it is objective.correction.level=sequence (with objective.correction.mode=mask)",
        ),
        ("rollout.engine=trtllm", "; not supported: TensorRT-LLM: engines are vllm, sglang and hf (docs/scope.md)"),
        ("model.dtype=bf16", "; here it is model.dtype=bfloat16"),
        (
            "data.train_sets.a.overlong=truncate",
            "; not supported: prompts that are cut: data.overlong=filter leaves them out (docs/scope.md)",
        ),
        ("objective.loss=cipso", "; did you mean 'cispo'?"),
        ("objective.loss=gpso", "; did you mean 'gspo'?"),
        ("objective.loss=cilp", "; did you mean 'clip'?"),
        ("objective.loss=gmpo", ": must be one of clip, gspo, cispo, divergence_tv"),
        ("objective.loss=dapper", ": must be one of clip, gspo, cispo, divergence_tv"),
    ],
)
def test_a_choice_of_others_is_answered_with_ours(given: str, said: str) -> None:
    """Never with one that only looks like it: GRPO's loss is not GSPO's."""
    with pytest.raises(UserError) as error:
        read_config("", [given])
    message = str(error.value)
    assert message.endswith(said)


def test_a_method_of_others_is_answered_with_ours() -> None:
    """`check_choice` has the names of policies, and of whatever else is no Literal."""
    with pytest.raises(UserError, match=r"; here it is pruning\.prompt\.method=dynamic_sampling; known: none, "):
        prompt_policy_class("dapo")


def test_values_in_notes_are_answered_too() -> None:
    """`vanilla: clip` behind loss_mode is what objective.loss=vanilla is answered with."""
    tried = 0
    for said in set(NAMES.values()):
        key, _, note = said.removeprefix("here it is ").partition(" (")
        for theirs, ours in re.findall(r"([\w-]+): ([a-z_0-9]+)[,)]", note):
            word = theirs.replace("-", "_")
            if key in KEYS and key.startswith("objective.") and word not in (ours, "false", "sequence"):
                assert NAMES[f"{key}={word}"].startswith(f"here it is {key}={ours}"), (key, theirs)
                tried += 1
    assert tried > 10


@pytest.mark.parametrize(
    "given",
    [
        "--update-weight-buffer-size=536870912",
        "--optimizer-cpu-offload=true",
    ],
)
def test_a_value_that_means_something_else_here_is_not_carried_over(given: str) -> None:
    """Bytes are no MiB, and what is a switch there is a share here."""
    assert translate(given).startswith(f"# {given}: ")


def test_the_tables_are_read() -> None:
    """Every row that begins with a name; a name stands there once, and none is a setting of ours."""
    files = [REPOSITORY / "docs" / name for name in ("migrating.md", "other_names.txt")]
    text = "".join(one.read_text(encoding="utf-8") for one in files)
    rows = [line.partition(" | ")[0] for line in text.splitlines() if line.startswith("| `")]
    names = [name for row in rows for name in re.findall(r"`([^`]+)`", row)]
    assert sorted(names) == sorted(NAMES) and len(NAMES) > 700 and not NAMES.keys() & set(KEYS)


@pytest.mark.parametrize("said", sorted(set(NAMES.values())))
def test_every_answer_is_about_settings_that_exist(said: str) -> None:
    """Each dotted word of it is a key of the schema, and a value is one that the key takes."""
    for word in re.findall(r"(?<!/)\b(?:[a-z_]+\.)+[a-z_]+\b(?![/-])", said.replace("chat_template.jinja", "")):
        assert word in KEYS, word
    ours = said.removeprefix("here it is ")
    if given := re.match(r"([a-z_.]+)=(\[[^\]]*\]|[^ ,]+)", ours):
        read_config("", [given[0]])
    elif ours != said:
        assert re.split(r"[ ,]", ours)[0] in KEYS
    key, _, rest = ours.partition(" (")
    for choice in re.findall(r"[\w-]+: ([a-z_0-9]+)[,)]", rest):  # objective.loss (vanilla: clip, ...)
        if key.startswith(("objective.", "rollout.engine")):
            read_config("", [f"{key}={choice}"])


def test_a_mistyped_key_of_ours_is_not_taken_for_anothers() -> None:
    """One letter lost, doubled or exchanged with the next anywhere: what the tables say, if anything, is the key."""
    tried = 0
    for key in KEYS:
        for at in range(len(key)):
            before, two, after = key[:at], key[at : at + 2], key[at + 2 :]
            for mistyped in {before + two[1:] + after, before + two[0] + two + after, before + two[::-1] + after} - {
                *KEYS
            }:
                section, _, last = mistyped.rpartition(".")
                for asked in (mistyped, last) if section == key.rpartition(".")[0] else (mistyped,):
                    said = other_name(asked)
                    assert not said or key in said, (mistyped, said)
                tried += 1
    assert tried > 10_000


def test_half_a_name_of_ours_is_enough() -> None:
    """Its first or last words in its own section, unless others have them too, or all of it with dashes."""
    tried = 0
    for key in KEYS:
        section, _, last = key.rpartition(".")
        words, own = last.split("_"), [one.rpartition(".")[2] for one in KEYS if one.rpartition(".")[0] == section]
        halves = (
            {"_".join(part) for at in range(1, len(words)) for part in (words[:at], words[at:])} if section else set()
        )
        asked = [half for half in halves if sum(f"_{half}_" in f"_{one}_" for one in own) == 1]
        asked = [half for half in asked if not other_name(f"{section}.{half}")]  # sft.lr is the learning rate
        for name in (*asked, *{last.replace("_", "-")} - {last}):
            with pytest.raises(UserError, match=rf"did you mean '(.*' or ')?{re.escape(key)}'"):
                read_config("", [f"{section}.{name}=1".lstrip(".")])
            tried += 1
    assert tried > 300
