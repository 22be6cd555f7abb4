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
"""The layers that run: Transformer Engine's; Megatron's own with this project's attention on CUDA; or these on a CPU,
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
    """Tokens of the whole micro-batch, before context and sequence parallelism split them."""
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

    @property
    def inner_elements(self) -> float:
        """Elements between the two products of a feed-forward layer, or of the experts, on this rank."""
        experts = self.architecture.experts
        if experts is None:
            return self.local * self.architecture.ffn_size / self.degrees.tensor
        return self.expert_rows * experts.ffn_size / self.degrees.expert_tensor

    @property
    def expert_rows(self) -> float:
        """Rows that this rank's experts process: a token counts once for each expert that it visits."""
        experts = self.architecture.experts
        visits = experts.per_token * self.degrees.expert_tensor if experts else 0
        return self.sharded * visits * (self.imbalance if self.degrees.expert > 1 else 1.0)


_FREED = {
    "core_attn": (
        "normalizer of attention",
        "gathered queries, keys, values",
        "gathered output",
        "rotated queries and keys",
    ),
    "mlp": ("output of fc1", "gate and up", "input of fc2"),
    "moe": (
        "router",
        "input of the experts",
        "output of the experts' fc1",
        "gate, up and scaled",
        "input of their fc2",
        "shared experts",
    ),
    "moe_act": ("gate, up and scaled", "input of their fc2"),
    "layernorm": (
        *("input norm", "input norm, inverse root", "input of qkv"),
        *("norm before fc1", "norm before fc1, inverse root", "input of fc1"),
        *("norm before the router", "norm before the router, inverse root", "input of the router"),
    ),
}
"""Tensors that recomputing a module frees. The experts' input is the router's."""
_FREED_WITH_TE = _FREED | {
    "mlp": (*_FREED["mlp"], "input of fc1", "norm before fc1, inverse root"),
    "layernorm": ("input of the router", "norm before the router, inverse root"),
}
"""Transformer Engine's fc1 begins with the norm: only that of experts is a separate module."""


def layer_saved(one: Pass) -> Saved:
    """What one transformer layer keeps without recomputation; a mixture's few dense layers count like the others."""
    saved = _norm(one, "input norm") | {"input of qkv": one.hidden_bytes} | _attention(one)
    if one.architecture.post_norms:
        saved |= _norm(one, "norm behind attention") | _norm(one, "norm behind fc2")
    inner = one.inner_elements * one.bytes_each
    experts = one.architecture.experts
    if experts is None:
        saved |= {**_norm(one, "norm before fc1"), "input of fc1": one.hidden_bytes, "output of fc1": 2 * inner}
        return saved | {"gate and up": 0.0 if one.fused_swiglu else 2 * inner, "input of fc2": inner}
    return saved | {
        **_norm(one, "norm before the router"),
        "input of the router": one.hidden_bytes,
        "shared experts": 5 * one.local * experts.shared_ffn_size / one.degrees.tensor * one.bytes_each
        + (one.hidden_bytes if experts.shared_gate else 0),
        # for all experts a float32 probability and a mask; for the chosen ones index, score, weight and place
        "router": one.sharded * (experts.count * 5 + experts.per_token * 24),
        "input of the experts": one.expert_rows * one.architecture.hidden_size * one.bytes_each,
        "output of the experts' fc1": 2 * inner,
        "gate, up and scaled": 3 * inner,
        "input of their fc2": inner,
    }


def layer_kept(one: Pass, actor: ActorConfig) -> Saved:
    """What one layer keeps until its backward pass, under the settings of recomputation."""
    if actor.recompute == "full":
        return {"input of the layer": one.hidden_bytes}
    saved = layer_saved(one)
    if actor.recompute == "selective":
        modules = actor.recompute_modules
        for module in modules:
            for name in (_FREED_WITH_TE if one.kernels == "te" else _FREED).get(module, ()):
                saved.pop(name, None)
        # the inputs from which the modules are recomputed, where nothing else keeps them
        if "core_attn" in modules:  # before rotation; values, and keys that have no norm, are views of qkv's output
            queries, keys, qkv, copied = _heads(one)
            own = (queries + keys) if one.architecture.qk_norm else copied
            saved |= {"inputs of attention": own * one.bytes_each, "output of qkv": qkv * one.bytes_each}
        if "layernorm" in modules and one.kernels != "te":
            saved["inputs of the norms"] = 2 * one.hidden_bytes
    return saved


