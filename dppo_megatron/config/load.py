"""Reads YAML files and `key=value` overrides into a checked `Config`; errors name the key, the place and the fix.

    defaults: quickstart.yaml      # or a list; relative to the file that says so
    run_dir: runs/quickstart_grpo

A file overrides its parents, the command line overrides all. Sections are merged setting by setting and mappings of
names (data.eval_paths) name by name; `{}` in a file or on the command line drops the inherited entries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from dppo_megatron.config.checks import Purpose, check_run_dir, check_values
from dppo_megatron.config.command_line import read_setting, split_key
from dppo_megatron.config.reading import MAX_CHARACTERS, Entries, Reader, Values, parse
from dppo_megatron.config.references import Reference, Resolver, escaped
from dppo_megatron.config.schema import Config
from dppo_megatron.files import write_text
from dppo_megatron.types import UserError

_PARENTS = "defaults"
T = TypeVar("T")


def load_config(
    path: str,
    overrides: list[str],
    *,
    writes_run: bool = True,
    purpose: Purpose = "train",
    layers: Sequence[tuple[str, Mapping[Any, Any]]] = (),
) -> Config:
    """Read `path` and its parents, apply `key=value` overrides (dotted keys) and check every value.

    Args:
        path: empty: begin from the defaults.
        purpose: an evaluation needs no training data, grading no model either.
        layers: settings between the file and the overrides, each with where it came from.
        writes_run: the caller will write `run_dir`, so it must be given and must not hold a run already.

    Raises:
        UserError: a file is missing or not a mapping, a key is unknown, a value has the wrong type or range.
    """
    config = read_config(path, overrides, layers)
    check_values(config, purpose)
    if writes_run:
        check_run_dir(config)
    return config


def read_config(path: str, overrides: list[str], layers: Sequence[tuple[str, Mapping[Any, Any]]] = ()) -> Config:
    """As `load_config`, without the checks of ranges and files."""
    merged: Values = {}
    between = [_given(dict(values), where) for where, values in layers]
    own = _layers(Path(path), ()) if path else []
    for layer in [*own, *between, *(read_setting(item, Config) for item in overrides)]:
        _merge(merged, layer)
    _resolve(merged)
    return _build(Config, merged)


def config_from_values(values: Mapping[str, Any], where: str) -> Config:
    """A `Config` from plain values that another run saved; types and keys are checked, files and ranges are not.
    References in it stay as they were written."""
    return _build(Config, _given(dict(values), where, keeps_references=True))


def config_values(config: Any) -> dict[str, Any]:
    """All settings of a `Config`, or of a section, as plain nested values, as files hold them: a path from the
    environment as its reference."""
    return {item.name: _plain(getattr(config, item.name)) for item in fields(config)}


def save_config(config: Config, path: Path) -> None:
    """Write the whole configuration as YAML; `load_config` reads it back to an equal `Config`."""
    # ASCII only: PyYAML writes U+0085 and others as they are, and reads them as line breaks
    write_text(path, yaml.safe_dump(config_values(config), sort_keys=False, width=120))


def _given(values: dict[str, Any], where: str, *, keeps_references: bool = False) -> Values:
    """Settings that are plain values already."""
    try:
        node = parse(yaml.safe_dump(values, sort_keys=False), where)
    except (yaml.YAMLError, RecursionError):
        raise UserError(f"{where}: holds no settings") from None
    reader = Reader(Config, where, has_lines=False, keeps_references=keeps_references)
    return reader.section(Config, node) if node is not None else {}


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return config_values(value)
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    return escaped(value) if isinstance(value, str) else value


def _layers(path: Path, chain: tuple[Path, ...]) -> list[Values]:
    """The settings of a file, after those of its parents."""
    source = str(path)
    node = _document(path, chain)
    if node is None:
        return [{}]
    if not isinstance(node, MappingNode):
        raise UserError(f"config file '{source}' must hold a mapping of keys to values")
    own = [(key, value) for key, value in node.value if getattr(key, "value", None) == _PARENTS]
    reader = Reader(Config, source, has_lines=True)
    layers: list[Values] = []
    if len(own) > 1:
        raise UserError(f"{reader.where(own[1][0])}: the key '{_PARENTS}' stands here twice; it takes a list")
    for parent in _parents(own[0][1], reader) if own else []:
        layers += _layers(path.parent / parent, (*chain, path))
    rest = [pair for pair in node.value if pair not in own]
    return [*layers, reader.section(Config, MappingNode(node.tag, rest, node.start_mark, node.end_mark))]


def _parents(node: Node, reader: Reader) -> list[str]:
    nodes = node.value if isinstance(node, SequenceNode) else [node]
    for item in nodes:
        if not isinstance(item, ScalarNode) or item.tag != "tag:yaml.org,2002:str" or not item.value:
            raise UserError(f"{reader.where(node)}: {_PARENTS} names the parent's file, or a list of files")
    return [item.value for item in nodes]


def _document(path: Path, chain: tuple[Path, ...]) -> Node | None:
    of = f", a parent of '{chain[-1]}'," if chain else ""
    try:
        circle = [str(p) for p in (*chain, path)] if path.resolve() in [p.resolve() for p in chain] else []
        with open(path, "rb") as file:
            content = b"" if circle else file.read(4 * MAX_CHARACTERS + 1)  # a device could be read for ever
    except FileNotFoundError:
        raise UserError(f"config file '{path}'{of} does not exist (working directory: {Path.cwd()})") from None
    except (OSError, ValueError, RuntimeError) as error:  # ValueError: a NUL in the name; OSError: circular links
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"config file '{str(path)[:200]}'{of} cannot be read: {reason}") from None
    if circle:
        raise UserError(f"config file '{chain[-1]}': its {_PARENTS} come back to itself: {' -> '.join(circle)}")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"{path}:{line}: not UTF-8 (byte 0x{content[error.start]:02x}); save the file as UTF-8"
        ) from None
    return parse(text, f"config file '{path}'")


def _merge(base: Values, update: Values) -> None:
    for key, value in update.items():
        old = base.get(key)
        if isinstance(value, Entries):
            if isinstance(old, Entries) and not value.replaces:
                _merge(old, value)
            else:
                base[key] = value
        elif isinstance(value, dict) and isinstance(old, dict):
            _merge(old, value)
        else:
            base[key] = value


def _resolve(values: Values) -> None:
    """Replace every `Reference` in `values` by what it refers to."""
    defaults = Config()

    def look_up(key: str) -> Any:
        """The setting's current value: from the file, else its default."""
        found: Any = values
        default: Any = defaults
        for part in split_key(key) or [key]:
            found = found.get(part) if isinstance(found, dict) else None
            default = default.get(part) if isinstance(default, dict) else getattr(default, part, None)
            if found is None and default is None:
                raise KeyError(key)
        if found is None and is_dataclass(default):
            return {}
        return default if found is None else found

    def decode(value: Any, hint: Any, key: str, where: str) -> Any:
        """A reference's value, converted to the type of the setting that holds it."""
        text = value if isinstance(value, str) else yaml.safe_dump(value).partition("\n")[0]
        if hint is str:
            return text
        node = parse(text, where)
        reader = Reader(Config, where.partition(": ")[0], has_lines=False)
        if not isinstance(node, ScalarNode):
            raise UserError(f"{where}: comes to {text!r}, which is no value of this setting")
        return reader.value(hint, node, key)

    resolver = Resolver(look_up, decode)

    def walk(inside: Any, prefix: str) -> None:
        """Resolve the references in this section, at any depth."""
        for key, value in inside.items() if isinstance(inside, dict) else enumerate(inside):
            name = f"{prefix}[{key}]" if isinstance(inside, list) else f"{prefix}.{key}" if prefix else str(key)
            if isinstance(value, Reference):
                inside[key] = resolver.resolve(name, value)
            elif isinstance(value, dict | list):
                walk(value, name)

    walk(values, "")


def _build(schema: type[T], values: Values) -> T:
    """An instance of a settings class; fields that `values` leave out have their defaults."""
    hints = get_type_hints(schema)
    return schema(**{key: _built(hints[key], value) for key, value in values.items()})


def _built(hint: Any, value: Any) -> Any:
    if is_dataclass(hint):
        return _build(cast(type, hint), value)
    if isinstance(value, Entries):
        inside = next((get_args(arm)[1] for arm in (hint, *get_args(hint)) if get_origin(arm) is dict), Any)
        return {name: _built(inside, entry) for name, entry in value.items()}
    return value
