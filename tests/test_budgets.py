"""What strangers' programs and archives may take: a template, a gzip file, a huge problem, what a grader prints.

Each ends in a sentence within ten seconds of CPU time, children included; the clock of a busy machine is not asked.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow.parquet
import pytest
from transformers import PreTrainedTokenizerBase

from dppo_megatron.config.data import TrainSetConfig
from dppo_megatron.config.resolved_sets import check_data, train_set_configs
from dppo_megatron.config.schema import Config
from dppo_megatron.data import templates
from dppo_megatron.data.rows import read_file, read_rows
from dppo_megatron.data.sets import ProblemSet, load_set, stop_token_ids
from dppo_megatron.data.templates import check_template
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


ENDLESS = {
    "loops": "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}",
    "a billion of something": "{% for a in range(1000) %}{% for b in range(1000000) %}{% endfor %}{% endfor %}",
    "growing text": "{% set n = namespace(t='x') %}{% for a in range(99999) %}{% set n.t = n.t ~ n.t %}{% endfor %}",
    "itself": "{% macro m(n) %}{{ m(n) }}{{ m(n) }}{% endmacro %}{{ m(1) }}",
}


@pytest.mark.parametrize("source", ENDLESS)
def test_a_chat_template_that_computes_without_end(
    source: str, model: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"problem": "1+1?", "answer": "2"}) + "\n")
    tokenizer.chat_template = f"{ENDLESS[source]}{{{{ messages[0]['content'] }}}}"
    assert 2 * templates._TEMPLATE_CPU_S <= LIMIT_S  # stops each of the two below; the test need not wait so long
    monkeypatch.setattr(templates, "_TEMPLATE_CPU_S", 1.0)
    config = Config()
    config.model.hf_path = str(model)
    config.data.train_sets = {"s": TrainSetConfig(path=str(tmp_path / "a.jsonl"), template="chat_boxed")}
    with within_limit(), pytest.raises(UserError, match="chat template fails on this prompt: ") as ended:
        _loaded(tmp_path / "a.jsonl", tokenizer, template="chat_boxed")
    assert len(str(ended.value)) < 600
    with within_limit():
        assert stop_token_ids(config, tokenizer) == ()


def test_a_chat_template_that_raises_to_a_power(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    """One operation without end; two asterisks in its text are none."""
    settings = {"s": TrainSetConfig(path=str(tmp_path / "a.jsonl"), template="chat_boxed")}
    config = Config()
    config.data.train_sets = settings
    tokenizer.chat_template = "{{ 7 ** (7 ** 9) }}"
    with pytest.raises(UserError, match=r"raises to a power \(\*\*\)"):
        check_template(train_set_configs(config)["s"], tokenizer)
    tokenizer.chat_template = "**Question** {{ messages[0]['content'] }}"
    check_template(train_set_configs(config)["s"], tokenizer)


@pytest.mark.parametrize(
    ("name", "filling"),
    [
        *(("a.jsonl.gz", filling) for filling in (b" ", b"[")),
        *(("a.json.gz", filling) for filling in (b" ", b"[")),
        ("a.csv.gz", b"\0"),
    ],
    ids=ascii,
)
def test_a_gzip_file_that_unpacks_to_a_thousand_times_its_size(name: str, filling: bytes, tmp_path: Path) -> None:
    head = {"a.jsonl.gz": b'{"problem": "x", "answer": "1"}\n', "a.json.gz": b"[", "a.csv.gz": b"problem,answer\n"}
    with gzip.open(tmp_path / name, "wb", compresslevel=1) as file:
        file.write(head[name])
        for _ in range(8):
            file.write(filling * (2**24 // len(filling)))
    with within_limit(), pytest.raises(UserError, match=r"a\.\w+\.gz"):
        list(read_file(str(tmp_path / name)))


@pytest.mark.parametrize(
    ("rows", "length", "dictionary", "folder"),
    [
        (300_000, 100_000, False, ""),
        (300_000, 100_000, True, ""),
        (300_000, 100_000, False, "set/"),
        (100, 50_000_000, False, ""),
        (4096, 2_000_000, False, ""),
    ],
)
def test_a_table_that_repeats_one_string(rows: int, length: int, dictionary: bool, folder: str, tmp_path: Path) -> None:
    """A file of a kilobyte is rows of gigabytes: many, long, or in one batch more than a column may have; also where
    Arrow reads the column as a dictionary, and where the `datasets` library reads the file."""
    column = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * rows, pyarrow.int32()), ["x" * length])
    table = pyarrow.table({"problem": column, "answer": column})
    (tmp_path / folder).mkdir(exist_ok=True)
    path = tmp_path / folder / "train.parquet"
    pyarrow.parquet.write_table(table, path, compression="zstd", store_schema=dictionary)
    assert path.stat().st_size < 10_000
    with (
        within_limit(),
        pytest.raises(UserError, match=r"300 times its size; if that is right|\[0\]: the 256 rows .* than 1 GiB"),
    ):
        sum(1 for _ in read_rows(str(path.parent if folder else path), "", "train" if folder else ""))


def test_text_that_is_repeated_is_no_bomb(tmp_path: Path) -> None:
    """The same long instruction in each of 10,000 rows: 30 MB in 0.4."""
    rows = [{"problem": "You are careful. " * 180 + f"What is {n} + {n * n}?", "answer": str(n)} for n in range(10_000)]
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    assert sum(1 for _ in read_file(str(tmp_path / "a.jsonl.gz"))) == 10_000
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet", compression="zstd")
    assert sum(1 for _ in read_file(str(tmp_path / "a.parquet"))) == 10_000


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
