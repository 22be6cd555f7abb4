"""Damaged problem files: each is a sentence that names the file, or the rows that another program reads there.

The other programs are `json`, `csv`, pyarrow, `datasets` and the tokenizer's own chat template on the row as it stands.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data.chat_tokenizer import chat_tokenizer
from support.cases import Choose
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from dppo_megatron.config.data import TrainSetConfig
from dppo_megatron.config.resolved_sets import train_set_configs
from dppo_megatron.config.schema import Config
from dppo_megatron.data.sets import load_set
from dppo_megatron.types import Prompt, UserError

ODD_VALUES: list[Any] = [
    None, True, 0, -1, 1.5, 1e308, float("nan"), float("inf"), 10**30, "", " ", "\0", "\ud800", "\ufeff",
    "é\u2028\u0085", 1e22, -0.0, 0.1, 1e-7, 2**63, "a\rb", "\u202e", "{problem}{problem}",
    [], {}, [1], {"a": {"b": "c"}}, [{"role": "user", "content": "x"}], [{"role": "user"}], "{problem}",
    [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}],
    [{"role": "user", "content": [{"type": "image", "image": "x"}]}], [{"role": "assistant", "content": "x"}],
    [{"role": "user", "content": "x", "tool_calls": [1]}], [{"role": "user", "content": "x", "name": None}],
    [{"role": "system", "content": "s"}, {"role": "user", "content": "x"}], [{"role": "User", "content": "x"}],
    "a\r\nb", "1,2\t3", {"ground_truth": 7}, {"ground_truth": ["7"]}, {"ground_truth": None}, {"ground_truth": " "},
]  # fmt: skip
ODD_TEXT: list[bytes] = [
    b"", b"\0", b"\xff", b"\xe9", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\r", b"\n", b'"', b"\\", b",", b"{", b"}", b"[",
    b"[" * 200, b"NaN", b"9" * 5000, b"\\ud800", b'{"problem": "p", "answer": 07}', b"//", b"PAR1", b"\x1f\x8b",
    b"\r\n", b"\x0b", b"\x0c", b"\x1c", b"\xc2\x85", b"\xe2\x80\xa8", b"1e400", b'"answer": 5, ', b"\t", b"-0", b"1E5",
    b"pr\xd0\xbeblem",
]  # fmt: skip
KINDS = ("jsonl", "json", "csv", "tsv", "parquet", "jsonl.gz", "verl.jsonl", "verl.parquet", "csv.gz", "ndjson")
DIRECTORIES = ("saved", "repository")
EVERY_DIRECTORY = 40
"""One case in so many: `datasets` takes as long for one as everything else for ten files."""

pytestmark = pytest.mark.timeout(0 if "DPPO_FUZZ" in os.environ else 1800)


def _tokenizer() -> PreTrainedTokenizerFast:
    """One token a word: the cheapest there is."""
    tokenizer = Tokenizer(models.WordLevel({"x": 0, "?": 1}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="x", unk_token="?")


@dataclass
class _Case:
    """A file, how its rows are to be read, and what becomes of them."""

    kind: str
    settings: dict[str, Any]
    chat: bool


def _case(rng: random.Random, number: int) -> _Case:
    kind = KINDS[number % len(KINDS)] if number % EVERY_DIRECTORY else rng.choice(DIRECTORIES)
    settings: dict[str, Any] = {}
    chat = kind.startswith("verl") or rng.random() < 0.2
    if kind.startswith("verl"):
        settings |= {"problem_field": "prompt", "answer_field": "reward_model.ground_truth", "source_field": "where"}
    if chat:
        settings |= {"apply_chat_template": rng.random() < 0.9}
    if rng.random() < 0.3:
        settings |= {
            "prompt_template": rng.choice(("Q: {problem} A:", "{problem}\nBox it: \\boxed{{}}", "{{{problem}}}"))
        }
    if rng.random() < 0.2:
        settings |= {"max_prompt_tokens": rng.choice((2, 8, 20)), "overlong": "filter"}
    if kind in DIRECTORIES and rng.random() < 0.3:
        settings |= {"split": rng.choice(("train", "test"))}
    return _Case(kind, settings, bool(settings.get("apply_chat_template")))


def _row(rng: random.Random, kind: str) -> dict[str, Any]:
    answer: Any = rng.choice((str(rng.randrange(99)), rng.randrange(99), rng.randrange(99) / 10))
    if kind.startswith("verl"):
        turns = [{"role": "user", "content": f"problem {rng.random()}"}]
        row: dict[str, Any] = {"prompt": turns, "where": "s", "reward_model": {"ground_truth": answer, "style": "rule"}}
    else:
        row = {"problem": f"problem {rng.random()}", "answer": answer, "source": "s"}
    if rng.random() < 0.15:
        row[rng.choice([*row, "level", "extra"])] = rng.choice(ODD_VALUES)
    if rng.random() < 0.05:
        del row[rng.choice(list(row))]
    return row


def _columns(rng: random.Random, rows: list[dict[str, Any]]) -> pa.Table:
    """Rows as Arrow has them: one type a column, which may be any of the numbers."""
    numbers: list[Callable[[int], Any]] = [str, int, lambda n: n / 10, lambda n: Decimal(n) / 4]
    kinds = (pa.string(), pa.int32(), rng.choice((pa.float64(), pa.float32(), pa.float16())), pa.decimal128(9, 2))
    place = rng.randrange(len(numbers))
    answers = [None if rng.random() < 0.02 else numbers[place](rng.randrange(99)) for _ in rows]
    if "prompt" in rows[0]:
        truths = pa.StructArray.from_arrays([pa.array(answers, kinds[place])], ["ground_truth"])
        turns = [[{"role": "user", "content": f"p {rng.random()}", "name": None}] for _ in rows]
        return pa.table({"prompt": turns, "reward_model": truths, "where": ["s"] * len(rows)})
    problems = [None if rng.random() < 0.02 else f"p {rng.random()}" for _ in rows]
    return pa.table({"problem": problems, "answer": pa.array(answers, kinds[place]), "source": ["s"] * len(rows)})


def _encode(rng: random.Random, kind: str, rows: list[dict[str, Any]]) -> bytes:
    if kind.endswith(".gz"):
        return gzip.compress(_encode(rng, kind.removesuffix(".gz"), rows), mtime=0)
    if kind.endswith(("jsonl", "ndjson")):
        return "".join(json.dumps(row) + "\n" for row in rows).encode()
    if kind == "json":
        whole: Any = rows if rng.random() < 0.7 else {"data": rows} if rng.random() < 0.7 else rows[0]
        return json.dumps(whole, indent=rng.choice((None, 1))).encode()
    if kind.endswith("parquet"):
        sink = io.BytesIO()
        pq.write_table(_columns(rng, rows or [_row(rng, kind)]), sink)
        return sink.getvalue()
    out = io.StringIO(newline="")
    writer = csv.DictWriter(
        out, ["problem", "answer", "source"], delimiter="\t" if kind == "tsv" else ",", extrasaction="ignore"
    )
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue().encode("utf-8", "surrogatepass")


def _damage(rng: random.Random, raw: bytes) -> bytes:
    for _ in range(rng.choice([0, 0, 1, 1, 1, 2, 5])):
        place = rng.randrange(len(raw) + 1)
        what = rng.randrange(6)
        if what == 0:
            raw = raw[:place] + rng.choice(ODD_TEXT) + raw[place:]
        elif what == 1:
            raw = raw[:place] + raw[place + rng.randrange(1, 9) :]
        elif what == 2:
            raw = raw[:place]
        elif what == 3 and raw:
            raw = raw[: place - 1] + bytes([rng.randrange(256)]) + raw[place:]
        elif what == 4 and rng.random() < 0.1:
            raw = raw.decode("utf-8", "replace").encode(rng.choice(("utf-16", "utf-16-le", "utf-32")))
        else:
            raw = raw[:place] + raw[: rng.randrange(40)] + raw[place:]
    return raw


def _write(rng: random.Random, case: _Case, into: Path) -> Path:
    """The case's file or directory."""
    if case.kind in DIRECTORIES:
        directory = into / case.kind
        table = _columns(rng, [_row(rng, "parquet") for _ in range(rng.randrange(1, 6))])
        if case.kind == "repository":
            (directory / "data").mkdir(parents=True)
            for split in ("train", "test")[: rng.choice((1, 1, 2))]:
                pq.write_table(table, directory / "data" / f"{split}-00000-of-00001.parquet")
        else:
            from datasets import Dataset

            Dataset(table).save_to_disk(directory)
        if rng.random() < 0.5:
            victim = rng.choice([path for path in sorted(directory.rglob("*")) if path.is_file()])
            victim.write_bytes(_damage(rng, victim.read_bytes()))
        return directory
    path = into / f"case.{case.kind}"
    rows = [_row(rng, case.kind) for _ in range(rng.randrange(1, 6))]
    path.write_bytes(_damage(rng, _encode(rng, case.kind, rows)))
    return path


