"""`dppo-megatron plan CONFIG`, and `--dry-run` of plan and train; both write nothing but the file of --json."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dppo_megatron.config.checks import Purpose, check_world_size
from dppo_megatron.config.load import load_config, read_config
from dppo_megatron.config.notes import server_notes
from dppo_megatron.config.paths import check_writable, shipped, shown, with_paths
from dppo_megatron.config.schema import Config
from dppo_megatron.launcher_env import launched_here, launched_world_size
from dppo_megatron.pruning.policies import parse_methods
from dppo_megatron.texts import show
from dppo_megatron.types import UserError
from dppo_megatron.workbench.commands.parser import add_config, check_actor_settings, check_number, write_json
from dppo_megatron.workbench.commands.terminal import loading
from dppo_megatron.workbench.planning.site import CHIPS, GIB, Site

if TYPE_CHECKING:
    from dppo_megatron.platform.capabilities import Machine
    from dppo_megatron.weights.architecture import Architecture

DESCRIPTION = """\
Predict what a job needs before anything is started: memory of a GPU and of its host in every phase, seconds of a step,
and what each pruning method would save. Exit code 2 if it cannot fit. Reads only CONFIG and the model's config.json,
which is shipped for well-known models:

  dppo-megatron plan h100/qwen3_8b_8gpus_dppo
  dppo-megatron plan h100/qwen3_8b_8gpus_dppo --model qwen3-14b
  dppo-megatron plan configs/h100/qwen3_32b_32gpus_grpo.yaml model.hf_path=... --gpus 64 --decode 1200
  dppo-megatron plan CONFIG --trace runs/first/trace.jsonl      # outcomes and lengths of a recorded run

