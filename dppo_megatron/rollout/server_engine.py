"""Servers as the loop's engine: rank 0 decides, a client on each node asks, every rank takes its share.

    rank 0     start: plan of groups -> rollout thread (fleet.py) <-> clients (client/remote.py) <-> servers
    any rank   start: the same plan, for the places of what it will hold
               finish: waits for rank 0's broadcast over gloo, then takes its share from its node's client
    rank 0     load_weights: main thread; the rollout thread is done, or its requests are treated by
               `rollout.sync.in_flight`

One rank decides, so load balance, retries and weights version are state in one place and no protocol between ranks. It
decides from scalars, so the number of tokens does not matter.
"""

from __future__ import annotations

import pickle
import secrets
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from dppo_megatron.config.schema import Config
from dppo_megatron.distributed import barrier, from_rank_zero, gather_all, rank
from dppo_megatron.launcher_env import launched_node
from dppo_megatron.rollout.client.completion_buffer import completion_of, spans_of
from dppo_megatron.rollout.client.grading_hook import Detokenizer, HookFactory
from dppo_megatron.rollout.client.messages import ServerAddress
from dppo_megatron.rollout.client.process import Setup
from dppo_megatron.rollout.client.remote import (
    ClientRendezvous,
    Clients,
    Listener,
    NodeClient,
    Nodes,
    owners,
    take,
)
from dppo_megatron.rollout.engine import Engine, Request, RolloutStats, Sampling, Weights
from dppo_megatron.rollout.job_nodes import NodeSupervisor, launch_everywhere
from dppo_megatron.rollout.servers.connect import ChannelName, ConnectedServers, connect
from dppo_megatron.rollout.servers.device_map import DeviceMap, this_device
from dppo_megatron.rollout.servers.dispatch import NeedsWeights, Work, dispatch, grouped
from dppo_megatron.rollout.servers.fleet import Fleet
from dppo_megatron.rollout.servers.health_file import HealthFile
from dppo_megatron.rollout.servers.http import Peer
from dppo_megatron.rollout.servers.member import Member
from dppo_megatron.rollout.servers.membership import Membership
from dppo_megatron.rollout.servers.protocol import Generator
from dppo_megatron.rollout.servers.router import RouterServer
from dppo_megatron.rollout.servers.server_process import ServerProcess, stop_all
from dppo_megatron.rollout.servers.wire import Expected
from dppo_megatron.rollout.sync.broadcast import BroadcastChannel
from dppo_megatron.rollout.sync.channels import Channel, DiskChannel, drain, in_thread
from dppo_megatron.rollout.sync.colocated import OFFERS, SharedMemoryChannel
from dppo_megatron.rollout.sync.receipts import ask_for_canary
from dppo_megatron.rollout.sync.weight_sync import WeightSync
from dppo_megatron.types import Completion, Grade, RunAborted
from dppo_megatron.weights.architecture import Architecture

_PROBE_S = 120.0


