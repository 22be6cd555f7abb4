"""Servers of other machines: their addresses in files, `dppo-megatron serve`, and a fleet whose members come and go."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from support.engines import fake_vllm
from support.engines.fake_vllm import FakeVLLM, fake_python
from support.fake_fleet import fleet_of
from support.job import REPOSITORY, job_config, settings, write_job_files
from support.launch import run_ranks
from support.logged import logged_lines
from support.processes import processes_of, until
from support.served import rank_zero

from dppo_megatron.config.schema import Config
from dppo_megatron.job import prepare_job
from dppo_megatron.rollout import launched_servers
from dppo_megatron.rollout.engine import Request, Sampling
from dppo_megatron.rollout.server_engine import ServerEngine
from dppo_megatron.rollout.servers import directory
from dppo_megatron.rollout.servers.connect import ConnectedServers, Membership, connect
from dppo_megatron.rollout.servers.device_map import CPU, RankDevice
from dppo_megatron.rollout.servers.directory import Directory, Registration, RegistryEntry
from dppo_megatron.rollout.servers.server_process import LaunchedServer
from dppo_megatron.steps import loop
from dppo_megatron.types import Prompt, UserError

SAMPLING = Sampling(12, 1.0, 0)


class Fakes:
    """Servers of this process by name, with addresses of their own."""

    def __init__(self, running: contextlib.ExitStack) -> None:
        self.servers: dict[str, FakeVLLM] = {}
        self._running = running

    def start(self, name: str, key: str = "key") -> str:
        """Its address."""
        self.servers[name] = self._running.enter_context(FakeVLLM("127.0.0.1", 0, key))
        return self.servers[name].url


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fakes]:
    monkeypatch.setattr(directory, "_STALE_S", 1e9)  # nobody beats for them, however slow this machine is
    with contextlib.ExitStack() as running:
        yield Fakes(running)


# --------------------------------------------------------------------------------------------------------- the files


def test_an_address_is_read_by_its_owner_only(tmp_path: Path) -> None:
    """Mode 0600 whatever the umask, whole or absent, and its key in no repr. For other tools that start servers it is
    JSON with the three keys that docs/cluster.md names."""
    before = os.umask(0)
    try:
        registration = Registration(tmp_path, "a", entry := RegistryEntry("http://n1:8000", "secret", "vllm"))
    finally:
        os.umask(before)
    [file] = tmp_path.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600 and "secret" not in repr(entry)
    assert json.loads(file.read_text()) == {"url": "http://n1:8000", "api_key": "secret", "engine": "vllm"}
    assert Directory(tmp_path).entries() == {"http://n1:8000": entry}
    registration.remove()
    assert not list(tmp_path.iterdir()) and Directory(tmp_path).entries() == {}


def test_a_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    Registration(tmp_path, "a", RegistryEntry("http://n1:8000", "secret", "vllm"))
    (tmp_path / "a.json").chmod(0o640)
    with pytest.raises(UserError, match=r"a\.json must belong to you and be readable by you only") as refused:
        Directory(tmp_path).entries()
    assert "secret" not in str(refused.value)


def test_a_file_server_that_gives_files_to_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours there are that user's too; one that is his alone is not read, nor where none of ours can be made."""
    Registration(tmp_path, "a", entry := RegistryEntry("http://n1:8000", "k", "vllm"))
    theirs, squashed, seen = os.geteuid() + 1, [True], os.fstat

    def fstat(descriptor: int) -> Any:
        status = seen(descriptor)
        is_theirs = squashed[0] or status.st_ino == (tmp_path / "a.json").stat().st_ino
        fields = {name: getattr(status, name) for name in dir(status) if name.startswith("st_")}
        return SimpleNamespace(**fields | ({"st_uid": theirs} if is_theirs else {}))

    monkeypatch.setattr(os, "fstat", fstat)
    assert list(Directory(tmp_path).entries().values()) == [entry] and len(list(tmp_path.iterdir())) == 1
    (tmp_path / "a.json").chmod(0o640)
    with pytest.raises(UserError, match="readable by you only"):
        Directory(tmp_path).entries()
    (tmp_path / "a.json").chmod(0o600)
    squashed[0] = False
    with pytest.raises(UserError, match="must belong to you"):
        Directory(tmp_path).entries()
    monkeypatch.setattr(tempfile, "NamedTemporaryFile", Mock(side_effect=PermissionError))
    with pytest.raises(UserError, match="must belong to you"):
        Directory(tmp_path).entries()


