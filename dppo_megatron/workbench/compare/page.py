"""The comparison as one HTML file that needs no network: error bars, curves, where the seconds go."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

from dppo_megatron.workbench.report.document import ASSETS, script_data, write_html

_OWN = files("dppo_megatron.workbench.compare") / "assets"


def write_page(path: Path, title: str, text: str, values: dict[str, Any]) -> None:
    """Write the page.

    Args:
        text: the table, as printed.
        values: what results.json holds.

    Raises:
        UserError: `path` cannot be written.
    """
    runs = [{name: value for name, value in run.items() if name != "solved"} for run in values["runs"]]
    about = {name: values[name] for name in ("date", "versions", "machine")}
    data = {"runs": runs, "verdict": values["verdict"], "notes": values["notes"], "about": about}
    data |= {"title": title, "text": text}
    scripts = [ASSETS / "data.js", ASSETS / "charts.js", _OWN / "compare.js"]
    write_html(path, _OWN / "compare.html", title, [script_data("report-data", data)], scripts)
