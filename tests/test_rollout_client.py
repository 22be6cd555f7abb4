"""The rollout client: shared by the ranks of a node, over TCP, and when it dies."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engines.rig import Rig, requests, run, sync
from support.engines.stub import Asked, Behaviour, StubServers, answer_to, completion, good
from support.job import QUICK, job_config
from support.killing import train_or_die
from support.launch import run_ranks
from support.logged import logged_lines
from support.processes import holding, running, until
from support.served import rank_zero
from test_array_answers import packed

from dppo_megatron.config.schema import Config
from dppo_megatron.frames import FrameBuffer, framed
from dppo_megatron.job import prepare_job
from dppo_megatron.rewards.measures import GradeTable, set_metrics
from dppo_megatron.rollout import launched_servers, server_engine
from dppo_megatron.rollout.client import messages
from dppo_megatron.rollout.client.buffer import BufferedGroup, hand_over
from dppo_megatron.rollout.client.messages import TakeShare, take_over
from dppo_megatron.rollout.client.process import Setup
from dppo_megatron.rollout.client.remote import Clients, NodeClient, Nodes, owners, take
from dppo_megatron.rollout.engine import Request, RolloutStats, Sampling
from dppo_megatron.rollout.server_engine import RankZero, ServerEngine
from dppo_megatron.rollout.servers.dispatch import dispatch
from dppo_megatron.rollout.servers.http import STALE_TRIES
from dppo_megatron.rollout.servers.rollout_work import Work, grouped
from dppo_megatron.rollout.servers.wire import Completed, Expected, Sampled
from dppo_megatron.types import Completion, Grade, Group, Prompt, RolloutPrompt, RunAborted

LIMIT = 12


@pytest.fixture
def stubs() -> Iterator[StubServers]:
    with StubServers({"a": good, "b": good}) as servers:
        yield servers


def test_the_ages_of_a_step_are_of_all_its_rounds() -> None:
    """A round under weights two syncs old, then a refill under the newest; an evaluation between them has no part."""
    stats = RolloutStats()
    clients = SimpleNamespace(over=lambda rollout: None)
    zero: Any = SimpleNamespace(_config=Config(), fleet=SimpleNamespace(live=[]), clients=clients)
    for version, tokens, trains in ((3, 900, True), (5, 5000, False), (5, 100, True)):
        work = Work([], Expected(9, 5, 5, ""), may_lose=trains)
        work.done[0] = Completed(0, [tokens], ["stop"], [(version, tokens)])
        RankZero.count(zero, work, 5, stats)
    found = stats.metrics()
    assert (found["rollout/staleness_mean"], found["rollout/staleness_max"]) == (1.8, 2.0)
    assert not {"rollout/tokens_sampled", "rollout/token_ages"} & found.keys()
    assert RolloutStats().metrics() == {}


def test_a_client_that_dies_is_said(stubs: StubServers) -> None:
    rig = Rig([("vllm", stubs.url("a"))])
    rig.node.process.kill()
    with pytest.raises(RunAborted, match="rollout client of node 0 has ended"):
        run(rig.fleet([0], {}), requests(2))
    with pytest.raises(RunAborted, match="this node's rollout client has ended"):
        rig.take()
    rig.close()


def _signalled_in_a_rollout(files: Path, run_dir: Path, values: dict[str, Any]) -> int:
    """On a rank that leads its process group, as torchrun's do: SIGTERM to the group, then to the client alone, as
    Slurm does, while the first step is generated. Returns the exit code of the command line."""
    finish = ServerEngine.finish

    def signalled(engine: ServerEngine) -> dict[int, Completion]:
        assert engine._client is not None
        os.killpg(os.getpid(), signal.SIGTERM)
        os.kill(engine._client.process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            engine._client.process.wait(1)
        return finish(engine)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ServerEngine, "finish", signalled)
        return train_or_die(files, run_dir, 1, values, None)


def test_a_signal_to_the_whole_job_spares_the_client(files: Path, tmp_path: Path, stubs: StubServers) -> None:
    """The step is finished and saved, as without servers."""
    values = QUICK | {
        "rollout__engine": "vllm",
        "rollout__servers__endpoints": f"[{stubs.url('a')}]",
        "rollout__sync__verify_every": 0,
        "rollout__prompts_per_step": 4,
    }
    assert run_ranks(_signalled_in_a_rollout, 1, files, tmp_path / "run", values) == [0]
    assert {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()} == {"latest", "step_000001"}


def test_a_client_ends_with_the_rank_that_has_started_it(tmp_path: Path) -> None:
    """Though rank 0 lives and holds its connection; so do the directories of its sockets."""
    clients = Clients(["127.0.0.1"], [], [], nodes=[0])
    meeting = clients.rendezvous
    path = meeting.take_path(0)

    def start() -> NodeClient:
        node = NodeClient(Setup(0, meeting.address, meeting.secret, path))
        (tmp_path / "client").write_text(str(node.process.pid))
        return node

    try:
        with holding(start):
            clients.start(1)
        assert not running(int((tmp_path / "client").read_text())) and not Path(path).parent.exists()
    finally:
        clients.close()


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_kept_connection_that_breaks_is_no_outage(engine: str, stubs: StubServers) -> None:
    """Closed by the server over a request that it has read: the same is asked again, under another id since SGLang
    refuses one that it knows, and what the server may have begun is ended. Several such connections at once."""
    known: set[str] = set()
    kept: set[object] = set()
    broken: list[str] = []
    second = threading.Event()

    async def breaking(asked: Asked) -> None:
        ids = asked.body.get("request_id") or "".join(asked.body["rid"])
        assert ids not in known, "an id is used once"
        known.add(ids)
        tries = sum(one.partition(".")[0] == ids.partition(".")[0] for one in broken)
        if second.is_set() and asked.writer in kept and tries < STALE_TRIES - 1:
            broken.append(ids)
            asked.writer.close()
        else:
            kept.add(asked.writer)
            await good(asked)

    stubs.behaviours["a"] = breaking
    rig = Rig([(engine, stubs.url("a"))])
    try:
        fleet = rig.fleet([0], {})
        run(fleet, requests(4))
        second.set()
        work = run(fleet, requests(4, name="s"))
        assert broken and work.is_complete and work.retries == 0 and fleet.members[0].outages == 0
        assert len(rig.take()) == 24 and len(known) == 8 + len(broken)
        until(lambda: len(stubs.aborted.get("a", ())) == len(broken) * (1 if engine == "vllm" else 4))
    finally:
        rig.close()


def _one_rank(files: Path, run_dir: Path, **values: object) -> ServerEngine:
    """An engine whose server is named in `values`, synced once."""
    config = job_config(files, run_dir, rollout__engine="vllm", rollout__sync__verify_every=0, **values)
    job = prepare_job(config, 1)
    engine = ServerEngine(config, job.architecture, job.tokenizer)
    engine.load_weights(lambda: iter([("lm_head.weight", torch.zeros(2, 2))]))
    return engine


def _rollout(engine: ServerEngine, step: int) -> int:
    asked = [Request(Prompt(i, "", (2, 3), "", ""), c, step) for i in range(4) for c in range(4)]
    return len(engine.generate(asked, Sampling(LIMIT, 1.0, 0)))


def test_a_server_that_comes_back_is_looked_at_again(files: Path, tmp_path: Path, stubs: StubServers) -> None:
    """Its operator has started it without our path: it is asked the other way. Then with a context that is too short:
    it is not used, and the run says why it ends."""
    path = "inference/v1/generate_arrays"

    async def either(asked: Asked) -> None:
        if not asked.path.endswith("_arrays"):
            await good(asked)
        elif f"a/{path}" in stubs.pages:
            await asked.reply(packed(answer_to(asked.body, asked.version)))
        else:
            await asked.reply('{"detail": "Not Found"}', "404 Not Found")

    stubs.behaviours["a"] = either
    stubs.pages[f"a/{path}"] = '{"form": 2}'
    said = logged_lines()
    engine = _one_rank(
        files, tmp_path, rollout__servers__endpoints=f"[{stubs.url('a')}]", rollout__limits__engine_wait_s=2
    )
    try:
        assert _rollout(engine, 1) == 16
        del stubs.pages[f"a/{path}"]
        assert _rollout(engine, 2) == 16 and sum("is out" in line for line in said) == 1
        stubs.pages["a/v1/models"] = json.dumps({"data": [{"id": "policy", "root": "", "max_model_len": 3}]})
        stubs.behaviours["a"] = lambda asked: asked.reply("", "500 Internal Server Error")
        with pytest.raises(RunAborted, match=r"engine_wait_s = 2 s .*KV cache of only 3 tokens"):
            _rollout(engine, 3)
        assert sum("answers again and is not used" in line for line in said) == 1
    finally:
        engine.close()


def test_no_more_is_asked_for_at_once_than_a_server_runs(files: Path, tmp_path: Path, stubs: StubServers) -> None:
    """vLLM refuses a request for more; neither a step, an evaluation nor a canary asks for it, with the same seeds."""

    async def of_two(asked: Asked) -> None:
        await (good(asked) if asked.body["sampling_params"]["n"] <= 2 else asked.reply("too many", "400 Bad Request"))

    stubs.behaviours["a"] = of_two
    values = {"rollout__completions_per_prompt": 4, "rollout__limits__max_concurrent_sequences": 2}
    engine = _one_rank(files, tmp_path, rollout__servers__endpoints=f"[{stubs.url('a')}]", **values)
    sampling = Sampling(LIMIT, 1.0, 0)
    try:
        for stream in ("", "eval/x"):
            asked = [Request(Prompt(i, "", (2, 3), "", ""), c, 1, stream) for i in range(2) for c in range(4)]
            seeds = [group.seed + place for group in grouped(asked, sampling, 4)[0] for place in range(4)]
            found = [one.token_ids.tolist() for one in engine.generate(asked, sampling)]
            assert found == [completion(seed, LIMIT)[0] for seed in seeds]
            assert not stream or len(list(engine.stream(asked, sampling))) == 8
        assert len(engine.probe([Request(Prompt(0, "", (2, 3), "", ""), c, 0) for c in range(4)], sampling)) == 4
    finally:
        engine.close()


def test_what_is_given_up_half_way_is_ended_at_the_server(files: Path, tmp_path: Path, stubs: StubServers) -> None:
    """Also after some completions were taken; else the answers of the others would be the next rollout's."""
    closed = threading.Event()

    async def first_only(asked: Asked) -> None:
        if asked.body["request_id"].startswith("1-0-"):
            return await good(asked)
        await asked.reader.read()
        closed.set()

    stubs.behaviours["a"] = first_only
    engine = _one_rank(files, tmp_path, rollout__servers__endpoints=f"[{stubs.url('a')}]")
    try:
        asked = [Request(Prompt(i, "", (2, 3), "", ""), c, 1) for i in range(2) for c in range(4)]
        work = engine._plan(asked, Sampling(LIMIT, 1.0, 0))
        landing = dispatch(rank_zero(engine).fleet, work)
        next(landing)
        engine._take(work)
        landing.close()  # type: ignore[attr-defined]
        assert closed.wait(20)
    finally:
        engine.close()


