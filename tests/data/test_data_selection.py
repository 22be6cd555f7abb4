"""Which rows are problems of a set and what their answers are: conditions, answer rules, sets that people have."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_data_formats import load

from dppo_megatron.config.data import Condition, EvalSetConfig
from dppo_megatron.config.resolved_sets import check_data, eval_set_configs, train_set_configs
from dppo_megatron.config.schema import Config
from dppo_megatron.types import UserError


def _file(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


_OPERATORS = {
    ">=": lambda a, b: a >= b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    "<": lambda a, b: a < b,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
}


@given(st.sampled_from(sorted(_OPERATORS)), st.integers(-40, 40), st.integers(-40, 40), st.sampled_from([1, 2, 4, 8]))
def test_numbers_are_compared_as_numbers(operator: str, a: int, b: int, parts: int) -> None:
    """As Python compares them, however either side writes them: a number, its text, a fraction, a decimal column's."""
    condition = Condition.parse(f"x {operator} {b}/{parts}")
    expected = _OPERATORS[operator](a / parts, b / parts)
    forms = a / parts, str(a / parts), f"{a}/{parts}", Decimal(a) / parts
    assert {condition.holds(form) for form in forms} == {expected}


def test_texts_lists_and_what_is_not_there() -> None:
    """A row without the field meets `!=` and `not in` alone, but for null itself."""
    for text, meets, fails in (
        ("type != proof", ["mcq", None, 3], ["proof", " proof "]),
        ("type == proof", ["proof"], ["proofs", None, ["proof"]]),
        ("type in [mcq, math word]", ["mcq", "math word"], ["math", None]),
        ("type not in [mcq, null]", ["proof", 0], ["mcq", None]),
        ("answer != null", ["", 0], [None, "null"]),
        ("valid = true", [True], [False, "yes", 1, None]),
        ("rate > 0.1", [0.2, "1/2", ".2", "2e-1"], [0.1, None, "high", True, float("nan"), Decimal("NaN"), "1e-5"]),
        ("rate < 1", [-(10**400)], [10**400, Decimal("Infinity")]),
        # as people write them who know Python or SQL: a filter that never filters would not be noticed
        ("type != 'proof'", ["mcq"], ["proof"]),
        ('kind of type in ["a, b", c]', ["a, b", "c"], ["a", "b"]),
        ("valid == True", [True, "True"], [False, None]),
        ("answer != None", ["", 0], [None, float("nan"), Decimal("NaN")]),
        ("answer != ''", ["a", None], [""]),
    ):
        condition = Condition.parse(text)
        assert all(condition.holds(value) for value in meets), text
        assert not any(condition.holds(value) for value in fails), text


@pytest.mark.parametrize("text", ["", "type", "type!=proof", "type in proof", "type == [a]", "rate >= high", "a in []"])
def test_what_is_no_condition(text: str) -> None:
    config = Config()
    config.data.train_path, config.data.where = "x.jsonl", [text]
    with pytest.raises(UserError, match=r"data\.where: "):
        check_data(config)


def test_rows_are_left_out_and_counted(tmp_path: Path) -> None:
    """`limit` counts those that are left; a field that no row has is a mistake."""
    rows = [{"problem": f"p{i}", "answer": str(i), "meta": {"rate": i / 10}} for i in range(10)]
    path = _file(tmp_path / "a.jsonl", rows)
    found = load(path, where=["meta.rate >= 0.2", "meta.rate < 0.9"], limit=3)
    assert [one.answer for one in found.prompts] == ["2", "3", "4"]
    assert found.notes == ("2 rows are left out by where = ['meta.rate >= 0.2', 'meta.rate < 0.9']",)
    with pytest.raises(UserError, match=r"no row has the field 'rate' of data\.train_sets\.s\.where"):
        load(path, where=["rate >= 0.2"])
    with pytest.raises(UserError, match="holds no problems: 10 rows do not meet 'where'"):
        load(path, where=["meta.rate > 1"])
    seldom = _file(tmp_path / "b.jsonl", [*rows, rows[0] | {"flag": None}])
    assert len(load(seldom, where=["flag != bad"], limit=3).prompts) == 3  # the field is in a row that is not read
    assert len(load(seldom, where=["flag == null"]).prompts) == 11


def test_evaluation_sets_have_conditions_of_their_own_only() -> None:
    """Half a benchmark would be another benchmark."""
    config = Config()
    config.data.where, config.data.train_path = ["type != proof"], "x.jsonl"
    config.data.eval_sets = {"a": EvalSetConfig(path="a.jsonl"), "b": EvalSetConfig(path="b.jsonl", where=["x > 1"])}
    assert {name: one.where for name, one in eval_set_configs(config).items()} == {"a": [], "b": ["x > 1"]}
    assert train_set_configs(config)["train"].where == ["type != proof"]
    config.data.overlong = config.data.eval_sets["b"].overlong = "filter"
    assert {name: one.overlong for name, one in eval_set_configs(config).items()} == {"a": "error", "b": "filter"}
    assert train_set_configs(config)["train"].overlong == "filter"


