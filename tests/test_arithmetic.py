"""The quickstart's problems and its tiny model: nothing leaks from held-out to training, every worked line is true
arithmetic by an independent calculation, the same seed gives the same bytes, and transformers loads the result."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dppo_megatron.rewards.functions import final_answer
from dppo_megatron.types import UserError
from dppo_megatron.workbench.quickstart.make import LEVELS, write_task
from dppo_megatron.workbench.quickstart.tiny_model import write_tiny_qwen3

ROOT = Path(__file__).resolve().parents[1]
SPLITS = ("train", "heldout", "sft")
Rows = list[dict[str, Any]]


def read(directory: Path) -> dict[str, Rows]:
    return {split: [json.loads(line) for line in (directory / f"{split}.jsonl").open()] for split in SPLITS}


def bytes_of(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def evaluate(expression: str) -> int:
    """Left to right over + and -; not Python's parser, so that a malformed text cannot pass."""
    assert re.fullmatch(r"\d+([+-]\d+)*", expression), expression
    return sum(int(term) for term in re.findall(r"[+-]?\d+", expression))


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Rows]:
    directory = tmp_path_factory.mktemp("task")
    write_task(directory, seed=0)
    return read(directory)


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint") / "model"
    write_tiny_qwen3(directory, seed=0)
    return directory


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_no_problem_is_shared(tmp_path: Path, seed: int) -> None:
    write_task(tmp_path, seed)
    problems = {split: [row["problem"] for row in rows] for split, rows in read(tmp_path).items()}
    assert len(set(problems["train"])) == len(problems["train"]) == 512
    assert len(set(problems["heldout"])) == len(problems["heldout"]) == 384
    assert not set(problems["train"]) & set(problems["heldout"])
    assert not set(problems["sft"]) & {*problems["train"], *problems["heldout"]}


@pytest.mark.parametrize("split", SPLITS)
def test_answers_are_right(task: dict[str, Rows], split: str) -> None:
    for row in task[split]:
        assert row["problem"].endswith("=")
        assert row["answer"] == str(evaluate(row["problem"].removesuffix("="))), row


def test_every_worked_step_is_true_and_leads_on(task: dict[str, Rows]) -> None:
    """Each equation holds, starts from the result before it and takes the next operation; the last is the answer."""
    worked = 0
    for row in task["sft"]:
        *steps, conclusion = row["completion"].split("\n")
        assert conclusion == f"#### {row['answer']}"
        if not steps:
            continue
        worked += 1
        left, *operations = re.findall(r"[+-]?\d+", row["problem"])
        assert len(steps) == len(operations), row
        for step, operation in zip(steps, operations, strict=True):
            expression, result = step.split("=")
            assert expression == left + operation, row
            assert result == str(evaluate(expression)), row
            left = result
        assert left == row["answer"]
    assert worked > len(task["sft"]) / 4


def test_levels_and_guesses_have_their_shares(task: dict[str, Rows]) -> None:
    """Shares of levels are exact up to rounding; guesses are drawn, so within 4 standard errors (below 0.04)."""
    for split in ("train", "heldout"):
        counts = Counter(row["source"] for row in task[split])
        for level in LEVELS:
            assert abs(counts[level.name] - level.problem_share * len(task[split])) < 1
    for level in LEVELS:
        rows = [row for row in task["sft"] if row["source"] == level.name]
        assert abs(len(rows) - level.example_share * len(task["sft"])) < 1
        if rows:
            guessed = sum(row["completion"].startswith("####") for row in rows) / len(rows)
            assert abs(guessed - level.guess_share) < 0.04, level.name


def test_the_grader_accepts_every_example(task: dict[str, Rows]) -> None:
    for row in task["sft"]:
        assert final_answer(row["completion"], row["answer"]) == 1.0
        assert final_answer(row["completion"], row["answer"] + "1") == 0.0


def test_the_seed_decides_everything(tmp_path: Path) -> None:
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        write_task(tmp_path / name, seed, num_train=64, num_heldout=64, num_sft=64)
        write_tiny_qwen3(tmp_path / name / "model", seed)
    a, b, c = (bytes_of(tmp_path / name) for name in "abc")
    assert a == b
    assert {name for name in a if a[name] != c[name]} == {f"{s}.jsonl" for s in SPLITS} | {"model/model.safetensors"}


