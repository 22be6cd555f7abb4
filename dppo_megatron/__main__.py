"""The program: `dppo-megatron COMMAND`, and `python -m dppo_megatron COMMAND` where the script is not on the path, as
in torchrun. It imports nothing before it is asked to, so that Control-C meanwhile is said like any other."""

from __future__ import annotations

import sys


def main() -> int:
    """Run a subcommand; returns the exit code."""
    try:
        from dppo_megatron.texts import guard_errors
        from dppo_megatron.workbench.cli import main as command

        guard_errors()
        return command()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
