"""The format of messages over pipes and sockets between processes of a run: length, then payload.

The length is four bytes, big-endian. A reader refuses more than `MAX_BYTES` before it allocates anything. This also
detects text that was printed into a pipe by mistake: any four bytes of ASCII text are a length above 512 MiB.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

MAX_BYTES = 256 << 20
_LENGTH = struct.Struct(">I")


def framed(payload: bytes) -> bytes:
    """`payload` with its length, as it is sent. Raises ValueError above `MAX_BYTES`."""
    if len(payload) > MAX_BYTES:
        raise ValueError(f"a message of {len(payload):,} bytes, above the {MAX_BYTES:,} allowed")
    return _LENGTH.pack(len(payload)) + payload


def read_frame(read: Callable[[int], bytes]) -> bytes | None:
    """The next payload; None at the end of the stream. Raises ConnectionError for bytes that are not a frame. `read`
    returns as many bytes as asked for, fewer only at the end of the stream."""
    head = read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    size = _size(head, 0)
    payload = read(size)
    return payload if len(payload) == size else None


class FrameBuffer:
    """Splits a stream that arrives in pieces into payloads.

    Example:
        buffer.feed(b"\\0\\0\\0\\2h")     # -> []
        buffer.feed(b"i\\0\\0\\0\\1!")     # -> [b"hi", b"!"]
    """

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, piece: bytes) -> list[bytes]:
        """The payloads that `piece` completes. Raises ConnectionError as `read_frame`."""
        self._pending += piece
        payloads, start = [], 0
        while len(self._pending) - start >= _LENGTH.size:
            end = start + _LENGTH.size + _size(self._pending, start)
            if end > len(self._pending):
                break
            payloads.append(bytes(self._pending[start + _LENGTH.size : end]))
            start = end
        del self._pending[:start]
        return payloads


def _size(data: bytes | bytearray, start: int) -> int:
    (size,) = _LENGTH.unpack_from(data, start)
    if size > MAX_BYTES:
        raise ConnectionError(f"a message of {size:,} bytes")
    return int(size)
