"""What runs on a GPU, as far as a machine without one can say: it is collected, imports, parses, fits.

The benchmark's commands are read from its script, so that what runs there is what is checked here.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from support.job import REPOSITORY

from dppo_megatron.config.schema import Config
from dppo_megatron.packing.alignment import packing_layout
from dppo_megatron.packing.planner import plan_microbatches
from dppo_megatron.platform.capabilities import Machine
from dppo_megatron.types import UserError
from dppo_megatron.workbench.accept import speed
from dppo_megatron.workbench.accept.bars import STEPS
from dppo_megatron.workbench.accept.record import Ran, Record, read_figures
from dppo_megatron.workbench.accept.runner import Sheet, measure
from dppo_megatron.workbench.accept.workload import SHAPES, architecture_of
from dppo_megatron.workbench.planning.memory import MemoryPlan, plan_memory
from dppo_megatron.workbench.planning.site import CHIPS, GIB, Site
from dppo_megatron.workbench.random_samples import SampleLengths, random_samples

sys.path.insert(0, str(REPOSITORY / "benchmarks" / "gpu"))
import common
import train_step

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the machine has CUDA")
GPU_TESTS = {"tests/test_gpu.py": 12, "tests/test_engines_gpu.py": 12}
"""As docs/testing.md says."""
H100, H200 = (Site(1, 8, CHIPS[name].memory_bytes, CHIPS[name].peak_flops, 1e15) for name in ("h100", "h200"))


def _commands() -> list[list[str]]:
    """The arguments of each run of the benchmark, as bash expands the script's lines and loops."""
    text = (REPOSITORY / "benchmarks" / "gpu" / "all.sh").read_text(encoding="utf-8")
    script, replaced = re.subn('B="python benchmarks/gpu/train_step.py"', "B=note", text)
    assert replaced == 1
    note = "note() { printf '%s\\n' \"$*\"; }\n"
    done = subprocess.run(["bash", "-eu", "-c", note + script], capture_output=True, text=True, check=True, timeout=60)
    return [line.split() for line in done.stdout.splitlines()]


