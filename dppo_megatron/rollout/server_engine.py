"""Servers as the loop's engine. Rank 0 talks to them; the other ranks hand in requests, take results, and feed syncs.

One rank is enough: a server's time goes into generating, and with a single speaker the load balance, the retries and
the weights version are facts in one place instead of agreements between many.
"""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dppo_megatron.config.rollout import RolloutConfig
from dppo_megatron.config.schema import Config
from dppo_megatron.distributed import barrier, collect, from_rank_zero, share
from dppo_megatron.randomness import generator
from dppo_megatron.rollout.engine import Request, Sampling, Weights
from dppo_megatron.rollout.servers.connect import Connection, connect
from dppo_megatron.rollout.servers.fleet import Fleet, NeedsWeights, Work
from dppo_megatron.rollout.servers.http import Refused, Unreachable
from dppo_megatron.rollout.servers.protocol import GenerateRequest, Sampled
from dppo_megatron.rollout.sync.channels import BroadcastChannel, Channel, DiskChannel, SharedMemoryChannel, on_each
from dppo_megatron.rollout.sync.receipts import Digests, differing
from dppo_megatron.rollout.sync.weight_sync import pause_for_update, put_to_sleep, resume_and_confirm, wake
from dppo_megatron.types import Completion, GuardStop
from dppo_megatron.weights.architecture import Architecture

