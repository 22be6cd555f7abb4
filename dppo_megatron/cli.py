"""The command line: finds the command, and says mistakes in one line with the right exit code.

Help and mistakes must not wait for torch and Megatron, so each command imports what it needs only when it runs.
"""

from __future__ import annotations

import argparse
import os
import select
import sys

from dppo_megatron import __version__
from dppo_megatron.commands import (
    compare,
    completion,
    config,
    convert,
    data,
    doctor,
    evaluate,
    plan,
    quickstart,
    report,
    serve,
    simulate,
    train,
    watch,
)
from dppo_megatron.commands.terminal import say, show_progress
from dppo_megatron.mistakes import explained
from dppo_megatron.types import GuardStop, UserError, Watch

_COMMANDS = (  # in the order of --help
    *(train, compare, quickstart, plan, evaluate, report, serve, watch),
    *(simulate, doctor, convert, data, config, completion),
)


def main(argv: list[str] | None = None, watch: Watch = show_progress) -> int:
    """Run a subcommand; returns the exit code (docs/run_directory.md lists them).

    Args:
        watch: shows the progress of what takes long.
    """
    _open_what_is_closed()
    parser = program()
    if "_ARGCOMPLETE" in os.environ:  # a shell asks what could stand here
        completion.complete(parser)
    argv = sys.argv[1:] if argv is None else argv
    arguments = parse(parser, argv)
    arguments.watch, arguments.command = watch, argv[0]
    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()  # so that a broken pipe is raised here and not at exit
        return code
    except UserError as error:
        say(f"error: {explained(error, arguments.command)}")
        return 2
    except GuardStop as stop:
        say(f"stopped: {stop}")
        return 3
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    except BrokenPipeError:
        if not _output_has_gone():
            raise
        return 141
    except OSError as error:
        if not _output_is_full():
            raise
        say(f"error: stdout cannot be written: {error.strerror}; some of the output is lost, what was done is done")
        return 2


def _open_what_is_closed() -> None:
    """A service may start a command without stdout or stderr (`2>&-`), and Python then has None in its place."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115


def _output_has_gone() -> bool:
    """Whether our own stdout was closed by its reader (`| head`), and not some other pipe.

    If so, stdout goes to /dev/null: the interpreter would complain when it flushes at exit.
    """
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)  # errors are always reported
    if not output.poll(0):
        return False
    _discard_output()
    return True


def _output_is_full() -> bool:
    """Whether our own stdout takes no more (a log file on a full disk), and not some other file."""
    try:
        sys.stdout.flush()
    except OSError:
        _discard_output()
        return True
    return False


def _discard_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def parse(parser: argparse.ArgumentParser, argv: list[str]) -> argparse.Namespace:
    """As `parse_args`, but settings may stand before and after options.

    argparse's `parse_intermixed_args` does that only for parsers without subcommands, so subcommands are resolved here.
    """
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction) and argv and argv[0] in action.choices:
            arguments = parse(action.choices[argv[0]], argv[1:])
            if action.dest != argparse.SUPPRESS:
                setattr(arguments, action.dest, argv[0])
            return arguments
        if isinstance(action, argparse._SubParsersAction):
            return parser.parse_args(argv)  # prints help, the version or the error
    return parser.parse_intermixed_args(argv)


def program() -> argparse.ArgumentParser:
    """The parser of `dppo-megatron` with all its commands."""
    parser = argparse.ArgumentParser(
        prog="dppo-megatron",
        allow_abbrev=False,
        description="Dynamic Pruning Policy Optimization (arXiv 2603.04135) on Megatron-core.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in _COMMANDS:
        command.add(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
