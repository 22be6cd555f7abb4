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

from dppo_megatron.weights.architecture import Architecture, Experts

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
    """SwiGLU, or as many as there are experts."""

    gate_up: Tensor
    """[2 F, hidden], with experts [E, 2 F, hidden]."""
    down: Tensor
    """[hidden, F], with experts [E, hidden, F]."""
    router: Tensor | None
    """[E, hidden]."""


@dataclass(frozen=True, slots=True)
class _DecoderLayer:
    input_norm: Tensor
    qkv: Tensor
    """[(H + 2 K) D, hidden]: queries, keys, values."""
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
    """[H + K, D]: the query norm for each query head, then the key norm for each key-value head."""
    out: Tensor
    post_norm: Tensor
    feed_forward: _FeedForward


class Decoder:
    """A model whose weights are those last copied into `named`. Weights, activations and cache are of one `dtype`."""

    def __init__(self, architecture: Architecture, *, dtype: torch.dtype, device: torch.device) -> None:
        a = architecture
        self._architecture, self._dtype, self._device = a, dtype, device
        self.named: dict[str, Tensor] = {}
        """The checkpoint's name of a tensor -> where its values go."""
        self._embedding = self._new("model.embed_tokens.weight", a.vocab_size, a.hidden_size)
        self._layers = [self._layer(f"model.layers.{index}.") for index in range(a.num_layers)]
        self._norm = self._new("model.norm.weight", a.hidden_size)
        self._output = (
            self._embedding if a.tied_embeddings else self._new("lm_head.weight", a.vocab_size, a.hidden_size)
        )
        self._frequencies, self._scale = torch.tensor(a.rope.frequencies, device=device), a.rope.scale
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
        eps, size = self._architecture.norm_eps, (self._architecture.hidden_size,)
        hidden = F.embedding(tokens.flatten(), self._embedding)  # [B n, hidden], as everywhere but in attention
        angles = positions.flatten()[:, None] * self._frequencies
        cos, sin = ((part * self._scale).to(self._dtype) for part in (angles.cos(), angles.sin()))
        rotary = torch.cat([cos, cos], -1)[:, None], torch.cat([-sin, sin], -1)[:, None]
        for index, layer in enumerate(self._layers):
            qkv = F.linear(F.rms_norm(hidden, size, layer.input_norm, eps), layer.qkv, layer.qkv_bias)
            attended = self._attend(index, qkv, rotary, batch, cache, mask)
            hidden = torch.addmm(hidden, attended, layer.out.t())
            hidden = self._feed_forward(hidden, F.rms_norm(hidden, size, layer.post_norm, eps), layer.feed_forward)
        cache.filled += count
        last = hidden.view(batch, count, -1)[:, -1]
        return F.linear(F.rms_norm(last, size, self._norm, eps), self._output)

    def _attend(
        self, index: int, qkv: Tensor, rotary: tuple[Tensor, Tensor], batch: int, cache: KeyValues, mask: Tensor | None
    ) -> Tensor:
        """[B n, H D], from queries, keys and values of the new tokens [B n, (H + 2 K) D]."""
        a, norm = self._architecture, self._layers[index].qk_norm
        heads, groups, size = a.num_heads, a.num_kv_heads, a.head_dim
        qkv = qkv.view(-1, heads + 2 * groups, size)
        turned = qkv[:, : heads + groups]
        if norm is not None:
            turned = F.rms_norm(turned, (size,), None, a.norm_eps) * norm
        cos, sin = rotary
        # (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin); the sine has the sign of its half
        turned = torch.addcmul(turned * cos, turned.roll(size // 2, -1), sin)
        queries, keys = turned[:, :heads], turned[:, heads:]
        count = len(qkv) // batch
        keys, values = cache.append(
            index,
            keys.view(batch, count, groups, size).transpose(1, 2),
            qkv[:, heads + groups :].view(batch, count, groups, size).transpose(1, 2),
        )
        if count == 1:  # the heads that share a key are its queries: nothing has to be repeated
            attended = self._one_token(queries.reshape(batch, groups, -1, size), keys, values, mask)
            return attended.reshape(batch, -1)
        queries = queries.view(batch, count, heads, size).transpose(1, 2)
        keys, values = (part.repeat_interleave(heads // groups, dim=1) for part in (keys, values))
        attended = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        return attended.transpose(1, 2).reshape(batch * count, -1)

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

    def _feed_forward(self, residual: Tensor, x: Tensor, weights: _FeedForward) -> Tensor:
        experts = self._architecture.experts
        if weights.router is None or experts is None:
            return torch.addmm(residual, _gated(x, weights.gate_up), weights.down.t())
        chosen, share = _route(x, weights.router, experts)
        order = chosen.flatten().argsort(stable=True)  # (token, expert) pairs, those of an expert together
        counts = chosen.flatten().bincount(minlength=experts.count).tolist()
        for expert, pairs in enumerate(order.split(counts)):  # type: ignore[no-untyped-call]
            if len(pairs):
                rows = pairs // experts.per_token
                answer = F.linear(_gated(x[rows], weights.gate_up[expert]), weights.down[expert])
                residual = residual.index_add(0, rows, answer * share.flatten()[pairs, None])
        return residual

    def _layer(self, name: str) -> _DecoderLayer:
        a = self._architecture
        sizes = {"q": a.num_heads * a.head_dim, "k": a.num_kv_heads * a.head_dim, "v": a.num_kv_heads * a.head_dim}
        attention = name + "self_attn."
        norm = self._empty(a.num_heads + a.num_kv_heads, a.head_dim) if a.qk_norm else None
        if norm is not None:  # one vector of the checkpoint is copied into the row of every head
            self.named[attention + "q_norm.weight"] = norm[: a.num_heads]
            self.named[attention + "k_norm.weight"] = norm[a.num_heads :]
        return _DecoderLayer(
            input_norm=self._new(name + "input_layernorm.weight", a.hidden_size),
            qkv=self._joined({f"{attention}{part}_proj.weight": size for part, size in sizes.items()}, a.hidden_size),
            qkv_bias=self._joined({f"{attention}{part}_proj.bias": size for part, size in sizes.items()})
            if a.qkv_bias
            else None,
            qk_norm=norm,
            out=self._new(attention + "o_proj.weight", a.hidden_size, sizes["q"]),
            post_norm=self._new(name + "post_attention_layernorm.weight", a.hidden_size),
            feed_forward=self._new_feed_forward(name + "mlp."),
        )

    def _new_feed_forward(self, name: str) -> _FeedForward:
        a, experts = self._architecture, self._architecture.experts
        if experts is None:
            parts = {name + "gate_proj.weight": a.ffn_size, name + "up_proj.weight": a.ffn_size}
            down = self._new(name + "down_proj.weight", a.hidden_size, a.ffn_size)
            return _FeedForward(self._joined(parts, a.hidden_size), down, None)
        gate_up = self._empty(experts.count, 2 * experts.ffn_size, a.hidden_size)
        down = self._empty(experts.count, a.hidden_size, experts.ffn_size)
        for index in range(experts.count):
            gate, up = gate_up[index].chunk(2)
            own = f"{name}experts.{index}."
            self.named |= {own + "gate_proj.weight": gate, own + "up_proj.weight": up}
            self.named[own + "down_proj.weight"] = down[index]
        return _FeedForward(gate_up, down, self._new(name + "gate.weight", experts.count, a.hidden_size))

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


def _gated(x: Tensor, gate_up: Tensor) -> Tensor:
    gate, up = F.linear(x, gate_up).chunk(2, -1)
    return F.silu(gate).mul_(up)


def _route(x: Tensor, router: Tensor, experts: Experts) -> tuple[Tensor, Tensor]:
    """Experts [n, k] that each token visits, and the shares [n, k] of their answers."""
    share, chosen = F.linear(x, router).softmax(-1, dtype=torch.float32).topk(experts.per_token)
    if experts.normalize_weights:
        share = share / share.sum(-1, keepdim=True)
    return chosen, share.to(x.dtype)
