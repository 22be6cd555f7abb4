"""Routing replay (docs/actor.md): makes the routers of a mixture of experts choose recorded experts. Their weights are
computed from the current router logits, so the gradient is that of the policy with these experts.

    samples  [tokens, layers, k] uint8       Megatron's TopKRouter
       '-- pack order, this rank's tokens ------> get_replay_topk: router weights of the forced experts
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
from torch import Tensor

from dppo_megatron.actor.batch import Microbatch, Samples
from dppo_megatron.actor.layout import Layout, to_device
from dppo_megatron.weights.architecture import Architecture

Recorded: TypeAlias = Mapping[int, Sequence[Tensor]]
"""The experts chosen in one pass over a plan, to replay in another pass over it: model chunk -> for each micro-batch
[this rank's tokens, the chunk's layers, k], on the host."""
Forward: TypeAlias = Callable[[Microbatch, int], AbstractContextManager[None]]
"""(micro-batch, index of the model chunk) -> the context in which its forward pass runs."""


@dataclass
class _Replay:
    """Replaces Megatron's RouterReplay in a TopKRouter: that one has global lists and loses track of the micro-batch
    when activations are recomputed."""

    is_recomputed: bool
    """The backward pass runs the router again."""
    chosen: Tensor | None = None
    """[tokens, k] the experts of the last call."""
    _forced: Tensor | None = None
    _is_forward: bool = False
    _recomputed: deque[Tensor | None] = field(default_factory=deque)

    def begin(self, forced: Tensor | None) -> None:
        """Start the forward pass of a micro-batch with these experts; None: the router chooses."""
        self._forced, self._is_forward = forced, True
        # kept only if needed: in Qwen3-30B-A3B that is 384 bytes per token until the end of the pass
        if self.is_recomputed and torch.is_grad_enabled():
            self._recomputed.append(forced)

    def end(self) -> None:
        self._forced, self._is_forward = None, False

    def forget(self) -> None:
        """Drop what was kept for backward passes, when none will follow."""
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
        """scores [tokens, E] -> ([tokens, k], [tokens, k]); Megatron's name and arguments (RouterReplay, 0.16.1). Calls
        outside a forward pass come from a backward pass that recomputes, in the order of the forward passes."""
        forced = self._forced if self._is_forward else self._recomputed.popleft()
        if forced is None:
            values, chosen = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        else:
            chosen = forced.to(torch.int64)
            values = scores.gather(1, chosen)
        self.chosen = chosen
        return values, chosen


class Routers:
    """The routers of this rank's model chunks; empty without `replays`."""

    def __init__(
        self, chunks: Sequence[torch.nn.Module], architecture: Architecture, layout: Layout, *, replays: bool
    ) -> None:
        self._choices, self._layout = architecture.expert_choices, layout
        self._of_chunk: list[dict[int, _Replay]] = [{} for _ in chunks]
        for chunk, by_layer in zip(chunks, self._of_chunk, strict=True):
            for module in chunk.modules() if replays else ():
                if isinstance(module, TopKRouter):
                    how, parts = module.config.recompute_granularity, module.config.recompute_modules
                    is_recomputed = how == "full" or (how == "selective" and "moe" in parts)
                    by_layer[module.layer_number - 1] = module.router_replay = _Replay(is_recomputed)

    def _from_samples(self, samples: Samples, pack: Microbatch, chunk: int) -> Tensor | None:
        """The experts in a pack's samples, [this rank's tokens, the chunk's layers, k]; None if a sample has none."""
        sample_experts = [samples[member].experts for member in pack.samples]
        layers, choices, slots = self._of_chunk[chunk], self._choices, pack.packed.slots
        if choices is None or not sample_experts or not layers or any(one is None for one in sample_experts):
            return None
        positions = self._layout.context.indices(slots)  # in ascending order
        if self._layout.sequence_parallel:  # then a router sees only its rank's share of the tokens
            positions = positions.chunk(self._layout.tensor_parallel)[parallel_state.get_tensor_model_parallel_rank()]
        own = positions.numpy()
        # padding tokens go to all experts in turn, so that no expert gets all of them
        spread = (own[:, None] + np.arange(choices.per_token)) % choices.count
        forced = np.repeat(spread.astype(choices.dtype)[:, None], len(layers), 1)
        stage = slice(min(layers), max(layers) + 1)  # contiguous: only the first layers of a model have no experts
        for start, experts in zip(slots, sample_experts, strict=False):
            assert experts is not None
            first, end = np.searchsorted(own, (start, start + len(experts)))
            forced[first:end] = experts[own[first:end] - start, stage]
        if choices.dtype == "uint16":  # torch supports few operations on uint16
            forced = forced.view(np.int16)
        return to_device(torch.from_numpy(forced), self._layout.device)

    @contextmanager
    def replaying(
        self, samples: Samples, routes: Recorded | None = None, recorded: dict[int, list[Tensor]] | None = None
    ) -> Iterator[Forward]:
        """Around a pass over a plan: yields the function that makes each forward pass's context. `routes`: the experts
        that another pass recorded; None: those in the samples, if they have any. `recorded` receives those used."""
        routes_left = {chunk: iter(parts) for chunk, parts in (routes or {}).items()}

        @contextmanager
        def forward(pack: Microbatch, chunk: int) -> Iterator[None]:
            parts = routes_left.get(chunk)
            forced = to_device(next(parts), self._layout.device) if parts else self._from_samples(samples, pack, chunk)
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
                small = self._choices is not None and self._choices.dtype == "uint8"
                recorded.setdefault(chunk, []).append(torch.stack(chosen, 1).to(torch.uint8 if small else torch.int16))

        try:
            yield forward
        finally:
            for routers in self._of_chunk:
                for router in routers.values():
                    router.forget()
