"""Damaged answers to what servers are asked beside completions: beside a good server no run ends, and each is named.

The table is tests/support/engines/control.py: every question and command of both engines and of routers, each with more
than 40 damaged answers. Each damage is a server of its own; all servers of a row are in one fleet with a good one.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import json
import os
import re
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from support.engines.control import NO_ANSWERS, ROWS, VLLM_SETTINGS, Row
from support.engines.stub import Asked, Behaviour, StubServers
from support.fake_fleet import Inline, fleet_of, synced
from support.job import job_config
from support.launch import run_ranks
from support.logged import logged_lines
from support.settings import rollout_config

from dppo_megatron.config.schema import Config
from dppo_megatron.rollout.servers import dialects, directory, sglang, vllm
from dppo_megatron.rollout.servers.connect import ConnectedServers, Membership, describe, make_server
from dppo_megatron.rollout.servers.directory import RegistryEntry, Router, named_workers
from dppo_megatron.rollout.servers.fleet import Fleet
from dppo_megatron.rollout.servers.http import Http, Refused, Unreachable
from dppo_megatron.rollout.sync import broadcast
from dppo_megatron.rollout.sync.broadcast import BroadcastChannel
from dppo_megatron.rollout.sync.channels import Channel, DiskChannel
from dppo_megatron.rollout.sync.colocated import SharedMemoryChannel
from dppo_megatron.rollout.sync.weight_sync import WeightSync
from dppo_megatron.types import UserError

VOCABULARY = 19
ARCHITECTURE = cast(Any, SimpleNamespace(name="Qwen3ForCausalLM", vocab_size=VOCABULARY))


class Group:
    """The trainer's end of a group whose other members take everything."""

    def __init__(self, *_: object) -> None: ...

    def send(self, memory: torch.Tensor) -> None: ...

    def abandon(self) -> None: ...


@pytest.fixture
def stubs(monkeypatch: pytest.MonkeyPatch) -> Iterator[StubServers]:
    """Servers; no thread of the trainer may end by an exception."""
    raised: list[str] = []
    monkeypatch.setattr(threading, "excepthook", lambda problem: raised.append(str(problem)))
    monkeypatch.setattr(broadcast, "own_group", Group)
    with StubServers() as servers:
        yield servers
    assert not raised


class Case:
    """The servers of one row: a damaged one each, by what is wrong with it, and a good one."""

    def __init__(self, row: Row, stubs: StubServers) -> None:
        self.row, self.stubs, self.said = row, stubs, logged_lines()
        damages = row.damages()
        self.must_be_found = {f"s{number}" for number, (_, _, found) in enumerate(damages) if found}
        self.wrong = {f"s{number}": (name, behave) for number, (name, behave, _) in enumerate(damages)}
        self.urls = {name: stubs.url(name) for name in [*self.wrong, "good"]}

    def add(self, more: dict[str, Behaviour]) -> None:
        for name, behave in more.items():
            place = f"s{len(self.wrong)}"
            self.wrong[place], self.urls[place] = (name, behave), self.stubs.url(place)
            self.must_be_found.add(place)

    def damage(self) -> None:
        for place, (_, behave) in self.wrong.items():
            self.stubs.pages[f"{place}/{self.row.path}"] = behave

    def all_named(self, out: Sequence[str]) -> None:
        """Those that are `out` are the damaged ones, no more and no less; a line names each, and each was met."""
        names = {self.urls[place]: damage for place, (damage, _) in self.wrong.items()}
        found = {self.urls[place] for place in self.must_be_found}
        assert not [names.get(url, url) for url in found ^ set(out)], f"of {len(out)} out"
        for url in out:
            assert any(re.search(f"{re.escape(url)}\\b", line) for line in self.said), names[url]
        for line in self.said:
            assert len(line) < 2000 and "\n" not in line and any(url in line for url in self.urls.values()), line
        assert {f"{place}/{self.row.path}" for place in self.wrong} <= self.stubs.met


def _rows(*phases: str) -> Any:
    found = [row for row in ROWS if row.phase in phases]
    return pytest.mark.parametrize("row", found, ids=[row.name for row in found])


