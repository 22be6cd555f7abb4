"""Steps that stream into one another: real servers, answers of very different lengths, two steps ahead."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file, save_file
from support.engines.servers import Reference
from support.job import read_metrics
from support.launch import run_ranks
from support.served import LONG, Served, generate_while, prompts_of, requests_for, train_on_this_rank

from dppo_megatron.rollout.engine import Sampling
from dppo_megatron.workbench.runs.trace import read_trace


def long_answers(model: Path, directory: Path, push: float) -> Path:
    """The model with its end of sequence made rare: answers are geometric, some of many times the mean."""
    shutil.copytree(model, directory)
    [weights] = directory.glob("*.safetensors")
    tensors = load_file(weights)
    table = tensors["model.embed_tokens.weight"]
    end = json.loads((directory / "config.json").read_text())["eos_token_id"]
    table[:, 0] = push
    table[end, 0] = -push
    save_file(tensors, weights, {"format": "pt"})
    return directory


def test_steps_stream_into_one_another(served: Served, tmp_path: Path) -> None:
    """With two steps ahead, through evaluations, checkpoints and syncs while answers are under way: every step trains
    on what it has drawn, none older than two syncs. Resumed from the middle a run chooses the same prompts."""
    model = long_answers(served.files / "model", tmp_path / "model", 0.15)
    seconds: dict[int, float] = {}
    chosen: dict[str, list[list[int]]] = {}
    for name, ahead in (("alone", 0), ("streams", 2), ("resumed", 2)):
        run = tmp_path / name
        config = served.config(
            run,
            model__hf_path=str(model),
            steps=8,
            rollout__prompts_per_step=4,
            sft__steps=0,
            eval__every_steps=3,
            checkpoint__every_steps=4,
            rollout__async_steps=ahead,
            rollout__sync__in_flight="continue",
            rollout__sync__verify_every=0,
            rollout__sampling__max_completion_tokens=300,
            rollout__limits__max_concurrent_sequences=64,
            reward__function="support.faulty:length_parity",
            reward__min_self_consistency=0,
        )
        if name == "resumed":
            config.checkpoint.resume = str(tmp_path / "streams" / "checkpoints" / "step_000004")
        run_ranks(train_on_this_rank, 1, config, 1, timeout_s=500)
        rows = [row for row in read_metrics(run, with_time=True) if row["step"] and "rollout/staleness_mean" in row]
        assert all(0 <= row["rollout/staleness_mean"] <= row["rollout/staleness_max"] <= ahead for row in rows)
        oldest = max(row["rollout/staleness_max"] for row in rows)
        assert oldest == ahead
        labels = [[one["label"] for one in row["prune/ledger"] if one["name"] == "rollout/stale"] for row in rows]
        assert labels == [["biased"] * (ahead > 0)] * len(rows)
        assert all(np.isfinite(row["mismatch/logprob_abs_diff_mean"]) for row in rows)
        trace = read_trace(str(run / "trace.jsonl"))
        chosen[name] = [step.prompt_index.tolist() for step in trace.steps]
        seconds[ahead] = float(np.mean([row["time/step_s"] for row in rows[3:]]))
        lengths = np.concatenate([step.rollouts.lengths.ravel() for step in trace.steps])
        print(name, f"{seconds[ahead]:.2f} s a step, mean {lengths.mean():.0f} tokens, longest {lengths.max()}")
        print([round(row["rollout/staleness_mean"], 2) for row in rows], [round(row["time/step_s"], 2) for row in rows])
    assert chosen["resumed"] == chosen["streams"][4:]


def test_another_trainer_goes_on_with_what_is_in_flight(served: Served, tmp_path: Path) -> None:
    """Looked at in mid-generation, a rollout ends as the weights draw it; so does one of a trainer that has only what
    was seen. What it had is not sampled again, and every token scores as the weights do, across all seams."""
    config = served.config(tmp_path, rollout__async_steps=2, rollout__sync__in_flight="continue")
    reference, sampling = Reference(served.files / "model", 9), Sampling(4 * LONG, 1.0, 0)
    requests, states = requests_for(prompts_of(config)[:12]), list[dict[str, Any]]()
    engine = served.engine(config)
    engine.load_weights(reference.weights)

    def look() -> None:
        while not states or states[-1]["reasons"].count("abort") <= 10:  # a slow machine may have only begun
            states.extend(engine.in_flight().values())
            assert states[-1]["reasons"].count("abort") > 10 or len(states[-1]["reasons"]) < 96

    first = generate_while(engine, requests, look, tokens_each=4 * LONG, wait_s=0.6)
    assert engine.statistics().retries == 0
    state, other = states[-1], served.engine(config)
    other.weights_version = engine.weights_version - 1
    other.load_weights(reference.weights)
    other.start(requests, sampling, state)
    second = list(other.finish().values())
    assert other.statistics().retries == 0
    columns = state["places"], state["lengths"], np.cumsum(state["lengths"]), state["reasons"]
    unfinished = 0
    for (group, place), length, end, reason in zip(*columns, strict=True):
        kept = state["tokens"][end - length : end].tolist(), state["logprobs"][end - length : end].tolist()
        unfinished += reason == "abort"
        for found in (first, second):
            one = found[8 * group + place]
            assert (one.token_ids[:length].tolist(), one.logprobs[:length].tolist()) == kept
            assert len(one.token_ids) == length or (reason == "abort" and len(one.token_ids) > length)
    assert unfinished > 10
    assert served.same(first, second)
    for found in (first, second):
        assert reference.difference(requests, found).max() < 1e-3
