"""One selection of a step from those of its optimizer mini-batches, which are drawn independently of each other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from dppo_megatron.pruning.interface import LedgerRow, Selection
from dppo_megatron.pruning.labels import worst
from dppo_megatron.types import IntArray


def merge(parts: list[Selection], order: IntArray) -> Selection:
    """One selection; `order` puts the concatenated rows of `parts` into place.

    Figures are means over the mini-batches. Ledger rows of one name become one, with the worst label.
    """
    if len(parts) == 1:
        return parts[0]
    return Selection(
        kept=np.concatenate([part.kept for part in parts])[order],
        inclusion_prob=np.concatenate([part.inclusion_prob for part in parts])[order],
        weight=np.concatenate([part.weight for part in parts])[order],
        planned_prob=np.concatenate([part.planned for part in parts])[order],
        ledger=_merge_rows([(row, len(part.kept)) for part in parts for row in part.ledger]),
        metrics={
            name: float(np.mean([part.metrics[name] for part in parts if name in part.metrics]))
            for name in dict.fromkeys(name for part in parts for name in part.metrics)
        },
        kept_cost=_mean([part.kept_cost for part in parts if part.kept_cost is not None]),
        effect=next((part.effect for part in parts if part.effect is not None), None),
    )


def _mean(values: list[float]) -> float | None:
    return float(np.mean(values)) if values else None


def with_refills(planned: Selection, refills: list[Selection]) -> Selection:
    """All rows of a step; ledger and figures stay those of `planned`, the first round."""
    if not refills:
        return planned
    return replace(
        planned,
        kept=np.concatenate([planned.kept, *(s.kept for s in refills)]),
        inclusion_prob=np.concatenate([planned.inclusion_prob, *(s.inclusion_prob for s in refills)]),
        weight=np.concatenate([planned.weight, *(s.weight for s in refills)]),
        planned_prob=np.concatenate([planned.planned, *(s.planned for s in refills)]),
    )


def is_reweighted(selection: Selection) -> bool:
    """Whether chance or a factor had a part in it: not where each row is certain, or certainly out, with weight 1."""
    by_chance = (selection.inclusion_prob > 0) & (selection.inclusion_prob < 1)
    return bool(by_chance.any() or (selection.weight[selection.kept] != 1.0).any())


def _merge_rows(rows: list[tuple[LedgerRow, int]]) -> tuple[LedgerRow, ...]:
    """One row a name, from rows and how many elements each was about."""
    merged = []
    for name in dict.fromkeys(row.name for row, _ in rows):
        mine = [(row, count) for row, count in rows if row.name == name]
        offered = sum(count for _, count in mine)
        kept = sum(row.kept_fraction * count for row, count in mine) / offered if offered else 1.0
        notes = "; ".join(dict.fromkeys(row.note for row, _ in mine if row.note))
        merged.append(LedgerRow(name, kept, worst(row.label for row, _ in mine), notes))
    return tuple(merged)
