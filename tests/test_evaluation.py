"""Evaluation with real models and graders: in training and alone, on any number of ranks, resumed, scored again."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from support.eval_files import write_samples
from support.job import REPOSITORY, job_config, read_metrics
from support.launch import run_ranks

from dppo_megatron.checkpoint import checkpoint_dir
from dppo_megatron.config.data import EvalSetConfig
from dppo_megatron.config.load import read_config
from dppo_megatron.config.reward import RewardFunctionConfig, SetRewardConfig
from dppo_megatron.config.schema import Config
from dppo_megatron.distributed import rank
from dppo_megatron.evaluation.arguments import EvalArguments, prepare
from dppo_megatron.evaluation.eval_samples import read_samples, scores_of
from dppo_megatron.evaluation.evaluator import Evaluator
from dppo_megatron.job import prepare_job
from dppo_megatron.progress import Advance, shown_by
from dppo_megatron.rewards.functions import final_answer
from dppo_megatron.rollout.engine import Request, Sampling
from dppo_megatron.rollout.hf import engine_from_files
from dppo_megatron.rollout.servers.rollout_work import grouped
from dppo_megatron.run import Run
from dppo_megatron.train import train
from dppo_megatron.types import Completion, Prompt, UserError
from dppo_megatron.workbench.cli import main

EASY, HARD, ODD = "math/easy", "math/hard", "a.b c @24: ü"
ALONE = ("reward.function=support.faulty:length_parity", "reward.min_self_consistency=0")


def _sets(files: Path) -> dict[str, EvalSetConfig]:
    heldout, easy = str(files / "heldout.jsonl"), str(files / "train.jsonl")
    return {
        EASY: EvalSetConfig(path=easy, samples=5, temperature=1.0, max_completion_tokens=8, limit=6),
        HARD: EvalSetConfig(path=heldout, limit=7),
        ODD: EvalSetConfig(path=heldout, samples=4, temperature=0.7, top_p=0.9, top_k=9, limit=5),
    }


def _config(files: Path, run_dir: Path, sets: dict[str, EvalSetConfig] | None = None, **extra: Any) -> Config:
    """Names with dots cannot be said on the command line, so the sets are put in."""
    short = {"sft__steps": 2, "steps": 2, "rollout__prompts_per_step": 8, "eval__every_steps": 1}
    grading = {"reward__function": "support.faulty:length_parity", "reward__min_self_consistency": 0}
    config = job_config(files, run_dir, data__eval_paths="{}", **(short | grading | extra))
    config.data.eval_paths = {}
    config.data.eval_sets = _sets(files) if sets is None else sets
    return config


def _train(config: Config) -> None:
    with Run(prepare_job(config, 1)) as run:
        train(run)


@pytest.fixture(scope="module")
def trained(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, evaluated and saved after each."""
    run_dir = tmp_path_factory.mktemp("runs") / "one"
    run_ranks(_train, 1, _config(files, run_dir, checkpoint__every_steps=1))
    return run_dir


