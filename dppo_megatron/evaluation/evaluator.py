"""Samples and grades the evaluation sets of a job with any engine; the ranks share the work.

All sets are submitted at once, so that an engine never waits for the slowest answer of one set before it begins the
next: with six sets of 30 to 700 problems that wait is most of the time of a set-by-set evaluation.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from dppo_megatron.config.reward import RewardConfig
from dppo_megatron.config.sets import eval_set_configs
from dppo_megatron.distributed import gather_all
from dppo_megatron.evaluation.samples import EvalSample, problem_ids
from dppo_megatron.evaluation.statistics import EvalScores, score
from dppo_megatron.job import Job
from dppo_megatron.progress import progress
from dppo_megatron.rewards.grading import Grader, GradeTask, deciding_reward, make_grader
from dppo_megatron.rollout.engine import Engine, Request, Sampling, own_requests
from dppo_megatron.types import Completion, Grade, Prompt


@dataclass(frozen=True, slots=True)
class EvalSet:
    """One set, ready to be sampled."""

    name: str
    prompts: Sequence[Prompt]
    ids: Sequence[str]
    """Of each problem."""
    samples: int
    """Completions of every problem."""
    sampling: Sampling
    grader: str
    """Grader; empty: the run's own."""

    def request(self, problem: int, sample: int) -> Request:
        """Step 0 always: every evaluation of a set draws the same random numbers, so that two of them differ by the
        weights and not by the draws."""
        return Request(self.prompts[problem], sample, step=0, stream=f"eval/{self.name}", sampling=self.sampling)


@dataclass(frozen=True, slots=True)
class _Item:
    set: int
    problem: int
    sample: int


class Evaluator:
    """The evaluation sets of a job, with their graders."""

    def __init__(self, job: Job) -> None:
        self.sets = eval_sets(job)
        self._graders = SetGraders(job.config.reward, job.grade)

    def evaluate(self, engine: Engine, names: Collection[str] | None = None) -> list[EvalScores]:
        """Scores of every set, or of those in `names`, on every rank. Collective.

        Ranks exchange outcomes, not texts: 2,000 answers of 8,000 tokens are 60 MB.
        """
        samples, items = self._sample(engine, names)
        mine = [(position, item.set, sample.outcome) for (position, item), sample in zip(items, samples, strict=True)]
        outcomes = [(of, outcome) for _, of, outcome in sorted(gather_all(mine), key=lambda each: each[0])]
        return [
            score(one.name, len(one.prompts), one.samples, [outcome for of, outcome in outcomes if of == index])
            for index, one in enumerate(self.sets)
            if names is None or one.name in names
        ]

    def sample(self, engine: Engine) -> list[EvalSample]:
        """This rank's samples of every set, graded; without other ranks, all samples."""
        return self._sample(engine, None)[0]

    def close(self) -> None:
        """End the graders that only evaluation sets use."""
        self._graders.close()

    def _sample(
        self, engine: Engine, names: Collection[str] | None
    ) -> tuple[list[EvalSample], list[tuple[int, _Item]]]:
        """This rank's samples, and which item of the evaluation each is of."""
        items = [
            _Item(index, problem, sample)
            for index, one in enumerate(self.sets)
            if names is None or one.name in names
            for problem in range(len(one.prompts))
            for sample in range(one.samples)
        ]
        requests = [self.sets[item.set].request(item.problem, item.sample) for item in items]
        completions: dict[int, Completion] = {}
        tokens = 0
        fallback = Sampling(1, 0.0, 0)  # each request carries its own sampling
        total = len(requests) if engine.has_servers else len(own_requests(requests))
        with progress("evaluation", total, "answers") as advance:
            for position, completion in engine.stream(requests, fallback):
                completions[position] = completion
                tokens += len(completion.token_ids)
                advance(len(completions), tokens)
        mine = [(position, items[position]) for position in sorted(completions)]
        done = [completions[position] for position, _ in mine]
        with progress("evaluation: grading"):
            grades = self._grade([item for _, item in mine], [completion.text for completion in done])
        each = zip(mine, done, grades, strict=True)
        return [self._record(item, completion, grade) for (_, item), completion, grade in each], mine

    def _grade(self, items: Sequence[_Item], texts: Sequence[str]) -> list[Grade]:
        grades: dict[int, Grade] = {}
        for function in dict.fromkeys(one.grader for one in self.sets):
            members = [i for i, item in enumerate(items) if self.sets[item.set].grader == function]
            tasks = [self._task(items[i], texts[i]) for i in members]
            grades |= zip(members, self._graders.of(function).grade(tasks), strict=True) if tasks else ()
        return [grades[i] for i in range(len(items))]

    def _task(self, item: _Item, text: str) -> GradeTask:
        one = self.sets[item.set]
        prompt = one.prompts[item.problem]
        label = f"{one.name}, problem {one.ids[item.problem]}, sample {item.sample}"
        return GradeTask(text, prompt.answer, prompt.row, label)

    def _record(self, item: _Item, completion: Completion, grade: Grade) -> EvalSample:
        one = self.sets[item.set]
        prompt = one.prompts[item.problem]
        return EvalSample(
            set=one.name,
            problem=one.ids[item.problem],
            problem_index=item.problem,
            sample=item.sample,
            prompt=prompt.text,
            reference=prompt.answer,
            text=completion.text,
            tokens=len(completion.token_ids),
            finish_reason=completion.finish_reason,
            row=prompt.row,
            level=prompt.level,
            **self._graders.verdict(grade),
        )


