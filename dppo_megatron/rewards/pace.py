"""At most so many gradings in a minute: for a judge that refuses, or bills, what comes faster."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable


class Pace:
    """Allows at most `per_minute` in any 60 s, evenly: after a pause at most a second's share at once, since judges
    measure over seconds too.

    Args:
        per_minute: 0: no limit.
        clock: seconds.
    """

    def __init__(self, per_minute: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits, self._clock = per_minute > 0, clock
        self._burst = max(1, int(per_minute / 60))
        # so many at once and then one every so often: in any minute `per_minute` in all
        self._every_s = 60 / (per_minute - self._burst + 1) if self._limits else 0.0
        self._whole_at_s = clock()
        """When a whole second's share is free again."""

    def free(self) -> int:
        """How many may begin now."""
        if not self._limits:
            return sys.maxsize
        taken_s = max(0.0, self._whole_at_s - self._clock())
        return int(self._burst - taken_s / self._every_s + 1e-9)

    def take(self, count: int) -> None:
        """So many begin, at most as many as are free."""
        if self._limits:
            self._whole_at_s = max(self._whole_at_s, self._clock()) + count * self._every_s
