"""Servers as the loop's engine: rank 0 decides, a client on each node asks, every rank takes its share.

    rank 0     start: plan of groups -> rollout thread (dispatch.py) <-> clients (client/remote.py) <-> servers
    any rank   start: the same plan, for the places of what it will hold
               finish: waits for rank 0's broadcast over gloo, then takes its share from its node's client; parts of a
                       group that had to go to servers of another node's client are brought to the rest of it
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
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from dppo_megatron.config.schema import Config
from dppo_megatron.config.selection import selection_settings
from dppo_megatron.distributed import OnRankZero, barrier, from_each, from_rank_zero, gather_all, on_every_rank, rank
from dppo_megatron.launcher_env import launched_node
from dppo_megatron.rollout.client.completion_buffer import HookFactory, completion_of
from dppo_megatron.rollout.client.detokenizer import Detokenizer
from dppo_megatron.rollout.client.process import Setup
from dppo_megatron.rollout.client.remote import ClientRendezvous, NodeClient, Nodes, take
from dppo_megatron.rollout.engine import Engine, Request, RolloutStats, Sampling, Weights
from dppo_megatron.rollout.fp8_weights import quantized, rounded_names
from dppo_megatron.rollout.job_nodes import JobServers, listening_addresses
from dppo_megatron.rollout.rank_zero import RankZero
from dppo_megatron.rollout.servers.connect import ChannelName, Launched, connect
from dppo_megatron.rollout.servers.device_map import DeviceMap, this_device
from dppo_megatron.rollout.servers.dispatch import NeedsWeights, dispatch
from dppo_megatron.rollout.servers.rollout_work import Work, grouped
from dppo_megatron.rollout.servers.wire import Expected
from dppo_megatron.rollout.sync.broadcast import BroadcastChannel
from dppo_megatron.rollout.sync.channels import Channel, DiskChannel
from dppo_megatron.rollout.sync.colocated import OFFERS, SharedMemoryChannel
from dppo_megatron.rollout.sync.receipts import ask_for_canary
from dppo_megatron.rollout.sync.weight_sync import WeightSync
from dppo_megatron.types import UNSAMPLED, Completion, Grade, RunAborted
from dppo_megatron.weights.architecture import Architecture

_PROBE_S = 120.0


class ServerEngine(Engine):
    """vLLM or SGLang servers as configured in `rollout`. Collective, like every `Engine`.

    Args:
        has_actor: False where weights come from files, so not from a GPU: over NCCL none could be sent, and no place
            of CUDA_VISIBLE_DEVICES is a rank's.
        client_hook: given how many rollout clients there are, says what each is to make for grading its completions;
            what it returns is pickled.

    Raises:
        UserError: a server cannot be reached, serves another model, is too old, or was started without what is needed.
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
        self._started: list[Work] = []
        self._numbers = itertools.count(1)
        """Of rollouts; all ranks count alike."""
        self._zero: OnRankZero[RankZero] = OnRankZero()
        self._client: NodeClient | None = None
        self._channel: Channel | None = None
        self._own: JobServers | None = None
        launched: list[Launched] = []
        try:
            device = this_device(self._nodes.node, on_gpu=has_actor and torch.cuda.is_available())
            devices, hosts = gather_all([device]), listening_addresses(self._nodes)
            if config.rollout.servers.launch == "local":
                self._own = JobServers(config, self._nodes, has_actor=has_actor)
                launched = self._own.start()

            def connected() -> tuple[ClientRendezvous, list[int], str, ChannelName, DeviceMap]:
                """On rank 0: reach every server, and wait for the clients from now on."""
                found = connect(config, architecture, devices, launched)
                zero = RankZero(config, architecture, found, launched, hosts)
                self._zero = OnRankZero(zero)
                return zero.meeting, zero.nodes, found.description, found.channel, found.device_map

            meeting, self._owners, self.description, channel, device_map = from_rank_zero(connected)
            self._secret, self._take_path = meeting.secret, meeting.take_path(self._nodes.node)
            if self._nodes.is_first and self._nodes.node in self._owners:
                path, decode = self._take_path, self._detokenizer
                hook = client_hook(len(self._owners)) if client_hook is not None else None
                client = Setup(self._nodes.node, meeting.address, meeting.secret, path, decode, hook)
                self._client = NodeClient(client)
            self._zero.ask(RankZero.await_clients)
            self._channel = self._make_channel(channel, device_map)
        except BaseException:
            self.close()
            raise
        run = from_rank_zero(lambda: secrets.token_hex(4))
        fleet = self._zero.here(lambda zero: zero.fleet)
        settle = partial(self._zero.here, lambda zero: zero.background.join())
        self._sync = WeightSync(config.rollout, self._channel, fleet, settle, run, self._restart)

    @property
    def receivers(self) -> Sequence[int]:
        """See `Engine.receivers`: rank 0, or the ranks on the servers' GPUs."""
        return self._channel.receivers if self._channel is not None else (0,)

    @property
    def holders(self) -> int:
        """How many ranks are given completions: those of the nodes whose client asks servers."""
        return sum(node in self._owners for node in self._nodes.of_rank)

    def load_weights(self, weights: Weights, release: Callable[[], None] = lambda: None) -> bool:
        """Sync every server that answers; see `sync/weight_sync.py`. Raises RunAborted if none has the weights in the
        end."""
        if self._config.rollout.servers.colocate:
            torch.cuda.empty_cache()  # what the update has freed is the servers' now, and torch would keep it
            barrier()
        proven = self._sync.to(self._form(weights), release)
        self._go_on()
        return proven

    def stream(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[tuple[int, Completion]]:
        """See `Engine.stream`. With several ranks all of it comes at the end."""
        if len(self._nodes.of_rank) > 1 or self._started:
            self.start(requests, sampling)
            yield from self.finish().items()
            return
        work = self._plan(requests, sampling, next(self._numbers))
        while True:
            try:
                for _ in self._zero.ask(lambda zero: dispatch(zero.fleet, work)):
                    yield from self._take(work).items()
                break
            except NeedsWeights:
                self._sync.again()
        yield from self._take(work).items()
        self._zero.here(lambda zero: zero.count(work, self._sync.version, self._stats))

    def start(self, requests: Sequence[Request], sampling: Sampling) -> None:
        """Begin generating in the background, behind what was started of earlier steps."""
        self._started.append(self._plan(requests, sampling, next(self._numbers)))
        self._zero.here(lambda zero: zero.begin(self._started[-1]))

    def finish(self) -> dict[int, Completion]:
        """Wait for what was started of the earliest step. The completions are those that this node's client has taken
        in, shared evenly by its ranks; a training prompt's are together, also where they came from several nodes."""
        assert self._started, "start comes first"
        first = min(self._started, key=lambda work: work.order)
        self._started.remove(first)
        while self._zero.ask(lambda zero: zero.background.wait(first)):
            self._sync.again()
            self._go_on()
        found: dict[int, Completion] = {}
        gone: list[str] = []
        try:
            found = self._take(first)
        except RunAborted as error:  # of this node's client: the other nodes' ranks would go on without this one
            gone = [f"node {self._nodes.node}: {error}"]
        if gone := gather_all(gone):
            raise on_every_rank(RunAborted(gone[0]))
        lost, homes = from_rank_zero(lambda: (first.missing, first.homes))
        if homes:
            self._reunite(found, homes, first.places)
        of_group = Counter(group for group, _ in lost)
        for (group, position), why in lost.items():
            places = first.places[group]
            nobodys = of_group[group] == len(places)
            # who has the rest of a group has what is missing of it; that may have been aborted, and be here
            if any(place in found for place in places) or (nobodys and self._zero.is_here):
                missing = Completion(np.empty(0, np.int64), np.empty(0, np.float32), "abort", "")
                if found.setdefault(places[position], missing) is missing:
                    self._grades[places[position]] = Grade(math.nan, failure=f"{UNSAMPLED}: {why}")
        self._zero.here(lambda zero: zero.count(first, self._sync.version, self._stats))
        return dict(sorted(found.items()))

    def _reunite(self, found: dict[int, Completion], homes: dict[int, int], places: Sequence[Sequence[int]]) -> None:
        """Bring what has landed elsewhere of a group to the rank that holds it at its home. Collective.

        Args:
            homes: the node of each group that is at several.
        """
        node = self._nodes.node
        strays = [place for group, home in homes.items() if home != node for place in places[group] if place in found]
        leaving = [(place, found.pop(place), self._grades.pop(place, None)) for place in strays]
        mine = {place for group in homes if any(one in found for one in places[group]) for place in places[group]}
        for place, completion, grade in itertools.chain.from_iterable(from_each(leaving)):
            # one that was aborted may be in one place, and what came of asking again in another
            if place in mine and (place not in found or found[place].finish_reason == "abort"):
                found[place] = completion
                self._grades.pop(place, None)
                if grade is not None:
                    self._grades[place] = grade

    def take_grades(self) -> dict[int, Grade]:
        """The hook's grades of the completions of the last `finish`, by position in its requests; empty without a
        hook, and for requests of a stream."""
        taken, self._grades = self._grades, {}
        return taken

    def probe(
        self, requests: Sequence[Request], sampling: Sampling, *, alone: bool = False
    ) -> list[tuple[str, Completion]]:
        """See `Engine.probe`. All servers at once. One without a whole answer in `_PROBE_S` is logged and left out of
        the result; whether it is out is decided by its health probe."""

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

    def rest(self) -> None:
        """No generation until the next `load_weights`: colocated servers give their device memory back. What was
        started and is not finished goes on then."""
        if self._own is not None and self._config.rollout.servers.colocate:
            # one that started now would take memory during the update
            self._own.await_started(self._zero.ask(lambda zero: zero.fleet.starting()))
            # every rank waits: before, the servers still hold its GPU
            self._own.end(self._sync.sleep(keeps=bool(self._started)))

    def health(self) -> dict[str, str]:
        """As rank 0 sees it."""
        return self._zero.ask(lambda zero: zero.fleet.health())

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
            self._zero.here(lambda zero: each.callback(zero.fleet.close))
            if self._client is not None:
                each.callback(self._client.close)
            self._zero.here(lambda zero: each.callback(zero.clients.close))
            with suppress(RunAborted):  # a client that has ended has nothing to be cancelled
                self._zero.here(lambda zero: zero.abort(self._started))

    def _go_on(self) -> None:
        """After a sync, which may have found the rollouts with nothing in flight and nobody to ask."""
        self._zero.here(lambda zero: zero.background.go_on())

    def _make_channel(self, name: ChannelName, device_map: DeviceMap) -> Channel:
        """On every rank: some take part in a sync though only rank 0 talks to servers."""
        rollout, fleet = self._config.rollout, self._zero.here(lambda zero: zero.fleet)
        bucket_bytes, timeout_s = rollout.sync.bucket_mb << 20, rollout.limits.sync_timeout_s
        if name == "disk":
            run_dir = Path(self._config.run_dir)
            # two runs may share a directory; a run that is started again must find its own, to remove it
            own = f"{run_dir.name}_{zlib.crc32(str(run_dir.absolute()).encode()):08x}"
            directory = Path(rollout.sync.dir) / own if rollout.sync.dir else run_dir / "sync"
            return DiskChannel(fleet, directory, self._config.model.hf_path, bucket_bytes, timeout_s)
        if name == "ipc":
            return SharedMemoryChannel(fleet, device_map, OFFERS[rollout.engine], bucket_bytes, timeout_s)
        return BroadcastChannel(fleet, name, bucket_bytes, timeout_s)

    def _restart(self) -> None:
        """The job's own servers that have ended or hang are started again, on every machine."""
        if self._own is not None:
            again = self._own.restart(self._zero.ask(lambda zero: zero.fleet.hanging()))
            self._zero.here(lambda zero: zero.fleet.restarted(again))

    def _plan(self, requests: Sequence[Request], sampling: Sampling, number: int = 0) -> Work:
        """The requests in groups. The same on every rank; a probe is rank 0's alone, and has no number."""
        trains = not any(request.stream for request in requests)
        size = selection_settings(self._config).widest_group
        if not (trains and number):  # else `Work.spread` sees to it, and the parts stay together
            size = min(size, self._config.rollout.limits.max_concurrent_sequences)
        groups, places = grouped(requests, sampling, size, self._stop_ids, self._replayed)
        newest = self._sync.version + max(1, self._config.rollout.async_steps)
        expected = Expected(self._vocab_size, self._sync.version, newest, self._sync.run)
        prompts = []
        if trains and self._grades_in_client and self._zero.is_here:
            prompts = [pickle.dumps(replace(requests[place[0]].prompt, token_ids=())) for place in places]
        work = Work(groups, expected, prompts, places, may_lose=trains, may_split=trains)
        work.order = requests[0].step if trains and requests else 0  # an evaluation is asked before every step
        work.number = number
        return work

    def _take(self, work: Work) -> dict[int, Completion]:
        """What this node's client holds for this rank, by position in the requests, in their order."""
        if self._nodes.node not in self._owners:
            return {}
        shares = self._nodes.neighbours
        found = {}
        for arrived in take(self._take_path, self._secret, shares.index(self._nodes.rank), len(shares), work.number):
            place = work.places[arrived.index][arrived.position]
            found[place] = arrived.completion
            if arrived.grade is not None:
                self._grades[place] = arrived.grade
        return dict(sorted(found.items()))