def test_a_heartbeat_that_stops_is_the_end(tmp_path: Path) -> None:
    """Judged by the reader's own clock: one that has not changed for a minute is gone, until it beats again."""
    now = [1000.0]
    directory = Directory(tmp_path, lambda: now[0])
    registration = Registration(tmp_path, "a", RegistryEntry("http://n1:8000", "k", "vllm"))
    os.utime(tmp_path / "a.json", ns=(5, 5))  # the writer's clock says 1970
    assert len(directory.entries()) == 1
    now[0] += 59
    assert len(directory.entries()) == 1
    now[0] += 2
    assert not directory.entries()
    registration.beat()
    assert len(directory.entries()) == 1


@pytest.mark.parametrize("content", ["", "{", "[]", "5", '{"url": "http://n1:1"}', "[" * 9999, "\x00\xff"])
def test_files_of_something_else_are_passed_over(tmp_path: Path, content: str) -> None:
    Registration(tmp_path, "a", entry := RegistryEntry("http://n1:8000", "k", "vllm"))
    other = tmp_path / "b.json"
    other.write_text(content, encoding="utf-8")
    other.chmod(0o600)
    (tmp_path / "notes.txt").write_text("not an address")
    assert list(Directory(tmp_path).entries().values()) == [entry]


def test_of_two_files_with_one_address_the_later_is_true(tmp_path: Path) -> None:
    for name, key, stamp in (("b", "old", 10), ("a", "new", 20)):
        Registration(tmp_path, name, RegistryEntry("http://n1:8000", key, "vllm"))
        os.utime(tmp_path / f"{name}.json", ns=(stamp, stamp))
    assert [entry.api_key for entry in Directory(tmp_path).entries().values()] == ["new"]


# --------------------------------------------------------------------------------------- a fleet that comes and goes


def _config(files: Path, run_dir: Path, addresses: Path, **extra: Any) -> Config:
    return job_config(
        files,
        run_dir,
        rollout__engine="vllm",
        rollout__completions_per_prompt=3,
        rollout__servers__registry_dir=addresses,
        rollout__sync__verify_every=0,
        rollout__sync__channel="disk",  # the fakes join no broadcast group
        rollout__limits__start_timeout_s=extra.pop("start_timeout_s", 240),
        rollout__limits__engine_wait_s=30,
        **extra,
    )


class Trainer:
    """The engine of a run of one rank, which syncs and generates."""

    def __init__(self, config: Config) -> None:
        self.said = logged_lines()
        job = prepare_job(config, 1)
        self.engine = ServerEngine(config, job.architecture, job.tokenizer)
        self.step = 0

    def __call__(self) -> dict[str, str]:
        """A weight sync and a rollout; the state of every server after it."""
        self.step += 1
        self.engine.load_weights(lambda: iter([("lm_head.weight", torch.zeros(2, 2))]))
        asked = [Request(Prompt(i, "", (2, 3), "", ""), c, self.step) for i in range(8) for c in range(3)]
        assert len(self.engine.generate(asked, SAMPLING)) == 24
        return self.engine.health()


def test_servers_come_and_go(files: Path, tmp_path: Path, fakes: Fakes) -> None:
    """One is there at start. A second comes and is live after the next sync; the first leaves, and comes back; one of
    another engine is said once and not used; nobody asks one that has left, nor keeps sockets for it."""
    addresses = tmp_path / "addresses"
    addresses.mkdir()
    a, b, c = (fakes.start(name) for name in "abc")
    first = Registration(addresses, "a", RegistryEntry(a, "key", "vllm"))
    trainer = Trainer(_config(files, tmp_path / "run", addresses))
    try:
        assert trainer() == {a: "live"}
        Registration(addresses, "b", RegistryEntry(b, "key", "vllm"))
        Registration(addresses, "c", RegistryEntry(c, "key", "sglang"))
        assert trainer() == {a: "live", b: "live"}
        clients = rank_zero(trainer.engine).clients
        half = clients.room(b)
        assert fakes.servers["b"].asked > 0 and fakes.servers["c"].asked == 0
        assert fakes.servers["b"].version.endswith(".2"), "the newest weights"
        first.remove()
        assert trainer() == {a: "out: it has left", b: "live"} and clients.room(b) // 2 == half
        asked = fakes.servers["a"].asked
        assert trainer()[b] == "live" and fakes.servers["a"].asked == asked
        Registration(addresses, "a", RegistryEntry(a, "key", "vllm"))
        assert set(trainer().values()) == {"live"} and fakes.servers["a"].asked > asked and clients.room(b) == half
        said = "\n".join(trainer.said)
        assert said.count("rollout: new server") == 1 and said.count("it has left") == 1
        assert said.count("is a server of engine sglang; rollout.engine = vllm") == 1
    finally:
        trainer.engine.close()


