"""Every parallel layout trains the same model: the layouts of one job must not be able to tell on the result.

Tolerances: 3 steps in float32. A sum of a few thousand float32 terms taken in another order moves by some 1e-7
relative. Adam divides by sqrt(v) and so amplifies that for the few single weights whose gradient is nearly 0, which is
why updated weights are compared as tensors: norm of the difference against norm of the weights, 1e-5.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.launch import run_ranks
from support.tiny import Parallel, build_actor, plan_for, random_samples, write_model

from dppo_megatron.algorithms.objectives import TokenBatch, TokenLoss, clipped_surrogate
from dppo_megatron.config.schema import ActorConfig
from dppo_megatron.packing.alignment import PackingLayout
from dppo_megatron.types import PackPlan, TrainSample, UserError
from dppo_megatron.weights.architecture import read_architecture

pytestmark = pytest.mark.slow

STEPS = 3
VOCAB = 37

LAYOUTS = [
    Parallel(tp=2),
    Parallel(tp=2, sequence_parallel=False),
    Parallel(pp=2),
    Parallel(tp=2, pp=2),
    Parallel(dp=2),
    Parallel(dp=2, distributed_optimizer=True),
    Parallel(distributed_optimizer=True),
    Parallel(tp=2, pp=2, recompute=True),
    Parallel(pp=2, vpp=2),
    Parallel(pp=2, vpp=2, dp=2, distributed_optimizer=True),
    Parallel(tp=2, pp=2, vpp=2),
    Parallel(cp=2),
    Parallel(cp=2, pp=2),
    Parallel(tp=2, cp=2, dp=2, distributed_optimizer=True),
    Parallel(tp=2, pp=2, dp=2, distributed_optimizer=True),
    Parallel(tp=2, pp=2, vpp=2, cp=2, distributed_optimizer=True),
    Parallel(pp=2, uneven=(("num_layers_in_last_pipeline_stage", 1),), distributed_optimizer=True),
    Parallel(pp=4, uneven=(("pipeline_model_parallel_layout", "E|ttt|t|L"),), distributed_optimizer=True),
    Parallel(pp=2, vpp=2, dp=2, uneven=(("pipeline_model_parallel_layout", "Ett|t|t|L"),), distributed_optimizer=True),
]
MOE_LAYOUTS = [
    Parallel(ep=2, dp=2),
    Parallel(ep=2, dp=2, distributed_optimizer=True),
    Parallel(tp=2, etp=2),
    Parallel(tp=2, ep=2, etp=1, pp=2),
    Parallel(cp=2, ep=2),
    Parallel(ep=2, dp=2, pp=2, vpp=2, distributed_optimizer=True),
]


def _objective(batch: TokenBatch) -> TokenLoss:
    """The clipped surrogate, and all else that the actor computes of a token."""
    result = clipped_surrogate(0.2, 0.28, 3.0)(batch)
    diff = (batch.logprobs - batch.behaviour_logprobs).detach().abs()
    return TokenLoss(result.loss, result.diagnostics | {"entropy": batch.entropy.detach(), "logprob_abs_diff": diff})


def _no_shape(*_: object) -> None:
    raise AssertionError("a stage has sent the shape of a pack, which the other knows")


def _train(model_path: Path, parallel: Parallel, plan_kind: str) -> dict[str, object]:
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    P2PCommunicator._communicate_shapes = _no_shape
    actor = build_actor(model_path, parallel)
    samples = random_samples(24, VOCAB)
    plan = _plan(samples, parallel, plan_kind)
    assert parallel.vpp > 1 or len({pack.num_tokens for pack in plan.microbatches[0]}) > 1, "lengths differ"
    metrics = [actor.update(samples, plan, _objective).figures() for _ in range(STEPS)]
    return {"metrics": metrics, "weights": {name: tensor.numpy() for name, tensor in actor.weights()}}


def _plan(samples: list[TrainSample], parallel: Parallel, kind: str) -> PackPlan:
    if kind == "unpacked":
        return plan_for(samples, parallel, mode="none")
    if kind == "packed":
        return plan_for(samples, parallel)
    order = np.random.default_rng(5).permutation(len(samples)).tolist()
    lengths = [sample.num_tokens for sample in samples]
    thirds = tuple(PackingLayout().place(order[i::3], lengths) for i in range(3))
    return PackPlan((thirds,), 4096, sum(lengths), {})


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), vocab_size=VOCAB)


@pytest.fixture(scope="module")
def moe_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("moe"), family="qwen3_moe", vocab_size=VOCAB)


@pytest.fixture(scope="module")
def moe_reference(moe_path: Path) -> dict[str, object]:
    return run_ranks(_train, 1, moe_path, Parallel(), "packed")[0]


@pytest.fixture(scope="module")
def reference(model_path: Path) -> dict[str, object]:
    return run_ranks(_train, 1, model_path, Parallel(), "packed")[0]


def _assert_same(result: dict, reference: dict, bound: float = 1e-5) -> None:
    for step, (mine, theirs) in enumerate(zip(result["metrics"], reference["metrics"], strict=True)):
        for key in ("loss", "grad_norm", "entropy", "logprob_abs_diff", "ratio", "clip_fraction"):
            assert mine[key] == pytest.approx(theirs[key], rel=1e-5, abs=1e-6), f"step {step}: {key}"
        assert mine["learning_rate"] == theirs["learning_rate"]
    for name, weight in reference["weights"].items():
        difference = np.linalg.norm(result["weights"][name] - weight) / np.linalg.norm(weight)
        assert difference < bound, f"{name}: updated weights differ by {difference:.1e}"


@pytest.mark.parametrize("parallel", LAYOUTS, ids=str)
def test_layout_agrees_with_one_process(model_path: Path, reference: dict, parallel: Parallel) -> None:
    """Loss, gradient norm and updated weights are those of one process."""
    results = run_ranks(_train, parallel.world_size, model_path, parallel, "packed")
    _assert_same(results[0], reference)
    for other in results[1:]:
        assert other["metrics"] == results[0]["metrics"], "ranks report different metrics"


@pytest.mark.parametrize("parallel", MOE_LAYOUTS, ids=str)
def test_experts_agree_with_one_process(moe_path: Path, moe_reference: dict, parallel: Parallel) -> None:
    """The same for a mixture of experts, whose routed tokens cross ranks."""
    results = run_ranks(_train, parallel.world_size, moe_path, parallel, "packed")
    _assert_same(results[0], moe_reference, bound=3e-5)


def test_a_stage_of_dense_layers_agrees_with_one_process(tmp_path: Path) -> None:
    """GLM's first layer has no experts, and is a stage of its own. Where ranks share experts it is refused: these then
    have an optimizer of their own, which would have no step to save."""
    path = write_model(tmp_path, family="glm4_moe", vocab_size=VOCAB, first_k_dense_replace=1)
    alone = Parallel(pp=2, uneven=(("num_layers_in_first_pipeline_stage", 1),), distributed_optimizer=True)
    architecture, actor = read_architecture(path), ActorConfig(layout=alone.layout, megatron=dict(alone.uneven))
    architecture.check_layout(actor)
    results = run_ranks(_train, 2, path, alone, "packed")
    _assert_same(results[0], run_ranks(_train, 1, path, Parallel(), "packed")[0], bound=3e-5)
    actor.layout.expert_parallel = 2
    with pytest.raises(UserError, match="stage 0 would have no layer with experts"):
        architecture.check_layout(actor)


@pytest.mark.parametrize("kind", ["unpacked", "shuffled"])
def test_packing_does_not_matter(model_path: Path, reference: dict, kind: str) -> None:
    """One sequence a micro-batch, or any other packing and order, gives the dense plan's result."""
    _assert_same(run_ranks(_train, 1, model_path, Parallel(), kind)[0], reference)


def test_training_moved_the_weights(model_path: Path, reference: dict) -> None:
    """Guards the comparisons above: weights that never move agree in every layout."""
    losses = [metrics["loss"] for metrics in reference["metrics"]]
    assert len(set(losses)) == STEPS and all(metrics["grad_norm"] > 0 for metrics in reference["metrics"])
