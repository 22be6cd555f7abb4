"""The expected gradient through verl's own losses and aggregation, over every draw: equal to the full batch's.

verl's queue is a dictionary here; dropping, the advantages and weighing are the adapter's, estimator and losses verl's.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("verl", reason="`make test-adapters` runs it")
import hydra
import torch
import verl
from enumeration import GROUP, PROMPTS, Played
from omegaconf import OmegaConf
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.trainer.ppo.v1 import PPOTrainerSync, get_trainer_cls
from verl.utils import tensordict_utils
from verl.workers.config import ActorConfig

from dppo_megatron.adapters import verl as adapter
from dppo_megatron.adapters.pruner import StepPruner
from dppo_megatron.adapters.settings import verl_refusals
from dppo_megatron.config.pruning import PruningConfig
from dppo_megatron.types import RunAborted

ROWS, LONGEST = PROMPTS * GROUP, 6
CASES = [
    ("vanilla", "seq-mean-token-mean"),
    ("vanilla", "seq-mean-token-sum"),
    ("vanilla", "token-mean"),
    ("vanilla", "token-sum"),
    ("gspo", "seq-mean-token-mean"),
    ("sapo", "seq-mean-token-mean"),
    ("gpg", "seq-mean-token-mean"),
    ("cispo", "seq-mean-token-sum-norm"),
    ("dppo_tv", "seq-mean-token-mean"),
    ("dppo_kl", "seq-mean-token-mean"),
]


class Queue:
    """`transfer_queue`'s calls, in this process."""

    def __init__(self, lengths: np.ndarray, rewards: np.ndarray, masked: tuple[int, ...] = ()) -> None:
        self.rows: dict[str, dict[str, Any]] = {}
        for row, (length, reward) in enumerate(zip(lengths, rewards, strict=True)):
            scores = torch.zeros(length, dtype=torch.float64)
            scores[-1] = reward
            uid = f"prompt{row // GROUP}"
            mask = torch.full((length,), int(row not in masked))
            self.rows[f"{uid}_{row % GROUP}_0"] = {"uid": uid, "response_mask": mask, "rm_scores": scores}

    def kv_batch_get(self, keys: list[str], partition_id: str, select_fields: list[str]) -> TensorDict:
        found: dict[str, Any] = {}
        for name in select_fields:
            if name == "uid":
                found[name] = [self.rows[key][name] for key in keys]
            elif name in self.rows[keys[0]]:
                found[name] = torch.nested.as_nested_tensor([self.rows[k][name] for k in keys], layout=torch.jagged)
        return tensordict_utils.get_tensordict(found)

    def kv_batch_put(self, keys: list[str], partition_id: str, fields: TensorDict) -> list[str]:
        for name in fields.keys():  # noqa: SIM118 (a TensorDict is no dict)
            for key, value in zip(keys, fields[name].unbind(), strict=True):
                self.rows[key][name] = value
        return keys

    def kv_clear(self, keys: list[str], partition_id: str) -> None:
        for key in keys:
            del self.rows[key]


class Batch:
    """8 rows, their log-probabilities as functions of 5 parameters."""

    def __init__(self, masked: tuple[int, ...] = ()) -> None:
        rng, self.masked = np.random.default_rng(3), masked
        self.lengths = rng.integers(2, LONGEST + 1, ROWS)
        self.rewards = rng.random(ROWS)
        self.old = -torch.from_numpy(rng.random((ROWS, LONGEST)))
        self.slope = torch.from_numpy(rng.normal(size=(ROWS, LONGEST, 5)))
        self.mask = torch.arange(LONGEST)[None] < torch.from_numpy(self.lengths)[:, None]
        self.mask[list(masked)] = False

    def gradient(self, loss: str, mode: str, rows: np.ndarray, advantages: torch.Tensor) -> np.ndarray:
        """As `verl.workers.utils.losses.ppo_loss` calls the loss; divisors are those of a batch padded to 8 rows."""
        theta = torch.zeros(5, dtype=torch.float64, requires_grad=True)
        logprob = self.old[rows] + 0.3 * torch.tanh(self.slope[rows] @ (theta + 0.5))
        mask = self.mask[rows]
        config = object.__new__(ActorConfig)
        known = {
            "clip_ratio": 0.2,
            "clip_ratio_low": 0.2,
            "clip_ratio_high": 0.28,
            "clip_ratio_c": 3.0,
            "policy_loss": SimpleNamespace(dppo_clip=0.15, get=lambda key, default=None: default),
            "tau_pos": 1.0,
            "tau_neg": 1.05,
            "global_batch_info": {
                "dp_size": 1,
                "batch_num_tokens": int(mask.sum()),
                "global_batch_size": ROWS,
                "loss_scale_factor": 7 if mode == "seq-mean-token-sum-norm" else None,
            },
        }
        for name, value in known.items():
            object.__setattr__(config, name, value)
        value, _ = get_policy_loss_fn(loss)(
            old_log_prob=self.old[rows],
            log_prob=logprob,
            advantages=advantages * mask,
            response_mask=mask.double(),
            loss_agg_mode=mode,
            config=config,
            rollout_is_weights=None,
        )
        assert value.isfinite()
        [found] = torch.autograd.grad(value, theta)
        return found.numpy()


