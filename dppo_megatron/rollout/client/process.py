"""The rollout client's process: an event loop that asks servers, and threads that never touch a socket of theirs.

    event loop        one task a ticket: POST, decode, check          waits for: sockets
      reads Submit/EndRequests from rank 0, writes Completed/Graded/AttemptFailed
    text thread       a group's tokens to texts, in one batch         waits for: groups that have landed
    hook's threads    grade completions, see `rewards/pool.py`        wait for: texts, their processes
    hand-over thread  gives a rank of this node its share             waits for: the unix socket

Started by the first rank of a node, with its setup on stdin: other users can read command lines, and so a key in one.
It ends with that rank, even if that is killed: the kernel sends it SIGUSR2, and its sockets end. SIGTERM does not end
it: torchrun and Slurm send that to all of a job's processes, and rank 0 finishes its step then.

It imports no torch. At 1 Mtok/s it uses about one core, none of which is the trainer's interpreter.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import secrets
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from dppo_megatron.children import die_with_parent, ignore_signals
from dppo_megatron.frames import FrameBuffer, framed
from dppo_megatron.launcher_env import raise_file_limit
from dppo_megatron.rollout.client.completion_buffer import (
    BufferedGroup,
    CompletionBuffer,
    HookFactory,
    hand_over,
    spans_of,
)
from dppo_megatron.rollout.client.detokenizer import Detokenizer
from dppo_megatron.rollout.client.messages import (
    ENCODER,
    TAKE,
    TO_CLIENT,
    ClientHello,
    ClientLost,
    FromClient,
    HandshakeFailed,
    ServerAddress,
    Servers,
    ToClient,
    connect,
    handshake,
    receive,
)
from dppo_megatron.rollout.servers.http import (
    ERROR_BYTES,
    STALE_TRIES,
    BadAnswer,
    OurFault,
    Peer,
    Refused,
    Stale,
    Transport,
    Unreachable,
    brief,
)
from dppo_megatron.rollout.servers.wire import (
    AttemptFailed,
    Call,
    Completed,
    GenerateRequest,
    Graded,
    Sampled,
    Submit,
    as_sampled,
    checked,
)
from dppo_megatron.types import Grade, GradeTask

OWN_FILES = 64
"""Open files that the client needs beside a socket for each group in flight."""
_CONNECT_S = 60.0
_ABORT_S = 30.0
_TOGETHER_S = 0.01
"""Messages to rank 0 go out at most so often: each time they wake a thread that takes the interpreter from training."""


@dataclass(frozen=True)
class Setup:
    """What a client gets on stdin from the rank that starts it."""

    node: int
    rank_zero: str
    """Where rank 0 listens: a path or host:port."""
    secret: bytes = field(repr=False)
    take_path: str = ""
    """Where ranks of this node ask for their shares."""
    detokenizer: Detokenizer | None = None
    hook: HookFactory | None = None
    parent: int = field(default_factory=os.getpid)
    import_path: list[str] = field(default_factory=lambda: list(sys.path))
    """The trainer's: a user's grader may be a module that only the trainer's path finds."""


