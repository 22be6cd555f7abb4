"""Merges the settings of files and of the command line into a `Config`, with OmegaConf.

OmegaConf knows the schema: names, choices, what may be null, merging and references. But it also converts values ('5'
to 5, 5 to '5', 'on' to true) and keeps no line numbers. So each layer is read here first: a value must have the type of
its setting, and the place of every key is kept. When OmegaConf reports an error for a key, the message names its place.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import is_dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from typing import Any, Literal, cast, get_args, get_origin

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, GrammarParseError, OmegaConfBaseException
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from dppo_megatron.config.other_names import meant
from dppo_megatron.config.ranges import leaves, types_of, without_none
from dppo_megatron.config.reference import unknown_key
from dppo_megatron.config.references import for_omegaconf, from_environment, located, references
from dppo_megatron.config.schema import Config
from dppo_megatron.config.yaml12 import DOUBTFUL, Source, entries, parse, scalar, shown, text_node
from dppo_megatron.types import UserError

_WANTED = {
    bool: "must be true or false",
    int: "must be a whole number",
    float: "must be a number",
    str: "must be text",
    list: "must be a list",
    dict: "must be a mapping of names to values, such as {name: value}",
}

_PART = re.compile(r'"([^"]+)"|\'([^\']+)\'|([^."\'=]+)')


class Layer:
    """The settings of one source."""

    def __init__(self, source: Source, node: Node, above: Sequence[str] = (), *, replaces: bool = False) -> None:
        """Args:
        above: the key of the section or setting that `node` holds, split at its dots; empty: the whole configuration.
        replaces: a mapping of names in it replaces that of the layers below instead of adding to it.
        """
        self._source = source
        self.at: dict[str, tuple[Node, Node, Any]] = {}
        """For each dotted key: its node, the node of its value, and the type of the setting."""
        self.emptied: list[tuple[str, ...]] = []
        """Mappings of which all entries from layers below are dropped."""
        hint: Any = Config
        for name in above:
            hint = inside(hint, name)
        values = self._value(node, node, hint, tuple(above))
        if replaces and isinstance(node, MappingNode) and get_origin(hint) is dict:
            self.emptied.append(tuple(above))
        for name in reversed(above):
            values = {name: values}
        self.values: dict[str, Any] = values

    def where(self, key: str) -> str:
        """The place of a key, for messages."""
        return self._source.where(self.at[key][0]) if key in self.at else self._source.name

    def unknown(self, key: str, section: type) -> UserError:
        """The error for `key`, which `section` does not have."""
        under = [
            name.removeprefix(key)
            for name, (_, node, _) in self.at.items()
            if name.startswith(f"{key}.") and not isinstance(node, MappingNode)
        ]
        texts = {name: str(node.value) for name, (_, node, _) in self.at.items() if isinstance(node, ScalarNode)}
        return unknown_key(self.where(key), key, under[:20], section, texts)

    def refuse(self, key: str, wanted: str = "", more: str = "") -> UserError:
        """The error for the value of `key`: `wanted`, or by default that it has the wrong type."""
        if key not in self.at:  # OmegaConf writes some keys in another way
            return UserError(f"{self._source.name}: {key}: {wanted or 'has the wrong type'}")
        _, node, hint = self.at[key]
        if is_dataclass(hint):
            what = f"'{key}' is a section of settings, not a value" if key else "expected settings"
            return UserError(f"{self.where(key)}: {what} (got {shown(node)}); write key: value under it")
        return UserError(f"{self.where(key)}: {key} = {shown(node)}: {wanted or _wanted(key, hint, node)}{more}")

    def _value(self, at: Node, node: Node, hint: Any, path: tuple[str, ...]) -> Any:
        """The value of `node` in the form that OmegaConf takes. Raises `UserError` if it has the wrong type."""
        key = ".".join(path).replace(".[", "[")
        hint = without_none(hint)
        self.at[key] = at, node, hint
        value: Any
        if isinstance(node, MappingNode):
            value = {
                name: self._value(*pair, inside(hint, name), (*path, name))
                for name, pair in entries(node, self._source).items()
            }
            if not value and get_origin(hint) is dict:
                self.emptied.append(path)
        elif isinstance(node, SequenceNode):
            element = get_args(hint)[0] if get_origin(hint) is list else Any if hint is Any else None
            value = [self._value(item, item, element, (*path, f"[{n}]")) for n, item in enumerate(node.value)]
        else:
            assert isinstance(node, ScalarNode)
            value = self._scalar(node, hint, key)
        form = dict if is_dataclass(hint) else get_origin(hint) or hint
        # to another setting, or (with a NUL) to the environment
        is_reference = isinstance(value, str) and form not in (dict, list) and ("${" in value or "\0" in value)
        if form in _WANTED and value is not None and type(value) is not form and not is_reference:
            raise self.refuse(key)
        return value

    def _scalar(self, node: ScalarNode, hint: Any, key: str) -> Any:
        value = scalar(node)
        if hint is Any and node.tag == DOUBTFUL:
            raise self.refuse(key, "is no text, number, true, false or null; write it in quotes")
        if isinstance(value, float) and not math.isfinite(value):
            raise self.refuse(key, "must be a finite number")
        if value is None and is_dataclass(hint) and not node.value and self._source.has_lines:
            return {}  # a section in a file that holds only comments
        if hint is float and type(value) is int:
            return float(value)
        if isinstance(value, str):
            if self._source.base and hint is not Any:
                value = located(value, key, self._source.base)
            if hint is Any and references(value):
                raise self.refuse(key, "takes no ${...}; write \\${ for the plain text")
            try:
                return for_omegaconf(value, key)
            except ValueError as error:
                raise self.refuse(key, str(error)) from None
        return value


def merged(
    documents: Sequence[tuple[Source, Node]], overrides: Sequence[str] = (), *, keep_references: bool = False
) -> Config:
    """The configuration from the documents, later ones overriding earlier ones and `overrides` all of them.

    Args:
        keep_references: leave references to the environment as written, for settings that are only compared.

    Raises:
        UserError: a setting is unknown, has the wrong type, or refers to something that does not exist.
    """
    layers = [*(Layer(*document) for document in documents), *map(read_setting, overrides)]
    config = deepcopy(_defaults())
    for layer in layers:
        _lay_over(config, layer)
    try:
        _check_references(OmegaConf.to_container(config), layers)
        built = cast(Config, OmegaConf.to_object(config))
    except OmegaConfBaseException as error:
        key, value = error.full_key or "", repr(error.value)[:80]
        resolved = "" if r"\x00" in value else f"; the reference is {value}"  # a NUL marks a value of the environment
        raise _last(layers, key).refuse(key, more=resolved) from None
    except RecursionError:
        raise UserError("references to settings, which refer to others in turn, are nested too deeply") from None
    _fill_in(built, "", layers, keep_references)
    return built


@cache
def _defaults() -> DictConfig:
    """All defaults. Cached because copying them takes 16 ms, and building them from the classes 50 ms."""
    return cast(DictConfig, OmegaConf.structured(Config))


def _lay_over(config: DictConfig, layer: Layer) -> None:
    """Merge `layer` into `config`. Raises `UserError` that names the layer's file and line."""
    for *above, name in layer.emptied:
        section: Any = config
        for part in above:
            section = None if section is None else section.get(part)
        if section is not None:
            section[name] = {}
    try:
        config.merge_with(layer.values)
    except (ConfigKeyError, ConfigAttributeError) as error:
        raise layer.unknown(error.full_key or "", error.object_type or Config) from None
    except OmegaConfBaseException as error:
        syntax = "expected ${a.setting}; write \\${ for the plain text" if isinstance(error, GrammarParseError) else ""
        raise layer.refuse(error.full_key or "", syntax) from None


