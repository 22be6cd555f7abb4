"""A weight sync over servers that only take weights, each in a process of its own: what arrives, in which order servers
are asked, who is live when one dies or hangs, and what counts as a proof."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from support.fake_fleet import fleet_of
from support.launch import run_ranks
from support.logged import logged_lines
from support.settings import rollout_config

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from receivers import PipeServer

from dppo_megatron.config.rollout import RolloutConfig
from dppo_megatron.rollout.servers.device_map import RankDevice, ranks_of_workers, servers_devices, visible_devices
from dppo_megatron.rollout.servers.fleet import Fleet
from dppo_megatron.rollout.servers.http import Refused, Unreachable
from dppo_megatron.rollout.servers.member import Member
from dppo_megatron.rollout.servers.protocol import GroupRendezvous, TensorNote
from dppo_megatron.rollout.sync import broadcast, weight_sync
from dppo_megatron.rollout.sync.broadcast import (
    BroadcastChannel,
    BroadcastGroup,
    ChainGroup,
    listening_store,
)
from dppo_megatron.rollout.sync.channels import Bucket, BucketChannel, buckets, in_thread, on_each
from dppo_megatron.rollout.sync.colocated import SharedMemoryChannel, vllm_offer
from dppo_megatron.rollout.sync.receipts import MOST_MISSED, Digests
from dppo_megatron.rollout.sync.weight_sync import ServerSide, WeightSync
from dppo_megatron.types import RunAborted, UserError

BUCKET = 5 << 20
SHAPES = [(640, 1024)] * 6 + [(7,), (3, 5), (2000, 1024), (11,)]
"""Six of 2.6 MB, of which two make a bucket; small ones; and one of 8.2 MB, larger than a bucket and than a chunk."""


def _weights(seed: int) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [(f"t{i}", torch.randn(shape, generator=generator)) for i, shape in enumerate(SHAPES)]


def _digest(weights: Sequence[tuple[str, torch.Tensor]]) -> str:
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for _, tensor in weights)).hexdigest()


def _config(**values: Any) -> RolloutConfig:
    base = {"engine": "vllm", "servers.launch": "local", "sync.verify_every": 0, "limits.probe_timeout_s": 1.0}
    return rollout_config(base | {"limits.engine_wait_s": 5.0, "limits.sync_timeout_s": 60.0} | values)


class Running:
    """Servers of a test, ended with it."""

    def __init__(self) -> None:
        self.servers: list[PipeServer] = []
        self.said = logged_lines()

    def sync(self, *servers: PipeServer, **values: Any) -> tuple[WeightSync, Fleet, BroadcastChannel]:
        self.servers += servers
        for server in servers:
            server.healthy(timeout_s=60)  # until it has started
            server.calls.clear()
        config = _config(**values)
        fleet = fleet_of(servers, config)
        channel = BroadcastChannel(fleet, "gloo", BUCKET, config.limits.sync_timeout_s)
        return WeightSync(config, channel, fleet), fleet, channel


@pytest.fixture
def running() -> Iterator[Running]:
    found = Running()
    yield found
    for server in found.servers:
        server.stop()


def _server_side(sync: WeightSync) -> ServerSide:
    side = sync._zero.here(lambda zero: zero)
    assert side is not None
    return side


def _noting(send: Callable[[torch.Tensor], None], sent: list[int], memory: torch.Tensor) -> None:
    sent.append(memory.nbytes)
    send(memory)


def _holds(server: PipeServer, weights: Sequence[tuple[str, torch.Tensor]], version: str) -> bool:
    """All bytes of these weights and no others, under this version."""
    right = server.checksums(timeout_s=20)[0]["all"] == _digest(weights)
    return right and server.weights_version(timeout_s=20) == version


def test_all_servers_get_the_same_bytes_in_one_broadcast(running: Running) -> None:
    """Three servers, two syncs: the trainer sends each bucket once, and joins them to one group, once."""
    servers = [PipeServer(i) for i in range(3)]
    sync, fleet, channel = running.sync(*servers)
    sent: list[int] = []
    for version, seed in enumerate((1, 2), start=1):
        weights = _weights(seed)
        sync.to(lambda w=weights: w)
        assert all(_holds(server, weights, str(version)) for server in servers)
        group = channel._group
        assert isinstance(group, ChainGroup)
        group.send = partial(_noting, group.send, sent)  # type: ignore[method-assign]
    assert len(fleet.live) == 3 and [server.calls.count("join") for server in servers] == [1, 1, 1]
    assert sum(sent) == sum(tensor.nbytes for _, tensor in weights), "one copy leaves, whatever the number of servers"


def test_a_killed_server_costs_the_others_one_more_pass(running: Running) -> None:
    """It dies in the second bucket: the others are live with all of the new weights when the sync returns, and it is
    out. Started again, it is live after a later sync, of all tensors."""
    servers = [PipeServer(0), PipeServer(1, dies_at=1), PipeServer(2), PipeServer(3)]
    sync, fleet, _ = running.sync(*servers)
    sync.to(lambda: _weights(1))
    assert [member.state for member in fleet.members] == ["live", "out", "live", "live"]
    assert fleet.members[1].condition.startswith("out: weight sync failed")
    assert all(_holds(servers[i], _weights(1), "1") for i in (0, 2, 3))
    assert [servers[i].calls.count("begin") for i in (0, 2, 3)] == [2, 2, 2]
    servers[1].start(dies_at=-1)
    servers[1].healthy(timeout_s=60)  # until it has started
    sync.to(lambda: _weights(2))
    assert len(fleet.live) == 4 and all(_holds(server, _weights(2), "2") for server in servers)


class _Occupied(PipeServer):
    """Another program has its place in the first group."""

    taken = ""

    def join_group(self, meeting: GroupRendezvous, first_rank: int, *, timeout_s: float) -> None:
        self.taken = self.taken or meeting.name
        if meeting.name != self.taken:
            super().join_group(meeting, first_rank, timeout_s=timeout_s)


def test_a_stranger_in_a_group_costs_the_pass(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """No bucket is sent, it is said, and the server has the weights after another group was made."""
    server = _Occupied(0)

    def own_group(meeting: GroupRendezvous, _: object) -> BroadcastGroup:
        server.taken = server.taken or meeting.name
        if meeting.name == server.taken:
            raise RuntimeError("the program that connected as member 1 of the group does not know its secret")
        return ChainGroup(meeting)

    monkeypatch.setattr(broadcast, "own_group", own_group)
    sync, fleet, _ = running.sync(server, **{"sync.verify_every": 0})
    sync.to(lambda: _weights(1))
    assert fleet.live and _holds(server, _weights(1), "1")
    assert any("does not know its secret" in line for line in running.said)


def test_a_transfer_has_a_time_of_its_own(running: Running) -> None:
    """A server that gets nothing gives up, and so does a trainer whose server takes nothing, when the time for a
    transfer is over, though that for joining is an hour: else the request would time out first, and who only waited
    would count as dead."""
    server = PipeServer(0)
    running.servers.append(server)
    joining, store = timedelta(hours=1), listening_store("127.0.0.1", 2, timedelta(hours=1))
    meeting = GroupRendezvous("test", "gloo", "127.0.0.1", store, 2, joining, timedelta(seconds=0.2))
    own = in_thread(lambda: ChainGroup(meeting))
    server.join_group(meeting, 1, timeout_s=120)
    group = own.result()
    with pytest.raises(Refused, match="the weights stopped coming"):
        server.receive([TensorNote("t", "uint8", (8,))], timeout_s=120)
    with pytest.raises(RuntimeError):
        group.send(torch.zeros(64 << 20, dtype=torch.uint8))
    group.abandon()


@pytest.mark.slow
def test_a_hung_server_does_not_take_the_others_with_it(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGSTOP in the second bucket: its neighbours in the broadcast give up before their requests time out, and are not
    to blame. It comes back by a later sync."""
    servers = [PipeServer(0), PipeServer(1, hangs_at=1), PipeServer(2)]
    monkeypatch.setattr(broadcast, "_SHORTER", 0.5)  # half of the time for a busy machine to say that it gives up
    sync, fleet, _ = running.sync(*servers, **{"limits.sync_timeout_s": 10.0, "limits.probe_timeout_s": 4.0})
    sync.to(lambda: _weights(3))
    assert [member.state for member in fleet.members] == ["live", "out", "live"]
    assert _holds(servers[0], _weights(3), "1") and _holds(servers[2], _weights(3), "1")
    os.kill(servers[1].process.pid, signal.SIGCONT)
    for _ in range(4):  # it may first have to find out that what it waits for does not come
        sync.to(lambda: _weights(4))
        if len(fleet.live) == 3:
            break
    assert len(fleet.live) == 3 and all(_holds(server, _weights(4), str(sync.version)) for server in servers)


