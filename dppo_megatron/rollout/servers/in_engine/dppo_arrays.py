"""The form of an answer as arrays, written by both engines' files here: no text and no object per token.

    uint32           bytes of the header
    header           JSON {"answers": [{"id", "tokens", "finish_reason", "weight_versions"}, ...]}: `id` is that of the
                     request, a slash and the completion's number; `tokens` is the completion's number of tokens; if
                     requested, `experts` is [type, tokens, layers, k]
    int32   [n]      token ids of all completions, one after the other
    float32 [n]      log-probability of each
    uint8 or uint16  experts that the tokens were routed to, completion after completion

All are little-endian. Imports nothing of the package, because it runs in the engines' environments.
"""

from __future__ import annotations

import json
import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

FORM = {"form": 2}
"""The answer to GET, from which a trainer sees that the path exists and uses the form that it reads."""


def packed(
    answers: Iterable[tuple[dict[str, Any], Sequence[int], Sequence[float]]], experts: Sequence[Any] = ()
) -> bytes:
    """The answer's bytes.

    Args:
        answers: (header without `tokens`, token ids, log-probabilities) of each completion; ValueError if their lengths
            differ.
        experts: an array [tokens, layers, k] of each completion, or None if it has none; empty: not requested.
    """
    tokens, logprobs, heads = array("i"), array("f"), []
    for head, ids, values in answers:
        if len(ids) != len(values):  # two such completions could have the right total together
            raise ValueError(f"{len(values)} log-probabilities for {len(ids)} tokens")
        tokens.extend(ids)
        logprobs.extend(values)
        heads.append(head | {"tokens": len(ids)})
    expert_bytes = []
    for head, own in zip(heads, experts, strict=False):
        if own is not None:
            head["experts"] = [own.dtype.name, *own.shape]
            expert_bytes.append(own.tobytes())
    if sys.byteorder == "big":
        tokens.byteswap()
        logprobs.byteswap()
    header = json.dumps({"answers": heads}).encode()
    header += b" " * (-len(header) % 4)
    return struct.pack("<I", len(header)) + header + tokens.tobytes() + logprobs.tobytes() + b"".join(expert_bytes)
