"""Runs Megatron's pipeline schedule over the packs of a plan and records it on a timeline: each micro-batch's forward
and backward pass, and the communication between stages."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import tee
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from dppo_megatron.actor.batch import Microbatch
from dppo_megatron.actor.layout import Layout
from dppo_megatron.spans import Spans, recorder
from dppo_megatron.types import PackPlan

Forward = Callable[[Iterator[Microbatch], torch.nn.Module], tuple[torch.Tensor, Callable[..., Any]]]
"""Runs the next micro-batch through a model chunk; returns the output and the function that computes its loss."""
_COMPUTE = {"forward-compute": "forward", "backward-compute": "backward"}


def run_schedule(
    forward: Forward,
    packs: Iterator[Microbatch],
    model: Sequence[Any],
    plan: PackPlan,
    layout: Layout,
    *,
    forward_only: bool,
) -> None:
    """Forward and backward passes over `packs` (those of this replica in `plan`) through the chunks of `model`.
    Collective over the replica."""
    config, interleaved = model[0].config, len(model) > 1
    config.timers = _timers(recorder(), layout.device) if recorder().on else None
    share = layout.context.size * (layout.tensor_parallel if layout.sequence_parallel else 1)
    own_packs = plan.microbatches[layout.data_parallel_rank]
    with _shapes_known([(pack.num_tokens // share, 1, config.hidden_size) for pack in own_packs]):
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=list(tee(packs, len(model))) if interleaved else packs,
            model=list(model) if interleaved else model[0],
            num_microbatches=plan.num_microbatches,
            # only the interleaved schedule reads it: all its packs have this length
            seq_length=plan.microbatches[0][0].num_tokens,
            micro_batch_size=1,
            forward_only=forward_only,
        )


@contextmanager
def _shapes_known(shapes: Sequence[tuple[int, int, int]]) -> Iterator[None]:
    """Let pipeline stages take the shapes of received tensors from the plan: packs arrive in its order both ways. Where
    lengths vary, Megatron sends each shape first, and the receiver's host waits for its device to finish its work."""
    forward, backward = iter(shapes), iter(shapes)

    def planned(_self: Any, _to_next: Any, _to_previous: Any, recv_prev: bool, recv_next: bool) -> tuple[Any, Any]:
        return next(forward) if recv_prev else None, next(backward) if recv_next else None

    original, P2PCommunicator._communicate_shapes = P2PCommunicator._communicate_shapes, planned
    try:
        yield
    finally:
        P2PCommunicator._communicate_shapes = original


def _timers(spans: Spans, device: torch.device) -> Callable[..., _Timer]:
    """`timers` of Megatron's configuration for one pass over a plan: returns the timer of a name. On a GPU its `start`
    and `stop` wait for the device, because kernel launches alone would be timed otherwise. Example: two micro-batches
    on one stage give, on the track `micro-batches`, forward 0, backward 0, forward 1, backward 1."""
    timer = functools.cache(lambda name: _Timer(name, spans, device))
    return lambda name, log_level=None: timer(name)  # Megatron passes log_level to start a timer, not to stop it


class _Timer:
    def __init__(self, name: str, spans: Spans, device: torch.device) -> None:
        self._name, self._spans, self._device = name, spans, device
        self._count, self._start = 0, 0.0

    def start(self, barrier: bool = False) -> None:
        """`barrier` is ignored: aligning the ranks would change what is timed."""
        self._start = self._now()

    def stop(self, barrier: bool = False) -> None:
        compute = _COMPUTE.get(self._name)
        track, name = ("micro-batches", f"{compute} {self._count}") if compute else ("pipeline", self._name)
        self._spans.add(track, name, self._start, self._now())
        self._count += 1

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return self._spans.clock()
