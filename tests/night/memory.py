"""Hours of training with a real vLLM server, one step ahead, and what it does to memory.

    PYTHONPATH=$PWD/tests python -m night.memory --hours 8 --python /envs/vllm/bin/python --out DIRECTORY
    PYTHONPATH=$PWD/tests python -m night.memory --out DIRECTORY        what the record there says, also meanwhile

Every 10 s the anonymous memory (RssAnon: neither files nor shared memory) of each process of the trainer goes into
`memory.tsv`. The first third is warm-up; over the rest a line is fitted through the means of 20 equal spans of time:
its slope and standard error, in MB an hour. Means of spans, because neighbouring samples are alike and would make the
error too small. The server is stopped for longer than a probe may take, and killed, in turn; its memory is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import psutil
from support.job import REPOSITORY, settings, write_job_files

ROLES = {"client": "rollout client", "rewards": "grader", "keeper": "keeper", "tracker": "tracker"}
EVERY_S, SPANS, MOST_MB_AN_HOUR = 10.0, 20, 1.0
VALUES = {
    "steps": 1_000_000,
    "actor__optimizer__learning_rate": 1e-7,  # or it has soon learnt all there is, and trains on nothing
    "sft__steps": 2,
    "reward__function": "support.faulty:paced_length_parity",
    "reward__min_self_consistency": 0,
    "checkpoint__every_steps": 50,
    "checkpoint__keep": 2,
    "rollout__async_steps": 1,
    "rollout__prompts_per_step": 8,
    "rollout__engine": "vllm",
    "rollout__servers__launch": "local",
    "rollout__limits__max_concurrent_sequences": 64,
    "rollout__limits__probe_every_s": 1,
    "rollout__limits__probe_timeout_s": 15,
    "rollout__limits__engine_wait_s": 900,
    "rollout__limits__start_timeout_s": 1800,
    "eval__every_steps": 100,
}


def main() -> int:
    """Exit code 0 if the run has ended well, has made steps, and has not grown by more than a megabyte an hour."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=0.0)
    parser.add_argument("--python", default="", help="interpreter of vLLM's environment")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--blow-minutes", type=float, default=20.0, help="between two blows to the server; 0: none")
    parser.add_argument("--step-s", type=float, default=0.0, help="a grading takes so long after the warm-up")
    parser.add_argument("--fast-hours", type=float, default=0.4, help="with --step-s: how long a grading takes no time")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    out: Path = arguments.out
    code = 0
    if arguments.hours:
        out.mkdir(parents=True, exist_ok=True)
        code = _train(out, arguments)
    growth = told_of(out)
    steps = _steps(out)
    print(f"{steps} steps, trainer's exit code {code}")
    grows = any(slope - 2 * error > MOST_MB_AN_HOUR for slope, error in growth.values())
    return int(bool(code or steps < 1 or not growth or grows))


def _train(out: Path, arguments: argparse.Namespace) -> int:
    files = write_job_files(out / "task")
    values = settings(files, out / "run", rollout__servers__python=arguments.python, **VALUES)
    hours, blow_minutes = arguments.hours, arguments.blow_minutes
    slow_from = time.time() + 3600 * (arguments.fast_hours if arguments.step_s else 1e6)
    pace = {"DPPO_GRADE_SLOW_FROM": str(slow_from), "DPPO_GRADE_S": str(arguments.step_s)}
    command = [sys.executable, "-m", "dppo_megatron", "train", str(REPOSITORY / "configs" / "quickstart.yaml"), *values]
    with (out / "train.log").open("ab") as log:
        trainer = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | pace | {"OMP_NUM_THREADS": "1"})
    end, blow_at, blows = time.monotonic() + 3600 * hours, time.monotonic() + 60 * blow_minutes, 0
    try:
        with (out / "memory.tsv").open("a") as record:
            while trainer.poll() is None and time.monotonic() < end:
                time.sleep(EVERY_S)
                for name, size in _memory_of(trainer.pid).items():
                    record.write(f"{time.time():.0f}\t{name}\t{size}\n")
                record.flush()
                if blow_minutes and time.monotonic() > blow_at and _steps(out) > 2:
                    print(_blow(trainer.pid, blows), flush=True)
                    blow_at, blows = time.monotonic() + 60 * blow_minutes, blows + 1
        if trainer.poll() is None:
            trainer.send_signal(signal.SIGTERM)
        return trainer.wait(1800)
    finally:
        trainer.kill()


