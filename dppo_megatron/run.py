"""A run from start to end: when to record, evaluate, save and stop.

It keeps files, signals and checkpoints out of the loop (`steps/loop.py`), and `train.py` on one screen. The run
directory belongs to `observe/run_directory.py`; `checkpoint/origin.py` decides which checkpoint a run resumes from.
"""

from __future__ import annotations

import os
import shlex
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from dppo_megatron.actor.layout import start_process_group, stop_process_group
from dppo_megatron.checkpoint.origin import changes_since, find_origin
from dppo_megatron.checkpoint.store import CheckpointStore, describe, load_checkpoint
from dppo_megatron.config.changes import config_values
from dppo_megatron.config.paths import with_paths
from dppo_megatron.config.resolved_sets import eval_set_configs
from dppo_megatron.data.sets import set_sizes
from dppo_megatron.data.summary import check_data, write_first_prompts
from dppo_megatron.distributed import from_rank_zero, gather_all, on_every_rank
from dppo_megatron.evaluation.eval_scores import EvalScores
from dppo_megatron.evaluation.evaluator import measured_as
from dppo_megatron.job import Job
from dppo_megatron.launcher_env import launched_here, launched_rank
from dppo_megatron.observe.lock import FILE as LOCK
from dppo_megatron.observe.metrics import Summary
from dppo_megatron.observe.progress_display import Progress, RunProgress, print_line
from dppo_megatron.observe.run_directory import SUMMARY, RunDirectory, as_user_error, sees_lock
from dppo_megatron.observe.samples import SAMPLES, SampleWriter
from dppo_megatron.observe.timeline import StepRecorder
from dppo_megatron.observe.trackers.process import Cell, StepLine
from dppo_megatron.observe.trackers.sink import COLUMNS, Trackers, numbers, start_trackers, table
from dppo_megatron.observe.watchdog import StopRequests, Watchdog
from dppo_megatron.progress import counted, progress, shown_by
from dppo_megatron.pruning import biased_rows
from dppo_megatron.spans import recorded_by
from dppo_megatron.steps.freed_memory import FreedMemory
from dppo_megatron.steps.loop import Loop
from dppo_megatron.steps.step import Step
from dppo_megatron.steps.trace import changed_since, trace_header, write_features
from dppo_megatron.texts import log, logged, one_line, show
from dppo_megatron.types import RunAborted, UserError
from dppo_megatron.weights.hf_files import write_checkpoint

UNWRITTEN = (UserError, OSError, CheckpointException)
"""Raised on every rank if a checkpoint cannot be written; the run goes on. Other errors are of one rank and end it."""


class Stopped(Exception):
    """A signal has ended the run before its last step, with a checkpoint unless it was in SFT: exit code 0."""


