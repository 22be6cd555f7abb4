"""The other process of `machine.ipc`: maps the buffers that it is told of and says their sums.

It maps as `rollout/servers/in_engine/dppo_vllm_extension.py` does, which cannot be imported without vLLM.
"""

from __future__ import annotations

import base64
import json
import sys
import time
from typing import Any

import torch
from torch import Tensor


def mapped(handle: dict[str, Any]) -> Tensor:
    """The buffer's bytes."""
    if "uuid" not in handle:
        return torch.from_file(handle["path"], shared=True, size=handle["bytes"], dtype=torch.uint8)
    uuids = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
    event, counter, name = (base64.b64decode(handle[part]) for part in ("event", "counter", "handle"))
    storage = torch.UntypedStorage._new_shared_cuda(  # type: ignore[attr-defined]
        uuids.index(handle["uuid"]), name, handle["size"], handle["offset"],
        counter, handle["counter_offset"], event, handle["event_sync"],
    )  # fmt: skip
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)[: handle["bytes"]]


def main() -> int:
    """A handle a line in, a sum a line out, until the input ends."""
    for line in sys.stdin:
        started = time.perf_counter()
        own = mapped(json.loads(line)).clone()
        if own.is_cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        print(json.dumps({"sum": int(own.sum(dtype=torch.int64)), "seconds": seconds}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
