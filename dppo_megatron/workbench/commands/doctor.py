from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

from dppo_megatron import launcher_env
from dppo_megatron.config import load_config
from dppo_megatron.config.checks import check_world_size
from dppo_megatron.config.paths import check_writable
from dppo_megatron.progress import progress
from dppo_megatron.texts import show
from dppo_megatron.types import UserError
from dppo_megatron.workbench.commands import parser
from dppo_megatron.workbench.commands.terminal import loading

if TYPE_CHECKING:  # it imports torch
    from dppo_megatron.workbench.doctor.machine import CheckRow

DESCRIPTION = """\
Report what is installed and what this machine can do; exit code 2 if no job can train on its GPUs. Under torchrun or
srun, or with CONFIG, check the job's machines and the links between them; exit code 2 if a fault would stop the job.
With --fp8-gate, run CONFIG's model at CONFIG's layout and compare packed with unpacked log-probabilities and gradients,
and FP8 with bfloat16; exit code 3 if a bound is exceeded:

  dppo-megatron doctor
  torchrun --nproc-per-node 8 -m dppo_megatron doctor CONFIG actor.layout.tensor_parallel=2
  srun --nodes 2 --ntasks-per-node 8 dppo-megatron doctor CONFIG
  dppo-megatron doctor --fp8-gate configs/qwen3_4b.yaml actor.fp8=blockwise
  torchrun --nproc-per-node 8 -m dppo_megatron doctor --fp8-gate CONFIG
"""


def add_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--fp8-gate", metavar="CONFIG", type=parser.config_file, help="YAML file of the job to check")
    command.add_argument("--limit-s", type=float, default=50.0, help="time limit of the job's check (default: 50)")
    command.add_argument("--json", metavar="FILE", help="rank 0 also writes the job's check here")
    parser.add_settings(command, "CONFIG of a job, then settings that replace the file's")


def execute(arguments: argparse.Namespace) -> int:
    if arguments.fp8_gate:
        return _gate(arguments)
    launcher_env.place_from_slurm()
    launcher_env.check_launcher_env()
    config_path, settings = "", list(arguments.overrides)
    if settings and "=" not in settings[0]:
        config_path = parser.config_file(settings.pop(0))
    if settings and not config_path:
        raise UserError(f"{settings[0]}: settings belong to a job; give CONFIG or --fp8-gate CONFIG before them")
    if config_path or launcher_env.launched_world_size() > 1:
        return _cluster(arguments, config_path, settings)
    if arguments.json:
        raise UserError("--json belongs to a job's check; give CONFIG, or start it with torchrun")
    from dppo_megatron.workbench.doctor.machine import faults, report

    with progress("looking at this machine"):
        facts, problems = report(), faults()
    show(*(f"{label:<20}{text}" for label, text in facts + [("fault", problem) for problem in problems]))
    return 2 if problems else 0


def _cluster(arguments: argparse.Namespace, config_path: str, settings: list[str]) -> int:
    parser.check_number("--limit-s", arguments.limit_s, "[1, 1e6]")
    launcher_env.set_cuda_variables()
    if arguments.json and launcher_env.launched_rank() == 0:
        check_writable("--json", arguments.json, directory=False)
    config = None
    if config_path:
        parser.check_comes_first(config_path)
        config = load_config(config_path, settings, writes_run=False, purpose="plan")
        check_world_size(config, launcher_env.launched_world_size())
    with loading("libraries"):
        from dppo_megatron.workbench.doctor.cluster import check_cluster
    size, began = launcher_env.launched_world_size(), time.monotonic()

    def report(rows: list[CheckRow]) -> None:
        for row in rows:
            show(f"{row.verdict:<9}{row.what:<24}{row.detail}{f' [{row.ranks}]' if row.ranks else ''}")
        counts = ", ".join(f"{sum(row.verdict == one for row in rows)} {one}" for one in ("fault", "warning", "ok"))
        show(f"{counts}; {size} ranks, {time.monotonic() - began:.0f} s")
        if arguments.json:
            parser.write_json(arguments.json, {"world_size": size, "rows": [asdict(row) for row in rows]})

    with progress("checking the job's machines"):
        return check_cluster(config, arguments.limit_s, report)


def _gate(arguments: argparse.Namespace) -> int:
    launcher_env.check_launcher_env()
    launcher_env.set_cuda_variables()
    config = parser.read_config(arguments.fp8_gate, arguments.overrides, writes_run=False, purpose="plan")
    launcher_env.set_fp8_variables(config)
    with loading("libraries"):
        from dppo_megatron.job import check_settings
        from dppo_megatron.platform.capabilities import check_gpus, this_machine
        from dppo_megatron.weights.provider import model_architecture
        from dppo_megatron.weights.torch_dist import open_checkpoint
    check_gpus()
    # the data are not loaded: nothing is generated or graded
    architecture = model_architecture(config.model).with_adapters(config.actor.lora)
    check_settings(config, architecture, launcher_env.launched_world_size(), this_machine())
    with progress(f"opening {config.model.hf_path}"):
        checkpoint = open_checkpoint(config.model.hf_path, architecture)
    with loading("Megatron"):
        from dppo_megatron.actor.layout import build_layout, connect_groups, start_process_group, stop_process_group
        from dppo_megatron.workbench.doctor.fp8_gate import run_gate
    with progress("waiting for all ranks"):
        start_process_group(config.guard.rendezvous_timeout_s)
    layout = build_layout(config.actor.layout, config.seed)
    connect_groups(config.actor, architecture, config.guard.rendezvous_timeout_s)
    with progress("gate: packed against unpacked, forwards and backwards"):
        findings = run_gate(config, layout, architecture, checkpoint.get)
    if launcher_env.launched_rank() == 0:
        for finding in findings:
            verdict = "ok    " if finding.passed else "BROKEN"
            show(f"{verdict} {finding.value:9.2e} (bound {finding.bound:g})  {finding.what}")
    stop_process_group()
    return 0 if all(finding.passed for finding in findings) else 3
