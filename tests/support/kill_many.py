"""Kill a run at many random moments, resume it, and compare it with the run that was never interrupted.

    PYTHONPATH=tests python -m support.kill_many [--kills 25] [--minutes 60] [--seed 0] [--layouts tp1,tp2pp2,dp2]

Each trial kills the same run up to three times (also while it is resuming) before it is let end. The suite does a
fixed handful of these (test_resume.py).
"""

from __future__ import annotations

import argparse
import collections
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from test_resume import LAYOUTS, SHORT, assert_same_run

from support.job import write_job_files
from support.killing import PHASES, Kill, run_killed, run_whole

ALL: dict[str, tuple[int, dict[str, Any]]] = LAYOUTS | {"dp2": (2, {})}


def random_kill(rng: random.Random, world_size: int) -> Kill:
    """A moment in one of the phases: on entering a call, or some time into it."""
    phase = rng.choice(PHASES)
    most = {"finish": 1, "reward": 20, "record": 4}.get(phase, 3)
    delay_s = rng.choice([0.0, rng.uniform(0.0, 0.05), rng.uniform(0.0, 0.5)])
    return Kill(phase, rng.randint(1, most), rng.randrange(world_size), delay_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=25, help="for all layouts together (default: 25)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=60.0, help="no further run after so many (default: 60)")
    parser.add_argument("--layouts", default=",".join(ALL))
    arguments = parser.parse_args()
    rng, done = random.Random(arguments.seed), collections.Counter()
    deadline = time.monotonic() + 60 * arguments.minutes
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        files = write_job_files(directory / "task")
        layouts = arguments.layouts.split(",")
        for name in layouts:
            run_whole(files, directory / f"whole_{name}", ALL[name][0], SHORT | ALL[name][1])
        trial = 0
        while sum(done.values()) < arguments.kills and time.monotonic() < deadline:
            name, trial = layouts[trial % len(layouts)], trial + 1
            world_size, layout = ALL[name]
            extra, run_dir = SHORT | layout | {"checkpoint__async_save": rng.random() < 0.5}, directory / "run"
            shutil.rmtree(run_dir, ignore_errors=True)
            for _ in range(rng.randint(1, 3)):
                kill = random_kill(rng, world_size)
                killed = run_killed(files, run_dir, world_size, extra, kill)
                print(f"{name} {kill} async={extra['checkpoint__async_save']} killed={killed}", flush=True)
                done[name, kill.phase] += killed
                if not killed:
                    break
            run_whole(files, run_dir, world_size, extra)
            assert_same_run(run_dir, directory / f"whole_{name}")
            print(f"{sum(done.values())} kills: the same run", flush=True)
    for (name, phase), count in sorted(done.items()):
        print(f"{name:<8} {phase:<12} {count}")
    print(f"{sum(done.values())} kills, every resumed run bit for bit the uninterrupted one")


if __name__ == "__main__":
    sys.exit(main())
