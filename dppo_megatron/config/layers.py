"""Settings of files and of the command line, laid over one another by OmegaConf into a `Config`.

OmegaConf knows the schema: names, choices, what may be null, merging and references. It also converts ('5' to 5, 5 to
'5', 'on' to true) and forgets lines, so each layer is read here first: a value must have the type of its setting, and
every key is remembered with its place. An error of OmegaConf's names a key, and the message is made of that place.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import is_dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from types import NoneType, UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, GrammarParseError, OmegaConfBaseException
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from dppo_megatron.config.other_names import meant
from dppo_megatron.config.ranges import leaves
from dppo_megatron.config.reference import unknown_key
from dppo_megatron.config.references import for_omegaconf, from_environment, located, references
from dppo_megatron.config.schema import Config
from dppo_megatron.config.yaml12 import DOUBTFUL, Source, entries, parse, plain, scalar, shown, text_node
from dppo_megatron.types import UserError

_WANTED = {
    bool: "must be true or false",
    int: "must be a whole number",
    float: "must be a number",
    str: "must be text",
    list: "must be a list",
    dict: "must be a mapping of names to values, such as {name: value}",
}

RETIRED: dict[str, Any] = {
    "rollout.limits.finish_fraction": 1.0,
    "pruning.prompt.greso.initial_keep_probability": 0.5,
    "pruning.prompt.greso.keep_floor": 0.01,
    "pruning.prompt.greso.target_zero_variance": 0.25,
    "pruning.prompt.greso.adaptation_step": 0.01,
    "pruning.prompt.greso.smallest_probability": 0.05,
    "pruning.prompt.greso.largest_probability": 0.95,
    "pruning.prompt.greso.easy_reward": 0.98,
    "pruning.prompt.greso.hard_reward": 0.11,
    "pruning.prompt.auto_rule": "cost",
    "pruning.completion.auto_rule": "cost",
    "pruning.prompt.revisit_epochs": 0.0,
    "pruning.completion.quadratic_cost_per_token": 0.0,
    "pruning.completion.kl_slope": 1.0,
    "actor.fp8_param": False,
    "observe.samples.fixed_share": 0.0,
    "observe.tracking.sample_rows": 16,
}
"""Settings that are gone, and their default, which the files of older runs hold and which is passed over; of what a run
has saved, any value is. Elsewhere another value is an unknown key; docs/other_names.txt says what to do."""

_PART = re.compile(r'"([^"]+)"|\'([^\']+)\'|([^."\'=]+)')


class Layer:
    """The settings of one source."""

    def __init__(self, source: Source, node: Node, above: Sequence[str] = (), *, replaces: bool = False) -> None:
        """Args:
        above: the names of the section or setting that `node` is; empty: of the whole configuration.
        replaces: a mapping of names in it replaces the one that there is.
        """
        self._source = source
        self.at: dict[str, tuple[Node, Node, Any]] = {}
        """The node of each key, that of its value, and its type."""
        self.emptied: list[tuple[str, ...]] = []
        """Mappings of which nothing from layers below remains."""
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
        """The error for the value of `key`, which is not of its type unless `wanted` has another reason."""
        if key not in self.at:  # a name that OmegaConf spells in another way
            return UserError(f"{self._source.name}: {key}: {wanted or 'is not of its type'}")
        _, node, hint = self.at[key]
        if is_dataclass(hint):
            what = f"'{key}' is a section of settings, not a value" if key else "expected settings"
            return UserError(f"{self.where(key)}: {what} (got {shown(node)}); write key: value under it")
        return UserError(f"{self.where(key)}: {key} = {shown(node)}: {wanted or _wanted(key, hint, node)}{more}")

    def _value(self, at: Node, node: Node, hint: Any, path: tuple[str, ...]) -> Any:
        """`node` as OmegaConf is given it."""
        key = ".".join(path).replace(".[", "[")
        hint = _without_none(hint)
        self.at[key] = at, node, hint
        value: Any
        if isinstance(node, MappingNode):
            value = {
                name: self._value(*pair, inside(hint, name), (*path, name))
                for name, pair in entries(node, self._source).items()
                if not self._is_retired(".".join((*path, name)), pair[1])
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
        if form in _WANTED and value is not None and type(value) is not form and not _refers(value, form):
            raise self.refuse(key)
        return value

    def _is_retired(self, key: str, value: Node) -> bool:
        return key in RETIRED and (self._source.saved or plain(value, self._source) == RETIRED[key])

    def _scalar(self, node: ScalarNode, hint: Any, key: str) -> Any:
        value = scalar(node)
        if hint is Any and node.tag == DOUBTFUL:
            raise self.refuse(key, "is no text, number, true, false or null; write it in quotes")
        if isinstance(value, float) and not math.isfinite(value):
            raise self.refuse(key, "must be a finite number")
        if value is None and is_dataclass(hint) and not node.value and self._source.has_lines:
            return {}  # every line under the section's name is a comment
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
    """The configuration that the documents make, each over those before it, and settings of the command line over all.

    Args:
        keep_references: leave references to the environment as written, for settings that are only compared.

    Raises:
        UserError: a setting that is unknown, or of a wrong type, or refers to what is not there.
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
        came_to = "" if r"\x00" in value else f"; the reference comes to {value}"
        raise _last(layers, key).refuse(key, more=came_to) from None
    except RecursionError:
        raise UserError("references to settings that refer to others in turn: nested too deeply") from None
    _fill_in(built, "", layers, keep_references)
    return built


