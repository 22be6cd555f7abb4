"""Grading in real processes: every way in which a sample can go wrong costs that sample and nothing else."""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import math
import os
import resource
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.job import job_config, read_metrics, write_job_files
from support.launch import run_ranks

from dppo_megatron.config.reward import RewardConfig, RewardFunctionConfig
from dppo_megatron.job import prepare_job
from dppo_megatron.rewards.functions import NamedFunction
from dppo_megatron.rewards.grading import deciding_reward, make_grader
from dppo_megatron.rewards.pool import Grader
from dppo_megatron.run import Run
from dppo_megatron.train import train
from dppo_megatron.types import Grade, GradeTask, UserError

MEMORY_MB = 64


@contextlib.contextmanager
def pool_of(
    name: str = "obey", processes: int = 2, timeout_s: float = 30.0, max_concurrent: int = 256, **limits: Any
) -> Iterator[Grader]:
    path = name if ":" in name else f"odd_graders:{name}"
    pool = Grader(
        [NamedFunction("", path, key=f"reward.function = '{path}'")],
        processes=processes,
        timeout_s=timeout_s,
        memory_mb=MEMORY_MB,
        max_concurrent=max_concurrent,
        **limits,
    )
    try:
        yield pool
    finally:
        pool.close()


def tasks_of(completions: Sequence[str]) -> list[GradeTask]:
    return [GradeTask(text, "1", {}, f"sample {i}") for i, text in enumerate(completions)]


def outcome(grade: Grade) -> float | str:
    """Its reward, or how it failed."""
    assert math.isnan(grade.reward) == bool(grade.failure)
    return grade.failure or grade.reward


OWN_FAULT = {  # what a sample does -> how its failure begins; every other sample is graded as if it were not there
    "raise": "raised ZeroDivisionError",
    "sysexit": "raised SystemExit",
    "stdin": "raised EOFError",
    "kill": "died (signal 9)",
    "segfault": "died (signal 11)",
    "exit0": "died (exit code 0)",
    "exit7": "died (exit code 7)",
    "fork_and_die": "died (exit code 3)",
    "close_everything": "died (could not write its answers)",
    "memory": "raised MemoryError",
    "none": "returned None",
    "text": "returned str",
    "hang": "timed out",
    "hang_in_c": "timed out",
    "sleep": "timed out",
    "spawn_without_end": "timed out",
}
NO_FAULT = {  # odd, and graded all the same
    "print": 1.0,
    "print_much 100000": 1.0,
    "close_streams": 1.0,
    "fork_and_return": 1.0,
    "spawn": 1.0,
    "thread": 1.0,
    "alarm": 1.0,
    "huge 3000000": 1.0,
    "leak 20": 1.0,
    "numpy": 0.5,
    "grade x": 0.5,
    "slow 0.1": 1.0,
    "1": 1.0,
    "0": 0.0,
}


def check(completion: str, grade: Grade) -> None:
    """Against what this sample alone should come to."""
    expected = NO_FAULT.get(completion, OWN_FAULT.get(completion))
    if isinstance(expected, str):
        assert str(outcome(grade)).startswith(expected), f"{completion}: {outcome(grade)}"
    else:
        assert outcome(grade) == expected, f"{completion}: {outcome(grade)}"


WITHOUT_END = [command for command, how in OWN_FAULT.items() if how == "timed out"]


def among_others(command: str, timeout_s: float, times: int) -> None:
    """In one chunk, in one process, which goes on or is replaced."""
    with pool_of(processes=1, timeout_s=timeout_s) as pool:
        commands = ["1", "0", command, "1", "print", "slow 0.1"]
        for _ in range(times):
            for completion, grade in zip(commands, pool.grade(tasks_of(commands)), strict=True):
                check(completion, grade)


@pytest.mark.parametrize("command", [name for name in (*OWN_FAULT, *NO_FAULT) if name not in WITHOUT_END])
def test_each_behaviour_costs_its_own_sample_only(command: str) -> None:
    among_others(command, timeout_s=60.0, times=2)


@pytest.mark.slow
def test_what_has_no_end_costs_its_own_sample_only() -> None:
    """All at once, in pools of their own: each takes the whole limit."""
    with ThreadPoolExecutor(len(WITHOUT_END)) as threads:
        list(threads.map(lambda command: among_others(command, timeout_s=4.0, times=1), WITHOUT_END))


