"""Pipelines whose stages hold unequal numbers of layers.

What is relied on: our division is Megatron's, for every setting that we accept; what we refuse, Megatron refuses too,
builds wrong, or says less clearly; and a model of such stages is the model, in its values, gradients and checkpoints.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from support.job import REPOSITORY
from support.launch import run_ranks
from support.tiny import Parallel, build_actor, hf_logprobs, plan_for, random_samples, write_model
from support.true_shapes import write_config
from transformers import AutoModelForCausalLM

from dppo_megatron.algorithms.objectives import clipped_surrogate, supervised
from dppo_megatron.config import changes
from dppo_megatron.config.schema import UNEVEN_STAGES, ActorConfig, LayoutConfig
from dppo_megatron.types import UserError
from dppo_megatron.weights.architecture import read_architecture
from dppo_megatron.weights.pipeline import (
    EMBEDDING,
    FIRST,
    LAST,
    LAYOUT,
    LOSS,
    Stages,
    split_layers,
)
from dppo_megatron.workbench.cli import main


def _actor(stages: int, chunks: int = 1, **given: Any) -> ActorConfig:
    return ActorConfig(layout=LayoutConfig(pipeline_parallel=stages, virtual_pipeline=chunks), megatron=given)


# ------------------------------------------------------------------------------------------- against Megatron's own


@contextmanager
def _at(stage: int, chunks: int) -> Iterator[None]:
    """As if this process were a rank of pipeline stage `stage`."""
    names = "_MPU_PIPELINE_MODEL_PARALLEL_RANK", "_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE"
    before = [getattr(parallel_state, name) for name in names]
    parallel_state._MPU_PIPELINE_MODEL_PARALLEL_RANK = stage
    parallel_state._VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE = chunks if chunks > 1 else None
    try:
        yield
    finally:
        for name, value in zip(names, before, strict=True):
            setattr(parallel_state, name, value)


def _megatrons(num_layers: int, stages: int, chunks: int, given: dict[str, Any]) -> tuple[Stages, list[int]] | None:
    """What Megatron would build, and the first layer of each chunk in the model's order; None if it raises."""
    try:
        config = TransformerConfig(
            num_layers=num_layers,
            hidden_size=8,
            num_attention_heads=1,
            pipeline_model_parallel_size=stages,
            virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
            pipeline_dtype=torch.float32,
            **given,
        )
        sizes, offsets = [], {}
        for stage in range(stages):
            with _at(stage, chunks):
                virtual = [chunk if chunks > 1 else None for chunk in range(chunks)]
                sizes.append(tuple(get_num_layers_to_build(config, vp_stage=chunk) for chunk in virtual))
                for chunk in virtual:
                    offsets[chunk or 0, stage] = get_transformer_layer_offset(config, vp_stage=chunk)
    except (AssertionError, ValueError, ZeroDivisionError, NotImplementedError):
        return None
    return tuple(sizes), [offsets[at] for at in sorted(offsets)]


def _random_layout(rng: random.Random, num_layers: int, parts: int) -> str:
    """Often right: the layers thrown into stages, E before and L behind; with (...)* now and then."""
    cuts = sorted(rng.randint(0, num_layers) for _ in range(parts - 1))
    sizes = [b - a for a, b in zip([0, *cuts], [*cuts, num_layers], strict=True)]
    rows = ["t" * size if rng.random() < 0.5 or size < 2 else f"t*{size}" for size in sizes]
    text = "E" + "|".join(rows) + "L"
    if rng.random() < 0.3:
        text = text.replace("t|t", "(t|)*1t", 1)
    if rng.random() < 0.2:  # and damaged
        at = rng.randrange(len(text))
        text = text[:at] + rng.choice(["", "t", "E", "L", "|", "m", ",", " ", "x"]) + text[at + 1 :]
    return text


