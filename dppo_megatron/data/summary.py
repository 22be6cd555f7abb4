"""Reports on the data before a run starts, and saves the first prompt of every set.

Runs on real data most often fail because of their prompts: a template that was not applied, a model that thinks under a
limit of 1,024 tokens, an instruction that appears twice. A look at one rendered prompt shows it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from dppo_megatron.config.paths import in_short
from dppo_megatron.data.sets import ProblemSet, contamination_notes, overlap_notes
from dppo_megatron.files import make_directory, write_text


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
            longest = max(len(prompt.token_ids) for prompt in one.prompts)
            lines.append(f"{part} set '{name}': {len(one.prompts)} problems{left_out}; longest prompt {longest} tokens")
            lines.append(f"  first prompt: {in_short(one.first_prompt)}")
            lines += [f"  {note}" for note in one.notes]
    lines += [*overlap_notes(train), *contamination_notes(train, evaluated)]
    if stops:
        named = ", ".join(f"{token} {tokenizer.convert_ids_to_tokens(token)}" for token in stops)
        lines.append(f"completions also end at: {named}")
    return lines


def write_first_prompts(directory: Path, train: Mapping[str, ProblemSet], evaluated: Mapping[str, ProblemSet]) -> None:
    """Write the first prompt of every set verbatim to `prompts/train-<set>.txt` and `prompts/eval-<set>.txt`."""
    folder = directory / "prompts"
    make_directory(folder)
    for part, sets in (("train", train), ("eval", evaluated)):
        for name, one in sets.items():
            write_text(folder / f"{part}-{safe_name(name)}.txt", one.first_prompt)


def safe_name(name: str) -> str:
    """A file name for any name of a set; two names never share one.

    Example:
        safe_name("math500"), safe_name("a/b")  # "math500", "a_b-c14cddc0"
    """
    plain = re.sub(r"[^A-Za-z0-9._-]", "_", name)[:80]
    if plain == name and name == name.lower():  # some file systems do not tell A from a
        return plain
    return f"{plain}-{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()[:8]}"