def test_with_nobody_left_the_sync_says_so(running: Running) -> None:
    """The only server dies and stays dead: the run is stopped, with its name."""
    sync, _, _ = running.sync(PipeServer(0, dies_at=0), **{"limits.engine_wait_s": 1.0})
    with pytest.raises(
        RunAborted, match=r"no rollout server has taken weight sync 1 in .* \(pipe.*:0 out: weight sync failed"
    ):
        sync.to(lambda: _weights(1))


def test_servers_wake_in_two_steps_around_the_weights(running: Running) -> None:
    """Weights before the update, the cache after it, and no token before the version was read back."""
    server = PipeServer(0)
    sync, fleet, _ = running.sync(server)
    sync.sleep()
    sync.to(lambda: _weights(1))
    assert [call for call in server.calls if call not in ("healthy", "receive")] == [
        "sleep", "wake weights", "pause", "begin", "join", "end", "wake kv_cache", "resume", "version",
    ]  # fmt: skip
    assert fleet.live and _server_side(sync).stage == "done"


class Told:
    """A server in this process that does what it is told; `fails` makes it refuse an update."""

    shows_checksums = True

    def __init__(self, name: str, fails: bool = False, woken: Callable[[], None] = lambda: None) -> None:
        self.http = type("Address", (), {"url": name, "close": lambda self: None})()
        self.calls: list[str] = []
        self.fails, self.version, self.woken = fails, "", woken

    def healthy(self, *, timeout_s: float) -> None: ...

    def sleep(self, awake: Any, *, keeps: bool = False, timeout_s: float) -> None:
        self.calls.append("sleep and keep" if keeps else "sleep")

    def wake(self, what: str, *, timeout_s: float) -> None:
        self.calls.append(f"wake {what}")
        if what == "kv_cache":
            self.woken()

    def pause(self, in_flight: str, *, timeout_s: float) -> None:
        self.calls.append("pause")

    def resume(self, *, timeout_s: float) -> None:
        self.calls.append("resume")

    def weights_version(self, *, timeout_s: float) -> str:
        return self.version


