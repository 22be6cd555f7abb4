"""Model directories damaged at random: one sentence, or read exactly as transformers reads them.

Every case is a function of its number, so `_case(n)` makes a failing one again.
"""

from __future__ import annotations

import json
import random
import runpy
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from support.cases import Choose
from support.launch import run_ranks
from support.tiny import FAMILIES, Parallel, build_actor, hf_logprobs, plan_for, random_samples, write_model
from support.transformers_reading import same_as_transformers
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerBase,
)

from dppo_megatron.config.data import TrainSetConfig
from dppo_megatron.config.resolved_sets import train_set_configs
from dppo_megatron.config.schema import Config
from dppo_megatron.data.templates import check_template, model_ends, render
from dppo_megatron.types import UserError
from dppo_megatron.weights.architecture import Architecture, read_architecture
from dppo_megatron.weights.hf_files import WeightReader
from dppo_megatron.weights.tokenizer import load_tokenizer
from dppo_megatron.weights.torch_dist import open_checkpoint
from dppo_megatron.workbench.quickstart.tiny_model import make_tokenizer

by_checkpoint_name = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "weight_table.py"))[
    "by_checkpoint_name"
]
COMPUTED = 12
"""Accepted models whose log-probabilities are computed on both sides."""
INDEX, GENERATION, CHAT = "model.safetensors.index.json", "generation_config.json", "chat_template.jinja"
TEMPLATE = "{% for turn in messages %}{{ turn.role + ': ' + turn.content + '\n' }}{% endfor %}"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    directories = []
    for family in FAMILIES:
        directory = write_model(tmp_path_factory.mktemp(family), family=family, num_hidden_layers=2)
        tokenizer = make_tokenizer()
        tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(directory)
        (directory / GENERATION).write_text(json.dumps({"eos_token_id": [1, 2], "temperature": 0.7, "do_sample": True}))
        directories.append(directory)
    return directories


ODD: tuple[Any, ...] = (None, True, False, 0, 1, -1, 2, 3, 4, 7, 16, 48, 1.0, 0.5, 1e-6, 1e-5, -0.0, 1e300, 10**12)
ODD += (10**400, float("nan"), float("inf"), "", "x", "1", "silu", "default", "\ud800", "../x", [], [1], [None], {})
ODD += ({"a": 1}, {"rope_type": "yarn", "factor": 2.0}, ["full_attention"] * 2, ["sliding_attention"] * 2, "float32")
_OTHERS = ("gemma2", "granite", "mixtral", "phi3", "deepseek_v3", "cohere", "olmo2", "qwen2_moe")
_OTHERS += ("mistral", "gemma3_text", "smollm3", "glm4", "gpt_oss", "llama4_text", "qwen3_next", "olmo3", "minimax")
ROPE = ("rope_type", "type", "factor", "rope_theta", "low_freq_factor", "high_freq_factor", "mrope_section")
ROPE += ("original_max_position_embeddings", "partial_rotary_factor", "attention_factor", "full_attention")


def _known_keys() -> list[str]:
    """Keys of transformers' own config classes: of the four families, and of others whose features we lack."""
    names: set[str] = {"rope_scaling", "rope_theta", "partial_rotary_factor", "auto_map", "quantization_config"}
    names |= {"is_causal", "attn_implementation", "per_layer_config", "num_local_experts", "torch_dtype", "temperature"}
    for model_type in ("qwen3", "qwen3_moe", "qwen2", "llama", *_OTHERS):
        names |= {name for name in dir(CONFIG_MAPPING[model_type]()) if not name.startswith("__")}
    return sorted(names)


