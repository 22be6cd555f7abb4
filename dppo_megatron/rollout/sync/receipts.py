"""Proof that a server holds the weights it was sent: a digest per tensor, and log-probabilities of canary completions.

Digests show which parameters the engine holds; the canary shows which it computes with. Both are needed: vLLM on a CPU
multiplies with a packed copy of a weight, which can be old while the parameter is new. Engines join tensors (queries,
keys and values become one), so the actor's tensors are joined the same way before they are hashed. SHA-256 takes about
a second per gigabyte, so it runs in threads while the stream goes on.

If no server answers, the receipt is due again at the next sync, and after `MOST_MISSED` times in a row the run stops.
But no server is marked out for it: one that is late with a canary may be busy; health probes decide if it is alive.
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
"""Log-probabilities [num_tokens] of each completion under the actor's current weights; collective."""
_JOINED = (
    (re.compile(r"(.*self_attn\.)([qkv])_proj\.(weight|bias|weight_scale_inv)"), r"\1qkv_proj.\3", 3),
    (re.compile(r"(.*mlp\.(?:shared_experts?\.)?)(gate|up)_proj\.(weight|weight_scale_inv)"), r"\1gate_up_proj.\3", 2),
)
_PER_TOKEN = ("model.embed_tokens.weight", "lm_head.weight")
_ROUTER = ".gate.weight"
"""vLLM (0.32) holds the routers of GLM-4.5 and 4.6 in float32, whatever the model's dtype."""
_VOCABULARY_MULTIPLE = 64
"""Engines pad the vocabulary to a multiple of this with rows of zeros."""
_EMPTY = hashlib.sha256().hexdigest()
"""Digest that vLLM reports for a packed weight, whose parameter has no elements left."""
_DEQUANTIZED = "="
"""Prefix of names in `Digests` for a weight multiplied by its scales, which is what SGLang hashes."""
_MOST_WAITING_BYTES = 1 << 30


class Receipt:
    """Counts how often in a row no server has answered for one kind of proof."""

    def __init__(self, name: str) -> None:
        self._name, self._missed = name, 0

    @property
    def is_overdue(self) -> bool:
        """Whether no server answered the last time."""
        return self._missed > 0

    def record(self, answered: int, asked: int) -> None:
        """Record how many servers have answered. Raises RunAborted if none has, `MOST_MISSED` times in a row."""
        if answered or not asked:
            self._missed = 0
            return
        self._missed += 1
        if self._missed >= MOST_MISSED:
            problem = f"no rollout server has answered for its {self._name} after {self._missed} weight syncs in a row"
            # all ranks count canaries alike; rank 0 alone counts checksums, and broadcasts this
            raise on_every_rank(RunAborted(f"{problem}: nothing shows that they generate with the actor's weights"))
        missed = f"none of {asked} servers answered for its {self._name}"
        log(f"rollout: receipt not taken: {missed}; the next sync asks again")


