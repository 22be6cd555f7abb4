"""Evaluates a model without a trainer or training data, in one process, with any engine and kind of checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dppo_megatron.checkpoint.manifest import read_manifest
from dppo_megatron.checkpoint.shelf import named
from dppo_megatron.config.changes import saved_values
from dppo_megatron.config.data import EvalSetConfig
from dppo_megatron.config.load import load_config
from dppo_megatron.config.reward import RewardConfig
from dppo_megatron.config.schema import Config
from dppo_megatron.config.sets import eval_set_configs
from dppo_megatron.evaluation.choice import chosen_sets, without
from dppo_megatron.evaluation.evaluator import Evaluator
from dppo_megatron.evaluation.grading import SetGraders, unparsed, vote_of
from dppo_megatron.evaluation.levels import by_level, level_lines
from dppo_megatron.evaluation.samples import (
    RESULTS,
    SAMPLES,
    EvalSample,
    check_out,
    read_samples,
    scores_of,
    write_samples,
    write_text,
)
from dppo_megatron.evaluation.statistics import EvalScores, percent
from dppo_megatron.job import Job, prepare_job
from dppo_megatron.launched import launched_world_size
from dppo_megatron.rewards.grading import GradeTask, make_grader
from dppo_megatron.rewards.start_checks import check_grader
from dppo_megatron.rollout.engine import Engine
from dppo_megatron.rollout.hf import engine_from_files
from dppo_megatron.rollout.server_engine import ServerEngine
from dppo_megatron.texts import show
from dppo_megatron.types import Grade, Prompt, UserError, Watch, counted, unwatched

_FORMAT = "dppo_megatron evaluation 1"
_GRADED_AT_ONCE = 1000
"""Between two looks at the progress: enough that no grader waits for the last of a batch."""


@dataclass(frozen=True, slots=True)
class Order:
    """The command line's options."""

    model: str
    settings: Sequence[str] = ()
    """`key=value`"""
    sets: Sequence[str] = ()
    step: int | None = None
    data: Path | None = None
    out: Path | None = None
    limit: int = 0


def evaluate_model(order: Order, watch: Watch = unwatched) -> list[str]:
    """Evaluate, write results.json and samples.jsonl, and return lines to print.

    Args:
        watch: shows the progress.

    Raises:
        UserError: anything wrong with the model, the sets or the settings, before anything is generated.
    """
    if launched_world_size() != 1:
        raise UserError("eval is one process: run it without torchrun; several GPUs are used through servers")
    config, out, said = _prepare(order)
    if not eval_set_configs(config):
        raise UserError("there is no set to evaluate on: give --sets, or data.eval_sets in the config")
    if out is not None:
        check_out(out, RESULTS)
    job = prepare_job(config, world_size=1, trains=False, watch=watch)
    show(*said, *_shown(job))
    with TemporaryDirectory(prefix="eval-") as scratch:
        job.config.run_dir = str(out or scratch)  # servers' logs and the sync directory
        with closing(_engine(job, watch)) as engine, closing(Evaluator(job)) as evaluator:
            show(engine.description)
            samples = evaluator.sample(engine, watch)
    scores = scores_of(samples)
    lines = [*table(scores), *level_lines(by_level(samples))]
    if out is not None:
        with watch(f"writing {out}", 0, ""):
            write_results(out, samples, scores, config, {"model": str(config.model.hf_path)})
        lines += ["", f"{out}/: {RESULTS}, {SAMPLES}"]
    return lines


