"""Measures the cost of each part of the trainer's data plane against its bars; docs/data_plane.md has the table.

    python benchmarks/data_plane.py [PART ...|all] [--smoke] [--json FILE]

Engines are canned servers and receivers in processes of their own. Costs are CPU seconds, which depend less on other
load than wall time does. The exit code is 1 if a bar is missed. `--smoke` runs every part at a small size, for the test
suite, and judges only figures that do not depend on the machine.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from plane.common import Bar, table

_SHARED = {"__init__", "common", "canned", "clients"}
PARTS = tuple(sorted({path.stem for path in (Path(__file__).parent / "plane").glob("*.py")} - _SHARED))


def main() -> int:
    """Run the parts and print their bars."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["all"], metavar="PART", help=f"all, or of {', '.join(PARTS)}")
    parser.add_argument("--smoke", action="store_true", help="small sizes: only whether it runs and the counts hold")
    parser.add_argument("--json", metavar="FILE", help="write the bars here")
    arguments = parser.parse_args()
    names = PARTS if "all" in arguments.parts else arguments.parts
    if unknown := set(names) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    bars: list[Bar] = []
    for name in names:
        new: list[Bar] = importlib.import_module(f"plane.{name}").run(arguments.smoke)
        print(table(new), flush=True)
        bars += new
    if arguments.json:
        rows = [asdict(bar) | {"holds": bar.holds} for bar in bars]
        Path(arguments.json).write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    judged = [bar for bar in bars if not (arguments.smoke and bar.is_time)]
    return 0 if all(bar.holds for bar in judged) else 1


if __name__ == "__main__":
    sys.exit(main())
