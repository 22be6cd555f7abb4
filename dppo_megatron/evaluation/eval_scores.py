"""Scores of one set from its graded samples: avg@k, pass@k, maj@k and their standard errors. Pure arithmetic.

Everything is estimated per problem and then averaged over problems. So a problem with a few failed gradings has the
same weight as any other, and the standard error is over problems: samples of one problem are not independent, and
treating 30 problems x 32 samples as 960 draws would give an error several times too small.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Annotated, Any, TypeAlias

import msgspec
import numpy as np

_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
_Finite: TypeAlias = Annotated[float, msgspec.Meta(ge=-1e308, le=1e308)]
_LARGEST_FOR_SUBSETS = 512
"""Above this many samples of a problem, maj@k is given for k = n only: the number of subsets overflows float64."""


@dataclass(frozen=True, slots=True)
class EvalSample:
    set: str
    problem: str
    """Id of the problem in its set (`problem_ids`); the same in every evaluation of the set."""
    problem_index: _Count
    """Index in the set, from 0."""
    sample: _Count
    """Number among the problem's samples, from 0."""
    prompt: str
    """The model's input, including the template."""
    reference: str
    text: str
    """The completion, without special tokens."""
    tokens: _Count
    finish_reason: str
    """`stop`, or `length` if it reached max_completion_tokens."""
    reward: _Finite | None = None
    """null: grading failed."""
    correct: bool | None = None
    """Whether the reward, of several the first, is >= reward.correct_from; null: grading failed, or did not judge."""
    extracted: str | None = None
    """The final answer that the grader found; null: none, or not reported."""
    vote: str | None = None
    """The answer that maj@k counts: `extracted`; in samples.jsonl, equal wrong answers have one spelling."""
    unparsed: bool | None = None
    """Whether no final answer could be read; null: not reported, or grading failed."""
    why: str = ""
    failure: str = ""
    """Why there is no `correct`; empty if there is."""
    row: Mapping[str, Any] = field(default_factory=dict)
    """The problem's row, for graders that read it."""
    level: _Finite | None = None
    """The difficulty that the row states; null: none."""

    @property
    def is_graded(self) -> bool:
        return self.correct is not None or bool(self.failure)


@dataclass(frozen=True, slots=True)
class Estimate:
    value: float | None
    """None if there was no problem to average over."""
    se: float | None
    """Standard error over problems; None with fewer than two."""
    problems: int
    low: float | None = None
    high: float | None = None
    """95 % interval: value ± t se with problems - 1 degrees of freedom, clipped to [0, 1]. None without `se`, or if all
    problems have the same value: 0 of 30 does not prove 0."""


@dataclass(frozen=True, slots=True)
class EvalScores:
    """Scores of one set, whose name may contain any character."""

    name: str
    problems: int
    samples: int
    avg: Estimate
    """Share of correct samples: avg@samples, and pass@1."""
    pass_at: Mapping[int, Estimate]
    maj_at: Mapping[int, Estimate]
    """Empty if the grader does not report the answer that it found."""
    truncated_share: float | None
    unparsed_share: float | None
    failed: int
    """Samples without a `correct`; they also count in truncated_share and completion_tokens_mean, and nowhere else."""
    completion_tokens_mean: float | None
    reward_mean: float | None = None
    """Of the problems' mean rewards: what a grader measures that seldom or never reaches `reward.correct_from`."""
    by_problem: tuple[float | None, ...] = ()
    """Share of correct samples of each problem, in the order of the set; None where every grading failed."""

    def metrics(self) -> dict[str, float | None]:
        """For metrics.jsonl: `eval/<set>/pass@1` and so on. No key for maj@k and unparsed_share if the grader does not
        report answers; None for a mean over nothing, because every grading failed."""
        named = {f"avg@{self.samples}": self.avg}
        named |= {f"pass@{k}": estimate for k, estimate in self.pass_at.items()}
        named |= {f"maj@{k}": estimate for k, estimate in self.maj_at.items()}
        values: dict[str, float | None] = {}
        for key, estimate in named.items():
            values |= {key: estimate.value, f"{key}_se": estimate.se}
        values |= {
            "truncated_share": self.truncated_share,
            "failed": float(self.failed),
            "completion_tokens_mean": self.completion_tokens_mean,
            "reward_mean": self.reward_mean,
        }
        if self.unparsed_share is not None:
            values["unparsed_share"] = self.unparsed_share
        return {f"eval/{self.name}/{key}": value for key, value in values.items()}

    def as_json(self) -> dict[str, Any]:
        """For results.json; without `by_problem`, which follows from samples.jsonl."""
        return {name: value for name, value in asdict(self).items() if name != "by_problem"}

    def line(self) -> str:
        """For the log: `aime24 pass@1 43.3 % ± 5.9`, then pass@n, maj@n, the mean reward if it is another
        number, and failed gradings."""
        text = f"{self.name} pass@1 {percent(self.avg)}"
        if self.samples > 1:
            text += f", pass@{self.samples} {percent(self.pass_at[self.samples])}"
            if self.samples in self.maj_at:
                text += f", maj@{self.samples} {percent(self.maj_at[self.samples])}"
        if self.reward_mean is not None and self.reward_mean != self.avg.value:
            text += f", reward {self.reward_mean:.3f}"
        if self.failed:
            text += f", {self.failed} gradings failed"
        return text


