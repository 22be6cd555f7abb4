"""Gemma 3 and GLM-4, which has norms behind attention and feed-forward too: log-probabilities and gradients are
transformers' at every layout, and Gemma's windows end where theirs do.

Gradients in float64, but for the norms, which transformers computes in float32 whatever the model's type.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.launch import run_ranks
from support.tiny import Parallel, build_actor, hf_logprobs, plan_for, random_samples, write_model
from transformers import AutoModelForCausalLM

from dppo_megatron.actor.attention import NormedResidual
from dppo_megatron.algorithms.objectives import supervised
from dppo_megatron.config.schema import ActorConfig, Config, LayoutConfig
from dppo_megatron.job import check_settings
from dppo_megatron.platform.capabilities import Machine
from dppo_megatron.types import UserError
from dppo_megatron.weights.architecture import read_architecture
from dppo_megatron.weights.layer_parts import Gemma

# nothing is a power of two; no padding token, for whose row of the embedding transformers drops the gradient
SIZES = {"family": "gemma3", "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10, "hidden_size": 42}
SIZES |= {"intermediate_size": 66, "num_hidden_layers": 8, "tie_word_embeddings": True, "pad_token_id": None}
GLM4 = {"family": "glm4", "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 12, "hidden_size": 42}
GLM4 |= {"intermediate_size": 66, "num_hidden_layers": 6}
DOUBLE: dict[str, Any] = {"dtype": torch.float64}
LAYOUTS = [
    Parallel(**DOUBLE),
    Parallel(tp=2, **DOUBLE),
    Parallel(tp=2, sequence_parallel=False, **DOUBLE),
    Parallel(pp=2, **DOUBLE),
    Parallel(tp=2, pp=2, recompute=True, **DOUBLE),
    Parallel(cp=2, **DOUBLE),
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("gemma"), **SIZES)


@pytest.fixture(scope="module")
def expected(path: Path) -> tuple[list[np.ndarray], dict[str, torch.Tensor]]:
    return _expected(path)


def _expected(path: Path, **how: Any) -> tuple[list[np.ndarray], dict[str, torch.Tensor]]:
    """transformers' log-probabilities and gradient of the weighted loss, one sequence at a time."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, **how).eval()
    found = []
    for sample in random_samples(9, 37):
        ids = torch.from_numpy(sample.token_ids)
        logits = model(ids[None, :-1]).logits[0, sample.num_prompt_tokens - 1 :]
        picked = logits.log_softmax(-1).gather(1, ids[sample.num_prompt_tokens :, None])[:, 0]
        (-picked.sum() * sample.weight / sample.denominator).backward()
        found.append(picked.detach().numpy())
    return found, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _measure(path: Path, parallel: Parallel) -> tuple[Any, dict[str, torch.Tensor]]:
    actor, samples = build_actor(path, parallel), random_samples(9, 37)
    plan = plan_for(samples, parallel)
    logprobs = actor.logprobs(samples, plan)
    actor.accumulate(samples, plan, supervised())
    return logprobs, {name: gradient.clone() for name, gradient in actor.gradients()}


@pytest.mark.parametrize("parallel", LAYOUTS, ids=str)
def test_equals_transformers(path: Path, expected: Any, parallel: Parallel) -> None:
    """Log-probabilities within 1e-5, the gradient of each parameter within 1e-5 of its norm."""
    _check_equal(run_ranks(_measure, parallel.world_size, path, parallel)[0], expected)


@pytest.fixture(scope="module")
def glm_4(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A model, and transformers' values."""
    path = write_model(tmp_path_factory.mktemp("glm"), **GLM4)
    return path, _expected(path)


@pytest.mark.parametrize("parallel", LAYOUTS, ids=str)
def test_glm_4_equals_transformers(glm_4: tuple[Path, Any], parallel: Parallel) -> None:
    """The same bounds."""
    path, theirs = glm_4
    _check_equal(run_ranks(_measure, parallel.world_size, path, parallel)[0], theirs)


def _check_equal(found: Any, expected: Any) -> None:
    logprobs, gradients = found
    for mine, theirs in zip(logprobs, expected[0], strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-5)
    assert gradients.keys() == expected[1].keys()
    for name, theirs in expected[1].items():
        assert theirs.norm() > 0
        assert (gradients[name] - theirs).norm() <= 1e-5 * theirs.norm(), name


def _logprobs(paths: list[Path], dtype: torch.dtype) -> list[Any]:
    samples, parallel = random_samples(9, 37), Parallel(dtype=dtype)
    return [build_actor(path, parallel).logprobs(samples, plan_for(samples, parallel)) for path in paths]


def test_a_window_ends_where_transformers_has_it_end(tmp_path: Path) -> None:
    """Windows of one token, of three, of all but the first of the longest sample, and wider than any: transformers'
    values to 1e-5, where one token more or less moves them by 1e-3."""
    samples = random_samples(9, 37)
    longest = max(sample.num_tokens for sample in samples)
    windows = (1, 2, 3, longest - 1, longest, 1000)
    paths = [write_model(tmp_path / str(window), **SIZES, sliding_window=window) for window in windows]
    values = [np.concatenate(one) for one in run_ranks(_logprobs, 1, paths, torch.float32)[0]]
    for path, mine in zip(paths, values, strict=True):
        model = AutoModelForCausalLM.from_pretrained(path).eval()
        np.testing.assert_allclose(mine, np.concatenate(hf_logprobs(model, samples)), rtol=0, atol=1e-5)
    for one, other in itertools.pairwise(values[:4]):
        assert np.abs(one - other).max() > 1e-3
    np.testing.assert_array_equal(values[-2], values[-1])


def test_bfloat16_rounds_where_transformers_does(path: Path) -> None:
    """The error of bfloat16, as float32 measures it, is no larger than transformers' own."""
    samples = random_samples(9, 37)
    exact, theirs = (
        np.concatenate(hf_logprobs(AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval(), samples))
        for dtype in (torch.float32, torch.bfloat16)
    )
    mine = np.concatenate(run_ranks(_logprobs, 1, [path], torch.bfloat16)[0][0])
    assert np.abs(mine - exact).mean() < 1.3 * np.abs(theirs - exact).mean()


def test_a_pass_without_gradients_keeps_nothing() -> None:
    """Megatron switches gradients on around its place for the residual, also while log-probabilities are computed."""
    residual, output = torch.ones(3, 1, 4), torch.rand(3, 1, 4)
    add = NormedResidual(lambda hidden_size, **_: torch.nn.RMSNorm(hidden_size), _Sizes())(True, False)
    with torch.enable_grad():
        assert not add((output, None), residual, 0.0).requires_grad
        assert add((output.requires_grad_(), None), residual, 0.0).requires_grad


class _Sizes:
    hidden_size, layernorm_epsilon = 4, 1e-6


def test_windows_over_context_ranks_need_the_local_layers(path: Path) -> None:
    """Transformer Engine's attention over packs has none there: refused before anything is built."""
    long = replace(read_architecture(path), max_positions=4096, head_dim=128)  # a size that it has fused kernels for
    machine, layout = Machine((9, 0), ""), LayoutConfig(context_parallel=2)
    with pytest.raises(UserError, match="context_parallel = 2: Transformer Engine's attention has no windows"):
        check_settings(Config(actor=ActorConfig(layout=layout)), long, 2, machine)
    check_settings(Config(actor=ActorConfig(layout=layout, layer_spec="local")), long, 2, machine)
    assert isinstance(long.gemma, Gemma)
    check_settings(Config(actor=ActorConfig(layout=layout)), replace(long, gemma=None), 2, machine)
