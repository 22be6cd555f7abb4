"""Seconds and bytes of the training step on one device, measured by a checkout's `benchmarks/gpu/train_step.py`."""

from __future__ import annotations

import json
import os
from typing import Any, Literal

import torch

from dppo_megatron.actor.layout import build_layout, start_process_group
from dppo_megatron.children import package_environment, start_python
from dppo_megatron.config.schema import ActorConfig, Config, LayoutConfig
from dppo_megatron.platform.capabilities import LayerSpec, this_machine
from dppo_megatron.workbench.accept.runner import BENCHMARK, Sheet, repository
from dppo_megatron.workbench.accept.workload import TEN_MILLION, RandomWeights, architecture_of, shape_named
from dppo_megatron.workbench.doctor.fp8_gate import run_gate
from dppo_megatron.workbench.planning.memory import MemoryPlan, plan_memory
from dppo_megatron.workbench.planning.site import CHIPS, GIB, Site
from dppo_megatron.workbench.planning.timing import speeds_for

_CAP = 8192
"""Tokens of a pack for 4B: at 16,384, 80 GB of activations and 72 of model and optimizer exceed an H200."""


def utilization(sheet: Sheet, spec: LayerSpec) -> None:
    """4B at packs of 8,192."""
    sizes = {"sequence-tokens": _CAP, "microbatches": 8, "max-tokens-per-microbatch": _CAP, "layer-spec": spec}
    model, smaller = model_that_fits(sheet, spec=spec)
    row = next(iter(_rows(sheet, "mfu", model, **sizes).values()))
    expected = _note_mfu(sheet, "mfu", row, model, smaller)
    mfu, step_s = row["mfu_of_bf16_peak"], row["step_s"]["median"]
    sheet.note("step_s", step_s, step_s * mfu / expected if mfu else None)
    sheet.note("peak_gib", row["peak_memory_gib"])


def lengths(sheet: Sheet) -> None:
    """0.6B at two lengths of equal total."""
    sizes = {"sequence-tokens": (4096, 16384), "microbatches": 4}
    for figure, row in zip(sheet.step.figures, _rows(sheet, "mfu", "0.6b", **sizes).values(), strict=True):
        _note_mfu(sheet, figure, row, "0.6b")


def _note_mfu(sheet: Sheet, figure: str, row: dict[str, Any], model: str, smaller: str = "") -> float:
    """Note the MFU, unjudged if the model is `smaller` (the reason); returns the MFU that `plan` expects."""
    expected, mfu = speeds_for(architecture_of(shape_named(model))).mfu, row["mfu_of_bf16_peak"]
    rate = row["useful_tflops_per_s"]
    if mfu and smaller:
        sheet.note(figure, None, note=f"{mfu:.1%} {smaller}")
    else:
        sheet.note(figure, mfu, expected, row["actor"] if mfu else f"no data sheet of this chip; {rate:.3g} TFLOP/s")
    return expected


def model_that_fits(
    sheet: Sheet, fp8: Literal["off", "tensorwise"] = "off", spec: Literal["auto"] | LayerSpec = "auto"
) -> tuple[str, str]:
    """4B or the user's model; or a smaller one that fits by `plan`, and why: it is not judged, as bars are 4B's."""
    card, wanted = card_bytes(sheet), sheet.model or "4b"
    need = {model: _planned(sheet, model, fp8, spec).largest.total for model in (wanted, "1.7b", "0.6b")}
    model = next((model for model, total in need.items() if total < 0.95 * card), "0.6b")
    why = f"with {model}: {wanted} would take {need[wanted] / GIB:.0f} GiB, the card has {card / GIB:.0f}"
    return model, "" if model == wanted else why


def card_bytes(sheet: Sheet) -> float:
    """Without CUDA an H200's, so that a CPU tries the same models. Creates no context: it would count in the peaks."""
    return float(torch.cuda.get_device_properties(0).total_memory) if sheet.cuda else CHIPS["h200"].memory_bytes


def _planned(
    sheet: Sheet, model: str, fp8: Literal["off", "tensorwise"] = "off", spec: Literal["auto"] | LayerSpec = "auto"
) -> MemoryPlan:
    """With the layers that the actor uses here; without CUDA, those that it uses on an H200."""
    config, architecture = Config(), architecture_of(shape_named(model))
    config.actor.layer_spec = spec
    if sheet.cuda:
        has_experts = architecture.experts is not None
        heads = architecture.heads
        config.actor.layer_spec = this_machine().choose_layer_spec(spec, fp8, has_experts=has_experts, heads=heads)[0]
    config.model.dtype, config.packing.max_tokens_per_microbatch, config.actor.fp8 = "bfloat16", _CAP, fp8
    config.rollout.engine, config.rollout.servers.endpoints = "vllm", ["http://elsewhere"]
    site = Site(1, 8, card_bytes(sheet), CHIPS["h200"].peak_flops, 1e15)  # host memory without a limit
    return plan_memory(config, architecture, site, 1024.0)