def test_answers_from_solutions_and_lists(tmp_path: Path) -> None:
    values = [r"so \boxed{\frac{1}{2}}.", "no box", None, r"\boxed{1} then \boxed{2}"]
    path = _file(tmp_path / "a.jsonl", [{"problem": f"p{i}", "answer": value} for i, value in enumerate(values)])
    found = load(path, answer_from="boxed")
    assert [one.answer for one in found.prompts] == [r"\frac{1}{2}", "2"]
    assert found.notes == ("2 rows are left out: answer_from=boxed finds no answer there",)
    path = _file(tmp_path / "n.jsonl", [{"problem": f"p{i}", "a": {"b": one}} for i, one in enumerate([None, *values])])
    assert len(load(path, answer_field="a.b", answer_from="boxed").prompts) == 2
    with pytest.raises(UserError, match=r"lacks the field 'a\.c'"):
        load(path, answer_field="a.c", answer_from="boxed")
    lists: list[Any] = [["1", "2"], '["3"]', "[1, 2)", 5]
    path = _file(tmp_path / "b.jsonl", [{"problem": f"p{i}", "answer": value} for i, value in enumerate(lists)])
    assert [one.answer for one in load(path, answer_from="last").prompts] == ["2", "3", "[1, 2)", "5"]
    lists += [["4", None], '["5", "6"]', "[1, 2]", "[null]", [None]]
    path = _file(tmp_path / "all.jsonl", [{"problem": f"p{i}", "answer": value} for i, value in enumerate(lists)])
    every = ["1, 2", "3", "[1, 2)", "5", "4", "5, 6", "[1, 2]"]
    assert [one.answer for one in load(path, answer_from="all").prompts] == every
    path = _file(tmp_path / "c.jsonl", [{"problem": "p", "answer": "3 + 4 = 7\n#### 1,007"}])
    assert [one.answer for one in load(path, answer_from="hashes").prompts] == ["1007"]


LAYOUTS: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "OpenR1": (
        {"where": ["question_type != proof", "answer != null"]},
        [
            {"problem": "P", "solution": "S", "answer": "2", "question_type": "math-word-problem", "source": "amc"},
            {"problem": "Q", "solution": "S", "answer": "proof", "question_type": "proof", "source": "amc"},
            {"problem": "R", "solution": "S", "answer": None, "question_type": "MCQ", "source": "amc"},
        ],
    ),
    "NuminaMath-1.5": (
        {"where": ["answer not in [proof, notfound, null]", "problem_is_valid == Yes"]},
        [
            {"problem": "P", "answer": "2", "problem_is_valid": "Yes", "source": "olympiads"},
            {"problem": "Q", "answer": "proof", "problem_is_valid": "Yes", "source": "olympiads"},
            {"problem": "R", "answer": "notfound", "problem_is_valid": "Yes", "source": "olympiads"},
            {"problem": "S", "answer": None, "problem_is_valid": "Yes", "source": "olympiads"},
            {"problem": "T", "answer": "4", "problem_is_valid": "Incomplete", "source": "olympiads"},
        ],
    ),
    "Big-Math": (
        {"level_field": "llama8b_solve_rate", "level_is": "solve_rate", "where": ["llama8b_solve_rate >= 0.1"]},
        [
            {"problem": "P", "answer": "2", "source": "math", "llama8b_solve_rate": 0.25},
            {"problem": "Q", "answer": "3", "source": "math", "llama8b_solve_rate": 0.0},
            {"problem": "R", "answer": "3", "source": "math", "llama8b_solve_rate": None},
        ],
    ),
    "Skywork": (
        {
            "problem_field": "prompt",
            "answer_field": "reward_model.ground_truth",
            "answer_from": "last",
            "source_field": "data_source",
            "apply_chat_template": True,
        },
        [
            {
                "data_source": "train-math-numina",
                "prompt": [{"role": "user", "content": "P"}],
                "reward_model": {"ground_truth": '["2"]', "style": "rule"},
            }
        ],
    ),
    "DeepMath": (
        {"problem_field": "question", "answer_field": "final_answer"},
        [{"question": "P", "final_answer": "2", "difficulty": 7.5, "topic": "Algebra", "r1_solution_1": "..."}],
    ),
    "ORZ": (
        {"problem_field": "0.value", "answer_field": "1.ground_truth.value"},
        [[{"from": "human", "value": "P"}, {"from": "assistant", "ground_truth": {"value": "2"}}]],
    ),
    "POLARIS": (
        {"level_is": "solve_rate"},
        [{"problem": "P", "answer": "2", "difficulty": "3/8"}],
    ),
}
"""Settings for the files of the hub as docs/data.md has them, and rows of their layout."""


@pytest.mark.parametrize("name", LAYOUTS)
def test_sets_that_people_have(tmp_path: Path, name: str) -> None:
    """One line of settings reads each, as JSON and as JSON Lines: one good problem, with its answer and level."""
    own, rows = LAYOUTS[name]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    for path in (tmp_path / "a.json", _file(tmp_path / "a.jsonl", rows)):
        [prompt] = load(path, **own).prompts
        assert "P" in prompt.text and prompt.answer == "2"
        assert prompt.level == {"Big-Math": 0.75, "DeepMath": 7.5, "POLARIS": 1 - 3 / 8}.get(name)
    line = "{" + ", ".join(f"{key}: {_yaml(value)}" for key, value in own.items()) + "}"
    assert line.strip("{}") in (Path(__file__).parents[2] / "docs" / "data.md").read_text()


def _yaml(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(f'"{item}"' for item in value) + "]"
    return str(value).lower() if isinstance(value, bool) else str(value)
