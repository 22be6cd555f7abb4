"""A real Slurm of two nodes on this machine: its own configuration, ports, keys and state, under one directory.

Needs root and Debian's packages (`apt-get install slurm-wlm munge`). Both nodes are this machine under two names. The
names must resolve, as on a cluster, so they are added to /etc/hosts where they do not. The nodes have no GPUs: Slurm
22.05 loses count of a job's GPUs when one of its nodes comes back while the job is to be run again ("gres/gpu: node
offset invalid", seen), and the job then waits for ever.

What differs from a cluster's settings, so that a test takes minutes: a node that does not answer is down after 10 s and
not 300, and a job that is queued again may start after 5 s and not 120 (its credentials' life time).
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

NODES = ("dppo-n1", "dppo-n2")
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch")
_CONF = """\
ClusterName=dppo
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort=17100
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket,cred_expire=5
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SlurmUser=root
SlurmdUser=root
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool.%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd.%n.log
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
SlurmdTimeout=10
SlurmctldParameters=enable_configless
SlurmdParameters=config_overrides
NodeName={nodes} NodeHostname={host} NodeAddr=127.0.0.1 Port=[17101-17102] CPUs=2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """Why there can be no such cluster here; empty if there can."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    if absent:
        return f"no {', '.join(absent)}: apt-get install slurm-wlm munge"
    return "" if os.geteuid() == 0 else "Slurm's daemons for two nodes on one machine need root"


def until(holds: Callable[[], object], seconds: float, what: Callable[[], str] | str) -> float:
    """Wait until `holds()`; returns the seconds that it took. AssertionError with `what` after `seconds`."""
    begun = time.monotonic()
    while not holds():
        if time.monotonic() - begun > seconds:
            raise AssertionError(what if isinstance(what, str) else what())
        time.sleep(0.25)
    return time.monotonic() - begun


class Cluster:
    """Runs from construction to `stop`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.environment = os.environ | {"SLURM_CONF": str(directory / "slurm.conf"), "PATH": _path()}
        host = socket.gethostname().partition(".")[0]
        directory.chmod(0o755)
        for name in ("state", *(f"spool.{node}" for node in NODES)):
            (directory / name).mkdir()
        (directory / "slurm.conf").write_text(_CONF.format(host=host, directory=directory, nodes="dppo-n[1-2]"))
        _make_names_resolve()
        (directory / "munge.key").write_bytes(os.urandom(128))
        (directory / "munge.key").chmod(0o600)
        files = [f"--{name}-file={directory}/munge.{name}" for name in ("key", "pid", "log", "seed")]
        self._run("munged", "--force", f"--socket={directory}/munge.socket", *files)
        self._run("slurmctld")
        for node in NODES:
            self.start_node(node)
        until(lambda: self._run("sinfo", "-h", "-o", "%T %D") == "idle 2", 60, lambda: f"no nodes: {self._state()}")

    def start_node(self, node: str) -> None:
        """Its daemon."""
        self._run("slurmd", "-N", node)

    def end_node(self, node: str) -> None:
        """As when its power fails: daemon, step managers and all they have started, at once."""
        daemon = int((self.directory / f"slurmd.{node}.pid").read_text())
        os.kill(daemon, signal.SIGKILL)
        managers = [pid for pid, command in processes().items() if command.startswith("slurmstepd") and node in command]
        for pid in [pid for manager in managers for pid in [manager, *descendants(manager)]] or _of_node(node):
            _kill(pid)

    def submit(self, script: Path, *arguments: str, options: tuple[str, ...] = (), **variables: str | None) -> str:
        """Its job id. A variable that is None is not set."""
        environment = self.environment | variables
        said = subprocess.run(
            ["sbatch", "--parsable", *options, str(script), *arguments],
            env={name: value for name, value in environment.items() if value is not None},
            cwd=self.directory,
            capture_output=True,
            text=True,
            check=True,
        )
        return said.stdout.strip()

    def job(self, job: str) -> dict[str, str]:
        """What Slurm says of it, by field."""
        text = self._run("scontrol", "show", "job", "-o", job)
        return dict(part.split("=", 1) for part in text.split() if "=" in part)

    def is_free(self) -> bool:
        """No job runs or is ending."""
        return not self._run("squeue", "-h", "-t", "RUNNING,COMPLETING,STAGE_OUT")

    def is_down(self, node: str) -> bool:
        """Slurm has found out."""
        return "down" in self._run("sinfo", "-h", "-n", node, "-o", "%T").lower()

    def signal_batch(self, job: str, name: str) -> None:
        """To the batch shell alone, as `--signal=B:` does before the time limit."""
        self._run("scancel", "--batch", f"--signal={name}", job)

    def output(self, job: str) -> str:
        """All that a job has said, for messages."""
        files = [self.directory / f"slurm-{job}.out", *sorted((self.directory / "logs").glob(f"{job}-*.log"))]
        return "\n".join(
            f"--- {file.name}\n{file.read_text(errors='replace')[-3000:]}" for file in files if file.exists()
        )

    def stop(self) -> None:
        """End every job and daemon."""
        subprocess.run(["scancel", "--user=root"], env=self.environment, check=False)
        for name in (*(f"slurmd.{node}" for node in NODES), "slurmctld", "munge"):
            file = self.directory / f"{name}.pid"
            if file.exists():
                _kill(int(file.read_text()), signal.SIGTERM)

    def _state(self) -> str:
        logs = [(self.directory / f"slurmd.{node}.log").read_text()[-1500:] for node in NODES]
        return "\n".join([self._run("sinfo", "-R"), *logs, (self.directory / "slurmctld.log").read_text()[-1500:]])

    def _run(self, *command: str) -> str:
        said = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)
        assert said.returncode == 0, f"{command}: {said.stdout}{said.stderr}"
        return said.stdout.strip()


def processes() -> dict[int, str]:
    """Command line of every process that can be seen, by id."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            found[int(entry.name)] = (
                (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            )
        except OSError:
            continue
    return found


def descendants(pid: int) -> list[int]:
    """All processes under `pid`."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found, new = [], [pid]
    while new:
        new = [child for child, parent in parents.items() if parent in new]
        found += new
    return found


def _of_node(node: str) -> list[int]:
    """Processes that Slurm has started under this node's name."""
    found = []
    for pid in processes():
        try:
            variables = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            continue
        if f"SLURMD_NODENAME={node}".encode() in variables.split(b"\0"):
            found.append(pid)
    return found


def of_job(text: str) -> list[int]:
    """Processes whose command line holds `text`: a run's directory, say, which no other process has."""
    return [pid for pid, command in processes().items() if text in command and pid != os.getpid()]


def _kill(pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _make_names_resolve() -> None:
    for node in NODES:
        try:
            socket.gethostbyname(node)
        except OSError:
            with open("/etc/hosts", "a", encoding="ascii") as hosts:
                hosts.write(f"127.0.0.1 {node}  # make test-slurm\n")


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
