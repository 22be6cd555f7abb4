"""Whatever is done to a run's files, it resumes from its newest good checkpoint with every good line, or says why not.

Files are harmed at random (`support/damage.py`). Some runs are opened a first time on a disk that fails, is full, is or
becomes read-only, or are killed while they are opened (`support/disk_faults.py`), and some while another trainer has
them.

`DPPO_FUZZ=5000 pytest tests/test_damage.py` tries more damages, and a real resumed run for each hundred of them
(`support/cases.py`).
"""

from __future__ import annotations

import os
import random
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
from safetensors.torch import load_file
from support.cases import Choose, chosen_count, first_case
from support.damage import FILES, RECORDS, harm, listed, obstructed, unharmed_lines, unharmed_steps
from support.disk_faults import KINDS, Killed, disk_fault
from support.job import job_config, read_metrics
from support.killing import run_whole
from support.launch import run_ranks
from support.processes import holding

from dppo_megatron.observe.lock import RunLock
from dppo_megatron.types import UserError
from dppo_megatron.workbench.runs.run_record import read_run

pytestmark = pytest.mark.slow

OPENED = ("resumed", "resumed from an older one", "refused", "began again")
"""What may come of a run whose files were harmed."""
NAME = re.compile(r"step_([0-9]{6,})")
SAMPLES = re.compile(r"steps_[0-9]+-([0-9]+)\.rank[0-9]+\.parquet")
SETTINGS = {
    "sft__steps": 2,
    "checkpoint__every_steps": 1,
    "checkpoint__keep": 0,
    "steps": 4,
    "rollout__prompts_per_step": 8,
    "reward__function": "support.faulty:length_parity",
}


