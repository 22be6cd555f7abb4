"""What is in flight at a checkpoint: kept, not sampled again, and gone on with from its tokens."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engines.stub import StubServers
from support.engines.typist import Typist, whole
from support.fake_fleet import World, answered, broken, groups, work_of
from support.job import QUICK, job_config, read_metrics
from support.killing import Kill, run_killed, run_whole
from support.logged import logged_lines
from support.served import rank_zero

from dppo_megatron.checkpoint.checkpoint_dir import step_name
from dppo_megatron.checkpoint.store import read_state, write_state
from dppo_megatron.config.schema import Config
from dppo_megatron.job import prepare_job
from dppo_megatron.rollout.client.connections import ServerConnections
from dppo_megatron.rollout.client.messages import ENCODER, TO_CLIENT, Arrived, Over, ServerAddress
from dppo_megatron.rollout.client.process import Client
from dppo_megatron.rollout.engine import Request, Sampling
from dppo_megatron.rollout.in_flight import Found, collected, packed, restore
from dppo_megatron.rollout.server_engine import ServerEngine
from dppo_megatron.rollout.servers.dialects import VLLMDialect
from dppo_megatron.rollout.servers.dispatch import dispatch
from dppo_megatron.rollout.servers.http import Peer
from dppo_megatron.rollout.servers.rollout_work import Work
from dppo_megatron.rollout.servers.wire import (
    NOT_BEGUN,
    Expected,
    GenerateRequest,
    Sampled,
    Submit,
    joined,
    until_end,
)
from dppo_megatron.steps.loop import Loop
from dppo_megatron.steps.step import Step
from dppo_megatron.types import Completion, Prompt

LIMIT = 40


@pytest.fixture
def typists() -> Iterator[dict[str, Typist]]:
    with StubServers() as stubs:
        found = {name: Typist(stubs, name, LIMIT) for name in "ab"}
        stubs.behaviours.update(found)
        yield found


def engine_of(files: Path, run_dir: Path, typists: dict[str, Typist], **values: Any) -> ServerEngine:
    urls = ",".join(one.stubs.url(name) for name, one in typists.items())
    values = {
        "rollout__engine": "vllm",
        "rollout__servers__endpoints": f"[{urls}]",
        "rollout__sync__verify_every": 0,
        "rollout__async_steps": 2,
        "rollout__sync__channel": "disk",
        "rollout__sync__in_flight": "continue",
        "rollout__completions_per_prompt": 4,
    } | values
    config = job_config(files, run_dir, **values)
    job = prepare_job(config, 1)
    return ServerEngine(config, job.architecture, job.tokenizer)


def load(engine: ServerEngine) -> None:
    engine.load_weights(lambda: iter([("lm_head.weight", torch.zeros(2, 2))]))


def requests(step: int) -> list[Request]:
    return [Request(Prompt(i, "", (2, 3), "", ""), c, step) for i in range(6) for c in range(4)]


def through_a_file(state: dict[int, dict[str, Any]], path: Path) -> dict[int, dict[str, Any]]:
    write_state(path, {"loop": {"in_flight": state}})
    found: dict[int, dict[str, Any]] = read_state(path)["loop"]["in_flight"]
    return found


def sample_until(typists: dict[str, Typist], most: int) -> None:
    """Until all completions of step 2 have ended or have `most` tokens, if any is begun; those of step 3 may."""
    for one in typists.values():
        one.most = most
    expected = sum(min(most, len(whole(one.id, LIMIT)[0])) for one in requests(2))
    # copied, as their thread adds to it meanwhile
    while most < LIMIT and sum(who.startswith("2-") for it in typists.values() for who, _ in [*it.sampled]) < expected:
        time.sleep(0.01)


def is_right(asked: list[Request], found: dict[int, Completion]) -> bool:
    assert sorted(found) == list(range(len(asked)))
    for place, one in found.items():
        tokens, logprobs, reason = whole(asked[place].id, LIMIT)
        assert one.token_ids.tolist() == tokens and one.finish_reason == reason
        assert one.logprobs.tolist() == logprobs and sum(count for _, count in one.weights_spans) == len(tokens)
    return True


@pytest.mark.parametrize("engine_name", ["vllm", "sglang"])
def test_nothing_that_was_sampled_is_sampled_again(
    files: Path, tmp_path: Path, typists: dict[str, Typist], engine_name: str
) -> None:
    """Two rollouts are looked at twice and end as they would have. Another engine goes on from the second look: it has
    what had ended, and the rest of the others, with the versions of both."""
    said, sampling = logged_lines(), Sampling(LIMIT, 1.0, 0)
    engine = engine_of(files, tmp_path, typists, rollout__engine=engine_name)
    try:
        load(engine)
        sample_until(typists, 0)
        for step in (2, 3):
            engine.start(requests(step), sampling)
        sample_until(typists, LIMIT // 8)
        first = engine.in_flight()
        load(engine)
        sample_until(typists, LIMIT // 4 + 1)
        second = engine.in_flight()
        sample_until(typists, LIMIT)
        assert all(is_right(requests(step), engine.finish()) for step in (2, 3))
        once = set(sum((one.sampled for one in typists.values()), start=type(typists["a"].sampled)()).values())
        assert once == {1}, "no token twice"
        assert engine.in_flight() == {}
        stats = engine.statistics()
        assert stats.tokens_sampled == sum(len(whole(one.id, LIMIT)[0]) for step in (2, 3) for one in requests(step))
    finally:
        engine.close()
    assert list(first) == list(second) == [2, 3]
    for step, state in second.items():
        assert {"stop", "abort"} <= set(state["reasons"]) or step == 3
        assert len(state["reasons"]) == 24 or step == 3
        before = dict(zip(first[step]["places"], first[step]["lengths"], strict=True))
        after = dict(zip(state["places"], state["lengths"], strict=True))
        assert before.keys() <= after.keys() and all(after[place] >= before[place] for place in before)
    kept = through_a_file(second, tmp_path / "loop.pt")
    for one in typists.values():
        one.sampled.clear()
        one.seeds.clear()
    resumed = engine_of(files, tmp_path, typists, rollout__engine=engine_name)
    try:
        resumed.weights_version = 1
        load(resumed)
        for step in (2, 3):
            resumed.start(requests(step), sampling, kept[step])
        for step in (2, 3):
            found, state = resumed.finish(), second[step]
            assert is_right(requests(step), found)
            places = [group * 4 + position for group, position in state["places"]]
            for place, length, spans in zip(places, state["lengths"], state["versions"], strict=True):
                name = requests(step)[place].id
                again = [token for one in typists.values() for who, token in one.sampled if who == name]
                assert sorted(again) == list(range(length, len(whole(name, LIMIT)[0])))
                versions = np.repeat(*np.array(found[place].weights_spans).T)
                assert (
                    versions[:length].tolist()
                    == np.repeat([v for v, _, _ in spans], [e - s for _, s, e in spans]).tolist()
                )
                assert set(versions[length:]) <= {2}
        assert sum("are the checkpoint's" in line for line in said) == 2
    finally:
        resumed.close()


def test_what_answers_other_requests_is_sampled_again(files: Path, tmp_path: Path, typists: dict[str, Typist]) -> None:
    """Another sampling, other prompts, other limits of one, another age that is allowed, or what another row of the
    ledger stands for: a rollout as a whole, since the finished ones alone are the short ones."""
    said, sampling = logged_lines(), Sampling(LIMIT, 1.0, 0)
    engine = engine_of(files, tmp_path, typists)
    load(engine)
    engine.start(requests(2), sampling)
    time.sleep(0.1)
    [state] = engine.in_flight().values()
    engine.close()
    assert state["places"]
    others: list[tuple[list[Request], Sampling, dict[str, Any]]] = [
        (requests(2), Sampling(LIMIT, 1.0, 1), {}),
        (requests(2), Sampling(LIMIT, 0.9, 0), {}),
        ([Request(Prompt(i, "", (2, 4), "", ""), c, 2) for i in range(6) for c in range(4)], sampling, {}),
        (requests(2), sampling, {"rollout__async_steps": 1}),
        (requests(2), sampling, {"rollout__sync__in_flight": "abort"}),
    ]
    for number, (asked, how, values) in enumerate(others, start=1):
        while any(one.typing for one in typists.values()):  # for the engine before, whose connections are closed
            time.sleep(0.01)
        for one in typists.values():
            one.sampled.clear()
            one.seeds.clear()
        engine = engine_of(files, tmp_path, typists, **values)
        load(engine)
        engine.start(asked, how, state)
        assert is_right(asked, engine.finish())
        engine.close()
        total = sum(len(whole(one.id, LIMIT)[0]) for one in asked)
        assert sum(sum(one.sampled.values()) for one in typists.values()) == total
        assert sum("sampled again" in line for line in said) == number


def test_a_server_that_ends_nothing_keeps_nothing(files: Path, tmp_path: Path, typists: dict[str, Typist]) -> None:
    """Its rollout would be kept without its long completions: nothing of it is, and nothing is lost."""
    typists["a"].deaf = True
    for one in typists.values():
        one.tick_s = 0.5
    engine = engine_of(files, tmp_path, typists)
    try:
        load(engine)
        engine.start(requests(2), Sampling(LIMIT, 1.0, 0))
        time.sleep(0.6)
        began = time.monotonic()
        [state] = engine.in_flight().values()
        assert state["places"] == [] and 5 < time.monotonic() - began < 15
        for one in typists.values():
            one.tick_s = 0.0
        assert is_right(requests(2), engine.finish())
    finally:
        engine.close()


def test_a_part_brings_what_is_kept_of_it_to_whoever_is_asked() -> None:
    """Of a group over two servers each gets its own, and the second one's client all of what the first one lost."""
    world = World(reply=lambda ask: broken(ask) if ask.server == "a" else answered(ask))
    work = work_of(groups(4), may_split=True, number=7)
    work.kept = {(0, place): NOT_BEGUN for place in (0, 2, 3)}
    work.spread(2, 2)
    list(dispatch(world.fleet(), work))
    assert world.kept == [("a", 7, 0, 0), ("b", 7, 0, 2), ("b", 7, 0, 3), ("b", 7, 0, 0)]


