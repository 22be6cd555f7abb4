"""Plans of one small job, made without the command: speeds, streaming, advice, and recorded runs of any method."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.job import REPOSITORY
from support.true_shapes import write_config

from dppo_megatron.config import load_config
from dppo_megatron.config.schema import Config
from dppo_megatron.config.selection import selection_settings
from dppo_megatron.platform.capabilities import Machine
from dppo_megatron.pruning.interface import StepCost
from dppo_megatron.pruning.policies import METHODS, with_method
from dppo_megatron.selection import Rollouts, Selector
from dppo_megatron.weights.architecture import Architecture, read_architecture
from dppo_megatron.weights.layer_parts import Gemma
from dppo_megatron.workbench.planning import timing
from dppo_megatron.workbench.planning.generation import SEQUENCE_S, Lengths, plan_engine
from dppo_megatron.workbench.planning.plan import lines, make_plan
from dppo_megatron.workbench.planning.site import CHIPS, GIB, Site
from dppo_megatron.workbench.planning.timing import speeds_for
from dppo_megatron.workbench.runs.trace import Trace, TracedStep

HOPPER = Machine((9, 0), "")
SITE = Site(8, 8, 80 * GIB, CHIPS["h100"].peak_flops, 1900 * GIB, bandwidth=CHIPS["h100"].bandwidth)


def _small_job(tmp_path: Path) -> tuple[Config, Architecture]:
    model = write_config(tmp_path, "qwen3_8b")
    recipe = str(REPOSITORY / "configs" / "h100" / "qwen3_8b_8gpus_dppo.yaml")
    config = load_config(recipe, [f"model.hf_path={model}"], purpose="plan", writes_run=False)
    config.rollout.prompts_per_step, config.rollout.completions_per_prompt, config.steps = 8, 4, 40
    return config, read_architecture(model)


def _recorded(config: Config, method: str) -> Trace:
    """Of a run by `method` over 16 prompts, of which a third is never solved and has completions ten times as long, so
    that what is skipped differs from what is generated. One step generates nothing."""
    config = with_method(config, method)
    settings, prompts, size = selection_settings(config), 16, config.rollout.completions_per_prompt
    selector = Selector(settings, prompts, None, None, None, None)
    solved = np.arange(prompts * size).reshape(prompts, size) % 2 * (np.arange(prompts) % 3 > 0)[:, None]
    lengths = np.where(solved.any(axis=1, keepdims=True), 40, 400) + np.arange(size)
    norms, steps = np.sqrt(lengths), []
    for step in range(1, config.steps + 1):
        at = selector.begin(step).prompt_index
        while (more := selector.refill(solved[at].astype(np.float64), step)) is not None:
            at = np.concatenate([at, more.prompt_index])
        rollouts = Rollouts(solved[at].astype(np.float64), lengths[at], norms[at])
        kept = selector.finish(rollouts, step).kept
        selector.feedback(StepCost(step, 1.0, 1.0, 0.0))
        steps.append(TracedStep(step, at, rollouts, kept, {"rollout": 1.0, "update": 1.0, "other": 0.0}))
    nothing = Rollouts(*(np.zeros((0, size), dtype) for dtype in (np.float64, np.int64, np.float64)))
    steps[7] = replace(steps[7], prompt_index=steps[7].prompt_index[:0], rollouts=nothing, kept=steps[7].kept[:0])
    return Trace(config, prompts, None, None, steps)


def test_tensor_parallelism_sends_at_the_chip_s_own_speed(tmp_path: Path) -> None:
    """What TP8 sends in an update and what a server's GPUs send for each token take half of an H100's seconds on a
    B200, whose NVLink is twice as fast, and one and a half times them on an A100."""
    config, architecture = _small_job(tmp_path)
    config.actor.layout.tensor_parallel = 8
    lengths = Lengths.assumed(150, 1000, 4096, 4)
    sending, of_token = {}, {}
    for name, chip in CHIPS.items():
        site = replace(SITE, peak_flops=1e30, gpu_memory=1e15, bandwidth=chip.bandwidth, link=chip.link)
        engine = plan_engine(config, architecture, site, 4096)
        found = timing.plan_timing(config, architecture, site, engine, lengths, speeds_for(architecture))
        assert found is not None
        sending[name], of_token[name] = found.seconds["update"], engine.sequence_s - SEQUENCE_S
    for seconds in (sending, of_token):
        ratios = {name: value / seconds["h100"] for name, value in seconds.items()}
        assert ratios == pytest.approx({"h100": 1, "h200": 1, "a100": 1.5, "b200": 0.5})


@pytest.mark.parametrize("colocate", [True, False])
def test_steps_that_stream_share_their_rounds(tmp_path: Path, colocate: bool) -> None:
    """Beside the trainer and on its GPUs; nothing is said of a longest completion then. Where each sync waits for a
    step's, or ends it, a step has a round of its own. A speed that is given is of a whole rollout, however made."""
    config, architecture = _small_job(tmp_path)
    rollout = config.rollout
    rollout.servers.colocate = colocate
    rollout.servers.launch, config.actor.offload = ("local", "all") if colocate else ("none", "none")

    def generate_s(ahead: int, in_flight: Any, decode: float | None = None) -> float:
        """As planned; and what is said of skipping is right."""
        rollout.async_steps, rollout.sync.in_flight = ahead, in_flight
        site, speeds = replace(SITE, engine_gpus=8), speeds_for(architecture, decode=decode)
        plan = make_plan(config, architecture, site, HOPPER, speeds, methods=[])
        (said,) = (line for line in lines(plan, "x") if "of the prompts saves" in line)
        assert said.endswith("waits for its longest") == (in_flight != "continue" and decode is None)
        assert plan.timing is not None
        return plan.timing.seconds["generate"]

    alone = generate_s(0, "finish")
    assert colocate or generate_s(1, "finish") == generate_s(1, "abort") == alone
    assert generate_s(2, "continue") < 0.75 * generate_s(1, "continue") < 0.45 * alone
    assert generate_s(2, "continue", 300.0) == generate_s(0, "finish", 300.0)


