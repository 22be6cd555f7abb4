"""A night of trouble: kills, stops, memory, clocks, disks and damage, and hours with real vLLM servers beside it.

    make test-night [KILLS=1000] [HOURS=8]
    PYTHONPATH=$PWD/tests python -m night [--kills 1000] [--hours 8] [--seed 20261123] [--trial 17] [--vllm-hours 8]

Ends when so many blows have struck and the hours with vLLM are over, or after `--hours`. Each trial is a run that is
struck up to eight times (`trials.py`, `blows.py`); `memory.py` is the run with vLLM. The summary counts blows by kind
and names each failure with what repeats it. A night in which a kind that is possible here has not struck is red, as is
one that was long enough to try each damage and each layout, and has not.
"""

from __future__ import annotations

import argparse
import atexit
import json
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from datetime import date
from pathlib import Path

from support.engines.servers import PYTHON
from support.job import write_job_files

from night.blows import KINDS, impossible
from night.trials import Bench, expected, never_tried, trial


def main() -> int:
    """Exit code 0 if everything that was to be tried was tried, and held."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000, help="blows that have to strike (default: 1000)")
    parser.add_argument("--hours", type=float, default=8.0, help="no further trial after so many (default: 8)")
    parser.add_argument("--vllm-hours", type=float, help="of the run with real vLLM; 0: none (default: --hours)")
    parser.add_argument("--seed", default=f"{date.today():%Y%m%d}")
    parser.add_argument("--trial", type=int, help="this one alone, as a failure names it")
    parser.add_argument("--out", type=Path, help="for failed runs and the memory record (default: a new directory)")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # SIGINT is ignored by what a shell has in the background
    out = arguments.out or Path(tempfile.mkdtemp(prefix="night-"))
    out.mkdir(parents=True, exist_ok=True)
    hours = arguments.hours if arguments.vllm_hours is None else arguments.vllm_hours
    memory = _start_memory(out, hours) if hours and arguments.trial is None else None
    not_here = impossible(out)
    bench = Bench(out / "trials", write_job_files(out / "task"), [kind for kind in KINDS if kind not in not_here])
    bench.directory.mkdir(exist_ok=True)
    count, failures, number = Counter[str](), list[str](), arguments.trial or 0
    deadline = time.monotonic() + 3600 * arguments.hours
    if memory is not None:
        atexit.register(_end, memory)
    while time.monotonic() < deadline and sum(count[kind] for kind in KINDS) < arguments.kills:
        began = time.monotonic()
        try:
            faults = trial(bench, f"{arguments.seed} {number}", count)
        except Exception:  # a fault of the night's own: the other trials go on
            faults = [traceback.format_exc()]
        if faults:
            failures += [f"--seed {arguments.seed} --trial {number}: {fault}" for fault in faults]
            print("\n".join(f"FAILED {fault}" for fault in faults), flush=True)
            _keep(bench, out / f"failed_{number}")
        struck = sum(count[kind] for kind in KINDS)
        print(f"trial {number}: {struck} blows, {len(failures)} failures, {time.monotonic() - began:.0f} s", flush=True)
        number += 1
        if arguments.trial is not None:
            return bool(failures)
    told = _memory(memory, out)
    print("\n" + summary(count, failures, not_here, bench.kinds, told), flush=True)
    return int(bool(failures or never_tried(count, bench.kinds)) or (memory is not None and memory.returncode != 0))


def summary(count: Counter[str], failures: list[str], not_here: dict[str, str], kinds: list[str], told: str) -> str:
    """What a night was."""
    never, named = never_tried(count, kinds), [*kinds, *expected(count, kinds)]
    lines = [f"{kind:<30} {count[kind]}{'   NOT TRIED' if kind in never else ''}" for kind in named]
    lines += [f"{kind:<30} {count[kind]}" for kind in sorted(count.keys() - set(named))]
    lines += [f"{kind:<30} not possible here: {why}" for kind, why in not_here.items()]
    lines += [told] if told else []
    lines += [f"FAILED {failure}" for failure in failures]
    lines += [f"RED: the night was long enough to try each of these, and has not: {', '.join(never)}"] if never else []
    struck = sum(count[kind] for kind in kinds)
    return "\n".join([*lines, f"{struck} blows have struck, {len(failures)} failures"])


def _start_memory(out: Path, hours: float) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "night.memory", "--hours", str(hours), "--out", str(out / "memory")]
    (out / "memory").mkdir(exist_ok=True)
    with (out / "memory" / "log").open("wb") as log:
        return subprocess.Popen([*command, "--python", PYTHON["vllm"]], stdout=log, stderr=log)


def _end(memory: subprocess.Popen[bytes]) -> None:
    if memory.poll() is None:
        memory.terminate()
        memory.wait()


def _memory(memory: subprocess.Popen[bytes] | None, out: Path) -> str:
    if memory is None:
        return ""
    code = memory.wait()
    return f"with vLLM: exit code {code}\n" + (out / "memory" / "log").read_text()


def _keep(bench: Bench, where: Path) -> None:
    """What a failed trial has left, to be looked at."""
    where.mkdir(exist_ok=True)
    for path in (bench.directory / "run", bench.directory / "logs"):
        if path.exists():
            path.rename(where / path.name)
    (where / "wholes.json").write_text(json.dumps({name: str(path) for name, path in bench.wholes.items()}))


if __name__ == "__main__":
    sys.exit(main())
