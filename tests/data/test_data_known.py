"""`dppo-megatron data`: every known set, read from a local directory laid out as its repository on the hub is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chat_tokenizer import chat_tokenizer
from support.known_layouts import LAYOUTS, write_repository

from dppo_megatron.config import paths
from dppo_megatron.config.data import TrainSetConfig
from dppo_megatron.config.resolved_sets import train_set_configs
from dppo_megatron.config.schema import Config
from dppo_megatron.data.known import KNOWN_SETS, after_hashes, last_boxed
from dppo_megatron.data.sets import load_set
from dppo_megatron.types import UserError
from dppo_megatron.workbench.cli import main


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_missing_file_is_known_by_its_name() -> None:
    """`config`, which says how to write it, may not import the sets."""
    for part, names in paths.KNOWN_SETS.items():
        assert set(names) == {name for name, one in KNOWN_SETS.items() if part in one.splits}
    for path, is_known in (
        ("no/math500/test.jsonl", True),
        ("no/math500/train.jsonl", False),
        ("no/mine/train.jsonl", False),
        ("no/math/train.csv", False),
    ):
        with pytest.raises(UserError, match="no such file") as raised:
            paths.check_set("data.train_path", path)
        assert ("`dppo-megatron data math500 --out no/math500` writes it" in str(raised.value)) == is_known


@pytest.mark.parametrize("name", KNOWN_SETS)
def test_each_set(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Our layout comes out, in the files that its splits stand for, and a job reads them without a setting."""
    splits, expected = LAYOUTS[name]
    repository = write_repository(tmp_path / "hub", splits, KNOWN_SETS[name].subset)
    out = tmp_path / "out"
    assert main(["data", name, "--out", str(out), "--from", str(repository)]) == 0
    written = {path.stem: _read(path) for path in out.iterdir()}
    assert written.keys() == KNOWN_SETS[name].splits.keys()
    first = next(iter(KNOWN_SETS[name].splits))
    assert written[first] == expected
    said = capsys.readouterr().out
    assert f"{first}.jsonl: {len(expected)} problems" in said
    if name == "dapo-math-17k":
        assert "2 repetitions of a problem, 1 of those with another answer than the first" in said
    if name in ("math", "olympiadbench"):
        assert "1 without a problem or an answer" in said
    config = Config()
    config.data.train_sets = {"s": TrainSetConfig(path=str(out / f"{first}.jsonl"))}
    prompts = load_set(train_set_configs(config)["s"], chat_tokenizer()).prompts
    assert [(p.text, p.answer) for p in prompts] == [(row["problem"], row["answer"]) for row in expected]
    if name in ("math", "math500"):
        assert prompts[0].level == float(str(expected[0]["level"]).removeprefix("Level "))


def test_nothing_is_overwritten_or_half_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that is there stays, and a set that cannot be read leaves nothing."""
    repository = write_repository(tmp_path / "hub", LAYOUTS["gsm8k"][0], "main")
    out = tmp_path / "out"
    out.mkdir()
    (out / "test.jsonl").write_text("mine\n")
    command = ["data", "gsm8k", "--out", str(out), "--from", str(repository)]
    assert main(command) == 2
    assert "test.jsonl already exists; give --overwrite" in capsys.readouterr().err
    assert [path.name for path in out.iterdir()] == ["test.jsonl"] and (out / "test.jsonl").read_text() == "mine\n"
    assert main([*command, "--overwrite"]) == 0
    assert _read(out / "test.jsonl")[0]["answer"] == "-3"
    capsys.readouterr()
    only_train = write_repository(tmp_path / "half", {"train": LAYOUTS["gsm8k"][0]["train"]}, "main")
    assert main(["data", "gsm8k", "--out", str(tmp_path / "new"), "--from", str(only_train)]) == 2
    assert "has no split 'test'; it has: train" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_wrong_calls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line and exit code 2: a typo, a directory that is not there, another set's layout, a file in the way."""
    other = write_repository(tmp_path / "hub", {"test": [{"text": "x"}]}, "")
    (tmp_path / "file").write_text("")
    for arguments, said in (
        (["mth", "--out", "x"], "set = 'mth': no such choice; did you mean 'math'?"),
        (["zzz", "--out", "x"], "known: gsm8k, math,"),
        (["aime25", "--out", "x", "--from", "nowhere"], "--from nowhere: no such directory"),
        (["aime25", "--out", str(tmp_path / "o"), "--from", str(other)], "no row has the fields of this set"),
        (
            ["aime25", "--out", str(tmp_path / "file" / "o"), "--from", str(_aime(tmp_path))],
            "file/o/test.jsonl: cannot be written",
        ),
    ):
        assert main(["data", *arguments]) == 2
        message = capsys.readouterr().err
        assert said in message and message.count("\n") == 1
    assert not (tmp_path / "o").exists()


def _aime(tmp_path: Path) -> Path:
    return write_repository(tmp_path / "aime", LAYOUTS["aime25"][0], "")


def test_answers_out_of_solutions() -> None:
    """The last box with its braces matched, and what is behind the last mark; nothing where there is none."""
    for solution, answer in (
        (r"\boxed{1} then \boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{\text{(A)}}", r"\text{(A)}"),
        (r"$\boxed{\frac{\sqrt{3}}{2}}$", r"\frac{\sqrt{3}}{2}"),
        (r"\fbox{7}", "7"),
        (r"is $\boxed 9$.", "9"),
        (r"\boxed{1} and \boxed{2", ""),
        ("no box", ""),
    ):
        assert last_boxed(solution) == answer
    assert [after_hashes(text) for text in ("a #### 1 #### 2", "none", "#### 1,234,567")] == ["2", "", "1234567"]
