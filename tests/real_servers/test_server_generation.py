"""What real servers generate: log-probabilities against transformers, sampling, sharing, evaluation, cuts."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import Request as UrlRequest
from urllib.request import urlopen

import msgspec
import numpy as np
import pytest
import torch
from support.engines.servers import API_KEY, Reference
from support.listening import beyond_loopback
from support.served import (
    LONG,
    LONGEST,
    Served,
    process_group,
    prompts_of,
    rank_zero,
    requests_for,
)
from support.settings import rollout_config

from dppo_megatron.config.data import EvalSetConfig
from dppo_megatron.config.resolved_sets import longest_sequence
from dppo_megatron.config.reward import RewardConfig
from dppo_megatron.evaluation.evaluator import Evaluator
from dppo_megatron.job import prepare_job
from dppo_megatron.rewards.grading import make_grader
from dppo_megatron.rollout.engine import Request, Sampling
from dppo_megatron.rollout.hf import engine_from_files
from dppo_megatron.rollout.server_engine import ServerEngine
from dppo_megatron.rollout.servers.connect import make_server
from dppo_megatron.rollout.servers.dialects import SGLANG_ARRAYS_PATH, VLLM_ARRAYS_PATH
from dppo_megatron.rollout.servers.http import Done, Http, Refused
from dppo_megatron.rollout.servers.protocol import generate
from dppo_megatron.rollout.servers.wire import Expected, GenerateRequest, Submit
from dppo_megatron.types import Grade, GradeTask, Prompt
from examples.judge_grader import _NO_MARK, _QUESTION

pytestmark = pytest.mark.slow


def test_servers_listen_to_nobody_else(served: Served) -> None:
    """Neither the server nor any process that it has started takes a connection from another machine."""
    if served.name == "sglang":
        pytest.skip("its torch store listens on every address (docs/security.md)")
    assert [beyond_loopback(process_group(server)) for server in served.servers] == [{}, {}]


@pytest.mark.parametrize("channel", ["gloo", "disk"])
def test_logprobs_are_the_actors_before_and_after_updates(served: Served, tmp_path: Path, channel: str) -> None:
    """Mean |difference| < 1e-4 in float32 (1e-3 is asked for) after each of three syncs of other weights, on both
    servers; every token carries the version of the sync it was sampled under; tensors are verified."""
    config = served.config(tmp_path, rollout__sync__channel=channel, rollout__sync__verify_every=1)
    engine = served.engine(config)
    assert f"weight sync: {channel} (asked for)" in engine.description
    requests = requests_for(prompts_of(config)[:8], count=2)
    for version, seed in enumerate((1, 2, 1), start=1):
        reference = Reference(served.files / "model", seed)
        engine.load_weights(reference.weights)
        for _ in range(2):  # the second time from the prefix cache
            completions = engine.generate(requests, Sampling(LONG, 1.0, 0))
            difference = reference.difference(requests, completions)
            assert difference.mean() < 1e-4 and difference.max() < 1e-3
            assert all(c.weights_spans == ((version, len(c.token_ids)),) for c in completions)
        for server in served.servers:
            probed = [c for name, c in engine.probe(requests[:2], Sampling(LONG, 1.0, 0)) if name == server.url]
            assert reference.difference(requests[:2], probed).mean() < 1e-4
        verified = engine.statistics().tensors_verified
        assert verified >= {"vllm": 9, "sglang": 18}[served.name], "vLLM on a CPU shows embedding and norms only"


def test_both_forms_of_an_answer_say_the_same(served: Served, tmp_path: Path) -> None:
    """The engine's JSON and our arrays of the same completions (seeded, or greedy): tokens, spans, log-probabilities to
    the last bit that JSON keeps. Bad requests are refused, and those without the key."""
    engine = served.engine(served.config(tmp_path, count=1))
    engine.load_weights(Reference(served.files / "model", 5).weights)
    [member] = rank_zero(engine).fleet.members
    arrays: Any = member.server.dialect
    assert arrays.arrays, "launched servers have the path"
    found = []
    for turn, dialect in enumerate((arrays, msgspec.structs.replace(arrays, arrays=False))):
        group = GenerateRequest(f"both-{turn}", (2, 5, 7), 4, 11, LONG, {"vllm": 0.7, "sglang": 0.0}[served.name])
        group = msgspec.structs.replace(group, stop_token_ids=(1,))
        found.append(
            generate(
                _Asked(member.server.http, dialect),
                group,
                Expected(engine._vocab_size, 1, 1, engine._sync.run),
                timeout_s=60,
            )
        )  # type: ignore[arg-type]
    for one, other in zip(*found, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist() and one.logprobs.tolist() == other.logprobs.tolist()
        assert (one.finish_reason, one.weights_versions) == (other.finish_reason, other.weights_versions)
    path = {"vllm": VLLM_ARRAYS_PATH, "sglang": SGLANG_ARRAYS_PATH}[served.name]
    with pytest.raises(Refused, match="401"):
        Http(member.name).get(path, Done, timeout_s=30)
    for bad in (b"{}", b"[", b'{"request_id": "x", "token_ids": [1], "sampling_params": {"n": 100000}}'):
        with pytest.raises(Refused, match="400"):
            member.server.http.exchange(path, bad, timeout_s=30, max_bytes=1 << 16)


def test_the_longest_sequence_fits(served: Served, tmp_path: Path) -> None:
    """A launched server has room for prompt and completion of the largest lengths, to the last token."""
    config = served.config(tmp_path, count=1, **ROOM)
    engine = served.engine(config)
    engine.load_weights(Reference(served.files / "model", 5).weights)
    [member] = rank_zero(engine).fleet.members
    longest, _ = longest_sequence(config)
    group = GenerateRequest("long-0", (3,) * (longest - 8), 16, 1, max_tokens=8, stop_token_ids=(1,))
    found = generate(member.server, group, Expected(engine._vocab_size, 1, 1, engine._sync.run), timeout_s=60)
    assert max(len(one.token_ids) for one in found) == 8


def test_completions_with_limits_of_their_own(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is the beginning of what it is without (vLLM samples by seed; SGLang is asked greedily), whichever form its
    answer has; and one that is not stopped says so."""
    engine = served.engine(served.config(tmp_path, count=1))
    engine.load_weights(Reference(served.files / "model", 5).weights)
    [member] = rank_zero(engine).fleet.members
    greedy = {"vllm": 0.7, "sglang": 0.0}[served.name]
    prompts = [Prompt(index, "", (2, 5, 7 + index), "", "") for index in range(3)]
    sampling = Sampling(LONG, greedy, 3)
    free = [Request(prompt, index, 1) for prompt in prompts for index in range(4)]
    whole = engine.generate(free, sampling)
    limits = [(3 * place) % (LONG + 4) for place in range(len(free))]  # 0 is none
    asked = [replace(one, limit=limit) for one, limit in zip(free, limits, strict=True)]
    for arrays in (True, False):
        dialect = msgspec.structs.replace(member.server.dialect, arrays=arrays)
        monkeypatch.setattr(type(member.server), "dialect", property(lambda _, dialect=dialect: dialect))
        found = engine.generate(asked, sampling)
        for one, other, limit in zip(found, whole, limits, strict=True):
            assert one.token_ids.tolist() == other.token_ids[: limit or None].tolist()
            is_whole = not limit or limit >= len(other.token_ids)
            assert one.finish_reason == (other.finish_reason if is_whole else "early")
        assert "early" in {one.finish_reason for one in found}


