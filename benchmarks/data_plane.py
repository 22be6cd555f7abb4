"""What the trainer's own data plane costs, part by part, against its bars; docs/data_plane.md has the table.

    python benchmarks/data_plane.py [PART ...|all] [--smoke] [--json FILE]

Engines are canned servers and receivers in processes of their own; costs are CPU seconds, so that a busy machine moves
them less. The exit code is 1 if a bar is missed. `--smoke` runs every part in small, for the test suite: there only
what does not depend on the machine is judged.
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
    parser.add_argument("--smoke", action="store_true", help="in small: does it run, and do the counts hold")
    parser.add_argument("--json", metavar="FILE", help="write the bars here")
    arguments = parser.parse_args()
    names = PARTS if "all" in arguments.parts else arguments.parts
    if unknown := set(names) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    bars: list[Bar] = []
    for name in names:
        found: list[Bar] = importlib.import_module(f"plane.{name}").run(arguments.smoke)
        print(table(found), flush=True)
        bars += found
    if arguments.json:
        rows = [asdict(bar) | {"holds": bar.holds} for bar in bars]
        Path(arguments.json).write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    judged = [bar for bar in bars if not (arguments.smoke and bar.is_time)]
    return 0 if all(bar.holds for bar in judged) else 1


if __name__ == "__main__":
    sys.exit(main())
