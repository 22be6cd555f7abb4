"""How a problem is put to the model: precedence, presets, chat templates, and where a turn ends."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from chat_tokenizer import TEMPLATE, chat_tokenizer
from omegaconf import OmegaConf
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from dppo_megatron.config.data import EvalSetConfig, TrainSetConfig
from dppo_megatron.config.ranges import check_ranges
from dppo_megatron.config.resolved_sets import TEMPLATES, Template, check_data, eval_set_configs, train_set_configs
from dppo_megatron.config.schema import Config
from dppo_megatron.data.examples import load_examples
from dppo_megatron.data.sets import ProblemSet, load_set, stop_token_ids
from dppo_megatron.data.summary import report_lines
from dppo_megatron.data.templates import varies
from dppo_megatron.types import UserError

ONLY = "only {problem} is filled in, in prompt_template"
BOXED = "Please reason step by step, and put your final answer within \\boxed{}."


def first_prompt(tmp_path: Path, problem: Any = "1+1?", tokenizer: Any = None, **own: Any) -> str:
    """The text of a set's only prompt."""
    return load(tmp_path, problem, tokenizer, **own).prompts[0].text


def load(tmp_path: Path, problem: Any = "1+1?", tokenizer: Any = None, **own: Any) -> ProblemSet:
    """A set of one problem."""
    (tmp_path / "a.jsonl").write_text(json.dumps({"problem": problem, "answer": "2"}) + "\n")
    config = Config()
    config.data.train_sets = {"s": TrainSetConfig(**({"path": str(tmp_path / "a.jsonl")} | own))}
    check_data(config)
    return load_set(train_set_configs(config)["s"], tokenizer or chat_tokenizer())


_TWICE = "ask for \\boxed and the template asks again; prompt_template='{problem}'"


def test_an_instruction_that_appears_twice_is_said(tmp_path: Path) -> None:
    """verl's preprocessing writes one into every prompt of its files, and a named template writes another."""
    verls = "1+1? Let's think step by step and output the final answer within \\boxed{}."
    turns = [{"role": "user", "content": verls}]
    for problem, own, is_said in (
        (turns, {"template": "chat_boxed"}, True),
        (verls, {"template": "plain_boxed"}, True),
        (turns, {"template": "chat_boxed", "prompt_template": "{problem}"}, False),
        ("1+1?", {"template": "chat_boxed"}, False),
    ):
        lines = report_lines({"s": load(tmp_path, problem, **own)}, {}, (), chat_tokenizer())
        assert sum(_TWICE in line for line in lines) == is_said, lines


def test_a_box_in_a_problem_asks_for_none(tmp_path: Path) -> None:
    """Blanks to fill in; an instruction is the same at an end of every problem."""
    asks = "Put the final answer within \\boxed{}."
    for form, is_said in (
        ("Fill in: {0} + 1 = \\boxed{{}}, where {0} is a number.", False),
        ("{0} + 1 = ? " + asks.replace("{}", "{{}}"), True),
        (asks.replace("{}", "{{}}") + " {0} + 1 = ?", True),
    ):
        rows = [json.dumps({"problem": form.format(n), "answer": str(n + 1)}) for n in (1, 2, 13)]
        (tmp_path / "boxes.jsonl").write_text("\n".join(rows), encoding="utf-8")
        loaded = load(tmp_path, template="chat_boxed", path=str(tmp_path / "boxes.jsonl"))
        lines = report_lines({"s": loaded}, {}, (), chat_tokenizer())
        assert sum(_TWICE in line for line in lines) == is_said, lines


class Today:
    """A day of its own each time it is written."""

    def __init__(self, days: Iterator[str]) -> None:
        self._days = days

    def strftime(self, form: str) -> str:
        return next(self._days)


PRESETS = {
    "qwen3_nothink": f"<|im_start|>user\n1+1?\n{BOXED}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    "qwen3_think": f"<|im_start|>user\n1+1?\n{BOXED}<|im_end|>\n<|im_start|>assistant\n",
    "chat_boxed": f"<|im_start|>user\n1+1?\n{BOXED}<|im_end|>\n<|im_start|>assistant\n",
    "plain_boxed": f"Problem:\n1+1?\n\n{BOXED}\n\nSolution:\n",
    "r1": "A conversation between User and Assistant. The user asks a question, and the Assistant solves it. The"
    " assistant first thinks about the reasoning process in the mind and then provides the user with the answer. The"
    " reasoning process and answer are enclosed within <think> </think> and <answer> </answer> tags, respectively, and"
    " the final answer is put within \\boxed{}.\nUser: 1+1?\nAssistant: <think>",
}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_to_the_character(tmp_path: Path, name: str) -> None:
    """What the documentation promises is what the model reads."""
    assert first_prompt(tmp_path, template=name) == PRESETS[name]
    assert PRESETS.keys() == TEMPLATES.keys()
    documented = Path(__file__).parents[2].joinpath("docs", "data.md").read_text(encoding="utf-8")
    assert f"`{name}`" in documented


