"""Servers that die in every phase of a step while others are in flight: the run ends as without, and says what was."""

from __future__ import annotations

import json
import shutil
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from support.engines.stub import Asked, StubServers
from support.engines.typist import Typist
from support.job import QUICK, job_config, read_metrics
from support.killing import Kill, arm, run_killed, run_whole
from support.launch import RankError, run_ranks

from dppo_megatron.checkpoint.checkpoint_dir import step_name
from dppo_megatron.checkpoint.store import read_state

LIMIT = 40
PHASES = ("select", "generate", "reward", "update", "sync", "record", "saving", "evaluate")


@pytest.fixture
def stubs() -> Iterator[StubServers]:
    with StubServers() as found:
        found.behaviours.update({name: Typist(found, name, LIMIT) for name in "ab"})
        yield found


def _page(stubs: StubServers, name: str, dead: dict[str, int]) -> None:
    """GET /rig/`name` has these servers be dead. One that is back has other weights."""

    async def change(asked: Asked) -> None:
        stubs.dead = dict(dead)
        for one in dead:
            stubs.versions.pop(one, None)
        await asked.reply("{}")

    stubs.pages[f"rig/{name}"] = change


def train_with(files: Path, run_dir: Path, values: dict[str, Any], strikes: list[tuple[Kill, str]]) -> int:
    """On a rank: a run in which pages are asked for at these moments."""
    from dppo_megatron.job import prepare_job
    from dppo_megatron.run import Run
    from dppo_megatron.train import train

    with Run(prepare_job(job_config(files, run_dir, **values), 1)) as run:
        for moment, page in strikes:
            arm(run, moment, lambda page=page: urllib.request.urlopen(page).close())  # type: ignore[misc]
        train(run)
    return 0


def base(stubs: StubServers) -> dict[str, Any]:
    return QUICK | {
        "rollout__engine": "vllm",
        "rollout__servers__endpoints": f"[{stubs.url('a')},{stubs.url('b')}]",
        "rollout__prompts_per_step": 4,
        "rollout__completions_per_prompt": 4,
        "rollout__sync__in_flight": "continue",
        "rollout__sync__verify_every": 0,
        "rollout__sampling__max_completion_tokens": LIMIT,
        "rollout__limits__logprob_diff_warning": 1000,
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("in_flight", "dead"), [("continue", {"a": 99}), ("finish", {"a": 99}), ("continue", {"a": 20, "b": 20})]
)
def test_a_server_dies_in_every_phase(
    files: Path, tmp_path: Path, stubs: StubServers, in_flight: str, dead: dict[str, int]
) -> None:
    """In each step in another one, or all do, and are back before long: nothing is missing and nothing says so; every
    completion is what the run without has, and what was sampled again under other weights is labelled."""
    values = base(stubs) | {
        "steps": len(PHASES),
        "rollout__async_steps": 1,
        "rollout__sync__in_flight": in_flight,
        "rollout__limits__probe_every_s": 0.2,
        "checkpoint__every_steps": 1,
        "eval__every_steps": 1,
    }
    run_whole(files, tmp_path / "whole", 1, values)
    _page(stubs, "die", dead)
    _page(stubs, "live", {})
    page = stubs.url("rig")
    # an evaluation comes before the first step, and the first sync is no `Loop.sync`
    strikes = [(Kill(phase, step + (phase == "evaluate")), f"{page}/die") for step, phase in enumerate(PHASES, start=1)]
    if len(dead) == 1:
        strikes += [(Kill("sync", step), f"{page}/live") for step in range(1, 1 + len(PHASES)) if step != 5]
        strikes += [(Kill("record", 5), f"{page}/live")]
    assert set(run_ranks(train_with, 1, files, tmp_path / "run", values, strikes)) == {0}
    rows, expected = read_metrics(tmp_path / "run"), read_metrics(tmp_path / "whole")
    assert [row["step"] for row in rows] == [row["step"] for row in expected]
    assert sum(row["rollout/retries"] for row in rows[1:]) > 0
    for row in rows[1:]:
        labels = {entry["name"]: entry["label"] for entry in row["prune/ledger"]}
        assert "rollout/missing" not in labels and row["rollout/missing_count"] == 0
        assert ("rollout/resent" in labels) == (row["rollout/groups_resent"] > 0)
        assert labels.get("rollout/resent", "biased") == "biased"

    def sampled(name: str) -> Any:
        found = pd.read_parquet(tmp_path / name / "samples").sort_values(["step", "group", "completion"])
        return json.loads(found[["step", "prompt_index", "completion", "token_ids"]].to_json(orient="records"))

    assert sampled("run") == sampled("whole")


@pytest.mark.slow
def test_a_resume_with_other_settings(files: Path, tmp_path: Path, stubs: StubServers) -> None:
    """None may be changed without being told; of a permitted change what was in flight is sampled anew, and no token is
    older than the steps say."""
    values = base(stubs) | {"steps": 4, "checkpoint__every_steps": 2, "rollout__async_steps": 2}
    changes: dict[str, Any] = {
        "rollout.async_steps": 0,
        "rollout.prompts_per_step": 3,
        "rollout.sampling.temperature": 0.7,
        "rollout.sampling.max_completion_tokens": 30,
    }
    killed = tmp_path / "killed"
    assert run_killed(files, killed, 1, values, Kill("update", 3))
    state = read_state(killed / "checkpoints" / step_name(2) / "loop.pt")["loop"]["loop"]["in_flight"]
    assert list(state) == [3, 4] and state[3]["places"]
    with pytest.raises(RankError, match=r"rollout\.async_steps"):
        run_whole(files, killed, 1, values | {"rollout__async_steps": 0})
    for key, value in changes.items():
        run_dir = Path(shutil.copytree(killed, tmp_path / key, symlinks=True))
        for one in stubs.behaviours.values():
            assert isinstance(one, Typist)
            one.limit = 30 if key.endswith("max_completion_tokens") else LIMIT
            one.seeds.clear()
            one.sampled.clear()
        run_whole(files, run_dir, 1, values | {key.replace(".", "__"): value, "checkpoint__may_change": f"[{key}]"})
        rows = read_metrics(run_dir)
        assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
        found = pd.read_parquet(run_dir / "samples")
        assert len(found[found["step"] == 3]) == 4 * (value if key == "rollout.prompts_per_step" else 4)
        assert not found["why"].isin(["missing", "failed"]).any()
        again = {name for one in stubs.behaviours.values() for name, _ in getattr(one, "sampled", ())}
        assert sum(name.startswith("3-") for name in again) == len(found[found["step"] == 3])
        oldest = 0 if key == "rollout.async_steps" else 2
        assert all(row["rollout/staleness_max"] <= oldest for row in rows[3:])