def test_a_server_that_comes_with_another_key_takes_the_place(files: Path, tmp_path: Path, fakes: Fakes) -> None:
    """Another process at the address that a member had: asked with its key, by rank 0 and by the client."""
    addresses = tmp_path / "addresses"
    addresses.mkdir()
    url = fakes.start("old", "old-key")
    before = Registration(addresses, "before", RegistryEntry(url, "old-key", "vllm"))
    trainer = Trainer(_config(files, tmp_path / "run", addresses))
    try:
        assert trainer() == {url: "live"}
        before.remove()
        fakes.servers["old"].key = "new-key"
        Registration(addresses, "after", RegistryEntry(url, "new-key", "vllm"))
        asked = fakes.servers["old"].asked
        assert trainer() == {url: "live"} and fakes.servers["old"].asked == asked + 8
        assert "-key" not in "\n".join(trainer.said)
    finally:
        trainer.engine.close()


def test_a_newcomer_can_do_no_harm(files: Path, tmp_path: Path, fakes: Fakes) -> None:
    """Addresses that are none, answers that are not this engine's: each said once, and the run goes on. One that has
    trouble of its own is asked again; one whose file ends its address with a slash is the same one each time."""
    config = _config(files, tmp_path / "run", tmp_path)
    said, fleet = logged_lines(), fleet_of([], config.rollout)
    known = ConnectedServers([], "disk", "", {}, Directory(tmp_path).entries)
    architecture = cast(Any, SimpleNamespace(name="any", vocab_size=19))
    introduced: list[str] = []
    membership = Membership(known, config, architecture, lambda server: introduced.append(server.http.url))
    a, b = fakes.start("a"), fakes.start("b")
    fakes.servers["a"].trouble = 503
    fakes.servers["b"].instead = {"/collective_rpc": {"results": 7}}
    for name, url in (("a", f"{a}/"), ("b", b), ("c", "127.0.0.1:8000"), ("d", "http://[::1")):
        Registration(tmp_path, name, RegistryEntry(url, "key", "vllm"))
    for _ in range(2):
        membership.update(fleet)
    assert not fleet.members and len(said) == 4 and all("not used yet" in line for line in said)
    assert sum("is no address" in line for line in said) == 2 and f"{b} answers, but is no vLLM server" in str(said)
    fakes.servers["a"].trouble = 0
    for _ in range(3):
        membership.update(fleet)
    assert [member.name for member in fleet.members] == introduced == [a] and "has left" not in str(said)
    assert fleet.members[0].server.world_size == 1
    fleet.close()


