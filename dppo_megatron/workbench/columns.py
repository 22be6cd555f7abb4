"""Tables of text."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """A line for each row, all of as many cells: the first `left` columns begin at one place, the others end at one."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = zip(row, widths, strict=True)
        placed = [cell.ljust(width) if at < left else cell.rjust(width) for at, (cell, width) in enumerate(cells)]
        lines.append("  ".join(placed).rstrip())
    return lines