@cache
def _defaults() -> DictConfig:
    """What every configuration begins from. A copy takes 16 ms, making it from the classes 50."""
    return cast(DictConfig, OmegaConf.structured(Config))


def _lay_over(config: DictConfig, layer: Layer) -> None:
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
    """Raise UserError for a reference to no setting, to a section, or in a circle."""
    refers = {key: references(text) for key, text, _ in leaves(values) if "${" in str(text)}
    for key, names in refers.items():
        for name in names:
            found = values
            for part in name.split("."):
                found = found.get(part) if isinstance(found, dict) else None
            if found is None or isinstance(found, dict | list):
                wrong = f"there is no setting '{name}'" if found is None else f"'{name}' is not a single value"
                raise _last(layers, key).refuse(key, wrong)
    try:
        TopologicalSorter(refers).prepare()
    except CycleError as error:
        circle = error.args[1][::-1]  # it lists what is referred to first
        back = f"the reference comes back to itself: {' -> '.join(circle)}"
        raise _last(layers, circle[0]).refuse(circle[0], back) from None


def _fill_in(section: Any, prefix: str, layers: Sequence[Layer], keep_references: bool) -> None:
    """Put what the environment holds into the texts of a section, a mapping or a list."""
    named: Any = vars(section) if is_dataclass(section) else section
    for name, value in enumerate(named) if isinstance(named, list) else list(named.items()):
        key = f"{prefix}[{name}]" if isinstance(named, list) else f"{prefix}.{name}" if prefix else str(name)
        if isinstance(value, str):  # of a class of OmegaConf's own where it was ???
            try:
                named[name] = from_environment(str(value), key, keep=keep_references)
            except ValueError as error:
                raise _last(layers, key).refuse(key, str(error)) from None
        elif isinstance(value, dict | list) or is_dataclass(value):
            _fill_in(value, key, layers, keep_references)


def inside(hint: Any, name: str) -> Any:
    """The type of `name` in a section or mapping of type `hint`; None if there is no such thing."""
    hint = _without_none(hint)
    if is_dataclass(hint):
        return _hints(cast(type, hint)).get(name)
    return get_args(hint)[1] if get_origin(hint) is dict else Any if hint is Any else None


_hints = cache(get_type_hints)


def _without_none(hint: Any) -> Any:
    arms = [arm for arm in get_args(hint) if arm is not NoneType]
    return arms[0] if get_origin(hint) in (Union, UnionType) else hint


def _refers(value: Any, form: type) -> bool:
    return isinstance(value, str) and form not in (dict, list) and ("${" in value or "\0" in value)


def _wanted(key: str, hint: Any, node: Node) -> str:
    """What the value of `key`, of type `hint`, must be, which `node` is not."""
    hint = _without_none(hint)
    form = get_origin(hint) or hint
    wanted = f"must be one of {', '.join(map(str, get_args(hint)))}" if form is Literal else _WANTED[form]
    if form is Literal and (said := meant(key, str(node.value), get_args(hint))):
        wanted += f"; {said}"
    if not isinstance(node, ScalarNode):
        return wanted
    if node.tag == "null":
        return f"{wanted}; there is nothing to take null for"
    if form is int and node.tag == DOUBTFUL:
        return f"{wanted} in plain decimal digits"
    return {list: f"{wanted}: [{shown(node)}]", str: f"{wanted}; write it in quotes: '{node.value}'"}.get(form, wanted)


def read_setting(item: str) -> Layer:
    """What one `key=value` gives: a dotted key, and a value by the type that the key has. Raises UserError.

    A text setting takes everything after the `=` literally, so that nothing in a path is read as YAML (OmegaConf's
    dotlists would read all of it); quotes around it are removed. Other settings are read as YAML: `steps=20`,
    `rollout.servers.gpus='["0,1", "2,3"]'`. A name with a dot or an equals sign is quoted:
    `data.eval_paths."math/500.v2"=rows.jsonl`. `key={}` and `key={a: b}` replace a whole mapping; `key.name=...` adds
    one entry.
    """
    source = Source(f"override '{item if len(item) <= 200 else item[:200] + '...'}'", has_lines=False)
    names, text = _split(item)
    text_node(item, source)
    is_text = _is_text(_hint(names, source))
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "\"'"
    literal = is_text and not quoted and text not in ("null", "~")
    node = text_node(text, source) if literal else parse(text, source)
    if node is None:
        raise UserError(f"{source.name}: {'.'.join(names)} is given no value")
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
            meant = f"; a name with a dot is quoted: {quoted}=..." if quoted else ""
            raise UserError(f"{source.name}: '{'.'.join(names[:number])}' is a value, it has no '{name}'{meant}")
        if within is None:
            return None
        hint = within
    return hint


def _is_text(hint: Any) -> bool:
    arms = (hint, *get_args(hint)) if type(None) in get_args(hint) else (hint,)
    return any(arm is str or get_origin(arm) is Literal for arm in arms)
