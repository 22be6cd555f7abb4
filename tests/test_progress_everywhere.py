"""Whatever can take longer than two seconds says so: each long phase of each command, through the real code.

The clock is the test's: it jumps by ten seconds whenever it is read, so every phase that reports at all is a long one.
No thread looks at it meanwhile, and no test waits.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.engines.fake_vllm import fake_python
from support.job import REPOSITORY, job_config, settings
from support.launch import run_ranks

from dppo_megatron.job import prepare_job
from dppo_megatron.observe.progress_display import Progress
from dppo_megatron.progress import Display, shown_by
from dppo_megatron.run import Run
from dppo_megatron.texts import logged
from dppo_megatron.train import train
from dppo_megatron.workbench import cli
from dppo_megatron.workbench.cli import main

CONFIG = str(REPOSITORY / "configs" / "quickstart.yaml")
SHORT = {"steps": 2, "sft__steps": 1, "rollout__prompts_per_step": 4, "checkpoint__every_steps": 1}

PHASES = {
    "train": {
        "loading libraries", "opening", "reading", "starting and trying", "start: grading the references",
        "waiting for all ranks", "verifying the newest checkpoint", "loading", "building the actor", "SFT",
        "first weight sync", "evaluation", "evaluation: grading", "step 1", "saving the checkpoint of step 1",
        "finishing the checkpoint", "writing", "ending the engine",
    },
    "eval": {"loading libraries", "opening", "reading", "starting and trying", "start: grading the references",
             "loading the weights", "evaluation", "evaluation: grading", "writing", "comparing"},
    "simulate": {"loading libraries", "reading", "simulating grpo", "simulating dppo"},
    "plan": {"loading libraries", "reading", "simulating grpo", "opening", "starting and trying"},
    "report": {"loading libraries", "reading", "writing"},
    "convert": {"loading libraries", "converting", "verifying", "flushing"},
    "data": {"reading", "writing"},
    "doctor": {"looking at this machine"},
    "accept": {"environment"},  # test_accept.py, since it measures
    "serve": {"rollout servers"},
    "compare": {"compare", "comparing"},  # test_compare_runs.py, since it trains
    "quickstart": {"making"},
    "watch": {"reading"},
}  # fmt: skip
"""Command -> what it shows, each by the beginning of its lines."""
QUICK = {"completion", "config", "init"}
"""A script of 80 lines, what could stand at a Tab, and a copy of the shipped configurations."""


@pytest.fixture(autouse=True, scope="module")
def progress_is_shown() -> Iterator[None]:
    """Other tests have it switched off (conftest.py)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("DPPO_PROGRESS", raising=False)
        yield


def jumping() -> Callable[[], float]:
    """A clock that is ten seconds later each time."""
    return partial(next, count(0.0, 10.0))


class Log:
    """What a command would have shown in a pipe."""

    def __init__(self) -> None:
        self._stream = io.StringIO()
        self.display: Display = partial(Progress, stream=self._stream, clock=jumping(), beat_s=0)

    def lacks(self, command: str) -> set[str]:
        """Phases of the table that did not report."""
        text = self._stream.getvalue()
        return {phase for phase in PHASES[command] if not re.search(rf"^{re.escape(phase)}\b.*: ", text, re.MULTILINE)}


