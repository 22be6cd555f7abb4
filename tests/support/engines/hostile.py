"""Ways in which a server can answer wrongly, as a table: (name, engine, behaviour).

What both dialects share (status, framing, size, timing) is generated for each of them; values are changes to a good
answer. None may end in a wrong completion, in a traceback, or in waiting for ever.
"""

from __future__ import annotations

import asyncio
import copy
import gzip
import json
from collections.abc import Callable
from typing import Any

from support.engines.stub import Asked, Behaviour, answer_to

ENGINES = ("vllm", "sglang")
Change = Callable[[Any], Any]
_HOLD_S = 60.0
"""Longer than any limit of the test."""


def _json(change: Change) -> Behaviour:
    """A good answer with something changed in it."""

    async def behave(asked: Asked) -> None:
        await asked.reply(json.dumps(change(copy.deepcopy(answer_to(asked.body)))))

    return behave


def _text(edit: Callable[[str], str | bytes]) -> Behaviour:
    """A good answer's text, edited."""

    async def behave(asked: Asked) -> None:
        await asked.reply(edit(json.dumps(answer_to(asked.body))))

    return behave


def _status(code: int, reason: str, headers: str = "", good_body: bool = False) -> Behaviour:
    async def behave(asked: Asked) -> None:
        body = json.dumps(answer_to(asked.body)) if good_body else json.dumps({"error": {"message": "hostile"}})
        await asked.reply(body, f"{code} {reason}", headers)

    return behave


def _first_of_vllm(**values: Any) -> Behaviour:
    def change(answer: Any) -> Any:
        answer["choices"][0] |= values
        return answer

    return _json(change)


def _first_of_sglang(**values: Any) -> Behaviour:
    def change(answer: Any) -> Any:
        answer[0]["meta_info"] |= values
        return answer

    return _json(change)


def _choices(change: Change) -> Behaviour:
    def whole(answer: Any) -> Any:
        answer["choices"] = change(answer["choices"])
        return answer

    return _json(whole)


def _tokens(change: Callable[[list[int]], list[Any]]) -> dict[str, Behaviour]:
    """The first completion's tokens, with everything else as it was."""

    def vllm(answer: Any) -> Any:
        answer["choices"][0]["token_ids"] = change(answer["choices"][0]["token_ids"])
        return answer

    def sglang(answer: Any) -> Any:
        answer[0]["output_ids"] = change(answer[0]["output_ids"])
        return answer

    return {"vllm": _json(vllm), "sglang": _json(sglang)}


def _logprobs(change: Callable[[list[float]], list[Any]]) -> dict[str, Behaviour]:
    """The first completion's log-probabilities, likewise."""

    def vllm(answer: Any) -> Any:
        content = answer["choices"][0]["logprobs"]["content"]
        values = change([entry["logprob"] for entry in content])
        answer["choices"][0]["logprobs"]["content"] = [{"token_id": 5, "logprob": value} for value in values]
        return answer

    def sglang(answer: Any) -> Any:
        meta = answer[0]["meta_info"]
        values, tokens = change([entry[0] for entry in meta["output_token_logprobs"]]), answer[0]["output_ids"]
        padded = [*tokens, *tokens][: len(values)]
        meta["output_token_logprobs"] = [[value, token, None] for value, token in zip(values, padded, strict=True)]
        return answer

    return {"vllm": _json(vllm), "sglang": _json(sglang)}


def _spans(change: Callable[[list[dict[str, Any]]], Any]) -> dict[str, Behaviour]:
    def vllm(answer: Any) -> Any:
        answer["choices"][0]["weight_versions"] = change(answer["choices"][0]["weight_versions"])
        return answer

    def sglang(answer: Any) -> Any:
        answer[0]["meta_info"]["weight_versions"] = change(answer[0]["meta_info"]["weight_versions"])
        return answer

    return {"vllm": _json(vllm), "sglang": _json(sglang)}


def _reason(value: Any) -> dict[str, Behaviour]:
    return {
        "vllm": _first_of_vllm(finish_reason=value),
        "sglang": _first_of_sglang(finish_reason={"type": value} if isinstance(value, str) else value),
    }


