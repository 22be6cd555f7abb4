"""A user's mistake gives one clear line and exit code 2, before a process group or a model exists.

The commands run for real, in a process of their own, because the exit code and what was imported are the point.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from support.job import REPOSITORY, settings, write_job_files
from support.launch import run_ranks

from dppo_megatron.launched import check_launched
from dppo_megatron.workbench.cli import main

CONFIG = str(REPOSITORY / "configs" / "quickstart.yaml")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_job_files(tmp_path_factory.mktemp("task"))


def _edit_config(files: Path, tmp_path: Path, **values: object) -> str:
    """A copy of the model directory with other sizes in config.json."""
    copy = tmp_path / "model"
    copy.mkdir()
    for path in (files / "model").iterdir():
        copy.joinpath(path.name).write_bytes(path.read_bytes())
    raw = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(raw | values))
    return f"model.hf_path={copy}"


def _rows(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _pipe(tmp_path: Path) -> Path:
    """Opening it would wait for a writer without end, on every rank."""
    os.mkfifo(tmp_path / "rows.jsonl")
    return tmp_path / "rows.jsonl"


GOOD = '{"problem": "1+1=", "answer": "2"}'
LIST_ANSWER = '{"problem": "1+1=", "answer": ["2"]}'
NO_ANSWER = '{"problem": "1+1="}'

# name: (overrides made from (files, tmp_path), what the message must say)
CASES = {
    "unknown_key": (lambda f, t: ["rollout.prompts_per_stp=4"], "did you mean 'rollout.prompts_per_step'?"),
    "unknown_section": (lambda f, t: ["optimizer.learning_rate=1"], "did you mean 'actor.optimizer.learning_rate'?"),
    "wrong_type": (lambda f, t: ["steps=many"], "steps = many: must be a whole number"),
    "wrong_choice": (
        lambda f, t: ["model.dtype=fp8"],
        "model.dtype = 'fp8': must be one of float32, bfloat16, float64",
    ),
    "section_as_value": (lambda f, t: ["rollout=3"], "'rollout' is a section of settings"),
    "no_equals_sign": (lambda f, t: ["steps"], "override 'steps': expected key=value"),
    "out_of_range": (
        lambda f, t: ["rollout.sampling.temperature=0"],
        "rollout.sampling.temperature = 0.0: must be greater than 0",
    ),
    "group_of_one": (
        lambda f, t: ["rollout.completions_per_prompt=1"],
        "rollout.completions_per_prompt = 1: must be at least 2",
    ),
    "pruning_everything": (lambda f, t: ["pruning.prompt.rate=1.0"], "pruning.prompt.rate = 1.0"),
    "pruning_method": (lambda f, t: ["pruning.completion.method=dpo"], "did you mean 'dppo'?"),
    "missing_data": (lambda f, t: ["data.train_path=nowhere.jsonl"], "data.train_path = 'nowhere.jsonl': no such file"),
    "missing_model": (lambda f, t: ["model.hf_path=nowhere"], "model.hf_path = 'nowhere': no such directory"),
    "data_is_a_pipe": (lambda f, t: [f"data.train_path={_pipe(t)}"], "is a device or a pipe, not a file"),
    "warm_start_is_a_device": (lambda f, t: ["warm_start.examples_path=/dev/zero"], "is a device or a pipe"),
    "empty_dataset": (lambda f, t: [f"data.train_path={_rows(t, '')}"], "rows.jsonl: holds no problems"),
    "row_without_field": (
        lambda f, t: [f"data.train_path={_rows(t, GOOD, NO_ANSWER)}"],
        "rows.jsonl:2: the row lacks the field 'answer'; it has: problem",
    ),
    "row_not_json": (lambda f, t: [f"data.train_path={_rows(t, GOOD, '[oops')}"], "rows.jsonl:2: not valid JSON"),
    "answer_is_a_list": (
        lambda f, t: [f"data.train_path={_rows(t, GOOD, LIST_ANSWER)}"],
        "rows.jsonl:2: 'answer' is a list; an answer is text or a number",
    ),
    "no_chat_template": (lambda f, t: ["data.apply_chat_template=true"], "the model's tokenizer has none"),
    "same_set_twice": (lambda f, t: ["data.eval_sets.heldout.path=x"], "are both the set 'heldout'"),
    "quota": (
        lambda f, t: [
            "data.mixing=weighted",
            "data.train_path=",
            f"data.train_sets.train.path={f}/train.jsonl",
            f"data.train_sets.a.path={_rows(t, GOOD)}",
            "data.train_sets.a.weight=0.2",
        ],
        "data.train_sets.a.weight: a step of 16 prompts takes up to 3 of 'a', which holds only 1 problems",
    ),
    "too_few_problems": (lambda f, t: [f"data.train_path={_rows(t, GOOD)}"], "holds only 1 problems"),
    "prompt_too_long": (lambda f, t: ["data.max_prompt_tokens=3"], "more than data.max_prompt_tokens = 3"),
    "sequence_over_cap": (
        lambda f, t: ["packing.max_tokens_per_microbatch=31"],
        "data.max_prompt_tokens + rollout.sampling.max_completion_tokens = 32 tokens and must fit",
    ),
    "sequence_over_positions": (
        lambda f, t: ["rollout.sampling.max_completion_tokens=500", "packing.max_tokens_per_microbatch=1000"],
        "more than the 128 positions",
    ),
    "heads_by_tp": (
        lambda f, t: [
            _edit_config(f, t, num_attention_heads=3, num_key_value_heads=3),
            "actor.layout.tensor_parallel=2",
        ],
        "the model's 3 attention heads do not divide by it",
    ),
    "layers_by_pp": (
        lambda f, t: [_edit_config(f, t, num_hidden_layers=3, layer_types=None), "actor.layout.pipeline_parallel=2"],
        "the model's 3 layers do not divide by it",
    ),
    "architecture": (
        lambda f, t: [_edit_config(f, t, architectures=["GPT2LMHeadModel"])],
        "architecture GPT2LMHeadModel is not supported; supported: Qwen3ForCausalLM",
    ),
    "grader": (lambda f, t: ["reward.function=dppo_megatron.rewards.graders:nope"], "cannot be imported"),
    "resume": (lambda f, t: ["checkpoint.resume=nowhere"], "checkpoint.resume = 'nowhere': must be auto, never or"),
}
WORLD_SIZE = {"heads_by_tp": "2", "layers_by_pp": "2"}
LAUNCHED = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize("case", CASES)
def test_message_and_exit_code(
    files: Path, tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line on stderr that says what, where and what would be right; nothing written."""
    make_overrides, expected = CASES[case]
    for name, value in (LAUNCHED | {"LOCAL_RANK": "0", "WORLD_SIZE": WORLD_SIZE.get(case, "1")}).items():
        monkeypatch.setenv(name, value)
    run_dir = tmp_path / "run"
    code = main(["train", CONFIG, *settings(files, run_dir), *make_overrides(files, tmp_path)])
    message = capsys.readouterr().err
    assert code == 2
    assert expected in message
    assert message.startswith("error: ") and message.count("\n") == 1
    assert not run_dir.exists()


