"""An evaluation of six sets that is killed fifty times, by SIGKILL, while its servers live on."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.cases import Choose
from support.engines.stub import Asked, StubServers, answer_to
from support.launch import RankError, run_ranks

from dppo_megatron.evaluation import standalone
from dppo_megatron.evaluation.eval_samples import RESULTS, SAMPLES, UNFINISHED, UnfinishedSamples
from dppo_megatron.rollout.engine import Request
from dppo_megatron.types import Prompt
from dppo_megatron.workbench.cli import main

SERVERS = ("a", "b")
SAMPLES_EACH = 4
"""Also `max_concurrent_sequences`: so a server has one problem at a time."""


@dataclass(frozen=True)
class Moment:
    """When a life ends: at a request that a server gets, or by its own hand, in the middle of a write."""

    request: int = 0
    """Of the life's, from 1; 0: none kills it."""
    is_answered: bool = False
    arm: Callable[[], None] = lambda: None


@dataclass
class Book:
    """What two servers were asked for and have made, over all lives of an evaluation, and when the present life ends.

    A server answers once its last answer is on the disk: like one that takes seconds, while a sample is decoded and
    written in milliseconds. So a sample that is written when the next one comes is written never.
    """

    out: Path
    pid_file: Path
    moment: Moment = field(default_factory=Moment)
    asked: list[list[tuple[str, str]]] = field(default_factory=list)
    """By life: (server, problem) of each request."""
    made: list[list[tuple[str, str]]] = field(default_factory=list)
    """By life: those that were answered."""

    def begin(self, moment: Moment) -> None:
        self.moment = moment
        self.asked.append([])
        self.made.append([])

    def server(self, name: str) -> Callable[[Asked], Any]:
        async def behave(asked: Asked) -> None:
            moment, life, made = self.moment, self.asked[-1], self.made[-1]
            this = name, asked.body["request_id"].rpartition(".")[0].rpartition("-")[0]
            life.append(this)
            is_last = len(life) == moment.request
            mine = [problem for server, problem in made if server == name]
            while mine and self._samples()[mine[-1]] < SAMPLES_EACH:
                await asyncio.sleep(0.005)
                if life is not self.asked[-1]:
                    return
            if is_last and not moment.is_answered:
                return self._kill()
            made.append(this)
            await asked.reply(json.dumps(answer_to(asked.body, asked.version)))
            if is_last:
                self._kill()

        return behave

    def _kill(self) -> None:
        os.kill(int(self.pid_file.read_text()), signal.SIGKILL)

    def _samples(self) -> Counter[str]:
        """Samples of each problem that are on the disk."""
        lines = (self.out / UNFINISHED).read_bytes().split(b"\n")[1:-1]
        rows = [json.loads(line) for line in lines]
        places = ((row["set"], row["problem_index"]) for row in rows if "by" not in row)
        return Counter(Request(Prompt(i, "", (), "", ""), 0, 0, f"eval/{name}").id[:-2] for name, i in places)


def _in_append(number: int, share: float, *, of_verdicts: bool) -> Callable[[], None]:
    """Die in the `number`-th write of samples, or of verdicts, with this share of it on the disk."""

    def arm() -> None:
        count, plain = 0, UnfinishedSamples._append

        def append(self: UnfinishedSamples, rows: Iterable[Mapping[str, Any]]) -> None:
            nonlocal count
            listed = list(rows)
            count += ("by" in listed[0]) == of_verdicts
            if count == number:
                text = "".join(json.dumps(row, default=str) + "\n" for row in listed).encode()
                self._file.write(text[: int(share * len(text))])
                os.kill(os.getpid(), signal.SIGKILL)
            plain(self, listed)

        UnfinishedSamples._append = append  # type: ignore[method-assign]

    return arm


def _before(name: str) -> Callable[[], None]:
    """Die at the call of `name`, by which the results are written."""

    def arm() -> None:
        setattr(standalone, name, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))

    return arm


