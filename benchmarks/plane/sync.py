"""A weight sync over gloo: what it costs rank 0 to serve four servers instead of one, and the others if one is lost.

Receivers are processes of their own (`receivers.py`) that run the servers' receiving end and hash what arrives. Costs
are CPU seconds of rank 0: with fewer cores than receivers, these set the wall time. The loss of a server is wall time,
over that of an undisturbed sync. The gather is counted: calls of torch.distributed on rank 0 in a pass, per bucket.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from receivers import PipeServer

from dppo_megatron.actor.actor import Actor  # before ranks are forked, which would each import Megatron
from dppo_megatron.actor.layout import build_layout
from dppo_megatron.config.rollout import RolloutConfig
from dppo_megatron.config.schema import ActorConfig, LayoutConfig
from dppo_megatron.rollout.servers.fleet import Fleet
from dppo_megatron.rollout.sync.broadcast import BroadcastChannel
from dppo_megatron.rollout.sync.weight_sync import WeightSync
from dppo_megatron.weights.architecture import read_architecture
from dppo_megatron.weights.hf_files import CheckpointReader
from dppo_megatron.workbench.quickstart.tiny_model import write_tiny_qwen3
from plane.common import NO_ROLLOUTS, Bar, cpu_s, on_ranks

ROUNDS = 5
COUNTED = ("broadcast", "all_gather", "all_reduce", "gather", "scatter", "batch_isend_irecv", "isend", "irecv")


def _tensors(megabytes: int) -> list[tuple[str, torch.Tensor]]:
    return [(f"t{i}", torch.randn(1 << 18)) for i in range(megabytes)]


def _make(servers: list[PipeServer], bucket_mb: int) -> tuple[WeightSync, Fleet]:
    config = RolloutConfig(engine="vllm")
    config.sync.verify_every = 0
    config.limits.sync_timeout_s = 300.0
    for server in servers:
        server.healthy(timeout_s=120)
    fleet = Fleet(servers, config, NO_ROLLOUTS)  # type: ignore[arg-type]
    return WeightSync(config, BroadcastChannel(fleet, "gloo", bucket_mb << 20, 300.0), fleet), fleet


def _undisturbed(count: int, megabytes: int, bucket_mb: int, rounds_timed: int) -> tuple[float, float]:
    """Rank 0's CPU seconds and the wall seconds of a sync of `count` servers."""
    servers, weights = [PipeServer(i) for i in range(count)], _tensors(megabytes)
    try:
        sync, fleet = _make(servers, bucket_mb)
        sync.to(lambda: weights)  # the group is made, memory is touched
        rounds = []
        for _ in range(rounds_timed):
            before, started = cpu_s(), time.perf_counter()
            sync.to(lambda: weights)
            rounds.append((cpu_s() - before, time.perf_counter() - started))
        assert len(fleet.live) == count
        return median(cpu for cpu, _ in rounds), median(wall for _, wall in rounds)
    finally:
        for server in servers:
            server.stop()


def _one_dies(count: int, megabytes: int, bucket_mb: int) -> tuple[float, int]:
    """Wall seconds of a sync during which a server is killed, over an undisturbed one; and how many are live after."""
    num_buckets = megabytes // bucket_mb
    servers = [PipeServer(i, dies_at=2 * num_buckets + num_buckets // 2 if i == 1 else -1) for i in range(count)]
    weights = _tensors(megabytes)
    try:
        sync, fleet = _make(servers, bucket_mb)
        sync.to(lambda: weights)  # the group is made, memory is touched
        started = time.perf_counter()
        sync.to(lambda: weights)
        whole = time.perf_counter() - started
        started = time.perf_counter()
        sync.to(lambda: weights)
        return (time.perf_counter() - started) / whole, len(fleet.live)
    finally:
        for server in servers:
            server.stop()


def _count_gather(model: str, bucket_bytes: int) -> tuple[int, int]:
    """(calls of torch.distributed in one pass to rank 0, buckets) on this rank of a job with TP 2 and PP 2."""
    config = ActorConfig(layout=LayoutConfig(tensor_parallel=2, pipeline_parallel=2))
    architecture = read_architecture(model)
    reader = CheckpointReader(model, architecture)
    actor = Actor(config, build_layout(config.layout, 0), architecture, reader.get, dtype=torch.float32)
    calls = [0]

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def count(*arguments: Any, **named: Any) -> Any:
            calls[0] += 1
            return call(*arguments, **named)

        return count

    originals = {name: getattr(dist, name) for name in COUNTED}
    within = dist.batch_isend_irecv
    for name, call in originals.items():
        if name not in ("isend", "irecv"):  # an exchange counts as one call, whatever its messages
            setattr(dist, name, counted(call))
    assert dist.batch_isend_irecv is not within
    for _ in actor.weights([0], bucket_bytes):
        pass
    return calls[0], actor._stream.num_buckets(bucket_bytes)


def run(smoke: bool) -> list[Bar]:
    """A model of 512 MiB in buckets of 32."""
    megabytes, bucket_mb = (16, 2) if smoke else (512, 32)
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_qwen3(Path(folder), seed=0, num_hidden_layers=4)
        calls, num_buckets = on_ranks(4, _count_gather, folder, 200_000)[0]
    bars = [Bar("sync", f"gather, TP 2 x PP 2: calls a bucket ({num_buckets} buckets)", calls / num_buckets, 1.2)]
    one, four = (_undisturbed(count, megabytes, bucket_mb, 1 if smoke else ROUNDS) for count in (1, 4))
    gigabytes = megabytes / 1024
    bars += [
        Bar("sync", "rank 0, 4 receivers over 1, CPU", four[0] / one[0], 1.25, is_time=True),
        Bar("sync", "rank 0, 1 receiver", one[0] / gigabytes, float("inf"), "CPU s/GiB", is_time=True),
        Bar("sync", "rank 0, 4 receivers", four[0] / gigabytes, float("inf"), "CPU s/GiB", is_time=True),
        Bar("sync", "wall, 4 receivers over 1", four[1] / one[1], float("inf"), is_time=True),
    ]
    ratio, live = _one_dies(4, megabytes, bucket_mb)
    bars.append(Bar("sync", "one of 4 killed mid-way: wall over a whole sync", ratio, 2.0, is_time=True))
    bars.append(Bar("sync", "one of 4 killed mid-way: the others are live", live, 3, at_least=True))
    return bars
