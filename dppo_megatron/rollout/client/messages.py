"""What crosses the socket between the trainer and a rollout client, as msgpack."""

from __future__ import annotations

import msgspec

from dppo_megatron.rollout.servers.dialects import AnyDialect
from dppo_megatron.rollout.servers.intake import Ask, Failed, Landed, Ready


class Hello(msgspec.Struct, frozen=True, tag=True):
    """A client's first message to rank 0."""

    node: int
    sockets: int
    """That it may open: the hard limit on open files, less what it needs itself."""


class Address(msgspec.Struct, frozen=True):
    """One server, by its position in the fleet."""

    server: int
    url: str
    dialect: AnyDialect
    api_key: str = ""
    workers: tuple[str, ...] = ()
    """Of a router: the servers behind it."""
    proves: bool = False
    """See `Http`."""

    def __repr__(self) -> str:
        """Without the key: messages go into logs."""
        return f"Address({self.server}, {self.url})"


class Servers(msgspec.Struct, frozen=True, tag=True):
    """The servers that the client will be asked to ask."""

    servers: list[Address]


class End(msgspec.Struct, frozen=True, tag=True):
    """See `Intake.end`."""

    tickets: list[int]


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """See `Intake.cancel`."""

    tickets: list[int]


class Lost(msgspec.Struct, frozen=True, tag=True):
    """The client cannot go on."""

    text: str


class Take(msgspec.Struct, frozen=True):
    """A rank of the client's node asks for its share of what is ready: every `shares`-th group, from `share` on."""

    share: int
    shares: int


class HandedGroup(msgspec.Struct, frozen=True):
    """One group, whose tokens lie in the buffers behind those of the groups before it."""

    index: int
    lengths: list[int]
    reasons: list[str]
    spans: list[list[tuple[int, int]]]
    """For each completion (weights version, tokens sampled under it), in order."""
    text_bytes: list[int]
    grades: bytes = b""
    """A msgpack list of the hook's `Grade`s; empty if it was not graded."""


class Handed(msgspec.Struct, frozen=True):
    """The header of a share; the buffers are in the memory file that comes with it: int32 tokens [n], float32
    log-probabilities [n], then the texts in UTF-8."""

    groups: list[HandedGroup]
    num_tokens: int
    num_bytes: int


ToClient = Servers | Ask | End | Cancel
FromClient = Hello | Landed | Ready | Failed | Lost

ENCODER = msgspec.msgpack.Encoder()
TO_CLIENT = msgspec.msgpack.Decoder(ToClient)
FROM_CLIENT = msgspec.msgpack.Decoder(FromClient)
TAKE = msgspec.msgpack.Decoder(Take)
HANDED = msgspec.msgpack.Decoder(Handed)
