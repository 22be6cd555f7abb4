"""Loads the tokenizer of a model directory without running its code, and checks it against the model. transformers
makes a tokenizer without files, and adds an end-of-sequence token that has no id in any file as an untrained one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from dppo_megatron.texts import one_line
from dppo_megatron.types import UserError
from dppo_megatron.weights.architecture import Architecture
from dppo_megatron.weights.json_files import read_object, shown

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
_PROBE = "What is 1 + 1?\nThe answer is \\boxed{2}."


def load_tokenizer(
    directory: str | Path, architecture: Architecture, given_as: str = "model.hf_path ="
) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint, with a padding token.

    Args:
        given_as: the setting or option that named the directory, for messages.

    Raises:
        UserError: the tokenizer is missing or damaged, needs code of its own, has no end-of-sequence token, or has
            tokens without a row in the model's embedding (allowed for added tokens: see `rowless`).
    """
    where = f"{given_as} '{directory}'"
    path = Path(directory) / "tokenizer_config.json"
    settings = read_object(path) if path.exists() else {}
    if not any((Path(directory) / name).is_file() for name in _FILES):
        raise UserError(f"{where}: holds no tokenizer (none of {', '.join(_FILES)})")
    if settings.get("auto_map"):
        code = f"auto_map = {shown(settings['auto_map'])}"
        raise UserError(f"{where}: tokenizer_config.json names code of its own, which is never run ({code})")
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
        vocabulary = tokenizer.get_vocab()
        probe = tokenizer.encode(_PROBE)
        tokenizer.decode(probe)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a damaged file can raise anything; the Rust library's panics are not Exceptions
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise UserError(f"{where}: its tokenizer cannot be loaded: {reason}") from None
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise UserError(f"{where}: its tokenizer is a {type(tokenizer).__name__}, which is for another kind of model")
    _check_ids(tokenizer, vocabulary, probe, architecture, where)
    _check_end(tokenizer, Path(directory), settings, where)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def rowless(tokenizer: PreTrainedTokenizerBase, architecture: Architecture) -> dict[int, str]:
    """Id -> text of the added tokens that have no row in the model's embedding."""
    added = tokenizer.added_tokens_decoder.items()
    return {token: str(text) for token, text in added if token >= architecture.vocab_size}


def _check_ids(
    tokenizer: PreTrainedTokenizerBase,
    vocabulary: Mapping[str, int],
    probe: list[int],
    architecture: Architecture,
    where: str,
) -> None:
    # added tokens are left out: Gemma 3's image token has no row in text-only models; only texts with it are refused
    rows, added = architecture.vocab_size, tokenizer.added_tokens_decoder
    largest = max((token for token in vocabulary.values() if token not in added), default=-1)
    if largest >= rows:
        raise UserError(
            f"{where}: its tokenizer has {len(tokenizer)} tokens up to id {largest}, its config.json only {rows} tokens"
        )
    for name in ("eos_token", "pad_token"):
        token = getattr(tokenizer, f"{name}_id")
        if token is not None and token >= rows:
            raise UserError(f"{where}: its tokenizer's {name} has id {token}, its config.json only {rows} tokens")
    if not probe or not all(0 <= token < rows for token in probe):
        raise UserError(f"{where}: its tokenizer encodes {shown(_PROBE)} as {shown(probe)}; it is damaged or empty")


def _check_end(tokenizer: PreTrainedTokenizerBase, directory: Path, settings: Mapping[str, Any], where: str) -> None:
    """Require an end-of-sequence token that has an id in some file, because the model was then trained with it."""
    if tokenizer.eos_token_id is None:
        raise UserError(f"{where}: its tokenizer has no end-of-sequence token (eos_token in tokenizer_config.json)")
    end = tokenizer.convert_ids_to_tokens(tokenizer.eos_token_id)
    if not _has_id(str(end), directory, settings):
        problem = f"its end-of-sequence token {shown(str(end))} has no id in the tokenizer's files"
        raise UserError(f"{where}: {problem}; set eos_token in tokenizer_config.json to a token that the model learned")


def _has_id(token: str, directory: Path, settings: Mapping[str, Any]) -> bool:
    declared = settings.get("added_tokens_decoder")
    if isinstance(declared, dict) and any(
        isinstance(entry, dict) and entry.get("content") == token for entry in declared.values()
    ):
        return True
    if not (directory / "tokenizer.json").is_file():
        return True  # older formats have it in binary files or in several, which transformers has read
    return Tokenizer.from_file(str(directory / "tokenizer.json")).token_to_id(token) is not None