def rescore(path: Path, settings: Sequence[str], out: Path | None, watch: Watch = unwatched) -> list[str]:
    """Grade the samples of an evaluation again, without generating; returns lines to print.

    The reward settings are those of the results.json beside the samples, where there is one, changed by `settings`.

    Raises:
        UserError: a file that cannot be read, or a setting that is not about rewards.
    """
    if out is not None:
        check_out(out, RESULTS)
    with watch(f"reading {path}", 0, ""):
        samples = read_samples(path)
    beside = (path if path.is_dir() else path.parent) / RESULTS
    before = _read_results(beside) if beside.is_file() else {}
    for item in settings:
        if not item.startswith(("reward.", "seed=")):
            raise UserError(f"{item}: grading again only reads reward.* settings")
    layers = [(str(beside), {"reward": before["reward"]})] if "reward" in before else []
    config = load_config("", list(settings), writes_run=False, purpose="grade", layers=layers)
    own = make_grader(config.reward)
    graders = SetGraders(config.reward, own)
    chosen = {name: str(of.get("grader") or "") for name, of in before.get("sets", {}).items()}
    if any(item.startswith("reward.function") for item in settings):
        chosen = {}  # the grader that the command line names is for every set
    graded: dict[int, EvalSample] = {}
    for function in dict.fromkeys(chosen.get(sample.set, "") for sample in samples):
        members = [i for i, sample in enumerate(samples) if chosen.get(sample.set, "") == function]
        tasks = [_task(samples[i]) for i in members]
        check_grader(graders.of(function), _prompt(samples[members[0]]))
        for i, grade in zip(members, _graded(graders, function, tasks, watch), strict=True):
            correct = graders.correct(grade)
            graded[i] = replace(
                samples[i],
                correct=correct,
                reward=None if correct is None else grade.reward,
                extracted=grade.extracted,
                vote=vote_of(grade),
                unparsed=unparsed(grade),
                why=grade.why,
                failure=grade.failure,
            )
    graders.close()
    own.close()
    again = [graded[i] for i in range(len(samples))]
    moved = sum(a.correct != b.correct for a, b in zip(samples, again, strict=True))
    scores = scores_of(again)
    lines = [*table(scores), "", f"{moved} of {len(samples)} samples are judged otherwise than before"]
    if out is not None:
        write_results(out, again, scores, config, {"rescored": str(path)}, chosen)
        lines.append(f"{out}/: {RESULTS}, {SAMPLES}")
    return lines


def table(scores: Sequence[EvalScores]) -> list[str]:
    """A table with one row per set, and the mean over sets."""
    width = max(4, *(len(one.name) for one in scores))
    lines = [
        f"{'set':<{width}} {'problems':>8} {'samples':>7}  {'pass@1':<14} {'pass@n':<14} {'maj@n':<14}"
        f" {'truncated':>9} {'unparsed':>8} {'failed':>6} {'tokens':>7}"
    ]
    for one in scores:
        many = one.samples > 1
        majority = one.maj_at.get(one.samples)
        lines.append(
            f"{one.name:<{width}} {one.problems:>8} {one.samples:>7}  {percent(one.avg):<14}"
            f" {percent(one.pass_at[one.samples]) if many else '-':<14} {percent(majority) if majority else '-':<14}"
            f" {_share(one.truncated_share):>9} {_share(one.unparsed_share):>8} {one.failed:>6}"
            f" {'-' if one.completion_tokens_mean is None else f'{one.completion_tokens_mean:.0f}':>7}"
        )
    average = mean_over_sets(scores)
    if len(scores) > 1 and average["pass@1"] is not None:
        se = average["pass@1_se"]
        text = f"{100 * average['pass@1']:.1f} %" + (f" ± {100 * se:.1f}" if se is not None else "")
        lines.append(f"{'mean':<{width}} {'':>8} {'':>7}  {text}")
    return lines


def mean_over_sets(scores: Sequence[EvalScores]) -> dict[str, float | None]:
    """Unweighted, as papers report an average: sets are independent, so the squares of the errors add."""
    values = [one.avg.value for one in scores]
    errors = [one.avg.se for one in scores]
    known, certain = [v for v in values if v is not None], [e for e in errors if e is not None]
    complete = len(known) == len(scores) and bool(scores)
    return {
        "pass@1": sum(known) / len(known) if complete else None,
        "pass@1_se": sum(e * e for e in certain) ** 0.5 / len(scores)
        if complete and len(certain) == len(scores)
        else None,
    }


def write_results(
    out: Path,
    samples: Sequence[EvalSample],
    scores: Sequence[EvalScores],
    config: Config,
    about: Mapping[str, Any],
    graders: Mapping[str, str] | None = None,
) -> None:
    """Write samples.jsonl, then results.json: if the second exists, the first is complete."""
    settings: dict[str, dict[str, Any]] = {name: asdict(of) for name, of in eval_set_configs(config).items()}
    settings = settings or {name: {"grader": function} for name, function in (graders or {}).items()}
    packages = ("torch", "transformers", "numpy")
    results = {
        "format": _FORMAT,
        **about,
        "seed": config.seed,
        "engine": config.rollout.engine,
        "reward": asdict(config.reward),
        "sets": settings,
        "scores": {one.name: one.as_json() for one in scores},
        "levels": {
            name: {level: asdict(one) for level, one in each.items()} for name, each in by_level(samples).items()
        },
        "mean_over_sets": mean_over_sets(scores),
        "metrics": {key: value for one in scores for key, value in one.metrics().items()},
        "versions": {name: version(name) for name in packages},
    }
    write_samples(out / SAMPLES, samples)
    write_text(out / RESULTS, [json.dumps(results, indent=2) + "\n"])


