"""Block-wise FP8 products for vLLM on a CPU without AMX, which its own kernels need: weights are multiplied out in
float32, activations stay as they are. What loads, checks and shows weights is vLLM's."""

from __future__ import annotations

from typing import Any


def register() -> None:
    """As a plugin would; where vLLM's kernels run, they come first."""
    import torch
    from vllm.model_executor.kernels.linear import _POSSIBLE_FP8_BLOCK_KERNELS
    from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel
    from vllm.platforms.interface import PlatformEnum

    class MultipliedOut(Fp8BlockScaledMMLinearKernel):
        apply_input_quant = False

        @classmethod
        def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
            return True, None

        @classmethod
        def can_implement(cls, config: Any) -> tuple[bool, str | None]:
            return True, None

        def apply_block_scaled_mm(
            self, A: torch.Tensor, B: torch.Tensor, As: torch.Tensor, Bs: torch.Tensor
        ) -> torch.Tensor:
            rows, columns = self.weight_group_shape
            scales = Bs.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: B.shape[0], : B.shape[1]]
            return A.float() @ (B.float() * scales).T

    _POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU].append(MultipliedOut)
