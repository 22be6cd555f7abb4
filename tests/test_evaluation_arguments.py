"""What `eval` makes of its words: sets, settings and the run that is named. Nothing is generated here."""

from __future__ import annotations

import argparse
import copy
import functools
import json
import random
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from data.chat_tokenizer import chat_tokenizer
from support.cases import Choose
from support.job import REPOSITORY, job_config

from dppo_megatron.config.checks import check_values
from dppo_megatron.config.data import EvalSetConfig
from dppo_megatron.config.load import config_values, read_config, save_config
from dppo_megatron.config.resolved_sets import TEMPLATES, eval_set_configs, longest_sequence, set_rewards
from dppo_megatron.config.schema import Config
from dppo_megatron.data.sets import stop_token_ids
from dppo_megatron.evaluation.arguments import EvalArguments, prepare
from dppo_megatron.types import UserError
from dppo_megatron.workbench.cli import main, parse, program
from dppo_megatron.workbench.commands import evaluate
from dppo_megatron.workbench.commands.evaluate import split_settings


def test_the_pages_example_is_a_file_of_sets(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `data` and `eval` hold beside what sets have is no setting of a set, and nothing of theirs is lost."""
    monkeypatch.chdir(tmp_path)
    page = (REPOSITORY / "docs" / "evaluation.md").read_text()
    text = page[page.index("```yaml\neval: {every_steps") + 8 :].partition("```")[0]
    for name in ("data/aime24/test.jsonl", "data/gsm8k/test.jsonl", "mine.parquet"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    more = "  train_path: t.jsonl\n  where: [level > 3]\n  problem_field: question\n"
    for form in (text, text + more, yaml.safe_dump(yaml.safe_load(text + more) | {"steps": 3})):
        (tmp_path / "sets.yaml").write_text(form)
        config, _, _ = prepare(EvalArguments(str(files / "model"), sets=["sets.yaml"]))
        sets = eval_set_configs(config)
        assert [(of.samples, of.temperature, of.top_p) for of in sets.values()] == [
            (32, 0.6, 0.95),
            (1, 0.0, 0.95),
            (4, 0.6, 0.95),
        ]
        assert sets["gsm8k"].limit == 200 and sets["mine/hard"].reward.function == "my_module:grade"
        assert {one.problem_field for one in sets.values()} == {"problem" if form == text else "question"}
        assert not any(one.where for one in sets.values())
    for wrong in ("data: {limit: 3,", "eval: {every: 3}\ndata: {", "eval: {samples: x}\ndata: {"):
        (tmp_path / "sets.yaml").write_text(wrong + " eval_sets: {a: {path: mine.parquet}}}")
        with pytest.raises(UserError, match=r"data\.limit|eval\.every|samples"):
            prepare(EvalArguments(str(files / "model"), sets=["sets.yaml"]))


def test_evaluations_of_4b_on_the_pages_start_servers(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The embedded engine, which is the default, is for small models: it uses one GPU of the machine."""
    shown = [("README.md", "runs/math_qwen3_4b_dppo"), ("docs/evaluation.md", "Qwen3-4B")]
    monkeypatch.chdir(tmp_path)
    trained = read_config(str(REPOSITORY / "configs" / "math" / "qwen3_4b_dppo.yaml"), [])
    (tmp_path / "runs" / "math_qwen3_4b_dppo").mkdir(parents=True)
    save_config(trained, tmp_path / "runs" / "math_qwen3_4b_dppo" / "config.yaml")
    for place in ("Qwen3-4B", "runs/math_qwen3_4b_dppo/hf"):
        shutil.copytree(files / "model", tmp_path / place)
    for name in yaml.safe_load((REPOSITORY / "configs" / "eval" / "six.yaml").read_text())["data"]["eval_sets"]:
        (tmp_path / "data" / name).mkdir(parents=True)
        (tmp_path / "data" / name / "test.jsonl").touch()
    for page, model in shown:
        text = (REPOSITORY / page).read_text().replace("\\\n", " ").replace("/envs/vllm/bin/python", sys.executable)
        [line] = [one for one in text.splitlines() if one.startswith(f"dppo-megatron eval {model} ")]
        arguments = parse(program(), shlex.split(line.partition(" #")[0])[1:])
        names, settings = split_settings(arguments.sets)
        config, _, _ = prepare(EvalArguments(model, [*arguments.overrides, *settings], names, data=arguments.data))
        rollout, sets = config.rollout, config.data.eval_sets
        assert (rollout.engine, rollout.servers.launch, len(sets)) == ("vllm", "local", 6)
        assert rollout.servers.gpus == (trained.rollout.servers.gpus if model.startswith("runs/") else [])


def test_settings_may_stand_anywhere() -> None:
    """Before and after options, as `main` parses once settings may stand between options; and among the sets."""
    parser = argparse.ArgumentParser()
    evaluate.add_options(parser)
    words = ["M", "seed=1", "--sets", "six", "mine=x", "rollout.engine=vllm", "--step", "2", "eval.samples=4"]
    arguments = parser.parse_intermixed_args(words)
    assert (arguments.model, arguments.step) == ("M", 2)
    assert arguments.overrides == ["seed=1", "eval.samples=4"]
    assert split_settings(arguments.sets) == (["six", "mine=x"], ["rollout.engine=vllm"])
    assert split_settings(["eval=x.jsonl", "a.b=y", "seed=3"]) == (["eval=x.jsonl", "a.b=y"], ["seed=3"])


def test_a_setting_among_the_sets_does_not_beat_a_later_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two values of which one is among the sets are refused in either order, but not one value or two in one place."""
    sets = ["--sets", "s=gone.jsonl", "eval.samples=2", "--out", str(tmp_path)]
    for words in ([*sets, "eval.samples=3"], ["eval.samples=3", *sets]):
        assert main(["eval", str(tmp_path), *words]) == 2
        assert "eval.samples=2 is among the sets and eval.samples=3 is not: give one" in capsys.readouterr().err
    for words in ([*sets, "eval.samples=2"], ["eval.samples=2", "eval.samples=3", *sets[:2]]):
        assert main(["eval", str(tmp_path), *words]) == 2
        assert "holds neither config.json" in capsys.readouterr().err


def test_a_dtype_that_is_not_the_models_is_said(files: Path, tmp_path: Path) -> None:
    """There is no setting for float16."""
    model = shutil.copytree(files / "model", tmp_path / "model")
    stated = json.loads((model / "config.json").read_text())
    for dtype, own, used in (("float16", [], "bfloat16"), ("float32", [], ""), ("float32", ["bfloat16"], "bfloat16")):
        (model / "config.json").write_text(json.dumps(stated | {"dtype": dtype}))
        settings = [f"model.dtype={one}" for one in own]
        _, _, notes = prepare(EvalArguments(str(model), settings, sets=[f"s={files / 'heldout.jsonl'}"]))
        assert list(notes) == ([f"the model's own dtype is {dtype}; it is evaluated in {used}"] if used else [])


SERVED: dict[str, list[Any]] = {
    "rollout.engine": ["vllm", "sglang"],
    "rollout.async_steps": [0, 1, 3],
    "rollout.quantization": ["off", "fp8", "fp8_pow2"],
    "rollout.speculation.method": ["none", "ngram", "suffix", "eagle3"],
    "rollout.sync.channel": ["auto", "disk", "gloo", "nccl", "ipc"],
    "rollout.sync.in_flight": ["finish", "abort", "continue"],
    "rollout.servers.colocate": [False, True],
    "rollout.servers.min_servers": [1, 3],
    "rollout.servers.gpus": [[], ["0", "1"]],
    "rollout.servers.count": [1, 2],
    "objective.correction.level": ["none", "token", "sequence"],
    "objective.loss": ["clip", "divergence_tv"],
    "actor.offload": ["auto", "all", "none"],
    "actor.routing_replay": ["off", "actor", "engine"],
}
"""Settings that servers are needed for, or that need servers."""


def test_whatever_servers_a_run_had(files: Path, tmp_path: Path, cases: Choose) -> None:
    """Its model is evaluated by the embedded engine, and as the printed advice says."""
    (tmp_path / "hf").symlink_to(files / "model")
    plain = job_config(files, tmp_path, model__dtype="bfloat16")
    for number in cases("served run", 20):
        draw = random.Random(f"served run {number}")
        config: Config | None = None
        while config is None:
            config = _served(plain, draw, str(files / "model"))
        save_config(config, tmp_path / "config.yaml")
        alone, _, said = prepare(EvalArguments(str(tmp_path), follow=draw.random() < 0.5))
        assert alone.rollout.engine == "hf" and config.rollout.engine in said[0], config
        assert (len(said) == 2) == (config.rollout.quantization != "off")
        there = draw.choice(["launch=local", "endpoints=[http://127.0.0.1:1]"])
        own = [f"rollout.engine={config.rollout.engine}", f"rollout.servers.{there}"]
        served, _, said = prepare(EvalArguments(str(tmp_path), own, follow=draw.random() < 0.5))
        assert served.rollout.quantization == config.rollout.quantization and len(said) == 1, config


def _served(plain: Config, draw: random.Random, drafter: str) -> Config | None:
    """A random run on servers; None if it could not be trained."""
    config = copy.deepcopy(plain)
    for key, values in SERVED.items():
        *sections, name = key.split(".")
        setattr(functools.reduce(getattr, sections, config), name, draw.choice(values))
    if config.rollout.speculation.method == "eagle3":
        config.rollout.speculation.draft_path = drafter
    there = {"endpoints": ["http://127.0.0.1:2"], "launch": "local", "registry_dir": "registry"}
    name = draw.choice([*there])
    setattr(config.rollout.servers, name, there[name])
    try:
        check_values(config)
    except UserError:
        return None
    return config


FOR_ALL: dict[str, tuple[Any, Any, str]] = {
    "eval.samples": (4, 8, ""),
    "eval.temperature": (0.5, 0.0, ""),
    "eval.top_p": (0.5, 0.75, ""),
    "eval.top_k": (5, 7, ""),
    "eval.max_completion_tokens": (4, 8, ""),
    "data.problem_field": ("theirs", "mine", ""),
    "data.answer_field": ("theirs", "mine", ""),
    "data.answer_from": ("last", "boxed", ""),
    "data.source_field": ("theirs", "mine", ""),
    "data.level_field": ("theirs", "mine", ""),
    "data.level_is": ("difficulty", "solve_rate", ""),
    "data.max_prompt_tokens": (50, 60, ""),
    "data.overlong": ("error", "filter", ""),
    "data.where": (["problem != x"], ["level > 3"], ""),
    "data.template": ("plain_boxed", "chat_boxed", "template"),
    "data.prompt_template": ("a {problem}", "b {problem}", "template.prompt_template"),
    "data.system_prompt": ("a", "b", "template.system_prompt"),
    "data.apply_chat_template": (True, False, "template.apply_chat_template"),
    "data.chat_template_kwargs": ({"a": 1}, {"b": 2}, "template.chat_template_kwargs"),
}
"""Setting, what a set has of its own, what the command line says, and where that is found if not by its name."""


@pytest.mark.parametrize("key", FOR_ALL)
def test_the_command_line_is_for_all_sets(files: Path, tmp_path: Path, key: str) -> None:
    """Of a run, of its file as a config and of a file of sets: in place of what a set or its template says, unless the
    command line says it of the set."""
    (tmp_path / "hf").symlink_to(files / "model")
    path, name, (own, now, where) = str(files / "heldout.jsonl"), key.partition(".")[2], FOR_ALL[key]
    chat = {"apply_chat_template": True} if name in ("system_prompt", "chat_template_kwargs") else {}
    plain = {"path": path, "where": ["problem != x"]}
    held = {"own": plain | chat | {name: own}, "no": plain | chat, "said": plain | {"template": "r1"} | chat}
    (tmp_path / "sets.yaml").write_text(yaml.safe_dump({"data": {"eval_sets": held}}))
    config = job_config(files, tmp_path, data__eval_paths="{}")
    config.data.eval_paths = {"short": path} if key in ("data.overlong", "data.where") else {}
    config.data.eval_sets = {name: EvalSetConfig(**of) for name, of in held.items()}
    save_config(config, tmp_path / "config.yaml")
    model, settings = str(files / "model"), [f"{key}={json.dumps(now) if isinstance(now, dict) else now}"]
    for asked in (
        EvalArguments(str(tmp_path), settings),
        EvalArguments(str(tmp_path / "config.yaml"), settings),
        EvalArguments(model, settings, sets=[str(tmp_path / "sets.yaml")]),
        EvalArguments(str(tmp_path), [f"data.eval_sets.own.{name}={own}", *settings]),
    ):
        of_its_own = asked.settings[0] != settings[0]
        for set_name, one in eval_set_configs(prepare(asked)[0]).items():
            both = now | own if isinstance(now, dict) else own  # mappings are merged, as everywhere
            wanted = both if of_its_own and set_name == "own" else now
            wanted = TEMPLATES[wanted] if key == "data.template" else wanted
            found = functools.reduce(getattr, (where or name).split("."), one)
            assert found == wanted, (asked, set_name)
            assert name == "where" or one.where == ([] if set_name == "short" else ["problem != x"])


def test_sets_are_in_place_of_those_of_a_config_or_run(files: Path, tmp_path: Path) -> None:
    """Also where the config has one of that name, under `eval_paths` or with settings of its own."""
    (tmp_path / "hf").symlink_to(files / "model")
    config = job_config(files, tmp_path)
    config.data.eval_paths = {"paths": str(files / "heldout.jsonl")}
    own = {"path": str(files / "heldout.jsonl"), "samples": 5, "template": "r1"}
    config.data.eval_sets = {"mine": EvalSetConfig(**own), "other": EvalSetConfig(**own)}
    save_config(config, tmp_path / "config.yaml")
    path = str(files / "train.jsonl")
    for model in (str(tmp_path), str(tmp_path / "config.yaml")):
        found = eval_set_configs(prepare(EvalArguments(model, sets=[f"mine={path}", f"paths={path}"]))[0])
        assert [(name, of.path, of.samples) for name, of in found.items()] == [("mine", path, 1), ("paths", path, 1)]
        assert found["mine"].template == found["paths"].template
        # a path stays one: an evaluation that an older version began names it so
        assert eval_set_configs(prepare(EvalArguments(model))[0])["paths"].key == "data.eval_paths.paths"
        limited = eval_set_configs(prepare(EvalArguments(model, limit=3))[0])
        assert {of.limit for of in limited.values()} == {3} and limited.keys() == {"paths", "mine", "other"}


def test_a_file_of_sets_and_the_same_as_a_config_are_the_same_prompts(files: Path, tmp_path: Path) -> None:
    """A set's `template` goes before what the file says of one for all sets, and null is what is left out. But in
    a config `data.overlong` and `data.where` are of its training sets; a file of sets has none."""
    path = str(files / "heldout.jsonl")
    for_all: dict[str, Any] = {"template": "plain_boxed", "prompt_template": "all: {problem}", "max_prompt_tokens": 50}
    for_all |= {"overlong": "filter", "where": ["level > 3"]}
    sets = {
        "named": {"path": path, "template": "r1", "max_prompt_tokens": None, "overlong": "error"},
        "both": {"path": path, "template": "plain_boxed", "prompt_template": "own: {problem}"},
        "own": {"path": path, "prompt_template": "own: {problem}"},
        "none": {"path": path},
    }
    values = {"data": for_all | {"eval_sets": sets}, "eval": {"samples": 3}}
    (tmp_path / "sets.yaml").write_text(yaml.safe_dump(values))
    model = str(files / "model")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values | {"model": {"hf_path": model}}))
    asked = EvalArguments(str(tmp_path / "config.yaml")), EvalArguments(model, sets=[str(tmp_path / "sets.yaml")])
    as_config, as_sets = (eval_set_configs(prepare(one)[0]) for one in asked)
    assert [one.template for one in as_sets.values()] == [one.template for one in as_config.values()]
    assert {one.max_prompt_tokens for one in as_sets.values()} == {50}
    assert {one.overlong for one in as_config.values()} == {"error"}
    assert {name for name, one in as_sets.items() if one.overlong == "filter"} == {"both", "own", "none"}
    assert not any(one.where for one in as_config.values())
    assert all(one.where == ["level > 3"] for one in as_sets.values())
    assert as_sets["named"].template == TEMPLATES["r1"] and {one.samples for one in as_sets.values()} == {3}


def test_one_key_of_a_chat_template_is_for_all_sets_too(files: Path, tmp_path: Path) -> None:
    """In place of what a set's template fixes, and unless the command line says it of the set."""
    path = str(files / "heldout.jsonl")
    held = {"thinks": {"path": path, "template": "qwen3_think"}, "chat": {"path": path, "template": "chat_boxed"}}
    (tmp_path / "sets.yaml").write_text(yaml.safe_dump({"data": {"eval_sets": held}}))
    given = ["data.chat_template_kwargs.enable_thinking=false"]
    for more, wanted in (([], False), (["data.eval_sets.thinks.chat_template_kwargs.enable_thinking=true"], True)):
        asked = EvalArguments(str(files / "model"), [*given, *more], sets=[str(tmp_path / "sets.yaml")])
        sets = eval_set_configs(prepare(asked)[0])
        found = {name: one.template.chat_template_kwargs for name, one in sets.items()}
        assert found == {"thinks": {"enable_thinking": wanted}, "chat": {"enable_thinking": False}}


def test_completions_end_where_those_of_the_run_do(files: Path, tmp_path: Path) -> None:
    """At the end of turn of the chat template that was trained with, also for sets without it; but training's lengths,
    rewards and files are not the evaluation's."""
    (tmp_path / "hf").symlink_to(files / "model")
    config = job_config(files, tmp_path, data__eval_paths="{}")
    config.data.eval_paths = {}
    config.data.template, config.data.max_prompt_tokens = "chat_boxed", 5000
    config.data.eval_sets = {
        "plain": EvalSetConfig(path=str(files / "heldout.jsonl"), template="r1", max_prompt_tokens=50)
    }
    path = "${oc.env:DPPO_TEST_NOT_SET}/t.jsonl"
    turn_end = chat_tokenizer().convert_tokens_to_ids("<|im_end|>")
    for trained in ({"train_path": path}, {"train_sets": {"a": {"path": path, "reward": {"function": "gone:f"}}}}):
        values = config_values(config)
        values["data"] |= {"train_path": ""} | trained
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
        found = prepare(EvalArguments(str(tmp_path)))[0]
        assert turn_end in stop_token_ids(found, chat_tokenizer()) and set_rewards(found).keys() == {"reward"}
        assert longest_sequence(found)[0] == 50 + 16
    alone = prepare(EvalArguments(str(files / "model"), sets=[f"s={files / 'heldout.jsonl'}"]))[0]
    assert turn_end not in stop_token_ids(alone, chat_tokenizer())
