"""This process's rank and world size, from the launcher's environment. Without torch, so that --help is fast.

torchrun sets all of these variables; if none is set, there is one process. Wrong variables from a hand-written launcher
are reported before rendezvous, in which the ranks would wait minutes for each other.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource

from dppo_megatron.config.schema import Config
from dppo_megatron.types import UserError

_RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that torch's rendezvous needs."""


def set_cuda_variables() -> None:
    """Set what Megatron needs, unless the user has set it. Call before CUDA is initialised, which reads it. Megatron
    relies on the order of kernel launches, which CUDA keeps only with one hardware queue."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def set_fp8_variables(config: Config) -> None:
    """Have Transformer Engine use float32 scales as servers do, so that both round weights alike; by default its scales
    are powers of two. Call before it is imported. The user's own value stays."""
    if config.actor.fp8 == "blockwise" and config.rollout.quantization == "fp8":
        os.environ.setdefault("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "1")


def raise_file_limit() -> int:
    """Raise the soft limit of open files to the hard one; returns how many files this process may open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 1 << 20 if hard == resource.RLIM_INFINITY else hard
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return 1 << 20 if soft == resource.RLIM_INFINITY else soft


def forget_launcher() -> None:
    """Remove the launcher's variables, in a child process that is not a rank of the job."""
    for name in (*_RENDEZVOUS, "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)


def launched_world_size() -> int:
    """Processes of this job; 1 without a launcher. Raises UserError for a wrong variable, as the functions below do."""
    return _number("WORLD_SIZE", 1, least=1)


def launched_rank() -> int:
    """This process's rank; 0 without a launcher."""
    return _number("RANK", 0, least=0)


def launched_local_rank() -> int:
    """This process's number on its machine, which is that of its GPU; 0 without a launcher."""
    return _number("LOCAL_RANK", 0, least=0)


def launched_node(rank: int) -> int:
    """The first rank on this machine, which identifies the machine. `rank`: this process's own."""
    return rank - launched_local_rank()


def launched_here() -> int:
    """Processes of the job on this machine; 1 without a launcher."""
    return _number("LOCAL_WORLD_SIZE", 1, least=1)


def is_on_one_machine() -> bool:
    """Whether all processes of the job are on this machine, as a process without a launcher always is."""
    return launched_world_size() == launched_here()


def check_launcher_env() -> None:
    """Raise UserError for a launcher's environment with which the ranks cannot rendezvous."""
    rank, size, local = launched_rank(), launched_world_size(), launched_local_rank()
    here = launched_here() if "LOCAL_WORLD_SIZE" in os.environ else size
    for name, value, of, count in (("RANK", rank, "WORLD_SIZE", size), ("LOCAL_RANK", local, "LOCAL_WORLD_SIZE", here)):
        if value >= count:
            raise _mistake(f"{name}={value}, but {of}={count}: ranks count from 0")
    for name, value, of, most in (("LOCAL_WORLD_SIZE", here, "WORLD_SIZE", size), ("LOCAL_RANK", local, "RANK", rank)):
        if value > most and of in os.environ:
            raise _mistake(f"{name}={value}, but {of}={most}: {name} cannot be larger")
    if "RANK" not in os.environ and size == 1:
        tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")  # set for a job step, not for a batch shell
        is_terminal = "SLURM_PTY_WIN_COL" in os.environ  # of `srun --ntasks=8 --pty bash` only the first shell is used
        if tasks.isdecimal() and int(tasks) > 1 and not is_terminal:
            raise UserError(
                f"the environment: srun has started {tasks} tasks (SLURM_STEP_NUM_TASKS), but RANK is not set: each"
                " would train alone. Let srun start one torchrun on each node (examples/slurm)"
            )
        return
    # LOCAL_RANK too, or every rank would use the first GPU.
    needed = (*_RENDEZVOUS, "LOCAL_RANK") if size > 1 else _RENDEZVOUS
    if missing := [name for name in needed if not os.environ.get(name)]:
        raise _mistake(f"{' and '.join(missing)} not set, but others of {', '.join(needed)} are")
    if _number("MASTER_PORT", 0, least=1) >= 1 << 16:
        raise _mistake(f"MASTER_PORT={os.environ['MASTER_PORT']} is no port: 1 to 65535")


def place_from_slurm() -> None:
    """Set torchrun's variables from Slurm's if srun itself has started the ranks. Only for checks: runs need torchrun,
    which ends all ranks when one ends. Variables that are set stay; the rendezvous is on the step's first host."""
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    if "RANK" in os.environ or not tasks.isdecimal() or int(tasks) == 1 or "SLURM_PTY_WIN_COL" in os.environ:
        return
    # Tasks on each node in turn look like `8(x2),4`, hosts like `node[01-02,07],login`.
    runs = re.findall(r"(\d+)(?:\(x(\d+)\))?", os.environ.get("SLURM_STEP_TASKS_PER_NODE", tasks))
    here = [int(count) for count, times in runs for _ in range(int(times or 1))]
    first = re.match(r"([^\[,]*)(?:\[(\d+)[^\]]*\]([^,\[]*))?", os.environ.get("SLURM_STEP_NODELIST", "localhost"))
    job = 37 * _number("SLURM_JOB_ID", 0, least=0) + _number("SLURM_STEP_ID", 0, least=0)
    variables = {
        "RANK": os.environ.get("SLURM_PROCID", ""),
        "WORLD_SIZE": tasks,
        "LOCAL_RANK": os.environ.get("SLURM_LOCALID", ""),
        "LOCAL_WORLD_SIZE": str(here[_number("SLURM_NODEID", 0, least=0)]),
        "MASTER_ADDR": "".join(part or "" for part in first.groups()) if first else "",
        "MASTER_PORT": str(20_000 + job % 10_000),  # one per step; below 32768, where Linux's ephemeral ports begin
    }
    os.environ.update({name: value for name, value in variables.items() if name not in os.environ})


def _number(name: str, default: int, least: int) -> int:
    text = os.environ.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and int(text) >= least):
        raise _mistake(f"{name}={text!r} is not a whole number of at least {least}")
    return int(text)


def _mistake(problem: str) -> UserError:
    return UserError(f"the environment: {problem}. torchrun sets these; unset them all to run one process")
