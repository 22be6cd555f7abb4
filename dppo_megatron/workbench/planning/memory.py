"""Bytes on a GPU and on its host in every phase of a step.

    generate     server's weights and cache; what training leaves on the card
    sync         training's weights and buffers, the server's weights; no cache yet
    log-probs    a forward pass that keeps nothing
    forward      what autograd keeps, up to the output layer
    backward     the same with one layer's working set, or the output layer's
    step         weights, gradients, optimizer state
    checkpoint   the same; written from the host

A colocated job frees gradients and moves the rest to the host before servers wake (`actor/offload.py`), so the first
two rows hold no training state, and the log-probabilities hold weights only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dppo_megatron.config.resolved_sets import longest_sequence
from dppo_megatron.config.schema import ActorConfig, Config
from dppo_megatron.weights.architecture import Architecture
from dppo_megatron.weights.pipeline import split_layers
from dppo_megatron.workbench.planning.activations import (
    Kernels,
    Pass,
    head_bytes,
    in_flight,
    layer_backward,
    layer_kept,
    layer_saved,
)
from dppo_megatron.workbench.planning.generation import EnginePlan, plan_engine
from dppo_megatron.workbench.planning.shares import Degrees, Share, share_of
from dppo_megatron.workbench.planning.site import (
    CONTEXT_BYTES,
    FRAGMENTATION,
    PROCESS_HOST_BYTES,
    SLEEPING_BYTES,
    Site,
)

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_HOST = "optimizer on the host"
PHASES = ("generate", "sync", "log-probs", "forward", "backward", "step", "checkpoint")
_FP8 = "fp8 copies"
PARTS = ("weights", _FP8, "gradients", "optimizer", "activations", "logits", "engine", "other")


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase on the GPU, or the node, that it needs most of."""

    name: str
    parts: dict[str, float]
    """Bytes by one of `PARTS`, or for a node by what they are."""
    stage: int = 0
    """Pipeline stage of that GPU."""

    @property
    def total(self) -> float:
        """Bytes."""
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    phases: tuple[Phase, ...]
    """On a GPU of the trainer."""
    host: tuple[Phase, Phase]
    """On a node: of every phase, under the name of the first, and of the checkpoint."""
    engine: EnginePlan

    @property
    def largest(self) -> Phase:
        """The phase that decides whether the job fits."""
        return max(self.phases, key=lambda phase: phase.total)


def plan_memory(config: Config, architecture: Architecture, site: Site, mean_tokens: float) -> MemoryPlan:
    """Every phase of a checked config; `mean_tokens` is the mean length of a sequence, prompt included."""
    degrees = Degrees.of(config.actor.layout, site.gpus)
    engine = plan_engine(config, architecture, site, longest_sequence(config)[0])
    stages = [_Stage(config, architecture, degrees, engine, stage, mean_tokens) for stage in range(degrees.pipeline)]
    worst = [max(same, key=lambda phase: phase.total) for same in zip(*(one.phases() for one in stages), strict=True)]
    assert tuple(phase.name for phase in worst) == PHASES
    host = _host(config, site, engine, max(stages, key=lambda one: sum(one.state.values()) + one.on_host))
    return MemoryPlan(tuple(worst), host, engine)


