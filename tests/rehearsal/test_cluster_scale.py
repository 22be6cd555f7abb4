"""One rank of a job of 256 and of 1,024, alone in its process: what a cluster's size costs each of its ranks.

torch's `fake` process group says that all the others are there (`benchmarks/plane/actor.py`). What they would tell is
written down from the layout and compared with what this rank's real actor tells. Seconds are in that benchmark; here
stand counts, memory and descriptors.
"""

from __future__ import annotations

import gc
import math
import os
import resource
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch.distributed as dist
from support.launch import run_ranks
from support.tiny import random_samples

from dppo_megatron.actor.layout import build_layout, start_process_group
from dppo_megatron.config.schema import LayoutConfig
from dppo_megatron.distributed import (
    barrier,
    clock_offset,
    from_rank_zero,
    gather_all,
    to_rank_zero,
)
from dppo_megatron.packing.alignment import PackingLayout, packing_layout
from dppo_megatron.packing.planner import plan_microbatches
from dppo_megatron.rollout.sync.colocated import SharedMemoryChannel, vllm_offer
from dppo_megatron.steps.exchange import Replicas, exchange
from dppo_megatron.steps.step import UpdatePlan, sizes_of
from dppo_megatron.types import Completion, Group, Prompt, RolloutPrompt
from dppo_megatron.weights.routes import Catalogue

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from plane.actor import GB, one_rank, write_shape
from plane.routes import KEYS, QWEN3_235B, messages, reports_of_all


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shape")
    write_shape(folder)
    return folder


def _one_rank(rank: int, world: int, model: Path) -> dict[str, Any]:
    """What `one_rank` finds, as numbers; and the plan of a step."""
    found = one_rank(rank, world, model)
    samples, routes = random_samples(2048, 1000), found.pop("routes")
    layout = packing_layout(found.pop("config"), world)
    packs = plan_microbatches(samples, layout=layout, max_tokens_per_microbatch=4096)
    return found | {
        "messages": messages(routes) / len(routes),
        "packed": sum(len(pack.members) for packs in packs.microbatches for pack in packs),
    }