def percent(estimate: Estimate) -> str:
    """Value and standard error, as `43.3 % ± 5.9`; without a standard error `43.3 %`, without a value `null`."""
    if estimate.value is None:
        return "null"
    return f"{100 * estimate.value:.1f} %" + (f" ± {100 * estimate.se:.1f}" if estimate.se is not None else "")


def score(name: str, problems: int, samples: int, graded: Sequence[EvalSample]) -> EvalScores:
    """The scores of a set with this many problems and samples per problem; `graded` in any order."""
    by_problem: dict[int, list[EvalSample]] = {}
    rewards: dict[int, list[float]] = {}
    for sample in graded:
        if sample.reward is not None:
            rewards.setdefault(sample.problem_index, []).append(sample.reward)
        if sample.correct is not None:
            by_problem.setdefault(sample.problem_index, []).append(sample)
    judged = [by_problem[problem] for problem in sorted(by_problem)]
    counts = [(len(of_one), sum(bool(one.correct) for one in of_one)) for of_one in judged]
    avg = mean(c / n for n, c in counts)
    pass_at = {k: mean(pass_at_k(n, c, k) for n, c in counts if n >= k) for k in doublings(samples)} | {1: avg}
    maj_at: dict[int, Estimate] = {}
    every = [one for of_one in judged for one in of_one]
    # a grader that only returns numbers reports neither answers nor whether there is one
    reports_answers = any(one.vote is not None or one.unparsed is not None for one in every)
    if (reports_answers or not every) and not any(one.correct and one.vote is None for one in every):
        ballots = [ballot(of_one) for of_one in judged]
        for k in doublings(samples):
            if k > 1 and (samples <= _LARGEST_FOR_SUBSETS or k == samples):
                maj_at[k] = mean(maj_at_k(*votes, k) for votes, (n, _) in zip(ballots, counts, strict=True) if n >= k)
    return EvalScores(
        name=name,
        problems=problems,
        samples=samples,
        avg=avg,
        pass_at=pass_at,
        maj_at=maj_at,
        truncated_share=_share(one.finish_reason == "length" for one in graded),
        unparsed_share=_share([one.unparsed for one in graded if one.unparsed is not None]),
        failed=sum(one.correct is None for one in graded),
        completion_tokens_mean=_share(one.tokens for one in graded),
        reward_mean=mean(sum(rewards[one]) / len(rewards[one]) for one in sorted(rewards)).value,
        by_problem=tuple(
            _share(bool(one.correct) for one in by_problem.get(problem, ())) for problem in range(problems)
        ),
    )


def doublings(most: int) -> list[int]:
    """1, 2, 4, ... and `most` itself: the k of pass@k and maj@k, the seeds after each rung of a sweep.

    Example:
        doublings(5) == [1, 2, 4, 5]
    """
    return [*(1 << i for i in range(most.bit_length()) if 1 << i < most), most]


