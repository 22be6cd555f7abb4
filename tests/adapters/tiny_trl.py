"""TRL's GRPOTrainer on a task of one digit, with a model of 20 thousand parameters: a step takes half a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from trl import GRPOConfig

from dppo_megatron.adapters.trl import PrunedGRPOTrainer
from dppo_megatron.config.pruning import CompletionPruningConfig, PromptPruningConfig, PruningConfig

WORDS = ["<pad>", "<eos>", *"0123456789+=abcdefgh"]


def tokenizer() -> Any:
    """A token a character."""
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def model(seed: int = 0) -> Any:
    """Random, in float64 if the default type is."""
    torch.manual_seed(seed)
    config = transformers.Qwen2Config(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=1,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    made = transformers.Qwen2ForCausalLM(config)
    return made.to(torch.get_default_dtype())


def problems(count: int = 16) -> Dataset:
    """Sums of two digits."""
    rows = [{"prompt": f"{i % 10}+{(3 * i) % 10}=", "answer": str((i + 3 * i) % 10)} for i in range(count)]
    return Dataset.from_list(rows)


def reward(completions: list[str], answer: list[str], **others: Any) -> list[float]:
    """The share of the answer's digit; sees the training set's columns and not ours."""
    assert "dppo_index" not in others
    return [float(wanted in text[:4]) for text, wanted in zip(completions, answer, strict=True)]


def pruning(prompts: float = 0.3, completions: float | None = 0.8, **of_prompts: Any) -> PruningConfig:
    """Prompts are skipped from the first step on."""
    prompt = PromptPruningConfig(method="dppo" if prompts else "none", rate=prompts, warmup_epochs=0.5, **of_prompts)
    completion = CompletionPruningConfig(
        method="dppo" if completions else "none", rate=completions, max_design_effect=0
    )
    return PruningConfig(prompt=prompt, completion=completion)


def settings(folder: Path, **changes: Any) -> GRPOConfig:
    """8 prompts of 4 in micro-batches of 8."""
    return GRPOConfig(
        **{
            "output_dir": str(folder),
            "per_device_train_batch_size": 8,
            "gradient_accumulation_steps": 4,
            "num_generations": 4,
            "max_completion_length": 6,
            "max_steps": 6,
            "learning_rate": 1e-3,
            "loss_type": "grpo",
            "logging_steps": 1,
            "report_to": "none",
            "save_strategy": "no",
            "use_cpu": True,
            "bf16": False,
            "gradient_checkpointing": False,
            "disable_tqdm": True,
            "seed": 5,
        }
        | changes
    )


def trainer(folder: Path, given: PruningConfig | None = None, cls: type = PrunedGRPOTrainer, **changes: Any) -> Any:
    """Ready to train."""
    own = {} if cls.__name__ == "GRPOTrainer" else {"pruning": given or pruning()}
    return cls(
        model=model(),
        reward_funcs=reward,
        args=settings(folder, **changes),
        train_dataset=problems(),
        processing_class=tokenizer(),
        **own,
    )
