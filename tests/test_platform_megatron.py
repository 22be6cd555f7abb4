"""The real megatron-core computes the right thing through the CPU platform; and the launcher of the tests' ranks."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.launch import RankError, run_ranks
from support.processes import running

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU platform is never active where CUDA is")


def initialise(**sizes: int) -> None:
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(create_gloo_process_groups=False, **sizes)
    torch.manual_seed(1)
    tensor_parallel.model_parallel_cuda_manual_seed(1)


def build_gpt(**overrides: Any) -> torch.nn.Module:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    options: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "ffn_hidden_size": 64,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
        "gradient_accumulation_fusion": False,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
        "moe_token_dispatcher_type": "alltoall",
    }
    config = TransformerConfig(**{**options, **overrides})
    spec = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, moe_grouped_gemm=False)
    model: torch.nn.Module = GPTModel(config, spec, 64, max_sequence_length=16, position_embedding_type="rope")
    return model


def token_losses(model: torch.nn.Module, seed: int) -> torch.Tensor:
    tokens = torch.randint(0, 64, (2, 17), generator=torch.Generator().manual_seed(seed))
    positions = torch.arange(16)[None].expand(2, -1)
    mask = torch.ones(16, 16, dtype=torch.bool).triu(1)[None, None]
    losses = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:])
    assert isinstance(losses, torch.Tensor)
    return losses


def forward_and_backward() -> tuple[float, float, float, bool]:
    """Loss, a directional derivative by autograd, and the same by differences, in double precision."""
    initialise()
    model = build_gpt(params_dtype=torch.float64, attention_softmax_in_fp32=False).double()
    loss = token_losses(model, 0).double().mean()
    loss.backward()
    params = [p for p in model.parameters() if p.grad is not None]
    directions = [torch.randn(p.shape, dtype=p.dtype) for p in params]
    slope = sum(float((p.grad * d).sum()) for p, d in zip(params, directions, strict=True) if p.grad is not None)
    shifted = []
    for step in (1e-4, -1e-4):
        with torch.no_grad():
            for p, d in zip(params, directions, strict=True):
                p.add_(d, alpha=step)
            shifted.append(float(token_losses(model, 0).double().mean()))
            for p, d in zip(params, directions, strict=True):
                p.sub_(d, alpha=step)
    return loss.item(), slope, (shifted[0] - shifted[1]) / 2e-4, len(params) == len(list(model.parameters()))


def test_gpt_model_runs_and_its_gradient_is_the_slope_of_its_loss() -> None:
    ((loss, slope, difference, all_have_gradients),) = run_ranks(forward_and_backward, 1)
    assert 3.5 < loss < 5.0  # ln 64 = 4.16: nothing has been learnt
    assert all_have_gradients
    assert slope == pytest.approx(difference, rel=2e-3, abs=1e-4)


def moe_with_dropout_under_recompute() -> tuple[float, float, str]:
    """The router's missing name, the generator facade, and recompute, which must draw the same dropout twice."""
    import io

    from megatron.core import tensor_parallel

    initialise()
    log = logging.StreamHandler(stream := io.StringIO())
    logging.getLogger().addHandler(log)
    norms = []
    for recompute in (None, "full"):
        torch.manual_seed(3)
        model = build_gpt(
            num_moe_experts=4,
            moe_router_topk=2,
            moe_router_load_balancing_type="none",
            moe_router_dtype="fp32",
            add_bias_linear=False,
            hidden_dropout=0.1,
            attention_dropout=0.1,
            recompute_granularity=recompute,
            recompute_method="uniform" if recompute else None,
            recompute_num_layers=1 if recompute else None,
        )
        tensor_parallel.model_parallel_cuda_manual_seed(4)  # attention dropout draws from a tracked state
        token_losses(model.train(), 0).mean().backward()
        norms.append(float(sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None)))
    return norms[0], norms[1], stream.getvalue()


def test_experts_dropout_and_recompute() -> None:
    ((plain, recomputed, log),) = run_ranks(moe_with_dropout_under_recompute, 1)
    assert plain > 0 and recomputed == pytest.approx(plain, rel=1e-6)
    assert "RNG state changed" not in log


class Job:
    """A tiny model with the distributed optimizer."""

    def __init__(self) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        from dppo_megatron.actor.optimizer import repair

        torch.manual_seed(1)
        module = build_gpt()
        config = DistributedDataParallelConfig(use_distributed_optimizer=True)
        self.model = DistributedDataParallel(module.config, config, module)
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(optimizer="adam", lr=1e-2, clip_grad=1.0, use_distributed_optimizer=True),
            [self.model],
            use_gloo_process_groups=False,
        )
        repair(self.optimizer)

    def step(self, index: int) -> float:
        """One update; returns the norm of the gradient."""
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        token_losses(self.model, 10 * index + torch.distributed.get_rank()).mean().backward()
        self.model.finish_grad_sync()
        return float(self.optimizer.step()[1])

    def state(self, is_loading: bool) -> dict[str, Any]:
        """What dist_checkpointing saves and loads."""
        from megatron.core import parallel_state

        metadata = {
            "distrib_optim_sharding_type": "fully_reshardable",
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        }
        model = self.model.module.sharded_state_dict(metadata=metadata)
        return {
            "model": model,
            "opt": self.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata),
        }


