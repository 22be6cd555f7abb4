"""A run: its directory, its record, where it begins, and when to evaluate, save and stop.

The loop itself is in `train.py`. What a killed run leaves behind is put in order here: the record goes back to the
step of the checkpoint that is gone on from, so that in the end no step stands there twice and none is missing.
"""

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
from torch.distributed.checkpoint.api import CheckpointException

from dppo_megatron.actor.layout import start_process_group, stop_process_group
from dppo_megatron.checkpoint.manifest import read_manifest
from dppo_megatron.checkpoint.store import CheckpointStore, describe, load_checkpoint
from dppo_megatron.config import save_config
from dppo_megatron.config.changes import check_changes, config_values, fingerprint, saved_values
from dppo_megatron.config.schema import Config
from dppo_megatron.distributed import from_rank_zero
from dppo_megatron.job import Job
from dppo_megatron.loop import Loop
from dppo_megatron.observe.metrics import JsonLines, Progress, rewind
from dppo_megatron.observe.signals import StopRequests
from dppo_megatron.observe.summary import Summary
from dppo_megatron.observe.watchdog import Watchdog
from dppo_megatron.pruning import LedgerRow, biased_rows
from dppo_megatron.trace import trace_header, trace_seconds
from dppo_megatron.types import GuardStop, UserError
from dppo_megatron.weights.hf_files import write_checkpoint


class Stopped(Exception):
    """The run has ended before its last step because it was asked to, with a checkpoint: exit code 0."""


