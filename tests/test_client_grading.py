"""What the rollout client grades while others are generated, and in whose processes."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.engines.rig import Rig, requests, run
from support.engines.stub import Asked, StubServers, answer_to, completion, good
from support.hooks import CountingHook, ForgetfulHook, RaisingHook
from support.job import job_config

from dppo_megatron.config.reward import RewardConfig
from dppo_megatron.job import prepare_job
from dppo_megatron.rewards.grading import make_grader
from dppo_megatron.rewards.work import Pace
from dppo_megatron.rollout import server_engine
from dppo_megatron.rollout.client.detokenizer import Detokenizer
from dppo_megatron.rollout.client.messages import HookFactory
from dppo_megatron.rollout.client.process import Setup
from dppo_megatron.rollout.client.remote import NodeClient, Nodes
from dppo_megatron.rollout.server_engine import ServerEngine
from dppo_megatron.steps.build import make_engine
from dppo_megatron.types import Grade, Prompt, RunAborted

LIMIT = 12


@pytest.fixture
def stubs() -> Iterator[StubServers]:
    with StubServers({"a": good, "b": good}) as servers:
        yield servers


def _encoded(prompt: Prompt) -> bytes:
    return pickle.dumps(prompt)


def test_groups_are_graded_as_they_land(files: Path, stubs: StubServers, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the configured grader, with the trainer's own text of the tokens: as if graded here afterwards."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
    job = prepare_job(job_config(files, files / "run"), 1)
    reward = RewardConfig(function="support.faulty:length_parity", processes=2)
    rig = Rig([("vllm", stubs.url("a"))], partial(make_grader, reward), Detokenizer.of(job.tokenizer))
    try:
        prompts = [_encoded(Prompt(index, "", (), str(index), "")) for index in range(6)]
        run(rig.fleet([0], {}), requests(6), prompts=prompts)
        arrived = rig.take()
        assert len(arrived) == 18
        for one in arrived:
            text = job.tokenizer.decode(one.completion.token_ids, skip_special_tokens=True)
            assert one.completion.text == text
            grade = one.grade
            assert grade is not None
            assert grade.reward == float(len(text) % 2) or np.isnan(grade.reward) == bool(grade.failure)
        assert any(one.grade is not None and one.grade.reward == 1.0 for one in arrived)
    finally:
        rig.close()


def test_what_has_ended_of_an_aborted_part_is_graded(stubs: StubServers, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sync ends two of three at their last but one token: the first is graded where it lands, the others when
    they are asked for again. No token of an aborted one has an age."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))

    async def aborts_once(asked: Asked) -> None:
        answer = answer_to(asked.body)
        for choice in answer["choices"][1:] if asked.count == 1 else ():
            tokens = choice["token_ids"]
            tokens.pop()
            choice["logprobs"]["content"].pop()
            choice["weight_versions"][0]["end"] = len(tokens)
            choice["finish_reason"] = "abort"
        await asked.reply(json.dumps(answer))

    stubs.behaviours["a"] = aborts_once
    rig = Rig([("vllm", stubs.url("a"))], CountingHook)
    try:
        prompts = [_encoded(Prompt(0, "", (), "", ""))]
        work = run(rig.fleet([0], {}), requests(1), prompts=prompts, may_lose=True, may_split=True)
        arrived = sorted(rig.take(), key=lambda one: one.position)
    finally:
        rig.close()
    ended = [one for one in arrived if one.completion.finish_reason != "abort"]
    assert [one.position for one in arrived] == [0, 1, 1, 2, 2] and [one.position for one in ended] == [0, 1, 2]
    lengths = [len(completion(seed, LIMIT)[0]) for seed in range(3)]
    assert [one.grade for one in ended] == [Grade(float(length)) for length in lengths]
    assert [one.grade for one in arrived if one.completion.finish_reason == "abort"] == [None, None]
    assert [work.done[index].spans for index in sorted(work.done)] == [[(1, length)] for length in lengths]


def _per_minute(pace: Pace) -> float:
    return pace._burst - 1 + 60 / pace._every_s


def test_a_client_has_the_graders_of_its_ranks(
    files: Path, tmp_path: Path, stubs: StubServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job of 64 ranks on 8 machines with one server of others, which one client asks: it grades at the pace of the
    whole job, in the processes of its machine's eight ranks, whose own have ended after the check at start. Those eight
    are given an evaluation's completions, and grade as fast together; half as fast beside the client."""
    where = {"rollout__engine": "vllm", "rollout__servers__endpoints": f"[{stubs.url('a')}]"}
    limits = {"reward__processes": 3, "reward__max_per_minute": 6000}
    job = prepare_job(job_config(files, tmp_path, **where, **limits), 1)
    assert not job.grade["reward"].processes
    setups: list[Setup] = []

    def start(setup: Setup) -> NodeClient:
        setups.append(setup)
        return NodeClient(setup)

    monkeypatch.setattr(server_engine, "NodeClient", start)
    monkeypatch.setenv("WORLD_SIZE", "64")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    make_engine(job, torch.float32, torch.device("cpu")).close()
    [setup] = setups
    assert setup.hook is not None
    grader = setup.hook()["reward"]  # type: ignore[index]
    assert grader.num_processes == 24 and grader._pace.free() == 100, "a second's share of 6,000 in a minute"
    of_ranks: Any = object.__new__(ServerEngine)
    of_ranks._nodes, of_ranks._client_nodes = Nodes(tuple(rank // 8 for rank in range(64)), 9), [0]
    of_ranks.description = "servers of others"
    hooks: list[Any] = []
    monkeypatch.setattr(server_engine, "ServerEngine", lambda *_, client_hook: hooks.append(client_hook) or of_ranks)
    for every_steps, age, share in ((0, 0, 6000), (0, 2, 6000), (5, 0, 6000), (5, 2, 3000)):
        job.config.eval.every_steps, job.config.rollout.async_steps = every_steps, age
        make_engine(job, torch.float32, torch.device("cpu"))
        of_client, of_rank = (graders["reward"]._pace for graders in (hooks[-1](1)(), job.grade))
        assert _per_minute(of_client) == pytest.approx(share) == 8 * _per_minute(of_rank)


@pytest.mark.parametrize(
    ("hook", "message"), [(RaisingHook, "this hook is broken"), (ForgetfulHook, "0 grades of 3 completions")]
)
def test_a_broken_hook_ends_the_run(
    hook: HookFactory, message: str, stubs: StubServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its error, rather than with a rollout that waits for grades."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
    rig = Rig([("vllm", stubs.url("a"))], hook)
    try:
        with pytest.raises(RunAborted, match=f"cannot go on: ValueError: {message}"):
            run(rig.fleet([0], {}), requests(2), prompts=[_encoded(Prompt(0, "", (), "", ""))] * 2)
    finally:
        rig.close()
