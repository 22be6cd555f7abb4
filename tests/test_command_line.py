"""The command line: what may stand on it, what a user asks before reading the code (`config`, Tab), how it ends."""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import json
import os
import pty
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from support.job import REPOSITORY
from support.launch import run_ranks

from dppo_megatron.config import paths
from dppo_megatron.config.reference import page_for
from dppo_megatron.distributed import from_rank_zero, on_every_rank, rank, reported_by_each_rank
from dppo_megatron.rollout.sync.receipts import canary_difference
from dppo_megatron.run import Run
from dppo_megatron.types import RunAborted, UserError
from dppo_megatron.workbench.accept.record import Record
from dppo_megatron.workbench.cli import PAGES, explained, main, program
from dppo_megatron.workbench.commands import config as config_command
from dppo_megatron.workbench.commands.completion import settings
from dppo_megatron.workbench.commands.parser import write_json
from dppo_megatron.workbench.compare.table import write_results

CONFIG = str(REPOSITORY / "configs" / "quickstart.yaml")


# -------------------------------------------------------------------------------------------- options and settings


ORDERS = [
    ["train", "--resume", "never", CONFIG, "seed=-1"],
    ["train", CONFIG, "--resume", "never", "seed=-1"],
    ["train", CONFIG, "seed=-1", "--resume", "never"],
    ["train", CONFIG, "steps=3", "--resume=never", "seed=-1"],
    ["compare", CONFIG, "steps=3", "--seeds", "2", "seed=-1", "--methods", "grpo"],
    ["compare", "--seeds", "2", CONFIG, "seed=-1"],
    ["doctor", "seed=-1", "--fp8-gate", CONFIG],
    ["doctor", "--fp8-gate", CONFIG, "seed=-1"],
    ["eval", CONFIG, "steps=3", "seed=-1"],
    ["plan", CONFIG, "seed=-1", "--gpus", "1"],
    ["plan", "--gpus", "1", CONFIG, "seed=-1"],
    ["serve", CONFIG, "seed=-1", "--host", "127.0.0.1"],
    ["serve", "--host", "127.0.0.1", CONFIG, "seed=-1"],
    ["train", "--resume", "never", "--", CONFIG, "seed=-1"],
    ["train", CONFIG, "--", "seed=-1"],
    ["train", CONFIG, "run_dir=--a b=ü=c", "seed=-1"],
]


