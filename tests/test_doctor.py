"""The doctor: what it says of a machine, and that the gate passes safe packing."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from support.job import REPOSITORY, job_config, settings
from support.launch import run_ranks
from support.tiny import plan_for, random_samples, write_model

from dppo_megatron.actor.actor import Actor
from dppo_megatron.actor.layout import build_layout
from dppo_megatron.config.schema import ActorConfig, Config
from dppo_megatron.job import check_settings, prepare_job
from dppo_megatron.platform import capabilities
from dppo_megatron.platform.capabilities import Machine, outside_range
from dppo_megatron.types import UserError
from dppo_megatron.weights.architecture import read_architecture
from dppo_megatron.weights.hf_files import CheckpointReader
from dppo_megatron.workbench.cli import main
from dppo_megatron.workbench.doctor import fp8_gate
from dppo_megatron.workbench.doctor import machine as doctor
from dppo_megatron.workbench.doctor.fp8_gate import GateResult, run_gate
from dppo_megatron.workbench.doctor.machine import environment

CONFIG = str(REPOSITORY / "configs" / "quickstart.yaml")


def test_report_names_versions_and_layers(capsys: pytest.CaptureFixture[str]) -> None:
    """A table with the torch that runs and the layers that a job would get."""
    assert main(["doctor"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["torch"] == torch.__version__
    assert lines["layers"].startswith("te" if lines["transformer-engine"][0].isdigit() else "local")
    if not torch.cuda.is_available():
        assert lines["attention"] == "padded batches (no CUDA device)"
        assert lines["weight-gradients"] == "added after the product (there is no CUDA device)"
        assert lines["log-probabilities"] == "torch (there is no CUDA device)"
        assert lines["environment"] == "nothing to set on a CPU"
        assert lines["fp8"] == "none: there is no CUDA device"  # and no word of a setting that nobody gave


@pytest.mark.parametrize(
    ("machine", "others"),
    [
        (Machine((8, 0), ""), "; mixtures: te (slow attention)"),
        (Machine((7, 5), ""), "; mixtures: te (slow attention)"),
        (Machine((12, 0), ""), "; mixtures and FP8: te (slow attention)"),
        (Machine((8, 0), "", has_flash_attention=True), ""),
        (Machine((8, 0), "it is not installed"), ""),
    ],
    ids=str,
)
def test_report_names_layers_of_mixtures(machine: Machine, others: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they are not those of dense models; FP8 where the chip has it."""
    monkeypatch.setattr(doctor, "this_machine", lambda: machine)
    monkeypatch.setattr(doctor, "_device", lambda: "a GPU")
    layers = dict(doctor.report())["layers"]
    assert layers == f"{machine.choose_layer_spec('auto', 'off', has_experts=False)[0]} ({layers.partition('(')[2]}"
    assert layers.endswith(f"){others}") and ("mixtures" in layers) == bool(others)


@pytest.mark.parametrize(
    ("capability", "te", "wanted", "fp8", "outcome"),
    [
        ((9, 0), True, "auto", "off", "te"),
        ((9, 0), True, "local", "off", "local"),
        ((9, 0), True, "auto", "blockwise", "te"),
        ((9, 0), True, "auto", "mxfp8", "needs a chip of sm_100 or newer; this one is sm_90"),
        ((8, 0), True, "auto", "tensorwise", "needs a chip of sm_89 or newer; this one is sm_80"),
        ((8, 9), True, "auto", "blockwise", "needs a chip of sm_90"),
        ((9, 0), False, "auto", "off", "local"),
        ((9, 0), False, "te", "off", "is not installed; use layer_spec = auto or local"),
        ((9, 0), False, "auto", "delayed", "is not installed; use fp8 = off"),
        (None, True, "auto", "off", "local"),
        (None, True, "auto", "tensorwise", "there is no CUDA device; use fp8 = off"),
    ],
)
def test_layers_and_recipes_by_machine(
    capability: tuple[int, int] | None, te: bool, wanted: str, fp8: str, outcome: str
) -> None:
    """Transformer Engine where it can run, else Megatron's own layers; what cannot run is said, with what would."""
    machine = Machine(capability, "" if te else "Transformer Engine is not installed")
    if outcome in ("te", "local"):
        assert machine.choose_layer_spec(wanted, fp8, has_experts=False)[0] == outcome
    else:
        with pytest.raises(UserError) as raised:
            machine.choose_layer_spec(wanted, fp8, has_experts=False)
        assert outcome in str(raised.value)