def test_precedence_is_the_same_for_every_combination() -> None:
    """The set's own setting, its template, data's own setting, data's template, the default: first that says it."""
    chat, plain = TEMPLATES["qwen3_nothink"], TEMPLATES["plain_boxed"]
    layers = {
        "own": {"prompt_template": "own {problem}"},
        "template": {"template": "qwen3_nothink"},
        "data": {"prompt_template": "data {problem}"},
        "data_template": {"template": "plain_boxed"},
    }
    for given in itertools.product([False, True], repeat=4):
        on = dict(zip(layers, given, strict=True))
        config = Config()
        mine = (layers["own"] if on["own"] else {}) | (layers["template"] if on["template"] else {})
        config.data.train_sets = {"s": TrainSetConfig(path="x", **mine)}
        if on["data"]:
            config.data.prompt_template = "data {problem}"
        config.data.template = "plain_boxed" if on["data_template"] else ""
        found = train_set_configs(config)["s"].template
        named = chat if on["template"] else plain if on["data_template"] else Template()
        if on["own"]:
            expected = "own {problem}"
        elif on["template"]:
            expected = chat.prompt_template
        elif on["data"]:
            expected = "data {problem}"
        else:
            expected = named.prompt_template
        assert found.prompt_template == expected
        assert found.apply_chat_template == named.apply_chat_template
        assert found.chat_template_kwargs == named.chat_template_kwargs


def test_sets_of_both_kinds_and_their_defaults() -> None:
    """Short forms and sections are the same sets; what a set does not say comes from data, eval and rollout."""
    config = Config()
    config.data.train_path, config.data.max_prompt_tokens = "t.jsonl", 77
    config.data.eval_paths = {"a/b": "a.jsonl"}
    config.data.eval_sets = {"c": EvalSetConfig(path="c", samples=4, max_prompt_tokens=9, max_completion_tokens=33)}
    config.eval.samples, config.eval.temperature, config.eval.top_k = 2, 0.6, 20
    train, evaluated = train_set_configs(config), eval_set_configs(config)
    assert (
        list(train) == ["train"] and train["train"].key == "data.train_path" and train["train"].max_prompt_tokens == 77
    )
    assert list(evaluated) == ["a/b", "c"]
    assert (evaluated["a/b"].samples, evaluated["c"].samples) == (2, 4)
    assert evaluated["c"].temperature == 0.6 and evaluated["c"].top_k == 20 and evaluated["c"].max_prompt_tokens == 9
    assert evaluated["a/b"].max_completion_tokens == config.rollout.sampling.max_completion_tokens
    assert evaluated["c"].max_completion_tokens == 33


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "template": ({"data.template": "qwen3_notink"}, "data.template = 'qwen3_notink': .* did you mean 'qwen3_nothink'"),
    "set's template": ({"data.train_sets.a.template": "x"}, "data.train_sets.a.template = 'x'.*known: qwen3_nothink"),
    "no problem": ({"data.train_sets.a.prompt_template": "solve"}, "must contain {problem}"),
    "system": ({"data.system_prompt": "be kind"}, "system_prompt = 'be kind' needs the chat template"),
    "kwargs": ({"data.train_sets.a.chat_template_kwargs.x": 1}, "chat_template_kwargs = {'x': 1} needs the chat templ"),
    "length": (
        {"data.train_sets.a.max_prompt_tokens": 0},
        "data.train_sets.a.max_prompt_tokens = 0: must be at least 1",
    ),
    "weight": (
        {"data.train_sets.a.weight": 0, "data.mixing": "weighted"},
        "data.train_sets.a.weight = 0.0: must be greater than 0",
    ),
    "infinite": ({"data.train_sets.a.weight": "inf", "data.mixing": "weighted"}, "must be finite"),
    "idle weight": ({"data.train_sets.a.weight": 2}, "has no effect while data.mixing = concatenate"),
    "path": ({"data.train_sets.a.path": ""}, "data.train_sets.a.path is not set"),
    "file": ({"data.train_sets.a.path": "nowhere.csv"}, "data.train_sets.a.path = 'nowhere.csv': no such file"),
    "long path": ({"data.train_sets.a.path": "x" * 5000}, "File name too long"),
    "nul path": ({"data.train_sets.a.path": "x\0"}, "embedded null byte"),
    "split": ({"data.train_sets.a.split": "train"}, "data.train_sets.a.split = 'train' has no effect on a file"),
    "limit": ({"data.train_sets.a.limit": -1}, "data.train_sets.a.limit = -1"),
    "field": ({"data.answer_field": ""}, "data.answer_field = '': must not be empty"),
    "twice": (
        {"data.train_path": __file__, "data.train_sets.train.path": __file__},
        "are both set: train_path is short for a single training set",
    ),
    "eval twice": ({"data.eval_paths.e": __file__, "data.eval_sets.e.path": __file__}, "are both the set 'e'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_settings_are_named(case: str) -> None:
    """Key, value and what would be right, before a row is read."""
    values, said = WRONG[case]
    given: dict[str, Any] = {}
    for key, value in ({"data.train_sets.a.path": __file__} | values).items():
        *parents, name = key.split(".")
        section = given
        for parent in parents:
            section = section.setdefault(parent, {})
        section[name] = value
    config = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.create(given))
    with pytest.raises(UserError, match=said):
        settings = OmegaConf.to_object(config)
        check_ranges(settings)
        check_data(settings)


