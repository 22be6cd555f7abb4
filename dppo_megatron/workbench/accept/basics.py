"""What is installed and what a machine can do at all: packages, faults, a matrix product, memory that others map."""

from __future__ import annotations

import torch
from torch.utils.benchmark import Timer

from dppo_megatron.platform.capabilities import this_machine
from dppo_megatron.workbench.accept.runner import Sheet
from dppo_megatron.workbench.accept.workload import peak_flops
from dppo_megatron.workbench.doctor.machine import attention_rows, copy_rows, machine_rows, report, server_rows


def environment(sheet: Sheet) -> None:
    """Record first what other steps depend on, then measure a matrix product."""
    machine, gpus = this_machine(), torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = torch.device("cuda" if gpus else "cpu")
    rows = machine_rows(max(gpus, 1), first_here=True) + attention_rows(device) + copy_rows(device)
    name, lacks = torch.cuda.get_device_name() if gpus else "no CUDA device", machine.lacks_transformer_engine
    facts = report() + [(row.what, row.detail) for row in rows]
    sheet.facts(gpus=gpus, device=name, lacks_transformer_engine=lacks, report=facts)
    if not gpus:
        return
    faults = [f"{row.what}: {row.detail}" for row in rows if row.verdict == "fault"]
    sheet.note("faults", len(faults), note="; ".join(faults))
    recipes = [one for one in ("tensorwise", "delayed", "blockwise") if not machine.lacks_for_fp8(one)]
    sheet.note("fp8_recipes", None if lacks else len(recipes), note=lacks or ", ".join(recipes))
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    timer, peak = Timer("a @ b", globals={"a": a, "b": b}), peak_flops(name)  # waits for the device before and after
    timer.timeit(10)  # picks the kernel and brings the clock up
    rate = 2 * 8192**3 / timer.timeit(20).mean
    sheet.note("matmul", rate / 1e12, peak / 1e12 if peak else None, "" if peak else f"no data sheet of {name}")


def ipc(sheet: Sheet) -> None:
    """The doctor's round trip, three times: another process changes each byte of a buffer of ours."""
    device = torch.device("cuda" if sheet.cuda else "cpu")
    rows = [server_rows(None, device, timeout_s=30.0)[0] for _ in range(3)]
    sheet.note("right", sum(row.verdict == "ok" for row in rows), note=f"{rows[-1].what}: {rows[-1].detail}")
