"""Settings of other trainers, by their names there: what an unknown key was meant to be, and the pages for migrating.

The keys were read in verl's ppo_megatron_trainer.yaml, TRL's GRPOConfig (1.16) and slime's arguments of 2026-08.
An entry begins with a setting of ours, or says `no setting` and why. docs/migrating.md shows the tables.
"""

from __future__ import annotations

import re

_ENTRY = re.compile(r"([^ ,=]+(?:=\[.*\]|=[^ ,]+)?),? ?(.*)")
"""A setting, perhaps with a value, and what else there is to say."""

VERL = {
    "actor_rollout_ref.model.path": "model.hf_path",
    "actor_rollout_ref.model.trust_remote_code": "no setting: code of a model directory never runs",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "actor.recompute=full",
    "actor_rollout_ref.actor.optim.lr": "actor.optimizer.learning_rate",
    "actor_rollout_ref.actor.optim.weight_decay": "actor.optimizer.weight_decay",
    "actor_rollout_ref.actor.optim.lr_warmup_steps": "actor.optimizer.lr_warmup_steps",
    "actor_rollout_ref.actor.grad_clip": "actor.optimizer.max_grad_norm",
    "actor_rollout_ref.actor.clip_ratio": "objective.clip_low and objective.clip_high",
    "actor_rollout_ref.actor.clip_ratio_low": "objective.clip_low",
    "actor_rollout_ref.actor.clip_ratio_high": "objective.clip_high",
    "actor_rollout_ref.actor.clip_ratio_c": "objective.dual_clip",
    "actor_rollout_ref.actor.entropy_coeff": "objective.entropy_coef",
    "actor_rollout_ref.actor.kl_loss_coef": "objective.kl.coef",
    "actor_rollout_ref.actor.kl_loss_type": "objective.kl.estimator (low_var_kl: k3)",
    "actor_rollout_ref.actor.use_kl_loss": "objective.kl.coef above 0",
    "actor_rollout_ref.actor.loss_agg_mode": "objective.normalization (token-mean: token_mean,"
    " seq-mean-token-mean: sequence_mean)",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "objective.updates_per_step = rollout.prompts_per_step /"
    " ppo_mini_batch_size",
    "actor_rollout_ref.actor.ppo_epochs": "no setting: a rollout is used once, in objective.updates_per_step updates",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "packing.max_tokens_per_microbatch",
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size": "actor.layout.tensor_parallel",
    "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size": "actor.layout.pipeline_parallel",
    "actor_rollout_ref.actor.megatron.context_parallel_size": "actor.layout.context_parallel",
    "actor_rollout_ref.actor.megatron.expert_model_parallel_size": "actor.layout.expert_parallel",
    "actor_rollout_ref.rollout.name": "rollout.engine",
    "actor_rollout_ref.rollout.n": "rollout.completions_per_prompt",
    "actor_rollout_ref.rollout.temperature": "rollout.sampling.temperature",
    "actor_rollout_ref.rollout.top_p": "rollout.sampling.top_p",
    "actor_rollout_ref.rollout.top_k": "rollout.sampling.top_k (0: all, where verl has -1)",
    "actor_rollout_ref.rollout.max_num_seqs": "rollout.limits.max_concurrent_sequences",
    "actor_rollout_ref.rollout.gpu_memory_utilization": 'rollout.servers.args=[--gpu-memory-utilization, "0.6"]',
    "actor_rollout_ref.rollout.tensor_model_parallel_size": 'rollout.servers.args=[--tensor-parallel-size, "2"]',
    "actor_rollout_ref.rollout.val_kwargs.n": "eval.samples",
    "actor_rollout_ref.rollout.val_kwargs.temperature": "eval.temperature",
    "actor_rollout_ref.rollout.val_kwargs.top_p": "eval.top_p",
    "algorithm.adv_estimator": "objective.advantage (grpo: group_std, rloo: rloo, reinforce_plus_plus_baseline:"
    " reinforce_baseline)",
    "algorithm.norm_adv_by_std_in_grpo": "objective.advantage (false: group_mean)",
    "algorithm.kl_ctrl.kl_coef": "objective.kl.coef",
    "algorithm.use_kl_in_reward": "no setting: KL is a term of the loss, objective.kl.coef",
    "algorithm.filter_groups.enable": "pruning.prompt.method=dynamic_sampling",
    "data.train_files": "data.train_path, or data.train_sets for several",
    "data.val_files": "data.eval_paths",
    "data.train_batch_size": "rollout.prompts_per_step",
    "data.gen_batch_size": "pruning.prompt.refill.prompts_per_round",
    "data.max_prompt_length": "data.max_prompt_tokens",
    "data.max_response_length": "rollout.sampling.max_completion_tokens",
    "data.prompt_key": "data.problem_field",
    "data.filter_overlong_prompts": "data.overlong=filter",
    "data.truncation": "data.overlong",
    "trainer.total_epochs": "steps (epochs x problems / rollout.prompts_per_step)",
    "trainer.total_training_steps": "steps",
    "trainer.save_freq": "checkpoint.every_steps",
    "trainer.test_freq": "eval.every_steps",
    "trainer.max_actor_ckpt_to_keep": "checkpoint.keep",
    "trainer.resume_mode": "checkpoint.resume",
    "trainer.default_local_dir": "run_dir",
    "trainer.n_gpus_per_node": "no setting: torchrun --nproc-per-node",
    "trainer.nnodes": "no setting: torchrun --nnodes",
    "custom_reward_function.path": "reward.function=module:function",
    "custom_reward_function.name": "reward.function=module:function",
    "actor_rollout_ref.actor.optim.lr_decay_style": "actor.optimizer.lr_schedule",
    "actor_rollout_ref.actor.optim.min_lr": "actor.optimizer.min_learning_rate",
    "actor_rollout_ref.actor.policy_loss.loss_mode": "objective.loss (vanilla: clip, gspo: gspo, cispo: cispo)",
    "actor_rollout_ref.actor.use_dynamic_bsz": "packing.mode=balanced, the default",
    "actor_rollout_ref.rollout.free_cache_engine": "rollout.servers.colocate",
    "algorithm.rollout_correction.rollout_is": "objective.correction.level (token, sequence)",
    "algorithm.rollout_correction.rollout_is_threshold": "objective.correction.max_ratio",
    "data.apply_chat_template_kwargs": "data.chat_template_kwargs",
    "data.shuffle": "no setting: the order of the problems is drawn from seed",
    "trainer.val_before_train": "no setting: every run is evaluated before its first step",
    "actor.lr": "actor.optimizer.learning_rate",
    "actor.optim.lr": "actor.optimizer.learning_rate",
    "rollout.n": "rollout.completions_per_prompt",
}
"""verl, dotted as in its YAML."""

