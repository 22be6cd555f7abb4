"""Grading beside the rollout, in the client's process: its speed, what hanging graders cost, and when it is done."""

from __future__ import annotations

import importlib
import math
import pickle
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from dppo_megatron.config.reward import RewardConfig
from dppo_megatron.rewards.grading import make_grader
from dppo_megatron.rewards.pool import Grader
from dppo_megatron.rollout.servers.dispatch import dispatch
from dppo_megatron.types import GradeTask, Prompt
from plane.canned import COUNT, Canned
from plane.clients import Intake
from plane.common import Bar

_LANES = 4
_GRADER = """
import time

def fast(completion, answer):
    time.sleep(0.001)
    return 1.0

def slow(completion, answer):
    if completion == "hang":
        time.sleep(1e6)
    time.sleep(0.02)
    return 1.0
"""


def run(smoke: bool) -> list[Bar]:
    """The part's bars."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "plane_grader.py").write_text(_GRADER)
        sys.path.insert(0, folder)
        try:
            samples = 256 if smoke else 8192
            bars = [_speed("fast", 0.001, samples), _speed("slow", 0.02, samples // 8)]
            return [*bars, _hangs(64 if smoke else 1024, 0.5 if smoke else 3.0), _beside(smoke)]
        finally:
            sys.path.remove(folder)


def _lanes_take(function: str, texts: list[str], timeout_s: float) -> float:
    """Seconds that grading `texts` takes, in groups of 16, without the start of the processes."""
    reward = RewardConfig(function=f"plane_grader:{function}", processes=_LANES, timeout_s=timeout_s)
    hook = make_grader(reward)
    assert isinstance(hook, Grader)
    groups = [texts[start : start + COUNT] for start in range(0, len(texts), COUNT)]
    while sum(process.begun > 0 for process in hook.processes) < _LANES:
        hook.grade([GradeTask("", "")] * 8 * _LANES)
    began = time.monotonic()
    for graded in [hook.submit([GradeTask(text, "") for text in group]) for group in groups]:
        graded.result()
    seconds = time.monotonic() - began
    hook.close()
    return seconds


def _speed(function: str, named_s: float, samples: int) -> Bar:
    latency_s = _latency_s(function, 200 if named_s < 0.01 else 20)
    seconds = _lanes_take(function, ["x"] * samples, 30.0)
    share = samples / seconds / (_LANES / latency_s)
    print(f"          graders of {1000 * named_s:g} ms: called alone, one takes {1000 * latency_s:.3f} ms")
    name = f"graders of {1000 * named_s:g} ms: share of {_LANES} processes / latency"
    return Bar("grade", name, share, 0.9, at_least=True, is_time=True)


def _latency_s(function: str, calls: int) -> float:
    """Measured seconds of one call: a sleep of 1 ms takes a little longer."""
    grade = getattr(importlib.import_module("plane_grader"), function)
    began = time.monotonic()
    for _ in range(calls):
        grade("x", "1")
    return (time.monotonic() - began) / calls


def _hangs(samples: int, timeout_s: float) -> Bar:
    """1 % of the gradings hang: the seconds that they add, in time limits."""
    texts = ["hang" if index % 100 == 50 else "x" for index in range(samples)]
    hangs = texts.count("hang")
    others_s = _lanes_take("slow", ["x"] * (samples - hangs), timeout_s)
    seconds = _lanes_take("slow", texts, timeout_s) - others_s
    return Bar(
        "grade",
        f"{hangs} hangs over {_LANES} lanes, in time limits",
        seconds / timeout_s,
        math.ceil(hangs / _LANES),
        is_time=True,
    )


def _beside(smoke: bool) -> Bar:
    """Groups arrive over some seconds: how many of them are graded when the last one arrives."""
    groups = 96 if smoke else 256
    reward = RewardConfig(function="plane_grader:fast", processes=_LANES)
    intake = Intake(Canned("sglang", 200, delay_s=0.2), 4, 2, hook=partial(make_grader, reward))
    try:
        work = intake.work(groups, [pickle.dumps(Prompt(0, "", (), "", ""))] * groups)
        graded = 0
        for _ in dispatch(intake.fleet, work):
            graded = len(work.ready)  # the last value counts: all groups have arrived
        return Bar("grade", "graded when the last completion lands", graded / groups, 0.9, at_least=True, is_time=True)
    finally:
        intake.close()