def test_two_runs_at_one_server(files: Path, tmp_path: Path, stubs: StubServers) -> None:
    """Both count their weights from 1. Whoever's are there, the other does not train on what they generate."""
    where = {"rollout__servers__endpoints": f"[{stubs.url('a')}]", "rollout__limits__engine_wait_s": 2}
    said = logged_lines()
    first = _one_rank(files, tmp_path / "first", **where)
    second = _one_rank(files, tmp_path / "second", **where)
    try:
        assert _rollout(second, 1) == 16 and not said
        assert _rollout(first, 1) == 16, "after a sync of its own"
        assert sum("are not this rollout's" in line for line in said) == 1
    finally:
        first.close()
        second.close()


def test_shares_of_a_node(stubs: StubServers) -> None:
    """Three ranks take each group once, whole, and nothing is left."""
    rig = Rig([("sglang", stubs.url("a"))])
    try:
        run(rig.fleet([0], {}), requests(8))
        shares = [list(take(rig.path, rig.secret, TakeShare(share, 3))) for share in range(3)]
        groups = [{one.index for one in share} for share in shares]
        assert sorted(map(len, groups)) == [2, 3, 3] and set.union(*groups) == set(range(8))
        assert all(len(share) == 3 * len({one.index for one in share}) for share in shares)
        assert not rig.take()
    finally:
        rig.close()


