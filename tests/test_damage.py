"""Whatever is done to a run's files, it resumes from its newest good checkpoint with every good line, or says why not.

`DPPO_FUZZ=5000 pytest tests/test_damage.py` tries more damages, and a real resumed run for each hundred of them.
"""

from __future__ import annotations

import os
import random
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file
from support.damage import RECORDS, harm, unharmed_lines, unharmed_steps
from support.job import job_config, read_metrics, write_job_files
from support.killing import run_whole
from support.launch import run_ranks

from dppo_megatron.types import UserError

pytestmark = pytest.mark.slow

FUZZ = int(os.environ.get("DPPO_FUZZ", "60"))
NAME = re.compile(r"step_([0-9]{6,})")
SETTINGS = {
    "warm_start__steps": 2,
    "checkpoint__every_steps": 1,
    "checkpoint__keep": 0,
    "steps": 4,
    "rollout__prompts_per_step": 8,
    "reward__function": "support.faulty:length_parity",
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_job_files(tmp_path_factory.mktemp("task"))


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


def _open_many(files: Path, original: Path, run_dir: Path, count: int) -> dict[str, int]:
    """On a rank: harm copies of the run and open each as `train` does, with everything but the model."""
    from dppo_megatron import run as run_module
    from dppo_megatron.job import prepare_job

    outcomes = {"resumed": 0, "resumed from an older one": 0, "refused": 0}
    job = prepare_job(job_config(files, run_dir, **SETTINGS), 1)
    with pytest.MonkeyPatch.context() as patch:
        # what is built after the directory has been opened, and takes a second
        patch.setattr(run_module, "Loop", lambda *_: SimpleNamespace(actor=SimpleNamespace(description="")))
        for seed in range(count):
            rng = random.Random(seed)
            _copy(original, run_dir)
            story = f"seed {seed}: {'; '.join(harm(run_dir, rng))}".replace(str(run_dir), "")
            outcomes[_open_one(run_module, job, run_dir, original, story)] += 1
    return outcomes


def _open_one(run_module: Any, job: Any, run_dir: Path, original: Path, story: str) -> str:
    steps = unharmed_steps(run_dir, original)
    lines = {name: unharmed_lines(run_dir, original, name) for name in RECORDS}
    intact = [name for name in ("run.json", "config.yaml") if _bytes(run_dir / name) == _bytes(original / name)]
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_module.RunProgress, "say", lambda _, text: said.append(text))
        try:
            run = run_module.Run(job)
        except UserError as error:
            assert "\n" not in str(error) and len(str(error)) < 2500, story
            assert not steps or len(intact) < 2, f"{story}: refused: {error}"
            assert unharmed_steps(run_dir, original) == steps, f"{story}: a refused run has lost a checkpoint"
            return "refused"
    run._close_files()
    story = f"{story}\nsaid: {said}"
    assert run._origin is not None and steps, f"{story}: began again over its record"
    newest = steps[-1]
    assert run._origin.step == newest, f"{story}: resumed from {run._origin.step} instead of {newest}"
    assert unharmed_steps(run_dir, original) == steps, f"{story}: lost a checkpoint"
    named = [match for path in (run_dir / "checkpoints").iterdir() if (match := NAME.fullmatch(path.name))]
    assert all(int(match[1]) <= newest for match in named), f"{story}: {named} are still in the way"
    for name in RECORDS:
        _check_record(run_dir, original, name, newest, lines[name], said, story)
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
    if lost := [step for step in range(first, newest + 1) if step not in lines]:
        assert any(name in text and "lost" in text and str(lost[0]) in text for text in said), f"{story}: {lost}"


def _bytes(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


def test_any_damage_leaves_the_newest_good_checkpoint_and_every_good_line(files: Path, original: Path) -> None:
    outcomes = run_ranks(_open_many, 1, files, original, original.with_name("run"), FUZZ, timeout_s=300 + 3 * FUZZ)[0]
    assert all(outcomes.values()), f"the damages are too much alike: {outcomes}"


@pytest.mark.parametrize("seed", range(max(2, FUZZ // 100)))
def test_a_harmed_run_ends_as_the_one_that_was_not(files: Path, original: Path, tmp_path: Path, seed: int) -> None:
    """The last checkpoint goes, and damages at random: metrics bit for bit, but for lines that the damage took."""
    rng, run_dir = random.Random(1000 + seed), _copy(original, tmp_path / "run")
    shutil.rmtree(run_dir / "checkpoints" / "step_000004")
    while True:
        attempt = _copy(run_dir, tmp_path / "attempt")
        story = harm(attempt, rng)
        steps = unharmed_steps(attempt, original)
        if steps and all(_bytes(attempt / name) == _bytes(original / name) for name in ("run.json", "config.yaml")):
            break
    attempt.rename(tmp_path / "run_harmed")
    run_dir = tmp_path / "run_harmed"
    lines = unharmed_lines(run_dir, original, "metrics.jsonl")
    run_whole(files, run_dir, 1, SETTINGS)
    theirs = [row for row in read_metrics(original) if row["step"] in lines or row["step"] > steps[-1]]
    assert read_metrics(run_dir) == theirs, story
    mine, theirs = (load_file(path / "hf" / "model.safetensors") for path in (run_dir, original))
    assert all(mine[name].numpy().tobytes() == tensor.numpy().tobytes() for name, tensor in theirs.items()), story
