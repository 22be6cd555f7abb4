"""What the sample browser and `watch` call a group by: its problem, whatever template it was put in."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chat_tokenizer import chat_tokenizer
from rich.console import Console
from support.record import recorded_group, write_record

from dppo_megatron.config.data import TrainSetConfig
from dppo_megatron.config.observe import SamplesConfig
from dppo_megatron.config.resolved_sets import TEMPLATES, train_set_configs
from dppo_megatron.config.schema import Config
from dppo_megatron.data.sets import load_set
from dppo_megatron.observe.samples import SampleWriter
from dppo_megatron.types import Prompt, RolloutPrompt
from dppo_megatron.workbench.report.page import read_samples
from dppo_megatron.workbench.watch.frame import Latest, frame

QUESTIONS = ("How many primes are below 40?", "What is 6 * 7?")
INSTRUCTION = "Solve the following math problem step by step, and end with Answer: and the answer.\n\n"
SYSTEM = {"role": "system", "content": "You are a careful mathematician."}


def _prompts(path: Path, problems: list[Any], **own: Any) -> list[Prompt]:
    lines = (json.dumps({"problem": problem, "answer": "42"}) + "\n" for problem in problems)
    (path / "a.jsonl").write_text("".join(lines))
    config = Config()
    config.data.train_sets = {"s": TrainSetConfig(path=str(path / "a.jsonl"), max_prompt_tokens=10_000, **own)}
    return load_set(train_set_configs(config)["s"], chat_tokenizer()).prompts


def _titles(path: Path, prompts: list[Prompt]) -> tuple[list[str], str]:
    """Of the page's groups, and what `watch` shows."""
    run = write_record(path / "run", 3, sampled=range(1, 2))
    shutil.rmtree(run / "samples")
    (run / "samples").mkdir()
    groups = [recorded_group(position, 4, "so it is") for position in range(len(prompts))]
    for one, prompt in zip(groups, prompts, strict=True):
        object.__setattr__(one, "group", replace(one.group, selected=RolloutPrompt(prompt, 1.0, 1.0)))
    SampleWriter(run / "samples", 0, 1, SamplesConfig())._write(2, groups)
    latest, console = Latest(run), Console(width=120, file=io.StringIO())
    latest.look()
    console.print(frame(latest, 120))
    return [group["title"] for group in read_samples(run, "", 10**6).steps[2]], console.file.getvalue()


@pytest.mark.parametrize("template", [*TEMPLATES, ""])
def test_two_groups_differ_with_every_shipped_template(tmp_path: Path, template: str) -> None:
    titles, watched = _titles(tmp_path, _prompts(tmp_path, [*QUESTIONS], template=template))
    assert titles == [*QUESTIONS] and f"\n {QUESTIONS[0]}\n" in watched


@pytest.mark.parametrize("template", ["qwen3_nothink", "chat_boxed"])
def test_of_messages_it_is_the_last_user_turn(tmp_path: Path, template: str) -> None:
    """Without the instruction that verl's sets begin every problem with."""
    turns = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Good day."}]
    chats = [[SYSTEM, *turns, {"role": "user", "content": INSTRUCTION + question}] for question in QUESTIONS]
    titles, watched = _titles(tmp_path, _prompts(tmp_path, chats, template=template))
    assert titles == [f"... {question}" for question in QUESTIONS] and f"\n ... {QUESTIONS[0]}\n" in watched
