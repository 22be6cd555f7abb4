from __future__ import annotations

import argparse
import os
import signal
import sys
from collections import Counter
from pathlib import Path

from dppo_megatron.config.paths import check_file, check_path, check_writable
from dppo_megatron.texts import show
from dppo_megatron.types import RunAborted
from dppo_megatron.workbench.accept.bars import STEPS
from dppo_megatron.workbench.commands.parser import check_number

DESCRIPTION = """\
Measure what only a GPU can show, each figure beside its prediction and with a verdict: CUDA IPC, parity with stored
references, rollout servers that sleep and take new weights, FLOPs, FP8, memory against `plan`, a job that is killed and
resumed, and on several GPUs layouts and NCCL. Writes DIR/accept.html and DIR/accept.json after every step; the same
command continues where it was stopped. Without a GPU each row says why it was not run. Exit code 3 if a figure fails:

  dppo-megatron accept
  dppo-megatron accept --hours 0.15 --server-python /envs/vllm/bin/python
  dppo-megatron accept --only parity job --again parity
"""


def add_options(command: argparse.ArgumentParser) -> None:
    names = [step.name for step in STEPS]
    command.add_argument("--hours", type=float, default=0.5, metavar="H", help="time limit (default: 0.5)")
    command.add_argument("--out", type=Path, default=Path("runs/accept"), metavar="DIR", help="default: runs/accept")
    command.add_argument("--model", default="", metavar="PATH", help="Hugging Face directory in place of random shapes")
    command.add_argument(
        "--server-python",
        default=os.environ.get("DPPO_VLLM_PYTHON") or os.environ.get("DPPO_SGLANG_PYTHON") or "",
        metavar="PATH",
        help="Python that has vLLM or SGLang (default: DPPO_VLLM_PYTHON, else DPPO_SGLANG_PYTHON)",
    )
    command.add_argument("--only", nargs="+", choices=names, default=[], metavar="STEP", help=", ".join(names))
    command.add_argument("--again", nargs="+", choices=names, default=[], metavar="STEP", help="steps to repeat")


def execute(arguments: argparse.Namespace) -> int:
    from dppo_megatron.workbench.accept.record import PAGE, read_record
    from dppo_megatron.workbench.accept.runner import run_steps

    check_number("--hours", arguments.hours, "(0, 100]")
    check_writable("--out", arguments.out, directory=True)
    if arguments.model:
        check_path("--model", arguments.model, "directory")
    if arguments.server_python:
        check_file("--server-python", arguments.server_python)
    out: Path = arguments.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    record = read_record(out, {"model": arguments.model, "server_python": arguments.server_python})
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a scheduler's time limit: ends the step's process too
    run_steps(record, out, arguments.hours, only=arguments.only, again=arguments.again)
    rows, page = record.rows(), out / PAGE
    for row in rows:
        if row.verdict != "not run":
            value = "" if row.value is None else f"{row.value:.4g} {row.unit}".strip()
            show(f"{row.verdict:6s}{row.step:15s} {row.what:65s} {value:15s} {row.bar:20s} {row.note}".rstrip())
    for step, why in dict.fromkeys((row.step, row.note) for row in rows if row.verdict == "not run"):
        show(f"not run: {step}: {why}")
    counts = Counter(row.verdict for row in rows)
    show(", ".join(f"{count} {verdict}" for verdict, count in counts.items()) + f"; {page}: open it in a browser")
    if counts["fail"] or not counts["pass"]:
        failed = [f"{row.step}: {row.what}" for row in rows if row.verdict == "fail"]
        raise RunAborted("; ".join(failed[:3]) + f" ({len(failed)} failed)" if failed else "nothing was measured")
    return 0