def test_a_run_scores_every_set_under_its_own_name(trained: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """math/easy and math/hard stay apart, whatever a name holds; each k has its figure and its error."""
    rows = read_metrics(trained)
    for row in rows:
        for name, samples in ((EASY, 5), (HARD, 1), (ODD, 4)):
            ks = {1, samples} | {k for k in (2, 4) if k <= samples}
            keys = {f"pass@{k}" for k in ks} | {f"avg@{samples}"}
            for key in keys:
                assert 0 <= row[f"eval/{name}/{key}"] <= 1 and row[f"eval/{name}/{key}_se"] >= 0
            assert row[f"eval/{name}/pass@1"] == row[f"eval/{name}/avg@{samples}"]
            assert row[f"eval/{name}/failed"] == 0
        assert row[f"eval/{EASY}/completion_tokens_mean"] <= 8 and row[f"eval/{EASY}/pass@5"] > 0
    summary = json.loads((trained / "summary.json").read_text())
    for which, row in (("eval_before", rows[0]), ("eval_after", rows[-1])):
        assert summary[which] == {name: row[f"eval/{name}/pass@1"] for name in (EASY, HARD, ODD)}


def test_alone_it_is_what_it_was_in_training(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run's checkpoints and its last model, read by one process, score exactly what metrics.jsonl says: the same
    draws, the same sampling, the settings of the run without being told."""
    rows = read_metrics(trained)
    for arguments, row in ((["--step", "1"], rows[1]), ([], rows[2])):
        out = tmp_path / str(row["step"])
        assert main(["eval", str(trained), *arguments, "--out", str(out)]) == 0
        metrics = json.loads((out / "results.json").read_text())["metrics"]
        assert len(metrics) > 30 and metrics.items() <= row.items()
        assert EASY in capsys.readouterr().out
    checkpoint = trained / "checkpoints" / "step_000001"
    assert main(["eval", str(checkpoint)]) == 0
    default = trained / "eval" / "step_000001"
    assert (default / "samples.jsonl").read_bytes() == (tmp_path / "1" / "samples.jsonl").read_bytes()
    assert main(["eval", str(trained), "--step", "1"]) == 2
    assert "already holds an evaluation" in capsys.readouterr().err


def _scores(config: Config) -> list[Any]:
    job = prepare_job(config, 1)
    engine = engine_from_files(config, job.tokenizer, job.checkpoint)
    return [one.as_json() for one in Evaluator(job).evaluate(engine)]


def test_ranks_change_nothing(files: Path, tmp_path: Path) -> None:
    """One rank and three, which share neither the sets nor a problem's samples evenly."""
    config = _config(files, tmp_path)
    [alone] = run_ranks(_scores, 1, config)
    assert run_ranks(_scores, 3, config) == [alone] * 3
    assert [one["name"] for one in alone] == [EASY, HARD, ODD]
    config.seed = 1
    assert run_ranks(_scores, 1, config) != [alone]


def _shown(config: Config) -> list[tuple[str, int, int, int]]:
    """What a rank's evaluation has shown, with an engine whose first rank holds all answers but one of 3 tokens."""
    shown: list[tuple[str, int, int, int]] = []

    @contextmanager
    def display(what: str, total: int, unit: str) -> Iterator[Advance]:
        yield lambda done, tokens=0: shown.append((what, total, done, tokens))

    def stream(requests: Sequence[Request], sampling: Sampling) -> Iterator[tuple[int, Completion]]:
        for place in range(1) if rank() else range(1, len(requests)):
            yield place, Completion(np.zeros(5 if place else 3, np.int64), np.zeros(5 if place else 3), "stop", "1")

    with shown_by(display):
        Evaluator(prepare_job(config, 1)).sample(cast(Any, SimpleNamespace(has_servers=True, stream=stream)))
    return shown


def test_progress_is_the_jobs(files: Path, tmp_path: Path) -> None:
    """Of two ranks both show in the end what both have made, and never more than there is; what one shows of its own
    grading is called so."""
    sets = {"one": EvalSetConfig(path=str(files / "heldout.jsonl"), limit=4)}
    for shown in run_ranks(_shown, 2, _config(files, tmp_path, sets)):
        sampling = [one[1:] for one in shown if one[0] == "evaluation"]
        assert sampling[-1] == (4, 4, 18) and all(done <= total for total, done, _ in sampling)
        assert sampling[0] in ((4, 2, 10), (4, 2, 6)), "as if the other rank were as far"
        assert {what for what, *_ in shown if "grading" in what and "start" not in what} == {
            "evaluation: grading a rank's share"
        }


def test_sets_and_training_draw_for_themselves(files: Path, tmp_path: Path) -> None:
    """The same problems under two names and in training: the same prompts, other answers. Sampled again: the same."""
    sets = {name: EvalSetConfig(path=str(files / "train.jsonl"), temperature=1.0, limit=12) for name in ("x", "x ")}
    config = _config(files, tmp_path, sets)
    job = prepare_job(config, 1)
    engine = engine_from_files(config, job.tokenizer, job.checkpoint)
    evaluator = Evaluator(job)
    samples = evaluator.sample(engine)
    texts = {name: [one.text for one in samples if one.set == name] for name in sets}
    requests = [Request(prompt, 0, 0) for prompt in job.train_prompts[:12]]
    texts["train"] = [one.text for one in engine.generate(requests, Sampling(16, 1.0, config.seed))]
    prompts = [[one.prompt for one in samples if one.set == name] for name in sets]
    assert prompts[0] == prompts[1] == [request.prompt.text for request in requests]
    assert all(len(set(of_problem)) > 1 for of_problem in zip(*texts.values(), strict=True))
    assert [one.text for one in evaluator.sample(engine)] == [one.text for one in samples]
    evaluator.close()


@settings(deadline=None)
@given(st.lists(st.tuples(st.text(), st.integers(0, 30), st.integers(0, 30), st.integers(0, 30)), unique=True))
def test_request_ids_are_unique_and_plain(keys: list[tuple[str, int, int, int]]) -> None:
    """Whatever the sets are called: servers take the id as a name of a request."""
    requests = [
        Request(Prompt(index, "", (), "", ""), completion, step, stream=stream and f"eval/{stream}")
        for stream, step, index, completion in keys
    ]
    ids = [request.id for request in requests]
    assert len(set(ids)) == len(ids)
    assert all(one.isascii() and len(one) < 80 and not set(one) & set(" /?&\"'\n") for one in ids)
    assert len({request.purpose for request in requests}) == len({stream for stream, *_ in keys})


@pytest.mark.parametrize("kind", ["raises", "None beside another function"])
def test_a_failing_grader_is_no_zero(files: Path, tmp_path: Path, kind: str) -> None:
    """Gradings that fail leave the means of the others alone; a set where all fail is null, and says so. The same for
    those that the first of two functions does not judge, whatever the second says."""
    train_path = str(files / "train.jsonl")
    own = SetRewardConfig(function="support.faulty:odd_ones_raise")
    if kind != "raises":
        paths = {"right": "support.faulty:odd_ones_none", "tries": "support.faulty:length_parity"}
        own = SetRewardConfig(functions={name: RewardFunctionConfig(path) for name, path in paths.items()})
    one = EvalSetConfig(path=train_path, samples=4, temperature=1.0, limit=8, reward=own)
    config = _config(files, tmp_path, {"set": one})
    job = prepare_job(config, 1)
    engine = engine_from_files(config, job.tokenizer, job.checkpoint)
    evaluator = Evaluator(job)
    samples = evaluator.sample(engine)
    evaluator.close()
    failed = [len(sample.text) % 2 == 1 for sample in samples]
    assert 0 < sum(failed) < 32
    assert [sample.correct for sample in samples] == [None if odd else True for odd in failed]
    assert all(bool(sample.failure) == odd for sample, odd in zip(samples, failed, strict=True))
    [scores] = scores_of(samples)
    assert scores.avg.value == 1.0 and scores.failed == sum(failed)
    [scores] = scores_of([sample for sample in samples if sample.failure])
    assert scores.metrics()["eval/set/pass@1"] is None and "gradings failed" in scores.line()


def test_correct_from(files: Path, tmp_path: Path) -> None:
    """A completion counts from reward.correct_from on: 1.0 counts under .5 and not above 1."""
    shares = []
    for bound in (0.5, 1.1):
        config = _config(files, tmp_path, {"set": EvalSetConfig(path=str(files / "train.jsonl"))})
        config.reward.correct_from = bound
        job = prepare_job(config, 1)
        evaluator = Evaluator(job)
        [scores] = evaluator.evaluate(engine_from_files(config, job.tokenizer, job.checkpoint))
        shares.append(scores.avg.value)
    assert shares[0] is not None and shares[0] > 0 and shares[1] == 0


def test_resumed_with_other_sets(files: Path, trained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A set that is added or changed begins at the resumed step, one that is removed is forgotten, also when it comes
    back, the rest goes on; a run that has nothing left to do takes a new set too."""
    import shutil

    run_dir = tmp_path / "run"
    shutil.copytree(trained, run_dir)
    rows = read_metrics(trained)
    sets = _sets(files)
    del sets[HARD]
    sets[EASY] = replace(sets[EASY], samples=3)  # the same score, only less sure
    sets[ODD] = replace(sets[ODD], limit=3)
    new = EvalSetConfig(path=str(files / "heldout.jsonl"), samples=2, temperature=1.0)
    for steps, name in ((3, "new/one"), (3, "newer")):
        sets[name] = new
        run_ranks(_train, 1, _config(files, run_dir, dict(sets), checkpoint__every_steps=1, steps=steps))
        sets[HARD] = replace(_sets(files)[HARD], limit=3)
    said = capfd.readouterr().out
    assert "step    2, first evaluation of a new or changed set: new/one pass@1" in said
    for name in (EASY, ODD, "new/one"):
        [line, _] = [line for line in said.splitlines() if line.startswith(f"{name} pass@1 ") and " points" in line]
        assert ("since step 2" in line) == (name != EASY)
    summary = json.loads((run_dir / "summary.json").read_text())
    after = read_metrics(run_dir)[-1]
    assert set(summary["eval_after"]) == {EASY, HARD, ODD, "new/one", "newer"}
    assert summary["eval_after"]["new/one"] == after["eval/new/one/pass@1"]
    assert summary["eval_before"]["newer"] == summary["eval_after"]["newer"]
    assert summary["eval_before"][EASY] == rows[0][f"eval/{EASY}/pass@1"]
    assert summary["eval_before_step"] == {HARD: 3, ODD: 2, "new/one": 2, "newer": 3}
    assert read_metrics(run_dir)[:3] == rows


def test_a_model_alone(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A Hugging Face directory, no config: sets by path, by file and by preset; settings among the sets or before."""
    data = tmp_path / "data"
    for name in ("math500", "amc23", "aime24", "aime25", "minerva", "olympiadbench"):
        lines = (files / "heldout.jsonl").read_text().splitlines()[:3]
        (data / name).mkdir(parents=True)
        (data / name / "test.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "mine.yaml").write_text(
        "eval: {samples: 2, temperature: 1.0}\n"
        "data:\n  max_prompt_tokens: 16\n  eval_sets:\n"
        "    my/set: {path: math500/test.jsonl, samples: 3}\n    'second @1.5': {path: amc23/test.jsonl}\n"
    )
    model, template = str(files / "model"), 'data.prompt_template="{problem}"'
    small = ["eval.max_completion_tokens=8", "data.max_prompt_tokens=16", template, *ALONE]
    sets = ["six", str(tmp_path / "mine.yaml"), f"plain={files / 'heldout.jsonl'}"]
    out = tmp_path / "out"
    arguments = ["eval", model, "--data", str(data), "--limit", "2", "--out", str(out), "--sets", *sets, *small]
    assert main(arguments) == 0
    results = json.loads((out / "results.json").read_text())
    asked = {
        name: (of["samples"], of["temperature"], of["max_completion_tokens"]) for name, of in results["sets"].items()
    }
    assert asked == {
        "math500": (4, 0.6, 8),
        "amc23": (16, 0.6, 8),
        "aime24": (32, 0.6, 8),
        "aime25": (32, 0.6, 8),
        "minerva": (4, 0.6, 8),
        "olympiadbench": (4, 0.6, 8),
        "my/set": (3, 1.0, 8),
        "second @1.5": (2, 1.0, 8),
        "plain": (1, 0.0, 8),
    }
    assert all(scores["problems"] == 2 for scores in results["scores"].values())
    said = capsys.readouterr()
    assert "evaluation set 'my/set': 2 problems" in said.out and "first prompt: " in said.out
    answers = (out / "samples.jsonl").read_text().splitlines()
    assert len(answers) == 2 * (4 + 16 + 32 + 32 + 4 + 4 + 3 + 2 + 1)
    assert {path.name for path in out.iterdir()} == {"results.json", "samples.jsonl"}
    samples = read_samples(out)
    assert {one.as_json()["name"]: one.as_json() for one in scores_of(samples)}.keys() == results["scores"].keys()
    assert json.loads(json.dumps([one.as_json() for one in scores_of(samples)])) == list(results["scores"].values())


def test_a_set_of_the_run_by_its_name(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From elsewhere too, sampled as the run does; beside a set that is given by its path."""
    monkeypatch.chdir(tmp_path)
    own = read_config(str(trained / "config.yaml"), []).data.eval_sets[EASY]
    assert main(["eval", str(trained), "--sets", EASY, f"mine={own.path}", "--limit", "2", "--out", "out"]) == 0
    sets = json.loads((tmp_path / "out" / "results.json").read_text())["sets"]
    assert sets.keys() == {EASY, "mine"} and sets[EASY]["samples"] == 5 != sets["mine"]["samples"]


def test_a_run_that_goes_on_is_its_newest_checkpoint(trained: Path, tmp_path: Path) -> None:
    """One that had ended and was extended keeps hf/ of that end; its next step takes summary.json away."""
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    for newest in ("hf", "checkpoints/step_000002", "hf"):
        config, out, _ = prepare(EvalArguments(str(run)))
        assert (config.model.hf_path, out) == (str(run / newest), run / "eval" / Path(newest).name)
        (run / "summary.json").unlink(missing_ok=True)
        if newest != "hf":
            shutil.rmtree(run / "checkpoints")


def test_a_checkpoint_that_is_not_needed_is_not_read(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that cannot be read for now refuses only the evaluations of itself."""
    run, read = Path(shutil.copytree(trained, tmp_path / "run", symlinks=True)), checkpoint_dir._read_manifest

    def denied(path: Path) -> Any:
        if path.parent.name == unread:
            raise PermissionError(errno.EACCES, "Permission denied")
        return read(path)

    monkeypatch.setattr(checkpoint_dir, "_read_manifest", denied)
    monkeypatch.setattr(checkpoint_dir, "_TRY_AFTER_S", (0.0,))
    unread = "step_000002"
    assert prepare(EvalArguments(str(run), step=1))[1].name == "step_000001"
    assert prepare(EvalArguments(str(run)))[1].name == "hf"
    with pytest.raises(UserError, match="no such checkpoint; there are: 1, 2"):
        prepare(EvalArguments(str(run), step=3))
    (run / "summary.json").unlink()
    for step in (2, None):
        with pytest.raises(UserError, match="cannot be read now"):
            prepare(EvalArguments(str(run), step=step))
    unread = "step_000001"
    assert prepare(EvalArguments(str(run)))[1].name == "step_000002"


@pytest.mark.parametrize("held", ["[1]", "{a: 3}", "{a: {path: []}}", "x"])
def test_damaged_sets_of_a_run_are_named(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], held: str
) -> None:
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    values = yaml.safe_load((run / "config.yaml").read_text())
    values["data"]["eval_sets"] = yaml.safe_load(held)
    (run / "config.yaml").write_text(yaml.safe_dump(values))
    for sets in (["--sets", "a"], []):
        assert main(["eval", str(run), *sets]) == 2
        assert "data.eval_sets" in capsys.readouterr().err


def test_graded_again(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the same grader the file comes back the same; by another it is that grader's; nothing is generated."""
    first, again, other = tmp_path / "first", tmp_path / "again", tmp_path / "other"
    assert main(["eval", str(trained), "--out", str(first)]) == 0
    assert main(["eval", "--rescore", str(first), "--out", str(again)]) == 0
    assert "\n0 of 57 samples are judged differently" in capsys.readouterr().out
    assert (again / "samples.jsonl").read_bytes() == (first / "samples.jsonl").read_bytes()
    scores = [json.loads((path / "results.json").read_text())["scores"] for path in (first, again)]
    assert scores[0] == scores[1]
    samples = str(first / "samples.jsonl")
    results = json.loads((first / "results.json").read_text()) | {"engine": "vllm", "seed": 7}
    (first / "results.json").write_text(json.dumps(results))
    assert main(["eval", "--rescore", samples, "reward.function=final_answer", "--out", str(other)]) == 0
    judged_again = json.loads((other / "results.json").read_text())
    assert (results["dtype"], results["quantization"], results["server_args"]) == ("float32", "off", [])
    for key in ("engine", "seed", "model", "generated_by", "dtype", "quantization", "server_args"):
        assert judged_again[key] == results[key], "what made the samples has not changed"
    judged = read_samples(other)
    assert len(judged) == 57
    assert all(sample.correct == bool(final_answer(sample.text, sample.reference)) for sample in judged)
    several = ["reward.functions.never.function=support.faulty:length_parity", "reward.min_self_consistency=0"]
    assert main(["eval", "--rescore", samples, *several, "--out", str(tmp_path / "several")]) == 0
    capsys.readouterr()
    assert main(["eval", "--rescore", samples, *several, "reward.function=final_answer"]) == 0
    assert "reward.function = 'final_answer' is not used" in capsys.readouterr().out
    one = ["eval", "--rescore", str(tmp_path / "several"), "reward.function=final_answer"]
    assert main([*one, "--out", str(tmp_path / "one")]) == 0, "instead of several"
    assert [sample.correct for sample in read_samples(tmp_path / "one")] == [sample.correct for sample in judged]


def test_in_the_files_of_other_harnesses(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every set's score and error, and every sample's text, are there under the names that these use."""
    import pandas as pd

    own = tmp_path / "own"
    assert main(["eval", str(trained), "--out", str(own)]) == 0
    scores = json.loads((own / "results.json").read_text())["scores"]
    texts = [sample.text for sample in read_samples(own)]
    for form in ("lm-eval", "lighteval"):
        out = tmp_path / form
        assert main(["eval", "--export", form, str(own), "--out", str(out)]) == 0
        [results] = [json.loads(path.read_text())["results"] for path in out.rglob("results_*.json")]
        key, samples = {
            "lm-eval": ("exact_match,none", [pd.read_json(p, lines=True) for p in out.rglob("samples_*.jsonl")]),
            "lighteval": ("exact_match", [pd.read_parquet(path) for path in out.rglob("details_*.parquet")]),
        }[form]
        error = key.replace("match", "match_stderr")
        found = sorted((of[key], of[error]) for of in results.values())
        assert found == sorted((of["avg"]["value"], of["avg"]["se"]) for of in scores.values())
        assert sum(map(len, samples)) == 6 + 7 + 5
        if form == "lm-eval":
            exported = [text for of in samples for [one] in of["resps"] for text in one]
        else:
            exported = [text for of in samples for one in of["model_response"] for text in one["text"]]
        assert sorted(exported) == sorted(texts)
    samples = (own / "samples.jsonl").read_text().splitlines()
    samples[0] = json.dumps(json.loads(samples[0]) | {"text": "half of a pair: \ud800"})  # models write this too
    (own / "samples.jsonl").write_text("\n".join(samples) + "\n")
    for form in ("lm-eval", "lighteval"):
        assert main(["eval", "--export", form, str(own), "--out", str(tmp_path / f"{form} again")]) == 0
    results = json.loads((own / "results.json").read_text())
    for model in (".", ".."):  # as `eval .` in the model's directory; a name of theirs must not lead out of --out
        (own / "results.json").write_text(json.dumps(results | {"model": model}))
        assert main(["eval", "--export", "lighteval", str(own), "--out", str(tmp_path / f"of {model}")]) == 0
        assert [path.name for path in (tmp_path / f"of {model}" / "details").iterdir()] == ["own"]
    (own / "results.json").rename(own / "samples.unfinished.jsonl")
    assert main(["eval", "--export", "lm-eval", str(own), "--out", str(tmp_path)]) == 2
    assert "has not ended" in capsys.readouterr().err
    assert main(["eval", "--compare", str(own), str(own)]) == 2
    assert "has not ended" in capsys.readouterr().err
    assert main(["eval", "--export", "helm", str(own), "--out", str(tmp_path)]) == 2
    assert "expected one of lm-eval, lighteval" in capsys.readouterr().err


def test_what_cannot_be_written_is_said_first(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is generated: a file in the way, an evaluation that is there; and ranks that nobody needs."""
    (tmp_path / "file").touch()
    model, sets = str(files / "model"), ["--sets", f"a={files / 'heldout.jsonl'}"]
    assert main(["eval", model, *sets, "--out", str(tmp_path / "file" / "below")]) == 2
    assert f"--out = '{tmp_path / 'file' / 'below'}': cannot be written: Not a directory" in capsys.readouterr().err
    samples = write_samples(tmp_path / "old", {"s": {"p": [True], "q": [False]}})
    (samples / "results.json").write_text("{}")
    for arguments in ([model, *sets], ["--rescore", str(samples)]):
        assert main(["eval", *arguments, "--out", str(samples)]) == 2
        assert "already holds an evaluation" in capsys.readouterr().err
    assert main(["eval", "--rescore", str(samples)]) == 2
    assert "results.json' holds no results of an evaluation" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["eval", model, *sets]) == 2
    assert "without torchrun" in capsys.readouterr().err


def test_the_form_with_a_config_still_works(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The quickstart's config without training data, settings behind it; kept under the config's name."""
    monkeypatch.chdir(tmp_path)
    settings = [
        f"model.hf_path={files / 'model'}",
        f"data.eval_paths.heldout={files / 'heldout.jsonl'}",
        "data.train_path=nowhere.jsonl",
    ]
    assert main(["eval", str(REPOSITORY / "configs" / "quickstart.yaml"), *settings]) == 0
    said = capsys.readouterr().out
    assert "heldout" in said and "pass@1" in said
    assert len(list((tmp_path / "eval" / "quickstart").iterdir())) == 2, "results.json and samples.jsonl"


BAD = {
    "nothing": ([], "give a model, a run directory or a config file"),
    "two_models": (["{model}", "{heldout}"], "a config file to evaluate, not 2: "),
    "setting_first": (["seed=1", "nowhere"], "'nowhere': no such directory"),
    "rescore_a_model": (["{model}", "--rescore", "x"], "--rescore reads the samples of an evaluation and nothing else"),
    "no_directory": (["nowhere", "--sets", "six"], "'nowhere': no such directory"),
    "no_model": (["{tmp}", "--sets", "six"], "holds neither config.json"),
    "no_sets": (["{model}"], "there is no set to evaluate on: give --sets"),
    "unknown_set": (["{model}", "--sets", "aime99"], "not a preset or a set of one (known: six, math500, amc23"),
    "preset_without_data": (["{model}", "--sets", "six"], "--data DIR says in which directory"),
    "twice": (["{model}", "--sets", "a={heldout}", "a={heldout}"], "the set 'a' is given twice"),
    "no_name": (["{model}", "--sets", "={heldout}"], "expected name=path"),
    "no_file": (["{model}", "--sets", "a=nowhere.jsonl"], "'nowhere.jsonl': no such file"),
    "step_of_a_model": (["{model}", "--step", "3", "--sets", "a={heldout}"], "is not a run directory"),
    "no_samples": (["{model}", "--sets", "a={heldout}", "eval.samples=0"], "eval.samples = 0: must be"),
    "top_p": (["{model}", "--sets", "a={heldout}", "eval.top_p=0"], "eval.top_p = 0.0: must be"),
    "temperature": (["{model}", "--sets", "a={heldout}", "eval.temperature=nan"], "eval.temperature = nan"),
    "grader": (
        ["{model}", "--sets", "{yaml}", "data.max_prompt_tokens=110", "eval.max_completion_tokens=8"],
        "data.eval_sets.a b.reward.function = 'nope:nope' cannot be imported",
    ),
    "section": (
        ["{model}", "--sets", "{graded}"],
        "only `data` and `eval` of such a file are read, and it has 'reward'",
    ),
    "yaml_1.1": (["{model}", "--sets", "{octal}"], "octal.yaml:1: 012 is text in YAML 1.2; write it in quotes, or in"),
    "too_long": (["{model}", "--sets", "a={heldout}", "eval.max_completion_tokens=500"], "more than the 128 positions"),
    "setting": (["{model}", "--sets", "a={heldout}", "rollout.engin=vllm"], "did you mean 'rollout.engine'?"),
    "limit": (["{model}", "--sets", "a={heldout}", "--limit", "-1"], "--limit -1: must not be negative"),
    "compare_nothing": (["--compare", "nowhere", "{heldout}"], "'nowhere' cannot be read: No such file or directory;"),
    "compare_no_samples": (["--compare", "{heldout}", "{heldout}"], "heldout.jsonl:1: not a sample of an evaluation"),
    "compare_scores": (
        ["--compare", "{tmp}/results.json", "{tmp}"],
        "results.json' is not samples.jsonl: name the one",
    ),
    "rescore_unfinished_file": (["--rescore", "{tmp}/samples.unfinished.jsonl"], "is not samples.jsonl: name the one"),
    "rescore_settings": (["--rescore", "{heldout}", "seed=1"], "heldout.jsonl:1: not a sample of an evaluation"),
    "both": (["--rescore", "x", "--compare", "x", "y"], "give one of them"),
    "rescore_limit": (
        ["--rescore", "x", "--limit", "3"],
        "--rescore reads the samples of an evaluation and nothing else",
    ),
    "compare_data": (["--compare", "x", "y", "--data", "z"], "--compare reads two evaluations and nothing else; leave"),
    "export_nothing": (["--export", "lm-eval", "nowhere"], "holds no results of an evaluation: No such file or dir"),
    "compare_and_model": (["{model}", "--compare", "x", "y"], "--compare reads two evaluations and nothing else"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(files: Path, tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line that says what is wrong, exit code 2, nothing written."""
    (tmp_path / "sets.yaml").write_text(
        f"data: {{eval_sets: {{a b: {{path: {files / 'heldout.jsonl'}, reward: {{function: 'nope:nope'}}}}}}}}"
    )
    (tmp_path / "octal.yaml").write_text("data: {eval_sets: {a: {path: x.jsonl, limit: 012}}}")
    graded = "reward: {function: final_answer}\ndata: {eval_sets: {a: {path: x.jsonl}}}"
    (tmp_path / "graded.yaml").write_text(graded)
    names = {
        "tmp": tmp_path,
        "graded": tmp_path / "graded.yaml",
        "octal": tmp_path / "octal.yaml",
        "model": files / "model",
        "heldout": files / "heldout.jsonl",
        "yaml": tmp_path / "sets.yaml",
    }
    arguments, expected = BAD[case]
    out = tmp_path / "out"
    assert main(["eval", *(word.format(**names) for word in arguments), "--out", str(out)]) == 2
    said = capsys.readouterr().err
    assert expected in said and said.startswith("error: ") and said.count("\n") == 1
    assert not out.exists()


@settings(deadline=None)
@given(st.data())
def test_requests_are_grouped_whatever_their_order(data: st.DataObject) -> None:
    """Several sets whose problems have the same indices, samples in order but interleaved as ranks interleave them:
    each completion in one group, no group too many, and the seeds those of one group of all."""
    size = data.draw(st.integers(1, 5))
    prompts = st.tuples(st.sampled_from(["", "a", "b"]), st.integers(0, 3))
    counts = data.draw(st.dictionaries(prompts, st.integers(1, 9)))
    turns = data.draw(st.permutations([prompt for prompt, count in counts.items() for _ in range(count)]))
    given_out: dict[tuple[str, int], int] = dict.fromkeys(counts, 0)
    requests = []
    for stream, index in turns:
        how = Sampling(len(stream) + 3, 1.0, 0) if stream else None
        prompt = Prompt(index, "", (index,), "", "")
        requests.append(Request(prompt, given_out[stream, index], 1, stream, how))
        given_out[stream, index] += 1
    default = Sampling(1, 1.0, 0)
    groups, places = grouped(requests, default, size, (7,))
    assert sorted(place for members in places for place in members) == list(range(len(requests)))
    assert len(groups) == sum(-(-count // size) for count in counts.values())
    seeds: dict[tuple[str, int], set[int]] = {}
    for group, members in zip(groups, places, strict=True):
        first = requests[members[0]]
        key = first.stream, first.prompt.index
        numbers = [requests[place].completion_index for place in members]
        assert numbers == list(range(numbers[0], numbers[0] + group.count)) and group.count <= size
        assert {(requests[place].stream, requests[place].prompt.index) for place in members} == {key}
        how = first.sampling or default
        assert (group.request_id, group.max_tokens) == (first.id, how.max_completion_tokens)
        assert (group.temperature, group.stop_token_ids) == (how.temperature, (7, *how.stop_token_ids))
        seeds.setdefault(key, set()).add(group.seed - numbers[0])
    assert all(len(of_prompt) == 1 for of_prompt in seeds.values())
    assert len({seed for of_prompt in seeds.values() for seed in of_prompt}) == len(seeds)
