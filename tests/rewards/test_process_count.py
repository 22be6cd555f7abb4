"""How many processes grade where the setting leaves it to the machine, and that somebody is told."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from support.job import QUICK, job_config

from dppo_megatron.config.reward import RewardConfig, RewardFunctionConfig, SetRewardConfig
from dppo_megatron.job import prepare_job
from dppo_megatron.rewards.grading import Graders, make_grader
from dppo_megatron.rollout import server_engine
from dppo_megatron.steps.build import make_engine
from dppo_megatron.types import GradeTask

OWN = "odd_graders:obey"


def _on(monkeypatch: pytest.MonkeyPatch, cores: int, ranks: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setenv("WORLD_SIZE", str(4 * ranks))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))


@pytest.mark.parametrize(
    ("cores", "ranks", "settings", "expected"),
    [
        (64, 8, {"function": OWN}, 8),
        (10, 4, {"function": OWN}, 2),
        (4, 8, {"function": OWN}, 1),
        (256, 2, {"function": OWN}, 16),
        (256, 2, {"function": OWN, "processes": 40}, 40),
        (256, 2, {"function": OWN, "processes": 1}, 1),
        (64, 8, {"function": "math"}, 1),
        (64, 8, {"function": "math", "processes": 3}, 3),
        (64, 8, {"functions": {"a": RewardFunctionConfig("math"), "b": RewardFunctionConfig("final_answer")}}, 1),
        (64, 8, {"functions": {"a": RewardFunctionConfig("math"), "b": RewardFunctionConfig(OWN)}}, 8),
    ],
)
def test_a_graders_processes(
    cores: int, ranks: int, settings: dict[str, Any], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank's share of the cores for a grader of the user's own, within a bound; what is set is kept."""
    _on(monkeypatch, cores, ranks)
    assert make_grader(RewardConfig(**settings)).num_processes == expected


def test_a_set_may_follow_the_cores_where_the_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    _on(monkeypatch, 64, 8)
    general = RewardConfig(function=OWN, processes=2)
    assert make_grader(SetRewardConfig(function="odd_graders:length").over(general)).num_processes == 2
    assert make_grader(SetRewardConfig(processes=0).over(general)).num_processes == 8


def test_all_of_them_work_on_the_first_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three samples wait for what a fourth process alone can do, though one started first to say what it is."""
    _on(monkeypatch, 4, 1)
    path, reward = tmp_path / "signed", RewardConfig(function=OWN, timeout_s=60.0)
    with closing(make_grader(reward)) as grader:
        texts = [f"until_signed 3 {path}"] * 3 + [f"sign {path}"] * 3
        grades = grader.grade([GradeTask(text, "1") for text in texts])
        assert [grade.reward for grade in grades[:3]] == [1.0] * 3 and len(grader.processes) == 4


def test_an_asynchronous_one_has_a_single_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps `max_concurrent` open itself: eight would ask a judge for eight times as many at a time. If eight are
    asked for, there are."""
    _on(monkeypatch, 8, 1)
    reward = RewardConfig(function="odd_graders:coroutine", timeout_s=60.0)
    with closing(Graders({"reward": reward})) as graders:
        grades = graders.grade([GradeTask("meet 20", "1")] * 20)
        assert [grade.reward for grade in grades] == [1.0] * 20
        assert graders["reward"].num_processes == len(graders["reward"].processes) == 1
        [line] = graders.process_notes()
        assert line.endswith("grader processes per rank: 1 (reward.processes = 0; it is asynchronous)")
    assert make_grader(RewardConfig(function="odd_graders:coroutine", processes=8)).num_processes == 8


def test_of_one_that_cannot_run_twice_the_remedy_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It has a port, say. One process grades all; until now the default was one."""
    lines = ["import fcntl, time", f"held = open({str(tmp_path / 'held')!r}, 'w')"]
    lines += ["fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)", "def grade(a, b): return time.sleep(0.05) or 1"]
    (tmp_path / "only_one.py").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    _on(monkeypatch, 2, 1)
    with closing(make_grader(RewardConfig(function="only_one:grade", timeout_s=60.0))) as grader:
        assert [one.reward for one in grader.grade([GradeTask("x", "1")] * 100)] == [1.0] * 100
    assert "it has started before; reward.processes=1 if only one can run at a time" in caplog.text


def test_one_that_takes_lists_gets_what_waits_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """As documented: it may ask a server once for all of them, or hold a reward model, of which eight are too many."""
    _on(monkeypatch, 8, 1)
    reward = RewardConfig(function="odd_graders:call_size", timeout_s=60.0)
    with closing(Graders({"reward": reward})) as graders:
        for count in (5, 100):
            assert [one.reward for one in graders.grade([GradeTask("x", "1")] * count)] == [count] * count
        assert len(graders["reward"].processes) == 1
        assert graders.process_notes()[0].endswith("per rank: 1 (reward.processes = 0; it takes lists)")


@pytest.mark.parametrize(("function", "of_client"), [("odd_graders:obey", 20), ("odd_graders:coroutine", 4)])
def test_what_a_job_says_and_gives_to_its_client(
    function: str, of_client: int, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start logs the number, as a dry run does; the client of a node has that of all its ranks."""
    _on(monkeypatch, 20, 4)
    served = {"rollout__engine": "vllm", "rollout__servers__endpoints": "[http://127.0.0.1:1]"}
    job = prepare_job(job_config(files, tmp_path, **QUICK | served | {"reward__function": function}), 16)
    [line] = [line for line in job.notes if "grader processes" in line]
    why = "20 cores here, ranks: 4" if of_client == 20 else "it is asynchronous"
    count = f"grader processes per rank: {of_client // 4} (reward.processes = 0; {why})"
    assert line == f"reward.function = '{function}': {count}"

    class Serving:
        holders, description = 16, "servers"

        def __init__(self, *_: Any, client_hook: Any) -> None:
            self.hook = client_hook(4)

    monkeypatch.setattr(server_engine, "ServerEngine", Serving)
    engine: Any = make_engine(job, torch.float32, torch.device("cpu"))
    assert engine.hook()["reward"].num_processes == of_client
    built_in = prepare_job(job_config(files, tmp_path, **QUICK | served | {"reward__function": "final_answer"}), 16)
    assert not [line for line in built_in.notes if "grader processes" in line]
