"""Configurations that are damaged at random, in a file and on the command line: a sentence, or read as YAML reads them.

The oracles are YAML 1.2's core schema as its specification has it (`_read`), which knows nothing of our settings, plain
dictionaries laid over one another (`_over`), and the round trip through a file. `support/cases.py` says how one case is
repeated and how more are tried.
"""

from __future__ import annotations

import json
import os
import random
import re
from copy import deepcopy
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import pytest
import yaml
from support.cases import Choose
from support.job import REPOSITORY

from dppo_megatron.config import Config, save_config
from dppo_megatron.config.checks import check_values
from dppo_megatron.config.load import config_from_values, config_values, read_config
from dppo_megatron.config.reference import all_keys
from dppo_megatron.types import UserError

BASES = [path.read_text(encoding="utf-8") for path in sorted((REPOSITORY / "configs").rglob("*.yaml"))]
BASES = ["\n".join(line for line in text.splitlines() if not line.startswith("defaults:")) for text in BASES]
KEYS = all_keys()
SCALARS = [
    *("0", "1", "-1", "2", "8", "1.5", "0.5", "-0.0", "1e3", "1e-6", "1.0e-6", "1E+4", "1e400", "1e309", ".5", "5."),
    *("1_000", "1_0.5", "010", "0x10", "0b11", "0o17", "1:30", "190:20:30.15", "+3", "1099511627776", "9" * 400),
    *(
        "18446744073709551616",
        "-9223372036854775809",
        ".nan",
        ".NaN",
        ".inf",
        "-.inf",
        "+.Inf",
        "nan",
        "inf",
        "Infinity",
    ),
    *("true", "True", "TRUE", "false", "yes", "no", "on", "off", "On", "y", "n", "null", "~", "Null", "", "None"),
    *("text", "'quoted'", '"double"', "'5'", '"true"', "'it''s'", '"\\u00e9\\n"', '"\\ud800"', '"\\0"', "a: b", "a:b"),
    *("2026-11-22", "2026-11-22 10:00:00", "12:30:45", "=", "<<", "*nope", "&a 3", "!!str 5", "!!int '5'", "!!float 3"),
    *("!!python/object:os.system x", "!!python/name:os.getcwd", "!!python/tuple [1, 2]", "!mine 3", "!!binary aGk="),
    *("!!set {a, b}", "!!omap [a: 1]", "!!timestamp 2026-11-22", "!!bool 'yes'", "!!null ''", "!!int foo", "!!float x"),
    *("[]", "{}", "[1, 2]", "[a, b]", "['a', \"b\"]", "[[1]]", "{a: 1}", "{a: b}", "{1: 2}", "{on: x}", "{a.b: c}"),
    *(
        "[" * 300 + "]" * 300,
        "{a: " * 50 + "1" + "}" * 50,
        "[",
        "]",
        "{",
        "}",
        "- 1",
        "? x",
        "|",
        ">-",
        "%",
        "@a",
        "`b",
    ),
    *("${seed}", "${nope}", "${run_dir}", "${oc.env:HOME}", "${oc.env:DPPO_NOT_SET}", "${oc.env:X,1}", "${", "\\${x}"),
    *("${oc.decode:1}", "${model}", "${a:b:c}", "${${seed}}", "x${seed}y", "${.seed}", "${data.eval_paths.heldout}"),
    *("é", "数", "\u202e", "\x07", "\x85", "\ufeff", "\t", " ", "  x  ", "#c", "x # c", "x" * 5000, "/" + "d/" * 2500),
]
STRAY = [
    "\t",
    "  ",
    "\x00",
    "\xff",
    "\x1b",
    "\u2028",
    "- ",
    ": ",
    "#",
    "'",
    '"',
    "{",
    "]",
    "&a ",
    "*a",
    "<<: ",
    "---\n",
    "...\n",
]

pytestmark = pytest.mark.timeout(0 if "DPPO_FUZZ" in os.environ else 1800)


@pytest.mark.slow
def test_files(tmp_path: Path, cases: Choose) -> None:
    """Nothing but `UserError` comes of a damaged file, and what is accepted is what stands there."""
    accepted, chosen = 0, cases("file", 90)
    for number in chosen:
        case = f"file {number}"
        content = _damaged_file(random.Random(case))
        path = tmp_path / "config.yaml"
        path.write_bytes(content)
        try:
            config = read_config(str(path), [])
        except UserError as error:
            _is_a_sentence(case, error)
            continue
        except Exception as error:
            pytest.fail(f"{case}: {type(error).__name__}: {error}\n{content!r}")
        accepted += 1
        _agrees(case, _read(content.decode("utf-8")) or {}, config)
        _survives(case, config, tmp_path)
    assert chosen.are_few or accepted >= len(chosen) // 20


