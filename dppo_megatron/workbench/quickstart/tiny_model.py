"""Writes a tiny Qwen3 checkpoint in Hugging Face's format, with a tokenizer for the arithmetic task.

The quickstart starts from files, as a job on Qwen3-4B does, so that it needs no special path. The shape keeps
what makes Qwen3's conversion worth testing (grouped-query attention, query and key norms, a vocabulary that tensor
parallelism has to pad) and divides by two in heads, key-value heads and layers. 0.3 million parameters: two layers of
width 128 learned the task as well as four of width 96 and took three quarters of the time for a step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
ANSWER_MARK = "#### "
VOCABULARY: tuple[str, ...] = (PAD, EOS, UNKNOWN, *"0123456789+-*=\n", ANSWER_MARK)
_SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
_SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 128, "tie_word_embeddings": False}


def write_tiny_qwen3(directory: str | Path, seed: int, **shape: Any) -> None:
    """Write the quickstart's model and its tokenizer; `shape` as in `write_model_directory`."""
    write_model_directory(directory, make_tokenizer(), seed, vocab_size=len(VOCABULARY), **shape)


def write_model_directory(
    directory: str | Path, tokenizer: PreTrainedTokenizerFast, seed: int, *, vocab_size: int, **shape: Any
) -> None:
    """Write a random float32 `Qwen3ForCausalLM` with `tokenizer`; the same arguments give the same.

    Args:
        shape: sizes of config.json that replace those of the quickstart's model.

    Raises OSError.
    """
    sizes = _SIZES | shape
    config = Qwen3Config(
        vocab_size=vocab_size,
        **{"head_dim": sizes["hidden_size"] // sizes["num_attention_heads"]} | sizes,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    _initialize(model, seed)
    disable_progress_bar()  # `compare` writes a model for each seed, beside its own progress
    try:
        model.save_pretrained(directory)
    except SafetensorError as error:
        raise OSError(str(error)) from None
    tokenizer.save_pretrained(directory)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each character of the task, and one for the mark before an answer."""
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(f"{ANSWER_MARK}|[\\s\\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


@torch.no_grad()
def _initialize(model: Qwen3ForCausalLM, seed: int) -> None:
    """Norms 1, matrices normal with variance 1 / fan-in: transformers' fixed 0.02 learns slowly at this width."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        if parameter.ndim == 1:
            parameter.fill_(1.0)
        else:
            parameter.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator)
            assert name.endswith("weight")
