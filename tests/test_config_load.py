"""How a configuration comes about: parents, the command line, references; and what YAML must not do unseen."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from dppo_megatron.config.changes import check_changes
from dppo_megatron.config.load import config_from_values, config_values, load_config, read_config, save_config
from dppo_megatron.config.paths import import_as_in
from dppo_megatron.config.plugins import load_function
from dppo_megatron.config.schema import Config
from dppo_megatron.observe.run_directory import RunDirectory
from dppo_megatron.types import UserError


def _read(tmp_path: Path, text: str, *overrides: str) -> Config:
    path = tmp_path / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return read_config(str(path), list(overrides))


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


class TestParents:
    def test_a_child_says_only_what_differs(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The nearest wins, whatever the working directory; parents are found beside the file that names them."""
        _write(tmp_path / "base" / "root.yaml", "seed: 1\nsteps: 10\nrollout: {sampling: {top_p: 0.5, top_k: 3}}\n")
        _write(tmp_path / "base" / "other.yaml", "defaults: root.yaml\nsteps: 20\n")
        _write(tmp_path / "jobs" / "extra.yaml", "rollout: {sampling: {top_k: 7}}\ndata: {eval_paths: {a: 1.jsonl}}\n")
        _write(
            tmp_path / "jobs" / "job.yaml",
            "defaults: [../base/other.yaml, extra.yaml]\nrun_dir: here\ndata: {eval_paths: {b: 2.jsonl}}\n",
        )
        read = []
        for place in (tmp_path, tmp_path / "jobs", Path("/")):
            monkeypatch.chdir(place)
            read.append(read_config(os.path.relpath(tmp_path / "jobs" / "job.yaml"), ["seed=5"]))
        config = read[0]
        assert read[1] == config and read[2] == config
        assert (config.seed, config.steps, config.rollout.sampling.top_p, config.rollout.sampling.top_k) == (
            5,
            20,
            0.5,
            7,
        )
        assert config.data.eval_paths == {"a": "1.jsonl", "b": "2.jsonl"} and config.run_dir == "here"

    def test_an_empty_section_changes_nothing(self, tmp_path: Path) -> None:
        """All of its lines are commented out; a value in its place is still refused, and so is an empty setting."""
        _write(tmp_path / "root.yaml", "rollout: {sampling: {top_k: 3}}\n")
        text = "defaults: root.yaml\nrollout:\n  sampling:\n    # top_k: 7\neval:\n# every_steps: 3\n"
        assert _read(tmp_path, text) == _read(tmp_path, "defaults: root.yaml\n")
        for wrong in ("rollout: null\n", "rollout: 3\n", "rollout: {sampling: ''}\n", "data:\n  eval_paths:\n"):
            with pytest.raises(UserError, match=r"a section of settings|must be"):
                _read(tmp_path, wrong)

    def test_a_circle_is_named(self, tmp_path: Path) -> None:
        """With every file on the way, also over a link."""
        _write(tmp_path / "a.yaml", "defaults: b.yaml\n")
        _write(tmp_path / "b.yaml", "defaults: [c.yaml]\n")
        (tmp_path / "c.yaml").symlink_to(tmp_path / "a.yaml")
        with pytest.raises(UserError, match=r"form a cycle: .*a\.yaml -> .*b\.yaml -> .*c\.yaml"):
            read_config(str(tmp_path / "a.yaml"), [])

    def test_one_parent_twice_is_no_circle(self, tmp_path: Path) -> None:
        """Two parents may share theirs."""
        _write(tmp_path / "root.yaml", "seed: 4\n")
        for name in ("a", "b"):
            _write(tmp_path / f"{name}.yaml", "defaults: root.yaml\n")
        assert _read(tmp_path, "defaults: [a.yaml, b.yaml]\n").seed == 4

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("defaults: nope.yaml", r"nope\.yaml', a parent of '.*config\.yaml', does not exist"),
            ("defaults: {a: b}", r"config\.yaml:1: defaults must be the parent's file"),
            ("seed: 1\ndefaults: 3", r"config\.yaml:2: defaults must be"),
            ("defaults: ''", "defaults must be"),
            ("defaults: a.yaml\ndefaults: b.yaml", r"config\.yaml:2: the key 'defaults' appears twice"),
            ("defaults: .", "cannot be read: Is a directory"),
        ],
    )
    def test_what_is_no_parent(self, tmp_path: Path, text: str, message: str) -> None:
        """File and line."""
        with pytest.raises(UserError, match=message):
            _read(tmp_path, text)


