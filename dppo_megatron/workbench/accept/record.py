"""What has been measured so far, on disk after every step, and the verdict on each figure.

`accept.json` holds both, and a page shows them that needs no network and no script. Rows are computed from the record
and the table in `bars.py` alone.
"""

from __future__ import annotations

import contextlib
import html
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, TypeAlias

from dppo_megatron.files import write_text
from dppo_megatron.texts import plain
from dppo_megatron.types import UserError
from dppo_megatron.workbench.accept.bars import STEPS, Figure, Step
from dppo_megatron.workbench.report.document import write_html

Verdict: TypeAlias = Literal["pass", "fail", "shown", "not run"]
FILE, PAGE = "accept.json", "accept.html"
_CHIP: dict[Verdict, str] = {"pass": "good", "fail": "bad", "shown": "", "not run": "warn"}


@dataclass
class Ran:
    """What is known of a step."""

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


@dataclass
class Record:
    options: dict[str, str]
    facts: dict[str, Any] = field(default_factory=dict)
    """Of the machine, as the step `environment` found them."""
    steps: dict[str, Ran] = field(default_factory=dict)

    def rows(self) -> list[FigureRow]:
        """Every figure of the table, in its order."""
        return [self._row(step, name, figure) for step in STEPS for name, figure in step.figures.items()]

    def _row(self, step: Step, name: str, figure: Figure) -> FigureRow:
        ran = self.steps.get(step.name, Ran("not run", "not asked for"))
        found = ran.figures.get(name, {})
        value, prediction = found.get("value"), found.get("prediction")
        if prediction is None:
            prediction = self.facts.get("predictions", {}).get(step.name, {}).get(name, figure.predicted)
        verdict, note = _judged(figure, value, prediction, on_cpu=not self.facts.get("gpus")), found.get("note", "")
        if value is None:
            verdict, note = self._missing(ran, figure, note)
        return FigureRow(
            step.name, figure.what, figure.unit, value, prediction, _bar(figure), verdict, note, figure.source
        )

    def _missing(self, ran: Ran, figure: Figure, note: str) -> tuple[Verdict, str]:
        if note:
            return "not run", note
        if ran.state == "begun":
            return "not run", "interrupted; the same command goes on here"
        if ran.state == "not run":
            return "not run", ran.why
        if not self.facts.get("gpus") and not figure.on_cpu and self.facts:
            return "not run", "no CUDA device"
        return "fail", ran.why or "the step ended without a number for it"

    def write(self, directory: Path) -> None:
        """Replace file and page, each in one move, so that a kill leaves the old or the new one."""
        text = json.dumps(asdict(self) | {"rows": [asdict(row) for row in self.rows()]}, indent=1)
        write_text(directory / FILE, text + "\n")
        write_page(directory / PAGE, self)


def read_record(directory: Path, options: dict[str, str]) -> Record:
    """The record in `directory`, or a new one. Raises UserError if it cannot be read, or is of another model."""
    try:
        values = json.loads((directory / FILE).read_text(encoding="utf-8"))
        steps = {name: Ran(**ran) for name, ran in values["steps"].items()}
        record = Record(options, values["facts"], steps)
        given = values["options"]["model"]
    except FileNotFoundError:
        return Record(options)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"--out {directory}: {FILE} cannot be read ({error}); name another directory") from None
    if given != options["model"]:
        raise UserError(f"--out {directory}: holds figures of --model {given or '(none)'}; name another directory")
    return record


def read_figures(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """What a step's process has written; a line that a kill has truncated is left out."""
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            values = json.loads(line)
            yield values.pop("figure"), values


def _judged(figure: Figure, value: float | None, prediction: float | None, *, on_cpu: bool) -> Verdict:
    bounded = figure.least is not None or figure.most is not None
    if value is None or not bounded or (on_cpu and figure.on_cpu != "judged"):
        return "shown"
    scale = prediction if figure.of_prediction else 1.0
    if scale is None:
        return "shown"
    is_above = figure.least is None or value >= figure.least * scale
    is_below = figure.most is None or value <= figure.most * scale
    return "pass" if is_above and is_below else "fail"  # a NaN is neither


def _bar(figure: Figure) -> str:
    signs = (("≥", figure.least), ("≤", figure.most))
    bounds = [f"{sign} {bound:g}" for sign, bound in signs if bound is not None]
    return " and ".join(bounds) + (" of prediction" if bounds and figure.of_prediction else "")


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
            f'<div class="card scroll"><table class="figures">{head}{"".join(own)}</table></div></section>'
        )
    machine = "".join(_line("td", (_text(what), _text(found))) for what, found in record.facts.get("report", []))
    parts.append(f'<section><h2>Machine</h2><div class="card scroll"><table>{machine}</table></div></section>')
    template = files("dppo_megatron.workbench.accept") / "assets" / "accept.html"
    write_html(path, template, "dppo-megatron accept", parts, [])


def _row(row: FigureRow) -> str:
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
