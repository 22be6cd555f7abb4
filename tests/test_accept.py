"""`dppo-megatron accept`: every figure is a row whatever happens to its step, and the same command goes on."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from support.launch import run_ranks
from support.processes import patient, running

from dppo_megatron.progress import shown_by, unshown
from dppo_megatron.types import RunAborted, UserError
from dppo_megatron.workbench.accept import runner
from dppo_megatron.workbench.accept.bars import FAMILIES, STEPS
from dppo_megatron.workbench.accept.record import Ran, Record, read_figures, read_record, write_page
from dppo_megatron.workbench.cli import main

OPTIONS = {"model": "", "server_python": ""}
ON_CPU = {"gpus": 0, "device": "no CUDA device", "lacks_transformer_engine": "there is no CUDA device", "report": []}
ON_H200 = ON_CPU | {"gpus": 1, "device": "NVIDIA H200", "lacks_transformer_engine": ""}
CHILD = """
import json, os, subprocess, sys, time
step, directory, options = sys.argv[1:]
def note(figure, **values):
    with open(directory + "/figures.jsonl", "a") as file:
        file.write(json.dumps({"figure": figure} | values) + "\\n")
if step == "environment":
    note("facts", gpus=1, device="a <b>card</b>", lacks_transformer_engine="none here", report=[["torch", "9"]])
    note("matmul", value=700.0, prediction=989.0)
elif step == "ipc":
    note("right", value=3.0, prediction=3)
elif step == "ipc-expandable":
    hanging = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print(hanging.pid, flush=True)
    time.sleep(600)
else:
    note("float32 local_before", value=1e-5)
    print("RuntimeError: the device is on fire")
    os._exit(7)
