"""The methods that `compare` and `simulate` know: a policy of prompts, one of completions, or both under one name."""

from __future__ import annotations

import copy

from dppo_megatron.config.plugins import is_plugin, load_function
from dppo_megatron.config.schema import Config
from dppo_megatron.pruning.custom import CustomPromptPolicy
from dppo_megatron.pruning.policies import COMPLETION_POLICIES, PROMPT_POLICIES, completion_policy_class
from dppo_megatron.types import UserError

METHODS: dict[str, tuple[str, str]] = {
    "grpo" if name == "none" else name: (
        name if name in PROMPT_POLICIES else "none",
        name if name in COMPLETION_POLICIES else "none",
    )
    for name in [*PROMPT_POLICIES, *COMPLETION_POLICIES]
}
"""Method to (`pruning.prompt.method`, `pruning.completion.method`); every other setting stays the config's."""


def parse_methods(names: str) -> list[str]:
    """A comma-separated list of methods. Raises UserError for an unknown or repeated one."""
    methods = [name.strip() for name in names.split(",") if name.strip()]
    for name in methods:
        levels(name)
    if not methods or len(set(methods)) < len(methods):
        raise UserError(f"--methods '{names}': expected different names, separated by commas")
    return methods


def levels(name: str) -> tuple[str, str]:
    """The methods of both levels; a user's own `module:Class` is of the level that its class is. Raises UserError."""
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
    """The settings that make a job use this method."""
    return [
        f"pruning.{level}.{key}={value if isinstance(value, str) else str(value).lower()}"
        for level, key, value in _settings(name)
    ]


def with_method(config: Config, name: str) -> Config:
    """A copy of `config` that uses this method."""
    changed = copy.deepcopy(config)
    for level, key, value in _settings(name):
        setattr(getattr(changed.pruning, level), key, value)
    return changed


def _settings(name: str) -> list[tuple[str, str, str | bool]]:
    """(level, setting, value) of both methods; what is refused with one of them is off."""
    prompt, completion = levels(name)
    settings: list[tuple[str, str, str | bool]] = [("prompt", "method", prompt), ("completion", "method", completion)]
    if "allocation" not in completion_policy_class(completion).reads:
        settings.append(("completion", "allocation", False))
    return settings
