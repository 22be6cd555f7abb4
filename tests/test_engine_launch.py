"""Servers that the trainer starts itself: a whole run through them, a dead one started again, and what cannot start."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.engines.forked_vllm import group_of
from support.engines.servers import Reference, local_settings, needs
from support.job import QUICK, job_config, read_metrics, write_job_files
from support.launch import run_ranks
from support.logged import logged_lines
from support.processes import is_gone, until
from support.served import prompts_of, rank_zero
from support.timelines import nested, overlapping, read_timeline

from dppo_megatron.config.rollout import RolloutConfig
from dppo_megatron.config.schema import Config
from dppo_megatron.job import prepare_job
from dppo_megatron.rollout.engine import Request, Sampling
from dppo_megatron.rollout.server_engine import ServerEngine
from dppo_megatron.rollout.servers import member
from dppo_megatron.rollout.servers.http import Done, Http, Refused
from dppo_megatron.rollout.servers.protocol import NamedWeights, TensorNote
from dppo_megatron.rollout.servers.server_process import LaunchedServer
from dppo_megatron.rollout.sync.broadcast import BroadcastChannel
from dppo_megatron.rollout.sync.channels import DiskChannel
from dppo_megatron.rollout.sync.colocated import OFFERS, SharedBuffer
from dppo_megatron.rollout.sync.receipts import Digests, ask_for_canary, differing
from dppo_megatron.run import Run
from dppo_megatron.train import train
from dppo_megatron.types import UserError
from dppo_megatron.workbench.quickstart.tiny_model import write_tiny_qwen3

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_job_files(tmp_path_factory.mktemp("task"))
    write_tiny_qwen3(directory / "model", seed=0, tie_word_embeddings=True)
    return directory


CALLS = {
    "vllm": ("POST /sleep?level=2 ", "POST /wake_up?tags="),
    "sglang": ("POST /release_memory_occupation ", "POST /resume_memory_occupation "),
}
"""To sleep and to wake, as the engines' own logs name them; woken twice, for the weights and for the cache."""


@pytest.mark.parametrize(
    ("engine", "killed"),
    [
        pytest.param("vllm", "generating", marks=needs("vllm")),
        pytest.param("sglang", "asleep", marks=needs("sglang")),  # only SGLang minds to be woken without having slept
    ],
)
def test_a_run_starts_its_server_and_starts_it_again(
    files: Path, tmp_path: Path, request: pytest.FixtureRequest, engine: str, killed: str
) -> None:
    """Three steps on two ranks with a colocated server, which sleeps and wakes on a CPU too, but for the memory; vLLM's
    has two data-parallel replicas, as in configs/h100. In the second step one replica of it is killed in the middle of
    the generation, or all of it asleep in the update: it is started again and synced through shared memory, and the run
    goes on. Engine and actor agree in every step, and nothing of the server is left when the run has ended."""
    forked = {"rollout__servers__python": str(request.getfixturevalue("forked_vllm"))} if engine == "vllm" else {}
    config = job_config(
        files,
        tmp_path / "run",
        steps=3,
        rollout__limits__max_concurrent_sequences=64,
        rollout__sync__bucket_mb=1,
        rollout__sync__verify_every=1,
        rollout__limits__probe_every_s=0.5,
        rollout__servers__colocate="true",
        **QUICK | local_settings(engine, *REPLICAS[engine]) | forked,
    )
    said = run_ranks(_train_and_kill_the_server, 2, config, killed, timeout_s=500)
    assert "weight sync: ipc (the servers are the trainer's own" in said[0]
    rows = read_metrics(tmp_path / "run")[1:]
    assert len(rows) == 3 and (rows[1]["rollout/retries"] > 0) == (killed == "generating")
    assert all(row["mismatch/logprob_abs_diff_mean"] < 1e-3 and row["rollout/servers_live"] == 1 for row in rows)
    assert all(row["rollout/canary_logprob_diff"] < 1e-3 for row in rows[1:])
    assert all(row["rollout/canary_servers"] == (2 if REPLICAS[engine] else 1) for row in rows[1:])
    sleep, wake = CALLS[engine]
    log = (tmp_path / "run" / "servers" / "server_0.log").read_text().splitlines()
    slept = [" 200 " in line for line in log if sleep in line]
    again = 1 if REPLICAS[engine] else 0  # by `every_call_reaches_every_replica`
    # while the actor is built, in three updates, and before it is synced as a new process
    assert slept == [True] * (5 + again)
    # four syncs, and one more where it was killed while it generated
    woke = (4 if killed == "asleep" else 5) + again
    assert [" 200 " in line for line in log if wake in line] == [True] * 2 * woke