class TestCommandLine:
    def test_mappings_of_names(self, tmp_path: Path) -> None:
        """`=` replaces what a file has, a name adds to it; `{}` removes it, also in a child file."""
        base = "data: {eval_paths: {a: 1, b: 2}}".replace("1", "x").replace("2", "y")
        assert _read(tmp_path, base, "data.eval_paths={}").data.eval_paths == {}
        assert _read(tmp_path, base, "data.eval_paths={}", "data.eval_paths.c=z").data.eval_paths == {"c": "z"}
        assert _read(tmp_path, base, "data.eval_paths.c=z").data.eval_paths == {"a": "x", "b": "y", "c": "z"}
        assert _read(tmp_path, base, "data.eval_paths={c: z}").data.eval_paths == {"c": "z"}
        _write(tmp_path / "base.yaml", base)
        child = "defaults: base.yaml\ndata: {eval_paths: {}}\n"
        assert _read(tmp_path, child, "data.eval_paths.d=w").data.eval_paths == {"d": "w"}

    def test_names_with_dots_and_slashes(self, tmp_path: Path) -> None:
        """Quotes hold a name together; a slash needs none."""
        items = ['data.eval_paths."math/500.v2"=a.b=c', "data.eval_paths.aime/24=x", "data.eval_paths.'1=2'=y"]
        assert _read(tmp_path, "", *items).data.eval_paths == {"math/500.v2": "a.b=c", "aime/24": "x", "1=2": "y"}
        config = _read(tmp_path, "", 'data.train_sets."gsm.8k".path=p', 'data.train_sets."gsm.8k".weight=2')
        assert (config.data.train_sets["gsm.8k"].path, config.data.train_sets["gsm.8k"].weight) == ("p", 2.0)
        with pytest.raises(UserError, match=r'a name with a dot is quoted: data\.eval_paths\."math\.500"='):
            _read(tmp_path, "", "data.eval_paths.math.500=x")

    def test_sets_are_merged_by_name_and_setting(self, tmp_path: Path) -> None:
        """A child may change one setting of one set."""
        base = "data: {eval_sets: {a: {path: p, samples: 4}, b: {path: q}}}"
        config = _read(tmp_path, base, "data.eval_sets.a.samples=8")
        assert config.data.eval_sets["a"].path == "p" and config.data.eval_sets["a"].samples == 8
        assert config.data.eval_sets["b"].samples is None

    @pytest.mark.parametrize(
        ("text", "value"),
        [
            *(("010", "010"), ("1e3", "1e3"), ("on", "on"), ("2026-11-22", "2026-11-22"), ("a: b", "a: b")),
            *(("{problem}", "{problem}"), ("'null'", "null"), ('"a\\nb"', "a\nb"), ("'it''s'", "it's"), ("", "")),
            *(("#c", "#c"), ("*x", "*x"), ("!!str 5", "!!str 5"), ("[a", "[a"), (" x ", " x "), ("a=b=c", "a=b=c")),
        ],
    )
    def test_a_text_is_what_was_typed(self, tmp_path: Path, text: str, value: str) -> None:
        """No word of a path or template is YAML; quotes around all of it are taken off."""
        assert _read(tmp_path, "", f"data.prompt_template={text}").data.prompt_template == value

    def test_lists(self, tmp_path: Path) -> None:
        """YAML's, and of the setting's type; a single value is told how to be one."""
        config = _read(tmp_path, "", 'rollout.servers.gpus=["0,1", "2"]', "rollout.sampling.stop_token_ids=[1, 2]")
        assert config.rollout.servers.gpus == ["0,1", "2"] and config.rollout.sampling.stop_token_ids == [1, 2]
        with pytest.raises(
            UserError, match=r"rollout\.servers\.endpoints = http://h:1: must be a list: \[http://h:1\]"
        ):
            _read(tmp_path, "", "rollout.servers.endpoints=http://h:1")
        with pytest.raises(UserError, match=r"rollout\.servers\.gpus\[0\] = 0: must be text; write it in quotes: '0'"):
            _read(tmp_path, "", "rollout.servers.gpus=[0]")


