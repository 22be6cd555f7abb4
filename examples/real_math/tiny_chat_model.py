"""Writes a tiny Qwen3 with a BPE tokenizer and a chat template, to test a real-math job without a real checkpoint.

The arithmetic quickstart has one token per character and no chat. A job on MATH also needs byte-level BPE, special
tokens that end a turn, a template that enables thinking by default, and an end of turn that is not the end of sequence.
This checkpoint has all of that. It is untrained: it generates text but knows no mathematics.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from dppo_megatron.workbench.quickstart.tiny_model import write_model_directory

END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false -%}
<think>

</think>

{% endif -%}
{%- endif -%}
"""
"""Qwen3's shape: ChatML turns, and an empty thought where `enable_thinking` is false."""


def write_tiny_chat_model(
    directory: str | Path,
    texts: Iterable[str],
    seed: int,
    *,
    vocab_size: int = 1024,
    hidden_size: int = 128,
    num_layers: int = 2,
    max_positions: int = 1024,
) -> None:
    """Write a randomly initialised float32 `Qwen3ForCausalLM` and its tokenizer to `directory`.

    Args:
        texts: what the tokenizer's merges are learned from, such as the problems of the training set.
        vocab_size: tokens, the 256 bytes and three special ones included.
    """
    tokenizer = train_tokenizer(texts, vocab_size)
    write_model_directory(
        directory,
        tokenizer,
        seed,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        max_position_embeddings=max_positions,
        tie_word_embeddings=True,
    )


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE over `texts`, with ChatML's special tokens and `CHAT_TEMPLATE`."""
    special = [END_OF_TEXT, START, END]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True) for token in special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[START, END],
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
