"""Whole runs: what the loop does with real data, a real model and a real engine."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from support.job import REPOSITORY, job_config, nearly, read_metrics, write_warm_job_files
from support.launch import run_ranks
from transformers import AutoModelForCausalLM, AutoTokenizer

from dppo_megatron.algorithms.correction import Mismatch
from dppo_megatron.config.rollout import RolloutConfig
from dppo_megatron.distributed import gather_all
from dppo_megatron.evaluation.evaluator import Evaluator
from dppo_megatron.job import prepare_job
from dppo_megatron.observe.metrics import StepTiming
from dppo_megatron.rollout.engine import RolloutStats
from dppo_megatron.rollout.hf import engine_from_files
from dppo_megatron.run import Run
from dppo_megatron.steps import performance as performance_module
from dppo_megatron.steps.freed_memory import EVERY_S, FreedMemory
from dppo_megatron.steps.loop import Loop
from dppo_megatron.train import train
from dppo_megatron.types import Group, StepCounts, TrainSample
from dppo_megatron.weights.architecture import read_architecture
from dppo_megatron.weights.hf_files import CheckpointReader

pytestmark = pytest.mark.slow

TP2 = {"actor__layout__tensor_parallel": 2}
PROMISED = {
    "reward/mean",
    "train/loss",
    "train/grad_norm",
    "prune/prompts_considered",
    "prune/prompts_generated",
    "prune/completions_generated",
    "prune/completions_trained",
    "prune/realised_design_effect",
    "pack/fill",
    "pack/microbatches",
    "mismatch/logprob_abs_diff_mean",
    "time/rollout_s",
    "time/reward_s",
    "time/update_s",
    "time/sync_s",
    "time/step_s",
    "time/step_cpu_s",
    "tokens/generated",
    "tokens/trained",
}
LISTS = {"prune/ledger", "eval/problems"}
"""Keys whose values are no numbers."""
PP2 = {"actor__layout__pipeline_parallel": 2}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_warm_job_files(tmp_path_factory.mktemp("task"))


def _train(files: Path, run_dir: Path, world_size: int, extra: dict[str, Any]) -> None:
    job = prepare_job(job_config(files, run_dir, **extra), world_size)
    with Run(job) as run:
        train(run)
    assert not job.sft_examples, "SFT's examples stay in memory"


def _run(files: Path, run_dir: Path, world_size: int = 1, **extra: Any) -> list[dict[str, Any]]:
    run_ranks(_train, world_size, files, run_dir, world_size, extra)
    return read_metrics(run_dir)


@pytest.fixture(scope="module")
def finished(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished single-process run of four steps, with a checkpoint after the second."""
    run_dir = tmp_path_factory.mktemp("runs") / "one"
    _run(files, run_dir, checkpoint__every_steps=2)
    return run_dir


def test_same_seed_same_metrics(files: Path, finished: Path, tmp_path: Path) -> None:
    """Bit for bit, in everything but the clock; another seed differs."""
    assert _run(files, tmp_path / "again") == read_metrics(finished)
    assert _run(files, tmp_path / "other", seed=1) != read_metrics(finished)


def test_pruning_happened(finished: Path) -> None:
    """Guards the tests around it: both levels pruned something in this job."""
    rows = read_metrics(finished)[1:]
    assert any(row["prune/prompts_generated"] < row["prune/prompts_considered"] for row in rows)
    assert any(0 < row["prune/completions_trained"] < row["prune/completions_generated"] for row in rows)


