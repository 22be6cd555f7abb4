"""`compare --sweep`: which candidates a rung runs and keeps, against an independent count; no run is made here."""

from __future__ import annotations

import json
import re
import shlex
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from support.cases import Choose
from support.job import REPOSITORY, settings, write_job_files

from dppo_megatron.config import Config, load_config
from dppo_megatron.evaluation.eval_scores import doublings
from dppo_megatron.types import RunAborted, UserError
from dppo_megatron.workbench.cli import main
from dppo_megatron.workbench.compare import runs as compare_runs
from dppo_megatron.workbench.compare.arms import Arm, MethodRun, Point, with_zeros
from dppo_megatron.workbench.compare.runs import StoppedByGuard
from dppo_megatron.workbench.compare.sweep import RungRow, arm_with_settings, candidates, halve, parse_grid

CONFIG = str(REPOSITORY / "configs" / "quickstart.yaml")
PROMPTS, RATE, SCHEDULE = "rollout.prompts_per_step", "actor.optimizer.learning_rate", "actor.optimizer.lr_schedule"
GROUP = "rollout.completions_per_prompt"
GRID = {PROMPTS: ["8", "16"], RATE: ["5e-4", "1e-3"], SCHEDULE: ["constant", "linear"]}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Settings of a small job whose files exist."""
    files = write_job_files(tmp_path_factory.mktemp("task"))
    return [one for one in settings(files, Path("unused")) if not one.startswith("run_dir")]


@pytest.fixture
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """For what is no statement about noise: intervals from 20 draws in place of 10,000, which are all of the time."""
    for where in ("evaluation.bootstrap.RESAMPLES", "workbench.compare.verdict.RESAMPLES"):
        monkeypatch.setattr(f"dppo_megatron.{where}", 20)
    monkeypatch.setattr("dppo_megatron.workbench.compare.verdict.COPIES", 20)


def _config(prompts: int = 64, schedule: Literal["constant", "cosine"] = "constant") -> Config:
    config = Config()
    config.rollout.prompts_per_step, config.steps, config.eval.every_steps = prompts, 40, 4
    config.actor.optimizer.learning_rate, config.actor.optimizer.lr_schedule = 1e-3, schedule
    return config


def _run(arm: str, seed: int, end: float) -> MethodRun:
    """Its last two evaluations are at `end`."""
    # cheaper the lower it ends, so that the best is not the soonest
    curve = [Point(i, value, end**4 * i, end**4 * i, i, i) for i, value in enumerate((0.1, end, end))]
    return MethodRun(arm, seed, curve, {}, {"h": [0.5]}, {"step": 1.0})


def test_the_three_that_interact_are_always_in_the_grid() -> None:
    """Around the config's own values, which are among them; a method's prompts are not swept alone."""
    grid = parse_grid([""], _config())
    assert list(grid) == [PROMPTS, RATE, SCHEDULE]
    assert grid[PROMPTS] == ["32", "64", "128"] and 1e-3 in map(float, grid[RATE])
    assert grid[SCHEDULE] == ["constant", "linear"]
    grid = parse_grid([f"{PROMPTS}=16", "objective.clip_low=0.1,0.2"], _config(schedule="cosine"))
    assert grid[PROMPTS] == ["16"] and len(grid[RATE]) == 4 and grid[SCHEDULE] == ["constant", "cosine"]
    assert grid["objective.clip_low"] == ["0.1", "0.2"]
    assert parse_grid([f"{RATE}=1e-3,2e-3,0.001"], _config())[RATE] == ["0.001", "2e-3"], "each value once"


def test_every_candidate_is_a_job_of_equally_many_prompts(job: list[str]) -> None:
    """Its settings load, have the grid's values, and train on as many prompts, up to half a step."""
    config = load_config(CONFIG, job, writes_run=False)
    arms = candidates("grpo_nonzero,dppo", GRID, config, 1.5)
    assert len(arms) == len({arm.directory for arm in arms}) == 16
    assert not [arm for arm in arms if set(arm.directory) & set("/:= ")]
    whole = config.steps * config.rollout.prompts_per_step
    for arm in arms:
        loaded = load_config(CONFIG, [*job, *arm.settings], writes_run=False)
        prompts = loaded.rollout.prompts_per_step
        assert abs(loaded.steps * prompts / whole - (1.5 if arm.method == "dppo" else 1)) * whole <= prompts / 2
        optimizer = loaded.actor.optimizer
        given = arm.name.partition("@")[2].split(",")
        assert [prompts, optimizer.learning_rate, optimizer.lr_schedule] == [int(given[0]), float(given[1]), given[2]]


