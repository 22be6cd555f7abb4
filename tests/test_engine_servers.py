"""Real servers of each engine, started once: what they say against transformers, weight sync, faults, and training.

Two servers of the quickstart's model with tied embeddings, the case in which vLLM on a CPU keeps a stale packed copy.
Tests run engine by engine, in the order of this file; the last ones end servers.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.job import REPOSITORY, job_config, read_metrics, settings, write_job_files
from support.launch import run_ranks

sys.path.insert(0, str(Path(__file__).parent / "engines"))
from servers import API_KEY, Reference, needs, serving_config, start_servers

from dppo_megatron.cli import main
from dppo_megatron.config.data import EvalSetConfig
from dppo_megatron.config.schema import Config
from dppo_megatron.data.tiny_model import write_tiny_qwen3
from dppo_megatron.evaluation.evaluator import Evaluator
from dppo_megatron.job import prepare_job
from dppo_megatron.rollout.engine import Request, Sampling
from dppo_megatron.rollout.hf import engine_from_files
from dppo_megatron.rollout.server_engine import ServerEngine
from dppo_megatron.rollout.servers import sglang, vllm
from dppo_megatron.rollout.servers.connect import make_server
from dppo_megatron.rollout.servers.http import Refused
from dppo_megatron.rollout.servers.intake import Ask
from dppo_megatron.rollout.servers.launch import LaunchedServer
from dppo_megatron.rollout.servers.protocol import TensorNote, generate
from dppo_megatron.rollout.servers.wire import Expected, GenerateRequest
from dppo_megatron.rollout.sync.colocated import OFFERS
from dppo_megatron.rollout.sync.receipts import canary_difference
from dppo_megatron.rollout.transfer.shared_memory import SharedBuffer
from dppo_megatron.run import Run
from dppo_megatron.train import train
from dppo_megatron.types import Completion, GuardStop, Prompt, UserError

pytestmark = pytest.mark.slow
LONG = 96


@dataclass(frozen=True)
class Served:
    """Two running servers of one engine and the files of the job that they serve."""

    name: str
    files: Path
    servers: list[LaunchedServer]
    engines: list[ServerEngine] = field(default_factory=list)

    def config(self, run_dir: Path, count: int = 2, **extra: Any) -> Config:
        return serving_config(self.name, self.files, run_dir, self.servers[:count], **extra)

    def engine(self, config: Config, said: list[str] | None = None) -> ServerEngine:
        """Closed at the end of the test, whatever happens: ranks are forked from this process, and a child that
        collects a broadcast group of its parent's waits for threads that it does not have."""
        job = prepare_job(config, 1)

        def say(line: str) -> None:
            print(line)
            if said is not None:
                said.append(line)

        self.engines.append(ServerEngine(config, job.architecture, job.tokenizer, say))
        return self.engines[-1]

    def same(self, ours: list[Completion], expected: list[Completion]) -> bool:
        """A completion that is asked for again is the same where the engine honours seeds; SGLang does on GPUs only."""
        pairs = zip(ours, expected, strict=True)
        return self.name != "vllm" or all(a.token_ids.tolist() == b.token_ids.tolist() for a, b in pairs)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_job_files(tmp_path_factory.mktemp("task"))
    write_tiny_qwen3(directory / "model", seed=0, tie_word_embeddings=True)
    return directory


