"""Colocated training leaves the device to the servers: counted in bytes of storage, and nothing is lost by it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from support.launch import run_ranks
from support.tiny import Parallel, build_actor, plan_for, random_samples, write_model

from dppo_megatron.actor.actor import Actor
from dppo_megatron.algorithms.objectives import supervised
from dppo_megatron.checkpoint.writers import use_own_writers
from dppo_megatron.config.schema import Config, LoraConfig
from dppo_megatron.steps.loop import Loop


def _device_bytes(actor: Actor) -> dict[str, int]:
    """Bytes of storage of each part that are not one of the host copies."""
    host = {tensor.untyped_storage().data_ptr() for tensor in actor._memory._host.values()}

    def total(tensors: list[torch.Tensor]) -> int:
        storages = {
            t.untyped_storage()._cdata: t.untyped_storage()
            for t in tensors
            if t.untyped_storage().data_ptr() not in host
        }
        return sum(storage.nbytes() for storage in storages.values())

    inner = [part.optimizer for part in actor._optimizer.chained_optimizers]
    moments = [v for adam in inner for state in adam.state.values() for v in state.values() if v.numel() > 1]
    mains = [p.data for adam in inner for group in adam.param_groups for p in group["params"]]
    weights = {p.untyped_storage()._cdata for p in actor._parameters()}
    mains = [p for p in mains if p.untyped_storage()._cdata not in weights]
    return {
        "gradients": total([buffer.grad_data for buffer in actor._memory._buffers()]),
        "optimizer": total(moments + mains),
        "weights": total([p.data for chunk in actor._chunks for p in chunk.parameters()]),
    }


def _save(actor: Actor, directory: Path) -> None:
    if torch.distributed.get_rank() == 0:
        directory.mkdir(parents=True)
    torch.distributed.barrier()
    use_own_writers()
    dist_checkpointing.save({"actor": actor.sharded_state()}, str(directory))


def _load(model: Path, parallel: Parallel, lora: LoraConfig, directory: Path) -> dict[str, Any]:
    """Weights and optimizer state that a checkpoint holds, by an actor that has never left its device."""
    actor = build_actor(model, parallel, lora=lora)
    for parameter in (p for chunk in actor._chunks for p in chunk.parameters()):
        parameter.data.zero_()  # so that what is not in the checkpoint is seen: adapters leave the rest as it began
    loaded = dist_checkpointing.load({"actor": actor.sharded_state(loading=True)}, str(directory))
    actor.load_sharded_state(loaded["actor"])
    weights = {name: tensor.clone() for name, tensor in actor.weights()}
    states = [part.optimizer.state_dict()["state"] for part in actor._optimizer.chained_optimizers]
    return {"weights": weights, "states": states}


def _train(model: Path, parallel: Parallel, lora: LoraConfig, weights: bool | None, directory: Path) -> dict[str, Any]:
    """Three updates, after each of which the actor leaves the device, unless `weights` is None. It is saved after the
    second, and there also after the others: a save must not bring anything back."""
    actor = build_actor(model, parallel, lora=lora)
    samples = random_samples(8, 37)
    plan = plan_for(samples, parallel)
    out: dict[str, Any] = {"bytes": []}
    for update in range(3):
        actor.update(samples, plan, supervised())
        if weights is not None:
            before = _device_bytes(actor)
            # as Transformer Engine's modules keep 8-bit copies of their weights, after a pass without an update too
            of_engine = [module for chunk in actor._chunks for module in chunk.modules() if hasattr(module, "weight")]
            for _ in range(2):  # the second time nothing else is left to leave
                for module in of_engine:
                    module._fp8_workspaces = {"weight": torch.zeros(1, dtype=torch.uint8)}
                actor.offload(weights=weights)
                assert of_engine and not any(module._fp8_workspaces for module in of_engine)
            out["bytes"].append((before, _device_bytes(actor), actor._memory.offloaded))
        if weights is not None or update == 1:
            _save(actor, directory / str(update))
        if weights is not None:
            assert actor._memory.offloaded == out["bytes"][-1][2], "a checkpoint is written from the host"
    out["weights"] = {name: tensor.clone() for name, tensor in actor.weights()}
    return out


def _stay_and_leave(
    model: Path, parallel: Parallel, lora: LoraConfig, directory: Path
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """What `_train` returns and what its second checkpoint holds, of one that stays, one that leaves and one whose
    weights leave too."""
    found = []
    for weights in (None, False, True):
        trained = _train(model, parallel, lora, weights, directory / str(weights))
        found.append((trained, _load(model, parallel, lora, directory / str(weights) / "1")))
    return found


def _load_with_a_canary(model: Path, offload: str) -> tuple[int, frozenset[str]]:
    """How many modules have 8-bit copies when the engine has its weights, and what is away."""
    loop: Any = Loop.__new__(Loop)  # all that a sync and its canary ask of it
    loop.actor, loop._offload, loop._receipts = build_actor(model, Parallel()), offload, {}
    of_engine = [module for chunk in loop.actor._chunks for module in chunk.modules() if hasattr(module, "weight")]
    loop.job = SimpleNamespace(config=Config(), train_prompts=[None])
    loop._engine = SimpleNamespace(receivers=None, load_weights=lambda weights, release: True)

    def score(*_: Any) -> dict[str, float]:
        for module in of_engine:
            module._fp8_workspaces = {"weight": torch.zeros(1, dtype=torch.uint8)}
        return {}

    loop._score = score
    loop._canary = SimpleNamespace(ask=lambda *_: None, judge=lambda scored: scored())
    loop.load_engine()
    return sum(bool(getattr(module, "_fp8_workspaces", {})) for module in of_engine), loop.actor._memory.offloaded


def test_a_canary_leaves_nothing_beside_the_servers(tmp_path: Path) -> None:
    """Its pass for log-probabilities makes 8-bit copies of the weights while servers have taken what was free."""
    model = write_model(tmp_path / "model")
    assert run_ranks(_load_with_a_canary, 1, model, "optimizer") == [(0, frozenset({"gradients", "optimizer"}))]
    [(copies, away)] = run_ranks(_load_with_a_canary, 1, model, "none")
    assert copies and not away, "with the device to itself they stay for the next pass"


def _gradients_left(model: Path, parallel: Parallel) -> list[int]:
    """On a rank, after an update and after an offload: bytes of the main parameters' gradients, which are no views of
    the buffers where these are in bfloat16."""
    actor = build_actor(model, parallel, ddp={"grad_reduce_in_fp32": False})
    samples, found = random_samples(8, 37), []
    for leaves in (False, True):
        if leaves:
            actor.offload()
        else:
            actor.update(samples, plan_for(samples, parallel), supervised())
        groups = [group for part in actor._optimizer.chained_optimizers for group in part.optimizer.param_groups]
        kept = [main.grad for group in groups for main in group["params"] if main.grad is not None]
        found.append(sum(grad.untyped_storage().nbytes() for grad in kept))
    actor.update(samples, plan_for(samples, parallel), supervised())
    return found


@pytest.mark.parametrize("distributed", [False, True])
def test_gradients_in_fewer_bits_leave_too(tmp_path: Path, distributed: bool) -> None:
    """Megatron makes a float32 copy of each rank's share, and keeps it until the next pass."""
    parallel = Parallel(distributed_optimizer=distributed, dtype=torch.bfloat16)
    [(held, left)] = run_ranks(_gradients_left, 1, write_model(tmp_path / "model"), parallel)
    assert held > 0 == left