@pytest.fixture
def verls_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What verl does around the adapter's overrides needs Ray."""
    monkeypatch.setattr(PPOTrainerSync, "_balance_batch", lambda self, batch, metrics: batch)
    monkeypatch.setattr(PPOTrainerSync, "_compute_advantage", lambda self, batch, metrics: batch)


def _trainer(played: Played, mode: str) -> Any:
    made = object.__new__(adapter.PrunedPPOTrainer)
    settings = {
        "algorithm": {},
        "actor_rollout_ref": {"rollout": {"n": GROUP}},
        "data": {"max_response_length": LONGEST},
    }
    made.config, made.mode, made.global_steps = OmegaConf.create(settings), mode, 1
    made.nominal = np.arange(PROMPTS)
    sizes = {"num_prompts": PROMPTS, "prompts_per_step": PROMPTS, "group_size": GROUP, "total_steps": 5, "seed": 0}
    made.pruner = StepPruner(
        PruningConfig(),
        **sizes,
        divides_by_length=mode == "seq-mean-token-mean",
        max_tokens=LONGEST if mode == "token-mean" else None,
    )
    made.pruner._prompts = made.pruner._completions = played
    made.pruner.mean_length, made.pruner._learn = 4.5, lambda *_: None
    return made


def _step(made: Any, batch: Batch, monkeypatch: pytest.MonkeyPatch) -> tuple[np.ndarray, torch.Tensor]:
    """Rows that were trained on, and their advantages [n, T], by the trainer's own order of calls."""
    queue = Queue(batch.lengths, batch.rewards, batch.masked)
    monkeypatch.setattr(adapter, "tq", queue)
    made.chosen = made.pruner.choose(made.nominal, 0)
    rolled = np.flatnonzero(made.chosen.kept)
    made.uids = [f"prompt{one}" for one in (rolled if len(rolled) else [0])]
    keys = [key for key in reversed(queue.rows) if key.split("_")[0] in made.uids]  # finished in any order
    metrics: dict[str, float] = {}
    meta = made._balance_batch(KVBatchMeta(keys=keys, tags=[{} for _ in keys], partition_id="train"), metrics)
    is_predicted = made.mode == "token-mean" and bool((made.chosen.inclusion_prob < 1).any())
    assert ("ledger/denominator/tokens/ratio" in metrics) == is_predicted
    if len(rolled):  # of what was rolled out, whatever of it is trained on
        assert metrics["rolled_out/score"] == pytest.approx(batch.rewards.reshape(-1, GROUP)[rolled].mean())
    made._compute_advantage(meta, {})
    order = [int(key[6]) * GROUP + int(key.split("_")[1]) for key in meta.keys]
    given = torch.zeros(len(order), LONGEST, dtype=torch.float64)
    for place, key in enumerate(meta.keys):
        given[place, : len(queue.rows[key]["advantages"])] = queue.rows[key]["advantages"].double()
    return np.array(order), given


