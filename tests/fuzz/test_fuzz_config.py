"""Configurations that are damaged at random, in a file and on the command line: a sentence, or read as YAML reads them.

The oracle is PyYAML's `safe_load` of the same text (`_agrees`), which knows nothing of our schema, and the round trip
through a file. Every case has a seed of its own: a failure is repeated with `DPPO_FUZZ_SEED=<the number it prints>`.
"""

from __future__ import annotations

import os
import random
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from common import fuzz_cases
from support.job import REPOSITORY

from dppo_megatron.config import Config, save_config
from dppo_megatron.config.checks import check_values
from dppo_megatron.config.hints import all_keys
from dppo_megatron.config.load import config_from_values, config_values, read_config
from dppo_megatron.types import UserError

BASES = [path.read_text(encoding="utf-8") for path in sorted((REPOSITORY / "configs").rglob("*.yaml"))]
BASES = ["\n".join(line for line in text.splitlines() if not line.startswith("defaults:")) for text in BASES]
KEYS = all_keys(Config)
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

pytestmark = pytest.mark.timeout(0 if "DPPO_FUZZ" in os.environ else 600)


def _cases(name: str, default: int) -> list[str]:
    chosen = os.environ.get("DPPO_FUZZ_SEED")
    return [chosen] if chosen else [f"{name} {number}" for number in range(fuzz_cases(default))]


@pytest.mark.slow
def test_files(tmp_path: Path) -> None:
    """Nothing but `UserError` comes of a damaged file, and what is accepted is what stands there."""
    accepted = 0
    for case in _cases("file", 1000):
        if not case.startswith("file"):
            continue
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
        _agrees(case, yaml.safe_load(content.decode("utf-8")) or {}, config)
        _survives(case, config, tmp_path)
    assert accepted >= fuzz_cases(1000) // 20 or "DPPO_FUZZ_SEED" in os.environ


@pytest.mark.slow
def test_command_line(tmp_path: Path) -> None:
    """The same of settings on the command line, where a text stands for itself."""
    base = tmp_path / "config.yaml"
    base.write_text("seed: 3\ndata: {eval_paths: {heldout: a}}\n", encoding="utf-8")
    accepted = 0
    for case in _cases("line", 1000):
        if not case.startswith("line"):
            continue
        items = [_damaged_setting(rng) for rng in [random.Random(case)] for _ in range(rng.randint(1, 3))]
        try:
            config = read_config(str(base), items)
        except UserError as error:
            _is_a_sentence(case, error)
            continue
        except Exception as error:
            pytest.fail(f"{case}: {type(error).__name__}: {error}\n{items!r}")
        accepted += 1
        for key, text in (item.split("=", 1) for item in items[-1:]):
            _agrees_with_line(f"{case}: {key}={text!r}", key, text, config)
        _survives(case, config, tmp_path)
    assert accepted >= fuzz_cases(1000) // 20 or "DPPO_FUZZ_SEED" in os.environ


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
    for part in key.replace('"a.b/c"', "a|b/c").split("."):
        part = part.replace("|", ".")
        found = found[part] if isinstance(found, dict) else getattr(found, part)
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    if isinstance(found, str) and not quoted:
        assert found == text, case
    else:
        _same(case, yaml.safe_load(text), found)


def _agrees(case: str, plain: Any, config: Any) -> None:
    """Every key that the file holds has the value that YAML gives it."""
    for key, value in plain.items():
        _same(f"{case}: {key}", value, config[key] if isinstance(config, dict) else getattr(config, key))


def _same(case: str, plain: Any, value: Any) -> None:
    if isinstance(plain, str) and "${" in plain:
        return
    if is_dataclass(value) or isinstance(value, dict):
        assert isinstance(plain, dict), (case, plain, value)
        assert is_dataclass(value) or sorted(plain) == sorted(value), (case, plain, value)
        _agrees(case, plain, value)
    elif isinstance(value, list):
        assert isinstance(plain, list) and len(plain) == len(value), (case, plain, value)
        for left, right in zip(plain, value, strict=True):
            _same(case, left, right)
    elif isinstance(value, float):
        # YAML 1.1 takes 1e-6 for text: the only text that is read as a number
        assert not isinstance(plain, bool), (case, plain, value)
        assert float(plain) == value, (case, plain, value)
    elif value == "off" and plain is False:
        return  # a choice that is called off
    else:
        assert type(plain) is type(value) and plain == value, (case, plain, value)
