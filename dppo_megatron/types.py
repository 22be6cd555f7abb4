"""The nouns of one training step, in the order in which the data meets them.

Prompt -> RolloutPrompt -> Group(completions, rewards, advantages) -> TrainSample -> PackPlan -> metrics.

Everything here is plain data: numpy arrays and scalars, no torch, no process group. It crosses process
boundaries by pickling between the ranks of one job, so every class is a slotted dataclass and cheap to send.
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
"""What a selection does to the expected gradient: nothing dropped; corrected; corrected up to O(1/n); changed."""

FinishReason: TypeAlias = Literal["stop", "length", "abort", "early"]
"""At a stop token; at the token limit; ended before either, so the completion is missing; at a limit of its own that
was drawn before it was sampled (`pruning.early_stop`), so that others count for it."""


class UserError(Exception):
    """The user's mistake: what was wrong, where, and what would be right. The command line exits with code 2.

    A message may quote what a damaged file holds, so what a terminal would obey is escaped: `\\x1b` for the character.
    """

    def __init__(self, message: str) -> None:
        super().__init__(plain(message))


class RunAborted(Exception):
    """What is under way cannot continue: a run is checkpointed and ends with exit code 3."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One problem of a prompt set."""

    index: int
    """Row in its prompt set, from 0; the key of the pruning history and of every random draw about this prompt."""
    text: str
    """What the model is given, before tokenization."""
    token_ids: tuple[int, ...]
    """`text` under the model's tokenizer."""
    answer: str
    """The reference answer the grader compares with."""
    source: str
    """The subset it belongs to (`level_3`, `gsm8k`), for metrics; may be empty."""
    level: float | None = None
    """How hard its row says it is, on the row's own scale; None if it does not say."""
    row: Mapping[str, Any] = field(default_factory=dict)
    """The row's other fields, as read; passed to graders that take three arguments."""
    origin: str = ""
    """`path:line` or `set:row`, for messages."""
    problem: str = ""
    """What is asked, without the template: the problem, or the last user turn of messages. For people."""
    graded_by: str = "reward"
    """The settings of its rewards: `reward`, or those of its set, `data.train_sets.NAME.reward`."""


@dataclass(frozen=True, slots=True)
class PromptFeatures:
    """What is known of each prompt of a set, or of all training sets, before it is tried: arrays [prompts]."""

    prompt_tokens: IntArray
    level: FloatArray
    """How hard the prompt's row says it is, on the row's own scale; NaN where it does not say."""
    source: IntArray
    """Place of the prompt's source in `sources`."""
    sources: tuple[str, ...]
    """`Prompt.source` of all prompts, each once; empty text for those that name none."""


@dataclass(frozen=True, slots=True)
class RolloutPrompt:
    """A prompt that survived the selection before rollout."""

    prompt: Prompt
    inclusion_prob: float
    """P(selected | history), in (0, 1]."""
    weight: float
    """Factor in the loss that undoes this selection; 1 / inclusion_prob for a Horvitz-Thompson estimator."""
    completions: int = 0
    """To sample of it; 0: `rollout.completions_per_prompt`."""
    limits: tuple[int, ...] = ()
    """[completions] tokens at which each is stopped early; empty: none is."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled answer."""

    token_ids: IntArray
    """Generated tokens [n], including the stop token if it was produced."""
    logprobs: npt.NDArray[np.float32]
    """Behaviour log-probability of each generated token [n], at the sampling temperature."""
    finish_reason: FinishReason
    text: str
    """`token_ids` decoded without special tokens, for the grader."""
    weights_spans: tuple[tuple[int, int], ...] = ()
    """(weights version, tokens sampled under it), in order; versions count the weight syncs since the run was last
    started. Empty if the engine does not report it.

    Example: ((4, 120), (5, 30)) is 150 tokens, the last 30 of them sampled after the fifth sync.
    """
    experts: ExpertArray | None = None
    """[prompt + n - 1, layers, experts a token] that the engine sent each token to which it read; None unless they are
    replayed (`actor.routing_replay`)."""


@dataclass(frozen=True, slots=True)
class ExpertChoices:
    """What the choices of a model's routers look like, for one token.

    Example: Qwen3-30B-A3B has ExpertChoices(48, 8, 128): 384 bytes a token.
    """

    layers: int
    per_token: int
    count: int
    """Of experts to choose from."""
    dense_layers: int = 0
    """The first of the layers have no experts: there all are 0."""

    @property
    def dtype(self) -> str:
        """The smallest integers that hold every choice, as engines send them."""
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
    """The other fields of the problem's row; sent only to graders that ask for it."""
    label: str = ""
    """Names it in the log."""
    prompt: str = ""
    """As the model was given it; sent as the row is."""
    completion_tokens: int = 0
    finish_reason: str = "stop"
    graded_by: str = "reward"
    """As of `Prompt`."""

    @staticmethod
    def of(prompt: Prompt, completion: str, index: int, completion_tokens: int, finish_reason: str) -> GradeTask:
        """To grade the text of a prompt's completion `index`."""
        label = f"prompt {prompt.index}, completion {index}"
        facts = prompt.text, completion_tokens, finish_reason, prompt.graded_by
        return GradeTask(completion, prompt.answer, prompt.row, label, *facts)