def _command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        cwd=REPOSITORY,
    )


@pytest.mark.slow
def test_world_size_and_no_megatron(files: Path, tmp_path: Path) -> None:
    """As torchrun starts it: exit code 2 on every rank, said by the first only, Megatron never imported."""
    overrides = [*settings(files, tmp_path / "run"), "actor.layout.tensor_parallel=2"]
    probe = (
        "import os, sys; from dppo_megatron.workbench.cli import main\n"
        "for rank in '01':\n"
        "    os.environ['RANK'] = rank\n"
        "    print('rank', rank, file=sys.stderr)\n"
        "    print(main(sys.argv[1:]), [m for m in sys.modules if m.startswith('megatron')])\n"
    )
    done = _command("-c", probe, "train", CONFIG, *overrides, **LAUNCHED | {"WORLD_SIZE": "3", "LOCAL_RANK": "0"})
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
    assert main(["train", CONFIG, *settings(files, tmp_path / "run")]) == 2
    message = capsys.readouterr().err
    assert expected in message and "torchrun sets these" in message
    assert message.startswith("error: ") and message.count("\n") == 1


def test_tasks_that_srun_starts_without_torchrun(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would be a job of its own in one run directory. A batch shell's own variables say nothing of the kind, nor
    does a terminal, where srun has started as many shells and one of them is typed into."""
    monkeypatch.delenv("SLURM_PTY_WIN_COL", raising=False)
    for name, value in {"SLURM_NTASKS": "8", "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8"}.items():
        monkeypatch.setenv(name, value)
    assert main(["train", CONFIG, *settings(files, tmp_path / "run")]) == 2
    assert "srun has started 8 tasks (SLURM_STEP_NUM_TASKS), but RANK is not set" in capsys.readouterr().err
    monkeypatch.setenv("SLURM_PTY_WIN_COL", "144")
    check_launched()
    monkeypatch.delenv("SLURM_PTY_WIN_COL")
    monkeypatch.delenv("SLURM_STEP_NUM_TASKS")
    check_launched()


def test_missing_config_and_used_run_dir(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run directory that holds a run is never written over."""
    assert main(["train", "nowhere.yaml"]) == 2
    assert "config file 'nowhere.yaml' does not exist" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    assert main(["train", CONFIG, *settings(files, tmp_path)]) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert (tmp_path / "metrics.jsonl").read_text() == "{}\n"


def test_help_reads_well(capsys: pytest.CaptureFixture[str]) -> None:
    """Help exists for the program and each command, and names no command that is not there."""
    for arguments in (["--help"], ["train", "--help"], ["eval", "--help"]):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 0
        assert "dppo-megatron" in capsys.readouterr().out


def test_a_command_without_ranks_does_not_read_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell in which a script has left a variable of torchrun's empty."""
    monkeypatch.setenv("RANK", "")
    assert main(["config", "seed"]) == 0
    assert capsys.readouterr().out.startswith("seed  (")


@pytest.mark.parametrize(("closed", "said"), [(1, ""), (2, "seed  (whole number")])
def test_a_stream_that_is_closed(closed: int, said: str) -> None:
    """As a service may start the command: what would have been written there is not, and all else is as ever."""
    begin = f"import os, sys; os.close({closed}); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    done = _command("-c", begin, "-m", "dppo_megatron", "config", "seed", DPPO_PROGRESS="on")
    assert (done.returncode, done.stdout[: len(said) or None]) == (0, said)
    assert "Traceback" not in done.stderr  # on a slow machine there are lines of progress


def _interface_that_is_not_there(overrides: list[str]) -> tuple[int, str]:
    if dist.get_rank() == 0:
        return 0, ""
    dist.destroy_process_group()
    os.environ["GLOO_SOCKET_IFNAME"] = "nonexistent0"
    with contextlib.redirect_stderr(io.StringIO()) as said:
        code = main(["train", CONFIG, *overrides])
    return code, said.getvalue()


def test_a_mistake_of_another_rank_is_seen_once(files: Path, tmp_path: Path) -> None:
    """Rank 0 speaks for all where they agree; of what is wrong on another machine alone it knows nothing."""
    code, said = run_ranks(_interface_that_is_not_there, 2, settings(files, tmp_path / "run"))[1]
    assert code == 2
    assert said.startswith("error: rank 1: GLOO_SOCKET_IFNAME=nonexistent0 fits no network interface of ")
    assert said.count("\n") == 1 and said.endswith("by which the machines of the job reach each other\n")