def _prepare(order: Order) -> tuple[Config, Path | None, tuple[str, ...]]:
    """The checked settings, the output directory (None: no files), and lines to print."""
    if order.limit < 0:
        raise UserError(f"--limit {order.limit}: must not be negative")
    said_keys = {item.split("=")[0] for item in order.settings}
    if order.model.endswith((".yaml", ".yml")):
        if order.step is not None:
            raise UserError("--step belongs to a run directory, not to a config file")
        sets = chosen_sets(order.sets, order.data, order.settings)
        layers = [("--sets", {"data": {"eval_sets": sets}})] if sets else []
        config = load_config(order.model, list(order.settings), writes_run=False, purpose="evaluate", layers=layers)
        if sets:
            config.data.eval_sets = {name: config.data.eval_sets[name] for name in sets}
            config.data.eval_paths = {}
        return _for_evaluation(config, order.limit), order.out, ()
    target = find_target(order.model, order.step)
    settings = {key: dict(value) if isinstance(value, dict) else value for key, value in target.settings.items()}
    sets = chosen_sets(order.sets, order.data, order.settings)
    layers = [(target.where, settings)]
    data = settings.setdefault("data", {})
    if sets:
        data |= {"eval_sets": {}, "eval_paths": {}}
        layers.append(("--sets", {"data": {"eval_sets": sets}}))
    else:
        own = data.get("eval_sets") or {}
        data["eval_sets"] = {name: without(values, said_keys) for name, values in own.items()}
    settings["model"] = {**(settings.get("model") or {}), "hf_path": str(target.model)}
    for key in ("checkpoint", "run_dir", "warm_start"):  # they name files of the run, which may be absent here
        settings.pop(key, None)
    for key in ("train_path", "train_sets"):
        data.pop(key, None)
    config = load_config("", list(order.settings), writes_run=False, purpose="evaluate", layers=layers)
    return _for_evaluation(config, order.limit), order.out or target.out, target.said


def _for_evaluation(config: Config, limit: int) -> Config:
    """The settings without those that only a training run has, and with --limit applied."""
    config.data.train_path, config.data.train_sets = "", {}
    config.rollout.servers.colocate = False  # there is no actor whose GPUs the servers could share
    if limit:
        data = config.data
        sets = {name: EvalSetConfig(path=path) for name, path in data.eval_paths.items()} | data.eval_sets
        data.eval_paths = {}
        data.eval_sets = {name: replace(of, limit=min(limit, of.limit or limit)) for name, of in sets.items()}
    return config


def _graded(graders: SetGraders, function: str, tasks: Sequence[GradeTask], watch: Watch) -> list[Grade]:
    found: list[Grade] = []
    with watch("grading", len(tasks), "answers") as advance:
        for first in range(0, len(tasks), _GRADED_AT_ONCE):
            found += graders.grade(function, tasks[first : first + _GRADED_AT_ONCE])
            advance(len(found))
    return found


def _engine(job: Job, watch: Watch) -> Engine:
    """The configured engine with the checkpoint's weights."""
    names = job.checkpoint.names
    if job.config.rollout.engine == "hf":
        return engine_from_files(job.config, job.tokenizer, job.checkpoint, watch)
    engine = ServerEngine(job.config, job.architecture, job.tokenizer, watch=watch)
    try:
        with watch("weights to the servers", len(names), "tensors") as advance:
            engine.load_weights(lambda: ((name, job.checkpoint.get(name)) for name in counted(names, advance)))
    except BaseException:
        engine.close()
        raise
    return engine


def _shown(job: Job) -> list[str]:
    """The first prompt of each set: a wrong template costs more points than a wrong model."""
    return [
        f"{name}: {len(prompts)} problems, the first: {prompts[0].text!r}" for name, prompts in job.eval_prompts.items()
    ]


def _prompt(sample: EvalSample) -> Prompt:
    return Prompt(0, sample.prompt, (), sample.reference, "", row=sample.row, origin=f"{sample.set}:{sample.problem}")


def _task(sample: EvalSample) -> GradeTask:
    label = f"{sample.set}, problem {sample.problem}, sample {sample.sample}"
    return GradeTask(sample.text, sample.reference, sample.row, label)