def _moments(kills: int, draw: random.Random) -> Iterator[Moment]:
    """Mostly while samples are generated; then while they are graded, and while the results are written."""
    last = [Moment(arm=_before("write_results")), Moment(arm=_before("write_text"))]
    grading = max(1, kills // 10)
    for _ in range(kills - grading - len(last)):
        if draw.random() < 0.7:
            yield Moment(draw.randint(1, 5), draw.random() < 0.5)
        else:
            yield Moment(arm=_in_append(draw.randint(1, 12), draw.random(), of_verdicts=False))
    for _ in range(grading):
        yield Moment(arm=_in_append(1, draw.random(), of_verdicts=True))
    yield from last


def _again(lives: list[list[tuple[str, str]]], problems: Collection[str]) -> int:
    """Most problems of a server and a life that a later life had again; none twice in one, and all in the end."""
    later, most = set[str](), 0
    for life in reversed(lives):
        again = Counter(server for server, problem in life if problem in later)
        most = max([most, *again.values()])
        assert len({problem for _, problem in life}) == len(life)
        later |= {problem for _, problem in life}
    assert later == set(problems)
    return most


def _evaluate(words: list[str], book: Book) -> int:
    book.pid_file.write_text(str(os.getpid()))
    book.moment.arm()
    return main([*words, "--out", str(book.out)])


def _words(files: Path, tmp_path: Path, stubs: StubServers) -> list[str]:
    """The command line without --out: six sets of 24 problems."""
    names = ("math500", "amc23", "aime24", "aime25", "minerva", "olympiad.bench")
    of_set = {"path": str(files / "heldout.jsonl"), "samples": SAMPLES_EACH}
    data = {
        "prompt_template": "{problem}",
        "max_prompt_tokens": 64,
        "eval_sets": {name: of_set | {"temperature": 1.0 - place / 10} for place, name in enumerate(names)},
    }
    (tmp_path / "six.yaml").write_text(yaml.safe_dump({"data": data, "eval": {"max_completion_tokens": 12}}))
    servers = ",".join(map(stubs.url, SERVERS))
    settings = {
        "rollout.engine": "vllm",
        "rollout.servers.endpoints": f"[{servers}]",
        "rollout.sync.channel": "disk",
        "rollout.sync.verify_every": 0,
        "rollout.limits.max_concurrent_sequences": SAMPLES_EACH,
        "reward.function": "support.faulty:length_parity",
        "reward.min_self_consistency": 0,
    }
    sets = ["--sets", str(tmp_path / "six.yaml")]
    return ["eval", str(files / "model"), *sets, *(f"{key}={value}" for key, value in settings.items())]


def _outlives(kills: int, numbers: Iterable[int], files: Path, tmp_path: Path) -> None:
    whole = Book(tmp_path / "whole", tmp_path / "pid")
    with StubServers() as stubs:
        words = _words(files, tmp_path, stubs)
        stubs.behaviours.update({name: whole.server(name) for name in SERVERS})
        whole.begin(Moment())
        assert run_ranks(_evaluate, 1, words, whole) == [0]
        problems = [problem for _, problem in whole.asked[0]]
        assert len(problems) == len(set(problems)) == 6 * 24
        for number in numbers:
            killed = Book(tmp_path / f"killed{number}", tmp_path / "pid")
            stubs.behaviours.update({name: killed.server(name) for name in SERVERS})
            for moment in _moments(kills, random.Random(number)):
                killed.begin(moment)
                with pytest.raises(RankError, match="SIGKILL"):
                    run_ranks(_evaluate, 1, words, killed, dies=0)
            killed.begin(Moment())
            assert run_ranks(_evaluate, 1, words, killed) == [0]
            assert (killed.out / SAMPLES).read_bytes() == (whole.out / SAMPLES).read_bytes()
            results = [json.loads((one.out / RESULTS).read_text()) for one in (killed, whole)]
            assert results[0] == results[1] and not (killed.out / UNFINISHED).exists()
            assert _again(killed.made, problems) <= 1 and _again(killed.asked, problems) <= 2


def test_an_evaluation_outlives_kills(files: Path, tmp_path: Path, cases: Choose) -> None:
    """It leaves the files of one that was never killed. For each kill a server makes at most one problem again, whose
    answer was not yet on the disk, and one that it was asked for and had not answered."""
    _outlives(6, cases("kills", 1), files, tmp_path)


@pytest.mark.long
def test_an_evaluation_outlives_fifty_kills(files: Path, tmp_path: Path) -> None:
    _outlives(50, [0], files, tmp_path)
