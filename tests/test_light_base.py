"""The base install: what a trainer of another kind needs, without the libraries of this one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import numpy as np
import pytest
from packaging.requirements import Requirement
from support.job import REPOSITORY
from support.wheel import build_wheel

from dppo_megatron.config.pruning import PruningConfig
from dppo_megatron.config.schema import Config
from dppo_megatron.config.selection import SelectionSettings, selection_settings
from dppo_megatron.pruning import CompletionBatch
from dppo_megatron.selection import Selector
from dppo_megatron.types import UserError
from dppo_megatron.workbench import cli

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
HEAVY = ("torch", "transformers", "megatron", "pyarrow", "plotly", "rich", "tokenizers", "safetensors", "aiohttp")
HEAVY += ("psutil", "argcomplete", "packaging")
WITHOUT = f"""
import sys
class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {HEAVY}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, NotInstalled())
"""
"""Run before everything else, it makes an environment that has the trainer's libraries one that lacks them."""
IMPORTS = """
import sys, numpy
def most():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
before = most()
import dppo_megatron.pruning, dppo_megatron.selection
print(most() - before)
import dppo_megatron.packing.planner, dppo_megatron.randomness, dppo_megatron.steps.trace
import dppo_megatron.workbench.simulate, dppo_megatron.workbench.compare.verdict
from dppo_megatron.rewards.math.grader import grade_math
assert grade_math("so \\\\boxed{\\\\frac{1}{2}}", "0.5", {}).reward == 1.0
assert grade_math("so \\\\boxed{\\\\pi^2/6}", "\\\\sum_{k=1}^{2} 1/k^2", {}).reward == 0.0
"""
"""Prints the KiB that choosing needs beyond numpy."""
RECORDS = """
import json
import numpy as np
from dppo_megatron.config.schema import Config
from dppo_megatron.config.selection import selection_settings
from dppo_megatron.pruning.interface import StepCost
from dppo_megatron.selection import Rollouts, Selector
from dppo_megatron.steps.trace import trace_header, trace_row
from dppo_megatron.types import PromptFeatures
config, rng = Config(steps=4), np.random.default_rng(0)
config.rollout.prompts_per_step, config.pruning.prompt.method = 8, "none"
selector = Selector(selection_settings(config), 32)
features = PromptFeatures(np.full(32, 5), np.zeros(32), np.zeros(32, np.int64), ("",))
with open("trace.jsonl", "w") as file:
    print(json.dumps(trace_header(config, {"train": 32}, features)), file=file)
    for step in range(1, 5):
        shape = len(selector.begin(step).prompt_index), 8
        rewards = rng.integers(0, 2, shape).astype(float)
        rollouts = Rollouts(rewards, rng.integers(1, 90, shape), rng.random(shape))
        row = trace_row(step, selector.finish(rollouts, step), rollouts)
        print(json.dumps(row | {"seconds": {"rollout": 2.0, "update": 1.0, "other": 0.1}}), file=file)
        selector.feedback(StepCost(step, 2.0, 1.0, 0.1))
"""


