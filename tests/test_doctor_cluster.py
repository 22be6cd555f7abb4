"""`doctor` as a job's ranks run it: what it measures, and that each planted fault is one sentence.

The ranks are real and meet over gloo as a job's do; what only NCCL says is raised in its words.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.job import REPOSITORY
from support.launch import RankError, run_ranks
from support.processes import free_port

from dppo_megatron.launcher_env import check_launcher_env, place_from_slurm
from dppo_megatron.workbench.cli import main
from dppo_megatron.workbench.doctor import cluster
from dppo_megatron.workbench.doctor.cluster import report_of
from dppo_megatron.workbench.doctor.machine import CheckRow, allocator_row, files_row, gpu_rows, locked_row, shm_row

CONFIG = str(REPOSITORY / "configs" / "quickstart.yaml")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="these ranks are forked, and judged as a CPU's")


def _doctor(arguments: list[str], planted: Callable[[int], object], port: int, out: Path) -> int:
    """A rank of its own job: the harness's group is left, what a launcher would have set stays."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    os.environ |= {"MASTER_PORT": str(port), "NCCL_CUMEM_ENABLE": "0"}
    with open(out / f"{rank}.txt", "w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        return main(["doctor", *arguments]) if planted(rank) != "absent" else 0


def _report(arguments: list[str], planted: Callable[[int], object], out: Path) -> tuple[int, list[str]]:
    """Rank 0's exit code and lines of two ranks, each of which has called `planted` first."""
    try:
        code = run_ranks(_doctor, 2, arguments, planted, free_port(), out, dies=0)[0]
    except RankError as error:  # its main thread was inside a call that does not end
        [code] = map(
            int, re.findall(r"^rank 0 of 2 died without a message: exit code (\d+)$", str(error), re.MULTILINE)
        )
    return code, (out / "0.txt").read_text().splitlines()


def _line(lines: list[str], what: str) -> str:
    [line] = [line for line in lines if re.match(rf"(ok|warning|fault) +{re.escape(what)}  ", line)]
    return line


def _job(tmp_path: Path, *settings: str) -> list[str]:
    return [CONFIG, f"run_dir={tmp_path}/run", f"model.hf_path={tmp_path}", *settings]


def _as_srun(rank: int) -> None:
    """Two tasks on two nodes, as Slurm numbers them; nothing of torchrun's but the harness's port."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    os.environ |= {
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": str(rank),
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_STEP_NODELIST": "node[07-08]",
    }


@pytest.mark.slow
def test_two_tasks_of_srun_are_a_job(tmp_path: Path) -> None:
    """No launcher but Slurm: they meet, try every link of the layout, and rank 0 alone reports."""
    servers = ["rollout.engine=vllm", "rollout.servers.launch=local", "rollout.servers.colocate=true"]
    job = _job(tmp_path, "actor.layout.tensor_parallel=2", *servers, f"rollout.servers.python={sys.executable}")
    code, lines = _report([*job, "--json", f"{tmp_path}/found.json", "--limit-s", "250"], _as_srun, tmp_path)
    assert code == 0, lines
    assert "reads and writes this rank's" in _line(lines, "shared memory")
    assert _line(lines, "NCCL of both ends").startswith("ok")
    for group in ("WORLD", "tp"):
        [speed] = re.findall(
            r"([\d.e+-]+) GB/s over 2 ranks \(bus bandwidth; gloo, 4 MiB\)", _line(lines, f"all-reduce {group}")
        )
        assert float(speed) > 0
    assert not any("all-reduce pp" in line for line in lines), "a group of one sends nothing"
    assert lines[-1].startswith("0 fault, ") and "; 2 ranks, " in lines[-1]
    assert (tmp_path / "1.txt").read_text() == ""
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["world_size"] == 2 and len(found["rows"]) == len([line for line in lines if line[:1] in "owf"])


def _wrong_interface(rank: int) -> None:
    if rank == 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "nonexistent0"


def _never_comes(rank: int) -> str:
    return "absent" if rank == 1 else ""


def _few_files(rank: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (400, 400))


def _nccl_says(text: str) -> Callable[[int], None]:
    def plant(rank: int) -> None:
        def all_reduce(*_: object, **__: object) -> None:
            raise dist.DistBackendError(f"NCCL error in: NCCLUtils.cpp:77, invalid usage, NCCL version 2.29.7\n{text}")

        dist.all_reduce = all_reduce

    return plant


@pytest.mark.parametrize(
    ("planted", "limit_s", "what", "said"),
    [
        (
            _wrong_interface,
            60,
            "process group",
            r"GLOO_SOCKET_IFNAME=nonexistent0 fits no network interface of .* which has .*lo.*\[rank 1 on ",
        ),
        pytest.param(
            *(_never_comes, 16, "ranks", r"1 of 2 ranks did not join \(rank 1\): were they started"),
            marks=pytest.mark.slow,
        ),
        (_few_files, 60, "ulimit -n", r"400 open files \(hard limit\), but a rank of 2 needs 514"),
        (
            _nccl_says("Last error:\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 1a000"),
            60,
            "process group",
            r"Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1a000\. Start as many processes",
        ),
        (
            _nccl_says("Last error:\nBootstrap : no socket interface found"),
            60,
            "process group",
            r"no socket interface found\. Do the machines .* by the interface",
        ),
    ],
    ids=["gloo's interface", "absent", "few files", "one GPU", "NCCL's interface"],
)
def test_a_planted_fault_is_one_sentence(
    tmp_path: Path, planted: Callable[[int], object], limit_s: int, what: str, said: str
) -> None:
    """Exit code 2, well before the limit would have said that something hangs, and nothing else is called a fault."""
    code, lines = _report([*_job(tmp_path), "--limit-s", str(limit_s)], planted, tmp_path)
    assert code == 2
    faults = [line for line in lines if line.startswith("fault ")]
    assert len(faults) == 1 and re.search(said, _line(lines, what)), lines


def test_a_port_that_another_program_has_keeps_no_rank(tmp_path: Path) -> None:
    """It takes connections and answers none: torch's store waits there past its timeout."""

    def doctor(port: int) -> int:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cluster, "_RESERVE_S", 1.0)
            return _doctor([*_job(tmp_path), "--limit-s", "4"], lambda rank: None, port, tmp_path)

    with socket.create_server(("127.0.0.1", free_port())) as other:
        assert run_ranks(doctor, 2, other.getsockname()[1]) == [3, 3]  # RunAborted's
    assert "EADDRINUSE" in (tmp_path / "0.txt").read_text()
    assert "does not answer as torch's store does): is rank 0 running there" in (tmp_path / "1.txt").read_text()


