"""Runs the same job under several pruning methods, one after another on one machine, and reports the results.

Each run is a process of its own, as a user would start it. For each seed there is one warm start, and all methods begin
from its checkpoint with the same data order and evaluation. The order of the methods rotates from seed to seed, so that
a machine that slows down does not always penalize the same method.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dppo_megatron.config.schema import Config
from dppo_megatron.observe.report import Line, Plot, write_report
from dppo_megatron.pruning.methods import method_overrides
from dppo_megatron.types import GuardStop, UserError

BASELINE = "grpo"


@dataclass(frozen=True, slots=True)
class Point:
    """One evaluation of a run and the cost up to it, evaluations not counted."""

    step: int
    accuracy: float
    """Mean pass@1 over the evaluation sets."""
    train_s: float
    tokens_generated: int
    tokens_trained: int


@dataclass(frozen=True, slots=True)
class MethodRun:
    """One method on one seed."""

    method: str
    seed: int
    curve: list[Point]
    labels: dict[str, str]
    """Selection name to its worst label over the run."""
    summary: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Comparison:
    """All runs, and the comparisons drawn from them."""

    runs: list[MethodRun]
    speedups: dict[str, list[float | None]] = field(default_factory=dict)
    """Method to its speed-up per seed: train seconds of GRPO's whole run over the seconds this method took to first
    reach the accuracy that GRPO ended with; None where it never did. GRPO's own entry shows how early its curve first
    touches that accuracy, which is the honest unit to compare with."""


def compare(
    config: Config,
    config_path: str,
    overrides: list[str],
    methods: list[str],
    *,
    seeds: int,
    steps_factor: float,
    out: Path,
) -> Comparison:
    """Run every method on every seed and collect the results.

    Args:
        steps_factor: the other methods run this many times GRPO's steps. A pruned step is cheaper, and the comparison
            is in seconds and tokens: at 1, a method that needs more but cheaper steps could not show its advantage.

    Raises:
        UserError: no evaluation set, or a run ended with exit code 2.
    """
    if not (config.data.eval_paths or config.data.eval_sets):
        raise UserError("data.eval_paths and data.eval_sets are empty: there is nothing to compare by")
    every = config.eval.every_steps or max(1, config.steps // 12)
    runs = []
    for offset in range(seeds):
        seed = config.seed + offset
        start = _start(config, config_path, overrides, seed, out)
        rotated = methods[offset % len(methods) :] + methods[: offset % len(methods)]
        for method in rotated:
            run_dir = out / f"seed{seed}" / method
            steps = config.steps if method == BASELINE else round(config.steps * steps_factor)
            settings = [f"seed={seed}", f"steps={steps}", f"eval.every_steps={every}", *start]
            settings += method_overrides(method)
            _train(config_path, [*overrides, *settings], run_dir)
            runs.append(_collect(method, seed, run_dir))
    runs.sort(key=lambda run: (methods.index(run.method), run.seed))
    return Comparison(runs, _speedups(runs, methods))


def table(comparison: Comparison) -> str:
    """For people: medians over seeds, with the smallest and the largest."""
    lines = [
        f"{'method':<18}{'seeds':>6}{'accuracy':>10}{'RL s':>8}{'gen. tokens':>13}{'trained':>11}"
        f"{'speed-up to GRPO accuracy':>28}"
    ]
    for method in dict.fromkeys(run.method for run in comparison.runs):
        runs = [run for run in comparison.runs if run.method == method]
        ends = [run.curve[-1] for run in runs]
        lines.append(
            f"{method:<18}{len(runs):>6}{100 * statistics.median(p.accuracy for p in ends):>9.1f}%"
            f"{statistics.median(p.train_s for p in ends):>8.1f}"
            f"{int(statistics.median(p.tokens_generated for p in ends)):>13,}"
            f"{int(statistics.median(p.tokens_trained for p in ends)):>11,}"
            f"{_spread(comparison.speedups.get(method, [])):>28}"
        )
    return "\n".join(lines)


def write_results(comparison: Comparison, path: Path) -> None:
    """results.json: every figure, the versions and the machine."""
    packages = ("torch", "megatron-core", "transformers", "numpy")
    about = {
        "versions": {name: version(name) for name in packages},
        "machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()},
    }
    path.write_text(json.dumps(asdict(comparison) | about, indent=2) + "\n", encoding="utf-8")


def report(comparison: Comparison, path: Path, title: str) -> None:
    """report.html: the table, what it means, and accuracy against each kind of cost."""
    biased = sorted({run.method for run in comparison.runs if "biased" in run.labels.values()})
    notes = [
        "Speed-up: train seconds of GRPO's whole run over the seconds a method took to first reach the accuracy GRPO"
        " ended with; median over seeds and (smallest-largest). GRPO's own row shows how early its curve first"
        " touches that accuracy. Evaluation is not counted.",
        f"Methods that change the expected gradient (label 'biased' in the ledger): {', '.join(biased) or 'none'}.",
    ]
    axes = (("train_s", "RL seconds"), ("tokens_generated", "generated tokens"), ("tokens_trained", "trained tokens"))
    plots = [
        Plot(
            f"Accuracy against {label}",
            label,
            "pass@1, %",
            [
                Line(run.method, [getattr(p, name) for p in run.curve], [100 * p.accuracy for p in run.curve])
                for run in comparison.runs
            ],
        )
        for name, label in axes
    ]
    write_report(path, title, table(comparison), notes, plots)


def _start(config: Config, config_path: str, overrides: list[str], seed: int, out: Path) -> list[str]:
    """Make this seed's warm start; returns the settings that begin a run from it."""
    if not config.warm_start.steps:
        return []
    run_dir = out / f"seed{seed}" / "start"
    _train(config_path, [*overrides, f"seed={seed}", "steps=0"], run_dir)
    return [f"model.hf_path={run_dir / 'hf'}", "warm_start.steps=0"]


