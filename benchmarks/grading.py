"""Benchmarks of grading, one per subcommand:

python benchmarks/grading.py accuracy [--json FILE]
python benchmarks/grading.py throughput [--json FILE]
python benchmarks/grading.py cost
"""

from __future__ import annotations

import sys

from grading_accuracy import main as accuracy
from grading_cost import main as cost
from grading_throughput import main as throughput

COMMANDS = {"accuracy": accuracy, "throughput": throughput, "cost": cost}


def main() -> int:
    """Run the subcommand."""
    if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
        print(f"usage: python benchmarks/grading.py {{{','.join(COMMANDS)}}} ...", file=sys.stderr)
        return 2
    return COMMANDS[sys.argv[1]](sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
