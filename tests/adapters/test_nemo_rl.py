"""NeMo-RL's policy with completions dropped, through its loss and divisors (nemo_rl/algorithms/loss), which
are written out here: it is on no package index. Every draw of completions, equal in the mean to the full gradient."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from enumeration import GROUP, PROMPTS, Played
from test_pruner import COUNTING

from dppo_megatron.adapters import nemo_rl as adapter
from dppo_megatron.config.pruning import CompletionPruningConfig
from dppo_megatron.types import UserError

ROWS, WIDTH = PROMPTS * GROUP, 7


class Data(dict[str, torch.Tensor]):
    """Their BatchedDataDict, as far as it is used."""

    def select_indices(self, indices: torch.Tensor) -> Data:
        return Data({name: value[indices] for name, value in self.items()})


class Policy:
    """Two parameters; `train` leaves the gradient that their workers would have."""

    def __init__(self, parallel: int, microbatch: int) -> None:
        self.data_parallel_size = parallel
        self.cfg = {"train_micro_batch_size": microbatch, "train_global_batch_size": ROWS}
        self.rows: list[int] = []

    def train(self, data: Data, loss_fn: Any, eval_mode: bool = False, **others: Any) -> dict[str, Any]:
        assert eval_mode or others["gbs"] == len(data["sample_mask"])
        theta = torch.zeros(2, dtype=torch.float64, requires_grad=True)
        now = data["prev_logprobs"][:, 1:] + 0.3 * torch.tanh(data["slope"][:, 1:] @ (theta + 0.5))
        tokens, samples = data["token_mask"][:, 1:], data["sample_mask"]
        both, advantages = tokens * samples[:, None], data["advantages"][:, 1:]
        ratio = now - data["prev_logprobs"][:, 1:]
        if loss_fn.sequence_ratio:
            ratio = (ratio * tokens).sum(1, keepdim=True) / tokens.sum(1, keepdim=True)
        ratio = ratio.exp() * torch.ones_like(now)
        clipped = ratio.clamp(0.8, 1.2)
        each = -torch.min(advantages * ratio, advantages * clipped)
        if loss_fn.cispo:
            each = -advantages * clipped.detach() * now
        if loss_fn.loss_type.name == "TOKEN_LEVEL":
            loss = (each * both).sum() / both.sum()
        else:
            loss = (((each * tokens).sum(1) / tokens.sum(1)) * samples).sum() / samples.sum()
        [self.gradient] = torch.autograd.grad(loss, theta)
        self.rows.append(len(samples))
        return {"loss": loss.detach(), "all_mb_metrics": {"lr": [0.1]}}


def _loss(name: str) -> Any:
    level = "SEQUENCE_LEVEL" if name in ("by sequences", "gspo") else "TOKEN_LEVEL"
    return SimpleNamespace(
        loss_type=SimpleNamespace(name=level),
        sequence_ratio=name == "gspo",
        cispo=name == "cispo",
        reference_policy_kl_penalty=0,
        positive_example_nll_weight=0.0,
    )


def _data() -> Data:
    rng = np.random.default_rng(4)
    lengths = rng.integers(2, WIDTH, ROWS)
    token_mask = (np.arange(WIDTH) > 0) & (np.arange(WIDTH) <= lengths[:, None])
    arrays = {
        "token_mask": token_mask.astype(float),
        "sample_mask": np.array([1.0] * (ROWS - 1) + [0.0]),  # one that was too long
        "prev_logprobs": -rng.random((ROWS, WIDTH)),
        "generation_logprobs": -rng.random((ROWS, WIDTH)),
        "slope": rng.normal(size=(ROWS, WIDTH, 2)),
        "advantages": np.repeat(rng.normal(size=(ROWS, 1)), WIDTH, axis=1),
    }
    return Data({name: torch.from_numpy(value) for name, value in arrays.items()})


def _pruned(policy: Policy, **changes: Any) -> adapter.PrunedPolicy:
    sizes = {"prompts_per_step": PROMPTS, "group_size": GROUP, "total_steps": 10, "seed": 1}
    return adapter.PrunedPolicy(policy, **sizes | changes)


@pytest.mark.parametrize(("parallel", "microbatch"), [(1, 1), (2, 1)])
@pytest.mark.parametrize("name", ["by tokens", "by sequences", "gspo", "cispo"])
def test_the_expected_gradient_is_the_full_one(name: str, parallel: int, microbatch: int) -> None:
    """Also where the rows that are left have to be filled up to what the ranks share."""
    policy, played, data, loss = Policy(parallel, microbatch), Played(skips=False), _data(), _loss(name)
    policy.train(data, loss, gbs=ROWS)
    full, pruned = policy.gradient.numpy(), _pruned(policy)
    pruned._pruner._prompts = pruned._pruner._completions = played  # type: ignore[assignment]
    mean, total = np.zeros(2), 0.0
    for probability in played.draws():
        pruned.train(data, loss)
        mean, total = mean + probability * policy.gradient.numpy(), total + probability
    assert total == pytest.approx(1.0) and np.linalg.norm(full) > 1e-3
    assert np.linalg.norm(mean - full) / np.linalg.norm(full) < 1e-6
    assert min(policy.rows) == parallel * microbatch and not any(rows % (parallel * microbatch) for rows in policy.rows)


def test_a_step_says_what_it_kept_and_leaves_the_trainers_batch_alone() -> None:
    policy, data = Policy(2, 1), _data()
    before = {name: value.clone() for name, value in data.items()}
    pruned = _pruned(policy, completion=CompletionPruningConfig(rate=0.5, max_design_effect=0, fill_slack=False))
    found = pruned.train(data, _loss("by tokens"))
    assert policy.rows == [4] and found["all_mb_metrics"]["prune/completions_kept"] == [4.0]
    assert found["all_mb_metrics"]["lr"] == [0.1] and [row.label for row in pruned.ledger][-1] == "unbiased"
    assert all(torch.equal(before[name], data[name]) for name in before)
    pruned.train(data, _loss("by tokens"), eval_mode=True)
    assert policy.rows[-1] == ROWS and pruned._step == 1 and pruned.cfg is policy.cfg


def test_a_policy_of_ones_own_is_one_through_the_run() -> None:
    """It is told of every step, and not made anew in each."""
    pruned = _pruned(Policy(1, 1), completion=CompletionPruningConfig(method=COUNTING))
    for _ in range(3):
        pruned.train(_data(), _loss("by tokens"))
    assert pruned._pruner.state_dict()["completions"]["own"] == {"steps": 3.0}


@pytest.mark.parametrize(
    ("loss", "config", "said"),
    [
        ({"reference_policy_kl_penalty": 0.01}, {}, "reference_policy_kl_penalty"),
        ({"positive_example_nll_weight": 0.1}, {}, "positive_example_nll_weight"),
        ({}, {"train_global_batch_size": 4}, "must be the 8 completions of a step"),
        ({}, {"draft": {"enabled": True}}, "policy.draft"),
        ({}, {"megatron_cfg": {"enabled": True, "mtp_num_layers": 1}}, "mtp_num_layers: its loss is not weighted"),
        ({}, {"megatron_cfg": {"moe_router_load_balancing_type": "aux_loss"}}, "its loss is not weighted"),
        ({}, {"megatron_cfg": {"enabled": True, "scheduler": {"lr_warmup_iters": 5}}}, "it counts rows"),
    ],
)
def test_what_would_be_biased_is_refused_by_name(loss: dict[str, Any], config: dict[str, Any], said: str) -> None:
    policy, given = Policy(1, 1), _loss("by tokens")
    policy.cfg |= config
    vars(given).update(loss)
    with pytest.raises(UserError, match=said):
        _pruned(policy).train(_data(), given)


def test_the_data_plane_is_refused() -> None:
    policy = Policy(1, 1)
    policy.train_from_meta = None  # type: ignore[attr-defined]
    with pytest.raises(UserError, match=r"data_plane\.enabled=false"):
        _pruned(policy)
