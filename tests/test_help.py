"""What a user asks before reading the code: `config`, completion at Tab, and messages that name their page."""

from __future__ import annotations

import argparse
import os
import pty
import re
import select
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.job import REPOSITORY
from support.readers import readings

from dppo_megatron.config.load import config_values, read_config
from dppo_megatron.config.reference import Setting, all_keys, all_settings, find, page_for
from dppo_megatron.config.schema import Config
from dppo_megatron.workbench.cli import main, program
from dppo_megatron.workbench.commands.completion import settings
from dppo_megatron.workbench.mistakes import PAGES

LEAVES = [one for one in all_settings() if not one.is_section]


def _by_key(one: Setting) -> str:
    return one.key


# ------------------------------------------------------------------------------------------------- config


def test_the_list_is_the_schema() -> None:
    """Key for key, beside what stands under names that the user chooses."""
    assert [one.key for one in all_settings() if "<name>" not in one.key] == all_keys()


def test_every_default_is_read_back_as_the_default() -> None:
    """The printed defaults, given on the command line, change nothing."""
    given = [
        f"{one.key}={one.default}" for one in LEAVES if "<name>" not in one.key and one.default not in ("''", "{}")
    ]
    assert len(given) > 150
    assert config_values(read_config("", given)) == config_values(Config())


@pytest.mark.parametrize("one", LEAVES, ids=_by_key)
def test_every_setting_has_a_meaning_and_a_reader(one: Setting) -> None:
    """Nothing is undocumented, and nothing is a setting that no line reads. The line that is named holds the name."""
    assert one.meaning
    places = readings(one.owner, one.name)
    assert places
    for place in places:
        lines = (REPOSITORY / place.file).read_text(encoding="utf-8").splitlines()
        assert one.name in lines[place.line - 1], place


def test_readers_are_found_through_what_they_are_called_there() -> None:
    """Some that were looked up by hand: a chain, a parameter of the section's type, a field of an object, a loop."""
    found = {
        key: {f"{place.file}:{place.inside}" for place in readings(find(key)[0].owner, key.rpartition(".")[2])}
        for key in ("rollout.sampling.temperature", "objective.clip_low", "guard.watchdog_s", "objective.dual_clip")
    }
    assert "dppo_megatron/steps/build.py:make_sampling" in found["rollout.sampling.temperature"]
    assert "dppo_megatron/algorithms/policy_losses.py:clip" in found["objective.clip_low"]
    assert "dppo_megatron/run.py:Run.__init__" in found["guard.watchdog_s"]
    assert not any("evaluation" in place for place in found["rollout.sampling.temperature"])  # eval.temperature's


def test_every_page_exists_and_every_section_has_one() -> None:
    own = {one.key for one in all_settings() if one.page != Config.page}
    assert {name for name in vars(Config()) if name not in own} == {"seed", "steps", "threads_per_rank"}
    for one in all_settings():
        assert (REPOSITORY / "docs" / one.page).is_file()


