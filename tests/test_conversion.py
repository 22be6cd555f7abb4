"""Conversion both ways: byte for byte at every layout, agreeing with transformers, and clear about bad input.

What loads the converted checkpoint here is Megatron's own `dist_checkpointing`, into a model whose weights were all
zero, so the test does not lean on the reader that the converter uses itself.
"""

from __future__ import annotations

import json
import resource
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.launch import run_ranks
from support.tiny import FAMILIES, Parallel, build_actor, hf_logprobs, plan_for, random_samples, write_model
from transformers import AutoModelForCausalLM

from dppo_megatron.actor.actor import Actor
from dppo_megatron.actor.layout import build_layout
from dppo_megatron.config.schema import ActorConfig
from dppo_megatron.types import UserError
from dppo_megatron.weights.architecture import read_architecture
from dppo_megatron.weights.hf_files import check_space
from dppo_megatron.weights.mapping import hf_shapes
from dppo_megatron.weights.torch_dist import open_checkpoint
from dppo_megatron.workbench.cli import main

SAMPLES = random_samples(6, 37)
UNEVEN = Parallel(pp=2, tp=2, uneven=(("num_layers_in_first_pipeline_stage", 3),))
LAYOUTS = {
    "qwen3": [Parallel(tp=2, pp=2), Parallel(pp=4), UNEVEN, Parallel()],
    "qwen3_moe": [Parallel(dp=2, pp=2, ep=2), Parallel(tp=2, etp=2)],
    "qwen2": [Parallel(tp=2, pp=2)],
    "llama3": [Parallel(tp=4)],
    "qwen2_moe": [Parallel(dp=2, pp=2, ep=2), Parallel(tp=2, etp=2)],
    "mistral": [Parallel(pp=2)],
    "mixtral": [Parallel(dp=2, pp=2, ep=2)],
    "deepseek_v3": [Parallel(dp=2, pp=2, ep=2), Parallel(tp=2, etp=2)],
    "glm4": [Parallel(tp=2, pp=2), Parallel(pp=4)],
    "glm4_moe": [Parallel(dp=2, pp=2, ep=2), Parallel(tp=2, etp=2)],
    "gemma3": [Parallel(tp=2, pp=2), Parallel(pp=4)],
}


def _convert(*arguments: object) -> int:
    return main(["convert", *(str(argument) for argument in arguments)])


def _tensors(directory: Path) -> dict[str, torch.Tensor]:
    merged: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        merged |= load_file(path)
    return merged


def _assert_byte_equal(left: Path, right: Path) -> None:
    mine, theirs = _tensors(left), _tensors(right)
    assert mine.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert mine[name].dtype == tensor.dtype and mine[name].shape == tensor.shape, name
        assert torch.equal(mine[name].view(torch.uint8), tensor.view(torch.uint8)), name


def _reload_and_save(source: Path, converted: Path, resaved: Path, parallel: Parallel) -> list[np.ndarray] | None:
    """On ranks: Megatron loads `converted` into an all-zero model and saves it again from this layout."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.dict_utils import extract_matching_values
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    from dppo_megatron.checkpoint.writers import use_own_writers

    architecture = read_architecture(source)
    shapes = hf_shapes(architecture)
    config = ActorConfig(layout=parallel.layout, megatron=dict(parallel.uneven))
    layout = build_layout(config.layout, seed=0)
    actor = Actor(config, layout, architecture, lambda name: torch.zeros(shapes[name]), dtype=torch.float32)
    actor.start_phase(config.optimizer, 1)
    names = [name for name in actor.sharded_state() if name.startswith("model")]
    state = {name: actor.sharded_state()[name] for name in names}
    _, tensors = extract_matching_values(state, lambda value: isinstance(value, ShardedObject))
    loaded = dist_checkpointing.load(tensors, str(converted))
    for name in names:
        missing, unexpected = actor._chunks[0].load_state_dict(loaded[name], strict=False)
        assert not unexpected and all(key.endswith("_extra_state") for key in missing)
    if layout.rank == 0:
        resaved.mkdir()
    torch.distributed.barrier()
    use_own_writers()
    dist_checkpointing.save({name: actor.sharded_state()[name] for name in names}, str(resaved))
    return actor.logprobs(SAMPLES, plan_for(SAMPLES, parallel))


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip_through_megatron_at_every_layout(tmp_path: Path, family: str, tied: bool) -> None:
    """HF -> Megatron -> (loaded and saved at a layout) -> HF gives every byte back, and logits are transformers'."""
    source = write_model(tmp_path / "source", family=family, tie_word_embeddings=tied)
    template = Path("additional_chat_templates", "tool_use.jinja")  # where transformers keeps all but the default one
    (source / template).parent.mkdir()
    (source / template).write_text("{{ messages }}")
    assert _convert("to-megatron", "--hf", source, "--out", tmp_path / "megatron", "--verify") == 0
    expected = hf_logprobs(AutoModelForCausalLM.from_pretrained(source).eval(), SAMPLES)
    for parallel in LAYOUTS[family][: 1 if tied else None]:
        resaved, back = tmp_path / f"saved_{parallel}", tmp_path / f"back_{parallel}"
        logprobs = run_ranks(
            _reload_and_save, parallel.world_size, source, tmp_path / "megatron", resaved, parallel, timeout_s=120
        )[0]
        assert logprobs is not None
        for mine, theirs in zip(logprobs, expected, strict=True):
            np.testing.assert_allclose(mine, theirs, atol=2e-5)
        # the layout's own save has no config.json; small files, so that the index is in play
        small = ("--hf", source, "--shard-gb", "0.0001", "--verify")
        assert _convert("to-hf", "--checkpoint", resaved, "--out", back, *small) == 0
        assert (back / "model.safetensors.index.json").is_file()
        assert (back / template).read_text() == (tmp_path / "megatron" / template).read_text() == "{{ messages }}"
        _assert_byte_equal(back, source)