def test_messages_go_through_the_chat_template(tmp_path: Path) -> None:
    """verl's rows as they are: system turns, several turns, content in parts; the template's text in the last turn."""
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
    ]
    rendered = first_prompt(tmp_path, turns, apply_chat_template=True)
    opening = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"
    assert rendered == f"{opening}one\ntwo<|im_end|>\n<|im_start|>assistant\n"
    assert f"{opening}one\ntwo\n{BOXED}<|im_end|>" in first_prompt(tmp_path, turns, template="chat_boxed")
    one = [{"role": "user", "content": "1+1?"}]
    for own in ({"template": "qwen3_nothink"}, {"apply_chat_template": True, "system_prompt": "S"}):
        assert first_prompt(tmp_path, one, **own) == first_prompt(tmp_path, "1+1?", **own)
    assert first_prompt(tmp_path, apply_chat_template=True, system_prompt="S").startswith(
        "<|im_start|>system\nS<|im_end|>"
    )
    with pytest.raises(UserError, match=r"a.jsonl:1: the messages begin with a system turn, and system_prompt is set"):
        first_prompt(tmp_path, turns, apply_chat_template=True, system_prompt="S")
    with pytest.raises(UserError, match=r"a.jsonl:1: the last message is the assistant's"):
        first_prompt(tmp_path, [*one, {"role": "assistant", "content": "2"}], apply_chat_template=True)


def test_a_message_has_nothing_else_to_say(tmp_path: Path) -> None:
    """A chat template may render a call of a tool or a name; they were dropped without a word."""
    turn = {"role": "user", "content": "1+1?"}
    for empty in ({"name": None}, {"tool_calls": []}):
        assert first_prompt(tmp_path, [turn | empty], apply_chat_template=True) == first_prompt(
            tmp_path, [turn], apply_chat_template=True
        )
    for more in ({"name": "Ada"}, {"tool_calls": [{"function": "f"}]}, {"reasoning_content": "hm"}):
        with pytest.raises(UserError, match=rf"a.jsonl:1: '\w+\[0\].{next(iter(more))}' is not read"):
            first_prompt(tmp_path, [turn | more], apply_chat_template=True)