def _random_settings(rng: random.Random) -> tuple[int, int, int, dict[str, Any]]:
    stages, chunks = rng.randint(2, 6), rng.choice([1, 1, 2, 3])
    if rng.random() < 0.6:  # near what divides
        num_layers = stages * chunks * rng.randint(1, 5) + rng.choice([-2, -1, 0, 0, 1])
    else:
        num_layers = rng.randint(2, 40)
    num_layers = max(num_layers, 2)
    kind, given = rng.choice(["even", "ends", "ends", "as layers", "layout", "layout", "two"]), {}
    if kind in ("ends", "two"):
        for key in rng.choice([(FIRST,), (LAST,), (FIRST, LAST)]):
            given[key] = rng.choice(
                [0, 1, chunks, num_layers // 2, num_layers - (stages - 1) * chunks, rng.randint(1, 9)]
            )
    if kind in ("as layers", "two"):
        given |= {key: rng.random() < 0.8 for key in (EMBEDDING, LOSS)}
    if kind == "layout":
        given[LAYOUT] = _random_layout(rng, num_layers, stages * chunks)
    return num_layers, stages, chunks, given


def test_our_division_is_megatrons() -> None:
    """5,000 settings, right ones and wrong ones. Sizes and places equal where we accept. Where we refuse and Megatron
    does not, it loses layers or builds -5 of them, leaves a stage empty, or puts the embedding elsewhere than said."""
    rng, accepted, refused, stricter = random.Random(22), 0, 0, 0
    for _ in range(5000):
        num_layers, stages, chunks, given = _random_settings(rng)
        theirs = _megatrons(num_layers, stages, chunks, given)
        try:
            ours = split_layers(num_layers, _actor(stages, chunks, **given))
        except UserError as error:
            refused += 1
            if theirs is not None:
                stricter += 1
                every = [size for sizes in theirs[0] for size in sizes]
                wrong = sum(every) != num_layers or min(every) < 0
                assert wrong or re.search("is empty|must begin with E", str(error)), (str(error), given)
            continue
        accepted += 1
        assert theirs is not None, (num_layers, stages, chunks, given, ours)
        sizes, offsets = theirs
        assert ours == sizes
        in_order = [ours[stage][chunk] for chunk in range(chunks) for stage in range(stages)]
        assert sum(in_order) == num_layers and min(in_order[1:-1], default=1) > 0
        assert offsets == [sum(in_order[:place]) for place in range(len(in_order))], (num_layers, stages, chunks, given)
    assert accepted > 1000 and refused > 1000 and stricter > 10, (accepted, refused, stricter)


KNOWN = [
    (94, _actor(4, **{LAST: 22}), ((24,), (24,), (24,), (22,))),
    (94, _actor(8, **{FIRST: 11, LAST: 11}), ((11,), *((12,),) * 6, (11,))),
    (94, _actor(8, **{EMBEDDING: True, LOSS: True}), ((11,), *((12,),) * 6, (11,))),
    (94, _actor(8, 4, **{EMBEDDING: True, LOSS: True}), ((2, 3, 3, 3), *((3, 3, 3, 3),) * 6, (3, 3, 3, 2))),
    (61, _actor(4, **{LAYOUT: "Et*15|(t*16|)*2t*14L"}), ((15,), (16,), (16,), (14,))),
    (61, _actor(4, **{FIRST: 13}), ((13,), (16,), (16,), (16,))),
    (3, _actor(2, **{LAYOUT: [["embedding", "decoder"], ["decoder", "decoder", "loss"]]}), ((1,), (2,))),
    (4, _actor(2, **{FIRST: None, LOSS: False}), ((2,), (2,))),
]


@pytest.mark.parametrize(("num_layers", "actor", "stages"), KNOWN, ids=str)
def test_recipes_of_others(num_layers: int, actor: ActorConfig, stages: Stages) -> None:
    """Qwen3-235B's 94 layers and DeepSeek-V3's 61, as other trainers' recipes divide them."""
    assert split_layers(num_layers, actor) == stages


@pytest.mark.parametrize(
    ("actor", "said"),
    [
        (
            _actor(4),
            "the model's 7 layers do not divide by it; for stages of unequal size see"
            " actor.megatron.pipeline_model_parallel_layout (docs/actor.md)",
        ),
        (_actor(8), "= 8: the model's 7 layers do not divide by it"),
        (_actor(1, **{LAST: 3}), "divides layers over pipeline stages, but actor.layout.pipeline_parallel = 1"),
        (_actor(2, **{FIRST: 3, LAST: 3}), "with 2 stages they must add up to the model's 7 layers, not 6"),
        (
            _actor(2, 2, **{FIRST: 3, LAST: 4}),
            "divides by the number of stages between, which is 0; use pipeline_model",
        ),
        (_actor(4, **{FIRST: 2}), "5 of the model's 7 layers remain for 3 other stages, which does not give each"),
        (_actor(4, **{LAST: 9}), "-2 of the model's 7 layers remain"),
        (_actor(3, **{FIRST: 0}), "num_layers_in_first_pipeline_stage = 0: must be a whole number from 1"),
        (
            _actor(2, 2, **{LAST: 3}),
            "a stage of 3 layers does not divide into actor.layout.virtual_pipeline = 2 chunks",
        ),
        (_actor(2, **{EMBEDDING: 1, LOSS: True}), "account_for_embedding_in_pipeline_split = 1: must be true or false"),
        (_actor(4, **{EMBEDDING: True, LOSS: True}), "7 layers and 2 more do not divide by"),
        (_actor(2, **{LAST: 3, LAYOUT: "Et*4|t*3L"}), "two ways to divide the layers; keep one"),
        (
            _actor(2, **{LAYOUT: "Et*7L"}),
            "names 1 stages, but actor.layout: pipeline_parallel x virtual_pipeline = 2 x 1",
        ),
        (_actor(2, 2, **{LAYOUT: "Et*4|t*3L"}), "names 2 stages, but actor.layout: pipeline_parallel x virtual_pipel"),
        (_actor(2, **{LAYOUT: "Et*4|t*4L"}), "names 8 layers (t), but the model has 7"),
        (_actor(3, **{LAYOUT: "Et*4||t*3L"}), "stage 2 is empty"),
        (_actor(2, **{LAYOUT: "t*4|Et*3L"}), "must start with E"),
        (_actor(2, **{LAYOUT: "Et*4|t*3mL"}), "which no model family here has"),
        (_actor(2, **{LAYOUT: "Et*4 | t*3L"}), "only E, t, L, |, a comma"),
        (_actor(2, **{LAYOUT: "Et*999999999|t*3L"}), "is longer than 8192"),
        (_actor(2, **{LAYOUT: f"Et*{'0' * 6}999999999|t*3L"}), "is longer than 8192"),
        (_actor(2, **{LAYOUT: 4}), "must be a text such as"),
        (_actor(2, **{LAYOUT: [["embedding", "layer"], ["loss"]]}), "must be a list of lists of embedding, decoder"),
    ],
    ids=str,
)
def test_what_cannot_be_is_a_sentence(actor: ActorConfig, said: str) -> None:
    """With the setting, the model's layers and what would be right."""
    with pytest.raises(UserError, match=re.escape(said)):
        split_layers(7, actor)


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("expert_parallel", [1, 2])
@pytest.mark.parametrize("distributed", [False, True])
def test_a_stage_of_which_nothing_could_be_saved_is_refused(
    tmp_path: Path, rank: int, expert_parallel: int, distributed: bool
) -> None:
    """E or L alone hold no adapter, and no expert where experts have an optimizer of their own; `test_lora.py` resumes
    with L alone, without the distributed one."""
    architecture = read_architecture(write_config(tmp_path, "qwen3_30b_a3b", num_hidden_layers=4))
    for layout, empty in (("E|ttttL", 0), ("Etttt|L", 1), ("Et|tttL", None), ("E|tt|t|tL", None), ("Ett|t|t|L", None)):
        actor = _actor(2, 1 + ("|t" in layout and layout.count("|") > 1), **{LAYOUT: layout})
        actor.lora.rank, actor.layout.expert_parallel = rank, expert_parallel
        actor.optimizer.distributed = distributed
        if (empty == 0 or (empty == 1 and distributed)) and (rank or expert_parallel > 1):
            with pytest.raises(UserError, match=f"stage {empty} would have no layer, and so no .*; give the stage a"):
                architecture.check_layout(actor)
        else:
            architecture.check_layout(actor)


def test_a_run_resumes_at_another_division() -> None:
    """It is part of the layout, so it may change like actor.layout."""
    assert {f"actor.megatron.{key}" for key in UNEVEN_STAGES} <= set(changes.FREE)


@pytest.mark.parametrize(
    ("given", "stage"),
    [
        (f"{{{FIRST}: 31}}", 0),
        (f"{{{LAST}: 31}}", 3),
        (f"{{{LAYOUT}: 'E|t*59|t|tL'}}", 1),
        (f"{{{LAYOUT}: [[embedding], [decoder], {['decoder'] * 59}, [decoder, loss]]}}", 2),
    ],
    ids=["first", "last", "layout", "lists"],
)
def test_the_fullest_stage_decides(tmp_path: Path, given: str, stage: int) -> None:
    """A plan of Qwen3-8B's shape with 61 layers: refused when evenly divided, and the largest phases are those of the
    stage that is given most."""
    model = write_config(tmp_path / "model", "qwen3_8b", num_hidden_layers=61)
    recipe, out = REPOSITORY / "configs" / "h100" / "qwen3_8b_32gpus_grpo.yaml", tmp_path / "plan.json"
    command = ["plan", str(recipe), f"model.hf_path={model}", "--gpus", "32", "--methods", "grpo", "--json", str(out)]
    command += ["actor.layout.pipeline_parallel=4", "--gpu-memory", "1000"]
    assert main([*command, f"actor.megatron={given}"]) == 0
    phases = json.loads(out.read_text(encoding="utf-8"))["phases"]
    assert {phases[name]["stage"] for name in ("step", "forward", "checkpoint")} == {stage}


# ------------------------------------------------------------------------------------------- on real ranks

SEVEN = {
    2: [
        Parallel(pp=2, uneven=((FIRST, 2),)),
        Parallel(pp=2, uneven=((LOSS, True),)),
        Parallel(pp=2, vpp=2, uneven=((LAYOUT, "Ett|tt|t|ttL"),)),
        Parallel(pp=2, vpp=4, uneven=((EMBEDDING, True),)),
    ],
    4: [
        Parallel(pp=4, uneven=((LAST, 1),)),
        Parallel(pp=4, uneven=((FIRST, 2), (LAST, 1))),
        Parallel(pp=4, vpp=2, uneven=((LAYOUT, "E|t|t|t|t|t|tt|L"),)),
        Parallel(pp=2, tp=2, vpp=2, uneven=((LAYOUT, "Et|tt|ttt|tL"),)),
    ],
}
MANY = {
    94: {4: [Parallel(pp=4, uneven=((LAST, 22),))], 8: [Parallel(pp=8, uneven=((FIRST, 11), (LAST, 11)))]},
    61: {4: [Parallel(pp=4, uneven=((LAYOUT, "Et*15|(t*16|)*2t*14L"),))]},
}
MANY[94][8].append(Parallel(pp=8, vpp=4, uneven=((EMBEDDING, True), (LOSS, True))))


def _float64(path: Path, layouts: list[Parallel]) -> list[Any]:
    """Log-probabilities and gradients of one layout after another, in float64, and whether the weights came back."""
    found = []
    for parallel in layouts:
        actor = build_actor(path, Parallel(**vars(parallel) | {"dtype": torch.float64}))
        samples = random_samples(5, 37)
        plan = plan_for(samples, parallel)
        logprobs = actor.logprobs(samples, plan)
        actor.accumulate(samples, plan, clipped_surrogate(0.2, 0.28, 3.0))
        gradients = {name: tensor.clone() for name, tensor in actor.gradients()}
        found.append((logprobs, gradients, {name: tensor.clone() for name, tensor in actor.weights(to=[0])}))
    return found


def _check_against_transformers(path: Path, by_ranks: dict[int, list[Parallel]]) -> None:
    """Log-probabilities within 1e-6 of transformers (its norms are float32 in any type), gradients within 1e-9 of their
    norm of the one-process model, weights streamed as they were loaded, from every layout."""
    model = AutoModelForCausalLM.from_pretrained(path).double().eval()
    expected = hf_logprobs(model, random_samples(5, 37))
    [(_, gradients, weights)] = run_ranks(_float64, 1, path, [Parallel()])[0]
    stored = model.state_dict()
    assert len(weights) > 10 and all(torch.equal(tensor, stored[name]) for name, tensor in weights.items())
    compared = 0
    for ranks, layouts in by_ranks.items():
        for parallel, found in zip(layouts, run_ranks(_float64, ranks, path, layouts)[0], strict=True):
            for mine, theirs in zip(found[0], expected, strict=True):
                np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-6, err_msg=str(parallel))
            assert found[1].keys() == gradients.keys()
            for name, gradient in gradients.items():
                assert (found[1][name] - gradient).norm() <= 1e-9 * gradient.norm(), (parallel, name)
                assert torch.equal(found[2][name], weights[name]), (parallel, name)
            compared += 1
    assert compared == sum(map(len, by_ranks.values())) > 0


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_seven_layers_are_the_same_model(tmp_path: Path, tied: bool) -> None:
    """Uneven PP2, PP4, with virtual stages, with the embedding and the head alone on a rank."""
    path = write_model(tmp_path / "model", num_hidden_layers=7, tie_word_embeddings=tied)
    _check_against_transformers(path, SEVEN if not tied else {2: SEVEN[2][:1], 4: SEVEN[4][2:]})


