"""Finds settings of other trainers under which dropping would change the expected gradient, to refuse them by name.

A weight in the advantage is exact for losses with loss(W A) = W loss(A) for W >= 0 whose divisor is known before
anything is dropped (docs/adapters.md). No trainer is imported here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from dppo_megatron.config.pruning import PruningConfig, check_choice


def pruning_from(values: Mapping[str, Any], where: str, section: Any = None) -> Any:
    """Both levels from another trainer's settings, such as `{"prompt": {"rate": 0.3}}`. UserError: an unknown name."""
    config = section or PruningConfig()
    for name, value in values.items():
        check_choice(where, name, [item.name for item in fields(config)])
        inside = getattr(config, name)
        setattr(config, name, pruning_from(value, f"{where}.{name}", inside) if is_dataclass(inside) else value)
    return config


TRL_DIVISORS = {"grpo": "rows, lengths", "sapo": "rows, lengths", "dr_grpo": "rows", "luspo": "rows"} | dict.fromkeys(
    ("dapo", "cispo", "vespo"), "tokens"
)
"""What each loss divides by. bnpo is missing, since it divides by the tokens that happen to share a micro-batch."""


def trl_refusals(trainer: Any, pruning: PruningConfig) -> list[str]:
    """A line for each setting under which dropping would change the expected gradient."""
    args, skips = trainer.args, pruning.prompt.method != "none"
    of_batch = "a statistic of the batch, which would lack skipped prompts; pruning.prompt.method=none keeps it whole"
    batch_mean = trainer.multi_objective_aggregation == "normalize_then_sum"
    columns, by_tokens = trainer.train_dataset.column_names, TRL_DIVISORS.get(trainer.loss_type) == "tokens"
    wrong = {
        f"loss_type={trainer.loss_type} (known: {', '.join(TRL_DIVISORS)})": trainer.loss_type not in TRL_DIVISORS,
        "max_completion_length=None: it stands for the tokens of prompts skipped in the first step": skips
        and by_tokens
        and trainer.max_completion_length is None,
        f"beta={trainer.beta}: the KL term is not weighted": trainer.beta != 0,
        "entropy_coef: the entropy term is not weighted": trainer._entropy_bonus_enabled,
        "router_aux_loss_coef: the router's loss is not weighted": trainer.aux_loss_enabled,
        "top_entropy_quantile: which tokens count depends on the rows left": trainer.top_entropy_quantile < 1,
        "num_iterations: a draw used again after an update is biased": trainer.num_iterations > 1,
        "steps_per_generation: must be gradient_accumulation_steps, for the same reason": args.steps_per_generation
        != args.gradient_accumulation_steps,
        f"scale_rewards=batch: {of_batch}": skips and trainer.scale_rewards == "batch",
        f"multi_objective_aggregation=normalize_then_sum: {of_batch}": skips and batch_mean,
        "remove_unused_columns=True: it would remove the column of row numbers": args.remove_unused_columns,
        "train_dataset: prompts with images, whose rows cannot be dropped": {"image", "images"} & {*columns},
    }
    return [why for why, is_so in wrong.items() if is_so]


