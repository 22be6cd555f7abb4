"""The quickstart on several seeds, GRPO beside DPPO: does it learn, how fast, and what did pruning save?

    python benchmarks/quickstart.py [--seeds 0 1 2] [--json FILE]

For each seed both methods run one after the other on the same machine, from the same task, the same starting
checkpoint and the same SFT model. Every run is a process of its own, as a user starts it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dppo_megatron.workbench.quickstart.make import Recipe, make_quickstart

REPOSITORY = Path(__file__).parent.parent
CONFIGS = {"grpo": "configs/quickstart_grpo.yaml", "dppo": "configs/quickstart.yaml"}


def run_one(method: str, seed: int, work: Path) -> dict[str, Any]:
    """Train once; returns summary.json with the method and seed."""
    task, run_dir = work / f"task_seed{seed}", work / f"{method}_seed{seed}"
    shutil.rmtree(run_dir, ignore_errors=True)
    make_quickstart(task, Recipe(seed))
    settings = {
        "run_dir": run_dir,
        "seed": seed,
        "model.hf_path": task / "model",
        "data.train_path": task / "train.jsonl",
        "data.eval_paths.heldout": task / "heldout.jsonl",
        "sft.examples_path": task / "sft.jsonl",
    }
    train = [
        sys.executable,
        "-m",
        "dppo_megatron",
        "train",
        CONFIGS[method],
        *(f"{k}={v}" for k, v in settings.items()),
    ]
    subprocess.run(train, cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)
    summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    return {"method": method, "seed": seed} | summary


def table(runs: list[dict[str, Any]]) -> str:
    """A Markdown table, one row a run."""
    lines = [
        "| seed | method | pass@1 before RL | after | gain | SFT | RL | whole run"
        " | completions generated | trained | tokens generated | trained |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for run in runs:
        before, after = 100 * run["eval_before"]["heldout"], 100 * run["eval_after"]["heldout"]
        lines.append(
            f"| {run['seed']} | {run['method']} | {before:.1f} % | {after:.1f} % | {after - before:+.1f}"
            f" | {run['sft_s']:.0f} s | {run['train_s']:.0f} s | {run['wall_s']:.0f} s"
            f" | {run['completions_generated']:,} | {run['completions_trained']:,}"
            f" | {run['tokens_generated']:,} | {run['tokens_trained']:,} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run everything and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--methods", nargs="+", choices=CONFIGS, default=list(CONFIGS))
    parser.add_argument("--work", type=Path, default=REPOSITORY / "runs" / "benchmark", help="where the runs go")
    parser.add_argument("--json", type=Path, help="also write every figure here")
    arguments = parser.parse_args()
    work = arguments.work.resolve()
    runs = []
    for seed in arguments.seeds:
        for method in arguments.methods:
            runs.append(run_one(method, seed, work))
            print(f"done: seed {seed} {method} {runs[-1]['wall_s']:.0f} s", file=sys.stderr, flush=True)
    print(table(runs))
    if arguments.json:
        packages = ("torch", "megatron-core", "transformers", "numpy")
        machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()}
        report = {"runs": runs, "versions": {name: version(name) for name in packages}, "machine": machine}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
