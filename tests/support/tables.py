"""Tables of the documentation, as tests make them from the code."""

from __future__ import annotations

from collections.abc import Iterable


def merged_rows(rows: Iterable[tuple[str, str]]) -> list[str]:
    """Rows `| names | rest |`: the names of equal rests in one row, in the order in which they first appear.

    Example: [("a", "1"), ("b", "2"), ("c", "1")] -> ["| a, c | 1 |", "| b | 2 |"].
    """
    names: dict[str, list[str]] = {}
    for name, rest in rows:
        names.setdefault(rest, []).append(name)
    return [f"| {', '.join(of)} | {rest} |" for rest, of in names.items()]