class Telling:
    """A channel that moves no bytes, to servers of this process."""

    name, not_to_blame, receivers = "telling", (), (0,)

    def __init__(self, fleet: Fleet | None, pushed: Callable[[], Any] = lambda: None) -> None:
        self._fleet, self._pushed = fleet, pushed

    def push(self, tensors: Any, members: Sequence[Member], version: str) -> list[Member]:
        assert self._fleet is not None
        self.take_part(tensors, ())

        def take(member: Member) -> None:
            server = cast(Told, member.server)
            server.calls.append("update")
            if server.fails:
                raise Unreachable("it has died")
            server.version = version

        took = on_each(self._fleet, members, take)
        self._pushed()
        return took

    def take_part(self, tensors: Any, names: Any) -> None:
        for _ in tensors:
            pass


def test_a_colocated_server_that_was_started_again_sleeps_first() -> None:
    """A fresh process has all of its memory, where the actor's weights are about to come back. While another server is
    live, who has failed waits for the next sync: the actor's weights would be beside that one's cache."""
    good, bad = Told("a"), Told("b", fails=True)
    config = _config(**{"servers.colocate": True})
    fleet = fleet_of([good, bad], config)
    sync = WeightSync(config, cast(Any, Telling(fleet)), fleet)
    sync.sleep()
    sync.to(lambda: _weights(1))
    assert [member.state for member in fleet.members] == ["live", "out"] and bad.calls.count("update") == 1
    bad.fails, bad.calls = False, []
    with fleet.lock:
        fleet.members[1].restarted()

    def weights() -> list[tuple[str, torch.Tensor]]:
        bad.calls.append("the actor's weights come back")
        return _weights(2)

    sync.to(weights)
    room = ["sleep", "the actor's weights come back", "wake weights", "pause"]
    assert bad.calls == [*room, "update", "wake kv_cache", "resume"] and len(fleet.live) == 2


