"""A dry run does what a run does before its ranks meet, refuses what `train` refuses, and leaves nothing behind."""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.job import REPOSITORY, write_job_files
from support.job import settings as job_settings

from dppo_megatron.config.schema import Config
from dppo_megatron.platform import capabilities
from dppo_megatron.platform.capabilities import Machine
from dppo_megatron.types import UserError
from dppo_megatron.workbench.cli import main
from dppo_megatron.workbench.commands import plan as plan_command
from dppo_megatron.workbench.planning.site import CHIPS, GIB, Site


def _everything(folder: Path) -> dict[str, tuple[int, int] | None]:
    """Path to size and time of modification of every file in a folder; None for directories."""
    return {
        str(path.relative_to(folder)): None if path.is_dir() else (path.lstat().st_size, path.lstat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
    }


_BOTH = """
import sys
from dppo_megatron.workbench.cli import main
from dppo_megatron.workbench.commands import plan as plan_command
for command in ("train", "plan"):
    assert main([command, *sys.argv[1:], "--dry-run", "--gpus", "1"]) == 0
    print("end of", command)
"""


@pytest.mark.slow
def test_dry_run_writes_nothing(tmp_path: Path) -> None:
    """A process with home, temporary directory, caches and working directory of its own leaves them as they were, by
    `train` and by `plan`: no file, no directory, no change of one. Data, tokenizer, weights and grader were loaded, the
    data from a file that a run keeps the prompts of: above 1 MiB."""
    for name in ("home", "tmp", "cwd", "task"):
        (tmp_path / name).mkdir()
    files = write_job_files(tmp_path / "task")
    rows = [json.loads(line) for line in (files / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    long = [json.dumps(row | {"about": "a" * (2**21 // len(rows))}) for row in rows]
    (files / "train.jsonl").write_text("\n".join(long), encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "HF_"))}
    environment |= {
        "HOME": str(tmp_path / "home"),
        "TMPDIR": str(tmp_path / "tmp"),
        "PYTHONPATH": str(REPOSITORY),
        "PYTHONDONTWRITEBYTECODE": "1",  # Python's own cache, which any command fills
    }
    settings = [*job_settings(files, tmp_path / "cwd" / "run"), "actor.ddp={bucket_size: 40000000}"]  # asks Megatron
    before = _everything(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", _BOTH, str(REPOSITORY / "configs" / "quickstart.yaml"), *settings],
        cwd=tmp_path / "cwd",
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert _everything(tmp_path) == before
    first = json.loads((files / "train.jsonl").read_text(encoding="utf-8").splitlines()[0])["problem"]
    train, _, rest = done.stdout.partition("end of train\n")
    plan, _, _ = rest.partition("end of plan\n")
    assert train.rstrip("\n").endswith(first) and plan.rstrip("\n").endswith(first)


@pytest.mark.parametrize(
    ("device", "options", "gib", "bandwidth", "said"),
    [
        ("NVIDIA H200", [], 139.0, CHIPS["h200"].bandwidth, "NVIDIA H200, 139.0 GiB"),
        ("NVIDIA RTX 9000", [], 139.0, CHIPS["h100"].bandwidth, "NVIDIA RTX 9000, 139.0 GiB, as fast as an H100"),
        ("NVIDIA H200", ["--gpu", "a100"], 79.1, CHIPS["a100"].bandwidth, ""),
        ("NVIDIA H200", ["--gpu-memory", "40"], 40.0, CHIPS["h100"].bandwidth, ""),
        ("", [], 79.1, CHIPS["h100"].bandwidth, ""),
    ],
)
def test_a_dry_run_is_of_the_gpu_that_is_here(
    device: str, options: list[str], gib: float, bandwidth: float, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless another is named: a job for 140 GiB was refused on such a GPU for an H100's 79."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(device))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: device)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (GIB, 139 * GIB))
    parser, sites = argparse.ArgumentParser(), list[Site]()
    plan_command.add_options(parser)
    monkeypatch.setattr(plan_command, "load_config", lambda *_, **__: Config())

    def load(config: Config, site: Site, gpu: str, is_named: bool) -> None:
        sites.append(site)
        raise UserError("that is all")

    monkeypatch.setattr(plan_command, "_load_job", load)
    arguments = parser.parse_args(["quickstart", *options, "--dry-run"])
    found = "".join(plan_command._use_local_gpu(copy.copy(arguments)))
    assert found.endswith(said) and bool(found) == bool(said)
    with pytest.raises(UserError, match="that is all"):
        plan_command.execute(arguments)
    assert (sites[0].gpu_memory / GIB, sites[0].bandwidth) == (pytest.approx(gib), bandwidth)


_A100 = ("NVIDIA A100-SXM4-80GB", (8, 0))


@pytest.mark.parametrize(
    ("device", "flash", "options", "said"),
    [
        (("NVIDIA B300", (10, 3)), False, ["actor.fp8=mxfp8", "model.dtype=bfloat16"], ""),
        (_A100, True, [], ""),
        (_A100, False, [], "planned with actor.layer_spec = local: Transformer Engine has no fused attention"),
        (("NVIDIA H200", (9, 0)), False, ["--gpu", "a100"], "planned with actor.layer_spec = local: Transformer"),
        (_A100, False, ["--gpu", "b200", "actor.fp8=mxfp8", "model.dtype=bfloat16"], ""),
        (_A100, False, ["actor.layer_spec=te", "actor.layout.context_parallel=2"], "; install flash-attn, or set"),
    ],
)
def test_a_dry_run_has_the_layers_of_the_machine_that_is_here(
    tmp_path: Path,
    device: tuple[str, tuple[int, int]],
    flash: bool,
    options: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not those of an H100 where the table lacks the chip, nor of one without flash-attn where that is installed;
    unless another is named."""
    name, chip = device
    monkeypatch.setattr(capabilities, "this_machine", lambda: Machine(chip, "", has_flash_attention=flash))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (GIB, 139 * GIB))
    files, config = write_job_files(tmp_path), str(REPOSITORY / "configs" / "quickstart.yaml")
    capsys.readouterr()  # what writing the model has said
    line = ["plan", config, *job_settings(files, tmp_path / "run"), "--dry-run", "--gpus", "2", "--methods", "grpo"]
    code, (out, error) = main([*line, *options]), capsys.readouterr()
    assert code == (2 if said and "planned" not in said else 0), error
    assert said in out + error and ("planned with" in out) == ("planned with" in said)


def test_dry_run_refuses_what_train_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same checks: a data file that is not there, a grader that cannot be loaded, fields that Megatron lacks."""
    files = write_job_files(tmp_path)
    config, settings = str(REPOSITORY / "configs" / "quickstart.yaml"), job_settings(files, tmp_path / "run")
    capsys.readouterr()  # what writing the model has said
    for wrong in (
        f"data.train_path={tmp_path / 'no.jsonl'}",
        "reward.function=no.such:grader",
        "actor.megatron={moe_permute_fusio: true}",
        "actor.ddp={bucket: 1}",
        "actor.ddp={fp8_param_gather: true}",
        "actor.recompute_modules=[attention]",
    ):
        said = []
        for option in ([], ["--dry-run", "--gpus", "1"]):
            assert main(["train", config, *settings, wrong, *option]) == 2
            said.append(capsys.readouterr().err)
        assert said[0] == said[1]
    recomputed = ["actor.recompute=selective", "actor.recompute_modules=[moe_act]"]
    assert main(["train", config, *settings, *recomputed]) == 2  # what Megatron refuses here it may take elsewhere
    assert "megatron-core refuses it: moe_act in recompute_modules" in capsys.readouterr().err
    for option in ("--gpus", "--gpus-per-node", "--ranks-per-node"):
        assert main(["train", config, *settings, option, "2"]) == 2
        assert f"{option} belongs to --dry-run" in capsys.readouterr().err


def test_the_servers_python_is_looked_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether there is such a program, before every run; whether it has the engine, which is not imported, before one
    costs a place in a queue."""
    config, files, sglang = str(REPOSITORY / "configs" / "quickstart.yaml"), write_job_files(tmp_path), tmp_path / "lib"
    servers = ["rollout.engine=sglang", "rollout.servers.launch=local"]
    job = ["train", config, *job_settings(files, tmp_path / "run"), *servers]
    dry = ["--dry-run", "--gpus", "1"]
    capsys.readouterr()  # what writing the model has said
    for python in (tmp_path / "python", files / "train.jsonl"):
        for option in ([], dry):
            assert main([*job, f"rollout.servers.python={python}", *option]) == 2
            said = capsys.readouterr().err
            assert f"rollout.servers.python = '{python}': this machine has no such program, or may not run it" in said
    assert main([*job, f"rollout.servers.python={sys.executable}", *dry]) == 2
    assert f"rollout.servers.python = '{sys.executable}': this Python has no sglang" in capsys.readouterr().err
    warning = "rollout.servers.python is not set, and the trainer's Python has no sglang"
    assert main([*job, *dry]) == 0
    assert warning in capsys.readouterr().out
    (sglang / "sglang").mkdir(parents=True)
    (sglang / "sglang" / "__init__.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.setenv("PYTHONPATH", str(sglang), prepend=os.pathsep)
    assert main([*job, f"rollout.servers.python={sys.executable}", *dry]) == 0
    assert main([*job, *dry]) == 0
    assert warning not in capsys.readouterr().out


def test_a_dry_run_of_train_on_nodes_of_four(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twelve ranks, no whole nodes of eight GPUs: it takes the options that the message names, and torchrun's word."""
    config, files = str(REPOSITORY / "configs" / "quickstart.yaml"), write_job_files(tmp_path)
    line = ["train", config, *job_settings(files, tmp_path / "run"), "--dry-run"]
    assert main([*line, "--gpus", "12"]) == 2
    assert "--gpus 12: not a whole number of nodes (--gpus-per-node 8)" in capsys.readouterr().err
    assert main([*line, "--gpus", "12", "--gpus-per-node", "4"]) == 0
    assert "; 12 GPUs of 79.1 GiB, 4 a node" in capsys.readouterr().out
    monkeypatch.setenv("WORLD_SIZE", "12")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert main(line) == 0
    assert "; 12 GPUs of 79.1 GiB, 4 a node" in capsys.readouterr().out