# what stands in the file, what the message must say, with the line
STRICT = {
    "seed: true": r"config\.yaml:1: seed = true: must be a whole number",
    "\nseed: 1.0": r"config\.yaml:2: seed = 1\.0: must be a whole number",
    "seed: 010": r"seed = 010: must be a whole number in plain decimal digits",
    "seed: 0x10": "seed = 0x10: must be a whole number in plain",
    "seed: 1:30": "seed = 1:30: must be a whole number in plain",
    "seed: '5'": "seed = '5': must be a whole number",
    "seed: 1e3": "seed = 1e3: must be a whole number",
    "seed:": "seed = '': must be a whole number, not null",
    "rollout: {sampling: {temperature: true}}": r"rollout\.sampling\.temperature = true: must be a number",
    "rollout: {sampling: {temperature: .nan}}": r"rollout\.sampling\.temperature = \.nan: must be a finite number",
    "rollout: {sampling: {temperature: 1:30.5}}": r"temperature = 1:30\.5: must be a number",
    "rollout: {sampling: {temperature: 1e999}}": "must be a finite number",
    "rollout: {servers: {colocate: 1}}": r"rollout\.servers\.colocate = 1: must be true or false",
    "rollout: {servers: {colocate: 'yes'}}": "must be true or false",
    "run_dir: 5": r"run_dir = 5: must be text; write it in quotes: '5'",
    "run_dir: true": "must be text; write it in quotes: 'true'",
    "run_dir: .inf": "run_dir = .inf: must be",
    "steps: 1_000": "steps = 1_000: must be a whole number in plain decimal digits",
    "rollout: {servers: {colocate: yes}}": r"rollout\.servers\.colocate = yes: must be true or false",
    "rollout: {sampling: {temperature: 010}}": r"temperature = 010: must be a number",
    "run_dir: [a]": r"run_dir = \[\.\.\.\]: must be text",
    'run_dir: "a\\0b"': "holds a NUL",
    'run_dir: "\\ud800"': "half of a surrogate pair",
    "run_dir: !!python/name:os.getcwd ''": r"the tag tag:yaml\.org,2002:python/name:os\.getcwd is not read",
    "seed: 1\nrun_dir: !mine x": "line 2: the tag !mine is not read",
    "rollout: !!python/object:os.x {top_k: 1}": "the tag tag:yaml.org,2002:python/object:os.x is not read",
    "data: {eval_paths: !!set {a, b}}": "the tag tag:yaml.org,2002:set is not read",
    "seed: !!int 5": "the tag tag:yaml.org,2002:int is not read",
    "data: {eval_paths: {1: x}}": "the key 1 is not text to YAML",
    "data: {chat_template_kwargs: {a: .inf}}": r"data\.chat_template_kwargs\.a = \.inf: must be a finite number",
    **{
        f"data: {{chat_template_kwargs: {{a: {word}}}}}": f"a = {word}: is no text, number, true, false or null"
        for word in ("2026-11-22", "yes", "010", "1:30", "0x10", "1_000")
    },
    "data: {chat_template_kwargs: {a: ${seed}}}": "is not|not valid YAML",
    "data: {chat_template_kwargs: {a: '${seed}'}}": r"takes no \$\{\.\.\.\}",
    "seed: 1\nsteps: 2\nseed: 3": r"config\.yaml:3: the key 'seed' appears twice, first in line 1",
    "rollout:\n  top_k: 1\n  top_k: 1": r"config\.yaml:3: the key 'top_k' appears twice",
    "rollout:\n\ttop_k: 1": "config.yaml': not valid YAML: line 2",
    "- a": "must hold a mapping of keys",
    "just text": "must hold a mapping of keys",
    "seed: 1\n---\nseed: 2": "not valid YAML",
    "model: {dtype: float64}": "must be one of float32, bfloat16",
    "pruning: {prompt: {design: sistematic}}": "did you mean 'systematic'",
    "pruning: {completion: {estimator: hayek}}": "must be one of ht, fixed_size_ht, hajek; did you mean 'hajek'",
    "pruning: {prompt: {score: betta}}": "did you mean 'beta'",
    "data: {train_sets: {a: {overlong: cut}}}": r"data\.train_sets\.a\.overlong = cut: must be one of error, filter",
    "data: {train_sets: {a: {pth: x}}}": r"did you mean 'data\.train_sets\.a\.path'\?",
}


@pytest.mark.parametrize("text", STRICT, ids=lambda text: text[:40])
def test_yaml_does_nothing_behind_ones_back(tmp_path: Path, text: str) -> None:
    """What YAML reads otherwise than it looks, or as another type, is refused with file and line."""
    with pytest.raises(UserError, match=STRICT[text]):
        _read(tmp_path, text)


