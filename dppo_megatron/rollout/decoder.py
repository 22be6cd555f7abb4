"""The forward pass of every supported family, written out for generation.

transformers' modules spend a third of a small model's time per token on Python calls and on building masks, and compute
queries, keys and values with three matrix products where one is enough. Families differ in what their `Architecture`
lists (norms on heads, biases, experts), so one decoder serves all; tests/test_hf_engine.py compares it with
transformers, token by token, for each. Matrices with the same input are one tensor, with a view per parameter.

The key-value cache is written in place. Concatenating it at every token would copy all of it each time; padding it to
the longest possible completion would make attention read all of that each time. Instead it has spare capacity, returns
views of the filled part, and grows by half, so that a token is copied about twice in all. When a row ends, the last
running row moves to its place: as many rows are copied as have ended. The caller must follow their order (`Moves`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from dppo_megatron.types import UserError
from dppo_megatron.weights import mapping
from dppo_megatron.weights.architecture import Architecture
from dppo_megatron.weights.layer_parts import Experts, deinterleave

_SPARE_TOKENS = 16
"""Capacity behind the prompt at first. More would not pay: touching new memory costs as much as copying when the cache
grows, and by then most completions of a short task have ended."""
_HEAD_NORMS = ("self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight")
_QK_NORM = "qk_norm"


@dataclass(frozen=True, slots=True)
class Moves:
    """Moves rows so that the running ones become the first `count`.

    Example: if rows 0 and 2 of five have ended, count is 3, and rows 3 and 4 move to 0 and 2.
    """

    count: int
    source: Tensor
    target: Tensor

    @staticmethod
    def of(running: Tensor, count: int) -> Moves:
        """running: [B] bool, `count` of them true."""
        return Moves(count, running[count:].nonzero()[:, 0] + count, (~running[:count]).nonzero()[:, 0])

    def apply(self, rows: Tensor) -> Tensor:
        """[B, ...] -> [count, ...]. Overwrites `rows` and returns a view of it."""
        if len(self.source):
            rows[self.target] = rows[self.source]
        return rows[: self.count]


class KeyValues:
    """Keys and values of every layer, for a batch whose rows have equally many tokens; `capacity` grows as needed."""

    def __init__(self, a: Architecture, rows: int, capacity: int, dtype: torch.dtype, device: torch.device) -> None:
        self.filled = 0
        """Number of tokens in each row."""
        self._rows = rows
        shape = (2, rows, a.num_kv_heads, capacity, a.head_dim)  # together in one tensor: half as many copy kernels
        self._layers = [torch.empty(shape, dtype=dtype, device=device) for _ in range(a.num_layers)]

    def reserve(self, count: int) -> None:
        """Ensure capacity for `count` more tokens in every layer; to be called before `append`."""
        capacity = self._layers[0].size(3)
        if self.filled + count > capacity:
            self._rebuild(max(self.filled + count, capacity * 3 // 2), torch.arange(self._rows))

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append [B, K, n, D] to one layer; returns views of all its keys and values, [B, K, filled + n, D]."""
        end = self.filled + keys.size(2)
        stored = self._layers[layer][:, : self._rows]
        stored[0, :, :, self.filled : end] = keys
        stored[1, :, :, self.filled : end] = values
        return stored[0, :, :, :end], stored[1, :, :, :end]

    def expand(self, rows: Tensor) -> None:
        """Replace the batch by its rows `rows` [B'], which may repeat, and add spare capacity for completions."""
        self._rebuild(self.filled + _SPARE_TOKENS, rows)

    def move(self, moves: Moves) -> None:
        """Copy rows `moves.source` to rows `moves.target`, and keep the first `moves.count` rows."""
        if len(moves.source):
            for stored in self._layers:
                # by indexing: index_select and index_copy_ first copy the whole view, as it is not contiguous
                stored[:, moves.target, :, : self.filled] = stored[:, moves.source, :, : self.filled]
        self._rows = moves.count

    def _rebuild(self, capacity: int, rows: Tensor) -> None:
        rows = rows.to(self._layers[0].device)
        for layer, stored in enumerate(self._layers):  # one at a time, so that peak memory grows by one layer only
            larger = stored.new_empty(2, len(rows), stored.size(2), capacity, stored.size(4))
            larger[:, :, :, : self.filled] = stored[:, rows, :, : self.filled]
            self._layers[layer] = larger
        self._rows = len(rows)