def _odd(rng: random.Random, old: Any) -> Any:
    """A value of another kind, or one near the old one."""
    if type(old) in (int, float) and rng.random() < 0.4:
        halves = (old / 2, float(old)) if abs(old) < 1e300 else (old // 2, old - 1)
        return rng.choice((old * 2, halves[0], old + 1, -old, halves[1], str(old)))
    if isinstance(old, list) and old and rng.random() < 0.5:
        return rng.choice((old[:-1], [*old, old[0]], old * 2))
    return rng.choice(ODD)


def _mutate_json(rng: random.Random, path: Path, known: list[str]) -> str:
    """Change, delete or add a key at some depth; or damage the text."""
    if not path.exists():
        return f"{path.name} is gone"
    if rng.random() < 0.08:
        return _damage(rng, path)
    value = json.loads(path.read_text())
    at = value
    while rng.random() < 0.5:
        below = [x for x in (at.values() if isinstance(at, dict) else at) if isinstance(x, dict | list) and x]
        if not below:
            break
        at = rng.choice(below)
    key: Any = rng.choice(list(at)) if isinstance(at, dict) and at else rng.randrange(len(at)) if at else None
    match rng.randrange(4) if key is not None else 3:
        case 0:
            said = f"without {key!r}"
            del at[key]
        case 1 | 2:
            at[key] = _odd(rng, at[key])
            said = f"{key!r} = {at[key]!r}"
        case _:
            key = rng.choice(known)
            if not isinstance(at, dict):
                at = value
            at[key] = _odd(rng, None)
            said = f"new {key!r} = {at[key]!r}"
    path.write_text(json.dumps(value))
    return f"{path.name}: {said}"


def _damage(rng: random.Random, path: Path) -> str:
    data = bytearray(path.read_bytes())
    for _ in range(rng.randint(1, 3)):
        position = rng.randrange(len(data)) if data else 0
        match rng.randrange(4):
            case 0:
                data[position : position + 1] = bytes([rng.randrange(256)])
            case 1:
                del data[position : position + rng.randint(1, 30)]
            case 2:
                data[position:position] = data[position : position + rng.randint(1, 60)]
            case _:
                del data[position:]
    path.write_bytes(data)
    return f"{path.name}: bytes"


def _mutate_config(rng: random.Random, model: Path, known: list[str]) -> str:
    path = model / "config.json"
    if rng.random() < 0.3:  # what S1 was about: more than one place for the position embedding
        raw = json.loads(path.read_text())
        target = rng.choice(("rope_parameters", "rope_scaling"))
        base = dict(raw.get("rope_parameters") or {})
        for _ in range(rng.randrange(3)):
            key = rng.choice(ROPE)
            base[key] = _odd(rng, base.get(key))
        raw[target] = base
        if rng.random() < 0.3:
            raw["rope_theta"] = rng.choice((10000.0, 5e5, None, "1"))
        path.write_text(json.dumps(raw))
        return f"config.json: {target} = {base!r}, rope_theta = {raw.get('rope_theta')!r}"
    return _mutate_json(rng, path, known)


def _mutate_tokenizer(rng: random.Random, model: Path, known: list[str]) -> str:
    path = model / rng.choice(("tokenizer.json", "tokenizer_config.json", "tokenizer_config.json"))
    if rng.random() < 0.1:
        path.unlink(missing_ok=True)
        return f"{path.name}: gone"
    return _mutate_json(rng, path, ["auto_map", "eos_token", "tokenizer_class", "added_tokens_decoder", "vocab_file"])


def _mutate_generation(rng: random.Random, model: Path, known: list[str]) -> str:
    path = model / GENERATION
    if rng.random() < 0.4:
        value = rng.choice((None, 5, 10**6, -1, True, 1.0, "2", [], [5, 5], [1, 2, 10**6], [None], [[1]], {"a": 1}))
        path.write_text(json.dumps({"eos_token_id": value}))
        return f"{GENERATION}: eos_token_id = {value!r}"
    return _mutate_json(rng, path, ["eos_token_id", "stop_token_ids", "forced_eos_token_id", "suppress_tokens"])


def _mutate_template(rng: random.Random, model: Path, known: list[str]) -> str:
    path = model / CHAT
    if rng.random() < 0.5 and path.exists():
        return _damage(rng, path)
    path.write_text(
        rng.choice(("", "{% for %}", "{{ 1 / 0 }}", "{{ messages[9].role }}", "x{{ eos_token }}", "{{ a.b }}"))
    )
    return f"{CHAT}: {path.read_text()}"


def _mutate_index(rng: random.Random, model: Path, known: list[str]) -> str:
    path = model / INDEX
    if not path.exists():
        tensors = load_file(model / "model.safetensors")
        names = sorted(tensors)
        (model / "model.safetensors").unlink()
        save_file({name: tensors[name] for name in names[::2]}, model / "a.safetensors")
        save_file({name: tensors[name] for name in names[1::2]}, model / "b.safetensors")
        files = {name: "ab"[i % 2] + ".safetensors" for i, name in enumerate(names)}
        path.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": files}))
        if rng.random() < 0.2:
            save_file({names[0]: tensors[names[0]] * 2}, model / rng.choice(("c.safetensors", "model.safetensors")))
        if rng.random() < 0.3:
            return "index: whole"
    return _mutate_json(rng, path, ["../x.safetensors", "weight_map"])


def _mutate_header(rng: random.Random, model: Path, known: list[str]) -> str:
    paths = sorted(model.glob("*.safetensors"))
    if not paths:
        return "no weights"
    path = rng.choice(paths)
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    try:
        header = json.loads(data[8 : 8 + length])
        entry = header[rng.choice(sorted(set(header) - {"__metadata__"}))]
    except (ValueError, LookupError):
        return _damage(rng, path)
    said = rng.choice(("dtype", "shape", "data_offsets", "length", "bytes", "rename", "values"))
    match said:
        case "dtype":
            entry["dtype"] = rng.choice(("F64", "F16", "BF16", "I64", "F8_E4M3", "BOOL", "X", 5))
        case "shape" | "data_offsets":
            entry[said] = rng.choice((entry[said][::-1], [], [0], [-1, 3], [2**62, 4], ["a"], None))
        case "length":
            path.write_bytes(rng.choice((0, 2**63, len(data), length + 1)).to_bytes(8, "little") + data[8:])
            return "header: length"
        case "bytes":
            return _damage(rng, path)
        case "rename":
            old = rng.choice(sorted(set(header) - {"__metadata__"}))
            header[old + rng.choice(("x", "\ud800", "\n", ""))] = header.pop(old)
        case _:
            middle = 8 + length + (len(data) - 8 - length) // 8 * 4
            path.write_bytes(data[:middle] + bytes(rng.randrange(256) for _ in range(4)) + data[middle + 4 :])
            return "weights: four bytes"
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    return f"header: {said}"


MUTATIONS: tuple[Callable[[random.Random, Path, list[str]], str], ...] = (
    *(_mutate_config,) * 6,
    *(_mutate_tokenizer,) * 2,
    _mutate_generation,
    _mutate_template,
    _mutate_index,
    _mutate_header,
)


def _case(number: int, models: list[Path], into: Path, known: list[str]) -> list[str]:
    """Make the directory `into`; returns what was done to it."""
    rng = random.Random(number)
    shutil.copytree(models[number % len(models)], into, copy_function=shutil.copyfile)
    done = []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        try:
            done.append(rng.choice(MUTATIONS)(rng, into, known))
        except (ValueError, LookupError, TypeError, AttributeError, SafetensorError):
            break  # damaged by the one before, beyond what this one can read
    return done


@dataclass
class _Outcome:
    refused: int = 0
    accepted: list[tuple[int, Path]] = field(default_factory=list)


def _read(directory: Path, where: str) -> tuple[Architecture | None, WeightReader | None]:
    """As far as it can be read; whatever else than `UserError` stops it fails the test."""
    architecture = None
    try:
        architecture = read_architecture(directory)
        reader = open_checkpoint(directory, architecture)
        tokenizer = load_tokenizer(directory, architecture)
        _compare_generation(directory, tokenizer, where)
    except UserError as error:
        assert str(error).isprintable(), f"{where}: {error!a}"
        return architecture, None
    except Exception as error:
        raise AssertionError(f"{where}: {type(error).__name__}: {error}") from error
    return architecture, reader


def _compare_generation(directory: Path, tokenizer: PreTrainedTokenizerBase, where: str) -> None:
    """Ends of sequence, and the prompt that the chat template makes, as transformers has them; of config.json special
    tokens alone."""
    stops = model_ends(str(directory), tokenizer, "hf")
    kinds = [*([GenerationConfig] if (directory / GENERATION).exists() else []), AutoConfig]
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    listed: list[int] = []
    for kind in kinds:
        theirs = kind.from_pretrained(directory).eos_token_id
        named = theirs if isinstance(theirs, list) else [] if theirs is None else [theirs]
        listed += [one for one in named if kind is GenerationConfig or one in special]
    assert stops == [one for one in dict.fromkeys(listed) if one < len(tokenizer) and one != tokenizer.eos_token_id], (
        where
    )
    config = Config()
    config.data.train_sets = {"s": TrainSetConfig(path="x", apply_chat_template=True)}
    settings = train_set_configs(config)["s"]
    check_template(settings, tokenizer)
    [text] = render(["1+1?"], ["row"], settings, tokenizer)
    turns = [{"role": "user", "content": "1+1?"}]
    assert text == AutoTokenizer.from_pretrained(directory).apply_chat_template(
        turns, tokenize=False, add_generation_prompt=True
    ), where


def _compare_weights(directory: Path, reader: WeightReader, where: str) -> None:
    """Every tensor of the directory, as transformers loads it."""
    index = directory / INDEX
    if index.exists():  # the one thing we do without and transformers does not
        index.write_text(json.dumps({"metadata": {}} | json.loads(index.read_text())))
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, trust_remote_code=False)
    theirs = by_checkpoint_name(model)
    assert set(theirs) - {"lm_head.weight"} <= set(reader.names) <= set(theirs), where
    for name in reader.names:
        assert torch.equal(theirs[name].nan_to_num(7), reader.get(name).float().nan_to_num(7)), f"{where}: {name}"