"""


@pytest.fixture
def fake_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    monkeypatch.setattr(runner, "CHILD", "child")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def _row(record: Record, step: str, what: str) -> tuple[str, str]:
    found = [row for row in record.rows() if row.step == step and what in row.what]
    assert len(found) == 1, (step, what)
    return found[0].verdict, found[0].note


def _run(record: Record, directory: Path, **settings: object) -> list[str]:
    """The steps that were begun."""
    begun: list[str] = []

    def display(what: str, total: int, unit: str) -> Any:
        begun.append(what.partition(":")[0])
        return unshown(what, total, unit)

    options = {"hours": 0.5} | settings
    directory.mkdir(exist_ok=True)
    with shown_by(display):
        runner.run_steps(record, directory, **options)
    return begun


def test_the_table_fits_half_an_hour_and_every_bar_has_a_source() -> None:
    assert sum(step.limit_s for step in STEPS) == 3600 * runner.HOURS
    assert STEPS[0].name == runner.ENVIRONMENT and len({step.name for step in STEPS}) == len(STEPS) > 10
    figures = [figure for step in STEPS for figure in step.figures.values()]
    judged = [figure for figure in figures if figure.least is not None or figure.most is not None]
    assert len(judged) > 40 and all(figure.source for figure in judged)


def test_the_page_of_the_documentation_says_what_steps_need() -> None:
    page = (Path(__file__).parent.parent / "docs" / "testing.md").read_text(encoding="utf-8")
    rows = page.partition("| needs | steps |")[2].partition("\n\n")[0].splitlines()[2:]
    needs = ("cuda te_on_cuda two_gpus", "two_gpus", "te te_on_cuda", "server", "benchmark", "tests")
    for row, need in zip(rows, needs, strict=True):
        named = re.findall(r"`([^`]+)`", row.split("|")[2])
        assert named == [step.name for step in STEPS if set(need.split()) & set(step.needs)], row
    limits = [step.limit_s for step in STEPS]
    assert f"its limit, {min(limits):g} to {max(limits):g} s" in page


def test_what_is_judged(tmp_path: Path) -> None:
    """By the table alone: absolute and relative bounds, a figure without a prediction, what a CPU does not measure; a
    NaN has failed whatever its note, and is null in the file."""
    record = Record(OPTIONS, dict(ON_H200))
    found = {
        "matmul": {"value": 740.0, "prediction": 989.0, "note": ""},
        "fp8_recipes": {"value": None, "note": "no such thing"},
    }
    record.steps["environment"] = Ran("done", figures=found)
    assert _row(record, "environment", "product") == ("fail", "")  # below three quarters of the data sheet
    found["matmul"]["value"] = 742.0
    assert _row(record, "environment", "product") == ("pass", "")
    found["matmul"]["prediction"] = None
    assert _row(record, "environment", "product")[0] == "shown"
    assert _row(record, "environment", "FP8") == ("not run", "no such thing")
    over = {"value": 3.0, "prediction": 3.8, "note": "tiny"}
    record.steps["packed"] = Ran("done", figures={"over_padded": over})
    assert _row(record, "packed", "padded")[0] == "fail"
    assert _row(record, "packed", "sorted") == ("fail", "the step ended without a number for it")
    record.facts, over["prediction"] = dict(ON_CPU), None
    assert _row(record, "packed", "padded") == ("shown", "tiny")
    assert _row(record, "job", "on record") == ("not run", "not requested")
    (parity,) = (step for step in STEPS if step.name == "parity")
    sheet = runner.Sheet(parity, tmp_path, cuda=False, model="", server_python="")
    sheet.note("float32 local_before", math.nan, 0.0, "on record")
    sheet.facts(best=math.inf)
    measured = read_figures(tmp_path)
    record.facts |= measured.pop("facts")
    record.steps["parity"] = Ran("done", figures=measured)
    assert _row(record, "parity", "float32 local: mean") == ("fail", "the step ended without a number for it")
    assert _row(record, "parity", "bfloat16 local: mean") == ("not run", "no CUDA device")
    record.write(tmp_path)
    json.loads((tmp_path / "accept.json").read_text(), parse_constant=pytest.fail)


def test_one_gpu_two_gpus_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why a step cannot run, for each kind of machine."""
    steps = {step.name: step for step in STEPS}

    def why(name: str, **facts: object) -> str:
        return runner.lacking(steps[name], Record(dict(OPTIONS), ON_H200 | facts))

    assert why("layouts") == "one GPU" and not why("layouts", gpus=2) and not why("layouts", gpus=0)
    assert why("memory", gpus=0) == "no CUDA device" and not why("memory")
    assert why("parity-te", lacks_transformer_engine="not installed") == "not installed"
    assert "--server-python" in why("servers") and why("servers-nccl") == "one GPU"
    assert runner.repository(runner.TESTS) == Path(__file__).parent / "test_gpu.py" and not why("gpu-tests")
    monkeypatch.setattr(runner, "repository", lambda file: None)
    assert "pytest" in why("gpu-tests") and why("memory") == "needs a checkout, whose benchmarks measure it"
    assert runner.lacking(steps["job"], Record(dict(OPTIONS))) == "the step environment has no result"


