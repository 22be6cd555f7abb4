"""A small real job for tests: the quickstart's task and model, with few steps."""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest

from dppo_megatron.config import Config, load_config
from dppo_megatron.workbench.quickstart.make import Recipe, write_task
from dppo_megatron.workbench.quickstart.tiny_model import write_tiny_qwen3

REPOSITORY = Path(__file__).parent.parent.parent


def write_job_files(directory: Path) -> Path:
    """Problems and model under `directory`."""
    write_task(directory, Recipe(0, num_train=48, num_heldout=24, num_sft=256))
    write_tiny_qwen3(directory / "model", seed=0)
    return directory


def write_warm_job_files(directory: Path) -> Path:
    """The same with a model that answers some problems already: one that SFT of 30 steps has trained. A job of
    these files warms up for 2 steps more instead of for 30, which are most of a small run's time."""
    write_job_files(directory)
    shutil.rmtree(directory / "model")
    return Path(shutil.copytree(_warm_model(), directory / "model")).parent


@functools.cache
def _warm_model() -> Path:
    """Trained once in a process, by the product itself."""
    from support.launch import run_ranks

    def train_it() -> None:
        from dppo_megatron.job import prepare_job
        from dppo_megatron.run import Run
        from dppo_megatron.train import train

        with Run(
            prepare_job(job_config(files, directory / "run", steps=1, actor__optimizer__learning_rate=1e-12), 1)
        ) as run:
            train(run)

    directory = Path(tempfile.mkdtemp(prefix="warm-model-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    files = write_job_files(directory)
    run_ranks(train_it, 1)
    (directory / "run" / "hf" / _WARM).touch()
    return directory / "run" / "hf"


_WARM = "warm"


def settings(files: Path, run_dir: Path, **extra: Any) -> list[str]:
    """Overrides that turn the quickstart's config into a job of seconds. Keyword names use `__` for a dot."""
    values = {
        "run_dir": run_dir,
        "steps": 4,
        "threads_per_rank": 1,
        "model.hf_path": files / "model",
        "data.train_path": files / "train.jsonl",
        "data.eval_paths.heldout": files / "heldout.jsonl",
        "sft.examples_path": files / "sft.jsonl",
        "sft.steps": 30,
        "sft.examples_per_step": 64,
        "rollout.prompts_per_step": 16,
        "rollout.completions_per_prompt": 8,
        "rollout.sampling.max_completion_tokens": 16,
        "actor.optimizer.learning_rate": 1e-3,
        "actor.optimizer.lr_warmup_steps": 1,
        "actor.optimizer.lr_schedule": "constant",  # else runs of other lengths would be other runs
        "actor.optimizer.min_learning_rate": 0.0,
        # three steps make an epoch here: without these two, nothing would be pruned before the run ends
        "pruning.prompt.warmup_epochs": 0.34,
        "pruning.prompt.anneal_fraction": 1.0,
        "packing.max_tokens_per_microbatch": 512,
        "eval.every_steps": 0,
    }
    if (files / "model" / _WARM).exists():
        values |= {"sft.steps": 2, "sft.learning_rate": 1e-5}  # Adam's first steps would undo the others
    values |= {key.replace("__", "."): value for key, value in extra.items()}
    return [f"{key}={value}" for key, value in values.items()]


QUICK = {
    "sft__steps": 2,
    "reward__function": "support.faulty:length_parity",
    "reward__min_self_consistency": 0,
}
"""For runs that need not solve problems: half of the rewards are 1 for any model, so it trains without SFT."""


def job_config(files: Path, run_dir: Path, **extra: Any) -> Config:
    """The checked config of such a job."""
    return load_config(str(REPOSITORY / "configs" / "quickstart.yaml"), settings(files, run_dir, **extra))


def nearly(value: Any, **tolerance: float) -> Any:
    """`pytest.approx` of a metric, which may be null: a mean over nothing."""
    return None if value is None else pytest.approx(value, **tolerance)


def read_metrics(run_dir: Path, *, with_time: bool = False) -> list[dict[str, Any]]:
    """metrics.jsonl, without the clock. A record without a line fails: what holds of each of its rows says nothing."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert rows, f"{run_dir}: nothing was recorded"
    return [{k: v for k, v in row.items() if with_time or not k.startswith(("time/", "perf/"))} for row in rows]