def _independent(kind: str, path: Path) -> list[dict[str, Any]]:
    """The rows as plain programs read them; numbers of JSON as they are written."""
    if kind == "saved":
        from datasets import load_from_disk

        return list(load_from_disk(str(path)).with_format("arrow")[:].to_pylist())
    if kind == "repository":
        path = sorted((path / "data").iterdir())[-1]  # its only one, or the train split: both hold the same rows
    if kind.endswith("parquet") or kind == "repository":
        return list(pq.ParquetFile(path).read().to_pylist())
    raw = path.read_bytes()
    text = (gzip.decompress(raw) if kind.endswith(".gz") else raw).decode("utf-8-sig")
    if kind.startswith(("csv", "tsv")):
        return list(csv.DictReader(io.StringIO(text, newline=""), delimiter="\t" if kind == "tsv" else ","))

    def parse(text: str) -> Any:
        return json.loads(text, parse_int=_Number, parse_float=_Number)

    try:
        whole = parse(text)
    except ValueError:
        return [parse(line) for line in text.split("\n") if line.strip()]
    if kind == "json" and isinstance(whole, dict) and "data" in whole:
        whole = whole["data"]
    return whole if kind == "json" and isinstance(whole, list) else [whole]


class _Number(str):
    """A number's text in a JSON file."""


