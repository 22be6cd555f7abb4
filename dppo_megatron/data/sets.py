"""Loads problem sets: rows to prompts, with counts of what was left out, warnings, and a fingerprint.

A set is read before a process group or a model is made. Every rank needs its prompts; those of a large training set are
read by one rank of a machine and shared (`cache.py`). Only one rank reports on the set.
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

from dppo_megatron.config.data import Condition
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
"""Rows tokenized in one call. One call per row took 3 times as long."""


@dataclass(frozen=True, slots=True)
class ProblemSet:
    key: str
    """The setting of the set (`data.train_path`), for messages."""
    prompts: Sequence[Prompt]
    columns: PromptFeatures
    filtered: int
    """Problems left out because their prompt is longer than `max_prompt_tokens`."""
    fingerprint: str
    """SHA-256 of what was read: order, texts, answers, sources, and token ids because another tokenizer makes other
    prompts of the same problems. Not of the files: a set may move, change its format or be compressed."""
    notes: tuple[str, ...]
    """Lines about its rows, such as duplicates, or levels that are not numbers."""
    words: Sequence[Words] = ()
    """In an evaluation set: the words of each problem, by which it is found among training problems."""
    held_out: Mapping[str, int] = field(default_factory=dict)
    """In a training set: how many problems of each evaluation set it has, dropped ones included."""
    dropped: int = 0
    """In a training set: problems left out because they are in an evaluation set."""


_FACTS = ("filtered", "fingerprint", "notes", "held_out", "dropped")
"""Fields of a `ProblemSet` that its cache stores with the prompts."""


def load_set(
    settings: ResolvedSet,
    tokenizer: PreTrainedTokenizerBase,
    *,
    first_index: int = 0,
    held_out: HeldOut | None = None,
    drops: bool = False,
) -> ProblemSet:
    """Read, render and tokenize one set. Its prompts are numbered from `first_index`.

    Args:
        held_out: for a training set, the evaluation problems to look for; None: this is an evaluation set.
        drops: leave out those that are found.

    Raises:
        UserError: a row has no problem, a prompt is too long and may not be filtered, or there are no problems.
    """
    check_template(settings, tokenizer)
    reader, where = _PromptReader(settings, tokenizer, first_index), _Where(settings)
    looked_for, words = Contamination(held_out or HeldOut(), drops), list[Words]()
    with progress(f"reading {settings.path}", 0, "rows") as advance:
        for rows in read_set(settings, advance, where):
            if held_out is None:
                words += (problem_words(row, settings) for row in rows)
            reader.add(rows, looked_for)
    if not settings.limit or where.met < settings.limit:  # else an unread row may have the field
        where.check_fields()
    prompts, dropped = reader.prompts, looked_for.dropped
    if not prompts:
        reasons = {
            f"all {reader.filtered} are longer than {settings.max_prompt_tokens} tokens": reader.filtered,
            f"all {dropped} are problems of evaluation sets (contamination=drop)": dropped,
            f"{where.left_out} rows do not meet 'where'": where.left_out,
            f"answer_from={settings.answer_from} finds no answer": reader.unanswered,
        }
        why = next((f": {reason}" for reason, count in reasons.items() if count), "")
        raise UserError(f"{settings.path}: holds no problems{why}")
    share = " from 0 to 1 (level_is: solve_rate)" if settings.level_is == "solve_rate" else ""
    left_out = {
        "problems are left out: they are problems of evaluation sets": dropped,
        f"rows are left out by where = {settings.where}": where.left_out,
        f"rows are left out: answer_from={settings.answer_from} finds no answer there": reader.unanswered,
        "rows have several answers, of which answer_from=last reads only the last (all: every one)": reader.shortened,
        f"rows have a level that is not a number{share}; it is left out": reader.unknown_levels,
    }
    notes = [*reader.repeats(), *unfilled(settings.template), *unstable(settings, tokenizer)]
    if special := reader.special:
        what = f"which the model gets as such: {special[0]}"
        notes.append(f"warning: {len(special)} problems hold special tokens, {what}")
    notes += [f"{count} {what}" for what, count in left_out.items() if count]
    facts = reader.filtered, reader.hashed.hexdigest(), tuple(notes)
    return ProblemSet(
        settings.key, prompts, columns_of(prompts), *facts, words, held_out=looked_for.counts(), dropped=dropped
    )


class _PromptReader:
    """Turns rows of a set into prompts, batch by batch."""

    def __init__(self, settings: ResolvedSet, tokenizer: PreTrainedTokenizerBase, first_index: int) -> None:
        self._settings, self._tokenizer, self._first_index = settings, tokenizer, first_index
        self._shared, self._start = shared_ids(tokenizer), sequence_start(settings.template, tokenizer)
        self.prompts: list[Prompt] = []
        self.hashed = sha256()
        self._places: dict[bytes, int] = {}
        """Hash of a problem, of 128 bits because a million texts would be a second copy of the set -> its place."""
        self._repeated: list[tuple[int, int]] = []
        """Places of each repetition of a problem and of its first occurrence."""
        added = (str(one) for one in tokenizer.added_tokens_decoder.values() if one.special)
        tokens = sorted({*tokenizer.all_special_tokens, *added}, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, tokens)) or "(?!)")
        self.special: list[str] = []
        """Special tokens in the texts of problems. The tokenizer reads them as such, so that a turn may end there."""
        self.filtered = self.unknown_levels = self.unanswered = self.shortened = 0

    def add(self, rows: list[Row], looked_for: Contamination) -> None:
        """Add a batch. Contamination is only looked for in rows that are kept, not in those without an answer or with a
        prompt that is too long: they are not trained on."""
        settings, read = self._settings, list[tuple[Row, str | fields.Messages, Prompt]]()
        problems = [fields.problem_of(row, settings) for row in rows]
        texts = render(problems, [row.origin for row in rows], settings, self._tokenizer)
        ids = tokenize(texts, self._tokenizer, self._shared, settings.max_prompt_tokens, self._start)
        for row, problem, text, token_ids in zip(rows, problems, texts, ids, strict=True):
            level, unknown = fields.level_of(row, settings)
            self.unknown_levels += unknown
            answer = fields.answer_of(row, settings)
            if not answer:
                self.unanswered += 1
                continue
            if settings.answer_from == "last":
                self.shortened += len(fields.items_of(fields.get_field(row.values, settings.answer_field))) > 1
            question, source = _last_question(problem), fields.source_of(row, settings)
            prompt = Prompt(
                self._first_index + len(self.prompts) + len(read),
                text,
                token_ids,
                answer,
                source,
                level=level,
                row=fields.row_for_graders(row, question, source),
                origin=row.origin,
                problem=question,
            )
            if _is_too_long(prompt, settings):
                self.filtered += 1
                continue
            read.append((row, problem, prompt))
        words = (problem_words(row, settings) for row, _, _ in read)
        for row, problem, prompt in looked_for.kept(read, words):
            place = len(self.prompts)
            if prompt.index != self._first_index + place:  # an earlier one was dropped
                prompt = replace(prompt, index=self._first_index + place)
            encoded = (part.encode("utf-8") for part in (prompt.text, prompt.answer, prompt.source))
            for raw in (*encoded, np.array(prompt.token_ids, dtype="<i8").tobytes()):
                self.hashed.update(len(raw).to_bytes(8, "little") + raw)  # the length makes it unambiguous
            self.prompts.append(prompt)
            digest = blake2b(_identity(problem).encode(), digest_size=16).digest()
            if (first := self._places.setdefault(digest, place)) != place:
                self._repeated.append((place, first))
            if match := self._special.search(_problem_text(problem)):
                self.special.append(f"{match[0]} in {row.origin}")

    def repeats(self) -> Iterator[str]:
        """Lines for the log about problems that occur more than once."""
        repeated = [(self.prompts[place], self.prompts[first]) for place, first in self._repeated]
        if repeated:
            examples = ", ".join(f"{one.origin} is {first.origin}" for one, first in repeated[:3])
            yield f"warning: {len(repeated)} problems appear more than once: {examples}"
        differ = [(one, first) for one, first in repeated if one.answer.strip() != first.answer.strip()]
        for one, first in differ[:1]:
            answers = f"{one.origin} has {one.answer[:60]!r} and {first.origin} {first.answer[:60]!r}"
            yield f"warning: {len(differ)} of them with another answer: {answers}"


class _Where:
    """Checks rows against a set's `where` conditions, and counts what it left out."""

    def __init__(self, settings: ResolvedSet) -> None:
        self._settings, self._conditions = settings, [Condition.parse(text) for text in settings.where]
        self.met = self.left_out = 0
        self._unseen_fields = {condition.field for condition in self._conditions}

    def __call__(self, row: Row) -> bool:
        values = [fields.get_field(row.values, condition.field) for condition in self._conditions]
        pairs = list(zip(self._conditions, values, strict=True))
        self._unseen_fields -= {one.field for one, value in pairs if value is not None or one.field in row.values}
        meets = all(condition.holds(value) for condition, value in pairs)
        self.met += meets
        self.left_out += not meets
        return meets

    def check_fields(self) -> None:
        """Raise UserError for a field that no row had: it is misspelt, or belongs to another set."""
        if self._unseen_fields:
            raise UserError(
                f"{self._settings.path}: no row has the field '{min(self._unseen_fields)}' of"
                f" {fields.section_of(self._settings)}.where; for a training set without it set where=[] in its entry"
            )


