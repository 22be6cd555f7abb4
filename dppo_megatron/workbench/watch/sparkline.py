"""Numbers as characters: curves one line high, and bars of shares. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

BLOCKS = "▁▂▃▄▅▆▇█"
PLAIN = "_.-~=+*#"
"""For a terminal that cannot show blocks."""


def sparkline(values: Sequence[float | None], width: int, levels: str = BLOCKS) -> str:
    """A curve of at most `width` characters, each the mean of its part of `values`; a gap where a part has none.

    Example: [0, 1, 2, 3] at width 2 -> means 0.5 and 2.5, lowest and highest: "▁█".
    """
    parts = [_mean(part) for part in _split(values, width)]
    present = [one for one in parts if one is not None]
    if not present:
        return ""
    low, high = min(present), max(present)
    span = high - low if high > low else 1.0
    top = len(levels) - 1
    return "".join(" " if one is None else levels[round((one - low) / span * top)] for one in parts)


def widths(shares: Sequence[float], total: int) -> list[int]:
    """Characters of a bar of `total` for each of the shares, the largest remainders rounded up.

    Example: shares [1, 1, 2] over 10 -> [3, 2, 5].
    """
    whole = sum(shares)
    if whole <= 0:
        return [0] * len(shares)
    exact = [total * share / whole for share in shares]
    rounded = [int(one) for one in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: (rounded[i] - exact[i], i))
    for i in by_remainder[: total - sum(rounded)]:
        rounded[i] += 1
    return rounded


def _split(values: Sequence[float | None], count: int) -> list[Sequence[float | None]]:
    if len(values) <= count:
        return [values[i : i + 1] for i in range(len(values))]
    ends = [round(i * len(values) / count) for i in range(count + 1)]
    return [values[a:b] for a, b in pairwise(ends)]


def _mean(values: Sequence[float | None]) -> float | None:
    present = [one for one in values if one is not None]
    return sum(present) / len(present) if present else None
