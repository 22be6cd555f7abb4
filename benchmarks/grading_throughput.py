"""Gradings per second through the pool, and what the pool itself costs: `python benchmarks/grading.py throughput`.

    cheap     answers whose text equals the reference; `final_answer`, and `math`'s first route
    full      answers that need a whole comparison
    512       one step's cheap gradings in one call: wall time, and the CPU seconds of trainer and graders, which do not
              depend on other load; best and median of many
    hangs     1 % of the gradings never return: each costs one timeout of one process
    count     100,000 gradings with distinct rewards: every one in its place, no process replaced

Times depend on the machine and its other load; the counts do not.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dppo_megatron.config.reward import RewardConfig
from dppo_megatron.rewards.grading import Grader, GradeTask, make_grader
from dppo_megatron.types import Grade

_REASONING = "Let x be the number of apples. Then 3x + 5 = 26, so 3x = 21 and x = 7. Checking: 3 * 7 + 5 = 26. " * 8
_FULL = (
    ("\\sin^2(x)+\\cos^2(x)+{i}y", "{i}y+1"),
    ("\\sqrt{{12}}+{i}", "2\\sqrt{{3}}+{i}"),
    ("(x+1)^2+{i}", "x^2+2x+1+{i}"),
    ("2\\pi/4+{i}\\pi", "\\pi/2+{i}\\pi"),
)
Figures = dict[str, Any]


def main(argv: Sequence[str]) -> int:
    """Measure, print a table, and write the figures to `--json`."""
    parser = argparse.ArgumentParser(prog="grading.py throughput", description=__doc__)
    parser.add_argument("--processes", type=int, default=2, help="grader processes (default: 2)")
    parser.add_argument("--count", type=int, default=100_000, help="gradings of the count check (default: 100,000)")
    parser.add_argument("--timeout-s", type=float, default=0.5, help="time limit of a grading (default: 0.5)")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args(list(argv))
    processes = arguments.processes
    figures: dict[str, Figures] = {}
    for name in ("final_answer", "math"):
        figures[f"cheap {name}"] = _with_grader(name, processes, lambda grader: _rate(grader, _cheap(20_000)))
        figures[f"512 {name}"] = _with_grader(name, processes, _one_step)
    figures["full math"] = _with_grader("math", processes, lambda grader: _rate(grader, _full(400)))
    here = "hanging_grader:index_or_hang"
    sys.path.insert(0, str(Path(__file__).parent))
    figures["hangs"] = _with_grader(here, processes, _hangs, timeout_s=arguments.timeout_s)
    figures["count"] = _with_grader(here, processes, lambda grader: _count(grader, arguments.count))
    for name, figure in figures.items():
        print(f"{name:<20}" + "  ".join(f"{key} {value:g}" for key, value in figure.items()))
    if arguments.json:
        about = {"python": platform.python_version(), "machine": platform.machine(), "cores": os.cpu_count()}
        text = json.dumps({"figures": figures, "processes": processes, "about": about}, indent=2)
        arguments.json.write_text(text + "\n", encoding="utf-8")
    return 0 if figures["count"]["wrong"] == 0 == figures["count"]["processes_replaced"] else 1


def _with_grader(
    function: str, processes: int, measure: Callable[[Grader], Figures], timeout_s: float = 60.0
) -> Figures:
    grader = make_grader(RewardConfig(function=function, processes=processes, timeout_s=timeout_s))
    try:
        assert isinstance(grader, Grader)
        while sum(process.begun > 0 for process in grader.processes) < processes:  # all started, modules imported
            grader.grade([GradeTask("1", "1")] * processes)
        return measure(grader)
    finally:
        grader.close()


def _cheap(count: int) -> list[GradeTask]:
    return [GradeTask(f"{_REASONING}The answer is $\\boxed{{{i}}}$.", str(i)) for i in range(count)]


def _full(count: int) -> list[GradeTask]:
    # each with a number of its own: the grader caches what it has graded
    chosen = [tuple(side.format(i=i) for side in _FULL[i % len(_FULL)]) for i in range(2, count + 2)]
    return [GradeTask(f"{_REASONING}The answer is $\\boxed{{{text}}}$.", answer) for text, answer in chosen]


def _rate(grader: Grader, tasks: Sequence[GradeTask]) -> Figures:
    grader.grade(tasks[: len(tasks) // 10])
    start = time.perf_counter()
    grades = grader.grade(tasks)
    seconds = time.perf_counter() - start
    return {
        "per_second": round(len(tasks) / seconds),
        "right": sum(grade.reward == 1.0 for grade in grades) / len(grades),
        "failed": sum(bool(grade.failure) for grade in grades),
    }


def _one_step(grader: Grader) -> Figures:
    """512 cheap gradings, as in one step of 64 prompts."""
    tasks = _cheap(512)
    walls, trainer, graders = [], [], []
    for _ in range(60):
        before, cpu, start = _graders_cpu_s(), time.process_time(), time.perf_counter()
        grader.grade(tasks)
        walls.append(time.perf_counter() - start)
        trainer.append(time.process_time() - cpu)
        graders.append(_graders_cpu_s() - before)
    return {
        "best_ms": round(1e3 * min(walls), 2),
        "median_ms": round(1e3 * statistics.median(walls), 2),
        "trainer_cpu_ms": round(1e3 * statistics.median(trainer), 2),
        "graders_cpu_ms": round(1e3 * statistics.fmean(graders), 2),
    }


def _hangs(grader: Grader) -> Figures:
    """2,000 gradings, 20 of which hang: 20 timeouts, shared by the processes."""
    tasks = [GradeTask(str(i), "hang") for i in range(2_000)]
    start = time.perf_counter()
    grades = grader.grade(tasks)
    wrong = [i for i, grade in enumerate(grades) if not _as_it_should_be(grade, i, hangs=i % 100 == 50)]
    return {"seconds": round(time.perf_counter() - start, 2), "wrong": len(wrong), "timed_out": _timed_out(grades)}


def _count(grader: Grader, count: int) -> Figures:
    before = _graders(grader)
    start = time.perf_counter()
    grades = grader.grade([GradeTask(str(i), "go on") for i in range(count)])
    seconds = time.perf_counter() - start
    wrong = sum(not _as_it_should_be(grade, i, hangs=False) for i, grade in enumerate(grades))
    return {
        "gradings": len(grades),
        "wrong": wrong,
        "processes_replaced": len(before - _graders(grader)),
        "per_second": round(count / seconds),
    }


def _as_it_should_be(grade: Grade, number: int, *, hangs: bool) -> bool:
    return grade.failure.startswith("timed out") if hangs else grade.reward == number / 7


def _timed_out(grades: Sequence[Grade]) -> int:
    return sum(grade.failure.startswith("timed out") for grade in grades)


def _graders(grader: Grader) -> set[int]:
    """Process ids of the pool's graders."""
    assert isinstance(grader, Grader)
    return {process.pid for process in grader.processes}


def _graders_cpu_s() -> float:
    """CPU seconds of this process's live children, in ticks of 10 ms, which suffices for means over many calls."""
    total = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == os.getpid():
            total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")
