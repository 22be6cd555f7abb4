"""An endpoint may be a router: requests go through it; its workers are found, checked, synced and probed themselves.

With a relay that does to requests what the routers do, and with the routers themselves where they are installed:
DPPO_SGLANG_ROUTER_PYTHON, DPPO_VLLM_ROUTER_PYTHON name interpreters that have sglang-router, vllm-router.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch
from support.engines.rig import Rig, requests, right, run, sync
from support.engines.routers import real_router, relay
from support.engines.stub import Asked, StubServers, good
from support.job import job_config, write_job_files
from support.logged import logged_lines
from support.processes import until
from support.settings import rollout_config

from dppo_megatron.job import prepare_job
from dppo_megatron.rollout.engine import Request, Sampling
from dppo_megatron.rollout.server_engine import ServerEngine
from dppo_megatron.rollout.servers.connect import resolve_endpoints
from dppo_megatron.rollout.servers.dialects import AnyDialect, SGLangDialect, VLLMDialect
from dppo_megatron.rollout.servers.http import Http, Peer
from dppo_megatron.rollout.servers.router import RouterServer, current_entries, set_dialect
from dppo_megatron.rollout.servers.wire import Expected, Submit
from dppo_megatron.types import UserError

ENGINES = ("vllm", "sglang")
VOCABULARY = 19
DIALECT: dict[str, AnyDialect] = {"vllm": VLLMDialect(), "sglang": SGLangDialect(VOCABULARY, seeded=True)}


def _said(endpoints: list[str]) -> tuple[list[str], list[RouterServer], list[str]]:
    said = logged_lines()
    return *resolve_endpoints(rollout_config({"engine": "sglang", "servers.endpoints": endpoints}), ""), said


def test_a_router_names_its_workers() -> None:
    """In the form that both routers give; servers that are no routers stay as they are."""
    with StubServers({"a": good, "b": good}) as stubs:
        named = {"workers": [{"id": "x", "url": f"{stubs.url('a')}/", "is_healthy": True}], "total": 1}
        stubs.pages["router/workers"] = json.dumps(named)
        found, routers, said = _said([stubs.url("router"), stubs.url("b"), "http://127.0.0.1:1"])
        assert [router.http.url for router in routers] == [stubs.url("router")]
        assert routers[0].named == {stubs.url("a")} and found == [stubs.url("a"), stubs.url("b"), "http://127.0.0.1:1"]
        assert len(said) == 1 and stubs.url("router") in said[0] and "is a router of 1 servers" in said[0]


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


@contextlib.contextmanager
def _relayed(engine: str, stubs: StubServers) -> Iterator[tuple[Rig, RouterServer]]:
    """Workers a and b behind a relay."""
    stubs.behaviours["router"] = relay(stubs, "router", "ab", engine)
    router = RouterServer(Http(stubs.url("router")), named=frozenset((stubs.url("a"), stubs.url("b"))))
    assert set_dialect(router, [DIALECT[engine]] * 2)
    stubs.asked.clear()
    rig = Rig([(engine, stubs.url("a")), (engine, stubs.url("b"))], routers=[router])
    try:
        yield rig, router
    finally:
        rig.close()


@pytest.mark.parametrize("engine", ENGINES)
def test_generation_goes_through_a_router(engine: str) -> None:
    """Every completion once and right, none asked of a worker itself: one request a group (vLLM) or a completion."""
    with StubServers({"a": good, "b": good}) as stubs, _relayed(engine, stubs) as (rig, _):
        fleet = rig.fleet([0, 1], {})
        work = run(fleet, requests(5))
        assert work.retries == 0 and right(rig.take(), 5, 3)
        assert stubs.asked["router"] == stubs.asked["a"] + stubs.asked["b"] == {"vllm": 5, "sglang": 15}[engine]
        assert min(stubs.asked["a"], stubs.asked["b"]) > 0
        fleet.close()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_worker_without_the_present_weights(engine: str) -> None:
    """The others are asked themselves, and the router again after a sync of all. A router with wrong answers, here of a
    worker with older weights, is passed by too."""
    with StubServers({"a": good, "b": good}) as stubs, _relayed(engine, stubs) as (rig, _):
        fleet = rig.fleet([0, 1], {"probe_every_s": 0.01})
        fleet.mark_out(fleet.members[0], "a test")
        run(fleet, requests(4))
        assert right(rig.take(), 4, 3) and _asked(stubs) == {"b": 4}
        fleet.revive()
        sync(fleet)
        assert [asked.name for asked in fleet.targets_for(requests(1)[0])] == [stubs.url("router")]
        stubs.asked.clear()

        async def old(asked: Asked) -> None:
            await asked.reply(json.dumps({"choices": [], "request_id": "no", "meta_info": {"id": "no"}}))

        stubs.behaviours["router"] = old
        run(fleet, requests(4))
        assert right(rig.take(), 4, 3) and stubs.asked["a"] + stubs.asked["b"] == 4
        fleet.close()


@pytest.mark.parametrize("engine", ENGINES)
def test_requests_behind_a_router_are_ended_at_its_workers(engine: str) -> None:
    """sglang-router has no such path, vllm-router would tell one worker of its choice."""

    async def hang(asked: Asked) -> None:
        await asyncio.sleep(60)

    with StubServers({"a": hang, "b": hang}) as stubs, _relayed(engine, stubs) as (rig, _):
        [group] = requests(1)
        rig.clients.ask(Submit(1, 0, rig.known[2].peer.url, group, Expected(VOCABULARY, 1, 1), 60.0))
        until(lambda: stubs.asked.get("a", 0) + stubs.asked.get("b", 0) > 0)
        rig.clients.end([1])
        until(lambda: len(stubs.aborted.get("a", ())) == len(stubs.aborted.get("b", ())) == _calls(engine))
        assert stubs.aborted["a"] == stubs.aborted["b"]
        rig.clients.cancel([1])


def test_a_worker_that_hangs_keeps_no_other_from_ending_a_request() -> None:
    """All are told at once: the other one, while the first has still not answered."""

    async def hang(asked: Asked) -> None:
        await asyncio.sleep(60)

    with (
        StubServers({"b": hang}) as stubs,
        socket.create_server(("127.0.0.1", 0)) as silent,
        _relayed("vllm", stubs) as (rig, _),
    ):
        workers = (Peer(f"http://127.0.0.1:{silent.getsockname()[1]}"), Peer(stubs.url("b")))
        stubs.behaviours["router"] = relay(stubs, "router", "b", "vllm")
        rig.clients.add(msgspec.structs.replace(rig.known[2], workers=workers))
        rig.clients.ask(Submit(1, 0, rig.known[2].peer.url, requests(1)[0], Expected(VOCABULARY, 1, 1), 60.0))
        until(lambda: stubs.asked.get("b", 0) > 0)
        rig.clients.end([1])
        with silent.accept()[0] as peer:
            until(lambda: bool(stubs.aborted.get("b")))
            peer.setblocking(False)
            with pytest.raises(BlockingIOError):
                while peer.recv(1 << 16):
                    pass
        rig.clients.cancel([1])


def _asked(stubs: StubServers) -> dict[str, int]:
    return {name: count for name, count in stubs.asked.items() if count}


def _calls(engine: str) -> int:
    return {"vllm": 1, "sglang": 4}[engine]


def test_cuts_pass_sglangs_router_by() -> None:
    """It drops the field that asks for the log-probabilities of what a cut leaves. vLLM's does not."""
    cut = msgspec.structs.replace(requests(1)[0], top_p=0.5)
    for engine, passed in (("vllm", True), ("sglang", False)):
        with StubServers({"a": good, "b": good}) as stubs, _relayed(engine, stubs) as (rig, router):
            unread = msgspec.structs.replace(cut, reads_logprobs=False)
            assert router.dialect.carries(cut) == passed and router.dialect.carries(unread)
            fleet = rig.fleet([0, 1], {})
            names = {asked.name for asked in fleet.targets_for(cut)}
            assert names == ({stubs.url("router")} if passed else {stubs.url("a"), stubs.url("b")})
            fleet.close()


