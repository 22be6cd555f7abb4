"""The command line: finds the command, and reports a mistake in one line, with an exit code and a page of docs/."""

from __future__ import annotations

import argparse
import difflib
import errno
import io
import os
import select
import sys
import traceback
from collections.abc import Collection
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from dppo_megatron import __version__
from dppo_megatron.progress import Display, shown_by
from dppo_megatron.texts import logged, one_line, show
from dppo_megatron.types import RunAborted, UserError
from dppo_megatron.workbench.commands.terminal import drop, quiet_libraries, say, show_progress

_COMMANDS = {  # in the order of --help; each is a module of `commands`
    "train": "train a model",
    "compare": "train under several pruning methods and compare",
    "quickstart": "make a small task, train on it and report",
    "init": "copy the shipped configs, to change them",
    "plan": "what a job needs and costs, before anything is started",
    "eval": "score a model, or compare two evaluations",
    "report": "one HTML file about one run or several",
    "serve": "rollout servers on this machine for a trainer elsewhere",
    "watch": "follow a run in the terminal",
    "simulate": "predict the cost of pruning methods from a recorded run",
    "doctor": "check the installation, a job's machines, and packing and FP8 on your model",
    "accept": "measure this machine, with a verdict on each figure",
    "convert": "Hugging Face checkpoint to Megatron's format and back",
    "data": "download a known problem set",
    "config": "print settings with default, range and meaning",
    "completion": "print a script for your shell's completion",
}

_ABOUT = {  # a page of docs/: the packages and commands that it explains
    "actor.md": "actor doctor platform",
    "adapters.md": "adapters",
    "checkpoints.md": "checkpoint convert run weights",
    "choosing.md": "compare roulette simulate",
    "cluster.md": "distributed launcher_env serve",
    "configuration.md": "init job",
    "data.md": "data",
    "engines.md": "rollout",
    "evaluation.md": "eval evaluation",
    "extending.md": "first_layers step",
    "objectives.md": "algorithms",
    "packing.md": "packing",
    "plan.md": "plan planning",
    "pruning.md": "pruning selection",
    "report.md": "report watch",
    "rewards.md": "rewards",
    "run_directory.md": "observe",
    "testing.md": "accept",
    "tutorial.md": "quickstart",
}
PAGES = {name: page for page, names in _ABOUT.items() for name in names.split()}

_PACKAGE = Path(__file__).parents[1]
_TRAIN_EXTRA = (
    "aiohttp argcomplete megatron packaging plotly psutil pyarrow rich safetensors tokenizers torch transformers"
)
"""Modules that the extra `train` installs."""


def main(argv: list[str] | None = None, display: Display = show_progress) -> int:
    """Run a subcommand, whose progress `display` shows; returns the exit code (docs/run_directory.md lists them)."""
    _repair_output()
    argv = sys.argv[1:] if argv is None else argv
    try:
        if "_ARGCOMPLETE" in os.environ:  # a shell asks for completions
            from dppo_megatron.workbench.commands.completion import complete

            complete(program())
        arguments = parse(program(argv[:1]), argv)
        arguments.command = argv[0]
        quiet_libraries()
        with shown_by(display), logged(show):
            code: int = arguments.run(arguments)
        sys.stdout.flush()  # so that a broken pipe is raised here and not at exit
        return code
    except UserError as error:
        say(f"error: {explained(error, argv[0])}", error)
        return 2
    except ModuleNotFoundError as error:
        if str(error.name) not in _TRAIN_EXTRA.split():  # `torch.x` is missing from a torch that is installed: a bug
            raise
        say(
            f"error: dppo-megatron {argv[0]} needs {error.name}, which the base install does not have;"
            " pip install 'dppo-megatron[train]' (see docs/libraries.md)",
            error,
        )
        return 2
    except RunAborted as stop:
        say(f"stopped: {stop}", stop)
        return 3
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    except BrokenPipeError:
        if not _is_stdout_closed():
            raise
        return 141
    except OSError as error:
        if error.filename is not None or error.errno not in (errno.ENOSPC, errno.EDQUOT):  # a file, not stdout
            raise
        drop(sys.stdout)
        say(f"error: stdout cannot be written: {error.strerror}; some of the output is lost, written files are kept")
        return 2


