"""An evaluation that is killed goes on: nothing is lost, and the files are those of one that was not killed."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.cases import Choose
from support.job import job_config

import dppo_megatron.rewards
from dppo_megatron.config.data import EvalSetConfig
from dppo_megatron.config.reward import RewardConfig
from dppo_megatron.evaluation.eval_samples import (
    UNFINISHED,
    UnfinishedSamples,
    read_samples,
    read_unfinished,
    scores_of,
)
from dppo_megatron.evaluation.eval_scores import EvalSample
from dppo_megatron.evaluation.evaluator import EvalSet, Evaluator, SetGraders, common_spellings
from dppo_megatron.evaluation.standalone import _graded_by, about
from dppo_megatron.job import prepare_job
from dppo_megatron.rewards.grading import Graders
from dppo_megatron.rewards.math.grader import grade_math
from dppo_megatron.rollout.engine import Sampling
from dppo_megatron.rollout.hf import engine_from_files
from dppo_megatron.texts import logged
from dppo_megatron.types import Grade, GradeTask, Prompt, UserError
from dppo_megatron.workbench.cli import main


class Killed(BaseException):
    """In place of a kill: nothing in the package catches it."""


class Killing(UnfinishedSamples):
    """Writes a random part of what it should in one of its next writes, and no more."""

    def __init__(self, directory: Path, about: Mapping[str, Any], draw: random.Random) -> None:
        self.left, self.draw, self.added = draw.randrange(25), draw, 0
        super().__init__(directory, about)

    def add(self, sample: EvalSample) -> None:
        super().add(sample)
        self.added += 1

    def _append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        if self.left:
            self.left -= 1
            return super()._append(rows)
        text = "".join(json.dumps(row, default=str) + "\n" for row in rows).encode()
        self._file.write(text[: self.draw.randrange(len(text))])
        raise Killed


def test_any_kill_leaves_what_was_generated(files: Path, tmp_path: Path, cases: Choose) -> None:
    """Killed in any write until it ends: the samples of an evaluation without kills, and of each attempt only the one
    that was being written is generated again."""
    sets = {
        "a": EvalSetConfig(path=str(files / "train.jsonl"), samples=5, temperature=1.0, limit=6),
        "b.c d": EvalSetConfig(path=str(files / "heldout.jsonl"), samples=2, temperature=0.7, limit=7),
    }
    config = job_config(files, tmp_path, data__eval_paths="{}", reward__min_self_consistency=0)
    config.data.eval_paths, config.data.eval_sets = {}, sets
    job = prepare_job(config, 1)
    engine, evaluator = engine_from_files(config, job.tokenizer, job.checkpoint), Evaluator(job)
    whole = evaluator.sample_alone(engine)
    kills = 0
    for number in (drawn := cases("killed evaluation", 4)):
        draw, directory, added = random.Random(number), tmp_path / str(number), 0
        while True:
            attempts = Killing(directory, {"seed": 1}, draw)
            try:
                found = evaluator.sample_alone(engine, attempts)
                break
            except Killed:
                kills += 1
            finally:
                added += attempts.added
                attempts.close()
        assert found == whole and added == len(whole)
        attempts.finished()
        assert not list(directory.iterdir())
    assert kills >= 2 * len(drawn)
    evaluator.close()


def test_after_a_real_kill(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """SIGKILL in the middle: partial scores can be had, other settings and a second writer are refused, the same
    command goes on, and leaves the same samples as one that was never killed."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    words = ["eval", str(files / "model"), "--sets", f"s={files / 'heldout.jsonl'}", "eval.samples=32"]
    words += ["eval.temperature=1", "eval.max_completion_tokens=32", "reward.function=final_answer"]
    words += ["data.max_prompt_tokens=16", "data.prompt_template={problem}", "reward.min_self_consistency=0"]
    words += ["reward.timeout_s=7"]
    command = [sys.executable, "-m", "dppo_megatron", *words, "--out", str(killed)]
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"})
    while not (killed / UNFINISHED).is_file() or (killed / UNFINISHED).stat().st_size < 20_000:
        assert running.poll() is None, "it has ended before it could be killed"
        time.sleep(0.01)
    running.send_signal(signal.SIGSTOP)  # else it may have ended by then
    assert main([*words, "--out", str(killed)]) == 2
    assert "another evaluation is writing to" in capsys.readouterr().err
    running.send_signal(signal.SIGKILL)
    running.wait()
    left = read_unfinished(killed)
    assert left is not None and 10 < len(left[1]) < 32 * 24
    assert main(["eval", "--rescore", str(killed), "--out", str(tmp_path / "so far")]) == 0
    so_far = json.loads((tmp_path / "so far" / "results.json").read_text())
    assert so_far["reward"]["timeout_s"] == 7 and so_far["sets"].keys() == {"s"}, "by its own limits"
    assert f"the evaluation has not ended; it has {len(left[1])} samples so far" in capsys.readouterr().out
    for samples in (killed, tmp_path / "so far"):
        assert main(["eval", "--rescore", str(samples), "--out", str(killed)]) == 2
        assert "holds an evaluation that could not be resumed then" in capsys.readouterr().err
    assert main([*words, "--out", str(killed), "eval.top_p=0.5", "seed=1"]) == 2
    said = capsys.readouterr().err
    assert "begun with something else (seed: 0, now 1; sets.s.top_p: 1.0, now 0.5)" in said
    for out in (killed, whole):
        assert main([*words, "--out", str(out)]) == 0
    assert f"{len(left[1])} samples are done" in capsys.readouterr().out
    assert read_samples(killed) == read_samples(whole) and {path.name for path in killed.iterdir()} == {
        "results.json",
        "samples.jsonl",
    }
    results = [json.loads((path / "results.json").read_text()) for path in (killed, whole)]
    assert results[0] == results[1]
    assert results[0]["versions"]["dppo-megatron"].startswith("0.") and results[0]["generated_by"]


