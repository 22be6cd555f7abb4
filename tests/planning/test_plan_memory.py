"""The plan's bytes against those that torch allocates for tiny models on a CPU, within 5 % or better."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.launch import run_ranks
from support.live_bytes import LiveBytes
from support.random_shapes import Drawn, draw
from support.tiny import Parallel, build_actor, plan_for, random_samples, write_model

from dppo_megatron.actor.attention import PackedSequences
from dppo_megatron.actor.logprobs import chunked_logprobs
from dppo_megatron.actor.softmax import Projection, TorchSoftmax
from dppo_megatron.config.schema import ActorConfig, Config, LoraConfig
from dppo_megatron.weights.architecture import Architecture, read_architecture
from dppo_megatron.weights.mapping import hf_shapes
from dppo_megatron.weights.pipeline import FIRST, LAYOUT, split_layers
from dppo_megatron.workbench.planning.activations import Pass, head_bytes, in_flight, layer_kept
from dppo_megatron.workbench.planning.memory import host_copies, pinned, plan_memory, state_bytes, updated_on_host
from dppo_megatron.workbench.planning.shares import ONE_GPU, Degrees, Share, Tensors, share_of
from dppo_megatron.workbench.planning.site import FRAGMENTATION, GIB, PROCESS_HOST_BYTES, Site

SIZES = {"hidden_size": 192, "intermediate_size": 320, "head_dim": 32, "vocab_size": 131}
"""Large enough that rounding a tensor up to 64 elements is no figure of its own."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        name: write_model(folder / name, family=name, **SIZES, tie_word_embeddings=name == "qwen2")
        for name in ("qwen3", "qwen2", "qwen3_moe", "qwen2_moe", "glm4", "gemma3")
    }


# ------------------------------------------------------------------------------------------------ training state


def _rounded_by_torch(size: int) -> int:
    """What torch 2.13 takes for a pinned block (CachingHostAllocator.h: `PowerOf2Ceil` up to a threshold that is
    unlimited by default), found by doubling."""
    block = 1
    while block < size:
        block *= 2
    return block


