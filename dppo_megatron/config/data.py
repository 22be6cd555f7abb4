"""Settings of problem sets: where their rows are, how a row is read, and how it is shown to the model.

Every set, for training or evaluation, has the same settings and inherits from `data` what it leaves out
(`resolved_sets.py`). A job on one file needs one line, and a job on nine sets lists only what differs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from operator import ge, gt, le, lt
from typing import Any, Literal, TypeAlias

from dppo_megatron.config.ranges import COUNT, FREE_AT_RESUME, ranged
from dppo_megatron.config.reward import SetRewardConfig
from dppo_megatron.types import UserError

OrderName: TypeAlias = Literal["shuffled", "file", "easy_first", "hard_first"]
OrderBy: TypeAlias = Literal["level", "pass_rate"]
_FORM = re.compile(r"\s*(\S.*?)\s+(not in|in|==|=|!=|>=|<=|>|<)\s+(.*\S)\s*")
_PART = re.compile(r"""\s*("[^"]*"|'[^']*'|[^,]*?)\s*(?:,|$)""")
_QUOTED = re.compile(r"""^(['"])(.*)\1$""")
_ORDER: dict[str, Callable[[Fraction, Fraction], bool]] = {">=": ge, "<=": le, ">": gt, "<": lt}
_NUMBER = re.compile(r"[+-]?(\d{1,30}/0*[1-9]\d{0,30}|(\d{1,30}(\.\d{0,30})?|\.\d{1,30})(e[+-]?\d{1,3})?)", re.I)


@dataclass
class SetConfig:
    """One problem set. A setting that is null is taken from the setting of the same name in `data`, explained there."""

    path: str = ""
    """A file (.jsonl, .json, .csv, .tsv, .parquet), a directory saved by `datasets` or downloaded from the Hugging Face
    hub, or `hub:owner/name`, optionally with `@revision`."""
    split: str = ""
    """Split of a directory or a hub set; empty: the only one it has."""
    subset: str = ""
    """Configuration of a hub set (gsm8k: main); empty: its default."""
    limit: int = ranged(0, COUNT)
    """Use only this many rows, the first ones that meet `where`; 0: all."""
    where: list[str] | None = None
    """Use only rows that meet all of these conditions: `type != proof`, `solve_rate >= 0.1`, `type in [a, b]`."""
    problem_field: str | None = None
    answer_field: str | None = None
    answer_from: Literal["", "boxed", "last", "all", "hashes"] | None = None
    source_field: str | None = None
    level_field: str | None = None
    level_is: Literal["difficulty", "solve_rate"] | None = None
    template: str | None = None
    prompt_template: str | None = None
    system_prompt: str | None = None
    apply_chat_template: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_prompt_tokens: int | None = ranged(None, "[1, 100000000]")
    overlong: Literal["error", "filter"] | None = None
    reward: SetRewardConfig = field(default_factory=SetRewardConfig)
    """Rewards of this set, graded in processes and with limits of their own; missing settings are as in `reward`."""


@dataclass
class TrainSetConfig(SetConfig):
    """One set to train on."""

    weight: float = ranged(1.0, "(0, 1e9]", why="leave the set out to train without it")
    """With data.mixing=weighted: this set's share of every step, relative to the weights of the other sets."""


@dataclass
class EvalSetConfig(SetConfig):
    """One set to evaluate on. A setting below that is null is taken from that of the same name in `eval`."""

    samples: int | None = ranged(None, "[1, 65536]")
    temperature: float | None = ranged(None, "[0, 100]")
    top_p: float | None = ranged(None, "(0, 1]")
    top_k: int | None = ranged(None, "[0, 10000000]")
    max_completion_tokens: int | None = ranged(None, "[0, 100000000]")


