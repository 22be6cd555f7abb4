"""A whole plan: memory, seconds, what pruning saves, and whether it fits; as text for a terminal, as JSON.

Without a trace, pruning is replayed over made-up prompts: pass rates from Beta(1/2, 1/2), which leaves 39 % of groups
of eight without variance (real sets: a third to four fifths), and log-normal lengths.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from dppo_megatron.config.checks import check_world_size
from dppo_megatron.config.pruning import EarlyStopConfig
from dppo_megatron.config.resolved_sets import longest_prompt_tokens
from dppo_megatron.config.schema import Config
from dppo_megatron.config.selection import selection_settings
from dppo_megatron.platform.capabilities import Machine
from dppo_megatron.pruning.policies import METHODS
from dppo_megatron.randomness import generator
from dppo_megatron.selection import Rollouts
from dppo_megatron.types import IntArray, UserError
from dppo_megatron.weights.architecture import Architecture
from dppo_megatron.workbench import simulate
from dppo_megatron.workbench.planning.advice import SettingAdvice, advise
from dppo_megatron.workbench.planning.generation import ROOFLINE, SPREAD, Lengths, capped
from dppo_megatron.workbench.planning.memory import PARTS, PHASES, MemoryPlan, plan_memory
from dppo_megatron.workbench.planning.shares import active_parameters, trained_parameters, whole_model
from dppo_megatron.workbench.planning.site import CONTEXT_BYTES, ENGINE_WORK_BYTES, GIB, SLEEPING_BYTES, Site
from dppo_megatron.workbench.planning.timing import SOURCES, Speeds, Timing, plan_timing, speeds_for
from dppo_megatron.workbench.runs.trace import Trace, TracedStep

_PROMPT_TOKENS = 150
"""Mean length of a mathematics problem in a chat template. An assumption."""

_ADVICE = 4
"""How many changes of a kind are printed; --json has all."""
SKIPPED = (0.15, 0.3, 0.5)
"""Shares of prompts for which a plan shows what skipping them saves."""


@dataclass(frozen=True, slots=True)
class Plan:
    architecture: Architecture
    site: Site
    lengths: Lengths
    memory: MemoryPlan
    timing: Timing | None
    speeds: Speeds
    predictions: list[simulate.Prediction]
    refused: dict[str, str]
    """Methods that the job's settings do not allow, with the reason."""
    advice: list[SettingAdvice]
    faster: list[SettingAdvice]
    helps: list[SettingAdvice]
    has_trace: bool

    @property
    def problems(self) -> list[str]:
        """Why it cannot fit, the largest phase first; empty if it does."""
        return self.memory.problems(self.site)

    def as_json(self) -> dict[str, Any]:
        """Every figure, in bytes and seconds."""
        timing, (always, checkpoint) = self.timing, self.memory.host
        nodes = dict.fromkeys(PHASES, always) | {checkpoint.name: checkpoint}
        return {
            "parameters": whole_model(self.architecture),
            "gpus": self.site.gpus,
            "gpu_memory": self.site.gpu_memory,
            "fits": not self.problems,
            "problems": self.problems,
            "phases": {p.name: p.parts | {"total": p.total, "stage": p.stage} for p in self.memory.phases},
            "host": {name: node.parts | {"total": node.total} for name, node in nodes.items()},
            "largest": self.memory.largest.name,
            "advice": {one.change: one.total for one in self.advice},
            "faster": {one.change: {"step_s": one.step_s, "total": one.total} for one in self.faster},
            "seconds": None if timing is None else timing.seconds | {"step": timing.step_s},
            "skipping_saves": None if timing is None else _saved(timing),
            "methods": {p.method: {"step_s": p.step_s, "label": p.label} for p in self.predictions},
            "refused": self.refused,
        }


def _saved(timing: Timing) -> dict[str, float]:
    """Share of the seconds of generation by the share of prompts that is skipped."""
    return {str(share): timing.rollout.saved(timing.tokens_generated, share) for share in SKIPPED}


