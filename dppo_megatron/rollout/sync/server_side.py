"""Rank 0's part of a weight sync. In each stage it calls all servers at the same time.

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
from collections.abc import Callable, Sequence
from typing import Literal

from dppo_megatron.config.rollout import RolloutConfig
from dppo_megatron.rollout.servers.fleet import Fleet
from dppo_megatron.rollout.servers.http import Refused
from dppo_megatron.rollout.servers.member import Member
from dppo_megatron.rollout.servers.protocol import DEVICE_MEMORY, DeviceMemory
from dppo_megatron.rollout.sync.channels import FAILURES, Channel, Tensors, at_once, on_each
from dppo_megatron.rollout.sync.receipts import Digests, Receipt, differing
from dppo_megatron.spans import recorder
from dppo_megatron.texts import log
from dppo_megatron.types import RunAborted

Stage = Literal["done", "reviving", "waking", "pausing", "sending", "handed over", "finishing", "proving"]
Action = Literal["pass", "wait", "done"]


class ServerSide:
    """The servers' state in the syncs of a run.

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
        """Begin a sync: no server is live until it has the new version, which servers know as `name`. Returns whether
        this sync is to be proven."""
        if self._rollout.sync.in_flight == "finish":
            self._finish_requests()
        self._version, self._version_name = version, name
        self._fleet.expect(name)
        every = self._rollout.sync.verify_every
        is_overdue = self._checksums.is_overdue and any(one.server.shows_checksums for one in self._fleet.members)
        return every > 0 and ((version - 1) % every == 0 or is_overdue)

    def take_tensors_verified(self) -> int | None:
        """Number of tensors that the last proof compared; None if there was none since the last call."""
        taken, self._tensors_verified = self._tensors_verified, None
        return taken

    def sleep(self, *, keeps: bool = False) -> list[str]:
        """Have every server that answers and is awake free its device memory for the actor. Returns the addresses of
        the job's own servers that are out: they may hold memory until they are ended.

        Args:
            keeps: running requests resume after the next sync, with their prefixes prefilled again; else they are
                dropped. Leftovers of an outage are always dropped.
        """
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

    def _pause(self, members: Sequence[Member]) -> list[Member]:
        """Pause generation as `sync.in_flight` says; returns the members that are paused. New requests wait at the
        server, or are rejected (vLLM 0.33)."""
        # leftovers of an outage are aborted in any case: those requests have been retried elsewhere
        return on_each(
            self._fleet,
            members,
            lambda m: m.server.pause(
                "abort" if m.has_leftovers else self._rollout.sync.in_flight, timeout_s=self._timeout_s
            ),
        )

    def make_room(self) -> list[Member]:
        """The members of this pass. Colocated ones are asleep, so that the actor has the memory for its stream."""
        self._reach("waking")
        members = [member for member in self._fleet.members if member.state == "stale"]
        # a server that was restarted since the last `sleep` is awake
        return self._put_to_sleep(members) if self._rollout.servers.colocate else members

    def prepare(self, members: list[Member]) -> None:
        """Wake `members` for their weights and pause them; removes those that fail. Called when the actor's stream is
        ready, so that servers are not paused while it gets ready."""
        self._wake(members, "weights")
        self._reach("pausing")
        members[:] = self._pause(members)

    def send(self, tensors: Tensors, members: list[Member]) -> None:
        """Send all tensors to `members`; removes those that fail."""
        self._reach("sending")
        with self._fleet.taking_weights(members):
            members[:] = self._channel.push(tensors, tuple(members), self._version_name)
        self._reach("handed over")

    def finish(self, took: Sequence[Member], digests: Digests | None) -> None:
        """Resume generation on the servers that took the weights; compare checksums if `digests` are given."""
        self._reach("finishing")
        self._wake(took, "kv_cache")
        self._resume(took, self._version_name)
        if digests is not None and self._fleet.live:
            self._reach("proving")
            self._compare(digests)

    def _wake(self, members: Sequence[Member], what: DeviceMemory) -> None:
        """Have `members` allocate memory: weights before they are sent, the KV cache after. With both at once, the
        actor's weights would not fit beside them."""

        def wake(member: Member) -> None:
            member.server.wake(what, timeout_s=self._timeout_s)
            with self._fleet.lock:
                member.woke(what)

        on_each(self._fleet, [m for m in members if what in m.asleep], wake, doing="waking up")

    def _resume(self, members: Sequence[Member], version: str) -> None:
        """Resume generation and read back the weights version. Members that report `version` are live."""

        def finish(member: Member) -> None:
            member.server.resume(timeout_s=self._timeout_s)
            reported = member.server.weights_version(timeout_s=self._timeout_s)
            if reported != version:
                raise Refused(409, f"its weights version is '{reported}' after the sync of '{version}'")

        for member in on_each(self._fleet, members, finish):
            with self._fleet.lock:
                member.synced(version)

    def _compare(self, digests: Digests) -> None:
        """Compare checksums of all live servers that offer any. A server that does not answer proves nothing, but is
        not marked out."""
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

        Raises:
            RunAborted: the last pass failed, or no server has taken the weights by `wait_until`.
        """
        if isinstance(problem, RunAborted):
            raise problem
        if problem is not None:
            raise RunAborted(
                f"weight sync {self._version} over {self._channel.name} failed while {self.stage}: {problem}"
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
        """Enter the next stage, and record the span of the one that ends."""
        now = self._spans.clock()
        if self.stage != "done":
            self._spans.add("weight sync", self.stage, self._reached_s, now)
        self.stage, self._reached_s = stage, now
