"""Real servers that are set up wrongly, hang or die. The last tests end servers, so this file runs last."""

from __future__ import annotations

import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.engines.servers import API_KEY, Reference
from support.job import QUICK, REPOSITORY, job_config, read_metrics, settings
from support.launch import run_ranks
from support.logged import logged_lines
from support.served import (
    LONG,
    LONGEST,
    Served,
    command_line,
    generate_while,
    prompts_of,
    rank_zero,
    requests_for,
    send,
    sync_until_all_live,
)

from dppo_megatron.config.schema import Config
from dppo_megatron.job import prepare_job
from dppo_megatron.rollout.engine import Sampling
from dppo_megatron.rollout.server_engine import ServerEngine
from dppo_megatron.rollout.servers import sglang, vllm
from dppo_megatron.rollout.servers.server_process import LaunchedServer
from dppo_megatron.run import Run
from dppo_megatron.train import train
from dppo_megatron.types import RunAborted, UserError

pytestmark = pytest.mark.slow


WRONG = {
    "url": ({"rollout__servers__endpoints": "[http://127.0.0.1:9]"}, "no server answers at http://127.0.0.1:9"),
    "context": (
        {
            "rollout__sampling__max_completion_tokens": LONGEST,
            "data__max_prompt_tokens": 17,
            "packing__max_tokens_per_microbatch": 1024,
        },
        f"context or KV cache of only {LONGEST + 16} tokens",
    ),
    "key": ({"rollout__servers__api_key_env": "NO_SUCH_KEY"}, "refuses the API key"),
}


