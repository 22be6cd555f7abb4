"""A weight sync as every rank goes through it: one or more passes over the actor's stream, which is collective.

Rank 0 hands the stream to the servers and decides whether another pass follows (`server_side.py`); the other ranks walk
it beside. All meet at `handed over`: each has walked the stream to its end, and an actor that shares its device
offloads its weights there. Only then do servers take memory for their caches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from torch import Tensor

from dppo_megatron.config.rollout import RolloutConfig
from dppo_megatron.distributed import OnRankZero, from_rank_zero, gather_all
from dppo_megatron.rollout.engine import Weights
from dppo_megatron.rollout.servers.fleet import Fleet
from dppo_megatron.rollout.servers.member import Member
from dppo_megatron.rollout.servers.wire import version_name
from dppo_megatron.rollout.sync.channels import Channel, Tensors, drain
from dppo_megatron.rollout.sync.receipts import Digests
from dppo_megatron.rollout.sync.server_side import Action, ServerSide

_RETRY_S = 1.0


class WeightSync:
    """The syncs of a run. Made on every rank, and every call but `take_figures` is collective.

    Args:
        fleet: on rank 0; None elsewhere.
        settle_requests: see `ServerSide`; called on rank 0.
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
        self._channel, self._restart, self.run = channel, restart, run
        self._wait_s = rollout.limits.engine_wait_s
        self._zero = OnRankZero(None if fleet is None else ServerSide(rollout, channel, fleet, settle_requests))
        self._weights: Weights | None = None
        self._release: Callable[[], None] = lambda: None
        self._proves = False
        """The present sync is proven: the first, every `verify_every`-th, one after a proof without an answer. The same
        on every rank."""
        self.version = 0
        """Number of the last sync that was begun; the one counter of syncs."""
        self._sync_s: float | None = None

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
        name = version_name(self.run, self.version)
        self._proves = self._zero.ask(lambda zero: zero.begin(self.version, name))
        self.again()
        return self._proves

    def again(self) -> None:
        """Passes over the present weights until every server that answers has them; the first when one answers."""
        assert self._weights is not None, "a sync comes first"
        started, passes, problem = time.perf_counter(), 0, None
        wait_until, has_passed = time.monotonic() + self._wait_s, False

        def asked(zero: ServerSide) -> Action:
            return zero.next(problem, passes, has_passed, wait_until)

        while (action := self._zero.ask(asked)) != "done":
            has_passed = action == "pass"
            if not has_passed:
                time.sleep(_RETRY_S)
            self._restart()
            if has_passed:
                problem = self._pass_to_the_end(self._weights)
                passes += 1
                if passes == 1:
                    wait_until = time.monotonic() + self._wait_s
        self._sync_s = time.perf_counter() - started

    def take_figures(self) -> tuple[float | None, int | None]:
        """Seconds of the last sync and tensors that its proof compared; None if there was none since last asked."""
        seconds, self._sync_s = self._sync_s, None
        return seconds, self._zero.here(ServerSide.take_tensors_verified)

    def sleep(self, *, keeps: bool = False) -> list[str]:
        """See `ServerSide.sleep`. Returns its result on every rank."""
        return self._zero.ask(lambda zero: zero.sleep(keeps=keeps))

    def _pass_to_the_end(self, weights: Weights) -> Exception | None:
        """One pass, and on rank 0 what went wrong in it. Every rank walks the stream to its end, or none begins."""
        members: list[Member] = []
        problem: Exception | None = None
        broken: list[Exception] = []

        def attempt(act: Callable[[ServerSide], None]) -> None:
            """On rank 0: an error raised there would leave the other ranks alone in the stream."""
            nonlocal problem
            try:
                if problem is None:
                    self._zero.here(act)
            except Exception as error:
                problem = error

        def ready() -> list[str] | None:
            """On rank 0: who gets the weights; None if something is wrong."""
            attempt(lambda zero: zero.prepare(members))
            return [member.name for member in members] if problem is None else None

        # no rank asks for the stream before it has room: an actor may bring its weights back to the device for it
        from_rank_zero(lambda: attempt(lambda zero: members.extend(zero.make_room())))
        stream = _noting(iter(weights()), broken)
        names = from_rank_zero(ready)
        if names is None:
            return problem
        if not self._zero.is_here:
            self._channel.take_part(stream, names)
        # hashing takes a second for a gigabyte, while servers are paused; elsewhere than on rank 0 no members are known
        shown = self._proves and any(member.server.shows_checksums for member in members)
        digests = Digests() if shown else None
        attempt(lambda zero: zero.send(digests.tee(stream) if digests else stream, members))
        if broken:  # no failure to hand over: this rank is out of the stream, and the others wait for it there
            raise broken[0]
        drain(stream)
        self._release()
        gather_all([self._channel.name])  # all have handed over
        attempt(lambda zero: zero.finish(members, digests))
        return problem


def _noting(stream: Tensors, errors: list[Exception]) -> Iterator[tuple[str, Tensor]]:
    """The same stream; what ends it is in `errors` too, whatever its reader makes of it."""
    try:
        yield from stream
    except Exception as error:
        errors.append(error)
        raise
