"""Train a model as CONFIG says. Settings can be changed on the command line by their dotted names:

  dppo-megatron train configs/quickstart.yaml seed=1 rollout.prompts_per_step=32

On several processes, with the same arguments:

  torchrun --nproc-per-node 4 -m dppo_megatron train CONFIG \\
      actor.layout.tensor_parallel=2 actor.layout.pipeline_parallel=2

`dppo-megatron config` describes every setting, docs/run_directory.md what a run leaves in its directory.
"""

from __future__ import annotations

import argparse

from dppo_megatron.launcher_env import check_launcher_env, launched_world_size, set_cuda_variables, set_fp8_variables
from dppo_megatron.workbench.commands.parser import add_config, check_actor_settings, read_config
from dppo_megatron.workbench.commands.plan import add_dry_run, dry_run, refuse_sizes
from dppo_megatron.workbench.commands.terminal import loading, say


def add_options(command: argparse.ArgumentParser) -> None:
    add_config(command)
    resume = "checkpoint.resume: resume the run in run_dir if there is one (default), never, or from a checkpoint"
    command.add_argument("--resume", metavar="auto|never|DIR", help=resume)
    add_dry_run(command)


def execute(arguments: argparse.Namespace) -> int:
    overrides = arguments.overrides + ([f"checkpoint.resume={arguments.resume}"] if arguments.resume else [])
    if arguments.dry_run:
        return dry_run(arguments, overrides)
    refuse_sizes(arguments)
    check_launcher_env()
    set_cuda_variables()
    config = read_config(arguments.config, overrides)
    set_fp8_variables(config)
    with loading("libraries"):
        from dppo_megatron.job import prepare_job
        from dppo_megatron.platform.capabilities import check_gpus, this_machine
    check_gpus()  # before settings are judged by what a CPU lacks
    size = launched_world_size()
    check_actor_settings(config, size, this_machine(), runs_here=True)
    job = prepare_job(config, size)
    with loading("Megatron"):
        from dppo_megatron.run import Run, Stopped
        from dppo_megatron.train import train
    try:
        with Run(job) as run:
            train(run)
    except Stopped as stopped:
        say(str(stopped))
    return 0