def test_dtype_and_the_checkpoints_own_config(converted: Path, tmp_path: Path) -> None:
    """A converted checkpoint needs no --hf, and --dtype rounds every tensor once."""
    out = tmp_path / "bf16"
    assert _convert("to-hf", "--checkpoint", converted, "--out", out, "--dtype", "bf16", "--verify") == 0
    original = _tensors(converted.parent / "source")
    for name, tensor in _tensors(out).items():
        assert torch.equal(tensor, original[name].bfloat16()), name
    assert AutoModelForCausalLM.from_pretrained(out).dtype == torch.bfloat16
    assert _convert("to-megatron", "--hf", out, "--out", tmp_path / "again", "--verify") == 0


def test_a_correction_bias_is_not_rounded(tmp_path: Path) -> None:
    """Routers choose by it: rounded, they would choose other experts than in training."""
    source, out = write_model(tmp_path / "source", family="glm4_moe"), tmp_path / "bf16"
    assert _convert("to-megatron", "--hf", source, "--out", tmp_path / "megatron") == 0
    assert _convert("to-hf", "--checkpoint", tmp_path / "megatron", "--out", out, "--dtype", "bf16", "--verify") == 0
    original, written = _tensors(source), _tensors(out)
    biases = {name for name in original if name.endswith("e_score_correction_bias")}
    assert biases and all(torch.equal(written[name], original[name]) for name in biases)
    assert {tensor.dtype for name, tensor in written.items() if name not in biases} == {torch.bfloat16}


def test_a_read_only_model_is_converted(source: Path, tmp_path: Path) -> None:
    """As clusters publish them. config.json is edited, which in a read-only copy only root can."""
    model, megatron, out = tmp_path / "model", tmp_path / "megatron", tmp_path / "hf"
    shutil.copytree(source, model)
    for path in model.iterdir():
        path.chmod(0o444)
    assert _convert("to-megatron", "--hf", model, "--out", megatron) == 0
    assert _convert("to-hf", "--checkpoint", megatron, "--out", out) == 0
    assert [path.name for path in (*megatron.iterdir(), *out.iterdir()) if not path.stat().st_mode & 0o200] == []


def _save_as_older_megatrons(model: Path, target: Path) -> set[str]:
    """On ranks: the checkpoint of a mixture with two optimizers, whose keys have their numbers, and with a layer for
    multi-token prediction; the keys' beginnings."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    from dppo_megatron.checkpoint.writers import use_own_writers

    actor = build_actor(model, Parallel(dp=2, ep=2, etp=1, distributed_optimizer=True))
    describe = actor._optimizer.sharded_state_dict

    def numbered(state: Any, metadata: dict[str, Any], **others: Any) -> Any:
        return describe(state, metadata=metadata | {"chained_optim_avoid_prefix": False}, **others)

    actor._optimizer.sharded_state_dict = numbered
    state = actor.sharded_state()
    replica = (0, 0, torch.distributed.get_rank())
    state["mtp"] = ShardedTensor.from_rank_offsets("mtp.layers.0.hnorm.weight", torch.ones(4), replica_id=replica)
    beginnings = {value.key.partition(".")[0] for value in nested_values(state) if hasattr(value, "key")}
    use_own_writers()
    dist_checkpointing.save(state, str(target))
    return beginnings


def test_an_older_megatrons_mixture_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its optimizers' state is no part of the model, whatever it is called, and neither is multi-token prediction."""
    source, saved = write_model(tmp_path / "source", family="qwen3_moe"), tmp_path / "megatron"
    saved.mkdir()
    beginnings = set().union(*run_ranks(_save_as_older_megatrons, 2, source, saved))
    assert beginnings == {"embedding", "decoder", "output_layer", "chained_0", "chained_1", "mtp"}
    assert _convert("to-hf", "--checkpoint", saved, "--hf", source, "--out", tmp_path / "hf", "--verify") == 0
    assert "left out: 1 tensors of layers for multi-token prediction" in capsys.readouterr().out
    _assert_byte_equal(tmp_path / "hf", source)


