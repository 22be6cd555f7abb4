"""Tokens from the ranks that hold them to those that train on them, with nothing pruned: the most there can be."""

from __future__ import annotations

import numpy as np
import torch.distributed as dist

from dppo_megatron.packing.alignment import PackingLayout
from dppo_megatron.packing.planner import plan_microbatches
from dppo_megatron.steps.exchange import Replicas, exchange
from dppo_megatron.steps.step import UpdatePlan, sizes_of
from dppo_megatron.types import Completion, Group, Prompt, RolloutPrompt
from plane.common import Bar, cpu_s, on_ranks

SIZE, LENGTH = 16, 4096


def _one(groups_per_rank: int) -> tuple[float, float, float]:
    """On ranks: (CPU seconds, bytes received, own tokens) of one exchange."""
    rank, world = dist.get_rank(), dist.get_world_size()
    count = groups_per_rank * world
    prompts = [RolloutPrompt(Prompt(k, "", (1, 2, 3), "", ""), 1.0, 1.0) for k in range(count)]
    tokens, logprobs = np.arange(LENGTH, dtype=np.int64), np.full(LENGTH, -0.5, np.float32)
    group = tuple(Completion(tokens, logprobs, "length", "") for _ in range(SIZE))
    held = {k: Group(prompts[k], group, np.zeros(SIZE)) for k in range(rank, count, world)}
    rows = np.arange(count * SIZE)
    lengths = np.full(len(rows), LENGTH)
    layout = PackingLayout(data_parallel=world)
    pack = plan_microbatches(sizes_of(rows, lengths, prompts, SIZE), layout=layout, max_tokens_per_microbatch=16384)
    nothing = np.zeros(len(rows))
    plan = UpdatePlan(rows, lengths, nothing, nothing, nothing, nothing, pack, True)
    replicas = Replicas.agree(rank)
    exchange([plan], held, np.arange(count) % world, prompts, SIZE, replicas)  # connections are made in the first
    dist.barrier()
    before = cpu_s()
    [update] = exchange([plan], held, np.arange(count) % world, prompts, SIZE, replicas)
    seconds = cpu_s() - before
    own = sum(sample.num_completion_tokens for sample in update.samples.values())
    return seconds, own * 8.0, own


def run(smoke: bool) -> list[Bar]:
    """Per million completion tokens of the whole step, at a growing number of ranks and of tokens."""
    bars, of_rank_zero = [], {}
    for world in (2,) if smoke else (2, 4, 8):
        results = on_ranks(world, _one, 1 if smoke else 8)
        seconds, received, own = results[0]
        of_rank_zero[world] = seconds / (own / 1e6)
        total = sum(result[2] for result in results) / 1e6
        name = f"{world} ranks, {total:.1f} Mtok"
        bars.append(Bar("exchange", f"{name}: rank 0", seconds / total, 0.02, "CPU s/Mtok", is_time=True))
        completions = own / LENGTH * world
        most = 16 * own + 64 * completions
        bars.append(Bar("exchange", f"{name}: bytes a rank takes in, of what it may", received / most, 1.0))
    if not smoke:
        growth = of_rank_zero[8] / of_rank_zero[2]
        bars.append(Bar("exchange", "rank 0's seconds an own token, 8 ranks over 2", growth, 2.0, is_time=True))
    return bars
