"""Graders that do what they are told, right and wrong. Grader processes import this file."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any

print("odd_graders prints when it is imported")
_LEAK: list[bytearray] = []


def obey(completion: str, answer: str) -> Any:
    """`command argument`: does it; text without a command is 1.0 if it equals the answer."""
    command, _, argument = completion.partition(" ")
    if command in COMMANDS:
        return COMMANDS[command](argument)
    return float(completion == answer)


def _sign(path: str) -> int:
    with open(path, "a") as book:
        book.write("x")
    return os.getpid()


def _until_signed(times: str, path: str) -> float:
    while not os.path.exists(path) or os.path.getsize(path) < int(times):
        time.sleep(0.01)
    return 1.0


def _spin() -> None:
    while True:
        pass


def _spin_in_c() -> None:
    """Holds the interpreter's lock, so that neither a signal handler nor another thread gets a turn."""
    re.match(r"(a+)+$", "a" * 64 + "b")


def _fill_memory() -> None:
    held = []
    while True:
        held.append(bytearray(1 << 20))


def _leak(megabytes: str) -> float:
    _LEAK.append(bytearray(int(megabytes) << 20))
    return 1.0


def _write_everywhere() -> float:
    for file in range(3, 32):
        try:
            if not os.isatty(file):
                os.write(file, b"\xff{garbage}\n" * 8)
        except OSError:
            pass
    return 1.0


def _fork_and_die() -> None:
    """The child holds every pipe open."""
    if os.fork() == 0:
        time.sleep(600)
    os._exit(3)


def _fork_and_return() -> float:
    os.fork()
    return 1.0


def _spawn() -> float:
    subprocess.Popen(["sleep", "600"])
    return 1.0


def _thread() -> float:
    threading.Thread(target=time.sleep, args=(600,)).start()
    return 1.0


def _die_later() -> float:
    threading.Timer(0.05, lambda: os._exit(5)).start()
    return 1.0


def _spawn_without_end() -> None:
    for _ in range(40):
        subprocess.Popen(["sleep", "600"])
    time.sleep(600)


def _alarm() -> float:
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    return 1.0


def _close_streams() -> float:
    sys.stdout.close()
    sys.stderr.close()
    os.close(0)
    return 1.0


def _close_everything() -> float:
    os.closerange(3, 256)
    return 1.0


def _grade(**fields: Any) -> Any:
    from dppo_megatron.types import Grade

    return Grade(**fields)


COMMANDS: dict[str, Callable[[str], Any]] = {
    "value": float,
    "slow": lambda seconds: time.sleep(float(seconds)) or 1.0,
    "until_signed": lambda what: _until_signed(*what.split(" ", 1)),
    "sign": lambda path: _sign(path),
    "raise": lambda _: 1 / 0,
    "sysexit": lambda _: sys.exit(0),
    "interrupt": lambda _: signal.raise_signal(signal.SIGINT),
    "recursion": lambda _: _recurse(0),
    "stdin": lambda _: input(),
    "hang": lambda _: _spin(),
    "hang_in_c": lambda _: _spin_in_c(),
    "sleep": lambda _: time.sleep(3600),
    "kill": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "segfault": lambda _: ctypes.string_at(0),
    "exit0": lambda _: os._exit(0),
    "exit7": lambda _: os._exit(7),
    "memory": lambda _: _fill_memory(),
    "leak": _leak,
    "print": lambda _: print('{"answers": [5], "took_s": 1}') or float(os.write(1, b"\0" * 64) > 0),
    "print_much": lambda count: print("x" * int(count)) or 1.0,
    "write_everywhere": lambda _: _write_everywhere(),
    "close_streams": lambda _: _close_streams(),
    "close_everything": lambda _: _close_everything(),
    "fork_and_die": lambda _: _fork_and_die(),
    "fork_and_return": lambda _: _fork_and_return(),
    "spawn": lambda _: _spawn(),
    "spawn_without_end": lambda _: _spawn_without_end(),
    "thread": lambda _: _thread(),
    "die_later": lambda _: _die_later(),
    "alarm": lambda _: _alarm(),
    "none": lambda _: None,
    "nan": lambda _: float("nan"),
    "infinite": lambda _: float("inf"),
    "text": lambda _: "no number",
    "complex": lambda _: 1j,
    "list": lambda _: [1.0],
    "mapping": lambda _: {"reward": 1.0},
    "too_large": lambda _: 10**400,
    "true": lambda _: True,
    "fraction": lambda _: Fraction(1, 2),
    "decimal": lambda _: Decimal("0.25"),
    "numpy": lambda _: _numpy().float32(0.5),
    "numpy_bool": lambda _: _numpy().bool_(True),
    "array": lambda _: _numpy().array([1.0]),
    "array0": lambda _: _numpy().array(0.75),
    "grade": lambda text: _grade(reward=0.5, extracted=text, why="told", facts={"parsed_share": 1.0}),
    "grade_parts": lambda _: _grade(reward=0.0, parts={"format": 1.0}),
    "grade_failed": lambda _: _grade(reward=1.0, failure="raised inside"),
    "grade_nan": lambda _: _grade(reward=float("nan")),
    "grade_facts": lambda _: _grade(reward=1.0, facts={"parsed_share": "yes"}),
    "huge": lambda count: _grade(reward=1.0, extracted="{" * int(count)),
    "pid": lambda _: os.getpid(),
}


