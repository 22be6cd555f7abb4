"""What is in flight between two steps, as a checkpoint holds it: all that was sampled for a rollout so far, finished or
not, and what happened to its requests."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, TypeAlias

import msgspec
import numpy as np
import torch

from dppo_megatron.config.rollout import RolloutConfig
from dppo_megatron.distributed import gather_all, to_rank_zero
from dppo_megatron.rollout.client.messages import Arrived
from dppo_megatron.rollout.servers.rollout_work import Work
from dppo_megatron.rollout.servers.wire import GenerateRequest, Sampled, version_name, version_number
from dppo_megatron.texts import log
from dppo_megatron.types import RunAborted

Found: TypeAlias = tuple[tuple[int, int], Sampled]
"""A completion's group in the rollout and position in the group, and what was sampled of it."""


MOST_BYTES = 1 << 30
"""Of a rollout, in a file that every rank reads: 128 x 16 answers of 8k tokens take 134 MB, with 48 layers' experts 6.4
GB."""


def digest(groups: Sequence[GenerateRequest], rollout: RolloutConfig) -> str:
    """Of what decides whether completions answer these requests, may be as old as they are, and have the labels that
    steps of this config give: those of a policy in FP8, or chosen by aborts, may not pass for others."""
    how = rollout.async_steps, rollout.sync.in_flight, rollout.quantization
    return hashlib.blake2b(msgspec.msgpack.encode((groups, how)), digest_size=16).hexdigest()


def collected(works: Sequence[Work], take: Callable[..., Iterable[Arrived]] | None) -> dict[int, dict[str, Any]]:
    """The state of each of `works` by step, on rank 0; empty if a client has ended. Collective. `take`: copies of what
    this rank's client has of a rollout, on the rank that has started a client."""
    state, failures = dict[int, dict[str, Any]](), list[str]()
    looks_at = tuple(work.number for work in works)  # all at once: a server that ends nothing is waited for once
    for work in works:
        mine: list[Found] = []
        try:
            found = take(rollout=work.number, looks_at=looks_at) if take else ()
            mine, looks_at = [((one.index, one.position), one.sampled) for one in found], ()
        except RunAborted as error:  # the next step ends the run
            failures.append(str(error))
        # asked first: rank 0 would need several times what it is sent
        size = sum(gather_all([sum(_bytes_of(one) for _, one in mine)]))
        if size <= MOST_BYTES and (each := to_rank_zero(mine)):
            one = packed(work, [*chain.from_iterable(each)])
            size = sum(one[name].nbytes for name in ("tokens", "logprobs", "experts"))  # with what was kept before
            state |= {work.order: one} if size <= MOST_BYTES else {}
        if size > MOST_BYTES:
            log(f"rollout: step {work.order}: not in the checkpoint, as it takes {size / 1e9:.1f} GB")
    return {} if gather_all(failures) else state


def _bytes_of(one: Sampled) -> int:
    return one.token_ids.nbytes + one.logprobs.nbytes + (0 if one.experts is None else one.experts.nbytes)


def packed(work: Work, found: Sequence[Found]) -> dict[str, Any]:
    """The state of a rollout: of n completions their tokens, log-probabilities and experts, one after another. A client
    may still have the beginning of a completion that another client has ended since: what has ended is kept. What an
    earlier checkpoint had of it may not have been asked for yet."""
    each = sorted([*work.kept.items(), *found], key=lambda it: (it[1].finish_reason != "abort", len(it[1].token_ids)))
    latest = dict(each)
    rows = list(latest.values())
    # with another seed it goes on from a place that the lost attempt may have passed
    done = [zip(work.completions_of(index), one.reasons, strict=True) for index, one in list(work.done.items())]
    again = set(work.lost_under).difference(place for place, reason in chain.from_iterable(done) if reason != "abort")
    work.resent.update(group for group, _ in again)
    given_up = {work.part_of(index)[0] for index in [*list(work.lost), *list(work.ended)]}  # a resume tries them again
    experts = [one.experts for one in rows if one.experts is not None]
    return {
        "requests": work.digest,
        "places": list(latest),
        "reasons": [one.finish_reason for one in rows],
        "lengths": [len(one.token_ids) for one in rows],
        "versions": [[(version_number(name), *span) for name, *span in one.weights_versions] for one in rows],
        "shapes": [None if one.experts is None else (one.experts.dtype.name, *one.experts.shape) for one in rows],
        "tokens": torch.from_numpy(np.concatenate([np.empty(0, np.int32), *(one.token_ids for one in rows)])),
        "logprobs": torch.from_numpy(np.concatenate([np.empty(0, np.float32), *(one.logprobs for one in rows)])),
        "experts": torch.from_numpy(np.frombuffer(bytearray(b"".join(map(np.ndarray.tobytes, experts))), np.uint8)),
        "counts": [work.retries, work.completions_aborted],
        "resent": sorted(work.resent | given_up),
        "aborted": sorted({work.part_of(index)[0] for index in list(work.aborts)}),  # the rollout thread adds to it
    }


def restore(work: Work, state: dict[str, Any], run: str) -> None:
    """Have `work` go on from a `packed` state of the same requests; of others it is sampled again. `run`: the prefix of
    the version names."""
    step = f"rollout: step {work.order}:"
    if state["requests"] != work.digest:
        return log(f"{step} sampled again: its requests or settings differ from those in the checkpoint")
    tokens, logprobs, experts = (state[name].numpy() for name in ("tokens", "logprobs", "experts"))
    start, routed = 0, 0
    columns = (state[name] for name in ("places", "reasons", "lengths", "versions", "shapes"))
    for place, reason, length, spans, shape in zip(*columns, strict=True):
        own, of_token = slice(start, start := start + length), None
        if shape is not None:
            count = int(np.prod(shape[1:])) * np.dtype(shape[0]).itemsize
            of_token = experts[routed : (routed := routed + count)].view(shape[0]).reshape(shape[1:])
        versions = tuple((version_name(run, number), *span) for number, *span in spans)
        work.kept[place] = Sampled(tokens[own], logprobs[own], reason, versions, of_token)
    work.retries, work.completions_aborted = state["counts"]
    work.resent.update(state["resent"])
    work.aborts.update(dict.fromkeys(state["aborted"], 1))
    finished = sum(reason != "abort" for reason in state["reasons"])
    log(f"{step} {finished} completions and the first tokens of {len(work.kept) - finished} are the checkpoint's")
