"""The named methods of the field: which policy each uses at the prompt and at the completion level."""

from __future__ import annotations

import copy

from dppo_megatron.config.schema import Config
from dppo_megatron.types import UserError

METHODS: dict[str, tuple[str, str]] = {
    "grpo": ("none", "none"),
    "dppo": ("dppo", "dppo"),
    "dppo_auto": ("dppo_auto", "dppo_auto"),
    "dppo_paper": ("dppo_paper", "dppo_paper"),
    "cppo": ("none", "cppo"),
    "cppo_trl": ("none", "cppo_trl"),
    "cppo_verl": ("none", "cppo_verl"),
    "greso": ("greso", "greso"),
    "greso_ht": ("greso_ht", "greso_ht"),
    "infobatch": ("infobatch", "infobatch"),
    "dynamic_sampling": ("dynamic_sampling", "none"),
    "max_variance": ("none", "max_variance"),
}
"""Method to (`pruning.prompt.method`, `pruning.completion.method`); every other setting stays the config's."""


def parse_methods(names: str) -> list[str]:
    """A comma-separated list of methods. Raises UserError for an unknown or repeated one."""
    methods = [name.strip() for name in names.split(",") if name.strip()]
    for name in methods:
        if name not in METHODS:
            raise UserError(f"--methods: no method '{name}'; known: {', '.join(METHODS)}")
    if not methods or len(set(methods)) < len(methods):
        raise UserError(f"--methods '{names}': expected different names, separated by commas")
    return methods


def method_overrides(name: str) -> list[str]:
    """The settings that make a job use this method."""
    prompt, completion = METHODS[name]
    return [f"pruning.prompt.method={prompt}", f"pruning.completion.method={completion}"]


def with_method(config: Config, name: str) -> Config:
    """A copy of `config` that uses this method."""
    changed = copy.deepcopy(config)
    changed.pruning.prompt.method, changed.pruning.completion.method = METHODS[name]
    return changed
