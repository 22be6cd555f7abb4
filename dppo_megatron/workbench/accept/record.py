"""What has been measured so far, on disk after every step, and the verdict on each figure.

`accept.json` holds both, and `accept.html` shows them without network or scripts. Rows are computed from the record and
the table in `bars.py` alone.
"""

from __future__ import annotations

import contextlib
import html
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec

from dppo_megatron.config.paths import writing
from dppo_megatron.files import write_text
from dppo_megatron.texts import plain
from dppo_megatron.types import UserError
from dppo_megatron.workbench.accept.bars import STEPS, Figure
from dppo_megatron.workbench.report.document import write_html

Verdict: TypeAlias = Literal["pass", "fail", "shown", "not run"]
FILE, PAGE, FIGURES = "accept.json", "accept.html", "figures.jsonl"
_CHIP: dict[Verdict, str] = {"pass": "good", "fail": "bad", "shown": "", "not run": "warn"}


@dataclass
class Ran:
    """How a step ended, and its figures."""

    state: Literal["begun", "done", "failed", "not run"]
    """`begun`: it is running, or the whole command was killed while it was."""
    why: str = ""
    seconds: float = 0.0
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Name -> value, prediction, note."""


@dataclass(frozen=True, slots=True)
class FigureRow:
    """A figure beside its prediction, its bar and its verdict."""

    step: str
    what: str
    unit: str
    value: float | None
    prediction: float | None
    bar: str
    verdict: Verdict
    note: str
    source: str

    def number(self, value: float | None) -> str:
        """With its unit."""
        return "-" if value is None else f"{value:.4g} {self.unit}".strip()


@dataclass
class Record:
    options: dict[str, str]
    facts: dict[str, Any] = field(default_factory=dict)
    """About the machine, from the step `environment`."""
    steps: dict[str, Ran] = field(default_factory=dict)

    def rows(self) -> list[FigureRow]:
        """Every figure of the table, in its order."""
        rows = []
        for step in STEPS:
            ran = self.steps.get(step.name, Ran("not run", "not requested"))
            for name, figure in step.figures.items():
                noted = ran.figures.get(name, {})
                value, prediction, note = noted.get("value"), noted.get("prediction"), noted.get("note", "")
                verdict = _judged(figure, value, prediction)
                if value is None:
                    verdict, note = self._missing(ran, name, note)
                known = (value, prediction, _bar(figure), verdict, note, figure.source)
                rows.append(FigureRow(step.name, figure.what, figure.unit, *known))
        return rows

    def _missing(self, ran: Ran, name: str, note: str) -> tuple[Verdict, str]:
        if note or ran.state in ("begun", "not run"):
            return "not run", note or ran.why or "interrupted; the same command continues here"
        if ran.state == "done" and name not in ran.figures and not self.facts.get("gpus"):
            return "not run", "no CUDA device"
        return "fail", ran.why or "the step ended without a number for it"

    def write(self, directory: Path) -> None:
        """Replace file and page, each in one move, so that a kill leaves the old or the new one. Raises UserError."""
        text = json.dumps(asdict(self) | {"rows": [asdict(row) for row in self.rows()]}, indent=1)
        with writing(directory / FILE):
            write_text(directory / FILE, text + "\n")
        write_page(directory / PAGE, self)


def read_record(directory: Path, options: dict[str, str]) -> Record:
    """The record in `directory`, or a new one. Raises UserError if it cannot be read, or is for another model."""
    try:
        values = json.loads((directory / FILE).read_text(encoding="utf-8"))
        record = msgspec.convert(values, Record)  # msgspec's own reader refuses lone surrogates: a --model of any bytes
    except FileNotFoundError:
        return Record(options)
    except (OSError, ValueError) as error:
        raise UserError(f"--out {directory}: {FILE} cannot be read ({error}); name another directory") from None
    if (model := record.options.get("model")) != options["model"]:
        raise UserError(f"--out {directory}: holds figures of --model {model or '(none)'}; name another directory")
    record.options = options
    return record


def read_figures(directory: Path) -> dict[str, dict[str, Any]]:
    """The figures that a step's process has written, by name; a line that a kill has truncated is left out."""
    path, figures = directory / FIGURES, dict[str, dict[str, Any]]()
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            values = json.loads(line)
            figures.setdefault(values.pop("figure"), {}).update(values)
    return figures


def _judged(figure: Figure, value: float | None, prediction: float | None) -> Verdict:
    scale = prediction if figure.of_prediction else 1.0
    if value is None or scale is None or (figure.least is None and figure.most is None):
        return "shown"
    is_above = figure.least is None or value >= figure.least * scale
    is_below = figure.most is None or value <= figure.most * scale
    return "pass" if is_above and is_below else "fail"  # a NaN fails


def _bar(figure: Figure) -> str:
    signs = (("≥", figure.least), ("≤", figure.most))
    bounds = [f"{sign} {bound:g}" for sign, bound in signs if bound is not None]
    return " and ".join(bounds) + (" of prediction" if bounds and figure.of_prediction else "")


def write_page(path: Path, record: Record) -> None:
    """Write the page. Raises UserError if `path` cannot be written."""
    rows = record.rows()
    counts = Counter(row.verdict for row in rows)
    chips = " ".join(_chip(verdict, f"{counts[verdict]} {verdict}") for verdict in _CHIP)
    device = _text(record.facts.get("device", "unknown device"))
    parts = [f'<section><h2>Accept: {device}</h2><p class="row">{chips}</p></section>']
    figures = [_line("th", ("what", "measured", "predicted", "bar", "verdict", "note", "why this bar"))]
    for step in STEPS:
        seconds = record.steps[step.name].seconds if step.name in record.steps else 0.0
        took = f"{step.name}, {seconds:.0f} s" if seconds else step.name
        figures.append(f'<tr><th colspan="7">{_text(step.what)} ({took})</th></tr>')
        for row in [one for one in rows if one.step == step.name]:
            measured = [row.what, row.number(row.value), row.number(row.prediction), row.bar]
            verdict = _chip(row.verdict, row.verdict)
            figures.append(_line("td", [*map(_text, measured), verdict, _text(row.note), _text(row.source)]))
    machine = [_line("td", map(_text, row)) for row in record.facts.get("report", [])]
    for title, kind, lines in (("Figures", "figures", figures), ("Machine", "", machine)):
        table = f'<table class="{kind}">{"".join(lines)}</table>'
        parts.append(f'<section><h2>{title}</h2><div class="card scroll">{table}</div></section>')
    template = files("dppo_megatron.workbench.accept") / "assets" / "accept.html"
    write_html(path, template, "dppo-megatron accept", parts, [])


def _chip(verdict: Verdict, text: str) -> str:
    return f'<span class="chip {_CHIP[verdict]}">{_text(text)}</span>'


def _line(cell: str, cells: Iterable[str]) -> str:
    return "<tr>" + "".join(f"<{cell}>{one}</{cell}>" for one in cells) + "</tr>"


def _text(text: object) -> str:
    return html.escape(plain(str(text)))
