"""How full, how even and how fast the plans of the packing planner are, next to the packers of other trainers.

Lengths are log-normal with median 2,500 and sigma 0.9, clipped to 16,384; the cap is 20,480 tokens; a sequence of L
tokens costs 8e9 L + 2.95e5 L^2 (forward FLOPs of Qwen3-4B). Figures are means over the seeds: `fill` is tokens over
capacity, `t/ideal` the slowest data-parallel rank over a perfectly even split, with one pipeline stage and with four
((p - 1) times the rank's largest micro-batch is added), `over` the share of micro-batches above the cap. The other
trainers' rules are restated here from their sources' behaviour; they are not their code. Plan times are the best of
three runs and, for ours, include everything from samples to the plan.

    python benchmarks/packing.py [--json FILE] [--seeds 20]
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from dppo_megatron import __version__
from dppo_megatron.config.pruning import CompletionPruningConfig
from dppo_megatron.packing.alignment import PackingLayout
from dppo_megatron.packing.bins import first_fit, split_to, window_greedy
from dppo_megatron.packing.planner import CostModel, TokenCapacity, plan_microbatches
from dppo_megatron.pruning import CompletionBatch, make_completion_policy
from dppo_megatron.types import IntArray, TrainSample

CAP, MEDIAN, SIGMA, LONGEST = 20480, 2500, 0.9, 16384
COST = CostModel(linear=8e9, quadratic=2.95e5)
CASES = ((512, 8), (512, 32), (128, 8))
"""(samples, data-parallel size); the last case is the first one after 75 % pruning."""
LARGE = (4096, 128)
OURS = ("balanced", "window", "first_fit_decreasing", "none")

Bins: TypeAlias = list[list[int]]
Ranks: TypeAlias = list[Bins]
Figures: TypeAlias = dict[str, dict[str, float]]
"""[packer][figure]."""


def draw_lengths(count: int, seed: int) -> IntArray:
    """[count] tokens."""
    lengths = np.random.default_rng(seed).lognormal(np.log(MEDIAN), SIGMA, count)
    return np.clip(lengths, 64, LONGEST).astype(np.int64)


def make_samples(lengths: IntArray) -> list[TrainSample]:
    """Samples of the given lengths, eight to a prompt."""
    empty = np.zeros(0, np.float32)
    return [
        TrainSample(f"{i // 8}:{i % 8}", np.zeros(n + 1, np.int64), n + 1, empty, 1.0, 1.0, 1.0)
        for i, n in enumerate(lengths.tolist())
    ]


# ---- the rules of other trainers, from lengths in order of arrival to bins for each rank ----


def descending(values: Sequence[float]) -> list[int]:
    """Positions, largest value first."""
    return sorted(range(len(values)), key=lambda i: -values[i])


def differencing(values: Sequence[float], parts: int, *, equal: bool = False) -> list[list[int]]:
    """Largest differencing (Karmarkar and Karp); with `equal` all parts get the same number of values, if possible."""
    order = descending(values)
    step = parts if equal else 1
    heap = []
    for serial in range(0, len(order), step):
        chunk = order[serial : serial + step]
        state = [(values[i], [i]) for i in chunk] + [(0.0, [])] * (parts - len(chunk))
        heap.append((state[-1][0] - state[0][0], serial, state))
    heapq.heapify(heap)
    serial = len(order)
    while len(heap) > 1:
        first, second = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        merged = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(first, reversed(second), strict=True)]
        merged.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], serial, merged))
        serial += 1
    return [members for _, members in heap[0][2]]


def next_fit(order: Sequence[int], lengths: Sequence[int]) -> Bins:
    """Each sample goes into the open bin if it fits, else into a new one."""
    bins: Bins = []
    room = 0
    for i in order:
        if lengths[i] > room:
            bins.append([])
            room = CAP
        bins[-1].append(i)
        room -= lengths[i]
    return bins


def whole_rounds(bins: Bins, lengths: Sequence[int], ranks: int) -> Bins:
    """Split the fullest bins until their number is a multiple of the ranks."""
    return split_to(bins, [float(n) for n in lengths], -(-len(bins) // ranks) * ranks)


def strided(bins: Bins, ranks: int) -> Ranks:
    """Bin b to rank b mod ranks; missing ones are empty."""
    bins = bins + [[] for _ in range(-len(bins) % ranks)]
    return [bins[r::ranks] for r in range(ranks)]


def by_differencing(bins: Bins, costs: Sequence[float], ranks: int) -> Ranks:
    """Equally many bins to each rank, balanced by largest differencing."""
    totals = [sum(costs[i] for i in members) for members in bins]
    return [[bins[b] for b in mine] for mine in differencing(totals, ranks, equal=True)]


def slime(lengths: list[int], costs: list[float], ranks: int) -> Ranks:
    """First fit in order of arrival, split, strided."""
    return strided(whole_rounds(first_fit(range(len(lengths)), lengths, CAP), lengths, ranks), ranks)


def slime_balanced(lengths: list[int], costs: list[float], ranks: int) -> Ranks:
    """First fit in order of arrival, split, differencing."""
    return by_differencing(whole_rounds(first_fit(range(len(lengths)), lengths, CAP), lengths, ranks), costs, ranks)


def miles(lengths: list[int], costs: list[float], ranks: int) -> Ranks:
    """First-fit decreasing, split, differencing."""
    return by_differencing(whole_rounds(first_fit(descending(lengths), lengths, CAP), lengths, ranks), costs, ranks)


def verl(lengths: list[int], costs: list[float], ranks: int, *, grow: bool = False) -> Ranks:
    """Differencing over ranks, then over micro-batches, whose number the cap sets; `grow` raises it until it holds."""
    mine = differencing(costs, ranks, equal=True)
    count = max(-(-sum(lengths[i] for i in members) // CAP) for members in mine)
    while True:
        plan = [
            [[members[k] for k in part] for part in differencing([costs[i] for i in members], count)]
            for members in mine
        ]
        if not grow or all(sum(lengths[i] for i in bin_) <= CAP for rank in plan for bin_ in rank):
            return plan
        count += 1


def verl_grown(lengths: list[int], costs: list[float], ranks: int) -> Ranks:
    """`verl` with as many micro-batches as the cap needs."""
    return verl(lengths, costs, ranks, grow=True)


def nemo(lengths: list[int], costs: list[float], ranks: int) -> Ranks:
    """First-fit decreasing, to the ranks in turn."""
    return strided(first_fit(descending(lengths), lengths, CAP), ranks)


def ranks_first(lengths: list[int], costs: list[float], ranks: int) -> Ranks:
    """Equally many samples to each rank, the longest first to the lightest rank; then first-fit decreasing on each."""
    mine: list[list[int]] = [[] for _ in range(ranks)]
    heap = [(0.0, r) for r in range(ranks)]
    for i in descending(costs):
        total, r = heapq.heappop(heap)
        mine[r].append(i)
        if len(mine[r]) < -(-len(lengths) // ranks):
            heapq.heappush(heap, (total + costs[i], r))
    packed = [
        [[members[k] for k in bin_] for bin_ in first_fit(range(len(members)), [lengths[i] for i in members], CAP)]
        for members in mine
    ]
    count = max(len(rank) for rank in packed)
    return [split_to(rank, costs, count) for rank in packed]


def next_fit_fifo(lengths: list[int], costs: list[float], ranks: int) -> Ranks:
    """Next-fit decreasing, consecutive bins to a rank."""
    bins = next_fit(descending(lengths), lengths)
    bins += [[] for _ in range(-len(bins) % ranks)]
    per_rank = len(bins) // ranks
    return [bins[r * per_rank : (r + 1) * per_rank] for r in range(ranks)]


def next_fit_in_turn(lengths: list[int], costs: list[float], ranks: int) -> Ranks:
    """Next fit in order of arrival, to the ranks in turn."""
    return strided(next_fit(range(len(lengths)), lengths), ranks)


def window_differencing(lengths: list[int], costs: list[float], ranks: int) -> Ranks:
    """Window greedy in order of arrival, split, differencing."""
    bins = window_greedy(range(len(lengths)), lengths, CAP, 64)
    return by_differencing(whole_rounds(bins, lengths, ranks), costs, ranks)


PEERS: dict[str, Callable[[list[int], list[float], int], Ranks]] = {
    "slime": slime,
    "slime balance-data": slime_balanced,
    "miles": miles,
    "verl": verl,
    "verl, grown": verl_grown,
    "NeMo FFD": nemo,
    "ranks first, then FFD": ranks_first,
    "next-fit decreasing, fifo": next_fit_fifo,
    "next fit, in turn": next_fit_in_turn,
    "window 64 + differencing": window_differencing,
}

# ---- measuring ----


def judge(ranks: Sequence[Sequence[Sequence[int]]], lengths: IntArray) -> dict[str, float]:
    """Figures of a plan, from its members alone."""
    members = sorted(i for rank in ranks for bin_ in rank for i in bin_)
    if members != list(range(len(lengths))):
        raise AssertionError("a sample is missing or planned twice")
    cost = COST.of(lengths.astype(np.float64))
    tokens = np.array([[lengths[list(bin_)].sum() for bin_ in rank] for rank in ranks])
    costs = np.array([[cost[list(bin_)].sum() for bin_ in rank] for rank in ranks])
    return {
        "fill": float(lengths.sum() / (CAP * tokens.size)),
        "t_over_ideal": float(costs.sum(axis=1).max() / costs.sum(axis=1).mean()),
        "t_over_ideal_pp4": float((costs.sum(axis=1) + 3 * costs.max(axis=1)).max() / costs.sum(axis=1).mean()),
        "over_cap": float((tokens > CAP).mean()),
        "microbatches": float(tokens.shape[1]),
    }


def best_of(function: Callable[[], Any], times: int = 3) -> tuple[Any, float]:
    """(result, milliseconds of the fastest call)."""
    fastest = float("inf")
    for _ in range(times):
        started = time.perf_counter()
        result = function()
        fastest = min(fastest, time.perf_counter() - started)
    return result, 1e3 * fastest


def measure(count: int, ranks: int, seed: int, modes: Sequence[str], peers: Sequence[str]) -> Figures:
    """Figures of every packer on one batch."""
    lengths = draw_lengths(count, seed)
    samples = make_samples(lengths)
    figures: Figures = {}
    for mode in modes:
        members: list[Any] = []
        for stages in (1, 4):
            layout = PackingLayout(data_parallel=ranks, pipeline_parallel=stages)
            plan, plan_ms = best_of(
                partial(plan_microbatches, samples, layout=layout, max_tokens_per_microbatch=CAP, mode=mode, cost=COST)
            )
            members.append(([[mb.members for mb in rank] for rank in plan.microbatches], plan_ms))
        row = judge(members[0][0], lengths) | {"plan_ms": members[0][1], "plan_ms_pp4": members[1][1]}
        figures[f"ours: {mode}"] = row | {"t_over_ideal_pp4": judge(members[1][0], lengths)["t_over_ideal_pp4"]}
    costs = COST.of(lengths.astype(np.float64)).tolist()
    for name in peers:
        plan, plan_ms = best_of(partial(PEERS[name], lengths.tolist(), costs, ranks), times=1)
        figures[name] = judge(plan, lengths) | {"plan_ms": plan_ms}
    return figures


def average(rows: Sequence[Figures]) -> Figures:
    """Mean of every figure over the seeds; of plan times the median."""
    return {
        name: {
            key: float((np.median if key.startswith("plan_ms") else np.mean)([row[name][key] for row in rows]))
            for key in rows[0][name]
        }
        for name in rows[0]
    }


def measure_slack(ranks: int, rate: float, seeds: int) -> dict[str, float]:
    """Benefit and cost of filling the slack of 512 completions pruned at `rate`."""
    layout = PackingLayout(data_parallel=ranks)
    columns: dict[str, list[float]] = {}
    for seed in range(seeds):
        batch = make_batch(64, 8, seed)
        policy = make_completion_policy(CompletionPruningConfig(rate=rate), seed=seed, total_steps=10)
        for name, capacity in (("plain", None), ("filled", TokenCapacity(layout, CAP))):
            selection = policy.prune(batch, step=1, capacity=capacity)
            lengths = batch.lengths[selection.kept]
            plan = plan_microbatches(make_samples(lengths), layout=layout, max_tokens_per_microbatch=CAP, cost=COST)
            slowest = judge([[mb.members for mb in rank] for rank in plan.microbatches], lengths)["t_over_ideal"]
            for key, value in (
                ("kept", 1 - selection.metrics["rate_effective"]),
                ("design_effect", selection.growth),
                ("tokens", float(lengths.sum())),
                ("microbatches", float(plan.num_microbatches)),
                ("fill", plan.fill),
                ("slowest_rank", slowest * float(COST.of(lengths.astype(np.float64)).sum()) / ranks),
            ):
                columns.setdefault(f"{name}_{key}", []).append(value)
    return {key: float(np.mean(values)) for key, values in columns.items()}


def make_batch(groups: int, size: int, seed: int) -> CompletionBatch:
    """Binary rewards of random pass rates, with std-normalised advantages and a logit_grad_norm of about root
    length."""
    rng = np.random.default_rng(seed)
    rewards = (rng.random((groups, size)) < rng.uniform(0.1, 0.9, groups)[:, None]).astype(np.float64)
    advantages = (rewards - rewards.mean(axis=1, keepdims=True)) / (rewards.std(axis=1, keepdims=True) + 1e-6)
    lengths = draw_lengths(groups * size, seed).reshape(groups, size)
    return CompletionBatch.of_groups(
        np.arange(groups),
        rewards=rewards,
        advantages=advantages,
        lengths=lengths,
        logit_grad_norm=0.4 * np.sqrt(lengths),
        denominator=rewards.size * lengths.astype(np.float64),
        prompt_weight=np.ones(groups),
        num_nominal=rewards.size,
    )


def print_case(count: int, ranks: int, figures: Figures) -> None:
    """One table."""
    print(f"\n{count} samples, DP{ranks}")
    print(f"{'':28s}{'fill':>8s}{'t/ideal':>9s}{'PP4':>7s}{'over cap':>10s}{'mbs/rank':>10s}{'plan ms':>9s}")
    for name, row in figures.items():
        print(
            f"{name:28s}{row['fill']:8.1%}{row['t_over_ideal']:9.4f}{row['t_over_ideal_pp4']:7.3f}"
            f"{row['over_cap']:10.1%}{row['microbatches']:10.2f}{row['plan_ms']:9.1f}"
        )


def bars(cases: dict[str, Figures]) -> list[dict[str, Any]]:
    """The planner's bars, and whether it meets them."""
    wanted = [
        ("512@DP8", "fill", ">=", 0.955),
        ("512@DP8", "t_over_ideal", "<=", 1.003),
        ("512@DP32", "fill", ">=", 0.925),
        ("512@DP32", "t_over_ideal", "<=", 1.030),
        ("128@DP8", "t_over_ideal", "<=", 1.04),
        ("512@DP32", "plan_ms", "<=", 15.0),
        ("4096@DP128", "plan_ms", "<=", 80.0),
        *((case, "over_cap", "<=", 0.0) for case in cases),
    ]
    rows = []
    for case, key, relation, bound in wanted:
        value = cases[case]["ours: balanced"][key]
        holds = value >= bound if relation == ">=" else value <= bound
        rows.append({"case": case, "figure": key, "value": value, "relation": relation, "bar": bound, "holds": holds})
    return rows


