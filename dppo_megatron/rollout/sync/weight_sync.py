"""A weight sync: one or more passes over the actor's stream of weights, which is collective.

Rank 0 (`ServerSide`) sends the stream to the servers, all at the same time, and decides whether another pass follows;
the other ranks iterate over it in step. At its end each rank of an actor that shares its device offloads its weights.
Only when all ranks have done so (stage `handed over`) do servers allocate their KV caches.

    reviving ─▶ waking ─▶ pausing ─▶ sending ─▶ handed over ─▶ finishing ─▶ proving ─▶ done
       ▲                                                                       │
       └──────────────── a stale server answers: another pass ─────────────────┘

A server becomes live when it reports the version that it was sent. A server that fails in a pass gets a second pass in
the same sync if it answers by then, else it waits for the next sync. A pass that failed because of another member of
the broadcast does not count. (A colocated server always waits for the next sync if another server is live: a second
pass would need memory for the actor's weights that the live server's KV cache occupies.) If no server is live, the sync
waits `limits.engine_wait_s`, then stops the run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from torch import Tensor

from dppo_megatron.config.rollout import RolloutConfig
from dppo_megatron.distributed import OnRankZero, from_rank_zero, gather_all
from dppo_megatron.rollout.engine import Weights
from dppo_megatron.rollout.servers.fleet import Fleet
from dppo_megatron.rollout.servers.http import Refused
from dppo_megatron.rollout.servers.member import Member
from dppo_megatron.rollout.servers.protocol import DEVICE_MEMORY, DeviceMemory
from dppo_megatron.rollout.servers.wire import version_name
from dppo_megatron.rollout.sync.channels import FAILURES, Channel, Tensors, at_once, drain, on_each
from dppo_megatron.rollout.sync.receipts import Digests, Receipt, differing
from dppo_megatron.spans import recorder
from dppo_megatron.texts import log
from dppo_megatron.types import RunAborted

Stage = Literal["done", "reviving", "waking", "pausing", "sending", "handed over", "finishing", "proving"]
Action = Literal["pass", "wait", "done"]
_RETRY_S = 1.0


class ServerSide:
    """Rank 0's part.

    Args:
        finish_requests: waits until all requests have finished (`sync.in_flight` = finish). Called while servers are
            still live, because requests in the queue must be sampled under the old weights too.
    """

    def __init__(
        self, rollout: RolloutConfig, channel: Channel, fleet: Fleet, finish_requests: Callable[[], None]
    ) -> None:
        self._rollout, self._channel, self._fleet = rollout, channel, fleet
        self._finish_requests = finish_requests
        self._timeout_s = rollout.limits.sync_timeout_s
        self._version, self._version_name = 0, ""
        self._checksums = Receipt("checksums")
        self._tensors_verified: int | None = None
        self._spans = recorder()
        self._reached_s = 0.0
        """When the current stage began, on the clock of the spans."""
        self.stage: Stage = "done"

    def begin(self, version: int, name: str) -> bool:
        """Begin a sync to `version`, which servers know as `name`. Returns whether it is to be proven."""
        if self._rollout.sync.in_flight == "finish":
            self._finish_requests()
        is_first, self._version, self._version_name = not self._version, version, name
        self._fleet.expect(name)
        every = self._rollout.sync.verify_every
        is_overdue = self._checksums.is_overdue and any(one.server.shows_checksums for one in self._fleet.members)
        return every > 0 and (is_first or (version - 1) % every == 0 or is_overdue)

    def take_tensors_verified(self) -> int | None:
        """Number of tensors that the last proof compared; None if there was none since the last call."""
        taken, self._tensors_verified = self._tensors_verified, None
        return taken

    def sleep(self, *, keeps: bool = False) -> list[str]:
        """Have every server that answers and is awake free its device memory for the actor. Returns the addresses of
        the job's own servers that are out: they may hold memory until they are ended. `keeps`: running requests, except
        leftovers of an outage, resume after the next sync, with their prefixes prefilled again."""
        fleet = self._fleet
        fleet.revive()
        self._put_to_sleep(fleet.members, keeps=keeps)
        return [member.name for member in fleet.members if member.is_own and member.state == "out"]

    def _put_to_sleep(self, members: Sequence[Member], *, keeps: bool = False) -> list[Member]:
        """Returns those of `members` that are asleep."""

        def sleep(member: Member) -> None:
            awake = DEVICE_MEMORY - member.asleep
            if not awake:
                return
            with self._fleet.lock:
                member.slept()  # before the call: if it times out, the server counts as asleep
            member.server.sleep(awake, keeps=keeps and not member.has_leftovers, timeout_s=self._timeout_s)

        return on_each(self._fleet, members, sleep, doing="going to sleep")

    def make_room(self) -> list[Member]:
        """The members of this pass. Colocated ones are asleep, so that the actor has the memory for its stream."""
        self._reach("waking")
        members = [member for member in self._fleet.members if member.state == "stale"]
        # a server that was restarted since the last `sleep` is awake
        return self._put_to_sleep(members) if self._rollout.servers.colocate else members

    def prepare(self, members: list[Member]) -> None:
        """Wake `members` for their weights and pause them as `sync.in_flight` says; removes those that fail. Called
        when the actor's stream is ready, so that servers are not paused while it gets ready."""

        def pause(member: Member) -> None:
            """New requests wait at the server, or are rejected (vLLM 0.33)."""
            # leftovers of an outage are aborted in any case: those requests have been retried elsewhere
            in_flight = "abort" if member.has_leftovers else self._rollout.sync.in_flight
            member.server.pause(in_flight, timeout_s=self._timeout_s)

        self._wake(members, "weights")
        self._reach("pausing")
        members[:] = on_each(self._fleet, members, pause)

    def send(self, tensors: Tensors, members: list[Member]) -> None:
        self._reach("sending")
        with self._fleet.taking_weights(members):
            members[:] = self._channel.push(tensors, tuple(members), self._version_name)
        self._reach("handed over")

    def finish(self, took: Sequence[Member], digests: Digests | None) -> None:
        """Resume generation on the servers that took the weights; compare checksums if `digests` are given."""
        self._reach("finishing")
        self._wake(took, "kv_cache")
        for member in on_each(self._fleet, took, self._resume):
            with self._fleet.lock:
                member.synced(self._version_name)
        if digests is not None and self._fleet.live:
            self._reach("proving")
            self._compare(digests)

    def _wake(self, members: Sequence[Member], what: DeviceMemory) -> None:
        """Weights before they are sent, the KV cache after: the actor's weights would not fit beside both."""

        def wake(member: Member) -> None:
            member.server.wake(what, timeout_s=self._timeout_s)
            with self._fleet.lock:
                member.woke(what)

        on_each(self._fleet, [m for m in members if what in m.asleep], wake, doing="waking up")

    def _resume(self, member: Member) -> None:
        """Resume generation and read back the weights version. Raises Refused if it is another."""
        member.server.resume(timeout_s=self._timeout_s)
        reported = member.server.weights_version(timeout_s=self._timeout_s)
        if reported != self._version_name:
            raise Refused(409, f"its weights version is '{reported}' after the sync of '{self._version_name}'")

    def _compare(self, digests: Digests) -> None:
        """Compare checksums of all live servers that offer any. One that does not answer is not marked out."""
        compared, answered = 0, 0
        sent = digests.result()
        members = [member for member in self._fleet.live if member.server.shows_checksums]
        for member, answer in at_once(members, lambda m: m.server.checksums(timeout_s=self._timeout_s)):
            error = answer.exception()
            if isinstance(error, FAILURES):
                log(f"rollout: no checksums of weight sync {self._version} from {member.name}: {error}")
                continue
            answered += 1
            for replica, held in enumerate(answer.result()):
                names, compared = differing(sent, held)
                if names:
                    raise RunAborted(
                        f"{member.part(replica)} holds other bytes than weight sync {self._version} sent:"
                        f" {', '.join(names[:8])} ({len(names)} of {compared} tensors compared)"
                    )
        self._tensors_verified = compared
        self._checksums.record(answered, len(members))

    def next(self, problem: Exception | None, passes: int, has_passed: bool, wait_until: float) -> Action:
        """Whether to make another pass, to wait a second for servers, or to end the sync.

        Args:
            problem: what went wrong in the last pass.
            has_passed: the last action was a pass: from the third pass on, a wait comes between two passes.
            wait_until: monotonic time after which no server is waited for.

        Raises RunAborted if the last pass failed, or no server has taken the weights by `wait_until`.
        """
        if isinstance(problem, RunAborted):
            raise problem
        if problem is not None:
            text = f"weight sync {self._version} over {self._channel.name} failed while {self.stage}: {problem}"
            raise RunAborted(text) from problem
        self._reach("reviving")
        fleet = self._fleet
        has_enough = bool(fleet.live) and (passes > 1 or (passes == 1 and self._rollout.servers.colocate))
        if not has_enough:
            fleet.revive()
        stale = {member.name for member in fleet.members if member.state == "stale"}
        if not stale.isdisjoint(self._channel.not_to_blame):
            return "pass"
        if fleet.live and (has_enough or not stale):
            self._reach("done")
            return "done"
        is_late = time.monotonic() >= wait_until
        if stale and (passes < 2 or not (has_passed or is_late)):
            return "pass"
        if not is_late:
            return "wait"
        states = "; ".join(f"{name} {state}" for name, state in fleet.health().items())
        raise RunAborted(
            f"no rollout server has taken weight sync {self._version} in rollout.limits.engine_wait_s ="
            f" {self._rollout.limits.engine_wait_s:g} s ({states})"
        )

    def _reach(self, stage: Stage) -> None:
        """Enter `stage`, and record the span of the one that ends."""
        now = self._spans.clock()
        if self.stage != "done":
            self._spans.add("weight sync", self.stage, self._reached_s, now)
        self.stage, self._reached_s = stage, now


