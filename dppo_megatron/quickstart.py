"""`dppo-megatron quickstart`: makes the arithmetic task and its tiny model, trains, and writes the report.

Each part is a command of its own in a process of its own, so a quickstart does what a user would do and nothing else.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from dppo_megatron.config.ranges import Range
from dppo_megatron.config.shipped import shipped
from dppo_megatron.types import UserError

_DESCRIPTION = """\
Write an arithmetic task and a tiny model into runs/task_seedSEED, train on it for a few minutes of CPU, and report:

  dppo-megatron quickstart
  dppo-megatron quickstart --nproc 4 --tp 2 --pp 2 --seed 1
  dppo-megatron quickstart steps=2 warm_start.steps=10       # any setting of configs/quickstart.yaml
"""
_OURS = ("metrics.jsonl", "config.yaml")
"""A directory with one of these is a run, and may be removed for the next quickstart."""


def add_quickstart(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand to the program's."""
    parser = commands.add_parser(
        "quickstart",
        help="make a small task, train on it and report",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="settings that replace the file's")
    parser.add_argument("--config", metavar="CONFIG", help="YAML file (default: configs/quickstart.yaml)")
    parser.add_argument(
        "--run-dir",
        type=Path,
        default=Path("runs/quickstart"),
        metavar="DIR",
        help="where the run is written; a run that is there already is removed (default: runs/quickstart)",
    )
    parser.add_argument("--task", type=Path, metavar="DIR", help="where the task is made (default: runs/task_seedSEED)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of task, model and run (default: 0)")
    for name, what in (("nproc", "processes"), ("tp", "tensor-parallel size"), ("pp", "pipeline stages")):
        parser.add_argument(f"--{name}", type=int, default=1, metavar="N", help=f"{what} (default: 1)")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    for name, interval in (("seed", "[0, 1e9]"), ("nproc", "[1, 1024]"), ("tp", "[1, 1024]"), ("pp", "[1, 1024]")):
        value, allowed = getattr(arguments, name), Range.parse(interval)
        if value not in allowed:
            raise UserError(f"--{name} {value}: {allowed.wanted(value)}")
    task = arguments.task or Path("runs") / f"task_seed{arguments.seed}"
    run_dir: Path = arguments.run_dir
    if run_dir.exists() and any(run_dir.iterdir()) and not any((run_dir / name).exists() for name in _OURS):
        raise UserError(f"--run-dir {run_dir}: holds something that is no run; name another directory")
    python = [sys.executable, "-m"]
    code = _call([*python, "dppo_megatron.data.make_quickstart", "--out", str(task), "--seed", str(arguments.seed)])
    if code:
        return code
    shutil.rmtree(run_dir, ignore_errors=True)
    settings = {
        "run_dir": run_dir,
        "seed": arguments.seed,
        "actor.layout.tensor_parallel": arguments.tp,
        "actor.layout.pipeline_parallel": arguments.pp,
        "model.hf_path": task / "model",
        "data.train_path": task / "train.jsonl",
        "data.eval_paths.heldout": task / "heldout.jsonl",
        "warm_start.examples_path": task / "warm_start.jsonl",
    }
    config = arguments.config or str(shipped("configs", "quickstart.yaml"))
    train = ["dppo_megatron", "train", config, *(f"{k}={v}" for k, v in settings.items()), *arguments.overrides]
    environment = dict(os.environ)
    if arguments.nproc > 1:
        environment["OMP_NUM_THREADS"] = "1"
        train = ["torch.distributed.run", "--nproc-per-node", str(arguments.nproc), "-m", *train]
    return _call([*python, *train], environment) or _call([*python, "dppo_megatron", "report", str(run_dir)])


def _call(command: list[str], environment: dict[str, str] | None = None) -> int:
    code = subprocess.run(command, env=environment).returncode
    return code if code >= 0 else 128 - code  # ended by a signal, as a shell says it
