"""Bytes on a GPU and on its host in every phase of a step.

    generate     server's weights and cache; what training leaves on the card
    sync         training's weights and buffers, the server's weights and the layer that it puts together; no cache yet
    log-probs    a forward pass that keeps nothing
    forward      what autograd keeps, up to the output layer
    backward     the same with one layer's working set, or the output layer's
    step         weights, gradients, optimizer state, and float32 copies of 16-bit state
    checkpoint   the same without copies; it is written from the host

A colocated job frees gradients and moves the rest to the host before servers wake (`actor/offload.py`), so the first
two rows hold no training state, and the log-probabilities hold weights only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dppo_megatron.config.resolved_sets import longest_sequence
from dppo_megatron.config.schema import INTERLEAVED_GROUP, ActorConfig, Config
from dppo_megatron.config.server_args import named_option, read_split
from dppo_megatron.weights.architecture import Architecture
from dppo_megatron.weights.pipeline import split_layers
from dppo_megatron.workbench.planning import activations
from dppo_megatron.workbench.planning.generation import EnginePlan, plan_engine
from dppo_megatron.workbench.planning.shares import Degrees, Share, share_of
from dppo_megatron.workbench.planning.site import CONTEXT_BYTES, FRAGMENTATION, GIB, PROCESS_HOST_BYTES, Site

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_HOST = "optimizer on the host"
PHASES = ("generate", "sync", "log-probs", "forward", "backward", "step", "checkpoint")
_FP8 = "fp8 copies"
PARTS = ("weights", _FP8, "gradients", "optimizer", "activations", "logits", "engine", "other")


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase, on the GPU or the node where it needs the most memory."""

    name: str
    parts: dict[str, float]
    """Bytes by part: one of `PARTS`, or on a node a description."""
    stage: int = 0

    @property
    def total(self) -> float:
        """Bytes."""
        return sum(self.parts.values())

    @property
    def most(self) -> str:
        return max(self.parts, key=self.parts.__getitem__)

    def over(self, limit: float, whose: str, digits: int) -> str:
        """Why it does not fit into `limit` bytes; empty if it does."""
        if self.total <= limit:
            return ""
        total, limit = self.total / GIB, limit / GIB
        return f"{self.name} needs {total:.{digits}f} GiB of {whose} {limit:.{digits}f} (most of it {self.most})"


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    phases: tuple[Phase, ...]
    """On a GPU of the trainer."""
    host: tuple[Phase, Phase]
    """On a node: every phase but the checkpoint, under the name of the first; and the checkpoint."""
    engine: EnginePlan

    @property
    def largest(self) -> Phase:
        """The phase that decides whether the job fits."""
        return max(self.phases, key=lambda phase: phase.total)

    def problems(self, site: Site) -> list[str]:
        """Why it cannot fit, the largest phase first; empty if it does."""
        engine, phases = self.engine, sorted(self.phases, key=lambda phase: -phase.total)
        problems = [phase.over(site.gpu_memory, "a GPU's", 1) for phase in phases]
        if engine.gpus and engine.max_cached < engine.longest:
            problems.append(
                f"the servers have {engine.cache / GIB:.1f} GiB for keys and values, less than the"
                f" {engine.longest_bytes / GIB:.1f} of one sequence of {engine.longest} tokens"
            )
        problems += [phase.over(site.host_memory, "a node's", 0) for phase in self.host]
        return [problem for problem in problems if problem]


def plan_memory(config: Config, architecture: Architecture, site: Site, mean_tokens: float) -> MemoryPlan:
    """Every phase of a checked config; `mean_tokens` is the mean length of a sequence, prompt included."""
    degrees = Degrees.of(config.actor.layout, site.gpus)
    engine = plan_engine(config, architecture, site, longest_sequence(config)[0])
    experts = _recorded_experts(config, architecture, degrees, mean_tokens)
    gpus, nodes = [], []
    for stage, chunks in enumerate(split_layers(architecture.num_layers, config.actor)):
        share = share_of(architecture, degrees, stage, sum(chunks))
        state = state_bytes(share, degrees, config.actor, config.model.dtype)
        working = _working(config, architecture, degrees, stage, sum(chunks), mean_tokens)
        on_gpu = _on_gpu(config, architecture, engine, state, working)
        gpus.append([Phase(name, parts, stage) for name, parts in on_gpu.items()])
        nodes.append(_on_node(config, site, degrees, engine, share, state, experts))
    worst, host = ([max(same, key=lambda phase: phase.total) for same in zip(*of, strict=True)] for of in (gpus, nodes))
    return MemoryPlan(tuple(worst), (host[0], host[1]), engine)


