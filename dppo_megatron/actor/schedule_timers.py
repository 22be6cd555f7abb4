"""Megatron's schedule on a timeline: each micro-batch's forward and backward pass, and what is sent between stages.

The schedules call `config.timers(name, log_level).start()` and `.stop()` where a timers object is set, which is
Megatron's own way to be timed. On a GPU both wait for the device, else they would time the launches of kernels: a
recorded step is slower than the others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from dppo_megatron.spans import Spans

_COMPUTE = {"forward-compute": "forward", "backward-compute": "backward"}


def schedule_timers(spans: Spans, device: torch.device) -> Callable[..., _Timer]:
    """What Megatron's configuration takes as `timers`, for one pass over a plan: a timer by its name.

    Example: two micro-batches on one stage give, on the track `micro-batches`, forward 0, backward 0, forward 1,
    backward 1.
    """
    timer = functools.cache(lambda name: _Timer(name, spans, device))
    return lambda name, log_level=None: timer(name)  # a start names its level, a stop does not


class _Timer:
    def __init__(self, name: str, spans: Spans, device: torch.device) -> None:
        self._name, self._spans, self._device = name, spans, device
        self._count, self._start = 0, 0.0

    def start(self, barrier: bool = False) -> None:
        """`barrier` is Megatron's wish to line the ranks up, which would change what is timed."""
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
