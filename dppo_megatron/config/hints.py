"""Suggests what an unknown key was meant to be.

Most unknown keys are typing mistakes or another trainer's names. For the first a close name is suggested; for the
second a table gives our name. A wrong hint is worse than none, so where neither is clear the message only lists the
known keys.
"""

from __future__ import annotations

import difflib
from dataclasses import fields, is_dataclass
from typing import cast

from dppo_megatron.types import UserError

_FOREIGN = ("actor_rollout_ref", "algorithm", "trainer", "critic", "reward_model", "custom_reward_function", "ray_init")
"""Sections of verl: a name of ours that looks alike means something else."""

OTHER_NAMES = {
    # verl
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
    # TRL
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
    # slime
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
    "eps_clip": "objective.clip_low",
    "eps_clip_high": "objective.clip_high",
    "lr": "actor.optimizer.learning_rate",
    "actor.lr": "actor.optimizer.learning_rate",
    "actor.optim.lr": "actor.optimizer.learning_rate",
    "rollout.n": "rollout.completions_per_prompt",
    "adam_beta1": "actor.optimizer.adam_beta1",
    "adam_beta2": "actor.optimizer.adam_beta2",
    "apply_chat_template": "data.apply_chat_template",
    "dynamic_sampling_filter_path": "pruning.prompt.method=dynamic_sampling",
    "save_interval": "checkpoint.every_steps",
    "eval_interval": "eval.every_steps",
    "tensor_model_parallel_size": "actor.layout.tensor_parallel",
    "pipeline_model_parallel_size": "actor.layout.pipeline_parallel",
    "context_parallel_size": "actor.layout.context_parallel",
    "expert_model_parallel_size": "actor.layout.expert_parallel",
    # our own, before `rollout` had sections
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
"""Settings of verl (dotted), TRL and slime (plain names), and ours with the same meaning."""


def unknown_key(where: str, key: str, under: list[str], section: type, root: type) -> UserError:
    """The error for `key`, which is no setting.

    Args:
        under: what was given under it, each with its leading dot, or an empty text for the key itself.
        section: the class of the section that should have had it.
        root: the class of the whole configuration.
    """
    asked = [f"{key}{more}" for more in under] or [key]
    for name in asked:
        plain = name.lstrip("+~").removeprefix("--").replace("-", "_")
        if (ours := OTHER_NAMES.get(plain)) is not None:
            return UserError(f"{where}: unknown key '{name}'; here it is {ours}")
    parent, _, last = key.rpartition(".")
    names = [item.name for item in fields(section)]
    if section is not root and (close := difflib.get_close_matches(last, names, n=1, cutoff=0.75)):
        return UserError(f"{where}: unknown key '{key}'; did you mean '{parent}.{close[0]}'?")
    near = [] if key.split(".")[0] in _FOREIGN else _nearest(asked[0], all_keys(root))
    if near:
        return UserError(f"{where}: unknown key '{asked[0]}'; did you mean '" + "' or '".join(near) + "'?")
    inside = f"in {parent}" if parent else "here"
    return UserError(f"{where}: unknown key '{asked[0]}'; known {inside}: {', '.join(sorted(names))}")


def _nearest(key: str, known: list[str]) -> list[str]:
    """Known keys that `key` most likely stands for, at most two."""
    ending = [name for name in known if name.endswith(f".{key}")]
    if not ending and (last := key.rpartition(".")[2]) != key:
        ending = [name for name in known if name.endswith(f".{last}")]
    if ending:
        return ending if len(ending) <= 2 else []
    return difflib.get_close_matches(key, known, n=1, cutoff=0.8)


def all_keys(schema: type, prefix: str = "") -> list[str]:
    """Dotted keys of a section, sections included."""
    keys = []
    for item in fields(schema):
        keys.append(prefix + item.name)
        if is_dataclass(item.default_factory):
            keys += all_keys(cast(type, item.default_factory), f"{prefix}{item.name}.")
    return keys
