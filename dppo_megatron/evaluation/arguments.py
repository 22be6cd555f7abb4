"""Resolves the command line of `eval`: which model, which sets, which settings, and where results go.

A set is given as the name of a preset (`six`) or of a set in one (`aime24`), as name=path, or in a YAML file with only
`data` and `eval`, which apply to its own sets. Settings under `eval.` or `data.` on the command line override those of
files.
"""

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

_COMMON = {item.name for item in fields(EvalSetConfig)} - {"where", "overlong"}
"""What a set that leaves it out has from `data` or `eval`; rows are left out of an evaluation by its own entry only, or
by an `overlong` of the command line or of a file of sets."""
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
    """`model` is a run, which may not have a checkpoint yet."""


@dataclass(frozen=True, slots=True)
class _Target:
    """A model to evaluate and the settings that come with it."""

    model: Path | None
    """Directory of a Hugging Face or a Megatron distributed checkpoint, with its tokenizer; None: the settings'."""
    out: Path
    """Where results go unless --out says otherwise."""
    settings: Mapping[str, Any]
    where: str


def prepare(given: EvalArguments) -> tuple[Config, Path, tuple[str, ...]]:
    """The checked settings, the output directory, and lines to print. Raises UserError."""
    if given.limit < 0:
        raise UserError(f"--limit {given.limit}: must not be negative")
    is_config = given.model.endswith((".yaml", ".yml"))
    if is_config and given.step is not None:
        raise UserError("--step belongs to a run directory, not to a config file")
    target, said = None, tuple[str, ...]()
    if not is_config:
        target = _followed(Path(given.model)) if given.follow else _find_target(given.model, given.step)
    own = _own_sets(target) if target is not None else {}
    sets = _chosen_sets(given.sets, given.data, own)
    layers: list[tuple[str, Mapping[str, Any]]] = []
    if sets:  # instead of those of the run or config, also where a name is the same
        layers = [("--sets", {"data": {"eval_paths": {}, "eval_sets": {}}}), ("--sets", {"data": {"eval_sets": sets}})]
    if target is not None:
        own, said = _without_servers(_settings_of(target), given.settings)
        model = {"hf_path": str(target.model)} if target.model is not None else {}
        layers = [(target.where, own), ("MODEL", {"model": model}), *layers]
    path = given.model if is_config else ""
    layers += _said_for_all(path, given.settings, layers)
    config = load_config(path, list(given.settings), writes_run=False, purpose="evaluate", layers=layers)
    data = config.data
    # of training sets their templates alone: where those end a turn, the run's own evaluations end completions too
    trained = train_set_configs(config if target is None else _as_saved(target, ("train_path", "train_sets")))
    data.train_path = ""
    data.train_sets = {name: TrainSetConfig(**asdict(of.template)) for name, of in trained.items()}
    config.rollout.servers.colocate = False  # there is no actor whose GPUs the servers could share
    overlong = data.overlong if any(item.startswith("data.overlong=") for item in given.settings) else None
    if given.limit or overlong:  # which a path alone cannot have
        as_sets = {name: EvalSetConfig(path=path, overlong=overlong) for name, path in data.eval_paths.items()}
        data.eval_sets, data.eval_paths = as_sets | data.eval_sets, {}
    if given.limit:
        for of in data.eval_sets.values():
            of.limit = min(given.limit, of.limit or given.limit)
    return config, given.out or (Path("eval") / Path(given.model).stem if target is None else target.out), said


def _said_for_all(
    path: str, settings: Sequence[str], layers: Sequence[tuple[str, Mapping[str, Any]]]
) -> list[tuple[str, Mapping[str, Any]]]:
    """Layers in which what the command line says for all sets, such as eval.samples or data.template, is in place of
    what each has of its own; what it says of one set goes before that."""
    said = {".".join(item.partition("=")[0].split(".")[:2]) for item in settings}  # data.chat_template_kwargs.x too
    keys = {key for key in {*_COMMON, "overlong"} if {f"data.{key}", f"eval.{key}"} & said}
    if not keys:
        return []
    data = read_config(path, list(settings), layers).data
    values = config_values(data)
    # of a template's settings the value itself, for it goes before what the set's `template` says
    of_each = (dict.fromkeys(keys), {key: values[key] for key in keys & {*_TEMPLATE, "overlong"}})
    return [("the command line", {"data": {"eval_sets": dict.fromkeys(data.eval_sets, one)}}) for one in of_each]


