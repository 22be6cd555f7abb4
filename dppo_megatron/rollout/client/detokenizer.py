"""Token ids to text. In a separate module, so that a rank without servers does not import the rest of the package."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Detokenizer:
    """Decodes like the trainer's tokenizer; picklable.

    A fast tokenizer is pickled as its JSON and decodes with `tokenizers` alone: importing transformers takes seconds.
    Any other tokenizer is pickled whole.
    """

    fast: Any = None
    """A `tokenizers.Tokenizer`."""
    whole: Any = None

    @staticmethod
    def of(tokenizer: Any) -> Detokenizer:
        """Uses the fast backend alone if it gives the same text as `tokenizer.decode`."""
        from transformers import PreTrainedTokenizerFast

        backend = getattr(tokenizer, "backend_tokenizer", None)
        cleans = getattr(tokenizer, "clean_up_tokenization_spaces", False)
        if backend is not None and not cleans and type(tokenizer).decode is PreTrainedTokenizerFast.decode:
            return Detokenizer(fast=backend)
        return Detokenizer(whole=tokenizer)

    def decode(self, completions: Sequence[npt.NDArray[np.int32]]) -> list[str]:
        """One text per completion, without special tokens."""
        lists = [ids.tolist() for ids in completions]
        if self.fast is not None:
            return list(self.fast.decode_batch(lists, skip_special_tokens=True))
        return [self.whole.decode(ids, skip_special_tokens=True) for ids in lists]
