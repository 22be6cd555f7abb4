"""The canary: whether servers generate with the actor's weights, by the actor's own log-probabilities."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.engines.stub import Asked, StubServers, good
from support.job import job_config
from support.logged import logged_lines
from support.processes import until
from support.settings import rollout_config

from dppo_megatron.job import prepare_job
from dppo_megatron.rollout import server_engine
from dppo_megatron.rollout.engine import Request, Sampling
from dppo_megatron.rollout.server_engine import ServerEngine
from dppo_megatron.rollout.sync.receipts import MOST_MISSED, Canary
from dppo_megatron.types import Completion, Prompt, RunAborted


class Answering:
    """An engine of which only `probe` and `health` are asked."""

    def __init__(self) -> None:
        self.answers: list[tuple[str, Completion]] = []
        self.asked: list[Any] = []

    def health(self) -> dict[str, str]:
        return {"a": "live", "b": "live", "c": "out: no answer"}

    def probe(self, requests: Any, sampling: Any, *, alone: bool) -> list[tuple[str, Completion]]:
        self.asked.append((len(requests), sampling))
        return self.answers


def _completion(logprob: float) -> Completion:
    return Completion(np.array([3, 4]), np.full(2, logprob, np.float32), "length", "", ((1, 2),))


def test_the_canary_is_short_and_silence_does_not_pass() -> None:
    """At most 64 tokens and no cut, whatever the run samples. One answer of two is compared and counted; none is said,
    is due again, and stops the run the third time in a row."""
    said = logged_lines()
    values = {"sampling.max_completion_tokens": 32768, "sampling.top_p": 0.9, "completions_per_prompt": 16}
    canary, engine = Canary(rollout_config({"engine": "vllm", **values}), 0, ()), Answering()
    prompt = Prompt(0, "q", (1, 2), "a", "")

    def score(_: Prompt, completions: Sequence[Completion]) -> list[Any]:
        return [np.full(len(one.token_ids), -1.0) for one in completions]

    engine.answers = [("a", _completion(-1.01))]
    canary.ask(engine, prompt)  # type: ignore[arg-type]
    found = canary.judge(score)
    assert found == {"rollout/canary_servers": 1.0, "rollout/canary_logprob_diff": pytest.approx(0.01, abs=1e-6)}
    count, sampling = engine.asked[0]
    assert count == 8 and (sampling.max_completion_tokens, sampling.top_p, sampling.top_k) == (64, 1.0, 0)
    engine.answers = []
    for _ in range(MOST_MISSED - 1):
        canary.ask(engine, prompt)  # type: ignore[arg-type]
        assert canary.judge(score) == {"rollout/canary_servers": 0.0} and canary.is_overdue
    assert len(said) == MOST_MISSED - 1 and "none of 2 servers answered for its canary" in said[0]
    none = r"no rollout server has answered for its canary after 3 weight syncs"
    with pytest.raises(RunAborted, match=none) as stop:
        canary.ask(engine, prompt)  # type: ignore[arg-type]
    assert getattr(stop.value, "is_reported", False), "by rank 0, for all that asked"
    engine.answers = [("b", _completion(-2.0))]
    canary.ask(engine, prompt)  # type: ignore[arg-type]
    with pytest.raises(RunAborted, match=r"^b scores a canary"):
        canary.judge(score)
    assert canary.judge(score) == {}, "judged once"


def test_a_canary_behind_the_runs_own_requests_comes_to_its_turn(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server of one place serves who came first, and long requests go on through syncs. A canary that it did not
    reach in time is asked again when they are done, and the run goes on."""
    monkeypatch.setattr(server_engine, "_PROBE_S", 1.0)
    place, may_end, prompt = asyncio.Lock(), threading.Event(), Prompt(0, "", (2, 3), "", "")

    seen: list[str] = []

    async def behave(asked: Asked) -> None:
        seen.append(step := asked.body["request_id"].partition("-")[0])
        async with place:
            while step != "0" and not may_end.is_set():
                await asyncio.sleep(0.02)
            await good(asked)

    with StubServers({"a": behave}) as stubs:
        values = {"rollout__async_steps": 2, "rollout__sync__in_flight": "continue", "rollout__sync__verify_every": 0}
        values |= {"rollout__engine": "vllm", "rollout__servers__endpoints": f"[{stubs.url('a')}]"}
        config = job_config(files, tmp_path / "run", **values)
        job = prepare_job(config, 1)
        engine, canary = ServerEngine(config, job.architecture, job.tokenizer), Canary(config.rollout, 0, ())
        try:
            engine.load_weights(lambda: iter([("lm_head.weight", torch.zeros(2, 2))]))
            for step in (1, 2, 3):
                engine.start([Request(prompt, index, step) for index in range(4)], Sampling(12, 1.0, 0))
                until(lambda step=step: str(step) in seen)
                engine.load_weights(lambda: iter([("lm_head.weight", torch.zeros(2, 2))]))
                soon = threading.Timer(2.0, may_end.set)
                if step == 2:
                    soon.start()
                canary.ask(engine, prompt)
                assert canary.is_overdue == (step != 2)
                soon.cancel()
                may_end.clear()
            may_end.set()
            assert [len(engine.finish()) for _ in range(3)] == [4, 4, 4]
        finally:
            may_end.set()
            engine.close()
