"""Evaluates the checkpoints of a run as they appear, in a separate process, so that no training step waits for it.

    trainer        step 20  save  step 21 ...  step 40  save          its files are only read; nothing is locked
    --follow            finds it  load, sample, grade      finds it   RUN/eval/follow/step_000020/results.json

One engine and its graders serve all checkpoints. A checkpoint that the trainer removes before its weights are read is
skipped: keeping more than `checkpoint.keep` here could fill the run's disk.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import fields
from pathlib import Path

from dppo_megatron.checkpoint.checkpoint_dir import named, read_manifest, read_own, step_name
from dppo_megatron.config.changes import saved_values
from dppo_megatron.config.load import config_from_values
from dppo_megatron.config.paths import in_short
from dppo_megatron.config.resolved_sets import eval_set_configs
from dppo_megatron.config.schema import Config
from dppo_megatron.evaluation.arguments import EvalArguments, prepare
from dppo_megatron.evaluation.eval_samples import RESULTS, check_out, difference, read_results, scores_of
from dppo_megatron.evaluation.standalone import EngineAndGraders, about, check_alone, evaluate
from dppo_megatron.job import with_checkpoint
from dppo_megatron.progress import progress
from dppo_megatron.texts import show
from dppo_megatron.types import UserError

_POLL_S = 2.0


def follow(arguments: EvalArguments, run: str, status: Callable[[], str]) -> list[str]:
    """Evaluate every checkpoint of the run at `arguments.model` until the run has ended; returns lines to print.

    Args:
        run: the run's id.
        status: returns `running` while the run goes on, else how it has ended.

    Raises:
        UserError: a mistake in the settings, before it waits for a checkpoint; or the run saves no checkpoints.
    """
    check_alone()
    directory = Path(arguments.model)
    saved, where = saved_values(directory / "config.yaml"), str(directory / "config.yaml")
    every = (saved.get("checkpoint") or {}).get("every_steps", 0)
    if not every:
        raise UserError(
            f"'{directory}' saves no checkpoint before its end (checkpoint.every_steps = 0), so there is nothing to"
            " follow: set it (a resume may change it), or evaluate the end with `dppo-megatron eval RUN`"
        )
    config, out, notes = prepare(arguments)
    if arguments.out is None:
        _check_same_scores(config, config_from_values(saved, where, keep_references=False))
    check_out(out, RESULTS)
    with closing(EngineAndGraders(config, out, notes)) as shared:
        follower = _Follower(shared, directory / "checkpoints", run, out, every)
        state = "running"
        while state == "running" or follower.left():  # checked after the run's end, for the last checkpoint
            follower.evaluate_left()
            with progress(f"waiting for the next checkpoint of {directory}"):
                while (state := status()) == "running" and not follower.left():
                    time.sleep(_POLL_S)
    undone = [path.name for _, path in named(directory / "checkpoints") if not (out / path.name / RESULTS).is_file()]
    if undone:
        show(f"{', '.join(undone)}: cannot be read, or not of this run, so no evaluation")
    again = "" if state == "finished" else "; the same command goes on when the run does"
    done = len(list(out.glob(f"step_*/{RESULTS}")))
    return ["", f"the run has ended ({state}), {done} of its checkpoints are evaluated in {out}/{again}"]


def _check_same_scores(config: Config, of_run: Config) -> None:
    """Raise UserError if the run evaluates a set of the same name with other settings, since its report draws both as
    one curve. The number of samples may differ: it does not change the expected score."""
    of_sets, changed = eval_set_configs(of_run), list[str]()
    for name, now in eval_set_configs(config).items():
        if (own := of_sets.get(name)) is None:
            continue
        for key in [item.name for item in fields(now) if item.name not in ("key", "max_prompt_tokens_key", "samples")]:
            value, before = getattr(now, key), getattr(own, key)
            if value != before:
                changed.append(f"{key} = {in_short(value, 60)} (the run: {in_short(before, 60)})")
        graders = (now.reward.over(config.reward), own.reward.over(of_run.reward))
        if len({repr((one.function, one.functions)) for one in graders}) > 1:
            changed.append("another reward")
        if changed:
            raise UserError(
                f"the run evaluates the set '{name}' with other settings: {', '.join(changed)}. Its report would"
                " draw both as one curve: give --out DIR, or leave the setting out"
            )


class _Follower:
    def __init__(self, shared: EngineAndGraders, root: Path, run: str, out: Path, every: int) -> None:
        self._shared, self._root, self._run, self._out, self._every = shared, root, run, out, every
        self._missed: set[int] = set()
        """Steps whose checkpoints were reported as missing."""
        without_model = {name: value for name, value in about(shared.job, out).items() if not name.startswith("model")}
        self._about = {"run": run, **without_model}
        """Must be the same for all evaluations in one directory."""
        for path in sorted(out.glob(f"step_*/{RESULTS}")):
            if other := difference(read_results(path).get("about", {}), self._about):
                raise UserError(
                    f"'{path.parent}' holds an evaluation of something else ({other}); choose another --out"
                )

    def left(self) -> list[tuple[int, Path]]:
        """(step, path) of the complete checkpoints that are not evaluated yet, by step."""
        try:
            found = [(step, path) for step, path in named(self._root) if not self._is_done(step)]
        except PermissionError:
            raise
        except OSError:
            return []  # a file server that fails over; it is looked at again
        return [(step, path) for step, path in found if self._is_complete(path)]

    def _is_complete(self, path: Path) -> bool:
        try:
            return not isinstance(read_own(path, self._run), str)
        except UserError:
            return False  # it cannot be read for now; it is looked at again

    def evaluate_left(self) -> None:
        """Evaluate all checkpoints that are left, the earliest first, including those that appear meanwhile."""
        while left := self.left():
            step, path = left[0]
            self._report_missed(step)
            try:
                job = with_checkpoint(self._shared.job, path)
                samples = evaluate(self._shared, job, self._out / path.name, {"step": step, "about": self._about})
                show(*(f"step {step:>4}: {one.line()}" for one in scores_of(samples)))
            except Exception:
                if not isinstance(read_manifest(path), str):
                    raise
                self._report_missed(step + 1)  # the trainer has removed it while it was read

    def _report_missed(self, until: int) -> None:
        """Report the steps below `until` whose checkpoints were removed before they were evaluated."""
        steps = range(self._every, until, self._every)
        missed = [step for step in steps if step not in self._missed and not self._is_done(step)]
        if missed:
            self._missed.update(missed)
            which = f"step {missed[0]}" if len(missed) == 1 else f"steps {missed[0]} to {missed[-1]} ({len(missed)})"
            show(f"{which}: no checkpoint any more, so no evaluation; a larger checkpoint.keep leaves more time")

    def _is_done(self, step: int) -> bool:
        return (self._out / step_name(step) / RESULTS).is_file()