def test_a_colocated_server_sleeps_over_requests_that_go_on() -> None:
    """What an outage has left there is ended all the same: others have answered it."""
    servers = Told("a"), Told("b")
    config = _config(**{"servers.colocate": True, "sync.in_flight": "continue"})
    fleet = fleet_of(servers, config)
    sync = WeightSync(config, cast(Any, Telling(fleet)), fleet)
    sync.to(lambda: _weights(1))
    fleet.mark_out(fleet.members[1], "a broken connection")
    sync.sleep(keeps=True)
    assert [server.calls[-1] for server in servers] == ["sleep and keep", "sleep"]
    sync.to(lambda: _weights(2))
    assert servers[0].calls[-5:] == ["wake weights", "pause", "update", "wake kv_cache", "resume"]


def test_requests_that_are_to_finish_are_asked_under_the_old_weights() -> None:
    """Servers are live until the rollout has ended, so that what still waits for room does not wait for the sync."""
    fleet = fleet_of([Told("a"), Told("b")], _config())
    seen: list[list[str]] = []
    sync = WeightSync(
        _config(), cast(Any, Telling(fleet)), fleet, lambda: seen.append([member.state for member in fleet.members])
    )
    for seed in (1, 2, 3):
        sync.to(lambda seed=seed: _weights(seed))
    assert seen == [["stale", "stale"], ["live", "live"], ["live", "live"]]


def _meeting(config: RolloutConfig, directory: Path) -> list[bool]:
    """On rank 0: whether rank 1 had walked the stream to its end when the server was to wake its cache."""
    told: list[bool] = []
    pushed, ended, is_first = directory / "pushed", directory / "ended", torch.distributed.get_rank() == 0
    server = Told("a", woken=lambda: told.append(ended.exists()))
    fleet = fleet_of([server], config) if is_first else None

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        yield "t", torch.ones(1)
        if not is_first:
            while not pushed.exists():
                time.sleep(0.01)
            ended.touch()

    sync = WeightSync(config, cast(Any, Telling(fleet, pushed.touch)), fleet)
    if is_first:
        sync.sleep()
    sync.to(stream)
    return told


def test_caches_wake_when_every_rank_has_handed_over(tmp_path: Path) -> None:
    """Rank 1 ends its stream after rank 0 has sent everything: the server's cache wakes after that."""
    assert run_ranks(_meeting, 2, _config(**{"servers.colocate": True}), tmp_path)[0] == [True]


class _Nameless:
    """A server that is not asked for anything."""

    http = type("Address", (), {"url": "pipe://nobody"})


