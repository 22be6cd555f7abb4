"""Answers as arrays (`in_engine/dppo_vllm_arrays.py`): the same completions as the JSON's, and no byte is believed.

The engine's side is packed here by hand; tests/real_servers asks a real vLLM for both forms.
"""

from __future__ import annotations

import importlib
import json
import struct
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engines.rig import Rig, requests, right, run
from support.engines.stub import Asked, StubServers, answer_to

from dppo_megatron.rollout.servers.dialects import SGLangDialect, VLLMDialect
from dppo_megatron.rollout.servers.http import BadAnswer
from dppo_megatron.rollout.servers.in_engine import dppo_arrays
from dppo_megatron.rollout.servers.wire import Expected, GenerateRequest, Sampled, VersionSpan, as_sampled, checked

GROUP = requests(1)[0]
EXPECTED = Expected(19, 1, 2)


def completions(answer: Any) -> list[tuple[dict[str, Any], list[int], list[float]]]:
    """(header, token ids, log-probabilities) of each completion of a JSON answer, of either engine."""
    if isinstance(answer, list):
        return [
            (
                {"id": meta["id"], "finish_reason": meta["finish_reason"]["type"]}
                | {"weight_versions": meta["weight_versions"]},
                one["output_ids"],
                [triple[0] for triple in meta["output_token_logprobs"]],
            )
            for one in answer
            for meta in [one["meta_info"]]
        ]
    name = answer["request_id"].removeprefix("generate-tokens-")
    return [
        (
            {"id": f"{name}/{one['index']}"} | {name: one[name] for name in ("finish_reason", "weight_versions")},
            one["token_ids"],
            [entry["logprob"] for entry in one["logprobs"]["content"]],
        )
        for one in answer["choices"]
    ]


def packed(answer: Any, **first: Any) -> bytes:
    """A JSON answer as arrays, with changes to the header of its first completion."""
    found = completions(answer)
    heads = [head | {"tokens": len(ids)} for head, ids, _ in found]
    if first:
        heads[0] |= first
    header = json.dumps({"answers": heads}).encode()
    tokens = [token for _, ids, _ in found for token in ids]
    values = [value for *_, own in found for value in own]
    return struct.pack("<I", len(header)) + header + struct.pack(f"<{len(tokens)}i{len(values)}f", *tokens, *values)


def body_of(group: GenerateRequest) -> Any:
    return json.loads(VLLMDialect().rounds(group)[-1][0].body)


GOOD = answer_to(body_of(GROUP))


def read(content: bytes) -> list[Sampled]:
    return checked(VLLMDialect(arrays=True).read([content], GROUP), GROUP, EXPECTED)


def same(ours: list[Sampled], theirs: list[Sampled]) -> bool:
    return all(
        np.array_equal(a.token_ids, b.token_ids)
        and np.array_equal(a.logprobs, b.logprobs)
        and (a.finish_reason, a.weights_versions) == (b.finish_reason, b.weights_versions)
        for a, b in zip(ours, theirs, strict=True)
    )


def test_both_forms_say_the_same() -> None:
    """Also where the JSON's choices come in another order."""
    plain = checked(VLLMDialect().read([json.dumps(GOOD).encode()], GROUP), GROUP, EXPECTED)
    assert same(read(packed(GOOD)), plain)
    turned = GOOD | {"choices": GOOD["choices"][::-1]}
    assert same(checked(VLLMDialect().read([json.dumps(turned).encode()], GROUP), GROUP, EXPECTED), plain)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read"),
        (b"\xff\xff\xff\xff", "cannot be read"),
        (packed(GOOD)[:-1], "bytes of arrays"),
        (packed(GOOD) + b"\0\0\0\0", "bytes of arrays"),
        (packed(GOOD | {"request_id": "generate-tokens-other"}), "answers request"),
        (packed(GOOD | {"choices": []}), "0 completions instead of 3"),
        (packed(GOOD | {"choices": GOOD["choices"][::-1]}), "instead of"),
        (packed(GOOD, id=f"{GROUP.request_id}/1"), "answers request"),
        (packed(GOOD, tokens=-1), "cannot be read"),
        (packed(GOOD, tokens=1 << 40), "bytes of arrays"),
        (packed(GOOD, finish_reason="error"), "finish reason 'error'"),
        (packed(GOOD, weight_versions=[]), "weights versions"),
        (packed(GOOD, weight_versions=[{"version": "9", "start": 0, "end": 1}]), "not this rollout's"),
    ],
)
def test_what_is_wrong_is_said(content: bytes, message: str) -> None:
    with pytest.raises(BadAnswer, match=message):
        read(content)


