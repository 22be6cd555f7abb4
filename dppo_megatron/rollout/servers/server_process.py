"""Server processes on this machine: their command lines, start, readiness and end.

Servers listen on loopback or, in a job of several machines, on the one address by which the others reach this one.
They log to run_dir/servers. The kernel kills a server when the *thread* that started it ends (PR_SET_PDEATHSIG), so
that a killed trainer leaves no process on a GPU. Start them in a thread that outlives them.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from dppo_megatron.children import die_with_parent
from dppo_megatron.config.resolved_sets import longest_sequence
from dppo_megatron.config.schema import Config
from dppo_megatron.distributed import loopback_interface
from dppo_megatron.files import append_to, make_directory
from dppo_megatron.launcher_env import launched_here
from dppo_megatron.rollout.fp8_weights import check_split, quantized_arguments, quantized_variables
from dppo_megatron.rollout.servers.connect import ROUTED_EXPERTS, configured_key
from dppo_megatron.rollout.servers.device_map import servers_devices
from dppo_megatron.rollout.servers.http import hidden, listens
from dppo_megatron.rollout.servers.sglang import recording_arguments, sglang_command, sglang_environment
from dppo_megatron.rollout.servers.vllm import vllm_command, vllm_environment
from dppo_megatron.texts import one_line
from dppo_megatron.types import UserError
from dppo_megatron.weights.provider import model_architecture
from dppo_megatron.weights.torch_dist import is_torch_dist

_DRAFTS_ON_CPU = {
    "vllm": "vLLM's log-probabilities of drafted tokens are not the model's (0.32.0: uniform, 0 or NaN)",
    "sglang": "SGLang takes the likeliest token wherever it has drafted one, whatever the temperature",
}
_AN_ERROR = re.compile(r"(?:^|\s)([\w.]+Error: .+)", re.MULTILINE)
_QUOTED_BYTES = 1 << 20
"""How much of a log's end messages are taken from: a log of weeks would fill gigabytes of memory."""
_TERM_S, _KILL_S = 5.0, 15.0
"""How long all servers together may take to end after SIGTERM, and after SIGKILL."""