Formulas, sources and checks: docs/plan.md.
"""
_GPUS, _GPU = 8, "h100"
_NUMBERS: dict[str, tuple[str, str, int | None]] = {
    "gpus": ("[1, 1000000]", f"GPUs of the trainer (default: torchrun's, else CONFIG's _Ngpus, else {_GPUS})", None),
    "gpus_per_node": ("[1, 1024]", "GPUs of a node (default: 8)", 8),
    "ranks_per_node": ("[1, 1024]", "GPUs of a node that the trainer uses (default: torchrun's, else all)", None),
    "gpu_memory": ("(0, 100000]", "GiB of a GPU that programs see (default: 79.1, an H100 of 80 GB)", None),
    "host_memory": ("(0, 1000000]", "GiB of a node's memory (default: 1900)", 1900),
    "engine_gpus": ("[1, 1000000]", "GPUs behind rollout.servers.endpoints", None),
    "decode": ("(0, 1e9]", "tokens per second that one GPU generates", None),
    "mfu": ("(0, 1]", "useful FLOPs of an update over the chip's peak", None),
    "sync_gb_per_s": ("(0, 1e6]", "speed of a weight sync", None),
    "save_gb_per_s": ("(0, 1e6]", "speed of writing a checkpoint", None),
    "other_s": ("[0, 1e6]", "seconds of a step for grading, selection and packing", None),
    "completion_tokens": ("(0, 1e8]", "mean length of a completion (default: half of the longest)", None),
    "prompt_tokens": ("(0, 1e8]", "mean length of a prompt (default: 150)", None),
}
"""Range, help, default."""
_SPEEDS = ("decode", "mfu", "sync_gb_per_s", "save_gb_per_s", "other_s")
_TRAINER_SIZES = ("gpus", "gpus_per_node", "ranks_per_node")
"""Options that `train --dry-run` has too."""
_COUNTS = (*_TRAINER_SIZES, "engine_gpus")


def add_options(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument("--model", metavar="NAME", help="the published sizes of a model in place of model.hf_path")
    for name, (_, what, default) in _NUMBERS.items():
        kind = int if name in _COUNTS else float
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="N", help=what, default=default)
    chip = f"kind of GPU (default: {_GPU}; for a dry run this machine's, if it has one)"
    parser.add_argument("--gpu", choices=sorted(CHIPS), help=chip)
    methods = "pruning methods (default: all that the job's settings allow)"
    parser.add_argument("--methods", metavar="A,B,...", help=methods)
    parser.add_argument("--trace", metavar="FILE", help="trace.jsonl of a run, replayed under CONFIG's pruning")
    parser.add_argument("--json", metavar="FILE", help="also write every figure here")
    parser.add_argument("--dry-run", action="store_true", help="load and check all that a run loads before it starts")


def add_dry_run(train: argparse.ArgumentParser) -> None:
    what = "load and check everything, print the plan and the first prompt, and end; starts and writes nothing"
    train.add_argument("--dry-run", action="store_true", help=what)
    for name in _TRAINER_SIZES:
        what = "with --dry-run: " + _NUMBERS[name][1]
        train.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help=what)


def dry_run(train: argparse.Namespace, overrides: list[str]) -> int:
    parser = argparse.ArgumentParser()
    add_options(parser)
    arguments = parser.parse_args([train.config, "--dry-run"])
    arguments.overrides = overrides
    vars(arguments).update(_sizes_given(train))
    return execute(arguments)


def refuse_sizes(train: argparse.Namespace) -> None:
    """Raise UserError if `train` without --dry-run is given an option that only a dry run has."""
    for name in _sizes_given(train):
        option = name.replace("_", "-")
        raise UserError(f"--{option} belongs to --dry-run; a run has as many GPUs as torchrun starts processes")


def _sizes_given(train: argparse.Namespace) -> dict[str, int]:
    return {name: value for name in _TRAINER_SIZES if (value := getattr(train, name)) is not None}


def execute(arguments: argparse.Namespace) -> int:
    for name, (interval, _, _) in _NUMBERS.items():
        check_number(f"--{name.replace('_', '-')}", getattr(arguments, name), interval)
    methods = None if arguments.methods is None else parse_methods(arguments.methods)
    if arguments.json is not None:
        check_writable("--json", arguments.json, directory=False)
    purpose: Purpose = "train" if arguments.dry_run else "plan"
    published, settings = _published(arguments)
    config = load_config(arguments.config, settings, purpose=purpose, writes_run=arguments.dry_run)
    is_named = arguments.gpu is not None
    gpu_note = _use_local_gpu(arguments) if arguments.dry_run else []
    arguments.gpu = arguments.gpu or _GPU
    site = _site(arguments)
    check_world_size(config, site.gpus, plans=True)
    machine, loaded = _load_job(config, site, arguments.gpu, is_named) if arguments.dry_run else (None, [])
    with loading("libraries"):
        from dppo_megatron.job import check_settings
        from dppo_megatron.weights.provider import model_architecture
        from dppo_megatron.workbench.planning.plan import lines, make_plan
        from dppo_megatron.workbench.planning.timing import speeds_for
        from dppo_megatron.workbench.runs.trace import read_trace
    architecture = model_architecture(config.model).with_adapters(config.actor.lora)
    notes = list[str]()
    if machine is None:
        machine, notes = _assumed_machine(config, arguments.gpu)
    if not arguments.dry_run:
        notes += check_actor_settings(config, site.gpus, machine, runs_here=False)
        notes += check_settings(config, architecture, site.gpus, machine)
    notes += server_notes(config.rollout, site.ranks_per_node)
    config, layers = _with_layers_of(machine, config, architecture)
    plan = make_plan(
        config,
        architecture,
        site,
        machine,
        speeds_for(architecture, **{name: getattr(arguments, name) for name in _SPEEDS}),
        completion_tokens=arguments.completion_tokens,
        prompt_tokens=arguments.prompt_tokens,
        methods=methods,
        trace=read_trace(arguments.trace) if arguments.trace else None,
    )
    is_given = arguments.gpus or launched_world_size() > 1
    assumed = [] if is_given else [f"assumed: {site.gpus} GPUs; --gpus N plans for N"]
    if config.pruning.early_stop.after_tokens:
        assumed.append("assumed: no completion is stopped early; what pruning.early_stop saves is not counted")
    show(*map(with_paths, (*gpu_note, *assumed, *published, *notes, *layers, *lines(plan, arguments.config), *loaded)))
    if arguments.json is not None:
        write_json(arguments.json, plan.as_json())
    if plan.problems:
        helps = "; ".join(f"{one.change} ({one.total / GIB:.1f} GiB of a GPU)" for one in plan.helps[:3])
        raise UserError(f"the job does not fit: {plan.problems[0]}" + (f". What helps: {helps}" if helps else ""))
    return 0


def _with_layers_of(machine: Machine, config: Config, architecture: Architecture) -> tuple[Config, list[str]]:
    """`config` with the layer spec that `machine` would use; a line with the reason if it differs from the config's."""
    actor = config.actor
    has_experts, heads = architecture.experts is not None, architecture.heads
    spec, why = machine.choose_layer_spec(actor.layer_spec, actor.fp8, has_experts=has_experts, heads=heads)
    if spec == actor.layer_spec or spec == "te":
        return config, []
    line = f"planned with actor.layer_spec = local: {why}"
    return replace(config, actor=replace(actor, layer_spec=spec)), [line]