@pytest.mark.parametrize("was_seen", [False, True])
def test_a_retry_at_another_client_after_a_checkpoint_draws_another(was_seen: bool) -> None:
    """It has none of the tokens that the first client has gone on from, with another seed."""
    world = World(reply=lambda ask: broken(ask) if ask.server == "a" else answered(ask), clients={"a": 0, "b": 1})
    work = work_of(groups(1, 1), may_split=True, was_seen=was_seen)
    list(dispatch(world.fleet(), work))
    assert work.retries == 1 and work.resent == ({0} if was_seen else set())


def test_what_was_taken_is_forgotten(files: Path, tmp_path: Path, typists: dict[str, Typist]) -> None:
    """The beginnings of completions that were given up too, on all clients: a long run would gather them."""
    client: Any = object.__new__(Client)
    client._begun, client._failed_s = {number: {(0, 0): NOT_BEGUN} for number in (1, 2)}, {1: 0.0, 2: 0.0}
    client._handle(TO_CLIENT.decode(ENCODER.encode(Over(1))))
    assert [*client._begun] == [2] and [*client._failed_s] == [2]
    engine, over = engine_of(files, tmp_path, typists), list[int]()
    try:
        rank_zero(engine).clients.over = over.append  # type: ignore[method-assign]
        load(engine)
        for step in (2, 3):
            engine.start(requests(step), Sampling(LIMIT, 1.0, 0))
        for taken in ([1], [1, 2]):
            engine.finish()
            assert over == taken
    finally:
        engine.close()


