"""Tries a grader before anything expensive is built: on made-up completions, then on the references themselves.

A wrong signature or a grader that returns None would otherwise be noticed after the first rollout, as failures. A
grader that cannot read the references would never be noticed, because it looks like a weak model: with the first
built-in grader 23 % of MATH could not be rewarded at all.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from dppo_megatron.config.paths import in_short
from dppo_megatron.config.reward import RewardConfig
from dppo_megatron.progress import progress
from dppo_megatron.rewards.grading import Grader, deciding_reward
from dppo_megatron.types import REWARD_ROUNDING, Grade, GradeTask, Prompt, UserError, is_correct

MOST_REFERENCES = 2000  # of a set, evenly spread: 0.1 s of cheap gradings; 99 % is known to 0.2 points
_SHOWN = 10
_UNREAD_SHOWN = 5
_BATCH = 256
_FORMS = (
    ("boxed", "The answer is $\\boxed{%s}$."),
    ("after ####", "The answer follows.\n#### %s"),
    ("plain", "%s"),
)
"""How a model may mark a final answer. It is enough if the grader accepts a reference in one of these forms, since
graders do not agree on one."""
_WRONG = "The answer is $\\boxed{this is not the answer}$."


@dataclass(frozen=True, slots=True)
class RewardBounds:
    """Rewards that a job can train on."""

    least: float
    most: float
    why: str
    """For messages: the setting that requires these bounds, and one that does not."""


def check_grader(grader: Grader, prompt: Prompt, bounds: RewardBounds | None = None) -> None:
    """Grade the reference in every form, a wrong answer and an empty text.

    Args:
        bounds: None for a grader that only evaluates.

    Raises:
        UserError: the grader cannot be started, one of these gradings failed, or its reward is out of `bounds`.
    """
    texts = {f"the reference {name}": form % prompt.answer for name, form in _FORMS}
    texts |= {"a wrong answer": _WRONG, "an empty text": ""}
    grades = grader.grade([_task(prompt, text, f"{what} (check at start)") for what, text in texts.items()])
    origin = f" ({prompt.origin})" if prompt.origin else ""
    for (what, text), grade in zip(texts.items(), grades, strict=True):
        if grade.failure:
            raise UserError(
                f"{grader.key}: the grader fails on {what}: called with completion = {in_short(text, 80)} and"
                f" answer = {in_short(prompt.answer, 80)}{origin} it {grade.failure}."
                " It must return a finite number or a Grade for any text, 0 where there is no answer in it"
            )
        if bounds and not bounds.least - REWARD_ROUNDING <= grade.reward <= bounds.most + REWARD_ROUNDING:
            raise UserError(
                f"{grader.key}: the reward of {what} is {grade.reward:g}, and must be from {bounds.least:g} to"
                f" {bounds.most:g}: {bounds.why}"
            )


def check_references(
    grader: Grader, reward: RewardConfig, name: str, prompts: Sequence[Prompt], key: str = "reward"
) -> str:
    """Grade the references of a set as if they were answers; returns a log line with the share that is right.

    Args:
        key: the section of `reward`, for messages.

    Raises:
        UserError: the share is below `reward.min_self_consistency`, or none was judged.
    """
    if not reward.min_self_consistency or not prompts:
        return ""
    count = min(len(prompts), MOST_REFERENCES)
    checked = [prompts[i * len(prompts) // count] for i in range(count)]
    first_grades: dict[int, Grade] = {}
    wrong = list(range(count))
    for form_name, form in _FORMS:
        grades: dict[int, Grade] = {}
        with progress(f"start: grading the references of {name}, {form_name}", len(wrong), "references") as advance:
            for first in range(0, len(wrong), _BATCH):
                batch = wrong[first : first + _BATCH]
                grades |= zip(batch, grader.grade([_as_answer(checked[i], form) for i in batch]), strict=True)
                advance(len(grades))
        for i, grade in grades.items():
            first_grades.setdefault(i, grade)
        wrong = [i for i in wrong if not is_correct(grades[i], reward.correct_from)]
    undecided = {i for i in wrong if grades[i].undecided}
    wrong = [i for i in wrong if i not in undecided]
    known = count - len(undecided)
    right = known - len(wrong)
    of_all = f"{known:,} of its {len(prompts):,}" if known < len(prompts) else f"its {known:,}"
    line = f"{name}: of {of_all} references the grader takes {_percent(right, known)} for right when given as an answer"
    if undecided:
        line += f"; the first function, which decides what is correct, does not judge {len(undecided):,}"
    if known and right >= reward.min_self_consistency * known:
        [other] = grader.grade([_task(checked[0], _WRONG, "a wrong answer (check at start)")])
        if not other.failure and is_correct(other, reward.correct_from):
            line += f"; warning: {in_short(_WRONG, 60)} too: does it compare with the reference?"
        return line + _as_text_only(reward, [checked[i] for i in sorted({*range(count)}.difference(wrong, undecided))])
    rows = [
        f"\n  {_place(checked[i])}: {in_short(checked[i].answer, 80)}: {_verdict(first_grades[i])}"
        for i in itertools.islice(wrong, _SHOWN)
    ]
    more = f"\n  and {len(wrong) - _SHOWN:,} more" if len(wrong) > _SHOWN else ""
    raise UserError(
        f"{grader.key}: {line}, fewer than {key}.min_self_consistency = {reward.min_self_consistency:g}. No answer to"
        f" the others could be rewarded: choose a grader that can read them, or correct the rows. A grader that is not"
        f" about references (a length, a format) needs {key}.min_self_consistency=0.{''.join(rows)}{more}"
    )


def _as_text_only(reward: RewardConfig, right: Sequence[Prompt]) -> str:
    """How many of the references that are `right` the built-in `math` cannot parse, for the log line. It takes them for
    right only because they are repeated as text."""
    decides = next((one.function for one in reward.functions.values()), reward.function)
    if decides not in ("math", "math_boxed"):
        return ""
    from dppo_megatron.rewards.math.grader import is_read  # in this process: 0.07 s for 2,000 references of MATH

    unread = [one for one in right if not is_read(one.answer)]
    if not unread:
        return ""
    shown = ", ".join(f"{in_short(one.answer, 60)} ({_place(one)})" for one in unread[:_UNREAD_SHOWN])
    more = ", ..." if len(unread) > _UNREAD_SHOWN else ""
    return f"; {len(unread):,} of them are compared as text only, another spelling of one is wrong: {shown}{more}"


def unused_grader(reward: RewardConfig) -> list[str]:
    """A warning if `function` has no effect because `functions` is set too, as by another file or the command line."""
    if not reward.functions or reward.function == RewardConfig.function:
        return []
    names = ", ".join(reward.functions)
    return [
        f"warning: reward.function = '{reward.function}' is not used: reward.functions ({names}) are; {{}} drops them"
    ]


def _as_answer(prompt: Prompt, form: str) -> GradeTask:
    return _task(prompt, form % prompt.answer, f"the reference of {_place(prompt)}")


def _task(prompt: Prompt, text: str, label: str) -> GradeTask:
    """`text` as a model's completion. No tokenizer is here, so its tokens are counted as words, and one for the end."""
    return GradeTask(text, prompt.answer, prompt.row, label, prompt.text, len(text.split()) + 1)


def _verdict(grade: Grade) -> str:
    if grade.failure:
        return grade.failure
    return f"reward {deciding_reward(grade):g}{f' ({in_short(grade.why, 80)})' if grade.why else ''}"


def _place(prompt: Prompt) -> str:
    return prompt.origin or f"row {prompt.index}"


def _percent(part: int, whole: int) -> str:
    """Rounded down, so that 100 % means all of them."""
    return f"{1000 * part // (whole or 1) / 10:g} %"