def _last(layers: Sequence[Layer], key: str) -> Layer:
    return next((layer for layer in reversed(layers) if key in layer.at), layers[-1])


def _check_references(values: Any, layers: Sequence[Layer]) -> None:
    """Raise UserError for a reference to a section or to no setting at all, and for references that form a cycle."""
    refers = {key: references(text) for key, text, _ in leaves(values) if "${" in str(text)}
    for key, names in refers.items():
        for name in names:
            target = values
            for part in name.split("."):
                target = target.get(part) if isinstance(target, dict) else None
            if target is None or isinstance(target, dict | list):
                wrong = f"there is no setting '{name}'" if target is None else f"'{name}' is not a single value"
                raise _last(layers, key).refuse(key, wrong)
    try:
        TopologicalSorter(refers).prepare()
    except CycleError as error:
        cycle = error.args[1][::-1]  # graphlib lists the setting that is referred to before the one that refers to it
        raise _last(layers, cycle[0]).refuse(cycle[0], f"the references form a cycle: {' -> '.join(cycle)}") from None


def _fill_in(section: Any, prefix: str, layers: Sequence[Layer], keep_references: bool) -> None:
    """Replace references to the environment in the texts of a section, a mapping or a list, in place."""
    named: Any = vars(section) if is_dataclass(section) else section
    for name, value in enumerate(named) if isinstance(named, list) else list(named.items()):
        key = f"{prefix}[{name}]" if isinstance(named, list) else f"{prefix}.{name}" if prefix else str(name)
        if isinstance(value, str):
            try:  # str(value): a text that was ??? has a class of OmegaConf's own
                named[name] = from_environment(str(value), key, keep=keep_references)
            except ValueError as error:
                raise _last(layers, key).refuse(key, str(error)) from None
        elif isinstance(value, dict | list) or is_dataclass(value):
            _fill_in(value, key, layers, keep_references)


