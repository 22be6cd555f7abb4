"""A model directory: which files hold the weights, what in it may run (nothing), a tokenizer that fits the model."""

from __future__ import annotations

import ast
import json
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.job import REPOSITORY, settings
from support.launch import run_ranks
from support.tiny import Parallel, build_actor, write_model

from dppo_megatron.types import UserError
from dppo_megatron.weights.architecture import read_architecture
from dppo_megatron.weights.tokenizer import load_tokenizer, rowless
from dppo_megatron.weights.torch_dist import open_checkpoint
from dppo_megatron.workbench.cli import main
from dppo_megatron.workbench.quickstart.tiny_model import make_tokenizer

CONFIG = str(REPOSITORY / "configs" / "quickstart.yaml")
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer that must never be changed."""
    directory = write_model(tmp_path_factory.mktemp("whole"))
    make_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture
def model(whole: Path, tmp_path: Path) -> Path:
    """A copy of it, to be spoiled."""
    return Path(shutil.copytree(whole, tmp_path / "model"))


def _open(model: Path) -> Any:
    return open_checkpoint(model, read_architecture(model))


def _shard(model: Path, second: str = "model-2.safetensors") -> dict[str, str]:
    """The weights in two files with an index; returns the map of the index."""
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"model-1.safetensors": names[::2], second: names[1::2]}
    for file, mine in parts.items():
        save_file({name: tensors[name] for name in mine}, model / file)
    weight_map = {name: file for file, mine in parts.items() for name in mine}
    (model / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return weight_map


def test_a_tensor_in_two_files_names_both(model: Path) -> None:
    """An old backup beside the weights: the last file name used to win."""
    tensors = load_file(model / "model.safetensors")
    save_file({"model.norm.weight": tensors["model.norm.weight"] + 1}, model / "old_backup.safetensors")
    with pytest.raises(UserError, match=r"model\.norm\.weight is in two files, .*model\.safetensors and .*old_backup"):
        _open(model)


def test_an_index_decides_which_files_are_read(model: Path) -> None:
    """A stray file beside shards with an index changes nothing, as for transformers."""
    expected = load_file(model / "model.safetensors")
    _shard(model)
    save_file({"model.norm.weight": torch.zeros(48)}, model / "consolidated.safetensors")
    reader = _open(model)
    assert len(expected) > 10 and all(torch.equal(reader.get(name), tensor) for name, tensor in expected.items())


def test_two_readings_of_a_directory_are_refused(model: Path, whole: Path) -> None:
    """transformers reads the single file and vLLM the index."""
    _shard(model)
    shutil.copy(whole / "model.safetensors", model)
    with pytest.raises(UserError, match=r"holds model\.safetensors beside model\.safetensors\.index\.json"):
        _open(model)


@pytest.mark.parametrize(
    "file", ["../outside.safetensors", "a/../../outside.safetensors", "{absolute}", "x.bin", "", 3]
)
def test_an_index_stays_inside_its_directory(model: Path, file: str | int) -> None:
    """Also where the file it names is there and right."""
    weight_map = _shard(model)
    shutil.move(model / "model-2.safetensors", model.parent / "outside.safetensors")
    (model / "a").mkdir()
    name = str(model.parent / "outside.safetensors") if file == "{absolute}" else file
    outside = {tensor: name if old == "model-2.safetensors" else old for tensor, old in weight_map.items()}
    (model / INDEX).write_text(json.dumps({"weight_map": outside}))
    with pytest.raises(UserError, match=r"must be the name of a \.safetensors file in"):
        _open(model)


def test_the_hubs_cache_of_symbolic_links_is_read(model: Path, tmp_path: Path) -> None:
    """snapshots/<revision>/* are links to ../../blobs/<hash>."""
    _shard(model)
    blobs, snapshot = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(model.iterdir())):
        shutil.move(path, blobs / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    assert len(_open(snapshot).names) == 47
    assert load_tokenizer(snapshot, read_architecture(snapshot)).eos_token == "<eos>"


def _rename(model: Path, name: str) -> None:
    shutil.move(model / "model.safetensors", model / name)


UNREADABLE: dict[str, tuple[Callable[[Path], object], str]] = {
    "pickled": (lambda m: _rename(m, "pytorch_model.bin"), "only pytorch_model.bin: pickles, which are never loaded"),
    "nothing": (lambda m: (m / "model.safetensors").unlink(), "holds no *.safetensors file"),
    "adapter": (lambda m: (m / "adapter_config.json").write_text("{}"), "an adapter and not a model"),
    "directory": (lambda m: (_rename(m, "x"), (m / "model.safetensors").mkdir()), "not a readable safetensors file"),
    "pipe": (lambda m: (_rename(m, "x"), os.mkfifo(m / "model.safetensors")), "not a readable safetensors file"),
    "index_list": (lambda m: (m / INDEX).write_text("[]"), "expected an object"),
    "index_empty": (lambda m: (m / INDEX).write_text('{"weight_map": {}}'), "expected tensor names with file names"),
    "fp8": (
        lambda m: save_file(
            {k: v.to(torch.float8_e4m3fn) for k, v in load_file(m / "model.safetensors").items()},
            m / "model.safetensors",
        ),
        "has type F8_E4M3; supported",
    ),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_weights_that_are_not_there(model: Path, case: str) -> None:
    spoil, expected = UNREADABLE[case]
    spoil(model)
    with pytest.raises(UserError) as refusal:
        _open(model)
    assert expected in str(refusal.value) and "\n" not in str(refusal.value)


def _refusal_of_ranks(model: Path, parallel: Parallel) -> str:
    try:
        build_actor(model, parallel)
    except UserError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize("value", [float("nan"), -float("inf")])
def test_weights_that_are_not_finite_stop_every_rank(model: Path, value: float) -> None:
    """Only the second pipeline stage reads the damaged layer; the first must not wait for it."""
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.3.mlp.up_proj.weight"][5, 7] = value
    save_file(tensors, model / "model.safetensors")
    for said in run_ranks(_refusal_of_ranks, 2, model, Parallel(pp=2)):
        assert "model.layers.3.mlp.up_proj.weight: 1 of 3072 weights are NaN or infinite" in said


def test_large_finite_weights_are_taken(model: Path) -> None:
    """Their sum overflows float32, which alone says nothing."""
    tensors = load_file(model / "model.safetensors")
    tensors["model.embed_tokens.weight"].fill_(3e38)
    save_file(tensors, model / "model.safetensors")
    assert run_ranks(_refusal_of_ranks, 1, model, Parallel()) == ["accepted"]


class _Touches:
    """A pickle that makes a file when it is read."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._path),)


def _trap(model: Path, touched: Path, *, name: str = ".metadata") -> None:
    (model / name).write_bytes(pickle.dumps(_Touches(touched)))
    for module in ("modeling_evil", "configuration_evil", "tokenization_evil"):
        (model / f"{module}.py").write_text(f"import os\nos.mkdir({str(touched)!r})\n")


@pytest.mark.parametrize("command", [["train"], ["eval"], ["doctor", "--fp8-gate"]], ids=lambda command: command[0])
def test_commands_run_nothing_of_a_model_directory(
    command: list[str],
    files: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Safetensors decide: the pickle beside them is not read. What trains ends where its data is too small, the gate,
    which needs none, where it would build the model."""
    built = Mock(side_effect=UserError("builds the model"))
    monkeypatch.setattr("dppo_megatron.actor.layout.start_process_group", built)
    model, touched = Path(shutil.copytree(files / "model", tmp_path / "model")), tmp_path / "touched"
    _trap(model, touched)
    (tmp_path / "one.jsonl").write_text('{"problem": "1+1=", "answer": "2"}\n')
    job = settings(files, tmp_path / "run", model__hf_path=model, data__train_path=tmp_path / "one.jsonl")
    first, then = (["--out", str(tmp_path / name)] if command == ["eval"] else [] for name in ("first", "then"))
    ends = {"train": "holds only 1 problems", "doctor": "builds the model"}.get(command[0], "")
    assert main([*command, CONFIG, *job, *first]) == (2 if ends else 0)
    said = capsys.readouterr().err
    assert ends in said if ends else "error: " not in said
    (model / "model.safetensors").unlink()  # now the pickle is all there is, and it is read without being run
    assert main([*command, CONFIG, *job, *then]) == 2
    assert ".metadata cannot be read" in capsys.readouterr().err
    assert not touched.exists() and not (tmp_path / "run").exists()


def test_convert_runs_nothing_of_a_model_directory(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    touched = tmp_path / "touched"
    _trap(model, touched)
    assert main(["convert", "to-megatron", "--hf", str(model), "--out", str(tmp_path / "out"), "--verify"]) == 0
    _trap(tmp_path / "out", touched)
    assert main(["convert", "to-hf", "--checkpoint", str(tmp_path / "out"), "--out", str(tmp_path / "hf")]) == 2
    assert "it asks for posix.mkdir" in capsys.readouterr().err
    assert not touched.exists()


def test_custom_code_is_refused_and_not_run(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """auto_map in either file, answered "y" wherever transformers would ask on a terminal."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    touched = tmp_path / "touched"
    _trap(model, touched)
    raw = json.loads((model / "tokenizer_config.json").read_text())
    code = {"AutoTokenizer": ["tokenization_evil.Tokenizer", None]}
    (model / "tokenizer_config.json").write_text(json.dumps(raw | {"auto_map": code, "tokenizer_class": "Evil"}))
    with pytest.raises(UserError, match="names code of its own"):
        load_tokenizer(model, read_architecture(model))
    raw = json.loads((model / "config.json").read_text())
    code = {"AutoConfig": "configuration_evil.Config", "AutoModelForCausalLM": "modeling_evil.Model"}
    (model / "config.json").write_text(json.dumps(raw | {"auto_map": code}))
    with pytest.raises(UserError, match=r"auto_map = .* is not supported"):
        read_architecture(model)
    assert not touched.exists()


def test_every_loader_is_told_not_to_run_code() -> None:
    """transformers asks on a terminal where it is left open."""
    left_open, told = [], 0
    for directory in ("dppo_megatron", "tools", "benchmarks", "examples"):
        for path in sorted((REPOSITORY / directory).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                    continue
                if node.func.attr in ("from_pretrained", "from_config"):
                    trust = [keyword.value for keyword in node.keywords if keyword.arg == "trust_remote_code"]
                    closed = len(trust) == 1 and isinstance(trust[0], ast.Constant) and trust[0].value is False
                    told += closed
                    left_open += [] if closed else [f"{path}:{node.lineno}"]
    assert told >= 3 and not left_open


def _edit(name: str, **changes: Any) -> Callable[[Path], None]:
    def spoil(model: Path) -> None:
        raw = json.loads((model / name).read_text())
        (model / name).write_text(json.dumps({k: v for k, v in (raw | changes).items() if v is not ...}))

    return spoil


def _many_tokens(model: Path) -> None:
    raw = json.loads((model / "tokenizer.json").read_text())
    raw["model"]["vocab"] |= {f"<{number}>": number for number in range(len(raw["model"]["vocab"]), 40)}
    (model / "tokenizer.json").write_text(json.dumps(raw))


def _gap(model: Path) -> None:
    raw = json.loads((model / "tokenizer.json").read_text())
    raw["model"]["vocab"] |= {"<far>": 500}
    (model / "tokenizer.json").write_text(json.dumps(raw))


TOKENIZERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "none": (lambda m: [(m / f).unlink() for f in ("tokenizer.json", "tokenizer_config.json")], "holds no tokenizer"),
    "config_only": (lambda m: (m / "tokenizer.json").unlink(), "holds no tokenizer"),
    "broken": (lambda m: (m / "tokenizer.json").write_text("{"), "its tokenizer cannot be loaded"),
    "empty": (lambda m: (m / "tokenizer.json").write_text("{}"), "its tokenizer cannot be loaded"),
    "config_list": (lambda m: (m / "tokenizer_config.json").write_text("[]"), "expected an object"),
    "class": (_edit("tokenizer_config.json", tokenizer_class=5), "its tokenizer cannot be loaded"),
    "composite": (_edit("tokenizer_config.json", tokenizer_class="RagTokenizer"), "its tokenizer cannot be loaded"),
    "no_end": (_edit("tokenizer_config.json", eos_token=None), "has no end-of-sequence token"),
    "new_end": (_edit("tokenizer_config.json", eos_token="<new>"), 'end-of-sequence token "<new>" has no id'),
    "end_list": (_edit("tokenizer_config.json", eos_token=["<eos>"]), "its tokenizer cannot be loaded"),
    "no_config": (lambda m: (m / "tokenizer_config.json").unlink(), "end-of-sequence token"),
    "too_many": (_many_tokens, "its tokenizer has 40 tokens up to id 39, its config.json only 37"),
    "gap": (_gap, "up to id 500, its config.json only 37"),
}


@pytest.mark.parametrize("case", TOKENIZERS)
def test_tokenizers_that_do_not_fit(model: Path, case: str) -> None:
    spoil, expected = TOKENIZERS[case]
    spoil(model)
    with pytest.raises(UserError) as refusal:
        load_tokenizer(model, read_architecture(model))
    assert expected in str(refusal.value) and "\n" not in str(refusal.value)
    assert str(refusal.value).startswith(("model.hf_path = '", f"{model}"))


def test_added_tokens_with_ids_are_taken(model: Path) -> None:
    """A fine-tuned model's own end of sequence, declared beside the vocabulary."""
    added = {"19": {"content": "<end>", "special": True}}
    _edit("tokenizer_config.json", eos_token="<end>", added_tokens_decoder=added)(model)
    assert load_tokenizer(model, read_architecture(model)).eos_token_id == 19


def test_an_added_token_may_have_no_row(model: Path) -> None:
    """As Gemma 3's of images, in its models without images; but none that a sequence ends with or is padded with."""
    added = {"19": {"content": "<image>", "special": True}}
    small = replace(read_architecture(model), vocab_size=19)
    plain = json.loads((model / "tokenizer_config.json").read_text())
    _edit("tokenizer_config.json", added_tokens_decoder=added)(model)
    tokenizer = load_tokenizer(model, small)
    assert tokenizer("<image>")["input_ids"] == [19] and rowless(tokenizer, small) == {19: "<image>"}
    assert not rowless(tokenizer, read_architecture(model))
    for name in ("eos_token", "pad_token"):
        _edit("tokenizer_config.json", **plain | {"added_tokens_decoder": added, name: "<image>"})(model)
        with pytest.raises(UserError, match=f"its tokenizer's {name} has id 19, its config.json only 19 tokens"):
            load_tokenizer(model, small)