@pytest.mark.usefixtures("fake_child")
def test_a_crash_and_a_hang_are_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured before the crash counts; nothing that a hanging step started is left; the others run."""
    short = [step if step.name != "ipc-expandable" else replace(step, limit_s=1.0) for step in STEPS]
    monkeypatch.setattr(runner, "STEPS", tuple(short))
    monkeypatch.setattr(runner, "_GRACE_S", 2.0)
    record, out = Record(dict(OPTIONS)), tmp_path / "out"
    _run(record, out, only=("ipc", "ipc-expandable", "parity"))
    assert _row(record, "ipc", "round trips") == ("pass", "")
    verdict, note = _row(record, "ipc-expandable", "round trips")
    assert verdict == "fail" and "not finished within 1 s" in note
    hanging = int((out / "steps" / "ipc-expandable" / "log").read_text())
    assert not running(hanging)
    assert _row(record, "parity", "float32 local: mean")[0] == "pass"
    verdict, note = _row(record, "parity", "float32 local: first")
    assert verdict == "fail" and "exit code 7" in note and "the device is on fire" in note
    assert _row(record, "memory", "backward") == ("not run", "not requested")


@pytest.mark.usefixtures("fake_child")
def test_the_same_command_goes_on(tmp_path: Path) -> None:
    """What has ended is not done again, what was interrupted is, what lacked time or a server is tried again. First it
    looks whether the machine is the same."""
    out, record = tmp_path / "out", Record(dict(OPTIONS))
    _run(record, out, only=("environment",))
    assert _run(record, out, hours=39 / 3600) == ["environment"]  # the others may take longer
    assert _row(record, "parity", "float32 local: mean") == ("not run", "no time left (needs 90 s)")
    record.steps["ipc"] = Ran("begun")  # as a kill leaves it
    record.write(out)
    record = read_record(out, dict(OPTIONS))
    assert _row(record, "ipc", "round trips")[1].startswith("interrupted")
    said = _run(record, out, only=("ipc", "parity"))
    assert said == ["environment", "ipc", "parity"]
    assert _run(record, out, only=("ipc", "parity")) == ["environment"]
    again = _run(record, out, only=("ipc", "parity"), again=("parity",))
    assert again == ["environment", "parity"]
    with pytest.raises(UserError, match="another directory"):
        read_record(out, OPTIONS | {"model": "elsewhere"})
    bytes_of_a_path = OPTIONS | {"model": os.fsdecode(b"\xff")}
    Record(bytes_of_a_path).write(out)
    assert read_record(out, bytes_of_a_path) == Record(bytes_of_a_path)
    (out / "accept.json").write_text("{")
    with pytest.raises(UserError, match=r"accept\.json cannot be read"):
        read_record(out, dict(OPTIONS))


@pytest.mark.usefixtures("fake_child")
def test_another_machine_s_record_is_refused(tmp_path: Path) -> None:
    """As a login node leaves it: by its facts no step that needs a GPU would run where there is one. It stays as it
    was, also where the machine is not found out."""
    out, record = tmp_path / "out", Record(dict(OPTIONS), dict(ON_CPU), {"environment": Ran("done")})
    out.mkdir()
    record.write(out)
    before = (out / "accept.json").read_text()
    said = r"figures of no CUDA device \(GPUs: 0\), and this is a <b>card</b> \(GPUs: 1\); name another directory"
    with pytest.raises(UserError, match=said):
        _run(read_record(out, dict(OPTIONS)), out)
    (tmp_path / "child.py").write_text("raise SystemExit('RuntimeError: no driver')")
    with pytest.raises(RunAborted, match="are of this machine: ended with exit code 1: RuntimeError: no driver"):
        _run(read_record(out, dict(OPTIONS)), out)
    assert (out / "accept.json").read_text() == before


@pytest.mark.usefixtures("fake_child")
def test_the_page_has_every_figure_and_loads_nothing(tmp_path: Path) -> None:
    record = Record(dict(OPTIONS))
    _run(record, tmp_path / "out", only=("parity",))
    write_page(tmp_path / "accept.html", record)
    page = (tmp_path / "accept.html").read_text()
    rows = re.findall(r"<tr><td>(.*?)</td>", page)
    assert len(rows) == len(record.rows()) + 1  # and torch's version
    assert "a &lt;b&gt;card&lt;/b&gt;" in page and "<b>" not in page
    assert not re.search(r"src=|href=|url\(|<script", page) and "default-src 'none'" in page
    assert "the device is on fire" in page


def _far_from_references(dtype: str, models: tuple[str, ...], change: dict[str, Any] | None = None) -> Any:
    """Of local layers; with values of config.json changed, of what is another model."""
    import torch

    from dppo_megatron.config.schema import LayoutConfig
    from dppo_megatron.workbench.accept.parity import MODELS, differences, measure

    for model in models:
        MODELS[model] = MODELS[model] | (change or {})
    found = {name: measure(name, LayoutConfig(), getattr(torch, dtype), "local") for name in models}
    return {name: differences(one, name) for name, one in found.items()}


@pytest.mark.slow
def test_the_references_are_what_the_script_makes() -> None:
    """And small. A CPU with other instructions adds in another order: a tenth of the bar, which behind three updates is
    three times as high (`bars._parity`); 1.1e-5 was seen there on one CPU. Adapters on latent attention have gradients
    near 0, whose rounding Adam makes a step: 5e-5 with two threads, so only that it is far below the bar of 0.24."""
    size = len((files("dppo_megatron.workbench.accept") / "assets" / "references.npz").read_bytes())
    assert size < 100_000
    (far,) = run_ranks(_far_from_references, 1, "float32", ("mixture", *FAMILIES), timeout_s=600)
    for model, values in far.items():
        after = 5e-3 if model == "adapters_latent" else 3e-5
        assert all(value < (after if name == "after" else 1e-5) for name, value in values.items()), (model, values)


@pytest.mark.long
@pytest.mark.slow
def test_bfloat16_of_a_cpu_meets_the_bars_of_the_families() -> None:
    """About a third of the log-probabilities' bar, which is where it comes from (0.26 to 0.35 on one CPU; others round
    in another order, and a router that flips counts)."""
    (far,) = run_ranks(_far_from_references, 1, "bfloat16", tuple(FAMILIES), timeout_s=600)
    assert far.keys() == FAMILIES.keys()
    for model, values in far.items():
        assert 0.1 < values["before"] / FAMILIES[model] < 0.6, (model, values)
        assert values["after"] < 3 * FAMILIES[model] and values["grad_norm"] < 0.03, (model, values)


ROPE = {"rope_type": "default", "rope_theta": 1e4}
WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "no YaRN": ("yarn", {"rope_parameters": ROPE}),
    "one position more in the window": ("gemma3", {"sliding_window": 25}),
    "one base": ("gemma3", {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}}),
    "all of a head turns": ("glm4", {"rope_parameters": ROPE | {"partial_rotary_factor": 1.0}}),
    "shares that are normalized": ("qwen2_moe", {"norm_topk_prob": True}),
    "another scale of the shares": ("glm4_moe", {"routed_scaling_factor": 1.3}),
    "no YaRN in the softmax's scale": (
        "deepseek_v3",
        {"rope_parameters": ROPE | {"rope_type": "yarn", "factor": 40.0} | {"original_max_position_embeddings": 64}},
    ),
    "no groups of experts": ("deepseek_v3", {"n_group": 1, "topk_group": 1}),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrong", [pytest.param(one, marks=[pytest.mark.long] * (at % 3 > 0)) for at, one in enumerate(WRONG)]
)
def test_a_wrong_model_misses_its_bar(wrong: str) -> None:
    """Or passing would say nothing: in float32, so by the mistake alone."""
    model, change = WRONG[wrong]
    (far,) = run_ranks(_far_from_references, 1, "float32", (model,), change)
    assert far[model]["before"] > 2 * FAMILIES[model], far


def test_what_one_family_lacks_is_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are measured all the same."""
    from dppo_megatron.workbench.accept import parity

    def compare(sheet: runner.Sheet, case: str, *_: object) -> None:
        if case == "glm4":
            raise ValueError("no kernel")
        sheet.note(f"{case}_before", 0.001)

    monkeypatch.setattr(parity, "_compare", compare)
    (step,) = (one for one in STEPS if one.name == "families")
    with pytest.raises(RuntimeError, match="glm4: ValueError: no kernel"):
        runner.measure(runner.Sheet(step, tmp_path, cuda=True, model="", server_python=""))
    assert set(read_figures(tmp_path)) == {f"{model}_before" for model in FAMILIES} - {"glm4_before"}