class OneBehind(BucketChannel):
    """Takes a bucket only when the stream has been asked for the next one."""

    def __init__(self, fleet: Fleet, asked: list[threading.Event]) -> None:
        super().__init__(fleet, 4, 10.0)
        self.asked, self.in_time = asked, []

    def _prepare(self, members: Sequence[Member]) -> list[Member]:
        return list(members)

    def _hand_over(self, members: Sequence[Member], bucket: Bucket, offers: object) -> list[Member]:
        following = len(self.in_time) + 1
        self.in_time.append(following == len(self.asked) or self.asked[following].wait(10))
        return list(members)

    def close(self) -> None: ...


def test_the_next_bucket_is_gathered_while_one_is_handed_over() -> None:
    """And no more than the next: what has been asked for when bucket k is taken is k + 1."""
    asked = [threading.Event() for _ in range(5)]

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for number, event in enumerate(asked):
            event.set()
            assert number < 3 or len(channel.in_time) >= number - 2, "the stream runs away"
            yield str(number), torch.ones(1)

    channel = OneBehind(fleet_of([_Nameless()], _config()), asked)
    assert channel.push(stream(), [], "1") == [] and channel.in_time == [True] * 5


def test_a_bucket_is_sent_as_it_lies() -> None:
    """Tensors that the stream has laid end to end are not copied; loose ones are. No bucket spans two such pieces."""
    memory = torch.arange(24, dtype=torch.float32)
    first, second = memory[:6].view(2, 3), memory[6:24]
    flat = Bucket([("a", first), ("b", second)]).flat()
    assert flat.data_ptr() == memory.data_ptr() and torch.equal(flat, memory.view(torch.uint8))
    loose = Bucket([("a", first), ("b", torch.ones(2))]).flat()
    assert torch.equal(loose.view(torch.float32), torch.cat([first.flatten(), torch.ones(2)]))
    other = torch.zeros(4)
    found = [
        [name for name, _ in bucket.tensors] for bucket in buckets([("a", first), ("b", second), ("c", other)], 999)
    ]
    assert found == [["a", "b"], ["c"]]


def _through_memory(config: RolloutConfig, servers: list[PipeServer]) -> Any:
    """Two ranks, a server beside each; rank 0 speaks to both over the pipes that it has inherited."""
    fleet = fleet_of(servers, config) if torch.distributed.get_rank() == 0 else None
    beside = {server.http.url: (rank,) for rank, server in enumerate(servers)}
    channel = SharedMemoryChannel(fleet, beside, _noted(vllm_offer), BUCKET, 3600)
    patience = channel._group._get_backend(torch.device("cpu")).options._timeout
    assert patience > timedelta(hours=3), "a bucket and the end of an update, of an hour a call, are waited for"
    sync = WeightSync(config, channel, fleet)
    right = []
    for version, seed in enumerate((1, 2), start=1):
        sync.to(lambda s=seed: _weights(s))
        right += [_holds(server, _weights(seed), str(version)) for server in servers if fleet is not None]
    offered = len(OFFERED)
    if fleet is not None:
        os.kill(servers[1].process.pid, signal.SIGKILL)
        fleet.mark_out(fleet.members[1], "it has ended")
    sync.to(lambda: _weights(3))
    right += [_holds(servers[0], _weights(3), "3")] if fleet is not None else []
    return list(channel.receivers), offered, right, len(OFFERED) - offered


OFFERED: list[str] = []


def _noted(offer: Callable[..., Any]) -> Callable[..., Any]:
    def noted(*arguments: Any) -> Any:
        found = offer(*arguments)
        OFFERED.append(found["path"])
        assert found["path"].startswith(f"/proc/{os.getpid()}/"), "each rank offers memory of its own"
        return found

    return noted


def test_each_rank_hands_its_buffer_to_the_server_beside_it(running: Running) -> None:
    """Both ranks take part in every bucket, each for its own server; rank 0 alone speaks to both. Nothing is offered to
    one that is out: on a GPU the offer would keep its memory."""
    running.servers += [PipeServer(0), PipeServer(1)]
    results = run_ranks(_through_memory, 2, _config(), running.servers)
    (receivers, offers, right, last), (_, offers_of_other, _, last_of_other) = results
    num_buckets = len(list(buckets(_weights(1), BUCKET)))
    assert receivers == [0, 1] and right == [True] * 5
    assert offers == offers_of_other == 2 * num_buckets and (last, last_of_other) == (num_buckets, 0)


