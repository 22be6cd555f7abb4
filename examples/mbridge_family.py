"""A model family without rows in the weight table, through a class of mbridge: ByteDance's Seed-OSS.

    dppo-megatron train CONFIG model.hf_path=Seed-OSS-36B-Base model.provider=examples.mbridge_family:SeedOssBridge \
        'model.ignore_config_keys=[attention_dropout]'

needs `pip install mbridge==0.15.1 einops`. The model computes like Qwen2.5, and its weights have the same names. The
first layer is compared with that of transformers before training, so a wrong class is refused.
"""

from __future__ import annotations

from typing import Any

from mbridge.models.qwen2 import Qwen2Bridge


class SeedOssBridge(Qwen2Bridge):  # type: ignore[misc]
    """Queries, keys and values with a bias, heads without norms."""

    def _build_config(self) -> Any:
        return self._build_base_config(add_qkv_bias=self.hf_config.attention_bias, qk_layernorm=False)
