"""Returns to the machine what the C library holds free, or a rank's resident memory creeps for days.

What lives for a step and what stays are allocated in turn, and leave holes: the heap in use is 171 MB for as long as
one looks, and the resident memory around it went from 350 to 434 MB between two trims. Right after a trim it is within
3 MB of what it was two hours before.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

EVERY_S = 60.0
"""A trim of 270 MB takes 14 ms; after each step it would be 5 % of the quickstart's."""


class FreedMemory:
    """Of this process. glibc's only: other C libraries have no such call, and nothing happens."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._returned_at = clock, clock()
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)

    def return_if_due(self) -> bool:
        """Whether it was returned: at most once in `EVERY_S`."""
        if self._trim is None or self._clock() < self._returned_at + EVERY_S:
            return False
        self._trim(0)
        self._returned_at = self._clock()
        return True
