"""Problem sets with all inherited settings resolved, the named prompt templates, and checks of both.

A preset fixes all four template settings, so a set that names one is independent of the templates in `data`. The texts
ask for the final answer in a box because the `math` grader reads the last box.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from dppo_megatron.config.data import Condition, DataConfig, EvalSetConfig, SetConfig, TrainSetConfig
from dppo_megatron.config.paths import check_set
from dppo_megatron.config.ranges import check_choice
from dppo_megatron.config.reward import RewardConfig, SetRewardConfig
from dppo_megatron.config.schema import Config, EvalConfig
from dppo_megatron.types import UserError

_BOXED = "Please reason step by step, and put your final answer within \\boxed{}."


@dataclass(frozen=True, slots=True)
class Template:
    """The four settings of a template, as in `DataConfig`; the defaults apply where a job sets none."""

    prompt_template: str = "{problem}"
    system_prompt: str = ""
    apply_chat_template: bool = False
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)


TEMPLATES: dict[str, Template] = {
    # without enable_thinking=False Qwen3's hybrid models think, and then rarely finish within 4,096 tokens
    "qwen3_nothink": Template(
        prompt_template=f"{{problem}}\n{_BOXED}",
        apply_chat_template=True,
        chat_template_kwargs={"enable_thinking": False},
    ),
    "qwen3_think": Template(
        prompt_template=f"{{problem}}\n{_BOXED}",
        apply_chat_template=True,
        chat_template_kwargs={"enable_thinking": True},
    ),
    # any other chat model: Qwen2.5-Instruct, Llama-3-Instruct, Qwen3-Instruct-2507
    "chat_boxed": Template(prompt_template=f"{{problem}}\n{_BOXED}", apply_chat_template=True),
    # base models, whose chat template (if they have one) means nothing to them
    "plain_boxed": Template(prompt_template=f"Problem:\n{{problem}}\n\n{_BOXED}\n\nSolution:\n"),
    # the conversation of R1-Zero, opened for the model; the box is for the grader
    "r1": Template(
        prompt_template=(
            "A conversation between User and Assistant. The user asks a question, and the Assistant solves it. The"
            " assistant first thinks about the reasoning process in the mind and then provides the user with the"
            " answer. The reasoning process and answer are enclosed within <think> </think> and <answer> </answer>"
            " tags, respectively, and the final answer is put within \\boxed{}.\n"
            "User: {problem}\nAssistant: <think>"
        ),
    ),
}


@dataclass(frozen=True, slots=True)
class ResolvedSet:
    """One problem set with all inherited settings resolved: fields as in `SetConfig`, none of them null."""

    key: str
    """Its setting, for messages and `checkpoint.may_change`: `data.train_path`, `data.eval_sets.aime24`."""
    path: str
    split: str
    subset: str
    limit: int
    where: list[str]
    problem_field: str
    answer_field: str
    answer_from: str
    source_field: str
    level_field: str
    level_is: str
    template: Template
    """The four settings of a template, with presets resolved."""
    max_prompt_tokens: int
    max_prompt_tokens_key: str
    """The setting that `max_prompt_tokens` came from."""
    overlong: str

    @property
    def path_key(self) -> str:
        """The setting that holds the path."""
        return f"{self.key}.path" if "_sets." in self.key else self.key


@dataclass(frozen=True, slots=True)
class ResolvedTrainSet(ResolvedSet):
    weight: float
    """Relative share of a step, above 0; used with `data.mixing=weighted`."""
    reward: SetRewardConfig
    """The set's own settings only; `set_rewards` resolves them."""


@dataclass(frozen=True, slots=True)
class ResolvedEvalSet(ResolvedSet):
    """A set to evaluate on, with how it is sampled: fields as in `EvalSetConfig`, none of them null."""

    samples: int
    temperature: float
    top_p: float
    top_k: int
    max_completion_tokens: int
    """Above 0; by default `rollout.sampling.max_completion_tokens`."""
    reward: SetRewardConfig
    """The set's own settings only; `set_rewards` resolves them."""


R = TypeVar("R", bound=ResolvedSet)