class Digests:
    """SHA-256 of a stream of tensors, by the engine's joined names. Hashed in threads, which delay the stream only when
    more than `_MOST_WAITING_BYTES` wait to be hashed."""

    def __init__(self) -> None:
        self._parts: dict[str, dict[str, Tensor]] = {}
        """Joined name -> the parts so far, by their own names, of joined tensors that are incomplete."""
        self._digests: dict[str, Future[tuple[str, ...]]] = {}
        self._waiting: deque[tuple[int, Future[tuple[str, ...]]]] = deque()
        self._waiting_bytes = 0
        self._threads = ThreadPoolExecutor(max(2, torch.get_num_threads()), thread_name_prefix="digests")
        self._quantized = torch.empty(0)
        """The last FP8 weight, kept until its scales follow."""

    def tee(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        """The same stream, hashed on the way. Its tensors must not change until they are hashed."""
        for name, tensor in tensors:
            yield name, tensor
            self._add(name, tensor)

    def result(self) -> dict[str, tuple[str, ...]]:
        """For each name the digests that a server may report. Waits until all are computed."""
        self._hash_incomplete()
        self._threads.shutdown()
        digests = {name: future.result() for name, future in self._digests.items()}
        return {
            name: valid + digests.get(_DEQUANTIZED + name, ())
            for name, valid in digests.items()
            if not name.startswith(_DEQUANTIZED)
        }

    def _add(self, name: str, tensor: Tensor) -> None:
        is_quantized, are_scales = tensor.dtype == torch.float8_e4m3fn, name.endswith(SCALE)
        if tensor.is_cuda and (is_quantized or are_scales):
            return  # engines change the layout of scales for GPU kernels, and quantize some weights again: canary only
        if is_quantized:
            self._quantized = tensor
        elif are_scales:  # scales follow their weight in the stream
            self._collect(_DEQUANTIZED + name.removesuffix(SCALE), multiplied_out(self._quantized, tensor))
        self._collect(name, tensor)

    def _collect(self, name: str, tensor: Tensor) -> None:
        for pattern, joined, count in _JOINED:
            if pattern.fullmatch(name):
                key = pattern.sub(joined, name)
                parts = self._parts.setdefault(key, {})
                parts[name] = tensor.detach()
                if len(parts) == count:  # the actor streams parts in the order in which engines join them
                    self._hash(key, list(self._parts.pop(key).values()))
                return
        self._hash_incomplete()
        self._hash(name, [tensor.detach()])

    def _hash_incomplete(self) -> None:
        """Hash waiting parts alone: parts follow each other in the stream, so no more will come. (Moonlight's latent
        attention has a q_proj without k_proj.) Kept longer, each would keep a 256 MiB exchange buffer alive."""
        while self._parts:
            for name, tensor in self._parts.popitem()[1].items():
                self._hash(name, [tensor])

    def _hash(self, name: str, parts: list[Tensor]) -> None:
        num_bytes = sum(part.nbytes for part in parts)
        while self._waiting and self._waiting_bytes + num_bytes > _MOST_WAITING_BYTES:
            done_bytes, future = self._waiting.popleft()
            future.result()
            self._waiting_bytes -= done_bytes
        self._digests[name] = self._threads.submit(_valid_digests, name, parts)
        self._waiting.append((num_bytes, self._digests[name]))
        self._waiting_bytes += num_bytes


def _valid_digests(name: str, parts: list[Tensor]) -> tuple[str, ...]:
    plain = digest(*parts)
    if name.endswith(_ROUTER):
        return plain, digest(parts[0].float())
    if name not in _PER_TOKEN:
        return (plain,)
    [tensor] = parts
    return plain, digest(tensor, tensor.new_zeros(-tensor.shape[0] % _VOCABULARY_MULTIPLE, *tensor.shape[1:]))


def digest(*parts: Tensor) -> str:
    """SHA-256 of the concatenated bytes of tensors."""
    sha = hashlib.sha256()
    for part in parts:
        flat = part.detach().cpu().contiguous().reshape(-1)
        sha.update(flat.view(torch.uint8).numpy().data)
    return sha.hexdigest()


def differing(sent: dict[str, tuple[str, ...]], held: dict[str, str]) -> tuple[list[str], int]:
    """Names of tensors whose digests differ, and how many tensors were compared.

    Tensors that the engine does not report under our names are not compared: packed weights have no bytes to hash, and
    fused experts have other names. An engine may report only the first digits of a digest.
    """
    shared = [name for name in sent if not _EMPTY.startswith(held.get(name, ""))]
    return [name for name in shared if not any(valid.startswith(held[name]) for valid in sent[name])], len(shared)


class Canary:
    """The canary of a run: a few short completions of one prompt from every server, scored by the actor.

    It samples at most `CANARY_TOKENS` tokens, whatever a step's limit, and without top_p and top_k, as the actor scores
    with the full distribution. Made on every rank; all have the same state, because all get the same answers.
    """

    def __init__(self, rollout: RolloutConfig, seed: int, stop_token_ids: tuple[int, ...]):
        self._bound = rollout.sync.max_canary_logprob_diff
        self._count = min(CANARY_COMPLETIONS, rollout.completions_per_prompt)
        tokens = min(CANARY_TOKENS, rollout.sampling.max_completion_tokens)
        self._sampling = Sampling(tokens, rollout.sampling.temperature, seed, stop_token_ids=stop_token_ids)
        self._receipt = Receipt("canary")
        self._prompt: Prompt | None = None
        self._answers: list[tuple[str, Completion]] = []
        """Answers to the last `ask`, until they are judged."""

    @property
    def is_overdue(self) -> bool:
        return self._receipt.is_overdue

    def ask(self, engine: Engine, prompt: Prompt) -> None:
        """Request canary completions from all servers at once. An overdue canary first waits until everything that was
        started has been generated: at a server that is short of memory it could otherwise queue too long at every sync.
        Collective. Raises RunAborted like `Receipt.record`."""
        asked = sum(state == "live" for state in engine.health().values())
        requests = [Request(prompt, index, 0) for index in range(self._count)]
        self._prompt, self._answers = prompt, engine.probe(requests, self._sampling, alone=self.is_overdue)
        self._receipt.record(len({server for server, _ in self._answers}), asked)

    def judge(self, score: Score) -> dict[str, float]:
        """Compare the answers to the last `ask` with the actor; returns {} if that was done already. Collective. To be
        called before the actor's weights change, and after colocated servers have gone to sleep.

        Returns `rollout/canary_servers`, how many answered, and `rollout/canary_logprob_diff` if any did. Raises
        RunAborted for a server that computes with other weights.
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
    """Send the same requests to all live servers at once, to the replicas of one in turn. Returns (server or replica,
    completions), on rank 0. A server without a complete answer in time is left out and logged, but stays live."""

    def ask(member: Member) -> list[tuple[str, list[Sampled]]]:
        """All replicas of one server, one after the other."""
        by_replica = []
        for replica in range(member.width):
            target = replica if member.width > 1 else None
            addressed = [msgspec.structs.replace(group, replica=target) for group in groups]
            answers = [generate(member.server, group, expected, timeout_s=timeout_s) for group in addressed]
            sampled = [each for answer in answers for each in answer if len(each.token_ids)]
            by_replica.append((member.part(replica), sampled))
        return by_replica

    results = []
    for member, answer in at_once(fleet.live, ask):
        error = answer.exception()
        if isinstance(error, FAILURES):
            log(f"rollout: no answer to a canary request from {member.name}: {error}")
        else:
            results += answer.result()
    return results


def canary_difference(
    servers: Sequence[str],
    behaviour: Sequence[npt.NDArray[np.floating[Any]]],
    scored: Sequence[npt.NDArray[np.floating[Any]]],
    bound: float,
) -> float:
    """Mean |log-probability difference| per token of a server's canary completions; the largest over all servers.

    Args:
        servers: the server of each completion.
        behaviour: log-probabilities [n_i] of each completion's tokens, from the server.
        scored: the same tokens' log-probabilities under the actor.

    Raises RunAborted for a server above `bound`: it computes with other weights than the actor.
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
            problem = (
                f"{server} scores a canary completion differently from the actor: by {mean:.3g} per token, more"
                f" than rollout.sync.max_canary_logprob_diff = {bound:g}. It computes with other weights or another"
                " model, or rounds them (rollout.quantization) by more than the bound allows."
                " vLLM on a CPU with tied embeddings needs this project's worker extension (docs/engines.md)"
            )
            raise on_every_rank(RunAborted(problem))
        worst = max(worst, mean)
    return worst
