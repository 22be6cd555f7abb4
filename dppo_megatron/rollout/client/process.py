"""The rollout client's process: an event loop that talks to the servers, and threads that do the rest.

    event loop        one task per ticket: POST, decode, check        waits for: sockets
      reads Submit/EndRequests from rank 0, writes Completed/Graded/AttemptFailed
    text thread       detokenizes a group in one batch                waits for: completed groups
    hook's threads    grade completions, see `rewards/pool.py`        wait for: texts, their processes
    hand-over thread  sends a rank of this node its share             waits for: the unix socket

The first rank of a node starts it and writes the setup to its stdin: a command line would show the key to other users.
It ends with that rank, even if the rank is killed: the kernel then sends SIGUSR2, and the connection to rank 0 closes.
SIGTERM does not end it: torchrun and Slurm send SIGTERM to all processes of a job, and rank 0 then finishes its step.

It imports no torch. At 1 Mtok/s it uses about one core, and none of that time blocks the trainer's interpreter.
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
from collections.abc import Collection, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from dppo_megatron.children import die_with_parent, ignore_signals
from dppo_megatron.frames import FrameBuffer, framed
from dppo_megatron.launcher_env import raise_file_limit
from dppo_megatron.rollout.client import messages
from dppo_megatron.rollout.client.buffer import BufferedGroup, CompletionBuffer, hand_over
from dppo_megatron.rollout.client.connections import OWN_FILES, ServerConnections
from dppo_megatron.rollout.client.detokenizer import Detokenizer
from dppo_megatron.rollout.servers.http import (
    STALE_TRIES,
    BadAnswer,
    OurFault,
    Refused,
    Stale,
    Unreachable,
    brief,
)
from dppo_megatron.rollout.servers.wire import (
    NOT_BEGUN,
    AttemptFailed,
    Completed,
    GenerateRequest,
    Graded,
    Sampled,
    Submit,
    joined,
    until_end,
)
from dppo_megatron.types import Grade, GradeTask

_CONNECT_S = 60.0
_INTERRUPT_S = 10.0
_STALE_S = 5.0
"""A kept connection that breaks after this long was in use: its request had begun, and what it sampled is lost."""
_NOTED_S = 1.0
"""Rank 0 has long noted a failure of so long ago."""
_SEND_INTERVAL_S = 0.01
"""Minimum time between two writes to rank 0: each wakes a thread there that takes the interpreter from training."""


@dataclass(frozen=True)
class Setup:
    """What a client reads from stdin, written by the rank that starts it."""

    node: int
    rank_zero: str
    """Address on which rank 0 listens: the path of a unix socket, or host:port."""
    secret: bytes = field(repr=False)
    take_path: str = ""
    """Unix socket on which ranks of this node request their shares."""
    detokenizer: Detokenizer | None = None
    hook: messages.HookFactory | None = None
    parent: int = field(default_factory=os.getpid)
    import_path: list[str] = field(default_factory=lambda: list(sys.path))
    """The trainer's `sys.path`: a user's grader may be a module that only this path finds."""


@dataclass
class _OpenAttempt:
    submit: Submit
    task: asyncio.Task[None]
    running: dict[str, GenerateRequest] = field(default_factory=dict)
    """Its requests at the server, by their ids there."""
    told: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    """The latest call that ends a request, by the request's id."""
    is_late: bool = False
    """Rank 0 has had it ended, so it does not go on."""


