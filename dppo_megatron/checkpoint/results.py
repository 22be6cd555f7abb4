"""Where Megatron's writer process leaves its results: in memory, and not with a server process.

Megatron asks `multiprocessing.Manager` for a queue. That is a process more for every rank, of some 100 MB, and a
directory /tmp/pymp-* with its socket, which nobody removes when the rank is killed. A plain pipe is no substitute: the
trainer reads only when the writer has ended, and a writer with more results than a pipe holds (64 KiB) would wait for
it. The writer is forked, so a file without a name that both have open is enough.
"""

from __future__ import annotations

import os
import pickle
import queue
import tempfile
from typing import Any

from megatron.core.dist_checkpointing.strategies import filesystem_async

_LENGTH_BYTES = 8


class Results:
    """What Megatron uses of a queue, for the one result of one save."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - open until the save is over
        if hasattr(os, "memfd_create"):  # on Linux not even a full /tmp is in the way
            self._file.close()
            self._file = os.fdopen(os.memfd_create("checkpoint-results"), "w+b")

    def put(self, result: Any) -> None:
        """In the writer: leave the result."""
        payload = pickle.dumps(result)
        os.pwrite(self._file.fileno(), payload, _LENGTH_BYTES)
        # last: a writer that is killed before leaves nothing, and not half a pickle
        os.pwrite(self._file.fileno(), len(payload).to_bytes(_LENGTH_BYTES, "little"), 0)

    def get_nowait(self) -> Any:
        """In the trainer, once the writer has ended: take the result. Raises queue.Empty if there is none."""
        length = int.from_bytes(os.pread(self._file.fileno(), _LENGTH_BYTES, 0), "little")
        if not length:
            raise queue.Empty
        payload = os.pread(self._file.fileno(), length, _LENGTH_BYTES)
        os.ftruncate(self._file.fileno(), 0)
        return pickle.loads(payload)


def use_own_results() -> None:
    """Give Megatron's next save results of its own: a writer that was given up may still leave some in the last's."""
    filesystem_async._results_queue = Results()
