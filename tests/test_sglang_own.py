"""What SGLang's own functions (`sglang_own.py`) do with the trainer's offers, and in launched servers on chips other
than Hopper, which they are told of: a sync's weights find their place, and a mixture's experts are recorded."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engines import servers
from support.engines.servers import PYTHON, local_settings, needs, stand_ins
from support.job import job_config, write_job_files

from dppo_megatron.rollout.servers.server_process import LaunchedServer, make_servers
from dppo_megatron.rollout.sync.channels import Bucket
from dppo_megatron.rollout.sync.colocated import SharedBuffer, sglang_offer
from dppo_megatron.types import UserError
from dppo_megatron.workbench.accept.jobs import write_mixture

pytestmark = needs("sglang")
DEEP_GEMM = "SGLANG_ENABLE_JIT_DEEPGEMM"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a job with a mixture."""
    directory = write_job_files(tmp_path_factory.mktemp("task"))
    shutil.rmtree(directory / "model")
    write_mixture(directory / "model")
    return directory


@pytest.fixture
def launched(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the server of a job on this chip, without starting it."""

    def made(chip: tuple[int, int], arguments: Sequence[str] = (), **values: object) -> LaunchedServer:
        job = local_settings("sglang", *arguments) | values
        config = job_config(files, tmp_path / "run", model__dtype="bfloat16", **job)
        with monkeypatch.context() as on_gpu:
            on_gpu.setattr(torch.cuda, "is_available", lambda: True)
            on_gpu.setattr(torch.cuda, "get_device_capability", lambda: chip)
            [server] = make_servers(config)
        return server

    return made


def _asked(*arguments: str, given: str = "", **variables: str) -> Any:
    paths = [str(Path(servers.__file__).parent), stand_ins("sglang").get("PYTHONPATH", "")]
    done = subprocess.run(
        [PYTHON["sglang"], "-m", "sglang_own", *arguments],
        input=given,
        capture_output=True,
        text=True,
        env=os.environ | variables | {"PYTHONPATH": os.pathsep.join(paths)},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float8_e4m3fn])
def test_a_bucket_is_unpacked(kind: torch.dtype) -> None:
    """With the end of a longer bucket behind it in the buffer."""
    shapes: dict[str, tuple[int, ...]] = {"model.norm.weight": (5,), "a.weight": (2, 3), "scalar": ()}
    values = {name: torch.randn(shape).to(kind) for name, shape in shapes.items()}
    bucket = Bucket(list(values.items()))
    buffer = SharedBuffer(1024, torch.device("cpu"))
    buffer.memory.fill_(255)
    buffer.fill(bucket.flat())
    found = _asked("bucket", given=str(sglang_offer(buffer, bucket.notes)))
    buffer.close()
    assert found == {name: [str(kind), tensor.float().tolist()] for name, tensor in values.items()}


@pytest.mark.parametrize(("quantization", "given", "takes"), [("fp8_pow2", None, True), ("fp8", "1", False)])
def test_a_layer_takes_scales_after_its_first(
    launched: Any, monkeypatch: pytest.MonkeyPatch, quantization: str, given: str | None, takes: bool
) -> None:
    """For DeepGEMM, on which a user may insist, those of the weights that a server begins with are packed, and those of
    a sync have another shape."""
    monkeypatch.delenv(DEEP_GEMM, raising=False)
    if given:
        monkeypatch.setenv(DEEP_GEMM, given)
    server = launched((10, 0), rollout__quantization=quantization, objective__correction__level="token")
    assert _asked("scales", **server.variables) == takes


def test_other_chips_and_servers_keep_deep_gemm(launched: Any) -> None:
    rounded = {"rollout__quantization": "fp8", "objective__correction__level": "token"}
    assert DEEP_GEMM not in launched((9, 0), **rounded).variables | launched((10, 0)).variables


def test_a_chip_on_which_no_layer_takes_other_weights_is_refused(launched: Any) -> None:
    rounded = {"rollout__quantization": "fp8", "objective__correction__level": "token"}
    refusing = [tuple(chip) for chip in _asked("packs")]
    assert refusing == [(8, 0), (8, 6)]
    for chip in refusing:
        with pytest.raises(UserError, match="on a chip older than Ada SGLang packs its first weights"):
            launched(chip, **rounded)
        launched(chip)
    launched((8, 9), **rounded)


@pytest.mark.parametrize("given", [(), ("--moe-runner-backend", "flashinfer_trtllm")])
def test_experts_are_recorded(launched: Any, given: Sequence[str]) -> None:
    """SGLang's own choice for Qwen3's mixtures routes inside the kernel; a user's choice stays."""
    server = launched((10, 0), given, actor__routing_replay="engine")
    told = [part.replace("{port}", "30000") for part in server.command[2:]]
    assert _asked("experts", *told, "--device", "cpu") == bool(given)
    assert "--enable-return-routed-experts" in told


def test_no_kernel_is_chosen_elsewhere(launched: Any) -> None:
    replay = {"actor__routing_replay": "engine"}
    others = [launched((9, 0), **replay), launched((10, 0)), launched((10, 0), ["--moe-a2a-backend=deepep"], **replay)]
    assert not any("--moe-runner-backend" in server.command for server in others)


@pytest.mark.parametrize("colocated", [True, False])
def test_a_colocated_server_starts_again_beside_unequal_stages(launched: Any, colocated: bool) -> None:
    """Elsewhere what occupies some of its GPUs is none of the job's."""
    server = launched((9, 0), ["--tp", "2"], rollout__servers__colocate=str(colocated).lower())
    assert _asked("beside", **server.variables) == colocated
