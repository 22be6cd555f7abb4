"""Servers that answer wrongly in every way that we know: a right result from another server, or one message.

The table is tests/support/engines/hostile.py. All of it goes through a real rollout client in a process of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from support.engines.hostile import ENGINES, SLOW, WRONG
from support.engines.rig import Rig, requests, right, run
from support.engines.stub import StubServers, good

from dppo_megatron.rollout.servers.http import BadAnswer
from dppo_megatron.rollout.servers.wire import Expected, VersionSpan, as_sampled, checked
from dppo_megatron.types import RunAborted

LIMIT = 12


@dataclass
class Stage:
    """A client that knows every server of the table, and a good one of each engine."""

    rig: Rig
    stubs: StubServers
    places: dict[str, int]


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    cases = [*WRONG, *SLOW, *((f"good {engine}", engine, good) for engine in ENGINES)]
    names = {case[0]: f"case-{number}" for number, case in enumerate(cases)}
    with (
        StubServers({names[name]: behave for name, _, behave in cases}) as stubs,
        pytest.MonkeyPatch.context() as patch,
    ):
        # A lone server that is out is asked again at the next tick, three times in each of 190 cases.
        patch.setattr("dppo_megatron.rollout.servers.dispatch._TICK_S", 0.01)
        rig = Rig([(engine, stubs.url(names[name])) for name, engine, _ in cases])
        yield Stage(rig, stubs, {name: place for place, (name, _, _) in enumerate(cases)})
        rig.close()


def test_the_table_is_long_enough() -> None:
    for engine in ENGINES:
        assert sum(of == engine for _, of, _ in [*WRONG, *SLOW]) >= 60


@pytest.mark.parametrize("engine", ENGINES)
def test_a_good_server_is_understood(stage: Stage, engine: str) -> None:
    fleet = stage.rig.fleet([stage.places[f"good {engine}"]], {})
    work = run(fleet, requests(5))
    assert work.retries == 0 and right(stage.rig.take(), 5, 3)
    fleet.close()


@pytest.mark.parametrize(("name", "engine"), [(name, engine) for name, engine, _ in WRONG], ids=lambda value: value)
def test_beside_a_good_server(stage: Stage, name: str, engine: str) -> None:
    """All right completions come, none of them wrong, but those of groups that are given up, by a line that names them;
    or the run is ended by such a message."""
    places = [stage.places[name], stage.places[f"good {engine}"]]
    fleet = stage.rig.fleet(places, {"request_timeout_s": 20.0})
    try:
        work = run(fleet, requests(3), may_lose=True)
    except RunAborted as stop:
        assert "request r-" in str(stop) and len(str(stop)) < 2000, str(stop)
        stage.rig.take()
    else:
        assert right(stage.rig.take(), 3, 3, lost=work.lost)
    finally:
        fleet.close()


@pytest.mark.parametrize(("name", "engine"), [(name, engine) for name, engine, _ in WRONG], ids=lambda value: value)
def test_alone(stage: Stage, name: str, engine: str) -> None:
    """It answers every health probe and takes every sync, and the run still ends, with the request's id."""
    fleet = stage.rig.fleet([stage.places[name]], {"request_timeout_s": 0.5})
    try:
        run(fleet, requests(1))
    except RunAborted as stop:
        assert "r-0" in str(stop) and len(str(stop)) < 4000, str(stop)
        assert not stage.rig.take(), "nothing of it is kept"
    else:
        assert right(stage.rig.take(), 1, 3), "wrong for some requests only"
    finally:
        fleet.close()


@pytest.mark.parametrize(
    ("rows", "how", "wrong"),
    [
        (((5, 6, 1), (5, 6, 1)), {}, False),  # a model that has collapsed
        (((5, 6, 1), (5, 6)), {}, False),  # the second was aborted
        (((5, 1), (6, 1)), {"temperature": 0.0}, False),
        (((5, 1), (6, 1)), {"reads_logprobs": False}, False),
        (((5, 1), (6, 1)), {}, True),
        (((5, 1), (6, 1)), {"top_p": 0.5}, True),
        (((5, 6, 1), (1,)), {}, True),
        (((5,) * 65 + (1,),), {}, True),
        (((5,) * 65 + (1,),), {"top_k": 1}, False),
        (((5,) * 20 + (1,),), {}, False),
    ],
)
def test_certainty_that_cannot_be(rows: tuple[tuple[int, ...], ...], how: dict[str, Any], wrong: bool) -> None:
    """Log-probabilities that are all 0: nothing else could have been sampled, so the others must be alike."""
    group = msgspec.structs.replace(requests(1, len(rows), 100)[0], **how)
    spans = [[VersionSpan("1", 0, len(row))] for row in rows]
    answer = [
        as_sampled(row, [0.0] * len(row), "stop" if row[-1] == 1 else "abort", span)
        for row, span in zip(rows, spans, strict=True)
    ]
    if wrong:
        with pytest.raises(BadAnswer, match="exactly 0"):
            checked(answer, group, Expected(19, 1, 1))
    else:
        checked(answer, group, Expected(19, 1, 1))


@pytest.mark.parametrize(("name", "engine"), [(name, engine) for name, engine, _ in SLOW], ids=lambda value: value)
def test_a_call_has_a_deadline_as_a_whole(stage: Stage, name: str, engine: str) -> None:
    """Bytes that come now and then, or not, hold nobody for longer than a request may take."""
    fleet = stage.rig.fleet([stage.places[name]], {"request_timeout_s": 0.5})
    with pytest.raises(RunAborted, match=r"request_timeout_s = 0.5 s since their first try: r-0 on"):
        run(fleet, requests(1))
    fleet.close()