def test_commands_of_the_script_are_read_and_end_without_a_device(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each gets past the command line, to the one sentence and exit code 2, before anything is built."""
    commands = _commands()
    assert len(commands) == 8 and {command[0] for command in commands} == set(train_step.COMMANDS)
    for command in commands:
        monkeypatch.setattr(sys, "argv", ["train_step.py", *command])
        with pytest.raises(SystemExit) as ended:
            train_step.main()
        assert ended.value.code == 2 and "needs a CUDA device" in capsys.readouterr().err


def _flops(command: list[str]) -> float:
    """FLOPs of all steps of a command, by the benchmark's own samples and formula and with every slot counted: padding
    takes as long as tokens do."""
    args = train_step.parse(command)
    cap, flops = args.max_tokens_per_microbatch, 0.0
    layout = packing_layout(train_step.actor_config(args), 1)
    for shape in args.shapes:
        architecture = architecture_of(SHAPES[shape])
        if args.command in ("mfu", "memory"):
            of = [
                random_samples(
                    SampleLengths(args.microbatches * (cap // n), n, 0.0, n, (1, 1)), architecture.vocab_size
                )
                for n in args.sequence_tokens
            ]
            plans = [
                (samples, plan_microbatches(samples, layout=layout, max_tokens_per_microbatch=cap)) for samples in of
            ]
        else:
            samples = train_step.step_samples(shape, args)
            packed = plan_microbatches(samples, layout=layout, max_tokens_per_microbatch=cap)
            plans = [(samples, packed)] * (1 + len(args.recipes) if args.command == "fp8" else 1)
            if args.command == "packed-vs-padded":
                padded = [common.padded_plan(samples, layout, cap, by_length=by) for by in (False, True)]
                plans += [(samples, plan) for plan in padded]
        for samples, plan in plans:
            slots = sum(pack.num_tokens for pack in plan.microbatches[0])
            tokens = sum(sample.num_tokens for sample in samples)
            steps = args.warmup_steps + args.timed_steps
            flops += steps * common.useful_flops(architecture, samples) * slots / tokens
    return flops * (4 / 3 if args.recompute == "full" else 1)


def _bytes_needed(command: list[str]) -> float:
    """Of the hungriest phase of training, by `plan`'s arithmetic."""
    args = train_step.parse(command)
    config = Config()
    config.actor = train_step.actor_config(args)
    config.actor.optimizer.distributed = False
    config.model.dtype = "bfloat16"
    config.rollout.engine, config.rollout.servers.endpoints = "vllm", ["http://elsewhere"]
    config.packing.max_tokens_per_microbatch = args.max_tokens_per_microbatch
    shapes = [architecture_of(SHAPES[shape]) for shape in args.shapes]
    return max(plan_memory(config, shape, H200, 1024.0).largest.total for shape in shapes)


def _seconds(command: list[str]) -> float:
    """At a third of the chip's peak, which is less than what is hoped for, and 15 s to start and build."""
    return 15 + _flops(command) / (H200.peak_flops / 3)


def test_the_commands_fit_the_card_and_ten_minutes() -> None:
    """Together, and each the card; sizes that an earlier version of the script had fit neither. An H100 has no room for
    those of 4B, as docs/performance.md says."""
    commands = _commands()
    assert sum(map(_seconds, commands)) < 600
    assert max(map(_bytes_needed, commands)) < 0.95 * H200.gpu_memory
    assert _seconds(["packed-vs-padded", "--shapes", "4b", "--recompute", "full"]) > 600
    assert _bytes_needed(["mfu", "--shapes", "4b"]) > H200.gpu_memory
    too_large = [command for command in commands if _bytes_needed(command) > 0.95 * H100.gpu_memory]
    assert too_large == [command for command in commands if "4b" in command] and len(too_large) < len(commands)


def test_accept_trains_what_an_h100_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each card gets a model that fits its memory. A smaller one than 4B is held to `plan`'s memory, not to 4B's speed,
    and no row of it fails."""
    asked: list[str] = []

    def rows(sheet: Sheet, command: str, model: str, **_: object) -> dict[str, dict[str, Any]]:
        asked.append(model)
        planned = {one.name: one.total / GIB for one in speed._planned(sheet, model).phases}
        planned["step"] = planned["backward"]
        slow = {"mfu_of_bf16_peak": 0.2, "step_s": {"median": 1.0}, "peak_memory_gib": 50.0}
        slow |= {"useful_tflops_per_s": 198.0, "actor": ""}
        by_phase = {name: {"device_gib": planned[name]} for name in ("log-probs", "backward", "step")}
        return {"row": slow} if command == "mfu" else by_phase | {"left": {"share": 0.01}}

    def verdicts(chip: str) -> dict[str, str]:
        monkeypatch.setattr(speed, "card_bytes", lambda sheet: CHIPS[chip].memory_bytes)
        record = Record({"model": "", "server_python": ""}, {"gpus": 1})
        for step in (one for one in STEPS if one.name in ("mfu-4b-te", "memory")):
            (tmp_path / chip / step.name).mkdir(parents=True)
            measure(Sheet(step, tmp_path / chip / step.name, cuda=True, model="", server_python=""))
            record.steps[step.name] = Ran("done", figures=read_figures(tmp_path / chip / step.name))
        return {row.what: row.verdict for row in record.rows() if row.step in record.steps}

    monkeypatch.setattr(speed, "_rows", rows)
    monkeypatch.setattr(speed, "this_machine", lambda: Machine((9, 0), ""))
    mfu = "useful FLOPs over the bfloat16 peak"
    assert verdicts("h200")[mfu] == "fail" and asked == ["4b", "4b"]
    small = verdicts("h100")
    assert asked[2:] == ["1.7b", "1.7b"] and small.pop(mfu) == "not run"
    assert set(small.values()) == {"pass", "shown"} and small["backward, device"] == "pass"
    one = Sheet(STEPS[0], tmp_path, cuda=True, model="", server_python="")
    assert speed.model_that_fits(one, "tensorwise")[1].endswith("the card has 79")
    monkeypatch.setattr(speed, "card_bytes", lambda sheet: H200.gpu_memory)
    assert speed.model_that_fits(one, "tensorwise") == ("4b", "")


def test_accept_predicts_the_layers_that_the_chip_gets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An A100 without flash-attn has Megatron's own, and was held to Transformer Engine's bytes. A step that names its
    layers gets a model that fits with these."""
    monkeypatch.setattr(speed, "card_bytes", lambda sheet: H200.gpu_memory)
    sheet = Sheet(STEPS[0], tmp_path, cuda=True, model="", server_python="")

    def total(chip: tuple[int, int], spec: Literal["auto", "te", "local"] = "auto") -> float:
        monkeypatch.setattr(speed, "this_machine", lambda: Machine(chip, ""))
        return speed._planned(sheet, "4b", spec=spec).largest.total

    assert total((8, 0)) == total((8, 0), "local") == total((9, 0), "local")
    assert total((9, 0)) == total((9, 0), "te") == total((8, 0), "te") != total((8, 0))
    planned: list[str] = []

    def plan(sheet: Sheet, model: str, fp8: str, spec: str) -> MemoryPlan:
        planned.append(spec)
        raise UserError("that is all")

    monkeypatch.setattr(speed, "_planned", plan)
    for step in (speed.fp8, partial(speed.utilization, spec="local"), speed.memory):
        with pytest.raises(UserError, match="that is all"):
            step(sheet)
    assert planned == ["te", "local", "auto"]


@pytest.mark.long
@pytest.mark.slow
def test_gpu_tests_are_collected_and_begin() -> None:
    """As many as the page says. Two of them need no CUDA call and pass here, in one process, one layout and several
    actors: a second layout, or a name that has changed since they were written, ends them as it would on a GPU."""
    marked = {
        str(path.relative_to(REPOSITORY))
        for path in (REPOSITORY / "tests").rglob("test_*.py")
        if re.search(r"mark\.gpu\b", path.read_text(encoding="utf-8")) and path != Path(__file__)
    }
    assert marked == set(GPU_TESTS)
    page = (REPOSITORY / "docs" / "testing.md").read_text(encoding="utf-8")
    assert f"`-m gpu` collects {sum(GPU_TESTS.values())} tests" in page
    chosen = "test_packed_logprobs_equal_transformers or test_gate"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "gpu", "-k", chosen, *GPU_TESTS]
    environment = os.environ | {"DPPO_GPU_TESTS_ANYWHERE": "1", "PYTEST_ADDOPTS": "-o addopts="}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert f"collected {sum(GPU_TESTS.values())} items" in done.stdout
    assert re.search(r"\b2 passed, 5 skipped", done.stdout), done.stdout[-2000:]
