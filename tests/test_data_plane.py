"""Every part of benchmarks/data_plane.py in small: it runs, and the bars that are counts hold."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
PARTS = sorted(
    {path.stem for path in (BENCHMARKS / "plane").glob("*.py")} - {"__init__", "common", "canned", "clients"}
)


@pytest.fixture(scope="module")
def said() -> str:
    """What the command prints for all parts, in one process: each imports torch and the package otherwise."""
    environment = os.environ | {"PYTHONPATH": str(BENCHMARKS.parent), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(BENCHMARKS / "data_plane.py"), "all", "--smoke"]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert answer.returncode == 0, answer.stdout + answer.stderr[-3000:]
    return answer.stdout


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_part(said: str, part: str) -> None:
    """Times depend on the machine and are not judged here."""
    assert f"\n{part} " in f"\n{said}"