def read_set(
    settings: ResolvedSet, advance: Advance, where: Callable[[Row], bool] = lambda row: True
) -> Iterator[list[Row]]:
    """The set's rows that meet `where`, in batches, at most `limit` in all. Calls `advance` with the number of rows
    that the caller has finished. Raises UserError if the set cannot be read."""
    rows = islice(filter(where, read_rows(settings.path, settings.subset, settings.split)), settings.limit or None)
    done = 0
    while batch := list(islice(rows, _BATCH)):
        yield batch
        done += len(batch)
        advance(done)


def load_train_sets(
    config: Config, tokenizer: PreTrainedTokenizerBase, evaluated: Mapping[str, ProblemSet]
) -> dict[str, ProblemSet]:
    """All sets to train on. Their prompts are numbered consecutively.

    Args:
        evaluated: evaluation sets, whose problems are handled according to `data.contamination`.

    Raises:
        UserError: as `load_set`; a step needs more problems of a set than it has; evaluation problems are trained on.
    """
    sets: dict[str, ProblemSet] = {}
    settings, held_out = train_set_configs(config), held_out_of(evaluated)
    for name, one in settings.items():
        first = sum(len(done.prompts) for done in sets.values())
        sets[name] = _load_train_set(config, one, tokenizer, held_out, first)
    refuse(config, contamination_notes(sets, evaluated))
    paths = ", ".join(one.path for one in settings.values())
    selection = selection_settings(config)
    if too_few := selection.too_few_prompts(sum(len(one.prompts) for one in sets.values()), paths):
        raise UserError(f"rollout.{too_few}")
    levels = np.concatenate([one.columns.level for one in sets.values()])
    # both only for what they raise: shares that do not fit, nothing to sort by
    make_order(set_sizes(sets), selection.set_weights, config.seed, selection.planned_prompts)
    order_key(config.data.order, config.data.order_by, len(levels), levels, lambda: levels)
    return sets