def microbatches(config: Config, degrees: Degrees, mean_tokens: float) -> int:
    """Micro-batches of one replica in one update, if nothing is pruned."""
    sequences = config.rollout.prompts_per_step * config.rollout.completions_per_prompt
    share = sequences / config.objective.updates_per_step / degrees.data
    if config.packing.mode == "none":
        return max(1, round(share))
    return max(1, -int(-share * mean_tokens // config.packing.max_tokens_per_microbatch))


def _recorded_experts(config: Config, architecture: Architecture, degrees: Degrees, mean_tokens: float) -> float:
    """Bytes on a rank's host for the experts that a step replays, if nothing is pruned. An engine's are kept for all
    layers and all tokens of the replica, the actor's own only for the rank's layers and tokens."""
    choices, replay = architecture.expert_choices, config.actor.routing_replay
    if choices is None or replay == "off":
        return 0.0
    sequences = config.rollout.prompts_per_step * config.rollout.completions_per_prompt
    ranks = degrees.pipeline * degrees.context * (degrees.tensor if degrees.sequence_parallel else 1)
    of_replica = sequences / degrees.data * mean_tokens * choices.bytes_per_token
    return of_replica if replay == "engine" else of_replica / ranks


def state_bytes(share: Share, degrees: Degrees, actor: ActorConfig, dtype: str) -> dict[str, float]:
    """Weights, gradients and optimizer state of a rank; the latter two only of what is trained.

    Megatron's distributed optimizer shards 12 of the 18 bytes that a bfloat16 parameter takes, and lays parameters out
    in buffers in which each begins at a multiple of 64 elements.

    Example: 1e9 parameters in bfloat16 on 8 replicas: 2 + 4 + 12 / 8 = 7.5 GB.
    """
    optimizer, trained = actor.optimizer, share.trained
    padded = 64 if optimizer.distributed else 1
    numel, frozen = trained.count(padded_to=padded), share.count() - trained.count()
    state = sum(
        trained.count(experts=experts, padded_to=padded)
        * sum(_kinds(actor, dtype))
        / _updaters(degrees, actor, experts)
        for experts in (False, True)
    )
    gradients = numel * _gradient_bytes(actor, dtype)
    parts: dict[str, float] = {"weights": (numel + frozen) * _BYTES[dtype], "gradients": gradients}
    parts |= {"optimizer": state * (1 - optimizer.cpu_offload), _HOST: state * optimizer.cpu_offload}
    if actor.fp8 != "off" and not actor.megatron.get("disable_parameter_transpose_cache", False):
        # Transformer Engine keeps each weight by rows and by columns from an update's first micro-batch on
        parts[_FP8] = 2 * sum(one.numel * one.count for one in share.tensors if one.is_linear)
    return parts


def pinned(size: float) -> int:
    """Bytes that torch takes for a pinned block: its CachingHostAllocator rounds up to a power of two.

    Example: 5 GiB take 8.
    """
    return 1 << max(0, math.ceil(size) - 1).bit_length()


def host_copies(share: Share, degrees: Degrees, actor: ActorConfig, dtype: str) -> dict[str, float]:
    """Pinned bytes for a rank's optimizer state and weights while servers have the GPU (`actor/offload.py`): a block
    for each piece of a parameter that the rank updates and each of its states, and one for each buffer of weights."""
    distributed, each = actor.optimizer.distributed, _BYTES[dtype]
    buffers = [share.trained.count(experts=experts, padded_to=64) * each for experts in (False, True)]
    weights = sum(map(pinned, filter(None, buffers))) if distributed else 0
    for one in share.tensors:
        if not (one.is_trained and distributed):
            weights += one.count * pinned(one.numel * each)
    state = _pinned_pieces(share, degrees, actor, _kinds(actor, dtype))
    return {"optimizer": state * (1.0 - actor.optimizer.cpu_offload), "weights": weights}


def _pinned_pieces(share: Share, degrees: Degrees, actor: ActorConfig, kinds: list[int]) -> float:
    """Pinned bytes of a rank that keeps, for each piece of a parameter that it updates, a block for each of `kinds`
    (bytes of an element)."""
    total = 0.0
    for one in share.trained.tensors:
        ranks = _updaters(degrees, actor, one.is_expert)
        own = share.trained.count(experts=one.is_expert) / ranks
        piece = min(one.numel, max(own, 1.0))
        total += one.numel * one.count / ranks / piece * sum(pinned(piece * kind) for kind in kinds)
    return total


def updated_on_host(share: Share, degrees: Degrees, actor: ActorConfig, dtype: str) -> tuple[float, float]:
    """Host bytes of a rank whose optimizer is on the host: during steps, and while the optimizer is built.

    By the code of megatron-core 0.16 (optimizer/cpu_offloading/hybrid_optimizer.py), not measured. Beside the state it
    keeps a pinned float32 gradient of each piece. It is built over the rank's whole parameters first and then over its
    pieces of them, in float32, and the first copy is kept until the second is complete.
    """
    on_host, kinds = state_bytes(share, degrees, actor, dtype)[_HOST], _kinds(actor, dtype)
    in_steps = on_host + actor.optimizer.cpu_offload * _pinned_pieces(share, degrees, actor, [4])
    built = 4 * actor.optimizer.cpu_offload * share.trained.count() + on_host / len(kinds)
    return in_steps, built


def _kinds(actor: ActorConfig, dtype: str) -> list[int]:
    """Bytes of an element of each state: Adam's two moments, and for bfloat16 a main parameter of more bits."""
    optimizer = actor.optimizer
    main = [_BYTES[optimizer.main_params_dtype]] if dtype == "bfloat16" else []
    return [_BYTES[optimizer.moments_dtype]] * 2 + main


def _updaters(degrees: Degrees, actor: ActorConfig, of_experts: bool) -> int:
    """Ranks over which the optimizer shares the state of experts, or of the rest."""
    split = degrees.expert * degrees.expert_tensor if of_experts else degrees.tensor
    return degrees.gpus // (degrees.pipeline * split) if actor.optimizer.distributed else 1


def _gradient_bytes(actor: ActorConfig, dtype: str) -> int:
    return 2 if dtype == "bfloat16" and not actor.ddp.get("grad_reduce_in_fp32", True) else 4


def leaves_for_servers(config: Config) -> tuple[str, ...]:
    """The parts of the training state that are not on the GPU while colocated servers hold it."""
    how = config.actor.offload if config.rollout.servers.colocate else "none"
    first = ("gradients", "optimizer", _FP8)
    return {"none": (), "optimizer": first}.get(how, (*first, "weights"))


def _working(
    config: Config, architecture: Architecture, degrees: Degrees, stage: int, layers: int, mean_tokens: float
) -> dict[str, dict[str, float]]:
    """Bytes of activations and logits in the three phases that run the model."""
    actor, is_last = config.actor, stage == degrees.pipeline - 1
    one = activations.Pass(
        architecture,
        degrees,
        config.packing.max_tokens_per_microbatch if config.packing.mode != "none" else longest_sequence(config)[0],
        _BYTES[config.model.dtype],
        "local" if actor.layer_spec == "local" else "te",
        fused_swiglu=bool(actor.megatron.get("bias_activation_fusion", False)),
    )
    saved, kept = sum(activations.layer_saved(one).values()), sum(activations.layer_kept(one, actor).values())
    norm = 2 * one.hidden_bytes if is_last else 0.0  # the final norm's
    group = actor.megatron.get(INTERLEAVED_GROUP) or 0
    held = activations.in_flight(degrees, stage, microbatches(config, degrees, mean_tokens), group)
    waiting = (kept * layers + norm) * held
    entropy, fused = config.objective.entropy_coef > 0, actor.logprob_kernel != "torch"
    phases = {}
    for name, before, layer in (
        ("log-probs", 0.0, saved / 2),
        ("forward", waiting, saved / 2),
        ("backward", waiting, max(saved - kept, 0.0) + activations.layer_backward(one)),
    ):
        logits = rest = 0.0
        if is_last:
            logits, rest = activations.head_bytes(
                one,
                actor.logprob_chunk_tokens,
                backward=name == "backward",
                entropy=entropy,
                fused=fused,
                trained=architecture.lora is None,
                in_place=_gradient_bytes(actor, config.model.dtype) == 4,
            )
        # the output layer and the layers below it do not run at the same time: the larger of the two counts
        inside, logits = (rest, logits) if logits + rest > layer else (layer, 0.0)
        phases[name] = {"activations": (before + inside) * FRAGMENTATION, "logits": logits * FRAGMENTATION}
    return phases


def _on_gpu(
    config: Config,
    architecture: Architecture,
    engine: EnginePlan,
    state: dict[str, float],
    working: dict[str, dict[str, float]],
) -> dict[str, dict[str, float]]:
    """Parts of every phase, in the order of a step."""
    training = {part: size for part, size in state.items() if part != _HOST}
    stays = {part: size for part, size in training.items() if part not in leaves_for_servers(config)}
    scores = {"weights": state["weights"]} | stays
    # two buffers in turn, and one whole tensor being gathered
    largest = architecture.vocab_size * architecture.hidden_size * _BYTES[config.model.dtype]
    buckets = 2 * max(config.rollout.sync.bucket_mb << 20, largest) + largest
    kinds = _kinds(config.actor, config.model.dtype)
    updated = (state["optimizer"] + state[_HOST]) / sum(kinds)
    # Transformer Engine's Adam widens 16-bit state to float32: in a step all of a rank's at once, in a save that of one
    # parameter after another
    widened = 4 * updated * sum(kind < 4 for kind in kinds)
    # any other optimizer adds in float32: it copies this rank's share of gradients that were reduced in bfloat16
    is_float32 = _gradient_bytes(config.actor, config.model.dtype) == 4
    copied = 0.0 if is_float32 or widened else 4 * updated
    phases = {
        "generate": stays | {"engine": engine.budget},
        "sync": scores | {"engine": engine.weights + engine.context + _rebuilt(config, architecture), "other": buckets},
        "log-probs": scores | {part: size for part, size in state.items() if part == _FP8} | working["log-probs"],
        "forward": training | working["forward"],
        "backward": training | working["backward"],
        "step": training | {"other": widened + copied},
        "checkpoint": dict(training),
    }
    for parts in phases.values():
        parts["other"] = parts.get("other", 0.0) + CONTEXT_BYTES
        asleep = engine.context or engine.weights  # the embedded engine does not sleep
        parts["engine"] = parts.get("engine", asleep) if engine.colocated else 0.0
    return phases


def _rebuilt(config: Config, architecture: Architecture) -> float:
    """Extra bytes of a layer of experts that a vLLM worker holds for a while in a sync, by its code (0.32.0): the whole
    layer unsplit, or with expert parallelism its own whole experts, until it has its share; and that share anew."""
    rollout, experts = config.rollout, architecture.experts
    if rollout.engine != "vllm" or experts is None:
        return 0.0
    width = _BYTES[config.model.dtype] if rollout.quantization == "off" else 1
    layer = 3.0 * architecture.hidden_size * experts.ffn_size * experts.count * width
    split = read_split(rollout.servers.args)
    share = layer / (split.tensor * split.replicas)
    return share + (share if named_option(rollout.servers.args, ("--enable-expert-parallel", "-ep")) else layer)


def _on_node(
    config: Config,
    site: Site,
    degrees: Degrees,
    engine: EnginePlan,
    share: Share,
    state: dict[str, float],
    experts: float,
) -> list[Phase]:
    """A node whose ranks all hold this share, and `experts` bytes of recorded experts: in every phase, and while a
    checkpoint is written."""
    away, dtype = leaves_for_servers(config), config.model.dtype
    copies = host_copies(share, degrees, config.actor, dtype)
    in_steps, built = updated_on_host(share, degrees, config.actor, dtype)
    servers = engine.gpus // site.nodes if engine.kind != "hf" and config.rollout.servers.launch == "local" else 0
    kinds = _kinds(config.actor, dtype)
    saved = (state["optimizer"] + state[_HOST]) * 4 * len(kinds) / sum(kinds)  # in float32, whatever the state is
    of_rank = {
        "reference policy": share.trained.count() * _BYTES[dtype] if config.objective.kl.coef > 0 else 0.0,
        _HOST: in_steps + (copies["optimizer"] if "optimizer" in away else 0.0),
        "weights on the host": copies["weights"] if "weights" in away else 0.0,
        "recorded experts": experts,
        "copies for the checkpoint": state["weights"] + saved,
    }
    parts: dict[str, float] = {"processes": (site.ranks_per_node + servers) * PROCESS_HOST_BYTES}
    parts |= {name: site.ranks_per_node * size for name, size in of_rank.items() if size}
    always = {name: size for name, size in parts.items() if name != "copies for the checkpoint"}
    if built:  # the optimizer is built before the first step
        always[_HOST] = max(always[_HOST], site.ranks_per_node * built)
    return [Phase(PHASES[0], always), Phase(PHASES[-1], parts)]
