"""The share of a recorded run's tokens that is trained, and its effect on the variance, at several completion settings.

    python benchmarks/completion_bound.py TRACE [TRACE ...] [--json FILE]

A trace of an unpruned run (such as one of `configs/quickstart_grpo.yaml`) has every completion's reward, length and
score. The trainer's own completion policy gives each an inclusion probability; the expected share of tokens and the
design effect sum(s^2 / pi) / sum(s^2) follow without a draw. Figures are means over the steps of all traces that have a
gradient; the first ten steps of each, when most groups still have one, are shown separately.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dppo_megatron.algorithms.advantages import group_advantages
from dppo_megatron.config.pruning import CompletionPruningConfig
from dppo_megatron.pruning import CompletionBatch, make_completion_policy

SETTINGS: dict[str, dict[str, Any]] = {
    "no gradient dropped, nothing drawn": {"rate": 0.95, "max_design_effect": 1.0},
    "rate 0.5": {"rate": 0.5, "max_design_effect": 0.0},
    "rate 0.75": {"rate": 0.75, "max_design_effect": 0.0},
    "rate 0.9": {"rate": 0.9, "max_design_effect": 0.0},
    "rate 0.95": {"rate": 0.95, "max_design_effect": 0.0},
    "rate 0.95, bound 1.05": {"rate": 0.95, "max_design_effect": 1.05},
    "rate 0.95, bound 1.1 (default)": {"rate": 0.95, "max_design_effect": 1.1},
    "rate 0.95, bound 1.2": {"rate": 0.95, "max_design_effect": 1.2},
}
EARLY = 10


def batches(path: str) -> Iterator[CompletionBatch]:
    """The steps of a trace, with group_std advantages and sequence_mean denominators."""
    with open(path, encoding="utf-8") as file:
        rows = [json.loads(line) for line in file][1:]
    for row in rows:
        rewards, lengths = np.array(row["rewards"], dtype=np.float64), np.array(row["lengths"], dtype=np.int64)
        yield CompletionBatch.of_groups(
            np.array(row["prompts"]),
            rewards=rewards,
            advantages=group_advantages(rewards, divide_by_std=True, eps=1e-6),
            lengths=lengths,
            logit_grad_norm=np.array(row["logit_grad_norm"], dtype=np.float64),
            denominator=rewards.size * lengths.astype(np.float64),
            prompt_weight=np.ones(len(rewards)),
            num_nominal=rewards.size,
        )


def measure(traces: list[list[CompletionBatch]], settings: dict[str, Any]) -> dict[str, float]:
    """One row of the table."""
    steps: list[tuple[float, float, bool]] = []
    for trace in traces:
        policy = make_completion_policy(
            CompletionPruningConfig(fill_slack=False, **settings),
            seed=0,
            total_steps=10**6,
        )
        for step, batch in enumerate(trace):
            square = np.square(batch.advantages * batch.logit_grad_norm / batch.denominator)
            if square.sum() == 0:
                continue
            pi = policy.prune(batch, step=step).inclusion_prob
            drawn = pi > 0
            growth = float((square[drawn] / pi[drawn]).sum() / square.sum())
            steps.append((float((pi * batch.lengths).sum() / batch.lengths.sum()), growth, step < EARLY))
    tokens, effect = np.array([one[0] for one in steps]), np.array([one[1] for one in steps])
    early = np.array([one[2] for one in steps])
    return {
        "tokens": float(tokens.mean()),
        "effect": float(effect.mean()),
        "largest_effect": float(effect.max()),
        "early_tokens": float(tokens[early].mean()),
        "early_effect": float(effect[early].mean()),
    }


def main() -> None:
    """Replay every trace at every setting, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", metavar="TRACE")
    parser.add_argument("--json", type=Path, help="write one JSON object with every figure here")
    args = parser.parse_args()
    traces = [list(batches(path)) for path in args.traces]
    rows: list[dict[str, Any]] = []
    print("| completions | tokens trained | design effect, mean (largest) | first ten steps: tokens, effect |")
    print("|---|---|---|---|")
    for name, settings in SETTINGS.items():
        r = measure(traces, settings)
        print(
            f"| {name} | {r['tokens']:.0%} | {r['effect']:.2f} ({r['largest_effect']:.2f}) |"
            f" {r['early_tokens']:.0%}, {r['early_effect']:.2f} |"
        )
        rows.append({"completions": name} | settings | r)
    if args.json:
        args.json.write_text(json.dumps({"benchmark": "completion_bound", "rows": rows}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