ALONE = [Parallel(), Parallel(dtype=torch.bfloat16)]
SHARED = [
    Parallel(dp=2, distributed_optimizer=True),
    Parallel(dp=2, distributed_optimizer=True, dtype=torch.bfloat16),
]


@pytest.mark.parametrize("lora", [LoraConfig(), LoraConfig(rank=3)], ids=["all", "lora"])
@pytest.mark.parametrize(
    "parallel", [*ALONE, *(pytest.param(one, marks=pytest.mark.slow) for one in SHARED)], ids=lambda p: f"{p}-{p.dtype}"
)
def test_the_device_is_left(tmp_path: Path, parallel: Parallel, lora: LoraConfig) -> None:
    """While away, gradients and optimizer hold no byte of the device, the weights none or their own; the weights after
    three updates, and a checkpoint that was written meanwhile, are those of an actor that stayed, bit for bit."""
    model = write_model(tmp_path / "model")
    (stayed, saved), *others = run_ranks(_stay_and_leave, parallel.world_size, model, parallel, lora, tmp_path)[0]
    assert stayed["weights"] and saved
    for weights, (left, saved_away) in zip((False, True), others, strict=True):
        assert len(left["bytes"]) == 3
        for before, after, away in left["bytes"]:
            assert all(before.values()) and after["gradients"] == after["optimizer"] == 0
            assert after["weights"] == (0 if weights else before["weights"])
            assert away == {"gradients", "optimizer"} | ({"weights"} if weights else set())
        assert all(torch.equal(tensor, left["weights"][name]) for name, tensor in stayed["weights"].items())
        torch.testing.assert_close(saved_away, saved, rtol=0, atol=0)
