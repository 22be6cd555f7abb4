"""What the record of a long run costs rank 0 at a resume: 10,000 steps of 512 x 16 rollouts of a million prompts, of
which the last 100 are repeated.

    python benchmarks/resume.py [--steps 10000] [--prompts 512] [--completions 16] [--dir DIR] [--json FILE]

Bars: 2 CPU seconds, 200 MB more memory than the process had before. The record (2 GB by default) is made in --dir and
removed again.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
import zlib
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from dppo_megatron import __version__
from dppo_megatron.config.schema import Config
from dppo_megatron.observe.run_directory import RunDirectory, Sums
from dppo_megatron.steps.trace import trace_header, write_features
from dppo_megatron.types import PromptFeatures

MOST_CPU_S, MOST_MB = 2.0, 200.0
PROMPTS = 10**6
"""In the training sets."""
AGAIN = 100
"""Steps after the checkpoint."""


def main() -> int:
    """Make a record and resume from it; exit code 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--completions", type=int, default=16)
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
        run = Path(folder)
        metrics: dict[str, object] = {f"group/metric_{number}": 0.123456789 for number in range(100)}
        rows = {"metrics.jsonl": metrics, "trace.jsonl": _trace(arguments.prompts, arguments.completions)}
        sums = {name: _write(run / name, arguments.steps, row) for name, row in rows.items()}
        (run / "run.json").write_text('{"format": "dppo_megatron run 1", "run": "x"}')
        found = {"steps": arguments.steps, "trace_gb": (run / "trace.jsonl").stat().st_size / 1e9}
        with get_context("spawn").Pool(1) as pool:  # a process of its own has its own peak of memory
            found |= pool.apply(_resume, (run, arguments.steps - AGAIN, sums))
    shown = "{steps:,} steps, trace of {trace_gb:.2f} GB: {cpu_s:.2f} CPU s ({wall_s:.2f} s), {mb:.0f} MB"
    print(shown.format(**found))
    if arguments.json:
        about = {"version": __version__, "machine": platform.processor() or platform.machine()}
        arguments.json.write_text(json.dumps(found | about, indent=1) + "\n")
    return int(found["cpu_s"] >= MOST_CPU_S or found["mb"] >= MOST_MB)


def _trace(prompts: int, completions: int) -> dict[str, object]:
    rng = np.random.default_rng(0)
    shape = prompts, completions
    return {
        "offered": rng.integers(10**6, size=prompts).tolist(),
        "prompts": rng.integers(10**6, size=prompts).tolist(),
        "inclusion_prob": np.round(rng.random(prompts), 6).tolist(),
        "rewards": rng.integers(2, size=shape).astype(float).tolist(),
        "lengths": rng.integers(100, 4000, size=shape).tolist(),
        "logit_grad_norm": np.round(rng.random(shape), 4).tolist(),
        "kept": sorted(rng.choice(prompts * completions, prompts * completions // 2, replace=False).tolist()),
    }


def _features() -> PromptFeatures:
    rng = np.random.default_rng(0)
    level, source = rng.integers(1, 6, PROMPTS).astype(float), rng.integers(4, size=PROMPTS)
    return PromptFeatures(rng.integers(20, 400, PROMPTS), level, source, ("a", "b", "c", "d"))


def _write(path: Path, steps: int, row: dict[str, object]) -> dict[int, int]:
    """Write a record with the same outcomes in each step; returns the checksums that a checkpoint would have."""
    rest, sums = json.dumps(row).encode()[1:], dict[int, int]()
    with path.open("wb") as file:
        if path.name == "trace.jsonl":
            file.write(json.dumps(trace_header(Config(), {"": PROMPTS}, _features())).encode() + b"\n")
        for step in range(1, steps + 1):
            line = b'{"step": %d, %b' % (step, rest)
            sums[step] = zlib.crc32(line)
            file.write(line + b"\n")
    return {step: crc for step, crc in sums.items() if step <= steps - AGAIN}


def _resume(run: Path, step: int, sums: Sums) -> dict[str, float]:
    features = _features()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    before_mb, wall, cpu = _peak_mb(), time.perf_counter(), time.process_time()
    files = RunDirectory(run)
    files.open_record(Config(), trace_header(Config(), {"": PROMPTS}, features), step, sums)
    write_features(run, features)
    files.close()
    return {
        "cpu_s": time.process_time() - cpu,
        "wall_s": time.perf_counter() - wall,
        "mb": _peak_mb() - before_mb,
    }


def _peak_mb() -> float:
    """Peak memory of this process; `getrusage` would include its parent's."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) / 1e3


if __name__ == "__main__":
    sys.exit(main())