@dataclass
class DataConfig:
    page = "data.md"
    train_path: str = ""
    """Path of the training problems: short for train_sets with one entry."""
    eval_paths: dict[str, str] = field(default_factory=dict, metadata=FREE_AT_RESUME)
    """Paths of evaluation sets by name: short for eval_sets."""
    train_sets: dict[str, TrainSetConfig] = field(default_factory=dict)
    """Training sets by name, if there are several or one needs more settings than its path."""
    eval_sets: dict[str, EvalSetConfig] = field(default_factory=dict, metadata=FREE_AT_RESUME)
    """Evaluation sets by name. Scores are reported as eval/<name>/..."""
    mixing: Literal["concatenate", "weighted"] = "concatenate"
    """`concatenate`: all sets form one; a rest of a shuffled epoch that is smaller than a step is skipped. `weighted`:
    every step takes from each set in proportion to its weight, and each set has its own epochs."""
    order: OrderName = "shuffled"
    """Order of the problems of an epoch (with mixing=weighted, inside each set). `shuffled`: a new random order every
    epoch. `file`: the order in the file. `easy_first` and `hard_first` sort by `order_by`: ties in random order,
    problems without a value last. Every order but `shuffled` is a row of the bias ledger. No problem is left out."""
    order_by: OrderBy = "level"
    """How easy a problem is: by its `level`, from `level_field`, or by `pass_rate`, the model's mean reward on it
    (clipped to [0, 1]) as known when the epoch begins. The first epoch of `pass_rate` is shuffled."""
    contamination: Literal["warn", "drop", "refuse"] = "warn"
    """What to do about training problems that are also in an evaluation set, even if their spelling or instruction
    differs: warn, leave them out of training, or refuse to start."""
    cache_path: str = field(default="~/.cache/dppo_megatron", metadata=FREE_AT_RESUME)
    """Directory that caches the tokenized prompts of training sets of 1 MiB and more, for all ranks of a machine and
    later starts. Machines may share it, and it may be deleted while no job runs. Empty: no cache."""
    problem_field: str = "problem"
    """Field of a row that holds the problem's text or a list of chat messages. Dots reach into nested rows."""
    answer_field: str = "answer"
    """Field of a row that holds the reference answer, such as reward_model.ground_truth."""
    where: list[str] = field(default_factory=list)
    """Train only on rows that meet all of these conditions: `type != proof`, `solve_rate >= 0.1`, `type in [number,
    expression]`. Other rows are left out and counted. Evaluation sets do not inherit this."""
    answer_from: Literal["", "boxed", "last", "all", "hashes"] = ""
    """Which part of the answer field is the answer: boxed (the last \\boxed{} of a solution), last (the last item of a
    list), all (its items, joined), hashes (what follows ####); empty: the text. Rows without one are left out."""
    source_field: str = "source"
    """Field of a row that names its subset. Rows may lack it."""
    level_field: str = ""
    """Field of a row that holds its difficulty (a number, or text like `Level 3`). Rows may lack it. Empty: `level`, or
    `difficulty` where there is no `level`."""
    level_is: Literal["difficulty", "solve_rate"] = "difficulty"
    """`difficulty`: a higher level is harder. `solve_rate`: a higher level is easier; 1 - level is then used."""
    template: str = ""
    """A named preset for the four settings below (qwen3_nothink, qwen3_think, chat_boxed, plain_boxed, r1); each of
    them that is set overrides the preset. A set's own settings, then its own template, override both."""
    prompt_template: str | None = None
    """The prompt's text; {problem}: the problem, or the last user turn. null: the template's, or {problem} alone."""
    system_prompt: str | None = None
    """A system turn before the user's; needs the chat template."""
    apply_chat_template: bool | None = None
    """Wrap the prompt as a user turn of the tokenizer's chat template, with the generation prompt appended."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Arguments of the chat template, such as {enable_thinking: false}. They replace all of the preset's."""
    max_prompt_tokens: int = ranged(1024, "[1, 100000000]")
    """Most tokens of a prompt; `overlong` decides what happens to longer ones."""
    overlong: Literal["error", "filter"] = "error"
    """Training prompts that are too long: `error` ends the run before it starts, `filter` leaves them out, counts them
    and adds a row to the bias ledger. Evaluation sets do not inherit this; their default is error."""


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition of `where` on one field of a row: `question_type != proof`, `solve_rate >= 0.1`.

    Example:
        Condition.parse("solve_rate >= 1/8").holds("0.2")   # True: numbers, also in text, and fractions
        Condition.parse("type in [proof, mcq]").holds(None) # False: a row without the field
        Condition.parse("type != proof").holds(None)        # True
    """

    field: str
    """Dots reach into nested rows."""
    operator: str
    values: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Raises UserError if `text` is not a condition."""
        match = _FORM.fullmatch(text)
        operator, value = (match[2], match[3]) if match else ("", "")
        listed = value.startswith("[") and value.endswith("]")
        parts = _PART.findall(value[1:-1])[:-1] if listed else [value]  # the last match is empty, at the end
        if match is None or listed != operator.endswith("in") or not parts or not all(parts):
            raise UserError(
                f"'{text}' is not a condition on a field; expected FIELD OPERATOR VALUE with spaces between them, such"
                " as 'type != proof', 'solve_rate >= 0.1' or 'type in [number, expression]'"
            )
        if operator in _ORDER and _number(value) is None:
            raise UserError(f"'{text}': {operator} compares numbers, and '{value}' is not one")
        return cls(match[1], {"=": "=="}.get(operator, operator), tuple(_QUOTED.sub(r"\2", part) for part in parts))

    def holds(self, value: Any) -> bool:
        """Whether a field with this value meets the condition; None or NaN: the row does not have the field."""
        value = None if isinstance(value, (float, Decimal)) and math.isnan(value) else value  # pandas' missing value
        if self.operator in _ORDER:
            number, bound = _number(value), _number(self.values[0])
            return number is not None and bound is not None and _ORDER[self.operator](number, bound)
        is_listed = any(_is(value, wanted) for wanted in self.values)
        return is_listed != (self.operator in ("!=", "not in"))


def _is(value: Any, wanted: str) -> bool:
    if value is None or isinstance(value, bool):
        return wanted.lower() in (("null", "none") if value is None else (str(value).lower(),))
    number = _number(value)
    return number == _number(wanted) if number is not None else isinstance(value, str) and value.strip() == wanted


def _number(value: Any) -> Fraction | None:
    """A number, or text that is one: 0.5, "0.5", "3/8"."""
    if isinstance(value, int):
        return None if isinstance(value, bool) else Fraction(value)
    if isinstance(value, (float, Decimal)):
        return Fraction(str(value)) if math.isfinite(value) else None  # as it is written: 0.1 is 1/10
    text = value.strip() if isinstance(value, str) else ""
    return Fraction(text) if _NUMBER.fullmatch(text) else None