class Client:
    """The process's state. Everything but `_text`, `_graded` and `_serve_ranks` runs in the event loop."""

    def __init__(self, setup: Setup, control: socket.socket) -> None:
        self._setup, self._control = setup, control
        self._held = CompletionBuffer()
        self._asks: dict[int, tuple[Submit, asyncio.Task[None]]] = {}
        self._other_tasks: set[asyncio.Task[None]] = set()
        self._texts = ThreadPoolExecutor(1, thread_name_prefix="texts")
        self._loop = asyncio.get_running_loop()
        self._sockets = raise_file_limit() - OWN_FILES
        self._asker = Asker(self._sockets)
        self._hook = setup.hook() if setup.hook else None
        self._unsent: list[bytes] = []
        """Messages to rank 0, in order."""
        self._flushed = 0.0
        """When something was last sent."""
        self._takes = socket.socket(socket.AF_UNIX)
        self._takes.bind(setup.take_path)  # before the first word to rank 0, which then lets ranks come here
        self._takes.listen(64)

    async def run(self) -> None:
        """Until rank 0 closes the connection."""
        reader, self._writer = await asyncio.open_connection(sock=self._control)
        self._send(ClientHello(self._setup.node, self._sockets))
        threading.Thread(target=self._serve_ranks, name="hand-over", daemon=True).start()
        received = FrameBuffer()
        try:
            while piece := await reader.read(1 << 16):
                for message in received.feed(piece):
                    self._obey(TO_CLIENT.decode(message))
        except ConnectionError:
            pass  # the run has ended
        finally:
            await self._asker.close()
            if self._hook is not None:
                self._hook.close()

    def _obey(self, message: ToClient) -> None:
        if isinstance(message, Servers):
            self._asker.know(message.servers)
        elif isinstance(message, Submit):
            self._asks[message.ticket] = (message, self._begin(self._answer(message)))
        else:
            for ticket in message.tickets:
                if message.drops and ticket in self._asks:
                    self._asks.pop(ticket)[1].cancel()
                elif ticket in self._asks:
                    ask, _ = self._asks[ticket]
                    self._begin(self._asker.end(ask.server, ask.group))
            if message.drops:
                self._held.drop(message.tickets)

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._other_tasks.add(task)  # the loop itself keeps weak references only
        task.add_done_callback(self._other_tasks.discard)
        return task

    async def _answer(self, ask: Submit) -> None:
        try:
            sampled = await self._sampled(ask)
        except Refused as error:
            self._fail(AttemptFailed(ask.ticket, "refused", str(error), error.status, error.retry_after_s))
        except BadAnswer as error:
            self._fail(AttemptFailed(ask.ticket, "bad", str(error)))
        except Unreachable as error:
            self._fail(AttemptFailed(ask.ticket, "unreachable", str(error)))
        except OurFault as error:
            self._fail(AttemptFailed(ask.ticket, "ours", str(error)))
        except Exception as error:  # an answer that we do not foresee must not leave its request waiting
            self._fail(AttemptFailed(ask.ticket, "bad", brief(error)))
        else:
            self._asks.pop(ask.ticket, None)
            self._held.put(ask.ticket, BufferedGroup(ask.index, sampled, rollout=ask.rollout, first=ask.first))
            lengths, reasons = [len(one.token_ids) for one in sampled], [one.finish_reason for one in sampled]
            spans = [span for one in sampled if one.finish_reason != "abort" for span in spans_of(one)]
            again = sum(
                len(ask.group.prompt_ids) + start for one in sampled for _, start, _ in one.weights_versions[1:]
            )
            self._send(Completed(ask.ticket, lengths, list(reasons), spans, again))
            self._texts.submit(self._text, ask, sampled)

    async def _sampled(self, ask: Submit) -> list[Sampled]:
        """Raises as `Asker.ask`."""
        for left in reversed(range(STALE_TRIES)):
            named = _with_own_id(ask)
            self._asks[ask.ticket] = (named, self._asks[ask.ticket][1])
            try:
                return await self._asker.ask(named)
            except Stale:
                if not left:
                    raise
                self._begin(self._asker.end(named.server, named.group))  # the server may have read it, and go on
        raise AssertionError("the last try returns or raises")

    def _text(self, ask: Submit, sampled: Sequence[Sampled]) -> None:
        """In the text thread."""
        try:
            detokenizer = self._setup.detokenizer
            arrays = [one.token_ids for one in sampled]
            texts = detokenizer.decode(arrays) if detokenizer is not None else [""] * len(arrays)
            sent = [text.encode(errors="replace").decode() for text in texts]  # half a surrogate pair is no UTF-8
            ended = [index for index, one in enumerate(sampled) if one.finish_reason not in ("early", "abort")]
            if self._hook is None or not ask.prompt or not ended:
                self._ready(ask.ticket, sent, ())
            elif ask.ticket in self._held:
                # written by this job's rank 0, over a connection that has shown the job's key
                prompt = pickle.loads(ask.prompt)
                tasks = [
                    GradeTask.of(
                        prompt, texts[at], ask.first + at, len(sampled[at].token_ids), sampled[at].finish_reason
                    )
                    for at in ended
                ]
                self._hook.submit(tasks).add_done_callback(partial(self._graded, ask.ticket, sent, ended))
        except BaseException as error:
            self._lost(error)

    def _graded(self, ticket: int, texts: list[str], ended: list[int], graded: Future[list[Grade]]) -> None:
        """In a thread of the hook's; `ended` are the completions that were graded: the others have no end to grade."""
        try:
            known = graded.result()
            if len(known) != len(ended):
                raise ValueError(f"{len(known)} grades of {len(ended)} completions")
            grades: list[Grade | None] = [None] * len(texts)
            for index, grade in zip(ended, known, strict=True):
                grades[index] = grade
            self._ready(ticket, texts, grades)
        except BaseException as error:  # else rank 0 would wait for this group
            self._lost(error)

    def _ready(self, ticket: int, texts: list[str], grades: Sequence[Grade | None]) -> None:
        """From any thread."""
        if self._held.settle(ticket, texts, grades):
            self._loop.call_soon_threadsafe(self._send, Graded(ticket))

    def _lost(self, error: BaseException) -> None:
        """From any thread: this client cannot do its work."""
        self._loop.call_soon_threadsafe(self._send, ClientLost(brief(error)))

    def _fail(self, message: AttemptFailed) -> None:
        self._asks.pop(message.ticket, None)
        self._send(message)

    def _send(self, message: FromClient) -> None:
        """Have it sent soon, with what else there is by then."""
        self._unsent.append(framed(ENCODER.encode(message)))
        if len(self._unsent) == 1:
            self._loop.call_at(self._flushed + _TOGETHER_S, self._write)

    def _write(self) -> None:
        self._flushed = self._loop.time()
        self._writer.writelines(self._unsent)
        self._unsent = []

    def _serve_ranks(self) -> None:
        while True:
            peer, _ = self._takes.accept()
            with peer, contextlib.suppress(OSError, HandshakeFailed):
                peer.settimeout(_CONNECT_S)
                handshake(peer, self._setup.secret, listens=True)
                take = TAKE.decode(receive(peer))
                hand_over(peer, self._held.take(take.share, take.shares, take.rollout))


