"""Reads and writes Megatron distributed checkpoints (`torch_dist`) tensor by tensor in one process.

Megatron's own save needs the whole model in memory and a process group. With the public interfaces of PyTorch's
distributed checkpoint, the underlying format, a converter describes all chunks first and supplies their data one by
one. Here a chunk is one tensor of one layer (and expert), and a file is one layer.
"""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from dppo_megatron.config.load import config_from_values
from dppo_megatron.config.schema import Config
from dppo_megatron.safe_pickle import UnsafePickleError, read_pickle
from dppo_megatron.types import UserError
from dppo_megatron.weights.architecture import Architecture
from dppo_megatron.weights.hf_files import CheckpointReader, WeightReader, check_shapes, holds_safetensors
from dppo_megatron.weights.json_files import read_object
from dppo_megatron.weights.mapping import (
    PADDED_TO_VOCAB,
    Place,
    adapter_key,
    adapter_parts,
    adapter_rows,
    full_shape,
    hf_names,
    in_layer_order,
    layer_of,
    merged,
    places,
    split,
    stacked_axes,
    stacked_shape,
    table,
)

_FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_MTP = "mtp."
_NOT_MODEL = ("optimizer.", "chained_", "reference.", _MTP)
"""Key prefixes of what a training checkpoint holds beside the model here: older Megatron-LMs number the optimizers of a
mixture (chained_0.optimizer.state...), and layers for multi-token prediction are not read."""


def is_torch_dist(directory: str | Path) -> bool:
    """Whether `directory` is a distributed checkpoint: has `.metadata` and no safetensors, which take precedence."""
    return (Path(directory) / ".metadata").is_file() and not holds_safetensors(directory)


def open_checkpoint(
    directory: str | Path, architecture: Architecture, given_as: str = "model.hf_path ="
) -> WeightReader:
    """A reader for `directory`, whichever kind of checkpoint it holds. Raises UserError as the readers do."""
    if is_torch_dist(directory):
        return TorchDistReader(directory, architecture)
    return CheckpointReader(directory, architecture, given_as)


def write_torch_dist(
    directory: Path, architecture: Architecture, dtypes: Mapping[str, torch.dtype], read: Callable[[str, Place], Tensor]
) -> None:
    """Write the model's weights into the existing `directory`, one file per layer, with one tensor in memory at a time.

    Args:
        dtypes: the dtype of each Megatron key.
        read: returns the full, unpadded tensor of a key at a place.
    """
    planner = _OnDemand(architecture, read)
    by_layer = [
        [_write_item(key, place, architecture, dtypes[key]) for key, place in layer]
        for _, layer in groupby(in_layer_order(architecture), key=lambda item: layer_of(*item))
    ]
    writer = FileSystemWriter(directory)
    writer.set_up_storage_writer(is_coordinator=True)
    # one plan per layer, as if each were written by its own rank, so that each becomes its own file
    plans, metadata = planner.create_global_plan([SavePlan(items) for items in by_layer])
    plans = writer.prepare_global_plan([writer.prepare_local_plan(plan) for plan in plans])
    writer.finish(metadata, [writer.write_data(plan, planner).wait() for plan in plans])
    torch.save({}, directory / "common.pt")
    (directory / "metadata.json").write_text(json.dumps(_FORMAT), encoding="utf-8")


