"""The store: complete or invisible, checked when read, and able to give every part of the state back."""

from __future__ import annotations

import dataclasses
import errno
import io
import json
import os
import pickle
import shutil
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from support.launch import RankError, run_ranks
from support.tiny import Parallel, build_actor, plan_for, random_samples, write_model

from dppo_megatron.algorithms.objectives import supervised
from dppo_megatron.checkpoint.checkpoint_dir import named, read_manifest, sums, write_manifest
from dppo_megatron.types import UserError
from dppo_megatron.weights.torch_dist import read_metadata
from dppo_megatron.workbench.cli import main

pytestmark = pytest.mark.slow

TP2PP2 = Parallel(tp=2, pp=2, distributed_optimizer=True)
RUN = "0123456789abcdef"
LOOP_STATE = {"step": 1, "history": np.arange(5.0), "nested": {"none": None, "text": "x"}}


def _store(root: Path, model: Path, **extra: Any) -> Any:
    from dppo_megatron.checkpoint.store import CheckpointStore

    return CheckpointStore(root, assets=model, **({"run": RUN, "keep": 2, "async_save": False} | extra))


def _save_steps(model: Path, root: Path, parallel: Parallel, steps: list[int], extra: dict[str, Any]) -> list[set[str]]:
    """On ranks: an update before each save; what stands under `root` after each."""
    from dppo_megatron.checkpoint.store import describe

    actor, store = build_actor(model, parallel), _store(root, model, **extra)
    actor.freeze_reference()
    samples = random_samples(6, 37)
    seen = []
    for step in steps:
        actor.update(samples, plan_for(samples, parallel), supervised())
        store.save(actor, LOOP_STATE | {"step": step}, describe(step, {"seed": 1}, run=RUN))
        seen.append({path.name for path in root.iterdir()})
    store.finalize(blocking=True)
    return [*seen, {path.name for path in root.iterdir()}]


def _load_and_update(model: Path, directory: Path, parallel: Parallel) -> dict[str, Any]:
    """On ranks: everything that a load gives back, and the update after it."""
    from dppo_megatron.checkpoint.store import load_checkpoint

    actor = build_actor(model, parallel)
    actor.freeze_reference()
    loop_state = load_checkpoint(directory, actor)
    with actor.reference_weights():
        reference = {name: tensor.numpy().copy() for name, tensor in actor.weights()}
    samples = random_samples(6, 37)
    measured = actor.update(samples, plan_for(samples, parallel), supervised()).figures()
    weights = {name: tensor.numpy().copy() for name, tensor in actor.weights()}
    return {"loop": loop_state, "reference": reference, "measured": measured, "weights": weights}


