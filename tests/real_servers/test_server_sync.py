"""Weights into real servers: receipts, versions of tokens, training, and syncs that fail half-way."""

from __future__ import annotations

import json
import resource
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.engines.servers import Reference
from support.job import QUICK, read_metrics
from support.launch import run_ranks
from support.logged import logged_lines
from support.served import (
    LONG,
    Served,
    generate_while,
    prompts_of,
    rank_zero,
    requests_for,
    send,
    sync_until_all_live,
    train_on_this_rank,
)

from dppo_megatron.rollout.engine import Sampling
from dppo_megatron.rollout.servers.http import Refused
from dppo_megatron.rollout.servers.protocol import TensorNote
from dppo_megatron.rollout.sync.colocated import OFFERS, SharedBuffer
from dppo_megatron.rollout.sync.receipts import canary_difference
from dppo_megatron.types import RunAborted

pytestmark = pytest.mark.slow


def test_a_tensor_that_differs_is_named(served: Served, tmp_path: Path) -> None:
    """One number of one tensor is changed on the way: the receipt stops the run with the tensor's name."""
    config = served.config(tmp_path, 1, rollout__sync__channel="disk", rollout__sync__verify_every=1)
    engine = served.engine(config)
    server: Any = rank_zero(engine).fleet.members[0].server

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
    with pytest.raises(RunAborted, match=r"layers\.1\.input_layernorm\.weight"):
        engine.load_weights(Reference(served.files / "model", 5).weights)


def test_the_canary_catches_stale_packed_weights(served: Served, tmp_path: Path) -> None:
    """vLLM's plain reload leaves the tied output layer's packed copy old: digests agree, the canary does not."""
    if served.name != "vllm":
        pytest.skip("SGLang multiplies with the weights it shows")
    engine = served.engine(served.config(tmp_path, 1, rollout__sync__channel="disk", rollout__sync__verify_every=1))
    requests = requests_for(prompts_of(engine._config)[:1])
    old, new = Reference(served.files / "model", 4), Reference(served.files / "model", 5)
    engine.load_weights(old.weights)
    server: Any = rank_zero(engine).fleet.members[0].server
    server._extended = False  # as a server that was started without this project's worker extension
    engine.load_weights(new.weights)
    answers = engine.probe(requests, Sampling(LONG, 1.0, 0))
    scored = [
        new.logprobs(r.prompt.token_ids, c.token_ids.tolist()) for r, (_, c) in zip(requests, answers, strict=True)
    ]
    with pytest.raises(RunAborted, match=f"{served.servers[0].url} scores a canary"):
        canary_difference([name for name, _ in answers], [c.logprobs for _, c in answers], scored, bound=0.05)


@pytest.mark.parametrize("world_size", [1, 2])
def test_training_through_servers(served: Served, tmp_path: Path, world_size: int) -> None:
    """Three steps, alone and on two data-parallel ranks, of groups of several sizes; engine and actor agree in every
    step, and each prompt has as many completions as it was to have."""
    sizes = {"objective__advantage": "rloo", "pruning__prompt__group_size_factor": 2.0, "pruning__prompt__rate": 0.0}
    config = served.config(tmp_path / "run", steps=3, rollout__sync__verify_every=2, **QUICK | sizes)
    run_ranks(train_on_this_rank, world_size, config, world_size, timeout_s=300)
    rows = read_metrics(tmp_path / "run")[1:]
    groups = [json.loads(line)["rewards"] for line in (tmp_path / "run" / "trace.jsonl").read_text().splitlines()[1:]]
    assert len(rows) == len(groups) == 3 and len({len(group) for step in groups for group in step}) > 1
    for row, step in zip(rows, groups, strict=True):
        assert row["prune/completions_generated"] == sum(map(len, step)) == 16 * 8
        assert row["mismatch/logprob_abs_diff_mean"] < 1e-3 and row["rollout/staleness_mean"] == 0
        assert row["rollout/servers_live"] == 2 and row["rollout/retries"] == 0
    trained = [row for row in rows if row["prune/completions_trained"]]
    assert trained and all(row["mismatch/logprob_abs_diff_p99"] < 1e-3 for row in trained)
    assert all(0.999 < row["mismatch/is_ess"] <= 1 for row in trained)


def test_adapters_arrive_merged(served: Served, tmp_path: Path) -> None:
    """Adapters alone are trained, with updates so large that log-probabilities move: engine and actor agree as they do
    when all parameters are, and receipts hold."""
    lora = {"actor__lora__rank": 4, "actor__optimizer__learning_rate": 0.02, "sft__steps": 0, "sft__examples_path": ""}
    config = served.config(tmp_path / "run", steps=3, rollout__sync__verify_every=1, **QUICK | lora)
    run_ranks(train_on_this_rank, 2, config, 2, timeout_s=300)
    rows = read_metrics(tmp_path / "run")[1:]
    assert len(rows) == 3 and any(row["prune/completions_trained"] for row in rows[:-1])
    assert all(row["mismatch/logprob_abs_diff_mean"] < 1e-3 and row["rollout/retries"] == 0 for row in rows)
    base, merged = (load_file(one / "model.safetensors") for one in (served.files / "model", tmp_path / "run" / "hf"))
    name = "model.layers.0.self_attn.q_proj.weight"
    assert (merged[name] - base[name]).norm() > 0.01 * base[name].norm()


