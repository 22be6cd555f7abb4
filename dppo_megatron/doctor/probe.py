"""Run by the servers' Python, as a file: which NCCL it has, and whether it can map a rank's memory and write to it.

Imports nothing of this package but the receiver's file, which lies on PYTHONPATH as for a server. stdin: a
`SharedBuffer.handle()` as JSON; stdout ends with a line of JSON. Each byte of the memory becomes 255 minus itself.
"""

import hashlib
import json
import sys
from typing import Any

import dppo_nccl
import torch
from dppo_wire import map_memory


def main() -> None:
    """See the file's head."""
    answer: dict[str, Any] = {"nccl": dppo_nccl.settings()}
    try:
        memory = map_memory(json.load(sys.stdin))
        answer["sha256"] = hashlib.sha256(bytes(memory.tolist())).hexdigest()
        memory.copy_(255 - memory)
        if memory.is_cuda:
            torch.cuda.synchronize(memory.device)
    except Exception as error:
        answer["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
    print(json.dumps(answer))


main()