def test_config_prints_what_there_is_to_know(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "rollout.sampling.top_p"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("rollout.sampling.top_p  (number, default 1.0, in (0, 1])\n")
    assert "Sample from the smallest set of tokens" in said and "defined in dppo_megatron/config/rollout.py" in said
    assert said.endswith("see docs/engines.md\n")


@pytest.mark.parametrize(
    ("asked", "keys"),
    [
        ("warm_start", ["warm_start", "warm_start.examples_path", "warm_start.completion_field", "warm_start.steps",
                        "warm_start.examples_per_step", "warm_start.learning_rate", "warm_start.lr_warmup_steps"]),
        ("zero_advantage", ["objective.zero_advantage_slope"]),
        ("data.eval_sets.aime24.samples", ["data.eval_sets.<name>.samples"]),
        ("steps", ["steps"]),
    ],
)  # fmt: skip
def test_config_finds(asked: str, keys: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A section with all that is in it, a part of a name, a set by the user's name for it; a setting before a part."""
    assert main(["config", asked]) == 0
    said = capsys.readouterr().out
    assert [line.split("  (")[0] for line in said.splitlines() if line and not line.startswith(" ")] == keys


@pytest.mark.parametrize(
    ("asked", "hint"),
    [
        ("rollout.sampling.temprature", "did you mean 'rollout.sampling.temperature'?"),
        ("actor_rollout_ref.rollout.n", "here it is rollout.completions_per_prompt"),
        ("zzz", "known here: actor, checkpoint"),
    ],
)
def test_config_knows_what_was_meant(asked: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", asked]) == 2
    said = capsys.readouterr().err
    assert hint in said and said.startswith("error: ") and said.count("\n") == 1


def test_a_mistake_names_its_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(REPOSITORY / "configs" / "quickstart.yaml"), "objective.clip_low=7"]) == 2
    assert capsys.readouterr().err.endswith("(see docs/objectives.md)\n")
    assert page_for("data.eval_paths.math = 'x': no such file") == "data.md"
    assert page_for("data.eval_pathz: unknown key") == "data.md"
    for file in ("x/model.safetensors", "eval.json", "'reward.py'", "/home/data.v2/x", "my-rollout.log:3"):
        assert page_for(f"{file} cannot be read") == "", file
    assert page_for("data.eval_paths.json = eval.json: no such file") == "data.md"
    assert page_for("no setting in it, but torch.distributed") == ""


@pytest.mark.parametrize(
    ("line", "page"),
    [
        ("report nowhere", "report"),  # a path
        ("simulate nowhere", "choosing"),
        ("data nothing --out x", "data"),  # a name
        ("convert to-hf --checkpoint nowhere --out x", "checkpoints"),  # read by what reads paths for everybody
        ("eval nowhere", "evaluation"),
        ("train nowhere.yaml", "configuration"),
        ("train nowhere.yaml steps", "configuration"),
        ("quickstart --nproc 0", "tutorial"),
        ("doctor steps=1", "actor"),
    ],
)
def test_so_does_one_about_a_file_or_an_option(line: str, page: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 2
    assert capsys.readouterr().err.endswith(f"(see docs/{page}.md)\n")


def test_every_room_that_refuses_has_a_page() -> None:
    """Wherever the source raises a UserError; and each page is there. Packages that serve all commands have none, nor
    have the commands that are about settings: theirs is configuration.md."""
    rooms = set()
    for path in (REPOSITORY / "dppo_megatron").rglob("*.py"):
        if "UserError(" in path.read_text(encoding="utf-8"):
            parts = path.relative_to(REPOSITORY / "dppo_megatron").with_suffix("").parts
            rooms.add(parts[1] if parts[0] in ("steps", "workbench") else parts[0])
    [commands] = [a for a in program()._actions if isinstance(a, argparse._SubParsersAction)]
    refusing = rooms - {"cli", "commands", "config", "mistakes", "runs", "types"}
    assert refusing | set(commands.choices) - {"completion", "config", "train"} == set(PAGES)
    for page in PAGES.values():
        assert (REPOSITORY / "docs" / page).is_file()


# ------------------------------------------------------------------------------------------------- completion


def test_the_command_line_does_without_torch() -> None:
    """Neither --help, which needs no numpy either, nor a Tab waits for it; nor does progress in a log load what draws
    bars."""
    code = (
        "import sys, dppo_megatron.workbench.cli as cli; cli.program(['--help']); assert 'numpy' not in sys.modules;"
        "import dppo_megatron.observe.progress as progress; cli.program();"
        "progress.RunProgress(3, visible=True).say('a'); sys.exit(bool({'torch', 'rich', 'plotly'} & {*sys.modules}))"
    )
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True, stderr=subprocess.PIPE)


def test_settings_and_their_choices() -> None:
    assert list(settings("model.d")) == ["model.dtype="]
    assert list(settings("model.dtype=b")) == ["model.dtype=bfloat16"]
    assert list(settings("pruning.prompt.method=gr")) == [
        "pruning.prompt.method=greso",
        "pruning.prompt.method=greso_ht",
    ]
    assert list(settings("actor.layout.sequence_parallel=")) == [
        "actor.layout.sequence_parallel=true",
        "actor.layout.sequence_parallel=false",
    ]
    assert list(settings("seed=")) == [] and list(settings("nothing.")) == []


@pytest.fixture(scope="module")
def shells(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A directory to complete in, and the environment in which `dppo-megatron` is this checkout's."""
    directory = tmp_path_factory.mktemp("shells")
    command = directory / "dppo-megatron"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m dppo_megatron "$@"\n')
    command.chmod(0o755)
    (directory / "job.yaml").touch()
    path = f"{directory}:{os.environ['PATH']}"
    return directory, os.environ | {"PATH": path, "PYTHONPATH": str(REPOSITORY), "HOME": str(directory)}


def _needs(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")


OFFERED = {
    "dppo-megatron comp": {"compare", "completion"},
    "dppo-megatron config rollout.sampling.te": {"rollout.sampling.temperature "},
    "dppo-megatron train job.yaml rollout.sampling.top": {"rollout.sampling.top_p=", "rollout.sampling.top_k="},
    "dppo-megatron train job.yaml seed=1 model.dtype=b": {"bfloat16 "},
    "dppo-megatron compare job.yaml --st": {"--steps-factor "},
}


def test_in_a_real_bash(shells: tuple[Path, dict[str, str]]) -> None:
    """What bash is told at Tab, with its own way of breaking words at `=`."""
    directory, environment = shells
    script = 'eval "$(dppo-megatron completion bash)"\n'
    for line in OFFERED:
        words = line.replace("=", " = ").split(" ")
        script += f"""
            COMP_WORDS=({" ".join(words)}); COMP_CWORD={len(words) - 1}
            COMP_LINE='{line}'; COMP_POINT={len(line)}; COMP_TYPE=9; COMPREPLY=()
            $(complete -p dppo-megatron | sed 's/.*-F \\([^ ]*\\).*/\\1/') dppo-megatron
            printf '%s\\n' "${{COMPREPLY[@]}}"; echo ---
        """
    done = subprocess.run(
        ["bash", "--norc", "-c", script], cwd=directory, env=environment, capture_output=True, text=True, check=True
    )
    told = [set(part.splitlines()) for part in done.stdout.split("---\n")[:-1]]
    assert dict(zip(OFFERED, told, strict=True)) == OFFERED, done.stderr


LINES = {
    "dppo-megatron compa": "dppo-megatron compare ",
    "dppo-megatron config rollout.sampling.te": "dppo-megatron config rollout.sampling.temperature ",
    "dppo-megatron train job.yaml rollout.sampling.top_p": "dppo-megatron train job.yaml rollout.sampling.top_p=",
    "dppo-megatron train job.yaml seed=1 model.dtype=b": "dppo-megatron train job.yaml seed=1 model.dtype=bfloat16 ",
    "dppo-megatron compare job.yaml --st": "dppo-megatron compare job.yaml --steps-factor ",
    "dppo-megatron train jo": "dppo-megatron train job.yaml ",
}
"""A line, and what Tab makes of it."""


def test_in_a_real_fish(shells: tuple[Path, dict[str, str]]) -> None:
    """What fish offers, which it adds a space to itself, but for what ends in `=`."""
    _needs("fish")
    directory, environment = shells
    asked = "\n".join(f"complete -C '{line}'" for line in LINES)
    script = f"dppo-megatron completion fish | source\n{asked}"
    done = subprocess.run(
        ["fish", "--no-config", "-c", script],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    offered = [line.split("\t")[0] for line in done.stdout.splitlines()]
    assert offered == [line.split(" ")[-1 - line.endswith(" ")] for line in LINES.values()], done.stderr


def test_in_a_real_zsh(shells: tuple[Path, dict[str, str]]) -> None:
    """At a prompt, in a terminal, by a shell that has not begun its completion system: the line after Tab."""
    _needs("zsh")
    directory, environment = shells
    (directory / "setup.zsh").write_text(
        'eval "$(dppo-megatron completion zsh)"\n'
        'at_tab() { zle complete-word; print -rn -- "<<$BUFFER>>"; BUFFER=; }\n'
        "zle -N at_tab; bindkey '^X' at_tab\n"
        'print -r -- "<<re""ady>>"\n'
    )
    person, terminal = pty.openpty()
    shell = subprocess.Popen(
        ["zsh", "-f", "-i"], cwd=directory, env=environment | {"TERM": "dumb", "PS1": ""},
        stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True,
    )  # fmt: skip
    os.close(terminal)
    try:
        os.write(person, b". ./setup.zsh\n")
        assert _answer(person) == "ready"
        for line, completed in LINES.items():
            os.write(person, line.encode() + b"\x18")  # ^X
            assert _answer(person) == completed
    finally:
        shell.kill()
        shell.wait()
        os.close(person)


def _answer(person: int) -> str:
    """What the shell prints between << and >>; fails if it prints nothing for two minutes."""
    said = ""
    while not (found := re.search(r"<<(.*?)>>", said, re.DOTALL)):
        assert select.select([person], [], [], 120)[0], f"zsh said no more than {said!r}"
        said += os.read(person, 1 << 16).decode(errors="replace")
    return found[1]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_for_each_shell(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    assert "dppo-megatron" in capsys.readouterr().out