class TorchDistReader:
    """Reads the model's weights from a distributed checkpoint of any layout, of this project or of another (then each
    layer of a mixture must have its own keys). Adapters are merged into the weights.

    Raises:
        UserError: keys that are missing, unknown or of another shape (all are named).
    """

    def __init__(self, directory: str | Path, architecture: Architecture) -> None:
        self._directory, self._reader = Path(directory), FileSystemReader(directory)
        metadata = read_metadata(self._directory)
        tensors = {
            key: value
            for key, value in metadata.state_dict_metadata.items()
            if isinstance(value, TensorStorageMetadata) and not key.startswith(_NOT_MODEL)
        }
        self.left_out = [
            key
            for key, value in metadata.state_dict_metadata.items()
            if isinstance(value, TensorStorageMetadata) and key.startswith(_MTP)
        ]
        has_adapters = any(key.endswith(".lora_a") for key in tensors)
        run = _run_config(self._directory) if has_adapters else Config()
        self._architecture = architecture = replace(architecture, lora=None).with_adapters(run.actor.lora)
        self.lora, self.base = architecture.lora, run.model.hf_path
        """The adapters in the checkpoint, and the path of the model that they were trained on."""
        self.dtypes = {key: value.properties.dtype for key, value in tensors.items()}
        """The dtype of each Megatron key."""
        keys = (*table(architecture), *adapter_rows(architecture))
        expected = {key: stacked_shape(key, architecture) for key in keys}
        stored = {key: tuple(value.size) for key, value in tensors.items()}
        for key in PADDED_TO_VOCAB:
            if key in stored and key in expected and stored[key][0] > expected[key][0]:
                stored[key] = (expected[key][0], *stored[key][1:])  # padded for some tensor-parallel size
        check_shapes(f"checkpoint '{directory}'", expected, stored)
        self._chunks: dict[tuple[str, Place], list[ChunkStorageMetadata]] = {}
        self._tensors = tensors
        for key in keys:
            axes = stacked_axes(key, architecture)
            for chunk in tensors[key].chunks:
                self._chunks.setdefault((key, tuple(chunk.offsets[:axes])), []).append(chunk)
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        self._where = {
            name: (key, place, part)
            for key, place in in_layer_order(architecture)
            for part, name in enumerate(hf_names(key, place, architecture))
        }
        self._last: tuple[str, Place, list[Tensor]] | None = None
        self.names = list(self._where)

    def get(self, name: str) -> Tensor:
        """One full tensor under its Hugging Face name, on the CPU."""
        key, place, part = self._where[name]
        if self._last is None or self._last[:2] != (key, place):
            self._last = None  # free it before the next one is read
            self._last = (key, place, split(key, self._policy(key, place), self._architecture))
        return self._last[2][part].clone(memory_format=torch.contiguous_format)

    def adapters(self) -> dict[str, Tensor]:
        """Every tensor of the adapters, by PEFT's names; empty if the checkpoint has no adapters."""
        architecture, tensors = self._architecture, dict[str, Tensor]()
        for key in adapter_rows(architecture):
            for place in places(key, architecture):
                parts = split(key, self.full(key, place), architecture)
                tensors |= zip(hf_names(key, place, architecture), parts, strict=True)
        return tensors

    def _policy(self, key: str, place: Place) -> Tensor:
        """A full tensor with its adapter merged in."""
        full, lora = self.full(key, place), self._architecture.lora
        if lora is None or adapter_key(key, "a") not in adapter_rows(self._architecture):
            return full
        a, b = (self.full(adapter_key(key, half), place) for half in "ab")
        return merged(full, a, b, adapter_parts(key, self._architecture), lora)

    def full(self, key: str, place: Place) -> Tensor:
        """Megatron's full tensor of a key at a place, without the vocabulary's padding."""
        shape = full_shape(key, self._architecture)
        chunks = self._chunks.get((key, place), [])
        box = ChunkStorageMetadata(torch.Size((*place, *(0 for _ in shape))), torch.Size((*(1 for _ in place), *shape)))
        stored = TensorStorageMetadata(self._tensors[key].properties, self._tensors[key].size, chunks)
        items = create_read_items_for_chunk_list(key, stored, [box])
        covered = sum(math.prod(item.lengths) for item in items)
        if covered != math.prod(shape):
            raise UserError(f"checkpoint '{self._directory}': holds only a part of {key} {list(place)}")
        full = torch.empty(box.sizes, dtype=self.dtypes[key])
        try:
            self._reader.read_data(LoadPlan(items), _Into(full)).wait()
        except (OSError, EOFError, RuntimeError, ValueError, AssertionError, pickle.UnpicklingError) as error:
            raise UserError(f"checkpoint '{self._directory}': {key} {list(place)} cannot be read: {error}") from None
        return full.reshape(shape)


