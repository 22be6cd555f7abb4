"""Run by `doctor` with the servers' Python, to find its NCCL and whether it can map a rank's memory and write to it.

stdin: `SharedBuffer.handle()` as JSON. The last line of stdout is JSON. Each byte of the memory is replaced by 255
minus itself.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from dppo_wire import map_memory, nccl_settings


def main() -> None:
    """Map the memory and invert its bytes; print NCCL's settings, and the error if that fails."""
    answer: dict[str, Any] = {"nccl": nccl_settings()}
    try:
        memory = map_memory(json.load(sys.stdin))
        memory.copy_(255 - memory)
        if memory.is_cuda:
            torch.cuda.synchronize(memory.device)
    except Exception as error:
        answer["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
    print(json.dumps(answer))


main()
