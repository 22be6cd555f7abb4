"""Evaluates a model without a trainer or training data: in one process, with any engine, from any checkpoint format."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from hashlib import sha256
from importlib.metadata import version
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import dppo_megatron.rewards
from dppo_megatron import __version__
from dppo_megatron.config.load import load_config
from dppo_megatron.config.paths import with_paths
from dppo_megatron.config.plugins import is_plugin, source_digest
from dppo_megatron.config.resolved_sets import eval_set_configs, set_rewards
from dppo_megatron.config.schema import Config
from dppo_megatron.evaluation.arguments import EvalArguments, prepare
from dppo_megatron.evaluation.eval_samples import (
    FORMAT,
    RESULTS,
    SAMPLES,
    UNFINISHED,
    UnfinishedSamples,
    check_out,
    deciding,
    read_results,
    read_samples,
    read_unfinished,
    scores_of,
    write_samples,
    write_text,
)
from dppo_megatron.evaluation.eval_scores import Estimate, EvalSample, EvalScores, percent
from dppo_megatron.evaluation.evaluator import Evaluator, SetGraders
from dppo_megatron.job import Job, prepare_job
from dppo_megatron.launcher_env import launched_world_size
from dppo_megatron.progress import progress
from dppo_megatron.rewards.grading import Graders
from dppo_megatron.rewards.start_checks import check_grader, unused_grader
from dppo_megatron.rollout.engine import Engine
from dppo_megatron.rollout.hf import engine_from_files
from dppo_megatron.rollout.server_engine import ServerEngine
from dppo_megatron.texts import aligned, show
from dppo_megatron.types import Prompt, UserError

_MEMORY_OPTIONS = {"--gpu-memory-utilization", "--mem-fraction-static"}
_MOST_LEVELS = 20
"""A column with more distinct values is a measurement, not a level."""


def evaluate_model(arguments: EvalArguments) -> list[str]:
    """Evaluate a model, write results.json and samples.jsonl, and return lines to print. Raises UserError for mistakes
    in the model, the sets or the settings, before anything is generated."""
    check_alone()
    config, out, notes = prepare(arguments)
    check_out(out, RESULTS)
    with closing(EngineAndGraders(config, out, notes)) as shared:
        samples = evaluate(shared, shared.job, out)
    return [*table(scores_of(samples)), *level_lines(by_level(samples)), "", f"{out}/: {RESULTS}, {SAMPLES}"]


def check_alone() -> None:
    """Raise `UserError` if a launcher has started several processes."""
    if launched_world_size() != 1:
        raise UserError("eval is one process: run it without torchrun; several GPUs are used through servers")


class EngineAndGraders:
    """What evaluations of several checkpoints of a model share, because servers take minutes to start.

    Prints warnings about the sets and the first prompt of each: a wrong template costs more points than a wrong model.

    Args:
        directory: for servers' logs and for weights on their way to servers.
        notes: lines to print before those.

    Raises:
        UserError: like `prepare_job`, or there is no set.
    """

    def __init__(self, config: Config, directory: Path, notes: Sequence[str]) -> None:
        if not eval_set_configs(config):
            raise UserError("there is no set to evaluate on: give --sets, or data.eval_sets in the config")
        self.job = prepare_job(config, world_size=1, trains=False)
        self.job.config.run_dir = str(directory)
        references = self.job.check_references()
        show(*notes, *self.job.data_report, *map(with_paths, [*self.job.notes, *references]))
        if config.rollout.engine == "hf":  # not for servers, which have their own implementation of the layers
            show(*self.job.check_first_layers())
        self.evaluator = Evaluator(self.job)
        self._engine: Engine | None = None

    def engine(self, job: Job) -> Engine:
        """The engine with the weights of `job.checkpoint`; the first call starts it."""
        if self._engine is None:
            # servers start from the settings' model, as a checkpoint of the run is not a Hugging Face directory
            self._engine = _engine(replace(self.job, checkpoint=job.checkpoint))
            show(self._engine.description)
        else:
            self._engine.load_checkpoint(job.checkpoint)
        return self._engine

    def close(self) -> None:
        self.evaluator.close()
        if self._engine is not None:
            self._engine.close()


def evaluate(shared: EngineAndGraders, job: Job, out: Path, more: Mapping[str, Any] | None = None) -> list[EvalSample]:
    """Sample and grade the sets with the weights of `job.checkpoint`, and write the results to `out`. Resumes an
    evaluation in `out` that was killed.

    Args:
        more: further fields of results.json.
    """
    settings = {"reward": asdict(job.config.reward), "sets": _sets_of(job.config)}
    with closing(UnfinishedSamples(out, about(job, out), _graded_by(job.config), settings)) as unfinished:
        check_out(out, RESULTS)  # again, under the lock: another process may have written results meanwhile
        if unfinished.samples:
            show(f"resuming the evaluation in {out}: {len(unfinished.samples)} samples are done")
        engine = shared.engine(job)
        samples = shared.evaluator.sample_alone(engine, unfinished)
        origin = {"model": str(job.config.model.hf_path), "generated_by": engine.description}
        origin |= _computed_in(job.config) | dict(more or {})
        with progress(f"writing {out}"):
            write_results(out, samples, scores_of(samples), job.config, origin)
            unfinished.finished()
    return samples


def about(job: Job, out: Path) -> dict[str, Any]:
    """Everything that decides the samples of an evaluation and their grades, as JSON."""
    config, model = job.config, Path(job.config.model.hf_path).resolve()
    files = sorted(path for path in model.rglob("*") if path.is_file() and out.resolve() not in path.parents)
    states = [(str(path.relative_to(model)), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return {
        "model": str(config.model.hf_path),
        "model_files": sha256(repr(states).encode()).hexdigest(),
        "seed": config.seed,
        "engine": config.rollout.engine,
        # a server's version is not known before it has started; `generated_by` in results.json has it
        "engine_version": f"{version('torch')} {version('transformers')}" if config.rollout.engine == "hf" else None,
        **_computed_in(config),
        "stop_token_ids": list(job.stop_token_ids),
        "reward": deciding(asdict(config.reward)),
        "sets": {name: one | {"reward": deciding(one["reward"])} for name, one in _sets_of(config).items()},
        "problems": {
            name: sha256(repr([(p.text, p.answer, p.row) for p in one.prompts]).encode()).hexdigest()
            for name, one in job.eval_sets.items()
        },
    }


def _computed_in(config: Config) -> dict[str, Any]:
    """What decides how the engine computes: two formats must not be mixed in one score. The options that only size a
    server's memory may differ on resume, because another machine may have less."""
    given = config.rollout.servers.args
    args = [arg for before, arg in pairwise(["", *given]) if not {arg.partition("=")[0], before} & _MEMORY_OPTIONS]
    return {"dtype": config.model.dtype, "quantization": config.rollout.quantization, "server_args": args}


