"""The embedded engine: a model in every rank, for CPUs and small models.

It needs no server and gives exact behaviour log-probabilities. A token is chosen by inverting the cumulative
distribution at a counter-based uniform, so a completion depends on its (seed, step, prompt, completion index) and not
on the batch or rank it is generated in. A prompt is prefilled once for all of its completions, a completion leaves the
batch with its last token, and completions are graded while others are still being sampled:

    this thread         prefill, then token after token ---- 32 have ended ---- token after token ---- last token
                                                                  |                                         |
    graders' processes                                            '-> grade these 32       grade the rest <-'
                                                                      (take_grades waits for the grades)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from itertools import islice

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from dppo_megatron.config.schema import Config
from dppo_megatron.randomness import uniform_rows
from dppo_megatron.rollout.client.detokenizer import Detokenizer
from dppo_megatron.rollout.decoder import Decoder, Moves
from dppo_megatron.rollout.engine import Engine, Request, Sampling, Weights, own_requests
from dppo_megatron.spans import recorder
from dppo_megatron.types import Completion, ExpertArray, ExpertChoices, FinishReason, Grade, GradeTask
from dppo_megatron.weights.architecture import Architecture
from dppo_megatron.weights.hf_files import WeightReader
from dppo_megatron.weights.provider import model_architecture

_FINISHED_BATCH = 32
"""Finished completions are detokenized in batches of at least this size (but the last) and graded in batches of it."""


class HFEngine(Engine):
    """A model of this architecture, without weights until `load_weights`.

    Args:
        max_concurrent_sequences: completions in one batch.
        grade: submits completions of the training set for grading and returns at once.
        records_experts: add to each completion the experts that its tokens were routed to.
    """

    def __init__(
        self,
        architecture: Architecture,
        tokenizer: PreTrainedTokenizerBase,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_concurrent_sequences: int,
        grade: Callable[[Sequence[GradeTask]], Future[list[Grade]]] | None = None,
        records_experts: bool = False,
    ) -> None:
        self._decoder = Decoder(architecture, dtype=dtype, device=device, records_experts=records_experts)
        self._choices = architecture.expert_choices if records_experts else None
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer.of(tokenizer)
        self._device = device
        self._batch = max_concurrent_sequences
        self._grade = grade
        self._graded: list[tuple[list[int], Future[list[Grade]]]] = []
        """(positions in the requests, their grades) for each batch that the last `finish` has submitted."""
        self.description = "rollout: embedded in every rank"

    @torch.no_grad()
    def load_weights(self, weights: Weights, release: Callable[[], None] = lambda: None) -> bool:
        """Copy every tensor into the model. Raises ValueError if the stream lacks a parameter."""
        self.weights_version += 1
        missing = set(self._decoder.named)
        for name, tensor in weights():
            self._decoder.named[name].copy_(tensor)
            missing.discard(name)
        if missing:
            raise ValueError(f"the weight stream lacks {sorted(missing)}")
        release()
        return False

    def stream(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[tuple[int, Completion]]:
        """Batches are of prompts of similar length, so that little is computed for padding."""
        by_sampling: dict[Sampling, list[int]] = {}
        for index in own_requests(requests):
            by_sampling.setdefault(requests[index].sampling or sampling, []).append(index)
        for parameters, order in by_sampling.items():
            order.sort(key=lambda i: len(requests[i].prompt.token_ids))
            for start in range(0, len(order), self._batch):
                chunk = order[start : start + self._batch]
                with recorder().span("generation", f"{len(chunk)} completions"):
                    for row, completion in self._generate([requests[i] for i in chunk], parameters):
                        yield chunk[row], completion

    def finish(self) -> dict[int, Completion]:
        """Submits completions for grading as they arrive."""
        if self._start_arguments is None:
            return {}
        requests, sampling = self._start_arguments
        self._drop_grades()
        completions: dict[int, Completion] = {}
        arriving = self.stream(requests, sampling)
        while batch := list(islice(arriving, _FINISHED_BATCH)):
            completions |= batch
            if self._grade is not None:
                ended = [position for position, completion in batch if completion.finish_reason != "early"]
                tasks = [
                    GradeTask.of(one.prompt, got.text, one.completion_index, len(got.token_ids), got.finish_reason)
                    for one, got in ((requests[position], completions[position]) for position in ended)
                ]
                self._graded.append((ended, self._grade(tasks)))
        return dict(sorted(completions.items()))

    def take_grades(self) -> dict[int, Grade]:
        """Waits for completions that are still being graded; raises what `grade` raises."""
        graded, self._graded = self._graded, []
        grades: dict[int, Grade] = {}
        for positions, future in graded:
            grades |= zip(positions, future.result(), strict=True)
        return grades

    def _drop_grades(self) -> None:
        for _, future in self._graded:
            future.cancel()
        self._graded = []

    def close(self) -> None:
        self._drop_grades()

    @torch.inference_mode()
    def _generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[tuple[int, Completion]]:
        """Yields (position in `requests`, completion) of one batch, as completions end."""
        index: dict[tuple[int, ...], int] = {}  # each distinct prompt is read once
        prompt_of = [index.setdefault(request.prompt.token_ids, len(index)) for request in requests]
        prompts = list(index)
        tokens, visible = self._left_pad(prompts)
        cache = self._decoder.empty_cache(len(prompts), tokens.size(1))
        positions = (visible.cumsum(-1) - 1).clamp_min(0)
        logits = self._decoder.read(tokens, positions, visible, cache)
        prompt_of_row = torch.tensor(prompt_of, device=self._device)
        cache.expand(prompt_of_row)
        prompt_experts, prompt_visible = self._decoder.experts, visible
        logits, positions, visible = logits[prompt_of_row], positions[prompt_of_row, -1], visible[prompt_of_row]
        # an attention bias for the running rows, -inf at padding; None if all prompts have the same length
        padding = None if bool(visible.all()) else torch.zeros_like(visible, dtype=logits.dtype)
        if padding is not None:
            padding.masked_fill_(~visible, -torch.inf)

        choose = _Chooser(requests, sampling, self._device)
        output = _BatchOutput(len(requests), sampling.max_completion_tokens, self._device, self._choices)
        if self._choices is not None:
            output.add_prompt_experts(prompt_experts, prompt_visible, prompt_of_row)
        stops = torch.tensor([self._tokenizer.eos_token_id, *sampling.stop_token_ids], device=self._device)
        rows, longest = torch.arange(len(requests), device=self._device), sampling.max_completion_tokens
        limits = torch.tensor([request.limit or longest for request in requests], device=self._device)
        for t in range(longest):
            chosen, output.logprobs[rows, t] = choose(logits, rows, t)
            output.tokens[rows, t] = chosen
            stopped = (chosen[:, None] == stops).any(1)
            early = ~stopped & (limits[rows] == t + 1) & (t + 1 < longest)
            running = ~(stopped | early)
            num_running = int(running.sum())
            if num_running < len(rows):
                output.end(rows[stopped], t + 1, "stop")
                output.end(rows[early], t + 1, "early")
                moves = Moves.of(running, num_running)
                cache.move(moves)
                rows, chosen, positions = (moves.apply(each) for each in (rows, chosen, positions))
                padding = None if padding is None else moves.apply(padding)
            if num_running == 0 or t + 1 == longest:
                break
            if len(output.ended) >= _FINISHED_BATCH:
                yield from self._completions(output)
            positions = positions + 1
            logits = self._decoder.step(chosen, positions, padding, cache)
            if self._choices is not None:
                output.add_experts(rows, t, self._decoder.experts)
        output.end(rows, longest, "length")
        yield from self._completions(output)

    def _left_pad(self, prompts: Sequence[tuple[int, ...]]) -> tuple[Tensor, Tensor]:
        """Tokens [P, longest], and a bool mask [P, longest] that is False at padding."""
        rows = [torch.tensor(token_ids) for token_ids in prompts]
        tokens = pad_sequence(rows, True, self._tokenizer.pad_token_id, padding_side="left")
        visible = pad_sequence([torch.ones_like(row, dtype=torch.bool) for row in rows], True, padding_side="left")
        return tokens.to(self._device), visible.to(self._device)

    def _completions(self, output: _BatchOutput) -> list[tuple[int, Completion]]:
        """Take the completions `output.ended`, as (row, completion)."""
        ended, output.ended = output.ended, []
        rows = torch.tensor([row for row, _, _ in ended], device=self._device)
        tokens, logprobs = output.tokens[rows].cpu().numpy(), output.logprobs[rows].cpu().numpy()
        # copied: a view would keep the whole array alive, which is as wide as the longest possible completion
        token_ids = [ids[:length].copy() for ids, (_, length, _) in zip(tokens, ended, strict=True)]
        texts = self._detokenizer.decode(token_ids)
        taken = []
        for (row, length, reason), ids, values, text in zip(ended, token_ids, logprobs, texts, strict=True):
            own, versions = values[:length].copy(), ((self.weights_version, length),)
            taken.append((row, Completion(ids, own, reason, text, versions, output.experts(row, length))))
        return taken


class _BatchOutput:
    """What has been sampled for the requests of a batch."""

    def __init__(self, rows: int, tokens: int, device: torch.device, choices: ExpertChoices | None = None) -> None:
        self.tokens = torch.empty(rows, tokens, dtype=torch.int64, device=device)
        self.logprobs = torch.empty(rows, tokens, dtype=torch.float32, device=device)
        self.ended: list[tuple[int, int, FinishReason]] = []
        """(row, length, reason) of the completions that have ended and were not taken yet."""
        self._choices = choices
        self._prompt_experts: list[ExpertArray] = []
        if choices is not None:
            shape = rows, tokens, choices.layers, choices.per_token
            self._token_experts = np.empty(shape, choices.dtype)

    def add_prompt_experts(self, experts: Tensor | None, visible: Tensor, prompt_of_row: Tensor) -> None:
        """Record the experts [P, longest, layers, k] of the prompts' tokens. prompt_of_row: [B] index into P."""
        assert experts is not None and self._choices is not None
        padded = experts.cpu().numpy().astype(self._choices.dtype)
        each = [row[mask] for row, mask in zip(padded, visible.cpu().numpy(), strict=True)]
        self._prompt_experts = [each[prompt] for prompt in prompt_of_row.tolist()]

    def add_experts(self, rows: Tensor, t: int, experts: Tensor | None) -> None:
        """Record the experts [n, 1, layers, k] of token t of `rows` [n]."""
        assert experts is not None
        self._token_experts[rows.cpu().numpy(), t] = experts[:, 0].cpu().numpy()

    def experts(self, row: int, length: int) -> ExpertArray | None:
        """See `Completion.experts`: for all tokens but the last, which is never an input of the model."""
        if self._choices is None:
            return None
        return np.concatenate([self._prompt_experts[row], self._token_experts[row, : length - 1]])

    def end(self, rows: Tensor, length: int, reason: FinishReason) -> None:
        self.ended += [(row, length, reason) for row in rows.tolist()]