def _long(answer: Any) -> Any:
    """The first completion twelve times as long as asked, consistently."""
    if isinstance(answer, dict):
        choice = answer["choices"][0]
        choice["token_ids"] = [5] * 144
        choice["logprobs"]["content"] = [{"token_id": 5, "logprob": -1.0}] * 144
        choice["weight_versions"][0]["end"] = 144
    else:
        meta = answer[0]["meta_info"]
        answer[0]["output_ids"] = [5] * 144
        meta["output_token_logprobs"] = [[-1.0, 5, None]] * 144
        meta["weight_versions"][0]["end"] = 144
    return answer


def _empty(answer: Any) -> Any:
    """The first completion has no tokens, consistently, and says that it stopped."""
    if isinstance(answer, dict):
        answer["choices"][0] |= {"token_ids": [], "logprobs": {"content": []}, "weight_versions": []}
    else:
        answer[0]["output_ids"] = []
        answer[0]["meta_info"] |= {"output_token_logprobs": [], "weight_versions": []}
    return answer


def _two_tokens(answer: Any, tokens: list[int], reason: str) -> Any:
    """The first completion replaced by two tokens, consistently."""
    if isinstance(answer, dict):
        choice = answer["choices"][0]
        choice |= {"token_ids": tokens, "finish_reason": reason}
        choice["logprobs"]["content"] = [{"token_id": token, "logprob": -1.0} for token in tokens]
        choice["weight_versions"][0]["end"] = 2
    else:
        meta = answer[0]["meta_info"]
        answer[0]["output_ids"] = tokens
        meta |= {
            "output_token_logprobs": [[-1.0, token, None] for token in tokens],
            "finish_reason": {"type": reason},
        }
        meta["weight_versions"][0]["end"] = 2
    return answer


def _short(answer: Any) -> Any:
    return _two_tokens(answer, [5, 6], "length")


def _stopped_anywhere(answer: Any) -> Any:
    return _two_tokens(answer, [5, 6], "stop")


def _past_the_stop(answer: Any) -> Any:
    return _two_tokens(answer, [1, 5], "stop")


_VALUES: dict[str, dict[str, Behaviour]] = {
    "token beyond the vocabulary": _tokens(lambda ids: [19, *ids[1:]]),
    "token of the other model": _tokens(lambda ids: [151643, *ids[1:]]),
    "negative token": _tokens(lambda ids: [-1, *ids[1:]]),
    "token beyond 32 bits": _tokens(lambda ids: [1 << 40, *ids[1:]]),
    "token beyond 64 bits": _tokens(lambda ids: [1 << 90, *ids[1:]]),
    "float token": _tokens(lambda ids: [float(ids[0]), *ids[1:]]),
    "token as text": _tokens(lambda ids: [str(ids[0]), *ids[1:]]),
    "token null": _tokens(lambda ids: [None, *ids[1:]]),
    "token true": _tokens(lambda ids: [True, *ids[1:]]),
    "one token too many": _tokens(lambda ids: [5, *ids]),
    "one token missing": _tokens(lambda ids: ids[1:]),
    "goes on after the stop": {engine: _json(_past_the_stop) for engine in ENGINES},
    "stops at another token": {engine: _json(_stopped_anywhere) for engine in ENGINES},
    "log-probabilities all 0": _logprobs(lambda values: [0.0] * len(values)),
    "log-probability +5": _logprobs(lambda values: [5.0, *values[1:]]),
    "log-probability +0.01": _logprobs(lambda values: [0.01, *values[1:]]),
    "log-probability -9999": _logprobs(lambda values: [-9999.0, *values[1:]]),
    "log-probability NaN": _logprobs(lambda values: [float("nan"), *values[1:]]),
    "log-probability null": _logprobs(lambda values: [None, *values[1:]]),
    "log-probability -inf": _logprobs(lambda values: [float("-inf"), *values[1:]]),
    "log-probability beyond float32": _logprobs(lambda values: [-1e300, *values[1:]]),
    "log-probability as text": _logprobs(lambda values: [str(values[0]), *values[1:]]),
    "one log-probability missing": _logprobs(lambda values: values[1:]),
    "one log-probability too many": _logprobs(lambda values: [*values, -1.0]),
    "no log-probabilities": _logprobs(lambda values: []),
    "no versions": _spans(lambda spans: []),
    "versions null": _spans(lambda spans: None),
    "a version that was not sent": _spans(lambda spans: [spans[0] | {"version": "7"}]),
    "an old version": _spans(lambda spans: [spans[0] | {"version": "0"}]),
    "a version's name": _spans(lambda spans: [spans[0] | {"version": "latest"}]),
    "a version in other digits": _spans(lambda spans: [spans[0] | {"version": "\uff11"}]),
    "a version as a number": _spans(lambda spans: [spans[0] | {"version": 1}]),
    "versions that begin late": _spans(lambda spans: [spans[0] | {"start": 1, "end": spans[0]["end"] + 1}]),
    "versions that end early": _spans(lambda spans: [spans[0] | {"end": spans[0]["end"] - 1}]),
    "versions that end late": _spans(lambda spans: [spans[0] | {"end": spans[0]["end"] + 1}]),
    "versions twice": _spans(lambda spans: spans * 2),
    "versions that overlap": _spans(lambda spans: [spans[0], spans[0] | {"version": "2"}]),
    "a negative span": _spans(lambda spans: [spans[0] | {"start": 0, "end": -3}, spans[0] | {"start": -3}]),
    "a reason that is none": _reason("tool_calls"),
    "an error as a reason": _reason("error"),
    "no reason": _reason(None),
    "says length too early": {engine: _json(_short) for engine in ENGINES},
    "longer than asked": {engine: _json(_long) for engine in ENGINES},
    "no tokens": {engine: _json(_empty) for engine in ENGINES},
}

