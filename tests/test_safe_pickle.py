"""Reading somebody else's pickle: what torch writes is read as torch reads it, everything else is refused unrun."""

from __future__ import annotations

import io
import os
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from dppo_megatron.safe_pickle import UnsafePickleError, read_pickle
from dppo_megatron.types import UserError
from dppo_megatron.weights.torch_dist import read_metadata


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A distributed checkpoint of torch's own: tensors of several types, and objects."""
    directory = tmp_path_factory.mktemp("dist")
    state: dict[str, Any] = {
        str(dtype): torch.zeros(3, 2, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool)
    }
    save(state | {"text": "x", "nested": {"a": [1, 2]}}, storage_writer=FileSystemWriter(directory), no_dist=True)
    return directory


def test_what_torch_writes_is_read_as_torch_reads_it(written: Path) -> None:
    theirs = FileSystemReader(written).read_metadata()
    mine = read_metadata(written)
    assert mine.state_dict_metadata == theirs.state_dict_metadata and len(mine.state_dict_metadata) >= 6
    assert mine.storage_data == theirs.storage_data


class _Runs:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self._reduced = function, arguments

    def __reduce__(self) -> Any:
        return self._reduced


@pytest.mark.parametrize("protocol", range(6))
def test_nothing_runs(tmp_path: Path, protocol: int) -> None:
    """By every road to a callable: a class, a function, an attribute of something that is on the list."""
    touched = tmp_path / "touched"
    calls: tuple[tuple[Any, tuple[Any, ...]], ...] = (
        (os.mkdir, (str(touched),)),
        (eval, (f"__import__('os').mkdir({str(touched)!r})",)),
        (torch.load, (str(touched),)),
        (__import__, ("os",)),
    )
    for function, arguments in calls:
        with pytest.raises(UnsafePickleError, match="it asks for"):
            read_pickle(io.BytesIO(pickle.dumps({"a": _Runs(function, *arguments)}, protocol)))
    for dotted in (b"Metadata.__init__", b"Metadata.__reduce__"):
        text = b"\x80\x04\x8c\x25torch.distributed.checkpoint.metadata\x8c" + bytes([len(dotted)]) + dotted + b"\x93."
        with pytest.raises(UnsafePickleError, match="it asks for"):
            read_pickle(io.BytesIO(text))
    assert not touched.exists()


def test_damage_is_one_kind_of_error(written: Path, tmp_path: Path) -> None:
    """Bytes changed, cut and inserted at random: it is read, or it is UserError."""
    whole, rng = (written / ".metadata").read_bytes(), random.Random(0)
    refused = 0
    for _ in range(400):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            position = rng.randrange(len(data))
            match rng.randrange(3):
                case 0:
                    data[position] = rng.randrange(256)
                case 1:
                    del data[position : position + rng.randint(1, 40)]
                case _:
                    data[position:position] = rng.randbytes(rng.randint(1, 8))
        (tmp_path / ".metadata").write_bytes(data)
        try:
            read_metadata(tmp_path)
        except UserError:
            refused += 1
    assert refused > 200
