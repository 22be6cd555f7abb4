"""Starts Python processes that can import this package and that end with the process that started them.

Uses only the standard library: grader processes import this file and should start in hundredths of a second.
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
    """This process's environment, extended so that another Python imports this same copy of the package."""
    root = Path(__file__).resolve().parents[1]
    if root.name in ("site-packages", "dist-packages"):  # found anyway; other packages there would shadow a server's
        return dict(os.environ)
    return dict(os.environ) | {"PYTHONPATH": os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))}


def python_command(module: str, *arguments: str, ranks: int = 1) -> list[str]:
    """The command line of `python -m module`, under torchrun for several ranks.

    With -P, so that a `json.py` in the working directory does not shadow the standard library. torchrun does not pass
    -P on to its ranks; they need PYTHONSAFEPATH=1.
    """
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
    return [sys.executable, "-P", "-m", *(torchrun if ranks > 1 else []), module, *arguments]


def start_python(
    module: str, *arguments: str, ranks: int = 1, variables: Mapping[str, str | None] | None = None, **options: Any
) -> subprocess.Popen[Any]:
    """Start `python_command` with `variables` added to this environment, or removed from it where None; `options` are
    Popen's. Raises OSError."""
    environment = {k: v for k, v in {**package_environment(), **(variables or {})}.items() if v is not None}
    return subprocess.Popen(python_command(module, *arguments, ranks=ranks), env=environment, **options)


def ignore_signals(*kinds: signal.Signals) -> None:
    """Ignore `kinds` and SIGUSR1, whose default action would end the process: Slurm sends it before a time limit to
    every process of a step, but only the trainer acts on it, by saving."""
    for kind in (signal.SIGUSR1, *kinds):
        signal.signal(kind, signal.SIG_IGN)


def die_with_parent(kind: signal.Signals = signal.SIGTERM, parent: int = 0) -> None:
    """Have the kernel send `kind` to this process when its parent ends (Linux only), and ignore SIGUSR1.

    The parent is the *thread* that has started this process. May be called between fork and exec. `parent`: its
    process id, if known: if it ended before this call, this process exits at once.
    """
    ignore_signals()
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, kind)
    if parent and os.getppid() != parent:
        os._exit(0)
