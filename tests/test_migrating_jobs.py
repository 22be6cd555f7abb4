"""Whole jobs of other trainers: current names and what they mean, switches that are off, YAML files and scripts."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from dppo_megatron.config.load import read_config
from dppo_megatron.config.other_names import other_name
from dppo_megatron.rewards.calling import Sample, calling_of
from dppo_megatron.types import UserError
from examples.migrating import read, translate, translated

CURRENT = """
policy.megatron_cfg.optimizer.lr actor.optimizer.learning_rate
policy.megatron_cfg.optimizer.min_lr actor.optimizer.min_learning_rate
policy.megatron_cfg.optimizer.weight_decay actor.optimizer.weight_decay
policy.megatron_cfg.optimizer.adam_beta1 actor.optimizer.adam_beta1
policy.megatron_cfg.scheduler.lr_warmup_iters actor.optimizer.lr_warmup_steps
policy.megatron_cfg.scheduler.lr_decay_style actor.optimizer.lr_schedule
policy.megatron_cfg.moe_permute_fusion actor.megatron
policy.megatron_cfg.recompute_modules actor.recompute_modules
policy.megatron_cfg.checkpoint.async_save checkpoint.async_save
policy.optimizer.kwargs.weight_decay actor.optimizer.weight_decay
policy.dtensor_cfg.tensor_parallel_size actor.layout.tensor_parallel
policy.dtensor_cfg.context_parallel_size actor.layout.context_parallel
policy.generation.vllm_cfg.gpu_memory_utilization rollout.servers.args=[--gpu-memory-utilization,
policy.generation.vllm_cfg.tensor_parallel_size rollout.servers.args=[--tensor-parallel-size,
policy.generation.vllm_cfg.kv_cache_dtype rollout.servers.args
policy.generation.vllm_cfg.precision rollout.quantization
policy.generation.val_temperature eval.temperature
policy.logprob_chunk_size actor.logprob_chunk_tokens
loss_fn.truncated_importance_sampling_ratio objective.correction.max_ratio
loss_fn.truncated_importance_sampling_ratio_min objective.correction.min_ratio
loss_fn.truncated_importance_sampling_type objective.correction.mode
loss_fn.use_on_policy_kl_approximation objective.kl.estimator=k3_unbiased
loss_fn.use_cispo objective.loss=cispo
grpo.overlong_filtering objective.overlong.filter
grpo.reward_shaping.overlong_buffer_length objective.overlong.buffer_tokens
grpo.reward_shaping.overlong_buffer_penalty objective.overlong.penalty
grpo.dynamic_sampling_max_gen_batches pruning.prompt.refill.max_rounds
grpo.async_grpo.max_trajectory_age_steps rollout.async_steps
grpo.val_num_generations_per_prompt eval.samples
logger.mlflow.experiment_name observe.tracking.project
data.train.dataset_name data.train_path
vllm.enable_sleep rollout.servers.colocate
vllm.num_engines rollout.servers.count
algo.advantage.is_correction_enable objective.correction.level=token
algo.advantage.estimator objective.advantage
algo.kl.init_coef objective.kl.coef
train.batch_size objective.updates_per_step
train.num_episodes steps
train.seed seed
rollout.batch_size rollout.prompts_per_step
rollout.n_samples_per_prompt rollout.completions_per_prompt
rollout.max_new_tokens rollout.sampling.max_completion_tokens
rollout.temperature rollout.sampling.temperature
actor.adam.betas actor.optimizer.adam_beta1
actor.adam.eps actor.optimizer.adam_eps
actor.eps_clip_low_high objective.clip_low
actor.max_norm actor.optimizer.max_grad_norm
actor.model_name_or_path model.hf_path
ds.ring_attn_size actor.layout.context_parallel
ds.zero_stage actor.layout
ckpt.max_num checkpoint.keep
ckpt.save_steps checkpoint.every_steps
data.prompt_dataset data.train_path
data.label_key data.answer_field
eval.n_samples_per_prompt eval.samples
reward.overlong_buffer_len objective.overlong.buffer_tokens
sglang_router_ip rollout.servers.endpoints
vllm_enable_sleep_mode rollout.servers.colocate
update_weight_disk_dir rollout.sync.dir
ref_model_path objective.kl.reference_path
check_weight_update_equal rollout.sync.verify_every
num_generations_eval eval.samples
custom_reward_function.reward_kwargs reward.function
keep_old_actor objective.old_logprobs=behaviour
grpo.reward_shaping.max_response_length none the buffer ends at
policy.dtensor_cfg.custom_parallel_plan none NeMo-RL's own
algorithm.kl_penalty none there is no KL in the reward
actor.muon.lr none AdamW
wandb_entity none trackers read their own environment variables: WANDB_ENTITY
wandb_team none trackers read their own environment variables: WANDB_ENTITY
logger.wandb.org none trackers read their own environment variables: WANDB_ENTITY
debug_rollout_only none rollouts alone: `dppo-megatron eval`
trainer.log_val_generations none texts of evaluations: `dppo-megatron eval RUN --follow`
trainer.validation_data_dir none texts of evaluations
load none a run begins from model.hf_path
model_revision none model.hf_path is a directory
remove_unused_columns none a grader gets the whole row
actor_rollout_ref.rollout.do_sample none training always samples
load_debug_rollout_data unsupported training on recorded rollouts
load_forge_rollout_data unsupported training on recorded rollouts
debug_train_only unsupported training on recorded rollouts
loss_mask_type unsupported several turns
ckpt.best_metric_key unsupported a choice of the best
reward.model_name_or_path unsupported a reward model
loss_fn.positive_example_nll_weight unsupported this term of the loss
"""
"""Names of 2026's NeMo-RL and OpenRLHF, and of others where an answer was once wrong; each read in their sources."""


@pytest.mark.parametrize("line", CURRENT.split("\n")[1:-1])
def test_a_current_name_has_its_own_answer(line: str) -> None:
    """Before a pattern that would have another."""
    name, ours, *more = line.split()
    begins = {"none": f"no setting here: {' '.join(more)}", "unsupported": f"not supported: {' '.join(more)}"}
    said = other_name(name)
    assert said.startswith(begins.get(ours, f"here it is {ours}"))
    assert ours in begins or said.removeprefix(f"here it is {ours}")[:2] in ("", " (", ' "'), said


def test_arguments_of_a_reward_function() -> None:
    """What the answer names is called as any grader."""
    assert "partial() of functools" in other_name("custom_reward_function.reward_kwargs.strict")

    def score(completion: str, answer: str, strict: bool) -> float:
        return float(completion == answer if strict else completion.strip() == answer)

    calling = calling_of(functools.partial(score, strict=True))
    assert calling.call(Sample(" 4", "4", {})) == 0.0 and calling.call(Sample("4", "4", {})) == 1.0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("use_tis=False", "off there: leave it out (on, it is objective.correction.level=token)"),
        ("actor_rollout_ref.model.enable_gradient_checkpointing=False", "off there: leave it out (on, it is actor.rec"),
        ("--calculate-per-token-loss=false", "off there: leave it out (on, it is objective.normalization=token_mean)"),
        ("disable_grpo_std_normalization=False", "off there: leave it out (on, it is objective.advantage=group_mean)"),
        ("reward_model.enable=False", "off there: leave it out (on, it is not supported: a reward model"),
        ("algorithm.filter_groups.enable=False", "here it is pruning.prompt.method (none keeps all prompts"),
        ("use_vllm=False", "here it is rollout.engine=hf"),
        ("bf16=false", "here it is model.dtype=float32"),
        ("algorithm.norm_adv_by_std_in_grpo=False", "here it is objective.advantage (false: group_mean)"),
        ("use_tis=True", "here it is objective.correction.level=token"),
    ],
)
def test_a_switch_that_is_off_is_not_answered_with_what_turns_it_on(given: str, said: str) -> None:
    with pytest.raises(UserError) as error:
        read_config("", [given])
    assert f"; {said}" in str(error.value)
    assert other_name(*given.split("=")).startswith(said)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ("data.val_files=x.parquet", "data.eval_paths.val=x.parquet"),
        ("trainer.resume_mode=disable", "checkpoint.resume=never"),
        ("trainer.resume_mode=resume_path", "# "),
        ("policy.generation.backend=sglang", "rollout.engine=sglang"),
        ("policy.generation.backend=megatron", "# "),
        ("kl_estimator=mse", "objective.kl.estimator=k2"),
        ("lr_scheduler_type=inverse_sqrt", "# "),
        ("lr_scheduler_type=constant_with_warmup", "# "),
        ("algorithm.filter_groups.enable=False", "# "),
        ("use_vllm=True", "rollout.engine=vllm"),
        ("trainer.save_freq=-1", "# "),
        ("trainer.total_training_steps=-1", "# "),
        ("clip_ratio_high=null", "# "),
        ("data.prompt_key=${key}", "# "),
        ('data.train_data_path=["a", "b"]', "# "),
        ("loss_fn.reference_policy_kl_type=k3", "# "),
        ("--seed=3", "seed=3"),
        ("+data.apply_chat_template_kwargs.enable_thinking=False", "data.chat_template_kwargs.enable_thinking=False"),
        ("no_such_thing=1", "# no_such_thing=1: not in the tables"),
    ],
)
def test_what_is_printed_without_a_comment_is_taken(given: str, line: str) -> None:
    said = translate(given)
    assert said.startswith(line) if line.startswith("# ") else said == line
    if not said.startswith("#"):
        read_config("", [said])


