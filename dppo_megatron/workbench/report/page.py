"""The page about runs: their columns, findings and samples, as data for the code in `assets/`.

What a model wrote is data and never markup: it is embedded as JSON in which every `<` is escaped, and the page's code
inserts it as text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dppo_megatron.workbench.report.browser import Samples, read_samples, rounded
from dppo_megatron.workbench.report.document import ASSETS, script_data, write_html
from dppo_megatron.workbench.report.findings import findings
from dppo_megatron.workbench.runs.record import RunRecord, default_settings

_SCRIPTS = ("data.js", "charts.js", "sections.js", "samples.js", "page.js")
SAMPLE_BYTES = 16_000_000
"""Limit for the samples of all runs together: a browser opens a page of this size without delay."""


def write_page(path: Path, runs: Sequence[RunRecord]) -> None:
    """Write the report of `runs`.

    Raises:
        UserError: `path` cannot be written.
    """
    _name_apart(runs)
    parts: list[str] = []
    for number, run in enumerate(runs):
        samples = read_samples(run.path, str(run.setting("model.hf_path", "")), SAMPLE_BYTES // len(runs))
        run.notes += [f"samples/{name} cannot be read and is left out" for name in sorted(samples.unreadable)]
        parts += _sample_data(number, samples)
    about = {"runs": [_data(run) for run in runs], "defaults": default_settings()}
    parts.insert(0, script_data("report-data", about))
    write_html(path, ASSETS / "page.html", "dppo-megatron report", parts, [ASSETS / name for name in _SCRIPTS])


def _name_apart(runs: Sequence[RunRecord]) -> None:
    """Prefix runs of the same name with their parent directory."""
    names = [run.name for run in runs]
    for run in runs:
        if names.count(run.name) > 1:
            run.name = f"{run.path.resolve().parent.name}/{run.name}"


def _data(run: RunRecord) -> dict[str, Any]:
    return {
        "name": run.name,
        "path": str(run.path),
        "status": run.status,
        "steps": run.steps,
        "columns": {key: [rounded(value) for value in values] for key, values in run.columns.items()},
        "ledger": run.ledger,
        "summary": run.summary,
        "settings": run.settings,
        "findings": [asdict(one) for one in findings(run)],
    }


def _sample_data(number: int, samples: Samples) -> list[str]:
    """One element per step, which the page parses when the step is opened."""
    index = {
        "steps": list(samples.steps),
        "groups_in_step": samples.groups_in_step,
        "tokens": samples.tokens,
        "note": samples.note,
    }
    parts = [script_data(f"samples-{number}", index)]
    return parts + [script_data(f"samples-{number}-{step}", groups) for step, groups in samples.steps.items()]