TRL = {
    "num_generations": "rollout.completions_per_prompt",
    "max_completion_length": "rollout.sampling.max_completion_tokens",
    "max_prompt_length": "data.max_prompt_tokens",
    "max_steps": "steps",
    "num_train_epochs": "steps (epochs x problems / rollout.prompts_per_step)",
    "output_dir": "run_dir",
    "model_name_or_path": "model.hf_path",
    "dataset_name": "data.train_path",
    "learning_rate": "actor.optimizer.learning_rate",
    "weight_decay": "actor.optimizer.weight_decay",
    "max_grad_norm": "actor.optimizer.max_grad_norm",
    "beta": "objective.kl.coef",
    "epsilon": "objective.clip_low and objective.clip_high",
    "epsilon_high": "objective.clip_high",
    "loss_type": "objective.normalization (grpo: sequence_mean, dapo: token_mean, dr_grpo: constant)",
    "scale_rewards": "objective.advantage (false: group_mean)",
    "mask_truncated_completions": "objective.overlong.filter",
    "steps_per_generation": "objective.updates_per_step",
    "generation_batch_size": "rollout.prompts_per_step = generation_batch_size / num_generations",
    "use_vllm": "rollout.engine=vllm",
    "vllm_mode": "rollout.servers.launch and rollout.servers.colocate",
    "temperature": "rollout.sampling.temperature",
    "save_steps": "checkpoint.every_steps",
    "eval_steps": "eval.every_steps",
    "adam_beta1": "actor.optimizer.adam_beta1",
    "adam_beta2": "actor.optimizer.adam_beta2",
    "bf16": "model.dtype=bfloat16",
    "delta": "objective.dual_clip",
    "gradient_accumulation_steps": "no setting: it follows from packing.max_tokens_per_microbatch",
    "gradient_checkpointing": "actor.recompute=full",
    "importance_sampling_level": "objective.loss (sequence: gspo)",
    "lr_scheduler_type": "actor.optimizer.lr_schedule",
    "num_iterations": "no setting: a rollout is used once, in objective.updates_per_step updates",
    "per_device_train_batch_size": "packing.max_tokens_per_microbatch, a cap of tokens in place of a count",
    "resume_from_checkpoint": "checkpoint.resume",
    "reward_funcs": "reward.function, or reward.functions for several",
    "reward_weights": "reward.functions, a weight in each",
    "save_total_limit": "checkpoint.keep",
    "vllm_gpu_memory_utilization": 'rollout.servers.args=[--gpu-memory-utilization, "0.6"]',
    "vllm_importance_sampling_cap": "objective.correction.max_ratio",
    "vllm_importance_sampling_correction": "objective.correction.level=token",
    "vllm_server_base_url": "rollout.servers.endpoints",
    "vllm_tensor_parallel_size": 'rollout.servers.args=[--tensor-parallel-size, "2"]',
    "warmup_steps": "actor.optimizer.lr_warmup_steps",
}
"""TRL, with those of transformers' TrainingArguments."""