def _steps(out: Path) -> int:
    metrics = out / "run" / "metrics.jsonl"
    return metrics.read_text().count("\n") - 1 if metrics.exists() else 0


def _memory_of(pid: int) -> dict[str, int]:
    """Bytes of anonymous memory by process; of servers, which are processes of another program, none."""
    found: dict[str, int] = {}
    with contextlib.suppress(psutil.Error, OSError):
        own = psutil.Process(pid)
        for process in [own, *own.children(recursive=True)]:
            with contextlib.suppress(psutil.Error, OSError):
                line = " ".join(process.cmdline())
                if "vllm" in line.lower() and process.pid != pid:
                    continue
                status = Path(f"/proc/{process.pid}/status").read_text()
                if "RssAnon:" not in status:  # it has ended, and waits to be collected
                    continue
                kib = int(status.partition("RssAnon:")[2].split()[0])
                role = "trainer" if process.pid == pid else next((r for k, r in ROLES.items() if k in line), "other")
                found[f"{role} {process.pid}"] = kib * 1024
    return found


def _servers(pid: int) -> list[int]:
    """All processes of vLLM that the trainer has started."""
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "vllm" in " ".join([process.name(), *process.cmdline()]).lower():
                found.append(process.pid)
    return found


def _blow(pid: int, number: int) -> str:
    """To the server: all of it stopped for half a minute, or one process of it killed."""
    servers = _servers(pid)
    if number % 2:
        victim = random.choice(servers)
        os.kill(victim, signal.SIGKILL)
        return f"{time.ctime()}: killed {victim} of {servers}"
    for kind, pause_s in ((signal.SIGSTOP, 30.0), (signal.SIGCONT, 0.0)):
        for server in servers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(server, kind)
        time.sleep(pause_s)
    return f"{time.ctime()}: stopped {servers} for 30 s"


def told_of(out: Path) -> dict[str, tuple[float, float]]:
    """Slope and standard error in MB an hour of each process that was there for most of the time; prints them."""
    samples: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for line in (out / "memory.tsv").read_text().splitlines():
        at, name, size = line.split("\t")
        samples[name].append((float(at) / 3600, float(size) / 1e6))
    longest = max((len(one) for one in samples.values()), default=0)
    growth = {}
    for name, one in samples.items():
        if len(one) < 0.8 * longest or len(one) < 3 * SPANS:
            continue
        hours, megabytes = np.array(one[len(one) // 3 :]).T
        slope, error = fitted(hours, megabytes)
        growth[name] = slope, error
        warm_up, rest = hours[0] - one[0][0], hours[-1] - hours[0]
        print(
            f"{name}: {slope:+.2f} +- {error:.2f} MB an hour, over {rest:.2f} h at {megabytes.mean():.1f} MB,"
            f" after {warm_up:.2f} h"
        )
    return growth


def fitted(hours: np.ndarray, megabytes: np.ndarray) -> tuple[float, float]:
    """Slope and its standard error of a line through the means of `SPANS` equal parts."""
    x, y = (np.array([part.mean() for part in np.array_split(one, SPANS)]) for one in (hours, megabytes))
    centred = x - x.mean()
    slope = float((centred * y).sum() / (centred**2).sum())
    rest = y - y.mean() - slope * centred
    return slope, float(np.sqrt((rest**2).sum() / (len(x) - 2) / (centred**2).sum()))


if __name__ == "__main__":
    sys.exit(main())
