"""Reads rotary position embeddings from the several places in config.json that may describe them.

transformers 5 writes `rope_parameters`, older versions `rope_theta` and `rope_scaling`, and a file may hold all of
them: transformers then uses `rope_scaling` alone and ignores `rope_parameters`. With YaRN in one and plain RoPE in the
other, the two readings differ by 0.5 nats a token, so contradictions are refused rather than resolved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dppo_megatron.types import UserError
from dppo_megatron.weights.config_keys import Number
from dppo_megatron.weights.json_files import plain, shown

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The constants that Megatron-core's Llama-3 frequency scaling has built in."""
DEFAULT_THETA = 10_000.0
"""transformers' own, where config.json has none."""

_THETA = Number(1.0, 1e30)  # frequencies are computed in float32
_FACTOR = Number(1.0, 1e6)
_TYPE_KEYS = ("rope_type", "type")
_NEUTRAL = {"partial_rotary_factor": 1}
_SOURCES = ("rope_parameters", "rope_scaling")


@dataclass(frozen=True, slots=True)
class Rope:
    """Plain RoPE, or Llama 3's frequency scaling."""

    theta: float
    llama3_factor: float = 0.0
    """0: plain."""


def read_rope(raw: Mapping[str, Any], path: Path) -> Rope:
    """The position embedding that transformers would build from `raw`.

    Raises:
        UserError: two places disagree, or a type, key or constant that the actor does not implement.
    """
    top = _checked("rope_theta", raw["rope_theta"], _THETA, path) if "rope_theta" in raw else None
    found = {name: _read_one(name, raw, top, path) for name in _SOURCES if raw.get(name)}
    if len(set(found.values())) > 1:
        first, second = (f"{name} = {shown(raw[name])}" for name in _SOURCES)
        raise UserError(
            f"{path}: {first} and {second} disagree; transformers would take rope_scaling alone. Remove one of them"
        )
    for name, rope in found.items():
        if top is not None and rope.theta != top:
            raise UserError(f"{path}: rope_theta = {top} and {name}.rope_theta = {rope.theta} disagree; remove one")
    rope = next(iter(found.values()), Rope(top or DEFAULT_THETA))
    _check_original(raw, rope, path)
    return rope


def _read_one(source: str, raw: Mapping[str, Any], top_theta: float | None, path: Path) -> Rope:
    given = raw[source]
    if not isinstance(given, dict):
        raise UserError(f"{path}: {source} = {shown(given)}: expected an object")
    kinds = {key: given[key] for key in _TYPE_KEYS if key in given}
    kind = next(iter(kinds.values()), "default")
    if any(other != kind for other in kinds.values()):
        raise UserError(f"{path}: {source}.rope_type and {source}.type disagree: {shown(given)}; remove one")
    if kind not in ("default", "llama3"):
        raise UserError(f"{path}: {source}.rope_type = {shown(kind)} is not supported; supported: default, llama3")
    theta = given.get("rope_theta", DEFAULT_THETA if top_theta is None else top_theta)
    theta = _checked(f"{source}.rope_theta", theta, _THETA, path)
    needed: dict[str, Any] = {"factor": None, **LLAMA3} if kind == "llama3" else {}
    for key, value in given.items():
        if key in (*_TYPE_KEYS, "rope_theta", *needed):
            continue
        if key not in _NEUTRAL or isinstance(value, bool) or value != _NEUTRAL[key]:
            raise UserError(f"{path}: {source}.{plain(key)} = {shown(value)} is not supported with rope type {kind}")
    if kind == "default":
        return Rope(theta)
    if missing := sorted(set(needed) - set(given)):
        raise UserError(f"{path}: {source}: rope type llama3 needs {', '.join(missing)}")
    for key, constant in LLAMA3.items():
        if isinstance(given[key], bool) or given[key] != constant:
            raise UserError(
                f"{path}: {source}.{key} = {shown(given[key])} is not supported; supported: {constant}, which"
                " Megatron-core has built in"
            )
    return Rope(theta, _checked(f"{source}.factor", given["factor"], _FACTOR, path))


def _check_original(raw: Mapping[str, Any], rope: Rope, path: Path) -> None:
    """At the top level this key overrides the one inside, and it means nothing to plain RoPE."""
    key = "original_max_position_embeddings"
    allowed = LLAMA3[key] if rope.llama3_factor else None
    if key in raw and (isinstance(raw[key], bool) or raw[key] != allowed):
        raise UserError(f"{path}: {key} = {shown(raw[key])} is not supported; supported: {shown(allowed)}")


def _checked(name: str, value: Any, allowed: Number, path: Path) -> float:
    if not allowed.fits(value):
        raise UserError(f"{path}: {name} = {shown(value)}: must be {allowed}")
    return float(value)
