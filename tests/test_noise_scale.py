"""The gradient's noise scale: unbiased estimates by enumeration, and no effect on training."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.job import QUICK, job_config, read_metrics, write_job_files, write_warm_job_files
from support.launch import run_ranks

from dppo_megatron.algorithms.noise_scale import NoiseScale, half_of
from dppo_megatron.config.schema import Config
from dppo_megatron.job import prepare_job
from dppo_megatron.packing.alignment import packing_layout
from dppo_megatron.run import Run
from dppo_megatron.steps.coordinator import Coordinator
from dppo_megatron.steps.loop import is_probed
from dppo_megatron.steps.step import Step, Update
from dppo_megatron.train import train

PROMPTS = np.array([[1.0, 0.5], [-0.5, 2.0], [0.25, -1.0]])
"""The gradient of each prompt of a population, two coordinates."""
KEEP = 0.5
"""A prompt is rolled out with this probability and then counts 1 / KEEP times: what a pruned step's parts look like."""


def _parts() -> list[tuple[float, np.ndarray]]:
    """(probability, g_q) of one drawn prompt."""
    kept = [(KEEP / len(PROMPTS), one / KEEP) for one in PROMPTS]
    return [*kept, (1 - KEEP, np.zeros(2))]


def test_no_probe_where_it_would_move_the_scales() -> None:
    """Delayed scaling remembers the values of every backward pass, a probe's too; the other recipes and bfloat16 have
    no memory."""
    config = Config()
    assert [step for step in range(1, 100) if is_probed(config, step)] == [32, 64, 96]
    config.actor.fp8 = "tensorwise"
    assert is_probed(config, 32)
    config.actor.fp8 = "delayed"
    assert not any(is_probed(config, step) for step in range(1, 100))


def test_estimates_are_unbiased_over_every_batch_and_every_half() -> None:
    """N = 3 prompts drawn independently, 4^3 batches times 2^3 halves: to rounding."""
    n, parts = 3, _parts()
    signal = noise = 0.0
    for batch in itertools.product(parts, repeat=n):
        probability = math.prod(p for p, _ in batch) / 2**n
        g = np.array([part for _, part in batch])
        whole = float(((g.sum(0) / n) ** 2).sum())
        for half in itertools.product((0.0, 1.0), repeat=n):
            scale = NoiseScale()
            scale.add(whole, float(((2 * np.array(half) @ g / n) ** 2).sum()), n)
            signal += probability * scale.signal
            noise += probability * scale.noise
    mean = sum(p * part for p, part in parts)
    true_noise = sum(p * float(part @ part) for p, part in parts) - float(mean @ mean)
    assert signal == pytest.approx(float(mean @ mean), rel=1e-12)
    assert noise == pytest.approx(true_noise, rel=1e-12)


def test_a_half_has_each_group_with_probability_one_half_and_whole_groups() -> None:
    """20,000 groups: the share is within 4 standard errors (0.0035 each), and repeated groups go together."""
    groups = np.arange(20_000).repeat(2)
    half = half_of(groups, seed=1, step=16)
    assert abs(half.mean() - 0.5) < 0.0142
    assert (half[::2] == half[1::2]).all()
    assert (half != half_of(groups, seed=1, step=32)).any()
    assert half_of(groups[:0], seed=1, step=16).shape == (0,), "an update of which nothing was kept"


def test_what_is_not_known_is_not_said() -> None:
    """Too few probes, signal lost in noise, values that are not finite."""
    scale = NoiseScale()
    for _ in range(8):
        scale.add(math.nan, 1.0, 64)
    assert scale.probes == 0
    for _ in range(8):
        scale.add(1.0, 2.5, 64)  # the half says that all of the whole's norm is noise
    assert scale.prompts is None


@pytest.mark.parametrize("allocation", [False, True])
def test_it_is_in_the_setting_s_prompts_and_survives_a_resume(tmp_path: Path, allocation: bool) -> None:
    """CPPO's allocation plans twice as many prompts as the setting says, of which each counts half."""
    cppo = {"pruning__completion__method": "cppo", "pruning__completion__rate": 0.5, "pruning__prompt__method": "none"}
    config = job_config(write_job_files(tmp_path), tmp_path / "run", **cppo, pruning__completion__allocation=allocation)
    job = prepare_job(config, 1)
    first, resumed = (Coordinator(job, packing_layout(config.actor, 1)) for _ in range(2))
    planned, scale = config.rollout.prompts_per_step * (1 + allocation), 50.0
    for _ in range(5):  # |G|^2 = 1 and tr(Sigma) = scale
        whole = 1 + scale / planned
        first.probe(math.sqrt(whole), math.sqrt(whole + (scale + 1) / planned))
    resumed.load_state_dict(first.state_dict())
    for coordinator in (first, resumed):
        step = Step(1)
        coordinator._selector.feedback = lambda cost: []  # type: ignore[method-assign]
        assert coordinator.learn(step) == ([], "")
        assert step.record.metrics["batch/noise_scale_prompts"] == pytest.approx(scale / (1 + allocation))
    job.grade.close()


def _train(files: Path, run_dir: Path, every: int) -> list[tuple[float, float, float]]:
    """Of each probe: the two norms that it reports, and the second one from a batch of the half alone, its weights
    doubled."""
    more = QUICK | {"observe__noise_scale_every_steps": every, "rollout__sampling__temperature": 0.7}
    found: list[tuple[float, float, float]] = []
    with Run(prepare_job(job_config(files, run_dir, steps=5, **more), 1)) as run:
        loop = run.loop
        update, probe = loop.update, loop._coordinator.probe
        alone = 0.0

        def with_half_alone(step: Step, of: Update) -> None:
            nonlocal alone
            groups = of.plan.rows // loop.job.config.rollout.completions_per_prompt
            half = half_of(groups, loop.job.config.seed, step.number)
            batch = [replace(one, weight=2 * one.weight) for at, one in of.samples.items() if half[at]]
            if every:
                assert 0 < len(batch) < len(of.samples)
                alone = loop.actor.grad_norm(batch, loop.pack(batch), loop.objective, temperature=0.7)
            update(step, of)

        def recorded(whole: float, half: float) -> None:
            found.append((whole, half, alone))
            probe(whole, half)

        loop.update, loop._coordinator.probe = with_half_alone, recorded  # type: ignore[method-assign]
        train(run)
    return found


@pytest.mark.slow
def test_probes_change_nothing_that_is_trained(tmp_path: Path) -> None:
    """Every metric but the probes' own is the same bit for bit, and their seconds stand beside the others. They report
    the step's own norm and that of its half, each prompt twice."""
    files = write_warm_job_files(tmp_path)
    rows: dict[int, list[dict[str, Any]]] = {}
    for every in (0, 1):
        [probes] = run_ranks(_train, 1, files, tmp_path / f"run{every}", every)
        rows[every] = read_metrics(tmp_path / f"run{every}")
    plain = [{key: value for key, value in row.items() if not key.startswith("batch/")} for row in rows[1]]
    assert plain == rows[0]
    timed = read_metrics(tmp_path / "run1", with_time=True)
    assert all(row["time/probe_s"] > 0 for row in timed[1:])
    assert not any(key.startswith("batch/") for row in rows[0] for key in row)
    assert [whole for whole, _, _ in probes] == [row["train/grad_norm"] for row in rows[0][1:]]
    assert [half for _, half, _ in probes] == pytest.approx([alone for _, _, alone in probes], rel=1e-4)
