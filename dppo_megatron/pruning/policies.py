"""Makes policy objects from method names in the config, and defines the method names of `compare` and `simulate`, each
of which stands for a prompt policy, a completion policy, or both."""

from __future__ import annotations

import copy
from dataclasses import fields
from typing import Protocol, TypeVar, cast

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
from dppo_megatron.pruning.custom import CustomPromptPolicy, plug
from dppo_megatron.pruning.interface import Policy
from dppo_megatron.pruning.prompt_base import PromptPolicy
from dppo_megatron.pruning.prompt_baselines import (
    DynamicSamplingPolicy,
    GresoPolicy,
    InfoBatchPolicy,
    WeightedGresoPolicy,
)
from dppo_megatron.pruning.prompt_dppo import AutoPromptPolicy, DppoPromptPolicy, PaperPromptPolicy
from dppo_megatron.types import PromptFeatures, UserError

P = TypeVar("P", PromptPolicy, CompletionPolicy)


class HasPruning(Protocol):
    """A whole configuration, of which this package reads only its own part, since it also works without the trainer."""

    pruning: PruningConfig


C = TypeVar("C", bound=HasPruning)

PROMPT_POLICIES: dict[str, type[PromptPolicy]] = {
    "none": PromptPolicy,
    "dppo": DppoPromptPolicy,
    "dppo_auto": AutoPromptPolicy,
    "dppo_paper": PaperPromptPolicy,
    "greso": GresoPolicy,
    "greso_ht": WeightedGresoPolicy,
    "infobatch": InfoBatchPolicy,
    "dynamic_sampling": DynamicSamplingPolicy,
}
"""Method name to class, in the order in which messages list them."""
COMPLETION_POLICIES: dict[str, type[CompletionPolicy]] = {
    "none": CompletionPolicy,
    "dppo": DppoCompletionPolicy,
    "dppo_auto": AutoCompletionPolicy,
    "dppo_paper": baselines.PaperCompletionPolicy,
    "cppo": baselines.CppoPolicy,
    "cppo_trl": baselines.CppoTrlPolicy,
    "cppo_verl": baselines.CppoVerlPolicy,
    "greso": baselines.ZeroVariancePolicy,
    "greso_ht": baselines.ZeroAdvantagePolicy,
    "infobatch": baselines.InfoBatchCompletionPolicy,
    "max_variance": baselines.MaxVariancePolicy,
}
PASS_RATES = ("discount", "prior")
"""Settings that the prompts' pass rates depend on."""
METHODS: dict[str, tuple[str, str]] = {
    "grpo" if name == "none" else name: (
        name if name in PROMPT_POLICIES else "none",
        name if name in COMPLETION_POLICIES else "none",
    )
    for name in [*PROMPT_POLICIES, *COMPLETION_POLICIES]
}
"""Method name to (`pruning.prompt.method`, `pruning.completion.method`)."""


def prompt_policy_class(method: str, key: str = "pruning.prompt.method") -> type[PromptPolicy]:
    """The class for a method name or `module:Class`. Raises UserError."""
    return _resolve(method, key, PROMPT_POLICIES, PromptPolicy)


def completion_policy_class(method: str, key: str = "pruning.completion.method") -> type[CompletionPolicy]:
    """The class for a method name or `module:Class`. Raises UserError."""
    return _resolve(method, key, COMPLETION_POLICIES, CompletionPolicy)