@pytest.mark.slow
@pytest.mark.parametrize("world", [256, 1024])
def test_one_rank_of_many(world: int, model: Path) -> None:
    """Of a rank in a middle stage: memory, groups, messages, plan; and it tells what the benchmark writes down."""
    found = run_ranks(_one_rank, 1, world // 2 + 5, world, model)[0]
    assert found["report"] and found["keys"]
    assert found["memory"] <= GB
    assert len(found["groups"]) <= 20
    assert found["messages"] <= 256, "sends and receives of a bucket, whatever the size of the job"
    assert found["packed"] == 2048


def test_what_a_rank_looks_at_does_not_grow_with_the_job() -> None:
    """Blocks, of which 32 sets of ranks hold the experts and the split weights; and descriptions that are read."""
    full = replace(QWEN3_235B, tp=8, pp=4, ep=8)
    small, large = (Catalogue(reports_of_all(world, full), KEYS) for world in (256, 1024))
    assert len(small.blocks) == len(large.blocks) <= 200
    gc.collect()
    before = len(gc.get_objects())
    plan = large.plan(range(1024), 1 << 27, 777)
    gc.collect()
    kept = len(gc.get_objects()) - before
    assert kept <= 12 * len(plan), "objects that Python's collector visits: 30 and more a bucket with one for a unit"
    looked = [
        sum(len(bucket.roles) for bucket in c.plan(range(w), 1 << 29, 7)) for c, w in ((small, 256), (large, 1024))
    ]
    assert looked[0] == looked[1] <= 20_000


NODES = (4, 4, 3, 4, 1, 4)
"""Ranks of each made-up node."""


def _descriptors(port: int) -> list[int]:
    """Open before the job starts as `train` does, with its groups made, and after all that ranks say to each other."""

    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    dist.destroy_process_group()
    rank, world = int(os.environ["RANK"]), sum(NODES)
    starts = np.cumsum((0, *NODES))
    node = int(np.searchsorted(starts, rank, side="right")) - 1
    os.environ |= {"LOCAL_RANK": str(rank - starts[node]), "LOCAL_WORLD_SIZE": str(NODES[node])}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}  # as torchrun does
    counts = [count()]
    start_process_group()
    layout = build_layout(LayoutConfig(tensor_parallel=2, context_parallel=2), 0)
    counts.append(count())
    barrier()
    assert from_rank_zero(lambda: 7) == 7
    assert gather_all([rank]) == list(range(world))
    assert to_rank_zero(rank) == (list(range(world)) if rank == 0 else [])
    offset_s, within_s = clock_offset(time.perf_counter)
    assert abs(offset_s) <= within_s + 1e-9, "one machine, one clock"
    counts.append(count())
    replicas = Replicas.agree(layout.data_parallel_rank)
    assert replicas.node.tolist() == np.repeat(starts[:-1], NODES).tolist()
    selected = [RolloutPrompt(Prompt(k, "", (1, 2), "", ""), 1.0, 1.0) for k in range(2 * world)]
    groups = [
        Group(
            one, tuple(Completion(np.array([k, j]), np.zeros(2, np.float32), "stop", "") for j in (0, 1)), np.zeros(2)
        )
        for k, one in enumerate(selected)
    ]
    rows = np.random.default_rng(0).permutation(4 * world)  # so that replicas train on what is held everywhere
    lengths = np.full(len(rows), 2)
    pack = plan_microbatches(
        sizes_of(rows, lengths, selected, 2), layout=PackingLayout(layout.data_parallel), max_tokens_per_microbatch=64
    )
    plan = UpdatePlan(rows, lengths, *np.zeros((4, len(rows))), pack, True)
    holders = np.arange(2 * world) % world
    held = {k: group for k, group in enumerate(groups) if holders[k] == rank}
    [update] = exchange([plan], held, holders, selected, 2, replicas)
    assert all(sample.token_ids[2] == rows[place] // 2 for place, sample in update.samples.items()) and update.samples
    counts.append(count())
    barrier()  # nobody's connections end before all have counted
    return counts


@pytest.mark.slow
def test_ranks_connect_to_those_they_talk_to() -> None:
    """20 ranks of six made-up, uneven nodes: what all ranks say together connects each, rank 0 too, to logarithmically
    many; the exchange of tokens to its own node and a few ranks of each other one, not to all."""
    world = sum(NODES)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    found = run_ranks(_descriptors, world, store.port, timeout_s=500)
    logarithm = math.ceil(math.log2(world))
    for rank, (before, made, together, after) in enumerate(found):
        assert made - before <= 100
        assert together - made <= 2 * logarithm
        node = int(np.searchsorted(np.cumsum(NODES), rank, side="right"))
        assert after - together <= NODES[node] + sum(math.ceil(max(NODES) / size) for size in NODES)


def _limit() -> tuple[int, int]:
    dist.destroy_process_group()
    del os.environ["RANK"]
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    start_process_group()
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def test_a_rank_may_open_what_it_is_allowed() -> None:
    """1,024 open files are a usual limit, and rank 0 of a large job may need more: its store, a save's plan."""
    soft, hard = run_ranks(_limit, 1)[0]
    assert soft == (1 << 20 if hard == resource.RLIM_INFINITY else hard)


def _offers_of_two_buckets() -> tuple[list[list[int]], int]:
    """On a rank: from which ranks it knows the offers, and how many messages it has sent."""
    me, sent = dist.get_rank(), []
    channel = SharedMemoryChannel(None, {"a": (2, 3, 5), "b": (4,)}, vllm_offer, 1 << 20, 60)
    if me not in channel.receivers:
        return [], 0
    send = dist.send_object_list
    dist.send_object_list = lambda *given, **how: (sent.append(1), send(*given, **how))  # type: ignore[assignment]
    dist.all_gather_object = None  # type: ignore[assignment]
    found: Any = [channel._exchange({("a", turn): {"from": me}}) for turn in range(2)]
    return [[cast(Any, offer)["from"] for part in parts for offer in part.values()] for parts in found], len(sent)


def test_offers_go_to_rank_zero_alone() -> None:
    """Each of the others sends one message a bucket, where all to all takes as many steps as there are ranks. In the
    order of ranks, of which one has no server beside it."""
    first, *others = run_ranks(_offers_of_two_buckets, 6)
    assert first == ([[0, 2, 3, 4, 5]] * 2, 0)
    assert others == [([], 0), *[([[], []], 2)] * 4]