def mean(values: Iterable[float]) -> Estimate:
    """Mean over problems x_1 ... x_P with its standard error sqrt(sum (x_i - mean)^2 / (P (P - 1))).

    Example:
        mean([1, 0, 0.5, 0.5])  # value 0.5, se 0.2041: deviations .5 .5 0 0, sqrt(.5 / 12); low 0, high 1: t is 3.18
    """
    x = np.array(list(values), dtype=np.float64)
    if not len(x):
        return Estimate(None, None, 0)
    value = float(x.mean())
    if len(x) < 2:
        return Estimate(value, None, len(x))
    se = float(x.std(ddof=1) / math.sqrt(len(x)))
    if x.min() == x.max():
        return Estimate(value, se, len(x))
    half = students_t(len(x) - 1) * se
    return Estimate(value, se, len(x), max(0.0, value - half), min(1.0, value + half))


@cache
def students_t(degrees: int) -> float:
    """The .975 quantile of Student's t distribution.

    Example:
        students_t(29)  # 2.045: 30 problems; the normal distribution's 1.96 would be 4 % too narrow
    """
    import mpmath  # takes 0.13 s, so only in processes that compute scores

    def excess(t: float) -> Any:  # P(|T| > t) - 0.05
        return mpmath.betainc(degrees / 2, 0.5, 0, degrees / (degrees + t * t), regularized=True) - 0.05

    return float(mpmath.findroot(excess, (1.9, 13), solver="anderson"))  # from 1.96 (many degrees) to 12.7 (one)


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that k of n samples, drawn without replacement, include a correct one: 1 - C(n - c, k) / C(n, k).

    An unbiased estimate of the probability that k new samples include one (Chen et al. 2021, arXiv 2107.03374), which
    1 - (1 - c/n)^k is not.

    Args:
        n: graded samples of the problem; c: correct ones; k: at most n.

    Example:
        pass_at_k(4, 1, 2) == 0.5  # 3 of the 6 pairs include the correct one
    """
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


Ballot = tuple[int, tuple[int, ...], int]
"""Votes on one problem: for the correct answer, for each other answer, and abstentions."""


def ballot(samples: Sequence[EvalSample]) -> Ballot:
    """Count the votes on one problem. All correct samples vote for one answer, however they spell it: the grader has
    found each equal to the reference."""
    wrong = [one.vote for one in samples if not one.correct]
    others = Counter(vote for vote in wrong if vote is not None)
    return len(samples) - len(wrong), tuple(sorted(others.values(), reverse=True)), wrong.count(None)


def maj_at_k(correct: int, others: Sequence[int], abstentions: int, k: int) -> float:
    """Probability that the correct answer wins a vote of k samples, drawn without replacement.

    Of t tied answers, each wins with probability 1 / t. If all k abstain, no answer wins.

    Example:
        maj_at_k(2, (2, 1), 0, 5) == 0.5  # two for the right answer, two for a wrong one: a tie
        maj_at_k(1, (1,), 0, 1) == 0.5    # a vote of one: half the samples are correct
    """
    n = correct + sum(others) + abstentions
    if k == n:  # no subset to choose
        top = max(others, default=0)
        return 0.0 if not correct or correct < top else 1.0 / (1 + (others.count(top) if top == correct else 0))
    chances = 0.0
    for m in range(1, min(correct, k) + 1):
        chances += math.comb(correct, m) * _ways(others, abstentions, k - m, m)
    return chances / math.comb(n, k)


def _ways(others: Sequence[int], abstentions: int, rest: int, m: int) -> float:
    """Number of ways to choose `rest` samples that are not correct so that no answer has more than m votes, each way
    weighted with 1 / (1 + number of answers with exactly m votes). Computed as the coefficients of a polynomial in two
    variables, which count samples (axis 1) and answers with m votes (axis 0)."""
    ways = np.zeros((rest // m + 1, rest + 1))
    ways[0, : min(abstentions, rest) + 1] = [math.comb(abstentions, i) for i in range(min(abstentions, rest) + 1)]
    for votes in others:
        before, ways = ways, ways.copy()  # the copy counts the choices without this answer
        for i in range(1, min(m - 1, votes, rest) + 1):
            ways[:, i:] += math.comb(votes, i) * before[:, : rest + 1 - i]
        if m <= min(votes, rest):
            ways[1:, m:] += math.comb(votes, m) * before[:-1, : rest + 1 - m]
    return float((ways[:, rest] / (1 + np.arange(len(ways)))).sum())


def _share(values: Iterable[float]) -> float | None:
    numbers = [float(value) for value in values]
    return sum(numbers) / len(numbers) if numbers else None
