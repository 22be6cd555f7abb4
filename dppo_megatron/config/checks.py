"""Checks beyond types and ranges: files that must exist, and settings that contradict each other.

All of it runs before a process group or a model is made, so a mistake costs seconds and not a queue slot.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Literal

from dppo_megatron.config.objective import check_objective
from dppo_megatron.config.observe import check_observe
from dppo_megatron.config.paths import check_model, check_writable, shown
from dppo_megatron.config.ranges import check_choice, check_ranges
from dppo_megatron.config.resolved_sets import check_data, longest_trained, set_rewards
from dppo_megatron.config.reward import check_reward
from dppo_megatron.config.rollout import check_rollout
from dppo_megatron.config.schema import INTERLEAVED_GROUP, ActorConfig, Config, LoraConfig, OptimizerConfig
from dppo_megatron.config.selection import selection_settings
from dppo_megatron.config.server_args import read_split
from dppo_megatron.types import UserError

Purpose = Literal["train", "plan", "evaluate", "grade"]
"""What a config is for: a plan needs no data yet, an evaluation needs no training data, and grading no model either."""

_RECOMPUTED = ("core_attn", "mlp", "moe", "shared_experts", "moe_act", "layernorm")
"""What Megatron can recompute, by its names. Without its mla_up_proj: latent attention is this project's own code."""


def check_values(config: Config, purpose: Purpose = "train") -> None:
    """Raise `UserError` for the first value that is out of range or contradicts another one."""
    check_ranges(config)
    if purpose in ("train", "plan"):  # others build no optimizer and update nothing
        _check_optimizer(config)
        _check_pipeline(config.actor)
    _check_actor(config)
    _check_lora(config.actor.lora)
    for name in config.actor.recompute_modules:
        check_choice("actor.recompute_modules", name, _RECOMPUTED)
    _check_quantization(config, purpose)
    if purpose != "grade":
        _check_files(config, purpose)
    check_rollout(config.rollout)
    if config.rollout.speculation.draft_path:
        check_model(config.rollout.speculation.draft_path, "rollout.speculation.draft_path")
    for key, reward in set_rewards(config).items():
        check_reward(reward, key)
    check_objective(config.objective, max_completion_tokens=config.rollout.sampling.max_completion_tokens)
    selection_settings(config).check()
    if purpose == "train":
        check_observe(config.observe)


def check_world_size(config: Config, world_size: int, *, plans: bool = False) -> None:
    """Raise `UserError` unless `world_size` ranks can hold the layout. `plans`: advise for `plan`, not for torchrun."""
    layout = config.actor.layout
    tp, pp, cp = layout.tensor_parallel, layout.pipeline_parallel, layout.context_parallel
    etp, ep = layout.expert_tensor_parallel or tp, layout.expert_parallel
    launch = "launch with torchrun --nproc-per-node {} -m dppo_megatron train ..."
    advice = "plan for them with --gpus {}, or a multiple" if plans else launch
    for needed, product in (
        (tp * pp * cp, f"tensor_parallel={tp} x pipeline_parallel={pp} x context_parallel={cp}"),
        (etp * ep * pp, f"expert_tensor_parallel={etp} x expert_parallel={ep} x pipeline_parallel={pp}"),
    ):
        if world_size % needed:
            raise UserError(
                f"actor.layout: {product} needs a multiple of {needed} processes, but the world size is {world_size};"
                f" {advice.format(needed)}"
            )


def check_run_dir(config: Config) -> None:
    """Raise `UserError` unless `run_dir` can be written and holds no other run, and `checkpoint.resume` exists."""
    if not config.run_dir:
        raise UserError("run_dir is not set; give it in the config file or as run_dir=...")
    check_writable("run_dir", config.run_dir, directory=True)
    used = Path(config.run_dir)
    try:
        has_record = (used / "metrics.jsonl").exists()
        has_checkpoints = next((used / "checkpoints").glob("step_[0-9]*"), None) is not None
    except OSError as error:  # no permission, a file system that does not answer
        raise UserError(f"run_dir = '{shown(config.run_dir)}': {error.strerror}") from None
    resume = config.checkpoint.resume
    never = resume == "never"
    # a run with checkpoints of its own resumes from those, even if the checkpoint that it began from has been deleted
    if not (resume in ("auto", "never") or has_checkpoints or os.path.isdir(resume)):
        raise UserError(f"checkpoint.resume = '{shown(resume)}': must be auto, never or the directory of a checkpoint")
    if (never and (has_record or has_checkpoints)) or (has_record and not (used / "config.yaml").exists()):
        held = "metrics.jsonl" if has_record else "checkpoints"
        why = "checkpoint.resume = never" if never else "it has no config.yaml"
        raise UserError(
            f"run_dir = '{shown(config.run_dir)}' already holds a run ({held}), which is not resumed because {why};"
            " choose another run_dir=... or remove that directory"
        )


