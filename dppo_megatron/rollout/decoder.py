"""The forward pass of every supported family, written out for generation.

transformers' modules spend a third of a small model's token in calls and in building masks, and read queries, keys and
values with three matrices where one does. What a family has is in its `Architecture`: norms on heads, biases, experts;
so there is one decoder and not one a family. It is compared with transformers, token by token, for each of them
(tests/test_hf_engine.py). Matrices that read the same input are one tensor, of which the checkpoint's names are views.

The key-value cache is written in place. One that is concatenated at every token copies itself for every token; one that
is padded to the longest possible completion is read in full at every token. This one has spare capacity, returns views
of the filled part, and grows by half, so that a token is copied about twice in all. A row that ends leaves a hole, and
the last running row moves into it. So what is copied is what has ended and not what still runs; the price is that rows
change places, which the caller has to follow (`Moves`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dppo_megatron.weights.architecture import Architecture
from dppo_megatron.weights.layer_parts import Experts, Latent, deinterleave
from dppo_megatron.weights.mapping import CORRECTION_BIAS, own_and_provided

_FIRST_ROOM = 16
"""Spare tokens after the prompt. Touching new memory costs as much as the copy when it has to grow, and by then most
completions of a short task have ended."""


@dataclass(frozen=True, slots=True)
class Moves:
    """Which rows move where, so that the running ones are the first `count`.

    Example: of five rows 0 and 2 have ended: count = 3, and rows 3 and 4 move to 0 and 2.
    """

    count: int
    source: Tensor
    target: Tensor

    @staticmethod
    def of(running: Tensor, count: int) -> Moves:
        """running: [B] bool, `count` of them true."""
        return Moves(count, running[count:].nonzero()[:, 0] + count, (~running[:count]).nonzero()[:, 0])

    def apply(self, rows: Tensor) -> Tensor:
        """[B, ...] -> [count, ...], a view of `rows`, which is overwritten."""
        if len(self.source):
            rows[self.target] = rows[self.source]
        return rows[: self.count]


class KeyValues:
    """Keys and values of every layer, for a batch of rows that are all filled to the same length. Has room for
    `capacity` tokens to begin with."""

    def __init__(
        self,
        num_layers: int,
        rows: int,
        kv_heads: int,
        head_dim: int,
        capacity: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.filled = 0
        """Tokens of each row."""
        self._rows = rows
        shape = (2, rows, kv_heads, capacity, head_dim)  # keys and values together: half as many copies to start
        self._rooms = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]

    def reserve(self, count: int) -> None:
        """Make room for `count` more tokens in every layer; called before their `append`s."""
        capacity = self._rooms[0].size(3)
        if self.filled + count > capacity:
            self._rebuild(max(self.filled + count, capacity * 3 // 2), torch.arange(self._rows))

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write [B, K, n, D] behind the filled part of one layer; returns everything so far, [B, K, filled + n, D]."""
        end = self.filled + keys.size(2)
        room = self._rooms[layer][:, : self._rows]
        room[0, :, :, self.filled : end] = keys
        room[1, :, :, self.filled : end] = values
        return room[0, :, :, :end], room[1, :, :, :end]

    def expand(self, rows: Tensor) -> None:
        """Keep `rows` [B'] instead, each as often as it occurs, with spare capacity for the completion's beginning."""
        self._rebuild(self.filled + _FIRST_ROOM, rows)

    def move(self, moves: Moves) -> None:
        """Rows `moves.source` are copied to rows `moves.target`; the first `moves.count` remain."""
        if len(moves.source):
            for room in self._rooms:
                # by indexing: index_select and index_copy_ first make a copy of a whole view that has gaps
                room[:, moves.target, :, : self.filled] = room[:, moves.source, :, : self.filled]
        self._rows = moves.count

    def _rebuild(self, capacity: int, rows: Tensor) -> None:
        rows = rows.to(self._rooms[0].device)
        for layer, room in enumerate(self._rooms):  # one layer at a time: the peak is one layer more, not all
            larger = room.new_empty(2, len(rows), room.size(2), capacity, room.size(4))
            larger[:, :, :, : self.filled] = room[:, rows, :, : self.filled]
            self._rooms[layer] = larger
        self._rows = len(rows)