@pytest.mark.parametrize("arguments", ORDERS, ids=" ".join)
def test_settings_before_and_after_options(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The setting is read wherever it stands."""
    assert main(arguments) == 2
    assert "seed = -1: must not be negative" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "required: COMMAND"),
        (["fly"], "invalid choice: 'fly'"),
        (["tain", CONFIG], "there is no command 'tain'; did you mean 'train'?"),
        (["Report"], "did you mean 'report'?"),
        (["train"], "required: CONFIG"),
        (["train", CONFIG, "--res", "never"], "unrecognized arguments: --res never; did you mean --resume?"),
        (["train", CONFIG, "--steps", "3"], "arguments: --steps 3; a setting is given without dashes: steps=3"),
        (["train", CONFIG, "--actor.layout.tensor_parallel=2"], "without dashes: actor.layout.tensor_parallel=2"),
        (["train", CONFIG, "--lora-rank=32"], "arguments: --lora-rank=32; here it is actor.lora.rank"),
        (["train", CONFIG, "--use-tis=False"], "arguments: --use-tis=False; off there: leave it out"),
        (["plan", "--model", "qwen3-8b"], "arguments are required: CONFIG, a YAML file or a shipped one's name"),
        (["report", "x", "--otu", "y"], "unrecognized arguments: --otu y; did you mean --out?"),
        (["report", "x", "--zzz"], "--zzz; the options here are --help, "),
        (["compare", CONFIG, "-n=3"], "-n=3; the options here are --help, --methods, "),
        (["convert"], "required: to-megatron|to-hf"),
        (["compare", CONFIG, "--seeds", "x"], "invalid int value"),
    ],
)
def test_command_lines_that_are_none(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """argparse's own errors, with its exit code, which is ours for the user's mistakes."""
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2 and said in capsys.readouterr().err


def test_a_shipped_config_is_found_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As docs write it too; a file of that name goes first; a line says which; `init` writes files that go first."""
    monkeypatch.chdir(tmp_path)
    shipped = f"CONFIG: the shipped {CONFIG}\n"
    (tmp_path / "quickstart").mkdir()  # no config
    for line in ("train quickstart", "train configs/quickstart.yaml", "compare quickstart", "serve quickstart.yaml",
                 "plan quickstart", "doctor quickstart", "doctor --fp8-gate quickstart", "eval configs/quickstart.yaml",
                 "quickstart --config quickstart"):  # fmt: skip
        assert main([*line.split(), "seed=-1"]) == 2
        assert capsys.readouterr().err.startswith(f"{shipped}error: seed = -1"), line
    assert main(["init", "."]) == 0
    assert capsys.readouterr().out.startswith("configs: ")
    found = [path for path in tmp_path.glob("configs/**/*.*") if path.is_file()]
    written = {path.relative_to(tmp_path): path.read_bytes() for path in found}
    assert all((REPOSITORY / path).read_bytes() == held for path, held in written.items()) and len(written) > 40
    assert main(["train", "configs/quickstart.yaml", "seed=-1"]) == 2
    assert capsys.readouterr().err.startswith(
        "CONFIG: configs/quickstart.yaml of this directory, not the shipped one\n"
    )
    assert main(["init", "."]) == 2 and "'.' has configs and examples already" in capsys.readouterr().err
    (tmp_path / "configs").rename(tmp_path / "mine")
    assert main(["init", "."]) == 0 and capsys.readouterr().out.startswith("configs: ")
    monkeypatch.chdir(REPOSITORY)
    assert main(["train", "configs/quickstart.yaml", "seed=-1"]) == 2
    assert capsys.readouterr().err.startswith("error: ")  # it is both


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("train quickstrt", "did you mean the shipped 'quickstart'?"),
        ("train ../configs/quickstart.yaml", "did you mean the shipped 'quickstart'?"),
        (f"train {'x' * 5000}", "cannot be read: File name too long"),
        ("train zebra.yaml", "`dppo-megatron init DIR` copies the shipped ones"),
        ("train quickstart", "no such directory (working directory: "),
        ("train quickstart", "; `dppo-megatron quickstart` makes this one, and trains on it"),
        (
            "train math/qwen3_4b_dapo17k",
            "`hf download Qwen/Qwen3-4B --local-dir Qwen3-4B`, and give Qwen3-4B",
        ),
        ("eval Qwen/Qwen3-4B", "`hf download Qwen/Qwen3-4B --local-dir Qwen3-4B`, and give Qwen3-4B"),
        ("plan h100/qwen3_8b_8gpus_dppo --model gpt5", "--model gpt5: not known; known: glm-4.5-air, llama-3.1-8b, "),
        ("plan quickstart --model qwen3-8b --dry-run", "--model: a dry run loads the model"),
    ],
)
def test_what_is_not_there_is_answered_with_what_to_do(
    line: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(line.split()) == 2
    assert said in capsys.readouterr().err and not [*tmp_path.iterdir()]


def test_help_reads_well(capsys: pytest.CaptureFixture[str]) -> None:
    """Help exists for the program and each command, and names no command that is not there."""
    for arguments in (["--help"], ["train", "--help"], ["eval", "--help"]):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 0
        assert "dppo-megatron" in capsys.readouterr().out


def _stops(where: str) -> tuple[int, str]:
    """On a rank, as the first of a machine of its own: the exit code of a command that stops there, and stderr."""
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}

    def stop() -> None:
        raise RunAborted("no server answers")

    @reported_by_each_rank()
    def find_no_gpu() -> None:
        raise UserError("no GPU")

    def execute(_: argparse.Namespace) -> int:
        if where == "rank 0":
            from_rank_zero(stop)
        elif where == "gathered":
            raise on_every_rank(UserError("a tensor is not there"))
        elif where == "canary":
            canary_difference(["a"], [np.zeros(2)], [np.ones(2)], 0.5)
        elif where == "updates":
            counts = SimpleNamespace(failed_policy="", skipped_in_a_row=2, skipped_samples="3:1")
            guard = SimpleNamespace(max_skipped_updates=2)
            run = SimpleNamespace(loop=counts, _config=SimpleNamespace(guard=guard), _how_to_resume=str)
            Run._check_guard(cast(Run, run), 7)
        elif rank() == 1:
            find_no_gpu()
        return 0

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(io.StringIO()) as said:
        patch.setattr(config_command, "execute", execute)
        return main(["config", "seed"]), said.getvalue()


