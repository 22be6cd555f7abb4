"""The interface of one engine's server, whichever engine it is; `vllm.py` and `sglang.py` implement it.

They only translate calls. Which server gets a request, how often, and what a failure means is decided in `dispatch.py`.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Protocol, TypeAlias

import msgspec
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from dppo_megatron.rollout.servers.dialects import AnyDialect
from dppo_megatron.rollout.servers.http import Http
from dppo_megatron.rollout.servers.wire import Expected, GenerateRequest, Sampled, checked
from dppo_megatron.types import UserError

InFlight = Literal["finish", "abort", "continue"]
DeviceMemory = Literal["weights", "kv_cache"]
Offer: TypeAlias = dict[str, Any] | str
"""A handle by which a worker maps memory of the trainer: JSON for vLLM, a pickle of handles in base64 for SGLang."""
DEVICE_MEMORY: frozenset[DeviceMemory] = frozenset(("weights", "kv_cache"))

# `Http.get` and `Http.post` decode answers into types like these. An answer that lacks a field, or has a value out of
# bounds, is a `BadAnswer`: a failure of that server. Unknown fields are skipped. Commands return `http.Done`.
Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=4096)]
Version: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^[0-9][0-9A-Za-z.+_-]{0,63}\Z")]
Workers: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=4096)]
Tokens: TypeAlias = Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
Nccl: TypeAlias = dict[Text, Text]


class HeldTensors(msgspec.Struct):
    checksums: dict[Text, Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16,64}\Z")]]
    """Tensor name -> SHA-256, or its first digits."""


class NamedWeights(msgspec.Struct):
    weight_version: Text


class ModelFile(msgspec.Struct):
    """A checkpoint's config.json, at the path that a server reports."""

    architectures: Annotated[list[Text], msgspec.Meta(min_length=1)]
    vocab_size: Tokens


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """A server's description of itself. None: not reported."""

    engine_version: str
    served_model: str
    max_tokens: int | None
    """Prompt and completion together."""
    architecture: str | None
    vocab_size: int | None
    channels: tuple[str, ...]
    """Sync channels that the server was started with."""
    world_size: int
    logprobs_are_processed: bool | None
    """Log-probabilities are taken after temperature, top_p and top_k, as the loss needs them."""
    max_top_k: int | None = None
    """Largest top_k for which it returns log-probabilities under top_p or top_k; None: any."""
    top_p_after_top_k: bool = True
    """top_p applies to the tokens that top_k leaves, as in other engines; False: to the whole distribution."""
    returns_experts: bool = False
    """It can return the experts that tokens were routed to; only this project's path for answers as arrays does."""
    devices: tuple[str, ...] = ()
    """UUID of each worker's GPU, or `cpu`, replica by replica; empty: not reported."""
    nccl: dict[str, str] = field(default_factory=dict)
    """`dppo_wire.nccl_settings()` in the server's process; empty: not reported."""
    pauses: bool = True
    """`pause` also stops requests that are running."""
    quantization: str = ""
    """The engine's name for the quantization of its weights; empty: as in the model's checkpoint."""


@dataclass(frozen=True, slots=True)
class TensorNote:
    """What a receiver must know about a tensor before its bytes arrive."""

    name: str
    dtype: str
    """torch's name without the prefix, e.g. bfloat16."""
    shape: tuple[int, ...]


BroadcastBackend = Literal["gloo", "nccl"]
CHUNK_BYTES = 4 << 20
"""Of the broadcast chain (`dppo_wire.py`). Worker n lags by n chunks: small ones shorten that, large ones wake threads
less often."""


@dataclass(frozen=True, slots=True)
class GroupRendezvous:
    """Where the members of one broadcast group meet, and the settings that they share."""

    name: str
    """Unique in this process and at the server, as torch requires of the names of groups."""
    backend: BroadcastBackend
    host: str
    store: TCPStore
    world_size: int
    joining: timedelta
    """Timeout for all members to join."""
    timeout: timedelta
    """For one transfer."""
    secret: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)
    """Sent to servers in the request to join. Members prove to each other that they know it, if both run our code."""