_OWN_FILES = 256
"""Open files that the trainer itself may need, beside a socket for each group in flight."""
_PROBE_S = 120.0
_RETRY_S = 1.0


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
        self._version = 0
        self._weights: Weights | None = None
        self._statistics: dict[str, float] = {}
        self._started: _Background | None = None
        self._connection: Connection | None = None
        self.description: str = from_rank_zero(lambda: self._connect(config, architecture, say))

    def load_weights(self, weights: Weights) -> None:
        """Sync every server that answers; see `sync.py`. Raises GuardStop if none has the weights in the end."""
        self._version += 1
        self._weights = weights
        if self._config.rollout.servers.colocate:
            torch.cuda.empty_cache()  # what the update has freed is the servers' now, and torch would keep it
            barrier()
        if self._connection is not None:
            self._fleet.expect(str(self._version))
        self._sync()

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """See `Engine.generate`."""
        self.start(requests, sampling)
        return self.finish()

    def stream(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[tuple[int, Completion]]:
        """See `Engine.stream`. With several ranks all of it comes at the end."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            yield from enumerate(self.generate(requests, sampling))
            return
        work, places = self._plan(requests, sampling)
        while True:
            try:
                for index, sampled in self._fleet.run(work):
                    yield from zip(places[index], map(self._completion, sampled), strict=True)
                break
            except NeedsWeights:
                self._sync()
        self._count(work)

    def start(self, requests: Sequence[Request], sampling: Sampling) -> None:
        """Begin generating in the background; `finish` returns what `generate` would."""
        everything = collect(requests)
        self._started = _Background(len(everything))
        if self._connection is not None:
            work, places = self._plan(everything, sampling)
            self._started.begin(self._fleet, work, places)

    def finish(self) -> list[Completion]:
        """Wait for what `start` began."""
        started = self._started
        assert started is not None, "start comes first"
        self._started = None
        while from_rank_zero(started.wait):
            self._sync()
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

        return share(from_rank_zero(completions))

    def probe(self, requests: Sequence[Request], sampling: Sampling) -> list[tuple[str, Completion]]:
        """See `Engine.probe`. A server that fails is marked out and left out."""

        def ask() -> list[tuple[str, Completion]]:
            """On rank 0: one server after the other."""
            work, _ = self._plan(requests, sampling)
            answers = []
            for member in self._fleet.live:
                for group, how in zip(work.groups, work.samplings, strict=True):
                    try:
                        sampled = member.server.generate(group, how, timeout_s=_PROBE_S)
                    except (Unreachable, Refused) as error:
                        self._fleet.mark_out(member, str(error))
                        break
                    answers += [(member.name, self._completion(one)) for one in sampled if len(one.token_ids)]
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
            pause_for_update(
                self._fleet,
                self._fleet.live,
                self._config.rollout.sync.in_flight,
                self._config.rollout.limits.sync_timeout_s,
            )

    def resume(self) -> None:
        """After `pause`."""
        if self._connection is not None:
            timeout_s = self._config.rollout.limits.sync_timeout_s
            on_each(
                self._fleet, self._fleet.live, lambda member: member.server.resume(timeout_s=timeout_s), doing="resume"
            )

    def rest(self) -> None:
        """No generation until the next `load_weights`: colocated servers give their device memory back."""
        if self._config.rollout.servers.colocate:  # every rank waits: its GPU is not its own before
            from_rank_zero(self._put_to_sleep)

    def health(self) -> dict[str, str]:
        """Rank 0's view."""
        return from_rank_zero(lambda: self._fleet.health())

    def statistics(self) -> dict[str, float]:
        """`rollout/retries`, `cut_completions`, `servers_live`, `sync_s` and `tensors_verified`, since last asked."""
        taken, self._statistics = self._statistics, {}
        return taken

    def close(self) -> None:
        """End launched servers; leave the others to their owner, without requests of ours."""
        self.abort()
        if self._connection is not None:
            self._fleet.close()
            self._channel.close()

    def _put_to_sleep(self) -> None:
        """Also those that are just starting or have come back, which would take their memory during the update."""
        assert self._connection is not None
        self._fleet.wait_for_starting(self._config.rollout.limits.start_timeout_s)
        self._fleet.revive()
        put_to_sleep(self._fleet, self._config.rollout.limits.sync_timeout_s)

    @property
    def _fleet(self) -> Fleet:
        assert self._connection is not None
        return self._connection.fleet

    def _connect(self, config: Config, architecture: Architecture, say: Callable[[str], None]) -> str:
        self._connection = connect(config, architecture, say, _max_groups(config.rollout))
        connection = self._connection
        self._channel = self._make_channel(connection)
        return connection.description

    def _make_channel(self, connection: Connection) -> Channel:
        rollout, fleet, name = self._config.rollout, connection.fleet, connection.channel
        bucket_bytes, timeout_s = rollout.sync.bucket_mb << 20, rollout.limits.sync_timeout_s
        if name == "disk":
            directory = Path(rollout.sync.dir or Path(self._config.run_dir) / "sync")
            return DiskChannel(fleet, directory, self._config.model.hf_path, bucket_bytes, timeout_s)
        if name == "ipc":
            return SharedMemoryChannel(fleet, bucket_bytes, timeout_s)
        return BroadcastChannel(fleet, name, connection.world_sizes, bucket_bytes, timeout_s)

    def _sync(self) -> None:
        """Passes over the weights until whoever can have them has them."""
        assert self._weights is not None, "load_weights comes first"
        started = time.perf_counter()
        passes, wait_until, again = 0, 0.0, True
        while again:
            problem = self._pass_to_the_end(self._weights())
            passes += 1
            wait_until = wait_until or time.monotonic() + self._config.rollout.limits.engine_wait_s

            def decide(problem: Exception | None = problem, passes: int = passes, until: float = wait_until) -> bool:
                return self._needs_another_pass(problem, passes, until)

            again = from_rank_zero(decide)
        self._statistics["rollout/sync_s"] = time.perf_counter() - started

    def _pass_to_the_end(self, tensors: Iterable[tuple[str, Tensor]]) -> Exception | None:
        """One pass, and what went wrong in it: the stream is collective, so every rank walks it to its end first."""
        stream = iter(tensors)
        problem: Exception | None = None
        if self._connection is not None:
            try:
                self._pass(stream)
            except Exception as error:  # whatever it is: alone, this rank would leave the others in the stream
                problem = error
        for _ in stream:
            pass
        return problem

    def _pass(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        rollout, fleet, version = self._config.rollout, self._fleet, str(self._version)
        timeout_s = rollout.limits.sync_timeout_s
        fleet.restart_dead()
        fleet.revive()
        members = [member for member in fleet.members if member.state == "stale"]
        digests = Digests() if self._verifies else None
        wake(fleet, members, "weights", timeout_s)
        if self._started is not None and rollout.sync.in_flight == "finish":
            self._started.join()
        pause_for_update(fleet, members, rollout.sync.in_flight, timeout_s)
        self._channel.push(digests.watch(tensors) if digests else tensors, members, version)
        wake(fleet, members, "kv_cache", timeout_s)
        resume_and_confirm(fleet, members, version, timeout_s)
        if digests is not None:
            self._compare(digests)

    @property
    def _verifies(self) -> bool:
        every = self._config.rollout.sync.verify_every
        return every > 0 and (self._version - 1) % every == 0

    def _compare(self, digests: Digests) -> None:
        compared = 0
        for member in self._fleet.live:
            try:
                held = member.server.checksums(timeout_s=self._config.rollout.limits.sync_timeout_s)
            except (Unreachable, Refused) as error:
                self._fleet.mark_out(member, f"no receipt for weight sync {self._version}: {error}")
                continue
            names, compared = differing(digests.found, held)
            if names:
                raise GuardStop(
                    f"{member.name} holds other bytes than weight sync {self._version} sent: {', '.join(names[:8])}"
                    f" ({len(names)} of {compared} tensors compared)"
                )
        self._statistics["rollout/tensors_verified"] = compared

    def _needs_another_pass(self, problem: Exception | None, passes: int, wait_until: float) -> bool:
        """A server that failed and answers again gets one more chance now, and the next at the next sync. With nobody
        left, whoever comes back before `wait_until` gets one. Raises GuardStop if nobody does."""
        if isinstance(problem, GuardStop):
            raise problem
        if problem is not None:
            raise GuardStop(f"weight sync {self._version} over {self._channel.name} failed: {problem}") from problem
        if self._fleet.live:
            return passes < 2 and self._any_stale()
        if passes > 1:
            time.sleep(_RETRY_S)
        while passes < 2 or time.monotonic() < wait_until:
            self._fleet.restart_dead()
            if self._any_stale():
                return True
            if time.monotonic() >= wait_until:
                break
            time.sleep(_RETRY_S)
        states = "; ".join(f"{name} {state}" for name, state in self._fleet.health().items())
        raise GuardStop(f"no rollout server has taken weight sync {self._version} ({states})")

    def _any_stale(self) -> bool:
        self._fleet.revive()
        return any(member.state == "stale" for member in self._fleet.members)

    def _plan(self, requests: Sequence[Request], sampling: Sampling) -> tuple[Work, list[list[int]]]:
        """The requests in groups, and where each group's completions go."""
        groups, samplings, places = grouped(requests, sampling, self._config.rollout.completions_per_prompt)
        with_stop = [replace(how, stop_token_ids=(*self._stop_ids, *how.stop_token_ids)) for how in samplings]
        versions = frozenset(str(v) for v in range(1, self._version + 2))
        trains = not any(request.stream for request in requests)
        return Work(groups, with_stop, versions, may_be_cut=trains), places

    def _completion(self, sampled: Sampled) -> Completion:
        versions = np.full(len(sampled.token_ids), self._version, dtype=np.int64)
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
            stale = sum((self._version - int(version)) * (end - start) for version, start, end in spans)
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
