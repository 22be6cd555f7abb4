"""Write an arithmetic task and a tiny model into runs/task_seedSEED, train on it for a few minutes of CPU, and report:

dppo-megatron quickstart
dppo-megatron quickstart --nproc 4 --tp 2 --pp 2 --seed 1
dppo-megatron quickstart steps=2 sft.steps=10       # any setting of configs/quickstart.yaml
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
from importlib.util import find_spec
from pathlib import Path

from dppo_megatron.children import start_python
from dppo_megatron.config import load_config
from dppo_megatron.config.checks import check_world_size
from dppo_megatron.config.paths import check_writable, shipped
from dppo_megatron.progress import progress
from dppo_megatron.types import UserError
from dppo_megatron.workbench.commands.parser import add_settings, check_numbers, config_file


def add_options(parser: argparse.ArgumentParser) -> None:
    add_settings(parser)
    parser.add_argument("--config", metavar="CONFIG", type=config_file, help="YAML file (default: quickstart)")
    run_dir = "where the run is written; a run that is there already is removed (default: runs/quickstart)"
    parser.add_argument("--run-dir", type=Path, default=Path("runs/quickstart"), metavar="DIR", help=run_dir)
    parser.add_argument("--task", type=Path, metavar="DIR", help="where the task is made (default: runs/task_seedSEED)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of task, model and run (default: 0)")
    for name, what in (("nproc", "processes"), ("tp", "tensor-parallel size"), ("pp", "pipeline stages")):
        parser.add_argument(f"--{name}", type=int, default=1, metavar="N", help=f"{what} (default: 1)")


def execute(arguments: argparse.Namespace) -> int:
    check_numbers(arguments, seed="[0, 1e9]", nproc="[1, 1024]", tp="[1, 1024]", pp="[1, 1024]")
    task = arguments.task or Path("runs") / f"task_seed{arguments.seed}"
    run_dir: Path = arguments.run_dir
    if any(setting.startswith("run_dir=") for setting in arguments.overrides):
        raise UserError("run_dir=...: quickstart takes --run-dir DIR instead")
    check_writable("--run-dir", run_dir, directory=True)
    _check_is_run(run_dir)
    if find_spec("megatron") is None:  # else each process below would report it in its own way
        raise ModuleNotFoundError(name="megatron")
    with progress(f"making {task}"):
        from dppo_megatron.workbench.quickstart.make import Recipe, make_quickstart

        make_quickstart(task, Recipe(arguments.seed))
    settings = {
        "run_dir": run_dir,
        "seed": arguments.seed,
        "actor.layout.tensor_parallel": arguments.tp,
        "actor.layout.pipeline_parallel": arguments.pp,
        "model.hf_path": task / "model",
        "data.train_path": task / "train.jsonl",
        "data.eval_paths.heldout": task / "heldout.jsonl",
        "sft.examples_path": task / "sft.jsonl",
    }
    config = arguments.config or str(shipped("configs", "quickstart.yaml"))
    given = [*(f"{key}={value}" for key, value in settings.items()), *arguments.overrides]
    # a mistake must be found before an earlier run, which may have taken an hour, is removed
    check_world_size(load_config(config, given, writes_run=False), arguments.nproc)
    _remove(run_dir)
    return _call("train", config, *given, ranks=arguments.nproc) or _call("report", str(run_dir))


def _check_is_run(directory: Path) -> None:
    """Raise UserError unless `directory` is empty or holds a run: anything else must not be removed."""
    from dppo_megatron.observe.run_directory import read_identity

    try:
        is_run = not directory.exists() or not any(directory.iterdir()) or bool(read_identity(directory))
    except UserError:
        is_run = False
    if not is_run:
        raise UserError(f"--run-dir {directory}: holds files that are not a run's; name another directory")


def _remove(run_dir: Path) -> None:
    """Remove an earlier run. Raises UserError if a trainer is writing it, or the system forbids it."""
    if not run_dir.exists():
        return
    from dppo_megatron.observe.lock import RunLock

    lock = RunLock(run_dir)
    try:
        shutil.rmtree(run_dir)
    except OSError as error:
        raise UserError(f"--run-dir {run_dir}: cannot be removed: {error.strerror or error}") from None
    finally:
        lock.release()


def _call(*arguments: str, ranks: int = 1) -> int:
    """Run another command in a process of its own, as a user would start it. SIGTERM ends both."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a scheduler's time limit
    # torchrun's processes do not inherit -P
    variables = {"OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"} if ranks > 1 else None
    with start_python("dppo_megatron", *arguments, ranks=ranks, variables=variables) as process:
        try:
            code = process.wait()
        except BaseException:
            process.terminate()  # not kill(): torchrun would leave its ranks behind
            raise
    return code if code >= 0 else 128 - code  # ended by a signal, as a shell reports it
