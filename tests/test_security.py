"""Keys stand in no file, message or list of processes; what we open listens where it was meant to; servers ask."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from support.engines.rig import Rig, requests, run
from support.engines.servers import launch_servers
from support.engines.stub import StubServers, good
from support.job import job_config, write_job_files
from support.settings import rollout_config

from dppo_megatron.config.load import config_values
from dppo_megatron.config.rollout import RolloutConfig, check_rollout
from dppo_megatron.observe.trackers.process import Begin
from dppo_megatron.observe.trackers.sink import Trackers
from dppo_megatron.rollout.servers.connect import configured_key, describe, make_server
from dppo_megatron.rollout.servers.http import Done, Http, Refused, clean_key
from dppo_megatron.rollout.servers.server_process import LaunchedServer, stop_all
from dppo_megatron.rollout.servers.sglang import sglang_command
from dppo_megatron.rollout.servers.vllm import vllm_command
from dppo_megatron.rollout.sync.broadcast import listening_store
from dppo_megatron.types import UserError

sys.path.insert(0, str(Path(__file__).parent.parent / "dppo_megatron" / "rollout" / "servers" / "in_engine"))
from dppo_vllm_guard import RequireKey

KEY = "s3cret-of-the-servers"


@pytest.fixture
def echoing_server() -> Iterator[str]:
    """Answers every request with an error that holds the request's headers, as some proxies do."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            before = "." * int(self.path.rpartition("-")[2] if "-" in self.path else 0)
            body = json.dumps({"error": {"message": f"{before}no: {dict(self.headers)}"}}).encode()
            self.send_response(403 if self.path == "/403" else 500)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("key", [f"{KEY}\n", f"  {KEY}\r\n", f"{KEY}\t"])
