"""What autograd keeps of a forward pass, tensor by tensor, and the working set of the output layer.

Each line names a tensor that an operation of our layers saves for its backward pass. The lists for the CPU are compared
with what torch really saves (tests/planning/); those for a GPU differ from them only where the kernels differ, and are
read from the sources of torch and Transformer Engine, not measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from dppo_megatron.config.schema import ActorConfig
from dppo_megatron.weights.architecture import Architecture
from dppo_megatron.workbench.planning.shares import Degrees

Kernels: TypeAlias = Literal["te", "local", "cpu"]
"""Whose operations: Transformer Engine's layers, Megatron's own with this project's attention on CUDA, or on a CPU,
where norms are composed of several operations and attention gathers sequences."""

Saved: TypeAlias = dict[str, float]
"""Bytes by the name of the tensor."""

EXPERT_IMBALANCE = 1.25
"""Tokens of the busiest expert-parallel rank over the mean. An assumption: routers are trained to balance, and no
auxiliary loss keeps them balanced in RL (Megatron's load-balancing loss is off here)."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One micro-batch on one rank."""

    architecture: Architecture
    degrees: Degrees
    tokens: int
    """Of the whole micro-batch; context and sequence parallelism split them."""
    bytes_each: int
    """Bytes of an activation: 2 in bfloat16, 4 in float32."""
    kernels: Kernels
    padding: float = 1.0
    """Slots over tokens in the batches that attention gathers."""
    imbalance: float = EXPERT_IMBALANCE
    fused_swiglu: bool = False
    """actor.megatron: {bias_activation_fusion: true} keeps the output of fc1 only."""

    @property
    def local(self) -> float:
        """Tokens of this rank where heads or columns are split."""
        return self.tokens / self.degrees.context

    @property
    def sharded(self) -> float:
        """Tokens of this rank where sequence parallelism splits them."""
        return self.local / (self.degrees.tensor if self.degrees.sequence_parallel else 1)

    @property
    def gathers(self) -> bool:
        """Attention gathers sequences into batches: on a CPU, and without Transformer Engine under context parallelism
        (`actor/attention.py`)."""
        return self.kernels == "cpu" or (self.kernels == "local" and self.degrees.context > 1)

    @property
    def hidden_bytes(self) -> float:
        """One [tokens, H] tensor between layers."""
        return self.sharded * self.architecture.hidden_size * self.bytes_each


def layer_saved(one: Pass) -> Saved:
    """What one transformer layer keeps without recomputation."""
    return {
        **_norm(one, "input norm"),
        "input of qkv": one.hidden_bytes,
        **_attention(one),
        **_norm(one, "norm before the MLP"),
        **(_experts(one) if one.architecture.experts else _mlp(one)),
    }


def layer_kept(one: Pass, actor: ActorConfig) -> Saved:
    """What one layer keeps until its backward pass, under the settings of recomputation."""
    if actor.recompute == "full":
        return {"input of the layer": one.hidden_bytes}
    saved = layer_saved(one)
    if actor.recompute == "selective":
        for module in actor.recompute_modules:
            dropped = _dropped(one, module)
            saved = {name: size for name, size in saved.items() if name not in dropped} | _kept_instead(one, module)
    return saved


_ATTENTION = (
    "normalizer of attention",
    "gathered queries, keys, values",
    "gathered output",
    "rotated queries and keys",
)
_EXPERTS = ("router", "input of the experts", "output of the experts' fc1", "gate, up and scaled", "input of fc2")
_ROOTS = ("input norm, inverse root", "norm before the MLP, inverse root")


def _dropped(one: Pass, module: str) -> tuple[str, ...]:
    """Names of what recomputing `module` of a layer frees."""
    fused_norms, experts = one.kernels == "te", one.architecture.experts is not None
    if module == "core_attn":
        return _ATTENTION
    if module == "mlp" and not experts:
        of_norm = ("input of fc1", _ROOTS[1]) if fused_norms else ()  # Transformer Engine's fc1 begins with the norm
        return ("output of fc1", "gate and up", "input of fc2", *of_norm)
    if module == "moe" and experts:
        return _EXPERTS  # their input is the router's
    if module == "moe_act" and experts:
        return ("gate, up and scaled", "input of fc2")
    if module == "layernorm" and fused_norms:  # only the experts' norm is a separate module
        return ("input of the router", _ROOTS[1]) if experts else ()
    if module == "layernorm":
        return ("input norm", "norm before the MLP", "input of qkv", "input of fc1", "input of the router", *_ROOTS)
    return ()


def _kept_instead(one: Pass, module: str) -> Saved:
    """The inputs from which `module` is recomputed, where nothing else keeps them."""
    if module == "core_attn":  # before they are rotated; values, and keys that have no norm, are views of qkv's output
        queries, keys = _elements(one)
        own = (queries + keys) if one.architecture.qk_norm else _copied(one, queries, keys)
        return {"inputs of attention": own * one.bytes_each, "output of qkv": _qkv(one) * one.bytes_each}
    if module == "layernorm" and one.kernels != "te":
        return {"inputs of the norms": 2 * one.hidden_bytes}
    return {}


def _elements(one: Pass) -> tuple[float, float]:
    """Elements of a layer's queries, and of its keys or values, on this rank."""
    a = one.architecture
    heads, groups = a.num_heads / one.degrees.tensor, max(a.num_kv_heads / one.degrees.tensor, 1)
    return one.local * heads * a.head_dim, one.local * groups * a.head_dim


def _qkv(one: Pass) -> float:
    """Elements of the output of qkv that attention takes its queries, keys and values from.

    With fewer key-value heads than tensor-parallel ranks, Megatron gathers all of it on every rank.
    """
    a, (queries, keys) = one.architecture, _elements(one)
    if a.num_kv_heads < one.degrees.tensor:
        return one.local * (a.num_heads + 2 * a.num_kv_heads) * a.head_dim
    return queries + 2 * keys


def _copied(one: Pass, queries: float, keys: float) -> float:
    """Elements of the queries that are no view of qkv's output.

    Megatron lays it out by groups: queries, keys, values of one, then of the next. So the queries are adjacent in it
    where there is one group, and evenly spaced where each group has one head (as many key-value heads as heads).
    """
    together = keys <= one.local * one.architecture.head_dim or queries == keys
    return 0.0 if together else queries


def _norm(one: Pass, name: str) -> Saved:
    size, rows = one.architecture.hidden_size, one.sharded
    copies = 2 * 4 if one.kernels == "cpu" else one.bytes_each
    return {name: rows * size * copies, f"{name}, inverse root": rows * 4}


def _attention(one: Pass) -> Saved:
    a, each = one.architecture, one.bytes_each
    heads, groups = a.num_heads / one.degrees.tensor, max(a.num_kv_heads / one.degrees.tensor, 1)
    queries, keys = _elements(one)
    copied = _copied(one, queries, keys)
    saved: Saved = {"normalizer of attention": one.local * heads * 4 * one.padding}
    on_cpu, gathers = one.kernels == "cpu", one.gathers
    if not gathers or (a.qk_norm and each == 4):  # a view of it is kept: the values, or the keys before their norm
        saved["output of qkv"] = _qkv(one) * each
    if a.qk_norm:
        saved["inverse roots of heads"] = one.local * (heads + groups) * 4
        if on_cpu:  # float32 copies before and after the division; in float32 that of the keys is the view above
            saved["queries, before and after their norm"] = (queries + (copied if each == 4 else queries)) * 4
            saved["keys, before and after their norm"] = keys * 4 * (1 if each == 4 else 2)
        else:
            saved["queries before their norm"] = copied * each
            if one.kernels == "te":
                saved["keys before their norm"] = keys * each
    if gathers:  # keys and values of all context-parallel ranks
        saved["gathered queries, keys, values"] = (queries + 2 * keys * one.degrees.context) * each * one.padding
        saved["gathered output"] = queries * each * one.padding
    else:
        saved["rotated queries and keys"] = (queries + keys) * each
    saved["output of attention"] = queries * each
    return saved


def _mlp(one: Pass) -> Saved:
    inner = one.local * one.architecture.ffn_size / one.degrees.tensor * one.bytes_each
    saved = {"input of fc1": one.hidden_bytes, "output of fc1": 2 * inner, "input of fc2": inner}
    return saved if one.fused_swiglu else saved | {"gate and up": 2 * inner}


def _experts(one: Pass) -> Saved:
    experts = one.architecture.experts
    assert experts is not None
    rows = one.sharded * experts.per_token * one.degrees.expert_tensor
    if one.degrees.expert > 1:
        rows *= one.imbalance
    inner = rows * experts.ffn_size / one.degrees.expert_tensor * one.bytes_each
    return {
        "input of the router": one.hidden_bytes,
        # probabilities float32 and a mask of all experts, and of the chosen ones index, score, weight, place
        "router": one.sharded * (experts.count * 5 + experts.per_token * 24),
        "input of the experts": rows * one.architecture.hidden_size * one.bytes_each,
        "output of the experts' fc1": 2 * inner,
        "gate, up and scaled": 3 * inner,
        "input of fc2": inner,
    }


def in_flight(degrees: Degrees, stage: int, microbatches: int) -> float:
    """Micro-batches whose activations of this whole stage are held at the same time by Megatron's schedules.

    Example: 1F1B over 4 stages: 4 on the first, 1 on the last.
    """
    behind = degrees.pipeline - stage - 1
    if degrees.virtual == 1:
        return min(behind + 1, microbatches)
    chunks = min(2 * behind + (degrees.virtual - 1) * degrees.pipeline + 1, microbatches * degrees.virtual)
    return chunks / degrees.virtual


def layer_backward(one: Pass) -> float:
    """Gradients that live beside the saved tensors while a layer's backward pass runs: those of both halves of fc1's
    output, of their product and of the residual."""
    a = one.architecture
    if a.experts:
        rows = one.sharded * a.experts.per_token * one.degrees.expert_tensor
        rows *= one.imbalance if one.degrees.expert > 1 else 1.0
        inner = rows * (4 * a.experts.ffn_size / one.degrees.expert_tensor + a.hidden_size)
    else:
        inner = one.local * 4 * a.ffn_size / one.degrees.tensor
    return inner * one.bytes_each + 2 * one.hidden_bytes


def head_bytes(
    one: Pass, chunk_tokens: int, *, backward: bool, entropy: bool, fused: bool = False
) -> tuple[float, float]:
    """(logits, the rest) at the peak of the output layer, which `actor/logprobs.py` runs over chunks of tokens.

    Forward: a float32 chunk of logits and its exponentials, or only the product where a kernel fuses the rest
    (actor.logprob_kernel). Backward, two moments can be the peak: making a chunk's gradient, with that of the chunk
    before still referred to, and adding its product to the weight's gradient.

    Example: bfloat16 with several chunks and an entropy term, backward: 2 bytes an element of the old gradient, 4 of
    the logits, 4 of the probabilities and 2 of the rounded gradient: 12.
    """
    a, each = one.architecture, one.bytes_each
    rows, columns = min(chunk_tokens, one.local), a.padded_vocab_size(one.degrees.tensor) / one.degrees.tensor
    rounded, hidden = each if each != 4 else 0, one.local * a.hidden_size * each
    weight = columns * a.hidden_size
    moments = [(each if fused else 8, hidden)]
    if backward:
        chunk = each if fused else max((8 if entropy else 4) + rounded, 4 + rounded)
        before, gradients = (each if one.local > chunk_tokens else 0), 2 * hidden + 4 * weight
        moments += [(before + chunk, gradients), (each, gradients + each * weight)]
    logits, rest = max(moments, key=lambda moment: rows * columns * moment[0] + moment[1])
    return rows * columns * logits, rest
