"""Servers on every machine of a job: started there, watched there, asked for again from rank 0, and gone with it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from support.engines.fake_vllm import fake_python
from support.engines.stub import completion
from support.job import REPOSITORY, job_config, write_job_files
from support.job import settings as job_settings
from support.launch import RankError, run_ranks
from support.processes import command_line, is_gone, processes_of, running, until
from support.served import rank_zero

from dppo_megatron.config.schema import Config
from dppo_megatron.distributed import from_rank_zero, gather_all
from dppo_megatron.job import prepare_job
from dppo_megatron.rollout import launched_servers
from dppo_megatron.rollout.client.remote import Nodes
from dppo_megatron.rollout.engine import Request, Sampling
from dppo_megatron.rollout.launched_servers import JobServers
from dppo_megatron.rollout.server_engine import ServerEngine
from dppo_megatron.rollout.servers import server_process
from dppo_megatron.rollout.servers.http import Refused, Unreachable
from dppo_megatron.rollout.servers.member import Member
from dppo_megatron.rollout.servers.rollout_work import grouped
from dppo_megatron.rollout.servers.server_process import LaunchedServer
from dppo_megatron.types import Completion, Prompt

LIMIT = 12


def fake_config(files: Path, run_dir: Path, **extra: Any) -> Config:
    return job_config(
        files,
        run_dir,
        rollout__engine="vllm",
        rollout__completions_per_prompt=3,
        rollout__servers__launch="local",
        rollout__servers__python=fake_python(files),
        rollout__sync__verify_every=0,
        **extra,
    )


_STUBBORN = "import signal, time; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"


def test_all_are_asked_to_end_before_one_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that does not hear SIGTERM costs the others nothing: Slurm gives a whole step 30 s. Seen by the order of
    signals and waits, and not by a clock; what it has started ends with it."""
    monkeypatch.setattr(server_process, "_TERM_S", 0.1)
    servers = [LaunchedServer([sys.executable, "-c", _STUBBORN], {}, tmp_path / f"{i}.log") for i in range(3)]
    for server in servers:
        server.start()
    pids = [server.process.pid for server in servers if server.process is not None]
    until(lambda: all("deaf" in server.log.read_text() for server in servers), "they have not begun")
    calls: list[tuple[str, int]] = []
    send, wait = os.killpg, subprocess.Popen.wait
    monkeypatch.setattr(os, "killpg", lambda pid, kind: (calls.append((f"signal {kind:d}", pid)), send(pid, kind)))
    monkeypatch.setattr(
        subprocess.Popen, "wait", lambda self, limit=None: (calls.append(("wait", self.pid)), wait(self, limit))[1]
    )
    server_process.stop_all(servers)
    assert calls == [(what, pid) for what in ("signal 15", "wait", "signal 9", "wait") for pid in pids]
    assert all(map(is_gone, pids))


_LEAVES_ONE = "import subprocess as s, time; print('left', s.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"


def test_what_a_killed_server_has_left_ends_before_the_next(tmp_path: Path) -> None:
    """vLLM's engine, whose front end was killed, holds the memory of its GPU. Not the process that has the dead one's
    number by now."""
    server = LaunchedServer([sys.executable, "-c", _LEAVES_ONE], {}, tmp_path / "log")
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as stranger:
        try:
            server.start()
            until(lambda: "left" in server.log.read_text(), "it has not begun")
            left = int(server.log.read_text().split()[-1])
            assert server.process is not None
            server.process.kill()
            server.process.wait()
            server.start()
            assert not running(left) and server.is_running
            server_process.stop_all([server])
            server.process.pid = stranger.pid
            server_process.stop_all([server])
            assert stranger.poll() is None
        finally:
            stranger.kill()
            server_process.stop_all([server])


