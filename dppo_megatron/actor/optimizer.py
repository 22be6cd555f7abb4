"""Builds Megatron's optimizer and learning-rate schedule from our settings."""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from dppo_megatron.actor.torch_adam import repair, use_fused_kernels
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
    if (config.moments, config.main_parameters) != ("float32", "float32"):
        moments = getattr(torch, config.moments)
        settings |= {"exp_avg_dtype": moments, "exp_avg_sq_dtype": moments}
        settings["main_params_dtype"] = getattr(torch, config.main_parameters)
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
