"""From tokens to text, and from text to grades, while other groups are still being generated.

`rollout` stands below the graders and knows none: a hook is handed in, which is made in the client's process by a
picklable factory. Completions go to its lanes one by one or a few at a time, whichever is free next, so a grading that
hangs holds up its own lane only.
"""

from __future__ import annotations

import pickle
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from dppo_megatron.types import Grade, Prompt

_CHUNK_S = 0.02
"""Work that a lane is given at a time: most gradings cost less than a message to the grader's process."""
_LARGEST_CHUNK = 64


@dataclass(frozen=True, slots=True)
class ToGrade:
    """One completion for the hook."""

    prompt: Prompt
    """Without its tokens."""
    completion_index: int
    text: str


class Hook(Protocol):
    """Grades completions in the client's process."""

    lanes: int
    """Calls of `grade` at a time, each lane from a thread of its own."""

    def grade(self, lane: int, tasks: Sequence[ToGrade]) -> list[Grade]:
        """One grade a task, in their order; what fails is a grade that says so."""

    def close(self) -> None: ...


HookFactory = Callable[[], Hook]


@dataclass(frozen=True)
class Detokenizer:
    """Token ids to text as the trainer's tokenizer does it; picklable.

    A fast tokenizer travels as its JSON and is decoded by `tokenizers` without importing transformers, which takes
    seconds; any other travels as it is.
    """

    json: str = ""
    whole: Any = None
    _made: list[Any] = field(default_factory=list, compare=False)

    @staticmethod
    def of(tokenizer: Any) -> Detokenizer:
        """For a transformers tokenizer."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        cleans = getattr(tokenizer, "clean_up_tokenization_spaces", False)
        if backend is not None and not cleans and type(tokenizer).decode is _plain_decode():
            return Detokenizer(json=backend.to_str())
        return Detokenizer(whole=tokenizer)

    def decode(self, completions: Sequence[npt.NDArray[np.int32]]) -> list[str]:
        """One text a completion, without special tokens."""
        if not self._made:
            self._made.append(self._make())
        lists = [ids.tolist() for ids in completions]
        if self.json:
            return list(self._made[0].decode_batch(lists, skip_special_tokens=True))
        return [self._made[0].decode(ids, skip_special_tokens=True) for ids in lists]

    def _make(self) -> Any:
        if not self.json:
            return self.whole
        from tokenizers import Tokenizer

        return Tokenizer.from_str(self.json)


def _plain_decode() -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.decode


class GradeLanes:
    """Threads that feed a hook. `done(ticket, grades)` is called from one of them when a group's last grade is there.

    Args:
        failed: takes what a hook has raised, which it should not.
    """

    def __init__(self, hook: Hook, done: Callable[[int, bytes], None], failed: Callable[[BaseException], None]) -> None:
        self._hook, self._done, self._failed = hook, done, failed
        self._queue: queue.SimpleQueue[tuple[int, ToGrade] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._grades: dict[int, list[Grade | None]] = {}
        self._missing: dict[int, int] = {}
        self._threads = [
            threading.Thread(target=self._work, args=(lane,), name=f"grades {lane}", daemon=True)
            for lane in range(hook.lanes)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, ticket: int, prompt: bytes, texts: Sequence[str]) -> None:
        """Grade a group."""
        with self._lock:
            self._grades[ticket], self._missing[ticket] = [None] * len(texts), len(texts)
        whose = pickle.loads(prompt)  # written by this job's rank 0, over a connection that has shown the job's key
        for index, text in enumerate(texts):
            self._queue.put((ticket, ToGrade(whose, index, text)))

    def close(self) -> None:
        """End when what is at hand is graded."""
        for _ in self._threads:
            self._queue.put(None)
        self._hook.close()

    def _work(self, lane: int) -> None:
        seconds_each = _CHUNK_S
        while (first := self._queue.get()) is not None:
            chunk = [first, *self._more(int(_CHUNK_S / max(seconds_each, 1e-6)) - 1)]
            began = time.monotonic()
            try:
                grades = self._hook.grade(lane, [task for _, task in chunk])
                whole = [(ticket, msgspec.msgpack.encode(of_group)) for ticket, of_group in self._settle(chunk, grades)]
            except BaseException as error:  # else this lane would end without a word, and its groups be waited for
                self._failed(error)
                return
            # the geometric mean, for which one slow sample in a hundred fast ones is no revolution
            seconds_each = (seconds_each * (time.monotonic() - began) / len(chunk)) ** 0.5
            for ticket, encoded in whole:
                self._done(ticket, encoded)

    def _more(self, count: int) -> list[tuple[int, ToGrade]]:
        """Up to `count` more, if they are there and leave each other lane as many."""
        found: list[tuple[int, ToGrade]] = []
        count = min(count, self._queue.qsize() // self._hook.lanes, _LARGEST_CHUNK)
        while len(found) < count:
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                break
            if item is None:  # the end, which is another lane's too
                self._queue.put(None)
                break
            found.append(item)
        return found

    def _settle(
        self, chunk: Sequence[tuple[int, ToGrade]], grades: Sequence[Grade]
    ) -> list[tuple[int, list[Grade | None]]]:
        """The groups of which all completions are graded now."""
        whole = []
        with self._lock:
            for (ticket, task), grade in zip(chunk, grades, strict=True):
                self._grades[ticket][task.completion_index] = grade
                self._missing[ticket] -= 1
                if not self._missing[ticket]:
                    del self._missing[ticket]
                    whole.append((ticket, self._grades.pop(ticket)))
        return whole


def grades_of(encoded: bytes) -> list[Grade]:
    """What `done` was given, on the rank that takes it."""
    return msgspec.msgpack.decode(encoded, type=list[Grade]) if encoded else []