def _numpy() -> Any:
    import numpy

    return numpy


def _recurse(depth: int) -> float:
    return _recurse(depth + 1)


# ------------------------------------------------------------------------------------------- ways to be called


def with_row(completion: str, answer: str, row: Mapping[str, Any]) -> float:
    """1.0 if the row's unit stands in the completion; spoils the row for whoever sees it next."""
    right = row["extra"]["unit"] in completion
    row["extra"].clear()
    return float(right)


def row_by_name(completion: str, answer: str, *, row: Mapping[str, Any]) -> float:
    return float(row["value"])


def row_or_none(completion: str, answer: str, row: Mapping[str, Any] | None = None) -> float:
    return -1.0 if row is None else float(row["value"])


def with_option(completion: str, answer: str, strict: bool = False) -> float:
    return float(strict is False)


def anything(*args: Any, **kwargs: Any) -> float:
    return float(len(args) + 10 * len(kwargs))


@functools.wraps(with_row)
def wrapped(*args: Any, **kwargs: Any) -> float:
    return with_row(*args, **kwargs)


class Judge:
    """A grader that is an object."""

    def __call__(self, completion: str, answer: str) -> float:
        return 2.0

    def method(self, completion: str, answer: str) -> float:
        return 3.0


judge = Judge()
partial = functools.partial(with_option, strict=False)
not_callable = 3


def one_argument(completion: str) -> float:
    return 1.0


def four_arguments(completion: str, answer: str, row: Any, more: Any) -> float:
    return 1.0


def length(completion: str, answer: str) -> float:
    return float(len(completion))


def boxed_only(completion: str, answer: str) -> float:
    return float(completion.endswith("\\boxed{" + answer + "}$."))


def hashes_only(completion: str, answer: str) -> float:
    return float(completion.endswith(f"#### {answer}"))


def even_only(completion: str, answer: str) -> Any:
    """Cannot read every other reference."""
    if int(answer) % 2:
        return _grade(reward=0.0, why="odd numbers are beyond me")
    return float(completion == answer)


def fails_on_empty(completion: str, answer: str) -> float:
    return float(completion[0] == answer[0])


def echo(completion: str, answer: str) -> Any:
    from dppo_megatron.types import Grade

    return Grade(1.0, extracted=completion)


def told(completion: str, answer: str, finish_reason: str, *, completion_tokens: int, prompt: str) -> Any:
    return _grade(reward=float(completion_tokens), extracted=f"{prompt} {finish_reason}")


def counts_on_context(completion: str, answer: str, prompt: str, completion_tokens: int) -> float:
    return float(answer in completion and prompt[0] == "p" and 1 / completion_tokens > 0)


# ------------------------------------------------------------------------------- as verl's and TRL's are written


def compute_score(data_source: Any, solution_str: Any, ground_truth: Any, extra_info: Any = None, **kwargs: Any) -> Any:
    """Like those of verl: what it was handed decides, and more than the score comes back."""
    assert not kwargs
    right = ground_truth in solution_str
    return {"score": float(right), "acc": right, "pred": f"{data_source} {extra_info.get('index')}", "note": [1]}


def verl_gsm8k(solution_str: str, ground_truth: str, method: str = "strict", format_score: float = 0.0) -> float:
    return float(solution_str.endswith(f"#### {ground_truth}")) if method == "strict" else format_score


def verl_target(data_source: str, solution_str: str, ground_truth: Mapping[str, Any], extra_info: Any) -> float:
    """The reference is what the row has, a mapping."""
    return float(solution_str in ground_truth["target"])


