"""The scripts of examples/slurm on a real Slurm with two nodes: what a crash frees, what resumes (`make test-slurm`).

Not part of `make test`: it needs root, Debian's Slurm, and minutes. Servers are `support/engines/fake_vllm.py`;
everything else is real: the ranks train, save and resume.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.job import settings, write_job_files

sys.path.append(str(Path(__file__).parent))
from cluster import NODES, Cluster, missing, of_job, processes, until
from support.engines.fake_vllm import fake_python

REPOSITORY = Path(__file__).parents[2]
SCRIPTS = REPOSITORY / "examples" / "slurm"
FREED_S = 60.0
"""Any crash frees the allocation in this time."""
START_S = 240.0
"""Two ranks on a busy machine: imports, SFT, servers, the first step."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        "DPPO_TEST_SLURM" not in os.environ or bool(missing()), reason=f"`make test-slurm` runs it; {missing()}"
    ),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    found = Cluster(tmp_path_factory.mktemp("slurm"))
    yield found
    found.stop()


class Job:
    """One run and its job."""

    def __init__(self, cluster: Cluster, directory: Path, steps: int, **extra: Any) -> None:
        self.cluster, self.run_dir = cluster, directory / "run"
        self.files = write_job_files(directory)
        self.config = directory / "job.yaml"
        self.steps = steps
        values = {
            "sft__steps": 0,
            "rollout__prompts_per_step": 4,
            "rollout__servers__python": fake_python(directory),
            "rollout__sync__verify_every": 0,
            "rollout__limits__probe_every_s": 1,
            "checkpoint__every_steps": 1,
            "reward__function": "support.faulty:length_parity",  # random completions: half are right, so steps train
            "reward__min_self_consistency": 0,
        }
        self.settings = settings(self.files, self.run_dir, **values | extra)
        self.settings = [one for one in self.settings if not one.startswith("steps=")]
        self.name = ""

    @property
    def steps(self) -> int:
        return self._steps

    @steps.setter
    def steps(self, count: int) -> None:
        """In the file, so that a job that is queued again reads another number."""
        self._steps = count
        parent = {"defaults": str(REPOSITORY / "configs" / "quickstart.yaml"), "steps": count}
        self.config.write_text(yaml.safe_dump(parent))

    def submit(self, script: str, **variables: str | None) -> None:
        path = os.pathsep.join([str(Path(sys.executable).parent), self.cluster.environment["PATH"]])
        self.name = self.cluster.submit(
            SCRIPTS / script,
            str(self.config),
            *self.settings,
            options=("--gpus-per-node=0",),
            PATH=path,
            PYTHONPATH=os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests")]),
            **{"OMP_NUM_THREADS": "1", "RANKS_PER_NODE": "1"} | variables,
        )

    @property
    def rows(self) -> int:
        """Steps in the record, step 0 among them."""
        file = self.run_dir / "metrics.jsonl"
        return len(file.read_text().splitlines()) if file.exists() else 0

    def until_rows(self, count: int) -> None:
        self.until(lambda: self.rows >= count or self.has_ended, START_S, f"{count} steps")
        assert self.rows >= count, self.cluster.output(self.name)

    def until_finished(self) -> None:
        self.until(lambda: (self.run_dir / "summary.json").exists() or self.has_ended, START_S + 120, "finished")
        assert (self.run_dir / "summary.json").exists(), self.cluster.output(self.name)

    def until(self, holds: Any, seconds: float, what: str) -> float:
        return until(holds, seconds, lambda: f"not {what} after {seconds:g} s:\n{self.cluster.output(self.name)}")

    def until_freed(self) -> float:
        """Slurm has all nodes back, and none of the job's processes is left."""
        return self.until(lambda: self.cluster.is_free() and not self.processes(), FREED_S, "free")

    def processes(self) -> list[int]:
        return of_job(str(self.files))

    def rank_on(self, node: str) -> int:
        """A rank's process there, not torchrun's."""
        for pid in self.processes():
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if f"SLURMD_NODENAME={node}".encode() in variables and any(one.startswith(b"RANK=") for one in variables):
                return pid
        raise AssertionError(f"no rank on {node}")

    def servers(self) -> list[int]:
        commands = processes()
        return [pid for pid in self.processes() if "fake_vllm.py" in commands.get(pid, "")]

    def log(self, attempt: int) -> str:
        logs = sorted((self.cluster.directory / "logs").glob(f"{self.name}-attempt{attempt}-*.log"))
        return "\n".join(log.read_text() for log in logs)

    @property
    def state(self) -> str:
        return self.cluster.job(self.name)["JobState"]

    @property
    def has_ended(self) -> bool:
        return self.state not in ("PENDING", "RUNNING", "COMPLETING", "REQUEUED")


