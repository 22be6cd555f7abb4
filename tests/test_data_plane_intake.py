"""The benchmark's parts of taking in completions, in small: they run, everything arrives, and the counts hold."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.job import REPOSITORY


@pytest.mark.slow
def test_the_parts_run() -> None:
    """Bars that depend on the machine are printed and not judged."""
    command = [sys.executable, str(REPOSITORY / "benchmarks" / "data_plane.py"), "intake", "gil", "grade", "--smoke"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.count("share that arrived") == 2
