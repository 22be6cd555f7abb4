"""Everything a run needs that can be wrong, loaded and checked before a process group or a model is made."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from dppo_megatron.algorithms.objectives import PolicyLoss, check_policy_loss
from dppo_megatron.config.checks import check_world_size
from dppo_megatron.config.schema import Config
from dppo_megatron.config.selection import too_few_prompts
from dppo_megatron.data.prompts import load_examples, load_prompts
from dppo_megatron.platform.capabilities import this_machine
from dppo_megatron.rewards.graders import BUILT_IN
from dppo_megatron.rewards.grading import Grader
from dppo_megatron.rewards.pool import GraderPool
from dppo_megatron.types import Prompt, TrainSample, UserError
from dppo_megatron.weights.architecture import Architecture, read_architecture
from dppo_megatron.weights.hf_files import WeightReader
from dppo_megatron.weights.tokenizer import load_tokenizer
from dppo_megatron.weights.torch_dist import open_checkpoint


@dataclass(frozen=True, slots=True)
class Job:
    """A checked configuration and what it points at."""

    config: Config
    architecture: Architecture
    checkpoint: WeightReader
    tokenizer: PreTrainedTokenizerBase
    train_prompts: list[Prompt]
    eval_prompts: dict[str, list[Prompt]]
    warm_start_examples: list[TrainSample]
    grade: Grader
    policy_loss: PolicyLoss | None = None
    """The user's own, of `objective.function`."""


def prepare_job(config: Config, world_size: int) -> Job:
    """Load the data and read the checkpoint's headers.

    Raises:
        UserError: anything that would fail later, said now.
    """
    check_world_size(config, world_size)
    architecture = read_architecture(config.model.hf_path)
    architecture.check_layout(config.actor.layout)
    architecture.check_bf16_layers(config.actor)
    layout, machine = config.actor.layout, this_machine()
    machine.choose_layer_spec(config.actor.layer_spec, config.actor.fp8)
    machine.check_experts(layout.expert_parallel, layout.expert_tensor_parallel or layout.tensor_parallel)
    if architecture.experts is not None:
        machine.check_mixture()
    _check_positions(config, architecture)
    checkpoint = open_checkpoint(config.model.hf_path, architecture)
    tokenizer = load_tokenizer(config.model.hf_path, architecture)
    train_prompts = load_prompts(config.data.train_path, config.data, tokenizer)
    if too_few := too_few_prompts(config, len(train_prompts), config.data.train_path):
        raise UserError(too_few)
    examples: list[TrainSample] = []
    if config.warm_start.steps:
        examples = load_examples(
            config.warm_start.examples_path,
            config.warm_start.completion_field,
            config.data,
            tokenizer,
            max_tokens=min(config.packing.max_tokens_per_microbatch, architecture.max_positions),
        )
        if len(examples) < config.warm_start.examples_per_step:
            raise UserError(
                f"warm_start.examples_per_step = {config.warm_start.examples_per_step}, but"
                f" {config.warm_start.examples_path} holds only {len(examples)} examples"
            )
    return Job(
        config=config,
        architecture=architecture,
        checkpoint=checkpoint,
        tokenizer=tokenizer,
        train_prompts=train_prompts,
        eval_prompts={
            name: load_prompts(path, config.data, tokenizer) for name, path in config.data.eval_paths.items()
        },
        warm_start_examples=examples,
        grade=_load_grader(config),
        policy_loss=_load_policy_loss(config),
    )


def load_function(key: str, path: str) -> Callable[..., Any]:
    """Import `module:function`, named by the config key `key`; modules of the working directory are found too.

    Raises UserError if there is no such function.
    """
    module_name, separator, name = path.partition(":")
    if not separator:
        raise UserError(f"{key} = '{path}': expected module:function")
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())  # an installed command does not look there by itself
    try:
        function = getattr(importlib.import_module(module_name), name)
    except (Exception, SystemExit) as error:  # a module is code: whatever it does while it is imported
        said = str(error).strip().partition("\n")[0]
        raise UserError(f"{key} = '{path}' cannot be imported: {type(error).__name__}: {said}") from None
    if not callable(function):
        raise UserError(f"{key} = '{path}' is not callable")
    loaded: Callable[..., Any] = function
    return loaded


def _load_grader(config: Config) -> Grader:
    function = BUILT_IN.get(config.reward.function, config.reward.function)
    load_function("reward.function", function)  # here and not in its process, so that a typo is said now
    return GraderPool(function, config.reward.processes, config.reward.timeout_s)


def _load_policy_loss(config: Config) -> PolicyLoss | None:
    if not config.objective.function:
        return None
    function: PolicyLoss = load_function("objective.function", config.objective.function)
    check_policy_loss(function, config.objective)
    return function


def _check_positions(config: Config, architecture: Architecture) -> None:
    longest = config.data.max_prompt_tokens + config.rollout.max_completion_tokens
    if longest > architecture.max_positions:
        raise UserError(
            f"data.max_prompt_tokens + rollout.max_completion_tokens = {longest}, more than the"
            f" {architecture.max_positions} positions of '{config.model.hf_path}'"
        )
