"""The receiving end of a weight sync's broadcast: rank 0 is the trainer, the other ranks are all servers' workers.

    trainer ──▶ worker 1 ──▶ worker 2 ──▶ ... ──▶ worker n          gloo: a chain, in chunks

Over gloo every worker passes each chunk on as soon as it has it, so the trainer sends one copy of the weights however
many servers there are (gloo's own broadcast is a tree: log2(n) copies). Worker i waits for the chunks of worker i - 1.
If that worker dies, the kernel closes its sockets and the wait fails. Worker i then leaves the group, which closes its
own sockets, so the next worker fails in turn. A failure later in the chain never makes a worker fail. Over NCCL a
broadcast is such a chain already. Its kernel does not notice that a member has died: the trainer then sets a key in the
group's store, and a thread that waits for this key aborts the group.

The members of a group authenticate each other with a secret that was sent in the request to join. Without it another
program could take a worker's place and receive the weights: any program that reaches the port of torch's store can
list, read and replace the members' addresses (`Sealed`), and gloo accepts the first connection with the number in an
address as that member (`prove`). NCCL needs torch's own store, because its watchdog threads use it too, so there only
the proofs protect the group (`prove_to_all`). Both ends use these.

Imports torch only: it runs in the engine's environment and in the trainer. As a program it is a probe of `doctor`.
"""

from __future__ import annotations

import base64
import contextlib
import hmac
import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

PREFIX = "dppo"
GIVEN_UP = "given up"
"""Key that the trainer sets when a member has failed, so that the others abort the group."""


class Sealed(Store):
    """A store whose values are authenticated with `secret`. C++ calls it: keep a reference while a group uses it."""

    def __init__(self, store: Store, secret: str) -> None:
        super().__init__()
        self._store, self._secret = store, secret.encode()

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override] # torch's stub has str; C++ gives bytes
        self._store.set(key, value + self._tag(key, value))  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        content = self._store.get(key)
        if not hmac.compare_digest(content[-32:], self._tag(key, content[:-32])):
            raise RuntimeError("a program that is not a member has written to the group's store")
        return content[:-32]

    def wait(self, *arguments: Any) -> None:
        self._store.wait(*arguments)

    def _tag(self, key: str, value: bytes) -> bytes:
        return hmac.new(self._secret, b"store %s %s" % (key.encode(), value), "sha256").digest()


def prove(group: Any, secret: str, rank: int, peer: int, timeout: timedelta) -> None:
    """Prove to member `peer` that this member knows the secret. Raises RuntimeError unless it proves the same."""

    def swapped(mine: bytes) -> bytes:
        theirs = torch.empty(32, dtype=torch.uint8)
        sending = group.send([torch.tensor(list(mine), dtype=torch.uint8)], peer, 0)
        group.recv([theirs], peer, 0).wait(timeout)
        sending.wait(timeout)
        return bytes(theirs.tolist())

    def proof(prover: int, verifier: int, nonce: bytes) -> bytes:
        return hmac.new(secret.encode(), b"from %d to %d %s" % (prover, verifier, nonce), "sha256").digest()

    nonce = os.urandom(32)
    if not hmac.compare_digest(swapped(proof(rank, peer, swapped(nonce))), proof(peer, rank, nonce)):
        raise RuntimeError(f"the program that connected as member {peer} of the group does not know its secret")


def prove_to_all(group: Any, secret: str, rank: int, world_size: int, device: torch.device) -> None:
    """Prove to all members of an NCCL group that this member knows the secret. Raises RuntimeError unless each proves
    the same. All members may see a proof, since it is valid for its own rank only."""
    proofs = [list(hmac.new(secret.encode(), b"member %d" % member, "sha256").digest()) for member in range(world_size)]
    mine = torch.tensor(proofs[rank], dtype=torch.uint8, device=device)
    shown = [torch.empty_like(mine) for _ in proofs]
    group.allgather([shown], [mine]).wait()
    for member, (theirs, expected) in enumerate(zip(shown, proofs, strict=True)):
        if not hmac.compare_digest(bytes(theirs.tolist()), bytes(expected)):
            raise RuntimeError(f"the program that connected as member {member} of the group does not know its secret")