def test_who_does_not_hold_the_key_gets_nothing(stubs: StubServers) -> None:
    """Neither a share nor rank 0's ear; the client goes on."""
    rig = Rig([("vllm", stubs.url("a"))])
    try:
        run(rig.fleet([0], {}), requests(2))
        with pytest.raises((messages.HandshakeFailed, RunAborted)):
            list(take(rig.path, bytes(32), TakeShare(0, 1)))
        assert len(rig.take()) == 6
    finally:
        rig.close()


def test_a_firewall_does_not_forget_a_client_that_waits_for_an_update() -> None:
    with socket.create_server(("127.0.0.1", 0)) as rank_zero:
        client = messages.connect(f"127.0.0.1:{rank_zero.getsockname()[1]}", 5)
    with client:
        assert client.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert client.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= 300


def test_both_ends_prove_the_key() -> None:
    """A listener without it learns nothing that a connecting client would accept."""
    for listens, connects in ((b"k", b"k"), (b"k", b"x"), (b"x", b"k")):
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.settimeout(5)
        errors: list[Exception] = []

        def accept(ours: socket.socket = ours, key: bytes = listens, errors: list[Exception] = errors) -> None:
            try:
                messages.handshake(ours, key, listens=True)
            except Exception as error:
                errors.append(error)
            finally:
                ours.close()

        thread = threading.Thread(target=accept)
        thread.start()
        if listens == connects:
            messages.handshake(theirs, connects, listens=False)
        else:
            with pytest.raises((messages.HandshakeFailed, ConnectionError)):
                messages.handshake(theirs, connects, listens=False)
        thread.join()
        theirs.close()
        assert bool(errors) == (listens != connects)


