"""The trainer's side of the rollout clients: starts one per node, sends requests through them, and takes completions.

    node 0   rank 0 ---- starts ----> client 0 <--- take --- ranks of node 0
                ^ '---- control (unix socket, or TCP between nodes) ----.
    node 1   rank 8 ---- starts ----> client 1 <--- take --- ranks of node 1

Rank 0 listens and the clients connect to it; both ends first prove that they hold the job's key. With n clients, each
owns every n-th server. The ranks of a node share the completions of their client evenly.
"""

from __future__ import annotations

import contextlib
import pickle
import secrets
import selectors
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from dppo_megatron.children import start_python
from dppo_megatron.config.rollout import LOOPBACK
from dppo_megatron.frames import FrameBuffer
from dppo_megatron.rollout.client import messages
from dppo_megatron.rollout.client.connections import OWN_FILES
from dppo_megatron.rollout.client.process import Setup
from dppo_megatron.rollout.servers.wire import Event, Sampled, Submit
from dppo_megatron.texts import log
from dppo_megatron.types import RunAborted

_START_S = 120.0
_HANDSHAKE_S = 10.0
_SEND_S = 60.0
_TAKE_S = 600.0


@dataclass(frozen=True, slots=True)
class Nodes:
    """Which rank of the job is on which node."""

    of_rank: tuple[int, ...]
    """[world size] number of each rank's node, in order of first appearance."""
    rank: int

    @staticmethod
    def of(names: Sequence[int], rank: int) -> Nodes:
        """From `launched_node` of each rank. Two torchrun agents on one machine count as two nodes, as
        either can end without the other.

        Example: names 0, 0, 2, 2 give nodes 0, 0, 1, 1; rank 3 is the second of two ranks of node 1.
        """
        order = {name: number for number, name in enumerate(dict.fromkeys(names))}
        return Nodes(tuple(order[name] for name in names), rank)

    @property
    def node(self) -> int:
        return self.of_rank[self.rank]

    @property
    def local_ranks(self) -> list[int]:
        return [rank for rank, node in enumerate(self.of_rank) if node == self.node]

    @property
    def is_first(self) -> bool:
        """Whether this rank starts its node's client and servers."""
        return self.rank == self.local_ranks[0]

    @property
    def count(self) -> int:
        return max(self.of_rank) + 1


class ClientRendezvous(msgspec.Struct, frozen=True):
    """Tells clients how to find rank 0, and ranks how to find the client of their node."""

    address: str
    secret: bytes
    name: str
    """Part of the names of the directories for unix sockets."""

    def take_path(self, node: int) -> str:
        """Unix socket on which the client of `node` serves ranks their shares."""
        return f"{_socket_directory()}/dppo-{self.name}-{node}/take"


def _socket_directory() -> str:
    """A directory whose name is short enough: the path of a unix socket has at most 107 bytes."""
    directory = tempfile.gettempdir()
    return directory if len(directory) < 60 else "/tmp"


class NodeClient:
    def __init__(self, setup: Setup) -> None:
        self._directory = Path(setup.take_path).parent
        self._directory.mkdir(mode=0o700)
        variables = {"TOKENIZERS_PARALLELISM": "true", "RAYON_NUM_THREADS": "2"}
        # in a session of its own: torchrun ends a rank by sending SIGTERM to the rank's process group
        self.process = start_python(
            "dppo_megatron.rollout.client", variables=variables, stdin=subprocess.PIPE, start_new_session=True
        )
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the client has already ended; rank 0 reports that
            pickle.dump(setup, self.process.stdin)
            self.process.stdin.close()

    def close(self) -> None:
        """Wait up to 5 s for the client, which ends when rank 0 closes its connection; then kill it."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5.0)
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self._directory, ignore_errors=True)


def take(path: str, secret: bytes, share: messages.TakeShare) -> Iterator[messages.Arrived]:
    """This rank's share of a rollout's completions at its node's client. Raises RunAborted if the client has ended."""
    try:
        with messages.connect(path, _HANDSHAKE_S) as peer:
            peer.settimeout(_TAKE_S)
            messages.handshake(peer, secret, listens=False)
            messages.send(peer, messages.ENCODER.encode(share))
            yield from messages.take_over(peer)
    except OSError as error:
        raise RunAborted(f"this node's rollout client has ended: {error}") from None


def owners(urls: Sequence[str], num_clients: int, launched_on: Sequence[int] = ()) -> list[int]:
    """The client that owns each server, by the number of its node: `launched_on`, if the job has started the servers.

    Example: four servers elsewhere, and a job on two nodes: clients 0, 1, 0, 1.
    """
    if launched_on:
        return list(launched_on)
    clients, turn = [], 0
    for url in urls:
        if urlsplit(url).hostname in LOOPBACK:  # on rank 0's machine
            clients.append(0)
        else:
            clients.append(turn % num_clients)
            turn += 1
    return clients


