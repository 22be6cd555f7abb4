"""Block-wise FP8 products for vLLM on a CPU: weights are multiplied out in float32, activations stay as they are. What
loads, checks and shows weights is vLLM's. Its own kernels need AMX, and lay weights out anew, which no receipt can
prove (as on a GPU)."""

from __future__ import annotations

from typing import Any


def register() -> None:
    """As a plugin would, in the place of vLLM's own: tests then see the same on every CPU."""
    import torch
    from vllm.model_executor.kernels.linear import _POSSIBLE_FP8_BLOCK_KERNELS
    from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
    from vllm.model_executor.layers.quantization import fp8
    from vllm.platforms.interface import PlatformEnum

    def multiplied_out(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        each = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
        return weight.float() * each[: weight.shape[0], : weight.shape[1]]

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
            return A.float() @ multiplied_out(B, Bs).T

    def visit(
        self: Any, layer: Any, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, **_: Any
    ) -> torch.Tensor:
        """Each expert its tokens, one after the other."""
        total = torch.zeros_like(x, dtype=torch.float32)
        for expert, (into, back) in enumerate(zip(layer.w13_weight, layer.w2_weight, strict=True)):
            tokens, place = (topk_ids == expert).nonzero(as_tuple=True)
            gate, up = (x[tokens].float() @ multiplied_out(into, layer.w13_weight_scale_inv[expert]).T).chunk(2, dim=-1)
            out = (torch.nn.functional.silu(gate) * up) @ multiplied_out(back, layer.w2_weight_scale_inv[expert]).T
            total.index_add_(0, tokens, out * topk_weights[tokens, place][:, None])
        return total.to(x.dtype)

    _POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU][:] = [MultipliedOut]
    fp8.select_fp8_moe_backend = lambda *_, **__: (Fp8MoeBackend.CPU, None)
    method: Any = fp8.Fp8MoEMethod
    method.is_monolithic, method.apply, method._setup_kernel = False, visit, lambda *_, **__: None
