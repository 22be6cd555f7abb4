"""Replay the selection of every method on a recorded run (trace.jsonl in its directory) and predict what a step costs:

  dppo-megatron simulate runs/quickstart/trace.jsonl --methods grpo,dppo,greso --rollout-cost 0.02 --update-cost 0.05

Costs are seconds for 1,000 tokens on your machine (1000 / tokens per second); without them the trace's own seconds
are used. A trace of an unpruned run (pruning.prompt.method=none) has the outcome of every prompt. `like for like` is
where 95 % of single pairs of runs measure the speed-up to equal accuracy, from the noise of the evaluations beside the
trace ("-": fewer than three after a third of the gain). `its mean` is that of many pairs: the low end if gradient noise
limits the runs, the high end if not.

  dppo-megatron simulate runs/quickstart_grpo/trace.jsonl --roulette

predicts the gain of stopping completions early at random, with weights that keep the expected gradient.
"""

from __future__ import annotations

import argparse
from contextlib import suppress
from pathlib import Path

from dppo_megatron.config.paths import check_writable
from dppo_megatron.pruning.policies import parse_methods
from dppo_megatron.texts import show
from dppo_megatron.types import UserError
from dppo_megatron.workbench.commands.parser import check_number, check_numbers, write_json
from dppo_megatron.workbench.commands.terminal import loading

_METHODS = "grpo,cppo,greso,dppo_paper,dppo,dppo_auto"


def add_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("trace", metavar="TRACE", help="trace.jsonl of a run")
    command.add_argument("--methods", metavar="A,B,...", help=f"default: {_METHODS}, if allowed")
    command.add_argument("--rollout-cost", type=float, metavar="S", help="seconds to generate 1,000 tokens")
    command.add_argument("--update-cost", type=float, metavar="S", help="seconds to train on 1,000 tokens")
    stops = "instead: what stopping completions early would gain, also with probes of d' D (default: 1 and 2)"
    command.add_argument("--roulette", type=float, nargs="*", metavar="D", help=stops)
    knee = "sequences at which an iteration of --roulette takes twice as long (default: 48)"
    command.add_argument("--knee", type=float, default=48.0, metavar="N", help=knee)
    command.add_argument("--json", metavar="FILE", help="also write the figures here")


def execute(arguments: argparse.Namespace) -> int:
    with loading("libraries"):
        from dppo_megatron.workbench import roulette
        from dppo_megatron.workbench.compare.arms import read_method_run
        from dppo_megatron.workbench.compare.verdict import pair_noise
        from dppo_megatron.workbench.runs.trace import read_trace
        from dppo_megatron.workbench.simulate import as_json, capacity_of, fit_costs, left_out, refused, simulate, table
    methods = parse_methods(_METHODS if arguments.methods is None else arguments.methods)
    check_numbers(arguments, rollout_cost="[0, 1e9]", update_cost="[0, 1e9]", knee="(0, 1e6]")
    for probe in arguments.roulette or ():
        check_number("--roulette", probe, "(0, 20]")
    if arguments.json is not None:
        check_writable("--json", arguments.json, directory=False)
    trace = read_trace(arguments.trace)
    costs = fit_costs(trace, arguments.rollout_cost, arguments.update_cost)
    refusals: dict[str, str] = {}
    if arguments.roulette is not None:
        gains = roulette.judge_roulette(trace, costs, arguments.roulette or (1.0, 2.0), arguments.knee)
        text = roulette.roulette_table(gains, costs, arguments.knee)
        values = roulette.roulette_json(gains, costs, arguments.knee)
    else:
        if arguments.methods is None:
            refusals = refused(trace, methods)
        methods = [one for one in methods if one not in refusals] or methods  # of none left, the first says why
        predictions, noise = [simulate(trace, method, costs, capacity_of(trace)) for method in methods], None
        with suppress(UserError):  # a trace without its run, or a run that is not finished or was not evaluated
            noise = pair_noise(read_method_run(methods[0], trace.config.seed, Path(arguments.trace).parent))
        text, values = table(predictions, costs, noise), as_json(predictions, costs, noise) | {"refused": refusals}
    show(*text.splitlines(), *left_out(refusals))
    if arguments.json is not None:
        write_json(arguments.json, values)
    return 0
