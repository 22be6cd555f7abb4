"""What the fleet asks of one engine's server, whichever engine it is: `vllm.py` and `sglang.py` speak it.

A dialect only translates. Which server is asked, how often, and what a failure means is decided in `dispatch.py`.
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
"""How a worker maps memory of the trainer: JSON for vLLM, a pickle of handles in base64 for SGLang."""
DEVICE_MEMORY: frozenset[DeviceMemory] = frozenset(("weights", "kv_cache"))

# `Http.get` and `Http.post` decode a server's answers into types like these: one that lacks a field, or has a value out
# of its bounds, is a `BadAnswer`, a failure of that server. Other fields are skipped. Commands answer `http.Done`.
Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=4096)]
Version: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^[0-9][0-9A-Za-z.+_-]{0,63}\Z")]
Workers: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=4096)]
Tokens: TypeAlias = Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
Nccl: TypeAlias = dict[Text, Text]


class HeldTensors(msgspec.Struct):
    checksums: dict[Text, Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16,64}\Z")]]
    """SHA-256, or its first digits, by name of a tensor."""


class NamedWeights(msgspec.Struct):
    weight_version: Text


class ModelFile(msgspec.Struct):
    """A checkpoint's config.json, at the path that a server names."""

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
    """Sync channels that it is started for."""
    world_size: int
    logprobs_are_processed: bool | None
    """Log-probabilities are taken after temperature, top_p and top_k, as the loss needs them."""
    max_top_k: int | None = None
    """Log-probabilities under top_p or top_k are given for a top_k of at most this; None: always."""
    top_p_after_top_k: bool = True
    """top_p is measured on what top_k leaves, as everywhere else; not on the whole distribution."""
    returns_experts: bool = False
    """Completions come with the experts of their tokens where they are asked for: as arrays, of our path alone."""
    devices: tuple[str, ...] = ()
    """UUID of each worker's GPU, or `cpu`, replica by replica; empty: not reported."""
    nccl: dict[str, str] = field(default_factory=dict)
    """`dppo_wire.nccl_settings()` there; empty: not reported."""
    pauses: bool = True
    """`pause` stops requests under way."""
    quantization: str = ""
    """The engine's name of how it holds weights; empty: as the model has them."""


@dataclass(frozen=True, slots=True)
class TensorNote:
    """What a receiver must know of a tensor before its bytes arrive."""

    name: str
    dtype: str
    """torch's name without the prefix, e.g. bfloat16."""
    shape: tuple[int, ...]


BroadcastBackend = Literal["gloo", "nccl"]
CHUNK_BYTES = 4 << 20
"""Of the chain. Smaller ones fill it sooner, larger ones wake fewer threads; a chain of n workers lags by n chunks."""


@dataclass(frozen=True, slots=True)
class GroupRendezvous:
    """Where the members of one group find each other, and what they agree on."""

    name: str
    """Unique in this process and at the server: torch keeps a register of names."""
    backend: BroadcastBackend
    host: str
    store: TCPStore
    world_size: int
    joining: timedelta
    timeout: timedelta
    """For one transfer."""
    secret: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)
    """Goes to servers with the request to join; members show each other that they know it, where both ends are ours."""


class Generator(Protocol):
    """Answers requests for completions: a server, or a router in front of several."""

    http: Http

    @property
    def dialect(self) -> AnyDialect:
        """How it is asked for completions; final once it has described itself."""

    def healthy(self, *, timeout_s: float) -> None:
        """Raise Unreachable or Refused (see `http.py`) unless it answers and could generate."""