@pytest.mark.slow
def test_command_line(tmp_path: Path, cases: Choose) -> None:
    """The same of settings on the command line, where a text stands for itself."""
    chosen = cases("line", 90)
    base = tmp_path / "config.yaml"
    base.write_text("seed: 3\ndata: {eval_paths: {heldout: a}}\n", encoding="utf-8")
    accepted = 0
    for number in chosen:
        case = f"line {number}"
        items = [_damaged_setting(rng) for rng in [random.Random(case)] for _ in range(rng.randint(1, 3))]
        try:
            config = read_config(str(base), items)
        except UserError as error:
            _is_a_sentence(case, error)
            continue
        except Exception as error:
            pytest.fail(f"{case}: {type(error).__name__}: {error}\n{items!r}")
        accepted += 1
        key = re.match(r'(?:"[^"]*"|[^"=])+(?==)|[^=]*', items[-1])[0]  # type: ignore[index] # a quoted part may have a =
        text = items[-1][len(key) + 1 :]
        _agrees_with_line(f"{case}: {key}={text!r}", key, text, config)
        _survives(case, config, tmp_path)
    assert chosen.are_few or accepted >= len(chosen) // 20


def test_layers(tmp_path: Path, cases: Choose) -> None:
    """Parents, a file and the command line, over one another: the last word on each setting arrives."""
    defaults = config_values(Config())
    referred = {"seed": 0, "run_dir": "", "actor": {"optimizer": {"adam_beta1": 0.9}}}
    for number in cases("layers", 60):
        case = f"layers {number}"
        rng = random.Random(case)
        layers = [_some_settings(rng) for _ in range(rng.randint(1, 4))]
        names = [f"layer_{number}.yaml" for number in range(len(layers))]
        for number, (name, layer) in enumerate(zip(names, layers, strict=True)):
            # a list of parents may bring one file several times over
            parents: Any = names[number - 1 : number] if rng.random() < 0.5 and number else names[:number]
            parents = parents[0] if len(parents) == 1 and rng.random() < 0.5 else parents
            text = yaml.safe_dump(({"defaults": parents} if parents else {}) | layer, allow_unicode=True)
            (tmp_path / name).write_text(text, encoding="utf-8")
        line = [(key, value) for key, value in _flat(_some_settings(rng)) if not isinstance(value, dict)]
        items = [f"{key}={_on_the_line(value)}" for key, value in line]
        config = read_config(str(tmp_path / names[-1]), items)
        merged: Any = deepcopy(referred)
        for layer in _order(tmp_path, names[-1]):
            merged = _over(merged, layer)
        for key, value in line:
            *sections, name = key.split(".")
            at = merged
            for section in sections:
                at = at.setdefault(section, {})
            at[name] = value
        _arrived(case, _referred(merged, merged), config_values(config), defaults)


def _arrived(case: str, expected: Any, found: Any, default: Any) -> None:
    """What was said is there, and everything else is as it was."""
    if isinstance(expected, dict) and isinstance(found, dict):
        assert expected.keys() <= found.keys(), case
        for key, value in found.items():
            if key in expected:
                _arrived(f"{case}: {key}", expected[key], value, default.get(key, {}) if default else {})
            elif default:  # an entry of a mapping of sets has none
                assert key in default and value == default[key], f"{case}: {key}"
    else:
        assert expected == found and isinstance(expected, bool) == isinstance(found, bool), f"{case}: {found!r}"


def _order(directory: Path, name: str) -> list[Any]:
    """A file's layers, its parents' first: as the docs say it, in three lines."""
    layer: Any = yaml.safe_load((directory / name).read_text(encoding="utf-8"))
    parents = layer.pop("defaults", [])
    parents = [parents] if isinstance(parents, str) else parents
    return [*(one for parent in parents for one in _order(directory, parent)), layer]


def _over(base: Any, layer: Any) -> Any:
    """`layer` laid over `base`, mapping by mapping; neither is changed."""
    if not isinstance(layer, dict) or not isinstance(base, dict | None):
        return layer
    under = base or {}
    return under | {key: _over(under.get(key), value) for key, value in layer.items()}


def _referred(value: Any, values: dict[str, Any]) -> Any:
    """`value` with what its references refer to; `_some_settings` has three."""
    if isinstance(value, dict):
        return {key: _referred(inside, values) for key, inside in value.items()}
    known = {"${seed}": values["seed"], "${actor.optimizer.adam_beta1}": values["actor"]["optimizer"]["adam_beta1"]}
    if isinstance(value, str) and value == "${run_dir}/y":
        return f"{values['run_dir']}/y"
    return known.get(value, value) if isinstance(value, str) else value


@cache
def _leaves(schema: type, prefix: str = "") -> list[tuple[str, Any]]:
    """Dotted key and type of every setting."""
    found: list[tuple[str, Any]] = []
    for name, hint in get_type_hints(schema).items():
        found += _leaves(hint, f"{prefix}{name}.") if is_dataclass(hint) else [(f"{prefix}{name}", hint)]
    return found


