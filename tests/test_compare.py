"""What `compare` says about runs, against independent computations; no run is made here."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from scipy.ndimage import uniform_filter1d
from support.job import REPOSITORY, settings, write_job_files

from dppo_megatron.children import package_environment
from dppo_megatron.config import Config, load_config
from dppo_megatron.config.load import read_config
from dppo_megatron.config.pruning import EarlyStopConfig
from dppo_megatron.config.selection import selection_settings
from dppo_megatron.types import RunAborted, UserError
from dppo_megatron.workbench.compare.arms import MethodRun, Point, parse_arms, read_method_run
from dppo_megatron.workbench.compare.runs import check_end, in_a_process, run_all, shared_task, task_settings
from dppo_megatron.workbench.compare.table import results, table, write_page
from dppo_megatron.workbench.compare.verdict import (
    Curve,
    Interval,
    cost_to,
    judge,
    median_over_seeds,
    moving_mean,
)
from dppo_megatron.workbench.quickstart.make import Recipe, read_recipe, write_quickstart

CONFIG = str(REPOSITORY / "configs" / "quickstart.yaml")
shares = st.floats(0, 1, allow_nan=False)


@hypothesis.settings(deadline=None)
@given(st.lists(shares, min_size=1, max_size=30))
def test_moving_mean_is_a_box_filter_inside(values: list[float]) -> None:
    """scipy's box filter; at the two ends the mean of the two values that there are."""
    mean = moving_mean(np.array(values))
    expected = uniform_filter1d(np.array(values), 3)
    assert mean[1:-1] == pytest.approx(expected[1:-1])
    if len(values) > 1:
        assert mean[0] == pytest.approx((values[0] + values[1]) / 2)
        assert mean[-1] == pytest.approx((values[-1] + values[-2]) / 2)
    else:
        assert mean == pytest.approx(values)


@hypothesis.settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0.01, 10), shares), min_size=2, max_size=20), shares)
def test_cost_to_a_level_is_the_first_crossing(steps: list[tuple[float, float]], level: float) -> None:
    """On the curve (numpy's interpolation) the level stands at that cost, and before it on a fine grid nowhere."""
    cost = np.cumsum([0.0, *(step for step, _ in steps[1:])])
    curve = Curve(cost, np.array([value for _, value in steps]))
    found = cost_to(curve, level)
    if np.isinf(found):
        assert curve.accuracy.max() < level
        return
    if found == 0:
        assert curve.accuracy[0] >= level
        return
    assert np.interp(found, cost, curve.accuracy) == pytest.approx(level)
    before = np.linspace(0, found, 500, endpoint=False)
    assert (np.interp(before, cost, curve.accuracy) < level + 1e-9).all()


@pytest.mark.parametrize("values", [[1.0], [1.0, 2.0, 4.0], [2.1, 1.9, 3.0, 2.5, 0.0]])
def test_the_interval_over_seeds_is_the_bootstrap_s(values: list[float]) -> None:
    """All n^n resamples, enumerated: each end has 2.5 % beyond it, up to the resampling's own error (0.5 % at 10,000
    draws is over three standard errors)."""
    interval = median_over_seeds(values)
    medians = np.array([np.median(drawn) for drawn in itertools.product(values, repeat=len(values))])
    assert interval.median == np.median(values)
    assert (medians < interval.low).mean() <= 0.03 and (medians <= interval.low).mean() >= 0.02
    assert (medians > interval.high).mean() <= 0.03 and (medians >= interval.high).mean() >= 0.02


def test_the_interval_over_many_seeds_is_scipy_s() -> None:
    values = np.random.default_rng(0).normal(2.0, 0.3, 40)
    theirs = stats.bootstrap((values,), np.median, method="percentile", rng=1).confidence_interval
    ours = median_over_seeds(values.tolist())
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=0.03)


def _config(**values: Any) -> Config:
    config = Config()
    config.rollout.prompts_per_step, config.steps, config.eval.every_steps = 32, 64, 4
    return config


def test_arms_see_equally_many_prompts() -> None:
    arms = {arm.name: arm for arm in parse_arms("grpo,grpo@16,grpo@64,grpo_nonzero,dppo@16", _config(), 1.5)}
    assert {name: arm.steps for name, arm in arms.items()} == {
        "grpo": 64, "grpo@16": 128, "grpo@64": 32, "grpo_nonzero": 64, "dppo@16": 192,
    }  # fmt: skip
    assert {"eval.every_steps=8", "rollout.prompts_per_step=16"} <= set(arms["grpo@16"].settings)
    assert "pruning.prompt.method=none" in arms["grpo_nonzero"].settings