class ChainReceiver:
    """One worker of the chain."""

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        joining: timedelta,
        timeout: timedelta,
        chunk_bytes: int,
        secret: str,
    ) -> None:
        self._sealed = Sealed(store, secret)
        self._group: Any = dist.ProcessGroupGloo(PrefixStore(PREFIX, self._sealed), rank, world_size, joining)
        self._timeout = timeout
        self._previous, self._next = rank - 1, rank + 1 if rank + 1 < world_size else None
        for neighbour in (self._previous, self._next):
            if neighbour is not None:
                prove(self._group, secret, rank, neighbour, joining)
        self._chunk_bytes = chunk_bytes
        self._memory = torch.empty(0, dtype=torch.uint8)
        """Kept between buckets and syncs: the first write to newly allocated memory doubles the cost of filling it."""
        self._sending: list[Any] = []
        """Sends of the last bucket; complete when the next one begins, since all workers have the last one by then."""

    def receive(self, num_bytes: int) -> torch.Tensor:
        """The next bucket, [num_bytes], in memory that the next call overwrites. Passes it on; returns when all of it
        has arrived. Raises RuntimeError if it does not arrive, after leaving the group."""
        if self._memory.nbytes < num_bytes:
            self._memory = torch.empty(num_bytes, dtype=torch.uint8)
        memory = self._memory[:num_bytes]
        if problem := self._pass_on(torch.split(memory, self._chunk_bytes)):
            self._group, self._sending = None, []  # the group's sockets close with its last reference
            raise RuntimeError(f"the weights stopped coming: {problem}")
        return memory

    def _pass_on(self, chunks: Sequence[torch.Tensor]) -> str:
        """Returns an error as text: an exception's traceback would keep a reference to the group."""
        deadline = time.monotonic() + self._timeout.total_seconds()

        def left() -> timedelta:
            """Time left for the whole bucket. Each wait needs it: without a timeout gloo uses the join timeout, even
            after `set_timeout`. Never 0, which means no timeout."""
            return timedelta(seconds=max(0.001, deadline - time.monotonic()))

        for work in self._sending:
            with contextlib.suppress(RuntimeError):
                work.wait(left())
        self._sending = []
        arriving = [self._group.recv([chunk], self._previous, tag) for tag, chunk in enumerate(chunks)]
        for tag, (chunk, work) in enumerate(zip(chunks, arriving, strict=True)):
            try:
                work.wait(left())
            except Exception as error:
                return str(error) or type(error).__name__
            if self._next is not None:
                try:
                    self._sending.append(self._group.send([chunk], self._next, tag))
                except RuntimeError:  # the next worker is dead; this one still takes its weights
                    self._next = None
        return ""


class BroadcastReceiver:
    """One worker's end of an NCCL group. Not run on a GPU so far."""

    def __init__(
        self, store: Store, rank: int, world_size: int, timeout: timedelta, secret: str, device: torch.device
    ) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)
        self._unproven: tuple[str, int, int] | None = (secret, rank, world_size)
        options = dist.ProcessGroupNCCL.Options()
        # longer than the trainer's timeout: torch kills this whole process if a broadcast times out here first
        options._timeout = 2 * timeout
        self._group: Any = dist.ProcessGroupNCCL(PrefixStore(PREFIX, store), rank, world_size, options)
        watched = store.clone()  # type: ignore[attr-defined] # a waiting client blocks all its other requests
        threading.Thread(target=_abort_when_given_up, args=(watched, self._group), daemon=True).start()

    def receive(self, num_bytes: int) -> torch.Tensor:
        """As `ChainReceiver.receive`."""
        if self._unproven is not None:  # not in __init__: NCCL's first call waits for all members, and cannot be ended
            prove_to_all(self._group, *self._unproven, self._memory.device)
            self._unproven = None
        if self._memory.nbytes < num_bytes:
            self._memory = torch.empty(num_bytes, dtype=torch.uint8, device=self._memory.device)
        memory = self._memory[:num_bytes]
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self._group.broadcast([memory], options).wait()
        if memory.is_cuda:
            torch.cuda.synchronize(memory.device)  # raises for an aborted broadcast
        return memory

    def free(self) -> None:
        """Release the memory, which the engine needs between syncs."""
        self._memory = self._memory.new_empty(0)