def test_the_baseline_of_a_sweep_without_zeros_is_that_of_one_with_them(job: list[str]) -> None:
    without, grpo = (candidates(method, GRID, _config(), 1.5) for method in ("grpo_nonzero", "grpo"))
    for own, expected in zip(map(with_zeros, without), grpo, strict=True):
        assert (own.name, own.method, own.steps) == (expected.name, expected.method, expected.steps)
        assert load_config(CONFIG, [*job, *own.settings]) == load_config(CONFIG, [*job, *expected.settings])


def test_groups_of_another_size_have_as_many_completions_in_all(job: list[str]) -> None:
    """Half the group has twice the steps, and as many evaluations."""
    grid = {PROMPTS: ["8"], RATE: ["1e-3"], SCHEDULE: ["linear"], GROUP: ["2", "4", "8", "none"]}
    job = [*job, f"{GROUP}=4", "steps=24", "eval.every_steps=6"]
    config = load_config(CONFIG, job, writes_run=False)
    arms = candidates("grpo", grid, config, 1.0)
    assert config.rollout.prompts_per_step == 16 and [arm.steps for arm in arms] == [96, 48, 24, 48]
    for arm, every in zip(arms[:3], (24, 12, 6), strict=True):
        loaded = load_config(CONFIG, [*job, *arm.settings], writes_run=False)
        rollout = loaded.rollout
        assert loaded.steps * rollout.prompts_per_step * rollout.completions_per_prompt == 24 * 16 * 4
        assert loaded.eval.every_steps == every
    with pytest.raises(UserError, match="completions_per_prompt"):
        load_config(CONFIG, [*job, *arms[3].settings], writes_run=False)


def _halved(
    arms: Sequence[Arm], ends: dict[str, list[float]], seeds: int, stopped: set[tuple[str, int]]
) -> tuple[list[RungRow], list[list[RungRow]], list[tuple[str, int]]]:
    """The best, the rungs, and (candidate, seed) of every run in order."""
    made: list[tuple[str, int]] = []

    def run(left: Sequence[Arm], *, first_seed: int, seeds: int, stops_are_left_out: bool) -> list[MethodRun]:
        pairs = [(arm.name, seed) for seed in range(first_seed, seeds) for arm in left]
        made.extend(pairs)
        return [_run(name, seed, ends[name][seed]) for name, seed in pairs if (name, seed) not in stopped]

    found = list(halve(arms, seeds, run))
    best = [row for row in found[-1][0] if row.goes_on]
    assert {(one.arm, one.seed) for one in found[-1][1]} == {
        (row.arm.name, seed) for row in best for seed in range(seeds)
    }
    return best, [rows for rows, _ in found], made