def test_what_yaml_says_well_is_read(tmp_path: Path) -> None:
    """Anchors, merges, numbers that are text to YAML 1.1, and texts that are booleans, numbers and dates to it."""
    text = (
        "actor:\n  optimizer: &opt {learning_rate: 1e-6, weight_decay: 10.5}\n  fp8: off\n"
        + "sft: {learning_rate: 5e-1, steps: +3, examples_path: 010}\n"
        + "rollout: {servers: {colocate: True, python: no}, sampling: {top_k: 1000}, sync: {dir: 1:30}}\n"
        + "data:\n  eval_sets: {a: &set {path: p, samples: 2}, b: {<<: *set, path: q}}\n"
        + "  chat_template_kwargs: {a: [1, x]}\n  eval_paths: {on: '???', 2026-11-22: '\\???'}\nrun_dir: 2026-11-22\n"
    )
    config = _read(tmp_path, text)
    assert config.actor.optimizer.learning_rate == 1e-6 and config.actor.optimizer.weight_decay == 10.5
    assert (
        config.actor.fp8 == "off" and config.rollout.servers.colocate is True and config.rollout.sampling.top_k == 1000
    )
    assert (config.sft.learning_rate, config.sft.steps) == (0.5, 3)
    assert (config.data.eval_sets["b"].path, config.data.eval_sets["b"].samples) == ("q", 2)
    assert config.data.chat_template_kwargs == {"a": [1, "x"]}
    texts = (config.run_dir, config.sft.examples_path, config.rollout.servers.python, config.rollout.sync.dir)
    assert texts == ("2026-11-22", "010", "no", "1:30")
    assert config.data.eval_paths == {"on": "???", "2026-11-22": "\\???"}  # to OmegaConf, a value that is missing
    save_config(config, tmp_path / "again.yaml")
    assert read_config(str(tmp_path / "again.yaml"), []) == config


