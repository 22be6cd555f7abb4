"""What used to be a traceback, or was accepted, is a sentence and exit code 2, before anything expensive is done."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.job import REPOSITORY, settings, write_job_files

from dppo_megatron.workbench.cli import main

CONFIG = str(REPOSITORY / "configs" / "quickstart.yaml")
LONG = "x" * 5000
DEEP = "d/" * 2500


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_job_files(tmp_path_factory.mktemp("task"))


def _fails(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a command says, whose exit code is 2."""
    code = main(arguments)
    printed = capsys.readouterr()
    assert code == 2, printed
    assert printed.err.startswith("error: ") and printed.err.count("\n") == 1 and "Traceback" not in printed.err
    assert len(printed.err) < 1500
    return printed.err


VALUES = {
    "actor.optimizer.learning_rate=.inf": "actor.optimizer.learning_rate = .inf: must be a finite number",
    "actor.optimizer.learning_rate=1e400": "must be a finite number",
    "actor.optimizer.learning_rate=101": "must be at most 100",
    "actor.optimizer.adam_beta1=1.0": "actor.optimizer.adam_beta1 = 1.0: must be in [0, 1)",
    "actor.optimizer.adam_beta2=-0.1": "actor.optimizer.adam_beta2 = -0.1: must be in [0, 1)",
    "actor.optimizer.adam_eps=0": "must be in (0, 1]",
    "reward.timeout_s=.inf": "must be a finite number",
    "reward.timeout_s=1e12": "reward.timeout_s = 1000000000000.0: must be at most 100000000",
    "rollout.limits.request_timeout_s=.nan": "must be a finite number",
    "guard.watchdog_s=-1": "must not be negative",
    "seed=-1": "seed = -1: must not be negative",
    "seed=18446744073709551616": "seed = 18446744073709551616: must be at most 9223372036854775807",
    f"seed={'9' * 5000}": "must be a whole number",
    "seed=true": "seed = true: must be a whole number",
    "seed=null": "there is nothing to take null for",
    "steps=1.5": "steps = 1.5: must be a whole number",
    "threads_per_rank=100000": "threads_per_rank = 100000: must be at most 1024",
    "rollout.completions_per_prompt=1099511627776": "rollout.completions_per_prompt = 1099511627776: must be at most",
    "rollout.prompts_per_step=99999999999999999999": "must be at most",
    "rollout.sampling.max_completion_tokens=99999999999": "must be at most",
    "rollout.sampling.stop_token_ids=[-1]": "rollout.sampling.stop_token_ids[0] = -1: must not be negative",
    "reward.processes=4096": "must be at most 1024",
    "reward.min_self_consistency=1.1": "must be in [0, 1]",
    "eval.samples=0": "eval.samples = 0: must be at least 1",
    "eval.temperature=-1": "eval.temperature = -1.0: must not be negative",
    "data.train_sets={a: {path: x, weight: 0}}": "data.train_sets.a.weight = 0.0: must be greater than 0",
    "data.eval_sets={a: {path: x, samples: 0}}": "data.eval_sets.a.samples = 0: must be at least 1",
    "run_dir=${nope}": "there is no setting 'nope'",
    "run_dir=${run_dir}": "comes back to itself",
    "run_dir=${oc.env:DPPO_TEST_UNSET}": "the environment variable DPPO_TEST_UNSET is not set",
    f"run_dir={LONG}": "cannot be written: File name too long",
    f"run_dir={DEEP}": "cannot be written: File name too long",
    "run_dir=a\0b": "holds a NUL",
    "run_dir=": "run_dir is not set",
    f"model.hf_path={LONG}": "cannot be read: File name too long",
    f"data.train_path={DEEP}": "cannot be read: File name too long",
    f"data.train_path={REPOSITORY / 'tools'}": "neither a directory saved by `datasets` nor",
    f"model.hf_path={CONFIG}": "is a file, not a directory",
    f"data.eval_paths.x={LONG}": "data.eval_paths.x = ",
    f"checkpoint.resume={LONG}": "must be auto, never or the directory of a checkpoint",
    "rollout.servers.endpoints=a: b": "rollout.servers.endpoints = {...}: must be a list",
    "rollout.servers.endpoints=['http://[::1']": "is no address",
    "rollout.servers.endpoints=['http://h:99999']": "is no address",
    "rollout.servers.endpoints=['http://h:1\\n']": "is no address",
    "data.problem_field=": "data.problem_field = '': must not be empty",
    "reward.function=": "reward.function = '': must not be empty",
    "reward.function=a.b": "or module:function",
    "reward.function=:x": "or module:function",
    "rollout.servers.api_key_env=sk-1234": "is not the name of an environment variable",
    "data.eval_paths={a: }": "must be text",
    "pruning.prompt.rate=yes": "must be a number",
    "=3": "expected key=value",
    "": "expected key=value",
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


GRADERS = {
    "syntax": ("def grade(:\n", "SyntaxError"),
    "raises": ("raise ValueError('no\\nmodel')\n", "ValueError: no"),
    "exits": ("import sys\nsys.exit(5)\n", "SystemExit: 5"),
    "zero": ("1 / 0\n", "ZeroDivisionError"),
    "missing": ("x = 1\n", "has no attribute 'grade'"),
}


@pytest.mark.parametrize("name", GRADERS)
@pytest.mark.parametrize("key", ["reward.function", "objective.function"])
def test_a_module_that_fails_at_import(
    files: Path,
    tmp_path: Path,
    name: str,
    key: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever it does, even ending the process."""
    module = f"fails_{name}_{key.split('.')[0]}"
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
    "convert --out": lambda f, t: ["convert", "to-megatron", "--hf", str(f / "model"), "--out", "/proc/self/x"],
    "convert --out under a file": lambda f, t: [
        *("convert", "to-megatron", "--hf", str(f / "model"), "--out", str(t / "file" / "x"))
    ],
    "convert --out long": lambda f, t: ["convert", "to-megatron", "--hf", str(f / "model"), "--out", str(t / LONG)],
    "convert --out exists": lambda f, t: ["convert", "to-megatron", "--hf", str(f / "model"), "--out", str(t)],
}


@pytest.mark.parametrize("case", OUTPUTS)
def test_outputs_are_tried_before_the_work(
    files: Path, tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The option and the reason; the input, which is no trace at all, is not even looked at."""
    (tmp_path / "file").write_text("")
    (tmp_path / "full" / "results.json").mkdir(parents=True)
    (tmp_path / "trace.jsonl").write_text("no trace")
    said = _fails(OUTPUTS[case](files, tmp_path), capsys)
    option = "run_dir" if case.startswith("run_dir") else case.split()[1] if "--" in case else "--out"
    assert option in said and "not valid JSON" not in said
    assert any(reason in said for reason in ("cannot be written", "is a file", "is a directory", "exists", "is empty"))


INPUTS: dict[str, tuple[Callable[[Path, Path], list[str]], str]] = {
    "config is a directory": (lambda f, t: ["train", str(t)], "cannot be read: Is a directory"),
    "config has a long name": (lambda f, t: ["train", LONG], "cannot be read: File name too long"),
    "config has a NUL": (lambda f, t: ["train", "a\0b"], "cannot be read"),
    "config has no end": (lambda f, t: ["train", "/dev/zero"], "a configuration has at most 1000000"),
    "settings before the config": (lambda f, t: ["train", "seed=3", CONFIG], "'seed=3' stands where CONFIG should"),
    "trace is a directory": (lambda f, t: ["simulate", str(t)], "is a directory, not a file"),
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
    "hf is missing": (lambda f, t: ["convert", "to-megatron", "--hf", "nope", "--out", str(t / "o")], "--hf = 'nope'"),
    "gate config": (lambda f, t: ["doctor", "--fp8-gate", str(t)], "Is a directory"),
    "doctor settings": (lambda f, t: ["doctor", "seed=3"], "settings belong to a job"),
}


def _file(directory: Path, text: str) -> str:
    (directory / "file.jsonl").write_text(text)
    return str(directory / "file.jsonl")


@pytest.mark.parametrize("case", INPUTS)
def test_inputs(files: Path, tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Files that are none, options that are no number."""
    make, expected = INPUTS[case]
    said = _fails(make(files, tmp_path), capsys)
    assert expected in said
    assert case not in ("no checkpoint", "hf is missing") or ("--hf" in said and "model.hf_path" not in said)


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
    assert "seed = -1: must not be negative" in _fails(arguments, capsys)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "required: COMMAND"),
        (["fly"], "invalid choice: 'fly'"),
        (["train"], "required: CONFIG"),
        (["train", CONFIG, "--res", "never"], "unrecognized arguments: --res never; did you mean --resume?"),
        (["train", CONFIG, "--steps", "3"], "arguments: --steps 3; a setting is given without dashes: steps=3"),
        (["train", CONFIG, "--actor.layout.tensor_parallel=2"], "without dashes: actor.layout.tensor_parallel=2"),
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


def _start(*arguments: str, **streams: int) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    return subprocess.Popen([sys.executable, "-m", "dppo_megatron", *arguments], env=environment, **streams)  # type: ignore[call-overload, no-any-return]


def test_nobody_reads_the_output() -> None:
    """`| head` has taken what it wanted: no traceback, and the shell's code for it."""
    reader, writer = os.pipe()
    os.close(reader)
    process = _start("completion", "bash", stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    _, said = process.communicate(timeout=300)
    assert (process.returncode, said) == (141, b"")


@pytest.mark.parametrize("both", [False, True])
def test_nobody_reads_the_mistake(both: bool) -> None:
    """The exit code still tells that it was one."""
    reader, writer = os.pipe()
    os.close(reader)
    process = _start("train", "nowhere.yaml", stderr=writer, stdout=writer if both else subprocess.PIPE)
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
