"""Servers that the trainer starts on its own machine, and ends with the run.

They listen on loopback only, log to run_dir/servers, and are asked by the kernel to end when the trainer dies, so that
a killed run leaves no process on a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dppo_megatron.types import UserError

_PR_SET_PDEATHSIG = 1
_GRACE_S = 15.0


@dataclass
class LaunchedServer:
    """One server process.

    Args:
        command: its command line; {port} in it is replaced.
        variables: environment beside the trainer's own. The place for its key: command lines can be read by everybody
            on the machine.
        log: file that takes its output.
        api_key: what it asks for; empty if it asks for nothing.
    """

    command: Sequence[str]
    variables: dict[str, str] = field(repr=False)
    log: Path
    api_key: str = field(default="", repr=False)
    port: int = 0
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    is_starting: bool = field(default=False, init=False)
    """Started, and not seen ready since."""

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def is_running(self) -> bool:
        """The process has not ended."""
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        """Start it, again on the same port if it has run before. Raises UserError if the interpreter is not there."""
        self.port, self.is_starting = self.port or _free_port(), True
        self.log.parent.mkdir(parents=True, exist_ok=True)
        inherited = {key: value for key, value in os.environ.items() if key not in _LAUNCHER_VARIABLES}
        command = [part.replace("{port}", str(self.port)) for part in self.command]
        with open(self.log, "ab") as log:
            try:
                self.process = subprocess.Popen(
                    command,
                    env=inherited | self.variables,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    preexec_fn=_end_with_parent if sys.platform == "linux" else None,
                )
            except OSError as error:
                raise UserError(f"rollout.servers.python: '{command[0]}' cannot be started: {error}") from None

    def wait_ready(self, is_ready: Callable[[], None], timeout_s: float) -> None:
        """Return when `is_ready()` no longer raises.

        Raises:
            UserError: the process ended or was not ready in time; with the last lines of its log.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                is_ready()
                self.is_starting = False
                return
            except Exception as error:
                problem = str(error)
            if not self.is_running:
                assert self.process is not None
                problem = f"ended with code {self.process.returncode} before it was ready"
            elif time.monotonic() < deadline:
                time.sleep(0.5)
                continue
            else:
                problem = f"was not ready after rollout.limits.start_timeout_s = {timeout_s:g} s: {problem}"
            raise UserError(f"the rollout server at {self.url} {problem}; {self.log} ends with:\n{self._tail()}")

    def stop(self) -> None:
        """End it and everything it started."""
        if self.process is None:
            return
        for kind, grace_s in ((signal.SIGTERM, _GRACE_S), (signal.SIGKILL, _GRACE_S)):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, kind)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(grace_s if kind == signal.SIGKILL else min(grace_s, 5.0))
                if kind == signal.SIGKILL:
                    break

    def _tail(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        errors = [line for line in lines if "Error" in line or "error:" in line]
        tail = "\n".join([*errors[-3:], *lines[-5:]])[-2000:]
        return tail.replace(self.api_key, "***") if self.api_key else tail


_LAUNCHER_VARIABLES = {
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "OMP_NUM_THREADS"),
    *("CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),
}
"""torchrun's: an engine that inherits them takes itself for a rank of the trainer. And what is set for the trainer's
CUDA alone: one hardware queue would slow an engine down, and vLLM's sleep mode refuses expandable segments."""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