def test_a_template_that_cannot_work_is_said(tmp_path: Path) -> None:
    """No chat template, one that never reads a setting, one that refuses the row: a sentence, never a traceback."""
    plain = r"use a plain one \(template=plain_boxed, .* of messages with problem_field=problem\.0\.content\)"
    with pytest.raises(UserError, match=rf"tokenizer has none; {plain}"):
        first_prompt(tmp_path, tokenizer=chat_tokenizer(chat_template=None), template="qwen3_think")
    advice = r"data.train_sets.s.chat_template_kwargs=\{\}, as the template chat_boxed does"
    with pytest.raises(
        UserError, match=rf"chat_template_kwargs.enable_thinkin has no effect: this tokenizer.*{advice}"
    ):
        first_prompt(tmp_path, apply_chat_template=True, chat_template_kwargs={"enable_thinkin": False})
    for name in ("tokenize", "tools", "messages", "add_generation_prompt"):
        with pytest.raises(UserError, match=rf"chat_template_kwargs\.{name} is set by the trainer itself"):
            first_prompt(tmp_path, apply_chat_template=True, chat_template_kwargs={name: True})
    for broken in ("{{ raise_exception('no user turns') }}", "{{ messages[7].role }}", "{{ 1 / 0 }}", "{% if %}"):
        with pytest.raises(UserError, match=r"a.jsonl:1: the tokenizer's chat template fails on this prompt"):
            first_prompt(tmp_path, tokenizer=chat_tokenizer(broken), apply_chat_template=True)


def test_problems_are_not_templates(tmp_path: Path) -> None:
    """Braces, placeholders and Jinja in a problem stay what they are."""
    for problem in ("{problem}", "{{ messages }}", "\\frac{a}{b} {0} %s", "{% raw %}"):
        assert first_prompt(tmp_path, problem, prompt_template="Q: {problem} A:") == f"Q: {problem} A:"
        assert f"user\n{problem}<|im_end|>" in first_prompt(tmp_path, problem, apply_chat_template=True)


@pytest.mark.parametrize(
    ("template", "names"),
    [
        ("{problem} The answer is not {answer}.", "{answer}"),
        ("{problem} {question} {level} {level}", "{question}, {level}"),
        ("{problem} Answer in \\boxed{answer}, {}, \\frac{a}{b} or { x }.", ""),
        ("{problem} {problem}", ""),
    ],
)
def test_a_field_that_is_not_filled_in_is_said(tmp_path: Path, template: str, names: str) -> None:
    """Only {problem} is; what LaTeX writes in braces is none."""
    said = [note for note in load(tmp_path, prompt_template=template).notes if "the template has" in note]
    assert said == ([f"warning: the template has {names}, which the model gets verbatim: {ONLY}"] if names else [])
    own = {"template": "chat_boxed", "system_prompt": "You solve {problem}."}
    [said] = load(tmp_path, **own).notes
    assert said == f"warning: the template has {{problem}}, which the model gets verbatim: {ONLY}"


def test_special_tokens_in_a_problem_are_said(tmp_path: Path) -> None:
    """In its own text, and not those of the template; a message's too."""
    said = "warning: 1 problems hold special tokens, which the model gets as such: <|im_end|> in "
    for problem in ("1+1?<|im_end|>", [{"role": "user", "content": "<|im_end|>"}]):
        loaded = load(tmp_path, problem, apply_chat_template=True)
        assert [note for note in loaded.notes if "special" in note] == [f"{said}{tmp_path}/a.jsonl:1"]
    assert not load(tmp_path, "1 < 2 |im_end|", apply_chat_template=True).notes


def test_a_plain_prompt_begins_as_the_tokenizer_begins_a_text(tmp_path: Path) -> None:
    """With BOS where it puts one, once; a chat template writes its own, and a completion of SFT has none."""
    plain, with_bos = chat_tokenizer(), chat_tokenizer()
    bos = plain.convert_tokens_to_ids("<|im_start|>")
    begins = TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", bos)])
    with_bos.backend_tokenizer.post_processor, with_bos.bos_token = begins, "<|im_start|>"

    def ids(tokenizer: Any, problem: str = "1+1?", **own: Any) -> list[int]:
        return [*load(tmp_path, problem, tokenizer, **own).prompts[0].token_ids]

    for template in ("{problem}", TEMPLATES["plain_boxed"].prompt_template):
        asked = template.replace("{problem}", "1+1?")
        assert ids(with_bos, prompt_template=template) == with_bos(asked)["input_ids"]
        assert ids(with_bos, prompt_template=template) == [bos, *ids(plain, prompt_template=template)]
    assert ids(with_bos, "<|im_start|>1+1?") == ids(with_bos)
    assert ids(with_bos, template="chat_boxed") == ids(plain, template="chat_boxed")
    plain.bos_token = "<|im_start|>"  # as many name one that they do not put there
    assert ids(plain) == ids(with_bos)[1:]

    config = Config()
    (tmp_path / "sft.jsonl").write_text(json.dumps({"problem": "1+1?", "completion": "It is 2."}) + "\n")
    config.sft.examples_path, config.sft.examples_per_step = str(tmp_path / "sft.jsonl"), 1
    [sample], _ = load_examples(config, with_bos, {}, max_tokens=100)
    told = with_bos("It is 2.", add_special_tokens=False)["input_ids"]
    assert sample.token_ids.tolist() == [*ids(with_bos), *told, with_bos.eos_token_id]