def _train(config_path: str, settings: list[str], run_dir: Path) -> None:
    shutil.rmtree(run_dir, ignore_errors=True)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world != 1:
        raise UserError("compare starts its own processes: run it without torchrun")
    print(f"compare: {run_dir}", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "dppo_megatron", "train", config_path, *settings, f"run_dir={run_dir}"]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode == 2:
        raise UserError(done.stderr.strip().removeprefix("error: "))
    if done.returncode == 3:
        raise GuardStop(f"{run_dir}: {done.stderr.strip().rpartition('stopped: ')[2]}")
    if done.returncode:
        raise RuntimeError(f"{run_dir}: the run failed with exit code {done.returncode}:\n{done.stderr[-4000:]}")


def _collect(method: str, seed: int, run_dir: Path) -> MethodRun:
    """The curve of a finished run."""
    worst = ("exact", "unbiased", "ratio", "biased").index
    seconds, generated, trained = 0.0, 0, 0
    curve: list[Point] = []
    labels: dict[str, str] = {}
    for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row["step"]:
            seconds += row["time/step_s"]
            generated += int(row["tokens/generated"])
            trained += int(row["tokens/trained"])
            for entry in row["prune/ledger"]:
                before = labels.get(entry["name"], "exact")
                labels[entry["name"]] = max(before, entry["label"], key=worst)
        scores = [value for key, value in row.items() if key.startswith("eval/") and key.endswith("/pass@1")]
        if scores and None not in scores:  # null: every grading of a set failed
            curve.append(Point(row["step"], statistics.mean(scores), seconds, generated, trained))
    summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    return MethodRun(method, seed, curve, labels, summary)


def _speedups(runs: list[MethodRun], methods: list[str]) -> dict[str, list[float | None]]:
    ends = {run.seed: run.curve[-1] for run in runs if run.method == BASELINE}
    speedups: dict[str, list[float | None]] = {}
    for method in methods if ends else []:
        for run in (run for run in runs if run.method == method):
            end = ends[run.seed]
            reached = next((p for p in run.curve if p.step > 0 and p.accuracy >= end.accuracy), None)
            speedups.setdefault(method, []).append(end.train_s / reached.train_s if reached else None)
    return speedups


def _spread(values: list[float | None]) -> str:
    reached = sorted(value for value in values if value is not None)
    if not values:
        return "-"
    missing = len(values) - len(reached)
    if missing * 2 >= len(values):
        return f"not reached in {missing} of {len(values)}"
    ordered = [0.0] * missing + reached  # a run that never got there is slower than any that did
    text = f"{statistics.median(ordered):.2f}x ({reached[0]:.2f}-{reached[-1]:.2f})"
    return text + (f", {missing} not reached" if missing else "")