@dataclass(frozen=True, slots=True)
class _FeedForward:
    """Weights of a gated feed-forward layer, or of a mixture of E of them."""

    gate_up: Tensor
    """[2 F, hidden], with experts [E, 2 F, hidden]."""
    down: Tensor
    """[hidden, F], with experts [E, hidden, F]."""
    router: Tensor | None = None
    """[E, hidden]."""
    bias: Tensor | None = None
    """[E] float32: the correction bias of sigmoid routers."""
    shared: _FeedForward | None = None
    """The shared experts, which process every token."""
    shared_gate: Tensor | None = None
    """[1, hidden] (Qwen2-MoE)."""
    post_norm: Tensor | None = None
    """[hidden] norm after the layer (Gemma, GLM-4)."""


@dataclass(frozen=True, slots=True)
class _DecoderLayer:
    input_norm: Tensor
    qkv: Tensor | None
    """[(H + 2 K) D, hidden] for H query heads and K key-value heads: queries, keys, values. None: latent attention."""
    latent: dict[str, Tensor]
    """Weights of latent attention, by Megatron's names below `self_attention.`; shapes are in `weights/mapping.py`."""
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
    """[H + K, D]: the query norm once per query head, then the key norm once per key-value head."""
    out: Tensor
    middle_norm: Tensor
    """Before the feed-forward layer."""
    feed_forward: _FeedForward
    post_norm: Tensor | None
    """After the attention (Gemma, GLM-4)."""
    window: int | None


