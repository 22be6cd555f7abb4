"""How many cases a fuzzer tries."""

from __future__ import annotations

import os


def fuzz_cases(default: int) -> int:
    return int(os.environ.get("DPPO_FUZZ", default))
