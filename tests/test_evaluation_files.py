"""Samples of evaluations as files: compared problem by problem, and damaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.eval_files import write_samples

from dppo_megatron.evaluation.eval_samples import FORMAT, read_samples, scores_of
from dppo_megatron.types import UserError
from dppo_megatron.workbench.cli import main


def test_compared_problem_by_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Matched by id whatever the order and the number of samples; unequal problems are refused by name. What else
    must agree is named if it does not."""
    problems = [f"p{i}" for i in range(40)]
    a = write_samples(
        tmp_path / "a", {"s/1": {p: [i % 2 == 0] for i, p in enumerate(problems)}, "only a": {"x": [True]}}
    )
    better: dict[str, list[bool | None]] = {p: [True, i % 2 == 0, None] for i, p in enumerate(problems)}
    b = write_samples(tmp_path / "b", {"s/1": dict(reversed(better.items()))})
    out = tmp_path / "out"
    assert main(["eval", "--compare", str(a), str(b / "samples.jsonl"), "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "left out: 'only a', which only A has" in said and "B is better" in said
    [row] = json.loads((out / "comparison.json").read_text())["sets"]
    assert (row["a"], row["b"], row["problems"]) == (0.5, 0.75, 40)
    assert 0 < row["low"] < 0.25 < row["high"] and row["p"] < 0.01 and not row["within_noise"]
    for place, template, samples in ((a, "{problem}", 4), (b, "Problem: {problem}", 2)):
        of_set = {"samples": samples, "top_k": 0, "path": str(place), "template": {"prompt_template": template}}
        made = {"sets": {"s/1": of_set}, "reward": {"function": "math", "processes": samples}, "dtype": "float32"}
        (place / "results.json").write_text(json.dumps({"format": FORMAT, "graders": {"math": "0"}} | made))
    assert main(["eval", "--compare", str(a), str(b)]) == 0
    [warning] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]
    assert warning.endswith("alike: prompt_template is '{problem}' in A, 'Problem: {problem}' in B ('s/1')")
    fewer = write_samples(tmp_path / "fewer", {"s/1": dict(list(better.items())[3:])})
    assert main(["eval", "--compare", str(a), str(fewer)]) == 2
    assert "3 problems are in A only (p0, p1, p2)" in capsys.readouterr().err
    assert main(["eval", "--compare", str(a), str(write_samples(tmp_path / "c", {"t": {"x": [True]}}))]) == 2
    assert "no set in common" in capsys.readouterr().err


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_damaged_samples_are_named_by_line(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Any field replaced by any value, or a line by any text: read whole, or refused with file and line."""
    path = write_samples(tmp_path_factory.mktemp("samples") / "x", {"s": {"p": [True, False, None]}}) / "samples.jsonl"
    lines = path.read_text().splitlines()
    values = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.lists(st.none()))
    if data.draw(st.booleans()):
        lines[1] = json.dumps(
            json.loads(lines[1]) | {data.draw(st.sampled_from(sorted(json.loads(lines[1])))): data.draw(values)}
        )
    else:
        lines[1] = data.draw(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n\r"), max_size=20))
    path.write_text("\n".join(lines), encoding="utf-8")
    try:
        assert len(scores_of(read_samples(path))) in (1, 2)
    except UserError as error:
        assert str(path) in str(error)