class Asker:
    """Asks servers over at most so many `sockets` at a time. Made and used in a running event loop."""

    def __init__(self, sockets: int) -> None:
        self._transport, self._sockets = Transport(sockets), sockets
        self._servers: dict[str, ServerAddress] = {}
        self._going_on: set[str] = set()
        """Ids of the requests that are asked and not to be ended."""

    def know(self, servers: list[ServerAddress]) -> None:
        """The servers that may be asked; another one at a known address takes its place."""
        for address in servers:
            self._servers[address.peer.url] = address
            self._transport.know(address.peer)

    async def ask(self, ask: Submit) -> list[Sampled]:
        """The completions of a group, checked. One that is to be ended before its last round was posted has none: a
        server could not end what it gets after it was told to.

        Raises:
            Unreachable (Stale among them), Refused, BadAnswer, OurFault.
        """
        server, request_id = self._servers[ask.server], ask.group.request_id
        answers: list[bytes] = []
        self._going_on.add(request_id)
        try:
            async with asyncio.timeout(ask.timeout_s):
                for calls in server.dialect.rounds(ask.group):
                    if request_id not in self._going_on:
                        return [as_sampled((), (), "abort", ())] * ask.group.count
                    answers = await self._post_all(server, calls, ask.group.answer_bytes)
        except TimeoutError:
            raise Unreachable(f"{server.peer.url}: no complete answer after {ask.timeout_s:g} s") from None
        except OurFault as error:
            raise OurFault(
                f"the rollout client can open no more connections ({error}); it keeps to {self._sockets}, for its limit"
                " on open files (ulimit -n)"
            ) from None
        finally:
            self._going_on.discard(request_id)
        return checked(server.dialect.read(answers, ask.group), ask.group, ask.expected)

    async def end(self, server: str, group: GenerateRequest) -> None:
        """Have the server end a request; one that cannot be reached has ended it, or its probe will find it hung. All
        workers of a router are asked: only the router knows which of them has it."""
        self._going_on.discard(group.request_id)
        address = self._servers[server]
        calls = address.dialect.abort_calls(group)
        # at once: none waits for one that hangs
        await asyncio.gather(*(self._end_at(peer, calls) for peer in address.workers or [address.peer]))

    async def close(self) -> None:
        """Close all connections."""
        await self._transport.close()

    async def _end_at(self, peer: Peer, calls: Sequence[Call]) -> None:
        for call in calls:
            try:
                await self._transport.repeat(peer, "POST", call.path, call.body, ERROR_BYTES, _ABORT_S)
            except (Unreachable, Refused, OurFault):
                return

    async def _post_all(self, server: ServerAddress, calls: Sequence[Call], max_bytes: int) -> list[bytes]:
        """Their answers, in order. The first that fails ends the others."""
        peer, post = server.peer, self._transport.request
        if len(calls) == 1:
            return [bytes(await post(peer, "POST", calls[0].path, calls[0].body, max_bytes))]
        posts = [asyncio.ensure_future(post(peer, "POST", call.path, call.body, max_bytes)) for call in calls]
        try:
            return [bytes(answer) for answer in await asyncio.gather(*posts)]
        finally:
            for begun in posts:
                begun.cancel()


def _with_own_id(ask: Submit) -> Submit:
    """The attempt under a unique id: an earlier one at the same group, whose connection has just been closed, may still
    run on the server, and SGLang refuses an id that it has."""
    unique = f"{ask.group.request_id}.{secrets.token_hex(4)}"
    return msgspec.structs.replace(ask, group=msgspec.structs.replace(ask.group, request_id=unique))


def _leave(setup: Setup) -> None:
    """End, and remove the sockets' directories: a killed trainer cannot."""
    for path in (setup.take_path, setup.rank_zero):
        if path.startswith("/"):
            shutil.rmtree(os.path.dirname(path), ignore_errors=True)
    os._exit(0)  # without waiting for a thread; the kernel ends the graders


async def _run(setup: Setup) -> None:
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, _leave, setup)
    control = connect(setup.rank_zero, _CONNECT_S)
    handshake(control, setup.secret, listens=False)
    await Client(setup, control).run()


def main() -> None:
    """Read the setup from stdin and serve until the trainer is gone."""
    ignore_signals(signal.SIGINT)  # the trainer handles it, and then closes the connection
    signal.signal(signal.SIGTERM, lambda *_: None)  # so too; what graders start would inherit that it is ignored
    setup: Setup = pickle.load(sys.stdin.buffer)
    die_with_parent(signal.SIGUSR2, setup.parent)
    sys.path[:] = setup.import_path
    asyncio.run(_run(setup))
    _leave(setup)