VERL_LOSSES = ("vanilla", "gspo", "sapo", "gpg", "cispo", "dppo_tv", "dppo_kl")
"""Losses with loss(W A) = W loss(A), divided by numbers of the whole batch. Missing: clip_cov and kl_cov, which choose
tokens by the batch; geo_mean, which divides by the rows of a micro-batch; dro, whose penalty has no advantage."""
VERL_BY_SEQUENCE = ("gspo", "sapo")
"""These ignore `loss_agg_mode` and take means over sequences: sapo in verl 0.9, gspo in 0.9.0."""
VERL_MODES = ("seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "token-mean", "token-sum")


def verl_refusals(config: Any) -> list[str]:
    """A line for each setting under which dropping would change the expected gradient."""
    actor, algorithm, size = config.actor_rollout_ref.actor, config.algorithm, config.data.train_batch_size
    loss, mode = actor.policy_loss.get("loss_mode", "vanilla"), actor.loss_agg_mode
    correction, sampler = algorithm.get("rollout_correction") or {}, config.trainer.v1.get("sampler") or {}
    batch_normalize, refills = correction.get("rollout_is_batch_normalize"), sampler.get("sync_refill_failed_groups")
    rejects, ignores = mode == "token-mean" and correction.get("rollout_rs"), loss in VERL_BY_SEQUENCE
    has_no_scale = mode == VERL_MODES[2] and actor.get("loss_scale_factor") is None
    mtp, custom = config.actor_rollout_ref.model.get("mtp") or {}, sampler.get("custom_sampler") or {}
    routers = (actor.get("megatron") or {}).get("override_transformer_config") or {}
    balances = routers.get("moe_aux_loss_coeff") or routers.get("moe_z_loss_coeff")
    wrong = {
        f"actor.policy_loss.loss_mode={loss} (known: {', '.join(VERL_LOSSES)})": loss not in VERL_LOSSES,
        f"actor.loss_agg_mode={mode} (known: {', '.join(VERL_MODES)})": mode not in VERL_MODES,
        f"actor.loss_agg_mode: {loss} does not read it; set {VERL_MODES[0]}": ignores and mode != VERL_MODES[0],
        "actor.loss_scale_factor: without it seq-mean-token-sum-norm divides by the longest row left": has_no_scale,
        f"algorithm.adv_estimator={algorithm.adv_estimator}: only grpo": algorithm.adv_estimator != "grpo",
        "actor.use_kl_loss: the KL term is not weighted": actor.use_kl_loss,
        "algorithm.use_kl_in_reward: the penalty is not part of the group's reward": algorithm.use_kl_in_reward,
        "actor.entropy_coeff: the entropy term is not weighted": actor.entropy_coeff != 0,
        "actor.ppo_epochs: a draw used again after an update is biased": actor.ppo_epochs != 1,
        "actor.ppo_mini_batch_size: must be data.train_batch_size": actor.ppo_mini_batch_size != size,
        "algorithm.filter_groups: drops groups by their rewards": (algorithm.get("filter_groups") or {}).get("enable"),
        "algorithm.rollout_correction.bypass_mode: its losses are not supported": correction.get("bypass_mode"),
        "algorithm.rollout_correction.rollout_is_batch_normalize: a mean of the rows left": batch_normalize,
        "algorithm.rollout_correction.rollout_rs: token-mean would divide by what it rejects of the rows left": rejects,
        "trainer.v1.sampler.sync_refill_failed_groups: refills are other prompts": refills,
        "trainer.v1.sampler.custom_sampler: it may choose prompts too": custom.get("path"),
        "actor_rollout_ref.model.mtp.enable_train: its loss is not weighted": mtp.get("enable_train"),
        "actor.megatron.override_transformer_config: losses of routers are not weighted": balances,
        "distillation: its loss is not weighted": (config.get("distillation") or {}).get("enabled"),
    }
    return [why for why, is_so in wrong.items() if is_so]


def slime_refusals(args: Any, samples: Sequence[Any]) -> list[str]:
    """As `trl_refusals`, for slime's arguments and the samples of a step. A missing argument counts as not set."""
    known, rollouts = ("grpo", "gspo", "cispo"), len(samples)
    siblings = [sample.rollout_id for sample in samples if getattr(sample, "rollout_id", None) is not None]
    estimator, size, groups = args.advantage_estimator, args.global_batch_size, args.rollout_batch_size
    anneals = (getattr(args, "dppo_completion", None) or {}).get("anneal_fraction", 1) != 1
    given = {"over_sampling_batch_size": groups, "rewards_normalization": True, "rollout_top_p": 1.0} | vars(args)
    unset = (
        *("kl_coef", "entropy_coef", "use_opd", "normalize_advantages", "calculate_per_token_loss"),
        *("enable_mtp_training", "moe_aux_loss_coeff", "moe_z_loss_coeff", "custom_tis_function_path"),
        *("custom_advantage_function_path", "custom_pg_loss_reducer_function_path", "dynamic_sampling_filter_path"),
    )
    wrong = {
        f"--advantage-estimator {estimator} (known: {', '.join(known)})": estimator not in known,
        "--kl-loss-coef: the KL term is not weighted": given.get("use_kl_loss") and given.get("kl_loss_coef", 1) != 0,
        "--loss-type: only policy_loss": given.get("loss_type", "policy_loss") != "policy_loss",
        "--disable-rewards-normalization": not given["rewards_normalization"],
        "--rollout-top-p: the tokens that it replays would not fit": given["rollout_top_p"] != 1,
        f"--global-batch-size {size}: must be the {rollouts} samples of a step, one update": size != rollouts,
        "--num-rollout: anneal_fraction needs it, --num-epoch is not enough": anneals and not args.num_rollout,
        "--over-sampling-batch-size: steps are counted by groups": given["over_sampling_batch_size"] != groups,
        "rollout_id: pruning needs one sample of each rollout": len({*siblings}) < len(siblings),
    }
    wrong |= {"--" + name.replace("_", "-"): bool(given.get(name)) for name in unset}
    return [why for why, is_so in wrong.items() if is_so]


def nemo_rl_refusals(loss: Any, policy: Any, rows: int, nominal: int) -> list[str]:
    """As `trl_refusals`, for NeMo-RL's loss function and policy; `rows` in the batch, `nominal` in a whole step."""
    config, terms = policy.cfg, ("reference_policy_kl_penalty", "positive_example_nll_weight")
    megatron, sizes = config.get("megatron_cfg") or {}, {rows, config["train_global_batch_size"]}
    enabled, router = megatron.get("enabled"), megatron.get("moe_router_load_balancing_type", "none")
    schedule = (megatron.get("scheduler") or {}) if enabled else {}
    mtp = enabled and megatron.get("mtp_num_layers") and megatron.get("mtp_loss_scaling_factor", 1) != 0
    falls = schedule.get("lr_decay_style", "constant") != "constant" or schedule.get("lr_warmup_iters", 0)
    wrong = {
        "policy.megatron_cfg.scheduler: it counts rows; set lr_decay_style=constant, lr_warmup_iters=0": falls,
        f"loss {type(loss).__name__}: only ClippedPGLossFn": not hasattr(loss, "reference_policy_kl_penalty"),
        "policy.megatron_cfg.mtp_num_layers: its loss is not weighted": mtp,
        "policy.megatron_cfg.moe_router_load_balancing_type: its loss is not weighted": router != "none",
        "policy.draft: its loss is not weighted": (config.get("draft") or {}).get("enabled"),
        f"policy.train_global_batch_size: must be the {nominal} completions of a step, one update": sizes != {nominal},
    }
    wrong |= {f"loss_fn.{name}: its term is not weighted": getattr(loss, name, 0) for name in terms}
    return [why for why, is_so in wrong.items() if is_so]
