"""Real vLLM servers, started once: what they say against transformers, weight sync, faults, and training through them.

Two servers of the quickstart's model with tied embeddings, the case in which vLLM on a CPU keeps a stale packed copy.
Tests run in the order of this file; the last ones end servers.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from job import REPOSITORY, job_config, read_metrics, settings, write_job_files
from launch import run_ranks

sys.path.insert(0, str(Path(__file__).parent / "engines"))
from servers import API_KEY, Reference, needs_vllm, serving_config, start_servers

from dppo_megatron.cli import main
from dppo_megatron.config.schema import Config
from dppo_megatron.data.tiny_model import write_tiny_qwen3
from dppo_megatron.job import prepare_job
from dppo_megatron.rollout.engine import Request, Sampling
from dppo_megatron.rollout.hf import engine_from_files
from dppo_megatron.rollout.launch import LaunchedServer
from dppo_megatron.rollout.receipts import canary_difference
from dppo_megatron.rollout.serving import ServerEngine
from dppo_megatron.run import Run
from dppo_megatron.train import train
from dppo_megatron.types import GuardStop, Prompt, UserError

pytestmark = [needs_vllm, pytest.mark.slow]
LONG = 96


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_job_files(tmp_path_factory.mktemp("task"))
    write_tiny_qwen3(directory / "model", seed=0, tie_word_embeddings=True)
    return directory


@pytest.fixture(scope="module")
def servers(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[LaunchedServer]]:
    os.environ["DPPO_ENGINE_API_KEY"] = API_KEY
    started = start_servers(files, tmp_path_factory.mktemp("servers"), 2)
    yield started
    for server in started:
        if server.process is not None:
            server.process.send_signal(signal.SIGCONT)
        server.stop()
    del os.environ["DPPO_ENGINE_API_KEY"]


def _engine(config: Config, said: list[str] | None = None) -> ServerEngine:
    job = prepare_job(config, 1)
    return ServerEngine(config, job.architecture, job.tokenizer, said.append if said is not None else lambda line: None)


def _prompts(config: Config) -> list[Prompt]:
    return prepare_job(config, 1).train_prompts


def _requests(prompts: list[Prompt], count: int = 8, step: int = 1) -> list[Request]:
    return [Request(prompt, index, step) for prompt in prompts for index in range(count)]


@pytest.mark.parametrize("channel", ["gloo", "disk"])
def test_logprobs_are_the_actors_before_and_after_updates(
    files: Path, servers: list[LaunchedServer], tmp_path: Path, channel: str
) -> None:
    """Mean |difference| < 1e-3 in float32 after each of three syncs of other weights, on both servers; every token
    carries the version of the sync it was sampled under, and both servers had a share of the work."""
    config = serving_config(files, tmp_path, servers, rollout__sync_channel=channel, rollout__verify_every_syncs=1)
    engine = _engine(config)
    assert f"weight sync: {channel} (asked for)" in engine.description
    requests = _requests(_prompts(config)[:8], count=4)
    before = [_requests_served(server) for server in servers]
    for version, seed in enumerate((1, 2, 1), start=1):
        reference = Reference(files / "model", seed)
        engine.load_weights(reference.weights)
        for _ in range(2):  # the second time from the prefix cache
            completions = engine.generate(requests, Sampling(LONG, 1.0, 0))
            difference = reference.difference(requests, completions)
            assert difference.mean() < 1e-4 and difference.max() < 1e-3
            assert all((c.weights_versions == version).all() for c in completions)
        for server in servers:
            probed = [c for name, c in engine.probe(requests[:8], Sampling(LONG, 1.0, 0)) if name == server.url]
            assert reference.difference(requests[:8], probed).mean() < 1e-4
        assert engine.statistics()["rollout/tensors_verified"] >= 9, "embedding and norms can be hashed on a CPU"
    assert all(now > then for now, then in zip(map(_requests_served, servers), before, strict=True))
    engine.close()


def _requests_served(server: LaunchedServer) -> float:
    """vLLM's own count."""
    from dppo_megatron.rollout.http import Http

    lines = Http(server.url).get("/metrics", timeout_s=20).splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("vllm:request_success_total"))


