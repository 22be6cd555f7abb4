"""Resolves the command line of `eval`: which model, which sets, which settings, and where results are written."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from dppo_megatron.checkpoint.checkpoint_dir import named, read_manifest
from dppo_megatron.config.changes import saved_values
from dppo_megatron.config.data import EvalSetConfig, TrainSetConfig
from dppo_megatron.config.load import config_from_values, config_values, load_config, read_config
from dppo_megatron.config.paths import how_to_download, shipped
from dppo_megatron.config.resolved_sets import Template, train_set_configs
from dppo_megatron.config.schema import Config
from dppo_megatron.config.yaml12 import Source, parse, plain
from dppo_megatron.evaluation.eval_samples import FOLLOWED
from dppo_megatron.types import UserError

_SERVER_KEYS = ("endpoints", "launch", "registry_dir", "colocate", "allow_remote_endpoints")
_DROPS_ROWS = {"where", "overlong"}
_COMMON = {item.name for item in fields(EvalSetConfig)} - _DROPS_ROWS
"""Settings that a set inherits from `data` or `eval`. Not those that drop rows: only an evaluation set's own entry, the
command line or a file of sets may, never the training data's setting."""
_NOT_EVALUATED = {"run_dir", "steps", "threads_per_rank"}
"""What a file of sets may have beside `data` and `eval`, since it decides no score."""
_TEMPLATE = {"template", *(item.name for item in fields(Template))}


@dataclass(frozen=True, slots=True)
class EvalArguments:
    model: str
    settings: Sequence[str] = ()
    sets: Sequence[str] = ()
    step: int | None = None
    data: Path | None = None
    out: Path | None = None
    limit: int = 0
    follow: bool = False
    """`model` is a run directory, and need not have a checkpoint yet."""


@dataclass(frozen=True, slots=True)
class _Target:
    """A model to evaluate and the settings that come with it."""

    model: Path | None
    """Directory of a Hugging Face or Megatron distributed checkpoint, with its tokenizer; None: that of `settings`."""
    out: Path
    """Output directory without --out."""
    settings: Mapping[str, Any]
    where: str
    dtype: str = ""
    """As stated by a model without a run; empty: not stated."""


def prepare(arguments: EvalArguments) -> tuple[Config, Path, tuple[str, ...]]:
    """The checked settings, the output directory, and lines to print. Raises UserError."""
    if arguments.limit < 0:
        raise UserError(f"--limit {arguments.limit}: must not be negative")
    is_config = arguments.model.endswith((".yaml", ".yml"))
    if is_config and arguments.step is not None:
        raise UserError("--step belongs to a run directory, not to a config file")
    target, notes = None, tuple[str, ...]()
    if not is_config:
        target = _find_target(arguments.model, arguments.step, follows=arguments.follow)
    of_run = Config() if target is None else _as_saved(target, ("eval_paths", "eval_sets"))
    sets = _chosen_sets(arguments.sets, arguments.data, _sets_of(of_run))
    layers: list[tuple[str, Mapping[str, Any]]] = []
    if sets:  # these replace all sets of the run or config; emptied first, so that sets of one name are not merged
        layers = [("--sets", {"data": {"eval_paths": {}, "eval_sets": {}}}), ("--sets", {"data": {"eval_sets": sets}})]
    if target is not None:
        saved, notes = _used_settings(target.settings, arguments.settings)
        model = {"hf_path": str(target.model)} if target.model is not None else {}
        layers = [(target.where, saved), ("MODEL", {"model": model}), *layers]
    path = arguments.model if is_config else ""
    layers += _set_overrides(path, arguments.settings, layers)
    config = load_config(path, list(arguments.settings), writes_run=False, purpose="evaluate", layers=layers)
    if target is not None and target.dtype not in ("", config.model.dtype):
        notes = (*notes, f"the model's own dtype is {target.dtype}; it is evaluated in {config.model.dtype}")
    data = config.data
    # keep only the templates of training sets: their stop tokens end completions in the run's own evaluations too
    trained = train_set_configs(config if target is None else _as_saved(target, ("train_path", "train_sets")))
    data.train_path = ""
    data.train_sets = {name: TrainSetConfig(**asdict(one.template)) for name, one in trained.items()}
    config.rollout.servers.colocate = False  # there is no actor whose GPUs the servers could share
    given = {item.partition("=")[0] for item in arguments.settings}
    drops: dict[str, Any] = {key: getattr(data, key) for key in _DROPS_ROWS if f"data.{key}" in given}
    if arguments.limit or drops:  # an entry of eval_paths cannot have these settings
        as_sets = {name: EvalSetConfig(path=path, **drops) for name, path in data.eval_paths.items()}
        data.eval_sets, data.eval_paths = as_sets | data.eval_sets, {}
    if arguments.limit:
        for one in data.eval_sets.values():
            one.limit = min(arguments.limit, one.limit or arguments.limit)
    return config, arguments.out or (Path("eval") / Path(arguments.model).stem if target is None else target.out), notes