@pytest.mark.parametrize(
    "text",
    [
        "data: {chat_template_kwargs: &a {b: *a}}",
        "data: {eval_sets: &a {<<: *a}}",
        "data: {chat_template_kwargs: " + "{a: " * 3000 + "1" + "}" * 3000 + "}",
        "data: {chat_template_kwargs: " + "{a: " * 30 + "1" + "}" * 30 + "}",
        "data:\n  chat_template_kwargs:\n    a0: &a0 [x, x, x, x, x, x, x, x, x]\n"
        + "".join(f"    a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)),
        "run_dir: " + "x" * 1_100_000,
    ],
    ids=["alias to itself", "merge of itself", "3,000 deep", "30 deep", "a billion laughs", "1.1 MB"],
)
def test_what_has_no_end(tmp_path: Path, text: str) -> None:
    """A sentence in moments, not a hang or a stack's end."""
    with pytest.raises(UserError, match=r"too (deeply|large)|a configuration has at most|unconstructable|recursive"):
        _read(tmp_path, text)


def test_a_byte_order_mark_and_dos_lines(tmp_path: Path) -> None:
    """Other systems' editors leave them."""
    (tmp_path / "c.yaml").write_bytes(b"\xef\xbb\xbfseed: 4\r\nrun_dir: a b\r\n")
    config = read_config(str(tmp_path / "c.yaml"), [])
    assert (config.seed, config.run_dir) == (4, "a b")


def test_no_utf8(tmp_path: Path) -> None:
    """The line and the byte."""
    (tmp_path / "c.yaml").write_bytes(b"seed: 1\nrun_dir: caf\xe9\n")
    with pytest.raises(UserError, match=r"c\.yaml:2: not UTF-8 \(byte 0xe9\)"):
        read_config(str(tmp_path / "c.yaml"), [])


class TestHints:
    @pytest.mark.parametrize(
        ("key", "said"),
        [
            ("actor_rollout_ref.rollout.n=8", "here it is rollout.completions_per_prompt"),
            ("algorithm.adv_estimator=grpo", r"here it is objective.advantage \(grpo: group_std"),
            ("data.train_files=x", "here it is data.train_path"),
            ("data.train_batch_size=8", "here it is rollout.prompts_per_step"),
            ("+trainer.total_epochs=15", "here it is steps"),
            ("num_generations=8", "here it is rollout.completions_per_prompt"),
            ("--n-samples-per-prompt=8", "here it is rollout.completions_per_prompt"),
            ("learning_rate=1", "here it is actor.optimizer.learning_rate"),
            ("optimizer.learning_rate=1", r"did you mean 'actor\.optimizer\.learning_rate'\?"),
            ("pruning.rate=1", r"did you mean 'pruning\.prompt\.rate' or 'pruning\.completion\.rate'\?"),
            ("stps=1", r"did you mean 'steps'\?"),
            ("rollout.prompts_per_stp=4", r"did you mean 'rollout\.prompts_per_step'\?"),
            ("objective.epsilon=0.2", r"here it is objective\.clip_low \(and objective\.clip_high\)"),
            ("objective.clip_ratio=0.2", r"here it is objective\.clip_low \(and objective\.clip_high\)"),
            ("objective.delta=3", r"here it is objective\.dual_clip"),
            ("objective.advantage_estimator=grpo", r"here it is objective\.advantage \("),
            ("actor.optimizer.grad_clip=1", r"here it is actor\.optimizer\.max_grad_norm"),
            ("actor.optimizer.lr=1", r"here it is actor\.optimizer\.learning_rate"),
            ("checkpoint.path=x", r"here it is run_dir"),
            ("checkpoint.dir=x", r"here it is run_dir"),
            ("eval.steps=10", r"here it is eval\.every_steps"),
            ("eval.max_completion_length=10", r"did you mean 'eval\.max_completion_tokens'\?"),
            ("sft.lr=1", r"here it is sft\.learning_rate"),
            ("model.name=x", r"here it is model\.hf_path"),
            ("rollout.seed=1", r"here it is seed \("),
            ("pruning.enabled=false", r"here it is pruning\.prompt\.method \(none is off"),
            ("actor.optimizer.epsilon=1", r"here it is actor\.optimizer\.adam_eps"),
            ("checkpoint.save=1", r"here it is checkpoint\.every_steps"),
            ("actor.optimizer.warmup-steps=1", r"did you mean 'actor\.optimizer\.lr_warmup_steps'\?"),
            (
                "pruning.prompt.warmup_steps=1",
                r"did you mean '.*warmup_epochs' or 'pruning\.completion\.warmup_steps'\?",
            ),
            ("pruning.warmup_steps=1", r"did you mean 'pruning\.completion\.warmup_steps'\?"),
            ("data.train_sets.a.apply-chat-template=1", r"did you mean 'data\.train_sets\.a\.apply_chat_template'\?"),
            (
                "data.train_sets.a.max_weight=1",
                r"did you mean 'data\.train_sets\.a\.weight' or 'pruning\.prompt\.max_wei",
            ),
            ("actor.optimizer.offload=1", r"did you mean 'actor\.optimizer\.cpu_offload'\?"),
            ("actor.optim.learning_rate=1", r"did you mean 'actor\.optimizer\.learning_rate'\?"),
            ("actor.normalization=1", r"did you mean 'objective\.normalization'\?"),
            ("actor.threads_per_rank=1", r"did you mean 'threads_per_rank'\?"),
            ("guard.temperature=1", r"did you mean 'rollout\.sampling\.temperature' or 'eval\.temperature'\?"),
            ("sft.warmup_steps=1", r"did you mean 'sft\.lr_warmup_steps'\?"),
            ("rollout.limits.timeout_s=1", r"did you mean '.*start_timeout_s' or '.*sync_timeout_s' or '.*request_"),
            ("objective.coef=1", r"did you mean 'objective\.kl\.coef' or 'objective\.entropy_coef'\?"),
            ("rollout.sync.dri=1", r"did you mean 'rollout\.sync\.dir'\?"),
            ("ojective.kl.estimator=k1", r"did you mean 'objective\.kl\.estimator'\?"),
            ("pruning.rat=1", r"did you mean 'pruning\.prompt\.rate' or 'pruning\.completion\.rate'\?"),
            ("rollout.engine_wait_s=1", r"did you mean 'rollout\.limits\.engine_wait_s'\?"),
            ("rollout.updates_per_step=2", r"did you mean 'objective\.updates_per_step'\?"),
            ("actor.learning_rat=1", r"did you mean 'actor\.optimizer\.learning_rate'\?"),
            ("roloout.engine=hf", r"did you mean 'rollout\.engine'\?"),
            ("checkpoint.enabled=true", "known in checkpoint: async_save, "),
            ("data.steps=1", "known in data: answer_field, "),
        ],
    )
    def test_the_right_name(self, tmp_path: Path, key: str, said: str) -> None:
        """Of another trainer, in another section, or mistyped."""
        with pytest.raises(UserError, match=rf"unknown key '.*'; {said}"):
            _read(tmp_path, "", key)

    @pytest.mark.parametrize(
        "key", ["actor_rollout_ref.rollout.xyz", "trainer.loggre", "algorithm.alpha", "zebra.x", "zebra.enabled"]
    )
    def test_rather_none_than_a_wrong_one(self, tmp_path: Path, key: str) -> None:
        """What has no counterpart here gets a list of what there is."""
        with pytest.raises(UserError, match=rf"unknown key '{key}'; known here: actor, ") as error:
            _read(tmp_path, "", f"{key}=1")
        assert "did you mean" not in str(error.value)

    def test_in_a_file_too(self, tmp_path: Path) -> None:
        """Where the other trainer's sections stand one in the other."""
        with pytest.raises(UserError, match=r"config\.yaml:1: unknown key 'actor_rollout_ref\.rollout\.n'; here it is"):
            _read(tmp_path, "actor_rollout_ref:\n  rollout:\n    n: 8\n")


class TestRunsFiles:
    """What a run has written is about paths as they were where it was started."""

    VALUES = """
run_dir: run
data:
  train_path: a/t.jsonl
  eval_paths: {x: /b/x.jsonl, y: 'hub:o/n'}
  prompt_template: 'a: {problem}'
  chat_template_kwargs: {the_path: c}
rollout: {servers: {python: python3}, sync: {dir: '${run_dir}/s'}}
checkpoint: {resume: auto}
reward: {function: 'mine_of_that_run:grade'}
"""

    def test_relative_paths(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Joined to that directory, also after both were moved; names, absolute paths and other texts stay."""
        run, home = tmp_path / "p" / "run", tmp_path / "p"
        run.mkdir(parents=True)
        (run / "config.yaml").write_text(self.VALUES)
        (run / "run.json").write_text(json.dumps({"working_dir": ".."}))
        (home / "mine_of_that_run.py").write_text("def grade(text, answer): return 1.0")
        monkeypatch.setattr(sys, "path", [*sys.path])
        there = read_config(str(run / "config.yaml"), ["sft.examples_path=here.jsonl"])
        assert (there.run_dir, there.data.train_path) == (f"{home}/run", f"{home}/a/t.jsonl")
        assert there.data.eval_paths == {"x": "/b/x.jsonl", "y": "hub:o/n"} and there.checkpoint.resume == "auto"
        assert there.data.prompt_template == "a: {problem}" and there.data.chat_template_kwargs == {"the_path": "c"}
        assert there.rollout.servers.python == "python3" and there.rollout.sync.dir == f"{home}/run/s"
        assert there.sft.examples_path == "here.jsonl"
        assert str(home) not in sys.path, "who reads a run does not import from it"
        mine = os.geteuid()
        with monkeypatch.context() as another:
            another.setattr("os.geteuid", lambda: mine + 1)
            import_as_in(str(run / "config.yaml"))
        assert str(home) not in sys.path, "another user's run"
        import_as_in(str(run / "config.yaml"))
        assert load_function("reward.function", there.reward.function)("", "") == 1.0
        monkeypatch.chdir(home)
        here = read_config("run/config.yaml", [])
        assert (here.run_dir, here.data.train_path) == ("run", "a/t.jsonl")
        there.sft.examples_path = ""
        assert check_changes(there, config_values(here), str(run)) == []
        (run / "run.json").write_text(json.dumps({"working_dir": "/gone"}))
        assert read_config("run/config.yaml", []).data.train_path == "/gone/a/t.jsonl"

    @pytest.mark.parametrize("cache", ["", "~/.cache/dppo_megatron", "~me/c", "/c", "cache"])
    def test_defaults_are_of_no_directory(self, tmp_path: Path, cache: str) -> None:
        """Nor is a home directory: the file of a run without a path is read from elsewhere as it is there."""
        run, home = tmp_path / "p" / "run", tmp_path / "p"
        run.mkdir(parents=True)
        config = Config()
        config.data.cache_path = cache
        save_config(config, run / "config.yaml")
        (run / "run.json").write_text(json.dumps({"working_dir": ".."}))
        there = read_config(str(run / "config.yaml"), [])
        config.data.cache_path = f"{home}/cache" if cache == "cache" else cache
        assert there == config

    def test_a_run_that_was_moved(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """With all it read, its paths lead to the new place; alone, to where everything still is."""
        home, run = tmp_path / "p", tmp_path / "p" / "runs" / "one"
        run.mkdir(parents=True)
        (run / "config.yaml").write_text("data: {train_path: t.jsonl}\n")
        monkeypatch.chdir(home)
        RunDirectory(run).close()
        monkeypatch.chdir(tmp_path)
        shutil.copytree(run, tmp_path / "flat")
        for at in (run, tmp_path / "flat"):
            assert read_config(str(at / "config.yaml"), []).data.train_path == f"{home}/t.jsonl"
        home.rename(tmp_path / "q")
        moved = read_config(str(tmp_path / "q" / "runs" / "one" / "config.yaml"), [])
        assert moved.data.train_path == f"{tmp_path}/q/t.jsonl"

    def test_a_moved_run_is_not_begun_where_it_was(
        self, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nor a copy gone on with in the original: moved alone, `run_dir` in its file is another directory. Its own
        place by any name, and with everything else, need no word."""
        given = [f"model.hf_path={files / 'model'}", f"data.train_path={files / 'train.jsonl'}"]
        home, archive = tmp_path / "p", tmp_path / "p" / "archive"
        for directory in ("runs/one", str(home / "runs" / "two")):  # as a user writes it
            (home / "runs").mkdir(parents=True, exist_ok=True)
            monkeypatch.chdir(home)
            RunDirectory(Path(directory)).close()
            _write(Path(directory, "config.yaml"), f"run_dir: {directory}\n")
            (home / "link").unlink(missing_ok=True)
            (home / "link").symlink_to(directory)
            copy, name = archive / Path(directory).name, Path(directory).name
            shutil.copytree(directory, copy)
            for here in (home, tmp_path, archive):
                monkeypatch.chdir(here)
                for own in (f"{home}/runs/{name}", f"{home}/link"):
                    assert Path(load_config(f"{own}/config.yaml", given).run_dir).samefile(home / "runs" / name)
                said = os.path.relpath(copy)
                both = rf"was moved or copied: .*: run_dir={said} or run_dir=\S*{directory}"
                with pytest.raises(UserError, match=both):
                    load_config(f"{said}/config.yaml", given)
                assert read_config(f"{said}/config.yaml", []).run_dir.endswith(directory), "who only reads it may"
                for meant in (copy, home / "runs" / name):
                    config = load_config(f"{said}/config.yaml", [*given, f"run_dir={os.path.relpath(meant)}"])
                    assert Path(config.run_dir).samefile(meant)
        home.rename(tmp_path / "q")
        load_config(f"{tmp_path}/q/runs/one/config.yaml", given)

    @pytest.mark.parametrize("identity", ["", "[]", "{}", '{"working_dir": 3}', '{"working_dir": ".."'])
    def test_a_damaged_record_is_none(self, tmp_path: Path, identity: str) -> None:
        (tmp_path / "config.yaml").write_text("run_dir: run\n")
        (tmp_path / "run.json").write_text(identity)
        assert read_config(str(tmp_path / "config.yaml"), []).run_dir == "run"


class TestReferences:
    def test_settings_and_types(self, tmp_path: Path) -> None:
        """To another setting, alone with its type, inside a text as text; default values too."""
        config = _read(
            tmp_path,
            "seed: 7\nsteps: ${seed}\nrun_dir: runs/s${seed}_${rollout.sampling.top_k}\n"
            "rollout: {sync: {dir: '${run_dir}/w'}, sampling: {temperature: '${seed}'}}\n"
            "reward: {function: '\\${x}$'}\n",
        )
        assert (config.steps, config.run_dir, config.rollout.sync.dir) == (7, "runs/s7_0", "runs/s7_0/w")
        assert config.rollout.sampling.temperature == 7.0 and config.reward.function == "${x}$"
        save_config(config, tmp_path / "again.yaml")
        assert read_config(str(tmp_path / "again.yaml"), []) == config

    @pytest.mark.parametrize(
        ("item", "said"),
        [
            ("run_dir=${nope}", r"there is no setting 'nope'"),
            ("run_dir=${run_dir}", "form a cycle: .*run_dir -> run_dir"),
            ("run_dir=${model.hf_path}", "form a cycle: run_dir -> model.hf_path -> run_dir"),
            ("run_dir=${oc.env:DPPO_TEST_UNSET}", "the environment variable DPPO_TEST_UNSET is not set"),
            ("run_dir=${oc.env:a b}", r"expected \$\{oc\.env:NAME\}"),
            ("run_dir=${oc.decode:1}", "no such resolver"),
            ("run_dir=${model}", "'model' is not a single value"),
            ("run_dir=a${", "without a closing brace"),
            ("steps=${data.problem_field}", "steps = .*: must be a whole number; the reference is 'problem'"),
            (
                "rollout.sampling.stop_token_ids=['${data.x}']",
                r"stop_token_ids\[0\] = .*: there is no setting 'data\.x'",
            ),
            ("seed=${oc.env:HOME}", "only paths may be read from the environment"),
            ("rollout.servers.args=['${oc.env:HOME}']", "only paths may be read from the environment"),
            ("data.chat_template_kwargs={a: '${oc.env:HOME}'}", r"takes no \$"),
        ],
    )
    def test_what_refers_to_nothing(self, tmp_path: Path, item: str, said: str) -> None:
        """Unset, unknown, in a circle, of another type, or where the environment has no business."""
        with pytest.raises(UserError, match=said):
            _read(tmp_path, "model: {hf_path: '${run_dir}'}\n", item)

    def test_the_environment_is_read_and_never_written(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The reference is what files hold: it is resolved again at a resume, where the variable may differ."""
        monkeypatch.setenv("DPPO_TEST_DIR", "/scratch/s3cret-1")
        text = "run_dir: ${oc.env:DPPO_TEST_DIR}/run\nrollout: {sync: {dir: '${run_dir}/sync'}}\n"
        text += "model: {hf_path: 'a\\${b}'}\n"
        config = _read(tmp_path, text, "data.train_path=${oc.env:DPPO_TEST_NOT_SET,/data}/t.jsonl")
        assert (config.run_dir, config.rollout.sync.dir) == ("/scratch/s3cret-1/run", "/scratch/s3cret-1/run/sync")
        assert config.data.train_path == "/data/t.jsonl"
        saved = tmp_path / "saved.yaml"
        save_config(config, saved)
        assert "s3cret" not in saved.read_text() and "s3cret" not in str(config_values(config))
        assert yaml.safe_load(saved.read_text())["rollout"]["sync"]["dir"] == "${oc.env:DPPO_TEST_DIR}/run/sync"
        before = config_values(config)
        assert read_config(str(saved), []) == config
        monkeypatch.setenv("DPPO_TEST_DIR", "/scratch/s3cret-2")
        resumed = read_config(str(saved), [])
        assert resumed.rollout.sync.dir == "/scratch/s3cret-2/run/sync" and resumed.model.hf_path == "a${b}"
        assert check_changes(resumed, before, "saved") == []

    def test_a_home_directory_is_found_and_written_as_it_was_given(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A shell leaves `~` in key=value as it is. Of paths only; a run's file is read again by whoever resumes it."""
        monkeypatch.setenv("HOME", "/home/me")
        monkeypatch.chdir(tmp_path)
        text = "data: {eval_paths: {a: ~/a.jsonl, b: x/~/b}, prompt_template: '~/{problem}'}\nrun_dir: ~/runs/x\n"
        config = _read(tmp_path, text, "checkpoint.resume=~/runs/y", "rollout.sync.dir=${run_dir}/sync")
        paths = (config.run_dir, config.checkpoint.resume, config.rollout.sync.dir, config.data.eval_paths["a"])
        assert paths == ("/home/me/runs/x", "/home/me/runs/y", "/home/me/runs/x/sync", "/home/me/a.jsonl")
        assert (config.data.eval_paths["b"], config.data.prompt_template) == ("x/~/b", "~/{problem}")
        run = tmp_path / "there" / "run"
        run.mkdir(parents=True)
        save_config(config, run / "config.yaml")
        (run / "run.json").write_text(json.dumps({"working_dir": ".."}))
        assert yaml.safe_load((run / "config.yaml").read_text())["run_dir"] == "~/runs/x"
        read = read_config(str(run / "config.yaml"), [])
        assert read.run_dir == config.run_dir and read.data.eval_paths["a"] == config.data.eval_paths["a"]
        spelled_out = read_config("config.yaml", ["data.eval_paths.a=/home/me/a.jsonl", "run_dir=~/runs/x"])
        before = config_values(read_config("config.yaml", []))
        assert check_changes(spelled_out, before, "saved") == []

    def test_any_text_survives_a_file(self, tmp_path: Path) -> None:
        """Whatever it has of what escapes, refers, or is a missing value or a number to OmegaConf or YAML."""
        rng = random.Random("texts")
        texts = ["".join(rng.choices("\\\\$${{}?1e.:ax", k=rng.randint(1, 7))) for _ in range(500)]
        texts += ["???", "\\???", "1e3", "010", "yes", "~", "${oc.env:HOME}", "\\\\${seed}"]
        config = Config()
        config.data.eval_paths = {f"set{number}": text for number, text in enumerate(texts)}
        save_config(config, tmp_path / "saved.yaml")
        assert read_config(str(tmp_path / "saved.yaml"), []).data.eval_paths == config.data.eval_paths
        assert config_from_values(config_values(config), "saved") == config

    def test_copies_keep_the_reference(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Through pickling between ranks, copying and `asdict`."""
        import copy
        import pickle

        monkeypatch.setenv("DPPO_TEST_DIR", "/s3cret")
        config = _read(tmp_path, "run_dir: ${oc.env:DPPO_TEST_DIR}")
        for other in (copy.deepcopy(config), pickle.loads(pickle.dumps(config)), Config(**vars(config))):
            assert other.run_dir == "/s3cret" and config_values(other)["run_dir"] == "${oc.env:DPPO_TEST_DIR}"
        assert asdict(config)["run_dir"].written == "${oc.env:DPPO_TEST_DIR}"
