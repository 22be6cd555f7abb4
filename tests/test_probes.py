"""Which server is marked out, and which is restarted (`servers/fleet.py`)."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

from support.fake_fleet import (
    FakeServer,
    World,
    answered,
    fleet_of,
    groups,
    nothing_in_flight,
    synced,
    work_of,
)
from support.settings import rollout_config

from dppo_megatron.rollout.servers.dispatch import dispatch
from dppo_megatron.rollout.servers.http import BadAnswer, Refused, Unreachable
from dppo_megatron.rollout.servers.server_process import LaunchedServer, stop_all
from dppo_megatron.rollout.servers.wire import Event, Submit
from dppo_megatron.rollout.sync.channels import on_each


def test_a_server_that_fails_its_probe_is_out() -> None:
    """Nothing breaks, nothing answers: only the probe tells."""
    world = World()
    world.reply = lambda ask: answered(ask) if ask.server == "b" else None
    fleet, work = world.fleet(probe_every_s=5.0), work_of(groups(1, 1))
    world.servers[0].healthy_now = False
    assert sorted(dispatch(fleet, work)) == [0, 1] and world.now < 12
    assert "no answer to its health probe" in fleet.members[0].reason


def test_who_is_back_before_anybody_looks_has_lost_its_requests() -> None:
    """A sync in another thread marks a server out and finds it answering again: nobody else is told, and what was in
    flight there is asked elsewhere."""
    world = World()

    def reply(ask: Submit) -> Event | None:
        if ask.server == "b":
            return answered(ask)
        if not fleet.members[0].outages:
            fleet.mark_out(fleet.members[0], "weight sync failed")
            with fleet.lock:
                fleet.members[0].answered()
        return None

    world.reply = reply
    fleet, work = world.fleet(), work_of(groups(1, 1))
    assert sorted(dispatch(fleet, work)) == [0, 1] and fleet.members[0].state == "stale" and nothing_in_flight(fleet)


def test_a_launched_server_that_answers_nothing_is_started_again() -> None:
    """After a minute, and not again while it starts, as long as it may take for that; nor one that answers in
    between."""
    now, server = [0.0], FakeServer("a")
    fleet = fleet_of([server], rollout_config({}), are_own=True, clock=lambda: now[0])

    def hangs_after(seconds: float) -> bool:
        now[0] += seconds
        found = fleet.hanging()
        fleet.restarted(dict.fromkeys(found, "does not answer"))
        return found == ["a"]

    fleet.mark_out(fleet.members[0], "HTTP 500")
    server.healthy_now = False
    assert [hangs_after(seconds) for seconds in (0, 59, 2, 600)] == [False, False, True, False]
    assert fleet.members[0].is_starting
    server.healthy_now = True
    fleet.revive()
    assert fleet.members[0].state == "stale" and not fleet.members[0].is_starting and not hangs_after(100)
    fleet.mark_out(fleet.members[0], "a broken connection, the last thing before the actor trains")
    assert not hangs_after(600) and fleet.members[0].state == "stale"
    fleet.mark_out(fleet.members[0], "HTTP 500")
    server.healthy_now = False
    assert [hangs_after(seconds) for seconds in (59, 2, 2)] == [False, True, False]
    assert fleet.starting() == ["a"] and fleet.limits.start_timeout_s == 600
    now[0] += 599
    assert fleet.starting() == [] and hangs_after(0), "it will not become ready, and is waited for no more"
    assert fleet.starting() == ["a"] and not hangs_after(600)
    fleet.close()


def test_a_launched_server_out_of_step_is_started_again_at_once() -> None:
    """It answers its probe, and each call of a sync with the answer to another one: it would fail in every pass. One of
    another owner is not this job's to restart, nor one that refuses a call."""

    def fails(error: Exception, *, is_own: bool = True) -> bool:
        fleet = fleet_of([FakeServer("a")], rollout_config({}), are_own=is_own)
        future = Future[None]()
        future.set_exception(error)
        assert on_each(fleet, fleet.members, lambda _: future.result()) == []
        fleet.revive()
        assert fleet.members[0].state == "stale"
        hanging = fleet.hanging()
        fleet.restarted(dict.fromkeys(hanging, "does not answer"))
        assert not fleet.hanging(), "a new process is not judged by the last one's answers"
        fleet.close()
        return hanging == ["a"]

    assert fails(BadAnswer("Expected `object`, got `null`"))
    assert not fails(BadAnswer("Expected `object`, got `null`"), is_own=False)
    assert not fails(Refused(500, "no memory"))


