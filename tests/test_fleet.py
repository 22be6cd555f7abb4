"""Who is asked, what a failure means and when waiting ends: the fleet over fake servers (`support/fake_fleet.py`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event as Flag
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fake_fleet import (
    FakeServer,
    World,
    answered,
    broken,
    groups,
    nothing_in_flight,
    synced,
    work_of,
)
from support.logged import logged_lines

from dppo_megatron.rollout.server_engine import _Background
from dppo_megatron.rollout.servers.dialects import VLLMDialect
from dppo_megatron.rollout.servers.dispatch import NeedsWeights, dispatch
from dppo_megatron.rollout.servers.rollout_work import Work
from dppo_megatron.rollout.servers.wire import AttemptFailed, Completed, Event, Graded, Submit
from dppo_megatron.rollout.sync.channels import in_thread
from dppo_megatron.spans import Spans, recorded_by
from dppo_megatron.types import RunAborted


def test_equal_groups_are_shared_evenly() -> None:
    """Eight groups of one size on two servers: four each, alternately."""
    world = World()
    fleet = world.fleet()
    assert sorted(dispatch(fleet, work_of(groups(*[3] * 8)))) == list(range(8))
    assert [ask.server for ask in world.asked] == ["a", "b"] * 4 and nothing_in_flight(fleet)


def test_requests_are_on_timelines_by_server() -> None:
    """From the asking to the answer, also one that failed, then the grading; nothing while nobody records. All of it
    from a thread, as in a run: it has not the context in which the fleet was built."""
    world, recorder = World(), Spans(clock=lambda: world.now)
    with recorded_by(recorder), ThreadPoolExecutor(1) as rollout:
        fleet = world.fleet()
        rollout.submit(lambda: list(dispatch(fleet, work_of(groups(1))))).result()
        assert recorder.drain() == []
        recorder.on = True
        began = world.now
        world.reply = lambda ask: None if world.now < began + 3 else answered(ask)
        rollout.submit(lambda: list(dispatch(fleet, work_of(groups(1, 1))))).result()
    spans = recorder.drain()
    requests = [one for one in spans if one.track != "grading"]
    assert {(one.track, one.name) for one in requests} == {("requests a", "1-0-0"), ("requests b", "1-1-0")}
    assert all(one.start_s == began and one.end_s >= began + 3 for one in requests)
    assert sorted(one.name for one in spans if one.track == "grading") == ["1-0-0", "1-1-0"]
    assert len({one.ticket for one in requests}) == 2


def test_the_fewest_outstanding_tokens_decide() -> None:
    """A long group weighs as much as all short ones behind it."""
    world = World()
    fleet = world.fleet()
    list(dispatch(fleet, work_of([*groups(8, tokens=100), *groups(1, 1, 1, 1)])))
    assert [ask.server for ask in world.asked] == ["a", "b", "b", "b", "b"]


@pytest.mark.parametrize("counts", [[1] * 40, [8] * 7, [1, 8, 3, 8, 8, 2, 1, 1, 8], [20, 20]])
def test_a_server_is_given_as_many_completions_as_it_runs(counts: Sequence[int]) -> None:
    """Groups of one fill it as groups of eight do, never over its limit; a group beyond the limit goes alone."""
    limit, world, most = 16, World(), [0]

    def reply(ask: Submit) -> Event | None:
        in_flight = sum(one.group.count for one in world.open.values())
        most[0] = max(most[0], in_flight)
        return answered(ask)

    world.reply = reply
    fleet = world.fleet(1, max_concurrent_sequences=limit)
    assert sorted(dispatch(fleet, work_of(groups(*counts)))) == list(range(len(counts)))
    first = 0
    for count in counts:  # in order, as many as fit
        if first and first + count > limit:
            break
        first += count
    assert most[0] <= max(limit, *counts) and most[0] >= first
    assert nothing_in_flight(fleet)


def test_no_more_groups_than_sockets() -> None:
    world = World(capacity=3)
    seen: list[int] = []
    world.reply = lambda ask: (seen.append(len(world.open)), answered(ask))[1]
    fleet = world.fleet(1)
    list(dispatch(fleet, work_of(groups(*[1] * 20))))
    assert max(seen) == 3


def test_a_broken_connection_sends_all_of_a_servers_groups_elsewhere() -> None:
    """One failure marks it out; its other groups are cut and asked again under the same ids, and what they had on the
    way is not counted twice."""
    world = World()
    world.reply = lambda ask: broken(ask) if ask.server == "a" else answered(ask)
    fleet, work = world.fleet(), work_of(groups(*[2] * 6))
    landed = list(dispatch(fleet, work))
    assert sorted(landed) == list(range(6)) and len(set(landed)) == 6
    assert all(world.asked[ticket - 1].server == "b" for ticket in work.landed)
    assert fleet.members[0].state != "live" and fleet.members[0].outages == 1
    assert [len(said) for said in work.failures.values()] == [1]
    assert work.retries == 3 and world.said[0] == "rollout: a is out: connection reset"
    assert nothing_in_flight(fleet)


@pytest.mark.parametrize("seeded", [True, False])
@pytest.mark.parametrize(("kind", "status"), [("unreachable", 0), ("refused", 500), ("refused", 503), ("refused", 404)])
def test_groups_that_are_sampled_anew_are_counted(seeded: bool, kind: Any, status: int) -> None:
    """All that ran on the server that failed, once each; none that it turned away, and none with a seed."""
    world = World()
    fleet, work = world.fleet(), work_of(groups(*[2] * 6))
    for server in world.servers:
        server.dialect = VLLMDialect(seeded=seeded)

    def reply(ask: Submit) -> Event | None:
        if ask.server == "a" and ask.index == 0:
            return AttemptFailed(ask.ticket, kind, "no", status)
        return answered(ask) if ask.server == "b" or status == 503 else None

    world.reply = reply
    assert sorted(dispatch(fleet, work)) == list(range(6))
    lost: dict[int, set[int]] = {503: set(), 404: {2, 4}}
    assert work.resent == (set() if seeded else lost.get(status, {0, 2, 4})) and work.retries >= 1


@pytest.mark.parametrize("version", ["1", "2"])
@pytest.mark.parametrize("at_once", [True, False])
def test_a_seed_draws_the_same_from_the_same_weights_only(version: str, at_once: bool) -> None:
    """Server a goes out with two of the groups, after a sync that all have run through; or both go out, and are back
    with the next sync. What is sampled again is counted if the weights are other ones by then."""
    world = World(reply=lambda ask: answered(ask) if len(world.asked) > 4 else None)
    fleet, work = world.fleet(), work_of(groups(1, 1, 1, 1))
    events = world.events

    def then_a_dies(timeout_s: float) -> list[Event]:
        if len(world.asked) == 4:
            for member in fleet.members if not at_once else ():
                fleet.mark_out(member, "killed")
            synced(fleet, version)
            if at_once:
                fleet.mark_out(fleet.members[0], "killed")
        return events(timeout_s)

    world.events = then_a_dies  # type: ignore[method-assign]
    assert sorted(dispatch(fleet, work)) == [0, 1, 2, 3]
    lost = {ask.index for ask in world.asked[:4] if not at_once or ask.server == "a"}
    assert work.resent == (lost if version == "2" else set()) and work.retries == len(lost) and lost


def test_who_comes_back_is_asked_only_after_a_sync() -> None:
    """Its probe succeeds at once, and still it gets nothing; alone, the fleet asks for weights."""
    world, failed = World(), []

    def reply(ask: Submit) -> Event | None:
        if not failed:
            failed.append(ask)
            return broken(ask)
        return answered(ask)

    world.reply = reply
    fleet, work = world.fleet(1), work_of(groups(1, 1, 1))
    with pytest.raises(NeedsWeights):
        list(dispatch(fleet, work))
    assert fleet.members[0].state == "out" and len(world.open) == 0
    asked = len(world.asked)
    synced(fleet)
    assert sorted(work.done) == [1, 2], "what had come before stays"
    assert list(dispatch(fleet, work)) == [0] and len(world.asked) == asked + 1


def test_a_request_that_always_fails_is_named_after_four_answers() -> None:
    """However many servers there are, and although each comes back and is synced again."""
    world = World()
    world.reply = lambda ask: broken(ask, f"HTTP 500 from {ask.server}") if ask.index == 1 else answered(ask)

    def run(work: Work) -> None:
        fleet = world.fleet(2)
        while not work.is_complete:
            try:
                list(dispatch(fleet, work))
            except NeedsWeights:
                synced(fleet)

    with pytest.raises(RunAborted, match=r"request 1-1-0 has failed 4 times: b: HTTP 500") as stop:
        run(work_of(groups(1, 1, 1), may_lose=False))
    assert str(stop.value).count("HTTP 500") == 4
    assert sum(ask.index == 1 for ask in world.asked) <= 8
    run(work := work_of(groups(1, 1, 1)))
    assert sorted(work.done) == [0, 2] and work.lost[1].count("HTTP 500") == 4, "it costs itself"


def test_cut_attempts_are_no_failures_of_their_requests() -> None:
    """A server that dies ten times takes all groups with it each time; only the one that was answered badly counts."""
    world, deaths = World(), []

    def reply(ask: Submit) -> Event | None:
        if ask.server == "a" and ask.index == len(deaths) % 8 and len(deaths) < 10:
            deaths.append(ask.index)
            return broken(ask)
        return answered(ask) if len(deaths) >= 10 else None

    world.reply = reply
    fleet, work = world.fleet(1), work_of(groups(*[1] * 8))
    while True:
        try:
            list(dispatch(fleet, work))
            break
        except NeedsWeights:
            synced(fleet)
    assert len(work.done) == 8 and max(len(said) for said in work.failures.values()) == 2


def test_a_request_has_an_age() -> None:
    """Counted from its first try: three servers that each hold it for 4 s, and a limit of 10."""
    world, since = World(), {}

    def reply(ask: Submit) -> Event | None:
        if ask.index != 0:
            return answered(ask)
        held = world.now - since.setdefault(ask.ticket, world.now)
        return broken(ask) if held > 4 else None

    world.reply = reply
    fleet = world.fleet(3, request_timeout_s=10.0, probe_every_s=1000.0)
    with pytest.raises(RunAborted, match=r"request_timeout_s = 10 s since their first try: 1-0-0") as stop:
        list(dispatch(fleet, work_of(groups(1, 1), may_lose=False)))
    assert 10 < world.now < 11 and "on " in str(stop.value)


@pytest.mark.parametrize("answers", [True, False])
def test_a_late_group_costs_what_is_not_done(answers: bool) -> None:
    """It is ended at its server: what has finished lands. One that brings nothing then is missing whole, soon."""
    world, began = World(), {}

    def reply(ask: Submit) -> Event | None:
        began.setdefault(ask.ticket, world.now)
        if ask.index != 0:
            return answered(ask)
        if answers and ask.ticket in world.ended:
            return Completed(ask.ticket, [2, 0, 3], ["stop", "abort", "abort"], [(1, 5)])
        return broken(ask) if world.now > began[ask.ticket] + ask.timeout_s else None

    world.reply = reply
    fleet, work = world.fleet(2, request_timeout_s=10.0, probe_every_s=1000.0), work_of(groups(3, 3))
    said = logged_lines()
    assert sorted(dispatch(fleet, work)) == [0, 1][not answers :]
    assert any("1 requests have waited longer than 10 s and are ended: 1-0-0 on " in line for line in said)
    assert work.is_complete and bool(work.lost) == (not answers) and work.retries == 0
    assert world.now < (11 if answers else 42) and nothing_in_flight(fleet)


@pytest.mark.parametrize("others", [True, False])
def test_an_end_that_does_not_get_through_costs_the_group_alone(others: bool) -> None:
    """Its server answers others after it was told: it stays, with what runs there. One that answers nobody hangs."""
    world, began = World(), {}

    def reply(ask: Submit) -> Event | None:
        began.setdefault(ask.ticket, world.now)
        waited = world.now - began[ask.ticket]
        if ask.index == 0:
            return broken(ask) if waited > ask.timeout_s else None
        return answered(ask) if waited > (15 if others and ask.index < 4 else 8) else None

    world.reply = reply
    fleet = world.fleet(1, request_timeout_s=20.0, probe_every_s=1000.0, max_concurrent_sequences=3)
    work = work_of(groups(1, 1, 1, 1, 1))
    landed = sorted(dispatch(fleet, work))
    assert list(work.lost) == [0] and landed == [1, 2, 3, 4] and nothing_in_flight(fleet)
    assert (fleet.members[0].outages, work.retries) == (0 if others else 1, 0)


@pytest.mark.parametrize(("status", "wanted", "seconds"), [(429, None, 0.5), (503, 7.0, 7.0), (408, 1e9, 30.0)])
def test_a_busy_server_rests_and_is_no_outage(status: int, wanted: float | None, seconds: float) -> None:
    """As long as it asks for, within bounds; without a word half a second, then twice as long each time."""
    world, refused = World(), []

    def reply(ask: Submit) -> Event | None:
        if len(refused) < 3:
            refused.append(world.now)
            return AttemptFailed(ask.ticket, "refused", f"HTTP {status}: busy", status, wanted)
        return answered(ask)

    world.reply = reply
    fleet, work = world.fleet(1), work_of(groups(1))
    assert list(dispatch(fleet, work)) == [0]
    assert fleet.members[0].state == "live" and fleet.members[0].outages == 0 and not work.failures
    first, second = refused[1] - refused[0], refused[2] - refused[1]
    assert first == pytest.approx(seconds, abs=0.41) and second == pytest.approx(seconds if wanted else 1.0, abs=0.41)


def test_what_comes_into_a_pause_does_not_rest_the_server() -> None:
    """vLLM 0.33 turns new requests away while a sync has paused it (503), which says nothing of its load: eight would
    have idled it for 30 s."""
    world = World()
    fleet, work = world.fleet(1), work_of(groups(*[1] * 8))
    crossing = 0

    def reply(ask: Submit) -> Event:
        nonlocal crossing
        crossing += 1
        if crossing > 8:
            return answered(ask)
        if crossing == 1:
            synced(fleet, "2")
        return AttemptFailed(ask.ticket, "refused", "HTTP 503: Generation is paused", 503)

    world.reply = reply
    assert sorted(dispatch(fleet, work)) == list(range(8))
    assert world.now < 1.0 and not work.failures and work.retries == 8


def test_a_refusal_ends_an_evaluation_and_costs_training_the_group() -> None:
    world = World()
    world.reply = lambda ask: AttemptFailed(ask.ticket, "refused", "HTTP 400: context too long", 400)
    with pytest.raises(RunAborted, match=r"a refused request 1-0-0: HTTP 400: context too long"):
        list(dispatch(world.fleet(), work_of(groups(1), may_lose=False)))
    list(dispatch(world.fleet(), work := work_of(groups(1))))
    assert work.lost == {0: "a refused it: HTTP 400: context too long"}


@pytest.mark.parametrize("status", [401, 403, 404, 405])
def test_a_refusal_that_is_the_servers_own_sends_its_groups_elsewhere(status: int) -> None:
    """Another key, or without our path: it was restarted."""
    world = World()
    world.reply = lambda ask: (
        answered(ask) if ask.server == "b" else AttemptFailed(ask.ticket, "refused", f"HTTP {status}: no", status)
    )
    fleet, work = world.fleet(2), work_of(groups(1, 1, 1))
    world.servers[0].healthy_now = False
    assert sorted(dispatch(fleet, work)) == [0, 1, 2]
    assert [member.state for member in fleet.members] == ["out", "live"] and nothing_in_flight(fleet)


def test_what_this_machine_lacks_is_no_servers_fault() -> None:
    """EMFILE: the run ends with the number, and nobody is marked out."""
    world = World()
    world.reply = lambda ask: AttemptFailed(ask.ticket, "ours", "can open no more connections; it keeps to 960")
    fleet = world.fleet()
    with pytest.raises(RunAborted, match=r"request 1-0-0: can open no more connections; it keeps to 960"):
        list(dispatch(fleet, work_of(groups(1, 1))))
    assert [member.state for member in fleet.members] == ["live", "live"]


def test_with_nobody_left_a_sync_is_asked_for() -> None:
    """It waits for servers: tests/test_weight_sync.py."""
    world = World()
    world.reply = broken
    fleet, work = world.fleet(2), work_of(groups(1, 1, 1))
    with pytest.raises(NeedsWeights):
        list(dispatch(fleet, work))
    assert [member.state for member in fleet.members] == ["out", "out"] and not work.lost


def test_an_abort_by_a_sync_is_asked_again_and_one_by_nobody_has_an_end() -> None:
    """Eight times it may be a sync's; the ninth counts as a failure of the server."""
    world, aborted = World(), []

    def reply(ask: Submit) -> Event | None:
        aborted.append(ask.ticket)
        return answered(ask, "abort") if len(aborted) < 4 else answered(ask)

    world.reply = reply
    work = work_of(groups(2))
    assert list(dispatch(world.fleet(1), work)) == [0] and work.retries == 3 and not work.failures
    assert set(aborted[:3]) <= set(world.cancelled), "what an aborted attempt brought is dropped"
    world.reply = lambda ask: answered(ask, "abort")
    fleet, work = world.fleet(1), work_of(groups(2))
    with pytest.raises(NeedsWeights):
        list(dispatch(fleet, work))
    assert "aborted the request 9 times" in work.failures[0][0]


