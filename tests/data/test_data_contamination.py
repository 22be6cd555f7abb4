"""Training problems that are evaluation problems are found, however they are written, and others are not."""

from __future__ import annotations

import json
import os
import random
from functools import partial
from pathlib import Path

import pytest
from chat_tokenizer import chat_tokenizer
from support.job import REPOSITORY

from dppo_megatron.config.data import EvalSetConfig, TrainSetConfig
from dppo_megatron.config.schema import Config
from dppo_megatron.data.contamination import Contamination, HeldOut, words_of
from dppo_megatron.data.examples import load_examples
from dppo_megatron.data.sets import contamination_notes, load_eval_sets, load_train_sets
from dppo_megatron.types import UserError

DATA = Path(os.environ.get("DPPO_DATA_DIR", REPOSITORY.parent / "shared" / "data"))
real_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"no problem sets in {DATA}")
VERL = " Let's think step by step and output the final answer within \\boxed{}."
DAPO = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer:"
    " $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)


def _problems(name: str) -> list[str]:
    return [json.loads(line)["problem"] for line in (DATA / f"{name}.jsonl").read_text("utf-8").split("\n") if line]


def _found(held_out: list[str], trained: list[str]) -> int:
    """How many problems of `held_out` are in `trained`, read in batches as a file is."""
    index = HeldOut()
    index.add("s", [words_of(text) for text in held_out])
    look = Contamination(index)
    for first in range(0, len(trained), 1000):
        part = trained[first : first + 1000]
        look.kept(part, map(words_of, part))
    return look.counts().get("s", 0)


@real_data
@pytest.mark.parametrize("form", ["as it is", "verl's suffix", "dapo's prefix", "spelling", "inside a text"])
def test_every_problem_of_math500_is_found(form: str) -> None:
    """500 of 500 in each form, among 2,000 others of MATH's training split."""
    held_out, others = _problems("math500"), _problems("math_train")[:2000]
    change = {
        "as it is": "{}",
        "verl's suffix": "{}" + VERL.replace("{}", "{{}}"),
        "dapo's prefix": DAPO + "{}\n\nRemember to put your answer on its own line.",
        "inside a text": "Here is one. {} Show that your answer is right, by any means.",
    }.get(form)
    if change is None:
        trained = [_otherwise(text) for text in held_out + others]
    else:
        trained = [change.format(text) for text in held_out + others]
    random.Random(0).shuffle(trained)
    assert _found(held_out, trained) == 500


def _otherwise(text: str) -> str:
    return text.replace("\\frac", "\\dfrac").replace("$", " $ ").replace(". ", ".\n").replace("The ", "THE ")


@real_data
def test_others_are_left_alone() -> None:
    """MATH's training split has 19 problems that share half of their runs with one of MATH-500, about other numbers."""
    assert _found(_problems("math500"), _problems("math_train")) == 0
    assert _found(_problems("aime24"), _problems("math_train")) == 0
    assert _found(_problems("math500"), _problems("gsm8k_train")) == 0


def test_a_problem_inside_a_longer_one() -> None:
    """Whichever of the two is trained on. Of 13 words all have to be there; fewer are not looked for."""
    text = "a box holds seven red and nine blue balls of which two are drawn at random without looking"
    words = text.split()
    others = ["Find x.", "Show it.", "Why?", "Let y be two."]
    for count, is_found in ((len(words), 1), (13, 1), (12, 0)):
        short = " ".join(words[:count])
        long = f"In this exercise {short} so what is the chance that both of them are red?"
        assert _found([long], [*others, short]) == _found([short], [*others, long]) == is_found
        assert _found([long.replace("blue", "green")], [*others, short]) == 0


def test_a_beginning_that_only_one_set_shares() -> None:
    """Half of a set may begin with words that are no instruction; the same text elsewhere is still the same problem."""
    sums, others = [f"What is {i} + {i}?" for i in range(9)], ["Find x.", "Show it.", "Why?", "Let y be two."] * 3
    assert _found(sums, [*others, *sums[:5]]) == 5
    assert _found([*others[:4], *sums[:2]], sums) == 2
    assert _found(["?", "!", "🙂", *sums], ["...", *others]) == 0  # no words are no problem


