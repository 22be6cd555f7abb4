"""Samples and grades the evaluation sets of a job with any engine; the ranks share the work.

All sets are submitted at once, so that an engine never waits for the slowest answer of one set before it begins the
next. With six sets of 30 to 700 problems, such waits would be most of the time of an evaluation set by set.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from dppo_megatron.config.resolved_sets import eval_set_configs
from dppo_megatron.distributed import from_rank_zero, gather_all, world_size
from dppo_megatron.evaluation.eval_samples import UnfinishedSamples, key_of, problem_ids
from dppo_megatron.evaluation.eval_scores import EvalSample, EvalScores, score
from dppo_megatron.job import Job
from dppo_megatron.progress import progress
from dppo_megatron.rewards.grading import Graders, GradeTask
from dppo_megatron.rollout.engine import Engine, Request, Sampling
from dppo_megatron.types import Completion, Grade, Prompt, is_correct

_PART = 128
"""Number of samples whose verdicts are written together."""
_MATH_GRADERS = ("math", "math_boxed")
_INTEGER = re.compile(r"-?\d{1,300}")
_MOST_COMPARISONS = 20_000
"""Limit per set: about five seconds, while the other ranks wait. Each problem's commonest spellings come first."""
Vote: TypeAlias = tuple[int, str]
"""Index of a problem in its set, and the spelling of a wrong answer to it."""


@dataclass(frozen=True, slots=True)
class EvalSet:
    """One set, ready to be sampled."""

    name: str
    prompts: Sequence[Prompt]
    ids: Sequence[str]
    samples: int
    sampling: Sampling

    def request(self, problem: int, sample: int) -> Request:
        """The request for sample number `sample` of problem number `problem`."""
        # always step 0: all evaluations of a set draw the same random numbers, so they differ by the weights alone
        return Request(self.prompts[problem], sample, step=0, stream=f"eval/{self.name}", sampling=self.sampling)


class Evaluator:
    """The evaluation sets of a job, with their graders."""

    def __init__(self, job: Job) -> None:
        self.sets = eval_sets(job)
        self._graders = SetGraders(job.grade)

    def evaluate(self, engine: Engine, names: Collection[str] | None = None) -> list[EvalScores]:
        """Scores of every set, or of those in `names`, on every rank. Collective.

        Ranks exchange votes, no other texts: those of 2,000 answers of 8,000 tokens are 60 MB.
        """
        own = [
            replace(one, prompt="", reference="", text="", extracted=None, why="", failure="", row={})
            for one in self.sample(engine, names)
        ]
        samples = gather_all(own)
        if engine.has_servers:  # these grader processes are idle until the next evaluation: clients grade for training
            self.close()
        # on one rank, as the grader compares answers at random points
        votes = from_rank_zero(lambda: [one.vote for one in self._graders.with_equal_votes(samples)])
        samples = [replace(one, vote=vote) for one, vote in zip(samples, votes, strict=True)]
        return [
            score(one.name, len(one.prompts), one.samples, [sample for sample in samples if sample.set == one.name])
            for one in self.sets
            if names is None or one.name in names
        ]

    def sample(
        self, engine: Engine, names: Collection[str] | None = None, unfinished: UnfinishedSamples | None = None
    ) -> list[EvalSample]:
        """This rank's graded samples of every set, or of those in `names`.

        Args:
            unfinished: stores each sample and each verdict as soon as it is there; samples that it has already are not
                made again. Only without other ranks.
        """
        items = [
            (one, problem, sample)
            for one in self.sets
            if names is None or one.name in names
            for problem in range(len(one.prompts))
            for sample in range(one.samples)
        ]
        samples = dict(unfinished.samples) if unfinished is not None else {}
        missing = [item for item in items if (item[0].name, *item[1:]) not in samples]
        requests = [one.request(problem, sample) for one, problem, sample in missing]
        count = tokens = 0
        fallback = Sampling(1, 0.0, 0)  # each request carries its own sampling
        ranks, total = world_size(), len(requests)
        with progress("evaluation", total, "answers") as advance:
            for count, (index, completion) in enumerate(engine.stream(requests, fallback), start=1):
                one = _ungraded(*missing[index], completion)
                samples[key_of(one)] = one
                if unfinished is not None:
                    unfinished.add(one)
                tokens += one.tokens
                advance(min(count * ranks, total), tokens * ranks)  # an estimate: other ranks are about as far
            counts, tokens_of_all = zip(*gather_all([(count, tokens)]), strict=True)
            advance(sum(counts), sum(tokens_of_all))
        ungraded = [one for one in samples.values() if not one.is_graded]
        for graded in self._graders.graded_in_parts(ungraded):
            samples |= {key_of(one): one for one in graded}
            if unfinished is not None:
                unfinished.add_verdicts(graded)
        return [samples[key] for one, *indices in items if (key := (one.name, *indices)) in samples]

    def sample_alone(self, engine: Engine, unfinished: UnfinishedSamples | None = None) -> list[EvalSample]:
        """`sample` in a single process, with the votes that maj@k counts."""
        return self._graders.with_equal_votes(self.sample(engine, unfinished=unfinished))

    def close(self) -> None:
        self._graders.close()