def test_damaged_lines_are_made_again(tmp_path: Path) -> None:
    """Of three samples one is damaged, one has lost its verdict, one its text; and half a line is at the end."""
    samples = [_sample(index) for index in range(4)]
    kept = UnfinishedSamples(tmp_path, {"seed": 1})
    for sample in samples:
        kept.add(sample)
    kept.add_verdicts(samples)
    kept.close()
    lines = (tmp_path / UNFINISHED).read_text().splitlines()
    lines[1], lines[6], lines[3] = lines[1][:-5], "null", "{}"
    (tmp_path / UNFINISHED).write_text("\n".join([*lines, '{"set": "s", "prob']))
    again = UnfinishedSamples(tmp_path, {"seed": 1})
    assert set(again.samples) == {("s", 1, 0), ("s", 3, 0)}
    assert [one.is_graded for one in again.samples.values()] == [False, True]
    again.add(samples[0])
    again.close()
    assert len(UnfinishedSamples(tmp_path, {"seed": 1}).samples) == 3
    (tmp_path / UNFINISHED).write_text("\n".join(["{", *lines[1:]]) + "\n")
    with pytest.raises(UserError, match="its first line is damaged"):
        UnfinishedSamples(tmp_path, {"seed": 1})
    assert len((tmp_path / UNFINISHED).read_text().splitlines()) == len(lines)  # nothing was thrown away


def test_a_set_by_another_setting_is_the_same_set(tmp_path: Path) -> None:
    """An older version named a set of `data.eval_paths` otherwise, which decides nothing: it is gone on with. A setting
    of the set that has such a name is none of these."""
    names = {"key": "data.eval_paths.x.y", "max_prompt_tokens_key": "data.max_prompt_tokens"}
    about: dict[str, Any] = {
        "seed": 1,
        "sets": {"x.y": {"path": "p", "template": {"chat_template_kwargs": {"key": 1}}} | names},
    }
    kept = UnfinishedSamples(tmp_path, about)
    kept.add(_sample(0))
    kept.close()
    for changed in ({"key": "data.eval_sets.x.y"}, {"max_prompt_tokens_key": "data.eval_sets.x.y.max_prompt_tokens"}):
        now = about | {"sets": {"x.y": about["sets"]["x.y"] | changed}}
        again = UnfinishedSamples(tmp_path, now)
        assert len(again.samples) == 1
        again.close()
    later: dict[str, Any] = about | {"quantization": "off", "server_args": []}  # which that version did not write
    UnfinishedSamples(tmp_path, later).close()
    with pytest.raises(UserError, match=r"\(quantization: 'off', now 'fp8'; server_args: \[\], now \['--x'\]\)"):
        UnfinishedSamples(tmp_path, later | {"quantization": "fp8", "server_args": ["--x"]})
    with pytest.raises(UserError, match=r"\(dtype: None, now 'bfloat16'\)"):
        UnfinishedSamples(tmp_path, later | {"dtype": "bfloat16"})
    about["sets"]["x.y"]["template"]["chat_template_kwargs"]["key"] = 2
    with pytest.raises(UserError, match=r"sets.x.y.template.chat_template_kwargs.key: 1, now 2\)"):
        UnfinishedSamples(tmp_path, about)