def train_set_configs(config: Config) -> dict[str, ResolvedTrainSet]:
    """The training sets by name, in the order of the config; `data.train_path` becomes the set `train`."""
    data = config.data
    named = {name: (f"data.train_sets.{name}", entry) for name, entry in data.train_sets.items()}
    if data.train_path:
        named = {"train": ("data.train_path", TrainSetConfig(path=data.train_path))} | named
    return {name: _resolved(ResolvedTrainSet, key, entry, data) for name, (key, entry) in named.items()}


def eval_set_configs(config: Config) -> dict[str, ResolvedEvalSet]:
    """The evaluation sets by name; sampling settings that a set leaves out come from `eval`."""
    data, defaults = config.data, config.eval
    named = {name: (f"data.eval_paths.{name}", EvalSetConfig(path=path)) for name, path in data.eval_paths.items()}
    named |= {name: (f"data.eval_sets.{name}", entry) for name, entry in data.eval_sets.items()}
    sets = {}
    for name, (key, entry) in named.items():
        longest = defaults.max_completion_tokens if entry.max_completion_tokens is None else entry.max_completion_tokens
        longest = longest or config.rollout.sampling.max_completion_tokens
        # Not inherited from `data`: leaving rows out of a benchmark changes its score, so only its own entry may do so.
        more = {"max_completion_tokens": longest, "where": entry.where or [], "overlong": entry.overlong or "error"}
        sets[name] = _resolved(ResolvedEvalSet, key, entry, data, defaults, **more)
    return sets


def set_rewards(config: Config) -> dict[str, RewardConfig]:
    """Resolved rewards by their section: `reward`, and for each set with rewards of its own
    `data.train_sets.NAME.reward` or `data.eval_sets.NAME.reward`.

    Raises:
        UserError: a set has both `function` and `functions`.
    """
    sets: list[ResolvedTrainSet | ResolvedEvalSet] = [*train_set_configs(config).values()]
    sets += eval_set_configs(config).values()
    for one in sets:
        if one.reward.function is not None and one.reward.functions:
            both, names = f"{one.key}.reward.function", ", ".join(one.reward.functions)
            raise UserError(f"{both} and {both}s ({names}) are both set; drop one ({both}s={{}} or {both}=null)")
    own = {f"{one.key}.reward": one.reward.over(config.reward) for one in sets if one.reward != SetRewardConfig()}
    return {"reward": config.reward} | own


def train_set_weights(config: Config) -> dict[str, float] | None:
    """Weight of each training set; None if they are shuffled together."""
    if config.data.mixing == "concatenate":
        return None
    return {name: one.weight for name, one in train_set_configs(config).items()}


def example_set_config(config: Config) -> ResolvedSet:
    """The worked solutions of SFT, as a set that inherits the settings of `data` but for `where` and `answer_from`."""
    entry = SetConfig(path=config.sft.examples_path, where=[], answer_from="")
    return _resolved(ResolvedSet, "sft.examples_path", entry, config.data)


def longest_prompt_tokens(config: Config) -> int:
    """The largest `max_prompt_tokens` of the training sets; that of `data` if there are none."""
    limits = (one.max_prompt_tokens for one in train_set_configs(config).values())
    return max(limits, default=config.data.max_prompt_tokens)


def longest_trained(config: Config) -> int:
    """Longest prompt plus completion of the training sets, in tokens."""
    return longest_prompt_tokens(config) + config.rollout.sampling.max_completion_tokens


def longest_sequence(config: Config) -> tuple[int, str]:
    """Longest prompt plus completion, in tokens, over training and all evaluation sets, and which settings give it."""
    lengths: list[tuple[int, str]] = []
    for name, settings in eval_set_configs(config).items():
        tokens = settings.max_prompt_tokens + settings.max_completion_tokens
        lengths.append((tokens, f"max_prompt_tokens + max_completion_tokens of evaluation set '{name}'"))
    trains = config.data.train_path or any(one.path for one in config.data.train_sets.values())
    if not lengths or trains:  # not in a standalone evaluation, whose training sets have no path
        lengths.insert(0, (longest_trained(config), "data.max_prompt_tokens + rollout.sampling.max_completion_tokens"))
    return max(lengths, key=lambda item: item[0])


