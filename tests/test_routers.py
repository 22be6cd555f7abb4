"""An endpoint may be a router: its workers are found, checked, synced and asked themselves."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.engines.stub import StubServers, good
from support.settings import rollout_config

from dppo_megatron.rollout.servers.connect import workers
from dppo_megatron.rollout.servers.http import Http, Refused, Unreachable
from dppo_megatron.types import UserError

ROUTER = os.environ.get("DPPO_ROUTER_PYTHON") or sys.executable
HAS_ROUTER = bool(os.environ.get("DPPO_ROUTER_PYTHON")) or importlib.util.find_spec("sglang_router") is not None


def _said(endpoints: list[str], **values: object) -> tuple[list[str], list[str]]:
    said: list[str] = []
    config = rollout_config({"engine": "sglang", "servers.endpoints": endpoints} | values)
    return workers(config, "", said.append), said


def test_a_routers_workers_take_its_place() -> None:
    """In the form that sglang-router 0.3.2 gives; servers that are no routers stay as they are."""
    with StubServers({"a": good, "b": good}) as stubs:
        named = {"workers": [{"id": "x", "url": f"{stubs.url('a')}/", "is_healthy": True}], "total": 1}
        stubs.pages["router/workers"] = json.dumps(named)
        found, said = _said([stubs.url("router"), stubs.url("b"), "http://127.0.0.1:1"])
        assert found == [stubs.url("a"), stubs.url("b"), "http://127.0.0.1:1"]
        assert len(said) == 1 and stubs.url("router") in said[0] and "is a router" in said[0]


def test_a_router_that_is_of_no_use_is_said() -> None:
    with StubServers() as stubs:
        for answer, message in (
            ({"workers": []}, "a router without workers"),
            ({"workers": [{"url": "http://10.1.2.3:8000"}]}, "allow_remote_endpoints"),
            ({"workers": [{"url": "file:///etc/passwd"}]}, "expected http://host:port"),
            ({"workers": [{"url": "http://127.0.0.1:5"}, {"url": "http://127.0.0.1:5/"}]}, "names a server twice"),
        ):
            stubs.pages["router/workers"] = json.dumps(answer)
            with pytest.raises(UserError, match=message):
                _said([stubs.url("router")])


@pytest.mark.skipif(not HAS_ROUTER, reason="no sglang_router; DPPO_ROUTER_PYTHON names an interpreter that has it")
def test_a_real_router_is_recognised(tmp_path: Path) -> None:
    """sglang-router over two servers."""
    with StubServers({"a": good, "b": good}) as stubs, socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
        probe.close()
        command = [ROUTER, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
        with open(tmp_path / "router.log", "wb") as log:
            router = subprocess.Popen(
                [*command, "--worker-urls", stubs.url("a"), stubs.url("b")], stdout=log, stderr=subprocess.STDOUT
            )
        try:
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:
                try:
                    Http(f"http://127.0.0.1:{port}").get("/get_model_info", timeout_s=5)
                    break
                except (Refused, Unreachable):
                    time.sleep(0.2)
            found, _ = _said([f"http://127.0.0.1:{port}"])
            assert sorted(found) == sorted([stubs.url("a"), stubs.url("b")])
        finally:
            router.terminate()
            router.wait(20)