def _ungraded(eval_set: EvalSet, problem: int, sample: int, completion: Completion) -> EvalSample:
    prompt = eval_set.prompts[problem]
    return EvalSample(
        set=eval_set.name,
        problem=eval_set.ids[problem],
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
    """The evaluation sets of a job, with all defaults from `data` and `eval` resolved."""
    config = job.config
    sets = []
    for name, settings in eval_set_configs(config).items():
        values = settings.max_completion_tokens, settings.temperature, config.seed, settings.top_p, settings.top_k
        sampling = Sampling(*values, job.stop_token_ids, reads_logprobs=False)
        prompts = job.eval_sets[name].prompts
        sets.append(EvalSet(name, prompts, problem_ids(prompts), settings.samples, sampling))
    return sets


def measured_as(job: Job) -> dict[str, str]:
    """By set, its problems, sampling and graders' names: if one changes, scores cannot be compared. The graders' code,
    quantization and the fields of rows that graders read are left out, and the number of samples, as the expected
    scores do not depend on it."""
    found, graders = {}, SetGraders(job.grade)
    for name, one in eval_set_configs(job.config).items():
        reward = job.grade.rewards[graders.key_of(name)]
        functions = [reward.function, *(each.function for each in reward.functions.values()), reward.correct_from]
        sampling = one.temperature, one.top_p, one.top_k, one.max_completion_tokens, *job.stop_token_ids
        found[name] = repr((job.eval_sets[name].fingerprint, sampling, functions))
    return found


class SetGraders:
    """The graders of an evaluation, by the name of the set."""

    def __init__(self, graders: Graders) -> None:
        self._graders = graders

    def key_of(self, name: str) -> str:
        """The config section with the reward settings of a set."""
        return self._graders.key_of(f"data.eval_sets.{name}")

    def is_math(self, name: str) -> bool:
        """Whether a `math` grader decides which answers of this set are correct."""
        reward = self._graders.rewards[self.key_of(name)]
        return [*(one.function for one in reward.functions.values()), reward.function][0] in _MATH_GRADERS

    def with_equal_votes(self, samples: Sequence[EvalSample]) -> list[EvalSample]:
        """The samples with the votes that maj@k counts (`common_spellings`)."""
        wrong: dict[str, list[Vote]] = {one.set: [] for one in samples if self.is_math(one.set)}
        for one in samples:
            if one.set in wrong and one.correct is False and one.vote is not None:
                wrong[one.set].append((one.problem_index, one.vote))
        common = {(name, *vote): one for name, votes in wrong.items() for vote, one in common_spellings(votes).items()}

        def counted(one: EvalSample) -> str | None:
            if one.correct is not False or one.vote is None:
                return one.vote
            return common.get((one.set, one.problem_index, one.vote), one.vote)

        return [replace(one, vote=counted(one)) for one in samples]

    def graded_in_parts(self, samples: Sequence[EvalSample]) -> Iterator[list[EvalSample]]:
        """Grade all samples, even those with verdicts; yields parts in order, each as soon as it is done. All parts are
        submitted at once, so that a slow judge works on many samples at a time, and a kill loses few verdicts."""
        submitted = deque(
            (part, self._graders.submit([self._task(one) for one in part]))
            for part in (samples[first : first + _PART] for first in range(0, len(samples), _PART))
        )
        done, title = 0, "evaluation: grading" if world_size() == 1 else "evaluation: grading a rank's share"
        with progress(title, len(samples), "answers") as advance:
            try:
                while submitted:
                    part, future = submitted[0]
                    grades = future.result()
                    submitted.popleft()
                    pairs = zip(part, grades, strict=True)
                    yield [replace(one, **self._verdict(one.set, grade)) for one, grade in pairs]
                    done += len(part)
                    advance(done)
            finally:
                for _, future in submitted:
                    future.cancel()

    def _task(self, sample: EvalSample) -> GradeTask:
        label = f"{sample.set}, problem {sample.problem}, sample {sample.sample}"
        facts = sample.prompt, sample.tokens, sample.finish_reason, self.key_of(sample.set)
        return GradeTask(sample.text, sample.reference, sample.row, label, *facts)

    def _verdict(self, name: str, grade: Grade) -> dict[str, Any]:
        """The fields of an `EvalSample` that a grade decides. Of several named rewards, the first decides `correct`. If
        grading failed, `reward` and `correct` are None; if only the first did not judge, `correct` is."""
        return {
            "reward": None if grade.failure else grade.reward,
            "correct": is_correct(grade, self._graders.rewards[self.key_of(name)].correct_from),
            "extracted": grade.extracted,
            "vote": _vote_of(grade, self.is_math(name)),
            "unparsed": _unparsed(grade),
            "why": grade.why,
            "failure": grade.failure or ("was not judged by the first of its functions" if grade.undecided else ""),
        }

    def close(self) -> None:
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


def _vote_of(grade: Grade, is_math: bool) -> str | None:
    """The answer that a sample votes for in maj@k; None if it gave none. A `math` grader's is kept as written, because
    `with_equal_votes` grades it: without its space `\\sin x` is no sine, and `1 1/2` is 11/2. Other graders' are
    normalized: without spaces, `\\left`, `$`, thousands separators and the like."""
    if grade.extracted is None or is_math:
        return grade.extracted and grade.extracted.strip()
    plain = grade.extracted.strip().rstrip(".")
    for pattern, replacement in _SPELLINGS:
        plain = pattern.sub(replacement, plain)
    return plain or grade.extracted


def _equal(answer: str, other: str) -> bool:
    if _INTEGER.fullmatch(answer) and _INTEGER.fullmatch(other):  # most answers are integers, which need no grader
        return int(answer) == int(other)
    from dppo_megatron.rewards.math.grader import grade_math_boxed  # takes 0.06 s, so only where it is needed

    return grade_math_boxed(f"\\boxed{{{answer}}}", other, {}).reward == 1.0


def common_spellings(votes: Iterable[Vote], same: Callable[[str, str], bool] = _equal) -> Mapping[Vote, str]:
    """The spelling under which to count each vote: for equal answers to a problem, their most frequent spelling.

    1/2 and 0.5 must count as two votes for one answer. Correct answers already count as one answer, however they are
    spelled; if wrong ones did not, they would win too few votes, and maj@k would be too high. Only the `math` graders
    can tell whether two answers are equal; answers of other graders are compared as text.

    Example:
        common_spellings([(7, "0.5"), (7, "1/2"), (7, "1/2"), (7, "3")])[7, "0.5"] == "1/2"
    """
    from dppo_megatron.rewards.math.grader import one_spelling  # takes 0.06 s

    counts: dict[int, Counter[str]] = {}
    for problem, spelling in votes:
        counts.setdefault(problem, Counter())[spelling] += 1
    common: dict[Vote, str] = {}
    comparisons_left = _MOST_COMPARISONS
    for problem, by_spelling in counts.items():
        distinct, known = list[str](), dict[str, str]()
        for spelling, _ in sorted(by_spelling.items(), key=lambda item: (-item[1], item[0])):
            form = one_spelling(spelling)  # spellings that differ by spaces alone take no comparison
            if form not in known:
                compared = distinct if len(distinct) <= comparisons_left else []
                comparisons_left -= len(compared)
                known[form] = next((one for one in compared if same(spelling, one)), spelling)
                distinct += [spelling] if known[form] == spelling else []
            common[problem, spelling] = known[form]
    return common
