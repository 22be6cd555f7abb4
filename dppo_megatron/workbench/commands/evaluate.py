"""Score a model on problem sets: avg@k, pass@k and maj@k with standard errors. MODEL is a Hugging Face directory, a run
directory (its hf/, or --step N), or one checkpoint of a run. No training data and no config is needed:

  dppo-megatron eval Qwen3-4B --sets six --data data/
  dppo-megatron eval Qwen3-4B --sets aime24,aime25 mine=problems.jsonl --data data/ eval.samples=8
  dppo-megatron eval runs/x --step 200 --sets six --data data/ rollout.engine=vllm rollout.servers.launch=local

A config file in place of MODEL evaluates its model on its sets:

  dppo-megatron eval configs/quickstart.yaml model.hf_path=runs/quickstart/hf

Evaluate each checkpoint of a run as it is saved, until the run ends:

  dppo-megatron eval --follow runs/x

Writes results.json and samples.jsonl. Grade those samples again, or compare two evaluations problem by problem:

  dppo-megatron eval --rescore eval/Qwen3-4B reward.function=my_module:grade
  dppo-megatron eval --compare eval/before eval/after

A killed evaluation continues when it is called again; --rescore shows the scores so far. In another harness's format:

  dppo-megatron eval --export lm-eval eval/Qwen3-4B --out exported/
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from dppo_megatron.config.schema import Config
from dppo_megatron.progress import progress
from dppo_megatron.texts import show
from dppo_megatron.types import UserError
from dppo_megatron.workbench.commands.parser import add_settings, config_file
from dppo_megatron.workbench.commands.terminal import loading

_TO_BEGIN_S = 120.0
"""How long `--follow` waits for a run that is started beside it, whose libraries and model load first."""
_OTHER_USES = {  # options that take MODEL's place: what each reads, and the arguments that it excludes
    "compare": ("reads two evaluations and nothing else", "models settings sets step data limit"),
    "export": ("reads one evaluation and nothing else", "models settings sets step data limit"),
    "rescore": ("reads the samples of an evaluation and nothing else", "models sets step data limit"),
    "follow": ("evaluates every checkpoint of its run", "models step"),
}


def add_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", metavar="MODEL", nargs="?", help="model, run, checkpoint, or YAML file")
    add_settings(command, "settings, such as rollout.engine=vllm")
    sets = "presets (six) or sets of them (aime24,amc23), name=path, or a YAML file with sets; default: the run's"
    command.add_argument("--sets", metavar="SET", nargs="+", action="extend", default=[], help=sets)
    command.add_argument("--step", type=int, metavar="N", help="the run's checkpoint of this step, not its last model")
    command.add_argument("--data", type=Path, metavar="DIR", help="where the files of presets are")
    command.add_argument("--limit", type=int, default=0, metavar="N", help="the first N problems of each set; 0: all")
    command.add_argument("--out", type=Path, metavar="DIR", help="where to write (default: RUN/eval/, eval/NAME)")
    command.add_argument("--follow", type=Path, metavar="RUN", help="evaluate a run's checkpoints as they are saved")
    command.add_argument("--compare", nargs=2, type=Path, metavar=("A", "B"), help="paired bootstrap of B minus A")
    form = "write an evaluation as lm-eval or lighteval would, to --out"
    command.add_argument("--export", nargs=2, metavar=("FORM", "EVAL"), help=form)
    command.add_argument("--rescore", type=Path, metavar="SAMPLES", help="grade an evaluation's samples again")


def split_settings(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """`--sets` takes words up to the next option, settings among them; returns (sets, settings).

    `rollout.engine=vllm` and `seed=1` are settings; `mine=problems.jsonl` is a set.
    """
    sections = {item.name for item in fields(Config)}
    plain = {"run_dir", "seed", "steps", "threads_per_rank"}
    settings = []
    for word in words:
        key, separator, _ = word.partition("=")
        if separator and (key in plain or ("." in key and key.split(".")[0] in sections)):
            settings.append(word)
    return [word for word in words if word not in settings], settings


def execute(arguments: argparse.Namespace) -> int:
    """Evaluate, compare or rescore; prints the results and returns the exit code."""
    sets, among_sets = split_settings(arguments.sets)
    # argparse takes the first word for MODEL, but it may be a setting
    models, settings = split_settings([*([arguments.model] if arguments.model else []), *arguments.overrides])
    models = [config_file(model) if model.endswith((".yaml", ".yml")) else model for model in models]
    elsewhere = dict(item.split("=", 1) for item in settings)
    for item in among_sets:
        key, _, value = item.partition("=")
        if elsewhere.get(key, value) != value:  # argparse does not tell which of them is the later one
            other = f"{key}={elsewhere[key]}"
            raise UserError(f"{item} is among the sets and {other} is not: give one of them, or both before --sets")
    settings += among_sets
    use = _other_use(arguments, {"models": models, "settings": settings, "sets": sets})
    if use == "compare":
        from dppo_megatron.evaluation.bootstrap import compare_evaluations

        with progress("comparing the evaluations"):
            lines = compare_evaluations(*arguments.compare, out=arguments.out)
    elif use == "export":
        from dppo_megatron.evaluation.export import export

        form, evaluation = arguments.export
        lines = export(form, evaluation, arguments.out)
    elif use == "rescore":
        with loading("libraries"):
            from dppo_megatron.evaluation.standalone import rescore
        lines = rescore(arguments.rescore, settings, arguments.out)
    elif use == "follow":
        lines = _follow(arguments, settings, sets)
    else:
        if len(models) != 1:
            hint = f", not {len(models)}: {', '.join(models)}" if models else " (or --compare, --rescore)"
            raise UserError(f"give a model, a run directory or a config file to evaluate{hint}")
        with loading("libraries"):
            from dppo_megatron.evaluation.arguments import EvalArguments
            from dppo_megatron.evaluation.standalone import evaluate_model
        options = {name: getattr(arguments, name) for name in ("step", "data", "out", "limit")}
        lines = evaluate_model(EvalArguments(models[0], settings, sets, **options))
    show(*lines)
    return 0


def _other_use(arguments: argparse.Namespace, words: dict[str, list[str]]) -> str:
    """The option that takes MODEL's place; empty for none. Raises UserError for arguments that it excludes."""
    uses = [name for name in _OTHER_USES if getattr(arguments, name)]
    if len(uses) > 1:
        raise UserError("--compare, --rescore, --export and --follow: give one of them")
    for use in uses:
        reads, excluded_kinds = _OTHER_USES[use]
        options = {"step": arguments.step is not None, "data": arguments.data is not None, "limit": arguments.limit}
        given = words | {name: [f"--{name}"] * bool(is_given) for name, is_given in options.items()}
        if excluded := [word for kind in excluded_kinds.split() for word in given[kind]]:
            raise UserError(f"--{use} {reads}; leave out {excluded[0]}")
    return "".join(uses)


