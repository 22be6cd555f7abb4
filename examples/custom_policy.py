"""Two custom pruning policies: they return probabilities; the trainer draws, weights and labels.

    dppo-megatron train configs/quickstart.yaml pruning.prompt.method=examples.custom_policy:Varied \\
        pruning.completion.method=examples.custom_policy:Cheap

Both stay unbiased because they return probabilities. A policy that returns booleans works too and is labelled biased
(docs/pruning.md, "A method of your own").
"""

from typing import ClassVar

import numpy as np

from dppo_megatron.pruning import CompletionBatch, CustomCompletionPolicy, CustomPromptPolicy
from dppo_megatron.types import FloatArray, IntArray


class Varied(CustomPromptPolicy):
    """Keep prompts that are new or have had both right and wrong answers always, the others one time in three.

    Example: three visited prompts with reward variances [0.25, 0, 0] get probabilities [1, 1/3, 1/3]; those that are
    kept have weights 1 and 3.
    """

    reads: ClassVar[tuple[str, ...]] = ("discount",)

    def choose(self, prompt_index: IntArray, *, step: int, minibatch: int) -> FloatArray:
        varied = self.history.arrays["variance"][prompt_index] > 0
        new = ~self.history.seen(prompt_index)
        return np.where(varied | new, 1.0, 1 / 3)


class Cheap(CustomCompletionPolicy):
    """Keep about half of the completions; the probability grows with |advantage| and falls with the root of the length.

    Example: |advantages| [1, 1], lengths [100, 400], one to keep: probabilities [2/3, 1/3].
    """

    def choose(self, batch: CompletionBatch, *, step: int, minibatch: int) -> FloatArray:
        score = np.abs(batch.advantages) / np.sqrt(np.maximum(batch.lengths, 1))
        budget = np.count_nonzero(score) / 2
        return np.minimum(1.0, budget * score / max(score.sum(), 1e-12))
