"""The tests' own tools, where a fault of theirs once looked like one of the trainer."""

from __future__ import annotations

import ast
import gc
import os
import random
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from megatron.core import parallel_state
from night.__main__ import summary
from night.memory import fitted
from night.trials import Ended, expected, never_tried
from support.cases import PROPERTY
from support.damage import DAMAGES, harm, name_of
from support.executed import Executed
from support.killing import PHASES, Kill, arm
from support.launch import run_ranks

from dppo_megatron.actor.actor import Actor
from dppo_megatron.rollout.server_engine import ServerEngine
from dppo_megatron.run import Run
from dppo_megatron.steps.loop import Loop


class _OwnedByParent:
    """Its destructor waits for a thread of the process that made it, as a process group's does."""

    def __init__(self) -> None:
        self.owner = os.getpid()

    def __del__(self) -> None:
        if os.getpid() != self.owner:
            threading.Event().wait()


def test_a_rank_leaves_the_garbage_of_earlier_tests_alone() -> None:
    """Collected in a forked rank, it would wait for a thread that the fork left behind."""
    gc.disable()
    try:
        garbage: Any = _OwnedByParent()
        garbage.cycle = garbage
        del garbage
        assert run_ranks(gc.collect, 1, timeout_s=60) is not None
    finally:
        gc.enable()


def test_a_rank_ends_no_group_that_an_earlier_job_has_left_in_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron forgets some groups when it destroys all; the next job in a rank puts its own in their place."""
    name = "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_GLOO"
    monkeypatch.setattr(parallel_state, name, _OwnedByParent())
    assert run_ranks(lambda: setattr(parallel_state, name, None), 1, timeout_s=60) == [None]


def test_gpu_tests_build_the_groups_once() -> None:
    """Megatron refuses to build its groups twice in a process, and these tests cannot run where they are written: only
    a fixture of the whole module may."""
    tree = ast.parse((Path(__file__).parent / "test_gpu.py").read_text(encoding="utf-8"))
    builders = [
        function
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        and any(isinstance(node, ast.Call) and ast.unparse(node.func) == "build_layout" for node in ast.walk(function))
    ]
    assert [function.name for function in builders] == ["layout"]
    assert [ast.unparse(one) for one in builders[0].decorator_list] == ["pytest.fixture(scope='module')"]


def _report(nodeid: str, skipped: str = "", when: str = "call") -> Any:
    longrepr = ("a.py", 1, f"Skipped: {skipped}") if skipped else None
    return SimpleNamespace(nodeid=nodeid, when=when, skipped=bool(skipped), longrepr=longrepr, user_properties=[])


def test_a_run_that_executed_nothing_is_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases by generator, skips by reason. Red: an unknown reason, an engine that should be there, only skips."""
    monkeypatch.delenv("DPPO_VLLM_PYTHON", raising=False)
    gone = "no vllm: /x is not there"
    ran = [_report("a.py::f[1]"), _report("a.py::f[2]"), _report("a.py::g")]
    skipped = [_report("a.py::h[1]", gone, "setup"), _report("a.py::i", "needs a CUDA device; it has none")]
    whole = Executed.of(ran + skipped)
    assert (whole.generators, whole.tests, whole.faults()) == ({"a.py::f": 2, "a.py::h": 0}, 3, [])
    assert set(whole.skips.values()) == {1} and len(whole.skips) == 2
    assert "nothing has run" in str(Executed.of(skipped).faults())
    assert "could not import 'torch'" in str(
        Executed.of([*ran, _report("a.py::j", "could not import 'torch'")]).faults()
    )
    monkeypatch.setenv("DPPO_VLLM_PYTHON", "/x")
    assert gone in str(whole.faults())


def test_a_case_that_no_test_has_is_red() -> None:
    """A mistyped DPPO_FUZZ_SEED skips every generator, beside tests that have none and pass."""
    reports = [_report("a.py::f"), _report("a.py::h", "DPPO_FUZZ_SEED='fil 17' is no case of 'file'")]
    assert "no test has a case" in str(Executed.of(reports).faults())
    reports.append(_report("a.py::g"))
    reports[-1].user_properties = [(PROPERTY, "1 of 1 cases 'fil 17' and on")]
    assert Executed.of(reports).faults() == []