def test_no_bytes_make_anything_but_a_checked_answer() -> None:
    """Bytes changed, cut or put in anywhere: a bad answer, or completions that keep every rule. Both come up."""
    outcomes = {"bad": 0, "read": 0}

    @settings(max_examples=300, deadline=None)
    @given(data=st.data())
    def change(data: st.DataObject) -> None:
        content = bytearray(packed(GOOD))
        for _ in range(data.draw(st.integers(1, 4))):
            at, size = data.draw(st.integers(0, len(content) - 1)), data.draw(st.integers(0, 8))
            replaced = st.binary(max_size=8) | st.binary(min_size=size, max_size=size)
            content[at : at + size] = data.draw(replaced)
        try:
            found = read(bytes(content))
        except BadAnswer:
            outcomes["bad"] += 1
            return
        outcomes["read"] += 1
        assert len(found) == GROUP.count
        for one in found:
            assert 0 < len(one.token_ids) == len(one.logprobs) <= GROUP.max_tokens
            assert 0 <= one.token_ids.min() <= one.token_ids.max() < 19 and np.isfinite(one.logprobs).all()

    change()
    assert min(outcomes.values()) > 0, outcomes


def test_sglangs_arrays() -> None:
    """Its header names the answers by their ids, in the order of the batch."""
    plain, arrays = SGLangDialect(19, seeded=True), SGLangDialect(19, seeded=True, arrays=True)
    answers = answer_to(json.loads(plain.rounds(GROUP)[-1][0].body))
    expected = plain.read([json.dumps(answers).encode()], GROUP)
    assert same(checked(arrays.read([packed(answers)], GROUP), GROUP, EXPECTED), expected)
    for content, message in (
        (packed(answers)[:-1], "bytes of arrays"),
        (packed(answers, id="another"), "answers request 'another'"),
        (packed(answers, tokens=-1), "cannot be read"),
        (packed(answers[::-1]), "instead of"),
        (packed(answers[:-1]), "2 completions instead of 3"),
    ):
        with pytest.raises(BadAnswer, match=message):
            arrays.read([content], GROUP)


def test_the_engines_file_writes_the_form() -> None:
    """`in_engine/dppo_arrays.py`, which both engines' files use, against what is packed here by hand."""
    content = dppo_arrays.packed(completions(GOOD))
    assert same(read(content), read(packed(GOOD))) and int.from_bytes(content[:4], "little") % 4 == 0


def test_the_engines_file_hides_no_mistake() -> None:
    """Two completions that lack what the other has too much would move each other's log-probabilities, in a sum that
    is right."""
    with pytest.raises(ValueError, match="1 log-probabilities for 2 tokens"):
        dppo_arrays.packed([({}, [1, 2], [-0.5]), ({}, [3], [-0.5, -0.25])])


