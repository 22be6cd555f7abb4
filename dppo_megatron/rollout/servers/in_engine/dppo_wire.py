"""The receiving end of a weight sync's broadcast: rank 0 is the trainer, the workers of all servers are the others.

    trainer ──▶ worker 1 ──▶ worker 2 ──▶ ... ──▶ worker n          gloo: a chain, in chunks

Over gloo every worker passes each chunk on as soon as it has it, so that one copy of the weights leaves the trainer
however many servers there are (gloo's own broadcast is a tree: log2(n) copies). Worker i waits for the chunks of worker
i - 1. If that one dies, the kernel closes its sockets, the wait ends with an error, and leaving the group closes ours,
so the next worker of the chain fails in its turn. A failure behind a worker never makes it fail. Over NCCL a broadcast
is such a chain already. Its kernel does not notice that a member has died, so a thread waits for a key that the trainer
then sets in the group's store, and aborts.

The members of a group know each other by a secret that came with the request to join. Without it another program could
take a worker's place and be sent the weights: torch's store lets every program that reaches its port list, read and
replace the members' addresses (`Sealed`), and gloo accepts as a member the first connection with the number in them
(`prove`). NCCL's store is torch's own, because its watchdog threads use it too: there only the proofs count
(`prove_to_all`). Both ends use these.

Imports torch only: it runs in the engine's environment, in the trainer, and in the receivers of benchmarks/data_plane.
"""

from __future__ import annotations

import base64
import contextlib
import hmac
import os
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
"""Key that the trainer sets when a member has failed: the group is of no more use to the others."""


class Sealed(Store):
    """A store whose values carry a tag made with `secret`. C++ calls it: keep it as long as what uses it."""

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
    """Prove to the group's member `peer` that we know the secret. Raises RuntimeError unless it proves the same."""

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


def prove_to_all(group: Any, secret: str, rank: int, world_size: int, device: torch.device) -> None:
    """Prove to all members of an NCCL group that we know the secret. Raises RuntimeError unless each proves the same.
    The proof of a place is of use in no other, so that it may be seen by all."""
    proofs = [list(hmac.new(secret.encode(), b"member %d" % member, "sha256").digest()) for member in range(world_size)]
    mine = torch.tensor(proofs[rank], dtype=torch.uint8, device=device)
    shown = [torch.empty_like(mine) for _ in proofs]
    group.allgather([shown], [mine]).wait()
    for member, (theirs, expected) in enumerate(zip(shown, proofs, strict=True)):
        if not hmac.compare_digest(bytes(theirs.tolist()), bytes(expected)):
            raise RuntimeError(f"who has connected as member {member} of the group does not know its secret")


class ChainReceiver:
    """One worker's place in the chain."""

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
        """Kept between buckets and syncs: touching fresh memory costs as much as filling it."""
        self._leaving: list[Any] = []
        """What is still passed on of the last bucket; nothing by the next one, which begins when all have the last."""

    def receive(self, num_bytes: int) -> torch.Tensor:
        """The next bucket, [num_bytes], filled again by the next call. Passes it on, and returns when all of it is
        here. Raises RuntimeError if it does not come; the group is then left."""
        if self._memory.nbytes < num_bytes:
            self._memory = torch.empty(num_bytes, dtype=torch.uint8)
        memory = self._memory[:num_bytes]
        if problem := self._pass_on(torch.split(memory, self._chunk_bytes)):
            self._group, self._leaving = None, []  # the group's sockets close with its last reference
            raise RuntimeError(f"the weights stopped coming: {problem}")
        return memory

    def _pass_on(self, chunks: Sequence[torch.Tensor]) -> str:
        """Returns what went wrong as text: a traceback would keep the group."""
        deadline = time.monotonic() + self._timeout.total_seconds()

        def left() -> timedelta:
            """Of the time for the whole bucket. Given to each wait: without a timeout gloo uses the join timeout,
            whatever `set_timeout` was given. Never 0, which counts as none."""
            return timedelta(seconds=max(0.001, deadline - time.monotonic()))

        for work in self._leaving:
            with contextlib.suppress(RuntimeError):
                work.wait(left())
        self._leaving = []
        arriving = [self._group.recv([chunk], self._previous, tag) for tag, chunk in enumerate(chunks)]
        for tag, (chunk, work) in enumerate(zip(chunks, arriving, strict=True)):
            try:
                work.wait(left())
            except Exception as error:
                return str(error) or type(error).__name__
            if self._next is not None:
                try:
                    self._leaving.append(self._group.send([chunk], self._next, tag))
                except RuntimeError:
                    self._next = None
        return ""


