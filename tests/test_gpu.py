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
from megatron.core import parallel_state
from support.tiny import hf_logprobs, plan_for, random_samples, write_model
from transformers import AutoModelForCausalLM

from dppo_megatron.actor.actor import Actor
from dppo_megatron.actor.layout import Layout, build_layout, start_process_group, stop_process_group
from dppo_megatron.actor.logprobs import chunked_logprobs
from dppo_megatron.actor.softmax import Projection, TorchSoftmax
from dppo_megatron.algorithms.objectives import supervised
from dppo_megatron.config.schema import ActorConfig, Config, LayoutConfig, ModelConfig, OptimizerConfig, PackingConfig
from dppo_megatron.platform.capabilities import this_machine
from dppo_megatron.types import UserError
from dppo_megatron.weights.architecture import read_architecture
from dppo_megatron.weights.hf_files import CheckpointReader
from dppo_megatron.workbench.doctor.fp8_gate import run_gate

pytestmark = pytest.mark.gpu

SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "vocab_size": 512, "num_hidden_layers": 4}
SPECS = ["local", pytest.param("te", marks=pytest.mark.skipif("this_machine().lacks_transformer_engine"))]


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
        this_machine().choose_layer_spec("auto", fp8, has_experts=False)
    except UserError as reason:
        pytest.skip(str(reason))
    config = Config(
        model=ModelConfig(hf_path=str(model_path), dtype="bfloat16"),
        actor=ActorConfig(fp8=fp8),
        packing=PackingConfig(max_tokens_per_microbatch=2048),
    )
    architecture = read_architecture(model_path)
    findings = run_gate(config, layout, architecture, CheckpointReader(model_path, architecture).get)
    assert findings and [finding for finding in findings if not finding.passed] == []


def test_long_pack_does_not_hold_whole_logits(layout: Layout, tmp_path: Path) -> None:
    """Log-probabilities of 400 samples in one pack, at logits 128 times as wide as the hidden states: what the layers
    hold is small beside them."""
    vocabulary = 32_768
    path = write_model(tmp_path, **SIZES | {"vocab_size": vocabulary})
    samples = random_samples(400, vocabulary, longest=200)
    actor, plan = _actor(layout, path, logprob_chunk_tokens=512), plan_for(samples, cap=65536)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    actor.logprobs(samples, plan)
    logits_bytes = 2 * plan.num_tokens * vocabulary  # in bfloat16
    assert torch.cuda.max_memory_allocated() - before < logits_bytes / 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fused_log_probabilities_equal_torchs(layout: Layout, dtype: torch.dtype) -> None:
    """The compiled Triton kernels against torch's operations at a real vocabulary, values and both gradients."""
    pytest.importorskip("triton")
    from dppo_megatron.actor.fused_softmax import TritonSoftmax

    generator = torch.Generator(layout.device).manual_seed(0)
    of = {"generator": generator, "device": layout.device}
    group = parallel_state.get_tensor_model_parallel_group()
    hidden = torch.randn(300, 256, **of).to(dtype)
    weight = (torch.randn(151_936, 256, **of) / 16).to(dtype)
    targets = torch.randint(0, 151_669, (300,), **of)
    found = []
    for softmax in (TritonSoftmax(), TorchSoftmax()):
        inputs = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        values = chunked_logprobs(*inputs, targets, Projection(151_669, 0.7, 128, group, softmax))
        (values[0].sum() + 0.1 * values[1].sum()).backward()
        found.append([*values, *(tensor.grad for tensor in inputs)])
    for fused, plain in zip(*found, strict=True):
        bound = 1e-5 if fused.dtype == torch.float32 else 1e-2  # two roundings of bfloat16
        assert (fused.float() - plain.float()).norm() <= bound * plain.float().norm()


@pytest.mark.parametrize("spec", SPECS)
def test_the_device_is_left_and_found_again(layout: Layout, model_path: Path, spec: str) -> None:
    """Allocated bytes while away are below a tenth of what they were, and two updates train the same weights, but for
    the order in which a GPU's attention sums its gradients."""
    samples = random_samples(32, SIZES["vocab_size"], longest=200)
    plan = plan_for(samples, cap=1024)
    weights = []
    for leaves in (False, True):
        before = torch.cuda.memory_allocated()
        actor = _actor(layout, model_path, layer_spec=spec)
        actor.start_phase(OptimizerConfig(distributed=False, learning_rate=1e-3), 4)
        for _ in range(2):
            actor.update(samples, plan, supervised())
            held = torch.cuda.memory_allocated() - before
            if leaves:
                actor.offload(weights=True)
                assert torch.cuda.memory_allocated() - before < 0.1 * held
        weights.append({name: tensor.cpu() for name, tensor in actor.weights()})
        del actor
    for name, tensor in weights[0].items():
        assert (weights[1][name].float() - tensor.float()).norm() < 0.02 * tensor.float().norm(), name