def test_what_is_done_with_them(tmp_path: Path) -> None:
    """A warning, problems left out with the others' numbers closed up, or an error; all sets are looked through."""
    rows = [{"problem": f"What is {i} plus {i}? Answer with a number.", "answer": str(2 * i)} for i in range(40)]
    held_out = [{"problem": f"what is ${i}$ plus ${i}$?", "answer": str(2 * i)} for i in range(5, 8)]
    for name, part in (("train", rows), ("test", [*held_out, {"problem": "Another.", "answer": "1"}])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    config, tokenizer = Config(), chat_tokenizer()
    config.data.train_sets = {"t": TrainSetConfig(path=str(tmp_path / "train.jsonl"))}
    config.data.eval_sets = {"e": EvalSetConfig(path=str(tmp_path / "test.jsonl"))}
    config.rollout.prompts_per_step = 4
    evaluated = load_eval_sets(config, tokenizer)
    warned = load_train_sets(config, tokenizer, evaluated)
    [said] = contamination_notes(warned, evaluated)
    assert "3 of the 4 problems of the evaluation set 'e' are trained on (set 't')" in said
    config.data.contamination = "drop"
    dropped = load_train_sets(config, tokenizer, evaluated)["t"]
    assert [one.index for one in dropped.prompts] == list(range(37)) and dropped.dropped == 3
    assert {one.answer for one in dropped.prompts} == {str(2 * i) for i in range(40)} - {"10", "12", "14"}
    assert contamination_notes({"t": dropped}, evaluated) == []
    assert "3 problems are left out: they are problems of evaluation sets" in dropped.notes
    config.data.eval_sets["e"].path = str(tmp_path / "train.jsonl")
    with pytest.raises(UserError, match=r"holds no problems: all 40 are problems of evaluation sets"):
        load_train_sets(config, tokenizer, load_eval_sets(config, tokenizer))
    config.data.contamination = "refuse"
    with pytest.raises(UserError, match=r"3 of the 4 problems .* and data\.contamination=refuse"):
        load_train_sets(config, tokenizer, evaluated)
    long = [row | {"problem": row["problem"] + " Explain." * 200} if i in (5, 6) else row for i, row in enumerate(rows)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in long))
    config.data.contamination, config.data.overlong = "warn", "filter"
    config.data.cache_path = ""
    [said] = contamination_notes(load_train_sets(config, tokenizer, evaluated), evaluated)
    assert "1 of the 4 problems" in said, "what is too long is trained on by nobody"


def test_other_signs_are_other_problems() -> None:
    """Times and division, at most and at least, and where what differs could be taken for an instruction."""
    times, at_most = "\u00d7", "\u2264"
    products, bounds = [f"{i} {times} 3 = ?" for i in range(10)], [f"Solve x {at_most} {i} now." for i in range(10)]
    assert _found(products, [text.replace(times, "\u00f7") for text in products]) == 0
    assert _found(bounds, [text.replace(at_most, "\u2265") for text in bounds]) == 0
    assert _found([*products, *bounds], [*products, *bounds]) == 20


def test_worked_solutions_too(tmp_path: Path) -> None:
    """Those of SFT are trained on as well: a warning that names their setting, left out, or an error. After SFT they
    are looked through for the problems of new evaluation sets."""
    rows = [{"problem": f"What is {i} plus {i}? Think.", "solution": f"{2 * i}", "answer": "1"} for i in range(12)]
    for name, part in (
        ("sft", rows),
        ("test", [rows[3] | {"problem": "what is $3$  plus 3? think."}, rows[5], rows[5]]),
    ):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    config, tokenizer = Config(), chat_tokenizer()
    config.data.eval_sets = {"e": EvalSetConfig(path=str(tmp_path / "test.jsonl"))}
    config.sft.examples_path, config.sft.completion_field = str(tmp_path / "sft.jsonl"), "solution"
    config.sft.examples_per_step = 10
    evaluated = load_eval_sets(config, tokenizer)
    samples, said = load_examples(config, tokenizer, evaluated, max_tokens=500)
    assert len(samples) == 12 and len(load_examples(config, tokenizer, {}, max_tokens=500)[0]) == 12
    assert said == [
        "warning: 3 of the 3 problems of the evaluation set 'e' are trained on (sft.examples_path): its scores will be"
        " too high"
    ]
    over = partial(load_examples, config, tokenizer, max_tokens=500, is_over=True)
    assert over(evaluated) == ([], said) and over({}) == ([], [])
    config.data.contamination = "drop"
    samples, said = load_examples(config, tokenizer, evaluated, max_tokens=500)
    origins = [sample.id for sample in samples]
    assert origins == [f"{tmp_path / 'sft.jsonl'}:{i + 1}" for i in range(12) if i not in (3, 5)]
    assert said == [f"{tmp_path / 'sft.jsonl'}: 10 examples are trained on; 2 more are of problems of evaluation sets"]
    [warning] = over(evaluated)[1]
    assert "2 examples are of problems of evaluation sets; SFT was done without those of sets that the run" in warning
    config.sft.examples_per_step = 11
    with pytest.raises(UserError, match=r"examples_per_step = 11, but .* holds only 10 examples; 2 more are of"):
        load_examples(config, tokenizer, evaluated, max_tokens=500)
    config.data.contamination = "refuse"
    with pytest.raises(UserError, match=r"\(sft\.examples_path\).* and data\.contamination=refuse"):
        load_examples(config, tokenizer, evaluated, max_tokens=500)
    with pytest.raises(UserError, match=r"\(sft\.examples_path\).* and data\.contamination=refuse"):
        over(evaluated)