@pytest.mark.parametrize(
    ("chip", "installed", "settings", "outcome"),
    [
        ((8, 0), False, ("auto", "off", False), "local"),
        ((8, 0), True, ("auto", "off", False), "te"),
        ((8, 0), False, ("te", "off", False), "slow"),
        ((8, 0), False, ("auto", "off", True), "slow"),
        ((8, 9), False, ("auto", "tensorwise", False), "slow"),
        ((10, 0), False, ("auto", "off", False), "te"),
        ((12, 0), False, ("auto", "off", False), "local"),
        ((7, 5), True, ("te", "off", False), "slow"),
    ],
)
def test_attention_that_is_not_fused(
    chip: tuple[int, int], installed: bool, settings: tuple[str, str, bool], outcome: str
) -> None:
    """Transformer Engine 2.11 would hold whole scores of every sequence, and has nothing at all for shared ones."""
    machine = Machine(chip, "", has_flash_attention=installed)
    wanted, fp8, has_experts = settings
    spec, reason = machine.choose_layer_spec(wanted, fp8, has_experts=has_experts)
    unfused, advice = "Transformer Engine has no fused attention over packs on sm_{}{}".format(*chip), "set"
    if chip >= (8, 0):  # flash-attn has nothing for older chips
        unfused, advice = f"{unfused} without flash-attn", "install flash-attn, or set"
    said = {"local": unfused, "te": "Transformer Engine is installed", "slow": f"slow attention: {unfused}"}
    assert (spec, reason) == ("local" if outcome == "local" else "te", said[outcome])
    machine.check_context_parallel(spec, 1)
    if outcome != "slow":
        machine.check_context_parallel(spec, 2)
        return
    with pytest.raises(UserError, match=f"context_parallel = 2: {unfused}; {advice} actor.layer_spec"):
        machine.check_context_parallel(spec, 2)


@pytest.mark.parametrize(
    ("chip", "heads", "fused", "with_flash"),
    [
        ((8, 0), (192, 128), False, False),  # flash-attn 2 has one size for keys and values
        ((9, 0), (192, 128), True, True),
        ((10, 0), (192, 128), True, True),
        ((9, 0), (256, 256), True, True),
        ((9, 0), (256, 128), False, False),  # cuDNN from 9.11 on
        ((10, 0), (256, 256), False, True),  # cuDNN has it without a backward pass
        ((10, 3), (256, 256), False, False),
        ((8, 9), (256, 256), False, False),
        ((8, 9), (192, 192), False, True),
        ((9, 0), (100, 100), False, False),
    ],
)
def test_attention_is_fused_for_some_sizes_of_heads(
    chip: tuple[int, int], heads: tuple[int, int], fused: bool, with_flash: bool
) -> None:
    """As Transformer Engine 2.11 chooses in `nvte_get_fused_attn_backend` and `get_attention_backend`: Gemma's heads of
    256 not on Blackwell, latent attention's not on an A100. The choice, the reason and context parallelism follow."""
    for has_flash, is_fused in ((False, fused), (True, with_flash)):
        machine = Machine(chip, "", has_flash_attention=has_flash)
        dense, why = machine.choose_layer_spec("auto", "off", has_experts=False, heads=heads)
        assert dense == ("te" if is_fused else "local")
        assert is_fused or why.startswith(
            f"Transformer Engine has no fused attention over packs with heads of {heads[0]}"
        )
        assert is_fused or why.endswith("without flash-attn") == (with_flash and not has_flash)
        reason = machine.choose_layer_spec("auto", "off", has_experts=True, heads=heads)[1]
        assert reason == ("Transformer Engine is installed" if is_fused else f"slow attention: {why}")
        with nullcontext() if is_fused else pytest.raises(UserError, match=r"actor\.layer_spec to local"):
            machine.check_context_parallel("te", 2, heads)


