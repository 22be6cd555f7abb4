"""The state that only rank 0 has: the fleet of servers, the clients, and the rollouts in progress.

Two threads use it. The main thread begins rollouts, waits for one, and syncs weights. The rollout thread works on all
rollouts that have begun (`servers/dispatch.py`) and ends when they are done.
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
    """The servers as one fleet, the clients that send them requests, and the rollouts in progress.

    Args:
        connected: the servers that `connect` has reached.
        launched: the servers that this job has started itself.
        hosts: for each node, the address by which other nodes reach it.
    """

    def __init__(
        self,
        config: Config,
        architecture: Architecture,
        connected: ConnectedServers,
        launched: Sequence[Launched],
        hosts: Sequence[str],
    ) -> None:
        self._config = config
        generators: list[Generator] = [*connected.servers, *connected.routers]
        owned_by = owners([one.http.url for one in generators], len(hosts), [server.node for server in launched])
        self.nodes = sorted(set(owned_by)) if connected.addresses is None else list(range(len(hosts)))
        """Nodes with a client: those that own a server, or all nodes if servers may join later."""
        listener = Listener(len(hosts), hosts[0])
        self.rendezvous = listener.rendezvous
        self.clients = Clients(listener, [_address(one) for one in generators], owned_by, self.nodes)
        membership = Membership(connected, config, architecture, self._introduce)
        self.fleet = Fleet(
            connected.servers,
            config.rollout,
            self.clients,
            are_own=bool(launched),
            health_file=HealthFile(Path(config.run_dir)),
            routers=connected.routers,
            update_membership=membership.update,
            inspect=membership.inspect,
        )
        self.background = _Background(self.fleet)

    def await_clients(self) -> None:
        """Raises RunAborted if one does not connect."""
        widest = max((member.width for member in self.fleet.members), default=1)
        self.clients.start(self._config.rollout.limits.max_concurrent_sequences * widest)

    def begin(self, work: Work) -> None:
        if work.may_split:
            work.spread(self.fleet.reach, self._config.rollout.limits.max_concurrent_sequences)
        self.background.begin(work)

    def abort(self, works: Sequence[Work]) -> None:
        """End these rollouts, also at the servers, so that they do not go on generating."""
        self.background.give_up()
        self.clients.cancel([ticket for work in works for ticket in work.landed])

    def count(self, work: Work, version: int, stats: RolloutStats) -> None:
        """Add a finished rollout to `stats`. `version` is the current weights version."""
        rollout = self._config.rollout
        if rollout.async_steps and work.may_lose:
            stats.add(tokens_read_again=sum(landed.read_again for landed in work.done.values()))
        stats.add(retries=work.retries)
        if work.may_lose:
            stats.add_ages((version - under, n) for done in work.done.values() for under, n in done.spans)
            aborted = {work.part_of(index)[0] for index in work.aborts} if rollout.sync.in_flight == "abort" else set()
            stats.add(groups_aborted=len(aborted), groups_resent=len(work.resent - aborted))
            stats.add(completions_aborted=work.completions_aborted)
        stats.servers_live = len(self.fleet.live)

    def _introduce(self, server: Server) -> None:
        """Make a server known to the clients: a new one, perhaps behind a router, or one with another dialect."""
        self.clients.add(_address(server))
        for router in self.fleet.routers:
            self.clients.add(_address(router.server))


def _address(server: Generator) -> ServerAddress:
    key, proves = server.http.api_key, bool(server.http.proves)
    workers = sorted(server.named) if isinstance(server, RouterServer) else ()
    peers = tuple(Peer(url, key, proves) for url in workers)
    return ServerAddress(Peer(server.http.url, key, proves), server.dialect, peers)


class _Background:
    """The rollout thread of rank 0, which works on the rollouts that have begun, and ends when all are done."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._lock = Lock()
        self._works: list[Work] = []
        self._thread: Future[None] | None = None
        self._is_running = False
        """The thread will look at `_works` again, so it will see what is added now."""
        self._failure: BaseException | None = None
        """The exception that ended the thread before all work was done."""

    def begin(self, work: Work) -> None:
        with self._lock:
            self._works[:] = [one for one in self._works if one.is_wanted] + [work]
        self.resume()

    def resume(self) -> None:
        """Start the thread again, unless it runs, or has ended with an error other than NeedsWeights."""
        with self._lock:
            failed = self._failure is not None and not isinstance(self._failure, NeedsWeights)
            if not self._is_running and not failed:
                self._is_running, self._failure = True, None
                self._thread = in_thread(self._run, "rollout")

    def wait(self, work: Work) -> bool:
        """Wait until `work` is finished, and return False. Returns True if servers need a weight sync first."""
        while not work.finished.done():
            assert self._thread is not None, "begin() comes first"
            wait([work.finished, self._thread], return_when=FIRST_COMPLETED)
            if not work.finished.done() and self._failure is not None:
                if isinstance(self._failure, NeedsWeights):
                    return True
                raise self._failure
        return False

    def join(self) -> None:
        """Wait until the thread has ended."""
        if self._thread is not None:
            wait([self._thread])

    def give_up(self) -> None:
        """End all rollouts, and wait until the thread has ended."""
        with self._lock:
            for work in self._works:
                work.given_up = True
        self.join()

    def _run(self) -> None:
        try:
            while self._has_work():
                drain(Dispatch(self._fleet, self._works).run())
        except BaseException as error:
            with self._lock:
                self._is_running, self._failure = False, error
            raise

    def _has_work(self) -> bool:
        with self._lock:
            self._is_running = any(one.is_wanted for one in self._works)
            return self._is_running
