"""The tokenizer of examples/real_math, byte-level BPE with a chat template, for models that tests make up."""

from __future__ import annotations

import sys

from support.job import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "examples" / "real_math"))

from tiny_chat_model import train_tokenizer as train_tokenizer
