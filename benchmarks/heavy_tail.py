"""The quickstart with heavy-tailed answer lengths: what pruning and streaming save where stragglers delay a step.

    python benchmarks/heavy_tail.py --python .venv-vllm/bin/python --out DIR [--seeds 0 1 ...] [--arms grpo dppo ...]

A problem states how many laps of 13 tokens its answer counts down before it works the chain: most have none, one in
twenty-five has 45 to 75. The problem fixes the length, not the policy: when the policy chose it (fill tokens up to a
geometric number), lengths grew tenfold or vanished within 20 steps, and the tail with them. Two real vLLM servers on
this machine generate; they are started once and used by all runs in turn. All arms of a seed start from one SFT model.
Judged by `compare`'s rules in wall time (four fifths of GRPO's is rollout), as CPU seconds leave out the servers.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

import numpy as np

from dppo_megatron.config import load_config
from dppo_megatron.randomness import generator
from dppo_megatron.types import UserError
from dppo_megatron.workbench.compare.arms import Arm, MethodRun, method_settings
from dppo_megatron.workbench.compare.runs import in_a_process, run_all
from dppo_megatron.workbench.compare.table import table
from dppo_megatron.workbench.compare.verdict import judge
from dppo_megatron.workbench.quickstart.make import Recipe, write_task
from dppo_megatron.workbench.quickstart.tiny_model import write_tiny_qwen3
from dppo_megatron.workbench.runs.trace import read_trace

LAPS = ((0, 0), (1, 2), (3, 8), (45, 75))
"""Fewest and most laps of each kind of problem; a lap is 13 tokens."""
SHARES = (0.71, 0.2, 0.05, 0.04)
LONGEST = 1024
_CONFIG = "configs/quickstart.yaml"
_POSTERIOR = "objective.advantage=posterior_loo"
_EARLY = f"{_POSTERIOR}:pruning.early_stop.after_tokens=38"
ARMS = {
    "grpo": "grpo:32:4:160:5e-4:0:none",
    "grpo,64": "grpo:64:4:80:7e-4:0:none",
    "grpo_nonzero,64": "grpo_nonzero:64:4:80:7e-4:0:none",
    "grpo,K=2": "grpo:32:4:160:5e-4:2:sequence",
    "dppo": "dppo:32:8:120:7e-4:0:none",
    "dppo,K=2": "dppo:32:8:120:7e-4:2:sequence",
    "dppo,posterior": f"dppo:32:8:120:7e-4:0:none:{_POSTERIOR}",
    "dppo,early": f"dppo:32:8:120:7e-4:0:none:{_EARLY}",
    "dppo,early,K=1": f"dppo:32:8:120:7e-4:1:sequence:{_EARLY}",
    "dppo,early,K=1,32x4": f"dppo:32:4:160:5e-4:1:sequence:{_EARLY}",
    "dppo,early,K=2": f"dppo:32:8:120:7e-4:2:sequence:{_EARLY}",
    "dppo,posterior,64x8,K=1": f"dppo:64:8:80:7e-4:1:sequence:{_POSTERIOR}:pruning.prompt.min_inclusion_prob=0.05",
    "grpo,K=2,none": "grpo:32:4:160:5e-4:2:none",
    "dppo,K=2,none": "dppo:32:8:120:7e-4:2:none",
}
"""method:prompts:completions:steps:learning rate:async_steps:correction, then settings, each after another colon.
Batch, rate and steps that did best on the quickstart, of groups of 8 for `dppo`; GRPO also has a larger batch, which
spreads a straggler's delay over more completions."""