class BroadcastReceiver:
    """One worker's end of an NCCL group. No GPU has run it."""

    def __init__(
        self, store: Store, rank: int, world_size: int, timeout: timedelta, secret: str, device: torch.device
    ) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)
        self._unproven: tuple[str, int, int] | None = (secret, rank, world_size)
        options = dist.ProcessGroupNCCL.Options()
        # longer than the trainer waits: torch ends this whole process when a broadcast is what times out first
        options._timeout = 2 * timeout
        self._group: Any = dist.ProcessGroupNCCL(PrefixStore(PREFIX, store), rank, world_size, options)
        watched = store.clone()  # type: ignore[attr-defined] # a client that waits holds up every other question
        threading.Thread(target=_abort_when_given_up, args=(watched, self._group), daemon=True).start()

    def receive(self, num_bytes: int) -> torch.Tensor:
        """As `ChainReceiver.receive`."""
        if self._unproven is not None:  # not while joining: NCCL's first call waits for all, and nothing can end that
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
        """Between syncs the engine needs the memory."""
        self._memory = self._memory.new_empty(0)


def _abort_when_given_up(store: Store, group: Any) -> None:
    """The store ends with the trainer's end of the group, which a killed trainer has not given up: torch would end this
    process too, for a broadcast that never comes."""
    with contextlib.suppress(RuntimeError):
        store.wait([GIVEN_UP], timedelta(days=365))
    with contextlib.suppress(RuntimeError):
        group.abort()


def map_memory(memory: dict[str, Any]) -> torch.Tensor:
    """The trainer's buffer of bytes, from `SharedBuffer.handle()`. GPUs are found by UUID: CUDA_VISIBLE_DEVICES may
    number them differently here than in the trainer. Raises RuntimeError."""
    if "path" in memory:
        return torch.from_file(memory["path"], shared=True, size=memory["bytes"], dtype=torch.uint8)
    uuids = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
    if memory["uuid"] not in uuids:
        raise RuntimeError(f"the weights lie on GPU {memory['uuid']}; this worker sees only {', '.join(uuids)}")
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
"""What NCCL takes where the variable is not set: on, if the device can."""
NCCL_PINNED = {"NCCL_MIN_NCHANNELS": "-2", "NCCL_MAX_NCHANNELS": "-2"}
NCCL_PINNED |= {"NCCL_PROTO": "", "NCCL_ALGO": "", "NCCL_NTHREADS": ""}
"""What engines set to sum in one order: SGLang 0.5.23 with --enable-deterministic-inference and --tp-size above 1, vLLM
0.32.0 with VLLM_BATCH_INVARIANT. Each member of a communicator goes by its own and asks no other; defaults as above.
NCCL_ALGO that names all-reduces alone leaves other collectives none from NCCL 2.31 on, as vLLM says."""


def nccl_settings() -> dict[str, str]:
    """`version`, and the variables as NCCL would read them here; empty where torch has no NCCL."""
    try:
        version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    except AttributeError:
        return {}
    known = NCCL_DEFAULTS | NCCL_PINNED
    return {"version": version} | {name: os.environ.get(name, default) for name, default in known.items()}


def nccl_difference(theirs: dict[str, str]) -> str:
    """Why `theirs` and this process cannot be in one communicator; empty if they can, or if one is empty. NCCL
    refuses another version when it connects; with cuMem on at one end only, or other channels, it fails or hangs in
    the first transfer."""
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
