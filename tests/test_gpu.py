"""What only a CUDA device can show. Run with `python -m pytest -m gpu`; skipped, with the reason, elsewhere.

One process and one device: CUDA forbids the forked ranks that the other tests use.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.tiny import hf_logprobs, plan_for, random_samples, write_model
from transformers import AutoModelForCausalLM

from dppo_megatron.actor.actor import Actor
from dppo_megatron.actor.layout import Layout, build_layout, start_process_group, stop_process_group
from dppo_megatron.config.schema import ActorConfig, Config, LayoutConfig, ModelConfig, OptimizerConfig, PackingConfig
from dppo_megatron.doctor.fp8_gate import run_gate
from dppo_megatron.platform.capabilities import this_machine
from dppo_megatron.types import UserError
from dppo_megatron.weights.architecture import read_architecture
from dppo_megatron.weights.hf_files import CheckpointReader

pytestmark = pytest.mark.gpu

SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "vocab_size": 512, "num_hidden_layers": 4}
SPECS = ["local", pytest.param("te", marks=pytest.mark.skipif("not this_machine().has_transformer_engine"))]


@pytest.fixture(scope="module")
def layout() -> Iterator[Layout]:
    """Built once: Megatron refuses to build its groups twice in a process."""
    start_process_group()
    yield build_layout(LayoutConfig(), 0)
    stop_process_group()


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), **SIZES)


def _actor(layout: Layout, model_path: Path, **settings: object) -> Actor:
    config = replace(ActorConfig(optimizer=OptimizerConfig(distributed=False)), **settings)
    architecture = read_architecture(model_path)
    reader = CheckpointReader(model_path, architecture)
    return Actor(config, layout, architecture, reader.get, dtype=torch.bfloat16)


@pytest.mark.parametrize("spec", SPECS)
def test_packed_logprobs_equal_transformers(layout: Layout, model_path: Path, spec: str) -> None:
    """Both layer specs on CUDA in bfloat16 against transformers in float32: the mean difference is rounding's."""
    samples = random_samples(32, SIZES["vocab_size"], longest=200)
    computed = _actor(layout, model_path, layer_spec=spec).logprobs(samples, plan_for(samples, cap=1024))
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    difference = np.concatenate(computed) - np.concatenate(hf_logprobs(model, samples))
    assert np.abs(difference).mean() < 0.05


@pytest.mark.parametrize("fp8", ["off", "tensorwise", "delayed", "blockwise", "mxfp8"])
def test_gate(layout: Layout, model_path: Path, fp8: str) -> None:
    """Packing and each FP8 recipe that the chip has stay within the gate's bounds."""
    try:
        this_machine().choose_layer_spec("auto", fp8)
    except UserError as reason:
        pytest.skip(str(reason))
    config = Config(
        model=ModelConfig(hf_path=str(model_path), dtype="bfloat16"),
        actor=ActorConfig(fp8=fp8),
        packing=PackingConfig(max_tokens_per_microbatch=2048),
    )
    architecture = read_architecture(model_path)
    findings = run_gate(config, layout, architecture, CheckpointReader(model_path, architecture).get)
    assert all(finding.passed for finding in findings), findings


def test_long_pack_does_not_hold_whole_logits(layout: Layout, model_path: Path) -> None:
    """Log-probabilities of a 32k-token pack at a vocabulary of 512 stay below its float32 logits on the device."""
    samples = random_samples(400, SIZES["vocab_size"], longest=200)
    actor = _actor(layout, model_path, logprob_chunk_tokens=512)
    plan = plan_for(samples, cap=65536)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    actor.logprobs(samples, plan)
    logits_bytes = 4 * plan.num_tokens * SIZES["vocab_size"]
    hidden_bytes = 2 * plan.num_tokens * SIZES["intermediate_size"] * 4  # gate, up, product and their inputs
    assert torch.cuda.max_memory_allocated() - before < logits_bytes + hidden_bytes
