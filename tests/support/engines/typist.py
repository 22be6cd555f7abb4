"""A stub server that samples a token per tick, can be told to end a request, and draws each completion by its name: a
completion is the same however often it is interrupted, so that a test knows what an uninterrupted run trains on."""

from __future__ import annotations

import asyncio
import json
import zlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from support.engines.stub import STOP, VOCABULARY, Asked, StubServers


def whole(name: str, limit: int) -> tuple[list[int], list[float], str]:
    """Tokens, log-probabilities and finish reason of a completion, named step-prompt-completion: a quarter are long."""
    draw = np.random.default_rng(zlib.crc32(name.encode()))
    length = (
        int(draw.integers(limit // 2, limit + 1)) if draw.random() < 0.25 else int(draw.integers(1, limit // 4 + 1))
    )
    tokens = draw.integers(2, VOCABULARY, length).tolist()
    stops = length < limit or bool(draw.integers(2))
    tokens[-1] = STOP if stops else tokens[-1]
    return tokens, np.float32(-draw.exponential(1.0, length)).tolist(), "stop" if stops else "length"


@dataclass
class Typist:
    """`name`: of the server. `limit`: of a completion's tokens, by which it knows how many a request already has."""

    stubs: StubServers
    name: str
    limit: int
    tick_s: float = 0.01
    sampled: Counter[tuple[str, int]] = field(default_factory=Counter)
    """(completion, token) -> how often it was sampled. A request counts in the one that was here when it came, so that
    those of a killed run, which nobody ends, are not in another one that is put here for the next run."""
    seeds: dict[int, str] = field(default_factory=dict)
    most: int = 1 << 30
    """Tokens of a completion, beyond which it samples no more until this is raised."""
    deaf: bool = False
    """Ends nothing that it is told to end."""
    typing: int = 0
    """Requests that it has not ended."""

    async def __call__(self, asked: Asked) -> None:
        body = asked.body
        if "token_ids" in body:
            how, ids = body["sampling_params"], [body["request_id"]] * body["sampling_params"]["n"]
            each = [(body["token_ids"], how["max_tokens"], how["seed"] + place) for place in range(how["n"])]
        else:
            ids = body["rid"]
            each = [
                (prompt, how["max_new_tokens"], how.get("sampling_seed"))
                for prompt, how in zip(body["input_ids"], body["sampling_params"], strict=True)
            ]
        answers: list[dict[str, Any]] = []
        for place, ((prompt, left, seed), rid) in enumerate(zip(each, ids, strict=True)):
            stem, _, first = rid.partition(".")[0].rpartition("-")
            name, done = f"{stem}-{int(first) + place}", self.limit - left
            tokens, logprobs, reason = whole(name, self.limit)
            assert not done or prompt[-done:] == tokens[:done], f"{name} goes on from other tokens"
            if seed is not None:
                assert self.seeds.setdefault(seed, f"{name}+{done}") == f"{name}+{done}", (
                    "a seed is used for one request"
                )
            mine = {"name": name, "done": done, "tokens": tokens, "logprobs": logprobs, "reason": reason}
            answers.append(mine | {"id": rid, "versions": []})
        self.typing += 1
        try:
            await self._type(answers, self.sampled)
        finally:
            self.typing -= 1
        await asked.reply(json.dumps(_vllm(body, answers) if "token_ids" in body else _sglang(answers)))

    async def _type(self, answers: list[dict[str, Any]], sampled: Counter[tuple[str, int]]) -> None:
        while going := [one for one in answers if one["done"] + len(one["versions"]) < len(one["tokens"])]:
            await asyncio.sleep(self.tick_s)
            if self.stubs.dead.get(self.name):
                raise ConnectionResetError
            for one in going:
                if any(one["id"] in ended for ended in self.stubs.aborted.get(self.name, ())) and not self.deaf:
                    one["tokens"] = one["tokens"][: one["done"] + len(one["versions"])]
                    one["reason"] = "abort"
                    continue
                if one["done"] + len(one["versions"]) >= self.most:
                    continue
                sampled[one["name"], one["done"] + len(one["versions"])] += 1
                one["versions"].append(self.stubs.versions.get(self.name, "1"))


def _spans(versions: list[str]) -> list[dict[str, Any]]:
    edges = [i for i in range(1, len(versions)) if versions[i] != versions[i - 1]]
    starts, ends = [0, *edges], [*edges, len(versions)]
    each = zip(starts, ends, strict=True) if versions else ()
    return [{"version": versions[start], "start": start, "end": end} for start, end in each]


def _vllm(body: Any, answers: list[dict[str, Any]]) -> Any:
    choices = []
    for index, one in enumerate(answers):
        own = slice(one["done"], None)
        content = [{"logprob": value} for value in one["logprobs"][own][: len(one["versions"])]]
        choices.append(
            {"index": index, "token_ids": one["tokens"][own], "logprobs": {"content": content}}
            | {"finish_reason": one["reason"], "weight_versions": _spans(one["versions"])}
        )
    return {"request_id": f"generate-tokens-{body['request_id']}", "choices": choices}


def _sglang(answers: list[dict[str, Any]]) -> Any:
    found = []
    for one in answers:
        tokens = one["tokens"][one["done"] :]
        values = zip(one["logprobs"][one["done"] :], tokens, strict=False)
        meta = {
            "id": one["id"],
            "finish_reason": {"type": one["reason"]},
            "output_token_logprobs": [[value, token, None] for value, token in values],
            "weight_versions": _spans(one["versions"]),
        }
        found.append({"output_ids": tokens, "meta_info": meta})
    return found
