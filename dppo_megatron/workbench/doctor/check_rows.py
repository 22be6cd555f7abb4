"""What a check of a cluster finds: a row each, and how the rows of all ranks become one report.

A rank knows only itself. That a card, a link or a node is slow shows beside the others, so speeds travel as numbers
and rank 0 judges them; there is no list of what each machine should reach.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

Verdict = Literal["ok", "warning", "fault"]
_BY_WEIGHT: tuple[Verdict, ...] = ("ok", "warning", "fault")
_SLOW = 0.5
"""Of the others' median: a link that fell back to a slower path is slower by a factor, others by a few per cent."""
_NAMED = 3


@dataclass(frozen=True, slots=True)
class CheckRow:
    """One finding, of one rank or of the whole job."""

    what: str
    verdict: Verdict
    said: str
    """What was found; for a warning or a fault also what would be right."""
    gb_s: float | None = None
    """A speed; rank 0 compares it with the other ranks'."""
    ranks: str = ""
    """Whose it is, in the job's report; empty: everybody's."""


def report_of(found: Mapping[int, Sequence[CheckRow]], hosts: Mapping[int, str]) -> Iterator[CheckRow]:
    """For each thing that was looked at, every kind of the worst trouble with it; where all are well, one of them. Of a
    speed the slowest.

    Args:
        found: rows by rank.
    """
    for what in dict.fromkeys(row.what for rows in found.values() for row in rows):
        own = {rank: row for rank, rows in found.items() for row in rows if row.what == what}
        worst = max((row.verdict for row in own.values()), key=_BY_WEIGHT.index)
        speeds = {rank: row.gb_s for rank, row in own.items() if row.gb_s is not None}
        if worst == "ok" and speeds:
            slowest, middle = min(speeds, key=lambda rank: speeds[rank]), statistics.median(speeds.values())
            row = replace(own[slowest], ranks=f"slowest: {_named([slowest], hosts)}" if len(speeds) > 1 else "")
            said = f"{row.said}; less than half of the ranks' median, {middle:.3g} GB/s"
            yield replace(row, verdict="warning", said=said) if speeds[slowest] < _SLOW * middle else row
        elif worst == "ok":
            yield next(iter(own.values()))
        else:
            for said in dict.fromkeys(row.said for row in own.values() if row.verdict == worst):
                ranks = [rank for rank, row in own.items() if row.said == said]
                yield CheckRow(what, worst, said, None, _named(ranks, hosts) if len(ranks) < len(found) else "")


def _named(ranks: Sequence[int], hosts: Mapping[int, str]) -> str:
    said = ", ".join(f"rank {rank} on {hosts[rank]}" for rank in ranks[:_NAMED])
    return f"{said} and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else said
