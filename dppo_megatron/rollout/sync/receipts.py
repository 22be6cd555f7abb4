"""Proof that a server holds the weights it was sent: a digest per tensor, and what a canary completion scores.

Digests show what the engine's parameters are; the canary shows what it computes with. Both are needed: vLLM on a CPU
multiplies with a packed copy of a weight, which can be old while the parameter is new. Engines join tensors (queries,
keys and values to one), so the actor's are joined the same way before they are hashed; SHA-256 takes about a second
for a gigabyte, so it runs in threads beside the stream.

No answer is no proof: a receipt that no server has answered is logged as not taken; it is due again at the next sync,
and after `MOST_MISSED` in a row the run stops. Nor is it an outage: a server that is late with a canary may have other
work, and health probes decide whether it is alive.
"""

from __future__ import annotations

import hashlib
import re
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dppo_megatron.config.rollout import RolloutConfig
from dppo_megatron.distributed import on_every_rank
from dppo_megatron.rollout.engine import Engine, Request, Sampling
from dppo_megatron.rollout.fp8_weights import SCALE, multiplied_out
from dppo_megatron.rollout.servers.fleet import Fleet
from dppo_megatron.rollout.servers.member import Member
from dppo_megatron.rollout.servers.protocol import generate
from dppo_megatron.rollout.servers.wire import Expected, GenerateRequest, Sampled
from dppo_megatron.rollout.sync.channels import FAILURES, at_once
from dppo_megatron.texts import log
from dppo_megatron.types import Completion, Prompt, RunAborted

MOST_MISSED = 3
CANARY_TOKENS = 64
CANARY_COMPLETIONS = 8
Score: TypeAlias = Callable[[Prompt, Sequence[Completion]], Sequence[npt.NDArray[np.floating[Any]]]]
"""Log-probabilities [num_tokens] of each completion under the actor's present weights; collective."""
_JOINED = (
    (re.compile(r"(.*self_attn\.)([qkv])_proj\.(weight|bias|weight_scale_inv)"), r"\1qkv_proj.\3", 3),
    (re.compile(r"(.*mlp\.(?:shared_experts?\.)?)(gate|up)_proj\.(weight|weight_scale_inv)"), r"\1gate_up_proj.\3", 2),
)
_PER_TOKEN = ("model.embed_tokens.weight", "lm_head.weight")
_ROUTER = ".gate.weight"
"""vLLM (0.32) has those of GLM-4.5 and 4.6 in float32, whatever the model's dtype."""
_VOCABULARY_MULTIPLE = 64
"""Engines pad the vocabulary to this with rows of zeros."""
_EMPTY = hashlib.sha256().hexdigest()
"""What vLLM shows of a packed weight: a tensor without elements."""
_MULTIPLIED_OUT = "="
"""Begins the name of a weight times its scales, which is what SGLang hashes."""
_MOST_WAITING_BYTES = 1 << 30


class Receipt:
    """How often in a row one kind of proof was not taken."""

    def __init__(self, name: str) -> None:
        self._name, self._missed = name, 0

    @property
    def is_overdue(self) -> bool:
        """No server answered the last time."""
        return self._missed > 0

    def settle(self, answered: int, asked: int) -> None:
        """Record how many servers have answered. Raises RunAborted after `MOST_MISSED` times none in a row."""
        if answered or not asked:
            self._missed = 0
            return
        self._missed += 1
        if self._missed >= MOST_MISSED:
            raise on_every_rank(  # a canary's on each, checksums' on rank 0, which the others are told
                RunAborted(
                    f"no rollout server has answered for its {self._name} after {self._missed} weight syncs in a row:"
                    " nothing shows that they generate with the actor's weights"
                )
            )
        log(
            f"rollout: receipt not taken: none of {asked} servers answered for its {self._name};"
            " the next sync asks again"
        )


