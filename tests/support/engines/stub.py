"""Servers that speak the engines' dialects over plain sockets, well or as badly as a test wants.

One asyncio thread serves any number of them: the first part of a path names the server, so that a case of a table is an
address. A good completion is a function of its request, so that a test knows the right answer.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

VOCABULARY = 19
STOP = 1
VERSION = "1"


@dataclass
class Asked:
    """One HTTP request as a server sees it, and the way back."""

    path: str
    headers: dict[str, str]
    body: Any
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    count: int
    """Of its server's requests for completions, this one among them, from 1."""
    version: str = VERSION
    """What the server's weights are called."""

    async def reply(
        self, content: bytes | str, status: str = "200 OK", headers: str = "", length: int | None = None
    ) -> None:
        """A whole HTTP answer."""
        content = content.encode() if isinstance(content, str) else content
        size = len(content) if length is None else length
        self.writer.write(
            f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {size}\r\n{headers}\r\n".encode()
            + content
        )
        await self.writer.drain()

    async def raw(self, content: bytes) -> None:
        """Bytes as they are."""
        self.writer.write(content)
        await self.writer.drain()


_ABOUT_ITSELF: dict[str, Any] = {
    "version": {"version": "0.32.0"},
    "v1/models": {"data": [{"id": "policy", "root": "/no/such/model", "max_model_len": 4096}]},
    "server_info": {"vllm_config": {"model_config": {"logprobs_mode": "processed_logprobs"}}, "version": "0.5.23"},
    "weight_info": {"weight_version": VERSION},
    "get_world_size": {"world_size": 1},
    "collective_rpc": {"results": [{"problem": ""}]},
    "weight_checker": {"checksums": {}},
    "weights_checker": {"ranks": []},
    "model_info": {"model_path": "/no/such/model", "weight_version": VERSION},
}
"""Enough for the trainer to take a stub for either engine."""

_GENERATE = ("inference/v1/generate", "inference/v1/generate_arrays", "generate")
Behaviour = Callable[[Asked], Awaitable[None]]


@dataclass
class StubServers:
    """`behaviours[name]` answers requests for completions under /name; everything else is answered well."""

    behaviours: dict[str, Behaviour] = field(default_factory=dict)
    asked: dict[str, int] = field(default_factory=dict)
    health: dict[str, Behaviour] = field(default_factory=dict)
    pages: dict[str, str | Behaviour] = field(default_factory=dict)
    """Answers to other questions, by name/path without its query."""
    met: set[str] = field(default_factory=set)
    """Which of `pages` somebody has asked for."""
    aborted: dict[str, list[Any]] = field(default_factory=dict)
    """The ids that each server was asked to end."""
    versions: dict[str, str] = field(default_factory=dict)
    """What each server was told that its weights are called."""
    dead: dict[str, int] = field(default_factory=dict)
    """How many more connections each server closes; then it is back."""
    port: int = 0

    def __enter__(self) -> StubServers:
        started = threading.Event()

        def serve() -> None:
            self._loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self._loop)
            server = self._loop.run_until_complete(asyncio.start_server(self._connection, "0.0.0.0", 0))
            self.port = server.sockets[0].getsockname()[1]
            started.set()
            self._loop.run_forever()
            server.close()
            for task in asyncio.all_tasks(self._loop):
                task.cancel()
            self._loop.run_until_complete(asyncio.sleep(0))

        self._thread = threading.Thread(target=serve, name="stub servers", daemon=True)
        self._thread.start()
        started.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.port}/{name}"

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                _method, path, _ = head[0].split(" ")
                headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in head[1:] if line)}
                content = await reader.readexactly(int(headers.get("content-length", 0)))
                name, _, rest = path[1:].partition("/")
                if self.dead.get(name):
                    self.dead[name] -= 1
                    return
                body = json.loads(content) if content else None
                generates = bool(content) and rest in (
                    "inference/v1/generate",
                    "inference/v1/generate_arrays",
                    "generate",
                )
                prefill = generates and (body.get("sampling_params") or {}) == {"max_new_tokens": 0, "temperature": 0.0}
                self.asked[name] = self.asked.get(name, 0) + (generates and not prefill)
                told = isinstance(body, dict) and (body.get("new_version") or body.get("weight_version"))
                if told:
                    self.versions[name] = told
                version = self.versions.get(name, VERSION)
                asked = Asked(f"/{rest}", headers, body, reader, writer, self.asked[name], version)
                if prefill:
                    await asked.reply("{}")
                elif generates:
                    await self.behaviours[name](asked)
                elif rest.startswith("abort_request"):
                    self.aborted.setdefault(name, []).append(body.get("rid") or body.get("request_ids"))
                    await asked.reply("")
                elif rest in ("health", "server_info") and name in self.health:
                    await self.health[name](asked)
                elif (page := f"{name}/{rest.partition('?')[0]}") in self.pages:
                    self.met.add(page)
                    answer = self.pages[page]
                    await (asked.reply(answer) if isinstance(answer, str) else answer(asked))
                elif rest == "workers":
                    await asked.reply("no such path", "404 Not Found")
                else:
                    about = dict(_ABOUT_ITSELF.get(rest.partition("?")[0], {}))
                    if "weight_version" in about:
                        about["weight_version"] = version
                    await asked.reply(json.dumps(about))
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()


async def good(asked: Asked) -> None:
    """The right answer."""
    await asked.reply(json.dumps(answer_to(asked.body, asked.version)))


def completion(seed: int, limit: int) -> tuple[list[int], list[float], str]:
    """Tokens, log-probabilities and finish reason of the completion that a seed draws."""
    draw = np.random.default_rng(seed)
    length = int(draw.integers(1, limit + 1))
    tokens = draw.integers(2, VOCABULARY, length).tolist()
    stops = bool(draw.integers(2)) or length < limit
    if stops:
        tokens[-1] = STOP
    return tokens, (-draw.exponential(1.0, length)).tolist(), "stop" if stops else "length"


def answer_to(body: dict[str, Any], version: str = VERSION) -> Any:
    """What a good server answers, in the dialect of the request."""
    if "token_ids" in body:
        parameters = body["sampling_params"]
        choices = []
        for index in range(parameters["n"]):
            tokens, logprobs, reason = completion(parameters["seed"] + index, parameters["max_tokens"])
            content = [
                {"token_id": t, "logprob": p, "rank": 1, "top_logprobs": []}
                for t, p in zip(tokens, logprobs, strict=True)
            ]
            spans = [{"version": version, "start": 0, "end": len(tokens)}]
            choices.append(
                {"index": index, "token_ids": tokens, "logprobs": {"content": content}, "finish_reason": reason}
                | {"weight_versions": spans, "stop_reason": None, "routed_experts": None}
            )
        return {"request_id": f"generate-tokens-{body['request_id']}", "choices": choices, "usage": {"n": 1}}
    if isinstance(body["rid"], str):
        return answer_to({"rid": [body["rid"]], "sampling_params": [body["sampling_params"]]}, version)[0]
    answers = []
    for rid, parameters in zip(body["rid"], body["sampling_params"], strict=True):
        tokens, logprobs, reason = completion(parameters["sampling_seed"], parameters["max_new_tokens"])
        meta = {
            "id": rid,
            "finish_reason": {"type": reason, "matched": 1},
            "output_token_logprobs": [[p, t, None] for t, p in zip(tokens, logprobs, strict=True)],
            "weight_versions": [{"version": version, "start": 0, "end": len(tokens)}],
            "e2e_latency": 0.1,
        }
        answers.append({"text": "", "output_ids": tokens, "meta_info": meta})
    return answers