def _run(python: str, cwd: Path, *arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if path is not None:
        environment["PYTHONPATH"] = f"{path}{os.pathsep}{REPOSITORY}"
    return subprocess.run([python, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture
def without(tmp_path: Path) -> Path:
    """A directory that, on Python's path, hides what only the trainer needs."""
    folder = tmp_path / "without"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(WITHOUT, encoding="utf-8")
    return folder


def _check_core(python: str, cwd: Path, path: Path | None = None) -> None:
    """Choosing in little memory; recording, simulating and grading; the example of a trainer of another kind."""
    done = _run(python, cwd, "-c", IMPORTS, path=path)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 25 * 1024
    done = _run(python, cwd, "-c", RECORDS, path=path)
    assert done.returncode == 0, done.stderr
    done = _run(python, cwd, "-m", "dppo_megatron", "simulate", "trace.jsonl", "--methods", "grpo,dppo", path=path)
    assert done.returncode == 0 and re.search(r"^dppo +unbiased", done.stdout, re.MULTILINE), done.stderr
    done = _run(python, cwd, str(REPOSITORY / "examples" / "pruning_library.py"), path=path)
    assert done.returncode == 0 and "completion/dppo: unbiased" in done.stdout, done.stderr


def _check_refusal(python: str, cwd: Path, *command: str, path: Path | None = None) -> None:
    """One line that names what is missing and the extra, and exit code 2."""
    done = _run(python, cwd, "-m", "dppo_megatron", *command, path=path)
    said = [line for line in done.stderr.splitlines() if not line.startswith("CONFIG: ")]
    assert done.returncode == 2 and len(said) == 1, done.stdout + done.stderr
    named = re.fullmatch(
        rf"error: dppo-megatron {command[0]} needs (\w+), which the base install does not have;"
        r" pip install 'dppo-megatron\[train\]' \(see docs/libraries.md\)",
        said[0],
    )
    assert named and named[1] in HEAVY, said


def test_the_core_needs_none_of_the_trainers_libraries(tmp_path: Path, without: Path) -> None:
    _check_core(sys.executable, tmp_path, without)


TRAIN = "train quickstart run_dir=run model.hf_path=model data.train_path=data.jsonl data.eval_paths={} sft.steps=0"


@pytest.mark.parametrize(
    "command",
    [TRAIN, "plan h100/qwen3_8b_8gpus_dppo", "quickstart", "report .", "watch .", "doctor", "completion bash"],
    ids=lambda command: command.partition(" ")[0],
)
def test_a_command_that_needs_more_says_which_extra(tmp_path: Path, without: Path, command: str) -> None:
    """`train` not before its settings are right: it gets as far as a model's directory, which exists."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "data.jsonl").write_text('{"problem": "1 + 1", "answer": "2"}\n')
    _check_refusal(sys.executable, tmp_path, *command.split(), path=without)
    assert not (tmp_path / "run").exists() and not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_fresh_environment_with_the_base_alone(tmp_path: Path) -> None:
    """The wheel and what it declares, in the tested versions, from the index that pip is set to."""
    built, folder = build_wheel(tmp_path), tmp_path / "environment"
    venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    pip = ["-m", "pip", "--disable-pip-version-check"]
    held = ["--constraint", str(REPOSITORY / "constraints.txt")]
    done = _run(python, tmp_path, *pip, "install", "--quiet", "--retries", "1", *held, str(built))
    if done.returncode:
        pytest.skip(f"the base's packages cannot be had: {done.stderr.strip().splitlines()[-1][:200]}")
    done = _run(python, tmp_path, *pip, "list", "--format", "json")
    found = {one["name"].lower() for one in json.loads(done.stdout)} - {"pip", "setuptools"}
    assert found == {"dppo-megatron", *(Requirement(line).name for line in PROJECT["dependencies"])}
    _check_core(python, tmp_path)
    _check_refusal(python, tmp_path, "doctor")


def test_the_extra_has_what_the_base_lacks() -> None:
    """The command line's list of modules, and this file's, are those of pyproject.toml; `dev` has them too."""
    extras = PROJECT["optional-dependencies"]
    modules = {Requirement(line).name.removesuffix("-core") for line in extras["train"]}
    assert modules == set(cli._TRAIN_EXTRA.split()) == set(HEAVY)
    assert extras["dev"][0] == extras["benchmarks"][0] == "dppo-megatron[train]"


# -------------------------------------------------------------------------------------------- settings and arrays


def _settings(**changed: object) -> SelectionSettings:
    given = {"prompts_per_step": 4, "completions_per_prompt": 3, "total_steps": 10, "max_completion_tokens": 50}
    return SelectionSettings(**(given | changed))  # type: ignore[arg-type]


def test_settings_of_a_job_are_its_own() -> None:
    """A trainer of another kind that names the same numbers chooses the same prompts."""
    config = Config(steps=10, seed=3)
    config.rollout.prompts_per_step, config.rollout.completions_per_prompt = 4, 3
    config.rollout.sampling.max_completion_tokens = 50
    assert selection_settings(config) == _settings(seed=3)
    drawn = [Selector(one, 40).begin(1).prompt_index for one in (selection_settings(config), _settings(seed=3))]
    np.testing.assert_array_equal(*drawn)
    config.data.mixing, config.data.train_path = "weighted", "a"
    assert selection_settings(config).set_weights == {"train": 1.0}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"completions_per_prompt": 1}, "^completions_per_prompt = 1: must be at least 2"),
        ({"total_steps": -1}, "^total_steps = -1: must not be negative"),
        ({"async_steps": 9}, "^async_steps = 9: must be at most 8"),
        ({"prompts_per_step": 41}, "^prompts_per_step = 41, but the prompt set holds only 40 problems"),
    ],
)
def test_settings_are_checked_by_the_selector(changed: dict[str, object], message: str) -> None:
    """Each by its name there, not by the trainer's."""
    with pytest.raises(UserError, match=message):
        Selector(_settings(**changed), 40)
    pruning = PruningConfig()
    pruning.prompt.rate = 1.5
    with pytest.raises(UserError, match=r"^pruning.prompt.rate = 1.5: must be"):
        Selector(_settings(pruning=pruning), 40)


def test_what_follows_from_groups_is_derived() -> None:
    shape = 2, 2
    given = {"rewards": np.eye(2), "advantages": np.eye(2) - 0.5, "lengths": np.array([[3, 4], [5, 6]])}
    batch = CompletionBatch.of_groups(
        np.array([7, 3]),
        **given,
        logit_grad_norm=np.ones(shape),
        denominator=16.0,
        prompt_weight=np.array([1.0, 2.5]),
        num_nominal=8,
        prompt_tokens=np.array([10, 20]),
    )
    expected = {
        "prompt_index": [7, 7, 3, 3],
        "completion_index": [0, 1, 0, 1],
        "group": [0, 0, 1, 1],
        "rewards": [1, 0, 0, 1],
        "advantages": [0.5, -0.5, -0.5, 0.5],
        "lengths": [3, 4, 5, 6],
        "logit_grad_norm": [1, 1, 1, 1],
        "denominator": [16, 16, 16, 16],
        "prompt_weight": [1, 1, 2.5, 2.5],
        "tokens": [12, 13, 24, 25],  # the last one is predicted, not read
    }
    assert {name: array.tolist() for name, array in batch.arrays().items()} == expected and batch.num_nominal == 8
    rest = {"logit_grad_norm": np.ones(shape), "denominator": 1.0, "prompt_weight": np.ones(2), "num_nominal": 8}
    with pytest.raises(ValueError, match=r"lengths has shape \(2,\), expected \(2, 2\) for rewards \[K, G\]"):
        CompletionBatch.of_groups(np.array([7, 3]), **{**given, **rest, "lengths": np.ones(2, np.int64)})
    with pytest.raises(ValueError, match=r"prompt_weight has shape \(4,\), expected \(2,\)"):
        CompletionBatch.of_groups(np.array([7, 3]), **{**given, **rest, "prompt_weight": np.ones(4)})
