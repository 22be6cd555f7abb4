"""Builds Megatron's optimizer and learning-rate schedule, and makes it work with torch's AdamW.

Megatron uses that without Apex and Transformer Engine, but its checkpoints assume FusedAdam, which keeps one `step` in
the parameter group. torch keeps a `step` tensor with each parameter, and three things break: a save before the first
step, a load, and bias correction after a load (0.16 and 0.19 alike). That affects every CPU, and every GPU without
those two packages. The fix is a subclass rather than a patch of Megatron's class, so that nothing else in the process
changes.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from dppo_megatron.actor.optimizer_state import LeanDistributedOptimizer
from dppo_megatron.config.schema import OptimizerConfig
from dppo_megatron.platform.capabilities import this_machine


def build_optimizer(
    config: OptimizerConfig, model: list[DistributedDataParallel], dtype: torch.dtype
) -> MegatronOptimizer:
    """Adam with decoupled weight decay and global gradient-norm clipping.

    A `max_grad_norm` of 0 becomes infinity, not Megatron's 0: with 0 Megatron does not compute the norm at all, and
    the norm is worth a line in the metrics.

    Raises:
        UserError: what fewer bits need is not installed.
    """
    optimizer: MegatronOptimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=config.learning_rate,
            min_lr=config.min_learning_rate,
            weight_decay=config.weight_decay,
            adam_beta1=config.adam_beta1,
            adam_beta2=config.adam_beta2,
            adam_eps=config.adam_eps,
            clip_grad=config.max_grad_norm or math.inf,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=config.distributed,
            **_savings(config),
        ),
        model,
        use_gloo_process_groups=False,
    )
    repair(optimizer)
    use_fused_kernels(optimizer)
    return optimizer


def _savings(config: OptimizerConfig) -> dict[str, Any]:
    """Megatron's fields for an optimizer that takes less of the device's memory."""
    settings: dict[str, Any] = {}
    if (config.moments_dtype, config.main_params_dtype) != ("float32", "float32"):
        moments = getattr(torch, config.moments_dtype)
        settings |= {"exp_avg_dtype": moments, "exp_avg_sq_dtype": moments}
        settings["main_params_dtype"] = getattr(torch, config.main_params_dtype)
    if config.cpu_offload:
        settings |= {"optimizer_cpu_offload": True, "optimizer_offload_fraction": config.cpu_offload}
        settings["overlap_cpu_optimizer_d2h_h2d"] = True
    if not settings:
        return settings
    this_machine().check_optimizer(config)
    # offloading takes this path of Megatron's too, as its own command line demands
    return settings | {"use_precision_aware_optimizer": True}


def build_schedule(config: OptimizerConfig, optimizer: MegatronOptimizer, total_steps: int) -> Any:
    """Linear warm-up, then the configured shape down to the minimum at `total_steps`."""
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.learning_rate,
        min_lr=config.min_learning_rate,
        lr_warmup_steps=config.lr_warmup_steps,
        lr_decay_steps=max(total_steps, config.lr_warmup_steps + 1),
        lr_decay_style=config.lr_schedule,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=1,
        wd_incr_style="constant",
    )


class TorchAdamDistributedOptimizer(LeanDistributedOptimizer):
    """A `DistributedOptimizer` whose state can be saved at any time and loaded again."""

    def state_dict(self) -> Any:
        """See Megatron's. Before the first step torch's Adam has no state, and Megatron asserts that every parameter
        has the same `step`: what is filled in is what the first step would start from."""
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                state = self.optimizer.state[param]
                state.setdefault("step", torch.tensor(0.0, dtype=torch.float32, device=param.device))
                for moment in ("exp_avg", "exp_avg_sq"):
                    if moment not in state:
                        state[moment] = torch.zeros_like(param)
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See Megatron's, which gives all parameters one `step` tensor: each parameter's update would then count it
        up, and bias correction be wrong, silently, from the second parameter on."""
        super().load_state_dict(state_dict)
        for state in self.optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].clone()

    def _set_main_param_and_optimizer_states(
        self, model_param: torch.nn.Parameter, tensors: dict[str, torch.Tensor]
    ) -> None:
        # Megatron copies every entry of Adam's state out of the checkpoint, but `step` is not saved as a tensor
        # (load_state_dict has set it already): KeyError. It is given its own value to copy.
        group_index, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group_index]["params"][order]]
        if "step" in state and "step" not in tensors:
            tensors = {**tensors, "step": state["step"]}
        super()._set_main_param_and_optimizer_states(model_param, tensors)


def use_fused_kernels(optimizer: MegatronOptimizer) -> None:
    """Let every torch Adam in `optimizer` step in one fused kernel for all parameters, in place.

    Megatron builds it without: on CUDA the `foreach` form then holds temporaries of several times the parameters, on a
    CPU the plain form makes ten passes a parameter. Fused steps differ by rounding alone.
    """
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = getattr(part, "optimizer", None)
        for adam in getattr(inner, "sub_optimizers", [inner]):  # several where the optimizer is offloaded to the host
            if isinstance(adam, (torch.optim.Adam, torch.optim.AdamW)):
                _fuse(adam)
                adam.register_load_state_dict_post_hook(_fuse)  # a checkpoint brings its own groups


def _fuse(adam: torch.optim.Optimizer) -> None:
    for group in adam.param_groups:
        group["fused"], group["foreach"] = True, False
    for param, state in adam.state.items():
        if isinstance(state.get("step"), torch.Tensor):  # the fused kernel wants it where the parameter is
            state["step"] = state["step"].to(param.device, torch.float32)


def repair(optimizer: MegatronOptimizer) -> None:
    """Give every distributed optimizer in `optimizer` this project's way with checkpoints, in place."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if type(part) is DistributedOptimizer:
            torch_adam = isinstance(part.optimizer, (torch.optim.Adam, torch.optim.AdamW))
            part.__class__ = TorchAdamDistributedOptimizer if torch_adam else LeanDistributedOptimizer
