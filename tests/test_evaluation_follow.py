"""`eval --follow RUN`: a run's checkpoints are evaluated beside it, exactly as `eval RUN --step N` would."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.job import QUICK, job_config, write_job_files
from support.launch import run_ranks

from dppo_megatron.config import Config
from dppo_megatron.evaluation import follow as follow_module
from dppo_megatron.evaluation.eval_samples import UnfinishedSamples, read_samples
from dppo_megatron.job import prepare_job
from dppo_megatron.run import Run
from dppo_megatron.train import train
from dppo_megatron.workbench.cli import main
from dppo_megatron.workbench.commands import evaluate as evaluate_command
from dppo_megatron.workbench.runs.run_record import Follow, read_run

pytestmark = pytest.mark.slow

SETTINGS = ["eval.samples=6", "eval.temperature=1"]


def _train(config: Config) -> None:
    """In the third of four steps it waits until the checkpoint of the second is evaluated."""
    run_dir = Path(config.run_dir)
    with Run(prepare_job(config, 1)) as run:
        record = run.record

        def wait_and_record(step: Any, *more: Any) -> None:
            while step.number == 3 and not (run_dir / "eval/follow/step_000002/results.json").is_file():
                time.sleep(0.05)
            record(step, *more)

        run.record = wait_and_record  # type: ignore[method-assign]
        train(run)


def _follow(run_dir: Path, log: Path, *, killed: bool) -> None:
    """In a fork, from when the run takes its directory; `killed` by itself, after 40 samples."""
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - pytest's is a file of its own
    while not (run_dir / "lock.json").exists():
        time.sleep(0.05)
    if killed:
        add = UnfinishedSamples.add

        def add_and_die(self: UnfinishedSamples, sample: Any) -> None:
            add(self, sample)
            if len(self.samples) == 40:
                os.kill(os.getpid(), signal.SIGKILL)

        UnfinishedSamples.add = add_and_die  # type: ignore[method-assign]
    code = main(["eval", "--follow", str(run_dir), *SETTINGS])
    sys.stdout.flush()
    os._exit(code)


def _two_followers(run_dir: Path, log: Path) -> None:
    fork = multiprocessing.get_context("fork")
    first = fork.Process(target=_follow, args=(run_dir, log), kwargs={"killed": True})
    first.start()
    first.join()
    if first.exitcode != -signal.SIGKILL:
        os._exit(99)
    _follow(run_dir, log, killed=False)


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run of four steps and what the second of its followers printed; the first was killed in the middle."""
    files = write_job_files(tmp_path_factory.mktemp("files"))
    run_dir, log = files / "run", files / "follow.log"
    config = job_config(files, run_dir, **QUICK, checkpoint__every_steps=2)
    follower = multiprocessing.get_context("fork").Process(target=_two_followers, args=(run_dir, log))
    follower.start()
    try:
        run_ranks(_train, 1, config)
        follower.join(240)
        assert follower.exitcode == 0, log.read_text()
    finally:
        follower.kill()
    return run_dir, log.read_text()


def test_each_checkpoint_is_evaluated_beside_the_run(followed: tuple[Path, str], tmp_path: Path) -> None:
    """Killed and called again: the samples are those of an evaluation that was never killed, of steps 2 and 4, and the
    report has their scores where the run has none of its own."""
    run_dir, said = followed
    assert "40 samples are done" in said and said.count("resuming the evaluation") == 1
    assert "the run has ended (finished), 2 of its checkpoints are evaluated" in said
    steps = sorted((run_dir / "eval" / "follow").iterdir())
    assert [path.name for path in steps] == ["step_000002", "step_000004"]
    assert all({path.name for path in one.iterdir()} == {"samples.jsonl", "results.json"} for one in steps)
    assert main(["eval", str(run_dir), "--step", "2", *SETTINGS, "--out", str(tmp_path / "alone")]) == 0
    assert read_samples(steps[0]) == read_samples(tmp_path / "alone") and len(read_samples(steps[0])) == 24 * 6
    assert read_samples(steps[0]) != read_samples(steps[1])
    rows = {row["step"]: row for row in map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())}
    of_two, of_four = (json.loads((path / "results.json").read_text())["metrics"] for path in steps)
    for record in (read_run(run_dir), Follow(run_dir).look()):
        own = rows[0]["eval/heldout/pass@1"], rows[4]["eval/heldout/pass@1"]
        assert record.columns["eval/heldout/pass@1"] == [own[0], None, of_two["eval/heldout/pass@1"], None, own[1]]
        many = of_two["eval/heldout/pass@6"], of_four["eval/heldout/pass@6"]
        assert record.columns["eval/heldout/pass@6"] == [None, None, many[0], None, many[1]]


def test_what_is_gone_is_reported_and_what_differs_refused(
    followed: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint of step 2 is removed while it is read; another stays unreadable.
    Then other settings, another run, no checkpoints."""
    run_dir = Path(shutil.copytree(followed[0], tmp_path / "run", symlinks=True))
    (run_dir / "checkpoints" / "step_000006").mkdir()
    evaluate = follow_module.evaluate

    def evaluate_and_remove(used: Any, job: Any, *more: Any) -> Any:
        if "step_000002" in job.config.model.hf_path:
            shutil.rmtree(job.config.model.hf_path)
        return evaluate(used, job, *more)

    monkeypatch.setattr(follow_module, "evaluate", evaluate_and_remove)
    out = tmp_path / "out"
    assert main(["eval", "--follow", str(run_dir), *SETTINGS, "--out", str(out), "--limit", "3"]) == 0
    said = capsys.readouterr().out
    assert "step 2: no checkpoint any more, so no evaluation" in said and "1 of its checkpoints" in said
    assert "step_000006: cannot be read, or not of this run, so no evaluation" in said
    assert [path.parent.name for path in out.glob("*/results.json")] == ["step_000004"]

    def refused(*words: str) -> str:
        assert main(["eval", "--follow", *words]) == 2
        return capsys.readouterr().err

    assert "of something else (sets.heldout.samples: 6, now 7)" in refused(
        str(run_dir), *SETTINGS[1:], "eval.samples=7"
    )
    assert "limit = 3 (the run: 0)" in refused(str(run_dir), *SETTINGS, "--limit", "3")
    assert "settings: another reward. Its report" in refused(str(run_dir), *SETTINGS, "reward.function=final_answer")
    assert "temperature = 0.5 (the run: 1.0)" in refused(str(run_dir), "eval.temperature=0.5")
    assert "leave out --step" in refused(str(run_dir), "--step", "2")
    assert "holds no config.yaml" in refused(str(tmp_path))
    monkeypatch.setattr(evaluate_command, "_TO_BEGIN_S", 0.0)
    assert "holds no config.yaml" in refused(str(tmp_path / "begins_later"))
    identity = json.loads((run_dir / "run.json").read_text())
    (run_dir / "run.json").write_text(json.dumps(identity | {"run": "0" * 32}))
    assert "of something else (run: " in refused(str(run_dir), *SETTINGS)
    assert read_run(run_dir).columns.keys() == read_run(followed[0]).columns.keys() - {
        key for key in read_run(followed[0]).columns if key.startswith("eval/") and "@" in key and "@1" not in key
    }
    config = (run_dir / "config.yaml").read_text()
    assert "every_steps: 2" in config
    (run_dir / "config.yaml").write_text(config.replace("every_steps: 2", "every_steps: 0"))
    assert "saves no checkpoint before its end (checkpoint.every_steps = 0)" in refused(str(run_dir))
