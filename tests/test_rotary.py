"""Rotary embedding once a pack: transformers' values, autograd's gradient, no work or waiting in each layer."""

from __future__ import annotations

import ast
import inspect
import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.launch import run_ranks
from support.tiny import FAMILIES, Parallel, build_actor, hf_logprobs, plan_for, random_samples, write_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from dppo_megatron.actor.attention import PackedSequences, rotate
from dppo_megatron.actor.layout import ContextShare
from dppo_megatron.types import PackedMicrobatch, TrainSample
from dppo_megatron.weights.architecture import read_architecture
from dppo_megatron.weights.layer_parts import Rope

LENGTHS = (1, 4, 37, 8, 200)
STARTS = (0, 1, 5, 42, 50)


def _pack(lengths: tuple[int, ...], context: ContextShare | None = None) -> PackedSequences:
    slots = tuple(int(x) for x in np.cumsum((0, *lengths)))
    plan = PackedMicrobatch(tuple(range(len(lengths))), slots)
    return PackedSequences.of(plan, context or ContextShare(), torch.device("cpu"))


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
SCALED: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in FAMILIES},
    "linear": ("llama3", {"rope_type": "linear", "rope_theta": 5e5, "factor": 3.0}),
    "yarn": ("qwen3", YARN),
    "yarn, moe": ("qwen3_moe", YARN | {"factor": 2.5, "beta_fast": 16, "beta_slow": 0.5, "truncate": False}),
    "yarn, qwen2": ("qwen2", YARN | {"attention_factor": 1.3}),
    "yarn, mscale": ("llama3", YARN | {"mscale": 0.7, "mscale_all_dim": 1.1}),
    "llama 3 beyond its length": (
        "llama3",
        FAMILIES["llama3"][2]["rope_parameters"] | {"original_max_position_embeddings": 64},
    ),
    "llama 3 of other constants": ("llama3", FAMILIES["llama3"][2]["rope_parameters"] | {"high_freq_factor": 3.0}),
}


@pytest.mark.parametrize("case", SCALED)
def test_equals_transformers(tmp_path: Path, case: str) -> None:
    """Queries of a pack are turned as transformers turns them, sequence by sequence, also beyond the original length
    of a scaled embedding: to one rounding of float32, of a product of values up to 4."""
    family, rope = SCALED[case]
    model = write_model(tmp_path, family=family, **({"rope_parameters": rope} if rope else {}))
    architecture = read_architecture(model)
    config = AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        kind = type(AutoModelForCausalLM.from_config(config).model.rotary_emb)
    theirs = kind(config)
    query = torch.randn(sum(LENGTHS), 3, architecture.head_dim, generator=torch.Generator().manual_seed(0))
    assert not rope or (architecture.rope.scale == 1.0) == ("yarn" not in case)
    kinds = {(): architecture.rope}
    if architecture.gemma is not None:
        kinds = {("full_attention",): architecture.rope, ("sliding_attention",): architecture.gemma.local_rope}
    for (kind, one), length_and_start in itertools.product(kinds.items(), zip(LENGTHS, STARTS, strict=True)):
        length, start = length_and_start
        mine = rotate(query, _pack(LENGTHS).rotation(one, torch.float32))[start : start + length]
        piece = query[start : start + length].transpose(0, 1)[None]
        cos, sin = theirs(piece, torch.arange(length)[None], *kind)
        turning, rest = piece.tensor_split((cos.size(-1),), -1)
        expected = torch.cat([apply_rotary_pos_emb(turning, turning, cos, sin)[0], rest], -1)
        torch.testing.assert_close(mine, expected[0].transpose(0, 1), rtol=0, atol=1e-6)


@pytest.mark.parametrize("parallel", [Parallel(tp=2), Parallel(cp=2), Parallel(tp=2, cp=2)], ids=str)
@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
def test_the_actor_equals_transformers_beyond_the_original_length(
    tmp_path: Path, family: str, parallel: Parallel
) -> None:
    """Log-probabilities of 200 tokens where YaRN began with 64; DeepSeek's also scales the softmax."""
    rope = YARN if family == "qwen3" else YARN | {"mscale": 0.7, "mscale_all_dim": 1.1}
    model = write_model(tmp_path, family=family, rope_parameters=rope)
    samples = random_samples(9, 37, longest=200)
    expected = hf_logprobs(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), samples)
    assert any(len(one.token_ids) > 150 for one in samples)
    assert read_architecture(model).max_positions == 256
    for mine, theirs in zip(
        run_ranks(_logprobs, parallel.world_size, model, samples, parallel)[0], expected, strict=True
    ):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-5)


def _logprobs(model: Path, samples: list[TrainSample], parallel: Parallel) -> list[np.ndarray]:
    return build_actor(model, parallel).logprobs(samples, plan_for(samples, parallel, cap=4096))


def test_gradient_is_autograds() -> None:
    """The written backward pass, against differences of the forward pass."""
    rotation = _pack((3, 2)).rotation(Rope((1.0, 0.1, 0.01), 1.2), torch.float64)
    states = torch.randn(5, 2, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: rotate(x, rotation), states)


@pytest.mark.parametrize("size", [2, 3])
def test_context_ranks_share_the_positions(size: int) -> None:
    """Together the ranks hold each position of each slot once, each rank where its tokens are."""
    lengths = tuple(2 * size * n for n in (1, 3, 5))
    whole = _pack(lengths).position_ids
    for rank in range(size):
        share = ContextShare(rank, size)
        assert torch.equal(_pack(lengths, share).position_ids, whole[share.indices(_pack(lengths).slots)])


class _Operations(TorchDispatchMode):
    """Counts what is dispatched: on CUDA `_local_scalar_dense` is the host waiting for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def _count(model_path: Path) -> Counter[str]:
    actor = build_actor(model_path, Parallel())
    samples = random_samples(12, 37)
    with _Operations() as operations:
        actor.logprobs(samples, plan_for(samples, cap=4096))
    return operations.count


def test_nothing_is_waited_for_in_a_layer(tmp_path: Path) -> None:
    """A model of six layers takes no more cosines, and asks for no more scalars, than one of two."""
    two, six = (
        run_ranks(_count, 1, write_model(tmp_path / str(layers), num_hidden_layers=layers))[0] for layers in (2, 6)
    )
    assert two["cos"] == six["cos"] == 1
    assert two["_local_scalar_dense"] == six["_local_scalar_dense"]
    assert two["mm"] < six["mm"]


def test_transformer_engines_attention_takes_the_rotated() -> None:
    """Its forward begins with query and key and has packed_seq_params by name, which `Rotating` builds on.

    Read from the source: without Transformer Engine the class is a stand-in of Megatron's.
    """
    import megatron.core.extensions.transformer_engine as extension

    tree = ast.parse(inspect.getsource(extension))
    attention = next(x for x in ast.walk(tree) if isinstance(x, ast.ClassDef) and x.name == "TEDotProductAttention")
    forward = next(x for x in attention.body if isinstance(x, ast.FunctionDef) and x.name == "forward")
    names = [argument.arg for argument in forward.args.args]
    assert names[:4] == ["self", "query", "key", "value"] and "packed_seq_params" in names