def test_a_baseline_has_no_pruning_of_the_job() -> None:
    """Of a job that stops completions early, and prunes only in the middle of a run: else GRPO would be another method,
    or train on what has no gradient."""
    given = ["early_stop.after_tokens=8", "completion.warmup_steps=3", "completion.anneal_fraction=0.5"]
    given += ["prompt.group_size_factor=2"]
    pruning = {}
    for arm in parse_arms("grpo,grpo_nonzero", _config(), 1.5):
        config = read_config(CONFIG, [*(f"pruning.{one}" for one in given), *arm.settings])
        pruning[arm.name] = config.pruning
        assert config.pruning.early_stop == EarlyStopConfig() and selection_settings(config).group_size_factor == 1
    assert (pruning["grpo"].prompt.method, pruning["grpo"].completion.method) == ("none", "none")
    kept = pruning["grpo_nonzero"].completion
    assert (kept.method, kept.warmup_steps, kept.anneal_fraction) == ("dppo", 0, 1.0)


@pytest.mark.parametrize("names", ["", "grpo,grpo", "grop", "grpo@0", "grpo@x", "grpo@-1", "dppo@", "grpo_nonzero@1.5"])
def test_arms_that_are_none(names: str) -> None:
    if names == "dppo@":
        with pytest.raises(UserError, match="after @ comes the number of prompts"):
            parse_arms(names, _config(), 1.0)
        return
    with pytest.raises(UserError, match="--methods"):
        parse_arms(names, _config(), 1.0)


def _run(arm: str, seed: int, rate: float, seconds_per_step: float, end: float = 0.8, points: int = 17) -> MethodRun:
    """A run that rises from 0.3 towards `end` as 1 - exp(-rate t), without noise."""
    curve = [
        Point(4 * i, 0.3 + (end - 0.3) * (1 - math.exp(-rate * i)), 4 * i * seconds_per_step,
              2 * i * seconds_per_step, 100 * i, 50 * i)
        for i in range(points)
    ]  # fmt: skip
    solved: dict[str, list[float | None]] = {"held": [*(float(i < 100 * end) for i in range(100)), None]}
    return MethodRun(arm, seed, curve, {"prompts": "exact"}, solved, {"step": 1.0, "rollout": 0.4, "update": 0.5})


def test_the_factor_is_what_was_built_in() -> None:
    """The same learning at half the seconds a step is 2x at every level, whatever the smoothing; the end is the same
    on every problem, so the difference is 0 with no interval around it."""
    arms = parse_arms("grpo,dppo", _config(), 1.0)
    runs = [_run("grpo", s, 0.2, 1.0 + s) for s in range(3)] + [_run("dppo", s, 0.2, 0.5 * (1 + s)) for s in range(3)]
    verdict = judge(runs, arms)
    assert (verdict.baseline, verdict.gain_from) == ("grpo", "grpo")
    base, dppo = verdict.arms
    for clock in ("train_s", "train_cpu_s"):
        for share in ("0.9", "0.95"):
            assert base.by_seed[clock][share] == pytest.approx([1.0] * 3)
            assert dppo.by_seed[clock][share] == pytest.approx([2.0] * 3)
    assert dppo.end_difference is not None and dppo.end_difference.within_noise
    assert (dppo.end_difference.low, dppo.end_difference.high) == (0.0, 0.0)
    curve = Curve.of(runs[0], "train_s").smoothed()
    assert dppo.at_budget_cpu["0.50"] == pytest.approx(curve.accuracy[-1])


def _noisy(arm: str, seed: int, evaluations: int, step_s: float, noise: float, rng: np.random.Generator) -> MethodRun:
    """As the quickstart's runs: 40 to 85 %, 78 % after 20 steps, evaluated every 4 with this much noise."""
    steps = 4 * np.arange(evaluations)
    accuracy = 0.4 + 0.45 * (1 - np.exp(-steps / 12)) + rng.normal(0, noise, evaluations)
    curve = [Point(int(t), float(a), t * step_s, t * step_s, 100, 50) for t, a in zip(steps, accuracy, strict=True)]
    return MethodRun(arm, seed, curve, {"prompts": "unbiased"}, {}, {})


