"""`dppo-megatron compare` with real runs: forked ones, which skip the imports, and one started as a user's is."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path

import pytest
from support.job import REPOSITORY, settings, write_warm_job_files
from support.launch import run_ranks
from support.logged import logged_lines

from dppo_megatron.config import load_config
from dppo_megatron.observe.progress_display import Progress
from dppo_megatron.progress import shown_by
from dppo_megatron.workbench.cli import main
from dppo_megatron.workbench.compare.arms import parse_arms
from dppo_megatron.workbench.compare.runs import run_all

pytestmark = pytest.mark.slow
CONFIG = str(REPOSITORY / "configs" / "quickstart.yaml")
EXTRA = {"steps": 3, "sft__steps": 2, "eval__every_steps": 1}


def _forked(run_dir: Path, arguments: list[str], line: Callable[[str], None]) -> None:
    assert run_ranks(lambda: main(arguments), 1) == [0]
    line("step    1: heldout pass@1 1.0 %")


def test_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two methods on two seeds begin from the same model of the seed; the command then keeps those runs and adds one
    by a process of its own; the report is written from all."""
    files, out = write_warm_job_files(tmp_path / "task"), tmp_path / "out"
    overrides = [s for s in settings(files, tmp_path / "unused", **EXTRA) if not s.startswith("run_dir")]
    config = load_config(CONFIG, overrides, writes_run=False)
    said = logged_lines()
    arms = parse_arms("grpo,dppo", config, 1.0)
    monkeypatch.delenv("DPPO_PROGRESS", raising=False)
    shown = io.StringIO()
    later = partial(next, count(0.0, 10.0))  # a clock that jumps whenever it is read
    display = partial(Progress, stream=shown, clock=later, beat_s=0)
    with shown_by(display):
        runs = run_all(config, CONFIG, overrides, arms, seeds=2, out=out, launch=_forked)
    assert "compare: 2 of 6 runs, about " in shown.getvalue() and "compare: 6 runs in " in shown.getvalue()
    assert [(run.arm, run.seed) for run in runs] == [("grpo", 0), ("grpo", 1), ("dppo", 0), ("dppo", 1)]
    starts = {run.seed: run.curve[0] for run in runs}
    assert all(run.curve[0] == starts[run.seed] for run in runs), "the methods did not start from the same model"
    assert all(run.curve[-1].train_cpu_s > 0 for run in runs) and len(runs[0].solved["heldout"]) == 24
    assert said[0] == "compare: 1/6 seed0 start" and any("pass@1" in line for line in said)

    options = ["--methods", "grpo,dppo,grpo_nonzero", "--seeds", "1", "--out", str(out)]
    written = (out / "seed0" / "grpo" / "metrics.jsonl").stat().st_mtime_ns
    assert main(["compare", CONFIG, *overrides, *options]) == 0
    printed = capsys.readouterr()
    assert printed.err.count("kept, it had finished") == 3, "start, grpo and dppo are there"
    assert "compare: 4/4 seed0 grpo_nonzero: step 3: heldout pass@1" in printed.err
    assert (out / "seed0" / "grpo" / "metrics.jsonl").stat().st_mtime_ns == written
    assert "base: grpo" in printed.out
    values = json.loads((out / "results.json").read_text())
    assert [run["arm"] for run in values["runs"]] == ["grpo", "dppo", "grpo_nonzero"]
    nonzero = next(run for run in values["runs"] if run["arm"] == "grpo_nonzero")
    assert nonzero["curve"][-1]["tokens_trained"] < nonzero["curve"][-1]["tokens_generated"]
    assert (out / "report.html").read_text().startswith("<!doctype html>")
