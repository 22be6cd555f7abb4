"""The record as one HTML file that needs no network and no script."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path

from dppo_megatron.texts import plain
from dppo_megatron.workbench.accept.bars import STEPS
from dppo_megatron.workbench.accept.record import Record, Row, Verdict
from dppo_megatron.workbench.report.document import write_html

_CHIP: dict[Verdict, str] = {"pass": "good", "fail": "bad", "shown": "", "not run": "warn"}


def write_page(path: Path, record: Record) -> None:
    """Write the page. Raises UserError if `path` cannot be written."""
    rows = record.rows()
    counts = Counter(row.verdict for row in rows)
    chips = " ".join(_chip(verdict, f"{counts[verdict]} {verdict}") for verdict in _CHIP)
    device = _text(record.facts.get("device", "not found out"))
    of = "" if record.facts.get("gpus") else "<p class='lead'>Predictions of `plan` are for an H200.</p>"
    parts = [f'<section><h2>Accept: {device}</h2>{of}<p class="row">{chips}</p></section>']
    for step in STEPS:
        ran = record.steps.get(step.name)
        took = f", {ran.seconds:.0f} s" if ran and ran.seconds else ""
        own = [_row(row) for row in rows if row.step == step.name]
        head = _line("th", ("what", "measured", "predicted", "bar", "verdict", "note", "why this bar"))
        parts.append(
            f'<section id="{step.name}"><h2>{_text(step.what)}</h2><p class="lead"><code>{step.name}</code>{took}</p>'
            f'<div class="card scroll"><table>{head}{"".join(own)}</table></div></section>'
        )
    machine = "".join(_line("td", (_text(what), _text(found))) for what, found in record.facts.get("report", []))
    parts.append(f'<section><h2>Machine</h2><div class="card scroll"><table>{machine}</table></div></section>')
    template = files("dppo_megatron.workbench.accept") / "assets" / "accept.html"
    write_html(path, template, "dppo-megatron accept", parts, [])


def _row(row: Row) -> str:
    value, prediction = (_number(one, row.unit) for one in (row.value, row.prediction))
    cells = (_text(row.what), value, prediction, _text(row.bar), _chip(row.verdict, row.verdict))
    return _line("td", (*cells, _text(row.note), _text(row.source)))


def _number(value: float | None, unit: str) -> str:
    return "-" if value is None else _text(f"{value:.4g} {unit}".strip())


def _chip(verdict: Verdict, text: str) -> str:
    return f'<span class="chip {_CHIP[verdict]}">{_text(text)}</span>'


def _line(cell: str, cells: Iterable[str]) -> str:
    return "<tr>" + "".join(f"<{cell}>{one}</{cell}>" for one in cells) + "</tr>"


def _text(text: object) -> str:
    return html.escape(plain(str(text)))