def _abort_when_given_up(store: Store, group: Any) -> None:
    """Abort when the trainer sets the key, or when its store is gone because it was killed. Otherwise torch would kill
    this process too, for a broadcast that never completes."""
    with contextlib.suppress(RuntimeError):
        store.wait([GIVEN_UP], timedelta(days=365))
    with contextlib.suppress(RuntimeError):
        group.abort()


def map_memory(memory: dict[str, Any]) -> torch.Tensor:
    """Map the trainer's buffer of bytes, from `SharedBuffer.handle()`. GPUs are found by UUID, as CUDA_VISIBLE_DEVICES
    may number them differently here than in the trainer. Raises RuntimeError."""
    if "path" in memory:
        if not os.path.exists(memory["path"]):  # torch would make the file, and zeros would be loaded as weights
            raise RuntimeError(f"there is no {memory['path']} here")
        return torch.from_file(memory["path"], shared=True, size=memory["bytes"], dtype=torch.uint8)
    uuids = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
    if memory["uuid"] not in uuids:
        raise RuntimeError(f"the weights are on GPU {memory['uuid']}; this worker sees only {', '.join(uuids)}")
    handle, counter, event = (base64.b64decode(memory[name]) for name in ("handle", "counter", "event"))
    storage = torch.UntypedStorage._new_shared_cuda(
        uuids.index(memory["uuid"]),
        handle,
        memory["size"],
        memory["offset"],
        counter,
        memory["counter_offset"],
        event,
        memory["event_sync"],
    )
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)[: memory["bytes"]]


NCCL_DEFAULTS = {"NCCL_CUMEM_ENABLE": "-2", "NCCL_NVLS_ENABLE": "2"}
"""NCCL's defaults if the variables are not set: on, if the device supports it."""
NCCL_PINNED = {"NCCL_MIN_NCHANNELS": "-2", "NCCL_MAX_NCHANNELS": "-2"}
NCCL_PINNED |= {"NCCL_PROTO": "", "NCCL_ALGO": "", "NCCL_NTHREADS": ""}
"""Variables that engines set to fix the order of sums, with NCCL's defaults: SGLang 0.5.23 with
--enable-deterministic-inference and --tp-size above 1, vLLM 0.32.0 with VLLM_BATCH_INVARIANT. Each member of a
communicator uses its own values without comparing them. From NCCL 2.31 on, an NCCL_ALGO that names only all-reduces
leaves the other collectives no algorithm, according to vLLM."""


def nccl_settings() -> dict[str, str]:
    """`version`, and the variables as NCCL would read them in this process; empty if torch has no NCCL."""
    try:
        version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    except AttributeError:
        return {}
    known = NCCL_DEFAULTS | NCCL_PINNED
    return {"version": version} | {name: os.environ.get(name, default) for name, default in known.items()}


def nccl_difference(theirs: dict[str, str]) -> str:
    """Why `theirs` and this process cannot be in one communicator; empty if they can, or if either is not known. NCCL
    refuses another version; with cuMem on at one end only, or other channels, the first transfer fails or hangs."""
    own = nccl_settings()
    if not own or not theirs:
        return ""
    if theirs.get("version", own["version"]) != own["version"]:
        return f"NCCL is {theirs['version']} there and {own['version']} in the trainer"
    for name in NCCL_DEFAULTS:
        if name in theirs and (own[name] == "0") != (theirs[name] == "0"):
            return f"{name} is {theirs[name]} there and {own[name]} in the trainer"
    for name in NCCL_PINNED:
        if theirs.get(name, own[name]) != own[name]:
            return f"{name} is {theirs[name] or 'not set'} there and {own[name] or 'not set'} in the trainer"
    return ""


def _probe() -> None:
    """Print NCCL's settings as JSON, and what fails in mapping `SharedBuffer.handle()`, JSON from stdin, and replacing
    each byte of that memory by 255 minus itself."""
    answer: dict[str, Any] = {"nccl": nccl_settings()}
    try:
        memory = map_memory(json.load(sys.stdin))
        memory.copy_(255 - memory)
        if memory.is_cuda:
            torch.cuda.synchronize(memory.device)
    except Exception as error:
        answer["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
    print(json.dumps(answer))


if __name__ == "__main__":
    _probe()
