"""One server's process: started on this machine, and what of one is known wherever it runs.

Servers listen on loopback, or where a job has several machines on the one address by which the others reach this one.
They log to run_dir/servers. The kernel ends a server with the *thread* that has started it (PR_SET_PDEATHSIG), so that
a trainer that is killed leaves no process on a GPU: start them in a thread that outlives them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from dppo_megatron.children import die_with_parent
from dppo_megatron.distributed import loopback_interface
from dppo_megatron.files import append_to, make_directory
from dppo_megatron.rollout.servers.http import hidden
from dppo_megatron.types import UserError

_TERM_S, _KILL_S = 5.0, 15.0
"""How long all servers together may take to end when asked, and when killed."""


class ServerProcess(ABC):
    url: str
    api_key: str
    node: int
    """The job's machine that it runs on; 0 is rank 0's."""
    is_starting: bool
    """Started, and not seen ready since."""
    where: str
    """Where its output is, for messages."""
    visible_devices: str | None

    @property
    @abstractmethod
    def exit_code(self) -> int | None:
        """None while it runs."""

    @abstractmethod
    def start(self) -> None:
        """Start it, again on the same port if it has run before; what still runs of it is ended first."""

    @abstractmethod
    def tail(self) -> str:
        """The last lines of its output, without its key."""

    @property
    def is_running(self) -> bool:
        return self.exit_code is None

    def start_if_ended(self, *, hangs: bool = False) -> bool:
        """Whether it had ended, or `hangs` and has not been started since. A sync and a rollout may both have seen
        that; called by one thread at a time, it is started once, and no process is lost sight of."""
        if self.is_running and (self.is_starting or not hangs):
            return False
        self.start()
        return True

    def is_ready(self, ask: Callable[[], None], deadline: float, timeout_s: float) -> bool:
        """Whether it runs and `ask()` does not raise.

        Raises:
            UserError: it does not answer, and `deadline` (of the monotonic clock, after `timeout_s`) is over.
        """
        try:
            ask()
            problem = ""
        except Exception as error:
            problem = str(error) or type(error).__name__
        if not self.is_running:  # another program may have answered
            return False
        if problem and time.monotonic() > deadline:
            limit = f"rollout.limits.start_timeout_s = {timeout_s:g} s"
            raise UserError(self.with_log(f"was not ready after {limit}: {problem}"))
        self.is_starting = bool(problem)
        return not problem

    def wait_ready(self, ask: Callable[[], None], timeout_s: float) -> None:
        """Return when it is ready. Raises UserError if it ends before, or is not ready in time."""
        deadline = time.monotonic() + timeout_s
        while not self.is_ready(ask, deadline, timeout_s):
            if not self.is_running:
                raise UserError(self.with_log(f"ended with code {self.exit_code} before it was ready"))
            time.sleep(0.5)

    def with_log(self, problem: str) -> str:
        """The sentence for `problem`, with the last lines of its log."""
        return f"the rollout server at {self.url} {problem}; {self.where} ends with:\n{self.tail()}"


@dataclass
class LaunchedServer(ServerProcess):
    """One server process of this machine.

    Args:
        command: its command line; {port} in it is replaced.
        variables: environment beside the trainer's. Holds its key: all users of the machine can read command lines.
        log: file that takes its output.
        api_key: what it asks for; empty if it asks for nothing.
        host: address that it listens on, and no other one.
    """

    command: Sequence[str]
    variables: dict[str, str] = field(repr=False)
    log: Path
    api_key: str = field(default="", repr=False)
    host: str = "127.0.0.1"
    node: int = 0
    port: int = 0
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    starts: int = field(default=0, init=False)
    is_starting: bool = field(default=False, init=False)
    _reserved: socket.socket | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.where = str(self.log)
        self.visible_devices = self.variables.get("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES"))

    @property
    def url(self) -> str:  # type: ignore[override]
        """Its address; the port is chosen at the first start."""
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    @property
    def exit_code(self) -> int | None:
        return self.process.poll() if self.process is not None else None

    def start(self) -> None:
        """See `ServerProcess`. Raises UserError if the address is not this machine's, the log cannot be written, or the
        interpreter is not there."""
        if self.process is not None and self.is_running:
            stop_all([self])
        self.starts += 1
        self.is_starting = True
        if self._reserved is None:
            self._reserved = _reserve(self.host)
            self.port = self._reserved.getsockname()[1]
        try:
            make_directory(self.log.parent)
            log = append_to(self.log)
        except OSError as error:
            raise UserError(f"run_dir: '{self.log}', a server's log, cannot be written: {error.strerror}") from None
        inherited = {key: value for key, value in os.environ.items() if key not in _LAUNCHER_VARIABLES}
        if self.host == "127.0.0.1":  # its processes and the rank that sends it weights are on this machine
            inherited |= loopback_interface()
        command = [part.replace("{port}", str(self.port)) for part in self.command]
        with log:
            try:
                self.process = subprocess.Popen(
                    command,
                    env=inherited | self.variables,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    preexec_fn=partial(_prepare_child, _cores_of_launcher()),
                )
            except OSError as error:
                raise UserError(f"rollout.servers.python: '{command[0]}' cannot be started: {error}") from None

    def stop(self) -> None:
        stop_all([self])

    def tail(self) -> str:
        """See `ServerProcess`; lines with errors first."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        errors = [line for line in lines if "Error" in line or "error:" in line]
        return hidden("\n".join([*errors[-3:], *lines[-5:]]), self.api_key)[-2000:]


