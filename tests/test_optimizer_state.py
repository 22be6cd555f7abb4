"""A save gathers no model: each parameter's optimizer state is on one rank, and only what crosses a border is sent."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from support.launch import run_ranks
from support.tiny import Parallel, build_actor, plan_for, random_samples, write_model

from dppo_megatron.actor import optimizer
from dppo_megatron.actor.optimizer import LeanDistributedOptimizer, Spread, build_optimizer
from dppo_megatron.algorithms.objectives import supervised
from dppo_megatron.config.schema import OptimizerConfig
from dppo_megatron.platform.capabilities import Machine
from dppo_megatron.platform.hook import Accelerator


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.integers(1, 8))
def test_pieces_cover_every_parameter(sizes: list[int], ranks: int) -> None:
    """Of a buffer of parameters: each element is in one piece, and each rank's pieces fill its stretch."""
    total = sum(sizes)
    stretch = -(-total // ranks)
    held = dict.fromkeys(range(ranks), 0)
    start = 0
    for size in sizes:
        spread = Spread.of(start, start + size, stretch)
        covered = [element for piece in spread.pieces.values() for element in range(piece.start, piece.stop)]
        assert covered == list(range(size)) and spread.writer in spread.pieces
        for rank, piece in spread.pieces.items():
            held[rank] += piece.stop - piece.start
        start += size
    assert all(held[rank] == max(0, min(stretch, total - rank * stretch)) for rank in range(ranks))


def _measure(model: Path, parallel: Parallel) -> dict[str, Any]:
    """On ranks: elements of optimizer state that a save and a load hold, the largest parameter, what was sent."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values

    actor = build_actor(model, parallel)
    samples = random_samples(6, 37)
    actor.update(samples, plan_for(samples, parallel), supervised())
    sent: list[int] = []
    message = dist.P2POp

    def counted(operation: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if operation is dist.isend:
            sent.append(tensor.numel())
        return message(operation, tensor, *args, **kwargs)

    def elements(state: dict[str, Any]) -> int:
        return sum(value.data.numel() for value in nested_values(state["optimizer"]["param_state"]))

    with patch.object(dist, "P2POp", counted):
        saving = elements(actor.sharded_state())
    parameters = [p.numel() for p in actor._parameters()]
    return {
        "saving": saving,
        "loading": elements(actor.sharded_state(loading=True)),
        "sent": sum(sent),
        "all": 3 * sum(parameters),
        "largest": 3 * max(parameters),
    }


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_each_state_is_held_once(tmp_path: Path, family: str) -> None:
    """Four ranks together hold each element once (all of them held all of them before), and none much more than its
    share; a parameter travels only where it crosses one of the three borders (six with experts: two buffers)."""
    parallel = Parallel(dp=4, distributed_optimizer=True)
    ranks = run_ranks(_measure, 4, write_model(tmp_path / "model", family=family), parallel)
    assert sum(rank["saving"] for rank in ranks) == ranks[0]["all"]
    for rank in ranks:
        assert rank["saving"] <= rank["all"] / 4 + 2 * rank["largest"]
        assert rank["loading"] <= rank["all"] / 4 + 4 * rank["largest"] < rank["all"]
    assert 0 < sum(rank["sent"] for rank in ranks) <= 6 * ranks[0]["largest"]


def _against_megatron(model: Path, parallel: Parallel) -> tuple[int, int]:
    """On ranks: how many tensors this rank writes, and how many of those Megatron's gather makes too, alike."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    actor = build_actor(model, parallel)
    samples = random_samples(6, 37)
    actor.update(samples, plan_for(samples, parallel), supervised())
    metadata = {"chained_optim_avoid_prefix": True}
    described = actor._chunks[0].sharded_state_dict()
    written = alike = 0
    for part in actor._optimizer.chained_optimizers:
        mine = part.sharded_param_state_fully_reshardable(described, metadata=metadata)
        theirs = DistributedOptimizer.sharded_param_state_fully_reshardable(part, described, metadata=metadata)
        for place, states in mine.items():
            for name, state in states.items():
                other = theirs[place][name]
                written += 1
                alike += state.key == other.key and torch.equal(state.data, other.data)
    return written, alike


def test_equals_megatrons_gather(tmp_path: Path) -> None:
    """Key for key and bit for bit what Megatron's own gathers, on three ranks."""
    parallel = Parallel(dp=3, distributed_optimizer=True)
    ranks = run_ranks(_against_megatron, 3, write_model(tmp_path / "model"), parallel)
    assert all(written == alike > 0 for written, alike in ranks)


def _decoupled(model: Path) -> float:
    """On a rank: the norm of what an optimizer steps on that takes its gradients from `decoupled_grad`, as Megatron's
    for fewer bits and for `cpu_offload` do."""
    parallel, samples, found = Parallel(distributed_optimizer=True), random_samples(6, 37), []
    actor = build_actor(model, parallel, max_grad_norm=1e-3)
    optimizer = actor._optimizer
    optimizer.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True

    def step() -> None:
        found.append(torch.cat([p.decoupled_grad.flatten() for p in optimizer.get_parameters()]).norm().item())

    optimizer.step_with_ready_grads = step
    assert actor.update(samples, plan_for(samples, parallel), supervised()).grad_norm > 1e-2
    return found[0]


def test_gradients_of_every_optimizer_are_clipped(tmp_path: Path) -> None:
    assert run_ranks(_decoupled, 1, write_model(tmp_path / "model")) == [pytest.approx(1e-3, rel=1e-3)]


def _before_the_first_step(model: Path) -> bool:
    """On a rank: whether an optimizer that keeps the main parameters itself saves what they will begin as."""
    actor = build_actor(model, Parallel(distributed_optimizer=True))
    described = actor._chunks[0].sharded_state_dict()
    [part] = actor._optimizer.chained_optimizers
    part.__class__ = LeanDistributedOptimizer
    part.optimizer.state.clear()  # as that optimizer has none
    part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
    saved = part.sharded_param_state_fully_reshardable(described)
    for place, (param, _) in enumerate(part._spreads()):
        states = {kind: state.data for kind, state in saved[place].items()}
        assert torch.equal(states.pop("param"), param.float())
        assert all(torch.equal(moment, torch.zeros_like(param)) for moment in states.values())
    return len(saved) == len(list(actor._parameters()))


def test_a_save_before_the_first_step(tmp_path: Path) -> None:
    assert run_ranks(_before_the_first_step, 1, write_model(tmp_path / "model")) == [True]


def _widened(model: Path) -> list[str]:
    """On a rank: the states that a save takes off the device, of an optimizer like Transformer Engine's with moments in
    16 bits."""
    actor = build_actor(model, Parallel(distributed_optimizer=True))
    described = actor._chunks[0].sharded_state_dict()
    [part] = actor._optimizer.chained_optimizers
    part.__class__ = LeanDistributedOptimizer
    part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
    inner = part.optimizer
    for group in inner.param_groups:
        for own in group["params"]:
            moments = {name: torch.rand_like(own, dtype=torch.bfloat16) for name in ("exp_avg", "exp_avg_sq")}
            inner.state[own] = {**moments, "master_param": own.detach().clone()}
    inner.get_unscaled_state = lambda own, name: inner.state[own][name].float()
    copies: list[torch.Tensor] = []

    def cpu(tensor: torch.Tensor) -> torch.Tensor:
        copies.append(tensor.clone())
        return copies[-1]

    with patch.object(torch.Tensor, "cpu", cpu):
        saved = part.sharded_param_state_fully_reshardable(described)
    storages = {copy.data_ptr() for copy in copies}
    return [kind for states in saved.values() for kind, one in states.items() if one.data.data_ptr() in storages]


def test_a_save_keeps_no_copies_on_the_device(tmp_path: Path) -> None:
    """Moments in 16 bits are saved in float32: copies, which an asynchronous save would hold for steps. What is in
    float32 is the optimizer's own and stays for Megatron to copy."""
    [found] = run_ranks(_widened, 1, write_model(tmp_path / "model", num_hidden_layers=2))
    assert len(found) == 38 and set(found) == {"exp_avg", "exp_avg_sq"}


def _resumed_on_the_host(model: Path, root: Path) -> list[dict[str, torch.Tensor]]:
    """On a rank, with Megatron's optimizer of `cpu_offload`: the weights of a run that goes on after a save and of one
    that loads it, before and after the next update. What lies in the model's buffers stands for the device."""
    from megatron.core.optimizer import distrib_optimizer, optimizer_config

    from dppo_megatron.checkpoint.store import CheckpointStore, describe, load_checkpoint

    parallel, samples = Parallel(distributed_optimizer=True, dtype=torch.bfloat16), random_samples(6, 37)
    buffers: list[int] = []

    def build() -> Any:
        actor = build_actor(model, parallel)
        buffers.extend(buffer.param_data.untyped_storage().data_ptr() for one in actor._model for buffer in one.buffers)
        actor.start_phase(replace(actor._config.optimizer, cpu_offload=1.0), total_steps=10)
        return actor

    def is_device(_: Accelerator, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in buffers

    with (
        patch.object(optimizer, "this_machine", lambda: Machine((9, 0), "")),
        patch.object(optimizer_config, "is_te_min_version", lambda version: True),
        patch.object(distrib_optimizer, "HAVE_APEX_OR_TE", True),
        patch.object(Accelerator, "is_device", is_device),
    ):
        first = build()
        first.update(samples, plan_for(samples), supervised())
        store = CheckpointStore(root, run="mine", assets=model, keep=2, async_save=False)
        store.save(first, {}, describe(1, {}, run="mine"))
        second = build()
        load_checkpoint(root / "step_000001", second)
        actors, found = (first, second), []
        found += [{name: tensor.clone() for name, tensor in actor.weights()} for actor in actors]
        for actor in actors:
            [part] = actor._optimizer.chained_optimizers
            assert len(part.optimizer.cpu_optimizers) == len(list(actor._parameters()))
            actor.update(samples, plan_for(samples), supervised())
        return found + [{name: tensor.clone() for name, tensor in actor.weights()} for actor in actors]


def test_an_optimizer_on_the_host_is_resumed(tmp_path: Path) -> None:
    """Its groups named classes, which no checkpoint may hold: none could be loaded. Step count and moments by the next
    update, bit for bit."""
    model = write_model(tmp_path / "model", num_hidden_layers=2)
    [(saved, loaded, went_on, resumed)] = run_ranks(_resumed_on_the_host, 1, model, tmp_path / "checkpoints")
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in saved.items())
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in went_on.items())
    assert not any(torch.equal(tensor, resumed[name]) for name, tensor in saved.items() if tensor.ndim > 1)


def test_main_parameters_are_kept_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of fewer bits: Transformer Engine's optimizer loads no lower halves that a checkpoint holds as numbers."""
    given: list[Any] = []
    monkeypatch.setattr(optimizer, "this_machine", lambda: Machine((9, 0), ""))
    monkeypatch.setattr(optimizer, "MegatronOptimizerConfig", lambda **settings: settings)
    monkeypatch.setattr(optimizer, "get_megatron_optimizer", lambda config, *_, **__: given.append(config))
    build_optimizer(OptimizerConfig(moments_dtype="bfloat16"), [], torch.bfloat16)
    assert given[0]["use_precision_aware_optimizer"] and given[0]["store_param_remainders"] is False
