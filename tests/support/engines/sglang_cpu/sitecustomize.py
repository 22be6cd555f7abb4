"""Python runs this at start where its directory is on PYTHONPATH: declares two operators that torchvision looks up on
import, which its CUDA wheel does not register under a CPU build of torch, and makes up products in FP8."""

import importlib.abc
import importlib.util
import sys
from typing import Any

import torch

_library = torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _library.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


class _MultipliedOut(importlib.abc.MetaPathFinder):
    """Block-wise FP8 products, which SGLang has for CPUs with AMX and for GPUs: weights are multiplied out, activations
    stay as they are."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != "sglang.srt.layers.quantization.fp8":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module  # type: ignore[union-attr]

        def run_and_replace(module: Any) -> None:
            run(module)
            module._is_cpu = False  # its way through a GPU's code, which keeps weights as they are loaded
            module.dispatch_w8a8_block_fp8_linear = lambda *_, **__: _linear

        spec.loader.exec_module = run_and_replace  # type: ignore[union-attr, method-assign]
        return spec


def _linear(
    input: torch.Tensor, weight: torch.Tensor, block_size: list[int], weight_scale: torch.Tensor, *_: Any, **more: Any
) -> torch.Tensor:
    scales = weight_scale.repeat_interleave(block_size[0], 0).repeat_interleave(block_size[1], 1)
    out = input.float() @ (weight.float() * scales[: weight.shape[0], : weight.shape[1]]).T
    return (out if more.get("bias") is None else out + more["bias"]).to(input.dtype)


sys.meta_path.insert(0, _MultipliedOut())