class Server(Protocol):
    """One server. Every method raises as `healthy` does, and acts on every replica."""

    http: Http
    engine: ClassVar[str]
    runs_our_receiver: ClassVar[bool]
    """Its workers receive broadcasts through `in_engine/dppo_wire.py`, otherwise through torch's process groups."""
    replicas: int
    """Data-parallel engines behind its address, each with its own cache. Known, as `world_size`, after `describe`."""
    world_size: int
    """Workers of all its replicas: those that take part in a broadcast."""

    @property
    def dialect(self) -> AnyDialect:
        """Translates requests and answers; does not change after `describe`."""

    def healthy(self, *, timeout_s: float) -> None:
        """Raise Unreachable or Refused (see `http.py`) unless it answers and could generate."""

    def describe(self, *, timeout_s: float) -> ServerInfo:
        """Its version, model and settings. Raises UserError if it is too old."""

    def pause(self, in_flight: InFlight, *, timeout_s: float) -> None:
        """Stop generating. Running requests: `finish` waits for them, `abort` ends them, `continue` freezes them."""

    def resume(self, *, timeout_s: float) -> None: ...

    def load_from_disk(self, path: str, version: str, *, timeout_s: float) -> None:
        """Load a checkpoint and drop all cached prefixes: their keys and values belong to the old weights."""

    def weights_version(self, *, timeout_s: float) -> str:
        """The version name that the last load or update gave its weights."""

    @property
    def shows_checksums(self) -> bool:
        """Whether `checksums` can be compared: they are of whole tensors, and of the bytes that were sent."""

    def checksums(self, *, timeout_s: float) -> list[dict[str, str]]:
        """Per replica, the engine's tensor name -> SHA-256, for the tensors that it can hash."""

    def sleep(self, awake: Set[DeviceMemory], *, keeps: bool = False, timeout_s: float) -> None:
        """Release all device memory; `awake` is what it holds. Running requests are aborted, or kept if `keeps`."""

    def wake(self, what: DeviceMemory, *, timeout_s: float) -> None:
        """Allocate this memory again. Never call it twice: SGLang's scheduler exits if it already has the memory."""

    # ------------------------------------------------ weights in buckets, between `begin_update` and `end_update`

    def join_group(self, rendezvous: GroupRendezvous, first_rank: int, *, timeout_s: float) -> None:
        """Have the workers leave any earlier broadcast group and join this one, as ranks `first_rank` and following;
        the other ranks are other servers' workers. Returns when all members have joined."""

    def begin_update(self, *, timeout_s: float) -> None:
        """Start an update; one that was interrupted earlier is discarded."""

    def receive(self, tensors: Sequence[TensorNote], *, timeout_s: float) -> None:
        """Take part in one broadcast, of these tensors concatenated."""

    def receive_shared(self, offers: Sequence[Offer], tensors: Sequence[TensorNote], *, timeout_s: float) -> None:
        """Read these tensors from memory of the trainer's ranks: one offer per worker, in the order of the workers."""

    def end_update(self, version: str, *, timeout_s: float) -> None:
        """Name the new weights `version` and drop all cached prefixes, as `load_from_disk`."""


def architecture_of(root: str) -> tuple[str | None, int | None]:
    """Architecture and vocabulary size of the checkpoint at `root`; (None, None) if this machine cannot read it."""
    try:
        config = msgspec.json.decode((Path(root) / "config.json").read_bytes(), type=ModelFile)
        return config.architectures[0], config.vocab_size
    except (OSError, ValueError, RecursionError):
        return None, None


def check_version(engine: str, version: str, minimum: str, url: str) -> None:
    """Raise UserError for a server older than `minimum`, which lacks paths that the trainer calls."""
    if is_older(version, minimum):
        raise UserError(f"{url}: {engine} {version} is too old; at least {minimum} is needed (docs/engines.md)")


def is_older(version: str, minimum: str) -> bool:
    """Compares the leading numbers of two versions; 0.9.1 is older than 0.10."""
    have, needed = (
        [int(number) for number in re.split(r"[^0-9.]", text)[0].split(".") if number] for text in (version, minimum)
    )
    return have < needed


def generate(server: Server, group: GenerateRequest, expected: Expected, *, timeout_s: float) -> list[Sampled]:
    """The completions of one group, awaited in this thread: for the canary. Raises Unreachable or Refused."""
    deadline, answers = time.monotonic() + timeout_s, [b""]
    for calls in server.dialect.rounds(group):
        answers = []
        for path, body in calls:
            left_s = max(0.001, deadline - time.monotonic())
            answers.append(server.http.exchange(path, body, timeout_s=left_s, max_bytes=group.answer_bytes))
    return checked(server.dialect.read(answers, group), group, expected)