def _without_files(config: RolloutConfig) -> str:
    """What stops the sync on this rank. Both have to give the server what it is to map."""
    server = Told("a")

    def pause(in_flight: str, *, timeout_s: float) -> None:
        raise RunAborted("the trainer cannot open a connection: Too many open files")

    server.pause = pause  # type: ignore[method-assign]
    fleet = fleet_of([server], config) if dist.get_rank() == 0 else None
    channel = SharedMemoryChannel(fleet, {"a": (0, 1)}, vllm_offer, BUCKET, 60)
    sync = WeightSync(config, channel, fleet)
    with pytest.raises(RunAborted) as stopped:
        sync.to(lambda: _weights(1))
    return str(stopped.value)


def test_what_stops_rank_zero_before_the_stream_stops_all() -> None:
    """Others would wait in the exchange of offers, which it does not enter."""
    assert (
        run_ranks(_without_files, 2, _config(), timeout_s=60)
        == ["the trainer cannot open a connection: Too many open files"] * 2
    )


@pytest.mark.parametrize("proves", [0, 1])
def test_what_breaks_the_stream_is_no_failure_to_hand_over(proves: int) -> None:
    """Rank 0 would meet the others no more: they wait in the stream for what it has not gathered."""

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        yield "t", torch.ones(1)
        raise torch.OutOfMemoryError("CUDA out of memory")

    config = _config(**{"sync.verify_every": proves})
    fleet = fleet_of([Told("a")], config)
    sync = WeightSync(config, cast(Any, Telling(fleet)), fleet)
    with pytest.raises(torch.OutOfMemoryError):
        sync.to(stream)


def test_ranks_are_found_by_their_devices() -> None:
    """By UUID whatever the numbers; a worker on a GPU without a rank has none; ranks of a CPU take turns."""
    ranks = [RankDevice(0, frozenset(names)) for names in (("GPU-a", "0"), ("GPU-b", "1"))]
    assert ranks_of_workers(ranks, ("GPU-b", "GPU-a"), 0) == (1, 0) and ranks_of_workers(ranks, ("0",), 5) == (0,)
    assert ranks_of_workers(ranks, ("GPU-a", "GPU-c"), 0) is None and ranks_of_workers(ranks, (), 0) is None
    assert ranks_of_workers([*ranks, RankDevice(1, frozenset(("GPU-c",)))], ("GPU-c",), 0) is None
    shared = [RankDevice(0, frozenset(("cpu",)))] * 2
    assert [ranks_of_workers(shared, ("cpu", "cpu"), turn) for turn in range(3)] == [(0, 0), (1, 1), (0, 0)]
    assert visible_devices("2, 3") == ["2", "3"]
    assert servers_devices(["0,1"], "2,3", 0) == ["2,3"] and servers_devices(["1", " 0"], "GPU-a, GPU-b", 0) == [
        "GPU-b",
        "GPU-a",
    ]
    assert servers_devices(["2", "3"], "4,5,6,7", 2) == ["6", "7"], "beside two ranks"
    for gpus, inherited, training in ((["0,2"], "2,3", 0), (["0"], "4,5", 1), (["GPU-a"], "4,5", 0), (["1"], "", 0)):
        assert servers_devices(gpus, inherited, training) == gpus, "CUDA's own"
    assert servers_devices(["1", "2"], "0,1,2", 2) == ["1", "2"], "either way"
    said = (
        r"position 1 in CUDA_VISIBLE_DEVICES = 4,5,6,7 is a training rank's GPU \(2 train .* but 2 is not: use .* 2 on"
    )
    with pytest.raises(UserError, match=said):
        servers_devices(["1", "2"], "4,5,6,7", 2)
    two_nodes = [RankDevice(node, frozenset((name,))) for node in (0, 1) for name in ("0", "1")]
    assert ranks_of_workers(two_nodes, ("1", "0"), 0, node=1) == (3, 2), "GPUs of two machines may have one number"