def verl_batched(data_sources: Any, solution_strs: Any, ground_truths: Any, extra_infos: Any, **kwargs: Any) -> Any:
    return [compute_score(*each) for each in zip(data_sources, solution_strs, ground_truths, extra_infos, strict=True)]


async def verl_async(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> Any:
    return compute_score(data_source, solution_str, ground_truth, extra_info)


def verl_router(data_source: str, solution_str: str, ground_truth: str, extra_info: Any, router_address: str) -> float:
    return 1.0


def trl_text(prompts: Any, completions: Any, **kwargs: Any) -> list[float]:
    """1 for each completion that has the row's `unit` and repeats its prompt."""
    return [
        float(unit["unit"] in text and text.startswith(prompt))
        for prompt, text, unit in zip(prompts, completions, kwargs["extra"], strict=True)
    ]


def trl_chat(completions: list[list[dict[str, str]]], solution: list[str], log_extra: Any = None, **kwargs: Any) -> Any:
    """None where the reference cannot be read."""
    assert all(one[0]["role"] == "assistant" for one in completions) and log_extra is None
    texts = [one[0]["content"] for one in completions]
    return [None if right == "?" else float(right in text) for text, right in zip(texts, solution, strict=True)]


def trl_prompts(prompts: Any, completions: Any) -> list[float]:
    """By what the row has: a chat is a list of messages, on both sides."""
    assert all(isinstance(one, str) for one in completions) or all(one[0]["content"] for one in completions)
    return [float(len(one)) if isinstance(one, list) else -1.0 for one in prompts]


async def trl_async(prompts: Any, completions: Any, answer: Any) -> list[float]:
    await asyncio.sleep(0)
    return [float(right in text) for text, right in zip(completions, answer, strict=True)]


class Overlong:
    """As TRL's rewards of length: an object that is told token ids, of which it needs the number."""

    def __call__(self, completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        return [-1.0 if len(ids) > 20 else 0.0 for ids in completion_ids]


overlong = Overlong()


def repetition(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    return [float(ids[0]) for ids in completion_ids]


def trl_column(completions: Any, difficulty: Any) -> list[float]:
    return [1.0 for _ in completions]


def openrlhf(queries: Any, prompts: Any, labels: Any) -> list[float]:
    return [1.0 for _ in queries]


def swapped(answer: str, completion: str) -> float:
    return 1.0


def too_few(completions: Any) -> list[float]:
    return [1.0 for _ in completions][1:]


def call_size(completions: list[str], answers: list[str]) -> list[int]:
    return [len(completions)] * len(completions)


def batched(completions: list[str], answers: list[str]) -> list[Any]:
    """As many as it got; with a command in it the whole call does that."""
    for text, answer in zip(completions, answers, strict=True):
        if text.partition(" ")[0] in COMMANDS and not text.startswith("value"):
            obey(text, answer)
    return [float(text.split()[1]) if text.startswith("value") else 100.0 * len(completions) for text in completions]


def found(completions, answers):  # type: ignore[no-untyped-def]
    """Without annotations, as many are written."""
    return [float(answer in completion) for completion, answer in zip(completions, answers, strict=True)]


# --------------------------------------------------------------------------------------------- asynchronous

_MEETING: list[Any] = []


async def coroutine(completion: str, answer: str) -> Any:
    """As `obey`, asynchronously where the command has something to wait for."""
    command, _, argument = completion.partition(" ")
    if command == "die_once":
        count, path = argument.split(" ", 1)
        if not os.path.exists(path):
            open(path, "x").close()
            asyncio.get_running_loop().call_later(0.1, os._exit, 5)
            await asyncio.sleep(3600)
        command, argument = "meet", count
    if command == "meet":  # until so many are here
        mine = asyncio.get_running_loop().create_future()
        _MEETING.append(mine)
        if len(_MEETING) == int(argument):
            for one in _MEETING:
                one.set_result(1.0)
        try:
            return await mine
        finally:
            _MEETING.remove(mine)
    if command == "wait":
        await asyncio.sleep(float(argument))
        return 1.0
    if command == "never":
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(3600)
    if command == "child":  # what it starts blocks, not it
        return await asyncio.gather(_obeys(argument))
    await asyncio.sleep(0)
    return obey(completion, answer)


async def _obeys(argument: str) -> Any:
    return obey(argument, "")