@pytest.fixture(scope="module")
def log_of_a_run(files: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run of two steps that was resumed after its first."""
    run_dir = tmp_path_factory.mktemp("runs") / "run"

    def job(steps: int) -> str:
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            config = job_config(files, run_dir, **(SHORT | {"steps": steps, "checkpoint__may_change": "[steps]"}))
            with shown_by(partial(Progress, clock=jumping(), beat_s=0)):
                job = prepare_job(config, 1)
            with Run(job, jumping()) as run:
                train(run)
        return out.getvalue()

    return run_dir, "".join(run_ranks(job, 1, steps)[0] for steps in (1, 2))


def test_every_command_is_in_the_table() -> None:
    [commands] = [a for a in cli.program()._actions if isinstance(a, argparse._SubParsersAction)]
    assert set(commands.choices) == set(PHASES) | QUICK


def test_a_run(log_of_a_run: tuple[Path, str]) -> None:
    """From reading the data to ending the servers, and once more from its checkpoint."""
    _, text = log_of_a_run
    lacking = {p for p in PHASES["train"] if not re.search(rf"^{re.escape(p)}\b.*: ", text, re.MULTILINE)}
    assert lacking == {"loading libraries"}  # the command line's, before there is a job
    assert re.search(r"^loading .*step_000001: done in", text, re.MULTILINE), "the checkpoint that it resumed from"
    assert re.search(r"^writing .*hf: \d+ tensors in", text, re.MULTILINE)
    assert re.search(r"^step 1: [a-z]+, \d+ ", text, re.MULTILINE), "the phase that a long step is in"


def test_the_command_line_loads_libraries_aloud(files: Path, tmp_path: Path) -> None:
    log = Log()
    assert main(["train", CONFIG, *settings(files, tmp_path / "run", **SHORT), "--dry-run"], log.display) == 0
    assert not log.lacks("plan") - {"reading", "simulating grpo"} and "reading" not in log.lacks("plan")


@pytest.fixture(scope="module")
def run_dir(log_of_a_run: tuple[Path, str]) -> Path:
    return log_of_a_run[0]


def test_eval(run_dir: Path, tmp_path: Path) -> None:
    log, out, again = Log(), tmp_path / "a", tmp_path / "b"
    assert main(["eval", str(run_dir), "--limit", "2", "--out", str(out)], log.display) == 0
    assert main(["eval", "--rescore", str(out), "--out", str(again)], log.display) == 0
    assert main(["eval", "--compare", str(out), str(again)], log.display) == 0
    assert not log.lacks("eval")


def test_what_reads_a_run_or_the_source(run_dir: Path, files: Path, tmp_path: Path) -> None:
    trace = str(run_dir / "trace.jsonl")
    log = Log()
    costs = ["--rollout-cost", "1", "--update-cost", "1"]
    assert main(["simulate", trace, "--methods", "grpo,dppo", *costs], log.display) == 0
    assert not log.lacks("simulate")
    log = Log()
    plan = ["plan", CONFIG, *settings(files, tmp_path / "run", **SHORT), "--gpus", "1", "--dry-run", "--trace", trace]
    assert main(plan, log.display) == 0
    assert not log.lacks("plan")
    log = Log()
    assert main(["report", str(run_dir), "--out", str(tmp_path / "report.html")], log.display) == 0
    assert not log.lacks("report")
    log = Log()
    assert main(["watch", str(run_dir), "--once"], log.display) == 0
    assert not log.lacks("watch")


def test_convert(files: Path, tmp_path: Path) -> None:
    log, there, back = Log(), str(tmp_path / "there"), str(tmp_path / "back")
    assert main(["convert", "to-megatron", "--hf", str(files / "model"), "--out", there, "--verify"], log.display) == 0
    assert main(["convert", "to-hf", "--checkpoint", there, "--out", back], log.display) == 0
    assert not log.lacks("convert")


def test_data(tmp_path: Path) -> None:
    rows = [{"problem": f"p{i}", "answer": str(i), "id": str(i)} for i in range(3)]
    (tmp_path / "hub" / "data").mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "hub" / "data" / "test-00000-of-00001.parquet")
    log = Log()
    assert main(["data", "aime25", "--from", str(tmp_path / "hub"), "--out", str(tmp_path / "out")], log.display) == 0
    assert not log.lacks("data")
    written = (tmp_path / "out" / "test.jsonl").read_text().splitlines()
    assert [json.loads(line)["problem"] for line in written] == ["p0", "p1", "p2"]


def test_doctor_and_quickstart(tmp_path: Path) -> None:
    """A quickstart up to the run, which needs more processes."""
    log = Log()
    assert main(["doctor"], log.display) == 0
    assert not log.lacks("doctor")
    log = Log()
    command = ["quickstart", "--task", str(tmp_path / "task"), "--run-dir", str(tmp_path / "run"), "--tp", "2"]
    assert main(command, log.display) == 2
    assert not log.lacks("quickstart")


def test_serve(files: Path, tmp_path: Path) -> None:
    """Until its server answers; asked to end as soon as it is ready."""
    from dppo_megatron.rollout.launched_servers import serve

    def end_when_ready(line: str) -> None:
        if "is ready" in line:
            os.kill(os.getpid(), signal.SIGTERM)

    values = {"engine": "vllm", "servers__registry_dir": tmp_path / "here", "servers__python": fake_python(files)}
    config = job_config(files, tmp_path / "run", **{f"rollout__{key}": value for key, value in values.items()})
    log = Log()
    with shown_by(log.display), logged(end_when_ready):
        serve(config, "127.0.0.1")
    assert not log.lacks("serve")