def _three_updates(
    model: Path, parallel: Parallel
) -> tuple[dict[str, float], dict[str, np.ndarray], dict[str, np.ndarray]]:
    """On ranks: the uninterrupted original of a save after the second update."""
    actor = build_actor(model, parallel)
    reference = {name: tensor.numpy().copy() for name, tensor in actor.weights()}
    samples = random_samples(6, 37)
    for _ in range(3):
        measured = actor.update(samples, plan_for(samples, parallel), supervised()).figures()
    return measured, {name: tensor.numpy().copy() for name, tensor in actor.weights()}, reference


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """37 tokens: no tensor-parallel size above 1 divides the vocabulary, so its padding differs between layouts."""
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def saved(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 1 and 2, written by four ranks."""
    root = tmp_path_factory.mktemp("saved") / "checkpoints"
    run_ranks(_save_steps, 4, model, root, TP2PP2, [1, 2], {})
    return root


@pytest.mark.parametrize(
    "parallel", [Parallel(distributed_optimizer=True), Parallel(dp=2, distributed_optimizer=True), TP2PP2], ids=str
)
def test_every_part_comes_back_at_every_layout(model: Path, saved: Path, parallel: Parallel) -> None:
    """Weights, moments and schedule (by the next update), the reference policy byte for byte, and the loop's state.

    At the layout that saved, bit for bit. At others to rounding, which Adam's first steps enlarge: a lost moment or a
    schedule that is off by one would change weights by some 1e-3 and more.
    """
    exact = parallel == TP2PP2
    measured, weights, reference = run_ranks(_three_updates, parallel.world_size, model, parallel)[0]
    assert weights and reference
    loaded = run_ranks(_load_and_update, parallel.world_size, model, saved / "step_000002", parallel)
    for got in loaded:
        assert got["loop"].keys() == LOOP_STATE.keys() and got["loop"]["step"] == 2
        np.testing.assert_array_equal(got["loop"]["history"], LOOP_STATE["history"])
        for name, tensor in reference.items():
            np.testing.assert_array_equal(got["reference"][name], tensor, err_msg=name)
        assert got["measured"] == (measured if exact else pytest.approx(measured, rel=1e-4))
        for name, tensor in weights.items():
            tolerance = 0.0 if exact else 3e-4
            np.testing.assert_allclose(got["weights"][name], tensor, rtol=0, atol=tolerance, err_msg=name)


def _with_other_settings(model: Path, root: Path) -> list[tuple[float, list[dict[str, Any]]]]:
    """On a rank, of both optimizers: saved after an update, loaded by a run with other settings, and its next update's
    learning rate and groups."""
    from dppo_megatron.checkpoint.store import describe, load_checkpoint

    samples, out = random_samples(6, 37), []
    for name in ("whole", "distributed"):
        parallel = Parallel(distributed_optimizer=name == "distributed")
        for changes in ({}, CHANGED):
            actor = build_actor(model, parallel)
            if changes:
                actor.start_phase(dataclasses.replace(actor._config.optimizer, **changes), total_steps=10)
                load_checkpoint(root / name / "step_000001", actor)
            result = actor.update(samples, plan_for(samples, parallel), supervised())
            if not changes:
                store = _store(root / name, model)
                store.save(actor, LOOP_STATE, describe(1, {"seed": 1}, "abc", run=RUN))
        out.append((result.learning_rate, [dict(group, params=None) for group in actor._optimizer.param_groups]))
    return out


CHANGED = {"learning_rate": 0.5, "min_learning_rate": 0.25, "adam_beta1": 0.7, "adam_beta2": 0.8, "adam_eps": 1e-3}


def test_a_resumed_run_has_its_own_settings(model: Path, tmp_path: Path) -> None:
    """Where `checkpoint.may_change` permits others: Megatron's groups bring those of the run that saved."""
    for learning_rate, groups in run_ranks(_with_other_settings, 1, model, tmp_path)[0]:
        assert learning_rate == 0.5  # at the end of a warm-up of two updates
        for group in groups:
            got = [group[key] for key in ("max_lr", "min_lr", "betas", "eps")]
            assert got == [0.5, 0.25, (0.7, 0.8), 1e-3]


def test_a_training_checkpoint_converts_by_itself(model: Path, saved: Path, tmp_path: Path) -> None:
    """No --hf: it holds config.json; the optimizer's and the reference's tensors are left out."""
    arguments = ["--checkpoint", str(saved / "step_000002"), "--out", str(tmp_path / "hf"), "--verify"]
    assert main(["convert", "to-hf", *arguments]) == 0
    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM.from_pretrained(tmp_path / "hf").config.vocab_size == 37


class _LayersInFp8:
    """A weight, and the state that Transformer Engine keeps of layers in FP8."""

    def __init__(self, *layers: str) -> None:
        self._layers, self.loaded = layers, dict[str, Any]()

    def sharded_state(self, *, loading: bool = False) -> dict[str, Any]:
        weight = ShardedTensor.from_rank_offsets("weight", torch.zeros(3) if loading else torch.arange(3.0))
        keys = [f"{layer}._extra_state" for layer in self._layers]
        states = {key: ShardedObject(key, torch.ones(1 if loading else 2), (1,), (0,)) for key in keys}
        return {"model": {"weight": weight} | states, "groups": [{"lr": 1.0}]}

    def load_sharded_state(self, state: dict[str, Any]) -> None:
        self.loaded = {name: value.tolist() for name, value in state["model"].items()}


def _load_with_more_fp8(model: Path, root: Path) -> dict[str, list[float]]:
    from dppo_megatron.checkpoint.store import describe, load_checkpoint

    _store(root, model).save(_LayersInFp8("old"), LOOP_STATE, describe(1, {}, run=RUN))
    actor = _LayersInFp8("old", "new")
    load_checkpoint(root / "step_000001", actor)
    return actor.loaded


def test_fp8_may_begin_at_a_resume(model: Path, tmp_path: Path) -> None:
    """checkpoint.may_change=[actor.fp8]: state that the checkpoint has not begins anew, and the rest is loaded."""
    [loaded] = run_ranks(_load_with_more_fp8, 1, model, tmp_path / "checkpoints")
    assert loaded == {"weight": [0.0, 1.0, 2.0], "old._extra_state": [1.0, 1.0]}


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_old_ones_go_after_the_new_one_is_complete(model: Path, tmp_path: Path, asynchronous: bool) -> None:
    root = tmp_path / "checkpoints"
    extra = {"async_save": asynchronous, "keep": 2}
    seen = run_ranks(_save_steps, 1, model, root, Parallel(), [1, 2, 3], extra)[0]
    whole = [{name for name in names if "incomplete" not in name} for names in seen]
    if asynchronous:  # a save is complete at the next one, at the latest
        assert whole[1] >= {"step_000001"} and whole[2] >= {"step_000002"}
    else:
        assert whole[0] == {"latest", "step_000001"}
    assert seen[-1] == {"latest", "step_000002", "step_000003"}
    assert (root / "latest").resolve().name == "step_000003"


def _device_calls(model: Path, root: Path) -> tuple[set[str], set[str]]:
    """On one rank: the calls of the device that an asynchronous save makes, in this process and in the writer's."""
    from dppo_megatron.checkpoint.store import describe
    from dppo_megatron.platform.hook import Accelerator

    here, asked, found = os.getpid(), root.parent / "asked", Accelerator.__getattribute__

    def note(self: Accelerator, name: str) -> Any:
        with asked.open("a") as file:  # one line a call, from either process
            file.write(f"{os.getpid() == here} {name}\n")
        return found(self, name)

    actor, store = build_actor(model, Parallel(distributed_optimizer=True)), _store(root, model, async_save=True)
    actor.update(random_samples(6, 37), plan_for(random_samples(6, 37)), supervised())
    Accelerator.__getattribute__ = note  # type: ignore[method-assign]
    store.save(actor, LOOP_STATE, describe(1, {"seed": 1}, run=RUN))
    store.finalize(blocking=True)
    calls = [line.split() for line in asked.read_text().splitlines()]
    return {name for own, name in calls if own == "True"}, {name for own, name in calls if own == "False"}


def test_the_forked_writer_touches_no_device(model: Path, tmp_path: Path) -> None:
    """CUDA cannot be used in a fork of a process that has used it. Here every call that Megatron makes of it goes to
    the stand-in of a CPU, which tells them apart: the trainer waits for its copies before it forks, the writer asks
    for nothing."""
    [(trainers, writers)] = run_ranks(_device_calls, 1, model, tmp_path / "checkpoints")
    assert "synchronize" in trainers and not writers


def test_what_is_staged_for_a_forked_writer_is_its_own() -> None:
    """torch copies without blocking into pinned memory, whose pages a fork shares with the trainer that reuses them."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    from dppo_megatron.checkpoint.writers import use_own_writers

    on_device = MagicMock()
    for _ in range(2):  # as two saves
        use_own_writers()
        [(_, _, (_, [(_, staged)]))] = FileSystemWriterAsync.preload_tensors(
            [("file", "key", ([], [("x", on_device)]))], True
        )
        assert staged is on_device.to.return_value
    assert [call.kwargs for call in on_device.to.call_args_list] == [{"non_blocking": False}] * 2


def _newest_good(model: Path, root: Path) -> tuple[str, list[str]]:
    newest, passed_over = _store(root, model).find_newest()
    return (newest.name if newest else ""), [f"{path.name}: {why}" for path, why in passed_over]


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 4
    path.write_bytes(data)


def _replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def _rewrite(directory: Path, **changes: Any) -> None:
    """A manifest whose own checksum is right, and that says something else."""
    manifest = read_manifest(directory)
    assert not isinstance(manifest, str)
    write_manifest(directory, dataclasses.replace(manifest, **changes))


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


SPOIL = {
    "byte": (lambda d: _flip(next(d.glob("__3_*.distcp"))), "has another checksum"),
    "metadata": (lambda d: _flip(d / ".metadata"), ".metadata has another checksum"),
    "loop": (lambda d: _flip(d / "loop.pt"), "loop.pt has another checksum"),
    "short": (lambda d: (d / "metadata.json").write_bytes(b"x"), "metadata.json has 1 bytes instead of"),
    "gone": (lambda d: next(d.glob("__0_*.distcp")).unlink(), "cannot be read (No such file or directory)"),
    "manifest": (lambda d: (d / "manifest.json").write_text('{"format"'), "its manifest.json cannot be read"),
    "manifest_digit": (lambda d: _replace(d / "manifest.json", '"step": 2', '"step": 1'), "has another checksum"),
    "foreign": (lambda d: _rewrite(d, run="another"), "it is of another run: another (seed 1), and this run is"),
    "renamed": (lambda d: _rewrite(d, step=7), "it is the checkpoint of step 7 under another name"),
    "manifest_pipe": (lambda d: _pipe(d / "manifest.json"), "its manifest.json is not a file"),
    "pipe": (lambda d: _pipe(d / "loop.pt"), "loop.pt has 0 bytes instead of"),
    "link_to_itself": (lambda d: (d / "loop.pt").unlink() or (d / "loop.pt").symlink_to("loop.pt"), "symbolic links"),
    "half_deleted": (lambda d: (d / "manifest.json").unlink(), "it holds no manifest.json"),
}


@pytest.mark.parametrize("how", SPOIL)
def test_a_spoilt_checkpoint_is_passed_over(model: Path, saved: Path, tmp_path: Path, how: str) -> None:
    """On both ranks alike: the one before, and a line that names what is wrong."""
    root = tmp_path / "checkpoints"
    shutil.copytree(saved, root, symlinks=True)
    spoil, said = SPOIL[how]
    spoil(root / "step_000002")
    for name, lines in run_ranks(_newest_good, 2, model, root):
        assert name == "step_000001"
        assert len(lines) == 1 and lines[0].startswith("step_000002: ") and said in lines[0]


def _with_stale_files(model: Path, root: Path, failures: int) -> tuple[str, set[str]]:
    """On ranks: rank 1's first `failures` reads of files of step 2 fail, at a start and then in a save of step 3; what
    the start says, and what stands under `root` in the end."""
    from dppo_megatron.checkpoint import checkpoint_dir
    from dppo_megatron.checkpoint.store import describe

    left, plain = failures, checkpoint_dir._sha256

    def sha256(path: Path) -> str:
        nonlocal left
        if dist.get_rank() == 1 and path.parent.name == "step_000002" and left:
            left -= 1
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return plain(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_dir, "_TRY_AFTER_S", (0.0, 0.01, 0.01))
        patch.setattr(checkpoint_dir, "_sha256", sha256)
        try:
            said = str(_newest_good(model, root))
        except UserError as error:
            said = str(error)
        store = _store(root, model)
        store.save(build_actor(model, Parallel(tp=2)), LOOP_STATE, describe(3, {}, run=RUN))
    return said, {path.name for path in root.iterdir()}


@pytest.mark.parametrize("failures", [1, 1000])
def test_a_checkpoint_that_cannot_be_read_for_now_is_not_damaged(
    model: Path, saved: Path, tmp_path: Path, failures: int
) -> None:
    """A file server that fails over: the file is read again, or the run does not start; in a running job the save is
    complete. Nothing goes to aside/."""
    root = tmp_path / "checkpoints"
    shutil.copytree(saved, root, symlinks=True)
    for said, names in run_ranks(_with_stale_files, 2, model, root, failures):
        if failures == 1:
            assert said == "('step_000002', [])" and names == {"latest", "step_000002", "step_000003"}
        else:
            assert "cannot be read now (Stale file handle)" in said and "step_000002" in said
            assert names == {"latest", "step_000001", "step_000002", "step_000003"}


def test_what_crashes_leave_is_swept(model: Path, saved: Path, tmp_path: Path) -> None:
    """Half-written and half-removed directories go."""
    root = tmp_path / "checkpoints"
    shutil.copytree(saved, root, symlinks=True)
    (root / "step_000003.incomplete.1a2b3c4d").mkdir()
    (root / "step_000001").rename(root / "step_000001.removed")
    assert run_ranks(_newest_good, 1, model, root) == [("step_000002", [])]
    assert [step for step, _ in named(root)] == [2]
    assert {path.name for path in root.iterdir()} == {"latest", "step_000002"}


def test_a_newer_megatrons_checkpoint_is_named(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From 0.17 on there is no common.pt; 0.16 would die in Megatron with an AttributeError."""
    from dppo_megatron.checkpoint import store

    directory = tmp_path / "step_000002"
    shutil.copytree(saved / "step_000002", directory)
    store._check_reader(directory)
    (directory / "common.pt").unlink(missing_ok=True)
    _rewrite(directory, versions={"megatron_core": "0.19.2"})
    monkeypatch.setattr(store, "megatron_version", "0.16.1")
    with pytest.raises(UserError, match=r"written by megatron-core 0\.19\.2, and 0\.16\.1 cannot read it"):
        store._check_reader(directory)
    monkeypatch.setattr(store, "megatron_version", "0.19.2")
    store._check_reader(directory)


def _compared(model: Path, root: Path) -> tuple[int, int]:
    """On a rank, in two saves and a load: pairs of shards that torch compares, and how often Megatron has every rank
    send its list of shards to all others."""
    from megatron.core.dist_checkpointing import serialization, state_dict_utils
    from torch.distributed._shard.sharding_spec import _internals
    from torch.distributed.checkpoint import default_planner

    calls: Counter[str] = Counter()

    def count(owner: Any, name: str, what: str) -> None:
        plain = getattr(owner, name)

        def counted(*arguments: Any) -> Any:
            calls[what] += 1
            return plain(*arguments)

        setattr(owner, name, counted)

    count(_internals, "_check_shard_metadata_pair_overlap", "pairs")
    count(default_planner, "_check_box_overlap", "pairs")
    for module in (serialization, state_dict_utils):
        count(module, "determine_global_metadata", "lists")
    _save_steps(model, root, Parallel(), [1, 2], {})
    _load_and_update(model, root / "step_000002", Parallel())
    return calls["pairs"], calls["lists"]


def test_what_a_mixtures_checkpoint_costs_beside_its_bytes(tmp_path: Path) -> None:
    """Twice as many layers: twice as many comparisons of shards, where experts stacked over layers take four times as
    many. What each rank writes is compared once in a process."""
    pairs = {}
    for layers in (3, 6):
        sizes = {"num_hidden_layers": layers, "num_experts": 12, "moe_intermediate_size": 4}
        model = write_model(tmp_path / f"of {layers}", family="qwen3_moe", **sizes)
        [(pairs[layers], lists)] = run_ranks(_compared, 1, model, tmp_path / f"checkpoints of {layers}")
        assert lists == 1
    assert 0 < pairs[6] <= 2 * pairs[3]


def test_a_tensor_that_is_not_there_is_named(tmp_path: Path) -> None:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    from torch.distributed.checkpoint.metadata import Metadata

    from dppo_megatron.checkpoint.store import _check_tensors

    key = "decoder.layers.0.mlp.router.weight"
    with pytest.raises(UserError, match=f"holds no tensor {key}; .* another model, or without adapters or a reference"):
        _check_tensors({"a": ShardedTensor.from_rank_offsets(key, torch.zeros(2))}, Metadata({}), tmp_path)


def test_manifest_lists_every_file(saved: Path) -> None:
    manifest = read_manifest(saved / "step_000002")
    assert not isinstance(manifest, str)
    names = {path.name for path in (saved / "step_000002").iterdir()}
    assert set(manifest.files) == names - {"manifest.json"}
    assert (manifest.step, manifest.world_size) == (2, 4)
    assert json.loads((saved / "step_000002" / "manifest.json").read_text())["config"] == {"seed": 1}
    assert manifest.versions["torch"] == torch.__version__


class _Touches:
    """A pickle that makes a directory when it is read."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._path),)


def _as_bytes(directory: Path, touched: Path, **forged: Any) -> None:
    """A tensor that the actor asks for is described as bytes, which torch's planner unpickles; with `forged` it also
    has what Megatron compares before that."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

    metadata, payload = read_metadata(directory), io.BytesIO()
    key = next(key for key in metadata.state_dict_metadata if key.startswith("decoder.") and key.endswith("weight"))
    described, size = BytesStorageMetadata(), metadata.state_dict_metadata[key].size
    described.__dict__.update({"size": size} if forged else {})
    metadata.state_dict_metadata[key] = described
    torch.save(_Touches(touched), payload)
    (directory / "__0_9.distcp").write_bytes(payload.getvalue())
    metadata.storage_data[MetadataIndex(key)] = _StorageInfo("__0_9.distcp", 0, len(payload.getvalue()))
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))