def test_verdicts_of_an_edited_grader_are_not_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The samples are kept; those of its verdicts that were given since are, too. Without samples there is no score."""
    samples = [_sample(index) for index in range(2)]
    for graded_by, are_graded in (("a", [False, False]), ("b", [False, False]), ("b", [True, True]), ("a", [True] * 2)):
        said = list[str]()
        with logged(said.append):
            kept = UnfinishedSamples(tmp_path, {"seed": 1}, graded_by)
        if not kept.samples:
            assert main(["eval", "--rescore", str(tmp_path)]) == 2
            assert "the evaluation has no samples yet" in capsys.readouterr().err
            for sample in samples:
                kept.add(sample)
        else:
            assert [one.is_graded for one in kept.samples.values()] == are_graded
            again = "2 samples are graded again: the graders" in "".join(said)
            assert again != all(are_graded)
        kept.add_verdicts(samples)
        kept.close()


def test_what_failed_is_graded_again(tmp_path: Path) -> None:
    """A judge that was down is asked again for what it did not answer, and for nothing else; until then it has failed,
    as whoever reads the file sees."""
    samples, said = [_sample(index) for index in range(3)], list[str]()
    failed = replace(samples[1], reward=None, correct=None, extracted=None, vote=None, unparsed=None, failure="down")
    kept = UnfinishedSamples(tmp_path, {"seed": 1})
    for sample in samples:
        kept.add(sample)
    kept.add_verdicts([samples[0], failed])
    kept.close()
    left = read_unfinished(tmp_path)
    assert left is not None and [one.failure for one in left[1]] == ["", "down", ""]
    with logged(said.append):
        again = UnfinishedSamples(tmp_path, {"seed": 1})
    assert [one.is_graded for one in again.samples.values()] == [True, False, False]
    assert "1 samples are graded again: the graders, their code or limits have changed, or grading failed" in said[0]
    again.add_verdicts(samples[1:])
    again.close()
    assert list(UnfinishedSamples(tmp_path, {"seed": 1}).samples.values()) == samples


def test_a_built_in_grader_is_another_one_with_other_code(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package's version is not enough: a checkout changes without a new one. Graders that nothing names are left
    out, and a user's own is told by its file alone. One that works faster is the same."""
    code = tmp_path / "rewards"
    shutil.copytree(Path(dppo_megatron.rewards.__file__).parent, code)
    monkeypatch.setattr(dppo_megatron.rewards, "__file__", str(code / "__init__.py"))
    ours = job_config(files, tmp_path / "run")
    theirs = job_config(files, tmp_path / "run", reward__functions="{a: {function: 'support.job:job_config'}}")
    before = [_graded_by(config) for config in (ours, theirs)]
    faster = job_config(files, tmp_path / "run", reward__processes=2, reward__max_concurrent=512)
    faster.reward.max_per_minute, faster.reward.max_failed_share = 60, 0.5
    assert [_graded_by(config) for config in (faster, theirs)] == before
    for name, value in (("timeout_s", 7.0), ("memory_mb", 64), ("correct_from", 0.5), ("function", "math_boxed")):
        other = job_config(files, tmp_path / "run", **{f"reward__{name}": value})
        assert _graded_by(other) not in before
    with (code / "math" / "evaluate.py").open("a") as file:
        file.write("# another\n")
    assert [_graded_by(config) == then for config, then in zip((ours, theirs), before, strict=True)] == [False, True]