def _fault() -> tuple[bool, list[str]]:
    """On a rank: whether a fault of rank 0 has the command line's mark, and the notes that its traceback shows."""
    try:
        from_rank_zero(lambda: [][0])
    except IndexError as error:
        return getattr(error, "is_reported", False), getattr(error, "__notes__", [])
    return False, []


def test_what_stops_a_machine_alone_is_said_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its first rank, since those beside it have the same files; what rank 0 raises too, by rank 0."""
    arguments = ["train", CONFIG, f"run_dir={tmp_path}", "model.hf_path=/no/such/model"]
    job = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    said = []
    for place in range(4):
        for name, value in (job | {"RANK": str(place), "LOCAL_RANK": str(place % 2)}).items():
            monkeypatch.setenv(name, value)
        assert main(arguments) == 2
        said.append(capsys.readouterr().err)
    assert said[1] == said[3] == "" and said[0].startswith("error: ") and "/no/such/model" in said[0]
    assert said[2] == said[0].replace("error: ", f"error: rank 2 ({socket.gethostname()}): ", 1)
    assert run_ranks(_stops, 2, "rank 0") == [(3, "stopped: no server answers\n"), (3, "")]
    (_, first), second = run_ranks(_stops, 2, "gathered")
    assert first.startswith("error: a tensor is not there (see") and second == (2, "")
    for guard, began in (("canary", "stopped: a scores a canary"), ("updates", "stopped: step 7: 2 updates in a row")):
        (_, first), second = run_ranks(_stops, 2, guard)
        assert began in first and second == (3, "")
    assert run_ranks(_fault, 2) == [(True, [])] * 2
    assert run_ranks(_stops, 2, "rank 1") == [(0, ""), (2, "error: rank 1: no GPU\n")]


def test_a_command_without_ranks_does_not_read_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell in which a script has left a variable of torchrun's empty."""
    monkeypatch.setenv("RANK", "")
    assert main(["config", "seed"]) == 0
    assert capsys.readouterr().out.startswith("seed  (")


# ---------------------------------------------------------------------------------------------------------- config


def test_config_prints_what_there_is_to_know(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "rollout.sampling.top_p"]) == 0
    said, progress = capsys.readouterr()
    assert said.startswith("rollout.sampling.top_p  (number, default 1.0, in (0, 1])\n") and not progress
    assert "Sample from the smallest set of tokens" in said and "defined in dppo_megatron/config/rollout.py" in said
    assert said.endswith("see docs/engines.md\n")