@pytest.mark.slow
def test_a_sentence_or_what_transformers_reads(models: list[Path], tmp_path: Path, cases: Choose) -> None:
    known, outcome, chosen = _known_keys(), _Outcome(), cases("model", 170)
    for number in chosen:
        directory = tmp_path / str(number)
        where = f"model {number}: {'; '.join(_case(number, models, directory, known))}"
        architecture, reader = _read(directory, where)
        if architecture is not None and architecture.num_layers <= 8:
            try:
                same_as_transformers(architecture, directory)
            except AssertionError as error:
                raise AssertionError(f"{where}: {error}") from error
        if reader is None:
            outcome.refused += 1
            shutil.rmtree(directory)
            continue
        _compare_weights(directory, reader, where)
        outcome.accepted.append((number, directory))
        if len(outcome.accepted) > 4 * COMPUTED:
            shutil.rmtree(directory)
    many = len(chosen)
    assert chosen.are_few or (outcome.refused > many / 4 and len(outcome.accepted) > many / 10), outcome
    _compare_logprobs([case for case in outcome.accepted if case[1].exists()])


def _logprobs(directory: Path) -> list[np.ndarray] | str | None:
    """In a rank of its own."""
    try:
        actor = build_actor(directory, Parallel())
    except UserError as error:
        return str(error)
    samples = random_samples(4, 37)
    return actor.logprobs(samples, plan_for(samples))


def _compare_logprobs(accepted: list[tuple[int, Path]]) -> None:
    """A few of them, spread over the families, through the whole actor."""
    compared = 0
    for number, directory in accepted:
        if compared == COMPUTED:
            break
        [mine] = run_ranks(_logprobs, 1, directory)
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, trust_remote_code=False).eval()
        expected = hf_logprobs(model, random_samples(4, 37))
        if isinstance(mine, str):
            assert "NaN or infinite" in mine and not all(p.isfinite().all() for p in model.parameters()), mine
            continue
        assert mine is not None
        for ours, theirs in zip(mine, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4, err_msg=f"case {number}")
        compared += 1
    assert compared == min(COMPUTED, len(accepted)), "too many of these have no finite weights"
