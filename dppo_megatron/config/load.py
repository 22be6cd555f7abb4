"""Reads YAML files and `key=value` overrides into a checked `Config`; errors name the key, the place and the fix.

    defaults: quickstart.yaml      # the parents: a file or a list, relative to this file
    run_dir: runs/quickstart_grpo

A file overrides its parents, the command line overrides all. Sections are merged setting by setting and mappings of
names (data.eval_paths) name by name; `{}` in a file or on the command line drops the inherited entries.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from dppo_megatron.config.checks import Purpose, check_run_dir, check_values
from dppo_megatron.config.paths import import_as_in, nearest_config, shown, working_directory
from dppo_megatron.config.references import escaped
from dppo_megatron.config.schema import Config
from dppo_megatron.config.yaml12 import MAX_CHARACTERS, TEXT, Dumper, Source, parse
from dppo_megatron.files import write_text
from dppo_megatron.types import UserError

_PARENTS = "defaults"


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
        writes_run: the caller will write `run_dir`, so it must be set and must not hold another run.
        layers: settings applied between the file and the overrides, each as (where they came from, settings).

    Raises:
        UserError: a file is missing or not a mapping, a key is unknown, a value has the wrong type or range.
    """
    config = read_config(path, overrides, layers)
    if writes_run and not any(item.startswith("run_dir=") for item in overrides):
        _check_moved(path, config.run_dir)
    for where in (path, *(where for where, _ in layers)):  # only here: `read_config` must not change sys.path
        import_as_in(where)
    if writes_run and working_directory(config.run_dir):  # the run's files hold paths as seen from where it was started
        from dppo_megatron.config.layers import merged

        config = merged(_saved(config_values(config), "", os.getcwd()))
    check_values(config, purpose)
    if writes_run:
        check_run_dir(config)
    return config


def read_config(path: str, overrides: list[str], layers: Sequence[tuple[str, Mapping[Any, Any]]] = ()) -> Config:
    """As `load_config`, without the checks of ranges and files."""
    from dppo_megatron.config.layers import merged  # here, as OmegaConf takes 0.06 s: --help and Tab do not need it

    own = _documents(Path(path), ()) if path else []
    between = [document for where, values in layers for document in _saved(values, where)]
    return merged([*own, *between], overrides)


def _check_moved(path: str, run_dir: str) -> None:
    """Raise `UserError` if `path` is a run's own config.yaml and its `run_dir` is not the directory that it is in."""
    directory = Path(path).resolve().parent
    is_of_run = Path(path).name == "config.yaml" and (directory / "run.json").is_file()
    if is_of_run and run_dir and Path(run_dir).resolve() != directory:
        raise UserError(
            f"{path}: this run was moved or copied: its run_dir is '{shown(run_dir)}'. Choose the directory:"
            f" run_dir={shlex.quote(str(Path(path).parent))} or run_dir={shlex.quote(shown(run_dir))}"
        )


def config_from_values(values: Mapping[str, Any], where: str, *, keep_references: bool = True) -> Config:
    """A `Config` from plain values that another run saved; types and keys are checked, files and ranges are not.
    References to the environment stay as written, or are resolved."""
    from dppo_megatron.config.layers import merged

    return merged(_saved(values, where), keep_references=keep_references)


def config_values(config: Any) -> dict[str, Any]:
    """All settings of a `Config` or section as plain nested values; references to the environment stay such."""
    return cast(dict[str, Any], _escaped(asdict(config)))


def save_config(config: Config, path: Path) -> None:
    """Write the whole configuration as YAML; `load_config` reads it back to an equal `Config`."""
    write_text(path, _dumped(config_values(config)))


def _dumped(values: Any) -> str:
    # In ASCII (yaml.dump's default): PyYAML would write U+0085 and others as they are, and read them as line breaks.
    return str(yaml.dump(values, Dumper=Dumper, sort_keys=False, width=120))


def _saved(values: Mapping[Any, Any], where: str, base: str = "") -> list[tuple[Source, Node]]:
    """Settings that are plain values already, as a run has saved them."""
    source = Source(where, has_lines=False, base=base or working_directory(where))
    try:
        node = parse(_dumped(dict(values)), source)
    except (yaml.YAMLError, RecursionError):
        raise UserError(f"{where}: holds no settings") from None
    return [(source, node)] if node is not None else []


def _escaped(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _escaped(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_escaped(entry) for entry in value]
    return escaped(value) if isinstance(value, str) else value


def _documents(path: Path, chain: tuple[Path, ...]) -> list[tuple[Source, Node]]:
    """The documents of a file's parents, recursively, and then its own. `chain`: the files that led to this one."""
    source = Source(str(path), has_lines=True, base=working_directory(path))
    node = _document(path, source, chain)
    if node is None:
        return []
    if not isinstance(node, MappingNode):
        raise UserError(f"config file '{path}' must hold a mapping of keys to values")
    own = [(key, value) for key, value in node.value if key.value == _PARENTS]
    if len(own) > 1:
        raise UserError(f"{source.where(own[1][0])}: the key '{_PARENTS}' appears twice; it takes a list")
    parents = [name for _, value in own for name in _parents(value, source)]
    node.value = [pair for pair in node.value if pair not in own]
    inherited = [document for name in parents for document in _documents(path.parent / name, (*chain, path))]
    return [*inherited, (source, node)]


def _parents(node: Node, source: Source) -> list[str]:
    nodes = node.value if isinstance(node, SequenceNode) else [node]
    for item in nodes:
        if not isinstance(item, ScalarNode) or item.tag != TEXT or not item.value:
            raise UserError(f"{source.where(node)}: {_PARENTS} must be the parent's file, or a list of files")
    return [item.value for item in nodes]


def _document(path: Path, source: Source, chain: tuple[Path, ...]) -> Node | None:
    role = f", a parent of '{chain[-1]}'," if chain else ""
    try:
        cycle = [str(p) for p in (*chain, path)] if path.resolve() in [p.resolve() for p in chain] else []
        with open(path, "rb") as file:
            content = b"" if cycle else file.read(4 * MAX_CHARACTERS + 1)  # bounded: a device may never end
    except FileNotFoundError:
        more = f"; {nearest_config('' if chain else str(path))}"
        raise UserError(f"config file '{path}'{role} does not exist (working directory: {Path.cwd()}){more}") from None
    except (OSError, ValueError, RuntimeError) as error:  # ValueError: a NUL in the name; OSError: circular links
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"config file '{str(path)[:200]}'{role} cannot be read: {reason}") from None
    if cycle:
        raise UserError(f"config file '{chain[-1]}': its {_PARENTS} form a cycle: {' -> '.join(cycle)}")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"{path}:{line}: not UTF-8 (byte 0x{content[error.start]:02x}); save the file as UTF-8"
        ) from None
    return parse(text, source, called=f"config file '{path}'")
