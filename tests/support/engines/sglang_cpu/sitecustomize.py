"""Python runs this at start where its directory is on PYTHONPATH: declares two operators that torchvision looks up on
import, which its CUDA wheel does not register under a CPU build of torch."""

import torch

_library = torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _library.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