def _some_settings(rng: random.Random) -> dict[str, Any]:
    """A few settings with values of their types, nested as a file has them."""
    found: dict[str, Any] = {}
    for key, hint in rng.sample(_leaves(Config), rng.randint(1, 12)):
        at = found
        *sections, name = key.split(".")
        for section in sections:
            at = at.setdefault(section, {})
        value = _of_type(rng, hint)
        if isinstance(value, int | float | str) and key not in REFERRED and rng.random() < 0.2:
            value = {int: "${seed}", float: "${actor.optimizer.adam_beta1}", str: "${run_dir}/y"}.get(hint, value)
        at[name] = value
    return found


def _of_type(rng: random.Random, hint: Any) -> Any:
    if type(None) in get_args(hint):
        if rng.random() < 0.2:
            return None
        [hint] = [arm for arm in get_args(hint) if arm is not type(None)]
    origin = get_origin(hint)
    if origin is Literal:
        return rng.choice(get_args(hint))
    if origin is list:
        return [_of_type(rng, get_args(hint)[0]) for _ in range(rng.randint(1, 3))]
    if origin is dict:
        inside = get_args(hint)[1]
        return {rng.choice("abc") + "x": _of_type(rng, inside) for _ in range(rng.randint(1, 2))}
    if is_dataclass(hint):
        name, inside = rng.choice(_leaves(hint))
        value = _of_type(rng, inside)
        for part in reversed(name.split(".")):
            value = {part: value}
        return value
    if hint is Any:
        return rng.choice((1, True, 0.5, "text", [1, "a"]))
    if hint is bool:
        return rng.random() < 0.5
    if hint is int:
        return rng.choice((0, 1, -3, 7, 2**40))
    if hint is float:
        return rng.choice((0.25, 1e-7, 2.0, 3, 1e22))
    return rng.choice(TEXTS)


TEXTS = ("a/b c.jsonl", "x-1", "\u00fc/\u6570", "it's", 'say "so"', "a: b", "#x", "5", "true", " x ", "null")
TEXTS += ("a=b", "[1", "{", "~x")
REFERRED = ("seed", "run_dir", "actor.optimizer.adam_beta1")
"""Keys that others refer to, and that never refer to anything: no circles."""


def _on_the_line(value: Any) -> str:
    """A text stands for itself, unless it would be read as null or lose its quotes; the rest is YAML."""
    if isinstance(value, str):
        return value if value != "null" else "'null'"
    return json.dumps(value, ensure_ascii=False)