ROOM = {"rollout__sampling__max_completion_tokens": LONGEST, "packing__max_tokens_per_microbatch": 1024}


@dataclass
class _Asked:
    """A server asked in a dialect of the test's choice."""

    http: Http
    dialect: Any


def test_evaluation_through_servers(served: Served, tmp_path: Path) -> None:
    """Two sets of the same problems under different names, lengths and cuts, several samples each, at once: the
    samples of a problem go as groups, each set is sampled its own way, and nothing depends on how many servers there
    are (where seeds are honoured). Greedy answers are those of transformers."""
    path = str(served.files / "heldout.jsonl")
    sets = {
        "math/easy": EvalSetConfig(path=path, samples=12, temperature=1.0, max_completion_tokens=8, limit=3),
        "AIME@24 ü": EvalSetConfig(path=path, samples=5, temperature=0.8, top_p=0.9, limit=4),
        "greedy": EvalSetConfig(path=path, temperature=0.0, limit=6),
    }
    found = []
    for count in (2, 1):
        config = served.config(tmp_path, count=count)
        config.data.eval_paths, config.data.eval_sets = {}, sets
        job, engine = prepare_job(config, 1), served.engine(config)
        reference = Reference(served.files / "model", 3)
        engine.load_weights(reference.weights)
        evaluator = Evaluator(job)
        asked: list[int] = []
        _note_asks(engine, lambda ask, counts=asked: counts.append(ask.group.count))  # type: ignore[misc]
        found.append(evaluator.sample(engine))
        assert sorted(asked) == [1] * 6 + [4] * 3 + [5] * 4 + [8] * 3
        assert len(found[-1]) == 12 * 3 + 5 * 4 + 6
        assert max(one.tokens for one in found[-1] if one.set == "math/easy") == 8
        assert max(one.tokens for one in found[-1] if one.set != "math/easy") > 8
        for name in ("math/easy", "AIME@24 ü"):
            texts = [one.text for one in found[-1] if one.set == name and one.problem_index == 0]
            assert len(set(texts)) > 1, "samples of a problem must differ"
        evaluator.close()
    embedded = engine_from_files(config, job.tokenizer, job.checkpoint)
    embedded.load_weights(reference.weights)
    greedy = [one.text for one in Evaluator(job).sample(embedded) if one.set == "greedy"]
    for samples in found:
        assert [one.text for one in samples if one.set == "greedy"] == greedy
    if served.name == "vllm":
        assert [one.text for one in found[0]] == [one.text for one in found[1]]


