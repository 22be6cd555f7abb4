"""Transformer Engine's FusedAdam on a CPU: its groups, state, conversions and refusals (2.11,
`pytorch/optimizers/fused_adam.py`), with torch's operations in place of its kernel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

_NAMES = ("exp_avg", "exp_avg_sq")


class FusedAdam(torch.optim.Optimizer):
    """Moments in float32, no master weights of its own."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        adam_w_mode: bool = True,
    ) -> None:
        assert adam_w_mode
        settings = {"lr": lr, "bias_correction": True, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, settings)
        self.name_to_dtype_map = dict.fromkeys((*_NAMES, "master_param"), torch.float32)

    def get_unscaled_state(self, param: torch.Tensor, state_name: str) -> torch.Tensor:
        assert self.state[param][state_name].dtype == self.name_to_dtype_map[state_name]
        return self.state[param][state_name]

    def set_scaled_state(self, param: torch.Tensor, state_name: str, unscaled_state: torch.Tensor) -> None:
        if state_name not in self.state[param]:
            dtype = self.name_to_dtype_map[state_name]
            self.state[param][state_name] = torch.zeros(param.shape, dtype=dtype, device=param.device)
        self.state[param][state_name].copy_(unscaled_state)

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        for key, param in self._numbered(state).items():
            if key in state["state"]:
                state["state"][key] = {name: self.get_unscaled_state(param, name) for name in state["state"][key]}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        numbered = self._numbered(state_dict)
        for key, values in state_dict["state"].items():
            if key in numbered:
                self.state[numbered[key]] = {}
                for name, value in values.items():
                    self.set_scaled_state(numbered[key], name, value.float())

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if not group["params"]:
                continue
            corrects, (beta1, beta2) = group["bias_correction"], group["betas"]
            if "step" in group:
                group["step"] += 1
            else:
                group["step"] = 1
            for param in group["params"]:
                for name in _NAMES if not self.state[param] else ():
                    self.set_scaled_state(param, name, torch.zeros_like(param, dtype=torch.float32))
                if param.grad is not None:
                    first, second = (self.get_unscaled_state(param, name) for name in _NAMES)
                    # the kernel takes `const int step`, for which pybind11 refuses a float
                    assert type(group["step"]) is int, f"incompatible function arguments: step = {group['step']!r}"
                    first.lerp_(param.grad, 1 - beta1)
                    second.mul_(beta2).addcmul_(param.grad, param.grad, value=1 - beta2)
                    bias1, bias2 = (1 - beta ** group["step"] if corrects else 1.0 for beta in (beta1, beta2))
                    update = (first / bias1) / ((second / bias2).sqrt() + group["eps"])
                    param -= group["lr"] * (update + group["weight_decay"] * param)

    def _numbered(self, state: dict[str, Any]) -> dict[int, torch.Tensor]:
        pairs = zip(state["param_groups"], self.param_groups, strict=True)
        return {k: p for saved, own in pairs for k, p in zip(saved["params"], own["params"], strict=True)}


@contextmanager
def installed() -> Iterator[None]:
    """In a rank: Megatron builds this Adam, as where Transformer Engine is installed."""
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    with ExitStack() as undo:
        for module in (optimizer, distrib_optimizer):
            undo.enter_context(patch.object(module, "Adam", FusedAdam))
        undo.enter_context(patch.object(optimizer, "USING_PYTORCH_OPTIMIZER", False))
        undo.enter_context(patch.object(distrib_optimizer, "HAVE_APEX_OR_TE", True))
        undo.enter_context(patch.object(distrib_optimizer, "USING_TE_OPTIMIZER", True))
        yield