@pytest.mark.parametrize(
    ("asked", "keys"),
    [
        ("sft", ["sft", "sft.examples_path", "sft.completion_field", "sft.steps",
                        "sft.examples_per_step", "sft.learning_rate", "sft.lr_warmup_steps"]),
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
        ("objective.epsilon", "here it is objective.clip_low (and objective.clip_high)"),
        ("checkpoint.enabled", "known in checkpoint: async_save, every_steps"),
        ("actor_rollout_ref.rollout.n", "here it is rollout.completions_per_prompt"),
        ("lr", "here it is actor.optimizer.learning_rate"),
        ("zzz", "known here: actor, checkpoint"),
    ],
)
def test_config_knows_what_was_meant(asked: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", asked]) == 2
    said = capsys.readouterr().err
    assert hint in said and said.startswith("error: ") and said.count("\n") == 1


def test_a_mistake_names_its_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", CONFIG, "objective.clip_low=7"]) == 2
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


def test_nothing_of_a_library_beside_the_message(tmp_path: Path) -> None:
    """Nearly every published config.json names its `torch_dtype`, of which transformers prints that it is deprecated:
    `plan`, `eval` and `convert` began with that line."""
    model = str(REPOSITORY / "configs" / "models" / "qwen3-0.6b")
    assert '"torch_dtype"' in (Path(model) / "config.json").read_text(encoding="utf-8")
    command = [sys.executable, "-m", "dppo_megatron", "convert", "to-megatron", "--hf", model, "--out"]
    done = subprocess.run([*command, str(tmp_path / "out")], cwd=REPOSITORY, capture_output=True, text=True)
    [line] = done.stderr.splitlines()
    assert done.returncode == 2 and line.startswith("error: --hf") and "holds no *.safetensors" in line


def test_every_package_that_refuses_has_a_page() -> None:
    """Wherever the source raises a UserError; and each page is there. Packages that serve all commands have none, nor
    have the commands that are about settings: theirs is configuration.md."""
    packages = set()
    for path in (REPOSITORY / "dppo_megatron").rglob("*.py"):
        if "UserError(" in path.read_text(encoding="utf-8"):
            parts = path.relative_to(REPOSITORY / "dppo_megatron").with_suffix("").parts
            packages.add(parts[1] if parts[0] in ("steps", "workbench") else parts[0])
    [commands] = [a for a in program()._actions if isinstance(a, argparse._SubParsersAction)]
    refusing = packages - {"cli", "commands", "config", "mistakes", "runs", "types"}
    assert refusing | set(commands.choices) - {"completion", "config", "train"} == set(PAGES)
    for page in PAGES.values():
        assert (REPOSITORY / "docs" / page).is_file()


# ------------------------------------------------------------------------------------------------------ completion


def test_the_command_line_does_without_torch() -> None:
    """Neither --help, which needs no numpy either, nor a Tab waits for it; nor does progress in a log load what draws
    bars."""
    code = (
        "import sys, dppo_megatron.workbench.cli as cli; cli.program(['--help']); assert 'numpy' not in sys.modules;"
        "import dppo_megatron.observe.progress_display as progress; cli.program();"
        "progress.RunProgress(3, visible=True).say('a'); print(sorted({'torch', 'rich', 'plotly'} & {*sys.modules}))"
    )
    process = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)
    assert (process.returncode, process.stdout.splitlines()[-1:]) == (0, ["[]"]), process.stderr


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
    "dppo-megatron train job.yaml rollout.sampling.top_p": "dppo-megatron train job.yaml rollout.sampling.top_p=",
    "dppo-megatron train job.yaml seed=1 model.dtype=b": "dppo-megatron train job.yaml seed=1 model.dtype=bfloat16 ",
    "dppo-megatron train jo": "dppo-megatron train job.yaml ",
}
"""A line, and what Tab makes of it: a space after what is whole, none after `=`, and files. Bash is asked for more."""


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


# ------------------------------------------------------------------------------------------------- how it ends


def _start(*arguments: str, **streams: int) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    return subprocess.Popen([sys.executable, "-m", "dppo_megatron", *arguments], env=environment, **streams)  # type: ignore[call-overload, no-any-return]


def test_a_terminal_without_utf8(tmp_path: Path) -> None:
    """What ASCII has no form for is escaped, in results and in mistakes."""
    sample = {"set": "s", "problem": "0", "problem_index": 0, "sample": 0, "prompt": "", "reference": "", "text": ""}
    sample |= {"tokens": 1, "finish_reason": "stop", "reward": 1.0}
    rows = [json.dumps(sample | {"problem_index": at, "problem": str(at)}) for at in (0, 1)]
    (tmp_path / "samples.jsonl").write_text("\n".join(rows))
    plain = {"PYTHONPATH": str(REPOSITORY), "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for arguments, code, said in (
        (["eval", "--rescore", str(tmp_path)], 0, rb" % \xb1 "),
        (["train", "\u00e9.yaml"], 2, b"config file"),
    ):
        command = [sys.executable, "-m", "dppo_megatron", *arguments]
        done = subprocess.run(command, env={**os.environ, **plain}, capture_output=True, timeout=300)
        assert done.returncode == code and said in done.stdout + done.stderr, done
        assert (done.stdout + done.stderr).isascii() and b"Traceback" not in done.stderr


