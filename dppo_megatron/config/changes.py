"""Which settings may change when a run resumes.

A resumed run is the same run only if everything that shapes its data, draws and updates is unchanged. The other
settings decide where, how fast or how long it runs, and may change at every resume.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, cast

import yaml

from dppo_megatron.config.load import config_from_values
from dppo_megatron.config.load import config_values as config_values
from dppo_megatron.config.references import is_path
from dppo_megatron.config.schema import Config
from dppo_megatron.types import UserError


def _free(schema: type, prefix: str = "") -> Iterator[str]:
    for item in fields(schema):
        inside, key = item.default_factory, prefix + item.name
        marked = getattr(inside, "free_at_resume", item.metadata.get("free_at_resume"))
        if marked is True:
            yield key
        elif marked:
            yield from (f"{key}.{name}" for name in marked)
        elif is_dataclass(inside):
            yield from _free(cast(type, inside), f"{key}.")


FREE = tuple(_free(Config))
"""Settings and sections that the schema marks as free to change. With another layout or packing, results agree up to
rounding, except that `pruning.completion.fill_slack` draws other completions, because micro-batches have other room.
Another `steps` shifts what is scheduled over the whole run (decaying learning rates, annealed pruning)."""


_NEVER = ("pruning.prompt.method", "pruning.completion.method", "actor.lora", "actor.optimizer.distributed")
"""Settings that may never change: the state in the checkpoint is of their kind. Adapters of other targets would lose
learned ones, and another alpha would rescale them, in silence."""
_REFERENCE = ("objective.kl.coef", "objective.kl.reference_path")
_ONLY_IF = {
    "model.hf_path": "model.hf_path only for a copy of the same model: weights come from the checkpoint",
    "data.train_": "data.train_* only for as many problems",
}
"""Limits on what `checkpoint.may_change` can allow, by the start of the key."""


def check_changes(config: Config, before: dict[str, Any], where: str) -> list[str]:
    """Compare with the settings of the run that is resumed; returns a line for each difference that is allowed.

    Args:
        before: those settings, as `config_values` gave them.
        where: the file they came from.

    Raises:
        UserError: the differences that are not allowed, all of them.
    """
    now = config_values(config)
    if before == now:  # saves building a Config of `before`, 0.1 s
        return []
    allowed: list[tuple[str, str]] = []
    refused: list[tuple[str, str]] = []
    old = config_values(config_from_values(before, where))
    no_reference = _REFERENCE if _keeps_reference(now) and not _keeps_reference(old) else ()
    never = _never(old, now, no_reference)
    for key, line in sorted(_differences(old, now)):
        may = not _under(key, (*never, *no_reference)) and _under(key, (*FREE, *config.checkpoint.may_change))
        (allowed if may else refused).append((key, line))
    if refused:
        keys = ",".join(dict.fromkeys((*(key for key, _ in refused), *no_reference)))
        only = "; ".join(what for start, what in _ONLY_IF.items() if any(key.startswith(start) for key, _ in refused))
        if no_reference:
            only += "; " * bool(only) + "with objective.kl.reference_path: the checkpoint holds no reference policy"
        how = f"choose another run_dir, or permit it with checkpoint.may_change=[{keys}]{f' ({only})' if only else ''}"
        if of_methods := [key for key, _ in refused if _under(key, never)]:
            how = (
                "or begin a new run_dir (model.hf_path may be the old run's hf/): what was learned under another"
                f" {' and '.join(of_methods)} cannot be taken over, whatever is permitted"
            )
        raise UserError(
            f"the run of {where} cannot be resumed with other settings: {'; '.join(line for _, line in refused)}."
            f" Set them back, {how} (see docs/checkpoints.md)"
        )
    unread = {"model.hf_path": "; the weights stay the checkpoint's"}
    return [line + unread.get(key, "") for key, line in allowed if not _under(key, ("checkpoint", "run_dir"))]


def _never(old: dict[str, Any], now: dict[str, Any], no_reference: tuple[str, ...]) -> tuple[str, ...]:
    """Settings and sections that may not change between these settings, whatever is permitted."""
    never = list(_NEVER)
    if "fit" in [values["pruning"]["prompt"]["score"] for values in (old, now)]:  # other scores cannot use fit's state
        never.append("pruning.prompt.score")
    if not now["actor"]["optimizer"]["distributed"]:  # which alone saves the same state for both types
        never.append("model.dtype")
    return (*never, *(no_reference if now["actor"]["lora"]["rank"] else ()))  # adapters allow no reference_path


def _keeps_reference(values: dict[str, Any]) -> bool:
    """Whether a run with these settings keeps its reference policy in checkpoints."""
    kl = values["objective"]["kl"]
    return bool(kl["coef"]) and not kl["reference_path"]


def saved_values(path: Path) -> dict[str, Any]:
    """The settings in a run's config.yaml."""
    if not path.is_file():  # on a pipe, reading would block
        raise UserError(f"{path}: is not a file, so the run cannot be resumed")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path}: cannot be read, so the run cannot be resumed: {reason[:300]}") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: holds no settings, so the run cannot be resumed")
    return values


def _differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """(key, line) for each setting that differs; a whole section that only one side has is one line.

    Example:
        >>> list(_differences({"sets": {}}, {"sets": {"a": {"path": "x", "limit": 0}}}))
        [('sets.a', 'sets.a: added')]
    """
    for key in old.keys() | new.keys():
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            yield from _differences(before, after, f"{prefix}{key}.")
        elif isinstance(after, dict) and key not in old:
            yield prefix + key, f"{prefix}{key}: added"
        elif isinstance(before, dict) and key not in new:
            yield prefix + key, f"{prefix}{key}: removed"
        elif before != after and not _same_path(prefix + key, before, after):
            yield prefix + key, f"{prefix}{key}: {before!r} -> {after!r}"


def _same_path(key: str, before: Any, after: Any) -> bool:
    if not (is_path(key) and before and after):
        return False
    return len({os.path.abspath(os.path.expanduser(path)) for path in (before, after)}) == 1


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value, of nested settings.

    Example: {"rollout": {"engine": "hf"}, "steps": 4} -> {"rollout.engine": "hf", "steps": 4}
    """
    result: dict[str, Any] = {}
    for key, value in values.items():
        result |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) and value else {f"{prefix}{key}": value}
    return result


def _under(key: str, sections: Iterable[str]) -> bool:
    return any(key == section or key.startswith(section + ".") for section in sections)
