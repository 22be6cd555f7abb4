"""Servers as the loop's engine: rank 0 decides, a client on each node asks, every rank takes its share.

    rank 0     start: plan of groups -> rollout thread (dispatch.py) <-> clients (client/remote.py) <-> servers
    any rank   start: the same plan, for the places of what it will hold
               finish: waits for rank 0's broadcast over gloo, then takes its share from its node's client
    rank 0     load_weights: main thread; the rollout thread is done, or its requests are treated by
               `rollout.sync.in_flight`

Several rollouts may have been started (`rollout.async_steps`); `finish` is about the one of the earliest step.

One rank decides, so load balance, retries and weights version are state in one place and no protocol between ranks. It
decides from scalars, so the number of tokens does not matter.
"""

from __future__ import annotations

import itertools
import math
import pickle
import secrets
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from dppo_megatron.config.schema import Config
from dppo_megatron.config.selection import selection_settings
from dppo_megatron.distributed import barrier, from_rank_zero, gather_all, rank
from dppo_megatron.launcher_env import launched_node
from dppo_megatron.rollout.client.completion_buffer import HookFactory, completion_of
from dppo_megatron.rollout.client.detokenizer import Detokenizer
from dppo_megatron.rollout.client.messages import ServerAddress
from dppo_megatron.rollout.client.process import Setup
from dppo_megatron.rollout.client.remote import ClientRendezvous, Clients, Listener, NodeClient, Nodes, owners, take
from dppo_megatron.rollout.engine import Engine, Request, RolloutStats, Sampling, Weights
from dppo_megatron.rollout.fp8_weights import quantized, rounded_names
from dppo_megatron.rollout.job_nodes import JobServers
from dppo_megatron.rollout.servers.connect import ChannelName, ConnectedServers, Launched, Membership, connect
from dppo_megatron.rollout.servers.device_map import DeviceMap, this_device
from dppo_megatron.rollout.servers.dispatch import Dispatch, NeedsWeights, Work, dispatch, grouped
from dppo_megatron.rollout.servers.fleet import Fleet
from dppo_megatron.rollout.servers.health_file import HealthFile
from dppo_megatron.rollout.servers.http import Peer
from dppo_megatron.rollout.servers.member import Member
from dppo_megatron.rollout.servers.protocol import Generator
from dppo_megatron.rollout.servers.router import RouterServer
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
        self._form: Callable[[Weights], Weights] = lambda weights: weights
        if (quantization := config.rollout.quantization) != "off":
            names, power_of_two = rounded_names(architecture), quantization == "fp8_pow2"
            self._form = lambda weights: quantized(weights, names, power_of_two=power_of_two)
        self._stop_ids = (int(tokenizer.eos_token_id),)
        self._replayed = architecture.expert_choices if config.actor.routing_replay == "engine" else None
        self._nodes = Nodes.of(gather_all([launched_node(rank())]), rank())
        self._grades: dict[int, Grade] = {}
        self._grades_in_client = client_hook is not None
        self._stats = RolloutStats()
        self._started: list[_Started] = []
        self._numbers = itertools.count(1)
        """Of rollouts; all ranks count alike."""
        self._head: _RankZero | None = None
        """On rank 0."""
        self._client: NodeClient | None = None
        self._channel: Channel | None = None
        self._own: JobServers | None = None
        launched: list[Launched] = []
        try:
            devices = gather_all([this_device(self._nodes.node)])
            if config.rollout.servers.launch == "local":
                self._own = JobServers(config, self._nodes)
                launched = self._own.start()

            def connected() -> tuple[ClientRendezvous, list[int], str, ChannelName, DeviceMap]:
                """On rank 0: reach every server, and wait for the clients from now on."""
                found = connect(config, architecture, devices, launched)
                self._head = head = _RankZero(config, architecture, found, launched, self._nodes.count)
                return head.meeting, head.nodes, found.description, found.channel, found.device_map

            meeting, self._owners, self.description, channel, device_map = from_rank_zero(connected)
            self._secret, self._take_path = meeting.secret, meeting.take_path(self._nodes.node)
            if self._nodes.is_first and self._nodes.node in self._owners:
                path, decode = self._take_path, self._detokenizer
                client = Setup(self._nodes.node, meeting.address, meeting.secret, path, decode, client_hook)
                self._client = NodeClient(client)
            from_rank_zero(lambda: self._zero.await_clients())
            self._channel = self._make_channel(channel, device_map)
        except BaseException:
            self.close()
            raise
        run, fleet = from_rank_zero(lambda: secrets.token_hex(4)), self._head.fleet if self._head is not None else None
        settle = self._head.background.join if self._head is not None else lambda: None
        self._sync = WeightSync(config.rollout, self._channel, fleet, settle, run, self._restart)

    @property
    def receivers(self) -> Sequence[int]:
        """See `Engine.receivers`: rank 0, or the ranks on the servers' GPUs."""
        return self._channel.receivers if self._channel is not None else (0,)

    def load_weights(self, weights: Weights, release: Callable[[], None] = lambda: None) -> bool:
        """Sync every server that answers; see `sync/weight_sync.py`. Raises RunAborted if none has the weights in the
        end."""
        if self._config.rollout.servers.colocate:
            torch.cuda.empty_cache()  # what the update has freed is the servers' now, and torch would keep it
            barrier()
        proven = self._sync.to(self._form(weights), release)
        if self._head is not None:
            self._head.background.go_on()  # a sync may have found it with nothing in flight and nobody to ask
        return proven

    def stream(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[tuple[int, Completion]]:
        """See `Engine.stream`. With several ranks all of it comes at the end."""
        if len(self._nodes.of_rank) > 1 or self._started:
            self.start(requests, sampling)
            yield from self.finish().items()
            return
        work, places = self._plan(requests, sampling, next(self._numbers))
        while True:
            try:
                for _ in dispatch(self._fleet, work):
                    yield from self._take(work, places).items()
                break
            except NeedsWeights:
                self._sync.again()
        yield from self._take(work, places).items()
        self._count(work)

    def start(self, requests: Sequence[Request], sampling: Sampling) -> None:
        """Begin generating in the background, behind what was started of earlier steps."""
        self._started.append(_Started(*self._plan(requests, sampling, next(self._numbers))))
        if self._head is not None:
            work = self._started[-1].work
            if work.may_split:
                work.spread(len(self._fleet.live))
            self._head.background.begin(work)

    def finish(self) -> dict[int, Completion]:
        """Wait for what was started of the earliest step. The completions are those that this node's client has taken
        in, shared evenly by its ranks; a training prompt's stay together."""
        assert self._started, "start comes first"
        first = min(self._started, key=lambda one: one.work.order)
        self._started.remove(first)
        while from_rank_zero(lambda: self._zero.background.wait(first.work)):
            self._sync.again()
            if self._head is not None:
                self._head.background.go_on()
        found = self._take(first.work, first.places)
        lost = from_rank_zero(lambda: first.work.missing)
        of_group = Counter(group for group, _ in lost)
        for (group, position), why in lost.items():
            places = first.places[group]
            nobodys = of_group[group] == len(places)
            # who has the rest of a group has what is missing of it; that may have been aborted, and be here
            if any(place in found for place in places) or (nobodys and self._head is not None):
                missing = Completion(np.empty(0, np.int64), np.empty(0, np.float32), "abort", "")
                if found.setdefault(places[position], missing) is missing:
                    self._grades[places[position]] = Grade(math.nan, failure=f"not sampled: {why}")
        if self._head is not None:
            self._count(first.work)
        return dict(sorted(found.items()))

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
            answers += [(name, completion_of(one, text)) for one, text in zip(sampled, texts, strict=True)]
        return answers

    def abort(self) -> None:
        """Also at the servers, so that they do not generate what is not read."""
        started, self._started = self._started, []
        if self._head is not None:
            self._head.background.give_up()
            self._head.clients.cancel([ticket for one in started for ticket in one.work.landed])

    def rest(self) -> None:
        """No generation until the next `load_weights`: colocated servers give their device memory back. What was
        started and is not finished goes on then."""
        if self._own is not None and self._config.rollout.servers.colocate:
            # one that started now would take memory during the update
            self._own.await_started(from_rank_zero(lambda: self._fleet.starting()))
            # every rank waits: before, the servers still hold its GPU
            self._own.end(from_rank_zero(lambda: self._sync.sleep(keeps=bool(self._started))))

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
            if self._own is not None:
                each.callback(self._own.close)
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

    def _make_channel(self, name: ChannelName, device_map: DeviceMap) -> Channel:
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
            return SharedMemoryChannel(fleet, device_map, OFFERS[rollout.engine], bucket_bytes, timeout_s)
        return BroadcastChannel(fleet, name, bucket_bytes, timeout_s)

    def _restart(self) -> None:
        """The job's own servers that have ended or hang are started again, on every machine."""
        if self._own is not None:
            again = self._own.restart(from_rank_zero(lambda: self._fleet.hanging()))
            if self._head is not None:
                self._head.fleet.restarted(again)

    def _plan(self, requests: Sequence[Request], sampling: Sampling, number: int = 0) -> tuple[Work, list[list[int]]]:
        """The requests in groups, and where each group's completions go. The same on every rank that calls it; a probe
        is rank 0's alone, and has no number."""
        groups, places = grouped(
            requests, sampling, selection_settings(self._config).widest_group, self._stop_ids, self._replayed
        )
        newest = self._sync.version + max(1, self._config.rollout.async_steps)
        expected = Expected(self._vocab_size, self._sync.version, newest, self._sync.run)
        trains = not any(request.stream for request in requests)
        prompts = []
        if trains and self._grades_in_client and self._head is not None:
            prompts = [pickle.dumps(replace(requests[place[0]].prompt, token_ids=())) for place in places]
        work = Work(groups, expected, prompts, may_lose=trains, may_split=trains and len(self._owners) == 1)
        work.order = requests[0].step if trains and requests else 0  # an evaluation is asked before every step
        work.number = number
        return work, places

    def _take(self, work: Work, places: list[list[int]]) -> dict[int, Completion]:
        """What this node's client holds for this rank, by position in the requests, in their order."""
        if self._nodes.node not in self._owners:
            return {}
        shares = self._nodes.neighbours
        found = {}
        for arrived in take(self._take_path, self._secret, shares.index(self._nodes.rank), len(shares), work.number):
            place = places[arrived.index][arrived.position]
            found[place] = arrived.completion
            if arrived.grade is not None:
                self._grades[place] = arrived.grade
        return dict(sorted(found.items()))

    def _count(self, work: Work) -> None:
        """On rank 0, when a rollout is over."""
        stats, rollout = self._stats, self._config.rollout
        spans = [span for landed in work.done.values() for span in landed.spans]
        if spans:
            ages = [(self._sync.version - version, tokens) for version, tokens in spans]
            stats.staleness_mean = sum(age * n for age, n in ages) / max(1, sum(n for _, n in ages))
            stats.staleness_max = max(age for age, _ in ages)
        if rollout.async_steps and work.may_lose:
            stats.add(tokens_read_again=sum(landed.read_again for landed in work.done.values()))
        stats.add(retries=work.retries, stragglers_aborted=work.stragglers_aborted)
        if work.may_lose:
            whole = {work.part_of(index)[0] for index in work.aborts}
            by_sync = whole if rollout.sync.in_flight == "abort" else set()
            stats.add(groups_aborted=len(by_sync), groups_resent=len(work.resent - by_sync))
            stats.add(completions_aborted=work.completions_aborted)
        stats.servers_live = len(self._fleet.live)


class _RankZero:
    """What rank 0 has beside: the servers as one fleet, and the clients that ask them."""

    def __init__(
        self,
        config: Config,
        architecture: Architecture,
        found: ConnectedServers,
        launched: Sequence[Launched],
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
            are_own=bool(launched),
            health_file=HealthFile(Path(config.run_dir)),
            routers=found.routers,
            update_membership=membership.update,
            inspect=membership.inspect,
        )
        self.background = _Background(self.fleet)

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


@dataclass(eq=False, frozen=True)
class _Started:
    """One rollout, as every rank knows it."""

    work: Work
    places: list[list[int]]


class _Background:
    """The rollout thread of rank 0: it works on what has been begun, and ends when all of it is done."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._lock = Lock()
        self._works: list[Work] = []
        self._thread: Future[None] | None = None
        self._runs = False
        """The thread will see what is added now."""
        self._failure: BaseException | None = None
        """What has ended it before all was done."""

    def begin(self, work: Work) -> None:
        """Generate for it too."""
        with self._lock:
            self._works[:] = [one for one in self._works if one.is_wanted] + [work]
        self.go_on()

    def go_on(self) -> None:
        """With what is not done, unless it runs or has failed: after a sync."""
        with self._lock:
            failed = self._failure is not None and not isinstance(self._failure, NeedsWeights)
            if not self._runs and not failed:
                self._runs, self._failure = True, None
                self._thread = in_thread(self._work, "rollout")

    def wait(self, work: Work) -> bool:
        """Returns when all of it is ready, or True when servers need weights before it can go on."""
        while not work.finished.done():
            assert self._thread is not None, "it was begun"
            wait([work.finished, self._thread], return_when=FIRST_COMPLETED)
            if not work.finished.done() and self._failure is not None:
                if isinstance(self._failure, NeedsWeights):
                    return True
                raise self._failure
        return False

    def join(self) -> None:
        """Return when the thread has ended."""
        if self._thread is not None:
            wait([self._thread])

    def give_up(self) -> None:
        """End all of it."""
        with self._lock:
            for work in self._works:
                work.given_up = True
        self.join()

    def _work(self) -> None:
        try:
            while self._goes_on():
                drain(Dispatch(self._fleet, self._works).run())
        except BaseException as error:
            with self._lock:
                self._runs, self._failure = False, error
            raise

    def _goes_on(self) -> bool:
        with self._lock:
            self._runs = any(one.is_wanted for one in self._works)
            return self._runs
