"""The plan against figures that others have published; docs/plan.md names the pages."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.true_shapes import MODELS, write_config

from dppo_megatron.config.schema import ActorConfig, Config
from dppo_megatron.planning.activations import Pass, layer_saved
from dppo_megatron.planning.engine import cache_per_token, plan_engine
from dppo_megatron.planning.memory import state_bytes
from dppo_megatron.planning.shares import Degrees, share_of, whole_model
from dppo_megatron.planning.site import CHIPS, GIB, Site
from dppo_megatron.planning.timing import Lengths, plan_timing, speeds_for
from dppo_megatron.weights.architecture import Architecture, read_architecture


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Architecture]:
    folder = tmp_path_factory.mktemp("shapes")
    return {name: read_architecture(write_config(folder / name, name)) for name in MODELS}


LLAMA = {"num_layers": 32, "hidden_size": 4096, "ffn_size": 14336, "vocab_size": 128256, "qk_norm": False}
"""Llama-3.1-8B's sizes, on top of Qwen3-8B's."""


@pytest.mark.parametrize(
    ("name", "billions"), [("qwen3_4b", 4.02), ("qwen3_8b", 8.19), ("qwen3_32b", 32.76), ("qwen3_30b_a3b", 30.53)]
)
def test_parameters(shapes: dict[str, Architecture], name: str, billions: float) -> None:
    """The model cards' counts."""
    assert whole_model(shapes[name]) / 1e9 == pytest.approx(billions, abs=0.005)


@pytest.mark.parametrize("ranks", [1, 4, 8])
def test_bytes_a_parameter(shapes: dict[str, Architecture], ranks: int) -> None:
    """Megatron's table of its distributed optimizer: 6 + 12 / d in bfloat16 with float32 gradients, 8 + 8 / d in
    float32; 18 and 16 without it."""
    degrees, actor = Degrees(ranks, 1, 1, 1, 1, 1, 1, False), ActorConfig()
    share = share_of(shapes["qwen3_8b"], degrees, 0)
    for distributed, dtype, each in (
        (True, "bfloat16", 6 + 12 / ranks),
        (True, "float32", 8 + 8 / ranks),
        (False, "bfloat16", 18),
        (False, "float32", 16),
    ):
        actor.optimizer.distributed = distributed
        total = sum(state_bytes(share, degrees, actor, dtype).values())
        assert total / share.count() == pytest.approx(each, rel=1e-3)


def test_weights_in_vllm(shapes: dict[str, Architecture]) -> None:
    """Qwen3-30B-A3B on one of four GPUs: "Model loading took 14.2474 GiB" (vllm#17327)."""
    config = Config()
    config.rollout.engine, config.rollout.servers.launch = "vllm", "local"
    config.rollout.servers.args = ["--tensor-parallel-size=4"]
    site = Site(8, 8, CHIPS["h100"].memory_bytes, CHIPS["h100"].peak_flops, 1e15)
    assert plan_engine(config, shapes["qwen3_30b_a3b"], site, 4096).weights / GIB == pytest.approx(14.2474, rel=0.01)


def test_key_value_cache(shapes: dict[str, Architecture]) -> None:
    """Qwen3-235B-A22B (94 layers, 4 key-value heads of 128) on one of four GPUs: 8.11 GiB are 178,880 tokens
    (vllm#21348; vLLM rounds down to whole blocks)."""
    shape = replace(shapes["qwen3_30b_a3b"], num_layers=94)
    assert 178_880 * cache_per_token(shape, 4, 2) / GIB == pytest.approx(8.11, rel=0.02)


def test_activations_against_megatrons_formula(shapes: dict[str, Architecture]) -> None:
    """Megatron-LM estimates (18 + 4 F / H) H bytes a token of a layer for attention of H and an MLP that keeps 2 F
    elements. Ours for the same shape keeps 3 F (two halves and their product) and grouped keys: within a quarter."""
    shape = replace(shapes["qwen3_8b"], **LLAMA)  # type: ignore[arg-type]
    degrees = Degrees(8, 8, 1, 1, 1, 1, 8, True)
    one = Pass(shape, degrees, 8192, 2, "te", fused_swiglu=True)
    published = 8192 * (18 * shape.hidden_size + 4 * shape.ffn_size) / 8
    assert sum(layer_saved(one).values()) == pytest.approx(published, rel=0.25)


@pytest.mark.parametrize(
    ("name", "gpus", "tokens", "step_s", "layout", "recompute"),
    [
        ("qwen3_32b", 32, 3206, 393, (1, 1), "none"),
        ("qwen3_30b_a3b", 32, 3154, 225, (1, 8), "none"),
        ("llama", 16, 1060, 97.7, (1, 1), "none"),
    ],
)
def test_seconds_of_nemo_rl(
    shapes: dict[str, Architecture],
    name: str,
    gpus: int,
    tokens: int,
    step_s: float,
    layout: tuple[int, int],
    recompute: str,
) -> None:
    """The step times that the decode speeds were derived from come out again, within 10 %: no pipeline bubble, no
    recomputation, old and reference log-probabilities, no checkpoint."""
    shape = replace(shapes["qwen3_8b"], **LLAMA) if name == "llama" else shapes[name]  # type: ignore[arg-type]
    config = Config()
    config.actor.layout.tensor_parallel, config.actor.layout.expert_parallel = layout
    config.rollout.engine, config.rollout.servers.launch = "vllm", "local"
    config.rollout.servers.args = ["--tensor-parallel-size=4", "--data-parallel-size=2"]
    config.rollout.prompts_per_step, config.rollout.completions_per_prompt = 64, 32
    config.objective.kl.coef, config.objective.old_logprobs = 0.01, "recompute"
    site = Site(gpus, 8, CHIPS["h100"].memory_bytes, CHIPS["h100"].peak_flops, 1e15)
    engine = plan_engine(config, shape, site, 4096)
    timing = plan_timing(config, shape, site, engine, Lengths(150, tokens - 150), speeds_for(shape, site))
    assert timing is not None and timing.step_s == pytest.approx(step_s, rel=0.1)
