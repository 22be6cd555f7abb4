"""What rank 0 alone has of the servers: it talks to them, decides, and the other ranks ask it.

Two threads: the main one begins rollouts, waits for one and syncs weights; the rollout thread works on all that have
been begun (`servers/dispatch.py`) and ends when they are done.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from threading import Lock

from dppo_megatron.config.schema import Config
from dppo_megatron.rollout.client.messages import ServerAddress
from dppo_megatron.rollout.client.remote import Clients, Listener, owners
from dppo_megatron.rollout.engine import RolloutStats
from dppo_megatron.rollout.servers.connect import ConnectedServers, Launched, Membership
from dppo_megatron.rollout.servers.dispatch import Dispatch, NeedsWeights
from dppo_megatron.rollout.servers.fleet import Fleet
from dppo_megatron.rollout.servers.health_file import HealthFile
from dppo_megatron.rollout.servers.http import Peer
from dppo_megatron.rollout.servers.protocol import Generator, Server
from dppo_megatron.rollout.servers.rollout_work import Work
from dppo_megatron.rollout.servers.router import RouterServer
from dppo_megatron.rollout.sync.channels import drain, in_thread
from dppo_megatron.weights.architecture import Architecture


class RankZero:
    """The servers as one fleet, the clients that ask them, and the rollouts that are begun.

    Args:
        found: the servers that `connect` has reached.
        launched: those that this job has started itself.
        hosts: by node, the address by which the others reach it.
    """

    def __init__(
        self,
        config: Config,
        architecture: Architecture,
        found: ConnectedServers,
        launched: Sequence[Launched],
        hosts: Sequence[str],
    ) -> None:
        self._config = config
        asked: list[Generator] = [*found.servers, *found.routers]
        owned_by = owners([one.http.url for one in asked], len(hosts), [server.node for server in launched])
        self.nodes = sorted(set(owned_by)) if found.addresses is None else list(range(len(hosts)))
        """Those whose client asks servers."""
        listener = Listener(len(hosts), hosts[0])
        self.meeting = listener.meeting
        self.clients = Clients(listener, [_address(one) for one in asked], owned_by, self.nodes)
        membership = Membership(found, config, architecture, self._introduce)
        self.fleet = Fleet(
            found.servers,
            config.rollout,
            self.clients,
            are_own=bool(launched),
            health_file=HealthFile(Path(config.run_dir)),
            routers=found.routers,
            update_membership=membership.update,
            inspect=membership.inspect,
        )
        self.background = _Background(self.fleet)

    def await_clients(self) -> None:
        """Raises RunAborted if one does not come."""
        widest = max((member.width for member in self.fleet.members), default=1)
        self.clients.start(self._config.rollout.limits.max_concurrent_sequences * widest)

    def begin(self, work: Work) -> None:
        """Generate for it in the background."""
        if work.may_split:
            work.spread(self.fleet.reach, self._config.rollout.limits.max_concurrent_sequences)
        self.background.begin(work)

    def abort(self, works: Sequence[Work]) -> None:
        """End what has been begun, also at the servers, so that they do not generate what is not read."""
        self.background.give_up()
        self.clients.cancel([ticket for work in works for ticket in work.landed])

    def count(self, work: Work, version: int, stats: RolloutStats) -> None:
        """Add to `stats` what a rollout was that is over; `version`: of the weights by now."""
        rollout = self._config.rollout
        if rollout.async_steps and work.may_lose:
            stats.add(tokens_read_again=sum(landed.read_again for landed in work.done.values()))
        stats.add(retries=work.retries)
        if work.may_lose:
            stats.add_ages((version - of, n) for landed in work.done.values() for of, n in landed.spans)
            whole = {work.part_of(index)[0] for index in work.aborts}
            by_sync = whole if rollout.sync.in_flight == "abort" else set()
            stats.add(groups_aborted=len(by_sync), groups_resent=len(work.resent - by_sync))
            stats.add(completions_aborted=work.completions_aborted)
        stats.servers_live = len(self.fleet.live)

    def _introduce(self, server: Server) -> None:
        """A server has come, perhaps behind a router, or is asked in another dialect now."""
        self.clients.add(_address(server))
        for router in self.fleet.routers:
            self.clients.add(_address(router.server))


def _address(server: Generator) -> ServerAddress:
    key, proves = server.http.api_key, bool(server.http.proves)
    workers = sorted(server.named) if isinstance(server, RouterServer) else ()
    peers = tuple(Peer(url, key, proves) for url in workers)
    return ServerAddress(Peer(server.http.url, key, proves), server.dialect, peers)


class _Background:
    """The rollout thread of rank 0: it works on what has been begun, and ends when all of it is done."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._lock = Lock()
        self._works: list[Work] = []
        self._thread: Future[None] | None = None
        self._runs = False
        """The thread will see what is added now."""
        self._failure: BaseException | None = None
        """What has ended it before all was done."""

    def begin(self, work: Work) -> None:
        """Generate for it too."""
        with self._lock:
            self._works[:] = [one for one in self._works if one.is_wanted] + [work]
        self.go_on()

    def go_on(self) -> None:
        """With what is not done, unless it runs or has failed: after a sync."""
        with self._lock:
            failed = self._failure is not None and not isinstance(self._failure, NeedsWeights)
            if not self._runs and not failed:
                self._runs, self._failure = True, None
                self._thread = in_thread(self._work, "rollout")

    def wait(self, work: Work) -> bool:
        """Returns when all of it is ready, or True when servers need weights before it can go on."""
        while not work.finished.done():
            assert self._thread is not None, "it was begun"
            wait([work.finished, self._thread], return_when=FIRST_COMPLETED)
            if not work.finished.done() and self._failure is not None:
                if isinstance(self._failure, NeedsWeights):
                    return True
                raise self._failure
        return False

    def join(self) -> None:
        """Return when the thread has ended."""
        if self._thread is not None:
            wait([self._thread])

    def give_up(self) -> None:
        """End all of it."""
        with self._lock:
            for work in self._works:
                work.given_up = True
        self.join()

    def _work(self) -> None:
        try:
            while self._goes_on():
                drain(Dispatch(self._fleet, self._works).run())
        except BaseException as error:
            with self._lock:
                self._runs, self._failure = False, error
            raise

    def _goes_on(self) -> bool:
        with self._lock:
            self._runs = any(one.is_wanted for one in self._works)
            return self._runs
