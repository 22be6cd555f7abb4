"""A plan as text, for a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from dppo_megatron.workbench.planning.memory import PARTS, Phase
from dppo_megatron.workbench.planning.plan import SKIPPED, Plan, most
from dppo_megatron.workbench.planning.roofline import ROOFLINE
from dppo_megatron.workbench.planning.site import CONTEXT_BYTES, ENGINE_WORK_BYTES, GIB, SLEEPING_BYTES
from dppo_megatron.workbench.simulate import like_for_like

_ADVICE = 4


def lines(plan: Plan, name: str) -> list[str]:
    site = plan.site
    mixture = "" if plan.active >= 0.8 * plan.parameters else f", {plan.active / 1e9:.2f}e9 of them for each token"
    return [
        f"{name}: {plan.parameters / 1e9:.2f}e9 parameters{mixture}; {site.gpus} GPUs of"
        f" {site.gpu_memory / GIB:.1f} GiB, {site.ranks_per_node} a node",
        *_gpu(plan),
        *_engine(plan),
        *_host(plan),
        *_seconds(plan),
        *_savings(plan),
        *_assumed(plan),
        *(f"does not fit: {problem}" for problem in plan.problems),
    ]


def _gpu(plan: Plan) -> Iterator[str]:
    yield ""
    parts = [part for part in PARTS if part != "fp8 copies" or any(part in p.parts for p in plan.memory.phases)]
    yield f"{'GiB of a GPU':<14}" + "".join(f"{part:>12}" for part in parts) + f"{'total':>9}{'a node':>9}"
    for phase, node in zip(plan.memory.phases, plan.memory.host, strict=True):
        over = "  <- does not fit" if phase.total > plan.site.gpu_memory else ""
        stage = f"  (stage {phase.stage})" if any(p.stage for p in plan.memory.phases) else ""
        cells = "".join(f"{_gib(phase, part):>12}" for part in parts)
        yield f"{phase.name:<14}{cells}{phase.total / GIB:>9.1f}{node.total / GIB:>9.0f}{stage}{over}"
    largest = plan.memory.largest
    yield f"largest: {largest.name}, {largest.total / GIB:.1f} GiB, most of it {most(largest)}"
    for one in plan.advice[:_ADVICE]:
        yield f"  {one.change}: {one.total / GIB:.1f} GiB; costs {one.price}"


def _gib(phase: Phase, part: str) -> str:
    return f"{phase.parts[part] / GIB:.1f}" if phase.parts.get(part) else "-"


def _engine(plan: Plan) -> Iterator[str]:
    engine = plan.memory.engine
    if engine.kind == "hf":
        yield "engine: hf, embedded in every rank"
    elif not engine.gpus:
        yield f"engine: {engine.kind} at rollout.servers.endpoints; --engine-gpus says on how many GPUs"
    else:
        where = "the trainer's GPUs" if engine.colocated else "GPUs of its own"
        yield (
            f"engine: {engine.kind} on {engine.gpus} of {where}, {engine.tensor} a replica: {engine.budget / GIB:.1f}"
            f" GiB of each, {engine.weights / GIB:.1f} weights, {engine.cache / GIB:.1f} for"
            f" {engine.cache / engine.cache_per_token:,.0f} tokens, {engine.sequences:.0f} of the longest sequences"
        )


def _host(plan: Plan) -> Iterator[str]:
    for phase in plan.memory.on_host:
        parts = ", ".join(f"{name} {size / GIB:.0f}" for name, size in phase.parts.items())
        whole = f"{phase.total / GIB:.0f} of {plan.site.host_memory / GIB:.0f}"
        yield f"GiB of a node's memory, {phase.name}: {whole} ({parts})"


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
    saved = ", ".join(f"{timing.rollout.saved(timing.tokens_generated, share):.0%}" for share in SKIPPED)
    skipped = ", ".join(f"{share:.0%}" for share in SKIPPED)
    yield f"  skipping {skipped} of the prompts saves {saved} of generation: what is left waits for its longest"
    for one in plan.faster[:_ADVICE]:
        yield f"  {one.change}: {timing.step_s - one.step_s:.0f} s faster a step, and {one.total / GIB:.1f} GiB at most"


def _savings(plan: Plan) -> Iterator[str]:
    if not plan.predictions:
        return
    whence = "the trace" if plan.has_trace else "made-up outcomes (docs/plan.md); --trace takes those of a run"
    yield f"pruning, from {whence}:"
    base = plan.predictions[0]
    for one in plan.predictions:
        alike = like_for_like(one, base)
        between = "" if alike is None else f", {alike[0]:.2f}-{alike[1]:.2f}x to the same result"
        yield f"  {one.method:<17} {one.label:<9} {one.step_s:>7.0f} s a step, {base.step_s / one.step_s:.2f}x{between}"


def _assumed(plan: Plan) -> Iterator[str]:
    yield ""
    units = {"decode": "tokens/s a GPU", "sync_gb_per_s": "GB/s", "save_gb_per_s": "GB/s", "other_s": "s"}
    for item in fields(plan.speeds):
        if (speed := getattr(plan.speeds, item.name)) is None:
            yield ROOFLINE
            continue
        what = item.name.partition("_")[0]
        yield f"{what} {speed.value:g} {units.get(item.name, '')}: {speed.source}".replace(" : ", ": ")
    yield (
        f"assumed: {CONTEXT_BYTES / GIB:.0f} GiB a process for CUDA and NCCL, {ENGINE_WORK_BYTES / GIB:.0f} for a"
        f" server's own work, {SLEEPING_BYTES / GIB:.0f} while it sleeps; 5 % of activations lost to fragments"
    )