@pytest.fixture(scope="module", params=[pytest.param(name, marks=needs(name)) for name in ("vllm", "sglang")])
def served(request: pytest.FixtureRequest, files: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    os.environ["DPPO_ENGINE_API_KEY"] = API_KEY
    started = start_servers(request.param, files, tmp_path_factory.mktemp("servers"), 2)
    yield Served(request.param, files, started)
    for server in started:
        if server.process is not None:
            server.process.send_signal(signal.SIGCONT)
        server.stop()
    del os.environ["DPPO_ENGINE_API_KEY"]


@pytest.fixture(autouse=True)
def engines_are_closed(served: Served) -> Iterator[None]:
    yield
    while served.engines:
        served.engines.pop().close()


def _prompts(config: Config) -> list[Prompt]:
    return prepare_job(config, 1).train_prompts


def _requests(prompts: list[Prompt], count: int = 8, step: int = 1) -> list[Request]:
    return [Request(prompt, index, step) for prompt in prompts for index in range(count)]


@pytest.mark.parametrize("channel", ["gloo", "disk"])
def test_logprobs_are_the_actors_before_and_after_updates(served: Served, tmp_path: Path, channel: str) -> None:
    """Mean |difference| < 1e-4 in float32 (1e-3 is asked for) after each of three syncs of other weights, on both
    servers; every token carries the version of the sync it was sampled under; tensors are verified."""
    config = served.config(tmp_path, rollout__sync__channel=channel, rollout__sync__verify_every=1)
    engine = served.engine(config)
    assert f"weight sync: {channel} (asked for)" in engine.description
    requests = _requests(_prompts(config)[:8], count=2)
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
        verified = engine.statistics()["rollout/tensors_verified"]
        assert verified >= {"vllm": 9, "sglang": 18}[served.name], "vLLM on a CPU shows embedding and norms only"


def test_evaluation_through_servers(served: Served, tmp_path: Path) -> None:
    """Two sets of the same problems under different names, lengths and cuts, several samples each, at once: the
    samples of a problem go as groups, each set is sampled its own way, and nothing depends on how many servers there
    are (where seeds are honoured). Greedy answers are those of transformers."""
    path = str(served.files / "heldout.jsonl")
    sets = {
        "math/easy": EvalSetConfig(path=path, samples=12, temperature=1.0, max_completion_tokens=8, limit=3),
        "AIME@24 ü": EvalSetConfig(path=path, samples=5, temperature=0.8, top_p=0.9, limit=4),
        "greedy": EvalSetConfig(path=path, limit=6),
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


def _note_asks(engine: ServerEngine, note: Callable[[Ask], None]) -> None:
    """Have `note` see every group that is sent to a server."""
    clients: Any = engine._clients
    ask = clients.ask

    def noted(asked: Ask) -> None:
        note(asked)
        ask(asked)

    clients.ask = noted


def test_both_servers_share_the_load(served: Served, tmp_path: Path) -> None:
    """Balanced by outstanding tokens: of equal groups each server gets half, give or take one a server."""
    config = served.config(tmp_path)
    engine, asked = served.engine(config), dict.fromkeys((server.url for server in served.servers), 0)
    engine.load_weights(Reference(served.files / "model", 1).weights)
    names = list(asked)

    def note(ask: Ask) -> None:
        asked[names[ask.server]] += 1

    _note_asks(engine, note)
    engine.generate(_requests(_prompts(config)[:24]), Sampling(1, 1.0, 0))
    assert sum(asked.values()) == 24 and min(asked.values()) >= 8
    assert engine.health() == dict.fromkeys(asked, "live")


def test_sampling_means_the_same_as_on_hf(served: Served, tmp_path: Path) -> None:
    """Temperature, top-p, top-k, max tokens, stop tokens and seed. Behaviour log-probabilities are those of the heated
    and cut distribution on both engines; greedy gives the same tokens."""
    config = served.config(tmp_path, count=1)
    job, engine = prepare_job(config, 1), served.engine(config)
    embedded = engine_from_files(config, job.tokenizer, job.checkpoint)
    reference = Reference(served.files / "model", 3)
    engine.load_weights(reference.weights)
    embedded.load_weights(reference.weights)
    requests = _requests(job.train_prompts[:6])
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
    server = make_server(served.name, served.servers[0].url, API_KEY, vocab_size=19)
    server.describe(timeout_s=30)
    answers: list[bytes] = []
    exchange = server.http.exchange

    def recorded(*arguments: Any, **more: Any) -> bytes:
        answers.append(exchange(*arguments, **more))
        return answers[-1]

    server.http.exchange = recorded  # type: ignore[method-assign]
    prompt = tuple(np.random.default_rng(5).integers(3, 19, 40).tolist())
    request = GenerateRequest("1-0-0", prompt, 8, 0, max_tokens=4)
    generate(server, request, Expected(19, 0, 10**6), timeout_s=60)
    assert [one["meta_info"]["cached_tokens"] for one in json.loads(answers[-1])] == [39] * 8


def test_a_tensor_that_differs_is_named(served: Served, tmp_path: Path) -> None:
    """One number of one tensor is changed on the way: the receipt stops the run with the tensor's name."""
    config = served.config(tmp_path, 1, rollout__sync__channel="disk", rollout__sync__verify_every=1)
    engine = served.engine(config)
    server: Any = engine._fleet.members[0].server

    def tampered(
        path: str, version: str, *, timeout_s: float, load: Callable[..., None] = server.load_from_disk
    ) -> None:
        from safetensors.torch import load_file, save_file

        for file in Path(path).glob("*.safetensors"):
            tensors = load_file(file)
            if "model.layers.1.input_layernorm.weight" in tensors:
                tensors["model.layers.1.input_layernorm.weight"][7] += 1e-3
                save_file(tensors, file, metadata={"format": "pt"})
        load(path, version, timeout_s=timeout_s)

    server.load_from_disk = tampered
    with pytest.raises(GuardStop, match=r"layers\.1\.input_layernorm\.weight"):
        engine.load_weights(Reference(served.files / "model", 5).weights)


def test_the_canary_catches_stale_packed_weights(served: Served, tmp_path: Path) -> None:
    """vLLM's plain reload leaves the tied output layer's packed copy old: digests agree, the canary does not."""
    if served.name != "vllm":
        pytest.skip("SGLang multiplies with the weights it shows")
    engine = served.engine(served.config(tmp_path, 1, rollout__sync__channel="disk", rollout__sync__verify_every=1))
    requests = _requests(_prompts(engine._config)[:1])
    old, new = Reference(served.files / "model", 4), Reference(served.files / "model", 5)
    engine.load_weights(old.weights)
    server: Any = engine._fleet.members[0].server
    server._extended = False  # as a server that was started without this project's worker extension
    engine.load_weights(new.weights)
    answers = engine.probe(requests, Sampling(LONG, 1.0, 0))
    scored = [
        new.logprobs(r.prompt.token_ids, c.token_ids.tolist()) for r, (_, c) in zip(requests, answers, strict=True)
    ]
    with pytest.raises(GuardStop, match=f"{served.servers[0].url} scores a canary"):
        canary_difference([name for name, _ in answers], [c.logprobs for _, c in answers], scored, bound=0.05)


@pytest.mark.parametrize("world_size", [1, 2])
def test_training_through_servers(served: Served, tmp_path: Path, world_size: int) -> None:
    """Three steps, alone and on two data-parallel ranks; engine and actor agree in every step."""
    config = served.config(tmp_path / "run", steps=3, rollout__sync__verify_every=2)
    run_ranks(_train, world_size, config, world_size, timeout_s=300)
    rows = read_metrics(tmp_path / "run")[1:]
    assert len(rows) == 3
    for row in rows:
        assert row["mismatch/logprob_abs_diff_mean"] < 1e-3 and row["rollout/staleness_mean"] == 0
        assert row["rollout/servers_live"] == 2 and row["rollout/retries"] == 0
    trained = [row for row in rows if row["prune/completions_trained"]]
    assert trained and all(row["mismatch/logprob_abs_diff_p99"] < 1e-3 for row in trained)
    assert all(0.999 < row["mismatch/is_ess"] <= 1 for row in trained)


def _train(config: Config, world_size: int) -> None:
    with Run(prepare_job(config, world_size)) as run:
        train(run)


@pytest.mark.parametrize("in_flight", ["finish", "continue"])
def test_one_step_off_policy(served: Served, tmp_path: Path, in_flight: str) -> None:
    """From the second step on completions are one sync old where the policy waits for them, and at most one elsewhere;
    the last step, which ends the run, looks at nothing ahead."""
    config = served.config(
        tmp_path / "run", steps=4, warm_start__steps=0, rollout__async_steps=1, rollout__sync__in_flight=in_flight
    )
    run_ranks(_train, 1, config, 1, timeout_s=300)
    rows = read_metrics(tmp_path / "run")[1:]
    staleness = [row["rollout/staleness_mean"] for row in rows]
    assert len(rows) == 4 and staleness[0] == 0
    assert staleness[1:] == [1, 1, 1] if in_flight == "finish" else all(0 <= s <= 1 for s in staleness)
    assert all(np.isfinite(row["mismatch/logprob_abs_diff_mean"]) for row in rows)


@pytest.mark.parametrize("in_flight", ["abort", "continue"])
def test_tokens_of_two_versions_are_told_apart(served: Served, tmp_path: Path, in_flight: str) -> None:
    """A sync in mid-generation: tokens before it score as the old weights do, and under `abort` every token is of one
    version. Under `continue` the same completion has both, and nothing is asked for twice."""
    config = served.config(tmp_path, 1, rollout__sync__in_flight=in_flight)
    engine, old, new = (
        served.engine(config),
        Reference(served.files / "model", 9),
        Reference(served.files / "model", 10),
    )
    engine.load_weights(old.weights)
    requests = _requests(_prompts(config)[:24])
    completions = _generate_while(engine, requests, lambda: engine.load_weights(new.weights), tokens_each=LONG)
    spans = [sorted({version for version, _ in c.weights_spans}) for c in completions]
    assert all(set(span) <= {1, 2} for span in spans)
    whole = [(r, c) for r, c, span in zip(requests, completions, spans, strict=True) if len(span) == 1]
    for version, reference in ((1, old), (2, new)):
        mine = [(r, c) for r, c in whole if c.weights_spans[0][0] == version]
        if mine:
            assert reference.difference([r for r, _ in mine], [c for _, c in mine]).max() < 1e-3
    if in_flight == "abort":
        assert len(whole) == len(completions) and any(span == [2] for span in spans)
    elif served.name == "sglang":  # it prefills again under the new weights, so what follows scores as they do
        mixed = [(r, c) for r, c, span in zip(requests, completions, spans, strict=True) if len(span) == 2]
        for request, completion in mixed:
            scores = [m.logprobs(request.prompt.token_ids, completion.token_ids.tolist()) for m in (old, new)]
            versions = np.repeat(*np.array(completion.weights_spans).T)
            right = np.where(versions == 1, *scores)
            assert np.abs(right - completion.logprobs).max() < 1e-3


def test_stragglers_are_cut_and_entered_in_the_ledger(served: Served, tmp_path: Path) -> None:
    """With half of the completions done, the rest is ended where it is: shorter, right as far as it goes, counted."""
    config = served.config(
        tmp_path / "run", 1, steps=2, rollout__limits__straggler_share=0.5,
        rollout__sampling__max_completion_tokens=LONG, packing__max_tokens_per_microbatch=1024,
    )  # fmt: skip
    engine, reference = served.engine(config), Reference(served.files / "model", 11)
    engine.load_weights(reference.weights)
    requests = _requests(_prompts(config)[:24])
    completions = engine.generate(requests, Sampling(LONG, 1.0, 0))
    cut = [c for c in completions if c.finish_reason == "length" and len(c.token_ids) < LONG]
    assert len(completions) == len(requests) and 0 < len(cut) <= len(requests) / 2
    assert engine.statistics()["rollout/cut_completions"] == len(cut)
    assert reference.difference(requests, completions).max() < 1e-3
    run_ranks(_train, 1, config, 1, timeout_s=300)
    rows = read_metrics(tmp_path / "run")[1:]
    entries = [entry for row in rows for entry in row["prune/ledger"] if entry["name"] == "rollout/stragglers"]
    assert entries and all(entry["label"] == "biased" for entry in entries)


WRONG = {
    "url": ({"rollout__servers__endpoints": "[http://127.0.0.1:9]"}, "no server answers at http://127.0.0.1:9"),
    "context": (
        {"rollout__sampling__max_completion_tokens": 110, "data__max_prompt_tokens": 17},
        "context of 112 tokens",
    ),
    "key": ({"rollout__servers__api_key_env": "NO_SUCH_KEY"}, "refuses the API key"),
}


@pytest.mark.parametrize("case", [*sorted(WRONG), "engine", "version"])
def test_wrong_settings_are_said_at_start(
    served: Served, tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 2 and a message that names the server, before any step; no message holds the key."""
    other = {"vllm": "sglang", "sglang": "vllm"}[served.name]
    extra, message = WRONG.get(case, ({}, "is too old; at least 99 is needed"))
    if case == "engine":
        extra, message = {"rollout__engine": other}, f"is no {'vLLM' if other == 'vllm' else 'SGLang'} server"
    monkeypatch.setattr(
        {"vllm": vllm, "sglang": sglang}[served.name], "MINIMUM_VERSION", "99" if case == "version" else "0"
    )
    values = {"rollout__engine": served.name, "rollout__servers__endpoints": f"[{served.servers[0].url}]"} | extra
    config = job_config(served.files, tmp_path / "run", **values)
    with pytest.raises(UserError, match=message) as error:
        served.engine(config)
    assert API_KEY not in str(error.value) and API_KEY not in capsys.readouterr().out


def test_wrong_model_is_said_at_start(served: Served, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A server of another vocabulary; and through the command line exit code 2 with nothing written."""
    mine = shutil.copytree(served.files / "model", tmp_path / "model")
    text = (mine / "config.json").read_text()
    (mine / "config.json").write_text(text.replace('"vocab_size": 19', '"vocab_size": 20'))
    config = served.config(tmp_path / "run", 1)
    job = prepare_job(config, 1)
    with pytest.raises(UserError, match="19 tokens in its vocabulary; the actor has 20"):
        ServerEngine(config, replace(job.architecture, vocab_size=20), job.tokenizer)
    values = settings(
        served.files,
        tmp_path / "run",
        rollout__engine=served.name,
        rollout__servers__endpoints=f"[{served.servers[0].url}]",
        rollout__servers__api_key_env="NO_SUCH_KEY",
    )
    codes = run_ranks(_command_line, 1, ["train", str(REPOSITORY / "configs" / "quickstart.yaml"), *values])
    assert codes == [2] and "refuses the API key" in capfd.readouterr().err
    assert not (tmp_path / "run").exists()


def _command_line(arguments: list[str]) -> int:
    torch.distributed.destroy_process_group()
    return main(arguments)


def _generate_while(
    engine: ServerEngine, requests: list[Request], harm: Callable[[], None], tokens_each: int = LONG
) -> list[Completion]:
    """The completions of `requests`, with `harm` done as soon as some requests are running."""
    engine.start(requests, Sampling(tokens_each, 1.0, 0))
    deadline = time.monotonic() + 60
    while sum(member.groups for member in engine._fleet.members) < 2 and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    threading.Event().wait(0.2)
    harm()
    return list(engine.finish().values())


def test_what_was_begun_can_be_given_up(served: Served, tmp_path: Path) -> None:
    """abort: the servers end its requests; paused servers give no tokens, resumed ones go on."""
    config = served.config(tmp_path)
    engine, reference = served.engine(config), Reference(served.files / "model", 12)
    engine.load_weights(reference.weights)
    requests = _requests(_prompts(config)[:24])
    engine.start(requests, Sampling(LONG, 1.0, 0))
    engine.abort()
    assert sum(member.groups for member in engine._fleet.members) == 0
    engine.pause()
    engine.start(requests[:8], Sampling(8, 1.0, 0))
    threading.Event().wait(1.0)
    assert engine._started is not None and engine._started.work is not None and not engine._started.work.done
    engine.resume()
    assert reference.difference(requests[:8], list(engine.finish().values())).max() < 1e-3


def test_a_request_that_takes_too_long_is_named(served: Served, tmp_path: Path) -> None:
    """Nothing is waited for for ever: with the probes too slow to notice, the watchdog ends the run."""
    config = served.config(tmp_path, 1, rollout__limits__request_timeout_s=1.0, rollout__limits__probe_every_s=600.0)
    engine = served.engine(config)
    engine.load_weights(Reference(served.files / "model", 6).weights)
    requests = _requests(_prompts(config)[:24], step=7)
    try:
        with pytest.raises(GuardStop, match=rf"7-\d+-0 on {served.servers[0].url}"):
            _generate_while(engine, requests, lambda: _signal(served.servers[0], signal.SIGSTOP))
    finally:
        _signal(served.servers[0], signal.SIGCONT)


def test_a_sync_that_fails_half_way_leaves_nobody_with_mixed_weights(served: Served, tmp_path: Path) -> None:
    """One of two sleeping servers hangs after the first bucket: it is out, with a reason, and gets no request; the
    other has all of the new weights. A later sync takes it back, from the middle of the one it never finished, and
    wakes what of it still sleeps."""
    said: list[str] = []
    config = served.config(
        tmp_path,
        rollout__sync__channel="gloo",
        rollout__limits__sync_timeout_s=6.0,
        rollout__limits__probe_timeout_s=3.0,
    )
    engine, good, bad = served.engine(config, said), served.servers[0], served.servers[1]
    old, new, newer = (Reference(served.files / "model", seed) for seed in (13, 14, 15))
    engine.load_weights(old.weights)

    def hangs_after_the_first_bucket() -> Iterator[tuple[str, torch.Tensor]]:
        sent = 0
        for name, tensor in new.weights():
            sent += tensor.nbytes
            yield name, tensor
            if sent > 1 << 20:  # the stream has been asked for more than one bucket: the first is there
                _signal(bad, signal.SIGSTOP)

    engine._sync.sleep()
    engine.load_weights(hangs_after_the_first_bucket)
    assert [member.asleep for member in engine._fleet.members] == [frozenset(), {"kv_cache"}]
    assert engine.health()[good.url] == "live" and engine.health()[bad.url].startswith("out: weight sync failed")
    assert any(bad.url in line and "weight sync failed" in line for line in said)
    requests = _requests(_prompts(config)[:8])
    assert new.difference(requests, engine.generate(requests, Sampling(LONG, 1.0, 0))).max() < 1e-3
    _signal(bad, signal.SIGCONT)
    _sync_until_all_live(engine, newer)
    answers = engine.probe(requests[:8], Sampling(LONG, 1.0, 0))
    assert {name for name, _ in answers} == {good.url, bad.url}
    assert newer.difference([*requests[:8], *requests[:8]], [c for _, c in answers]).max() < 1e-3


def test_a_bucket_that_fails_leaves_nothing_behind(served: Served, tmp_path: Path) -> None:
    """An update stops inside a layer that the engine joins of two tensors: with the first of them there, vLLM's worker
    raises at the next bucket; SGLang's session is left open. The next sync is complete at its first attempt."""
    engine = served.engine(served.config(tmp_path, 1))
    broken, whole = (Reference(served.files / "model", seed) for seed in (16, 17))
    engine.load_weights(broken.weights)
    name = "model.layers.0.mlp.gate_proj.weight"
    gate = dict(broken.weights())[name]
    server: Any = engine._fleet.members[0].server
    buffer = SharedBuffer(gate.nbytes, gate.device)
    buffer.fill(gate.detach().reshape(-1).view(torch.uint8))
    notes = [TensorNote(name, "float32", tuple(gate.shape))]
    offers = [OFFERS[served.name](buffer, notes)]
    server.pause("abort", timeout_s=30)
    server.begin_update(timeout_s=30)
    server.receive_shared(offers, notes, timeout_s=30)
    if served.name == "vllm":
        with pytest.raises(Refused):
            server.receive_shared(offers, [replace(notes[0], dtype="no_such_dtype")], timeout_s=30)
    engine.load_weights(whole.weights)
    requests = _requests(_prompts(engine._config)[:8])
    assert whole.difference(requests, engine.generate(requests, Sampling(LONG, 1.0, 0))).max() < 1e-3
    assert engine._fleet.members[0].outages == 0
    buffer.close()


def test_a_full_disk_fails_the_sync(served: Served, tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk: the run stops as for every failed sync, and nothing is there
    that a server could take for weights."""
    engine = served.engine(served.config(tmp_path, 1, rollout__sync__channel="disk"))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, hard))
    try:
        with pytest.raises(GuardStop, match="weight sync 1 over disk failed"):
            engine.load_weights(Reference(served.files / "model", 18).weights)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list((tmp_path / "sync").glob("weights_1"))


def _sync_until_all_live(engine: ServerEngine, reference: Reference) -> None:
    """A server that hung may first have to find out that what it waited for will never come; each sync asks it."""
    for _ in range(8):
        engine.load_weights(reference.weights)
        if all(state == "live" for state in engine.health().values()):
            return
    raise AssertionError(engine.health())


def test_a_hung_server_is_named_and_survived(served: Served, tmp_path: Path) -> None:
    """SIGSTOP in the middle of generation: every request is answered once, by the other server; after SIGCONT it can
    sleep in spite of what it still runs, is synced and takes part again."""
    said: list[str] = []
    config = served.config(
        tmp_path,
        rollout__limits__probe_every_s=0.5,
        rollout__limits__probe_timeout_s=5.0,
        rollout__limits__sync_timeout_s=30,
    )
    engine, reference = served.engine(config, said), Reference(served.files / "model", 6)
    engine.load_weights(reference.weights)
    requests = _requests(_prompts(config)[:24])
    expected = engine.generate(requests, Sampling(LONG, 1.0, 0))
    engine.statistics()
    completions = _generate_while(engine, requests, lambda: _signal(served.servers[1], signal.SIGSTOP))
    statistics = engine.statistics()
    assert statistics["rollout/retries"] > 0 and statistics["rollout/servers_live"] == 1
    assert any(served.servers[1].url in line and "is out" in line for line in said)
    assert served.same(completions, expected) and reference.difference(requests, completions).max() < 1e-3
    _signal(served.servers[1], signal.SIGCONT)
    config.rollout.limits.probe_timeout_s = 60.0  # on a busy machine the way back would have outages of its own
    engine._sync.sleep()
    assert all(member.asleep and member.state != "out" for member in engine._fleet.members)
    other = Reference(served.files / "model", 7)
    _sync_until_all_live(engine, other)
    completions = engine.generate(requests, Sampling(LONG, 1.0, 0))
    assert engine.statistics()["rollout/servers_live"] == 2
    assert other.difference(requests, completions).max() < 1e-3


def test_a_killed_server_loses_and_repeats_nothing(served: Served, tmp_path: Path) -> None:
    """kill -9 in the middle of generation: one completion for every request, with seeds the same as without it."""
    said: list[str] = []
    config = served.config(tmp_path, rollout__limits__probe_every_s=0.5)
    engine, reference = served.engine(config, said), Reference(served.files / "model", 8)
    engine.load_weights(reference.weights)
    requests = _requests(_prompts(config)[:24])
    expected = engine.generate(requests, Sampling(LONG, 1.0, 0))
    engine.statistics()
    completions = _generate_while(engine, requests, lambda: _signal(served.servers[1], signal.SIGKILL))
    assert engine.statistics()["rollout/retries"] > 0
    assert served.same(completions, expected) and reference.difference(requests, completions).max() < 1e-3
    assert any(served.servers[1].url in line and "is out" in line for line in said)


def test_without_any_server_the_run_stops_with_a_checkpoint(served: Served, tmp_path: Path) -> None:
    """The last server hangs, first in the update of step 1, so that its sync fails, then, in the run that goes on from
    there, before step 3's generation: each time the server is named and the last finished update is kept."""
    config = served.config(
        tmp_path / "run",
        1,
        steps=4,
        rollout__limits__engine_wait_s=2,
        rollout__limits__sync_timeout_s=10,
        rollout__limits__probe_every_s=0.5,
        rollout__limits__probe_timeout_s=8,
        rollout__sync__verify_every=0,
    )
    run_dir, server = tmp_path / "run", served.servers[0]
    said = run_ranks(_train_with_a_server_that_stops, 1, config, server, "update", 1)[0]
    assert "no rollout server has taken weight sync 2" in said and server.url in said
    assert [path.name for path in (run_dir / "checkpoints").glob("step_*")] == ["step_000001"]
    _signal(server, signal.SIGCONT)
    said = run_ranks(_train_with_a_server_that_stops, 1, config, server, "_select", 2)[0]
    assert "have been gone for rollout.limits.engine_wait_s = 2 s" in said and server.url in said
    assert sorted(path.name for path in (run_dir / "checkpoints").glob("step_*")) == ["step_000001", "step_000002"]
    assert [row["step"] for row in read_metrics(run_dir)] == [0, 1, 2]


def _train_with_a_server_that_stops(config: Config, server: LaunchedServer, phase: str, count: int) -> str:
    """Before the `count`-th call of the loop's `phase`."""
    try:
        with Run(prepare_job(config, 1)) as run:
            call, calls = getattr(run.loop, phase), []

            def stop_and_call(*arguments: Any) -> Any:
                calls.append(phase)
                if len(calls) == count:
                    _signal(server, signal.SIGSTOP)
                return call(*arguments)

            setattr(run.loop, phase, stop_and_call)
            train(run)
    except GuardStop as stop:
        return str(stop)
    return ""


def _signal(server: LaunchedServer, kind: signal.Signals) -> None:
    assert server.process is not None
    os.killpg(server.process.pid, kind)
