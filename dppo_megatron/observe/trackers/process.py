"""The process of one tracker: takes messages from stdin, hands them to the tool, answers each.

A process and not a thread of the trainer, because mlflow imports for six seconds, wandb
and trackio keep global state, print, and wait for the network when Python exits. Here none of it is the trainer's. When
the trainer is killed, stdin ends, and what was sent is still delivered. One process for each tool: what one of them
breaks, the others do not see.

Steps that the tool has already are not sent to it again: the run was resumed from a checkpoint and does them again,
with the same result (docs/checkpoints.md). `trackers/NAME.json` records how far the tool is.
"""

from __future__ import annotations

import os
import re
import select
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from dppo_megatron.children import ignore_signals
from dppo_megatron.files import make_directory
from dppo_megatron.frames import framed, read_frame
from dppo_megatron.observe.trackers.tools import (
    ENCODER,
    TO_TRACKER,
    TOOLS,
    Answer,
    Begin,
    EndRun,
    Mark,
    StepLine,
    Tracker,
)
from dppo_megatron.texts import one_line

_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL", re.IGNORECASE)
_USER_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_LEAST_SECRET = 6
"""Shorter values of such variables are no secrets, and replacing them would garble text."""


class Sink:
    """Between the messages and the tool: which steps it gets, and how far it is."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        self._name, self._tracker = name, tracker
        self._mark, self._path = Mark(), Path()

    def take(self, message: Begin | StepLine | EndRun) -> None:
        """Raises what the tool raises."""
        if isinstance(message, Begin):
            self._begin(message)
        elif isinstance(message, EndRun):
            self._tracker.end(finished=message.finished)
        elif message.step > self._mark.last_step:
            self._tracker.step(message)
            self._mark.last_step = message.step
            self._mark.write(self._path)

    def _begin(self, begin: Begin) -> None:
        directory = Path(begin.directory)
        make_directory(directory)
        self._path = directory / f"{self._name}.json"
        self._mark = mark = Mark.read(self._path)
        if begin.resumed_step is None:  # what an earlier attempt without a checkpoint has sent is another run
            self._mark = mark = Mark(begun=mark.begun + 1)
        run = begin.run if mark.begun <= 1 else f"{begin.run}-{mark.begun}"
        has = self._tracker.begin(begin, mark, run)
        mark.last_step = mark.last_step if has is None else has
        mark.write(self._path)


def scrubbed(text: str) -> str:
    """`text` without what the environment holds in variables that are named like secrets, and without users in URLs."""
    secrets = {value.strip() for name, value in os.environ.items() if _SECRET_NAME.search(name)}
    for value in sorted(secrets, key=len, reverse=True):  # one may be the beginning of another
        if len(value) >= _LEAST_SECRET:
            text = text.replace(value, "***")
    return _USER_IN_URL.sub("***", text)


def serve(sink: Sink, messages: IO[bytes], answers: IO[bytes]) -> None:
    """Until the messages end. Without an `EndRun` among them, the trainer was killed, perhaps within a message."""
    ended = False
    while (frame := read_frame(messages.read)) is not None:
        message = TO_TRACKER.decode(frame)
        ended = isinstance(message, EndRun)
        answer = ENCODER.encode(Answer(_failure(sink, message)))
        with suppress(OSError):  # the trainer is gone; the messages will end
            answers.write(framed(answer))
            answers.flush()
    if not ended:
        _failure(sink, EndRun(finished=False))


def _failure(sink: Sink, message: Begin | StepLine | EndRun) -> str:
    try:
        sink.take(message)
    except (Exception, SystemExit) as error:  # a tool that gives up must not take its process with it
        return one_line(scrubbed(f"{type(error).__name__}: {error}"), 500)  # in this order: half a key is one too
    return ""


def _leave_after(limit_s: float, messages: IO[bytes]) -> None:
    """End this process `limit_s` after the other end of `messages` was closed, whatever the tool is doing."""
    poll = select.poll()
    poll.register(messages, 0)  # no event but the hang-up, which comes before the last message is read
    poll.poll()
    time.sleep(limit_s)
    os._exit(1)


def main() -> None:
    """`NAME LIMIT_S`: messages on stdin, answers on stdout, until stdin ends."""
    name, limit_s = sys.argv[1], float(sys.argv[2])
    ignore_signals(signal.SIGINT, signal.SIGTERM)  # the trainer handles them; this process ends with stdin
    messages, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):  # tools print, and ask
        os.dup2(nowhere, descriptor)
    threading.Thread(target=_leave_after, args=(limit_s, messages), daemon=True).start()
    serve(Sink(name, TOOLS[name]()), messages, answers)
    answers.close()
    os._exit(0)  # everything is delivered: the tools' own exit hooks would wait for their servers


if __name__ == "__main__":
    main()