class WeightSync:
    """The weight syncs of a run. Made on every rank; all calls but `take_figures` are collective.

    Args:
        fleet: None on ranks other than 0.
        finish_requests: see `ServerSide`; called on rank 0.
        restart: called on every rank before a pass and while waiting for servers; restarts the job's own servers.
        run: prefix of the version names at the servers (`wire.version_name`).

    Example:
        sync = WeightSync(rollout, channel, fleet, finish_requests)
        sync.sleep()                          # only with colocated servers: frees their memory for the actor
        is_proven = sync.to(actor.weights)    # version 1; servers wake up and generate with it
        sync.again()                          # the same version for servers that have come back since
    """

    def __init__(
        self,
        rollout: RolloutConfig,
        channel: Channel,
        fleet: Fleet | None,
        finish_requests: Callable[[], None] = lambda: None,
        run: str = "",
        restart: Callable[[], None] = lambda: None,
    ) -> None:
        self._channel, self._restart, self.run = channel, restart, run
        self._wait_s = rollout.limits.engine_wait_s
        self._zero = OnRankZero(None if fleet is None else ServerSide(rollout, channel, fleet, finish_requests))
        self._weights: Weights | None = None
        self._release: Callable[[], None] = lambda: None
        self._is_proven = False
        """Whether servers must prove the current sync: the first, every `verify_every`-th, and after a missed proof."""
        self.version = 0
        """Number of the last sync that began."""
        self._sync_s: float | None = None

    def to(self, weights: Weights, release: Callable[[], None] = lambda: None) -> bool:
        """Increment the version and send the weights to every server that answers. `release`: see `Engine`. Returns
        whether this sync is to be proven: checksums were compared, and the canary is due. Raises RunAborted if no
        server took the weights, or a server holds other weights than it was sent."""
        self.version += 1
        self._weights, self._release = weights, release
        name = version_name(self.run, self.version)
        self._is_proven = self._zero.ask(lambda zero: zero.begin(self.version, name))
        self.again()
        return self._is_proven

    def again(self) -> None:
        """Make passes over the current weights until every server that answers has them; waits for the first answer."""
        assert self._weights is not None, "a sync comes first"
        started, passes, problem = time.perf_counter(), 0, None
        wait_until, has_passed = time.monotonic() + self._wait_s, False

        def next_action(zero: ServerSide) -> Action:
            return zero.next(problem, passes, has_passed, wait_until)

        while (action := self._zero.ask(next_action)) != "done":
            has_passed = action == "pass"
            if not has_passed:
                time.sleep(_RETRY_S)
            self._restart()
            if has_passed:
                problem = self._make_pass(self._weights)
                passes += 1
                if passes == 1:
                    wait_until = time.monotonic() + self._wait_s
        self._sync_s = time.perf_counter() - started

    def take_figures(self) -> tuple[float | None, int | None]:
        """Seconds of the last sync, and number of tensors that its proof compared; None if none since the last call."""
        seconds, self._sync_s = self._sync_s, None
        return seconds, self._zero.here(ServerSide.take_tensors_verified)

    def sleep(self, *, keeps: bool = False) -> list[str]:
        return self._zero.ask(lambda zero: zero.sleep(keeps=keeps))

    def _make_pass(self, weights: Weights) -> Exception | None:
        """One pass; on rank 0, returns what went wrong. All ranks iterate to the stream's end, or none begins."""
        members: list[Member] = []
        problem: Exception | None = None
        stream_errors: list[Exception] = []

        def attempt(act: Callable[[ServerSide], None]) -> None:
            """Run `act` on rank 0, unless a step has failed. Keeps its error: other ranks may wait in the stream."""
            nonlocal problem
            try:
                if problem is None:
                    self._zero.here(act)
            except Exception as error:
                problem = error

        def prepare() -> list[str] | None:
            """On rank 0: the servers that get the weights; None if something is wrong."""
            attempt(lambda zero: zero.prepare(members))
            return [member.name for member in members] if problem is None else None

        # before any rank opens the stream, for which an actor may bring its weights back to the device
        from_rank_zero(lambda: attempt(lambda zero: members.extend(zero.make_room())))
        stream = _recording_errors(iter(weights()), stream_errors)
        names = from_rank_zero(prepare)
        if names is None:
            return problem
        if not self._zero.is_here:
            self._channel.take_part(stream, names)
        # only if needed: hashing takes a second per gigabyte, while servers are paused. Other ranks have no members
        compares = self._is_proven and any(member.server.shows_checksums for member in members)
        digests = Digests() if compares else None
        attempt(lambda zero: zero.send(digests.tee(stream) if digests else stream, members))
        if stream_errors:  # not a problem of a server: the stream itself has failed here, and other ranks wait in it
            raise stream_errors[0]
        drain(stream)
        self._release()
        gather_all([self._channel.name])  # a barrier: servers must not wake up before all ranks have released
        attempt(lambda zero: zero.finish(members, digests))
        return problem


def _recording_errors(stream: Tensors, errors: list[Exception]) -> Iterator[tuple[str, Tensor]]:
    """The same stream, adding an exception that ends it to `errors`, because a reader may suppress it."""
    try:
        yield from stream
    except Exception as error:
        errors.append(error)
        raise