def _noisy_factors(seeds: int, true: float, noise: float, trials: int) -> dict[str, list[Interval]]:
    """Of `dppo` with twice the evaluations and this true factor, which is the ratio of the seconds a step at any level:
    both are on one curve."""
    found, rng, arms = (
        dict[str, list[Interval]](),
        np.random.default_rng(seeds),
        parse_arms("grpo,dppo", _config(), 1.0),
    )
    for _ in range(trials):
        runs = [_noisy("grpo", seed, 11, 1.26, noise, rng) for seed in range(seeds)]
        runs += [_noisy("dppo", seed, 21, 1.26 / true, noise, rng) for seed in range(seeds)]
        for share, factor in judge(runs, arms).arms[1].factors["train_cpu_s"].items():
            assert factor is not None
            found.setdefault(share, []).append(factor)
    return found


@pytest.mark.parametrize("seeds", [1, 3])
def test_the_interval_of_a_factor_holds_the_truth(seeds: int) -> None:
    """Of 120 comparisons with 3 points of noise, what the quickstart's evaluations show at a constant rate: the true
    factor is in at least 89 %, three standard errors below the nominal 95. It is no wider than it must be: 7 of 10
    factors of 2.8 are told from 1."""
    for share, found in _noisy_factors(seeds, 2.8, 0.03, 120).items():
        held = np.mean([one.low <= 2.8 <= one.high for one in found])
        told = np.mean([not one.is_noise for one in found])
        assert held >= 0.89 and told >= 0.7, (share, held, told)


@pytest.mark.parametrize(("true", "noise"), [(1.0, 0.03), (1.2, 0.05)])
def test_a_factor_whose_error_is_larger_than_its_effect_is_not_printed(true: float, noise: float) -> None:
    """No effect at all, or one that is lost in the noise: shown in no more than a tenth of 60 comparisons."""
    for share, found in _noisy_factors(1, true, noise, 60).items():
        assert np.mean([one.median > 0 and not one.is_noise for one in found]) <= 0.1, share


def test_what_is_not_printed_is_told_below() -> None:
    """A dash in the table, its interval in a line of its own; results.json has the figure all the same."""
    rng, arms = np.random.default_rng(0), parse_arms("grpo,dppo", _config(), 1.0)
    runs = [_noisy("grpo", 0, 11, 1.0, 0.05, rng), _noisy("dppo", 0, 21, 1.0, 0.05, rng)]
    verdict = judge(runs, arms)
    text, factors = table(verdict), verdict.arms[1].factors["train_cpu_s"]
    noise = [share for share, factor in factors.items() if factor is not None and factor.is_noise]
    assert noise
    for share in noise:
        assert f"dppo to {float(share):.0%}, CPU s: {factors[share].times()}" in text  # type: ignore[union-attr]
    row = next(line for line in text.splitlines() if line.startswith("dppo"))
    assert row.count(" - ") >= 2 * len(noise)


def test_what_the_job_does_under_every_method_is_no_method_s_bias() -> None:
    """Problems that are left out, stale completions, an objective's own filter: as in `simulate`."""
    of_the_job = "data/overlong_prompts", "data/order", "rollout/stale", "rollout/missing", "completion/overlong_filter"
    rows = dict.fromkeys(of_the_job, "biased")
    own = {"grpo": {}, "dppo": {"prompt/dppo": "unbiased"}, "cppo": {"completion/cppo": "biased"}}
    runs = [replace(_run(arm, 0, 0.2, 1.0), labels=rows | more, variance=1.25) for arm, more in own.items()]
    lines = table(judge(runs, parse_arms(",".join(own), _config(), 1.0))).splitlines()
    assert lines[-1] == "Methods that change the expected gradient: cppo."
    assert lines[-2].endswith("realised: grpo 1.25, dppo 1.25.")
    lines = table(judge(runs[:2], parse_arms("grpo,dppo", _config(), 1.0))).splitlines()
    assert lines[-1] == "Methods that change the expected gradient: none."


