"""A server's life, arrow by arrow, against a table of what may follow what."""

from __future__ import annotations

import threading
from threading import Condition
from types import SimpleNamespace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from dppo_megatron.rollout.servers.member import Member

ARROWS = {("out", "stale"), ("stale", "live"), ("live", "stale"), ("live", "out"), ("stale", "out")}
"""All that may ever be seen between two moments. What is not here: out -> live."""


class Lives(RuleBasedStateMachine):
    """Any order of calls. The model: what the last sync and the last failure say, kept by hand."""

    @initialize()
    def begin(self) -> None:
        self.now, self.lock = 0.0, Condition()
        self.member = Member(SimpleNamespace(http=SimpleNamespace(url="a")), self.lock, lambda: self.now)  # type: ignore[arg-type]
        self.before = self.member.state
        self.complete_since_out = False
        """A sync of the expected version has been complete, and nothing has gone wrong since."""
        self.has_left = False
        self.in_flight: list[tuple[int, int]] = []

    def _do(self, name: str, *arguments: object) -> object:
        self.before = self.member.state
        with self.lock:
            return getattr(self.member, name)(*arguments)

    @rule()
    def fails(self) -> None:
        outages, was = self.member.outages, self.member.state
        news = self._do("failed", "why")
        assert news == (was != "out") and self.member.outages == outages + (was != "out")
        assert self.member.state == "out" and self.member.reason == "why"
        self.complete_since_out = False

    @rule()
    def answers(self) -> None:
        was = self.member.state
        self._do("answered")
        assert (self.member.state == "out") == (was == "out" and self.has_left), "who has left is not called back"

    @rule(version=st.sampled_from("123"))
    def expects(self, version: str) -> None:
        self._do("set_target", version)
        assert self.member.state != "live"
        self.complete_since_out = False

    @rule(version=st.sampled_from("123"))
    def takes(self, version: str) -> None:
        was, expected = self.member.state, self.member.target_version
        live = self._do("synced", version)
        assert live == (was != "out" and version == expected)
        self.complete_since_out = self.complete_since_out or bool(live)

    @rule()
    def restarts(self) -> None:
        self._do("restarted")
        assert self.member.state == "out" and not self.member.asleep
        self.complete_since_out = False

    @rule()
    def leaves(self) -> None:
        assert self._do("removed", "it has left") == (not self.has_left)
        assert self.member.state == "out" and not self.member.may_be_asked
        self.complete_since_out, self.has_left = False, True

    @rule()
    def may_return(self) -> None:
        self._do("may_return")
        self.has_left = False

    @rule()
    def sleeps(self) -> None:
        self._do("slept")

    @rule(what=st.sampled_from(["weights", "kv_cache"]))
    def wakes(self, what: str) -> None:
        self._do("woke", what)
        assert what not in self.member.asleep

    @rule(tokens=st.integers(1, 99), completions=st.integers(1, 9))
    def begins_a_group(self, tokens: int, completions: int) -> None:
        self._do("took", _group(tokens, completions))
        self.in_flight.append((tokens, completions))

    @rule()
    def ends_a_group(self) -> None:
        if self.in_flight:
            self._do("took", _group(*self.in_flight.pop(0)), -1)

    @rule(seconds=st.floats(0, 100))
    def time_passes(self, seconds: float) -> None:
        self.before = self.member.state
        self.now += seconds

    @invariant()
    def only_arrows_that_exist(self) -> None:
        if hasattr(self, "member"):
            after = self.member.state
            assert after == self.before or (self.before, after) in ARROWS
            assert (after == "live") == self.complete_since_out
            assert (after == "live") == (self.member.reason == "")
            assert self.member.groups == len(self.in_flight)
            assert self.member.outstanding_tokens == sum(tokens for tokens, _ in self.in_flight)
            assert self.member.completions == sum(count for _, count in self.in_flight)


Lives.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_any_order_of_events = Lives.TestCase


def _group(tokens: int, completions: int) -> SimpleNamespace:
    return SimpleNamespace(cost=tokens, count=completions, sockets=1)


def _member(now: list[float]) -> tuple[Member, Condition]:
    lock = Condition()
    return Member(SimpleNamespace(http=SimpleNamespace(url="a")), lock, lambda: now[0]), lock  # type: ignore[arg-type]


def test_failures_in_a_row_space_out_the_questions() -> None:
    """Three are free; then 1, 2, 4, ... 30 s, until one good answer or a new process."""
    now = [0.0]
    member, lock = _member(now)
    waits = []
    with lock:
        for _ in range(10):
            member.failed("why")
            start = now[0]
            while not member.may_be_asked:
                now[0] += 0.5
            waits.append(now[0] - start)
            member.answered()
        assert waits == [0, 0, 0, 1, 2, 4, 8, 16, 30, 30]
        member.failed("why")
        assert not member.may_be_asked
        member.restarted()
        assert member.may_be_asked, "a new process has failed nobody"
        member.answered()
        member.delivered()
        member.failed("why")
        assert member.may_be_asked


def test_a_busy_server_rests_without_going_out() -> None:
    now = [0.0]
    member, lock = _member(now)
    with lock:
        member.set_target("1")
        assert member.synced("1")
        member.back_off(5.0)
        member.back_off(2.0)
        assert not member.is_ready and member.state == "live"
        now[0] = 5.0
        assert member.is_ready


def test_only_the_owner_of_the_lock_changes_a_member() -> None:
    """Also while another thread holds it, and after it was given back."""
    member, lock = _member([0.0])
    seen: list[bool] = []

    def change() -> None:
        try:
            member.failed("why")
            seen.append(True)
        except RuntimeError:
            seen.append(False)

    with lock:
        with lock:
            other = threading.Thread(target=change)
            other.start()
            other.join()
        change()
    change()
    assert seen == [False, True, False]
