"""What strangers' programs and files may take: a template, a huge problem, what a grader prints.

Each ends in a sentence within ten seconds of CPU time, children included; the clock of a busy machine is not asked.
"""

from __future__ import annotations

import json
import math
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from dppo_megatron.config.data import TrainSetConfig
from dppo_megatron.config.resolved_sets import check_data, train_set_configs
from dppo_megatron.config.schema import Config
from dppo_megatron.data.sets import ProblemSet, load_set, stop_token_ids
from dppo_megatron.rewards.functions import NamedFunction
from dppo_megatron.rewards.pool import Grader, GradeTask
from dppo_megatron.types import UserError
from dppo_megatron.weights.architecture import read_architecture
from dppo_megatron.weights.tokenizer import load_tokenizer
from dppo_megatron.workbench.quickstart.tiny_model import write_tiny_qwen3

LIMIT_S = 10.0


@contextmanager
def within_limit() -> Iterator[None]:
    began = os.times()
    yield
    assert sum(os.times()[:4]) - sum(began[:4]) < LIMIT_S
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 4 << 20  # KiB


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "model"
    write_tiny_qwen3(directory, seed=0)
    return directory


@pytest.fixture
def tokenizer(model: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(model, read_architecture(model))


def _loaded(path: Path, tokenizer: PreTrainedTokenizerBase, **own: object) -> ProblemSet:
    config = Config()
    config.data.train_sets = {"s": TrainSetConfig(path=str(path), **own)}  # type: ignore[arg-type]
    check_data(config)
    return load_set(train_set_configs(config)["s"], tokenizer)


def test_a_chat_template_that_calls_itself(model: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"problem": "1+1?", "answer": "2"}) + "\n")
    endless = "{% macro m(n) %}{{ m(n) }}{{ m(n) }}{% endmacro %}{{ m(1) }}"
    tokenizer.chat_template = f"{endless}{{{{ messages[0]['content'] }}}}"
    config = Config()
    config.model.hf_path = str(model)
    config.data.train_sets = {"s": TrainSetConfig(path=str(tmp_path / "a.jsonl"), template="chat_boxed")}
    with within_limit(), pytest.raises(UserError, match="chat template fails on this prompt: ") as ended:
        _loaded(tmp_path / "a.jsonl", tokenizer, template="chat_boxed")
    assert len(str(ended.value)) < 600
    with within_limit():
        assert stop_token_ids(config, tokenizer) == ()


def test_a_problem_of_60_megabytes(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    """Only its beginning is tokenized; it is left out, or named."""
    rows = [{"problem": "1+1?", "answer": "2"}, {"problem": "1 + " * 15_000_000, "answer": "2"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with within_limit():
        assert _loaded(tmp_path / "a.jsonl", tokenizer, overlong="filter").filtered == 1
    with within_limit(), pytest.raises(UserError, match=r"jsonl:2: the prompt has \d+ tokens, more than"):
        _loaded(tmp_path / "a.jsonl", tokenizer, overlong="error")


def test_what_graders_print_and_return(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Gigabytes printed, and hundreds of megabytes as a reason, an answer or facts."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    for name, completions in (
        ("prints_without_end", ["x"]),
        ("huge", ["reason", "facts", "answer", "failure", "pipe", "ok"]),
    ):
        function = NamedFunction("", f"hostile_graders:{name}", key="reward.function")
        with within_limit():
            pool = Grader([function], processes=1, timeout_s=30.0, memory_mb=2048)
            try:
                grades = pool.grade([GradeTask(text, "1", {}, text) for text in completions])
            finally:
                pool.close()
        printed = capfd.readouterr()
        assert len(printed.out) + len(printed.err) < 80e6
        for grade in grades:
            assert math.isnan(grade.reward) == bool(grade.failure)
            assert len(grade.failure) < 1000 and len(grade.why) < 20_000 and len(grade.extracted or "") < 20_000
        assert grades[-1].reward == 1.0