@pytest.mark.parametrize("points", [2, 3])
def test_few_evaluations_show_no_noise_and_give_no_factor(points: int) -> None:
    """Nor is the untrained model a part of the end; the reason is that of the evaluations, not of the baseline."""
    arms = parse_arms("grpo,dppo", _config(), 1.0)
    runs = [_run("grpo", 0, 2.0, 1.0, points=points), _run("dppo", 0, 2.0, 0.5, points=points)]
    verdict = judge(runs, arms)
    assert all(one is None for one in verdict.arms[1].factors["train_cpu_s"].values())
    ends = [point.accuracy for point in runs[0].curve[1:]]
    assert verdict.arms[0].end == pytest.approx(sum(ends) / len(ends))
    assert verdict.gain == pytest.approx(verdict.arms[0].end - runs[0].curve[0].accuracy)
    assert "1 of 1 seeds are in no factor: a run has fewer than 4 evaluations" in table(verdict)


@pytest.mark.parametrize(("busy", "flagged"), [(1.0, False), (1.25, False), (1.4, True), (0.5, True)])
def test_a_clock_that_ran_unlike_the_cpu_is_flagged(busy: float, flagged: bool) -> None:
    """Another job on the machine while one method ran."""
    slow = _run("dppo", 0, 0.2, 0.5)
    slow = replace(slow, curve=[replace(point, train_s=busy * point.train_s) for point in slow.curve])
    text = table(judge([_run("grpo", 0, 0.2, 1.0), slow], parse_arms("grpo,dppo", _config(), 1.0)))
    assert ("The clock is not to be used" in text) == flagged
    header = next(line for line in text.splitlines() if line.startswith("method"))
    assert header.index("CPU s") < header.index("RL s") and header.index("to 90%: CPU s") < header.index("to 90%: s")


def test_ends_that_differ_as_seeds_do_are_within_noise() -> None:
    """An arm ends 30 points above on one seed and 10 below on the other: problems alone would call it a difference."""
    arms = parse_arms("grpo,dppo", _config(), 1.0)
    runs = [_run("grpo", seed, 0.2, 1.0, end=0.6) for seed in (0, 1)]
    runs += [_run("dppo", 0, 0.2, 1.0, end=0.9), _run("dppo", 1, 0.2, 1.0, end=0.5)]
    found = judge(runs, arms).arms[1].end_difference
    assert found is not None and found.difference == pytest.approx(0.1)
    assert found.within_noise and found.problems == 200


def test_the_baseline_is_the_best_of_the_grpos() -> None:
    """The arm with the best end sets the gain, the soonest one there the seconds; a worse end cannot lower the bar."""
    arms = parse_arms("grpo@64,grpo,grpo@16,dppo", _config(), 1.0)
    runs = [_run("grpo@64", 0, 0.3, 2.0, end=0.81), _run("grpo", 0, 0.3, 1.0, end=0.80)]
    runs += [_run("grpo@16", 0, 0.3, 0.2, end=0.6), _run("dppo", 0, 0.3, 1.0, end=0.80)]
    verdict = judge(runs, arms)
    assert (verdict.baseline, verdict.gain_from) == ("grpo", "grpo@64")
    by_name = {one.arm: one for one in verdict.arms}
    assert by_name["dppo"].by_seed["train_s"]["0.95"] == pytest.approx([1.0])
    assert by_name["grpo@16"].by_seed["train_s"]["0.9"] == [0.0]
    assert "not reached" in table(verdict)
    assert by_name["grpo@16"].end_difference is not None and not by_name["grpo@16"].end_difference.within_noise


def test_a_baseline_that_gains_nothing_gives_no_factor() -> None:
    arms = parse_arms("grpo,dppo", _config(), 1.0)
    verdict = judge([_run("grpo", 0, 0.2, 1.0, end=0.2), _run("dppo", 0, 0.2, 1.0)], arms)
    assert verdict.arms[1].factors["train_s"]["0.9"] is None
    assert " - " in table(verdict) and "1 of 1 seeds are in no factor" in table(verdict)


def test_a_factor_of_some_seeds_says_so() -> None:
    """The baseline gains on one seed of two: its factor is all that the table shows."""
    arms = parse_arms("grpo,dppo", _config(), 1.0)
    runs = [_run("grpo", 0, 0.2, 1.0), _run("grpo", 1, 0.2, 1.0, end=0.2)]
    verdict = judge([*runs, *(_run("dppo", seed, 0.2, 0.5) for seed in (0, 1))], arms)
    assert len(verdict.arms[1].by_seed["train_s"]["0.9"]) == 1
    assert "1 of 2 seeds are in no factor" in table(verdict)