@pytest.mark.long
@pytest.mark.slow
def test_a_rank_that_hangs_is_named_at_the_limit(tmp_path: Path) -> None:
    """In a call that nothing ends: what it was at is said for it, and every process is ended."""

    def plant(rank: int) -> None:
        connects = dist.all_reduce

        def all_reduce(tensor: torch.Tensor, **named: object) -> None:
            connects(tensor, **named) if tensor.numel() == 1 else time.sleep(600)

        if rank == 1:
            dist.all_reduce = all_reduce

    code, lines = _report([*_job(tmp_path), "--limit-s", "20"], plant, tmp_path)
    assert code == 2
    assert "not finished after 20 s" in _line(lines, "all-reduce WORLD")


def _job_of_two_nccls(tmp_path: Path) -> list[str]:
    """The servers' Python has another NCCL than one that finds `tmp_path` on PYTHONPATH."""
    (tmp_path / "sitecustomize.py").write_text("import torch\ntorch.cuda.nccl.version = lambda: (2, 29, 7)\n")
    engine = tmp_path / "python"
    engine.write_text(f"#!/bin/sh\n{sys.executable} \"$@\" | sed 's/2\\.29\\.7/2.27.3/'\n")
    engine.chmod(0o755)
    servers = ["rollout.engine=vllm", "rollout.servers.launch=local", "rollout.sync.channel=nccl"]
    return _job(tmp_path, *servers, f"rollout.servers.python={engine}", "--limit-s", "250")


def _has_nccl(rank: int) -> None:
    torch.cuda.nccl.version = lambda: (2, 29, 7)


@pytest.mark.slow
def test_another_nccl_at_the_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Told by the servers' own Python, which reads memory of the rank all the same."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    code, lines = _report(_job_of_two_nccls(tmp_path), _has_nccl, tmp_path)
    assert code == 2
    assert "NCCL is 2.27.3 there and 2.29.7 in the trainer" in _line(lines, "NCCL of both ends")
    assert "reads and writes this rank's" in _line(lines, "shared memory")
    assert lines[-1].startswith("1 fault, "), lines


@pytest.mark.long
@pytest.mark.slow
def test_faults_of_a_launch(tmp_path: Path) -> None:
    """torchrun itself, on a machine whose shared memory is full, with few files and another NCCL at the servers: each
    is a sentence of its own, and the exit code is the faults'."""
    job = _job_of_two_nccls(tmp_path)
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        str(free_port()),
    ]
    command = ["prlimit", "--nofile=400:400", *launch, "-m", "dppo_megatron", "doctor", *job]
    can_mount = subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode == 0
    if can_mount:
        mounted = 'mount -t tmpfs -o size=64k none /dev/shm && exec "$@"'
        command = ["unshare", "-m", "sh", "-c", mounted, "sh", *command]
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{REPOSITORY}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    lines = done.stdout.splitlines()
    assert done.returncode == 1 and "exitcode  : 2" in done.stderr, done.stderr[-3000:]  # torchrun's own code is 1
    assert "400 open files" in _line(lines, "ulimit -n")
    assert "NCCL is 2.27.3 there and 2.29.7 in the trainer" in _line(lines, "NCCL of both ends")
    assert "reads and writes this rank's" in _line(lines, "shared memory")
    if can_mount:
        assert re.match(r"fault +/dev/shm +0 MiB free: NCCL and vLLM", _line(lines, "/dev/shm"))
    assert lines[-1].startswith(f"{2 + can_mount} fault, 0 warning, "), lines


