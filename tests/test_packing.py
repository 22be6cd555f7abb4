"""The planner's invariants, as its head states them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import random_samples

from dppo_megatron.actor.batch import build_microbatch
from dppo_megatron.packing.planner import plan_microbatches
from dppo_megatron.types import TrainSample, UserError

CAP = 64


def _sample(index: int, length: int) -> TrainSample:
    tokens = np.zeros(length + 1, dtype=np.int64)
    return TrainSample(f"{index}:0", tokens, 1, np.zeros(length, np.float32), 1.0, 1.0, 1.0)


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(1, CAP), max_size=60),
    data_parallel=st.integers(1, 5),
    dense=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_invariants(lengths: list[int], data_parallel: int, dense: bool, seed: int) -> None:
    """Every sample once, nothing over the cap, the same number of micro-batches everywhere, no matter the order."""
    samples = [_sample(i, n) for i, n in enumerate(lengths)]
    plan = plan_microbatches(samples, data_parallel=data_parallel, max_tokens_per_microbatch=CAP, dense=dense)
    members = [i for rank in plan.microbatches for pack in rank for i in pack]
    assert sorted(members) == list(range(len(samples)))
    assert all(sum(lengths[i] for i in pack) <= CAP for rank in plan.microbatches for pack in rank)
    assert len(plan.microbatches) == data_parallel
    assert {len(rank) for rank in plan.microbatches} == {plan.num_microbatches}
    assert plan.num_microbatches >= 1
    assert 0 <= plan.fill <= 1 and plan.num_tokens == sum(lengths)

    order = np.random.default_rng(seed).permutation(len(samples))
    shuffled = [samples[i] for i in order]
    again = plan_microbatches(shuffled, data_parallel=data_parallel, max_tokens_per_microbatch=CAP, dense=dense)

    def by_id(source: list[TrainSample], packs: tuple) -> list:
        return [[[source[i].id for i in pack] for pack in rank] for rank in packs]

    assert by_id(samples, plan.microbatches) == by_id(shuffled, again.microbatches)


def test_fewest_microbatches_on_a_known_case() -> None:
    """Six halves, thirds and sixths of the cap fill exactly three packs."""
    lengths = [32, 32, 32, 21, 21, 21, 11, 11, 11]
    samples = [_sample(i, n) for i, n in enumerate(lengths)]
    plan = plan_for(samples, cap=64)
    assert plan.num_microbatches == 3 and plan.fill == pytest.approx(1.0)


def test_longer_than_the_cap_is_named() -> None:
    """An error that says which sample, how long, and which setting."""
    with pytest.raises(UserError, match=r"sample 1:0 has 65 tokens, more than packing\.max_tokens_per_microbatch = 64"):
        plan_microbatches([_sample(0, 3), _sample(1, 65)], data_parallel=1, max_tokens_per_microbatch=64)


@pytest.mark.parametrize("alignment", [1, 2, 8])
def test_padding_is_a_sequence_of_its_own(alignment: int) -> None:
    """Alignment closes the pack with a dummy sequence: the real ones keep their lengths, and padding has no loss."""
    samples = random_samples(3, 37, seed=2)
    pack = build_microbatch(samples, (2, 0, 1), alignment=alignment, device=torch.device("cpu"))
    real = [samples[i].num_tokens for i in (2, 0, 1)]
    lengths = pack.packed.cu_seqlens_q.diff().tolist()
    assert lengths[:3] == real and sum(lengths) % alignment == 0 and len(lengths) <= 4
    assert float(pack.coefficient[sum(real) :].abs().sum() + pack.mask[sum(real) :].sum()) == 0.0
    assert float(pack.mask.sum()) == sum(samples[i].num_completion_tokens for i in range(3))


def test_empty_pack_is_a_dummy() -> None:
    """A rank without samples still has something to run, with no loss in it."""
    pack = build_microbatch([], (), alignment=2, device=torch.device("cpu"))
    assert pack.tokens.shape == (1, 2) and not pack.mask.any()