def check_methods(
    config: PruningConfig, *, group_size: int = 0, minibatch_size: int = 0, reads_pass_rates: bool = False
) -> list[str]:
    """Check both methods; returns one line for each level with changed settings that nothing reads.

    Args:
        group_size, minibatch_size: as for `CompletionPolicy.check`.
        reads_pass_rates: the advantages or the order use the prompts' pass rates, whatever the method.

    Raises:
        UserError: unknown method, a plugged class that is not a policy, settings that contradict each other.
    """
    prompt, completion = prompt_policy_class(config.prompt.method), completion_policy_class(config.completion.method)
    prompt.check(config.prompt, "pruning.prompt")
    completion.check(config.completion, "pruning.completion", group_size=group_size, minibatch_size=minibatch_size)
    if config.completion.allocation and "allocation" not in completion.reads:
        raise UserError(
            f"pruning.completion.allocation = true: method={config.completion.method} has no rate that more prompts"
            " could fill; set it to false"
        )
    return [
        *_unread("pruning.prompt", config.prompt, prompt, PASS_RATES if reads_pass_rates else ()),
        *_unread("pruning.completion", config.completion, completion),
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
    """The policy of `pruning.prompt.method`; checks the section (`UserError`). Arguments as for `PromptPolicy`."""
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
    """The policy of `pruning.completion.method`; checks the section (`UserError`). Arguments as `CompletionPolicy`."""
    check_ranges(config, "pruning.completion.")
    cls = completion_policy_class(config.method)
    cls.check(config, "pruning.completion", group_size=group_size, minibatch_size=0)
    slope = zero_advantage_slope
    return cls(config, seed=seed, total_steps=total_steps, zero_advantage_slope=slope, group_size=group_size)


def _resolve(method: str, key: str, known: dict[str, type[P]], base: type[P]) -> type[P]:
    if not is_plugin(method):
        check_choice(key, method, list(known), ", or module:Class for a policy of your own")
        return known[method]
    return cast(type[P], plug(load_function(key, method), base, key, method))


def _unread(
    key: str, config: PromptPruningConfig | CompletionPruningConfig, cls: type[Policy], others: tuple[str, ...] = ()
) -> list[str]:
    """At most one line, with the changed settings that nothing reads; `others` are read by something else."""
    default, read = type(config)(), {"method", *cls.reads} - set(cls.unread(config)) | set(others)
    unread = [item.name for item in fields(config) if item.name not in read]
    changed = [name for name in unread if getattr(config, name) != getattr(default, name)]
    return [f"{key}.method = {config.method} does not read {', '.join(changed)}"] if changed else []


def parse_methods(names: str) -> list[str]:
    """A comma-separated list of methods. Raises UserError for an unknown or repeated one."""
    methods = [name.strip() for name in names.split(",") if name.strip()]
    for name in methods:
        levels(name)
    if not methods or len(set(methods)) < len(methods):
        raise UserError(f"--methods '{names}': expected different names, separated by commas")
    return methods


def levels(name: str) -> tuple[str, str]:
    """(prompt method, completion method); a user's `module:Class` has the level of its base class. Raises UserError."""
    if name in METHODS:
        return METHODS[name]
    if not is_plugin(name):
        raise UserError(
            f"--methods: no method '{name}'; known: {', '.join(METHODS)}, or module:Class for a policy of your own"
        )
    loaded = load_function("--methods", name)
    if isinstance(loaded, type) and issubclass(loaded, CustomPromptPolicy):
        return name, "none"
    completion_policy_class(name, "--methods")
    return "none", name


def method_overrides(name: str) -> list[str]:
    return [
        f"pruning.{level}.{key}={value if isinstance(value, str) else str(value).lower()}"
        for level, key, value in _settings(name)
    ]


def with_method(config: C, name: str) -> C:
    changed = copy.deepcopy(config)
    for level, key, value in _settings(name):
        setattr(getattr(changed.pruning, level), key, value)
    return changed


def _settings(name: str) -> list[tuple[str, str, str | bool | int]]:
    """(level, setting, value) that select both methods and turn off what they would refuse."""
    prompt, completion = levels(name)
    settings: list[tuple[str, str, str | bool | int]]
    settings = [("prompt", "method", prompt), ("completion", "method", completion)]
    if prompt == completion == "none":  # the run without pruning
        settings.append(("early_stop", "after_tokens", 0))
    if "allocation" not in completion_policy_class(completion).reads:
        settings.append(("completion", "allocation", False))
    return settings
