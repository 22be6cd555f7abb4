"""A task, a model and a held-out set for each seed, where they can be made.

Runs that share one task share its luck: their spread over seeds says how much the draws matter, not how much the task
does. A directory with a `task.json` says how it was made (`data/quickstart.py`), so the same can be made with another
seed. A data set that was collected can not; the comparison then says that its seeds share it.
"""

from __future__ import annotations

from pathlib import Path

from dppo_megatron.config.schema import Config
from dppo_megatron.workbench.quickstart.task import read_recipe, write_quickstart


def shared_task(config: Config) -> str | None:
    """Why all seeds share one task, or None: each gets its own."""
    if not config.data.train_path:
        return "the task is not one file with a task.json beside it"
    if read_recipe(_home(config)) is None:
        return f"{_home(config)} has no task.json that says how to make it for another seed"
    return None


def task_settings(config: Config, seed: int, directory: Path) -> list[str]:
    """Make the task of `seed` in `directory`; returns the settings that use it: every path of the job that lies in the
    task's directory, in the new one. The job's own seed has its task already, whatever seed that was made with."""
    home = _home(config)
    recipe = read_recipe(home)
    assert recipe is not None, "asked for a task that cannot be made"
    if seed == config.seed:
        return []
    wanted = recipe.with_seed(recipe.seed + seed - config.seed)
    if read_recipe(directory) != wanted:  # task.json is written last: it is there when all is
        write_quickstart(directory, wanted)
    paths = {
        "model.hf_path": config.model.hf_path,
        "data.train_path": config.data.train_path,
        "warm_start.examples_path": config.warm_start.examples_path,
        **{f"data.eval_paths.{name}": path for name, path in config.data.eval_paths.items()},
        **{f"data.eval_sets.{name}.path": one.path for name, one in config.data.eval_sets.items()},
        **{f"data.train_sets.{name}.path": one.path for name, one in config.data.train_sets.items()},
    }
    moved = {
        key: directory / inside
        for key, path in paths.items()
        if path and (inside := _inside(Path(path), home)) is not None
    }
    return [f"{key}={path}" for key, path in moved.items()]


def _home(config: Config) -> Path:
    return Path(config.data.train_path).parent


def _inside(path: Path, directory: Path) -> Path | None:
    whole, root = path.resolve(), directory.resolve()
    return whole.relative_to(root) if whole.is_relative_to(root) else None
