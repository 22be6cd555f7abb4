"""What all subcommands share: how they are added, CONFIG with its settings, and numbers with a range."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

from dppo_megatron.config import load_config
from dppo_megatron.config.ranges import Range
from dppo_megatron.config.schema import Config
from dppo_megatron.types import UserError

Commands = argparse._SubParsersAction  # the type has no public name
Run = Callable[[argparse.Namespace], int]
"""Does what the parsed command line asks for; returns the exit code."""


def add_command(
    commands: Commands[argparse.ArgumentParser], name: str, run: Run, *, summary: str, description: str
) -> argparse.ArgumentParser:
    """Add `dppo-megatron NAME`: `summary` stands in the list of commands, `description` on top of its own help."""
    command = commands.add_parser(
        name,
        help=summary,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.set_defaults(run=run)
    return command


_SETTINGS = "settings that replace the file's"


def add_config(command: argparse.ArgumentParser, config: str = "YAML file", settings: str = _SETTINGS) -> None:
    """Add CONFIG and the settings after it, each with its help."""
    command.add_argument("config", metavar="CONFIG", help=config)
    add_settings(command, settings)


def add_settings(command: argparse.ArgumentParser, settings: str = _SETTINGS) -> None:
    """Add any number of key=value."""
    command.add_argument("overrides", metavar="key=value", nargs="*", help=settings)


def check_comes_first(path: str) -> None:
    """Raise UserError if a setting stands where a command expects its config file."""
    if "=" in path and not os.path.exists(path):
        raise UserError(f"'{path}' stands where CONFIG should: the file comes first, settings (key=value) after it")


def read_config(path: str, overrides: list[str], *, writes_run: bool = True) -> Config:
    """CONFIG with its settings. Raises UserError."""
    check_comes_first(path)
    return load_config(path, overrides, writes_run=writes_run)


def check_number(option: str, value: float | None, interval: str) -> None:
    """Raise UserError if `--option` has a value outside `interval`, as in "(0, 1e6]"."""
    allowed = Range.parse(interval)
    if value is not None and value not in allowed:
        raise UserError(f"{option} {value}: {allowed.wanted(value)}")