def _set_overrides(
    path: str, settings: Sequence[str], layers: Sequence[tuple[str, Mapping[str, Any]]]
) -> list[tuple[str, Mapping[str, Any]]]:
    """Layers by which settings for all sets on the command line, such as eval.samples or data.template, override each
    set's own. A command-line setting of a single set still has priority over these."""
    # two parts of each key, since data.chat_template_kwargs.x counts as data.chat_template_kwargs
    first_two = {".".join(item.partition("=")[0].split(".")[:2]) for item in settings}
    keys = {key for key in _COMMON | _DROPS_ROWS if {f"data.{key}", f"eval.{key}"} & first_two}
    if not keys:
        return []
    data = read_config(path, list(settings), layers).data
    values = config_values(data)
    # None makes a set inherit; template settings need the value itself, else the set's `template` would override them
    of_each = (dict.fromkeys(keys), {key: values[key] for key in keys & (_TEMPLATE | _DROPS_ROWS)})
    return [("the command line", {"data": {"eval_sets": dict.fromkeys(data.eval_sets, one)}}) for one in of_each]


def _as_saved(target: _Target, names: Collection[str]) -> Config:
    """A config with only the run's sets in `names` and its template settings. Raises UserError if they are invalid."""
    saved = target.settings.get("data") or {}
    if isinstance(saved, dict):
        saved = {key: value for key, value in saved.items() if key in {*names, *_TEMPLATE}}
    return config_from_values({"data": saved}, target.where)


def _sets_of(config: Config) -> dict[str, dict[str, Any]]:
    """The evaluation sets by name, in the form of data.eval_sets."""
    sets: dict[str, dict[str, Any]] = {name: {"path": path} for name, path in config.data.eval_paths.items()}
    return sets | {name: config_values(entry) for name, entry in config.data.eval_sets.items()}


