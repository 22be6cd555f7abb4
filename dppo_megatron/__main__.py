"""The program: `dppo-megatron COMMAND`, or `python -m dppo_megatron COMMAND` if the script is not on the path, as under
torchrun. Imports are inside `main`, so that Control-C during them prints `interrupted` and no traceback."""

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