def _settings_of(target: _Target) -> dict[str, Any]:
    """Of the run or checkpoint, as far as they are of use here."""
    settings, data = dict(target.settings), dict(target.settings.get("data") or {})
    for key in ("checkpoint", "run_dir", "sft", "actor"):  # of the trainer, or about files that may be absent here
        settings.pop(key, None)
    for key in ("train_path", "train_sets"):
        data.pop(key, None)
    return settings | {"data": data}


def _as_saved(target: _Target, names: Collection[str]) -> Config:
    """A config that has these sets of the run's and the templates of its `data`. Raises UserError for what is none."""
    saved = target.settings.get("data") or {}
    if isinstance(saved, dict):
        saved = {key: value for key, value in saved.items() if key in {*names, *_TEMPLATE}}
    return config_from_values({"data": saved}, target.where)


def _own_sets(target: _Target) -> dict[str, dict[str, Any]]:
    """Those of the run, with paths that hold from here. Raises UserError for sets that are none."""
    data = _as_saved(target, ("eval_paths", "eval_sets")).data
    sets = {name: {"path": path} for name, path in data.eval_paths.items()}
    return sets | {name: config_values(entry) for name, entry in data.eval_sets.items()}


def _chosen_sets(
    words: Sequence[str], data: Path | None, own: Mapping[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """`data.eval_sets` for the sets that `words` name; `data` is the directory that relative paths of presets and files
    are in, `own` are the run's. Raises UserError for a name that is in neither, or a duplicate one."""
    found: dict[str, dict[str, Any]] = {}
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
        if both := found.keys() & new.keys():
            raise UserError(f"--sets: the set '{min(both)}' is given twice; names must differ")
        found |= new
    return found


def _preset(name: str, own: Collection[str]) -> dict[str, dict[str, Any]]:
    """All sets of a preset, or the one set of that name."""
    folder = shipped("configs", "eval")
    presets = {path.stem: _read(path) for path in sorted(folder.glob("*.yaml"))}
    sets = {key: values for preset in presets.values() for key, values in preset.items()}
    if name not in presets and name not in sets:
        known = ", ".join([*own, *presets, *sets]) or f"none, for {folder} is not there"
        raise UserError(
            f"--sets {name}: no preset and no set of one (known: {known}); give name=path for a set of your own"
        )
    return presets[name] if name in presets else {name: sets[name]}


def _read(path: Path) -> dict[str, dict[str, Any]]:
    """The sets of a file, each with the file's common settings."""
    try:
        source = Source(f"--sets {path}", has_lines=True)
        raw = plain(parse(path.read_text(encoding="utf-8"), source), source)
        data, sampling = dict(raw.pop("data", None) or {}), dict(raw.pop("eval", None) or {})
        sets = {name: {"path": where} for name, where in (data.pop("eval_paths", None) or {}).items()}
        sets |= data.pop("eval_sets", None) or {}
        general = {key: value for key, value in (data | sampling).items() if key in {*_COMMON, "overlong"}}
        found = {str(name): _over(general, values) for name, values in sets.items()}
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--sets {path}: cannot be read: {error}") from None
    except (AttributeError, TypeError, ValueError):
        raise UserError(f"--sets {path}: expected sets under data.eval_sets, and their settings by name") from None
    if not found:
        raise UserError(f"--sets {path}: has no set under data.eval_sets")
    # raises what is wrong with them
    config_from_values({"data": data | {"eval_sets": found}, "eval": sampling, **raw}, f"--sets {path}")
    return found


def _over(general: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """A set's settings over a file's: null is as in a config left out, and a `template` fixes all of a template's."""
    said = {key: value for key, value in own.items() if value is not None}
    fixed = _TEMPLATE if said.get("template") else set()
    return {key: value for key, value in general.items() if key not in fixed} | said


def _located(sets: dict[str, dict[str, Any]], word: str, data: Path | None) -> dict[str, dict[str, Any]]:
    """The sets with relative paths resolved against `data`. Raises UserError for a missing one."""
    for name, values in sets.items():
        own = values.get("path") or ""
        if not own or own.startswith("hub:") or Path(own).is_absolute():
            continue
        path = (data or Path()) / own
        if not path.exists():
            hint = "" if data else "; --data DIR says in which directory they are"
            raise UserError(
                f"--sets {word}: the set '{name}' needs '{path}', which is not there{hint} (`dppo-megatron data` writes"
                " the known sets)"
            )
        values["path"] = str(path)
    return sets


def _find_target(text: str, step: int | None) -> _Target:
    """A Hugging Face directory, a run directory, or a checkpoint (checkpoints/step_000020, converted ones too). Raises
    UserError: it is none of these, or the run has no checkpoint of `step`."""
    path = Path(text)
    if not path.is_dir():
        raise UserError(
            f"'{text}': no such directory; give a Hugging Face model, a run directory, one of its checkpoints, or a"
            f" config file (.yaml){how_to_download(text)}"
        )
    is_model, is_run = (path / "config.json").is_file(), (path / "config.yaml").is_file()
    if step is not None and not is_run:
        raise UserError(f"--step {step}: '{text}' is no run directory (it has no config.yaml)")
    if is_run and not is_model:
        return _of_run(path, step)
    if is_model and (path / "manifest.json").is_file():
        return _of_checkpoint(path)
    if is_model:
        return _Target(path, Path("eval") / path.resolve().name, _defaults(path), str(path))
    raise UserError(
        f"'{text}' holds neither config.json (a Hugging Face model or a checkpoint) nor config.yaml (a run directory)"
    )


def _of_run(run: Path, step: int | None) -> _Target:
    there_are = named(run / "checkpoints")
    steps = {number: path for number, path in there_are if not isinstance(read_manifest(path), str)}
    if step is not None:
        if step not in steps:
            there = ", ".join(str(number) for number in sorted(steps)) or "none"
            raise UserError(f"--step {step}: '{run}' has no such checkpoint; there are: {there}")
        model = steps[step]
    elif (run / "hf" / "config.json").is_file() and ((run / "summary.json").is_file() or not steps):
        model = run / "hf"  # without summary.json the run goes on, and has written it at an earlier end
    elif steps:
        model = steps[max(steps)]
    else:
        raise UserError(f"'{run}' holds neither hf/ nor a complete checkpoint yet: there is no model to evaluate")
    return _Target(model, run / "eval" / model.name, saved_values(run / "config.yaml"), str(run / "config.yaml"))


def _followed(run: Path) -> _Target:
    return _Target(None, run / FOLLOWED, saved_values(run / "config.yaml"), str(run / "config.yaml"))


def _of_checkpoint(path: Path) -> _Target:
    manifest = read_manifest(path)
    if isinstance(manifest, str):
        raise UserError(f"'{path}' is no complete checkpoint: {manifest}")
    # runs/x/checkpoints/step_000020 -> runs/x/eval/step_000020
    run = path.resolve().parent.parent
    out = (run if (run / "config.yaml").is_file() else Path()) / "eval" / path.resolve().name
    return _Target(path, out, manifest.config, str(path / "manifest.json"))


def _without_servers(settings: dict[str, Any], given: Sequence[str]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Drop the run's server addresses, for they may serve another run by now, and an evaluation loads other weights;
    and what only those servers can do, or servers at all if the settings `given` on the command line name none. Returns
    lines for the log too."""
    rollout = dict(settings.get("rollout") or {})
    engine, sync = rollout.pop("engine", "hf"), dict(rollout.get("sync") or {})
    servers = {key: value for key, value in (rollout.get("servers") or {}).items() if key not in _SERVER_KEYS}
    for key in ("async_steps", "speculation"):  # no scores depend on them
        rollout.pop(key, None)
    if sync.get("channel") in ("ipc", "nccl"):  # from the memory of a GPU
        del sync["channel"]
    said = []
    if engine != "hf":
        said.append(
            f"the run's {engine} servers are not used, they may be another run's by now; rollout.engine={engine} with"
            " rollout.servers.launch=local or rollout.servers.endpoints=[...] names servers for this evaluation"
        )
    now = read_config("", [item for item in given if item.startswith("rollout")]).rollout
    held = "off" if now.engine != "hf" else rollout.pop("quantization", "off")
    if held != "off":
        said.append(f"the weights are not rounded (the run: rollout.quantization = {held}), which the hf engine cannot")
    return settings | {"rollout": rollout | {"servers": servers, "sync": sync}}, tuple(said)


def _defaults(model: Path) -> dict[str, Any]:
    """Settings for a model alone: its dtype, and a prompt for a boxed answer, as a chat turn if it has a template."""
    config = _read_json(model / "config.json")
    dtype = config.get("dtype") or config.get("torch_dtype")
    chats = (model / "chat_template.jinja").is_file() or _read_json(model / "tokenizer_config.json").get(
        "chat_template"
    )
    return {
        "model": {"dtype": dtype if dtype in ("float32", "bfloat16") else "bfloat16"},
        "data": {"template": "chat_boxed" if chats else "plain_boxed"},
    }


def _read_json(path: Path) -> dict[str, Any]:
    """Empty if it cannot be read: what is wrong with it is reported where the model is read."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return raw if isinstance(raw, dict) else {}