def test_split(cluster: Cluster, tmp_path: Path) -> None:
    """One node generates and one trains; the server is killed in the middle: started again by its node, it is synced
    and asked again, and the run ends as if nothing had been."""
    job = Job(cluster, tmp_path, steps=8, rollout__sync__channel="disk")  # the fake joins no broadcast group
    # both nodes are this machine, and `serve` refuses names of loopback
    job.submit("split.sbatch", INFERENCE_NODES="1", SERVE_INTERFACE="lo")
    job.until_rows(3)
    [server] = job.servers()
    os.kill(server, signal.SIGKILL)
    job.until_finished()
    job.until_freed()
    assert job.state == "COMPLETED" and job.rows == 9
    assert json.loads((job.run_dir / "summary.json").read_text())["tokens_trained"] > 0
    said = job.log(0)
    assert "starting it again" in said and "answers again" in said


def test_colocated(cluster: Cluster, tmp_path: Path) -> None:
    """Both nodes train and generate. A rank is killed: all is freed; the same command resumes. A server is killed: the
    run goes on. The batch shell is killed: all is freed; the same command resumes and ends."""
    job = Job(cluster, tmp_path, steps=500)
    job.submit("colocated.sbatch")
    job.until_rows(3)
    assert len(job.servers()) == 2, "one a node"
    os.kill(job.rank_on(NODES[1]), signal.SIGKILL)
    print(f"a rank: freed after {job.until_freed():.0f} s")
    assert job.state == "FAILED"

    seen = job.rows
    job.submit("colocated.sbatch")
    job.until_rows(seen + 2)
    assert "resumed from" in job.log(0)
    old = job.servers()
    os.kill(old[1], signal.SIGKILL)
    job.until(lambda: len(set(job.servers()) - {old[1]}) == 2, START_S, "started again")
    job.until_rows(job.rows + 2)
    shells = [pid for pid, command in processes().items() if re.match("/bin/bash .*/slurm_script", command)]
    os.kill(*shells, signal.SIGKILL)
    print(f"the batch shell: freed after {job.until_freed():.0f} s")

    seen = job.rows
    job.steps = seen + 1
    job.submit("colocated.sbatch")
    job.until_finished()
    job.until_freed()
    assert job.state == "COMPLETED" and job.rows == seen + 2


def test_requeue(cluster: Cluster, tmp_path: Path) -> None:
    """Warned, the run saves and its job is queued again, and resumes at the step after. Its second node dies: nothing
    of it is left, the job is queued again, and with the node back it resumes and ends. As users submit it: a node that
    dies in the first ten minutes is no mistake, and torchrun writes of OMP_NUM_THREADS before any rank does."""
    job = Job(cluster, tmp_path, steps=500)
    job.submit("requeue.sbatch", OMP_NUM_THREADS=None, RANKS_PER_NODE="2")
    job.until_rows(3)
    assert "OMP_NUM_THREADS" in job.log(0)
    cluster.signal_batch(job.name, "USR1")
    job.until(lambda: cluster.job(job.name)["Restarts"] == "1", FREED_S, "queued again")
    first = job.log(0)
    assert "SIGUSR1" in first and "stopped after step" in first, first
    seen = job.rows
    job.until_rows(seen + 2)
    second = job.log(1)
    assert f"going on at step {seen}" in second, second

    cluster.end_node(NODES[1])
    print(f"a node: freed after {job.until_freed():.0f} s")
    # Slurm may give it the dead node once or twice more, before it knows
    job.until(lambda: job.state == "PENDING" and cluster.is_down(NODES[1]), FREED_S, "queued again")
    seen = job.rows
    job.steps = seen + 2
    cluster.start_node(NODES[1])
    job.until_finished()
    job.until_freed()
    assert job.state == "COMPLETED" and "resumed from" in job.log(int(cluster.job(job.name)["Restarts"]))
