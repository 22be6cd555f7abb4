"""Seconds of a step from data sheets, and from efficiencies that were fitted, published or assumed (docs/plan.md)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dppo_megatron.config.objective import needs_old_logprobs
from dppo_megatron.config.schema import Config
from dppo_megatron.steps.rollout_cost import RolloutCost, cost_model
from dppo_megatron.weights.architecture import Architecture
from dppo_megatron.weights.pipeline import split_layers
from dppo_megatron.workbench.planning.generation import LINK_SHARE, NETWORK_BYTES_S, EnginePlan, Lengths, rollout_cost
from dppo_megatron.workbench.planning.memory import microbatches
from dppo_megatron.workbench.planning.shares import Degrees, trained_parameters, whole_model
from dppo_megatron.workbench.planning.site import Site

_FITTED = "fitted to NeMo RL 0.5's published steps (docs/plan.md)"
_FP8 = 1.2
"""Speed-up of updates in FP8. NVIDIA reports steps 15 to 25 % shorter with all of training and rollout in it."""
_SENT = {"none": 10, "selective": 10, "full": 14}
"""Times that a layer sends the hidden state over tensor parallelism in an update, by `actor.recompute`: four in a
forward pass (gather and scatter around attention and around the feed-forward layer), six in a backward pass, which
gathers the inputs once more."""
_SENT_FORWARD = 4


@dataclass(frozen=True, slots=True)
class Speeds:
    """Speeds that the estimates of time are computed from."""

    mfu: float
    """Useful FLOPs of an update over the chip's peak, without recomputation and without what tensor parallelism
    sends."""
    decode: float | None = None
    """Tokens per second that one GPU generates, over a whole rollout with its slow end. None: the roofline's."""
    sync_gb_per_s: float = 8.0
    save_gb_per_s: float = 2.0
    other_s: float = 8.0
    """A step's grading, selection and packing, and moving what sleeps off the GPU and back."""


SOURCES = {
    "mfu": _FITTED + "; `benchmarks/gpu/train_step.py mfu` measures",
    "sync_gb_per_s": "published for verl with NCCL, 30B to 30 receivers (8.25 GB/s)",
    "save_gb_per_s": "assumed, for all ranks together",
    "other_s": _FITTED,
}
"""Where the usual speeds come from."""


def speeds_for(architecture: Architecture, **given: float | None) -> Speeds:
    """The usual speeds, and those of `given` in their place (None: the usual one)."""
    usual = Speeds(mfu=0.12 if architecture.experts else 0.50)
    return replace(usual, **{name: value for name, value in given.items() if value is not None})


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one step in which nothing is pruned."""

    seconds: dict[str, float]
    """By phase; those of `checkpoint` are its share of a step."""
    tokens_generated: float
    rollout: RolloutCost
    """Seconds of a round of generation by its tokens, whose value at `tokens_generated` is that of `generate`."""
    overlaps: bool
    """Generation runs during the update (`RolloutConfig.overlaps_update`)."""
    waits: bool
    """A step's generation ends with its longest completion, however few there are."""
    save_s: float

    @property
    def step_s(self) -> float:
        """Seconds of a step; generation and the rest go side by side if `overlaps`."""
        rest = sum(self.seconds.values()) - self.seconds["generate"]
        if self.overlaps:
            return max(self.seconds["generate"], rest)
        return self.seconds["generate"] + rest