def _follow(arguments: argparse.Namespace, settings: Sequence[str], sets: Sequence[str]) -> list[str]:
    from dppo_megatron.observe.run_directory import read_identity
    from dppo_megatron.workbench.runs.run_record import run_status

    run: Path = arguments.follow
    heartbeat = [0.0, 0.0]  # older than any: a lock must be seen to stay the same before its trainer counts as dead
    deadline = time.monotonic() + _TO_BEGIN_S
    with progress(f"waiting for {run} to begin"):
        while not (run / "config.yaml").is_file():
            is_empty = run.parent.is_dir() and not (run.exists() and any(run.iterdir()))
            if run_status(run, heartbeat) != "running" and (time.monotonic() > deadline or not is_empty):
                wanted = f"a run that has begun, or begins within {_TO_BEGIN_S:.0f} s"
                raise UserError(f"--follow '{run}': holds no config.yaml; name the run_dir of {wanted}")
            time.sleep(0.5)
    with loading("libraries"):
        from dppo_megatron.evaluation.arguments import EvalArguments
        from dppo_megatron.evaluation.follow import follow
    options = {name: getattr(arguments, name) for name in ("data", "out", "limit")}
    evaluation = EvalArguments(str(run), settings, sets, follow=True, **options)
    return follow(evaluation, read_identity(run), lambda: run_status(run, heartbeat))
