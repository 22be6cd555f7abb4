"""Loads problem sets: rows to prompts, with counts of what was left out, warnings, and a fingerprint.

A set is read before a process group or a model is made. Every rank needs its prompts: of a large training set all of a
machine share what one of them has read (`cache.py`). Only one rank reports on it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b, sha256
from itertools import islice

import numpy as np
from transformers import PreTrainedTokenizerBase

from dppo_megatron.config.conditions import Condition
from dppo_megatron.config.resolved_sets import ResolvedSet, eval_set_configs, train_set_configs
from dppo_megatron.config.schema import Config
from dppo_megatron.config.selection import selection_settings
from dppo_megatron.data import fields
from dppo_megatron.data.cache import PromptCache, columns_of
from dppo_megatron.data.contamination import Contamination, HeldOut, Words, words_of
from dppo_megatron.data.order import make_order, order_key
from dppo_megatron.data.rows import Row, read_rows
from dppo_megatron.data.templates import (
    check_template,
    is_beyond,
    model_ends,
    render,
    sequence_start,
    shared_ids,
    tokenize,
    turn_end_tokens,
    unfilled,
    unstable,
)
from dppo_megatron.progress import Advance, progress
from dppo_megatron.types import Prompt, PromptFeatures, UserError

_BATCH = 1000
"""Rows tokenized in one call: a call for each took 3 times as long."""


@dataclass(frozen=True, slots=True)
class ProblemSet:
    name: str
    key: str
    """The settings that name it (`data.train_path`)."""
    prompts: Sequence[Prompt]
    columns: PromptFeatures
    filtered: int
    """Problems left out because their prompt is longer than `max_prompt_tokens`."""
    fingerprint: str
    """SHA-256 of what was read: order, texts, answers, sources and token ids."""
    notes: tuple[str, ...]
    """Warnings about its rows: duplicates, levels that are not numbers."""
    words: Sequence[Words] = ()
    """Of each problem of an evaluation set, in its order: by these it is found among training problems."""
    held_out: Mapping[str, int] = field(default_factory=dict)
    """Of a training set: how many problems of each evaluation set are in it, or were and have been dropped."""
    dropped: int = 0

    @property
    def first_prompt(self) -> str:
        """Text of the first prompt, as the model is given it."""
        return self.prompts[0].text


_FACTS = ("filtered", "fingerprint", "notes", "held_out", "dropped")
"""Fields of a `ProblemSet` that its cache keeps beside the prompts."""


def load_set(
    name: str,
    settings: ResolvedSet,
    tokenizer: PreTrainedTokenizerBase,
    *,
    first_index: int = 0,
    held_out: HeldOut | None = None,
    drops: bool = False,
) -> ProblemSet:
    """Read, render and tokenize one set. Its prompts are numbered from `first_index`.

    Args:
        held_out: problems to look for, in a training set; None: this is an evaluation set.
        drops: leave out those that are found.

    Raises:
        UserError: a row without a problem, a prompt that is too long and may not be filtered, or no problems.
    """
    check_template(settings, tokenizer)
    read, where = _PromptReader(settings, tokenizer, first_index), _Where(settings)
    looked_for, words = Contamination(held_out or HeldOut(), drops), list[Words]()
    with progress(f"reading {settings.path}", 0, "rows") as advance:
        for rows in read_set(settings, advance, where):
            if held_out is None:
                words += (words_asked(row, settings) for row in rows)
            read.add(rows, looked_for)
    if not settings.limit or where.met < settings.limit:  # else the field may be in a later row
        where.check_fields()
    prompts, dropped = read.prompts, looked_for.dropped
    if not prompts:
        reasons = {
            f"all {read.filtered} are longer than {settings.max_prompt_tokens} tokens": read.filtered,
            f"all {dropped} are problems of evaluation sets (contamination=drop)": dropped,
            f"{where.left_out} rows do not meet 'where'": where.left_out,
            f"answer_from={settings.answer_from} finds no answer": read.unanswered,
        }
        why = next((f": {reason}" for reason, count in reasons.items() if count), "")
        raise UserError(f"{settings.path}: holds no problems{why}")
    share = " from 0 to 1 (level_is: solve_rate)" if settings.level_is == "solve_rate" else ""
    left_out = {
        "problems are left out: they are problems of evaluation sets": dropped,
        f"rows are left out by where = {settings.where}": where.left_out,
        f"rows are left out: answer_from={settings.answer_from} finds no answer there": read.unanswered,
        f"rows have a level that is no number{share}; it is left out": read.unknown_levels,
    }
    notes = [*read.repeats.notes(), *unfilled(settings.template), *unstable(settings, tokenizer)]
    if read.special:
        what = f"which the model gets as such: {read.special[0]}"
        notes.append(f"warning: {len(read.special)} problems hold special tokens, {what}")
    notes += [f"{count} {what}" for what, count in left_out.items() if count]
    columns, fingerprint = columns_of(prompts), read.hashed.hexdigest()
    found, told = looked_for.counts(), tuple(notes)
    return ProblemSet(name, settings.key, prompts, columns, read.filtered, fingerprint, told, words, found, dropped)


class _PromptReader:
    """Rows of a set become prompts, batch by batch."""

    def __init__(self, settings: ResolvedSet, tokenizer: PreTrainedTokenizerBase, first_index: int) -> None:
        self._settings, self._tokenizer, self._first_index = settings, tokenizer, first_index
        self._shared, self._start = shared_ids(tokenizer), sequence_start(settings.template, tokenizer)
        self.prompts: list[Prompt] = []
        self.repeats, self.hashed = _Repeats(self.prompts), sha256()
        added = (str(one) for one in tokenizer.added_tokens_decoder.values() if one.special)
        tokens = sorted({*tokenizer.all_special_tokens, *added}, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, tokens)) or "(?!)")
        self.special: list[str] = []
        """Special tokens in problems' own texts, which the tokenizer reads as such: a turn may end there."""
        self.filtered = self.unknown_levels = self.unanswered = 0

    def add(self, rows: list[Row], looked_for: Contamination) -> None:
        """Contamination is counted in what remains: rows without an answer, or too long, are not trained on."""
        settings, read = self._settings, list[tuple[Row, str | fields.Messages, Prompt]]()
        problems = [fields.problem_of(row, settings) for row in rows]
        texts = render(problems, [row.origin for row in rows], settings, self._tokenizer)
        short = ["" if is_beyond(text, settings.max_prompt_tokens) else text for text in texts]
        ids = tokenize(short, self._tokenizer, self._shared, self._start)
        for row, problem, text, token_ids in zip(rows, problems, texts, ids, strict=True):
            level, unknown = fields.level_of(row, settings)
            self.unknown_levels += unknown
            answer = fields.answer_of(row, settings)
            if not answer:
                self.unanswered += 1
                continue
            prompt = Prompt(
                self._first_index + len(self.prompts) + len(read),
                text,
                token_ids,
                answer,
                fields.source_of(row, settings),
                level=level,
                row=row.values,
                origin=row.origin,
                problem=_last_question(problem),
            )
            if _is_too_long(prompt, settings):
                self.filtered += 1
                continue
            read.append((row, problem, prompt))
        asked = (words_asked(row, settings) for row, _, _ in read)
        for row, problem, prompt in looked_for.kept(read, asked):
            if prompt.index != (index := self._first_index + len(self.prompts)):  # one before it is left out
                prompt = replace(prompt, index=index)
            encoded = (part.encode("utf-8") for part in (prompt.text, prompt.answer, prompt.source))
            for raw in (*encoded, np.array(prompt.token_ids, dtype="<i8").tobytes()):
                self.hashed.update(len(raw).to_bytes(8, "little") + raw)  # length-prefixed: unambiguous
            self.prompts.append(prompt)
            self.repeats.add(problem)
            if found := self._special.search(_asked(problem)):
                self.special.append(f"{found[0]} in {row.origin}")


