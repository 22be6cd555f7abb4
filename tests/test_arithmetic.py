"""The quickstart's problems and its tiny model: nothing leaks from held-out to training, every worked line is true
arithmetic by an independent calculation, the same seed gives the same bytes, and transformers loads the result."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from support.disk_faults import disk_fault
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import enable_progress_bar

from dppo_megatron.rewards.functions import final_answer
from dppo_megatron.types import UserError
from dppo_megatron.workbench.quickstart.make import LEVELS, Recipe, make_quickstart, write_task
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
    write_task(directory, Recipe(0))
    return read(directory)


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint") / "model"
    write_tiny_qwen3(directory, seed=0)
    return directory


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_no_problem_is_shared(tmp_path: Path, seed: int) -> None:
    write_task(tmp_path, Recipe(seed))
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
        write_task(tmp_path / name, Recipe(seed, num_train=64, num_heldout=64, num_sft=64))
        write_tiny_qwen3(tmp_path / name / "model", seed)
    a, b, c = (bytes_of(tmp_path / name) for name in "abc")
    assert a == b
    assert {name for name in a if a[name] != c[name]} == {f"{s}.jsonl" for s in SPLITS} | {"model/model.safetensors"}


def test_a_model_is_written_in_silence(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """`compare`, which writes one for each seed, had transformers' bar amid its own progress."""
    enable_progress_bar()
    write_tiny_qwen3(tmp_path / "model", seed=0)
    assert capfd.readouterr() == ("", "")


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
        write_task(tmp_path / "task", Recipe(0, **counts))
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


SMALL = Recipe(0, num_train=32, num_heldout=32, num_sft=64)


def test_the_quickstart_is_written_once_and_overwrites_nothing(tmp_path: Path) -> None:
    out = tmp_path / "new" / "quickstart"
    make_quickstart(out, SMALL)
    content = bytes_of(out)
    assert {"train.jsonl", "heldout.jsonl", "sft.jsonl", "model/config.json"} <= set(content)
    before = (out / "task.json").stat().st_mtime_ns
    make_quickstart(out, SMALL)
    assert (out / "task.json").stat().st_mtime_ns == before
    with pytest.raises(UserError, match="holds something other"):
        make_quickstart(out, SMALL._replace(seed=1))
    assert bytes_of(out) == content
    assert sorted(p.name for p in out.parent.iterdir()) == ["quickstart"]


@pytest.mark.slow
def test_the_quickstart_is_the_same_from_another_process(tmp_path: Path) -> None:
    """With another hash seed: the bytes are equal, so nothing depends on either."""
    code = "from pathlib import Path; from dppo_megatron.workbench.quickstart.make import Recipe, make_quickstart;"
    code += f"make_quickstart(Path({str(tmp_path / 'a')!r}), {SMALL!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    make_quickstart(tmp_path / "b", SMALL)
    assert bytes_of(tmp_path / "a") == bytes_of(tmp_path / "b")


@pytest.mark.parametrize("count", [0, 100_000])
def test_a_task_that_cannot_be_made_leaves_nothing(tmp_path: Path, count: int) -> None:
    with pytest.raises(UserError):
        make_quickstart(tmp_path / "out", SMALL._replace(num_train=count))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("room", [100, 100_000])
def test_a_disk_without_room_is_named_and_left_as_it_was(tmp_path: Path, room: int) -> None:
    """A file that may have so many bytes: of the rows, and of the model, which a library writes."""
    with disk_fault(tmp_path, "full", room), pytest.raises(UserError, match=f"--task {tmp_path}/out cannot be written"):
        make_quickstart(tmp_path / "out", SMALL)
    assert not list(tmp_path.iterdir())


def test_the_quickstart_refuses_a_file_as_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match="is a file"):
        make_quickstart(tmp_path / "file", SMALL)
    assert (tmp_path / "file").read_text() == "mine"
