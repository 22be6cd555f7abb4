"""Nothing is sent to another program that has taken a server's port: neither the key nor a request, nor weights."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.cases import Choose
from support.engines.fake_vllm import FakeVLLM, fake_python
from support.engines.servers import PYTHON, launch_servers, needs
from support.impostor import WAYS, Impostor
from support.job import job_config
from support.logged import logged_lines
from support.processes import until
from support.served import rank_zero
from support.settings import rollout_config
from torch.distributed.distributed_c10d import PrefixStore

from dppo_megatron.config.rollout import check_rollout
from dppo_megatron.config.schema import Config
from dppo_megatron.config.server_args import KEY_OPTIONS, OWN_OPTIONS
from dppo_megatron.job import prepare_job
from dppo_megatron.rollout import launched_servers
from dppo_megatron.rollout.client.connections import ServerConnections
from dppo_megatron.rollout.client.messages import ServerAddress
from dppo_megatron.rollout.engine import Request, Sampling
from dppo_megatron.rollout.server_engine import ServerEngine
from dppo_megatron.rollout.servers import server_process
from dppo_megatron.rollout.servers.dialects import VLLMDialect
from dppo_megatron.rollout.servers.http import Http, NotProven, Peer
from dppo_megatron.rollout.servers.in_engine import dppo_wire
from dppo_megatron.rollout.servers.protocol import GroupRendezvous
from dppo_megatron.rollout.servers.server_process import LaunchedServer, stop_all
from dppo_megatron.rollout.servers.vllm import vllm_command
from dppo_megatron.rollout.servers.wire import Expected, GenerateRequest, Submit
from dppo_megatron.rollout.sync.broadcast import ChainGroup, listening_store
from dppo_megatron.types import Prompt, RunAborted, UserError

KEY = "s3cret-of-the-servers"


@pytest.fixture
def real() -> Iterator[str]:
    """Address of a server that has the key."""
    with FakeVLLM("127.0.0.1", 0, KEY) as server:
        yield server.url


def _config(files: Path, run_dir: Path, **extra: Any) -> Config:
    return job_config(
        files,
        run_dir,
        rollout__engine="vllm",
        rollout__completions_per_prompt=3,
        rollout__servers__python=fake_python(files),
        rollout__sync__verify_every=0,
        rollout__sync__channel="disk",
        **extra,
    )


# ------------------------------------------------------------------------------------------------- both HTTP clients


def _ask(url: str, key: str) -> None:
    """As a rollout client asks for a completion."""

    async def once() -> None:
        connections = ServerConnections(8)
        connections.add([ServerAddress(Peer(url, key, proves=True), VLLMDialect())])
        group = GenerateRequest("id", (2, 3), 1, 5, 4)
        try:
            await connections.generate(Submit(0, 0, url, group, Expected(19, 0, 1), 20.0))
        finally:
            await connections.close()

    asyncio.run(once())


CLIENTS: dict[str, Callable[[str, str], Any]] = {
    "control": lambda url, key: Http(url, key, proves=True).do("/collective_rpc", {"a": 1}, timeout_s=20),
    "completions": _ask,
}


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("way", [*WAYS, "relays"])
def test_an_impostor_gets_nothing(real: str, way: str, client: str) -> None:
    """However it answers, and also if it passes the question on to a server that has the same key."""
    with Impostor(way="agrees" if way == "relays" else way, relay=real if way == "relays" else "") as impostor:
        for _ in range(2):
            with pytest.raises(NotProven, match=f"{impostor.url}: .* does not prove"):
                CLIENTS[client](impostor.url, KEY)
        impostor.assert_it_got_questions_only()


@pytest.mark.parametrize("client", CLIENTS)
def test_a_server_with_another_key_gets_nothing(real: str, client: str) -> None:
    """It is another one."""
    with pytest.raises(NotProven):
        CLIENTS[client](real, "another-key")


def test_every_connection_is_proven() -> None:
    """Not the address: an impostor that comes later gets nothing either, whatever its predecessor has proven."""
    with FakeVLLM("127.0.0.1", 0, KEY) as server:
        http = Http(server.url, KEY, proves=None)
        assert http.get("/version", dict, timeout_s=20) == {"version": "0.32.0"} and http.proves
    # no new connections; what is open goes on
    with Impostor(server.server_address[1]) as impostor:
        assert http.get("/version", dict, timeout_s=20), "the connection that is kept leads to the server"
        http.close()
        with pytest.raises(NotProven):
            http.get("/version", dict, timeout_s=20)
        impostor.assert_it_got_questions_only()


def test_a_server_without_our_check_is_its_users_word() -> None:
    """One of rollout.servers.endpoints that cannot prove itself is asked as ever."""
    with Impostor() as plain:
        http = Http(plain.url, KEY, proves=None)
        assert http.get("/version", dict, timeout_s=20) == {} and http.proves is False
        assert f"Bearer {KEY}".encode() in plain.got


# ---------------------------------------------------------------------------------------------- who starts the server


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[Impostor]:
    """Has the port that the next launched server will be given."""
    with Impostor() as impostor:
        taken = ("127.0.0.1", impostor.port)
        monkeypatch.setattr(server_process, "_reserve", lambda host: SimpleNamespace(getsockname=lambda: taken))
        monkeypatch.setenv("DPPO_ENGINE_API_KEY", KEY)
        yield impostor
        assert KEY.encode() not in impostor.got


def test_a_run_whose_port_is_taken_ends(files: Path, tmp_path: Path, taken: Impostor) -> None:
    """launch=local: with the address, and the child's own error."""
    config = _config(files, tmp_path / "run", rollout__servers__launch="local")
    job = prepare_job(config, 1)
    with pytest.raises(UserError, match=f"{taken.url} ended with code 1 before it was ready(.|\n)*in use"):
        ServerEngine(config, job.architecture, job.tokenizer)
    taken.assert_it_got_questions_only()