def _elsewhere(directory: Path, touched: Path) -> None:
    metadata = read_metadata(directory)
    index, place = next(iter(metadata.storage_data.items()))
    metadata.storage_data[index] = dataclasses.replace(place, relative_path="../../x.distcp")
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))


PLANTED = {
    "metadata": (lambda d, touched: (d / ".metadata").write_bytes(pickle.dumps(_Touches(touched))), "it asks for"),
    "loop": (lambda d, touched: torch.save({"loop": _Touches(touched)}, d / "loop.pt"), "loop.pt' cannot be read"),
    "common": (lambda d, touched: torch.save({"a": _Touches(touched)}, d / "common.pt"), "would have to run code"),
    "bytes": (_as_bytes, "is described as bytes"),
    "forged bytes": (lambda d, touched: _as_bytes(d, touched, forged=True), "is described as bytes"),
    "elsewhere": (_elsewhere, "is not a file inside"),
}


def _refusal(model: Path, directory: Path) -> str:
    """On a rank."""
    from dppo_megatron.checkpoint.store import check, load_checkpoint

    assert check(directory) == ""
    try:
        load_checkpoint(directory, build_actor(model, Parallel()))
    except UserError as error:
        return str(error)
    return "loaded"


def test_a_model_of_another_size_is_a_sentence(saved: Path, tmp_path: Path) -> None:
    """`checkpoint.may_change=[model.hf_path]` is for a copy of the same model; torch's exception is a traceback."""
    [said] = run_ranks(_refusal, 1, write_model(tmp_path / "wider", intermediate_size=96), saved / "step_000002")
    assert "step_000002': the run that wrote it trained another model: Global shape mismatch" in said
    assert "\n" not in said and "for key " in said


