"""Samples and grades the evaluation sets of a job with any engine; the ranks share the work.

All sets are submitted at once, so that an engine never waits for the slowest answer of one set before it begins the
next: with six sets of 30 to 700 problems that wait is most of the time of a set-by-set evaluation.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

from dppo_megatron.config.resolved_sets import eval_set_configs
from dppo_megatron.distributed import from_rank_zero, gather_all, world_size
from dppo_megatron.evaluation.eval_samples import EvalSample, UnfinishedSamples, key_of, problem_ids
from dppo_megatron.evaluation.eval_scores import EvalScores, SampleOutcome, score
from dppo_megatron.job import Job
from dppo_megatron.progress import progress
from dppo_megatron.rewards.grading import Graders, GradeTask, deciding_reward
from dppo_megatron.rollout.engine import Engine, Request, Sampling
from dppo_megatron.types import Completion, Grade, Prompt

_PART = 128
"""Samples whose verdicts are written together."""
_MATH_GRADERS = ("math", "math_boxed")
_WHOLE = re.compile(r"-?\d{1,300}")
_MOST_COMPARISONS = 20_000
"""Of a set, the commonest spellings of each problem first: about five seconds, while the other ranks wait."""
Vote: TypeAlias = tuple[int, str]
"""A problem's place in its set, and how a wrong answer to it is written."""


@dataclass(frozen=True, slots=True)
class EvalSet:
    """One set, ready to be sampled."""

    name: str
    prompts: Sequence[Prompt]
    ids: Sequence[str]
    samples: int
    sampling: Sampling

    def request(self, problem: int, sample: int) -> Request:
        """Step 0 always: every evaluation of a set draws the same random numbers, so that two of them differ by the
        weights and not by the draws."""
        return Request(self.prompts[problem], sample, step=0, stream=f"eval/{self.name}", sampling=self.sampling)


class Evaluator:
    """The evaluation sets of a job, with their graders."""

    def __init__(self, job: Job) -> None:
        self.sets = eval_sets(job)
        self._graders = SetGraders(job.grade)

    def evaluate(self, engine: Engine, names: Collection[str] | None = None) -> list[EvalScores]:
        """Scores of every set, or of those in `names`, on every rank. Collective.

        Ranks exchange outcomes, not texts: 2,000 answers of 8,000 tokens are 60 MB.
        """
        outcomes = gather_all([(sample.set, sample.outcome) for sample in self.sample(engine, names)])
        if engine.has_servers:  # training's completions are graded by processes of the rollout clients
            self.close()
        found = []
        for one in self.sets:
            if names is None or one.name in names:
                own = [outcome for of, outcome in outcomes if of == one.name]
                if self._graders.is_math(one.name):  # on one rank: the grader draws the points at which it compares
                    known = from_rank_zero(partial(spellings, own))
                    own = [replace(outcome, vote=counted_as(outcome, known)) for outcome in own]
                found.append(score(one.name, len(one.prompts), one.samples, own))
        return found

    def sample(
        self, engine: Engine, names: Collection[str] | None = None, kept: UnfinishedSamples | None = None
    ) -> list[EvalSample]:
        """This rank's samples of every set, or of those in `names`, graded; without other ranks, all samples.

        Args:
            kept: takes each sample as it comes and each verdict; what it has already is not made again. One rank only.
        """
        items = [
            (one, problem, sample)
            for one in self.sets
            if names is None or one.name in names
            for problem in range(len(one.prompts))
            for sample in range(one.samples)
        ]
        samples = dict(kept.samples) if kept is not None else {}
        missing = [item for item in items if (item[0].name, *item[1:]) not in samples]
        requests = [one.request(problem, sample) for one, problem, sample in missing]
        count = tokens = 0
        fallback = Sampling(1, 0.0, 0)  # each request carries its own sampling
        ranks, total = world_size(), len(requests)
        with progress("evaluation", total, "answers") as advance:
            for count, (position, completion) in enumerate(engine.stream(requests, fallback), start=1):
                one = _ungraded(*missing[position], completion)
                samples[key_of(one)] = one
                if kept is not None:
                    kept.add(one)
                tokens += one.tokens
                advance(min(count * ranks, total), tokens * ranks)  # as if the others were as far
            counts, tokens_of_all = zip(*gather_all([(count, tokens)]), strict=True)
            advance(sum(counts), sum(tokens_of_all))
        ungraded = [one for one in samples.values() if not one.is_graded]
        for graded in self._graders.graded_in_parts(ungraded):
            samples |= {key_of(one): one for one in graded}
            if kept is not None:
                kept.grade(graded)
        return [samples[key] for of, *place in items if (key := (of.name, *place)) in samples]

    def sample_alone(self, engine: Engine, kept: UnfinishedSamples | None = None) -> list[EvalSample]:
        """`sample` without other ranks, each vote as it counts."""
        return self._graders.with_equal_votes(self.sample(engine, kept=kept))

    def close(self) -> None:
        """End the graders."""
        self._graders.close()