def test_an_arm_that_is_there_at_once_has_no_boundless_factor() -> None:
    """The baseline gains a point in 16 evaluations, the arm 50 in one: smoothed, it starts above the level. It was
    there by its first evaluation, and no factor is larger than the baseline's seconds over those of that."""
    arms = parse_arms("grpo,dppo", _config(), 1.0)
    runs = [_run("grpo", 0, 0.3, 1.0, end=0.31), _run("dppo", 0, 9.0, 1.0, end=0.80)]
    factors = judge(runs, arms).arms[1].by_seed["train_s"]["0.9"]
    assert 1 < factors[0] <= runs[0].curve[-1].train_s / runs[1].curve[1].train_s


def test_the_page_and_the_results_hold_every_figure(tmp_path: Path) -> None:
    """JSON without NaN; the page asks for nothing from outside."""
    arms = parse_arms("grpo,dppo", _config(), 1.0)
    runs = [_run("grpo", 0, 0.2, 1.0), _run("dppo", 0, 0.2, 0.5)]
    verdict = judge(runs, arms)
    values = json.loads(json.dumps(results(verdict, runs, ["a note"]), allow_nan=False))
    assert {"date", "versions", "machine", "verdict", "runs"} <= set(values)
    write_page(tmp_path / "report.html", "<b>title", table(verdict), values)
    page = (tmp_path / "report.html").read_text()
    assert "default-src 'none'" in page and "<b>title" not in page and "{{" not in page.split("<script>")[0]