def test_a_restart_quotes_the_last_error_since_the_last_start(files: Path, tmp_path: Path) -> None:
    """The engine's: its front end's only says that it is dead. Without the key or a proxy's password, and without
    earlier starts."""
    lines = [
        "RuntimeError: no kernel for sesame at http://me:p@s's@proxy:80/x",
        "x.EngineDeadError: EngineCore encountered an issue.",
        "at most `OSError: 24`",
    ]
    fails_once = f"import os; os.mkdir({str(tmp_path / 'been')!r}); print({chr(10).join(lines)!r}, flush=True)"
    server = LaunchedServer([sys.executable, "-c", fails_once], {}, tmp_path / "log", api_key="sesame")
    servers = JobServers(fake_config(files, tmp_path / "run"), Nodes.of([0], 0))
    servers.local = [server]
    try:
        server.start()
        assert server.process is not None
        server.process.wait()
        [why] = servers.restart([]).values()
        assert (
            why
            == f"had ended (its log: {server.log}, last error: RuntimeError: no kernel for *** at http://***@proxy:80/x)"
        )
        server.process.wait()
        [why] = servers.restart([]).values()
        assert "FileExistsError: " in why and "sesame" not in why
        server.command = [sys.executable, "-c", "pass"]
        server.start()
        server.process.wait()
        assert list(servers.restart([]).values()) == [f"had ended (its log: {server.log})"]
    finally:
        server_process.stop_all([server])


def test_only_the_end_of_a_log_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it is cut, no half of the key is in it."""
    monkeypatch.setattr(server_process, "_QUOTED_BYTES", 40)
    server = LaunchedServer([], {}, tmp_path / "log", api_key="sesame")
    for dots in range(60):
        server.log.write_text(f"KeyError: sesame\n{'.' * dots}\nValueError: late\n")
        said = server.with_log("")
        assert server.last_error() == "ValueError: late" in said and "same" not in said
    assert "KeyError" not in said


def _with_a_fault_on_rank(config: Config, rank: int) -> str:
    nodes = Nodes.of(range(dist.get_world_size()), dist.get_rank())
    if dist.get_rank() == rank:
        launched_servers.make_servers = _faulty  # type: ignore[assignment]
    servers = JobServers(config, nodes)
    try:
        servers.start()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        servers.close()
    return "nothing"


def _faulty(*_: object, **__: object) -> list[LaunchedServer]:
    raise KeyError("a fault of this program")


@pytest.mark.parametrize("rank", [0, 1])
def test_no_rank_waits_for_one_that_failed(files: Path, tmp_path: Path, rank: int) -> None:
    """Whatever is raised: there as it is, for its traceback, and on the others as a sentence."""
    config = fake_config(files, tmp_path / "run", rollout__servers__allow_remote_endpoints=True)
    said = run_ranks(_with_a_fault_on_rank, 2, config, rank)
    assert said[rank] == "KeyError: 'a fault of this program'"
    assert said[1 - rank].startswith("UserError: ") and "KeyError: 'a fault of this program'" in said[1 - rank]


def _as_two_nodes(config: Config, killed: int) -> dict[str, Any]:
    """On each of four ranks, two a node: three syncs and rollouts; before the second sync the server of node `killed`
    dies."""
    os.environ["LOCAL_RANK"] = str(dist.get_rank() % 2)  # by torchrun's agent
    job = prepare_job(config, dist.get_world_size())
    engine = ServerEngine(config, job.architecture, job.tokenizer)
    found: dict[int, Completion] = {}
    try:
        assert engine._nodes.count == 2
        assert engine._job_servers is not None
        mine: list[Any] = engine._job_servers.local
        pids = gather_all([(engine._nodes.node, server.process.pid) for server in mine])
        weights = [(name, job.checkpoint.get(name)) for name in list(job.checkpoint.names)[:3]]
        states = []
        for step in (1, 2, 3):
            if step == 3 and engine._zero.is_here:  # asked for in the second sync
                until(lambda: all(map(_answers, rank_zero(engine).fleet.members)), "it was not started again")
            engine.load_weights(lambda to=None: iter(weights))
            engine.start(
                [Request(Prompt(i, "", (2, 3), "", ""), c, step) for i in range(12) for c in range(3)], SAMPLING
            )
            found = engine.finish()
            states.append(engine.health())
            if step == 1:
                for server in mine:
                    if engine._nodes.node == killed:
                        os.killpg(server.process.pid, signal.SIGKILL)
                        server.process.wait()
                dist.barrier()
        sync = from_rank_zero(lambda: engine._sync.version)
        described = engine.description
        started_again = gather_all([(engine._nodes.node, server.process.pid) for server in mine])
        dist.barrier()
    finally:
        engine.close()
    dist.barrier()
    gone = all(is_gone(pid) for _, pid in [*pids, *started_again])
    return {"found": found, "states": states, "pids": pids, "again": started_again, "gone": gone} | {
        "sync": sync,
        "described": described,
        "receivers": list(engine.receivers),
    }


def test_a_server_that_hangs_leaves_its_memory_to_the_actor(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two colocated servers one does not answer when they are to sleep: it is ended, with the device memory that it
    holds, before the actor has the device. The next sync starts it again, and the other goes on."""
    monkeypatch.setattr(server_process, "_TERM_S", 0.1)
    limits = {"rollout__limits__probe_timeout_s": 0.5, "rollout__limits__sync_timeout_s": 1.0}
    several = {"rollout__servers__colocate": "true", "rollout__servers__count": 2}
    config = fake_config(files, tmp_path / "run", **several | limits)
    job = prepare_job(config, 1)
    with contextlib.closing(ServerEngine(config, job.architecture, job.tokenizer)) as engine:
        weights = [(name, job.checkpoint.get(name)) for name in list(job.checkpoint.names)[:3]]
        engine.load_weights(lambda: iter(weights))
        assert engine._job_servers is not None and len(rank_zero(engine).fleet.live) == 2
        hanging, good = engine._job_servers.local
        before: list[Any] = [hanging.process, good.process]
        os.killpg(before[0].pid, signal.SIGSTOP)
        os.waitpid(before[0].pid, os.WUNTRACED)  # all of its threads have stopped
        engine.sleep()
        assert before[0].poll() is not None and good.is_running
        assert [bool(member.asleep) for member in rank_zero(engine).fleet.members if member.state != "out"] == [True]
        engine.load_weights(lambda: iter(weights))
        assert hanging.is_running and hanging.process is not before[0] and good.process is before[1]
        engine.sleep()  # waits until it has started
        engine.load_weights(lambda: iter(weights))
        assert len(rank_zero(engine).fleet.live) == 2


