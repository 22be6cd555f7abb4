"""Real servers of each engine, started once for all files here; tests run engine by engine.

The model is the quickstart's with tied embeddings: the case in which vLLM on a CPU keeps a stale packed copy.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.engines.servers import API_KEY, needs, start_servers
from support.job import write_job_files
from support.served import LONGEST, Served, send

from dppo_megatron.rollout.servers.server_process import stop_all
from dppo_megatron.workbench.quickstart.tiny_model import write_tiny_qwen3


@pytest.fixture(scope="package")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_job_files(tmp_path_factory.mktemp("task"))
    write_tiny_qwen3(directory / "model", seed=0, tie_word_embeddings=True)
    settings = directory / "model" / "config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"max_position_embeddings": 1024}))
    (directory / "model" / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    )
    return directory


@pytest.fixture(scope="package", params=[pytest.param(name, marks=needs(name)) for name in ("vllm", "sglang")])
def served(request: pytest.FixtureRequest, files: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    os.environ["DPPO_ENGINE_API_KEY"] = API_KEY
    # the second as in most files, in a twentieth of the CPU time; it is the one that tests kill
    others = request.getfixturevalue("forked_vllm") if request.param == "vllm" else None
    started = start_servers(request.param, files, tmp_path_factory.mktemp("servers"), 2, LONGEST, others)
    yield Served(request.param, files, started)
    for server in started:
        with contextlib.suppress(ProcessLookupError):
            send(server, signal.SIGCONT)
        stop_all([server])
    os.environ.pop("DPPO_ENGINE_API_KEY", None)


@pytest.fixture(autouse=True)
def engines_are_closed(served: Served) -> Iterator[None]:
    yield
    while served.engines:
        served.engines.pop().close()