def test_what_is_odd_and_harmless_costs_no_process() -> None:
    """Not even one that has forked: the child must not answer as well."""
    harmless = [command for command in NO_FAULT if not command.startswith("leak")]
    with pool_of(processes=1, timeout_s=60.0) as pool:
        before = pool.grade(tasks_of(["pid"]))
        for command in harmless:
            check(command, pool.grade(tasks_of([command, "slow 0.1"]))[0])
        assert pool.grade(tasks_of(["pid"])) == before


MIX = st.lists(
    st.one_of(
        st.sampled_from(["0", "1"]),
        st.sampled_from(["0", "1", "grade x"]),
        st.sampled_from([command for command, how in OWN_FAULT.items() if how != "timed out"]),
        st.sampled_from([command for command in NO_FAULT if command != "numpy"]),  # whose import takes a while
    ),
    max_size=40,
)


@pytest.mark.slow
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(
    mix=MIX,
    hangs=st.lists(st.sampled_from(["hang", "sleep", "hang_in_c"]), max_size=2),
    processes=st.integers(1, 3),
    shuffle=st.randoms(use_true_random=False),
)
def test_any_mix_gives_each_sample_its_own_outcome(
    mix: list[str], hangs: list[str], processes: int, shuffle: object
) -> None:
    commands = mix + hangs
    shuffle.shuffle(commands)  # type: ignore[attr-defined]
    with pool_of(processes=processes, timeout_s=3.0) as pool:
        pool.seconds_each = 1e-5  # chunks as of a pool that has seen cheap gradings only: long ones
        for completion, grade in zip(commands, pool.grade(tasks_of(commands)), strict=True):
            check(completion, grade)


def test_many_gradings_in_order_without_a_lost_answer() -> None:
    """20,000 with their own rewards, through chunks of every length, and no process replaced on the way: every tenth is
    who grades it, and they are two at most (on a busy machine one process may take all)."""
    texts = ["pid" if i % 10 == 0 else f"value {i / 7}" for i in range(20_000)]
    with pool_of() as pool:
        rewards = [g.reward for g in pool.grade(tasks_of(texts))]
        assert pool.grade([]) == []
        later = {g.reward for g in pool.grade(tasks_of(["pid"] * 50))}
    assert [rewards[i] for i in range(20_000) if i % 10] == [i / 7 for i in range(20_000) if i % 10]
    assert len(later | set(rewards[::10])) <= 2


def test_large_texts_both_ways_do_not_block() -> None:
    """Chunks far above what a pipe holds, and answers too."""
    texts = [f"huge {2_000_000 + i}" + " " * 1_000_000 for i in range(24)]
    with pool_of() as pool:
        pool.seconds_each = 1e-6
        grades = pool.grade(tasks_of(texts))
        assert [g.reward for g in grades] == [1.0] * 24 and all(len(g.extracted or "") == 10_000 for g in grades)


def test_texts_arrive_as_they_are() -> None:
    """Lone surrogates, NUL, quotes, newlines: equal to the reference only if nothing changed on the way."""
    texts = ["\ud800", "\0", '"\\', "\r\n\u2028", "٣", "x" * 70_000, ""]
    with pool_of() as pool:
        assert [g.reward for g in pool.grade([GradeTask(text, text) for text in texts])] == [1.0] * len(texts)
        assert [g.reward for g in pool.grade([GradeTask(text, text + "y") for text in texts])] == [0.0] * len(texts)


def test_what_utf8_does_not_have_comes_back_escaped() -> None:
    """A grader that copies a lone surrogate into its grade: a text that can be written to a file, and no failure."""
    with pool_of("odd_graders:echo", processes=1) as pool:
        grades = pool.grade(tasks_of(["a\ud800b", "ü"]))
    assert [(g.reward, g.extracted) for g in grades] == [(1.0, "a\\ud800b"), (1.0, "ü")]


@pytest.mark.slow
def test_a_sample_is_charged_with_its_own_time_only() -> None:
    """Each of a chunk takes 0.5 s of the 4 s that are allowed (more on a busy machine), all of them 4.5 s and more."""
    with pool_of(processes=1, timeout_s=4.0) as pool:
        pool.seconds_each = 1e-5  # all in one chunk
        assert [g.reward for g in pool.grade(tasks_of(["slow 0.5"] * 9))] == [1.0] * 9


