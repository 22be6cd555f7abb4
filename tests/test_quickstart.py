"""What `dppo-megatron quickstart` refuses before it removes an earlier run, and what a whole one comes to."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.job import REPOSITORY, write_job_files
from support.processes import holding, patient, running, until

from dppo_megatron.children import package_environment, python_command
from dppo_megatron.observe.lock import RunLock
from dppo_megatron.observe.run_directory import IDENTITY, RunDirectory
from dppo_megatron.workbench.cli import main
from dppo_megatron.workbench.commands import quickstart
from dppo_megatron.workbench.report.findings import findings
from dppo_megatron.workbench.runs.run_record import read_run


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of a quickstart whose task is there and whose earlier run is in `tmp_path/run`; it starts no process."""
    monkeypatch.setattr(quickstart, "_call", lambda *command, ranks=1: 0)
    monkeypatch.setattr("dppo_megatron.workbench.quickstart.make.make_quickstart", lambda task, recipe: None)
    write_job_files(tmp_path / "task")
    RunDirectory(tmp_path / "run").close()
    return ["quickstart", "--task", str(tmp_path / "task"), "--run-dir", str(tmp_path / "run")]


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (["stepz=2"], "unknown key"),
        (["--config", "nowhere.yaml"], "'nowhere.yaml' does not exist"),
        (["--tp", "2"], "needs a multiple of 2 processes"),
        (["run_dir=elsewhere"], "--run-dir DIR"),
    ],
    ids=str,
)
def test_a_mistake_costs_no_earlier_run(
    options: list[str], tmp_path: Path, more: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*options, *more]) == 2
    assert reason in capsys.readouterr().err
    assert (tmp_path / "run" / IDENTITY).exists()
    assert main(options) == 0 and not (tmp_path / "run").exists(), "without one the earlier run makes room"


def test_a_directory_that_is_no_run_stays(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Many a project has a config.yaml; and a file is no directory."""
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "config.yaml").write_text("mine")
    for name, reason in (("project", "holds files that are not a run's"), ("project/config.yaml", "is a file")):
        assert main([*options, "--run-dir", str(tmp_path / name)]) == 2
        assert reason in capsys.readouterr().err
    assert (tmp_path / "project" / "config.yaml").read_text() == "mine"


def test_a_run_in_progress_stays(options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its trainer is another process, which holds the lock."""
    with holding(lambda: RunLock(tmp_path / "run")):
        assert main(options) == 2
    assert "is being written by another trainer" in capsys.readouterr().err
    assert (tmp_path / "run" / IDENTITY).exists()


_WAITS = "import os, pathlib, sys, time; pathlib.Path(sys.argv[1], str(os.getpid())).touch(); time.sleep(600)"
_CALLS = """
import sys
from dppo_megatron.children import start_python
from dppo_megatron.workbench.commands import quickstart
quickstart.start_python = lambda _, *given, **options: start_python("waits", *given, **options)
sys.exit(quickstart._call(sys.argv[1], ranks=int(sys.argv[2])))
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_it_has_started_ends_with_it(tmp_path: Path, ranks: int) -> None:
    """A time limit's SIGTERM is for the command alone; with two ranks torchrun is between, and passes it on."""
    (tmp_path / "waits.py").write_text(_WAITS)
    (tmp_path / "begun").mkdir()
    path = {"PYTHONPATH": f"{REPOSITORY}:{tmp_path}"}
    given = [sys.executable, "-c", _CALLS, str(tmp_path / "begun"), str(ranks)]
    command = subprocess.Popen(given, env=package_environment() | path)
    until(lambda: len(list((tmp_path / "begun").iterdir())) == ranks or command.poll() is not None)
    command.send_signal(signal.SIGTERM)
    assert command.wait(patient(60)) == 143
    assert [one.name for one in (tmp_path / "begun").iterdir() if running(int(one.name))] == []


@pytest.mark.long
def test_a_whole_quickstart_learns_and_its_report_warns_of_nothing(tmp_path: Path) -> None:
    """As a newcomer starts it; from 39.6 to 89.3 % when this was written."""
    command = python_command("dppo_megatron", "quickstart")
    done = subprocess.run(command, cwd=tmp_path, env=package_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    run = read_run(tmp_path / "runs" / "quickstart")
    assert [one for one in findings(run) if one.level != "note"] == []
    first, *_, last = (value for value in run.columns["eval/heldout/avg@1"] if value is not None)
    assert first < 0.5 and last > 0.8