@given(st.data())
@settings(max_examples=200, deadline=None, derandomize=True)
def test_parts_make_the_whole(data: st.DataObject) -> None:
    """Cut anywhere, any number of times, through changes of weights; with its experts and its own limit."""
    group = GenerateRequest("1-2-4", (5, 6, 7), 3, 9, max_tokens=30, stop_token_ids=(1,), limits=(30, 12, 30))
    index = data.draw(st.integers(0, 2))
    length = data.draw(st.integers(1, group.limit(index)))
    ids, values = np.arange(2, 2 + length, dtype=np.int32), np.linspace(-1, 0, length, dtype=np.float32)
    has_experts = data.draw(st.booleans())
    experts = np.arange((length + 2) * 6, dtype=np.uint16).reshape(-1, 3, 2) if has_experts else None
    cuts = sorted(data.draw(st.lists(st.integers(0, length), max_size=4)))
    change = data.draw(st.integers(0, length))

    def part(start: int, end: int, reason: Any) -> Sampled:
        spans = (("r.1", start, min(end, change)), ("r.2", max(start, change), end))
        versions = tuple((name, first - start, last - start) for name, first, last in spans if first < last)
        own = None if experts is None else experts[: max(0, 3 + end - 1)]
        return Sampled(ids[start:end], values[start:end], reason, versions, own)

    one, seeds = part(0, 0, "abort"), set()
    for start, end in zip([0, *cuts], [*cuts, length], strict=True):
        rest = group.rest(index, one)
        assert rest.count == 1 and rest.request_id == f"1-2-{4 + index}"
        assert rest.prompt_ids == (5, 6, 7, *ids[:start].tolist()) and rest.limit(0) == group.limit(index) - start
        seeds.add((start, rest.seed))
        at_limit = length == group.limit(index)
        reason = "abort" if end < length else "length" if at_limit else "stop"
        one = joined(one, part(start, end, reason), group, index)
    assert len(seeds) == len({start for start, _ in seeds}) == len({seed for _, seed in seeds})
    assert (0, 9 + index) in seeds
    assert one.token_ids.tolist() == ids.tolist() and one.logprobs.tolist() == values.tolist()
    assert one.weights_versions == part(0, length, "stop").weights_versions
    expected = "stop" if not at_limit else "early" if index == 1 else "length"
    assert one.finish_reason == expected
    if experts is not None:
        assert one.experts is not None and np.array_equal(one.experts, experts)


