"""What generation takes on a GPU: weights and key-value cache of a server, or of the embedded engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dppo_megatron.config.ranges import Range
from dppo_megatron.config.schema import Config
from dppo_megatron.types import UserError
from dppo_megatron.weights.architecture import Architecture
from dppo_megatron.workbench.planning.shares import whole_model
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
