"""The wheel: what it holds, and that it works in an environment where there is no checkout."""

from __future__ import annotations

import os
import re
import subprocess
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from support.job import REPOSITORY
from support.wheel import build_wheel

from dppo_megatron.config.paths import shipped

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the wheel alone; what it needs is found in the tests' own."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    interpreter = folder / "bin" / "python"
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    with zipfile.ZipFile(wheel) as archive:  # what pip does with a wheel of pure Python, less its scripts
        archive.extractall(site)
    (site / "neighbour.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return interpreter


def _python(python: Path, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [str(python), *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=500
    )


def _run(python: Path, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return _python(python, cwd, "-m", "dppo_megatron", *arguments)


def test_wheel_holds_what_the_checkout_has(wheel: Path) -> None:
    """Every config and example, every module, the typing marker and the report's assets."""
    names = set(zipfile.ZipFile(wheel).namelist())
    for directory in ("configs", "examples"):
        for path in (REPOSITORY / directory).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                assert f"dppo_megatron/shipped/{path.relative_to(REPOSITORY)}" in names
    for path in (*(REPOSITORY / "docs").glob("*.md"), REPOSITORY / "docs" / "other_names.txt"):  # messages name them
        assert f"dppo_megatron/shipped/docs/{path.name}" in names
    for path in (REPOSITORY / "dppo_megatron").rglob("*"):
        if path.suffix in (".py", ".typed", ".js", ".css", ".html"):
            assert str(path.relative_to(REPOSITORY)) in names
    assert not any(name.startswith(("tests/", "benchmarks/", "setup")) for name in names)


def test_what_is_shipped_is_found_in_an_empty_directory(python: Path, tmp_path: Path) -> None:
    """By its name, planned without a model, and copied."""
    done = _run(python, tmp_path, "plan", "h100/qwen3_8b_8gpus_dppo", "--methods", "grpo")
    folder = python.parent.parent
    assert done.returncode == 0 and f"CONFIG: the shipped {folder}" in done.stderr, done.stderr
    assert "assumed: the published sizes of Qwen/Qwen3-8B" in done.stdout
    refused = _run(python, tmp_path, "train", "quickstart", "critic.optim.lr=1")
    assert refused.returncode == 2 and "not supported: a critic" in refused.stderr
    told = _run(python, tmp_path, "config", "data.train_path").stdout + _run(python, tmp_path, "plan", "-h").stdout
    told += _run(python, tmp_path, "train", "quickstart", "--load-in-4bit").stderr
    pages = re.findall(r"[^\s()]*docs/\w+\.md", told)
    assert len(pages) >= 3 and all(Path(page).is_file() for page in pages), pages
    load = "from dppo_megatron.config.plugins import load_function as f; f('k', 'examples.custom_grader:brevity')"
    assert "`dppo-megatron init DIR` copies" in _python(python, tmp_path, "-c", load).stderr
    assert _run(python, tmp_path, "init", ".").returncode == 0
    assert _python(python, tmp_path, "-c", load).returncode == 0
    refused = _run(python, tmp_path, "eval", "configs/quickstart.yaml", "--sets", "six")
    assert "CONFIG: configs/quickstart.yaml of this directory" in refused.stderr
    assert "--sets six: the set 'math500' needs 'math500/test.jsonl', which does not exist" in refused.stderr


@pytest.mark.long
def test_quickstart_runs_outside_the_checkout(python: Path, tmp_path: Path) -> None:
    """The installed package makes the task, trains two steps and writes the report; a second run replaces the first,
    and a directory that is no run is left alone."""
    where = _python(python, tmp_path, "-c", "import dppo_megatron; print(dppo_megatron.__file__)")
    assert str(python.parent.parent) in where.stdout, "the checkout was imported, not the wheel"
    short = ["steps=2", "sft.steps=2", "rollout.prompts_per_step=8", "threads_per_rank=1", "eval.every_steps=0"]
    done = _run(python, tmp_path, "quickstart", *short)
    assert done.returncode == 0, done.stdout + done.stderr
    run_dir = tmp_path / "runs" / "quickstart"
    assert (run_dir / "summary.json").is_file() and (run_dir / "report.html").is_file()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("keep")
    refused = _run(python, tmp_path, "quickstart", "--run-dir", "mine")
    assert refused.returncode == 2 and "holds files that are not a run's" in refused.stderr
    assert (tmp_path / "mine" / "notes").read_text() == "keep"


def test_shipped_files_are_the_checkouts_here() -> None:
    """In a checkout nothing is copied."""
    assert shipped("configs", "quickstart.yaml") == REPOSITORY / "configs" / "quickstart.yaml"