def _sets_of(config: Config) -> dict[str, dict[str, Any]]:
    return {name: asdict(one) for name, one in eval_set_configs(config).items()}


def _graded_by(config: Config) -> str:
    """A fingerprint of the graders' code, functions and limits; it does not depend on the number of processes."""
    settings = {
        key: (one.functions or one.function, one.correct_from, one.timeout_s, one.memory_mb)
        for key, one in set_rewards(config).items()
    }
    return sha256(repr((_grader_sources(config), settings)).encode()).hexdigest()[:12]


def rescore(path: Path, settings: Sequence[str], out: Path | None) -> list[str]:
    """Grade the samples of an evaluation again, without generating; returns lines to print.

    The reward settings are those of the results.json beside the samples, if there is one, changed by `settings`.

    Raises:
        UserError: a file cannot be read, or a setting is not about rewards.
    """
    if out is not None:
        check_out(out, RESULTS)
        if (out / UNFINISHED).is_file():
            raise UserError(f"--out '{out}' holds an evaluation that could not be resumed then; choose another --out")
    beside = (path if path.is_dir() else path.parent) / RESULTS
    with progress(f"reading {path}"):
        unfinished = read_unfinished(path) if not beside.is_file() else None
        if unfinished is not None and not unfinished[1]:
            raise UserError(f"'{path}': the evaluation has no samples yet")
        before, samples = unfinished or (read_results(beside) if beside.is_file() else {}, read_samples(path))
    for item in settings:
        if not item.startswith(("reward.", "seed=")):
            raise UserError(f"{item}: grading again only reads reward.* settings")
    sets = {name: {"reward": one["reward"]} for name, one in before.get("sets", {}).items() if one.get("reward")}
    if any(item.startswith("reward.function") for item in settings):
        sets = {}  # a grader named on the command line replaces those of all sets
    reward = dict(before.get("reward") or {})
    if any(item.startswith("reward.function=") for item in settings):
        reward.pop("functions", None)  # and replaces several named rewards
    layers = [(str(beside), {"reward": reward, "data": {"eval_sets": sets}})] if reward else []
    config = load_config("", list(settings), writes_run=False, purpose="grade", layers=layers)
    graded: list[EvalSample] = []
    by_key = Graders(set_rewards(config))
    with closing(SetGraders(by_key)) as graders:
        for one in {graders.key_of(one.set): one for one in reversed(samples)}.values():
            origin, grader = f"{one.set}:{one.problem}", by_key[graders.key_of(one.set)]
            check_grader(grader, Prompt(0, one.prompt, (), one.reference, "", row=one.row, origin=origin))
        for part in graders.graded_in_parts(samples):
            graded += part
        graded = graders.with_equal_votes(graded)
    pairs = [(a, b) for a, b in zip(samples, graded, strict=True) if a.is_graded]
    changed = sum(a.correct != b.correct for a, b in pairs)
    scores = scores_of(graded)
    lines = [*unused_grader(config.reward), *table(scores), ""]
    if unfinished is None or pairs:
        lines.append(f"{changed} of {len(pairs)} samples are judged differently than before")
    if unfinished is not None:
        lines.append(
            f"the evaluation has not ended; it has {len(samples)} samples so far. Short completions end first: they are"
            " overrepresented, which the intervals do not account for"
        )
    if out is not None:
        kept = ("model", "generated_by", "seed", "engine", "dtype", "quantization", "server_args")
        origin_of = {key: before.get(key) for key in kept}  # None: not known
        write_results(out, graded, scores, config, origin_of | {"rescored": str(path)}, sets)
        lines.append(f"{out}/: {RESULTS}, {SAMPLES}")
    return lines


