"""A weight sync as all ranks execute it: one or more passes over the actor's stream, which is collective.

Rank 0 sends the stream to the servers and decides whether another pass follows (`server_side.py`); the other ranks
iterate over it in step. At its end each rank of an actor that shares its device offloads its weights. Only when all
ranks have done so (stage `handed over`) do servers allocate their KV caches.
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
        """Whether servers must prove the current sync: the first, every `verify_every`-th, and the next after a proof
        that no server answered."""
        self.version = 0
        """Number of the last sync that began."""
        self._sync_s: float | None = None

    def to(self, weights: Weights, release: Callable[[], None] = lambda: None) -> bool:
        """Increment the version and send the weights to every server that answers.

        Args:
            release: see `Engine.load_weights`.

        Returns:
            Whether this sync is to be proven: checksums were compared, and the canary is due.

        Raises:
            RunAborted: no server took the weights, or a server holds other weights than it was sent.
        """
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
        """See `ServerSide.sleep`; the result is the same on every rank."""
        return self._zero.ask(lambda zero: zero.sleep(keeps=keeps))

    def _make_pass(self, weights: Weights) -> Exception | None:
        """One pass; on rank 0, returns what went wrong in it. Either all ranks iterate to the stream's end, or none
        begins."""
        members: list[Member] = []
        problem: Exception | None = None
        stream_errors: list[Exception] = []

        def attempt(act: Callable[[ServerSide], None]) -> None:
            """Run `act` on rank 0, unless a step has failed. Keeps the error instead of raising it, which would leave
            the other ranks waiting inside the stream."""
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