_SMI = """\
0, 1980, 1980, 0x0000000000000004, 0
1, 1155, 1980, 0x0000000000000048, 0
2, 345, 1980, 0x0000000000000001, 3
3, 1980, 1980, [N/A], [N/A]
"""
"""In the form of nvidia-smi's csv,noheader,nounits; made by hand: at its power cap, hot, idle, without ECC."""


def test_what_nvidia_smi_says_is_judged() -> None:
    """A power cap under load and an idle clock are no trouble, heat is; an uncorrected error stops a job some day."""
    clocks, ecc = gpu_rows(_SMI)
    assert clocks.verdict == "warning"
    assert clocks.detail.startswith("GPU 1: hardware slowdown, too hot (hardware): check")
    assert (ecc.verdict, ecc.detail.partition(":")[0]) == ("fault", "uncorrected errors (GPU 2")
    first, last = _SMI.splitlines()[0], _SMI.splitlines()[-1]
    assert [row.verdict for row in gpu_rows(f"{first}\n{last}\n")] == ["ok", "ok"]


@pytest.mark.parametrize(
    ("row", "verdict"),
    [
        (files_row(1024, 1024), "fault"),
        (files_row(1024, 512), "ok"),
        (files_row(-1, 1024), "ok"),
        (locked_row(8 << 20, has_infiniband=True), "warning"),
        (locked_row(8 << 20, has_infiniband=False), "ok"),
        (locked_row(-1, has_infiniband=True), "ok"),
        (shm_row(0), "fault"),
        (shm_row(200 << 20), "warning"),
        (shm_row(2 << 30), "ok"),
    ],
)
def test_limits_are_judged_by_what_needs_them(row: CheckRow, verdict: str) -> None:
    """Docker's 64 MB of shared memory are too few for NCCL; vLLM takes 160 MiB for each server."""
    assert row.verdict == verdict


@pytest.mark.parametrize(
    ("colocated", "setting", "verdict", "said"),
    [
        (True, "", "ok", "no expandable segments, which suits CUDA IPC"),
        (True, "expandable_segments:True", "warning", "needs ptrace rights in a container"),
        (False, "", "warning", "without expandable segments"),
        (False, "expandable_segments:True", "ok", ""),
        (None, "", "ok", "unless servers are colocated"),
    ],
)
def test_allocator_advice_fits_colocation(colocated: bool | None, setting: str, verdict: str, said: str) -> None:
    """What helps packs of varied length is what CUDA IPC to a colocated server may fail with."""
    row = allocator_row({"PYTORCH_ALLOC_CONF": setting}, "cuda", colocated)
    assert row.verdict == verdict and said in row.detail


def test_of_many_ranks_each_trouble_is_told_once() -> None:
    """Who has it is named, unless all have it; of speeds the slowest, and what is far below the others is said."""
    hosts = {rank: f"node{rank // 4}" for rank in range(8)}
    found = {
        rank: [CheckRow("a", "ok", f"fine {rank}"), CheckRow("speed", "ok", f"{rank}", 100.0 - rank)]
        for rank in range(8)
    }
    assert [(row.verdict, row.detail, row.ranks) for row in report_of(found, hosts)] == [
        ("ok", "fine 0", ""),
        ("ok", "7", "slowest: rank 7 on node1"),
    ]
    found[3] = [CheckRow("a", "fault", "broken"), CheckRow("speed", "ok", "slow", 40.0)]
    broken, slow = report_of(found, hosts)
    assert (broken.verdict, broken.detail, broken.ranks) == ("fault", "broken", "rank 3 on node0")
    assert slow.verdict == "warning" and slow.detail.startswith("slow; less than half of the ranks' median, 95.5 GB/s")
    everywhere = {rank: [CheckRow("a", "fault", "broken")] for rank in range(8)}
    assert [row.ranks for row in report_of(everywhere, hosts)] == [""]


def test_the_place_that_slurm_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Task 9 of `8(x2),4` is the second on the second node; its job has a port of its own."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # so that it is taken away again
        monkeypatch.delenv(name)
    slurm = {"STEP_NUM_TASKS": "20", "PROCID": "9", "LOCALID": "1", "NODEID": "1", "STEP_TASKS_PER_NODE": "8(x2),4"}
    for name, value in (slurm | {"STEP_NODELIST": "gpu[007-008,012]-a,big1", "JOB_ID": "4711"}).items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    place_from_slurm()
    check_launcher_env()
    found = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")}
    assert list(found.values()) == ["9", "20", "1", "8", "gpu007-a"]
    assert 20_000 <= int(os.environ["MASTER_PORT"]) < 30_000
