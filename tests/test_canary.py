"""The canary: whether servers generate with the actor's weights, by the actor's own log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from support.said import heard
from support.settings import rollout_config

from dppo_megatron.rollout.sync.receipts import MOST_MISSED, Canary
from dppo_megatron.types import Completion, Prompt, RunAborted


class Answering:
    """An engine of which only `probe` and `health` are asked."""

    def __init__(self) -> None:
        self.answers: list[tuple[str, Completion]] = []
        self.asked: list[Any] = []

    def health(self) -> dict[str, str]:
        return {"a": "live", "b": "live", "c": "out: no answer"}

    def probe(self, requests: Any, sampling: Any) -> list[tuple[str, Completion]]:
        self.asked.append((len(requests), sampling))
        return self.answers


def _completion(logprob: float) -> Completion:
    return Completion(np.array([3, 4]), np.full(2, logprob, np.float32), "length", "", ((1, 2),))


def test_the_canary_is_short_and_silence_does_not_pass() -> None:
    """At most 64 tokens and no cut, whatever the run samples. One answer of two is compared and counted; none is said,
    is due again, and stops the run the third time in a row."""
    said = heard()
    values = {"sampling.max_completion_tokens": 32768, "sampling.top_p": 0.9, "completions_per_prompt": 16}
    canary, engine = Canary(rollout_config({"engine": "vllm", **values}), 0, ()), Answering()
    prompt = Prompt(0, "q", (1, 2), "a", "")

    def score(_: Prompt, completions: Sequence[Completion]) -> list[Any]:
        return [np.full(len(one.token_ids), -1.0) for one in completions]

    engine.answers = [("a", _completion(-1.01))]
    canary.ask(engine, prompt)  # type: ignore[arg-type]
    found = canary.judge(score)
    assert found == {"rollout/canary_servers": 1.0, "rollout/canary_logprob_diff": pytest.approx(0.01, abs=1e-6)}
    count, sampling = engine.asked[0]
    assert count == 8 and (sampling.max_completion_tokens, sampling.top_p, sampling.top_k) == (64, 1.0, 0)
    engine.answers = []
    for _ in range(MOST_MISSED - 1):
        canary.ask(engine, prompt)  # type: ignore[arg-type]
        assert canary.judge(score) == {"rollout/canary_servers": 0.0} and canary.is_overdue
    assert len(said) == MOST_MISSED - 1 and "none of 2 servers answered for its canary" in said[0]
    with pytest.raises(RunAborted, match=r"no rollout server has answered for its canary after 3 weight syncs"):
        canary.ask(engine, prompt)  # type: ignore[arg-type]
    engine.answers = [("b", _completion(-2.0))]
    canary.ask(engine, prompt)  # type: ignore[arg-type]
    with pytest.raises(RunAborted, match=r"^b scores a canary"):
        canary.judge(score)
    assert canary.judge(score) == {}, "judged once"