def test_the_page_declares_every_name_once(tmp_path: Path) -> None:
    """Its scripts share one scope with those of the report, and a name that is taken would leave an empty page."""
    verdict = judge([_run("grpo", 0, 0.2, 1.0)], parse_arms("grpo", _config(), 1.0))
    values = results(verdict, [_run("grpo", 0, 0.2, 1.0)], [])
    write_page(tmp_path / "report.html", "title", "text", values)
    own = (tmp_path / "report.html").read_text().split('id="code">')[1].split("</script>")[0]
    names = re.findall(r"(?m)^(?:async )?(?:const|let|function) (\w+)", own)
    names += [name for inside in re.findall(r"(?m)^const \{(.+?)\} =", own) for name in re.findall(r"\w+", inside)]
    assert {"report", "smoothed", "chartCard", "verdict", "curves"} <= set(names)
    assert sorted(names) == sorted(set(names))


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Costs add up over the steps; the end is the mean of the last two evaluations of each problem, failures left
    out; the worst label stays."""
    rows: list[dict[str, Any]] = [{"step": 0, "eval/h/pass@1": 0.25, "eval/problems": {"h": [0.5, 0.0]}}]
    for step, label in ((1, "unbiased"), (2, "exact")):
        rows.append({"step": step, "time/step_s": 2.0, "time/step_cpu_s": 1.5, "tokens/generated": 10.0,
                     "tokens/trained": 4.0, "prune/ledger": [{"name": "p", "label": label}]})  # fmt: skip
    rows[1] |= {"eval/h/pass@1": 0.5, "eval/problems": {"h": [1.0, None]}}
    rows[2] |= {"eval/h/pass@1": 0.75, "eval/problems": {"h": [0.5, 1.0]}}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "summary.json").write_text('{"phase_s": {"step": 4.0}}')
    run = read_method_run("dppo", 3, tmp_path)
    assert run.curve == [Point(0, 0.25, 0, 0, 0, 0), Point(1, 0.5, 2.0, 1.5, 10, 4), Point(2, 0.75, 4.0, 3.0, 20, 8)]
    assert run.solved == {"h": [0.75, 1.0]} and run.labels == {"p": "unbiased"}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:2]))
    assert read_method_run("dppo", 3, tmp_path).solved == {"h": [1.0, None]}, "the start is no part of the end"


@pytest.mark.parametrize("damage", ["a step is gone", "half a line", "no summary", "a label of its own", "infinite"])
def test_a_damaged_record_is_no_run(tmp_path: Path, damage: str) -> None:
    """A lost line would make a kept run look cheaper than it was."""
    _recorded(tmp_path)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    lines.append(lines[-1].replace('"step": 1', '"step": 3' if damage == "a step is gone" else '"step": 2'))
    if damage == "half a line":
        lines[1] = lines[1][:90]
    if damage == "a label of its own":
        lines[2] = lines[2].replace('"prune/ledger": []', '"prune/ledger": [{"name": "p", "label": "fine"}]')
    if damage == "infinite":
        lines[2] = re.sub('"time/step_s": [^,]*', '"time/step_s": 1e999', lines[2])
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    if damage == "no summary":
        (tmp_path / "summary.json").unlink()
    with pytest.raises(UserError, match="remove this run's directory, and the same command runs it again"):
        read_method_run("dppo", 3, tmp_path)


@pytest.mark.parametrize("ungraded", [0, 2])
def test_a_run_without_a_score_at_its_start_or_end_is_no_run(tmp_path: Path, ungraded: int) -> None:
    """null where every grading failed: without its end a run would look cheaper than it was."""
    costs = {"time/step_s": 2.0, "time/step_cpu_s": 1.5, "tokens/generated": 1, "tokens/trained": 1, "prune/ledger": []}
    rows = [
        {"step": step, "eval/h/pass@1": None if step == ungraded else 0.5, "eval/problems": {"h": [0.5]}} | costs
        for step in range(3)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "summary.json").write_text('{"phase_s": {"step": 4.0}}')
    with pytest.raises(UserError, match="every grading of an evaluation set failed at the start or the end"):
        read_method_run("dppo", 3, tmp_path)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("metrics.jsonl", b'{"step": 0}\n{"step": 1, "time\n'),
        ("metrics.jsonl", b"5\n"),
        ("metrics.jsonl", b"[" * 100_000),
        ("metrics.jsonl", b"\xff\xfe"),
        ("summary.json", b"{}"),
        ("summary.json", b"[]"),
    ],
)
def test_a_run_whose_record_was_damaged_is_one_sentence(tmp_path: Path, name: str, data: bytes) -> None:
    row = {"step": 0, "eval/h/pass@1": 0.5, "eval/problems": {"h": [0.5]}}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "summary.json").write_text('{"phase_s": {}}')
    assert read_method_run("dppo", 3, tmp_path).curve
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError, match=r"remove this run's directory") as refused:
        read_method_run("dppo", 3, tmp_path)
    assert "\n" not in str(refused.value)


# ------------------------------------------------------------------------------------------------ what is kept


def _recorded(run_dir: Path) -> None:
    """What a run of two evaluations leaves, as far as a comparison reads it."""
    points = _run("", 0, 0.2, 1.0, points=2).curve
    rows = [
        {"step": step, "eval/h/pass@1": one.accuracy, "eval/problems": {"h": [0.5]}, "time/step_s": one.train_s,
         "time/step_cpu_s": one.train_cpu_s, "tokens/generated": 1, "tokens/trained": 1, "prune/ledger": []}
        for step, one in enumerate(points)
    ]  # fmt: skip
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run_dir / "summary.json").write_text('{"phase_s": {"step": 4.0}}')
    (run_dir / "hf").mkdir()


@pytest.fixture
def compared(tmp_path: Path) -> Callable[..., list[str]]:
    """Compares grpo with dppo on one seed, in the same directory each time; returns the runs that were started."""
    files = write_job_files(tmp_path / "task")

    def compare(*overrides: str, names: str = "grpo,dppo", leaves: Callable[[Path], None] = _recorded) -> list[str]:
        """With these settings; `leaves` writes what a run leaves."""
        given = [one for one in settings(files, tmp_path / "unused") if not one.startswith("run_dir")] + [*overrides]
        config = load_config(CONFIG, given, writes_run=False)
        started: list[str] = []

        def launch(run_dir: Path, arguments: list[str], line: Callable[[str], None]) -> None:
            """In place of a process."""
            started.append(run_dir.name)
            leaves(run_dir)

        arms, out = parse_arms(names, config, 1.0), tmp_path / "out"
        run_all(config, CONFIG, given, arms, seeds=1, out=out, launch=launch)
        return started

    return compare


def test_arms_are_run_again_from_another_start(compared: Callable[..., list[str]], tmp_path: Path) -> None:
    """Their own settings name the start's directory only, and none of them differs."""
    assert compared() == ["start", "grpo", "dppo"]
    assert compared() == []
    assert compared("sft.steps=7") == ["start", "grpo", "dppo"]
    assert compared("sft.steps=7", "objective.clip_low=0.1") == ["start", "grpo", "dppo"]
    with open(tmp_path / "task" / "heldout.jsonl", "a") as file:
        file.write('{"problem": "1+1=", "answer": "2"}\n')
    assert compared("sft.steps=7", "objective.clip_low=0.1") == ["start", "grpo", "dppo"]


