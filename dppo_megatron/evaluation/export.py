"""Exports an evaluation in the file formats of lm-evaluation-harness or lighteval, for tools that read those.

    lm-eval     DIR/<model>/results_<date>.json, samples_<task>_<date>.jsonl (`--log_samples`)
    lighteval   DIR/results/<model>/results_<date>.json, DIR/details/<model>/<date>/details_<task>_<date>.parquet

In these files a problem is one row with all of its samples. Only what was measured is written: fields about few-shot
examples, hubs and timings are left out or empty.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dppo_megatron.config.paths import writing
from dppo_megatron.data.summary import safe_name
from dppo_megatron.evaluation.eval_samples import (
    RESULTS,
    Problems,
    by_problem,
    check_ended,
    read_results,
    read_samples,
    scores_of,
    share_correct,
    write_text,
)
from dppo_megatron.evaluation.eval_scores import EvalSample, EvalScores
from dppo_megatron.files import make_directory
from dppo_megatron.types import UserError


def export(form: str, evaluation: str, out: Path | None) -> list[str]:
    """Write an evaluation below `out` in the format `form` (a key of FORMS); returns the paths written. Raises
    UserError: unknown format, no evaluation, no `out`, or a file that cannot be written."""
    if form not in FORMS:
        raise UserError(f"--export {form}: expected one of {', '.join(FORMS)}")
    if out is None:
        raise UserError("--export writes to the directory that --out names")
    directory = Path(evaluation)
    check_ended(directory)
    results, samples = read_results(directory / RESULTS), [_without_surrogates(one) for one in read_samples(directory)]
    samples.sort(key=lambda one: one.problem_index)
    name = Path(results.get("model") or directory).name
    model = name if name not in ("", "..") else directory.resolve().name  # of `eval .` and `eval ..`
    date = datetime.now().isoformat().replace(":", "-")
    with writing(f"'{out}'"):
        written = FORMS[form](results, by_problem(samples), scores_of(samples), out, model, date)
    return [str(path) for path in written]


def _lm_eval(
    results: Mapping[str, Any], sets: dict[str, Problems], scores: list[EvalScores], out: Path, model: str, date: str
) -> list[Path]:
    folder = out / safe_name(model)
    content = {
        "results": {one.name: {"alias": one.name} | _metrics(one, ",none") for one in scores},
        "configs": {name: {"task": name, **results.get("sets", {}).get(name, {})} for name in sets},
        "versions": dict.fromkeys(sets, 1),
        "n-shot": dict.fromkeys(sets, 0),
        "n-samples": {name: {"original": len(each), "effective": len(each)} for name, each in sets.items()},
        "config": {"model": results.get("generated_by") or "", "model_args": f"pretrained={model}"},
        "model_name": model,
        "model_name_sanitized": safe_name(model),
    }
    files = [folder / f"results_{date}.json"]
    write_text(files[0], [json.dumps(content, indent=2, default=str)])
    for name, each in sets.items():
        files.append(folder / f"samples_{safe_name(name)}_{date}.jsonl")
        write_text(files[-1], (json.dumps(_lm_eval_row(one), default=str) + "\n" for one in each.values()))
    return files


def _lm_eval_row(samples: Sequence[EvalSample]) -> dict[str, Any]:
    first = samples[0]
    document = first.row or {"problem": first.prompt, "answer": first.reference}
    return {
        "doc_id": first.problem_index,
        "doc": document,
        "target": first.reference,
        "arguments": {"gen_args_0": {"arg_0": first.prompt, "arg_1": {}}},
        "resps": [[one.text for one in samples]],
        "filtered_resps": [one.extracted or "" for one in samples],
        "filter": "none",
        "metrics": ["exact_match"],
        "exact_match": share_correct(samples),
        "doc_hash": _hash(json.dumps(document, sort_keys=True, default=str)),
        "prompt_hash": _hash(first.prompt),
        "target_hash": _hash(first.reference),
    }


def _lighteval(
    results: Mapping[str, Any], sets: dict[str, Problems], scores: list[EvalScores], out: Path, model: str, date: str
) -> list[Path]:
    task = {name: f"custom|{safe_name(name)}|0" for name in sets}
    content = {
        "config_general": {"model_name": model, "model_config": {"model_name": model}},
        "results": {task[one.name]: _metrics(one) for one in scores},
        "versions": dict.fromkeys(task.values(), 0),
        "config_tasks": {task[name]: results.get("sets", {}).get(name, {}) for name in sets},
        "summary_tasks": {},
        "summary_general": {},
    }
    files = [out / "results" / model / f"results_{date}.json"]
    write_text(files[0], [json.dumps(content, indent=2, default=str)])
    folder = out / "details" / model / date
    make_directory(folder)
    for name, each in sets.items():
        files.append(folder / f"details_{task[name]}_{date}.parquet")
        pq.write_table(pa.Table.from_pylist([_lighteval_row(samples) for samples in each.values()]), files[-1])
    return files


def _lighteval_row(samples: Sequence[EvalSample]) -> dict[str, Any]:
    first = samples[0]
    return {
        "doc": {"query": first.prompt, "choices": [first.reference], "gold_index": [0], "id": first.problem},
        "metric": {"exact_match": share_correct(samples)},
        "model_response": {"text": [one.text for one in samples], "input": first.prompt},
    }


FORMS: Mapping[str, Callable[..., list[Path]]] = {"lm-eval": _lm_eval, "lighteval": _lighteval}


def _metrics(one: EvalScores, filtered: str = "") -> dict[str, Any]:
    """Means and standard errors under these harnesses' names; lm-eval appends the name of a filter."""
    named = {"exact_match": one.avg} | {f"pass@k:k={k}": estimate for k, estimate in one.pass_at.items() if k > 1}
    named |= {f"maj@{k}": estimate for k, estimate in one.maj_at.items()}
    values = {f"{name}{filtered}": estimate.value for name, estimate in named.items()}
    return values | {f"{name}_stderr{filtered}": estimate.se for name, estimate in named.items()}


def _without_surrogates(sample: EvalSample) -> EvalSample:
    """Replaces lone surrogates, which a model can write, and which neither parquet nor these harnesses can store."""
    return replace(sample, text=sample.text.encode("utf-8", "replace").decode())


def _hash(text: str) -> str:
    return sha256(text.encode()).hexdigest()
