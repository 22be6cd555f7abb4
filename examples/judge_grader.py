"""A judge: another model, behind any OpenAI-compatible server, gives each completion a mark from 0 to 10.

    export JUDGE_URL=http://judge:8000/v1 JUDGE_MODEL=qwen3-32b JUDGE_API_KEY=...
    dppo-megatron train CONFIG reward.function=examples.judge_grader:judge reward.correct_from=0.8 \\
        reward.min_self_consistency=0 reward.max_concurrent=512 reward.timeout_s=120

An `async def` grader: one process has hundreds of requests in flight, `reward.max_concurrent` at most. A grading that
the judge does not answer within `reward.timeout_s` has failed; it is not a 0. `min_self_consistency=0` spares the judge
2,000 references.
"""

import asyncio
import math
import os
import re
from collections.abc import Mapping
from typing import Any

import aiohttp

from dppo_megatron.types import Grade

_QUESTION = """A student was given this problem:

{problem}

The right answer is {answer}. The student wrote:

{completion}

Is the student's final answer right, and the way to it sound? Reply with a mark from 0 (wrong) to 10 (right) only."""
_NO_MARK = re.compile(r"<think>.*?(?:</think>|\Z)|\s*(?:/|out of)\s*10\b", re.DOTALL)  # 3/10 is 3
_BUSY = (429, 503)
_sessions: list[aiohttp.ClientSession] = []


async def judge(completion: str, answer: str, *, row: Mapping[str, Any], prompt: str, finish_reason: str) -> Grade:
    """The last number of the judge's reply over 10; without a number the grading has failed. A truncated completion is
    a 0 without asking the judge."""
    if finish_reason == "length":
        return Grade(0.0, why="truncated")
    question = _QUESTION.format(problem=row.get("problem", prompt), answer=answer, completion=completion[-8000:])
    reply = await _ask(question)
    marks = re.findall(r"\d+(?:\.\d+)?", _NO_MARK.sub("", reply))
    if not marks:
        return Grade(math.nan, failure=f"got no mark from the judge: {reply[:60]!r}")
    return Grade(min(float(marks[-1]), 10.0) / 10, extracted=reply, why="marked")


async def _ask(question: str) -> str:
    if not _sessions:  # one session for the life of the process, created inside its event loop
        headers = {"Authorization": f"Bearer {os.environ.get('JUDGE_API_KEY', '')}"}
        _sessions.append(aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(limit=0)))
    body = {
        "model": os.environ["JUDGE_MODEL"],
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": 8,
        # Qwen3 would spend its 8 tokens on thinking; for vLLM and SGLang only, other servers may refuse the field
        "chat_template_kwargs": {"enable_thinking": False},
    }
    wait_s = 1.0
    while True:  # until reward.timeout_s ends it
        async with _sessions[0].post(f"{os.environ['JUDGE_URL']}/chat/completions", json=body) as response:
            if response.status not in _BUSY:
                response.raise_for_status()
                return str((await response.json())["choices"][0]["message"]["content"])
        await asyncio.sleep(wait_s)
        wait_s *= 2
