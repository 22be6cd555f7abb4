"""Rotary embedding once a pack: transformers' values, autograd's gradient, no work or waiting in each layer."""

from __future__ import annotations

import ast
import inspect
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.launch import run_ranks
from support.tiny import FAMILIES, Parallel, build_actor, plan_for, random_samples, write_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from dppo_megatron.actor.attention import PackedSequences
from dppo_megatron.actor.layout import ContextShare
from dppo_megatron.actor.rotary import Rotary, rotate
from dppo_megatron.types import PackedMicrobatch
from dppo_megatron.weights.architecture import read_architecture

LENGTHS = (1, 4, 37, 8, 200)


def _pack(lengths: tuple[int, ...], context: ContextShare | None = None) -> PackedSequences:
    slots = tuple(int(x) for x in np.cumsum((0, *lengths)))
    plan = PackedMicrobatch(tuple(range(len(lengths))), slots, slots)
    return PackedSequences.of(plan, context or ContextShare(), torch.device("cpu"))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_equals_transformers(tmp_path: Path, family: str) -> None:
    """Queries of a pack are turned as transformers turns them, sequence by sequence: to one rounding of float32.

    That rounding is of the angle: it is at most 200 here, of which the spacing is 1.5e-5.
    """
    architecture = read_architecture(write_model(tmp_path, family=family))
    theirs = LlamaRotaryEmbedding(AutoConfig.from_pretrained(tmp_path))
    rotary = Rotary(architecture.head_dim, architecture.rope_theta, architecture.rope_factor)
    query = torch.randn(sum(LENGTHS), 3, architecture.head_dim, generator=torch.Generator().manual_seed(0))
    mine = rotate(query, _pack(LENGTHS).rotation(rotary, torch.float32))
    start = 0
    for length in LENGTHS:
        piece = query[start : start + length].transpose(0, 1)[None]
        cos, sin = theirs(piece, torch.arange(length)[None])
        expected, _ = apply_rotary_pos_emb(piece, piece, cos, sin)
        torch.testing.assert_close(mine[start : start + length], expected[0].transpose(0, 1), rtol=0, atol=5e-5)
        start += length


def test_gradient_is_autograds() -> None:
    """The written backward pass, against differences of the forward pass."""
    rotation = _pack((3, 2)).rotation(Rotary(6, 10_000.0), torch.float64)
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
