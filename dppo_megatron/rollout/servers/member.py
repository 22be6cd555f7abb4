"""The state machine of one server, without network or threads, on a given clock.

            answered()           synced(version)
      out ---------------> stale ---------------> live
       ^                    |  ^                   |  |
       |      failed()      |  '-------------------'  |
       '--------------------+    set_target(new)      |
       '----------------------------------------------'
                          failed()

A server that has left (`removed`) is out, and answers do not bring it back until its owner offers it again
(`may_return`).

There is no arrow from out to live: a server that comes back holds old weights, or none, and gets no request before a
complete sync. So `synced` changes nothing on a server that has failed in the meantime. That race is real: health probes
run in one thread while another syncs.

Only the thread that holds the fleet's lock may call the methods that change a member; each of them asserts it. No
request is sent to a server under that lock: decide under it, ask without it, then apply the answer under it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Condition
from typing import Literal

from dppo_megatron.rollout.servers.protocol import DEVICE_MEMORY, DeviceMemory, Server
from dppo_megatron.rollout.servers.wire import GenerateRequest

State = Literal["out", "stale", "live"]
_FREE_FAILURES = 3
"""After up to this many failures in a row a server is probed again at once: one that was killed and restarted, or hung
during a sync, should not wait. After more, the waits double from 1 s."""
_MAX_RETRY_S = 30.0
_FIRST_BACKOFF_S, _MAX_BACKOFF_S = 0.5, 30.0
_MISFIT_S = 5.0
HUNG_S = 60.0
"""vLLM's front end may outlive its engines: for 300 s it answered "EngineCore encountered an issue" and did not end."""


