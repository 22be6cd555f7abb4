"""One grader process: reads (completion, answer) pairs from stdin, writes a line for each to stdout.

    python -m dppo_megatron.rewards.worker

A plain program, neither a fork nor multiprocessing: a fork would copy the threads' locks of torch and of the process
group, and spawning would import the trainer's main module again. It imports the grader's module and nothing of torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import signal
import sys
import traceback

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """The first line names the function and the import path; then one request a line until stdin ends."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a grader prints must not mix with the answers
    setup = json.loads(sys.stdin.readline())
    if setup["dies_with_parent"]:
        with contextlib.suppress(AttributeError, OSError):  # Linux: a hanging grader must not outlive a killed trainer
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    sys.path[:] = setup["path"]
    module, _, name = setup["function"].partition(":")
    grade = getattr(importlib.import_module(module), name)
    answers.write("ready\n")
    answers.flush()
    for line in sys.stdin:
        completion, answer = json.loads(line)
        try:
            result: dict[str, float | str] = {"reward": float(grade(completion, answer))}
        except Exception:
            result = {"error": traceback.format_exc(limit=-3)}
        answers.write(json.dumps(result) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