def _note_asks(engine: ServerEngine, note: Callable[[Submit], None]) -> None:
    """Have `note` see every group that is sent to a server."""
    clients: Any = rank_zero(engine).clients
    ask = clients.ask

    def noted(asked: Submit) -> None:
        note(asked)
        ask(asked)

    clients.ask = noted


def test_both_servers_share_the_load(served: Served, tmp_path: Path) -> None:
    """Balanced by outstanding tokens: of equal groups each server gets half, give or take one a server, and of the long
    answers of a group too, which are those that one server alone would have given."""
    config, reference = served.config(tmp_path), Reference(served.files / "model", 1)
    engine, asked = served.engine(config), dict.fromkeys((server.url for server in served.servers), 0)
    engine.load_weights(reference.weights)
    requests, parts = requests_for(prompts_of(config)[:24]), dict[int, list[tuple[str, int]]]()

    def note(ask: Submit) -> None:
        asked[ask.server] += 1
        parts.setdefault(ask.index, []).append((ask.server, ask.group.count))

    _note_asks(engine, note)
    engine.generate(requests, Sampling(1, 1.0, 0))
    assert sum(asked.values()) == 24 and min(asked.values()) >= 8
    assert engine.health() == dict.fromkeys(asked, "live")
    parts.clear()
    requests = requests[: 12 * 8]  # there is room for all at once: later ones go where there is some again
    spread = engine.generate(requests, Sampling(LONG, 1.0, 0))
    assert reference.difference(requests, spread).max() < 1e-3
    assert [sorted(of) for of in parts.values()] == [sorted((url, 4) for url in asked)] * 12
    alone = served.engine(served.config(tmp_path / "alone", count=1))
    alone.load_weights(reference.weights)
    assert served.same(spread, alone.generate(requests, Sampling(LONG, 1.0, 0)))