def test_a_worked_solution_is_the_last_of_its_messages(tmp_path: Path) -> None:
    """The same example as with the solution in a field of its own."""
    tokenizer, config = chat_tokenizer(eos="<|im_end|>"), Config()
    asked = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
    asked += [{"role": "user", "content": "What is 1+1, please, in one word and without any steps?"}]
    told = {"role": "assistant", "content": "<think>\n</think>\n\nIt is 2."}
    file = tmp_path / "sft.jsonl"
    config.sft.examples_path, config.sft.examples_per_step = str(file), 1
    config.data.apply_chat_template, config.data.problem_field = True, "chat.turns"

    def read(row: dict[str, Any], completion_field: str) -> list[list[int]]:
        file.write_text(json.dumps(row) + "\n")
        config.sft.completion_field = completion_field
        return [one.token_ids.tolist() for one in load_examples(config, tokenizer, {}, max_tokens=200)[0]]

    apart = read({"chat": {"turns": asked}, "completion": told["content"]}, "completion")
    assert read({"chat": {"turns": [*asked, told]}}, "chat.turns") == apart
    for turns in (asked, [told], "text"):
        with pytest.raises(UserError, match=r"sft.jsonl:1: 'chat.turns' is data.problem_field and sft.completion_fi"):
            read({"chat": {"turns": turns}}, "chat.turns")


def _stops(
    tmp_path: Path, tokenizer: Any, *, chat: bool, generation: Any = None, own: tuple[int, ...] = (), engine: Any = "hf"
) -> list[str]:
    config = Config()
    config.rollout.engine = engine
    config.model.hf_path = str(tmp_path)
    config.rollout.sampling.stop_token_ids = list(own)
    config.data.train_sets = {"s": TrainSetConfig(path="x", apply_chat_template=chat)}
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    return tokenizer.convert_ids_to_tokens(stop_token_ids(config, tokenizer))


def test_stop_tokens_come_from_the_template(tmp_path: Path) -> None:
    """The end of turn where it is not the end of sequence, what the model's files name, and the settings' own; and
    where SGLang ends completions unasked, which would count as its fault elsewhere."""
    base = chat_tokenizer()
    assert _stops(tmp_path, base, chat=True) == ["<|im_end|>"]
    assert _stops(tmp_path, base, chat=False) == []
    assert _stops(tmp_path, chat_tokenizer(eos="<|im_end|>"), chat=True) == []
    plain_end = TEMPLATE.replace("<|im_end|>", "### User")
    assert _stops(tmp_path, chat_tokenizer(plain_end), chat=True) == []  # no special token: nothing to stop at
    assert _stops(tmp_path, base, chat=True, own=(1,)) == ["<|im_start|>", "<|im_end|>"]
    end, eos = base.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert _stops(tmp_path, base, chat=False, generation={"eos_token_id": [end, eos]}) == ["<|im_end|>"]
    assert _stops(tmp_path, base, chat=True, generation={"eos_token_id": eos}) == ["<|im_end|>"]
    assert _stops(tmp_path, base, chat=False, generation={}) == []
    assert _stops(tmp_path, base, chat=False, generation={"eos_token_id": [10**9, end]}) == ["<|im_end|>"]
    with pytest.raises(UserError, match=f"stop_token_ids: 9999 is no token of the model's {len(base)}$"):
        _stops(tmp_path, base, chat=True, own=(1, 9999))
    for bad in ("2", -1, True, 1.0, [None], {"a": 1}):
        with pytest.raises(UserError, match=r"generation_config.json: eos_token_id names .*which is not a token"):
            _stops(tmp_path, base, chat=False, generation={"eos_token_id": bad})
    (tmp_path / "generation_config.json").unlink()
    for ends in (end, [eos, end]):  # an SFT checkpoint whose config.json has kept the base model's
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "eos_token_id": ends}))
        assert _stops(tmp_path, base, chat=False) == ["<|im_end|>"]
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')  # by transformers' class, as the engines read it
    assert _stops(tmp_path, base, chat=False) == ["<|im_end|>"] == base.convert_ids_to_tokens([2])
    tool = chat_tokenizer()
    tool.add_special_tokens({"additional_special_tokens": ["<|eom_id|>"]})
    assert _stops(tmp_path, tool, chat=False) == ["<|im_end|>", "<|eom_id|>"]
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "eos_token_id": -1}')
    with pytest.raises(UserError, match=r"/config.json: eos_token_id names -1, which is not a token"):
        _stops(tmp_path, base, chat=False)
    (tmp_path / "config.json").unlink()
    (tmp_path / "generation_config.json").write_text("{oops")
    with pytest.raises(UserError, match=r"generation_config.json: transformers refuses it: .*not a valid JSON"):
        _stops(tmp_path, base, chat=False)


