"""Evaluates a model without a trainer or training data, in one process, with any engine and kind of checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, fields, replace
from hashlib import sha256
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

import dppo_megatron.rewards
from dppo_megatron import __version__
from dppo_megatron.config.load import load_config
from dppo_megatron.config.paths import with_paths
from dppo_megatron.config.plugins import is_plugin, source_digest
from dppo_megatron.config.resolved_sets import eval_set_configs, set_rewards
from dppo_megatron.config.reward import RewardConfig
from dppo_megatron.config.schema import Config
from dppo_megatron.evaluation.arguments import EvalArguments, prepare
from dppo_megatron.evaluation.eval_samples import (
    FORMAT,
    RESULTS,
    SAMPLES,
    EvalSample,
    UnfinishedSamples,
    check_out,
    read_results,
    read_samples,
    read_unfinished,
    scores_of,
    write_samples,
    write_text,
)
from dppo_megatron.evaluation.eval_scores import Estimate, EvalScores, percent
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

_GRADERS_MEANS = [item.name for item in fields(RewardConfig) if item.metadata.get("free_at_resume")]
_MOST = 20
"""A column of more values is a measure, not a level."""
Levels = Mapping[str, Mapping[str, Estimate]]
"""Set to level to pass@1; levels rise."""


def evaluate_model(given: EvalArguments) -> list[str]:
    """Evaluate, write results.json and samples.jsonl, and return lines to print. Raises UserError for anything
    wrong with the model, the sets or the settings, before anything is generated."""
    check_alone()
    config, out, said = prepare(given)
    check_out(out, RESULTS)
    with closing(EngineAndGraders(config, out, said)) as used:
        samples = evaluate(used, used.job, out)
    return [*table(scores_of(samples)), *level_lines(by_level(samples)), "", f"{out}/: {RESULTS}, {SAMPLES}"]


def check_alone() -> None:
    """Raise `UserError` where a launcher has started several processes."""
    if launched_world_size() != 1:
        raise UserError("eval is one process: run it without torchrun; several GPUs are used through servers")


class EngineAndGraders:
    """What evaluations of one model with other weights share: servers take minutes to start.

    Args:
        directory: for servers' logs and the weights on their way.
        said: lines to print before what is odd about the sets and the first prompt of each; a wrong template costs more
            points than a wrong model.

    Raises:
        UserError: as `prepare_job`, or there is no set.
    """

    def __init__(self, config: Config, directory: Path, said: Sequence[str]) -> None:
        if not eval_set_configs(config):
            raise UserError("there is no set to evaluate on: give --sets, or data.eval_sets in the config")
        self.job = prepare_job(config, world_size=1, trains=False)
        self.job.config.run_dir = str(directory)
        references = self.job.check_references()
        show(*said, *self.job.data_report, *map(with_paths, [*self.job.notes, *references]))
        if config.rollout.engine == "hf":  # servers compute with layers of their own
            show(*self.job.check_first_layers())
        self.evaluator = Evaluator(self.job)
        self._engine: Engine | None = None

    def engine(self, job: Job) -> Engine:
        """The engine with the weights of `job.checkpoint`; started at the first call."""
        if self._engine is None:
            # servers start from the settings' model: a checkpoint of the run is no Hugging Face directory
            self._engine = _engine(replace(self.job, checkpoint=job.checkpoint))
            show(self._engine.description)
        else:
            self._engine.load_checkpoint(job.checkpoint)
        return self._engine

    def close(self) -> None:
        """End servers and graders."""
        self.evaluator.close()
        if self._engine is not None:
            self._engine.close()


def evaluate(used: EngineAndGraders, job: Job, out: Path, more: Mapping[str, Any] | None = None) -> list[EvalSample]:
    """Sample and grade the sets with the weights of `job.checkpoint`, and write the results to `out`, where what an
    evaluation that was killed has left is not made again.

    Args:
        more: further fields of results.json.
    """
    settings = {"reward": asdict(job.config.reward), "sets": _sets_of(job.config)}
    with closing(UnfinishedSamples(out, about(job, out), _graded_by(job.config), settings)) as kept:
        check_out(out, RESULTS)  # of another that has ended meanwhile
        if kept.samples:
            show(f"going on with the evaluation in {out}: {len(kept.samples)} samples are there")
        engine = used.engine(job)
        samples = used.evaluator.sample_alone(engine, kept)
        origin = {"model": str(job.config.model.hf_path), "generated_by": engine.description, **(more or {})}
        with progress(f"writing {out}"):
            write_results(out, samples, scores_of(samples), job.config, origin)
            kept.finished()
    return samples


def about(job: Job, out: Path) -> dict[str, Any]:
    """What decides the samples of an evaluation and their grades."""
    config, model = job.config, Path(job.config.model.hf_path).resolve()
    files = sorted(path for path in model.rglob("*") if path.is_file() and out.resolve() not in path.parents)
    states = [(str(path.relative_to(model)), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return {
        "model": str(config.model.hf_path),
        "model_files": sha256(repr(states).encode()).hexdigest(),
        "seed": config.seed,
        "engine": config.rollout.engine,
        # of servers it is not known before they have started; `generated_by` in results.json names it
        "engine_version": f"{version('torch')} {version('transformers')}" if config.rollout.engine == "hf" else None,
        "dtype": config.model.dtype,
        "stop_token_ids": list(job.stop_token_ids),
        "reward": _lasting(asdict(config.reward)),
        "sets": {
            name: asdict(of) | {"reward": _lasting(asdict(of.reward))} for name, of in eval_set_configs(config).items()
        },
        "problems": {
            name: sha256(repr([(one.text, one.answer, one.row) for one in prompts]).encode()).hexdigest()
            for name, prompts in job.eval_prompts.items()
        },
    }


def _sets_of(config: Config) -> dict[str, dict[str, Any]]:
    return {name: asdict(of) for name, of in eval_set_configs(config).items()}


def _lasting(reward: dict[str, Any]) -> dict[str, Any]:
    """Settings of rewards without those of how graders work."""
    return {name: value for name, value in reward.items() if name not in _GRADERS_MEANS}


def _graded_by(config: Config) -> str:
    """Changes with the files of the graders and with what they are given to work with, not with how fast they work."""
    given = {
        key: (of.functions or of.function, of.correct_from, of.timeout_s, of.memory_mb)
        for key, of in set_rewards(config).items()
    }
    return sha256(repr((_grader_sources(config), given)).encode()).hexdigest()[:12]


def rescore(path: Path, settings: Sequence[str], out: Path | None) -> list[str]:
    """Grade the samples of an evaluation again, without generating; returns lines to print.

    The reward settings are those of the results.json beside the samples, where there is one, changed by `settings`.

    Raises:
        UserError: a file that cannot be read, or a setting that is not about rewards.
    """
    if out is not None:
        check_out(out, RESULTS)
    beside = (path if path.is_dir() else path.parent) / RESULTS
    with progress(f"reading {path}"):
        unfinished = read_unfinished(path) if not beside.is_file() else None
        if unfinished is not None and not unfinished[1]:
            raise UserError(f"'{path}': the evaluation has no samples yet")
        before, samples = unfinished or (read_results(beside) if beside.is_file() else {}, read_samples(path))
    for item in settings:
        if not item.startswith(("reward.", "seed=")):
            raise UserError(f"{item}: grading again only reads reward.* settings")
    sets = {name: {"reward": of["reward"]} for name, of in before.get("sets", {}).items() if of.get("reward")}
    if any(item.startswith("reward.function") for item in settings):
        sets = {}  # the grader that the command line names is for every set
    reward = dict(before.get("reward") or {})
    if any(item.startswith("reward.function=") for item in settings):
        reward.pop("functions", None)  # and instead of several
    layers = [(str(beside), {"reward": reward, "data": {"eval_sets": sets}})] if reward else []
    config = load_config("", list(settings), writes_run=False, purpose="grade", layers=layers)
    again: list[EvalSample] = []
    by_key = Graders(set_rewards(config))
    with closing(SetGraders(by_key)) as graders:
        for one in {graders.key_of(one.set): one for one in reversed(samples)}.values():
            origin, grader = f"{one.set}:{one.problem}", by_key[graders.key_of(one.set)]
            check_grader(grader, Prompt(0, one.prompt, (), one.reference, "", row=one.row, origin=origin))
        for part in graders.graded_in_parts(samples):
            again += part
        again = graders.with_equal_votes(again)
    pairs = [(a, b) for a, b in zip(samples, again, strict=True) if a.is_graded]
    moved = sum(a.correct != b.correct for a, b in pairs)
    scores = scores_of(again)
    lines = [*unused_grader(config.reward), *table(scores), ""]
    if unfinished is None or pairs:
        lines.append(f"{moved} of {len(pairs)} samples are judged otherwise than before")
    if unfinished is not None:
        lines.append(
            f"the evaluation has not ended; it has {len(samples)} samples so far. Short completions end first: they are"
            " overrepresented, which the intervals do not account for"
        )
    if out is not None:
        made = {key: before.get(key) for key in ("model", "generated_by", "seed", "engine")}  # null: not known
        write_results(out, again, scores, config, made | {"rescored": str(path)}, sets)
        lines.append(f"{out}/: {RESULTS}, {SAMPLES}")
    return lines


def table(scores: Sequence[EvalScores]) -> list[str]:
    """A table with one row per set, and the mean over sets."""
    whole = ["set", "problems", "samples", "pass@1", "95 % interval"]
    rows = [[*whole, "pass@n", "maj@n", "truncated", "unparsed", "failed", "tokens"]]
    for one in scores:
        majority, tokens = one.maj_at.get(one.samples), one.completion_tokens_mean
        of_many = percent(one.pass_at[one.samples]) if one.samples > 1 else "-", percent(majority) if majority else "-"
        shares = _share(one.truncated_share), _share(one.unparsed_share)
        counts = str(one.failed), "-" if tokens is None else f"{tokens:.0f}"
        whole = [one.name, str(one.problems), str(one.samples), percent(one.avg), _interval(one.avg)]
        rows.append([*whole, *of_many, *shares, *counts])
    average = mean_over_sets(scores)
    if len(scores) > 1 and average.value is not None:
        rows.append(["mean", "", "", percent(average), *[""] * 7])
    return aligned(rows)


def mean_over_sets(scores: Sequence[EvalScores]) -> Estimate:
    """Unweighted, as papers report an average: sets are independent, so the squares of the errors add."""
    values, errors = [one.avg.value for one in scores], [one.avg.se for one in scores]
    known, certain = [v for v in values if v is not None], [e for e in errors if e is not None]
    average = sum(known) / len(known) if known and len(known) == len(scores) else None
    is_certain = average is not None and len(certain) == len(scores)
    se = sum(e * e for e in certain) ** 0.5 / len(scores) if is_certain else None
    return Estimate(average, se, sum(one.problems for one in scores))


def write_results(
    out: Path,
    samples: Sequence[EvalSample],
    scores: Sequence[EvalScores],
    config: Config,
    about: Mapping[str, Any],
    sets: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Write samples.jsonl, then results.json: if the second exists, the first is complete.

    Args:
        about: further fields, and those that are not the settings' own.
        sets: what is known of their settings, where that is not all of `config`.
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
    """SHA-256 of the file of each `module:function` that grades; of a built-in grader the files of all of them, because
    a checkout changes without a new version."""
    rewards = set_rewards(config).values()
    found: dict[str, str] = {}
    named = [[one.function for one in of.functions.values()] or [of.function] for of in rewards]
    for function in chain.from_iterable(named):
        if is_plugin(function):
            digest = source_digest(function)
            found |= {function: digest} if digest else {}
        else:
            code = sorted(Path(dppo_megatron.rewards.__file__).parent.rglob("*.py"))
            found[function] = sha256(b"\0".join(path.read_bytes() for path in code)).hexdigest()
    return found


def by_level(samples: Sequence[EvalSample]) -> Levels:
    """pass@1 of each level, for sets whose rows state between two and 20 of them; the others are left out.

    Example:
        {"math500": {"1": Estimate(0.9, 0.04, 43), "2": Estimate(0.7, 0.05, 90)}}
    """
    members: dict[str, dict[float, list[EvalSample]]] = {}
    for sample in samples:
        if sample.level is not None:
            members.setdefault(sample.set, {}).setdefault(sample.level, []).append(sample)
    return {
        name: {f"{level:.15g}": scores_of(of)[0].avg for level, of in sorted(levels.items())}
        for name, levels in members.items()
        if 1 < len(levels) <= _MOST
    }


def level_lines(levels: Levels) -> list[str]:
    """A line a set: `math500 by level: 1 90.0 % ± 4.0 (43), 2 70.0 % ± 5.0 (90)`."""
    return [
        f"{name} by level: " + ", ".join(f"{level} {percent(of)} ({of.problems})" for level, of in each.items())
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


def _interval(of: Estimate) -> str:
    return "-" if of.low is None or of.high is None else f"{100 * of.low:.1f} - {100 * of.high:.1f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"