class _Where:
    """Whether a row meets a set's conditions, with what it has to say about all of them."""

    def __init__(self, settings: ResolvedSet) -> None:
        self._settings, self._conditions = settings, [Condition.parse(text) for text in settings.where]
        self.met = self.left_out = 0
        self._never_there = {condition.field for condition in self._conditions}

    def __call__(self, row: Row) -> bool:
        values = [fields.get_field(row.values, condition.field) for condition in self._conditions]
        pairs = list(zip(self._conditions, values, strict=True))
        self._never_there -= {one.field for one, value in pairs if value is not None or one.field in row.values}
        meets = all(condition.holds(value) for condition, value in pairs)
        self.met += meets
        self.left_out += not meets
        return meets

    def check_fields(self) -> None:
        """Raise UserError for a field that no row had: it is misspelt, or belongs to another set."""
        if self._never_there:
            raise UserError(
                f"{self._settings.path}: no row has the field '{min(self._never_there)}' of"
                f" {fields.section_of(self._settings)}.where; a training set that data.where is not for has where=[]"
            )


def read_set(
    settings: ResolvedSet, advance: Advance, where: Callable[[Row], bool] = lambda row: True
) -> Iterator[list[Row]]:
    """The set's rows that meet `where`, in batches, at most `limit` in all. `advance` is called with the number of rows
    that the caller has finished. Raises UserError if it cannot be read."""
    rows = islice(filter(where, read_rows(settings.path, settings.subset, settings.split)), settings.limit or None)
    done = 0
    while batch := list(islice(rows, _BATCH)):
        yield batch
        done += len(batch)
        advance(done)


