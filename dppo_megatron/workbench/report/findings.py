"""Warnings about a run, with their steps. They are derived from the metrics, because log lines are not recorded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby

from dppo_megatron.pruning.interface import percent
from dppo_megatron.workbench.runs.run_record import RunRecord, finite_number

_MISMATCH_ALARM = 0.05
"""Used if the run's settings are missing: mean |log-probability difference| to the engine."""
_ERRORS = 3.0
"""A difference of more standard errors than this is not chance."""


@dataclass(frozen=True, slots=True)
class Finding:
    level: str
    """bad, warning or note."""
    text: str
    steps: str
    """Such as `3` or `3-7, 12`; empty: the whole run."""


def findings(run: RunRecord) -> list[Finding]:
    """All warnings about a run, the worst first."""
    found = [Finding("warning", note, "") for note in run.notes]
    if run.status == "crashed":
        found.append(Finding("bad", "the trainer ended without releasing its lock", _spans(run.steps[-1:])))
    for row in run.ledger:
        biased = [step for step, label in zip(run.steps, row["label"], strict=True) if label == "biased"]
        if biased:
            notes = f": {'; '.join(row['notes'])}" if row["notes"] else ""
            known = [bias for bias in row["bias"] if bias is not None]
            size = f" (bias {percent(sum(known) / len(known))})" if known else ""
            text = f"{row['name']} changes the expected gradient{size}{notes}"
            found.append(Finding("warning", text, _spans(biased)))
    alarm = finite_number(run.setting("rollout.limits.logprob_diff_warning", None))
    alarm = _MISMATCH_ALARM if alarm is None else alarm
    differs = f"engine and actor differ by > {alarm:g}"
    # above a reward of 0.8 there is little left to explore: the quickstart ends like that
    stopped = "entropy below 0.01, at a mean reward below 0.8: the policy has almost stopped exploring"
    rules: list[tuple[str, str, Callable[..., bool], str]] = [
        ("bad", "train/skipped_updates", lambda v: v > 0, "an update was skipped: loss or gradient was not finite"),
        ("warning", "observe/tracker_failures", lambda v: v > 0, "a tracker has missed steps or failed"),
        ("warning", "reward/failed_count", lambda v: v > 0, "gradings failed"),
        ("warning", "mismatch/logprob_abs_diff_mean", lambda v: v > alarm, differs),
        ("warning", "kept/mismatch/logprob_abs_diff_mean", lambda v: v > alarm, differs),
        ("warning", "rollout/truncated_share", lambda v: v > 0.5, "more than half of the completions were truncated"),
        ("note", "train/entropy, reward/mean", lambda v, mean: v < 0.01 and mean < 0.8, stopped),
        # a step has at least one micro-batch, any part of which may be free
        ("note", "pack/fill, pack/microbatches", lambda v, n: v < 0.5 and n > 1, "micro-batches are not half full"),
    ]
    for level, keys, is_odd, text in rules:
        values = zip(run.steps, *(run.columns.get(key, []) for key in keys.split(", ")), strict=False)
        steps = [step for step, *known in values if None not in known and step and is_odd(*known)]
        if steps:
            found.append(Finding(level, f"{text} ({keys})", _spans(steps)))
    found += _untrained(run) + _skipping(run)
    return sorted(found, key=lambda one: ("bad", "warning", "note").index(one.level))


def _untrained(run: RunRecord) -> list[Finding]:
    """A note on steps that trained on nothing, but where nearly all answers were right, as at the quickstart's end."""
    columns = [run.columns.get(key, [None] * len(run.steps)) for key in ("prune/completions_trained", "reward/mean")]
    rows = zip(run.steps, *columns, strict=True)
    steps = [step for step, trained, mean in rows if step and trained == 0 and (mean is None or mean < 0.8)]
    return [Finding("note", "nothing was trained on (prune/completions_trained)", _spans(steps))] if steps else []


def _skipping(run: RunRecord) -> list[Finding]:
    """A note if the last steps' variance exceeded the prediction beyond chance: what a rate costs is then unknown."""
    names = ("predicted_effect", "realised_effect", "realised_error")
    columns = [run.columns.get(f"prune/prompt_{name}", []) for name in names]
    known = [row for row in zip(*columns, strict=False) if None not in row]
    predicted, realised, error = known[-1] if known else (1.0, 1.0, 1.0)
    if realised - predicted <= _ERRORS * error:
        return []
    text = f"skipping prompts had {realised:.2f} times the variance, {predicted:.2f} was predicted"
    return [Finding("note", f"{text}: bound it by pruning.prompt.max_design_effect, or lower the rate", "")]


def _spans(steps: list[int]) -> str:
    """Example: [3, 4, 5, 9] -> `3-5, 9`."""
    spans = []
    for _, members in groupby(enumerate(steps), key=lambda item: item[1] - item[0]):
        run = [step for _, step in members]
        spans.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return ", ".join(spans[:12]) + (f" and {len(spans) - 12} more spans" if len(spans) > 12 else "")
