"""All of a weight sync: which servers get the weights, the order of calls, when one is up to date, and the proof.

One sync is one or more passes over the actor's stream. Every rank walks every pass, because the stream is collective;
rank 0 speaks to the servers, all of them at the same time in each step of the line:

    reviving ─▶ waking ─▶ pausing ─▶ sending ─▶ handed over ─▶ finishing ─▶ proving ─▶ done
       ▲                                                                       │
       └──────────────── a stale server answers: another pass ─────────────────┘

All ranks meet at `handed over`: each has walked the stream to its end, and an actor that shares its device offloads its
weights there. Only then do servers take memory for their caches.

A server is live when it reports the version that it was sent, and no sooner. A server that failed in a pass gets a
second pass in this sync if it answers, and else the next sync; a pass that was lost because a neighbour in the
broadcast failed does not count. (A colocated server waits for the next sync if another is live: that one's cache has
the memory that the actor's weights would need.) With none live, the sync waits `limits.engine_wait_s`, then stops the
run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, cast

from dppo_megatron.config.rollout import RolloutConfig
from dppo_megatron.distributed import from_rank_zero, gather_all
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
_RETRY_S = 1.0


class WeightSync:
    """The syncs of a run. Made on every rank, and every call but `sleep` is collective.

    Args:
        fleet: on rank 0; None elsewhere.
        settle_requests: called on rank 0 where requests are to finish first, with servers live as before: requests that
            still wait for room must be asked under the old weights too.
        restart: called on every rank before a pass, and while a server is waited for: starts this job's own servers
            that have ended again.
        run: prefix of the versions' names at the servers (`wire.version_name`).

    Example:
        sync = WeightSync(rollout, channel, fleet, settle_requests)
        sync.sleep()                          # the actor needs the memory; only colocated servers
        proven = sync.to(actor.weights)       # version 1; wakes them, live ones generate with it
        sync.again()                          # the same version to servers that have come back meanwhile
    """

    def __init__(
        self,
        rollout: RolloutConfig,
        channel: Channel,
        fleet: Fleet | None,
        settle_requests: Callable[[], None] = lambda: None,
        run: str = "",
        restart: Callable[[], None] = lambda: None,
    ) -> None:
        self._spans = recorder()
        self._reached_s = 0.0
        """When the present stage began, on the clock of the spans."""
        self._rollout, self._channel, self._is_zero = rollout, channel, fleet is not None
        self._fleet = cast(Fleet, fleet)  # used on rank 0, which talks to the servers
        self._settle_requests, self._restart = settle_requests, restart
        self._timeout_s = rollout.limits.sync_timeout_s
        self._weights: Weights | None = None
        self._release: Callable[[], None] = lambda: None
        self._checksums = Receipt("checksums")
        self._proves = False
        """The present sync is proven: the first, every `verify_every`-th, one after a proof without an answer. The same
        on every rank."""
        self.run = run
        self.version = 0
        """Number of the last sync that was begun; the one counter of syncs."""
        self.stage: Stage = "done"
        """How far the present pass is."""
        self._sync_s: float | None = None
        self._tensors_verified: int | None = None

    def to(self, weights: Weights, release: Callable[[], None] = lambda: None) -> bool:
        """Count one version up and bring it to every server that answers.

        Args:
            release: see `Engine.load_weights`.

        Returns:
            Whether this sync is one of those that are proven: checksums were asked for, and the canary is due.

        Raises:
            RunAborted: no server has the weights in the end, or one holds others than it was sent.
        """
        self.version += 1
        self._weights, self._release = weights, release
        self._proves = from_rank_zero(self._begin)
        self.again()
        return self._proves

    def _begin(self) -> bool:
        """On rank 0: no server is live from now on. Whether this sync is proven: only rank 0 has the receipts."""
        if self._rollout.sync.in_flight == "finish":
            self._settle_requests()
        self._fleet.expect(version_name(self.run, self.version))
        every = self._rollout.sync.verify_every
        return every > 0 and ((self.version - 1) % every == 0 or self._checksums.is_overdue)

    def again(self) -> None:
        """Passes over the present weights until every server that answers has them; the first when one answers."""
        assert self._weights is not None, "a sync comes first"
        started, passes, problem = time.perf_counter(), 0, None
        wait_until, what = time.monotonic() + self._rollout.limits.engine_wait_s, ""
        while (what := from_rank_zero(partial(self._next, problem, passes, what == "pass", wait_until))) != "done":
            if what == "wait":
                time.sleep(_RETRY_S)
            self._restart()
            if what == "pass":
                problem = self._pass_to_the_end(self._weights)
                passes += 1
                if passes == 1:
                    wait_until = time.monotonic() + self._rollout.limits.engine_wait_s
        self._reach("done")
        self._sync_s = time.perf_counter() - started

    def take_figures(self) -> tuple[float | None, int | None]:
        """Seconds of the last sync and tensors that its proof compared; None if there was none since last asked."""
        taken = self._sync_s, self._tensors_verified
        self._sync_s = self._tensors_verified = None
        return taken

    def sleep(self, *, keeps: bool = False) -> list[str]:
        """On rank 0: device memory back to the actor, from every server that answers and is awake. Returns the job's
        own that are out, by address: they may hold theirs until they are ended.

        Args:
            keeps: requests go on after the next sync, with their prefixes read again. Else what still runs there has
                been given up, by this run or by an earlier one; what an outage has left is in any case.
        """
        fleet = self._fleet
        fleet.revive()
        self._put_to_sleep(fleet.members, keeps=keeps)
        return [member.name for member in fleet.members if member.is_own and member.state == "out"]

    def _put_to_sleep(self, members: Sequence[Member], *, keeps: bool = False) -> list[Member]:
        """Those of `members` that sleep now."""

        def sleep(member: Member) -> None:
            """On a timeout it counts as asleep."""
            awake = DEVICE_MEMORY - member.asleep
            if not awake:
                return
            with self._fleet.lock:
                member.slept()
            member.server.sleep(awake, keeps=keeps and not member.has_leftovers, timeout_s=self._timeout_s)

        return on_each(self._fleet, members, sleep, doing="going to sleep")

    def _pause(self, members: Sequence[Member]) -> list[Member]:
        """On rank 0: running requests are treated by `sync.in_flight`, leftovers of an outage are ended, since their
        ids come back; new ones wait at the server. Returns those that are paused."""
        return on_each(
            self._fleet,
            members,
            lambda m: m.server.pause(
                "abort" if m.has_leftovers else self._rollout.sync.in_flight, timeout_s=self._timeout_s
            ),
        )

    def _reach(self, stage: Stage) -> None:
        """The next stage begins, and the present one ends."""
        now = self._spans.clock()
        if self.stage != "done":
            self._spans.add("weight sync", self.stage, self._reached_s, now)
        self.stage, self._reached_s = stage, now

    def _pass_to_the_end(self, weights: Weights) -> Exception | None:
        """One pass, and on rank 0 what went wrong in it. Every rank walks the stream to its end, or none begins."""
        members: list[Member] = []
        problem: Exception | None = None
        digests = Digests() if self._proves and self._is_zero else None

        def attempt(act: Callable[[], None]) -> None:
            """On rank 0: an error raised there would leave the other ranks alone in the stream."""
            nonlocal problem
            try:
                if self._is_zero and problem is None:
                    act()
            except Exception as error:
                problem = error

        def ready() -> list[str] | None:
            """On rank 0: who gets the weights; None if something is wrong."""
            attempt(lambda: self._prepare(members))
            return [member.name for member in members] if problem is None else None

        # no rank asks for the stream before it has room: an actor may bring its weights back to the device for it
        from_rank_zero(lambda: attempt(lambda: members.extend(self._make_room())))
        stream = iter(weights())
        names = from_rank_zero(ready)
        if names is None:
            return problem
        if not self._is_zero:
            self._channel.take_part(stream, names)
        attempt(lambda: self._send(digests.tee(stream) if digests else stream, members))
        drain(stream)
        self._release()
        gather_all([self._channel.name])  # all have handed over
        attempt(lambda: self._finish(members, digests))
        return problem

    def _make_room(self) -> list[Member]:
        """On rank 0: the members of this pass, without memory of the actor's."""
        self._reach("waking")
        members = [member for member in self._fleet.members if member.state == "stale"]
        # one that was started again has all of its memory
        return self._put_to_sleep(members) if self._rollout.servers.colocate else members

    def _prepare(self, members: list[Member]) -> None:
        """On rank 0: awake for weights and paused, which is not to last while the actor makes its stream ready. Keeps
        those in `members` that are."""
        self._wake(members, "weights")
        self._reach("pausing")
        members[:] = self._pause(members)

    def _send(self, tensors: Tensors, members: list[Member]) -> None:
        """On rank 0: keeps those in `members` that took everything."""
        self._reach("sending")
        members[:] = self._channel.push(tensors, tuple(members), version_name(self.run, self.version))
        self._reach("handed over")

    def _finish(self, took: Sequence[Member], digests: Digests | None) -> None:
        """On rank 0: servers that took the weights generate, and prove it if a proof is due."""
        self._reach("finishing")
        self._wake(took, "kv_cache")
        self._open(took, version_name(self.run, self.version))
        if digests is not None and self._fleet.live:
            self._reach("proving")
            self._compare(digests)

    def _wake(self, members: Sequence[Member], what: DeviceMemory) -> None:
        """Weights before an update and the cache after it: both beside the actor's update would not fit."""

        def wake(member: Member) -> None:
            member.server.wake(what, timeout_s=self._timeout_s)
            with self._fleet.lock:
                member.woke(what)

        on_each(self._fleet, [m for m in members if what in m.asleep], wake, doing="waking up")

    def _open(self, members: Sequence[Member], version: str) -> None:
        """Generate again, and read the version back. Those that agree are live."""

        def finish(member: Member) -> None:
            """Refused if it reports other weights than it was sent."""
            member.server.resume(timeout_s=self._timeout_s)
            found = member.server.weights_version(timeout_s=self._timeout_s)
            if found != version:
                raise Refused(409, f"its weights version is '{found}' after the sync of '{version}'")

        for member in on_each(self._fleet, members, finish):
            with self._fleet.lock:
                member.synced(version)

    def _compare(self, digests: Digests) -> None:
        """Checksums of all live servers at the same time. One that does not answer is no outage, and no proof."""
        compared, answered = 0, 0
        sent = digests.result()
        live = self._fleet.live
        for member, answer in at_once(live, lambda m: m.server.checksums(timeout_s=self._timeout_s)):
            error = answer.exception()
            if isinstance(error, FAILURES):
                log(f"rollout: no checksums of weight sync {self.version} from {member.name}: {error}")
                continue
            answered += 1
            for replica, held in enumerate(answer.result()):
                names, compared = differing(sent, held)
                if names:
                    raise RunAborted(
                        f"{member.part(replica)} holds other bytes than weight sync {self.version} sent:"
                        f" {', '.join(names[:8])} ({len(names)} of {compared} tensors compared)"
                    )
        self._tensors_verified = compared
        self._checksums.settle(answered, len(live))

    def _next(self, problem: Exception | None, passes: int, has_passed: bool, wait_until: float) -> str:
        """On rank 0: another pass, a wait for servers, or done. Raises RunAborted if no server has the weights and none
        has come for them.

        Args:
            problem: what went wrong in the last pass.
            has_passed: there was just a pass; the third and later ones come a second after the one before.
        """
        if isinstance(problem, RunAborted):
            raise problem
        if problem is not None:
            raise RunAborted(
                f"weight sync {self.version} over {self._channel.name} failed while {self.stage}: {problem}"
            ) from problem
        self._reach("reviving")
        fleet = self._fleet
        has_enough = bool(fleet.live) and (passes > 1 or (passes == 1 and self._rollout.servers.colocate))
        if not has_enough:
            fleet.revive()
        stale = {member.name for member in fleet.members if member.state == "stale"}
        if not stale.isdisjoint(self._channel.not_to_blame):
            return "pass"
        if fleet.live and (has_enough or not stale):
            return "done"
        is_late = time.monotonic() >= wait_until
        if stale and (passes < 2 or not (has_passed or is_late)):
            return "pass"
        if not is_late:
            return "wait"
        states = "; ".join(f"{name} {state}" for name, state in fleet.health().items())
        raise RunAborted(
            f"no rollout server has taken weight sync {self.version} in rollout.limits.engine_wait_s ="
            f" {self._rollout.limits.engine_wait_s:g} s ({states})"
        )