def test_servers_are_asked_about_themselves_at_the_same_time(
    files: Path, tmp_path: Path, fakes: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the start and when they come: none has its first answer before all have been asked."""
    together, about = threading.Barrier(3), fake_vllm._Handler._about

    def answer(handler: Any, path: str, body: Any) -> Any:
        if path == "/server_info":
            together.wait(20)
        return about(handler, path, body)

    monkeypatch.setattr(fake_vllm._Handler, "_about", answer)
    urls = [fakes.start(name) for name in "abc"]
    for name, url in zip("abc", urls, strict=True):
        Registration(tmp_path, name, RegistryEntry(url, "key", "vllm"))
    config = _config(files, tmp_path / "run", tmp_path, rollout__servers__min_servers=3)
    architecture = prepare_job(config, 1).architecture
    known = connect(config, architecture, [RankDevice(0, frozenset((CPU,)))])
    assert sorted(server.http.url for server in known.servers) == sorted(urls)
    fleet = fleet_of([], config.rollout)
    Membership(known, config, architecture, lambda _: None).update(fleet)
    assert sorted(member.name for member in fleet.members) == sorted(urls)
    fleet.close()


def test_an_engine_whose_client_has_ended_is_closed(files: Path, tmp_path: Path, fakes: Fakes) -> None:
    """A rollout had begun, and has answers that can be cancelled no more: the rest is ended all the same."""
    addresses = tmp_path / "addresses"
    addresses.mkdir()
    Registration(addresses, "a", RegistryEntry(fakes.start("a"), "key", "vllm"))
    trainer = Trainer(_config(files, tmp_path / "run", addresses))
    trainer()
    engine = trainer.engine
    engine.start([Request(Prompt(0, "", (2, 3), "", ""), c, 2) for c in range(3)], SAMPLING)
    assert engine._client is not None
    rank_zero(engine).background.join()
    assert engine._started[0].landed
    engine._client.process.kill()
    engine._client.process.wait()
    snapshot, sockets = next((tmp_path / "run" / "sync").iterdir()), engine._client._directory
    assert snapshot.is_dir() and sockets.is_dir()
    engine.close()
    assert not snapshot.exists() and not sockets.exists()


def _without_actor(config: Config) -> tuple[bool, bool]:
    """Whether the client of an engine whose actor cannot be built is running then, and its directory is there."""
    made: list[Any] = []
    make_engine = loop.make_engine

    def remember(*given: Any) -> Any:
        made.append(make_engine(*given))
        return made[0]

    def cannot(*given: Any, **more: Any) -> None:
        raise UserError("a tensor of the checkpoint cannot be read")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "make_engine", remember)
        patch.setattr(loop, "Actor", cannot)
        with pytest.raises(UserError, match="cannot be read"):
            loop.Loop(prepare_job(config, 1))
    client = made[0]._client
    return client.process.poll() is None, client._directory.exists()


def test_a_model_that_cannot_be_built_leaves_no_engine(files: Path, tmp_path: Path, fakes: Fakes) -> None:
    """Servers and clients are there first: they end with the mistake."""
    addresses = tmp_path / "addresses"
    addresses.mkdir()
    Registration(addresses, "a", RegistryEntry(fakes.start("a"), "key", "vllm"))
    config = _config(files, tmp_path / "run", addresses)
    assert run_ranks(_without_actor, 1, config) == [(False, False)]


@pytest.mark.parametrize("kind", ["link", "directory"])
def test_what_cannot_be_read_is_said(tmp_path: Path, kind: str) -> None:
    """In the directory of addresses: no traceback, and its name."""
    if kind == "link":
        (tmp_path / "x.json").symlink_to("/nowhere/at/all")
    else:
        (tmp_path / "x.json").mkdir(mode=0o700)
    with pytest.raises(UserError, match=r"registry_dir: .*x\.json cannot be read: "):
        Directory(tmp_path).entries()


def test_servers_that_do_not_come_are_said(files: Path, tmp_path: Path, fakes: Fakes) -> None:
    """How many of how many, who does not answer, and what would start them."""
    addresses = tmp_path / "addresses"
    addresses.mkdir()
    Registration(addresses, "a", RegistryEntry(fakes.start("a"), "key", "vllm"))
    Registration(addresses, "b", RegistryEntry("http://127.0.0.1:9", "key", "vllm"))
    config = _config(files, tmp_path / "run", addresses, start_timeout_s=0.5, rollout__servers__min_servers=2)
    with pytest.raises(UserError, match=r"only 1 of 2 rollout servers .*127\.0\.0\.1:9.*dppo-megatron serve"):
        Trainer(config)


# ----------------------------------------------------------------------------------------------------- the command


def _serve(files: Path, run_dir: Path, addresses: Path, **extra: Any) -> subprocess.Popen[str]:
    values = {
        "rollout__engine": "vllm",
        "rollout__servers__registry_dir": addresses,
        "rollout__servers__python": fake_python(files),
    }
    overrides = settings(files, run_dir, **values | extra)
    command = [sys.executable, "-m", "dppo_megatron", "serve", str(REPOSITORY / "configs" / "quickstart.yaml")]
    return subprocess.Popen([*command, *overrides], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.slow
def test_serve_keeps_servers_for_a_trainer(tmp_path: Path) -> None:
    """Ready, they are announced; a trainer finds and uses them. One that is killed is started again and synced; SIGUSR1
    does nothing; SIGTERM takes the addresses away and ends all."""
    files = write_job_files(tmp_path / "task")
    addresses, servers = tmp_path / "addresses", ("fake_vllm.py", str(files))
    serving = _serve(files, tmp_path / "run", addresses, rollout__servers__count=2)
    try:
        trainer = Trainer(_config(files, tmp_path / "run", addresses, rollout__servers__min_servers=2))
        try:
            assert list(trainer().values()) == ["live", "live"]
            announced = list(addresses.glob("*.json"))
            assert announced and all(file.stat().st_mode & 0o777 == 0o600 for file in announced)
            assert serving.stdout is not None and any("is ready" in line for line in serving.stdout), (
                "said while it runs"
            )
            serving.send_signal(signal.SIGUSR1)
            killed = processes_of(*servers)[0]
            os.kill(killed, signal.SIGKILL)
            until(lambda: len(set(processes_of(*servers)) - {killed}) == 2, "it was not started again")
            until(lambda: len(list(addresses.glob("*.json"))) == 2, "it was not announced again")
            until(lambda: list(trainer().values()) == ["live", "live"], said=lambda: str(trainer.said))
        finally:
            trainer.engine.close()
        serving.send_signal(signal.SIGTERM)
        said, _ = serving.communicate(timeout=60)
        assert serving.returncode == 0 and "starting it again" in said and said.endswith("serve: ended\n")
        assert not list(addresses.glob("*.json")) and not processes_of(*servers)
    finally:
        serving.kill()


def _starts_of_a_silent_server(config: Config, addresses: Path, *silent_s: float) -> list[int]:
    """How often it was started again, after so many seconds more without an answer each time."""
    now, starts, answers = [0.0], [0], [True]

    class Running(LaunchedServer):
        def start(self) -> None:
            starts[0] += 1

    def ask() -> None:
        if not answers[0]:
            raise TimeoutError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launched_servers, "time", SimpleNamespace(monotonic=lambda: now[0]))
        served = launched_servers.Served(Running([], {}, addresses / "log"), config, addresses, "name")
        patch.setattr(served, "_probe", ask)
        served.check()
        answers[0], found = False, []
        for more_s in (0.0, *silent_s):
            now[0] += more_s
            served.check()
            found.append(starts[0])
    return found[1:]


def test_sglang_may_be_silent_for_a_weight_sync(files: Path, tmp_path: Path) -> None:
    """It does not answer while it loads from disk, and trainers wait for that; vLLM does, and has hung."""
    config = _config(files, tmp_path / "run", tmp_path, rollout__limits__sync_timeout_s=300)
    assert _starts_of_a_silent_server(config, tmp_path, 59, 31) == [0, 1]
    config.rollout.engine = "sglang"
    assert _starts_of_a_silent_server(config, tmp_path, 59, 31, 209, 2) == [0, 0, 0, 1]
    config.rollout.limits.sync_timeout_s = 5
    assert _starts_of_a_silent_server(config, tmp_path, 59, 2) == [0, 1]


def test_serve_needs_no_data_and_no_trackers(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are the trainer's: an inference node has neither its files nor its credentials."""
    from dppo_megatron.workbench.cli import main

    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    serves = Mock()
    monkeypatch.setattr("dppo_megatron.rollout.launched_servers.serve", serves)
    of_trainer = {"observe__trackers": "[wandb]", "data__train_path": tmp_path / "nowhere.jsonl"}
    where = {"rollout__engine": "vllm", "rollout__servers__registry_dir": tmp_path / "addresses"}
    given = settings(files, tmp_path / "run", **where, **of_trainer)
    assert main(["serve", str(REPOSITORY / "configs" / "quickstart.yaml"), *given]) == 0
    serves.assert_called_once()


def test_serve_says_what_it_needs(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory; an address of this machine by which others reach it; leave to listen on a network."""
    from dppo_megatron.rollout.launched_servers import serve
    from dppo_megatron.workbench.cli import main

    config = str(REPOSITORY / "configs" / "quickstart.yaml")
    local = settings(files, tmp_path, rollout__engine="vllm", rollout__servers__launch="local")
    assert main(["serve", config, *local]) == 2
    checked = _config(files, tmp_path / "run", tmp_path / "addresses")
    with pytest.raises(UserError, match=r"listen on their network \(192\.0\.2\.1\).*allow_remote_endpoints"):
        serve(checked, "192.0.2.1")
    with pytest.raises(UserError, match=r"--host no\.\.host: no such host"):
        serve(checked, "no..host")  # no name server is asked
    for name, address in (("node-a", "127.0.1.1"), ("node-a", "::1"), ("0.0.0.0", "0.0.0.0"), ("node-a", "::")):
        with monkeypatch.context() as patch:
            patch.setattr(socket, "getaddrinfo", lambda *_, address=address, **__: [(0, 0, 0, "", (address, 0))])
            with pytest.raises(UserError, match=rf"--host {name} is {address} on this machine: give an address"):
                serve(checked, name)
    checked.rollout.servers.allow_remote_endpoints = True
    with pytest.raises(UserError, match=r"cannot listen on 192\.0\.2\.1: "):
        serve(checked, "192.0.2.1")  # another machine's name
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "servers").write_text("in the way")
    with pytest.raises(UserError, match=r"run_dir: .*server_0\.log', a server's log, cannot be written"):
        serve(checked, "127.0.0.1")