def _answers(member: Member) -> bool:
    try:
        member.server.healthy(timeout_s=5)
    except (Unreachable, Refused):
        return False
    return True


SAMPLING = Sampling(LIMIT, 1.0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_every_node_has_servers_of_its_own(files: Path, tmp_path: Path, killed: int) -> None:
    """Two nodes of two ranks and a colocated server each: both take a part of every rollout, and weights come from the
    ranks beside them. One that is killed is started again on its node, and none is left at the end."""
    config = fake_config(files, tmp_path / "run", rollout__servers__colocate="true", rollout__limits__probe_every_s=0.2)
    ranks = run_ranks(_as_two_nodes, 4, config, killed, timeout_s=120)
    assert [sorted(node for node, _ in rank["pids"]) for rank in ranks] == [[0, 1]] * 4
    before, after = dict(ranks[0]["pids"]), dict(ranks[0]["again"])
    assert before[killed] != after[killed] and before[1 - killed] == after[1 - killed]
    assert all(rank["gone"] and rank["sync"] == 3 for rank in ranks)
    assert "weight sync: ipc" in ranks[0]["described"]
    assert all(set(rank["receivers"]) >= {0} and any(r >= 2 for r in rank["receivers"]) for rank in ranks)
    first, _, last = ranks[0]["states"]
    assert list(first.values()) == list(last.values()) == ["live", "live"]
    positions = sorted(position for rank in ranks for position in rank["found"])
    assert positions == list(range(36)) and all(rank["found"] for rank in ranks), "each node's client brings in a part"
    asked = [Request(Prompt(i, "", (2, 3), "", ""), c, 3) for i in range(12) for c in range(3)]
    groups, _ = grouped(asked, SAMPLING, 3)
    for rank in ranks:
        for position, one in rank["found"].items():
            tokens, logprobs, _ = completion(groups[position // 3].seed + position % 3, LIMIT)
            assert one.token_ids.tolist() == tokens and one.weights_spans == ((3, len(tokens)),)
            np.testing.assert_allclose(one.logprobs, logprobs, rtol=1e-6)
    assert {path.name for path in (tmp_path / "run" / "servers").iterdir()} == {"server_0.log", "node1_server_0.log"}


def _start_engine(config: Config) -> None:
    os.environ["LOCAL_RANK"] = "0"
    if dist.get_rank() == 1:
        config.rollout.servers.python = "/no/such/python"
    job = prepare_job(config, dist.get_world_size())
    ServerEngine(config, job.architecture, job.tokenizer)


def test_a_node_that_cannot_start_its_servers_is_named_everywhere(files: Path, tmp_path: Path) -> None:
    """And rank 0's are ended: a run with the servers of one node alone would go on unnoticed."""
    with pytest.raises(RankError) as failure:
        run_ranks(_start_engine, 2, fake_config(files, tmp_path / "run"), timeout_s=120)
    said = str(failure.value)
    assert said.count("UserError: ") == 2 and said.count("'/no/such/python' cannot be started") == 2
    assert "(rank 1): rollout.servers.python" in said
    log = tmp_path / "run" / "servers" / "server_0.log"
    assert log.exists()


class Agents:
    """Two of torchrun's agents on this machine, as two machines: the command of docs/cluster.md."""

    def __init__(self, directory: Path, settings: list[str]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"),
            *("--rdzv-id", "test", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"),
            *("-m", "dppo_megatron", "train", str(REPOSITORY / "configs" / "quickstart.yaml"), *settings),
        ]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "10"}
        self.logs = [directory / f"agent{i}.log" for i in range(2)]
        self.agents = []
        for log in self.logs:
            with open(log, "ab") as file:
                self.agents.append(
                    subprocess.Popen(command, stdout=file, stderr=file, env=environment, start_new_session=True)
                )

    def wait(self) -> list[int]:
        """Their exit codes."""
        return [agent.wait(240) for agent in self.agents]

    def said(self) -> str:
        return "\n".join(log.read_text(errors="replace")[-4000:] for log in self.logs)

    def kill(self, agent: int) -> None:
        """As when that machine's power fails: the agent and its rank (which leads a session of its own) at once."""
        victims = [pid for pid in _under(self.agents[agent].pid) if b"fake_vllm.py" not in command_line(pid)]
        for pid in [self.agents[agent].pid, *victims]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        for number in range(2):
            if self.agents[number].poll() is None:
                self.kill(number)
            self.agents[number].wait()


def _under(pid: int) -> list[int]:
    """All descendants of a process."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found, new = list[int](), [pid]
    while new:
        new = [child for child, parent in parents.items() if parent in new]
        found += new
    return found


@pytest.mark.long
@pytest.mark.slow
def test_two_agents_of_torchrun(tmp_path: Path) -> None:
    """A real job of two agents with a server each: it trains; the second one dies, as a machine does: the other agent
    ends, and no server is left on either. (That it then resumes is seen in tests/slurm.)"""
    files = write_job_files(tmp_path / "task")
    values = {
        "steps": 500,
        "sft__steps": 0,
        "rollout__engine": "vllm",
        "rollout__prompts_per_step": 4,
        "rollout__servers__launch": "local",
        "rollout__servers__colocate": "true",
        "rollout__servers__python": fake_python(files),
        "rollout__sync__verify_every": 0,
        "guard__watchdog_s": 20,
    }
    metrics = tmp_path / "run" / "metrics.jsonl"
    job = Agents(tmp_path, job_settings(files, tmp_path / "run", **values))
    try:
        until(
            lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 3, "no step was made", 240, job.said
        )
        assert len(processes_of("fake_vllm.py", str(files))) == 2
        job.kill(1)
        assert all(code != 0 for code in job.wait())
        until(lambda: not processes_of("fake_vllm.py", str(files)), "servers are left", 60, job.said)
    finally:
        job.close()
