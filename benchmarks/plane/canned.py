"""Engine servers with canned answers: the right bytes for any request at almost no cost, in a process of their own.

The first part of a path names the server, so that one port serves any number.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from dppo_megatron.rollout.servers.in_engine.dppo_arrays import packed
from dppo_megatron.types import ExpertChoices

COUNT = 16
"""Completions of a group."""
PROMPT = 100
"""Tokens of a prompt."""


@dataclass(frozen=True)
class Canned:
    """The answer to every group: `tokens` for each of its completions, after `delay_s`."""

    engine: str
    tokens: int
    delay_s: float = 0.0
    experts: ExpertChoices | None = None
    """Returned with the arrays of `vllm_arrays`, for each token of prompt and completion but the last."""

    def body(self, request_id: str) -> bytes:
        """The answer in the engine's own form, with the fields that nobody reads."""
        choice: dict[str, Any]
        rng = np.random.default_rng(0)
        tokens = rng.integers(1000, 150_000, self.tokens).tolist()
        values = [round(float(value), 6) for value in -rng.exponential(1.0, self.tokens)]
        span = [{"version": "1", "start": 0, "end": self.tokens}]
        if self.engine.endswith("_arrays"):
            head = {"finish_reason": "length", "weight_versions": span}
            answers = [(head | {"id": f"{request_id}/{index}"}, tokens, values) for index in range(COUNT)]
            return packed(answers, [self._chosen(rng) for _ in answers] if self.experts else ())
        if self.engine == "vllm":
            entry = [
                {"token_id": t, "logprob": p, "rank": 1, "top_logprobs": [{"token_id": t, "logprob": p, "rank": 1}]}
                for t, p in zip(tokens, values, strict=True)
            ]
            choice = {"logprobs": {"content": entry}, "finish_reason": "length", "stop_reason": None}
            choice |= {"token_ids": tokens, "routed_experts": None, "sampling_mask": None, "weight_versions": span}
            choices = [{"index": index} | choice for index in range(COUNT)]
            return json.dumps({"request_id": f"generate-tokens-{request_id}", "choices": choices}).encode()
        triples = [[p, t, None] for t, p in zip(tokens, values, strict=True)]
        meta = {"finish_reason": {"type": "length"}, "output_token_logprobs": triples, "weight_versions": span}
        texts = [
            {"text": "", "output_ids": tokens, "meta_info": {"id": f"{request_id}/{index}"} | meta}
            for index in range(COUNT)
        ]
        return json.dumps(texts).encode()

    def _chosen(self, rng: np.random.Generator) -> np.ndarray:
        """[tokens, layers, k]: of each token k neighbours from a random first one."""
        assert self.experts is not None
        first = rng.integers(self.experts.count, size=(PROMPT + self.tokens - 1, self.experts.layers, 1))
        chosen = (first + np.arange(self.experts.per_token)) % self.experts.count
        return chosen.astype(self.experts.dtype)


_ID = "r-000000.00000000"
"""A group's id, with what the client adds for each attempt."""
_PIECE = 256 << 10


def request_id(index: int) -> str:
    """Id of group `index`: always of one length, so that it can be written into the canned answer."""
    return f"r-{index:06d}"


class CannedServers:
    """The process; `url(n)` is server n's address."""

    def __init__(self, canned: Canned) -> None:
        ours, theirs = multiprocessing.Pipe()
        self.process = multiprocessing.get_context("fork").Process(target=_serve, args=(canned, theirs), daemon=True)
        self.process.start()
        self._port = ours.recv()

    def url(self, server: int) -> str:
        return f"http://127.0.0.1:{self._port}/{server}"

    def close(self) -> None:
        self.process.kill()
        self.process.join()


def _serve(canned: Canned, pipe: Connection) -> None:
    asyncio.run(_run(canned, pipe))


async def _run(canned: Canned, pipe: Connection) -> None:
    can = canned.body(_ID)
    length, parts = len(can), [memoryview(part) for part in can.split(_ID.encode())]

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one client until it disconnects."""
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                lengths = [line[15:] for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")]
                body = await reader.readexactly(int(lengths[0]) if lengths else 0)
                if b'"max_new_tokens":0,' in body or b"generate" not in head:
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
                    continue
                await asyncio.sleep(canned.delay_s)
                at = body.index(b'"r-') + 1
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % length)
                for number, part in enumerate(parts):
                    if number:
                        writer.write(body[at : at + len(_ID)])
                    for start in range(0, len(part), _PIECE):  # all answers share one buffer: nothing is copied
                        writer.write(part[start : start + _PIECE])
                        await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(connection, "127.0.0.1", 0, limit=1 << 20, backlog=4096)
    pipe.send(server.sockets[0].getsockname()[1])
    await server.serve_forever()
