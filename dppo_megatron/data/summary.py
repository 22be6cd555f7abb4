"""Reports on the data before a run starts, saves the first prompt of every set, and compares the data at a resume.

Runs on real data most often fail because of their prompts: a template that was not applied, a model that thinks under a
limit of 1,024 tokens, an instruction that appears twice. A look at one rendered prompt shows it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from dppo_megatron.config.paths import in_short
from dppo_megatron.data.sets import ProblemSet, contamination_notes
from dppo_megatron.files import make_directory, write_text
from dppo_megatron.types import UserError

_BOX = "\\boxed"
_MOST_PROBLEMS = 100  # that are looked at
_LEAD_CHARS = 24


def report_lines(
    train: Mapping[str, ProblemSet],
    evaluated: Mapping[str, ProblemSet],
    stops: tuple[int, ...],
    tokenizer: PreTrainedTokenizerBase,
) -> list[str]:
    """Lines for the log: each set's size, what was left out, its first prompt and its oddities."""
    lines: list[str] = []
    for part, sets in (("training", train), ("evaluation", evaluated)):
        for name, one in sets.items():
            left_out = f", {one.filtered} left out: longer than its max_prompt_tokens" if one.filtered else ""
            longest = one.columns.prompt_tokens.max()
            lines.append(f"{part} set '{name}': {len(one.prompts)} problems{left_out}; longest prompt {longest} tokens")
            lines.append(f"  first prompt: {in_short(one.prompts[0].text)}")
            lines += [f"  {note}" for note in [*one.notes, *_asks_twice(one)]]
    lines += contamination_notes(train, evaluated)
    if stops:
        named = ", ".join(f"{token} {tokenizer.convert_ids_to_tokens(token)}" for token in stops)
        lines.append(f"completions also end at: {named}")
    return lines


def _asks_twice(loaded: ProblemSet) -> list[str]:
    """A warning if the problems ask for a box themselves, as files made for verl do, and the template asks again. They
    ask if the same words lead to the last box of each: else it is a blank to fill in, or what the problem is about."""
    first = [loaded.prompts[index] for index in range(min(_MOST_PROBLEMS, len(loaded.prompts)))]
    leads = {one.problem.rpartition(_BOX)[0][-_LEAD_CHARS:] for one in first}
    if len(leads) > 1 or not all(0 < one.problem.count(_BOX) < one.text.count(_BOX) for one in first):
        return []
    own = "prompt_template='{problem}'"
    return [f"warning: its problems ask for {_BOX} and the template asks again; {own} leaves out the template's words"]


def write_first_prompts(directory: Path, train: Mapping[str, ProblemSet], evaluated: Mapping[str, ProblemSet]) -> None:
    """Write the first prompt of every set verbatim to `prompts/train-<set>.txt` and `prompts/eval-<set>.txt`."""
    folder = directory / "prompts"
    make_directory(folder)
    for part, sets in (("train", train), ("eval", evaluated)):
        for name, one in sets.items():
            write_text(folder / f"{part}-{safe_name(name)}.txt", one.prompts[0].text)


def safe_name(name: str) -> str:
    """A file name for the name of any set; different names give different file names.

    Example:
        safe_name("math500"), safe_name("a/b")  # "math500", "a_b-c14cddc0"
    """
    plain = re.sub(r"[^A-Za-z0-9._-]", "_", name)[:80]
    if plain == name and name == name.lower():  # some file systems ignore case
        return plain
    return f"{plain}-{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()[:8]}"


def data_fingerprint(
    train: Mapping[str, ProblemSet], evaluated: Mapping[str, ProblemSet], stops: tuple[int, ...] = ()
) -> dict[str, Any]:
    """What checkpoints store about the data: each `train` and `eval` set's key, number of problems and hash, in order,
    and the tokens that end completions besides the tokenizer's end of sequence."""
    return {"ends": list(stops)} | {
        part: {name: {"key": s.key, "problems": len(s.prompts), "sha256": s.fingerprint} for name, s in sets.items()}
        for part, sets in (("train", train), ("eval", evaluated))
    }


def check_data(saved: Mapping[str, Any], now: Mapping[str, Any], may_change: Iterable[str], where: str) -> list[str]:
    """Compare the data of a run with the data at its resume; returns a line for each allowed difference.

    Evaluation sets and ends of completions may differ. Training sets may if `checkpoint.may_change` names their setting
    and the number of problems is the same: the pruning history is indexed by a problem's number.

    Args:
        saved, now: results of `data_fingerprint`.
        where: the checkpoint, for messages.

    Raises:
        UserError: training data differs and may not.
    """
    lines = [f"evaluation set {line}" for line, _ in _differences(saved["eval"], now["eval"])]
    if saved["ends"] != now["ends"]:
        lines.append(f"tokens at which completions also end: {saved['ends']} -> {now['ends']}")
    changed = _differences(saved["train"], now["train"])
    if list(saved["train"]) != list(now["train"]) and not changed:
        changed = [("order of the training sets", "data.train_sets")]
    differs = "; ".join(line for line, _ in changed)
    before, after = (sum(one["problems"] for one in part["train"].values()) for part in (saved, now))
    if before != after:  # checked first, because may_change cannot allow it
        raise UserError(
            f"the run of {where} was trained on {before} problems and there are {after} now ({differs}): the pruning"
            " history is indexed by each problem's number. Put them back, or begin a new run_dir (model.hf_path may"
            " be the old run's hf/; see docs/checkpoints.md)"
        )
    permitted = tuple(may_change)
    refused = [(line, key) for line, key in changed if not _permitted(key, permitted)]
    if refused:
        keys, what = ", ".join(dict.fromkeys(key for _, key in refused)), "; ".join(line for line, _ in refused)
        raise UserError(
            f"the training data is not what the run of {where} was trained on: {what}. Put it back, choose another"
            f" run_dir, or permit it with checkpoint.may_change=[{keys}] (see docs/checkpoints.md)"
        )
    return lines + [f"training set {line}" for line, _ in changed]


def _differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(what differs, its setting) of each set that was added, removed or changed."""
    differences = []
    for name in [*saved, *(name for name in now if name not in saved)]:
        old, new = saved.get(name), now.get(name)
        if old is None or new is None:
            differences.append((f"'{name}': {'new' if old is None else 'gone'}", (old or new or {})["key"]))
        elif old["sha256"] != new["sha256"]:
            counts = f"{old['problems']} -> {new['problems']} problems"
            same = f"{old['problems']} problems, other texts, answers or order"
            differences.append((f"'{name}': {same if old['problems'] == new['problems'] else counts}", new["key"]))
    return differences


def _permitted(key: str, may_change: tuple[str, ...]) -> bool:
    return any(key == given or key.startswith(f"{given}.") or given.startswith(f"{key}.") for given in may_change)