def test_sampling_means_the_same_as_on_hf(served: Served, tmp_path: Path) -> None:
    """Temperature, top-p, top-k, max tokens, stop tokens and seed. Behaviour log-probabilities are those of the heated
    and cut distribution on both engines; greedy gives the same tokens."""
    config = served.config(tmp_path, count=1)
    job, engine = prepare_job(config, 1), served.engine(config)
    embedded = engine_from_files(config, job.tokenizer, job.checkpoint)
    reference = Reference(served.files / "model", 3)
    engine.load_weights(reference.weights)
    embedded.load_weights(reference.weights)
    requests = requests_for(job.train_prompts[:6])
    stop = int(
        np.bincount(np.concatenate([c.token_ids for c in engine.generate(requests, Sampling(24, 1.0, 0))])).argmax()
    )
    both = Sampling(24, 0.8, 0, top_p=0.9, top_k=5, stop_token_ids=(stop,))
    for sampling in (
        Sampling(24, 0.7, 0),
        Sampling(24, 1.3, 0, top_k=3),
        Sampling(24, 1.0, 0, top_p=0.7),
        both if served.name == "vllm" else replace(both, top_p=1.0),  # SGLang's order of cuts is refused at start
    ):
        cuts: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
        }
        for one in (engine, embedded):
            completions = one.generate(requests, sampling)
            assert reference.difference(requests, completions, **cuts).max() < 1e-3
            for completion in completions:
                ids, ends = completion.token_ids.tolist(), {job.tokenizer.eos_token_id, *sampling.stop_token_ids}
                assert not ends & set(ids[:-1]) and len(ids) <= 24
                assert completion.finish_reason == ("stop" if ids[-1] in ends else "length")
                assert completion.finish_reason == "stop" or len(ids) == 24
    again, other = (engine.generate(requests, Sampling(24, 1.0, seed)) for seed in (0, 1))
    first = engine.generate(requests, Sampling(24, 1.0, 0))
    assert served.same(first, again)
    assert [c.token_ids.tolist() for c in first] != [c.token_ids.tolist() for c in other]
    assert len({tuple(c.token_ids.tolist()) for c in first[:8]}) > 1, "completions of a group must differ"
    greedy = [one.generate(requests[::8], Sampling(24, 0.0, 0)) for one in (engine, embedded)]
    assert [c.token_ids.tolist() for c in greedy[0]] == [c.token_ids.tolist() for c in greedy[1]]


def test_a_group_has_one_prefill(served: Served, tmp_path: Path) -> None:
    """SGLang's own count for each completion of a group: all but the prompt's last token came out of the cache."""
    if served.name == "vllm":
        pytest.skip("n = G is one request, whose prompt vLLM prefills once; its cache counts whole blocks only")
    server = make_server(rollout_config({"engine": served.name}), served.servers[0].url, API_KEY, vocab_size=19)
    server._arrays = False  # type: ignore[attr-defined] # the count is in SGLang's own answer only
    answers: list[bytes] = []
    exchange = server.http.exchange

    def recorded(*arguments: Any, **more: Any) -> bytes:
        answers.append(exchange(*arguments, **more))
        return answers[-1]

    server.http.exchange = recorded  # type: ignore[method-assign]
    prompt = tuple(np.random.default_rng(5).integers(3, 19, 40).tolist())
    request = GenerateRequest("1-0-0", prompt, 8, 0, max_tokens=4, stop_token_ids=(1,))
    run = server.weights_version(timeout_s=60).rpartition(".")[0]  # of whoever used it before
    generate(server, request, Expected(19, 0, 10**6, run), timeout_s=60)
    assert [one["meta_info"]["cached_tokens"] for one in json.loads(answers[-1])] == [39] * 8