@dataclass
class LaunchedServer:
    """One server process of this machine.

    Args:
        command: its command line; {port} in it is replaced.
        variables: environment variables in addition to the trainer's, with the key: all users can read command lines.
        api_key: the key that it demands; empty if it demands none.
        host: the only address that it listens on.
    """

    command: Sequence[str]
    variables: dict[str, str] = field(repr=False)
    log: Path
    api_key: str = field(default="", repr=False)
    host: str = "127.0.0.1"
    node: int = 0
    port: int = 0
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _reserved: socket.socket | None = field(default=None, init=False)
    _has_listened: bool = field(default=False, init=False)
    """It has been seen to listen since its last start."""
    _begun_s: float = field(default=0.0, init=False)
    """Its last start, on the monotonic clock."""
    _begun_at: int = field(default=0, init=False)
    """Where the log of its last start begins, in bytes."""

    @property
    def visible_devices(self) -> str | None:
        """Its CUDA_VISIBLE_DEVICES; None: not set."""
        return self.variables.get("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES"))

    @property
    def url(self) -> str:
        """Valid after the first start, which chooses the port."""
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self.process.poll() if self.process is not None else None

    @property
    def is_running(self) -> bool:
        return self.exit_code is None

    def has_closed(self) -> bool:
        """Whether it has stopped listening: vLLM's front end does when one of its engines dies, see `http.py`."""
        now = listens(self.url)
        closed, self._has_listened = self._has_listened and not now, now
        return closed

    def start(self) -> None:
        """Start it, on the same port if it has run before. Processes left from an earlier start are stopped first.
        Raises UserError if it cannot listen, its log cannot be written, or the interpreter is missing."""
        self._has_listened, self._begun_s = False, time.monotonic()
        if self.process is not None:  # vLLM's engine may outlive its front end and keep the GPU's memory
            stop_all([self])
        if self._reserved is None:
            self._reserved = _reserve(self.host)
            self.port = self._reserved.getsockname()[1]
        try:
            make_directory(self.log.parent)
            log = append_to(self.log)
        except OSError as error:
            raise UserError(f"run_dir: '{self.log}', a server's log, cannot be written: {error.strerror}") from None
        inherited = {key: value for key, value in os.environ.items() if key not in _LAUNCHER_VARIABLES}
        if self.host == "127.0.0.1":  # its processes and the rank that sends it weights are all on this machine
            inherited |= loopback_interface()
        command = [part.replace("{port}", str(self.port)) for part in self.command]
        # SGLang and FlashInfer compile kernels with ninja, which is installed beside their interpreter
        programs, path = os.path.abspath(os.path.dirname(command[0])), inherited.get("PATH", os.defpath)
        if os.path.dirname(command[0]) and programs not in path.split(os.pathsep):
            inherited["PATH"] = programs + os.pathsep + path
        self._begun_at = log.tell()
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

    def is_ready(self, ask: Callable[[], None], deadline: float, timeout_s: float) -> bool:
        """Whether it runs and `ask()` does not raise. Raises UserError if it is not ready at `deadline`, on the
        monotonic clock; `timeout_s` is for the message."""
        try:
            ask()
            problem = ""
        except Exception as error:
            problem = str(error) or type(error).__name__
        if not self.is_running:  # then another program may have answered
            return False
        if problem and time.monotonic() > deadline:
            limit = f"rollout.limits.start_timeout_s = {timeout_s:g} s"
            raise UserError(self.with_log(f"was not ready after {limit}: {problem}"))
        return not problem

    def wait_ready(self, ask: Callable[[], None], timeout_s: float) -> None:
        """Return when it is ready. Raises UserError if it ends before, or is not ready `timeout_s` after its start."""
        deadline = self._begun_s + timeout_s
        while not self.is_ready(ask, deadline, timeout_s):
            if not self.is_running:
                raise UserError(self.with_log(f"ended with code {self.exit_code} before it was ready"))
            time.sleep(0.5)

    def last_error(self) -> str:
        """The last line since its start that names an error, without its key; empty: none. vLLM's front end dies of an
        EngineDeadError, which only points to that of its engine."""
        with contextlib.suppress(OSError):
            errors = _AN_ERROR.findall(self._end_of_log(self._begun_at))
            errors = [error for error in errors if "EngineDeadError" not in error]
            return one_line(hidden(errors[-1], self.api_key)) if errors else ""
        return ""

    def with_log(self, problem: str) -> str:
        """A message for `problem` with lines of its log, without its key: the last errors, then the last lines."""
        lines = self._end_of_log().splitlines()
        errors = [line for line in lines if "Error" in line or "error:" in line]
        tail = hidden("\n".join([*errors[-3:], *lines[-5:]]), self.api_key)[-2000:]
        if lacks := re.search(r"No module named '?(vllm|sglang)(?![\w.])", tail):
            own = "the Python of an environment that has it"
            tail += f"\nrollout.servers.python: {self.command[0]} has no {lacks[1]}; set it to {own}"
        return f"the rollout server at {self.url} {problem}; {self.log} ends with:\n{tail}"

    def _end_of_log(self, begin: int = 0) -> str:
        """From byte `begin`, or the last whole lines in `_QUOTED_BYTES`: half a line may begin with half a key."""
        with self.log.open("rb") as file:
            cut = file.seek(0, os.SEEK_END) - _QUOTED_BYTES
            file.seek(max(begin, cut))
            text = file.read(_QUOTED_BYTES).decode(errors="replace")
        return text.partition("\n")[2] if cut > begin else text