def test_sampling_means_the_same_as_on_hf(files: Path, servers: list[LaunchedServer], tmp_path: Path) -> None:
    """Temperature, top-p, top-k, max tokens, stop tokens and seed. Behaviour log-probabilities are those of the heated
    and cut distribution on both engines; greedy gives the same tokens."""
    config = serving_config(files, tmp_path, servers[:1])
    job, engine = prepare_job(config, 1), _engine(config)
    embedded = engine_from_files(config, job.tokenizer, job.checkpoint)
    reference = Reference(files / "model", 3)
    engine.load_weights(reference.weights)
    embedded.load_weights(reference.weights)
    requests = _requests(job.train_prompts[:6])
    stop = int(
        np.bincount(np.concatenate([c.token_ids for c in engine.generate(requests, Sampling(24, 1.0, 0))])).argmax()
    )
    for sampling in (
        Sampling(24, 0.7, 0),
        Sampling(24, 1.3, 0, top_k=3),
        Sampling(24, 1.0, 0, top_p=0.7),
        Sampling(24, 0.8, 0, top_p=0.9, top_k=5, stop_token_ids=(stop,)),
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
    assert [c.token_ids.tolist() for c in first] == [c.token_ids.tolist() for c in again]
    assert [c.token_ids.tolist() for c in first] != [c.token_ids.tolist() for c in other]
    assert len({tuple(c.token_ids.tolist()) for c in first[:8]}) > 1, "completions of a group must differ"
    greedy = [one.generate(requests[::8], Sampling(24, 0.0, 0)) for one in (engine, embedded)]
    assert [c.token_ids.tolist() for c in greedy[0]] == [c.token_ids.tolist() for c in greedy[1]]
    engine.close()


def test_receipts_catch_stale_packed_weights_and_wrong_tensors(
    files: Path, servers: list[LaunchedServer], tmp_path: Path
) -> None:
    """vLLM's plain reload leaves the tied output layer's packed copy old: digests agree, the canary does not. A tensor
    that differs from what was sent is named."""
    config = serving_config(files, tmp_path, servers[:1], rollout__sync_channel="disk", rollout__verify_every_syncs=1)
    engine, requests = _engine(config), _requests(_prompts(config)[:1])
    old, new = Reference(files / "model", 4), Reference(files / "model", 5)
    engine.load_weights(old.weights)
    server: Any = engine._fleet.members[0].server
    server._extended = False  # as a server that was started without this project's worker extension
    engine.load_weights(new.weights)
    answers = engine.probe(requests, Sampling(LONG, 1.0, 0))
    scored = [
        new.logprobs(r.prompt.token_ids, c.token_ids.tolist()) for r, (_, c) in zip(requests, answers, strict=True)
    ]
    names = [name for name, _ in answers]
    with pytest.raises(GuardStop, match=f"{servers[0].url} scores a canary"):
        canary_difference(names, [c.logprobs for _, c in answers], scored, bound=0.05)
    server._extended = True

    def tampered(
        path: str, version: str, *, timeout_s: float, load: Callable[..., None] = server.load_from_disk
    ) -> None:
        from safetensors.torch import load_file, save_file

        [file] = Path(path).glob("*.safetensors")
        tensors = load_file(file)
        tensors["model.layers.1.input_layernorm.weight"][7] += 1e-3
        save_file(tensors, file, metadata={"format": "pt"})
        load(path, version, timeout_s=timeout_s)

    server.load_from_disk = tampered
    with pytest.raises(GuardStop, match=r"layers\.1\.input_layernorm\.weight"):
        engine.load_weights(new.weights)
    engine.close()


@pytest.mark.parametrize("world_size", [1, 2])
def test_training_through_servers(files: Path, servers: list[LaunchedServer], tmp_path: Path, world_size: int) -> None:
    """Three steps, alone and on two data-parallel ranks; engine and actor agree in every step."""
    config = serving_config(files, tmp_path / "run", servers, steps=3, rollout__verify_every_syncs=2)
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


@pytest.mark.parametrize("in_flight", ["finish", "abort", "continue"])
def test_one_step_off_policy(files: Path, servers: list[LaunchedServer], tmp_path: Path, in_flight: str) -> None:
    """From the second step on completions are one sync old where the policy waits for them, and at most one elsewhere;
    the last step, which ends the run, looks at nothing ahead."""
    config = serving_config(
        files, tmp_path / "run", servers, steps=4, rollout__async_steps=1, rollout__in_flight=in_flight
    )
    run_ranks(_train, 1, config, 1, timeout_s=300)
    rows = read_metrics(tmp_path / "run")[1:]
    staleness = [row["rollout/staleness_mean"] for row in rows]
    assert len(rows) == 4 and staleness[0] == 0
    assert staleness[1:] == [1, 1, 1] if in_flight == "finish" else all(0 <= s <= 1 for s in staleness)
    assert all(np.isfinite(row["mismatch/logprob_abs_diff_mean"]) for row in rows)


WRONG = {
    "url": ({"rollout__endpoints": "[http://127.0.0.1:9]"}, "no server answers at http://127.0.0.1:9"),
    "context": ({"rollout__max_completion_tokens": 110, "data__max_prompt_tokens": 17}, "context of 112 tokens"),
    "key": ({"rollout__api_key_env": "NO_SUCH_KEY"}, "refuses the API key"),
    "channel": ({"rollout__sync_channel": "nccl", "rollout__engine": "sglang"}, "is no SGLang server"),
}


@pytest.mark.parametrize("case", sorted(WRONG))
def test_wrong_settings_are_said_at_start(
    files: Path, servers: list[LaunchedServer], tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2 and a message that names the server, before any step; no message holds the key."""
    extra, message = WRONG[case]
    values = {"rollout__engine": "vllm", "rollout__endpoints": f"[{servers[0].url}]"} | extra
    config = job_config(files, tmp_path / "run", **values)
    with pytest.raises(UserError, match=message) as error:
        _engine(config)
    assert API_KEY not in str(error.value) and API_KEY not in capsys.readouterr().out


def test_wrong_model_is_said_at_start(
    files: Path, servers: list[LaunchedServer], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A server of another vocabulary, through the command line."""
    mine = shutil.copytree(files / "model", tmp_path / "model")
    text = (mine / "config.json").read_text()
    (mine / "config.json").write_text(text.replace('"vocab_size": 19', '"vocab_size": 20'))
    endpoints = f"[{servers[0].url}]"
    values = settings(files, tmp_path / "run", rollout__engine="vllm", rollout__endpoints=endpoints)
    config = job_config(files, tmp_path / "run", rollout__engine="vllm", rollout__endpoints=endpoints)
    job = prepare_job(config, 1)
    with pytest.raises(UserError, match="19 tokens in its vocabulary; the actor has 20"):
        ServerEngine(config, replace(job.architecture, vocab_size=20), job.tokenizer)
    values += ["rollout.api_key_env=NO_SUCH_KEY"]
    codes = run_ranks(_command_line, 1, ["train", str(REPOSITORY / "configs" / "quickstart.yaml"), *values])
    assert codes == [2] and "refuses the API key" in capfd.readouterr().err


def _command_line(arguments: list[str]) -> int:
    torch.distributed.destroy_process_group()
    return main(arguments)


def _generate_while(engine: ServerEngine, requests: list[Request], harm: Callable[[], None]) -> list[Any]:
    """The completions of `requests`, with `harm` done as soon as some requests are running."""
    engine.start(requests, Sampling(LONG, 1.0, 0))
    deadline = time.monotonic() + 60
    while sum(member.groups for member in engine._fleet.members) < 2 and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    threading.Event().wait(0.2)
    harm()
    return engine.finish()


def test_a_hung_server_is_named_and_survived(files: Path, servers: list[LaunchedServer], tmp_path: Path) -> None:
    """SIGSTOP in the middle of generation: every request is answered once, by the other server; after SIGCONT it is
    synced and takes part again."""
    said: list[str] = []
    config = serving_config(
        files, tmp_path, servers, rollout__probe_every_s=0.5, rollout__probe_timeout_s=4.0, rollout__sync_timeout_s=30
    )
    engine, reference = _engine(config, said), Reference(files / "model", 6)
    engine.load_weights(reference.weights)
    requests = _requests(_prompts(config)[:24])
    expected = engine.generate(requests, Sampling(LONG, 1.0, 0))
    engine.statistics()
    completions = _generate_while(engine, requests, lambda: _signal(servers[1], signal.SIGSTOP))
    statistics = engine.statistics()
    assert statistics["rollout/retries"] > 0 and statistics["rollout/servers_live"] == 1
    assert any(servers[1].url in line and "is out" in line for line in said)
    assert [c.token_ids.tolist() for c in completions] == [c.token_ids.tolist() for c in expected]
    _signal(servers[1], signal.SIGCONT)
    other = Reference(files / "model", 7)
    engine.load_weights(other.weights)
    completions = engine.generate(requests, Sampling(LONG, 1.0, 0))
    assert engine.statistics()["rollout/servers_live"] == 2
    assert other.difference(requests, completions).max() < 1e-3
    engine.close()


def test_a_killed_server_loses_and_repeats_nothing(files: Path, servers: list[LaunchedServer], tmp_path: Path) -> None:
    """kill -9 in the middle of generation: the same completions as without it, each once."""
    said: list[str] = []
    config = serving_config(files, tmp_path, servers, rollout__probe_every_s=0.5)
    engine, reference = _engine(config, said), Reference(files / "model", 8)
    engine.load_weights(reference.weights)
    requests = _requests(_prompts(config)[:24])
    expected = engine.generate(requests, Sampling(LONG, 1.0, 0))
    engine.statistics()
    completions = _generate_while(engine, requests, lambda: _signal(servers[1], signal.SIGKILL))
    assert engine.statistics()["rollout/retries"] > 0
    assert [c.token_ids.tolist() for c in completions] == [c.token_ids.tolist() for c in expected]
    assert any(servers[1].url in line and "is out" in line for line in said)
    engine.close()


def test_without_any_server_the_run_stops_with_a_checkpoint(
    files: Path, servers: list[LaunchedServer], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The last server hangs for good after the first sync: exit code 3, the server is named, and step 0's state is
    there to go on from."""
    config = serving_config(
        files,
        tmp_path / "run",
        servers[:1],
        rollout__engine_wait_s=2,
        rollout__probe_every_s=0.5,
        rollout__probe_timeout_s=2,
        rollout__verify_every_syncs=0,
    )
    said = run_ranks(_train_with_a_server_that_stops, 1, config, servers[0])[0]
    assert "have been gone for rollout.engine_wait_s = 2 s" in said and servers[0].url in said
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("step_*")] == ["step_000001"]


def _train_with_a_server_that_stops(config: Config, server: LaunchedServer) -> str:
    try:
        with Run(prepare_job(config, 1)) as run:
            select = run.loop.select

            def stop_before(step: int) -> Any:
                if step == 2:
                    _signal(server, signal.SIGSTOP)
                return select(step)

            run.loop.select = stop_before  # type: ignore[method-assign]
            train(run)
    except GuardStop as stop:
        return str(stop)
    return ""


def _signal(server: LaunchedServer, kind: signal.Signals) -> None:
    assert server.process is not None
    os.killpg(server.process.pid, kind)
