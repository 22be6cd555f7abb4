"""Settings of problem sets: where their rows are, how a row is read, and how it is shown to the model.

Every set, for training or evaluation, has the same settings and inherits from `data` what it leaves out. A job on one
file needs one line, and a job on nine sets says only what differs.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dppo_megatron.config.paths import check_file_or_directory
from dppo_megatron.config.ranges import COUNT, ranged
from dppo_megatron.config.templates import PLAIN, TEMPLATES, Template
from dppo_megatron.types import UserError

if TYPE_CHECKING:
    from dppo_megatron.config.schema import Config


@dataclass
class SetConfig:
    """One problem set. A setting that is null is taken from the one of the same name in `data`."""

    path: str = ""
    """A file (.jsonl, .json, .csv, .tsv, .parquet), a directory saved by `datasets` or downloaded from the hub, or
    `hub:owner/name` (with `@revision`)."""
    split: str = ""
    """Split of a directory or a hub set; empty: the only one there is."""
    subset: str = ""
    """Configuration of a hub set (gsm8k: main); empty: its default."""
    limit: int = ranged(0, COUNT)
    """The first so many rows only; 0: all."""
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
    max_prompt_tokens: int | None = ranged(None, "[1, 100000000]")
    """Longest prompt of this set."""
    overlong: str | None = None
    """What happens to a longer prompt: error or filter."""


@dataclass
class TrainSetConfig(SetConfig):
    """One set to train on."""

    weight: float = ranged(1.0, "(0, 1e9]", why="leave the set out to train without it")
    """Its share of a step under data.mixing = weighted, relative to the other sets."""


@dataclass
class EvalSetConfig(SetConfig):
    """One set to evaluate on. A setting below that is null is taken from the one of the same name in `eval`."""

    samples: int | None = ranged(None, "[1, 65536]")
    """Completions of every problem."""
    temperature: float | None = ranged(None, "[0, 100]")
    """0 is greedy."""
    top_p: float | None = ranged(None, "(0, 1]")
    """Smallest set of tokens with this probability."""
    top_k: int | None = ranged(None, "[0, 10000000]")
    """The k most likely tokens; 0: all."""
    max_completion_tokens: int | None = ranged(None, "[0, 100000000]")
    """Longest answer; 0: as rollout.sampling.max_completion_tokens."""
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
    level_field: str = ""
    """Field of a row that says how hard it is (a number, or text like `Level 3`); a row may lack it. Empty: `level`, or
    `difficulty` where there is no `level`."""
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
    """A longer prompt is an error before the run starts, or is filtered: counted, and a row of the bias ledger."""


@dataclass(frozen=True, slots=True)
class ResolvedSet:
    """One problem set with all inherited settings resolved."""

    key: str
    """The settings that name it, for messages and permissions: `data.train_path`, `data.eval_sets.aime24`."""
    path: str
    """As in `SetConfig`; so are the fields below without a description of their own."""
    split: str
    """Empty: the only one."""
    subset: str
    """Empty: the default one."""
    limit: int
    """Rows; 0: all."""
    problem_field: str
    """Dots reach into nested rows."""
    answer_field: str
    """Dots reach into nested rows."""
    source_field: str
    """Empty: none is read."""
    level_field: str
    """Empty: `level`, or `difficulty`."""
    template: Template
    """The four settings of a template, with presets resolved."""
    max_prompt_tokens: int
    """Longest prompt."""
    max_prompt_tokens_key: str
    """The setting it came from."""
    overlong: str
    """`error` or `filter`."""

    @property
    def path_key(self) -> str:
        """The setting that holds the path."""
        return f"{self.key}.path" if "_sets." in self.key else self.key


@dataclass(frozen=True, slots=True)
class ResolvedTrainSet(ResolvedSet):
    """A set to train on."""

    weight: float
    """Relative share of a step, above 0; read where `data.mixing` is weighted."""


@dataclass(frozen=True, slots=True)
class ResolvedEvalSet(ResolvedSet):
    """A set to evaluate on, with how it is sampled."""

    samples: int
    """Completions of every problem."""
    temperature: float
    """0 is greedy."""
    top_p: float
    """Smallest set of tokens with this probability."""
    top_k: int
    """The k most likely tokens; 0: all."""
    max_completion_tokens: int
    """Above 0: `rollout.sampling.max_completion_tokens` where nobody says another."""
    grader: str
    """Empty: as in training."""


def train_set_configs(config: Config) -> dict[str, ResolvedTrainSet]:
    """The training sets by name, in the order of the config; `data.train_path` becomes the set `train`."""
    data = config.data
    named = {name: (f"data.train_sets.{name}", entry) for name, entry in data.train_sets.items()}
    if data.train_path:
        named = {"train": ("data.train_path", TrainSetConfig(path=data.train_path))} | named
    return {
        name: ResolvedTrainSet(**_resolved(key, entry, data), weight=entry.weight)
        for name, (key, entry) in named.items()
    }


def eval_set_configs(config: Config) -> dict[str, ResolvedEvalSet]:
    """The evaluation sets by name; sampling settings that a set leaves out come from `eval`."""
    data, defaults = config.data, config.eval
    named = {name: (f"data.eval_paths.{name}", EvalSetConfig(path=path)) for name, path in data.eval_paths.items()}
    named |= {name: (f"data.eval_sets.{name}", entry) for name, entry in data.eval_sets.items()}
    sets = {}
    for name, (key, entry) in named.items():
        longest = defaults.max_completion_tokens if entry.max_completion_tokens is None else entry.max_completion_tokens
        sets[name] = ResolvedEvalSet(
            **_resolved(key, entry, data),
            samples=defaults.samples if entry.samples is None else entry.samples,
            temperature=defaults.temperature if entry.temperature is None else entry.temperature,
            top_p=defaults.top_p if entry.top_p is None else entry.top_p,
            top_k=defaults.top_k if entry.top_k is None else entry.top_k,
            max_completion_tokens=longest or config.rollout.sampling.max_completion_tokens,
            grader=entry.grader or "",
        )
    return sets


def train_set_weights(config: Config) -> dict[str, float] | None:
    """Weight of each training set; None where they are shuffled together."""
    if config.data.mixing == "concatenate":
        return None
    return {name: one.weight for name, one in train_set_configs(config).items()}


def example_set_config(config: Config) -> ResolvedSet:
    """The warm start's worked solutions, as a set that inherits all settings."""
    return ResolvedSet(
        **_resolved("warm_start.examples_path", SetConfig(path=config.warm_start.examples_path), config.data)
    )