def test_what_stands_behind_a_slow_sample_is_done_by_the_idle(tmp_path: Path) -> None:
    """The slow one is graded where it is, and takes until all others are done. Those taken from behind it are graded
    once and come back in order."""
    book = tmp_path / "book"
    with pool_of(processes=2) as pool:
        while len({g.reward for g in pool.grade(tasks_of(["pid"] * 40))}) < 2:
            pass  # until both have started
        pool.seconds_each = 1e-5
        grades = pool.grade(tasks_of([f"until_signed 40 {book}", *[f"sign {book}"] * 40]))  # half are sent behind it
        assert grades[0].reward == 1.0
        assert len({g.reward for g in grades[1:]}) == 1, "all by the other process"
        assert len(book.read_text()) == 40, "each once"
        assert pool.grade(tasks_of(["value 3"] * 40)) == [Grade(3.0)] * 40, "nothing is left of the call before"


def test_memory_is_limited_for_each_process_and_a_leak_is_nobodys_fault() -> None:
    """12 samples that leak 20 MB each need four times the limit; each alone is far below it."""
    with pool_of(processes=1) as pool:
        grades = pool.grade(tasks_of(["leak 20"] * 12 + ["memory", "1"]))
        assert [outcome(g) for g in grades[:12]] == [1.0] * 12 and grades[13].reward == 1.0
        assert f"above reward.memory_mb = {MEMORY_MB}" in grades[12].failure


def test_garbage_in_the_pipe_of_answers() -> None:
    """A sample that writes into every file it finds: it fails, the others do not."""
    with pool_of(processes=1) as pool:
        grades = pool.grade(tasks_of(["1", "write_everywhere", "0", "1"]))
        assert [outcome(grades[i]) for i in (0, 2, 3)] == [1.0, 0.0, 1.0]
        assert grades[1].failure.startswith("died (")


def test_a_process_that_dies_between_two_calls_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a sample left behind strikes when nobody is graded: no sample is charged, even while /tmp is full."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with pool_of(processes=1) as pool:
        for _ in range(3):
            (pid,) = pool.grade(tasks_of(["pid"]))
            assert pool.grade(tasks_of(["die_later"]))[0].reward == 1.0
            deadline = time.monotonic() + 120
            while Path(f"/proc/{int(pid.reward)}/cmdline").read_bytes() and time.monotonic() < deadline:
                time.sleep(0.02)
            assert [g.reward for g in pool.grade(tasks_of(["1", "0"]))] == [1.0, 0.0]


def test_rows_reach_graders_that_ask_and_are_spoilt_for_nobody() -> None:
    """Each sample has its own copy, whatever the one before did to it; two ranks of dates and arrays too."""
    import datetime

    row = {"extra": {"unit": "cm"}, "day": datetime.date(2026, 1, 1)}
    with pool_of("with_row") as pool:
        grades = pool.grade([GradeTask(text, "", row) for text in ["3 cm", "4 m"] * 20])
        assert [outcome(g) for g in grades] == [1.0, 0.0] * 20
        assert "KeyError" in pool.grade([GradeTask("3 cm", "", {})])[0].failure
        unsendable = {"extra": {"unit": "cm"}, "call": lambda: None}
        grades = pool.grade([GradeTask("3 cm", "", row), GradeTask("3 cm", "", unsendable)])
        assert grades[0].reward == 1.0 and "its row cannot be sent" in grades[1].failure


def test_several_rewards() -> None:
    reward = RewardConfig(
        functions={
            "right": RewardFunctionConfig("final_answer", 2.0),
            "length": RewardFunctionConfig("odd_graders:length", 0.5),
        }
    )
    grader = make_grader(reward)
    try:
        grade = grader.grade([GradeTask("\\boxed{1}", "1")])[0]
        assert grade.reward == 2.0 * 1.0 + 0.5 * 9 and grade.parts == {"right": 1.0, "length": 9.0}
        assert deciding_reward(grade) == 1.0
    finally:
        grader.close()


