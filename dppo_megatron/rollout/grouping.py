"""Between the loop's requests, one a completion, and the servers', one a group."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dppo_megatron.randomness import generator
from dppo_megatron.rollout.engine import Request, Sampling
from dppo_megatron.rollout.servers.wire import GenerateRequest
from dppo_megatron.types import Completion


def grouped(
    requests: Sequence[Request], sampling: Sampling, size: int, stop_ids: tuple[int, ...] = ()
) -> tuple[list[GenerateRequest], list[list[int]]]:
    """Consecutive completions of one prompt as one group of at most `size`, so that they share a prefill.

    How requests are grouped changes no completion: completion i of a prompt has the prompt's seed + i.

    Args:
        stop_ids: tokens that end every completion, beside those of its own sampling.

    Returns:
        The groups, and the positions in `requests` of each one's completions.

    Example:
        completions (prompt 7: 0, 1, 2), (prompt 9: 0), size 2  ->  groups of 2, 1 and 1; places [0, 1], [2], [3]
    """
    places: list[list[int]] = []
    latest: dict[tuple[str, int, int], list[int]] = {}
    for place, request in enumerate(requests):
        prompt = request.stream, request.step, request.prompt.index
        group = latest.get(prompt)
        follows = group is not None and requests[group[-1]].completion_index + 1 == request.completion_index
        if group is not None and follows and len(group) < size:
            group.append(place)
        else:
            latest[prompt] = [place]
            places.append(latest[prompt])
    groups = []
    for members in places:
        first = requests[members[0]]
        how = first.sampling or sampling
        draw = generator(how.seed, first.purpose, first.step, first.prompt.index, 0).integers(1 << 30)
        groups.append(
            GenerateRequest(
                request_id=first.id,
                prompt_ids=first.prompt.token_ids,
                count=len(members),
                seed=int(draw) + first.completion_index,
                max_tokens=how.max_completion_tokens,
                temperature=how.temperature,
                top_p=how.top_p,
                top_k=how.top_k,
                stop_token_ids=(*stop_ids, *how.stop_token_ids),
                reads_logprobs=how.reads_logprobs,
            )
        )
    return groups, places


def completion_of(
    token_ids: npt.NDArray[np.int32],
    logprobs: npt.NDArray[np.float32],
    reason: str,
    spans: Sequence[tuple[int, int]],
    text: str,
) -> Completion:
    """As the loop knows it, from what came over the wire."""
    return Completion(
        token_ids=token_ids.astype(np.int64),
        logprobs=logprobs,
        finish_reason="stop" if reason == "stop" else "length",
        text=text,
        weights_spans=tuple(spans),
    )
