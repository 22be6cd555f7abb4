"""How the members of a gloo group know each other: by a secret that came to each with the request to join.

Without it another program could take a worker's place and be sent the weights. Torch's store lets everybody who
reaches its port list, read and replace the members' addresses (`Sealed`), and gloo takes for a member whoever connects
first with the number that stands there (`prove`). Both ends use this file; it imports torch only.
"""

from __future__ import annotations

import hmac
import os
from datetime import timedelta
from typing import Any

import torch
from torch.distributed.distributed_c10d import Store


class Sealed(Store):
    """A store in which only values of those count who know `secret`. C++ calls it: keep it as long as what uses it."""

    def __init__(self, store: Store, secret: str) -> None:
        super().__init__()
        self._store, self._secret = store, secret.encode()

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override] # torch's stub has str; C++ gives bytes
        self._store.set(key, value + self._tag(key, value))  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        content = self._store.get(key)
        if not hmac.compare_digest(content[-32:], self._tag(key, content[:-32])):
            raise RuntimeError("somebody who is no member has written into the group's store")
        return content[:-32]

    def wait(self, *arguments: Any) -> None:
        self._store.wait(*arguments)

    def _tag(self, key: str, value: bytes) -> bytes:
        return hmac.new(self._secret, b"store %s %s" % (key.encode(), value), "sha256").digest()


def prove(group: Any, secret: str, rank: int, peer: int, timeout: timedelta) -> None:
    """Show the group's member `peer` that we know the secret. Raises RuntimeError unless it shows the same."""

    def swapped(mine: bytes) -> bytes:
        theirs = torch.empty(32, dtype=torch.uint8)
        leaving = group.send([torch.tensor(list(mine), dtype=torch.uint8)], peer, 0)
        group.recv([theirs], peer, 0).wait(timeout)
        leaving.wait(timeout)
        return bytes(theirs.tolist())

    def proof(prover: int, verifier: int, nonce: bytes) -> bytes:
        return hmac.new(secret.encode(), b"from %d to %d %s" % (prover, verifier, nonce), "sha256").digest()

    nonce = os.urandom(32)
    if not hmac.compare_digest(swapped(proof(rank, peer, swapped(nonce))), proof(peer, rank, nonce)):
        raise RuntimeError(f"who has connected as member {peer} of the group does not know its secret")
