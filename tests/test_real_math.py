"""A job on real rows, from files to scores: examples/real_math in a small form.

The model is tiny and cannot reason. What is asserted is what a user relies on: that every part meets real text, real
references and a chat tokenizer, and that the figures of a run can be made again from what it leaves.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from support.job import REPOSITORY, read_metrics

sys.path.insert(0, str(REPOSITORY / "examples" / "real_math"))
from prepare import prepare
from support.engines.servers import local_settings, needs

from dppo_megatron.evaluation.standalone import SAMPLES
from dppo_megatron.workbench.cli import main

DATA = Path(os.environ.get("DPPO_DATA_DIR", REPOSITORY.parent / "shared" / "data"))
SETS = {
    "math500": "math500",
    "amc23": "amc23",
    "aime24": "aime24",
    "aime25": "aime25",
    "minerva": "minerva_math",
    "olympiadbench": "olympiadbench_math_en",
}
SAMPLES_PER_PROBLEM, PROBLEMS = 2, 4

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (DATA / "math_train.jsonl").is_file(),
        reason="the real sets are not here; DPPO_DATA_DIR names their directory",
    ),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example's files, from the first rows of each training set."""
    folder = tmp_path_factory.mktemp("real")
    for name in ("gsm8k", "math"):
        rows = (DATA / f"{name}_train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
        (folder / f"{name}.first").write_text("".join(rows[:600]), encoding="utf-8")
    prepare(folder / "gsm8k.first", folder / "math.first", folder / "made")
    return folder / "made"


def _settings(made: Path, run_dir: Path, **more: Any) -> list[str]:
    settings: dict[str, Any] = {
        "run_dir": run_dir,
        "model.hf_path": made / "model",
        "data.train_sets.gsm8k.path": made / "gsm8k.jsonl",
        "data.train_sets.math.path": made / "math.parquet",
        "sft.examples_path": made / "sft.jsonl",
        "sft.steps": 25,
        "rollout.prompts_per_step": 8,
        "rollout.completions_per_prompt": 4,
        "eval.samples": SAMPLES_PER_PROBLEM,
        "threads_per_rank": 1,
    }
    for name, file in SETS.items():
        settings[f"data.eval_sets.{name}.path"] = DATA / f"{file}.jsonl"
        settings[f"data.eval_sets.{name}.limit"] = PROBLEMS
        settings[f"data.eval_sets.{name}.max_prompt_tokens"] = 900
    settings |= {key.replace("__", "."): value for key, value in more.items()}
    return [str(REPOSITORY / "examples" / "real_math" / "job.yaml"), *(f"{k}={v}" for k, v in settings.items())]


def _check_run(run_dir: Path, steps: int) -> None:
    rows = read_metrics(run_dir)
    assert [row["step"] for row in rows] == list(range(steps + 1))
    for row in rows[1:]:
        assert row["reward/failed_count"] == 0 and 0 <= row["reward/mean"] <= 1
        ledger = {entry["name"]: entry["label"] for entry in row["prune/ledger"]}
        assert ledger["data/overlong_prompts"] == "biased", "the rows left out must show in every step"
    for name in SETS:
        assert 0 <= rows[0][f"eval/{name}/pass@1"] <= rows[0][f"eval/{name}/pass@{SAMPLES_PER_PROBLEM}"] <= 1
        prompt = (run_dir / "prompts" / f"eval-{name}.txt").read_text(encoding="utf-8")
        assert prompt.startswith("<|im_start|>user\n") and prompt.endswith("</think>\n\n"), "the template was not used"


def test_train_evaluate_resume_and_score_alone(made: Path, tmp_path: Path) -> None:
    """Three steps on two formats and six sets; one more step with one more set; then the finished model alone gives,
    from its own samples file and by grading it again, the scores that the run had at its end."""
    run_dir = tmp_path / "run"
    assert main(["train", *_settings(made, run_dir)]) == 0
    _check_run(run_dir, steps=3)
    gsm8k = {
        "data__eval_sets__gsm8k__path": DATA / "gsm8k_test.jsonl",
        "data__eval_sets__gsm8k__limit": PROBLEMS,
        "data__eval_sets__gsm8k__max_prompt_tokens": 900,
    }
    assert main(["train", *_settings(made, run_dir, steps=4, **gsm8k)]) == 0
    _check_run(run_dir, steps=4)
    last = read_metrics(run_dir)[-1]
    summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    assert set(summary["eval_after"]) == {*SETS, "gsm8k"}
    out, again = tmp_path / "alone", tmp_path / "again"
    assert main(["eval", str(run_dir), "--out", str(out)]) == 0
    assert main(["eval", "--rescore", str(out / SAMPLES), "--out", str(again)]) == 0
    for results in (out, again):
        scores = json.loads((results / "results.json").read_text(encoding="utf-8"))["metrics"]
        for name in (*SETS, "gsm8k"):
            assert scores[f"eval/{name}/pass@1"] == last[f"eval/{name}/pass@1"], (name, results)
    samples = [json.loads(line) for line in (out / SAMPLES).read_text(encoding="utf-8").splitlines()]
    assert len(samples) == 7 * PROBLEMS * SAMPLES_PER_PROBLEM
    boxed = [sample for sample in samples if "\\boxed{" in sample["text"] and sample["extracted"] is not None]
    assert boxed, "SFT teaches to answer with a box: the grader saw none"


@needs("vllm")
def test_the_same_job_through_vllm(made: Path, tmp_path: Path, forked_vllm: Path) -> None:
    """A real server that the trainer starts, with a BPE tokenizer and an end of turn that is not the end of sequence:
    engine and actor agree about every token, and the six sets are sampled several times at once."""
    run_dir = tmp_path / "run"
    vllm = local_settings("vllm") | {"rollout__servers__python": str(forked_vllm)}
    assert main(["train", *_settings(made, run_dir, sft__steps=3, **vllm)]) == 0
    _check_run(run_dir, steps=3)
    for row in read_metrics(run_dir)[1:]:
        assert (row["mismatch/logprob_abs_diff_mean"] or 0.0) < 1e-3  # null where no answer differs in its reward
