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
from dppo_megatron.launched import environment_of_ours
from dppo_megatron.platform.capabilities import this_machine
from dppo_megatron.rollout.transfer.shared_memory import SharedBuffer

_RECIPES = ("tensorwise", "delayed", "blockwise")


def environment(sheet: Sheet) -> None:
    """What others depend on first, then the product."""
    machine, gpus = this_machine(), torch.cuda.device_count() if torch.cuda.is_available() else 0
    name = torch.cuda.get_device_name() if gpus else ""
    sheet.facts(
        gpus=gpus,
        device=name or "no CUDA device",
        lacks_transformer_engine=machine.lacks_transformer_engine,
        report=report(),
    )
    if not gpus:
        return
    if machine.has_transformer_engine:
        sheet.note("fp8_recipes", sum(not machine.lacks_for_fp8(one) for one in _RECIPES), len(_RECIPES))
    else:
        sheet.skip("fp8_recipes", machine.lacks_transformer_engine)
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(10):  # the first picks the kernel, the rest bring the clock up
        a @ b
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(20):
        a @ b
    torch.cuda.synchronize()
    flops, peak = 20 * 2 * 8192**3 / (time.perf_counter() - started), peak_flops(name, fp8=False)
    sheet.note("matmul", flops / 1e12, peak / 1e12 if peak else None, "" if peak else f"no data sheet of {name}")


def ipc(sheet: Sheet) -> None:
    """Three buffers of changing content, summed by another process that maps them, as a server would."""
    device = torch.device("cuda" if sheet.cuda else "cpu")
    size = 512 << 20 if sheet.cuda else 16 << 20
    buffer = SharedBuffer(size, device)
    free = torch.cuda.mem_get_info()[0] if sheet.cuda else 0
    command = [sys.executable, "-P", "-m", "dppo_megatron.accept.ipc_reader"]
    right, seconds = 0, float("nan")
    with subprocess.Popen(
        command, env=environment_of_ours(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as reader:
        assert reader.stdin is not None and reader.stdout is not None
        for seed in range(3):
            generator = torch.Generator(device).manual_seed(seed)
            content = torch.randint(0, 256, (size,), generator=generator, device=device, dtype=torch.uint8)
            buffer.fill(content)
            reader.stdin.write(json.dumps(buffer.handle()) + "\n")
            reader.stdin.flush()
            answer = json.loads(reader.stdout.readline())
            right += answer["sum"] == int(content.sum(dtype=torch.int64))
            seconds = answer["seconds"]
        reader.stdin.close()
    sheet.note("right", right, 3, "" if sheet.cuda else "16 MiB in an anonymous file, as on a CPU")
    sheet.note("gb_per_s", size / seconds / 1e9)
    if sheet.cuda:
        torch.cuda.empty_cache()
        torch.cuda.ipc_collect()
        sheet.note("missing_mib", (free - torch.cuda.mem_get_info()[0]) / 2**20)


def parity(sheet: Sheet, cases: tuple[tuple[str, str], ...]) -> None:
    """(dtype, layers) against the stored references."""
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
