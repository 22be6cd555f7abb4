"""Megatron's own fields pass through, checked; and those that act on a CPU train the same model."""

from __future__ import annotations

import dataclasses
import re
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.transformer.transformer_config import TransformerConfig
from support.job import REPOSITORY, job_config, write_job_files
from support.launch import run_ranks
from support.tiny import Parallel, build_actor, plan_for, random_samples, write_model
from torch.utils._python_dispatch import TorchDispatchMode

from dppo_megatron.actor.actor import Actor
from dppo_megatron.actor.batch import build_microbatch
from dppo_megatron.actor.layout import build_layout
from dppo_megatron.actor.logprobs import LogprobStore
from dppo_megatron.actor.loss import LossHook
from dppo_megatron.actor.rotary import Rotary
from dppo_megatron.algorithms.objectives import make_objective, supervised
from dppo_megatron.build import what_to_offload
from dppo_megatron.config.schema import ActorConfig, ObjectiveConfig, OptimizerConfig
from dppo_megatron.types import UserError
from dppo_megatron.weights.architecture import read_architecture
from dppo_megatron.weights.hf_files import CheckpointReader

TWO = Parallel(dp=2, distributed_optimizer=True)


def _gathering_late(path: Path, late: bool) -> list[torch.Tensor]:
    """Weights, log-probabilities, a checkpoint's weights and host copies, each read right after an update."""
    settings: dict[str, Any] = {"overlap_grad_reduce": True, "ddp": {"bucket_size": 20_000}}
    actor = build_actor(path, TWO, overlap_param_gather=late, **settings)
    samples, found = random_samples(24, 37), []
    plan = plan_for(samples, TWO)

    def update() -> None:
        actor.update(samples, plan, supervised())
        assert actor._is_stale == late

    update()
    found += [tensor.clone() for _, tensor in actor.weights()]
    update()
    found += [torch.from_numpy(values) for _, values in sorted(actor.own_logprobs(samples, plan).values.items())]
    update()
    found += [value.data.clone() for value in nested_values(actor.sharded_state()["model"])]
    update()
    actor.offload(weights=True)
    found += [actor._memory.host_view(parameter).clone() for parameter in actor._parameters()]
    update()
    actor.freeze_reference()
    return found + [kept.clone() for kept in actor._reference or ()]


def test_weights_that_are_gathered_late_are_never_read_stale(model: Path) -> None:
    """With overlap_param_gather an update leaves each rank with the others' old weights. Whoever reads them before the
    next forward pass gets what there is without it, to the bit: server, checkpoint, host, reference policy."""
    for one, other in zip(
        run_ranks(_gathering_late, 2, model, False), run_ranks(_gathering_late, 2, model, True), strict=True
    ):
        assert len(one) == len(other) > 100
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def _train(path: Path, settings: dict[str, Any]) -> dict[str, torch.Tensor] | str:
    config = replace(ActorConfig(layout=TWO.layout, optimizer=OptimizerConfig(learning_rate=1e-2)), **settings)
    architecture = read_architecture(path)
    reader = CheckpointReader(path, architecture)
    try:
        actor = Actor(config, build_layout(config.layout, 0), architecture, reader.get, dtype=torch.float32)
        actor.start_phase(config.optimizer, 10)
    except UserError as error:
        return str(error)
    samples = random_samples(24, 37)
    for _ in range(2):
        actor.update(samples, plan_for(samples, TWO), supervised())
    return {name: tensor.clone() for name, tensor in actor.weights()}