def _chosen_sets(
    words: Sequence[str], data: Path | None, own: Mapping[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """`data.eval_sets` for the sets that `words` name: presets and files, whose relative paths are in the directory
    `data`, and the run's own sets. Raises UserError for an unknown or a duplicate name."""
    chosen: dict[str, dict[str, Any]] = {}
    for word in words:
        name, separator, path = word.partition("=")
        new: dict[str, dict[str, Any]] = {}
        if separator and not (name and path):
            raise UserError(f"--sets {word}: expected name=path")
        if separator:
            new = {name: {"path": path}}
        elif word.endswith((".yaml", ".yml")):
            new = _located(_read(Path(word)), word, data)
        else:
            for part in word.split(","):
                new |= {part: own[part]} if part in own and not data else _located(_preset(part, own), part, data)
        if both := chosen.keys() & new.keys():
            raise UserError(f"--sets: the set '{min(both)}' is given twice; names must differ")
        chosen |= new
    return chosen


def _preset(name: str, own: Collection[str]) -> dict[str, dict[str, Any]]:
    """All sets of the preset `name`, or the one set of that name in a preset. `own`: names for the error message."""
    folder = shipped("configs", "eval")
    presets = {path.stem: _read(path) for path in sorted(folder.glob("*.yaml"))}
    sets = {key: values for preset in presets.values() for key, values in preset.items()}
    if name not in presets and name not in sets:
        known = ", ".join([*own, *presets, *sets]) or f"none: {folder} does not exist"
        raise UserError(
            f"--sets {name}: not a preset or a set of one (known: {known}); give name=path for a set of your own"
        )
    return presets[name] if name in presets else {name: sets[name]}


def _read(path: Path) -> dict[str, dict[str, Any]]:
    """The sets of a YAML file, each with the file's common settings."""
    where, source = f"--sets {path}", Source(f"--sets {path}", has_lines=True)
    try:
        raw = plain(parse(path.read_text(encoding="utf-8"), source), source)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{where}: cannot be read: {error}") from None
    if not isinstance(raw, dict):
        raise UserError(f"{where}: expected sets under data.eval_sets, and their settings by name")
    if unread := sorted(raw.keys() - _NOT_EVALUATED - {"data", "eval"}):
        raise UserError(
            f"{where}: only `data` and `eval` of such a file are read, and it has '{unread[0]}': give that on the"
            " command line, or a reward in the set's own entry"
        )
    # called only for its errors: a reference such as ${seed} is to a setting of the run or config, so it stays
    config_from_values({key: value for key, value in raw.items() if value is not None}, where)
    data, sampling = raw.get("data") or {}, raw.get("eval") or {}
    # beside training sets, `where` is about their rows
    inherited = (_COMMON | _DROPS_ROWS) - ({"where"} if data.keys() & {"train_path", "train_sets"} else set())
    common = {key: value for key, value in (data | sampling).items() if key in inherited}
    sets = {name: {"path": own} for name, own in data.get("eval_paths", {}).items()} | data.get("eval_sets", {})
    if merged := {name: _merged(common, own) for name, own in sets.items()}:
        return merged
    raise UserError(f"{where}: has no set under data.eval_sets")


def _merged(common: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """A set's own settings over the file's common ones. As in a config, null means not set, and with a `template` of
    its own a set inherits no template settings."""
    present = {key: value for key, value in own.items() if value is not None}
    not_inherited = _TEMPLATE if present.get("template") else set()
    return {key: value for key, value in common.items() if key not in not_inherited} | present


def _located(sets: dict[str, dict[str, Any]], word: str, data: Path | None) -> dict[str, dict[str, Any]]:
    """The sets with relative paths resolved against `data`. Raises UserError for a path that does not exist."""
    for name, values in sets.items():
        relative = values.get("path") or ""
        if not relative or relative.startswith("hub:") or Path(relative).is_absolute():
            continue
        path = (data or Path()) / relative
        if not path.exists():
            hint = "" if data else "; --data DIR says in which directory they are"
            raise UserError(
                f"--sets {word}: the set '{name}' needs '{path}', which does not exist{hint} (`dppo-megatron data`"
                " writes the known sets)"
            )
        values["path"] = str(path)
    return sets


def _find_target(text: str, step: int | None, *, follows: bool) -> _Target:
    """The target of a Hugging Face directory, a run directory, or a checkpoint (checkpoints/step_000020, or a converted
    one). Raises UserError if it is none of these, or the run has no checkpoint of `step`.

    Args:
        follows: it is a run directory, which need not have a checkpoint yet: the target has no model.
    """
    path = Path(text)
    if follows:
        return _of_run(path, None, path / FOLLOWED)
    if not path.is_dir():
        raise UserError(
            f"'{text}': no such directory; give a Hugging Face model, a run directory, one of its checkpoints, or a"
            f" config file (.yaml){how_to_download(text)}"
        )
    is_model, is_run = (path / "config.json").is_file(), (path / "config.yaml").is_file()
    if step is not None and not is_run:
        raise UserError(f"--step {step}: '{text}' is not a run directory (it has no config.yaml)")
    if is_run and not is_model:
        return _of_run(path, step)
    if is_model and (path / "manifest.json").is_file():
        return _of_checkpoint(path)
    if is_model:
        config = _read_json(path / "config.json")
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "")
        return _Target(path, Path("eval") / path.resolve().name, _defaults(path, dtype), str(path), dtype)
    raise UserError(
        f"'{text}' holds neither config.json (a Hugging Face model or a checkpoint) nor config.yaml (a run directory)"
    )


def _of_run(run: Path, step: int | None, out: Path | None = None) -> _Target:
    settings, where = saved_values(run / "config.yaml"), str(run / "config.yaml")
    if out is not None:
        return _Target(None, out, settings, where)
    found = named(run / "checkpoints")
    fitting = (path for number, path in reversed(found) if step in (None, number))
    complete = (path for path in fitting if not isinstance(read_manifest(path), str))  # reads no more than needed
    hf = run / "hf" if step is None and (run / "hf" / "config.json").is_file() else None
    # without summary.json, hf/ is from an earlier end of a run that has been resumed
    model = hf if hf and (run / "summary.json").is_file() else next(complete, hf)
    if model is None and step is not None:
        existing = ", ".join(str(number) for number, _ in found if number != step) or "none"
        raise UserError(f"--step {step}: '{run}' has no such checkpoint; there are: {existing}")
    if model is None:
        raise UserError(f"'{run}' holds neither hf/ nor a complete checkpoint yet: there is no model to evaluate")
    return _Target(model, run / "eval" / model.name, settings, where)


def _of_checkpoint(path: Path) -> _Target:
    manifest = read_manifest(path)
    if isinstance(manifest, str):
        raise UserError(f"'{path}' is not a complete checkpoint: {manifest}")
    # runs/x/checkpoints/step_000020 -> runs/x/eval/step_000020
    run = path.resolve().parent.parent
    out = (run if (run / "config.yaml").is_file() else Path()) / "eval" / path.resolve().name
    return _Target(path, out, manifest.config, str(path / "manifest.json"))


def _used_settings(settings: Mapping[str, Any], overrides: Sequence[str]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The settings of a run that an evaluation uses, and lines for the log.

    Without the run's server addresses, because these servers may serve another run by now, and an evaluation would load
    other weights into them; and without settings that need those servers, or that need any server if the command line's
    `overrides` name none.
    """
    unused = ("checkpoint", "run_dir", "sft", "actor")  # the trainer's, or about files that may not exist here
    used = {key: value for key, value in settings.items() if key not in unused}
    data = {key: value for key, value in (used.get("data") or {}).items() if key not in ("train_path", "train_sets")}
    rollout = dict(used.get("rollout") or {})
    engine, sync = rollout.pop("engine", "hf"), dict(rollout.get("sync") or {})
    servers = {key: value for key, value in (rollout.get("servers") or {}).items() if key not in _SERVER_KEYS}
    for key in ("async_steps", "speculation"):  # scores do not depend on these
        rollout.pop(key, None)
    if sync.get("channel") in ("ipc", "nccl"):  # these send from a GPU's memory; here weights come from files
        del sync["channel"]
    notes = []
    if engine != "hf":
        notes.append(
            f"the run's {engine} servers are not used, they may be another run's by now; rollout.engine={engine} with"
            " rollout.servers.launch=local or rollout.servers.endpoints=[...] names servers for this evaluation"
        )
    now = read_config("", [item for item in overrides if item.startswith("rollout")]).rollout
    dropped = "off" if now.engine != "hf" else rollout.pop("quantization", "off")
    if dropped != "off":
        notes.append(f"the hf engine uses unquantized weights (the run: rollout.quantization = {dropped})")
    return used | {"data": data, "rollout": rollout | {"servers": servers, "sync": sync}}, tuple(notes)


def _defaults(model: Path, dtype: str) -> dict[str, Any]:
    """Settings for a model without a run: its dtype if there is a setting for it (not for float16), and a template for
    boxed answers, as a chat if it has one."""
    tokenizer = _read_json(model / "tokenizer_config.json")
    has_template = (model / "chat_template.jinja").is_file() or tokenizer.get("chat_template")
    return {
        "model": {"dtype": dtype if dtype in ("float32", "bfloat16") else "bfloat16"},
        "data": {"template": "chat_boxed" if has_template else "plain_boxed"},
    }


def _read_json(path: Path) -> dict[str, Any]:
    """Empty if it cannot be read: the error is reported where the model is loaded."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return raw if isinstance(raw, dict) else {}
