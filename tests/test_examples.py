"""The examples of docs/extending.md run as they stand, and the page shows no other code than theirs."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
from support.job import REPOSITORY, job_config, read_metrics, settings
from support.launch import run_ranks
from support.tiny import FAMILIES, write_model

sys.path.insert(0, str(Path(__file__).parent / "pruning"))
from label_cases import Case, make_outcomes
from test_pruning_labels import check

from dppo_megatron.config import load_config
from dppo_megatron.config.schema import Config
from dppo_megatron.config.selection import selection_settings
from dppo_megatron.job import prepare_job
from dppo_megatron.pruning import StepCost
from dppo_megatron.rollout.engine import Request, Sampling
from dppo_megatron.run import Run
from dppo_megatron.selection import Selector
from dppo_megatron.train import train
from dppo_megatron.types import Completion, Grade, Prompt
from dppo_megatron.workbench.quickstart.tiny_model import make_tokenizer
from examples.custom_engine import UniformEngine
from examples.custom_grader import brevity, last_number

PAGE = (REPOSITORY / "docs" / "extending.md").read_text(encoding="utf-8")


# ------------------------------------------------------------------------------------------------- the page


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL), ids=lambda text: text[:30])
def test_python_on_the_page_is_in_an_example(block: str) -> None:
    """Word for word, so what is shown is what the tests below run."""
    assert any(block in path.read_text(encoding="utf-8") for path in (REPOSITORY / "examples").glob("*.py"))


def test_settings_on_the_page_are_settings(files: Path, tmp_path: Path) -> None:
    """Every command line is read by the trainer's own reader, on top of a small job's settings."""
    lines = PAGE.replace("\\\n", " ").splitlines()
    commands = [line.split()[2:] for line in lines if line.startswith("dppo-megatron train ")]
    assert len(commands) >= 4
    for config, *given in commands:
        assert config == "configs/quickstart.yaml"
        load_config(str(REPOSITORY / config), [*settings(files, tmp_path / "run"), *given])


def test_paths_on_the_page_exist() -> None:
    """Files and directories in backticks, from the root of the repository or from the package."""
    named = re.findall(r"`([\w./]+(?:\.py|\.md|\.yaml|/))`", PAGE)
    missing = [name for name in named if not any((REPOSITORY / part / name).exists() for part in ("", "dppo_megatron"))]
    assert named and not missing


def test_lines_that_the_diffs_build_on_exist() -> None:
    """The page's diffs still fit the package."""
    replaced = 0
    for block in re.findall(r"```diff\n(.*?)```", PAGE, re.DOTALL):
        source = ""
        for line in block.splitlines():
            if line.startswith("--- "):
                source = (REPOSITORY / line.split()[1]).read_text(encoding="utf-8")
            elif line[:1] in "- ":
                assert f"\n{line[1:]}\n" in source, line
                replaced += 1
    assert replaced


# ------------------------------------------------------------------------------------------------- loss, grader, policy


def _train(files: Path, run_dir: Path, engine: bool = False) -> None:
    plugged = {
        "objective__function": "examples.custom_loss:soft_gate",
        "objective__token_values": "examples.custom_tokens:repeats",
        "reward__functions__right__function": "examples.custom_grader:last_number",
        "reward__functions__short__function": "examples.custom_grader:brevity",
        "reward__functions__short__weight": 0.1,
        "pruning__prompt__method": "examples.custom_policy:Varied",
        "pruning__completion__method": "examples.custom_policy:Cheap",
    }
    job = prepare_job(job_config(files, run_dir, steps=4, sft__steps=5, **plugged), 1)
    if engine:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("dppo_megatron.steps.loop.make_engine", lambda job, *_: UniformEngine(job.tokenizer))
            with Run(job) as run:
                train(run)
        return
    with Run(job) as run:
        train(run)


def test_a_run_with_all_of_them(files: Path, tmp_path: Path) -> None:
    """Loss, graders and policies of one's own in one run: each has acted, and the ledger says what it did."""
    run_ranks(_train, 1, files, tmp_path / "run")
    rows = read_metrics(tmp_path / "run")[1:]
    assert len(rows) == 4
    for row in rows:
        assert 0 < row["train/gate"] <= 1  # the loss's own diagnostic
        assert 0 < row["reward/short"] <= 1
        assert row["reward/mean"] == pytest.approx(row["reward/right"] + 0.1 * row["reward/short"])
        assert {line["label"] for line in row["prune/ledger"]} <= {"exact", "unbiased"}
    assert any(row["prune/completions_trained"] < row["prune/completions_generated"] for row in rows)


