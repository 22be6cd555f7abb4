"""Damaged run directories and evaluations before the commands that only read: a result, or one sentence and exit 2.

What is accepted is checked where a figure would be made of it: a trace that `simulate` replays must be one that the
plain checker here takes, and an evaluation that `eval --compare` reads must say what its lines say.

A run holds times, so its bytes are damaged elsewhere on another machine, and no fixed number of cases is taken. The
first case is not damaged: each command takes one at least.
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from support.cases import Choose
from support.job import QUICK, job_config, write_job_files
from support.launch import run_ranks

from dppo_megatron.config.schema import Config
from dppo_megatron.evaluation.eval_samples import scores_of
from dppo_megatron.evaluation.eval_scores import EvalSample
from dppo_megatron.evaluation.standalone import write_results
from dppo_megatron.job import prepare_job
from dppo_megatron.run import Run
from dppo_megatron.train import train
from dppo_megatron.types import UserError
from dppo_megatron.workbench.cli import main
from dppo_megatron.workbench.compare.arms import read_method_run

COUNT = 30
RESCORED = 15
"""Of so many one is graded again: a process of its own for each."""
ODD: tuple[Any, ...] = (None, True, False, 0, 1, -1, 3, 10**12, 10**30, 10**400, 0.5, -0.0, 1e300, float("nan"))
ODD += (float("inf"), "", "x", "1", "nan", "\ud800", "\0", "../x", [], [1], [None], [[]], {}, {"a": 1}, [{}])
ODD += ("é" * 3000,)
STRAY = (b"\0", b"\xff", b"\xef\xbb\xbf", b"\n", b"NaN", b"1e999", b"[" * 5000, b"9" * 5000)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(0 if "DPPO_FUZZ" in os.environ else 1800)]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run of three steps with evaluations, samples and a trace."""
    home = tmp_path_factory.mktemp("runs")
    files = write_job_files(home / "task")

    def job() -> None:
        config = job_config(files, home / "run", steps=3, eval__every_steps=1, observe__samples__share=1, **QUICK)
        with Run(prepare_job(config, 1)) as run:
            train(run)

    run_ranks(job, 1)
    (home / "run" / "servers.json").write_text(json.dumps({"at": 1.7e9, "servers": [_server()]}))
    for heavy in ("checkpoints", "hf"):
        shutil.rmtree(home / "run" / heavy, ignore_errors=True)
    return home / "run"


def _server() -> dict[str, Any]:
    return {"url": "http://h:1", "state": "out", "reason": "gone", "outages": 1, "completions": 3, "asleep": False}


