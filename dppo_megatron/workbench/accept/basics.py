"""What is installed and what a machine can do at all: packages, faults, a matrix product, IPC, what `plan` expects."""

from __future__ import annotations

import torch
from torch.utils.benchmark import Timer

from dppo_megatron.config.schema import Config
from dppo_megatron.platform.capabilities import this_machine
from dppo_megatron.workbench.accept.runner import Sheet
from dppo_megatron.workbench.accept.workload import (
    CAP,
    SHAPES,
    architecture_of,
    equal_samples,
    peak_flops,
    shape_named,
    useful_flops,
)
from dppo_megatron.workbench.doctor.machine import copy_rows, machine_rows, report, server_rows
from dppo_megatron.workbench.planning.memory import plan_memory
from dppo_megatron.workbench.planning.site import CHIPS, GIB, Site
from dppo_megatron.workbench.planning.timing import speeds_for


def environment(sheet: Sheet) -> None:
    """What others depend on first, then the product, and what `plan` expects of the later steps."""
    machine, gpus = this_machine(), torch.cuda.device_count() if torch.cuda.is_available() else 0
    rows = machine_rows(max(gpus, 1), first_here=True) + copy_rows(torch.device("cuda" if gpus else "cpu"))
    sheet.facts(
        gpus=gpus,
        device=torch.cuda.get_device_name() if gpus else "no CUDA device",
        lacks_transformer_engine=machine.lacks_transformer_engine,
        report=report() + [(row.what, row.said) for row in rows],
    )
    faults = [row for row in rows if row.verdict == "fault"]
    sheet.note("faults", len(faults), note="; ".join(f"{row.what}: {row.said}" for row in faults))
    if gpus:
        if not machine.lacks_transformer_engine:
            recipes = ("tensorwise", "delayed", "blockwise")
            sheet.note("fp8_recipes", sum(not machine.lacks_for_fp8(one) for one in recipes))
        else:
            sheet.note("fp8_recipes", None, note=machine.lacks_transformer_engine)
        name, flops = torch.cuda.get_device_name(), _product_flops()
        peak = peak_flops(name)
        sheet.note("matmul", flops / 1e12, peak / 1e12 if peak else None, "" if peak else f"no data sheet of {name}")
    sheet.facts(predictions=_predictions(sheet.model or "4b"))


def _product_flops() -> float:
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    timer = Timer("a @ b", globals={"a": a, "b": b})  # waits for the device before and after
    timer.timeit(10)  # picks the kernel and brings the clock up
    return 2 * 8192**3 / timer.timeit(20).mean


def _predictions(model: str) -> dict[str, dict[str, float]]:
    """Of the steps that only a device can measure, what `plan` predicts for this one, or else for an H200."""
    site = this_site()
    shape = shape_named(model)
    architecture = architecture_of(shape)
    mfu = speeds_for(architecture).mfu.value
    step_s = useful_flops(shape, equal_samples(architecture, 8192, 8, CAP)) / site.peak_flops / mfu
    config = Config()
    config.model.dtype, config.packing.max_tokens_per_microbatch = "bfloat16", CAP
    config.rollout.engine, config.rollout.servers.endpoints = "vllm", ["http://elsewhere"]
    phases = {one.name: one.total / GIB for one in plan_memory(config, architecture, site, 1024.0).phases}
    small = speeds_for(architecture_of(SHAPES["0.6b"])).mfu.value
    of_4b = {"mfu": mfu, "step_s": step_s}
    return {
        "mfu-4b-te": of_4b,
        "mfu-4b-local": of_4b,
        "mfu-0.6b": {"mfu_4096": small, "mfu_16384": small},
        "memory": phases | {"step": max(phases["step"], phases["backward"])},
    }


def this_site() -> Site:
    """One GPU, this machine's or an H200, for `plan`."""
    memory_bytes, peak = CHIPS["h200"].memory_bytes, CHIPS["h200"].peak_flops
    if torch.cuda.is_available():
        card = torch.cuda.get_device_properties(torch.cuda.current_device())
        memory_bytes, peak = float(card.total_memory), peak_flops(card.name) or float("nan")
    return Site(1, 8, memory_bytes, peak, 1e15)  # host memory without a limit


def ipc(sheet: Sheet) -> None:
    """The doctor's round trip, three times: another process changes each byte of a buffer of ours."""
    device = torch.device("cuda" if sheet.cuda else "cpu")
    rows = [server_rows(None, device, timeout_s=30.0)[0] for _ in range(3)]
    sheet.note("right", sum(row.verdict == "ok" for row in rows), note=f"{rows[-1].what}: {rows[-1].said}")