def test_a_run_can_start_from_a_converted_checkpoint(converted: Path) -> None:
    """What the trainer reads through, for `model.hf_path`, gives the same tensors from either kind of directory."""
    architecture = read_architecture(converted)
    readers = [open_checkpoint(path, architecture) for path in (converted, converted.parent / "source")]
    assert sorted(readers[0].names) == sorted(readers[1].names)
    for name in readers[1].names:
        assert torch.equal(readers[0].get(name), readers[1].get(name)), name


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_model(tmp_path / "source")


def _edit(source: Path, change: Any) -> None:
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})


def _drop(source: Path) -> None:
    _edit(source, lambda t: [t.pop("model.layers.1.mlp.up_proj.weight"), t.pop("model.norm.weight")])


def _add(source: Path) -> None:
    _edit(source, lambda t: t.update({"model.layers.4.stray": torch.zeros(2)}))


def _reshape(source: Path) -> None:
    _edit(source, lambda t: t.update({"model.layers.2.self_attn.k_proj.weight": torch.zeros(31, 48)}))


def _truncate(source: Path) -> None:
    path = source / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _other_architecture(source: Path) -> None:
    raw = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(raw | {"architectures": ["GPT2LMHeadModel"]}))


def _no_config(source: Path) -> None:
    (source / "config.json").unlink()


def _index_names_a_missing_file(source: Path) -> None:
    names = dict.fromkeys(load_file(source / "model.safetensors"), "model.safetensors")
    index = {"weight_map": names | {"model.norm.weight": "model-00002-of-00002.safetensors"}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))


def _index_is_wrong(source: Path) -> None:
    tensors = load_file(source / "model.safetensors")
    save_file({"model.norm.weight": tensors.pop("model.norm.weight")}, source / "other.safetensors")
    save_file(tensors, source / "model.safetensors")
    index = {"weight_map": {**dict.fromkeys(tensors, "model.safetensors"), "model.norm.weight": "model.safetensors"}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))


def _index_is_no_index(source: Path) -> None:
    (source / "model.safetensors.index.json").write_text("[1, 2")


def _second_embedding(source: Path) -> None:
    raw = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(raw | {"tie_word_embeddings": True}))


BAD_INPUT = {
    "missing": (_drop, ["lacks 2: model.layers.1.mlp.up_proj.weight, model.norm.weight"]),
    "extra": (_add, ["has unknown tensors 1: model.layers.4.stray"]),
    "shape": (_reshape, ["model.layers.2.self_attn.k_proj.weight [31, 48] instead of [32, 48]"]),
    "truncated": (_truncate, ["model.safetensors is not a readable safetensors file"]),
    "architecture": (_other_architecture, ["GPT2LMHeadModel is not supported; supported: Qwen3ForCausalLM"]),
    "no_config": (_no_config, ["holds no config.json"]),
    "index_file": (_index_names_a_missing_file, ["names 1 files that do not exist: model-00002-of-00002"]),
    "index_wrong": (_index_is_wrong, ["does not agree with the files about 1 tensors: model.norm.weight"]),
    "index_json": (_index_is_no_index, ["model.safetensors.index.json is not valid JSON"]),
    "tied_but_different": (_second_embedding, ["lm_head.weight differs from model.embed_tokens.weight"]),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_message_and_leaves_nothing(
    source: Path, tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil, expected = BAD_INPUT[case]
    spoil(source)
    before = {path.name for path in tmp_path.iterdir()}
    assert _convert("to-megatron", "--hf", source, "--out", tmp_path / "out") == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said.startswith("error: ")
    for part in expected:
        assert part in said
    assert {path.name for path in tmp_path.iterdir()} == before


def _missing_key(converted: Path) -> None:
    raw = json.loads((converted / "config.json").read_text())
    (converted / "config.json").write_text(json.dumps(raw | {"num_hidden_layers": 3, "layer_types": None}))


def _short_file(converted: Path) -> None:
    path = converted / "__1_0.distcp"
    path.write_bytes(path.read_bytes()[:-300])


def _broken_metadata(converted: Path) -> None:
    (converted / ".metadata").write_bytes((converted / ".metadata").read_bytes()[:50])


BAD_CHECKPOINT = {
    "no_checkpoint": (
        lambda path: (path / ".metadata").unlink(),
        "is not a distributed checkpoint: it has no .metadata",
    ),
    "metadata": (_broken_metadata, "its .metadata cannot be read"),
    "another_model": (_missing_key, "has tensors of another shape"),
    "truncated": (_short_file, "cannot be read"),
    "file_gone": (lambda path: (path / "__2_0.distcp").unlink(), "cannot be read"),
    "no_config": (lambda path: (path / "config.json").unlink(), "give the original Hugging Face directory with --hf"),
}


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("converted")
    assert _convert("to-megatron", "--hf", write_model(directory / "source"), "--out", directory / "megatron") == 0
    return directory / "megatron"


@pytest.mark.parametrize("case", BAD_CHECKPOINT)
def test_bad_checkpoint(converted: Path, tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str]) -> None:
    spoil, expected = BAD_CHECKPOINT[case]
    shutil.copytree(converted, tmp_path / "copy")
    spoil(tmp_path / "copy")
    assert _convert("to-hf", "--checkpoint", tmp_path / "copy", "--out", tmp_path / "out") == 2
    said = capsys.readouterr().err
    assert expected in said and said.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"copy"}


