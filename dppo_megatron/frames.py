"""The one format of messages over pipes and sockets between processes of a run: length, then payload.

The length is four bytes, big-endian, and a reader refuses more than `MAX_BYTES` before it allocates anything. What does
not belong in a pipe is found by that: any four bytes of ASCII text read as more than 512 MiB.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

MAX_BYTES = 256 << 20
_LENGTH = struct.Struct(">I")


def framed(payload: bytes) -> bytes:
    """As it is sent. Raises ValueError above `MAX_BYTES`."""
    if len(payload) > MAX_BYTES:
        raise ValueError(f"a message of {len(payload):,} bytes, above the {MAX_BYTES:,} allowed")
    return _LENGTH.pack(len(payload)) + payload


def read_frame(read: Callable[[int], bytes]) -> bytes | None:
    """The next payload; None at the end of the stream.

    Args:
        read: returns as many bytes as asked for, fewer only at the end of the stream.

    Raises:
        ConnectionError: no frame follows.
    """
    head = read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    size = _size(head, 0)
    payload = read(size)
    return payload if len(payload) == size else None


class FrameBuffer:
    """Payloads out of a stream that arrives in pieces.

    Example:
        buffer.feed(b"\\0\\0\\0\\2h")     # -> []
        buffer.feed(b"i\\0\\0\\0\\1!")     # -> [b"hi", b"!"]
    """

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, piece: bytes) -> list[bytes]:
        """The payloads that are complete now. Raises ConnectionError as `read_frame`."""
        self._held += piece
        found, at = [], 0
        while len(self._held) - at >= _LENGTH.size:
            end = at + _LENGTH.size + _size(self._held, at)
            if end > len(self._held):
                break
            found.append(bytes(self._held[at + _LENGTH.size : end]))
            at = end
        del self._held[:at]
        return found


def _size(data: bytes | bytearray, at: int) -> int:
    (size,) = _LENGTH.unpack_from(data, at)
    if size > MAX_BYTES:
        raise ConnectionError(f"a message of {size:,} bytes")
    return int(size)
