"""Lines for the log about settings that are allowed but do nothing, or not what they seem to."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields

from dppo_megatron.config.changes import flat
from dppo_megatron.config.data import DataConfig
from dppo_megatron.config.load import config_values
from dppo_megatron.config.objective import needs_old_logprobs, old_is_current
from dppo_megatron.config.resolved_sets import TEMPLATES, Template
from dppo_megatron.config.rollout import RolloutConfig
from dppo_megatron.config.schema import Config
from dppo_megatron.config.server_args import read_split

_WIDE_FOR_GSPO = 0.1
"""Sequences' ratios do not get this far from 1; the paper's bounds are 3e-4 and 4e-4 (arXiv 2507.18071)."""


def effect_notes(config: Config) -> list[str]:
    """Lines about settings without effect because of another one. Not errors: a file, a comparison or a resumed run may
    have good reason to keep them."""
    values, defaults = flat(config_values(config)), flat(config_values(Config()))
    unused = _unused(config)
    return [
        f"{key} = {values[key]} has no effect while {why}"
        for why, (keys, is_so) in unused.items()
        for key in values
        if is_so and key in defaults and values[key] != defaults[key] and key.startswith(tuple(keys))
    ] + _template_notes(config.data)


def _unused(config: Config) -> dict[str, tuple[Sequence[str], bool]]:
    """Why -> (beginnings of keys that nothing reads then, whether it is so)."""
    actor, rollout, objective = config.actor, config.rollout, config.objective
    correction, loss = objective.correction, "" if objective.function else objective.loss
    return {
        "actor.optimizer.lr_schedule = constant": (
            ["actor.optimizer.min_learning_rate"],
            actor.optimizer.lr_schedule == "constant",
        ),
        f"actor.recompute = {actor.recompute}": (["actor.recompute_modules"], actor.recompute != "selective"),
        "rollout.engine = hf": (["rollout.servers."], rollout.engine == "hf"),
        "rollout.speculation.method = none": (["rollout.speculation."], rollout.speculation.method == "none"),
        "rollout.servers.endpoints names running servers": (
            [f"rollout.servers.{name}" for name in ("python", "count", "gpus")],
            bool(rollout.servers.endpoints),
        ),
        "objective.function is set": (["objective.loss"], bool(objective.function)),
        f"objective.loss = {loss}": (["objective.divergence."], loss not in ("", "divergence_tv")),
        "objective.loss = divergence_tv": (["objective.clip_"], loss == "divergence_tv"),
        "objective.kl.coef = 0": (["objective.kl.estimator"], not objective.kl.coef),
        "objective.overlong.buffer_tokens = 0": (["objective.overlong.penalty"], not objective.overlong.buffer_tokens),
        "objective.correction.level = none": (
            [f"objective.correction.{name}" for name in ("mode", "max_ratio", "min_ratio")],
            correction.level == "none",
        ),
        "objective.correction.mode = truncate": (
            ["objective.correction.min_ratio"],
            correction.level != "none" and correction.mode == "truncate",
        ),
        "observe.trackers = []": (["observe.tracking."], not config.observe.trackers),
    }


def _template_notes(data: DataConfig) -> list[str]:
    """Lines about a template's settings that `data` overrides, as a file may if the command line sets the template."""
    named = TEMPLATES.get(data.template)
    own = [item.name for item in fields(Template) if named and getattr(data, item.name) is not None]
    return [
        f"data.template = {data.template}: its {name} has no effect while data.{name} is set; null uses the template"
        for name in own
        if getattr(data, name) != getattr(named, name)
    ]


def gspo_note(config: Config) -> list[str]:
    """A warning if `loss=gspo` has the bounds of a token's ratio, at which it clips nothing."""
    objective = config.objective
    starts_at_one = not config.rollout.async_steps or old_is_current(objective) or needs_old_logprobs(objective)
    is_off_policy = objective.updates_per_step > 1 or not starts_at_one
    is_wide = max(objective.clip_low, objective.clip_high) >= _WIDE_FOR_GSPO
    if objective.loss != "gspo" or objective.function or not (is_off_policy and is_wide):
        return []
    return [
        f"warning: objective.loss = gspo with clip_low = {objective.clip_low}, clip_high = {objective.clip_high}: a"
        " sequence's ratio stays much closer to 1 than a token's, so hardly anything is clipped; its paper has"
        " objective.clip_low=3e-4 objective.clip_high=4e-4 (docs/objectives.md)"
    ]


def warmup_note(config: Config) -> list[str]:
    """A warning if the run ends before its learning rate is reached."""
    warmup, updates = config.actor.optimizer.lr_warmup_steps, config.steps * config.objective.updates_per_step
    if not 0 < updates < warmup:
        return []
    return [
        f"warning: actor.optimizer.lr_warmup_steps = {warmup} is more than the run's {updates} updates: the learning"
        f" rate ends at {updates / warmup:.0%} of actor.optimizer.learning_rate"
    ]


def server_notes(rollout: RolloutConfig, ranks_here: int) -> list[str]:
    """A warning if servers that the trainer starts leave most GPUs of a machine idle while they generate, or start on
    one that trains. `ranks_here`: of the trainer on a machine, a GPU each."""
    servers = rollout.servers
    if servers.launch != "local" or (servers.gpus and not servers.colocate):
        return []
    if not servers.colocate:
        return [
            "warning: rollout.servers.gpus is empty: servers start on a machine's first GPU, where a rank trains; give"
            " them others, or let them sleep during updates with rollout.servers.colocate=true"
        ]
    given = [len(entry.split(",")) for entry in servers.gpus]
    of_one = given[0] if given else read_split(servers.args).gpus
    used, most = sum(given) or of_one, ranks_here // of_one * of_one  # without `gpus` all start on the same ones
    if used >= most:
        return []
    groups = [",".join(map(str, range(one, one + of_one))) for one in range(0, most, of_one)]
    return [
        f"warning: servers generate on {used} of a machine's {ranks_here} GPUs, and the others wait; on {most} with"
        f" rollout.servers.count={len(groups)} rollout.servers.gpus='{json.dumps(groups)}'"
    ]
