"""What the types of the schema cannot say: ranges, files, and settings that contradict each other.

All of it runs before a process group or a model is made, so a mistake costs seconds and not a queue slot.
"""

from __future__ import annotations

from pathlib import Path

from dppo_megatron.config.objective import check_objective
from dppo_megatron.config.pruning import check_pruning
from dppo_megatron.config.reward import check_reward
from dppo_megatron.config.rollout import check_rollout
from dppo_megatron.config.schema import Config
from dppo_megatron.types import UserError


def check_values(config: Config) -> None:
    """Raise `UserError` for the first value that is out of range or contradicts another one."""
    _check_ranges(config)
    _check_actor(config)
    _check_required(config)
    _check_files(config)
    check_rollout(config.rollout)
    check_pruning(config.pruning)
    check_reward(config.reward)
    _check_objective(config)


def check_world_size(config: Config, world_size: int) -> None:
    """Raise `UserError` unless `world_size` ranks can hold the layout."""
    layout = config.actor.layout
    tp, pp, cp = layout.tensor_parallel, layout.pipeline_parallel, layout.context_parallel
    etp, ep = layout.expert_tensor_parallel or tp, layout.expert_parallel
    attention, experts = tp * pp * cp, etp * ep * pp
    if world_size % attention:
        raise UserError(
            f"actor.layout: tensor_parallel={tp} x pipeline_parallel={pp} x context_parallel={cp} needs a multiple of"
            f" {attention} processes, but the world size is {world_size};"
            f" launch with torchrun --nproc-per-node {attention} -m dppo_megatron.train ..."
        )
    if world_size % experts:
        raise UserError(
            f"actor.layout: expert_tensor_parallel={etp} x expert_parallel={ep} x pipeline_parallel={pp} needs a"
            f" multiple of {experts} processes, but the world size is {world_size}"
        )


def check_run_dir(config: Config) -> None:
    """Raise `UserError` unless `run_dir` can be written without touching a run that this is not a continuation of."""
    if not config.run_dir:
        raise UserError("run_dir is not set; give it in the config file or as run_dir=...")
    used = Path(config.run_dir)
    if used.exists() and not used.is_dir():
        raise UserError(f"run_dir = '{config.run_dir}': exists and is not a directory")
    holds_a_run = (used / "metrics.jsonl").exists()
    if holds_a_run and (config.checkpoint.resume == "never" or not (used / "config.yaml").exists()):
        why = "checkpoint.resume = never" if config.checkpoint.resume == "never" else "it has no config.yaml"
        raise UserError(
            f"run_dir = '{config.run_dir}' already holds a run (metrics.jsonl), which is not resumed because {why};"
            " choose another run_dir=... or remove that directory"
        )


def _check_ranges(config: Config) -> None:
    at_least_one = {
        "rollout.prompts_per_step": config.rollout.prompts_per_step,
        "rollout.max_completion_tokens": config.rollout.max_completion_tokens,
        "rollout.max_concurrent_sequences": config.rollout.max_concurrent_sequences,
        "data.max_prompt_tokens": config.data.max_prompt_tokens,
        "packing.max_tokens_per_microbatch": config.packing.max_tokens_per_microbatch,
        "packing.window": config.packing.window,
        "actor.layout.tensor_parallel": config.actor.layout.tensor_parallel,
        "actor.layout.pipeline_parallel": config.actor.layout.pipeline_parallel,
        "actor.layout.virtual_pipeline": config.actor.layout.virtual_pipeline,
        "actor.layout.context_parallel": config.actor.layout.context_parallel,
        "actor.layout.expert_parallel": config.actor.layout.expert_parallel,
        "actor.logprob_chunk_tokens": config.actor.logprob_chunk_tokens,
        "warm_start.examples_per_step": config.warm_start.examples_per_step,
    }
    for key, count in at_least_one.items():
        if count < 1:
            raise UserError(f"{key} = {count}: must be at least 1")
    if config.rollout.completions_per_prompt < 2:
        raise UserError(
            f"rollout.completions_per_prompt = {config.rollout.completions_per_prompt}: a group-relative advantage"
            " needs at least 2"
        )
    optimizer = config.actor.optimizer
    at_least_zero: dict[str, float] = {
        "seed": config.seed,
        "steps": config.steps,
        "threads_per_rank": config.threads_per_rank,
        "warm_start.steps": config.warm_start.steps,
        "warm_start.lr_warmup_steps": config.warm_start.lr_warmup_steps,
        "eval.every_steps": config.eval.every_steps,
        "checkpoint.every_steps": config.checkpoint.every_steps,
        "checkpoint.keep": config.checkpoint.keep,
        "guard.max_skipped_updates": config.guard.max_skipped_updates,
        "guard.watchdog_s": config.guard.watchdog_s,
        "actor.layout.expert_tensor_parallel": config.actor.layout.expert_tensor_parallel,
        "actor.fp8_bf16_layers": config.actor.fp8_bf16_layers,
        "actor.optimizer.lr_warmup_steps": optimizer.lr_warmup_steps,
        "actor.optimizer.weight_decay": optimizer.weight_decay,
        "actor.optimizer.max_grad_norm": optimizer.max_grad_norm,
        "actor.optimizer.min_learning_rate": optimizer.min_learning_rate,
    }
    for key, value in at_least_zero.items():
        if not value >= 0:
            raise UserError(f"{key} = {value}: must not be negative")
    positive = {
        "rollout.temperature": config.rollout.temperature,
        "actor.optimizer.learning_rate": optimizer.learning_rate,
        "actor.optimizer.adam_eps": optimizer.adam_eps,
        "warm_start.learning_rate": config.warm_start.learning_rate,
    }
    for key, value in positive.items():
        if not value > 0:
            raise UserError(f"{key} = {value}: must be greater than 0")
    if optimizer.min_learning_rate > optimizer.learning_rate:
        raise UserError(
            f"actor.optimizer.min_learning_rate = {optimizer.min_learning_rate} is above"
            f" learning_rate = {optimizer.learning_rate}"
        )


