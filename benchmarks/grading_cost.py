"""CPU time of gradings by `math`, in one process: `python benchmarks/grading.py cost [--data DIR]`.

    cases     the pairs of `grader_cases` that are not ambiguous: gradings per CPU second, mean, p50 and p99
    bombs     the texts of the suite that provoke slow gradings (`test_math_bounds.py`), each in six places

The fastest of `--rounds` counts for each grading, which leaves out imports, the first digits of a constant and other
load on the machine. Caches are cleared before every round.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from grading_accuracy import labelled

from dppo_megatron.rewards.math import evaluate, field, grader

_ROOT = Path(__file__).resolve().parents[1]
Pair = tuple[str, str, dict[str, object]]


def main(argv: Sequence[str]) -> int:
    """Print a line for each kind."""
    default = os.environ.get("DPPO_DATA_DIR", str(_ROOT.parent / "shared" / "data"))
    parser = argparse.ArgumentParser(prog="grading.py cost", description=__doc__)
    parser.add_argument("--data", type=Path, default=Path(default), help="directory of the files (DPPO_DATA_DIR)")
    parser.add_argument("--rounds", type=int, default=3, help="repetitions of each grading (default: 3)")
    arguments = parser.parse_args(argv)
    if not (arguments.data / "grader_cases.jsonl").exists():
        print(f"no grader_cases.jsonl in {arguments.data}: name its directory with --data", file=sys.stderr)
        return 2
    cases: list[Pair] = [(row["text"], row["gold"], row) for row in labelled(arguments.data)["grader_cases"]]
    for name, pairs in {"cases": cases, "bombs": _bombs()}.items():
        times = sorted(min(_seconds(pair) for _ in range(arguments.rounds)) for pair in pairs)
        print(
            f"{name}: {len(times)} gradings, {len(times) / sum(times):,.0f} a CPU second, mean"
            f" {1e3 * statistics.fmean(times):.2f} ms, p50 {1e3 * statistics.median(times):.2f} ms, p99"
            f" {1e3 * times[len(times) * 99 // 100]:.2f} ms, worst {1e3 * times[-1]:.0f} ms"
        )
    return 0


def _bombs() -> list[Pair]:
    sys.path += [str(_ROOT), str(_ROOT / "tests")]
    from tests.rewards.test_math_bounds import BOMBS, UNDONE, places

    return [(f"\\boxed{{{answer}}}", gold, {}) for text in (*UNDONE, *BOMBS) for gold, answer in places(text)]


def _seconds(pair: Pair) -> float:
    for module in (grader, field):
        for function in vars(module).values():
            if hasattr(function, "cache_clear") and function is not field._prime:
                function.cache_clear()
    evaluate._rounded.cache_clear()
    begin = time.process_time()
    grader.grade_math(*pair)
    return time.process_time() - begin