REPLICAS = {"vllm": ("--data-parallel-size", "2"), "sglang": ()}


def _train_and_kill_the_server(config: Config, killed: str) -> str:
    with Run(prepare_job(config, 2)) as run:
        engine: Any = run.loop._engine
        if engine._zero.is_here:
            _asks_for_its_key(_only_server(engine), config.rollout.engine)
        name, last_call = {"generating": ("start", 3), "asleep": ("sleep", 2)}[killed]
        call, calls = getattr(engine, name), itertools.count(1)

        def call_and_kill(*arguments: Any) -> None:
            is_due = next(calls) == last_call and engine._zero.is_here  # in step 2; an evaluation starts too
            # found before the call: a step's answers may all be there before a look through /proc ends
            kill = _killer(_only_server(engine), config.rollout) if is_due else lambda: None
            call(*arguments)
            kill()

        setattr(engine, name, call_and_kill)
        train(run)
        if engine._zero.is_here and config.rollout.engine == "vllm":
            every_call_reaches_every_replica(engine, config)
        last = _group(_only_server(engine), config.rollout) if engine._zero.is_here else None
        description = str(engine.description)
    if last is not None:
        until(lambda: is_gone(last), "some of the server is left", 120)
    return description


@needs("vllm")
def test_a_replica_that_dies_idle_is_noticed(
    files: Path, tmp_path: Path, forked_vllm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Just before the server is to sleep: vLLM stops listening, and neither answers nor ends. The call is given up
    before `sync_timeout_s`, which this test would not outlive, and the server is started again for the next sync as one
    that has ended is, and not as one that has been silent for long."""
    said = logged_lines()
    monkeypatch.setattr(member, "HUNG_S", math.inf)
    forked = {"rollout__servers__python": str(forked_vllm), "rollout__servers__colocate": "true"}
    config = job_config(
        files,
        tmp_path / "run",
        rollout__limits__max_concurrent_sequences=64,
        **local_settings("vllm", *REPLICAS["vllm"]) | forked,
    )
    job, reference = prepare_job(config, 1), Reference(files / "model", 5)
    with contextlib.closing(ServerEngine(config, job.architecture, job.tokenizer)) as engine:
        server = _only_server(engine)
        engine.sleep()
        engine.load_weights(reference.weights)
        before = _group(server, config.rollout)
        _killer(server, config.rollout)()
        engine.sleep()
        assert [state.partition(":")[0] for state in engine.health().values()] == ["out"]
        engine.load_weights(reference.weights)
        assert engine.health() == {server.url: "live"} and _group(server, config.rollout) != before
        assert any(f"had ended (its log: {server.log}" in line and "; it is restarted" in line for line in said)
        requests = [Request(prompts_of(config)[0], index, 1) for index in range(8)]
        completions = engine.generate(requests, Sampling(12, 1.0, 0))
        assert reference.difference(requests, completions).max() < 1e-3


@needs("vllm")
@pytest.mark.long
def test_a_worker_that_fails_does_not_put_a_server_of_two_out_of_step(files: Path, tmp_path: Path) -> None:
    """One of two tensor-parallel workers cannot map a bucket. vLLM's own `collective_rpc` would leave the other's
    answer in its queue, for the next call. Here the next sync is complete at its first attempt."""
    config = job_config(
        files,
        tmp_path / "run",
        rollout__limits__max_concurrent_sequences=64,
        **local_settings("vllm", "--tensor-parallel-size", "2"),
    )
    job, broken, whole = prepare_job(config, 1), *(Reference(files / "model", seed) for seed in (16, 17))
    with contextlib.closing(ServerEngine(config, job.architecture, job.tokenizer)) as engine:
        engine.load_weights(broken.weights)
        [asked] = rank_zero(engine).fleet.members
        name, norm = next((name, tensor) for name, tensor in broken.weights() if name == "model.norm.weight")
        notes = [TensorNote(name, "float32", tuple(norm.shape))]
        buffer = SharedBuffer(norm.nbytes, norm.device)
        buffer.fill(norm.detach().reshape(-1).view(torch.uint8))
        offer = OFFERS["vllm"](buffer, notes)
        asked.server.pause("abort", timeout_s=60)
        asked.server.begin_update(timeout_s=60)
        with pytest.raises(Refused):
            asked.server.receive_shared([offer, offer | {"path": "/nowhere"}], notes, timeout_s=60)
        engine.load_weights(whole.weights)
        assert asked.outages == 0
        requests = [Request(prompts_of(config)[0], index, 1) for index in range(8)]
        assert whole.difference(requests, engine.generate(requests, Sampling(12, 1.0, 0))).max() < 1e-3
        buffer.close()


def _killer(server: LaunchedServer, rollout: RolloutConfig) -> Callable[[], None]:
    """Of all of SGLang's; of vLLM's second replica, with which vLLM ends the others and itself."""
    if rollout.engine == "sglang":
        return partial(os.killpg, _group(server, rollout), signal.SIGKILL)
    [second] = _processes(_group(server, rollout), b"EngineCore_DP1")
    return partial(os.kill, second, signal.SIGKILL)


def _group(server: LaunchedServer, rollout: RolloutConfig) -> int:
    assert server.process is not None
    pid = server.process.pid
    return group_of(pid, Path(rollout.servers.python)) if rollout.engine == "vllm" else pid


def _processes(group: int, name: bytes) -> list[int]:
    """Those of a process group that are called so."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if name in (process / "cmdline").read_bytes() and os.getpgid(int(process.name)) == group:
                found.append(int(process.name))
    return found


def every_call_reaches_every_replica(engine: Any, config: Config) -> None:
    """Each call of `VLLMServer`, by what both replicas say or compute afterwards. vLLM gives the first replica's answer
    for most, and one that both agree on for is_paused, is_sleeping and weight_info: those answer 500 where they differ.

        describe                              /dppo_workers: a worker for each replica
        healthy                               ends with any of them (`_killer`)
        pause, resume; sleep, wake            is_paused, is_sleeping
        load_from_disk, join_group, receive   what each computes; receive_shared, begin_update, end_update: training did
        weights_version, checksums            both answer
    """
    [asked] = rank_zero(engine).fleet.members
    server, http = asked.server, asked.server.http
    assert server.replicas == 2 and len(server.describe(timeout_s=60).devices) == 2
    for call, arguments, path, expected in (
        (server.pause, ("finish",), "/is_paused", True),
        (server.resume, (), "/is_paused", False),
        (server.sleep, (frozenset(),), "/is_sleeping", True),
        (server.wake, ("weights",), "/is_sleeping", True),
        (server.wake, ("kv_cache",), "/is_sleeping", False),
    ):
        call(*arguments, timeout_s=60)
        assert http.get(path, dict[str, bool], timeout_s=60) == {path[1:]: expected}
    requests = [Request(prompts_of(config)[0], index, 9) for index in range(4)]
    work = engine._plan(requests, Sampling(12, 1.0, 0))
    for seed, channel in (
        (3, DiskChannel(rank_zero(engine).fleet, Path(config.run_dir) / "again", config.model.hf_path, 1 << 20, 60)),
        (4, BroadcastChannel(rank_zero(engine).fleet, "gloo", 1 << 20, 60)),
    ):
        reference, version = Reference(Path(config.model.hf_path), seed), f"{engine._sync.run}.{engine._sync.version}"
        assert channel.push(reference.weights(), [asked], version) == [asked]
        channel.close()
        assert server.weights_version(timeout_s=60) == version
        assert [len(differing(_digests(reference), held)[0]) for held in server.checksums(timeout_s=60)] == [0, 0]
        answers = ask_for_canary(rank_zero(engine).fleet, work.groups, work.expected, 60)
        assert [name for name, _ in answers] == [f"{asked.name} (replica {replica} of 2)" for replica in range(2)]
        for _, sampled in answers:
            for one in sampled:
                right = reference.logprobs(requests[0].prompt.token_ids, one.token_ids.tolist())
                assert np.abs(right - one.logprobs).max() < 1e-3, channel.name


def _digests(reference: Reference) -> dict[str, tuple[str, ...]]:
    digests = Digests()
    for _ in digests.tee(reference.weights()):
        pass
    return digests.result()


@needs("vllm")
def test_each_node_of_a_job_has_a_server(files: Path, tmp_path: Path, forked_vllm: Path) -> None:
    """Two ranks as two nodes, with a real server each: both generate, each gets its weights through memory of the rank
    beside it, and engine and actor agree. The timeline of each step shows it."""
    config = job_config(
        files,
        tmp_path / "run",
        steps=2,
        rollout__limits__max_concurrent_sequences=16,
        rollout__sync__verify_every=1,
        rollout__servers__colocate="true",
        observe__timeline=2,
        **QUICK | local_settings("vllm") | {"rollout__servers__python": str(forked_vllm)},
    )
    receivers = run_ranks(_train_as_two_nodes, 2, config, timeout_s=500)
    assert receivers == [[0, 1]] * 2, "each hands weights to its neighbour"
    rows = read_metrics(tmp_path / "run")[1:]
    assert len(rows) == 2 and all(row["rollout/servers_live"] == row["rollout/canary_servers"] == 2 for row in rows)
    assert all(row["mismatch/logprob_abs_diff_mean"] < 1e-3 for row in rows)
    for name in ("server_0", "node1_server_0"):
        asked = (tmp_path / "run" / "servers" / f"{name}.log").read_text().count("POST /inference/v1/generate")
        assert asked > 10, f"{name} has generated"
    for row in rows:
        _assert_the_timeline_adds_up(tmp_path / "run" / "timeline", row)


def _assert_the_timeline_adds_up(directory: Path, row: dict[str, Any]) -> None:
    """Each group's request lies in the rollout, on one of the two servers, and its grading begins as it ends; the
    stages of the sync fill their sync."""
    events = read_timeline(directory / f"step_{row['step']:06d}.json.gz")["traceEvents"]
    phases, tracks = nested(events)[0, "phases"], overlapping(events)
    servers = [track for track in tracks if track.startswith("requests http://")]
    requests = [span for track in servers for span in tracks[track]]
    assert len(servers) == 2
    rollouts = [phase for phase in phases if phase.name == "rollout"]
    assert all(any(one.start <= span.start and span.end <= one.end for one in rollouts) for span in requests)
    answered: dict[str, int] = {}
    for span in requests:
        answered[span.name] = max(span.end, answered.get(span.name, 0))  # the attempt that landed is the last
    assert len(answered) == row["prune/prompts_generated"] == len(requests) - row["rollout/retries"]
    assert {span.name: span.start for span in tracks["grading"]} == answered
    [step] = [phase for phase in phases if phase.name == "step"]
    assert all(step.start <= span.start <= span.end <= step.end for span in tracks["grading"])
    stages = nested(events)[0, "weight sync"]
    [sync] = [phase for phase in phases if phase.name == "sync"]
    assert sync.start <= stages[0].start and stages[-1].end <= sync.end
    assert {"reviving", "waking", "sending"} <= {stage.name for stage in stages}
    assert all(later.start == stage.end for stage, later in itertools.pairwise(stages)), "none is missing between two"


def _train_as_two_nodes(config: Config) -> list[int]:
    os.environ["LOCAL_RANK"] = "0"  # an agent of torchrun each
    with Run(prepare_job(config, 2)) as run:
        receivers = list(run.loop._engine.receivers)
        train(run)
    return receivers


def _asks_for_its_key(server: LaunchedServer, engine: str) -> None:
    """Everywhere, its development mode included; and the key stands neither in a command line nor in its log."""
    own = {"vllm": "/weight_info", "sglang": "/model_info"}[engine]
    for path in (own, "/server_info", "/health", "/v1/models"):
        with pytest.raises(Refused, match="HTTP 401"):
            Http(server.url).get(path, Done, timeout_s=30)
    writes = {"vllm": "/collective_rpc", "sglang": "/update_weights_from_tensor"}[engine]
    with pytest.raises(Refused, match="HTTP 401"):
        Http(server.url, "another-key").do(writes, {"method": "dppo_model"}, timeout_s=30)
    assert Http(server.url, server.api_key).get(own, NamedWeights, timeout_s=30)
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            assert server.api_key.encode() not in process.read_bytes()
    assert server.api_key not in server.log.read_text(errors="replace")


def _only_server(engine: ServerEngine) -> LaunchedServer:
    assert engine._job_servers is not None
    [server] = engine._job_servers.local
    return server


def test_a_server_that_cannot_start_is_said_with_its_log(files: Path, tmp_path: Path) -> None:
    """SGLang, in an environment without it; a stand-in for vLLM: test_identity.py and test_servers_everywhere.py."""
    servers = {"rollout__servers__launch": "local", "rollout__servers__python": sys.executable}
    job = prepare_job(config := job_config(files, tmp_path / "run", rollout__engine="sglang", **servers), 1)
    said = r"(?s)ended with code 1 before it was ready.*No module named '?sglang.*\nrollout.servers.python: \S+ has no "
    with pytest.raises(UserError, match=said):
        ServerEngine(config, job.architecture, job.tokenizer)