class Member:
    """One server and its state in the fleet.

    Args:
        lock: the fleet's, re-entrant; must be held to change the state.
        clock: monotonic seconds.
        is_own: this job has started it.

    Example:
        member = Member(server, lock)     # stale: it answers, but has no weights of this run
        member.set_target("1"); member.synced("1")     # live
        member.failed("no answer to its health probe")     # out; its requests go elsewhere
        member.answered()     # stale: it may hold version 1, or nothing
        member.synced("1")     # live again, after a complete sync
    """

    def __init__(
        self, server: Server, lock: Condition, clock: Callable[[], float] = time.monotonic, is_own: bool = False
    ) -> None:
        self.server, self.is_own = server, is_own
        self._lock, self._clock = lock, clock
        self.state: State = "stale"
        """live: has the current weights. stale: answers, needs a sync. out: does not answer, or failed."""
        self.reason = "not synced yet"
        """Why it is not live; empty if it is."""
        self.target_version = ""
        """The version that makes it live."""
        self.outages = 0
        self.failures = 0
        """Outages in a row, without one good answer between them."""
        self.delivered_s = -float("inf")
        """When its last good answer arrived."""
        self.is_starting = False
        """This job has restarted it, and it has not answered since."""
        self.has_leftovers = False
        """It has been out since its last sync: requests that other servers have answered since may still run there."""
        self.outstanding_tokens = self.groups = self.completions = self.sockets = 0
        """In flight there: tokens that its groups may reach, groups, completions of all groups, and their sockets."""
        self.asleep: frozenset[DeviceMemory] = frozenset()
        """Memory that it has released for the actor. A restarted process holds all of its memory."""
        self._out_since = self._probe_again_at = self._free_at = -float("inf")
        self._times_busy = 0
        self.has_left = False
        """Its owner has withdrawn it: it is not counted among the usable servers."""
        self.must_restart = False
        """It answers calls of a sync with what is no answer to them, which only a new process ends: see `dppo_do`."""

    @property
    def name(self) -> str:
        return self.server.http.url

    @property
    def width(self) -> int:
        """Its data-parallel replicas."""
        return self.server.replicas

    def part(self, replica: int) -> str:
        """Name of one of its replicas, in messages and canary answers."""
        return self.name if self.width == 1 else f"{self.name} (replica {replica} of {self.width})"

    @property
    def condition(self) -> str:
        """Its state and the reason for it, for messages."""
        return self.state if self.state == "live" else f"{self.state}: {self.reason}"

    # ------------------------------------------------------------------------------------------------ its state

    def failed(self, reason: str) -> bool:
        """Mark it out: it broke a connection, answered badly or not at all. Returns whether it was not out before."""
        self._owned()
        was_in = self.state != "out"
        self.state, self.reason = "out", reason
        if was_in:
            self._out_since = self._clock()
            self.outages += 1
            self.failures += 1
            self.has_leftovers = True
            wait_s = min(_MAX_RETRY_S, 2.0 ** (self.failures - _FREE_FAILURES - 1))
            self._probe_again_at = self._clock() + (wait_s if self.failures > _FREE_FAILURES else 0.0)
        return was_in

    def reject(self, reason: str) -> None:
        """It answers, but this run cannot use it. It is probed again after `_MISFIT_S`, as its owner may fix it."""
        self._owned()
        self.reason, self._probe_again_at = reason, self._clock() + _MISFIT_S

    def answered(self) -> None:
        """It answers, with whatever weights."""
        self._owned()
        self.is_starting = False
        if self.state == "out" and not self.has_left:  # one that has left may still answer an earlier probe
            self.state, self.reason = "stale", "back, needs a weight sync"

    def set_target(self, version: str) -> None:
        """From now on it is live only with the weights `version`."""
        self._owned()
        self.target_version = version
        if self.state == "live":
            self.state, self.reason = "stale", f"needs weight sync {version}"

    def synced(self, version: str) -> bool:
        """It has all weights of `version` and generates. Returns whether it is live now: not if it has failed in the
        meantime, or if a newer version is expected by now."""
        self._owned()
        if self.state == "stale" and version == self.target_version:
            self.state, self.reason, self.has_leftovers = "live", "", False
        return self.state == "live" and version == self.target_version

    def delivered(self) -> None:
        """It gave a good answer, which resets its counts of failures and refusals."""
        self._owned()
        self.failures = self._times_busy = 0
        self.delivered_s = self._clock()

    @property
    def may_be_asked(self) -> bool:
        """For a server that is out: whether it is time to probe it again."""
        return not self.has_left and self._clock() >= self._probe_again_at

    # -------------------------------------------------------------------------------------------- its requests

    def took(self, group: GenerateRequest, sign: int = 1) -> None:
        """Count `group` as in flight there; `sign` -1: no longer."""
        self._owned()
        self.outstanding_tokens += sign * group.cost
        self.groups += sign
        self.completions += sign * group.count
        self.sockets += sign * group.sockets

    def back_off(self, wanted_s: float | None) -> None:
        """It is busy (HTTP 408, 429, 503): send no requests for `wanted_s` (its Retry-After), or, if it names none, for
        twice as long as the last time. Its state does not change."""
        self._owned()
        wait_s = _FIRST_BACKOFF_S * 2.0 ** min(self._times_busy, 16) if wanted_s is None else wanted_s
        self._times_busy += 1
        self._free_at = max(self._free_at, self._clock() + min(_MAX_BACKOFF_S, wait_s))

    @property
    def is_ready(self) -> bool:
        """Live, awake, and not backing off (see `back_off`)."""
        return self.state == "live" and not self.asleep and self._clock() >= self._free_at

    def hangs(self, start_timeout_s: float) -> bool:
        """Whether this job's own server must restart, or has been out for longer than HUNG_S, or `start_timeout_s`
        after a restart. It may not have been probed in that time: see `Fleet.hanging`."""
        limit_s = start_timeout_s if self.is_starting else HUNG_S
        is_late = self.state == "out" and self._clock() - self._out_since > limit_s
        return self.is_own and (self.must_restart or is_late)

    def restarted(self) -> None:
        """It has a new process: without weights or requests, and with all of its memory. It is out until it answers."""
        self._owned()
        self.outages += self.state != "out"  # the process had ended before anybody noticed
        self.state, self.reason, self._out_since = "out", "its process was restarted", self._clock()
        self._probe_again_at = -float("inf")
        self.asleep, self.has_leftovers, self.is_starting = frozenset(), False, True
        self.must_restart = False

    def removed(self, reason: str) -> bool:
        """Its owner has withdrawn its address: send it nothing more. Returns whether it had not left already."""
        self._owned()
        is_new = not self.has_left
        self.has_left = True
        if is_new:
            self.outages += self.state != "out"
            self.state, self.reason, self.has_leftovers = "out", reason, True
        return is_new

    def may_return(self) -> None:
        """Its address is listed again: its next answer brings it back."""
        self._owned()
        self.has_left = False

    def replaced_by(self, server: Server) -> None:
        """Another server has its address: without weights of this run, and with no failures counted."""
        self._owned()
        self.server, self.has_left, self.failures = server, False, 0
        self.restarted()

    # ---------------------------------------------------------------------------------------------- its memory

    def slept(self) -> None:
        """It has released all device memory, or was asked to and did not answer."""
        self._owned()
        self.asleep = DEVICE_MEMORY

    def woke(self, what: DeviceMemory) -> None:
        self._owned()
        self.asleep -= {what}

    def _owned(self) -> None:
        """Raises RuntimeError unless this thread holds the fleet's lock, which `notify` checks."""
        self._lock.notify(0)
