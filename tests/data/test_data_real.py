"""The real sets, where they are at hand: each loads, and what is known about them is said."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from chat_tokenizer import chat_tokenizer

from dppo_megatron.config.data import EvalSetConfig, TrainSetConfig
from dppo_megatron.config.resolved_sets import eval_set_configs
from dppo_megatron.config.schema import Config
from dppo_megatron.data.sets import contamination_notes, load_set, load_train_sets

DATA = Path(os.environ.get("DPPO_DATA_DIR", Path(__file__).parents[2].parent / "shared" / "data"))
SETS = {"aime24": 30, "aime25": 30, "amc23": 40, "minerva_math": 272, "olympiadbench_math_en": 675, "math500": 500}

pytestmark = pytest.mark.skipif(
    not (DATA / "math500.jsonl").is_file(), reason="the real sets are not here; DPPO_DATA_DIR names their directory"
)


def test_the_six_sets_load_and_contamination_is_said(tmp_path: Path) -> None:
    """Every row is a problem; MATH-500 is in MATH's test split, and training on that is said."""
    config, tokenizer = Config(), chat_tokenizer()
    config.data.template, config.data.max_prompt_tokens = "qwen3_nothink", 20_000
    config.data.train_sets = {"math_test": TrainSetConfig(path=str(DATA / "math_test.jsonl"))}
    config.data.eval_sets = {name: EvalSetConfig(path=str(DATA / f"{name}.jsonl")) for name in SETS}
    evaluated = {name: load_set(one, tokenizer) for name, one in eval_set_configs(config).items()}
    assert {name: len(one.prompts) for name, one in evaluated.items()} == SETS
    first = json.loads((DATA / "math500.jsonl").read_text(encoding="utf-8").splitlines()[0])
    assert first["problem"] in evaluated["math500"].prompts[0].text
    assert evaluated["math500"].prompts[0].level == float(first["level"].removeprefix("Level "))
    config.data.cache_path = str(tmp_path)
    trained, again = (load_train_sets(config, tokenizer, evaluated) for _ in range(2))
    assert list(again["math_test"].prompts) == list(trained["math_test"].prompts) and [*tmp_path.glob("*.arrow")]
    said = contamination_notes(again, evaluated)
    assert any("500 problems of the evaluation set 'math500'" in line for line in said)
    assert not any("'aime24'" in line or "'minerva_math'" in line for line in said)
