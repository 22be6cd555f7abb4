"""How many layers each pipeline stage holds, uneven splits included.

Models are built with Megatron's `get_num_layers_to_build`, which needs process groups and refuses impossible splits by
assertions. Checks and plans need all stages in one process, and clear errors; tests/test_pipeline.py compares the two.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeAlias

from dppo_megatron.config.schema import UNEVEN_STAGES, ActorConfig
from dppo_megatron.types import UserError

Stages: TypeAlias = tuple[tuple[int, ...], ...]
"""[stage][chunk] -> number of layers. Chunk c of stage s is the model's part number c x stages + s."""

FIRST, LAST, EMBEDDING, LOSS, LAYOUT = UNEVEN_STAGES
UNEVEN_HINT = f"; for stages of unequal size see actor.megatron.{LAYOUT} (docs/actor.md)"

_LETTERS = {"embedding": "E", "decoder": "t", "loss": "L", "mtp": "m"}
_MOST_LETTERS = 8192
"""Longest layout; the schema allows models of 4,096 layers."""


def split_layers(num_layers: int, actor: ActorConfig) -> Stages:
    """The layers of each stage and chunk of a model of `num_layers` under the settings of `actor`. Raises UserError if
    a stage would get a fraction of a layer, or the settings contradict each other or the model.

    Example:
        94 layers over 4 stages, num_layers_in_last_pipeline_stage: 22        ((24,), (24,), (24,), (22,))
    """
    stages, chunks = actor.layout.pipeline_parallel, actor.layout.virtual_pipeline
    ends_as_layers = {EMBEDDING, LOSS}
    given = {key: actor.megatron[key] for key in UNEVEN_STAGES if actor.megatron.get(key) is not None}
    given = {key: value for key, value in given.items() if key not in ends_as_layers or value is not False}
    if not given:
        if num_layers % (stages * chunks):
            raise UserError(
                f"actor.layout: pipeline_parallel x virtual_pipeline = {stages * chunks}: the model's {num_layers}"
                f" layers do not divide by it{UNEVEN_HINT}"
            )
        return ((num_layers // (stages * chunks),) * chunks,) * stages
    name = "actor.megatron." + next(iter(given))
    if stages == 1:
        raise UserError(f"{name} divides layers over pipeline stages, but actor.layout.pipeline_parallel = 1")
    if given.keys() <= {FIRST, LAST}:
        return _by_ends(num_layers, stages, chunks, given)
    if given.keys() <= ends_as_layers:
        return _by_ends_as_layers(num_layers, stages, chunks, given)
    if given.keys() == {LAYOUT}:
        return _by_layout(num_layers, stages, chunks, given[LAYOUT])
    raise UserError(f"actor.megatron: {', '.join(given)}: two ways to divide the layers; keep one")


def check_optimizers(stages: Stages, actor: ActorConfig) -> None:
    """Refuse a stage without layers if one of its optimizers would have no parameters and could not be saved.

    The distributed optimizer asserts that torch's Adam has made a step (0.16, `state_dict`), so no stage may be empty;
    the other one takes the step of all stages from the first, so only that may not be empty."""
    layout, layers = actor.layout, list(map(sum, stages))
    missing = "no adapter (actor.lora)" if actor.lora.rank else ""
    if layout.expert_parallel > 1:  # then experts have their own optimizer
        missing = missing or f"no expert (actor.layout.expert_parallel = {layout.expert_parallel})"
    if missing and 0 in (layers if actor.optimizer.distributed else layers[:1]):
        raise UserError(
            f"actor.layout.pipeline_parallel = {len(stages)}: stage {layers.index(0)} would have no layer, and so"
            f" {missing}; Megatron could not save its optimizer or load it again; give the stage a layer"
        )


def _by_ends(num_layers: int, stages: int, chunks: int, given: Mapping[str, Any]) -> Stages:
    """The split with a given size of the first or last stage or both; the other stages are equal."""
    for key, value in given.items():
        if type(value) is not int or value < 1:
            raise UserError(f"actor.megatron.{key} = {value!r}: must be a whole number from 1")
    others, left = stages - len(given), num_layers - sum(given.values())
    settings = "actor.megatron: " + ", ".join(f"{key} = {value}" for key, value in given.items())
    if not others and left:
        raise UserError(
            f"{settings}: with 2 stages they must add up to the model's {num_layers} layers, not {sum(given.values())}"
        )
    if not others and chunks > 1:
        raise UserError(f"{settings}: Megatron-core divides by the number of stages between, which is 0; use {LAYOUT}")
    if others and (left < others or left % others):
        remain = f"{left} of the model's {num_layers} layers remain for {others} other stages"
        raise UserError(f"{settings}: {remain}, which does not give each the same number of 1 or more")
    middle = left // others if others else 0
    sizes = [given.get(FIRST, middle), *[middle] * (stages - 2), given.get(LAST, middle)]
    if uneven := next((size for size in sizes if size % chunks), None):
        raise UserError(
            f"{settings}: a stage of {uneven} layers does not divide into actor.layout.virtual_pipeline = {chunks}"
            f" chunks; {LAYOUT} can name chunks of unequal size"
        )
    return tuple((size // chunks,) * chunks for size in sizes)


def _by_ends_as_layers(num_layers: int, stages: int, chunks: int, given: Mapping[str, Any]) -> Stages:
    """The split in which the embedding or the loss or both count as a layer of their stage."""
    for key, value in given.items():
        if value is not True:
            raise UserError(f"actor.megatron.{key} = {value!r}: must be true or false")
    total = num_layers + len(given)
    if total % (stages * chunks):
        raise UserError(
            f"actor.megatron: {', '.join(given)}: {num_layers} layers and {len(given)} more do not divide by"
            f" pipeline_parallel x virtual_pipeline = {stages * chunks}{UNEVEN_HINT}"
        )
    sizes = [[total // (stages * chunks)] * chunks for _ in range(stages)]
    sizes[0][0] -= EMBEDDING in given
    sizes[-1][-1] -= LOSS in given
    return tuple(map(tuple, sizes))


def _by_layout(num_layers: int, stages: int, chunks: int, layout: Any) -> Stages:
    """The split by a text that names each stage ('Et*24|t*24|t*24|t*22L', first chunks first) or by a list of lists."""
    setting = f"actor.megatron.{LAYOUT} = {layout!r:.100}"
    parts = _parts(layout, setting)
    if len(parts) != stages * chunks:
        wanted = f"pipeline_parallel x virtual_pipeline = {stages} x {chunks} = {stages * chunks}"
        raise UserError(f"{setting}: names {len(parts)} stages, but actor.layout: {wanted}")
    if "m" in "".join(parts):
        raise UserError(f"{setting}: m is a layer of multi-token prediction, which no model family here has")
    if not all(parts):
        raise UserError(f"{setting}: stage {parts.index('') + 1} is empty; a stage needs a layer (t), E or L")
    if (parts[0][0], parts[-1][-1]) != ("E", "L") or any("".join(parts).count(end) != 1 for end in "EL"):
        raise UserError(f"{setting}: must start with E, the embedding, and end with L, the loss, and have each once")
    if (named := "".join(parts).count("t")) != num_layers:
        raise UserError(f"{setting}: names {named} layers (t), but the model has {num_layers}")
    return tuple(tuple(parts[chunk * stages + stage].count("t") for chunk in range(chunks)) for stage in range(stages))


def _parts(layout: Any, setting: str) -> list[str]:
    """The letters of each stage, as Megatron's `PipelineParallelLayerLayout` reads them."""
    if isinstance(layout, list):
        if not all(isinstance(row, list) and all(str(kind) in _LETTERS for kind in row) for row in layout):
            raise UserError(f"{setting}: must be a list of lists of {', '.join(_LETTERS)}")
        return ["".join(_LETTERS[kind] for kind in row) for row in layout]
    if not isinstance(layout, str):
        raise UserError(f"{setting}: must be a text such as 'Et*24|t*22L', or a list of lists")
    unrolled = layout.replace(",", "")
    for pattern in (r"\(([^)]+)\)\*0*([0-9]+)", r"(.)\*0*([0-9]+)"):
        # six digits suffice for the check (int() refuses more than 4,300); the pattern skips leading zeros
        if sum(len(part) * int(times[:6]) for part, times in re.findall(pattern, unrolled)) > _MOST_LETTERS:
            raise UserError(f"{setting}: is longer than {_MOST_LETTERS} layers and stages")
        unrolled = re.sub(pattern, lambda match: match[1] * int(match[2]), unrolled)
    if unknown := "".join(sorted(set(unrolled) - set("EtLm|"))):
        raise UserError(f"{setting}: {unknown!r}: only E, t, L, |, a comma and ( ) * with a number are allowed")
    return unrolled.split("|")