@pytest.fixture(scope="module")
def job_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_job_files(tmp_path_factory.mktemp("task"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


SAME: list[dict[str, Any]] = [
    {"overlap_grad_reduce": True, "ddp": {"bucket_size": 20_000}},
    {"ddp": {"average_in_collective": True}},
    {"overlap_grad_reduce": True, "overlap_param_gather": True, "ddp": {"bucket_size": 20_000}},
    {"recompute": "selective"},
    {"recompute": "selective", "recompute_modules": ["core_attn", "mlp"]},
]


@pytest.fixture(scope="module")
def plain(model: Path) -> dict[str, torch.Tensor]:
    """Its weights with no setting at all."""
    [found, _] = run_ranks(_train, 2, model, {})
    assert isinstance(found, dict), found
    return found


@pytest.mark.parametrize("settings", SAME, ids=str)
def test_it_trains_the_same_model(model: Path, plain: dict[str, torch.Tensor], settings: dict[str, Any]) -> None:
    """Two updates on two ranks, over several micro-batches: weights to 1e-5 of their norm (test_actor_layouts.py)."""
    other = run_ranks(_train, 2, model, settings)[0]
    assert isinstance(other, dict), other
    for name, tensor in plain.items():
        assert (other[name] - tensor).norm() < 1e-5 * tensor.norm(), name


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"megatron": {"moe_permute_fusio": True}}, "has no such field; did you mean moe_permute_fusion?"),
        ({"megatron": {"tp_comm_overlap": True}}, "are made by Megatron's training program"),
        ({"megatron": {"overlap_moe_expert_parallel_comm": True}}, "which needs its own forward step"),
        ({"megatron": {"cuda_graph_impl": "local"}}, "packs have a new shape every time"),
        ({"optimizer": OptimizerConfig(moments="bfloat16")}, "Transformer Engine (transformer-engine[pytorch]"),
        ({"optimizer": OptimizerConfig(cpu_offload=0.5)}, "and cpu_offload: Transformer Engine (transformer-engine"),
        ({"megatron": {"hidden_size": 8}}, "actor.megatron.hidden_size: is decided by the model's config.json"),
        ({"megatron": {"apply_rope_fusion": True}}, "rotary embedding is this program's own"),
        ({"ddp": {"use_distributed_optimizer": False}}, "is decided by"),
    ],
    ids=str,
)
def test_what_cannot_be_set_is_said(model: Path, settings: dict[str, Any], said: str) -> None:
    """One sentence with the key, before a model is built."""
    answer = run_ranks(_train, 2, model, settings)[0]
    assert isinstance(answer, str) and said in answer


@pytest.mark.parametrize(
    "field",
    [
        "moe_token_dispatcher_type",
        "moe_enable_deepep",
        "moe_permute_fusion",
        "moe_router_fusion",
        "moe_shared_expert_overlap",
        "cp_comm_type",
        "fp8_dot_product_attention",
        "bias_activation_fusion",
        "gradient_accumulation_fusion",
        "deallocate_pipeline_outputs",
        "moe_router_dtype",
    ],
)
def test_what_the_page_names_is_there(field: str) -> None:
    """The fields that docs/actor.md names as reachable are the installed Megatron's."""
    assert field in {one.name for one in dataclasses.fields(TransformerConfig)}
    page = (REPOSITORY / "docs" / "actor.md").read_text(encoding="utf-8")
    assert f"`{field}`" in page