def packed(sheet: Sheet) -> None:
    """One actor, three plans of the same samples; without CUDA a tiny model, which is not judged."""
    rows = _rows(sheet, "packed-vs-padded", "0.6b", samples=48)
    for other in ("padded", "sorted"):
        ratio = rows["packed"]["tokens_in_slots"] / rows[other]["tokens_in_slots"]
        value = rows[other]["step_s"]["median"] / rows["packed"]["step_s"]["median"]
        note = "" if sheet.cuda else f"tiny, on a CPU; {ratio:.2f} by slots"
        sheet.note(f"over_{other}", value, ratio if sheet.cuda else None, note)


def memory(sheet: Sheet) -> None:
    """Peak memory of each phase on the whole device: what torch has reserved, and its context."""
    sizes = {"sequence-tokens": 1024, "microbatches": 2, "max-tokens-per-microbatch": _CAP}
    model, smaller = model_that_fits(sheet)
    rows = _rows(sheet, "memory", model, **sizes)
    planned = {one.name: one.total / GIB for one in _planned(sheet, model).phases}
    planned["step"] = max(planned["step"], planned["backward"])
    for phase in ("log-probs", "backward", "step"):
        sheet.note(phase, rows[phase]["device_gib"], planned[phase], smaller)
    sheet.note("left", rows["left"]["share"])


def fp8(sheet: Sheet) -> None:
    """Seconds at 4B beside bfloat16's on the same layers, and the gate on ten million parameters."""
    recipes: tuple[Literal["tensorwise", "blockwise"], ...] = ("tensorwise", "blockwise")
    sizes = {"samples": 48, "max-tokens": 7900, "max-tokens-per-microbatch": _CAP, "layer-spec": "te"}
    model, smaller = model_that_fits(sheet, "tensorwise", "te")
    rows = _rows(sheet, "fp8", model, recipes=recipes, **sizes)
    start_process_group()
    layout, tiny, config = build_layout(LayoutConfig(), seed=0), architecture_of(TEN_MILLION), Config()
    config.model.dtype, config.packing.max_tokens_per_microbatch = "bfloat16", 2048
    for recipe in recipes:
        row, reference = rows[f"fp8 {recipe}"], rows["bf16"]
        speed = row["speedup"]
        sheet.note(f"{recipe}_speed", None if smaller else speed, note=f"{speed:.2f} {smaller}" if smaller else "")
        for name in ("loss", "grad_norm"):
            sheet.note(f"{recipe}_{name}", abs(row[name] / reference[name] - 1))
        config.actor = ActorConfig(fp8=recipe)
        findings = run_gate(config, layout, tiny, RandomWeights(tiny, layout.device))
        worst = max(findings, key=lambda one: one.value / one.bound)
        sheet.note(f"{recipe}_gate", worst.value / worst.bound, note=worst.what)


def _rows(sheet: Sheet, command: str, model: str, **options: Any) -> dict[str, dict[str, Any]]:
    """Run the benchmark; its rows by `what`. Without CUDA it runs a tiny model."""
    results, benchmarks = sheet.directory / "rows.json", repository(BENCHMARK)
    assert benchmarks is not None
    options = {"shapes": model, "warmup-steps": 2, "timed-steps": 3} | options
    arguments = [command, "--json", str(results)]
    if not sheet.cuda:
        arguments, options["layer-spec"] = [*arguments, "--smoke"], "auto"
    for name, value in options.items():
        arguments += [f"--{name}", *map(str, value if isinstance(value, tuple) else (value,))]
    path = filter(None, [str(benchmarks.parent), package_environment().get("PYTHONPATH")])  # it imports siblings
    if code := start_python(benchmarks.stem, *arguments, variables={"PYTHONPATH": os.pathsep.join(path)}).wait():
        raise RuntimeError(f"the benchmark ended with exit code {code}")
    [entry] = json.loads(results.read_text(encoding="utf-8"))["shapes"].values()
    rows = {row["what"]: row for row in entry["rows"]}
    if failed := [row["failed"] for row in rows.values() if "failed" in row]:
        raise RuntimeError(failed[0])
    return rows
