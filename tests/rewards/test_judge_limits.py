"""Limits on what a judge is asked: gradings in a minute, failures in a row. By clocks of their own."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_pool import outcome, pool_of, tasks_of

from dppo_megatron.rewards.work import LOOK_S, Pace


def most_in_a_minute(begun: Sequence[tuple[float, int]]) -> int:
    """Of (time, how many), in any half-open minute, to a microsecond; the fullest one begins with one of them."""
    return max(sum(count for at, count in begun if start <= at < start + 60 - 1e-6) for start, _ in begun)


class Noted(Pace):
    """Of a clock that runs five seconds each time it is read."""

    def __init__(self, per_minute: float) -> None:
        self.now, self.begun = 0.0, list[tuple[float, int]]()
        super().__init__(per_minute, self._tick)

    def _tick(self) -> float:
        self.now += 5.0
        return self.now

    def take(self, count: int) -> None:
        self.begun.append((self.now, count))
        super().take(count)


@given(
    per_minute=st.one_of(st.floats(0.1, 5.0), st.integers(1, 20_000)),
    moves=st.lists(st.tuples(st.floats(0.0, 90.0), st.integers(0, 20_000)), min_size=1, max_size=60),
)
def test_no_minute_has_more_than_allowed(per_minute: float, moves: list[tuple[float, int]]) -> None:
    """However demand comes. With demand that never ends 95 % of it: 59/60 by the burst, and up to 20 ms in 500 that
    lanes look late."""
    now = 0.0
    pace, begun = Pace(per_minute, lambda: now), list[tuple[float, int]]()
    for wait_s, wanted in moves:
        now += wait_s
        begun.append((now, min(wanted, pace.free())))
        pace.take(begun[-1][1])
        assert pace.free() >= 0
    assert most_in_a_minute(begun) <= max(1, math.ceil(per_minute))
    now, done = now + 1000, 0
    for _ in range(3000):
        done += (count := pace.free())
        pace.take(count)
        now += LOOK_S
    assert done >= max(1, int(per_minute * 0.95))


@pytest.mark.parametrize("name", ["coroutine", "obey", "batched"])
def test_gradings_begin_at_a_pace(name: str) -> None:
    """Twelve in calls of four, three a minute, by a clock of their own: over all processes, whatever kind of grader."""
    pace = Noted(3)
    with pool_of(name, pace=pace) as pool:
        futures = [pool.submit(tasks_of(["value 2"] * 4)) for _ in range(3)]
        assert [grade.reward for one in futures for grade in one.result()] == [2.0] * 12
    assert sum(count for _, count in pace.begun) == 12 and most_in_a_minute(pace.begun) <= 3 < 12
    assert pace.now >= 11 * 20


@pytest.mark.parametrize("name", ["coroutine", "obey"])
def test_a_judge_that_is_down_is_not_asked_on(name: str) -> None:
    """After five failures in a row what waits has failed too; later ones are tried, and a success begins anew."""
    with pool_of(name, processes=1, max_concurrent=4, max_failures_in_a_row=5) as pool:
        said = [str(outcome(grade)) for grade in pool.grade(tasks_of(["raise"] * 200))]
        tried = [text for text in said if text.startswith("raised ZeroDivisionError")]
        assert 5 <= len(tried) < 100 and len({*said} - {*tried}) == 1
        assert "was not tried after" in said[-1] and "failures in a row (reward.max_failures_in_a_row)" in said[-1]
        assert [outcome(one) for one in pool.grade(tasks_of(["value 2"]))] == [2.0]
        mixed = pool.grade(tasks_of(["raise", "raise", "raise", "raise", "value 2"] * 4))
        assert [outcome(one) for one in mixed[4::5]] == [2.0] * 4