COLOCATED = {
    "rollout__engine": "vllm",
    "rollout__servers__launch": "local",
    "rollout__servers__colocate": "true",
    "model__dtype": "bfloat16",
}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"actor__offload": "all"}, "actor.offload = all has no effect while rollout.servers.colocate = false"),
        ({"actor__offload": "everything"}, "actor.offload"),
        ({"actor__optimizer__cpu_offload": 1.5}, "actor.optimizer.cpu_offload = 1.5: must be in"),
        ({"actor__optimizer__cpu_offload": 1, "actor__optimizer__distributed": "false"}, "distributed = true"),
        (COLOCATED | {"actor__optimizer__cpu_offload": 0.5}, "use 1, or 0"),
        ({"actor__optimizer__moments": "bfloat16"}, "moments = bfloat16 needs model.dtype = bfloat16, not float32"),
        (COLOCATED | {"actor__optimizer__moments": "float16"}, "cannot be written from the host"),
        (
            {"model__dtype": "bfloat16", "actor__fp8": "tensorwise", "actor__fp8_param": "true"},
            "actor.fp8_param = true is not offered: Megatron would build its float32 parameters from the random",
        ),
        (COLOCATED | {"actor__optimizer__main_parameters": "float16", "actor__offload": "none"}, ""),
        ({"actor__overlap_param_gather": "true"}, "overlap_param_gather = true needs actor.overlap_grad_reduce"),
        (COLOCATED | {"actor__offload": "optimizer"}, ""),
    ],
    ids=str,
)
def test_contradictions_are_said_before_anything_is_built(
    job_files: Path, tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    """With the setting and what would be right; the last two are fine."""
    if not said:
        job_config(job_files, tmp_path / "run", **settings)
        return
    with pytest.raises(UserError, match=re.escape(said)):
        job_config(job_files, tmp_path / "run", **settings)


@pytest.mark.parametrize(
    ("offload", "colocate", "device", "leaves"),
    [
        ("auto", "true", "cuda", "all"),
        ("auto", "true", "cpu", "none"),
        ("auto", "false", "cuda", "none"),
        ("optimizer", "true", "cuda", "optimizer"),
        ("none", "true", "cuda", "none"),
    ],
)
def test_what_leaves_the_device(
    job_files: Path, tmp_path: Path, offload: str, colocate: str, device: str, leaves: str
) -> None:
    """`auto` is for colocated servers on GPUs."""
    given = COLOCATED | {"rollout__servers__colocate": colocate, "actor__offload": offload}
    assert what_to_offload(job_config(job_files, tmp_path / "run", **given), device) == leaves


class _Waits(TorchDispatchMode):
    """Operations after which the host waits for a CUDA device: scalars, sizes that depend on values, bool indices."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        booleans = name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        waits = booleans or name in ("_local_scalar_dense", "nonzero", "masked_select", "unique", "bincount")
        # tensors of the host on CUDA too, and not needed there: what the padded attention of a CPU goes by
        if waits and not any(frame.name == "attending" for frame in traceback.extract_stack()):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def _waits(path: Path) -> list[str]:
    config = ActorConfig(optimizer=OptimizerConfig(distributed=False))
    architecture = read_architecture(path)
    layout = build_layout(config.layout, 0)
    actor = Actor(config, layout, architecture, CheckpointReader(path, architecture).get, dtype=torch.float32)
    samples = random_samples(12, 37)
    plan = plan_for(samples)
    objective = make_objective(ObjectiveConfig(), None)
    actor.accumulate(samples, plan, objective)
    hook = LossHook(objective, actor._scorer(1.0), layout, plan.num_microbatches)
    with _Waits() as waits:
        actor._run_schedule(samples, plan, hook, forward_only=False)
    return waits.found


def test_no_host_waits_for_the_device_in_a_schedule(model: Path) -> None:
    """Forward and backward over several packs, loss included: nothing asks the device for a value."""
    assert run_ranks(_waits, 1, model)[0] == []


def test_a_pack_travels_without_waiting() -> None:
    """Every copy to the device is asynchronous: tokens, offsets, positions, rotary frequencies. Seen on torch's `meta`
    device, which takes copies as any other and has no memory."""
    [microbatch] = plan_for(random_samples(4, 37)).microbatches[0]
    copies: list[bool] = []

    class Copies(TorchDispatchMode):
        """Notes whether each copy to another device waits."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.overloadpacket.__name__ == "_to_copy" and str((kwargs or {}).get("device")) == "meta":
                copies.append(bool(kwargs.get("non_blocking")))
            return func(*args, **(kwargs or {}))

    with Copies():
        pack = build_microbatch(random_samples(4, 37), microbatch, device=torch.device("meta"))
        rotation = pack.packed.rotation(Rotary(16, 10000.0), torch.bfloat16)
    LogprobStore().add(pack, torch.zeros(len(pack.targets), device="meta"))  # which nobody can read
    assert pack.packed.cu_seqlens_q.device == rotation.cos.device == torch.device("meta")
    assert len(copies) >= 8 and all(copies)