def table(scores: Sequence[EvalScores]) -> list[str]:
    """A table with one row per set, and a row for the mean over sets."""
    first = ["set", "problems", "samples", "pass@1", "95 % interval"]
    rows = [[*first, "pass@n", "maj@n", "truncated", "unparsed", "failed", "tokens", "reward"]]
    for one in scores:
        majority, tokens = one.maj_at.get(one.samples), one.completion_tokens_mean
        at_n = percent(one.pass_at[one.samples]) if one.samples > 1 else "-", percent(majority) if majority else "-"
        shares = _share(one.truncated_share), _share(one.unparsed_share)
        reward = "-" if one.reward_mean is None else f"{one.reward_mean:.3f}"
        counts = str(one.failed), "-" if tokens is None else f"{tokens:.0f}", reward
        first = [one.name, str(one.problems), str(one.samples), percent(one.avg), _interval(one.avg)]
        rows.append([*first, *at_n, *shares, *counts])
    average = mean_over_sets(scores)
    if len(scores) > 1 and average.value is not None:
        rows.append(["mean", "", "", percent(average), *[""] * 8])
    return aligned(rows)


def mean_over_sets(scores: Sequence[EvalScores]) -> Estimate:
    """The unweighted mean that papers report. Sets are independent, so the squares of their standard errors add."""
    values = [one.avg.value for one in scores if one.avg.value is not None]
    errors = [one.avg.se for one in scores if one.avg.se is not None]
    average = sum(values) / len(values) if values and len(values) == len(scores) else None
    is_certain = average is not None and len(errors) == len(scores)
    se = sum(e * e for e in errors) ** 0.5 / len(scores) if is_certain else None
    return Estimate(average, se, sum(one.problems for one in scores))