def explained(error: UserError, command: str) -> str:
    """The message, followed by the page that explains it, unless it names one itself: that of the setting in it, else
    of the package that raised it, else, where that package serves all commands, of the command."""
    from dppo_megatron.config.paths import with_paths
    from dppo_megatron.config.reference import page_for

    message = str(error)
    if "docs/" in message:
        return with_paths(message)
    page = page_for(message) or PAGES.get(_package(error)) or PAGES.get(command, "configuration.md")
    return with_paths(f"{message}{chr(10) if chr(10) in message else ' '}(see docs/{page})")


def _package(error: UserError) -> str:
    """The package whose code raised `error`; empty if it came from another process."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if _PACKAGE in (path := Path(frame.filename)).parents:
            parts = path.relative_to(_PACKAGE).with_suffix("").parts
            return parts[1] if parts[0] in ("steps", "workbench") else parts[0]
    return ""


def _repair_output() -> None:
    """Open stdout or stderr on /dev/null where a service started the command without it (`2>&-`; Python then has None),
    and escape characters that its encoding lacks (LC_ALL=C)."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        if isinstance(stream := getattr(sys, name), io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _is_stdout_closed() -> bool:
    """Whether the broken pipe is our own stdout (`| head`). If so, redirect it to /dev/null."""
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)  # errors are always reported
    if not output.poll(0):
        return False
    drop(sys.stdout)
    return True


def parse(parser: argparse.ArgumentParser, argv: list[str]) -> argparse.Namespace:
    """As `parse_args`, but settings may come before and after options.

    argparse's `parse_intermixed_args` does that only for parsers without subcommands, so subcommands are resolved here.
    """
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction) and argv and argv[0] in action.choices:
            arguments = parse(action.choices[argv[0]], argv[1:])
            if action.dest != argparse.SUPPRESS:
                setattr(arguments, action.dest, argv[0])
            return arguments
        if isinstance(action, argparse._SubParsersAction):
            close = difflib.get_close_matches(argv[0].lower(), action.choices, 1) if argv else []
            if close and not argv[0].startswith("-"):
                parser.error(f"there is no command '{argv[0]}'; did you mean '{close[0]}'?")
            return parser.parse_args(argv)  # prints help, the version or the error
    arguments, unknown = parser.parse_known_intermixed_args(argv)
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}; {_suggestion(unknown, parser)}")
    return arguments


def _suggestion(unknown: list[str], parser: argparse.ArgumentParser) -> str:
    """What may replace the first unknown argument: a setting, an option of a similar name, or else any option."""
    from dppo_megatron.config import other_names, reference

    options = [option for action in parser._actions for option in action.option_strings if option.startswith("--")]
    name, equals, value = unknown[0].lstrip("-").partition("=")
    takes_settings = any(action.dest == "overrides" for action in parser._actions)
    if takes_settings and name in {one.key for one in reference.all_settings()}:
        return f"a setting is given without dashes: {name}={value if equals else (unknown[1:] or ['...'])[0]}"
    if takes_settings and (hint := other_names.other_name(name, value)):
        return hint
    if unknown[0].startswith("-") and (close := difflib.get_close_matches(f"--{name}", options, 1, 0.7)):
        return f"did you mean {close[0]}?"
    return f"the options here are {', '.join(options)}{', and settings are given as key=value' * takes_settings}"


class _Parser(argparse.ArgumentParser):
    def format_help(self) -> str:
        from dppo_megatron.config.paths import with_paths

        return with_paths(super().format_help())

    def error(self, message: str) -> NoReturn:
        """Exit code 2, with a missing CONFIG explained."""
        if message.startswith("the following arguments are required: CONFIG"):
            message = "arguments are required: CONFIG, a YAML file or a shipped one's name, such as quickstart"
        from dppo_megatron.config.paths import with_paths

        # the message quotes what the user typed, or a file name that the shell expanded: it may hold line breaks
        super().error(one_line(with_paths(message), 2000))


def program(wanted: Collection[str] = _COMMANDS) -> argparse.ArgumentParser:
    """The parser of `dppo-megatron`. Only the `wanted` commands get their options, each from its module."""
    parser = _Parser(
        prog="dppo-megatron",
        allow_abbrev=False,
        description="Dynamic Pruning Policy Optimization (arXiv 2603.04135) on Megatron-core.",
        epilog="Begin with docs/tutorial.md; `dppo-megatron config` describes every setting.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, summary in _COMMANDS.items():
        command = commands.add_parser(
            name, help=summary, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
        )
        if name in wanted:
            module = import_module(f"dppo_megatron.workbench.commands.{'evaluate' if name == 'eval' else name}")
            module.add_options(command)
            command.description = getattr(module, "DESCRIPTION", module.__doc__)
            command.set_defaults(run=module.execute)
    return parser