class Client:
    """The process's state. Everything but `_detokenize`, `_graded` and `_serve_ranks` runs in the event loop."""

    def __init__(self, setup: Setup, control: socket.socket) -> None:
        self._setup, self._control = setup, control
        self._buffer = CompletionBuffer()
        self._attempts: dict[int, _OpenAttempt] = {}
        self._begun: dict[int, dict[tuple[int, int], Sampled]] = {}
        """What was sampled of completions that are not done, by rollout, then by group and position in it."""
        self._interrupted: set[int] = set()
        """Tickets whose requests are aborted to see their tokens, and then go on."""
        self._seen: dict[int, dict[tuple[int, int], Sampled]] = {}
        """The same of all completions, as the latest look has seen them."""
        self._failed_s: dict[int, float] = {}
        """When an attempt of a rollout failed last, on the loop's clock."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._text_thread = ThreadPoolExecutor(1, thread_name_prefix="texts")
        self._loop = asyncio.get_running_loop()
        self._sockets = raise_file_limit() - OWN_FILES
        self._servers = ServerConnections(self._sockets)
        self._hook = setup.hook() if setup.hook else None
        self._unsent: list[bytes] = []
        self._last_write_s = 0.0
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(setup.take_path)  # before the hello to rank 0: ranks may connect as soon as it has arrived
        self._listener.listen(64)

    async def run(self) -> None:
        """Serve until rank 0 closes the connection."""
        reader, self._writer = await asyncio.open_connection(sock=self._control)
        self._send(messages.ClientHello(self._setup.node, self._sockets))
        threading.Thread(target=self._serve_ranks, name="hand-over", daemon=True).start()
        received = FrameBuffer()
        try:
            while piece := await reader.read(1 << 16):
                for message in received.feed(piece):
                    self._handle(messages.TO_CLIENT.decode(message))
        except ConnectionError:
            pass  # the run has ended
        finally:
            await self._servers.close()
            if self._hook is not None:
                self._hook.close()

    def _handle(self, message: messages.ToClient) -> None:
        if isinstance(message, messages.Servers):
            self._servers.add(message.servers)
        elif isinstance(message, Submit):
            self._attempts[message.ticket] = _OpenAttempt(message, self._start_task(self._attempt(message)))
        elif isinstance(message, messages.Begun):
            sampled = pickle.loads(message.sampled)  # by this job's rank 0, as the prompts
            self._begun.setdefault(message.key[0], {}).setdefault(message.key[1:], sampled)
        elif isinstance(message, messages.Over):
            for known in (self._begun, self._failed_s):
                known.pop(message.rollout, None)
        else:
            for ticket in message.tickets:
                self._unseen(ticket)
                if message.drops and ticket in self._attempts:
                    self._attempts.pop(ticket).task.cancel()
                elif ticket in self._attempts:
                    self._attempts[ticket].is_late = True
                    self._abort(ticket)
            if message.drops:
                self._buffer.drop(message.tickets)

    def _start_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)  # asyncio keeps only a weak reference to a task
        task.add_done_callback(self._tasks.discard)
        return task

    async def _attempt(self, submit: Submit) -> None:
        try:
            sampled = await self._sample(submit)
        except Refused as error:
            self._fail(AttemptFailed(submit.ticket, "refused", str(error), error.status, error.retry_after_s))
        except BadAnswer as error:
            self._fail(AttemptFailed(submit.ticket, "bad", str(error)))
        except Unreachable as error:
            self._fail(AttemptFailed(submit.ticket, "unreachable", str(error)))
        except OurFault as error:
            self._fail(AttemptFailed(submit.ticket, "ours", str(error)))
        except Exception as error:  # an unforeseen answer must not leave rank 0 waiting for this ticket
            self._fail(AttemptFailed(submit.ticket, "bad", brief(error)))
        else:
            self._attempts.pop(submit.ticket, None)
            group = BufferedGroup(submit.index, sampled, rollout=submit.rollout, first=submit.first)
            self._buffer.put(submit.ticket, group)
            lengths, reasons = [len(one.token_ids) for one in sampled], [one.finish_reason for one in sampled]
            spans = [span for one in sampled if one.finish_reason != "abort" for span in messages.spans_of(one)]
            prompt = len(submit.group.prompt_ids)
            # each later weights version began with a prefill of the prompt and of the tokens sampled before it
            read_again = sum(prompt + start for one in sampled for _, start, _ in one.weights_versions[1:])
            self._send(Completed(submit.ticket, lengths, list(reasons), spans, read_again))
            self._text_thread.submit(self._detokenize, submit, sampled)

    def _abort(self, ticket: int) -> None:
        """Have the server end the requests of an attempt, whose answers then have the tokens so far; not those that it
        has been told to end and has not answered: thousands of repeated calls would keep it from answering."""
        server, told = self._attempts[ticket].submit.server, self._attempts[ticket].told
        for name, group in self._attempts[ticket].running.items():
            if name not in told or told[name].done():
                told[name] = self._start_task(self._servers.abort(server, group))

    async def _sample(self, submit: Submit) -> list[Sampled]:
        """The completions of a group. If some have begun, each goes on from there, in a request of its own."""
        group, deadline = submit.group, self._loop.time() + submit.timeout_s
        keys = [(submit.index, submit.first + place) for place in range(group.count)]
        known = self._begun.setdefault(submit.rollout, {})
        while True:
            begun = [known.get(key, NOT_BEGUN) for key in keys]
            left = msgspec.structs.replace(submit, timeout_s=deadline - self._loop.time())
            is_new = known.keys().isdisjoint(keys)
            sampled = await (self._ask(left, group) if is_new else self._go_on(left, begun))
            if submit.ticket not in self._interrupted:
                break
            self._interrupted.discard(submit.ticket)
            ends = [until_end(one, group, index) for index, one in enumerate(sampled)]
            found = {key: one for key, one in zip(keys, ends, strict=True) if len(one.token_ids)}
            for seen in (known, self._seen.get(submit.rollout, {})):
                seen |= found
        for index, (key, one) in enumerate(zip(keys, sampled, strict=True)):
            if one.finish_reason != "abort":
                known.pop(key, None)
            elif until_end(one, group, index) is not one:  # drafted beyond its end: no look may take it for a beginning
                sampled[index] = NOT_BEGUN
        return sampled

    async def _go_on(self, submit: Submit, sampled: list[Sampled]) -> list[Sampled]:
        """`sampled`, what is known of a group, with the rests. The first failure cancels the other requests."""
        group = submit.group
        lacking = [index for index, one in enumerate(sampled) if one.finish_reason == "abort"]
        asked = [asyncio.create_task(self._ask(submit, group.rest(index, sampled[index]))) for index in lacking]
        try:
            for index, [rest] in zip(lacking, await asyncio.gather(*asked), strict=True):
                sampled[index] = joined(sampled[index], rest, group, index)
        finally:
            for task in asked:
                task.cancel()
        return sampled

    async def _ask(self, submit: Submit, group: GenerateRequest) -> list[Sampled]:
        """The answer to `group` from the attempt's server."""
        running = self._attempts[submit.ticket].running
        for left in reversed(range(STALE_TRIES)):
            # an earlier attempt, whose connection was just closed, may still run, and SGLang refuses an id in use
            unique = msgspec.structs.replace(group, request_id=f"{group.request_id}.{secrets.token_hex(4)}")
            running[unique.request_id], asked_s = unique, self._loop.time()
            try:
                return await self._servers.generate(msgspec.structs.replace(submit, group=unique))
            except Stale:
                if not left or self._loop.time() - asked_s > _STALE_S:
                    raise
                # the server may have read the request before the connection broke, and be generating
                self._start_task(self._servers.abort(submit.server, unique))
            finally:
                del running[unique.request_id]
        raise AssertionError("the last try returns or raises")

    async def _look(self, rollouts: Collection[int]) -> None:
        """See what rollouts have sampled so far. Their requests are aborted, and go on at once from their tokens. Each
        is seen at one moment: what ends while others are still waited for would be the short completions. Nothing is
        seen of a rollout with a request that has not ended after `_INTERRUPT_S`, or fails, for the same reason; nor if
        one has just failed, which rank 0 may not have noted yet."""
        failed_s = self._loop.time() - _NOTED_S
        tickets = {at for at, one in self._attempts.items() if one.submit.rollout in rollouts and not one.is_late}
        which = [one for one in rollouts if self._failed_s.get(one, failed_s) <= failed_s]
        self._seen = {one: self._begun.get(one, {}) | self._buffer.sampled(one) for one in which}
        self._interrupted |= tickets
        wait_s = 0.02
        while (late := tickets & self._interrupted) and wait_s < _INTERRUPT_S:
            for ticket in late:  # again each time: an abort that overtakes its request has no effect
                self._abort(ticket)
            await asyncio.sleep(wait_s)
            wait_s *= 2
        for ticket in late:  # it goes on once it has ended
            self._seen.pop(self._attempts[ticket].submit.rollout, None)

    def _unseen(self, ticket: int) -> None:
        """The tokens of an attempt cannot be seen: if a look waits for them, it has nothing of that rollout."""
        if ticket in self._interrupted:
            self._interrupted.remove(ticket)
            self._seen.pop(self._attempts[ticket].submit.rollout, None)

    def _detokenize(self, submit: Submit, sampled: Sequence[Sampled]) -> None:
        """Detokenize a group and start its grading; runs in the text thread."""
        try:
            detokenizer = self._setup.detokenizer
            arrays = [one.token_ids for one in sampled]
            texts = detokenizer.decode(arrays) if detokenizer is not None else [""] * len(arrays)
            sent = [text.encode(errors="replace").decode() for text in texts]  # UTF-8 cannot encode a lone surrogate
            # a completion that was stopped early or aborted has no end to grade
            ended = [index for index, one in enumerate(sampled) if one.finish_reason not in ("early", "abort")]
            if self._hook is None or not submit.prompt or not ended:
                self._ready(submit.ticket, sent, ())
            elif submit.ticket in self._buffer:
                # pickled by this job's rank 0, and received over a connection that has proven the job's key
                prompt = pickle.loads(submit.prompt)
                tasks = []
                for at in ended:
                    one, position = sampled[at], submit.first + at
                    tasks.append(GradeTask.of(prompt, texts[at], position, len(one.token_ids), one.finish_reason))
                self._hook.submit(tasks).add_done_callback(partial(self._graded, submit.ticket, sent, ended))
        except BaseException as error:
            self._lost(error)

    def _graded(self, ticket: int, texts: list[str], ended: list[int], graded: Future[list[Grade]]) -> None:
        """Add the grades of the completions `ended`, which are all that were graded; runs in a thread of the hook."""
        try:
            known = graded.result()
            if len(known) != len(ended):
                raise ValueError(f"{len(known)} grades of {len(ended)} completions")
            grades: list[Grade | None] = [None] * len(texts)
            for index, grade in zip(ended, known, strict=True):
                grades[index] = grade
            self._ready(ticket, texts, grades)
        except BaseException as error:  # else rank 0 would wait for this group forever
            self._lost(error)

    def _ready(self, ticket: int, texts: list[str], grades: Sequence[Grade | None]) -> None:
        """Thread-safe."""
        if self._buffer.mark_ready(ticket, texts, grades):
            self._loop.call_soon_threadsafe(self._send, Graded(ticket))

    def _lost(self, error: BaseException) -> None:
        """Thread-safe."""
        self._loop.call_soon_threadsafe(self._send, messages.ClientLost(brief(error)))

    def _fail(self, message: AttemptFailed) -> None:
        self._unseen(message.ticket)
        if (attempt := self._attempts.pop(message.ticket, None)) is not None:
            self._failed_s[attempt.submit.rollout] = self._loop.time()
        self._send(message)

    def _send(self, message: messages.FromClient) -> None:
        """Queue a message to rank 0; messages of the same interval are written together."""
        self._unsent.append(framed(messages.ENCODER.encode(message)))
        if len(self._unsent) == 1:
            self._loop.call_at(self._last_write_s + _SEND_INTERVAL_S, self._write)

    def _write(self) -> None:
        self._last_write_s = self._loop.time()
        self._writer.writelines(self._unsent)
        self._unsent = []

    def _serve_ranks(self) -> None:
        while True:
            peer, _ = self._listener.accept()
            with peer, contextlib.suppress(OSError, messages.HandshakeFailed):
                peer.settimeout(_CONNECT_S)
                messages.handshake(peer, self._setup.secret, listens=True)
                take = messages.TAKE.decode(messages.receive(peer))
                if take.looks_at:
                    asyncio.run_coroutine_threadsafe(self._look(take.looks_at), self._loop).result()
                if take.copies:  # of a look that is over: nothing in the loop changes it
                    seen = self._seen.pop(take.rollout, {})
                    groups = [BufferedGroup(at, [one], [""], first=place) for (at, place), one in seen.items()]
                else:
                    groups = self._buffer.take(take.share, take.shares, take.rollout)
                hand_over(peer, groups)


def _exit(setup: Setup) -> None:
    """End the process and remove the sockets' directories, which a killed trainer could not remove."""
    for path in (setup.take_path, setup.rank_zero):
        if path.startswith("/"):
            shutil.rmtree(os.path.dirname(path), ignore_errors=True)
    os._exit(0)  # does not wait for threads; the kernel ends the graders


async def _run(setup: Setup) -> None:
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, _exit, setup)
    control = messages.connect(setup.rank_zero, _CONNECT_S)
    messages.handshake(control, setup.secret, listens=False)
    await Client(setup, control).run()


def main() -> None:
    """Serve the trainer that has started this process, and writes a `Setup` to its standard input."""
    ignore_signals(signal.SIGINT)  # the trainer handles it, and then closes the connection
    signal.signal(signal.SIGTERM, lambda *_: None)  # likewise; not SIG_IGN, which children of the graders would inherit
    setup: Setup = pickle.load(sys.stdin.buffer)
    die_with_parent(signal.SIGUSR2, setup.parent)
    sys.path[:] = setup.import_path
    asyncio.run(_run(setup))
    _exit(setup)