def test_what_an_evaluation_is_about(files: Path, tmp_path: Path) -> None:
    """It may be written into the model's directory; the graders' means may change, what they are given may not."""
    model, rows = shutil.copytree(files / "model", tmp_path / "model"), tmp_path / "rows.jsonl"
    rows.write_text('{"problem": "1+1=", "answer": "2", "hint": 1}\n')
    out = tmp_path / "link" / "eval"
    (tmp_path / "link").symlink_to(model)

    def found(**extra: Any) -> dict[str, Any]:
        config = job_config(files, tmp_path / "run", data__eval_paths=f"{{s: {rows}}}", model__hf_path=model, **extra)
        return about(prepare_job(config, 1, trains=False), out)

    first = found()
    assert "None" not in first["engine_version"]
    out.mkdir()
    (out / UNFINISHED).write_text("a line")
    assert found(reward__timeout_s=7, reward__processes=3) == first
    assert found(rollout__sampling__stop_token_ids="[5]") != first
    served = {"rollout__engine": "vllm", "rollout__servers__endpoints": "[http://127.0.0.1:1]"}
    server = found(**served)
    assert (server["dtype"], server["quantization"], server["server_args"]) == ("float32", "off", [])
    memory = "[--gpu-memory-utilization, '0.5', --gpu-memory-utilization=0.6]"
    assert found(**served, rollout__servers__args=memory) == server
    longer = found(**served, rollout__servers__args="[--gpu-memory-utilization, '0.5', --kv-cache-dtype, fp8]")
    assert longer["server_args"] == ["--kv-cache-dtype", "fp8"]
    rounded = {"rollout__quantization": "fp8", "model__dtype": "bfloat16", "objective__correction__level": "token"}
    assert found(**served, **rounded)["quantization"] == "fp8"
    rows.write_text('{"problem": "1+1=", "answer": "2", "hint": 2}\n')
    assert found()["problems"] != first["problems"]


def _sample(problem: int) -> EvalSample:
    return EvalSample("s", str(problem), problem, 0, "?", "1", "2", 1, "stop", 0.0, False, "2", "2", False)


class _SlowGraders(Graders):
    """Whose first answer alone has come."""

    def __init__(self) -> None:
        super().__init__({"reward": RewardConfig()})
        self.calls: list[tuple[Sequence[GradeTask], Future[list[Grade]]]] = []

    def submit(self, tasks: Sequence[GradeTask]) -> Future[list[Grade]]:
        future: Future[list[Grade]] = Future()
        if not self.calls:
            future.set_result([Grade(1.0)] * len(tasks))
        self.calls.append((tasks, future))
        return future


def test_verdicts_come_as_they_are_given() -> None:
    """All 1,000 samples of a slow grader are asked about at once; a kill loses less than 200 verdicts beside
    those that it is at work on, and what is broken off is cancelled."""
    grader = _SlowGraders()
    samples = [replace(_sample(i), correct=None, tokens=i) for i in range(1000)]
    parts = SetGraders(grader).graded_in_parts(samples)
    first = next(parts)
    assert 0 < len(first) < 200 and all(one.correct for one in first)
    tasks = [task for call, _ in grader.calls for task in call]
    assert [task.completion_tokens for task in tasks] == list(range(1000))
    assert {(task.prompt, task.finish_reason) for task in tasks} == {("?", "stop")}
    parts.close()
    assert all(future.cancelled() for _, future in grader.calls[1:])


def test_equal_wrong_answers_are_one_vote() -> None:
    """1/2, 0.5 and \\frac{2}{4} of one problem, under the commonest spelling; another problem's are its own."""
    votes = [(0, "0.5"), (0, "1/2"), (0, "1/2"), (0, r"\frac{2}{4}"), (0, "3"), (1, "0.5"), (1, "(1,2)"), (1, "(1, 2)")]
    found = common_spellings(votes)
    assert {found[0, one] for one in ("0.5", "1/2", r"\frac{2}{4}")} == {"1/2"}
    whole = common_spellings([(0, "7"), (0, "007"), (0, "8")])
    assert whole[0, "7"] == whole[0, "007"] != whole[0, "8"]
    assert found[0, "3"] == "3" and found[1, "0.5"] == "0.5" and found[1, "(1,2)"] == found[1, "(1, 2)"]