def test_drafts_beyond_an_end_are_no_beginning() -> None:
    group = GenerateRequest("1-2-0", (5,), 2, 0, max_tokens=6, stop_token_ids=(1,), limits=(6, 3))
    tokens = np.array([4, 1, 7, 7, 7, 7, 7], np.int32)
    one = Sampled(tokens, np.zeros(7, np.float32), "abort", (("1", 0, 1), ("2", 1, 7)))
    cut = until_end(one, group, 0)
    assert (cut.token_ids.tolist(), cut.finish_reason) == ([4, 1], "stop")
    assert cut.weights_versions == (("1", 0, 1), ("2", 1, 2))
    other = Sampled(tokens[2:], np.zeros(5, np.float32), "abort", (("1", 0, 5),))
    assert [(len(c.token_ids), c.finish_reason) for c in (until_end(other, group, at) for at in (0, 1))] == [
        (5, "abort"),
        (3, "early"),
    ]


def test_what_has_ended_is_kept_before_what_an_earlier_attempt_began() -> None:
    """Of two clients the first may still have the beginning of a completion whose server it has lost."""
    begun = Sampled(np.full(5, 5, np.int32), np.zeros(5, np.float32), "abort", (("r.1", 0, 5),))
    ended = Sampled(np.full(3, 3, np.int32), np.zeros(3, np.float32), "stop", (("r.1", 0, 3),))
    work = work_of(groups(2))
    for found in ([((0, 1), begun), ((0, 1), ended)], [((0, 1), ended), ((0, 1), begun)]):
        state = packed(work, [*found, ((0, 0), begun)])
        assert sorted(state["places"]) == [(0, 0), (0, 1)]
        other = work_of(groups(2))
        restore(other, state, "s")
        assert {place: (len(one.token_ids), one.finish_reason) for place, one in other.kept.items()} == {
            (0, 0): (5, "abort"),
            (0, 1): (3, "stop"),
        }


def test_the_rollout_thread_may_note_an_abort_meanwhile() -> None:
    """As it does behind a sync with in_flight=abort, just before a checkpoint."""

    class Busy(Work):
        def part_of(self, index: int) -> tuple[int, int]:
            self.aborts[len(self.aborts)] = 1
            return super().part_of(index)

    work = Busy(groups(1, 1), Expected(19, 1, 2), aborts={0: 1, 1: 1})
    assert packed(work, [])["aborted"] == [0, 1]