def _flat(values: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Dotted key and value of every setting; mappings of names are left whole."""
    keys = {key for key, _ in _leaves(Config)}
    found: list[tuple[str, Any]] = []
    for name, value in values.items():
        key = f"{prefix}{name}"
        found += [(key, value)] if key in keys else _flat(value, f"{key}.")
    return found


def _damaged_file(rng: random.Random) -> bytes:
    lines = rng.choice(BASES).splitlines()
    for _ in range(rng.randint(1, 3)):
        place = rng.randrange(len(lines))
        line = lines[place]
        match rng.randrange(10):
            case 0 | 1 | 2 | 3 if ":" in line:
                lines[place] = line.split(":")[0] + ": " + rng.choice(SCALARS)
            case 4:
                lines.insert(rng.randrange(len(lines)), line)
            case 5:
                at = rng.randrange(len(line) + 1)
                lines[place] = line[:at] + rng.choice(STRAY) + line[at:]
            case 6:
                lines[place] = rng.choice(["\t", " ", "   "]) + line
            case 7:
                key = rng.choice(KEYS)
                lines.append(f"{key.split('.')[0]}: {{{', '.join(key.split('.')[1:])}: {rng.choice(SCALARS)}}}")
            case 8:
                lines.append(f"{rng.choice(SCALARS)}: {rng.choice(SCALARS)}")
            case _:
                del lines[place : place + rng.randint(1, 3)]
                lines = lines or [""]
    content = "\n".join(lines).encode("utf-8", "surrogatepass")
    if rng.random() < 0.03:
        at = rng.randrange(len(content) + 1)
        content = content[:at] + rng.choice([b"\xff", b"\xe9", b"\xc3", b"\xed\xa0\x80", b"\x00"]) + content[at:]
    return content if rng.random() < 0.98 else content.decode("utf-8", "replace").encode("utf-16")


def _damaged_setting(rng: random.Random) -> str:
    key = rng.choice(KEYS)
    if rng.random() < 0.2:
        key = rng.choice(
            [
                "data.eval_paths.a",
                "data.train_sets.a.path",
                "data.eval_sets.b.samples",
                'data.eval_paths."a.b/c"',
                "+seed",
            ]
        )
    if rng.random() < 0.05:
        at = rng.randrange(len(key))
        key = key[:at] + rng.choice([".", "..", "'", '"', "é", " ", "[0]", "", "="]) + key[at + 1 :]
    return f"{key}={rng.choice(SCALARS)}"


def _is_a_sentence(case: str, error: UserError) -> None:
    text = str(error)
    assert len(text) > 15 and len(text) < 2000 and "Traceback" not in text and "object at 0x" not in text, (case, text)


def _survives(case: str, config: Config, tmp_path: Path) -> None:
    """What was accepted can be written and read again, and checked without a traceback."""
    save_config(config, tmp_path / "saved.yaml")
    again = read_config(str(tmp_path / "saved.yaml"), [])
    assert again == config, case
    assert config_values(config_from_values(config_values(config), "saved")) == config_values(config), case
    try:
        check_values(config)
    except UserError as error:
        _is_a_sentence(case, error)


def _agrees_with_line(case: str, key: str, text: str, config: Config) -> None:
    if "${" in text:
        return
    found: Any = config
    for part in re.findall(r'"[^"]*"|[^."]+', key):
        part = part.strip('"')
        found = found[part] if isinstance(found, dict) else getattr(found, part)
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    if isinstance(found, str) and not quoted:
        assert found == text, case
    else:
        _same(case, _read(text), found)


def _agrees(case: str, plain: Any, config: Any) -> None:
    """Every key that the file holds has the value that YAML gives it."""
    for key, value in plain.items():
        _same(f"{case}: {key}", value, config[key] if isinstance(config, dict) else getattr(config, key))


class Word(NamedTuple):
    """A plain scalar: how it is spelled, and what YAML 1.2's core schema takes it for."""

    text: str
    value: Any


_CORE = (  # YAML 1.2.2, section 10.3.2
    (r"null|Null|NULL|~|", lambda text: None),
    (r"true|True|TRUE|false|False|FALSE", lambda text: text.lower() == "true"),
    (r"[-+]?[0-9]+", lambda text: int(text) if len(text) < 4000 else float("inf")),
    (r"0o[0-7]+", lambda text: int(text[2:], 8)),
    (r"0x[0-9a-fA-F]+", lambda text: int(text, 16)),
    (r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", float),
    (r"[-+]?(\.inf|\.Inf|\.INF)|\.nan|\.NaN|\.NAN", lambda text: float(text.replace(".", ""))),
)


def _read(text: str) -> Any:
    """Plain values of a document, scalars without quotes as `Word`s. Tags and equal keys are never accepted."""
    node = yaml.compose(text, Loader=yaml.BaseLoader)
    return None if node is None else _plain(node)


def _plain(node: yaml.Node) -> Any:
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item) for item in node.value]
    if isinstance(node, yaml.MappingNode):
        own = [(key.value, _plain(value)) for key, value in node.value if key.value != "<<"]
        assert len(dict(own)) == len(own), own
        for key, value in node.value:
            others = [_plain(value)] if isinstance(value, yaml.MappingNode) else _plain(value)
            for other in others if key.value == "<<" else ():
                own = [*other.items(), *own]
        return dict(own)
    assert isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:str", node
    if node.style is not None:
        return node.value
    found = (convert(node.value) for pattern, convert in _CORE if re.fullmatch(pattern, node.value))
    return Word(node.value, next(found, node.value))


def _same(case: str, plain: Any, value: Any) -> None:
    if isinstance(plain, Word) and isinstance(value, str):
        # a text is what is spelled: of what YAML 1.2 takes for a number, only 010, 0x10, 0o17 and 41 digits are read so
        spelled = isinstance(plain.value, str) or re.fullmatch(r"0[xo].*|[-+]?0[0-9]+|[-+]?[0-9]{41,}", plain.text)
        assert spelled, (case, plain, value)
        plain = plain.text
    elif isinstance(plain, Word):
        plain = plain.value
    if isinstance(plain, str) and "${" in plain:
        return
    if is_dataclass(value) and plain is None:
        return  # a section with nothing in it
    if is_dataclass(value) or isinstance(value, dict):
        assert isinstance(plain, dict), (case, plain, value)
        assert is_dataclass(value) or sorted(plain) == sorted(value), (case, plain, value)
        _agrees(case, plain, value)
    elif isinstance(value, list):
        assert isinstance(plain, list) and len(plain) == len(value), (case, plain, value)
        for left, right in zip(plain, value, strict=True):
            _same(case, left, right)
    elif isinstance(value, float):
        assert isinstance(plain, int | float) and not isinstance(plain, bool), (case, plain, value)
        assert float(plain) == value, (case, plain, value)
    else:
        assert type(plain) is type(value) and plain == value, (case, plain, value)
