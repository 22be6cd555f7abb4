"""The engine that generates with servers: rank 0 dispatches, a client on each node sends requests, every rank takes its
share of the completions.

    rank 0     start: plan of groups -> rollout thread (dispatch.py) <-> clients (client/remote.py) <-> servers
    any rank   start: makes the same plan, to know which request each completion of its share answers
               finish: waits for rank 0's broadcast over gloo, then takes its share from its node's client; parts of a
                       group that are at several nodes are brought together on one rank
    rank 0     load_weights: main thread; requests of the rollout thread have ended, or are handled as
               `rollout.sync.in_flight` says

Several rollouts may be in progress (`rollout.async_steps`); `finish` waits for that of the earliest step. Rank 0
handles scalars only, so its work does not grow with the number of tokens.
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
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from dppo_megatron.config.schema import Config
from dppo_megatron.config.selection import selection_settings
from dppo_megatron.distributed import OnRankZero, barrier, from_each, from_rank_zero, gather_all, on_every_rank, rank
from dppo_megatron.launcher_env import launched_node
from dppo_megatron.rollout.client.detokenizer import Detokenizer
from dppo_megatron.rollout.client.messages import Arrived, HookFactory, ServerAddress, TakeShare, completion_of
from dppo_megatron.rollout.client.process import Setup
from dppo_megatron.rollout.client.remote import ClientRendezvous, Clients, NodeClient, Nodes, owners, take
from dppo_megatron.rollout.engine import Engine, Request, RolloutStats, Sampling, Weights
from dppo_megatron.rollout.fp8_weights import quantized, rounded_names
from dppo_megatron.rollout.in_flight import collected, digest, restore
from dppo_megatron.rollout.launched_servers import JobServers, listening_addresses
from dppo_megatron.rollout.servers.connect import ChannelName, ConnectedServers, Launched, Membership, connect
from dppo_megatron.rollout.servers.device_map import DeviceMap, this_device
from dppo_megatron.rollout.servers.dispatch import Dispatch, NeedsWeights, dispatch
from dppo_megatron.rollout.servers.fleet import Fleet
from dppo_megatron.rollout.servers.health_file import HealthFile
from dppo_megatron.rollout.servers.http import Peer
from dppo_megatron.rollout.servers.protocol import Server
from dppo_megatron.rollout.servers.rollout_work import Work, grouped
from dppo_megatron.rollout.servers.wire import Expected
from dppo_megatron.rollout.sync.broadcast import BroadcastChannel
from dppo_megatron.rollout.sync.channels import Channel, DiskChannel, drain, in_thread
from dppo_megatron.rollout.sync.colocated import OFFERS, SharedMemoryChannel
from dppo_megatron.rollout.sync.receipts import ask_for_canary
from dppo_megatron.rollout.sync.weight_sync import WeightSync
from dppo_megatron.types import UNSAMPLED, Completion, Grade, RunAborted
from dppo_megatron.weights.architecture import Architecture

_PROBE_S = 120.0


class ServerEngine(Engine):
    """vLLM or SGLang servers as configured in `rollout`. Collective, like every `Engine`.

    Args:
        has_actor: False if weights come from files, which NCCL does not send, and ranks use no GPUs.
        client_hook: number of rollout clients -> the factory, to be pickled, of a client's grading hook.

    Raises UserError for a server that cannot be reached, or that does not fit (`servers/connect.py`).
    """

    has_servers = True

    def __init__(
        self,
        config: Config,
        architecture: Architecture,
        tokenizer: PreTrainedTokenizerBase,
        client_hook: Callable[[int], HookFactory] | None = None,
        *,
        has_actor: bool = True,
    ) -> None:
        self._config = config
        self._detokenizer, self._vocab_size = Detokenizer.of(tokenizer), architecture.vocab_size
        self._quantize: Callable[[Weights], Weights] = lambda weights: weights
        if (quantization := config.rollout.quantization) != "off":
            names, power_of_two = rounded_names(architecture), quantization == "fp8_pow2"
            self._quantize = lambda weights: quantized(weights, names, power_of_two=power_of_two)
        self._stop_ids = (int(tokenizer.eos_token_id),)
        self._expert_choices = architecture.expert_choices if config.actor.routing_replay == "engine" else None
        self._nodes = Nodes.of(gather_all([launched_node(rank())]), rank())
        self._grades: dict[int, Grade] = {}
        self._grades_in_client = client_hook is not None
        self._stats = RolloutStats()
        self._started: list[Work] = []
        self._rollout_numbers = itertools.count(1)
        self._zero: OnRankZero[RankZero] = OnRankZero()
        self._client: NodeClient | None = None
        self._channel: Channel | None = None
        self._job_servers: JobServers | None = None
        launched: list[Launched] = []
        try:
            device = this_device(self._nodes.node, on_gpu=has_actor and torch.cuda.is_available())
            devices, hosts = gather_all([device]), listening_addresses(self._nodes)
            if config.rollout.servers.launch == "local":
                self._job_servers = JobServers(config, self._nodes, has_actor=has_actor)
                launched = self._job_servers.start()

            def connected() -> tuple[ClientRendezvous, list[int], str, ChannelName, DeviceMap]:
                servers = connect(config, architecture, devices, launched)
                zero = RankZero(config, architecture, servers, launched, hosts)
                self._zero = OnRankZero(zero)
                return zero.clients.rendezvous, zero.nodes, servers.description, servers.channel, servers.device_map

            rendezvous, self._client_nodes, self.description, channel, device_map = from_rank_zero(connected)
            self._secret, self._take_path = rendezvous.secret, rendezvous.take_path(self._nodes.node)
            if self._nodes.is_first and self._nodes.node in self._client_nodes:
                path, decode = self._take_path, self._detokenizer
                hook = client_hook(len(self._client_nodes)) if client_hook is not None else None
                setup = Setup(self._nodes.node, rendezvous.address, self._secret, path, decode, hook)
                self._client = NodeClient(setup)
            self._zero.ask(RankZero.await_clients)
            self._channel = self._make_channel(channel, device_map)
        except BaseException:
            self.close()
            raise
        run = from_rank_zero(lambda: secrets.token_hex(4))
        fleet = self._zero.here(lambda zero: zero.fleet)
        finish_requests = partial(self._zero.here, lambda zero: zero.background.join())
        self._sync = WeightSync(config.rollout, self._channel, fleet, finish_requests, run, self._restart)

    @property
    def receivers(self) -> Sequence[int]:
        """Rank 0, or over `ipc` the ranks that share a device with a server's worker."""
        return self._channel.receivers if self._channel is not None else (0,)

    @property
    def weights_version(self) -> int:  # type: ignore[override]
        return self._sync.version

    @weights_version.setter
    def weights_version(self, version: int) -> None:
        self._sync.version = version

    @property
    def holders(self) -> int:
        """Number of ranks that get completions: all ranks of the nodes that have a client."""
        return sum(node in self._client_nodes for node in self._nodes.of_rank)

    def load_weights(self, weights: Weights, release: Callable[[], None] = lambda: None) -> bool:
        """Raises RunAborted if no server took the weights."""
        if self._config.rollout.servers.colocate:
            torch.cuda.empty_cache()  # torch would keep memory that the update has freed and the servers need
            barrier()
        is_proven = self._sync.to(self._quantize(weights), release)
        self._zero.here(lambda zero: zero.background.resume())  # its thread has ended if no server was live
        return is_proven

    def stream(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[tuple[int, Completion]]:
        """With several ranks, all completions are yielded at the end."""
        if len(self._nodes.of_rank) > 1 or self._started:
            self.start(requests, sampling)
            yield from self.finish().items()
            return
        work = self._plan(requests, sampling, next(self._rollout_numbers))
        while True:
            try:
                for _ in self._zero.ask(lambda zero: dispatch(zero.fleet, work)):
                    yield from self._take(work).items()
                break
            except NeedsWeights:
                self._sync.again()
        yield from self._take(work).items()
        self._zero.here(lambda zero: zero.count(work, self._sync.version, self._stats))

    def start(self, requests: Sequence[Request], sampling: Sampling, begun: dict[str, Any] | None = None) -> None:
        """Rollouts of earlier steps have priority."""
        work = self._plan(requests, sampling, next(self._rollout_numbers))
        self._started.append(work)
        if begun is not None and self._zero.is_here:
            restore(work, begun, self._sync.run)
        self._zero.here(lambda zero: zero.begin(work))

    def in_flight(self) -> dict[int, dict[str, Any]]:
        """What is running is aborted, and goes on from its tokens. Empty if the rollout thread has failed."""
        if self._zero.ask(lambda zero: zero.background.has_failed):
            return {}
        for work in self._started:
            work.was_seen = True

        def from_client(**which: Any) -> Iterator[Arrived]:
            return take(self._take_path, self._secret, TakeShare(0, 1, copies=True, **which))

        return collected(self._started, from_client if self._client is not None else None)

    def finish(self) -> dict[int, Completion]:
        """Wait for the started rollout of the earliest step. The ranks of a node share the completions of its client
        evenly; all completions of a training prompt are on one rank, even if several nodes received them."""
        assert self._started, "start comes first"
        work = min(self._started, key=lambda one: one.order)
        self._started.remove(work)
        while self._zero.ask(lambda zero: zero.background.wait(work)):
            self._sync.again()
            self._zero.here(lambda zero: zero.background.resume())
        completions: dict[int, Completion] = {}
        errors: list[str] = []
        try:
            completions = self._take(work)
        except RunAborted as error:  # this node's client has ended: ranks of other nodes must stop too
            errors = [f"node {self._nodes.node}: {error}"]
        if errors := gather_all(errors):
            raise on_every_rank(RunAborted(errors[0]))
        lost, homes = from_rank_zero(lambda: (work.missing, work.homes))
        if homes:
            self._reunite(completions, homes, work.places)
        num_lost = Counter(group for group, _ in lost)
        for (group, position), why in lost.items():
            places = work.places[group]
            # the rank that has the rest of the group gets its missing completions; rank 0 those of a group lost whole
            all_lost = num_lost[group] == len(places)
            if any(place in completions for place in places) or (all_lost and self._zero.is_here):
                missing = Completion(np.empty(0, np.int64), np.empty(0, np.float32), "abort", "")
                # a lost completion that was aborted may have arrived in part: that part stays
                if completions.setdefault(places[position], missing) is missing:
                    self._grades[places[position]] = Grade(math.nan, failure=f"{UNSAMPLED}: {why}")
        self._zero.here(lambda zero: zero.count(work, self._sync.version, self._stats))
        return dict(sorted(completions.items()))

    def _reunite(
        self, completions: dict[int, Completion], homes: dict[int, int], places: Sequence[Sequence[int]]
    ) -> None:
        """Send completions of groups that arrived at several nodes to the rank that has the group at its node in
        `homes`. Changes `completions`. Collective."""
        node = self._nodes.node
        strays = [at for group, home in homes.items() if home != node for at in places[group] if at in completions]
        leaving = [(place, completions.pop(place), self._grades.pop(place, None)) for place in strays]
        mine = {at for group in homes if any(one in completions for one in places[group]) for at in places[group]}
        for place, completion, grade in itertools.chain.from_iterable(from_each(leaving)):
            # an aborted completion may be at one node and the result of its retry at another: the retry wins
            if place in mine and (place not in completions or completions[place].finish_reason == "abort"):
                completions[place] = completion
                self._grades.pop(place, None)
                if grade is not None:
                    self._grades[place] = grade

    def take_grades(self) -> dict[int, Grade]:
        taken, self._grades = self._grades, {}
        return taken

    def probe(
        self, requests: Sequence[Request], sampling: Sampling, *, alone: bool = False
    ) -> list[tuple[str, Completion]]:
        """A server without a complete answer after `_PROBE_S` is logged and left out, but not marked out."""

        def probed(zero: RankZero) -> list[tuple[str, Completion]]:
            work = self._plan(requests, sampling)
            if alone:
                zero.background.join()
            answers: list[tuple[str, Completion]] = []
            for name, sampled in ask_for_canary(zero.fleet, work.groups, work.expected, _PROBE_S):
                texts = self._detokenizer.decode([one.token_ids for one in sampled])
                answers += [(name, completion_of(one, text)) for one, text in zip(sampled, texts, strict=True)]
            return answers

        return self._zero.ask(probed)

    def sleep(self) -> None:
        """Unfinished rollouts resume after the next `load_weights`."""
        if self._job_servers is not None and self._config.rollout.servers.colocate:
            # a server that is still starting would otherwise take memory during the update
            self._job_servers.await_started(self._zero.ask(lambda zero: zero.fleet.starting()))
            # every rank waits here, as the servers hold its GPU's memory until they sleep
            self._job_servers.end(self._sync.sleep(keeps=bool(self._started)))

    def health(self) -> dict[str, str]:
        return self._zero.ask(lambda zero: zero.fleet.health())

    def statistics(self) -> RolloutStats:
        taken, self._stats = self._stats, RolloutStats()
        taken.sync_s, taken.tensors_verified = self._sync.take_figures()
        return taken

    def close(self) -> None:
        """End launched servers and this node's client. Other servers keep running; this run's requests are aborted."""
        with ExitStack() as each:  # callbacks run in reverse order, and all of them even if one raises
            if self._channel is not None:
                each.callback(self._channel.close)
            if self._job_servers is not None:
                each.callback(self._job_servers.close)
            self._zero.here(lambda zero: each.callback(zero.fleet.close))
            if self._client is not None:
                each.callback(self._client.close)
            self._zero.here(lambda zero: each.callback(zero.clients.close))
            with suppress(RunAborted):  # a client that has ended has no requests left to abort
                self._zero.here(lambda zero: zero.abort(self._started))

    def _make_channel(self, name: ChannelName, device_map: DeviceMap) -> Channel:
        """Made on every rank: only rank 0 talks to servers, but other ranks take part in a sync too."""
        rollout, fleet = self._config.rollout, self._zero.here(lambda zero: zero.fleet)
        bucket_bytes, timeout_s = rollout.sync.bucket_mb << 20, rollout.limits.sync_timeout_s
        if name == "disk":
            run_dir = Path(self._config.run_dir)
            # unique, as two runs may share `sync.dir`; stable, as a restarted run removes what it left there
            name_of_run = f"{run_dir.name}_{zlib.crc32(str(run_dir.absolute()).encode()):08x}"
            directory = Path(rollout.sync.dir) / name_of_run if rollout.sync.dir else run_dir / "sync"
            return DiskChannel(fleet, directory, self._config.model.hf_path, bucket_bytes, timeout_s)
        if name == "ipc":
            return SharedMemoryChannel(fleet, device_map, OFFERS[rollout.engine], bucket_bytes, timeout_s)
        return BroadcastChannel(fleet, name, bucket_bytes, timeout_s)

    def _restart(self) -> None:
        if self._job_servers is not None:
            restarted = self._job_servers.restart(self._zero.ask(lambda zero: zero.fleet.hanging()))
            self._zero.here(lambda zero: zero.fleet.restarted(restarted))

    def _plan(self, requests: Sequence[Request], sampling: Sampling, number: int = 0) -> Work:
        """Group the requests; the same result on every rank. `number` is 0 for a probe, which only rank 0 plans."""
        trains = not any(request.stream for request in requests)
        size = selection_settings(self._config).widest_group
        if not (trains and number):  # `Work.spread` splits training groups that are too large for a server
            size = min(size, self._config.rollout.limits.max_concurrent_sequences)
        groups, places = grouped(requests, sampling, size, self._stop_ids, self._expert_choices)
        newest = self._sync.version + max(1, self._config.rollout.async_steps)
        expected = Expected(self._vocab_size, self._sync.version, newest, self._sync.run)
        prompts = []
        if trains and self._grades_in_client and self._zero.is_here:
            prompts = [pickle.dumps(replace(requests[place[0]].prompt, token_ids=())) for place in places]
        work = Work(groups, expected, prompts, places, may_lose=trains, may_split=trains)
        work.order = requests[0].step if trains and requests else 0  # evaluations have priority over every step
        work.number = number
        if trains and self._zero.is_here and self._config.rollout.async_steps:
            work.digest = digest(groups, self._config.rollout)
        return work

    def _take(self, work: Work) -> dict[int, Completion]:
        """Take this rank's share from its node's client; completions by position in the requests, in that order."""
        if self._nodes.node not in self._client_nodes:
            return {}
        ranks = self._nodes.local_ranks
        share = TakeShare(ranks.index(self._nodes.rank), len(ranks), work.number)
        completions = {}
        for arrived in take(self._take_path, self._secret, share):
            place = work.places[arrived.index][arrived.position]
            completions[place] = arrived.completion
            if arrived.grade is not None:
                self._grades[place] = arrived.grade
        return dict(sorted(completions.items()))


class RankZero:
    """The state that only rank 0 has: the fleet of servers, the clients, and the rollouts in progress.

    Two threads use it. The main thread begins rollouts, waits for one, and syncs weights. The rollout thread works on
    all rollouts that have begun. `hosts`: for each node, the address by which other nodes reach it.
    """

    def __init__(
        self,
        config: Config,
        architecture: Architecture,
        connected: ConnectedServers,
        launched: Sequence[Launched],
        hosts: Sequence[str],
    ) -> None:
        self._config = config
        urls = [server.http.url for server in connected.servers]
        owned_by = owners(urls, len(hosts), [server.node for server in launched])
        self.nodes = sorted(set(owned_by)) if connected.addresses is None else list(range(len(hosts)))
        """Nodes with a client: those that own a server, or all nodes if servers may join later."""
        self.clients = Clients(hosts, [_address(server) for server in connected.servers], owned_by, self.nodes)
        membership = Membership(connected, config, architecture, self._introduce)
        self.fleet = Fleet(
            connected.servers,
            config.rollout,
            self.clients,
            are_own=bool(launched),
            health_file=HealthFile(Path(config.run_dir)),
            update_membership=membership.update,
            inspect=membership.inspect,
        )
        self.background = _Background(self.fleet)

    def await_clients(self) -> None:
        """Raises RunAborted if one does not connect."""
        widest = max((member.width for member in self.fleet.members), default=1)
        self.clients.start(self._config.rollout.limits.max_concurrent_sequences * widest)

    def begin(self, work: Work) -> None:
        if work.may_split:
            work.spread(self.fleet.reach, self._config.rollout.limits.max_concurrent_sequences)
        self.background.begin(work)

    def abort(self, works: Sequence[Work]) -> None:
        """End these rollouts, also at the servers."""
        self.background.give_up()
        self.clients.cancel([ticket for work in works for ticket in work.landed])

    def count(self, work: Work, version: int, stats: RolloutStats) -> None:
        """Add a finished rollout, which has been taken, to `stats`. `version` is the current weights version."""
        self.clients.over(work.number)
        rollout = self._config.rollout
        if rollout.async_steps and work.may_lose:
            stats.add(tokens_read_again=sum(landed.read_again for landed in work.done.values()))
        stats.add(retries=work.retries)
        if work.may_lose:
            stats.add_ages((version - under, n) for done in work.done.values() for under, n in done.spans)
            aborted = {work.part_of(index)[0] for index in work.aborts} if rollout.sync.in_flight == "abort" else set()
            stats.add(groups_aborted=len(aborted), groups_resent=len(work.resent - aborted))
            stats.add(completions_aborted=work.completions_aborted)
        stats.servers_live = len(self.fleet.live)

    def _introduce(self, server: Server) -> None:
        """Make a server known to the clients: a new one, or one with another dialect."""
        self.clients.add(_address(server))


def _address(server: Server) -> ServerAddress:
    return ServerAddress(Peer(server.http.url, server.http.api_key, bool(server.http.proves)), server.dialect)


class _Background:
    """The rollout thread of rank 0, which works on the rollouts that have begun, and ends when all are done."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._works: list[Work] = []
        self._thread: Future[None] | None = None

    def begin(self, work: Work) -> None:
        self._works[:] = [*(one for one in self._works if one.is_wanted), work]
        self.resume()

    def resume(self) -> None:
        """Start the thread again, unless it runs, or has ended with an error other than NeedsWeights."""
        if self._thread is None or (self._thread.done() and not self.has_failed):
            self._thread = in_thread(self._run, "rollout")

    def wait(self, work: Work) -> bool:
        """Wait until `work` is finished, and return False. Returns True if servers need a weight sync first."""
        while not work.finished.done():
            assert self._thread is not None, "begin() comes first"
            wait([work.finished, self._thread], return_when=FIRST_COMPLETED)
            if not work.finished.done():
                if isinstance(self._thread.exception(), NeedsWeights):
                    return True
                self._thread.result()
                self.resume()  # it was about to end when `work` began
        return False

    @property
    def has_failed(self) -> bool:
        """It has ended before all work was done, and not for lack of weights."""
        error = self._thread.exception() if self._thread is not None and self._thread.done() else None
        return error is not None and not isinstance(error, NeedsWeights)

    def join(self) -> None:
        """Wait until all rollouts are finished or given up, or the thread has failed."""
        while self._thread is not None:
            wait([self._thread])
            if self._thread.exception() is not None or not any(one.is_wanted for one in self._works):
                return
            self.resume()  # it was about to end when the latest began

    def give_up(self) -> None:
        """End all rollouts, and wait until the thread has ended."""
        for work in self._works:
            work.given_up = True
        self.join()

    def _run(self) -> None:
        while any(one.is_wanted for one in self._works):
            drain(Dispatch(self._fleet, self._works).run())