_VLLM: dict[str, Behaviour] = {
    "duplicate index": _choices(lambda choices: [choices[0], choices[0], choices[2]]),
    "index from 1": _choices(lambda choices: [choice | {"index": choice["index"] + 1} for choice in choices]),
    "negative index": _choices(lambda choices: [choices[0] | {"index": -1}, *choices[1:]]),
    "index as text": _choices(lambda choices: [choices[0] | {"index": "0"}, *choices[1:]]),
    "one completion missing": _choices(lambda choices: choices[:-1]),
    "one completion too many": _choices(lambda choices: [*choices, choices[0] | {"index": 3}]),
    "no completions": _choices(lambda choices: []),
    "completions null": _choices(lambda choices: None),
    "a completion null": _choices(lambda choices: [None, *choices[1:]]),
    "another request's id": _json(lambda answer: answer | {"request_id": "generate-tokens-9-9-9"}),
    "no id": _json(lambda answer: {key: value for key, value in answer.items() if key != "request_id"}),
    "an empty id": _json(lambda answer: answer | {"request_id": ""}),
    "SGLang's form": _json(lambda answer: [{"output_ids": [5], "meta_info": {"id": "x"}}] * 3),
}
_SGLANG: dict[str, Behaviour] = {
    "completions in another order": _json(lambda answer: answer[::-1]),
    "the same completion three times": _json(lambda answer: [answer[0]] * 3),
    "one completion missing": _json(lambda answer: answer[:-1]),
    "one completion too many": _json(lambda answer: [*answer, answer[0]]),
    "no completions": _json(lambda answer: []),
    "not a list": _json(lambda answer: answer[0]),
    "a completion null": _json(lambda answer: [None, *answer[1:]]),
    "another request's id": _first_of_sglang(id="9-9-9/0"),
    "no meta": _json(lambda answer: [{"output_ids": answer[0]["output_ids"]}, *answer[1:]]),
    "log-probabilities of other tokens": _first_of_sglang(output_token_logprobs=[[-1.0, 7, None]] * 3),
    "vLLM's form": _json(lambda answer: {"request_id": "x", "choices": []}),
}


def _nested(text: str) -> str:
    return text[:-1] + ',"deep":' + "[" * 100_000 + "]" * 100_000 + text[-1] if text[0] == "{" else "[" * 100_000


