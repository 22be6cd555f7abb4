"""Figures that show within a step whether pruning is unbiased, as `prune/*` metrics without NaN.

Two of them must stay near 1 whatever the method keeps: the weights' sum over the nominal count, and the same by
tokens. A weight forgotten, applied twice, or a divisor taken from the survivors moves them at once, long before a
learning curve would.
"""

from __future__ import annotations

import numpy as np

from dppo_megatron.pruning.interface import CompletionBatch, LedgerRow, Selection


def step_metrics(prompts: Selection, batch: CompletionBatch, completions: Selection) -> dict[str, float]:
    """All figures of one optimizer mini-batch.

    Args:
        prompts: the selection of its nominal prompts.
        batch: its completions as offered to the completion policy.
        completions: what that policy kept.
    """
    ledger = prompts.ledger + completions.ledger
    return {
        **_figures("prompt", prompts),
        **_figures("completion", completions),
        **_counts("prompts", prompts),
        **_counts("completions", completions),
        **_tokens(batch, completions),
        "prune/weight_max": float(np.max((batch.prompt_weight * completions.weight)[completions.kept], initial=0.0)),
        **_totals(batch, completions),
        "prune/group_imbalance": group_imbalance(batch, completions),
        "prune/biased_selections": float(sum(row.label == "biased" for row in ledger)),
        "prune/ratio_selections": float(sum(row.label == "ratio" for row in ledger)),
    }


def _figures(level: str, selection: Selection) -> dict[str, float]:
    figures = dict(selection.metrics)
    if selection.kept_cost is not None:
        figures["kept_cost"] = selection.kept_cost
    if (effect := selection.effect) is not None:
        figures |= {
            "predicted_effect": effect.predicted,
            "realised_effect": effect.realised,
            "realised_error": effect.error,
            "uniform_effect": effect.uniform,
        }
    return {f"prune/{level}_{name}": value for name, value in figures.items()}


def group_imbalance(batch: CompletionBatch, selection: Selection) -> float:
    """max over groups of |sum_i W_i A_i|: how far a draw moved a group's baseline off its zero."""
    if len(batch) == 0:
        return 0.0
    product = batch.prompt_weight * selection.weight * batch.advantages
    return float(np.abs(np.bincount(batch.group, weights=product)).max())


def biased_rows(ledger: tuple[LedgerRow, ...]) -> list[str]:
    """One warning line for each selection that changes the expected gradient."""
    return [f"{row.name} is biased: {row.note or 'no weight corrects it'}" for row in ledger if row.label == "biased"]


def _counts(level: str, selection: Selection) -> dict[str, float]:
    kept, expected = float(selection.kept.sum()), float(selection.inclusion_prob.sum())
    return {
        f"prune/{level}_offered": float(len(selection.kept)),
        f"prune/{level}_kept": kept,
        f"prune/{level}_kept_over_expected": kept / expected if expected > 0 else 1.0,
    }


def _tokens(batch: CompletionBatch, selection: Selection) -> dict[str, float]:
    offered, kept = float(batch.lengths.sum()), float(batch.lengths[selection.kept].sum())
    expected = float(np.sum(selection.inclusion_prob * batch.lengths))
    return {
        "prune/tokens_offered": offered,
        "prune/tokens_kept": kept,
        "prune/tokens_kept_share": kept / offered if offered > 0 else 1.0,
        "prune/tokens_kept_over_expected": kept / expected if expected > 0 else 1.0,
    }


def _totals(batch: CompletionBatch, selection: Selection) -> dict[str, float]:
    """sum W / (N G) and sum W len / T, each near 1; T is prompt-weighted: pruned prompts have no length."""
    stage = selection.weight
    if all(row.label != "biased" for row in selection.ledger):
        # What was dropped for having no gradient needs no weight, but counts towards these totals.
        stage = np.where(selection.inclusion_prob > 0, stage, 1.0)
    weights = batch.prompt_weight * stage
    tokens = float(np.sum(batch.prompt_weight * batch.lengths))
    return {
        "prune/weight_total": float(weights.sum()) / batch.num_nominal if batch.num_nominal else 1.0,
        "prune/weight_total_tokens": float(np.sum(weights * batch.lengths)) / tokens if tokens > 0 else 1.0,
    }
