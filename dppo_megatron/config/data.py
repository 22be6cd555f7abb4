"""Settings of problem sets: where their rows are, how a row is read, and how it is shown to the model.

Every set, for training or evaluation, has the same settings and inherits from `data` what it leaves out
(`resolved_sets.py`). A job on one file needs one line, and a job on nine sets lists only what differs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from dppo_megatron.config.ranges import COUNT, FREE_AT_RESUME, ranged
from dppo_megatron.config.reward import SetRewardConfig

OrderName: TypeAlias = Literal["shuffled", "file", "easy_first", "hard_first"]
OrderBy: TypeAlias = Literal["level", "pass_rate"]


@dataclass
class SetConfig:
    """One problem set. Where a setting is null, that of the same name in `data` holds, which also explains it."""

    path: str = ""
    """A file (.jsonl, .json, .csv, .tsv, .parquet), a directory saved by `datasets` or downloaded from the hub, or
    `hub:owner/name` (with `@revision`)."""
    split: str = ""
    """Split of a directory or a hub set; empty: the only one there is."""
    subset: str = ""
    """Configuration of a hub set (gsm8k: main); empty: its default."""
    limit: int = ranged(0, COUNT)
    """The first so many rows only, of those that meet `where`; 0: all."""
    where: list[str] | None = None
    """Conditions that a row of the set meets, all of them: `type != proof`, `solve_rate >= 0.1`, `type in [a, b]`."""
    problem_field: str | None = None
    answer_field: str | None = None
    answer_from: Literal["", "boxed", "last", "hashes"] | None = None
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
    """Rewards of its own, in processes and with limits of their own; what it leaves out is as in `reward`."""


@dataclass
class TrainSetConfig(SetConfig):
    """One set to train on."""

    weight: float = ranged(1.0, "(0, 1e9]", why="leave the set out to train without it")
    """Its share of a step under data.mixing = weighted, relative to the other sets."""


@dataclass
class EvalSetConfig(SetConfig):
    """One set to evaluate on. Where a setting below is null, that of the same name in `eval` holds and explains it."""

    samples: int | None = ranged(None, "[1, 65536]")
    temperature: float | None = ranged(None, "[0, 100]")
    top_p: float | None = ranged(None, "(0, 1]")
    top_k: int | None = ranged(None, "[0, 10000000]")
    max_completion_tokens: int | None = ranged(None, "[0, 100000000]")


@dataclass
class DataConfig:
    page = "data.md"
    train_path: str = ""
    """The training problems, where they are one set: short for train_sets with one entry."""
    eval_paths: dict[str, str] = field(default_factory=dict, metadata=FREE_AT_RESUME)
    """Evaluation sets, name to path: short for eval_sets."""
    train_sets: dict[str, TrainSetConfig] = field(default_factory=dict)
    """Training sets by name, where there are several or they differ in more than the path."""
    eval_sets: dict[str, EvalSetConfig] = field(default_factory=dict, metadata=FREE_AT_RESUME)
    """Evaluation sets by name. Scores are reported as eval/<name>/..."""
    mixing: Literal["concatenate", "weighted"] = "concatenate"
    """`concatenate`: all sets are one; at the end of a shuffled epoch fewer problems than a step takes are skipped.
    `weighted`: every step takes from each set in proportion to its weight, and each set has epochs of its own."""
    order: OrderName = "shuffled"
    """Of the problems of an epoch. `shuffled`: at random, anew in each. `file`: as they stand there. The others sort by
    `order_by`, equals at random, and problems that say nothing come last. All but `shuffled` are a row of the bias
    ledger; no problem is left out. With `weighted`, the order inside each set."""
    order_by: OrderBy = "level"
    """What makes a problem easy: its `level`, from `level_field`, or the model's mean reward on it (held to [0, 1]) as
    known when the epoch begins. The first epoch of `pass_rate` is shuffled."""
    contamination: Literal["warn", "drop", "refuse"] = "warn"
    """What happens to training problems that are problems of an evaluation set, also written otherwise or with an
    instruction: a warning, left out of training, or an error."""
    cache_path: str = field(default="~/.cache/dppo_megatron", metadata=FREE_AT_RESUME)
    """Directory for the prompts of training sets of 1 MiB and more, which a machine's ranks share and the next start
    maps instead of reading the set; machines may share it. It may be deleted while no job runs. Empty: none are
    kept."""
    problem_field: str = "problem"
    """Field of a row that holds the problem's text or a list of chat messages; dots reach into nested rows."""
    answer_field: str = "answer"
    """Field of a row that holds the reference answer (reward_model.ground_truth)."""
    where: list[str] = field(default_factory=list)
    """Conditions that a row of a training set meets, all of them: `type != proof`, `solve_rate >= 0.1`, `type in
    [number, expression]`. Other rows are left out and counted. Evaluation sets have only their own."""
    answer_from: Literal["", "boxed", "last", "hashes"] = ""
    """What of the answer field is the answer: boxed (the last \\boxed{} of a solution), last (the last item of a list),
    hashes (what follows ####); empty: all of it. Rows without one are left out and counted."""
    source_field: str = "source"
    """Field of a row that names its subset; a row may lack it."""
    level_field: str = ""
    """Field of a row that says how hard it is (a number, or text like `Level 3`); a row may lack it. Empty: `level`, or
    `difficulty` where there is no `level`."""
    level_is: Literal["difficulty", "solve_rate"] = "difficulty"
    """Whether a higher level is harder, or easier as a solve rate is; levels are then 1 - rate."""
    template: str = ""
    """A named preset for the four settings below (qwen3_nothink, qwen3_think, chat_boxed, plain_boxed, r1); those that
    are set as well replace the preset's. A set's own settings, then its template, go before these."""
    prompt_template: str | None = None
    """The prompt's text; {problem} stands for the problem, or for the last user turn of a list of messages. null: the
    template's, or {problem} alone."""
    system_prompt: str | None = None
    """A system turn before the user's; needs the chat template."""
    apply_chat_template: bool | None = None
    """Wrap the prompt as a user turn of the tokenizer's chat template, with the generation prompt appended."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Handed to the chat template (enable_thinking: false). Replaces the preset's as a whole."""
    max_prompt_tokens: int = ranged(1024, "[1, 100000000]")
    """Longest prompt."""
    overlong: Literal["error", "filter"] = "error"
    """A longer prompt is an error before the run starts, or is filtered: counted, and a row of the bias ledger. Of
    training sets; evaluation sets have only their own, else error."""