def test_the_better_half_goes_on(cases: Choose) -> None:
    """Counted by hand from a table of ends: on each rung the survivors' mean over all seeds so far is above that of
    each that is dropped, they are the larger half, no run is made twice, and the last has the best."""
    config = _config()
    every = candidates("grpo,dppo", GRID, config, 1.0)
    for number in cases("sweeps", 40):
        draw = np.random.default_rng(number)
        arms = [arm for arm in every if draw.random() < 0.7] or every
        methods = {arm.method for arm in arms}
        seeds = int(draw.integers(1, 6))
        values = draw.permutation(np.linspace(0.2, 0.9, len(arms) * seeds)).reshape(len(arms), seeds)
        ends = {arm.name: row.tolist() for arm, row in zip(arms, values, strict=True)}
        stopped = {(arm.name, int(draw.integers(seeds))) for arm in arms if draw.random() < 0.2}
        spared = {next(arm.name for arm in arms if arm.method == method) for method in methods}
        stopped = {pair for pair in stopped if pair[0] not in spared}
        try:
            best, rungs, made = _halved(arms, ends, seeds, stopped)
        except RunAborted:  # the spared one may have been dropped before all others were stopped
            assert stopped
            continue
        assert len(made) == len(set(made)) and {row.arm.method for row in best} == methods
        left = {arm.name for arm in arms}
        for until, rows in zip(doublings(seeds), rungs, strict=True):
            assert {row.arm.name for row in rows} == left
            for method in methods:
                of_method = [row for row in rows if row.arm.method == method]
                whole = [r for r in of_method if not any((r.arm.name, s) in stopped for s in range(until))]
                on = [row for row in of_method if row.goes_on]
                assert len(on) == (1 if until == seeds else -(-len(whole) // 2))
                assert {row.arm.name for row in on} <= {row.arm.name for row in whole}
                mean = {row.arm.name: float(np.mean(ends[row.arm.name][:until])) for row in whole}
                dropped = [mean[row.arm.name] for row in whole if not row.goes_on]
                assert min(mean[row.arm.name] for row in on) >= max(dropped, default=0.0) - 1e-12
            left = {row.arm.name for row in rows if row.goes_on}


def test_a_method_whose_candidates_were_all_stopped() -> None:
    arms = candidates("grpo", GRID, _config(), 1.0)
    with pytest.raises(RunAborted, match="every candidate of grpo was stopped"):
        _halved(arms, {arm.name: [0.5] for arm in arms}, 1, {(arm.name, 0) for arm in arms})


# --------------------------------------------------------------------------------------------- the command


@pytest.fixture
def swept(
    few_draws: None, job: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, list[str]]]:
    """The command with runs that only leave their record, at an end given by the learning rate; returns its exit code
    and what was started."""

    def sweep(*options: str, dies_at: int = -1, ends_at: int = -1, stopped: str = "") -> tuple[int, list[str]]:
        started: list[str] = []

        def launch(run_dir: Path, arguments: list[str], line: Callable[[str], None]) -> None:
            if len(started) == dies_at:
                raise RunAborted("the machine is gone")
            if len(started) == ends_at:
                signal.raise_signal(signal.SIGTERM)
            started.append(f"{run_dir.parent.name} {run_dir.name}")
            if stopped and stopped in run_dir.name:
                raise StoppedByGuard(f"{run_dir}: not finite")
            config = load_config(arguments[1], arguments[2:])
            end = 0.5 + 100 * config.actor.optimizer.learning_rate
            rows = [
                {"step": one.step, "eval/h/pass@1": one.accuracy, "eval/problems": {"h": [0.5]}, "tokens/trained": 1,
                 "time/step_s": 1.0, "time/step_cpu_s": 1.0, "tokens/generated": 1, "prune/ledger": []}
                for one in _run("", 0, end).curve
            ]  # fmt: skip
            (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            (run_dir / "hf").mkdir()
            (run_dir / "summary.json").write_text('{"phase_s": {"step": 4.0}}')

        monkeypatch.setattr(compare_runs, "in_a_process", launch)
        return main(["compare", CONFIG, *job, "--out", str(tmp_path / "out"), *options]), started

    return sweep


SMALL = f"--methods grpo,dppo --sweep {PROMPTS}=8 --sweep {RATE}=1e-4,1e-3 --sweep {SCHEDULE}=linear".split()


def test_an_unfinished_sweep_goes_on_where_it_was(
    swept: Callable[..., tuple[int, list[str]]], job: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """However far it had come, no run is made twice, and in the end it is as if nothing had happened. What is printed
    as the best is a line that gives that job."""
    options = [*SMALL, "--seeds", "2"]
    pieces: list[str] = []
    for dies_at in (0, 3, 2):
        code, started = swept(*options, dies_at=dies_at)
        assert code == 3 and len(started) == dies_at
        pieces += started
    code, started = swept(*options)
    assert code == 0
    pieces += started
    assert len(pieces) == len(set(pieces)) == 2 + 4 + 2
    assert swept(*options) == (0, [])
    best = json.loads((tmp_path / "out" / "sweep.json").read_text())
    assert [len(rung) for rung in best["rungs"]] == [4, 2] and set(best["best"]) == {"grpo", "dppo"}
    printed = capsys.readouterr().out
    line = next(line for line in reversed(printed.splitlines()) if line.startswith("dppo: "))
    config = load_config(CONFIG, [*job, *shlex.split(line.removeprefix("dppo: "))], writes_run=False)
    assert config.actor.optimizer.learning_rate == 1e-3 and config.pruning.completion.method == "dppo"
    assert f"{RATE} is at the edge of its grid" in printed
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert {run["arm"].split("@")[0] for run in results["runs"]} == {"grpo", "dppo"} and len(results["runs"]) == 4
    assert (tmp_path / "out" / "report.html").exists()


@pytest.mark.parametrize("options", [SMALL, ["--methods", "grpo,dppo"]])
def test_sigterm_ends_it_and_what_has_finished_is_kept(
    swept: Callable[..., tuple[int, list[str]]], options: list[str]
) -> None:
    """In the third run: the exit code of a command that SIGTERM ended; the same command goes on from there."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as end:
            swept(*options, "--seeds", "2", ends_at=2)
        assert end.value.code == 143
        code, started = swept(*options, "--seeds", "2")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert code == 0 and len(started) == (8 if "--sweep" in options else 6) - 2


def test_a_candidate_that_a_guard_stops_is_left_out(
    swept: Callable[..., tuple[int, list[str]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rate so high that it diverges is a finding of a sweep, and not its end; without --sweep it is."""
    code, started = swept(*SMALL, stopped="1e-3")
    assert code == 0 and len(started) == 1 + 4
    found = json.loads((tmp_path / "out" / "sweep.json").read_text())
    assert all(f"{RATE}=1e-4" in best for best in found["best"].values())
    assert capsys.readouterr().out.count("stopped by a guard") == 2
    assert swept("--methods", "grpo", stopped="grpo")[0] == 3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([RATE], "expected a setting and its values"),
        (["=1"], "expected a setting and its values"),
        ([f"{RATE}=1e-3,,2e-3"], "expected a setting and its values"),
        (["data.train_path=a/b,c"], "expected a setting and its values"),
        ([f"{PROMPTS}=8,0"], "after @ comes the number of prompts a step"),
        ([f"{PROMPTS}=8,1.5"], "after @ comes the number of prompts a step"),
        ([f"{RATE}=fast"], "actor.optimizer.learning_rate"),
        ([f"{SCHEDULE}=constant,falling"], "actor.optimizer.lr_schedule"),
        (["actor.optimizer.rate=1"], "actor.optimizer.rate"),
        (["seed=1,2"], "compare sets it itself"),
        (["steps=10,20"], "compare sets it itself"),
        (["pruning.prompt.method=none,dppo"], "compare sets it itself"),
    ],
)
def test_a_grid_that_is_none(
    swept: Callable[..., tuple[int, list[str]]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    given: list[str],
    message: str,
) -> None:
    """One sentence and exit code 2, before anything is trained."""
    assert swept(*(part for one in given for part in ("--sweep", one))) == (2, [])
    said = capsys.readouterr().err
    assert message in said and len(said.strip().splitlines()) == 1
    assert not list((tmp_path / "out").rglob("*")), "nothing was written"


def test_methods_have_no_prompts_of_their_own_in_a_sweep(swept: Callable[..., tuple[int, list[str]]]) -> None:
    assert swept("--sweep", "--methods", "grpo@16,dppo") == (2, [])
    assert swept("--sweep", "--methods", "grop") == (2, [])


def test_an_arm_with_settings_of_its_own(job: list[str]) -> None:
    """Is the sweep's candidate of these settings, with its own steps; without `steps`, with the candidate's."""
    config = load_config(CONFIG, [*job, f"{GROUP}=4", "steps=24", "eval.every_steps=6"], writes_run=False)
    grid = {PROMPTS: ["8"], GROUP: ["2"], RATE: ["1e-3"]}
    [candidate] = candidates("dppo", grid, config, 1.0)
    text = f"dppo {PROMPTS}=8 {GROUP}=2 {RATE}=1e-3"
    same = arm_with_settings(text, config)
    assert replace(same, name=candidate.name) == candidate and candidate.steps == 96
    arm = arm_with_settings(f"{text} steps=60", config)
    assert (arm.name, arm.method, arm.steps) == (f"{same.name},steps=60", "dppo", 60)
    assert same.name == "dppo@8,completions_per_prompt=2,learning_rate=1e-3"
    loaded = load_config(CONFIG, [*job, *arm.settings], writes_run=False)
    assert (loaded.steps, loaded.eval.every_steps, loaded.rollout.prompts_per_step) == (60, 24, 8)
    assert arm_with_settings("grpo", config).steps == arm_with_settings("grpo", config, 1.5).steps == 24
    assert arm_with_settings("dppo", config, 1.5).steps == 36


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--arm", "dppo@8 steps=3"], "expected a method and settings"),
        (["--arm", "grpo,dppo steps=3"], "expected a method and settings"),
        (["--arm", "dppo steps=0"], "expected a method and settings"),
        (["--arm", "dppo steps"], "expected a method and settings"),
        (["--arm", ""], "expected a method and settings"),
        (["--arm", "dpo steps=3"], "dpo"),
        (["--arm", "dppo seed=3"], "--arm seed: compare sets it itself for dppo"),
        (["--methods", "grpo@16", "--arm", f"grpo {PROMPTS}=16"], "two are the same"),
        (["--sweep", "--arm", "dppo steps=3"], "--sweep has its own settings"),
    ],
)
def test_arms_that_are_none(
    swept: Callable[..., tuple[int, list[str]]], capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert swept(*options) == (2, [])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("baseline", ["grpo", "grpo_nonzero"])
def test_what_a_sweep_found_is_compared_on_other_seeds(
    swept: Callable[..., tuple[int, list[str]]], tmp_path: Path, capsys: pytest.CaptureFixture[str], baseline: str
) -> None:
    """The best of each method, and nothing else, with its own settings; `grpo` with those of `grpo_nonzero`, which
    learns the same for less, if only that was swept."""
    assert swept("--methods", f"{baseline},dppo", *SMALL[2:], "--seeds", "2")[0] == 0
    best = str(tmp_path / "best.json")
    (tmp_path / "out").joinpath("sweep.json").rename(best)
    code, started = swept("--tuned", best, "--seeds", "2", "seed=50")
    assert code == 0
    assert {one for one in started if not one.endswith("start")} == {
        f"seed{seed} {method}@8,1e-3,linear" for seed in (50, 51) for method in {"grpo", baseline, "dppo"}
    }
    again, one_more = swept("--tuned", best, "--seeds", "2", "seed=50", "--arm", f"grpo {PROMPTS}=8 steps=2")
    assert (again, one_more) == (0, ["seed50 grpo@8,steps=2", "seed51 grpo@8,steps=2"]), "what has run is kept"
    alone, same = swept("--seeds", "2", "seed=50", "--arm", f"grpo {PROMPTS}=8 steps=2")
    assert (alone, same) == (0, []), "without other methods"
    capsys.readouterr()
    for options in (["--sweep"], ["--methods", "dppo"], ["--steps-factor", "2"], ["--tuned", CONFIG]):
        assert swept("--tuned", best, *options) == (2, [])
        assert "--tuned" in capsys.readouterr().err
    for length in ("steps=7", "eval.every_steps=5", f"{PROMPTS}=32"):  # which the best's own settings do not follow
        assert swept("--tuned", best, length) == (2, [])
        key, _, value = length.partition("=")
        assert re.search(rf"was swept with {key}=\d+, but this job has {value}; sweep again", capsys.readouterr().err)