def _config(files: Path, engine: str, **values: Any) -> Config:
    endpoints = {"rollout__servers__endpoints": "[http://127.0.0.1:1]", "rollout__engine": engine}
    return job_config(files, files / "run", **(endpoints | values))


def _fleet(servers: Sequence[Any], config: Config, **more: Any) -> Fleet:
    return fleet_of(servers, config.rollout, threads=Inline(), **more)


def test_every_call_has_its_row() -> None:
    """Each path that the engines' and the router's files name, but those for completions."""
    named = set()
    for module in (vllm, sglang, directory):
        assert module.__file__ is not None
        for node in ast.walk(ast.parse(Path(module.__file__).read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                named |= {found[1] for found in [re.fullmatch(r"/([a-z_0-9/]+)(\?.*)?", node.value)] if found}
            if isinstance(node, ast.Name) and node.id.endswith("_PATH"):
                named.add(getattr(dialects, node.id)[1:])
    assert named - {"generate", "inference/v1/generate"} == {row.path for row in ROWS}
    assert all(len(row.damages()) >= 40 for row in ROWS)


def test_good_answers_are_good(stubs: StubServers, files: Path) -> None:
    """Else the table would show nothing."""
    for row in ROWS:
        if row.phase == "described":
            _pages(stubs, "good", row)
            http_server = make_server(rollout_config({"engine": row.engine}), stubs.url("good"), "", VOCABULARY)
            assert describe(http_server, "KEY").world_size == 1


def _pages(stubs: StubServers, name: str, row: Row) -> None:
    """What a good server of the row's kind tells of itself: with our files, or without our middleware."""
    about = {one.path: one.good for one in ROWS if one.engine == row.engine and one.phase == "described"}
    if row.path == "collective_rpc":
        about["inference/v1/generate_arrays"] = {}
    for path, answer in about.items():
        stubs.pages[f"{name}/{path}"] = json.dumps(answer)


@_rows("described")
def test_when_a_server_is_new_or_back(row: Row, stubs: StubServers, files: Path) -> None:
    """At the start: refused, by its address. Later: not used, which is said once, and the good one is."""
    case = Case(row, stubs)
    config = _config(files, row.engine)
    for name in case.urls:
        _pages(stubs, name, row)
    case.damage()
    wrong = []
    for url in case.urls.values():
        try:
            describe(make_server(rollout_config({"engine": row.engine}), url, "", VOCABULARY), "KEY")
        except UserError as error:
            assert url in str(error) and len(str(error)) < 2000
            wrong.append(url)
    fleet = _fleet([], config)
    entries = {url: RegistryEntry(url, "", row.engine) for url in case.urls.values()}
    known = ConnectedServers([], "disk", "", {}, lambda: entries)
    membership = Membership(known, config, ARCHITECTURE, lambda _: None)
    membership.update(fleet)
    members = {member.name for member in fleet.members}
    assert case.urls["good"] in members and len(fleet.members) == len(members)
    not_used = [url for url in case.urls.values() if url not in members]
    assert set(not_used) == set(wrong)
    case.said[:] = [line for line in case.said if "rollout: new server" not in line]
    case.all_named(not_used)

    servers = [make_server(rollout_config({"engine": row.engine}), url, "", VOCABULARY) for url in case.urls.values()]
    case.said.clear()
    fleet.close()
    fleet = _fleet(servers, config, inspect=membership.inspect)
    for member in fleet.members:
        fleet.mark_out(member, "a test")
    fleet.revive()
    case.all_named([member.name for member in fleet.members if member.state == "out"])
    fleet.close()


@_rows("disk", "ipc", "gloo")
def test_in_a_weight_sync(row: Row, stubs: StubServers, files: Path, tmp_path: Path) -> None:
    """From sleep to proof, twice: only the damaged servers are out, and the good one has the weights. Checksums that
    cannot be read are no outage, and no proof."""
    case = Case(row, stubs)
    case.add(NO_ANSWERS)
    case.damage()
    colocated = row.phase == "disk"
    config = _config(files, row.engine, rollout__limits__sync_timeout_s=20)
    config.rollout.servers.colocate, config.rollout.sync.verify_every = colocated, 1
    servers: list[Any] = [
        make_server(rollout_config({"engine": row.engine}), url, "", VOCABULARY) for url in case.urls.values()
    ]
    for server in servers:
        setattr(server, {"vllm": "_extended", "sglang": "_hashes_bytes"}[row.engine], True)
    fleet = _fleet(servers, config)
    channel = _channel(row, fleet, tmp_path, config)
    sync = WeightSync(config.rollout, channel, fleet)
    for _ in range(1 + (row.phase == "gloo")):  # the second group is joined after the first is left
        if colocated:
            sync.sleep()
        sync.to(lambda: [("lm_head.weight", torch.zeros(2, 2))])
        channel.close()
    assert case.urls["good"] in {member.name for member in fleet.live}
    is_proof, lines = row.path in ("weight_checker", "weights_checker"), "\n".join(case.said)
    line = "no checksums of weight sync 1 from {}:" if is_proof else "rollout: {} is out: "
    out = [url for url in case.urls.values() if line.format(url) in lines]
    assert not is_proof or len(fleet.live) == len(servers)
    case.all_named(out)
    fleet.close()


def _channel(row: Row, fleet: Fleet, directory: Path, config: Config) -> Channel:
    urls = [member.name for member in fleet.members]
    if row.phase == "disk":
        return DiskChannel(fleet, directory, config.model.hf_path, 1 << 20, 20.0)
    if row.phase == "ipc":
        return SharedMemoryChannel(fleet, dict.fromkeys(urls, (0,)), lambda *_: "offer", 1 << 10, 20.0)
    return BroadcastChannel(fleet, "gloo", 1 << 10, 20.0)


@_rows("probed")
def test_in_a_health_probe(row: Row, stubs: StubServers, files: Path) -> None:
    case = Case(row, stubs)
    case.add(NO_ANSWERS)
    config = _config(files, row.engine)
    urls = case.urls.values()
    for name in case.urls:
        stubs.pages[f"{name}/{row.path}"] = json.dumps(row.good)
    servers = [make_server(rollout_config({"engine": row.engine}), url, "", VOCABULARY) for url in urls]
    fleet = _fleet(servers, config)
    synced(fleet)
    case.damage()
    fleet.probe_all()
    fleet.probe_all()
    case.all_named([asked.name for asked in fleet.members if asked.state == "out"])
    fleet.close()


@_rows("routed")
def test_of_a_router(row: Row, stubs: StubServers) -> None:
    """Its workers are known still, and an endpoint is no router where it says nothing of them."""
    case = Case(row, stubs)
    case.add(NO_ANSWERS)
    stubs.pages[f"good/{row.path}"] = json.dumps(row.good)
    case.damage()
    for place in case.must_be_found:
        router = Router(Http(case.urls[place]), ["http://127.0.0.1:9"])
        assert list(directory.current_entries([], [router], "", row.engine)) == ["http://127.0.0.1:9"]
        with contextlib.suppress(Unreachable, Refused):
            assert not named_workers(router.http, 30.0)
    assert named_workers(Http(case.urls["good"]), 5) == ["http://127.0.0.1:8000"]


def test_settings_are_vllms_own() -> None:
    """No section of a server's settings has one of our fields for something else (`answers.Section`)."""
    assert set(VLLM_SETTINGS) == set(vllm.VLLMConfig.__struct_fields__)


# ------------------------------------------------------------------------------------------------ the blocking calls


def _from(seen: list[int]) -> Behaviour:
    """Notes the port that each request comes from."""

    async def behave(asked: Asked) -> None:
        seen.append(asked.writer.get_extra_info("peername")[1])
        await asked.reply("{}")

    return behave


def test_a_forked_child_asks_over_connections_of_its_own(stubs: StubServers) -> None:
    """It has none of its parent's threads, and two processes at one connection would read each other's answers."""
    seen: list[int] = []
    stubs.pages["a/version"] = _from(seen)
    http = Http(stubs.url("a"))

    def ask(times: int) -> int:
        return sum(http.get("/version", dict, timeout_s=20) == {} for _ in range(times))

    assert ask(2) == 2 and run_ranks(ask, 2, 2) == [2, 2] and ask(1) == 1
    before, childrens, after = set(seen[:2]), set(seen[2:6]), set(seen[6:])
    assert len(seen) == 7 and len(before) == 1 and len(childrens) == 2 and not childrens & (before | after)


@pytest.mark.parametrize("how", ["closed", "reset"])
def test_a_connection_that_was_kept_and_breaks_is_no_failure(stubs: StubServers, how: str) -> None:
    """Each is broken at its second request; a new one that breaks is a failure. A server that closes an idle connection
    while a request is on its way to it resets it."""
    seen: list[int] = []

    async def behave(asked: Asked) -> None:
        if seen.count(port := asked.writer.get_extra_info("peername")[1]):
            if how == "reset":
                lingers = struct.pack("ii", 1, 0)  # for no time: closing throws away what is on its way
                asked.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, lingers)
            raise ConnectionError
        seen.append(port)
        await asked.reply("{}")

    stubs.pages["a/pause"] = behave
    stubs.pages["b/pause"] = NO_ANSWERS["closes at once"]
    http = Http(stubs.url("a"))
    for _ in range(3):
        http.do("/pause", timeout_s=20)
    assert len(set(seen)) == 3
    with pytest.raises(Unreachable, match="/b/pause: ServerDisconnectedError"):
        Http(stubs.url("b")).do("/pause", timeout_s=20)


def _timer(port: int) -> tuple[str, float]:
    """The kernel's timer of the connection from that port of this machine: its kind, and the seconds that are left."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    [timer] = [row[5] for row in rows if row[1].endswith(f":{port:04X}") and row[3] == "01"]
    kind, ticks = timer.split(":")
    return kind, int(ticks, 16) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("proves", [False, None])
def test_a_firewall_does_not_forget_a_call_that_waits_for_long(stubs: StubServers, proves: bool | None) -> None:
    """Also one that is opened again because the first one has proven nothing."""
    seen: list[tuple[str, float]] = []

    async def behave(asked: Asked) -> None:
        port = asked.writer.get_extra_info("peername")[1]
        while (timer := _timer(port))[0] == "01":  # the request itself has not been acknowledged yet
            await asyncio.sleep(0.01)
        seen.append(timer)
        await asked.reply("{}")

    stubs.pages["a/version"] = behave
    Http(stubs.url("a"), "key", proves=proves).get("/version", dict, timeout_s=20)
    [(kind, left_s)] = seen
    assert kind == "02" and left_s <= 300  # of keep-alive


def test_bytes_that_trickle_do_not_extend_a_call(stubs: StubServers) -> None:
    async def trickle(asked: Asked) -> None:
        await asked.raw(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
        while True:
            await asked.raw(b" ")
            await asyncio.sleep(0.01)

    stubs.pages["a/version"] = trickle
    with pytest.raises(Unreachable, match=r"no complete answer after 0\.3 s"):
        Http(stubs.url("a")).get("/version", dict, timeout_s=0.3)


def test_closing_frees_who_waits(stubs: StubServers) -> None:
    """For a server that was found hung; the next call is made as ever."""
    arrived = threading.Semaphore(0)

    async def hang(asked: Asked) -> None:
        arrived.release()
        await asyncio.sleep(600)

    stubs.pages["a/version"] = hang
    http = Http(stubs.url("a"))
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(http.get, "/version", dict, timeout_s=600) for _ in range(3)]
        assert all(arrived.acquire(timeout=60) for _ in waiting), "a call that begins after it is another one"
        http.close()
        assert all(isinstance(one.exception(20), Unreachable) for one in waiting)
    assert http.get("/weight_info", dict, timeout_s=20)


def test_a_call_ends_when_nobody_listens_any_more() -> None:
    """vLLM's front end while it waits for an engine that has died: it ends when its connections do."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor() as pool:
        http = Http(f"http://127.0.0.1:{listener.getsockname()[1]}")
        call = pool.submit(http.do, "/sleep", timeout_s=600)
        kept, _ = listener.accept()
        with kept:
            listener.close()
            with pytest.raises(Unreachable, match="/sleep: no answer, and it no longer listens"):
                call.result(60)
            kept.settimeout(60)
            assert [*iter(lambda: kept.recv(1 << 16), b"")], "the request, and then its end"