@pytest.fixture(scope="module")
def evaluation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `eval` writes: two sets, one graded by another grader, a failed grading among the samples."""
    directory = tmp_path_factory.mktemp("evaluation")
    samples = [
        EvalSample(name, str(problem), problem, sample, "p", "7", f"\\boxed{{{problem}}}", 5, "stop", *grade, "exact")
        for name in ("a", "b/c")
        for problem in range(4)
        for sample, grade in enumerate(((1.0, True, "7", "7", False), (0.0, False, "3", "3", False), (None,) * 5))
    ]
    sets: dict[str, dict[str, Any]] = {"a": {}, "b/c": {"reward": {"function": "math"}}}
    write_results(directory, samples, scores_of(samples), Config(), {"model": "m"}, sets)
    return directory


def _odd(rng: random.Random, old: Any) -> Any:
    if type(old) in (int, float) and rng.random() < 0.5:
        return rng.choice((old + 1, -old, old * 1000, float(old), str(old), [old]))
    if isinstance(old, list) and rng.random() < 0.5:
        return rng.choice((old[:-1], [*old, *old[:1]], [old], old[::-1], [None, *old[1:]]))
    return rng.choice(ODD)


def _mutate_value(rng: random.Random, value: Any) -> None:
    """Change, drop or add something at some depth, in place."""
    at = value
    while rng.random() < 0.6:
        below = [inner for inner in (at.values() if isinstance(at, dict) else at) if isinstance(inner, dict | list)]
        below = [inner for inner in below if inner]
        if not below:
            break
        at = rng.choice(below)
    if not at:
        return
    key: Any = rng.choice(list(at)) if isinstance(at, dict) else rng.randrange(len(at))
    if rng.random() < 0.2:
        del at[key]
    else:
        at[key] = _odd(rng, at[key])


def _damage_json(rng: random.Random, path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines() if path.suffix == ".jsonl" else [path.read_text("utf-8")]
    place = rng.randrange(len(lines))
    value = json.loads(lines[place])
    _mutate_value(rng, value)
    lines[place] = json.dumps(value if rng.random() < 0.95 else _odd(rng, value))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _damage_yaml(rng: random.Random, path: Path) -> None:
    value = yaml.safe_load(path.read_text("utf-8"))
    _mutate_value(rng, value)
    path.write_text(yaml.safe_dump(value), "utf-8")


def _damage_bytes(rng: random.Random, path: Path) -> None:
    raw = bytearray(path.read_bytes())
    for _ in range(rng.randint(1, 3)):
        place = rng.randrange(len(raw) + 1)
        match rng.randrange(5):
            case 0:
                raw[place : place + 1] = bytes([rng.randrange(256)])
            case 1:
                del raw[place : place + rng.randint(1, 200)]
            case 2:
                raw[place:place] = rng.choice(STRAY)
            case 3:
                raw[place:place] = raw[:300]
            case _:
                del raw[place:]
    path.write_bytes(raw)


def _damage_parquet(rng: random.Random, path: Path) -> None:
    """Columns that are gone, of another type, or null."""
    table = pq.ParquetFile(path).read()
    place = rng.randrange(table.num_columns)
    name, rows = table.schema.names[place], table.num_rows
    match rng.randrange(4):
        case 0:
            table = table.drop_columns([name])
        case 1:
            table = table.set_column(place, name, pa.nulls(rows, table.schema.field(place).type))
        case 2:
            table = table.set_column(place, name, pa.array([rng.choice(("x", "1", "é"))] * rows))
        case _:
            table = table.set_column(place, name, pa.array([rng.choice((float("nan"), float("inf"), -1.0))] * rows))
    pq.write_table(table, path)


def _replace(rng: random.Random, path: Path) -> None:
    """Gone, empty, a directory, or a link to nothing, to itself or to something else."""
    path.unlink()
    match rng.randrange(6):
        case 0:
            path.touch()
        case 1:
            path.mkdir()
        case 2:
            path.symlink_to("nowhere")
        case 3:
            path.symlink_to(path.name)
        case 4:
            path.symlink_to("/dev/null")


def _damage(rng: random.Random, directory: Path) -> str:
    """Damage a file or two of `directory`; says which and how."""
    said = []
    for _ in range(rng.choice((1, 1, 2))):
        there = [one for one in sorted(directory.rglob("*")) if one.is_file() and not one.is_symlink()]
        path = rng.choice([*there, *(3 * [one for one in there if one.suffix == ".jsonl"])])
        ways: list[Callable[[random.Random, Path], None]] = [_damage_bytes, _replace]
        if path.suffix in (".json", ".jsonl"):
            ways += [_damage_json] * 5
        if path.suffix == ".yaml":
            ways += [_damage_yaml] * 3
        if path.suffix == ".parquet":
            ways += [_damage_parquet] * 3
        way = rng.choice(ways)
        try:
            way(rng, path)
        except (ValueError, LookupError, TypeError, OSError, yaml.YAMLError):
            continue  # damaged by the one before, beyond what this one can read
        said.append(f"{way.__name__.strip('_')} {path.relative_to(directory)}")
    return ", ".join(said)


def _run(capsys: pytest.CaptureFixture[str], where: str, *arguments: str | Path) -> bool:
    """Whether the command took it; else it must have said one sentence and ended with 2."""
    capsys.readouterr()
    try:
        code = main([str(one) for one in arguments])
    except Exception as error:
        raise AssertionError(f"{where}: {arguments[0]}: {type(error).__name__}: {error}") from error
    said = capsys.readouterr()
    assert code in (0, 2), f"{where}: {code}"
    if code:
        assert said.err.startswith("error: ") and said.err.count("\n") == 1, f"{where}: {said.err!a}"
        assert said.err.strip().isprintable() and 20 < len(said.err) < 2000, f"{where}: {said.err!a}"
    else:
        assert not said.err, f"{where}: {said.err!a}"
    return code == 0


def test_runs_that_are_only_read(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], cases: Choose
) -> None:
    """`report`, `watch`, `simulate`, and what `compare` reads of a run that it keeps."""
    taken = dict.fromkeys(("report", "watch", "simulate", "compare"), 0)
    chosen = cases("run", COUNT)
    for case in chosen:
        rng, copy = random.Random(f"run {case}"), tmp_path / "run"
        shutil.copytree(run_dir, copy)
        where = f"run {case}: {_damage(rng, copy) if case else 'whole, trace too'}"
        taken["report"] += _run(capsys, where, "report", copy, "--out", tmp_path / "report.html")
        taken["watch"] += _run(capsys, where, "watch", copy, "--once")
        trace = copy / "trace.jsonl"
        if "trace" in where and _run(
            capsys, where, "simulate", trace, "--methods", "grpo,dppo,cppo", "--json", tmp_path / "s.json"
        ):
            taken["simulate"] += 1
            _is_a_trace(where, trace)
            text = (tmp_path / "s.json").read_text()
            assert "NaN" not in text and "Infinity" not in text, where
            assert [one["method"] for one in json.loads(text)["methods"]] == ["grpo", "dppo", "cppo"], where
        try:
            read_method_run("grpo", 0, copy)
            taken["compare"] += 1
        except UserError as error:
            assert str(copy) in str(error) and "\n" not in str(error), where
        shutil.rmtree(copy)
    assert chosen.are_few or (min(taken.values()) > 0 and taken["report"] > len(chosen) / 2), taken


def _is_a_trace(where: str, path: Path) -> None:
    """Whether every line is what docs/run_directory.md says: shapes, kinds and ranges, checked the plain way."""
    head, *steps = [json.loads(line) for line in path.read_bytes().splitlines()]
    groups, before = {len(group) for step in steps for group in step["rewards"]}, 0
    assert len(groups) == 1, where
    for step in steps:
        assert type(step["step"]) is int and step["step"] > before, where
        before = step["step"]
        count = len(step["prompts"])
        assert all(type(one) is int and 0 <= one < head["num_prompts"] for one in step["prompts"]), where
        for name in ("rewards", "lengths", "logit_grad_norm"):
            assert len(step[name]) == count and {len(group) for group in step[name]} == groups, f"{where}: {name}"
        rewards = [one for group in step["rewards"] for one in group if one is not None]
        assert all(type(one) in (int, float) and math.isfinite(one) for one in rewards), where
        assert all(type(one) is int and one >= 0 for group in step["lengths"] for one in group), where
        assert all(math.isfinite(one) and one >= 0 for group in step["logit_grad_norm"] for one in group), where
        kept = step["kept"]
        assert all(type(one) is int and 0 <= one < count * max(groups) for one in kept), where
        assert len(set(kept)) == len(kept), where
        assert all(step["seconds"][name] >= 0 for name in ("rollout", "update", "other")), where


def test_evaluations_that_are_only_read(
    evaluation: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    cases: Choose,
) -> None:
    """`eval --compare` of a damaged one with a whole one, and `eval --rescore`."""
    taken = {"compare": 0, "rescore": 0}
    chosen = cases("evaluation", COUNT)
    for case in chosen:
        rng, copy = random.Random(f"evaluation {case}"), tmp_path / "evaluation"
        shutil.copytree(evaluation, copy)
        where = f"evaluation {case}: {_damage(rng, copy) if case else 'whole'}"
        taken["compare"] += _run(capsys, where, "eval", "--compare", evaluation, copy)
        if case % RESCORED == 0:
            again = ("eval", "--rescore", copy, "--out", tmp_path / "again", "reward.processes=1")
            taken["rescore"] += _run(capsys, where, *again)
        shutil.rmtree(copy)
        shutil.rmtree(tmp_path / "again", ignore_errors=True)
    assert chosen.are_few or (taken["compare"] > len(chosen) / 10 and taken["rescore"] > 0), taken