def inside(hint: Any, name: str) -> Any:
    """The type of `name` in a section or mapping of type `hint`; None if there is no such thing."""
    hint = without_none(hint)
    if is_dataclass(hint):
        return types_of(cast(type, hint)).get(name)
    return get_args(hint)[1] if get_origin(hint) is dict else Any if hint is Any else None


def _wanted(key: str, hint: Any, node: Node) -> str:
    """What the value of `key` must be, by its type `hint`; `node` is something else."""
    hint = without_none(hint)
    form = get_origin(hint) or hint
    wanted = f"must be one of {', '.join(map(str, get_args(hint)))}" if form is Literal else _WANTED[form]
    if form is Literal and (advice := meant(key, str(node.value), get_args(hint))):
        wanted += f"; {advice}"
    if not isinstance(node, ScalarNode):
        return wanted
    if node.tag == "null":
        return f"{wanted}, not null"
    if form is int and node.tag == DOUBTFUL:
        return f"{wanted} in plain decimal digits"
    return {list: f"{wanted}: [{shown(node)}]", str: f"{wanted}; write it in quotes: '{node.value}'"}.get(form, wanted)


def read_setting(item: str) -> Layer:
    """The layer of one `key=value` of the command line; the type of the key decides how the value is read.

    A text setting takes everything after the `=` literally, so that nothing in a path is read as YAML (OmegaConf's
    dotlists read all values as YAML); quotes around it are removed. Other settings are read as YAML: `steps=20`,
    `rollout.servers.gpus='["0,1", "2,3"]'`. A name with a dot or an equals sign is quoted:
    `data.eval_paths."math/500.v2"=rows.jsonl`. `key={}` and `key={a: b}` replace a whole mapping; `key.name=...` adds
    one entry. Raises UserError.
    """
    source = Source(f"override '{item if len(item) <= 200 else item[:200] + '...'}'", has_lines=False)
    names, text = _split(item)
    text_node(item, source)
    hint = without_none(_hint(names, source))
    is_text = hint is str or get_origin(hint) is Literal
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "\"'"
    literal = is_text and not quoted and text not in ("null", "~")
    node = text_node(text, source) if literal else parse(text, source)
    if node is None:
        raise UserError(f"{source.name}: {'.'.join(names)} has no value")
    return Layer(source, node, names, replaces=True)


def _split(item: str) -> tuple[list[str], str]:
    """The names in the dotted key, without quotes, and the text after the equals sign."""
    names, position = [], 0
    while match := _PART.match(item, position):
        names.append(match[match.lastindex or 0])
        position = match.end() + 1
        if item[match.end() : position] == "=":
            return names, item[position:]
        if item[match.end() : position] != ".":
            break
    raise UserError(f"override '{item[:200]}': expected key=value, for example steps=100")


def _hint(names: list[str], source: Source) -> Any:
    """The type of the setting that `names` name; None if there is none."""
    hint: Any = Config
    for number, name in enumerate(names):
        within = inside(hint, name)
        if within is None and not is_dataclass(hint):
            quoted = f'{names[0]}.{names[1]}."{".".join(names[2:])}"' if number > 2 else ""
            advice = f"; a name with a dot is quoted: {quoted}=..." if quoted else ""
            raise UserError(f"{source.name}: '{'.'.join(names[:number])}' is a value, it has no '{name}'{advice}")
        if within is None:
            return None
        hint = within
    return hint
