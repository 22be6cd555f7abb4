"""Replaces the queues through which Megatron's checkpoint writer returns its results.

Megatron uses a queue of `multiprocessing.Manager`: one more process of about 100 MB for every rank, and a directory
/tmp/pymp-* that stays behind when the rank is killed. A pipe would deadlock: the trainer reads only after the writer
has ended, and a writer with more results than a pipe holds (64 KiB) blocks. The writer is forked, so an unnamed file
that both have open is enough.
"""

from __future__ import annotations

import os
import pickle
import queue
import tempfile
from typing import Any

_LENGTH_BYTES = 8


class Results:
    """The methods that Megatron calls on its queue, for the one result of one save."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - open until the save is over
        if hasattr(os, "memfd_create"):  # in memory on Linux: works with a full /tmp too
            self._file.close()
            self._file = os.fdopen(os.memfd_create("checkpoint-results"), "w+b")

    def put(self, result: Any) -> None:
        """In the writer: leave the result."""
        payload = pickle.dumps(result)
        os.pwrite(self._file.fileno(), payload, _LENGTH_BYTES)
        # last: if the writer is killed before, there is no result rather than half a pickle
        os.pwrite(self._file.fileno(), len(payload).to_bytes(_LENGTH_BYTES, "little"), 0)

    def get_nowait(self) -> Any:
        """In the trainer, once the writer has ended: take the result. Raises queue.Empty if there is none."""
        length = int.from_bytes(os.pread(self._file.fileno(), _LENGTH_BYTES, 0), "little")
        if not length:
            raise queue.Empty
        payload = os.pread(self._file.fileno(), length, _LENGTH_BYTES)
        os.ftruncate(self._file.fileno(), 0)
        return pickle.loads(payload)
