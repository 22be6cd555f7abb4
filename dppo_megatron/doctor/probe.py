"""Run by the servers' Python, as a file: which NCCL it has, and whether it can map a rank's memory and write to it.

Imports nothing of this package but the receiver's file, which lies on PYTHONPATH as for a server. stdin: a
`SharedBuffer.handle()` as JSON; stdout ends with a line of JSON. Each byte of the memory becomes 255 minus itself.
"""

import hashlib
import json
import os
import sys

import torch
from dppo_wire import map_memory


def main() -> None:
    """See the file's head."""
    has_nccl = hasattr(torch._C, "_nccl_version")
    answer = {
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else "",  # type: ignore[no-untyped-call]
        "variables": {name: value for name, value in os.environ.items() if name.startswith("NCCL_")},
    }
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
