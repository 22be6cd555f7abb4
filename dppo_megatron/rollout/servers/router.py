"""A router in front of servers (sglang-router, vLLM's): requests go through it, everything else to its workers.

    rollout client --- request ----------------> router ---- to the worker that it chooses -----> worker 1, 2, ...
                   --- abort -------------------------------------------------------------------> each worker
    rank 0         --- weights, canary, health -------------------------------------------------> each worker
                   --- GET /workers --------------> router      (its health probe, and at every sync)

The router does not know about weights, so it gets requests only while all workers that it lists have the current ones.
Otherwise the workers that have them get requests directly, until a sync has brought the weights to all. When a worker
is marked out, its router loses its requests in flight too: it does not report which of them were on that worker, so all
are retried. That wastes work, once per failed server, but does not depend on how long a router waits for a hung worker.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Condition
from typing import Annotated

import msgspec

from dppo_megatron.rollout.servers.dialects import AnyDialect, SGLangDialect, SGLangRouterDialect, VLLMDialect
from dppo_megatron.rollout.servers.directory import RegistryEntry
from dppo_megatron.rollout.servers.http import MAX_ANSWER_BYTES, BadAnswer, Http, Refused, Unreachable
from dppo_megatron.rollout.servers.member import Endpoint, Member, State
from dppo_megatron.rollout.servers.protocol import Text
from dppo_megatron.texts import log

_ASK_S = 10.0


class Routed(msgspec.Struct):
    url: Text


class RoutedWorkers(msgspec.Struct):
    """The answer to GET /workers of sglang-router 0.3.2 and vllm-router 0.1.17."""

    workers: Annotated[list[Routed], msgspec.Meta(max_length=4096)]


@dataclass
class RouterServer:
    """How a router is reached over HTTP; see `protocol.Generator`."""

    http: Http
    dialect: AnyDialect = field(default_factory=VLLMDialect)
    named: frozenset[str] = frozenset()
    """Addresses of its workers, as last listed."""

    def healthy(self, *, timeout_s: float) -> None:
        """Reads the list of its workers again. Raises BadAnswer if it is empty."""
        named = named_workers(self.http, timeout_s)
        if not named:
            raise BadAnswer(f"{self.http.url}/workers names no worker")
        self.named = frozenset(named)


class Router(Endpoint):
    """A router as a target of requests: live while it answers and all of its workers are live, whose outages count as
    its own. `members`: the fleet's list, to which servers may be added later."""

    server: RouterServer

    def __init__(
        self, server: RouterServer, lock: Condition, members: Sequence[Member], clock: Callable[[], float]
    ) -> None:
        super().__init__(server, lock, clock)
        self._members = members

    @property
    def width(self) -> int:
        return max(1, sum(member.width for member in self._workers))

    @property
    def outages(self) -> int:
        return self._outages + sum(member.outages for member in self._workers)

    @property
    def state(self) -> State:
        return "out" if self._state == "out" else "stale" if self._missing else "live"

    @property
    def reason(self) -> str:
        is_workers = self.state == "stale"
        return f"its worker {self._missing[0]} does not have the current weights" if is_workers else self._reason

    @property
    def _workers(self) -> list[Member]:
        return [member for member in self._members if member.name in self.server.named]

    @property
    def _missing(self) -> list[str]:
        return sorted(self.server.named - {member.name for member in self._workers if member.state == "live"})


def current_entries(
    servers: Sequence[str], routers: Sequence[RouterServer], key: str, engine: str
) -> dict[str, RegistryEntry]:
    """Address -> entry of `servers` and of the workers that `routers` list, or listed last if they do not answer."""
    for router in routers:
        with contextlib.suppress(Unreachable, Refused):
            router.healthy(timeout_s=_ASK_S)
    urls = [*servers, *(url for router in routers for url in sorted(router.named))]
    return {url: RegistryEntry(url, key, engine) for url in urls}


def named_workers(http: Http, timeout_s: float) -> list[str]:
    """The addresses that `GET /workers` lists. Raises as `Http.get`."""
    answer = http.get("/workers", RoutedWorkers, timeout_s=timeout_s)
    return [worker.url.rstrip("/") for worker in answer.workers]


def set_dialect(router: RouterServer, workers: Sequence[AnyDialect]) -> bool:
    """Set the dialect of `router` to its workers'; returns whether it passes such requests on, and logs if it does not.

    sglang-router has no path for vLLM's requests (404). One that has it refuses the empty body with another status.
    """
    seeded = all(dialect.seeded for dialect in workers)
    if isinstance(workers[0], SGLangDialect):
        path, router.dialect = "/generate", SGLangRouterDialect(workers[0].vocab_size, seeded)
    else:
        path, router.dialect = "/inference/v1/generate", VLLMDialect(seeded)
    passes = True
    try:
        router.http.exchange(path, b"{}", timeout_s=_ASK_S, max_bytes=MAX_ANSWER_BYTES)
    except Refused as error:
        passes = error.status not in (404, 405)
    except Unreachable:
        passes = False
    if not passes:
        log(f"rollout: {router.http.url} does not pass on requests of this engine; they go directly to its workers")
    return passes
