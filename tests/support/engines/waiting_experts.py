"""Runs in vLLM's environment: a worker that holds some of a layer's experts is given all of them, in buckets.

python -m waiting_experts

Loader, map of experts and layerwise reload are vLLM's own; the layer has no kernel. Prints the experts that it keeps
after each bucket, and whether it then has the weights of its own.
"""

from __future__ import annotations

import json
from types import SimpleNamespace

import torch
from dppo_vllm_extension import keep_what_waits
from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager, determine_expert_map
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

COUNT, WORKERS, WORKER = 8, 4, 1
HIDDEN, WIDTH = 6, 4
SHAPES = {"w1": (WIDTH, HIDDEN), "w3": (WIDTH, HIDDEN), "w2": (HIDDEN, WIDTH)}
PER_BUCKET = 5
"""Tensors, of an expert's three: buckets end inside experts too."""


class Experts(RoutedExperts):
    """Those of one worker: 2 and 3 of 8."""

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        self.quant_config, self.quant_method, self._fused_shared_expert_quantizer = None, None, None
        self.moe_config = SimpleNamespace(
            tp_rank=0,
            is_act_and_mul=True,
            tp_shard_with_padding=False,
            moe_parallel_config=SimpleNamespace(tp_size=1),
        )
        self.expert_map_manager = ExpertMapManager.__new__(ExpertMapManager)
        own, self.expert_map_manager._expert_map, _ = determine_expert_map(WORKERS, WORKER, COUNT)
        for name, shape in (("w13_weight", (2 * WIDTH, HIDDEN)), ("w2_weight", (HIDDEN, WIDTH))):
            weight = torch.nn.Parameter(torch.zeros(own, *shape), requires_grad=False)
            weight.weight_loader = self.weight_loader
            self.register_parameter(name, weight)


model = torch.nn.Sequential(Experts())
[layer] = model
record_metadata_for_reloading(model)
initialize_layerwise_reload(model)
drawn = {(expert, part): torch.randn(shape) for expert in range(COUNT) for part, shape in SHAPES.items()}
memory, kept = torch.empty(PER_BUCKET, HIDDEN * WIDTH), []
for start in range(0, len(drawn), PER_BUCKET):
    memory.fill_(torch.nan)  # as the next bucket overwrites the one before
    for place, (expert, part) in zip(memory, list(drawn)[start : start + PER_BUCKET], strict=False):
        tensor = place.view(SHAPES[part]).copy_(drawn[expert, part])
        name = "w2_weight" if part == "w2" else "w13_weight"
        loader = getattr(layer, name).weight_loader
        loader(getattr(layer, name), tensor, name, part, expert, return_success=True)
    keep_what_waits(model, memory)
    kept.append([call.arguments["expert_id"] for _, call in get_layerwise_info(layer).loaded_weights])
finalize_layerwise_reload(model, None)
own = range(WORKER * COUNT // WORKERS, (WORKER + 1) * COUNT // WORKERS)
gate_up = torch.stack([torch.cat([drawn[expert, "w1"], drawn[expert, "w3"]]) for expert in own])
down = torch.stack([drawn[expert, "w2"] for expert in own])
right = torch.equal(layer.w13_weight, gate_up) and torch.equal(layer.w2_weight, down)
print(json.dumps({"kept": kept, "right": right}))
