"""Rows of every format come out the same, and whatever is wrong with a file is one sentence with its place."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chat_tokenizer import chat_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from dppo_megatron.config.data import EvalSetConfig, TrainSetConfig
from dppo_megatron.config.resolved_sets import ResolvedEvalSet, ResolvedSet, ResolvedTrainSet, train_set_configs
from dppo_megatron.config.schema import Config
from dppo_megatron.data.fields import get_field, parse_level
from dppo_megatron.data.sets import ProblemSet, load_set
from dppo_megatron.rewards.math.grader import grade_math
from dppo_megatron.types import UserError

ROWS = [
    {"problem": "What is 1 + 1?", "answer": "2", "source": "sums", "level": "Level 1"},
    {
        "problem": 'A "quoted", odd\nproblem: é 漢 \U0001f600',
        "answer": "\\frac{1}{2}",
        "source": "odd",
        "level": "Level 5",
    },
    {"problem": "Comma, and tab?", "answer": "3,4", "source": "sums", "level": ""},
]
TOKENIZER = chat_tokenizer()


def resolved(path: Path | str, **own: Any) -> ResolvedSet:
    """A set's settings as a job has them."""
    config = Config()
    config.data.train_sets = {"s": TrainSetConfig(**{"path": str(path)} | own)}
    return train_set_configs(config)["s"]


def load(path: Path | str, **own: Any) -> ProblemSet:
    return load_set(resolved(path, **own), TOKENIZER)


def _lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def _write_csv(path: Path, delimiter: str) -> None:
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(ROWS[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(ROWS)


def _write_repository(path: Path) -> None:
    """As `hf download` leaves it: split by file name, no metadata."""
    (path / "data").mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(ROWS), path / "data" / "train-00000-of-00001.parquet")


WRITERS: dict[str, Callable[[Path], object]] = {
    "rows.jsonl": lambda p: p.write_text(_lines(ROWS), encoding="utf-8"),
    "rows.ndjson": lambda p: p.write_text(_lines(ROWS).replace("\n", "\r\n\r\n"), encoding="utf-8"),
    "bom.jsonl": lambda p: p.write_bytes(b"\xef\xbb\xbf" + _lines(ROWS).encode()),
    "rows.jsonl.gz": lambda p: p.write_bytes(gzip.compress(_lines(ROWS).encode())),
    "list.json": lambda p: p.write_text(json.dumps(ROWS, ensure_ascii=False, indent=2), encoding="utf-8"),
    "data.json": lambda p: p.write_text(json.dumps({"version": 1, "data": ROWS}), encoding="utf-8"),
    "lines.json": lambda p: p.write_text(_lines(ROWS), encoding="utf-8"),
    "rows.csv": lambda p: _write_csv(p, ","),
    "rows.tsv": lambda p: _write_csv(p, "\t"),
    "ROWS.TSV": lambda p: _write_csv(p, "\t"),
    "rows.tsv.csv": lambda p: _write_csv(p, ","),
    "rows.parquet": lambda p: pq.write_table(pa.Table.from_pylist(ROWS), p, row_group_size=2),
    "saved": lambda p: datasets.Dataset.from_list(ROWS).save_to_disk(p),
    "repository": _write_repository,
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_is_the_same_set(tmp_path: Path, name: str) -> None:
    """Problem, answer, source and level to the character, and so one fingerprint for all formats."""
    WRITERS[name](tmp_path / name)
    found = load(tmp_path / name)
    assert [p.text for p in found.prompts] == [row["problem"] for row in ROWS]
    assert [p.answer for p in found.prompts] == [row["answer"] for row in ROWS]
    assert [p.source for p in found.prompts] == [row["source"] for row in ROWS]
    assert [p.level for p in found.prompts] == [1.0, 5.0, None]
    assert [p.index for p in found.prompts] == [0, 1, 2]
    assert [TOKENIZER.decode(p.token_ids) for p in found.prompts] == [row["problem"] for row in ROWS]
    assert all(p.row["answer"] == row["answer"] for p, row in zip(found.prompts, ROWS, strict=True))
    reference = tmp_path / "reference.jsonl"
    reference.write_text(_lines(ROWS), encoding="utf-8")
    assert found.fingerprint == load(reference).fingerprint


def test_origins_name_lines_and_rows(tmp_path: Path) -> None:
    """Lines from 1, as editors count, where a file has them; a quoted line break does not shift what follows."""
    for name, expected in (("rows.csv", [2, 3, 5]), ("rows.ndjson", [1, 3, 5])):
        WRITERS[name](tmp_path / name)
        assert [p.origin for p in load(tmp_path / name).prompts] == [f"{tmp_path / name}:{n}" for n in expected]
    WRITERS["rows.parquet"](tmp_path / "rows.parquet")
    assert load(tmp_path / "rows.parquet").prompts[2].origin == f"{tmp_path / 'rows.parquet'}[2]"


def test_splits_by_name(tmp_path: Path) -> None:
    """The named split of a saved directory; without a name, or with a wrong one, those that are there."""
    test = datasets.Dataset.from_list(ROWS[:1])
    datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS), "test": test}).save_to_disk(tmp_path / "both")
    assert len(load(tmp_path / "both", split="test").prompts) == 1
    assert len(load(tmp_path / "both", split="train").prompts) == 3
    for own, said in (({}, "name its split; it has: train, test"), ({"split": "dev"}, "has no split 'dev'")):
        with pytest.raises(UserError, match=said):
            load(tmp_path / "both", **own)
    WRITERS["saved"](tmp_path / "one")
    with pytest.raises(UserError, match="saved as one set"):
        load(tmp_path / "one", split="dev")
    with pytest.raises(UserError, match="neither a directory saved by `datasets` nor"):
        (tmp_path / "empty").mkdir()
        load(tmp_path / "empty")


