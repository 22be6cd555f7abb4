"""A rollout server, or the embedded engine: its weights and key-value cache on a GPU, and how long it generates.

docs/plan.md has the formula of an iteration, in which a few stragglers cost nearly as much as a full batch. `rollout_s`
runs a rollout through it, many iterations at a time. It simulates whole replicas instead of integrating over a length
distribution: what decides is which sequences still run, and when.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dppo_megatron.config.rollout import ServersConfig
from dppo_megatron.config.schema import Config
from dppo_megatron.config.server_args import named_option, read_options, read_split
from dppo_megatron.randomness import generator
from dppo_megatron.rollout.fp8_weights import check_split
from dppo_megatron.steps.rollout_cost import RolloutCost
from dppo_megatron.types import FloatArray, IntArray, UserError
from dppo_megatron.weights.architecture import Architecture
from dppo_megatron.workbench.planning.shares import active_parameters, whole_model
from dppo_megatron.workbench.planning.site import ENGINE_WORK_BYTES, SLEEPING_BYTES, Site

BANDWIDTH_SHARE = 0.7
"""Share of the data sheet's bandwidth that decoding reaches; docs/plan.md says what it was fitted to."""
FLOPS_SHARE = 0.5
"""Share of the data sheet's FLOPs that products of a few hundred rows reach. An assumption."""
ITERATION_S = 0.004
"""Scheduling, launching and sampling of one iteration, whatever its batch. An assumption."""
SEQUENCE_S = 12e-6
"""A running sequence's share of scheduling, sampling and detokenizing in an iteration. An assumption."""
ALL_REDUCE_S = 15e-6
"""One of the two all-reduces of a layer inside a replica. An assumption, for NVLink."""
LINK_SHARE = 2 / 3
"""Share of NVLink's bandwidth in one direction that transfers reach. An assumption."""
NETWORK_BYTES_S = 40e9
"""Between nodes: four fifths of a GPU's own 400 Gb/s adapter. An assumption."""
EXPERTS_S = 100e-6
"""Routing, sorting and the second launch of a layer of experts. Fitted as BANDWIDTH_SHARE is."""
_EMBEDDED_LAYER_S = 5e-4
"""A layer of the embedded engine, which launches each kernel from Python. An assumption."""
DEFAULT_SHARE = 0.9
"""vLLM's and SGLang's own defaults are 0.85 to 0.92 by version and model; give it in rollout.servers.args."""
_GROWTH = 1.5
"""The embedded engine's cache grows by half of its size (`rollout/decoder.py`)."""


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """One replica of the model: bytes on each of its GPUs, and seconds of the parts of an iteration."""

    kind: str
    gpus: int
    """All GPUs that generate."""
    tensor: int
    """GPUs over which a replica is split."""
    colocated: bool
    weights: float
    synced: float
    """Bytes that a weight sync sends: half of bfloat16's where servers hold FP8."""
    cache: float
    """Bytes for keys and values."""
    budget: float
    """Bytes that the engine takes in all while it generates."""
    cache_per_token: float
    """Bytes of one token's keys and values on one GPU, of all layers."""
    windowed: float
    """Share of the layers that keep and read a sequence's last `window` tokens only."""
    window: int
    longest: int
    max_sequences: int
    """Completions that a replica is given at a time."""
    behind_one: int
    """Replicas behind one server whose balancer spreads the completions of a group over them (vLLM)."""
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

    @property
    def replicas(self) -> int:
        """Copies of the model that generate."""
        return max(1, self.gpus // self.tensor)

    def held(self, context: FloatArray) -> FloatArray:
        """What sequences of `context` [...] tokens cache, in tokens of all layers: layers with windows keep fewer."""
        return context - self.windowed * np.maximum(context - self.window, 0.0)

    @property
    def longest_bytes(self) -> float:
        """The longest sequence's keys and values on one GPU."""
        return self.cache_per_token * float(self.held(np.array([float(self.longest)]))[0])

    @property
    def max_cached(self) -> float:
        """Tokens that a replica's cache holds, of the longest sequences."""
        return self.longest * self.cache / self.longest_bytes

    @property
    def context(self) -> float:
        """Bytes that a sleeping server keeps; the embedded engine has none, and does not sleep."""
        return 0.0 if self.kind == "hf" else SLEEPING_BYTES

    def iteration_s(self, sequences: FloatArray, cached: FloatArray) -> FloatArray:
        """Seconds of one iteration of `sequences` [n] whose contexts have `cached` [n] tokens together, as `held`."""
        touched = 1.0 - self.missed ** (sequences * self.together)
        products = np.maximum(self.weights_s + self.experts_s * touched, sequences * self.token_s)
        return self.fixed_s + sequences * self.sequence_s + products + cached * self.cached_s


def plan_engine(config: Config, architecture: Architecture, site: Site, longest: int) -> EnginePlan:
    """The engine of `config`. Raises UserError for arguments that no server would take."""
    rollout, layers, experts = config.rollout, architecture.num_layers, architecture.experts
    embedded, is_vllm = rollout.engine == "hf", rollout.engine == "vllm"
    arguments = () if embedded else rollout.servers.args
    options, split = read_options(arguments, _OPTIONS), read_split(arguments)
    tensor, is_fp8 = split.heads, rollout.quantization != "off"  # a group of attention is an engine of its own
    if is_fp8 and rollout.servers.launch == "local":
        check_split(rollout, architecture)
    each = 2 if config.model.dtype == "bfloat16" else 4
    together, width = (split.replicas if is_vllm else split.attention) if experts else 1, 1 if is_fp8 else each
    # quantization leaves embedding and output layer as they are
    rows = architecture.vocab_size * architecture.hidden_size
    unquantized = rows if architecture.tied_embeddings else 2 * rows
    of_experts = whole_model(architecture, experts=True) * width / (tensor * together)
    dense = (unquantized * each + (whole_model(architecture, experts=False) - unquantized) * width) / tensor
    cached = replace(architecture, latent=None) if embedded else architecture  # the embedded engine keeps them expanded
    windows = _windows(architecture, arguments) if is_vllm else []
    per_token = cache_per_token(cached, tensor, 1 if options["cache"].startswith("fp8") else each)
    limit = rollout.limits.max_concurrent_sequences
    if embedded:
        gpus, fixed_s, sequence_s = site.gpus, _EMBEDDED_LAYER_S * layers, 0.0
        limit = min(limit, -(-rollout.prompts_per_step * rollout.completions_per_prompt // gpus))
        cache = _GROWTH * per_token * limit * longest
        # logits, a float32 copy of them, and their exponentials
        budget = dense + of_experts + cache + limit * architecture.vocab_size * (each + 8)
    else:
        if rollout.servers.launch == "local":  # servers of `serve` are on machines of their own
            _check_devices(rollout.servers, site)
        named = [gpu for group in rollout.servers.gpus for gpu in group.split(",")]
        on_node = len(named) or rollout.servers.count * split.gpus
        gpus = on_node * site.nodes if rollout.servers.launch == "local" else site.engine_gpus
        of_one_engine = (options["sequences"] or 0) // split.attention
        limit, budget = min(limit, of_one_engine or limit), options["share"] * site.gpu_memory
        cache = max(0.0, budget - dense - of_experts - ENGINE_WORK_BYTES)
        fixed_s, sequence_s = ITERATION_S + (2 * layers * ALL_REDUCE_S if split.tensor > 1 else 0.0), SEQUENCE_S
    # a ring sends (t - 1) / t of the hidden state twice in each of two all-reduces
    sequence_s += 2 * layers * architecture.hidden_size * each * 2 * (tensor - 1) / tensor / (site.link * LINK_SHARE)
    bandwidth, peak = site.bandwidth * BANDWIDTH_SHARE, site.peak_flops * FLOPS_SHARE * (2 if is_fp8 else 1)
    return EnginePlan(
        kind=rollout.engine,
        gpus=gpus,
        tensor=tensor,
        colocated=embedded or rollout.servers.colocate,
        weights=dense + of_experts,
        synced=dense * tensor + of_experts * tensor * together,
        cache=cache,
        budget=budget,
        cache_per_token=per_token,
        windowed=len(windows) / layers,
        window=max(windows, default=0),
        longest=longest,
        max_sequences=limit,
        behind_one=split.replicas if is_vllm else 1,
        fixed_s=fixed_s + (layers * EXPERTS_S if experts else 0.0),
        sequence_s=sequence_s,
        # only the batch's rows of an input embedding are read
        weights_s=(dense - (0 if architecture.tied_embeddings else rows * each / tensor)) / bandwidth,
        experts_s=of_experts / bandwidth,
        missed=1.0 - experts.per_token / experts.count if experts else 1.0,
        together=together,
        token_s=2.0 * active_parameters(architecture) / tensor / peak,
        cached_s=per_token / bandwidth,
    )


def _check_devices(servers: ServersConfig, site: Site) -> None:
    """Raise UserError for devices of launched servers that the trainer's nodes do not have, or that train. Devices
    named by UUID are not checked."""
    if servers.colocate and servers.count > 1 and not servers.gpus:
        raise UserError(
            f"rollout.servers.gpus is empty: all {servers.count} servers would start on a node's first GPU; give each"
            " its own"
        )
    numbers = [int(gpu) for entry in servers.gpus for gpu in entry.split(",") if gpu.strip().isdecimal()]
    first, end = (0, site.ranks_per_node) if servers.colocate else (site.ranks_per_node, site.gpus_per_node)
    if wrong := [number for number in numbers if not first <= number < end]:
        of_trainer = f"the trainer has all of a node (--ranks-per-node {first})"
        free = f"the servers can have {first} to {end - 1}" if first < end else of_trainer
        share = "" if servers.colocate else ", or share the trainer's with rollout.servers.colocate=true"
        raise UserError(f"rollout.servers.gpus names GPU {wrong[0]}, but {free}: change it and servers.args{share}")


def _windows(architecture: Architecture, arguments: Sequence[str]) -> list[int]:
    """The window of each layer of which vLLM caches no more than that.

    It frees blocks that have left a window (SlidingWindowManager; 0.32.0, on GPUs, unless an argument turns that off).
    Not counted are layers that it adds to make its groups of layers equal, such as 60 in place of Gemma 3 27B's 52.
    """
    if named_option(arguments, ("--disable-hybrid-kv-cache-manager",)):
        return []
    return [window for layer in range(architecture.num_layers) if (window := architecture.window_of(layer))]


def cache_per_token(architecture: Architecture, tensor: int, bytes_each: int) -> float:
    """Bytes of one token's keys and values on one of `tensor` GPUs; a head is copied rather than split. Servers cache
    latent attention's compressed, all of it on each GPU."""
    if architecture.latent is not None:
        return architecture.num_layers * (architecture.latent.rank + architecture.latent.rope_dim) * bytes_each
    heads = max(architecture.num_kv_heads / tensor, 1)
    return 2 * architecture.num_layers * heads * architecture.head_dim * bytes_each


_OPTIONS: dict[str, tuple[tuple[str, ...], type, Any, str]] = {
    "share": (("--gpu-memory-utilization", "--mem-fraction-static"), float, DEFAULT_SHARE, "(0, 1]"),
    "sequences": (("--max-num-seqs", "--max-running-requests"), int, None, "[1, 1e6]"),
    "cache": (("--kv-cache-dtype",), str, "", ""),
}
"""vLLM's and SGLang's names, type, default and range."""


SPREAD = 0.6
"""Sigma of log lengths between prompts, and again within a prompt's completions. An assumption; `--trace` takes a run's
lengths instead."""
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

    @property
    def square(self) -> float:
        """Mean of a whole sequence's length squared, to which attention's FLOPs are proportional."""
        return float(np.square(self.prompt + self.drawn).mean())

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


_STEPS = 48
"""Pieces into which the longest completion is divided; an iteration's seconds are taken as constant within one."""
_ELEMENTS = 8192
"""At most so many sequences are simulated: of a larger rollout only some replicas, since all are alike."""
_DRAWS = 8
"""Parts of the population over which a step is averaged; fewer where a simulated round has several steps already."""
_SHARES = (0.1, 0.25, 0.5, 0.7, 1.0, 1.5)
"""Shares of a whole step's prompts at which the curve of seconds over tokens has its corners."""
ROOFLINE = (
    f"decode: a roofline of {BANDWIDTH_SHARE:.0%} of the bandwidth, {FLOPS_SHARE:.0%} of the FLOPs and"
    f" {1000 * ITERATION_S:.0f} ms an iteration (docs/plan.md)"
)


def rollout_s(engine: EnginePlan, lengths: IntArray, prompt_tokens: float, replicas: int) -> float:
    """Seconds until the last of the groups' completions, lengths [groups, G], has ended on `replicas` equal replicas.

    The trainer is on several machines: a group is one request whose prompt is read once, groups go to the servers in
    turn, and a request that does not fit into `max_sequences` waits until a whole group has ended. (On one machine it
    spreads a group over its servers, `Work.spread`, which takes up to a tenth less.) As in the engines, vLLM's balancer
    chooses a replica for each completion of a group, and where the cache is full, the latest arrivals wait.
    """
    if not len(lengths):
        return 0.0
    reads = min(engine.behind_one, lengths.shape[1])
    prefill_s = len(lengths) * reads / replicas * prompt_tokens * engine.token_s
    if engine.behind_one > 1:
        lengths = lengths.reshape(-1, 1)
    room = max(engine.max_sequences // lengths.shape[1], 1)
    left = _assigned(lengths, replicas, room)
    clock, done = np.full(replicas, prefill_s), np.zeros_like(left)
    ran_before = np.zeros((replicas, left[0].size), dtype=np.bool_)
    piece, capacity = max(1.0, float(lengths.max()) / _STEPS), engine.cache / engine.cache_per_token
    while (unfinished := left > 0).any():
        admitted = np.cumsum(unfinished.any(axis=2), axis=1) <= room
        running = (unfinished & admitted[:, :, None]).reshape(replicas, -1)
        context = np.where(running, prompt_tokens + done.reshape(running.shape) + piece / 2, 0.0)
        held = engine.held(context)
        running &= np.cumsum(held, axis=1) <= np.maximum(capacity, held.max(axis=1))[:, None]
        new = np.where(running, np.minimum(left.reshape(running.shape), piece), 0.0)
        iterations = np.maximum(new.max(axis=1), 1e-9)
        sequences, cached = new.sum(axis=1) / iterations, (new * held).sum(axis=1) / iterations
        # a sequence that waited for room in the cache has lost its keys and values: they are computed again
        again = np.where(running & ~ran_before & (done.reshape(running.shape) > 0), context, 0.0).sum(axis=1)
        spent = iterations * engine.iteration_s(sequences, cached) + again * engine.token_s
        clock, ran_before = clock + np.where(sequences > 0, spent, 0.0), running
        left, done = left - new.reshape(left.shape), done + new.reshape(left.shape)
    return float(clock.max())


def _assigned(lengths: IntArray, replicas: int, room: int) -> FloatArray:
    """[replicas, groups of one, G] lengths: the first groups go round, each later one to where tokens are fewest."""
    loads = np.zeros(replicas)
    groups_of: list[list[int]] = [[] for _ in range(replicas)]
    totals = lengths.sum(axis=1).tolist()
    for group, total in enumerate(totals):
        replica = group % replicas if group < room * replicas else int(loads.argmin())
        groups_of[replica].append(group)
        loads[replica] += total
    assigned = np.zeros((replicas, max(map(len, groups_of)), lengths.shape[1]))
    for replica, groups in enumerate(groups_of):
        assigned[replica, : len(groups)] = lengths[groups]
    return assigned


def rollout_cost(engine: EnginePlan, lengths: Lengths, groups: int, together: int = 1) -> RolloutCost:
    """Seconds that a step of `groups` prompts generates, by its tokens, up to those of one and a half whole steps.
    Where `together` steps stream into one another, it is the step's share of the round that generates all of them."""
    groups, draws = groups * together, max(1, _DRAWS // together)
    drawn, replicas = lengths.drawn, engine.replicas
    most = max(1, _ELEMENTS // (drawn.shape[1] * -(-groups // replicas)))
    simulated = min(replicas, most)
    random = generator(0, "roofline")
    tokens, seconds = np.zeros(len(_SHARES)), np.zeros(len(_SHARES))
    each = groups / replicas * simulated
    order = random.permutation(len(drawn))
    for draw in range(draws):  # each starts elsewhere in one order, so that all draws together cover the population
        places = np.resize(np.roll(order, -draw * len(order) // draws), int(_SHARES[-1] * each) + 1)
        for at, share in enumerate(_SHARES):
            chosen = drawn[places[: max(1, round(share * each))]]
            tokens[at] += float(chosen.sum()) * replicas / simulated / draws
            seconds[at] += rollout_s(engine, chosen, lengths.prompt, simulated) / draws
    rising = np.diff(tokens, prepend=0.0) > 0  # two shares of few groups may round to the same groups
    seconds = np.maximum.accumulate(seconds)[rising] / together
    return RolloutCost((0.0, *(tokens[rising] / together).tolist()), (0.0, *seconds.tolist()))