def test_a_run_in_place_of_its_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Which to give, if there is one."""
    (tmp_path / "checkpoints").mkdir()
    assert _convert("to-hf", "--checkpoint", tmp_path, "--out", tmp_path / "out") == 2
    assert "; the run has no checkpoint yet" in capsys.readouterr().err
    (tmp_path / "checkpoints" / "latest").symlink_to(tmp_path)
    assert _convert("to-hf", "--checkpoint", tmp_path, "--out", tmp_path / "out") == 2
    assert f"; of a run, give {tmp_path / 'checkpoints/latest'}" in capsys.readouterr().err


def test_an_existing_target_is_not_touched(
    source: Path, converted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious").write_text("x")
    assert _convert("to-megatron", "--hf", source, "--out", out) == 2
    assert _convert("to-hf", "--checkpoint", converted, "--out", out) == 2
    assert capsys.readouterr().err.count("exists already; remove it or choose another") == 2
    assert [path.name for path in out.iterdir()] == ["precious"]


def test_layouts_that_cannot_be_are_refused(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for option, message in (
        ("--tp=3", "--tp 3 --pp 1 --ep 1: actor.layout.tensor_parallel = 3: the model's 4 attention heads do not"),
        ("--pp=5", "--tp 1 --pp 5 --ep 1: actor.layout: pipeline_parallel x virtual_pipeline = 5: the model's 4"),
        ("--ep=2", "--tp 1 --pp 1 --ep 2: actor.layout.expert_parallel = 2, expert_tensor_parallel = 0: Qwen3ForCausa"),
        ("--pp=0", "--pp 0: must be at least 1"),
    ):
        assert _convert("to-megatron", "--hf", source, "--out", tmp_path / "out", option) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"error: {message}") and said.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_layout_of_unequal_stages_is_said(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The files are the same for every layout, so it is no error; what such a job needs is printed."""
    assert _convert("to-megatron", "--hf", source, "--out", tmp_path / "out", "--pp=3") == 0
    said = capsys.readouterr().out
    assert "--pp 3: the model's 4 layers do not divide by it; for stages of unequal size see actor.megatron" in said
    assert (tmp_path / "out" / "config.json").is_file()


def _convert_on_a_full_disk(direction: str, arguments: list[object]) -> int:
    """In a process of its own: files cannot grow beyond 64 KiB. A full disk looks the same but for the error number."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
    return _convert(direction, *arguments)


def test_a_disk_that_refuses(source: Path, converted: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, said in one line, and nothing left under the target's name or beside it."""
    jobs = {"to-megatron": ["--hf", source], "to-hf": ["--checkpoint", converted]}
    for direction, arguments in jobs.items():
        job = [*arguments, "--out", tmp_path / "out"]
        assert run_ranks(_convert_on_a_full_disk, 1, direction, job) == [2]
        assert "cannot be written: File too large; nothing was left there" in capfd.readouterr().err
        assert {path.name for path in tmp_path.iterdir()} == {"source"}


@pytest.mark.parametrize(
    ("free", "said"), [(0, "only 0.0 MB are free"), (4_900_000, "only 4.9 MB"), (7_250_000_000, "only 7.25 GB")]
)
def test_too_little_space_is_said_in_a_unit_that_shows_it(
    tmp_path: Path, free: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    needed = max(5_000_000, free + 10_000_000)
    with pytest.raises(UserError, match=said) as error:
        check_space(tmp_path, needed)
    assert "0.00 GB" not in str(error.value)
    check_space(tmp_path, free)