def make_plan(
    config: Config,
    architecture: Architecture,
    site: Site,
    machine: Machine,
    speeds: Speeds,
    *,
    completion_tokens: float | None = None,
    prompt_tokens: float | None = None,
    methods: list[str] | None = None,
    trace: Trace | None = None,
) -> Plan:
    """Plan a checked config.

    Args:
        machine: what each rank runs on; settings that it would refuse are not advised.
        completion_tokens: mean length; None: half of the longest allowed, or the trace's.
        prompt_tokens: likewise; None: 150, or the longest allowed if that is less.
        methods: pruning methods to compare with the first of them; empty: none; None: all that the settings allow.
        trace: a recorded run whose outcomes are replayed, under `config`'s pruning.

    Raises:
        UserError: the layout does not fit the model or the number of GPUs, or a mean is above the longest allowed.
    """
    check_world_size(config, site.gpus)
    architecture.check_layout(config.actor)
    trace = None if trace is None else _pruned_as(config, trace)
    recorded = None if trace is None else simulate.unpruned_lengths(trace)
    lengths = _lengths(config, completion_tokens, prompt_tokens, recorded)
    memory = plan_memory(config, architecture, site, lengths.sequence)
    timing = plan_timing(config, architecture, site, memory.engine, lengths, speeds)
    advice = advise(config, architecture, site, machine, lengths, speeds, timing)
    predictions, refusals = list[simulate.Prediction](), dict[str, str]()
    if methods != [] and timing:
        replayed = made_up_trace(config, lengths) if trace is None else trace
        if methods is None:
            refusals = simulate.refused(replayed, METHODS)
            methods = [one for one in METHODS if one not in refusals]
        unpruned = simulate.unpruned_lengths(replayed) if recorded is None else recorded
        predictions = predict(timing, replayed, unpruned, methods)
    job = (architecture, site, lengths, memory, timing, speeds)
    return Plan(*job, predictions, refusals, *advice, has_trace=trace is not None)


def _lengths(
    config: Config, completion_tokens: float | None, prompt_tokens: float | None, recorded: IntArray | None
) -> Lengths:
    """`recorded`: a run's `unpruned_lengths`. For the other arguments and errors see `make_plan`."""
    limit, longest_prompt = config.rollout.sampling.max_completion_tokens, longest_prompt_tokens(config)
    for option, given, key, most in (
        ("completion", completion_tokens, "rollout.sampling.max_completion_tokens", limit),
        ("prompt", prompt_tokens, "max_prompt_tokens", longest_prompt),
    ):
        if given is not None and given > most:
            raise UserError(f"--{option}-tokens {given:g}: no mean can be above {key} = {most}")
    if completion_tokens is None:
        completion_tokens = limit / 2 if recorded is None else min(float(recorded.mean()), limit)
    prompt_tokens = min(_PROMPT_TOKENS, longest_prompt) if prompt_tokens is None else prompt_tokens
    if recorded is None:
        return Lengths.assumed(prompt_tokens, completion_tokens, limit, config.rollout.completions_per_prompt)
    shape = np.maximum(recorded.reshape(-1, recorded.shape[-1]), 1)  # a lost completion has no length
    return Lengths(prompt_tokens, completion_tokens, capped(shape, completion_tokens, limit))


def _pruned_as(config: Config, trace: Trace) -> Trace:
    """The trace as if its run had `config`'s settings of pruning, but groups of one size, as a replay has."""
    settings = copy.deepcopy(trace.config)
    settings.pruning = copy.deepcopy(config.pruning)
    settings.pruning.prompt.group_size_factor, settings.pruning.early_stop = 1.0, EarlyStopConfig()
    return replace(trace, config=settings)