def _heads(one: Pass) -> tuple[float, float, float, float]:
    """Elements on this rank: queries; keys, as many as values; qkv's output, which has all three; queries that had to
    be copied out of it.

    With fewer key-value heads than tensor-parallel ranks, Megatron gathers the whole output on every rank. The output
    is laid out by groups: queries, keys, values of one group, then of the next. So queries are views of it where there
    is one group, and where each group has one head.
    """
    a, ranks = one.architecture, one.degrees.tensor
    queries = one.local * a.num_heads / ranks * a.head_dim
    keys = one.local * max(a.num_kv_heads / ranks, 1) * a.head_dim
    whole = one.local * (a.num_heads + 2 * a.num_kv_heads) * a.head_dim
    are_views = a.num_kv_heads <= ranks or queries == keys
    return queries, keys, whole if a.num_kv_heads < ranks else queries + 2 * keys, 0.0 if are_views else queries


def _norm(one: Pass, name: str) -> Saved:
    copies = 2 * 4 if one.kernels == "cpu" else one.bytes_each
    if one.kernels == "local" and one.architecture.gemma is not None:  # computed in float32
        copies = 4
    return {name: one.sharded * one.architecture.hidden_size * copies, f"{name}, inverse root": one.sharded * 4}


def _attention(one: Pass) -> Saved:
    a, each, (queries, keys, qkv, copied) = one.architecture, one.bytes_each, _heads(one)
    saved: Saved = {"normalizer of attention": queries / a.head_dim * 4 * one.padding}
    if a.latent is not None:  # before and after their norms
        saved["compressed queries and keys"] = 2 * one.sharded * (a.latent.query_rank + a.latent.rank) * each
    if not one.gathers or (a.qk_norm and each == 4):  # a view of it is kept: the values, or the keys before their norm
        saved["output of qkv"] = qkv * each
    if a.qk_norm:
        saved["inverse roots of heads"] = (queries + keys) / a.head_dim * 4
        if one.kernels == "cpu":  # float32 copies around the division; in float32 that of the keys is the view above
            saved["queries, before and after their norm"] = (queries + (copied if each == 4 else queries)) * 4
            saved["keys, before and after their norm"] = keys * 4 * (1 if each == 4 else 2)
        else:
            saved["queries before their norm"] = copied * each
            saved["keys before their norm"] = keys * each if one.kernels == "te" else 0.0
    if one.gathers:  # keys and values of all context-parallel ranks, then repeated for each query head
        context = one.degrees.context
        gathered = 2 * context * (queries if context > 1 else keys)
        saved["gathered queries, keys, values"] = (queries + gathered) * each * one.padding
        saved["gathered output"] = queries * each * one.padding
    else:
        saved["rotated queries and keys"] = (queries + keys) * each
    saved["output of attention"] = queries * each
    return saved


def in_flight(degrees: Degrees, stage: int, microbatches: int, group: int) -> float:
    """Micro-batches whose activations of this whole stage are held at the same time by Megatron's schedules.

    Args:
        group: micro-batches that an interleaved pipeline runs through one chunk in turn; 0: as many as stages.

    Example: 1F1B over 4 stages: 4 on the first, 1 on the last. The first of 2 stages in 4 chunks: 9 / 4, in groups of
    8 micro-batches 27 / 4.
    """
    behind = degrees.pipeline - stage - 1
    if degrees.virtual == 1:
        return min(behind + 1, microbatches)
    group = group or degrees.pipeline
    whole_groups = -(-microbatches // group) * group
    chunks = min(2 * behind + (degrees.virtual - 1) * group + 1, whole_groups * degrees.virtual)
    return chunks / degrees.virtual


def layer_backward(one: Pass) -> float:
    """Gradients that live beside the saved tensors while a layer's backward pass runs: those of both halves of fc1's
    output, of their product and of the residual."""
    elements = one.inner_elements * 4
    if one.architecture.experts:
        elements += one.expert_rows * one.architecture.hidden_size
    return elements * one.bytes_each + 2 * one.hidden_bytes


def head_bytes(
    one: Pass,
    chunk_tokens: int,
    *,
    backward: bool,
    entropy: bool,
    fused: bool = False,
    trained: bool = True,
    in_place: bool = True,
) -> tuple[float, float]:
    """Bytes (of logits, of the rest) at the peak of the output layer, in chunks of tokens (`actor/logprobs.py`).

    Forward: a float32 chunk of logits and its exponentials, or only the product where a kernel fuses the rest
    (actor.logprob_kernel). Backward, two moments can be the peak: making a chunk's gradient while the previous chunk's
    is still referenced, and adding its product to the weight's gradient.

    Args:
        trained: the weight has a gradient; with adapters it has none.
        in_place: products are added to Megatron's float32 buffer, which counts among gradients. Otherwise that buffer
            is in bfloat16, and they are added to a float32 tensor of their own.

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
        before = each if one.local > chunk_tokens else 0
        gradients = 2 * hidden + (4 * weight if trained and not in_place else 0)
        moments += [(before + chunk, gradients), (each, gradients + (each * weight if trained else 0))]
    logits, rest = max(moments, key=lambda moment: rows * columns * moment[0] + moment[1])
    return rows * columns * logits, rest