@pytest.mark.parametrize("case", [*sorted(WRONG), "engine", "version"])
def test_wrong_settings_are_said_at_start(
    served: Served, tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 2 and a message that names the server, before any step; no message holds the key."""
    other = {"vllm": "sglang", "sglang": "vllm"}[served.name]
    extra, message = WRONG.get(case, ({}, "is too old; at least 99 is needed"))
    if case == "engine":
        extra, message = {"rollout__engine": other}, f"is no {'vLLM' if other == 'vllm' else 'SGLang'} server"
    monkeypatch.setattr(
        {"vllm": vllm, "sglang": sglang}[served.name], "MINIMUM_VERSION", "99" if case == "version" else "0"
    )
    values = {"rollout__engine": served.name, "rollout__servers__endpoints": f"[{served.servers[0].url}]"} | extra
    config = job_config(served.files, tmp_path / "run", **values)
    with pytest.raises(UserError, match=message) as error:
        served.engine(config)
    assert API_KEY not in str(error.value) and API_KEY not in capsys.readouterr().out


def test_wrong_model_is_said_at_start(served: Served, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A server of another vocabulary; and through the command line exit code 2 with nothing written."""
    mine = shutil.copytree(served.files / "model", tmp_path / "model")
    text = (mine / "config.json").read_text()
    (mine / "config.json").write_text(text.replace('"vocab_size": 19', '"vocab_size": 20'))
    config = served.config(tmp_path / "run", 1)
    job = prepare_job(config, 1)
    with pytest.raises(UserError, match="19 tokens in its vocabulary; the actor has 20"):
        ServerEngine(config, replace(job.architecture, vocab_size=20), job.tokenizer)
    values = settings(
        served.files,
        tmp_path / "run",
        rollout__engine=served.name,
        rollout__servers__endpoints=f"[{served.servers[0].url}]",
        rollout__servers__api_key_env="NO_SUCH_KEY",
    )
    codes = run_ranks(command_line, 1, ["train", str(REPOSITORY / "configs" / "quickstart.yaml"), *values])
    assert codes == [2] and "refuses the API key" in capfd.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_request_that_takes_too_long_is_named(served: Served, tmp_path: Path) -> None:
    """Nothing is waited for for ever: with the probes too slow to notice, the watchdog ends the run."""
    config = served.config(tmp_path, 1, rollout__limits__request_timeout_s=1.0, rollout__limits__probe_every_s=600.0)
    engine = served.engine(config)
    engine.load_weights(Reference(served.files / "model", 6).weights)
    # of a training step the completions would be missing, and the run would go on (tests/test_fleet.py)
    requests = [replace(one, stream="eval") for one in requests_for(prompts_of(config)[:24], step=7)]
    try:
        with pytest.raises(RunAborted, match=rf"7-\d+-0 on {served.servers[0].url}"):
            generate_while(engine, requests, lambda: send(served.servers[0], signal.SIGSTOP))
    finally:
        send(served.servers[0], signal.SIGCONT)


def test_a_hung_server_is_named_and_survived(served: Served, tmp_path: Path) -> None:
    """SIGSTOP in the middle of generation: every request is answered once, by the other server; after SIGCONT it can
    sleep in spite of what it still runs, is synced and takes part again."""
    said = logged_lines()
    config = served.config(
        tmp_path,
        rollout__limits__probe_every_s=0.5,
        rollout__limits__probe_timeout_s=5.0,
        rollout__limits__sync_timeout_s=30,
    )
    engine, reference = served.engine(config), Reference(served.files / "model", 6)
    engine.load_weights(reference.weights)
    requests = requests_for(prompts_of(config)[:24])
    expected = engine.generate(requests, Sampling(LONG, 1.0, 0))
    engine.statistics()
    completions = generate_while(engine, requests, lambda: send(served.servers[1], signal.SIGSTOP))
    statistics = engine.statistics()
    assert statistics.retries > 0 and statistics.servers_live == 1
    assert any(served.servers[1].url in line and "is out" in line for line in said)
    assert served.same(completions, expected) and reference.difference(requests, completions).max() < 1e-3
    send(served.servers[1], signal.SIGCONT)
    config.rollout.limits.probe_timeout_s = 60.0  # on a busy machine the way back would have outages of its own
    engine._sync.sleep()
    assert all(member.asleep and member.state != "out" for member in rank_zero(engine).fleet.members)
    other = Reference(served.files / "model", 7)
    sync_until_all_live(engine, other)
    completions = engine.generate(requests, Sampling(LONG, 1.0, 0))
    assert engine.statistics().servers_live == 2
    assert other.difference(requests, completions).max() < 1e-3


def test_a_killed_server_loses_and_repeats_nothing(served: Served, tmp_path: Path) -> None:
    """kill -9 in the middle of generation: one completion for every request, with seeds the same as without it."""
    said = logged_lines()
    config = served.config(tmp_path, rollout__limits__probe_every_s=0.5)
    engine, reference = served.engine(config), Reference(served.files / "model", 8)
    engine.load_weights(reference.weights)
    requests = requests_for(prompts_of(config)[:24])
    expected = engine.generate(requests, Sampling(LONG, 1.0, 0))
    engine.statistics()
    completions = generate_while(engine, requests, lambda: send(served.servers[1], signal.SIGKILL))
    assert engine.statistics().retries > 0
    assert served.same(completions, expected) and reference.difference(requests, completions).max() < 1e-3
    assert any(served.servers[1].url in line and "is out" in line for line in said)


def test_without_any_server_the_run_stops_with_a_checkpoint(served: Served, tmp_path: Path) -> None:
    """The last server hangs, first in the update of step 1, so that its sync fails, then, in the run that goes on from
    there, before step 3's generation: each time the server is named and the last finished update is kept."""
    config = served.config(
        tmp_path / "run",
        1,
        steps=4,
        rollout__limits__engine_wait_s=2,
        rollout__limits__sync_timeout_s=10,
        rollout__limits__probe_every_s=0.5,
        rollout__sync__verify_every=0,
        **QUICK,
    )
    run_dir, server = tmp_path / "run", served.servers[0]
    said = run_ranks(_train_with_a_server_that_stops, 1, config, server, "update", 1)[0]
    assert "no rollout server has taken weight sync 2" in said and server.url in said
    assert [path.name for path in (run_dir / "checkpoints").glob("step_*")] == ["step_000001"]
    send(server, signal.SIGCONT)
    said = run_ranks(_train_with_a_server_that_stops, 1, config, server, "_select", 2)[0]
    # it had the weights of step 2, the third of the run; whoever comes back needs them again
    expected = "no rollout server has taken weight sync 3 in rollout.limits.engine_wait_s = 2 s"
    assert expected in said and server.url in said
    assert sorted(path.name for path in (run_dir / "checkpoints").glob("step_*")) == ["step_000001", "step_000002"]
    assert [row["step"] for row in read_metrics(run_dir)] == [0, 1, 2]


def _train_with_a_server_that_stops(config: Config, server: LaunchedServer, phase: str, count: int) -> str:
    """Before the `count`-th call of the loop's `phase`."""
    try:
        with Run(prepare_job(config, 1)) as run:
            call, calls = getattr(run.loop, phase), []

            def stop_and_call(*arguments: Any) -> Any:
                calls.append(phase)
                if len(calls) == count:
                    send(server, signal.SIGSTOP)
                    config.rollout.limits.probe_timeout_s = 1.0  # nobody is left who could be too slow for it
                return call(*arguments)

            setattr(run.loop, phase, stop_and_call)
            train(run)
    except RunAborted as stop:
        return str(stop)
    return ""