@pytest.mark.slow
def test_replay_on_a_cpu_for_real(tmp_path: Path) -> None:
    """With the embedded engine, in the step's own process."""
    options = json.dumps(OPTIONS | {"cuda": False})
    command = [sys.executable, "-m", runner.CHILD, "servers-experts", str(tmp_path), options]
    subprocess.run(command, check=True, timeout=patient(300))
    found = read_figures(tmp_path)
    assert found["steps"]["value"] == 3 and found["mismatch"]["value"] < 1e-4
    assert found["replay"]["value"] > 5 and "embedded" in found["replay"]["note"]


def _tiny(name: str, directory: Path) -> None:
    """A step of speed.py on a CPU; FP8 is what only a device has."""
    from dppo_megatron.config.schema import ActorConfig
    from dppo_megatron.workbench.accept import speed
    from dppo_megatron.workbench.accept.workload import SHAPES

    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):  # the benchmark is no rank of the harness
        os.environ.pop(variable, None)
    rows = speed._rows

    def with_recipes(sheet: runner.Sheet, command: str, model: str, **options: Any) -> dict[str, dict[str, Any]]:
        found = rows(sheet, command, model, **options)
        return found | {f"fp8 {recipe}": found["bf16"] for recipe in options.get("recipes", ())}

    speed._rows, speed.ActorConfig = with_recipes, lambda **_: ActorConfig()
    speed.TEN_MILLION = SHAPES["smoke"]
    (step,) = (one for one in STEPS if one.name == name)
    runner.measure(runner.Sheet(step, directory, cuda=False, model="", server_python=""))


