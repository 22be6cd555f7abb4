"""Random small models and layouts, for what must hold for all of them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch

from dppo_megatron.config.schema import ActorConfig
from support.tiny import Parallel


@dataclass(frozen=True)
class Drawn:
    """A model, how it is split, and what is recomputed."""

    family: str
    parallel: Parallel
    recompute: str
    modules: list[str] = field(default_factory=list)
    sizes: dict[str, Any] = field(default_factory=dict)

    @property
    def actor(self) -> ActorConfig:
        """The settings that a plan reads."""
        actor = ActorConfig(layout=self.parallel.layout, recompute=self.recompute, recompute_modules=self.modules)  # type: ignore[arg-type]
        actor.optimizer.distributed = self.parallel.distributed_optimizer
        return actor


def draw(seed: int, count: int, world_size: int, *, stages: bool) -> list[Drawn]:
    """`count` of them for `world_size` ranks on a CPU; pipeline stages only if `stages`."""
    random_ = random.Random(1000 * seed + world_size)
    return [_one(random_, world_size, stages) for _ in range(count)]


def _one(random_: random.Random, world_size: int, stages: bool) -> Drawn:
    family = random_.choice(["qwen3", "qwen2", "llama3", "qwen3_moe", "qwen3_moe"])
    mixture = family == "qwen3_moe"
    sizes = _sizes(random_, family)
    recompute = random_.choice(["none", "none", "selective", "full"])
    pool = ["core_attn", "moe" if mixture else "mlp", "layernorm"]
    modules = random_.sample(pool, random_.randrange(1, 4)) if recompute == "selective" else []
    return Drawn(family, _parallel(random_, world_size, stages, mixture, sizes), recompute, modules, sizes)


def _sizes(random_: random.Random, family: str) -> dict[str, Any]:
    """Overrides of `write_model`; large enough that a norm's weight is no figure of its own."""
    heads, head_dim = random_.choice([4, 8]), random_.choice([16, 32, 64])
    sizes = {
        "num_attention_heads": heads,
        "num_key_value_heads": random_.choice([groups for groups in (1, 2, 4, 8) if heads % groups == 0]),
        "head_dim": head_dim,
        "hidden_size": heads * head_dim if family == "qwen2" else random_.choice([96, 128, 192, 256, 320]),
        "intermediate_size": random_.choice([64, 160, 320, 640]),
        "vocab_size": random_.randrange(100, 2500),
        "num_hidden_layers": random_.choice([2, 4]),
        "tie_word_embeddings": random_.random() < 0.5,
    }
    if family == "qwen3_moe":
        experts = random_.choice([4, 8])
        sizes |= {
            "num_experts": experts,
            "num_experts_per_tok": random_.randrange(2, experts + 1),
            "moe_intermediate_size": random_.choice([32, 64, 160]),
        }
    return sizes


def _parallel(random_: random.Random, world_size: int, stages: bool, mixture: bool, sizes: dict[str, Any]) -> Parallel:
    while True:
        tp, cp = random_.choice([1, 2, 4]), random_.choice([1, 1, 2])
        pp = random_.choice([1, 2]) if stages else 1
        ep, etp = (random_.choice([1, 2]), random_.choice([0, 1])) if mixture else (1, 0)
        of_experts = etp or tp
        fits = world_size % (tp * pp * cp) == 0 and world_size % (of_experts * ep * pp) == 0
        # gloo cannot gather over both at a time, and Megatron reduces gradients wrongly without either
        if fits and not (ep > 1 and of_experts > 1) and not (of_experts < tp and ep == 1):
            break
    return Parallel(
        tp=tp,
        pp=pp,
        dp=world_size // (tp * pp * cp),
        cp=cp,
        ep=ep,
        etp=etp,
        sequence_parallel=mixture or random_.random() < 0.7,
        distributed_optimizer=random_.random() < 0.7,
        dtype=random_.choice([torch.float32, torch.bfloat16]),
    )
