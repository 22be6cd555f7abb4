"""A rollout server, or the embedded engine: its weights and key-value cache on a GPU, and how long it generates.

Seconds follow from what a GPU must read and multiply, and from how long completions are. One iteration of a replica
gives each of its running sequences a token and takes

    fixed + sequences x host work + max(bytes of weights / bandwidth, FLOPs / peak) + cached bytes / bandwidth

so a few stragglers cost nearly as much an iteration as a full batch, and the seconds of a rollout are not proportional
to its tokens. `rollout_s` runs a rollout through that formula, many iterations at a time. It simulates whole replicas
instead of integrating over a length distribution: what decides is which sequences still run, and when.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dppo_megatron.config.ranges import Range
from dppo_megatron.config.schema import Config
from dppo_megatron.randomness import generator
from dppo_megatron.steps.rollout_cost import RolloutCost
from dppo_megatron.types import FloatArray, IntArray, UserError
from dppo_megatron.weights.architecture import Architecture
from dppo_megatron.workbench.planning.shares import active_parameters, whole_model
from dppo_megatron.workbench.planning.site import ENGINE_WORK_BYTES, Site

_TENSOR = ("--tensor-parallel-size", "-tp", "--tp-size", "--tp")
_REPLICAS = ("--data-parallel-size", "-dp", "--dp-size", "--dp")
_SHARE = ("--gpu-memory-utilization", "--mem-fraction-static")
_CACHE = ("--kv-cache-dtype",)
_QUANTIZATION = ("--quantization", "-q")
_AT_A_TIME = ("--max-num-seqs", "--max-running-requests")
DEFAULT_SHARE = 0.9
"""vLLM's and SGLang's own defaults are 0.85 to 0.92 by version and model; give it in rollout.servers.args."""
_GROWTH = 1.5
"""The embedded engine's cache grows by half of what is there (`rollout/decoder.py`)."""


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """One GPU that generates."""

    kind: str
    gpus: int
    """All that generate."""
    tensor: int
    """Over how many GPUs a replica is split."""
    colocated: bool
    """On the trainer's GPUs."""
    weights: float
    cache: float
    """Bytes for keys and values."""
    budget: float
    """Bytes that the engine takes in all while it generates."""
    cache_per_token: float
    """Bytes of one token's keys and values on one GPU."""
    longest: int
    """Tokens of the longest sequence."""
    max_sequences: int
    """Completions that a replica is given at a time."""
    expert_weights: float = 0.0
    """Bytes of experts, part of `weights`."""
    expert_split: int = 1
    """Over how many GPUs a mixture's experts are split; of a dense model `tensor`."""
    bytes_each: int = 2
    """Of a parameter that is not quantized."""
    weights_fp8: bool = False
    """Products run in 8 bits."""
    behind_one: int = 1
    """Replicas behind one server whose balancer chooses one for each completion (vLLM)."""

    @property
    def replicas(self) -> int:
        """Copies of the model that generate."""
        return max(1, self.gpus // self.tensor)

    @property
    def sequences(self) -> float:
        """Sequences of the longest length that a replica's cache holds."""
        return self.cache / self.cache_per_token / self.longest


def plan_engine(config: Config, architecture: Architecture, site: Site, longest: int) -> EnginePlan:
    """The engine of `config`. Raises UserError for arguments that no server would take."""
    rollout, each = config.rollout, 2 if config.model.dtype == "bfloat16" else 4
    if rollout.engine == "hf":
        return _embedded(config, architecture, site, longest, each)
    arguments = rollout.servers.args
    tensor, replicas = _count(arguments, _TENSOR), _count(arguments, _REPLICAS)
    share = _number(arguments, _SHARE, DEFAULT_SHARE, "(0, 1]")
    cached = 1 if (_value(arguments, _CACHE) or "").startswith("fp8") else each
    named = [gpu for group in rollout.servers.gpus for gpu in group.split(",")]
    on_node = len(named) or rollout.servers.count * tensor * replicas
    launched = rollout.servers.launch == "local"
    fp8 = (_value(arguments, _QUANTIZATION) or "").startswith("fp8")
    split = tensor * (replicas if architecture.experts and rollout.engine == "vllm" else 1)
    # quantization leaves embedding and output layer as they are
    ends = (1 if architecture.tied_embeddings else 2) * architecture.vocab_size * architecture.hidden_size
    width, experts = 1 if fp8 else each, whole_model(architecture, experts=True)
    of_experts = experts * width / split
    weights = (ends * each + (whole_model(architecture, experts=False) - ends) * width) / tensor + of_experts
    limit = rollout.limits.max_concurrent_sequences
    budget = share * site.gpu_memory
    return EnginePlan(
        kind=rollout.engine,
        gpus=on_node * site.nodes if launched else site.engine_gpus,
        tensor=tensor,
        colocated=rollout.servers.colocate,
        weights=weights,
        cache=max(0.0, budget - weights - ENGINE_WORK_BYTES),
        budget=budget,
        cache_per_token=cache_per_token(architecture, tensor, cached),
        longest=longest,
        max_sequences=min(limit, int(_number(arguments, _AT_A_TIME, limit, "[1, 1e6]"))),
        expert_weights=of_experts,
        expert_split=split,
        bytes_each=each,
        weights_fp8=fp8,
        behind_one=replicas if rollout.engine == "vllm" else 1,
    )


def cache_per_token(architecture: Architecture, tensor: int, bytes_each: int) -> float:
    """Bytes of one token's keys and values on one of `tensor` GPUs; a head is never split, but copied."""
    heads = max(architecture.num_kv_heads / tensor, 1)
    return 2 * architecture.num_layers * heads * architecture.head_dim * bytes_each


def _embedded(config: Config, architecture: Architecture, site: Site, longest: int, each: int) -> EnginePlan:
    rollout = config.rollout
    asked = -(-rollout.prompts_per_step * rollout.completions_per_prompt // site.gpus)
    batch = min(asked, rollout.limits.max_concurrent_sequences)
    per_token = cache_per_token(architecture, 1, each)
    weights = float(whole_model(architecture) * each)
    cache = _GROWTH * per_token * batch * longest
    logits = batch * architecture.vocab_size * (each + 8)  # and in float32, and their exponentials
    budget = weights + cache + logits
    return EnginePlan("hf", site.gpus, 1, True, weights, cache, budget, per_token, longest, batch, bytes_each=each)


def _value(arguments: Sequence[str], names: Sequence[str]) -> str | None:
    """The last value given to any of `names`, as `--name value` or `--name=value`."""
    found = None
    for place, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name in names:
            found = value if equals else (arguments[place + 1] if place + 1 < len(arguments) else "")
    return found


def _count(arguments: Sequence[str], names: Sequence[str]) -> int:
    number = _number(arguments, names, 1, "[1, 1024]")
    if number != int(number):
        raise UserError(f"rollout.servers.args: {names[0]} {number:g}: must be a whole number")
    return int(number)


def _number(arguments: Sequence[str], names: Sequence[str], default: float, interval: str) -> float:
    text, allowed = _value(arguments, names), Range.parse(interval)
    if text is None:
        return default
    try:
        number = float(text)
    except ValueError:
        raise UserError(f"rollout.servers.args: {names[0]} {text!r} is not a number above 0") from None
    if number not in allowed:
        raise UserError(f"rollout.servers.args: {names[0]} {text}: {allowed.wanted(number)}")
    return number


SPREAD = 0.6
"""Sigma of the logarithm between prompts, and again within a prompt's completions. An assumption; `--trace` takes those
of a run."""
_GROUPS = 512


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of prompts and completions."""

    prompt: float
    """Mean."""
    completion: float
    """Mean."""
    drawn: IntArray
    """[groups, G] lengths of completions, a population to draw from."""

    @property
    def sequence(self) -> float:
        """Mean of both."""
        return self.prompt + self.completion

    @staticmethod
    def assumed(prompt: float, completion: float, cap: int, size: int) -> Lengths:
        """Groups of `size` completions whose mean is `completion` and none of which is above `cap`."""
        random = generator(0, "lengths")
        shape = np.exp(random.normal(0.0, SPREAD, (_GROUPS, 1)) + random.normal(0.0, SPREAD, (_GROUPS, size)))
        return Lengths(prompt, completion, capped(shape, completion, cap))


def capped(shape: FloatArray, mean: float, cap: int) -> IntArray:
    """`shape` times the factor at which its mean is `mean` once nothing is above `cap`; at least 1 each."""
    low, high = 0.0, cap / float(shape.min())
    for _ in range(60):  # halvings: more than the 53 bits of a float64
        middle = (low + high) / 2
        low, high = (middle, high) if np.minimum(shape * middle, cap).mean() < mean else (low, middle)
    return np.clip(np.round(shape * high), 1, cap).astype(np.int64)


BANDWIDTH_SHARE = 0.7
"""Of the data sheet's bandwidth that decoding reaches; docs/plan.md says what it was fitted to."""
FLOPS_SHARE = 0.5
"""Of the data sheet's FLOPs in products of a few hundred rows. An assumption."""
ITERATION_S = 0.004
"""Scheduling, launching and sampling of one iteration, whatever its batch. An assumption."""
SEQUENCE_S = 12e-6
"""A running sequence's share of scheduling, sampling and detokenizing in an iteration. An assumption."""
ALL_REDUCE_S = 15e-6
"""One of the two all-reduces of a layer inside a replica. An assumption, for NVLink."""
LINK_BYTES_S = 300e9
"""Of NVLink in one direction, two thirds of the data sheet's 450 GB/s. An assumption."""
EXPERTS_S = 100e-6
"""Routing, sorting and the second launch of a layer of experts. Fitted likewise."""
_EMBEDDED_LAYER_S = 5e-4
"""A layer of the embedded engine, which launches each kernel from Python. An assumption."""
_STEPS = 48
"""Pieces into which the longest completion is divided; an iteration's seconds are taken as constant within one."""
_ELEMENTS = 8192
"""Sequences that are simulated at most: of a larger rollout as many replicas as hold them, since all are alike."""
_DRAWS = 8
_SHARES = (0.1, 0.25, 0.5, 0.7, 1.0, 1.5)
"""Of a whole step's prompts, where the curve of seconds over tokens has its corners."""
ROOFLINE = (
    f"decode: a roofline of {BANDWIDTH_SHARE:.0%} of the bandwidth, {FLOPS_SHARE:.0%} of the FLOPs and"
    f" {1000 * ITERATION_S:.0f} ms an iteration (docs/plan.md)"
)


@dataclass(frozen=True, slots=True)
class Replica:
    """One replica: seconds of the parts of an iteration, and how much it holds."""

    fixed_s: float
    sequence_s: float
    weights_s: float
    """Reading what every token is multiplied by."""
    experts_s: float
    """Reading every expert; 0 for a dense model."""
    missed: float
    """Share of the experts that one token does not visit."""
    together: int
    """Replicas whose tokens meet in the same experts."""
    token_s: float
    """Multiplying one token."""
    cached_s: float
    """Reading one token's keys and values."""
    max_sequences: int
    """Completions that it is given at a time."""
    max_cached: float
    """Tokens that its cache holds."""
    behind_one: int = 1
    """Replicas behind one server, which spreads the completions of a group over them."""

    def iteration_s(self, sequences: FloatArray, cached: FloatArray) -> FloatArray:
        """Seconds of one iteration of `sequences` [n] whose contexts have `cached` [n] tokens together."""
        touched = 1.0 - self.missed ** (sequences * self.together)
        products = np.maximum(self.weights_s + self.experts_s * touched, sequences * self.token_s)
        return self.fixed_s + sequences * self.sequence_s + products + cached * self.cached_s


def replica_of(architecture: Architecture, site: Site, engine: EnginePlan) -> Replica:
    """The roofline of one replica of a planned engine."""
    bandwidth, experts = site.bandwidth * BANDWIDTH_SHARE, architecture.experts
    layers, tensor = architecture.num_layers, engine.tensor
    embedded = engine.kind == "hf"
    fixed = _EMBEDDED_LAYER_S * layers if embedded else ITERATION_S
    fixed += 2 * layers * ALL_REDUCE_S if tensor > 1 else 0.0
    host = 0.0 if embedded else SEQUENCE_S
    # a ring sends (t - 1) / t of the hidden state twice in each of two all-reduces
    host += 2 * layers * architecture.hidden_size * engine.bytes_each * 2 * (tensor - 1) / tensor / LINK_BYTES_S
    fixed += layers * EXPERTS_S if experts else 0.0
    peak = site.peak_flops * FLOPS_SHARE * (2 if engine.weights_fp8 else 1)
    # of an input embedding only the rows of a batch are read
    rows = 0 if architecture.tied_embeddings else architecture.vocab_size * architecture.hidden_size
    return Replica(
        fixed_s=fixed,
        sequence_s=host,
        weights_s=(engine.weights - engine.expert_weights - rows * engine.bytes_each / tensor) / bandwidth,
        experts_s=engine.expert_weights / bandwidth,
        missed=1.0 - experts.per_token / experts.count if experts else 1.0,
        together=engine.expert_split // tensor,
        token_s=2.0 * active_parameters(architecture) / tensor / peak,
        cached_s=engine.cache_per_token / bandwidth,
        max_sequences=engine.max_sequences,
        max_cached=engine.cache / engine.cache_per_token,
        behind_one=engine.behind_one,
    )


def rollout_s(replica: Replica, lengths: IntArray, prompt_tokens: float, replicas: int) -> float:
    """Seconds until the last of the groups' completions, lengths [groups, G], has ended on `replicas` equal replicas.

    As the product sends them: a group is one request whose prompt is read once, groups go round the replicas, and a
    request that does not fit into `max_sequences` waits until a whole group has ended. As engines run them: vLLM's
    balancer chooses a replica for each completion of a group, and where the cache is full, those that came last wait.
    """
    if not len(lengths):
        return 0.0
    reads = min(replica.behind_one, lengths.shape[1])
    prefill_s = len(lengths) * reads / replicas * prompt_tokens * replica.token_s
    if replica.behind_one > 1:
        lengths = lengths.reshape(-1, 1)
    room = max(replica.max_sequences // lengths.shape[1], 1)
    left = _assigned(lengths, replicas, room)
    clock, done = np.full(replicas, prefill_s), np.zeros_like(left)
    before = np.zeros((replicas, left[0].size), dtype=np.bool_)
    piece = max(1.0, float(lengths.max()) / _STEPS)
    while (going := left > 0).any():
        asked = np.cumsum(going.any(axis=2), axis=1) <= room
        running = (going & asked[:, :, None]).reshape(replicas, -1)
        context = np.where(running, prompt_tokens + done.reshape(running.shape) + piece / 2, 0.0)
        running &= np.cumsum(context, axis=1) <= np.maximum(replica.max_cached, context.max(axis=1))[:, None]
        makes = np.where(running, np.minimum(left.reshape(running.shape), piece), 0.0)
        iterations = np.maximum(makes.max(axis=1), 1e-9)
        sequences, cached = makes.sum(axis=1) / iterations, (makes * context).sum(axis=1) / iterations
        # a sequence that waited for room in the cache has lost its keys and values: they are computed again
        back = np.where(running & ~before & (done.reshape(running.shape) > 0), context, 0.0).sum(axis=1)
        spent = iterations * replica.iteration_s(sequences, cached) + back * replica.token_s
        clock, before = clock + np.where(sequences > 0, spent, 0.0), running
        left, done = left - makes.reshape(left.shape), done + makes.reshape(left.shape)
    return float(clock.max())


def _assigned(lengths: IntArray, replicas: int, room: int) -> FloatArray:
    """[replicas, groups of one, G]: the first groups go round, the next goes to the replica with the fewest tokens."""
    loads = np.zeros(replicas)
    of: list[list[int]] = [[] for _ in range(replicas)]
    totals = lengths.sum(axis=1).tolist()
    for group, total in enumerate(totals):
        at = group % replicas if group < room * replicas else int(loads.argmin())
        of[at].append(group)
        loads[at] += total
    held = np.zeros((replicas, max(map(len, of)), lengths.shape[1]))
    for at, groups in enumerate(of):
        held[at, : len(groups)] = lengths[groups]
    return held


def rollout_cost(replica: Replica, replicas: int, lengths: Lengths, groups: int) -> RolloutCost:
    """Seconds of a round of generation by its tokens, up to one and a half of a whole step of `groups` prompts."""
    drawn = lengths.drawn
    most = max(1, _ELEMENTS // (drawn.shape[1] * -(-groups // replicas)))
    simulated = min(replicas, most)
    random = generator(0, "roofline")
    tokens, seconds = np.zeros(len(_SHARES)), np.zeros(len(_SHARES))
    each = groups / replicas * simulated
    order = random.permutation(len(drawn))
    for draw in range(_DRAWS):  # each begins elsewhere in one order, so that together they are the whole population
        places = np.resize(np.roll(order, -draw * len(order) // _DRAWS), int(_SHARES[-1] * each) + 1)
        for at, share in enumerate(_SHARES):
            chosen = drawn[places[: max(1, round(share * each))]]
            tokens[at] += float(chosen.sum()) * replicas / simulated / _DRAWS
            seconds[at] += rollout_s(replica, chosen, lengths.prompt, simulated) / _DRAWS
    rising = np.diff(tokens, prepend=0.0) > 0  # shares of a few groups may be the same groups
    return RolloutCost((0.0, *tokens[rising].tolist()), (0.0, *np.maximum.accumulate(seconds)[rising].tolist()))
