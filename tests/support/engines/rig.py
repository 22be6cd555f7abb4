"""A rollout client of its own process, with fleets over stub servers: everything between rank 0 and a socket."""

from __future__ import annotations

import time
from collections.abc import Container, Sequence
from typing import Any

import numpy as np

from dppo_megatron.rollout.client.detokenizer import Detokenizer
from dppo_megatron.rollout.client.messages import Arrived, HookFactory, ServerAddress, TakeShare
from dppo_megatron.rollout.client.process import Setup
from dppo_megatron.rollout.client.remote import Clients, NodeClient, take
from dppo_megatron.rollout.servers.dialects import SGLangDialect, VLLMDialect
from dppo_megatron.rollout.servers.dispatch import NeedsWeights, dispatch
from dppo_megatron.rollout.servers.fleet import Fleet
from dppo_megatron.rollout.servers.http import Http, Peer
from dppo_megatron.rollout.servers.rollout_work import Work
from dppo_megatron.rollout.servers.sglang import SGLangServer
from dppo_megatron.rollout.servers.vllm import VLLMServer
from dppo_megatron.rollout.servers.wire import Expected, GenerateRequest
from support.engines.stub import completion
from support.settings import rollout_config

VOCABULARY = 19


def server_of(engine: str, url: str) -> Any:
    """A server that has described itself as one that honours seeds."""
    if engine == "vllm":
        return VLLMServer(Http(url))
    server = SGLangServer(Http(url), VOCABULARY)
    server._seeded = True
    return server


class Rig:
    """One client for servers at `addresses` ((engine, url) each)."""

    def __init__(
        self,
        addresses: Sequence[tuple[str, str]],
        hook: HookFactory | None = None,
        detokenizer: Detokenizer | None = None,
    ) -> None:
        self.engines = [engine for engine, _ in addresses]
        self.urls = [url for _, url in addresses]
        dialects = {"vllm": VLLMDialect(), "sglang": SGLangDialect(VOCABULARY, seeded=True)}
        known = [ServerAddress(Peer(url), dialects[engine]) for engine, url in addresses]
        self.known = known
        self.clients = Clients(["127.0.0.1"], known, [0] * len(known))
        meeting = self.clients.rendezvous
        self.secret, self.path = meeting.secret, meeting.take_path(0)
        self.node = NodeClient(Setup(0, meeting.address, self.secret, self.path, detokenizer, hook))
        self.clients.start(512)

    def close(self) -> None:
        self.clients.close()
        self.node.close()

    def fleet(self, places: Sequence[int], limits: dict[str, Any]) -> Fleet:
        """A fleet of some of the servers, all live with version 1."""
        servers = [server_of(self.engines[place], self.urls[place]) for place in places]
        values = {f"limits.{name}": value for name, value in limits.items()}
        fleet = Fleet(servers, rollout_config(values), self.clients)
        sync(fleet)
        return fleet

    def take(self) -> list[Arrived]:
        """All that is held."""
        return list(take(self.path, self.secret, TakeShare(0, 1)))


def sync(fleet: Fleet) -> None:
    """What a weight sync does to the fleet's members that answer."""
    fleet.revive()
    fleet.expect("1")
    with fleet.lock:
        for member in fleet.members:
            member.synced("1")


def requests(count: int, size: int = 3, limit: int = 12, name: str = "r") -> list[GenerateRequest]:
    """Groups that the stub servers can answer."""
    return [
        GenerateRequest(f"{name}-{i}", (2, 3, 4), size, 1000 * i, max_tokens=limit, stop_token_ids=(1,))
        for i in range(count)
    ]


def run(fleet: Fleet, groups: Sequence[GenerateRequest], **values: Any) -> Work:
    """A whole rollout; weights are synced when it asks for them."""
    work = Work(list(groups), Expected(VOCABULARY, 1, 2), **values)
    while True:
        try:
            for _ in dispatch(fleet, work):
                pass
            return work
        except NeedsWeights:
            sync(fleet)
            time.sleep(0.0 if fleet.live else 0.1)


def right(arrived: list[Arrived], count: int, size: int, limit: int = 12, lost: Container[int] = ()) -> bool:
    """Every completion once but those of `lost` groups, and the one that its request draws."""
    places = sorted((one.index, one.position) for one in arrived)
    assert places == [(index, position) for index in range(count) for position in range(size) if index not in lost]
    for each in arrived:
        tokens, logprobs, reason = completion(1000 * each.index + each.position, limit)
        one = each.completion
        assert one.token_ids.tolist() == tokens and one.finish_reason == reason
        np.testing.assert_allclose(one.logprobs, logprobs, rtol=1e-6)
        assert one.weights_spans == ((1, len(tokens)),)
    return True
