"""Python processes that this package starts: how they find it, and how they end with the process that started them.

Standard library only: grader processes import this file, and start in hundredths of a second.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1


def package_environment() -> dict[str, str]:
    """This process's environment, in which another Python finds the package where it is now."""
    root = Path(__file__).resolve().parents[1]
    if root.name in ("site-packages", "dist-packages"):  # found anyway; a server's Python has packages of its own
        return dict(os.environ)
    return dict(os.environ) | {"PYTHONPATH": os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))}


def python_command(module: str, *arguments: str, ranks: int = 1) -> list[str]:
    """The command line of `python -m module`, under torchrun for several ranks.

    With -P: a `json.py` in the working directory must not shadow the standard library. The processes of torchrun do not
    inherit that, they need PYTHONSAFEPATH=1.
    """
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
    return [sys.executable, "-P", "-m", *(torchrun if ranks > 1 else []), module, *arguments]


def start_python(
    module: str, *arguments: str, ranks: int = 1, variables: Mapping[str, str] | None = None, **options: Any
) -> subprocess.Popen[Any]:
    """Start `python_command`. Raises OSError.

    Args:
        variables: environment beside this process's own.
        options: of Popen.
    """
    environment = package_environment() | dict(variables or {})
    return subprocess.Popen(python_command(module, *arguments, ranks=ranks), env=environment, **options)


def ignore_signals(*kinds: signal.Signals) -> None:
    """Ignore `kinds`, and SIGUSR1: Slurm sends its warning before a time limit to every process of a step, and only the
    trainer can act on it by saving. The default action would end the process."""
    for kind in (signal.SIGUSR1, *kinds):
        signal.signal(kind, signal.SIG_IGN)


def die_with_parent(kind: signal.Signals = signal.SIGTERM, parent: int = 0) -> None:
    """Have the kernel send `kind` to this process when its parent ends, and ignore SIGUSR1. Only Linux does the former.

    The parent is the *thread* that has started this process. May be called between fork and exec.

    Args:
        parent: its process id, where known: if it has ended before the kernel was asked, this process ends now.
    """
    ignore_signals()
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, kind)
    if parent and os.getppid() != parent:
        os._exit(0)