def plan_timing(
    config: Config,
    architecture: Architecture,
    site: Site,
    engine: EnginePlan,
    lengths: Lengths,
    speeds: Speeds,
    cost: RolloutCost | None = None,
) -> Timing | None:
    """Seconds of every phase; None where the number of generating GPUs is not known, or their cache holds less than one
    sequence: simulating how sequences wait for each other takes 16 s, for a job that cannot run. `cost`: of a round of
    generation; None: it is computed."""
    if not engine.gpus or engine.max_cached < engine.longest:
        return None
    rollout, degrees = config.rollout, Degrees.of(config.actor.layout, site.gpus)
    # without streaming, each weight sync waits for a step's longest completion, or aborts it
    streams = rollout.async_steps > 0 and rollout.sync.in_flight == "continue"
    sequences = rollout.prompts_per_step * rollout.completions_per_prompt
    generated = sequences * lengths.completion
    if cost is None and speeds.decode is not None:
        cost = RolloutCost.proportional(1000 / (speeds.decode * engine.gpus))
    elif cost is None:
        cost = rollout_cost(engine, lengths, rollout.prompts_per_step, rollout.async_steps + 1 if streams else 1)
    forward_s, update_s = _training_s(config, architecture, site, degrees, lengths, speeds)
    own = needs_old_logprobs(config.objective) or config.actor.routing_replay == "actor"  # which records the experts
    passes = int(own) + int(config.objective.kl.coef > 0)
    every = config.checkpoint.every_steps
    # bfloat16 weights (2 bytes), and of what is trained float32 main parameters and moments (12)
    saved = whole_model(architecture) * 2 + trained_parameters(architecture) * 12
    save_s = saved / (speeds.save_gb_per_s * 1e9)
    seconds = {
        "generate": cost.of(generated),
        "log-probs": passes * forward_s,
        "update": update_s,
        "sync": engine.synced / (speeds.sync_gb_per_s * 1e9),
        "checkpoint": save_s / every if every else 0.0,
        "other": speeds.other_s,
    }
    waits = speeds.decode is None and not streams
    return Timing(seconds, generated, cost, config.rollout.overlaps_update, waits, save_s)


def _training_s(
    config: Config, architecture: Architecture, site: Site, degrees: Degrees, lengths: Lengths, speeds: Speeds
) -> tuple[float, float]:
    """Seconds of one forward pass over a step's sequences, and of the step's updates."""
    sequences = config.rollout.prompts_per_step * config.rollout.completions_per_prompt
    cost = cost_model(architecture)
    linear, quadratic = cost.linear * lengths.sequence, cost.quadratic * lengths.square
    flops = (linear + quadratic) * sequences
    computing = flops / (site.peak_flops * speeds.mfu * (_FP8 if config.actor.fp8 != "off" else 1.0) * site.gpus)
    tokens = sequences * lengths.sequence / (degrees.data * degrees.context)
    layers, split = architecture.num_layers / degrees.pipeline, (degrees.tensor - 1) / degrees.tensor
    link = site.link * LINK_SHARE if degrees.tensor <= site.ranks_per_node else NETWORK_BYTES_S
    sending = tokens * layers * architecture.hidden_size * 2 * split / link
    count = microbatches(config, degrees, lengths.sequence)
    bubble = 1 + (degrees.pipeline - 1) / (count * degrees.virtual)
    # every stage waits for the one with the most layers
    bubble *= max(map(sum, split_layers(architecture.num_layers, config.actor))) / layers
    forward_s = computing / 3 + _SENT_FORWARD * sending
    thirds = 3 + _recomputed(config, architecture, lengths)
    if architecture.lora is not None:  # frozen weights have no gradient; attention still has its whole backward pass
        thirds -= linear / (linear + quadratic)
    update_s = thirds * computing / 3 + _SENT[config.actor.recompute] * sending
    return forward_s * bubble, update_s * bubble


def _recomputed(config: Config, architecture: Architecture, lengths: Lengths) -> float:
    """Share of a forward pass's FLOPs that a backward pass repeats. Norms and activations count as nothing."""
    actor, experts = config.actor, architecture.experts
    if actor.recompute != "selective":
        return 1.0 if actor.recompute == "full" else 0.0
    cost, tokens = cost_model(architecture), lengths.sequence
    attention = cost.quadratic * lengths.square
    width = experts.ffn_size * experts.per_token + experts.shared_ffn_size if experts else architecture.ffn_size
    parts = {  # three matrices, of 2 FLOPs forwards and 4 backwards for each element: 18
        "core_attn": attention,
        "moe" if experts else "mlp": 18.0 * architecture.num_layers * architecture.hidden_size * width * tokens,
    }
    return sum(parts.get(name, 0.0) for name in actor.recompute_modules) / (cost.linear * tokens + attention)