def _load_train_set(
    config: Config, settings: ResolvedSet, tokenizer: PreTrainedTokenizerBase, held_out: HeldOut, first_index: int
) -> ProblemSet:
    """The set from its cache; if it is not there, read it and write it to the cache."""
    drops = config.data.contamination == "drop"
    read = partial(load_set, settings, tokenizer, first_index=first_index, held_out=held_out, drops=drops)
    cache = PromptCache.of(config.data.cache_path, settings, tokenizer, f"{held_out.digest} {drops}")
    if cache is None:
        return read()

    def from_cache() -> ProblemSet | None:
        if (content := cache.read(first_index)) is None:
            return None
        prompts, columns, facts = content
        return ProblemSet(settings.key, prompts, columns, **facts | {"notes": tuple(facts["notes"])})

    if cached := from_cache():
        return cached
    with cache.turn() as is_first:
        if cached := from_cache():  # another process has written it meanwhile
            return cached
        loaded = read()
        if not is_first:
            return loaded
        line = cache.write(loaded.prompts, {fact: getattr(loaded, fact) for fact in _FACTS})
    loaded = from_cache() or loaded  # mapped, which takes less memory
    return replace(loaded, notes=(*loaded.notes, line))


def load_eval_sets(config: Config, tokenizer: PreTrainedTokenizerBase) -> dict[str, ProblemSet]:
    """All sets to evaluate on, each numbered from 0. Raises UserError as `load_set`."""
    return {name: load_set(settings, tokenizer) for name, settings in eval_set_configs(config).items()}