@pytest.fixture(scope="module")
def original(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of four steps that kept every checkpoint. Nobody harms it: copies stand where it ran."""
    run_dir = tmp_path_factory.mktemp("original") / "run"
    run_whole(files, run_dir, 1, SETTINGS)
    return run_dir.rename(run_dir.with_name("original"))


def _copy(original: Path, run_dir: Path) -> Path:
    """Without what no test here looks at, and links as links."""
    shutil.rmtree(run_dir, ignore_errors=True)
    shutil.copytree(original, run_dir, symlinks=True, ignore=shutil.ignore_patterns("hf"))
    return run_dir


@dataclass
class Harmed:
    """What is left of a run, by comparison with the copy that was never harmed."""

    steps: list[int]
    lines: dict[str, dict[int, bytes]]
    intact: bool
    """Its identity and its settings are as they were, and no directory or pipe has the place of a file."""
    named: dict[str, int]
    """Whatever has a checkpoint's name."""
    sampled: dict[int, int]
    """Rows of samples/ that can be read, by step."""
    others: dict[str, bytes]
    """Files in samples/ that are not the run's."""

    @staticmethod
    def look(run_dir: Path, original: Path) -> Harmed:
        same = all(_bytes(run_dir / name) == _bytes(original / name) for name in ("run.json", "config.yaml"))
        folder = run_dir / "samples"
        inside = [path for path in folder.iterdir() if path.is_file()] if folder.is_dir() else []
        return Harmed(
            unharmed_steps(run_dir, original),
            {name: unharmed_lines(run_dir, original, name) for name in RECORDS},
            same and not obstructed(run_dir),
            _named(run_dir),
            _sampled(folder),
            {path.name: path.read_bytes() for path in inside if not SAMPLES.fullmatch(path.name)},
        )


def _named(run_dir: Path) -> dict[str, int]:
    root = run_dir / "checkpoints"
    names = [NAME.fullmatch(path.name) for path in root.iterdir()] if root.is_dir() else []
    return {match.string: int(match[1]) for match in names if match}


def _sampled(folder: Path) -> dict[int, int]:
    tables = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if SAMPLES.fullmatch(path.name) and path.is_file():
            try:
                tables.append(pd.read_parquet(path, columns=["step", "group", "completion"]))
            except (OSError, ValueError):
                continue
    rows = pd.concat(tables).drop_duplicates() if tables else pd.DataFrame({"step": []})
    return {int(step): int(count) for step, count in rows["step"].value_counts().items()}


def _open_many(files: Path, original: Path, run_dir: Path, seeds: range) -> dict[str, int]:
    """On a rank: harm copies of the run and open each as `train` does, with everything but the model."""
    from dppo_megatron import run as run_module
    from dppo_megatron.job import prepare_job

    outcomes = dict.fromkeys((*OPENED, "held", *KINDS), 0)
    job = prepare_job(job_config(files, run_dir, **SETTINGS), 1)
    with pytest.MonkeyPatch.context() as patch:
        # what is built after the directory has been opened, and takes a second
        patch.setattr(run_module, "Loop", lambda *_: SimpleNamespace(actor=SimpleNamespace(description="")))
        for seed in seeds:
            rng = random.Random(seed)
            _copy(original, run_dir)
            story = f"damage {seed}: {'; '.join(harm(run_dir, rng))}".replace(str(run_dir), "")
            before, said = Harmed.look(run_dir, original), list[str]()
            _show(run_dir, story)
            if rng.random() < 0.4:
                kind = rng.choice(KINDS)
                at = rng.choice([0, 100, 2000, 50_000]) if kind == "full" else rng.randint(1, 25)
                with disk_fault(run_dir, kind, at) as disk:
                    what = _try(run_module, job, said)
                story += f"; {kind} at {at} {disk.struck}: {what}"
                assert unharmed_steps(run_dir, original) == before.steps, f"{story}: lost a checkpoint"
                outcomes[kind] += bool(disk.struck) or "cannot be written" in what
            elif rng.random() < 0.15 and not os.path.lexists(run_dir / "lock.json"):
                _refused_while_held(run_module, job, run_dir, story)
                outcomes["held"] += 1
            outcomes[_open_one(run_module, job, run_dir, original, before, said, story)] += 1
    return outcomes


def _show(run_dir: Path, story: str) -> None:
    """`report` shows what there is, or says that there is nothing."""
    try:
        read_run(run_dir)
    except UserError as error:
        assert "\n" not in str(error), story


def _try(run_module: Any, job: Any, said: list[str]) -> str:
    """Open the run and close it again; what became of it. Any error but one sentence is raised."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_module.RunProgress, "say", lambda _, text: said.append(text))
        try:
            run_module.Run(job)._files.close()
        except UserError as error:
            assert "\n" not in str(error) and len(str(error)) < 2500
            return f"refused: {error}"
        except Killed:
            return "killed"
    return "opened"


def _refused_while_held(run_module: Any, job: Any, run_dir: Path, story: str) -> None:
    """Another trainer has it: it is named, and nothing is touched."""
    with holding(lambda: RunLock(run_dir)) as child:
        before = listed(run_dir)
        what = _try(run_module, job, [])
        assert f"process {child}, " in what and "another trainer" in what, f"{story}: {what}"
        assert listed(run_dir) == before, f"{story}: changed while another trainer had it"


def _open_one(
    run_module: Any, job: Any, run_dir: Path, original: Path, before: Harmed, said: list[str], story: str
) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_module.RunProgress, "say", lambda _, text: said.append(text))
        try:
            run = run_module.Run(job)
        except UserError as error:
            assert "\n" not in str(error) and len(str(error)) < 2500, story
            assert not before.steps or not before.intact, f"{story}: refused: {error}"
            assert unharmed_steps(run_dir, original) == before.steps, f"{story}: a refused run has lost a checkpoint"
            return "refused"
    run._files.close()
    story = f"{story}\nsaid: {said}"
    assert unharmed_steps(run_dir, original) == before.steps, f"{story}: lost a checkpoint"
    samples = "samples" if run._origin is not None else "old/samples.0001"
    assert all(_bytes(run_dir / samples / name) == data for name, data in before.others.items()), story
    if run._origin is None:
        assert not before.named, f"{story}: began again beside its checkpoints"
        for name, lines in before.lines.items():
            old = b"".join(_bytes(path) for path in (run_dir / "old").glob(f"{name.removesuffix('.jsonl')}.*"))
            assert all(line in old for line in lines.values()), f"{story}: began again over its record"
        return "began again"
    assert before.steps, f"{story}: resumed from a harmed checkpoint"
    newest = before.steps[-1]
    assert run._origin.step == newest, f"{story}: resumed from {run._origin.step} instead of {newest}"
    for name in (name for name, step in before.named.items() if step > newest):
        assert any(f"{name} is not used: " in text for text in said), f"{story}: not a word of {name}"
        assert not os.path.lexists(run_dir / "checkpoints" / name), f"{story}: {name} is still in the way"
    for name in RECORDS:
        _check_record(run_dir, original, name, newest, before.lines[name], said, story)
    after = _sampled(run_dir / "samples")
    assert after == {step: rows for step, rows in before.sampled.items() if step <= newest}, f"{story}: samples"
    return "resumed" if newest == 4 else "resumed from an older one"


def _check_record(
    run_dir: Path, original: Path, name: str, newest: int, lines: dict[int, bytes], said: list[str], story: str
) -> None:
    """Every unharmed line up to the checkpoint, in order and nothing else; the later ones under old/."""
    whole = (original / name).read_bytes().splitlines()
    found = (run_dir / name).read_bytes().splitlines()
    if name == "trace.jsonl":
        assert found[0].startswith(b'{"format"'), f"{story}: {name} has no header"
        whole, found = whole[1:], found[1:]
    assert found == [line for step, line in sorted(lines.items()) if step <= newest], f"{story}: {name}"
    redone = run_dir / "old" / name.replace(".jsonl", ".redone.jsonl")
    kept = redone.read_bytes() if redone.exists() else b""
    assert all(line in kept for step, line in lines.items() if step > newest), f"{story}: {name} dropped a good line"
    first = 1 if name == "trace.jsonl" else 0
    # the last step's line waits for the evaluation: its checkpoint holds it, and the resumed run writes it again
    end = newest if name == "metrics.jsonl" and newest == SETTINGS["steps"] else newest + 1
    if lost := [step for step in range(first, end) if step not in lines]:
        assert any(name in text and "lost" in text and str(lost[0]) in text for text in said), f"{story}: {lost}"


def _bytes(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


def test_any_damage_leaves_the_newest_good_checkpoint_and_every_good_line(
    files: Path, original: Path, cases: Choose
) -> None:
    chosen, run_dir = cases("damage", 30), original.with_name("run")
    limit_s = 300 + 5 * len(chosen)
    outcomes = run_ranks(_open_many, 1, files, original, run_dir, chosen.numbers, timeout_s=limit_s)[0]
    chosen.tried = sum(outcomes[name] for name in OPENED)
    assert chosen.are_few or all(outcomes.values()), f"the damages are too much alike: {outcomes}"


@pytest.mark.parametrize("seed", range(first_case(), first_case() + max(2, chosen_count(30) // 100)))
def test_a_harmed_run_ends_as_the_one_that_was_not(files: Path, original: Path, tmp_path: Path, seed: int) -> None:
    """The last checkpoint goes, and damages at random: metrics bit for bit, but for lines that the damage took."""
    rng, run_dir = random.Random(1000 + seed), _copy(original, tmp_path / "run")
    shutil.rmtree(run_dir / "checkpoints" / "step_000004")
    while True:
        attempt = _copy(run_dir, tmp_path / "attempt")
        story = harm(attempt, rng)
        steps = unharmed_steps(attempt, original)
        same = all(_bytes(attempt / name) == _bytes(original / name) for name in ("run.json", "config.yaml"))
        if steps and same and not obstructed(attempt) and not any((attempt / name).is_symlink() for name in FILES):
            break
    attempt.rename(tmp_path / "run_harmed")
    run_dir = tmp_path / "run_harmed"
    lines = unharmed_lines(run_dir, original, "metrics.jsonl")
    run_whole(files, run_dir, 1, SETTINGS)
    theirs = [row for row in read_metrics(original) if row["step"] in lines or row["step"] > steps[-1]]
    assert read_metrics(run_dir) == theirs, story
    mine, theirs = (load_file(path / "hf" / "model.safetensors") for path in (run_dir, original))
    assert all(mine[name].numpy().tobytes() == tensor.numpy().tobytes() for name, tensor in theirs.items()), story