def _check_optimizer(config: Config) -> None:
    """Refuse here too what Megatron's offloaded or 16-bit optimizer would fail at only while it is built, or later."""
    optimizer, usual = config.actor.optimizer, OptimizerConfig()
    if optimizer.min_learning_rate > optimizer.learning_rate:
        raise UserError(
            f"actor.optimizer.min_learning_rate = {optimizer.min_learning_rate} is above"
            f" learning_rate = {optimizer.learning_rate}"
        )
    for key in ("cpu_offload", "moments_dtype", "main_params_dtype"):
        if (value := getattr(optimizer, key)) == getattr(usual, key):
            continue
        setting = f"actor.optimizer.{key} = {value}"
        # The first save hangs at parameters that one rank has on the host and the next on the device, and after a load
        # Transformer Engine's step count no longer advances.
        if 0 < optimizer.cpu_offload < 1:
            raise UserError(f"{setting}: partly offloaded, a run cannot be saved or resumed; use 1, or 0")
        if not optimizer.distributed:
            raise UserError(f"{setting} needs actor.optimizer.distributed = true")
        if config.model.dtype != "bfloat16":  # Megatron cannot build the offloaded optimizer over float32 parameters
            raise UserError(f"{setting} needs model.dtype = bfloat16, not {config.model.dtype}")
        if key == "cpu_offload":
            continue
        if optimizer.cpu_offload:
            raise UserError(f"{setting}: with actor.optimizer.cpu_offload the optimizer's state is float32")
        if config.actor.offload != "none" and config.rollout.servers.colocate:
            raise UserError(
                f"{setting} keeps scales on the device, so that checkpoints cannot be written from the host; with"
                " rollout.servers.colocate set actor.offload = none or keep the optimizer in float32"
            )


def _check_actor(config: Config) -> None:
    actor = config.actor
    if actor.lora.rank and config.objective.kl.reference_path:
        raise UserError(
            "objective.kl.reference_path: with actor.lora the reference is the model without adapters, or with those of"
            " SFT; leave it empty"
        )
    rollout, drafting = config.rollout, config.rollout.speculation.method
    if actor.routing_replay == "engine" and drafting != "none":
        raise UserError(
            f"actor.routing_replay = engine with rollout.speculation.method = {drafting}: it is untested whether the"
            " experts of rejected drafts are left out; use actor.routing_replay = actor"
        )
    if actor.routing_replay == "engine" and rollout.engine == "sglang" and rollout.pauses_requests:
        raise UserError(
            "actor.routing_replay = engine with rollout.sync.in_flight = continue: SGLang prefills requests again that"
            " continue after a sync, so their experts are those of other weights; use actor.routing_replay = actor"
        )
    if actor.routing_replay == "engine" and rollout.engine == "sglang" and read_split(rollout.servers.args).stages > 1:
        raise UserError(
            "actor.routing_replay = engine: with pipeline stages (--pp-size) SGLang returns the experts of the first"
            " one's layers only; use tensor parallelism, or actor.routing_replay = actor"
        )
    if actor.layout.virtual_pipeline > 1 and actor.layout.pipeline_parallel == 1:
        raise UserError(
            f"actor.layout.virtual_pipeline = {actor.layout.virtual_pipeline} needs pipeline_parallel above 1"
        )
    if actor.overlap_param_gather and not (actor.overlap_grad_reduce and actor.optimizer.distributed):
        raise UserError(
            "actor.overlap_param_gather = true needs actor.overlap_grad_reduce = true, whose buckets it gathers, and"
            " actor.optimizer.distributed = true"
        )
    if actor.offload not in ("auto", "none") and not config.rollout.servers.colocate:
        raise UserError(
            f"actor.offload = {actor.offload} has no effect while rollout.servers.colocate = false: nothing else uses"
            " the device while servers generate"
        )
    if actor.fp8 == "off":
        if actor.fp8_bf16_layers:
            raise UserError(f"actor.fp8_bf16_layers = {actor.fp8_bf16_layers} has no effect while actor.fp8 = off")
        return
    if actor.layer_spec == "local":
        raise UserError(f"actor.fp8 = {actor.fp8} needs Transformer Engine's layers; set actor.layer_spec = auto")
    if config.model.dtype != "bfloat16":
        raise UserError(f"actor.fp8 = {actor.fp8} needs model.dtype = bfloat16, not {config.model.dtype}")
    if actor.fp8 == "delayed" and actor.fp8_bf16_layers:
        raise UserError("actor.fp8_bf16_layers does not work with fp8 = delayed, whose scales are kept over all layers")


