"""How many cases a fuzzer runs: few in the suite, as many as one likes by hand."""

from __future__ import annotations

import os


def fuzz_cases(default: int) -> int:
    """`default`, or what DPPO_FUZZ says (DPPO_FUZZ=100000 pytest tests/fuzz)."""
    return int(os.environ.get("DPPO_FUZZ", default))
