"""What a rank of a large job costs to set up: groups, actor, optimizer and routes, alone in its process.

torch's `fake` process group stands for all other ranks. What they would report is derived from the layout
(`routes.py`). `tests/rehearsal/test_cluster_scale.py` runs the same and checks the counts.
"""

from __future__ import annotations

import os
import pickle
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dppo_megatron import platform
from plane.common import Bar, cpu_s, on_ranks
from plane.routes import KEYS, QWEN3_235B, reports_of_all

SMALL = replace(QWEN3_235B, layers=8, hidden=256, heads=64, kv_heads=8, head=8, ffn=64, vocab=1024, tp=8, pp=4, ep=8)
"""8 layers of Qwen3-235B-A22B with its 128 experts, narrow: widths change no count, and the real ones would only
measure how fast a CPU clears memory. 8 key-value heads, since its 4 cannot be split in 8."""
GB = 1 << 30


def write_shape(folder: Path) -> None:
    """The config.json of SMALL."""
    from transformers import Qwen3MoeConfig

    Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"],
        hidden_size=SMALL.hidden,
        intermediate_size=128,
        moe_intermediate_size=SMALL.ffn,
        num_hidden_layers=SMALL.layers,
        num_attention_heads=SMALL.heads,
        num_key_value_heads=SMALL.kv_heads,
        head_dim=SMALL.head,
        num_experts=SMALL.experts,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        vocab_size=SMALL.vocab,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    ).save_pretrained(folder)


def one_rank(rank: int, world: int, model: Path) -> dict[str, Any]:
    """Groups, actor, optimizer and routes of `rank`, as `train` makes them, in a process that has a group of one."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from dppo_megatron.actor.actor import Actor
    from dppo_megatron.actor.layout import build_layout
    from dppo_megatron.config.schema import ActorConfig, LayoutConfig
    from dppo_megatron.weights.architecture import read_architecture
    from dppo_megatron.weights.mapping import hf_shapes, kinds
    from dppo_megatron.weights.routes import RankReport

    dist.destroy_process_group()
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    os.environ["LOCAL_RANK"] = str(rank % 8)
    reports = reports_of_all(world, SMALL)
    own_reports: list[RankReport] = []
    gather = dist.all_gather_object

    def gather_reports(out: list[Any], mine: Any, *rest: Any, **named: Any) -> None:
        """The fake group fills `out` with this rank's own object: put the others' reports there."""
        gather(out, mine, *rest, **named)
        if mine and isinstance(mine[0], RankReport):
            own_reports.extend(mine)
            out[:] = [[report] for report in reports]

    dist.all_gather_object = gather_reports  # type: ignore[assignment]
    layout_config = LayoutConfig(
        tensor_parallel=8, pipeline_parallel=4, context_parallel=2, expert_parallel=8, expert_tensor_parallel=1
    )
    config = ActorConfig(layout=layout_config)
    config.optimizer.distributed = True
    architecture = read_architecture(model)
    shapes, rows = hf_shapes(architecture), kinds(architecture)
    memory, started = _anonymous_bytes(), cpu_s()
    layout = build_layout(layout_config, 0)
    actor = Actor(config, layout, architecture, lambda name: torch.zeros(shapes[name]), dtype=torch.bfloat16)
    actor.start_phase(config.optimizer, 10)
    routes = actor._stream._catalogue.plan(range(world), 1 << 22, rank)
    seconds, memory = cpu_s() - started, _anonymous_bytes() - memory
    real, derived = ({pickle.loads(text) for text in one.blocks} for one in (own_reports[0], reports[rank]))
    return {
        "report": real == derived and own_reports[0].node == reports[rank].node,
        "keys": [key for key in KEYS if key in rows] == list(rows),
        "groups": [group.size() for group in dist.distributed_c10d._world.pg_map],
        "memory": memory,
        "seconds": seconds,
        "routes": routes,
        "config": config,
    }


def _anonymous_bytes() -> int:
    """Memory of this process that it shares with no other."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def _cost(world: int, model: Path) -> tuple[float, float]:
    result = one_rank(world // 2 + 5, world, model)
    return result["seconds"], result["memory"] / GB


def run(smoke: bool) -> list[Bar]:
    """The cost of a rank in a middle stage."""
    platform.prepare()
    import megatron.core.optimizer  # noqa: F401
    import torch._dynamo  # noqa: F401 (torch's optimizers import it when they are made)

    bars = []
    with tempfile.TemporaryDirectory() as folder:
        write_shape(Path(folder))
        for world in (256,) if smoke else (256, 1024):
            [(seconds, memory)] = on_ranks(1, _cost, world, Path(folder))
            what = f"8 layers of 235B, narrow, tp8 pp4 cp2 ep8, {world} ranks"
            bars.append(Bar("actor", f"{what}: groups to routes", seconds, 2.0, "CPU s", is_time=True))
            bars.append(Bar("actor", f"{what}: memory", memory, 1.0, "GB"))
    return bars