SLIME = {
    "hf_checkpoint": "model.hf_path",
    "prompt_data": "data.train_path",
    "eval_prompt_data": "data.eval_paths",
    "input_key": "data.problem_field",
    "label_key": "data.answer_field",
    "n_samples_per_prompt": "rollout.completions_per_prompt",
    "n_samples_per_eval_prompt": "eval.samples",
    "rollout_batch_size": "rollout.prompts_per_step",
    "global_batch_size": "objective.updates_per_step = rollout.prompts_per_step x completions_per_prompt /"
    " global_batch_size",
    "num_rollout": "steps",
    "num_steps_per_rollout": "objective.updates_per_step",
    "rollout_max_response_len": "rollout.sampling.max_completion_tokens",
    "rollout_max_prompt_len": "data.max_prompt_tokens",
    "rollout_temperature": "rollout.sampling.temperature",
    "max_tokens_per_gpu": "packing.max_tokens_per_microbatch",
    "rm_type": "reward.function",
    "advantage_estimator": "objective.advantage",
    "kl_loss_coef": "objective.kl.coef",
    "kl_loss_type": "objective.kl.estimator (low_var_kl: k3)",
    "entropy_coef": "objective.entropy_coef",
    "eps_clip": "objective.clip_low, and objective.clip_high where eps_clip_high is not given",
    "eps_clip_high": "objective.clip_high",
    "lr": "actor.optimizer.learning_rate",
    "apply_chat_template": "data.apply_chat_template",
    "dynamic_sampling_filter_path": "pruning.prompt.method=dynamic_sampling",
    "save_interval": "checkpoint.every_steps",
    "eval_interval": "eval.every_steps",
    "tensor_model_parallel_size": "actor.layout.tensor_parallel",
    "pipeline_model_parallel_size": "actor.layout.pipeline_parallel",
    "context_parallel_size": "actor.layout.context_parallel",
    "expert_model_parallel_size": "actor.layout.expert_parallel",
    "apply_chat_template_kwargs": "data.chat_template_kwargs",
    "clip_grad": "actor.optimizer.max_grad_norm",
    "custom_loss_function_path": "objective.function=module:function",
    "custom_rm_path": "reward.function=module:function",
    "disable_grpo_std_normalization": "objective.advantage=group_mean",
    "eps_clip_c": "objective.dual_clip",
    "over_sampling_batch_size": "pruning.prompt.refill.prompts_per_round",
    "ref_load": "no setting: the reference is the policy at the start of RL (objective.kl.coef above 0)",
    "rollout_external_engine_addrs": "rollout.servers.endpoints",
    "rollout_num_gpus_per_engine": 'rollout.servers.args=[--tp-size, "2"]',
    "rollout_stop_token_ids": "rollout.sampling.stop_token_ids",
    "rollout_top_k": "rollout.sampling.top_k (0: all, where slime has -1)",
    "rollout_top_p": "rollout.sampling.top_p",
    "tis_clip": "objective.correction.max_ratio",
    "use_kl_loss": "objective.kl.coef above 0",
    "use_tis": "objective.correction.level=token",
    "use_unbiased_kl": "objective.kl.estimator=k3_unbiased",
}
"""slime's command line, with those of Megatron that it passes on; dashes are underscores here."""

BEFORE = {
    "rollout.local_servers": "rollout.servers.count",
    "rollout.server_python": "rollout.servers.python",
    "rollout.server_args": "rollout.servers.args",
    "rollout.server_gpus": "rollout.servers.gpus",
    "rollout.sync_channel": "rollout.sync.channel",
    "rollout.sync_dir": "rollout.sync.dir",
    "rollout.sync_bucket_mb": "rollout.sync.bucket_mb",
    "rollout.verify_every_syncs": "rollout.sync.verify_every",
    "rollout.rollout_timeout_s": "rollout.limits.request_timeout_s",
    "rollout.temperature": "rollout.sampling.temperature",
    "rollout.top_p": "rollout.sampling.top_p",
    "rollout.top_k": "rollout.sampling.top_k",
}
"""Our own, before `rollout` had sections."""

OTHER_NAMES = {**VERL, **TRL, **SLIME, **BEFORE}
"""All of them; where two trainers share a name, it means the same here."""


def table(names: dict[str, str]) -> str:
    """A table of a page: their key, ours, and what else to know."""
    rows = ["| there | here | |", "|---|---|---|"]
    for name, ours in sorted(names.items()):
        if ours.startswith("no setting: "):
            rows.append(f"| `{name}` | none | {ours.removeprefix('no setting: ')} |")
            continue
        key, rest = _key_and_rest(ours)
        rows.append(f"| `{name}` | `{key}` | {rest} |")
    return "\n".join(rows)


def _key_and_rest(ours: str) -> tuple[str, str]:
    """Example: `objective.loss (gspo)` -> `objective.loss`, `gspo`; `data.overlong=filter` stays whole."""
    match = _ENTRY.fullmatch(ours)
    assert match is not None, ours
    key, rest = match.groups()
    return key, rest[1:-1] if rest.startswith("(") and rest.endswith(")") else rest