@pytest.mark.parametrize(
    ("version", "used", "on_blackwell"),
    [
        ("2.8.3", True, True),
        ("2.7.3", True, True),
        ("2.7.2", True, False),
        ("2.1.1", True, False),
        ("2.9.0", False, False),
        ("1.0.9", False, False),
        (None, False, False),
    ],
)
def test_flash_attn_counts_if_transformer_engine_uses_it(
    version: str | None, used: bool, on_blackwell: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in its `backends.py` (2.11). flash-attn-4 has the same module, but another name as a distribution."""
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    known = {"flash-attn-4": "4.0.0"} | ({"flash-attn": version} if version else {})

    def find(name: str) -> str:
        if name in known:
            return known[name]
        raise capabilities.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(capabilities.importlib.metadata, "version", find)
    assert [capabilities._has_flash_attention(chip) for chip in ((8, 0), (9, 0), (10, 0), (12, 0))] == [
        used,
        used,
        on_blackwell,
        on_blackwell,
    ]


def test_transformer_engine_has_the_last_word_on_recipes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Hopper it has blockwise from CUDA 12.9 on, and would say so in the first forward pass. One before 2.9 is not
    asked."""
    answers = {"is_fp8_available": (True, ""), "is_fp8_block_scaling_available": (False, "It needs CUDA >= 12.9.")}
    stub = ModuleType("transformer_engine.pytorch")
    for name, answer in answers.items():
        setattr(stub, name, lambda return_reason, answer=answer: answer)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", stub)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(capabilities, "_transformer_engine_problem", lambda on_cuda: "")
    monkeypatch.setattr(capabilities, "_refused_recipes", capabilities._refused_recipes.__wrapped__)
    machine = capabilities.this_machine()
    assert [
        machine.choose_layer_spec("auto", fp8, has_experts=False)[0] for fp8 in ("off", "tensorwise", "delayed")
    ] == ["te"] * 3
    with pytest.raises(
        UserError, match=r"blockwise: Transformer Engine reports: It needs CUDA >= 12\.9; use fp8 = off"
    ):
        machine.choose_layer_spec("auto", "blockwise", has_experts=False)
    with pytest.raises(UserError, match="needs a chip of sm_100"):
        machine.choose_layer_spec("auto", "mxfp8", has_experts=False)


@pytest.mark.parametrize(
    ("capability", "installed", "fuses", "said"),
    [
        ((9, 0), True, True, "added inside the product (Apex's fused_weight_gradient_mlp_cuda)"),
        ((9, 0), False, False, "added after the product (Apex's fused_weight_gradient_mlp_cuda is not installed)"),
        (None, True, False, "added after the product (there is no CUDA device)"),
    ],
)
def test_fused_weight_gradients_are_used_where_they_can_be(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int] | None,
    installed: bool,
    fuses: bool,
    said: str,
) -> None:
    """Megatron takes them from Apex's extension, and refuses the setting without it."""
    if installed:
        (tmp_path / "fused_weight_gradient_mlp_cuda.py").write_text("", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    machine = Machine(capability, "")
    assert (machine.fuses_weight_gradients, machine.weight_gradients()) == (fuses, said)


def test_what_cuda_reads_is_set_before_it_is_asked(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA reads CUDA_DEVICE_MAX_CONNECTIONS when a process first asks for a device, which checks do early."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "")
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    seen: list[str | None] = []

    def is_available() -> bool:
        """No device; notes the variable."""
        seen.append(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"))
        return False

    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    wrong = settings(files, tmp_path / "run", data__train_path=tmp_path / "no.jsonl", actor__fp8="blockwise")
    assert main(["train", CONFIG, *wrong, "model.dtype=bfloat16"]) == 2
    assert main(["train", CONFIG, *settings(files, tmp_path / "run"), "actor.logprob_kernel=triton"]) == 2
    assert seen and set(seen) == {"1"}


@pytest.mark.parametrize(
    ("engine", "megatron", "said"),
    [
        ("2.11.0", "0.16.1", ""),
        ("2.20.2", "0.16.1", "Transformer Engine 2.20.2 is outside >=2.9,<2.12, which megatron-core 0.16.1 supports"),
        ("2.20.2", "0.19.2", ""),
        ("2.8", "0.19.2", "Transformer Engine 2.8 is outside >=2.9, which megatron-core 0.19.2 supports"),
    ],
)
def test_versions_that_do_not_go_together(engine: str, megatron: str, said: str) -> None:
    """megatron-core 0.16 names a range, newer ones a lower end only."""
    assert outside_range(engine, megatron) == said


@pytest.mark.parametrize(
    ("variables", "device", "said"),
    [
        ({}, "cpu", "nothing to set on a CPU"),
        (
            {},
            "cuda",
            "CUDA_DEVICE_MAX_CONNECTIONS=1 (set by the trainer); without expandable segments (PYTORCH_ALLOC_CONF),"
            " unless",
        ),
        (
            {"CUDA_DEVICE_MAX_CONNECTIONS": "8"},
            "cuda",
            "CUDA_DEVICE_MAX_CONNECTIONS=8: with tensor or context parallelism",
        ),
        (
            {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
            "cuda",
            "CUDA_DEVICE_MAX_CONNECTIONS=1; PYTORCH_CUDA_ALLOC_CONF has expandable_segments, with which CUDA IPC needs",
        ),
    ],
)
def test_environment_variables_are_judged(variables: dict[str, str], device: str, said: str) -> None:
    """What is set, what the trainer sets, and what would be better."""
    assert environment(variables, device).startswith(said)


@pytest.mark.parametrize(
    ("capability", "te", "runs"), [(None, False, True), ((9, 0), True, True), ((9, 0), False, False)]
)
def test_mixture_of_experts_by_machine(capability: tuple[int, int] | None, te: bool, runs: bool) -> None:
    """On CUDA without Transformer Engine megatron-core's router ends in a NameError: said before a model is built."""
    machine = Machine(capability, "" if te else "Transformer Engine is not installed")
    if runs:
        machine.check_mixture()
    else:
        with pytest.raises(UserError, match="mixture-of-experts model on CUDA needs Transformer Engine"):
            machine.check_mixture()


def test_what_only_transformer_engine_recomputes_is_said() -> None:
    """megatron-core's recomputation of norms reads names of Transformer Engine, with its own layers too: a NameError at
    the first forward pass without it."""
    with_it, without = Machine((9, 0), ""), Machine(None, "Transformer Engine is not installed")
    with_it.check_recompute(["layernorm", "moe_act", "mlp"])
    without.check_recompute(["core_attn", "mlp", "moe"])
    for name in ("layernorm", "moe_act"):
        with pytest.raises(UserError, match=rf"actor.recompute_modules = {name}: Transformer Engine is not installed"):
            without.check_recompute(["core_attn", name])


def _findings(files: Path, run_dir: Path, tensor_parallel: int, pipeline_parallel: int) -> list[GateResult]:
    config = job_config(
        files,
        run_dir,
        actor__layout__tensor_parallel=tensor_parallel,
        actor__layout__pipeline_parallel=pipeline_parallel,
        packing__max_tokens_per_microbatch=1024,
    )
    architecture = read_architecture(config.model.hf_path)
    layout = build_layout(config.actor.layout, config.seed)
    return run_gate(config, layout, architecture, CheckpointReader(config.model.hf_path, architecture).get)


def _holds_gradients(files: Path, run_dir: Path) -> list[bool]:
    """Of each measurement, whether this rank has kept a tensor."""
    held, measure = list[bool](), fp8_gate._measure

    def noting(*arguments: Any) -> Any:
        found = measure(*arguments)
        held.append(bool(found and found[1]))
        return found

    fp8_gate._measure = noting
    assert len(_findings(files, run_dir, 1, 1)) == 2
    return held


def test_only_rank_zero_keeps_gradients_of_the_whole_model(files: Path, tmp_path: Path) -> None:
    """Two replicas compare the same ones, and every rank that keeps them needs room for the model on its host."""
    assert run_ranks(_holds_gradients, 2, files, tmp_path / "run") == [[True, True], [False, False]]


@pytest.mark.parametrize("split", [(1, 1), pytest.param((2, 2), marks=pytest.mark.slow)], ids=str)
def test_gate_passes_safe_packing(files: Path, tmp_path: Path, split: tuple[int, int]) -> None:
    """Log-probabilities and gradients of the packed batch are those of single samples."""
    results = run_ranks(_findings, split[0] * split[1], files, tmp_path / "run", *split)
    assert all(findings == results[0] for findings in results)
    assert [finding.bound for finding in results[0]] == [1e-4, 1e-4]
    assert all(finding.passed for finding in results[0]), results[0]
    assert results[0][1].value > 0, "two different packings cannot round alike: nothing was compared"


def _calls_of_a_measurement(files: Path, run_dir: Path, warmups: int) -> list[str]:
    config = job_config(files, run_dir)
    architecture = read_architecture(config.model.hf_path)
    reader = CheckpointReader(config.model.hf_path, architecture)
    actor = Actor(config.actor, build_layout(config.actor.layout, 0), architecture, reader.get, dtype=torch.float32)
    calls: list[str] = []
    for name in ("accumulate", "logprobs"):
        setattr(actor, name, _noting(getattr(actor, name), name, calls))
    samples = random_samples(4, architecture.vocab_size)
    fp8_gate._measure(actor, samples, plan_for(samples), 1.0, warmups)
    return calls


def _noting(call: Callable[..., Any], name: str, calls: list[str]) -> Callable[..., Any]:
    return lambda *args, **settings: (calls.append(name), call(*args, **settings))[1]


def test_delayed_scaling_has_seen_gradients_before_it_is_measured(files: Path, tmp_path: Path) -> None:
    """Its scales are 1 in the first backward pass, which loses the small gradients of a token-mean loss: two
    passes come before the ones that are compared."""
    measured = ["logprobs", "accumulate"]
    assert fp8_gate.WARMUPS == {"delayed": 2}
    [calls] = run_ranks(_calls_of_a_measurement, 1, files, tmp_path / "run", fp8_gate.WARMUPS["delayed"])
    assert calls == ["accumulate"] * 2 + measured


def test_the_first_update_of_delayed_scaling_is_warned_of(tmp_path: Path) -> None:
    """Training does not warm up, as the gate does."""
    architecture = read_architecture(write_model(tmp_path, max_position_embeddings=4096))
    for fp8 in ("delayed", "tensorwise"):
        lines = check_settings(Config(actor=ActorConfig(fp8=fp8)), architecture, 1, Machine((9, 0), ""))
        assert any("first update loses its smallest gradients" in line for line in lines) == (fp8 == "delayed")


def test_a_core_wheel_without_its_extension_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformer Engine's core installs without the part for torch; Megatron would die amid building a model."""
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "pytorch.py").write_text("raise ImportError('libtransformer_engine.so: no such file')\n")
    for name in [name for name in sys.modules if name.split(".")[0] == "transformer_engine"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        said = capabilities._transformer_engine_problem.__wrapped__(on_cuda=True)
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "transformer_engine"]:
            del sys.modules[name]
    assert said.endswith("cannot be imported: ImportError: libtransformer_engine.so: no such file")


def test_transformer_engine_gets_the_cudnn_of_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the libraries that a process has loaded: the parts that torch has not opened yet come from beside its own, and
    a variable leads there during the import. One that names another directory is left alone."""
    for name in ("CUDNN_HOME", "CUDNN_PATH"):
        monkeypatch.delenv(name, raising=False)
    own, link = tmp_path / "its own" / "lib", tmp_path / "link"
    own.mkdir(parents=True)
    (own / "libcudnn.so.9").touch()
    link.symlink_to(own)
    opened: list[str] = []
    monkeypatch.setattr(capabilities.ctypes, "CDLL", lambda path, mode: opened.append(path))
    line = "7f00-7f10 r-xp 00000000 fd:00 77 {}\n"
    libraries = "/lib/libcuda.so.1", f"{own}/libcudnn_ops.so.9", f"{own}/libcudnn.so.9", "/usr/lib/libcudnn.so.9.14.0"
    maps = "".join(map(line.format, libraries))
    with capabilities._cudnn_of_torch(maps):
        assert os.environ["CUDNN_HOME"] == str(own)
        assert len(opened) == 7 and opened[0] == f"{own}/libcudnn_graph.so.9"
    assert "CUDNN_HOME" not in os.environ
    for named, parts in ((str(own.parent), 7), (str(link), 7), ("/mine", 0), ("", 7)):
        monkeypatch.setenv("CUDNN_HOME", named)
        opened.clear()
        with capabilities._cudnn_of_torch(maps):
            assert len(opened) == parts
        assert os.environ["CUDNN_HOME"] == named
    opened.clear()
    monkeypatch.delenv("CUDNN_HOME")
    with capabilities._cudnn_of_torch(line.format("/lib/libcuda.so.1")):
        assert "CUDNN_HOME" not in os.environ and not opened


def test_gpus_that_torch_cannot_use_end_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under a driver that is too old torch warns and takes the CPU: of a job that is asked for, nothing else would say
    so. Without devices, as on a login node, or with none wanted, the CPU is what is meant."""

    def refuses() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old\n(found version 12080).")

    devices = [Path("/dev/nvidia0")]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", refuses)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(capabilities.Path, "glob", lambda self, pattern: iter(devices))
    expected = r"\(CUDA 13\.0\) cannot use this machine's GPUs: The NVIDIA driver .* \(found version 12080\)\.; install"
    with pytest.raises(UserError, match=expected):
        prepare_job(Config(), 1)
    assert [row.verdict for row in doctor.machine_rows(1, first_here=False) if row.what == "GPUs"] == ["fault"]
    assert main(["doctor"]) == 2 and "cannot use this machine's GPUs" in capsys.readouterr().out
    servers = [f"model.hf_path={tmp_path}", "rollout.engine=vllm", f"rollout.servers.registry_dir={tmp_path}"]
    assert main(["serve", CONFIG, *servers]) == 2 and "cannot use this machine's GPUs" in capsys.readouterr().err
    for hidden in ("", "-1,0", "NoDevFiles"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert capabilities.why_gpus_are_unused() == ""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    devices.clear()
    assert capabilities.why_gpus_are_unused() == ""


def test_an_attention_that_cannot_run_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of an H200 with two versions of cuDNN: Transformer Engine imports, and its attention fails when it is used."""

    def fails(*args: Any, **settings: Any) -> None:
        raise RuntimeError("fused_attn.cu:405:\ncuDNN Error: CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED")

    stub = ModuleType("transformer_engine.pytorch")
    stub.DotProductAttention = fails  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformer_engine", ModuleType("transformer_engine"))
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", stub)
    monkeypatch.setattr(doctor, "this_machine", lambda: Machine((9, 0), ""))
    [row] = doctor.attention_rows(torch.device("meta"))  # a device that every machine has
    assert row.verdict == "fault" and "fails: fused_attn.cu:405: cuDNN Error: CUDNN" in row.detail
    for other in (Machine((9, 0), "it is not installed"), Machine((8, 0), "")):  # the latter: no flash-attn
        monkeypatch.setattr(doctor, "this_machine", lambda other=other: other)
        assert doctor.attention_rows(torch.device("meta")) == []


@pytest.mark.long
def test_a_transformer_engine_that_cannot_run_is_hidden_from_megatron(tmp_path: Path) -> None:
    """What its real core wheel does without the extension for torch, in a process of its own: Megatron's own import of
    it catches ImportError only."""
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "pytorch.py").write_text("raise FileNotFoundError('Could not find shared object file')\n")
    script = """if True:
        import sys
        from dppo_megatron.platform import capabilities, prepare
        said = capabilities._transformer_engine_problem(on_cuda=True)
        assert said.endswith("FileNotFoundError: Could not find shared object file"), said
        prepare()
        from dppo_megatron.workbench.cli import main
        sys.exit(main(["doctor"]))
    """
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{REPOSITORY}"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "torch's fused AdamW" in done.stdout


@pytest.mark.parametrize(
    ("logits", "kept", "padding", "scale", "broken"),
    [
        (0.1, 1.0, 0.0, 1.0, []),
        (10.0, 1.0, 0.0, 1.0, []),
        (1.0, 1.0, 0.6, 1.0, [3]),
        (1.0, 0.0, 0.0, 1.0, [5, 6]),
        (1.0, 1.0, 0.0, math.nan, [3, 5, 6]),
        (1.0, 1.0, 0.0, 0.0, [6]),
        (1.0, 1.0, 0.0, 0.5, [6]),
        (1.0, 1.0, 0.0, 2.0, [6]),
    ],
)
def test_gate_judges_fp8_by_its_own_rounding(
    logits: float, kept: float, padding: float, scale: float, broken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounding of 0.28, half of it shared, passes however wide the logits are. Padding in the gradients of single
    samples differs from packed ones by more than that, lost gradients from bfloat16's, and a matrix whose `scale` is
    wrong by its norm, however little it is of all."""
    rng = np.random.default_rng(0)
    true, shared, *own, pads = rng.normal(size=(5, 4096))
    one, other = (0.28 * (shared + noise) / np.sqrt(2) for noise in own)
    found = [(true, true), (true, true), (true + one, kept * true + one), (true + other, kept * true + other)]
    found[3] = (found[3][0], found[3][1] + padding * pads)
    factors = [(1.0, 1.0)] * 2 + [(scale, 2.0)] * 2
    measured = iter([([logits * a / 2], _by_name(b, *both)) for (a, b), both in zip(found, factors, strict=True)])
    monkeypatch.setattr(fp8_gate, "Actor", lambda *_, **__: SimpleNamespace(layout=SimpleNamespace(world_size=1)))
    monkeypatch.setattr(fp8_gate, "_measure", lambda *_: next(measured))
    config = Config(actor=ActorConfig(fp8="tensorwise"))
    config.model.dtype = "bfloat16"
    unused: Any = None
    findings = run_gate(config, unused, cast(Any, SimpleNamespace(max_positions=512, vocab_size=64)), unused)
    assert [i for i, finding in enumerate(findings) if not finding.passed] == broken, findings
    assert scale == 1.0 or findings[6].what.endswith("most in o_proj.weight")


def _by_name(gradient: np.ndarray, scale: float, moved: float) -> dict[str, torch.Tensor]:
    """One product's by `scale`; a router's, a norm's and one of two experts' by `moved`, as in sound FP8."""
    rows = torch.from_numpy(gradient).view(64, 64)
    found = {"mlp.experts.0.up_proj.weight": moved * rows[6:7], "mlp.experts.1.up_proj.weight": rows[7:]}
    found |= {"o_proj.weight": scale * rows[:4], "mlp.gate.weight": moved * rows[4:5], "norm.weight": moved * rows[5]}
    return found | {"lora_A.weight": torch.zeros(2, 64)}


def test_gate_fails_on_nan() -> None:
    """A difference that is not a number is not within its bound."""
    assert not GateResult("x", float("nan"), 1.0).passed


@pytest.mark.skipif(torch.cuda.is_available(), reason="the machine has CUDA")
def test_fp8_without_cuda_is_the_users_mistake(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Megatron would ignore the setting in silence."""
    overrides = settings(files, tmp_path / "run", actor__fp8="blockwise", model__dtype="bfloat16")
    assert main(["doctor", "--fp8-gate", CONFIG, *overrides]) == 2
    assert "actor.fp8 = blockwise: there is no CUDA device; use fp8 = off" in capsys.readouterr().err
