"""Rollouts of several steps at once over fake servers: who is asked when, on a clock of the test's."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from support.fake_fleet import World, answered, groups, nothing_in_flight, work_of

from dppo_megatron.rollout.servers.dispatch import Dispatch
from dppo_megatron.rollout.servers.wire import Completed, Event, GenerateRequest, Submit


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