class Digests:
    """SHA-256 of a stream of tensors, by the engine's joined names. Hashed in threads, which hold up the stream only
    when more than `_MOST_WAITING_BYTES` wait for them."""

    def __init__(self) -> None:
        self._parts: dict[str, dict[str, Tensor]] = {}
        """Of each joined tensor that is not complete, by their own names."""
        self._found: dict[str, Future[tuple[str, ...]]] = {}
        self._waiting: deque[tuple[int, Future[tuple[str, ...]]]] = deque()
        self._waiting_bytes = 0
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="digests")
        self._rounded = torch.empty(0)
        """The last weight in FP8, until its scales come."""

    def tee(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        """The same stream. Its tensors must stay as they are until they are hashed."""
        for name, tensor in tensors:
            yield name, tensor
            self._add(name, tensor)

    def result(self) -> dict[str, tuple[str, ...]]:
        """The digests that are right for each name, when all are there."""
        self._hash_alone()
        self._threads.shutdown()
        found = {name: digests.result() for name, digests in self._found.items()}
        return {
            name: right + found.get(_MULTIPLIED_OUT + name, ())
            for name, right in found.items()
            if not name.startswith(_MULTIPLIED_OUT)
        }

    def _add(self, name: str, tensor: Tensor) -> None:
        is_rounded, are_scales = tensor.dtype == torch.float8_e4m3fn, name.endswith(SCALE)
        if tensor.is_cuda and (is_rounded or are_scales):
            return  # kernels for GPUs lay out scales anew, some round weights again: the canary is the receipt
        if is_rounded:
            self._rounded = tensor
        elif are_scales:  # they follow their weight
            self._collect(_MULTIPLIED_OUT + name.removesuffix(SCALE), multiplied_out(self._rounded, tensor))
        self._collect(name, tensor)

    def _collect(self, name: str, tensor: Tensor) -> None:
        for pattern, joined, count in _JOINED:
            if pattern.fullmatch(name):
                key = pattern.sub(joined, name)
                parts = self._parts.setdefault(key, {})
                parts[name] = tensor.detach()
                if len(parts) == count:  # the actor streams them in the order in which engines join them
                    self._hash(key, list(self._parts.pop(key).values()))
                return
        self._hash_alone()
        self._hash(name, [tensor.detach()])

    def _hash_alone(self) -> None:
        """What waits has no other parts, since those follow each other: of latent attention without a rank for queries
        (Moonlight) q_proj. Kept, each would keep its exchange of 256 MiB."""
        while self._parts:
            for name, tensor in self._parts.popitem()[1].items():
                self._hash(name, [tensor])

    def _hash(self, name: str, parts: list[Tensor]) -> None:
        num_bytes = sum(part.nbytes for part in parts)
        while self._waiting and self._waiting_bytes + num_bytes > _MOST_WAITING_BYTES:
            done_bytes, future = self._waiting.popleft()
            future.result()
            self._waiting_bytes -= done_bytes
        self._found[name] = self._threads.submit(_digests, name, parts)
        self._waiting.append((num_bytes, self._found[name]))
        self._waiting_bytes += num_bytes


def _digests(name: str, parts: list[Tensor]) -> tuple[str, ...]:
    plain = digest(*parts)
    if name.endswith(_ROUTER):
        return plain, digest(parts[0].float())
    if name not in _PER_TOKEN:
        return (plain,)
    [tensor] = parts
    return plain, digest(tensor, tensor.new_zeros(-tensor.shape[0] % _VOCABULARY_MULTIPLE, *tensor.shape[1:]))


def digest(*parts: Tensor) -> str:
    """SHA-256 of tensors' bytes, one after the other."""
    found = hashlib.sha256()
    for part in parts:
        flat = part.detach().cpu().contiguous().reshape(-1)
        found.update(flat.view(torch.uint8).numpy().data)
    return found.hexdigest()


def differing(sent: dict[str, tuple[str, ...]], held: dict[str, str]) -> tuple[list[str], int]:
    """Names whose digests differ, and how many could be compared.

    What the engine does not show under one of our names is left out: packed weights have no bytes to hash,
    fused experts have others. An engine may show the first digits only.
    """
    shared = [name for name in sent if not _EMPTY.startswith(held.get(name, ""))]
    return [name for name in shared if not any(right.startswith(held[name]) for right in sent[name])], len(shared)


class Canary:
    """The canary of a run: a few short completions of one prompt from every server, scored by the actor.

    Its sampling is its own: `CANARY_TOKENS` at most, whatever a step's completions may have, and uncut, since the
    actor's log-probabilities are. Made on every rank; all count alike, because all get the same answers.
    """

    def __init__(self, rollout: RolloutConfig, seed: int, stop_token_ids: tuple[int, ...]):
        self._bound = rollout.sync.max_canary_logprob_diff
        self._count = min(CANARY_COMPLETIONS, rollout.completions_per_prompt)
        tokens = min(CANARY_TOKENS, rollout.sampling.max_completion_tokens)
        self._sampling = Sampling(tokens, rollout.sampling.temperature, seed, stop_token_ids=stop_token_ids)
        self._receipt = Receipt("canary")
        self._prompt: Prompt | None = None
        self._answers: list[tuple[str, Completion]] = []
        """Of the last `ask`, until they are judged."""

    @property
    def is_overdue(self) -> bool:
        """No server answered the last one."""
        return self._receipt.is_overdue

    def ask(self, engine: Engine, prompt: Prompt) -> None:
        """Ask all servers at once; an overdue canary when they have generated what was started: at one that is short of
        memory it may stand behind more than it can wait for, at every sync. Collective. Raises RunAborted as
        `Receipt.settle`."""
        asked = sum(state == "live" for state in engine.health().values())
        requests = [Request(prompt, index, 0) for index in range(self._count)]
        self._prompt, self._answers = prompt, engine.probe(requests, self._sampling, alone=self.is_overdue)
        self._receipt.settle(len({server for server, _ in self._answers}), asked)

    def judge(self, score: Score) -> dict[str, float]:
        """Compare the answers of the last `ask`; nothing if they were judged already. Collective, and before the
        actor's weights change: where they are offloaded for the servers, after those have gone to sleep.

        Returns:
            `rollout/canary_servers`, how many answered, and `rollout/canary_logprob_diff` if any did.

        Raises:
            RunAborted: a server computes with other weights.
        """
        prompt, answers = self._prompt, self._answers
        self._prompt, self._answers = None, []
        if prompt is None:
            return {}
        if not answers:
            return {"rollout/canary_servers": 0.0}
        servers = [server for server, _ in answers]
        scored = score(prompt, [completion for _, completion in answers])
        worst = canary_difference(servers, [completion.logprobs for _, completion in answers], scored, self._bound)
        return {"rollout/canary_servers": float(len(set(servers))), "rollout/canary_logprob_diff": worst}


def ask_for_canary(
    fleet: Fleet, groups: Sequence[GenerateRequest], expected: Expected, timeout_s: float
) -> list[tuple[str, list[Sampled]]]:
    """(server or replica, completions) of the same requests from each replica of all live servers, which are asked at
    once; on rank 0. A server that gives no whole answer in time is left out and named in the log, and is as live as
    before."""

    def ask(member: Member) -> list[tuple[str, list[Sampled]]]:
        """One server, replica after replica."""
        found = []
        for replica in range(member.width):
            one = replica if member.width > 1 else None
            own = [msgspec.structs.replace(group, replica=one) for group in groups]
            answers = [generate(member.server, group, expected, timeout_s=timeout_s) for group in own]
            sampled = [each for answer in answers for each in answer if len(each.token_ids)]
            found.append((member.part(replica), sampled))
        return found

    found = []
    for member, answer in at_once(fleet.live, ask):
        error = answer.exception()
        if isinstance(error, FAILURES):
            log(f"rollout: no answer to a canary request from {member.name}: {error}")
        else:
            found += answer.result()
    return found


def canary_difference(
    servers: Sequence[str],
    behaviour: Sequence[npt.NDArray[np.floating[Any]]],
    scored: Sequence[npt.NDArray[np.floating[Any]]],
    bound: float,
) -> float:
    """The largest mean |log-probability difference| of a server's canary completions.

    Args:
        servers: which server gave each completion.
        behaviour: its log-probabilities [n_i] there.
        scored: the same tokens' under the actor.

    Raises:
        RunAborted: a server is above `bound`: it computes with other weights than the actor.
    """
    worst = 0.0
    for server in dict.fromkeys(servers):
        differences = [
            np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64))
            for name, a, b in zip(servers, behaviour, scored, strict=True)
            if name == server
        ]
        mean = float(np.concatenate(differences).mean())
        if not mean <= bound:
            raise on_every_rank(
                RunAborted(
                    f"{server} scores a canary completion {mean:.3g} a token away from the actor, more than"
                    f" rollout.sync.max_canary_logprob_diff = {bound:g}: it computes with other weights or another"
                    " model, or rounds them (rollout.quantization) by more than the bound allows."
                    " vLLM on a CPU with tied embeddings needs this project's worker extension (docs/engines.md)"
                )
            )
        worst = max(worst, mean)
    return worst