def microbatches(config: Config, degrees: Degrees, mean_tokens: float) -> int:
    """Micro-batches of one replica in one update, if nothing is pruned."""
    sequences = config.rollout.prompts_per_step * config.rollout.completions_per_prompt
    share = sequences / config.objective.updates_per_step / degrees.data
    if config.packing.mode == "none":
        return max(1, round(share))
    return max(1, -int(-share * mean_tokens // config.packing.max_tokens_per_microbatch))


def state_bytes(share: Share, degrees: Degrees, actor: ActorConfig, dtype: str) -> dict[str, float]:
    """Weights, gradients and optimizer state of a rank.

    Megatron's distributed optimizer shares 12 of the 18 bytes that a bfloat16 parameter takes, and lays parameters out
    in buffers in which each begins at a multiple of 64 elements.

    Example: 1e9 parameters in bfloat16 on 8 replicas: 2 + 4 + 12 / 8 = 7.5 GB.
    """
    half, distributed = dtype == "bfloat16", actor.optimizer.distributed
    padded = 64 if distributed else 1
    numel = share.count(padded_to=padded)
    optimizer = actor.optimizer
    # Adam's two moments, and for bfloat16 a main parameter of more bits
    each = 2 * _BYTES[optimizer.moments_dtype] + (_BYTES[optimizer.main_params_dtype] if half else 0)
    sharing = {True: degrees.sharing_expert_state, False: degrees.sharing_state}
    state = sum(
        share.count(experts=of_experts, padded_to=padded) * each / (ranks if distributed else 1)
        for of_experts, ranks in sharing.items()
    )
    on_host, gradients = state * optimizer.cpu_offload, numel * _gradient_bytes(actor, dtype)
    parts = {"weights": numel * (2 if half else 4), "gradients": gradients, "optimizer": state - on_host}
    if actor.fp8 != "off" and not actor.megatron.get("disable_parameter_transpose_cache", False):
        # Transformer Engine keeps each weight by rows and by columns from an update's first micro-batch on
        parts[_FP8] = 2 * sum(one.numel * one.count for one in share.tensors if one.is_linear)
    return parts | {_HOST: on_host}


def pinned(size: float) -> int:
    """Bytes that torch takes for a pinned block: its CachingHostAllocator rounds up to a power of two.

    Example: 5 GiB take 8.
    """
    return 1 << max(0, math.ceil(size) - 1).bit_length()


def host_copies(share: Share, degrees: Degrees, actor: ActorConfig, dtype: str) -> dict[str, float]:
    """Pinned bytes for a rank's optimizer state and weights while servers have the GPU (`actor/offload.py`): a block
    for each piece of a parameter that the rank updates and each of its states, and one for each buffer of weights."""
    optimizer, half = actor.optimizer, dtype == "bfloat16"
    kinds = [_BYTES[optimizer.moments_dtype]] * 2 + ([_BYTES[optimizer.main_params_dtype]] if half else [])
    found = {"optimizer": 0.0, "weights": 0.0}
    for of_experts, ranks in {True: degrees.sharing_expert_state, False: degrees.sharing_state}.items():
        tensors = [one for one in share.tensors if one.is_expert == of_experts]
        own = float(sum(one.numel * one.count for one in tensors))
        if optimizer.distributed:
            own /= ranks
            found["weights"] += pinned(share.count(experts=of_experts, padded_to=64) * (2 if half else 4)) if own else 0
        for one in tensors:
            piece = min(one.numel, max(own, 1.0))
            pieces = one.numel * one.count / (ranks if optimizer.distributed else 1) / piece
            found["optimizer"] += pieces * sum(pinned(piece * each) for each in kinds)
            if not optimizer.distributed:
                found["weights"] += one.count * pinned(one.numel * (2 if half else 4))
    on_gpu = 1.0 - optimizer.cpu_offload
    return found | {"optimizer": found["optimizer"] * on_gpu}


def _gradient_bytes(actor: ActorConfig, dtype: str) -> int:
    return 2 if dtype == "bfloat16" and not actor.ddp.get("grad_reduce_in_fp32", True) else 4


def leaves_for_servers(config: Config) -> tuple[str, ...]:
    """The parts of the training state that are not on the GPU while colocated servers hold it."""
    how = config.actor.offload if config.rollout.servers.colocate else "none"
    first = ("gradients", "optimizer", _FP8)
    return {"none": (), "optimizer": first}.get(how, (*first, "weights"))


class _Stage:
    """A GPU of one pipeline stage."""

    def __init__(
        self,
        config: Config,
        architecture: Architecture,
        degrees: Degrees,
        engine: EnginePlan,
        stage: int,
        mean_tokens: float,
    ) -> None:
        self._config, self._architecture, self._engine = config, architecture, engine
        self._number, self._is_last = stage, stage == degrees.pipeline - 1
        self._layers = sum(split_layers(architecture.num_layers, config.actor)[stage])
        self._share = share_of(architecture, degrees, stage, self._layers)
        whole = state_bytes(self._share, degrees, config.actor, config.model.dtype)
        self.state = {part: size for part, size in whole.items() if part != _HOST}
        self.on_host = whole[_HOST]
        self.pinned = host_copies(self._share, degrees, config.actor, config.model.dtype)
        kernels: Kernels = "local" if config.actor.layer_spec == "local" else "te"
        packs = config.packing.mode != "none"
        self._pass = Pass(
            architecture,
            degrees,
            config.packing.max_tokens_per_microbatch if packs else longest_sequence(config)[0],
            2 if config.model.dtype == "bfloat16" else 4,
            kernels,
            fused_swiglu=bool(config.actor.megatron.get("bias_activation_fusion", False)),
        )
        self._in_flight = in_flight(degrees, stage, microbatches(config, degrees, mean_tokens))

    def phases(self) -> list[Phase]:
        """In the order of a step."""
        state, engine, away = self.state, self._engine, leaves_for_servers(self._config)
        is_embedded = engine.kind == "hf"  # and does not sleep
        asleep = {"engine": engine.weights if is_embedded else SLEEPING_BYTES} if engine.colocated else {}
        held = engine.weights + (0 if is_embedded else SLEEPING_BYTES) if engine.colocated else 0.0
        stays = {part: size for part, size in state.items() if part not in away}
        scores = {"weights": state["weights"]} | stays
        forth = scores | {part: size for part, size in state.items() if part == _FP8}
        kept, layer, head = self._kept(), self._layer(), self._head
        forward, backward = head(backward=False), head(backward=True)
        rows = [
            ("generate", stays | {"engine": engine.budget if engine.colocated else 0.0, "other": CONTEXT_BYTES}),
            ("sync", scores | {"engine": held, "other": CONTEXT_BYTES + self._buckets()}),
            ("log-probs", forth | self._working(0.0, layer[0], forward) | asleep),
            ("forward", state | self._working(kept, layer[0], forward) | asleep),
            ("backward", state | self._working(kept, layer[1], backward) | asleep),
            ("step", state | {"other": CONTEXT_BYTES + self._main_gradients()} | asleep),
            ("checkpoint", state | {"other": CONTEXT_BYTES} | asleep),
        ]
        return [Phase(name, parts, self._number) for name, parts in rows]

    def _kept(self) -> float:
        """Bytes that wait for their backward pass."""
        ends = 2 * self._pass.hidden_bytes if self._is_last else 0.0  # the final norm
        return (sum(layer_kept(self._pass, self._config.actor).values()) * self._layers + ends) * self._in_flight

    def _layer(self) -> tuple[float, float]:
        """Working set of one layer beside what is kept, (forward, backward)."""
        whole = sum(layer_saved(self._pass).values())
        again = whole - sum(layer_kept(self._pass, self._config.actor).values())
        return whole / 2, max(again, 0.0) + layer_backward(self._pass)

    def _head(self, *, backward: bool) -> tuple[float, float]:
        if not self._is_last:
            return 0.0, 0.0
        chunk, entropy = self._config.actor.logprob_chunk_tokens, self._config.objective.entropy_coef > 0
        fused = self._config.actor.logprob_kernel != "torch"
        return head_bytes(self._pass, chunk, backward=backward, entropy=entropy, fused=fused)

    def _working(self, kept: float, layer: float, head: tuple[float, float]) -> dict[str, float]:
        """The output layer and the layers below it do not run at the same time: the larger of the two counts."""
        logits, rest = head
        inside, logits = (rest, logits) if logits + rest > layer else (layer, 0.0)
        held = {"activations": (kept + inside) * FRAGMENTATION, "logits": logits * FRAGMENTATION}
        return held | {"other": CONTEXT_BYTES}

    def _buckets(self) -> float:
        """Two buffers in turn, and one whole tensor being gathered."""
        largest = self._architecture.vocab_size * self._architecture.hidden_size * self._pass.bytes_each
        bucket = self._config.rollout.sync.bucket_mb << 20
        return 2 * max(bucket, largest) + largest

    def _main_gradients(self) -> float:
        """The optimizer adds in float32: gradients that were reduced in bfloat16 are copied, this rank's share."""
        if _gradient_bytes(self._config.actor, self._config.model.dtype) == 4:
            return 0.0
        return (self.state["optimizer"] + self.on_host) / 3


def _host(config: Config, site: Site, engine: EnginePlan, stage: _Stage) -> tuple[Phase, Phase]:
    """A node whose ranks are all of the stage that holds most."""
    ranks, away, state = site.ranks_per_node, leaves_for_servers(config), stage.state
    servers = engine.gpus // site.nodes if engine.kind != "hf" and config.rollout.servers.launch == "local" else 0
    always: dict[str, float] = {"processes": (ranks + servers) * PROCESS_HOST_BYTES}
    if config.objective.kl.coef > 0:
        always["reference policy"] = ranks * state["weights"]
    moved = stage.on_host + (stage.pinned["optimizer"] if "optimizer" in away else 0.0)
    if moved:
        always[_HOST] = ranks * moved
    if "weights" in away:
        always["weights on the host"] = ranks * stage.pinned["weights"]
    written = {"copies for the checkpoint": ranks * (state["weights"] + state["optimizer"] + stage.on_host)}
    return Phase(PHASES[0], always), Phase(PHASES[-1], always | written)