def test_what_is_late_is_ended_where_it_is(served: Served, tmp_path: Path) -> None:
    """Shorter, right as far as it goes: 960 tokens of a model that hardly ever ends by itself take longer than the
    limit, one token does not. A server that stalls before it answers, as it may when it is asked for the first time on
    a busy machine, is asked again."""
    config = served.config(tmp_path / "run", 1, rollout__limits__request_timeout_s=1.5, **ROOM)
    engine, reference = served.engine(config), Reference(served.files / "model", 11)
    job = prepare_job(config, 1)
    with torch.no_grad():
        reference.model.get_input_embeddings().weight[job.tokenizer.eos_token_id] = 0
    engine.load_weights(reference.weights)
    for step in range(1, 6):
        short, long = (requests_for(some, step=step) for some in (job.train_prompts[:23], job.train_prompts[23:24]))
        long = [replace(one, sampling=Sampling(LONGEST, 0.15, 0)) for one in long]
        completions = engine.generate([*short, *long], Sampling(1, 1.0, 0))
        first, last = completions[: len(short)], completions[len(short) :]
        has_begun = any(len(one.token_ids) for one in last if one.finish_reason == "abort")
        if has_begun and all(len(one.token_ids) for one in first):
            break
    cut = [one for one in last if one.finish_reason == "abort"]
    assert cut and len(last) == len(long) and [len(one.token_ids) for one in first] == [1] * len(short)
    assert reference.difference(short, first).max() < 1e-3
    assert reference.difference(long, last, temperature=0.15).max() < 1e-3 / 0.15, "which divides differences of logits"


def test_what_was_begun_can_be_given_up(served: Served, tmp_path: Path) -> None:
    """The servers end its requests; paused servers give no tokens, resumed ones go on."""
    config = served.config(tmp_path)
    engine, reference = served.engine(config), Reference(served.files / "model", 12)
    engine.load_weights(reference.weights)
    requests = requests_for(prompts_of(config)[:24])
    engine.start(requests, Sampling(LONG, 1.0, 0))
    rank_zero(engine).abort(engine._started)
    engine._started.clear()
    assert sum(member.groups for member in rank_zero(engine).fleet.members) == 0
    for member in rank_zero(engine).fleet.live:
        member.server.pause("finish", timeout_s=30)
    engine.start(requests[:8], Sampling(8, 1.0, 0))
    threading.Event().wait(1.0)
    assert not engine._started[0].done
    for member in rank_zero(engine).fleet.live:
        member.server.resume(timeout_s=30)
    assert reference.difference(requests[:8], list(engine.finish().values())).max() < 1e-3


def test_the_judge_of_the_example_is_asked_and_understood(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 questions at a time to a real OpenAI-compatible server: each reward is what the server's own reply to that
    question comes to, asked for apart from the grader. Truncated completions are not asked about."""
    url, ask = f"{served.servers[0].url}/v1", partial(_ask_judge, served.servers[0].url)
    model = ask("/v1/models")["data"][0]["id"]
    for name, value in (("JUDGE_URL", url), ("JUDGE_MODEL", model), ("JUDGE_API_KEY", API_KEY)):
        monkeypatch.setenv(name, value)
    texts = [f"{i} + {i} = {2 * i}" for i in range(64)]
    tasks = [GradeTask(text, "12", {"problem": "6 + 6"}, "", "", 9, "stop") for text in texts]
    tasks.append(GradeTask("6 + 6 =", "12", {}, "", "6 + 6", 7, "length"))
    with closing(make_grader(RewardConfig(function="examples.judge_grader:judge", max_concurrent=64))) as grader:
        *grades, truncated = grader.grade(tasks)
    assert truncated == Grade(0.0, why="truncated")
    for text, grade in list(zip(texts, grades, strict=True))[::16]:
        question = _QUESTION.format(problem="6 + 6", answer="12", completion=text)
        body = {"model": model, "messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 8}
        body["chat_template_kwargs"] = {"enable_thinking": False}
        reply = ask("/v1/chat/completions", body)["choices"][0]["message"]["content"]
        if marks := re.findall(r"\d+(?:\.\d+)?", _NO_MARK.sub("", reply)):
            assert (grade.extracted, grade.reward) == (reply, min(10.0, float(marks[-1])) / 10)
        else:
            assert grade.failure == f"got no mark from the judge: {reply[:60]!r}"
    assert {grade.failure.partition(":")[0] for grade in grades} <= {"", "got no mark from the judge"}


def _ask_judge(url: str, path: str, body: Any = None) -> Any:
    headers = {"Authorization": f"Bearer {API_KEY}", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    with urlopen(UrlRequest(url + path, data, headers), timeout=300) as response:
        return json.load(response)
