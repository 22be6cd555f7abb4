"""The planner's invariants, as its head states them; its objective against brute force; its costs against FLOPs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny import random_samples
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3Config, Qwen3ForCausalLM

from dppo_megatron.actor.batch import build_microbatch
from dppo_megatron.config.schema import INTERLEAVED_GROUP, ActorConfig, LayoutConfig
from dppo_megatron.packing.alignment import RECIPE_MULTIPLE, PackingLayout, Recipe, packing_layout
from dppo_megatron.packing.bins import best_fit, first_fit, window_greedy
from dppo_megatron.packing.planner import CostModel, check_longest_trained, plan_microbatches
from dppo_megatron.steps.rollout_cost import cost_model
from dppo_megatron.types import PackedMicrobatch, PackPlan, TrainSample, UserError
from dppo_megatron.weights.architecture import Architecture
from dppo_megatron.weights.layer_parts import Experts, Gemma, Rope

MODES = ("balanced", "window", "first_fit_decreasing", "none")
COST = CostModel(linear=1.0, quadratic=0.01)


def _sample(index: int, length: int) -> TrainSample:
    tokens = np.zeros(length + 1, dtype=np.int64)
    return TrainSample(f"{index // 4}:{index % 4}", tokens, 1, np.zeros(length, np.float32), 1.0, 1.0, 1.0)


def _samples(lengths: Sequence[int]) -> list[TrainSample]:
    return [_sample(i, n) for i, n in enumerate(lengths)]


def _run(plan: PackPlan) -> list[PackedMicrobatch]:
    return [microbatch for rank in plan.microbatches for microbatch in rank]


@st.composite
def layouts(draw: st.DrawFn) -> PackingLayout:
    tensor_parallel = draw(st.sampled_from([1, 2, 4, 3]))
    return PackingLayout(
        data_parallel=draw(st.integers(1, 5)),
        context_parallel=draw(st.sampled_from([1, 2, 3])),
        tensor_parallel=tensor_parallel,
        sequence_parallel=tensor_parallel > 1 and draw(st.booleans()),
        pipeline_parallel=draw(st.sampled_from([1, 2, 3])),
        virtual_pipeline=draw(st.sampled_from([1, 2])),
        interleaved_group=draw(st.sampled_from([0, 3, 5])),
        recipe=draw(st.sampled_from(list(RECIPE_MULTIPLE))),
    )


@settings(max_examples=300, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 150), max_size=60),
    layout=layouts(),
    mode=st.sampled_from(MODES),
    above=st.integers(0, 500),
    seed=st.integers(0, 1000),
)
def test_invariants(lengths: list[int], layout: PackingLayout, mode: str, above: int, seed: int) -> None:
    """Each invariant of the module's head, for any layout, number format, cap and mode."""
    samples = _samples(lengths)
    cap = -(-150 // layout.microbatch_multiple) * layout.microbatch_multiple + above
    plan = plan_microbatches(samples, layout=layout, max_tokens_per_microbatch=cap, mode=mode, cost=COST, window=5)
    run = _run(plan)
    assert sorted(i for microbatch in run for i in microbatch.members) == list(range(len(samples)))
    assert all(0 < microbatch.num_tokens <= cap for microbatch in run)
    assert len(plan.microbatches) == layout.data_parallel
    assert {len(rank) for rank in plan.microbatches} == {plan.num_microbatches}
    assert plan.num_microbatches >= 1
    if layout.virtual_pipeline > 1:
        assert plan.num_microbatches % (layout.interleaved_group or layout.pipeline_parallel) == 0
        assert len({microbatch.num_tokens for microbatch in run}) == 1
    for microbatch in run:
        _check_alignment(microbatch, lengths, layout)
    assert 0 <= plan.fill <= 1 and plan.num_tokens == sum(lengths)

    order = np.random.default_rng(seed).permutation(len(samples))
    shuffled = [samples[i] for i in order]
    again = plan_microbatches(shuffled, layout=layout, max_tokens_per_microbatch=cap, mode=mode, cost=COST, window=5)

    def by_id(source: list[TrainSample], a_plan: PackPlan) -> list:
        return [[[source[i].id for i in mb.members] for mb in rank] for rank in a_plan.microbatches]

    assert by_id(samples, plan) == by_id(shuffled, again)
    assert plan.metrics == again.metrics


def _check_alignment(microbatch: PackedMicrobatch, lengths: list[int], layout: PackingLayout) -> None:
    """Against the rules themselves, not against the layout's own multiples."""
    true, padded = np.array([lengths[i] for i in microbatch.members]), np.diff(microbatch.cu_seqlens_padded)
    count = len(true)
    assert count <= len(padded) <= count + 1
    assert (padded[:count] >= true).all() and (padded[count:] > 0).all()
    if layout.context_parallel > 1:
        assert (padded % (2 * layout.context_parallel) == 0).all()
    shards = layout.tensor_parallel if layout.sequence_parallel else 1
    assert (padded[:count] % shards == 0).all()
    # No slot holds more than the split of that one sample asks for: alignment of the whole is a segment of its own.
    assert (padded[:count] - true < np.lcm(2 * layout.context_parallel, shards)).all()
    on_a_rank, rest = divmod(microbatch.num_tokens, shards * layout.context_parallel)
    assert rest == 0
    assert on_a_rank % {"bf16": 1, "tensorwise": 16, "delayed": 16, "blockwise": 128, "mxfp8": 32}[layout.recipe] == 0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=9), st.integers(1, 3))