_BODIES: dict[str, Behaviour] = {
    "html": _text(lambda text: "<html><body>502 Bad Gateway</body></html>"),
    "nothing": _text(lambda text: ""),
    "null": _text(lambda text: "null"),
    "an empty object": _text(lambda text: "{}"),
    "a number": _text(lambda text: "7"),
    "bad UTF-8": _text(lambda text: text.encode().replace(b'id"', b'\xff\xfe"')),
    "UTF-16": _text(lambda text: text.encode("utf-16")),
    "half an answer": _text(lambda text: text[: len(text) // 2]),
    "two answers in one": _text(lambda text: text + text),
    "a comma too many": _text(lambda text: text[:-1] + "," + text[-1]),
    "100,000 brackets": _text(_nested),
    "an error with status 200": _text(lambda text: json.dumps({"error": {"message": "out of memory"}})),
    "python's repr": _text(lambda text: repr(json.loads(text))),
}

_STATUS: dict[str, Behaviour] = {
    "201 that creates nothing": _status(201, "Created"),
    "204 without an answer": _status(204, "No Content"),
    "302 to itself": _status(302, "Found", "Location: /\r\n", good_body=True),
    "301 to another host": _status(301, "Moved", "Location: http://127.0.0.1:1/\r\n"),
    "307 to the same path": _status(307, "Temporary Redirect", "Location: generate\r\n", good_body=True),
    "304 not modified": _status(304, "Not Modified"),
    "500": _status(500, "Internal Server Error"),
    "500 with a good answer": _status(500, "Internal Server Error", good_body=True),
    "502": _status(502, "Bad Gateway"),
    "504": _status(504, "Gateway Timeout"),
    "503 for ever": _status(503, "Service Unavailable"),
    "429 for ever, ask in an hour": _status(429, "Too Many Requests", "Retry-After: 3600\r\n"),
    "429 with a Retry-After of words": _status(429, "Too Many Requests", "Retry-After: soon\r\n"),
    "408": _status(408, "Request Timeout"),
    "400": _status(400, "Bad Request"),
    "401": _status(401, "Unauthorized"),
    "404": _status(404, "Not Found"),
    "413": _status(413, "Content Too Large"),
    "999": _status(999, "What"),
}


def _raw(*parts: bytes, then: str = "close") -> Behaviour:
    """Bytes instead of an answer, and then the end, a reset, or silence."""

    async def behave(asked: Asked) -> None:
        for part in parts:
            await asked.raw(part)
        await _end(asked, then)

    return behave


async def _end(asked: Asked, how: str) -> None:
    if how == "hold":
        await asyncio.sleep(_HOLD_S)
    elif how == "reset":
        asked.writer.transport.abort()
    raise ConnectionError


def _framed(make: Callable[[bytes], bytes], then: str = "close") -> Behaviour:
    """A good answer in a bad frame."""

    async def behave(asked: Asked) -> None:
        await asked.raw(make(json.dumps(answer_to(asked.body)).encode()))
        await _end(asked, then)

    return behave


def _ok(content: bytes, headers: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\n" + headers + b"\r\n\r\n" + content


_FRAMES: dict[str, Behaviour] = {
    "closes at once": _raw(),
    "resets": _raw(then="reset"),
    "half a status line": _raw(b"HTTP/1.1 20"),
    "no HTTP": _raw(b"SSH-2.0-OpenSSH_9.6\r\n"),
    "a status that is no number": _raw(b"HTTP/1.1 OK fine\r\n\r\n"),
    "HTTP/9": _raw(b"HTTP/9.9 200 OK\r\nContent-Length: 2\r\n\r\n{}"),
    "a header without a colon": _raw(b"HTTP/1.1 200 OK\r\nnonsense\r\n\r\n{}"),
    "a header of a megabyte": _raw(b"HTTP/1.1 200 OK\r\nX: " + b"x" * (1 << 20) + b"\r\n\r\n{}"),
    "a million headers": _raw(b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 100_000 + b"\r\n{}"),
    "a negative length": _framed(lambda body: _ok(body, b"Content-Length: -1")),
    "a length that is no number": _framed(lambda body: _ok(body, b"Content-Length: many")),
    "two lengths": _framed(lambda body: _ok(body, b"Content-Length: 1\r\nContent-Length: %d" % len(body))),
    "a length that is too long, then closed": _framed(lambda body: _ok(body, b"Content-Length: %d" % (len(body) + 9))),
    "a length that is too short": _framed(lambda body: _ok(body, b"Content-Length: %d" % (len(body) - 9))),
    "half the body, then a reset": _framed(lambda body: _ok(body[:50], b"Content-Length: %d" % len(body)), "reset"),
    "chunks without an end": _framed(
        lambda body: _ok(b"%x\r\n%s\r\n" % (len(body), body), b"Transfer-Encoding: chunked")
    ),
    "a chunk of no size": _framed(lambda body: _ok(b"zz\r\n%s\r\n0\r\n\r\n" % body, b"Transfer-Encoding: chunked")),
    "a chunk longer than it says": _framed(
        lambda body: _ok(b"5\r\n%s\r\n0\r\n\r\n" % body, b"Transfer-Encoding: chunked")
    ),
    "compressed without being asked": _framed(
        lambda body: _ok(
            gzip.compress(body), b"Content-Encoding: gzip\r\nContent-Length: %d" % len(gzip.compress(body))
        )
    ),
    "a compression that is none": _framed(
        lambda body: _ok(body, b"Content-Encoding: zippy\r\nContent-Length: %d" % len(body))
    ),
    "an interim answer and no other": _raw(b"HTTP/1.1 100 Continue\r\n\r\n" * 50),
}


async def _big_body(asked: Asked) -> None:
    await asked.raw(b"HTTP/1.1 200 OK\r\nContent-Length: 400000000\r\n\r\n")
    await _stream(asked, 0.0)


async def _big_chunks(asked: Asked) -> None:
    await asked.raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    await _stream(asked, 0.0, chunked=True)


async def _big_error(asked: Asked) -> None:
    await asked.raw(b"HTTP/1.1 500 No\r\nContent-Length: 400000000\r\n\r\n")
    await _stream(asked, 0.0)


async def _stream(asked: Asked, pause_s: float, chunked: bool = False) -> None:
    piece = b" " * 65536
    for _ in range(6000):
        await asked.raw(b"%x\r\n%s\r\n" % (len(piece), piece) if chunked else piece)
        if pause_s:
            await asyncio.sleep(pause_s)


async def _byte_by_byte(asked: Asked) -> None:
    await asked.raw(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
    for _ in range(2000):
        await asked.raw(b" ")
        await asyncio.sleep(0.03)


async def _slow_headers(asked: Asked) -> None:
    await asked.raw(b"HTTP/1.1 200 OK\r\n")
    for _ in range(2000):
        await asked.raw(b"X: y\r\n")
        await asyncio.sleep(0.03)


_SIZES: dict[str, Behaviour] = {
    "a body of 400 MB": _big_body,
    "chunks of 400 MB": _big_chunks,
    "an error of 400 MB": _big_error,
}

_TIMES: dict[str, Behaviour] = {
    "never answers": _raw(then="hold"),
    "stops after the status": _raw(b"HTTP/1.1 200 OK\r\n", then="hold"),
    "stops in the body": _framed(lambda body: _ok(body[:50], b"Content-Length: %d" % len(body)), "hold"),
    "a byte now and then": _byte_by_byte,
    "a header now and then": _slow_headers,
}
"""They end by the age of the request, which has a limit of its own in the test."""


async def _stale_second_answer(asked: Asked) -> None:
    """Every answer is there twice; on a kept connection the next request would read the second one."""
    body = json.dumps(answer_to(asked.body)).encode()
    await asked.raw(_ok(body, b"Content-Length: %d" % len(body)) * 2)


async def _of_the_request_before(asked: Asked) -> None:
    """Answers are one request late."""
    before = getattr(_of_the_request_before, "bodies", {}).get(asked.path, asked.body)
    _of_the_request_before.bodies = {asked.path: asked.body}  # type: ignore[attr-defined]
    await asked.reply(json.dumps(answer_to(before)))


async def _of_another_prompt(asked: Asked) -> None:
    """The id of another request of this rollout, with its completions."""
    text = json.dumps(asked.body).replace("-0", "-1").replace("-2", "-0")
    await asked.reply(json.dumps(answer_to(json.loads(text))))


_ORDER: dict[str, Behaviour] = {
    "every answer twice": _stale_second_answer,
    "one request late": _of_the_request_before,
    "another request's completions": _of_another_prompt,
}


def _table() -> list[tuple[str, str, Behaviour]]:
    found: list[tuple[str, str, Behaviour]] = []
    for engine in ENGINES:
        own = _VLLM if engine == "vllm" else _SGLANG
        shared = _BODIES | _STATUS | _FRAMES | _SIZES | _ORDER
        values = {name: behaviours[engine] for name, behaviours in _VALUES.items()}
        found += [(f"{engine}: {name}", engine, behave) for name, behave in (values | own | shared).items()]
    return found


WRONG = _table()
SLOW = [(f"{engine}: {name}", engine, behave) for engine in ENGINES for name, behave in _TIMES.items()]
