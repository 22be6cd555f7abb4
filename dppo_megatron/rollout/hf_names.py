"""The parameters of a transformers model under the names of its checkpoint.

For checking a weight table against transformers (docs/extending.md). For dense models the two are the same. From
version 5 on transformers fuses a layer's experts into two tensors in memory, while checkpoints and every engine keep
one tensor an expert; here each of those is a view into the fused one.
"""

from __future__ import annotations

import torch
from torch import Tensor


def by_checkpoint_name(model: torch.nn.Module) -> dict[str, Tensor]:
    """Checkpoint name to parameter, or view of one; writing to it writes to the model."""
    named: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        stem, _, last = name.rpartition(".")
        if last == "gate_up_proj":
            for expert, fused in enumerate(parameter.unbind()):
                gate, up = fused.chunk(2)
                named |= {f"{stem}.{expert}.gate_proj.weight": gate, f"{stem}.{expert}.up_proj.weight": up}
        elif last == "down_proj":
            named |= {f"{stem}.{expert}.down_proj.weight": down for expert, down in enumerate(parameter.unbind())}
        else:
            named[name] = parameter
    return named
