"""What is right or wrong with a machine, in the order in which it would be found: packages, IPC, numbers, layouts."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import torch

from dppo_megatron.accept.child import Sheet
from dppo_megatron.accept.parity import LAYOUTS, differences, measure
from dppo_megatron.accept.workload import peak_flops
from dppo_megatron.config.schema import LayoutConfig
from dppo_megatron.doctor.environment import report
from dppo_megatron.doctor.links import copy_rows, server_rows
from dppo_megatron.doctor.machine import machine_rows
from dppo_megatron.launched import environment_of_ours
from dppo_megatron.platform.capabilities import LayerSpec, this_machine

_RECIPES = ("tensorwise", "delayed", "blockwise")


def environment(sheet: Sheet) -> None:
    """What others depend on first, then the product."""
    machine, gpus = this_machine(), torch.cuda.device_count() if torch.cuda.is_available() else 0
    name = torch.cuda.get_device_name() if gpus else ""
    rows = machine_rows(max(gpus, 1), first_here=True) + copy_rows(torch.device("cuda" if gpus else "cpu"))
    sheet.facts(
        gpus=gpus,
        device=name or "no CUDA device",
        lacks_transformer_engine=machine.lacks_transformer_engine,
        report=report() + [(row.what, row.said) for row in rows],
    )
    faults = [row for row in rows if row.verdict == "fault"]
    sheet.note("faults", len(faults), 0, "; ".join(f"{row.what}: {row.said}" for row in faults))
    if not gpus:
        return
    if machine.has_transformer_engine:
        sheet.note("fp8_recipes", sum(not machine.lacks_for_fp8(one) for one in _RECIPES), len(_RECIPES))
    else:
        sheet.skip("fp8_recipes", machine.lacks_transformer_engine)
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for repeats in (10, 20):  # the first pick the kernel and bring the clock up
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(repeats):
            a @ b
        torch.cuda.synchronize()
    flops, peak = 20 * 2 * 8192**3 / (time.perf_counter() - started), peak_flops(name, fp8=False)
    sheet.note("matmul", flops / 1e12, peak / 1e12 if peak else None, "" if peak else f"no data sheet of {name}")


def ipc(sheet: Sheet) -> None:
    """The doctor's round trip, three times: another process changes each byte of a buffer of ours."""
    device = torch.device("cuda" if sheet.cuda else "cpu")
    rows = [server_rows(None, device, timeout_s=30.0)[0] for _ in range(3)]
    sheet.note("right", sum(row.verdict == "ok" for row in rows), 3, f"{rows[-1].what}: {rows[-1].said}")


def parity(sheet: Sheet) -> None:
    """The local layers against the stored references."""
    _parity(sheet, ("float32", "local"), ("bfloat16", "local"))


def parity_te(sheet: Sheet) -> None:
    """Transformer Engine's, which have no packs in float32."""
    _parity(sheet, ("bfloat16", "te"))


def _parity(sheet: Sheet, *cases: tuple[str, LayerSpec]) -> None:
    for dtype, spec in cases:
        if dtype == "bfloat16" and not sheet.cuda:
            continue  # a CPU's own rounding, which says nothing about a device's
        far = differences(measure("dense", LayoutConfig(), getattr(torch, dtype), spec), "dense")
        for name, value in far.items():
            sheet.note(f"{dtype} {spec}_{name}", value, 0.0)


def layouts(sheet: Sheet) -> None:
    """Two ranks by torchrun, one layout after the other."""
    found = sheet.directory / "layouts.jsonl"
    command = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "dppo_megatron.accept.parity", "--layouts", str(found)]
    variables = {"OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}  # torchrun's processes do not inherit -P
    code = subprocess.run(command, env=environment_of_ours() | variables).returncode
    lines = found.read_text(encoding="utf-8").splitlines() if found.exists() else []
    for row in map(json.loads, lines):
        for name in ("before", "grad_norm"):
            sheet.note(f"{row['layout']}_{name}", row[name], 0.0)
    if code:
        raise SystemExit(f"stopped: {len(lines)} of {len(LAYOUTS)} layouts ended; torchrun's exit code is {code}")