@settings(deadline=None)
@given(st.lists(st.binary(max_size=40), max_size=8), st.data())
def test_frames_survive_any_cutting(messages: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(map(framed, messages))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=10)))
    buffer, found = FrameBuffer(), []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += buffer.feed(stream[start:end])
    assert found == messages


@settings(deadline=None, max_examples=40)
@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4), max_size=6), st.randoms())
def test_what_is_handed_over_is_what_was_held(lengths: list[list[int]], random: object) -> None:
    """Groups of any sizes, empty completions among them, and texts of any characters, one message each."""
    rng = np.random.default_rng(len(lengths))
    held = []
    for index, sizes in enumerate(lengths):
        sampled = [
            Sampled(
                rng.integers(0, 1 << 31, size).astype(np.int32),
                rng.standard_normal(size).astype(np.float32),
                "stop",
                ((str(index + 1), 0, size),) if size else (),
            )
            for size in sizes
        ]
        grades = [Grade(float(i), extracted="ü") for i in range(len(sizes))]
        held.append(BufferedGroup(index, sampled, [f"ü{i}\n" for i in range(len(sizes))], grades))
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        thread = threading.Thread(target=hand_over, args=(ours, held))
        thread.start()
        arrived = list(take_over(theirs))
        thread.join()
    expected = [(group, position) for group in held for position in range(len(group.sampled))]
    assert len(arrived) == len(expected)
    for one, (group, position) in zip(arrived, expected, strict=True):
        sampled, found = group.sampled[position], one.completion
        assert (one.index, one.position, found.text) == (group.index, position, f"ü{position}\n")
        assert found.token_ids.tolist() == sampled.token_ids.tolist()
        assert found.logprobs.tolist() == sampled.logprobs.tolist()
        assert sum(tokens for _, tokens in found.weights_spans) == len(found.token_ids)
        assert one.grade == group.grades[position]


def test_ranks_and_servers_find_their_clients() -> None:
    nodes = Nodes.of([0, 0, 2, 2, 0], 3)
    assert (nodes.node, nodes.local_ranks, nodes.is_first, nodes.count) == (1, [2, 3], False, 2)
    urls = ["http://a:1", "http://b:1", "http://127.0.0.1:2", "http://c:1"]
    assert owners(urls, 2) == [0, 1, 0, 0] and owners(urls, 2, launched_on=[0, 0, 1, 1]) == [0, 0, 1, 1]


def _generate(config: Config, two_nodes: bool) -> tuple[dict[int, Completion], int]:
    """On every rank: two rollouts through the job's clients, without a weight sync."""
    import torch.distributed as dist

    if two_nodes:
        os.environ["LOCAL_RANK"] = str(dist.get_rank() % 2)
        os.environ["MASTER_ADDR"] = "node0"
        seen = {"node0": f"127.0.0.{1 + 2 * (dist.get_rank() // 2)}", "127.0.0.3": "127.0.0.2"}
        launched_servers.address_toward = seen.__getitem__  # type: ignore[assignment]
    job = prepare_job(config, dist.get_world_size())
    engine = ServerEngine(config, job.architecture, job.tokenizer)
    try:
        engine._sync.run = ""  # as the stubs call their weights
        if engine._zero.is_here:
            assert not two_nodes or rank_zero(engine).clients.rendezvous.address.startswith("127.0.0.2:")
            sync(rank_zero(engine).fleet)
        for step in (1, 2):
            asked = [Request(Prompt(i, "", (2, 3), "", ""), c, step) for i in range(10) for c in range(3)]
            engine.start(asked, Sampling(LIMIT, 1.0, 0))
            found = engine.finish()
            dist.barrier()  # as the loop's collectives: nobody closes while another one takes
        return found, engine._nodes.count
    finally:
        engine.close()


