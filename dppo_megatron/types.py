"""The data types of one training step, in the order in which data flows through them. They are pickled between ranks.

Prompt -> RolloutPrompt -> Group(completions, rewards, advantages) -> TrainSample -> PackPlan -> metrics.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from dppo_megatron.texts import plain

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    BoolArray: TypeAlias = npt.NDArray[np.bool_]
    ExpertArray: TypeAlias = npt.NDArray[np.uint8 | np.uint16]
    IntArray: TypeAlias = npt.NDArray[np.int64]
    FloatArray: TypeAlias = npt.NDArray[np.float64]
else:  # numpy would be two thirds of the time of `dppo-megatron --help`
    BoolArray = ExpertArray = IntArray = FloatArray = Any

Label: TypeAlias = Literal["exact", "unbiased", "ratio", "biased"]
"""What a selection does to the expected gradient. exact: it drops nothing that has gradient. unbiased: weights correct
it. ratio: they correct it up to O(1/n). biased: it is changed."""

FinishReason: TypeAlias = Literal["stop", "length", "abort", "early"]
"""stop: at a stop token. length: at the token limit. abort: before either; the completion is missing. early: at its own
random limit (`pruning.early_stop`); other completions are weighted up for it."""


class UserError(Exception):
    """A mistake of the user: what is wrong, where, and what would be right. The command line exits with code 2.

    A message may quote a damaged file, so terminal control characters in it are escaped (`\\x1b`).
    """

    def __init__(self, message: str) -> None:
        super().__init__(plain(message))


class RunAborted(Exception):
    """The work cannot continue. A run saves a checkpoint and ends with exit code 3."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One problem of a prompt set."""

    index: int
    """Row in its prompt set, from 0; the key of the pruning history and of every random draw about this prompt."""
    text: str
    """The whole prompt, template included, before tokenization."""
    token_ids: tuple[int, ...]
    """`text` under the model's tokenizer."""
    answer: str
    """The reference answer that the grader compares with."""
    source: str
    """The subset it belongs to (`level_3`, `gsm8k`), for metrics; may be empty."""
    level: float | None = None
    """Difficulty as given in its row, on the row's own scale; None if the row has none."""
    row: Mapping[str, Any] = field(default_factory=dict)
    """The row as read, and what the built-in graders read from it; passed to graders that take three arguments."""
    origin: str = ""
    """`path:line` or `set:row`, for messages."""
    problem: str = ""
    """The question without the template: the problem, or the last user turn of messages. For people."""
    graded_by: str = "reward"
    """The section with its reward settings: `reward`, or its set's own, `data.train_sets.NAME.reward`."""


@dataclass(frozen=True, slots=True)
class PromptFeatures:
    """What is known about each prompt of one or all training sets before it is tried: arrays [prompts]."""

    prompt_tokens: IntArray
    level: FloatArray
    """Difficulty as given in the prompt's row, on the row's own scale; NaN if the row has none."""
    source: IntArray
    """Index of the prompt's source in `sources`."""
    sources: tuple[str, ...]
    """The distinct `Prompt.source` of all prompts; "" for prompts without one."""


@dataclass(frozen=True, slots=True)
class RolloutPrompt:
    """A prompt that was selected for rollout."""

    prompt: Prompt
    inclusion_prob: float
    """P(selected | history), in (0, 1]."""
    weight: float
    """Factor in the loss that undoes this selection; 1 / inclusion_prob for a Horvitz-Thompson estimator."""
    completions: int = 0
    """How many to sample; 0: `rollout.completions_per_prompt`."""
    limits: tuple[int, ...] = ()
    """[completions] number of tokens at which each is stopped early; empty: none is."""


@dataclass(frozen=True, slots=True)
class Completion:
    token_ids: IntArray
    """Generated tokens [n], including the stop token if it was produced."""
    logprobs: npt.NDArray[np.float32]
    """Behaviour log-probability of each generated token [n], at the sampling temperature."""
    finish_reason: FinishReason
    text: str
    """`token_ids` decoded without special tokens, for the grader."""
    weights_spans: tuple[tuple[int, int], ...] = ()
    """(weights version, tokens sampled under it), in order; versions count the weight syncs of the run. Empty if the
    engine does not report it.

    Example: ((4, 120), (5, 30)) is 150 tokens, the last 30 of them sampled after the fifth sync.
    """
    experts: ExpertArray | None = None
    """[prompt + n - 1, layers, experts per token] the experts that the engine chose for each token that it read; None
    unless they are replayed (`actor.routing_replay`)."""