def _published(arguments: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Lines to print, and the settings. If `--model`, or a model.hf_path that is no directory, names a model whose
    config.json is shipped, model.hf_path becomes the shipped directory. Raises UserError if `--model` names another."""
    settings = list(arguments.overrides)
    if arguments.dry_run:
        if arguments.model:
            raise UserError("--model: a dry run loads the model; give its directory as model.hf_path=DIR")
        return [], settings
    name = arguments.model or read_config(arguments.config, settings).model.hf_path
    known = {one.name: one for one in shipped("configs", "models").iterdir()}
    found = known.get(name.lower().rpartition("/")[2])
    if arguments.model and not found:
        raise UserError(f"--model {name}: not known; known: {', '.join(sorted(known))}. Else give model.hf_path=DIR")
    if not found or (not arguments.model and os.path.isdir(name)):
        return [], settings
    return [f"assumed: the published sizes of {name}"], [*settings, f"model.hf_path={found}"]


def _use_local_gpu(arguments: argparse.Namespace) -> list[str]:
    """Plan for this machine's GPU unless --gpu or --gpu-memory is given; returns a line about it."""
    with loading("libraries"):
        import torch
    if arguments.gpu or arguments.gpu_memory or not torch.cuda.is_available():
        return []
    name, size = torch.cuda.get_device_name(), torch.cuda.mem_get_info()[1] / GIB
    arguments.gpu_memory, arguments.gpu = size, next((chip for chip in CHIPS if chip.upper() in name), None)
    speed = "" if arguments.gpu else f", as fast as an {_GPU.upper()}"
    return [f"planned for this machine's GPU: {name}, {size:.1f} GiB{speed}"]


def _site(arguments: argparse.Namespace) -> Site:
    chip, launched = CHIPS[arguments.gpu], launched_world_size()
    named = re.search(r"_(\d{1,6})gpus(?:[_.]|$)", Path(arguments.config).name)  # as in qwen3_8b_16gpus_dppo.yaml
    gpus = arguments.gpus or (launched if launched > 1 else int(named[1]) if named and int(named[1]) else _GPUS)
    ranks, per_node = arguments.ranks_per_node, arguments.gpus_per_node
    if not (arguments.gpus or ranks) and launched > 1 and "LOCAL_WORLD_SIZE" in os.environ:
        ranks = launched_here()
    if gpus > (ranks or per_node) and gpus % (ranks or per_node):
        size = f"--ranks-per-node {ranks}" if ranks else f"--gpus-per-node {per_node}"
        raise UserError(f"--gpus {gpus}: not a whole number of nodes ({size})")
    return Site(
        gpus=gpus,
        gpus_per_node=max(per_node, ranks or 0),
        gpu_memory=arguments.gpu_memory * GIB if arguments.gpu_memory else chip.memory_bytes,
        peak_flops=chip.peak_flops,
        host_memory=arguments.host_memory * GIB,
        engine_gpus=arguments.engine_gpus or 0,
        bandwidth=chip.bandwidth,
        link=chip.link,
        most_ranks=ranks or 0,
    )


def _assumed_machine(config: Config, gpu: str) -> tuple[Machine, list[str]]:
    """A machine of `gpu`s with Transformer Engine, and with flash-attn where its layers need that for the fused
    attention which a plan assumes; a line if attention needs it, or is not fused even so."""
    with loading("libraries"):
        from dppo_megatron.platform.capabilities import Machine
        from dppo_megatron.weights.provider import model_architecture
    machine, actor = Machine(CHIPS[gpu].capability, ""), config.actor
    architecture = model_architecture(config.model)
    has_experts, heads = architecture.experts is not None, architecture.heads
    spec, _ = machine.choose_layer_spec(actor.layer_spec, actor.fp8, has_experts=has_experts, heads=heads)
    unfused, flash = machine.lacks_fused_attention(heads), replace(machine, has_flash_attention=True)
    if spec == "local" or not unfused:
        return machine, []
    if flash.lacks_fused_attention(heads):
        return machine, [f"not counted: all attention scores, which would be stored: {unfused}"]
    return flash, [f"assumed: flash-attn is installed; {unfused}"]


def _load_job(config: Config, site: Site, gpu: str, is_named: bool) -> tuple[Machine | None, list[str]]:
    """Load and check all that a run loads before it starts. Returns this machine, or None if it has no GPU or --gpu
    names one, and lines about what was loaded, the first prompt last."""
    with loading("libraries"):
        from dppo_megatron.job import prepare_job
        from dppo_megatron.platform.capabilities import this_machine
    here, notes = this_machine(), list[str]()
    runs_here = here.cuda_capability is not None and not is_named
    machine = here if runs_here else _assumed_machine(config, gpu)[0]
    if here.cuda_capability is None:
        notes = [f"no CUDA device here: a machine of {gpu.upper()}s with Transformer Engine is assumed"]
    notes += [*_engine_notes(config), *check_actor_settings(config, site.gpus, machine, runs_here=runs_here)]
    uncached = replace(config, data=replace(config.data, cache_path=""))  # a dry run writes no cache of prompts
    job = prepare_job(uncached, site.gpus, machine=machine)
    try:
        first = next(iter(job.train_sets.values())).prompts[0].text
        lines = [*notes, *job.check_first_layers(), *job.notes, *job.check_references(), *job.data_report]
    finally:
        job.grade.close()
    done = "dry run: everything that a run loads before it starts has been loaded and checked"
    return here if runs_here else None, ["", done, *lines, "", first]


def _engine_notes(config: Config) -> list[str]:
    """A warning if servers will be started by this Python, and it lacks their engine. Raises UserError if
    rollout.servers.python lacks it. The engine is looked for and not imported."""
    engine, servers, answer = config.rollout.engine, config.rollout.servers, ""
    if servers.launch != "local":
        return []
    look = f"from importlib.util import find_spec; print(find_spec('{engine}') is None)"
    with suppress(OSError, subprocess.TimeoutExpired):  # no answer says nothing: the start of the servers will
        command = [servers.python or sys.executable, "-B", "-c", look]
        answer = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60).stdout
    if answer.strip() != "True":
        return []
    if servers.python:
        raise UserError(f"rollout.servers.python = '{shown(servers.python)}': this Python has no {engine}")
    return [f"warning: rollout.servers.python is not set, and the trainer's Python has no {engine} to start servers of"]
