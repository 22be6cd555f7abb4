"""How long the decisions of one training step take, and how much memory the history needs.

The cost of pruning must be negligible: the bounds are 50 ms and 100 bytes per prompt with a million prompts, 1,024 of
them in a step, and 16 completions each. Times are medians over steps after a visit to each prompt; one process on CPU.

    python benchmarks/pruning_speed.py [--json FILE] [--prompts 1000000] [--steps 20]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dppo_megatron import __version__
from dppo_megatron.config.pruning import CompletionPruningConfig, PromptPruningConfig
from dppo_megatron.pruning import CompletionBatch, make_completion_policy, make_prompt_policy, step_metrics

METHODS = [
    ("dppo", "dppo"),
    ("dppo_auto", "dppo_auto"),
    ("dppo_paper", "dppo_paper"),
    ("none", "dppo"),
    ("none", "cppo"),
    ("none", "cppo_verl"),
    ("greso", "greso"),
    ("greso_ht", "greso_ht"),
    ("infobatch", "infobatch"),
    ("none", "max_variance"),
]
PHASES = ("select", "observe", "prune", "monitor")


@dataclass
class Timings:
    """Seconds of each phase, one entry a step."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: {phase: [] for phase in PHASES})

    def median_ms(self, phase: str) -> float:
        """Median over the steps."""
        return 1e3 * float(np.median(self.seconds[phase]))

    def worst_ms(self) -> float:
        """Slowest select + observe + prune of any step."""
        return 1e3 * float(np.max(np.sum([self.seconds[phase] for phase in PHASES[:3]], axis=0)))


def measure(prompt_method: str, completion_method: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run `args.steps` steps on random rewards and time each phase."""
    size, completions = args.prompts_per_step, args.completions_per_prompt
    prompt_config = PromptPruningConfig(method=prompt_method, warmup_epochs=0.0, fixed_cost_ratio=1.0)
    completion_config = CompletionPruningConfig(method=completion_method, rollout_cost_ratio=1.0)
    policy = make_prompt_policy(
        prompt_config,
        num_prompts=args.prompts,
        completions_per_prompt=completions,
        prompts_per_step=size,
        total_steps=10**6,
        seed=0,
    )
    completion_policy = make_completion_policy(completion_config, seed=0, total_steps=10**6)
    rng = np.random.default_rng(0)
    difficulty = rng.random(args.prompts)
    everything = np.arange(args.prompts)
    rewards = (rng.random((args.prompts, completions)) < difficulty[:, None]).astype(np.float64)
    policy.observe(everything, rewards, np.full(rewards.shape, 500), step=0)
    timings = Timings()
    for step in range(1, args.steps + 2):
        ids = rng.choice(args.prompts, size, replace=False)
        started = time.perf_counter()
        selection = policy.select(ids, step=step)
        selected = time.perf_counter()
        kept = ids[selection.kept]
        rewards = (rng.random((len(kept), completions)) < difficulty[kept, None]).astype(np.float64)
        lengths = rng.integers(50, 2000, rewards.shape)
        batch = make_batch(kept, rewards, lengths, selection.weight[selection.kept], size * completions)
        offered = time.perf_counter()
        policy.observe(kept, rewards, lengths, step=step)
        observed = time.perf_counter()
        pruned = completion_policy.prune(batch, step=step)
        decided = time.perf_counter()
        step_metrics(selection, batch, pruned)
        policy.history.metrics(step)
        done = time.perf_counter()
        if step > 1:
            for phase, spent in zip(
                PHASES, (selected - started, observed - offered, decided - observed, done - decided), strict=True
            ):
                timings.seconds[phase].append(spent)
    state = policy.state_dict()
    return {
        "prompt_method": prompt_method,
        "completion_method": completion_method,
        **{f"{phase}_ms": round(timings.median_ms(phase), 3) for phase in PHASES},
        "select_observe_prune_ms": round(sum(timings.median_ms(phase) for phase in PHASES[:3]), 3),
        "worst_step_ms": round(timings.worst_ms(), 3),
        "bytes_per_prompt": array_bytes(state) / args.prompts,
    }


def make_batch(
    ids: np.ndarray, rewards: np.ndarray, lengths: np.ndarray, weight: np.ndarray, num_nominal: int
) -> CompletionBatch:
    """The completions of `ids` with std-normalised advantages and a logit_grad_norm of about root length."""
    advantages = (rewards - rewards.mean(axis=1, keepdims=True)) / (rewards.std(axis=1, keepdims=True) + 1e-6)
    return CompletionBatch.of_groups(
        ids,
        rewards=rewards,
        advantages=advantages,
        lengths=lengths,
        logit_grad_norm=0.4 * np.sqrt(lengths),
        denominator=num_nominal * lengths.astype(np.float64),
        prompt_weight=weight,
        num_nominal=num_nominal,
    )


def array_bytes(state: Any) -> int:
    """Bytes of all arrays in a nested state."""
    if isinstance(state, dict):
        return sum(array_bytes(value) for value in state.values())
    return int(state.nbytes) if isinstance(state, np.ndarray) else 0


def main() -> None:
    """Measure every method, print the table, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write one JSON object with every figure here")
    parser.add_argument("--prompts", type=int, default=1_000_000)
    parser.add_argument("--prompts-per-step", type=int, default=1024)
    parser.add_argument("--completions-per-prompt", type=int, default=16)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    rows = [measure(prompt, completion, args) for prompt, completion in METHODS]
    print(f"{args.prompts:,} prompts in history, {args.prompts_per_step} x {args.completions_per_prompt} a step; ms")
    header = f"{'prompt':12s} {'completion':14s} " + " ".join(f"{phase:>8s}" for phase in PHASES)
    print(header + f" {'sum of 3':>9s} {'worst':>8s} {'bytes/prompt':>13s}")
    for row in rows:
        phases = " ".join(f"{row[f'{phase}_ms']:8.2f}" for phase in PHASES)
        print(
            f"{row['prompt_method']:12s} {row['completion_method']:14s} {phases} {row['select_observe_prune_ms']:9.2f}"
            f" {row['worst_step_ms']:8.2f} {row['bytes_per_prompt']:13.1f}"
        )
    if args.json:
        result = {
            "benchmark": "pruning_speed",
            "settings": {key: value for key, value in vars(args).items() if key != "json"},
            "rows": rows,
            "versions": {"dppo_megatron": __version__, "python": platform.python_version(), "numpy": np.__version__},
            "machine": {"platform": platform.platform(), "processor": platform.machine(), "cpus": os.cpu_count()},
        }
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