def check_data(config: Config, *, trains: bool = True) -> None:
    """Raise `UserError` for contradictory or missing settings of sets. `trains`: False in a standalone evaluation."""
    data = config.data
    _check_layer("data", data)
    if data.train_path and data.train_sets and trains:
        raise UserError(
            f"data.train_path and data.train_sets ({', '.join(data.train_sets)}) are both set: train_path is short for"
            " a single training set. To train on all of them, move it to data.train_sets.NAME.path; else drop one"
            " (data.train_path='' or data.train_sets={})"
        )
    for name in data.eval_paths.keys() & data.eval_sets.keys():
        raise UserError(f"data.eval_paths.{name} and data.eval_sets.{name} are both the set '{name}'; drop one")
    for section, entries in (("train_sets", data.train_sets), ("eval_sets", data.eval_sets)):
        for name, entry in entries.items():
            _check_layer(f"data.{section}.{name}", entry)
    if data.order_by != "level" and data.order in ("shuffled", "file"):
        raise UserError(
            f"data.order_by = {data.order_by} has no effect while data.order = {data.order}; set data.order=easy_first"
            " or hard_first"
        )
    for name, entry in data.train_sets.items():
        if data.mixing != "weighted" and entry.weight != 1.0:
            raise UserError(
                f"data.train_sets.{name}.weight = {entry.weight} has no effect while data.mixing = {data.mixing};"
                " set data.mixing=weighted"
            )
    sets: list[ResolvedSet] = [*eval_set_configs(config).values()]
    if trains:
        sets = [*train_set_configs(config).values(), *sets]
    if trains and config.sft.steps:
        sets.append(example_set_config(config))
        if not config.sft.completion_field.strip():
            raise UserError(f"sft.completion_field = '{config.sft.completion_field}': must not be empty")
    for one in sets:
        _check_resolved(one)


def _resolved(
    kind: type[R], key: str, entry: SetConfig, data: DataConfig, defaults: EvalConfig | None = None, **more: Any
) -> R:
    """A set whose fields are `more`, else the set's own settings, else those of `data`, else `defaults`."""
    section = "data" if entry.max_prompt_tokens is None else key
    more |= {"key": key, "template": _template(entry, data), "max_prompt_tokens_key": f"{section}.max_prompt_tokens"}
    for name in [item.name for item in fields(kind) if item.name not in more]:
        values = (getattr(layer, name, None) for layer in (entry, data, defaults))
        more[name] = next(value for value in values if value is not None)
    return kind(**more)


def _template(entry: SetConfig, data: DataConfig) -> Template:
    """Each of the four settings from the first that has it: the set, its template, `data`, data's template."""
    chosen: dict[str, Any] = {}
    for item in fields(Template):
        layers = (entry, TEMPLATES.get(entry.template or ""), data, TEMPLATES.get(data.template), Template())
        values = (getattr(layer, item.name) for layer in layers if layer is not None)
        chosen[item.name] = next(value for value in values if value is not None)
    return Template(**chosen)


def _check_layer(key: str, layer: SetConfig | DataConfig) -> None:
    if layer.template:
        check_choice(f"{key}.template", layer.template, TEMPLATES)
    if layer.prompt_template is not None and "{problem}" not in layer.prompt_template:
        raise UserError(f"{key}.prompt_template = {layer.prompt_template!r}: must contain {{problem}}")
    for condition in layer.where or ():
        try:
            Condition.parse(condition)
        except UserError as error:
            raise UserError(f"{key}.where: {error}") from None
    for name in ("problem_field", "answer_field"):
        if (value := getattr(layer, name)) is not None and not value.strip():
            raise UserError(f"{key}.{name} = '{value}': must not be empty")


def _check_resolved(one: ResolvedSet) -> None:
    if not one.path:
        raise UserError(f"{one.path_key} is not set: a file, a directory or hub:owner/name")
    for name in ("system_prompt", "chat_template_kwargs"):
        if (value := getattr(one.template, name)) and not one.template.apply_chat_template:
            raise UserError(
                f"{one.key}: {name} = {value!r} needs the chat template; set apply_chat_template=true, or leave it out"
            )
    if one.path.startswith("hub:"):
        return
    check_set(one.path_key, one.path)
    is_file = Path(one.path).is_file()
    for name, value in (("split", one.split), ("subset", one.subset)):
        if is_file and value:
            raise UserError(
                f"{one.key}.{name} = '{value}' has no effect on a file; it belongs to directories and the hub"
            )