def _ungraded(of: EvalSet, problem: int, sample: int, completion: Completion) -> EvalSample:
    prompt = of.prompts[problem]
    return EvalSample(
        set=of.name,
        problem=of.ids[problem],
        problem_index=problem,
        sample=sample,
        prompt=prompt.text,
        reference=prompt.answer,
        text=completion.text,
        tokens=len(completion.token_ids),
        finish_reason=completion.finish_reason,
        row=prompt.row,
        level=prompt.level,
    )


def eval_sets(job: Job) -> list[EvalSet]:
    """The sets of a job with all defaults from `data` and `eval` resolved."""
    config = job.config
    found = []
    for name, settings in eval_set_configs(config).items():
        how = settings.max_completion_tokens, settings.temperature, config.seed, settings.top_p, settings.top_k
        sampling = Sampling(*how, job.stop_token_ids, reads_logprobs=False)
        prompts = job.eval_prompts[name]
        found.append(EvalSet(name, prompts, problem_ids(prompts), settings.samples, sampling))
    return found


class SetGraders:
    """The graders of an evaluation, each set's by its name."""

    def __init__(self, graders: Graders) -> None:
        self._graders = graders

    def key_of(self, name: str) -> str:
        """The section that holds the settings of a set's rewards."""
        return self._graders.key_of(f"data.eval_sets.{name}")

    def is_math(self, name: str) -> bool:
        """Whether a `math` grader decides what is correct in this set."""
        reward = self._graders.rewards[self.key_of(name)]
        return [*(one.function for one in reward.functions.values()), reward.function][0] in _MATH_GRADERS

    def with_equal_votes(self, samples: Sequence[EvalSample]) -> list[EvalSample]:
        """The samples with the votes that maj@k counts (`one_spelling`)."""
        known = {
            name: spellings(one.outcome for one in samples if one.set == name)
            for name in {one.set for one in samples}
            if self.is_math(name)
        }
        return [replace(one, vote=counted_as(one.outcome, known.get(one.set, {}))) for one in samples]

    def graded_in_parts(self, samples: Sequence[EvalSample]) -> Iterator[list[EvalSample]]:
        """The samples with the verdicts of their sets' graders, whatever verdicts they had, a part as soon as it and
        those before it are done: a slow judge is asked about all of them at a time, and a kill costs few verdicts."""
        asked = deque(
            (part, self._graders.submit([self._task(one) for one in part]))
            for part in (samples[first : first + _PART] for first in range(0, len(samples), _PART))
        )
        done, what = 0, "evaluation: grading" if world_size() == 1 else "evaluation: grading a rank's share"
        with progress(what, len(samples), "answers") as advance:
            try:
                while asked:
                    part, future = asked[0]
                    grades = future.result()
                    asked.popleft()
                    yield [replace(one, **self._verdict(one.set, of)) for one, of in zip(part, grades, strict=True)]
                    done += len(part)
                    advance(done)
            finally:
                for _, future in asked:
                    future.cancel()

    def _task(self, sample: EvalSample) -> GradeTask:
        label = f"{sample.set}, problem {sample.problem}, sample {sample.sample}"
        facts = sample.prompt, sample.tokens, sample.finish_reason, self.key_of(sample.set)
        return GradeTask(sample.text, sample.reference, sample.row, label, *facts)

    def _verdict(self, name: str, grade: Grade) -> dict[str, Any]:
        """The fields of an `EvalSample` that a grade decides. Of several named rewards the first says what is correct;
        where grading failed there is neither a reward nor a verdict."""
        failed, correct_from = bool(grade.failure), self._graders.rewards[self.key_of(name)].correct_from
        return {
            "reward": None if failed else grade.reward,
            "correct": None if failed else deciding_reward(grade) >= correct_from,
            "extracted": grade.extracted,
            "vote": _vote_of(grade),
            "unparsed": _unparsed(grade),
            "why": grade.why,
            "failure": grade.failure,
        }

    def close(self) -> None:
        """End their processes."""
        self._graders.close()


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
    """The answer that a sample votes for in maj@k, in a plain form: without spaces, `\\left`, `$`, thousands separators
    and the like. None if it gave none. See `with_equal_votes` for what reads differently and is equal."""
    if grade.extracted is None:
        return None
    plain = grade.extracted.strip().rstrip(".")
    for pattern, replacement in _SPELLINGS:
        plain = pattern.sub(replacement, plain)
    return plain or grade.extracted


