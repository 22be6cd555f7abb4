"""The stream of full tensors out of a sharded model: what every layout gives, to whom, and in how many exchanges."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from support.launch import run_ranks
from support.tiny import Parallel, build_actor, write_model

from dppo_megatron.weights.architecture import read_architecture
from dppo_megatron.weights.hf_files import CheckpointReader

SMALL = 40_000
"""Bytes of a bucket here: the tiny models come in five to ten of them, and some tensors are larger."""
DENSE = [
    Parallel(tp=2),
    Parallel(pp=2, vpp=2),
    Parallel(tp=2, cp=2),
    Parallel(tp=2, pp=2, dp=2, distributed_optimizer=True),
]
EXPERTS = [Parallel(ep=2, dp=2), Parallel(tp=2, etp=2), Parallel(tp=2, ep=2, etp=1, pp=2)]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("dense"), vocab_size=37)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tied"), vocab_size=37, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("experts"), family="qwen3_moe", vocab_size=37)


def _streams(model_path: Path, parallel: Parallel, nodes: Sequence[int]) -> dict[str, Any]:
    """What this rank is given when everybody asks, when the first does, and when the last two do; and its exchanges."""
    os.environ["LOCAL_RANK"] = str(
        [rank for size in nodes or [parallel.world_size] for rank in range(size)][dist.get_rank()]
    )
    actor = build_actor(model_path, parallel)
    world = parallel.world_size
    exchanges, messages = _count(dist.batch_isend_irecv)
    dist.batch_isend_irecv = exchanges
    given: dict[str, Any] = {"buckets": actor._stream.num_buckets(SMALL)}
    for name, to in (("all", None), ("first", [0]), ("last", list(range(world))[-2:])):
        messages.clear()
        given[name] = {key: tensor.numpy().copy() for key, tensor in actor.weights(to, SMALL)}
        given[f"{name} exchanges"], given[f"{name} messages"] = len(messages), sum(messages)
    return given


def _count(call: Callable[..., Any]) -> tuple[Callable[..., Any], list[int]]:
    sizes: list[int] = []

    def counted(operations: list[Any]) -> Any:
        sizes.append(len(operations))
        return call(operations)

    return counted, sizes


def _check(model_path: Path, parallel: Parallel, nodes: Sequence[int] = ()) -> list[dict[str, Any]]:
    """Every tensor of the checkpoint, bit for bit, on the ranks that asked and nowhere else; one exchange a bucket, and
    one more inside the node where there are several of these sizes."""
    reader = CheckpointReader(model_path, read_architecture(model_path))
    results = run_ranks(_streams, parallel.world_size, model_path, parallel, nodes)
    world = len(results)
    for rank, given in enumerate(results):
        for name, asks in (("all", True), ("first", rank == 0), ("last", rank >= world - 2)):
            assert set(given[name]) == (set(reader.names) if asks else set())
            for key, array in given[name].items():
                assert np.array_equal(array, reader.get(key).numpy()), f"{parallel}, rank {rank}: {key}"
            assert given[f"{name} exchanges"] <= given["buckets"] * (2 if nodes else 1)
    return results


@pytest.mark.parametrize("parallel", DENSE, ids=str)
def test_every_layout_gives_the_checkpoint(dense: Path, parallel: Parallel) -> None:
    """What was loaded comes back bit for bit: this is what a sync sends."""
    _check(dense, parallel)


@pytest.mark.parametrize("parallel", EXPERTS, ids=str)
def test_experts_too(experts: Path, parallel: Parallel) -> None:
    """Expert shards lie on other ranks than the rest of their layer."""
    results = _check(experts, parallel)
    assert results[0]["buckets"] < len(results[0]["first"]), "a bucket holds many experts"


@pytest.mark.parametrize(
    ("parallel", "nodes"),
    [(Parallel(tp=2, pp=2, dp=2), (4, 4)), (Parallel(tp=2, pp=2, dp=2), (3, 5)), (Parallel(pp=4), (2, 2))],
    ids=["whole stages", "uneven nodes", "a stage a rank"],
)
def test_nodes_pass_on_what_they_fetch(dense: Path, parallel: Parallel, nodes: Sequence[int]) -> None:
    """The two hops give the same bytes: a colocated sync of a job whose stages lie on several nodes."""
    results = _check(dense, parallel, nodes)
    assert any(given["all exchanges"] > given["buckets"] for given in results), "somebody passes on"


def test_experts_on_other_nodes(experts: Path) -> None:
    """Each node holds a half of the experts, one copy of it."""
    results = _check(experts, Parallel(ep=4, dp=4), (2, 2))
    assert any(given["all exchanges"] > given["buckets"] for given in results)


def test_a_tied_output_layer_is_streamed_once(tied: Path) -> None:
    """Both ends of a pipeline hold the embedding; the stream names it once."""
    _check(tied, Parallel(pp=2))


def test_replicas_send_nothing(dense: Path) -> None:
    """Every rank of a data-parallel job holds all of the model: no rank sends or waits."""
    for given in _check(dense, Parallel(dp=2)):
        assert [given[f"{name} messages"] for name in ("all", "first", "last")] == [0, 0, 0]


def test_only_holders_and_receivers_take_part(dense: Path) -> None:
    """With TP 2 and DP 2, rank 0 is sent what ranks 1 and 3 have, by both in turns; rank 2 has what rank 0 has, and is
    left alone."""
    asked, one, idle, other = (given["first messages"] for given in _check(dense, Parallel(tp=2, dp=2)))
    assert idle == 0 and asked == one + other and abs(one - other) <= 4, "each of the four split keys in turns"