def eval_sets(job: Job) -> list[EvalSet]:
    """The sets of a job with all defaults from `data` and `eval` resolved."""
    config = job.config
    found = []
    for name, settings in eval_set_configs(config).items():
        how = settings.max_completion_tokens, settings.temperature, config.seed, settings.top_p, settings.top_k
        sampling = Sampling(*how, job.stop_token_ids, reads_logprobs=False)
        prompts = job.eval_prompts[name]
        found.append(EvalSet(name, prompts, problem_ids(prompts), settings.samples, sampling, settings.grader))
    return found


class SetGraders:
    """The graders of an evaluation: the run's own, and those that sets name.

    Args:
        reward: the run's.
        own: the run's grader; its owner closes it.
    """

    def __init__(self, reward: RewardConfig, own: Grader) -> None:
        self._reward, self._own = reward, own
        self._others: dict[str, Grader] = {}

    def of(self, function: str) -> Grader:
        """The grader of a built-in name or `module:function`; empty: the run's own."""
        if not function:
            return self._own
        if function not in self._others:
            self._others[function] = make_grader(self._reward, function)
        return self._others[function]

    def verdict(self, grade: Grade) -> dict[str, Any]:
        """The fields of an `EvalSample` that a grade decides. Of several named rewards the first says what is correct;
        where grading failed there is neither a reward nor a verdict."""
        failed = bool(grade.failure)
        return {
            "reward": None if failed else grade.reward,
            "correct": None if failed else deciding_reward(grade) >= self._reward.correct_from,
            "extracted": grade.extracted,
            "vote": _vote_of(grade),
            "unparsed": _unparsed(grade),
            "why": grade.why,
            "failure": grade.failure,
        }

    def close(self) -> None:
        """End the processes of the sets' own graders."""
        for grader in self._others.values():
            grader.close()
        self._others.clear()


def _unparsed(grade: Grade) -> bool | None:
    """Whether no final answer could be read; None if grading failed or the grader does not report it."""
    if grade.failure:
        return None
    if "parsed_share" in grade.facts:
        return grade.facts["parsed_share"] == 0
    return grade.extracted is None if grade.extracted is not None or grade.why else None


_SPELLINGS = (
    (re.compile(r"\\[dt]frac"), r"\\frac"),
    (re.compile(r"\\(?:left|right|displaystyle|[!,;:> ])|\\text\s*(?=\{)|[\s$]"), ""),
    (re.compile(r"(?<=\d),(?=\d{3}(?!\d))"), ""),
    (re.compile(r"^\{(.*)\}$"), r"\1"),
)


def _vote_of(grade: Grade) -> str | None:
    """The answer that a sample votes for in maj@k, in a plain form; None if it gave none.

    Wrong answers are equal if they read the same without spaces, `\\left`, `$`, thousands separators and the like; two
    wrong answers of the same value in different forms (1/2 and 0.5) stay apart, which can only help the correct one.
    """
    if grade.extracted is None:
        return None
    plain = grade.extracted.strip().rstrip(".")
    for pattern, replacement in _SPELLINGS:
        plain = pattern.sub(replacement, plain)
    return plain or grade.extracted
