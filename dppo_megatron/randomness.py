"""Counter-based random numbers: they depend on what they decide, not on when or where they are drawn.

Every number is a function of (seed, purpose, counters, id): a prompt gets the same number whatever the order of the
batch, the number of ranks, and earlier retries or restarts. There is no generator state to save. The price is a hash
for each draw; 16k numbers take about 2 ms.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dppo_megatron.types import FloatArray, IntArray

_Words = npt.NDArray[np.uint64]

_LOW32 = np.uint64(0xFFFFFFFF)
_SHIFT32 = np.uint64(32)
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def _key(seed: int, purpose: str, counters: tuple[int, ...], num_bytes: int) -> int:
    """Hash of (seed, purpose, counters), so that two purposes or counters never share a stream by accident."""
    address = repr((int(seed), str(purpose), tuple(int(c) for c in counters)))
    return int.from_bytes(hashlib.blake2b(address.encode(), digest_size=num_bytes).digest(), "little")


def generator(seed: int, purpose: str, *counters: int) -> np.random.Generator:
    """A fresh Philox generator for one decision, for example `generator(seed, "prompt", step, minibatch)`.

    Args:
        seed: the run's seed.
        purpose: name of the decision; different names are independent.
        counters: step, epoch, mini-batch: whatever distinguishes this decision from others with the same purpose.
    """
    return np.random.Generator(np.random.Philox(key=_key(seed, purpose, counters, 16)))


def uniform_rows(addresses: Sequence[tuple[int, str, tuple[int, ...]]], count: int) -> FloatArray:
    """[len(addresses), count] float64: row i is `generator(seed, purpose, *counters).random(count)` of address i."""
    rows = np.empty((len(addresses), count))
    for row, (seed, purpose, counters) in zip(rows, addresses, strict=True):
        generator(seed, purpose, *counters).random(out=row)
    return rows


def uniforms(seed: int, purpose: str, ids: IntArray, *counters: int) -> FloatArray:
    """One uniform number in [0, 1) for each id, a function of the id and not of its position.

    Philox4x32-10 (Salmon et al., SC'11), keyed by (seed, purpose, counters), with the id as the counter.

    Args:
        ids: [n], or [n, 2] for pairs such as (prompt, completion); integers >= 0. Equal ids get equal numbers.

    Returns:
        [n] float64 with 53 random bits.
    """
    ids = np.asarray(ids)
    if ids.ndim not in (1, 2) or (ids.ndim == 2 and ids.shape[1] != 2):
        raise ValueError(f"ids has shape {ids.shape}; expected [n] or [n, 2]")
    columns = ids.astype(np.uint64)
    first, second = (columns, np.zeros_like(columns)) if ids.ndim == 1 else (columns[:, 0], columns[:, 1])
    key = _key(seed, purpose, counters, 8)
    words = philox4x32((first & _LOW32, first >> _SHIFT32, second & _LOW32, second >> _SHIFT32), key)
    high, low = words[0] >> np.uint64(5), words[1] >> np.uint64(6)
    return (high * np.float64(1 << 26) + low) / np.float64(1 << 53)


def philox4x32(counter: tuple[_Words, _Words, _Words, _Words], key: int) -> tuple[_Words, _Words, _Words, _Words]:
    """Ten rounds of Philox4x32 on arrays of 32-bit words held in uint64, so that products do not overflow.

    Args:
        counter: four arrays [n], least significant word first.
        key: 64 bits, low word first.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key & 0xFFFFFFFF, key >> 32
    for _ in range(_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (product1 >> _SHIFT32) ^ c1 ^ np.uint64(k0),
            product1 & _LOW32,
            (product0 >> _SHIFT32) ^ c3 ^ np.uint64(k1),
            product0 & _LOW32,
        )
        k0, k1 = (k0 + _WEYL[0]) & 0xFFFFFFFF, (k1 + _WEYL[1]) & 0xFFFFFFFF
    return c0, c1, c2, c3
