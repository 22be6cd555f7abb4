"""Rollouts of several steps at once: which steps begin when, and over fake servers who is asked when, on a clock of the
test's."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fake_fleet import World, answered, broken, groups, nothing_in_flight, work_of

from dppo_megatron.config.schema import Config
from dppo_megatron.rollout.servers.dispatch import Dispatch, dispatch
from dppo_megatron.rollout.servers.wire import Completed, Event, GenerateRequest, Submit
from dppo_megatron.run import Run
from dppo_megatron.steps.loop import Loop
from dppo_megatron.steps.step import Step


def test_a_step_takes_what_its_tokens_take() -> None:
    """In virtual time, over simulated servers that follow the roofline: at most 1.10 times at full load once a step
    streams into the next (docs/engines.md has 12 steps), and more than that without."""
    script = str(Path(__file__).parents[1] / "benchmarks" / "streaming.py")
    command = [sys.executable, script, "--only", "128", "--steps", "5", "--ahead", "0", "1"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    ratios = re.findall(r"K=0 ([\d.]+)  K=1 ([\d.]+)", shown)
    assert len(ratios) == 2, shown
    for without, streaming in ratios:
        assert float(streaming) <= 1.10 < float(without), shown


@pytest.mark.parametrize(
    ("in_flight", "ahead", "began"),
    [
        ("finish", 0, [[1], [2], [3], [4], [5]]),
        ("finish", 1, [[1, 2], [3], [4], [5], []]),
        ("abort", 1, [[1, 2], [3], [4], [5], []]),
        ("continue", 1, [[1, 2], [3], [4], [5], []]),
        ("continue", 3, [[1, 2, 3, 4], [5], [], [], []]),
    ],
)
def test_so_many_steps_are_begun_ahead(in_flight: str, ahead: int, began: list[list[int]]) -> None:
    """Of five steps with a checkpoint after each second one: `async_steps` behind each, none twice and none after the
    last, also over a checkpoint, which keeps what is in flight."""
    config = Config(steps=5)
    config.rollout.async_steps, config.rollout.sync.in_flight = ahead, in_flight  # type: ignore[assignment]
    config.checkpoint.every_steps = 2
    run, loop, starts = object.__new__(Run), object.__new__(Loop), list[list[int]]()
    run._config, run.last_step = config, config.steps
    loop.job, loop._ahead = SimpleNamespace(config=config), deque()  # type: ignore[assignment]
    loop._phases = loop._recorder = None

    def select(step: Step, _: Any) -> None:
        step.selected = [SimpleNamespace(number=step.number)]  # type: ignore[list-item]
        step.reach("selected")

    def start(step: Step, selected: Any) -> None:
        assert [one.number for one in selected] == [step.number]
        starts[-1].append(step.number)
        step.reach("generating")

    loop._select, loop._start = select, start  # type: ignore[method-assign]
    for number in range(1, config.steps + 1):
        starts.append([])
        with loop.step(number) as step:
            loop.begin_ahead(step, run.last_step)
            if step.reached == "selected":  # as `generate` begins what was not begun ahead
                loop._start(step, step.selected)
    assert starts == began


@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=6), min_size=1, max_size=4), st.integers(1, 3))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_no_straggler_of_a_step_holds_a_free_place(lengths: list[list[int]], places: int) -> None:
    """Several steps at once on two servers: each is asked in its turn, a place is free only when nothing waits, the
    whole takes no longer than places that are always taken would, and each step gets its own answers, all that it drew:
    what is trained has the lengths of what was sampled."""
    world, began, unused = World(), {}, []

    def reply(ask: Submit) -> Event | None:
        began.setdefault(ask.ticket, world.now)
        waiting = any(work.pending for work in works)
        free = sum(member.completions < places for member in fleet.members)
        unused.append(waiting and free and len(world.open) < 2 * places and world.now > began[ask.ticket])
        step, index, _ = map(int, ask.group.request_id.split("-"))
        length = lengths[step][index]
        return answered(ask, length=length) if world.now - began[ask.ticket] >= length else None

    world.reply = reply
    fleet = world.fleet(max_concurrent_sequences=places)
    works = []
    for step, each in enumerate(lengths):
        requests = [GenerateRequest(f"{step}-{index}-0", (1,), 1, 0, max_tokens=9) for index in range(len(each))]
        works.append(work_of(requests, order=step, number=step))
    given = works[::-1]  # whichever was begun first, the earliest step comes first
    landed = list(Dispatch(fleet, given).run())
    assert len(landed) == sum(map(len, lengths)) and nothing_in_flight(fleet)
    assert [ask.rollout for ask in world.asked] == sorted(ask.rollout for ask in world.asked)
    assert not any(unused)
    total, longest = sum(map(sum, lengths)), max(map(max, lengths))
    assert world.now <= (total / (2 * places) + longest) * 1.2 + 2
    for each, work in zip(lengths, works, strict=True):
        assert [work.done[index].lengths for index in range(len(each))] == [[length] for length in each]


def test_a_rollout_that_is_begun_meanwhile_is_taken_up() -> None:
    """Behind the one that runs; one that is given up ends alone."""
    world = World(reply=lambda ask: answered(ask) if ask.rollout != 2 else None)
    fleet, works = world.fleet(), [work_of(groups(1, 1), order=1, number=1)]
    running = Dispatch(fleet, works).run()
    next(running)
    works += [work_of(groups(1, 1), order=number, number=number) for number in (2, 3)]
    next(running)
    next(running)
    works[1].given_up = True
    assert len(list(running)) == 1 and len(world.ended) == 2 and nothing_in_flight(fleet)
    assert [work.finished.done() for work in works] == [True, False, True]


class _Looked(dict[int, float]):
    """Counts how often a request is looked up."""

    looks = 0

    def get(self, *arguments: Any) -> Any:
        self.looks += 1
        return super().get(*arguments)


def test_no_request_is_looked_at_before_one_can_be_late() -> None:
    """Thousands wait for minutes, and whether one is late is asked five times a second: of each once one can be."""
    world, asked = World(), _Looked()
    world.reply = lambda ask: answered(ask) if world.now > 90 else None
    work = work_of(groups(*[1] * 50), may_lose=True, first_asked=asked)
    list(Dispatch(world.fleet(request_timeout_s=100.0), [work]).run())
    assert world.now > 90 and asked.looks == 0 and not work.lost
    late = work_of(groups(*[1] * 50), may_lose=True, first_asked=_Looked())
    world.reply = lambda ask: answered(ask) if ask.ticket in world.ended else None
    list(Dispatch(world.fleet(request_timeout_s=100.0), [late]).run())
    assert len(late.ended) == 50


def test_what_was_aborted_is_asked_for_again_and_nothing_else() -> None:
    """One completion in twenty, of groups of 8: a twentieth again, and not the third that are in a group with one."""
    world, count = World(), 400
    lost = {(group, place) for group in range(count) for place in range(8) if (group * 8 + place) % 20 == 7}

    def reply(ask: Submit) -> Event:
        _, group, first = map(int, ask.group.request_id.split("-"))
        again = ask.group.count == 1
        gone = [not again and (group, first + place) in lost for place in range(ask.group.count)]
        reasons = ["abort" if one else "stop" for one in gone]
        return Completed(ask.ticket, [2] * len(gone), reasons, [(1, 2 * len(gone))])

    world.reply = reply
    work = work_of(groups(*[8] * count), may_split=True)
    list(Dispatch(world.fleet(), [work]).run())
    asked = sum(ask.group.count for ask in world.asked)
    assert asked == 8 * count + len(lost) <= 1.06 * 8 * count and work.is_complete and not work.missing


@pytest.mark.parametrize(
    ("spans", "anew"),
    [([(1, 10)], set()), ([(1, 5), (2, 5)], {0}), ([(2, 10)], {0}), ([(0, 5), (1, 5)], set()), ([(0, 5), (2, 5)], {0})],
)
def test_a_second_attempt_that_meets_a_sync_draws_another(spans: list[tuple[int, int]], anew: set[int]) -> None:
    """Lost and asked for again under the same weights, it is sampled on through a sync, or has waited at its server
    until after it. One that was never lost is the one that was drawn, whatever weights it has come through; and first
    tokens of older weights, which a checkpoint has kept, are those of both attempts."""
    world = World()

    def reply(ask: Submit) -> Event:
        lost = ask.server == "a"
        return broken(ask) if lost else Completed(ask.ticket, [10], ["stop"], spans)

    world.reply = reply
    work = work_of(groups(1, 1))
    assert sorted(dispatch(world.fleet(), work)) == [0, 1]
    assert [(ask.index, ask.server) for ask in world.asked] == [(0, "a"), (1, "b"), (0, "b")]
    assert work.resent == anew and work.retries == 1