def test_a_router_of_another_engine_is_passed_by() -> None:
    """sglang-router in front of vLLM servers: 404."""
    with StubServers({"a": good}) as stubs:
        stubs.behaviours["router"] = relay(stubs, "router", "a", "sglang")
        assert not set_dialect(RouterServer(Http(stubs.url("router"))), [VLLMDialect()])


def test_workers_that_a_router_names_later() -> None:
    """Are the run's servers from the next sync on; a router that is silent for a while has those that it named last."""
    with StubServers({"a": good, "b": good}) as stubs:
        relay(stubs, "router", "a", "vllm")
        router = RouterServer(Http(stubs.url("router")), named=frozenset((stubs.url("a"),)))
        named = partial(current_entries, [stubs.url("c")], [router], "key", "vllm")
        assert set(named()) == {stubs.url("c"), stubs.url("a")}
        relay(stubs, "router", "ab", "vllm")
        assert set(named()) == {stubs.url("c"), stubs.url("a"), stubs.url("b")}
        del stubs.pages["router/workers"]
        assert set(named()) == {stubs.url("c"), stubs.url("a"), stubs.url("b")}
        assert named()[stubs.url("b")].api_key == "key"


def test_an_engine_over_a_router(tmp_path: Path) -> None:
    """From the setting to completions: both workers get the weights and the canary, requests go through the router."""
    with StubServers({"a": good, "b": good}) as stubs:
        stubs.behaviours["router"] = relay(stubs, "router", "ab", "vllm")
        files = write_job_files(tmp_path)
        config = job_config(
            files,
            tmp_path / "run",
            rollout__engine="vllm",
            rollout__servers__endpoints=f"[{stubs.url('router')}]",
            rollout__sync__verify_every=1000,
        )
        job = prepare_job(config, 1)
        engine = ServerEngine(config, job.architecture, job.tokenizer)
        try:
            engine.load_weights(lambda: iter([("lm_head.weight", torch.zeros(2, 2))]))
            stubs.asked.clear()
            requests = [Request(prompt, index, 1) for prompt in job.train_prompts[:6] for index in range(4)]
            completions = engine.generate(requests, Sampling(12, 1.0, 0))
            assert len(completions) == 24 and {span for c in completions for span, _ in c.weights_spans} == {1}
            assert stubs.asked["router"] == stubs.asked["a"] + stubs.asked["b"] == 6
            assert set(engine.health().values()) == {"live"} and len(engine.health()) == 3
            probed = {name for name, _ in engine.probe(requests[:1], Sampling(4, 1.0, 0))}
            assert probed == {stubs.url("a"), stubs.url("b")}
        finally:
            engine.close()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_real_router(engine: str, tmp_path: Path) -> None:
    """The same through the engine's own router: what it does to requests is what the relay does."""
    with (
        StubServers({"a": good, "b": good}) as stubs,
        real_router(engine, [stubs.url("a"), stubs.url("b")], tmp_path / "router.log") as url,
    ):
        found, [router], _ = _said([url])
        assert sorted(found) == sorted([stubs.url("a"), stubs.url("b")])
        assert set_dialect(router, [DIALECT[engine]] * 2)
        stubs.asked.clear()
        rig = Rig([(engine, stubs.url("a")), (engine, stubs.url("b"))], routers=[router])
        try:
            fleet = rig.fleet([0, 1], {})
            work = run(fleet, requests(6))
            assert work.retries == 0 and right(rig.take(), 6, 3)
            assert sum(_asked(stubs).values()) == {"vllm": 6, "sglang": 18}[engine]
            assert fleet.routers[0].state == "live" and fleet.routers[0].outages == 0
            fleet.close()
        finally:
            rig.close()
