"""Experts chosen elsewhere, forced on the routers of a mixture of experts.

Engine and actor round differently, so about one router in ten sends a token to another expert at one end than at the
other, and log-probabilities of the same weights differ. Replayed, the choice is the engine's (or that of the actor's
own first pass) and the shares of the chosen experts are computed from the actor's present logits, so their gradient
is that of the policy with these experts.

    samples  [tokens, layers, k] uint8       Megatron's TopKRouter
       '-- pack order, this rank's tokens ------> get_replay_topk: shares of the forced experts
    a pass that records <------------------------ or its own choice
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from dppo_megatron.actor.batch import Microbatch, Samples
from dppo_megatron.actor.layout import Layout, to_device
from dppo_megatron.weights.architecture import Architecture

Recorded: TypeAlias = Mapping[int, Sequence[Tensor]]
"""Model chunk -> for each micro-batch [this rank's tokens, the chunk's layers, k] on the host: of a pass over one plan,
to be replayed in another pass over it."""
Forward: TypeAlias = Callable[[Microbatch, int], AbstractContextManager[None]]
"""The forward pass of a micro-batch through one of the model chunks."""


@dataclass
class _Replay:
    """Stands where a TopKRouter looks for Megatron's own RouterReplay, whose lists are global and lose track of the
    micro-batch where activations are recomputed."""

    is_recomputed: bool
    """The backward pass runs the router again."""
    chosen: Tensor | None = None
    """Of the last call: [tokens, k]."""
    _forced: Tensor | None = None
    _is_forward: bool = False
    _recomputed: deque[Tensor | None] = field(default_factory=deque)

    def begin(self, forced: Tensor | None) -> None:
        """A forward pass over a micro-batch; None: the router chooses."""
        self._forced, self._is_forward = forced, True
        if self.is_recomputed and torch.is_grad_enabled():  # else 384 bytes a token of Qwen3-30B-A3B to the pass's end
            self._recomputed.append(forced)

    def end(self) -> None:
        self._forced, self._is_forward = None, False

    def forget(self) -> None:
        """No backward pass is to come for what has been run."""
        self._recomputed.clear()
        self.chosen = None

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] = torch.topk,
    ) -> tuple[Tensor, Tensor]:
        """scores [tokens, E] -> ([tokens, k], [tokens, k]); Megatron's name and arguments (RouterReplay, 0.16.1).

        Called outside of a forward pass, it is a backward pass that recomputes; micro-batches are run backward in the
        order in which they were run forward, so it is the oldest.
        """
        forced = self._forced if self._is_forward else self._recomputed.popleft()
        if forced is None:
            values, chosen = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        else:
            chosen = forced.to(torch.int64)
            values = scores.gather(1, chosen)
        self.chosen = chosen
        return values, chosen


def _is_recomputed(config: TransformerConfig) -> bool:
    """Whether routers run again in the backward pass."""
    return config.recompute_granularity == "full" or (
        config.recompute_granularity == "selective" and "moe" in config.recompute_modules
    )


class Routers:
    """The routers of this rank's model chunks; none unless it `replays`."""

    def __init__(
        self, chunks: Sequence[torch.nn.Module], architecture: Architecture, layout: Layout, *, replays: bool
    ) -> None:
        self._choices, self._layout = architecture.expert_choices, layout
        self._of_chunk: list[dict[int, _Replay]] = []
        for chunk in chunks:
            found: dict[int, _Replay] = {}
            for module in chunk.modules():
                if replays and isinstance(module, TopKRouter):
                    found[module.layer_number - 1] = module.router_replay = _Replay(_is_recomputed(module.config))
            self._of_chunk.append(found)

    def _carried(self, samples: Samples, pack: Microbatch, chunk: int) -> Tensor | None:
        """[this rank's tokens, the chunk's layers, k] that the samples of a pack carry; None if one has none."""
        held = [samples[member].experts for member in pack.samples]
        layers, choices, slots = self._of_chunk[chunk], self._choices, pack.packed.slots
        if choices is None or not held or not layers or any(one is None for one in held):
            return None
        positions = self._layout.context.indices(slots)  # in ascending order
        if self._layout.sequence_parallel:  # routers see the tokens that their rank holds between the layers
            positions = positions.chunk(self._layout.tensor_parallel)[parallel_state.get_tensor_model_parallel_rank()]
        own = positions.numpy()
        # padding goes to all experts in turn, each token to different ones
        spread = (own[:, None] + np.arange(choices.per_token)) % choices.count
        forced = np.repeat(spread.astype(choices.dtype)[:, None], len(layers), 1)
        stage = slice(min(layers), max(layers) + 1)  # without a gap: only the first layers of a model have no experts
        for start, experts in zip(slots, held, strict=False):
            assert experts is not None
            first, end = np.searchsorted(own, (start, start + len(experts)))
            forced[first:end] = experts[own[first:end] - start, stage]
        if choices.dtype == "uint16":  # with which torch computes little
            forced = forced.view(np.int16)
        return to_device(torch.from_numpy(forced), self._layout.device)

    @contextmanager
    def replaying(
        self, samples: Samples, routes: Recorded | None = None, recorded: dict[int, list[Tensor]] | None = None
    ) -> Iterator[Forward]:
        """For the length of a pass over a plan: what each forward pass runs in.

        Args:
            routes: recorded by another pass over the plan; None: those that the samples carry, if they do.
            recorded: takes the experts that this pass goes through.
        """
        given = {chunk: iter(parts) for chunk, parts in (routes or {}).items()}

        @contextmanager
        def forward(pack: Microbatch, chunk: int) -> Iterator[None]:
            own = to_device(next(given[chunk]), self._layout.device) if chunk in given else None
            forced = self._carried(samples, pack, chunk) if own is None else own
            routers = list(self._of_chunk[chunk].values())
            for index, router in enumerate(routers):
                router.begin(None if forced is None else forced[:, index])
            try:
                yield
            finally:
                for router in routers:
                    router.end()
            if recorded is not None and routers:
                chosen: Any = [router.chosen for router in routers]
                few = self._choices is not None and self._choices.dtype == "uint8"
                recorded.setdefault(chunk, []).append(torch.stack(chosen, 1).to(torch.uint8 if few else torch.int16))

        try:
            yield forward
        finally:
            for routers in self._of_chunk:
                for router in routers.values():
                    router.forget()