def test_nobody_reads_the_output() -> None:
    """`| head` has taken what it wanted: no traceback, and the shell's code for it."""
    reader, writer = os.pipe()
    os.close(reader)
    process = _start("completion", "bash", stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    _, said = process.communicate(timeout=300)
    assert (process.returncode, said) == (141, b"")


def test_another_pipe_that_breaks_is_no_silent_end(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """That of a child process, say, while somebody still reads our output: it is shown."""

    def broken(_: argparse.Namespace) -> int:
        raise BrokenPipeError

    monkeypatch.setattr(config_command, "execute", broken)
    with pytest.raises(BrokenPipeError):
        main(["config", "seed"])


def test_a_wheels_messages_name_its_own_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By their whole path; a path of the user's that ends alike is left as it is."""
    monkeypatch.setattr(paths, "shipped", lambda *parts: tmp_path.joinpath(*parts))
    error = UserError("'/home/me/docs/actor.md': no such file; see docs/actor.md and (docs/scope.md)")
    expected = f"'/home/me/docs/actor.md': no such file; see {tmp_path}/docs/actor.md and ({tmp_path}/docs/scope.md)"
    assert explained(error, "train") == expected


def test_nobody_reads_the_mistake() -> None:
    """The exit code still tells that it was one."""
    reader, writer = os.pipe()
    os.close(reader)
    process = _start("train", "nowhere.yaml", stderr=writer, stdout=writer)
    os.close(writer)
    process.communicate(timeout=300)
    assert process.returncode == 2


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
def test_no_room_for_the_output() -> None:
    with open("/dev/full", "wb") as full:
        process = _start("completion", "bash", stdout=full.fileno(), stderr=subprocess.PIPE)
        _, said = process.communicate(timeout=300)
    assert process.returncode == 2
    assert said.startswith(b"error: stdout cannot be written: No space left on device; some of the output is lost")


@pytest.mark.parametrize(
    ("write", "named"),
    [
        (lambda path: write_json(str(path / "plan.json"), {"step_s": 1.0}), "--json '{}/plan.json'"),
        (lambda path: write_results(path / "results.json", {"runs": []}), "{}/results.json"),
        (lambda path: Record({}).write(path), "{}/accept.json"),
    ],
    ids=["--json", "compare", "accept"],
)
def test_no_room_for_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], write: Any, named: str
) -> None:
    """It is named, and not taken for stdout: the error of a write has no name."""

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for writer in ("commands.parser.Path.write_text", "compare.table.write_text", "accept.record.write_text"):
        monkeypatch.setattr(f"dppo_megatron.workbench.{writer}", full)
    monkeypatch.setattr(config_command, "execute", lambda _: write(tmp_path))
    assert main(["config"]) == 2
    said = f"error: {named.format(tmp_path)} cannot be written: No space left on device"
    assert capsys.readouterr().err.startswith(said)


def test_interrupted(tmp_path: Path) -> None:
    """Control-C: 130. The trace is a pipe that nobody writes to, so the command waits in its reading."""
    fifo = tmp_path / "trace.jsonl"
    os.mkfifo(fifo)
    process = _start("train", str(fifo), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    with open(fifo, "wb"):  # returns when the command has opened it
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=300)
    assert (process.returncode, said) == (130, b"interrupted\n")


_INTERRUPTS = """
import signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "dppo_megatron.types":
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Finder())
"""


def test_interrupted_while_it_is_imported(tmp_path: Path) -> None:
    """The command line itself takes a while to import on a slow disk."""
    (tmp_path / "sitecustomize.py").write_text(_INTERRUPTS)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(REPOSITORY)])}
    arguments = [sys.executable, "-m", "dppo_megatron", "config", "seed"]
    done = subprocess.run(arguments, env=environment, capture_output=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"interrupted\n")


@pytest.mark.parametrize(("closed", "said"), [(1, ""), (2, "seed  (whole number")])
def test_a_stream_that_is_closed(closed: int, said: str) -> None:
    """As a service may start the command: what would have been written there is not, and all else is as ever."""
    begin = f"import os, sys; os.close({closed}); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    command = [sys.executable, "-c", begin, "-m", "dppo_megatron", "config", "seed"]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"DPPO_PROGRESS": "on"}, cwd=REPOSITORY
    )
    assert (done.returncode, done.stdout[: len(said) or None]) == (0, said)
    assert "Traceback" not in done.stderr  # on a slow machine there are lines of progress