@pytest.mark.parametrize("config", [{"model_type": "llama"}, {"model_type": "qwen3", "eos_token_id": [2, 3]}])
def test_an_ordinary_token_is_no_end_by_config_json_alone(tmp_path: Path, config: dict[str, Any]) -> None:
    """Llama's class names token 2 where the file names none: '#' in this vocabulary. An engine that would end there
    unasked is refused; with a generation_config.json that is SGLang alone, unless that names the token too."""
    words = Tokenizer(WordLevel({"<eos>": 0, "a": 1, "#": 2, "<end>": 3}, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<eos>", additional_special_tokens=["<end>"], unk_token="a"
    )
    (tmp_path / "config.json").write_text(json.dumps(config))
    special = ["<end>"] if "eos_token_id" in config else []
    refusal = r"/config.json: {} would end completions at '#', token 2, .*: write the model's own eos_token_id into it"
    assert _stops(tmp_path, tokenizer, chat=False) == special
    for engine in ("vllm", "sglang"):
        with pytest.raises(UserError, match=refusal.format(engine)):
            _stops(tmp_path, tokenizer, chat=False, engine=engine)
    for engine in ("hf", "vllm"):
        assert _stops(tmp_path, tokenizer, chat=False, engine=engine, generation={"eos_token_id": 3}) == ["<end>"]
    with pytest.raises(UserError, match=refusal.format("sglang")):
        _stops(tmp_path, tokenizer, chat=False, engine="sglang")
    meant = {"eos_token_id": [3, 2]}
    assert _stops(tmp_path, tokenizer, chat=False, engine="sglang", generation=meant) == ["<end>", "#"]


def test_todays_date_in_every_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama 3.2's template has it unless it is told a date: it is told Llama's own default, or what is set, or a set
    would have another fingerprint tomorrow. Where a template has no such switch there is a warning. One that never
    writes today's keeps the date that it has."""
    switch = "{% if date_string is not defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    days = iter(["1 Aug 2026", "2 Aug 2026"])
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", SimpleNamespace(now=lambda: Today(days)))
    dated = chat_tokenizer(switch + "{{ 'Today: ' + date_string + '\\n' }}" + TEMPLATE)
    for told, day in (({}, "26 Jul 2024"), ({"date_string": "3 Mar 2025"}, "3 Mar 2025")):
        found = load(tmp_path, tokenizer=dated, template="chat_boxed", chat_template_kwargs=told)
        assert found.prompts[0].text.startswith(f"Today: {day}\n<|im_start|>user") and found.notes == ()
    always = chat_tokenizer("{{ strftime_now('%d %b %Y') }}" + TEMPLATE)
    first, second = (load(tmp_path, tokenizer=always, template="chat_boxed") for _ in range(2))
    assert first.fingerprint != second.fingerprint
    assert all("checkpoint.may_change=[data.train_sets.s]" in "".join(one.notes) for one in (first, second))
    assert load(tmp_path, tokenizer=always, template="plain_boxed").notes == ()
    for date in ("date_string or strftime_now('%d')", "date_string | default(strftime_now('%d'))"):
        assert not varies(f"{{% set date_string = {date} %}}{{{{ date_string }}}}")
    assert varies("{% set date_string = strftime_now('%d') %}{{ date_string }}")
    own = "{% if not date_string is defined %}{% set date_string = '26 July 2024' %}{% endif %}{{ date_string }}"
    found = load(tmp_path, tokenizer=chat_tokenizer(own + TEMPLATE), template="chat_boxed")
    assert found.prompts[0].text.startswith("26 July 2024<|im_start|>user")
