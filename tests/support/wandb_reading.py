"""The datastore of an offline W&B run: protocol buffers in the log format of LevelDB, behind a header of 7 bytes.

wandb has no public reader of it; its own `wandb sync` is a program that uploads. Blocks of 32 KB hold fragments, each
with checksum (4 bytes), length (2) and kind (1): whole, or the first, a middle or the last part of a record.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_HEADER_BYTES, _BLOCK_BYTES = 7, 32768
_FRAGMENT = struct.Struct("<IHB")
_WHOLE, _LAST = 1, 4


def records(path: Path) -> Iterator[Any]:
    """wandb's own Record messages."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, held = path.read_bytes(), _HEADER_BYTES, b""
    assert data.startswith(b":W&B")
    while at + _FRAGMENT.size <= len(data):
        if _BLOCK_BYTES - at % _BLOCK_BYTES < _FRAGMENT.size:  # the rest of a block that no fragment fits into
            at += _BLOCK_BYTES - at % _BLOCK_BYTES
            continue
        _, size, kind = _FRAGMENT.unpack_from(data, at)
        held += data[at + _FRAGMENT.size : at + _FRAGMENT.size + size]
        at += _FRAGMENT.size + size
        if kind in (_WHOLE, _LAST):
            yield Record.FromString(held)
            held = b""


def history(path: Path) -> list[dict[str, Any]]:
    """The rows that the run has logged."""
    return [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for record in records(path)
        if record.WhichOneof("record_type") == "history"
    ]