def lines(plan: Plan, name: str) -> list[str]:
    """The plan as it is printed; `name`: the config's."""
    site, architecture = plan.site, plan.architecture
    whole, active = (
        f"{found / 1e9:.2f}e9" if (found := count(architecture)) >= 1e7 else f"{found:,}"
        for count in (whole_model, active_parameters)
    )
    trained = trained_parameters(architecture) / 1e9
    adapters = "" if architecture.lora is None else f", {trained:.3f}e9 of adapters trained"
    mixture = f", {active} of them for each token" if architecture.experts else ""
    return [
        f"{name}: {whole} parameters{mixture}{adapters}; {site.gpus} GPUs of {site.gpu_memory / GIB:.1f} GiB,"
        f" {site.ranks_per_node} a node",
        *_memory(plan),
        *_seconds(plan),
        *_savings(plan),
        *(f"  {line}" for line in simulate.left_out(plan.refused)),
        *_assumed(plan),
        *(f"does not fit: {problem}" for problem in plan.problems),
    ]


def _memory(plan: Plan) -> Iterator[str]:
    yield ""
    phases, engine = plan.memory.phases, plan.memory.engine
    parts = [part for part in PARTS if any(part in phase.parts for phase in phases)]
    yield f"{'GiB of a GPU':<14}" + "".join(f"{part:>12}" for part in parts) + f"{'total':>9}"
    for phase in phases:
        sizes = [phase.parts.get(part, 0.0) / GIB for part in parts]
        cells = "".join(f"{f'{size:.1f}' if size else '-':>12}" for size in sizes)
        stage = f"  (stage {phase.stage})" if any(p.stage for p in phases) else ""
        over = "  <- does not fit" if phase.total > plan.site.gpu_memory else ""
        yield f"{phase.name:<14}{cells}{phase.total / GIB:>9.1f}{stage}{over}"
    largest = plan.memory.largest
    yield f"largest: {largest.name}, {largest.total / GIB:.1f} GiB, most of it {largest.most}"
    for one in plan.advice[:_ADVICE]:
        yield f"  {one.change}: {one.total / GIB:.1f} GiB; costs {one.price}"
    if engine.kind == "hf":
        yield "engine: hf, embedded in every rank"
    elif not engine.gpus:
        yield f"engine: {engine.kind} at rollout.servers.endpoints; give the number of its GPUs as --engine-gpus N"
    else:
        where = "the trainer's GPUs" if engine.colocated else "GPUs of its own"
        yield (
            f"engine: {engine.kind} on {engine.gpus} of {where}, {engine.tensor} a replica: {engine.budget / GIB:.1f}"
            f" GiB of each, {engine.weights / GIB:.1f} weights, {engine.cache / GIB:.1f} for {engine.max_cached:,.0f}"
            f" tokens, {engine.max_cached / engine.longest:.0f} of the longest sequences"
        )
    for phase in plan.memory.host:
        of_node = ", ".join(f"{name} {size / GIB:.0f}" for name, size in phase.parts.items())
        whole = f"{phase.total / GIB:.0f} of {plan.site.host_memory / GIB:.0f}"
        yield f"GiB of a node's memory, {phase.name}: {whole} ({of_node})"


def _seconds(plan: Plan) -> Iterator[str]:
    timing = plan.timing
    yield ""
    if timing is None:
        unknown, full = "the number of generating GPUs is not known", "the servers' cache holds less than one sequence"
        yield f"seconds of a step: not estimated, {full if plan.memory.engine.gpus else unknown}"
        return
    parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in timing.seconds.items() if seconds)
    yield (
        f"seconds of a step without pruning, {plan.lengths.completion:.0f} tokens a completion:"
        f" {timing.step_s:.0f} ({parts})"
    )
    yield f"  a stop waits for the step, a due evaluation, and {timing.save_s:.0f} s of saving (docs/cluster.md)"
    saved = ", ".join(f"{one:.0%}" for one in _saved(timing).values())
    skipped = ", ".join(f"{share:.0%}" for share in SKIPPED)
    longest = ": the rest waits for its longest" if timing.waits else ""
    yield f"  skipping {skipped} of the prompts saves {saved} of generation{longest}"
    for one in plan.faster[:_ADVICE]:
        yield f"  {one.change}: {timing.step_s - one.step_s:.0f} s faster a step, and {one.total / GIB:.1f} GiB at most"


