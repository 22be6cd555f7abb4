"""A run: its directory, its record, and when to evaluate and save. The loop itself is in `train.py`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from dppo_megatron.actor.layout import start_process_group, stop_process_group
from dppo_megatron.checkpoint.store import load_checkpoint, save_checkpoint
from dppo_megatron.config import save_config
from dppo_megatron.distributed import from_rank_zero
from dppo_megatron.job import Job
from dppo_megatron.loop import Loop
from dppo_megatron.observe.metrics import JsonLines, Progress
from dppo_megatron.observe.summary import Summary
from dppo_megatron.pruning import LedgerRow, biased_rows
from dppo_megatron.trace import trace_header, trace_seconds
from dppo_megatron.weights.hf_files import write_checkpoint


class Run:
    """Owns the process group and the run directory for the length of a `with` block."""

    def __init__(self, job: Job) -> None:
        self._started = time.perf_counter()
        self._config = job.config
        self._directory = Path(job.config.run_dir)
        _set_threads(job.config.threads_per_rank)
        start_process_group()
        self._writes = dist.get_rank() == 0
        self.loop = Loop(job)
        self.summary = Summary()
        self._warned: set[str] = set()
        self.resumes = bool(job.config.checkpoint.resume_from)
        self._first_step, self._last_step = 1, job.config.steps
        if self._writes:
            self._directory.mkdir(parents=True, exist_ok=True)
            save_config(job.config, self._directory / "config.yaml")
            self._metrics = JsonLines(self._directory / "metrics.jsonl")
            self._trace = JsonLines(self._directory / "trace.jsonl")
            self._trace.write(trace_header(job.config, len(job.train_prompts)))
        self.progress = Progress(job.config.steps, visible=self._writes)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.progress.close()
        if self._writes:
            self._metrics.close()
            self._trace.close()
        if kind is None:  # after a failure the other ranks may be inside a collective and never arrive
            stop_process_group()

    def warm_start(self) -> None:
        """Supervised phase, then the RL optimizer and the first sync."""
        warm = self._config.warm_start.steps
        if warm:
            self.progress.say(f"warm start: {warm} supervised steps")
        start = time.perf_counter()
        self.loop.warm_start()
        self.summary.warm_start_s = time.perf_counter() - start
        if warm:
            self.progress.say(f"warm start: done in {self.summary.warm_start_s:.1f} s")
        self.loop.start_rl()
        self.loop.sync()

    def resume(self) -> None:
        """Take over the state of `checkpoint.resume_from`. Collective."""
        directory = Path(self._config.checkpoint.resume_from)
        self.loop.start_rl()
        state = load_checkpoint(directory, self.loop.actor)
        self.loop.load_state_dict(state["loop"])
        self.loop.sync()
        self.summary = Summary(**state["summary"])
        self._first_step = state["step"] + 1
        self.progress.say(f"resumed from {directory}: going on at step {self._first_step}")

    def remaining_steps(self) -> range:
        """The RL steps that this run has still to do."""
        return range(self._first_step, self._last_step + 1)

    @contextmanager
    def step_timer(self) -> Iterator[None]:
        """Times a whole RL step."""
        with self.loop.timers.phase("step"):
            yield

    def record(self, step: int, metrics: dict[str, Any]) -> None:
        """One line of metrics.jsonl. Step 0 holds the evaluation before training."""
        scores = {name.split("/")[1]: score for name, score in metrics.items() if name.startswith("eval/")}
        if step == 0:
            self.summary.eval_before = scores
        else:
            self.summary.eval_after = scores or self.summary.eval_after
            if self._writes:
                self.summary.add(metrics)
                self._trace.write(self.loop.trace_row | {"seconds": trace_seconds(metrics)})
                self.say(self._new_warnings(metrics["prune/ledger"]))
                self.progress.step(step, metrics)
        if self._writes:
            self._metrics.write({"step": step} | metrics)
        for name, score in scores.items():
            self.progress.say(f"step {step:>4}: {name} pass@1 {100 * score:.1f} %")

    def say(self, lines: Iterable[str]) -> None:
        """Lines for the person who watches."""
        for line in lines:
            self.progress.say(line)

    def _new_warnings(self, ledger: list[dict[str, Any]]) -> list[str]:
        """One line for each selection that changes the expected gradient, the first time it does."""
        rows = tuple(LedgerRow(**row) for row in ledger if row["name"] not in self._warned)
        self._warned.update(row.name for row in rows if row.label == "biased")
        return [f"warning: {line}" for line in biased_rows(rows)]

    def is_evaluation_step(self, step: int) -> bool:
        """The last step, and every `eval.every_steps`."""
        return _is_due(step, self._config.eval.every_steps, self._last_step)

    def is_checkpoint_step(self, step: int) -> bool:
        """The last step, and every `checkpoint.every_steps`."""
        return _is_due(step, self._config.checkpoint.every_steps, self._last_step)

    def save_checkpoint(self, step: int) -> None:
        """A resumable checkpoint under checkpoints/. Collective."""
        # rank 0 decides and counts; Megatron wants what is not sharded to be the same on every rank
        state = from_rank_zero(lambda: {"step": step, "loop": self.loop.state_dict(), "summary": vars(self.summary)})
        save_checkpoint(self._directory / "checkpoints", step, self.loop.actor.sharded_state(), state)

    def finish(self) -> None:
        """The Hugging Face checkpoint, summary.json and the closing table. Collective."""
        weights = self.loop.actor.weights()
        write_checkpoint(self._directory / "hf", self._config.model.hf_path, weights, write=self._writes)
        self.summary.wall_s = time.perf_counter() - self._started
        if self._writes:
            self.summary.write(self._directory / "summary.json")
            self.progress.close()
            print(f"\n{self.summary.table()}\n\n{self._directory}/: {', '.join(sorted(os.listdir(self._directory)))}")


def _is_due(step: int, every: int, last: int) -> bool:
    return step == last or (every > 0 and step % every == 0)


def _set_threads(threads_per_rank: int) -> None:
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    torch.set_num_threads(threads_per_rank or max(1, (os.cpu_count() or 1) // ranks_here))