def test_what_was_given_up_is_tried_again_by_a_resume_alone() -> None:
    """The run that saves does not: it says that they are missing, and has no group that was sampled again."""
    work = work_of(groups(1, 1, 1), lost={0: "refused"}, ended={2})
    assert packed(work, [])["resent"] == [0, 2] and work.resent == set()


def test_a_rollout_of_too_many_bytes_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank reads the file: the step after it is kept all the same. Nor are its tokens brought to rank 0: with 48
    layers' experts a step of 8,192 answers has 20 GB of them."""
    logged, sent = logged_lines(), list[int]()
    small, eight, large = (
        Sampled(np.ones(n, np.int32), np.zeros(n, np.float32), "stop", (("r.1", 0, n),)) for n in (1, 8, 9)
    )
    works = [replace(work_of(groups(1)), order=order, number=order) for order in (4, 5)]

    def take(rollout: int, looks_at: tuple[int, ...]) -> list[Arrived]:
        return [Arrived(0, 0, large if rollout == 4 else small, "", None)]

    def to_rank_zero(mine: list[Found]) -> list[list[Found]]:
        sent.extend(len(one.token_ids) for _, one in mine)
        return [mine]

    monkeypatch.setattr("dppo_megatron.rollout.in_flight.to_rank_zero", to_rank_zero)
    assert sorted(collected(works, take)) == [4, 5] and sent == [9, 1]
    monkeypatch.setattr("dppo_megatron.rollout.in_flight.MOST_BYTES", 64)
    assert sorted(collected(works, take)) == [5] and sent == [9, 1, 1]
    assert any("step 4: not in the checkpoint" in line for line in logged)
    works[1].kept[0, 1] = eight  # of an earlier checkpoint: not asked for yet, so that no client has it
    assert collected(works[1:], take) == {} and any("step 5: not in the checkpoint" in line for line in logged)


class _TakesTwo:
    """An engine as one may have written it before checkpoints kept anything."""

    has_servers, weights_version = False, 0

    def __init__(self) -> None:
        self.started: list[Any] = []

    def start(self, requests: Any, sampling: Any) -> None:
        self.started.append((requests, sampling))


def test_an_engine_that_keeps_nothing_is_given_nothing() -> None:
    """Also if another engine has written the checkpoint."""
    loop, engine = object.__new__(Loop), _TakesTwo()
    coordinator = SimpleNamespace(load_state_dict=lambda state: None)
    loop._engine, loop._coordinator, loop._sampling = engine, coordinator, "sampling"  # type: ignore[assignment]
    loop.job = SimpleNamespace(config=Config())  # type: ignore[assignment]
    loop.load_state_dict({"skipped_in_a_row": 0, "in_flight": {3: {}}}, 2)
    for step in (Step(3), Step(4)):
        step.reach("selected")
        loop._start(step, [])
    assert engine.started == [([], "sampling")] * 2


def test_an_abort_needs_no_socket_of_the_requests(typists: dict[str, Typist]) -> None:
    """After a save each completion has one, which may be all: none would be free to end them at the next save."""

    async def ended() -> list[Sampled]:
        connections = ServerConnections(1)
        url, group = typists["a"].stubs.url("a"), GenerateRequest("1-0-0", (2,), 1, 0, max_tokens=LIMIT)
        connections.add([ServerAddress(Peer(url), VLLMDialect())])
        running = asyncio.create_task(
            connections.generate(Submit(1, 0, url, group, Expected(19, 1, 2), 60.0, b"", 7, 0))
        )
        while not typists["a"].typing:
            await asyncio.sleep(0.01)
        await asyncio.wait_for(connections.abort(url, group), 20.0)
        found = await running
        await connections.close()
        return found

    typists["a"].most = 0
    assert [one.finish_reason for one in asyncio.run(ended())] == ["abort"]