class Silent(PipeServer):
    """Takes weights, and gives no checksums while it is silent; all of them are asked before any answers."""

    together = threading.Barrier(1)
    silent = False

    def checksums(self, *, timeout_s: float) -> list[dict[str, str]]:
        self.together.wait(30)
        if self.silent:
            raise Unreachable(f"{self.http.url}: TimeoutError: timed out")
        return super().checksums(timeout_s=timeout_s)


def test_no_answer_is_no_proof_and_no_outage(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `verify_every` far away: the first sync is proven, and so is each after one that nobody answered for, until
    somebody answers. Too often in a row is the end. All servers are asked at the same time."""
    monkeypatch.setattr(Silent, "together", threading.Barrier(2))
    servers = [Silent(0), Silent(1)]
    sync, fleet, _ = running.sync(*servers, **{"sync.verify_every": 1000})
    monkeypatch.setattr(Silent, "silent", True)
    proven = [sync.to(lambda: _weights(1)) for _ in range(MOST_MISSED - 1)]
    assert proven == [True] * (MOST_MISSED - 1) and len(fleet.live) == 2
    assert sum("receipt not taken" in line for line in running.said) == MOST_MISSED - 1
    monkeypatch.setattr(Silent, "silent", False)
    assert sync.to(lambda: _weights(1)) and not sync.to(lambda: _weights(1))
    monkeypatch.setattr(Silent, "silent", True)
    sync._is_proven = True
    _server_side(sync)._checksums._missed = MOST_MISSED - 1
    with pytest.raises(RunAborted, match="no rollout server has answered for its checksums"):
        sync.to(lambda: _weights(1))


def test_checksums_are_taken_where_there_is_something_to_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proven sync hashes nothing for servers with tensor or pipeline splits, and asks those that show whole ones."""
    servers, hashed = (Told("whole"), Told("split")), []

    class Counted(Digests):
        def __init__(self) -> None:
            super().__init__()
            hashed.append(self)

    def checksums(server: Told, *, timeout_s: float) -> list[dict[str, str]]:
        server.calls.append("checksums")
        return [{}]

    monkeypatch.setattr(weight_sync, "Digests", Counted)
    monkeypatch.setattr(Told, "checksums", checksums, raising=False)
    servers[1].shows_checksums = False
    for asked in (servers, servers[1:]):
        config = _config(**{"sync.verify_every": 1})
        fleet = fleet_of(asked, config)
        sync = WeightSync(config, cast(Any, Telling(fleet)), fleet)
        assert sync.to(lambda: _weights(1)), "the canary is due all the same"
    assert len(hashed) == 1 and [server.calls.count("checksums") for server in servers] == [1, 0]


def _due_after_silence(config: RolloutConfig) -> list[bool]:
    """Whether the canary is due on this rank after each of three syncs; nobody answers for the first."""
    server = Told("a")

    def checksums(*, timeout_s: float) -> list[dict[str, str]]:
        if sync.version == 1:
            raise Refused(500, "out of memory while hashing")
        return [{}]

    server.checksums = checksums  # type: ignore[attr-defined]
    fleet = fleet_of([server], config) if dist.get_rank() == 0 else None
    sync = WeightSync(config, cast(Any, Telling(fleet)), fleet)
    return [sync.to(lambda: _weights(1)) for _ in range(3)]


def test_every_rank_knows_whether_a_sync_is_proven() -> None:
    """Rank 0 alone hears the answers, and all ranks ask for the canary or none does."""
    assert run_ranks(_due_after_silence, 2, _config(**{"sync.verify_every": 1000})) == [[True, True, False]] * 2