def test_syncs_that_abort_the_rest_of_a_group_are_no_failure_of_its_server() -> None:
    """A group of 16 that four steps' syncs abort: the rest of it is 15 requests then, each aborted three times more."""
    world, syncs, asked = World(), 4, [0] * 16

    def reply(ask: Submit) -> Event | None:
        places = range(ask.first, ask.first + ask.group.count)
        reasons = ["stop" if asked[place] == syncs or place == 0 else "abort" for place in places]
        for place in places:
            asked[place] += 1
        return Completed(ask.ticket, [2] * len(reasons), reasons, [(1, 2 * len(reasons))])

    world.reply = reply
    fleet, work = world.fleet(1), work_of(groups(16), may_split=True)
    list(dispatch(fleet, work))
    assert work.is_complete and not work.failures and fleet.members[0].outages == 0
    assert work.completions_aborted == 15 * syncs and len(world.asked) == 1 + 15 * syncs


def test_a_server_that_sleeps_is_asked_nothing_and_keeps_what_it_has() -> None:
    """A colocated one, during the update: of four groups two are under way."""
    world = World(reply=lambda ask: None)
    fleet, work = world.fleet(1, max_concurrent_sequences=2), work_of(groups(1, 1, 1, 1))
    [member] = fleet.members

    def reply(ask: Submit) -> Event | None:
        with fleet.lock:
            if not asleep and len(world.asked) == 2:
                asleep.append(world.now)
                member.slept()
            if member.asleep and world.now > asleep[0] + 100:
                asked.append(len(world.asked))
                member.woke("weights")
                member.woke("kv_cache")
        return None if member.asleep else answered(ask)

    asleep, asked = list[float](), list[int]()
    world.reply = reply
    assert sorted(dispatch(fleet, work)) == [0, 1, 2, 3] and asked == [2] and not world.cancelled