class Server(Generator, Protocol):
    """One server. Every method raises as `healthy` does, and reaches every replica."""

    engine: ClassVar[str]
    runs_our_receiver: ClassVar[bool]
    """Its workers receive broadcasts by `in_engine/dppo_wire.py`; else as torch's process groups do."""
    replicas: int
    """Data-parallel engines behind its address, each with its cache and batch; final, as `world_size` is, once it has
    described itself."""
    world_size: int
    """Workers of all its replicas: those that take part in a broadcast."""

    def describe(self, *, timeout_s: float) -> ServerInfo:
        """What it is and serves. Raises UserError if it is too old."""

    def pause(self, in_flight: InFlight, *, timeout_s: float) -> None:
        """Stop generating; `finish` waits for running requests, `continue` freezes them."""

    def resume(self, *, timeout_s: float) -> None:
        """Generate again after `pause`."""

    def load_from_disk(self, path: str, version: str, *, timeout_s: float) -> None:
        """Leaves no cached prefix: its keys and values would belong to the old weights."""

    def weights_version(self, *, timeout_s: float) -> str:
        """The name that the last load or update gave its weights."""

    @property
    def shows_checksums(self) -> bool:
        """Its `checksums` are of whole tensors and of the bytes that were sent: there is something to compare."""

    def checksums(self, *, timeout_s: float) -> list[dict[str, str]]:
        """SHA-256 of the tensors that each replica can show, by its own names."""

    def sleep(self, awake: Set[DeviceMemory], *, keeps: bool = False, timeout_s: float) -> None:
        """End what still runs, or keep it for `resume`, and free all device memory, of which `awake` is what is not
        free already."""

    def wake(self, what: DeviceMemory, *, timeout_s: float) -> None:
        """Take one of them back, once: SGLang's scheduler ends when it is asked for what it has."""

    # ------------------------------------------------ weights in buckets, between `begin_update` and `end_update`

    def join_group(self, meeting: GroupRendezvous, first_rank: int, *, timeout_s: float) -> None:
        """Have the workers join a broadcast group as ranks `first_rank` and following, and leave an earlier one. Other
        servers' workers have the ranks before and after. Returns when all members have joined."""

    def begin_update(self, *, timeout_s: float) -> None:
        """A server that was left in the middle of an earlier update begins afresh."""

    def receive(self, tensors: Sequence[TensorNote], *, timeout_s: float) -> None:
        """Take part in one broadcast, of these tensors end to end."""

    def receive_shared(self, offers: Sequence[Offer], tensors: Sequence[TensorNote], *, timeout_s: float) -> None:
        """Take these tensors from memory of the trainer's ranks; one offer for each worker, in their order."""

    def end_update(self, version: str, *, timeout_s: float) -> None:
        """Leaves no cached prefix, as `load_from_disk`."""


def architecture_of(root: str) -> tuple[str | None, int | None]:
    """Architecture and vocabulary of the checkpoint that a server names as its model, if it can be read from here."""
    try:
        found = msgspec.json.decode((Path(root) / "config.json").read_bytes(), type=ModelFile)
        return found.architectures[0], found.vocab_size
    except (OSError, ValueError, RecursionError):
        return None, None


def check_version(engine: str, version: str, minimum: str, url: str) -> None:
    """Raise UserError for a server that lacks what the trainer calls."""
    if is_older(version, minimum):
        raise UserError(f"{url}: {engine} {version} is too old; at least {minimum} is needed (docs/engines.md)")


def is_older(version: str, minimum: str) -> bool:
    """Compares the leading numbers of two versions; 0.9.1 is older than 0.10."""
    found, wanted = (
        [int(number) for number in re.split(r"[^0-9.]", text)[0].split(".") if number] for text in (version, minimum)
    )
    return found < wanted


def generate(server: Server, group: GenerateRequest, expected: Expected, *, timeout_s: float) -> list[Sampled]:
    """The completions of one group, from this thread: for probes. Rollouts go through the clients.

    Raises:
        Unreachable, Refused, BadAnswer: see `http.py`.
    """
    deadline, answers = time.monotonic() + timeout_s, [b""]
    for calls in server.dialect.rounds(group):
        answers = []
        for path, body in calls:
            left_s = max(0.001, deadline - time.monotonic())
            answers.append(server.http.exchange(path, body, timeout_s=left_s, max_bytes=group.answer_bytes))
    return checked(server.dialect.read(answers, group), group, expected)