def longest_prompt_tokens(config: Config, *, training: bool = False) -> int:
    """The largest `max_prompt_tokens` of all sets, or of those that are trained on; of `data` where there are none."""
    sets: list[ResolvedSet] = list(train_set_configs(config).values())
    sets += [] if training else eval_set_configs(config).values()
    return max((one.max_prompt_tokens for one in sets), default=config.data.max_prompt_tokens)


def check_data(config: Config, *, trains: bool = True) -> None:
    """Raise `UserError` for set settings that are out of range, contradictory or missing.

    Args:
        trains: False for an evaluation alone, which reads no training set.
    """
    data = config.data
    _check_layer("data", data)
    if data.train_path and data.train_sets and trains:
        raise UserError(
            f"data.train_path and data.train_sets ({', '.join(data.train_sets)}) are both set: train_path is short for"
            " a single training set. To train on all of them, name it too (data.train_sets.NAME.path); else drop one"
            " (data.train_path='' or data.train_sets={})"
        )
    for name in data.eval_paths.keys() & data.eval_sets.keys():
        raise UserError(f"data.eval_paths.{name} and data.eval_sets.{name} are both the set '{name}'; drop one")
    for section, entries in (("train_sets", data.train_sets), ("eval_sets", data.eval_sets)):
        for name, entry in entries.items():
            _check_layer(f"data.{section}.{name}", entry)
    for name, entry in data.train_sets.items():
        _check_weight(f"data.train_sets.{name}.weight", entry.weight, data.mixing)
    sets: list[ResolvedSet] = [*eval_set_configs(config).values()]
    if trains:
        sets = [*train_set_configs(config).values(), *sets]
    if trains and config.warm_start.steps:
        sets.append(example_set_config(config))
    for one in sets:
        _check_resolved(one)