@dataclass(frozen=True, slots=True)
class ExpertChoices:
    """The shape of a model's expert choices for one token.

    Example: Qwen3-30B-A3B has ExpertChoices(48, 8, 128): 384 bytes per token.
    """

    layers: int
    per_token: int
    count: int
    """Experts of a layer to choose from."""
    dense_layers: int = 0
    """How many of the first layers have no experts; their choices are all 0."""

    @property
    def dtype(self) -> str:
        """The smallest integer type that holds every choice, as engines send them."""
        return "uint8" if self.count <= 256 else "uint16"

    @property
    def bytes_per_token(self) -> int:
        return self.layers * self.per_token * (1 if self.count <= 256 else 2)


@dataclass(frozen=True, slots=True)
class GradeTask:
    """One completion to grade."""

    completion: str
    answer: str
    row: Mapping[str, Any] = field(default_factory=dict)
    """The other fields of the problem's row; sent only to graders that ask for them."""
    label: str = ""
    """Identifies it in the log."""
    prompt: str = ""
    """The prompt as the model got it; sent only to graders that ask for it."""
    completion_tokens: int = 0
    finish_reason: str = "stop"
    graded_by: str = "reward"
    """As in `Prompt`."""

    @staticmethod
    def of(prompt: Prompt, completion: str, index: int, completion_tokens: int, finish_reason: str) -> GradeTask:
        """The task for completion number `index` of a prompt, whose text is `completion`."""
        label = f"prompt {prompt.index}, completion {index}"
        facts = prompt.text, completion_tokens, finish_reason, prompt.graded_by
        return GradeTask(completion, prompt.answer, prompt.row, label, *facts)


@dataclass(frozen=True, slots=True)
class Grade:
    """A grader's result for one completion."""

    reward: float
    """NaN if grading failed; `failure` then has the reason."""
    extracted: str | None = None
    """The final answer in the completion, for people and for majority votes; None if there is none."""
    why: str = ""
    """How it was decided: `exact`, `fraction`, `no final answer`, ..."""
    facts: Mapping[str, float] = field(default_factory=dict)
    """Numbers averaged over the step's gradings and logged as reward/<name>, such as `parsed_share`: 1.0."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """The named rewards in the weighted sum; empty if there is only one reward. A grader's own become `facts`."""
    failure: str = ""
    """Why grading failed: `raised ...`, `timed out`, `died`, `returned ...`; empty if it did not."""
    by_chance: bool = False
    """The failure cannot depend on the completion: a judge that did not accept the call."""
    undecided: bool = False
    """The first of several named functions did not judge the completion, so it is neither correct nor wrong."""


REWARD_ROUNDING = 1e-9
"""How far a reward may be outside its bounds by rounding: 0.2 + 0.4 + 0.3 + 0.1 is 1 + 2e-16."""
UNSAMPLED = "was not sampled to its end"
"""Start of `Grade.failure` for a completion that was not sampled to its end, and so never graded."""
STOPPED_EARLY = Grade(math.nan, failure="was stopped early")
"""The grade of a completion that was stopped early (`pruning.early_stop`), and so has no answer to grade."""


def deciding_reward(grade: Grade) -> float:
    """The reward that decides correctness: the first of several named ones, or the only one. NaN: there is none."""
    return math.nan if grade.undecided else next(iter(grade.parts.values()), grade.reward)


def is_correct(grade: Grade, correct_from: float) -> bool | None:
    """Whether a completion is correct; None if that is not known."""
    return None if math.isnan(deciding := deciding_reward(grade)) else deciding >= correct_from


@dataclass(frozen=True, slots=True)
class Group:
    """All completions of one prompt, graded."""

    selected: RolloutPrompt
    completions: tuple[Completion, ...]
    rewards: FloatArray
    """[n]; NaN where grading failed."""
    grades: tuple[Grade, ...] = ()
    """[n]; empty in tests that need only rewards."""
    stands_for: FloatArray | None = None
    """[n] how many completions each stands for: 1 / P(it finishes), or 0 if it was stopped early. None: all count 1."""