def make_servers(
    config: Config, host: str = "127.0.0.1", node: int = 0, name: str = "", *, has_actor: bool = True
) -> list[LaunchedServer]:
    """`rollout.servers.count` servers for this machine, not started yet.

    Each gets its key through its environment and demands it at every path (`in_engine`).

    Args:
        host: address that they listen on.
        node: this machine's number in the job.
        name: prefix of their logs' names.
        has_actor: whether ranks on this machine train, so that their GPUs are in use.
    """
    rollout = config.rollout
    key = configured_key(rollout)
    python = rollout.servers.python or sys.executable
    cpu = not torch.cuda.is_available()
    longest, _ = longest_sequence(config)
    vllm = rollout.engine == "vllm"
    build = vllm_command if vllm else sglang_command
    model = str(Path(config.model.hf_path).absolute())
    command = build(rollout, python, model, longest, config.model.dtype, cpu=cpu, host=host)
    if rollout.quantization != "off":
        architecture = model_architecture(config.model)
        check_split(rollout, architecture)
        command += quantized_arguments(rollout.engine, architecture)
    if is_torch_dist(config.model.hf_path) or rollout.quantization != "off":
        if rollout.speculation.method == "eagle3":
            raise UserError(
                "rollout.speculation.method = eagle3: servers begin without weights where the checkpoint is Megatron's"
                " or rollout.quantization is on; so would the draft model, which no sync brings; use ngram or suffix"
            )
        if not any(one.split("=")[0] == "--load-format" for one in rollout.servers.args):
            command += ["--load-format", "dummy"]  # engines cannot load it; the first weight sync sends the weights
    if config.actor.routing_replay == "engine":
        if vllm and cpu:
            raise UserError(
                "actor.routing_replay = engine: vLLM records routed experts on GPUs only (it needs Triton); replay the"
                " actor's own with actor.routing_replay = actor"
            )
        command += [ROUTED_EXPERTS, *([] if vllm or cpu else recording_arguments(rollout.servers.args))]
    if rollout.speculation.method != "none" and cpu:
        raise UserError(
            f"rollout.speculation.method = {rollout.speculation.method}: on a CPU {_DRAFTS_ON_CPU[rollout.engine]};"
            " draft on GPUs"
        )
    variables = vllm_environment(cpu, rollout.servers.count) if vllm else sglang_environment(rollout, cpu=cpu)
    variables |= quantized_variables(rollout)
    ranks = launched_here() if has_actor and not rollout.servers.colocate else 0
    devices = servers_devices(rollout.servers.gpus, os.environ.get("CUDA_VISIBLE_DEVICES", ""), ranks)
    servers = []
    for index in range(rollout.servers.count):
        gpus = {"CUDA_VISIBLE_DEVICES": devices[index]} if devices else {}
        log = Path(config.run_dir) / "servers" / f"{name}server_{index}.log"
        own_key = key or secrets.token_urlsafe(32)
        guard = {"VLLM_API_KEY" if vllm else "DPPO_SERVER_KEY": own_key}
        servers.append(LaunchedServer(command, variables | gpus | guard, log, own_key, host, node))
    return servers


def stop_all(servers: Iterable[LaunchedServer]) -> None:
    """Stop servers and their child processes, all at the same time: Slurm kills a step 30 s after it asks it to end."""
    started = [one.process for one in servers if one.process is not None]
    for kind, timeout_s in ((signal.SIGTERM, _TERM_S), (signal.SIGKILL, _KILL_S)):  # SIGKILL always: for the children
        for process in started:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                # The group may outlive its leader. While it has a member, the kernel gives no process the leader's pid:
                # if a process has that pid after the leader was waited for, the group is gone.
                if process.returncode is None or not os.path.exists(f"/proc/{process.pid}"):
                    os.killpg(process.pid, kind)
        deadline = time.monotonic() + timeout_s
        for process in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))


_LAUNCHER_VARIABLES = {
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "OMP_NUM_THREADS"),
    "PYTHONSAFEPATH",
    *("CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),
}
"""Variables that servers must not inherit. torchrun's: an engine would take itself for a rank of the trainer.
`PYTHONSAFEPATH`: SGLang's script would not find the files beside it. Those for the trainer's CUDA: one hardware queue
would slow an engine down, and vLLM's sleep mode refuses expandable segments."""


def address_toward(host: str) -> str:
    """This machine's address on the route to `host`; loopback if `host` is this machine.

    Example: on a node with 10.0.0.7 in the cluster's network, address_toward("10.0.0.1") == "10.0.0.7"
    """
    # connecting a datagram socket only reads the routing table: `host` need not answer
    family, kind, *_, address = socket.getaddrinfo(host, 80, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def _reserve(host: str) -> socket.socket:
    """A socket bound to a free port without listening: until the server binds it, the kernel gives it to no other
    program. The server can bind it, since both set SO_REUSEADDR. Raises UserError for an address of another machine."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, 0))
    except OSError as error:
        bound.close()
        raise UserError(f"rollout servers cannot listen on {host}: {error.strerror}") from None
    return bound


def _cores_of_launcher() -> set[int]:
    """Cores that this process's parent may use, for servers. torchrun's --numa-binding restricts each rank to the cores
    near its GPU, and a server of all eight GPUs, started by rank 0, would inherit rank 0's."""
    try:
        return os.sched_getaffinity(os.getppid())
    except (AttributeError, OSError):  # no such call on macOS; a parent that has ended
        return set()


def _prepare_child(cores: set[int]) -> None:
    """Runs between fork and exec."""
    if cores:
        os.sched_setaffinity(0, cores)
    die_with_parent()