def test_a_hung_process_is_ended_before_it_is_started_again(tmp_path: Path) -> None:
    process = LaunchedServer(["sleep", "600"], {}, tmp_path / "log")
    process.start()
    first = process.process
    process.start()
    assert first is not None and first.poll() is not None and process.is_running
    stop_all([process])


class Unanswered(Executor):
    """Questions wait for the test to answer them."""

    def __init__(self) -> None:
        self.questions: list[Future[Any]] = []

    def submit(self, action: Callable[..., Any], /, *arguments: Any, **more: Any) -> Future[Any]:
        self.questions.append(Future())
        return self.questions[-1]


def test_a_probe_of_the_predecessor_is_no_news() -> None:
    """Another server has come to the address while the first one was being asked."""
    world = World()
    fleet = world.fleet(1)
    fleet._threads = threads = Unanswered()
    fleet.probe_all()
    fleet.mark_left(fleet.members[0], "it has left")
    member = fleet.add(FakeServer("a"))  # type: ignore[arg-type]
    assert member.state == "stale"
    synced(fleet)
    threads.questions[0].set_exception(Unreachable("no answer"))
    fleet.probe_all()
    assert fleet.live == [member]


def test_what_a_probe_says_counts_for_the_server_that_was_asked() -> None:
    """A server answers, is killed and started again: what is read then is the dead one's "I am well". The new one is
    asked before it listens: "connection refused", read after its weight sync, says nothing about it now."""
    world = World()
    fleet = world.fleet(1, probe_every_s=1.0)
    [member] = fleet.members
    fleet._threads = threads = Unanswered()
    fleet.probe_all()
    threads.questions[0].set_result(None)  # read by nobody before it dies
    fleet.mark_out(member, "killed")
    world.now += 60.0
    fleet.probe_all()
    assert member.state == "out", "the answer is its predecessor's"
    threads.questions[1].set_result(None)
    fleet.probe_all()
    assert member.state == "stale", "this one is its own"
    fleet.mark_out(member, "killed again")
    world.now += 60.0
    fleet.probe_all()
    with fleet.lock:
        member.answered()  # as a sync finds it
    synced(fleet)
    threads.questions[2].set_exception(Unreachable("connection refused"))
    fleet.probe_all()
    assert member.state == "live" and member.outages == 2
    world.now += 60.0
    fleet.probe_all()
    threads.questions[-1].set_exception(Unreachable("connection refused"))
    fleet.probe_all()
    assert member.state == "out", "asked as it is now"


def test_a_server_is_not_probed_while_it_takes_weights() -> None:
    """SGLang does not answer while it loads them from disk: out, it would lose that sync, and requests that go on."""
    world = World()
    fleet = world.fleet(2, probe_every_s=1.0)
    fleet.expect("2")
    for server in world.servers:
        server.healthy_now = False

    def states_after_a_minute() -> list[tuple[str, int]]:
        world.now += 60.0
        fleet.probe_all()  # asks
        fleet.probe_all()  # reads the answers
        return [(member.state, member.outages) for member in fleet.members]

    with fleet.taking_weights(fleet.members[:1]):
        assert states_after_a_minute() == [("stale", 0), ("out", 1)]
    assert states_after_a_minute() == [("out", 1), ("out", 1)]