def _state(path: Path, parallel: Parallel, lora: LoraConfig | None = None) -> dict[str, int]:
    """Bytes of the parts after an optimizer step, each storage once."""
    actor = build_actor(path, parallel, lora=lora or LoraConfig())
    with torch.no_grad():  # a step that needs no loss: the moments exist after it
        for model in actor._model:
            for buffer in (*model.buffers, *model.expert_parallel_buffers):
                buffer.grad_data.fill_(1e-3)
        actor._optimizer.step()
    buffers = [buffer for model in actor._model for buffer in (*model.buffers, *model.expert_parallel_buffers)]
    parameters = [p for chunk in actor._chunks for p in chunk.parameters()]
    weights = {p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in parameters}
    optimizer: dict[int, int] = {}
    for tensor in actor._memory._optimizer_tensors(actor._optimizer):
        optimizer[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
    measured = {
        "weights": sum(weights.values()),
        "gradients": sum(buffer.grad_data.untyped_storage().nbytes() for buffer in buffers),
        "optimizer": sum(optimizer.values()),
        "count": sum(p.numel() for p in parameters),
        "trained": sum(p.numel() for p in actor._parameters()),
        "stage": actor.layout.rank if parallel.pp > 1 else 0,
        "pinned weights": 0,
        "pinned optimizer": 0,
    }
    actor.offload(weights=True)
    for (part, _), host in actor._memory._host.items():
        measured[f"pinned {part}"] += _rounded_by_torch(host.untyped_storage().nbytes())
    return measured


@pytest.mark.parametrize("rank", [0, pytest.param(16, id="lora")])
@pytest.mark.parametrize(
    ("family", "parallel"),
    [
        ("qwen3", Parallel(distributed_optimizer=True)),
        ("qwen3", Parallel(dtype=torch.bfloat16, distributed_optimizer=True)),
        ("qwen3", Parallel(dtype=torch.bfloat16)),
        ("qwen3", Parallel(tp=2, dp=2, dtype=torch.bfloat16, distributed_optimizer=True)),
        ("qwen2", Parallel(pp=2, dtype=torch.bfloat16, distributed_optimizer=True)),
        ("qwen3", Parallel(pp=2, uneven=((FIRST, 3),), dtype=torch.bfloat16, distributed_optimizer=True)),
        ("qwen3", Parallel(pp=4, uneven=((LAYOUT, "E|tt|tt|L"),), distributed_optimizer=True)),
        ("qwen3_moe", Parallel(dp=2, ep=2, dtype=torch.bfloat16, distributed_optimizer=True)),
        ("qwen2_moe", Parallel(tp=2, ep=2, etp=1, distributed_optimizer=True)),
        ("gemma3", Parallel(tp=2, distributed_optimizer=True)),
    ],
    ids=lambda value: str(value) + (str(value.dtype)[5:] if isinstance(value, Parallel) else ""),
)
def test_training_state(models: dict[str, Path], family: str, parallel: Parallel, rank: int) -> None:
    """Weights, gradients and optimizer state of every rank: parameters exactly, bytes within 1 %; with adapters too.

    What is left over is the end of a bucket, rounded up to 128 elements a rank.
    """
    lora = LoraConfig(rank=rank, experts=bool(rank) and family == "qwen3_moe")
    architecture = read_architecture(models[family]).with_adapters(lora)
    degrees = Degrees.of(parallel.layout, parallel.world_size)
    actor = ActorConfig(layout=parallel.layout, megatron=dict(parallel.uneven))
    actor.optimizer.distributed = parallel.distributed_optimizer
    for measured in run_ranks(_state, parallel.world_size, models[family], parallel, lora):
        layers = sum(split_layers(architecture.num_layers, actor)[measured["stage"]])
        share = share_of(architecture, degrees, measured["stage"], layers)
        assert (share.count(), share.trained.count()) == (measured["count"], measured["trained"])
        planned = state_bytes(share, degrees, actor, str(parallel.dtype).removeprefix("torch."))
        for part in ("weights", "gradients", "optimizer"):
            assert planned[part] == pytest.approx(measured[part], rel=0.01), part
        blocks = host_copies(share, degrees, actor, str(parallel.dtype).removeprefix("torch."))
        assert blocks["weights"] == measured["pinned weights"] >= measured["weights"]
        # a parameter that is cut between two ranks is two blocks, which the plan takes for one
        assert blocks["optimizer"] == pytest.approx(measured["pinned optimizer"], rel=0.1)


@given(st.integers(1, 1 << 40))
def test_a_pinned_block(size: int) -> None:
    """torch's rule."""
    assert pinned(size) == _rounded_by_torch(size)


@pytest.mark.parametrize(
    ("part", "in_steps", "built"),
    [
        # three tensors of 1,000, four ranks: states of 3 x 1,024 / 4 elements, and a piece of 750 in a block of 4,096
        (1.0, 12 * 768 + 4096, 4 * 3000 + 4 * 768),
        (0.0, 0, 0),
    ],
)
def test_an_optimizer_on_the_host(part: float, in_steps: int, built: int) -> None:
    """Formulas by hand, from reading Megatron: gradients beside the state, and whole parameters while it is built."""
    actor, share = ActorConfig(), Share((Tensors("x", 1000, 3, False, True, True),))
    actor.optimizer.cpu_offload = part
    assert updated_on_host(share, Degrees(4, 1, 1, 1, 1, 1, 1, False), actor, "bfloat16") == (in_steps, built)


@pytest.mark.parametrize("gpus", [1, 8])
def test_a_node_has_room_for_the_optimizer_while_it_is_built(models: dict[str, Path], gpus: int) -> None:
    """Over eight ranks that is more than its steps take, alone it is less; no checkpoint is written then."""
    config, architecture = Config(), read_architecture(models["qwen3"])
    config.model.dtype, config.rollout.engine, config.actor.optimizer.cpu_offload = "bfloat16", "hf", 1.0
    site = Site(gpus, 8, 80 * GIB, 1e15, 1900 * GIB)
    degrees = Degrees.of(config.actor.layout, gpus)
    share = share_of(architecture, degrees, 0)
    in_steps, built = updated_on_host(share, degrees, config.actor, "bfloat16")
    assert (built > in_steps) == (gpus == 8)
    always, saving = plan_memory(config, architecture, site, 20.0).host
    largest = gpus * max(in_steps, built)
    assert always.parts == {"processes": gpus * PROCESS_HOST_BYTES, "optimizer on the host": largest}
    assert saving.parts["optimizer on the host"] == gpus * in_steps
    assert saving.parts["copies for the checkpoint"] == gpus * sum(
        state_bytes(share, degrees, config.actor, "bfloat16")[name]
        for name in ("weights", "optimizer", "optimizer on the host")
    )


@pytest.mark.parametrize(
    ("moments", "main", "states"), [("bfloat16", "float32", 2), ("float32", "float16", 1), ("float16", "float16", 3)]
)
def test_states_in_16_bits_are_widened(models: dict[str, Path], moments: str, main: str, states: int) -> None:
    """By Transformer Engine's code: to step it makes float32 of each, beside it, of all that a rank updates, which is
    more than they save. Its kernel reads gradients in bfloat16, which another Adam copies."""
    config, architecture = Config(), read_architecture(models["qwen3"])
    config.model.dtype, config.rollout.engine = "bfloat16", "hf"
    config.actor.ddp = {"grad_reduce_in_fp32": False}
    site = Site(2, 2, 80 * GIB, 1e15, 1900 * GIB)
    updated = share_of(architecture, Degrees.of(config.actor.layout, 2), 0).trained.count(padded_to=64) / 2
    whole = plan_memory(config, architecture, site, 20.0)
    config.actor.optimizer.moments_dtype, config.actor.optimizer.main_params_dtype = moments, main
    halved = plan_memory(config, architecture, site, 20.0)
    more = {
        after.name: {part: after.parts[part] - before.parts[part] for part in ("optimizer", "other")}
        for before, after in zip(whole.phases, halved.phases, strict=True)
    }
    assert more["backward"] == {"optimizer": -2 * states * updated, "other": 0}
    assert more["step"] == {"optimizer": -2 * states * updated, "other": (4 * states - 4) * updated}
    assert more["checkpoint"] == {"optimizer": -2 * states * updated, "other": 0}
    assert halved.host == whole.host


def test_recorded_experts_are_on_every_rank(models: dict[str, Path]) -> None:
    """Of two replicas of two stages and two tensor-parallel ranks each: what the engine gives is on every rank for all
    four layers and all tokens of its replica, what the actor records for a quarter. A byte for each of two experts."""
    config, architecture = Config(), read_architecture(models["qwen3_moe"])
    config.rollout.engine, config.rollout.prompts_per_step, config.rollout.completions_per_prompt = "hf", 16, 8
    config.actor.layout.tensor_parallel = config.actor.layout.pipeline_parallel = 2
    site = Site(8, 8, 80 * GIB, 1e15, 1900 * GIB)
    found = {}
    for replay in ("off", "engine", "actor"):
        config.actor.routing_replay = replay  # type: ignore[assignment]
        found[replay] = [
            phase.parts.get("recorded experts") for phase in plan_memory(config, architecture, site, 100.0).host
        ]
    of_replica = 64 * 100 * 4 * 2
    assert found == {"off": [None] * 2, "engine": [8 * of_replica] * 2, "actor": [2 * of_replica] * 2}


def test_a_mixture_of_one_layer(tmp_path: Path) -> None:
    """It is the first and the last at once."""
    architecture = read_architecture(write_model(tmp_path, family="qwen3_moe", num_hidden_layers=1))
    expected = sum(math.prod(shape) for shape in hf_shapes(architecture).values())
    assert share_of(architecture, ONE_GPU, 0).count() == expected


def test_fp8_copies(models: dict[str, Path]) -> None:
    """Two bytes for each weight that a layer multiplies by, on a rank: no embedding, output layer, norm or router. None
    if Transformer Engine is told to keep none."""
    architecture = read_architecture(models["qwen3_moe"])
    degrees, actor = Degrees(4, 2, 1, 1, 1, 2, 1, True), ActorConfig(fp8="blockwise")
    share, experts = share_of(architecture, degrees, 0), architecture.experts
    assert experts is not None
    heads = (2 * architecture.num_heads + 2 * architecture.num_kv_heads) * architecture.head_dim
    attention = architecture.hidden_size * heads // degrees.tensor
    of_experts = 3 * architecture.hidden_size * experts.ffn_size * experts.count // degrees.expert
    copies = state_bytes(share, degrees, actor, "bfloat16")["fp8 copies"]
    assert copies == 2 * architecture.num_layers * (attention + of_experts)
    actor.megatron["disable_parameter_transpose_cache"] = True
    assert "fp8 copies" not in state_bytes(share, degrees, actor, "bfloat16")


@pytest.mark.parametrize(
    ("family", "engine", "arguments", "layers"),
    [
        ("qwen3_moe", "vllm", ["--tensor-parallel-size=2", "--data-parallel-size=2"], 1 + 1 / 4),
        ("qwen3_moe", "vllm", ["-tp", "2", "--data-parallel-size=2", "--enable-expert-parallel"], 1 / 4 + 1 / 4),
        ("qwen3_moe", "sglang", ["--tp=2"], 0),
        ("qwen3", "vllm", ["--tensor-parallel-size=2"], 0),
    ],
)
def test_a_sync_has_room_for_a_layer_of_experts(
    models: dict[str, Path], family: str, engine: Any, arguments: list[str], layers: float
) -> None:
    """A worker of vLLM keeps them unsplit, or its own, until it has its share, and makes that anew. SGLang's workers
    copy at once."""
    config, architecture = Config(), read_architecture(models[family])
    config.model.dtype, config.rollout.engine = "bfloat16", engine
    config.rollout.servers.colocate, config.rollout.servers.args = True, arguments
    site = Site(4, 4, 80 * GIB, 1e15, 1900 * GIB)
    plan = plan_memory(config, architecture, site, 20.0)
    in_sync = {phase.name: phase.parts["engine"] for phase in plan.phases}["sync"]
    experts = architecture.experts
    layer = 2 * 3 * architecture.hidden_size * experts.ffn_size * experts.count if experts else 0
    assert in_sync - plan.engine.weights - plan.engine.context == pytest.approx(layers * layer)


# ------------------------------------------------------------------------------------------------ activations


def _stand_in_for_transformer_engine() -> None:
    """Names that Megatron's recomputation of norms takes from it, FP8 or not (`capabilities.check_recompute`)."""
    from megatron.core.tensor_parallel import random

    def plain(**_: object) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    random.FP8GlobalStateManager = SimpleNamespace(is_fp8_enabled=lambda: False, get_fp8_recipe=lambda: None)
    random.activation_recompute_forward = random.fp8_autocast = plain


def _saved_by_a_layer(path: Path, parallel: Parallel, recompute: str, modules: list[str]) -> tuple[int, int, float]:
    """(tokens, bytes saved by autograd in one layer, slots over tokens in attention's batches)."""
    if "layernorm" in modules:
        _stand_in_for_transformer_engine()
    return _measure_layer(path, parallel, recompute, modules)[:3]


def _measure_layer(path: Path, parallel: Parallel, recompute: str, modules: list[str]) -> tuple[int, int, float, float]:
    """The same, and how many tokens this rank's experts got over the mean of the expert-parallel ranks."""
    actor = build_actor(path, parallel, recompute=recompute, recompute_modules=modules)
    samples = random_samples(6, 37)
    microbatch = plan_for(samples, parallel).microbatches[0][0]
    context = actor.layout.context
    packed = PackedSequences.of(microbatch, context, torch.device("cpu"))
    block = actor._chunks[0].decoder
    tokens = microbatch.cu_seqlens_padded[-1]
    rows = tokens // context.size // (parallel.tp if parallel.sequence_parallel else 1)
    hidden = torch.randn(rows, 1, actor._architecture.hidden_size, dtype=parallel.dtype, requires_grad=True)
    ours = {p.untyped_storage()._cdata for p in block.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        """Autograd saves a tensor. Known by its storage, not its address: what is recomputed frees its memory."""
        if tensor.untyped_storage()._cdata not in ours:
            saved.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    block.train()
    routed = []
    if actor._architecture.experts:
        block.layers[0].mlp.experts.register_forward_pre_hook(lambda _, inputs: routed.append(inputs[0].size(0)))
    core = block.layers[0].self_attention.core_attention
    packed.rotation(core._rope, parallel.dtype)  # once a pack, not a layer
    angles = {angle.untyped_storage()._cdata for angles in packed._rotations.values() for angle in angles}
    ours |= angles
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        if recompute == "full":
            block._checkpointed_forward(hidden, None, None, None, None, None, packed, False)
        else:
            block.layers[0](hidden_states=hidden, attention_mask=None, packed_seq_params=packed)
    masks = {tuple(bucket.mask.shape) for bucket in packed.bucketed(core._window).buckets if bucket.mask is not None}
    kept = [t for t in saved.values() if not (t.dtype == torch.int64 and t.ndim == 1) and tuple(t.shape) not in masks]
    total = sum(t.untyped_storage().nbytes() for t in kept)
    padded = sum(len(bucket.query_index) for bucket in packed.bucketed().buckets) * context.size
    imbalance = 1.0
    if parallel.ep > 1 and (experts := actor._architecture.experts) is not None:
        imbalance = routed[0] / (rows * experts.per_token * (parallel.etp or parallel.tp))
    return tokens, total // (len(block.layers) if recompute == "full" else 1), padded / tokens, imbalance


ALL, BF16 = ("none", ["core_attn"]), Parallel(dtype=torch.bfloat16)
CASES: list[tuple[str, Parallel, str, list[str]]] = [
    ("qwen3", Parallel(), *ALL),
    ("qwen3", BF16, *ALL),
    ("qwen3", Parallel(tp=2), *ALL),
    ("qwen3", Parallel(tp=2, sequence_parallel=False), *ALL),
    ("qwen2", Parallel(), *ALL),
    ("qwen3_moe", Parallel(), *ALL),
    ("qwen3_moe", Parallel(tp=2), *ALL),
    ("qwen3", Parallel(), "selective", ["core_attn"]),
    ("qwen3", BF16, "selective", ["core_attn"]),
    ("qwen2", Parallel(), "selective", ["core_attn"]),
    ("qwen3", Parallel(tp=2), "selective", ["core_attn", "mlp"]),
    ("qwen3", BF16, "selective", ["mlp"]),
    ("qwen3", BF16, "selective", ["layernorm"]),
    ("qwen3", Parallel(), "selective", ["layernorm", "core_attn", "mlp"]),
    ("qwen2_moe", Parallel(), *ALL),
    ("qwen2_moe", Parallel(tp=2), *ALL),
    ("qwen3_moe", Parallel(), "selective", ["moe"]),
    ("qwen3_moe", Parallel(tp=2), "selective", ["core_attn", "moe"]),
    ("qwen3_moe", Parallel(), "selective", ["layernorm"]),
    ("qwen3", Parallel(), "full", []),
    ("qwen3", Parallel(tp=2), "full", []),
    ("glm4", Parallel(), *ALL),
    ("glm4", Parallel(tp=2), "selective", ["layernorm", "core_attn", "mlp"]),
    ("gemma3", Parallel(), *ALL),
    ("gemma3", BF16, *ALL),
    ("gemma3", Parallel(tp=2), "selective", ["layernorm", "core_attn", "mlp"]),
]


@pytest.mark.parametrize(("family", "parallel", "recompute", "modules"), CASES, ids=str)
def test_activations_of_a_layer(
    models: dict[str, Path], family: str, parallel: Parallel, recompute: str, modules: list[str]
) -> None:
    """What autograd saves in one layer, each storage once, within 5 %: with recomputation and without, in both types,
    split over two ranks and not. The places of attention's gather (int64, 3 a token) are not part of the plan."""
    architecture = read_architecture(models[family])
    results = run_ranks(_saved_by_a_layer, parallel.world_size, models[family], parallel, recompute, modules)
    for tokens, measured, padding in results:
        degrees = Degrees.of(parallel.layout, parallel.world_size)
        each = torch.empty((), dtype=parallel.dtype).element_size()
        one = Pass(architecture, degrees, tokens, each, "cpu", padding)
        planned = layer_kept(one, ActorConfig(recompute=recompute, recompute_modules=modules))
        assert sum(planned.values()) == pytest.approx(measured, rel=0.05), planned


def _of_many(drawn: list[Drawn], paths: list[Path]) -> list[tuple[dict[str, int], tuple[int, int, float, float]]]:
    """Training state, and what a layer keeps, of one after another."""
    found = []
    for one, path in zip(drawn, paths, strict=True):
        if "layernorm" in one.modules:
            _stand_in_for_transformer_engine()
        layer = (
            (0, 0, 1.0, 1.0) if one.parallel.pp > 1 else _measure_layer(path, one.parallel, one.recompute, one.modules)
        )
        found.append((_state(path, one.parallel), layer))
    return found


@given(st.integers(2, 6), st.integers(1, 4), st.integers(1, 12), st.integers(1, 12), st.data())
def test_micro_batches_in_flight(pipeline: int, virtual: int, group: int, groups: int, data: st.DataObject) -> None:
    """What Megatron runs forward before its first backward pass, on any stage; the planner gives whole groups."""
    from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches

    group = max(group, pipeline) if virtual > 1 else 1
    stage = data.draw(st.integers(0, pipeline - 1))
    place = SimpleNamespace(size=lambda: pipeline, rank=lambda: stage)
    chunks = virtual if virtual > 1 else None
    link: Any = SimpleNamespace(pp_group=place, virtual_pipeline_model_parallel_size=chunks)
    _, _, warm_up, left = get_pp_rank_microbatches(groups * group, virtual, group, p2p_communicator=link)
    degrees = Degrees(pipeline, 1, pipeline, virtual, 1, 1, 1, False)
    given_group = 0 if group == pipeline else group
    assert in_flight(degrees, stage, groups * group, given_group) * virtual == warm_up + (left > 0)
    assert in_flight(degrees, stage, groups * group - group + 1, given_group) == in_flight(
        degrees, stage, groups * group, given_group
    ), "a group begun is a whole one"


@pytest.mark.parametrize(("world_size", "count"), [(1, 16), (2, 12), (4, 6)])
def test_random_shapes_and_layouts(tmp_path: Path, world_size: int, count: int) -> None:
    """Parameters exactly, and state and a layer's activations within 5 %, whatever the model and the layout: dense and
    mixtures, any number of key-value heads (fewer than ranks, as many as heads), tied embeddings, TP, PP, CP, EP,
    recomputation, both types, both optimizers. Not part of the plan: what is quadratic in a sequence (masks of context
    parallelism on a CPU)."""
    drawn = draw(2, count, world_size, stages=True)
    paths = [write_model(tmp_path / str(n), family=one.family, **one.sizes) for n, one in enumerate(drawn)]
    for rank, of_rank in enumerate(run_ranks(_of_many, world_size, drawn, paths)):
        for one, path, (state, layer) in zip(drawn, paths, of_rank, strict=True):
            architecture, degrees = read_architecture(path), Degrees.of(one.parallel.layout, world_size)
            share = share_of(architecture, degrees, rank // (world_size // degrees.pipeline))
            assert share.count() == state["count"], one
            planned = state_bytes(share, degrees, one.actor, str(one.parallel.dtype).removeprefix("torch."))
            for part in ("weights", "gradients", "optimizer"):
                assert planned[part] == pytest.approx(state[part], rel=0.05), (part, one)
            if degrees.pipeline > 1:
                continue
            tokens, measured, padding, imbalance = layer
            each = torch.empty((), dtype=one.parallel.dtype).element_size()
            kept = layer_kept(Pass(architecture, degrees, tokens, each, "cpu", padding, imbalance), one.actor)
            assert sum(kept.values()) == pytest.approx(measured, rel=0.05), (one, kept)


# ------------------------------------------------------------------------------------------------ the output layer


HEADS = [(512, 128, 64), (512, 128, 512), (128, 128, 64), (128, 128, 512)]
"""Tokens, chunk, hidden size: many chunks and one, and either of logits and weight gradient the larger."""


def _head(dtype: torch.dtype, entropy: bool, backward: bool, gradient: str) -> list[int]:
    """Peak of live bytes, what was there before included."""
    peaks = []
    for tokens, chunk, hidden_size in HEADS:
        hidden = torch.randn(tokens, hidden_size, dtype=dtype, requires_grad=backward)
        weight: Any = torch.randn(VOCAB, hidden_size, dtype=dtype, requires_grad=backward and gradient != "none")
        targets = torch.randint(0, VOCAB, (tokens,))
        projection = Projection(VOCAB, 1.0, chunk, torch.distributed.group.WORLD, TorchSoftmax())
        with LiveBytes() as bytes_:
            if gradient != "none":  # as Megatron has it
                weight.main_grad = torch.zeros(VOCAB, hidden_size, dtype=getattr(torch, gradient))
            logprobs, mean = chunked_logprobs(hidden, weight, targets, projection)
            if backward:
                (logprobs.sum() + mean.sum() if entropy else logprobs.sum()).backward()
        peaks.append(bytes_.peak)
    return peaks


VOCAB = 4096


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize(
    ("entropy", "backward", "gradient"),
    [
        (False, False, "float32"),
        (False, True, "float32"),
        (True, True, "float32"),
        (True, True, "bfloat16"),
        (True, True, "none"),
    ],
)
def test_logits_of_a_chunk(
    models: dict[str, Path], dtype: torch.dtype, entropy: bool, backward: bool, gradient: str
) -> None:
    """Peak of live bytes in the output layer, forward alone and with its backward pass, within 5 %: with Megatron's
    buffer for the weight's gradient in float32, to which it is added, or in bfloat16, and with a weight that is not
    trained."""
    architecture, each = read_architecture(models["qwen3"]), torch.empty((), dtype=dtype).element_size()
    [peaks] = run_ranks(_head, 1, dtype, entropy, backward, gradient)
    for (tokens, chunk, hidden_size), measured in zip(HEADS, peaks, strict=True):
        shape = replace(architecture, vocab_size=VOCAB, hidden_size=hidden_size)
        one = Pass(shape, Degrees(1, 1, 1, 1, 1, 1, 1, False), tokens, each, "cpu")
        known: dict[str, bool] = {"trained": gradient != "none", "in_place": gradient == "float32"}
        planned = sum(head_bytes(one, chunk, backward=backward, entropy=entropy, **known))
        # weight and buffer are part of the training state, not of the working set
        buffer = {"float32": 4, "bfloat16": 2, "none": 0}[gradient]
        assert planned == pytest.approx(measured - VOCAB * hidden_size * (each + buffer), rel=0.05)


def test_a_gradient_that_is_not_made_takes_no_memory(models: dict[str, Path]) -> None:
    """Of the output layer's weight, where it is the largest of the working set: added to Megatron's float32 buffer it
    is the product in bfloat16, beside a buffer in bfloat16 a float32 tensor too, and with adapters neither."""
    architecture = replace(read_architecture(models["qwen3"]), vocab_size=2**17, hidden_size=512)
    config, site = Config(), Site(1, 1, 80 * GIB, 1e15, 1900 * GIB)
    config.model.dtype, config.rollout.engine = "bfloat16", "hf"
    config.packing.max_tokens_per_microbatch = config.actor.logprob_chunk_tokens = 512

    def working(shape: Architecture) -> float:
        """Bytes of the backward pass beside the training state."""
        plan = plan_memory(config, shape, site, 20.0)
        of = {phase.name: phase.parts for phase in plan.phases}["backward"]
        return (of["activations"] + of["logits"]) / FRAGMENTATION

    weight = 2**17 * 512
    added = working(architecture)
    config.actor.ddp = {"grad_reduce_in_fp32": False}
    assert working(architecture) - added == pytest.approx(4 * weight)
    config.actor.ddp = {}
    assert added - working(architecture.with_adapters(LoraConfig(rank=8))) == pytest.approx(2 * weight)