@dataclass(frozen=True, slots=True)
class TrainSample:
    """One sequence to train on, with its weight and denominator."""

    id: str
    """`prompt index:completion index`, for messages."""
    token_ids: IntArray
    """Prompt and completion [n]."""
    num_prompt_tokens: int
    behaviour_logprobs: npt.NDArray[np.float32]
    """[n - num_prompt_tokens], log-probability of each completion token when it was sampled."""
    advantage: float | FloatArray
    """One for the completion, or one for each of its tokens [n - num_prompt_tokens]."""
    weight: float | FloatArray
    """Product of the factors that undo each selection it passed (W in docs/pruning.md); shaped like `advantage`."""
    denominator: float
    """Frozen divisor of this sample's token sum, a count of the planned full batch (1 / omega in docs/pruning.md)."""
    figure_weight: float = 1.0
    """Weight of each of its tokens in the policy's metrics (`TrainSelection.figure_weight`); 1 without selection."""
    old_logprobs: FloatArray | None = None
    """[n - num_prompt_tokens] under the actor before the step's first update. None: the behaviour's."""
    reference_logprobs: FloatArray | None = None
    """[n - num_prompt_tokens] under the frozen reference policy; None without a KL term."""
    experts: ExpertArray | None = None
    """[n - 1, layers, experts per token] that routers have to choose (see `Completion.experts`); None: any."""

    @property
    def num_tokens(self) -> int:
        """Tokens that the model reads for this sample: all but the last, which is only a target."""
        return len(self.token_ids) - 1

    @property
    def num_completion_tokens(self) -> int:
        """Tokens that carry loss."""
        return len(self.token_ids) - self.num_prompt_tokens


@dataclass(frozen=True, slots=True)
class PackedMicrobatch:
    """Which samples share one micro-batch, in order, and where each one begins.

    Segment i holds sample `members[i]`. Padding at the end is one more segment, of dummy tokens.
    """

    members: tuple[int, ...]
    """Indices in the list of samples."""
    cu_seqlens_padded: tuple[int, ...]
    """[segments + 1] offsets in the micro-batch, where each segment's slot is rounded up to the layout's alignment."""

    @property
    def num_tokens(self) -> int:
        """Tokens that the model runs over, padding included."""
        return self.cu_seqlens_padded[-1]


@dataclass(frozen=True, slots=True)
class PackPlan:
    """The micro-batches of one optimizer step, for every data-parallel rank. Made once, on one rank, and sent."""

    microbatches: tuple[tuple[PackedMicrobatch, ...], ...]
    """Each data-parallel rank's micro-batches, in the order in which they run; every rank has the same number."""
    max_tokens_per_microbatch: int
    num_tokens: int
    """Tokens of all samples, padding not counted."""
    metrics: dict[str, float]
    """The plan's quality: `fill`, `microbatches`, `padding`, `imbalance` (see packing/planner.py)."""

    @property
    def num_microbatches(self) -> int:
        """Micro-batches that each data-parallel rank runs."""
        return len(self.microbatches[0])

    @property
    def fill(self) -> float:
        """Share of the planned micro-batches' capacity that holds tokens to train, in [0, 1]."""
        capacity = self.max_tokens_per_microbatch * sum(len(rank) for rank in self.microbatches)
        return self.num_tokens / capacity if capacity else 0.0


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """The result of an optimizer update, the same on every rank."""

    loss: float
    grad_norm: float
    """Before clipping."""
    learning_rate: float
    is_skipped: bool
    """The loss or the gradient was not finite: nothing has changed, not even the learning-rate schedule."""
    tokens: float
    """Completion tokens, each weighted by its sample's `figure_weight`."""
    sums: Mapping[str, float]
    """The objective's diagnostics, summed over tokens with the same weights, so that updates can be added up."""

    def figures(self) -> dict[str, float]:
        """By metric name, diagnostics as means; a skipped update counts 1 in `skipped_updates`."""
        own = {"loss": self.loss, "grad_norm": self.grad_norm, "learning_rate": self.learning_rate}
        means = {name: mean_of_sums(total, self.tokens) for name, total in self.sums.items()}
        return own | {"skipped_updates": float(self.is_skipped), **means}


def mean_of_sums(total: float, count: float) -> float:
    """The mean `total / count`; NaN (null in metrics.jsonl) if `count` is 0."""
    return total / count if count else math.nan


@dataclass(frozen=True, slots=True)
class StepCounts:
    """How much a step selected, generated and trained on."""

    prompts_considered: int
    prompts_generated: int
    completions_generated: int
    completions_trained: int
    tokens_generated: int
    """Completion tokens."""
    tokens_trained: int

    def metrics(self) -> dict[str, float]:
        return {
            "prune/prompts_considered": float(self.prompts_considered),
            "prune/prompts_generated": float(self.prompts_generated),
            "prune/completions_generated": float(self.completions_generated),
            "prune/completions_trained": float(self.completions_trained),
            "tokens/generated": float(self.tokens_generated),
            "tokens/trained": float(self.tokens_trained),
        }