def _lose_a_client(config: Config) -> str:
    """On two ranks, a node each: the second one's client ends with a finished rollout that nobody has taken."""
    os.environ["LOCAL_RANK"] = "0"
    job = prepare_job(config, 2)
    engine = ServerEngine(config, job.architecture, job.tokenizer)
    take_share = engine._take

    def end_and_take(work: Work) -> dict[int, Completion]:
        if engine._nodes.node:
            assert engine._client is not None
            engine._client.process.kill()
            engine._client.process.wait()
        return take_share(work)

    engine._take = end_and_take  # type: ignore[method-assign]
    try:
        engine._sync.run = ""
        if engine._zero.is_here:
            sync(rank_zero(engine).fleet)
        engine.start([Request(Prompt(i, "", (2, 3), "", ""), 0, 1) for i in range(10)], Sampling(LIMIT, 1.0, 0))
        engine.finish()
    except RunAborted as error:
        return str(error)
    finally:
        engine.close()
    return "finished"


def test_a_client_that_dies_with_a_finished_rollout_stops_every_node(files: Path, tmp_path: Path) -> None:
    """Only its own node's ranks see it. The others once went on to collectives that those never joined."""
    with StubServers({"a": good, "b": good}) as stubs:
        urls = ",".join(map(stubs.url, "ab")).replace("127.0.0.1", "127.0.0.2")
        values = {"endpoints": f"[{urls}]", "allow_remote_endpoints": "true"}
        config = job_config(
            files, tmp_path, rollout__engine="vllm", **{f"rollout__servers__{key}": one for key, one in values.items()}
        )
        said = run_ranks(_lose_a_client, 2, config, timeout_s=60)
    assert said[0] == said[1] and said[0].startswith("node 1: this node's rollout client has ended: ")