def _check_actor(config: Config) -> None:
    actor = config.actor
    if actor.layout.virtual_pipeline > 1 and actor.layout.pipeline_parallel == 1:
        raise UserError(
            f"actor.layout.virtual_pipeline = {actor.layout.virtual_pipeline} needs pipeline_parallel above 1"
        )
    if actor.fp8 == "off":
        extra = {"fp8_bf16_layers": actor.fp8_bf16_layers, "fp8_param": actor.fp8_param}
        for key, value in extra.items():
            if value:
                raise UserError(f"actor.{key} = {value} has no effect while actor.fp8 = off")
        return
    if actor.layer_spec == "local":
        raise UserError(f"actor.fp8 = {actor.fp8} needs Transformer Engine's layers; set actor.layer_spec = auto")
    if config.model.dtype != "bfloat16":
        raise UserError(f"actor.fp8 = {actor.fp8} needs model.dtype = bfloat16, not {config.model.dtype}")
    if actor.fp8 == "delayed" and actor.fp8_bf16_layers:
        raise UserError("actor.fp8_bf16_layers does not work with fp8 = delayed: its scales are kept over all layers")
    if actor.fp8_param and not actor.optimizer.distributed:
        raise UserError("actor.fp8_param needs actor.optimizer.distributed = true, which keeps the float32 parameters")


def _check_objective(config: Config) -> None:
    check_objective(
        config.objective,
        prompts_per_step=config.rollout.prompts_per_step,
        max_completion_tokens=config.rollout.max_completion_tokens,
    )


def _check_required(config: Config) -> None:
    required = {"model.hf_path": config.model.hf_path, "data.train_path": config.data.train_path}
    if config.warm_start.steps:
        required["warm_start.examples_path"] = config.warm_start.examples_path
    for key, value in required.items():
        if not value:
            raise UserError(f"{key} is not set; give it in the config file or as {key}=...")
    if "{problem}" not in config.data.prompt_template:
        raise UserError(f"data.prompt_template = {config.data.prompt_template!r}: must contain {{problem}}")
    if config.model.dtype == "float64":
        raise UserError("model.dtype = float64 has no optimizer in Megatron-core; train in float32 or bfloat16")
    longest = config.data.max_prompt_tokens + config.rollout.max_completion_tokens
    if longest > config.packing.max_tokens_per_microbatch:
        raise UserError(
            f"packing.max_tokens_per_microbatch = {config.packing.max_tokens_per_microbatch}: the longest possible"
            f" sequence has data.max_prompt_tokens + rollout.max_completion_tokens = {longest} tokens and must fit"
        )


def _check_files(config: Config) -> None:
    resume = config.checkpoint.resume
    if resume not in ("auto", "never") and not Path(resume).is_dir():
        raise UserError(f"checkpoint.resume = '{resume}': must be auto, never or the directory of a checkpoint")
    if not Path(config.model.hf_path).is_dir():
        raise UserError(
            f"model.hf_path = '{config.model.hf_path}': no such directory (working directory: {Path.cwd()})"
        )
    files = {"data.train_path": config.data.train_path}
    files |= {f"data.eval_paths.{name}": path for name, path in config.data.eval_paths.items()}
    if config.warm_start.steps:
        files["warm_start.examples_path"] = config.warm_start.examples_path
    for key, path in files.items():
        if not Path(path).is_file():
            raise UserError(f"{key} = '{path}': no such file (working directory: {Path.cwd()})")
