"""Reward functions that verl and TRL ship, named in `reward.function` as they are: what a grader makes of them is what
they return to their own trainers."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest

pytest.importorskip("trl", reason="`make test-adapters` runs it")
pytest.importorskip("verl", reason="`make test-adapters` runs it")
from trl.rewards import think_format_reward
from verl.utils.reward_score import default_compute_score, gsm8k, math_dapo, math_reward, search_r1_like_qa_em

from dppo_megatron.config.reward import RewardConfig
from dppo_megatron.rewards.grading import make_grader
from dppo_megatron.types import GradeTask

TEXTS = [
    "<think>\n3 * 4\n</think>\n\\boxed{12}\n#### 12\nAnswer: 12",
    "<think>3 * 4</think>\n\\boxed{13}\n#### 13\nAnswer: 13",
    "<answer>12</answer>",
    "twelve",
    "",
]


def _row(source: str, truth: Any = "12") -> dict[str, Any]:
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": "3 times 4?"}],
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"index": 5},
    }


def _grades(name: str, row: dict[str, Any]) -> list[float]:
    with closing(make_grader(RewardConfig(function=name, processes=1))) as grader:
        grades = grader.grade([GradeTask(text, "12", row) for text in TEXTS])
    assert not any(grade.failure for grade in grades)
    return [grade.reward for grade in grades]


def _score(returned: Any) -> float:
    return float(returned["score"] if isinstance(returned, dict) else returned)


@pytest.mark.parametrize("source", ["openai/gsm8k", "lighteval/MATH", "math_dapo"])
def test_verls_default(source: str) -> None:
    """A dictionary for math_dapo, numbers for the others."""
    own = [_score(default_compute_score(source, text, "12", {"index": 5})) for text in TEXTS]
    assert _grades("verl.utils.reward_score:default_compute_score", _row(source)) == own
    assert len({*own}) == 2


@pytest.mark.parametrize("module", [gsm8k, math_reward, math_dapo])
def test_verls_by_their_sets(module: Any) -> None:
    own = [_score(module.compute_score(text, "12")) for text in TEXTS]
    assert _grades(f"{module.__name__}:compute_score", _row("any")) == own
    assert len({*own}) == 2


def test_a_reference_of_verls_that_is_an_object() -> None:
    truth = {"target": ["12", "twelve"]}
    own = [float(search_r1_like_qa_em.compute_score(text, truth)) for text in TEXTS]
    assert _grades("verl.utils.reward_score.search_r1_like_qa_em:compute_score", _row("any", truth)) == own
    assert len({*own}) == 2


def test_trls_format() -> None:
    chats = [[{"role": "assistant", "content": text}] for text in TEXTS]
    own = think_format_reward(chats)
    assert _grades("trl.rewards:think_format_reward", _row("any")) == own
    assert len({*own}) == 2
