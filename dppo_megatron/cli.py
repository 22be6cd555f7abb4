"""The command line.

Help and mistakes must not wait for torch and Megatron, so each command imports what it needs only when it runs.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import sys
import warnings
from contextlib import AbstractContextManager
from pathlib import Path

from dppo_megatron import __version__
from dppo_megatron.compare.command import add_compare
from dppo_megatron.completion import add_completion, complete
from dppo_megatron.config import load_config
from dppo_megatron.config.command import add_config
from dppo_megatron.config.command_line import check_comes_first
from dppo_megatron.config.paths import check_directory, check_writable
from dppo_megatron.config.ranges import Range
from dppo_megatron.config.schema import Config
from dppo_megatron.data.command import add_data_command
from dppo_megatron.evaluation.options import add_eval
from dppo_megatron.launched import launched_rank, launched_world_size
from dppo_megatron.mistakes import explained
from dppo_megatron.planning.command import add_dry_run, add_plan, dry_run
from dppo_megatron.pruning.methods import parse_methods
from dppo_megatron.quickstart import add_quickstart
from dppo_megatron.report.command import add_report
from dppo_megatron.rollout.serve_command import add_serve
from dppo_megatron.types import Advance, GuardStop, UserError, Watch, unwatched
from dppo_megatron.watch.command import add_watch

_METHODS = "grpo,cppo,greso,dppo_paper,dppo,dppo_auto"
_TRAIN = """\
Train a model as CONFIG says. Settings can be changed on the command line by their dotted names:

  dppo-megatron train configs/quickstart.yaml seed=1 rollout.prompts_per_step=32

On several processes, with the same arguments:

  torchrun --nproc-per-node 4 -m dppo_megatron train CONFIG \\
      actor.layout.tensor_parallel=2 actor.layout.pipeline_parallel=2

`dppo-megatron config` describes every setting, docs/run_directory.md what a run leaves in its directory.
"""
_SIMULATE = """\
Replay the selection of every method on a recorded run (trace.jsonl in its directory) and predict what a step costs:

  dppo-megatron simulate runs/quickstart/trace.jsonl --methods grpo,dppo,greso --rollout-cost 0.02 --update-cost 0.05

Costs are seconds for 1,000 tokens on your machine (1000 / tokens per second); without them the trace's own seconds
are used. A trace of an unpruned run (pruning.prompt.method=none) knows the outcome of every prompt.
"""
_DOCTOR = """\
Say what is installed and what this machine can do. With --fp8-gate, run CONFIG's model at CONFIG's layout and compare
packed with unpacked log-probabilities and gradients, and FP8 with bfloat16; exit code 3 if a bound is broken:

  dppo-megatron doctor
  dppo-megatron doctor --fp8-gate configs/qwen3_4b.yaml actor.fp8=blockwise
  torchrun --nproc-per-node 8 -m dppo_megatron doctor --fp8-gate CONFIG
"""


_CONVERT = """\
Convert between Hugging Face and Megatron distributed checkpoints, one tensor at a time (docs/checkpoints.md):

  dppo-megatron convert to-megatron --hf Qwen3-8B --out qwen3-8b
  dppo-megatron convert to-hf --checkpoint runs/x/checkpoints/step_000020 --out hf --dtype bf16

A distributed checkpoint loads at any tensor, pipeline and expert parallel size.
"""


def show_progress(what: str, total: int, unit: str) -> AbstractContextManager[Advance]:
    """Progress on rank 0's terminal or log; see `types.Watch`."""
    if launched_rank() != 0:
        return unwatched(what, total, unit)
    from dppo_megatron.observe.progress import Progress

    return Progress(what, total, unit)


def main(argv: list[str] | None = None, watch: Watch = show_progress) -> int:
    """Run a subcommand; returns the exit code (docs/run_directory.md lists them).

    Args:
        watch: shows the progress of what takes long.
    """
    parser = _parser()
    if "_ARGCOMPLETE" in os.environ:  # a shell asks what could stand here
        complete(parser)
    argv = sys.argv[1:] if argv is None else argv
    arguments = _parse(parser, argv)
    arguments.watch, arguments.command = watch, argv[0]
    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()  # so that a broken pipe is raised here and not at exit
        return code
    except UserError as error:
        _say(f"error: {explained(error, arguments.command)}")
        return 2
    except GuardStop as stop:
        _say(f"stopped: {stop}")
        return 3
    except KeyboardInterrupt:
        _say("interrupted")
        return 130
    except BrokenPipeError:
        if not _output_has_gone():
            raise
        return 141


def _say(line: str) -> None:
    if launched_rank() == 0:
        print(line, file=sys.stderr)