def test_a_mounted_secret_ends_in_a_newline(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    """Which is no part of it."""
    monkeypatch.setenv("DPPO_ENGINE_API_KEY", key)
    assert configured_key(RolloutConfig()) == KEY


@pytest.mark.parametrize("key", [f"{KEY}\n{KEY}", f"a {KEY}", f"{KEY}é", f"{KEY}\x07", f"{KEY}\x7f"])
def test_a_key_that_no_header_can_hold(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    """Names the variable and nothing of its value; also where a client is made of it."""
    monkeypatch.setenv("DPPO_TEST_KEY", key)
    with pytest.raises(UserError, match="environment variable DPPO_TEST_KEY") as error:
        configured_key(rollout_config({"servers.api_key_env": "DPPO_TEST_KEY"}))
    assert KEY not in str(error.value)
    with pytest.raises(UserError) as error:
        Http("http://127.0.0.1:1", key)
    assert KEY not in str(error.value) and KEY not in repr(Http("http://127.0.0.1:1", KEY))


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_no_answer_shows_the_key(echoing_server: str, engine: str) -> None:
    """Not even one that the server has put it into."""
    with pytest.raises(Refused) as refused:
        Http(echoing_server, KEY).get("/x", Done, timeout_s=10)
    assert "Bearer ***" in str(refused.value) and KEY not in str(refused.value)
    with pytest.raises(UserError) as error:
        describe(make_server(rollout_config({"engine": engine}), echoing_server, KEY, 19), "DPPO_ENGINE_API_KEY")  # type: ignore[arg-type]
    assert KEY not in str(error.value)


@pytest.mark.parametrize("key", [KEY, f'{KEY}"quoted', f"{KEY}\\'both"])
def test_no_answer_shows_half_of_the_key(echoing_server: str, key: str) -> None:
    """Long answers are cut, wherever the key stands in them."""
    for dots in range(280, 500, 9):
        with pytest.raises(Refused) as refused:
            Http(echoing_server, key).get(f"/dots-{dots}", Done, timeout_s=10)
        assert KEY[:4] not in str(refused.value)


def test_no_log_shows_half_of_a_key(tmp_path: Path) -> None:
    """The end of a server's log that an error quotes, wherever it is cut."""
    server = LaunchedServer([], {}, tmp_path / "log", api_key=KEY)
    for dots in range(1960, 2005):
        server.log.write_text(f"{KEY}{'.' * dots}\n")
        assert KEY[-4:] not in server.with_log("")


@pytest.mark.parametrize(
    "values",
    [
        {"servers.launch": "local", "servers.args": ["--api_key", KEY]},
        {"servers.launch": "local", "servers.args": [f"--api-k={KEY}"]},
        {"servers.endpoints": [f"http://user:{KEY}@127.0.0.1:8000"]},
        {"servers.endpoints": [f"user:{KEY}@127.0.0.1:8000"]},
        {"servers.endpoints": [f"http://127.0.0.1:8000/?api_key={KEY}"]},
        {"servers.endpoints": [f"http://127.0.0.1:8000/#{KEY}"]},
        {"servers.endpoints": ["http://127.0.0.1:8000"], "servers.api_key_env": f"sk-{KEY}"},
        {"servers.launch": "local", "servers.args": ["--api-key", KEY]},
        {"servers.launch": "local", "servers.args": [f"--api-key={KEY}"]},
        {"servers.launch": "local", "servers.args": ["--admin-api-key", KEY]},
    ],
)
def test_no_setting_holds_a_key(values: dict[str, Any]) -> None:
    """Settings are written to files and command lines; the refusal does not repeat it."""
    with pytest.raises(UserError, match="key") as error:
        check_rollout(rollout_config({"engine": "vllm"} | values))
    assert KEY not in str(error.value)


@pytest.mark.parametrize("given", ["", KEY])
@pytest.mark.parametrize(("engine", "variable"), [("vllm", "VLLM_API_KEY"), ("sglang", "DPPO_SERVER_KEY")])
def test_launched_servers_have_keys_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, engine: str, variable: str
) -> None:
    """Each a random one, or the user's, told by the environment: not on the command line, in its repr or in files."""
    if given:
        monkeypatch.setenv("DPPO_ENGINE_API_KEY", given)
    else:
        monkeypatch.delenv("DPPO_ENGINE_API_KEY", raising=False)
    files = write_job_files(tmp_path / "task")
    config = job_config(
        files,
        tmp_path / "run",
        rollout__engine=engine,
        rollout__servers__launch="local",
        rollout__servers__count=2,
        rollout__servers__python=sys.executable,  # has no engine: the processes end by themselves
    )
    servers = launch_servers(config)
    for server in servers:
        assert server.process is not None and server.process.wait(60) != 0
        assert len(server.api_key) >= 20 and server.variables[variable] == server.api_key
        assert server.api_key not in " ".join([*server.command, *map(str, server.process.args)])  # type: ignore[arg-type]
        assert server.api_key not in repr(server) and server.api_key not in server.log.read_text()
        assert server.api_key not in str(config_values(config))
        stop_all([server])
    assert (servers[0].api_key == servers[1].api_key == given) if given else servers[0].api_key != servers[1].api_key
    build = vllm_command if engine == "vllm" else sglang_command
    command = build(config.rollout, "python", "model", 10, "float32", cpu=True)
    if engine == "vllm":
        assert command[command.index("--middleware") + 1] == "dppo_vllm_guard.RequireKey"
    else:
        assert command[1].endswith("in_engine/dppo_sglang_server.py") and Path(command[1]).exists()
    assert command[command.index("--host") + 1] == "127.0.0.1"


@pytest.mark.parametrize("argument", ["--trust-remote-code", "--trust_remote_code", "--trust-remote-code=true", "--tr"])
def test_no_setting_runs_a_models_code(argument: str) -> None:
    """Not in a server either."""
    with pytest.raises(UserError, match=r"rollout\.servers\.args has --trust-remote-code"):
        check_rollout(rollout_config({"engine": "vllm", "servers.launch": "local", "servers.args": [argument]}))


def _ask(monkeypatch: pytest.MonkeyPatch, scope: dict[str, Any]) -> list[dict[str, Any]]:
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    sent: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "reached"})

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(RequireKey(app)(scope, None, send))  # type: ignore[arg-type]
    return sent