def test_count_against_brute_force(lengths: list[int], data_parallel: int) -> None:
    """At most one round more than the true optimum, and never more than first-fit decreasing."""
    layout = PackingLayout(data_parallel=data_parallel)
    samples = _samples(lengths)
    counts = {
        mode: plan_microbatches(samples, layout=layout, max_tokens_per_microbatch=60, mode=mode).num_microbatches
        for mode in MODES
    }
    best = -(-_fewest_bins(tuple(sorted(lengths, reverse=True)), 60) // data_parallel)
    assert best <= counts["balanced"] <= best + 1
    assert counts["balanced"] <= counts["first_fit_decreasing"] <= counts["none"]


def _fewest_bins(lengths: tuple[int, ...], cap: int) -> int:
    """Exact, by trying every assignment up to the bins' names."""
    best = len(lengths)

    def place(position: int, loads: list[int]) -> None:
        nonlocal best
        if len(loads) >= best:
            return
        if position == len(lengths):
            best = len(loads)
            return
        for b in range(len(loads)):
            if loads[b] + lengths[position] <= cap:
                loads[b] += lengths[position]
                place(position + 1, loads)
                loads[b] -= lengths[position]
        place(position + 1, [*loads, lengths[position]])

    place(0, [])
    return best


def test_balance_against_brute_force() -> None:
    """Nine samples on two ranks: the slowest rank is within 4 % of the best of all 512 assignments."""
    rng = np.random.default_rng(3)
    for _ in range(20):
        lengths = rng.integers(20, 60, 9)
        cost = COST.of(lengths.astype(np.float64))
        plan = plan_microbatches(
            _samples(lengths.tolist()), layout=PackingLayout(data_parallel=2), max_tokens_per_microbatch=400, cost=COST
        )
        slowest = max(cost[list(rank[0].members)].sum() for rank in plan.microbatches)
        splits = itertools.product((False, True), repeat=9)
        best = min(max(cost[list(s)].sum(), cost[[not x for x in s]].sum()) for s in splits)
        assert plan.num_microbatches == 1
        assert slowest <= best * 1.04
        assert plan.metrics["imbalance"] == pytest.approx(slowest / (cost.sum() / 2))


def test_balanced_is_better_than_the_others() -> None:
    """On long-tailed lengths: no more micro-batches, and a slowest rank closer to the mean, than any other mode."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(2500), 0.9, 256), 64, 16384).astype(int).tolist()
    cost = CostModel(linear=8e9, quadratic=2.95e5)
    layout = PackingLayout(data_parallel=8)
    plans = {
        mode: plan_microbatches(_samples(lengths), layout=layout, max_tokens_per_microbatch=20480, mode=mode, cost=cost)
        for mode in MODES
    }
    best = plans["balanced"]
    assert all(best.num_microbatches <= plan.num_microbatches for plan in plans.values())
    assert all(best.metrics["imbalance"] <= plan.metrics["imbalance"] for plan in plans.values())
    assert best.metrics["imbalance"] < 1.003


def test_order_of_microbatches() -> None:
    """Descending without a pipeline; with one the costly ones in the middle. The same micro-batches either way."""
    samples = _samples(list(range(3, 40)))
    totals = {}
    for stages in (1, 4):
        plan = plan_microbatches(
            samples, layout=PackingLayout(pipeline_parallel=stages), max_tokens_per_microbatch=64, mode="window"
        )
        totals[stages] = [microbatch.num_tokens for microbatch in plan.microbatches[0]]
    assert totals[1] == sorted(totals[1], reverse=True)
    assert sorted(totals[4]) == sorted(totals[1])
    peak = totals[4].index(max(totals[4]))
    assert 0 < peak < len(totals[4]) - 1
    assert totals[4][: peak + 1] == sorted(totals[4][: peak + 1])
    assert totals[4][peak:] == sorted(totals[4][peak:], reverse=True)


def test_fewest_microbatches_on_a_known_case() -> None:
    """Six halves, thirds and sixths of the cap fill exactly three packs."""
    plan = plan_microbatches(
        _samples([32, 32, 32, 21, 21, 21, 11, 11, 11]), layout=PackingLayout(), max_tokens_per_microbatch=64
    )
    assert plan.num_microbatches == 3 and plan.fill == pytest.approx(1.0)
    assert plan.metrics["fill"] == 1.0 and plan.metrics["padding"] == 0.0 and plan.metrics["microbatches"] == 3


def test_padding_is_counted() -> None:
    """Two samples of 3 tokens under blockwise FP8: one micro-batch of 128 tokens, 122 of them padding."""
    plan = plan_microbatches(_samples([3, 3]), layout=PackingLayout(recipe="blockwise"), max_tokens_per_microbatch=300)
    assert plan.microbatches[0][0].cu_seqlens_padded == (0, 3, 6, 128)
    assert plan.metrics["padding"] == pytest.approx(122 / 128) and plan.metrics["fill"] == pytest.approx(6 / 300)


@pytest.mark.parametrize(
    ("layout", "cap", "lengths", "message"),
    [
        (PackingLayout(), 64, [3, 65], r"sample 0:1 has 65 tokens, more than packing\.max_tokens_per_microbatch = 64"),
        (
            PackingLayout(context_parallel=2),
            66,
            [3, 65],
            r"sample 0:1 has 65 tokens, 68 aligned to 4, more than .* = 66 \(64 usable, a multiple of 4\)",
        ),
        (PackingLayout(recipe="blockwise"), 100, [3], r"= 100: .* multiples of 128 tokens, so it must be at least"),
    ],
)
def test_what_does_not_fit_is_named(layout: PackingLayout, cap: int, lengths: list[int], message: str) -> None:
    """An error that says which sample, how long, and which setting."""
    for mode in MODES:
        with pytest.raises(UserError, match=message):
            plan_microbatches(_samples(lengths), layout=layout, max_tokens_per_microbatch=cap, mode=mode)


@settings(max_examples=100, deadline=None)
@given(layout=layouts(), length=st.integers(1, 3000), cap=st.integers(1, 3000))
def test_the_check_at_the_start_is_the_planners(layout: PackingLayout, length: int, cap: int) -> None:
    """A longest sequence that it passes has a place, one that it refuses has none, and the cap that it names does."""

    def refusal(cap: int, mode: str = "") -> str:
        try:
            if mode:
                plan_microbatches(_samples([length]), layout=layout, max_tokens_per_microbatch=cap, mode=mode)
            else:
                check_longest_trained(length + 1, layout, cap)
        except UserError as error:
            return str(error)
        return ""

    said = refusal(cap)
    assert [bool(refusal(cap, mode)) for mode in MODES] == [bool(said)] * len(MODES)
    if "the longest possible" in said:
        named = int(said.rpartition(" ")[2])
        assert not refusal(named) and refusal(named - 1)


def test_unknown_mode_is_named() -> None:
    """With the names that exist."""
    with pytest.raises(UserError, match=r"packing\.mode = 'best'.*balanced, window, first_fit_decreasing, none"):
        plan_microbatches(_samples([1]), layout=PackingLayout(), max_tokens_per_microbatch=8, mode="best")


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 40), max_size=30), st.integers(1, 10))
def test_greedy_rules_against_their_definitions(slots: list[int], window: int) -> None:
    """Best fit, first fit and window greedy, each written again in the slow way that its definition reads."""
    cap, order = 40, range(len(slots))

    def rule(choose: str) -> list[list[int]]:
        bins: list[list[int]] = []
        for i in order:
            room = [cap - sum(slots[j] for j in members) for members in bins]
            open_bins = [b for b in range(len(bins)) if room[b] >= slots[i]]
            if not open_bins:
                bins.append([i])
            elif choose == "first":
                bins[open_bins[0]].append(i)
            else:
                bins[min(open_bins, key=lambda b: (room[b], b))].append(i)
        return bins

    assert first_fit(order, slots, cap) == rule("first")
    assert best_fit(order, slots, cap) == rule("best")

    stream, pending, packed = list(order), [], []
    while stream or pending:
        pending, stream = pending + stream[: window - len(pending)], stream[window - len(pending) :]
        members, room = [pending.pop(0)], cap
        room -= slots[members[0]]
        while True:
            pending, stream = pending + stream[: window - len(pending)], stream[window - len(pending) :]
            fitting = [i for i in pending if slots[i] <= room]
            if not fitting:
                break
            longest = max(fitting, key=lambda i: (slots[i], i))
            pending.remove(longest)
            members.append(longest)
            room -= slots[longest]
        packed.append(members)
    assert window_greedy(order, slots, cap, window) == packed


def test_cost_model_counts_the_models_flops() -> None:
    """torch counts the matrix products of forward and backward of a transformers Qwen3.

    Eager attention computes all L x L scores where the convention counts the causal half, so its quadratic term is
    twice ours.
    """
    sizes = {"vocab_size": 40, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, attn_implementation="eager", tie_word_embeddings=False))
    cost = cost_model(_shaped(3, 48, 64, 4, 2, 16, 40))
    for length in (7, 32):
        with FlopCounterMode(display=False) as counter:
            model(torch.arange(length)[None] % 40).logits.sum().backward()
        assert counter.get_total_flops() == cost.linear * length + 2 * cost.quadratic * length**2


def _shaped(layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, head_dim: int, words: int) -> Architecture:
    """A dense model of these sizes."""
    sizes = layers, hidden, ffn, heads, kv_heads, head_dim, words, 64
    return Architecture("x", *sizes, Rope(()), 1e-6, False, True, False)


def test_cost_model_of_experts() -> None:
    """A token visits its active experts and the router only."""
    shape = _shaped(2, 8, 30, 2, 1, 4, 11)
    dense, experts = cost_model(shape), cost_model(replace(shape, experts=Experts(64, 3, 10, True)))
    assert experts.linear - dense.linear == 6 * 2 * 8 * 64
    assert experts.quadratic == dense.quadratic


def test_cost_model_of_windows() -> None:
    """A token of a layer with a window of 5 looks at 5 others, of one without at half of the sequence."""
    shape = _shaped(3, 8, 30, 2, 1, 4, 11)
    gemma = Gemma(5, (True, False, True), Rope(()), 0.5)
    full, windows = cost_model(shape), cost_model(replace(shape, gemma=gemma))
    assert windows.quadratic == full.quadratic / 3
    assert windows.linear - full.linear == 6 * 2 * 5 * (2 * 4 + 2 * 4)


@pytest.mark.parametrize("recipe", ["bf16", "tensorwise"])
def test_padding_is_a_sequence_of_its_own(recipe: Recipe) -> None:
    """Alignment closes the pack with a dummy sequence: the real ones keep their lengths, and padding has no loss."""
    samples = random_samples(3, 37, seed=2)
    placed = PackingLayout(recipe=recipe).place((2, 0, 1), [sample.num_tokens for sample in samples])
    pack = build_microbatch(samples, placed, device=torch.device("cpu"))
    real = [samples[i].num_tokens for i in (2, 0, 1)]
    lengths = np.diff(placed.cu_seqlens_padded).tolist()
    assert lengths[:3] == real and pack.tokens.shape[1] == sum(lengths) and len(lengths) <= 4
    assert float(pack.coefficient[sum(real) :].abs().sum() + pack.mask[sum(real) :].sum()) == 0.0
    assert float(pack.mask.sum()) == sum(samples[i].num_completion_tokens for i in range(3))


def test_empty_pack_is_a_dummy() -> None:
    """A rank without samples still has something to run, with no loss in it."""
    pack = build_microbatch([], PackingLayout(recipe="tensorwise").place((), []), device=torch.device("cpu"))
    assert pack.tokens.shape == (1, 16) and not pack.mask.any()


def test_the_interleaved_schedules_group_is_megatrons() -> None:
    """Else its first update ends the run."""
    actor = ActorConfig(layout=LayoutConfig(pipeline_parallel=2, virtual_pipeline=2))
    assert packing_layout(actor, 2).microbatch_group == 2
    assert packing_layout(replace(actor, megatron={INTERLEAVED_GROUP: 3}), 2).microbatch_group == 3
