"""The command line. It checks everything that can be checked before it imports Megatron."""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from pathlib import Path

from dppo_megatron import __version__
from dppo_megatron.config import load_config
from dppo_megatron.config.methods import parse_methods
from dppo_megatron.distributed import launched_rank, launched_world_size
from dppo_megatron.types import UserError

_METHODS = "grpo,cppo,greso,dppo_paper,dppo,dppo_auto"
_TRAIN = """\
Train a model as CONFIG says. Settings can be changed on the command line by their dotted names:

  dppo-megatron train configs/quickstart.yaml seed=1 rollout.prompts_per_step=32

On several processes, with the same arguments:

  torchrun --nproc-per-node 4 -m dppo_megatron.train CONFIG \\
      actor.layout.tensor_parallel=2 actor.layout.pipeline_parallel=2

Every setting is described in dppo_megatron/config/schema.py. What a run leaves in its directory is described in
docs/run_directory.md.
"""
_COMPARE = """\
Train CONFIG's job under several pruning methods and report what each reached, how fast, and from how many tokens:

  dppo-megatron compare configs/quickstart.yaml --methods grpo,cppo,greso,dppo_paper,dppo,dppo_auto --seeds 3

Same start, data order and evaluation; one run after another on this machine. Writes results.json and report.html.
Settings (key=value) stand before the options. Methods: grpo, dppo, dppo_auto, dppo_paper, cppo, cppo_verl, greso,
greso_ht, infobatch, dynamic_sampling, max_variance.
"""
_SIMULATE = """\
Replay the selection of every method on a recorded run (trace.jsonl in its directory) and predict what a step costs:

  dppo-megatron simulate runs/quickstart/trace.jsonl --methods grpo,dppo,greso --rollout-cost 0.02 --update-cost 0.05

Costs are seconds for 1,000 tokens on your machine (1000 / tokens per second); without them the trace's own seconds
are used. A trace of an unpruned run (pruning.prompt.method=none) knows the outcome of every prompt.
"""
_EVAL = """\
Greedy pass@1 of a Hugging Face checkpoint on the evaluation sets of CONFIG, with the embedded engine:

  dppo-megatron eval configs/quickstart.yaml model.hf_path=runs/quickstart/hf
"""


def main(argv: list[str] | None = None) -> int:
    """Run a subcommand; returns the exit code (0 done, 2 the user's mistake)."""
    arguments = _parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
        return code
    except UserError as error:
        if launched_rank() == 0:
            print(f"error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dppo-megatron",
        description="Dynamic Pruning Policy Optimization (arXiv 2603.04135) on Megatron-core.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, run, summary, description in (
        ("train", _train, "train a model", _TRAIN),
        ("eval", _eval, "score a checkpoint", _EVAL),
        ("compare", _compare, "train under several pruning methods and compare", _COMPARE),
    ):
        command = commands.add_parser(
            name, help=summary, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        command.add_argument("config", metavar="CONFIG", help="YAML file")
        command.add_argument("overrides", metavar="key=value", nargs="*", help="settings that replace the file's")
        command.set_defaults(run=run)
    compare = commands.choices["compare"]
    compare.add_argument("--methods", default=_METHODS, metavar="A,B,...", help=f"default: {_METHODS}")
    compare.add_argument("--seeds", type=int, default=1, metavar="N", help="seeds from the config's on (default: 1)")
    compare.add_argument(
        "--steps-factor",
        type=float,
        default=1.0,
        metavar="F",
        help="the other methods run F times GRPO's steps, because pruned steps are cheaper (default: 1)",
    )
    compare.add_argument("--out", type=Path, default=Path("compare"), help="where to write (default: compare/)")
    _add_simulate(commands)
    return parser


def _add_simulate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    simulate = commands.add_parser(
        "simulate",
        help="predict the cost of pruning methods from a recorded run",
        description=_SIMULATE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    simulate.add_argument("trace", metavar="TRACE", help="trace.jsonl of a run")
    simulate.add_argument("--methods", default=_METHODS, metavar="A,B,...", help=f"default: {_METHODS}")
    simulate.add_argument("--rollout-cost", type=float, metavar="S", help="seconds to generate 1,000 tokens")
    simulate.add_argument("--update-cost", type=float, metavar="S", help="seconds to train on 1,000 tokens")
    simulate.add_argument("--json", metavar="FILE", help="also write the figures here")
    simulate.set_defaults(run=_simulate)


def _train(arguments: argparse.Namespace) -> int:
    _quiet_libraries()
    config = load_config(arguments.config, arguments.overrides)
    from dppo_megatron.job import prepare_job

    job = prepare_job(config, launched_world_size())
    from dppo_megatron.run import Run
    from dppo_megatron.train import train

    with Run(job) as run:
        train(run)
    return 0


def _eval(arguments: argparse.Namespace) -> int:
    _quiet_libraries()
    config = load_config(arguments.config, arguments.overrides, writes_run=False)
    from dppo_megatron.job import prepare_job

    job = prepare_job(config, world_size=1)
    if not job.eval_prompts:
        raise UserError("data.eval_paths is empty: there is nothing to evaluate on")
    from dppo_megatron.evaluate import evaluate
    from dppo_megatron.rollout.hf import engine_from_files

    for name, score in evaluate(engine_from_files(job.config, job.tokenizer, job.checkpoint), job).items():
        print(f"{name} {score:.4f}")
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    from dppo_megatron.compare import compare, report, table, write_results

    methods = parse_methods(arguments.methods)
    if arguments.seeds < 1:
        raise UserError(f"--seeds {arguments.seeds}: must be at least 1")
    if not arguments.steps_factor > 0:
        raise UserError(f"--steps-factor {arguments.steps_factor}: must be greater than 0")
    config = load_config(arguments.config, arguments.overrides, writes_run=False)
    arguments.out.mkdir(parents=True, exist_ok=True)
    comparison = compare(
        config,
        arguments.config,
        arguments.overrides,
        methods,
        seeds=arguments.seeds,
        steps_factor=arguments.steps_factor,
        out=arguments.out,
    )
    write_results(comparison, arguments.out / "results.json")
    report(comparison, arguments.out / "report.html", title=f"{arguments.config}: pruning methods compared")
    print(table(comparison))
    return 0


def _simulate(arguments: argparse.Namespace) -> int:
    from dppo_megatron.simulate import as_json, fit_costs, simulate, table
    from dppo_megatron.trace import read_trace

    methods = parse_methods(arguments.methods)
    for name in ("rollout_cost", "update_cost"):
        value = getattr(arguments, name)
        if value is not None and not value >= 0:
            raise UserError(f"--{name.replace('_', '-')} {value}: must not be negative")
    trace = read_trace(arguments.trace)
    costs = fit_costs(trace, arguments.rollout_cost, arguments.update_cost)
    predictions = [simulate(trace, method, costs) for method in methods]
    print(table(predictions, costs))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(as_json(predictions, costs), indent=2) + "\n", encoding="utf-8")
    return 0


def _quiet_libraries() -> None:
    """Before transformers and torch are imported: their notices about absent extras are not ours to show."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
