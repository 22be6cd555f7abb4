"""Everything a run needs that can be wrong, loaded and checked before a process group or a model is made."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from dppo_megatron.algorithms.objectives import PolicyLoss, check_policy_loss
from dppo_megatron.config.checks import check_world_size
from dppo_megatron.config.schema import Config
from dppo_megatron.data.prompts import load_examples, load_prompts
from dppo_megatron.platform.capabilities import this_machine
from dppo_megatron.rewards.grading import Grader, make_grader
from dppo_megatron.rewards.start_checks import check_grader, check_references
from dppo_megatron.types import Prompt, TrainSample, UserError
from dppo_megatron.weights.architecture import Architecture, read_architecture
from dppo_megatron.weights.hf_files import WeightReader
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
    notes: list[str] = field(default_factory=list)
    """What the person who starts the run should see."""


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
    _check_positions(config, architecture)
    checkpoint = open_checkpoint(config.model.hf_path, architecture)
    tokenizer = _load_tokenizer(config.model.hf_path, architecture)
    train_prompts = load_prompts(config.data.train_path, config.data, tokenizer)
    if len(train_prompts) < config.rollout.prompts_per_step:
        raise UserError(
            f"rollout.prompts_per_step = {config.rollout.prompts_per_step}, but {config.data.train_path} holds only"
            f" {len(train_prompts)} problems"
        )
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
    eval_prompts = {name: load_prompts(path, config.data, tokenizer) for name, path in config.data.eval_paths.items()}
    policy_loss = _load_policy_loss(config)
    grader, notes = _check_grading(config, train_prompts, eval_prompts)
    return Job(
        config=config,
        architecture=architecture,
        checkpoint=checkpoint,
        tokenizer=tokenizer,
        train_prompts=train_prompts,
        eval_prompts=eval_prompts,
        warm_start_examples=examples,
        grade=grader,
        policy_loss=policy_loss,
        notes=notes,
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
    except (ImportError, AttributeError) as error:
        raise UserError(f"{key} = '{path}' cannot be imported: {error}") from None
    if not callable(function):
        raise UserError(f"{key} = '{path}' is not callable")
    loaded: Callable[..., Any] = function
    return loaded


def _check_grading(
    config: Config, train_prompts: list[Prompt], eval_prompts: dict[str, list[Prompt]]
) -> tuple[Grader, list[str]]:
    """The grader, tried on made-up answers and on the references of every set that it will grade; what that showed.

    Evaluation sets with graders of their own are tried with those, which are then closed.
    """
    reward = config.reward
    grader = make_grader(reward)
    notes: list[str] = []
    sets = [("train", grader, train_prompts)]
    others: dict[str, Grader] = {}
    for name, prompts in eval_prompts.items():
        own = config.data.eval_sets[name].grader if name in config.data.eval_sets else None
        if own and own not in others:
            others[own] = make_grader(reward, own, f"data.eval_sets.{name}.grader")
        sets.append((f"eval/{name}", others[own] if own else grader, prompts))
    checked: set[str] = set()
    try:
        for name, used, prompts in sets:
            if used.key not in checked and prompts:
                check_grader(used, prompts[0])
                checked.add(used.key)
            notes.append(check_references(used, reward, name, prompts))
    except BaseException:
        grader.close()
        raise
    finally:
        for other in others.values():
            other.close()
    return grader, [note for note in notes if note]


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


def _load_tokenizer(hf_path: str, architecture: Architecture) -> PreTrainedTokenizerBase:
    try:
        tokenizer = AutoTokenizer.from_pretrained(hf_path)
    except (OSError, ValueError) as error:
        raise UserError(f"model.hf_path = '{hf_path}': its tokenizer cannot be loaded: {error}") from None
    if tokenizer.eos_token_id is None:
        raise UserError(f"model.hf_path = '{hf_path}': its tokenizer has no end-of-sequence token")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if len(tokenizer) > architecture.vocab_size:
        raise UserError(
            f"model.hf_path = '{hf_path}': its tokenizer has {len(tokenizer)} tokens, its config.json only"
            f" {architecture.vocab_size}"
        )
    return tokenizer
