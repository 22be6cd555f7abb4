"""What a machine allows and how its GPUs are, judged from numbers and text that a test can give as well."""

from __future__ import annotations

import resource
import shutil
import subprocess
from pathlib import Path

from dppo_megatron.doctor.rows import Row, Verdict

_DOCKERS_SHM, _ENOUGH_SHM = 64 << 20, 1 << 30
"""What Docker gives by default; NCCL's segments beside vLLM's ring of 10 chunks of 16 MiB a server."""
_OWN_FILES = 512
"""Of a rank without its peers."""
_GPU_FIELDS = "index,clocks.sm,clocks.max.sm,clocks_event_reasons.active,ecc.errors.uncorrected.volatile.total"
_SLOWED = {0x08: "hardware slowdown", 0x20: "too hot (software)", 0x40: "too hot (hardware)", 0x80: "power brake"}
"""NVML's bits. The others are no trouble: idle, the power cap under load, clocks that somebody has set."""


def machine_rows(world_size: int, *, first_here: bool) -> list[Row]:
    """Limits of this process; of its machine's first rank also what all of them share."""
    wires = Path("/sys/class/infiniband")
    rows = [
        files_row(resource.getrlimit(resource.RLIMIT_NOFILE)[1], world_size),
        locked_row(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], wires.is_dir() and any(wires.iterdir())),
    ]
    return [*rows, shm_row(shutil.disk_usage("/dev/shm").free), *_gpus()] if first_here else rows


def files_row(hard: int, world_size: int) -> Row:
    """`ulimit -Hn`, to which ranks raise their own; -1: none. gloo has a socket for each other rank."""
    needed, said = _OWN_FILES + world_size, f"{'unlimited' if hard < 0 else hard} open files (hard limit)"
    if 0 <= hard < needed:
        return Row("ulimit -n", "fault", f"{said}, but a rank of {world_size} needs {needed}: raise it (ulimit -Hn)")
    return Row("ulimit -n", "ok", said)


def locked_row(soft_bytes: int, has_infiniband: bool) -> Row:
    """`ulimit -l`; -1: none."""
    said = f"{'unlimited' if soft_bytes < 0 else f'{soft_bytes} bytes'} may be locked"
    if soft_bytes < 0 or not has_infiniband:
        return Row("ulimit -l", "ok", said)
    said += ": InfiniBand registers NCCL's buffers there; `ulimit -l unlimited`, in Docker --ulimit memlock=-1"
    return Row("ulimit -l", "warning", said)


def shm_row(free: int) -> Row:
    """Bytes of shared memory for NCCL and the engines."""
    if free >= _ENOUGH_SHM:
        return Row("/dev/shm", "ok", f"{free >> 20:,} MiB free")
    said = "NCCL and vLLM (160 MiB a server) share memory there; remove what is left in it, or give more"
    verdict: Verdict = "fault" if free < _DOCKERS_SHM else "warning"
    return Row("/dev/shm", verdict, f"{free >> 20:,} MiB free: {said} (Docker: --shm-size=16g)")


def _gpus() -> list[Row]:
    query = ["nvidia-smi", f"--query-gpu={_GPU_FIELDS}", "--format=csv,noheader,nounits"]
    try:
        return gpu_rows(subprocess.run(query, capture_output=True, text=True, timeout=15, check=True).stdout)
    except FileNotFoundError:
        return [Row("clocks and ECC", "ok", "not measured: no nvidia-smi")]
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stdout", None) or error
        return [Row("clocks and ECC", "warning", f"nvidia-smi does not answer: {said}".replace("\n", " "))]


def gpu_rows(text: str) -> list[Row]:
    """Clocks and ECC errors from what nvidia-smi prints for `_GPU_FIELDS`: a line a GPU, `[N/A]` for what it lacks."""
    cards = [line.split(", ") for line in text.splitlines()]
    speeds = ", ".join(f"{now} of {most}" for _, now, most, *_ in cards)
    clocks, ecc = Row("clocks", "ok", f"{speeds} MHz; none slowed down"), Row("ECC", "ok", "no uncorrected error")
    bits = {index: int(reasons, 16) if reasons.startswith("0x") else 0 for index, _, _, reasons, _ in cards}
    slowed = {index: ", ".join(name for bit, name in _SLOWED.items() if bits[index] & bit) for index in bits}
    if named := [f"GPU {index}: {reasons}" for index, reasons in slowed.items() if reasons]:
        clocks = Row("clocks", "warning", f"{'; '.join(named)}: look after cooling and power, or leave the node out")
    if broken := [f"GPU {index}: {errors}" for index, *_, errors in cards if errors.isdigit() and int(errors)]:
        said = f"uncorrected errors ({', '.join(broken)}): have the GPU reset, or leave the node out"
        ecc = Row("ECC", "fault", said)
    return [clocks, ecc]