def _output_has_gone() -> bool:
    """Whether our own stdout was closed by its reader (`| head`), and not some other pipe.

    If so, redirect stdout to /dev/null: the interpreter would complain when it flushes at exit.
    """
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)  # errors are always reported
    if not output.poll(0):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def _parse(parser: argparse.ArgumentParser, argv: list[str]) -> argparse.Namespace:
    """As `parse_args`, but settings may stand before and after options.

    argparse's `parse_intermixed_args` does that only for parsers without subcommands, so subcommands are resolved here.
    """
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction) and argv and argv[0] in action.choices:
            arguments = _parse(action.choices[argv[0]], argv[1:])
            if action.dest != argparse.SUPPRESS:
                setattr(arguments, action.dest, argv[0])
            return arguments
        if isinstance(action, argparse._SubParsersAction):
            return parser.parse_args(argv)  # prints help, the version or the error
    return parser.parse_intermixed_args(argv)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dppo-megatron",
        allow_abbrev=False,
        description="Dynamic Pruning Policy Optimization (arXiv 2603.04135) on Megatron-core.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser(
        "train",
        help="train a model",
        description=_TRAIN,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.add_argument("config", metavar="CONFIG", help="YAML file")
    command.add_argument("overrides", metavar="key=value", nargs="*", help="settings that replace the file's")
    command.set_defaults(run=_train)
    command.add_argument(
        "--resume",
        metavar="auto|never|DIR",
        help="checkpoint.resume: resume the run in run_dir if there is one (default), never, or from a checkpoint",
    )
    add_dry_run(commands.choices["train"])
    add_compare(commands)
    add_quickstart(commands)
    add_plan(commands)
    add_eval(commands)
    add_report(commands)
    add_serve(commands)
    add_watch(commands)
    _add_simulate(commands)
    doctor = commands.add_parser(
        "doctor",
        help="check the installation, and packing and FP8 on your model",
        description=_DOCTOR,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    doctor.add_argument("--fp8-gate", metavar="CONFIG", help="YAML file of the job to check")
    doctor.add_argument("overrides", metavar="key=value", nargs="*", help="settings that replace the file's")
    doctor.set_defaults(run=_doctor)
    _add_convert(commands)
    add_data_command(commands)
    add_config(commands)
    add_completion(commands)
    return parser


def _add_simulate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    simulate = commands.add_parser(
        "simulate",
        help="predict the cost of pruning methods from a recorded run",
        description=_SIMULATE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    simulate.add_argument("trace", metavar="TRACE", help="trace.jsonl of a run")
    simulate.add_argument("--methods", default=_METHODS, metavar="A,B,...", help=f"default: {_METHODS}")
    simulate.add_argument("--rollout-cost", type=float, metavar="S", help="seconds to generate 1,000 tokens")
    simulate.add_argument("--update-cost", type=float, metavar="S", help="seconds to train on 1,000 tokens")
    simulate.add_argument("--json", metavar="FILE", help="also write the figures here")
    simulate.set_defaults(run=_simulate)


def _add_convert(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    convert = commands.add_parser(
        "convert",
        help="Hugging Face checkpoint to Megatron's format and back",
        description=_CONVERT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    directions = convert.add_subparsers(required=True, metavar="to-megatron|to-hf", dest="direction")
    to_megatron = directions.add_parser("to-megatron", help="from a Hugging Face checkpoint", allow_abbrev=False)
    to_megatron.add_argument("--hf", type=Path, required=True, metavar="DIR", help="Hugging Face checkpoint")
    for name, what in (("tp", "tensor"), ("pp", "pipeline"), ("ep", "expert")):
        to_megatron.add_argument(f"--{name}", type=int, default=1, metavar="N", help=f"check {what}-parallel size N")
    to_hf = directions.add_parser(
        "to-hf", help="from a distributed checkpoint, converted or of a training run", allow_abbrev=False
    )
    to_hf.add_argument("--checkpoint", type=Path, required=True, metavar="DIR", help="distributed checkpoint")
    to_hf.add_argument("--hf", type=Path, metavar="DIR", help="config.json and tokenizer, if the checkpoint has none")
    to_hf.add_argument("--dtype", default="", metavar="T", help="fp32, bf16 or fp16 (default: as stored)")
    to_hf.add_argument("--shard-gb", type=float, default=5.0, metavar="GB", help="size of a file (default: 5)")
    for direction in (to_megatron, to_hf):
        direction.add_argument("--out", type=Path, required=True, metavar="DIR", help="where to write; must not exist")
        direction.add_argument("--verify", action="store_true", help="read back, compare every tensor byte for byte")
        direction.set_defaults(run=_convert)


def _convert(arguments: argparse.Namespace) -> int:
    if os.path.lexists(arguments.out):
        raise UserError(f"--out '{arguments.out}' exists already; remove it or choose another")
    check_writable("--out", arguments.out, directory=True)
    if arguments.direction == "to-hf":
        check_directory("--checkpoint", str(arguments.checkpoint))
        _check_option("--shard-gb", arguments.shard_gb, "(0, 1e6]")
    if arguments.hf is not None:
        check_directory("--hf", str(arguments.hf))
    try:
        said = _converted(arguments)
    except UserError as error:  # messages name the setting; here it is an option
        raise UserError(str(error).replace("model.hf_path = ", "--hf ")) from None
    for line in said:
        print(line)
    return 0


def _converted(arguments: argparse.Namespace) -> list[str]:
    with arguments.watch("loading libraries", 0, ""):
        from dppo_megatron.convert import hf_to_megatron, megatron_to_hf

    if arguments.direction == "to-megatron":
        sizes = arguments.tp, arguments.pp, arguments.ep
        return hf_to_megatron(arguments.hf, arguments.out, *sizes, verify=arguments.verify, watch=arguments.watch)
    return megatron_to_hf(
        arguments.checkpoint,
        arguments.out,
        hf=arguments.hf,
        dtype=arguments.dtype,
        shard_gb=arguments.shard_gb,
        verify=arguments.verify,
        watch=arguments.watch,
    )


def _train(arguments: argparse.Namespace) -> int:
    _quiet_libraries()
    resume = [f"checkpoint.resume={arguments.resume}"] if arguments.resume else []
    if arguments.dry_run:
        return dry_run(arguments.config, [*arguments.overrides, *resume], arguments.gpus, arguments.watch)
    if arguments.gpus is not None:
        raise UserError("--gpus belongs to --dry-run; a run has as many GPUs as torchrun starts processes")
    config = _load(arguments.config, [*arguments.overrides, *resume])
    with arguments.watch("loading libraries", 0, ""):
        from dppo_megatron.job import prepare_job
    job = prepare_job(config, launched_world_size(), watch=arguments.watch)
    with arguments.watch("loading Megatron", 0, ""):
        from dppo_megatron.run import Run, Stopped
        from dppo_megatron.train import train

    try:
        with Run(job) as run:
            train(run)
    except Stopped as stopped:
        _say(str(stopped))
    return 0


def _simulate(arguments: argparse.Namespace) -> int:
    with arguments.watch("loading libraries", 0, ""):
        from dppo_megatron.simulate import as_json, fit_costs, simulate, table
        from dppo_megatron.trace import read_trace
    methods = parse_methods(arguments.methods)
    for name in ("rollout_cost", "update_cost"):
        _check_option(f"--{name.replace('_', '-')}", getattr(arguments, name), "[0, 1e9]")
    if arguments.json is not None:
        check_writable("--json", arguments.json, directory=False)
    trace = read_trace(arguments.trace, arguments.watch)
    costs = fit_costs(trace, arguments.rollout_cost, arguments.update_cost)
    predictions = [simulate(trace, method, costs, arguments.watch) for method in methods]
    print(table(predictions, costs))
    if arguments.json is not None:
        Path(arguments.json).parent.mkdir(parents=True, exist_ok=True)
        Path(arguments.json).write_text(json.dumps(as_json(predictions, costs), indent=2) + "\n", encoding="utf-8")
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    _quiet_libraries()
    if not arguments.fp8_gate:
        from dppo_megatron.doctor.environment import report

        if arguments.overrides:
            raise UserError(f"{arguments.overrides[0]}: settings belong to a job; give --fp8-gate CONFIG before them")
        with arguments.watch("looking at this machine", 0, ""):
            found = report()
        print("\n".join(f"{what:<20}{finding}" for what, finding in found))
        return 0
    config = _load(arguments.fp8_gate, arguments.overrides, writes_run=False)
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


def _load(path: str, overrides: list[str], *, writes_run: bool = True) -> Config:
    check_comes_first(path)
    return load_config(path, overrides, writes_run=writes_run)


def _check_option(name: str, value: float | None, interval: str) -> None:
    allowed = Range.parse(interval)
    if value is not None and value not in allowed:
        raise UserError(f"{name} {value}: {allowed.wanted(value)}")


def _quiet_libraries() -> None:
    """Silence notices of transformers and torch about missing extras; call before they are imported."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(torch\.distributed|megatron\.core)")


if __name__ == "__main__":
    sys.exit(main())