@pytest.mark.parametrize("path", ["/health", "/collective_rpc", "/update_weights", "/v1/models", "/", "/weight_info"])
def test_the_guard_asks_everywhere(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """Every path and method but the right key; vLLM's own check leaves the development endpoints open."""

    def scope(*headers: tuple[bytes, bytes], **more: Any) -> dict[str, Any]:
        return {"type": "http", "method": "POST", "path": path, "headers": list(headers)} | more

    right = (b"authorization", f"Bearer {KEY}".encode())
    assert _ask(monkeypatch, scope(right)) == [{"type": "reached"}]
    for wrong in (
        scope(),
        scope((b"authorization", b"Bearer ")),
        scope((b"authorization", KEY.encode())),
        scope((b"authorization", f"Bearer {KEY}x".encode())),
        scope((b"authorization", f"Bearer {KEY[:-1]}".encode())),
        scope((b"x-api-key", KEY.encode())),
        scope(method="OPTIONS"),
        scope((b"authorization", b"Bearer \xff\xfe")),
    ):
        sent = _ask(monkeypatch, wrong)
        assert sent[0]["status"] == 401 and KEY.encode() not in sent[1]["body"]
    assert _ask(monkeypatch, scope(type="websocket"))[0]["type"] == "websocket.close"
    assert _ask(monkeypatch, {"type": "lifespan"}) == [{"type": "reached"}]


def test_the_guard_needs_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rather no server than one that lets everybody in."""
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with pytest.raises(RuntimeError, match="VLLM_API_KEY is not set"):
        RequireKey(None)  # type: ignore[arg-type]


def test_an_empty_key_is_no_key() -> None:
    """Nothing is sent then."""
    assert clean_key(" \n", "here") == ""


def _listens_on(port: int) -> set[str]:
    """Addresses of this machine on which somebody listens at `port`, by trying all of them."""
    own = {"127.0.0.1", "127.0.0.2", "::1"}
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # nothing is sent; it only chooses an address of ours
        own.add(probe.getsockname()[0])
    reached = set()
    for address in own:
        with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=5):
            reached.add(address)
    return reached


def test_a_broadcast_groups_store_listens_where_it_was_meant_to() -> None:
    """And works there: torch's own would listen on every address, 127.0.0.2 and ::1 included."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = listening_store("127.0.0.1", 2, timedelta(seconds=20))
    assert _listens_on(store.port) == {"127.0.0.1"}
    other = TCPStore("127.0.0.1", store.port, 2, False, timedelta(seconds=20), wait_for_workers=False)
    other.set("key", "value")
    assert store.get("key") == b"value"


_GROUPS = """
import os, sys
from dppo_megatron.actor.layout import build_layout, start_process_group
from dppo_megatron.config.schema import LayoutConfig
from support.listening import beyond_loopback
start_process_group()
build_layout(LayoutConfig(), 0)
print(beyond_loopback(os.getpid()), "GLOO_SOCKET_IFNAME" in os.environ)
"""
_ELSEWHERE = 'mount --bind "$0" /etc/hosts && hostname elsewhere.example && exec "$@"'
"""In namespaces of its own: a machine whose name stands for its address in the network, as a cluster's nodes do."""


def test_one_process_listens_to_nobody_else(tmp_path: Path) -> None:
    """gloo would listen on the address of the host's name. Where the kernel lets us, that is one of the network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(("192.0.2.1", 9))
        (tmp_path / "hosts").write_text(f"127.0.0.1 localhost\n{probe.getsockname()[0]} elsewhere.example\n")
    namespaces = ["unshare", "-r", "-u", "-m", "sh", "-c", _ELSEWHERE, str(tmp_path / "hosts")]
    elsewhere: list[str] = []
    with contextlib.suppress(OSError):
        if subprocess.run([*namespaces, "true"], capture_output=True).returncode == 0:
            elsewhere = namespaces
    unset = ("GLOO_SOCKET_IFNAME", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    done = subprocess.run(
        [*elsewhere, sys.executable, "-c", _GROUPS],
        env=environment | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.strip().splitlines()[-1:] == ["{} False"], done.stderr


def test_the_working_directory_is_not_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be a model's directory: neither a rollout client nor a tracker takes its modules from there."""
    for name in ("aiohttp", "json", "msgspec", "numpy", "tensorboard"):
        (tmp_path / f"{name}.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'touched')!r})\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))))
    monkeypatch.chdir(tmp_path)
    with StubServers({"a": good}) as stubs:
        rig = Rig([("vllm", stubs.url("a"))])
        try:
            run(rig.fleet([0], {}), requests(2))
        finally:
            rig.close()
    trackers = Trackers(["tensorboard"], Begin("0" * 16, "trackers", "p", "n", [], True, {}, None), 300.0)
    trackers.close(finished=True)
    assert trackers.failures == 0 and list((tmp_path / "trackers" / "tensorboard").iterdir())
    assert not (tmp_path / "touched").exists()