def _read_results(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if raw["format"] != _FORMAT or not isinstance(raw["sets"], dict):
            raise ValueError("another format")
        RewardConfig(**raw["reward"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"'{path}' is no results of an evaluation: {error!r}") from None
    found: dict[str, Any] = raw
    return found


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


_SERVER_KEYS = ("endpoints", "launch", "colocate", "allow_remote_endpoints")


@dataclass(frozen=True, slots=True)
class Target:
    """A model to evaluate and the settings that come with it."""

    model: Path
    """Directory of a Hugging Face or a Megatron distributed checkpoint, with its tokenizer."""
    out: Path
    """Where results go unless --out says otherwise."""
    settings: Mapping[str, Any]
    where: str
    """The file that the settings came from."""
    said: tuple[str, ...] = ()
    """Lines for the log."""


def find_target(text: str, step: int | None = None) -> Target:
    """Resolve `text` to a target.

    Args:
        text: a Hugging Face directory, a run directory, or a checkpoint (checkpoints/step_000020, converted ones too).
        step: of a run, instead of its last model.

    Raises:
        UserError: it is none of these, or the run has no such checkpoint.
    """
    path = Path(text)
    if not path.is_dir():
        raise UserError(
            f"'{text}': no such directory; give a Hugging Face model, a run directory, one of its checkpoints, or a"
            " config file (.yaml)"
        )
    is_model, is_run = (path / "config.json").is_file(), (path / "config.yaml").is_file()
    if step is not None and not is_run:
        raise UserError(f"--step {step}: '{text}' is no run directory (it has no config.yaml)")
    if is_run and not is_model:
        return _of_run(path, step)
    if is_model and (path / "manifest.json").is_file():
        return _of_checkpoint(path)
    if is_model:
        return Target(path, Path("eval") / path.resolve().name, _defaults(path), str(path))
    raise UserError(
        f"'{text}' holds neither config.json (a Hugging Face model or a checkpoint) nor config.yaml (a run directory)"
    )


def _of_run(run: Path, step: int | None) -> Target:
    there_are = named(run / "checkpoints")
    steps = {number: path for number, path in there_are if not isinstance(read_manifest(path), str)}
    if step is not None:
        if step not in steps:
            there = ", ".join(str(number) for number in sorted(steps)) or "none"
            raise UserError(f"--step {step}: '{run}' has no such checkpoint; there are: {there}")
        model = steps[step]
    elif (run / "hf" / "config.json").is_file():
        model = run / "hf"
    elif steps:
        model = steps[max(steps)]
    else:
        raise UserError(f"'{run}' holds neither hf/ nor a complete checkpoint yet: there is no model to evaluate")
    settings, said = _without_servers(saved_values(run / "config.yaml"))
    return Target(model, run / "eval" / model.name, settings, str(run / "config.yaml"), said)


def _of_checkpoint(path: Path) -> Target:
    manifest = read_manifest(path)
    if isinstance(manifest, str):
        raise UserError(f"'{path}' is no complete checkpoint: {manifest}")
    settings, said = _without_servers(dict(manifest.config))
    # runs/x/checkpoints/step_000020 -> runs/x/eval/step_000020
    run = path.resolve().parent.parent
    out = (run if (run / "config.yaml").is_file() else Path()) / "eval" / path.resolve().name
    return Target(path, out, settings, str(path / "manifest.json"), said)


def _without_servers(settings: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Drop the run's server addresses: they may serve another run by now, and an evaluation loads other weights."""
    rollout = dict(settings.get("rollout") or {})
    engine, had_servers = rollout.get("engine", "hf"), rollout.get("engine", "hf") != "hf"
    servers = {key: value for key, value in (rollout.get("servers") or {}).items() if key not in _SERVER_KEYS}
    kept = {key: value for key, value in rollout.items() if key != "engine"} | {"servers": servers}
    said = (
        f"the run's {engine} servers are not used, they may be another run's by now; rollout.engine={engine} with"
        " rollout.servers.launch=local or rollout.servers.endpoints=[...] names servers for this evaluation",
    )
    return settings | {"rollout": kept}, said if had_servers else ()


def _defaults(model: Path) -> dict[str, Any]:
    """Settings for a model alone: its dtype, and a prompt for a boxed answer, as a chat turn if it has a template."""
    try:
        raw = json.loads((model / "config.json").read_text(encoding="utf-8"))
        dtype = str(raw.get("dtype") or raw.get("torch_dtype")) if isinstance(raw, dict) else ""
    except (OSError, ValueError, RecursionError):
        dtype = ""  # reading the architecture reports what is wrong
    chats = (model / "chat_template.jinja").is_file() or _has_template(model / "tokenizer_config.json")
    return {
        "model": {"dtype": dtype if dtype in ("float32", "bfloat16") else "bfloat16"},
        "data": {"template": "chat_boxed" if chats else "plain_boxed"},
    }


def _has_template(path: Path) -> bool:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(raw, dict) and bool(raw.get("chat_template"))
