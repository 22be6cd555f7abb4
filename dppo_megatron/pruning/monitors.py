"""Metrics that show within a step whether pruning is unbiased: `prune/*`, never NaN (docs/pruning.md)."""

from __future__ import annotations

import numpy as np

from dppo_megatron.pruning.interface import CompletionBatch, LedgerRow, Selection


def step_metrics(prompts: Selection, batch: CompletionBatch, completions: Selection) -> dict[str, float]:
    """Of the nominal prompts, and of the batch that was offered to the completion policy."""
    weight = batch.prompt_weight * completions.weight
    sums = np.bincount(batch.group, weights=weight * batch.advantages)
    return {
        **_of_level("prompt", prompts),
        **_of_level("completion", completions),
        **_tokens(batch, completions),
        "prune/weight_max": float(np.max(weight[completions.kept], initial=0.0)),
        **_totals(batch, completions),
        # max over groups of |sum_i W_i A_i|: how far the draw moved a group's weighted sum of advantages from 0
        "prune/group_imbalance": float(np.abs(sums).max(initial=0.0)),
    }


def _of_level(level: str, selection: Selection) -> dict[str, float]:
    kept, expected = float(selection.kept.sum()), float(selection.inclusion_prob.sum())
    figures = dict(selection.metrics)
    if selection.kept_cost is not None:
        figures["kept_cost"] = selection.kept_cost
    if (effect := selection.effect) is not None:
        figures |= {"predicted_effect": effect.predicted, "realised_effect": effect.realised}
        figures |= {"realised_error": effect.error, "uniform_effect": effect.uniform}
    return {f"prune/{level}_{name}": value for name, value in figures.items()} | {
        f"prune/{level}s_offered": float(len(selection.kept)),
        f"prune/{level}s_kept": kept,
        f"prune/{level}s_kept_over_expected": kept / expected if expected > 0 else 1.0,
    }


def biased_rows(ledger: tuple[LedgerRow, ...]) -> list[str]:
    """One warning line for each selection that changes the expected gradient."""
    return [f"{row.name} is biased: {row.note or 'no weight corrects it'}" for row in ledger if row.label == "biased"]


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
    """sum W / (N G) and sum W len / T, each near 1. T is weighted by prompt: lengths of pruned prompts are unknown. So
    an error in these weights, or in what makes up for missing or stopped completions, cancels there."""
    completion_weight = selection.weight
    if all(row.label != "biased" for row in selection.ledger):
        # Completions dropped for having no gradient have weight 0, but count towards these totals.
        completion_weight = np.where(selection.inclusion_prob > 0, completion_weight, 1.0)
    weights = batch.prompt_weight * completion_weight
    tokens = float(np.sum(batch.prompt_weight * batch.lengths))
    return {
        "prune/weight_total": float(weights.sum()) / batch.num_nominal if batch.num_nominal else 1.0,
        "prune/weight_total_tokens": float(np.sum(weights * batch.lengths)) / tokens if tokens > 0 else 1.0,
    }
