"""Reads pickles from other people without running their code: only classes on an allow-list are looked up.

torch's distributed checkpoints store their table of contents, `.metadata`, as a pickle, and `pickle.load` calls
whatever a pickle names.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, BinaryIO

import torch

_METADATA = "torch.distributed.checkpoint.metadata"
_PLANNER = "torch.distributed.checkpoint.planner"
DISTRIBUTED_CHECKPOINT: Mapping[str, frozenset[str]] = {
    "torch": frozenset({"Size"}),
    "torch.serialization": frozenset({"_get_layout"}),
    _METADATA: frozenset(
        [
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        ]
    ),
    # Megatron also stores its ranks' save plans in `.metadata`, to reuse them at the next save
    _PLANNER: frozenset(["BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"]),
    "torch.distributed.checkpoint.filesystem": frozenset({"_StorageInfo", "_StoragePrefix"}),
    "collections": frozenset({"OrderedDict"}),
    "pathlib": frozenset({"PosixPath", "PurePosixPath"}),  # the checkpoint's path, if the writer was given a Path
    "pathlib._local": frozenset({"PosixPath", "PurePosixPath"}),  # the same module in Python 3.13
}
"""Module -> names allowed in the `.metadata` of a distributed checkpoint, in addition to torch's dtypes: plain data,
nothing that can run code."""


class UnsafePickleError(ValueError):
    """The pickle is damaged, or names something that is not on the allow-list."""


def read_pickle(file: BinaryIO) -> Any:
    """Unpickle `file`, looking up only what `DISTRIBUTED_CHECKPOINT` lists.

    Raises:
        UnsafePickleError: it names something else, or is not a pickle.
    """
    try:
        return _Unpickler(file).load()
    except UnsafePickleError:
        raise
    except Exception as error:  # on damaged bytes an unpickler can raise almost anything
        raise UnsafePickleError(f"it is damaged ({type(error).__name__}: {error})") from None


@contextmanager
def force_weights_only() -> Iterator[None]:
    """In the block, every `torch.load` of this process is weights_only, whatever its caller passes.

    Needed for calls inside Megatron and torch's planner, which pass weights_only=False or nothing at all. With nothing,
    TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD, which scripts for older Megatrons set, would turn it off.
    """
    before = {name: os.environ.pop(name, None) for name in (_FORBID, _ALLOW)}
    os.environ[_FORBID] = "1"
    try:
        yield
    finally:
        del os.environ[_FORBID]
        os.environ.update({name: value for name, value in before.items() if value is not None})


_FORBID, _ALLOW = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(vars(torch).get(name), torch.dtype)
        if not is_dtype and name not in DISTRIBUTED_CHECKPOINT.get(module, ()):
            raise UnsafePickleError(f"it asks for {module}.{name}, which such a file never needs; it was not loaded")
        return super().find_class(module, name)