class Clients:
    """All rollout clients of a job, which connect to rank 0. Implements `wire.RolloutClients`.

    Args:
        hosts: for each node, the address by which other nodes reach it; with several, rank 0 listens on the first only.
        of_server: the client that owns each of `addresses`.
        nodes: nodes whose clients take part although they own no server yet: servers may join later.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        addresses: Sequence[messages.ServerAddress],
        of_server: Sequence[int],
        nodes: Sequence[int] = (),
    ) -> None:
        name, host = secrets.token_hex(8), hosts[0]
        self._directory = Path(_socket_directory()) / f"dppo-{name}"
        self._directory.mkdir(mode=0o700)  # other users must not be able to create sockets in it
        if len(hosts) == 1:
            address = str(self._directory / "rank0")
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(address)
        else:
            self._listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
            address = f"{host}:{self._listener.getsockname()[1]}"
        self._listener.listen(len(hosts))
        self.rendezvous = ClientRendezvous(address, secrets.token_bytes(32), name)
        self._addresses = addresses
        self._of_server = dict(zip((address.peer.url for address in addresses), of_server, strict=True))
        self._owned = Counter(of_server)
        """How many servers each client owns, not counting those in `_gone`."""
        self._gone: set[str] = set()
        self._nodes = sorted({*of_server, *nodes})
        self._peers: dict[int, socket.socket] = {}
        self._sockets: dict[int, int] = {}
        self._buffers: dict[int, FrameBuffer] = {}
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()

    def start(self, wanted_per_server: int) -> None:
        """Wait for every client to connect, and send it its servers. Raises RunAborted after `_START_S`. Logs if a
        client can open fewer sockets than `wanted_per_server`, the requests that a server would take at a time."""
        deadline = time.monotonic() + _START_S
        needed = set(self._nodes)
        while missing := needed - set(self._peers):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                names = sorted(missing)
                raise RunAborted(f"the rollout clients of nodes {names} have not connected after {_START_S:g} s")
            self._listener.settimeout(left_s)
            with contextlib.suppress(OSError, messages.HandshakeFailed, msgspec.DecodeError):
                self._accept(self._listener.accept()[0])
        for node in needed:
            mine = [address for address in self._addresses if self._of_server[address.peer.url] == node]
            self._send(node, messages.Servers(mine))
            room = max(1, self._sockets[node] // max(1, len(mine)))
            if room < wanted_per_server:
                log(
                    f"rollout: the limit on open files (ulimit -n = {self._sockets[node] + OWN_FILES} on node {node})"
                    f" allows {room} requests in flight at each of its {len(mine)} servers, which would take"
                    f" {wanted_per_server}; a limit of {len(mine) * wanted_per_server + OWN_FILES} would be enough"
                )

    def add(self, address: messages.ServerAddress) -> None:
        """Add a server, owned by the client with the fewest; or replace the server that was at this address."""
        node = self._of_server.setdefault(address.peer.url, min(self._nodes, key=self._owned.__getitem__))
        self.gone(self._gone - {address.peer.url})
        self._send(node, messages.Servers([address]))

    def client_of(self, server: str) -> int:
        return self._of_server[server]

    def room(self, server: str) -> int:
        node = self._of_server[server]
        return max(1, self._sockets[node] // max(1, self._owned[node]))

    def gone(self, servers: Collection[str]) -> None:
        self._gone = set(servers)
        self._owned = Counter(node for server, node in self._of_server.items() if server not in self._gone)

    def ask(self, ask: Submit) -> None:
        self._send(self._of_server[ask.server], ask)

    def keep(self, server: str, key: tuple[int, int, int], sampled: Sampled) -> None:
        self._send(self._of_server[server], messages.Begun(key, pickle.dumps(sampled)))

    def over(self, rollout: int) -> None:
        """Have the clients forget what they have of a rollout that has been taken."""
        for node in self._nodes:
            with contextlib.suppress(RunAborted):  # the next step raises it, on all ranks
                self._send(node, messages.Over(rollout))

    def end(self, tickets: Sequence[int]) -> None:
        self._end(tickets, drops=False)

    def cancel(self, tickets: Sequence[int]) -> None:
        self._end(tickets, drops=True)

    def events(self, timeout_s: float) -> list[Event]:
        events: list[Event] = []
        for key, _ in self._selector.select(timeout_s):
            node: int = key.data
            try:
                piece = self._peers[node].recv(1 << 20, socket.MSG_DONTWAIT)
            except BlockingIOError:
                continue
            except OSError:
                piece = b""
            if not piece:
                raise RunAborted(f"the rollout client of node {node} has ended; its completions are lost")
            for message in map(messages.FROM_CLIENT.decode, self._buffers[node].feed(piece)):
                if isinstance(message, messages.ClientLost):
                    raise RunAborted(f"the rollout client of node {node} cannot go on: {message.text}")
                if not isinstance(message, messages.ClientHello):
                    events.append(message)
        return events

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()
        self._selector.close()
        self._listener.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _accept(self, peer: socket.socket) -> None:
        peer.settimeout(_HANDSHAKE_S)
        try:
            messages.handshake(peer, self.rendezvous.secret, listens=True)
            hello = messages.FROM_CLIENT.decode(messages.receive(peer))
        except BaseException:
            peer.close()
            raise
        if isinstance(hello, messages.ClientHello):
            peer.settimeout(_SEND_S)
            self._peers[hello.node], self._sockets[hello.node] = peer, hello.sockets
            self._buffers[hello.node] = FrameBuffer()
            self._selector.register(peer, selectors.EVENT_READ, hello.node)

    def _end(self, tickets: Sequence[int], *, drops: bool) -> None:
        """Sent to all clients; a client ignores tickets that it does not have."""
        for node in self._nodes if tickets else ():
            self._send(node, messages.EndRequests(list(tickets), drops))

    def _send(self, node: int, message: messages.ToClient) -> None:
        with self._lock:
            try:
                messages.send(self._peers[node], messages.ENCODER.encode(message))
            except OSError as error:
                raise RunAborted(f"the rollout client of node {node} has ended: {error}") from None