def load_train_sets(
    config: Config, tokenizer: PreTrainedTokenizerBase, evaluated: Mapping[str, ProblemSet]
) -> dict[str, ProblemSet]:
    """All sets to train on, their prompts numbered consecutively.

    Args:
        evaluated: whose problems are looked for, and treated as `data.contamination` says.

    Raises:
        UserError: as `load_set`; a step needs more problems of a set than it has; or evaluated problems are trained on.
    """
    sets: dict[str, ProblemSet] = {}
    settings, held_out = train_set_configs(config), held_out_of(evaluated)
    for name, one in settings.items():
        first = sum(len(done.prompts) for done in sets.values())
        sets[name] = _load_train_set(config, name, one, tokenizer, held_out, first)
    refuse(config, contamination_notes(sets, evaluated))
    paths = ", ".join(one.path for one in settings.values())
    selection = selection_settings(config)
    if too_few := selection.too_few_prompts(sum(len(one.prompts) for one in sets.values()), paths):
        raise UserError(f"rollout.{too_few}")
    levels = np.concatenate([one.columns.level for one in sets.values()])
    # both raise: shares that do not fit, nothing to sort by
    make_order(set_sizes(sets), selection.set_weights, config.seed, selection.planned_prompts)
    order_key(config.data.order, config.data.order_by, len(levels), levels, lambda: levels)
    return sets


def _load_train_set(
    config: Config,
    name: str,
    settings: ResolvedSet,
    tokenizer: PreTrainedTokenizerBase,
    held_out: HeldOut,
    first_index: int,
) -> ProblemSet:
    """The set out of its cache, else as it is read, and then it is kept there."""
    drops = config.data.contamination == "drop"
    read = partial(load_set, name, settings, tokenizer, first_index=first_index, held_out=held_out, drops=drops)
    cache = PromptCache.of(config.data.cache_path, settings, tokenizer, f"{held_out.digest} {drops}")
    if cache is None:
        return read()

    def kept() -> ProblemSet | None:
        if (found := cache.read(first_index)) is None:
            return None
        prompts, columns, facts = found
        return ProblemSet(name, settings.key, prompts, columns, **facts | {"notes": tuple(facts["notes"])})

    if found := kept():
        return found
    with cache.turn() as is_first:
        if found := kept():  # written meanwhile
            return found
        loaded = read()
        if not is_first:
            return loaded
        line = cache.write(loaded.prompts, {fact: getattr(loaded, fact) for fact in _FACTS})
    loaded = kept() or loaded  # in little memory, as the other ranks have it
    return replace(loaded, notes=(*loaded.notes, line))


def load_eval_sets(config: Config, tokenizer: PreTrainedTokenizerBase) -> dict[str, ProblemSet]:
    """All sets to evaluate on, each numbered from 0. Raises UserError as `load_set`."""
    return {name: load_set(name, settings, tokenizer) for name, settings in eval_set_configs(config).items()}


def set_sizes(sets: Mapping[str, ProblemSet]) -> dict[str, int]:
    """Problems of each set."""
    return {name: len(one.prompts) for name, one in sets.items()}