def test_a_vote_says_what_its_answer_says() -> None:
    """To the `math` grader: four wrong answers that are equal beat three right ones, and `1 1/2` is not `11/2`. Without
    its spaces and dollars an answer may be another one."""
    wrong = [
        (r"2\pi r", r"\pi r\cdot 2"),
        (r"\sin x\cos x", r"\frac12\sin 2x"),
        ("2 or 3", "3, 2"),
        (r"0\le x", r"x \ge 0"),
        (r"\$5", "$5$ dollars"),
        ("1 1/2", "11/2"),
    ]
    texts = [["7"] * 3 + [first] * 2 + [second] * 2 for first, second in wrong]
    samples = [
        EvalSample("s", str(problem), problem, place, "?", "7", f"\\boxed{{{text}}}", 1, "stop")
        for problem, each in enumerate(texts)
        for place, text in enumerate(each)
    ]
    with closing(SetGraders(Graders({"reward": RewardConfig(function="math")}))) as graders:
        graded = graders.with_equal_votes([one for part in graders.graded_in_parts(samples) for one in part])
    for one in graded:
        assert one.vote and grade_math(f"\\boxed{{{one.vote}}}", one.text[7:-1], {}).reward == 1.0, one
    won = [scores_of([one for one in graded if one.problem_index == i])[0].maj_at[7].value for i in range(len(wrong))]
    assert won == [0.0] * 5 + [1.0]


def test_comparisons_of_votes_end() -> None:
    """64 answers that all differ, of each of 1,000 problems, as text beyond the bound; every one keeps its own vote.
    But two of them that differ by their spaces alone are one vote there too."""
    asked = []
    votes = [(problem, f"a_{{{one}}}") for problem in range(1000) for one in range(64)]
    found = common_spellings(votes, lambda answer, other: bool(asked.append(answer)))
    assert 19_000 < len(asked) <= 20_000
    assert all(found.get(vote, vote[1]) == vote[1] for vote in votes)
    votes += [(999, spelling) for spelling in ("(1, 2)", "(1,2)", "(1,2)", "1 1/2", "11/2", f"0.({'3' * 5000})")]
    found = common_spellings(votes, lambda answer, other: False)
    assert [found[vote] for vote in votes[-6:-1]] == ["(1,2)"] * 3 + ["1 1/2", "11/2"]


def test_ranks_exchange_no_texts_but_votes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of a hundred kilobytes a sample, in every field that may hold one: what is gathered is small, and scored as
    the samples themselves. Who gave no answer does not vote for the empty one."""
    long = {name: f"{name} " * 10_000 for name in ("prompt", "reference", "text", "extracted", "why", "failure")}
    verdicts = [(True, "7"), (False, "0.5"), (False, "1/2"), (False, ""), (False, None), (None, None)]
    samples = [
        replace(
            _sample(0),
            sample=place,
            **long,
            row={"tests": "t" * 100_000},
            correct=correct,
            vote=vote,
        )
        for place, (correct, vote) in enumerate(verdicts)
    ]
    gathered: list[EvalSample] = []

    def gather(mine: Sequence[EvalSample]) -> list[EvalSample]:
        gathered.extend(mine)
        return list(mine)

    monkeypatch.setattr("dppo_megatron.evaluation.evaluator.gather_all", gather)
    evaluator = Evaluator.__new__(Evaluator)
    evaluator.sets = [EvalSet(samples[0].set, [Prompt(0, "", (), "", "")], ["0"], len(samples), Sampling(1, 1.0, 0))]
    with closing(SetGraders(Graders({"reward": RewardConfig(function="math")}))) as graders:
        evaluator._graders = graders
        monkeypatch.setattr(evaluator, "sample", lambda *_: samples)
        [found] = evaluator.evaluate(cast(Any, SimpleNamespace(has_servers=False)))
        assert len(pickle.dumps(gathered)) < 3000
        counted = graders.with_equal_votes(samples)
    assert [one.vote for one in counted] == ["7", "0.5", "0.5", "", None, None] and [found] == scores_of(counted)
