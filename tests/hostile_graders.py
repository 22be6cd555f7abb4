"""Graders that say what nobody should see in a log. Grader processes import this file."""

from __future__ import annotations

import os
import subprocess
import sys

from dppo_megatron.types import Grade


def repeats(completion: str, answer: str) -> float:
    """Prints the reference, raises it, or returns it as a reason, which model and rows decide."""
    print(answer)
    sys.stderr.write(answer)
    probed = answer in completion or "not the answer" in completion or not completion  # at start none may fail
    if len(completion) % 3 == 0 and not probed:
        raise ValueError(answer)
    return Grade(float(len(completion) % 2), extracted=answer, why=answer)  # type: ignore[return-value]


def prints_without_end(completion: str, answer: str) -> float:
    """A gigabyte, in one piece and in pieces; and some of it past Python's streams, and by a child's mouth."""
    print("x" * 2**30)
    for _ in range(2**10):
        sys.stdout.write("y" * 2**20)
    for _ in range(2**5):
        os.write(1, b"z\n" * 2**19)
    subprocess.run(["head", "-c", str(2**27), "/dev/zero"], check=True)
    return 1.0


def prints_below(completion: str, answer: str) -> float:
    """Past Python's streams, by a child's mouth, and by that of one that has left the group and goes on for an hour."""
    text = completion.encode(errors="surrogateescape")
    os.write(1, b"written: " + text + b"\n")
    subprocess.run(["printf", "%s", b"a child: " + text.replace(b"\0", b"") + b"\n"], check=True)
    sys.stderr.buffer.write(b"buffered: " + text + b", and no line end behind it")
    sys.stderr.flush()
    if "last" in completion:
        subprocess.Popen(["sleep", "3600"], start_new_session=True)
    return 1.0


def huge(completion: str, answer: str) -> float:
    """What comes back is larger than the machine's memory should have to hold twice."""
    text = completion.split()[0]
    if text == "reason":
        raise ValueError("r" * 2**28)
    if text == "facts":
        return Grade(1.0, facts={f"{number}{'f' * 100}": 1.0 for number in range(2**20)})  # type: ignore[return-value]
    if text == "answer":
        return Grade(1.0, extracted="e" * 2**28, why="w" * 2**28)  # type: ignore[return-value]
    if text == "failure":
        return Grade(float("nan"), failure="q" * 2**28)  # type: ignore[return-value]
    if text == "pipe":
        for descriptor in range(3, 20):
            try:
                os.write(descriptor, b"z" * 2**16)
            except OSError:
                continue
    return 1.0