def stop_token_ids(config: Config, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Tokens that end a completion besides the tokenizer's end of sequence: the settings' tokens, those of the model's
    files, and the end of turn of every chat template in use. Raises UserError: a setting's is none; as `model_ends`."""
    for token in config.rollout.sampling.stop_token_ids:
        if token >= len(tokenizer):
            raise UserError(f"rollout.sampling.stop_token_ids: {token} is no token of the model's {len(tokenizer)}")
    sets: Sequence[ResolvedSet] = [*train_set_configs(config).values(), *eval_set_configs(config).values()]
    of_files = model_ends(config.model.hf_path, tokenizer, config.rollout.engine)
    found = [*config.rollout.sampling.stop_token_ids, *of_files]
    for one in sets:
        found += turn_end_tokens(one.template, tokenizer)
    return tuple(dict.fromkeys(found))


class _Repeats:
    """Finds problems that occur in a set more than once.

    Texts are compared by 128 bits of hash: a million of them as text would be a second copy of the set.
    """

    def __init__(self, prompts: list[Prompt]) -> None:
        self._first: dict[bytes, int] = {}
        """Hash of a problem to its place in `prompts`."""
        self._prompts = prompts
        self._again: list[tuple[int, int]] = []
        """Places of each repetition and of the first."""

    def add(self, problem: str | fields.Messages) -> None:
        """The problem of the last prompt."""
        place = len(self._prompts) - 1
        digest = blake2b(_identity(problem).encode(), digest_size=16).digest()
        if (first := self._first.setdefault(digest, place)) != place:
            self._again.append((place, first))

    def notes(self) -> Iterator[str]:
        """Lines for the log about problems that are there more than once."""
        again = [(self._prompts[place], self._prompts[first]) for place, first in self._again]
        if again:
            examples = ", ".join(f"{one.origin} is {first.origin}" for one, first in again[:3])
            yield f"warning: {len(again)} problems stand there more than once: {examples}"
        differ = [(one, first) for one, first in again if one.answer.strip() != first.answer.strip()]
        for one, first in differ[:1]:
            answers = f"{one.origin} says {one.answer[:60]!r} and {first.origin} {first.answer[:60]!r}"
            yield f"warning: {len(differ)} of them with another answer: {answers}"


def contamination_notes(train: Mapping[str, ProblemSet], evaluated: Mapping[str, ProblemSet]) -> list[str]:
    """A line for each evaluation set some of whose problems are trained on."""
    found = ((f"set '{name}'", one.held_out) for name, one in train.items() if not one.dropped)
    return [line for where, counts in found for line in trained_on(where, counts, evaluated)]


def trained_on(where: str, counts: Mapping[str, int], evaluated: Mapping[str, ProblemSet]) -> list[str]:
    """A line for each evaluation set, of which `counts` problems were found."""
    return [
        f"warning: {found} of the {len(evaluated[name].words)} problems of the evaluation set '{name}' are trained on"
        f" ({where}): its scores will be too high"
        for name, found in counts.items()
    ]


def refuse(config: Config, found: Sequence[str]) -> None:
    """Raise UserError if evaluation problems are trained on, and may not be."""
    if config.data.contamination == "refuse" and found:
        raise UserError(f"{found[0].removeprefix('warning: ')}, and data.contamination=refuse")


def held_out_of(evaluated: Mapping[str, ProblemSet]) -> HeldOut:
    """The problems of all evaluation sets."""
    found = HeldOut()
    for name, one in evaluated.items():
        found.add(name, one.words)
    return found


def _is_too_long(prompt: Prompt, settings: ResolvedSet) -> bool:
    """Whether to leave the prompt out; raises UserError if it must not be."""
    beyond = is_beyond(prompt.text, settings.max_prompt_tokens)
    if not prompt.token_ids and not beyond:
        raise UserError(f"{prompt.origin}: the prompt has no tokens under the model's tokenizer")
    if len(prompt.token_ids) <= settings.max_prompt_tokens and not beyond:
        return False
    if settings.overlong == "filter":
        return True
    length = f"{len(prompt.text):,} characters" if beyond else f"{len(prompt.token_ids)} tokens"
    raise UserError(
        f"{prompt.origin}: the prompt has {length}, more than {settings.max_prompt_tokens_key} ="
        f" {settings.max_prompt_tokens}; raise it, or set overlong=filter (for an evaluation set in its own entry under"
        " data.eval_sets) to leave such problems out"
    )


def _turns(problem: str | fields.Messages) -> fields.Messages:
    return [{"role": "user", "content": problem}] if isinstance(problem, str) else problem


def _identity(problem: str | fields.Messages) -> str:
    """The text by which two problems are compared; a single user message counts as its text."""
    turns = [(turn["role"], " ".join(turn["content"].split())) for turn in _turns(problem)]
    return turns[0][1] if len(turns) == 1 else "\n".join(f"{role}: {text}" for role, text in turns)


def _asked(problem: str | fields.Messages) -> str:
    return "\n".join(turn["content"] for turn in _turns(problem))


def _last_question(problem: str | fields.Messages) -> str:
    turns = _turns(problem)
    return next((turn["content"] for turn in reversed(turns) if turn["role"] == "user"), turns[-1]["content"])


def words_asked(row: Row, settings: ResolvedSet) -> Words:
    """Those of the row's problem."""
    return words_of(_asked(fields.problem_of(row, settings)))