def stop_all(servers: Iterable[ServerProcess]) -> None:
    """End the servers of this machine and everything that they started, all at the same time: Slurm kills a step 30 s
    after it has asked it to end. Those of other machines are ended there."""
    started = [one.process for one in servers if isinstance(one, LaunchedServer) and one.process is not None]
    for kind, patience_s in ((signal.SIGTERM, _TERM_S), (signal.SIGKILL, _KILL_S)):  # the second for what they started
        for process in started:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, kind)
        deadline = time.monotonic() + patience_s
        for process in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))


_LAUNCHER_VARIABLES = {
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "OMP_NUM_THREADS"),
    "PYTHONSAFEPATH",
    *("CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),
}
"""torchrun's: an engine that inherits them takes itself for a rank of the trainer. `PYTHONSAFEPATH`: SGLang's script
would not find the files beside it. And what is set for the trainer's CUDA alone: one hardware queue would slow an
engine down, and vLLM's sleep mode refuses expandable segments."""


def address_toward(host: str) -> str:
    """The address of this machine by which `host` would see it; loopback if that is this machine itself.

    Example: on a node with 10.0.0.7 in the cluster's network, address_toward("10.0.0.1") == "10.0.0.7"
    """
    # connecting a datagram socket only reads the routing table: `host` need not answer
    family, kind, *_, address = socket.getaddrinfo(host, 80, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def _reserve(host: str) -> socket.socket:
    """Bound to a free port, and not listened at: the kernel gives the port to no other program in the minute before the
    server binds it, which it can, since both set SO_REUSEADDR. Raises UserError for an address of another machine."""
    held = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        held.bind((host, 0))
    except OSError as error:
        held.close()
        raise UserError(f"rollout servers cannot listen on {host}, this machine says: {error.strerror}") from None
    return held


def _cores_of_launcher() -> set[int]:
    """Cores that this process's parent may use. torchrun's --numa-binding gives each rank those beside its own GPU: a
    server of all eight GPUs, started by rank 0, would share the first one's."""
    try:
        return os.sched_getaffinity(os.getppid())
    except (AttributeError, OSError):  # no such call on macOS; a parent that has ended
        return set()


def _prepare_child(cores: set[int]) -> None:
    """Between fork and exec."""
    if cores:
        os.sched_setaffinity(0, cores)
    die_with_parent()
