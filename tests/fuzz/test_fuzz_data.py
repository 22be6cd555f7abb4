"""Damaged problem files: each is a sentence that names the file, or the rows that another program reads there."""

from __future__ import annotations

import csv
import io
import json
import math
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from common import fuzz_cases
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dppo_megatron.config.data import TrainSetConfig, train_set_configs
from dppo_megatron.config.schema import Config
from dppo_megatron.data.sets import load_set
from dppo_megatron.types import UserError

ODD_VALUES: list[Any] = [
    None, True, 0, -1, 1.5, 1e308, float("nan"), float("inf"), 10**30, "", " ", "\0", "\ud800", "\ufeff",
    "é\u2028\u0085",
    [], {}, [1], {"a": {"b": "c"}}, [{"role": "user", "content": "x"}], [{"role": "user"}], "{problem}",
    "a\r\nb", "1,2\t3",
]  # fmt: skip
ODD_TEXT: list[bytes] = [
    b"", b"\0", b"\xff", b"\xe9", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\r", b"\n", b'"', b"\\", b",", b"{", b"}", b"[",
    b"[" * 200, b"NaN", b"9" * 5000, b"\\ud800", b'{"problem": "p", "answer": 07}', b"//", b"PAR1", b"\x1f\x8b",
]  # fmt: skip
NAMES = ["problem", "answer", "source"]
KINDS = ("jsonl", "json", "csv", "tsv", "parquet")


def _tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte or so: the cheapest there is."""
    tokenizer = Tokenizer(models.WordLevel({"x": 0, "?": 1}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="x", unk_token="?")


def _row(rng: random.Random) -> dict[str, Any]:
    row: dict[str, Any] = {"problem": f"problem {rng.random()}", "answer": str(rng.randrange(99)), "source": "s"}
    if rng.random() < 0.15:
        row[rng.choice(["problem", "answer", "source", "level", "extra"])] = rng.choice(ODD_VALUES)
    if rng.random() < 0.05:
        del row[rng.choice(list(row))]
    return row


def _encode(kind: str, rows: list[dict[str, Any]]) -> bytes:
    if kind == "jsonl":
        return "".join(json.dumps(row) + "\n" for row in rows).encode()
    if kind == "json":
        return json.dumps(rows, indent=1).encode()
    if kind == "parquet":
        texts = [
            {key: str(row.get(key, "")).encode("utf-8", "replace").decode() for key in ("problem", "answer")}
            for row in rows
        ]
        sink = io.BytesIO()
        pq.write_table(pa.Table.from_pylist(texts), sink)
        return sink.getvalue()
    out = io.StringIO(newline="")
    writer = csv.DictWriter(
        out, ["problem", "answer", "source"], delimiter="\t" if kind == "tsv" else ",", extrasaction="ignore"
    )
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue().encode("utf-8", "surrogatepass")


def _damage(rng: random.Random, raw: bytes) -> bytes:
    for _ in range(rng.choice([0, 1, 1, 1, 2, 5])):
        place = rng.randrange(len(raw) + 1)
        what = rng.randrange(5)
        if what == 0:
            raw = raw[:place] + rng.choice(ODD_TEXT) + raw[place:]
        elif what == 1:
            raw = raw[:place] + raw[place + rng.randrange(1, 9) :]
        elif what == 2:
            raw = raw[:place]
        elif what == 3 and raw:
            raw = raw[: place - 1] + bytes([rng.randrange(256)]) + raw[place:]
        else:
            raw = raw[:place] + raw[: rng.randrange(40)] + raw[place:]
    return raw


def _independent(kind: str, path: Path) -> list[dict[str, Any]]:
    """The rows as plain programs read them."""
    if kind == "parquet":
        rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
        return rows
    text = path.read_bytes().decode("utf-8-sig")
    if kind in ("csv", "tsv"):
        return list(csv.DictReader(io.StringIO(text, newline=""), delimiter="\t" if kind == "tsv" else ","))
    try:
        whole = json.loads(text)
    except ValueError:
        return [json.loads(line) for line in text.split("\n") if line.strip()]
    if kind == "json":
        return (
            whole["data"]
            if isinstance(whole, dict) and "data" in whole
            else whole
            if isinstance(whole, list)
            else [whole]
        )
    return [whole]


def _same(ours: str, theirs: Any) -> bool:
    """Numbers are compared by value: how one is written is known to the file alone."""
    if isinstance(theirs, (int, float)) and not isinstance(theirs, bool):
        return math.isfinite(theirs) and type(theirs)(ours) == theirs
    return ours == theirs


def test_damaged_files_are_read_right_or_named(tmp_path: Path) -> None:
    """2,000 files of five kinds with odd values and damaged bytes (DPPO_FUZZ: as many as one likes)."""
    tokenizer, config = _tokenizer(), Config()
    read = refused = 0
    for case in range(fuzz_cases(2000)):
        rng = random.Random(case)
        kind = KINDS[case % len(KINDS)]
        path = tmp_path / f"case.{kind}"
        path.write_bytes(_damage(rng, _encode(kind, [_row(rng) for _ in range(rng.randrange(1, 6))])))
        config.data.train_sets = {"s": TrainSetConfig(path=str(path))}
        try:
            prompts = load_set("s", train_set_configs(config)["s"], tokenizer).prompts
        except UserError as error:
            assert str(path) in str(error) and "\n" not in str(error), f"case {case}: {error}"
            refused += 1
            continue
        read += 1
        rows = _independent(kind, path)
        assert len(rows) == len(prompts), f"case {case}"
        for prompt, row in zip(prompts, rows, strict=True):
            stripped = {key.strip() if key else key: value for key, value in row.items()}
            assert prompt.text == stripped["problem"], f"case {case}"
            assert _same(prompt.answer, stripped["answer"]), f"case {case}"
    assert read > 0.2 * (read + refused) and refused > 0.2 * (read + refused)
