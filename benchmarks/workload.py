"""What benchmarks share: the spread of repeated measurements, the machine, the JSON file. Shapes, random weights and
samples are those with which `accept` and `doctor` measure a user's machine (`dppo_megatron.workbench`).
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dppo_megatron.types import TrainSample


def trained_tokens(samples: Sequence[TrainSample]) -> int:
    """Tokens that carry loss."""
    return sum(sample.num_completion_tokens for sample in samples)


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and range of repeated measurements."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Median and range of at least one value."""
        return cls(float(np.median(values)), float(min(values)), float(max(values)))

    def as_dict(self) -> dict[str, float]:
        """For JSON."""
        return {"median": self.median, "low": self.low, "high": self.high}

    def text(self, digits: int) -> str:
        """`median (low .. high)`."""
        return f"{self.median:.{digits}f} ({self.low:.{digits}f} .. {self.high:.{digits}f})"


def environment() -> dict[str, Any]:
    """Versions and machine, for the JSON of every benchmark."""
    versions = {"python": platform.python_version()}
    for name in ("dppo_megatron", "torch", "megatron-core", "transformers", "numpy", "transformer-engine"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    machine: dict[str, Any] = {"platform": platform.platform(), "processor": _processor(), "cpus": os.cpu_count()}
    if torch.cuda.is_available():
        machine["gpu"] = torch.cuda.get_device_name()
        machine["gpu_memory_gib"] = round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1)
    return {"versions": versions, "machine": machine}


def write_json(path: Path | None, result: dict[str, Any]) -> None:
    """Write one JSON object with every figure and the environment, unless `path` is None."""
    if path is not None:
        path.write_text(json.dumps(result | environment(), indent=1) + "\n", encoding="utf-8")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(": ", 1)[1] for line in lines if line.startswith("model name")), platform.machine())