def test_a_run_with_the_example_engine(files: Path, tmp_path: Path) -> None:
    """The loop trains on what it is given: tokens all over the vocabulary, whose log-probability is that of chance."""
    run_ranks(_train, 1, files, tmp_path / "run", True)
    rows = read_metrics(tmp_path / "run")[1:]
    assert len(rows) == 4
    assert all(row["tokens/generated"] > 0 and row["mismatch/logprob_abs_diff_mean"] > 0.1 for row in rows)


@pytest.mark.parametrize(
    ("prompt", "completion"),
    [("examples.custom_policy:Varied", "none"), ("none", "examples.custom_policy:Cheap")],
)
def test_the_policies_are_unbiased(prompt: str, completion: str) -> None:
    """Every draw of a step in the middle of a run, enumerated: the expectation is the full batch's."""
    config = Config(steps=400)
    config.rollout.prompts_per_step, config.rollout.completions_per_prompt = 4, 3
    config.rollout.sampling.max_completion_tokens = 12
    config.pruning.prompt.method, config.pruning.completion.method = prompt, completion
    config.pruning.prompt.warmup_epochs = 0.0
    labels = set()
    for seed in range(4):
        rng = np.random.default_rng(seed)
        selector = Selector(selection_settings(config), 8)
        case = Case(config, selector, 1, selector.state_dict(), make_outcomes(rng, 8, 3, binary=True))
        for step in (1, 2, 3):
            case.outcomes = make_outcomes(rng, 8, 3, binary=True)
            case.run()
            selector.feedback(StepCost(step, 1.0, 1.0, 0.1))
            case.step, case.state = step + 1, selector.state_dict()
        labels.add(check(case))
    assert labels - {"exact"} == {"unbiased"}


@pytest.mark.parametrize(
    ("text", "answer", "reward"),
    [
        ("1 + 2 = 3", "3", 1.0),
        ("3 then 4", "3", 0.0),
        ("1,000.0", "1000", 1.0),
        ("minus -7", "-7", 1.0),
        ("", "3", 0.0),
        ("no number {{{", "3", 0.0),
        ("9" * 100_000, "3", 0.0),
    ],
)
def test_the_grader_has_a_grade_for_every_text(text: str, answer: str, reward: float) -> None:
    grade = last_number(text, answer, {})
    assert isinstance(grade, Grade) and grade.reward == reward
    assert 0 < brevity(text, answer) <= 1


# ------------------------------------------------------------------------------------------------- engine


def _tokens(rank_requests: list[Request], sampling: Sampling) -> dict[int, Completion]:
    engine = UniformEngine(make_tokenizer())
    engine.start(rank_requests, sampling)
    return engine.finish()


def test_the_engine_keeps_the_contract() -> None:
    """Each request is held by one rank, groups stay whole, and tokens do not depend on the number of ranks."""
    prompts = [Prompt(i, "", (3, 4), "", "") for i in range(3)]
    requests = [Request(prompt, index, 1) for prompt in prompts for index in range(4)]
    sampling = Sampling(50, temperature=1.0, seed=0, stop_token_ids=(5,))
    alone = _tokens(requests, sampling)
    shares = run_ranks(_tokens, 2, requests, sampling)
    assert sorted([*shares[0], *shares[1]]) == list(range(12))
    assert {position // 4 for position in shares[0]}.isdisjoint(position // 4 for position in shares[1])
    vocabulary = len(make_tokenizer())
    for position, completion in {**shares[0], **shares[1]}.items():
        assert completion.token_ids.tolist() == alone[position].token_ids.tolist()
        np.testing.assert_allclose(np.exp(completion.logprobs), 1 / vocabulary, rtol=1e-6)
        assert (completion.finish_reason == "stop") == (completion.token_ids[-1] in (5, make_tokenizer().eos_token_id))


# ------------------------------------------------------------------------------------------------- model family


@pytest.mark.parametrize("family", FAMILIES)
def test_the_weight_table_agrees_with_transformers(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the script sees what does not: a table without Qwen3's norms, say."""
    path = write_model(tmp_path / family, family=family)
    script = runpy.run_path(str(REPOSITORY / "examples" / "weight_table.py"))
    assert script["main"](str(path)) == 0
    assert "every name and shape" in capsys.readouterr().out
    rows = {"output_layer.weight": ((1, 1), ("lm_head.weight",))}
    monkeypatch.setattr("dppo_megatron.weights.mapping._rows", lambda architecture: rows)
    assert script["main"](str(path)) == 1
    assert "not in the table" in capsys.readouterr().out