@dataclass(frozen=True, slots=True)
class Grade:
    """What a grader says of one completion."""

    reward: float
    """NaN where grading failed, and `failure` says how."""
    extracted: str | None = None
    """The final answer found in the completion, for people and for majority votes; None if there was none."""
    why: str = ""
    """How it was decided: `exact`, `fraction`, `no final answer`, ..."""
    facts: Mapping[str, float] = field(default_factory=dict)
    """Numbers averaged over the step's gradings and logged as reward/<name>, such as `parsed_share`: 1.0."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """The named rewards behind a weighted sum; empty where there is only one."""
    failure: str = ""
    """Why grading failed: `raised ...`, `timed out`, `died`, `returned ...`; empty if it did not."""
    by_chance: bool = False
    """It failed by what cannot depend on the completion: a judge that did not take the call."""


REWARD_ROUNDING = 1e-9
"""How far a reward may be outside its bounds: 0.2 + 0.4 + 0.3 + 0.1, a weighted sum of 1s, is 1 + 2e-16."""
UNSAMPLED = "was not sampled to its end"
"""How the failure begins of a completion that was never graded."""
STOPPED_EARLY = Grade(math.nan, failure="was stopped early")
"""Of a completion that has no end to grade."""


def deciding_reward(grade: Grade) -> float:
    """What decides whether a completion is correct: the first of several named rewards, else the reward itself."""
    return next(iter(grade.parts.values()), grade.reward)


@dataclass(frozen=True, slots=True)
class Group:
    """All completions of one prompt, graded."""

    selected: RolloutPrompt
    completions: tuple[Completion, ...]
    rewards: FloatArray
    """[n]; NaN where the grader failed."""
    grades: tuple[Grade, ...] = ()
    """[n]; empty in tests that need rewards only."""
    stands_for: FloatArray | None = None
    """[n] what each counts for those that were stopped early, 0 of these; None: none could be, and each counts 1."""


@dataclass(frozen=True, slots=True)
class TrainSample:
    """One sequence to train on, with its weight and denominator.

    Nothing downstream of it knows which pruning policy made the weight.
    """

    id: str
    """`prompt index:completion index`, for messages."""
    token_ids: IntArray
    """Prompt and completion [n]."""
    num_prompt_tokens: int
    behaviour_logprobs: npt.NDArray[np.float32]
    """[n - num_prompt_tokens], log-probability of each completion token when it was sampled."""
    advantage: float | FloatArray
    """Of the completion, or of each of its tokens [n - num_prompt_tokens]."""
    weight: float | FloatArray
    """Product of the factors that undo each selection it survived (W in docs/pruning.md); likewise."""
    denominator: float
    """Frozen divisor of this sample's token sum, a count of the planned full batch (1 / omega in docs/pruning.md)."""
    figure_weight: float = 1.0
    """What each of its tokens counts in figures of the policy, see `TrainSelection.figure_weight`; 1 where nothing was
    selected."""
    old_logprobs: FloatArray | None = None
    """[n - num_prompt_tokens] under the actor's own weights before the step's first update: the centre of the clip.
    None: the behaviour's are used."""
    reference_logprobs: FloatArray | None = None
    """[n - num_prompt_tokens] under the frozen reference policy; None without a KL term."""
    experts: ExpertArray | None = None
    """[n - 1, layers, experts a token] forced on the routers; None: they choose. See `Completion.experts`."""

    @property
    def num_tokens(self) -> int:
        """Tokens the model reads for this sample: all but the last, which is only a target."""
        return len(self.token_ids) - 1

    @property
    def num_completion_tokens(self) -> int:
        """Tokens that carry loss."""
        return len(self.token_ids) - self.num_prompt_tokens


@dataclass(frozen=True, slots=True)
class PackedMicrobatch:
    """Which samples share one micro-batch, in order, and where each lies.

    Segment i holds sample `members[i]`; where padding is left at the end it is one more segment, of dummy tokens.
    """

    members: tuple[int, ...]
    """Positions in the list of samples."""
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
    """For each data-parallel rank its micro-batches, in the order they run; every rank has the same number."""
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
    """What an optimizer update came to, the same on every rank."""

    loss: float
    grad_norm: float
    """Before clipping."""
    learning_rate: float
    is_skipped: bool
    """Loss or gradient was not finite: nothing has changed, the schedule included."""
    tokens: float
    """Completion tokens, each times its sample's `figure_weight`."""
    sums: Mapping[str, float]
    """The objective's diagnostics, summed over those tokens likewise: they and `tokens` add up over updates."""

    def figures(self) -> dict[str, float]:
        """All of it by name, diagnostics as means; a skipped update is 1 `skipped_updates`."""
        own = {"loss": self.loss, "grad_norm": self.grad_norm, "learning_rate": self.learning_rate}
        means = {name: mean_of_sums(total, self.tokens) for name, total in self.sums.items()}
        return own | {"skipped_updates": float(self.is_skipped), **means}


def mean_of_sums(total: float, count: float) -> float:
    """A mean from its two sums; NaN (null in metrics.jsonl) over nothing."""
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
        """Under their names in metrics.jsonl."""
        return {
            "prune/prompts_considered": float(self.prompts_considered),
            "prune/prompts_generated": float(self.prompts_generated),
            "prune/completions_generated": float(self.completions_generated),
            "prune/completions_trained": float(self.completions_trained),
            "tokens/generated": float(self.tokens_generated),
            "tokens/trained": float(self.tokens_trained),
        }