RUN = QUICK | {
    "steps": 5,
    "rollout__engine": "vllm",
    "rollout__prompts_per_step": 4,
    "rollout__completions_per_prompt": 4,
    "rollout__sampling__max_completion_tokens": LIMIT,
    "rollout__limits__logprob_diff_warning": 1000,
    "rollout__sync__verify_every": 0,
    "checkpoint__every_steps": 2,
    "checkpoint__keep": 0,
}
TIMED = ("time/", "perf/", "rollout/staleness", "rollout/tokens_read_again", "rollout/sync_s")


def record(run: Path, *, versions: bool) -> tuple[Any, Any, bytes]:
    """All that a run has trained on and become; without what the moment of a sync decides unless `versions`."""
    rows = read_metrics(run)
    if not versions:
        rows = [{key: value for key, value in row.items() if not key.startswith(TIMED)} for row in rows]
    rows = [{key: value for key, value in row.items() if key != "rollout/sync_s"} for row in rows]
    trace = [json.loads(line) for line in (run / "trace.jsonl").read_text().splitlines()[1:]]
    for row in trace:
        row.pop("seconds")
    return rows, trace, (run / "hf" / "model.safetensors").read_bytes()


def samples(run: Path) -> pd.DataFrame:
    return pd.read_parquet(run / "samples").sort_values(["step", "group", "completion"], ignore_index=True)


@dataclass(frozen=True)
class _Signal(Kill):
    """SIGTERM, after which the step is finished and saved."""

    def strike(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("in_flight", "ahead", "ranks", "end"),
    [
        ("finish", 1, 1, Kill("update", 3)),
        ("finish", 1, 1, _Signal("update", 3)),
        ("finish", 1, 1, Kill("saving", 2)),
        ("continue", 2, 2, Kill("update", 3)),
        ("abort", 1, 1, Kill("update", 3)),
    ],
)
def test_a_run_that_ends_with_requests_in_flight(
    files: Path, tmp_path: Path, typists: dict[str, Typist], in_flight: str, ahead: int, ranks: int, end: Kill
) -> None:
    """In the step after a checkpoint, while other steps are sampled, and on from there: the same record, samples and
    weights as of a run that has never ended, down to the version of each token where a sync waits for all."""
    urls = ",".join(one.stubs.url(name) for name, one in typists.items())
    values = RUN | {
        "rollout__servers__endpoints": f"[{urls}]",
        "rollout__async_steps": ahead,
        "rollout__sync__in_flight": in_flight,
    }
    run_whole(files, tmp_path / "whole", ranks, values)
    is_signalled = isinstance(end, _Signal)
    assert run_killed(files, tmp_path / "run", ranks, values, end) != is_signalled
    last = 2 + is_signalled
    state = read_state(tmp_path / "run" / "checkpoints" / step_name(last) / "loop.pt")["loop"]["loop"]["in_flight"]
    assert list(state) == list(range(last + 1, last + 1 + ahead)) and state[last + 1]["places"]
    for one in typists.values():
        one.sampled = Counter()
    run_whole(files, tmp_path / "run", ranks, values)
    traced = {row["step"]: row for row in record(tmp_path / "run", versions=True)[1]}
    for step, kept in state.items():
        names = [[f"{step}-{prompt}-{position}" for position in range(4)] for prompt in traced[step]["prompts"]]
        places = (names[group][position] for group, position in kept["places"])
        had = dict(zip(places, kept["lengths"], strict=True))
        again = [at for one in typists.values() for at in one.sampled.elements() if at[0].startswith(f"{step}-")]
        rests = {name: range(had.get(name, 0), len(whole(name, LIMIT)[0])) for name in chain.from_iterable(names)}
        assert len(rests) == 16 and sorted(again) == sorted((name, token) for name in rests for token in rests[name])
    is_exact = in_flight == "finish"
    for mine, theirs in zip(*(record(tmp_path / name, versions=is_exact) for name in ("run", "whole")), strict=True):
        assert mine == theirs
    mine, theirs = samples(tmp_path / "run"), samples(tmp_path / "whole")
    differ = [] if is_exact else ["weights_version_first", "weights_version_last"]
    differ += ["actor_logprobs"] if ranks > 1 else []  # only of completions that the rank with the row has scored
    pd.testing.assert_frame_equal(mine.drop(columns=differ), theirs.drop(columns=differ))
