"""One server's life, as a state machine without network or threads, on a given clock.

            answered()           synced(version)
      out ---------------> stale ---------------> live
       ^                    |  ^                   |  |
       |      failed()      |  '-------------------'  |
       '--------------------+    set_target(new)      |
       '----------------------------------------------'
                          failed()

A server that has left (`removed`, `may_return`) is out, and no answer brings it back before its owner offers it again.

There is no arrow from out to live: a server that comes back holds old weights, or none, and gets no request before a
complete sync. `synced` on a server that has failed meanwhile therefore changes nothing; that race is real, since health
probes go on in one thread while another syncs.

Who may call: the thread that holds the fleet's lock. Every method that changes a member asserts it. No call to a
server is made under that lock: decide under it, ask without it, then apply the answer under it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Condition
from typing import Literal

from dppo_megatron.rollout.servers.protocol import DEVICE_MEMORY, DeviceMemory, Generator, Server

State = Literal["out", "stale", "live"]
_FREE_FAILURES = 3
"""Failures in a row after which a server is asked at once whether it is back: a killed one that was started again, or
one that hung through a sync, needs no punishment."""
_LONGEST_BACKOFF_S = 30.0
_FIRST_REST_S, _LONGEST_REST_S = 0.5, 30.0
_MISFIT_S = 5.0
HUNG_S = 60.0
"""vLLM's front end may outlive its engines: for 300 s it answered "EngineCore encountered an issue" and did not end."""


class Endpoint:
    """What is asked for completions, and the fleet's state of it: a server, or a router (`router.py`).

    Args:
        lock: the fleet's, re-entrant; held to change this.
        clock: seconds that only grow.
    """

    server: Generator

    def __init__(self, server: Generator, lock: Condition, clock: Callable[[], float] = time.monotonic) -> None:
        self.server = server
        self._lock, self._clock = lock, clock
        self._state: State = "stale"
        self._reason = "not synced yet"
        self.target_version = ""
        """The version that makes it live."""
        self._outages = 0
        self.failures = 0
        """Outages in a row, without one good answer between them."""
        self.delivered_s = -float("inf")
        """When its last good answer came."""
        self.is_starting = False
        """This job has started it again, and it has not answered since."""
        self.has_leftovers = False
        """It has been out since its last sync: requests that others have answered since may still run there."""
        self.outstanding_tokens = self.groups = self.completions = self.sockets = 0
        """In flight there: tokens that its groups may come to, groups, completions of all groups, and their sockets."""
        self.asleep: frozenset[DeviceMemory] = frozenset()
        """What it has given back to the actor. A process that was started again has all of its memory."""
        self._out_since = self._asked_again_at = self._free_at = -float("inf")
        self._times_busy = 0
        self.has_left = False
        """Its owner has taken it away: it does not count among those that could be asked."""

    @property
    def name(self) -> str:
        return self.server.http.url

    @property
    def width(self) -> int:
        """Engines that it stands for: a router's servers, a server's data-parallel replicas."""
        return 1

    @property
    def state(self) -> State:
        """live: has the present weights. stale: answers, needs a sync. out: does not answer, or failed."""
        return self._state

    @property
    def reason(self) -> str:
        """Why it is not live; empty if it is."""
        return self._reason

    @property
    def outages(self) -> int:
        """How often it has gone out."""
        return self._outages

    @property
    def condition(self) -> str:
        """Its state and the reason for it, for messages."""
        return self.state if self.state == "live" else f"{self.state}: {self.reason}"

    # ------------------------------------------------------------------------------------------------ its life

    def failed(self, reason: str) -> bool:
        """It broke a connection, answered badly or not at all. Returns whether that is news."""
        self._owned()
        was_in = self._state != "out"
        self._state, self._reason = "out", reason
        if was_in:
            self._out_since = self._clock()
            self._outages += 1
            self.failures += 1
            self.has_leftovers = True
            wait_s = min(_LONGEST_BACKOFF_S, 2.0 ** (self.failures - _FREE_FAILURES - 1))
            self._asked_again_at = self._clock() + (wait_s if self.failures > _FREE_FAILURES else 0.0)
        return was_in

    def reject(self, reason: str) -> None:
        """It answers, and is not a server that this run can use. Asked again after a while: its owner may mend it."""
        self._owned()
        self._reason, self._asked_again_at = reason, self._clock() + _MISFIT_S

    def answered(self) -> None:
        """It answers, with any weights. One that has left may answer an earlier question."""
        self._owned()
        self.is_starting = False
        if self._state == "out" and not self.has_left:
            self._state, self._reason = "stale", "back, to be synced"

    def set_target(self, version: str) -> None:
        """From now on `version` is what makes it live."""
        self._owned()
        self.target_version = version
        if self._state == "live":
            self._state, self._reason = "stale", f"to get weight sync {version}"

    def synced(self, version: str) -> bool:
        """It has all weights of `version` and generates. Returns whether it is live: not if it has failed meanwhile, or
        if others are expected by now."""
        self._owned()
        if self._state == "stale" and version == self.target_version:
            self._state, self._reason, self.has_leftovers = "live", "", False
        return self._state == "live" and version == self.target_version

    def delivered(self) -> None:
        """A good answer: what went wrong before counts no more."""
        self._owned()
        self.failures = self._times_busy = 0
        self.delivered_s = self._clock()

    @property
    def may_be_asked(self) -> bool:
        """Whether it is time to ask one that is out if it is back."""
        return not self.has_left and self._clock() >= self._asked_again_at

    # -------------------------------------------------------------------------------------------- its requests

    def began(self, tokens: int, completions: int, sockets: int = 1) -> None:
        """A group of this size was sent to it."""
        self._owned()
        self.outstanding_tokens += tokens
        self.groups += 1
        self.completions += completions
        self.sockets += sockets

    def ended(self, tokens: int, completions: int, sockets: int = 1) -> None:
        """That group was answered, aborted or lost."""
        self._owned()
        self.outstanding_tokens -= tokens
        self.groups -= 1
        self.completions -= completions
        self.sockets -= sockets

    def back_off(self, wanted_s: float | None) -> None:
        """It has too much to do (HTTP 408, 429, 503): no requests for as long as it asks, else twice as long as the
        last time. Its state does not change."""
        self._owned()
        rest_s = _FIRST_REST_S * 2.0 ** min(self._times_busy, 16) if wanted_s is None else wanted_s
        self._times_busy += 1
        self._free_at = max(self._free_at, self._clock() + min(_LONGEST_REST_S, rest_s))

    @property
    def is_ready(self) -> bool:
        """Live, awake, and no longer at rest (see `back_off`)."""
        return self.state == "live" and not self.asleep and self._clock() >= self._free_at

    def _owned(self) -> None:
        """Raises RuntimeError unless this thread holds the fleet's lock: of the library's only a condition knows."""
        self._lock.notify(0)


