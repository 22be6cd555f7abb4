"""What routers do with requests, in little: sglang-router 0.3.2 and vllm-router 0.1.17 as seen with stub servers.

Both name their workers at GET /workers and send each request to one of them. sglang-router reads a request into a type
of its own: one id, one prompt; fields that the type lacks are dropped; paths that it lacks are 404. vllm-router passes
the body of /inference/v1/generate on.

And the routers themselves, where they are installed.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from dppo_megatron.rollout.servers.http import Http
from dppo_megatron.rollout.servers.router import named_workers
from support.engines.stub import Asked, Behaviour, StubServers
from support.processes import free_port, until

_MODULE = {"vllm": "vllm_router", "sglang": "sglang_router"}
_KNOWN = {"text", "input_ids", "sampling_params", "rid", "stream"}
_KNOWN |= {"return_logprob", "logprob_start_len", "top_logprobs_num"}


def relay(stubs: StubServers, name: str, workers: Sequence[str], engine: str) -> Behaviour:
    """A router of `engine`'s kind at `name` in front of other stub servers, which takes them in turn."""
    stubs.pages[f"{name}/workers"] = json.dumps({"workers": [{"url": stubs.url(worker)} for worker in workers]})
    turn = itertools.cycle(workers)

    async def behave(asked: Asked) -> None:
        body = asked.body
        if asked.path != {"vllm": "/inference/v1/generate", "sglang": "/generate"}[engine]:
            return await asked.reply("", "404 Not Found")
        if engine == "sglang":
            if not isinstance(body.get("rid"), str) or not isinstance(body.get("input_ids"), list):
                return await asked.reply("rid: invalid type: sequence, expected a string", "422 Unprocessable Entity")
            body = {key: value for key, value in body.items() if key in _KNOWN}
        elif "token_ids" not in body:
            return await asked.reply("missing field `token_ids`", "422 Unprocessable Entity")
        reader, writer = await asyncio.open_connection("127.0.0.1", stubs.port)
        content = json.dumps(body).encode()
        head = f"POST /{next(turn)}{asked.path} HTTP/1.1\r\nContent-Length: {len(content)}\r\n\r\n"
        writer.write(head.encode() + content)
        answer = await reader.readuntil(b"\r\n\r\n")
        length = next(line for line in answer.split(b"\r\n") if line.startswith(b"Content-Length"))
        await asked.reply(await reader.readexactly(int(length.split()[1])), answer.split(b"\r\n")[0][9:].decode())
        writer.close()

    return behave


def _python(engine: str) -> str:
    return os.environ.get(f"DPPO_{engine.upper()}_ROUTER_PYTHON") or sys.executable


def _has_router(engine: str) -> bool:
    return _python(engine) != sys.executable or importlib.util.find_spec(_MODULE[engine]) is not None


@contextlib.contextmanager
def real_router(engine: str, urls: list[str], log: Path) -> Iterator[str]:
    """The address of the engine's own router in front of `urls`."""
    if not _has_router(engine):
        pytest.skip(f"no {_MODULE[engine]}; DPPO_{engine.upper()}_ROUTER_PYTHON names an interpreter that has it")
    port, metrics = free_port(), free_port()
    command = [_python(engine), "-m", f"{_MODULE[engine]}.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    with open(log, "wb") as output:
        router = subprocess.Popen(
            [*command, "--prometheus-port", str(metrics), "--worker-urls", *urls], stdout=output, stderr=output
        )
    url = f"http://127.0.0.1:{port}"

    def ready() -> bool:
        assert router.poll() is None, log.read_text()[-2000:]
        with contextlib.suppress(Exception):
            return set(named_workers(Http(url), 5)) == set(urls)
        return False

    try:
        until(ready)
        yield url
    finally:
        router.terminate()
        router.wait(20)
