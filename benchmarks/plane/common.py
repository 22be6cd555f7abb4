"""What the parts of the data-plane benchmark share: bars, CPU clocks, and jobs of several ranks."""

from __future__ import annotations

import multiprocessing
import os
import resource
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

NO_ROLLOUTS: Any = object()
"""The clients of a fleet whose servers only take weights."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One figure with its upper or lower limit."""

    part: str
    name: str
    value: float
    limit: float
    unit: str = ""
    at_least: bool = False
    is_time: bool = False
    """The figure depends on the machine."""

    @property
    def holds(self) -> bool:
        """Whether the bar is met."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit


def table(bars: list[Bar]) -> str:
    """The bars as lines to print."""
    sign = {True: ">=", False: "<="}
    return "\n".join(
        f"{bar.part:<9} {bar.name:<58} {bar.value:>10.4g} {bar.unit:<10} {sign[bar.at_least]} {bar.limit:<8g}"
        f" {'' if bar.holds else 'MISSED'}".rstrip()
        for bar in bars
    )


def cpu_s() -> float:
    """CPU seconds of this process so far, all threads, in user and kernel."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def on_ranks(world_size: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """`work(*arguments)` on every rank of a gloo job; the results by rank."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_rank, args=(rank, world_size, folder, work, arguments))
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            raise RuntimeError("a rank of the benchmark has failed; its traceback is above")
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(world_size)]


def _rank(rank: int, world_size: int, folder: str, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    code = 1
    try:
        store = dist.FileStore(f"{folder}/store", world_size)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        torch.save(work(*arguments), Path(folder) / f"{rank}.pt")
        dist.barrier()
        code = 0
    except BaseException:
        traceback.print_exc()
    os._exit(code)