def _check_pipeline(actor: ActorConfig) -> None:
    """Refuse what Megatron would refuse only in the first update."""
    group, layout = actor.megatron.get(INTERLEAVED_GROUP), actor.layout
    if actor.megatron.get("overlap_p2p_comm") and layout.pipeline_parallel > 1:
        if layout.virtual_pipeline == 1:
            raise UserError("actor.megatron.overlap_p2p_comm = true needs actor.layout.virtual_pipeline above 1")
        if actor.megatron.get("batch_p2p_comm"):
            raise UserError("actor.megatron.overlap_p2p_comm = true excludes batch_p2p_comm = true: choose one")
    if group is None:
        return
    setting = f"actor.megatron.{INTERLEAVED_GROUP} = {group}"
    if layout.virtual_pipeline == 1:
        raise UserError(f"{setting} has no effect while actor.layout.virtual_pipeline = 1")
    if type(group) is not int or group < layout.pipeline_parallel:
        raise UserError(
            f"{setting}: must be a whole number, at least actor.layout.pipeline_parallel = {layout.pipeline_parallel}"
        )


def _check_lora(lora: LoraConfig) -> None:
    for item in fields(lora):
        if not lora.rank and (value := getattr(lora, item.name)) != getattr(LoraConfig(), item.name):
            raise UserError(f"actor.lora.{item.name} = {value} has no effect while actor.lora.rank = 0")


def _check_quantization(config: Config, purpose: Purpose) -> None:
    setting, objective = f"rollout.quantization = {config.rollout.quantization}", config.objective
    if config.rollout.quantization == "off":
        return
    if config.model.dtype != "bfloat16":
        raise UserError(f"{setting} needs model.dtype = bfloat16, not {config.model.dtype}: engines compute in it")
    if purpose in ("train", "plan") and objective.correction.level == "none" and objective.loss != "divergence_tv":
        raise UserError(
            f"{setting}: completions are sampled from a rounded policy, and objective.correction.level = none would"
            " train on them as if they were the actor's; set objective.correction.level=token (truncated importance"
            " sampling)"
        )


def _check_files(config: Config, purpose: Purpose) -> None:
    """Raise `UserError` unless everything that `purpose` needs is set and exists, and the longest sequence fits."""
    trains = purpose == "train"
    required: dict[str, object] = {"model.hf_path": config.model.hf_path}
    if trains:
        required["data.train_path"] = config.data.train_path or config.data.train_sets
    if trains and config.sft.steps:
        required["sft.examples_path"] = config.sft.examples_path
    for key, value in required.items():
        if not value:
            raise UserError(f"{key} is not set; give it in the config file or as {key}=...")
    longest = longest_trained(config)
    if (trains or purpose == "plan") and longest > config.packing.max_tokens_per_microbatch:
        raise UserError(
            f"packing.max_tokens_per_microbatch = {config.packing.max_tokens_per_microbatch}: the longest possible"
            f" sequence has data.max_prompt_tokens + rollout.sampling.max_completion_tokens = {longest} tokens"
            " and must fit"
        )
    check_model(config.model.hf_path)
    if purpose == "plan":
        return
    if trains and config.objective.kl.reference_path:
        check_model(config.objective.kl.reference_path, "objective.kl.reference_path")
    servers = config.rollout.servers
    if servers.launch == "local" and servers.python and shutil.which(servers.python) is None:
        raise UserError(
            f"rollout.servers.python = '{shown(servers.python)}': this machine has no such program, or may not run it"
        )
    check_data(config, trains=trains)
