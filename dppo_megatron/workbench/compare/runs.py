"""Starts the runs of a comparison, one process after another, and logs their progress.

Each run is a separate process, as a user would start it. For each seed there is one SFT run, and all arms start from
its checkpoint with the same data order and evaluation. The order of the arms rotates from seed to seed, so that a
machine that slows down does not always penalize the same arm.

A rerun keeps each run that has finished with the same settings and data, from the same start: an interrupt does not
lose hours of work, and another seed or arm costs only itself.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeAlias

from dppo_megatron.children import start_python
from dppo_megatron.config import load_config
from dppo_megatron.config.changes import flat
from dppo_megatron.config.load import config_values
from dppo_megatron.config.paths import writing
from dppo_megatron.config.plugins import source_digest
from dppo_megatron.config.resolved_sets import eval_set_configs, train_set_configs
from dppo_megatron.config.schema import Config
from dppo_megatron.files import write_text
from dppo_megatron.launcher_env import launched_world_size
from dppo_megatron.progress import Advance, progress
from dppo_megatron.texts import log
from dppo_megatron.types import RunAborted, UserError
from dppo_megatron.workbench.compare.arms import Arm, MethodRun, read_method_run
from dppo_megatron.workbench.quickstart.make import read_recipe, write_quickstart

_KEPT = "compare.json"
"""In a run's directory: its settings, data and start once it has finished; empty before."""
_ERRORS = "stderr.txt"
"""In the directory of a run that crashed."""
_EVALUATION = re.compile(r"step +\d+: .* pass@1 ")
"""A run's line about an evaluation."""
_PROGRESS = re.compile(r"step +\d+/\d+ |[A-Za-z][^:]*: \d+ of \d+ ")
"""`SFT: 40 of 700 steps, about 83 s left`"""
_CODE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
"""A setting that names code: `module:function`."""
_EVERY_S = 10.0
"""Between two logged lines of a run's progress."""
Launch: TypeAlias = Callable[[Path, list[str], Callable[[str], None]], None]
"""Runs `dppo-megatron` for a run directory, with these arguments, and passes on every line that it prints."""


class StoppedByGuard(RunAborted):
    """A run ended with exit code 3."""


def run_all(
    config: Config,
    config_path: str,
    overrides: Sequence[str],
    arms: Sequence[Arm],
    *,
    seeds: int,
    out: Path,
    launch: Launch,
    first_seed: int = 0,
    stops_are_left_out: bool = False,
) -> list[MethodRun]:
    """Run every arm on every seed, in `out/seed<N>/<arm>`.

    Args:
        launch: how a run is started: `in_a_process`.
        first_seed: seeds before it are skipped; like `seeds` it counts from the config's seed on.
        stops_are_left_out: a run that a guard stops is logged, and is missing in the result.

    Raises:
        UserError: no evaluation set, torchrun, settings that an arm cannot have, or a run ended with exit code 2.
        RunAborted: a run was stopped by a guard or a signal, or crashed.
    """
    if not (config.data.eval_paths or config.data.eval_sets):
        raise UserError("data.eval_paths and data.eval_sets are empty: there is nothing to compare by")
    if launched_world_size() != 1:
        raise UserError("compare starts its own processes: run it without torchrun")
    for arm in arms:  # a mistake is reported now, not after SFT
        load_config(config_path, [*overrides, *arm.settings], writes_run=False)
    warm, shared = bool(config.sft.steps), shared_task(config)
    total = (seeds - first_seed) * (len(arms) + warm)
    runs = list[MethodRun]()
    with progress("compare", total, "runs") as advance:
        trainer = _Trainer(config_path, launch, total, advance)
        for offset in range(first_seed, seeds):
            seed = config.seed + offset
            home = out / f"seed{seed}"
            settings = [*overrides, f"seed={seed}"]
            if offset and shared is None:
                settings += task_settings(config, seed, home / "task")
            start = ""
            if warm:
                start = trainer.train([*settings, "steps=0"], home / "start")
                settings += [f"model.hf_path={home / 'start' / 'hf'}", "sft.steps=0"]
            first = offset % len(arms)
            for arm in [*arms[first:], *arms[:first]]:
                run_dir = home / arm.directory
                try:
                    trainer.train([*settings, *arm.settings], run_dir, start=start)
                    runs.append(read_method_run(arm.name, seed, run_dir))
                except StoppedByGuard as stop:
                    if not stops_are_left_out:
                        raise
                    log(f"compare: stopped, and left out: {stop}")
        advance(total)
    names = [arm.name for arm in arms]
    return sorted(runs, key=lambda run: (names.index(run.arm), run.seed))


@dataclass
class _Trainer:
    """Starts runs one by one, or keeps finished ones, and logs the number and the progress of each."""

    config_path: str
    launch: Launch
    total: int
    advance: Advance
    begun: int = 0
    logged_at: float = 0.0

    def train(self, settings: list[str], run_dir: Path, start: str = "") -> str:
        """Returns the run's `_identity`. `start`: that of the run whose checkpoint it starts from."""
        self.advance(self.begun)
        self.begun += 1
        name = f"{run_dir.parent.name} {run_dir.name}"
        wanted = _identity(self.config_path, settings, start)
        with suppress(OSError, UnicodeDecodeError):
            if (run_dir / _KEPT).read_text(encoding="utf-8") == wanted:
                self._log(f"{name}: kept, it had finished with these settings")
                return wanted
        self._log(name)
        _make_room(run_dir)
        arguments = ["train", self.config_path, *settings, f"run_dir={run_dir}"]
        self.launch(run_dir, arguments, lambda line: self._pass_on(name, line))
        if not (run_dir / "summary.json").exists():
            # after a signal it saves a checkpoint and ends with exit code 0, but it is not finished
            raise RunAborted(f"{run_dir}: the run was stopped before its end; the same command runs it again")
        with writing(run_dir / _KEPT):
            write_text(run_dir / _KEPT, wanted)
        return wanted

    def _pass_on(self, name: str, line: str) -> None:
        is_due = time.monotonic() - self.logged_at >= _EVERY_S
        if _EVALUATION.match(line) or (_PROGRESS.match(line) and is_due):
            self._log(f"{name}: {' '.join(line.split())}")

    def _log(self, text: str) -> None:
        log(f"compare: {self.begun}/{self.total} {text}")
        self.logged_at = time.monotonic()


