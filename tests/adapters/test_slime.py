"""slime's hook on samples as slime makes them (its slime/utils/types.py): what it returns, what is left of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from test_pruner import COUNTING

from dppo_megatron.adapters.slime import post_process_rewards
from dppo_megatron.types import UserError


def _args(**changes: Any) -> SimpleNamespace:
    given = {
        "advantage_estimator": "grpo",
        "rollout_batch_size": 2,
        "n_samples_per_prompt": 4,
        "global_batch_size": 8,
        "num_rollout": 10,
        "seed": 1,
        "grpo_std_normalization": True,
        "calculate_per_token_loss": False,
        "use_kl_loss": False,
        "entropy_coef": 0.0,
        "kl_coef": 0.0,
        "dppo_completion": {"rate": 0.5, "max_design_effect": 0.0},
    }
    return SimpleNamespace(**given | changes)


def _samples(step: int) -> list[Any]:
    rewards, lengths = [1, 0, 0, 1, 1, 1, 1, 1], [5, 3, 4, 2, 3, 3, 3, 3]
    return [
        SimpleNamespace(
            get_reward_value=lambda args, reward=reward: reward,
            group_index=2 * step + i // 4,
            tokens=list(range(10 + length)),
            response_length=length,
            loss_mask=None,
            remove_sample=False,
            rollout_log_probs=[-0.5] * length,
        )
        for i, (reward, length) in enumerate(zip(rewards, lengths, strict=True))
    ]


def test_weighted_advantages_have_the_full_mean_and_the_dropped_cost_a_token() -> None:
    """Over 2,000 steps of the run's seed: the mean of W A is A within 5 standard errors."""
    full = np.array([1, -1, -1, 1, 0, 0, 0, 0]) * 0.5 / (np.std([1, 0, 0, 1], ddof=1) + 1e-6)
    drawn = []
    for step in range(2000):
        samples = _samples(step)
        raw, given = post_process_rewards(_args(num_rollout=2000), samples)
        assert raw == [1, 0, 0, 1, 1, 1, 1, 1] and sum(value != 0 for value in given) <= 4
        for sample, value in zip(samples, given, strict=True):
            assert len(sample.tokens) == 10 + sample.response_length == 10 + len(sample.rollout_log_probs)
            assert (value == 0) == sample.remove_sample == (sample.loss_mask == [0])
        drawn.append(given)
    error = np.std(drawn, axis=0) / np.sqrt(len(drawn))
    assert (np.abs(np.mean(drawn, axis=0) - full) <= 5 * error + 1e-12).all()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"advantage_estimator": "ppo"}, "--advantage-estimator ppo"),
        ({"kl_coef": 0.1}, "--kl-coef"),
        ({"calculate_per_token_loss": True}, "--calculate-per-token-loss"),
        ({"normalize_advantages": True}, "--normalize-advantages"),
        ({"use_opd": True}, "--use-opd"),
        ({"use_kl_loss": True, "kl_loss_coef": 0.1}, "--kl-loss-coef"),
        ({"loss_type": "sft_loss"}, "--loss-type: only policy_loss"),
        ({"enable_mtp_training": True}, "--enable-mtp-training"),
        ({"moe_aux_loss_coeff": 0.01}, "--moe-aux-loss-coeff"),
        ({"custom_tis_function_path": "mine.weigh"}, "--custom-tis-function-path"),
        ({"rollout_top_p": 0.9}, "--rollout-top-p"),
        ({"global_batch_size": 4}, "--global-batch-size 4"),
        ({"over_sampling_batch_size": 4}, "--over-sampling-batch-size"),
        ({"num_rollout": None, "dppo_completion": {"anneal_fraction": 0.8}}, "--num-rollout"),
        ({"dppo_completion": {"method": COUNTING}}, "Counting learns, and slime's hook cannot keep that"),
        ({"dppo_completion": {"rat": 0.5}}, "did you mean 'rate'"),
        ({"dppo_completion": {"rate": 1.5}}, "lower min_inclusion_prob or rate"),
    ],
)
def test_what_would_be_biased_is_refused_by_name(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        post_process_rewards(_args(**changed), _samples(0))


def test_terms_of_no_size_are_no_hindrance_and_empty_samples_stay_as_they_are() -> None:
    """slime's own scripts switch the KL term on with a coefficient of 0; an aborted sample may have no token."""
    samples = _samples(0)
    samples[1].response_length, samples[1].rollout_log_probs, samples[1].tokens = 0, [], [1] * 10
    post_process_rewards(_args(use_kl_loss=True, kl_loss_coef=0.0, moe_aux_loss_coeff=0.0), samples)
    assert (samples[1].response_length, samples[1].loss_mask, len(samples[1].tokens)) == (0, None, 10)


def test_a_run_whose_length_is_given_in_epochs_prunes_as_one_in_rollouts() -> None:
    """slime's driver sets `num_rollout` of `--num-epoch` when its rollout manager has the arguments already."""
    for step in (0, 7):
        of_epochs, of_rollouts = _samples(step), _samples(step)
        given = post_process_rewards(_args(num_rollout=None, num_epoch=3), of_epochs)
        assert given == post_process_rewards(_args(), of_rollouts) and of_epochs[0].tokens == of_rollouts[0].tokens
        assert any(sample.remove_sample for sample in of_epochs)


def test_a_key_without_a_value_is_as_one_that_is_not_there() -> None:
    """`dppo_completion:` with its lines commented out is None."""
    without = _args()
    del without.dppo_completion
    given = [post_process_rewards(args, _samples(0)) for args in (_args(dppo_completion=None), without)]
    assert given[0] == given[1]


def test_rollouts_of_several_samples_are_refused() -> None:
    """slime divides by rollouts, and a dropped sample would still be a sibling's."""
    samples = _samples(0)
    for sample in samples:
        sample.rollout_id = sample.group_index
    with pytest.raises(UserError, match="one sample of each rollout"):
        post_process_rewards(_args(), samples)


def test_what_goes_with_the_tokens_is_cut_with_them() -> None:
    samples = _samples(0)
    for sample in samples:
        sample.rollout_routed_experts = np.zeros((len(sample.tokens) - 1, 2, 1), dtype=np.int64)
    post_process_rewards(_args(), samples)
    assert all(len(sample.rollout_routed_experts) == len(sample.tokens) - 1 for sample in samples)
