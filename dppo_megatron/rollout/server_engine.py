"""Servers as the loop's engine. Rank 0 talks to them; the other ranks hand in requests, take results, and feed syncs.

One rank is enough: a server's time goes into generating, and with a single speaker the load balance, the retries and
the weights version are facts in one place instead of agreements between many.
"""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from dppo_megatron.config.rollout import RolloutConfig
from dppo_megatron.config.schema import Config
from dppo_megatron.distributed import barrier, from_rank_zero, gather_all
from dppo_megatron.randomness import generator
from dppo_megatron.rollout.engine import Request, Sampling, Weights, own_requests
from dppo_megatron.rollout.servers.connect import ChannelName, Connection, connect
from dppo_megatron.rollout.servers.fleet import Fleet, NeedsWeights, Work
from dppo_megatron.rollout.servers.member import Member
from dppo_megatron.rollout.servers.protocol import GenerateRequest, Sampled
from dppo_megatron.rollout.servers.seats import Seats, this_device
from dppo_megatron.rollout.sync.broadcast import BroadcastChannel
from dppo_megatron.rollout.sync.channels import FAILURES, Channel, DiskChannel, at_once
from dppo_megatron.rollout.sync.colocated import OFFERS, SharedMemoryChannel
from dppo_megatron.rollout.sync.weight_sync import WeightSync
from dppo_megatron.types import Completion
from dppo_megatron.weights.architecture import Architecture

_OWN_FILES = 256
"""Open files that the trainer itself may need, beside a socket for each group in flight."""
_PROBE_S = 120.0


