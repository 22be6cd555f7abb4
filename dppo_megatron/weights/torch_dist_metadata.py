"""Reads the `.metadata` of a distributed checkpoint without running its code (`safe_pickle.py`), and checks it.

A damaged or hostile file can still produce any arrangement of the allowed classes, so every attribute that is used
later is checked here, and no tensor may lie outside the checkpoint's directory.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, TypeGuard

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata

from dppo_megatron import safe_pickle
from dppo_megatron.types import UserError


def read_metadata(directory: Path) -> Metadata:
    """What the checkpoint holds, and in which files.

    Raises:
        UserError: unreadable, naming anything but plain data, or paths that leave `directory`.
    """
    path = directory / ".metadata"
    try:
        metadata: Metadata = safe_pickle.read_metadata(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except safe_pickle.UnsafePickleError as error:
        raise UserError(f"'{directory}': its .metadata cannot be read: {error}") from None
    _check_tensors(getattr(metadata, "state_dict_metadata", None), path)
    _check_places(getattr(metadata, "storage_data", None), path)
    return metadata


def _check_tensors(tensors: Any, path: Path) -> None:
    """Names to descriptions; checks the attributes that are used."""
    if not isinstance(tensors, Mapping) or not all(isinstance(name, str) for name in tensors):
        raise UserError(f"{path}: holds no table of tensors")
    for name, tensor in tensors.items():
        if isinstance(tensor, TensorStorageMetadata) and not _is_whole(tensor):  # others are bytes, not read
            raise UserError(f"{path}: the description of {name!a} is damaged")


def _is_whole(tensor: TensorStorageMetadata) -> bool:
    size, chunks = getattr(tensor, "size", None), getattr(tensor, "chunks", None)
    dtype = getattr(getattr(tensor, "properties", None), "dtype", None)
    if not (_are_sizes(size) and isinstance(dtype, torch.dtype) and isinstance(chunks, list)):
        return False
    for chunk in chunks:
        if not isinstance(chunk, ChunkStorageMetadata):
            return False
        for part in (getattr(chunk, "offsets", None), getattr(chunk, "sizes", None)):
            if not _are_sizes(part) or len(part) != len(tensor.size):
                return False
    return True


def _are_sizes(value: Any) -> TypeGuard[tuple[int, ...]]:
    return isinstance(value, tuple) and all(type(size) is int and size >= 0 for size in value)


def _check_places(places: Any, path: Path) -> None:
    if not isinstance(places, Mapping):
        raise UserError(f"{path}: does not say where its tensors lie")
    for place in places.values():
        relative = getattr(place, "relative_path", None)
        if not isinstance(relative, str) or PurePosixPath(relative).is_absolute() or ".." in Path(relative).parts:
            raise UserError(f"{path}: names {relative!a}, which is no file inside '{path.parent}'")
        if not all(type(getattr(place, name, None)) is int for name in ("offset", "length")):
            raise UserError(f"{path}: does not say where in {relative!a} a tensor lies")