def test_hub_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence each: not in the cache while offline, no name of a set, the library missing or too old."""
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"hub:nobody/nothing-here: offline .* not in the local cache"):
        load("hub:nobody/nothing-here", split="train")
    with pytest.raises(UserError, match="expected hub:owner/name"):
        load("hub:a/b/c d")
    monkeypatch.setattr(datasets, "__version__", "3.6.0")
    with pytest.raises(UserError, match="needs datasets 4 or later"):
        load("hub:nobody/nothing-here")
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(UserError, match=r"needs the extra 'data': pip install 'dppo_megatron\[data\]'"):
        load("hub:nobody/nothing-here")


NUMBERS = ["18", "-3", "0", "0.10", "1.50", "1e3", "2.5E-3", "12345678901234567890123", "-0.0", "1" * 4000]


@pytest.mark.parametrize("number", NUMBERS)
def test_number_keeps_its_text(tmp_path: Path, number: str) -> None:
    """An answer that is a number is compared as it is written: 0.10 is not 0.1, and 1e3 not 1000.0."""
    row = f'{{"problem": "p", "n": 0.5, "answer": {number}}}'
    for name, text in (("a.jsonl", f"{row}\n"), ("b.json", f"[{row}]"), ("c.json", f'{{"data": [{row}]}}')):
        (tmp_path / name).write_text(text)
        prompt = load(tmp_path / name).prompts[0]
        assert prompt.answer == number
        assert prompt.row["n"] == 0.5 and prompt.row["answer"] == json.loads(number)


def test_numbers_of_parquet(tmp_path: Path) -> None:
    """A float32 column says what was put in, and a decimal keeps its places."""
    for column, expected in (
        (pa.array([0.1, 3.0], pa.float32()), ["0.1", "3.0"]),
        (pa.array([18, -2], pa.int32()), ["18", "-2"]),
        (pa.array([0.1, 1e22], pa.float64()), ["0.1", "1e+22"]),
        (pa.array([Decimal("1.50"), Decimal("2.00")]), ["1.50", "2.00"]),
    ):
        pq.write_table(pa.table({"problem": ["a", "b"], "answer": column}), tmp_path / "n.parquet")
        assert [p.answer for p in load(tmp_path / "n.parquet").prompts] == expected


def test_numbers_inside_objects_of_parquet(tmp_path: Path) -> None:
    """verl's answers are one level down: a short float there was read as 0.10000000149011612, which no grader takes
    for 0.1; and a float16 at the top as the float32 that it is."""
    for kind in (pa.float16(), pa.float32(), pa.float64()):
        answers = pa.array([0.1, 7.6], kind)
        table = pa.table(
            {
                "problem": ["a", "b"],
                "answer": answers,
                "reward_model": pa.StructArray.from_arrays([answers], ["ground_truth"]),
                "others": pa.array([[0.1], []], pa.list_(kind)),
            }
        )
        pq.write_table(table, tmp_path / "n.parquet")
        for own in ({}, {"answer_field": "reward_model.ground_truth"}):
            prompts = load(tmp_path / "n.parquet", **own).prompts
            assert [one.answer for one in prompts] == ["0.1", "7.6"], kind
            assert [one.row["others"] for one in prompts] == [[0.1], []]


keys = st.text(alphabet="ab.", min_size=1, max_size=4)
trees = st.recursive(st.integers(), lambda inner: st.dictionaries(keys, inner, max_size=3), max_leaves=6)


def _everywhere(tree: Any, path: str = "") -> dict[str, list[Any]]:
    """Every dotted path of a tree with all that stands there: an independent, exhaustive reading."""
    found: dict[str, list[Any]] = {}
    for key, value in tree.items() if isinstance(tree, dict) else ():
        here = f"{path}.{key}" if path else key
        found.setdefault(here, []).append(value)
        for below, values in _everywhere(value, here).items():
            found.setdefault(below, []).extend(values)
    return found


@given(st.dictionaries(keys, trees, max_size=4))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_dotted_fields_reach_everything(tree: dict[str, Any]) -> None:
    """Whatever stands at a dotted path is found under it, a literal key first; nothing else ever is."""
    paths = _everywhere(tree)
    for path, values in paths.items():
        found = get_field(tree, path)
        assert any(found is value or found == value for value in values)
        if path in tree:
            assert found == tree[path]
    assert get_field(tree, "c") is None and get_field(tree, "a.c.b") is None


LONG = "[" * 3000 + "]" * 3000
# name: (answer or problem as JSON text, what is said)
REFUSED = {
    "list": (
        '"answer": ["2", "3"]',
        "'answer' is a list; an answer is text or a number; a list of answers must be one",
    ),
    "object": (
        '"answer": {"style": "rule", "ground_truth": "2"}',
        "'answer' is an object; .*dots reach into objects: answer.style, answer.ground_truth",
    ),
    "null": ('"answer": null', "'answer' is null"),
    "true": ('"answer": true', "'answer' is true; an answer is text or a number"),
    "nan": ('"answer": NaN', "'answer' is nan; an answer is text or a finite number"),
    "infinity": ('"answer": -Infinity', "'answer' is -inf"),
    "too large": ('"answer": 1e999', "'answer' is inf"),
    "empty": ('"answer": ""', "'answer' is empty"),
    "blank": ('"answer": " \\n "', "'answer' is blank"),
    "surrogate": ('"answer": "\\ud800"', r"'answer' holds a lone surrogate \(\\ud800\)"),
    "nul": ('"answer": "1\\u0000"', "'answer' holds a NUL"),
    "absent": ('"solution": "2"', "the row lacks the field 'answer'; it has: problem, solution.*MATH's layout"),
    "problem": ('"answer": "2", "problem": 5', 'not valid JSON: the key "problem" appears twice'),
    "source": ('"answer": "2", "source": ["a"]', "'source' is a list; the name of a subset is text"),
    "huge": ('"answer": ' + "9" * 5000, "not valid JSON: a number has more than 4,300 digits; write it as text"),
    "deep": (f'"answer": "2", "x": {LONG}', "not valid JSON: it is nested too deeply"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_answer_is_refused(tmp_path: Path, case: str) -> None:
    """By file and line, in JSON Lines and in a JSON list."""
    inside, said = REFUSED[case]
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"problem": "1", "answer": "2"}}\n\n{{"problem": "p", {inside}}}\n')
    with pytest.raises(UserError, match=r"rows\.jsonl:3: " + said):
        load(path)
    path = tmp_path / "rows.json"
    path.write_text(f'[{{"problem": "1", "answer": "2"}}, {{"problem": "p", {inside}}}]')
    with pytest.raises(UserError, match=said.partition(":")[0].partition(";")[0]):
        load(path)


def test_what_is_no_problem_is_refused(tmp_path: Path) -> None:
    """Numbers, empty lists and half messages are no problems, and verl's layout is recognised with its settings."""
    for problem, said in (
        (5, "'problem' is a number; a problem is text or a list of messages"),
        ([], "'problem' is a list"),
        ({}, "'problem' is an object"),
        (["1+1"], r"'problem\[0\]' must be a message with role and content, got text"),
        ([{"role": "user"}], r"'problem\[0\]' must be a message"),
        ([{"role": "human", "content": "x"}], r"'problem\[0\].role' is 'human'; known roles"),
        ([{"role": "user", "content": None}], r"'problem\[0\].content' is null"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"content\[0\]' must be .*prompts are text only"),
        (
            [{"role": "user", "content": "x"}],
            r"needs the tokenizer.s chat template; set data.train_sets.s.apply_chat_template=true,.* The text of the"
            r" last turn alone: data.train_sets.s.problem_field=problem\.0\.content$",
        ),
    ):
        (tmp_path / "p.jsonl").write_text(json.dumps({"problem": problem, "answer": "1"}) + "\n")
        with pytest.raises(UserError, match=said):
            load(tmp_path / "p.jsonl")
    verl = {"data_source": "m", "prompt": [{"role": "user", "content": "x"}], "reward_model": {"ground_truth": "1"}}
    (tmp_path / "v.jsonl").write_text(json.dumps(verl) + "\n")
    hint = (
        "verl's layout: data.train_sets.s.problem_field=prompt data.train_sets.s.answer_field=reward_model.ground_truth"
    )
    with pytest.raises(UserError, match=hint):
        load(tmp_path / "v.jsonl")