def test_a_file_is_answered_whole(tmp_path: Path) -> None:
    """What a section that is off holds is not set, and a second value is not taken without a word."""
    path = tmp_path / "job.yaml"
    path.write_text(
        "defaults: [base]\n"
        "grpo:\n  num_prompts_per_step: 32\n  reward_shaping: {enabled: false, overlong_buffer_length: 128}\n"
        "policy:\n  max_grad_norm: 1.0\n  optimizer: {kwargs: {lr: 5.0e-6, betas: [0.9, 0.999]}}\n"
        "  megatron_cfg: {enabled: true, optimizer: {lr: 1.0e-6, clip_grad: '${policy.max_grad_norm}'}}\n"
    )
    assert list(translated(read(str(path)))) == [
        "rollout.prompts_per_step=32",
        "# grpo.reward_shaping.enabled=false: objective.overlong.buffer_tokens (above 0; 0 is off)",
        "# grpo.reward_shaping.overlong_buffer_length=128: off there, with grpo.reward_shaping",
        "actor.optimizer.max_grad_norm=1.0",
        "actor.optimizer.learning_rate=5.0e-6",
        "# policy.optimizer.kwargs.betas=[0.9, 0.999]: actor.optimizer.adam_beta1 (and actor.optimizer.adam_beta2)",
        f"# policy.megatron_cfg.enabled=true: {other_name('policy.megatron_cfg.enabled')}",
        "# policy.megatron_cfg.optimizer.lr=1.0e-6: actor.optimizer.learning_rate, which is 5.0e-6 above",
        "# policy.megatron_cfg.optimizer.clip_grad=${policy.max_grad_norm}: actor.optimizer.max_grad_norm, with what"
        " the variable holds",
    ]


