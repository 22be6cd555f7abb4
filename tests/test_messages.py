"""What used to be a traceback, or was accepted, is a sentence and exit code 2, before anything expensive is done.

Ranges, types, references and unknown keys are in `test_config.py` and `test_config_load.py`. Here is what only a
command finds, and that it does so before a process group or a model exists.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist
from support.job import REPOSITORY, settings
from support.launch import run_ranks

from dppo_megatron.launcher_env import check_launcher_env
from dppo_megatron.workbench.cli import main
from dppo_megatron.workbench.quickstart.tiny_model import make_tokenizer

CONFIG = str(REPOSITORY / "configs" / "quickstart.yaml")
LONG = "x" * 5000
DEEP = "d/" * 2500
LAUNCHED = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def _fails(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a command says, whose exit code is 2."""
    code = main(arguments)
    printed = capsys.readouterr()
    assert code == 2, printed
    assert printed.err.startswith("error: ") and printed.err.count("\n") == 1 and "Traceback" not in printed.err
    assert len(printed.err) < 1500
    return printed.err


VALUES = {
    f"seed={'9' * 5000}": "must be a whole number",
    "actor.optimizer.adam_eps=0": "actor.optimizer.adam_eps = 0.0: must be in (0, 1]",
    f"run_dir={LONG}": "cannot be written: File name too long",
    f"run_dir={DEEP}": "cannot be written: File name too long",
    "run_dir=a\0b": "holds a NUL",
    "run_dir=": "run_dir is not set",
    "model.hf_path=nowhere": "model.hf_path = 'nowhere': no such directory",
    f"model.hf_path={LONG}": "cannot be read: File name too long",
    f"model.hf_path={CONFIG}": "is a file, not a directory",
    "objective.kl.reference_path=.": "objective.kl.reference_path has no effect while objective.kl.coef = 0",
    "data.train_path=nowhere.jsonl": "data.train_path = 'nowhere.jsonl': no such file",
    "data.train_path=no/math/train.jsonl": "; `dppo-megatron data math --out no/math` writes it (see docs/data.md)",
    "data.train_path=[a.parquet, b.parquet]": "a directory of parts, or each of several files in data.train_sets.NAME",
    "data.eval_paths.x=parts/*.parquet": "or each of several files in data.eval_sets.NAME.path",
    f"data.train_path={DEEP}": "cannot be read: File name too long",
    f"data.train_path={REPOSITORY / 'tools'}": "neither a directory saved by `datasets` nor",
    f"data.eval_paths.x={LONG}": "data.eval_paths.x = ",
    "data.max_prompt_tokens=3": "more than data.max_prompt_tokens = 3",
    "sft.examples_path=/dev/zero": "is a device or a pipe",
    "packing.max_tokens_per_microbatch=31": (
        "data.max_prompt_tokens + rollout.sampling.max_completion_tokens = 32 tokens and must fit"
    ),
    f"checkpoint.resume={LONG}": "must be auto, never or the directory of a checkpoint",
    "rollout.servers.endpoints=['http://[::1']": "is no address",
    "rollout.servers.endpoints=['http://h:99999']": "is no address",
    "rollout.servers.endpoints=['http://h:1\\n']": "is no address",
    "data.problem_field=": "data.problem_field = '': must not be empty",
    "reward.function=": "reward.function = '': must not be empty",
    "reward.function=a.b": "or module:function",
    "reward.function=:x": "or module:function",
    "rollout.servers.api_key_env=sk-1234": "is not the name of an environment variable",
    "=3": "expected key=value",
    "steps": "override 'steps': expected key=value",
    "seed.x=3": "'seed' is a value, it has no 'x'",
    "defaults=x.yaml": "unknown key 'defaults'",
}