def _run_config(directory: Path) -> Config:
    """The config of the run that wrote a checkpoint with adapters, which has their alpha."""
    path = directory / "manifest.json"
    values = read_object(path).get("config")
    if not isinstance(values, dict):
        raise UserError(f"{path}: has no config of the run, which is needed for the adapters in '{directory}'")
    run = config_from_values(values, str(path))
    with suppress(UserError):
        run.model = config_from_values({"model": values.get("model", {})}, str(path), keep_references=False).model
    return run


class _OnDemand(DefaultSavePlanner):
    """Supplies a chunk's data when the writer asks for it."""

    def __init__(self, architecture: Architecture, read: Callable[[str, Place], Tensor]) -> None:
        super().__init__(flatten_state_dict=False)
        self._architecture, self._read = architecture, read

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        key, offset, data = write_item.index.fqn, write_item.index.offset, write_item.tensor_data
        assert data is not None and offset is not None
        place = tuple(offset[: stacked_axes(key, self._architecture)])
        return self._read(key, place).reshape(data.chunk.sizes)


class _Into(DefaultLoadPlanner):
    def __init__(self, target: Tensor) -> None:
        super().__init__()
        self._target = target

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        target = self._target
        for axis, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(axis, start, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass


def _write_item(key: str, place: Place, architecture: Architecture, dtype: torch.dtype) -> WriteItem:
    shape = full_shape(key, architecture)
    offset = torch.Size((*place, *(0 for _ in shape)))
    chunk = ChunkStorageMetadata(offset, torch.Size((*(1 for _ in place), *shape)))
    size = torch.Size(stacked_shape(key, architecture))
    return WriteItem(
        MetadataIndex(key, offset),
        WriteItemType.SHARD,
        tensor_data=TensorWriteData(chunk, TensorProperties(dtype=dtype), size),
    )


def read_metadata(directory: Path) -> Metadata:
    """The description of the checkpoint's tensors and files, read without running code.

    A damaged or hostile file can still combine the allowed classes in any way, so every attribute that is used later is
    checked here, and no file may be outside the checkpoint's directory.

    Raises:
        UserError: the file is unreadable, names anything but plain data, or has paths that leave `directory`.
    """
    path = directory / ".metadata"
    try:
        with open(path, "rb") as file:
            metadata = read_pickle(file)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except UnsafePickleError as error:
        raise UserError(f"'{directory}': its .metadata cannot be read: {error}") from None
    if not isinstance(metadata, Metadata):
        raise UserError(f"{path}: holds a {type(metadata).__name__} and not torch's Metadata")
    try:
        for name, tensor in metadata.state_dict_metadata.items():
            if isinstance(tensor, TensorStorageMetadata):  # others are bytes, which are not read
                _check_sizes(name, tensor)
        for place in metadata.storage_data.values():
            if Path(place.relative_path).is_absolute() or ".." in Path(place.relative_path).parts:
                raise UserError(f"{path}: names {place.relative_path!a}, which is not a file inside '{directory}'")
            _check_numbers((place.offset, place.length))
    except (AttributeError, TypeError, ValueError) as error:  # in a damaged file any attribute may be anything
        raise UserError(f"{path}: the description of its tensors is damaged: {error}") from None
    return metadata


def _check_sizes(name: str, tensor: TensorStorageMetadata) -> None:
    if not isinstance(name, str) or not isinstance(tensor.properties.dtype, torch.dtype):
        raise TypeError(f"{name!a} has no dtype")
    for sizes in (tensor.size, *(part for chunk in tensor.chunks for part in (chunk.offsets, chunk.sizes))):
        _check_numbers(sizes)
        if len(sizes) != len(tensor.size):
            raise ValueError(f"a part of {name!a} has another number of dimensions")


def _check_numbers(numbers: tuple[int, ...]) -> None:
    if not isinstance(numbers, tuple) or not all(type(number) is int and number >= 0 for number in numbers):
        raise TypeError("sizes and offsets must be whole numbers from 0")