def test_graders_know_a_row_by_whatever_names_it_has(tmp_path: Path) -> None:
    """Digits stated by OCW, a name that a question asks for, and OlympiadBench's own files, whose hint names settings
    that keep every answer; the row's own fields stay."""
    who = "Petya will receive more money"
    rows: list[dict[str, Any]] = [
        {"question": "How many?", "final_answer": "4.5e33", "data_source": "OCW", "said": "4.49e33"},
        {"question": "Who will receive more?", "final_answer": who, "said": "Petya", "source": "own"},
        {"question": "Which two?", "final_answer": ["3", "4"], "said": "4, 3"},
        {"question": "Root?", "final_answer": ["1.414"], "error": "1e-1", "said": "1.41"},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text(_lines(rows[::-1]))
    with pytest.raises(UserError, match=r"OlympiadBench's layout: .*answer_field=final_answer .*answer_from=all"):
        load(path)
    own = {"problem_field": "question", "answer_field": "final_answer", "source_field": "data_source"}
    found = load(path, **own, answer_from="all")
    assert not found.notes and [one.answer for one in found.prompts] == ["1.414", "3, 4", who, "4.5e33"]
    for one in found.prompts:
        assert grade_math(f"\\boxed{{{one.row['said']}}}", one.answer, one.row).reward == 1.0, one
    assert found.prompts[2].row["source"] == "own" and "source" not in found.prompts[1].row
    assert "1 rows have several answers, of which answer_from=last" in load(path, **own, answer_from="last").notes[0]


GOOD = '{"problem": "1", "answer": "2"}\n'
# name of the file: (bytes, what is said)
BROKEN = {
    "latin1.jsonl": (
        GOOD.encode() + '{"problem": "é", "answer": "2"}'.encode("latin-1"),
        r":2: not UTF-8 .*iconv -f latin1",
    ),
    "latin1.json": ('[\n{"problem": "é"}]'.encode("latin-1"), r"latin1.json:2: not UTF-8"),
    "latin1.csv": ("problem,answer\né,2\n".encode("latin-1"), ":2: not UTF-8"),
    "utf16.jsonl": (GOOD.encode("utf-16"), ":1: not UTF-8 .*it looks like UTF-16"),
    "parquet.jsonl": (b"PAR1\x15\x04\xff\xff", "it looks like Parquet"),
    "list.jsonl": (b'["1", "2"]\n', ":1: expected a JSON object, got list"),
    "cut.jsonl": (
        GOOD.encode() + b'{"problem": "1", "ans',
        ":2: not valid JSON: Unterminated string starting at: column 18$",
    ),
    "open.jsonl": (GOOD.encode() + b'{"problem": "1",\r\n', ":2: not valid JSON: [^:]*: column 17$"),
    "open.json": (b'[{"problem":\n "1"', "not valid JSON: .*: line 2 column 5"),
    "raw nul.jsonl": (b'{"problem": "\0", "answer": "2"}', ":1: not valid JSON"),
    "scalar.json": (b"3", "expected a list of JSON objects"),
    "other.json": (b'{"rows":\n []}', "expected a list of JSON objects"),
    "cut.json": (b'[{"problem": "1"', "not valid JSON"),
    "strings.json": (b'["a"]', r"strings.json\[0\]: expected a JSON object, got str"),
    "empty.jsonl": (b"\n\n", "holds no problems"),
    "empty.json": (b"[]", "holds no problems"),
    "nothing.json": (b"", "not valid JSON"),
    "empty.csv": (b"", "holds no problems"),
    "header.csv": (b"problem,answer\n", "holds no problems"),
    "twice.csv": (b"problem,problem\n1,2\n", ":1: the header must name every column, each differently"),
    "ragged.csv": (b"problem,answer\n1,2\n1,2,3\n", ":3: 3 cells, but the header has 2"),
    "quote.csv": (b'problem,answer\n"1,2\n', "not valid CSV"),
    "blank.csv": (b"problem,answer\nx,\n", ":2: 'answer' is empty"),
    "cut.jsonl.gz": (gzip.compress(GOOD.encode() * 99)[:-12], "damaged gzip file"),
    "plain.jsonl.gz": (GOOD.encode(), "damaged gzip file"),
    "bad.parquet": (b"PAR1 no PAR1", "damaged or unreadable Parquet"),
    "none.parquet": (b"", "damaged or unreadable Parquet"),
    "rows.xlsx": (b"PK", "unknown kind of file; its name must end in .jsonl"),
    "rows": (GOOD.encode(), "unknown kind of file"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_get_a_sentence(tmp_path: Path, name: str) -> None:
    """The file, the line where it has one, and what it is; never anything but a UserError."""
    raw, said = BROKEN[name]
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(UserError, match=said) as error:
        load(tmp_path / name)
    assert str(tmp_path / name) in str(error.value)


def test_very_long_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line beyond any problem's length is named instead of read."""
    monkeypatch.setattr("dppo_megatron.data.rows._LONGEST_LINE", 1000)
    (tmp_path / "a.jsonl").write_text(GOOD + " " * 2000 + "\n")
    with pytest.raises(UserError, match=r"a.jsonl:2: the line has more than 1,000 bytes"):
        load(tmp_path / "a.jsonl")


def test_repeated_problems_are_said(tmp_path: Path) -> None:
    """How many, the first of them by line, and whether they contradict each other; white space makes no difference."""
    rows = [("a b", "1"), ("a  b\n", "1"), ("c", "1"), ("c", "2"), ("d", "3")]
    (tmp_path / "a.jsonl").write_text(_lines([{"problem": p, "answer": a} for p, a in rows]))
    found = load(tmp_path / "a.jsonl")
    path = tmp_path / "a.jsonl"
    assert found.notes == (
        f"warning: 2 problems appear more than once: {path}:2 is {path}:1, {path}:4 is {path}:3",
        f"warning: 1 of them with another answer: {path}:4 has '2' and {path}:3 '1'",
    )


def test_levels(tmp_path: Path) -> None:
    """Numbers as they are, `Level 3` as 3; what is no number is left out and counted; `difficulty` stands in."""
    for value, expected in (
        (3, 3.0), (0.4, 0.4), ("Level 3", 3.0), (" level 2 ", 2.0), ("0.25", 0.25), ("difficulty: 4", 4.0),
        ("easy", None), (True, None), ([1], None), (float("nan"), None), (10**400, None), ("Level ?", None),
        (Decimal("0.50"), 0.5), (Decimal("NaN"), None), (Decimal("1e400"), None),
    ):  # fmt: skip
        assert parse_level(value) == expected
    rows = [{"difficulty": 4}, {"level": 2, "difficulty": 9}, {"level": "easy"}, {}]
    (tmp_path / "a.jsonl").write_text(_lines([{"problem": str(i), "answer": "1"} | row for i, row in enumerate(rows)]))
    found = load(tmp_path / "a.jsonl")
    assert [p.level for p in found.prompts] == [4.0, 2.0, None, None]
    assert found.notes == ("1 rows have a level that is not a number; it is left out",)
    assert [p.level for p in load(tmp_path / "a.jsonl", level_field="difficulty").prompts] == [4.0, 9.0, None, None]


def test_overlong_prompts(tmp_path: Path) -> None:
    """Refused by line, or left out with a count; the others keep their order and are numbered through."""
    rows = [{"problem": "x" * n, "answer": str(n)} for n in (5, 50, 3, 60)]
    (tmp_path / "a.jsonl").write_text(_lines(rows))
    with pytest.raises(UserError, match=r"a.jsonl:2: the prompt has 50 tokens, more than data.train_sets.s.max_prompt"):
        load(tmp_path / "a.jsonl", max_prompt_tokens=10)
    found = load(tmp_path / "a.jsonl", max_prompt_tokens=10, overlong="filter")
    assert found.filtered == 2
    assert [(p.index, p.answer) for p in found.prompts] == [(0, "5"), (1, "3")]
    assert found.fingerprint != load(tmp_path / "a.jsonl").fingerprint
    with pytest.raises(UserError, match="holds no problems: all 4 are longer than 1 tokens"):
        load(tmp_path / "a.jsonl", max_prompt_tokens=1, overlong="filter")
    assert [p.answer for p in load(tmp_path / "a.jsonl", limit=2).prompts] == ["5", "50"]


def test_settings_have_one_list_of_fields() -> None:
    """Whatever a set can say is resolved: a new setting cannot be forgotten in between."""
    templates = {"template", "prompt_template", "system_prompt", "apply_chat_template", "chat_template_kwargs"}
    for ours, resolved in ((TrainSetConfig, ResolvedTrainSet), (EvalSetConfig, ResolvedEvalSet)):
        assert set(ours.__dataclass_fields__) - templates <= set(resolved.__dataclass_fields__)