class ServerEngine:
    """vLLM or SGLang servers as `rollout` says. Collective, like every `Engine`.

    Args:
        say: takes lines for the person who watches; used on rank 0.

    Raises:
        UserError: a server cannot be reached, serves another model, is too old, or was started without what is needed.
    """

    def __init__(
        self,
        config: Config,
        architecture: Architecture,
        tokenizer: PreTrainedTokenizerBase,
        say: Callable[[str], None] = print,
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._stop_ids = (int(tokenizer.eos_token_id),)
        self._statistics: dict[str, float] = {}
        self._started: _Background | None = None
        self._own: list[int] = []
        """Positions of the requests whose completions this rank gets."""
        self._connection: Connection | None = None
        self.has_servers = True
        devices = gather_all([this_device()])

        def start() -> tuple[str, ChannelName, dict[str, int], Seats]:
            """On rank 0: find or start the servers."""
            self._connection = found = connect(config, architecture, say, _max_groups(config.rollout), devices)
            return found.description, found.channel, found.world_sizes, found.seats

        self.description, name, world_sizes, seats = from_rank_zero(start)
        fleet = self._connection.fleet if self._connection is not None else None
        self._sync = WeightSync(
            config.rollout, self._make_channel(name, world_sizes, seats), fleet, self._settle_requests
        )

    @property
    def receivers(self) -> Sequence[int]:
        """See `Engine.receivers`: rank 0, or the ranks on the servers' GPUs."""
        return self._sync.receivers

    def load_weights(self, weights: Weights) -> bool:
        """Sync every server that answers; see `sync/weight_sync.py`. Raises GuardStop if none has the weights in the
        end."""
        if self._config.rollout.servers.colocate:
            torch.cuda.empty_cache()  # what the update has freed is the servers' now, and torch would keep it
            barrier()
        return self._sync.to(weights)

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """See `Engine.generate`."""
        self.start(requests, sampling)
        return list(self.finish().values())

    def stream(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[tuple[int, Completion]]:
        """See `Engine.stream`. With several ranks all of it comes at the end."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            self.start(requests, sampling)
            yield from self.finish().items()
            return
        work, places = self._plan(requests, sampling)
        while True:
            try:
                for index, sampled in self._fleet.run(work):
                    yield from zip(places[index], map(self._completion, sampled), strict=True)
                break
            except NeedsWeights:
                self._sync.again()
        self._count(work)

    def start(self, requests: Sequence[Request], sampling: Sampling) -> None:
        """Begin generating in the background; `finish` returns what `generate` would."""
        self._started, self._own = _Background(len(requests)), own_requests(requests)
        if self._connection is not None:
            work, places = self._plan(requests, sampling)
            self._started.begin(self._fleet, work, places)

    def finish(self) -> dict[int, Completion]:
        """Wait for what `start` began."""
        started = self._started
        assert started is not None, "start comes first"
        self._started = None
        while from_rank_zero(started.wait):
            self._sync.again()
            if self._connection is not None:
                started.again(self._fleet)

        def completions() -> list[Completion]:
            """On rank 0, which has the answers."""
            assert started.work is not None
            found: list[Completion | None] = [None] * started.count
            for index, sampled in started.work.done.items():
                for place, one in zip(started.places[index], sampled, strict=True):
                    found[place] = self._completion(one)
            self._count(started.work)
            return [one for one in found if one is not None]

        everything = from_rank_zero(completions)
        return {position: everything[position] for position in self._own}

    def probe(self, requests: Sequence[Request], sampling: Sampling) -> list[tuple[str, Completion]]:
        """See `Engine.probe`. All servers at once. One that gives no whole answer in time is left out, which is said;
        whether it is out is for its health probe to find."""

        def ask() -> list[tuple[str, Completion]]:
            """On rank 0."""
            work, _ = self._plan(requests, sampling)

            def ask_one(member: Member) -> list[Sampled]:
                """All groups; an unfinished one is none."""
                deadline = time.monotonic() + _PROBE_S
                found: list[Sampled] = []
                for group, how in zip(work.groups, work.samplings, strict=True):
                    found += member.server.generate(group, how, timeout_s=max(1.0, deadline - time.monotonic()))
                return found

            answers = []
            for member, answer in at_once(self._fleet.live, ask_one):
                error = answer.exception()
                if isinstance(error, FAILURES):
                    self._fleet.say(f"rollout: {member.name} has not answered the canary: {error}")
                else:
                    answers += [(member.name, self._completion(one)) for one in answer.result() if len(one.token_ids)]
            return answers

        return from_rank_zero(ask)

    def abort(self) -> None:
        """Also at the servers, so that they do not go on for nobody."""
        started, self._started = self._started, None
        if started is not None and started.work is not None:
            started.work.given_up = True
            started.join()

    def pause(self) -> None:
        """Every live server; one that fails is marked out."""
        if self._connection is not None:
            self._sync.pause(self._fleet.live)

    def resume(self) -> None:
        """After `pause`."""
        if self._connection is not None:
            self._sync.resume(self._fleet.live)

    def rest(self) -> None:
        """No generation until the next `load_weights`: colocated servers give their device memory back."""
        if self._config.rollout.servers.colocate:  # every rank waits: its GPU is not its own before
            from_rank_zero(lambda: self._sync.sleep())

    def health(self) -> dict[str, str]:
        """Rank 0's view."""
        return from_rank_zero(lambda: self._fleet.health())

    def statistics(self) -> dict[str, float]:
        """`rollout/retries`, `cut_completions`, `servers_live`, `sync_s` and `tensors_verified`, since last asked."""
        taken, self._statistics = self._statistics | self._sync.measured, {}
        self._sync.measured = {}
        return taken

    def close(self) -> None:
        """End launched servers; leave the others to their owner, without requests of ours."""
        self.abort()
        if self._connection is not None:
            self._fleet.close()
        self._sync.close()

    @property
    def _fleet(self) -> Fleet:
        assert self._connection is not None
        return self._connection.fleet

    def _make_channel(self, name: ChannelName, world_sizes: dict[str, int], seats: Seats) -> Channel:
        """On every rank: some take part in a sync though only rank 0 talks to servers."""
        rollout, fleet = self._config.rollout, self._connection.fleet if self._connection is not None else None
        bucket_bytes, timeout_s = rollout.sync.bucket_mb << 20, rollout.limits.sync_timeout_s
        if name == "disk":
            directory = Path(rollout.sync.dir or Path(self._config.run_dir) / "sync")
            return DiskChannel(fleet, directory, self._config.model.hf_path, bucket_bytes, timeout_s)
        if name == "ipc":
            return SharedMemoryChannel(fleet, seats, OFFERS[rollout.engine], bucket_bytes, timeout_s)
        return BroadcastChannel(fleet, name, world_sizes, bucket_bytes, timeout_s)

    def _settle_requests(self) -> None:
        """On rank 0, before a sync that waits for running requests."""
        if self._started is not None:
            self._started.join()

    def _plan(self, requests: Sequence[Request], sampling: Sampling) -> tuple[Work, list[list[int]]]:
        """The requests in groups, and where each group's completions go."""
        groups, samplings, places = grouped(requests, sampling, self._config.rollout.completions_per_prompt)
        with_stop = [replace(how, stop_token_ids=(*self._stop_ids, *how.stop_token_ids)) for how in samplings]
        versions = frozenset(str(v) for v in range(1, self._sync.version + 2))
        trains = not any(request.stream for request in requests)
        return Work(groups, with_stop, versions, may_be_cut=trains), places

    def _completion(self, sampled: Sampled) -> Completion:
        versions = np.full(len(sampled.token_ids), self._sync.version, dtype=np.int64)
        for version, start, end in sampled.weights_versions:
            versions[start:end] = int(version)
        ids = sampled.token_ids
        return Completion(
            token_ids=ids,
            logprobs=sampled.logprobs,
            finish_reason="stop" if sampled.finish_reason == "stop" else "length",
            text=self._tokenizer.decode(ids, skip_special_tokens=True),
            weights_versions=versions,
        )

    def _count(self, work: Work) -> None:
        if work.done:
            spans = [span for group in work.done.values() for one in group for span in one.weights_versions]
            tokens = sum(end - start for _, start, end in spans)
            stale = sum((self._sync.version - int(version)) * (end - start) for version, start, end in spans)
            self._statistics["rollout/staleness_mean"] = stale / max(tokens, 1)
        counts = {"rollout/retries": work.retries, "rollout/cut_completions": work.cut_completions}
        for name, count in counts.items():
            self._statistics[name] = self._statistics.get(name, 0.0) + count
        self._statistics["rollout/servers_live"] = len(self._fleet.live)


def grouped(
    requests: Sequence[Request], sampling: Sampling, size: int
) -> tuple[list[GenerateRequest], list[Sampling], list[list[int]]]:
    """Consecutive completions of one prompt as one group of at most `size`, so that they share a prefill.

    With several ranks the requests of a prompt are not next to each other: ranks take turns. How requests are grouped
    changes no completion: completion i of a prompt has the prompt's seed + i.

    Returns:
        The groups, how each is sampled, and the positions in `requests` of each one's completions.

    Example:
        completions (prompt 7: 0, 1, 2), (prompt 9: 0), size 2  ->  groups of 2, 1 and 1; places [0, 1], [2], [3]
    """
    places: list[list[int]] = []
    latest: dict[tuple[str, int, int], list[int]] = {}
    for place, request in enumerate(requests):
        prompt = request.stream, request.step, request.prompt.index
        group = latest.get(prompt)
        follows = group is not None and requests[group[-1]].completion_index + 1 == request.completion_index
        if group is not None and follows and len(group) < size:
            group.append(place)
        else:
            latest[prompt] = [place]
            places.append(latest[prompt])
    groups, samplings = [], []
    for members in places:
        first = requests[members[0]]
        how = first.sampling or sampling
        draw = generator(how.seed, first.purpose, first.step, first.prompt.index, 0).integers(1 << 30)
        groups.append(
            GenerateRequest(first.id, first.prompt.token_ids, len(members), seed=int(draw) + first.completion_index)
        )
        samplings.append(how)
    return groups, samplings, places


def _max_groups(rollout: RolloutConfig) -> int:
    """Groups in flight on one server: as many as it runs sequences, for a group may be of one; but no more than this
    process can open sockets for, all servers together."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    servers = len(rollout.servers.endpoints) or rollout.servers.count
    sockets = (
        rollout.limits.max_concurrent_sequences if limit == resource.RLIM_INFINITY else (limit - _OWN_FILES) // servers
    )
    return max(1, min(rollout.limits.max_concurrent_sequences, sockets))


class _Background:
    """One rollout in a thread of rank 0; on other ranks an empty shell."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.work: Work | None = None
        self.places: list[list[int]] = []
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def begin(self, fleet: Fleet, work: Work, places: list[list[int]]) -> None:
        self.work, self.places = work, places
        self.again(fleet)

    def again(self, fleet: Fleet) -> None:
        """Start, or go on after a sync, with what is not done."""
        self._error = None
        self._thread = threading.Thread(target=self._run, args=(fleet,), name="rollout", daemon=True)
        self._thread.start()

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def wait(self) -> bool:
        """Returns when the thread has ended; True if servers need weights before it can go on."""
        self.join()
        if self._error is not None and not isinstance(self._error, NeedsWeights):
            raise self._error
        return self._error is not None

    def _run(self, fleet: Fleet) -> None:
        assert self.work is not None
        try:
            for _ in fleet.run(self.work):
                pass
        except BaseException as error:
            self._error = error
