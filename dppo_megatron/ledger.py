"""Rows of the bias ledger for selections outside the pruning policies: what data and servers leave out."""

from __future__ import annotations

from dppo_megatron.config.rollout import RolloutConfig
from dppo_megatron.job import Job
from dppo_megatron.pruning import LedgerRow


def overlong_row(job: Job) -> tuple[LedgerRow, ...]:
    """Problems that are never trained on because their prompts are too long; nothing if there are none."""
    filtered, kept = sum(one.filtered for one in job.train_sets.values()), len(job.train_prompts)
    if not filtered:
        return ()
    note = f"{filtered} problems have prompts above max_prompt_tokens and are left out of the training data"
    return (LedgerRow("data/overlong_prompts", kept / (kept + filtered), "biased", note),)


def straggler_row(config: RolloutConfig, cut: float, total: int) -> tuple[LedgerRow, ...]:
    """The row of `limits.straggler_share`, wherever servers may cut: that none was cut so far is an outcome."""
    if config.engine == "hf" or config.limits.straggler_share >= 1:
        return ()
    note = f"{cut:.0f} completions were cut off by rollout.limits.straggler_share and count as truncated"
    return (LedgerRow("rollout/stragglers", 1.0 - cut / max(total, 1), "biased", note),)