def main() -> None:
    """Run what is missing in `--out`, and judge all runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="interpreter of vLLM's environment")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(10)))
    parser.add_argument("--arms", nargs="+", default=list(ARMS), help="names in ARMS, or values like those there")
    arguments = parser.parse_args()
    out, arms = arguments.out.resolve(), [make_arm(one) for one in arguments.arms]
    for seed in arguments.seeds:
        write_files(out / f"task{seed}", seed)
    runs = list[MethodRun]()
    with serving(arguments.python, out, job_settings(out, arguments.seeds[0])) as served:
        served_arms = [Arm(arm.name, arm.method, arm.steps, (*served, *arm.settings)) for arm in arms]
        for seed in arguments.seeds:
            settings = job_settings(out, seed)
            config = load_config(_CONFIG, settings, writes_run=False)
            runs += run_all(config, _CONFIG, settings, served_arms, seeds=1, out=out, launch=in_a_process)
    verdict = judge(runs, arms)
    print(table(verdict))
    print(*where_seconds_go(runs, out), sep="\n")
    (out / "verdict.json").write_text(json.dumps(asdict(verdict), default=str, indent=1))


def make_arm(name: str) -> Arm:
    """The arm of a name in `ARMS`, or of a value like those there."""
    method, prompts, group, steps, rate, ahead, correction, *other = ARMS.get(name, name).split(":")
    settings = (
        f"rollout.prompts_per_step={prompts}",
        f"rollout.completions_per_prompt={group}",
        f"actor.optimizer.learning_rate={rate}",
        f"rollout.async_steps={ahead}",
        f"steps={steps}",
        f"eval.every_steps={max(1, int(steps) // 10)}",
        f"objective.correction.level={correction}",
        *(() if correction == "none" else ("objective.correction.max_ratio=1e9",)),
        *method_settings(method),
        *other,
    )
    return Arm(name.replace(":", "_"), method, int(steps), settings)


def write_files(directory: Path, seed: int) -> None:
    """The quickstart's task, each problem with its number of laps."""
    if (directory / "model").exists():
        return
    write_task(directory, Recipe(seed))
    for name in ("train", "heldout", "sft"):
        path, rng = directory / f"{name}.jsonl", generator(seed, f"heavy_tail/{name}")
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for row, kind in zip(rows, rng.choice(len(LAPS), size=len(rows), p=SHARES).tolist(), strict=True):
            low, high = LAPS[kind]
            laps = int(rng.integers(low, high + 1))
            row["problem"] = f"{laps:02d}*{row['problem']}"
            if "completion" in row:
                row["completion"] = (
                    "".join(f"{left:02d}9876543210\n" for left in range(laps, 0, -1)) + row["completion"]
                )
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_tiny_qwen3(directory / "model", seed, max_position_embeddings=2048)


def job_settings(out: Path, seed: int) -> list[str]:
    """Settings of all arms of a seed."""
    task = out / f"task{seed}"
    return [
        f"seed={seed}",
        f"model.hf_path={task / 'model'}",
        f"data.train_path={task / 'train.jsonl'}",
        f"data.eval_paths.heldout={task / 'heldout.jsonl'}",
        f"sft.examples_path={task / 'sft.jsonl'}",
        "sft.steps=1000",
        "data.max_prompt_tokens=24",
        f"rollout.sampling.max_completion_tokens={LONGEST}",
        "threads_per_rank=2",  # an update that has waited for its rollouts has both cores
    ]


def where_seconds_go(runs: Sequence[MethodRun], out: Path) -> Iterator[str]:
    """Each run's seconds by phase. Of those whose trace has every completion and that did not generate ahead, also a
    line fitted to the seconds of a rollout: by its tokens, and by its longest answer, for which all others wait."""
    for run in runs:
        phases = ", ".join(f"{name} {seconds:.0f}" for name, seconds in run.phase_s.items() if seconds >= 1)
        line = f"seed {run.seed} {run.arm}: {phases} s"
        with suppress(UserError):
            trace = read_trace(str(out / f"seed{run.seed}" / run.arm / "trace.jsonl"))
            if not trace.config.rollout.async_steps:
                lengths = [step.rollouts.lengths for step in trace.steps]
                measured = np.array([(1.0, one.sum() / 1000, one.max() / 1000) for one in lengths])
                rollout_s = np.array([step.seconds["rollout"] for step in trace.steps])
                (fixed_s, token_s, longest_s), *_ = np.linalg.lstsq(measured, rollout_s, rcond=None)
                _, tokens, longest = measured.mean(axis=0)  # in thousands
                line += (
                    f"; a rollout {rollout_s.mean():.2f} s = {fixed_s:.2f} + {token_s:.3f} x {tokens:.1f} thousand"
                    f" tokens + {longest_s:.2f} x {longest:.2f} thousand of its longest answer"
                )
        yield line


@contextmanager
def serving(python: str, out: Path, settings: Sequence[str]) -> Iterator[list[str]]:
    """Run two servers; yields the settings with which a trainer finds them, always the same: finished runs are kept."""
    registry = out / "registry"
    shared = ["rollout.engine=vllm", f"rollout.servers.registry_dir={registry}", "rollout.sync.in_flight=continue"]
    own = [f"rollout.servers.python={python}", "rollout.servers.count=2", f"run_dir={out / 'servers'}"]
    command = [sys.executable, "-m", "dppo_megatron", "serve", _CONFIG, *settings, *shared, *own]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            while len(list(registry.glob("*.json"))) < 2:
                if process.poll() is not None:
                    raise SystemExit(f"serve ended with exit code {process.returncode}")
                time.sleep(1)
            yield shared
        finally:
            process.terminate()


if __name__ == "__main__":
    main()
