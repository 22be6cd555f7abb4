"""Proof that a server holds the weights it was sent: a digest per tensor, and what a canary completion scores.

Digests show what the engine's parameters are; the canary shows what it computes with. Both are needed: vLLM on a CPU
multiplies with a packed copy of a weight, which can be old while the parameter is new. Engines join tensors (queries,
keys and values to one), so the actor's are joined the same way before they are hashed.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dppo_megatron.types import GuardStop

_JOINED = (
    (re.compile(r"(.*self_attn\.)([qkv])_proj\.(weight|bias)"), r"\1qkv_proj.\3", 3),
    (re.compile(r"(.*mlp\.)(gate|up)_proj\.(weight)"), r"\1gate_up_proj.\3", 2),
)
_PER_TOKEN = ("model.embed_tokens.weight", "lm_head.weight")
_VOCABULARY_MULTIPLE = 64
"""Engines pad the vocabulary to this with rows of zeros."""
_EMPTY = hashlib.sha256().hexdigest()


class Digests:
    """SHA-256 of a stream of tensors, by the engine's joined names; holds the parts of one joined tensor at a time."""

    def __init__(self) -> None:
        self._parts: dict[str, list[Tensor]] = {}
        self.found: dict[str, tuple[str, ...]] = {}
        """The digests that are right for each name."""

    def watch(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        """The same stream, hashed on its way."""
        for name, tensor in tensors:
            yield name, tensor
            self._add(name, tensor)

    def _add(self, name: str, tensor: Tensor) -> None:
        for pattern, joined, count in _JOINED:
            if pattern.fullmatch(name):
                key = pattern.sub(joined, name)
                parts = self._parts.setdefault(key, [])
                parts.append(tensor.detach().cpu().clone())
                if len(parts) == count:  # the actor streams them in the order in which engines join them
                    self.found[key] = (digest(torch.cat(self._parts.pop(key))),)
                return
        self.found[name] = (digest(tensor),)
        if name in _PER_TOKEN:
            padding = tensor.new_zeros(-tensor.shape[0] % _VOCABULARY_MULTIPLE, *tensor.shape[1:])
            self.found[name] += (digest(torch.cat([tensor, padding])),)


def digest(tensor: Tensor) -> str:
    """SHA-256 of a tensor's bytes."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest()


def differing(sent: dict[str, tuple[str, ...]], held: dict[str, str]) -> tuple[list[str], int]:
    """Names whose digests differ, and how many could be compared.

    What the engine does not show under one of our names is left out: packed weights have no bytes to hash,
    fused experts have others. An engine may show the first digits only.
    """
    shared = [name for name in sent if not _EMPTY.startswith(held.get(name, ""))]
    return [name for name in shared if not any(right.startswith(held[name]) for right in sent[name])], len(shared)


def canary_difference(
    servers: Sequence[str],
    behaviour: Sequence[npt.NDArray[np.floating[Any]]],
    scored: Sequence[npt.NDArray[np.floating[Any]]],
    bound: float,
) -> float:
    """The largest mean |log-probability difference| of a server's canary completions.

    Args:
        servers: which server gave each completion.
        behaviour: its log-probabilities [n_i] there.
        scored: the same tokens' under the actor.

    Raises:
        GuardStop: a server is above `bound`: it computes with other weights than the actor.
    """
    worst = 0.0
    for server in dict.fromkeys(servers):
        differences = [
            np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64))
            for name, a, b in zip(servers, behaviour, scored, strict=True)
            if name == server
        ]
        mean = float(np.concatenate(differences).mean())
        if not mean <= bound:
            raise GuardStop(
                f"{server} scores a canary completion {mean:.3g} a token away from the actor, more than"
                f" rollout.sync.max_canary_logprob_diff = {bound:g}: it computes with other weights or another model."
                " vLLM on a CPU with tied embeddings needs this project's worker extension (docs/engines.md)"
            )
        worst = max(worst, mean)
    return worst
