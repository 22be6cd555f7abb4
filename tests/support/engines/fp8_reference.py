"""Runs in an engine's environment: rounds the matrices of a file with the engine's own quantiser; vLLM also once more,
as it does for DeepGEMM's kernels with scales of powers of two.

python -m fp8_reference {vllm|sglang} GIVEN FOUND
"""

from __future__ import annotations

import sys

import torch

engine, given, found = sys.argv[1:4]
if engine == "vllm":
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    quantisers = {power: lambda x, power=power: per_block_cast_to_fp8(x, [128, 128], power) for power in (False, True)}
else:  # SGLang has one for powers of two only
    from sglang.srt.layers.quantization.fp8_utils import per_block_cast_to_fp8

    quantisers = {True: per_block_cast_to_fp8}
matrices = torch.load(given)
rounded = {power: {name: own(x) for name, x in matrices.items()} for power, own in quantisers.items()}
again = {}
if engine == "vllm":
    from vllm.model_executor.layers.quantization.utils.fp8_utils import requant_weight_ue8m0_inplace

    for power, of_power in rounded.items():
        again[power] = {name: (weight.clone(), scales.clone()) for name, (weight, scales) in of_power.items()}
        for weight, scales in again[power].values():
            requant_weight_ue8m0_inplace(weight, scales)
torch.save((rounded, again), found)
