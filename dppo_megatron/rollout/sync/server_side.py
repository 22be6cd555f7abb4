"""Rank 0's part of a weight sync: it talks to the servers, all of them at the same time in each step of the line.

    reviving ─▶ waking ─▶ pausing ─▶ sending ─▶ handed over ─▶ finishing ─▶ proving ─▶ done
       ▲                                                                       │
       └──────────────── a stale server answers: another pass ─────────────────┘

A server is live when it reports the version that it was sent, and no sooner. A server that failed in a pass gets a
second pass in this sync if it answers, and else the next sync; a pass that was lost because a neighbour in the
broadcast failed does not count. (A colocated server waits for the next sync if another is live: that one's cache has
the memory that the actor's weights would need.) With none live, the sync waits `limits.engine_wait_s`, then stops the
run.
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
        settle_requests: called where requests are to finish first, with servers live as before: requests that still
            wait for room must be asked under the old weights too.
    """

    def __init__(
        self, rollout: RolloutConfig, channel: Channel, fleet: Fleet, settle_requests: Callable[[], None]
    ) -> None:
        self._rollout, self._channel, self._fleet = rollout, channel, fleet
        self._settle_requests = settle_requests
        self._timeout_s = rollout.limits.sync_timeout_s
        self._version, self._version_name = 0, ""
        self._checksums = Receipt("checksums")
        self._tensors_verified: int | None = None
        self._spans = recorder()
        self._reached_s = 0.0
        """When the present stage began, on the clock of the spans."""
        self.stage: Stage = "done"
        """How far the present pass is."""

    def begin(self, version: int, name: str) -> bool:
        """No server is live from now on; `name`: what the servers will call that version. Returns whether this sync is
        proven."""
        if self._rollout.sync.in_flight == "finish":
            self._settle_requests()
        self._version, self._version_name = version, name
        self._fleet.expect(name)
        every = self._rollout.sync.verify_every
        is_overdue = self._checksums.is_overdue and any(one.server.shows_checksums for one in self._fleet.members)
        return every > 0 and ((version - 1) % every == 0 or is_overdue)

    def take_tensors_verified(self) -> int | None:
        """How many the last proof compared; None if there was none since last asked."""
        taken, self._tensors_verified = self._tensors_verified, None
        return taken

    def sleep(self, *, keeps: bool = False) -> list[str]:
        """Device memory back to the actor, from every server that answers and is awake. Returns the job's own
        that are out, by address: they may hold theirs until they are ended.

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
        """Running requests are treated by `sync.in_flight`, leftovers of an outage are ended, since their
        ids come back; new ones wait at the server, or are turned away (vLLM 0.33). Returns those that are paused."""
        return on_each(
            self._fleet,
            members,
            lambda m: m.server.pause(
                "abort" if m.has_leftovers else self._rollout.sync.in_flight, timeout_s=self._timeout_s
            ),
        )

    def make_room(self) -> list[Member]:
        """The members of this pass, without memory of the actor's."""
        self._reach("waking")
        members = [member for member in self._fleet.members if member.state == "stale"]
        # one that was started again has all of its memory
        return self._put_to_sleep(members) if self._rollout.servers.colocate else members

    def prepare(self, members: list[Member]) -> None:
        """Awake for weights and paused, which is not to last while the actor makes its stream ready. Keeps
        those in `members` that are."""
        self._wake(members, "weights")
        self._reach("pausing")
        members[:] = self._pause(members)

    def send(self, tensors: Tensors, members: list[Member]) -> None:
        """Keeps those in `members` that took everything."""
        self._reach("sending")
        with self._fleet.taking_weights(members):
            members[:] = self._channel.push(tensors, tuple(members), self._version_name)
        self._reach("handed over")

    def finish(self, took: Sequence[Member], digests: Digests | None) -> None:
        """Servers that took the weights generate, and prove it if a proof is due."""
        self._reach("finishing")
        self._wake(took, "kv_cache")
        self._open(took, self._version_name)
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
        """Checksums of all live servers that show any, at once. One without an answer is no outage, and no proof."""
        compared, answered = 0, 0
        sent = digests.result()
        asked = [member for member in self._fleet.live if member.server.shows_checksums]
        for member, answer in at_once(asked, lambda m: m.server.checksums(timeout_s=self._timeout_s)):
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
        self._checksums.settle(answered, len(asked))

    def next(self, problem: Exception | None, passes: int, has_passed: bool, wait_until: float) -> Action:
        """Another pass, a wait for servers, or done. Raises RunAborted if no server has the weights and none
        has come for them.

        Args:
            problem: what went wrong in the last pass.
            has_passed: there was just a pass; the third and later ones come a second after the one before.
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
        """The next stage begins, and the present one ends."""
        now = self._spans.clock()
        if self.stage != "done":
            self._spans.add("weight sync", self.stage, self._reached_s, now)
        self.stage, self._reached_s = stage, now
