"""The account of the variance on recorded runs: the growth predicted before each draw against the realised growth.

    python benchmarks/variance_account.py TRACE [TRACE ...] [--draws N] [--json FILE]
    python benchmarks/variance_account.py --compare DIR [--json FILE]

A trace of an unpruned run has the outcome of every nominal prompt, so the variance that a draw causes is known, not
estimated. Each row is a trace at one rate of prompts and one setting for completions: the growth by both selections,
predicted over realised, as means over the steps and over draws that differ in nothing else.

--compare: DIR is that of `dppo-megatron compare CONFIG --methods grpo,dppo --steps-factor 2 --seeds 10 --out DIR`. For
each seed, it compares what `simulate` predicts from GRPO's run, like for like and its mean, with the measured speed-up
to 90 % in CPU seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dppo_megatron import __version__
from dppo_megatron.config.resolved_sets import train_set_weights
from dppo_megatron.config.selection import selection_settings
from dppo_megatron.data.order import make_order
from dppo_megatron.workbench.compare.arms import parse_arms, read_method_run
from dppo_megatron.workbench.compare.verdict import judge, pair_noise
from dppo_megatron.workbench.runs.trace import Trace, read_trace
from dppo_megatron.workbench.simulate import capacity_of, fit_costs, like_for_like, simulate

RATES = (0.15, 0.3, 0.5)
COMPLETIONS: dict[str, dict[str, Any]] = {
    "bound 1.1": {"rate": 0.95, "max_design_effect": 1.1},
    "rate 0.5": {"rate": 0.5, "max_design_effect": 0.0},
}
DRAWS = 6
MOST_OFF = 0.05
"""The bar: predicted within 5 % of realised, on each trace."""


def measure(trace: Trace, rate: float, completions: dict[str, Any], draws: int) -> dict[str, float]:
    """One row of the table."""
    costs, config = fit_costs(trace, 1.0, 1.0), deepcopy(trace.config)
    config.pruning.prompt.rate = rate
    for name, value in completions.items():
        setattr(config.pruning.completion, name, value)
    sizes = trace.set_sizes or {"": trace.num_prompts}
    order = make_order(sizes, train_set_weights(config), config.seed, selection_settings(config).planned_prompts)
    predicted, realised, skipping = [], [], []
    for draw in range(draws):
        config.seed = 1000 + draw
        one = simulate(replace(trace, config=deepcopy(config)), "dppo", costs, capacity_of(trace), order)
        predicted.append(one.predicted_variance)
        realised.append(one.variance_ratio)
        skipping.append(one.variance_skipping)
    off = np.array(predicted) / np.array(realised) - 1.0
    return {
        "predicted": float(np.mean(predicted)),
        "realised": float(np.mean(realised)),
        "skipping": float(np.mean(skipping)),
        "off": float(np.mean(predicted) / np.mean(realised) - 1.0),
        "error": float(np.std(off, ddof=1) / len(off) ** 0.5) if draws > 1 else 0.0,
    }


def account(paths: list[str], draws: int) -> list[dict[str, Any]]:
    """Every row of the table, printed once it is computed."""
    rows: list[dict[str, Any]] = []
    print("| trace | prompts | completions | predicted | realised | where prompts are skipped | predicted / realised |")
    print("|---|---|---|---|---|---|---|")
    for path in paths:
        trace = read_trace(path)
        for rate in RATES:
            for name, completions in COMPLETIONS.items():
                r = measure(trace, rate, completions, draws)
                print(
                    f"| {path} | {rate:g} | {name} | {r['predicted']:.3f} | {r['realised']:.3f} | {r['skipping']:.3f} |"
                    f" {1 + r['off']:.3f} +- {r['error']:.3f} |",
                    flush=True,
                )
                rows.append({"trace": path, "rate": rate, "completions": name} | r)
    for rate in RATES:
        off = np.array([row["off"] for row in rows if row["rate"] == rate])
        print(
            f"rate {rate:g}: {len(off)} rows, off {off.mean():+.3f} in the mean ({off.min():+.3f} to {off.max():+.3f}),"
            f" {int((off < 0).sum())} below 0, {int((np.abs(off) > MOST_OFF).sum())} beyond {MOST_OFF:.0%}"
        )
    return rows


def against_compare(home: Path) -> list[dict[str, Any]]:
    """Simulated and measured speed-ups of each finished seed."""
    rows: list[dict[str, Any]] = []
    print(
        "| seed | its mean, simulated | like for like, 95 % | measured to 90 %, CPU s | held |\n|---|---|---|---|---|"
    )
    for seed in sorted(home.glob("seed*"), key=lambda path: int(path.name[4:])):
        if not all((seed / arm / "summary.json").exists() for arm in ("grpo", "dppo")):
            continue
        number = int(seed.name[4:])
        trace = read_trace(str(seed / "grpo" / "trace.jsonl"))
        costs = fit_costs(trace, None, None)
        base, one = (simulate(trace, method, costs, capacity_of(trace)) for method in ("grpo", "dppo"))
        arms = parse_arms("grpo,dppo", trace.config, 2.0)
        runs = [read_method_run(arm.name, number, seed / arm.directory) for arm in arms]
        verdict, noise = judge(runs, arms), pair_noise(runs[0])
        low, high = like_for_like(one, base) or (0.0, 0.0)
        least, most = like_for_like(one, base, noise or 0.0) or (0.0, 0.0)
        factors = next(arm for arm in verdict.arms if arm.arm == "dppo").by_seed["train_cpu_s"]["0.9"]
        measured = factors[0] if factors else 0.0
        held = least <= measured <= most
        simulated = f"{low:.2f}-{high:.2f} | {least:.2f}-{most:.2f}"
        print(f"| {number} | {simulated} | {measured:.2f} | {'yes' if held else 'no'} |", flush=True)
        rows.append({"seed": number, "mean": [low, high], "pair": [least, most], "measured": measured, "held": held})
    if rows:
        speedups = np.array([row["measured"] for row in rows])
        print(f"held on {sum(row['held'] for row in rows)} of {len(rows)}; measured median {np.median(speedups):.2f}")
    return rows


def main() -> None:
    """Replay every trace, print the table, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", metavar="TRACE")
    parser.add_argument("--compare", type=Path, metavar="DIR")
    parser.add_argument("--draws", type=int, default=DRAWS)
    parser.add_argument("--json", help="write one JSON object with every figure here")
    args = parser.parse_args()
    result: dict[str, Any] = {
        "benchmark": "variance_account",
        "account": account(args.traces, args.draws) if args.traces else [],
        "like_for_like": against_compare(args.compare) if args.compare else [],
        "versions": {"dppo_megatron": __version__, "python": platform.python_version(), "numpy": np.__version__},
        "machine": {"platform": platform.platform(), "processor": platform.machine(), "cpus": os.cpu_count()},
    }
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
