"""An endpoint may be a router: its workers take its place.

With pages like the routers', and with the routers themselves where they are installed: DPPO_SGLANG_ROUTER_PYTHON and
DPPO_VLLM_ROUTER_PYTHON name interpreters that have sglang-router, vllm-router.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from support.engines.routers import real_router
from support.engines.stub import StubServers, good
from support.job import job_config, write_job_files
from support.logged import logged_lines
from support.settings import rollout_config

from dppo_megatron.job import prepare_job
from dppo_megatron.rollout.engine import Request, Sampling
from dppo_megatron.rollout.server_engine import ServerEngine
from dppo_megatron.rollout.servers.connect import resolve_endpoints
from dppo_megatron.rollout.servers.dialects import AnyDialect, SGLangDialect, VLLMDialect
from dppo_megatron.rollout.servers.directory import Router, current_entries
from dppo_megatron.rollout.servers.http import Http
from dppo_megatron.types import UserError

ENGINES = ("vllm", "sglang")
VOCABULARY = 19
DIALECT: dict[str, AnyDialect] = {"vllm": VLLMDialect(), "sglang": SGLangDialect(VOCABULARY, seeded=True)}


def _said(endpoints: list[str]) -> tuple[list[str], list[Router], list[str]]:
    said = logged_lines()
    return *resolve_endpoints(rollout_config({"engine": "sglang", "servers.endpoints": endpoints}), ""), said


def name_workers(stubs: StubServers, workers: Sequence[str]) -> None:
    """Have `router` name these stub servers."""
    stubs.pages["router/workers"] = json.dumps({"workers": [{"url": stubs.url(worker)} for worker in workers]})


def test_a_router_names_its_workers() -> None:
    """In the form that both routers give; servers that are no routers stay as they are."""
    with StubServers({"a": good, "b": good}) as stubs:
        named = {"workers": [{"id": "x", "url": f"{stubs.url('a')}/", "is_healthy": True}], "total": 1}
        stubs.pages["router/workers"] = json.dumps(named)
        found, routers, said = _said([stubs.url("router"), stubs.url("b"), "http://127.0.0.1:1"])
        assert [router.http.url for router in routers] == [stubs.url("router")]
        assert routers[0].workers == [stubs.url("a")] and found == [
            stubs.url("a"),
            stubs.url("b"),
            "http://127.0.0.1:1",
        ]
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


def test_workers_that_a_router_names_later() -> None:
    """Are the run's servers from the next sync on; a router that is silent for a while has those that it named last."""
    with StubServers({"a": good, "b": good}) as stubs:
        name_workers(stubs, "a")
        router = Router(Http(stubs.url("router")), [stubs.url("a")])
        named = partial(current_entries, [stubs.url("c")], [router], "key", "vllm")
        assert set(named()) == {stubs.url("c"), stubs.url("a")}
        name_workers(stubs, "ab")
        assert set(named()) == {stubs.url("c"), stubs.url("a"), stubs.url("b")}
        del stubs.pages["router/workers"]
        assert set(named()) == {stubs.url("c"), stubs.url("a"), stubs.url("b")}
        assert named()[stubs.url("b")].api_key == "key"


def test_an_engine_over_a_router(tmp_path: Path) -> None:
    """From the setting to completions: both workers get the weights, the canary and requests; the router gets none."""
    with StubServers({"a": good, "b": good}) as stubs:
        name_workers(stubs, "ab")
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
            assert {name: count for name, count in stubs.asked.items() if count} == {"a": 3, "b": 3}
            assert engine.health() == {stubs.url("a"): "live", stubs.url("b"): "live"}
            probed = {name for name, _ in engine.probe(requests[:1], Sampling(4, 1.0, 0))}
            assert probed == {stubs.url("a"), stubs.url("b")}
        finally:
            engine.close()


@pytest.mark.parametrize("engine", ("vllm", "sglang"))
def test_a_real_router(engine: str, tmp_path: Path) -> None:
    """The engine's own names its workers in that form."""
    with (
        StubServers({"a": good, "b": good}) as stubs,
        real_router(engine, [stubs.url("a"), stubs.url("b")], tmp_path / "router.log") as url,
    ):
        found, [router], _ = _said([url])
        assert sorted(found) == sorted(router.workers) == sorted([stubs.url("a"), stubs.url("b")])