def _resolved(key: str, entry: SetConfig, data: DataConfig) -> dict[str, Any]:
    """The fields of `ResolvedSet`: the set's own settings, then those of `data`."""

    def value(name: str) -> Any:
        own = getattr(entry, name)
        return getattr(data, name) if own is None else own

    return {
        "key": key,
        "path": entry.path,
        "split": entry.split,
        "subset": entry.subset,
        "limit": entry.limit,
        "problem_field": value("problem_field"),
        "answer_field": value("answer_field"),
        "source_field": value("source_field"),
        "level_field": value("level_field"),
        "template": _template(entry, data),
        "max_prompt_tokens": value("max_prompt_tokens"),
        "max_prompt_tokens_key": f"{'data' if entry.max_prompt_tokens is None else key}.max_prompt_tokens",
        "overlong": value("overlong"),
    }


def _template(entry: SetConfig, data: DataConfig) -> Template:
    """Each of the four settings from the first of: the set, its template, `data`, data's template."""
    chosen: dict[str, Any] = {}
    for item in fields(Template):
        layers = (entry, TEMPLATES.get(entry.template or ""), data, TEMPLATES.get(data.template), PLAIN)
        values = (getattr(layer, item.name) for layer in layers if layer is not None)
        chosen[item.name] = next(value for value in values if value is not None)
    return Template(**chosen)


_RESERVED = {
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "conversation",
    "documents",
    "max_length",
    "messages",
    "padding",
    "processor_kwargs",
    "return_assistant_tokens_mask",
    "return_dict",
    "return_tensors",
    "tokenize",
    "tokenizer_kwargs",
    "tools",
    "truncation",
}
"""Arguments of `apply_chat_template` that this code sets itself."""


def _check_layer(key: str, layer: SetConfig | DataConfig) -> None:
    if layer.template and layer.template not in TEMPLATES:
        near = difflib.get_close_matches(layer.template, TEMPLATES, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(TEMPLATES)}"
        raise UserError(f"{key}.template = '{layer.template}': no such template; {hint}")
    if layer.prompt_template is not None and "{problem}" not in layer.prompt_template:
        raise UserError(f"{key}.prompt_template = {layer.prompt_template!r}: must contain {{problem}}")
    if layer.overlong not in (None, "error", "filter"):
        raise UserError(f"{key}.overlong = '{layer.overlong}': must be error or filter")
    for name in ("problem_field", "answer_field"):
        if getattr(layer, name) == "":
            raise UserError(f"{key}.{name} is empty: it must name a field of the rows")
    for name in (layer.chat_template_kwargs or {}).keys() & _RESERVED:
        raise UserError(f"{key}.chat_template_kwargs.{name} is not for the chat template: the trainer sets it itself")


def _check_weight(key: str, weight: float, mixing: str) -> None:
    if mixing != "weighted" and weight != 1.0:
        raise UserError(f"{key} = {weight} has no effect while data.mixing = {mixing}; set data.mixing=weighted")


def _check_resolved(one: ResolvedSet) -> None:
    if not one.path:
        raise UserError(f"{one.path_key} is not set: a file, a directory or hub:owner/name")
    template = one.template
    if not template.apply_chat_template:
        for name, value in (("system_prompt", template.system_prompt), ("kwargs", template.chat_template_kwargs)):
            if value:
                setting = "chat_template_kwargs" if name == "kwargs" else name
                raise UserError(
                    f"{one.key}: {setting} = {value!r} needs the chat template; set apply_chat_template=true, or"
                    f" {setting} back to {'{}' if name == 'kwargs' else 'nothing'}"
                )
    _check_path(one)


def _check_path(one: ResolvedSet) -> None:
    if one.path.startswith("hub:"):
        return
    check_file_or_directory(one.path_key, one.path)
    is_file = Path(one.path).is_file()
    for name, value in (("split", one.split), ("subset", one.subset)):
        if is_file and value:
            raise UserError(
                f"{one.key}.{name} = '{value}' has no effect on a file; it belongs to directories and the hub"
            )