def test_a_server_that_dies_asleep_waits_for_the_sync() -> None:
    """Nobody starts it during the update, whose memory it would take; what it had is asked again after the sync."""
    world = World()
    fleet, work = world.fleet(1), work_of(groups(1))
    with fleet.lock:
        fleet.members[0].slept()
    fleet.mark_out(fleet.members[0], "a broken connection")
    world.servers[0].healthy_now = False
    with pytest.raises(NeedsWeights):
        list(dispatch(fleet, work))
    assert world.now < 1 and not world.asked


def test_a_group_is_reported_when_it_can_be_taken() -> None:
    """Decoded, and not when its answer lands: an evaluation would write it when another comes, in minutes perhaps."""
    world = World()
    fleet, work, plain = world.fleet(), work_of(groups(1, 1)), world.events
    order, held = list[str](), list[Event]()

    def events(timeout_s: float) -> list[Event]:
        found = held + [one for one in plain(timeout_s) if not isinstance(one, Graded)]
        held[:] = [Graded(one.ticket) for one in found if isinstance(one, Completed)]
        order.extend(type(one).__name__ for one in found)
        return found

    world.events = events  # type: ignore[method-assign]
    for index in dispatch(fleet, work):
        order.append(f"{index} is reported")
    assert order == ["Completed"] * 2 + ["Graded"] * 2 + ["0 is reported", "1 is reported"]