def save_and_resume(folder: Path, steps_before: int) -> tuple[list[float], list[float], bool, set[str]]:
    """Gradient norms of a job that goes on after saving and of one that was loaded.

    Also whether their weights end equal, and which processes saving has left running.
    """
    from megatron.core import dist_checkpointing

    from dppo_megatron.checkpoint.writers import use_own_writers

    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        folder.mkdir()
    initialise()
    going_on = Job()
    for index in range(steps_before):
        going_on.step(index)
    use_own_writers()
    dist_checkpointing.save(going_on.state(is_loading=False), str(folder))
    resumed = Job()
    loaded = dist_checkpointing.load(resumed.state(is_loading=True), str(folder))
    resumed.model.module.load_state_dict(loaded["model"])
    resumed.optimizer.load_state_dict(loaded["opt"])
    later = range(steps_before, steps_before + 3)
    norms = [going_on.step(index) for index in later], [resumed.step(index) for index in later]
    pairs = zip(going_on.model.parameters(), resumed.model.parameters(), strict=True)
    return (
        *norms,
        all(torch.equal(a, b) for a, b in pairs),
        {type(p).__name__ for p in multiprocessing.active_children()},
    )


@pytest.mark.parametrize("steps_before", [0, 2])
def test_distributed_optimizer_resumes_exactly(tmp_path: Path, steps_before: int) -> None:
    """Needs all three checkpoint fixes; the second and third show only after steps (a KeyError; wrong norms)."""
    results = run_ranks(save_and_resume, 2, tmp_path / "checkpoint", steps_before)
    for going_on, resumed, weights_equal, _ in results:
        assert resumed == going_on
        assert weights_equal
    started = set().union(*(kinds for *_, kinds in results))
    assert not started, "a manager would be one more process for every rank, and a spawned one would import torch again"


# ---- the launcher


def test_big_results_come_back_in_rank_order() -> None:
    def body() -> tuple[int, torch.Tensor]:
        rank = torch.distributed.get_rank()
        total = torch.ones(1)
        torch.distributed.all_reduce(total)
        return int(total), torch.full((1_000_000,), rank)

    results = run_ranks(body, 3)
    assert [int(tensor[0]) for _, tensor in results] == [0, 1, 2]
    assert {total for total, _ in results} == {3}


def test_failing_rank_is_reported_with_its_traceback_while_others_wait() -> None:
    def body() -> None:
        if torch.distributed.get_rank() == 1:
            raise ValueError("the reason")
        torch.distributed.barrier()

    with pytest.raises(RankError, match=r"(?s)rank 1 of 2 raised:\nTraceback.*in body.*ValueError: the reason"):
        run_ranks(body, 2, timeout_s=100_000)  # were this waited for, pytest's own limit would end the test


def test_rank_that_dies_is_named_with_its_exit_code(tmp_path: Path) -> None:
    def body() -> None:
        if torch.distributed.get_rank() == 1:
            (tmp_path / "joined").touch()
            os._exit(7)
        # Rank 0 serves the store: were it to die while rank 1 is still joining, rank 1 would raise instead of dying.
        while not (tmp_path / "joined").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RankError) as raised:
        run_ranks(body, 2)
    assert "rank 0 of 2 died without a message: exit code -9 (SIGKILL)" in str(raised.value)
    assert "rank 1 of 2 died without a message: exit code 7" in str(raised.value)


def test_timeout_tells_where_each_rank_was_and_leaves_nothing_running(tmp_path: Path) -> None:
    def body() -> None:
        import multiprocessing

        helper = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
        helper.start()
        (tmp_path / str(torch.distributed.get_rank())).write_text(f"{os.getpid()} {helper.pid}")
        if torch.distributed.get_rank() == 1:
            stuck_here()

    def stuck_here() -> None:
        time.sleep(600)

    for timeout_s in (2, 10, 60):  # a busy machine needs more time to come to where rank 1 is stuck
        with pytest.raises(RankError, match=r"rank 1 of 2 did not finish within \d+ s; it was at:") as raised:
            run_ranks(body, 2, timeout_s=timeout_s)
        if "in stuck_here" in str(raised.value):
            break
    assert "in stuck_here" in str(raised.value)
    assert {file.name for file in tmp_path.iterdir()} == {"0", "1"}
    for file in tmp_path.iterdir():
        for process in map(int, file.read_text().split()):
            assert not running(process), f"process {process} of rank {file.name} is still there"


def test_ranks_can_differentiate_after_the_parent_did() -> None:
    """torch forbids this once autograd has started threads; on a CPU with one thread it has none."""
    x = torch.ones(3, requires_grad=True)
    (x * x).sum().backward()

    def body() -> float:
        y = torch.ones(300, 300, requires_grad=True)
        (y @ y).sum().backward()
        assert y.grad is not None
        return float(y.grad[0, 0])

    assert run_ranks(body, 2) == [600.0, 600.0]