@dataclass(frozen=True, slots=True)
class _FeedForward:
    """A gated layer, or as many as there are experts."""

    gate_up: Tensor
    """[2 F, hidden], with experts [E, 2 F, hidden]."""
    down: Tensor
    """[hidden, F], with experts [E, hidden, F]."""
    router: Tensor | None = None
    """[E, hidden]."""
    bias: Tensor | None = None
    """[E] float32, of sigmoid routers."""
    shared: _FeedForward | None = None
    """Of the experts that every token visits."""
    shared_gate: Tensor | None = None
    """[1, hidden] (Qwen2-MoE)."""
    post_norm: Tensor | None = None
    """[hidden] of the norm behind it (Gemma, GLM-4)."""


@dataclass(frozen=True, slots=True)
class _LatentHeads:
    """Low-rank projections of multi-head latent attention."""

    query_down: Tensor | None
    query_norm: Tensor | None
    query_up: Tensor
    down: Tensor
    """[rank + turning, hidden], of keys and values."""
    norm: Tensor
    up: Tensor


@dataclass(frozen=True, slots=True)
class _DecoderLayer:
    input_norm: Tensor
    qkv: Tensor | _LatentHeads
    """[(H + 2 K) D, hidden]: queries, keys, values."""
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
    """[H + K, D]: the query norm for each query head, then the key norm for each key-value head."""
    out: Tensor
    middle_norm: Tensor
    """Before the feed-forward part."""
    feed_forward: _FeedForward
    post_norm: Tensor | None
    """Behind the attention (Gemma, GLM-4)."""
    window: int | None


