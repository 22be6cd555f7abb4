"""An answer as arrays, as both engines' files here write it: no text and no object for a token.

    uint32           bytes of the header
    header           JSON {"answers": [{"id", "tokens", "finish_reason", "weight_versions"}, ...]}: `id` is that of the
                     request, a slash and the number of the completion, `tokens` how many it has; `experts`
                     [type, tokens, layers, k], where they were asked for
    int32   [n]      token ids of all completions, one after the other
    float32 [n]      log-probability of each
    uint8 or uint16  experts that the tokens were sent to, completion after completion

all little-endian. Imports nothing of the package, because it runs in the engines' environments.
"""

from __future__ import annotations

import json
import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

FORM = {"form": 2}
"""The answer to GET, by which a trainer finds that the path is there and answers as it reads."""


def packed(
    answers: Iterable[tuple[dict[str, Any], Sequence[int], Sequence[float]]], experts: Sequence[Any] = ()
) -> bytes:
    """The answer's bytes, of (header without `tokens`, token ids, log-probabilities) of each completion in their order.

    Args:
        experts: an array [tokens, layers, k] of each completion (None: there is none), where they were asked for.

    Raises:
        ValueError: a completion has more of one than of the other.
    """
    tokens, logprobs, heads = array("i"), array("f"), []
    for head, ids, values in answers:
        if len(ids) != len(values):  # two such completions could make up for each other in the sum
            raise ValueError(f"{len(values)} log-probabilities for {len(ids)} tokens")
        tokens.extend(ids)
        logprobs.extend(values)
        heads.append(head | {"tokens": len(ids)})
    behind = []
    for head, own in zip(heads, experts, strict=False):
        if own is not None:
            head["experts"] = [own.dtype.name, *own.shape]
            behind.append(own.tobytes())
    if sys.byteorder == "big":
        tokens.byteswap()
        logprobs.byteswap()
    header = json.dumps({"answers": heads}).encode()
    header += b" " * (-len(header) % 4)
    return struct.pack("<I", len(header)) + header + tokens.tobytes() + logprobs.tobytes() + b"".join(behind)
