"""One name for one thing; who gives an older one, or reads what was saved under it, is told today's."""

from __future__ import annotations

import ast
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from support.job import REPOSITORY
from support.record import write_record

from dppo_megatron.config.load import config_from_values, config_values, load_config, read_config
from dppo_megatron.config.reference import all_keys, other_names
from dppo_megatron.pruning.interface import PromptFeatures
from dppo_megatron.steps.trace import trace_header
from dppo_megatron.types import UserError
from dppo_megatron.workbench.runs.run_record import read_run
from dppo_megatron.workbench.runs.trace import read_trace

QUICKSTART = str(REPOSITORY / "configs" / "quickstart.yaml")
COMMAND = "a subcommand's file has the name that is typed, which is that of the package or the verb behind it"
SAME_FILE_NAME = {
    "compare.py": COMMAND,
    "convert.py": COMMAND,
    "data.py": "a section of the schema; a subcommand",
    "evaluate.py": COMMAND,
    "messages.py": "what crosses between a package and its own child process: graders, rollout clients, trackers",
    "plan.py": COMMAND,
    "process.py": "the program of a child process: a rollout client, a tracker",
    "serve.py": COMMAND,
    "simulate.py": COMMAND,
    "trace.py": "trace.jsonl, its writer in steps/ and its reader in workbench/runs/",
    "train.py": COMMAND,
}
"""File names that there are more than once -> why."""
SAME_CLASS_NAME = {
    "Loader": "both are what their libraries call it: PyYAML's, importlib's",
    "Step": "a step of training; a step of `accept`, which a user chooses by that word",
}
"""Class names, without a leading underscore, that there are more than once -> why."""

FILES = sorted((REPOSITORY / "dppo_megatron").rglob("*.py"))
RENAMED = {
    "actor.optimizer.main_parameters": "main_params_dtype",
    "actor.optimizer.moments": "moments_dtype",
    "pruning.completion.p_min": "min_inclusion_prob",
    "pruning.prompt.p_min": "min_inclusion_prob",
    "rollout.limits.mismatch_alarm": "logprob_diff_warning",
    "rollout.limits.straggler_share": "finish_fraction",
    "rollout.servers.addresses_from": "registry_dir",
    "rollout.servers.wait_for": "min_servers",
    "warm_start": "sft",
}
REMOVED = ("pruning.completion.max_noise_ratio", "pruning.prompt.max_noise_ratio")
CHANGED = [
    "actor.optimizer.moments_dtype=bfloat16",
    "pruning.prompt.min_inclusion_prob=0.3",
    "rollout.limits.finish_fraction=0.9",
    "sft.steps=7",
]


def _repeated(names: list[str]) -> set[str]:
    return {name for name, count in Counter(names).items() if count > 1}


def test_no_file_name_is_there_twice_without_a_reason() -> None:
    """A search finds the file that is meant; what has a reason no longer leaves the list."""
    assert _repeated([path.name for path in FILES]) - {"__init__.py", "__main__.py"} == SAME_FILE_NAME.keys()


def test_no_class_name_is_there_twice_without_a_reason() -> None:
    """Private ones count too: `_Plan` beside `Plan` reads as the same thing."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in FILES]
    names = [node.name.lstrip("_") for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    assert len(names) > 300 and _repeated(names) == SAME_CLASS_NAME.keys()


def test_each_older_name_is_in_the_table_of_hints_and_no_setting() -> None:
    known = all_keys()
    for older, newer in RENAMED.items():
        section = older.rpartition(".")[0]
        now = f"{section}.{newer}" if section else newer
        assert other_names()[older] == now and now in known and older not in known


@pytest.mark.parametrize("older", sorted(RENAMED))
def test_a_person_is_told_the_name_of_today(older: str, tmp_path: Path) -> None:
    """On the command line, in a file and in what a run has saved: one name for one thing."""
    given = f"{older}.steps" if older == "warm_start" else older
    now = other_names()[given]
    with pytest.raises(UserError, match=f"unknown key '{given}'; here it is {now}$"):
        load_config(QUICKSTART, [f"{given}=1"])
    file, nested = tmp_path / "job.yaml", {}
    section: dict[str, Any] = nested
    *sections, name = given.split(".")
    for part in sections:
        section[part] = section = {}
    section[name] = 1
    file.write_text(yaml.safe_dump(nested))
    with pytest.raises(UserError, match=f"job.yaml:[0-9]: unknown key '{given}'; here it is {now}$"):
        load_config(str(file), [])
    with pytest.raises(UserError, match=f"saved: unknown key '{given}'; here it is {now}$"):
        config_from_values(nested, "saved")


@pytest.mark.parametrize("gone", REMOVED)
def test_a_person_is_told_what_to_use_instead(gone: str, tmp_path: Path) -> None:
    """Also where a run had it on: what it did then is not done any more."""
    said = rf"unknown key '{gone}'; here it is no setting: .*max_design_effect"
    assert gone not in all_keys()
    with pytest.raises(UserError, match=said):
        load_config(QUICKSTART, [f"{gone}=0"])
    saved = config_values(read_config(QUICKSTART, []))
    saved["pruning"][gone.split(".")[1]]["max_noise_ratio"] = 1.5
    with pytest.raises(UserError, match=said):
        config_from_values(saved, "saved")
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(saved))
    with pytest.raises(UserError, match=said):
        read_config(str(tmp_path / "config.yaml"), [])


def test_metrics_of_older_runs_are_shown(tmp_path: Path) -> None:
    run = write_record(tmp_path / "run", 6)
    as_now = read_run(run).columns
    text = (run / "metrics.jsonl").read_text()
    for older, newer in (
        ("prune/w_max", "prune/weight_max"),
        ("reward/failed", "reward/failed_count"),
        ("rollout/truncated", "rollout/truncated_count"),
    ):
        assert f'"{newer}"' in text
        text = text.replace(f'"{newer}"', f'"{older}"')
    (run / "metrics.jsonl").write_text(text)
    assert read_run(run).columns == as_now


def test_a_trace_of_an_older_run_is_read(tmp_path: Path) -> None:
    """Its lines have a column that was called surprisal."""
    config = read_config(QUICKSTART, [*CHANGED, "rollout.prompts_per_step=2", "rollout.completions_per_prompt=2"])
    features = PromptFeatures(np.full(2, 2), np.full(2, np.nan), np.zeros(2, int), ("",))
    head = trace_header(config, {"train": 2}, features)
    table: dict[str, Any] = {"step": 1, "prompts": [1, 0], "rewards": [[1.0, None], [0.0, 1.0]], "kept": [0, 3]}
    table |= {"lengths": [[3, 4], [5, 6]], "seconds": {"rollout": 1.0, "update": 2.0, "other": 0.5}}
    norms = [[0.5, 0.25], [1.5, 2.0]]
    traces = []
    for column in ("logit_grad_norm", "surprisal"):
        path = tmp_path / f"{column}.jsonl"
        lines = (head, table | {column: norms})
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        traces.append(read_trace(str(path)))
    now, older = traces
    assert older.config == now.config == config
    assert older.steps[0].rollouts.logit_grad_norm.tolist() == norms == now.steps[0].rollouts.logit_grad_norm.tolist()
