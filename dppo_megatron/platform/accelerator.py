"""The facade that replaces `torch.cuda` inside megatron-core on a machine without CUDA.

Only rewritten megatron-core modules see this object (hook.py puts its name into them); `torch.cuda` itself is not
changed. The facade defines a name only if it can give the true answer for a CPU, where work is synchronous and there
are one device and one random generator. Every other name falls through to the real `torch.cuda`, which raises its own
error instead of returning an invented number.
"""

from __future__ import annotations

import contextlib
import importlib
from collections import defaultdict
from types import ModuleType
from typing import Any

import torch

CPU = torch.device("cpu")


def _nothing(self: object, *args: Any, **kwargs: Any) -> None:
    """Does nothing: work is synchronous, on one device, so there is nothing to wait for, to switch or to free."""


def _no_context(self: object, *args: Any, **kwargs: Any) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


class CpuEvent:
    """A point in the program. Work is synchronous, so an event has been reached as soon as it is recorded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    record = wait = synchronize = _nothing


class CpuStream:
    """A queue of work. There is only one, the program's own order: waiting for it is free and all streams are equal."""

    device = CPU

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    wait_stream = wait_event = synchronize = _nothing

    def record_event(self, event: CpuEvent | None = None) -> CpuEvent:
        """A recorded event, new unless one is given."""
        return event or CpuEvent()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CpuStream)

    def __hash__(self) -> int:
        return hash(CpuStream)


class Accelerator:
    """What `torch.cuda` means in a rewritten module."""

    Stream = CpuStream
    Event = CpuEvent
    default_generators: dict[Any, torch.Generator] = defaultdict(lambda: torch.default_generator)
    """Indexed by whatever `current_device` returns."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    @property
    def random(self) -> Accelerator:
        """`torch.cuda.random`: its functions are those of `torch.cuda`."""
        return self

    # ---- the one device

    def current_device(self) -> torch.device:
        """A device, not an index: megatron-core passes the result to `device=`, where torch takes 0 for a GPU."""
        return CPU

    def device_count(self) -> int:
        return 1

    set_device = synchronize = empty_cache = _nothing
    device = _no_context

    def is_current_stream_capturing(self) -> bool:
        """False: there are no graphs. A CUDA build of torch raises here on a machine without a driver."""
        return False

    # ---- the one stream

    def current_stream(self, device: Any = None) -> CpuStream:
        """The program's own order of work."""
        return CpuStream()

    default_stream = current_stream
    stream = _no_context

    # ---- the one generator: the CPU's, which serves as both the host's and the device's

    def manual_seed(self, seed: int) -> None:
        """Seed the CPU generator, which dropout draws from here."""
        torch.default_generator.manual_seed(seed)

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, new_state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(new_state)

    _lazy_init = _nothing

    def _lazy_call(self, callback: Any, **kwargs: Any) -> None:
        callback()

    # ---- called by rewritten expressions

    def to_device(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        """For `x.cuda(...)` and `x.pin_memory(...)`: tensors and modules are returned unchanged."""
        if isinstance(target, (torch.Tensor, torch.nn.Module)):
            return target
        return target.cuda(*args, **kwargs)

    def is_device(self, target: Any) -> Any:
        """For `x.is_cuda`: whether a tensor is on the device of the computation, which is the CPU."""
        return target.device.type == "cpu" if isinstance(target, torch.Tensor) else target.is_cuda

    def type_of(self, target: Any) -> Any:
        """For `x.type()`: megatron-core compares the result with names such as 'torch.cuda.FloatTensor'."""
        name = target.type()
        return name.replace("torch.", "torch.cuda.", 1) if isinstance(target, torch.Tensor) else name

    def import_from(self, module: str, name: str) -> Any:
        """For `from torch.cuda... import name`: the facade's attribute, else the real one, else ImportError."""
        if hasattr(type(self), name):
            return getattr(self, name)
        owner: ModuleType = importlib.import_module(module)
        try:
            return getattr(owner, name)
        except AttributeError:
            raise ImportError(f"cannot import name {name!r} from {module!r}") from None


ACCELERATOR = Accelerator()
