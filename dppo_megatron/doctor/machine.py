"""What a machine allows and how its GPUs are, judged from numbers and text that a test can give as well."""

from __future__ import annotations

import os
import resource
import subprocess
from pathlib import Path

from dppo_megatron.doctor.rows import Row

_DOCKERS_SHM, _ENOUGH_SHM = 64 << 20, 1 << 30
"""What Docker gives by default; NCCL's segments beside vLLM's ring of 10 chunks of 16 MiB a server."""
_OWN_FILES, _CLIENT_FILES = 512, 4096
"""Of a rank without its peers; of a client that has a socket for each request in flight."""
_THREADS = 4096
_GPU_FIELDS = "index,clocks.sm,clocks.max.sm,{}.active,ecc.errors.uncorrected.volatile.total,temperature.gpu"
_SLOWED = {0x08: "hardware slowdown", 0x20: "too hot (software)", 0x40: "too hot (hardware)", 0x80: "power brake"}
"""NVML's bits. The others are no trouble: idle, the power cap under load, clocks that somebody has set."""


def machine_rows(world_size: int, *, first_here: bool) -> list[Row]:
    """Limits of this process; of its machine's first rank also what all of them share."""
    files, threads = (resource.getrlimit(kind)[1] for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC))
    wires = Path("/sys/class/infiniband")
    rows = [
        files_row(files, world_size),
        locked_row(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], wires.is_dir() and any(wires.iterdir())),
        threads_row(threads if os.geteuid() else -1),  # root has no such limit
    ]
    if first_here:
        rows += [shm_row(), memory_row(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")), *_gpus()]
    return rows


def files_row(hard: int, world_size: int) -> Row:
    """`ulimit -Hn`, to which clients and ranks raise their own; -1: none. gloo has a socket for each other rank."""
    needed, said = _OWN_FILES + world_size, f"{_limit(hard)} open files (hard limit)"
    if 0 <= hard < needed:
        return Row("ulimit -n", "fault", f"{said}, but a rank of {world_size} needs {needed}: raise it (ulimit -Hn)")
    if 0 <= hard < _CLIENT_FILES:
        return Row("ulimit -n", "warning", f"{said}: requests in flight take one each; {_CLIENT_FILES} would be right")
    return Row("ulimit -n", "ok", said)


def locked_row(soft_bytes: int, has_infiniband: bool) -> Row:
    """`ulimit -l`; -1: none."""
    if soft_bytes < 0 or not has_infiniband:
        return Row("ulimit -l", "ok", f"{_limit(soft_bytes)}{' bytes; no InfiniBand here' * (not has_infiniband)}")
    said = "InfiniBand registers NCCL's buffers there; `ulimit -l unlimited`, in Docker --ulimit memlock=-1"
    return Row("ulimit -l", "warning", f"{soft_bytes} bytes may be locked: {said}")


def threads_row(hard: int) -> Row:
    """`ulimit -Hu`; -1: none."""
    if 0 <= hard < _THREADS:
        return Row("ulimit -u", "warning", f"{hard} processes and threads of this user; {_THREADS} would be right")
    return Row("ulimit -u", "ok", _limit(hard))


def _limit(number: int) -> str:
    return "unlimited" if number < 0 else str(number)


def shm_row() -> Row:
    """Shared memory for NCCL and the engines."""
    try:
        found = os.statvfs("/dev/shm")
    except OSError as error:
        return Row("/dev/shm", "fault", f"{error.strerror}: NCCL and vLLM share memory there; mount a tmpfs")
    free, size = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
    said = f"{free >> 20:,} of {size >> 20:,} MiB free"
    if free >= _ENOUGH_SHM:
        return Row("/dev/shm", "ok", said)
    said += ": NCCL and vLLM (160 MiB a server) share memory there; remove what is left in it, or give more"
    return Row("/dev/shm", "fault" if free < _DOCKERS_SHM else "warning", f"{said} (Docker: --shm-size=16g)")


def memory_row(root: Path, membership: Path) -> Row:
    """The least memory limit of this process's control groups, or the machine's memory.

    Args:
        root: where control groups are mounted.
        membership: /proc/self/cgroup: `0::/a/b` (version 2), `7:memory:/a/b` (version 1).
    """
    total = least = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in membership.read_text().splitlines() if membership.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            base = root / controllers
            inner = base / path.lstrip("/")
            for folder in (inner, *inner.parents[: len(inner.relative_to(base).parts)]):
                for file in (folder / "memory.max", folder / "memory.limit_in_bytes"):
                    text = file.read_text().strip() if file.is_file() else "max"
                    least = min(least, int(text)) if text.isdigit() else least
    whose = "the control group's limit" if least < total else "the machine's; no control group limits it"
    return Row("host memory", "ok", f"{least / 2**30:.0f} GiB ({whose}); `dppo-megatron plan` says what a job takes")


def _gpus() -> list[Row]:
    said = ""
    for reasons in ("clocks_event_reasons", "clocks_throttle_reasons"):  # the second before driver 535
        query = ["nvidia-smi", f"--query-gpu={_GPU_FIELDS.format(reasons)}", "--format=csv,noheader,nounits"]
        try:
            done = subprocess.run(query, capture_output=True, text=True, timeout=15)
        except FileNotFoundError:
            return [Row("clocks and ECC", "ok", "not measured: no nvidia-smi")]
        except (OSError, subprocess.TimeoutExpired) as error:
            return [Row("clocks and ECC", "warning", f"nvidia-smi does not answer: {error}")]
        if done.returncode == 0:
            return gpu_rows(done.stdout)
        said = (done.stdout + done.stderr).strip().replace("\n", " ")
    return [Row("clocks and ECC", "warning", f"nvidia-smi refuses: {said}")]


def gpu_rows(text: str) -> list[Row]:
    """Clocks and ECC errors from what nvidia-smi prints for `_GPU_FIELDS`: a line a GPU, `[N/A]` for what it lacks."""
    cards = [[field.strip() for field in line.split(",")] for line in text.splitlines() if line.strip()]
    slowed, broken = [], []
    for index, _, _, reasons, errors, celsius in cards:
        bits = int(reasons, 16) if reasons.startswith("0x") else 0
        if named := [name for bit, name in _SLOWED.items() if bits & bit]:
            slowed.append(f"GPU {index}: {', '.join(named)}, {celsius} C")
        if errors.isdigit() and int(errors):
            broken.append(f"GPU {index}: {errors}")
    speeds = ", ".join(f"{now} of {most}" for _, now, most, *_ in cards)
    clocks = Row("clocks", "ok", f"{speeds} MHz; none slowed down")
    if slowed:
        clocks = Row("clocks", "warning", f"{'; '.join(slowed)}: look after cooling and power, or leave the node out")
    if broken:
        said = f"uncorrected errors ({', '.join(broken)}): have the GPU reset, or leave the node out"
        return [clocks, Row("ECC", "fault", said)]
    return [clocks, Row("ECC", "ok", "no uncorrected error since the driver was loaded")]