def test_nothing_is_advised_that_is_then_refused(tmp_path: Path) -> None:
    """By the machine, or by the layers that it has for this model: windows over packs that are shared."""
    config, architecture = _small_job(tmp_path)
    gemma = replace(architecture, gemma=Gemma(1024, (True, False) * 18, architecture.rope, 1.0))
    shares, offload = "actor.layout.context_parallel=2", "actor.optimizer.cpu_offload=1"
    config.actor.layer_spec = "te"

    def advised(shape: Architecture, machine: Machine) -> set[str]:
        plan = make_plan(config, shape, SITE, machine, speeds_for(shape, decode=300.0), methods=[])
        return {one.change for one in plan.advice} & {shares, offload}

    assert advised(architecture, HOPPER) == {shares, offload}
    assert advised(gemma, HOPPER) == advised(architecture, Machine((8, 0), "")) == {offload}
    config.actor.layer_spec = "local"
    assert advised(architecture, Machine((9, 0), "it is not installed")) == {shares}


def test_a_trace_of_any_method_is_planned_alike(tmp_path: Path) -> None:
    """What a run skipped is missing in its trace: seconds without pruning are GRPO's in the table, and completions as
    long, whichever method was recorded."""
    config, architecture = _small_job(tmp_path)
    lengths, recorded = {}, []
    for method in METHODS:
        trace = _recorded(config, method)
        recorded.append(sum(step.rollouts.lengths.sum() for step in trace.steps))
        speeds = speeds_for(architecture, decode=None if method == "dppo" else 300.0)  # the roofline too
        plan = make_plan(config, architecture, SITE, HOPPER, speeds, methods=["grpo"], trace=trace)
        assert plan.timing is not None
        assert plan.predictions[0].step_s == pytest.approx(plan.timing.step_s, rel=0.02), method
        lengths[method] = plan.lengths.completion
    assert min(recorded) < 0.8 * recorded[0]
    assert lengths == pytest.approx(dict.fromkeys(METHODS, lengths["grpo"]), rel=0.05)


def test_a_trace_is_replayed_under_the_config_s_pruning(tmp_path: Path) -> None:
    """And the recorded run's is left as it is; a group size factor is not replayed."""
    config, architecture = _small_job(tmp_path)
    trace, generated = _recorded(config, "grpo"), []
    before = copy.deepcopy(trace.config)
    speeds = speeds_for(architecture, decode=300.0)
    for rate, factor in ((0.1, 1.0), (0.6, 1.0), (0.6, 2.0)):
        config.pruning.prompt.rate, config.pruning.prompt.group_size_factor = rate, factor
        plan = make_plan(config, architecture, SITE, HOPPER, speeds, methods=["dppo"], trace=trace)
        generated.append(plan.predictions[0].completions_generated)
    assert generated[1] < 0.75 * generated[0] and generated[2] == generated[1] and trace.config == before
