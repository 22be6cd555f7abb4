"""`doctor` has the servers' Python run this: which NCCL is there, and can it map a rank's memory and write to it?

stdin: `SharedBuffer.handle()` as JSON; stdout ends with a line of JSON. Each byte of the memory becomes 255 minus
itself.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from dppo_wire import map_memory, nccl_settings


def main() -> None:
    """Maps an offer of memory from stdin and inverts its bytes; prints NCCL's settings, or an error beside them."""
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