def in_a_process(run_dir: Path, arguments: list[str], line: Callable[[str], None]) -> None:
    """Run `dppo-megatron` with `arguments` in another process; `line` is called with each line that it prints."""
    with tempfile.TemporaryFile() as errors:  # a full pipe without a reader would block the run
        with start_python(
            "dppo_megatron", *arguments, stdout=subprocess.PIPE, stderr=errors, encoding="utf-8", errors="replace"
        ) as process:
            assert process.stdout is not None
            try:
                for printed in process.stdout:
                    line(printed)
            except BaseException:
                process.kill()  # not terminate(): saving may take minutes, and a rerun starts from the beginning
                raise
        errors.seek(0)
        stderr = errors.read().decode(errors="replace")  # a library, or a path, may print any bytes
    check_end(run_dir, process.returncode, stderr)


def _make_room(run_dir: Path) -> None:
    """Empty `run_dir` but for compare's marker. Raises UserError if it holds files that compare has not made."""
    if run_dir.exists():
        if any(run_dir.iterdir()) and not (run_dir / _KEPT).exists():
            raise UserError(f"--out: {run_dir} holds something that compare has not made; name another directory")
        shutil.rmtree(run_dir)
    run_dir.mkdir(parents=True)
    (run_dir / _KEPT).touch()


def check_end(run_dir: Path, code: int, stderr: str) -> None:
    """Judge a run by its exit code (negative: minus the signal that ended it) and its stderr.

    Raises:
        UserError: exit code 2, a mistake in the settings.
        RunAborted: a guard stopped it, or it crashed; then with the last line of stderr, which is kept in a file.
    """
    if code == 2:
        # the last line; progress and libraries may have printed before it
        raise UserError(f"\n{stderr.strip()}".rpartition("\nerror: ")[2].strip())
    if code == 3:
        raise StoppedByGuard(f"{run_dir}: {stderr.strip().rpartition('stopped: ')[2]}")
    if code:
        how = f"was ended by signal {-code}" if code < 0 else f"failed with exit code {code}"
        with writing(run_dir / _ERRORS):
            write_text(run_dir / _ERRORS, stderr)
        last = next((line.strip() for line in reversed(stderr.splitlines()) if line.strip()), "nothing on stderr")
        raise RunAborted(f"{run_dir}: the run {how}: {last} (all of it: {run_dir / _ERRORS})")


def _identity(config_path: str, settings: list[str], start: str) -> str:
    """All that the run is a function of: its settings with those of the file, sizes and times of its model's files, and
    digests of its data, of the user's code that it names, and of `start`: an arm's settings name only the directory of
    its start, not what was trained there."""
    config = load_config(config_path, settings, writes_run=False)
    values = config_values(config)
    sets = *train_set_configs(config).values(), *eval_set_configs(config).values()
    paths = [Path(path) for path in (*(one.path for one in sets), config.sft.examples_path) if path]
    data = {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths if path.is_file()}
    start_digest = hashlib.sha256(start.encode()).hexdigest() if start else ""
    named = sorted({value for value in flat(values).values() if isinstance(value, str) and _CODE.fullmatch(value)})
    files = [] if start else sorted(Path(config.model.hf_path).rglob("*"))  # `start` already covers its own
    model = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files if path.is_file()]
    code = {one: source_digest(one) for one in named}
    identity = {"settings": values, "data": data, "start": start_digest, "code": code, "model": model}
    return json.dumps(identity, default=str)


def shared_task(config: Config) -> str | None:
    """The reason why all seeds share one task, or None if each gets its own.

    Runs that share a task share its luck: their spread over seeds shows how much the draws matter, not how much the
    task does. A `task.json` records how a directory was made, so it can be made for another seed.
    """
    if not config.data.train_path:
        return "the task is not one file with a task.json beside it"
    if read_recipe(_home(config)) is None:
        return f"{_home(config)} has no task.json that says how to make it for another seed"
    return None


def task_settings(config: Config, seed: int, directory: Path) -> list[str]:
    """Make the task of `seed` in `directory`; returns the settings that use it: every path of the job in its own task's
    directory, moved to the new one. The job's own seed has its task already, whatever seed that was made with."""
    home = _home(config)
    recipe = read_recipe(home)
    assert recipe is not None, "this job has no task that can be made for a seed"
    if seed == config.seed:
        return []
    wanted = recipe._replace(seed=recipe.seed + seed - config.seed)
    if read_recipe(directory) != wanted:  # task.json is written last: with it, all is there
        with writing(directory):
            write_quickstart(directory, wanted)
    return [
        f"{key}={directory / path.relative_to(home.resolve())}"
        for key, value in flat(asdict(config)).items()
        if "path" in key and value and (path := Path(value).resolve()).is_relative_to(home.resolve())
    ]


def _home(config: Config) -> Path:
    return Path(config.data.train_path).parent