def test_serve_whose_port_is_taken_ends(files: Path, tmp_path: Path, taken: Impostor) -> None:
    """And announces no address."""
    config = _config(files, tmp_path / "run", rollout__servers__registry_dir=tmp_path / "addresses")
    with pytest.raises(UserError, match=f"{taken.url} ended with code 1 before it was ready(.|\n)*in use"):
        launched_servers.serve(config, "127.0.0.1")
    assert not list((tmp_path / "addresses").iterdir())


def _kill(server: LaunchedServer) -> None:
    assert server.process is not None
    os.killpg(server.process.pid, signal.SIGKILL)
    server.process.wait()


def test_a_port_that_is_taken_at_a_restart(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two servers dies and its port is taken: the run goes on with the other, and says whose address it is."""
    monkeypatch.setenv("DPPO_ENGINE_API_KEY", KEY)
    config = _config(
        files,
        tmp_path / "run",
        rollout__servers__launch="local",
        rollout__servers__count=2,
        rollout__limits__probe_every_s=0.1,
    )
    job, said = prepare_job(config, 1), logged_lines()
    engine = ServerEngine(config, job.architecture, job.tokenizer)
    try:
        [first, second] = rank_zero(engine).fleet.members
        for step in range(1, 5):
            if step == 2:
                assert engine._job_servers is not None
                killed = engine._job_servers.local[0]
                _kill(killed)
                impostor = Impostor(killed.port)
            engine.load_weights(lambda: iter([("lm_head.weight", torch.zeros(2, 2))]))
            asked = [Request(Prompt(i, "", (2, 3), "", ""), c, step) for i in range(8) for c in range(3)]
            assert len(engine.generate(asked, Sampling(12, 1.0, 0))) == 24
        assert engine.health()[second.name] == "live" and first.state == "out"
        assert any(f"{first.name} answers again and is not used" in line for line in said), said
        with impostor:
            impostor.assert_it_got_questions_only()
    finally:
        engine.close()


def test_a_port_that_is_taken_at_a_restart_of_serve(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its address is withdrawn, and `serve` ends after so many starts."""
    monkeypatch.setenv("DPPO_ENGINE_API_KEY", KEY)
    config, addresses = _config(files, tmp_path / "run", rollout__servers__registry_dir=tmp_path), tmp_path / "a"
    addresses.mkdir()
    [server] = launch_servers(config)
    try:
        served = launched_servers.Served(server, config, addresses, "name")
        until(lambda: (served.check(), not served.is_starting)[1])
        assert list(addresses.iterdir())
        _kill(server)
        with Impostor(server.port) as impostor:
            with pytest.raises(RunAborted, match=f"{server.url} ended with code 1 before it was ready(.|\n)*in use"):
                until(lambda: (served.check(), False)[1])
            impostor.assert_it_got_questions_only(was_asked=False)  # the server may have ended before the first look
        assert not list(addresses.iterdir())
    finally:
        stop_all([server])


def test_a_server_that_hangs_is_started_again_by_serve(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs and answers nothing for as long as is waited: withdrawn, ended, started and announced again."""
    monkeypatch.setattr(launched_servers, "HUNG_S", 0.0)
    config, addresses = _config(files, tmp_path / "run", rollout__servers__registry_dir=tmp_path), tmp_path / "a"
    addresses.mkdir()
    [server] = launch_servers(config)
    try:
        served = launched_servers.Served(server, config, addresses, "name")
        until(lambda: (served.check(), not served.is_starting)[1])
        hung = server.process
        assert hung is not None and list(addresses.iterdir())
        os.killpg(hung.pid, signal.SIGSTOP)
        until(lambda: (served.check(), server.process is not hung)[1])
        assert hung.poll() is not None and not list(addresses.iterdir())
        until(lambda: (served.check(), not served.is_starting)[1])
        assert list(addresses.iterdir())
    finally:
        stop_all([server])


def test_a_dead_child_is_not_ready(tmp_path: Path) -> None:
    """Whoever answers in its place."""
    server = LaunchedServer([sys.executable, "-c", ""], {}, tmp_path / "log")
    server.start()
    assert server.process is not None and server.process.wait(60) == 0
    with pytest.raises(UserError, match="ended with code 0 before it was ready"):
        server.wait_ready(lambda: None, 60)


# ----------------------------------------------------------------------------------------------- groups for weights


def _meeting() -> tuple[GroupRendezvous, dist.Store]:
    """One of two members, and the store as another process reaches it."""
    joining = timedelta(seconds=10)
    store = listening_store("127.0.0.1", 2, joining)
    other = dist.TCPStore("127.0.0.1", store.port, 2, False, joining, wait_for_workers=False)  # type: ignore[attr-defined]
    return GroupRendezvous("test", "gloo", "127.0.0.1", store, 2, joining, joining), other


def _both(ours: Callable[[], Any], theirs: Callable[[], Any]) -> tuple[Any, Any]:
    """What each end returns or raises."""
    found: dict[str, Any] = {}

    def note(name: str, end: Callable[[], Any]) -> None:
        try:
            found[name] = end()
        except Exception as error:
            found[name] = error

    ends = [threading.Thread(target=note, args=pair) for pair in (("ours", ours), ("theirs", theirs))]
    for end in ends:
        end.start()
    for end in ends:
        end.join()
    return found["ours"], found["theirs"]


def _plain_group(store: dist.Store, rank: int, timeout: timedelta) -> Any:
    return dist.ProcessGroupGloo(PrefixStore("dppo", store), rank, 2, timeout)


def _worker(meeting: GroupRendezvous, store: dist.Store, secret: str) -> Any:
    """A server's end, as vLLM's workers make it."""
    return dppo_wire.ChainReceiver(store, 1, 2, meeting.joining, meeting.timeout, 1024, secret)


def test_members_find_each_other() -> None:
    """With the secret, and bytes arrive."""
    meeting, store = _meeting()
    ours, theirs = _both(lambda: ChainGroup(meeting), lambda: _worker(meeting, store, meeting.secret))
    sent = torch.arange(100, dtype=torch.uint8)
    _, received = _both(lambda: ours.send(sent), lambda: theirs.receive(100))
    assert torch.equal(received, sent)


def test_an_impostor_in_the_store_is_no_member() -> None:
    """Addresses that it has written in the place of a worker's, or of the trainer's, are used by nobody: without a tag,
    or with another group's. Which keys hold them is seen in a group of members."""
    meeting, store = _meeting()
    _both(lambda: ChainGroup(meeting), lambda: _worker(meeting, store, meeting.secret))
    seen = {key: store.get(key) for key in store.list_keys() if key.startswith(("/dppo/", "dppo/"))}
    for rank in (0, 1):
        theirs = {key: value for key, value in seen.items() if key.endswith(f"/{rank}")}
        assert theirs
        for forged in (lambda value: value, lambda value: value[:-32], lambda value: b"x"):
            meeting, store = _meeting()
            for key, value in theirs.items():
                store.set(key, forged(value))
            with pytest.raises(RuntimeError, match="a program that is not a member has written to the group's store"):
                ChainGroup(meeting) if rank else _worker(meeting, store, meeting.secret)


@pytest.mark.parametrize("mirrors", [True, False])
@pytest.mark.parametrize("rank", [0, 1])
def test_who_has_connected_must_know_the_secret(rank: int, mirrors: bool) -> None:
    """gloo takes whoever connects first with a member's number. Here that one has even found the addresses: it is sent
    a nonce and an answer to its own, and nothing else, whether it makes something up or says what it is told."""
    meeting, store = _meeting()
    got: list[bytes] = []

    def impostor() -> None:
        sealed = dppo_wire.Sealed(store if rank else meeting.store, meeting.secret)
        group = _plain_group(sealed, rank, meeting.joining)
        for _ in range(2):
            received = torch.empty(32, dtype=torch.uint8)
            group.recv([received], 1 - rank, 0).wait(meeting.joining)
            got.append(bytes(received.tolist()))
            group.send([received if mirrors else torch.zeros(32, dtype=torch.uint8)], 1 - rank, 0).wait(meeting.joining)
        more = group.recv([torch.empty(8, dtype=torch.uint8)], 1 - rank, 0)
        with pytest.raises(RuntimeError):
            more.wait(timedelta(seconds=2))

    own = (lambda: ChainGroup(meeting)) if rank else (lambda: _worker(meeting, store, meeting.secret))
    ours, theirs = _both(own, impostor)
    assert isinstance(ours, RuntimeError) and f"connected as member {rank} of the group does not know" in str(ours)
    assert theirs is None and len(got) == 2


# ------------------------------------------------------------------------------------------------------------ settings


def _spelled(option: str, rng: np.random.Generator) -> list[str]:
    """One of the ways in which vLLM's or SGLang's parser reads `option` with a value."""
    if option.startswith("--"):
        name = option.replace("-", "_") if rng.random() < 0.3 else option
        option = "--" + name[2:]
    value = secrets.token_urlsafe(12)
    if not option.startswith("--") and rng.random() < 0.5:
        return [f"{option}{value}"]
    return [[option, value], [f"{option}={value}"], [f"{option}.part", value], [f"{option}.part={value}"]][
        rng.integers(4)
    ]


def test_no_argument_changes_address_model_or_key(cases: Choose) -> None:
    """However it is spelled and wherever it stands; its value is in no message. What is left to the user passes."""
    harmless = ["--gpu-memory-utilization=0.5", "--tensor-parallel-size", "2", "--max-logprobs=9", "--seed", "7"]
    harmless += ["--reasoning-parser", "qwen3", "--tokenizer", "t", "--load-format", "dummy", "--enforce-eager"]
    check_rollout(_with_arguments(harmless))
    options = [*KEY_OPTIONS, "--trust-remote-code", *OWN_OPTIONS]
    for case in cases("arguments", 300):
        rng = np.random.default_rng(case)
        given = _spelled(options[rng.integers(len(options))], rng)
        place = int(rng.choice([0, 1, 3, 4, len(harmless)]))
        with pytest.raises(UserError, match=r"rollout\.servers\.args (has --?|holds a key)") as refused:
            check_rollout(_with_arguments([*harmless[:place], *given, *harmless[place:]]))
        assert not any(part and part in str(refused.value) for part in [given[0].partition("=")[2], *given[1:]])


def test_no_connector_may_keep_prefixes_of_former_weights() -> None:
    """/pause and /reset_prefix_cache reach only connectors with a `reset_cache`: LMCache's, for one, has none."""
    connector = '{"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}'
    with pytest.raises(UserError, match="has --kv-transfer-config"):
        check_rollout(_with_arguments(["--kv-transfer-config", connector]))


def _with_arguments(arguments: list[str]) -> Any:
    return rollout_config({"engine": "vllm", "servers.launch": "local", "servers.args": arguments})


_PARSED = """
import contextlib, io, json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
print(json.dumps([one for action in parser._actions for one in action.option_strings]), flush=True)
names, plain, asked = json.loads(sys.stdin.readline())
right, found = vars(parser.parse_args(plain)), []
assert set(names) <= set(right), set(names) - set(right)
for arguments in asked:
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            given = vars(parser.parse_args([*plain, *arguments]))
        found.append([name for name in names if given[name] != right[name]])
    except (SystemExit, Exception):
        found.append([])  # such a server does not start
print(json.dumps(found))
"""


@needs("vllm")
@pytest.mark.long
@pytest.mark.slow
def test_vllm_reads_what_passes_as_harmless(cases: Choose) -> None:
    """vLLM's own parser, on every option that it has and shortened as it allows: whatever is not refused leaves what
    the trainer has chosen as it was."""
    plain = vllm_command(_with_arguments([]), "python", "model", 64, "float32", cpu=True)[3:]
    plain[plain.index("{port}")] = "8000"
    names = ["host", "port", "uds", "root_path", "grpc_port", "api_key", "ssl_keyfile", "ssl_certfile"]
    names += ["middleware", "model", "served_model_name", "worker_extension_cls", "worker_cls", "trust_remote_code"]
    names += ["weight_transfer_config", "hf_token", "headless", "nnodes", "node_rank", "master_addr", "scheduler_cls"]
    names += ["data_parallel_address", "master_port", "grpc"]
    vllm = subprocess.Popen([PYTHON["vllm"], "-c", _PARSED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert vllm.stdout is not None
    options = json.loads(next(line for line in vllm.stdout if line.startswith("[")))
    asked, refused = list[list[str]](), 0
    for case in cases("vllm arguments", 200):
        rng = np.random.default_rng(case)
        option = options[rng.integers(len(options))]
        short = option[: rng.integers(3, len(option) + 1)] if option.startswith("--") else option
        value = str(rng.choice(["1", "x", '{"backend": "x"}', "0.5", "auto", "my.Class"]))
        spelled = short.replace("-", "_") if rng.random() < 0.2 else short
        spelled = "--" + spelled[2:] if option.startswith("--") else spelled
        arguments = [[spelled, value], [f"{spelled}={value}"], [spelled], [f"{spelled}.part={value}"]][rng.integers(4)]
        try:
            check_rollout(_with_arguments(arguments))
            asked.append(arguments)
        except UserError:
            refused += 1
    said, _ = vllm.communicate(json.dumps([names, plain, asked]))
    assert vllm.returncode == 0
    changed = json.loads(said.splitlines()[-1])
    assert not [pair for pair in zip(asked, changed, strict=True) if pair[1]]
    assert refused < len(asked), "most of vLLM's options are the user's"


def test_a_key_in_place_of_its_variables_name(cases: Choose, monkeypatch: pytest.MonkeyPatch) -> None:
    """In any of the forms that keys come in, also where it could be a variable's name: refused without being shown."""
    for case in cases("keys", 300):
        rng = np.random.default_rng(case)
        raw = rng.bytes(20)
        forms = [
            raw.hex(),
            raw.hex().upper(),
            base64.b32encode(raw).decode(),
            base64.urlsafe_b64encode(raw).decode().strip("="),
            f"sk_live_{raw.hex()}",
            f"hf_{base64.b32encode(raw).decode()}",
            str(uuid.UUID(bytes=raw[:16])),
        ]
        key = forms[rng.integers(len(forms))]
        with pytest.raises(UserError, match="api_key_env is not the name") as refused:
            check_rollout(rollout_config({"engine": "vllm", "servers.launch": "local", "servers.api_key_env": key}))
        assert key not in str(refused.value)
    for name in ("DPPO_ENGINE_API_KEY", "VLLM_API_KEY", "TEAM_KEY_2", "KEY", "OPENAI_API_KEY_V2", "_KEY"):
        check_rollout(rollout_config({"engine": "vllm", "servers.launch": "local", "servers.api_key_env": name}))
    monkeypatch.setenv("my_k3y", KEY)
    check_rollout(rollout_config({"engine": "vllm", "servers.launch": "local", "servers.api_key_env": "my_k3y"}))
