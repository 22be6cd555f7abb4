"""Bias-ledger rows for selections that happen outside the pruning policies: in the data and on the servers."""

from __future__ import annotations

from dppo_megatron.config.rollout import RolloutConfig
from dppo_megatron.job import Job
from dppo_megatron.pruning import LedgerRow


def overlong_row(job: Job) -> tuple[LedgerRow, ...]:
    """The row for problems left out because their prompts are too long; empty if there are none."""
    filtered, kept = sum(one.filtered for one in job.train_sets.values()), len(job.train_prompts)
    if not filtered:
        return ()
    note = f"{filtered} problems have prompts above max_prompt_tokens and are left out of the training data"
    return (LedgerRow("data/overlong_prompts", kept / (kept + filtered), "biased", note),)


def straggler_row(config: RolloutConfig, cut: float, total: int) -> tuple[LedgerRow, ...]:
    """The row of `limits.straggler_share`, in every step in which servers may cut, whether or not they did.

    A label must not depend on the outcome.
    """
    if config.engine == "hf" or config.limits.straggler_share >= 1:
        return ()
    note = f"{cut:.0f} completions were cut off by rollout.limits.straggler_share and count as truncated"
    return (LedgerRow("rollout/stragglers", 1.0 - cut / max(total, 1), "biased", note),)


def aborted_row(config: RolloutConfig) -> tuple[LedgerRow, ...]:
    """The row of `sync.in_flight=abort`, in every step that a weight sync may have met while it was generated."""
    if config.engine == "hf" or not config.async_steps or config.sync.in_flight != "abort":
        return ()
    note = "completions that a weight sync interrupts are sampled again, so those that end early are more likely"
    return (LedgerRow("rollout/aborted", 1.0, "biased", note),)
