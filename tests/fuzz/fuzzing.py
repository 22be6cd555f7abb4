"""How many cases a fuzzer tries: few in the suite, any number by `DPPO_FUZZ=100000 python -m pytest tests/fuzz`."""

from __future__ import annotations

import os


def fuzz_cases(default: int) -> int:
    """The number in the environment, or what the suite has time for."""
    return int(os.environ.get("DPPO_FUZZ", default))
