"""What TRL's batches are made of: completions generated in rounds, and the rows of a step from short to long.

transformers' `generate` goes on with all rows until the longest has ended: of the quickstart's 54 tokens the mean row
needs 19. In rounds, rows that have ended leave before the next, which reads what there is of the others as a prompt.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from accelerate.utils import gather_object

_Trainer: Any = object  # what the mixin is mixed into


class GenerationInRounds(_Trainer):  # type: ignore[misc]
    """For a subclass of `trl.GRPOTrainer`. Tokens have the distribution that one round gives them."""

    generation_rounds = 3
    """1: TRL's own. 3: to a quarter of `max_completion_length`, to half of it, to all of it."""

    def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        more, is_server = super()._generate_single_turn, self.use_vllm or self.use_transformers_continuous_batching
        # a shortest length would be each round's; processes call tools a different number of times, and rounds gather
        if is_server or self.args.generation_kwargs or getattr(self, "tools", None):
            return more(prompt_ids, *args, **kwargs)
        config, ids, unfinished = self.generation_config, [*prompt_ids], [*range(len(prompt_ids))]
        longest, halvings = config.max_new_tokens, range(max(1, self.generation_rounds))
        try:
            for start, end in pairwise(sorted({0, *(-(-longest // 2**n) for n in halvings)})):
                config.max_new_tokens = end - start
                # a process whose rows have all ended takes part too: generating may gather sharded weights
                new, _ = more([ids[row] for row in unfinished or [0]], *args, **kwargs)
                for row, tokens in zip(unfinished, new, strict=False):
                    ids[row] = ids[row] + tokens
                unfinished = [row for row in unfinished if ids[row][-1] not in self.eos_token_ids]
                if not any(gather_object([len(unfinished)])):
                    break
        finally:
            config.max_new_tokens = longest
        return [row[len(prompt) :] for row, prompt in zip(ids, prompt_ids, strict=True)], None


def by_length(batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of an optimizer step from the shortest to the longest, each micro-batch padded to its own longest."""
    rows = {name: value for name, value in batches[0].items() if isinstance(value, torch.Tensor) and value.dim()}
    rows = {name: torch.cat([batch[name] for batch in batches]) for name in rows}
    mask, found = rows["completion_mask"], []
    for places in mask.sum(1).argsort(stable=True).chunk(len(batches)):
        longest = int(mask[places].any(0).sum().clamp(min=1))
        by_token = {name for name, value in rows.items() if value.dim() > 1 and "prompt" not in name}
        short = {name: value[places, :longest] if name in by_token else value[places] for name, value in rows.items()}
        found.append(batches[0] | short)
    return found
