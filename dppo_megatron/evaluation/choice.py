"""Resolves `--sets`: presets, files of sets, and plain paths.

A file of sets is a config file with only `data` and `eval`; these apply to its own sets only, so several files can be
given together. Settings under `eval.` or `data.` on the command line override those of the files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from dppo_megatron.config.data import EvalSetConfig
from dppo_megatron.config.schema import Config
from dppo_megatron.config.shipped import shipped
from dppo_megatron.types import UserError

_SET_KEYS = tuple(item.name for item in fields(EvalSetConfig))


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


def chosen_sets(words: Sequence[str], data: Path | None, settings: Sequence[str]) -> dict[str, dict[str, Any]]:
    """`data.eval_sets` for the sets that `words` name.

    Args:
        words: each the name of a preset (`six`) or of a set in one (`aime24`), several with commas between; a YAML
            file with sets; or name=path.
        data: directory that relative paths of presets and files are in.
        settings: of the command line, `key=value`.

    Raises:
        UserError: a name that is in no preset, or a duplicate name.
    """
    found: dict[str, dict[str, Any]] = {}
    for word in words:
        name, separator, path = word.partition("=")
        if separator:
            if not name or not path:
                raise UserError(f"--sets {word}: expected name=path")
            new: dict[str, dict[str, Any]] = {name: {"path": path}}
        elif word.endswith((".yaml", ".yml")):
            new = _located(_read(Path(word)), word, data)
        else:
            new = {}
            for part in word.split(","):
                new |= _preset(part, data)
        both = found.keys() & new.keys()
        if both:
            raise UserError(f"--sets: the set '{min(both)}' is given twice; names must differ")
        found |= new
    said = {item.split("=")[0] for item in settings}
    return {name: without(values, said) for name, values in found.items()}


def without(values: Mapping[str, Any], said: set[str]) -> dict[str, Any]:
    """A set's settings without those that the command line sets for all sets, such as eval.samples or data.template."""
    return {key: value for key, value in values.items() if not {f"eval.{key}", f"data.{key}"} & said}


def _preset(name: str, data: Path | None) -> dict[str, dict[str, Any]]:
    """All sets of a preset, or the one set of that name."""
    folder = shipped("configs", "eval")
    files = {path.stem: path for path in sorted(folder.glob("*.yaml"))}
    if name in files:
        return _located(_read(files[name]), name, data)
    sets = {key: values for path in files.values() for key, values in _read(path).items()}
    if name not in sets:
        known = ", ".join([*files, *sets]) or f"none, for {folder} is not there"
        raise UserError(
            f"--sets {name}: no preset and no set of one (known: {known}); give name=path for a set of your own"
        )
    return _located({name: sets[name]}, name, data)


def _read(path: Path) -> dict[str, dict[str, Any]]:
    """The sets of a file, each with the file's common settings."""
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise UserError(f"--sets {path}: cannot be read: {error}") from None
    raw = _mapping(raw, str(path), ("data", "eval"))
    general = _mapping(raw.get("data") or {}, f"{path}: data", (*_SET_KEYS, "eval_sets", "eval_paths"))
    general |= _mapping(raw.get("eval") or {}, f"{path}: eval", _SET_KEYS)
    sets = _mapping(general.pop("eval_sets", None) or {}, f"{path}: data.eval_sets")
    paths = _mapping(general.pop("eval_paths", None) or {}, f"{path}: data.eval_paths")
    sets |= {name: {"path": where} for name, where in paths.items()}
    if not sets:
        raise UserError(f"--sets {path}: has no set under data.eval_sets")
    found = {}
    for name, given in sets.items():
        values = general | _mapping(given, f"{path}: data.eval_sets.{name}", _SET_KEYS)
        if not isinstance(values.get("path"), str) or not values["path"]:
            raise UserError(f"{path}: data.eval_sets.{name}.path is not set; give the file of its problems")
        found[str(name)] = values
    return found


def _located(sets: dict[str, dict[str, Any]], word: str, data: Path | None) -> dict[str, dict[str, Any]]:
    """The sets with relative paths resolved against `data`. Raises UserError for a missing one."""
    for name, values in sets.items():
        if values["path"].startswith("hub:") or Path(values["path"]).is_absolute():
            continue
        path = (data or Path()) / values["path"]
        if not path.exists():
            hint = "" if data else "; --data DIR says in which directory they are"
            raise UserError(
                f"--sets {word}: the set '{name}' needs '{path}', which is not there{hint} (`dppo-megatron data` writes"
                " the known sets)"
            )
        values["path"] = str(path)
    return sets


def _mapping(value: Any, where: str, known: Sequence[str] = ()) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"{where}: expected a mapping, got {value!r}")
    for key in value:
        if known and key not in known:
            raise UserError(f"{where}: unknown key '{key}'; known here: {', '.join(known)}")
    return dict(value)
