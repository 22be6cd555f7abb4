"""An answer as arrays, as both engines' files here write it: no text and no object for a token.

    uint32           bytes of the header
    header           JSON, without tokens and log-probabilities; every completion has its number of `tokens`
    int32   [n]      token ids of all completions, one after the other
    float32 [n]      log-probability of each

all little-endian. Imports nothing of the package, because it runs in the engines' environments.
"""

from __future__ import annotations

import json
import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

FORM = {"form": 1}
"""The answer to GET, by which a trainer finds that the path is there."""


def packed(header: dict[str, Any], completions: Iterable[tuple[Sequence[int], Sequence[float]]]) -> bytes:
    """The answer's bytes, of (token ids, log-probabilities) of each completion in the header's order.

    Raises:
        ValueError: a completion has more of one than of the other.
    """
    tokens, logprobs = array("i"), array("f")
    for ids, values in completions:
        if len(ids) != len(values):  # two such completions could make up for each other in the sum
            raise ValueError(f"{len(values)} log-probabilities for {len(ids)} tokens")
        tokens.extend(ids)
        logprobs.extend(values)
    if sys.byteorder == "big":
        tokens.byteswap()
        logprobs.byteswap()
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 4)
    return struct.pack("<I", len(head)) + head + tokens.tobytes() + logprobs.tobytes()