class Decoder:
    """A model whose weights are those last copied into `named`. Weights, activations and cache are of one `dtype`."""

    def __init__(
        self, architecture: Architecture, *, dtype: torch.dtype, device: torch.device, records_experts: bool = False
    ) -> None:
        a = architecture
        self._records_experts = records_experts
        self.experts: Tensor | None = None
        """[B, n, layers, k] int64 that the last tokens were sent to, if they are recorded."""
        self._architecture, self._dtype, self._device = a, dtype, device
        self.named: dict[str, Tensor] = {}
        """The checkpoint's name of a tensor -> where its values go."""
        self._embedding = self._new("model.embed_tokens.weight", a.vocab_size, a.hidden_size)
        self._layers = [self._layer(index) for index in range(a.num_layers)]
        self._norm = self._new("model.norm.weight", a.hidden_size)
        self._output = (
            self._embedding if a.tied_embeddings else self._new("lm_head.weight", a.vocab_size, a.hidden_size)
        )
        if a.provided_names:
            self.named = {provided: self.named[own] for own, provided in own_and_provided(a)}
        ropes = [a.rope, *([a.gemma.local_rope] if a.gemma else [])]
        self._ropes = [(torch.tensor(rope.frequencies, device=device), rope.scale) for rope in ropes]
        """Of layers without a window, and of those with one."""
        # scores are rounded to the type of the cache, which only float32 can afford
        self._plain_attention = device.type == "cpu" and dtype in (torch.float32, torch.float64)

    def empty_cache(self, rows: int, capacity: int) -> KeyValues:
        """For sequences of up to `capacity` tokens, and longer ones once it has grown."""
        a = self._architecture
        return KeyValues(
            a.num_layers, rows, a.num_kv_heads, a.head_dim, capacity, dtype=self._dtype, device=self._device
        )

    def read(self, tokens: Tensor, positions: Tensor, visible: Tensor, cache: KeyValues) -> Tensor:
        """Logits [B, V] after the last of `tokens` [B, n], whose keys and values go into an empty cache.

        Args:
            positions: [B, n] of each token in its sequence.
            visible: [B, n] bool; False where there is only padding.
        """
        count = tokens.size(1)
        causal = torch.ones(count, count, dtype=torch.bool, device=self._device).tril()
        # a padding token sees itself: a row of the softmax without anything would be NaN
        own = torch.eye(count, dtype=torch.bool, device=self._device)
        return self._forward(tokens, positions, cache, (causal & visible[:, None, :] | own)[:, None])

    def step(self, tokens: Tensor, positions: Tensor, padding: Tensor | None, cache: KeyValues) -> Tensor:
        """Logits [B, V] after one more token [B] of each row.

        Args:
            positions: [B].
            padding: [B, P], 0 where one of the first P tokens is visible and -inf where not; None: all are.
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
        """Cosines and sines [B n, 1, 2 pairs], each sine with the sign of its half."""
        angles = positions.flatten()[:, None] * frequencies
        cos, sin = ((part * scale).to(self._dtype) for part in (angles.cos(), angles.sin()))
        return torch.cat([cos, cos], -1)[:, None], torch.cat([-sin, sin], -1)[:, None]

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [..., D] normed over D; weight [D], or [..., D] where rows have their own."""
        size, eps = x.shape[-1:], self._architecture.norm_eps
        if self._architecture.gemma is not None:
            exact = torch.promote_types(x.dtype, torch.float32)
            return (F.rms_norm(x.to(exact), size, None, eps) * (1 + weight.to(exact))).to(x.dtype)
        return F.rms_norm(x, size, weight, eps) if weight.ndim == 1 else F.rms_norm(x, size, None, eps) * weight

    def _added(self, residual: Tensor, x: Tensor, weight: Tensor, norm: Tensor | None) -> Tensor:
        """residual [B n, hidden] and the product of x, which is normed where the family does."""
        if norm is None:
            return torch.addmm(residual, x, weight.t())
        return residual + self._normed(F.linear(x, weight), norm)

    def _heads(self, layer: _DecoderLayer, x: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys [B n, H + K, D] and values [B n, K, D] of the new tokens, from their normed hidden state."""
        a = self._architecture
        if isinstance(layer.qkv, _LatentHeads):
            return self._latent_heads(layer.qkv, x)
        qkv = F.linear(x, layer.qkv, layer.qkv_bias).view(len(x), -1, a.head_dim)
        heads, values = qkv.split([a.num_heads + a.num_kv_heads, a.num_kv_heads], 1)  # type: ignore[no-untyped-call]
        if layer.qk_norm is not None:
            heads = self._normed(heads, layer.qk_norm)
        if a.is_glm4:  # pairs that turn lie side by side
            size = 2 * len(a.rope.frequencies)
            heads = torch.cat([deinterleave(heads[..., :size]), heads[..., size:]], -1)
        if a.gemma is not None:  # attention divides by the root of the head's size
            heads[:, : a.num_heads] *= a.gemma.softmax_scale * a.head_dim**0.5
        return heads, values

    def _latent_heads(self, own: _LatentHeads, x: Tensor) -> tuple[Tensor, Tensor]:
        """As `_heads`: the part that turns comes first, and values are padded to the size of keys."""
        a, latent = self._architecture, self._architecture.latent
        assert latent is not None
        inner = x
        if own.query_down is not None and own.query_norm is not None:
            inner = F.rms_norm(F.linear(x, own.query_down), own.query_norm.shape, own.query_norm, a.norm_eps)
        queries = F.linear(inner, own.query_up).view(len(x), a.num_heads, -1) * latent.scale
        still_q, turning_q = queries.tensor_split((latent.nope_dim,), -1)
        low, turning_k = F.linear(x, own.down).tensor_split((latent.rank,), -1)
        expanded = F.linear(F.rms_norm(low, own.norm.shape, own.norm, a.norm_eps), own.up)
        still_k, values = expanded.view(len(x), a.num_heads, -1).tensor_split((latent.nope_dim,), -1)
        turning = torch.cat([turning_q, turning_k[:, None].expand_as(turning_q)], 1)
        heads = torch.cat([deinterleave(turning), torch.cat([still_q, still_k], 1)], -1)
        return heads, F.pad(values, (0, a.head_dim - latent.value_dim))

    def _attend(
        self,
        index: int,
        turned: Tensor,
        values: Tensor,
        rotary: tuple[Tensor, Tensor],
        batch: int,
        cache: KeyValues,
        mask: Tensor | None,
    ) -> Tensor:
        """[B n, H D] of values, from the `_heads` of layer `index`, not turned yet."""
        a = self._architecture
        heads, groups, size = a.num_heads, a.num_kv_heads, a.head_dim
        cos, sin = rotary
        # (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin); the sine has the sign of its half
        part, rest = turned[..., : cos.size(-1)], turned[..., cos.size(-1) :]
        turned = torch.addcmul(part * cos, part.roll(cos.size(-1) // 2, -1), sin)
        turned = torch.cat([turned, rest], -1) if rest.size(-1) else turned
        queries, keys = turned[:, :heads], turned[:, heads:]
        count = len(turned) // batch
        keys, values = cache.append(
            index,
            keys.view(batch, count, groups, size).transpose(1, 2),
            values.reshape(batch, count, groups, size).transpose(1, 2),
        )
        window, filled = self._layers[index].window, keys.size(2)
        if window is not None and window < filled:
            if count == 1:
                keys, values = keys[:, :, -window:], values[:, :, -window:]
                mask = None if mask is None or filled - window >= mask.size(3) else mask[..., filled - window :]
            elif mask is not None:
                mask = mask & torch.ones_like(mask).triu(1 - window)
        if count == 1:  # the heads that share a key are its queries: nothing has to be repeated
            attended = self._one_token(queries.reshape(batch, groups, -1, size), keys, values, mask)
            return attended.reshape(batch, heads, size)[..., : a.value_dim].flatten(1)
        queries = queries.view(batch, count, heads, size).transpose(1, 2)
        keys, values = (part.repeat_interleave(heads // groups, dim=1) for part in (keys, values))
        attended = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        return attended.transpose(1, 2).reshape(batch * count, heads, size)[..., : a.value_dim].flatten(1)

    def _one_token(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """queries [B, K, H / K, D], keys and values [B, K, filled, D], mask [B, 1, 1, P] -> [B, K, H / K, D]."""
        if not self._plain_attention:
            if mask is not None:
                mask = F.pad(mask, (0, keys.size(2) - mask.size(3)))
            return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        # torch's fused kernel is made for long queries: for one token of 512 rows it takes twice the time of this
        scores = torch.matmul(queries * queries.size(-1) ** -0.5, keys.transpose(2, 3))
        if mask is not None:
            scores[..., : mask.size(3)] += mask
        return torch.matmul(scores.softmax(-1), values)

    def _feed_forward(self, residual: Tensor, x: Tensor, weights: _FeedForward, visited: list[Tensor]) -> Tensor:
        """[B n, hidden]; `visited` gets the experts [B n, k]."""
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
            if weights.shared_gate is not None:  # a number a token: before the product or behind it
                inner = inner * F.linear(x, weights.shared_gate).sigmoid()
            residual = torch.addmm(residual, inner, weights.shared.down.t())
        order = chosen.flatten().argsort(stable=True)  # (token, expert) pairs, those of an expert together
        counts = chosen.flatten().bincount(minlength=experts.count).tolist()
        for expert, pairs in enumerate(order.split(counts)):  # type: ignore[no-untyped-call]
            if len(pairs):
                rows = pairs // experts.per_token
                answer = F.linear(_gated(x[rows], weights.gate_up[expert]), weights.down[expert])
                residual = residual.index_add(0, rows, answer * share.flatten()[pairs, None])
        return residual

    def _layer(self, index: int) -> _DecoderLayer:
        a, name = self._architecture, f"model.layers.{index}."
        attention, middle = name + "self_attn.", "pre_feedforward" if a.gemma else "post_attention"
        norm = self._empty(a.num_heads + a.num_kv_heads, a.head_dim) if a.qk_norm else None
        if norm is not None:  # one vector of the checkpoint is copied into the row of every head
            self.named[attention + "q_norm.weight"] = norm[: a.num_heads]
            self.named[attention + "k_norm.weight"] = norm[a.num_heads :]
        return _DecoderLayer(
            input_norm=self._new(name + "input_layernorm.weight", a.hidden_size),
            qkv=self._latent(attention, a.latent) if a.latent else self._qkv(attention, "weight", a.hidden_size),
            qkv_bias=self._qkv(attention, "bias") if a.qkv_bias else None,
            qk_norm=norm,
            out=self._new(attention + "o_proj.weight", a.hidden_size, a.num_heads * a.value_dim),
            middle_norm=self._new(f"{name}{middle}_layernorm.weight", a.hidden_size),
            post_norm=self._behind(name, 0),
            window=a.window_of(index),
            feed_forward=self._mixture(f"{name}{a.experts.module}.", a.experts)
            if a.experts and a.has_experts(index)
            else self._dense(name + "mlp.", a.ffn_size, self._behind(name, 1)),
        )

    def _behind(self, name: str, half: int) -> Tensor | None:
        a = self._architecture
        return self._new(f"{name}{a.post_norms[half]}_layernorm.weight", a.hidden_size) if a.post_norms else None

    def _qkv(self, name: str, what: str, *columns: int) -> Tensor:
        a = self._architecture
        rows = {"q": a.num_heads, "k": a.num_kv_heads, "v": a.num_kv_heads}
        return self._joined({f"{name}{part}_proj.{what}": n * a.head_dim for part, n in rows.items()}, *columns)

    def _latent(self, name: str, latent: Latent) -> _LatentHeads:
        a, low = self._architecture, latent.query_rank
        heads, hidden = a.num_heads, a.hidden_size
        rows = heads * a.head_dim
        query_up = self._new(name + f"q_{'b_' if low else ''}proj.weight", rows, low or hidden)
        return _LatentHeads(
            query_down=self._new(name + "q_a_proj.weight", low, hidden) if low else None,
            query_norm=self._new(name + "q_a_layernorm.weight", low) if low else None,
            query_up=query_up,
            down=self._new(name + "kv_a_proj_with_mqa.weight", latent.rank + latent.rope_dim, hidden),
            norm=self._new(name + "kv_a_layernorm.weight", latent.rank),
            up=self._new(name + "kv_b_proj.weight", heads * (latent.nope_dim + latent.value_dim), latent.rank),
        )

    def _dense(self, name: str, ffn: int, post_norm: Tensor | None = None) -> _FeedForward:
        hidden = self._architecture.hidden_size
        parts = {name + "gate_proj.weight": ffn, name + "up_proj.weight": ffn}
        if self._architecture.is_glm4:
            parts = {name + "gate_up_proj.weight": 2 * ffn}
        down = self._new(name + "down_proj.weight", hidden, ffn)
        return _FeedForward(self._joined(parts, hidden), down, post_norm=post_norm)

    def _mixture(self, name: str, experts: Experts) -> _FeedForward:
        a = self._architecture
        gate_up = self._empty(experts.count, 2 * experts.ffn_size, a.hidden_size)
        down = self._empty(experts.count, a.hidden_size, experts.ffn_size)
        for index in range(experts.count):
            own = zip(experts.projections, (*gate_up[index].chunk(2), down[index]), strict=True)
            self.named |= {f"{name}experts.{index}.{part}.weight": tensor for part, tensor in own}
        bias = torch.empty(experts.count, device=self._device) if experts.is_sigmoid else None
        if bias is not None:
            self.named[name + CORRECTION_BIAS] = bias
        router = self._new(name + "gate.weight", experts.count, a.hidden_size)
        theirs = name + experts.shared_module
        shared = self._dense(theirs + ".", experts.shared_ffn_size) if experts.shared_ffn_size else None
        shared_gate = self._new(theirs + "_gate.weight", 1, a.hidden_size) if experts.shared_gate else None
        return _FeedForward(gate_up, down, router, bias, shared, shared_gate)

    def _joined(self, parts: dict[str, int], *columns: int) -> Tensor:
        """One tensor of all rows; each name is a view of its rows."""
        whole = self._empty(sum(parts.values()), *columns)
        self.named |= zip(parts, whole.split(list(parts.values())), strict=True)  # type: ignore[no-untyped-call]
        return whole

    def _new(self, name: str, *shape: int) -> Tensor:
        self.named[name] = self._empty(*shape)
        return self.named[name]

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)


def _gated(x: Tensor, gate_up: Tensor, *, is_gelu: bool = False) -> Tensor:
    gate, up = F.linear(x, gate_up).chunk(2, -1)
    return (F.gelu(gate, approximate="tanh") if is_gelu else F.silu(gate)).mul_(up)


def _route(x: Tensor, router: Tensor, bias: Tensor | None, experts: Experts) -> tuple[Tensor, Tensor]:
    """Experts [n, k] that each token visits, and the shares [n, k] of their answers."""
    if bias is None:
        share, chosen = F.linear(x, router).softmax(-1, dtype=torch.float32).topk(experts.per_token)
    else:
        scores = F.linear(x.float(), router.float()).sigmoid()
        rated = scores + bias
        if experts.groups > 1:
            grouped = rated.view(len(x), experts.groups, -1)
            best = grouped.topk(2).values.sum(-1).topk(experts.groups_per_token).indices
            left = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(1, best, False)
            rated = grouped.masked_fill(left[..., None], -torch.inf).flatten(1)
        chosen = rated.topk(experts.per_token).indices
        share = scores.gather(1, chosen)
    if experts.normalize_weights:
        share = share / share.sum(-1, keepdim=True)
    return chosen, (share * experts.scale).to(x.dtype)