def _equal(answer: str, other: str) -> bool:
    """Whole numbers, which most answers are, need no grader."""
    if _WHOLE.fullmatch(answer) and _WHOLE.fullmatch(other):
        return int(answer) == int(other)
    from dppo_megatron.rewards.math.grader import grade_math_boxed  # 0.06 s, where no other process grades

    return grade_math_boxed(f"\\boxed{{{answer}}}", other, {}).reward == 1.0


def one_spelling(votes: Iterable[Vote], same: Callable[[str, str], bool] = _equal) -> Mapping[Vote, str]:
    """How each vote is to be counted: equal answers to a problem under the spelling that comes most often.

    1/2 and 0.5 must not be two votes of one each: counted apart, wrong answers lose votes to the right one, whose
    spellings the grader has found equal already, and maj@k would be too high. Only the `math` graders can say whether
    two answers are equal; others' answers are compared as text.

    Example:
        one_spelling([(7, "0.5"), (7, "1/2"), (7, "1/2"), (7, "3")])[7, "0.5"] == "1/2"
    """
    counts: dict[int, Counter[str]] = {}
    for problem, spelling in votes:
        counts.setdefault(problem, Counter())[spelling] += 1
    found: dict[Vote, str] = {}
    left = _MOST_COMPARISONS
    for problem, of in counts.items():
        heads: list[str] = []
        for spelling, _ in sorted(of.items(), key=lambda item: (-item[1], item[0])):
            if left < len(heads):
                return found
            left -= len(heads)
            head = next((one for one in heads if same(spelling, one)), spelling)
            heads += [head] if head == spelling else []
            found[problem, spelling] = head
    return found


def spellings(outcomes: Iterable[SampleOutcome]) -> Mapping[Vote, str]:
    """`one_spelling` of a set's wrong answers."""
    return one_spelling((one.problem, one.vote) for one in outcomes if one.correct is False and one.vote is not None)


def counted_as(outcome: SampleOutcome, found: Mapping[Vote, str]) -> str | None:
    """The vote of an outcome under one spelling; right answers are one answer however they are written."""
    if outcome.correct is not False or outcome.vote is None:
        return outcome.vote
    return found.get((outcome.problem, outcome.vote), outcome.vote)
