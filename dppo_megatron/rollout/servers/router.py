"""A router in front of servers (sglang-router, vLLM's): requests go through it, everything else to its workers.

    rollout client --- request ----------------> router ---- to the worker that it chooses -----> worker 1, 2, ...
                   --- ends it early -----------------------------------------------------------> each worker
    rank 0         --- weights, canary, health -------------------------------------------------> each worker
                   --- which workers are there? --> router      (its health probe, and at every sync)

The router knows nothing of weights, so it is asked only while every worker that it names has the present ones. Else
those that have them are asked themselves, until the next sync has made the router whole again. When one of its workers
goes out, so does the router: it does not report which of the running requests were that worker's, so all of them are
made again. That loses work, once for a server that fails, but does not depend on how long a router waits for a hung
worker.
"""

from __future__ import annotations

import contextlib
import time
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
    """As sglang-router 0.3.2 and vllm-router 0.1.17 list them."""

    workers: Annotated[list[Routed], msgspec.Meta(max_length=4096)]


@dataclass
class RouterServer:
    """The router's end of HTTP; see `protocol.Generator`."""

    http: Http
    dialect: AnyDialect = field(default_factory=VLLMDialect)
    named: frozenset[str] = frozenset()
    """Addresses of its workers, as last reported."""

    def healthy(self, *, timeout_s: float) -> None:
        """Reads the list of its workers anew. Raises BadAnswer if it names none."""
        named = named_workers(self.http, timeout_s)
        if not named:
            raise BadAnswer(f"{self.http.url}/workers names no worker")
        self.named = frozenset(named)


class Router(Endpoint):
    """A router, as the fleet asks it: live while it answers and all of its workers are live. An outage of one of them
    is one of its own.

    Args:
        members: the fleet's, which grow.
    """

    server: RouterServer

    def __init__(
        self,
        server: RouterServer,
        lock: Condition,
        members: Sequence[Member],
        clock: Callable[[], float] = time.monotonic,
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
        """Why it is not live."""
        is_workers = self.state == "stale"
        return f"its worker {self._missing[0]} has not the present weights" if is_workers else self._reason

    @property
    def _workers(self) -> list[Member]:
        return [member for member in self._members if member.name in self.server.named]

    @property
    def _missing(self) -> list[str]:
        return sorted(self.server.named - {member.name for member in self._workers if member.state == "live"})


def named_now(
    servers: Sequence[str], routers: Sequence[RouterServer], key: str, engine: str
) -> dict[str, RegistryEntry]:
    """`servers` and the workers that `routers` name, by address. One that does not answer has those it named last."""
    for router in routers:
        with contextlib.suppress(Unreachable, Refused):
            router.healthy(timeout_s=_ASK_S)
    urls = [*servers, *(url for router in routers for url in sorted(router.named))]
    return {url: RegistryEntry(url, key, engine) for url in urls}


def named_workers(http: Http, timeout_s: float) -> list[str]:
    """The addresses that `GET /workers` names. Raises as `Http.get`."""
    answer = http.get("/workers", RoutedWorkers, timeout_s=timeout_s)
    return [worker.url.rstrip("/") for worker in answer.workers]


def through(router: RouterServer, workers: Sequence[AnyDialect]) -> bool:
    """Give `router` its workers' dialect; returns whether it passes such requests on. If not, that is logged.

    sglang-router has no path for vLLM's requests: it answers 404. A router that has the path refuses the empty body
    with another status.
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
        log(f"rollout: {router.http.url} passes no requests of this engine on; its workers are asked themselves")
    return passes
