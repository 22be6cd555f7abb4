"""`dppo-megatron doctor`."""

from __future__ import annotations

import argparse

from dppo_megatron.commands.parser import Commands, add_command, add_settings, read_config
from dppo_megatron.commands.terminal import quiet_libraries
from dppo_megatron.launched import check_launched, launched_rank, launched_world_size, set_cuda_variables
from dppo_megatron.types import UserError, Watch

_DOCTOR = """\
Say what is installed and what this machine can do. With --fp8-gate, run CONFIG's model at CONFIG's layout and compare
packed with unpacked log-probabilities and gradients, and FP8 with bfloat16; exit code 3 if a bound is broken:

  dppo-megatron doctor
  dppo-megatron doctor --fp8-gate configs/qwen3_4b.yaml actor.fp8=blockwise
  torchrun --nproc-per-node 8 -m dppo_megatron doctor --fp8-gate CONFIG
"""


def add(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add `dppo-megatron doctor`."""
    summary = "check the installation, and packing and FP8 on your model"
    command = add_command(commands, "doctor", _doctor, summary=summary, description=_DOCTOR)
    command.add_argument("--fp8-gate", metavar="CONFIG", help="YAML file of the job to check")
    add_settings(command)


def _doctor(arguments: argparse.Namespace) -> int:
    quiet_libraries()
    if not arguments.fp8_gate:
        from dppo_megatron.doctor.environment import report

        if arguments.overrides:
            raise UserError(f"{arguments.overrides[0]}: settings belong to a job; give --fp8-gate CONFIG before them")
        with arguments.watch("looking at this machine", 0, ""):
            found = report()
        print("\n".join(f"{what:<20}{finding}" for what, finding in found))
        return 0
    check_launched()
    set_cuda_variables()
    config = read_config(arguments.fp8_gate, arguments.overrides, writes_run=False)
    watch: Watch = arguments.watch
    with watch("loading libraries", 0, ""):
        from dppo_megatron.job import prepare_job
    job = prepare_job(config, launched_world_size(), watch=watch)
    with watch("loading Megatron", 0, ""):
        from dppo_megatron.actor.layout import build_layout, start_process_group, stop_process_group
        from dppo_megatron.doctor.fp8_gate import run_gate
    with watch("waiting for all ranks", 0, ""):
        start_process_group()
    layout = build_layout(config.actor.layout, config.seed)
    with watch("gate: packed against unpacked, forwards and backwards", 0, ""):
        findings = run_gate(config, layout, job.architecture, job.checkpoint.get)
    if launched_rank() == 0:
        for finding in findings:
            verdict = "ok    " if finding.passed else "BROKEN"
            print(f"{verdict} {finding.value:9.2e} (bound {finding.bound:g})  {finding.what}")
    stop_process_group()
    return 0 if all(finding.passed for finding in findings) else 3