def test_what_is_given_up_ends_at_the_servers() -> None:
    world = World()
    world.reply = lambda ask: None
    fleet, work = world.fleet(), work_of(groups(1, 1))
    run = dispatch(fleet, work)
    work_events = world.events

    def events(timeout_s: float) -> list[Event]:
        work.given_up = True
        return work_events(timeout_s)

    world.events = events  # type: ignore[method-assign]
    assert list(run) == []
    assert set(world.ended) == set(world.cancelled) == {1, 2} and nothing_in_flight(fleet)


@pytest.mark.parametrize("moment", range(1, 9))
def test_what_is_given_up_at_any_moment_ends_at_the_servers(moment: int) -> None:
    """Also between two looks of the rollout thread at it."""
    world, looks = World(reply=lambda ask: None), [0]

    class GivenUp(Work):
        @property
        def given_up(self) -> bool:
            looks[0] += len(world.open) == 2
            return looks[0] >= moment

        @given_up.setter
        def given_up(self, value: bool) -> None: ...

    fleet = world.fleet()
    work = GivenUp(groups(1, 1), work_of([]).expected, may_lose=True)
    assert list(dispatch(fleet, work)) == []
    assert set(world.ended) == set(world.cancelled) == {1, 2} and nothing_in_flight(fleet)


