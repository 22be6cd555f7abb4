"""How long the report of a long run takes, and how large it is: 1,000 steps of 64 groups of 8, 64 of them with samples
(bars: 5 CPU seconds, 15 MB).

    python benchmarks/report.py [--steps 1000] [--repeat 5]
    python benchmarks/report.py --prompts 512 --group 16 --tokens 2000 --repeat 1     # a large run, for the size

CPU seconds of this process with reading but without imports, as median (lowest - highest). Tokens and texts are random:
real ones compress better.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.record import write_record  # type: ignore[import-not-found]

from dppo_megatron.workbench.report.page import write_page
from dppo_megatron.workbench.runs.run_record import read_run


def main() -> int:
    """Write the same report several times; exit code 1 if the median misses the bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=0, help="of a completion; then two groups a step are recorded")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sampled = range(max(1, arguments.steps - 63), arguments.steps + 1)
        run = write_record(
            Path(folder) / "run",
            arguments.steps,
            prompts=arguments.prompts,
            group=arguments.group,
            sampled=sampled,
            groups=2 if arguments.tokens else 0,
            tokens=arguments.tokens,
        )
        page = Path(folder) / "report.html"
        seconds = [_cpu_s(run, page) for _ in range(arguments.repeat)]
        size_mb = page.stat().st_size / 1e6
    median = statistics.median(seconds)
    print(f"{arguments.steps} steps: {median:.2f} CPU s ({min(seconds):.2f} - {max(seconds):.2f}), {size_mb:.1f} MB")
    return int(size_mb > 15 or (median >= 5 and not arguments.tokens))


def _cpu_s(run: Path, page: Path) -> float:
    before = time.process_time()
    write_page(page, [read_run(run)])
    return time.process_time() - before


if __name__ == "__main__":
    sys.exit(main())
