"""From a YAML file and `key=value` overrides to a checked `Config`, with errors that name key, file and fix."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, cast, get_args, get_type_hints

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dppo_megatron.config.checks import Purpose, check_run_dir, check_values
from dppo_megatron.config.schema import Config
from dppo_megatron.types import UserError


def load_config(
    path: str,
    overrides: list[str],
    *,
    writes_run: bool = True,
    purpose: Purpose = "train",
    layers: Sequence[tuple[str, Mapping[Any, Any]]] = (),
) -> Config:
    """Read `path`, apply `key=value` overrides (dotted keys, YAML values) and check every value.

    Args:
        path: empty: begin from the defaults.
        purpose: an evaluation needs no training data, grading no model either.
        layers: settings between the file and the overrides, each with where it came from.
        writes_run: the caller will write `run_dir`, so it must be given and must not hold a run already.

    Raises:
        UserError: the file is missing or no mapping, a key is unknown, a value has the wrong type or range.
    """
    merged = OmegaConf.structured(Config)
    if path:
        merged = _merge(merged, _read(path), where=path)
    for where, values in layers:
        merged = _merge(merged, OmegaConf.create(dict(values)), where=where)
    for item in overrides:
        key, separator, _ = item.partition("=")
        if not separator or not key:
            raise UserError(f"override '{item}': expected key=value, for example actor.layout.tensor_parallel=2")
        merged = _merge(merged, _parse_override(item), where=f"override '{item}'")
    config = cast(Config, OmegaConf.to_object(merged))
    check_values(config, purpose)
    if writes_run:
        check_run_dir(config)
    return config


def config_from_values(values: dict[str, Any], where: str) -> Config:
    """A `Config` from plain values that another run saved; types and keys are checked, files and ranges are not."""
    merged = _merge(OmegaConf.structured(Config), OmegaConf.create(values), where=where)
    return cast(Config, OmegaConf.to_object(merged))


def save_config(config: Config, path: Path) -> None:
    """Write the fully resolved configuration as YAML; `load_config` reads it back to an equal `Config`."""
    path.write_text(OmegaConf.to_yaml(OmegaConf.structured(config)), encoding="utf-8")


def _read(path: str) -> DictConfig:
    if not Path(path).is_file():
        raise UserError(f"config file '{path}' does not exist (working directory: {Path.cwd()})")
    try:
        loaded = OmegaConf.load(path)
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise UserError(f"config file '{path}' is not valid YAML: {error}") from None
    if not isinstance(loaded, DictConfig):
        raise UserError(f"config file '{path}' must hold a mapping of keys to values")
    return loaded


def _parse_override(item: str) -> DictConfig:
    try:
        return OmegaConf.from_dotlist([item])
    except (yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
        raise UserError(f"override '{item}' cannot be parsed: {error}") from None


def _merge(base: DictConfig, update: DictConfig, where: str) -> DictConfig:
    _reject_unknown_keys(Config, OmegaConf.to_container(update), prefix="", where=where)
    try:
        return cast(DictConfig, OmegaConf.merge(base, update))
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or "?"
        reason = str(error).splitlines()[0]
        raise UserError(f"{where}: {key}: {reason}") from None


def _reject_unknown_keys(schema: type, values: Any, prefix: str, where: str) -> None:
    if not isinstance(values, dict):
        return
    known = {item.name: item for item in fields(schema)}
    for key, value in values.items():
        if key not in known:
            near = _nearest_key(f"{prefix}{key}")
            hint = f"; did you mean '{near}'?" if near else f"; known here: {', '.join(sorted(known))}"
            raise UserError(f"{where}: unknown key '{prefix}{key}'{hint}")
        default = known[key].default_factory
        if is_dataclass(default):
            if not isinstance(value, dict):
                raise UserError(f"{where}: '{prefix}{key}' is a section of settings, not a value (got {value!r})")
            _reject_unknown_keys(cast(type, default), value, f"{prefix}{key}.", where)
        elif (entry := _entry_type(schema, key)) is not None and isinstance(value, dict):
            for name, section in value.items():
                _reject_unknown_keys(entry, section, f"{prefix}{key}.{name}.", where)


def _entry_type(schema: type, key: str) -> type | None:
    """The section class of a `dict[str, Section]` field, else None."""
    arguments = get_args(get_type_hints(schema)[key])
    entry = arguments[1] if len(arguments) == 2 else None
    return entry if is_dataclass(entry) else None  # type: ignore[return-value]


def _nearest_key(key: str) -> str | None:
    """The known dotted key closest to `key`: the same last part in another section counts as close."""
    known = list(_all_keys(Config, ""))
    last = key.rsplit(".", 1)[-1]
    same_name = [candidate for candidate in known if candidate.rsplit(".", 1)[-1] == last]
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    by_last = difflib.get_close_matches(last, [k.rsplit(".", 1)[-1] for k in known], n=1, cutoff=0.75)
    if same_name:
        return difflib.get_close_matches(key, same_name, n=1, cutoff=0.0)[0]
    if close:
        return close[0]
    return next((k for k in known if by_last and k.rsplit(".", 1)[-1] == by_last[0]), None)


def _all_keys(schema: type, prefix: str) -> list[str]:
    keys = []
    for item in fields(schema):
        keys.append(prefix + item.name)
        if is_dataclass(item.default_factory):
            keys += _all_keys(cast(type, item.default_factory), f"{prefix}{item.name}.")
    return keys
