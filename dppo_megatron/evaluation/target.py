"""Resolves the target of `dppo-megatron eval`: a model directory, a run, a checkpoint of a run, or a config file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dppo_megatron.checkpoint.manifest import read_manifest
from dppo_megatron.checkpoint.shelf import named
from dppo_megatron.config.changes import saved_values
from dppo_megatron.types import UserError

_SERVER_KEYS = ("endpoints", "launch", "colocate", "allow_remote_endpoints")


@dataclass(frozen=True, slots=True)
class Target:
    """A model to evaluate and the settings that come with it."""

    model: Path
    """Directory of a Hugging Face or a Megatron distributed checkpoint, with its tokenizer."""
    out: Path
    """Where results go unless --out says otherwise."""
    settings: Mapping[str, Any]
    where: str
    """The file that the settings came from."""
    said: tuple[str, ...] = ()
    """Lines for the log."""


def find_target(text: str, step: int | None = None) -> Target:
    """Resolve `text` to a target.

    Args:
        text: a Hugging Face directory, a run directory, or a checkpoint (checkpoints/step_000020, converted ones too).
        step: of a run, instead of its last model.

    Raises:
        UserError: it is none of these, or the run has no such checkpoint.
    """
    path = Path(text)
    if not path.is_dir():
        raise UserError(
            f"'{text}': no such directory; give a Hugging Face model, a run directory, one of its checkpoints, or a"
            " config file (.yaml)"
        )
    is_model, is_run = (path / "config.json").is_file(), (path / "config.yaml").is_file()
    if step is not None and not is_run:
        raise UserError(f"--step {step}: '{text}' is no run directory (it has no config.yaml)")
    if is_run and not is_model:
        return _of_run(path, step)
    if is_model and (path / "manifest.json").is_file():
        return _of_checkpoint(path)
    if is_model:
        return Target(path, Path("eval") / path.resolve().name, _defaults(path), str(path))
    raise UserError(
        f"'{text}' holds neither config.json (a Hugging Face model or a checkpoint) nor config.yaml (a run directory)"
    )


def _of_run(run: Path, step: int | None) -> Target:
    there_are = named(run / "checkpoints")
    steps = {number: path for number, path in there_are if not isinstance(read_manifest(path), str)}
    if step is not None:
        if step not in steps:
            there = ", ".join(str(number) for number in sorted(steps)) or "none"
            raise UserError(f"--step {step}: '{run}' has no such checkpoint; there are: {there}")
        model = steps[step]
    elif (run / "hf" / "config.json").is_file():
        model = run / "hf"
    elif steps:
        model = steps[max(steps)]
    else:
        raise UserError(f"'{run}' holds neither hf/ nor a complete checkpoint yet: there is no model to evaluate")
    settings, said = _without_servers(saved_values(run / "config.yaml"))
    return Target(model, run / "eval" / model.name, settings, str(run / "config.yaml"), said)


def _of_checkpoint(path: Path) -> Target:
    manifest = read_manifest(path)
    if isinstance(manifest, str):
        raise UserError(f"'{path}' is no complete checkpoint: {manifest}")
    settings, said = _without_servers(dict(manifest.config))
    # runs/x/checkpoints/step_000020 -> runs/x/eval/step_000020
    run = path.resolve().parent.parent
    out = (run if (run / "config.yaml").is_file() else Path()) / "eval" / path.resolve().name
    return Target(path, out, settings, str(path / "manifest.json"), said)


def _without_servers(settings: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Drop the run's server addresses: they may serve another run by now, and an evaluation loads other weights."""
    rollout = dict(settings.get("rollout") or {})
    engine, had_servers = rollout.get("engine", "hf"), rollout.get("engine", "hf") != "hf"
    servers = {key: value for key, value in (rollout.get("servers") or {}).items() if key not in _SERVER_KEYS}
    kept = {key: value for key, value in rollout.items() if key != "engine"} | {"servers": servers}
    said = (
        f"the run's {engine} servers are not used, they may be another run's by now; rollout.engine={engine} with"
        " rollout.servers.launch=local or rollout.servers.endpoints=[...] names servers for this evaluation",
    )
    return settings | {"rollout": kept}, said if had_servers else ()


def _defaults(model: Path) -> dict[str, Any]:
    """Settings for a model alone: its dtype, and a prompt for a boxed answer, as a chat turn if it has a template."""
    try:
        raw = json.loads((model / "config.json").read_text(encoding="utf-8"))
        dtype = str(raw.get("dtype") or raw.get("torch_dtype")) if isinstance(raw, dict) else ""
    except (OSError, ValueError, RecursionError):
        dtype = ""  # reading the architecture reports what is wrong
    chats = (model / "chat_template.jinja").is_file() or _has_template(model / "tokenizer_config.json")
    return {
        "model": {"dtype": dtype if dtype in ("float32", "bfloat16") else "bfloat16"},
        "data": {"template": "chat_boxed" if chats else "plain_boxed"},
    }


def _has_template(path: Path) -> bool:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(raw, dict) and bool(raw.get("chat_template"))