class Run:
    """Owns the process group and the run directory for the length of a `with` block."""

    def __init__(self, job: Job) -> None:
        self._started = time.perf_counter()
        self._config = job.config
        self._directory = Path(job.config.run_dir)
        _set_threads(job.config.threads_per_rank)
        start_process_group()
        self._writes = dist.get_rank() == 0
        self.progress = Progress(job.config.steps, visible=self._writes)
        changes = from_rank_zero(lambda: _allowed_changes(job.config))
        self._stop_requests, self._watchdog = StopRequests(), _watchdog(job.config.guard.watchdog_s)
        self._store = CheckpointStore(
            self._directory / "checkpoints",
            assets=Path(job.config.model.hf_path),
            keep=job.config.checkpoint.keep,
            async_save=job.config.checkpoint.async_save,
        )
        self._origin = self._find_origin()
        self.resumes = self._origin is not None
        self._recorded: int | None = None
        """The last step with a line in metrics.jsonl."""
        self.loop = Loop(job, self.progress.say)
        self.summary = Summary()
        self._warned: set[str] = set()
        self._first_step, self._last_step = 1, job.config.steps
        if self._writes:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._open_record(trace_header(job.config, len(job.train_prompts)))
        self.say(job.notes)
        self.say(f"changed since the run began: {line}" for line in changes)
        self.progress.say(self.loop.actor.description)

    def __enter__(self) -> Run:
        self._stop_requests.listen()
        if self._watchdog:
            self._watchdog.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is GuardStop and self._recorded is not None:
            self._keep_what_is_done(self._recorded)
        self.loop.close()
        self.progress.close()
        self._stop_requests.restore()
        if self._writes:
            self._metrics.close()
            self._trace.close()
        if kind in (None, Stopped, GuardStop):  # after a failure the other ranks may never arrive
            dist.barrier()  # so that nobody misses a rank that has only finished earlier
            if self._watchdog:
                self._watchdog.stop()
            stop_process_group()
        elif self._watchdog and not issubclass(kind, UserError):
            for name in self._watchdog.wait_for_silence():
                print(f"{name} has died; this rank failed because of it", flush=True)

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
        """Take over the state of the checkpoint that this run goes on from. Collective."""
        assert self._origin is not None
        self.loop.start_rl()
        state = load_checkpoint(self._origin, self.loop.actor)
        self.loop.load_state_dict(state["loop"])
        self.loop.sync()
        self.summary = Summary(**state["summary"])
        self._started -= self.summary.wall_s
        self._first_step = state["step"] + 1
        self._recorded = self.loop.rests_after = state["step"]
        self.progress.say(f"resumed from {self._origin}: going on at step {self._first_step}")

    def remaining_steps(self) -> Iterator[int]:
        """The RL steps that this run has still to do."""
        if self._first_step == 1:
            self._stop_if_asked(0)
        yield from range(self._first_step, self._last_step + 1)

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
        self._recorded = step
        for name, score in scores.items():
            self.progress.say(f"step {step:>4}: {name} pass@1 {100 * score:.1f} %")

    def say(self, lines: Iterable[str]) -> None:
        """Lines for the person who watches."""
        for line in lines:
            self.progress.say(line)

    def is_evaluation_step(self, step: int) -> bool:
        """The last step, and every `eval.every_steps`."""
        return _is_due(step, self._config.eval.every_steps, self._last_step)

    def step_to_look_ahead_to(self, step: int) -> int:
        """The next step, or 0 where `step` ends with an evaluation, a checkpoint or the run: they want rest."""
        due = self.is_evaluation_step(step) or _is_due(step, self._config.checkpoint.every_steps, self._last_step)
        return 0 if due else step + 1

    def save_if_due(self, step: int) -> None:
        """A resumable checkpoint where one is due, and the end of the run where a guard or a signal asks. Collective.

        Raises:
            Stopped: the run ends here.
        """
        self._finalize(blocking=False)
        self._check_guard(step)
        self._stop_if_asked(step)
        if _is_due(step, self._config.checkpoint.every_steps, self._last_step):
            self._save(step)

    def finish(self) -> None:
        """The Hugging Face checkpoint, summary.json and the closing table. Collective."""
        self._finalize(blocking=True)
        weights = self.loop.actor.weights()
        write_checkpoint(self._directory / "hf", self._config.model.hf_path, weights, write=self._writes)
        self.summary.wall_s = time.perf_counter() - self._started
        if self._writes:
            self.summary.write(self._directory / "summary.json")
            self.progress.close()
            print(f"\n{self.summary.table()}\n\n{self._directory}/: {', '.join(sorted(os.listdir(self._directory)))}")

    def _find_origin(self) -> Path | None:
        """The checkpoint to go on from: the newest good one of this run, else the one that the config names."""
        resume = self._config.checkpoint.resume
        if resume == "never":
            return None
        newest, said = self._store.newest_good()
        self.say(said)
        if newest is None and resume != "auto":
            return Path(resume)
        if newest is None and (self._directory / "metrics.jsonl").exists():
            self.progress.say(f"{self._directory} holds a run without a good checkpoint: it begins again")
        return newest

    def _open_record(self, header: dict[str, Any]) -> None:
        """The run's files, taken back to the step that this process goes on from. On rank 0."""
        save_config(self._config, self._directory / "config.yaml")
        step = -1
        if self._origin is not None:
            manifest = read_manifest(self._origin)
            step = manifest.step if not isinstance(manifest, str) else -1
        for name in ("metrics.jsonl", "trace.jsonl"):
            if step < 0:
                (self._directory / name).unlink(missing_ok=True)
            else:
                rewind(self._directory / name, step)
        self._metrics = JsonLines(self._directory / "metrics.jsonl")
        self._trace = JsonLines(self._directory / "trace.jsonl")
        if not (self._directory / "trace.jsonl").stat().st_size:
            self._trace.write(header)

    def _keep_what_is_done(self, recorded: int) -> None:
        """A checkpoint where a guard stops the run between two steps, or in the sync that ends one. Collective."""
        if self.loop.unsynced_step == recorded + 1:
            recorded += 1
            metrics = self.loop.take_metrics()
            self.say(self.loop.feedback(recorded, metrics))
            self.record(recorded, metrics)
        elif self.loop.rests_after != recorded:
            return
        self._save(recorded)
        self._finalize(blocking=True)

    def _save(self, step: int) -> bool:
        """Returns whether it could be written. Collective."""
        if self._writes:  # a checkpoint must not survive a power cut that its own step's line does not
            self._metrics.sync()
            self._trace.sync()
        self.summary.wall_s = time.perf_counter() - self._started
        state = {"step": step, "loop": self.loop.state_dict(), "summary": vars(self.summary)}
        try:
            self._store.save(
                self.loop.actor, state, describe(step, config_values(self._config), fingerprint(self._config))
            )
        except (UserError, OSError, RuntimeError, CheckpointException) as error:
            return self._save_failed(error)
        return True

    def _finalize(self, *, blocking: bool) -> None:
        try:
            self._store.finalize(blocking=blocking)
        except (UserError, OSError, RuntimeError, CheckpointException) as error:
            self._save_failed(error)

    def _save_failed(self, error: BaseException) -> bool:
        self._store.abandon()
        reason = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
        self.progress.say(f"warning: no checkpoint could be written ({reason}); the last complete one stays")
        return False

    def _check_guard(self, step: int) -> None:
        skipped, samples = self.loop.skipped_in_a_row, self.loop.skipped_samples
        if skipped:
            self.progress.say(f"warning: step {step}: update skipped, not finite; samples {samples}")
        if skipped and skipped >= self._config.guard.max_skipped_updates:
            raise GuardStop(
                f"step {step}: {skipped} updates in a row had a loss or gradient that is not finite; samples of the"
                f" last (prompt:completion): {samples}. {self._how_to_go_on()}"
            )

    def _stop_if_asked(self, step: int) -> None:
        """Save and end the run if any rank got a signal. Collective."""
        device = self.loop.actor.layout.device
        asked = torch.tensor([int(bool(self._stop_requests.received))], device=device)
        dist.all_reduce(asked, op=dist.ReduceOp.MAX)
        if asked.item() and step < self._last_step:
            saved = self._save(step)
            self._finalize(blocking=True)
            name = self._stop_requests.received or "another rank got a signal"
            if not saved:
                raise GuardStop(f"stopped after step {step} ({name}), but no checkpoint could be written")
            raise Stopped(f"stopped after step {step} ({name}). {self._how_to_go_on()}")

    def _how_to_go_on(self) -> str:
        return f"Resume with the same command, or: dppo-megatron train {self._directory}/config.yaml --resume auto"

    def _new_warnings(self, ledger: list[dict[str, Any]]) -> list[str]:
        """One line for each selection that changes the expected gradient, the first time it does."""
        rows = tuple(LedgerRow(**row) for row in ledger if row["name"] not in self._warned)
        self._warned.update(row.name for row in rows if row.label == "biased")
        return [f"warning: {line}" for line in biased_rows(rows)]


def _allowed_changes(config: Config) -> list[str]:
    """A line for each setting that differs from the run's own, or from that of the checkpoint it begins from.

    Raises:
        UserError: a setting differs that may not.
    """
    mine, resume = Path(config.run_dir) / "config.yaml", config.checkpoint.resume
    if resume != "never" and mine.exists():
        return check_changes(config, saved_values(mine), str(mine))
    if resume in ("auto", "never"):
        return []
    manifest = read_manifest(Path(resume))
    if isinstance(manifest, str):
        raise UserError(f"checkpoint.resume = '{resume}': holds no complete checkpoint: {manifest}")
    return check_changes(config, manifest.config, resume)


def _watchdog(timeout_s: float) -> Watchdog | None:
    if not timeout_s or dist.get_world_size() == 1:
        return None
    store = dist.distributed_c10d._get_default_store()
    return Watchdog(store, dist.get_rank(), dist.get_world_size(), timeout_s)


def _is_due(step: int, every: int, last: int) -> bool:
    return step == last or (every > 0 and step % every == 0)


def _set_threads(threads_per_rank: int) -> None:
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    torch.set_num_threads(threads_per_rank or max(1, (os.cpu_count() or 1) // ranks_here))