def test_the_model_does_not_depend_on_global_random_state(tmp_path: Path) -> None:
    before = torch.random.get_rng_state()
    write_tiny_qwen3(tmp_path / "a", seed=0)
    torch.manual_seed(123)
    write_tiny_qwen3(tmp_path / "b", seed=0)
    torch.random.set_rng_state(before)
    assert bytes_of(tmp_path / "a") == bytes_of(tmp_path / "b")


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({"num_train": 0}, "num_train = 0"),
        ({"num_train": 5000}, "level_1"),
    ],
)
def test_impossible_counts_are_refused(tmp_path: Path, counts: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        write_task(tmp_path / "task", 0, **counts)
    assert not (tmp_path / "task").exists()


def test_tokenizer_round_trip_and_lengths(task: dict[str, Rows], model_directory: Path) -> None:
    """Every text comes back unchanged, holds no unknown token, and fits the limits that the quickstart sets."""
    tokenizer = AutoTokenizer.from_pretrained(model_directory)
    assert tokenizer.eos_token_id is not None and tokenizer.pad_token_id is not None
    assert tokenizer.eos_token_id != tokenizer.pad_token_id
    for row in task["sft"][:2000] + task["train"] + task["heldout"]:
        for text, limit in ((row["problem"], 16), (row.get("completion", ""), 55)):
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            assert tokenizer.decode(ids) == text
            ended = [*ids, tokenizer.eos_token_id, tokenizer.pad_token_id]
            assert tokenizer.decode(ended, skip_special_tokens=True) == text
            assert tokenizer.unk_token_id not in ids
            assert len(ids) <= limit
    assert tokenizer("7 x", add_special_tokens=False)["input_ids"].count(tokenizer.unk_token_id) == 2


def test_prompt_and_completion_tokens_join(task: dict[str, Rows], model_directory: Path) -> None:
    """Tokenizing the parts or the whole gives the same ids: what was sampled is what is trained."""
    tokenizer = AutoTokenizer.from_pretrained(model_directory)
    for row in task["sft"][:200]:
        texts = (row["problem"], row["completion"], row["problem"] + row["completion"])
        problem, completion, both = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts)
        assert problem + completion == both


@pytest.mark.parametrize("tied", [False, True])
def test_the_checkpoint_loads_and_splits(tmp_path: Path, tied: bool) -> None:
    write_tiny_qwen3(tmp_path / "model", seed=0, tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert all(p.dtype == torch.float32 and torch.isfinite(p).all() for p in model.parameters())
    config = model.config
    assert config.num_hidden_layers % 2 == config.num_attention_heads % 2 == config.num_key_value_heads % 2 == 0
    assert config.vocab_size == len(AutoTokenizer.from_pretrained(tmp_path / "model"))
    logits = model(torch.tensor([[3, 4, 5]])).logits
    assert logits.shape == (1, 3, config.vocab_size) and torch.isfinite(logits).all()
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


SMALL = ["--train", "32", "--heldout", "32", "--sft", "64"]


def run_tool(*arguments: str) -> int:
    """The tool's exit code, in this process: importing transformers again for every case would take seconds."""
    main = runpy.run_module("dppo_megatron.workbench.quickstart.make")["main"]
    try:
        return int(main([*SMALL, *arguments]))
    except SystemExit as stop:
        assert isinstance(stop.code, int)
        return stop.code


def test_the_tool_writes_once_and_overwrites_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "quickstart"
    assert run_tool("--out", str(out)) == 0
    assert "written" in capsys.readouterr().out
    content = bytes_of(out)
    assert {"train.jsonl", "heldout.jsonl", "sft.jsonl", "model/config.json"} <= set(content)
    assert run_tool("--out", str(out)) == 0
    assert "up to date" in capsys.readouterr().out
    assert run_tool("--out", str(out), "--seed", "1") == 2
    assert "holds something else" in capsys.readouterr().err
    assert bytes_of(out) == content
    assert sorted(p.name for p in out.parent.iterdir()) == ["quickstart"]


@pytest.mark.slow
def test_the_tool_runs_from_the_shell_the_same(tmp_path: Path) -> None:
    """Another process with another hash seed: the bytes are equal, so nothing depends on either."""
    command = [sys.executable, "-m", "dppo_megatron.workbench.quickstart.make", *SMALL, "--out", str(tmp_path / "a")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert run_tool("--out", str(tmp_path / "b")) == 0
    assert bytes_of(tmp_path / "a") == bytes_of(tmp_path / "b")


@pytest.mark.parametrize("arguments", [["--seed", "-1"], ["--train", "0"], ["--train", "100000"]])
def test_the_tool_explains_a_mistake(tmp_path: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_tool("--out", str(tmp_path / "out"), *arguments) == 2
    assert "error: " in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_tool_refuses_a_file_as_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("mine")
    assert run_tool("--out", str(tmp_path / "file")) == 2
    assert "is a file" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "mine"