def _get(row: Any, name: str) -> Any:
    if name in row or "." not in name:
        return row[name]
    head, _, rest = name.partition(".")
    return _get(row[head], rest)


def _rendered(row: dict[str, Any], case: _Case, tokenizer: PreTrainedTokenizerBase) -> str:
    """What the model would be given of the row as it stands."""
    problem = _get(row, case.settings.get("problem_field", "problem"))
    template = case.settings.get("prompt_template", "{problem}")
    if isinstance(problem, str):
        problem = problem if not case.chat else [{"role": "user", "content": problem}]
    if isinstance(problem, str):
        return str(template.replace("{problem}", problem))
    turns = [dict(turn) for turn in problem]
    for turn in turns:
        if isinstance(turn["content"], list):
            turn["content"] = "\n".join(part["text"] for part in turn["content"])
    last = max(place for place, turn in enumerate(turns) if turn["role"] == "user")
    turns[last]["content"] = template.replace("{problem}", turns[last]["content"])
    return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))


def _same_answer(ours: str, theirs: Any, kind: str) -> bool:
    """Text and the numbers of JSON as they stand; Arrow's numbers by their value in their own type."""
    if isinstance(theirs, str):
        return ours == theirs and (not isinstance(theirs, _Number) or math.isfinite(float(theirs)))
    if isinstance(theirs, float):  # pyarrow gives a float32 as the float64 nearest to it, 0.1 as 0.10000000149
        near = [float(ours), float(np.float32(ours)), float(np.float16(ours))]
        return math.isfinite(theirs) and theirs in near and len(ours) < 7
    return not isinstance(theirs, bool) and type(theirs)(ours) == theirs and ours == str(theirs)


def _check(where: str, case: _Case, path: Path, prompts: list[Prompt], tokenizer: PreTrainedTokenizerBase) -> None:
    kept = []
    for row in _independent(case.kind, path):
        stripped = {key.strip() if key else key: value for key, value in row.items()}
        text = _rendered(stripped, case, tokenizer)
        ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
        if "overlong" not in case.settings or len(ids) <= case.settings["max_prompt_tokens"]:
            kept.append((stripped, text, ids))
    assert len(kept) == len(prompts), where
    for prompt, (row, text, ids) in zip(prompts, kept, strict=True):
        assert (prompt.text, prompt.token_ids) == (text, ids), where
        answer = _get(row, case.settings.get("answer_field", "answer"))
        assert _same_answer(prompt.answer, answer, case.kind), f"{where}: {prompt.answer!r} of {answer!r}"
        source = row.get(case.settings.get("source_field", "source"))
        if isinstance(source, str):
            assert prompt.source == (source if source.strip() else ""), where


def test_damaged_files_are_read_right_or_named(tmp_path: Path, cases: Choose) -> None:
    """Files and directories with odd values and damaged bytes."""
    chosen = cases("data", 700)
    plain, chat = _tokenizer(), chat_tokenizer()
    read = dict.fromkeys((*KINDS, *DIRECTORIES), 0)
    refused = dict(read)
    for number in chosen:
        rng = random.Random(number)
        case, config = _case(rng, number), Config()
        path = _write(rng, case, tmp_path)
        where = f"data {number} ({case.kind}, {case.settings})"
        config.data.train_sets = {"s": TrainSetConfig(path=str(path), **case.settings)}
        tokenizer = chat if case.chat else plain
        try:
            prompts = load_set(train_set_configs(config)["s"], tokenizer).prompts
        except UserError as error:
            assert str(path) in str(error) or "train_sets.s" in str(error), f"{where}: {error}"
            assert str(error).isprintable() and len(str(error)) < 1500, f"{where}: {error!a}"
            refused[case.kind] += 1
        except Exception as error:
            raise AssertionError(f"{where}: {type(error).__name__}: {error}") from error
        else:
            read[case.kind] += 1
            _check(where, case, path, prompts, tokenizer)
        if path.is_dir():
            shutil.rmtree(path)
    if chosen.are_few:
        return
    assert all(read[kind] > 0.1 * (read[kind] + refused[kind]) for kind in read), (read, refused)
    assert sum(refused.values()) > 0.2 * sum(read.values()), (read, refused)