class Member(Endpoint):
    """One server.

    Args:
        is_own: this job has started it.

    Example:
        member = Member(server, lock)     # stale: it answers, and has no weights of ours
        member.set_target("1"); member.synced("1")     # live
        member.failed("no answer to its health probe")     # out; its requests go elsewhere
        member.answered()     # stale: it may hold version 1, or nothing
        member.synced("1")     # live again, after a whole sync
    """

    server: Server

    def __init__(
        self,
        server: Server,
        lock: Condition,
        clock: Callable[[], float] = time.monotonic,
        is_own: bool = False,
    ) -> None:
        super().__init__(server, lock, clock)
        self.is_own = is_own

    @property
    def width(self) -> int:
        return self.server.replicas

    def part(self, replica: int) -> str:
        """Name of one of its replicas, in messages and canary answers."""
        return self.name if self.width == 1 else f"{self.name} (replica {replica} of {self.width})"

    def hangs(self, start_timeout_s: float) -> bool:
        """Whether this job's own server has been out for so long; that is `start_timeout_s` for one that was started
        again. It may not have been asked meanwhile: see `Fleet.hanging`."""
        patience_s = start_timeout_s if self.is_starting else HUNG_S
        return self.is_own and self._state == "out" and self._clock() - self._out_since > patience_s

    def restarted(self) -> None:
        """Its process is a new one: no weights of ours, nothing that still runs, all of its memory. It comes back by
        answering."""
        self._owned()
        self._outages += self._state != "out"  # it had ended unseen
        self._state, self._reason, self._out_since = "out", "its process was started again", self._clock()
        self._asked_again_at = -float("inf")
        self.asleep, self.has_leftovers, self.is_starting = frozenset(), False, True

    def removed(self, reason: str) -> bool:
        """Its address was removed: it is asked nothing more. Returns whether that is news."""
        self._owned()
        news = not self.has_left
        self.has_left = True
        if news:
            self._outages += self._state != "out"
            self._state, self._reason, self.has_leftovers = "out", reason, True
        return news

    def may_return(self) -> None:
        """Its address is there; it comes back by answering."""
        self._owned()
        self.has_left = False

    def replaced_by(self, server: Server) -> None:
        """Another server has its address: no weights of ours, and no failures."""
        self._owned()
        self.server, self.has_left, self.failures = server, False, 0
        self.restarted()

    # ---------------------------------------------------------------------------------------------- its memory

    def slept(self) -> None:
        """It has given back all device memory, or was asked to and did not answer."""
        self._owned()
        self.asleep = DEVICE_MEMORY

    def woke(self, what: DeviceMemory) -> None:
        """It holds this memory again."""
        self._owned()
        self.asleep -= {what}