def engine_from_files(config: Config, tokenizer: PreTrainedTokenizerBase, checkpoint: WeightReader) -> HFEngine:
    """An engine with the weights of a checkpoint, without an actor: for scoring a finished model."""
    engine = HFEngine(
        model_architecture(config.model),
        tokenizer,
        dtype=getattr(torch, config.model.dtype),
        device=torch.device("cuda" if torch.cuda.is_available() else "cpu"),
        max_concurrent_sequences=config.rollout.limits.max_concurrent_sequences,
    )
    engine.load_checkpoint(checkpoint)
    return engine


class _Chooser:
    """Chooses each row's next token: by its counter-based uniform, or the most likely token at temperature 0."""

    def __init__(self, requests: Sequence[Request], sampling: Sampling, device: torch.device) -> None:
        self._sampling = sampling
        if sampling.temperature > 0:
            addresses = [(sampling.seed, r.purpose, (r.step, r.prompt.index, r.completion_index)) for r in requests]
            self._uniforms = torch.from_numpy(uniform_rows(addresses, sampling.max_completion_tokens)).to(device)

    def __call__(self, logits: Tensor, rows: Tensor, position: int) -> tuple[Tensor, Tensor]:
        """logits [n, V] of requests `rows` [n] at completion token `position` -> tokens [n], log-probabilities [n]."""
        if self._sampling.temperature > 0:
            scaled = logits.float() / self._sampling.temperature
            logprobs = truncate_logits(scaled, self._sampling.top_p, self._sampling.top_k).log_softmax(-1)
            cumulative = logprobs.double().exp().cumsum(-1)
            target = self._uniforms[rows, position] * cumulative[:, -1]
            chosen = torch.searchsorted(cumulative, target[:, None], right=True).clamp_max(logits.size(-1) - 1)
        else:
            logprobs = logits.float().log_softmax(-1)
            chosen = logits.argmax(-1, keepdim=True)
        return chosen[:, 0], logprobs.gather(1, chosen)[:, 0]


def truncate_logits(logits: Tensor, top_p: float, top_k: int) -> Tensor:
    """Logits [n, V] with -inf at tokens that top-k, then top-p on the rest, exclude; vLLM has this order, SGLang not.

    A token is kept if all more likely tokens together have less than `top_p`, so at least one token is kept.
    """
    if 0 < top_k < logits.size(-1):
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -torch.inf)
    if top_p < 1:
        ordered, order = logits.sort(descending=True)
        probabilities = ordered.softmax(-1)
        beyond = probabilities.cumsum(-1) - probabilities >= top_p
        logits = logits.masked_fill(torch.zeros_like(beyond).scatter(1, order, beyond), -torch.inf)
    return logits