@settings(deadline=None, max_examples=150)
@given(data=st.data(), counts=st.lists(st.integers(1, 8), min_size=1, max_size=12), servers=st.integers(1, 4))
def test_every_group_has_one_answer_or_the_run_says_why(data: st.DataObject, counts: list[int], servers: int) -> None:
    """Servers that fail, rest, abort, hang for a while or go away at any moment, with syncs whenever they are asked
    for: each completion lands exactly once or, of training, is lost, or one message names a request. Nothing stays on
    any server's account. Which clients hold parts of a group is known."""
    world = World(clients={name: data.draw(st.integers(0, 2)) for name in "abcd"})
    kinds = st.sampled_from(["ok"] * 6 + ["later", "unwell", "broken", "bad", "busy", "abort", "part", "refused"])

    def reply(ask: Submit) -> Event | None:
        kind = data.draw(kinds)
        if kind == "unwell":  # a probe finds it, and its answers may still come
            next(one for one in world.servers if one.name == ask.server).healthy_now = False
        if kind in ("later", "unwell"):
            return None
        if kind in ("busy", "refused"):
            status = 429 if kind == "busy" else 400
            return AttemptFailed(ask.ticket, "refused", f"HTTP {status}", status)
        if kind == "part":
            reasons = data.draw(
                st.lists(st.sampled_from(["stop", "abort"]), min_size=(n := ask.group.count), max_size=n)
            )
            return Completed(ask.ticket, [2] * n, reasons, [(1, 2 * n)])
        if kind == "bad":
            return AttemptFailed(ask.ticket, "bad", "a log-probability of 5")
        return {"ok": answered, "broken": broken}.get(kind, lambda ask: answered(ask, "abort"))(ask)

    world.reply = reply
    may = {name: data.draw(st.booleans()) for name in ("may_lose", "may_split")}
    fleet, work = world.fleet(servers, request_timeout_s=600.0, probe_every_s=0.2), work_of(groups(*counts), **may)
    if work.may_split:
        work.spread(data.draw(st.integers(1, 4)), data.draw(st.integers(1, 9)))
    landed: list[int] = []
    try:
        while not work.is_complete:
            try:
                landed.extend(dispatch(fleet, work))
            except NeedsWeights:
                world.now += 1.0
                for one in world.servers:
                    one.healthy_now = True
                synced(fleet)
        assert sorted([*landed, *work.lost]) == list(range(len(work.groups)))
        assert may["may_lose"] or not work.lost
        found = []
        for index in range(len(work.groups)):
            whole, first = work.part_of(index)
            reasons = work.done[index].reasons if index in work.done else ["lost"] * work.groups[index].count
            found += [(whole, first + place) for place, reason in enumerate(reasons) if reason != "abort"]
        assert sorted(found) == [(index, place) for index, count in enumerate(counts) for place in range(count)]
        client_of = {ask.ticket: world.client_of(ask.server) for ask in world.asked}
        at = Counter[tuple[int, int]]()
        for ticket, index in work.landed.items():
            at[work.part_of(index)[0], client_of[ticket]] += work.groups[index].count
        assert (
            at == {(whole, client): n for whole, near in work.near.items() for client, n in near.items()}
            or not work.may_split
        )
        assert not {*work.landed} & {*world.cancelled}
    except RunAborted as stop:
        assert "1-" in str(stop)
        assert len(set(landed)) == len(landed)
    assert nothing_in_flight(fleet)
    tickets = [ticket for ticket in world.open if ticket not in world.cancelled]
    assert not tickets, "no attempt is left behind"


