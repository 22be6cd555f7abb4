"""Whole runs on several sets: what they take in a step, what they leave beside the run, and edited data at a resume."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.job import REPOSITORY, job_config, read_metrics, settings, write_job_files
from support.launch import run_ranks

from dppo_megatron.data.summary import check_data, safe_name
from dppo_megatron.job import prepare_job
from dppo_megatron.types import UserError
from dppo_megatron.workbench.cli import main

LIMIT = 7


def _arguments(files: Path, run_dir: Path, *more: str) -> list[str]:
    """Two training sets in two formats, three of the first for one of the second; long prompts of it are left out."""
    short = {
        "sft__steps": 2,
        "steps": 2,
        "rollout__prompts_per_step": 8,
        "checkpoint__every_steps": 1,
        "reward__function": "support.faulty:length_parity",
        "data__train_path": "''",
        "data__mixing": "weighted",
    }
    sets = [
        f"data.train_sets.first.path={files / 'first.jsonl'}",
        "data.train_sets.first.weight=3",
        f"data.train_sets.second/b.path={files / 'second.csv'}",
        f"data.train_sets.second/b.max_prompt_tokens={LIMIT}",
        "data.train_sets.second/b.overlong=filter",
        "data.train_sets.second/b.level_field=hard",
        "data.train_sets.second/b.problem_field=question",
        "data.train_sets.second/b.reward.function=support.faulty:length",
        "data.order=hard_first",
    ]
    config = str(REPOSITORY / "configs" / "quickstart.yaml")
    return ["train", config, *settings(files, run_dir, **short), *sets, *more]


def _write_second(path: Path, rows: list[dict[str, Any]]) -> None:
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["question", "answer", "hard"])
        writer.writerows([row["problem"], row["answer"], f"Level {len(row['problem'])}"] for row in rows)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_job_files(tmp_path_factory.mktemp("task"))
    lines = (directory / "train.jsonl").read_text().splitlines(keepends=True)
    (directory / "first.jsonl").write_text("".join(lines[:20]))
    _write_second(directory / "second.csv", [json.loads(line) for line in lines[20:]])
    return directory


@pytest.fixture(scope="module")
def finished(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "mixed"
    assert run_ranks(main, 1, _arguments(files, run_dir)) == [0]
    return run_dir


def _second(files: Path) -> list[dict[str, str]]:
    with open(files / "second.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_a_run_on_two_sets(files: Path, finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every step takes six and two, the hardest first; what was left out and the order are in the ledger of every step;
    each set has its own rewards; the trace replays."""
    kept = sum(len(row["question"]) <= LIMIT for row in _second(files))
    assert 2 <= kept < 28
    header, *steps = (json.loads(line) for line in (finished / "trace.jsonl").read_text().splitlines())
    assert header["set_sizes"] == {"first": 20, "second/b": kept} and header["num_prompts"] == 20 + kept
    for step in steps:
        assert sum(index < 20 for index in step["offered"]) == 6 and len(set(step["offered"])) == 8
    levels = [len(row["question"]) for row in _second(files) if len(row["question"]) <= LIMIT]
    taken = [levels[index - 20] for step in steps for index in step["offered"] if index >= 20]
    assert taken == sorted(levels, reverse=True)[:4]
    for row in read_metrics(finished)[1:]:
        ledger = {entry["name"]: entry for entry in row["prune/ledger"]}
        entry = ledger["data/overlong_prompts"]
        assert entry["label"] == "biased" and entry["kept_fraction"] == pytest.approx((20 + kept) / 48)
        entry = ledger["data/order"]
        assert entry["label"] == "biased" and "data.order = hard_first by level" in entry["note"]
    for step, row in zip(steps, read_metrics(finished)[1:], strict=True):
        rewards = dict(zip(step["prompts"], step["rewards"], strict=True))
        prob = dict(zip(step["prompts"], step["inclusion_prob"], strict=True))
        own = {index: np.mean(of) for index, of in rewards.items() if index >= 20}
        assert all(set(of) <= {0.0, 1.0} for index, of in rewards.items() if index < 20) and max(own.values()) > 1
        expected = sum(mean / prob[index] for index, mean in own.items()) / sum(1 / prob[index] for index in own)
        assert row["reward/second/b/mean"] == pytest.approx(expected) and row["reward/mean"] < expected
    assert main(["simulate", str(finished / "trace.jsonl"), "--methods", "grpo"]) == 0
    assert "grpo" in capsys.readouterr().out


