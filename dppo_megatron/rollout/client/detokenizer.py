"""Token ids to text, in a rank or in a client: apart from what crosses sockets, which a rank without servers never
imports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Detokenizer:
    """Token ids to text as the trainer's tokenizer does it; picklable.

    A fast tokenizer travels as its JSON and is decoded by `tokenizers` without importing transformers, which takes
    seconds; any other travels as it is.
    """

    fast: Any = None
    """A `tokenizers.Tokenizer`, which is pickled as its JSON."""
    whole: Any = None

    @staticmethod
    def of(tokenizer: Any) -> Detokenizer:
        """By the fast backend alone where it gives the same text as `tokenizer.decode`."""
        from transformers import PreTrainedTokenizerFast

        backend = getattr(tokenizer, "backend_tokenizer", None)
        cleans = getattr(tokenizer, "clean_up_tokenization_spaces", False)
        if backend is not None and not cleans and type(tokenizer).decode is PreTrainedTokenizerFast.decode:
            return Detokenizer(fast=backend)
        return Detokenizer(whole=tokenizer)

    def decode(self, completions: Sequence[npt.NDArray[np.int32]]) -> list[str]:
        """One text a completion, without special tokens."""
        lists = [ids.tolist() for ids in completions]
        if self.fast is not None:
            return list(self.fast.decode_batch(lists, skip_special_tokens=True))
        return [self.whole.decode(ids, skip_special_tokens=True) for ids in lists]