def write_results(
    out: Path,
    samples: Sequence[EvalSample],
    scores: Sequence[EvalScores],
    config: Config,
    about: Mapping[str, Any],
    sets: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Write samples.jsonl, then results.json, so that samples.jsonl is complete if results.json exists.

    Args:
        about: further fields; these override `seed` and `engine` of `config`.
        sets: settings of the sets, if not those of `config`.
    """
    settings = _sets_of(config) if sets is None else sets
    average = mean_over_sets(scores)
    packages = ("torch", "transformers", "numpy", "megatron-core")
    results = {
        "format": FORMAT,
        "seed": config.seed,
        "engine": config.rollout.engine,
        **about,
        "reward": asdict(config.reward),
        "sets": settings,
        "scores": {one.name: one.as_json() for one in scores},
        "levels": {
            name: {level: asdict(one) for level, one in each.items()} for name, each in by_level(samples).items()
        },
        "mean_over_sets": {"pass@1": average.value, "pass@1_se": average.se},
        "metrics": {key: value for one in scores for key, value in one.metrics().items()},
        "versions": {"dppo-megatron": __version__} | {name: version(name) for name in packages},
        "graders": _grader_sources(config),
    }
    write_samples(out / SAMPLES, samples)
    write_text(out / RESULTS, [json.dumps(results, indent=2) + "\n"])


def _grader_sources(config: Config) -> dict[str, str]:
    """SHA-256 of the file of each `module:function` that grades. For a built-in grader, of all files of `rewards`: they
    are hashed because a git checkout can change them without a new package version."""
    rewards = set_rewards(config).values()
    digests: dict[str, str] = {}
    named = [[one.function for one in reward.functions.values()] or [reward.function] for reward in rewards]
    for function in chain.from_iterable(named):
        if is_plugin(function):
            digest = source_digest(function)
            digests |= {function: digest} if digest else {}
        else:
            code = sorted(Path(dppo_megatron.rewards.__file__).parent.rglob("*.py"))
            digests[function] = sha256(b"\0".join(path.read_bytes() for path in code)).hexdigest()
    return digests


def by_level(samples: Sequence[EvalSample]) -> dict[str, dict[str, Estimate]]:
    """Set -> level -> pass@1, levels in ascending order; only of sets whose rows have between two and 20 levels.

    Example:
        {"math500": {"1": Estimate(0.9, 0.04, 43), "2": Estimate(0.7, 0.05, 90)}}
    """
    members: dict[str, dict[float, list[EvalSample]]] = {}
    for sample in samples:
        if sample.level is not None:
            members.setdefault(sample.set, {}).setdefault(sample.level, []).append(sample)
    return {
        name: {f"{level:.15g}": scores_of(members)[0].avg for level, members in sorted(levels.items())}
        for name, levels in members.items()
        if 1 < len(levels) <= _MOST_LEVELS
    }


def level_lines(levels: Mapping[str, Mapping[str, Estimate]]) -> list[str]:
    """One line per set: `math500 by level: 1 90.0 % ± 4.0 (43), 2 70.0 % ± 5.0 (90)`."""
    return [
        f"{name} by level: " + ", ".join(f"{level} {percent(one)} ({one.problems})" for level, one in each.items())
        for name, each in levels.items()
    ]


def _engine(job: Job) -> Engine:
    if job.config.rollout.engine == "hf":
        return engine_from_files(job.config, job.tokenizer, job.checkpoint)
    engine = ServerEngine(job.config, job.architecture, job.tokenizer, has_actor=False)
    try:
        engine.load_checkpoint(job.checkpoint)
    except BaseException:
        engine.close()
        raise
    return engine


def _interval(one: Estimate) -> str:
    return "-" if one.low is None or one.high is None else f"{100 * one.low:.1f} - {100 * one.high:.1f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"