class Decoder:
    """A model whose weights are set by copying into `named`. Weights, activations and cache all have `dtype`."""

    def __init__(
        self, architecture: Architecture, *, dtype: torch.dtype, device: torch.device, records_experts: bool = False
    ) -> None:
        a = architecture
        self._records_experts = records_experts
        self.experts: Tensor | None = None
        """[B, n, layers, k] int64: the experts of the tokens of the last call, if `records_experts`."""
        self._architecture, self._dtype, self._device = a, dtype, device
        self.named: dict[str, Tensor] = {}
        """Name in the checkpoint -> the view that its values must be copied into."""
        by_layer = self._tensors()
        outside = by_layer[()]
        self._layers = [self._layer(index, by_layer[index,]) for index in range(a.num_layers)]
        self._embedding, self._norm = outside[mapping.EMBEDDING], outside["decoder.final_layernorm.weight"]
        self._output = outside.get(mapping.OUTPUT, self._embedding)
        ropes = [a.rope, *([a.gemma.local_rope] if a.gemma else [])]
        self._ropes = [(torch.tensor(rope.frequencies, device=device), rope.scale) for rope in ropes]
        """For layers without a sliding window, and for layers with one."""
        # plain attention rounds scores to the cache's dtype, so it needs at least float32
        self._plain_attention = device.type == "cpu" and dtype in (torch.float32, torch.float64)

    def empty_cache(self, rows: int, capacity: int) -> KeyValues:
        """A cache with room for `capacity` tokens per row; `step` lets it grow."""
        return KeyValues(self._architecture, rows, capacity, self._dtype, self._device)

    def read(self, tokens: Tensor, positions: Tensor, visible: Tensor, cache: KeyValues) -> Tensor:
        """Prefill: logits [B, V] after the last of `tokens` [B, n]. Fills `cache`, which must be empty.

        Args:
            positions: [B, n] position of each token in its sequence.
            visible: [B, n] bool; False at padding.
        """
        count = tokens.size(1)
        causal = torch.ones(count, count, dtype=torch.bool, device=self._device).tril()
        # a padding token attends to itself: a softmax over no token would be NaN
        itself = torch.eye(count, dtype=torch.bool, device=self._device)
        return self._forward(tokens, positions, cache, (causal & visible[:, None, :] | itself)[:, None])

    def step(self, tokens: Tensor, positions: Tensor, padding: Tensor | None, cache: KeyValues) -> Tensor:
        """Decode: logits [B, V] after one more token [B] of each row.

        Args:
            positions: [B] position of that token.
            padding: [B, P] attention bias of the first P tokens: 0, or -inf at padding; None: no padding.
        """
        cache.reserve(1)
        mask = None if padding is None else padding[:, None, None]
        return self._forward(tokens[:, None], positions[:, None], cache, mask)

    def _forward(self, tokens: Tensor, positions: Tensor, cache: KeyValues, mask: Tensor | None) -> Tensor:
        batch, count = tokens.shape
        hidden = F.embedding(tokens.flatten(), self._embedding)  # [B n, hidden], as everywhere but in attention
        if self._architecture.gemma is not None:
            hidden = hidden * torch.tensor(hidden.size(1) ** 0.5).to(self._dtype)
        rotaries = [self._rotary(positions, *rope) for rope in self._ropes]
        visited: list[Tensor] = []
        for index, layer in enumerate(self._layers):
            heads, values = self._heads(layer, self._normed(hidden, layer.input_norm))
            rotary = rotaries[0 if layer.window is None else 1]
            attended = self._attend(index, heads, values, rotary, batch, cache, mask)
            hidden = self._added(hidden, attended, layer.out, layer.post_norm)
            hidden = self._feed_forward(hidden, self._normed(hidden, layer.middle_norm), layer.feed_forward, visited)
        cache.filled += count
        if self._records_experts:
            self.experts = torch.stack(visited, 1).view(batch, count, len(visited), -1)
        last = hidden.view(batch, count, -1)[:, -1]
        return F.linear(self._normed(last, self._norm), self._output)

    def _rotary(self, positions: Tensor, frequencies: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Cosines and sines [B n, 1, 2 pairs]; the sines of the first half are negated."""
        angles = positions.flatten()[:, None] * frequencies
        cos, sin = ((part * scale).to(self._dtype) for part in (angles.cos(), angles.sin()))
        return torch.cat([cos, cos], -1)[:, None], torch.cat([-sin, sin], -1)[:, None]

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMS norm of x [..., D] over D; weight [D], or [..., D] if each row has its own."""
        size, eps = x.shape[-1:], self._architecture.norm_eps
        if self._architecture.gemma is not None:
            exact = torch.promote_types(x.dtype, torch.float32)
            return (F.rms_norm(x.to(exact), size, None, eps) * (1 + weight.to(exact))).to(x.dtype)
        return F.rms_norm(x, size, weight, eps) if weight.ndim == 1 else F.rms_norm(x, size, None, eps) * weight

    def _added(self, residual: Tensor, x: Tensor, weight: Tensor, norm: Tensor | None) -> Tensor:
        """residual [B n, hidden] + x times weight, after `norm` of the product if there is one."""
        if norm is None:
            return torch.addmm(residual, x, weight.t())
        return residual + self._normed(F.linear(x, weight), norm)

    def _heads(self, layer: _DecoderLayer, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [B n, hidden] -> queries and keys [B n, H + K, D], before the rotary embedding, and values [B n, K, D]."""
        a = self._architecture
        if layer.qkv is None:
            return self._latent_heads(layer.latent, x)
        qkv = F.linear(x, layer.qkv, layer.qkv_bias).view(len(x), -1, a.head_dim)
        heads, values = qkv.split([a.num_heads + a.num_kv_heads, a.num_kv_heads], 1)  # type: ignore[no-untyped-call]
        if layer.qk_norm is not None:
            heads = self._normed(heads, layer.qk_norm)
        if a.is_glm4:  # its rotary pairs are adjacent dimensions
            size = 2 * len(a.rope.frequencies)
            heads = torch.cat([deinterleave(heads[..., :size]), heads[..., size:]], -1)
        if a.gemma is not None:  # undoes the 1 / sqrt(head_dim) that attention applies
            heads[:, : a.num_heads] *= a.gemma.softmax_scale * a.head_dim**0.5
        return heads, values

    def _latent_heads(self, own: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        """Like `_heads`, for latent attention: the rotary dimensions come first, and values are padded to head_dim."""
        a, latent = self._architecture, self._architecture.latent
        assert latent is not None
        if latent.query_rank:
            inner = F.linear(x, own["linear_q_down_proj.weight"])
            inner = self._normed(inner, own["linear_q_up_proj.layer_norm_weight"])
            queries = F.linear(inner, own["linear_q_up_proj.weight"])
        else:
            queries = F.linear(x, own["linear_q_proj.weight"])
        queries = queries.view(len(x), a.num_heads, -1) * latent.scale
        q_nope, q_rope = queries.tensor_split((latent.nope_dim,), -1)
        low_rank, k_rope = F.linear(x, own["linear_kv_down_proj.weight"]).tensor_split((latent.rank,), -1)
        low_rank = self._normed(low_rank, own["linear_kv_up_proj.layer_norm_weight"])
        expanded = F.linear(low_rank, own["linear_kv_up_proj.weight"])
        k_nope, values = expanded.view(len(x), a.num_heads, -1).tensor_split((latent.nope_dim,), -1)
        rope = torch.cat([q_rope, k_rope[:, None].expand_as(q_rope)], 1)
        heads = torch.cat([deinterleave(rope), torch.cat([q_nope, k_nope], 1)], -1)
        return heads, F.pad(values, (0, a.head_dim - latent.value_dim))

    def _attend(
        self,
        index: int,
        heads: Tensor,
        values: Tensor,
        rotary: tuple[Tensor, Tensor],
        batch: int,
        cache: KeyValues,
        mask: Tensor | None,
    ) -> Tensor:
        """Attention output [B n, H value_dim] of layer `index`, from its `_heads`."""
        a = self._architecture
        num_heads, kv_heads, size = a.num_heads, a.num_kv_heads, a.head_dim
        cos, sin = rotary
        # (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin); `sin` holds the minus sign
        part, rest = heads[..., : cos.size(-1)], heads[..., cos.size(-1) :]
        rotated = torch.addcmul(part * cos, part.roll(cos.size(-1) // 2, -1), sin)
        rotated = torch.cat([rotated, rest], -1) if rest.size(-1) else rotated
        queries, keys = rotated[:, :num_heads], rotated[:, num_heads:]
        count = len(rotated) // batch
        keys, values = cache.append(
            index,
            keys.view(batch, count, kv_heads, size).transpose(1, 2),
            values.reshape(batch, count, kv_heads, size).transpose(1, 2),
        )
        window, filled = self._layers[index].window, keys.size(2)
        if window is not None and window < filled:
            if count == 1:
                keys, values = keys[:, :, -window:], values[:, :, -window:]
                mask = None if mask is None or filled - window >= mask.size(3) else mask[..., filled - window :]
            elif mask is not None:
                mask = mask & torch.ones_like(mask).triu(1 - window)
        if count == 1:  # query heads that share a key head become its queries, so that keys need not be repeated
            attended = self._attend_one(queries.reshape(batch, kv_heads, -1, size), keys, values, mask)
            return attended.reshape(batch, num_heads, size)[..., : a.value_dim].flatten(1)
        queries = queries.view(batch, count, num_heads, size).transpose(1, 2)
        keys, values = (part.repeat_interleave(num_heads // kv_heads, dim=1) for part in (keys, values))
        attended = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        return attended.transpose(1, 2).reshape(batch * count, num_heads, size)[..., : a.value_dim].flatten(1)

    def _attend_one(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """queries [B, K, H / K, D], keys and values [B, K, filled, D], mask [B, 1, 1, P] -> [B, K, H / K, D]."""
        if not self._plain_attention:
            if mask is not None:
                mask = F.pad(mask, (0, keys.size(2) - mask.size(3)))
            return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        # torch's fused kernel is made for long queries: for one token of 512 rows it takes twice as long as this
        scores = torch.matmul(queries * queries.size(-1) ** -0.5, keys.transpose(2, 3))
        if mask is not None:
            scores[..., : mask.size(3)] += mask
        return torch.matmul(scores.softmax(-1), values)

    def _feed_forward(self, residual: Tensor, x: Tensor, weights: _FeedForward, visited: list[Tensor]) -> Tensor:
        """residual + the layer's output for x, both [B n, hidden]; appends its experts [B n, k] to `visited`."""
        experts = self._architecture.experts
        if weights.router is None or experts is None:
            if experts is not None:
                visited.append(x.new_zeros(len(x), experts.per_token, dtype=torch.int64))
            inner = _gated(x, weights.gate_up, is_gelu=self._architecture.gemma is not None)
            return self._added(residual, inner, weights.down, weights.post_norm)
        chosen, share = _route(x, weights.router, weights.bias, experts)
        visited.append(chosen)
        if weights.shared is not None:
            inner = _gated(x, weights.shared.gate_up)
            if weights.shared_gate is not None:  # one factor per token, so it may as well multiply before `down`
                inner = inner * F.linear(x, weights.shared_gate).sigmoid()
            residual = torch.addmm(residual, inner, weights.shared.down.t())
        order = chosen.flatten().argsort(stable=True)  # (token, expert) pairs, sorted by expert
        counts = chosen.flatten().bincount(minlength=experts.count).tolist()
        for expert, pairs in enumerate(order.split(counts)):  # type: ignore[no-untyped-call]
            if len(pairs):
                rows = pairs // experts.per_token
                output = F.linear(_gated(x[rows], weights.gate_up[expert]), weights.down[expert])
                residual = residual.index_add(0, rows, output * share.flatten()[pairs, None])
        return residual

    def _tensors(self) -> dict[mapping.Place, dict[str, Tensor]]:
        """Layer, or () outside of them -> Megatron's key without the layer -> one uninitialized tensor for all that the
        key is made of, of experts [E, ...]; `named` gets the views. Unlike in Megatron's tensor, all heads of queries
        come first, then those of keys. Raises UserError for a provider that divides weights otherwise."""
        a, tensors = self._architecture, dict[mapping.Place, dict[str, Tensor]]()
        provided = mapping.table(a)
        for key, names_here in mapping.table(replace(a, provided_names=())).items():
            if len(names_here) != len(provided[key]):
                both = f"{', '.join(names_here)} and not {', '.join(provided[key])}"
                raise UserError(f"rollout.engine = hf: has {both}; use a server")
        shapes = mapping.hf_shapes(a)
        for key, place in mapping.in_layer_order(a):
            kind, where = mapping.by_kind(key, place)
            own, short = tensors.setdefault(where[:1], {}), kind.removeprefix("decoder.layers.")
            names, shape = mapping.hf_names(key, place, a), mapping.full_shape(key, a)
            if short in _HEAD_NORMS:  # copying the checkpoint's one vector into the view broadcasts it to every head
                if _QK_NORM not in own:
                    own[_QK_NORM] = self._empty(a.num_heads + a.num_kv_heads, *shape)
                self.named[names[0]] = own[_QK_NORM].tensor_split((a.num_heads,))[_HEAD_NORMS.index(short)]
                continue
            if short not in own:
                experts = (a.experts.count,) if a.experts and mapping.is_expert(key) else ()
                dtype = torch.float32 if short == mapping.EXPERT_BIAS else None
                own[short] = self._empty(*experts, *shape, dtype=dtype)
            whole = own[short][where[1]] if mapping.is_expert(key) else own[short]
            self.named |= zip(names, whole.split([shapes[name][0] for name in names]), strict=True)  # type: ignore[no-untyped-call]
        return tensors

    def _layer(self, index: int, own: dict[str, Tensor]) -> _DecoderLayer:
        qkv, shared = "self_attention.linear_qkv.", "mlp.shared_experts.linear_fc1.weight"
        has_experts = self._architecture.has_experts(index)
        return _DecoderLayer(
            input_norm=own[qkv + "layer_norm_weight" if qkv + "weight" in own else "input_layernorm.weight"],
            qkv=own.get(qkv + "weight"),
            qkv_bias=own.get(qkv + "bias"),
            latent={key.removeprefix("self_attention."): one for key, one in own.items()},
            qk_norm=own.get(_QK_NORM),
            out=own["self_attention.linear_proj.weight"],
            middle_norm=own["pre_mlp_layernorm.weight" if has_experts else "mlp.linear_fc1.layer_norm_weight"],
            post_norm=own.get(mapping.POST_ATTENTION + "weight"),
            window=self._architecture.window_of(index),
            feed_forward=_FeedForward(
                *_projections(own, "mlp.experts.experts." if has_experts else "mlp."),
                router=own.get("mlp.router.weight"),
                bias=own.get(mapping.EXPERT_BIAS),
                shared=_FeedForward(*_projections(own, "mlp.shared_experts.")) if shared in own else None,
                shared_gate=own.get("mlp.shared_experts.gate_weight"),
                post_norm=own.get(mapping.POST_MLP + "weight"),
            ),
        )

    def _empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self._dtype, device=self._device)


def _projections(own: dict[str, Tensor], module: str) -> tuple[Tensor, Tensor]:
    return own[module + "linear_fc1.weight"], own[module + "linear_fc2.weight"]


def _gated(x: Tensor, gate_up: Tensor, *, is_gelu: bool = False) -> Tensor:
    gate, up = F.linear(x, gate_up).chunk(2, -1)
    return (F.gelu(gate, approximate="tanh") if is_gelu else F.silu(gate)).mul_(up)


def _route(x: Tensor, router: Tensor, bias: Tensor | None, experts: Experts) -> tuple[Tensor, Tensor]:
    """The experts [n, k] of each token, and the weights [n, k] of their outputs."""
    if bias is None:
        share, chosen = F.linear(x, router).softmax(-1, dtype=torch.float32).topk(experts.per_token)
    else:
        scores = F.linear(x.float(), router.float()).sigmoid()
        biased = scores + bias  # the bias decides which experts are chosen, not their weights
        if experts.groups > 1:
            grouped = biased.view(len(x), experts.groups, -1)
            best = grouped.topk(2).values.sum(-1).topk(experts.groups_per_token).indices
            excluded = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(1, best, False)
            biased = grouped.masked_fill(excluded[..., None], -torch.inf).flatten(1)
        chosen = biased.topk(experts.per_token).indices
        share = scores.gather(1, chosen)
    if experts.normalize_weights:
        share = share / share.sum(-1, keepdim=True)
    return chosen, (share * experts.scale).to(x.dtype)