def test_threads_take_turns() -> None:
    with pool_of() as pool:
        results: dict[int, list[float]] = {}

        def use(number: int) -> None:
            results[number] = [g.reward for g in pool.grade(tasks_of([f"value {number}"] * 300))]

        threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == {number: [float(number)] * 300 for number in range(4)}


def _grade_as_a_copy(pool: Grader, pids: set[float]) -> list[float]:
    mine = {g.reward for g in pool.grade(tasks_of(["pid"] * 20))}
    assert not mine & pids
    rewards = [g.reward for g in pool.grade(tasks_of([f"value {i}" for i in range(50)]))]
    pool.close()
    return rewards


def test_a_fork_has_processes_of_its_own() -> None:
    """Ranks of tests are forked; two that shared a pipe would read each other's answers."""
    with pool_of(processes=1) as pool:  # of two, one may take all
        pids = {g.reward for g in pool.grade(tasks_of(["pid"] * 20))}
        assert run_ranks(_grade_as_a_copy, 2, pool, pids) == [[float(i) for i in range(50)]] * 2
        assert {g.reward for g in pool.grade(tasks_of(["pid"] * 20))} == pids, "the parent's own goes on"


def test_what_graders_started_ends_with_them() -> None:
    with pool_of(processes=1) as pool:
        (pid,) = pool.grade(tasks_of(["pid"]))
        pool.grade(tasks_of(["spawn", "spawn", "fork_and_return"]))
        assert len(_group(int(pid.reward))) >= 3
    deadline = time.monotonic() + 120
    while _group(int(pid.reward)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _group(int(pid.reward))


def _group(leader: int) -> list[int]:
    """Living processes of a process group."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[2]) == leader and fields[0] != "Z":
                found.append(int(path.parent.name))
    return found


def test_failures_are_logged_a_few_with_labels_and_the_rest_by_kind(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR), pool_of() as pool:
        pool.grade(tasks_of(["raise"] * 100 + ["none"] * 50))
    assert len(caplog.records) == 3
    assert "grading sample 0 raised ZeroDivisionError" in caplog.text
    assert "grading sample 100 returned None" in caplog.text
    assert caplog.text.count("Traceback") == 1
    assert "and 148 gradings more: 99 x raised ZeroDivisionError, 49 x returned None" in caplog.text


# ------------------------------------------------------------------------------------- asynchronous and batched


def test_hundreds_are_open_in_one_process_and_no_more_than_allowed() -> None:
    """300 that wait for each other, in calls of 20 as a rollout makes them: all are begun, in one process. With room
    for 10 the eleventh is not, and ten have timed out."""
    with pool_of("coroutine", processes=1, max_concurrent=300) as pool:
        futures = [pool.submit(tasks_of(["meet 300"] * 20)) for _ in range(15)]
        assert [grade.reward for one in futures for grade in one.result()] == [1.0] * 300
        assert len({grade.reward for grade in pool.grade(tasks_of(["pid"] * 50))}) == 1
    with pool_of("coroutine", processes=1, max_concurrent=10, timeout_s=4.0) as pool:
        grades = pool.grade(tasks_of(["meet 11"] * 11))
        assert [outcome(grade) for grade in grades] == ["timed out after 4 s"] * 11


ASYNC_FAULT = OWN_FAULT | {"close_everything": "died ("}  # the event loop fails first, by what it watches files with


@pytest.mark.parametrize("command", [name for name in ASYNC_FAULT if name not in WITHOUT_END])
def test_what_an_asynchronous_sample_does_costs_it_alone(command: str) -> None:
    """Among others that are open in its process at that moment: they are graded, here or in the next process."""
    with pool_of("coroutine", processes=1, timeout_s=60.0) as pool:
        commands = ["wait 0.3", "value 2", command, "wait 0.3", "grade x", "0"]
        grades = pool.grade(tasks_of(commands))
        assert str(outcome(grades[2])).startswith(ASYNC_FAULT[command]), outcome(grades[2])
        assert [outcome(grade) for grade in grades[:2] + grades[3:]] == [1.0, 2.0, 1.0, 0.5, 0.0]


def test_what_is_open_when_a_process_ends_between_samples_is_graded_again(tmp_path: Path) -> None:
    """Together: 101 that wait for each other never could alone. In the first process 100 do when it ends."""
    with pool_of("coroutine", processes=1, timeout_s=60.0) as pool:
        grades = pool.grade(tasks_of([f"die_once 101 {tmp_path / 'once'}", *["meet 101"] * 100]))
        assert [outcome(grade) for grade in grades] == [1.0] * 101


@pytest.mark.slow
def test_an_asynchronous_sample_without_end_costs_it_alone() -> None:
    """One that waits, one that does not listen to being cancelled, one that blocks the event loop in Python or in C,
    itself or in a task of its own. All in one process, then alone; the others go on meanwhile or start again."""
    commands = ["never", "wait 3600", "hang", "hang_in_c", "child hang"]
    others = ["wait 0.3", "value 2", "grade x"] * 3
    with pool_of("coroutine", processes=1, timeout_s=4.0) as pool:
        grades = pool.grade(tasks_of([*others, *commands, *others]))
    assert [outcome(grade) for grade in grades[9:14]] == ["timed out after 4 s"] * 5
    assert [outcome(grade) for grade in grades[:9] + grades[14:]] == [1.0, 2.0, 0.5] * 6


def test_rows_prompts_tokens_and_reasons_arrive() -> None:
    tasks = [GradeTask("", "", {}, "", f"prompt {i}", i, "length") for i in range(40)]
    with pool_of("told") as pool:
        assert [(g.reward, g.extracted) for g in pool.grade(tasks)] == [(i, f"prompt {i} length") for i in range(40)]
    row = {"data_source": "gsm8k", "extra_info": {"index": 7}}
    for name in ("compute_score", "verl_batched", "verl_async"):
        with pool_of(name) as pool:
            grades = pool.grade([GradeTask("12", "12", row), GradeTask("1", "12", row)])
        assert grades == [Grade(1.0, "gsm8k 7", facts={"acc": 1.0}), Grade(0.0, "gsm8k 7", facts={"acc": 0.0})]


@pytest.mark.parametrize("command", ["raise", "kill", "memory", "exit0", "hang"])
def test_in_a_batch_a_failure_costs_one_sample(command: str) -> None:
    """The call fails, dies or hangs as a whole; then each sample is tried alone, and one is to blame."""
    with pool_of("batched", processes=1, timeout_s=6.0) as pool:
        commands = ["x", "value 2", command, "y"]
        grades = pool.grade(tasks_of(commands))
        assert str(outcome(grades[2])).startswith(OWN_FAULT[command])
        assert [outcome(grade) for grade in grades[:2] + grades[3:]] == [100.0, 2.0, 100.0]


def test_a_batch_is_what_waits_up_to_the_limit() -> None:
    with pool_of("batched", processes=1, max_concurrent=64) as pool:
        pool.grade(tasks_of(["x"]))
        assert [grade.reward for grade in pool.grade(tasks_of(["x"] * 150))] == [6400.0] * 128 + [2200.0] * 22


# ---------------------------------------------------------------------------------------------------- starting


STARTS = {
    "import time\ntime.sleep(0.5)\nprint('slow')\ndef f(a, b): return 4": 4.0,
    "import os\nos.close(1)\nprint = None\ndef f(a, b): return 4": 4.0,
    "raise RuntimeError('no licence')": "cannot be imported: RuntimeError: no licence",
    "import nothing_of_this_name": "cannot be imported: ModuleNotFoundError: No module named 'nothing_of_this_name'",
    "def f(a, b) return 1": "cannot be imported: SyntaxError",
    "import sys\nsys.exit(1)": "cannot be imported: SystemExit: 1",
    "import os\nos._exit(3)": "died (exit code 3) before it was ready",
    "import os, signal\nos.kill(os.getpid(), 11)": "died (signal 11) before it was ready",
    "x = 1": "cannot be imported: AttributeError",
    "def f(a): return 1": "takes (a): a grader is called as",
}


@pytest.mark.parametrize("number", range(len(STARTS)))
def test_a_module_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """It is found there, beside files named like our own imports; what is wrong with it is a UserError by name."""
    source, expected = list(STARTS.items())[number]
    (tmp_path / "my_grader.py").write_text(source)
    (tmp_path / "json.py").write_text("raise ImportError('not the one that is meant')")
    monkeypatch.chdir(tmp_path)
    with pool_of("my_grader:f") as pool:
        if isinstance(expected, float):
            assert pool.grade(tasks_of(["x"]))[0].reward == expected
            return
        for _ in range(2):
            with pytest.raises(UserError) as error:
                pool.grade(tasks_of(["x"]))
            assert expected in str(error.value) and "reward.function = 'my_grader:f'" in str(error.value)


def test_a_grader_that_does_not_start_again_fails_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file is broken while the run goes on: failures, for the guard to count, and no exception out of a step."""
    module = tmp_path / "changing_grader.py"
    module.write_text("import os\ndef f(a, b): return os._exit(1) if a == 'exit' else 1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    with pool_of("changing_grader:f", processes=1) as pool:
        assert pool.grade(tasks_of(["x"]))[0].reward == 1.0
        good = module.read_text()
        module.write_text("broken")
        grades = pool.grade(tasks_of(["x", "exit", "x"]))
        assert grades[1].failure == "died (exit code 1)"
        assert "does not start any more" in grades[2].failure
        module.write_text(good)
        assert pool.grade(tasks_of(["x"]))[0].reward == 1.0


@contextlib.contextmanager
def _no_file_left() -> Iterator[None]:
    """Every file descriptor below the limit is taken, also the gaps between those that were inherited."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, hard))
    taken = []
    try:
        while True:
            taken.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:  # "too many open files", which is what is wanted
        gc.disable()  # nothing that a test before left behind may close its own now
        yield
    finally:
        gc.enable()
        for number in taken:
            os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _grade_without_files_left() -> list[list[float | str]]:
    """On a rank: no file can be opened, so no process started, in the second of three calls."""
    with pool_of(processes=1) as pool:
        outcomes = [[outcome(g) for g in pool.grade(tasks_of(["1", "0"]))]]
        with _no_file_left():
            outcomes.append([outcome(g) for g in pool.grade(tasks_of(["exit7", "1"]))])
        return [*outcomes, [outcome(g) for g in pool.grade(tasks_of(["1", "0"]))]]


def test_a_machine_without_room_for_a_process_fails_gradings_and_not_the_trainer() -> None:
    (outcomes,) = run_ranks(_grade_without_files_left, 1)
    assert outcomes == [[1.0, 0.0], ["died (exit code 7)", "died (its process does not start any more)"], [1.0, 0.0]]


def test_only_the_grader_is_imported() -> None:
    """Neither torch nor numpy: a process starts in hundredths of a second."""
    with pool_of("builtins:eval") as pool:
        pool.functions = (NamedFunction("", "odd_graders:obey"),)
        assert pool.grade(tasks_of(["1"]))[0].reward == 1.0
        for process in pool.processes:
            maps = Path(f"/proc/{process.pid}/maps").read_bytes()
            assert b"libtorch" not in maps and b"numpy" not in maps and b"python" in maps


# ------------------------------------------------------------------------------------------------ in a training run


def _train_with(files: Path, run_dir: Path) -> None:
    rewards = {"right": "verl_gsm8k", "chat": "trl_chat", "tokens": "told", "asked": "verl_async"}
    extra: dict[str, object] = {
        f"reward__functions__{name}__function": f"odd_graders:{rewards[name]}" for name in rewards
    }
    extra |= {"reward__functions__tokens__weight": 0, "reward__min_self_consistency": 0, "sft__steps": 2, "steps": 2}
    with Run(prepare_job(job_config(files, run_dir, **extra), 1)) as run:
        train(run)


@pytest.mark.slow
def test_a_run_with_graders_of_other_trainers(tmp_path: Path) -> None:
    """verl's and TRL's functions, one of them asynchronous, and one that counts tokens: its mean times the completions
    is what the run itself has counted."""
    run_ranks(_train_with, 1, write_job_files(tmp_path / "task"), tmp_path / "run")
    rows = read_metrics(tmp_path / "run")[1:]
    assert len(rows) == 2
    for row in rows:
        assert row["reward/failed_count"] == 0
        assert row["reward/mean"] == pytest.approx(row["reward/right"] + row["reward/chat"] + row["reward/asked"])
        assert row["reward/acc"] == row["reward/asked"], "the other number that verl's function returned"
        counted = row["reward/tokens"] * row["prune/completions_generated"]
        assert counted == pytest.approx(row["tokens/generated"])