def test_first_prompts_are_kept(files: Path, finished: Path) -> None:
    """To the character, one file a set, whatever the set is called."""
    first = json.loads((files / "first.jsonl").read_text().splitlines()[0])["problem"]
    second = next(row["question"] for row in _second(files) if len(row["question"]) <= LIMIT)
    kept = {path.name: path.read_text() for path in (finished / "prompts").iterdir()}
    heldout = json.loads((files / "heldout.jsonl").read_text().splitlines()[0])["problem"]
    assert kept == {
        "train-first.txt": first,
        f"train-{safe_name('second/b')}.txt": second,
        "eval-heldout.txt": heldout,
    }
    names = ["a", "A", "a/b", "a_b", "../../etc", "", "é", "a" * 300, "a" * 301, "\n", ".", "nul\0"]
    assert len({safe_name(name).lower() for name in names}) == len(names)
    assert all(len(safe_name(name)) < 100 and not set("/\0\n") & set(safe_name(name)) for name in names)


def test_edited_data_at_a_resume(files: Path, finished: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Refused before a byte of the run changes, unless permitted; another number of problems in any case. An
    evaluation set may change and is said."""
    before = {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}
    original = (files / "second.csv").read_text()
    rows = _second(files)
    place = next(i for i, row in enumerate(rows) if len(row["question"]) <= LIMIT)
    edited = [{"problem": row["question"], "answer": row["answer"]} for row in rows]
    edited[place]["answer"] += "0"
    _write_second(files / "second.csv", edited)
    resumed = _arguments(files, finished, "steps=3")
    assert run_ranks(main, 1, resumed) == [2]
    said = capfd.readouterr().err
    assert "training data is not what the run of" in said and "checkpoint.may_change=[data.train_sets.second/b]" in said
    assert "'second/b'" in said and "'first'" not in said and said.count("\n") == 1
    assert {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()} == before
    permitted = [*resumed, "checkpoint.may_change=[data.train_sets]"]
    _write_second(files / "second.csv", edited[:place] + edited[place + 1 :])
    for arguments in (resumed, permitted):  # what no permission mends is not advised either
        assert run_ranks(main, 1, arguments) == [2]
        said = capfd.readouterr().err
        assert "or begin a new run_dir" in said and "may_change" not in said
        assert "'second/b': " in said and "see docs/checkpoints.md" in said
    _write_second(files / "second.csv", edited)
    lines = (files / "heldout.jsonl").read_text().splitlines(keepends=True)
    (files / "heldout.jsonl").write_text("".join(lines[1:]))
    assert run_ranks(main, 1, permitted) == [0]
    said = "".join(capfd.readouterr())
    assert "changed since the run began: training set 'second/b'" in said
    assert "changed since the run began: evaluation set 'heldout': 24 -> 23 problems" in said
    first = json.loads((files / "first.jsonl").read_text().splitlines()[0])["problem"]
    assert "training set 'first': 20 problems; longest prompt" in said and f"first prompt: {first!r}" in said
    assert "left out: longer than its max_prompt_tokens" in said
    (files / "second.csv").write_text(original)


def _remembered(**sets: tuple[str, int, str]) -> dict[str, Any]:
    entries = {name: {"key": key, "problems": count, "sha256": sha} for name, (key, count, sha) in sets.items()}
    return {"ends": [], "train": entries, "eval": {}}


def test_what_may_change() -> None:
    """By the setting that names the set, a section above it, or one setting of it. Where completions end follows from
    the model's files and this version: what has changed is said."""
    saved = _remembered(a=("data.train_sets.a", 5, "x"), b=("data.train_sets.b", 5, "y"))
    assert check_data(saved, saved, [], "c") == []
    now = _remembered(a=("data.train_sets.a", 5, "z"), b=("data.train_sets.b", 5, "y"))
    for given in ("data", "data.train_sets", "data.train_sets.a", "data.train_sets.a.path"):
        assert check_data(saved, now, [given], "c") == ["training set 'a': 5 problems, other texts, answers or order"]
    for given in ("data.train_sets.b", "data.train_path", "data.train_sets.ab", "seed"):
        with pytest.raises(UserError, match=r"checkpoint.may_change=\[data.train_sets.a\]"):
            check_data(saved, now, [given], "c")
    said = "tokens at which completions also end: {} -> [3]"
    assert check_data(saved | {"ends": [3]}, saved | {"ends": [3]}, [], "c") == []
    assert check_data(saved | {"ends": []}, saved | {"ends": [3]}, [], "c") == [said.format("[]")]
    swapped = {"ends": [], "train": dict(reversed(saved["train"].items())), "eval": {}}
    with pytest.raises(UserError, match="order of the training sets"):
        check_data(saved, swapped, [], "c")
    renamed = _remembered(a=("data.train_sets.a", 5, "x"), c=("data.train_sets.c", 5, "y"))
    with pytest.raises(UserError, match="'b': gone; 'c': new"):
        check_data(saved, renamed, [], "c")


def test_an_example_that_no_micro_batch_can_hold_is_refused(files: Path, tmp_path: Path) -> None:
    """At the start, also between the cap and what a layout can use of it: with two context ranks 60 tokens of 63."""
    worked = tmp_path / "sft.jsonl"
    fits, not_quite = ({"problem": "1", "answer": "1", "completion": "1" * digits} for digits in (58, 59))
    worked.write_text(json.dumps(fits))
    given = {"packing__max_tokens_per_microbatch": 63, "sft__examples_path": worked, "sft__examples_per_step": 1}
    config = job_config(files, tmp_path / "run", **given, actor__layout__context_parallel=2)
    assert [len(one.token_ids) for one in prepare_job(config, 2).sft_examples] == [60]
    worked.write_text(json.dumps(not_quite))
    with pytest.raises(
        UserError, match=r"sft.jsonl:1: the example has 61 tokens, more than the 60 that fit in a micro-batch"
    ):
        prepare_job(config, 2)


def test_examples_are_read_until_there_is_a_checkpoint(files: Path, tmp_path: Path) -> None:
    """One that was being written when the run was killed, before its first, is none: it begins with SFT again."""
    held, root = {}, tmp_path / "run" / "checkpoints"
    for name in ("step_000001.incomplete.0123abcd", "step_000001"):
        (root / name).mkdir(parents=True)
        job = prepare_job(job_config(files, tmp_path / "run"), 1)
        job.grade.close()
        held[name] = len(job.sft_examples)
    assert held == {"step_000001.incomplete.0123abcd": 256, "step_000001": 0}
    other = prepare_job(job_config(files, tmp_path / "new", checkpoint__resume=root / "step_000001"), 1)
    other.grade.close()
    assert not other.sft_examples


def test_a_run_that_trains_nothing_is_said(files: Path, tmp_path: Path) -> None:
    found = {}
    for steps, sft_steps in ((0, 0), (0, 1), (1, 0)):
        job = prepare_job(job_config(files, tmp_path / "run", steps=steps, sft__steps=sft_steps), 1)
        job.grade.close()
        texts = "nothing is trained", "not read"
        found[steps, sft_steps] = [any(text in note for note in job.notes) for text in texts]
    assert found == {(0, 0): [True, True], (0, 1): [False, False], (1, 0): [False, True]}
