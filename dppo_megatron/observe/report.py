"""The comparison of methods as one self-contained HTML file: a table, and plots as inline SVG."""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
h1 { font-size: 1.4rem } pre { background: #f6f6f4; padding: .8rem; overflow-x: auto; font-size: 13px }
svg { max-width: 100%; height: auto } p.note { color: #555 }
"""


@dataclass(frozen=True, slots=True)
class Line:
    """One run in a plot."""

    label: str
    """Lines with the same label share a colour and one legend entry."""
    x: Sequence[float]
    y: Sequence[float]


@dataclass(frozen=True, slots=True)
class Plot:
    """A line plot."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]


def write_report(path: Path, title: str, text: str, notes: Sequence[str], plots: Sequence[Plot]) -> None:
    """Write the page: `title`, `text` as it stands (a table), `notes`, and the plots."""
    parts = [
        "<!doctype html><html lang='en'><meta charset='utf-8'>",
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style>",
        f"<h1>{html.escape(title)}</h1><pre>{html.escape(text)}</pre>",
        *(f"<p class='note'>{html.escape(note)}</p>" for note in notes),
        *(_svg(plot) for plot in plots),
        "</html>",
    ]
    path.write_text("\n".join(parts) + "\n", encoding="utf-8")


def _svg(plot: Plot) -> str:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8.5, 4.2), layout="constrained")
    colours: dict[str, str] = {}
    for line in plot.lines:
        shown = line.label not in colours
        colour = colours.setdefault(line.label, f"C{len(colours)}")
        axes.plot(line.x, line.y, marker="o", markersize=3, color=colour, label=line.label if shown else None)
    axes.set(title=plot.title, xlabel=plot.x_label, ylabel=plot.y_label)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    pyplot.close(figure)
    drawn = buffer.getvalue()
    return drawn[drawn.index("<svg") :]
