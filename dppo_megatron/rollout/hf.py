"""The embedded engine: a transformers model in every rank, for CPUs and small models.

It needs no server and gives exact behaviour log-probabilities. The decoding loop is ours rather than `generate`'s for
two reasons. A token is chosen by inverting the cumulative distribution at a counter-based uniform, so a completion
depends on its (seed, step, prompt, completion index) and not on the batch or rank it is generated in. And sequences
that have ended leave the batch, where `generate` carries them along until the longest one ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from dppo_megatron.config.schema import Config
from dppo_megatron.randomness import generator
from dppo_megatron.rollout.engine import Request, Sampling, Weights, own_requests
from dppo_megatron.rollout.hf_names import by_checkpoint_name
from dppo_megatron.rollout.kv_cache import growing_cache
from dppo_megatron.types import BoolArray, Completion, FloatArray, Grade, IntArray
from dppo_megatron.weights.hf_files import WeightReader, check_finite

_COMPACT_BELOW = 0.75
"""Rows leave the batch once this share of it is still running: each compaction copies the key-value cache."""


class HFEngine:
    """transformers' model of the checkpoint at `hf_path`; its weights come from the actor, not from the files."""

    def __init__(
        self,
        hf_path: str | Path,
        tokenizer: PreTrainedTokenizerBase,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_concurrent_sequences: int,
    ) -> None:
        with torch.device(device):
            config = AutoConfig.from_pretrained(hf_path, trust_remote_code=False, local_files_only=True)
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
            self._model = model.eval()
        self._tokenizer = tokenizer
        self._device = device
        self._batch = max_concurrent_sequences
        with torch.no_grad():
            self._state = by_checkpoint_name(self._model)
        self._version = 0
        self.has_servers = False
        self.description = "rollout: transformers, embedded in every rank"

    @property
    def receivers(self) -> None:
        """See `Engine.receivers`: every rank has its own model."""
        return None

    @torch.no_grad()
    def load_weights(self, weights: Weights) -> bool:
        """Copy every tensor into the model. Raises ValueError if a parameter was not given."""
        self._version += 1
        missing = set(self._state)
        for name, tensor in weights():
            self._state[name].copy_(tensor)
            missing.discard(name)
        if missing:
            raise ValueError(f"the weight stream lacks {sorted(missing)}")
        return False

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """See `Engine.generate`."""
        self.start(requests, sampling)
        return list(self.finish().values())

    def stream(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[tuple[int, Completion]]:
        """See `Engine.stream`. Prompts of similar length share a batch, so little is spent on padding."""
        alike: dict[Sampling, list[int]] = {}
        for index in own_requests(requests):
            alike.setdefault(requests[index].sampling or sampling, []).append(index)
        for how, order in alike.items():
            order.sort(key=lambda i: len(requests[i].prompt.token_ids))
            for start in range(0, len(order), self._batch):
                chunk = order[start : start + self._batch]
                yield from zip(chunk, self._generate([requests[i] for i in chunk], how), strict=True)

    def start(self, requests: Sequence[Request], sampling: Sampling) -> None:
        """Nothing runs beside the actor here: the work is done in `finish`."""
        self._started = requests, sampling

    def finish(self) -> dict[int, Completion]:
        """What `start` was asked for."""
        return dict(sorted(self.stream(*self._started)))

    def take_grades(self) -> dict[int, Grade]:
        """Nothing: the ranks grade."""
        return {}

    def abort(self) -> None:
        """Forget what `start` was asked for."""
        self._started = (), self._started[1]

    def pause(self) -> None:
        """Nothing runs between two calls."""

    def resume(self) -> None:
        """Nothing was paused."""

    def rest(self) -> None:
        """Nothing to give back."""

    def probe(self, requests: Sequence[Request], sampling: Sampling) -> list[tuple[str, Completion]]:
        """Nothing: the engine is part of the process that trains."""
        return []

    def health(self) -> dict[str, str]:
        """No servers."""
        return {}

    def statistics(self) -> dict[str, float]:
        """Nothing can fail or wait here."""
        return {}

    def close(self) -> None:
        """Nothing to release."""

    @torch.inference_mode()
    def _generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        prompts, prompt_of = _distinct_prompts(requests)
        inputs, attention = self._left_pad(prompts)
        positions = (attention.cumsum(-1) - 1).clamp_min(0)
        cache = growing_cache()
        # every prompt is read once, however many completions it gets
        logits = self._forward(inputs, attention, positions, cache)
        expand = torch.tensor(prompt_of, device=self._device)
        cache.batch_select_indices(expand)
        logits, attention, positions = logits[expand], attention[expand], positions[expand, -1:]

        choose = _Chooser(requests, sampling, self._device)
        eos = self._tokenizer.eos_token_id
        stops = torch.tensor([eos, *sampling.stop_token_ids], device=self._device)
        shape = (len(requests), sampling.max_completion_tokens)
        generated = torch.full(shape, eos, dtype=torch.int64, device=self._device)
        logprobs = torch.zeros(shape, dtype=torch.float32, device=self._device)
        rows = torch.arange(len(requests), device=self._device)
        running = torch.ones(len(requests), dtype=torch.bool, device=self._device)
        for t in range(sampling.max_completion_tokens):
            chosen, chosen_logprobs = choose(logits, rows, t)
            # a row that has ended but is still carried along writes behind its end, where nobody reads
            generated[rows, t], logprobs[rows, t] = chosen, chosen_logprobs
            running &= ~torch.isin(chosen, stops)
            num_running = int(running.sum())
            if num_running == 0 or t + 1 == sampling.max_completion_tokens:
                break
            if num_running <= _COMPACT_BELOW * len(rows):
                keep = running.nonzero()[:, 0]
                cache.batch_select_indices(keep)
                rows, running, chosen = rows[keep], running[keep], chosen[keep]
                attention, positions = attention[keep], positions[keep]
            positions = positions + 1
            attention = torch.cat([attention, attention.new_ones(len(rows), 1)], dim=1)
            logits = self._forward(chosen[:, None], attention, positions, cache)
        return self._completions(generated.cpu().numpy(), logprobs.cpu().numpy(), stops.cpu().numpy())

    def _forward(self, inputs: Tensor, attention: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        """Logits [B, V] of the next token after each row of `inputs` [B, n], which are appended to the cache."""
        output = self._model(
            inputs,
            attention_mask=attention,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,  # config.json may say false, as checkpoints from training do
            logits_to_keep=1,
        )
        logits: Tensor = output.logits[:, -1]
        return logits

    def _left_pad(self, prompts: Sequence[tuple[int, ...]]) -> tuple[Tensor, Tensor]:
        longest = max(len(token_ids) for token_ids in prompts)
        tokens = torch.full((len(prompts), longest), self._tokenizer.pad_token_id, dtype=torch.int64)
        attention = torch.zeros_like(tokens)
        for row, token_ids in enumerate(prompts):
            tokens[row, longest - len(token_ids) :] = torch.tensor(token_ids)
            attention[row, longest - len(token_ids) :] = 1
        return tokens.to(self._device), attention.to(self._device)

    def _completions(self, ids: IntArray, logprobs: FloatArray, stops: IntArray) -> list[Completion]:
        """From [N, T] arrays that are filled beyond each row's end."""
        ended = np.isin(ids, stops)
        stopped: BoolArray = np.any(ended, axis=1)
        lengths = np.where(stopped, ended.argmax(axis=1) + 1, ids.shape[1])
        cut = [row[:length] for row, length in zip(ids, lengths, strict=True)]
        texts = self._tokenizer.batch_decode(cut, skip_special_tokens=True)
        return [
            Completion(
                token_ids=tokens.astype(np.int64),
                logprobs=values[: len(tokens)].astype(np.float32),
                finish_reason="stop" if stop else "length",
                text=text,
                weights_spans=((self._version, len(tokens)),),
            )
            for tokens, values, stop, text in zip(cut, logprobs, stopped, texts, strict=True)
        ]


def _distinct_prompts(requests: Sequence[Request]) -> tuple[list[tuple[int, ...]], list[int]]:
    """The different prompts of a batch, and for each request which of them is its own.

    Example: requests for prompts A, A, B, A give [A, B] and [0, 0, 1, 0].
    """
    index: dict[tuple[int, ...], int] = {}
    prompt_of = [index.setdefault(request.prompt.token_ids, len(index)) for request in requests]
    return list(index), prompt_of


def engine_from_files(config: Config, tokenizer: PreTrainedTokenizerBase, checkpoint: WeightReader) -> HFEngine:
    """An engine with the checkpoint's own weights, without an actor: for scoring a finished model."""
    engine = HFEngine(
        config.model.hf_path,
        tokenizer,
        dtype=getattr(torch, config.model.dtype),
        device=torch.device("cuda" if torch.cuda.is_available() else "cpu"),
        max_concurrent_sequences=config.rollout.limits.max_concurrent_sequences,
    )

    def finite() -> Iterator[tuple[str, Tensor]]:
        for name in checkpoint.names:
            tensor = checkpoint.get(name)
            check_finite(name, tensor)
            yield name, tensor

    engine.load_weights(finite)
    return engine


class _Chooser:
    """Picks each row's next token: at its counter-based uniform, or the most likely one at temperature 0."""

    def __init__(self, requests: Sequence[Request], sampling: Sampling, device: torch.device) -> None:
        self._temperature = sampling.temperature
        self._sampling = sampling
        if sampling.temperature > 0:
            draws = [
                generator(sampling.seed, r.purpose, r.step, r.prompt.index, r.completion_index).random(
                    sampling.max_completion_tokens
                )
                for r in requests
            ]
            self._uniforms = torch.from_numpy(np.stack(draws)).to(device)

    def __call__(self, logits: Tensor, rows: Tensor, position: int) -> tuple[Tensor, Tensor]:
        """logits [n, V] of requests `rows` [n] at completion token `position` -> tokens [n], log-probabilities [n]."""
        if self._temperature > 0:
            heated = logits.float() / self._temperature
            logprobs = cut(heated, self._sampling.top_p, self._sampling.top_k).log_softmax(-1)
            cumulative = logprobs.double().exp().cumsum(-1)
            target = self._uniforms[rows, position] * cumulative[:, -1]
            chosen = torch.searchsorted(cumulative, target[:, None], right=True).clamp_max(logits.size(-1) - 1)
        else:
            logprobs = logits.float().log_softmax(-1)
            chosen = logits.argmax(-1, keepdim=True)
        return chosen[:, 0], logprobs.gather(1, chosen)[:, 0]


def cut(logits: Tensor, top_p: float, top_k: int) -> Tensor:
    """Logits [n, V] with -inf where top-k, then top-p on what it leaves, forbid a token: the engines' order.

    A token is kept while the more likely ones have less than `top_p` together, so at least one is.
    """
    if 0 < top_k < logits.size(-1):
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -torch.inf)
    if top_p < 1:
        ordered, order = logits.sort(descending=True)
        probabilities = ordered.softmax(-1)
        beyond = probabilities.cumsum(-1) - probabilities >= top_p
        logits = logits.masked_fill(torch.zeros_like(beyond).scatter(1, order, beyond), -torch.inf)
    return logits
