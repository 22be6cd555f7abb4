"""What subcommands share: CONFIG with its settings, numbers with a range, --json, Megatron's own fields."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dppo_megatron.config import load_config
from dppo_megatron.config.checks import Purpose, check_world_size
from dppo_megatron.config.paths import shipped_config, working_directory, writing
from dppo_megatron.config.ranges import Range
from dppo_megatron.config.schema import Config
from dppo_megatron.types import UserError
from dppo_megatron.workbench.commands.terminal import loading, say

if TYPE_CHECKING:  # the module imports torch
    from dppo_megatron.platform.capabilities import Machine

_SETTINGS = "settings that replace the file's"


def add_config(command: argparse.ArgumentParser, config: str = "YAML file", settings: str = _SETTINGS) -> None:
    """Add CONFIG and the settings after it, each with its help."""
    text = f"{config}, or the name of a shipped one: quickstart, h100/qwen3_8b_8gpus_dppo"
    command.add_argument("config", metavar="CONFIG", type=config_file, help=text)
    add_settings(command, settings)


def add_settings(command: argparse.ArgumentParser, settings: str = _SETTINGS) -> None:
    """Add any number of key=value."""
    command.add_argument("overrides", metavar="key=value", nargs="*", help=settings)


def config_file(name: str) -> str:
    """The file that CONFIG names: one of the user's own, else the shipped one of that name."""
    shipped, is_file = shipped_config(name), os.path.lexists(name) and not os.path.isdir(name)
    if shipped is None or (is_file and os.path.exists(name) and os.path.samefile(name, shipped)):
        return name
    say(f"CONFIG: {name} of this directory, not the shipped one" if is_file else f"CONFIG: the shipped {shipped}")
    return name if is_file else str(shipped)


def check_comes_first(path: str) -> None:
    """Raise UserError if a setting is given where a command expects its config file."""
    if "=" in path and not os.path.exists(path):
        raise UserError(f"'{path}' is where CONFIG should be: the file comes first, settings (key=value) after it")


def read_config(path: str, overrides: list[str], *, writes_run: bool = True, purpose: Purpose = "train") -> Config:
    """CONFIG with its settings. Raises UserError."""
    check_comes_first(path)
    if base := working_directory(path):
        say(f"{path}: its relative paths are relative to {base}, where that run was started")
    return load_config(path, overrides, writes_run=writes_run, purpose=purpose)


def check_number(option: str, value: float | None, interval: str) -> None:
    """Raise UserError if `--option` has a value outside `interval`, as in "(0, 1e6]"."""
    allowed = Range.parse(interval)
    if value is not None and value not in allowed:
        raise UserError(f"{option} {value}: {allowed.wanted(value)}")


def check_numbers(arguments: argparse.Namespace, **intervals: str) -> None:
    """`check_number` for each of these options, named as in `arguments`."""
    for name, interval in intervals.items():
        check_number(f"--{name.replace('_', '-')}", getattr(arguments, name), interval)


def write_json(path: str, values: Any) -> None:
    """Write `values` to the FILE of `--json`, which has been checked. Raises UserError if that fails now."""
    if not (folder := Path(path).parent).exists():
        folder.mkdir(parents=True)
        say(f"--json {path}: its directory did not exist and was created")
    with writing(f"--json '{path}'"):  # written directly, not renamed into place: it may be /dev/stdout
        Path(path).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def check_actor_settings(config: Config, world_size: int, machine: Machine, *, runs_here: bool) -> list[str]:
    """Check `actor.megatron`, `actor.ddp` and selective recomputation against the installed Megatron, before servers
    start or ranks rendezvous; returns a line that names settings which no test trains with, if there are any. Only a
    job that sets one of them waits for the import of Megatron.

    Args:
        machine: what the job will run on; with `runs_here` it is this machine, and Megatron's own checks count too.

    Raises:
        UserError: a field that the installed Megatron does not have, or that is not the user's to set.
    """
    actor = config.actor
    if not (actor.megatron or actor.ddp or (runs_here and actor.recompute == "selective")):
        return []
    with loading("Megatron"):
        import torch

        from dppo_megatron.actor.model import check_settings
        from dppo_megatron.weights.provider import model_architecture
    architecture = model_architecture(config.model)
    check_world_size(config, world_size)
    architecture.check_layout(actor)
    has_experts, heads = architecture.experts is not None, architecture.heads
    spec, _ = machine.choose_layer_spec(actor.layer_spec, actor.fp8, has_experts=has_experts, heads=heads)
    return check_settings(actor, architecture, getattr(torch, config.model.dtype), spec, runs_here=runs_here)
