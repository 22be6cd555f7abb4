"""A real rollout client under a real fleet, over canned servers; for the parts intake, gil and grade."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dppo_megatron.config.rollout import RolloutConfig
from dppo_megatron.rollout.client.detokenizer import Detokenizer
from dppo_megatron.rollout.client.messages import Arrived, HookFactory, ServerAddress, TakeShare
from dppo_megatron.rollout.client.process import Setup
from dppo_megatron.rollout.client.remote import Clients, NodeClient, take
from dppo_megatron.rollout.servers.dialects import AnyDialect, SGLangDialect, VLLMDialect
from dppo_megatron.rollout.servers.fleet import Fleet
from dppo_megatron.rollout.servers.http import Http, Peer
from dppo_megatron.rollout.servers.rollout_work import Work
from dppo_megatron.rollout.servers.sglang import SGLangServer
from dppo_megatron.rollout.servers.vllm import VLLMServer
from dppo_megatron.rollout.servers.wire import Expected, GenerateRequest
from plane.canned import COUNT, PROMPT, Canned, CannedServers, request_id

VOCABULARY = 151_936
_TICKS = os.sysconf("SC_CLK_TCK")


def dialect_of(engine: str) -> AnyDialect:
    """vllm, sglang; vllm_arrays, sglang_arrays with this project's array answers in the server."""
    arrays = engine.endswith("_arrays")
    return SGLangDialect(VOCABULARY, arrays=arrays) if "sglang" in engine else VLLMDialect(arrays=arrays)


class Intake:
    """Canned servers, one client, one fleet."""

    def __init__(
        self,
        canned: Canned,
        servers: int,
        groups_each: int,
        *,
        hook: HookFactory | None = None,
        detokenizer: Detokenizer | None = None,
    ) -> None:
        self.canned, self._servers = canned, CannedServers(canned)
        urls = [self._servers.url(server) for server in range(servers)]
        engines: list[Any] = [
            SGLangServer(Http(url), VOCABULARY) if "sglang" in canned.engine else VLLMServer(Http(url)) for url in urls
        ]
        addresses = [ServerAddress(Peer(url), dialect_of(canned.engine)) for url in urls]
        self.clients = Clients(["127.0.0.1"], addresses, [0] * servers)
        meeting = self.clients.rendezvous
        self._secret, self._path = meeting.secret, meeting.take_path(0)
        setup = Setup(0, meeting.address, self._secret, self._path, detokenizer, hook)
        self.node = NodeClient(setup)
        self.clients.start(groups_each)
        config = RolloutConfig()
        config.limits.max_concurrent_sequences = groups_each * COUNT
        config.limits.probe_every_s = 1e9
        self.fleet = Fleet(engines, config, self.clients)
        self.fleet.expect("1")
        with self.fleet.lock:
            for member in self.fleet.members:
                member.synced("1")

    def work(self, groups: int, prompts: Sequence[bytes] = ()) -> Work:
        """Requests for so many groups, which the canned answer fits."""
        tokens, prompt = self.canned.tokens, tuple(range(1000, 1000 + PROMPT))
        requests = [
            GenerateRequest(request_id(index), prompt, COUNT, 0, max_tokens=tokens, experts=self.canned.experts)
            for index in range(groups)
        ]
        return Work(requests, Expected(VOCABULARY, 1, 1), prompts)

    def take(self) -> list[Arrived]:
        """All completions that are ready."""
        return list(take(self._path, self._secret, TakeShare(0, 1)))

    @property
    def client_cpu_s(self) -> float:
        """CPU seconds of the client so far."""
        fields = Path(f"/proc/{self.node.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    def client_status(self, name: str) -> int:
        """A number of /proc/PID/status: VmHWM in kB, Threads, ..."""
        lines = Path(f"/proc/{self.node.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))

    def close(self) -> None:
        self.clients.close()
        self.node.close()
        self.fleet.close()
        self._servers.close()
