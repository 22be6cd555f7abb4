"""Every recipe of configs/ trains: three steps and a resume of its miniature (`miniature.py`), with real vLLM servers.

What `plan` and a dry run cannot see is the protocol: who asks whom for what, which ranks meet in a call, where a weight
goes. Here the command of the recipe runs in every rank, starts its server on every node, syncs through memory of the
rank beside each worker, and resumes. CI runs six recipes, of which one has every kind of group that any other has,
`make test` the one with experts; DPPO_REHEARSE_ALL=1 runs each one by itself (`make test-rehearsal`).
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from support.engines.servers import needs
from support.job import nearly, read_metrics
from support.launch import run_ranks

from dppo_megatron.workbench.cli import main
from rehearsal.miniature import PROBLEMS, RECIPES, Miniature, Sizes, arguments, miniature, reduced, write_files
from rehearsal.nccl_rule import under_rule

MINIATURES = {recipe.stem: miniature(recipe) for recipe in RECIPES}
ALWAYS = (
    *("qwen3_4b_gsm8k", "qwen3_32b_32gpus_dppo", "qwen3_8b_64k_32gpus", "qwen3_30b_a3b_16gpus_dppo"),
    *("qwen3_235b_a22b_128gpus", "glm_4.5_air_64gpus"),
)
"""What CI runs: one node with a reference policy, then on two nodes pipeline stages, context ranks, experts, and
experts in pipeline stages, also of layers that differ."""
LONG = {"qwen3_4b_gsm8k", "qwen3_32b_32gpus_dppo", "qwen3_8b_64k_32gpus", "qwen3_235b_a22b_128gpus"}
LONG |= {"glm_4.5_air_64gpus"}
RUN = sorted(MINIATURES) if os.environ.get("DPPO_REHEARSE_ALL") else ALWAYS


@dataclass(frozen=True)
class Bench:
    """What all runs share."""

    files: Path
    python: Path


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, forked_vllm: Path) -> Bench:
    """vLLM imported once, problems and models."""
    files = tmp_path_factory.mktemp("rehearsal")
    write_files(files)
    return Bench(files, forked_vllm)


def _rank(small: Miniature, command: list[str], folder: Path) -> int:
    """The recipe's command on one rank, as torchrun's agent of its node starts it."""
    dist.destroy_process_group()  # the job makes its own
    node, local = divmod(int(os.environ["RANK"]), small.ranks_per_node)
    os.environ |= {
        "GROUP_RANK": str(node),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(small.ranks_per_node),
        "DPPO_REHEARSED_NODE": str(node),
        "DPPO_REHEARSED_NOTES": str(folder / "notes.jsonl"),
    }
    sys.stdout = sys.stderr = open(folder / f"rank_{os.environ['RANK']}.log", "w", buffering=1)  # noqa: SIM115
    _be_on_a_device(f"GPU-{node}-{local}")
    code, _ = under_rule(main, command)
    return code


def _be_on_a_device(name: str) -> None:
    from dppo_megatron.rollout import server_engine
    from dppo_megatron.rollout.servers.device_map import RankDevice
    from dppo_megatron.rollout.sync.colocated import OFFERS, vllm_offer

    server_engine.this_device = lambda node, **_: RankDevice(node, frozenset((name,)))  # type: ignore[assignment]
    OFFERS["vllm"] = lambda buffer, tensors: vllm_offer(buffer, tensors) | {"rehearsed_device": name}


def _train(small: Miniature, bench: Bench, folder: Path) -> tuple[str, list[dict[str, Any]], list[dict[str, Any]]]:
    """What rank 0 said, the steps' metrics, and the workers' notes."""
    command = arguments(small, bench.files, folder / "run", bench.python)
    (folder / "notes.jsonl").write_text("")
    codes = run_ranks(_rank, small.sizes.world, small, command, folder, timeout_s=300)
    said = (folder / "rank_0.log").read_text()
    assert codes == [0] * small.sizes.world, said[-4000:]
    notes = [json.loads(line) for line in (folder / "notes.jsonl").read_text().splitlines()]
    return said, read_metrics(folder / "run"), notes


def _check(
    small: Miniature,
    said: str,
    rows: list[dict[str, Any]],
    notes: list[dict[str, Any]],
    syncs: int,
    tolerance: float | None = None,
) -> None:
    """Through memory, to every worker of every replica, the same weights; and they compute what the actor computes."""
    assert "weight sync: ipc (" in said
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    replicas = 2 * small.sizes.nodes
    skips = [row["prune/prompts_generated"] < PROBLEMS for row in rows[2:]]
    assert any(skips) <= small.prunes, "a draw may keep all: an expectation of 6.8 is no promise"
    tolerance = tolerance or (1e-3 if small.is_mixture else 5e-3)  # in float32, in bfloat16: 0.0013 was seen
    for row in rows[1:]:
        assert row["rollout/servers_live"] == small.sizes.nodes and row["rollout/retries"] == 0
        assert row["mismatch/logprob_abs_diff_mean"] < tolerance, "engine and actor compute the same"
    assert [row["rollout/canary_servers"] for row in rows[2:]] == [replicas] * 2
    held: dict[str, list[str]] = defaultdict(list)
    shares: dict[str, set[str]] = defaultdict(set)
    for note in notes:
        held[note["worker"]].append(note["held"])
        # vLLM gives each of a server's workers other experts, and each replica the whole of a dense model
        share = note["worker"].rpartition("-")[2] if small.is_mixture else note["rank"]
        shares[share].add(note["worker"])
    devices = {f"GPU-{node}-{local}" for node in range(small.sizes.nodes) for local in range(small.ranks_per_node)}
    assert set(held) == devices, "every worker of every replica was synced"
    for workers in shares.values():
        [history] = {tuple(held[worker]) for worker in workers}
        assert len(history) == syncs == len(set(history)), "each sync brings new weights, and the same to all"


def test_the_rule() -> None:
    """Every recipe is known, has a run that stands for it, and keeps what it has: no size above one becomes one."""
    assert len(RECIPES) == 24 + 3 + 5 + 1 and len(MINIATURES) == len(RECIPES)
    for small in MINIATURES.values():
        assert any(MINIATURES[name].stands_for(small) for name in ALWAYS), small.recipe
    assert {MINIATURES[name].tied for name in RUN} == {False, True}
    assert max(small.sizes.world for small in MINIATURES.values()) == 8
    assert reduced(Sizes(4, 4, 4, 1, 2)) == Sizes(2, 2, 2, 1, 2)
    assert reduced(Sizes(4, 1, 1, 1, 32, expert=8)) == Sizes(2, 1, 1, 1, 4, expert=2)
    assert reduced(Sizes(1, 4, 1, 1, 2, expert=8)) == Sizes(1, 2, 1, 1, 2, expert=4)


IN_FP8 = (
    "rollout.quantization=fp8",
    "objective.correction.level=token",
    "rollout.sync.max_canary_logprob_diff=0.2",  # two narrow layers, whose rounding does not average out
)


@needs("vllm")
@pytest.mark.slow
@pytest.mark.long
def test_a_recipe_trains_with_servers_in_fp8(bench: Bench, tmp_path: Path) -> None:
    """Two nodes, each with two replicas of two workers, which split matrices between blocks."""
    small = MINIATURES["qwen3_32b_32gpus_dppo"]
    small = replace(small, settings=(*small.settings, *IN_FP8))
    said, rows, notes = _train(small, bench, tmp_path)
    _check(small, said, rows, notes, syncs=4, tolerance=0.1)
    assert all(row["mismatch/logprob_abs_diff_mean"] > 1e-3 for row in rows[1:]), "they are rounded"
    assert all("rollout/quantized" in [one["name"] for one in row["prune/ledger"]] for row in rows[1:])


@needs("vllm")
@pytest.mark.slow
@pytest.mark.long
def test_a_recipe_trains_with_early_stops_and_a_step_ahead(bench: Bench, tmp_path: Path) -> None:
    """Two nodes, a rollout client each, colocated servers that sleep over the next step's requests: every completion of
    a group is asked for alone, and what is stopped is graded by nobody. Resumed, it goes on with what was in flight."""
    early = ("pruning.early_stop.after_tokens=3", "objective.advantage=rloo")
    early += ("rollout.async_steps=1", "rollout.sync.in_flight=continue")
    small = MINIATURES["qwen3_32b_32gpus_dppo"]
    small = replace(small, settings=(*small.settings, *early))
    said, rows, notes = _train(small, bench, tmp_path)
    _check(small, said, rows, notes, syncs=4, tolerance=0.2)  # of weights one update old
    for row in rows[1:]:
        assert row["rollout/stopped_early_count"] > 0 and row["reward/failed_count"] == 0
        assert "rollout/early_stop" in [one["name"] for one in row["prune/ledger"]]
    shutil.rmtree(max((tmp_path / "run" / "checkpoints").glob("step_*")))
    said, again, notes = _train(small, bench, tmp_path)
    assert "rollout: step 3: " in said and "are the checkpoint's" in said, "from both nodes' clients"
    _check(small, said, again, notes, syncs=2, tolerance=0.2)


@needs("vllm")
@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(one, marks=pytest.mark.long) if one in LONG else one for one in RUN])
def test_a_recipe_trains_and_resumes(name: str, bench: Bench, tmp_path: Path) -> None:
    """Three steps; then, without the last checkpoint, as after a kill in step 3, the third step again."""
    small = MINIATURES[name]
    said, rows, notes = _train(small, bench, tmp_path)
    _check(small, said, rows, notes, syncs=4)
    checkpoints = tmp_path / "run" / "checkpoints"
    shutil.rmtree(max(checkpoints.glob("step_*")))
    said, again, notes = _train(small, bench, tmp_path)
    assert "resumed from" in said and "going on at step 3" in said
    _check(small, said, again, notes, syncs=2)
    del rows[3]["rollout/sync_s"]
    ledger, other = (one["prune/ledger"] for one in (rows[3], again[3]))
    assert [(row["name"], row["label"]) for row in ledger] == [(row["name"], row["label"]) for row in other]
    del rows[3]["prune/ledger"]  # its notes have figures, whose last digit may be another
    for key, value in rows[3].items():
        expected = nearly(value, rel=1e-3, abs=1e-6) if isinstance(value, float) else value
        assert again[3][key] == expected, key
