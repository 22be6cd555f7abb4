"""Settings of problem sets: where their rows are, how a row is read, and how it is shown to the model.

Every set, for training or evaluation, has the same settings. What a set leaves out it takes from `data` itself, so a
job on one file needs one line, and a job on nine sets says only what differs from set to set.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:  # the schema imports this module
    from dppo_megatron.config.schema import Config


@dataclass
class SetConfig:
    """One problem set. A setting that is null is taken from the one of the same name in `data`."""

    path: str = ""
    """A file (.jsonl, .json, .csv, .parquet), a directory saved by `datasets`, or `hub:owner/name`."""
    split: str = ""
    """Split of a `datasets` directory or a hub set; empty: the only one there is."""
    subset: str = ""
    """Configuration of a hub set (gsm8k: main); empty: its default."""
    limit: int = 0
    """The first so many problems only; 0: all."""
    problem_field: str | None = None
    """Field of a row that holds the problem's text or a list of chat messages; dots reach into nested rows."""
    answer_field: str | None = None
    """Field of a row that holds the reference answer (reward_model.ground_truth)."""
    source_field: str | None = None
    """Field of a row that names its subset; a row may lack it."""
    level_field: str | None = None
    """Field of a row that says how hard it is (a number, or text like `Level 3`); a row may lack it."""
    template: str | None = None
    """A named preset for the four settings below; those that are set as well replace the preset's."""
    prompt_template: str | None = None
    """The prompt's text; {problem} stands for the problem."""
    system_prompt: str | None = None
    """A system turn before the user's; needs the chat template."""
    apply_chat_template: bool | None = None
    """Wrap the prompt as a user turn of the tokenizer's chat template, with the generation prompt appended."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Handed to the chat template (enable_thinking: false)."""
    max_prompt_tokens: int | None = None
    """Longest prompt of this set."""
    overlong: str | None = None
    """What happens to a longer prompt: error or filter."""


@dataclass
class TrainSetConfig(SetConfig):
    """One set to train on."""

    weight: float = 1.0
    """Its share of a step under data.mixing = weighted, relative to the other sets."""


@dataclass
class EvalSetConfig(SetConfig):
    """One set to evaluate on. A setting below that is null is taken from the one of the same name in `eval`."""

    samples: int | None = None
    """Completions of every problem."""
    temperature: float | None = None
    """0 is greedy."""
    top_p: float | None = None
    """Smallest set of tokens with this probability."""
    top_k: int | None = None
    """The k most likely tokens; 0: all."""
    max_completion_tokens: int | None = None
    """Longest answer; 0: as rollout.max_completion_tokens."""
    grader: str | None = None
    """Grader of this set, a built-in name or `module:function`; empty: as in training."""


@dataclass
class DataConfig:
    train_path: str = ""
    """The training problems, where they are one set: short for train_sets with one entry."""
    eval_paths: dict[str, str] = field(default_factory=dict)
    """Evaluation sets, name to path: short for eval_sets."""
    train_sets: dict[str, TrainSetConfig] = field(default_factory=dict)
    """Training sets by name, where there are several or they differ in more than the path."""
    eval_sets: dict[str, EvalSetConfig] = field(default_factory=dict)
    """Evaluation sets by name. Scores are reported as eval/<name>/..."""
    mixing: Literal["concatenate", "weighted"] = "concatenate"
    """`concatenate`: an epoch is every problem of every set once. `weighted`: every step takes from each set in
    proportion to its weight, and each set has epochs of its own."""
    problem_field: str = "problem"
    """Field of a row that holds the problem's text or a list of chat messages; dots reach into nested rows."""
    answer_field: str = "answer"
    """Field of a row that holds the reference answer (reward_model.ground_truth)."""
    source_field: str = "source"
    """Field of a row that names its subset; a row may lack it."""
    level_field: str = "level"
    """Field of a row that says how hard it is (a number, or text like `Level 3`); a row may lack it."""
    template: str = ""
    """A named preset for the four settings below; those that are set as well replace the preset's."""
    prompt_template: str = "{problem}"
    """The prompt's text; {problem} stands for the problem."""
    system_prompt: str = ""
    """A system turn before the user's; needs the chat template."""
    apply_chat_template: bool = False
    """Wrap the prompt as a user turn of the tokenizer's chat template, with the generation prompt appended."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Handed to the chat template (enable_thinking: false)."""
    max_prompt_tokens: int = 1024
    """Longest prompt."""
    overlong: Literal["error", "filter"] = "error"
    """A longer prompt is an error before the run starts, or is filtered: counted, and a row of the bias ledger."""


def eval_set_configs(config: Config) -> dict[str, EvalSetConfig]:
    """Every evaluation set by name, those of `data.eval_paths` too, with each null filled from `eval` or `data`.

    `max_completion_tokens` is then never 0 and `grader` never null (empty: as in training).
    """
    filled = {}
    sets = {name: EvalSetConfig(path=path) for name, path in config.data.eval_paths.items()} | config.data.eval_sets
    for name, given in sets.items():
        values: dict[str, Any] = {
            item.name: getattr(given, item.name)
            if getattr(given, item.name) is not None
            else getattr(config.eval, item.name, getattr(config.data, item.name, ""))
            for item in fields(EvalSetConfig)
        }
        values["max_completion_tokens"] = values["max_completion_tokens"] or config.rollout.max_completion_tokens
        filled[name] = EvalSetConfig(**values)
    return filled
