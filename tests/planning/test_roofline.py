"""The roofline of generation against servers that play it iteration by iteration."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.true_shapes import MODELS, write_config

from dppo_megatron.config.schema import Config
from dppo_megatron.steps.rollout_cost import RolloutCost
from dppo_megatron.weights.architecture import Architecture, read_architecture
from dppo_megatron.weights.layer_parts import Gemma
from dppo_megatron.workbench.planning import generation
from dppo_megatron.workbench.planning.generation import (
    BANDWIDTH_SHARE,
    EnginePlan,
    Lengths,
    plan_engine,
    rollout_cost,
    rollout_s,
)
from dppo_megatron.workbench.planning.site import CHIPS, Site

Groups = npt.NDArray[np.int64]


@dataclass
class _Sequence:
    group: int
    length: int
    context: int
    made: int = 0


@dataclass
class _Server:
    """A replica as vLLM schedules one: arrivals in order, the last one gives way where the cache is full."""

    replica: EnginePlan
    clock: float = 0.0
    waiting: deque[_Sequence] = field(default_factory=deque)
    running: list[_Sequence] = field(default_factory=list)

    def iterate(self) -> list[_Sequence]:
        """One iteration; who has ended."""
        one, computed = self.replica, 0
        cached = sum(s.context for s in self.running)
        while len(self.running) > 1 and cached + len(self.running) > one.max_cached:
            cached -= self.running[-1].context
            self.waiting.appendleft(self.running.pop())
        while self.waiting and (
            not self.running or cached + self.waiting[0].context + len(self.running) + 1 <= one.max_cached
        ):
            cached += self.waiting[0].context
            computed += self.waiting[0].context if self.waiting[0].made else 0
            self.running.append(self.waiting.popleft())
        batch = len(self.running)
        touched = 1.0 - float(one.missed ** (batch * one.together))
        self.clock += one.fixed_s + batch * one.sequence_s + cached * one.cached_s + computed * one.token_s
        self.clock += max(one.weights_s + one.experts_s * touched, batch * one.token_s)
        for sequence in self.running:
            sequence.made, sequence.context = sequence.made + 1, sequence.context + 1
        ended = [s for s in self.running if s.made >= s.length]
        self.running = [s for s in self.running if s.made < s.length]
        return ended


def play(replica: EnginePlan, lengths: Groups, prompt: int, replicas: int) -> float:
    """Seconds until the last group has ended. Rank 0 sends a group to the server with the fewest outstanding that has
    room for it; behind one server each completion goes to the replica with the fewest."""
    servers = [_Server(replica) for _ in range(replicas)]
    size = int(lengths.shape[1])
    queue, left = deque(range(len(lengths))), dict.fromkeys(range(len(lengths)), size)
    owner: dict[int, int] = {}

    def outstanding(server: int) -> int:
        """Completions of groups that have not ended."""
        return size * sum(1 for group, at in owner.items() if at == server and left[group])

    def send() -> None:
        """All that there is room for."""
        while queue:
            room = [at for at in range(replicas) if outstanding(at) + size <= replica.max_sequences]
            if replica.behind_one > 1:
                if size * sum(1 for group in owner if left[group]) + size > replica.max_sequences * replicas:
                    return
            elif not room:
                return
            group = queue.popleft()
            owner[group] = min(room, key=outstanding) if replica.behind_one == 1 else 0
            for length in lengths[group]:
                at = owner[group]
                if replica.behind_one > 1:
                    at = min(range(replicas), key=lambda at: len(servers[at].waiting) + len(servers[at].running))
                servers[at].waiting.append(_Sequence(group, int(length), prompt))

    send()
    for server in servers:
        prompts = len({s.group for s in server.waiting})
        server.clock = prompts * prompt * replica.token_s
    while any(left.values()):
        busy = [s for s in servers if s.running or s.waiting]
        server = min(busy, key=lambda s: s.clock)
        ended = server.iterate()
        for sequence in ended:
            left[sequence.group] -= 1
        if ended and queue:
            idle = [s for s in servers if not s.running and not s.waiting]
            send()
            for one in idle:
                one.clock = max(one.clock, server.clock)
    return max(s.clock for s in servers)


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Architecture]:
    folder: Path = tmp_path_factory.mktemp("shapes")
    return {name: read_architecture(write_config(folder / name, name)) for name in MODELS}


def _drawn(random: np.random.Generator, groups: int, size: int, cap: int, mean: float) -> Groups:
    """Log-normal lengths with the mean `mean` once they end at `cap`, written down a second time."""
    shape = np.exp(random.normal(0, 0.6, (groups, 1)) + random.normal(0, 0.6, (groups, size)))
    factors = mean * np.linspace(0.3, 6, 400)
    means = [np.minimum(shape * factor, cap).mean() for factor in factors]
    return np.minimum(np.maximum(shape * np.interp(mean, means, factors), 1), cap).astype(np.int64)


CASES = {  # model, engine's arguments, prompts, completions, cap, mean, GPUs, tolerance
    "recipe 8B": ("qwen3_8b", ["--tensor-parallel-size=2", "--data-parallel-size=4"], 128, 16, 4096, 2048, 8, 0.1),
    "4B of the paper": ("qwen3_4b", [], 512, 5, 1024, 450, 8, 0.1),
    "8B long": ("qwen3_8b", [], 64, 16, 8192, 3000, 8, 0.1),
    "30B-A3B": ("qwen3_30b_a3b", ["--tensor-parallel-size=2"], 64, 16, 4096, 2048, 8, 0.1),
    # Who gets a later group is decided by the clock there, and by the tokens given out here: seconds saved differ by up
    # to a twentieth of the rollout, which is much of what 15 % save
    "three waves": ("qwen3_4b", ["--max-num-seqs=64"], 96, 8, 2048, 800, 4, 0.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_skipping_saves(shapes: dict[str, Architecture], case: str) -> None:
    """Seconds saved by skipping 15, 30 and 50 % of the prompts, within 10 % of the replay of the same roofline; the
    curve that `plan` multiplies by, drawn from its own population, within 15 % of three replayed rollouts."""
    name, arguments, prompts, size, cap, mean, gpus, within = CASES[case]
    config, chip = Config(), CHIPS["h100"]
    config.model.dtype = "bfloat16"
    config.rollout.engine, config.rollout.servers.args = "vllm", [*arguments, "--gpu-memory-utilization=0.6"]
    config.rollout.limits.max_concurrent_sequences = 1024
    site = Site(gpus, 8, chip.memory_bytes, chip.peak_flops, 1e15, gpus, chip.bandwidth)
    engine = plan_engine(config, shapes[name], site, cap)
    played, planned = np.zeros(4), np.zeros(4)
    for seed in range(3):
        lengths = _drawn(np.random.default_rng(seed), prompts, size, cap, mean)
        for at, share in enumerate((1.0, 0.85, 0.7, 0.5)):
            kept = lengths[: round(share * prompts)]
            played[at] += play(engine, kept, 150, engine.replicas) / 3
            planned[at] += rollout_s(engine, kept, 150, engine.replicas) / 3
    assert planned[0] == pytest.approx(played[0], rel=0.05)
    saved, noise = played[0] - played[1:], 0.0 if within else 0.06 * played[0]
    assert planned[0] - planned[1:] == pytest.approx(saved, rel=within, abs=noise)
    cost = rollout_cost(engine, Lengths.assumed(150, mean, cap, size), prompts)
    assert cost.of(prompts * size * mean) == pytest.approx(played[0], rel=0.15)


@pytest.mark.parametrize(
    ("engine", "arguments", "windowed"),
    [
        ("vllm", ["--tensor-parallel-size=2"], 1024),
        ("vllm", ["--tensor-parallel-size=2", "--disable-hybrid-kv-cache-manager"], 32768),
        ("sglang", ["--tp=2"], 32768),
        ("hf", [], 32768),
    ],
)
def test_layers_with_a_window_hold_no_more(
    shapes: dict[str, Architecture], engine: Any, arguments: list[str], windowed: int
) -> None:
    """Gemma 3 27B's 52 of 62 layers, in vLLM: of a sequence of 32,768 tokens each of two GPUs holds 10 layers whole and
    1,024 tokens of the others, and an iteration reads as much. As if it were whole everywhere in other engines, and
    where vLLM is told to."""
    gemma = Gemma(1024, tuple(layer % 6 != 5 for layer in range(62)), shapes["qwen3_32b"].rope, 1.0)
    sizes: dict[str, Any] = {"num_layers": 62, "hidden_size": 5376, "num_heads": 32, "num_kv_heads": 16}
    shape = replace(shapes["qwen3_32b"], **sizes, ffn_size=21504, tied_embeddings=True, gemma=gemma)
    config, chip = Config(), CHIPS["h100"]
    config.model.dtype, config.rollout.engine, config.rollout.servers.args = "bfloat16", engine, arguments
    plan = plan_engine(config, shape, Site(2, 2, chip.memory_bytes, chip.peak_flops, 1e15, engine_gpus=2), 32768)
    held = (10 * 32768 + 52 * windowed) * 2 * 16 * 128 * 2 / plan.tensor
    assert plan.longest_bytes == pytest.approx(held)
    assert plan.max_cached == pytest.approx(32768 * plan.cache / held)
    empty, full = (plan.iteration_s(np.array([1.0]), plan.held(np.array([tokens]))) for tokens in (0.0, 32768.0))
    assert float((full - empty)[0]) == pytest.approx(held / (chip.bandwidth * BANDWIDTH_SHARE))
    # in a cache for three of them as if they were whole, eight go at once, or wait
    small, eight = replace(plan, cache=3 * 32768 * plan.cache_per_token), np.full((8, 1), 32000)
    seconds = [rollout_s(replace(small, windowed=share), eight, 768, 1) for share in (plan.windowed, 0.0)]
    assert (seconds[0] < 0.5 * seconds[1]) == (windowed == 1024)


@pytest.mark.parametrize(
    "spelling", ["--tp 8 --attn-dp-size 8 --max-running-requests=800", "--tp 8 --dp 8 --enable-dp-attention"]
)
def test_groups_of_attention_are_planned_as_replicas(shapes: dict[str, Architecture], spelling: str) -> None:
    """Each keeps its own sequences on its own GPUs, and their tokens meet in the same experts: what vLLM has by
    replicas of a mixture. SGLang divides --max-running-requests among them."""
    config, chip = Config(), CHIPS["h100"]
    site = Site(8, 8, chip.memory_bytes, chip.peak_flops, 1e15, 8, chip.bandwidth)
    planned = []
    for engine, arguments in (
        ("sglang", spelling.split()),
        ("vllm", ["--data-parallel-size=8", *(["--max-num-seqs=100"] if "=800" in spelling else [])]),
    ):
        config.rollout.engine, config.rollout.servers.args = engine, arguments
        one = plan_engine(config, shapes["qwen3_30b_a3b"], site, 4096)
        planned.append((one.replicas, one.weights, one.cache_per_token, one.together, one.max_sequences, one.token_s))
    assert planned[0] == planned[1] and planned[0][0] == 8


def test_a_curve_of_seconds() -> None:
    """Lines between the points, the last one continued; a round of nothing takes nothing."""
    cost = RolloutCost((0.0, 10.0, 30.0), (0.0, 4.0, 8.0))
    assert [cost.of(tokens) for tokens in (0, 5, 10, 20, 50)] == [0, 2, 4, 6, 12]
    assert cost.saved(30, 0.5) == pytest.approx(1 - 5 / 8) and cost.saved(0, 0.5) == 0 and cost.average == 8 / 30
    assert cost.scaled(2).of(60) == 8


def test_steps_that_stream_take_what_the_benchmark_says(shapes: dict[str, Architecture]) -> None:
    """The table of docs/engines.md, of `benchmarks/streaming.py`: seconds of a step of 32 x 8 completions of at most
    16k tokens over those at full load, within a fifth; without streaming less the 0.2 of its update. And what is left
    of a step waits for its longest no more: skipping saves nearly its share."""
    config, chip, random = Config(), CHIPS["h100"], np.random.default_rng(0)
    config.model.dtype, config.rollout.engine = "bfloat16", "vllm"
    config.rollout.servers.args = ["--tensor-parallel-size=2"]
    config.rollout.limits.max_concurrent_sequences = 1024
    site = Site(8, 8, chip.memory_bytes, chip.peak_flops, 1e15, 8, chip.bandwidth)
    engine = plan_engine(config, shapes["qwen3_8b"], site, 16384 + 150)
    logarithms = random.normal(8.8, 0.56, (1280, 1)) + random.normal(0.0, 0.42, (1280, 8))
    drawn = np.minimum(np.exp(logarithms), 16384).astype(np.int64)
    lengths, tokens = Lengths(150, float(drawn.mean()), drawn), 32 * 8 * float(drawn.mean())
    costs = {ahead: rollout_cost(engine, lengths, 32, ahead + 1) for ahead in (0, 1, 2, 4, 8, 17, 35)}
    full = 2 * costs[35].of(tokens) - costs[17].of(tokens)  # of 36 steps the second half: without the end of a round
    found = {ahead: costs[ahead].of(tokens) / full for ahead in (0, 1, 2, 4, 8)}
    assert found == pytest.approx({0: 2.53 - 0.2, 1: 1.86, 2: 1.52, 4: 1.56, 8: 1.05}, rel=0.2)
    assert costs[0].saved(tokens, 0.3) < 0.15 and 0.24 < costs[8].saved(tokens, 0.3) < 0.31


def test_a_round_of_many_steps_is_played_as_often_as_needed(
    shapes: dict[str, Architecture], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nine steps that stream are one round, which is as much of the population as eight draws of a step: a plan played
    nine times the completions, and again for each change that it tries."""
    played: list[int] = []

    def count(engine: EnginePlan, lengths: Groups, prompt_tokens: float, replicas: int) -> float:
        played.append(lengths.size)
        return rollout_s(engine, lengths, prompt_tokens, replicas)

    monkeypatch.setattr(generation, "rollout_s", count)
    config, chip = Config(), CHIPS["h100"]
    config.model.dtype, config.rollout.engine = "bfloat16", "vllm"
    config.rollout.servers.args = ["--tensor-parallel-size=2"]
    site = Site(8, 8, chip.memory_bytes, chip.peak_flops, 1e15, 8, chip.bandwidth)
    engine, sums = plan_engine(config, shapes["qwen3_8b"], site, 4096 + 150), {}
    for ahead in (0, 1, 4, 8):
        played.clear()
        rollout_cost(engine, Lengths.assumed(150, 2048, 4096, 8), 32, ahead + 1)
        sums[ahead] = sum(played)
    assert max(sums.values()) < 3 * sums[0]


def test_mean_of_capped_lengths() -> None:
    """The mean that was asked for is the mean after the cap."""
    drawn = Lengths.assumed(150, 3200, 3976, 8).drawn
    assert drawn.mean() == pytest.approx(3200, rel=1e-3) and drawn.max() == 3976 and drawn.min() >= 1