class Run:
    """Owns the process group and the run directory for the duration of a `with` block."""

    def __init__(self, job: Job, clock: Callable[[], float] = time.monotonic) -> None:
        self._started = time.perf_counter()
        self._config = job.config
        self._directory = Path(job.config.run_dir)
        torch.set_num_threads(job.config.threads_per_rank or max(1, (os.cpu_count() or 1) // launched_here()))
        with Progress("waiting for all ranks", 0, "", clock=clock, visible=launched_rank() == 0):
            start_process_group(job.config.guard.rendezvous_timeout_s)
        self._writes = dist.get_rank() == 0
        self.progress = RunProgress(job.config.steps, visible=self._writes, clock=clock)
        self._stop_requests, self._watchdog = StopRequests(), _watchdog(job.config.guard.watchdog_s)
        self._ambient = ExitStack()
        """What code reaches through context variables and `log` while the run lasts: progress, log, recorder."""
        self._files: RunDirectory | None = None
        """The run directory, on rank 0."""
        with ExitStack() as undo:  # undone in reverse order if a later line raises
            undo.callback(self._ambient.close)
            self._ambient.enter_context(shown_by(self.progress.part))
            self._ambient.enter_context(logged(self.progress.say))
            undo.callback(self.progress.close)
            if self._watchdog:
                self._watchdog.start()
                undo.callback(self._watchdog.stop)
            undo.callback(lambda: self._files.undo_start() if self._files else None)
            references = from_rank_zero(job.check_references)  # after the rendezvous: a judge may exceed its timeout
            with as_user_error(self._directory):
                changes = self._open_run(job)
            self.resumes = self._origin is not None
            self._samples = SampleWriter(
                self._directory / SAMPLES,
                dist.get_rank(),
                dist.get_world_size(),
                job.config.observe.samples,
                {key: reward.correct_from for key, reward in job.grade.rewards.items()},
            )
            log(*job.data_report)  # before waiting for servers, so that a wrong template is seen early
            log(*from_rank_zero(job.check_first_layers))
            self._recorder = StepRecorder(job.config.observe, self._directory)
            self._ambient.enter_context(recorded_by(self._recorder.spans))
            self.loop = Loop(job, self.progress.phases, self._recorder)
            undo.pop_all()
        self.summary, self._freed_memory = Summary(), FreedMemory()
        self._warned: set[str] = set()
        """Selections that bias the gradient and have had their warning."""
        self._first_step = 1
        self.last_step = job.config.steps
        self._recorded: int | None = None
        """The step that was last recorded, or that of the checkpoint that the run began from; None: neither."""
        self._due: tuple[int, dict[str, Any], list[list[Cell]]] | None = None
        """The recorded step, its line and table of samples, while the line waits for the step's evaluation."""
        changes += self._origin.data_changes if self._origin else ()
        log(*map(with_paths, [*job.notes, *references]))
        log(*(f"changed since the run began: {line}" for line in changes))
        log(self.loop.actor.description)
        self._trackers: Trackers | None = None
        """On rank 0, if any are configured."""
        if self._files and job.config.observe.trackers:
            self._trackers = start_trackers(job.config, self._directory, self._run, self._resumed_step)

    def __enter__(self) -> Run:
        self._stop_requests.listen()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        with ExitStack() as closing:  # called in reverse order, and all of them even if one raises
            closing.push(lambda failed, *_: self._leave_group(failed or kind))
            closing.callback(self._ambient.close)
            closing.callback(self.progress.close)
            closing.callback(lambda: self._files.close() if self._files else None)
            closing.callback(self._end_processes, finished=kind in (None, Stopped))
            if kind is RunAborted:
                self._save_after_abort()

    def _end_processes(self, *, finished: bool) -> None:
        with progress("ending the engine, the graders and the trackers"), ExitStack() as ending:
            if self._trackers:
                ending.callback(self._trackers.close, finished=finished)
            ending.callback(self._samples.close)
            ending.callback(self._stop_requests.restore)
            ending.callback(self.loop.close)

    def _leave_group(self, failure: type[BaseException] | None) -> None:
        """Leave the process group, and stop watching the other ranks."""
        if failure in (None, Stopped, RunAborted):  # after a failure the other ranks may never reach the barrier
            dist.barrier()  # without it, watchdogs would report a rank that only finished first
            if self._watchdog:
                self._watchdog.stop()
            stop_process_group()
        elif self._watchdog and not issubclass(failure, UserError):
            for name in self._watchdog.wait_for_silence():
                show(f"{name} has died; this rank failed because of that")

    def sft(self) -> None:
        num_steps = self._config.sft.steps
        if num_steps:
            log(f"SFT: {num_steps} supervised steps")
        start = time.perf_counter()
        self.loop.sft(self._stop_sft_on_signal)
        self.summary.sft_s = time.perf_counter() - start
        if num_steps:
            log(f"SFT: done in {self.summary.sft_s:.1f} s")
        self.loop.start_rl()
        self._load_engine()
        self._recorded, self._due = 0, (0, {}, [])

    def resume(self) -> None:
        """Take over the state of the checkpoint that this run resumes or begins from. Collective."""
        assert self._origin is not None
        self.loop.start_rl()
        with progress(f"loading {self._origin.directory}"):
            state = load_checkpoint(self._origin.directory, self.loop.actor)
        try:
            self.loop.load_state_dict(state["loop"], state["step"])
        except (KeyError, ValueError) as error:
            what = f"it lacks {error}" if isinstance(error, KeyError) else error
            raise on_every_rank(
                UserError(
                    f"{self._origin.directory}: was written by another version of dppo_megatron or of your own policy,"
                    f" or with other problems: {what}; resume with the same, or start a new run in another run_dir"
                )
            ) from None
        self._load_engine()
        self.summary = Summary(**state["summary"])
        self._started -= self.summary.wall_s
        self._first_step, self._recorded = state["step"] + 1, state["step"]
        log(f"resumed from {self._origin.directory}: going on at step {self._first_step}")
        self._resume_evaluation(state)

    def _load_engine(self) -> None:
        with progress("first weight sync"):
            self.loop.load_engine()

    def remaining_steps(self) -> Iterator[int]:
        """The RL steps that this run still has to do, until a guard or a signal ends it, with a checkpoint."""
        if self._first_step == 1:
            self._stop_on_signal(0)
        for step in range(self._first_step, self.last_step + 1):
            yield step
            self._check_guard(step)
            self._stop_on_signal(step)

    def record(self, step: Step) -> None:
        """Write a finished step to trace.jsonl and, unless its evaluation is due, metrics.jsonl; log it. Collective.

        Raises:
            UserError: another trainer has taken over the run directory.
        """
        self._check_lock()
        record = step.record
        self._recorder.write(step.number)
        self._samples.write(step.number, step.samples)
        if self._files and record.counts:
            self._files.begin_step()
            self.summary.add(record.counts, record.metrics)
            took = record.timing
            seconds = {"rollout": took.rollout_s, "update": took.update_s, "other": took.other_s}
            self._files.write("trace.jsonl", record.trace | {"seconds": seconds} | self._trace_changed)
            rows = tuple(row for row in record.ledger if row.name not in self._warned)
            self._warned.update(row.name for row in rows if row.label == "biased")
            log(*(f"warning: {line}" for line in biased_rows(rows)))
            self.progress.step(step.number, record.metrics)
        every = self._config.observe.tracking.samples_every
        shown = table(step.samples) if self._trackers and every and step.number % every == 0 else []
        if _is_due(step.number, self._config.eval.every_steps, self.last_step):
            self._due = step.number, record.line(), shown
        else:
            self._write_metrics(step.number, record.line(), shown)
        self._recorded = step.number

    def evaluate_if_due(self) -> None:
        """Evaluate, if that is due, and write the line that waits for it; or raise Stopped, if a signal has come before
        that, and leave both to the resumed run. Collective."""
        if self._due is None:
            return
        step, line, shown = self._due
        self._stop_on_signal(step)
        self._finalize(blocking=True)  # an asynchronous save, whose files have no manifest before that
        scores = self.loop.evaluate()
        self._check_lock()  # again: an evaluation may take an hour
        self.summary.add_evaluation(step, _averages(scores))
        self._write_metrics(step, line, shown, scores)
        self._due = None

    def _write_metrics(
        self, step: int, line: dict[str, Any], shown: list[list[Cell]], scores: Sequence[EvalScores] = ()
    ) -> None:
        if self._files:
            line = line | {key: value for one in scores for key, value in one.metrics().items()}
            if scores:
                line["eval/problems"] = {one.name: one.by_problem for one in scores}
            if self._trackers:
                self._trackers.step(StepLine(step, time.time(), numbers(line), COLUMNS if shown else [], shown))
                line |= {"observe/tracker_failures": self._trackers.failures}
            self._files.write("metrics.jsonl", {"step": step} | line)
        log(*(f"step {step:>4}: {one.line()}" for one in scores))

    def save_if_due(self, step: int) -> None:
        """Save a checkpoint if one is due; before the evaluation, which may be long. Collective. Each rank also returns
        freed memory to the system, by its own clock."""
        self._finalize(blocking=False)
        if _is_due(step, self._config.checkpoint.every_steps, self.last_step):
            self._save(step)
        self._freed_memory.return_if_due()

    def finish(self) -> None:
        """Write the Hugging Face checkpoint and summary.json, and print the closing table. Collective."""
        self._finalize(blocking=True)
        hf, names = self._directory / "hf", self.loop.job.checkpoint.names
        with progress(f"writing {hf}", len(names), "tensors") as advance:
            weights = counted(self.loop.final_weights(), advance)
            adapters = dict(self.loop.actor.adapters(to=[0]))
            source, architecture = self._config.model.hf_path, self.loop.job.architecture
            unwritten: OSError | UserError | None = None
            try:
                write_checkpoint(hf, source, architecture, weights, write=self._writes, adapters=adapters)
            except (OSError, UserError) as error:  # on rank 0 only
                unwritten = error
                deque(weights, maxlen=0)  # iterate to the end, as the stream is collective
        self.summary.wall_s = time.perf_counter() - self._started
        from_rank_zero(lambda: self._write_end(unwritten))
        if self._writes:
            self.progress.close()
            files = sorted(name for name in os.listdir(self._directory) if name != LOCK)  # removed when the run closes
            see = f"see it: dppo-megatron report {shlex.quote(str(self._directory))}"
            for line in ("", *self.summary.table().splitlines(), "", f"{self._directory}/: {', '.join(files)}", see):
                print_line(line)

    def _write_end(self, unwritten: OSError | UserError | None) -> None:
        """Flush the record and write summary.json, on rank 0. `unwritten`: the error that left hf/ incomplete."""
        target, advice = self._directory / SUMMARY, ""
        try:
            if unwritten is not None:
                target = self._directory / "hf"
                if (latest := self._directory / "checkpoints" / "latest").exists():
                    command = f"dppo-megatron convert to-hf --checkpoint {shlex.quote(str(latest))} --out DIR"
                    advice = f"; `{command}` makes hf/ from the last checkpoint"
                raise unwritten
            if self._files:
                self._files.sync()
            self.summary.write(self._directory / SUMMARY)
        except OSError as error:  # that of a write to a full disk names no file
            what = f"'{error.filename or target}' cannot be written: {error.strerror}"
            raise RunAborted(f"all steps are done, but {what}{advice}") from None
        except UserError as error:
            raise RunAborted(f"all steps are done, but {error}{advice}") from None

    def _resume_evaluation(self, state: dict[str, Any]) -> None:
        """Take the evaluation that was due at the checkpoint from metrics.jsonl, if it is there by now; else it is due
        again. Another run's is made only if no step is left. Collective."""
        step, due, saved, now = state["step"], state.get("due"), state.get("eval_sets", {}), measured_as(self.loop.job)
        line = from_rank_zero(lambda: self._files.metrics_of(step) if self._files and due else None)
        if line is not None:
            same = [name for name in now if saved.get(name) == now[name]]  # not what an earlier start has added
            self.summary.add_evaluation(step, {one: line[key] for one in same if (key := f"eval/{one}/pass@1") in line})
        elif self._origin is not None and (self._origin.own or step == self.last_step):
            self._due = due and (due if self._origin.own else (step, {}, []))
        for name, before in saved.items():
            if now.get(name) != before:  # from here on it is another set, or none
                self.summary.eval_before.pop(name, None)
        self.summary.eval_after = {name: score for name, score in self.summary.eval_after.items() if name in now}
        if self._due is None:  # else all are evaluated soon
            self._begin_new_sets(step)

    def _begin_new_sets(self, step: int) -> None:
        """Evaluate sets that were added or changed since the run was last started, at the `step` from which it resumes.
        Only summary.json gets the scores: `metrics.jsonl` already has a line for that step. Collective."""
        summary, names = self.summary, list(eval_set_configs(self._config))
        new = [name for name in names if name not in summary.eval_before]
        scores = self.loop.evaluate(new) if new else []
        summary.eval_before |= _averages(scores)
        summary.eval_before_step |= dict.fromkeys(new, step)
        if step >= self.last_step:  # no further training: this is also the final score
            summary.eval_after |= _averages(scores)
        log(*(f"step {step:>4}, first evaluation of a new or changed set: {one.line()}" for one in scores))

    def _open_run(self, job: Job) -> list[str]:
        """Lock the run directory, find the checkpoint to resume from, open the record; returns changed settings."""
        self._run, lock = from_rank_zero(self._open_directory)
        is_seen = dist.get_rank() == 0 or sees_lock(self._directory, lock)
        if apart := gather_all([] if is_seen else [f"{socket.gethostname()}:{self._directory.absolute()}"]):
            where = ", ".join(sorted(set(apart))[:4])
            problem = f"rank 0's directory is not {where}; a job's machines must share the file system"
            raise on_every_rank(UserError(f"run_dir = '{self._directory}': {problem}"))
        changes = from_rank_zero(lambda: changes_since(job.config, self._directory / "config.yaml"))
        self._store = CheckpointStore(
            self._directory / "checkpoints",
            run=self._run,
            assets=Path(job.config.model.hf_path),
            keep=job.config.checkpoint.keep,
            async_save=job.config.checkpoint.async_save,
        )
        now, allowed = job.data_fingerprint, job.config.checkpoint.may_change
        with progress("verifying the newest checkpoint"):
            self._origin = find_origin(
                job.config, self._store, lambda saved, where: check_data(saved, now, allowed, where)
            )
        from_rank_zero(lambda: self._open_record(job))
        return changes

    def _open_directory(self) -> tuple[str, bytes]:
        """The run's id, and what its lock.json holds."""
        self._files = RunDirectory(self._directory)
        return self._files.run, self._files.lock_text

    def _open_record(self, job: Job) -> None:
        """Open the record, truncated to the step that this run resumes from. On rank 0."""
        own = self._origin if self._origin is not None and self._origin.own else None
        assert self._files is not None
        header = trace_header(job.config, set_sizes(job.train_sets), job.prompt_features, dist.get_world_size())
        step, sums = (own.step, own.record_sums) if own is not None else (None, {})
        self._files.open_record(self._config, header, step, sums)
        self._trace_changed = changed_since(self._directory / "trace.jsonl", header)
        write_features(self._directory, job.prompt_features)
        write_first_prompts(self._directory, job.train_sets, job.eval_sets)
        # for the trackers: the last step in metrics.jsonl, which lacks the resumed one if its evaluation is due
        self._resumed_step = None if step is None else step - (self._files.metrics_of(step) is None)

    def _check_lock(self) -> None:
        from_rank_zero(lambda: self._files.check() if self._files else None)

    def _save_after_abort(self) -> None:
        """Save a checkpoint if the run was aborted between two steps, in the sync that ends a step, or in the
        evaluation after that, which the resumed run makes. Collective."""
        step = self.loop.current
        if step is not None and step.is_updated:  # the actor has the step's weights, even if the engine does not
            log(*self.loop.finish(step))
            self.record(step)
        if self._recorded is not None and self._recorded == self.loop.last_complete_step:
            self._check_lock()
            self._save(self._recorded)
            self._finalize(blocking=True)

    def _save(self, step: int) -> bool:
        """Save a checkpoint; returns whether it could be written. Collective."""
        self._finalize(blocking=True)  # here, so that an error of the last one does not fail this one
        self.summary.wall_s = time.perf_counter() - self._started
        self._samples.close(10.0)
        try:
            record = from_rank_zero(lambda: self._files.sync() if self._files else {})
            state = {"step": step, "summary": vars(self.summary), "record": record}
            state |= {"due": self._due, "eval_sets": measured_as(self.loop.job)}
            in_flight = self.loop.in_flight()
            # a policy of the user's may raise in it
            from_rank_zero(lambda: state.update(loop=self.loop.state_dict() | in_flight))
            manifest = describe(step, config_values(self._config), self.loop.job.data_fingerprint, run=self._run)
            with progress(f"saving the checkpoint of step {step}"):
                self._store.save(self.loop.actor, state, manifest)
        except UNWRITTEN as error:
            return self._save_failed(error)
        return True

    def _finalize(self, *, blocking: bool) -> bool:
        """Complete an asynchronous save; returns False if it could not be written. Collective."""
        try:
            with progress("finishing the checkpoint"):
                self._store.finalize(blocking=blocking)
        except UNWRITTEN as error:
            return self._save_failed(error)
        return True

    def _save_failed(self, error: BaseException) -> bool:
        self._store.abandon()
        detail = one_line(str(error).strip().rpartition("\n")[2] or type(error).__name__)
        log(f"warning: no checkpoint could be written ({detail}); the last complete one stays")
        return False

    def _check_guard(self, step: int) -> None:
        if failure := self.loop.failed_policy:
            raise on_every_rank(RunAborted(f"step {step}: {failure}. {self._how_to_resume()}"))
        skipped, samples = self.loop.skipped_in_a_row, self.loop.skipped_samples
        if skipped:
            log(f"warning: step {step}: update skipped, not finite; samples {samples}")
        if skipped and skipped >= self._config.guard.max_skipped_updates:
            raise on_every_rank(
                RunAborted(
                    f"step {step}: {skipped} updates in a row had a loss or gradient that is not finite; samples of the"
                    f" last (prompt:completion): {samples}. {self._how_to_resume()}"
                )
            )

    def _stop_on_signal(self, step: int) -> None:
        """Save and end the run if any rank got a signal. Collective."""
        if (name := self._signal()) and (step < self.last_step or self._due is not None):
            if not (self._save(step) and self._finalize(blocking=True)):
                message = f"stopped after step {step} ({name}), but no checkpoint could be written"
                raise on_every_rank(RunAborted(message))
            raise Stopped(f"stopped after step {step} ({name}). {self._how_to_resume()}")

    def _stop_sft_on_signal(self, done: int) -> None:
        if name := self._signal():
            raise Stopped(f"stopped after SFT step {done} ({name}), without a checkpoint: SFT will start over")

    def _signal(self) -> str:
        """The signal that asks the run to stop; empty if no rank got one. Collective."""
        is_signalled = torch.tensor([int(bool(self._stop_requests.received))], device=self.loop.actor.layout.device)
        dist.all_reduce(is_signalled, op=dist.ReduceOp.MAX)
        return (self._stop_requests.received or "another rank got a signal") if is_signalled.item() else ""

    def _how_to_resume(self) -> str:
        config = shlex.quote(str(self._directory / "config.yaml"))
        return f"Resume with the same command, or: dppo-megatron train {config} --resume auto"


def _watchdog(timeout_s: float) -> Watchdog | None:
    if not timeout_s or dist.get_world_size() == 1:
        return None
    return Watchdog(dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size(), timeout_s)


def _averages(scores: Sequence[EvalScores]) -> dict[str, float | None]:
    return {one.name: one.avg.value for one in scores}


def _is_due(step: int, every: int, last: int) -> bool:
    return step == last or (every > 0 and step % every == 0)