@pytest.mark.parametrize(("loss", "mode"), CASES)
def test_the_expected_gradient_is_the_full_one(
    loss: str, mode: str, verls_own: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """289 draws of prompts and completions; a mean over tokens up to its predicted divisor, which is known here."""
    batch, played = Batch(), Played(skips=False, weighs=False)
    made = _trainer(played, mode)
    full = batch.gradient(loss, mode, *_step(made, batch, monkeypatch))
    played.skips = played.weighs = True
    mean = total = 0.0
    for probability in played.draws():
        mean = mean + probability * batch.gradient(loss, mode, *_step(made, batch, monkeypatch))
        total += probability
    factor = float(batch.lengths.sum()) / (ROWS * 4.5) if mode == "token-mean" else 1.0
    assert total == pytest.approx(1.0) and np.linalg.norm(full) > 1e-3
    assert np.linalg.norm(mean - factor * full) / np.linalg.norm(full) < 1e-6


def test_a_mean_over_tokens_keeps_its_divisor_where_no_prompt_is_skipped(
    verls_own: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, played = Batch(), Played(skips=False, weighs=False)
    made = _trainer(played, "token-mean")
    full = batch.gradient("vanilla", "token-mean", *_step(made, batch, monkeypatch))
    played.weighs = True
    draws = (p * batch.gradient("vanilla", "token-mean", *_step(made, batch, monkeypatch)) for p in played.draws())
    assert np.linalg.norm(sum(draws) - full) / np.linalg.norm(full) < 1e-6


@pytest.mark.parametrize("prompts", [False, True])
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_what_stands_in_for_nothing_has_tokens(
    prompts: bool, mode: str, verls_own: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the draw keeps no prompt, or no completion, and the first row is masked whole: by none of its tokens verl's
    mean would be 0 / 0, of which its gradient knows nothing and its log does."""
    batch, nothing = Batch(masked=(0,)), np.zeros(ROWS, dtype=bool)
    made = _trainer(Played(prompts=np.full(PROMPTS, prompts), completions=nothing), mode)
    rows, advantages = _step(made, batch, monkeypatch)
    assert len(rows) == 1 and (batch.gradient("vanilla", mode, rows, advantages) == 0).all()


def test_a_lost_completion_is_said(verls_own: None, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, made = Batch(), _trainer(Played(), "token-mean")
    monkeypatch.setattr(adapter, "tq", Queue(batch.lengths, batch.rewards))
    made.chosen, made.uids = made.pruner.choose(made.nominal, 0), ["prompt0", "prompt1"]
    keys = list(adapter.tq.rows)[1:]
    with pytest.raises(RunAborted, match="7 completions; pruning needs 4 of each of 2 prompts"):
        made._drop(KVBatchMeta(keys=keys, tags=[{} for _ in keys], partition_id="train"), {})


def _config(**changes: Any) -> Any:
    actor = {
        "policy_loss": {"loss_mode": "vanilla"},
        "loss_agg_mode": "token-mean",
        "loss_scale_factor": None,
        "use_kl_loss": False,
        "entropy_coeff": 0,
        "ppo_epochs": 1,
        "ppo_mini_batch_size": 8,
    }
    config = {
        "actor_rollout_ref": {"actor": actor, "model": {}},
        "trainer": {"v1": {"sampler": {}}},
        "algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": False, "filter_groups": None},
        "data": {"train_batch_size": 8},
    }
    made = OmegaConf.create(config)
    for key, value in changes.items():
        OmegaConf.update(made, key.replace("__", "."), value)
    return made


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("actor_rollout_ref.actor.policy_loss.loss_mode", "geo_mean", "loss_mode=geo_mean"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode", "clip_cov", "loss_mode=clip_cov"),
        ("actor_rollout_ref.actor.loss_agg_mode", "seq-mean-token-sum-norm", "loss_scale_factor"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode", "sapo", "sapo does not read it"),
        ("actor_rollout_ref.actor.use_kl_loss", True, "use_kl_loss"),
        ("actor_rollout_ref.actor.entropy_coeff", 0.001, "entropy_coeff"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size", 4, "ppo_mini_batch_size"),
        ("actor_rollout_ref.actor.ppo_epochs", 2, "ppo_epochs"),
        ("algorithm.adv_estimator", "gae", "adv_estimator=gae"),
        ("algorithm.filter_groups", {"enable": True}, "filter_groups"),
        ("algorithm.rollout_correction", {"bypass_mode": True}, "bypass_mode"),
        ("algorithm.rollout_correction", {"rollout_is_batch_normalize": True}, "batch_normalize"),
        ("algorithm.rollout_correction", {"rollout_rs": "seq_mean_k1"}, "rollout_rs"),
        ("trainer.v1.sampler.sync_refill_failed_groups", True, "sync_refill_failed_groups"),
        ("actor_rollout_ref.model.mtp", {"enable_train": True}, "mtp.enable_train"),
        (
            "actor_rollout_ref.actor.megatron",
            {"override_transformer_config": {"moe_aux_loss_coeff": 1e-3}},
            "losses of routers are not weighted",
        ),
    ],
)
def test_what_would_be_biased_is_refused_by_name(key: str, value: Any, said: str) -> None:
    assert verl_refusals(_config()) == []
    [why] = verl_refusals(_config(**{key: value}))
    assert said in why


def test_verl_finds_the_trainer_by_its_name() -> None:
    assert get_trainer_cls("dppo") is adapter.PrunedPPOTrainer


def test_the_command_of_the_page_tells_every_process_where_the_trainer_is() -> None:
    """Workers of a Ray cluster that runs already have its environment and not the shell's, and verl passes no variable
    on by itself; the rest of the command is what verl's settings take and nothing here refuses."""
    page = (Path(__file__).parents[2] / "docs" / "adapters.md").read_text(encoding="utf-8")
    command = page.partition("\npython -m verl.trainer.main_ppo")[2].partition("```")[0].replace("\\\n", " ")
    with hydra.initialize_config_dir(str(Path(verl.__file__).parent / "trainer" / "config"), version_base=None):
        config = hydra.compose("ppo_trainer", command.split())
    assert verl_refusals(config) == []
    assert config.trainer.v1.trainer_mode == "dppo"
    assert config.ray_kwargs.ray_init.runtime_env.env_vars == {"VERL_USE_EXTERNAL_MODULES": adapter.__name__}
