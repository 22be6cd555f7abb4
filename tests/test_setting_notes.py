"""What a run says at its start about servers that leave GPUs idle, and about bounds that never act."""

from __future__ import annotations

import pytest

from dppo_megatron.config.load import read_config
from dppo_megatron.config.notes import effect_notes, gspo_note, server_notes, warmup_note
from dppo_megatron.config.rollout import check_rollout

LAUNCHED = ["rollout.engine=vllm", "rollout.servers.launch=local"]
COLOCATED = [*LAUNCHED, "rollout.servers.colocate=true"]


def args(*words: str) -> str:
    return f"rollout.servers.args={list(words)}"


@pytest.mark.parametrize(
    ("settings", "used", "all_of_them"),
    [
        ([], 1, ["0", "1", "2", "3", "4", "5", "6", "7"]),
        ([args("--tensor-parallel-size", "2")], 2, ["0,1", "2,3", "4,5", "6,7"]),
        (["rollout.servers.gpus=['0,1,2,3']", args("-tp", "4")], 4, ["0,1,2,3", "4,5,6,7"]),
        ([args("--data-parallel-size", "3")], 3, ["0,1,2", "3,4,5"]),  # of eight GPUs two servers of three take six
        (["rollout.servers.count=8"], 1, ["0", "1", "2", "3", "4", "5", "6", "7"]),  # all start on the first GPU
        (["rollout.servers.gpus=['0,1,2,3']", args("-tp", "2", "-pcp", "2")], 4, ["0,1,2,3", "4,5,6,7"]),
    ],
)
def test_colocated_servers_that_leave_gpus_idle_are_named(
    settings: list[str], used: int, all_of_them: list[str]
) -> None:
    """One server is the default, and on eight GPUs it makes rollouts eight times as long. What the line says to set is
    accepted, and is enough."""
    (line,) = server_notes(read_config("", [*COLOCATED, *settings]).rollout, 8)
    assert f"generate on {used} of a machine's 8 GPUs" in line
    of_all = sum(len(entry.split(",")) for entry in all_of_them)
    count, gpus = line.split(f" on {of_all} with ")[1].split(" ", 1)
    assert count == f"rollout.servers.count={len(all_of_them)}"
    assert gpus.removeprefix("rollout.servers.gpus=").strip("'") == str(all_of_them).replace("'", '"')
    followed = read_config("", [*COLOCATED, *settings, count, gpus.replace("gpus='", "gpus=").removesuffix("'")])
    check_rollout(followed.rollout)
    assert server_notes(followed.rollout, 8) == []


def test_servers_on_all_gpus_or_elsewhere_need_no_line() -> None:
    full = [
        args("--tensor-parallel-size", "2", "--data-parallel-size", "4"),
        "rollout.servers.gpus=['0,1,2,3,4,5,6,7']",
    ]
    for settings in (
        [],
        ["rollout.engine=vllm", "rollout.servers.endpoints=[http://127.0.0.1:1]"],
        [*COLOCATED, *full],
        [*LAUNCHED, "rollout.servers.gpus=['6']"],
        [*COLOCATED, args("-tp", "16")],
        [args("-tp", "none")],  # nobody reads it
    ):
        assert server_notes(read_config("", settings).rollout, 8) == []


def test_a_server_beside_a_rank_that_never_sleeps_is_named() -> None:
    (line,) = server_notes(read_config("", LAUNCHED).rollout, 8)
    assert "gpus is empty: servers start on a machine's first GPU, where a rank trains" in line


def test_settings_of_servers_that_the_embedded_engine_has_not() -> None:
    """Who forgets rollout.engine=vllm trains with the slow engine for tests."""
    config = read_config("", ["rollout.servers.count=8", args("--tensor-parallel-size", "2")])
    said = effect_notes(config)
    assert [line.split(" has no effect while ")[1] for line in said] == ["rollout.engine = hf"] * 2


def test_a_number_of_drafts_without_drafts() -> None:
    settings = [*COLOCATED, "rollout.speculation.draft_tokens=8"]
    (line,) = effect_notes(read_config("", settings))
    assert line == "rollout.speculation.draft_tokens = 8 has no effect while rollout.speculation.method = none"
    assert effect_notes(read_config("", [*settings, "rollout.speculation.method=suffix"])) == []


@pytest.mark.parametrize(
    ("settings", "is_warned"),
    [
        (["objective.updates_per_step=4"], True),
        (["rollout.async_steps=1"], True),
        ([], False),  # on policy the ratio is 1
        (["objective.updates_per_step=4", "objective.clip_low=3e-4", "objective.clip_high=4e-4"], False),
        (["objective.updates_per_step=4", "objective.loss=clip"], False),
        # the ratio is to the actor itself, before the step's only update: 1 whichever weights sampled
        (["rollout.async_steps=1", "objective.correction.level=token"], False),
        (["rollout.async_steps=1", "objective.old_logprobs=recompute"], False),
        (["rollout.async_steps=1", "objective.correction.level=token", "objective.updates_per_step=2"], True),
    ],
)
def test_gspo_with_the_bounds_of_tokens(settings: list[str], is_warned: bool) -> None:
    said = gspo_note(read_config("", ["objective.loss=gspo", *settings]))
    assert bool(said) == is_warned and all("objective.clip_low=3e-4" in line for line in said)


@pytest.mark.parametrize(("updates", "share"), [(1, "30%"), (2, "60%"), (4, "")])
def test_a_warmup_that_never_ends_is_said(updates: int, share: str) -> None:
    """verl counts training steps; here a step has several updates. By hand: 3, 6 and 12 updates of 10."""
    warm = ["steps=3", "actor.optimizer.lr_warmup_steps=10", f"objective.updates_per_step={updates}"]
    said = warmup_note(read_config("", warm))
    assert bool(said) == bool(share) and all(f" ends at {share} of " in line for line in said)
    assert warmup_note(read_config("", [*warm, "steps=0"])) == []