@pytest.mark.parametrize("in_flight", ["finish", "continue"])
def test_one_step_off_policy(served: Served, tmp_path: Path, in_flight: str) -> None:
    """Completions are one sync old where the policy waits for them, also over a checkpoint, and at most one elsewhere.
    The last step, which ends the run, looks at nothing ahead. Groups have the sizes that were chosen ahead."""
    config = served.config(
        tmp_path / "run",
        steps=4,
        objective__advantage="rloo",
        pruning__prompt__group_size_factor=2.0,
        pruning__prompt__rate=0.0,
        sft__steps=0,
        checkpoint__every_steps=2,
        rollout__async_steps=1,
        rollout__sync__in_flight=in_flight,
        reward__function="support.faulty:length_parity",  # of the untrained model no answer is right
        reward__min_self_consistency=0,
    )
    run_ranks(train_on_this_rank, 1, config, 1, timeout_s=300)
    rows = read_metrics(tmp_path / "run")[1:]
    staleness = [row["rollout/staleness_mean"] for row in rows]
    assert len(rows) == 4 and staleness[0] == 0
    groups = [json.loads(line)["rewards"] for line in (tmp_path / "run" / "trace.jsonl").read_text().splitlines()[1:]]
    assert [sum(map(len, step)) for step in groups] == [16 * 8] * 4
    assert len({len(group) for step in groups for group in step}) > 1
    assert staleness == [0, 1, 1, 1] if in_flight == "finish" else all(0 <= s <= 1 for s in staleness)
    assert all(np.isfinite(row["mismatch/logprob_abs_diff_mean"]) for row in rows)


@pytest.mark.parametrize(("in_flight", "sleeps"), [("abort", False), ("continue", False), ("continue", True)])
def test_tokens_of_two_versions_are_told_apart(
    served: Served, tmp_path: Path, in_flight: Literal["abort", "continue"], sleeps: bool
) -> None:
    """A sync in mid-generation: tokens before it score as the old weights do, and under `abort` every token is of one
    version. Under `continue` the same completion has both, and nothing is asked for twice; also where the server sleeps
    over its requests before, as a colocated one does."""
    config = served.config(tmp_path, 1, rollout__sync__in_flight=in_flight, rollout__async_steps=1)
    engine, old, new = (
        served.engine(config),
        Reference(served.files / "model", 9),
        Reference(served.files / "model", 10),
    )
    engine.load_weights(old.weights)
    requests = requests_for(prompts_of(config)[:24])
    # a quick machine has answered all of the short ones in 0.2 s: nothing to abort. A busy one has no token by then
    wait_s, tokens_each = (0.0, LONG) if in_flight == "abort" else (0.6, 4 * LONG)

    def sync() -> None:
        if sleeps:
            engine._sync.sleep(keeps=True)
        engine.load_weights(new.weights)

    completions = generate_while(engine, requests, sync, tokens_each=tokens_each, wait_s=wait_s)
    stats = engine.statistics()
    crossed = [c for c in completions if len(c.weights_spans) > 1]
    assert bool(crossed) == (in_flight == "continue")
    first = [c.weights_spans[0][1] for c in crossed]
    assert stats.tokens_read_again is not None and stats.tokens_read_again >= sum(first)
    assert bool(stats.tokens_read_again) == bool(crossed) and (in_flight == "abort" or not stats.retries)
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


def test_a_sync_that_fails_half_way_leaves_nobody_with_mixed_weights(served: Served, tmp_path: Path) -> None:
    """One of two sleeping servers hangs after the first bucket: it is out, with a reason, and gets no request; the
    other has all of the new weights. A later sync takes it back, from the middle of the one it never finished, and
    wakes what of it still sleeps."""
    said = logged_lines()
    config = served.config(
        tmp_path,
        rollout__sync__channel="gloo",
        rollout__limits__sync_timeout_s=6.0,
        rollout__limits__probe_timeout_s=3.0,
    )
    engine, good, bad = served.engine(config), served.servers[0], served.servers[1]
    old, new, newer = (Reference(served.files / "model", seed) for seed in (13, 14, 15))
    engine.load_weights(old.weights)

    def hangs_after_the_first_bucket() -> Iterator[tuple[str, torch.Tensor]]:
        sent = 0
        for name, tensor in new.weights():
            sent += tensor.nbytes
            yield name, tensor
            if sent > 1 << 20:  # the stream has been asked for more than one bucket: the first is there
                send(bad, signal.SIGSTOP)

    engine._sync.sleep()
    engine.load_weights(hangs_after_the_first_bucket)
    assert [member.asleep for member in rank_zero(engine).fleet.members] == [frozenset(), {"kv_cache"}]
    assert engine.health()[good.url] == "live" and engine.health()[bad.url].startswith("out: weight sync failed")
    assert any(bad.url in line and "weight sync failed" in line for line in said)
    requests = requests_for(prompts_of(config)[:8])
    assert new.difference(requests, engine.generate(requests, Sampling(LONG, 1.0, 0))).max() < 1e-3
    send(bad, signal.SIGCONT)
    sync_until_all_live(engine, newer)
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
    server: Any = rank_zero(engine).fleet.members[0].server
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
    requests = requests_for(prompts_of(engine._config)[:8])
    assert whole.difference(requests, engine.generate(requests, Sampling(LONG, 1.0, 0))).max() < 1e-3
    assert rank_zero(engine).fleet.members[0].outages == 0
    buffer.close()


def test_a_full_disk_fails_the_sync(served: Served, tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk: the run stops as for every failed sync, and nothing is there
    that a server could take for weights."""
    engine = served.engine(served.config(tmp_path, 1, rollout__sync__channel="disk"))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, hard))
    try:
        with pytest.raises(RunAborted, match="weight sync 1 over disk failed"):
            engine.load_weights(Reference(served.files / "model", 18).weights)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list((tmp_path / "sync").glob("weights_1"))
