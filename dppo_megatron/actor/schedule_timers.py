"""Megatron's schedule on a timeline: each micro-batch's forward and backward pass, and what is sent between stages.

The schedules call `config.timers(name, log_level).start()` and `.stop()` where a timers object is set, which is
Megatron's own way to be timed. On a GPU both wait for the device, else they would time the launches of kernels: a
recorded step is slower than the others.
"""

from __future__ import annotations

import torch

from dppo_megatron.spans import Spans

_COMPUTE = {"forward-compute": "forward", "backward-compute": "backward"}


class ScheduleTimers:
    """What Megatron's configuration takes as `timers`, for one pass over a plan.

    Example: two micro-batches on one stage give, on the track `micro-batches`, forward 0, backward 0, forward 1,
    backward 1.
    """

    def __init__(self, spans: Spans, device: torch.device) -> None:
        self._spans, self._device = spans, device
        self._timers: dict[str, _Timer] = {}

    def __call__(self, name: str, log_level: int | None = None) -> _Timer:
        if name not in self._timers:
            self._timers[name] = _Timer(name, self._spans, self._device)
        return self._timers[name]


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