def set_sizes(sets: Mapping[str, ProblemSet]) -> dict[str, int]:
    return {name: len(one.prompts) for name, one in sets.items()}


def stop_token_ids(config: Config, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Tokens that end a completion besides the tokenizer's end of sequence: those of the settings and of the model's
    files, and the end of turn of every chat template in use. Raises UserError for a setting, or as `model_ends`."""
    for token in config.rollout.sampling.stop_token_ids:
        if token >= len(tokenizer):
            raise UserError(f"rollout.sampling.stop_token_ids: {token} is no token of the model's {len(tokenizer)}")
    sets: Sequence[ResolvedSet] = [*train_set_configs(config).values(), *eval_set_configs(config).values()]
    of_files = model_ends(config.model.hf_path, tokenizer, config.rollout.engine)
    tokens = [*config.rollout.sampling.stop_token_ids, *of_files]
    for one in sets:
        tokens += turn_end_tokens(one.template, tokenizer)
    return tuple(dict.fromkeys(tokens))


def contamination_notes(train: Mapping[str, ProblemSet], evaluated: Mapping[str, ProblemSet]) -> list[str]:
    """A line for each evaluation set some of whose problems are trained on."""
    per_set = ((f"set '{name}'", one.held_out) for name, one in train.items() if not one.dropped)
    return [line for where, counts in per_set for line in trained_on(where, counts, evaluated)]


def trained_on(where: str, counts: Mapping[str, int], evaluated: Mapping[str, ProblemSet]) -> list[str]:
    """A line for each evaluation set in `counts`, which has the number of its problems that are trained on."""
    return [
        f"warning: {count} of the {len(evaluated[name].words)} problems of the evaluation set '{name}' are trained on"
        f" ({where}): its scores will be too high"
        for name, count in counts.items()
    ]


def refuse(config: Config, warnings: Sequence[str]) -> None:
    """Raise UserError if there are `warnings` of contamination and the settings do not allow it."""
    if config.data.contamination == "refuse" and warnings:
        raise UserError(f"{warnings[0].removeprefix('warning: ')}, and data.contamination=refuse")


def held_out_of(evaluated: Mapping[str, ProblemSet]) -> HeldOut:
    """The problems of all evaluation sets, to be looked for in training sets."""
    held_out = HeldOut()
    for name, one in evaluated.items():
        held_out.add(name, one.words)
    return held_out


def _is_too_long(prompt: Prompt, settings: ResolvedSet) -> bool:
    """Whether to leave the prompt out; raises UserError if a prompt that is too long must not be left out."""
    count = len(prompt.token_ids)
    if not count:
        raise UserError(f"{prompt.origin}: the prompt has no tokens under the model's tokenizer")
    if count > settings.max_prompt_tokens and settings.overlong != "filter":
        raise UserError(
            f"{prompt.origin}: the prompt has {count} tokens, more than {settings.max_prompt_tokens_key} ="
            f" {settings.max_prompt_tokens}; raise it, or set overlong=filter (for an evaluation set in its own entry"
            " under data.eval_sets) to leave such problems out"
        )
    return count > settings.max_prompt_tokens


def _turns(problem: str | fields.Messages) -> fields.Messages:
    return [{"role": "user", "content": problem}] if isinstance(problem, str) else problem


def _identity(problem: str | fields.Messages) -> str:
    """The text by which two problems are compared; a single message is compared by its content."""
    turns = [(turn["role"], " ".join(turn["content"].split())) for turn in _turns(problem)]
    return turns[0][1] if len(turns) == 1 else "\n".join(f"{role}: {text}" for role, text in turns)


def _problem_text(problem: str | fields.Messages) -> str:
    return "\n".join(turn["content"] for turn in _turns(problem))


def _last_question(problem: str | fields.Messages) -> str:
    turns = _turns(problem)
    return next((turn["content"] for turn in reversed(turns) if turn["role"] == "user"), turns[-1]["content"])


def problem_words(row: Row, settings: ResolvedSet) -> Words:
    """The words of the row's problem, for contamination."""
    return words_of(_problem_text(fields.problem_of(row, settings)))