@pytest.mark.slow
@pytest.mark.parametrize("step", ["mfu-4b-te", "packed", "memory", "fp8", "mfu-0.6b"])
def test_steps_for_a_card_reach_their_end(tmp_path: Path, step: str) -> None:
    """All that a CPU can show of them: the benchmark takes their arguments, and each figure of the table is noted."""
    run_ranks(_tiny, 1, step, tmp_path)
    found = read_figures(tmp_path)
    (declared,) = [one.figures for one in STEPS if one.name == step]
    assert set(found) == set(declared)
    noted = {name: values["value"] for name, values in found.items() if not name.startswith("mfu")}  # no data sheet
    assert all(math.isfinite(value) for value in noted.values()), found


@pytest.mark.long
@pytest.mark.slow
def test_on_a_cpu_for_real(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Killed in its first step, it leaves no process and goes on: what a CPU can measure passes, each other row says
    why it was not run."""
    out = tmp_path / "accept"
    command = [sys.executable, "-m", "dppo_megatron", "accept", "--out", str(out), "--only", "parity"]
    first = subprocess.Popen(command)
    deadline = time.monotonic() + 300  # it imports torch first
    while not (out / "steps" / "environment" / "log").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    first.send_signal(signal.SIGTERM)
    assert first.wait(300) == 143
    deadline = time.monotonic() + patient(60)  # it takes a killed process a while to go on a busy machine
    while left := subprocess.run(["pgrep", "-f", f"accept.runner environment {out}"], capture_output=True).stdout:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
    assert json.loads((out / "accept.json").read_text())["steps"]["environment"]["state"] == "begun"

    assert main(["accept", "--hours", "2", "--out", str(out), "--only", "parity"]) == 0
    rows = json.loads((out / "accept.json").read_text())["rows"]
    assert len(rows) == sum(len(step.figures) for step in STEPS)
    verdicts = {(row["step"], row["what"]): row["verdict"] for row in rows}
    passed = [step for (step, _), verdict in verdicts.items() if verdict == "pass"]
    assert passed == ["parity"] * 3 and "fail" not in verdicts.values()
    notes = [row["note"] for row in rows if row["verdict"] == "not run"]
    assert notes and all(notes)
    assert "no CUDA device" in capsys.readouterr().out and (out / "accept.html").exists()