def test_sglangs_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it writes is what its JSON says; log-probabilities of other tokens are refused there too."""
    monkeypatch.syspath_prepend(str(Path(dppo_arrays.__file__).parent))
    packed_answers = importlib.import_module("dppo_sglang_server").packed_answers
    plain, arrays = SGLangDialect(19, seeded=True), SGLangDialect(19, seeded=True, arrays=True)
    answers = answer_to(json.loads(plain.rounds(GROUP)[-1][0].body))
    expected = plain.read([json.dumps(answers).encode()], GROUP)
    assert same(arrays.read([packed_answers(answers)], GROUP), expected)
    answers[1]["meta_info"]["output_token_logprobs"][0][1] += 1
    with pytest.raises(BadAnswer, match="other tokens"):
        plain.read([json.dumps(answers).encode()], GROUP)
    with pytest.raises(ValueError, match="other tokens"):
        packed_answers(answers)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_group_that_was_ended_before_its_first_token(engine: str) -> None:
    """Arrays of nothing are an answer: each completion is an abort."""
    dialect = VLLMDialect(arrays=True) if engine == "vllm" else SGLangDialect(19, arrays=True)
    heads = [{"id": f"{GROUP.request_id}/{i}", "finish_reason": "abort"} for i in range(GROUP.count)]
    found = checked(dialect.read([dppo_arrays.packed((head, [], []) for head in heads)], GROUP), GROUP, EXPECTED)
    assert [(len(one.token_ids), one.finish_reason) for one in found] == [(0, "abort")] * GROUP.count


def test_through_a_client() -> None:
    """From the socket to what a rank takes."""

    async def arrays(asked: Asked) -> None:
        await asked.reply(packed(answer_to(asked.body)))

    with StubServers({"a": arrays}) as stubs:
        rig = Rig([("vllm", stubs.url("a"))])
        rig.clients.add(msgspec.structs.replace(rig.known[0], dialect=VLLMDialect(arrays=True)))
        try:
            fleet = rig.fleet([0], {})
            work = run(fleet, requests(5))
            assert work.retries == 0 and right(rig.take(), 5, 3) and stubs.asked == {"a": 5}
            fleet.close()
        finally:
            rig.close()


def test_a_completion_that_ends_at_its_limit_has_ended() -> None:
    """Whatever the engine calls it: with its stop token it has come to its end, as its chance says; and only
    a limit before the group's is early. Parts keep their limits, and those that are none are asked for together."""
    group = GenerateRequest("a-0", (5,), 3, 7, max_tokens=4, stop_token_ids=(1,), limits=(2, 4, 3))
    assert [one.request_id for one in group.each()] == ["a-0.0", "a-0.1", "a-0.2"]
    assert [(one.seed, one.max_tokens) for one in group.each()] == [(7, 2), (8, 4), (9, 3)]
    assert (group.sockets, group.part(1, 1).limits, group.part(1, 2).limits) == (3, (), (4, 3))
    assert group.part(1, 1).each() == [group.part(1, 1)]
    [call] = SGLangDialect(vocab_size=19).rounds(group)[-1]
    assert [one["max_new_tokens"] for one in json.loads(call.body)["sampling_params"]] == [2, 4, 3]

    def sampled(*tokens: int, reason: str = "length") -> Sampled:
        return as_sampled(tokens, [-1.0] * len(tokens), reason, [VersionSpan("1", 0, len(tokens))])

    for answer, wanted in (
        ([sampled(3, 4), sampled(2, 3, 4, 5), sampled(2, 3, 1)], ["early", "length", "stop"]),
        ([sampled(3, 1), sampled(2, 3, reason="abort"), sampled(2, 3, 4, reason="abort")], ["stop", "abort", "early"]),
    ):
        assert [one.finish_reason for one in checked(answer, group, EXPECTED)] == wanted
    with pytest.raises(BadAnswer, match="3 tokens for a limit of 2"):
        checked([sampled(3, 4, 5), sampled(1, reason="stop"), sampled(1, reason="stop")], group, EXPECTED)
    # an SGLang that drafts takes an abort before it has cut off what it drafted behind the end
    for drafted in ((3, 1, 5, 6), (3, 1, 5), (3, 4, 5, 6, 7), (3, 4, 5, 6, 1), (3, 1, 1)):
        answer = [sampled(3, reason="abort"), sampled(*drafted, reason="abort"), sampled(2, 1, reason="abort")]
        found = checked(answer, group, EXPECTED)
        assert [one.finish_reason for one in found] == ["abort", "abort", "stop"], drafted
        assert found[1].token_ids.tolist() == list(drafted)