def test_a_script_is_answered_whole(tmp_path: Path) -> None:
    """Flags over several lines, dotted words, and variables that have one value."""
    path = tmp_path / "run.sh"
    path.write_text(
        "export NODES=1\nn=${N:-8}\nsize=512\nif [ $n = 4 ]; then\n    lr=1e-6\nelse\n    lr=2e-6\nfi\n"
        "OPTIMIZER_ARGS=(\n   --optimizer adam  # the usual\n   --weight-decay 0.1\n   --colocate\n)\n"
        "python3 -m main ${OPTIMIZER_ARGS[@]} \\\n    --actor.lr_scheduler cosine --eps_clip_low_high 0.2 0.28 \\\n"
        "    data.train_batch_size=${size} actor_rollout_ref.rollout.n=$n \\\n"
        "    actor_rollout_ref.actor.optim.lr=${lr} 'data.prompt_key=question' trainer.save_freq=20 $@\n"
    )
    assert list(translated(read(str(path)))) == [
        "# --optimizer=adam: no setting here: AdamW, actor.optimizer",
        "actor.optimizer.weight_decay=0.1",
        "rollout.servers.colocate=true",
        "actor.optimizer.lr_schedule=cosine",
        "# --eps_clip_low_high=0.2 0.28: objective.clip_low (and objective.clip_high)",
        "rollout.prompts_per_step=512",
        "rollout.completions_per_prompt=8",
        "# actor_rollout_ref.actor.optim.lr=${lr}: actor.optimizer.learning_rate, with what the variable holds",
        "data.problem_field=question",
        "checkpoint.every_steps=20",
    ]