def test_who_comes_takes_nobodys_place() -> None:
    """Whoever leaves."""
    fleet = World().fleet(2)
    fleet.mark_left(fleet.members[0], "it has left")
    assert fleet.add(FakeServer("z")).name == "z"  # type: ignore[arg-type]
    synced(fleet)
    assert [member.name for member in fleet.live] == ["b", "z"]


def test_a_rollout_begun_as_the_thread_ends_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread has found no more to do and is about to end: whoever waits until all have finished, as a sync with
    in_flight=finish does, waits for the new one too. One that fails there is not tried again."""
    fleet, found_nothing, may_end = World().fleet(), Flag(), Flag()

    def ends_late(action: Callable[[], None], name: str) -> Future[None]:
        def run() -> None:
            action()
            found_nothing.set()
            may_end.wait()

        return in_thread(run, name)

    monkeypatch.setattr("dppo_megatron.rollout.server_engine.in_thread", ends_late)
    background, first, second = _Background(fleet), work_of(groups(1)), work_of(groups(1))
    background.begin(first)
    assert not background.wait(first) and found_nothing.wait(60)
    background.begin(second)
    may_end.set()
    background.join()
    assert second.finished.done() and not background.has_failed
    fleet.mark_out(fleet.members[0], "a test")
    fleet.mark_out(fleet.members[1], "a test")
    background.begin(third := work_of(groups(1)))
    background.join()
    assert background.wait(third) and not background.has_failed
