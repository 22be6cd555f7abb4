"""Maps the FP8 recipe named in the configuration to Megatron's settings.

The token multiples that each recipe requires are in packing/alignment.py.
"""

from __future__ import annotations

from typing import Any

from dppo_megatron.config.schema import ActorConfig

_RECIPES: dict[str, dict[str, Any]] = {
    "off": {},
    "tensorwise": {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
    "delayed": {
        "fp8": "hybrid",
        "fp8_recipe": "delayed",
        "fp8_amax_history_len": 1024,
        "fp8_amax_compute_algo": "max",
    },
    "blockwise": {"fp8": "e4m3", "fp8_recipe": "blockwise"},
    "mxfp8": {"fp8": "e4m3", "fp8_recipe": "mxfp8"},
}


def fp8_settings(config: ActorConfig) -> dict[str, Any]:
    """Fields of Megatron's TransformerConfig for `actor.fp8`; nothing when it is off."""
    settings = dict(_RECIPES[config.fp8])
    if settings and config.fp8_bf16_layers:
        settings |= {
            "first_last_layers_bf16": True,
            "num_layers_at_start_in_bf16": config.fp8_bf16_layers,
            "num_layers_at_end_in_bf16": config.fp8_bf16_layers,
        }
    return settings | {"fp8_param": True} if settings and config.fp8_param else settings