@pytest.fixture(scope="module")
def unpruned(files: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The same job with both methods off."""
    run_dir = tmp_path_factory.mktemp("runs") / "grpo"
    return _run(files, run_dir, pruning__prompt__method="none", pruning__completion__method="none")


FIGURES = {
    *("train/loss", "train/grad_norm", "train/learning_rate", "train/skipped_updates"),  # of the update, weighted as it
    *("train/entropy", *Mismatch().metrics(), *(f"train/{name}" for name in ("ratio", "clip_fraction"))),
}
"""Under `train/` and `mismatch/`. To add one: the tests of `test_figures.py` hold what `RolloutTable.metrics`,
`Mismatch.metrics` and a loss's diagnostics return to be the policy's; anything else begins with `kept/`."""

MEANS_OF_ROLLOUT = {
    *("reward/mean", "reward/boxed_share", "reward/parsed_share", "rollout/truncated_share"),
    *("rollout/completion_tokens_mean", "rollout/missing_reward_mean", "rollout/missing_tokens_mean"),
}
"""Under `rollout/` and `reward/`, of the whole rollout. To add one, show that it is not of what was kept only."""


def test_figures_are_of_the_policy_or_are_called_kept(finished: Path, unpruned: list[dict[str, Any]]) -> None:
    """In every step nothing but what is known to estimate the whole rollout's; alike with and without pruning."""
    for row in [*read_metrics(finished)[1:], *unpruned[1:]]:
        assert {name for name in row if name.startswith(("train/", "mismatch/"))} == FIGURES
        assert {name for name in row if name.startswith("kept/")} == {"kept/product_ess"}
        means = {name for name in row if name.startswith(("rollout/", "reward/")) and name.endswith(("mean", "share"))}
        assert means == MEANS_OF_ROLLOUT
    first, whole = read_metrics(finished)[1], unpruned[1]
    assert first["prune/completions_trained"] < whole["prune/completions_trained"]
    assert first["train/entropy"] == whole["train/entropy"], "step 1, no prompt skipped yet: the same rollout"


def test_grpo_prunes_nothing(unpruned: list[dict[str, Any]]) -> None:
    """It trains on everything with weight 1."""
    assert [row["step"] for row in unpruned] == [0, 1, 2, 3, 4]
    for row in unpruned[1:]:
        assert row["prune/prompts_generated"] == row["prune/prompts_considered"] == 16
        assert row["prune/completions_trained"] == row["prune/completions_generated"] == 128
        assert row["prune/design_effect"] == row["prune/realised_design_effect"] == row["prune/weight_max"] == 1


def test_a_biased_method_says_so_once(files: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """On the terminal the first time, and in the ledger of every step."""
    rows = _run(files, tmp_path / "cppo", pruning__prompt__method="none", pruning__completion__method="cppo")[1:]
    assert capfd.readouterr().out.count("warning: completion/cppo is biased") == 1
    assert len(rows) == 4 and all("biased" in {entry["label"] for entry in row["prune/ledger"]} for row in rows)
    figures = {f"kept/{name}" for name in (*Mismatch().metrics(), "train/ratio", "train/clip_fraction")}
    assert all(figures <= row.keys() and "train/ratio" not in row and row["train/entropy"] > 0 for row in rows)


@pytest.mark.parametrize(("method", "bitwise"), [("infobatch", True), ("dppo", False)])
def test_rate_zero_is_the_unpruned_run(
    files: Path, tmp_path: Path, unpruned: list[dict[str, Any]], method: str, bitwise: bool
) -> None:
    """At rate 0 a method trains as GRPO does: bit for bit where it keeps everything. DPPO still leaves out completions
    with advantage 0, whose gradient is exactly 0, so that only the packing and with it the rounding differs."""
    rate_zero = {
        "pruning__prompt__method": method,
        "pruning__completion__method": method,
        "pruning__prompt__rate": 0.0,
        "pruning__completion__rate": 0.0,
    }
    kept = _run(files, tmp_path / "kept", **rate_zero)
    compared = {"train/loss", "train/grad_norm", "tokens/generated", "eval/heldout/pass@1"}
    assert all(compared <= row.keys() for row in (unpruned[-1], kept[-1]))
    for mine, theirs in zip(kept, unpruned, strict=True):
        for key in theirs.keys() & compared:
            assert mine[key] == (theirs[key] if bitwise else pytest.approx(theirs[key], rel=1e-3, abs=1e-6)), key


def test_resume_continues_at_any_layout(
    files: Path, finished: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Steps 3 and 4 after a resume are those of the uninterrupted run: exactly at the same layout, to rounding at
    TP2 x PP2 (float32; counts are equal, losses to 1e-4; another layout packs in another way)."""
    resume = {"checkpoint__resume": finished / "checkpoints" / "step_000002"}
    original = read_metrics(finished)[3:]
    assert _run(files, tmp_path / "same", **resume) == original
    resharded = _run(files, tmp_path / "tp2pp2", 4, **resume, **TP2, **PP2)
    assert "differs from rank 0" not in capfd.readouterr().err, "ranks saved different states"
    for mine, theirs in zip(resharded, original, strict=True):
        for key in theirs.keys() - LISTS - {key for key in theirs if key.startswith("pack/")}:
            assert mine[key] == nearly(theirs[key], rel=1e-4, abs=1e-5), key


def test_stopping_early_resumes_and_is_the_same_at_any_layout(files: Path, tmp_path: Path) -> None:
    """Limits are by the prompt and not by the rank. What was stopped has no reward and no end; generated tokens are
    fewer than without, and the row is unbiased in every step."""
    early = {"pruning__early_stop__after_tokens": 5, "objective__advantage": "rloo", "checkpoint__every_steps": 2}
    original = _run(files, tmp_path / "one", **early)[1:]
    stopped = [row["rollout/stopped_early_count"] for row in original]
    assert min(stopped) > 0 and all(row["reward/failed_count"] == 0 for row in original)
    rows = [{one["name"]: one for one in row["prune/ledger"]}["rollout/early_stop"] for row in original]
    assert {row["label"] for row in rows} == {"unbiased"} and all(0 < row["kept_fraction"] < 1 for row in rows)
    resume = {"checkpoint__resume": tmp_path / "one" / "checkpoints" / "step_000002"}
    assert _run(files, tmp_path / "same", **early, **resume) == original[2:]
    split = _run(files, tmp_path / "tp2pp2", 4, **early, **TP2, **PP2)[1:]
    for mine, theirs in zip(split, original, strict=True):
        for key in ("rollout/stopped_early_count", "tokens/generated", "tokens/trained", "reward/mean", "train/loss"):
            assert mine[key] == nearly(theirs[key], rel=1e-3, abs=1e-5), key


def _all_samples(groups: Iterable[Group]) -> list[TrainSample]:
    """Every completion, pruned or not."""
    return [
        TrainSample(
            id=f"{group.selected.prompt.index}:{index}",
            token_ids=np.concatenate([np.array(group.selected.prompt.token_ids), completion.token_ids]),
            num_prompt_tokens=len(group.selected.prompt.token_ids),
            behaviour_logprobs=completion.logprobs,
            advantage=0.0,
            weight=1.0,
            denominator=1.0,
        )
        for group in groups
        for index, completion in enumerate(group.completions)
    ]


def _steps(files: Path, run_dir: Path, world_size: int, extra: dict[str, Any]) -> list[dict[str, Any]]:
    """Drives the loop as train.py does and reports what was drawn and how far engine and actor are apart."""
    loop = Loop(prepare_job(job_config(files, run_dir, **extra), world_size))
    loop.sft()
    loop.start_rl()
    loop.load_engine()
    report = []
    for number in range(1, 5):
        with loop.step(number) as step:
            loop.rollout(step)
            everything = _all_samples(step.groups[k] for k in sorted(step.groups))
            everything = sorted(gather_all(everything), key=lambda sample: sample.id)  # each rank holds some
            recomputed = loop.actor.logprobs(everything, loop.pack(everything))
            loop.prune(step)
            [update] = step.updates
            if recomputed is not None:
                recorded = np.concatenate([sample.behaviour_logprobs for sample in everything])
                report.append(
                    {
                        "prompts": [(item.prompt.index, item.inclusion_prob) for item in step.selected],
                        "completions": list(zip(update.plan.rows.tolist(), update.plan.weights.tolist(), strict=True)),
                        "mismatch": np.abs(np.concatenate(recomputed) - recorded),
                    }
                )
            loop.update(step, update)
            loop.sync(step)
        loop.finish(step)
    return report


@pytest.fixture(scope="module")
def one_process(files: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(_steps, 1, files, tmp_path_factory.mktemp("runs") / "x", 1, {})[0]


@pytest.fixture(scope="module")
def tp2pp2(files: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(_steps, 4, files, tmp_path_factory.mktemp("runs") / "x", 4, TP2 | PP2)[0]


@pytest.fixture(scope="module")
def dp2(files: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(_steps, 2, files, tmp_path_factory.mktemp("runs") / "x", 2, {})[0]


@pytest.mark.parametrize("layout", ["dp2", "tp2pp2"])
def test_draws_do_not_depend_on_the_layout(
    request: pytest.FixtureRequest, one_process: list[dict[str, Any]], layout: str
) -> None:
    """The same prompts and completions are drawn at DP1, DP2 and TP2 x PP2, with the same probabilities to rounding."""
    report = request.getfixturevalue(layout)
    assert any(weight > 1 for step in report for _, weight in step["completions"]), "nothing was pruned"
    for mine, theirs in zip(report, one_process, strict=True):
        for level in ("prompts", "completions"):
            assert [key for key, _ in mine[level]] == [key for key, _ in theirs[level]]
            np.testing.assert_allclose([p for _, p in mine[level]], [p for _, p in theirs[level]], rtol=1e-4)


@pytest.mark.parametrize("layout", ["one_process", "dp2", "tp2pp2"])
def test_behaviour_logprobs_are_the_actors(request: pytest.FixtureRequest, layout: str) -> None:
    """After each of several updates the engine still has the actor's weights: mean |difference| < 1e-4 in float32."""
    report = request.getfixturevalue(layout)
    assert len(report) == 4
    for step in report:
        assert step["mismatch"].mean() < 1e-4 and step["mismatch"].max() < 1e-3


def test_room_in_microbatches_goes_back_to_the_pruner(files: Path, tmp_path: Path) -> None:
    """With fill_slack a step trains on more than its rate says, in micro-batches that it runs anyway; unbiased."""
    run_ranks(
        _train,
        1,
        files,
        tmp_path / "run",
        1,
        {"pruning__completion__fill_slack": True, "pruning__completion__rate": 0.85, "steps": 3},
    )
    rows = read_metrics(tmp_path / "run")[1:]
    filled = [row for row in rows if row.get("prune/completion_slack_filled_tokens", 0.0) > 0]
    assert filled, "no step had room"
    for row in filled:
        assert row["prune/completion_rate_effective"] < row["prune/completion_rate_before_slack"]
        assert {entry["label"] for entry in row["prune/ledger"]} <= {"exact", "unbiased"}


def test_run_directory(files: Path, finished: Path) -> None:
    """What other tools read is there, complete and consistent."""
    rows = read_metrics(finished, with_time=True)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    figures = {"completion_tokens_mean", "failed", "truncated_share", "reward_mean"}
    figures |= {"pass@1", "pass@1_se", "avg@1", "avg@1_se"}
    assert set(rows[0]) == {"step", "eval/problems"} | {f"eval/heldout/{name}" for name in figures}
    assert np.mean(rows[0]["eval/problems"]["heldout"]) == pytest.approx(rows[0]["eval/heldout/pass@1"])
    for row in rows[1:]:
        assert set(row) >= PROMISED
        facts = {"reward/parsed_share", "reward/boxed_share"}  # this grader gives none
        facts |= {"rollout/missing_reward_mean", "rollout/missing_tokens_mean"}  # nothing is missing
        assert {key for key, value in row.items() if value is None} == facts
        assert all(np.isfinite(value) for key, value in row.items() if key not in facts | LISTS)
        assert {entry["label"] for entry in row["prune/ledger"]} <= {"exact", "unbiased"}
        for name, seconds in (("generated", "time/rollout_s"), ("trained", "time/update_s")):
            speed = row[f"perf/{name}_tokens_per_s_per_gpu"]
            assert speed == pytest.approx(row[f"tokens/{name}"] / row[seconds])
        assert not any("memory" in key for key in row), "of a device, and there is none"
    assert "eval/heldout/pass@1" in rows[4] and "eval/heldout/pass@1" not in rows[3]
    summary = json.loads((finished / "summary.json").read_text())
    assert summary["steps"] == 4
    assert summary["eval_before"] == {"heldout": rows[0]["eval/heldout/pass@1"]}
    assert summary["eval_after"] == {"heldout": rows[4]["eval/heldout/pass@1"]}
    for total, key in (("tokens_trained", "tokens/trained"), ("completions_generated", "prune/completions_generated")):
        assert summary[total] == sum(row[key] for row in rows[1:])
    assert summary["train_s"] == pytest.approx(sum(row["time/step_s"] for row in rows[1:]))
    resolved = yaml.safe_load((finished / "config.yaml").read_text())
    assert resolved["steps"] == 4 and resolved["objective"]["clip_low"] == 0.2
    assert {path.name for path in (finished / "checkpoints").iterdir()} == {"latest", "step_000002", "step_000004"}


def test_trained_checkpoint_loads_in_transformers(files: Path, finished: Path, tmp_path: Path) -> None:
    """from_pretrained loads it, generate decodes the same greedy answers as our engine, and it scores as recorded."""
    model = AutoModelForCausalLM.from_pretrained(finished / "hf").eval()
    tokenizer = AutoTokenizer.from_pretrained(finished / "hf")
    config = job_config(files, tmp_path / "unused", model__hf_path=finished / "hf")
    job = prepare_job(config, 1)
    reader = CheckpointReader(finished / "hf", read_architecture(finished / "hf"))
    engine = engine_from_files(config, tokenizer, reader)
    [scores] = Evaluator(job).evaluate(engine)
    assert scores.metrics().items() <= read_metrics(finished)[-1].items()
    from dppo_megatron.rollout.engine import Request, Sampling

    prompts = job.eval_sets["heldout"].prompts[:8]
    ours = engine.generate([Request(p, 0, 0) for p in prompts], Sampling(16, 0.0, 0))
    for prompt, completion in zip(prompts, ours, strict=True):
        ids = torch.tensor([prompt.token_ids])
        theirs = model.generate(ids, max_new_tokens=16, do_sample=False)[0, ids.size(1) :]
        assert theirs[: len(completion.token_ids)].tolist() == completion.token_ids.tolist()


def _documented() -> re.Pattern[str]:
    """What the pages on metrics name: `eval/<set>/avg@n`, `prune/*_kept_cost`, and names that continue one of a line
    (`time/select_s`, `rollout_s`)."""
    found = []
    for page in ("run_directory", "pruning", "objectives"):
        for line in (REPOSITORY / "docs" / f"{page}.md").read_text(encoding="utf-8").splitlines():
            section = ""
            for name in re.findall(r"`([^`\s]+)`", line):
                section = name.rpartition("/")[0] if re.match("[a-z]+/", name) else section
                whole = name if "/" in name else f"{section}/{name}"
                if section and not whole.endswith(("/*", "...")):
                    found.append(re.sub(r"\\\*|<[a-z]+>|\\\.\\\.\\\.|(?<=@)[nk]", ".+", re.escape(whole)))
    return re.compile("|".join(found))


def test_every_metric_is_in_the_docs(finished: Path, unpruned: list[dict[str, Any]]) -> None:
    """Of these runs, of a skipping rule's, and of servers."""
    stats = {one.name: 1 for one in fields(RolloutStats)}
    keys = {key for row in [*read_metrics(finished, with_time=True), *unpruned] for key in row if "/" in key}
    keys |= set(RolloutStats(**stats).metrics()) | {"prune/prompt_p_easy", "rollout/canary_logprob_diff"}
    keys |= {f"perf/max_memory_{name}_gib" for name in ("allocated", "reserved")}
    documented = _documented()
    assert len(keys) > 80 and not documented.fullmatch("prune/no_such_figure")
    named = {key for key in keys if documented.fullmatch(key) or documented.fullmatch(key.removeprefix("kept/"))}
    assert keys - named == set()


def test_speed_and_memory_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over all ranks; the rollout's seconds are a wait where servers generate beside the step. The fullest card counts,
    since the last step."""
    counts = StepCounts(4, 4, 8, 8, tokens_generated=1200, tokens_trained=600)
    timing = StepTiming(step_s=10.0, generating_s=2.0, grading_s=1.0, update_s=3.0, probe_s=0.0)
    peaks = [(5 << 30, 7 << 30), (6 << 30, 6 << 30)]
    cleared: list[torch.device] = []
    monkeypatch.setattr(performance_module, "world_size", lambda: 2)
    monkeypatch.setattr(performance_module, "to_rank_zero", lambda mine: [*peaks, mine])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 1 << 30)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 2 << 30)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", cleared.append)
    rollout, card = RolloutConfig(), torch.device("cuda", 0)
    found = performance_module.performance(counts, timing, rollout, card)
    assert found == {
        "perf/generated_tokens_per_s_per_gpu": 300.0,
        "perf/trained_tokens_per_s_per_gpu": 100.0,
        "perf/max_memory_allocated_gib": 6.0,
        "perf/max_memory_reserved_gib": 7.0,
    }
    assert cleared == [card]
    rollout.async_steps = 1
    beside = performance_module.performance(counts, timing, rollout, torch.device("cpu"))
    assert beside == {"perf/generated_tokens_per_s_per_gpu": 60.0, "perf/trained_tokens_per_s_per_gpu": 100.0}
    rollout.servers.colocate = True
    [sharing, _] = performance_module.performance(counts, timing, rollout, torch.device("cpu")).values()
    assert sharing == 300.0
    monkeypatch.setattr(performance_module, "to_rank_zero", lambda mine: [])
    assert performance_module.performance(None, timing, rollout, card) == {}, "another rank than 0"


def test_holes_in_the_heap_are_returned_once_a_minute() -> None:
    """What lives for a step lies between what stays: 300 MB of 16 kB tensors, a small one after each."""
    clock = [0.0]
    memory = FreedMemory(lambda: clock[0])
    stays, step = [], []
    for _ in range(20_000):
        step.append(torch.ones(4000))
        stays.append(torch.ones(2))
    step.clear()
    before = _anonymous_mb()
    assert not memory.return_if_due()
    clock[0] = EVERY_S
    assert memory.return_if_due() and not memory.return_if_due()
    assert before - _anonymous_mb() > 150  # 232 on glibc 2.36: a hole keeps the ends that it shares with a page
    assert len(stays) == 20_000


def _anonymous_mb() -> float:
    return int(Path("/proc/self/status").read_text().partition("RssAnon:")[2].split()[0]) / 1024