class ServerEngine(Engine):
    """vLLM or SGLang servers as configured in `rollout`. Collective, like every `Engine`.

    Args:
        client_hook: makes what grades completions in the rollout clients; picklable.

    Raises:
        UserError: a server cannot be reached, serves another model, is too old, or was started without what is needed.
    """

    has_servers = True

    def __init__(
        self,
        config: Config,
        architecture: Architecture,
        tokenizer: PreTrainedTokenizerBase,
        client_hook: HookFactory | None = None,
    ) -> None:
        self._config = config
        self._detokenizer, self._vocab_size = Detokenizer.of(tokenizer), architecture.vocab_size
        self._stop_ids = (int(tokenizer.eos_token_id),)
        self._nodes = Nodes.of(gather_all([launched_node(rank())]), rank())
        self._grades: dict[int, Grade] = {}
        self._grades_in_client = client_hook is not None
        self._stats = RolloutStats()
        self._started: _Background | None = None
        self._head: _RankZero | None = None
        """On rank 0."""
        self._client: NodeClient | None = None
        self._channel: Channel | None = None
        self._supervisor: NodeSupervisor | None = None
        launched: list[ServerProcess] = []
        try:
            devices = gather_all([this_device(self._nodes.node)])
            if config.rollout.servers.launch == "local":
                launched, self._supervisor = launch_everywhere(config, self._nodes)

            def connected() -> tuple[ClientRendezvous, list[int], str, ChannelName, DeviceMap]:
                """On rank 0: reach every server, and wait for the clients from now on."""
                found = connect(config, architecture, devices, launched)
                self._head = head = _RankZero(config, architecture, found, launched, self._nodes.count)
                return head.meeting, head.nodes, found.description, found.channel, found.seats

            meeting, self._owners, self.description, channel, seats = from_rank_zero(connected)
            self._secret, self._take_path = meeting.secret, meeting.take_path(self._nodes.node)
            if self._nodes.is_first and self._nodes.node in self._owners:
                path, decode = self._take_path, self._detokenizer
                client = Setup(self._nodes.node, meeting.address, meeting.secret, path, decode, client_hook)
                self._client = NodeClient(client)
            from_rank_zero(lambda: self._zero.await_clients())
            self._channel = self._make_channel(channel, seats)
        except BaseException:
            self.close()
            stop_all(launched)
            raise
        run, fleet = from_rank_zero(lambda: secrets.token_hex(4)), self._head.fleet if self._head is not None else None
        self._sync = WeightSync(config.rollout, self._channel, fleet, self._settle_requests, run)

    @property
    def receivers(self) -> Sequence[int]:
        """See `Engine.receivers`: rank 0, or the ranks on the servers' GPUs."""
        return self._sync.receivers

    def load_weights(self, weights: Weights, release: Callable[[], None] = lambda: None) -> bool:
        """Sync every server that answers; see `sync/weight_sync.py`. Raises RunAborted if none has the weights in the
        end."""
        if self._config.rollout.servers.colocate:
            torch.cuda.empty_cache()  # what the update has freed is the servers' now, and torch would keep it
            barrier()
        return self._sync.to(weights, release)

    def stream(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[tuple[int, Completion]]:
        """See `Engine.stream`. With several ranks all of it comes at the end."""
        if len(self._nodes.of_rank) > 1:
            self.start(requests, sampling)
            yield from self.finish().items()
            return
        work, places = self._plan(requests, sampling)
        while True:
            try:
                for _ in dispatch(self._fleet, work):
                    yield from self._take(places).items()
                break
            except NeedsWeights:
                self._sync.again()
        yield from self._take(places).items()
        self._count(work)

    def start(self, requests: Sequence[Request], sampling: Sampling) -> None:
        """Begin generating in the background; `finish` returns what `generate` would."""
        work, places = self._plan(requests, sampling)
        self._started = _Background(work, places)
        if self._head is not None:
            self._started.begin(self._fleet)

    def finish(self) -> dict[int, Completion]:
        """Wait for what `start` began. The completions are those that this node's client has taken in, shared evenly
        by its ranks; a training prompt's stay together."""
        started = self._started
        assert started is not None, "start comes first"
        self._started = None
        while from_rank_zero(started.wait):
            self._sync.again()
            if self._head is not None:
                started.begin(self._fleet)
        if self._head is not None:
            self._count(started.work)
        return self._take(started.places)

    def take_grades(self) -> dict[int, Grade]:
        """The hook's grades of the completions of the last `finish`, by position in its requests; empty without a
        hook, and for requests of a stream."""
        taken, self._grades = self._grades, {}
        return taken

    def probe(self, requests: Sequence[Request], sampling: Sampling) -> list[tuple[str, Completion]]:
        """See `Engine.probe`. All servers at once. One without a whole answer in `_PROBE_S` is logged and left out of
        the result; whether it is out is decided by its health probe."""
        return from_rank_zero(lambda: self._probe(self._plan(requests, sampling)[0]))

    def _probe(self, work: Work) -> list[tuple[str, Completion]]:
        """On rank 0."""
        answers: list[tuple[str, Completion]] = []
        for name, sampled in ask_for_canary(self._fleet, work.groups, work.expected, _PROBE_S):
            texts = self._detokenizer.decode([one.token_ids for one in sampled])
            answers += [
                (name, completion_of(one.token_ids, one.logprobs, one.finish_reason, spans_of(one), text))
                for one, text in zip(sampled, texts, strict=True)
            ]
        return answers

    def abort(self) -> None:
        """Also at the servers, so that they do not generate what is not read."""
        started, self._started = self._started, None
        if started is not None and self._head is not None:
            started.work.given_up = True
            started.join()
            self._head.clients.cancel(list(started.work.landed))

    def rest(self) -> None:
        """No generation until the next `load_weights`: colocated servers give their device memory back."""
        if self._config.rollout.servers.colocate:  # every rank waits: before, the servers still hold its GPU
            from_rank_zero(lambda: self._sync.sleep())

    def health(self) -> dict[str, str]:
        """As rank 0 sees it."""
        return from_rank_zero(lambda: self._fleet.health())

    def statistics(self) -> RolloutStats:
        taken, self._stats = self._stats, RolloutStats()
        taken.sync_s, taken.tensors_verified = self._sync.take_figures()
        return taken

    def close(self) -> None:
        """End launched servers and this node's client; other servers go on, without this run's requests."""
        with ExitStack() as each:  # the last is called first, and all are, also where one fails
            if self._channel is not None:
                each.callback(self._channel.close)
            if self._supervisor is not None:
                each.callback(self._supervisor.close)
            if self._head is not None:
                each.callback(self._head.fleet.close)
            if self._client is not None:
                each.callback(self._client.close)
            if self._head is not None:
                each.callback(self._head.clients.close)
            with suppress(RunAborted):  # a client that has ended has nothing to be cancelled
                self.abort()

    @property
    def _zero(self) -> _RankZero:
        assert self._head is not None, "rank 0 talks to the servers"
        return self._head

    @property
    def _fleet(self) -> Fleet:
        return self._zero.fleet

    def _make_channel(self, name: ChannelName, seats: DeviceMap) -> Channel:
        """On every rank: some take part in a sync though only rank 0 talks to servers."""
        rollout, fleet = self._config.rollout, self._head.fleet if self._head is not None else None
        bucket_bytes, timeout_s = rollout.sync.bucket_mb << 20, rollout.limits.sync_timeout_s
        if name == "disk":
            run_dir = Path(self._config.run_dir)
            # two runs may share a directory; a run that is started again must find its own, to overwrite it
            own = f"{run_dir.name}_{zlib.crc32(str(run_dir.absolute()).encode()):08x}"
            directory = Path(rollout.sync.dir) / own if rollout.sync.dir else run_dir / "sync"
            return DiskChannel(fleet, directory, self._config.model.hf_path, bucket_bytes, timeout_s)
        if name == "ipc":
            return SharedMemoryChannel(fleet, seats, OFFERS[rollout.engine], bucket_bytes, timeout_s)
        return BroadcastChannel(fleet, name, bucket_bytes, timeout_s)

    def _settle_requests(self) -> None:
        """On rank 0, before a sync that waits for running requests."""
        if self._started is not None:
            self._started.join()

    def _plan(self, requests: Sequence[Request], sampling: Sampling) -> tuple[Work, list[list[int]]]:
        """The requests in groups, and where each group's completions go. The same on every rank."""
        groups, places = grouped(requests, sampling, self._config.rollout.completions_per_prompt, self._stop_ids)
        expected = Expected(self._vocab_size, self._sync.version, self._sync.version + 1, self._sync.run)
        trains = not any(request.stream for request in requests)
        prompts = []
        if trains and self._grades_in_client and self._head is not None:
            prompts = [pickle.dumps(replace(requests[place[0]].prompt, token_ids=())) for place in places]
        return Work(groups, expected, prompts, allow_straggler_abort=trains), places

    def _take(self, places: list[list[int]]) -> dict[int, Completion]:
        """What this node's client holds for this rank, by position in the requests, in their order."""
        if self._nodes.node not in self._owners:
            return {}
        shares = self._nodes.neighbours
        found = {}
        for arrived in take(self._take_path, self._secret, shares.index(self._nodes.rank), len(shares)):
            place = places[arrived.index][arrived.position]
            found[place] = arrived.completion
            if arrived.grade is not None:
                self._grades[place] = arrived.grade
        return dict(sorted(found.items()))

    def _count(self, work: Work) -> None:
        """On rank 0, when a rollout is over."""
        spans = [span for landed in work.done.values() for span in landed.spans]
        if spans:
            stale = sum((self._sync.version - version) * tokens for version, tokens in spans)
            self._stats.staleness_mean = stale / max(1, sum(tokens for _, tokens in spans))
        self._stats.retries = (self._stats.retries or 0) + work.retries
        self._stats.stragglers_aborted = (self._stats.stragglers_aborted or 0) + work.stragglers_aborted
        if work.allow_straggler_abort:
            by_sync = set(work.aborts) if self._config.rollout.sync.in_flight == "abort" else set()
            self._stats.groups_aborted = (self._stats.groups_aborted or 0) + len(by_sync)
            self._stats.groups_resent = (self._stats.groups_resent or 0) + len(work.resent - by_sync)
        self._stats.servers_live = len(self._fleet.live)


class _RankZero:
    """What rank 0 has beside: the servers as one fleet, and the clients that ask them."""

    def __init__(
        self,
        config: Config,
        architecture: Architecture,
        found: ConnectedServers,
        launched: Sequence[ServerProcess],
        num_nodes: int,
    ) -> None:
        self._config = config
        asked: list[Generator] = [*found.servers, *found.routers]
        owned_by = owners([one.http.url for one in asked], num_nodes, [server.node for server in launched])
        self.nodes = sorted(set(owned_by)) if found.addresses is None else list(range(num_nodes))
        """Those whose client asks servers."""
        listener = Listener(num_nodes)
        self.meeting = listener.meeting
        self.clients = Clients(listener, [_address(one) for one in asked], owned_by, self.nodes)
        membership = Membership(found, config, architecture, self._introduce)
        self.fleet = Fleet(
            found.servers,
            config.rollout,
            self.clients,
            launched,
            health_file=HealthFile(Path(config.run_dir)),
            routers=found.routers,
            recruit=membership.update,
            inspect=membership.inspect,
        )

    def await_clients(self) -> None:
        """Raises RunAborted if one does not come."""
        widest = max((member.width for member in self.fleet.members), default=1)
        self.clients.start(self._config.rollout.limits.max_concurrent_sequences * widest)

    def _introduce(self, member: Member) -> None:
        """A server has come, perhaps behind a router, or is asked in another dialect now."""
        for asked in (member, *self.fleet.routers):
            self.clients.add(_address(asked.server))


def _address(server: Generator) -> ServerAddress:
    key, proves = server.http.api_key, bool(server.http.proves)
    workers = sorted(server.named) if isinstance(server, RouterServer) else ()
    peers = tuple(Peer(url, key, proves) for url in workers)
    return ServerAddress(Peer(server.http.url, key, proves), server.dialect, peers)


@dataclass
class _Background:
    """One rollout; on rank 0 with a thread, on other ranks only what every rank knows of it."""

    work: Work
    places: list[list[int]]
    running: Future[None] | None = None

    def begin(self, fleet: Fleet) -> None:
        """Start, or go on after a sync, with what is not done."""
        self.running = in_thread(lambda: drain(dispatch(fleet, self.work)), "rollout")

    def join(self) -> None:
        """Return when its thread has ended."""
        if self.running is not None:
            wait([self.running])

    def wait(self) -> bool:
        """Returns when the thread has ended; True if servers need weights before it can go on."""
        error = self.running.exception() if self.running is not None else None
        if error is not None and not isinstance(error, NeedsWeights):
            raise error
        return error is not None