def test_strays_join_their_group_with_their_grades(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank of node 0, whose group 0 is partly on node 1; of group 1 it has one that belongs there, and group 2 is
    another rank's of its node. Of two for one place the one that was not aborted stays, whichever came from where."""
    engine: Any = object.__new__(ServerEngine)
    engine._nodes = Nodes((0, 0, 1), 0)

    def one(reason: str) -> Completion:
        return Completion(np.empty(0, np.int64), np.empty(0, np.float32), reason, "")

    stop, length, ended = one("stop"), one("length"), one("abort")
    engine._grades = {0: Grade(1.0), 1: Grade(0.0), 4: Grade(1.0)}
    elsewhere = [(1, length, Grade(0.5)), (2, stop, None), (0, ended, Grade(0.0)), (8, stop, Grade(1.0))]
    sent: list[Any] = []
    monkeypatch.setattr(server_engine, "from_each", lambda mine: sent.extend(mine) or iter([mine, elsewhere]))
    found = {0: stop, 1: ended, 4: length}
    engine._reunite(found, {0: 0, 1: 1, 2: 0}, [[0, 1, 2], [3, 4, 5], [6, 7, 8]])
    assert found == {0: stop, 1: length, 2: stop} and sent == [(4, length, Grade(1.0))]
    assert engine._grades == {0: Grade(1.0), 1: Grade(0.5)}


def test_what_was_not_sampled_is_no_failed_grading() -> None:
    """Of a group of three, one was refused by the servers, and one fails its grader: the count is of the latter."""
    work = Work([SimpleNamespace(count=3), SimpleNamespace(count=1)], Expected(9, 0, 0))  # type: ignore[list-item]
    work.parts[1], work.lost[1] = (0, 2), "400 Bad Request"
    stop = Completion(np.empty(0, np.int64), np.empty(0, np.float32), "stop", "")
    engine: Any = object.__new__(ServerEngine)
    work.places = [[0, 1, 2]]
    engine._started = [work]
    engine._zero = SimpleNamespace(is_here=True, ask=lambda _: False, here=lambda _: None)
    engine._take = lambda *_: {0: stop, 1: stop}
    engine._grades = {0: Grade(1.0), 1: Grade(math.nan, failure="timed out after 1 s")}
    found, grades = engine.finish(), engine.take_grades()
    assert found[2].finish_reason == "abort" and grades[2].failure.endswith(": 400 Bad Request")
    selected, rewards = RolloutPrompt(Prompt(0, "", (), "", ""), 1.0, 1.0), np.array([1.0, math.nan, math.nan])
    table = GradeTable.of([Group(selected, tuple(found.values()), rewards, tuple(grades[i] for i in range(3)))])
    assert set_metrics(table, [], "code")["reward/code/failed_count"] == 1.0


@pytest.mark.parametrize(("ranks", "two_nodes"), [(1, False), (3, False), (4, True)])
def test_every_rank_holds_a_share(files: Path, tmp_path: Path, ranks: int, two_nodes: bool) -> None:
    """On one machine through one client, and as two machines of two ranks through two, the second one's over TCP:
    though rank 0's machine knows itself by a loopback name: every completion is held by one rank, a prompt's by the
    same, and is what its seed draws. A prompt's are spread over
    the servers of one client, and a part of them that is refused costs no more. Of prompt 5 that client's servers take
    one part only, so that the rest comes by way of the other client."""
    of_client = [{"a", "c"}, {"b", "d"}] if two_nodes else [{"a", "b"}]
    asked_of: dict[tuple[int, int], list[str]] = {}

    def behaving(server: str) -> Behaviour:
        async def behave(one: Asked) -> None:
            step, prompt, first = map(int, one.body["request_id"].split(".")[0].split("-"))
            if prompt == 7 or (prompt, first) == (4, 2):
                return await one.reply("too long", "400 Bad Request")
            if two_nodes and prompt == 5 and step == 2:
                [mine] = [names for names in of_client if server in names]
                if mine & {*asked_of.get((step, prompt), ())}:
                    return await one.reply("busy", "429 Too Many Requests", "Retry-After: 30\r\n")
            asked_of.setdefault((step, prompt), []).append(server)
            await good(one)

        return behave

    with StubServers({name: behaving(name) for name in sorted(set.union(*of_client))}) as stubs:
        urls = ",".join(map(stubs.url, sorted(set.union(*of_client))))
        values = {"rollout__servers__endpoints": f"[{urls}]", "rollout__engine": "vllm"}
        if two_nodes:  # another name for loopback, which is not taken for rank 0's alone
            values = {name: value.replace("127.0.0.1", "127.0.0.2") for name, value in values.items()}
            values["rollout__servers__allow_remote_endpoints"] = "true"
        config = job_config(files, tmp_path, rollout__completions_per_prompt=3, **values)
        shares = run_ranks(_generate, ranks, config, two_nodes)
    positions = [position for share, _ in shares for position in share]
    assert sorted(positions) == list(range(30)) and all(count == 1 + two_nodes for _, count in shares)
    prompts = [{position // 3 for position in share} for share, _ in shares]
    assert sum(map(len, prompts)) == 10 and all(
        len(share) == 3 * len(mine) for (share, _), mine in zip(shares, prompts, strict=True)
    )
    assert all(mine for mine in prompts), "each rank of each node has some"
    asked = [Request(Prompt(i, "", (2, 3), "", ""), c, 2) for i in range(10) for c in range(3)]
    groups, places = grouped(asked, Sampling(LIMIT, 1.0, 0), 3)
    strayed = {*asked_of.pop((2, 5))}
    assert all(strayed & names for names in of_client) and len(strayed) == 2
    whole = {prompt: {*servers} for prompt, servers in asked_of.items() if prompt[1] != 4}
    assert len(whole) == 15 and all(servers in of_client for servers in whole.values())
    missing = {14, 21, 22, 23}
    for share, _ in shares:
        for position, one in share.items():
            group = groups[position // 3]
            if position in missing:
                assert one.finish_reason == "abort" and not len(one.token_ids)
                continue
            tokens, logprobs, reason = completion(group.seed + position % 3, LIMIT)
            assert one.token_ids.tolist() == tokens and one.finish_reason == reason
            np.testing.assert_allclose(one.logprobs, logprobs, rtol=1e-6)
            assert places[position // 3][position % 3] == position and one.weights_spans == ((1, len(tokens)),)