def main() -> None:
    """Measure every case, print the tables, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write one JSON object with every figure here")
    parser.add_argument("--seeds", type=int, default=20)
    args = parser.parse_args()
    cases = {
        f"{count}@DP{ranks}": average([measure(count, ranks, s, OURS, list(PEERS)) for s in range(args.seeds)])
        for count, ranks in CASES
    }
    cases[f"{LARGE[0]}@DP{LARGE[1]}"] = average([measure(*LARGE, s, ("balanced",), ()) for s in range(args.seeds)])
    for (count, ranks), figures in zip((*CASES, LARGE), cases.values(), strict=True):
        print_case(count, ranks, figures)
    slack = {f"DP{ranks}": measure_slack(ranks, 0.75, 2 * args.seeds) for ranks in (8, 16, 32)}
    print("\nslack filling, 512 completions at 75 % pruned (off -> on)")
    titles = {"": 6, "kept": 17, "design effect": 18, "tokens": 22, "mbs/rank": 15, "fill": 18, "time": 14}
    print("".join(f"{title:>{width}s}" for title, width in titles.items()))
    for name, row in slack.items():
        print(
            f"{name:6s}{row['plain_kept']:8.1%} ->{row['filled_kept']:6.1%}"
            f"{row['plain_design_effect']:9.2f} ->{row['filled_design_effect']:6.2f}"
            f"{row['plain_tokens']:11,.0f} ->{row['filled_tokens']:8,.0f}"
            f"{row['plain_microbatches']:8.2f} ->{row['filled_microbatches']:5.2f}"
            f"{row['plain_fill']:9.1%} ->{row['filled_fill']:6.1%}"
            f"{row['filled_slowest_rank'] / row['plain_slowest_rank']:13.2f}x"
        )
    judged = bars(cases)
    print("\nbars")
    for row in judged:
        print(
            f"  {row['case']:12s} {row['figure']:14s} {row['value']:9.4f} {row['relation']} {row['bar']:<7g}"
            f" {'holds' if row['holds'] else 'MISSED'}"
        )
    if args.json:
        result = {
            "benchmark": "packing",
            "settings": {"seeds": args.seeds, "cap": CAP, "median": MEDIAN, "sigma": SIGMA, "longest": LONGEST},
            "cases": cases,
            "slack": slack,
            "bars": judged,
            "versions": {"dppo_megatron": __version__, "python": platform.python_version(), "numpy": np.__version__},
            "machine": {"platform": platform.platform(), "processor": platform.machine(), "cpus": os.cpu_count()},
        }
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
