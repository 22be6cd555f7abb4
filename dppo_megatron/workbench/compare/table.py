"""The comparison as text, as JSON for other tools, and as one HTML file that needs no network."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

from dppo_megatron import __version__
from dppo_megatron.config.paths import writing
from dppo_megatron.files import write_text
from dppo_megatron.texts import aligned
from dppo_megatron.workbench.compare.arms import MethodRun
from dppo_megatron.workbench.compare.verdict import BUDGETS, FEWEST, MOST_CLOCK_SPREAD, SHARES, ArmVerdict, Verdict
from dppo_megatron.workbench.report.document import ASSETS, script_data, write_html

_OWN = files("dppo_megatron.workbench.compare") / "assets"
_PACKAGES = ("torch", "megatron-core", "transformers", "numpy")


def table(verdict: Verdict) -> str:
    """The table to print: medians over seeds, with 95 % intervals of the median in brackets."""
    head = ["method", "seeds", "end", "end - base", "CPU s", "RL s"]
    head += [f"to {share:.0%}: {unit}" for share in SHARES for unit in ("CPU s", "s")]
    head += [f"at 1/{round(1 / budget)}" for budget in BUDGETS]
    return "\n".join([*headline(verdict), "", *aligned([head, *map(_row, verdict.arms)]), "", *legend(verdict)])


def headline(verdict: Verdict) -> list[str]:
    """Lines above the table: the baseline, its gain, and a warning if the clock cannot be used."""
    among = ", ".join(verdict.candidates)
    chosen = f", the soonest of {among}" if len(verdict.candidates) > 1 else ""
    gain = f"; gain of {verdict.gain_from}" if verdict.gain_from != verdict.baseline else ""
    end = next(one.end for one in verdict.arms if one.arm == verdict.gain_from)
    clock = (
        f"The clock is not to be used: a CPU second took {verdict.clock_spread:.1f} times as long under one method as"
        " under another, so the machine was not equally busy. (Or servers or a GPU do the work, which CPU seconds leave"
        " out: then those are not to be used.)"
    )
    return [
        *([clock] if verdict.clock_spread > MOST_CLOCK_SPREAD else []),
        f"base: {verdict.baseline}{chosen}{gain}: {100 * verdict.start:.1f} -> {100 * end:.1f} %,"
        f" {100 * verdict.gain:+.1f} points a seed (medians)",
    ]


def legend(verdict: Verdict) -> list[str]:
    biased = [one.arm for one in verdict.arms if one.biased]
    grown = [f"{one.arm} {one.variance:.2f}" for one in verdict.arms if one.variance is not None and not one.biased]
    left_out = max(one.seeds - len(values) for one in verdict.arms for values in one.by_seed["train_cpu_s"].values())
    seeds = verdict.arms[0].seeds
    why = "base gained nothing there, or never reached its level"
    if min(one.evaluations for one in verdict.arms) < FEWEST:
        why = f"a run has fewer than {FEWEST} evaluations, that of its start included (eval.every_steps)"
    missing = f"{left_out} of {seeds} seeds are in no factor: {why}."
    noise = [
        f"{one.arm} to {float(share):.0%}, {unit}: {factor.times()}"
        for one in verdict.arms
        for clock, unit in (("train_cpu_s", "CPU s"), ("train_s", "s"))
        for share, factor in one.factors[clock].items()
        if factor and factor.is_noise
    ]
    return [
        "end: pass@1, mean of the last two evaluations, the start's left out. end - base: over the same problems (95 %"
        " interval).",
        "to 90 %, 95 %: base's own seconds to that share of its gain, over the method's; medians over seeds (95 %"
        " interval), curves smoothed over three evaluations.",
        *([f"-: the error is larger than the effect, the interval contains 1: {'; '.join(noise)}."] if noise else []),
        *([missing] if left_out else []),
        "at 1/2, 1/3: pass@1 after that part of base's CPU seconds. CPU seconds are those of the trainer's process,"
        " without graders and servers. Evaluations are not counted in any cost.",
        *([f"Variance of a step's gradient over that without pruning, realised: {', '.join(grown)}."] if grown else []),
        f"Methods that change the expected gradient: {', '.join(biased) or 'none'}.",
    ]


def difference_text(one: ArmVerdict) -> str:
    """Example: `-0.4 (-1.2 .. +0.4) noise`."""
    end = one.end_difference
    if end is None:
        return "-"
    if end.low is None or end.high is None:
        return f"{100 * end.difference:+.1f}"
    noise = " noise" if end.within_noise else ""
    return f"{100 * end.difference:+.1f} ({100 * end.low:+.1f} .. {100 * end.high:+.1f}){noise}"


def _row(one: ArmVerdict) -> list[str]:
    seconds = [f"{one.costs[clock]:.1f}" for clock in ("train_cpu_s", "train_s")]
    factors = [one.factors[clock][str(share)] for share in SHARES for clock in ("train_cpu_s", "train_s")]
    return [
        *(one.arm, str(one.seeds), f"{100 * one.end:.1f}%", difference_text(one), *seconds),
        *("-" if factor is None or factor.is_noise else factor.times() for factor in factors),
        *(f"{100 * value:.1f}%" for value in one.at_budget_cpu.values()),
    ]


def about() -> dict[str, Any]:
    """Date, versions and machine of the comparison."""
    return {
        "date": time.strftime("%Y-%m-%d %H:%M %Z"),
        "versions": {"dppo-megatron": __version__} | {name: version(name) for name in _PACKAGES},
        "machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()},
    }


def results(verdict: Verdict, runs: Sequence[MethodRun], notes: Sequence[str]) -> dict[str, Any]:
    """What results.json holds."""
    return about() | {"notes": list(notes), "verdict": asdict(verdict), "runs": [asdict(run) for run in runs]}


def write_results(path: Path, values: dict[str, Any]) -> None:
    """Write `values` as JSON. Raises UserError if `path` cannot be written."""
    with writing(path):
        write_text(path, json.dumps(values, indent=2) + "\n")


def write_page(path: Path, title: str, text: str, values: dict[str, Any]) -> None:
    """Write the page: `text` is the table as printed, `values` what results.json holds. Raises UserError if `path`
    cannot be written."""
    runs = [{name: value for name, value in run.items() if name != "solved"} for run in values["runs"]]
    about = {name: values[name] for name in ("date", "versions", "machine")}
    data = {"runs": runs, "verdict": values["verdict"], "notes": values["notes"], "about": about}
    data |= {"title": title, "text": text}
    scripts = [ASSETS / "data.js", ASSETS / "charts.js", _OWN / "compare.js"]
    write_html(path, _OWN / "compare.html", title, [script_data("report-data", data)], scripts)
