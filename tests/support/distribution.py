"""Whether a server samples from the model's distribution, and says so: counts against transformers' probabilities."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from scipy.stats import chi2

from dppo_megatron.rollout.engine import Request, Sampling
from dppo_megatron.rollout.server_engine import ServerEngine
from dppo_megatron.types import Prompt
from dppo_megatron.workbench.quickstart.tiny_model import VOCABULARY
from support.engines.servers import Reference

_EQUALS = VOCABULARY.index("=")
PROMPT = (*(token for each in range(3, len(VOCABULARY)) for token in (_EQUALS, each)), _EQUALS)
"""Every token has followed `=`, so that whatever is sampled first, n-grams have a draft for what follows."""
LEAST_P = 1e-4


def check_distribution(
    engine: ServerEngine, reference: Reference, prompt: Prompt, count: int, far: float = 1e-3
) -> None:
    """Chi-square of pairs of the second and third token after `PROMPT` in `count` samples, against the model's; and
    log-probabilities no further than `far` from its own."""
    prompt = replace(prompt, token_ids=PROMPT)
    requests = [Request(replace(prompt, index=number // 8), number % 8, 1) for number in range(count)]
    found = dict(engine.stream(requests, Sampling(3, 1.0, 0)))
    assert len(found) == count
    assert reference.difference(requests[:256], [found[number] for number in range(256)]).max() < far
    tokens = [one.token_ids.tolist() for one in found.values() if len(one.token_ids) == 3]
    size = len(VOCABULARY)
    expected = _pairs(reference) * len(tokens)
    cells = np.array([second * size + third for _, second, third in tokens])
    seen = np.bincount(cells, minlength=size**2).astype(float)
    rare = expected < 5
    seen, expected = np.append(seen[~rare], seen[rare].sum()), np.append(expected[~rare], expected[rare].sum())
    statistic = float(((seen - expected) ** 2 / expected).sum())
    p = float(chi2.sf(statistic, len(seen) - 1))
    print(f"chi-square {statistic:.1f} of {len(seen) - 1}, p {p:.3f}")
    assert p > LEAST_P


@torch.no_grad()
def _pairs(reference: Reference) -> np.ndarray:
    """[V^2] probability of (second, third), given three tokens none of which but the last ends the completion."""
    size, end = len(VOCABULARY), VOCABULARY.index("<eos>")
    stem = torch.tensor([PROMPT])
    first = reference.model(stem).logits[0, -1].float().softmax(-1)
    after_one = torch.cat([stem.expand(size, -1), torch.arange(size)[:, None]], dim=1)
    second = reference.model(after_one).logits[:, -1].float().softmax(-1)
    together = torch.zeros(size, size)
    for token in range(size):
        if token != end:
            after_two = torch.cat([after_one[token].expand(size, -1), torch.arange(size)[:, None]], dim=1)
            third = reference.model(after_two).logits[:, -1].float().softmax(-1)
            together += first[token] * second[token][:, None] * third
    together[end] = 0.0
    return (together / together.sum()).ravel().double().numpy()
