"""From a method's name in the config to a policy object; each class lists its names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TypeVar, cast

from dppo_megatron.config.plugins import is_plugin, load_function
from dppo_megatron.config.pruning import (
    CompletionPruningConfig,
    PromptPruningConfig,
    PruningConfig,
    check_choice,
    check_ranges,
)
from dppo_megatron.pruning import completion_baselines as baselines
from dppo_megatron.pruning.completion_base import CompletionPolicy
from dppo_megatron.pruning.completion_dppo import AutoCompletionPolicy, DppoCompletionPolicy
from dppo_megatron.pruning.custom import plug
from dppo_megatron.pruning.interface import PromptFeatures
from dppo_megatron.pruning.prompt_base import PromptPolicy
from dppo_megatron.pruning.prompt_baselines import (
    DynamicSamplingPolicy,
    GresoPolicy,
    InfoBatchPolicy,
    WeightedGresoPolicy,
)
from dppo_megatron.pruning.prompt_dppo import AutoPromptPolicy, DppoPromptPolicy, PaperPromptPolicy
from dppo_megatron.types import UserError

P = TypeVar("P", PromptPolicy, CompletionPolicy)


def _by_name(classes: Sequence[type[P]]) -> dict[str, type[P]]:
    return {name: cls for cls in classes for name in cls.methods}


PROMPT_POLICIES: dict[str, type[PromptPolicy]] = _by_name(
    [
        PromptPolicy,
        DppoPromptPolicy,
        AutoPromptPolicy,
        PaperPromptPolicy,
        GresoPolicy,
        WeightedGresoPolicy,
        InfoBatchPolicy,
        DynamicSamplingPolicy,
    ]
)
"""Method name to class, in the order in which messages list them."""
COMPLETION_POLICIES: dict[str, type[CompletionPolicy]] = _by_name(
    [
        CompletionPolicy,
        DppoCompletionPolicy,
        AutoCompletionPolicy,
        baselines.PaperCompletionPolicy,
        baselines.CppoPolicy,
        baselines.CppoTrlPolicy,
        baselines.CppoVerlPolicy,
        baselines.ZeroVariancePolicy,
        baselines.ZeroAdvantagePolicy,
        baselines.InfoBatchCompletionPolicy,
        baselines.MaxVariancePolicy,
    ]
)
"""As `PROMPT_POLICIES`."""


def prompt_policy_class(method: str, key: str = "pruning.prompt.method") -> type[PromptPolicy]:
    """The class of a name, or of `module:Class`. Raises UserError."""
    return _resolve(method, key, PROMPT_POLICIES, PromptPolicy)


def completion_policy_class(method: str, key: str = "pruning.completion.method") -> type[CompletionPolicy]:
    """The class of a name, or of `module:Class`. Raises UserError."""
    return _resolve(method, key, COMPLETION_POLICIES, CompletionPolicy)


def check_methods(config: PruningConfig, *, group_size: int = 0, minibatch_size: int = 0) -> list[str]:
    """Check both levels' methods against their settings.

    Args:
        group_size: completions of a prompt; 0: not known.
        minibatch_size: nominal completions of an optimizer mini-batch; 0: not known.

    Returns:
        A line for each level with settings, other than the defaults, that its method does not read.

    Raises:
        UserError: no such method, a plugged policy that is none, settings that contradict each other under it.
    """
    prompt, completion = prompt_policy_class(config.prompt.method), completion_policy_class(config.completion.method)
    prompt.check(config.prompt, "pruning.prompt")
    completion.check(config.completion, "pruning.completion", group_size=group_size, minibatch_size=minibatch_size)
    if config.completion.allocation and "allocation" not in completion.reads:
        raise UserError(
            f"pruning.completion.allocation = true: method={config.completion.method} has no rate that more prompts"
            " could fill; set it to false"
        )
    if is_plugin(config.prompt.method):  # a trial, because its __init__ may be wrong too
        make_prompt_policy(
            config.prompt, num_prompts=1, completions_per_prompt=1, prompts_per_step=1, total_steps=1, seed=0
        )
    if is_plugin(config.completion.method):
        make_completion_policy(config.completion, seed=0, total_steps=1)
    return [
        *_unread("pruning.prompt", config.prompt, prompt.reads, prompt.unread(config.prompt)),
        *_unread("pruning.completion", config.completion, completion.reads, completion.unread(config.completion)),
    ]


def make_prompt_policy(
    config: PromptPruningConfig,
    *,
    num_prompts: int,
    completions_per_prompt: int,
    prompts_per_step: int,
    total_steps: int,
    seed: int,
    features: PromptFeatures | None = None,
) -> PromptPolicy:
    """The policy of `pruning.prompt.method`, whose section is checked here; the others are those of `PromptPolicy`.

    Raises:
        UserError: a setting is out of range; the message names its key.
    """
    for name, count in (("num_prompts", num_prompts), ("completions_per_prompt", completions_per_prompt)):
        if count < 1:
            raise ValueError(f"{name} = {count}: must be at least 1")
    if prompts_per_step < 1 or total_steps < 0:
        raise ValueError(f"prompts_per_step = {prompts_per_step}, total_steps = {total_steps}: must be positive")
    check_ranges(config, "pruning.prompt.")
    cls = prompt_policy_class(config.method)
    cls.check(config, "pruning.prompt")
    return cls(
        config,
        num_prompts=num_prompts,
        completions_per_prompt=completions_per_prompt,
        prompts_per_step=prompts_per_step,
        total_steps=total_steps,
        seed=seed,
        features=features,
    )


def make_completion_policy(
    config: CompletionPruningConfig,
    *,
    seed: int,
    total_steps: int,
    zero_advantage_slope: float = 0.0,
    group_size: int = 0,
) -> CompletionPolicy:
    """The policy of `pruning.completion.method`, whose section is checked here; the others are those of
    `CompletionPolicy`.

    Raises:
        UserError: a setting is out of range; the message names its key.
    """
    check_ranges(config, "pruning.completion.")
    cls = completion_policy_class(config.method)
    cls.check(config, "pruning.completion", group_size=group_size, minibatch_size=0)
    return cls(
        config,
        seed=seed,
        total_steps=total_steps,
        zero_advantage_slope=zero_advantage_slope,
        group_size=group_size,
    )


def _resolve(method: str, key: str, known: dict[str, type[P]], base: type[P]) -> type[P]:
    if not is_plugin(method):
        check_choice(key, method, list(known), ", or module:Class for a policy of your own")
        return known[method]
    loaded = load_function(key, method)
    return cast(type[P], plug(loaded, base, key, method))


def _unread(
    key: str,
    config: PromptPruningConfig | CompletionPruningConfig,
    reads: tuple[str, ...],
    unread: tuple[str, ...],
) -> list[str]:
    """One line with the settings that were changed and mean nothing."""
    default = type(config)()
    idle = [item.name for item in fields(config) if item.name not in {"method", *reads} or item.name in unread]
    changed = [name for name in idle if getattr(config, name) != getattr(default, name)]
    return [f"{key}.method = {config.method} does not read {', '.join(changed)}"] if changed else []