@pytest.mark.parametrize(
    ("how", "codes", "died", "log"),
    [
        ("done", {0}, "", "Traceback"),
        ("killed", set(), "rank 1 of 2 died without a message: exit code -9 (SIGKILL)", ""),
        ("named", set(), "exit code 1", "watchdog: rank 1 (host x, process 3) has given no sign of life for 21 s"),
        ("said", {2}, "", "step 1\nerror: runs/x cannot be written: Read-only file system"),
        ("failed", {2}, "", "error: x\nTraceback (most recent call last):"),
        ("failed", set(), "rank 0 of 1 raised:", "error: x"),
        ("hangs", set(), "rank 0 of 1 did not finish within 1200 s", "stopped: x"),
    ],
)
def test_the_night_tells_ends_apart(how: str, codes: set[int], died: str, log: str) -> None:
    """An end with a sentence has an exit code of 2 or 3, a line that says why, and no traceback."""
    ended = Ended(codes, died, log, True)
    assert ended.how == how


@pytest.mark.parametrize("phase", [phase for phase in PHASES if phase != "saving"])  # patches a class for good
def test_a_run_with_servers_can_be_struck_in_every_phase(phase: str) -> None:
    """The suite kills runs of the embedded engine only; the night's first grading of a servers' run was no method."""
    run: Any = object.__new__(Run)
    run.loop = object.__new__(Loop)
    run.loop._engine, run.loop.actor = object.__new__(ServerEngine), object.__new__(Actor)
    arm(run, Kill(phase, 1), lambda: None)


def test_a_night_names_what_it_did_not_try() -> None:
    said = summary(
        Counter({"kill": 3, "damage": 1}), ["--seed 1 --trial 2: x"], {"read-only": "no"}, ["kill", "hang"], ""
    )
    assert "hang                           0   NOT TRIED" in said and "not possible here: no" in said
    assert said.endswith("3 blows have struck, 1 failures") and "FAILED --seed 1 --trial 2: x" in said


def test_a_night_that_was_long_enough_has_tried_every_damage_and_layout() -> None:
    """Each that is left out of a long night makes it red, alone, and so does all of one sort; a short night may have
    missed them."""
    kinds = ["kill", "hang"]
    plenty = Counter(dict.fromkeys([*kinds, *expected(Counter(), kinds)], 50) | {"kill": 2000})
    assert len(plenty) == 2 + 3 + 5 + 4 + len(set(DAMAGES)) - 3 and never_tried(plenty, kinds) == []
    for name in plenty:
        night = plenty - Counter({name: plenty[name]})
        assert never_tried(night, kinds) == [name]
        said = summary(night, [], {}, kinds, "").splitlines()
        assert f"{name:<30} 0   NOT TRIED" in said and f"enough to try each of these, and has not: {name}" in said[-2]
    assert never_tried(Counter({"kill": 500, "hang": 1}), kinds) == [
        "damage",
        "another layout",
        "another layout after damage",
    ]
    assert never_tried(Counter({"kill": 40, "hang": 1, "damage: flip": 20, "starts at tp1": 20}), kinds) == []


def test_a_damage_that_changes_nothing_was_not_tried(tmp_path: Path) -> None:
    """Without checkpoints most have nothing to harm."""
    tried, told = Counter[str](), list[str]()
    for seed in range(50):
        (run_dir := tmp_path / str(seed)).mkdir()
        told += harm(run_dir, random.Random(seed), tried)
    assert 0 < tried.total() < len(told) / 2 and not tried.keys() & {"swap checkpoints", "swap files", "samples"}
    assert tried.keys() <= {name_of(one) for one in DAMAGES}


def test_growth_of_memory_is_found_within_its_error() -> None:
    """Half a megabyte an hour under noise of ten that lasts for minutes: found in eight hours to three errors, which
    are less than the megabyte that is allowed."""
    rng, hours = np.random.default_rng(0), np.arange(2880) / 360
    noise = np.repeat(rng.normal(0, 10, 288), 10)
    slope, error = fitted(hours, 300 + 0.5 * hours + noise)
    assert abs(slope - 0.5) < 3 * error < 1