def _savings(plan: Plan) -> Iterator[str]:
    if not plan.predictions:
        return
    source = "the trace" if plan.has_trace else "made-up outcomes (docs/plan.md); --trace takes those of a run"
    base = plan.predictions[0]
    yield f"pruning, from {source}{'' if base.method == 'grpo' else f'; speed-ups over {base.method}'}:"
    for one in plan.predictions:
        alike = simulate.like_for_like(one, base)
        between = "" if alike is None else f", {alike[0]:.2f}-{alike[1]:.2f}x to the same result"
        yield f"  {one.method:<17} {one.label:<9} {one.step_s:>7.0f} s a step, {base.step_s / one.step_s:.2f}x{between}"


def _assumed(plan: Plan) -> Iterator[str]:
    yield ""
    usual = asdict(speeds_for(plan.architecture))
    for name, value in asdict(plan.speeds).items():
        if value is None:
            yield ROOFLINE
        else:
            yield f"{name} {value:g}: {SOURCES[name] if value == usual[name] else 'given'}"
    yield (
        f"assumed: {CONTEXT_BYTES / GIB:.0f} GiB a process for CUDA and NCCL, {ENGINE_WORK_BYTES / GIB:.0f} for a"
        f" server's own work, {SLEEPING_BYTES / GIB:.0f} while it sleeps; 5 % of activations lost to fragmentation"
    )


_STEPS = 32
_PROMPTS = 64
"""Prompts of a replayed step: enough for the averages, and more would only take longer."""


def predict(timing: Timing, trace: Trace, unpruned: IntArray, methods: list[str]) -> list[simulate.Prediction]:
    """Each method's prediction, in seconds on the plan's machines; `unpruned`: the trace's `unpruned_lengths`."""
    tokens = float(unpruned.sum()) / len(unpruned)
    seconds, scale = timing.seconds, tokens / timing.tokens_generated
    # a replayed step has fewer tokens than a real one: each counts as 1 / `scale` of them
    update_s = seconds["log-probs"] + seconds["update"]
    fixed_s = seconds["sync"] + seconds["checkpoint"] + seconds["other"]
    update_s_per_1k = update_s / scale / timing.tokens_generated * 1000
    costs = simulate.StepTimeModel(timing.rollout.scaled(scale), update_s_per_1k, fixed_s, timing.overlaps)
    return [simulate.simulate(trace, method, costs) for method in methods]


def made_up_trace(config: Config, lengths: Lengths) -> Trace:
    """Rollouts of prompts whose pass rate never changes, in a run where nothing is pruned."""
    small = copy.deepcopy(config)
    updates = small.objective.updates_per_step
    small.rollout.prompts_per_step = min(small.rollout.prompts_per_step, -(-_PROMPTS // updates) * updates)
    if selection_settings(small).planned_prompts % updates:  # CPPO's allocation plans another number than it is given
        small.rollout.prompts_per_step = config.rollout.prompts_per_step
    small.steps = _STEPS
    small.data.order = "shuffled"  # made-up prompts have no level to sort by
    small.pruning.prompt.group_size_factor = 1.0  # a replay has groups of one size, of whole completions
    small.pruning.early_stop = EarlyStopConfig()
    planned, size = selection_settings(small).planned_prompts, small.rollout.completions_per_prompt
    num_prompts = 4 * planned
    random = generator(0, "plan")
    solved = random.beta(0.5, 0.5, num_prompts)
    usual = random.lognormal(0.0, SPREAD, num_prompts)
    limit = small.rollout.sampling.max_completion_tokens
    steps = []
    for step in range(_STEPS):
        prompts = random.permutation(num_prompts)[:planned]
        rewards = (random.random((planned, size)) < solved[prompts, None]).astype(np.float64)
        drawn = usual[prompts, None] * random.lognormal(0.0, SPREAD, (planned, size))
        tokens = capped(drawn, lengths.completion, limit)
        rollouts = Rollouts(rewards, tokens, np.sqrt(tokens.astype(np.float64)))
        kept = np.ones(planned * size, dtype=np.bool_)
        steps.append(TracedStep(step, prompts, rollouts, kept, {"rollout": 1.0, "update": 1.0, "other": 0.0}))
    return Trace(small, num_prompts, None, None, steps)