@pytest.mark.parametrize("item", VALUES, ids=lambda item: item[:50])
def test_values(files: Path, tmp_path: Path, item: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line with the key and what would be right; nothing written. `rollout.engine=vllm` so that all is read."""
    engine = ["rollout.engine=vllm"] if "endpoints" in item else []
    said = _fails(["train", CONFIG, *settings(files, tmp_path / "run"), *engine, item], capsys)
    assert VALUES[item] in said
    assert not (tmp_path / "run").exists()


def _model(files: Path, tmp_path: Path, **values: object) -> Path:
    """A copy of the model directory with other values in config.json."""
    copy = Path(shutil.copytree(files / "model", tmp_path / "model"))
    raw = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(raw | values))
    return copy


def _file(directory: Path, text: str) -> str:
    (directory / "file.jsonl").write_text(text)
    return str(directory / "file.jsonl")


def _pipe(directory: Path) -> Path:
    """Opening it would wait for a writer without end, on every rank."""
    os.mkfifo(directory / "rows.jsonl")
    return directory / "rows.jsonl"


def _heads(files: Path, tmp_path: Path) -> list[str]:
    model = _model(files, tmp_path, num_attention_heads=3, num_key_value_heads=3)
    return [f"model.hf_path={model}", "actor.layout.tensor_parallel=2"]


def _reference(files: Path, tmp_path: Path, **values: object) -> list[str]:
    return ["objective.kl.coef=0.1", f"objective.kl.reference_path={_model(files, tmp_path, **values)}"]


def _tokens(files: Path, tmp_path: Path) -> list[str]:
    """A reference that has two tokens the other way round."""
    words = _reference(files, tmp_path)
    path = tmp_path / "model" / "tokenizer.json"
    raw = json.loads(path.read_text())
    vocab = raw["model"]["vocab"]
    vocab["+"], vocab["-"] = vocab["-"], vocab["+"]
    path.write_text(json.dumps(raw))
    return words


def _image_token(files: Path, tmp_path: Path, key: str) -> list[str]:
    """The setting `key` names a text with a token that the tokenizer has, and the model's embedding has no row of."""
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    tokenizer.save_pretrained(model := _model(files, tmp_path))
    row = {"problem": "<image>1+1=", "answer": "2", "completion": "2"}
    return [f"model.hf_path={model}", f"{key}={_file(tmp_path, json.dumps(row))}", "sft.examples_per_step=1"]


NO_ANSWER = '{"problem": "1+1="}'
ROW = '{"problem": "1+1=", "answer": "2"}\n'
JOBS: dict[str, tuple[Callable[[Path, Path], list[str]], str]] = {
    "pipe": (lambda f, t: [f"data.train_path={_pipe(t)}"], "is a device or a pipe, not a file"),
    "row": (
        lambda f, t: [f"data.train_path={_file(t, ROW + NO_ANSWER)}"],
        "file.jsonl:2: the row lacks the field 'answer'; it has: problem",
    ),
    "worked solutions": (  # whose problems stand in the field that those of the training sets stand in
        lambda f, t: [f"sft.examples_path={_file(t, ROW)}", "sft.completion_field=solution"],
        "file.jsonl:1: the row lacks the field 'solution'; it has: problem, answer. Worked solutions are read by",
    ),
    "quota": (
        lambda f, t: [
            *("data.mixing=weighted", "data.train_path=", f"data.train_sets.train.path={f}/train.jsonl"),
            *(f"data.train_sets.a.path={_file(t, ROW)}", "data.train_sets.a.weight=0.2"),
        ],
        "data.train_sets.a.weight: a step of 16 prompts takes up to 3 of 'a', which holds only 1 problems",
    ),
    "token without a row": (
        lambda f, t: _image_token(f, t, "data.eval_paths.heldout"),
        "file.jsonl:1: holds <image>, a token of the model's tokenizer without a row in its embedding",
    ),
    "token without a row, to learn": (
        lambda f, t: _image_token(f, t, "sft.examples_path"),
        "file.jsonl:1: holds <image>, a token of",
    ),
    "few problems": (lambda f, t: [f"data.train_path={_file(t, ROW)}"], "holds only 1 problems"),
    "positions": (
        lambda f, t: ["rollout.sampling.max_completion_tokens=500", "packing.max_tokens_per_microbatch=1000"],
        "more than the 128 positions",
    ),
    "heads by tensor_parallel": (_heads, "the model's 3 attention heads do not divide by it"),
    "reference": (
        lambda f, t: ["objective.kl.coef=0.1", "objective.kl.reference_path=Qwen/Qwen3-4B"],
        "objective.kl.reference_path = 'Qwen/Qwen3-4B': no such directory",
    ),
    "reference of another kind": (
        lambda f, t: _reference(f, t, rms_norm_eps=0.01),
        "model': norm_eps is 0.01, not 1e-06",
    ),
    "reference with other tokens": (_tokens, "its tokenizer has other tokens"),
    "architecture": (
        lambda f, t: [f"model.hf_path={_model(f, t, architectures=['GPT2LMHeadModel'])}"],
        "architecture GPT2LMHeadModel is not supported; supported: Qwen3ForCausalLM",
    ),
}


@pytest.mark.parametrize("case", JOBS)
def test_jobs(
    files: Path, tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is read to be found out, as torchrun starts it: before the ranks meet, and nothing written."""
    world_size = "2" if case.startswith("heads") else "1"
    for name, value in (LAUNCHED | {"LOCAL_RANK": "0", "WORLD_SIZE": world_size}).items():
        monkeypatch.setenv(name, value)
    make, expected = JOBS[case]
    said = _fails(["train", CONFIG, *settings(files, tmp_path / "run"), *make(files, tmp_path)], capsys)
    assert expected in said and not (tmp_path / "run").exists()


GRADERS = {
    "syntax": ("def grade(:\n", "SyntaxError"),
    "raises": ("raise ValueError('no\\nmodel')\n", "ValueError: no"),
    "exits": ("import sys\nsys.exit(5)\n", "SystemExit: 5"),
    "zero": ("1 / 0\n", "ZeroDivisionError"),
    "missing": ("x = 1\n", "has no attribute 'grade'"),
}


@pytest.mark.parametrize("name", GRADERS)
@pytest.mark.parametrize("key", ["reward.function", "objective.function", "objective.token_values"])
def test_a_module_that_fails_at_import(
    files: Path,
    tmp_path: Path,
    name: str,
    key: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever it does, even ending the process."""
    module = f"fails_{name}_{key.replace('.', '_')}"
    (tmp_path / f"{module}.py").write_text(GRADERS[name][0])
    monkeypatch.syspath_prepend(tmp_path)
    said = _fails(["train", CONFIG, *settings(files, tmp_path / "run"), f"{key}={module}:grade"], capsys)
    assert f"{key} = '{module}:grade' cannot be imported: " in said and GRADERS[name][1] in said


OUTPUTS: dict[str, Callable[[Path, Path], list[str]]] = {
    "run_dir under a file": lambda f, t: ["train", CONFIG, *settings(f, t / "file" / "run")],
    "run_dir is a file": lambda f, t: ["train", CONFIG, *settings(f, t / "file")],
    "run_dir read-only": lambda f, t: ["train", CONFIG, *settings(f, Path("/proc/self/run"))],
    "compare --out": lambda f, t: ["compare", CONFIG, *settings(f, t / "run"), "--out", "/proc/self/x"],
    "compare --out file": lambda f, t: ["compare", CONFIG, *settings(f, t / "run"), "--out", str(t / "file")],
    "compare results.json": lambda f, t: ["compare", CONFIG, *settings(f, t / "run"), "--out", str(t / "full")],
    "simulate --json": lambda f, t: ["simulate", str(t / "trace.jsonl"), "--json", "/proc/self/x/y.json"],
    "simulate --json directory": lambda f, t: ["simulate", str(t / "trace.jsonl"), "--json", str(t)],
    "simulate --json empty": lambda f, t: ["simulate", str(t / "trace.jsonl"), "--json", ""],
    "report --out": lambda f, t: ["report", str(t / "no_run"), "--out", "/proc/self/x.html"],
    "report --out directory": lambda f, t: ["report", str(t / "no_run"), "--out", str(t)],
    "plan --json": lambda f, t: ["plan", CONFIG, *settings(f, t / "run"), "--json", "/proc/self/x.json"],
    "doctor --json": lambda f, t: ["doctor", CONFIG, *settings(f, t / "run"), "--json", "/proc/self/x.json"],
    "convert --out": lambda f, t: ["convert", "to-megatron", "--hf", str(t / "model"), "--out", "/proc/self/x"],
    "convert --out under a file": lambda f, t: [
        *("convert", "to-megatron", "--hf", str(t / "model"), "--out", str(t / "file" / "x"))
    ],
    "convert --out long": lambda f, t: ["convert", "to-megatron", "--hf", str(t / "model"), "--out", str(t / LONG)],
    "convert --out exists": lambda f, t: ["convert", "to-megatron", "--hf", str(t / "model"), "--out", str(t)],
    "convert --out /": lambda f, t: ["convert", "to-megatron", "--hf", str(t / "model"), "--out", "/"],
}


@pytest.mark.parametrize("case", OUTPUTS)
def test_outputs_are_tried_before_the_work(
    files: Path, tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The option and the reason; the input, which is no trace or no model at all, is not even looked at, and nothing is
    left."""
    (_model(files, tmp_path) / "model.safetensors").write_bytes(b"x")
    (tmp_path / "file").write_text("")
    (tmp_path / "full" / "results.json").mkdir(parents=True)
    (tmp_path / "trace.jsonl").write_text("no trace")
    before = sorted(tmp_path.rglob("*"))
    said = _fails(OUTPUTS[case](files, tmp_path), capsys)
    assert sorted(tmp_path.rglob("*")) == before
    option = "run_dir" if case.startswith("run_dir") else case.split()[1] if "--" in case else "--out"
    assert option in said and "not valid JSON" not in said
    assert any(reason in said for reason in ("cannot be written", "is a file", "is a directory", "exists", "is empty"))


INPUTS: dict[str, tuple[Callable[[Path, Path], list[str]], str]] = {
    "config is missing": (lambda f, t: ["train", "nowhere.yaml"], "config file 'nowhere.yaml' does not exist"),
    "config is a directory": (lambda f, t: ["train", str(t)], "cannot be read: Is a directory"),
    "config has a long name": (lambda f, t: ["train", LONG], "cannot be read: File name too long"),
    "config has a NUL": (lambda f, t: ["train", "a\0b"], "cannot be read"),
    "config has no end": (lambda f, t: ["train", "/dev/zero"], "a configuration has at most 1000000"),
    "settings before the config": (lambda f, t: ["train", "seed=3", CONFIG], "'seed=3' is where CONFIG should be"),
    "trace is a directory": (lambda f, t: ["simulate", str(t)], "is a directory, not a file"),
    "trace has a long name": (lambda f, t: ["simulate", LONG], "cannot be read: File name too long"),
    "trace is a run": (
        lambda f, t: ["simulate", str((t / "trace.jsonl").write_text("{}") and t)],
        "is a run; give its file, ",
    ),
    "trace is a device": (lambda f, t: ["simulate", "/dev/null"], "is a device or a pipe, not a file"),
    "trace is missing": (lambda f, t: ["simulate", "nope.jsonl"], "trace = 'nope.jsonl': no such file"),
    "trace is binary": (lambda f, t: ["simulate", str(f / "model" / "model.safetensors")], "not valid JSON"),
    "trace is a number": (lambda f, t: ["simulate", _file(t, "5\n")], "does not begin with a line of format"),
    "trace is a list": (lambda f, t: ["simulate", _file(t, "[1]\n")], "does not begin with a line of format"),
    "trace is deep": (lambda f, t: ["simulate", _file(t, '{"a": ' + "[" * 100_000)], "not valid JSON"),
    "trace without config": (
        lambda f, t: ["simulate", _file(t, '{"format": "dppo_megatron trace 1", "num_prompts": 1}\n{}\n')],
        "Object missing required field `config`",
    ),
    "costs": (lambda f, t: ["simulate", "x", "--rollout-cost", "inf"], "--rollout-cost inf: must be finite"),
    "costs nan": (lambda f, t: ["simulate", "x", "--update-cost", "nan"], "--update-cost nan: must be finite"),
    "seeds": (lambda f, t: ["compare", CONFIG, "--seeds", "0"], "--seeds 0: must be at least 1"),
    "factor": (lambda f, t: ["compare", CONFIG, "--steps-factor", "inf"], "--steps-factor inf: must be finite"),
    "shard": (
        lambda f, t: ["convert", "to-hf", "--checkpoint", str(t), "--out", str(t / "o"), "--shard-gb", "inf"],
        "--shard-gb inf: must be finite",
    ),
    "no checkpoint": (
        lambda f, t: ["convert", "to-megatron", "--hf", str(t), "--out", str(t / "o")],
        "holds no config.json",
    ),
    "no weights": (
        lambda f, t: ["convert", "to-megatron", "--hf", _without_weights(f, t), "--out", str(t / "a" / "o")],
        "holds no *.safetensors file",
    ),
    "hf is missing": (lambda f, t: ["convert", "to-megatron", "--hf", "nope", "--out", str(t / "o")], "--hf = 'nope'"),
    "gate config": (lambda f, t: ["doctor", "--fp8-gate", str(t)], "Is a directory"),
    "doctor settings": (lambda f, t: ["doctor", "seed=3"], "settings belong to a job"),
}


def _without_weights(files: Path, tmp_path: Path) -> str:
    (model := _model(files, tmp_path)).joinpath("model.safetensors").unlink()
    return str(model)


@pytest.mark.parametrize("case", INPUTS)
def test_inputs(files: Path, tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Files that are none, options that are no number."""
    make, expected = INPUTS[case]
    said = _fails(make(files, tmp_path), capsys)
    assert expected in said
    assert not (tmp_path / "o").exists() and not (tmp_path / "a").exists()
    assert case not in ("no checkpoint", "no weights", "hf is missing") or (
        "--hf" in said and "model.hf_path" not in said
    )


@pytest.mark.slow
def test_world_size_and_no_megatron(files: Path, tmp_path: Path) -> None:
    """As torchrun starts it: exit code 2 on every rank, said by the first only, Megatron never imported."""
    overrides = [*settings(files, tmp_path / "run"), "actor.layout.tensor_parallel=2"]
    probe = (
        "import os, sys; from dppo_megatron.workbench.cli import main\n"
        "for rank in '01':\n"
        "    os.environ['RANK'] = os.environ['LOCAL_RANK'] = rank\n"
        "    print('rank', rank, file=sys.stderr)\n"
        "    print(main(sys.argv[1:]), [m for m in sys.modules if m.startswith('megatron')])\n"
    )
    environment = os.environ | LAUNCHED | {"WORLD_SIZE": "3"}
    command = [sys.executable, "-c", probe, "train", CONFIG, *overrides]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=REPOSITORY)
    assert (done.returncode, done.stdout) == (0, "2 []\n2 []\n")
    first, _, second = done.stderr.partition("rank 1\n")
    assert "needs a multiple of 2 processes, but the world size is 3; launch with torchrun" in first
    assert second == ""


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"RANK": "first"}, "RANK='first' is not a whole number of at least 0"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE='0' is not a whole number of at least 1"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK=2, but WORLD_SIZE=2: ranks count from 0"),
        ({"LOCAL_RANK": "-1"}, "LOCAL_RANK='-1' is not a whole number of at least 0"),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"}, "LOCAL_RANK=1, but LOCAL_WORLD_SIZE=1"),
        ({"LOCAL_WORLD_SIZE": ""}, "LOCAL_WORLD_SIZE='' is not a whole number of at least 1"),
        ({"LOCAL_WORLD_SIZE": "2"}, "LOCAL_WORLD_SIZE=2, but WORLD_SIZE=1"),
        ({"LOCAL_RANK": "1", "WORLD_SIZE": "2"}, "LOCAL_RANK=1, but RANK=0"),
        ({"WORLD_SIZE": "2"}, "LOCAL_RANK not set, but others of RANK"),
        ({"MASTER_PORT": "port"}, "MASTER_PORT='port' is not a whole number"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT=65536 is no port: 1 to 65535"),
        ({"MASTER_PORT": "\u0663"}, "is not a whole number"),  # a digit to Python, to nobody else
        ({"MASTER_ADDR": "", "MASTER_PORT": ""}, "MASTER_ADDR and MASTER_PORT not set, but others of RANK"),
    ],
    ids=lambda value: "-".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_a_launchers_environment_that_is_none(
    files: Path,
    tmp_path: Path,
    variables: dict[str, str],
    expected: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A script that sets torchrun's variables itself: one sentence, before anything is read or awaited."""
    for name, value in (LAUNCHED | variables).items():
        monkeypatch.setenv(name, value)
    said = _fails(["train", CONFIG, *settings(files, tmp_path / "run")], capsys)
    assert expected in said and "torchrun sets these" in said


def test_tasks_that_srun_starts_without_torchrun(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would be a job of its own in one run directory. A batch shell's own variables say nothing of the kind, nor
    does a terminal, where srun has started as many shells and one of them is typed into."""
    monkeypatch.delenv("SLURM_PTY_WIN_COL", raising=False)
    for name, value in {"SLURM_NTASKS": "8", "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8"}.items():
        monkeypatch.setenv(name, value)
    said = _fails(["train", CONFIG, *settings(files, tmp_path / "run")], capsys)
    assert "srun has started 8 tasks (SLURM_STEP_NUM_TASKS), but RANK is not set" in said
    monkeypatch.setenv("SLURM_PTY_WIN_COL", "144")
    check_launcher_env()
    monkeypatch.delenv("SLURM_PTY_WIN_COL")
    monkeypatch.delenv("SLURM_STEP_NUM_TASKS")
    check_launcher_env()


def test_a_run_directory_that_holds_a_run_is_never_written_over(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    assert "already holds a run" in _fails(["train", CONFIG, *settings(files, tmp_path)], capsys)
    assert (tmp_path / "metrics.jsonl").read_text() == "{}\n"


def _interface_that_is_not_there(overrides: list[str]) -> tuple[int, str]:
    if dist.get_rank() == 0:
        return 0, ""
    dist.destroy_process_group()
    os.environ["GLOO_SOCKET_IFNAME"] = "nonexistent0"
    with contextlib.redirect_stderr(io.StringIO()) as said:
        code = main(["train", CONFIG, *overrides])
    return code, said.getvalue()


def test_a_mistake_of_another_rank_is_seen_once(files: Path, tmp_path: Path) -> None:
    """The rank that has no such interface says so itself, also beside rank 0."""
    code, said = run_ranks(_interface_that_is_not_there, 2, settings(files, tmp_path / "run"))[1]
    assert code == 2
    assert said.startswith("error: rank 1: GLOO_SOCKET_IFNAME=nonexistent0 fits no network interface of ")
    assert said.count("\n") == 1 and said.endswith("by which the machines of the job reach each other\n")
