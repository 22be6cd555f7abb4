"""The engines' own routers, where they are installed."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dppo_megatron.rollout.servers.directory import named_workers
from dppo_megatron.rollout.servers.http import Http
from support.processes import free_port, until

_MODULE = {"vllm": "vllm_router", "sglang": "sglang_router"}


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
