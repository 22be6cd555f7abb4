"""`dppo-megatron data` and `hub:` through the real client of the hub, over HTTP, against a hub of our own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.known_layouts import LAYOUTS, write_repository

from dppo_megatron.data.known import KNOWN_SETS

TESTS = Path(__file__).parents[1]
MISSING, GATED, DROPPED, CUT = "deepscaler", "aime24", "aime25", "amc23"
"""Sets that this hub does not give out; `support/hub_client.py` says why."""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Exit code and last words of each command, by the set's name; what it has written is in `out`."""
    directory = tmp_path_factory.mktemp("hub")
    for name, known in KNOWN_SETS.items():
        if name != MISSING:
            write_repository(directory / "hub" / known.hub, LAYOUTS[name][0], known.subset)
    out = directory / "out"
    commands = [["data", name, "--out", str(out / name)] for name in KNOWN_SETS]
    commands += [["data", "math500", "--out", str(out / "again")], ["data", DROPPED, "--out", str(out / "nobody")]]
    (directory / "commands.json").write_text(json.dumps(commands), encoding="utf-8")
    inherited = {key: value for key, value in os.environ.items() if not key.upper().startswith(("HF_", "HTTP"))}
    environment = {
        **inherited,
        "HF_HOME": str(directory / "home"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "NO_PROXY": "*",
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)]),
    }
    script = [sys.executable, str(TESTS / "support" / "hub_client.py")]
    done = subprocess.run(
        [*script, str(directory / "hub"), str(directory / "commands.json")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    read = [json.loads(line) for line in done.stdout.splitlines()]
    return {Path(one["command"][-1]).name: {**one, "out": out} for one in read}


@pytest.mark.parametrize("name", [name for name in KNOWN_SETS if name not in (MISSING, GATED, DROPPED, CUT)])
def test_a_set_is_downloaded(answers: dict[str, dict[str, Any]], name: str) -> None:
    """Parquet shards with and without configurations, by the client's own listing, redirects and etags."""
    assert answers[name]["code"] == 0, answers[name]["said"]
    first = next(iter(KNOWN_SETS[name].splits))
    written = (answers[name]["out"] / name / f"{first}.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in written] == LAYOUTS[name][1]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (MISSING, "agentica-org/DeepScaleR-Preview-Dataset: not found on the hub"),
        (GATED, "HuggingFaceH4/aime_2024: needs a login that has accepted its terms (hf auth login)"),
        (DROPPED, "math-ai/aime25: the connection to the hub broke, run it again: "),
        (CUT, "math-ai/amc23: the connection to the hub broke, run it again: "),
        ("nobody", "math-ai/aime25: the hub cannot be reached: "),
    ],
)
def test_a_hub_that_does_not_answer_is_one_sentence(answers: dict[str, dict[str, Any]], name: str, said: str) -> None:
    """404, a gated 401, a connection that is dropped at once or within a file, nobody at the port: exit code 2."""
    assert answers[name]["code"] == 2
    assert answers[name]["said"].startswith(f"error: hub:{said}"), answers[name]["said"]
    assert not (answers[name]["out"] / name).exists()


def test_what_was_downloaded_needs_no_hub(answers: dict[str, dict[str, Any]]) -> None:
    """The client's cache answers when nobody is at the port."""
    assert answers["again"]["code"] == 0
    files = [answers["again"]["out"] / name / "test.jsonl" for name in ("again", "math500")]
    assert files[0].read_bytes() == files[1].read_bytes()