@pytest.mark.slow
@pytest.mark.parametrize("num_layers", [pytest.param(94, marks=pytest.mark.long), 61])
def test_94_and_61_layers_are_the_same_model(tmp_path: Path, num_layers: int) -> None:
    """Qwen3-235B's depth at PP4, PP8 and PP8 x VPP4, DeepSeek-V3's at PP4, each with tiny layers."""
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
    }
    path = write_model(tmp_path / "model", num_hidden_layers=num_layers, **sizes)
    _check_against_transformers(path, MANY[num_layers])


def _save(model: Path, parallel: Parallel, target: Path, source: Path | None) -> None:
    """On ranks: a checkpoint of two updates, or of what `source` holds, at this layout."""
    from dppo_megatron.checkpoint.store import CheckpointStore, describe, load_checkpoint

    actor = build_actor(model, parallel)
    samples = random_samples(6, 37)
    if source:
        load_checkpoint(source, actor)
    else:
        for _ in range(2):
            actor.update(samples, plan_for(samples, parallel), supervised())
    store = CheckpointStore(target, assets=model, run="0123456789abcdef", keep=2, async_save=False)
    store.save(actor, {"step": 1}, describe(1, {"seed": 1}, run="0123456789abcdef"))
    store.finalize(blocking=True)


def _stored(root: Path) -> dict[str, torch.Tensor]:
    from megatron.core.dist_checkpointing import load_plain_tensors

    [directory] = root.glob("step_*")
    found = run_ranks(lambda: load_plain_tensors(str(directory)), 1)[0]
    return {key: value for key, value in found.items() if isinstance(value, torch.Tensor)}


@pytest.mark.slow
def test_a_checkpoint_moves_between_divisions(tmp_path: Path) -> None:
    """Saved at an uneven PP4; loaded and saved again at an uneven PP2 x VPP2, at an even PP2 and on one process: every
    tensor of model and optimizer has the same bytes."""
    model = write_model(tmp_path / "model", num_hidden_layers=6)

    def at(**given: Any) -> Parallel:
        return Parallel(distributed_optimizer=True, **given)

    run_ranks(_save, 4, model, at(pp=4, uneven=((FIRST, 1), (LAST, 1))), tmp_path / "first", None)
    first = _stored(tmp_path / "first")
    assert sum("exp_avg" in key for key in first) > 10 and any(key.startswith("decoder") for key in first), list(first)
    [source] = (tmp_path / "first").glob("step_*")
    for n, to in enumerate([at(pp=2, vpp=2, uneven=((LAYOUT, "E|tt|ttt|tL"),)), at(pp=2), at()]):
        run_ranks(_save, to.world_size, model, to, tmp_path / str(n), source)
        again = _stored(tmp_path / str(n))
        assert again.keys() == first.keys()
        for key, tensor in first.items():
            assert torch.equal(again[key], tensor), (to, key)