def test_a_folder_of_chat_templates_is_part_of_a_checkpoint(model: Path, tmp_path: Path) -> None:
    """With a checksum of its own; transformers keeps all templates but the default one there."""
    source, template = tmp_path / "model", "additional_chat_templates/tool_use.jinja"
    shutil.copytree(model, source)
    (source / template).parent.mkdir()
    (source / template).write_text("{{ messages }}")
    run_ranks(_save_steps, 2, source, tmp_path / "checkpoints", Parallel(tp=2), [1], {})
    saved = tmp_path / "checkpoints" / "step_000001"
    assert (saved / template).read_text() == "{{ messages }}"
    assert run_ranks(_refusal, 1, source, saved) == ["loaded"]
    (saved / template).write_text("{{ messages[0] }}")
    with pytest.raises(RankError, match=r"tool_use\.jinja has 17 bytes instead of 14"):
        run_ranks(_refusal, 1, source, saved)


@pytest.mark.parametrize("how", PLANTED)
def test_a_hostile_checkpoint_runs_nothing(
    model: Path, saved: Path, tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its manifest is right, as whoever forges a checkpoint sees to. Also where the user has told torch to unpickle
    whatever does not forbid it, as older Megatron scripts do."""
    directory, touched = tmp_path / "step_000002", tmp_path / "touched"
    shutil.copytree(saved / "step_000002", directory)
    plant, said = PLANTED[how]
    plant(directory, touched)
    _rewrite(directory, files=sums(directory, [p.name for p in directory.iterdir() if p.name != "manifest.json"]))
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    [refusal] = run_ranks(_refusal, 1, model, directory)
    assert not touched.exists()
    assert said in refusal and str(directory) in refusal