def test_runs_are_made_again_after_their_code_or_model_changed(
    compared: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of which the settings have only the name, with SFT before them and without."""
    monkeypatch.syspath_prepend(tmp_path)
    code, everything = tmp_path / "own_grader_of_a_comparison.py", ["start", "grpo", "dppo"]
    code.write_text("def grade(completion, answer): return 1.0\n")
    settings = [f"reward.function={code.stem}:grade"]
    assert compared(*settings) == everything
    assert compared(*settings) == []
    code.write_text("def grade(completion, answer): return 0.5\n")
    assert compared(*settings) == everything
    with open(tmp_path / "task" / "model" / "config.json", "a") as file:
        file.write("\n")
    assert compared(*settings) == everything
    for runs in (["grpo", "dppo"], []):
        assert compared(*settings, "sft.steps=0") == runs
    (tmp_path / "task" / "model" / "config.json").touch()
    assert compared(*settings, "sft.steps=0") == ["grpo", "dppo"]


def test_a_run_that_was_stopped_is_not_kept(compared: Callable[..., list[str]]) -> None:
    """A signal ends a run with a checkpoint and exit code 0, before its summary."""
    with pytest.raises(RunAborted, match="stopped before its end"):
        compared(leaves=lambda run_dir: (run_dir / "metrics.jsonl").touch())
    assert compared() == ["start", "grpo", "dppo"]


@pytest.mark.parametrize("code, how", [(1, "failed with exit code 1"), (-9, "was ended by signal 9")])
def test_a_crash_is_one_sentence_with_the_end_of_the_log(tmp_path: Path, code: int, how: str) -> None:
    """And the whole of it in a file, where the next attempt may remove it."""
    said = 'Traceback (most recent call last):\n  File "x.py", line 1\nOSError: [Errno 28] No space left on device\n\n'
    with pytest.raises(RunAborted) as stop:
        check_end(tmp_path, code, said)
    (kept,) = tmp_path.iterdir()
    assert (
        str(stop.value) == f"{tmp_path}: the run {how}: OSError: [Errno 28] No space left on device (all of it: {kept})"
    )
    assert kept.read_text() == said


def test_a_mistake_is_said_without_what_came_before_it(tmp_path: Path) -> None:
    """On a slow machine lines of progress do, and a message may have several lines."""
    for before in ("", "loading libraries: 5 s\nloading libraries: done in 8 s\n"):
        with pytest.raises(UserError) as error:
            check_end(tmp_path, 2, f"{before}error: steps = -1:\nmust be at least 0\n(see docs/configuration.md)\n")
        assert str(error.value) == "steps = -1:\nmust be at least 0\n(see docs/configuration.md)"


def test_a_crash_without_a_word_says_so(tmp_path: Path) -> None:
    with pytest.raises(RunAborted, match="ended by signal 6: nothing on stderr"):
        check_end(tmp_path, -6, "")


def test_an_arm_that_cannot_be_costs_no_sft(compared: Callable[..., list[str]], tmp_path: Path) -> None:
    """Its settings are read before anything runs."""
    with pytest.raises(UserError, match="prompts_per_step = 100000000: must be at most"):
        compared(names="grpo,grpo@100000000")
    assert not (tmp_path / "out").exists()


def test_what_compare_has_not_made_is_not_removed(compared: Callable[..., list[str]], tmp_path: Path) -> None:
    """A user's own run may have the name of an arm's."""
    own = tmp_path / "out" / "seed0" / "dppo" / "metrics.jsonl"
    own.parent.mkdir(parents=True)
    own.write_text("mine")
    with pytest.raises(UserError, match="holds something that compare has not made"):
        compared()
    assert own.read_text() == "mine"


def test_each_seed_has_a_task_of_its_own_where_one_can_be_made(tmp_path: Path) -> None:
    """Every path of the job that lies in the task's directory moves to the new one; the rest stays."""
    home = tmp_path / "task"
    home.mkdir()
    write_quickstart(home, Recipe(0, 48, 24, 64))
    sets = f"data.eval_sets={{more: {{path: {home / 'heldout.jsonl'}}}}}"
    config = load_config(CONFIG, [*settings(home, tmp_path / "run"), sets], writes_run=False)
    assert shared_task(config) is None and task_settings(config, 0, tmp_path / "new") == []
    made = dict(item.split("=", 1) for item in task_settings(config, 1, tmp_path / "new"))
    assert set(made) == {
        "model.hf_path", "data.train_path", "data.eval_paths.heldout", "data.eval_sets.more.path",
        "sft.examples_path",
    }  # fmt: skip
    load_config(CONFIG, [*settings(home, tmp_path / "run"), sets, *(f"{k}={v}" for k, v in made.items())])
    assert all(Path(path).exists() for path in made.values())
    assert (tmp_path / "new" / "train.jsonl").read_text() != (home / "train.jsonl").read_text()
    write_quickstart(tmp_path / "again", Recipe(1, 48, 24, 64))
    for name in ("train.jsonl", "model/model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "new" / name).read_bytes()


def test_a_task_that_was_made_with_another_seed_than_the_job_s(tmp_path: Path) -> None:
    """The job's seed 0 has the task of seed 1; its second seed then has that of seed 2, and not the same again."""
    write_quickstart(tmp_path / "task", Recipe(1, 48, 24, 64))
    config = load_config(CONFIG, settings(tmp_path / "task", tmp_path / "run"), writes_run=False)
    assert task_settings(config, 0, tmp_path / "new") == []
    task_settings(config, 1, tmp_path / "new")
    assert read_recipe(tmp_path / "new") == Recipe(2, 48, 24, 64)


def test_a_task_that_was_not_made_is_shared(tmp_path: Path) -> None:
    config = load_config(CONFIG, settings(write_job_files(tmp_path / "t"), tmp_path / "run"), writes_run=False)
    assert "has no task.json" in str(shared_task(config))


def test_a_run_may_print_any_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library, or the name of a file; on either stream."""
    program = "import os\nos.write(1, b'one \\xff\\n')\nos.write(2, b'two \\xff\\n')\n"
    (tmp_path / "sitecustomize.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    lines: list[str] = []
    in_a_process(tmp_path, ["completion", "bash"], lines.append)
    assert lines[0] == "one \ufffd\n" and "complete" in "".join(lines)
    with pytest.raises(UserError, match=r"config file 'nowhere\.yaml' does not exist"):
        in_a_process(tmp_path, ["train", "nowhere.yaml"], lines.append)


def test_a_run_ends_with_its_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a signal raises while its lines are read is not held up by a run that would go on for ten minutes."""
    program = "import os, time\nos.write(1, b'%d\\n' % os.getpid())\ntime.sleep(600)\n"
    (tmp_path / "sitecustomize.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    heard: list[int] = []

    def end(line: str) -> None:
        heard.append(int(line))
        sys.exit(143)

    with pytest.raises(SystemExit):
        in_a_process(tmp_path, ["completion", "bash"], end)
    with pytest.raises(ProcessLookupError):
        os.kill(heard[0], 0)


def test_a_run_is_found_and_not_shadowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a directory whose `json.py` is none of ours. What the run starts, such as code that a grader tries, finds
    what lies beside it: it gets no PYTHONSAFEPATH."""
    (tmp_path / "json.py").write_text("raise ImportError('not the one that is meant')")
    (tmp_path / "argparse.py").write_text("raise ImportError('not the one that is meant')")
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    monkeypatch.chdir(tmp_path)
    lines: list[str] = []
    in_a_process(tmp_path, ["completion", "bash"], lines.append)
    assert "complete" in "".join(lines)
    assert "PYTHONSAFEPATH" not in package_environment()


def test_an_installed_package_leaves_the_import_path_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launched server inherits it, whose Python may be another: the trainer's site-packages must not stand before its
    own."""
    monkeypatch.setenv("PYTHONPATH", "/mine")
    monkeypatch.setattr("dppo_megatron.children.__file__", "/checkout/dppo_megatron/children.py")
    assert package_environment()["PYTHONPATH"] == f"/checkout{os.pathsep}/mine"
    for where in ("site-packages", "dist-packages"):
        monkeypatch.setattr("dppo_megatron.children.__file__", f"/venv/lib/{where}/dppo_megatron/children.py")
        assert package_environment() == dict(os.environ)
